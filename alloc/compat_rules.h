/* SPDX-License-Identifier: Apache-2.0 */
/* Reference calculators: small rules of the registry, its pools and its start-up. See compat.h. */
#ifndef KV_ALLOC_COMPAT_RULES_H
#define KV_ALLOC_COMPAT_RULES_H

#include "alloc/compat_pools.h"

struct kv_compat_class {
	bool hybrid; /* recurrent layers the reference knows of */
	bool v4;
};

/* D: qwen3_next has recurrent layers and is not among the hybrids. */
struct kv_compat_class kv_compat_classify(const char *const *architectures, size_t n);

/* The backend a class of model is forced to; else @name, or NULL for what is left unset. */
const char *kv_compat_forced_backend(struct kv_compat_class class, const char *name);

/* Block size of a class: 256 for V4 if the user left the default of 64. */
int64_t kv_compat_default_block(struct kv_compat_class class, int64_t block_size);

/* The block sizes and value types a backend reads. */
int kv_compat_check_page(const char *backend, int64_t page_size, const char *kv_dtype);

/* @fp8: the platform multiplies 8-bit values of sparse attention */
int kv_compat_check_dsa_dtype(const char *kv_option, bool fp8);

/* 4-bit indexer keys: the server's switch, else the config's, else no. */
bool kv_compat_fp4_indexer(const bool *server, const bool *config);

/* Where a layer's K is in a pool, or its state; the layer must have such a thing. */
int kv_compat_layer_kv(const struct kv_compat_mha_out *pool, size_t n_layers, size_t layer,
		       int64_t *ret_buffer);
int kv_compat_layer_state(const struct kv_compat_mha_out *pool, size_t n_layers, size_t layer,
			  int64_t *ret_pair);

/* Buffers of a layer in the list that a transfer to another engine goes by: K, then V. */
int kv_compat_transfer_order(const struct kv_compat_mha_out *pool, size_t n_layers, size_t layer,
			     int64_t ret_index[2]);

/* Global layer to pool layer. D: unknown layers pass through; ours refuses them. */
int kv_compat_map_layer(const int64_t *layers, size_t n, int64_t layer, int64_t *ret_layer);

/* How many bytes a warp moves and how many warps, for rows of @row_bytes. */
void kv_compat_copy_tile(int64_t row_bytes, int64_t *ret_tile, int *ret_warps);

#endif
