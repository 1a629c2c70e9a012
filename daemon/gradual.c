/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Evictions that take long, in parts: in one turn of the loop those who ask for more than KV_EVICT_PART
 * blocks at once get that many of all of them, and others are served before the next. Who asks waits in the queue.
 *
 * All or nothing: before a pool gives up many of its own blocks, those that nobody holds are counted, in
 * parts as well, until there are enough. What somebody begins to hold meanwhile may be missing in the end.
 */
#include <errno.h>
#include <stdlib.h>

#include "daemon/daemon.h"
#include "include/internal/cleanup.h"

/* Up to @n of what is left of this turn's part. */
static uint32_t take_part(struct kv_daemon *d, uint64_t n)
{
	uint64_t turn = kv_loop_turn(d->loop);
	uint32_t part;

	if (d->part_turn != turn) {
		d->part_turn = turn;
		d->part_left = KV_EVICT_PART;
	}
	part = n < d->part_left ? (uint32_t)n : d->part_left;
	d->part_left -= part;
	d->goes_on = d->goes_on || part < n;
	return part;
}

uint32_t kv_gradual_blocks(struct kv_daemon *d, uint64_t n)
{
	return take_part(d, n);
}

void kv_gradual_forget(struct kv_pool *pool)
{
	free(kv_steal(pool->unheld));
}

static int end(struct kv_pool *pool, int r)
{
	kv_gradual_forget(pool);
	return r;
}

static uint32_t unheld(const struct kv_books_count *count)
{
	return count->n_cached - count->n_held;
}

static bool is_complete(const struct kv_books_count *count)
{
	return count->at < 0 && count->n_cached;
}

int kv_gradual_own(struct kv_pool *pool, uint64_t n)
{
	struct kv_books_count *count = pool->unheld;
	uint32_t part, done;

	if (n <= KV_EVICT_PART)
		return end(pool, kv_books_evict(&pool->books, (uint32_t)n, true) >= n ? 0 : KV_NO_ROOM);
	part = take_part(pool->daemon, n);
	if (!part)
		return -EAGAIN;
	if (!count) {
		count = pool->unheld = calloc(1, sizeof(*count));
		if (!count)
			return KV_NO_ROOM;
		count->at = -1;
	}
	/* What has gone was counted, and is not needed any more. */
	if (unheld(count) < n) {
		bool more = !is_complete(count) && kv_books_count_on(&pool->books, count);

		return more || unheld(count) >= n ? -EAGAIN : end(pool, KV_NO_ROOM);
	}
	done = kv_books_evict(&pool->books, part, false);
	if (!done)
		return end(pool, KV_NO_ROOM);
	count->n_cached -= done;
	return -EAGAIN;
}
