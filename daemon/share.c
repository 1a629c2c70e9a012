/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who gives when memory is short. Of what is left of the memory when all minimums are taken off, each
 * pool that somebody is attached to has a share by its weight, cut at its maximum; the rest goes on to
 * the others. Pools above their share give first, and among them the one whose least valuable
 * unheld block is worth least: expected hits a second (alloc/worth.h, times the uses of the pool's
 * cache a second), times the tokens that a hit saves, times the weight, per byte.
 */
#include <string.h>

#include "daemon/daemon.h"
#include "include/internal/socket.h"

#define RATE_SPAN (100 * KV_MSEC) /* how long uses are counted for a rate */

static bool concerns(const struct kv_pool *pool, uint32_t gpu_mask)
{
	return pool->gpu_mask & gpu_mask;
}

/* @n: what is left to divide by @weights; pools that reach their maximum leave both. */
static bool cut_at_maximum(struct kv_pool *pool, double *n, double *weights)
{
	uint32_t min = kv_capacity_extents(pool, pool->min_bytes);
	uint32_t max = kv_capacity_extents(pool, pool->max_bytes);

	if (pool->share_extents || !pool->n_sessions || min + *n * pool->weight / *weights < max)
		return false;
	pool->share_extents = max ? max : 1;
	*n -= max - min;
	*weights -= pool->weight;
	return true;
}

void kv_shares_update(struct kv_daemon *d, uint32_t gpu_mask)
{
	double n = (double)kv_limits_arena(d, gpu_mask) / (double)d->extents.bytes, weights = 0;
	bool again = true;

	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);

		if (!concerns(pool, gpu_mask))
			continue;
		pool->share_extents = 0; /* not known yet */
		n -= kv_capacity_extents(pool, pool->min_bytes);
		weights += pool->n_sessions ? pool->weight : 0;
	}
	n = n > 0 ? n : 0;
	while (again) {
		again = false;
		for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
			struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);

			again |= concerns(pool, gpu_mask) && cut_at_maximum(pool, &n, &weights);
		}
	}
	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);

		if (!concerns(pool, gpu_mask) || pool->share_extents)
			continue;
		pool->share_extents = kv_capacity_extents(pool, pool->min_bytes);
		if (pool->n_sessions)
			pool->share_extents += (uint32_t)(n * pool->weight / weights);
	}
}

/* Uses of what a pool has cached, a second. */
static double use_rate(struct kv_pool *pool)
{
	int64_t now = kv_now(), span = now - pool->use_ns;

	if (span > RATE_SPAN) {
		double rate = (double)(pool->books.now - pool->use_count) * 1e9 / (double)span;

		pool->use_rate = pool->use_ns ? (pool->use_rate + rate) / 2 : rate;
		pool->use_count = pool->books.now;
		pool->use_ns = now;
	}
	/* Pools that stand still are compared, too. */
	return pool->use_rate + 1e-3;
}

/* Of the block that the pool would evict next; what is free is worth nothing. */
static double value(struct kv_pool *pool)
{
	double uses;

	if (kv_space_n_spare(&pool->books.space) || !kv_books_least(&pool->books, &uses))
		return 0;
	return uses * use_rate(pool) * pool->layout.block_tokens * pool->weight /
	       (double)pool->block_bytes;
}

static bool is_above_share(const struct kv_pool *pool)
{
	return pool->n_extents > pool->share_extents;
}

/* Does @a give before @b? */
static bool goes_before(struct kv_pool *a, struct kv_pool *b)
{
	if (is_above_share(a) != is_above_share(b))
		return is_above_share(a);
	return value(a) < value(b);
}

static bool can_give(const struct kv_pool *pool)
{
	if (!pool->n_sessions && !pool->min_bytes)
		return true;
	return pool->layout.kind == KV_LAYOUT_FLAT &&
	       pool->n_extents > kv_capacity_extents(pool, pool->min_bytes);
}

struct kv_pool *kv_share_giver(struct kv_daemon *d, uint32_t gpu_mask,
			       const struct kv_pool *except, uint64_t round)
{
	struct kv_pool *best = NULL;

	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);

		if (pool == except || !concerns(pool, gpu_mask) || pool->exhausted_in == round ||
		    !can_give(pool))
			continue;
		if (!best || goes_before(pool, best))
			best = pool;
	}
	return best;
}

bool kv_share_own_first(struct kv_pool *pool, struct kv_pool *other)
{
	return !other || !goes_before(other, pool);
}
