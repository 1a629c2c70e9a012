/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who gets memory. A pool that needs n free blocks gets them, in this order, from
 *   1. extents that nobody owns, up to its maximum; others' minimums, what the queue waits for, and,
 *      for a pool above its share, the clean reserve are left alone; then extents that other pools own
 *      above their minimum and use no block of;
 *   2. cached blocks that nobody holds: its own, or extents of other pools above their minimum that run
 *      empty by eviction, whoever is to give first (share.c);
 *   3. idle leases of sessions (recall.c);
 * and then those who hold more than their share are asked (recall.c), while the request waits in the
 * queue (queue.c). Extents of other pools are zeroed by the mover before they are handed out: the
 * request waits for that; from the clean reserve it need not.
 * All or nothing: where the whole can't be had, nothing of the asking pool's cache is given up.
 */
#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "daemon/daemon.h"
#include "daemon/log.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"

/* A pool grows by at least this much at a time, so that its extents lie together. */
#define GROW_BYTES ((uint64_t)32 << 20)
/* What is needed is taken from others in so many parts: each from whoever is to give first by then. */
#define GIVE_PARTS 8

uint32_t kv_capacity_extents(const struct kv_pool *pool, uint64_t bytes)
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
		uint32_t min = kv_capacity_extents(other, other->min_bytes);

		if (other != pool && other->gpu_mask & pool->gpu_mask && min > other->n_extents)
			n += min - other->n_extents;
	}
	return n;
}

static bool covered(const struct kv_pool *pool, int32_t id)
{
	const struct kv_space *space = &pool->books.space;
	uint32_t i = kv_space_first(space, id), last = kv_space_last(space, id);

	while (i <= last && space->extents[i].owned)
		i++;
	return i > last;
}

/* Blocks that lie wholly in extents of the pool, now that [first, first + n) has come. */
static int add_blocks(struct kv_pool *pool, uint32_t first, uint32_t n)
{
	uint64_t size = pool->daemon->extents.bytes;
	uint64_t id = (uint64_t)first * size / pool->block_bytes;
	uint64_t end = (((uint64_t)first + n) * size + pool->block_bytes - 1) / pool->block_bytes;

	for (; id < end && id < pool->head->id_limit; id++) {
		int r;

		kv_books_prefetch(&pool->books, (uint32_t)id + 12);
		if (!kv_books_is_absent(&pool->books, (int32_t)id) || !covered(pool, (int32_t)id))
			continue;
		if (pool->books.n_total == pool->max_blocks && (int32_t)id != pool->head->null_block) {
			pool->left_out = true;
			break;
		}
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
			if (kv_extents_owned(e, g, i, (uint32_t)pool->id)) {
				kv_isolate_left(pool, i);
				kv_extents_give(e, 1u << g, i, 1);
			}
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

static uint32_t extents_of_blocks(const struct kv_pool *pool, uint64_t n)
{
	return n ? kv_capacity_extents(pool, n * pool->block_bytes + pool->block_bytes) : 0;
}

uint32_t kv_capacity_lacking(const struct kv_pool *pool, uint32_t n)
{
	return extents_of_blocks(pool, lacking(pool, n));
}

/* Extents that were taken become the pool's. */
static void own(struct kv_pool *pool, uint32_t first, uint32_t n)
{
	pool->n_extents += n;
	for (uint32_t i = first; i < first + n; i++)
		kv_space_own(&pool->books.space, i, true);
	kv_isolate_came(pool, first, n);
}

static bool is_beside_own(const struct kv_pool *pool, uint32_t first, uint32_t n)
{
	const struct kv_extents *e = &pool->daemon->extents;
	uint32_t gpu = (uint32_t)__builtin_ctz(pool->gpu_mask), id = (uint32_t)pool->id;

	return (first && kv_extents_owned(e, gpu, first - 1, id)) ||
	       kv_extents_owned(e, gpu, first + n, id);
}

/*
 * Extents that stay clean and unowned for pools below their share, so that these need not wait for
 * others to give and the mover to zero: while several pools are in use, 1/64 of the memory.
 */
static uint32_t reserve(const struct kv_daemon *d, uint32_t gpu)
{
	uint32_t n = d->extents.n[gpu], n_used = 0;

	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		const struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);

		n_used += pool->n_sessions && pool->gpu_mask >> gpu & 1;
	}
	return n_used < 2 || n < 16 ? 0 : (n + 63) / 64;
}

/* Extents that @pool leaves alone although nobody owns them. */
static uint32_t not_for(const struct kv_pool *pool, bool with_reserve)
{
	uint32_t n = promised_to_others(pool) + kv_queue_spoken(pool);

	return n + (with_reserve && pool->n_extents >= pool->share_extents ?
			    reserve(pool->daemon, (uint32_t)__builtin_ctz(pool->gpu_mask)) :
			    0);
}

/* Takes runs of extents that nobody owns until @n blocks are free or there are no more. */
static int grow(struct kv_pool *pool, uint32_t n, uint32_t spare)
{
	struct kv_extents *e = &pool->daemon->extents;
	uint32_t limit = kv_capacity_extents(pool, pool->max_bytes) + 1;
	uint32_t clean = kv_extents_usable(e, pool->gpu_mask, (uint32_t)pool->id);
	uint32_t least = kv_capacity_extents(pool, pool->block_bytes), at = 0;

	/* Its maximum was lower when they came: its own extents have blocks that it may use by now. */
	if (pool->left_out && pool->books.n_total < pool->max_blocks) {
		pool->left_out = false;
		if (add_blocks(pool, 0, e->n[__builtin_ctz(pool->gpu_mask)]) < 0)
			return -ENOMEM;
	}
	while (lacking(pool, n) && pool->books.n_total < pool->max_blocks) {
		uint64_t bytes = lacking(pool, n) * pool->block_bytes + pool->block_bytes;
		uint32_t first, got = kv_capacity_extents(pool, bytes < GROW_BYTES ? GROW_BYTES : bytes);

		if (clean <= spare || pool->n_extents >= limit)
			return 0;
		got = got < clean - spare ? got : clean - spare;
		got = got < limit - pool->n_extents ? got : limit - pool->n_extents;
		got = kv_extents_run(e, pool->gpu_mask, (uint32_t)pool->id, got, &at, &first);
		if (!got)
			return 0;
		if (got < least && !is_beside_own(pool, first, got))
			continue;
		kv_extents_take(e, pool->gpu_mask, first, got, (uint32_t)pool->id);
		own(pool, first, got);
		clean -= got;
		if (add_blocks(pool, first, got) < 0)
			return -ENOMEM;
	}
	return 0;
}

/* Gives back extents that no block in use touches. Return: how many. */
static uint32_t shed(struct kv_pool *pool, uint32_t n)
{
	uint32_t keep = kv_capacity_extents(pool, pool->min_bytes), done = 0;
	int32_t i;

	for (; done < n && pool->n_extents > keep; done++) {
		i = kv_space_spare(&pool->books.space);
		if (i < 0)
			break;
		kv_books_give_extent(&pool->books, (uint32_t)i);
		kv_isolate_left(pool, (uint32_t)i);
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
	uint32_t keep = kv_capacity_extents(pool, pool->min_bytes);

	if (pool->layout.kind == KV_LAYOUT_PAGED)
		return is_left_alone(pool) ? pool->n_extents : 0;
	return pool->n_extents > keep ? pool->n_extents - keep : 0;
}

static uint32_t cached_in(const struct kv_pool *pool, uint32_t n_extents)
{
	uint64_t blocks = n_extents * pool->daemon->extents.bytes / pool->block_bytes + 1;

	return blocks < pool->books.n_cached ? (uint32_t)blocks : pool->books.n_cached;
}

static bool evict_for_others(struct kv_pool *pool, uint32_t n_blocks)
{
	uint32_t n_evicted = kv_books_evict(&pool->books, n_blocks, false);

	pool->record->n_evicted_others += n_evicted;
	return n_evicted;
}

/*
 * Up to @n extents of a pool: empty ones, or one round of eviction. Where there is nothing to evict
 * any more it may end as a whole. Return: how many; *ret_more: asking again may bring more.
 */
static uint32_t take_from(struct kv_pool *other, uint32_t n, bool *ret_more)
{
	bool flat = other->layout.kind == KV_LAYOUT_FLAT;
	uint32_t done = flat ? shed(other, n) : 0, spare = spare_extents(other);

	*ret_more = true;
	if (done)
		return done;
	/* As many blocks as would fill them if they lay together. */
	if (spare && (evict_for_others(other, kv_gradual_blocks(other->daemon, cached_in(other, n < spare ? n : spare))) ||
		      other->daemon->goes_on))
		return flat ? shed(other, n) : 0;
	*ret_more = false;
	if (is_left_alone(other) && !other->books.n_cached) {
		done = other->n_extents;
		kv_pool_free(other);
	}
	return done;
}

static bool may_compact(const struct kv_pool *pool)
{
	return pool->layout.kind == KV_LAYOUT_FLAT && spare_extents(pool);
}

/*
 * Up to @n extents on these GPUs that pools but @except own and have nothing in, from whoever has most of
 * them: that costs nobody's cache. Return: how many.
 */
static uint32_t take_empty(struct kv_daemon *d, uint32_t gpu_mask, const struct kv_pool *except, uint32_t n)
{
	uint32_t done = 0, got;

	do {
		struct kv_pool *most = NULL;

		for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
			struct kv_pool *other = kv_container_of(l, struct kv_pool, link);

			/* Who waits would take them back. */
			if (other == except || !(other->gpu_mask & gpu_mask) || other->n_waiting ||
			    !may_compact(other))
				continue;
			if (kv_space_n_spare(&other->books.space) >
			    (most ? kv_space_n_spare(&most->books.space) : 0))
				most = other;
		}
		got = most && done < n ? shed(most, (n - done + 1) / 2) : 0;
		done += got;
	} while (got);
	return done;
}

/* Others' extents until @n are on their way to becoming clean, or @pool itself should give first. */
static uint32_t take_from_others(struct kv_pool *pool, uint32_t n, bool own_too)
{
	struct kv_daemon *d = pool->daemon;
	struct kv_pool *other;
	uint32_t done = take_empty(d, pool->gpu_mask, pool, n), coming = 0;
	uint64_t round = ++d->giving_round;

	kv_shares_update(d, pool->gpu_mask);
	d->goes_on = false;
	while (done < n && !d->goes_on && (other = kv_share_giver(d, pool->gpu_mask, pool, round))) {
		uint32_t want = n - done, part = n / GIVE_PARTS + 1;
		bool more;

		if (own_too && pool->books.n_cached && kv_share_own_first(pool, other))
			break;
		other->exhausted_in = round;
		/* Where little of many extents is in use, what is worth keeping moves together first. */
		if (!kv_space_n_spare(&other->books.space) && may_compact(other)) {
			coming = kv_compact_start(other, want);
			if (coming)
				break;
		}
		done += take_from(other, want < part ? want : part, &more);
		if (more)
			other->exhausted_in = 0;
	}
	d->moved_extents += done;
	kv_mover_scrub(d);
	return done + coming;
}

void kv_reserve_fill(struct kv_daemon *d)
{
	struct kv_pool *giver;

	for (uint32_t g = 0; g < d->n_gpus; g++) {
		uint32_t n = reserve(d, g), have = d->extents.n[g] -
						   d->extents.n_state[g][KV_EXTENT_OWNED];
		uint64_t round = ++d->giving_round;
		uint32_t empty;
		bool more;

		if (have >= n)
			continue;
		empty = take_empty(d, 1u << g, NULL, n - have);
		have += empty;
		d->moved_extents += empty;
		kv_shares_update(d, 1u << g);
		d->goes_on = false;
		while (have < n && !d->goes_on && (giver = kv_share_giver(d, 1u << g, NULL, round)) &&
		       giver->n_extents > giver->share_extents) {
			uint32_t got;

			giver->exhausted_in = round;
			/* It would take them back, with all that the mover has cleaned by then. */
			if (giver->n_waiting)
				continue;
			got = take_from(giver, n - have, &more);
			if (more)
				giver->exhausted_in = 0;
			have += got;
			d->moved_extents += got;
		}
	}
	kv_mover_scrub(d);
}

/* What a new pool begins with: its whole slab, or the null block and one more. */
static uint32_t first_extents(const struct kv_pool *pool)
{
	uint64_t size = pool->daemon->extents.bytes;

	if (pool->slab_blocks)
		return kv_capacity_extents(pool, pool->slab_blocks * pool->block_bytes);
	/* A block may begin in the middle of an extent: one more is needed to cover it wherever. */
	return kv_capacity_extents(pool, 2 * pool->block_bytes) + (size % pool->block_bytes != 0);
}

int kv_capacity_claim(struct kv_pool *pool)
{
	struct kv_extents *e = &pool->daemon->extents;
	uint32_t spare = promised_to_others(pool), n = first_extents(pool);
	uint32_t min = kv_capacity_extents(pool, pool->min_bytes), need = n > min ? n : min;
	uint32_t clean = kv_extents_available(e, pool->gpu_mask, false);

	if (clean < need + spare || !kv_extents_find(e, pool->gpu_mask, n, n, &pool->first_extent)) {
		if (kv_extents_available(e, pool->gpu_mask, true) > clean ||
		    take_from_others(pool, clean < need + spare ? need + spare - clean : 1, false))
			return -EAGAIN;
		if (pool->daemon->goes_on)
			return -EAGAIN;
		return kv_error(-ENOMEM,
				"pool '%s' needs %u extents of %llu bytes, %u of them in a row; %u are "
				"free and %u of these promised to other pools",
				pool->name, need, (unsigned long long)e->bytes, n, clean, spare);
	}
	kv_pool_take_id(pool);
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
	kv_isolate_came(pool, pool->first_extent, first_extents(pool));
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
	kv_isolate_adopt(pool);
	r = kv_books_rebuild(&pool->books, found);
	/* Extents that had come, and whose blocks had not been added yet. */
	return r < 0 || !flat || !found->n_absent ? r : add_blocks(pool, 0, e->n[__builtin_ctz(pool->gpu_mask)]);
}

/* Could @pool own @n_extents more, if all that is dirty were clean? */
static bool may_get(const struct kv_pool *pool, uint32_t n_extents)
{
	uint32_t have = kv_extents_available(&pool->daemon->extents, pool->gpu_mask, true);

	return have >= not_for(pool, false) + n_extents &&
	       have > kv_extents_available(&pool->daemon->extents, pool->gpu_mask, false);
}

/* What others have to give for it: what they gave before and the mover has yet to clean counts. */
static uint32_t to_be_given(const struct kv_pool *pool, uint32_t n_extents)
{
	uint32_t have = kv_extents_available(&pool->daemon->extents, pool->gpu_mask, true);
	uint32_t need = not_for(pool, false) + n_extents;

	return need > have ? need - have : n_extents;
}

bool kv_capacity_never_fits(const struct kv_pool *pool, uint32_t n)
{
	if (pool->layout.kind == KV_LAYOUT_PAGED && n > pool->books.n_total)
		return true;
	return n > kv_limits_most_blocks(pool);
}

/* Blocks in use beyond which @n more would exceed what it may have. */
static uint64_t over_limit(const struct kv_pool *pool, uint32_t n)
{
	uint64_t used = pool->books.n_total - pool->books.n_free, most = kv_limits_most_blocks(pool);

	return used + n > most ? used + n - most : 0;
}

/* Its own unheld cached blocks, all that are needed or none. 0; KV_NO_ROOM; -EAGAIN */
static int evict_own(struct kv_pool *pool, uint32_t n)
{
	uint64_t over = over_limit(pool, n), need = lacking(pool, n);

	need = over > need ? over : need;
	if (need > pool->books.n_cached)
		return KV_NO_ROOM;
	return need ? kv_gradual_own(pool, need) : 0;
}

static bool is_there(const struct kv_pool *pool, uint32_t n)
{
	return !lacking(pool, n) && !over_limit(pool, n);
}

/*
 * Steps 1 and 2. What would exceed the maximum must come from its own cache; @m blocks of the @n may
 * be new ones.
 */
static int find_room(struct kv_pool *pool, uint32_t n)
{
	uint64_t over = over_limit(pool, n);
	uint32_t m = over < n ? n - (uint32_t)over : 0, n_extents;
	int r;

	if (is_there(pool, n))
		return 0;
	kv_shares_update(pool->daemon, pool->gpu_mask);
	if (over > pool->books.n_cached)
		return KV_NO_ROOM;
	if (pool->layout.kind == KV_LAYOUT_PAGED)
		return evict_own(pool, n);
	if (grow(pool, m, not_for(pool, true)) < 0)
		return KV_NO_ROOM;
	if (!lacking(pool, m))
		return evict_own(pool, n);

	n_extents = kv_capacity_lacking(pool, m);
	if (!may_get(pool, n_extents)) {
		take_from_others(pool, to_be_given(pool, n_extents), true);
		if (pool->daemon->goes_on)
			return -EAGAIN;
		r = may_get(pool, n_extents) ? KV_NO_ROOM : evict_own(pool, n);
		if (r <= 0)
			return r;
		/* What others gave is not enough, and neither is what it has: both together? */
		if (!may_get(pool, n_extents))
			take_from_others(pool, to_be_given(pool, n_extents), false);
		if (pool->daemon->goes_on)
			return -EAGAIN;
	}
	if (grow(pool, m, not_for(pool, false)) < 0)
		return KV_NO_ROOM;
	/* What the mover is cleaning for it costs nobody's cache. */
	if (lacking(pool, m) && may_get(pool, kv_capacity_lacking(pool, m)))
		return -EAGAIN;
	r = evict_own(pool, n);
	if (r <= 0)
		return r;
	return may_get(pool, kv_capacity_lacking(pool, m)) || kv_compact_runs(pool->daemon) ?
		       -EAGAIN :
		       KV_NO_ROOM;
}

/* Step 3. Return: whether any idle lease was called back. */
static bool call_back(struct kv_pool *pool, const struct kv_session *asking)
{
	struct kv_daemon *d = pool->daemon;
	uint32_t n = kv_recall(pool, asking);

	for (struct kv_link *l = d->pools.next; !n && l != &d->pools; l = l->next) {
		struct kv_pool *other = kv_container_of(l, struct kv_pool, link);

		if (other != pool && other->gpu_mask & pool->gpu_mask)
			n += kv_recall(other, NULL);
	}
	return n;
}

uint64_t kv_thread_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * KV_SEC + (uint64_t)t.tv_nsec;
}

int kv_capacity_room(struct kv_pool *pool, struct kv_session *asking, uint32_t n)
{
	uint64_t start;
	int r;

	pool->must_press = false;
	if (is_there(pool, n) && n <= pool->max_blocks)
		return 0;
	if (kv_capacity_never_fits(pool, n))
		return KV_TOO_LARGE;
	start = kv_thread_ns();
	pool->daemon->goes_on = false;
	r = find_room(pool, n);
	while (r == KV_NO_ROOM && call_back(pool, asking))
		r = find_room(pool, n);
	pool->daemon->moving_ns += kv_thread_ns() - start;
	pool->daemon->part_waits = pool->daemon->part_waits || (r == -EAGAIN && pool->daemon->goes_on);
	pool->must_press = r == KV_NO_ROOM;
	pool->wanted_blocks = n;
	return r;
}

bool kv_capacity_is_coming(const struct kv_session *session)
{
	const struct kv_pool *pool = session->pool;
	const struct kv_extents *e = &pool->daemon->extents;
	uint32_t clean = kv_extents_available(e, pool->gpu_mask, false);

	return session->is_coming && clean < kv_extents_available(e, pool->gpu_mask, true) &&
	       clean < kv_capacity_lacking(pool, session->want_n) + not_for(pool, false);
}

/* Of the @n extents that it lacks: are any being cleaned for it, or did others have empty ones? */
static bool extents_coming(struct kv_pool *pool, uint32_t n)
{
	uint32_t got;

	if (pool->books.n_total >= pool->max_blocks)
		return false;
	if (may_get(pool, n))
		return true;
	got = take_empty(pool->daemon, pool->gpu_mask, pool, to_be_given(pool, n));
	pool->daemon->moved_extents += got;
	if (got)
		kv_mover_scrub(pool->daemon);
	return got;
}

int kv_capacity_own(struct kv_pool *pool, uint32_t n)
{
	return evict_own(pool, n);
}

uint32_t kv_capacity_at_hand(struct kv_pool *pool, uint32_t n)
{
	uint64_t used = pool->books.n_total - pool->books.n_free, need;
	uint64_t most = kv_limits_most_blocks(pool);

	most -= used < most ? used : most;
	n = n < most ? n : (uint32_t)most;
	if (lacking(pool, n) && pool->layout.kind == KV_LAYOUT_FLAT)
		grow(pool, n, not_for(pool, true));
	need = lacking(pool, n);
	/* What lies idle in a magazine costs no cache while there are extents that nobody uses: those next time. */
	if (need && pool->layout.kind == KV_LAYOUT_FLAT && extents_coming(pool, kv_capacity_lacking(pool, n)))
		return pool->books.n_free;
	if (need)
		kv_books_evict(&pool->books, (uint32_t)need, false);
	return n < pool->books.n_free ? n : pool->books.n_free;
}

void kv_capacity_trim(struct kv_pool *pool)
{
	uint32_t most = kv_capacity_extents(pool, kv_limits_most(pool));
	uint64_t over = over_limit(pool, 0);

	if (over)
		kv_recall(pool, NULL);
	over = over_limit(pool, 0);
	if (over)
		kv_books_evict(&pool->books,
			       (uint32_t)(over < pool->books.n_cached ? over : pool->books.n_cached),
			       false);
	if (pool->layout.kind == KV_LAYOUT_PAGED)
		return;
	while (pool->n_extents > most) {
		pool->daemon->moved_extents += shed(pool, pool->n_extents - most);
		if (pool->n_extents <= most || !evict_for_others(pool, cached_in(pool, pool->n_extents - most)))
			break;
	}
	kv_mover_scrub(pool->daemon);
}

void kv_capacity_magazines(struct kv_pool *pool)
{
	/*
	 * All magazines together hold at most a sixteenth of the pool: idle blocks are few. While
	 * somebody waits for room none should be: sessions then give back all that is idle.
	 */
	bool scarce = pool->n_waiting;
	uint64_t n = pool->n_sessions && !scarce ? pool->max_blocks / (16 * pool->n_sessions) : 0;

	for (uint32_t i = 0; i < KV_MAX_SESSIONS; i++) {
		if (pool->slots[i])
			kv_store_relaxed(&pool->slots[i]->shm->n_magazine,
					 (uint32_t)(n > 256 ? 256 : n));
	}
}
