/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench dsa: a step of sparse attention: which tokens (indexer and top-k), attention over those,
 * and the index's write, beside the device's copy.
 *
 * Blocks of 64 tokens lie in a random order; the calls of a graph have blocks of their own until at
 * least 256 MiB are touched. Attention's queries have chosen one row in four of a context of their
 * own, by position. Before a case is timed its first call is held against sums in double
 * (dsa_right.c). A wrong case has no time. Then copy, case, copy.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "kernels/dtype.h"
#include "tools/bench/bench.h"
#include "tools/bench/device.h"
#include "tools/bench/dsa.h"

#define ROTATED	   ((size_t)256 << 20)
#define MAX_CALLS  64
#define TILE	   ((size_t)16 << 20) /* bytes of random content, over and over */
#define COPY_BYTES ((size_t)1 << 30)
#define BLOCK	   KV_BENCH_DSA_BLOCK
#define LATENT	   KV_BENCH_DSA_LATENT
#define ROPE	   KV_BENCH_DSA_ROPE
#define DIM	   KV_BENCH_DSA_DIM
#define FP8	   KV_INDEX_ROW_FP8
#define FP4	   KV_INDEX_ROW_FP4
#define BF16	   (DIM * 2)
#define PACKED	   (LATENT + LATENT / 32 + ROPE * 2)
#define TOLERANCE  5e-3

static const char *const names[] = {"choose", "score", "attend", "write"};

static const struct kv_bench_dsa_case cases[] = {
	{KV_BENCH_DSA_CHOOSE, FP8, 64, 1, 4096, 2048, true},
	{KV_BENCH_DSA_CHOOSE, FP8, 64, 1, 65536, 2048, false},
	{KV_BENCH_DSA_CHOOSE, FP8, 64, 8, 65536, 2048, false},
	{KV_BENCH_DSA_CHOOSE, FP8, 64, 32, 16384, 2048, false},
	{KV_BENCH_DSA_CHOOSE, FP8, 64, 128, 8192, 2048, false},
	{KV_BENCH_DSA_SCORE, FP8, 64, 1, 65536, 0, false},
	{KV_BENCH_DSA_SCORE, FP8, 64, 8, 65536, 0, false},
	{KV_BENCH_DSA_SCORE, FP8, 64, 32, 16384, 0, false},
	{KV_BENCH_DSA_SCORE, FP8, 64, 128, 8192, 0, false},
	{KV_BENCH_DSA_SCORE, FP4, 64, 1, 2048, 0, true},
	{KV_BENCH_DSA_SCORE, FP4, 64, 32, 16384, 0, false},
	{KV_BENCH_DSA_ATTEND, BF16, 16, 1, 8192, 2048, true},
	{KV_BENCH_DSA_ATTEND, BF16, 16, 32, 8192, 2048, false},
	{KV_BENCH_DSA_ATTEND, BF16, 128, 1, 8192, 2048, false},
	{KV_BENCH_DSA_ATTEND, BF16, 128, 32, 8192, 2048, false},
	{KV_BENCH_DSA_ATTEND, PACKED, 16, 1, 8192, 2048, true},
	{KV_BENCH_DSA_ATTEND, PACKED, 16, 32, 8192, 2048, false},
	{KV_BENCH_DSA_ATTEND, PACKED, 128, 32, 8192, 2048, false},
	{KV_BENCH_DSA_ATTEND, BF16, 128, 128, 8192, 2048, false},
	{KV_BENCH_DSA_ATTEND, PACKED, 128, 128, 8192, 2048, false},
	{KV_BENCH_DSA_ATTEND, BF16, 128, 2048, 8192, 2048, false},
	{KV_BENCH_DSA_WRITE, FP8, 0, 1, 0, 0, true},
	{KV_BENCH_DSA_WRITE, FP8, 0, 128, 0, 0, true},
	{KV_BENCH_DSA_WRITE, FP4, 0, 128, 0, 0, true},
	{KV_BENCH_DSA_WRITE, FP8, 0, 8192, 0, 0, false},
	{KV_BENCH_DSA_WRITE, FP4, 0, 8192, 0, 0, false},
};

static uint64_t next_bits(uint64_t *seed)
{
	*seed = *seed * 6364136223846793005ull + 1442695040888963407ull;
	return *seed >> 24;
}

static double uniform(uint64_t *seed)
{
	return (double)next_bits(seed) / (double)(1ull << 39) - 1;
}

static int64_t below(uint64_t *seed, int64_t n)
{
	return (int64_t)(next_bits(seed) % (uint64_t)n);
}

/* e4m3 of less than 2, either sign; any two e2m1 */
static void random_codes(uint8_t *to, size_t bytes, int mask, uint64_t *seed)
{
	for (size_t i = 0; i < bytes; i++)
		to[i] = (uint8_t)(next_bits(seed) & (uint64_t)mask);
}

/* A block of the indexer's cache: codes, then scales. */
static void random_keys(char *to, int32_t row, uint64_t *seed)
{
	size_t codes = (size_t)(row - 4) * BLOCK;

	random_codes((uint8_t *)to, codes, row == FP8 ? 0xbf : 0xff, seed);
	for (size_t i = 0; i < BLOCK * 4; i++) {
		float scale = (float)(1 + uniform(seed) / 2);

		if (row == FP4)
			to[codes + i] = (char)(126 + below(seed, 3));
		else if (i % 4 == 0)
			memcpy(to + codes + i, &scale, sizeof(scale));
	}
}

static void random_latents(char *to, int32_t row, uint64_t *seed)
{
	for (int r = 0; r < BLOCK; r++, to += row) {
		int plain = row == BF16 ? 0 : LATENT; /* bf16 from here on */
		char *at = row == BF16 ? to : to + LATENT + LATENT / 32;

		random_codes((uint8_t *)to, (size_t)plain, 0xbf, seed);
		for (int s = 0; s < plain / 128; s++) {
			float scale = 0.2f + (float)s / 10;

			memcpy(to + LATENT + 4 * s, &scale, sizeof(scale));
		}
		for (int d = plain; d < DIM; d++)
			kv_element_store(at, d - plain, KV_BF16, (float)uniform(seed));
	}
}

static struct kv_index_args index_args(const struct kv_bench_dsa *w, int call)
{
	const struct kv_bench_dsa_case *c = w->c;

	return (struct kv_index_args){
		.size = sizeof(struct kv_index_args),
		.device = kv_bench_device,
		.form = KV_INDEX_SLOTS,
		.n_seqs = c->seqs,
		.n_tokens = c->seqs,
		.max_query_len = 1,
		.max_seq_len = c->tokens,
		.table_width = w->width,
		.n_heads = c->heads,
		.top_k = c->top_k ? c->top_k : 1,
		.q = w->q,
		.weights = w->weights,
		.seq_lens = w->lens,
		.block_table = w->table + (int64_t)call * c->seqs * w->width,
		.cache = w->view,
		.chosen = c->what == KV_BENCH_DSA_CHOOSE ? w->chosen : NULL,
		.scores = w->scores,
		.scores_stride = w->scores_stride,
	};
}

static struct kv_sparse_mla_args attend_args(const struct kv_bench_dsa *w, int call)
{
	const struct kv_bench_dsa_case *c = w->c;

	return (struct kv_sparse_mla_args){
		.size = sizeof(struct kv_sparse_mla_args),
		.device = kv_bench_device,
		.dtype = KV_BF16,
		.n_tokens = c->seqs,
		.n_heads = c->heads,
		.latent_dim = LATENT,
		.rope_dim = ROPE,
		.top_k = c->top_k,
		.sm_scale = KV_BENCH_DSA_SCALE,
		.q = w->q,
		.chosen = w->chosen + (int64_t)call * c->seqs * c->top_k,
		.cache = w->view,
		.out = w->out,
		.workspace = w->workspace,
		.workspace_bytes = w->workspace_bytes,
	};
}

static int call(void *arg, int i, void *stream)
{
	const struct kv_bench_dsa *w = arg;
	struct kv_index_write_args write;
	struct kv_sparse_mla_args attend;
	struct kv_index_args index;

	switch (w->c->what) {
	case KV_BENCH_DSA_WRITE:
		write = (struct kv_index_write_args){.size = sizeof(write),
						     .device = kv_bench_device,
						     .dtype = KV_BF16,
						     .n_tokens = w->c->seqs,
						     .key = w->q,
						     .slots = w->slots + (int64_t)i * w->c->seqs,
						     .cache = w->view,
						     .stream = stream};
		return kv_index_write(&write);
	case KV_BENCH_DSA_ATTEND:
		attend = attend_args(w, i);
		attend.stream = stream;
		return kv_sparse_mla(&attend);
	default:
		index = index_args(w, i);
		index.stream = stream;
		return kv_index_choose(&index);
	}
}

/* Bytes that a call must read and write, scores not among them, and what it calculates. */
static double bytes_moved(const struct kv_bench_dsa_case *c)
{
	double n = c->seqs, io;

	if (c->what == KV_BENCH_DSA_WRITE)
		return n * (KV_INDEX_DIM * 2 + 8 + c->row);
	if (c->what == KV_BENCH_DSA_ATTEND)
		return n *
		       ((double)c->top_k * (c->row + 4) + (double)c->heads * (DIM + LATENT) * 2);
	io = c->what == KV_BENCH_DSA_CHOOSE ? c->top_k * 4.0 : c->tokens * 4.0;
	return n * ((double)c->tokens * c->row + c->heads * (KV_INDEX_DIM + 4.0) + io);
}

static double operations(const struct kv_bench_dsa_case *c)
{
	double rows = (double)c->seqs * c->heads;

	return 2 * rows *
	       (c->what == KV_BENCH_DSA_ATTEND ? (double)c->top_k * (DIM + LATENT)
					       : (double)c->tokens * KV_INDEX_DIM);
}

static void *put(const void *from, size_t bytes)
{
	void *to = kv_bench_device_alloc(bytes);

	kv_bench_device_put(to, from, bytes);
	return to;
}

static void size_up(struct kv_bench_dsa *w)
{
	const struct kv_bench_dsa_case *c = w->c;
	bool index = c->what != KV_BENCH_DSA_ATTEND;
	int64_t touched = c->what == KV_BENCH_DSA_WRITE	   ? c->seqs
			  : c->what == KV_BENCH_DSA_ATTEND ? (int64_t)c->seqs * c->top_k
							   : (int64_t)c->seqs * c->tokens;

	w->view = (struct kv_view){.block_tokens = BLOCK,
				   .n_heads = 1,
				   .dtype = c->row == BF16 ? KV_BF16 : KV_BYTES,
				   .head_dim = c->row == BF16 ? DIM : c->row,
				   .block_stride = (int64_t)c->row * BLOCK,
				   .token_stride = index ? 0 : c->row,
				   .head_stride = index ? 0 : c->row,
				   .scale = 1};
	w->width = c->tokens ? (c->tokens + BLOCK - 1) / BLOCK : 1;
	w->scores_stride = (c->tokens + 3) / 4 * 4;
	w->n_calls = (int32_t)(ROTATED / (size_t)(touched * c->row) + 1);
	if (w->n_calls > MAX_CALLS)
		w->n_calls = MAX_CALLS;
	if (kv_bench_device == KV_DEVICE_HOST)
		w->n_calls = 1;
}

/* Random content, and the order of blocks; of attention what was chosen, of a write its slots. */
static int set_up(struct kv_bench_dsa *w)
{
	const struct kv_bench_dsa_case *c = w->c;
	bool attend = c->what == KV_BENCH_DSA_ATTEND, write = c->what == KV_BENCH_DSA_WRITE;
	size_t n = (size_t)c->seqs, n_q, n_chosen, n_slots, n_blocks, tile_bytes, workspace = 0;
	kv_cleanup(kv_freep) int32_t *lens = calloc(n, sizeof(*lens));
	kv_cleanup(kv_freep) char *tile = NULL;
	struct kv_sparse_mla_args a;
	uint64_t seed = 3;

	size_up(w);
	n_blocks = (size_t)w->n_calls * n * (size_t)w->width;
	n_slots = write ? (size_t)w->n_calls * n : 1;
	n_chosen = n * (size_t)c->top_k * (attend ? (size_t)w->n_calls : 1);
	n_q = n * (write ? KV_INDEX_DIM * 2 : (size_t)c->heads * (attend ? DIM * 2 : KV_INDEX_DIM));
	tile_bytes = TILE / (size_t)w->view.block_stride * (size_t)w->view.block_stride;
	tile = malloc(tile_bytes);
	w->host_table = malloc(n_blocks * sizeof(int32_t));
	w->host_slots = malloc(n_slots * sizeof(int64_t));
	w->host_chosen = calloc(n_chosen + 1, sizeof(int32_t));
	w->host_weights = calloc(n * (size_t)c->heads + 1, sizeof(float));
	w->host_q = malloc(n_q);
	if (!tile || !lens || !w->host_table || !w->host_slots || !w->host_chosen ||
	    !w->host_weights || !w->host_q)
		return -ENOMEM;
	for (size_t at = 0; at < tile_bytes; at += (size_t)w->view.block_stride)
		(attend ? random_latents : random_keys)(tile + at, c->row, &seed);
	if (!attend && !write)
		random_codes((uint8_t *)w->host_q, n_q, 0xbf, &seed);
	else
		for (size_t i = 0; i < n_q / 2; i++)
			kv_element_store(w->host_q, (int64_t)i, KV_BF16, (float)uniform(&seed));
	for (size_t i = 0; i < n * (size_t)c->heads; i++)
		w->host_weights[i] = (float)(0.5 + uniform(&seed));
	for (size_t i = 0; i < n; i++)
		lens[i] = c->tokens;
	for (size_t i = 0; i < n_blocks; i++) {
		size_t j = (size_t)below(&seed, (int64_t)i + 1);

		w->host_table[i] = w->host_table[j];
		w->host_table[j] = (int32_t)i;
	}
	for (size_t i = 0; write && i < n_slots; i++)
		w->host_slots[i] = (int64_t)w->host_table[i / BLOCK] * BLOCK + (int64_t)(i % BLOCK);
	for (size_t i = 0; attend && i < n_chosen; i++) {
		int64_t step = c->tokens / c->top_k, k = (int64_t)i % c->top_k;
		int64_t j = k * step + below(&seed, step), seq = (int64_t)i / c->top_k;

		w->host_chosen[i] =
			(int32_t)(w->host_table[seq * w->width + j / BLOCK] * BLOCK + j % BLOCK);
	}
	w->pool = w->view.base = kv_bench_device_alloc(n_blocks * (size_t)w->view.block_stride);
	kv_bench_device_tile(w->pool, n_blocks * (size_t)w->view.block_stride, tile, tile_bytes);
	w->q = put(w->host_q, n_q);
	w->weights = put(w->host_weights, (n * (size_t)c->heads + 1) * sizeof(float));
	w->table = put(w->host_table, n_blocks * sizeof(int32_t));
	w->slots = put(w->host_slots, n_slots * sizeof(int64_t));
	w->chosen = put(w->host_chosen, (n_chosen + 1) * sizeof(int32_t));
	w->lens = put(lens, n * sizeof(int32_t));
	w->scores =
		kv_bench_device_alloc(attend ? 0 : n * (size_t)w->scores_stride * sizeof(float));
	w->out = kv_bench_device_alloc(attend ? n * (size_t)c->heads * LATENT * 2 : 0);
	if (!attend)
		return 0;
	a = attend_args(w, 0);
	if (kv_sparse_mla_workspace_bytes(&a, &workspace) < 0)
		return -EINVAL;
	if (workspace)
		w->workspace = kv_bench_device_alloc(workspace);
	w->workspace_bytes = workspace;
	return 0;
}

static void tear_down(struct kv_bench_dsa *w)
{
	void *device[] = {w->pool,  w->q,    w->out,	w->weights, w->scores,
			  w->table, w->lens, w->chosen, w->slots,   w->workspace};
	void *host[] = {w->host_q, w->host_weights, w->host_table, w->host_chosen, w->host_slots};

	for (size_t i = 0; i < sizeof(device) / sizeof(*device); i++)
		if (device[i])
			kv_bench_device_free(device[i]);
	for (size_t i = 0; i < sizeof(host) / sizeof(*host); i++)
		free(host[i]);
}

static const char *row_name(int32_t row)
{
	return row == FP8 ? "e4m3" : row == FP4 ? "e2m1" : row == BF16 ? "bf16" : "packed";
}

static int run_case(struct kv_bench *b, const struct kv_bench_dsa_case *c, char *const *copy,
		    size_t copy_bytes)
{
	struct kv_emit *e = &b->emit;
	struct kv_bench_dsa w = {.c = c};
	double seconds = 0, error = 0, rate, moved = bytes_moved(c), flops = operations(c);
	const char *what = names[c->what];
	bool right;
	int r = set_up(&w);

	if (!r)
		r = call(&w, 0, NULL);
	if (!r)
		r = kv_bench_dsa_right(&w, &error);
	right = error < TOLERANCE;
	rate = r ? 0 : kv_bench_device_copy(copy[0], copy[1], copy_bytes);
	if (!r && right)
		r = kv_bench_device_time(call, &w, w.n_calls, &seconds);
	tear_down(&w);
	if (r)
		return kv_bench_broken(b, what, r);
	rate = (rate + kv_bench_device_copy(copy[0], copy[1], copy_bytes)) / 2;
	kv_emit_open(e, NULL, '{');
	kv_emit_text(e, "work", what);
	kv_emit_text(e, "rows", row_name(c->row));
	kv_emit_number(e, "heads", (uint64_t)c->heads);
	kv_emit_number(e, "batch", (uint64_t)c->seqs);
	kv_emit_number(e, "context", (uint64_t)c->tokens);
	kv_emit_number(e, "top_k", (uint64_t)c->top_k);
	kv_emit_real(e, "error", error);
	kv_emit_real(e, "seconds", right ? seconds : NAN);
	kv_emit_real(e, "bytes_per_second", right ? moved / seconds : NAN);
	kv_emit_real(e, "flops", right ? flops / seconds : NAN);
	kv_emit_real(e, "copy_bytes_per_second", rate);
	kv_emit_close(e);
	kv_emit_cell(e, "%s", what);
	kv_emit_cell(e, "%s", row_name(c->row));
	kv_emit_cell(e, "%d", c->heads);
	kv_emit_cell(e, "%d", c->seqs);
	kv_emit_cell(e, "%d", c->tokens);
	kv_emit_cell(e, "%d", c->top_k);
	kv_emit_cell(e, "%.1e", error);
	kv_emit_cell(e, right ? "%.2f" : "WRONG", seconds * 1e6);
	kv_emit_cell(e, right ? "%.3f" : "-", moved / seconds / 1e12);
	kv_emit_cell(e, right ? "%.1f" : "-", flops / seconds / 1e12);
	kv_emit_cell(e, right ? "%.3f" : "-", moved / seconds / rate);
	return right ? KV_BENCH_DONE
		     : kv_bench_refuse(b, KV_BENCH_FAILED,
				       "%s: %s, %d heads, %d of %d tokens are off by %g", what,
				       row_name(c->row), c->heads, c->seqs, c->tokens, error);
}

static bool runs(const struct kv_bench_dsa_case *c)
{
	return kv_bench_device != KV_DEVICE_HOST || c->host;
}

int kv_bench_dsa(struct kv_bench *b)
{
	uint64_t done = 0, n_cases = 0;
	size_t copy_bytes = COPY_BYTES;
	char name[128], *copy[2];
	int status = KV_BENCH_DONE;

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
		n_cases += runs(&cases[i]);
	if (!kv_bench_device_present(name, sizeof(name)))
		return kv_bench_refuse(b, KV_BENCH_FAILED,
				       "no GPU; --device host measures this machine");
	if (kv_bench_device == KV_DEVICE_HOST)
		copy_bytes /= 32;
	for (int i = 0; i < 2; i++)
		copy[i] = kv_bench_device_alloc(copy_bytes);
	kv_emit_open(&b->emit, NULL, '{');
	kv_emit_text(&b->emit, "device", name);
	kv_emit_open(&b->emit, "cases", '[');
	kv_emit_head(&b->emit, "<WORK", "<ROWS", ">HEADS", ">BATCH", ">CONTEXT", ">TOP_K", ">ERROR",
		     ">US", ">TB/S", ">TFLOP/S", ">OF COPY", NULL);
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		int s;

		if (!runs(&cases[i]))
			continue;
		kv_bench_progress(b, done++, n_cases, "cases");
		s = run_case(b, &cases[i], copy, copy_bytes);
		status = status ? status : s;
	}
	kv_bench_progress(b, n_cases, n_cases, "cases");
	kv_emit_close(&b->emit);
	kv_emit_close(&b->emit);
	kv_emit_table(&b->emit);
	for (int i = 0; i < 2; i++)
		kv_bench_device_free(copy[i]);
	return status;
}
