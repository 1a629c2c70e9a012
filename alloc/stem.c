/* SPDX-License-Identifier: Apache-2.0 */
#include "alloc/stem.h"

uint32_t kv_stem_buckets(uint32_t id_limit, uint32_t block_tokens)
{
	uint64_t places = (uint64_t)id_limit * 2;
	uint32_t n = 1;

	if (block_tokens < 2)
		return 0;
	/* Half of them stay empty when all that a pool can have is cached: few buckets run full. */
	while ((uint64_t)n * KV_BUCKET_WORDS < places && n < 1u << 28)
		n *= 2;
	return n;
}

struct kv_key kv_stem_key(const struct kv_shm_pool *head, uint64_t follows,
			  const struct kv_shm_row *row, const int32_t *tokens)
{
	struct kv_key key = { follows, 0 };

	if (row)
		key = kv_key_fold(head->seed, key, row, sizeof(*row));
	key = kv_key_next(head->seed, key, tokens, kv_stem_tokens(head->block_tokens));
	return (struct kv_key){ key.lo & head->key_mask, key.hi & head->key_mask };
}

uint32_t kv_stem_place(const struct kv_stems *stems, struct kv_key key, int32_t id)
{
	uint32_t first = ((uint32_t)key.lo & (stems->n_buckets - 1)) * KV_BUCKET_WORDS;

	for (uint32_t i = 0; i < KV_BUCKET_WORDS; i++) {
		if (!stems->words[first + i])
			return first + i + 1;
	}
	return first + (uint32_t)id % KV_BUCKET_WORDS + 1;
}

void kv_stem_put(struct kv_stems *stems, uint32_t place, struct kv_key key, int32_t id)
{
	kv_store_release(&stems->words[place - 1], (uint64_t)(uint32_t)key.hi << 32 | (uint32_t)(id + 1));
}

static bool is_at(const struct kv_stems *stems, uint32_t place, int32_t id)
{
	return place && place <= stems->n_buckets * KV_BUCKET_WORDS &&
	       (uint32_t)stems->words[place - 1] == (uint32_t)(id + 1);
}

void kv_stem_rename(struct kv_stems *stems, uint32_t place, int32_t from, int32_t to)
{
	if (is_at(stems, place, from))
		kv_store_release(&stems->words[place - 1],
				 (stems->words[place - 1] & ~(uint64_t)UINT32_MAX) | (uint32_t)(to + 1));
}

void kv_stem_remove(struct kv_stems *stems, uint32_t place, int32_t id)
{
	if (is_at(stems, place, id))
		kv_store_release(&stems->words[place - 1], 0);
}
