/* SPDX-License-Identifier: Apache-2.0 */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/error.h"
#include "kernels/simd.h"
#include "tests/kernels/buffer.h"
#include "tests/support/expect.h"
#include "tests/kernels/number.h"
#include "tests/kernels/problem.h"

/*
 * Error allowed, |out - answer| / |answer|, by the type of out. All backends calculate in f32, so
 * an 8-bit cache (its answer is that of the values it holds) costs nothing on top; one that rounds
 * weights to 16 bits would need 5e-3 there.
 *	f32   sums of some 1000 products, and softcap's e^(50 tanh x): a few 1e-6 seen
 *	f16   rounding is 2^-12 of an element on average
 *	bf16  rounding is 2^-9
 * One row alone may err by 4 times as much: it has few elements to average over.
 */
static const double tolerances[] = {[KV_F32] = 1e-5, [KV_F16] = 6e-4, [KV_BF16] = 4e-3};

#define LSE_TOLERANCE 1e-4 /* absolute */
#define ROW_FACTOR    4

enum { ROLE_Q, ROLE_K, ROLE_V };

struct problem_spec problem_default(void)
{
	struct problem_spec spec = {
		.n_heads_kv = 2,
		.group = 3,
		.dk = 64,
		.dv = 64,
		.block_tokens = 16,
		.dtype = KV_F16,
		.k_dtype = KV_F16,
		.v_dtype = KV_F16,
		.k_scale = 1,
		.v_scale = 1,
		.kind = KV_LAYOUT_FLAT,
		.window_left = -1,
		.causal = 1,
	};

	for (int i = 0; i < PROBLEM_SEQS; i++)
		spec.names[i] = i;
	return spec;
}

static int n_blocks_of(const struct problem_spec *spec, int b)
{
	return (spec->lens[b] + spec->block_tokens - 1) / spec->block_tokens;
}

/* Strides inside a block; returns its bytes. */
static int64_t view_init(struct kv_view *view, const struct problem_spec *spec, int dtype, int dim,
			 float scale)
{
	int64_t row = (int64_t)(dim + spec->gap) * (int64_t)kv_dtype_bytes(dtype);

	*view = (struct kv_view){.block_tokens = spec->block_tokens,
				 .n_heads = spec->n_heads_kv,
				 .head_dim = dim,
				 .dtype = dtype,
				 .scale = dtype == KV_F8_E4M3 ? scale : 1};
	view->token_stride = spec->head_major ? row : row * spec->n_heads_kv;
	view->head_stride = spec->head_major ? row * spec->block_tokens : row;
	return (row * spec->n_heads_kv * spec->block_tokens + 255) / 256 * 256;
}

/* Returns the bytes of the pool; bases of the views are offsets until it is there. */
static size_t lay_out(struct problem *p, int64_t n_blocks)
{
	const struct problem_spec *spec = &p->spec;
	struct kv_view *k = &p->args.k, *v = &p->args.v;
	int64_t k_bytes = view_init(k, spec, spec->k_dtype, spec->dk, spec->k_scale);
	int64_t v_bytes = view_init(v, spec, spec->v_dtype, spec->dv, spec->v_scale);

	if (spec->kind == KV_LAYOUT_FLAT) {
		k->block_stride = v->block_stride = k_bytes + v_bytes;
		v->base = (char *)(uintptr_t)k_bytes;
	} else {
		k->block_stride = k_bytes;
		v->block_stride = v_bytes;
		v->base = (char *)(uintptr_t)(k_bytes * n_blocks);
	}
	return (size_t)((k_bytes + v_bytes) * n_blocks);
}

/* The value that the test means element (role, position, head, d) of sequence @name to have. */
static double meant(int name, int role, int64_t position, int64_t head, int64_t d)
{
	double width[] = {[ROLE_Q] = 2, [ROLE_K] = 2, [ROLE_V] = 1};

	return width[role] * number_random((uint64_t)name, (uint64_t)role,
					   (uint64_t)(position * 1024 + head), (uint64_t)d);
}

/*
 * Stores K or V of sequence @b into the pool's image and returns the values that are then there:
 * [len, n_heads, dim].
 */
static double *store(const struct problem *p, int b, int role, const int32_t *table, char *image)
{
	const struct kv_view *view = role == ROLE_K ? &p->args.k : &p->args.v;
	int64_t len = p->spec.lens[b], n = 0;
	double *values = calloc((size_t)(len * view->n_heads * view->head_dim) + 1, sizeof(double));

	for (int64_t j = 0; j < len; j++) {
		for (int64_t h = 0; h < view->n_heads; h++) {
			char *row = image + (uintptr_t)view->base +
				    table[j / view->block_tokens] * view->block_stride +
				    j % view->block_tokens * view->token_stride +
				    h * view->head_stride;

			for (int64_t d = 0; d < view->head_dim; d++) {
				double x = meant(p->spec.names[b], role, j, h, d);
				uint32_t code = number_encode(view->dtype, x / view->scale);

				number_set(row, d, view->dtype, code);
				values[n++] = number_decode(view->dtype, code) * view->scale;
			}
		}
	}
	return values;
}

/* A sequence's part of the answer: values that are stored, and where its queries begin. */
struct sequence {
	int len;
	int q_len;
	int first_row;
	double *q; /* [q_len, n_heads_q, dk] */
	double *k; /* [len, n_heads_kv, dk] */
	double *v; /* [len, n_heads_kv, dv] */
};

/* Softmax over the keys that query @i sees, in head @h; @x: room for len scores. */
static void answer_row(const struct problem *p, const struct sequence *seq, int64_t i, int64_t h,
		       double *x)
{
	const struct problem_spec *spec = &p->spec;
	int64_t n = spec->n_heads_kv, h_kv = h / spec->group, pos = seq->len - seq->q_len + i;
	const double *q = seq->q + (i * p->n_heads_q + h) * spec->dk;
	const double *k = seq->k + h_kv * spec->dk, *v = seq->v + h_kv * spec->dv;
	int64_t at = (seq->first_row + i) * p->n_heads_q + h;
	double *out = p->out + at * spec->dv;
	double scale = spec->sm_scale != 0 ? spec->sm_scale : 1 / sqrt(spec->dk);
	int64_t lo = spec->window_left < 0 ? 0 : pos - spec->window_left;
	int64_t hi = spec->causal ? pos : seq->len - 1;
	double m = -INFINITY, l = 0;

	lo = lo < 0 ? 0 : lo;
	for (int64_t j = lo; j <= hi; j++) {
		x[j] = 0;
		for (int d = 0; d < spec->dk; d++)
			x[j] += q[d] * k[j * n * spec->dk + d];
		x[j] *= scale;
		if (spec->softcap > 0)
			x[j] = spec->softcap * tanh(x[j] / spec->softcap);
		m = fmax(m, x[j]);
	}
	for (int64_t j = lo; j <= hi; j++) {
		double e = exp(x[j] - m);

		l += e;
		for (int d = 0; d < spec->dv; d++)
			out[d] += e * v[j * n * spec->dv + d];
	}
	for (int d = 0; d < spec->dv && l > 0; d++)
		out[d] /= l;
	p->lse[at] = l > 0 ? m + log(l) : -INFINITY;
}

static void answer(struct problem *p, const struct sequence *seq)
{
	double *x = calloc((size_t)seq->len + 1, sizeof(*x));

	for (int64_t i = 0; i < seq->q_len; i++)
		for (int64_t h = 0; h < p->n_heads_q; h++)
			answer_row(p, seq, i, h, x);
	free(x);
}

/* Stores q of a sequence into its image; returns the values that are then there. */
static double *store_q(const struct problem *p, const struct sequence *seq, int name, char *image)
{
	const struct problem_spec *spec = &p->spec;
	int64_t n = 0, per_row = (int64_t)p->n_heads_q * spec->dk;
	double *values = calloc((size_t)(seq->q_len * per_row) + 1, sizeof(double));

	for (int64_t i = 0; i < seq->q_len; i++) {
		for (int64_t h = 0; h < p->n_heads_q; h++) {
			for (int64_t d = 0; d < spec->dk; d++) {
				double x = meant(name, ROLE_Q, seq->len - seq->q_len + i, h, d);
				uint32_t code = number_encode(spec->dtype, x);

				number_set(image, seq->first_row * per_row + n, spec->dtype, code);
				values[n++] = number_decode(spec->dtype, code);
			}
		}
	}
	return values;
}

/* Ids of the blocks of all sequences: 0, the last and one in the middle belong to none. */
static int32_t *new_ids(const struct problem_spec *spec, int n_used, int n_blocks)
{
	int32_t *ids = calloc((size_t)n_blocks, sizeof(*ids));

	for (int i = 0, id = 1; i < n_used; i++, id++) {
		if (id == n_blocks / 2)
			id++;
		ids[i] = id;
	}
	for (int i = n_used - 1; i > 0; i--) {
		double x = number_random((uint64_t)spec->shuffle, 99, (uint64_t)i, 0);
		int j = (int)((x + 1) / 2 * (i + 1));
		int32_t id = ids[i];

		ids[i] = ids[j];
		ids[j] = id;
	}
	return ids;
}

static void *upload(const void *from, size_t bytes)
{
	void *p = buffer_new(bytes);

	buffer_put(p, from, bytes);
	return p;
}

struct problem *problem_new(const struct problem_spec *spec)
{
	struct problem *p = calloc(1, sizeof(*p));
	struct kv_attention_args *args = &p->args;
	int n_used = 0, n_blocks, width = 1;
	int32_t *ids, *next, *table, loc[PROBLEM_SEQS + 1] = {0};
	size_t q_bytes;
	char *pool, *q;

	p->spec = *spec;
	p->n_heads_q = spec->n_heads_kv * spec->group;
	for (int b = 0; b < spec->n_seqs; b++) {
		n_used += n_blocks_of(spec, b);
		width = n_blocks_of(spec, b) > width ? n_blocks_of(spec, b) : width;
		loc[b + 1] = loc[b] + spec->q_lens[b];
		if (spec->q_lens[b] > args->max_query_len)
			args->max_query_len = spec->q_lens[b];
		if (spec->lens[b] > args->max_seq_len)
			args->max_seq_len = spec->lens[b];
	}
	p->n_rows = loc[spec->n_seqs];
	n_blocks = n_used + 3;
	ids = new_ids(spec, n_used, n_blocks);
	p->pool_bytes = lay_out(p, n_blocks);
	pool = malloc(p->pool_bytes);
	memset(pool, 0xff, p->pool_bytes); /* NaN in every type */
	q_bytes = (size_t)(p->n_rows + spec->spare_rows) * (size_t)p->n_heads_q * (size_t)spec->dk *
		  kv_dtype_bytes(spec->dtype);
	q = malloc(q_bytes + 1);
	memset(q, 0xff, q_bytes);
	table = calloc((size_t)(spec->n_seqs * width) + 1, sizeof(*table)); /* padded with 0 */
	p->out = calloc((size_t)(p->n_rows * p->n_heads_q * spec->dv) + 1, sizeof(double));
	p->lse = calloc((size_t)(p->n_rows * p->n_heads_q) + 1, sizeof(double));

	next = ids;
	for (int b = 0; b < spec->n_seqs; b++) {
		int32_t *row = table + b * width;
		struct sequence seq = {spec->lens[b], spec->q_lens[b], loc[b], NULL, NULL, NULL};

		memcpy(row, next, (size_t)n_blocks_of(spec, b) * sizeof(*row));
		next += n_blocks_of(spec, b);
		seq.q = store_q(p, &seq, spec->names[b], q);
		seq.k = store(p, b, ROLE_K, row, pool);
		seq.v = store(p, b, ROLE_V, row, pool);
		answer(p, &seq);
		free(seq.q);
		free(seq.k);
		free(seq.v);
	}

	p->pool = upload(pool, p->pool_bytes);
	args->size = sizeof(*args);
	args->device = buffer_device;
	args->dtype = spec->dtype;
	args->n_seqs = spec->n_seqs;
	args->n_tokens = p->n_rows + spec->spare_rows;
	args->n_heads_q = p->n_heads_q;
	args->table_width = width;
	args->q = upload(q, q_bytes);
	args->query_start_loc = upload(loc, (size_t)(spec->n_seqs + 1) * sizeof(*loc));
	args->seq_lens = upload(spec->lens, (size_t)spec->n_seqs * sizeof(*spec->lens));
	args->block_table = upload(table, (size_t)(spec->n_seqs * width) * sizeof(*table));
	args->k.base = (char *)p->pool + (uintptr_t)args->k.base;
	args->v.base = (char *)p->pool + (uintptr_t)args->v.base;
	args->sm_scale = spec->sm_scale;
	args->softcap = spec->softcap;
	args->window_left = spec->window_left;
	args->causal = spec->causal;
	args->invariant = spec->invariant;
	if (spec->max_seq_len)
		args->max_seq_len = spec->max_seq_len;
	if (kv_attention_workspace_bytes(args, &args->workspace_bytes) < 0)
		ck_abort_msg("workspace: %s", kv_error_text());
	p->workspace = args->workspace = buffer_new(args->workspace_bytes);
	buffer_fill(args->workspace, 0, args->workspace_bytes);
	free(ids);
	free(pool);
	free(q);
	free(table);
	return p;
}

struct problem *problem_free(struct problem *p)
{
	buffer_free(p->pool);
	buffer_free(p->workspace);
	buffer_free((void *)(uintptr_t)p->args.q);
	buffer_free((void *)(uintptr_t)p->args.query_start_loc);
	buffer_free((void *)(uintptr_t)p->args.seq_lens);
	buffer_free((void *)(uintptr_t)p->args.block_table);
	free(p->out);
	free(p->lse);
	free(p);
	return NULL;
}

static bool all_bytes(const void *p, int byte, size_t n)
{
	const unsigned char *bytes = p;

	for (size_t i = 0; i < n; i++)
		if (bytes[i] != byte)
			return false;
	return true;
}

bool problem_can_run(const struct problem *p, const struct kv_attn_backend *backend)
{
	struct kv_attention_args args = p->args, resolved;
	struct kv_refusals refusals = {0};
	int r;

	args.out = args.workspace; /* not written to, and apart from q */
	r = kv_attention_resolve_sizes(&args, &resolved);
	ck_assert_msg(r == 0, "%d, %s", r, kv_error_text());
	kv_attn_refuse(backend, &resolved, &refusals);
	return !refusals.bits;
}

void problem_run(struct problem *p, const struct kv_attn_backend *backend, void **ret_out,
		 float **ret_lse)
{
	struct kv_attention_args args = p->args;
	size_t n = (size_t)args.n_tokens * (size_t)p->n_heads_q;
	size_t used = (size_t)p->n_rows * (size_t)p->n_heads_q;
	size_t element = (size_t)p->spec.dv * kv_dtype_bytes(p->spec.dtype);
	char *out = malloc(n * element + 1);
	float *lse = malloc(n * sizeof(float) + 1);
	int r;

	args.out = buffer_new(n * element);
	args.lse = buffer_new(n * sizeof(float));
	buffer_fill(args.out, 0xff, n * element);
	buffer_fill(args.lse, 0xff, n * sizeof(float));
	r = kv_attention_on(backend, &args);
	ck_assert_msg(r == 0, "%s: %d, %s", backend->name, r, kv_error_text());
	buffer_get(out, args.out, n * element);
	buffer_get(lse, args.lse, n * sizeof(float));
	buffer_free(args.out);
	buffer_free(args.lse);

	ck_assert_msg(all_bytes(out + used * element, 0xff, (n - used) * element),
		      "%s: wrote to out past the last query", backend->name);
	ck_assert_msg(all_bytes(lse + used, 0xff, (n - used) * sizeof(float)),
		      "%s: wrote to lse past the last query", backend->name);
	*ret_out = out;
	*ret_lse = lse;
}

static void describe(const struct problem *p, char *text, size_t bytes)
{
	const struct problem_spec *s = &p->spec;
	int n = snprintf(
		text, bytes,
		"types %d/%d/%d, heads %d*%d, dims %d/%d, block %d, kind %d%s gap %d, window "
		"%d, softcap %g, causal %d, (q_len, len)",
		s->dtype, s->k_dtype, s->v_dtype, s->n_heads_kv, s->group, s->dk, s->dv,
		s->block_tokens, s->kind, s->head_major ? " head-major" : "", s->gap,
		s->window_left, (double)s->softcap, s->causal);

	for (int b = 0; b < s->n_seqs && n < (int)bytes; b++)
		n += snprintf(text + n, bytes - (size_t)n, " (%d, %d)", s->q_lens[b], s->lens[b]);
}

void problem_check(struct problem *p, const struct kv_attn_backend *backend)
{
	double tolerance = tolerances[p->spec.dtype], all_error = 0, all_norm = 0;
	char text[512];
	float *lse;
	void *out;

	describe(p, text, sizeof(text));
	problem_run(p, backend, &out, &lse);
	for (int64_t row = 0; row < (int64_t)p->n_rows * p->n_heads_q; row++) {
		double error = 0, norm = 0;

		for (int64_t i = row * p->spec.dv; i < (row + 1) * p->spec.dv; i++) {
			double x = number_get(out, i, p->spec.dtype);

			error += (x - p->out[i]) * (x - p->out[i]);
			norm += p->out[i] * p->out[i];
		}
		expect(sqrt(error) <= ROW_FACTOR * tolerance * sqrt(norm),
		       "%s: row %lld head %lld is off by %g of its %g: %s", backend->name,
		       (long long)row / p->n_heads_q, (long long)row % p->n_heads_q, sqrt(error),
		       sqrt(norm), text);
		expect(p->lse[row] == (double)lse[row] ||
			       fabs(p->lse[row] - (double)lse[row]) <= LSE_TOLERANCE,
		       "%s: row %lld head %lld has lse %g, right is %g: %s", backend->name,
		       (long long)row / p->n_heads_q, (long long)row % p->n_heads_q,
		       (double)lse[row], p->lse[row], text);
		all_error += error;
		all_norm += norm;
	}
	ck_assert_msg(sqrt(all_error) <= tolerance * sqrt(all_norm),
		      "%s: off by %g, %g allowed: %s", backend->name, sqrt(all_error / all_norm),
		      tolerance, text);
	free(out);
	free(lse);
}

/* The vector sets below the best one, as backends. */
static int attention_second(const struct kv_attention_args *args)
{
	return kv_attention_simd(kv_simd_sets()[1], args);
}

static int attention_third(const struct kv_attention_args *args)
{
	return kv_attention_simd(kv_simd_sets()[2], args);
}

static int write_second(const struct kv_write_args *args)
{
	return kv_write_simd(kv_simd_sets()[1], args);
}

static int write_third(const struct kv_write_args *args)
{
	return kv_write_simd(kv_simd_sets()[2], args);
}

const struct kv_attn_backend *const *problem_backends(void)
{
	static struct kv_attn_backend lesser[] = {
		{.attention = attention_second, .write = write_second, .copy = kv_copy_ref},
		{.attention = attention_third, .write = write_third, .copy = kv_copy_ref},
	};
	static const struct kv_attn_backend *backends[16];
	int n = 0;

	for (int i = 0; kv_attn_backends[i]; i++)
		if (kv_attn_backends[i]->device == buffer_device)
			backends[n++] = kv_attn_backends[i];
	for (int i = 1; buffer_device == KV_DEVICE_HOST && kv_simd_sets()[i]; i++) {
		lesser[i - 1].name = kv_simd_sets()[i]->name;
		lesser[i - 1].caps = kv_attn_cpu.caps;
		lesser[i - 1].device = KV_DEVICE_HOST;
		backends[n++] = &lesser[i - 1];
	}
	backends[n] = NULL;
	return backends;
}
