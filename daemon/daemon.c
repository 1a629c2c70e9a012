/* SPDX-License-Identifier: Apache-2.0 */
/* Starting and stopping: arenas, loop, movers, the socket. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/access.h"
#include "daemon/daemon.h"
#include "daemon/fair.h"
#include "daemon/history.h"
#include "daemon/heap.h"
#include "daemon/log.h"
#include "daemon/service.h"
#include "daemon/events.h"
#include "daemon/metrics.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"

#define MIB ((uint64_t)1 << 20)
#define ACCEPTS_A_TURN 32
#define ACCEPT_PAUSE (50 * KV_MSEC)

/*
 * With isolation an extent is a granule, of a size that is a power of two: what a GPU has in 2,048 of 64 to
 * 256 MiB, host memory in 1,024 of at least 2 MiB.
 */
static uint64_t granule_size(const struct kv_config *c, uint64_t arena_bytes)
{
	uint64_t size = c->host ? 2 * MIB : 64 * MIB, most = c->host ? UINT64_MAX : 256 * MIB;

	if (!c->isolate || c->granule_bytes)
		return c->granule_bytes;
	while (arena_bytes / size > (c->host ? 1024 : 2048) && size < most)
		size *= 2;
	return size;
}

/* Extents: 2 MiB, or what cuts the largest arena into about 4,096. */
static uint64_t extent_size(const uint64_t *arena_bytes, uint32_t n)
{
	uint64_t size = 2 * MIB;

	for (uint32_t i = 0; i < n; i++) {
		while (arena_bytes[i] / size > 4096)
			size *= 2;
	}
	return size;
}

static int wanted_bytes(const struct kv_config *c, const struct kv_device_info *info, uint64_t *ret)
{
	uint64_t bytes = c->host ? c->host_bytes :
			 c->reserve_bytes ? c->reserve_bytes :
					    (uint64_t)((double)info->free_bytes * c->reserve_share);

	bytes = bytes / KV_ARENA_UNIT * KV_ARENA_UNIT;
	if (!bytes)
		return kv_error(-EINVAL, "%s: less than 2 MiB to reserve (%llu bytes are free)",
				c->host ? "--host" : "--reserve",
				(unsigned long long)info->free_bytes);
	*ret = bytes;
	return 0;
}

static int make_arenas(struct kv_daemon *d)
{
	const struct kv_config *c = &d->config;
	uint64_t bytes[KV_MAX_GPUS], size, granule = 0;
	uint32_t n = c->host ? 1 : c->n_gpus;
	void *map;
	int r;

	for (uint32_t i = 0; i < n; i++) {
		struct kv_gpu_unit *gpu = &d->gpus[i];
		int ordinal = c->host ? 0 : c->gpus[i];

		gpu->ops = c->host ? &kv_device_host : &kv_device_cuda;
		r = gpu->ops->info(ordinal, &gpu->info);
		if (r < 0)
			return r;
		r = wanted_bytes(c, &gpu->info, &bytes[i]);
		if (r < 0)
			return r;
		if (!i)
			granule = granule_size(c, bytes[i]);
		if (c->isolate)
			bytes[i] = bytes[i] / granule * granule;
		if (!bytes[i])
			return kv_error(-EINVAL, "--isolate: device %u has less to reserve than one "
					"granule of %llu MiB (--granule)", i,
					(unsigned long long)(granule / MIB));
		/* An ipc handle is the handle of the whole: it can't be. */
		r = gpu->ops->arena_new(ordinal, bytes[i],
					c->isolate && !c->host ? KV_EXPORT_VMM : c->export_kind, granule,
					&gpu->arena);
		if (r < 0)
			return r;
		gpu->arena->export.sparse = c->isolate;
		d->n_gpus = i + 1;
		snprintf(gpu->export_why, sizeof(gpu->export_why), "%.95s", gpu->arena->why);
		kv_log(KV_LOG_INFO, "device %u: %s, arena of %llu MiB, exported by %s (%s)", i,
		       gpu->info.name, (unsigned long long)(bytes[i] / MIB),
		       kv_export_name(gpu->arena->export.kind), gpu->arena->why);
	}
	size = c->isolate ? granule : extent_size(bytes, n);
	r = kv_journal_new(d, size, kv_extents_map_bytes(n, bytes, size), &map);
	/* A memfd is born zero. Of device memory nobody promises that: its movers zero it first. */
	if (r < 0)
		return r;
	kv_extents_init_in(&d->extents, n, bytes, size, c->host, map);
	return kv_isolate_start(d, true);
}

static void on_connection(uint32_t events, void *arg)
{
	struct kv_daemon *d = arg;

	(void)events;
	for (int i = 0; i < ACCEPTS_A_TURN; i++) {
		int fd = accept4(d->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

		if (fd < 0) {
			if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
				kv_log(KV_LOG_WARN, "no descriptor for another client (%s): accepting "
				       "pauses", strerror(errno));
				kv_watch_events(d->listen_watch, 0);
				kv_timer_set(d->accept_timer, ACCEPT_PAUSE);
			}
			return;
		}
		if (d->n_peers >= d->config.max_clients) {
			struct kv_msg_error msg = { .error = -EAGAIN };

			snprintf(msg.text, sizeof(msg.text),
				 "kvcached has %u clients, the most it accepts (--max-clients)",
				 d->n_peers);
			kv_wire_init(&msg.head, KV_MSG_ERROR, sizeof(msg), 0);
			kv_socket_send(fd, &msg, sizeof(msg), NULL, 0, 1);
			kv_close(fd);
			continue;
		}
		kv_peer_accept(d, fd);
	}
}

static void accept_again(void *arg)
{
	struct kv_daemon *d = arg;

	kv_watch_events(d->listen_watch, KV_LOOP_IN);
}

static void look_again(void *arg)
{
	kv_capacity_serve(arg);
}

static void on_signal(const struct signalfd_siginfo *info, void *arg)
{
	struct kv_daemon *d = arg;

	/* The keeper has said so, if it sent it. If not, it starts another worker. */
	kv_log(KV_LOG_DEBUG, "worker: signal %u", info->ssi_signo);
	d->stopping = true;
	kv_loop_stop(d->loop);
}

/* ipc: clients that are attached go on, nobody can attach any more. Only a restart helps. */
static void owner_ended(uint32_t events, void *arg)
{
	struct kv_gpu_unit *gpu = arg;

	(void)events;
	kv_log(KV_LOG_ERROR, "the process that owns the memory of %s has died: no client can map it "
	       "from now on; restart kvcached", gpu->info.name);
	snprintf(gpu->export_why, sizeof(gpu->export_why), "its owner process has died");
	gpu->owner_watch = kv_watch_free(gpu->owner_watch);
}

static int watch_owners(struct kv_daemon *d)
{
	int r = 0;

	for (uint32_t i = 0; !r && i < d->n_gpus; i++) {
		struct kv_gpu_unit *gpu = &d->gpus[i];

		if (gpu->arena->owner_pidfd >= 0)
			r = kv_loop_watch(d->loop, gpu->arena->owner_pidfd, KV_LOOP_IN, owner_ended, gpu,
					  &gpu->owner_watch);
	}
	return r;
}

static int start_loop(struct kv_daemon *d)
{
	sigset_t set;
	int r = kv_loop_new((enum kv_loop_kind)d->config.loop_kind, &d->loop);

	if (r < 0)
		return r;
	kv_log(KV_LOG_INFO, "event loop: %s (%s)", kv_loop_name(d->loop), kv_loop_why(d->loop));
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	r = kv_loop_signals(d->loop, &set, on_signal, d, &d->signals);
	if (!r)
		r = kv_timer_new(d->loop, accept_again, d, &d->accept_timer);
	if (!r)
		r = kv_timer_new(d->loop, look_again, d, &d->waiter_timer);
	if (!r)
		r = kv_timer_new(d->loop, kv_peers_hear, d, &d->user_timer);
	if (!r)
		r = kv_history_new(d, &d->history);
	if (!r)
		r = kv_promises_start(d);
	if (!r)
		r = kv_fair_start(d);
	return r;
}

static void raise_fd_limit(void)
{
	struct rlimit limit;

	if (!getrlimit(RLIMIT_NOFILE, &limit)) {
		limit.rlim_cur = limit.rlim_max;
		setrlimit(RLIMIT_NOFILE, &limit);
	}
}

/* Without its keeper nothing would restart this process, or hold its memory: it ends in good order. */
static void keeper_ended(uint32_t events, void *arg)
{
	struct kv_daemon *d = arg;
	int64_t r;
	char byte;

	(void)events;
	r = kv_socket_receive(d->keeping.fd, &byte, sizeof(byte), NULL, 0, NULL, 1);
	/* An answer that came too late for who waited for it is none. */
	if (r == -EAGAIN || r == -EMSGSIZE)
		return;
	kv_log(KV_LOG_ERROR, "the keeper has died: stopping, the memory goes back as clients end");
	d->keeper_watch = kv_watch_free(d->keeper_watch);
	d->stopping = true;
	kv_loop_stop(d->loop);
}

static void is_alive(void *arg)
{
	struct kv_daemon *d = arg;

	kv_keeping_alive(&d->keeping);
	kv_timer_set(d->alive_timer, kv_service_watchdog(getppid()) / 8);
}

/* A mistake in it is refused at the start. A worker that takes over lets nobody in by it. */
static int read_access(struct kv_daemon *d, bool is_first)
{
	int r = kv_access_new(d->config.access, &d->access);

	if (r >= 0 || is_first)
		return r;
	kv_log(KV_LOG_ERROR, "%s; until that is repaired only root and user %u may open pools",
	       kv_error_text(), geteuid());
	return kv_access_new_empty(d->config.access, &d->access);
}

int kv_daemon_start(struct kv_daemon *d, const struct kv_config *config)
{
	bool is_first;
	int r;

	memset(d, 0, sizeof(*d));
	d->config = *config;
	d->listen_fd = -1;
	kv_link_init(&d->peers);
	kv_link_init(&d->pools);
	kv_link_init(&d->users);
	kv_link_init(&d->speaking);
	kv_link_init(&d->queue);
	d->next_peer_id = d->next_session_id = d->next_pool_id = 1;
	d->started_ns = kv_now();
	if (getrandom(&d->boot_nonce, sizeof(d->boot_nonce), 0) != sizeof(d->boot_nonce))
		return kv_error(-EIO, "getrandom: %s", strerror(errno));
	raise_fd_limit();
	signal(SIGPIPE, SIG_IGN);
	prctl(PR_SET_NAME, "kvcached-worker");

	/* From here on signals wait until the loop runs: one that came now would leave files behind. */
	r = start_loop(d);
	if (!r)
		r = kv_keeping_begin(&d->keeping, config->keeper_fd, &d->listen_fd);
	if (!r)
		r = kv_loop_watch(d->loop, d->keeping.fd, KV_LOOP_IN, keeper_ended, d,
				  &d->keeper_watch);
	is_first = kv_link_is_alone(&d->keeping.found);
	if (!r && d->config.access)
		r = read_access(d, is_first);
	if (!r && !is_first)
		r = kv_rebuild(d);
	if (!r && is_first)
		r = kv_wishes_read(d->config.wishes);
	if (!r && is_first)
		r = make_arenas(d);
	if (!r)
		r = watch_owners(d);
	for (uint32_t i = 0; !r && i < d->n_gpus; i++)
		r = kv_mover_start(d, i);
	if (!r && is_first)
		r = kv_wishes_grant(d);
	kv_mover_scrub(d);
	if (!r)
		r = kv_loop_watch(d->loop, d->listen_fd, KV_LOOP_IN, on_connection, d,
				  &d->listen_watch);
	if (!r && d->config.events)
		r = kv_events_start(d, d->config.events, &d->events);
	if (!r && d->config.metrics)
		r = kv_metrics_start(d, d->config.metrics, &d->metrics);
	if (!r && kv_service_watchdog(getppid()))
		r = kv_timer_new(d->loop, is_alive, d, &d->alive_timer);
	if (!r)
		r = kv_keeping_ready(&d->keeping);
	if (!r && d->alive_timer)
		is_alive(d);
	if (!r)
		kv_log(KV_LOG_INFO, "listening on %s", d->config.socket);
	return r;
}

/*
 * Only this process's part of things: what outlives it stays as it is, for the next worker. If the
 * keeper ends as well, so does all of it.
 */
void kv_daemon_stop(struct kv_daemon *d)
{
	d->metrics = kv_metrics_stop(d->metrics);
	d->alive_timer = kv_timer_free(d->alive_timer);
	d->listen_watch = kv_watch_free(d->listen_watch);
	d->listen_fd = kv_close(d->listen_fd);
	kv_restart_free(d);
	while (!kv_link_is_alone(&d->peers)) {
		struct kv_peer *peer = kv_container_of(d->peers.next, struct kv_peer, link);

		if (peer->session)
			kv_session_unload(peer->session);
		kv_peer_free(peer);
	}
	kv_compact_stop(d);
	for (uint32_t i = 0; i < d->n_gpus; i++) {
		kv_mover_stop(&d->gpus[i]);
		kv_watch_free(d->gpus[i].owner_watch);
	}
	kv_compact_end(d);
	kv_isolate_end(d);
	while (!kv_link_is_alone(&d->pools))
		kv_pool_unload(kv_container_of(d->pools.next, struct kv_pool, link));
	kv_watch_free(d->keeper_watch);
	kv_keeping_end(&d->keeping);
	d->events = kv_events_stop(d->events);
	kv_timer_free(d->accept_timer);
	kv_timer_free(d->check_timer);
	kv_timer_free(d->waiter_timer);
	kv_timer_free(d->user_timer);
	kv_timer_free(d->promise_timer);
	d->history = kv_history_free(d->history);
	kv_fair_end(d);
	kv_signals_free(d->signals);
	kv_loop_free(d->loop);
	d->access = kv_access_free(d->access);
	kv_extents_deinit(&d->extents);
	for (uint32_t i = 0; i < d->n_gpus; i++)
		d->gpus[i].ops->arena_free(d->gpus[i].arena);
	if (d->journal)
		munmap(d->journal, d->journal->bytes);
}
