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
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
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

static void one_pool(const struct kv_pool *pool, struct kv_pool_stats *s)
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
	s->blocks_cached_held = kv_books_count(b, NULL, NULL);
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

static uint32_t pool_stats(struct kv_daemon *d, uint32_t first, uint32_t n, void *items)
{
	struct kv_pool_stats *s = items;
	uint32_t i = 0, done = 0;

	for (uint32_t g = 0; g < d->n_gpus; g++)
		kv_shares_update(d, 1u << g);
	for (struct kv_link *l = d->pools.next; l != &d->pools && done < n; l = l->next) {
		if (i++ >= first)
			one_pool(kv_container_of(l, struct kv_pool, link), &s[done++]);
	}
	return done;
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

static uint32_t session_stats(struct kv_daemon *d, uint32_t first, uint32_t n, void *items)
{
	struct kv_session_stats *s = items;
	uint32_t i = 0, done = 0;

	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);
		uint32_t leased[KV_MAX_SESSIONS] = { 0 }, held[KV_MAX_SESSIONS] = { 0 };

		kv_books_count(&pool->books, leased, held);
		for (uint32_t k = 0; k < KV_MAX_SESSIONS; k++) {
			if (pool->slots[k] && i++ >= first && done < n)
				kv_control_session(pool->slots[k], leased[k], held[k], &s[done++]);
		}
	}
	return done;
}

static const struct {
	uint32_t item_bytes;
	uint32_t (*fill)(struct kv_daemon *d, uint32_t first, uint32_t n, void *items);
} kinds[] = {
	[KV_STAT_DAEMON] = { sizeof(struct kv_daemon_stats), daemon_stats },
	[KV_STAT_GPU] = { sizeof(struct kv_gpu_stats), gpu_stats },
	[KV_STAT_POOL] = { sizeof(struct kv_pool_stats), pool_stats },
	[KV_STAT_SESSION] = { sizeof(struct kv_session_stats), session_stats },
	[KV_STAT_BALANCE] = { sizeof(struct kv_balance_stats), kv_check_balance },
	[KV_STAT_ERROR] = { sizeof(struct kv_error_stats), kv_check_errors },
	[KV_STAT_HISTORY] = { sizeof(struct kv_history_stats), kv_history_items },
};

int kv_control_items(struct kv_daemon *d, uint32_t kind, void **ret, size_t *ret_n, size_t *ret_size)
{
	uint32_t most = 1 + d->n_gpus + d->n_pools + d->n_sessions;
	void *items = calloc(most, kinds[kind].item_bytes);

	if (!items)
		return -ENOMEM;
	*ret_n = kinds[kind].fill(d, 0, most, items);
	*ret_size = kinds[kind].item_bytes;
	*ret = items;
	return 0;
}

void kv_control_stats(struct kv_peer *peer, const struct kv_msg_stats *msg)
{
	struct kv_daemon *d = peer->daemon;
	uint32_t totals[] = { [KV_STAT_DAEMON] = 1, [KV_STAT_GPU] = d->n_gpus,
			      [KV_STAT_POOL] = d->n_pools, [KV_STAT_SESSION] = d->n_sessions,
			      [KV_STAT_BALANCE] = d->n_pools, [KV_STAT_ERROR] = 0,
			      [KV_STAT_HISTORY] = kv_history_count(d) };
	kv_cleanup(kv_freep) struct kv_msg_stats_part *reply = calloc(1, KV_WIRE_MAX);
	uint32_t most, end, size;

	if (!reply || msg->kind >= sizeof(kinds) / sizeof(kinds[0]) || !kinds[msg->kind].fill) {
		kv_peer_error(peer, msg->head.tag, reply ? -EINVAL : -ENOMEM, "stats: no kind %u",
			      msg->kind);
		return;
	}
	reply->item_bytes = kinds[msg->kind].item_bytes;
	most = (KV_WIRE_MAX - (uint32_t)sizeof(*reply)) / reply->item_bytes;
	reply->n = kinds[msg->kind].fill(d, msg->first, most, reply->items);
	if (msg->kind == KV_STAT_ERROR)
		totals[msg->kind] = kv_check_errors(d, 0, 0, NULL);
	end = msg->first + reply->n;
	reply->left = reply->n && end < totals[msg->kind] ? totals[msg->kind] - end : 0;
	size = (uint32_t)sizeof(*reply) + reply->n * reply->item_bytes;
	kv_wire_init(&reply->head, KV_MSG_STATS_PART, size, msg->head.tag);
	kv_peer_send(peer, reply, size, NULL, 0);
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
	kv_events_restart(peer->daemon->events, pool);
	if (n_held < 0) {
		kv_peer_error(peer, msg->head.tag, (int)n_held, "no memory for a new epoch");
		return;
	}
	/* Pairs with the load in kv_pool_epoch(). */
	kv_store_release(&pool->head->epoch, pool->books.epoch);
	kv_log(KV_LOG_INFO, "pool '%s': epoch %llu; %lld blocks of older ones are held", pool->name,
	       (unsigned long long)pool->books.epoch, (long long)n_held);
	kv_capacity_serve(peer->daemon);
	reply.epoch = pool->books.epoch;
	reply.n_held = (uint64_t)n_held;
	kv_wire_init(&reply.head, KV_MSG_EPOCH, sizeof(reply), msg->head.tag);
	kv_peer_send(peer, &reply, sizeof(reply), NULL, 0);
}
