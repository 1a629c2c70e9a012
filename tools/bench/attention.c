/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench attention: decode, verify, extend and prefill over blocks in random order.
 *
 * A case: sequences with so many new tokens and tokens in all, or lengths of a file. Its pool has room for
 * as many block tables as it takes to touch KV_BENCH_ROTATED bytes, or is as large as --pool says, with the
 * blocks all over it and calls that go over its layers.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dtype.h"
#include "tools/bench/paged.h"
#include "tools/bench/trace.h"

#define MOST	  ((int64_t)120 << 30) /* bytes of a pool */
#define MAX_LEN	  (1 << 22)
#define LONG_TAIL 4 /* times the mean: no random length is longer */

static int call_attention(void *context, int i, void *stream)
{
	struct kv_bench_attention *a = context;
	struct kv_attention_args args = a->args;
	int64_t rows = (int64_t)a->starts[args.n_seqs] * args.n_heads_q;
	int64_t q_bytes = rows * args.k.head_dim * (int64_t)kv_dtype_bytes(args.dtype);
	int layer = i % a->layers, table = i % a->n;
	int64_t more = a->c.flat ? layer * (a->block_stride / a->layers)
				 : layer * 2 * (a->v_at - a->k_at);

	args.block_table = a->device_tables + (int64_t)table * args.n_seqs * args.table_width;
	args.k.base = (char *)args.k.base + more;
	args.v.base = (char *)args.v.base + more;
	args.q = (const char *)args.q + table * q_bytes;
	args.out = (char *)args.out + table * q_bytes;
	args.lse += table * rows;
	args.stream = stream;
	return kv_attention(&args);
}

/* ---- lengths ---- */

/* Inputs of a trace's requests, or a number a line. @ret: [n], taken at even distances. */
static int read_lengths(const struct kv_bench *b, int n, int32_t *ret)
{
	const char *path = b->kernel.ragged;
	int32_t *all = NULL;
	size_t n_all = 0;
	struct kv_trace trace;
	char line[256];
	FILE *f = fopen(path, "re");

	if (!f)
		return kv_bench_refuse(b, KV_BENCH_FAILED, "--ragged %s: can't be opened", path);
	while (fgets(line, sizeof(line), f) && line[0] != '{') {
		long len = strtol(line, NULL, 10);

		if (len < 1 || len > MAX_LEN)
			continue;
		all = realloc(all, (n_all + 1) * sizeof(*all));
		if (!all)
			abort();
		all[n_all++] = (int32_t)len;
	}
	fclose(f);
	if (!n_all && kv_trace_read(path, &trace, line, sizeof(line)) == 0) {
		all = malloc(trace.n_requests * sizeof(*all));
		if (!all)
			abort();
		for (size_t i = 0; i < trace.n_requests; i++)
			if (trace.requests[i].input_length <= MAX_LEN)
				all[n_all++] = (int32_t)trace.requests[i].input_length;
		kv_trace_deinit(&trace);
	}
	if (!n_all) {
		free(all);
		return kv_bench_refuse(b, KV_BENCH_FAILED, "--ragged %s: no line has a length from 1, "
				       "and it is no trace", path);
	}
	for (size_t i = 0; i < (size_t)n; i++)
		ret[i] = all[n_all < (size_t)n ? i % n_all : i * n_all / (size_t)n];
	free(all);
	return KV_BENCH_DONE;
}

/* Lengths of the batch; those of a file are stretched to the mean that --context or --point gives. */
static int make_lengths(const struct kv_bench *b, struct kv_bench_attention *a)
{
	const struct kv_bench_case *c = &a->c;
	const char *ragged = b->kernel.ragged;
	double sum = 0, stretch;
	int status;

	for (int i = 0; i < c->batch; i++)
		a->lens[i] = c->context;
	if (!c->ragged)
		return KV_BENCH_DONE;
	if (!strcmp(ragged, "random")) { /* an exponential law */
		for (int i = 0; i < c->batch; i++) {
			double u = -log(((double)kv_bench_random() + 1) * 0x1p-32);

			a->lens[i] = 1 + (int)((u < LONG_TAIL ? u : LONG_TAIL) * c->context);
		}
		return KV_BENCH_DONE;
	}
	status = read_lengths(b, c->batch, a->lens);
	for (int i = 0; i < c->batch && !status; i++)
		sum += a->lens[i];
	stretch = b->kernel.context.n || b->kernel.n_points ? (double)c->context * c->batch / sum : 1;
	for (int i = 0; i < c->batch && !status; i++) {
		double len = a->lens[i] * stretch;

		a->lens[i] = len < 1 ? 1 : (int32_t)(len < MAX_LEN ? len : MAX_LEN);
	}
	return status;
}

/* Rows of q, and what there is to read and to calculate. Return: blocks of a table. */
static int64_t count(struct kv_bench_attention *a)
{
	struct kv_attention_args *args = &a->args;
	const struct kv_bench_case *c = &a->c;
	int64_t n_ids = 0;

	for (int s = 0; s < c->batch; s++) {
		int len = a->lens[s], blocks = (len + c->page - 1) / c->page, keys = len;
		int q = (int)((int64_t)c->query * len / c->context);

		q = !c->ragged || c->query == 1 ? c->query : q < 1 ? 1 : q;
		q = q > len ? len : q;
		a->starts[s + 1] = a->starts[s] + q;
		n_ids += blocks;
		args->table_width = blocks > args->table_width ? blocks : args->table_width;
		args->max_seq_len = len > args->max_seq_len ? len : args->max_seq_len;
		args->max_query_len = q > args->max_query_len ? q : args->max_query_len;
		for (int i = 0; i < q; i++) {
			int64_t p = (int64_t)len - q + i;
			int64_t lo = args->window_left >= 0 && p > args->window_left
					     ? p - args->window_left
					     : 0;

			a->n_pairs += (double)(p + 1 - lo) * c->heads_q;
			if (i == 0)
				keys = len - (int)lo;
		}
		a->n_keys += keys;
	}
	return n_ids;
}

/* ---- a case's memory ---- */

/* Tables of disjoint blocks in random order, of ids from the whole pool. */
static void make_tables(struct kv_bench_attention *a, int64_t n_blocks)
{
	int width = a->args.table_width;
	int32_t *ids = malloc((size_t)n_blocks * sizeof(*ids));
	int64_t next = 0, rows = (int64_t)a->n * a->args.n_seqs;

	a->tables = calloc((size_t)(rows * width), sizeof(*a->tables));
	if (!ids || !a->tables)
		abort();
	for (int64_t i = 0; i < n_blocks; i++)
		ids[i] = (int32_t)i;
	for (int64_t i = n_blocks - 1; i > 0; i--) {
		int64_t j = kv_bench_random() % (uint64_t)(i + 1);
		int32_t id = ids[i];

		ids[i] = ids[j];
		ids[j] = id;
	}
	for (int64_t r = 0; r < rows; r++)
		for (int c = 0; c * a->c.page < a->lens[r % a->args.n_seqs]; c++)
			a->tables[r * width + c] = ids[next++];
	free(ids);
	a->device_tables = kv_bench_upload(a->tables, (size_t)(rows * width) * sizeof(*a->tables));
}

/* Where K and V of layer 0 lie, and how many tables there are. Return: exit status. */
static int place(const struct kv_bench *b, struct kv_bench_attention *a, int64_t n_ids)
{
	const struct kv_bench_case *c = &a->c;
	int64_t row = (int64_t)c->dim * (int64_t)kv_dtype_bytes(c->dtype);
	int64_t half = row * c->heads_kv * c->page, block = 2 * half * a->layers, n_blocks, bytes;
	int64_t read = (int64_t)a->n_keys * 2 * row * c->heads_kv;
	int64_t most = c->query > 1 ? 2 : KV_BENCH_MAX_R;

	a->n = (int)((KV_BENCH_ROTATED + read - 1) / read < most ? (KV_BENCH_ROTATED + read - 1) / read
								  : most);
	if (kv_bench_device == KV_DEVICE_HOST)
		a->n = 1;
	n_blocks = n_ids * a->n;
	if (b->kernel.pool_gib) {
		n_blocks = ((int64_t)b->kernel.pool_gib << 30) / block;
		if (n_ids * a->n > n_blocks)
			a->n = (int)(n_blocks / n_ids);
	}
	bytes = n_blocks * block;
	if (!a->n || bytes > MOST || n_blocks > INT32_MAX)
		return kv_bench_refuse(b, KV_BENCH_FAILED, "%s: %lld blocks of %lld bytes are needed, a "
				       "pool has room for %lld of them",
				       kv_bench_case_name(c).text, (long long)n_ids, (long long)block,
				       (long long)((b->kernel.pool_gib ? (int64_t)b->kernel.pool_gib << 30
								       : MOST) / block));
	make_tables(a, n_blocks);
	a->args.k = kv_bench_view(c, a->layers);
	a->args.k.scale = kv_dtype_bytes(c->dtype) == 1 ? 0.5f : 1;
	a->args.v = a->args.k;
	a->args.v.scale = kv_dtype_bytes(c->dtype) == 1 ? 0.25f : 1;
	a->block_stride = a->args.k.block_stride;
	a->v_at = c->flat ? half : half * n_blocks;
	a->args.k.base = kv_bench_pool(bytes, c->dtype);
	a->args.v.base = (char *)a->args.k.base + a->v_at;
	return KV_BENCH_DONE;
}

static int attention_new(const struct kv_bench *b, const struct kv_bench_case *c,
			 struct kv_bench_attention *a)
{
	struct kv_attention_args *args = &a->args;
	int64_t n_ids, rows;
	size_t bytes;
	int status;

	*a = (struct kv_bench_attention){.c = *c,
					 .lens = calloc((size_t)c->batch, sizeof(int32_t)),
					 .starts = calloc((size_t)c->batch + 1, sizeof(int32_t)),
					 .layers = (int)(b->kernel.layers ?: 1)};
	if (!a->lens || !a->starts)
		abort();
	if (c->query > c->context)
		return kv_bench_refuse(b, KV_BENCH_USAGE, "--query: %d new tokens given, of %d in all",
				       c->query, c->context);
	args->size = sizeof(*args);
	args->device = kv_bench_device;
	args->dtype = kv_bench_wide_type(c->dtype);
	args->n_seqs = c->batch;
	args->n_heads_q = c->heads_q;
	args->window_left = b->kernel.window ? (int32_t)b->kernel.window - 1 : -1;
	args->softcap = (float)b->kernel.softcap;
	args->causal = 1;
	args->invariant = b->kernel.invariant;
	status = make_lengths(b, a);
	if (status)
		return status;
	n_ids = count(a);
	status = place(b, a, n_ids);
	if (status)
		return status;
	rows = (int64_t)a->starts[c->batch] * a->n;
	bytes = (size_t)(rows * c->heads_q * c->dim) * kv_dtype_bytes(args->dtype);
	args->n_tokens = a->starts[c->batch];
	args->q = kv_bench_noise_new(rows * c->heads_q * c->dim, args->dtype);
	args->out = kv_bench_device_alloc(bytes);
	args->lse = kv_bench_device_alloc((size_t)(rows * c->heads_q) * sizeof(float));
	args->query_start_loc = kv_bench_upload(a->starts, ((size_t)c->batch + 1) * sizeof(int32_t));
	args->seq_lens = kv_bench_upload(a->lens, (size_t)c->batch * sizeof(int32_t));
	args->block_table = a->device_tables;
	if (kv_attention_workspace_bytes(args, &args->workspace_bytes) < 0)
		return kv_bench_broken(b, "kv_attention_workspace_bytes", -1);
	char *zeros = calloc(1, args->workspace_bytes + 1);

	if (!zeros)
		abort();
	args->workspace = kv_bench_upload(zeros, args->workspace_bytes);
	free(zeros);
	return KV_BENCH_DONE;
}

static void attention_free(struct kv_bench_attention *a)
{
	void *device[] = {(void *)(uintptr_t)a->args.q, a->args.out, a->args.lse,
			  (void *)(uintptr_t)a->args.query_start_loc,
			  (void *)(uintptr_t)a->args.seq_lens, a->device_tables, a->args.workspace};

	for (size_t i = 0; i < sizeof(device) / sizeof(device[0]); i++)
		if (device[i])
			kv_bench_device_free(device[i]);
	free(a->tables);
	free(a->lens);
	free(a->starts);
}

int kv_bench_run_attention(const struct kv_bench *b, const struct kv_bench_case *c,
			   struct kv_bench_result *ret)
{
	struct kv_bench_attention a;
	const char *backend;
	int status = attention_new(b, c, &a);

	if (!status && (kv_attention_select(&a.args, &backend) < 0 || call_attention(&a, 0, NULL) < 0))
		status = kv_bench_refuse(b, KV_BENCH_FAILED, "%s: %s", kv_bench_case_name(c).text,
					 kv_error_text());
	if (!status) {
		int64_t row = (int64_t)c->dim * (int64_t)kv_dtype_bytes(c->dtype);

		snprintf(ret->backend, sizeof(ret->backend), "%s", backend);
		ret->error = kv_bench_attention_error(&a);
		ret->bytes = a.n_keys * 2 * (double)(c->heads_kv * row);
		ret->flops = c->query > 1 ? 4 * a.n_pairs * c->dim : 0;
		if (!(ret->error <= kv_bench_tolerance(c->dtype)))
			status = kv_bench_refuse(b, KV_BENCH_FAILED, "%s: off by %g, %g allowed: no time",
						 kv_bench_case_name(c).text, ret->error,
						 kv_bench_tolerance(c->dtype));
	}
	if (!status)
		status = kv_bench_time_case(b, "kv_attention", call_attention, &a,
					    a.n > a.layers ? a.n : a.layers, false, ret);
	attention_free(&a);
	return status;
}
