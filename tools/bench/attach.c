/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench attach: how long a client takes from nothing to a pool it can work with, and back.
 *
 * The pool exists: a session of the benchmark's own keeps it. The median of ROUNDS rounds, in us.
 */
#include <errno.h>

#include "tools/bench/bench.h"

#define ROUNDS	    101
#define POOL_BLOCKS 16384u
#define HOST_BYTES  ((uint64_t)64 << 20)

enum step { CONNECT, OPEN, CLOSE, OPEN_MAPPED, VIEW, CLOSE_MAPPED, DISCONNECT, STEPS };

static const struct {
	const char *key;
	const char *words;
} steps[STEPS] = {
	[CONNECT] = {"connect_us", "connect"},
	[OPEN] = {"open_us", "open a pool, host-only"},
	[CLOSE] = {"close_us", "close it"},
	[OPEN_MAPPED] = {"open_mapped_us", "open a pool, mapped"},
	[VIEW] = {"view_us", "view of a component"},
	[CLOSE_MAPPED] = {"close_mapped_us", "close it"},
	[DISCONNECT] = {"disconnect_us", "disconnect"},
};

struct watch {
	int64_t last;
	double *us; /* [STEPS] */
};

static void note(struct watch *w, enum step step)
{
	int64_t now = kv_bench_now();

	w->us[step] = (double)(now - w->last) / 1000;
	w->last = now;
}

static int attach_once(struct kv_bench *b, struct kv_bench_pool what, double *ret_us)
{
	struct watch watch = {kv_bench_now(), ret_us};
	struct kv_client *client;
	struct kv_pool *pool;
	struct kv_view view;
	uint32_t gpu;
	struct kv_pool_info info;
	int status = kv_bench_connect(b, &client);

	if (status)
		return status;
	note(&watch, CONNECT);
	status = kv_bench_open(b, client, &what, &pool);
	if (status)
		goto disconnect;
	note(&watch, OPEN);
	kv_pool_close(pool);
	note(&watch, CLOSE);

	what.mapped = true;
	status = kv_bench_open(b, client, &what, &pool);
	if (status)
		goto disconnect;
	note(&watch, OPEN_MAPPED);
	kv_pool_info(pool, &info);
	gpu = (uint32_t)__builtin_ctz(info.gpu_mask);
	if (kv_pool_view(pool, gpu, 0, &view) < 0)
		status = kv_bench_broken(b, steps[VIEW].words, -EINVAL);
	note(&watch, VIEW);
	kv_pool_close(pool);
	note(&watch, CLOSE_MAPPED);
disconnect:
	kv_disconnect(client);
	note(&watch, DISCONNECT);
	return status;
}

static void show(struct kv_emit *e, const double *us)
{
	double host_only = us[CONNECT] + us[OPEN],
	       mapped = us[CONNECT] + us[OPEN_MAPPED] + us[VIEW];

	kv_emit_open(e, NULL, '{');
	kv_emit_head(e, "<STEP", ">US", NULL);
	for (int i = 0; i < STEPS; i++) {
		kv_emit_cell(e, "%s", steps[i].words);
		kv_emit_cell(e, "%.1f", us[i]);
		kv_emit_real(e, steps[i].key, us[i]);
	}
	kv_emit_table(e);
	kv_emit_real(e, "host_only_us", host_only);
	kv_emit_real(e, "mapped_us", mapped);
	kv_emit_close(e);
	kv_emit_gap(e);
	kv_emit_line(e, "From nothing to a host-only pool %.0f us, to a mapped one %.0f us.",
		     host_only, mapped);
}

static int measure(struct kv_bench *b, const struct kv_bench_pool *what)
{
	double rounds[STEPS][ROUNDS], us[STEPS];

	for (int round = 0; round < ROUNDS; round++) {
		int status;

		kv_bench_progress(b, (uint64_t)round, ROUNDS, "rounds");
		status = attach_once(b, *what, us);

		if (status)
			return status;
		for (int i = 0; i < STEPS; i++)
			rounds[i][round] = us[i];
	}
	kv_bench_progress(b, ROUNDS, ROUNDS, "rounds");
	for (int i = 0; i < STEPS; i++)
		us[i] = kv_bench_median(rounds[i], ROUNDS);
	show(&b->emit, us);
	return KV_BENCH_DONE;
}

int kv_bench_attach(struct kv_bench *b)
{
	char name[KV_NAME_MAX];
	struct kv_bench_pool what = {.name = name, .block_tokens = 16, .n_blocks = POOL_BLOCKS};
	struct kv_client *client;
	struct kv_pool *pool;
	int status = kv_bench_serve(b, HOST_BYTES);

	kv_bench_pool_name(name, "attach");
	if (!status)
		status = kv_bench_connect(b, &client);
	if (status)
		return status;
	status = kv_bench_open(b, client, &what, &pool);
	if (!status) {
		status = measure(b, &what);
		kv_pool_close(pool);
		kv_pool_drop(client, name, KV_BENCH_TIMEOUT);
	}
	kv_disconnect(client);
	return status;
}
