/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests that wait for room: one queue for all pools. Each request has a tag of virtual time,
 *
 *	tag = max(time of the queue, tag of the pool's last request) + bytes / weight of the pool
 *
 * and the smallest is served first: in a pool that is the order of arrival, between pools the order of
 * weighted fair queueing, so that nobody starves. What a request at the front still lacks is spoken for:
 * those behind it may use what their own pool has, but no extent that it waits for. (A. Demers,
 * S. Keshav, S. Shenker: Analysis and Simulation of a Fair Queueing Algorithm, SIGCOMM 1989.)
 *
 * The queue is looked at when something was given back, evictable, zeroed or has ended; clients tell
 * when they let go of a cached block while somebody waits. A timer that backs off covers the rest.
 */
#include <errno.h>

#include "daemon/daemon.h"
#include "daemon/user.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"
#include "include/internal/wire.h"

#define LOOK_FIRST KV_MSEC
#define LOOK_LAST  (64 * KV_MSEC)

static struct kv_session *waiter(struct kv_link *link)
{
	return kv_container_of(link, struct kv_session, waiter);
}

/* Clients are to tell when they let go of a block: they need not while nobody waits. */
static void tell_all(struct kv_daemon *d, uint32_t waiting)
{
	for (struct kv_link *l = d->peers.next; l != &d->peers; l = l->next) {
		struct kv_peer *peer = kv_container_of(l, struct kv_peer, link);

		if (peer->session)
			kv_store_seq(&peer->session->shm->waiting, waiting);
	}
}

static void look_later(struct kv_daemon *d)
{
	int64_t now = kv_now(), delay = d->look_after;

	/* Nothing else is known that will come, and this is known to the microsecond. */
	if (d->recall_at > now)
		delay = d->recall_at - now;
	if (d->part_waits)
		delay = 0;
	for (struct kv_link *l = d->queue.next; l != &d->queue; l = l->next) {
		int64_t left = waiter(l)->want_deadline - now;

		if (left < delay)
			delay = left > 0 ? left : 0;
	}
	kv_timer_set(d->waiter_timer, delay);
}

/* To its place by its tag, from @l backwards. */
static void insert(struct kv_session *session, struct kv_link *l)
{
	while (l != &session->pool->daemon->queue && waiter(l)->want_tag_time > session->want_tag_time)
		l = l->prev;
	kv_list_append(l->next, &session->waiter);
}

/*
 * What a request was not given costs its pool nothing: those of the pool that stand behind it move up, and
 * those to come begin where it had begun.
 */
static void refund(struct kv_session *session)
{
	struct kv_pool *pool = session->pool;
	struct kv_link *queue = &pool->daemon->queue, *next;

	for (struct kv_link *l = session->waiter.next; l != queue; l = next) {
		struct kv_session *other = waiter(l);
		struct kv_link *before = l->prev;

		next = l->next;
		if (other->pool != pool)
			continue;
		other->want_tag_time -= session->want_cost;
		kv_link_unlink(l);
		insert(other, before);
	}
	pool->last_tag_time -= session->want_cost;
}

void kv_queue_add(struct kv_session *session)
{
	struct kv_pool *pool = session->pool;
	struct kv_daemon *d = pool->daemon;
	double start = pool->last_tag_time > d->queue_time ? pool->last_tag_time : d->queue_time;

	if (kv_link_is_alone(&d->queue))
		tell_all(d, 1);
	session->want_cost = (double)session->want_n * (double)pool->block_bytes / pool->weight;
	session->want_tag_time = start + session->want_cost;
	pool->last_tag_time = session->want_tag_time;
	insert(session, d->queue.prev);
	if (!pool->n_waiting++)
		kv_capacity_magazines(pool);
	d->look_after = LOOK_FIRST;
	look_later(d);
}

static void leave(struct kv_session *session)
{
	struct kv_pool *pool = session->pool;

	kv_link_unlink(&session->waiter);
	if (!--pool->n_waiting) {
		kv_gradual_forget(pool);
		kv_capacity_magazines(pool);
	}
	if (kv_link_is_alone(&pool->daemon->queue)) {
		tell_all(pool->daemon, 0);
		kv_pressure_end(pool->daemon);
	}
}

void kv_queue_remove(struct kv_session *session)
{
	if (kv_link_is_alone(&session->waiter))
		return;
	refund(session);
	leave(session);
}

void kv_queue_forget(struct kv_session *session)
{
	if (kv_link_is_alone(&session->waiter))
		return;
	kv_link_unlink(&session->waiter);
	session->pool->n_waiting--;
}

uint32_t kv_queue_spoken(const struct kv_pool *pool)
{
	uint32_t n = 0;

	for (uint32_t g = 0; g < pool->daemon->n_gpus; g++) {
		if (pool->gpu_mask >> g & 1 && pool->daemon->n_spoken[g] > n)
			n = pool->daemon->n_spoken[g];
	}
	return n;
}

static void speak_for(struct kv_session *session)
{
	struct kv_pool *pool = session->pool;
	uint32_t n = kv_capacity_lacking(pool, session->want_n);

	for (uint32_t g = 0; g < pool->daemon->n_gpus; g++)
		pool->daemon->n_spoken[g] += pool->gpu_mask >> g & 1 ? n : 0;
}

static void answer(struct kv_session *session, int r)
{
	struct kv_pool *pool = session->pool;
	struct kv_msg_leased reply = { .n = 0 };

	if (r)
		refund(session);
	/* Before anything is posted: who is hung up on for its ring has left the queue once. */
	leave(session);
	if (!r) {
		uint32_t extra = pool->books.n_free - session->want_n;

		/* What others behind it wait for is not for its magazine. */
		extra = pool->n_waiting ? 0 : extra;
		extra = extra < session->want_extra ? extra : session->want_extra;
		reply.n = kv_user_blocks(session, session->want_n + extra);
		pool->daemon->queue_time = session->want_tag_time;
		kv_session_answer(session, reply.n);
	} else {
		reply.answer = r == KV_TOO_LARGE ? r : KV_NO_ROOM;
		pool->n_no_room++;
	}
	kv_latency_add(&pool->record->refills, (uint64_t)(kv_now() - session->want_since));
	kv_wire_init(&reply.head, KV_MSG_LEASED, sizeof(reply), session->want_tag);
	kv_peer_send(session->peer, &reply, sizeof(reply), NULL, 0);
}

/* Answers a request if it can be answered. Return: whether it is done with. */
static bool serve(struct kv_session *session, bool is_blocked)
{
	int64_t now = kv_now();
	int r = KV_NO_ROOM;

	/* Other sessions of its user may have got what it was still allowed when it asked. */
	if (kv_user_blocks(session, session->want_n) < session->want_n) {
		kv_queue_remove(session);
		kv_peer_error(session->peer, session->want_tag,
			      kv_user_too_many_blocks(session, session->want_n), "%s",
			      kv_error_text());
		return true;
	}
	if (kv_pressure_refuses(session)) {
		answer(session, KV_NO_ROOM);
		return true;
	}
	if (!is_blocked && now < session->want_scrub_deadline && kv_capacity_is_coming(session))
		return false;
	if (!is_blocked)
		r = kv_capacity_room(session->pool, session, session->want_n);
	/* The mover has had its time: rather a part of its cache than nothing. */
	if (r == -EAGAIN && now >= session->want_scrub_deadline &&
	    !kv_capacity_own(session->pool, session->want_n))
		r = 0;
	session->is_coming = r == -EAGAIN;
	if (r == -EAGAIN && now < session->want_scrub_deadline)
		return false;
	if (r && r != KV_TOO_LARGE && now < session->want_deadline)
		return false;
	answer(session, r);
	return true;
}

void kv_queue_give_up(struct kv_session *session)
{
	if (!kv_link_is_alone(&session->waiter))
		answer(session, KV_NO_ROOM);
}

static bool serve_in_order(struct kv_daemon *d)
{
	static uint64_t pass;
	struct kv_link *next;
	bool answered = false, done;

	pass++;
	d->part_waits = false;
	for (uint32_t g = 0; g < d->n_gpus; g++)
		d->n_spoken[g] = 0;
	for (struct kv_link *l = d->queue.next; l != &d->queue; l = next) {
		struct kv_session *session = waiter(l);
		struct kv_pool *pool = session->pool;

		if (session->looked_in == pass) {
			next = l->next;
			continue;
		}
		session->looked_in = pass;
		done = serve(session, pool->blocked_in == pass);
		answered |= done;
		/* Serving one may take others out of the queue (recall.c hangs up on them), the next one as well. */
		next = kv_link_is_alone(l) ? d->queue.next : l->next;
		if (done)
			continue;
		if (pool->blocked_in != pass && pool->must_press)
			kv_pressure_put(pool);
		pool->blocked_in = pass;
		speak_for(session);
	}
	return answered;
}

void kv_capacity_serve(struct kv_daemon *d)
{
	if (kv_link_is_alone(&d->queue) || d->serving)
		return;
	d->serving = true;
	d->look_after = serve_in_order(d) ? LOOK_FIRST : d->look_after;
	d->serving = false;
	kv_reserve_fill(d);
	if (kv_link_is_alone(&d->queue)) {
		for (uint32_t g = 0; g < d->n_gpus; g++)
			d->n_spoken[g] = 0;
		return;
	}
	look_later(d);
	d->look_after = d->look_after * 2 < LOOK_LAST ? d->look_after * 2 : LOOK_LAST;
}
