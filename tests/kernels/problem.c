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
#include "tests/kernels/problem_answer.h"

/*
 * Error allowed, |out - answer| / |answer|, by the type of out. Backends that have f32 results
 * calculate in f32, so an 8-bit cache (its answer is that of the values it holds) costs nothing on
 * top; the others round weights to 16 bits.
 *	f32   sums of some 1000 products, and softcap's e^(50 tanh x): a few 1e-6 seen
 *	f16   rounding is 2^-12 of an element on average
 *	bf16  rounding is 2^-9
 *	8-bit cache, weights in f16: 5e-3
 * One row alone may err by 4 times as much: it has few elements to average over.
 */
static const double tolerances[] = {[KV_F32] = 1e-5, [KV_F16] = 6e-4, [KV_BF16] = 4e-3};

double problem_tolerance(int dtype)
{
	return tolerances[dtype];
}

#define TOLERANCE_F8  5e-3
#define LSE_TOLERANCE 1e-4 /* absolute, of sums in f32 */
#define LSE_ROUNDED   2e-3
#define ROW_FACTOR    4
#define FLOOR	      1e-6 /* of the norm: a row that its sink empties is made of subnormals */

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

/* Tokens of sequence @b that lie on this rank. */
static int local_len(const struct problem_spec *spec, int b)
{
	int n = 0;

	if (spec->cp_size < 2)
		return spec->lens[b];
	for (int j = 0; j < spec->lens[b]; j++)
		n += problem_is_local(spec, j);
	return n;
}

static int n_blocks_of(const struct problem_spec *spec, int b)
{
	return (local_len(spec, b) + spec->block_tokens - 1) / spec->block_tokens;
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
				 .scale = kv_dtype_bytes(dtype) == 1 ? scale : 1};
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

/* What a stored value of row @row of head @h is multiplied by. */
static float scale_of(const struct problem *p, int role, int64_t row, int64_t h)
{
	const struct problem_spec *spec = &p->spec;
	float scale = role == ROLE_K ? p->args.k.scale : p->args.v.scale;

	if (kv_dtype_bytes(role == ROLE_K ? spec->k_dtype : spec->v_dtype) != 1)
		return 1;
	if (spec->head_scales)
		return scale * (1 + (float)h / 4);
	if (spec->row_scales)
		return scale * (float)(1.5 + number_random(5, (uint64_t)role, (uint64_t)row,
							   (uint64_t)h));
	return scale;
}

/*
 * Stores K or V of sequence @b into the pool's image, and its rows' scales into @scales; returns the
 * values that are then there: [len, n_heads, dim].
 */
static double *store(const struct problem *p, int b, int role, const int32_t *table, char *image,
		     float *scales)
{
	const struct problem_spec *spec = &p->spec;
	const struct kv_view *view = role == ROLE_K ? &p->args.k : &p->args.v;
	int64_t len = spec->lens[b], local = 0;
	double *values = calloc((size_t)(len * view->n_heads * view->head_dim) + 1, sizeof(double));

	for (int64_t j = 0; j < len; j++) {
		int name = j < spec->shared_prefix ? spec->names[0] : spec->names[b];
		int64_t slot;

		if (!problem_is_local(spec, j))
			continue;
		slot = (int64_t)table[local / view->block_tokens] * view->block_tokens +
		       local % view->block_tokens;
		local++;
		for (int64_t h = 0; h < view->n_heads; h++) {
			char *row = image + (uintptr_t)view->base +
				    slot / view->block_tokens * view->block_stride +
				    slot % view->block_tokens * view->token_stride +
				    h * view->head_stride;
			float scale = scale_of(p, role, slot, h);

			scales[slot * view->n_heads + h] = scale;
			for (int64_t d = 0; d < view->head_dim; d++) {
				double x = meant(name, role, j, h, d);
				uint32_t code = number_encode(view->dtype, x / scale);

				number_set(row, d, view->dtype, code);
				values[(j * view->n_heads + h) * view->head_dim + d] =
					number_decode(view->dtype, code) * scale;
			}
		}
	}
	return values;
}

/* Elements from token to token of q. */
static int64_t q_stride(const struct problem *p)
{
	return (int64_t)p->n_heads_q * p->spec.dk + (p->spec.strides ? 24 : 0);
}

/* Stores q of a sequence into its image; returns the values that are then there. */
static double *store_q(const struct problem *p, const struct problem_sequence *seq, char *image)
{
	const struct problem_spec *spec = &p->spec;
	int64_t n = 0, per_row = (int64_t)p->n_heads_q * spec->dk;
	double *values = calloc((size_t)(seq->q_len * per_row) + 1, sizeof(double));

	for (int64_t i = 0; i < seq->q_len; i++) {
		for (int64_t e = 0; e < per_row; e++) {
			double x = meant(spec->names[seq->b], ROLE_Q, seq->len - seq->q_len + i,
					 e / spec->dk, e % spec->dk);
			uint32_t code = number_encode(spec->dtype, x);

			number_set(image, (seq->first_row + i) * q_stride(p) + e, spec->dtype, code);
			values[n++] = number_decode(spec->dtype, code);
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

/* Of the pool in pieces of @n floats: [block, token, head] */
static struct kv_view scales_view(const struct problem *p, const float *scales, size_t n)
{
	const struct kv_view *k = &p->args.k;

	return (struct kv_view){.base = upload(scales, n * sizeof(*scales)),
				.block_stride = (int64_t)k->block_tokens * k->n_heads * 4,
				.token_stride = (int64_t)k->n_heads * 4,
				.head_stride = 4,
				.block_tokens = k->block_tokens,
				.n_heads = k->n_heads,
				.head_dim = 1,
				.dtype = KV_F32,
				.scale = 1};
}

/* The arrays of the second part, as the spec asks for them. */
static void add_second_part(struct problem *p, const int32_t *loc, const float *k_scales,
			    const float *v_scales, size_t n_scales)
{
	const struct problem_spec *spec = &p->spec;
	struct kv_attention_args *args = &p->args;
	size_t rows = (size_t)args->n_tokens + 1, words = (size_t)args->max_query_len / 32 + 1;
	float heads[4][256] = {{0}};
	int32_t prefixes[PROBLEM_SEQS], *docs = calloc(rows, 2 * sizeof(*docs));
	uint32_t *tree = calloc(rows * words, sizeof(*tree));
	uint8_t causal[PROBLEM_SEQS];

	for (int h = 0; h < p->n_heads_q; h++) {
		heads[0][h] = (float)problem_sink(h);
		heads[1][h] = (float)problem_slope(spec, h);
	}
	for (int h = 0; h < spec->n_heads_kv; h++) {
		heads[2][h] = scale_of(p, ROLE_K, 0, h);
		heads[3][h] = scale_of(p, ROLE_V, 0, h);
	}
	for (int b = 0; b < spec->n_seqs; b++) {
		prefixes[b] = spec->prefix + 3 * b;
		causal[b] = b % 2 == 0;
		for (int i = 0; i < spec->q_lens[b]; i++) {
			size_t row = (size_t)(loc[b] + i);

			if (spec->docs)
				problem_doc_range(spec, b, i, docs + 2 * row);
			for (int k = 0; spec->tree && k < spec->q_lens[b]; k++)
				if (problem_tree_sees(spec, b, i, k))
					tree[row * words + (size_t)k / 32] |= 1u << k % 32;
		}
	}
	if (spec->sinks)
		args->sinks = upload(heads[0], sizeof(heads[0]));
	if (spec->alibi)
		args->alibi_slopes = upload(heads[1], sizeof(heads[1]));
	if (spec->head_scales && kv_dtype_bytes(spec->k_dtype) == 1)
		args->k_scales = upload(heads[2], sizeof(heads[2]));
	if (spec->head_scales && kv_dtype_bytes(spec->v_dtype) == 1)
		args->v_scales = upload(heads[3], sizeof(heads[3]));
	if (spec->row_scales) {
		args->k_row_scales = scales_view(p, k_scales, n_scales);
		args->v_row_scales = scales_view(p, v_scales, n_scales);
	}
	if (spec->prefix)
		args->window_prefix_lens = upload(prefixes, sizeof(prefixes));
	if (spec->seq_causal)
		args->seq_causal = upload(causal, sizeof(causal));
	if (spec->docs)
		args->doc_ranges = upload(docs, rows * 2 * sizeof(*docs));
	if (spec->tree) {
		args->tree_mask = upload(tree, rows * words * sizeof(*tree));
		args->tree_words = (int32_t)words;
	}
	args->doc_clamped = spec->doc_clamped;
	args->window_right = spec->window_right;
	args->lse_with_sink = spec->lse_with_sink;
	args->key_begin = spec->key_begin;
	args->key_end = spec->key_end;
	args->shared_prefix = spec->shared_prefix;
	args->cp_size = spec->cp_size;
	args->cp_rank = spec->cp_rank;
	args->cp_interleave = spec->cp_interleave;
	args->out_dtype = spec->out_dtype;
	if (spec->strides) {
		args->q_token_stride = q_stride(p);
		args->out_token_stride = (int64_t)p->n_heads_q * spec->dv + 16;
		args->lse_token_stride = 1;
		args->lse_head_stride = args->n_tokens + 3;
	}
	free(docs);
	free(tree);
}

static void free_second_part(struct kv_attention_args *args)
{
	const void *arrays[] = {args->sinks,	args->alibi_slopes, args->k_scales,
				args->v_scales, args->seq_causal,   args->window_prefix_lens,
				args->doc_ranges, args->tree_mask,  args->k_row_scales.base,
				args->v_row_scales.base};

	for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++)
		buffer_free((void *)(uintptr_t)arrays[i]);
}

/* Rows of the block table: a shared prefix is in the blocks of row 0. */
static void fill_table(const struct problem_spec *spec, const int32_t *ids, int32_t *table, int width)
{
	int shared = spec->shared_prefix / spec->block_tokens;

	for (int b = 0; b < spec->n_seqs; b++) {
		for (int i = 0; i < n_blocks_of(spec, b); i++)
			table[b * width + i] = b && i < shared ? table[i] : *ids++;
	}
}

struct problem *problem_new(const struct problem_spec *spec)
{
	struct problem *p = calloc(1, sizeof(*p));
	struct kv_attention_args *args = &p->args;
	int n_used = 0, n_blocks, width = 1;
	int32_t *ids, *table, loc[PROBLEM_SEQS + 1] = {0};
	size_t q_bytes, n_scales;
	float *scales[2];
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
	args->n_tokens = p->n_rows + spec->spare_rows;
	q_bytes = (size_t)args->n_tokens * (size_t)q_stride(p) * kv_dtype_bytes(spec->dtype);
	q = malloc(q_bytes + 1);
	memset(q, 0xff, q_bytes);
	n_scales = (size_t)n_blocks * (size_t)spec->block_tokens * (size_t)spec->n_heads_kv;
	for (int i = 0; i < 2; i++) {
		scales[i] = malloc(n_scales * sizeof(float));
		memset(scales[i], 0xff, n_scales * sizeof(float));
	}
	table = calloc((size_t)(spec->n_seqs * width) + 1, sizeof(*table)); /* padded with 0 */
	p->out = calloc((size_t)(p->n_rows * p->n_heads_q * spec->dv) + 1, sizeof(double));
	p->lse = calloc((size_t)(p->n_rows * p->n_heads_q) + 1, sizeof(double));

	fill_table(spec, ids, table, width);
	for (int b = 0; b < spec->n_seqs; b++) {
		const int32_t *row = table + b * width;
		struct problem_sequence seq = {.b = b,
					       .len = spec->lens[b],
					       .q_len = spec->q_lens[b],
					       .first_row = loc[b]};

		seq.q = store_q(p, &seq, q);
		seq.k = store(p, b, ROLE_K, row, pool, scales[0]);
		seq.v = store(p, b, ROLE_V, row, pool, scales[1]);
		if (!spec->unanswered)
			problem_answer(p, &seq);
		free(seq.q);
		free(seq.k);
		free(seq.v);
	}

	p->pool = upload(pool, p->pool_bytes);
	args->size = sizeof(*args);
	args->device = buffer_device;
	args->dtype = spec->dtype;
	args->n_seqs = spec->n_seqs;
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
	add_second_part(p, loc, scales[0], scales[1], n_scales);
	if (kv_attention_workspace_bytes(args, &args->workspace_bytes) < 0)
		ck_abort_msg("workspace: %s", kv_error_text());
	p->workspace = args->workspace = buffer_new(args->workspace_bytes);
	buffer_fill(args->workspace, 0, args->workspace_bytes);
	free(ids);
	free(pool);
	free(q);
	free(table);
	free(scales[0]);
	free(scales[1]);
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
	free_second_part(&p->args);
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

/* Checks that the gaps between rows, and all past the last, are untouched; takes the gaps out. */
static void close_gaps(const char *name, char *rows, size_t n, size_t stride, size_t row, size_t used)
{
	for (size_t t = 0; t < n; t++) {
		size_t wanted = t < used ? row : 0;

		ck_assert_msg(all_bytes(rows + t * stride + wanted, 0xff, stride - wanted),
			      "%s: row %zu of %zu: wrote past its end, or past the last query", name, t,
			      used);
		memmove(rows + t * row, rows + t * stride, row);
	}
}

/* lse of strides to [T, H], if it isn't. */
static void transpose_lse(const struct problem *p, const char *name, float *lse)
{
	size_t n = (size_t)p->args.n_tokens, heads = (size_t)p->n_heads_q, pitch = n + 3;
	float *from;

	if (!p->spec.strides)
		return;
	from = malloc(pitch * heads * sizeof(*from));
	memcpy(from, lse, pitch * heads * sizeof(*from));
	for (size_t h = 0; h < heads; h++) {
		ck_assert_msg(all_bytes(from + h * pitch + n, 0xff, 3 * sizeof(*from)),
			      "%s: wrote to lse between rows", name);
		for (size_t t = 0; t < n; t++)
			lse[t * heads + h] = from[h * pitch + t];
	}
	free(from);
}

int problem_out_dtype(const struct problem *p)
{
	return p->spec.out_dtype ? p->spec.out_dtype : p->spec.dtype;
}

void problem_run(struct problem *p, const struct kv_attn_backend *backend, void **ret_out,
		 float **ret_lse)
{
	struct kv_attention_args args = p->args;
	size_t n = (size_t)args.n_tokens, heads = (size_t)p->n_heads_q;
	size_t element = kv_dtype_bytes(problem_out_dtype(p));
	size_t row = heads * (size_t)p->spec.dv * element;
	size_t stride = args.out_token_stride ? (size_t)args.out_token_stride * element : row;
	size_t n_lse = (n + (p->spec.strides ? 3 : 0)) * heads;
	char *out = malloc(n * stride + 1);
	float *lse = malloc(n_lse * sizeof(float) + 1);
	int r;

	args.out = buffer_new(n * stride);
	args.lse = buffer_new(n_lse * sizeof(float));
	buffer_fill(args.out, 0xff, n * stride);
	buffer_fill(args.lse, 0xff, n_lse * sizeof(float));
	r = kv_attention_on(backend, &args);
	ck_assert_msg(r == 0, "%s: %d, %s", backend->name, r, kv_error_text());
	buffer_get(out, args.out, n * stride);
	buffer_get(lse, args.lse, n_lse * sizeof(float));
	buffer_free(args.out);
	buffer_free(args.lse);

	close_gaps(backend->name, out, n, stride, row, (size_t)p->n_rows);
	transpose_lse(p, backend->name, lse);
	ck_assert_msg(all_bytes(lse + (size_t)p->n_rows * heads, 0xff,
				(n - (size_t)p->n_rows) * heads * sizeof(float)),
		      "%s: wrote to lse past the last query", backend->name);
	*ret_out = out;
	*ret_lse = lse;
}

static void describe(const struct problem *p, char *text, size_t bytes)
{
	const struct problem_spec *s = &p->spec;
	int n = snprintf(
		text, bytes,
		"types %d/%d/%d/%d, heads %d*%d, dims %d/%d, block %d, kind %d%s gap %d, window "
		"%d, %d, softcap %g, causal %d, sinks %d, alibi %d, scales %d/%d, prefix %d, docs %d/%d, "
		"tree %d, cp %d/%d/%d, keys %d..%d, shared %d, (q_len, len)",
		s->dtype, s->k_dtype, s->v_dtype, s->out_dtype, s->n_heads_kv, s->group, s->dk, s->dv,
		s->block_tokens, s->kind, s->head_major ? " head-major" : "", s->gap,
		s->window_left, s->window_right, (double)s->softcap, s->seq_causal ? -1 : s->causal,
		s->sinks, s->alibi, s->head_scales, s->row_scales, s->prefix, s->docs, s->doc_clamped,
		s->tree, s->cp_size, s->cp_rank, s->cp_interleave, s->key_begin, s->key_end,
		s->shared_prefix);

	for (int b = 0; b < s->n_seqs && n < (int)bytes; b++)
		n += snprintf(text + n, bytes - (size_t)n, " (%d, %d)", s->q_lens[b], s->lens[b]);
}

void problem_check(struct problem *p, const struct kv_attn_backend *backend)
{
	int dtype = problem_out_dtype(p);
	bool exact = backend->caps.dtypes & 1u << KV_F32;
	bool f8 = kv_dtype_bytes(p->spec.k_dtype) == 1 || kv_dtype_bytes(p->spec.v_dtype) == 1;
	/* Others round weights to the type of q, whatever out is. */
	double tolerance = exact ? tolerances[dtype] : f8 ? TOLERANCE_F8 : tolerances[p->spec.dtype];
	double lse_tolerance = exact ? LSE_TOLERANCE : LSE_ROUNDED, all_error = 0, all_norm = 0;
	char text[640];
	float *lse;
	void *out;

	describe(p, text, sizeof(text));
	problem_run(p, backend, &out, &lse);
	for (int64_t row = 0; row < (int64_t)p->n_rows * p->n_heads_q; row++) {
		double error = 0, norm = 0;

		for (int64_t i = row * p->spec.dv; i < (row + 1) * p->spec.dv; i++) {
			double x = number_get(out, i, dtype);

			error += (x - p->out[i]) * (x - p->out[i]);
			norm += p->out[i] * p->out[i];
		}
		expect(sqrt(error) <= ROW_FACTOR * tolerance * sqrt(norm) + FLOOR,
		       "%s: row %lld head %lld is off by %g of its %g: %s", backend->name,
		       (long long)row / p->n_heads_q, (long long)row % p->n_heads_q, sqrt(error),
		       sqrt(norm), text);
		expect(p->lse[row] == (double)lse[row] ||
			       fabs(p->lse[row] - (double)lse[row]) <=
				       lse_tolerance + 1e-6 * fabs(p->lse[row]),
		       "%s: row %lld head %lld has lse %g, right is %g: %s", backend->name,
		       (long long)row / p->n_heads_q, (long long)row % p->n_heads_q,
		       (double)lse[row], p->lse[row], text);
		all_error += error;
		all_norm += norm;
	}
	ck_assert_msg(sqrt(all_error) <= tolerance * sqrt(all_norm) + FLOOR,
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
