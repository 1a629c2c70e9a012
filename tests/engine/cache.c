/* SPDX-License-Identifier: Apache-2.0 */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "tests/engine/cache.h"
#include "tools/engine/error.h"

static void *zeros(size_t n, size_t bytes)
{
	void *p = calloc(n, bytes);

	ck_assert_ptr_nonnull(p);
	return p;
}

void cache_init(struct cache *cache, struct kv_dense *dense, const struct kv_model_shape *s,
		int dtype, uint32_t n_blocks)
{
	size_t head = s->head_dim * kv_dtype_bytes(dtype), token = head * s->n_kv_heads;
	size_t component = CACHE_BLOCK_TOKENS * token, block = 2 * s->n_layers * component;

	*cache = (struct cache){.dense = dense, .n_blocks = n_blocks};
	cache->views = zeros(2 * s->n_layers, sizeof(*cache->views));
	cache->bytes = dense->ops->alloc(dense, n_blocks * block);
	ck_assert_ptr_nonnull(cache->bytes);
	cache->table = zeros(n_blocks, sizeof(*cache->table));
	for (uint32_t i = 0; i < n_blocks; i++)
		cache->table[i] = n_blocks - 1 - i;
	for (uint32_t i = 0; i < 2 * s->n_layers; i++)
		cache->views[i] = (struct kv_view){
			.base = cache->bytes + i * component,
			.block_stride = block,
			.token_stride = token,
			.head_stride = head,
			.block_tokens = CACHE_BLOCK_TOKENS,
			.n_heads = s->n_kv_heads,
			.head_dim = s->head_dim,
			.dtype = dtype,
			.scale = 1,
		};
}

void cache_deinit(struct cache *cache)
{
	free(cache->views);
	if (cache->dense)
		cache->dense->ops->release(cache->dense, cache->bytes);
	free(cache->table);
}

void cache_split(struct cache *cache, uint32_t n_blocks, struct cache *ret)
{
	*ret = (struct cache){.n_blocks = n_blocks};
	cache->n_blocks -= n_blocks;
	ret->table = zeros(n_blocks, sizeof(*ret->table));
	memcpy(ret->table, cache->table + cache->n_blocks, n_blocks * sizeof(*ret->table));
}

void cache_step(struct cache *const *caches, uint32_t n_seqs, struct kv_model *model,
		const int32_t *const *tokens, const uint32_t *n, float *logits)
{
	uint32_t total = 0, width = 0, max_query = 0, max_len = 0, t = 0;
	int32_t *table, *starts, *lens, *all, *rows;
	int64_t *slots, *positions;
	struct kv_batch_data batch;
	int r;

	for (uint32_t i = 0; i < n_seqs; i++) {
		total += n[i];
		width = caches[i]->n_blocks > width ? caches[i]->n_blocks : width;
		max_query = n[i] > max_query ? n[i] : max_query;
		max_len = caches[i]->len + n[i] > max_len ? caches[i]->len + n[i] : max_len;
	}
	table = zeros((size_t)n_seqs * width, sizeof(*table));
	starts = zeros(n_seqs + 1, sizeof(*starts));
	lens = zeros(n_seqs, sizeof(*lens));
	rows = zeros(n_seqs, sizeof(*rows));
	all = zeros(total, sizeof(*all));
	slots = zeros(total, sizeof(*slots));
	positions = zeros(total, sizeof(*positions));

	for (uint32_t i = 0; i < n_seqs; i++) {
		struct cache *cache = caches[i];

		memcpy(table + (size_t)i * width, cache->table, cache->n_blocks * sizeof(*table));
		for (uint32_t j = 0; j < n[i]; j++, t++) {
			size_t position = cache->len++;
			size_t i_block = position / CACHE_BLOCK_TOKENS;

			ck_assert_uint_lt(i_block, cache->n_blocks);
			all[t] = tokens[i][j];
			positions[t] = position;
			slots[t] = (int64_t)cache->table[i_block] * CACHE_BLOCK_TOKENS +
				   position % CACHE_BLOCK_TOKENS;
		}
		starts[i + 1] = t;
		lens[i] = cache->len;
		rows[i] = t - 1;
	}
	batch = (struct kv_batch_data){
		.n_seqs = n_seqs,
		.n_tokens = total,
		.n_real_seqs = n_seqs,
		.n_real_tokens = total,
		.max_query_len = max_query,
		.max_seq_len = max_len,
		.table_width = width,
		.block_table = table,
		.slots = slots,
		.query_start_loc = starts,
		.seq_lens = lens,
		.positions = positions,
		.tokens = all,
	};
	r = kv_model_step(model, &batch, caches[0]->views, rows, n_seqs, logits);
	ck_assert_msg(r == 0, "kv_model_step: %s", kv_engine_error_text());

	free(table);
	free(starts);
	free(lens);
	free(rows);
	free(all);
	free(slots);
	free(positions);
}
