/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who gets memory. A pool that needs n free blocks gets them, in this order, from
 *   1. extents that nobody owns, up to its maximum, others' guaranteed minimum left alone;
 *   2. its own cached blocks that nobody holds, least recently used first;
 *   3. extents of other pools above their minimum: empty ones, then what eviction empties, and
 *      at last pools that nobody is attached to and that have nothing cached any more.
 * Extents of step 3 are zeroed by the mover before they are handed out: the request waits for that.
 * All or nothing: where the whole can't be had, nothing of the asking pool's cache is given up.
 */
#include <errno.h>
#include <stdlib.h>

#include "daemon/daemon.h"
#include "daemon/log.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"

/* A pool grows by at least this much at a time, so that its extents lie together. */
#define GROW_BYTES ((uint64_t)32 << 20)
/* How long a request may wait for zeroing, beyond its own timeout. */
#define SCRUB_WAIT (5 * KV_SEC)
/* Clients unpin without a message: who waits for room looks again after so long. */
#define LOOK_AGAIN (KV_MSEC)

static uint32_t extents_for(const struct kv_pool *pool, uint64_t bytes)
{
	uint64_t size = pool->daemon->extents.bytes;

	return (uint32_t)((bytes + size - 1) / size);
}

/* Extents that pools other than @pool may still claim as their minimum. */
static uint32_t promised_to_others(const struct kv_pool *pool)
{
	struct kv_daemon *d = pool->daemon;
	uint32_t n = 0;

	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		struct kv_pool *other = kv_container_of(l, struct kv_pool, link);
		uint32_t min = extents_for(other, other->min_bytes);

		if (other != pool && other->gpu_mask & pool->gpu_mask && min > other->n_extents)
			n += min - other->n_extents;
	}
	return n;
}

static bool covered(const struct kv_pool *pool, int32_t id)
{
	const struct kv_extents *e = &pool->daemon->extents;
	uint64_t first = (uint64_t)id * pool->block_bytes / e->bytes;
	uint64_t last = ((uint64_t)(id + 1) * pool->block_bytes - 1) / e->bytes;
	uint32_t gpu = (uint32_t)__builtin_ctz(pool->gpu_mask);

	for (uint64_t i = first; i <= last; i++) {
		if (!kv_extents_owned(e, gpu, (uint32_t)i, (uint32_t)pool->id))
			return false;
	}
	return true;
}

/* Blocks that lie wholly in extents of the pool, now that [first, first + n) has come. */
static int add_blocks(struct kv_pool *pool, uint32_t first, uint32_t n)
{
	uint64_t size = pool->daemon->extents.bytes;
	uint64_t id = (uint64_t)first * size / pool->block_bytes;
	uint64_t end = (((uint64_t)first + n) * size + pool->block_bytes - 1) / pool->block_bytes;

	for (; id < end && id < pool->head->id_limit; id++) {
		int r;

		if (!kv_books_is_absent(&pool->books, (int32_t)id) || !covered(pool, (int32_t)id))
			continue;
		if (pool->books.n_total == pool->max_blocks && (int32_t)id != pool->head->null_block)
			break;
		r = kv_books_add(&pool->books, (int32_t)id);
		if (r < 0)
			return r;
	}
	return 0;
}

void kv_capacity_release(struct kv_pool *pool)
{
	struct kv_extents *e = &pool->daemon->extents;

	for (uint32_t g = 0; g < pool->daemon->n_gpus; g++) {
		for (uint32_t i = 0; i < e->n[g]; i++) {
			if (kv_extents_owned(e, g, i, (uint32_t)pool->id))
				kv_extents_give(e, 1u << g, i, 1);
		}
	}
	pool->n_extents = 0;
	kv_mover_scrub(pool->daemon);
}

/* Blocks that the pool would still have to get to own @n free ones. */
static uint64_t lacking(const struct kv_pool *pool, uint32_t n)
{
	return n > pool->books.n_free ? n - pool->books.n_free : 0;
}

/* Extents that were taken become the pool's. */
static void own(struct kv_pool *pool, uint32_t first, uint32_t n)
{
	pool->n_extents += n;
	for (uint32_t i = first; i < first + n; i++)
		kv_space_own(&pool->books.space, i, true);
}

/* Step 1. Takes runs of clean extents until @n blocks are free or there are no more. */
static int grow(struct kv_pool *pool, uint32_t n)
{
	struct kv_extents *e = &pool->daemon->extents;

	while (lacking(pool, n) && pool->books.n_total < pool->max_blocks) {
		uint64_t bytes = lacking(pool, n) * pool->block_bytes + pool->block_bytes;
		uint32_t clean = kv_extents_available(e, pool->gpu_mask, false);
		uint32_t spare = promised_to_others(pool), first, got;
		uint32_t limit = extents_for(pool, pool->max_bytes) + 1;
		uint32_t before = pool->books.n_total;

		if (clean <= spare || pool->n_extents >= limit)
			return 0;
		got = extents_for(pool, bytes < GROW_BYTES ? GROW_BYTES : bytes);
		got = got < clean - spare ? got : clean - spare;
		got = got < limit - pool->n_extents ? got : limit - pool->n_extents;
		got = kv_extents_find(e, pool->gpu_mask, extents_for(pool, pool->block_bytes), got,
				      &first);
		if (!got)
			return 0;
		kv_extents_take(e, pool->gpu_mask, first, got, (uint32_t)pool->id);
		own(pool, first, got);
		if (add_blocks(pool, first, got) < 0)
			return -ENOMEM;
		if (pool->books.n_total == before)
			return 0;
	}
	return 0;
}

/* Gives back extents that no block in use touches. Return: how many. */
static uint32_t shed(struct kv_pool *pool, uint32_t n)
{
	uint32_t keep = extents_for(pool, pool->min_bytes), done = 0;
	int32_t i;

	for (; done < n && pool->n_extents > keep; done++) {
		i = kv_space_spare(&pool->books.space);
		if (i < 0)
			break;
		kv_books_give_extent(&pool->books, (uint32_t)i);
		kv_extents_give(&pool->daemon->extents, pool->gpu_mask, (uint32_t)i, 1);
		pool->n_extents--;
	}
	return done;
}

/* Nobody is attached, nothing is promised: without its cache it is a name and a null block. */
static bool is_left_alone(const struct kv_pool *pool)
{
	return !pool->n_sessions && !pool->min_bytes;
}

/* Extents that eviction may bring back: a pool's minimum stays, and a slab stays whole. */
static uint32_t spare_extents(const struct kv_pool *pool)
{
	uint32_t keep = extents_for(pool, pool->min_bytes);

	if (pool->layout.kind == KV_LAYOUT_PAGED)
		return is_left_alone(pool) ? pool->n_extents : 0;
	return pool->n_extents > keep ? pool->n_extents - keep : 0;
}

/* Evicts what would fill @n extents if it lay together. */
static bool evict_extents(struct kv_pool *pool, uint32_t n)
{
	uint64_t blocks = n * pool->daemon->extents.bytes / pool->block_bytes + 1;
	uint32_t n_cached = pool->books.n_cached, n_evicted;

	n_evicted = kv_books_evict(&pool->books, blocks < n_cached ? (uint32_t)blocks : n_cached, false);
	pool->record->n_evicted_others += n_evicted;
	return n_evicted;
}

/* So many extents of another pool, by eviction if need be. Return: how many it gave. */
static uint32_t take_from(struct kv_pool *other, uint32_t n, bool evicting)
{
	bool flat = other->layout.kind == KV_LAYOUT_FLAT;
	uint32_t done = flat ? shed(other, n) : 0, spare;

	while (evicting && done < n && (spare = spare_extents(other)) &&
	       evict_extents(other, n - done < spare ? n - done : spare)) {
		if (flat)
			done += shed(other, n - done);
	}
	if (evicting && done < n && is_left_alone(other) && !other->books.n_cached) {
		done += other->n_extents;
		kv_pool_free(other);
	}
	return done;
}

/* Step 3. Return: whether any extent is on its way to becoming clean. */
static bool take_from_others(struct kv_pool *pool, uint32_t n_extents)
{
	struct kv_daemon *d = pool->daemon;
	uint32_t done = 0;

	for (int evicting = 0; evicting < 2; evicting++) {
		struct kv_link *next;

		for (struct kv_link *l = d->pools.next; l != &d->pools && done < n_extents; l = next) {
			struct kv_pool *other = kv_container_of(l, struct kv_pool, link);

			next = l->next;
			if (other != pool && other->gpu_mask & pool->gpu_mask)
				done += take_from(other, n_extents - done, evicting);
		}
	}
	kv_mover_scrub(d);
	return done;
}

/* What a new pool begins with: its whole slab, or the null block and one more. */
static uint32_t first_extents(const struct kv_pool *pool)
{
	uint64_t size = pool->daemon->extents.bytes;

	if (pool->slab_blocks)
		return extents_for(pool, pool->slab_blocks * pool->block_bytes);
	/* A block may begin in the middle of an extent: one more is needed to cover it wherever. */
	return extents_for(pool, 2 * pool->block_bytes) + (size % pool->block_bytes != 0);
}

int kv_capacity_claim(struct kv_pool *pool)
{
	struct kv_extents *e = &pool->daemon->extents;
	uint32_t spare = promised_to_others(pool), n = first_extents(pool);
	uint32_t min = extents_for(pool, pool->min_bytes), need = n > min ? n : min;
	uint32_t clean = kv_extents_available(e, pool->gpu_mask, false);

	if (clean < need + spare || !kv_extents_find(e, pool->gpu_mask, n, n, &pool->first_extent)) {
		if (kv_extents_available(e, pool->gpu_mask, true) > clean ||
		    take_from_others(pool, clean < need + spare ? need + spare - clean : 1))
			return -EAGAIN;
		return kv_error(-ENOMEM,
				"pool '%s' needs %u extents of %llu bytes, %u of them in a row; %u are "
				"free and %u of these promised to other pools",
				pool->name, need, (unsigned long long)e->bytes, n, clean, spare);
	}
	kv_extents_take(e, pool->gpu_mask, pool->first_extent, n, (uint32_t)pool->id);
	pool->n_extents = n;
	if (pool->slab_blocks)
		pool->slab_offset = pool->first_extent * e->bytes;
	return 0;
}

int kv_capacity_begin(struct kv_pool *pool)
{
	uint64_t start = pool->first_extent * pool->daemon->extents.bytes;

	if (!pool->slab_blocks) {
		if (kv_books_set_extents(&pool->books, pool->daemon->extents.bytes) < 0)
			return -ENOMEM;
		pool->n_extents = 0;
		own(pool, pool->first_extent, first_extents(pool));
		pool->head->null_block =
			(int32_t)((start + pool->block_bytes - 1) / pool->block_bytes);
		return add_blocks(pool, pool->first_extent, pool->n_extents);
	}
	pool->head->null_block = 0;
	for (uint32_t id = 0; id < pool->slab_blocks; id++) {
		int r = kv_books_add(&pool->books, (int32_t)id);

		if (r < 0)
			return r;
	}
	return 0;
}

/* True: extent @i is the pool's on all its devices. If only on some, it was just coming or going. */
static bool adopt_extent(struct kv_pool *pool, uint32_t i)
{
	struct kv_extents *e = &pool->daemon->extents;
	uint32_t mask = 0;

	for (uint32_t g = 0; g < e->n_gpus; g++)
		mask |= kv_extents_owned(e, g, i, (uint32_t)pool->id) ? 1u << g : 0;
	if (mask == pool->gpu_mask)
		return true;
	for (uint32_t g = 0; g < e->n_gpus; g++) {
		if (mask >> g & 1)
			kv_extents_reset(e, g, i);
	}
	return false;
}

int kv_capacity_adopt(struct kv_pool *pool, struct kv_books_found *found)
{
	const struct kv_extents *e = &pool->daemon->extents;
	bool flat = !pool->slab_blocks;
	uint32_t n = 0;
	int r;

	if (flat && kv_books_set_extents(&pool->books, e->bytes) < 0)
		return -ENOMEM;
	for (uint32_t g = 0; g < e->n_gpus; g++)
		n = e->n[g] > n ? e->n[g] : n;
	for (uint32_t i = 0; i < n; i++) {
		if (!adopt_extent(pool, i))
			continue;
		pool->n_extents++;
		if (flat)
			kv_space_own(&pool->books.space, i, true);
	}
	r = kv_books_rebuild(&pool->books, found);
	/* Extents that had come, and whose blocks had not been added yet. */
	return r < 0 || !flat ? r : add_blocks(pool, 0, e->n[__builtin_ctz(pool->gpu_mask)]);
}

/* Could @pool own @n_extents more, if all that is dirty were clean? */
static bool may_get(const struct kv_pool *pool, uint32_t n_extents)
{
	uint32_t have = kv_extents_available(&pool->daemon->extents, pool->gpu_mask, true);

	return have >= promised_to_others(pool) + n_extents &&
	       have > kv_extents_available(&pool->daemon->extents, pool->gpu_mask, false);
}

int kv_capacity_room(struct kv_pool *pool, uint32_t n, bool all)
{
	uint64_t need;
	uint32_t n_extents;

	if (n > pool->max_blocks)
		return KV_TOO_LARGE;
	if (grow(pool, n) < 0)
		return KV_NO_ROOM;
	need = lacking(pool, n);
	if (!need || kv_books_evict(&pool->books, (uint32_t)need, all) >= need)
		return 0;
	if (!all || pool->books.n_total >= pool->max_blocks || pool->layout.kind == KV_LAYOUT_PAGED)
		return KV_NO_ROOM;

	n_extents = extents_for(pool, need * pool->block_bytes + pool->block_bytes);
	if (!may_get(pool, n_extents))
		take_from_others(pool, n_extents);
	return may_get(pool, n_extents) ? -EAGAIN : KV_NO_ROOM;
}

void kv_capacity_wait(struct kv_session *session)
{
	kv_list_append(&session->pool->waiters, &session->waiter);
	kv_capacity_magazines(session->pool);
	kv_timer_set(session->peer->daemon->waiter_timer, LOOK_AGAIN);
}

/* Answers a waiter if it can be answered. True: it is done with. */
static bool serve(struct kv_session *session)
{
	struct kv_pool *pool = session->pool;
	int64_t now = kv_now();
	struct kv_msg_leased reply = { .n = session->want_n };
	int r;

	/* Other sessions of its user may have got what it was still allowed when it asked. */
	if (kv_user_blocks(session, session->want_n) < session->want_n) {
		kv_link_unlink(&session->waiter);
		kv_peer_error(session->peer, session->want_tag,
			      kv_user_too_many_blocks(session, session->want_n), "%s",
			      kv_error_text());
		return true;
	}
	r = kv_capacity_room(pool, session->want_n, true);
	if (r == -EAGAIN && now < session->want_scrub_deadline)
		return false;
	if (r && r != KV_TOO_LARGE && now < session->want_deadline)
		return false;

	if (!r) {
		uint32_t extra = pool->books.n_free - session->want_n;

		extra = extra < session->want_extra ? extra : session->want_extra;
		reply.n = kv_user_blocks(session, reply.n + extra);
		kv_session_post(session, reply.n);
	} else {
		reply.answer = r == KV_TOO_LARGE ? r : KV_NO_ROOM;
		reply.n = 0;
		pool->n_no_room++;
	}
	kv_link_unlink(&session->waiter);
	kv_latency_add(&pool->record->refills, (uint64_t)(now - session->want_since));
	kv_wire_init(&reply.head, KV_MSG_LEASED, sizeof(reply), session->want_tag);
	kv_peer_send(session->peer, &reply, sizeof(reply), NULL, 0);
	return true;
}

static void serve_pool(struct kv_pool *pool)
{
	bool waited = !kv_link_is_alone(&pool->waiters);

	/* In order of arrival: a large request is not starved by small ones behind it. */
	while (!kv_link_is_alone(&pool->waiters)) {
		struct kv_session *first =
			kv_container_of(pool->waiters.next, struct kv_session, waiter);

		if (!serve(first))
			break;
	}
	if (waited && kv_link_is_alone(&pool->waiters))
		kv_capacity_magazines(pool);
}

void kv_capacity_serve(struct kv_daemon *d, struct kv_pool *pool)
{
	bool waiting = false;

	if (pool) {
		serve_pool(pool);
		return;
	}
	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		struct kv_pool *p = kv_container_of(l, struct kv_pool, link);

		serve_pool(p);
		waiting |= !kv_link_is_alone(&p->waiters);
	}
	if (waiting)
		kv_timer_set(d->waiter_timer, LOOK_AGAIN);
}

void kv_capacity_magazines(struct kv_pool *pool)
{
	/*
	 * All magazines together hold at most a sixteenth of the pool: idle blocks are few. While
	 * somebody waits for room none should be: sessions then give back all that is idle.
	 */
	bool scarce = !kv_link_is_alone(&pool->waiters);
	uint64_t n = pool->n_sessions && !scarce ? pool->max_blocks / (16 * pool->n_sessions) : 0;

	for (uint32_t i = 0; i < KV_MAX_SESSIONS; i++) {
		if (pool->slots[i])
			kv_store_relaxed(&pool->slots[i]->shm->n_magazine,
					 (uint32_t)(n > 256 ? 256 : n));
	}
}
