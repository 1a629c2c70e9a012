/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench lease: what it costs to take a block and give it back.
 *
 * The contestants run in turns, ROUNDS times; each figure is the median of its rounds, in ns per
 * block. In every one a block is taken and given back at once, or 16 are taken, then 16 given back:
 * the magazine is warm, as it is in an engine that runs.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "tools/bench/bench.h"
#include "tools/bench/stack.h"

#define ROUNDS	       41
#define BLOCKS_A_ROUND 100000u /* a multiple of 16 */
#define PINGS_A_ROUND  50u
#define COUNTED	       1000000u /* blocks, once one by one and once by 16 */
#define WARM_UP	       10000u
#define BATCH	       16u
#define POOL_BLOCKS    16384u
#define HOST_BYTES     ((uint64_t)64 << 20)

struct lease {
	struct kv_bench *bench;
	struct kv_bench_pool what;
	struct kv_client *client;
	struct kv_pool *pool;
	struct kv_array_stack *stack;
	struct kv_mutex_list *list;
};

/* The compiler may not keep the stack in registers, nor see that a pop undoes a push. */
#define BARRIER(id) __asm__ volatile("" : "+r"(id) : : "memory")

static int take_give(struct lease *l, uint32_t n_blocks)
{
	int r = 0;

	for (uint32_t i = 0; i < n_blocks && !r; i++) {
		kv_block_id id;

		r = kv_blocks_take(l->pool, 1, &id, 0);
		if (!r)
			r = kv_blocks_give(l->pool, 1, &id);
	}
	return r;
}

static int take_give_16(struct lease *l, uint32_t n_blocks)
{
	int r = 0;

	for (uint32_t i = 0; i < n_blocks && !r; i += BATCH) {
		kv_block_id ids[BATCH];

		r = kv_blocks_take(l->pool, BATCH, ids, 0);
		if (!r)
			r = kv_blocks_give(l->pool, BATCH, ids);
	}
	return r;
}

static int array_stack(struct lease *l, uint32_t n_blocks)
{
	for (uint32_t i = 0; i < n_blocks; i++) {
		int32_t id = kv_array_stack_pop(l->stack);

		BARRIER(id);
		kv_array_stack_push(l->stack, id);
	}
	return 0;
}

static int array_stack_16(struct lease *l, uint32_t n_blocks)
{
	for (uint32_t i = 0; i < n_blocks; i += BATCH) {
		int32_t ids[BATCH];

		for (uint32_t k = 0; k < BATCH; k++)
			ids[k] = kv_array_stack_pop(l->stack);
		for (uint32_t k = 0; k < BATCH; k++)
			kv_array_stack_push(l->stack, ids[k]);
	}
	return 0;
}

static int array_stack_inline(struct lease *l, uint32_t n_blocks)
{
	struct kv_array_stack *stack = l->stack;

	for (uint32_t i = 0; i < n_blocks; i++) {
		int32_t id = stack->ids[--stack->n];

		BARRIER(id);
		stack->ids[stack->n++] = id;
		BARRIER(id);
	}
	return 0;
}

static int mutex_list(struct lease *l, uint32_t n_blocks)
{
	for (uint32_t i = 0; i < n_blocks; i++) {
		int32_t id = kv_mutex_list_pop(l->list);

		BARRIER(id);
		kv_mutex_list_push(l->list, id);
	}
	return 0;
}

static int round_trip(struct lease *l, uint32_t n_blocks)
{
	int r = 0;

	for (uint32_t i = 0; i < n_blocks && !r; i++)
		r = kv_ping(l->client, KV_BENCH_TIMEOUT);
	return r;
}

enum contestant { TAKE_GIVE, TAKE_GIVE_16, STACK, STACK_16, STACK_INLINE, LIST, TRIP, CONTESTANTS };

static const struct {
	const char *key;
	const char *words;
	int (*run)(struct lease *l, uint32_t n_blocks);
	uint32_t n_blocks; /* of a round */
} contestants[CONTESTANTS] = {
	[TAKE_GIVE] = {"take_give_ns", "take and give, 1 block", take_give, BLOCKS_A_ROUND},
	[TAKE_GIVE_16] = {"take_give_16_ns", "take and give, 16 blocks", take_give_16,
			  BLOCKS_A_ROUND},
	[STACK] = {"array_stack_ns", "array stack, called, 1 block", array_stack, BLOCKS_A_ROUND},
	[STACK_16] = {"array_stack_16_ns", "array stack, called, 16 blocks", array_stack_16,
		      BLOCKS_A_ROUND},
	[STACK_INLINE] = {"array_stack_inline_ns", "array stack, inlined, 1 block",
			  array_stack_inline, BLOCKS_A_ROUND},
	[LIST] = {"mutex_list_ns", "free list behind a mutex", mutex_list, BLOCKS_A_ROUND},
	[TRIP] = {"socket_round_trip_ns", "socket round trip", round_trip, PINGS_A_ROUND},
};

static int measure(struct lease *l, double *ret_ns)
{
	static double ns[CONTESTANTS][ROUNDS];
	int r = take_give_16(l, WARM_UP);

	if (r)
		return kv_bench_broken(l->bench, "take and give", r);
	for (uint32_t round = 0; round < ROUNDS; round++) {
		kv_bench_progress(l->bench, round, ROUNDS, "rounds");
		for (uint32_t c = 0; c < CONTESTANTS; c++) {
			int64_t start = kv_bench_now();

			r = contestants[c].run(l, contestants[c].n_blocks);

			if (r)
				return kv_bench_broken(l->bench, contestants[c].words, r);
			ns[c][round] = (double)(kv_bench_now() - start) / contestants[c].n_blocks;
		}
	}
	kv_bench_progress(l->bench, ROUNDS, ROUNDS, "rounds");
	for (uint32_t c = 0; c < CONTESTANTS; c++)
		ret_ns[c] = kv_bench_median(ns[c], ROUNDS);
	return KV_BENCH_DONE;
}

/* In a child, under the eyes of a tracer. */
static int counted_work(void *arg)
{
	struct lease *l = arg;
	int r;

	if (kv_bench_connect(l->bench, &l->client) ||
	    kv_bench_open(l->bench, l->client, &l->what, &l->pool))
		return -ECHILD;
	r = take_give_16(l, WARM_UP);
	kv_bench_mark();
	if (!r)
		r = take_give(l, COUNTED);
	if (!r)
		r = take_give_16(l, COUNTED);
	kv_bench_mark();
	if (r)
		kv_bench_broken(l->bench, "take and give", r);
	kv_pool_close(l->pool);
	kv_pool_drop(l->client, l->what.name, KV_BENCH_TIMEOUT);
	kv_disconnect(l->client);
	return r;
}

static void show_ratio(struct kv_emit *e, const double *ns, enum contestant c)
{
	kv_emit_cell(e, "%s", contestants[c].words);
	kv_emit_cell(e, ns[c] < 1000 ? "%.2f" : "%.0f", ns[c]);
	kv_emit_cell(e, "%.2f", ns[c] / ns[TAKE_GIVE]);
	kv_emit_real(e, contestants[c].key, ns[c]);
}

/* @n_syscalls: of 2 * COUNTED blocks; negative: they couldn't be counted */
static void show(struct kv_emit *e, const double *ns, int64_t n_syscalls)
{
	double per_million = n_syscalls < 0 ? NAN : (double)n_syscalls * 1e6 / (2.0 * COUNTED);

	kv_emit_open(e, NULL, '{');
	kv_emit_head(e, "<ONE BLOCK BY", ">NS", ">TIMES", NULL);
	for (uint32_t c = 0; c < CONTESTANTS; c++)
		show_ratio(e, ns, c);
	kv_emit_table(e);
	kv_emit_real(e, "syscalls_per_million", per_million);
	kv_emit_close(e);
	kv_emit_gap(e);
	if (n_syscalls < 0)
		kv_emit_line(e, "System calls were not counted: tracing isn't allowed here.");
	else
		kv_emit_line(e, "%g system calls per million blocks taken and given.", per_million);
	kv_emit_line(
		e, "A block costs %.2f times the called array stack, and a round trip %.0f blocks.",
		ns[TAKE_GIVE] / ns[STACK], ns[TRIP] / ns[TAKE_GIVE]);
}

static int run(struct lease *l)
{
	double ns[CONTESTANTS];
	int64_t n_syscalls;
	int status = kv_bench_connect(l->bench, &l->client);

	if (!status)
		status = kv_bench_open(l->bench, l->client, &l->what, &l->pool);
	if (!status)
		status = measure(l, ns);
	kv_pool_close(kv_steal(l->pool));
	if (l->client)
		kv_pool_drop(l->client, l->what.name, KV_BENCH_TIMEOUT);
	kv_disconnect(kv_steal(l->client));
	if (status)
		return status;

	n_syscalls = kv_bench_count_syscalls(counted_work, l);
	if (n_syscalls < 0 && n_syscalls != -EPERM)
		return kv_bench_refuse(l->bench, KV_BENCH_FAILED, "counting system calls: %s",
				       strerror((int)-n_syscalls));
	show(&l->bench->emit, ns, n_syscalls);
	return KV_BENCH_DONE;
}

int kv_bench_lease(struct kv_bench *b)
{
	kv_cleanup(kv_freep) struct kv_array_stack *stack = calloc(1, sizeof(*stack));
	kv_cleanup(kv_freep) struct kv_mutex_list *list = calloc(1, sizeof(*list));
	char name[KV_NAME_MAX];
	struct lease l = {
		.bench = b,
		.what = {.name = name, .block_tokens = 16, .n_blocks = POOL_BLOCKS},
		.stack = stack,
		.list = list,
	};
	int status;

	if (!stack || !list)
		return kv_bench_refuse(b, KV_BENCH_FAILED, "no memory for the yardsticks");
	kv_bench_pool_name(name, "lease");
	pthread_mutex_init(&list->lock, NULL);
	list->first = -1;
	for (int32_t i = 0; i < 256; i++) {
		kv_array_stack_push(stack, i);
		kv_mutex_list_push(list, i);
	}
	status = kv_bench_serve(b, HOST_BYTES);
	return status ? status : run(&l);
}
