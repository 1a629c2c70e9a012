/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compaction: extents run empty because the mover copies what is cached in them elsewhere in the pool.
 * alloc/move.c plans a batch and ends it; here it is given to the mover of each of the pool's
 * devices, and the next one follows: at full speed while a request waits for the extents, for an
 * operator (kvctl pool compact) under his cap, and with pauses while anybody waits for room.
 *
 * Two batches of one pool at a time: while the movers copy one, the one before is ended and the next one
 * planned, and a mover finds that in its queue when it is done. A mover that dies ends its batches:
 * nothing has moved by them.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/daemon.h"
#include "daemon/events.h"
#include "daemon/log.h"
#include "daemon/mover.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"

#define HOST_BATCH   ((uint64_t)64 << 20)
#define DEVICE_BATCH ((uint64_t)1 << 30) /* half a millisecond of a GPU's copying */
#define BATCHES	     2
#define FIRST_PART   4 /* of a batch: nothing is copied while the first one is planned */
#define PAUSE	     (5 * KV_MSEC)
#define MOVER_PAUSE  (100 * KV_MSEC) /* while one has yet to end */

struct batch {
	uint64_t number; /* of the smaller one movers hear first */
	struct kv_books_move moves[KV_MOVER_PAIRS];
	uint32_t n; /* moves under way; 0: none */
	uint32_t n_empty; /* extents that run empty by them, if all goes well */
	uint32_t waiting, running; /* devices whose mover has yet to begin, to end */
	bool failed;
	struct kv_mover_copy message;
};

struct kv_compaction {
	struct kv_pool *pool; /* of all batches; NULL: none, or it has ended meanwhile */
	struct batch batches[BATCHES];
	uint64_t n_begun;
	int64_t not_before; /* the cap: when the next batch may begin */
	struct kv_timer *timer;
};

static bool runs(const struct kv_compaction *c)
{
	uint32_t n = 0;

	for (int i = 0; i < BATCHES; i++)
		n += c->batches[i].n;
	return n;
}

static struct batch *unused(struct kv_compaction *c)
{
	for (int i = 0; i < BATCHES; i++) {
		if (!c->batches[i].n)
			return &c->batches[i];
	}
	return NULL;
}

/* The first one that the mover of @gpu has to begin, or to end. */
static struct batch *oldest(struct kv_compaction *c, uint32_t gpu, bool running)
{
	struct batch *first = NULL;

	for (int i = 0; i < BATCHES; i++) {
		struct batch *batch = &c->batches[i];

		if (batch->n && (running ? batch->running : batch->waiting) >> gpu & 1 &&
		    (!first || batch->number < first->number))
			first = batch;
	}
	return first;
}

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

static void make_message(struct batch *batch, uint64_t block_bytes)
{
	batch->message.job = (struct kv_mover_job){ .op = KV_MOVER_COPY,
						    .bytes = block_bytes,
						    .n_pairs = batch->n };
	for (uint32_t i = 0; i < batch->n; i++) {
		batch->message.pairs[i][0] = batch->moves[i].from;
		batch->message.pairs[i][1] = batch->moves[i].to;
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

/* Return: the extents that run empty by another batch; 0: none has begun. */
static uint32_t begin(struct kv_compaction *c, struct kv_pool *pool, uint32_t n_extents)
{
	uint32_t most = batch_blocks(pool), least = least_blocks(pool), n_empty;
	struct batch *batch = unused(c);

	if (!batch || !has_movers(pool))
		return 0;
	most = runs(c) ? most : most / FIRST_PART;
	batch->n = kv_books_move_plan(&pool->books, n_extents, batch->moves,
				      most > least ? most : least, &batch->n_empty);
	if (!batch->n)
		return 0;
	c->pool = pool;
	batch->number = ++c->n_begun;
	batch->failed = false;
	batch->waiting = pool->gpu_mask;
	batch->running = 0;
	make_message(batch, pool->block_bytes);
	if (pool->compact_rate)
		c->not_before = kv_now() + (int64_t)((double)batch->n * (double)pool->block_bytes *
						     1e9 / (double)pool->compact_rate);
	n_empty = batch->n_empty;
	kv_mover_scrub(pool->daemon); /* movers that have little to do take it */
	return n_empty;
}

static struct kv_compaction *get(struct kv_daemon *d)
{
	if (!d->compaction)
		d->compaction = calloc(1, sizeof(*d->compaction));
	return d->compaction;
}

static void end_asked(struct kv_pool *pool)
{
	pool->compact_extents = 0;
	pool->compact_ns += (uint64_t)(kv_now() - pool->compact_since);
}

static void go_on(void *arg)
{
	struct kv_daemon *d = arg;
	struct kv_compaction *c = d->compaction;
	struct kv_pool *pool;

	while ((pool = next_asked(d))) {
		int64_t now = kv_now();

		if (!unused(c) || (runs(c) && (c->pool != pool || pool->compact_rate)))
			return;
		if (!kv_link_is_alone(&d->queue) || now < c->not_before) {
			kv_timer_set(c->timer, now < c->not_before ? c->not_before - now : PAUSE);
			return;
		}
		if (!has_movers(pool)) {
			kv_timer_set(c->timer, MOVER_PAUSE);
			return;
		}
		/* What is under way may make more possible. */
		if (!begin(c, pool, pool->compact_extents)) {
			if (runs(c))
				return;
			end_asked(pool);
		}
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
	if (!pool->compact_extents)
		pool->compact_since = kv_now();
	pool->compact_extents = d->extents.n[__builtin_ctz(pool->gpu_mask)];
	pool->compact_rate = rate;
	go_on(d);
	return 0;
}

uint32_t kv_compact_start(struct kv_pool *pool, uint32_t n_extents)
{
	struct kv_compaction *c = get(pool->daemon);
	uint32_t n = 0, more = 1;

	if (!c || (runs(c) && c->pool != pool))
		return 0;
	for (int i = 0; i < BATCHES; i++)
		n += c->batches[i].n ? c->batches[i].n_empty : 0;
	while (n < n_extents && more) {
		more = begin(c, pool, n_extents - n);
		n += more;
	}
	return n;
}

bool kv_compact_runs(const struct kv_daemon *d)
{
	return d->compaction && runs(d->compaction);
}

const struct kv_mover_copy *kv_compact_job(struct kv_daemon *d, uint32_t gpu)
{
	struct batch *batch = d->compaction ? oldest(d->compaction, gpu, false) : NULL;

	if (!batch)
		return NULL;
	batch->waiting &= ~(1u << gpu);
	batch->running |= 1u << gpu;
	return &batch->message;
}

static void end(struct kv_compaction *c, struct batch *batch)
{
	struct kv_pool *pool = c->pool;
	uint32_t n = pool ? kv_books_move_end(&pool->books, batch->moves, batch->n, !batch->failed) : 0;
	uint32_t n_made = 0;

	for (uint32_t i = 0; n && i < batch->n; i++) {
		if (pool->books.books[batch->moves[i].to].state == KV_BLOCK_CACHED)
			batch->moves[n_made++] = batch->moves[i];
	}
	batch->n = 0;
	if (!pool)
		return;
	kv_events_moved(pool->daemon->events, pool, batch->moves, n_made);
	pool->compacted_bytes += n * pool->block_bytes;
	if (!n && pool->compact_extents) {
		kv_log(KV_LOG_INFO, "pool '%s': compaction ends, nothing moves any more", pool->name);
		end_asked(pool);
	}
}

void kv_compact_done(struct kv_daemon *d, uint32_t gpu, bool ok)
{
	struct kv_compaction *c = d->compaction;
	struct batch *batch = oldest(c, gpu, true);

	batch->running &= ~(1u << gpu);
	batch->failed |= !ok;
	if (batch->failed)
		batch->waiting = 0;
	if (batch->running || batch->waiting)
		return;
	end(c, batch);
	if (!runs(c))
		c->pool = NULL;
	if (c->timer && next_asked(d))
		go_on(d);
}

void kv_compact_forget(struct kv_pool *pool)
{
	struct kv_compaction *c = pool->daemon->compaction;

	if (pool->compact_extents)
		end_asked(pool);
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
