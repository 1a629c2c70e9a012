/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Holding cached blocks (include/internal/shm.h draws the protocol): inline, because a lookup does it
 * for each block of a prompt.
 */
#ifndef KV_LIBCLIENT_PIN_H
#define KV_LIBCLIENT_PIN_H

#include <string.h>

#include "include/internal/killpoint.h"
#include "libclient/internal.h"

static inline uint64_t *kv_pin_word(const struct kv_pool *pool, kv_block_id id)
{
	return &pool->descriptors[id].holders[pool->slot / 64];
}

static inline uint64_t kv_pin_bit(const struct kv_pool *pool)
{
	return (uint64_t)1 << pool->slot % 64;
}

static inline void kv_unpin(struct kv_pool *pool, kv_block_id id)
{
	/* What was read of the block comes before its eviction, and this before a look at who waits for it. */
	kv_and_seq(kv_pin_word(pool, id), ~kv_pin_bit(pool));
	KV_KILLPOINT(client_unpinned);
}

/* Holds the block if it is cached: from then on it can't change. False: it isn't, nothing is held. */
static inline bool kv_pin_hold(struct kv_pool *pool, kv_block_id id)
{
	if (__builtin_expect(pool->refs[id] & (KV_REF_COUNT | KV_REF_GIVEN), 0)) {
		if (pool->refs[id] & KV_REF_COUNT)
			return kv_block_is_cached(pool, id);
		if (kv_give_is_pending(pool, id))
			return false;
	}
	/* The bit, then a look: against the daemon's EVICTING, then a look (shm.h). */
	kv_or_seq(kv_pin_word(pool, id), kv_pin_bit(pool));
	KV_KILLPOINT(client_pin_bit_set);
	if (__builtin_expect(kv_block_state(kv_load_seq(&pool->descriptors[id].word)) ==
				     KV_BLOCK_CACHED, 1))
		return true;
	kv_unpin(pool, id);
	return false;
}

static inline void kv_pin_keep(struct kv_pool *pool, kv_block_id id)
{
	pool->refs[id] = (pool->refs[id] | KV_REF_CACHED) + 1;
	KV_KILLPOINT(client_pinned);
}

static inline void kv_pin_let_go(struct kv_pool *pool, kv_block_id id)
{
	if (!(pool->refs[id] & KV_REF_COUNT))
		kv_unpin(pool, id);
}

/* Four tokens, wherever they lie. */
typedef int64_t kv_four __attribute__((vector_size(16), aligned(4), may_alias));

static inline bool kv_tokens_equal(const int32_t *a, const int32_t *b, uint32_t n)
{
	kv_four differ = { 0, 0 };
	uint32_t i = 0;

	/* Without a branch for each: they are equal as a rule. */
	for (; i + 4 <= n; i += 4)
		differ |= *(const kv_four *)(a + i) ^ *(const kv_four *)(b + i);
	for (; i < n; i++)
		differ[0] |= a[i] ^ b[i];
	return !(differ[0] | differ[1]);
}

/**
 * kv_pin() - hold a cached block if it begins with what is looked for
 * @follows: what its descriptor must say of its parent, epoch and row
 * @tokens:  [n] its first
 * @row:     what its row must be; NULL: it has none
 *
 * Every candidate is held before it is looked at: then it can't change. A wrong one is let go.
 * Return: true: one reference more.
 */
static inline bool kv_pin(struct kv_pool *pool, kv_block_id id, uint64_t follows,
			  const int32_t *tokens, uint32_t n, const struct kv_shm_row *row)
{
	const struct kv_shm_block *d = &pool->descriptors[id];

	if (!kv_pin_hold(pool, id))
		return false;
	if (__builtin_expect(kv_load_relaxed(&d->parent_serial) == follows, 1) &&
	    kv_tokens_equal(kv_shm_tokens(pool->blocks, &pool->head, id), tokens, n) &&
	    (!row || !memcmp(kv_shm_row(pool->blocks, &pool->head, id), row, sizeof(*row)))) {
		kv_pin_keep(pool, id);
		return true;
	}
	kv_pin_let_go(pool, id);
	return false;
}

#endif
