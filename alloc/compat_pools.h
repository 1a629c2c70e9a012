/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reference calculators: DeepSeek V4's grouped layout, the tensors that pools allocate, backend
 * names, and the whole decision from a server's options to pools. See alloc/compat.h.
 */
#ifndef KV_ALLOC_COMPAT_POOLS_H
#define KV_ALLOC_COMPAT_POOLS_H

#include "alloc/compat.h"

#define KV_COMPAT_MAX_LAYERS 512

/* ---- DeepSeek V4 (compat_v4.c) ---- */

#define KV_COMPAT_V4_GROUPS 6

struct kv_compat_v4 {
	int64_t head_dim, rope_dim, index_head_dim;
	int64_t window, page_size;
	bool fp4_indexer;
	size_t n_layers;
	int64_t ratio[KV_COMPAT_MAX_LAYERS]; /* 1 (window only), 4 or 128 */
	/* Filled by kv_compat_v4_init(): */
	int64_t token_stride;	   /* fp8 part without position + bf16 part with */
	int64_t scale_bytes;	   /* of one token */
	int64_t row_bytes;	   /* of one token */
	int64_t indexer_row_bytes; /* of one indexer row */
};

/**
 * kv_compat_v4_init() - check a layout and fill its derived sizes
 * @v4:      dimensions set by the caller
 * @ratios:  raw compress ratios of the model; 0 and 1 both mean no compression
 * @indices: the layers that this layout is for, NULL: all
 */
int kv_compat_v4_init(struct kv_compat_v4 *v4, const int64_t *ratios, size_t n_ratios,
		      const int64_t *indices, size_t n_indices);

int64_t kv_compat_v4_block_bytes(const struct kv_compat_v4 *v4, int64_t rows);
int64_t kv_compat_v4_storage_rows(const struct kv_compat_v4 *v4, int64_t ratio);
int64_t kv_compat_v4_state_rows(const struct kv_compat_v4 *v4, int64_t ratio);
int64_t kv_compat_v4_state_width(const struct kv_compat_v4 *v4, int64_t ratio);
int64_t kv_compat_v4_indexer_page_bytes(const struct kv_compat_v4 *v4);
/* Legacy bytes per token over all layers, the draft model's charge. */
int64_t kv_compat_v4_cell_bytes(const struct kv_compat_v4 *v4);
/* Groups and the bytes of one page of each, summed over layers. */
size_t kv_compat_v4_groups(const struct kv_compat_v4 *v4, struct kv_compat_group *ret_groups,
			   int64_t *ret_page_bytes);
int kv_compat_v4_estimate(const struct kv_compat_v4 *v4, const struct kv_compat_load *load,
			  int64_t *ret_bytes, int64_t *ret_counts);
/* @load: max_total is the unknown; a negative max_scheduled counts as 0. */
int kv_compat_v4_profile(const struct kv_compat_v4 *v4, const struct kv_compat_load *load,
			 int64_t available, int64_t draft_cell, int64_t *ret_pages);
int kv_compat_v4_fp4_row(int64_t row_bytes, int64_t ret_dims[3]);
int kv_compat_v4_fp8_row(int64_t row_bytes, int64_t ret_dims[2]);
/* @kind: KV_COMPAT_OTHER: the config has no such field; KV_COMPAT_NULL: it is null */
int kv_compat_v4_window(enum kv_compat_value_kind kind, int64_t window);
/* Ratio named in "v4.c<ratio>a.compressor_state"; false for other names. */
bool kv_compat_v4_state_ratio(const char *group_id, int64_t *ret_ratio);

/* ---- tensors of pools (compat_pool.c) ---- */

struct kv_compat_tensor {
	int64_t shape[5];
	size_t n_dims;
	const char *dtype;
	int64_t bytes;
	const char *tag; /* of the memory saver; NULL: none */
};

struct kv_compat_tensors {
	struct kv_compat_tensor list[6 * KV_COMPAT_MAX_LAYERS];
	size_t n;
	int64_t total_bytes;
};

struct kv_compat_mha_pool {
	int64_t tokens, page_size;
	const char *dtype; /* of elements; fp8 is stored as uint8 */
	int64_t local_heads, head_dim;
	size_t n_layers;
	const char *layers; /* labels; "" for none */
	struct kv_compat_window window;
	bool flat_ext, disaggregated;
	struct kv_compat_load load;
	bool has_state;
	int64_t conv_shape[4], ssm_shape[4];
	size_t n_conv_dims, n_ssm_dims;
	const char *conv_dtype, *ssm_dtype;
};

struct kv_compat_mha_out {
	struct kv_compat_tensors tensors;
	int64_t k_buffer[KV_COMPAT_MAX_LAYERS]; /* of each layer; -1: a state layer */
	int64_t n_state_pairs;
	int64_t state_rows; /* 0: none */
	bool hierarchical;
	int64_t k_bytes, v_bytes;
	struct kv_compat_group groups[KV_COMPAT_MAX_LAYERS];
	size_t n_groups;
	int64_t counts[KV_COMPAT_MAX_LAYERS];
};

/* D: every tensor has a page more than the plan, a second dummy page. */
int kv_compat_mha_tensors(const struct kv_compat_mha_pool *pool, struct kv_compat_mha_out *ret_out);

struct kv_compat_mla_pool {
	int64_t tokens, page_size;
	const char *dtype, *model_dtype;
	bool per_token_head;
	int64_t lora, rope;
	size_t n_layers;
	int64_t index_head_dim; /* 0: no indexer (MLA); else DSA */
};

int kv_compat_mla_tensors(const struct kv_compat_mla_pool *pool,
			  struct kv_compat_tensors *ret_tensors, int64_t *ret_page_bytes);

struct kv_compat_mamba_pool {
	int64_t size, n_layers, n_draft_tokens, max_requests;
	int64_t conv_shape[3], ssm_shape[4];
	size_t n_conv_dims, n_ssm_dims;
	const char *conv_dtype, *ssm_dtype;
};

struct kv_compat_mamba_out {
	struct kv_compat_tensors tensors;
	int64_t current_size, draft_per_request, draft_base, draft_total, total_rows;
};

void kv_compat_mamba_tensors(const struct kv_compat_mamba_pool *pool,
			     struct kv_compat_mamba_out *ret_out);

/* Per layer, in order: swa, compressed, compressor state, indexer, indexer state; those it has. */
int kv_compat_v4_tensors(const struct kv_compat_v4 *v4, int64_t tokens, int64_t layer_num,
			 const struct kv_compat_load *load, struct kv_compat_tensors *ret_tensors,
			 int64_t *ret_counts);

/* ---- backends (compat_registry.c) ---- */

/**
 * kv_compat_backend() - the attention backend a name means
 * @name:   as the user gave it; NULL: the default of @arch
 * @arch:   "MHA", "MLA" or "DSA"
 * @nvidia: false: the backends of NVIDIA builds are missing
 * @ret_class: the reference's class name
 */
int kv_compat_backend(const char *name, const char *arch, bool nvidia, const char **ret_class);

struct kv_compat_flat_check {
	bool flat_ext, uses_flat, uses_paged, flat_spec_capable;
	int64_t n_groups;
	const char *speculative; /* algorithm; NULL: none */
};

int kv_compat_check_flat(const struct kv_compat_flat_check *check);

/* Pages of the host tier, the null page included. */
int kv_compat_host_pages(int64_t page_bytes, int64_t device_tokens, int64_t page_size, double ratio,
			 double size_gb, int64_t *ret_pages);

/* Default share of a GPU's memory for a number of ranks. */
double kv_compat_utilization(int64_t world_size);

/* ---- the whole decision (compat_decide.c) ---- */

enum kv_compat_kind {
	KV_COMPAT_MHA,
	KV_COMPAT_MLA,
	KV_COMPAT_DSA,
	KV_COMPAT_GDN,
	KV_COMPAT_V4,
};

struct kv_compat_server {
	enum kv_compat_kind kind;
	int64_t attn_tp, attn_dp, world_size;
	bool flat_ext;
	int64_t min_free_bytes;
	double total_gib, utilization;
	int64_t block_size;
	const char *kv_dtype; /* option */
	bool per_token_head;
	int64_t max_num_seqs, chunked_prefill, context;
	bool has_max_total;
	int64_t max_total_tokens;
	const char *speculative; /* NULL: none */
	int64_t spec_tokens;
	const char *backend; /* NULL: unset */
	double mamba_ratio;
	bool has_max_mamba;
	int64_t max_mamba;
	bool fp4_indexer;
	int64_t overlap_depth;
	/* The model. */
	size_t n_layers;
	const char *layers; /* labels; "" for none */
	struct kv_compat_window window;
	int64_t n_kv_heads, head_dim;
	struct kv_compat_gdn gdn;
	bool hybrid_arch; /* the reference knows the architecture as a hybrid */
	int64_t lora, rope, index_head_dim;
	int64_t ratios[KV_COMPAT_MAX_LAYERS];
	size_t n_ratios, n_nextn;
	int64_t v4_window;
};

struct kv_compat_decision {
	int64_t block_size, tokens, device_pages;
	int64_t n_chunks;
	int64_t mamba_rows, mamba_base; /* 0: no such pool */
	const char *backend_class;
	const char *full_class; /* the full-attention half of a hybrid; NULL: no hybrid */
	bool flat_state_active;
	const char *draft_class;    /* NULL: no draft */
	const char *server_backend; /* the option after forcing; NULL: unset */
	size_t pool_layers, draft_layers;
	bool mapped;		     /* layers reach the pool through a map */
	int64_t map_first, map_step; /* layer map_first + i*map_step is pool layer i */
	struct kv_compat_group groups[KV_COMPAT_MAX_LAYERS], draft_groups[2];
	size_t n_groups, n_draft_groups;
	int64_t allocated_bytes;
};

int kv_compat_decide(const struct kv_compat_server *server, struct kv_compat_decision *ret);

#endif
