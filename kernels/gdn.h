/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backends of include/kvcached/state.h.
 *
 * A call goes: gdn_check.c (every field, defaults filled in) -> gdn.c (first backend of the device
 * that can run it, or the one KVCACHED_STATE_BACKEND names) -> the backend. A gated delta net and
 * Mamba-2 are one recurrence with two rules; from the check on they are a struct kv_recur.
 *
 *	GDN        S [dim_v][dim_k]   decay e^g, then S += beta (v - S k) k^T     out = S q
 *	Mamba-2    S [P][N]           decay e^(A dt),   S += dt x B^T             out = S C + D x
 *	           q is C, k is B, v is x, a is dt; heads_k are groups
 */
#ifndef KV_KERNELS_GDN_H
#define KV_KERNELS_GDN_H

#include <math.h>
#include <stdbool.h>

#include <kvcached/state.h>

#include "include/internal/error.h"
#include "kernels/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

enum kv_recur_rule {
	KV_RULE_DELTA,
	KV_RULE_SSD,
};

#define KV_NORM_EPS 1e-6

struct kv_recur {
	int32_t device;
	int32_t dtype;
	int32_t rule; /* enum kv_recur_rule */
	int32_t heads_k;
	int32_t heads;
	int32_t dim_k;
	int32_t dim_v;
	int32_t normalize;
	struct kv_state_batch batch;
	const void *q;
	const void *k;
	const void *v;
	const void *a; /* SSD: dt */
	const void *b; /* SSD: NULL */
	int64_t q_stride;
	int64_t k_stride;
	int64_t v_stride;
	int64_t a_stride;
	int64_t b_stride;
	const float *a_log;
	const float *dt_bias;
	const float *d; /* SSD */
	float scale;
	float dt_min;
	float dt_max;
	void *out;
	int64_t out_stride;
	struct kv_view state;
	const void *conv_weight;
	const void *conv_bias;
	int32_t conv_width;
	int32_t activation;
	struct kv_conv_rows conv;
	size_t workspace_bytes;
	void *workspace;
	void *stream;
};

/* Reasons against a backend: bits of enum kv_state_reason, and a sentence for each. */
struct kv_state_reasons {
	uint64_t bits;
	size_t len; /* of text */
	char text[KV_ERROR_BYTES];
};

struct kv_state_backend {
	const char *name;
	int device; /* enum kv_device */

	/* Every reason against it is added to @why. NULL: runs everything. All convolve anything. */
	void (*compare)(const struct kv_recur *args, struct kv_state_reasons *why);

	/* Bytes of args->workspace that it needs; NULL: none. */
	size_t (*workspace_bytes)(const struct kv_recur *args);

	/* Return: 0, -EIO. */
	int (*run)(const struct kv_recur *args);
	int (*convolve)(const struct kv_conv1d_args *args);
};

extern const struct kv_state_backend kv_state_ref;  /* host: plain loops, the definition of right */
extern const struct kv_state_backend kv_state_cuda; /* token by token, states read once */
extern const struct kv_state_backend kv_state_chunk; /* chunks of 64 tokens on tensor cores */

extern const struct kv_state_backend *const kv_state_backends[]; /* preferred first, NULL last */

/* kv_state_find() - the backend called @name on @device, or NULL */
const struct kv_state_backend *kv_state_find(const char *name, int device);

/* kv_state_because() - one more reason */
void kv_state_because(struct kv_state_reasons *why, uint64_t bit, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

/* Whether @backend can. Return: 0; -ENOTSUP: @why, if not NULL, and kv_error_text() have all reasons. */
int kv_state_can_run(const struct kv_state_backend *backend, const struct kv_recur *args,
		     struct kv_state_reasons *why);

/* As the public calls, on one backend. */
int kv_gdn_on(const struct kv_state_backend *backend, const struct kv_gdn_args *args);
int kv_ssd_on(const struct kv_state_backend *backend, const struct kv_ssd_args *args);
int kv_conv1d_on(const struct kv_state_backend *backend, const struct kv_conv1d_args *args);

/* The workspace @backend wants; -ENOTSUP if it can't run @args whatever it is given. */
int kv_recur_workspace(const struct kv_state_backend *backend, const struct kv_recur *args,
		       size_t *ret_bytes);

/*
 * gdn_check.c: every field of @args, then a copy with defaults filled in.
 * @sizes_only: pointers are not looked at. Return: 0; -EINVAL, the text names the field.
 */
int kv_gdn_resolve(const struct kv_gdn_args *args, bool sizes_only, struct kv_recur *ret);
int kv_ssd_resolve(const struct kv_ssd_args *args, bool sizes_only, struct kv_recur *ret);
int kv_conv1d_resolve(const struct kv_conv1d_args *args, struct kv_conv1d_args *ret);

/* Launchers, in .cu files; their rows stand in gdn_backends_cuda.c. */
void kv_recur_step_compare(const struct kv_recur *args, struct kv_state_reasons *why);
int kv_recur_step(const struct kv_recur *args);
void kv_recur_chunk_compare(const struct kv_recur *args, struct kv_state_reasons *why);
size_t kv_recur_chunk_workspace(const struct kv_recur *args);
int kv_recur_chunk(const struct kv_recur *args);
int kv_conv1d_cuda(const struct kv_conv1d_args *args);

/* The convolution in front of @args as a call of its own, with its output at @out, dense. */
void kv_recur_conv(const struct kv_recur *args, void *out, struct kv_conv1d_args *ret);

#ifdef __cplusplus
}
#endif

/* A lane, as every backend sees it. */
struct kv_lane {
	int64_t start; /* its first token */
	int64_t computed;
	int32_t len;
	int32_t read; /* the row of its first state; null: zero, or padding */
	int32_t write;
	bool fresh; /* starts from the zero state */
	bool pad;
};

KV_HD static inline bool kv_row_is_null(const struct kv_state_batch *batch, int32_t row)
{
	return row < 0 || row == batch->null_row;
}

/* table[b][column], or -1 */
KV_HD static inline int32_t kv_state_table(const struct kv_state_batch *batch, int64_t b,
					   int64_t column)
{
	if (!batch->table || column < 0 || column >= batch->table_width)
		return -1;
	return batch->table[b * batch->table_width + column];
}

/* What is loaded does not wait for what was loaded before, but for columns of a table. */
KV_HD static inline struct kv_lane kv_lane_get(const struct kv_state_batch *batch, int64_t b)
{
	int32_t row = batch->read_rows ? batch->read_rows[b] : -1;
	int32_t i = batch->n_accepted ? batch->n_accepted[b] : 0;
	struct kv_lane lane;
	int64_t end;

	lane.start = batch->query_start_loc ? batch->query_start_loc[b] : b;
	lane.len = batch->query_start_loc ? batch->query_start_loc[b + 1] - (int32_t)lane.start : 1;
	lane.write = batch->write_rows ? batch->write_rows[b] : row;
	lane.computed = batch->n_computed ? batch->n_computed[b] : 0; /* unknown: not used */
	lane.fresh = batch->n_computed && lane.computed == 0;
	end = lane.computed + lane.len;

	if (batch->n_accepted)
		row = i >= 1 && i <= batch->step_width
			      ? batch->step_rows[b * batch->step_width + i - 1]
			      : -1;
	else if (!batch->read_rows)
		row = kv_state_table(batch, b, (lane.computed - 1) / batch->interval);
	lane.read = lane.fresh ? -1 : row;

	if (!batch->write_rows && batch->table)
		lane.write = kv_state_table(batch, b, (end - 1) / batch->interval);
	else if (!batch->write_rows && batch->step_rows)
		lane.write = -1; /* the state after the last token stands in step_rows already */

	if (lane.fresh) {
		lane.pad = kv_row_is_null(batch, lane.write);
		for (i = 0; i < batch->step_width && lane.pad && batch->step_rows; i++)
			lane.pad =
				kv_row_is_null(batch, batch->step_rows[b * batch->step_width + i]);
	} else {
		lane.pad = kv_row_is_null(batch, lane.read);
	}
	return lane;
}

/* The row of the checkpoint that stands after @n tokens of the sequence; -1: none is kept. */
KV_HD static inline int32_t kv_checkpoint_row(const struct kv_state_batch *batch, int64_t b,
					      int64_t n)
{
	if (!batch->table || n % batch->interval)
		return -1;
	return kv_state_table(batch, b, n / batch->interval - 1);
}

/* The row of the state after token @i of lane @b; -1: none is kept. */
KV_HD static inline int32_t kv_step_row(const struct kv_state_batch *batch, int64_t b, int64_t i)
{
	if (!batch->step_rows || i >= batch->step_width)
		return -1;
	return batch->step_rows[b * batch->step_width + i];
}

/* Bytes from state->base to S[0][0] of a row's head. */
KV_HD static inline int64_t kv_state_offset(const struct kv_view *state, int64_t row, int64_t head)
{
	return row * state->block_stride + head * state->head_stride;
}

KV_HD static inline int64_t kv_conv_offset(const struct kv_conv_rows *rows, int64_t row,
					   int64_t tap, int64_t channel)
{
	return row * rows->row_stride + tap * rows->tap_stride + channel * rows->channel_stride;
}

#endif
