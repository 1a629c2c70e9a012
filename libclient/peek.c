/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Looking without holding: the walk of lookup.c with nothing written. A block's word tells its content:
 * it has another generation, or isn't CACHED, as soon as the content may change. So what was read
 * between two looks at the same word is what was cached (include/internal/shm.h draws the life of a block).
 */
#include <errno.h>
#include <string.h>

#include "libclient/peek.h"

#define MOST_ROW_TOKENS 256u /* of a state's pool: group.c refuses more */

struct want {
	const int32_t *tokens;
	const struct kv_shm_row *row; /* NULL: it has none */
};

/* Is @id the block of these tokens behind @follows? Then *ret_word, and its serial in *follows. */
static bool is_it(const struct kv_pool *pool, kv_block_id id, const struct want *want, uint64_t *follows,
		  uint64_t *ret_word)
{
	const struct kv_shm_block *d = &pool->descriptors[id];
	uint64_t word = kv_load_acquire(&d->word), serial;
	uint64_t parent = *follows | (want->row ? KV_SERIAL_ROW : 0);

	if (kv_block_state(word) != KV_BLOCK_CACHED || kv_load_relaxed(&d->parent_serial) != parent ||
	    memcmp(kv_shm_tokens(pool->blocks, &pool->head, id), want->tokens,
		   pool->head.block_tokens * sizeof(*want->tokens)) ||
	    (want->row && memcmp(kv_shm_row(pool->blocks, &pool->head, id), want->row, sizeof(*want->row))))
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

static kv_block_id search(const struct kv_pool *pool, struct kv_key key, const struct want *want,
			  uint64_t *follows, uint64_t *ret_word)
{
	uint32_t cursor = 0;
	kv_block_id id;

	do {
		id = kv_prefix_find(&pool->prefix, key, &cursor);
	} while (id >= 0 && !is_it(pool, id, want, follows, ret_word));
	return id;
}

static uint64_t root_of(const struct kv_pool *pool)
{
	const struct kv_shm_pool *page = pool->index;

	return kv_serial_root(kv_load_acquire(&page->epoch));
}

static struct kv_key masked(struct kv_key key, uint64_t mask)
{
	return (struct kv_key){ key.lo & mask, key.hi & mask };
}

size_t kv_peek_chain(const struct kv_peek *p, kv_block_id *ret_ids, uint64_t *ret_words, size_t max)
{
	const struct kv_shm_pool *head = &p->pool->head;
	size_t size = head->block_tokens, i = 0;
	uint64_t follows = root_of(p->pool);
	struct kv_key key = { follows, 0 };

	for (; i < max && i < p->n / size; i++) {
		struct want want = { .tokens = p->tokens + i * size };
		struct kv_shm_row row;

		if (p->identity->n && kv_identity_row(p->identity, i * size, (i + 1) * size, &row)) {
			want.row = &row;
			key = kv_key_fold(head->seed, key, &row, sizeof(row));
		}
		key = masked(kv_key_next(head->seed, key, want.tokens, size), head->key_mask);
		ret_ids[i] = search(p->pool, key, &want, &follows, &ret_words[i]);
		if (ret_ids[i] < 0)
			break;
	}
	return i;
}

kv_block_id kv_peek_loose(const struct kv_peek *p, const struct kv_prefix_digest *before, uint32_t group,
			  size_t begin, size_t end)
{
	const struct kv_shm_pool *head = &p->pool->head;
	size_t size = head->block_tokens, have = begin < size ? begin : size;
	int32_t last[MOST_ROW_TOKENS] = { 0 };
	struct want want = { .tokens = p->tokens + begin };
	uint64_t follows = root_of(p->pool), word;
	struct kv_key key = { 0, 0 };
	struct kv_shm_row row;

	/* A state has the tokens before it, as many as fit into its row. */
	if (begin == end) {
		if (size > MOST_ROW_TOKENS)
			return -1;
		memcpy(last, p->tokens + begin - have, have * sizeof(*last));
		want.tokens = last;
	}
	kv_prefix_digest_row(before, p->identity, group, begin, end, &row);
	want.row = &row;
	key = kv_key_fold(head->seed, key, &row, sizeof(row));
	key = masked(kv_key_next(head->seed, key, want.tokens, size), head->key_mask);
	return search(p->pool, key, &want, &follows, &word);
}

KV_PUBLIC int64_t kv_pool_peek(struct kv_pool *pool, const int32_t *tokens, size_t n,
			       kv_block_id *ret_ids, uint64_t *ret_words, size_t max)
{
	const struct kv_identity nothing = { 0 };
	struct kv_peek peek = { pool, &nothing, tokens, n };
	int r = kv_forked(pool->fork_generation);
	size_t i;

	if (r < 0)
		return r;
	i = kv_peek_chain(&peek, ret_ids, ret_words, max);
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
