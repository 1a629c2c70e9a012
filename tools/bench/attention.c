/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench attention, write, merge: the kernels on blocks, each case beside the device's copy.
 *
 * A case is held against arithmetic in double before it is timed: one that is wrong has no time, and
 * the benchmark fails. Calls rotate over tables of disjoint blocks in random order, so that at least
 * ROTATED bytes are touched and nothing is warm in a cache.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dtype.h"
#include "tools/bench/bench.h"
#include "tools/bench/device.h"

#define ROTATED	 ((int64_t)256 << 20)
#define MAX_R	 64
#define NOISE	 (((int64_t)8 << 20) + 1280) /* bytes of noise that fill a pool, over and over */
#define MOST	 ((int64_t)100 << 30)	     /* bytes of a pool */
#define COPIED	 ((size_t)128 << 20)

struct point {
	int heads_q, heads_kv, dim, batch, context;
};

/* Where nothing is said: few and many heads, short and long. */
static const struct point points[] = {
	{32, 8, 128, 1, 1024},	{32, 8, 128, 8, 4096},	{32, 8, 128, 32, 4096}, {32, 8, 128, 8, 65536},
	{8, 1, 128, 8, 4096},	{8, 1, 128, 32, 16384}, {64, 8, 64, 1, 1024},	{64, 8, 64, 32, 4096},
};
#define N_POINTS (sizeof(points) / sizeof(points[0]))

static const struct {
	const char *name;
	int dtype;
	double tolerance; /* |out - answer| / |answer| */
} types[] = {{"f32", KV_F32, 1e-5},	{"f16", KV_F16, 6e-4},	   {"bf16", KV_BF16, 4e-3},
	     {"e4m3", KV_F8_E4M3, 5e-3}, {"e5m2", KV_F8_E5M2, 5e-3}};

struct result {
	double seconds, bytes, copy, error;
	char backend[KV_NAME_MAX];
};

static uint64_t noise_state = 1;

static uint32_t noise(void)
{
	noise_state ^= noise_state << 13;
	noise_state ^= noise_state >> 7;
	noise_state ^= noise_state << 17;
	return (uint32_t)(noise_state >> 32);
}

/* Uniform in [-2, 2), as elements of @dtype. */
static void fill_noise(void *to, int64_t n, int dtype)
{
	for (int64_t i = 0; i < n; i++)
		kv_element_store(to, i, dtype, (float)(int32_t)noise() * 0x1p-30f);
}

/* A device array of @n elements of noise. */
static void *noise_new(int64_t n, int dtype)
{
	int64_t element = (int64_t)kv_dtype_bytes(dtype);
	int64_t some = n < NOISE / element ? n : NOISE / element;
	void *device = kv_bench_device_alloc((size_t)(n * element));
	void *host = malloc((size_t)(some * element) + 1);

	if (!host)
		abort();
	fill_noise(host, some, dtype);
	kv_bench_device_tile(device, (size_t)(n * element), host, (size_t)(some * element));
	free(host);
	return device;
}

static void *upload(const void *from, size_t bytes)
{
	void *p = kv_bench_device_alloc(bytes);

	kv_bench_device_put(p, from, bytes);
	return p;
}

/* ---- attention ---- */

struct attention {
	struct kv_attention_args args; /* of table 0 */
	int32_t *tables;	       /* host, [n, batch, width] */
	int32_t *device_tables;
	int32_t *lens; /* host */
	int64_t n_keys;
	int n; /* tables */
	void *pool;
};

static int call_attention(void *context, int i, void *stream)
{
	struct attention *a = context;
	struct kv_attention_args args = a->args;

	args.block_table = a->device_tables + (int64_t)i * args.n_seqs * args.table_width;
	args.stream = stream;
	return kv_attention(&args);
}

/* Lengths of the batch: all the same, or lines of the file, again and again. Return: exit status. */
static int read_lengths(const struct kv_bench *b, const struct point *p, int32_t *lens)
{
	char line[64];
	int n = 0;
	FILE *f;

	for (int i = 0; i < p->batch; i++)
		lens[i] = p->context;
	if (!b->kernel.ragged)
		return KV_BENCH_DONE;
	f = fopen(b->kernel.ragged, "re");
	if (!f)
		return kv_bench_refuse(b, KV_BENCH_FAILED, "--ragged %s: can't be opened",
				       b->kernel.ragged);
	while (n < p->batch && fgets(line, sizeof(line), f)) {
		long len = strtol(line, NULL, 10);

		if (len > 0 && len <= 1 << 22)
			lens[n++] = (int32_t)len;
	}
	fclose(f);
	if (!n)
		return kv_bench_refuse(b, KV_BENCH_FAILED, "--ragged %s: no line has a length from 1",
				       b->kernel.ragged);
	for (int i = n; i < p->batch; i++)
		lens[i] = lens[i - n];
	return KV_BENCH_DONE;
}

static void view_init(struct kv_view *v, const struct point *p, int page, int dtype, bool hnd)
{
	int64_t row = (int64_t)p->dim * (int64_t)kv_dtype_bytes(dtype);

	*v = (struct kv_view){.block_stride = 2 * row * p->heads_kv * page,
			      .token_stride = hnd ? row : row * p->heads_kv,
			      .head_stride = hnd ? row * page : row,
			      .block_tokens = page,
			      .n_heads = p->heads_kv,
			      .head_dim = p->dim,
			      .dtype = dtype,
			      .scale = 1};
}

/* Tables of disjoint blocks in random order; block ids are shuffled over the whole pool. */
static void make_tables(struct attention *a, int width, int64_t n_blocks)
{
	int32_t *ids = malloc((size_t)n_blocks * sizeof(*ids));
	int64_t next = 0, rows = (int64_t)a->n * a->args.n_seqs;

	a->tables = calloc((size_t)(rows * width), sizeof(*a->tables));
	if (!ids || !a->tables)
		abort();
	for (int64_t i = 0; i < n_blocks; i++)
		ids[i] = (int32_t)i;
	for (int64_t i = n_blocks - 1; i > 0; i--) {
		int64_t j = noise() % (uint64_t)(i + 1);
		int32_t id = ids[i];

		ids[i] = ids[j];
		ids[j] = id;
	}
	for (int64_t r = 0; r < rows; r++) {
		int len = a->lens[r % a->args.n_seqs];

		for (int c = 0; c < (len + a->args.k.block_tokens - 1) / a->args.k.block_tokens; c++)
			a->tables[r * width + c] = ids[next++];
	}
	free(ids);
	a->device_tables = upload(a->tables, (size_t)(rows * width) * sizeof(*a->tables));
}

static int attention_new(const struct kv_bench *b, const struct point *p, struct attention *a)
{
	int kv_dtype = b->kernel.dtype, dtype = kv_dtype_bytes(kv_dtype) == 1 ? KV_BF16 : kv_dtype;
	int page = (int)b->kernel.page, width = 0, status;
	int32_t *loc = calloc((size_t)p->batch + 1, sizeof(*loc));
	int64_t n_blocks = 0, bytes, out = (int64_t)p->batch * p->heads_q * p->dim;
	struct kv_view *k = &a->args.k;

	*a = (struct attention){.lens = calloc((size_t)p->batch, sizeof(int32_t))};
	if (!loc || !a->lens)
		abort();
	status = read_lengths(b, p, a->lens);
	for (int i = 0; i < p->batch && !status; i++) {
		int blocks = (a->lens[i] + page - 1) / page;

		loc[i + 1] = i + 1;
		n_blocks += blocks;
		a->n_keys += a->lens[i];
		width = blocks > width ? blocks : width;
		a->args.max_seq_len = a->lens[i] > a->args.max_seq_len ? a->lens[i]
									: a->args.max_seq_len;
	}
	view_init(k, p, page, kv_dtype, b->kernel.hnd);
	bytes = n_blocks * k->block_stride;
	if (!status && bytes > MOST)
		status = kv_bench_refuse(b, KV_BENCH_FAILED, "%d sequences of %d tokens need %lld bytes",
					 p->batch, p->context, (long long)bytes);
	if (status) {
		free(loc);
		free(a->lens);
		return status;
	}
	a->n = kv_bench_device == KV_DEVICE_HOST ? 1 : (int)((ROTATED + bytes - 1) / bytes);
	a->n = a->n > MAX_R ? MAX_R : a->n;
	a->args.size = sizeof(a->args);
	a->args.device = kv_bench_device;
	a->args.dtype = dtype;
	a->args.n_seqs = a->args.n_tokens = p->batch;
	a->args.n_heads_q = p->heads_q;
	a->args.max_query_len = 1;
	a->args.table_width = width;
	make_tables(a, width, n_blocks * a->n);
	a->pool = noise_new(n_blocks * a->n * k->block_stride / (int64_t)kv_dtype_bytes(kv_dtype),
			    kv_dtype);
	k->base = a->pool;
	a->args.v = *k;
	a->args.v.base = (char *)a->pool + k->block_stride / 2;
	a->args.q = noise_new(out, dtype);
	a->args.out = kv_bench_device_alloc((size_t)out * kv_dtype_bytes(dtype));
	a->args.query_start_loc = upload(loc, ((size_t)p->batch + 1) * sizeof(*loc));
	a->args.seq_lens = upload(a->lens, (size_t)p->batch * sizeof(*a->lens));
	a->args.block_table = a->device_tables;
	a->args.window_left = -1;
	a->args.causal = 1;
	free(loc);
	if (kv_attention_workspace_bytes(&a->args, &a->args.workspace_bytes) < 0)
		return kv_bench_broken(b, "kv_attention_workspace_bytes", -1);
	a->args.workspace = noise_new((int64_t)a->args.workspace_bytes / 4 + 64, KV_F32);
	char *zeros = calloc(1, a->args.workspace_bytes + 1);

	if (!zeros)
		abort();
	kv_bench_device_put(a->args.workspace, zeros, a->args.workspace_bytes);
	free(zeros);
	return KV_BENCH_DONE;
}

static void attention_free(struct attention *a)
{
	kv_bench_device_free(a->pool);
	kv_bench_device_free((void *)(uintptr_t)a->args.q);
	kv_bench_device_free(a->args.out);
	kv_bench_device_free((void *)(uintptr_t)a->args.query_start_loc);
	kv_bench_device_free((void *)(uintptr_t)a->args.seq_lens);
	kv_bench_device_free(a->device_tables);
	kv_bench_device_free(a->args.workspace);
	free(a->tables);
	free(a->lens);
}

/* Row of head @h of the last sequence, in double, from what the device holds. @block: room for one */
static void answer(const struct attention *a, int seq, int h, const void *q, char *block, double *out)
{
	const struct kv_attention_args *args = &a->args;
	const struct kv_view *k = &args->k;
	int len = a->lens[seq], dim = k->head_dim, h_kv = h / (args->n_heads_q / k->n_heads);
	double l = 0, m = -INFINITY;

	memset(out, 0, (size_t)dim * sizeof(*out));
	for (int j = 0; j < len; j++) {
		int64_t id = a->tables[(int64_t)seq * args->table_width + j / k->block_tokens];
		const char *row = block + j % k->block_tokens * k->token_stride + h_kv * k->head_stride;
		double x = 0, factor, e;

		if (j % k->block_tokens == 0)
			kv_bench_device_get(block, (char *)a->pool + id * k->block_stride,
					    (size_t)k->block_stride);
		for (int d = 0; d < dim; d++)
			x += (double)kv_element_load(q, d, args->dtype) *
			     (double)kv_element_load(row, d, k->dtype);
		x /= sqrt(dim);
		factor = x > m ? exp(m - x) : 1;
		m = x > m ? x : m;
		e = exp(x - m);
		l = l * factor + e;
		for (int d = 0; d < dim; d++)
			out[d] = out[d] * factor +
				 e * (double)kv_element_load(row + k->block_stride / 2, d, k->dtype);
	}
	for (int d = 0; d < dim; d++)
		out[d] /= l;
}

/* |out - answer| / |answer| over the first and last head of the first and last sequence. */
static double attention_error(struct attention *a)
{
	const struct kv_attention_args *args = &a->args;
	int dim = args->k.head_dim;
	size_t element = kv_dtype_bytes(args->dtype), bytes = (size_t)dim * element;
	char *block = malloc((size_t)args->k.block_stride), *q = malloc(bytes), *got = malloc(bytes);
	double *right = malloc((size_t)dim * sizeof(*right)), error = 0, norm = 0;

	if (!block || !q || !got || !right)
		abort();
	for (int i = 0; i < 4; i++) {
		int seq = i / 2 ? args->n_seqs - 1 : 0, h = i % 2 ? args->n_heads_q - 1 : 0;
		size_t at = ((size_t)seq * (size_t)args->n_heads_q + (size_t)h) * bytes;

		kv_bench_device_get(q, (const char *)args->q + at, bytes);
		kv_bench_device_get(got, (const char *)args->out + at, bytes);
		answer(a, seq, h, q, block, right);
		for (int d = 0; d < dim; d++) {
			double x = (double)kv_element_load(got, d, args->dtype);

			error += (x - right[d]) * (x - right[d]);
			norm += right[d] * right[d];
		}
	}
	free(block);
	free(q);
	free(got);
	free(right);
	return sqrt(error / norm);
}

static double copy_rate(void)
{
	void *from = noise_new((int64_t)COPIED / 4, KV_F32), *to = kv_bench_device_alloc(COPIED);
	double rate = kv_bench_device_copy(to, from, COPIED);

	kv_bench_device_free(from);
	kv_bench_device_free(to);
	return rate;
}

static double tolerance_of(int dtype)
{
	for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
		if (types[i].dtype == dtype)
			return types[i].tolerance;
	return 0;
}

/* Times a case whose result is right, between two looks at the copy rate. Return: exit status. */
static int time_case(const struct kv_bench *b, const char *what,
		     int (*call)(void *context, int i, void *stream), void *context, int n,
		     struct result *ret)
{
	double before = copy_rate();

	if (kv_bench_device_time(call, context, n, &ret->seconds))
		return kv_bench_broken(b, what, -1);
	ret->copy = (before + copy_rate()) / 2;
	return KV_BENCH_DONE;
}

static int run_attention(const struct kv_bench *b, const struct point *p, struct result *ret)
{
	struct attention a;
	const char *backend;
	int status = attention_new(b, p, &a);

	if (status)
		return status;
	if (kv_attention_select(&a.args, &backend) < 0 || call_attention(&a, 0, NULL) < 0) {
		status = kv_bench_refuse(b, KV_BENCH_FAILED, "attention: %s", kv_error_text());
	} else {
		snprintf(ret->backend, sizeof(ret->backend), "%s", backend);
		ret->error = attention_error(&a);
		ret->bytes = (double)a.n_keys * 2 * p->heads_kv * p->dim *
			     (double)kv_dtype_bytes(b->kernel.dtype);
		if (!(ret->error <= tolerance_of(b->kernel.dtype)))
			status = kv_bench_refuse(b, KV_BENCH_FAILED,
						 "attention, %d/%d/%d %dx%d: off by %g, %g allowed: no time",
						 p->heads_q, p->heads_kv, p->dim, p->context, p->batch,
						 ret->error, tolerance_of(b->kernel.dtype));
		else
			status = time_case(b, "kv_attention", call_attention, &a, a.n, ret);
	}
	attention_free(&a);
	return status;
}

/* ---- write ---- */

static int call_write(void *context, int i, void *stream)
{
	struct kv_write_args args = *(struct kv_write_args *)context;

	args.stream = stream;
	return kv_write(&args);
}

/* Tokens of the batch at slots in random order; bf16, or f32, into the type asked for. */
static int run_write(const struct kv_bench *b, const struct point *p, struct result *ret)
{
	int kv_dtype = b->kernel.dtype, dtype = kv_dtype_bytes(kv_dtype) == 1 ? KV_BF16 : kv_dtype;
	int64_t n = p->batch, page = b->kernel.page, n_blocks = (n + page - 1) / page;
	int64_t row = (int64_t)p->heads_kv * p->dim;
	size_t bytes = (size_t)row * kv_dtype_bytes(dtype);
	int64_t *slots = malloc((size_t)n * sizeof(*slots));
	struct kv_write_args args = {.size = sizeof(args), .device = kv_bench_device, .dtype = dtype};
	char *from = malloc(bytes), *block;
	int status = KV_BENCH_DONE;

	if (!slots || !from)
		abort();
	for (int64_t t = 0; t < n; t++)
		slots[t] = t;
	for (int64_t t = n - 1; t > 0; t--) {
		int64_t j = noise() % (uint64_t)(t + 1), slot = slots[t];

		slots[t] = slots[j];
		slots[j] = slot;
	}
	view_init(&args.k, p, (int)page, kv_dtype, b->kernel.hnd);
	args.n_tokens = n;
	args.key = noise_new(n * row, dtype);
	args.value = noise_new(n * row, dtype);
	args.slots = upload(slots, (size_t)n * sizeof(*slots));
	args.k.base = kv_bench_device_alloc((size_t)(n_blocks * args.k.block_stride));
	args.v = args.k;
	args.v.base = (char *)args.k.base + args.k.block_stride / 2;
	block = malloc((size_t)args.k.block_stride);
	if (!block)
		abort();
	if (call_write(&args, 0, NULL) < 0)
		status = kv_bench_refuse(b, KV_BENCH_FAILED, "write: %s", kv_error_text());
	for (int64_t t = 0; t < n && !status; t += n > 8 ? n / 8 : 1) {
		kv_bench_device_get(from, (const char *)args.key + t * (int64_t)bytes, bytes);
		kv_bench_device_get(block, (char *)args.k.base + slots[t] / page * args.k.block_stride,
				    (size_t)args.k.block_stride);
		for (int64_t e = 0; e < row; e++) {
			const char *to = block + slots[t] % page * args.k.token_stride +
					 e / p->dim * args.k.head_stride;
			uint32_t right = 0;

			kv_element_store(&right, 0, kv_dtype, kv_element_load(from, e, dtype));
			if (memcmp(&right, to + e % p->dim * (int64_t)kv_dtype_bytes(kv_dtype),
				   kv_dtype_bytes(kv_dtype)) != 0 && !status)
				status = kv_bench_refuse(b, KV_BENCH_FAILED,
							 "write: token %lld, element %lld is wrong: no time",
							 (long long)t, (long long)e);
		}
	}
	ret->bytes = 2.0 * (double)(n * row) *
		     (double)(kv_dtype_bytes(dtype) + kv_dtype_bytes(kv_dtype));
	if (!status)
		status = time_case(b, "kv_write", call_write, &args, 8, ret);
	kv_bench_device_free((void *)(uintptr_t)args.key);
	kv_bench_device_free((void *)(uintptr_t)args.value);
	kv_bench_device_free((void *)(uintptr_t)args.slots);
	kv_bench_device_free(args.k.base);
	free(slots);
	free(from);
	free(block);
	return status;
}

/* ---- merge ---- */

#define PARTS 4

static int call_merge(void *context, int i, void *stream)
{
	struct kv_merge_args args = *(struct kv_merge_args *)context;

	args.stream = stream;
	return kv_merge(&args);
}

/* PARTS parts of the batch's rows. */
static int run_merge(const struct kv_bench *b, const struct point *p, struct result *ret)
{
	int64_t rows = (int64_t)p->batch * p->heads_q, n = rows * p->dim;
	int dtype = kv_dtype_bytes(b->kernel.dtype) == 1 ? KV_BF16 : b->kernel.dtype;
	size_t element = kv_dtype_bytes(dtype);
	struct kv_merge_args args = {.size = sizeof(args),
				     .device = kv_bench_device,
				     .dtype = dtype,
				     .n_parts = PARTS,
				     .n_tokens = p->batch,
				     .n_heads = p->heads_q,
				     .head_dim = p->dim,
				     .parts = noise_new(PARTS * n, dtype),
				     .part_lse = noise_new(PARTS * rows, KV_F32),
				     .out = kv_bench_device_alloc((size_t)n * element)};
	char *parts = malloc((size_t)(PARTS * n) * element), *out = malloc((size_t)n * element);
	float *lse = malloc((size_t)(PARTS * rows) * sizeof(*lse));
	int status = KV_BENCH_DONE;
	double error = 0, norm = 0;

	if (!parts || !out || !lse)
		abort();
	if (call_merge(&args, 0, NULL) < 0)
		status = kv_bench_refuse(b, KV_BENCH_FAILED, "merge: %s", kv_error_text());
	kv_bench_device_get(parts, args.parts, (size_t)(PARTS * n) * element);
	kv_bench_device_get(lse, args.part_lse, (size_t)(PARTS * rows) * sizeof(*lse));
	kv_bench_device_get(out, args.out, (size_t)n * element);
	for (int64_t i = 0; i < n; i++) {
		double sum = 0, weights = 0, x;

		for (int r = 0; r < PARTS; r++) {
			double w = exp((double)lse[r * rows + i / p->dim]);

			sum += w * (double)kv_element_load(parts, r * n + i, dtype);
			weights += w;
		}
		x = (double)kv_element_load(out, i, dtype) - sum / weights;
		error += x * x;
		norm += sum / weights * (sum / weights);
	}
	ret->error = sqrt(error / norm);
	ret->bytes = (double)((PARTS + 1) * n) * (double)element + 4.0 * PARTS * (double)rows;
	if (!status && !(ret->error <= tolerance_of(dtype)))
		status = kv_bench_refuse(b, KV_BENCH_FAILED, "merge: off by %g: no time", ret->error);
	if (!status)
		status = time_case(b, "kv_merge", call_merge, &args, 8, ret);
	kv_bench_device_free((void *)(uintptr_t)args.parts);
	kv_bench_device_free((void *)(uintptr_t)args.part_lse);
	kv_bench_device_free(args.out);
	free(parts);
	free(out);
	free(lse);
	return status;
}

/* ---- all three ---- */

static void show(struct kv_emit *e, const struct point *p, const struct result *r)
{
	kv_emit_open(e, NULL, '{');
	kv_emit_number(e, "heads_q", (uint64_t)p->heads_q);
	kv_emit_number(e, "heads_kv", (uint64_t)p->heads_kv);
	kv_emit_number(e, "head_dim", (uint64_t)p->dim);
	kv_emit_number(e, "batch", (uint64_t)p->batch);
	kv_emit_number(e, "context", (uint64_t)p->context);
	kv_emit_text(e, "backend", r->backend);
	kv_emit_real(e, "microseconds", r->seconds * 1e6);
	kv_emit_real(e, "bytes", r->bytes);
	kv_emit_real(e, "copy_bytes_per_second", r->copy);
	kv_emit_real(e, "of_copy", r->bytes / r->seconds / r->copy);
	kv_emit_real(e, "error", r->error);
	kv_emit_close(e);
	kv_emit_cell(e, "%d/%d/%d", p->heads_q, p->heads_kv, p->dim);
	kv_emit_cell(e, "%d", p->batch);
	kv_emit_cell(e, "%d", p->context);
	kv_emit_cell(e, "%s", r->backend);
	kv_emit_cell(e, "%.2f", r->seconds * 1e6);
	kv_emit_cell(e, "%.1f", r->bytes / r->seconds / 1e9);
	kv_emit_cell(e, "%.3f", r->bytes / r->seconds / r->copy);
	kv_emit_cell(e, "%.1e", r->error);
}

static int run_points(struct kv_bench *b,
		      int (*run)(const struct kv_bench *b, const struct point *p, struct result *ret))
{
	const struct kv_bench_kernel *k = &b->kernel;
	struct kv_emit *e = &b->emit;
	char device[128];
	int status = KV_BENCH_DONE;
	bool one = k->heads_q || k->batch || k->context;

	if (!kv_bench_device_present(device, sizeof(device)))
		return kv_bench_refuse(b, KV_BENCH_FAILED, "no GPU; --device host measures this machine");
	b->kernel.page = k->page ? k->page : 16;
	b->kernel.dtype = k->dtype ? k->dtype : KV_BF16;
	kv_emit_open(e, NULL, '{');
	kv_emit_text(e, "device", device);
	kv_emit_number(e, "page", b->kernel.page);
	kv_emit_open(e, "cases", '[');
	kv_emit_line(e, "%s, blocks of %u tokens; OF_COPY: of the rate of a copy beside it", device,
		     b->kernel.page);
	kv_emit_head(e, "<HEADS", ">BATCH", ">CONTEXT", "<BACKEND", ">US", ">GB/S", ">OF_COPY",
		     ">ERROR", NULL);
	for (size_t i = 0; i < (one ? 1 : N_POINTS) && !status; i++) {
		struct point p = points[i];
		struct result result = {.backend = "-"};

		p.heads_q = k->heads_q ? (int)k->heads_q : p.heads_q;
		p.heads_kv = k->heads_q ? (int)k->heads_kv : p.heads_kv;
		p.dim = k->heads_q ? (int)k->dim : p.dim;
		p.batch = k->batch ? (int)k->batch : p.batch;
		p.context = k->context ? (int)k->context : p.context;
		status = run(b, &p, &result);
		if (!status)
			show(e, &p, &result);
	}
	kv_emit_table(e);
	kv_emit_close(e);
	kv_emit_close(e);
	return status;
}

int kv_bench_attention(struct kv_bench *b)
{
	return run_points(b, run_attention);
}

int kv_bench_write(struct kv_bench *b)
{
	return run_points(b, run_write);
}

int kv_bench_merge(struct kv_bench *b)
{
	return run_points(b, run_merge);
}

int kv_bench_kernel_option(struct kv_bench *b, const char *option, const char *text)
{
	struct kv_bench_kernel *k = &b->kernel;
	char rest;

	if (!strcmp(option, "shape")) {
		if (sscanf(text, "%u/%u/%u%c", &k->heads_q, &k->heads_kv, &k->dim, &rest) == 3 &&
		    k->heads_kv && k->heads_q && k->heads_q % k->heads_kv == 0 && k->heads_q <= 1024 &&
		    k->dim && k->dim <= 1024)
			return KV_BENCH_DONE;
		return kv_bench_refuse(b, KV_BENCH_USAGE, "--shape: '%s' given, query heads/KV heads/"
				       "head size expected, as 32/8/128", text);
	}
	if (!strcmp(option, "dtype")) {
		for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
			if (!strcmp(types[i].name, text))
				k->dtype = types[i].dtype;
		return k->dtype ? KV_BENCH_DONE
				: kv_bench_refuse(b, KV_BENCH_USAGE, "--dtype: '%s' given; f32, f16, "
						  "bf16, e4m3 or e5m2 expected", text);
	}
	if (!strcmp(option, "layout")) {
		k->hnd = !strcmp(text, "hnd");
		return k->hnd || !strcmp(text, "nhd")
			       ? KV_BENCH_DONE
			       : kv_bench_refuse(b, KV_BENCH_USAGE, "--layout: '%s' given, nhd or hnd "
						 "expected", text);
	}
	k->ragged = text;
	return KV_BENCH_DONE;
}
