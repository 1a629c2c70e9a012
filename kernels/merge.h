/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kv_merge() inside: merge.c checks and chooses, merge_ref.c is the host's, merge.cu the GPU's (with
 * cuda_absent.c in builds without CUDA). The arithmetic of a row is here, once for both.
 */
#ifndef KV_KERNELS_MERGE_H
#define KV_KERNELS_MERGE_H

#include <math.h>

#include <kvcached/merge.h>

#include "kernels/dtype.h"
#include "kernels/sink.h"

#ifdef __cplusplus
extern "C" {
#endif

int kv_merge_host(const struct kv_merge_args *args); /* args: resolved, T > 0 */
int kv_merge_cuda(const struct kv_merge_args *args);

#ifdef __cplusplus
}
#endif

/* Natural log-sum-exp of part @r of a row whose first lies at @lse. */
KV_HD static inline float kv_merge_lse(const struct kv_merge_args *a, const float *lse, int64_t r)
{
	float x = lse[r * a->lse_part_stride];

	if (!(x < INFINITY)) /* NaN too */
		return -INFINITY;
	return a->base == 2 ? x * 0.69314718f : x;
}

/* A row's largest lse, the sum of its weights relative to that, and what the result is divided by. */
struct kv_merge_row {
	float top;
	float factor; /* of sum w_r O_r */
	float lse;    /* of the result, in the base asked for */
};

KV_HD static inline struct kv_merge_row kv_merge_row(const struct kv_merge_args *a, const float *lse,
						     int h)
{
	struct kv_merge_row row = {-INFINITY, 0, -INFINITY};
	float sum = 0;

	for (int64_t r = 0; r < a->n_parts; r++) {
		float x = kv_merge_lse(a, lse, r);

		row.top = x > row.top ? x : row.top;
	}
	if (row.top != -INFINITY) {
		for (int64_t r = 0; r < a->n_parts; r++)
			sum += expf(kv_merge_lse(a, lse, r) - row.top);
		row.factor = 1 / sum;
		row.lse = row.top + logf(sum);
	}
	if (a->sinks) {
		row.factor *= kv_sink_factor(a->sinks[h], row.lse);
		if (a->lse_with_sink)
			row.lse = kv_sink_lse(a->sinks[h], row.lse);
	}
	if (a->base == 2)
		row.lse *= 1.44269504f;
	return row;
}

/* The weight of part @r in the sum; 0: its elements are not to be looked at. */
KV_HD static inline float kv_merge_weight(const struct kv_merge_args *a, const float *lse, int64_t r,
					  const struct kv_merge_row *row)
{
	if (a->only_part && a->only_part != r + 1)
		return 0;
	return row->top == -INFINITY ? 0 : expf(kv_merge_lse(a, lse, r) - row->top);
}

#endif
