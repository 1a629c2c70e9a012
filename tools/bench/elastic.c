/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench elastic: 1 GiB goes from model A to model B, whose blocks have another size. A's blocks are
 * free, or cached and unheld; B takes them all in one call. In turns, several rounds; the median.
 *
 *	worker	CPU time that the daemon's worker says it spent on making room, a GiB
 *	wall	from the call to its end: the mover's zeroing is in it
 *
 * Beside it, where there is a GPU, what moving the same bytes costs with the driver: create, map, set
 * access and unmap of as many pages of 2 MiB, in this process (elastic_cuda.c).
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "tools/bench/elastic.h"

#define GIB    ((uint64_t)1 << 30)
#define MIB    ((uint64_t)1 << 20)
#define ROUNDS 5

static const struct kv_elastic_model models[] = {
	{"a", 16, 32, 8, 128},	/* 32 layers, 8 heads of 128, 16 bit: 2 MiB a block */
	{"b", 16, 80, 2, 128},	/* 80 layers, 2 heads: 1.25 MiB */

};

struct elastic {
	struct kv_bench *bench;
	struct kv_client *client;
	struct kv_pool *from, *to;
	const char *to_name;
	uint64_t from_bytes, to_bytes; /* of a block */
	uint32_t n_from, n_to;	       /* blocks of 1 GiB */
	kv_block_id *ids;
	int32_t *tokens;
	int32_t prompt;
};

struct times {
	double worker_us, wall_ms, moved_mib;
};

uint64_t kv_elastic_block_bytes(const struct kv_elastic_model *m)
{
	return (uint64_t)m->block_tokens * m->n_layers * m->n_heads * m->head_dim * 2 *
	       (m->n_heads > 1 ? 2 : 1);
}

int kv_elastic_open(const struct kv_bench *b, struct kv_client *client,
		    const struct kv_elastic_model *m, const char *name, uint64_t max_bytes,
		    struct kv_pool **ret)
{
	/* One component of all layers: the daemon looks at the size of a block only. */
	uint32_t n = m->n_layers * (m->n_heads > 1 ? 2 : 1);
	struct kv_component component = {.role = KV_ROLE_K,
					 .dtype = KV_F16,
					 .n_heads = n,
					 .head_dim = m->n_heads * m->head_dim,
					 .scale = 1};
	struct kv_layout layout = {.kind = KV_LAYOUT_FLAT,
				   .block_tokens = m->block_tokens,
				   .n_components = 1,
				   .components = &component};
	KV_OPTIONS(kv_pool_options, options, .name = name, .model = m->name, .layout = &layout,
		   .max_bytes = max_bytes, .timeout = KV_BENCH_TIMEOUT);
	int r = kv_pool_open(client, &options, ret);

	return r < 0 ? kv_bench_broken(b, "opening a pool", r) : KV_BENCH_DONE;
}

static int daemon_stats(struct elastic *e, struct kv_daemon_stats *ret)
{
	kv_cleanup(kv_freep) struct kv_daemon_stats *s = NULL;
	size_t n;
	int r = kv_stats(e->client, KV_STAT_DAEMON, (void **)&s, &n, KV_BENCH_TIMEOUT);

	if (!r)
		*ret = *s;
	return r;
}

/* Nothing is being zeroed, and nobody's reserve is being filled. */
static int settle(struct elastic *e)
{
	int64_t deadline = kv_bench_now() + KV_BENCH_TIMEOUT;
	uint64_t scrubbing = 1;

	while (scrubbing && kv_bench_now() < deadline) {
		kv_cleanup(kv_freep) struct kv_gpu_stats *gpus = NULL;
		size_t n;
		int r = kv_stats(e->client, KV_STAT_GPU, (void **)&gpus, &n, KV_BENCH_TIMEOUT);

		if (r < 0)
			return r;
		scrubbing = gpus[0].bytes_scrubbing;
		if (scrubbing)
			poll(NULL, 0, 1);
	}
	return scrubbing ? -ETIMEDOUT : 0;
}

/* A GiB of blocks of A, given back: free, or cached in chains of 64. */
static int fill(struct elastic *e, bool cached)
{
	int r = 0;

	if (!cached) {
		r = kv_blocks_take(e->from, e->n_from, e->ids, KV_BENCH_TIMEOUT);
		return r ? r : kv_blocks_give(e->from, e->n_from, e->ids);
	}
	for (uint32_t n = 0; !r && n < e->n_from;) {
		size_t len = (e->n_from - n < 64 ? e->n_from - n : 64) * 16;
		struct kv_seq *seq;

		for (size_t i = 0; i < len; i++)
			e->tokens[i] = e->prompt * 7919 + (int32_t)i;
		e->prompt++;
		r = kv_seq_new(e->from, &seq);
		if (r)
			break;
		r = kv_seq_reserve(seq, len, KV_BENCH_TIMEOUT);
		if (!r)
			r = kv_seq_append(seq, e->tokens, len);
		if (!r)
			r = kv_seq_publish(seq, NULL);
		kv_seq_free(seq, NULL);
		if (!r)
			r = kv_ping(e->client, KV_BENCH_TIMEOUT);
		n += (uint32_t)(len / 16);
	}
	return r;
}

static int limit(struct elastic *e, uint64_t max_bytes)
{
	KV_OPTIONS(kv_pool_limits, limits, .change = KV_LIMIT_MAX, .max_bytes = max_bytes);

	return kv_pool_set(e->client, e->to_name, &limits, NULL, KV_BENCH_TIMEOUT);
}

static int move(struct elastic *e, bool cached, struct times *ret)
{
	struct kv_daemon_stats before, after;
	int64_t start;
	/* B gives up what it has from the round before. */
	int r = limit(e, 4 * e->to_bytes);

	if (!r)
		r = settle(e);
	if (!r)
		r = fill(e, cached);
	if (!r)
		r = kv_ping(e->client, KV_BENCH_TIMEOUT);
	if (!r)
		r = limit(e, 0);
	if (!r)
		r = settle(e);
	if (!r)
		r = daemon_stats(e, &before);
	if (r)
		return r;
	start = kv_bench_now();
	r = kv_blocks_take(e->to, e->n_to, e->ids, KV_BENCH_TIMEOUT);
	ret->wall_ms = (double)(kv_bench_now() - start) / 1e6;
	if (!r)
		r = daemon_stats(e, &after);
	if (r)
		return r;
	ret->worker_us = (double)(after.moving_ns_total - before.moving_ns_total) / 1e3;
	ret->moved_mib = (double)(after.moved_bytes_total - before.moved_bytes_total) / MIB;
	r = kv_blocks_give(e->to, e->n_to, e->ids);
	return r ? r : kv_ping(e->client, KV_BENCH_TIMEOUT);
}

static int measure(struct elastic *e, bool cached, struct times *ret)
{
	double worker[ROUNDS], wall[ROUNDS], moved[ROUNDS];

	for (int i = 0; i < ROUNDS; i++) {
		struct times t;
		int r;

		kv_bench_progress(e->bench, (uint64_t)(cached ? ROUNDS + i : i), 2 * ROUNDS, "rounds");
		r = move(e, cached, &t);
		if (r)
			return kv_bench_broken(e->bench, "moving a GiB", r);
		worker[i] = t.worker_us;
		wall[i] = t.wall_ms;
		moved[i] = t.moved_mib;
	}
	*ret = (struct times){kv_bench_median(worker, ROUNDS), kv_bench_median(wall, ROUNDS),
			      kv_bench_median(moved, ROUNDS)};
	return KV_BENCH_DONE;
}

static void show(struct kv_emit *e, const char *key, const char *words, const struct times *t,
		 double driver_ms)
{
	char name[64];

	kv_emit_cell(e, "%s", words);
	kv_emit_cell(e, "%.1f", t->worker_us);
	kv_emit_cell(e, "%.3f", t->wall_ms);
	kv_emit_cell(e, "%.0f", t->moved_mib);
	kv_emit_cell(e, driver_ms > 0 ? "%.0f" : "-", driver_ms * 1e3 / t->worker_us);
	snprintf(name, sizeof(name), "%s_worker_us", key);
	kv_emit_real(e, name, t->worker_us);
	snprintf(name, sizeof(name), "%s_wall_ms", key);
	kv_emit_real(e, name, t->wall_ms);
	snprintf(name, sizeof(name), "%s_moved_mib", key);
	kv_emit_real(e, name, t->moved_mib);
	if (driver_ms > 0) {
		snprintf(name, sizeof(name), "%s_ratio", key);
		kv_emit_real(e, name, driver_ms * 1e3 / t->worker_us);
	}
}

static int run(struct elastic *e)
{
	struct kv_emit *out = &e->bench->emit;
	struct times free_blocks, cached;
	double driver_ms;
	char why[128] = "";
	int status = measure(e, false, &free_blocks);

	if (!status)
		status = measure(e, true, &cached);
	if (status)
		return status;
	/* Where there is memory that nobody owns B takes that first. */
	if (free_blocks.moved_mib < 512 || cached.moved_mib < 512)
		return kv_bench_refuse(e->bench, KV_BENCH_FAILED,
				       "only %.0f and %.0f MiB came from A: the daemon has too much "
				       "that nobody owns (kvcached --reserve 1088M has not)",
				       free_blocks.moved_mib, cached.moved_mib);
	kv_bench_progress(e->bench, 2 * ROUNDS, 2 * ROUNDS, "rounds");
	driver_ms = kv_elastic_driver_ms(GIB, why, sizeof(why));
	kv_emit_open(out, NULL, '{');
	kv_emit_number(out, "from_block_bytes", e->from_bytes);
	kv_emit_number(out, "to_block_bytes", e->to_bytes);
	if (driver_ms > 0)
		kv_emit_real(out, "driver_ms", driver_ms);
	kv_emit_head(out, "<1 GIB OF A, FOR B", ">WORKER US", ">WALL MS", ">MOVED MIB",
		     ">DRIVER / WORKER", NULL);
	show(out, "free", "free blocks", &free_blocks, driver_ms);
	show(out, "cached", "cached, unheld", &cached, driver_ms);
	kv_emit_table(out);
	kv_emit_close(out);
	kv_emit_gap(out);
	kv_emit_line(out, "Blocks of %" PRIu64 " bytes become blocks of %" PRIu64 ".",
		     e->from_bytes, e->to_bytes);
	if (driver_ms > 0)
		kv_emit_line(out,
			     "The driver's create, map, access and unmap of it in pages of 2 MiB: "
			     "%.2f ms.", driver_ms);
	else
		kv_emit_line(out, "No comparison with the driver: %s.", why);
	return KV_BENCH_DONE;
}

int kv_bench_elastic(struct kv_bench *b)
{
	char from[KV_NAME_MAX], to[KV_NAME_MAX];
	struct elastic e = {.bench = b,
			    .to_name = to,
			    .from_bytes = kv_elastic_block_bytes(&models[0]),
			    .to_bytes = kv_elastic_block_bytes(&models[1])};
	/* What B needs besides, and the reserve. */
	int status = kv_bench_serve(b, GIB + 64 * MIB);

	e.n_from = (uint32_t)(GIB / e.from_bytes);
	e.n_to = (uint32_t)(GIB / e.to_bytes);
	e.ids = calloc(e.n_from + e.n_to, sizeof(*e.ids));
	e.tokens = calloc(64 * 16, sizeof(*e.tokens));
	if (!e.ids || !e.tokens)
		status = kv_bench_broken(b, "elastic", -ENOMEM);
	if (!status)
		status = kv_bench_connect(b, &e.client);
	kv_bench_pool_name(from, "elastic-a");
	kv_bench_pool_name(to, "elastic-b");
	if (!status)
		status = kv_elastic_open(b, e.client, &models[0], from, 0, &e.from);
	if (!status)
		status = kv_elastic_open(b, e.client, &models[1], to, 0, &e.to);
	if (!status)
		status = run(&e);
	kv_pool_close(e.from);
	kv_pool_close(e.to);
	if (e.client) {
		kv_pool_drop(e.client, from, KV_BENCH_TIMEOUT);
		kv_pool_drop(e.client, to, KV_BENCH_TIMEOUT);
	}
	kv_disconnect(e.client);
	free(e.ids);
	free(e.tokens);
	return status;
}
