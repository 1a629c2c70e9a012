/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A paged cache in private memory and one sequence in it, for models without a daemon: block
 * tables, slots and positions made by hand, kernels called directly.
 */
#ifndef KV_TESTS_ENGINE_CACHE_H
#define KV_TESTS_ENGINE_CACHE_H

#include "tools/engine/model.h"

#define CACHE_BLOCK_TOKENS 16

struct cache {
	struct kv_dense *dense; /* whose memory it is */
	struct kv_view *views;	/* [2 * n_layers] */
	char *bytes;		/* on the device */
	kv_block_id *table;	/* [n_blocks] in an order that isn't 0, 1, 2 */
	uint32_t n_blocks;
	size_t len; /* tokens in it */
};

/* Aborts the test where memory or a call fails. */
void cache_init(struct cache *cache, struct kv_dense *dense, const struct kv_model_shape *shape,
		int dtype, uint32_t n_blocks);
void cache_deinit(struct cache *cache);

/*
 * One step of several sequences: the next n[i] tokens of tokens[i] into caches[i], all of whose
 * views are those of caches[0]. @logits [n_seqs, n_vocab]: after the last token of each.
 */
void cache_step(struct cache *const *caches, uint32_t n_seqs, struct kv_model *model,
		const int32_t *const *tokens, const uint32_t *n, float *logits);

/* A second sequence in the memory of @cache, with the last @n_blocks blocks of its table */
void cache_split(struct cache *cache, uint32_t n_blocks, struct cache *ret);

#endif
