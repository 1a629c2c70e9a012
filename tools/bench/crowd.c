/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench crowd: N client processes on one pool. They take and give blocks from their magazines, as fast as
 * they can, all at the same time; then each asks the daemon for more than it has at hand, every few
 * ms: that is the longest way, which an engine goes when it starts; then they work as engines that decode do,
 * a few blocks a step, and those of a sequence back when it ends: what they need has been asked for
 * ahead, and no take should wait; then all are idle, and the daemon's worker should be, too.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "include/internal/cleanup.h"
#include "tools/bench/replay.h"

#define MOST	    KV_REPLAY_MAX_ENGINES
#define POOL_BLOCKS 65536u
#define HOST_BYTES  ((uint64_t)64 << 20)
#define BATCH	    16u
#define BURST	    4096u /* blocks between two looks at the clock */
#define TAKING	    KV_SEC
#define REFILLS	    200u /* of each process */
#define MOST_REFILL 288u /* blocks: more than a magazine ever has */
#define PAUSE_MS    5
#define STEPS	    600u /* of decoding, a ms each */
#define STEP_BLOCKS 4u	 /* what 64 sequences with blocks of 16 tokens need */
#define HELD	    160u /* blocks of a sequence, given back at its end */
#define IDLE	    (2 * KV_SEC)

enum phase { ATTACHING, TAKE, REFILL_ALL, DECODE, IDLE_ALL, END };

struct member {
	uint64_t blocks;
	int64_t start, end; /* of taking and giving */
	uint32_t refill_ns[REFILLS];
	uint32_t step_ns[STEPS];
} __attribute__((aligned(64)));

struct shared {
	uint32_t phase;
	uint32_t n_done[END]; /* members that are through with a phase */
	struct member members[MOST];
};

struct crowd {
	struct kv_bench *bench;
	struct kv_bench_pool what;
	struct shared *shared;
	uint32_t n, n_refill;
	pid_t pids[MOST];
};

static void done(struct crowd *c, enum phase phase)
{
	__atomic_fetch_add(&c->shared->n_done[phase], 1, __ATOMIC_RELEASE);
}

static void await_phase(struct crowd *c, enum phase phase)
{
	while (__atomic_load_n(&c->shared->phase, __ATOMIC_ACQUIRE) < phase)
		poll(NULL, 0, 1);
}

static int take_and_give(struct member *me, struct kv_pool *pool)
{
	int64_t now = kv_bench_now();
	int r = 0;

	me->start = now;
	while (!r && now - me->start < TAKING) {
		for (uint32_t i = 0; i < BURST && !r; i += BATCH) {
			kv_block_id ids[BATCH];

			r = kv_blocks_take(pool, BATCH, ids, 0);
			if (!r)
				r = kv_blocks_give(pool, BATCH, ids);
		}
		me->blocks += BURST;
		now = kv_bench_now();
	}
	me->end = now;
	return r;
}

static int refill(struct member *me, struct kv_pool *pool, uint32_t n)
{
	kv_block_id ids[MOST_REFILL];
	int r = 0;

	for (uint32_t i = 0; i < REFILLS && !r; i++) {
		int64_t start = kv_bench_now();

		r = kv_blocks_take(pool, n, ids, KV_BENCH_TIMEOUT);
		me->refill_ns[i] = (uint32_t)(kv_bench_now() - start);
		if (!r)
			r = kv_blocks_give(pool, n, ids);
		poll(NULL, 0, PAUSE_MS);
	}
	return r;
}

static int decode(struct member *me, struct kv_pool *pool)
{
	kv_block_id ids[HELD];
	uint32_t held = 0;
	int r = 0;

	for (uint32_t i = 0; i < STEPS && !r; i++) {
		int64_t start = kv_bench_now();

		r = kv_blocks_take(pool, STEP_BLOCKS, ids + held, KV_BENCH_TIMEOUT);
		me->step_ns[i] = (uint32_t)(kv_bench_now() - start);
		held += STEP_BLOCKS;
		if (!r && (held == HELD || i + 1 == STEPS)) {
			r = kv_blocks_give(pool, held, ids);
			held = 0;
		}
		poll(NULL, 0, 1);
	}
	return r;
}

static int member(struct crowd *c, uint32_t number)
{
	struct member *me = &c->shared->members[number];
	kv_block_id ids[BATCH];
	struct kv_client *client;
	struct kv_pool *pool;
	int status = kv_bench_connect(c->bench, &client), r;

	if (!status)
		status = kv_bench_open(c->bench, client, &c->what, &pool);
	if (status)
		return status;
	r = kv_blocks_take(pool, BATCH, ids, KV_BENCH_TIMEOUT);
	if (!r)
		r = kv_blocks_give(pool, BATCH, ids);
	done(c, ATTACHING);
	await_phase(c, TAKE);
	if (!r)
		r = take_and_give(me, pool);
	done(c, TAKE);
	await_phase(c, REFILL_ALL);
	if (!r)
		r = refill(me, pool, c->n_refill);
	done(c, REFILL_ALL);
	await_phase(c, DECODE);
	if (!r)
		r = decode(me, pool);
	done(c, DECODE);
	await_phase(c, END);
	if (r)
		status = kv_bench_broken(c->bench, "take and give", r);
	kv_pool_close(pool);
	kv_disconnect(client);
	return status;
}

static int await_done(struct crowd *c, enum phase phase)
{
	int64_t deadline = kv_bench_now() + 2 * KV_BENCH_TIMEOUT;

	while (__atomic_load_n(&c->shared->n_done[phase], __ATOMIC_ACQUIRE) < c->n) {
		if (kv_bench_now() > deadline)
			return kv_bench_refuse(c->bench, KV_BENCH_FAILED,
					       "%u of %u clients are not done in time",
					       c->n - c->shared->n_done[phase], c->n);
		kv_bench_progress(c->bench, phase, END, "phases");
		poll(NULL, 0, 1);
	}
	return KV_BENCH_DONE;
}

static void go(struct crowd *c, enum phase phase)
{
	__atomic_store_n(&c->shared->phase, phase, __ATOMIC_RELEASE);
}

/* Time that a process has run, in ns; < 0: it can't be known. */
static int64_t run_time(uint64_t pid)
{
	char path[64];
	uint64_t ns;
	FILE *f;
	int n;

	snprintf(path, sizeof(path), "/proc/%" PRIu64 "/schedstat", pid);
	f = fopen(path, "re");
	if (!f)
		return -1;
	n = fscanf(f, "%" SCNu64, &ns);
	fclose(f);
	return n == 1 ? (int64_t)ns : -1;
}

/* Share of a CPU that the worker takes while nobody does anything; < 0: it can't be known. */
static double idle_share(uint64_t worker)
{
	int64_t before = run_time(worker), start = kv_bench_now(), after;

	poll(NULL, 0, (int)(IDLE / KV_MSEC));
	after = run_time(worker);
	return before < 0 || after < 0 ? -1
				       : (double)(after - before) / (double)(kv_bench_now() - start);
}

static int by_size(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

static void show(struct crowd *c, double idle)
{
	struct kv_emit *e = &c->bench->emit;
	uint32_t *all = calloc((size_t)c->n * REFILLS, sizeof(*all));
	uint32_t *steps = calloc((size_t)c->n * STEPS, sizeof(*steps));
	size_t n = (size_t)c->n * REFILLS, n_steps = (size_t)c->n * STEPS;
	int64_t start = INT64_MAX, end = 0;
	double blocks = 0, ns = 0;

	if (!all || !steps) {
		free(all);
		free(steps);
		return;
	}
	for (uint32_t i = 0; i < c->n; i++) {
		const struct member *m = &c->shared->members[i];

		blocks += (double)m->blocks;
		ns += (double)(m->end - m->start) / (double)m->blocks / c->n;
		start = m->start < start ? m->start : start;
		end = m->end > end ? m->end : end;
		memcpy(all + (size_t)i * REFILLS, m->refill_ns, sizeof(m->refill_ns));
		memcpy(steps + (size_t)i * STEPS, m->step_ns, sizeof(m->step_ns));
	}
	blocks = blocks * 1e9 / (double)(end - start);
	qsort(all, n, sizeof(*all), by_size);
	qsort(steps, n_steps, sizeof(*steps), by_size);
	kv_emit_open(e, NULL, '{');
	kv_emit_number(e, "clients", c->n);
	kv_emit_real(e, "blocks_per_second", blocks);
	kv_emit_real(e, "take_give_16_ns", ns);
	kv_emit_real(e, "refill_p50_us", all[n / 2] / 1e3);
	kv_emit_real(e, "refill_p99_us", all[n * 99 / 100] / 1e3);
	kv_emit_real(e, "refill_max_us", all[n - 1] / 1e3);
	kv_emit_real(e, "step_p50_us", steps[n_steps / 2] / 1e3);
	kv_emit_real(e, "step_p99_us", steps[n_steps * 99 / 100] / 1e3);
	kv_emit_real(e, "step_p999_us", steps[n_steps * 999 / 1000] / 1e3);
	kv_emit_real(e, "step_max_us", steps[n_steps - 1] / 1e3);
	kv_emit_real(e, "worker_idle_cpu", idle);
	kv_emit_close(e);
	kv_emit_line(e, "%u clients take and give %.1f million blocks a second, %.2f ns each", c->n,
		     blocks / 1e6, ns);
	kv_emit_line(e, "a refill of %u blocks: median %.1f us, p99 %.1f us, longest %.1f us",
		     c->n_refill,
		     all[n / 2] / 1e3, all[n * 99 / 100] / 1e3, all[n - 1] / 1e3);
	kv_emit_line(e, "a step of decoding takes %u blocks: median %.2f us, p99 %.1f us, p99.9 %.1f us, longest %.1f us",
		     STEP_BLOCKS, steps[n_steps / 2] / 1e3, steps[n_steps * 99 / 100] / 1e3,
		     steps[n_steps * 999 / 1000] / 1e3, steps[n_steps - 1] / 1e3);
	if (idle >= 0)
		kv_emit_line(e, "while nobody does anything the worker takes %.4f %% of a CPU",
			     100 * idle);
	free(all);
	free(steps);
}

static int conduct(struct crowd *c)
{
	kv_cleanup(kv_freep) struct kv_daemon_stats *s = NULL;
	struct kv_client *client;
	double idle = -1;
	size_t n;
	int status = await_done(c, ATTACHING), r;

	go(c, TAKE);
	if (!status)
		status = await_done(c, TAKE);
	go(c, REFILL_ALL);
	if (!status)
		status = await_done(c, REFILL_ALL);
	go(c, DECODE);
	if (!status)
		status = await_done(c, DECODE);
	go(c, IDLE_ALL);
	kv_bench_progress(c->bench, IDLE_ALL, END, "phases");
	if (!status)
		status = kv_bench_connect(c->bench, &client);
	if (status)
		return status;
	r = kv_stats(client, KV_STAT_DAEMON, (void **)&s, &n, KV_BENCH_TIMEOUT);
	if (r)
		status = kv_bench_broken(c->bench, "asking the daemon", r);
	else
		idle = idle_share(s->worker_pid);
	kv_disconnect(client);
	kv_bench_progress(c->bench, END, END, "phases");
	if (!status)
		show(c, idle);
	return status;
}

static int run(struct crowd *c)
{
	pid_t parent = getpid();
	struct kv_client *client;
	int status = KV_BENCH_DONE, how;

	fflush(NULL);
	for (uint32_t i = 0; i < c->n && !status; i++) {
		c->pids[i] = fork();
		if (c->pids[i] < 0)
			status = kv_bench_refuse(c->bench, KV_BENCH_FAILED, "fork: %s",
						 strerror(errno));
		if (!c->pids[i]) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			_exit(getppid() == parent ? member(c, i) : KV_BENCH_FAILED);
		}
	}
	if (!status)
		status = conduct(c);
	go(c, END);
	for (uint32_t i = 0; i < c->n; i++) {
		if (c->pids[i] > 0 && status)
			kill(c->pids[i], SIGKILL);
		if (c->pids[i] > 0 && waitpid(c->pids[i], &how, 0) == c->pids[i] && how && !status)
			status = KV_BENCH_FAILED;
	}
	if (!kv_bench_connect(c->bench, &client)) {
		kv_pool_drop(client, c->what.name, KV_BENCH_TIMEOUT);
		kv_disconnect(client);
	}
	return status;
}

int kv_bench_crowd(struct kv_bench *b)
{
	char name[KV_NAME_MAX];
	struct crowd c = {.bench = b,
			  .what = {.name = name, .block_tokens = 16, .n_blocks = POOL_BLOCKS},
			  .n = b->engines};
	void *shared = mmap(NULL, sizeof(*c.shared), PROT_READ | PROT_WRITE,
			    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	int status;

	if (shared == MAP_FAILED)
		return kv_bench_broken(b, "crowd", -ENOMEM);
	c.shared = shared;
	/* All magazines have a sixteenth of the pool, none more than 256 blocks. */
	c.n_refill = POOL_BLOCKS / (16 * c.n);
	c.n_refill = (c.n_refill < 256 ? c.n_refill : 256) + 32;
	kv_bench_pool_name(name, "crowd");
	status = kv_bench_serve(b, HOST_BYTES);
	if (!status)
		status = run(&c);
	munmap(shared, sizeof(*c.shared));
	return status;
}
