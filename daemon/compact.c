/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compaction: extents run empty because the mover copies what is cached in them elsewhere in the pool.
 * alloc/move.c plans a batch and ends it; here it is given to the mover of each of the pool's
 * devices, and the next one follows: at full speed while a request waits for the extents, for an
 * operator (kvctl pool compact) under his cap, and with pauses while anybody waits for room.
 *
 * One batch of one pool at a time. A mover that dies ends its batch: nothing has moved by it.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/daemon.h"
#include "daemon/log.h"
#include "daemon/mover.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"

#define HOST_BATCH   ((uint64_t)64 << 20)
#define DEVICE_BATCH ((uint64_t)2 << 30) /* a millisecond or two of a GPU's copying */
#define PAUSE	     (5 * KV_MSEC)
#define MOVER_PAUSE  (100 * KV_MSEC) /* while one has yet to end */

struct kv_compaction {
	struct kv_pool *pool; /* NULL: none, or it has ended meanwhile */
	struct kv_books_move moves[KV_MOVER_PAIRS];
	uint32_t n; /* moves under way; 0: none */
	uint32_t n_empty; /* extents that run empty by them, if all goes well */
	uint32_t waiting, running; /* devices whose mover has yet to begin, to end */
	bool failed;
	int64_t not_before; /* the cap: when the next batch may begin */
	struct kv_timer *timer;
	struct kv_mover_copy message;
};

static struct kv_pool *next_asked(struct kv_daemon *d)
{
	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);

		if (pool->compact_extents)
			return pool;
	}
	return NULL;
}

static uint32_t batch_blocks(const struct kv_pool *pool)
{
	uint32_t gpu = (uint32_t)__builtin_ctz(pool->gpu_mask);
	bool host = pool->daemon->gpus[gpu].arena->export.kind == KV_EXPORT_HOST;
	uint64_t n = (host ? HOST_BATCH : DEVICE_BATCH) / pool->block_bytes;

	return n < 1 ? 1 : n < KV_MOVER_PAIRS ? (uint32_t)n : KV_MOVER_PAIRS;
}

/* An extent with more blocks than a batch has would never move: then the batch is as large. */
static uint32_t least_blocks(const struct kv_pool *pool)
{
	uint64_t n = pool->daemon->extents.bytes / pool->block_bytes + 2;

	return n < KV_MOVER_PAIRS ? (uint32_t)n : KV_MOVER_PAIRS;
}

static void make_message(struct kv_compaction *c)
{
	c->message.job = (struct kv_mover_job){ .op = KV_MOVER_COPY,
						.bytes = c->pool->block_bytes,
						.n_pairs = c->n };
	for (uint32_t i = 0; i < c->n; i++) {
		c->message.pairs[i][0] = c->moves[i].from;
		c->message.pairs[i][1] = c->moves[i].to;
	}
}

/* Movers that are being killed do nothing more, and may take their time to end. */
static bool has_movers(const struct kv_pool *pool)
{
	for (uint32_t g = 0; g < pool->daemon->n_gpus; g++) {
		if (pool->gpu_mask >> g & 1 && kv_mover_is_ending(pool->daemon->gpus[g].mover))
			return false;
	}
	return true;
}

/* Return: whether a batch has begun. */
static bool begin(struct kv_compaction *c, struct kv_pool *pool, uint32_t n_extents)
{
	uint32_t most = batch_blocks(pool), least = least_blocks(pool);

	if (!has_movers(pool))
		return false;
	c->n = kv_books_move_plan(&pool->books, n_extents, c->moves, most > least ? most : least,
				  &c->n_empty);
	if (!c->n)
		return false;
	c->pool = pool;
	c->failed = false;
	c->waiting = pool->gpu_mask;
	c->running = 0;
	make_message(c);
	if (pool->compact_rate)
		c->not_before = kv_now() + (int64_t)((double)c->n * (double)pool->block_bytes * 1e9 /
						     (double)pool->compact_rate);
	kv_mover_scrub(pool->daemon); /* movers that have nothing to do take it */
	return true;
}

static struct kv_compaction *get(struct kv_daemon *d)
{
	if (!d->compaction)
		d->compaction = calloc(1, sizeof(*d->compaction));
	return d->compaction;
}

static void go_on(void *arg)
{
	struct kv_daemon *d = arg;
	struct kv_compaction *c = d->compaction;
	struct kv_pool *pool = next_asked(d);
	int64_t now = kv_now();

	if (!pool || c->n)
		return;
	if (!kv_link_is_alone(&d->queue) || now < c->not_before) {
		kv_timer_set(c->timer, now < c->not_before ? c->not_before - now : PAUSE);
		return;
	}
	if (!has_movers(pool)) {
		kv_timer_set(c->timer, MOVER_PAUSE);
		return;
	}
	if (!begin(c, pool, pool->compact_extents)) {
		pool->compact_extents = 0;
		go_on(arg);
	}
}

int kv_compact_ask(struct kv_pool *pool, uint64_t rate)
{
	struct kv_daemon *d = pool->daemon;
	struct kv_compaction *c = get(d);

	if (!c || (!c->timer && kv_timer_new(d->loop, go_on, d, &c->timer) < 0))
		return kv_error(-ENOMEM, "no memory");
	if (pool->layout.kind != KV_LAYOUT_FLAT)
		return kv_error(-ENOTSUP, "'%s' is paged: its slab stays whole", pool->name);
	pool->compact_extents = d->extents.n[__builtin_ctz(pool->gpu_mask)];
	pool->compact_rate = rate;
	go_on(d);
	return 0;
}

uint32_t kv_compact_start(struct kv_pool *pool, uint32_t n_extents)
{
	struct kv_compaction *c = get(pool->daemon);

	if (!c || (c->n && c->pool != pool))
		return 0;
	return c->n || begin(c, pool, n_extents) ? c->n_empty : 0;
}

bool kv_compact_runs(const struct kv_daemon *d)
{
	return d->compaction && d->compaction->n;
}

const struct kv_mover_copy *kv_compact_job(struct kv_daemon *d, uint32_t gpu)
{
	struct kv_compaction *c = d->compaction;

	if (!c || !(c->waiting >> gpu & 1))
		return NULL;
	c->waiting &= ~(1u << gpu);
	c->running |= 1u << gpu;
	return &c->message;
}

void kv_compact_done(struct kv_daemon *d, uint32_t gpu, bool ok)
{
	struct kv_compaction *c = d->compaction;
	struct kv_pool *pool = c->pool;

	c->running &= ~(1u << gpu);
	c->failed |= !ok;
	if (c->failed)
		c->waiting = 0;
	if (c->running || c->waiting)
		return;
	if (pool) {
		uint32_t n = kv_books_move_end(&pool->books, c->moves, c->n, !c->failed);

		pool->compacted_bytes += n * pool->block_bytes;
		if (!n && pool->compact_extents) {
			kv_log(KV_LOG_INFO, "pool '%s': compaction ends, nothing moves any more",
			       pool->name);
			pool->compact_extents = 0;
		}
	}
	c->n = 0;
	c->pool = NULL;
	if (c->timer && next_asked(d))
		go_on(d);
}

void kv_compact_forget(struct kv_pool *pool)
{
	struct kv_compaction *c = pool->daemon->compaction;

	pool->compact_extents = 0;
	if (c && c->pool == pool)
		c->pool = NULL;
}

bool kv_compact_has_former(const struct kv_daemon *d, uint32_t gpu_mask)
{
	for (uint32_t g = 0; g < d->n_gpus; g++) {
		if (gpu_mask >> g & 1 && kv_mover_is_former(d->gpus[g].mover) &&
		    kv_mover_is_ending(d->gpus[g].mover))
			return true;
	}
	return false;
}

void kv_compact_former_ended(struct kv_daemon *d)
{
	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);

		if (pool->has_former_moves && !kv_compact_has_former(d, pool->gpu_mask)) {
			pool->has_former_moves = false;
			kv_books_move_forget(&pool->books);
		}
	}
}

void kv_compact_stop(struct kv_daemon *d)
{
	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next)
		kv_compact_forget(kv_container_of(l, struct kv_pool, link));
}

void kv_compact_end(struct kv_daemon *d)
{
	if (d->compaction)
		kv_timer_free(d->compaction->timer);
	free(d->compaction);
	d->compaction = NULL;
}
