/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench mla: decode over latents (DeepSeek, Kimi: 512 + 64) and their write, beside the device's copy.
 *
 * A case is heads, sequences and tokens of each, and a format of rows. Blocks of 64 tokens lie in a
 * random order; the calls of a graph have blocks of their own until at least 256 MiB are touched. Before a
 * case is timed, rows of its first call are held against the reference on the host, which sums in double:
 * two heads, of the first and the last sequence. A wrong case has no time. Then copy, case, copy.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/attention.h>
#include <kvcached/mla.h>

#include "include/internal/cleanup.h"
#include "tools/bench/bench.h"
#include "tools/bench/device.h"
#include "tools/bench/noise.h"

#define ROTATED	   ((size_t)256 << 20)
#define MAX_CALLS  64
#define TILE	   ((size_t)8 << 20) /* bytes of random content, over and over */
#define COPY_BYTES ((size_t)1 << 30)
#define BLOCK	   64
#define LATENT	   512
#define ROPE	   64
#define DIM	   (LATENT + ROPE)
#define TOLERANCE  5e-3
#define SCALE	   0.0721688f /* 1 / sqrt(128 + 64) */

static const struct bench_case {
	int32_t heads, seqs, tokens; /* tokens 0: a write of seqs tokens */
	int32_t kv_dtype;
	bool host; /* small enough for a build without CUDA */
} cases[] = {
	{16, 1, 1024, KV_BF16, true},	 {16, 8, 1024, KV_BF16, true},
	{16, 32, 1024, KV_BF16, false},	 {16, 128, 1024, KV_BF16, false},
	{16, 1, 4096, KV_BF16, false},	 {16, 8, 4096, KV_BF16, false},
	{16, 32, 4096, KV_BF16, false},	 {16, 128, 4096, KV_BF16, false},
	{16, 1, 16384, KV_BF16, false},	 {16, 8, 16384, KV_BF16, false},
	{16, 32, 16384, KV_BF16, false}, {16, 128, 16384, KV_BF16, false},
	{128, 1, 1024, KV_BF16, false},	 {128, 8, 1024, KV_BF16, false},
	{128, 32, 1024, KV_BF16, false}, {128, 128, 1024, KV_BF16, false},
	{128, 1, 4096, KV_BF16, false},	 {128, 8, 4096, KV_BF16, false},
	{128, 32, 4096, KV_BF16, false}, {128, 128, 4096, KV_BF16, false},
	{128, 32, 16384, KV_BF16, false}, {16, 32, 4096, KV_F8_E4M3, false},
	{16, 32, 4096, KV_BYTES, false}, {128, 128, 4096, KV_F8_E4M3, false},
	{16, 128, 16384, KV_BYTES, false}, {128, 128, 4096, KV_BYTES, false}, {0, 1, 0, KV_BF16, true},
	{0, 128, 0, KV_BF16, true},	 {0, 8192, 0, KV_BF16, false},
	{0, 8192, 0, KV_F8_E4M3, false}, {0, 8192, 0, KV_BYTES, false},
};

struct work {
	const struct bench_case *c;
	int32_t n_calls, width; /* blocks of a sequence */
	int64_t blocks; /* of all calls */
	struct kv_view view;
	/* The device's. */
	char *pool, *q, *out;
	int32_t *table, *loc, *lens;
	int64_t *slots;
	void *workspace;
	size_t workspace_bytes;
	/* The host's. */
	uint16_t *host_q;
	int32_t *host_table;
};

/* Rows of random numbers in the case's format: whole rows, as many as fit in TILE. */
static char *random_rows(const struct work *w, size_t *ret_bytes)
{
	size_t row = (size_t)w->view.token_stride, n = TILE / row;
	char *to = malloc(n * row);
	uint64_t seed = 5;

	for (size_t i = 0; to && i < n; i++) {
		char *at = to + i * row;

		for (int d = 0; d < DIM; d++) {
			uint16_t h = to_bf16((float)uniform(&seed));
			uint8_t code = (uint8_t)(h >> 8 & 0x80) | (uint8_t)(seed >> 50 & 0x3f);

			if (w->c->kv_dtype == KV_BF16)
				memcpy(at + 2 * d, &h, 2);
			else if (w->c->kv_dtype == KV_BYTES && d >= LATENT)
				memcpy(at + LATENT + 16 + 2 * (d - LATENT), &h, 2);
			else
				at[d] = (char)code;
		}
		for (int s = 0; s < 4 && w->c->kv_dtype == KV_BYTES; s++) {
			float scale = 0.2f + (float)s / 10;

			memcpy(at + LATENT + 4 * s, &scale, sizeof(scale));
		}
	}
	*ret_bytes = n * row;
	return to;
}

static struct kv_attention_args attention_args(const struct work *w, int call)
{
	const struct bench_case *c = w->c;

	return (struct kv_attention_args){
		.size = sizeof(struct kv_attention_args),
		.device = kv_bench_device,
		.dtype = KV_BF16,
		.n_seqs = c->seqs,
		.n_tokens = c->seqs,
		.n_heads_q = c->heads,
		.max_query_len = 1,
		.max_seq_len = c->tokens,
		.table_width = w->width,
		.q = w->q,
		.out = w->out,
		.query_start_loc = w->loc,
		.seq_lens = w->lens,
		.block_table = w->table + (size_t)call * (size_t)c->seqs * (size_t)w->width,
		.k = w->view,
		.sm_scale = SCALE,
		.window_left = -1,
		.causal = 1,
		.workspace = w->workspace,
		.workspace_bytes = w->workspace_bytes,
		.latent_dim = LATENT,
		.rope_dim = ROPE,
	};
}

static int call(void *arg, int i, void *stream)
{
	const struct work *w = arg;
	struct kv_attention_args a;
	struct kv_mla_write_args write;

	if (w->c->tokens) {
		a = attention_args(w, i);
		a.stream = stream;
		return kv_attention(&a);
	}
	write = (struct kv_mla_write_args){.size = sizeof(write),
					   .device = kv_bench_device,
					   .dtype = KV_BF16,
					   .n_tokens = w->c->seqs,
					   .latent_dim = LATENT,
					   .rope_dim = ROPE,
					   .latent = w->q,
					   .rope = w->q + LATENT * 2,
					   .latent_stride = DIM,
					   .rope_stride = DIM,
					   .slots = w->slots + (int64_t)i * w->c->seqs,
					   .cache = w->view,
					   .stream = stream};
	return kv_mla_write(&write);
}

/* Bytes that a call must read and write, and what it calculates. */
static double bytes_moved(const struct work *w)
{
	double rows = (double)w->c->seqs * (w->c->tokens ? w->c->tokens : 1);
	double io = w->c->tokens ? (double)w->c->heads * (DIM + LATENT) : DIM;

	return rows * (double)w->view.token_stride + (double)w->c->seqs * io * 2;
}

static double operations(const struct work *w)
{
	return 2.0 * w->c->seqs * w->c->heads * w->c->tokens * (DIM + LATENT);
}

static int set_up(struct work *w)
{
	const struct bench_case *c = w->c;
	int64_t rows = c->tokens ? c->heads : 1, q_elements = (int64_t)c->seqs * rows * DIM;
	size_t per_call, tile_bytes, n;
	kv_cleanup(kv_freep) char *tile = NULL;
	kv_cleanup(kv_freep) int32_t *loc = calloc((size_t)c->seqs + 1, sizeof(*loc));
	kv_cleanup(kv_freep) int32_t *lens = calloc((size_t)c->seqs, sizeof(*lens));
	kv_cleanup(kv_freep) int64_t *slots = NULL;
	static const char zeros[4096];
	struct kv_attention_args a;
	uint64_t seed = 3;

	w->view = (struct kv_view){.block_tokens = BLOCK, .n_heads = 1, .dtype = c->kv_dtype, .scale = 1};
	w->view.head_dim = c->kv_dtype == KV_BYTES ? kv_mla_packed_bytes(LATENT, ROPE) : DIM;
	w->view.token_stride = w->view.head_dim * (int64_t)kv_dtype_bytes(c->kv_dtype);
	w->view.head_stride = w->view.token_stride;
	w->view.block_stride = w->view.token_stride * BLOCK;
	w->width = c->tokens ? (c->tokens + BLOCK - 1) / BLOCK : 1;
	per_call = (size_t)c->seqs * (size_t)w->width * (size_t)w->view.block_stride;
	w->n_calls = (int32_t)(ROTATED / per_call + 1);
	if (w->n_calls > MAX_CALLS)
		w->n_calls = MAX_CALLS;
	if (kv_bench_device == KV_DEVICE_HOST)
		w->n_calls = 1;
	w->blocks = (int64_t)w->n_calls * c->seqs * w->width;

	tile = random_rows(w, &tile_bytes);
	w->host_table = calloc((size_t)w->blocks, sizeof(int32_t));
	w->host_q = malloc((size_t)q_elements * 2);
	slots = calloc((size_t)w->blocks, sizeof(*slots));
	if (!tile || !loc || !lens || !slots || !w->host_table || !w->host_q)
		return -ENOMEM;
	for (int64_t i = 0; i < q_elements; i++)
		w->host_q[i] = to_bf16((float)uniform(&seed));
	for (int64_t i = 0; i < w->blocks; i++)
		w->host_table[i] = (int32_t)i;
	for (int64_t i = w->blocks - 1; i > 0; i--) {
		int64_t j = (int64_t)((uniform(&seed) + 1) / 2 * (double)(i + 1)) % (i + 1);
		int32_t t = w->host_table[i];

		w->host_table[i] = w->host_table[j];
		w->host_table[j] = t;
	}
	for (int64_t i = 0; i < w->blocks; i++)
		slots[i] = (int64_t)w->host_table[i] * BLOCK + i % BLOCK;
	for (int32_t i = 0; i <= c->seqs; i++)
		loc[i] = i;
	for (int32_t i = 0; i < c->seqs; i++)
		lens[i] = c->tokens;
	n = (size_t)w->blocks;
	w->pool = w->view.base = kv_bench_device_alloc(n * (size_t)w->view.block_stride);
	w->q = kv_bench_device_alloc((size_t)q_elements * 2);
	w->out = kv_bench_device_alloc((size_t)c->seqs * (size_t)rows * LATENT * 2);
	w->table = kv_bench_device_alloc(n * sizeof(int32_t));
	w->slots = kv_bench_device_alloc(n * sizeof(int64_t));
	w->loc = kv_bench_device_alloc(((size_t)c->seqs + 1) * sizeof(int32_t));
	w->lens = kv_bench_device_alloc((size_t)c->seqs * sizeof(int32_t));
	kv_bench_device_tile(w->pool, n * (size_t)w->view.block_stride, tile, tile_bytes);
	kv_bench_device_put(w->q, w->host_q, (size_t)q_elements * 2);
	kv_bench_device_put(w->table, w->host_table, n * sizeof(int32_t));
	kv_bench_device_put(w->slots, slots, n * sizeof(int64_t));
	kv_bench_device_put(w->loc, loc, ((size_t)c->seqs + 1) * sizeof(int32_t));
	kv_bench_device_put(w->lens, lens, (size_t)c->seqs * sizeof(int32_t));
	if (!c->tokens)
		return 0;
	a = attention_args(w, 0);
	if (kv_attention_workspace_bytes(&a, &w->workspace_bytes) < 0)
		return -EINVAL;
	if (w->workspace_bytes) {
		w->workspace = kv_bench_device_alloc(w->workspace_bytes);
		kv_bench_device_tile(w->workspace, w->workspace_bytes, zeros, sizeof(zeros));
	}
	return 0;
}

static void tear_down(struct work *w)
{
	void *device[] = {w->pool, w->q, w->out, w->table, w->slots, w->loc, w->lens, w->workspace};

	for (size_t i = 0; i < sizeof(device) / sizeof(*device); i++)
		if (device[i])
			kv_bench_device_free(device[i]);
	free(w->host_q);
	free(w->host_table);
}

/* Two heads of sequence @b by the reference, in a pool of that sequence's blocks. */
static int check_heads(const struct work *w, const uint16_t *out, int b, int head, double *error,
		       double *norm)
{
	const struct bench_case *c = w->c;
	size_t block = (size_t)w->view.block_stride;
	kv_cleanup(kv_freep) char *pool = malloc(block * (size_t)w->width);
	kv_cleanup(kv_freep) int32_t *table = malloc((size_t)w->width * sizeof(*table));
	float right[2 * LATENT];
	int32_t loc[] = {0, 1}, len = c->tokens;
	int64_t at = (int64_t)b * c->heads + head;
	struct kv_attention_args a = attention_args(w, 0);
	int r;

	if (!pool || !table)
		return -ENOMEM;
	for (int32_t i = 0; i < w->width; i++) {
		size_t id = (size_t)w->host_table[(size_t)b * (size_t)w->width + (size_t)i];

		kv_bench_device_get(pool + (size_t)i * block, w->pool + id * block, block);
		table[i] = i;
	}
	a.device = KV_DEVICE_HOST;
	a.n_seqs = a.n_tokens = 1;
	a.n_heads_q = 2;
	a.q = w->host_q + at * DIM;
	a.out = right;
	a.out_dtype = KV_F32;
	a.query_start_loc = loc;
	a.seq_lens = &len;
	a.block_table = table;
	a.k.base = pool;
	a.workspace = NULL;
	a.workspace_bytes = 0;
	r = kv_attention(&a);
	for (int d = 0; d < 2 * LATENT && !r; d++) {
		double x = (double)from_bf16(out[at * LATENT + d]), y = (double)right[d];

		*error += (x - y) * (x - y);
		*norm += y * y;
	}
	return r;
}

/* The rows that a write should have made, by the host's write. */
static int check_write(const struct work *w, double *ret_error)
{
	size_t row = (size_t)w->view.token_stride;
	char got[DIM * 2], right[DIM * 2];
	int64_t slot = 0;
	struct kv_mla_write_args a = {.size = sizeof(a),
				      .device = KV_DEVICE_HOST,
				      .dtype = KV_BF16,
				      .n_tokens = 1,
				      .latent_dim = LATENT,
				      .rope_dim = ROPE,
				      .slots = &slot,
				      .cache = w->view};
	int r = 0;

	*ret_error = 0;
	for (int32_t i = 0; i < w->c->seqs && !r; i += w->c->seqs > 64 ? w->c->seqs / 64 : 1) {
		int64_t to = (int64_t)w->host_table[i] * BLOCK + i % BLOCK;

		a.latent = w->host_q + (size_t)i * DIM;
		a.rope = w->host_q + (size_t)i * DIM + LATENT;
		a.cache.base = right;
		r = kv_mla_write(&a);
		kv_bench_device_get(got, w->pool + (size_t)to * row, row);
		if (memcmp(got, right, row) != 0)
			*ret_error = 1;
	}
	return r;
}

static int check(struct work *w, double *ret_error)
{
	size_t bytes = (size_t)w->c->seqs * (size_t)w->c->heads * LATENT * 2;
	kv_cleanup(kv_freep) uint16_t *out = malloc(bytes + 1);
	double error = 0, norm = 0;
	int r = out ? call(w, 0, NULL) : -ENOMEM;

	if (r)
		return r;
	if (!w->c->tokens)
		return check_write(w, ret_error);
	kv_bench_device_get(out, w->out, bytes);
	r = check_heads(w, out, 0, 0, &error, &norm);
	if (!r)
		r = check_heads(w, out, w->c->seqs - 1, w->c->heads - 2, &error, &norm);
	*ret_error = sqrt(error / norm);
	return r;
}

static int run_case(struct kv_bench *b, const struct bench_case *c, char *const *copy, size_t copy_bytes)
{
	static const char *const types[] = {[KV_BF16] = "bf16", [KV_F8_E4M3] = "e4m3", [KV_BYTES] = "packed"};
	const char *what = c->tokens ? "decode" : "write";
	struct kv_emit *e = &b->emit;
	struct work w = {.c = c};
	double seconds = 0, error = 0, rate, moved, flops;
	bool right;
	int r = set_up(&w);

	if (!r)
		r = check(&w, &error);
	right = error < TOLERANCE;
	rate = r ? 0 : kv_bench_device_copy(copy[0], copy[1], copy_bytes);
	if (!r && right)
		r = kv_bench_device_time(call, &w, w.n_calls, &seconds);
	if (r) {
		tear_down(&w);
		return kv_bench_broken(b, what, r);
	}
	rate = (rate + kv_bench_device_copy(copy[0], copy[1], copy_bytes)) / 2;
	moved = bytes_moved(&w);
	flops = operations(&w);
	tear_down(&w);
	kv_emit_open(e, NULL, '{');
	kv_emit_text(e, "work", what);
	kv_emit_text(e, "rows", types[c->kv_dtype]);
	kv_emit_number(e, "heads", (uint64_t)c->heads);
	kv_emit_number(e, "batch", (uint64_t)c->seqs);
	kv_emit_number(e, "context", (uint64_t)c->tokens);
	kv_emit_real(e, "error", error);
	kv_emit_real(e, "seconds", right ? seconds : NAN);
	kv_emit_real(e, "bytes_per_second", right ? moved / seconds : NAN);
	kv_emit_real(e, "flops", right ? flops / seconds : NAN);
	kv_emit_real(e, "copy_bytes_per_second", rate);
	kv_emit_close(e);
	kv_emit_cell(e, "%s", what);
	kv_emit_cell(e, "%s", types[c->kv_dtype]);
	kv_emit_cell(e, "%d", c->heads);
	kv_emit_cell(e, "%d", c->seqs);
	kv_emit_cell(e, "%d", c->tokens);
	kv_emit_cell(e, "%.1e", error);
	kv_emit_cell(e, right ? "%.2f" : "WRONG", seconds * 1e6);
	kv_emit_cell(e, right ? "%.3f" : "-", moved / seconds / 1e12);
	kv_emit_cell(e, right ? "%.0f" : "-", flops / seconds / 1e12);
	kv_emit_cell(e, right ? "%.3f" : "-", moved / seconds / rate);
	return right ? KV_BENCH_DONE
		     : kv_bench_refuse(b, KV_BENCH_FAILED, "%s: %d heads, %d of %d tokens are off by %g",
				       what, c->heads, c->seqs, c->tokens, error);
}

static bool runs(const struct bench_case *c)
{
	return kv_bench_device != KV_DEVICE_HOST || c->host;
}

int kv_bench_mla(struct kv_bench *b)
{
	uint64_t done = 0, n_cases = 0;
	size_t copy_bytes = COPY_BYTES;
	char name[128], *copy[2];
	int status = KV_BENCH_DONE;

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
		n_cases += runs(&cases[i]);
	if (!kv_bench_device_present(name, sizeof(name)))
		return kv_bench_refuse(b, KV_BENCH_FAILED, "no GPU; --device host measures this machine");
	if (kv_bench_device == KV_DEVICE_HOST)
		copy_bytes /= 8;
	for (int i = 0; i < 2; i++)
		copy[i] = kv_bench_device_alloc(copy_bytes);
	kv_emit_open(&b->emit, NULL, '{');
	kv_emit_text(&b->emit, "device", name);
	kv_emit_open(&b->emit, "cases", '[');
	kv_emit_head(&b->emit, "<WORK", "<ROWS", ">HEADS", ">BATCH", ">CONTEXT", ">ERROR", ">US", ">TB/S",
		     ">TFLOP/S", ">OF COPY", NULL);
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
