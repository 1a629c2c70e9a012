/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layouts: where each element of a block lies.
 *
 * A layout is a list of components: "layer 3's K: 8 heads of 128 bf16". It is flat or paged.
 *
 *   flat   [block][component][token][head][element]    the default: a block is one range of bytes
 *   paged  [component][block][token][head][element]    layer-major, in one slab of fixed size
 *
 * With KV_LAYOUT_HEAD_MAJOR the axes token and head change places inside a component. Both kinds
 * are only strides: a kernel takes a struct kv_view and knows no layout by name.
 *
 * address(view, block, token, head) = base + block*block_stride + token*token_stride
 *                                     + head*head_stride          (64-bit, bytes)
 */
#ifndef KVCACHED_LAYOUT_H
#define KVCACHED_LAYOUT_H

#include <kvcached/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KV_MAX_COMPONENTS 1024
#define KV_MAX_BLOCK_TOKENS 65536
#define KV_BLOCK_ALIGN 256 /* every component of a block starts at a multiple of this */

enum kv_layout_kind {
	KV_LAYOUT_FLAT = 1,
	KV_LAYOUT_PAGED = 2,
};

#define KV_LAYOUT_HEAD_MAJOR 1u /* flag: [head][token] instead of [token][head] */
/*
 * Flag, of flat layouts: components lie where they say, and may overlap. For blocks in which groups of
 * layers take turns (one id belongs to one group at a time), and rows that aren't one a token.
 */
#define KV_LAYOUT_PLACED 2u

/* What a component holds. */
enum kv_role {
	KV_ROLE_K = 1,
	KV_ROLE_V = 2,
	KV_ROLE_STATE = 3, /* constant size per block: n_heads * head_dim elements, no token axis */
	KV_ROLE_INDEX = 4, /* keys of a sparse indexer */
	KV_ROLE_K_SCALE = 5,
	KV_ROLE_V_SCALE = 6,
};

/* One component of a block. */
struct kv_component {
	uint16_t layer;
	uint8_t role;  /* enum kv_role */
	uint8_t dtype; /* enum kv_dtype */
	uint32_t n_heads;
	uint32_t head_dim;
	float scale; /* stored value * scale = true value; 1 unless the type is 8 bits wide */
	uint32_t n_rows; /* rows of [n_heads, head_dim] in a block; 0: one for each token */
	uint64_t offset; /* from the block's first byte: with KV_LAYOUT_PLACED, else 0 */
};

/* A layout as its author declares it. */
struct kv_layout {
	uint32_t kind;	       /* enum kv_layout_kind */
	uint32_t flags;	       /* KV_LAYOUT_HEAD_MAJOR */
	uint32_t block_tokens; /* 1..KV_MAX_BLOCK_TOKENS */
	uint32_t n_components;
	const struct kv_component *components;
};

/* One component of every block of a pool, as kernels take it. Strides are in bytes. */
struct kv_view {
	void *base; /* where block 0 would be: valid only with ids of blocks that are held */
	int64_t block_stride;
	int64_t token_stride;
	int64_t head_stride;
	int32_t block_tokens; /* rows of a block */
	int32_t n_heads;
	int32_t head_dim;
	int32_t dtype; /* enum kv_dtype */
	float scale;
	int32_t reserved;
};

/**
 * kv_layout_uniform() - K and V of @n_layers equal attention layers
 * @components: filled: K of layer 0, V of layer 0, K of layer 1, ...; room for 2 * @n_layers
 *
 * Return: number of components, 2 * n_layers.
 */
uint32_t kv_layout_uniform(struct kv_component *components, uint32_t n_layers, uint32_t n_kv_heads,
			   uint32_t head_dim, enum kv_dtype dtype, float k_scale, float v_scale);

/**
 * kv_layout_block_bytes() - bytes of one block over all components, and where each starts
 * @ret_offsets: [n_components] byte offset of each component in a block, or NULL
 * @ret_bytes:   bytes of a block: a multiple of KV_BLOCK_ALIGN
 *
 * Return: 0; -EINVAL if a field is out of range (kv_error_text() names it); -EOVERFLOW if a block
 *         would exceed 2^40 bytes.
 */
int kv_layout_block_bytes(const struct kv_layout *layout, uint64_t *ret_offsets,
			  uint64_t *ret_bytes);

#ifdef __cplusplus
}
#endif
#endif
