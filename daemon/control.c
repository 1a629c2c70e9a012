/* SPDX-License-Identifier: Apache-2.0 */
/* What operators ask for: stats, the check of the books, dropping what a pool has cached. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/daemon.h"
#include "daemon/events.h"
#include "daemon/heap.h"
#include "daemon/history.h"
#include "daemon/log.h"
#include "daemon/walk.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/killpoint.h"
#include "include/internal/socket.h"

static void copy_text(char *to, size_t size, const char *from)
{
	snprintf(to, size, "%s", from);
}

static uint32_t daemon_stats(struct kv_daemon *d, uint32_t first, uint32_t n, void *items)
{
	struct kv_daemon_stats *s = items;
	struct kv_heap_sizes sizes;

	if (first || !n)
		return 0;
	copy_text(s->version, sizeof(s->version), kv_version());
	copy_text(s->event_loop, sizeof(s->event_loop), kv_loop_name(d->loop));
	copy_text(s->event_loop_why, sizeof(s->event_loop_why), kv_loop_why(d->loop));
	copy_text(s->heap, sizeof(s->heap), kv_heap_name());
	s->boot_nonce = d->boot_nonce;
	s->pid = (uint64_t)getppid();
	s->worker_pid = (uint64_t)getpid();
	s->worker_restarts = d->keeping.restarts;
	s->programs_given_up = d->keeping.n_given_up;
	s->uptime_ns = (uint64_t)(kv_now() - d->started_ns);
	s->n_gpus = d->n_gpus;
	s->n_pools = d->n_pools;
	s->n_clients = d->n_peers;
	s->n_sessions = d->n_sessions;
	s->event_batches_total = kv_events_batches(d->events);
	s->event_restarts_total = kv_events_restarts(d->events);
	s->heap_bytes = kv_heap_bytes();
	s->moved_bytes_total = d->moved_extents * d->extents.bytes;
	s->moving_ns_total = d->moving_ns;
	sizes = kv_heap_sizes();
	s->heap_active_bytes = sizes.active;
	s->heap_resident_bytes = sizes.resident;
	s->heap_mapped_bytes = sizes.mapped;
	s->heap_retained_bytes = sizes.retained;
	return 1;
}

static void one_gpu(struct kv_daemon *d, uint32_t i, struct kv_gpu_stats *s)
{
	const struct kv_gpu_unit *gpu = &d->gpus[i];
	const struct kv_extents *e = &d->extents;

	s->index = i;
	copy_text(s->name, sizeof(s->name), gpu->info.name);
	if (gpu->arena->export.kind != KV_EXPORT_HOST)
		kv_uuid_format(gpu->arena->export.uuid, s->uuid);
	copy_text(s->export_kind, sizeof(s->export_kind), kv_export_name(gpu->arena->export.kind));
	copy_text(s->export_why, sizeof(s->export_why), gpu->export_why);
	copy_text(s->export_limits, sizeof(s->export_limits),
		  kv_export_limits(gpu->arena->export.kind));
	s->bytes_arena = (uint64_t)e->n[i] * e->bytes;
	s->bytes_pools = e->n_state[i][KV_EXTENT_OWNED] * e->bytes;
	s->bytes_held = e->n_state[i][KV_EXTENT_HELD] * e->bytes;
	s->bytes_scrubbing = (e->n_state[i][KV_EXTENT_DIRTY] + e->n_state[i][KV_EXTENT_SCRUBBING]) *
				     e->bytes +
			     s->bytes_held;
	s->bytes_free = e->n_state[i][KV_EXTENT_CLEAN] * e->bytes;
	s->bytes_extent = e->bytes;
	s->mover_pid = kv_mover_pid(gpu->mover);
	copy_text(s->mover_error, sizeof(s->mover_error), kv_mover_error(gpu->mover));
	s->scrubbed_bytes_total = kv_mover_scrubbed(gpu->mover);
	s->bytes_granule = d->isolation ? e->bytes : 0;
	s->renewed_bytes_total = kv_isolate_n_renewed(d, i) * e->bytes;
}

static uint32_t gpu_stats(struct kv_daemon *d, uint32_t first, uint32_t n, void *items)
{
	struct kv_gpu_stats *s = items;
	uint32_t done = 0;

	for (uint32_t i = first; i < d->n_gpus && done < n; i++)
		one_gpu(d, i, &s[done++]);
	return done;
}

static void one_pool(const struct kv_pool *pool, uint32_t n_held, struct kv_pool_stats *s)
{
	const struct kv_books *b = &pool->books;

	s->id = pool->id;
	copy_text(s->name, sizeof(s->name), pool->name);
	copy_text(s->model, sizeof(s->model), pool->model);
	copy_text(s->revision, sizeof(s->revision), pool->revision);
	copy_text(s->name_space, sizeof(s->name_space), pool->name_space);
	copy_text(s->layout, sizeof(s->layout),
		  pool->layout.kind == KV_LAYOUT_FLAT ? "flat" : "paged");
	s->gpu_mask = pool->gpu_mask;
	s->tp_ranks = pool->tp_ranks;
	s->block_tokens = pool->layout.block_tokens;
	s->block_bytes = pool->block_bytes;
	s->n_sessions = pool->n_sessions;
	s->min_bytes = pool->min_bytes;
	s->max_bytes = pool->max_bytes;
	s->extent_bytes = (uint64_t)pool->n_extents * pool->daemon->extents.bytes;
	s->blocks_total = b->n_total;
	s->blocks_free = b->n_free;
	s->blocks_leased = b->n_leased;
	s->blocks_cached = b->n_cached;
	s->blocks_cached_held = n_held;
	s->blocks_quarantined = b->n_quarantined;
	s->lookup_tokens_total = pool->lookup_tokens;
	s->hit_tokens_total = pool->hit_tokens;
	for (uint32_t i = 0; i < KV_MAX_SESSIONS; i++) {
		if (!pool->slots[i])
			continue;
		s->lookup_tokens_total += kv_load_relaxed(&pool->slots[i]->shm->lookup_tokens);
		s->hit_tokens_total += kv_load_relaxed(&pool->slots[i]->shm->hit_tokens);
	}
	s->published_total = b->n_published;
	s->duplicates_total = b->n_duplicates;
	s->evictions_total = b->n_evicted;
	s->evictions_own_total = b->n_evicted - pool->record->n_evicted_others - pool->record->n_evicted_drop;
	s->evictions_others_total = pool->record->n_evicted_others;
	s->evictions_drop_total = pool->record->n_evicted_drop;
	s->grants_total = b->n_granted;
	s->no_room_total = pool->n_no_room;
	s->waiting = pool->n_waiting;
	s->weight = pool->weight;
	s->share_bytes = (uint64_t)pool->share_extents * pool->daemon->extents.bytes;
	s->limits_revision = pool->limits_revision;
	s->blocks_moving = b->n_moving;
	s->spare_bytes = kv_space_n_spare(&b->space) * pool->daemon->extents.bytes;
	s->fragmented_bytes = (b->n_free - kv_space_n_free_spare(&b->space)) * pool->block_bytes;
	s->compacting = pool->compact_extents > 0;
	s->compacted_bytes_total = pool->compacted_bytes;
	s->compacting_ns_total = pool->compact_ns;
	s->recalled_total = pool->n_recalled;
}

void kv_control_session(const struct kv_session *session, uint32_t leased, uint32_t held,
			struct kv_session_stats *s)
{
	s->id = session->id;
	s->pool_id = session->pool->id;
	copy_text(s->pool, sizeof(s->pool), session->pool->name);
	copy_text(s->client, sizeof(s->client), session->peer->name);
	copy_text(s->state, sizeof(s->state),
		  session->peer->away	? "away" :
		  session->peer->fd < 0 ? "dying" :
		  session->read_only	? "reads" :
					  "live");
	s->pid = (uint64_t)session->peer->pid;
	s->uid = session->peer->uid;
	s->slot = session->slot;
	s->since_ns = (uint64_t)(kv_now() - session->since_ns);
	s->blocks_leased = leased;
	s->blocks_idle = kv_idle(session);
	s->blocks_held = held;
	s->lookup_tokens_total = kv_load_relaxed(&session->shm->lookup_tokens);
	s->hit_tokens_total = kv_load_relaxed(&session->shm->hit_tokens);
	s->published_total = session->n_published;
}

/*
 * Who holds what is found out by a walk: stats of pools and of sessions. What was counted in one slice may be
 * gone by the last: no more are held than are cached then.
 */
struct counting {
	struct kv_walk walk;
	uint32_t tag, first, most; /* items */
	uint32_t at;		   /* items there were so far */
	struct kv_books_count count; /* of the pool where it is */
	struct kv_msg_stats_part *reply;
	uint64_t space[];
};

static bool count(struct counting *c, struct kv_pool *pool, bool began)
{
	if (!began)
		c->count = (struct kv_books_count){ .at = -1 };
	return kv_books_count_on(&pool->books, &c->count);
}

static uint32_t still_held(const struct kv_pool *pool, uint32_t n_counted)
{
	return n_counted < pool->books.n_cached ? n_counted : pool->books.n_cached;
}

/* NULL: it comes before what was asked for, or there is no room for it. */
static void *next_item(struct counting *c)
{
	if (c->at++ < c->first || c->reply->n == c->most)
		return NULL;
	return (char *)c->reply->items + (size_t)c->reply->n++ * c->reply->item_bytes;
}

static bool pool_slice(struct kv_walk *walk, struct kv_pool *pool, bool began)
{
	struct counting *c = (struct counting *)walk;
	bool wanted = c->at >= c->first && c->reply->n < c->most;
	struct kv_pool_stats *s;

	if (wanted && count(c, pool, began))
		return true;
	s = next_item(c);
	if (s)
		one_pool(pool, still_held(pool, c->count.n_held), s);
	return false;
}

static bool session_slice(struct kv_walk *walk, struct kv_pool *pool, bool began)
{
	struct counting *c = (struct counting *)walk;
	bool wanted = c->at + pool->n_sessions > c->first && c->reply->n < c->most;

	if (wanted && count(c, pool, began))
		return true;
	for (uint32_t i = 0; i < KV_MAX_SESSIONS; i++) {
		struct kv_session_stats *s = pool->slots[i] ? next_item(c) : NULL;

		if (s)
			kv_control_session(pool->slots[i], pool->books.n_leased_by[i],
					   still_held(pool, c->count.held[i]), s);
	}
	return false;
}

static void send_items(struct kv_peer *peer, struct kv_msg_stats_part *reply, uint32_t tag, uint32_t first,
		       uint32_t total)
{
	uint32_t end = first + reply->n, size = (uint32_t)sizeof(*reply) + reply->n * reply->item_bytes;

	reply->left = reply->n && end < total ? total - end : 0;
	kv_wire_init(&reply->head, KV_MSG_STATS_PART, size, tag);
	kv_peer_send(peer, reply, size, NULL, 0);
}

static void counted(struct kv_walk *walk, struct kv_peer *peer)
{
	struct counting *c = (struct counting *)walk;

	send_items(peer, c->reply, c->tag, c->first, c->at);
}

/* Of each kind: what fills its structs at once, or what the walk for them does. */
static const struct {
	uint32_t item_bytes;
	uint32_t (*fill)(struct kv_daemon *d, uint32_t first, uint32_t n, void *items);
	bool (*slice)(struct kv_walk *walk, struct kv_pool *pool, bool began);
	void (*check)(struct kv_peer *peer, uint32_t tag, uint32_t first);
} kinds[] = {
	[KV_STAT_DAEMON] = { sizeof(struct kv_daemon_stats), .fill = daemon_stats },
	[KV_STAT_GPU] = { sizeof(struct kv_gpu_stats), .fill = gpu_stats },
	[KV_STAT_POOL] = { sizeof(struct kv_pool_stats), .slice = pool_slice },
	[KV_STAT_SESSION] = { sizeof(struct kv_session_stats), .slice = session_slice },
	[KV_STAT_BALANCE] = { sizeof(struct kv_balance_stats), .check = kv_check_balance },
	[KV_STAT_ERROR] = { sizeof(struct kv_error_stats), .check = kv_check_errors },
	[KV_STAT_HISTORY] = { sizeof(struct kv_history_stats), .fill = kv_history_items },
};

/* NULL: no memory. */
static struct counting *counting_new(struct kv_daemon *d, uint32_t kind, uint32_t most)
{
	size_t room = sizeof(struct kv_msg_stats_part) + (size_t)most * kinds[kind].item_bytes;
	struct counting *c = calloc(1, sizeof(*c) + room);

	if (!c)
		return NULL;
	for (uint32_t g = 0; g < d->n_gpus; g++)
		kv_shares_update(d, 1u << g);
	c->walk = (struct kv_walk){ .slice = kinds[kind].slice, .end = counted };
	c->most = most;
	c->reply = (struct kv_msg_stats_part *)c->space;
	c->reply->item_bytes = kinds[kind].item_bytes;
	return c;
}

int kv_control_items(struct kv_daemon *d, uint32_t kind, void **ret, size_t *ret_n, size_t *ret_size)
{
	uint32_t most = 1 + d->n_gpus + d->n_pools + d->n_sessions;
	kv_cleanup(kv_freep) struct counting *c = NULL;
	void *items = calloc(most, kinds[kind].item_bytes);

	if (!items)
		return -ENOMEM;
	*ret_size = kinds[kind].item_bytes;
	if (kinds[kind].fill) {
		*ret_n = kinds[kind].fill(d, 0, most, items);
	} else {
		c = counting_new(d, kind, most);
		if (!c) {
			free(items);
			return -ENOMEM;
		}
		while (kv_walk_next(d, &c->walk))
			;
		*ret_n = c->reply->n;
		memcpy(items, c->reply->items, *ret_n * *ret_size);
	}
	*ret = items;
	return 0;
}

static uint32_t total_of(const struct kv_daemon *d, uint32_t kind)
{
	switch (kind) {
	case KV_STAT_DAEMON:
		return 1;
	case KV_STAT_GPU:
		return d->n_gpus;
	default:
		return kv_history_count(d);
	}
}

/* What is known without looking at blocks. */
static void answer_at_once(struct kv_peer *peer, const struct kv_msg_stats *msg, uint32_t most)
{
	kv_cleanup(kv_freep) struct kv_msg_stats_part *reply = calloc(1, KV_WIRE_MAX);

	if (!reply) {
		kv_peer_error(peer, msg->head.tag, -ENOMEM, "no memory for stats");
		return;
	}
	reply->item_bytes = kinds[msg->kind].item_bytes;
	reply->n = kinds[msg->kind].fill(peer->daemon, msg->first, most, reply->items);
	send_items(peer, reply, msg->head.tag, msg->first, total_of(peer->daemon, msg->kind));
}

void kv_control_stats(struct kv_peer *peer, const struct kv_msg_stats *msg)
{
	struct counting *c;
	uint32_t most;

	if (msg->kind >= sizeof(kinds) / sizeof(kinds[0]) || !kinds[msg->kind].item_bytes) {
		kv_peer_error(peer, msg->head.tag, -EINVAL, "stats: no kind %u", msg->kind);
		return;
	}
	most = (KV_WIRE_MAX - (uint32_t)sizeof(struct kv_msg_stats_part)) / kinds[msg->kind].item_bytes;
	if (kinds[msg->kind].check) {
		kinds[msg->kind].check(peer, msg->head.tag, msg->first);
	} else if (kinds[msg->kind].fill) {
		answer_at_once(peer, msg, most);
	} else {
		c = counting_new(peer->daemon, msg->kind, most);
		if (!c) {
			kv_peer_error(peer, msg->head.tag, -ENOMEM, "no memory for stats");
			return;
		}
		c->tag = msg->head.tag;
		c->first = msg->first;
		kv_walk_start(peer, &c->walk);
	}
}

void kv_control_compact(struct kv_peer *peer, const struct kv_msg_compact *msg)
{
	struct kv_pool *pool = kv_pool_find(peer->daemon, msg->name);
	struct kv_msg_plain reply;
	int r = pool ? 0 : kv_error(-ENOENT, "there is no pool '%s'", msg->name);

	if (!r && peer->daemon->access)
		r = kv_user_may_change(peer, pool);
	if (!r)
		r = kv_compact_ask(pool, msg->rate);

	if (r < 0) {
		kv_peer_error(peer, msg->head.tag, r, "%s", kv_error_text());
		return;
	}
	kv_wire_init(&reply.head, KV_MSG_OK, sizeof(reply), msg->head.tag);
	kv_peer_send(peer, &reply, sizeof(reply), NULL, 0);
}

void kv_control_drop(struct kv_peer *peer, const struct kv_msg_drop *msg)
{
	struct kv_pool *pool = kv_pool_find(peer->daemon, msg->name);
	struct kv_msg_plain reply;
	uint32_t n;

	if (!pool) {
		kv_peer_error(peer, msg->head.tag, -ENOENT, "there is no pool '%s'", msg->name);
		return;
	}
	if (kv_user_may_change(peer, pool) < 0) {
		kv_peer_error(peer, msg->head.tag, -EPERM, "%s", kv_error_text());
		return;
	}
	n = kv_books_evict(&pool->books, pool->books.n_cached, false);
	pool->record->n_evicted_drop += n;
	kv_log(KV_LOG_INFO, "pool '%s': %u cached blocks dropped on request", pool->name, n);
	if (!pool->n_sessions)
		kv_pool_free(pool);
	else
		kv_capacity_serve(peer->daemon);
	kv_wire_init(&reply.head, KV_MSG_OK, sizeof(reply), msg->head.tag);
	kv_peer_send(peer, &reply, sizeof(reply), NULL, 0);
}

void kv_control_epoch(struct kv_peer *peer, const struct kv_msg_drop *msg)
{
	struct kv_pool *pool = kv_pool_find(peer->daemon, msg->name);
	struct kv_msg_epoch reply = { 0 };
	int64_t n_held;

	if (!pool) {
		kv_peer_error(peer, msg->head.tag, -ENOENT, "there is no pool '%s'", msg->name);
		return;
	}
	if (kv_user_may_change(peer, pool) < 0) {
		kv_peer_error(peer, msg->head.tag, -EPERM, "%s", kv_error_text());
		return;
	}
	n_held = kv_books_new_epoch(&pool->books);
	KV_KILLPOINT(worker_epoch_evicted);
	kv_events_restart(peer->daemon->events, pool);
	if (n_held < 0) {
		kv_peer_error(peer, msg->head.tag, (int)n_held, "no memory for a new epoch");
		return;
	}
	/* Pairs with the load in kv_pool_epoch(). */
	kv_store_release(&pool->head->epoch, pool->books.epoch);
	KV_KILLPOINT(worker_epoch_shown);
	kv_log(KV_LOG_INFO, "pool '%s': epoch %llu; %lld blocks of older ones are held", pool->name,
	       (unsigned long long)pool->books.epoch, (long long)n_held);
	kv_capacity_serve(peer->daemon);
	reply.epoch = pool->books.epoch;
	reply.n_held = (uint64_t)n_held;
	kv_wire_init(&reply.head, KV_MSG_EPOCH, sizeof(reply), msg->head.tag);
	kv_peer_send(peer, &reply, sizeof(reply), NULL, 0);
}
