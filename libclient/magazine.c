/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Leases at hand.
 *
 *   take: stack of idle leases <- ring of grants <- LEASE message (only when both are short)
 *   give: stack of idle leases -> GIVE ops when it is more than twice what the daemon wants kept
 *
 * In the steady state a take is a load and a give is a store: no atomic, no message. The stack lies in
 * the session's pages, and the daemon calls idle leases back without us when others need them. The daemon is
 * asked for more, without waiting, when the magazine runs low; it says how large one should be
 * (n_magazine in the session page; 0 in a small pool, where every block counts).
 */
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/killpoint.h"
#include "include/internal/ring.h"
#include "libclient/pin.h"

/* How often a take asks when others have its idle leases each time; it has its deadline besides. */
#define REFILLS 8

/* What is off the path of a block stays out of its functions. */
#define SLOW __attribute__((noinline, cold))

/* One load; a count that can't be is none: pages that somebody scribbles in cost leases, not the process. */
static uint32_t n_idle(const struct kv_pool *pool)
{
	uint32_t n = kv_load_relaxed(&pool->session->n_stack);

	return __builtin_expect(n <= pool->grant_capacity, 1) ? n : 0;
}

static void set_idle(struct kv_pool *pool, uint32_t n)
{
	kv_store_relaxed(&pool->session->n_stack, n);
}

/* The daemon takes idle leases back: that takes it microseconds, or it is dead. */
static SLOW int wait_for_stack(struct kv_pool *pool)
{
	struct kv_shm_session *s = pool->session;
	int64_t deadline = kv_deadline(0);

	for (;;) {
		struct pollfd hangup = { .fd = pool->connection.fd };

		kv_store_release(&s->busy, 0);
		while (kv_load_acquire(&s->recall)) {
			poll(&hangup, 1, 0);
			/* A daemon that is gone doesn't come back for it; what it took it took in one store. */
			if (hangup.revents & (POLLHUP | POLLERR))
				kv_store_seq(&s->recall, 0);
			else if (kv_now() > deadline)
				return kv_error(-ETIMEDOUT, "daemon: it keeps the idle leases for itself");
			sched_yield();
		}
		kv_exchange_seq(&s->busy, 1);
		if (!kv_load_seq(&s->recall))
			return 0;
	}
}

/*
 * Between enter() and leave() the stack and the ring of grants are ours alone (shm.h draws it). False: the
 * daemon is at them.
 */
static inline bool try_enter(struct kv_pool *pool)
{
	struct kv_shm_session *s = pool->session;

	kv_store_relaxed(&s->busy, 1);
	if (__builtin_expect(s->fenced, 0)) {
		/* An acquire may pass the store of this exchange. */
		kv_exchange_seq(&s->busy, 1);
		return !kv_load_seq(&s->recall);
	}
	kv_fence_compiler();
	KV_KILLPOINT(client_busy_set);
	return __builtin_expect(!kv_load_acquire(&s->recall), 1);
}

static int enter(struct kv_pool *pool)
{
	return try_enter(pool) ? 0 : wait_for_stack(pool);
}

static inline void leave(struct kv_pool *pool)
{
	kv_store_release(&pool->session->busy, 0);
}

static int push(struct kv_pool *pool, kv_block_id id)
{
	uint32_t n = n_idle(pool);

	if (n >= pool->grant_capacity)
		return -ENOMEM;
	pool->stack[n] = id;
	set_idle(pool, n + 1);
	return 0;
}

/* Ids that the daemon has posted move to the stack. */
static int collect_grants(struct kv_pool *pool)
{
	int64_t n;

	/* The daemon may have taken some back. */
	pool->grant_tail = kv_load_relaxed(&pool->session->grants.tail);
	n = kv_ring_readable(&pool->session->grants, pool->grant_tail, pool->grant_capacity);
	/* Before a block is handed out its memory is mapped; else it stays in the ring. */
	if (n > 0) {
		int r = kv_granules_need(pool, kv_deadline(0));

		if (r < 0)
			return kv_pool_lost(pool, r);
	}
	if (n < 0)
		return kv_pool_lost(pool, kv_error(-EPROTO, "daemon: its ring of grants makes no sense"));
	for (; n; n--) {
		kv_block_id id = pool->grants[pool->grant_tail & (pool->grant_capacity - 1)];
		int r;

		/* Pages that somebody writes who must not cost this session, and nothing more. */
		if ((uint32_t)id >= pool->head.id_limit)
			return kv_pool_lost(pool, kv_error(-EPROTO, "daemon: it granted block %d, ids are "
						   "below %u", id, pool->head.id_limit));
		r = push(pool, id);
		if (r < 0)
			return r;
		pool->grant_tail++;
	}
	KV_KILLPOINT(client_grants_read);
	kv_ring_consume(&pool->session->grants, pool->grant_tail);
	KV_KILLPOINT(client_grants_taken);
	return 0;
}

/* Too many idle leases: others may need them. */
static SLOW void flush(struct kv_pool *pool)
{
	uint32_t keep = kv_load_relaxed(&pool->session->n_magazine), have = n_idle(pool);
	uint32_t n = have > keep ? have - keep : 0;

	for (uint32_t i = 0; i < n; i++)
		kv_ops_give(pool, pool->stack[i]);
	KV_KILLPOINT(client_flushing);
	/* The oldest go; those used last stay, their bytes may still be in a cache. */
	memmove(pool->stack, pool->stack + n, (have - n) * sizeof(*pool->stack));
	set_idle(pool, have - n);
	kv_ops_kick(pool);
}

static inline void flush_if_full(struct kv_pool *pool)
{
	if (n_idle(pool) > 2 * kv_load_relaxed(&pool->session->n_magazine))
		flush(pool);
}

/* The stack is lower than it should be: asks once, and again after the next refill. */
static SLOW void want_more(struct kv_pool *pool)
{
	uint32_t target = kv_load_relaxed(&pool->session->n_magazine), have;
	struct kv_msg_lease want = { .head = { .type = KV_MSG_WANT, .size = sizeof(want) } };

	/* What came of the last time is counted first. */
	if (collect_grants(pool) < 0)
		return;
	have = n_idle(pool);
	if (have >= target / 2)
		return;
	pool->low = 0;
	want.n = target - have;
	kv_pool_lost(pool, kv_connection_post(&pool->connection, &want));
}

/* Not between enter() and leave(): while we wait the daemon may give our idle leases to others. */
static int ask(struct kv_pool *pool, uint32_t n, int64_t timeout)
{
	struct kv_msg_lease lease = { .head = { .type = KV_MSG_LEASE, .size = sizeof(lease) },
				      .n = n,
				      .extra = kv_load_relaxed(&pool->session->n_magazine),
				      .timeout_ns = timeout };
	const struct kv_msg_leased *answer = (const void *)pool->connection.buffer;
	/* The daemon keeps the deadline; a daemon that doesn't answer at all is found out later. */
	int r = kv_connection_call(&pool->connection, &lease, KV_MSG_LEASED, sizeof(*answer), NULL, 0,
				   NULL, kv_deadline(timeout + 15 * KV_SEC));

	return r < 0 ? kv_pool_lost(pool, r) : answer->answer;
}

/* The slow half of a take: fewer than @n are in the stack. */
static SLOW int refill(struct kv_pool *pool, uint32_t n, int64_t timeout)
{
	int64_t deadline = kv_until(timeout);
	int r;

	if (pool->read_only)
		return kv_read_only_error();
	if (pool->lost)
		return kv_error(-ECONNRESET, "the daemon is gone");
	/* What could not be given back while the daemon stood still is what we may be waiting for. */
	if (__builtin_expect(pool->n_late, 0))
		kv_ops_kick(pool);
	pool->low = kv_load_relaxed(&pool->session->n_magazine) / 2;
	for (int i = 0; i < REFILLS; i++) {
		uint32_t have;
		int64_t left = deadline - kv_now();
		int answer;

		r = collect_grants(pool);
		have = n_idle(pool);
		if (r < 0 || have >= n)
			return r;
		if (n > kv_pool_max_blocks(pool))
			return KV_TOO_LARGE;
		leave(pool);
		/*
		 * First without waiting: what an earlier request for the magazine still brings is in the
		 * ring when the answer is here, and while we wait nobody would count it.
		 */
		answer = ask(pool, n - have, i && left > 0 ? left : 0);
		if (answer && answer != KV_NO_ROOM)
			return answer;
		r = enter(pool);
		if (r < 0)
			return r;
		/* What was missing may have come by an earlier request for the magazine. */
		if (answer && (i || left <= 0))
			break;
		/* What was idle when we asked may have been called back since: then we ask once more. */
	}
	r = collect_grants(pool);
	return r < 0 || n_idle(pool) >= n ? r : KV_NO_ROOM;
}

/* The stack holds what we have not put there: nothing is taken, and nothing works any more. */
static SLOW int bad_stack(struct kv_pool *pool, const kv_block_id *taken, uint32_t n)
{
	while (n)
		pool->refs[taken[--n]] = 0;
	leave(pool);
	return kv_pool_lost(pool, kv_error(-EPROTO, "session: the stack of idle leases in its pages makes no "
				   "sense"));
}

static SLOW int want_more_and_leave(struct kv_pool *pool)
{
	want_more(pool);
	leave(pool);
	return 0;
}

/* @n of the @have idle ones, between enter() and leave(): the second is done here. */
static inline int pop(struct kv_pool *pool, uint32_t have, uint32_t n, kv_block_id *ret_ids)
{
	uint32_t left = have - n, limit = pool->prefix.id_limit, *refs = pool->refs;
	kv_block_id *stack = pool->stack + left;

	for (uint32_t i = 0; i < n; i++) {
		kv_block_id id = kv_load_relaxed(&stack[i]);

		if (__builtin_expect((uint32_t)id >= limit, 0))
			return bad_stack(pool, ret_ids, i);
		ret_ids[i] = id;
		refs[id] = 1;
	}
	KV_KILLPOINT(client_taken);
	set_idle(pool, left);
	if (__builtin_expect(left < pool->low, 0))
		return want_more_and_leave(pool);
	leave(pool);
	return 0;
}

/* Too few are idle, or the daemon is at the stack. */
static SLOW int take_slowly(struct kv_pool *pool, uint32_t n, kv_block_id *ret_ids, int64_t timeout)
{
	int r = enter(pool);
	uint32_t have;

	if (!r && n_idle(pool) < n)
		r = refill(pool, n, timeout);
	if (r) {
		leave(pool);
		return r;
	}
	have = n_idle(pool);
	return have < n ? bad_stack(pool, NULL, 0) : pop(pool, have, n, ret_ids);
}

/* What is common keeps no registers and calls nothing that comes back: that is half of its time. */
static inline int take(struct kv_pool *pool, uint32_t n, kv_block_id *ret_ids, int64_t timeout)
{
	uint32_t have;

	if (__builtin_expect(!try_enter(pool), 0))
		return take_slowly(pool, n, ret_ids, timeout);
	have = n_idle(pool);
	if (__builtin_expect(have < n, 0))
		return take_slowly(pool, n, ret_ids, timeout);
	return pop(pool, have, n, ret_ids);
}

int kv_magazine_take(struct kv_pool *pool, uint32_t n, kv_block_id *ret_ids, int64_t timeout)
{
	return take(pool, n, ret_ids, timeout);
}

static SLOW int poll_and_take(struct kv_pool *pool, uint32_t n, kv_block_id *ret_ids, int64_t timeout)
{
	kv_later_poll(pool);
	return take(pool, n, ret_ids, timeout);
}

KV_PUBLIC int kv_blocks_take(struct kv_pool *pool, uint32_t n, kv_block_id *ret_ids, int64_t timeout)
{
	if (__builtin_expect(pool->fork_generation != kv_fork_generation, 0))
		return kv_forked_error();
	if (__builtin_expect(!kv_link_is_alone(&pool->later), 0))
		return poll_and_take(pool, n, ret_ids, timeout);
	return take(pool, n, ret_ids, timeout);
}

/* The stack is full, or the daemon is at it, or an id is wrong: that of @ids[@i], or one behind it. */
static SLOW int give_slowly(struct kv_pool *pool, uint32_t n, const kv_block_id *ids, uint32_t i)
{
	uint32_t limit = pool->prefix.id_limit, *refs = pool->refs;
	bool entered = !enter(pool);
	int r = 0;

	for (; i < n; i++) {
		kv_block_id id = ids[i];

		if (__builtin_expect((uint32_t)id >= limit || refs[id] != 1, 0)) {
			if (id != pool->head.null_block)
				r = kv_error(-EINVAL, "ids[%u]: block %d was not taken, or given already",
					     i, id);
			continue;
		}
		refs[id] = 0;
		if (__builtin_expect(!entered, 0) || push(pool, id) < 0)
			kv_ops_give(pool, id);
	}
	if (entered)
		flush_if_full(pool);
	leave(pool);
	return pool->read_only ? kv_read_only_error() : r;
}

static SLOW int flush_and_leave(struct kv_pool *pool)
{
	flush(pool);
	leave(pool);
	return 0;
}

KV_PUBLIC int kv_blocks_give(struct kv_pool *pool, uint32_t n, const kv_block_id *ids)
{
	uint32_t have, limit = pool->prefix.id_limit, *refs = pool->refs;
	kv_block_id *stack;

	if (__builtin_expect(pool->fork_generation != kv_fork_generation, 0))
		return kv_forked_error();
	if (__builtin_expect(!try_enter(pool), 0))
		return give_slowly(pool, n, ids, 0);
	have = n_idle(pool);
	stack = pool->stack + have;
	if (__builtin_expect(n > pool->grant_capacity - have, 0))
		return give_slowly(pool, n, ids, 0);
	for (uint32_t i = 0; i < n; i++) {
		kv_block_id id = ids[i];

		if (__builtin_expect((uint32_t)id >= limit || refs[id] != 1, 0)) {
			set_idle(pool, have + i);
			return give_slowly(pool, n, ids, i);
		}
		refs[id] = 0;
		stack[i] = id;
	}
	set_idle(pool, have + n);
	KV_KILLPOINT(client_given);
	if (__builtin_expect(have + n > 2 * kv_load_relaxed(&pool->session->n_magazine), 0))
		return flush_and_leave(pool);
	leave(pool);
	return 0;
}

static void forget_copy_to(struct kv_pool *pool, kv_block_id id)
{
	for (uint32_t i = 0; i < pool->n_copies; i++) {
		if (pool->copies[2 * i + 1] != id)
			continue;
		kv_block_id source = pool->copies[2 * i];

		pool->n_copies--;
		memmove(pool->copies + 2 * i, pool->copies + 2 * i + 2,
			(pool->n_copies - i) * 2 * sizeof(*pool->copies));
		kv_later_drop(pool, source);
		return;
	}
}

void kv_block_release(struct kv_pool *pool, kv_block_id id)
{
	uint32_t r = pool->refs[id];

	if (id == pool->head.null_block) /* a hole in a table */
		return;
	if ((r & KV_REF_COUNT) > 1) {
		pool->refs[id] = r - 1;
		return;
	}
	pool->refs[id] = 0;
	if (!(r & (KV_REF_CACHED | KV_REF_SUBMITTED))) {
		bool entered;

		if (pool->n_copies)
			forget_copy_to(pool, id);
		entered = !enter(pool);
		if (!entered || push(pool, id) < 0)
			kv_ops_give(pool, id);
		if (entered)
			flush_if_full(pool);
		leave(pool);
	} else if (!(r & KV_REF_AGAIN) &&
		   (r & KV_REF_CACHED ||
		    kv_block_state(kv_load_acquire(&pool->descriptors[id].word)) == KV_BLOCK_CACHED)) {
		kv_unpin(pool, id);
		/* Who waits may want it. Pairs with a daemon that sets `waiting`, then looks at holders. */
		if (__builtin_expect(kv_load_seq(&pool->session->waiting), 0)) {
			pool->ops_posted = true;
			kv_ops_kick(pool);
		}
	} else {
		/* The daemon has yet to say what became of it: this op comes after that one. */
		pool->refs[id] = KV_REF_GIVEN;
		kv_ops_give(pool, id);
		pool->gives[id] = kv_ops_end(pool);
	}
}

void kv_again_posted(struct kv_pool *pool, kv_block_id id)
{
	/* Who has let go of it meanwhile has said so: in the ring that comes behind this. */
	if (!(pool->refs[id] & KV_REF_AGAIN))
		return;
	pool->refs[id] |= KV_REF_POSTED;
	pool->gives[id] = kv_ops_end(pool);
}

/*
 * Has the daemon yet to do the op before number @end? It has done what stands before its tail. What isn't in the
 * ring any more is done, however long ago that was: numbers come round.
 */
static bool is_undone(const struct kv_pool *pool, uint32_t end)
{
	uint32_t last = kv_ops_end(pool);

	/* Pairs with the release in the daemon's drain. */
	return last - end < last - kv_load_acquire(&pool->session->ops.tail);
}

bool kv_again_is_pending(struct kv_pool *pool, kv_block_id id)
{
	uint32_t r = pool->refs[id];

	if (!(r & KV_REF_AGAIN))
		return false;
	if (!(r & KV_REF_POSTED) || is_undone(pool, pool->gives[id]))
		return true;
	pool->refs[id] = r & ~(KV_REF_AGAIN | KV_REF_POSTED);
	return false;
}

bool kv_give_is_pending(struct kv_pool *pool, kv_block_id id)
{
	if (!(pool->refs[id] & KV_REF_GIVEN))
		return false;
	if (is_undone(pool, pool->gives[id]))
		return true;
	pool->refs[id] = 0;
	return false;
}

bool kv_block_is_cached(struct kv_pool *pool, kv_block_id id)
{
	uint32_t r = pool->refs[id];

	if (r & KV_REF_CACHED)
		return true;
	/* Ours, and perhaps published meanwhile: then the daemon has set our bit. */
	if (kv_block_state(kv_load_acquire(&pool->descriptors[id].word)) != KV_BLOCK_CACHED)
		return false;
	pool->refs[id] = (r & ~KV_REF_SUBMITTED) | KV_REF_CACHED;
	return true;
}

bool kv_block_pin_twin(struct kv_pool *pool, kv_block_id id, uint64_t serial)
{
	if (id < 0 || (uint32_t)id >= pool->head.id_limit || !kv_pin_hold(pool, id))
		return false;
	if (kv_load_relaxed(&pool->descriptors[id].serial) == serial) {
		kv_pin_keep(pool, id);
		return true;
	}
	kv_pin_let_go(pool, id);
	return false;
}
