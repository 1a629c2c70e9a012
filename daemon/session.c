/* SPDX-License-Identifier: Apache-2.0 */
/* One peer's attachment to a pool: opening it, its two rings, its leases, its end. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>

#include "daemon/daemon.h"
#include "daemon/events.h"
#include "daemon/log.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/killpoint.h"
#include "include/internal/ring.h"
#include "include/internal/socket.h"

#define OP_CAPACITY 4096u
/* Blocks that the touches of one look at the ring may be about: of the longest prompts one, in 0.5 ms. */
#define MOST_TOUCHED 65536u
#define AHEAD 6 /* blocks whose memory is asked for before they are looked at */
#define OPEN_RETRY (2 * KV_MSEC)
#define OPEN_WAIT (5 * KV_SEC)
#define SCRUB_WAIT (5 * KV_SEC)

/* Where things lie in the pages follows from the pool alone: what stands in them a client may change. */
static struct kv_shm_session lay_out(struct kv_session *s)
{
	struct kv_shm_session head = { .magic = KV_SHM_MAGIC, .abi = KV_SHM_ABI, .slot = s->slot };
	uint32_t grants = 64;

	while (grants < s->pool->head->id_limit)
		grants *= 2;
	head.grant_capacity = s->grant_capacity = grants;
	head.op_capacity = s->op_capacity = OP_CAPACITY;
	head.grants_offset = 4096;
	head.ops_offset = head.grants_offset + (grants * sizeof(int32_t) + 4095) / 4096 * 4096;
	head.stack_offset = head.ops_offset + OP_CAPACITY * sizeof(struct kv_op);
	head.bytes = s->bytes = head.stack_offset + (uint64_t)grants * sizeof(int32_t);
	head.waiting = !kv_link_is_alone(&s->pool->daemon->queue);
	return head;
}

static void find_rings(struct kv_session *s, const struct kv_shm_session *head, void *p)
{
	s->shm = p;
	s->grants = (int32_t *)((char *)p + head->grants_offset);
	s->ops = (const struct kv_op *)((char *)p + head->ops_offset);
	s->stack = (int32_t *)((char *)p + head->stack_offset);
}

static int make_shared(struct kv_session *s)
{
	struct kv_shm_session head = lay_out(s);
	void *p;
	int r = kv_shared_pages("kvcached-session", s->bytes, &s->fd, &p);

	if (r < 0)
		return kv_error(r, "shared pages for a session: %s", strerror(-r));
	find_rings(s, &head, p);
	*s->shm = head;
	return 0;
}

/* Kept before anybody knows of it. */
static int deposit(struct kv_session *s)
{
	struct kv_session_record *record = s->record;
	int fds[] = { s->fd, s->peer->pidfd };
	uint64_t token;
	int r;

	if (getrandom(&token, sizeof(token), 0) != sizeof(token))
		return kv_error(-EIO, "a token for a session: %s", strerror(errno));
	*record = (struct kv_session_record){ .id = s->id,
					      .token = token,
					      .since_ns = s->since_ns,
					      .pid = s->peer->pid,
					      .uid = s->peer->uid,
					      .read_only = s->read_only };
	memcpy(record->name, s->peer->name, sizeof(record->name));
	r = kv_keeping_put(&s->pool->daemon->keeping, KV_DEPOSIT_SESSION, s->id, fds, 2);
	if (r < 0)
		return r;
	KV_KILLPOINT(worker_session_deposited);
	kv_store_release(&record->state, KV_RECORD_OPENING);
	KV_KILLPOINT(worker_session_opening);
	return 0;
}

static uint64_t next_id(struct kv_daemon *d)
{
	if (d->journal)
		kv_store_release(&d->journal->next_session_id, d->next_session_id + 1);
	return d->next_session_id++;
}

/* May its client still publish? Who waits for a promise of its looks here. */
static void set_live(struct kv_session *s, bool live)
{
	uint64_t *word = &s->pool->head->live[s->slot / 64], bit = (uint64_t)1 << s->slot % 64;

	kv_store_release(word, live ? *word | bit : *word & ~bit);
}

static struct kv_session *session_alloc(struct kv_peer *peer, struct kv_pool *pool, uint32_t slot)
{
	struct kv_session *s = calloc(1, sizeof(*s));

	if (!s)
		return NULL;
	kv_link_init(&s->waiter);
	s->fd = -1;
	s->peer = peer;
	s->pool = pool;
	s->slot = slot;
	s->record = &pool->record->sessions[slot];
	pool->slots[slot] = s;
	pool->n_sessions++;
	peer->daemon->n_sessions++;
	peer->session = s;
	set_live(s, true);
	return s;
}

static int session_new(struct kv_peer *peer, struct kv_pool *pool, bool read_only,
		       struct kv_session **ret)
{
	char why[KV_ERROR_BYTES];
	struct kv_session *s;
	uint32_t slot = 0;
	int r;

	while (slot < KV_MAX_SESSIONS && pool->slots[slot])
		slot++;
	if (slot == KV_MAX_SESSIONS)
		return kv_error(-EBUSY, "pool '%s' has %d sessions, the most there can be", pool->name,
				KV_MAX_SESSIONS);
	r = kv_user_add(peer->user, KV_USER_SESSIONS);
	if (r < 0)
		return r;
	/* Before it is live: what its predecessor promised nobody will keep. */
	kv_promises_clear(pool, slot);
	s = session_alloc(peer, pool, slot);
	if (!s) {
		kv_user_take(peer->user, KV_USER_SESSIONS);
		return kv_error(-ENOMEM, "no memory for a session");
	}
	s->read_only = read_only;
	if (read_only)
		set_live(s, false);
	s->id = next_id(peer->daemon);
	s->since_ns = kv_now();
	r = make_shared(s);
	if (!r)
		r = deposit(s);
	if (r < 0) {
		snprintf(why, sizeof(why), "%s", kv_error_text());
		kv_session_free(s);
		return kv_error(r, "a session of pool '%s': %s", pool->name, why);
	}
	kv_capacity_magazines(pool);
	*ret = s;
	return 0;
}

int kv_session_adopt(struct kv_pool *pool, uint32_t slot, const int fds[2])
{
	struct kv_session_record *record = &pool->record->sessions[slot];
	kv_cleanup(kv_closep) int fd = fds[0];
	struct kv_shm_session head;
	struct kv_session *s;
	struct kv_peer *peer;
	void *p;
	int r = kv_peer_new_away(pool->daemon, record, fds[1], &peer);

	if (r < 0)
		return r;
	s = session_alloc(peer, pool, slot);
	if (!s) {
		kv_peer_free(peer);
		return -ENOMEM;
	}
	if (peer->user)
		peer->user->n[KV_USER_SESSIONS]++; /* it was allowed when it was opened */
	s->fd = kv_steal_fd(&fd);
	s->id = record->id;
	s->since_ns = record->since_ns;
	s->mapped = record->mapped;
	s->read_only = record->read_only;
	if (s->read_only)
		set_live(s, false);
	s->n_published = record->n_published;
	s->op_in_doubt = true;
	head = lay_out(s);
	r = kv_shared_map(s->fd, s->bytes, &p);
	if (r < 0)
		return r;
	find_rings(s, &head, p);
	/* What it was posted it has: the head may not have been moved on any more. */
	kv_ring_post(&s->shm->grants, (uint32_t)record->granted);
	kv_ring_consume(&s->shm->ops, (uint32_t)record->ops_done);
	/* What another worker was about to do with its idle leases, or had asked of it. */
	kv_store_relaxed(&s->shm->waiting, 0);
	kv_store_relaxed(&s->shm->pressure_blocks, 0);
	kv_store_release(&s->shm->recall, 0);
	return 0;
}

/* Without a trace in any page. */
void kv_session_unload(struct kv_session *s)
{
	struct kv_pool *pool = s->pool;

	kv_queue_forget(s);
	kv_events_detached(pool->daemon->events, s);
	set_live(s, false);
	if (s->shm)
		munmap(s->shm, s->bytes);
	kv_close(s->fd);
	pool->slots[s->slot] = NULL;
	pool->n_sessions--;
	pool->daemon->n_sessions--;
	s->peer->session = NULL;
	kv_user_take(s->peer->user, KV_USER_SESSIONS);
	free(s);
}

struct kv_session *kv_session_free(struct kv_session *s)
{
	struct kv_session_record *record = s->record;
	struct kv_pool *pool = s->pool;
	uint64_t id = s->id;

	/* From here on its blocks are free, also for another worker. */
	kv_store_release(&record->state, KV_RECORD_ENDING);
	KV_KILLPOINT(worker_session_ending);
	kv_queue_remove(s);
	if (s->shm) {
		pool->lookup_tokens += kv_load_relaxed(&s->shm->lookup_tokens);
		pool->hit_tokens += kv_load_relaxed(&s->shm->hit_tokens);
		pool->record->lookup_tokens = pool->lookup_tokens;
		pool->record->hit_tokens = pool->hit_tokens;
		kv_latency_sum(&pool->record->lookups, &s->shm->lookups);
		kv_books_forget(&pool->books, s->slot);
	}
	KV_KILLPOINT(worker_session_forgotten);
	kv_store_release(&record->state, KV_RECORD_NONE);
	kv_session_unload(s);
	kv_keeping_drop(&pool->daemon->keeping, KV_DEPOSIT_SESSION, id);
	kv_capacity_magazines(pool);
	kv_capacity_trim(pool);
	kv_capacity_serve(pool->daemon);
	return NULL;
}

void kv_session_set_aside(struct kv_session *s)
{
	const struct kv_books *b = &s->pool->books;

	set_live(s, false);
	kv_books_quarantine(&s->pool->books, s->slot);
	s->n_set_aside = 0;
	for (uint32_t i = 0; b->n_quarantined && i < b->head->id_limit; i++)
		s->n_set_aside += b->books[i].state == KV_BLOCK_QUARANTINED &&
				  b->books[i].owner == s->slot;
}

void kv_session_drop(struct kv_session *s)
{
	kv_queue_remove(s);
	kv_store_release(&s->record->state, KV_RECORD_DROPPED);
	KV_KILLPOINT(worker_session_dropped);
	kv_session_set_aside(s);
}

void kv_session_confirm(struct kv_session *s)
{
	if (s->record->state == KV_RECORD_OPENING) {
		kv_store_release(&s->record->state, KV_RECORD_LIVE);
		KV_KILLPOINT(worker_session_live);
	}
}

/* The away session that @msg names, if its client is who asks. */
static struct kv_session *find_away(const struct kv_peer *peer, const struct kv_msg_resume *msg)
{
	struct kv_daemon *d = peer->daemon;

	if (msg->boot_nonce != d->boot_nonce || msg->slot >= KV_MAX_SESSIONS)
		return NULL;
	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);
		struct kv_session *s = pool->slots[msg->slot];

		/* Its process lives, so its number is still its own. */
		if (pool->id == msg->pool_id && s && s->id == msg->session_id && s->peer->away &&
		    s->record->token == msg->token && s->peer->pid == peer->pid &&
		    s->peer->uid == peer->uid)
			return s;
	}
	return NULL;
}

void kv_session_handle_resume(struct kv_peer *peer, const struct kv_msg_resume *msg)
{
	struct kv_session *s = find_away(peer, msg);
	struct kv_msg_plain reply;
	struct kv_peer *old;

	if (!s) {
		kv_peer_error(peer, msg->head.tag, -ENOENT,
			      "session %llu isn't known, or not for this process to take up again",
			      (unsigned long long)msg->session_id);
		return;
	}
	old = s->peer;
	old->session = NULL;
	s->peer = peer;
	peer->session = s;
	kv_peer_free(old);
	kv_log(KV_LOG_DEBUG, "session %llu: '%s' (pid %d) is back", (unsigned long long)s->id,
	       peer->name, peer->pid);
	/* It may have posted without being able to say so. */
	kv_session_drain(s);
	kv_wire_init(&reply.head, KV_MSG_OK, sizeof(reply), msg->head.tag);
	kv_peer_send(peer, &reply, sizeof(reply), NULL, 0);
}

static void send_opened(struct kv_peer *peer, struct kv_session *s, uint32_t tag)
{
	struct kv_pool *pool = s->pool;
	struct kv_msg_pool_opened reply = {
		.pool_id = pool->id,
		.session_id = s->id,
		.block_bytes = pool->block_bytes,
		.max_blocks = pool->max_blocks,
		.slab_offset = pool->slab_offset,
		.slab_blocks = pool->slab_blocks,
		.index_bytes = pool->head->index_bytes,
		.blocks_bytes = pool->head->blocks_bytes,
		.session_bytes = s->bytes,
		.gpu_mask = pool->gpu_mask,
		.slot = s->slot,
		.token = s->record->token,
	};
	int fds[] = { pool->index_read_fd, s->read_only ? pool->blocks_read_fd : pool->blocks_fd, s->fd };

	kv_wire_init(&reply.head, KV_MSG_POOL_OPENED, sizeof(reply), tag);
	kv_peer_send(peer, &reply, sizeof(reply), fds, 3);
}

static void retry_open(void *arg)
{
	struct kv_peer *peer = arg;
	struct kv_msg_pool_open *msg = kv_steal(peer->pending_open);

	kv_session_handle_open(peer, msg);
	free(msg);
}

/* Its first extents are being zeroed: the request is kept and tried again. */
static int keep_for_later(struct kv_peer *peer, const struct kv_msg_pool_open *msg)
{
	int64_t now = kv_now();

	if (!peer->open_deadline)
		peer->open_deadline = now + OPEN_WAIT;
	if (now > peer->open_deadline)
		return kv_error(-ETIMEDOUT, "memory for pool '%s' was not zeroed in 5 s", msg->name);
	if (!peer->open_timer && kv_timer_new(peer->daemon->loop, retry_open, peer,
					      &peer->open_timer) < 0)
		return -ENOMEM; /* with its text */
	peer->pending_open = malloc(msg->head.size);
	if (!peer->pending_open)
		return kv_error(-ENOMEM, "pool '%s': no memory to keep the request until its memory is zeroed",
				msg->name);
	memcpy(peer->pending_open, msg, msg->head.size);
	kv_timer_set(peer->open_timer, OPEN_RETRY);
	return 0;
}

static int create_pool(struct kv_peer *peer, const struct kv_msg_pool_open *msg,
		       struct kv_pool **ret)
{
	int r = kv_user_add(peer->user, KV_USER_POOLS);

	if (r < 0)
		return r;
	r = kv_pool_create(peer->daemon, msg, ret);
	if (r < 0) {
		kv_user_take(peer->user, KV_USER_POOLS);
		return r;
	}
	(*ret)->user = kv_user_get(peer->daemon, peer->uid);
	(*ret)->record->made_by = (uint64_t)peer->uid + 1;
	return 0;
}

void kv_session_handle_open(struct kv_peer *peer, const struct kv_msg_pool_open *msg)
{
	struct kv_daemon *d = peer->daemon;
	struct kv_pool *pool = kv_pool_find(d, msg->name);
	struct kv_session *session = NULL;
	bool read_only = msg->head.type == KV_MSG_POOL_OPEN_READ;
	int r = kv_user_may_open(peer, msg->name, read_only);

	if (r < 0) {
		/* Whether there is such a pool is nobody's business who may not open it. */
	} else if (pool) {
		r = kv_pool_differs(pool, msg);
	} else if (!msg->layout_kind || read_only) {
		r = kv_error(-ENOENT, "there is no pool '%s', and %s",
			     msg->name, read_only ? "who only reads makes none" :
						    "no layout to make it with");
	} else {
		r = create_pool(peer, msg, &pool);
		if (r == -EAGAIN) {
			r = keep_for_later(peer, msg);
			if (!r)
				return;
		}
	}
	peer->open_deadline = 0;
	if (!r)
		r = session_new(peer, pool, read_only, &session);
	if (r < 0) {
		kv_peer_error(peer, msg->head.tag, r, "%s", kv_error_text());
		return;
	}
	kv_events_attached(d->events, session);
	kv_log(KV_LOG_DEBUG, "session %llu: '%s' (pid %d) in pool '%s', slot %u",
	       (unsigned long long)session->id, peer->name, peer->pid, pool->name, session->slot);
	send_opened(peer, session, msg->head.tag);
}

int64_t kv_session_ops(struct kv_session *s)
{
	int64_t n;

	/* Pairs with the exchange in the client's kick: what it posts from here on kicks again. */
	kv_store_seq(&s->shm->kick, 0);
	n = kv_ring_readable(&s->shm->ops, (uint32_t)s->record->ops_done, s->op_capacity);
	if (n < 0)
		kv_peer_drop(s->peer, "its ring of ops makes no sense");
	return n;
}

void kv_session_drain(struct kv_session *s)
{
	kv_session_drain_some(s, UINT32_MAX);
}

void kv_session_drain_some(struct kv_session *s, uint32_t most)
{
	int64_t n = kv_session_ops(s);
	/* A full ring is looked at several times. */
	uint32_t touches = n > most ? MOST_TOUCHED / 8 : MOST_TOUCHED;
	bool gave = false;

	if (n < 0)
		return;
	for (n = n < most ? n : most; n; n--) {
		struct kv_op op = s->ops[s->record->ops_done & (s->op_capacity - 1)];
		int r = -EINVAL;

		if (n > AHEAD)
			kv_books_prefetch(&s->pool->books,
					  (uint32_t)s->ops[(s->record->ops_done + AHEAD) &
							   (s->op_capacity - 1)].id);
		if (s->read_only) {
			r = -EACCES;
		} else if (op.kind == KV_OP_GIVE) {
			r = kv_books_give(&s->pool->books, s->slot, op.id);
			gave = true;
		} else if (op.kind == KV_OP_PUBLISH) {
			r = kv_books_publish(&s->pool->books, s->slot, &op);
			/* It stays a lease, as where the index is full. */
			if (r == -ENOMEM)
				r = KV_PUBLISH_REFUSED;
			if (r == KV_PUBLISHED)
				kv_events_published(s->pool->daemon->events, s->pool, op.id);
			s->n_published += r == KV_PUBLISHED;
			s->record->n_published = s->n_published;
		} else if (op.kind == KV_OP_TOUCH && op.parent > 0) {
			/* Those beyond are lost: they may be (shm.h). */
			r = kv_books_touch(&s->pool->books, op.id,
					   (uint32_t)op.parent < touches ? (uint32_t)op.parent : touches);
			touches -= r > 0 ? (uint32_t)r : 0;
		}
		KV_KILLPOINT(worker_op_done);
		kv_store_release(&s->record->ops_done, s->record->ops_done + 1);
		KV_KILLPOINT(worker_op_counted);
		if (r < 0 && !s->op_in_doubt) {
			kv_log(KV_LOG_WARN, "session %llu: op %u on block %d, which isn't its own",
			       (unsigned long long)s->id, op.kind, op.id);
			kv_ring_consume(&s->shm->ops, (uint32_t)s->record->ops_done);
			kv_peer_drop(s->peer, "it gave or published a block that isn't its own");
			return;
		}
		s->op_in_doubt = false;
	}
	kv_ring_consume(&s->shm->ops, (uint32_t)s->record->ops_done);
	kv_books_save_counts(&s->pool->books);
	if (gave) {
		if (s->pool->books.n_total > kv_limits_most_blocks(s->pool))
			kv_capacity_trim(s->pool);
		kv_capacity_serve(s->pool->daemon);
	}
}

static int64_t grants_room(const struct kv_session *s)
{
	return kv_ring_writable(&s->shm->grants, (uint32_t)s->record->granted, s->grant_capacity);
}

void kv_session_post(struct kv_session *s, uint32_t n)
{
	uint64_t granted = s->record->granted;

	kv_events_before_grant(s->pool->daemon->events, s->pool);
	if (grants_room(s) < (int64_t)n) {
		kv_peer_drop(s->peer, "its ring of grants makes no sense");
		return;
	}
	for (uint32_t i = 0; i < n; i++) {
		int32_t id = kv_books_grant_one(&s->pool->books, s->slot, granted + i);

		/* Often the next ones. */
		kv_books_prefetch(&s->pool->books, (uint32_t)id + AHEAD);
		s->grants[(granted + i) & (s->grant_capacity - 1)] = id;
	}
	KV_KILLPOINT(worker_granted);
	/* With this they are its own; the head can be moved on by another worker (alloc/saved.h). */
	kv_store_release(&s->record->granted, granted + n);
	KV_KILLPOINT(worker_grants_counted);
	kv_ring_post(&s->shm->grants, (uint32_t)(granted + n));
	KV_KILLPOINT(worker_grants_posted);
	kv_books_save_counts(&s->pool->books);
}

void kv_session_answer(struct kv_session *s, uint32_t n)
{
	s->granted_ns = kv_now();
	kv_session_post(s, n);
	s->answered = s->record->granted;
}

uint32_t kv_session_posted(const struct kv_session *s)
{
	int64_t room = grants_room(s);

	return room < 0 ? s->grant_capacity : s->grant_capacity - (uint32_t)room;
}

/* So many of @n that the magazine, with what is posted and not taken yet, isn't overfull. */
static uint32_t magazine_room(const struct kv_session *s, uint32_t n)
{
	uint32_t most = kv_load_relaxed(&s->shm->n_magazine), posted = kv_session_posted(s);

	most = posted < most ? most - posted : 0;
	return n < most ? n : most;
}

/* Requests of its pool that wait are older: it queues behind them, or gets nothing. */
static bool may_pass(struct kv_session *s)
{
	return !s->pool->n_waiting && !kv_pressure_refuses(s);
}

void kv_session_handle_lease(struct kv_peer *peer, const struct kv_msg_lease *msg)
{
	struct kv_session *s = peer->session;
	struct kv_msg_leased reply = { .n = msg->n };
	int64_t now = kv_now();
	int r;

	if (s->read_only) {
		kv_peer_error(peer, msg->head.tag, -EACCES, "pool '%s' is open for reading: no blocks are "
			      "leased to you", s->pool->name);
		return;
	}
	if (msg->head.type == KV_MSG_WANT) {
		/* Those who wait come first. */
		if (kv_link_is_alone(&s->pool->daemon->queue) && !s->pressure_blocks)
			kv_session_post(s, kv_capacity_at_hand(s->pool,
							       kv_user_blocks(s, magazine_room(s, msg->n))));
		return;
	}

	if (msg->n <= s->pool->max_blocks && kv_user_blocks(s, msg->n) < msg->n) {
		kv_peer_error(peer, msg->head.tag, kv_user_too_many_blocks(s, msg->n), "%s",
			      kv_error_text());
		return;
	}
	if (may_pass(s))
		r = kv_capacity_room(s->pool, s, msg->n);
	else
		r = kv_capacity_never_fits(s->pool, msg->n) ? KV_TOO_LARGE : KV_NO_ROOM;
	if (!r) {
		uint32_t left = s->pool->books.n_free - msg->n;
		uint32_t extra = magazine_room(s, msg->extra);

		reply.n += extra < left ? extra : left;
		reply.n = kv_user_blocks(s, reply.n);
		kv_session_answer(s, reply.n);
	} else if (r != KV_TOO_LARGE && !kv_pressure_refuses(s) &&
		   (msg->timeout_ns > 0 || r == -EAGAIN)) {
		s->want_n = msg->n;
		s->want_extra = msg->extra < 256 ? msg->extra : 256;
		s->want_tag = msg->head.tag;
		s->want_since = now;
		s->want_deadline = now + (msg->timeout_ns < 3600 * KV_SEC ? msg->timeout_ns :
									      3600 * KV_SEC);
		s->want_scrub_deadline = now + SCRUB_WAIT;
		kv_queue_add(s);
		return;
	} else {
		reply.n = 0;
		reply.answer = r == KV_TOO_LARGE ? r : KV_NO_ROOM;
		s->pool->n_no_room++;
	}
	kv_latency_add(&s->pool->record->refills, (uint64_t)(kv_now() - now));
	kv_wire_init(&reply.head, KV_MSG_LEASED, sizeof(reply), msg->head.tag);
	kv_peer_send(peer, &reply, sizeof(reply), NULL, 0);
	kv_reserve_fill(peer->daemon);
}
