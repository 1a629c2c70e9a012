/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "daemon/daemon.h"
#include "daemon/fair.h"
#include "daemon/log.h"
#include "daemon/loop_kind.h"
#include "daemon/mover.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"
#include "kernels/memory.h"
#include "tests/fuzz/inside.h"

static struct kv_daemon daemon_;
static int64_t now_ns = KV_SEC;
static int first_free_fd;
enum inside_who inside_runs;
static int keeper[2];					 /* the worker's end, the keeper's */
static struct kv_link deposits = {&deposits, &deposits}; /* kv_deposit::link */

int __wrap_clock_gettime(clockid_t id, struct timespec *t);

int __wrap_clock_gettime(clockid_t id, struct timespec *t)
{
	(void)id;
	*t = (struct timespec){now_ns / KV_SEC, now_ns % KV_SEC};
	return 0;
}

void inside_abort(const char *function, int line, const char *format, ...)
{
	va_list args;

	fprintf(stderr, "%s:%d: ", function, line);
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fprintf(stderr, "\n");
	abort();
}

static int next_fd(void)
{
	int fd = dup(STDERR_FILENO);

	kv_close(fd);
	return fd;
}

static void nothing(void *arg)
{
	(void)arg;
}

static void look_again(void *arg)
{
	kv_capacity_serve(arg);
}

static void must(int r)
{
	inside_must(r >= 0, "%s (%s)", strerror(-r), kv_error_text());
}

/* What a worker is before it has an arena. */
static struct kv_daemon *begin(void)
{
	struct kv_daemon *d = &daemon_;

	memset(d, 0, sizeof(*d));
	kv_link_init(&d->peers);
	kv_link_init(&d->pools);
	kv_link_init(&d->users);
	kv_link_init(&d->speaking);
	kv_link_init(&d->queue);
	d->listen_fd = -1;
	d->config.max_clients = 1024;
	d->config.host = true;
	d->config.policy = kv_policies[0];
	d->next_peer_id = d->next_session_id = d->next_pool_id = 1;
	d->boot_nonce = 1;
	must(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, keeper));
	d->keeping.fd = keeper[0];
	kv_link_init(&d->keeping.found);
	must(kv_loop_new(KV_LOOP_EPOLL, &d->loop));
	must(kv_timer_new(d->loop, nothing, d, &d->accept_timer));
	must(kv_timer_new(d->loop, look_again, d, &d->waiter_timer));
	must(kv_timer_new(d->loop, kv_peers_hear, d, &d->user_timer));
	must(kv_fair_start(d));
	return d;
}

/* The keeper's part: holds what it is sent. */
static void keep(void)
{
	int fds[KV_KEEPER_MAX_FDS];
	struct kv_keeper_msg msg;
	uint32_t n_fds = 0;

	inside_runs = INSIDE_KEEPER;
	while (kv_socket_receive(keeper[1], &msg, sizeof(msg), fds, KV_KEEPER_MAX_FDS, &n_fds, 1) ==
	       sizeof(msg)) {
		if (msg.type == KV_KEEPER_DEPOSIT)
			must(kv_deposits_put(&deposits, &msg, fds));
		else if (msg.type == KV_KEEPER_DROP)
			kv_deposits_drop(&deposits, msg.kind, msg.id);
	}
	inside_runs = INSIDE_CLIENTS;
}

bool inside_is_keeper(int fd)
{
	return fd == keeper[0];
}

struct kv_daemon *inside_start(bool isolate)
{
	uint64_t bytes = INSIDE_ARENA, size = isolate ? INSIDE_GRANULE : (uint64_t)1 << 20;
	struct kv_daemon *d;
	void *map;

	first_free_fd = next_fd();
	kv_log_set_level(0);
	d = begin();
	d->n_gpus = 1;
	d->gpus[0].ops = &kv_device_host;
	must(d->gpus[0].ops->info(0, &d->gpus[0].info));
	must(d->gpus[0].ops->arena_new(0, bytes, 0, isolate ? size : 0, &d->gpus[0].arena));
	must(kv_journal_new(d, size, kv_extents_map_bytes(1, &bytes, size), &map));
	kv_extents_init_in(&d->extents, 1, &bytes, size, true, map);
	must(kv_isolate_start(d, true));
	keep();
	return d;
}

static uint64_t session_of(uint64_t peer_id)
{
	for (struct kv_link *l = daemon_.peers.next; l != &daemon_.peers; l = l->next) {
		struct kv_peer *peer = kv_container_of(l, struct kv_peer, link);

		if (peer->id == peer_id)
			return peer->session ? peer->session->id : 0;
	}
	return 0;
}

uint64_t inside_peer_of(uint64_t session_id)
{
	for (struct kv_link *l = daemon_.peers.next; l != &daemon_.peers; l = l->next) {
		struct kv_peer *peer = kv_container_of(l, struct kv_peer, link);

		if (session_id && peer->session && peer->session->id == session_id)
			return peer->id;
	}
	return 0;
}

void inside_restart(uint64_t *peers, uint32_t n)
{
	struct kv_daemon *d = &daemon_;
	uint64_t sessions[16];

	inside_must(n <= 16, "%u peers", n);
	for (uint32_t i = 0; i < n; i++)
		sessions[i] = session_of(peers[i]);
	kv_daemon_stop(d);
	keep();
	kv_close(keeper[1]);
	d = begin();
	for (struct kv_link *l = deposits.next; l != &deposits; l = l->next) {
		struct kv_deposit *deposit = kv_container_of(l, struct kv_deposit, link);
		struct kv_keeper_msg msg = {.kind = deposit->kind,
					    .id = deposit->id,
					    .part = deposit->part,
					    .n_fds = deposit->n_fds};
		int fds[KV_KEEPER_MAX_FDS];

		for (uint32_t i = 0; i < msg.n_fds; i++)
			fds[i] = fcntl(deposit->fds[i], F_DUPFD_CLOEXEC, 0);
		must(kv_deposits_put(&d->keeping.found, &msg, fds));
	}
	inside_runs = INSIDE_DAEMON;
	must(kv_rebuild(d));
	inside_runs = INSIDE_CLIENTS;
	inside_step();
	for (uint32_t i = 0; i < n; i++)
		peers[i] = inside_peer_of(sessions[i]);
}

void inside_stop(void)
{
	struct kv_daemon *d = &daemon_;
	int fd;

	while (!kv_link_is_alone(&d->peers))
		kv_peer_free(kv_container_of(d->peers.next, struct kv_peer, link));
	kv_compact_stop(d);
	kv_compact_end(d);
	while (!kv_link_is_alone(&d->pools))
		kv_pool_free(kv_container_of(d->pools.next, struct kv_pool, link));
	inside_must(!d->n_peers && !d->n_pools && !d->n_sessions, "%u peers, %u pools, %u sessions",
		    d->n_peers, d->n_pools, d->n_sessions);
	inside_must(kv_link_is_alone(&d->users), "a user without peers and pools");
	keep();
	inside_must(!kv_deposits_find(&deposits, NULL, KV_DEPOSIT_POOL) &&
			    !kv_deposits_find(&deposits, NULL, KV_DEPOSIT_SESSION),
		    "the keeper still holds something of a pool or a session");
	kv_daemon_stop(d);
	d->loop = NULL;
	kv_close(keeper[1]);
	while (!kv_link_is_alone(&deposits))
		kv_deposit_free(kv_container_of(deposits.next, struct kv_deposit, link));
	fd = next_fd();
	inside_must(fd == first_free_fd, "descriptor %d was free, now it is %d", first_free_fd, fd);
}

int inside_connect(uint64_t *ret_peer)
{
	uint64_t id = daemon_.next_peer_id;
	int pair[2];

	must(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair));
	inside_runs = INSIDE_DAEMON;
	*ret_peer = kv_peer_accept(&daemon_, pair[1]) < 0 ? 0 : id;
	inside_runs = INSIDE_CLIENTS;
	return pair[0];
}

void inside_ended(uint64_t id)
{
	for (struct kv_link *l = daemon_.peers.next; l != &daemon_.peers; l = l->next) {
		struct kv_peer *peer = kv_container_of(l, struct kv_peer, link);

		if (id == INSIDE_ALL || peer->id == id)
			kv_watch_ready(peer->pid_watch, KV_LOOP_IN);
	}
	inside_step();
}

uint64_t *inside_next_pool(void)
{
	return &daemon_.next_pool_id;
}

void inside_step(void)
{
	/* While time stands still one turn serves all there is; nobody writes while this runs. */
	inside_runs = INSIDE_DAEMON;
	for (int i = 0; i < 4; i++)
		must(kv_loop_step(daemon_.loop, 0));
	inside_runs = INSIDE_CLIENTS;
	keep();
}

void inside_advance(int64_t ns)
{
	now_ns += ns;
	inside_step();
}

/* The arena as a mover has it, in one piece; there's nothing where a granule has no memory. */
static char *map_arena(void)
{
	const struct kv_arena *arena = daemon_.gpus[0].arena;
	uint64_t bytes = arena->export.granule_bytes;
	char *at = mmap(NULL, INSIDE_ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	inside_must(at != MAP_FAILED, "addresses of the arena: %m");
	for (uint32_t i = 0; i < arena->export.n_fds; i++)
		inside_must(arena->fds[i] < 0 ||
			    mmap(at + i * bytes, bytes, PROT_READ | PROT_WRITE,
				 MAP_SHARED | MAP_FIXED, arena->fds[i], 0) != MAP_FAILED,
			    "mmap of granule %u: %m", i);
	return at;
}

/* A batch of compaction, as a mover does it. */
static void copy_blocks(const struct kv_mover_copy *copy)
{
	uint64_t bytes = copy->job.bytes;
	char *at = map_arena();

	for (uint32_t i = 0; i < copy->job.n_pairs; i++)
		memcpy(at + (uint64_t)copy->pairs[i][1] * bytes,
		       at + (uint64_t)copy->pairs[i][0] * bytes, bytes);
	munmap(at, INSIDE_ARENA);
}

static void renew(uint32_t granule, bool poor)
{
	int fd = -1;

	if (poor) {
		kv_isolate_withheld(&daemon_, 0, granule);
		return;
	}
	must(kv_memory_host_new(INSIDE_GRANULE, &fd));
	must(kv_isolate_renewed(&daemon_, 0, granule, fd));
	kv_extents_cleaned(&daemon_.extents, 0, granule, 1);
}

static void clean_granules(bool poor)
{
	bool is_new;
	uint32_t i;

	while (kv_isolate_next(&daemon_, 0, &i, &is_new)) {
		if (is_new) {
			renew(i, poor);
		} else {
			char *at = map_arena();

			memset(at + i * INSIDE_GRANULE, 0, INSIDE_GRANULE);
			munmap(at, INSIDE_ARENA);
			kv_extents_cleaned(&daemon_.extents, 0, i, 1);
		}
	}
}

void inside_zero(bool poor)
{
	const struct kv_mover_copy *copy = kv_compact_job(&daemon_, 0);
	uint32_t first, n;

	if (copy) {
		copy_blocks(copy);
		kv_compact_done(&daemon_, 0, true);
	}
	if (daemon_.isolation)
		clean_granules(poor);
	while (!daemon_.isolation && (n = kv_extents_scrub(&daemon_.extents, 0, 1, &first)))
		kv_extents_cleaned(&daemon_.extents, 0, first, n);
	kv_capacity_serve(&daemon_);
	inside_step();
}

/* What the daemon wrote there last, without what clients wrote over it. */
static void write_mirror_anew(struct kv_pool *pool)
{
	const struct kv_books *b = &pool->books;
	uint64_t live[KV_HOLDER_WORDS] = {0};

	for (uint32_t slot = 0; slot < KV_MAX_SESSIONS; slot++) {
		if (pool->slots[slot])
			live[slot / 64] |= (uint64_t)1 << slot % 64;
	}
	for (uint32_t id = 0; id < pool->head->id_limit; id++) {
		const struct kv_book *book = &b->books[id];

		if (book->state != KV_BLOCK_ABSENT)
			b->descriptors[id].word =
				kv_block_word(book->generation, book->owner, book->state);
		for (int i = 0; i < KV_HOLDER_WORDS; i++)
			b->descriptors[id].holders[i] &= live[i];
	}
}

void inside_check(const char *scribbled)
{
	struct kv_daemon *d = &daemon_;
	uint64_t owned = 0;

	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);
		bool live[KV_MAX_SESSIONS];
		char text[128] = "";

		if (scribbled && (scribbled[0] == '*' || !strcmp(pool->name, scribbled)))
			write_mirror_anew(pool);
		for (uint32_t i = 0; i < KV_MAX_SESSIONS; i++)
			live[i] = pool->slots[i];
		inside_must(!kv_books_check(&pool->books, live, text, sizeof(text)),
			    "pool '%s': %s", pool->name, text);
		owned += pool->n_extents;
	}
	inside_must(!kv_extents_check(&d->extents), "the map of extents");
	inside_must(owned == d->extents.n_state[0][KV_EXTENT_OWNED], "pools own %llu extents of %u",
		    (unsigned long long)owned, d->extents.n_state[0][KV_EXTENT_OWNED]);
}

void inside_is_quiet(void)
{
	struct kv_daemon *d = &daemon_;

	/* What is being copied is, and is where it was or at its new place then. */
	for (int i = 0; kv_compact_runs(d) && i < 100; i++)
		inside_zero(false);
	inside_must(!d->n_peers && !d->n_sessions, "%u peers and %u sessions of ended processes",
		    d->n_peers, d->n_sessions);
	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);
		const struct kv_books *b = &pool->books;

		inside_must(b->n_free + b->n_cached == b->n_total && !kv_books_count(b, NULL, NULL),
			    "pool '%s': %u free, %u cached (%u held) of %u", pool->name, b->n_free,
			    b->n_cached, kv_books_count(b, NULL, NULL), b->n_total);
	}
}

/* The library's, while it waits for what the daemon does; sanitizers yield, too, at any time. */
int __wrap_sched_yield(void)
{
	if (daemon_.loop && inside_runs == INSIDE_CLIENTS)
		inside_advance(100 * KV_MSEC);
	return 0;
}
