/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reference calculators: the numbers that two public engines come to, defects included.
 *
 * An operator who moves an engine to kvcached compares our plan with what the engine allocated
 * before; these functions are the "before". Nothing here places a byte of real memory: that is
 * alloc/plan.h, which is exact. Where the two differ, the reason stands at the function (marked D).
 *
 * Integers are 64-bit and divisions round toward minus infinity, because budgets can be negative
 * here. Functions return 0 or an enum kv_fault (positive, with a text in kv_error_text()).
 * Layers are one character each: F full attention, S sliding window, L linear attention (recurrent
 * state), C chunked attention, M mamba; the reference knows F, S and L.
 */
#ifndef KV_ALLOC_COMPAT_H
#define KV_ALLOC_COMPAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KV_FAULTS(X)                    \
	X(NOT_DIVISIBLE)                \
	X(BUDGET_TOO_SMALL)             \
	X(CONST_WITHOUT_LINEAR)         \
	X(MIXED_ROW)                    \
	X(DIVISION_BY_ZERO)             \
	X(BAD_INDEX_HEAD_DIM)           \
	X(BAD_KV_DTYPE)                 \
	X(DSA_FP8_PLATFORM)             \
	X(CELL_SIZE_NOT_POSITIVE)       \
	X(MAX_TOTAL_BELOW_ONE_PAGE)     \
	X(POOL_TOKENS_NOT_POSITIVE)     \
	X(UNKNOWN_LAYER_TYPE)           \
	X(SLIDING_WITHOUT_WINDOW)       \
	X(FULL_WITH_WINDOW)             \
	X(WINDOW_LIST_LENGTH)           \
	X(WINDOW_BAD_TYPE)              \
	X(WINDOW_NOT_INT)               \
	X(BAD_PAGE_ROWS)                \
	X(BAD_RETENTION)                \
	X(SLIDING_GROUP_WITHOUT_WINDOW) \
	X(NEGATIVE_ARGUMENT)            \
	X(BAD_OVERLAP_DEPTH)            \
	X(OVERLAP_NEEDS_DECODE_TOKENS)  \
	X(BAD_MAX_TOKENS_PER_REQ)       \
	X(V4_BAD_RATIO)                 \
	X(V4_LAYER_INDEX_RANGE)         \
	X(V4_HEAD_NOT_LARGER_THAN_ROPE) \
	X(V4_NOPE_NOT_MULTIPLE_64)      \
	X(V4_MXFP4_INDEX_DIM)           \
	X(V4_FP8_INDEX_DIM)             \
	X(V4_WINDOW_NOT_POSITIVE)       \
	X(V4_WINDOW_NONE)               \
	X(V4_WINDOW_MISSING)            \
	X(V4_ROW_BYTES_MISALIGNED)      \
	X(V4_LAYER_NUM_MISMATCH)        \
	X(POOL_SIZE_NOT_POSITIVE)       \
	X(PAGE_SIZE_NOT_EQUALIZED)      \
	X(POOL_NOT_WHOLE_PAGES)         \
	X(SLAB_WITH_PD)                 \
	X(NOT_A_STATE_LAYER)            \
	X(NO_KV_ON_STATE_LAYER)         \
	X(PD_ON_FLAT_GDN)               \
	X(UNKNOWN_BACKEND)              \
	X(BACKEND_ARCH_MISMATCH)        \
	X(NO_DEFAULT_BACKEND)           \
	X(UNSUPPORTED_ARCH)             \
	X(FLAT_EXT_PAGED_BACKEND)       \
	X(FLAT_SPEC_UNSUPPORTED)        \
	X(FLAT_DFLASH)                  \
	X(FLAT_TABLE_BLIND_BACKEND)     \
	X(FLAT_NO_GROUPS)               \
	X(BAD_BYTES_PER_PAGE)           \
	X(BAD_PAGE_SIZE)                \
	X(HOST_PAGES_ZERO)              \
	X(AFTER_NOT_POSITIVE)           \
	X(OUT_SLOT_PAST_TABLE)          \
	X(IN_PAGE_HOLE)                 \
	X(OUT_PAGE_HOLE)                \
	X(OUT_PAGE_DUPLICATE)           \
	X(UNKNOWN_GROUP)                \
	X(FLAT_TABLES_MISSING)          \
	X(FLAT_GROUP_MISSING)           \
	X(TABLE_WIDTH)                  \
	X(BAD_ROWS_PER_PAGE)            \
	X(BAD_ENTRY_STRIDE)             \
	X(SHAPE_NOT_MULTIPLE)           \
	X(ALREADY_HASHED)               \
	X(REF_UNDERFLOW)                \
	X(NO_PAGES)                     \
	X(NOT_PAGE_ALIGNED)             \
	X(TARGET_PAST_CURSOR)           \
	X(ASSERTION)                    \
	X(BAD_CONFIG)                   \
	X(UNSUPPORTED)                  \
	X(NO_MEMORY)                    \
	X(OUT_OF_RANGE)

enum kv_fault {
	KV_FAULT_NONE = 0,
#define KV_FAULT_ITEM(name) KV_FAULT_##name,
	KV_FAULTS(KV_FAULT_ITEM)
#undef KV_FAULT_ITEM
};

/* kv_fault_name() - "BUDGET_TOO_SMALL"; "" for 0 and numbers that name nothing */
const char *kv_fault_name(int fault);

static inline int64_t kv_floor_div(int64_t a, int64_t b)
{
	int64_t q = a / b;

	return q - (a % b != 0 && (a % b < 0) != (b < 0));
}

static inline int64_t kv_ceil_div(int64_t a, int64_t b)
{
	return -kv_floor_div(-a, b);
}

static inline int64_t kv_floor_mod(int64_t a, int64_t b)
{
	return a - kv_floor_div(a, b) * b;
}

static inline int64_t kv_min64(int64_t a, int64_t b)
{
	return a < b ? a : b;
}

static inline int64_t kv_max64(int64_t a, int64_t b)
{
	return a > b ? a : b;
}

/* ---- sizes (compat_size.c) ---- */

/* Bytes of an element by the reference's type names ("bfloat16", "float8_e4m3fn", ...); 0: none */
int64_t kv_compat_itemsize(const char *dtype);

/* The KV cache type an engine's option names: "auto" is bfloat16. */
int kv_compat_kv_dtype(const char *option, const char **ret_dtype);

struct kv_compat_gdn {
	int64_t key_head_dim, n_key_heads;
	int64_t value_head_dim, n_value_heads;
	int64_t conv_kernel;
	int64_t attn_tp;
	int64_t conv_itemsize, ssm_itemsize;
};

struct kv_compat_state {
	int64_t conv_shape[2]; /* [channels of this rank, kernel - 1] */
	int64_t ssm_shape[3];  /* [value heads of this rank, key dim, value dim] */
	int64_t conv_bytes, ssm_bytes;
};

int kv_compat_gdn_state(const struct kv_compat_gdn *gdn, struct kv_compat_state *ret_state);
int64_t kv_compat_shape_bytes(const int64_t *shape, size_t n_dims, int64_t itemsize);

int64_t kv_compat_local_heads(int64_t n_kv_heads, int64_t attn_tp);
int64_t kv_compat_mha_cell(int64_t n_kv_heads, int64_t head_dim, int64_t attn_tp, int64_t itemsize);
int64_t kv_compat_mla_cell(int64_t lora, int64_t rope, int64_t itemsize, bool per_token_head,
			   int64_t model_itemsize);
int kv_compat_dsa_index_row(int64_t index_head_dim, int64_t *ret_bytes);

/* ---- profiling (compat_profile.c) ---- */

/* @total_gib: least free memory of a GPU before weights were loaded, in GiB. May be negative. */
int64_t kv_compat_available_bytes(int64_t min_free_bytes, int64_t world_size, double utilization,
				  double total_gib);

/* D: rounds the page count up, so the pool may exceed the budget by almost a page. */
int kv_compat_max_pages(int64_t available, int64_t cell, int64_t page_size, int64_t *ret_pages);

struct kv_compat_split {
	int64_t kv_pages, n_chunks, chunk_bytes;
};

/* The automatic split between KV pages and recurrent-state chunks; @cell includes the draft's. */
int kv_compat_cache_budget(int64_t available, int64_t cell, int64_t page_size,
			   int64_t state_bytes_per_layer, int64_t n_state_layers,
			   int64_t n_draft_tokens, double ratio, struct kv_compat_split *ret_split);

/* @max_total_tokens: NULL: no clamp. */
int kv_compat_max_tokens(int64_t pages, int64_t page_size, const int64_t *max_total_tokens,
			 int64_t *ret_tokens);

/* ---- groups (compat_groups.c) ---- */

enum kv_compat_retention {
	KV_COMPAT_FULL_HISTORY,
	KV_COMPAT_SLIDING,
	KV_COMPAT_BAD_RETENTION,
};

enum kv_compat_family {
	KV_COMPAT_HISTORY,
	KV_COMPAT_STATE,
};

#define KV_COMPAT_ID 48

struct kv_compat_group {
	char id[KV_COMPAT_ID];
	enum kv_compat_retention retention;
	enum kv_compat_family family;
	int64_t rows_per_page;
	int64_t entry_stride; /* tokens a row stands for */
	int64_t window;	      /* tokens; meaningful if has_window */
	bool has_window;
};

/* What a config says about windows. Configs are JSON, so a value may have any type. */
enum kv_compat_value_kind {
	KV_COMPAT_NULL,
	KV_COMPAT_INT,
	KV_COMPAT_BOOL, /* true counts as 1 where only the sign matters */
	KV_COMPAT_OTHER,
	KV_COMPAT_LIST,
};

struct kv_compat_value {
	enum kv_compat_value_kind kind;
	int64_t value;
};

struct kv_compat_window {
	struct kv_compat_value scalar; /* kind LIST: see list */
	const struct kv_compat_value *list;
	size_t n_list;
};

const char *kv_compat_label(char layer);

/**
 * kv_compat_groups() - cache groups of a model in order of first appearance
 * @ret_groups:   room for one per layer; @ret_layer_group: [strlen(layers)] index into it
 */
int kv_compat_groups(const char *layers, const struct kv_compat_window *window, int64_t page_size,
		     struct kv_compat_group *ret_groups, size_t *ret_n_groups,
		     uint32_t *ret_layer_group);

/* Number of layers with the same label before each layer. */
void kv_compat_occurrence(const char *layers, int64_t *ret_index);

/* Layers per group if K/V slabs can be shared between groups, else 0. */
int64_t kv_compat_slab_size(const char *layers, const struct kv_compat_window *window,
			    bool flat_ext);

struct kv_compat_load {
	int64_t n_requests, max_scheduled, max_total, max_context;
	int64_t decode_tokens, overlap_depth, margin;
};

/* Pages each group needs under a load, the dummy page included: ret_pages[n]. */
int kv_compat_page_counts(const struct kv_compat_group *groups, size_t n,
			  const struct kv_compat_load *load, int64_t *ret_pages);

/* Columns of a block table captured in a graph. */
int kv_compat_capture_width(const struct kv_compat_group *group, int64_t max_context,
			    int64_t tokens_per_req, int64_t overlap_depth, int64_t *ret_columns);

/* ---- flat plan (compat_flat.c) ---- */

struct kv_compat_component {
	char group[KV_COMPAT_ID];
	int64_t layer; /* index among the layers of its group */
	char name[32];
	int64_t slot_bytes;  /* per token */
	int64_t const_bytes; /* per block */
};

struct kv_compat_binding {
	int64_t tensor; /* index of the tensor the component lies in */
	size_t component;
	int64_t bytes;	    /* per block */
	int64_t row_offset; /* in the tensor's row */
};

struct kv_compat_flat {
	int64_t block_tokens, block_bytes, n_blocks, n_tensors, total_bytes;
};

struct kv_compat_named_bytes {
	char name[32];
	int64_t bytes;
};

/* One linear component a KV layer, one constant component per tensor a state layer. Returns how
 * many: at most strlen(layers) * max(n_state, 1). */
size_t kv_compat_flat_components(const char *layers, int64_t kv_slot_bytes,
				 const struct kv_compat_named_bytes *state, size_t n_state,
				 struct kv_compat_component *ret_components);

/* The block size at which the largest state row is no larger than the largest KV row. */
int kv_compat_equalize(const struct kv_compat_component *components, size_t n, int64_t block_tokens,
		       int64_t align, int64_t *ret_block_tokens, int64_t *ret_row_bytes);

/* One tensor a component. ret_bindings[n]; D: tensors are not aligned. */
int kv_compat_flat_plan(const struct kv_compat_component *components, size_t n,
			int64_t block_tokens, int64_t reserved_per_block, int64_t budget,
			struct kv_compat_flat *ret_plan, struct kv_compat_binding *ret_bindings);

/* Slot-packed: ret_bindings[n], ret_tensor_bytes[n] (per block, then times n_blocks). */
int kv_compat_slot_plan(const struct kv_compat_component *components, size_t n,
			int64_t block_tokens, int64_t budget, struct kv_compat_flat *ret_plan,
			struct kv_compat_binding *ret_bindings, int64_t *ret_tensor_bytes);

#endif
