/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench metadata: what a step's kernels read, of decoding sequences: kv_batch_build() on the host, from
 * sequences that each grow by a token a step; kv_metadata_build() on the host and, where there is one, the
 * GPU, from lengths alone. The first build of a row copies its blocks, later ones what has changed.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/batch.h>
#include <kvcached/metadata.h>

#include "tools/bench/bench.h"
#include "tools/bench/device.h"

#define BLOCK_TOKENS 16
#define CONTEXT	     4096 /* tokens of a sequence at the start */
#define STEPS	     48
#define WIDTH	     ((CONTEXT + STEPS) / BLOCK_TOKENS + 1)
#define CALLS	     16 /* of a GPU's graph */
#define HOST_BYTES   ((uint64_t)256 << 20)

static const uint32_t counts[] = {1, 8, 32, 128, 256, 1024};
#define N_COUNTS (sizeof(counts) / sizeof(counts[0]))
#define MAX_SEQS 1024

/* Seconds, medians. */
struct times {
	double first, step; /* kv_batch_build(): of new rows, and a step later */
	double arrays;	    /* kv_metadata_build() on the host */
	double device;	    /* the same in a graph on the device; 0: no GPU */
};

struct work {
	struct kv_seq *seqs[MAX_SEQS];
	struct kv_batch_item items[MAX_SEQS];
	int32_t tokens[CONTEXT + STEPS];
};

static int grow(struct work *w, uint32_t n, uint32_t from, uint32_t n_tokens)
{
	int r = 0;

	for (uint32_t i = 0; i < n && !r; i++) {
		r = kv_seq_reserve(w->seqs[i], from + n_tokens, KV_BENCH_TIMEOUT);
		if (!r)
			r = kv_seq_append(w->seqs[i], w->tokens + from, n_tokens);
	}
	return r;
}

/* @n sequences of CONTEXT tokens, then STEPS steps; what is built is held against the sequences. */
static int time_batches(const struct kv_bench *b, struct kv_pool *pool, struct work *w, uint32_t n,
			struct times *ret)
{
	const struct kv_batch_options options = {.size = sizeof(options),
						 .max_seqs = n,
						 .max_tokens = n,
						 .max_blocks_per_seq = WIDTH};
	const struct kv_batch_data *data;
	struct kv_batch *batch;
	double seconds[STEPS];
	int r = kv_batch_new(pool, &options, &batch);

	if (r < 0)
		return kv_bench_broken(b, "kv_batch_new", r);
	for (uint32_t i = 0; i < n && !r; i++) {
		r = kv_seq_new(pool, &w->seqs[i]);
		w->items[i] = (struct kv_batch_item){w->seqs[i], 1};
	}
	if (!r)
		r = grow(w, n, 0, CONTEXT);
	for (int step = 0; step < STEPS && !r; step++) {
		int64_t start;

		r = grow(w, n, CONTEXT + (uint32_t)step, 1);
		start = kv_bench_now();
		if (!r)
			r = kv_batch_build(batch, w->items, n, 0, 0);
		seconds[step] = (double)(kv_bench_now() - start) / 1e9;
	}
	data = kv_batch_data(batch);
	for (uint32_t i = 0; i < n && !r; i++) {
		const kv_block_id *ids;
		size_t n_blocks = kv_seq_blocks(w->seqs[i], &ids);
		int64_t p = CONTEXT + STEPS - 1;

		if (memcmp(data->block_table + (size_t)i * WIDTH, ids, n_blocks * sizeof(*ids)) ||
		    data->seq_lens[i] != p + 1 || data->positions[i] != p ||
		    data->slots[i] != (int64_t)ids[p / BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS)
			r = -EBADMSG;
	}
	for (uint32_t i = 0; i < n; i++) {
		kv_seq_free(w->seqs[i], NULL);
		w->seqs[i] = NULL;
	}
	kv_batch_free(batch);
	if (r)
		return kv_bench_broken(b, "kv_batch_build", r);
	ret->first = seconds[0];
	ret->step = kv_bench_median(seconds + 1, STEPS - 1);
	return KV_BENCH_DONE;
}

static int call_build(void *context, int i, void *stream)
{
	struct kv_metadata_args args = *(struct kv_metadata_args *)context;

	(void)i;
	args.stream = stream;
	return kv_metadata_build(&args);
}

/* The chosen device's arrays of @n sequences that decode. Return: seconds of a build; 0: it failed. */
static double time_arrays(uint32_t n)
{
	size_t words = n * sizeof(int32_t);
	int32_t *ones = malloc(words), *lens = malloc(words), *table = calloc(n, WIDTH * sizeof(*table));
	struct kv_metadata_args args = {.size = sizeof(args),
					.device = kv_bench_device,
					.n_seqs = (int32_t)n,
					.n_tokens = (int32_t)n,
					.table_width = WIDTH,
					.block_tokens = BLOCK_TOKENS,
					.null_block = -1,
					.n_query = kv_bench_device_alloc(words),
					.n_computed = kv_bench_device_alloc(words),
					.block_table = kv_bench_device_alloc(WIDTH * words),
					.query_start_loc = kv_bench_device_alloc(words + 4),
					.seq_lens = kv_bench_device_alloc(words),
					.token_to_seq = kv_bench_device_alloc(words),
					.positions = kv_bench_device_alloc(2 * words),
					.slots = kv_bench_device_alloc(2 * words)};
	void *arrays[] = {args.n_query, args.n_computed, (void *)(uintptr_t)args.block_table,
			  args.query_start_loc, args.seq_lens, args.token_to_seq, args.positions,
			  args.slots};
	double seconds = 0;

	if (!ones || !lens || !table)
		abort();
	for (uint32_t i = 0; i < n; i++) {
		ones[i] = 1;
		lens[i] = CONTEXT - (int32_t)(i % 97);
	}
	kv_bench_device_put(args.n_query, ones, words);
	kv_bench_device_put(args.n_computed, lens, words);
	kv_bench_device_put((void *)(uintptr_t)args.block_table, table, WIDTH * words);
	if (kv_bench_device_time(call_build, &args, CALLS, &seconds))
		seconds = 0;
	for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++)
		kv_bench_device_free(arrays[i]);
	free(ones);
	free(lens);
	free(table);
	return seconds;
}

static void show(struct kv_emit *e, uint32_t n, const struct times *t)
{
	kv_emit_open(e, NULL, '{');
	kv_emit_number(e, "sequences", n);
	kv_emit_number(e, "context", CONTEXT);
	kv_emit_real(e, "first_us", t->first * 1e6);
	kv_emit_real(e, "step_us", t->step * 1e6);
	kv_emit_real(e, "arrays_us", t->arrays * 1e6);
	kv_emit_real(e, "device_us", t->device * 1e6);
	kv_emit_close(e);
	kv_emit_cell(e, "%u", n);
	kv_emit_cell(e, "%.2f", t->first * 1e6);
	kv_emit_cell(e, "%.2f", t->step * 1e6);
	kv_emit_cell(e, "%.2f", t->arrays * 1e6);
	kv_emit_cell(e, t->device > 0 ? "%.2f" : "-", t->device * 1e6);
}

/* The pool is as large as the largest batch needs; memory of small blocks in the host's. */
static int run(struct kv_bench *b, struct kv_pool *pool)
{
	const char *device = kv_bench_device == KV_DEVICE_CUDA ? "cuda" : NULL;
	struct work *w = calloc(1, sizeof(*w));
	struct kv_emit *e = &b->emit;
	char text[128];
	int status = KV_BENCH_DONE;

	if (!w)
		return kv_bench_broken(b, "calloc", -ENOMEM);
	if (device && !kv_bench_device_present(text, sizeof(text)))
		device = NULL;
	for (int i = 0; i < CONTEXT + STEPS; i++)
		w->tokens[i] = i;
	kv_emit_open(e, NULL, '{');
	kv_emit_open(e, "batches", '[');
	kv_emit_line(e, "Decoding sequences of %d tokens, blocks of %d; us", CONTEXT, BLOCK_TOKENS);
	kv_emit_head(e, ">SEQUENCES", ">NEW ROWS", ">A STEP", ">ARRAYS ALONE", ">ON THE GPU", NULL);
	for (size_t i = 0; i < N_COUNTS && !status; i++) {
		struct times t = {0};

		kv_bench_progress(b, i, N_COUNTS, "batches");
		status = time_batches(b, pool, w, counts[i], &t);
		if (device)
			t.device = time_arrays(counts[i]);
		kv_bench_device_choose("host");
		t.arrays = time_arrays(counts[i]);
		if (device)
			kv_bench_device_choose(device);
		if (!status)
			show(e, counts[i], &t);
	}
	kv_bench_progress(b, N_COUNTS, N_COUNTS, "batches");
	kv_emit_table(e);
	kv_emit_close(e);
	kv_emit_close(e);
	free(w);
	return status;
}

int kv_bench_metadata(struct kv_bench *b)
{
	char name[KV_NAME_MAX];
	struct kv_bench_pool what = {.name = name,
				     .block_tokens = BLOCK_TOKENS,
				     .n_blocks = MAX_SEQS * WIDTH + MAX_SEQS};
	struct kv_client *client;
	struct kv_pool *pool;
	int status;

	kv_bench_pool_name(name, "metadata");
	status = kv_bench_serve(b, HOST_BYTES);
	if (!status)
		status = kv_bench_connect(b, &client);
	if (status)
		return status;
	status = kv_bench_open(b, client, &what, &pool);
	if (!status) {
		status = run(b, pool);
		kv_pool_close(pool);
		kv_pool_drop(client, name, KV_BENCH_TIMEOUT);
	}
	kv_disconnect(client);
	return status;
}
