/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Looking without holding: the walk of lookup.c with nothing written. A block's word tells its content:
 * it has another generation, or isn't CACHED, as soon as the content may change. So what was read
 * between two looks at the same word is what was cached (include/internal/shm.h draws the life of a block).
 */
#include <errno.h>
#include <string.h>

#include "libclient/internal.h"

/* Is @id the block of these tokens behind @follows? Then *ret_word, and its serial in *follows. */
static bool is_it(const struct kv_pool *pool, kv_block_id id, const int32_t *tokens, uint64_t *follows,
		  uint64_t *ret_word)
{
	const struct kv_shm_block *d = &pool->descriptors[id];
	uint64_t word = kv_load_acquire(&d->word), serial;

	if (kv_block_state(word) != KV_BLOCK_CACHED || kv_load_relaxed(&d->parent_serial) != *follows ||
	    memcmp(kv_shm_tokens(pool->blocks, &pool->head, id), tokens,
		   pool->head.block_tokens * sizeof(*tokens)))
		return false;
	serial = kv_load_relaxed(&d->serial);
	/* What was compared comes before the second look. */
	kv_fence_acquire();
	if (kv_load_relaxed(&d->word) != word)
		return false;
	*follows = serial;
	*ret_word = word;
	return true;
}

KV_PUBLIC int64_t kv_pool_peek(struct kv_pool *pool, const int32_t *tokens, size_t n,
			       kv_block_id *ret_ids, uint64_t *ret_words, size_t max)
{
	const struct kv_shm_pool *head = &pool->head, *page = pool->index;
	size_t size = head->block_tokens, i = 0;
	int r = kv_forked(pool->fork_generation);
	uint64_t follows;
	struct kv_key key;

	if (r < 0)
		return r;
	follows = kv_serial_root(kv_load_acquire(&page->epoch));
	key = (struct kv_key){ follows, 0 };
	for (; i < max && i < n / size; i++) {
		uint32_t cursor = 0;
		kv_block_id id;

		key = kv_key_next(head->seed, key, tokens + i * size, head->block_tokens);
		key.lo &= head->key_mask;
		key.hi &= head->key_mask;
		do {
			id = kv_prefix_find(&pool->prefix, key, &cursor);
		} while (id >= 0 && !is_it(pool, id, tokens + i * size, &follows, &ret_words[i]));
		if (id < 0)
			break;
		ret_ids[i] = id;
	}
	r = i ? kv_granules_need(pool, kv_deadline(0)) : 0;
	return r < 0 ? r : (int64_t)i;
}

KV_PUBLIC size_t kv_pool_peeked(const struct kv_pool *pool, const kv_block_id *ids,
				const uint64_t *words, size_t n)
{
	size_t i = 0;

	if (kv_forked(pool->fork_generation) < 0)
		return 0;
	/* What was read of their bytes comes before this look. */
	kv_fence_acquire();
	while (i < n && (uint32_t)ids[i] < pool->head.id_limit &&
	       kv_load_relaxed(&pool->descriptors[ids[i]].word) == words[i])
		i++;
	return i;
}
