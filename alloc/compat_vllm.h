/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reference calculators: page sizes, groups, block counts and strides of the other engine whose
 * specs are layers of kinds. See alloc/compat.h.
 *
 * A page is one layer's part of a block: H head slots x N stored states x C bytes. Its five axes
 * are L layer, B block, H, N, C; a layout is their physical order, outermost first.
 */
#ifndef KV_ALLOC_COMPAT_VLLM_H
#define KV_ALLOC_COMPAT_VLLM_H

#include "alloc/compat.h"

enum kv_vspec_kind {
	KV_VSPEC_FULL,
	KV_VSPEC_MLA,
	KV_VSPEC_SLIDING,
	KV_VSPEC_SLIDING_MLA,
	KV_VSPEC_CHUNKED,
	KV_VSPEC_MAMBA,
	KV_VSPEC_CROSS,
	KV_VSPEC_ENCODER,
	KV_VSPEC_SINK,
	KV_VSPEC_RSWA,
	KV_VSPEC_HIDDEN,
};

struct kv_vspec {
	enum kv_vspec_kind kind;
	int64_t block, n_heads, head, head_v;
	int64_t itemsize; /* of dtype, which is told apart by name */
	char dtype[16], cache_dtype[24], version[16];
	int64_t quant;
	int64_t padded, head_slots, content; /* 0: not given */
	int64_t tokens_per_state, per;	     /* a fraction: tokens_per_state / per */
	int64_t window, extra, chunk, rswa, sink, alignment;
	int64_t state_bytes;  /* mamba: of all tensors */
	uint64_t state_shape; /* mamba: tells shapes apart */
	int64_t n_spec, n_checkpoints;
	char mode[8]; /* mamba: none, align, all */
};

struct kv_vconfig {
	int64_t max_len, in_flight, dcp, encoder;
	bool has_override, disable_hybrid, caching, has_unit, auto_len;
	int64_t override_blocks, block, unit;
	char mode[8], layout[8];
};

const char *kv_vspec_name(enum kv_vspec_kind kind);

/* Fills what the spec leaves open; KV_FAULT_ASSERTION if it contradicts itself. */
int kv_vspec_init(struct kv_vspec *s);
int64_t kv_vspec_states(const struct kv_vspec *s);  /* N */
int64_t kv_vspec_slots(const struct kv_vspec *s);   /* H */
int64_t kv_vspec_content(const struct kv_vspec *s); /* C */
int64_t kv_vspec_dense(const struct kv_vspec *s);   /* page without padding */
int64_t kv_vspec_page(const struct kv_vspec *s);
int kv_vspec_max_bytes(const struct kv_vspec *s, const struct kv_vconfig *c, int64_t *ret_bytes);
int kv_vspec_max_blocks(const struct kv_vspec *s, const struct kv_vconfig *c, int64_t *ret_blocks);
/* Blocks at admission; 0 for kinds without a cap. */
int64_t kv_vspec_admission(const struct kv_vspec *s, const struct kv_vconfig *c);

/* Strides in bytes in the order L, B, H, N, C; @fixed_: 0, or the stride of that axis. */
int kv_vspec_strides(const struct kv_vspec *s, const char *layout, int64_t n_layers,
		     int64_t n_blocks, int64_t fixed_layer, int64_t fixed_block,
		     int64_t ret_strides[5]);
/* The same bytes in kernel blocks: shape B, H, N, C and strides. */
int kv_vspec_kernel_view(const struct kv_vspec *s, const char *layout, int64_t n_blocks,
			 int64_t kernel_block, const int64_t strides[5], int64_t ret_shape[4],
			 int64_t ret_strides[5]);

struct kv_vquant {
	int mode;
	const char *name;
	int64_t storage_bytes; /* 0: the model's type */
};

void kv_compat_quant_mode(const char *cache_dtype, struct kv_vquant *ret);

bool kv_vspec_equal(const struct kv_vspec *a, const struct kv_vspec *b);

/* ---- groups and blocks of all workers (compat_vllm_groups.c, compat_vllm_plan.c) ---- */

#define KV_VPLAN_LAYERS	 256
#define KV_VPLAN_WORKERS 16

struct kv_vlayer {
	const char *name;
	struct kv_vspec spec;
};

struct kv_vgroup {
	uint32_t layer[KV_VPLAN_LAYERS]; /* of the list of all layers */
	size_t n;
	bool uniform; /* layers keep their own specs; the page is their sum */
	struct kv_vspec spec;
};

struct kv_vtensor {
	uint32_t layer[KV_VPLAN_LAYERS];
	size_t n;
	int64_t size, layer_stride, block_stride, offset;
};

struct kv_vworker {
	bool has[KV_VPLAN_LAYERS];
	int64_t available;
	int64_t block_bytes, n_blocks;
	int64_t max_bytes; /* of a request of the maximum length */
	struct kv_vtensor tensor[KV_VPLAN_LAYERS];
	size_t n_tensors;
	bool has_mamba, mixed;
};

struct kv_vplan {
	struct kv_vlayer layer[KV_VPLAN_LAYERS];
	size_t n_layers;
	struct kv_vgroup group[KV_VPLAN_LAYERS];
	size_t n_groups;
	struct kv_vworker worker[KV_VPLAN_WORKERS];
	size_t n_workers;
	int64_t max_len; /* as given, or as it fits */
	int64_t capacity_tokens;
	double concurrency;
};

/* Layers, workers' layers and available bytes are set by the caller. */
int kv_vplan_make(struct kv_vplan *p, struct kv_vconfig *config);
/* Groups alone: kv_vplan_make() begins with it. */
int kv_vplan_groups(struct kv_vplan *p, const struct kv_vconfig *config);
int64_t kv_vgroup_page(const struct kv_vplan *p, const struct kv_vworker *w,
		       const struct kv_vgroup *g);
int kv_vplan_unit(const struct kv_vplan *p, const struct kv_vconfig *c, int64_t *ret_scheduler,
		  int64_t *ret_hash);

#endif
