/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A worker goes on where another has died: arenas and the map of extents from the journal, pools and
 * sessions from the records in their books, the blocks by kv_books_rebuild(). Nothing is served
 * before all of it is done, no extent is handed out and no op is looked at.
 *
 * What it costs is linear in the blocks that pools have: some 50 ns each (README: "When a part dies").
 * The books of pools of up to CHECK_AT_ONCE blocks are proven before anything is served, those of
 * larger ones when the loop has been idle for a moment: the proof takes longer than the rebuilding.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "daemon/daemon.h"
#include "daemon/log.h"
#include "include/internal/atomic.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/killpoint.h"
#include "include/internal/socket.h"

#define CHECK_AT_ONCE 65536
#define CHECK_DELAY   (2 * KV_SEC)

static int take_journal(struct kv_daemon *d)
{
	const struct kv_deposit *deposit = kv_deposits_get(&d->keeping.found, KV_DEPOSIT_JOURNAL, 0);
	struct kv_journal *j;
	struct stat st;
	int r;

	if (!deposit || deposit->n_fds != 1 || fstat(deposit->fds[0], &st) < 0)
		return kv_error(-EPROTO, "the keeper has no journal");
	r = kv_shared_map(deposit->fds[0], (uint64_t)st.st_size, (void **)&j);
	if (r < 0)
		return kv_error(r, "mapping the journal: %s", strerror(-r));
	d->journal = j;
	if (j->magic != KV_JOURNAL_MAGIC || j->bytes != (uint64_t)st.st_size || !j->n_gpus ||
	    j->n_gpus > KV_MAX_GPUS)
		return kv_error(-EPROTO, "the journal is not complete");
	d->n_gpus = j->n_gpus;
	d->boot_nonce = j->boot_nonce;
	d->started_ns = j->started_ns;
	d->next_session_id = j->next_session_id;
	d->next_pool_id = j->next_pool_id;
	return 0;
}

/* One that was being renewed isn't there: its extent is dirty, kv_isolate_start() sees to it. */
static int take_granules(struct kv_daemon *d, uint32_t i, struct kv_arena *arena)
{
	struct kv_deposit *deposit = NULL;

	while ((deposit = kv_deposits_find(&d->keeping.found, deposit, KV_DEPOSIT_GRANULE))) {
		uint32_t k = (uint32_t)deposit->id;

		if (deposit->id >> 32 == i && k < arena->export.n_fds && deposit->n_fds == 1)
			arena->fds[k] = kv_steal_fd(&deposit->fds[0]);
	}
	return 0;
}

/* All parts of an arena, in order. */
static int take_fds(struct kv_daemon *d, uint32_t i, struct kv_arena *arena)
{
	struct kv_deposit *deposit = NULL;
	uint32_t n = 0;

	arena->fds = calloc(arena->export.n_fds ? arena->export.n_fds : 1, sizeof(*arena->fds));
	if (!arena->fds)
		return kv_error(-ENOMEM, "no memory for %u descriptors", arena->export.n_fds);
	memset(arena->fds, -1, arena->export.n_fds * sizeof(*arena->fds));
	if (arena->export.sparse)
		return take_granules(d, i, arena);
	while ((deposit = kv_deposits_find(&d->keeping.found, deposit, KV_DEPOSIT_ARENA))) {
		uint32_t first = deposit->part * KV_KEEPER_MAX_FDS;

		if (deposit->id != i || first + deposit->n_fds > arena->export.n_fds)
			continue;
		for (uint32_t k = 0; k < deposit->n_fds; k++)
			arena->fds[first + k] = kv_steal_fd(&deposit->fds[k]);
		n += deposit->n_fds;
	}
	return n == arena->export.n_fds ? 0 :
					  kv_error(-EPROTO, "device %u: %u of %u descriptors are kept", i,
						   n, arena->export.n_fds);
}

static int take_arena(struct kv_daemon *d, uint32_t i)
{
	const struct kv_journal_gpu *saved = &d->journal->gpus[i];
	struct kv_deposit *owner = kv_deposits_get(&d->keeping.found, KV_DEPOSIT_OWNER, i);
	struct kv_gpu_unit *gpu = &d->gpus[i];

	gpu->ops = d->journal->host ? &kv_device_host : &kv_device_cuda;
	gpu->info = saved->info;
	gpu->arena = calloc(1, sizeof(*gpu->arena));
	if (!gpu->arena)
		return kv_error(-ENOMEM, "no memory for the record of an arena");
	gpu->arena->export = saved->export;
	gpu->arena->owner_pidfd = gpu->arena->owner_fd = -1;
	snprintf(gpu->arena->why, sizeof(gpu->arena->why), "%s", saved->why);
	snprintf(gpu->export_why, sizeof(gpu->export_why), "%.95s", saved->why);
	if (owner && owner->n_fds == 2) {
		gpu->arena->owner_pidfd = kv_steal_fd(&owner->fds[0]);
		gpu->arena->owner_fd = kv_steal_fd(&owner->fds[1]);
	}
	return take_fds(d, i, gpu->arena);
}

static int take_arenas(struct kv_daemon *d)
{
	const struct kv_journal *j = d->journal;
	uint64_t bytes[KV_MAX_GPUS];

	for (uint32_t i = 0; i < d->n_gpus; i++) {
		int r = take_arena(d, i);

		if (r < 0)
			return r;
		bytes[i] = j->gpus[i].export.bytes;
	}
	if (KV_JOURNAL_BYTES + kv_extents_map_bytes(d->n_gpus, bytes, j->extent_bytes) > j->bytes)
		return kv_error(-EPROTO, "the journal is too short for the map of extents");
	kv_extents_adopt(&d->extents, d->n_gpus, bytes, j->extent_bytes,
			 (char *)d->journal + KV_JOURNAL_BYTES);
	return kv_isolate_start(d, false);
}

/* The keeper has killed them. Those that have not ended may still write to what they were given. */
static int take_movers(struct kv_daemon *d)
{
	struct kv_deposit *deposit = NULL;
	int r = 0;

	while (!r && (deposit = kv_deposits_find(&d->keeping.found, deposit, KV_DEPOSIT_MOVER)))
		r = kv_mover_adopt(d, (uint32_t)(deposit->id >> 32), (pid_t)(uint32_t)deposit->id,
				   kv_steal_fd(&deposit->fds[0]));
	return r < 0 ? kv_error(r, "the mover of a worker before: %s", strerror(-r)) : 0;
}

/* Those that don't count are let go of: they were just being made, or ending. */
static int take_pools(struct kv_daemon *d)
{
	struct kv_deposit *deposit = NULL;

	while ((deposit = kv_deposits_find(&d->keeping.found, deposit, KV_DEPOSIT_POOL))) {
		struct kv_pool *pool;
		int r = kv_pool_adopt(d, deposit, &pool);

		if (r == -ENOENT)
			kv_keeping_drop(&d->keeping, KV_DEPOSIT_POOL, deposit->id);
		else if (r < 0)
			return kv_error(r, "pool %llu: %s", (unsigned long long)deposit->id,
					strerror(-r));
	}
	return 0;
}

/* Extents of pools that there are not. */
static void reset_extents(struct kv_daemon *d)
{
	for (uint32_t g = 0; g < d->n_gpus; g++) {
		for (uint32_t i = 0; i < d->extents.n[g]; i++) {
			bool known = d->extents.map[g][i].state != KV_EXTENT_OWNED;

			for (struct kv_link *l = d->pools.next; !known && l != &d->pools; l = l->next)
				known = kv_extents_owned(
					&d->extents, g, i,
					(uint32_t)kv_container_of(l, struct kv_pool, link)->id);
			if (!known)
				kv_extents_reset(&d->extents, g, i);
		}
	}
}

static int take_session(struct kv_pool *pool, uint32_t slot)
{
	const struct kv_session_record *record = &pool->record->sessions[slot];
	struct kv_deposit *deposit =
		kv_deposits_get(&pool->daemon->keeping.found, KV_DEPOSIT_SESSION, record->id);
	int fds[2];

	if (!deposit || deposit->n_fds != 2)
		return kv_error(-EPROTO, "pool '%s', slot %u: the pages of session %llu aren't kept",
				pool->name, slot, (unsigned long long)record->id);
	fds[0] = kv_steal_fd(&deposit->fds[0]);
	fds[1] = kv_steal_fd(&deposit->fds[1]);
	KV_KILLPOINT(worker_session_taken);
	return kv_session_adopt(pool, slot, fds);
}

static bool goes_on(const struct kv_session_record *record)
{
	return record->state == KV_RECORD_LIVE || record->state == KV_RECORD_DROPPED;
}

/* Its client never heard of it, or its end had begun: nothing of it may stay. */
static void end_session(struct kv_pool *pool, uint32_t slot)
{
	struct kv_session_record *record = &pool->record->sessions[slot];

	kv_store_release(&record->state, KV_RECORD_ENDING);
	kv_books_forget(&pool->books, slot);
	kv_store_release(&record->state, KV_RECORD_NONE);
}

static int rebuild_pool(struct kv_pool *pool)
{
	kv_cleanup(kv_freep) struct kv_books_found *found = calloc(1, sizeof(*found));
	struct kv_session_record *sessions = pool->record->sessions;
	int r = found ? 0 : -ENOMEM;

	if (found)
		found->moving = kv_compact_has_former(pool->daemon, pool->gpu_mask);
	/* Each session that is taken over says so for itself. */
	memset(pool->head->live, 0, sizeof(pool->head->live));
	for (uint32_t i = 0; !r && i < KV_MAX_SESSIONS; i++) {
		found->live[i] = goes_on(&sessions[i]);
		found->granted[i] = sessions[i].granted;
		if (found->live[i])
			r = take_session(pool, i);
	}
	if (!r)
		r = kv_capacity_adopt(pool, found);
	pool->has_former_moves = pool->books.n_moving;
	if (r < 0)
		return kv_error(r, "pool '%s': %s", pool->name, strerror(-r));
	for (uint32_t i = 0; i < KV_MAX_SESSIONS; i++) {
		if (found->live[i])
			kv_recall_finish(pool->slots[i]);
		if (sessions[i].state == KV_RECORD_DROPPED)
			kv_session_set_aside(pool->slots[i]);
		else if (sessions[i].state != KV_RECORD_NONE && !found->live[i])
			end_session(pool, i);
	}
	kv_log(found->n_dropped ? KV_LOG_WARN : KV_LOG_INFO,
	       "pool '%s' goes on: %u sessions; %u blocks free, %u leased, %u cached, %u quarantined; "
	       "put right: %u grants, %u descriptors, %u entries of the index; %u cached blocks dropped",
	       pool->name, pool->n_sessions, pool->books.n_free, pool->books.n_leased,
	       pool->books.n_cached, pool->books.n_quarantined, found->n_unposted, found->n_mirrored,
	       found->n_index, found->n_dropped);
	kv_capacity_magazines(pool);
	KV_KILLPOINT(worker_pool_rebuilt);
	return 0;
}

/* Deposits that nothing names are a session's that had not begun, or had ended. */
static void drop_unknown(struct kv_daemon *d)
{
	struct kv_deposit *deposit = NULL;

	while ((deposit = kv_deposits_find(&d->keeping.found, deposit, KV_DEPOSIT_SESSION))) {
		if (deposit->fds[0] >= 0)
			kv_keeping_drop(&d->keeping, KV_DEPOSIT_SESSION, deposit->id);
	}
}

static void check_pool(struct kv_pool *pool)
{
	bool live[KV_MAX_SESSIONS];
	char text[160] = "";
	uint64_t n;

	for (uint32_t i = 0; i < KV_MAX_SESSIONS; i++)
		live[i] = pool->slots[i];
	n = kv_books_check(&pool->books, live, text, sizeof(text));
	if (n)
		kv_log(KV_LOG_ERROR, "pool '%s' after the restart: %llu errors in its books; first: %s",
		       pool->name, (unsigned long long)n, text);
}

static void check_pools(struct kv_daemon *d, bool large)
{
	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);

		if ((pool->head->id_limit > CHECK_AT_ONCE) == large)
			check_pool(pool);
	}
}

static void check_later(void *arg)
{
	check_pools(arg, true);
}

static int64_t cpu_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return (int64_t)t.tv_sec * KV_SEC + t.tv_nsec;
}

int kv_rebuild(struct kv_daemon *d)
{
	int64_t start = kv_now(), cpu = cpu_now();
	int r = take_journal(d);

	if (!r)
		r = take_arenas(d);
	if (!r)
		r = take_movers(d);
	if (!r)
		r = take_pools(d);
	if (r < 0)
		return r;
	KV_KILLPOINT(worker_pools_taken);
	reset_extents(d);
	for (struct kv_link *l = d->pools.next; !r && l != &d->pools; l = l->next)
		r = rebuild_pool(kv_container_of(l, struct kv_pool, link));
	if (r < 0)
		return r;
	drop_unknown(d);
	kv_keeping_adopted(&d->keeping);
	KV_KILLPOINT(worker_rebuilt);
	/* What clients did meanwhile, and what was under way: before anything is granted. */
	for (struct kv_link *l = d->peers.next; l != &d->peers; l = l->next) {
		struct kv_peer *peer = kv_container_of(l, struct kv_peer, link);

		if (peer->session)
			kv_session_drain(peer->session);
	}
	check_pools(d, false);
	r = kv_timer_new(d->loop, check_later, d, &d->check_timer);
	if (r < 0)
		return r;
	kv_timer_set(d->check_timer, CHECK_DELAY);
	kv_log(KV_LOG_INFO, "took over %u pools and %u sessions in %lld us, %lld us of them at work",
	       d->n_pools, d->n_sessions, (long long)((kv_now() - start) / 1000),
	       (long long)(cpu_now() - cpu) / 1000);
	return 0;
}
