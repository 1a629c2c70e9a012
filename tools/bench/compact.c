/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench compact: a pool of which every second block, at random, is cached and the others are free.
 * It is moved together as fast as it goes, while client processes look up what is cached and let it
 * go again.
 *
 *	rate	bytes moved a second, from the request until nothing moves any more, by the daemon's
 *		clock: asking it costs it time, so that is done rarely
 *	copy	what plain copying reaches here: on a GPU by the driver, device to device, in pieces of
 *		256 MiB; in host memory by memcpy() of blocks of that size
 */
#include <errno.h>
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
#include "tools/bench/elastic.h"

#define MIB	     ((uint64_t)1 << 20)
#define HOST_POOL    (512 * MIB)
#define DEVICE_POOL  (65536 * MIB) /* or half of the arena */
#define BLOCK_TOKENS 16u
#define N_READERS    2u
#define LOOKUPS_A_STEP 64u
#define QUIET	     (300 * KV_MSEC) /* how long lookups are counted before it begins */
#define COPY_ROUNDS  5
#define ROUNDS	     2
#define LOOK_MS	     5

/* 64 KiB and 1 MiB a block. */
static const struct kv_elastic_model host_model = {"compact", BLOCK_TOKENS, 1, 8, 128};
static const struct kv_elastic_model device_model = {"compact", BLOCK_TOKENS, 16, 8, 128};

struct reader {
	uint64_t lookups, hits; /* that reader writes */
} __attribute__((aligned(64)));

struct shared {
	uint32_t ready, stop;
	struct reader readers[N_READERS];
};

struct compact {
	struct kv_bench *bench;
	const char *name;
	const struct kv_elastic_model *model;
	uint64_t block_bytes;
	uint32_t n; /* blocks */
	bool on_device;
	bool *survives; /* [n] */
	struct shared *shared;
	pid_t pids[N_READERS];
};

struct result {
	double seconds, rate, copy_rate, spare_before, spare_after;
	double lookups_before, lookups_during; /* a second */
	uint64_t moved;
};

static uint64_t next_random(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state >> 16;
}

/* Prompt @k: one block, and a token that is never found. */
static void prompt(uint32_t k, int32_t *tokens)
{
	for (uint32_t i = 0; i <= BLOCK_TOKENS; i++)
		tokens[i] = (int32_t)(k * 31 + i);
	tokens[0] = (int32_t)k;
}

static int read_on(struct compact *c, uint32_t number, struct kv_pool *pool)
{
	struct reader *me = &c->shared->readers[number];
	uint64_t state = number + 1;
	int r = 0;

	__atomic_fetch_add(&c->shared->ready, 1, __ATOMIC_RELEASE);
	while (!r && !__atomic_load_n(&c->shared->stop, __ATOMIC_ACQUIRE)) {
		int32_t tokens[BLOCK_TOKENS + 1];
		uint32_t k = (uint32_t)(next_random(&state) % c->n);
		struct kv_seq *seq;
		size_t hit;

		if (!c->survives[k])
			continue;
		prompt(k, tokens);
		r = kv_seq_new(pool, &seq);
		if (r)
			break;
		r = kv_seq_lookup(seq, tokens, BLOCK_TOKENS + 1, &hit);
		kv_seq_free(seq, NULL);
		/* An engine does this between steps, and not all the time. */
		if (me->lookups % LOOKUPS_A_STEP == 0)
			poll(NULL, 0, 1);
		__atomic_store_n(&me->lookups, me->lookups + 1, __ATOMIC_RELAXED);
		__atomic_store_n(&me->hits, me->hits + (hit > 0), __ATOMIC_RELAXED);
	}
	return r;
}

static int reader(struct compact *c, uint32_t number)
{
	struct kv_client *client;
	struct kv_pool *pool;
	int status = kv_bench_connect(c->bench, &client);

	if (status)
		return status;
	status = kv_elastic_open(c->bench, client, c->model, c->name, 0, &pool);
	if (!status) {
		int r = read_on(c, number, pool);

		if (r)
			status = kv_bench_broken(c->bench, "a lookup", r);
		kv_pool_close(pool);
	}
	kv_disconnect(client);
	return status;
}

static int start_readers(struct compact *c)
{
	int64_t deadline = kv_bench_now() + KV_BENCH_TIMEOUT;
	pid_t parent = getpid();

	fflush(NULL);
	for (uint32_t i = 0; i < N_READERS; i++) {
		c->pids[i] = fork();
		if (c->pids[i] < 0)
			return kv_bench_refuse(c->bench, KV_BENCH_FAILED, "fork: %s",
					       strerror(errno));
		if (!c->pids[i]) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			_exit(getppid() == parent ? reader(c, i) : KV_BENCH_FAILED);
		}
	}
	while (__atomic_load_n(&c->shared->ready, __ATOMIC_ACQUIRE) < N_READERS &&
	       kv_bench_now() < deadline)
		poll(NULL, 0, 1);
	return c->shared->ready == N_READERS ? KV_BENCH_DONE
					     : kv_bench_refuse(c->bench, KV_BENCH_FAILED,
							       "the clients can't attach in time");
}

static int stop_readers(struct compact *c)
{
	int status = KV_BENCH_DONE;

	__atomic_store_n(&c->shared->stop, 1, __ATOMIC_RELEASE);
	for (uint32_t i = 0; i < N_READERS; i++) {
		int how = 0;

		if (c->pids[i] > 0 && waitpid(c->pids[i], &how, 0) == c->pids[i] && how)
			status = KV_BENCH_FAILED;
	}
	return status;
}

static uint64_t n_lookups(const struct compact *c)
{
	uint64_t n = 0;

	for (uint32_t i = 0; i < N_READERS; i++)
		n += __atomic_load_n(&c->shared->readers[i].lookups, __ATOMIC_RELAXED);
	return n;
}

/* All blocks are taken by as many prompts; half of them are published, all are let go. */
static int fill(struct compact *c, struct kv_pool *pool)
{
	struct kv_seq **seqs = calloc(c->n, sizeof(*seqs));
	uint64_t state = 1;
	int r = seqs ? 0 : -ENOMEM;

	for (uint32_t k = 0; k < c->n && !r; k++) {
		int32_t tokens[BLOCK_TOKENS + 1];

		prompt(k, tokens);
		r = kv_seq_new(pool, &seqs[k]);
		if (!r)
			r = kv_seq_reserve(seqs[k], BLOCK_TOKENS, KV_BENCH_TIMEOUT);
		if (!r)
			r = kv_seq_append(seqs[k], tokens, BLOCK_TOKENS);
	}
	for (uint32_t k = 0; k < c->n && !r; k++) {
		c->survives[k] = next_random(&state) & 1;
		if (c->survives[k])
			r = kv_seq_publish(seqs[k], NULL);
	}
	for (uint32_t k = 0; seqs && k < c->n; k++)
		kv_seq_free(seqs[k], NULL);
	free(seqs);
	return r;
}

static int pool_stats(struct compact *c, struct kv_client *client, struct kv_pool_stats *ret)
{
	kv_cleanup(kv_freep) struct kv_pool_stats *pools = NULL;
	size_t n;
	int r = kv_stats(client, KV_STAT_POOL, (void **)&pools, &n, KV_BENCH_TIMEOUT);

	for (size_t i = 0; !r && i < n; i++) {
		if (!strcmp(pools[i].name, c->name)) {
			*ret = pools[i];
			return 0;
		}
	}
	return r ? r : -ENOENT;
}

static double copy_rate(const struct compact *c)
{
	uint64_t total = c->on_device ? 2048 * MIB : 128 * MIB, n = total / c->block_bytes;
	double rates[COPY_ROUNDS];
	char *from, *to;

	if (c->on_device)
		return kv_elastic_copy_rate(256 * MIB, total);
	from = malloc(total);
	to = malloc(total);
	if (!from || !to) {
		free(from);
		free(to);
		return 0;
	}
	memset(from, 1, total);
	memset(to, 1, total);
	for (int round = 0; round < COPY_ROUNDS; round++) {
		int64_t start = kv_bench_now();

		/* In an order that isn't that of the addresses. */
		for (uint64_t i = 0, at = 0; i < n; i++, at = (at + 577) % n)
			memcpy(to + i * c->block_bytes, from + at * c->block_bytes, c->block_bytes);
		rates[round] = (double)total * 1e9 / (double)(kv_bench_now() - start);
	}
	free(from);
	free(to);
	return kv_bench_median(rates, COPY_ROUNDS);
}

static int compact(struct compact *c, struct kv_client *client, struct result *ret)
{
	struct kv_pool_stats s;
	uint64_t looked_up = n_lookups(c), moved;
	int64_t start, deadline = kv_bench_now() + 4 * KV_BENCH_TIMEOUT;
	double wall;
	int r;

	poll(NULL, 0, (int)(QUIET / KV_MSEC));
	ret->lookups_before = (double)(n_lookups(c) - looked_up) * 1e9 / (double)QUIET;
	r = pool_stats(c, client, &s);
	if (r)
		return r;
	ret->spare_before = (double)s.spare_bytes / (double)s.extent_bytes;
	moved = s.compacted_bytes_total;
	ret->seconds = -(double)s.compacting_ns_total / 1e9;
	looked_up = n_lookups(c);
	start = kv_bench_now();
	r = kv_pool_compact(client, c->name, 0, KV_BENCH_TIMEOUT);
	do {
		poll(NULL, 0, LOOK_MS);
		if (!r)
			r = pool_stats(c, client, &s);
	} while (!r && s.compacting && kv_bench_now() < deadline);
	wall = (double)(kv_bench_now() - start) / 1e9;
	ret->lookups_during = (double)(n_lookups(c) - looked_up) / wall;
	ret->seconds += (double)s.compacting_ns_total / 1e9;
	ret->moved = s.compacted_bytes_total - moved;
	ret->rate = (double)ret->moved / ret->seconds;
	ret->spare_after = (double)s.spare_bytes / (double)s.extent_bytes;
	return r ? r : s.compacting ? -ETIMEDOUT : 0;
}

static void show(struct compact *c, const struct result *r)
{
	struct kv_emit *e = &c->bench->emit;

	kv_emit_open(e, NULL, '{');
	kv_emit_number(e, "block_bytes", c->block_bytes);
	kv_emit_number(e, "blocks", c->n);
	kv_emit_number(e, "moved_bytes", r->moved);
	kv_emit_real(e, "seconds", r->seconds);
	kv_emit_real(e, "bytes_per_second", r->rate);
	kv_emit_real(e, "copy_bytes_per_second", r->copy_rate);
	kv_emit_real(e, "of_copy", r->copy_rate > 0 ? r->rate / r->copy_rate : 0);
	kv_emit_real(e, "spare_share_before", r->spare_before);
	kv_emit_real(e, "spare_share", r->spare_after);
	kv_emit_real(e, "lookups_per_second_before", r->lookups_before);
	kv_emit_real(e, "lookups_per_second", r->lookups_during);
	kv_emit_close(e);
	kv_emit_line(e, "%u blocks of %" PRIu64 " KiB, every second one cached: %.0f MiB moved in %.1f ms",
		     c->n, c->block_bytes >> 10, (double)r->moved / MIB, r->seconds * 1e3);
	kv_emit_line(e, "%.2f GB/s, plain copying %.2f GB/s: %.0f %% of it", r->rate / 1e9,
		     r->copy_rate / 1e9, r->copy_rate > 0 ? 100 * r->rate / r->copy_rate : 0);
	kv_emit_line(e, "extents that are free: %.1f %% before, %.1f %% after", 100 * r->spare_before,
		     100 * r->spare_after);
	kv_emit_line(e, "%u clients: %.0f lookups a second before, %.0f meanwhile", N_READERS,
		     r->lookups_before, r->lookups_during);
}

static int run(struct compact *c, struct kv_client *client, bool last)
{
	struct result result = {0};
	struct kv_pool *pool;
	int status = kv_elastic_open(c->bench, client, c->model, c->name, 0, &pool), r;

	if (status)
		return status;
	r = fill(c, pool);
	if (!r)
		r = kv_ping(client, KV_BENCH_TIMEOUT);
	if (r)
		status = kv_bench_broken(c->bench, "filling a pool", r);
	if (!status)
		status = start_readers(c);
	/* What it has at hand would stay where it is. */
	kv_pool_close(pool);
	if (!status) {
		r = compact(c, client, &result);
		if (r)
			status = kv_bench_broken(c->bench, "compaction", r);
	}
	if (stop_readers(c) && !status)
		status = KV_BENCH_FAILED;
	if (status)
		return status;
	if (last) {
		kv_bench_progress(c->bench, ROUNDS, ROUNDS, "rounds");
		result.copy_rate = copy_rate(c);
		show(c, &result);
	}
	return KV_BENCH_DONE;
}

int kv_bench_compact(struct kv_bench *b)
{
	char name[KV_NAME_MAX];
	struct compact c = {.bench = b, .name = name};
	struct kv_client *client = NULL;
	const struct kv_gpu *gpus;
	void *shared = MAP_FAILED;
	uint64_t pool_bytes;
	int status = kv_bench_serve(b, HOST_POOL + 64 * MIB);

	if (!status)
		status = kv_bench_connect(b, &client);
	if (status)
		return status;
	c.on_device = kv_client_gpus(client, &gpus) > 0 && strcmp(gpus[0].export_kind, "host");
	c.model = c.on_device ? &device_model : &host_model;
	c.block_bytes = kv_elastic_block_bytes(c.model);
	pool_bytes = c.on_device ? gpus[0].arena_bytes / 2 : HOST_POOL;
	pool_bytes = pool_bytes < DEVICE_POOL ? pool_bytes : DEVICE_POOL;
	c.n = (uint32_t)(pool_bytes / c.block_bytes);
	c.survives = calloc(c.n, sizeof(*c.survives));
	shared = mmap(NULL, sizeof(*c.shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		      0);
	if (!c.survives || shared == MAP_FAILED) {
		status = kv_bench_broken(b, "compact", -ENOMEM);
	} else {
		c.shared = shared;
		/* The first one finds memory that nobody has touched, the last one is shown. */
		for (int round = 0; round < ROUNDS && !status; round++) {
			kv_bench_progress(b, (uint64_t)round, ROUNDS, "rounds");
			kv_bench_pool_name(name, "compact");
			memset(shared, 0, sizeof(*c.shared));
			status = run(&c, client, round + 1 == ROUNDS);
			kv_pool_drop(client, name, KV_BENCH_TIMEOUT);
		}
	}
	if (shared != MAP_FAILED)
		munmap(shared, sizeof(*c.shared));
	free(c.survives);
	kv_disconnect(client);
	return status;
}
