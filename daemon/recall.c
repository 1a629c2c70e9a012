/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What sessions hold beyond what they use or what is their due. Idle leases are called back from the
 * sessions' pages while their clients sleep or work (shm.h draws the protocol): that asks nobody. What
 * is in use is only ever asked for: a notice in the session's page, with a deadline, after which a
 * session that has not given back gets no more (kv_pool_pressure() in client.h).
 */
#include <limits.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/daemon.h"
#include "daemon/log.h"
#include "include/internal/killpoint.h"
#include "include/internal/ring.h"
#include "include/internal/socket.h"

/* Who was granted blocks so lately may be on the way to take them, and would have to ask again. */
#define GRANT_GRACE (2 * KV_MSEC)
/* Who waited for them sleeps until it is woken: on a busy machine for long, and it was before those who ask now. */
#define ANSWER_GRACE KV_SEC
/* How long a session has to answer a notice, and how often notices are worked out. */
#define PRESSURE_WAIT  KV_SEC
#define PRESSURE_PAUSE (20 * KV_MSEC)
/* A client is in a call that looks at its idle leases for microseconds; one that is stopped there, or lies, for ever. */
#define WITHHELD_WAIT (100 * KV_MSEC)

uint32_t kv_idle(const struct kv_session *s)
{
	uint32_t leased = s->pool->books.n_leased_by[s->slot];
	uint32_t n = kv_load_relaxed(&s->shm->n_stack) + kv_session_posted(s);

	return n < leased ? n : leased;
}

static bool may_recall(struct kv_session *s, int64_t now)
{
	struct kv_daemon *d = s->pool->daemon;
	bool over = s->pool->books.n_total - s->pool->books.n_free >
		    kv_limits_most_blocks(s->pool);
	int64_t from = s->granted_ns + GRANT_GRACE;

	if (s->peer->fd < 0 || !kv_idle(s))
		return false;
	if (!over && s->record->granted - kv_session_posted(s) < s->answered &&
	    now < s->granted_ns + ANSWER_GRACE)
		return false;
	if (!over && now < from && (d->recall_at < now || from < d->recall_at))
		d->recall_at = from;
	return over || now >= from;
}

static bool give(struct kv_session *s, int32_t id)
{
	if (kv_books_give(&s->pool->books, s->slot, id) == 0)
		return true;
	kv_peer_drop(s->peer, "its idle leases name a block that isn't its own");
	return false;
}

/* The last one of the stack. What is written down tells, with n_called, whether it has left the stack. */
static bool take_idle(struct kv_session *s, uint32_t left)
{
	uint32_t n_called = kv_load_relaxed(&s->shm->n_called) + 1;
	int32_t id = kv_load_relaxed(&s->stack[left]);
	bool ok;

	kv_store_release(&s->record->calling, (uint64_t)n_called << 32 | (uint32_t)(id + 1));
	kv_store_seq(&s->shm->stack_word, (uint64_t)n_called << 32 | left);
	KV_KILLPOINT(worker_idle_taken);
	ok = give(s, id);
	KV_KILLPOINT(worker_idle_freed);
	kv_store_release(&s->record->calling, 0);
	return ok;
}

/* The last one that was posted. What the count of grants hasn't reached is free (alloc/saved.h). */
static bool take_posted(struct kv_session *s)
{
	uint64_t granted = s->record->granted - 1;

	kv_ring_post(&s->shm->grants, (uint32_t)granted);
	KV_KILLPOINT(worker_grant_taken);
	kv_store_release(&s->record->granted, granted);
	KV_KILLPOINT(worker_grant_uncounted);
	if (s->answered > granted)
		s->answered = granted;
	return give(s, kv_load_relaxed(&s->grants[granted & (s->grant_capacity - 1)]));
}

/*
 * The client is outside: stack and ring are ours. Each block leaves its place before it becomes free, and where
 * we die in between the next worker frees it, or it is where it was: no block is two's, and none is nobody's.
 */
static uint32_t take_back(struct kv_session *s)
{
	uint32_t n = kv_load_relaxed(&s->shm->n_stack), done = 0;
	int64_t room = kv_ring_writable(&s->shm->grants, (uint32_t)s->record->granted, s->grant_capacity);

	if (n > s->grant_capacity || room < 0) {
		kv_peer_drop(s->peer, "its stack of idle leases, or its ring of grants, makes no sense");
		return 0;
	}
	for (; n; done++) {
		if (!take_idle(s, --n))
			return done;
	}
	for (n = s->grant_capacity - (uint32_t)room; n; n--, done++) {
		if (!take_posted(s))
			return done;
	}
	kv_books_save_counts(&s->pool->books);
	return done;
}

void kv_recall_finish(struct kv_session *s)
{
	uint64_t calling = s->record->calling;

	/* Else it never left the stack. If it is free already, this is refused. */
	if (calling && kv_load_relaxed(&s->shm->n_called) == calling >> 32)
		kv_books_give(&s->pool->books, s->slot, (int32_t)(uint32_t)calling - 1);
	s->record->calling = 0;
}

uint32_t kv_recall(struct kv_pool *pool, const struct kv_session *asking)
{
	int64_t now = kv_now();
	uint32_t n = 0;
	bool ordered;

	for (uint32_t i = 0; i < KV_MAX_SESSIONS; i++) {
		struct kv_session *s = pool->slots[i];

		if (s && s != asking && may_recall(s, now)) {
			kv_store_seq(&s->shm->recall, 1);
			s->recalling = true;
			n++;
			KV_KILLPOINT(worker_recall_asked);
		}
	}
	if (!n)
		return 0;
	ordered = !syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0);
	n = 0;
	for (uint32_t i = 0; i < KV_MAX_SESSIONS; i++) {
		struct kv_session *s = pool->slots[i];

		if (!s || !s->recalling)
			continue;
		s->recalling = false;
		if ((ordered || kv_load_relaxed(&s->shm->fenced)) && !kv_load_seq(&s->shm->busy)) {
			n += take_back(s);
			s->withheld_ns = 0;
		} else if (!s->withheld_ns) {
			s->withheld_ns = now;
		}
		kv_store_release(&s->shm->recall, 0);
	}
	pool->n_recalled += n;
	return n;
}

/* ---- pressure ---- */

/*
 * Blocks that a session keeps from others. Idle leases are none of them while they can be called back: what
 * its pages say of them is believed no longer when that has failed for a while.
 */
static uint32_t in_use(const struct kv_session *s)
{
	bool withheld = s->withheld_ns && kv_now() - s->withheld_ns > WITHHELD_WAIT;

	return s->pool->books.n_leased_by[s->slot] - (withheld ? 0 : kv_idle(s)) + (uint32_t)s->n_held;
}

/* Its own request doesn't count: nothing is asked of a session for itself. */
static bool another_waits(const struct kv_session *s)
{
	const struct kv_link *queue = &s->pool->daemon->queue;

	return queue->next != queue && (queue->next != &s->waiter || queue->prev != &s->waiter);
}

static void withdraw(struct kv_session *s)
{
	s->pressure_blocks = 0;
	kv_store_release(&s->shm->pressure_blocks, 0);
}

static void notify(struct kv_session *s, uint32_t n, uint32_t used)
{
	s->pressure_blocks = n;
	s->pressure_target = used - n;
	s->pressure_deadline = kv_now() + PRESSURE_WAIT;
	kv_store_relaxed(&s->shm->pressure_blocks, n);
	kv_store_relaxed(&s->shm->pressure_deadline, s->pressure_deadline);
	/* Pairs with the load in kv_pool_pressure(). */
	kv_store_release(&s->shm->pressure, s->shm->pressure + 1);
	KV_KILLPOINT(worker_pressure_told);
	/* Who sleeps for it (kv_pool_pressure_wait()). */
	syscall(SYS_futex, &s->shm->pressure, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
	kv_log(KV_LOG_DEBUG, "session %llu of '%s': asked for %u of %u blocks",
	       (unsigned long long)s->id, s->pool->name, n, used);
}

/* Notices to those of @pool that have more than their part; @wanted: bytes that somebody waits for. */
static void press_pool(struct kv_pool *pool, uint64_t wanted)
{
	uint64_t bytes = pool->share_extents * pool->daemon->extents.bytes;
	uint64_t due, blocks = (wanted + pool->block_bytes - 1) / pool->block_bytes;

	if (!pool->n_sessions)
		return;
	bytes = bytes < pool->max_bytes ? bytes : pool->max_bytes;
	due = bytes / pool->block_bytes / pool->n_sessions;
	kv_held_update(pool);
	for (uint32_t i = 0; i < KV_MAX_SESSIONS; i++) {
		struct kv_session *s = pool->slots[i];
		uint64_t used = s && s->peer->fd >= 0 ? in_use(s) : 0;

		if (s && s->pressure_blocks && used <= s->pressure_target)
			withdraw(s);
		if (used <= due || s->pressure_blocks || !another_waits(s))
			continue;
		notify(s, (uint32_t)(used - due < blocks ? used - due : blocks), (uint32_t)used);
	}
}

void kv_pressure_put(struct kv_pool *needy)
{
	struct kv_daemon *d = needy->daemon;
	int64_t now = kv_now();
	uint64_t wanted = needy->wanted_blocks * needy->block_bytes;

	if (now - needy->pressed_ns < PRESSURE_PAUSE)
		return;
	needy->pressed_ns = now;
	kv_shares_update(d, needy->gpu_mask);
	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);

		/* A pool's own requests press its own sessions: it may be at its maximum. */
		if (pool == needy || (pool->gpu_mask & needy->gpu_mask &&
				      pool->n_extents > pool->share_extents))
			press_pool(pool, wanted);
	}
}

void kv_pressure_end(struct kv_daemon *d)
{
	for (struct kv_link *l = d->peers.next; l != &d->peers; l = l->next) {
		struct kv_peer *peer = kv_container_of(l, struct kv_peer, link);

		if (peer->session && peer->session->pressure_blocks)
			withdraw(peer->session);
	}
}

bool kv_pressure_refuses(struct kv_session *s)
{
	if (!s->pressure_blocks || kv_now() < s->pressure_deadline)
		return false;
	kv_held_update(s->pool);
	if (another_waits(s) && in_use(s) > s->pressure_target)
		return true;
	withdraw(s);
	return false;
}
