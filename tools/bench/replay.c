/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench replay: N engines replay a trace of requests against one pool, in the trace's order, as
 * fast as they can; this process starts them, waits, and asks the daemon how it went.
 *
 * A trace counts a prompt's last, partial block as a block that is asked for and can be found. Here
 * only whole blocks are cached, and one token is always left to compute. So that shares can be
 * compared, a prompt is padded: each of its hash ids becomes a whole block, and one token follows.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "include/internal/cleanup.h"
#include "tools/bench/replay.h"
#include "tools/progress.h"

#define MIB	       ((uint64_t)1 << 20)
#define BLOCK_BYTES    (KV_TRACE_BLOCK * 1u) /* of the private daemon: a byte a token */
#define ATTACH_TIMEOUT (60 * KV_SEC)
#define STUCK_TIMEOUT  (180 * KV_SEC) /* no engine has begun or ended a request for so long */
#define LOOK_AGAIN_MS  5

struct engines {
	uint32_t n;
	pid_t pids[KV_REPLAY_MAX_ENGINES]; /* 0: it has ended */
	int status;			   /* the first that isn't 0 */
	int ready[2], go[2];		   /* pipes */
};

struct summary {
	struct kv_replay_result sum;
	struct kv_check_result check;
	uint64_t evicted;
	double seconds;
};

static int spawn(struct kv_replay *replay, struct engines *e)
{
	pid_t parent = getpid();

	if (pipe2(e->ready, O_CLOEXEC) < 0 || pipe2(e->go, O_CLOEXEC) < 0)
		return kv_bench_refuse(replay->bench, KV_BENCH_FAILED, "pipe: %s", strerror(errno));
	fflush(NULL);
	for (; e->n < replay->bench->engines; e->n++) {
		pid_t pid = fork();

		if (pid < 0)
			return kv_bench_refuse(replay->bench, KV_BENCH_FAILED, "fork: %s",
					       strerror(errno));
		if (!pid) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			kv_close(e->ready[0]);
			kv_close(e->go[1]);
			_exit(getppid() == parent
				      ? kv_replay_engine(replay, e->n, e->ready[1], e->go[0])
				      : KV_BENCH_FAILED);
		}
		e->pids[e->n] = pid;
	}
	e->ready[1] = kv_close(e->ready[1]);
	e->go[0] = kv_close(e->go[0]);
	return KV_BENCH_DONE;
}

/* Return: whether an engine still runs. */
static bool reap(struct engines *e)
{
	bool running = false;
	int status;

	for (uint32_t i = 0; i < e->n; i++) {
		if (!e->pids[i])
			continue;
		if (waitpid(e->pids[i], &status, WNOHANG) != e->pids[i]) {
			running = true;
			continue;
		}
		e->pids[i] = 0;
		if (!e->status)
			e->status = WIFEXITED(status) ? WEXITSTATUS(status) : KV_BENCH_FAILED;
	}
	return running;
}

static void kill_all(struct engines *e)
{
	for (uint32_t i = 0; i < e->n; i++) {
		if (e->pids[i]) {
			kill(e->pids[i], SIGKILL);
			waitpid(e->pids[i], NULL, 0);
			e->pids[i] = 0;
		}
	}
}

static int await_ready(struct kv_replay *replay, struct engines *e)
{
	int64_t deadline = kv_bench_now() + ATTACH_TIMEOUT;
	struct pollfd ready = {.fd = e->ready[0], .events = POLLIN};
	uint32_t n = 0;
	char byte;

	while (n < e->n && kv_bench_now() < deadline) {
		if (poll(&ready, 1, LOOK_AGAIN_MS) == 1 && read(e->ready[0], &byte, 1) == 1)
			n++;
		reap(e);
		if (e->status)
			return e->status; /* it has said why */
	}
	return n == e->n ? KV_BENCH_DONE
			 : kv_bench_refuse(replay->bench, KV_BENCH_FAILED,
					   "%u of %u engines could attach in time", n, e->n);
}

static int await_end(struct kv_replay *replay, struct engines *e)
{
	uint64_t seen = 0;
	int64_t moved = kv_bench_now();
	struct kv_progress progress;
	int status = KV_BENCH_DONE;

	kv_progress_init(&progress, replay->bench->emit.json);

	while (!status && reap(e)) {
		uint64_t next = __atomic_load_n(&replay->shared->next, __ATOMIC_RELAXED);

		if (next != seen) {
			seen = next;
			moved = kv_bench_now();
		}
		if (kv_bench_now() - moved > STUCK_TIMEOUT)
			status = kv_bench_refuse(replay->bench, KV_BENCH_FAILED,
						 "the engines are stuck at request %" PRIu64, seen);
		kv_progress_show(&progress, seen, replay->trace.n_requests, "requests");
		poll(NULL, 0, LOOK_AGAIN_MS);
	}
	kv_progress_end(&progress);
	return status ? status : e->status;
}

static int run_engines(struct kv_replay *replay, double *ret_seconds)
{
	struct engines e = {.ready = {-1, -1}, .go = {-1, -1}};
	int64_t start = 0, end = 0;
	int status = spawn(replay, &e);

	if (!status)
		status = await_ready(replay, &e);
	if (!status) {
		start = kv_bench_now();
		e.go[1] = kv_close(e.go[1]);
		status = await_end(replay, &e);
	}
	kill_all(&e);
	for (int i = 0; i < 2; i++) {
		kv_close(e.ready[i]);
		kv_close(e.go[i]);
	}
	for (uint32_t i = 0; i < e.n; i++)
		if (replay->shared->results[i].ended_ns > end)
			end = replay->shared->results[i].ended_ns;
	*ret_seconds = (double)(end - start) / KV_SEC;
	return status;
}

/* What the daemon says; the pool is removed. */
static int ask_daemon(struct kv_replay *replay, struct summary *s)
{
	kv_cleanup(kv_freep) struct kv_pool_stats *pools = NULL;
	struct kv_client *client;
	size_t n = 0;
	int status = kv_bench_connect(replay->bench, &client);
	int r;

	if (status)
		return status;
	r = kv_check(client, &s->check, KV_BENCH_TIMEOUT);
	if (!r)
		r = kv_stats(client, KV_STAT_POOL, (void **)&pools, &n, KV_BENCH_TIMEOUT);
	for (size_t i = 0; !r && i < n; i++) {
		if (!strcmp(pools[i].name, replay->what.name))
			s->evicted = pools[i].evictions_total;
	}
	if (!r)
		r = kv_pool_drop(client, replay->what.name, KV_BENCH_TIMEOUT);
	if (r < 0)
		status = kv_bench_broken(replay->bench, "asking the daemon", r);
	kv_disconnect(client);
	return status;
}

static void show(const struct kv_replay *replay, const struct summary *s)
{
	struct kv_emit *e = &replay->bench->emit;
	uint64_t n = replay->trace.n_requests, asked = replay->trace.n_ids;

	kv_emit_open(e, NULL, '{');
	kv_emit_number(e, "requests", n);
	kv_emit_number(e, "served", s->sum.n_served);
	kv_emit_number(e, "too_large", s->sum.n_too_large);
	kv_emit_number(e, "waits", s->sum.n_waits);
	kv_emit_number(e, "blocks_asked", asked);
	kv_emit_number(e, "blocks_hit", s->sum.blocks_hit);
	kv_emit_real(e, "hit_share", asked ? (double)s->sum.blocks_hit / (double)asked : 0);
	kv_emit_number(e, "evicted", s->evicted);
	kv_emit_real(e, "seconds", s->seconds);
	kv_emit_real(e, "requests_per_second", (double)n / s->seconds);
	kv_emit_number(e, "engines", replay->bench->engines);
	kv_emit_number(e, "capacity", replay->bench->capacity);
	kv_emit_number(e, "check_errors", s->check.n_errors);
	kv_emit_text(e, "first_error", s->check.first_error);
	kv_emit_close(e);

	kv_emit_line(
		e,
		"%" PRIu64 " requests by %u engines in %.2f s, %.0f a second; %" PRIu64 " served",
		n, replay->bench->engines, s->seconds, (double)n / s->seconds, s->sum.n_served);
	if (s->sum.n_too_large)
		kv_emit_line(e, "%" PRIu64 " are larger than the whole pool", s->sum.n_too_large);
	kv_emit_line(e,
		     "%u blocks of %u tokens; for lack of room a request began anew %" PRIu64
		     " times",
		     replay->bench->capacity, KV_TRACE_BLOCK, s->sum.n_waits);
	kv_emit_line(e, "blocks asked %" PRIu64 ", hit %" PRIu64 " (share %.4f), evicted %" PRIu64,
		     asked, s->sum.blocks_hit,
		     asked ? (double)s->sum.blocks_hit / (double)asked : 0, s->evicted);
	kv_emit_line(
		e, "(the partial block at a prompt's end is made whole, so that it can be found)");
	if (s->check.n_errors)
		kv_emit_line(e, "the books don't balance, %" PRIu64 " errors: %s",
			     s->check.n_errors, s->check.first_error);
	else
		kv_emit_line(e, "the books balance");
}

static int run(struct kv_replay *replay)
{
	struct kv_bench *b = replay->bench;
	struct summary s = {0};
	int status = run_engines(replay, &s.seconds);

	if (!status)
		status = ask_daemon(replay, &s);
	if (status)
		return status;
	for (uint32_t i = 0; i < b->engines; i++) {
		const struct kv_replay_result *result = &replay->shared->results[i];

		s.sum.blocks_hit += result->blocks_hit;
		s.sum.n_served += result->n_served;
		s.sum.n_too_large += result->n_too_large;
		s.sum.n_not_served += result->n_not_served;
		s.sum.n_waits += result->n_waits;
	}
	show(replay, &s);
	if (s.sum.n_not_served)
		return kv_bench_refuse(b, KV_BENCH_FAILED, "%" PRIu64 " requests found no room",
				       s.sum.n_not_served);
	return s.check.n_errors ? KV_BENCH_FAILED : KV_BENCH_DONE;
}

/* One run, on a daemon and a pool of its own. */
static int run_once(struct kv_replay *replay)
{
	struct kv_bench *b = replay->bench;
	char name[KV_NAME_MAX];
	int status;

	kv_bench_pool_name(name, "replay");
	replay->what = (struct kv_bench_pool){
		.name = name, .block_tokens = KV_TRACE_BLOCK, .n_blocks = b->capacity};
	memset(replay->shared, 0, sizeof(*replay->shared));
	status = kv_bench_serve(b, ((uint64_t)b->capacity + 1) * BLOCK_BYTES + 16 * MIB);
	return status ? status : run(replay);
}

/* Capacities one after the other; a daemon that was started for one is too small for the next. */
static int run_each(struct kv_replay *replay)
{
	struct kv_bench *b = replay->bench;
	const char *socket = b->socket;
	int status = KV_BENCH_DONE;

	if (!b->capacities)
		return run_once(replay);
	kv_emit_open(&b->emit, NULL, '[');
	for (const char *at = b->capacities; !status && at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
		b->capacity = (uint32_t)strtoul(at, NULL, 10);
		status = run_once(replay);
		if (!socket)
			kv_bench_end(b);
		kv_emit_gap(&b->emit);
		fflush(b->emit.out);
	}
	kv_emit_close(&b->emit);
	return status;
}

int kv_bench_replay(struct kv_bench *b)
{
	struct kv_replay replay = {.bench = b};
	char text[512];
	void *shared;
	int status;

	if (kv_trace_read(b->file, &replay.trace, text, sizeof(text)) < 0)
		return kv_bench_refuse(b, KV_BENCH_FAILED, "%s", text);
	shared = mmap(NULL, sizeof(*replay.shared), PROT_READ | PROT_WRITE,
		      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED) {
		status = kv_bench_refuse(b, KV_BENCH_FAILED, "replay: %s", strerror(errno));
	} else {
		replay.shared = shared;
		status = run_each(&replay);
		munmap(shared, sizeof(*replay.shared));
	}
	kv_trace_deinit(&replay.trace);
	return status;
}
