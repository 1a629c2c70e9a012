/* SPDX-License-Identifier: Apache-2.0 */
/* Latent attention: rows written and read, decode on every backend of the device, refusals. */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/merge.h>
#include <kvcached/plan.h>

#include "include/internal/error.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/mla_problem.h"
#include "tests/kernels/number.h"
#include "tests/kernels/run.h"

#define COUNT(a) (int)(sizeof(a) / sizeof((a)[0]))

static const struct row_case {
	int dtype, kv_dtype, latent, rope;
	float scale;
} row_cases[] = {
	{KV_BF16, KV_BF16, 512, 64, 1},	      {KV_F16, KV_F16, 512, 64, 1},
	{KV_F32, KV_F32, 512, 64, 1},	      {KV_BF16, KV_F8_E4M3, 512, 64, 0.125f},
	{KV_F16, KV_F8_E5M2, 512, 64, 0.25f}, {KV_BF16, KV_BYTES, 512, 64, 1},
	{KV_F16, KV_BYTES, 512, 64, 1},	      {KV_BF16, KV_BF16, 20, 6, 1},
	{KV_F32, KV_BF16, 96, 0, 1},	      {KV_BF16, KV_BYTES, 256, 32, 1},
};

/* Numbers of every kind; a tile of zeros, a tile of the smallest, NaN in others. */
static double input(int t, int d)
{
	static const double odd[] = {NAN, 448, -449, 0x1p-9, 1e-30, 0, -0.0, 60000};

	if (d / 128 == 1 && t % 3 == 0)
		return t % 2 ? 0 : 0x1p-24 * (d % 5);
	if (t % 3 == 1 && d % 19 == 0)
		return odd[(d / 19 + t) % COUNT(odd)];
	return 3 * number_random(21, (uint64_t)t, (uint64_t)d, 0);
}

/* The bytes that a row should have, by arithmetic of its own. */
static void expect_row(const struct row_case *c, const char *row, const char *from)
{
	int dim = c->latent + c->rope;

	for (int d = 0; d < dim; d++) {
		double x = number_get(from, d, c->dtype), top = 0;
		uint32_t want = number_code(from, d, c->dtype), got;
		float scale = c->scale;

		if (c->kv_dtype == KV_BYTES && d >= c->latent) {
			got = number_code(row + c->latent + c->latent / 32, d - c->latent, c->dtype);
		} else if (c->kv_dtype == KV_BYTES) {
			for (int e = d / 128 * 128; e < d / 128 * 128 + 128; e++)
				top = fmax(top, fabs(number_get(from, e, c->dtype)));
			scale = (float)top / 448.0f;
			scale = scale > 0x1p-126f ? scale : 0x1p-126f;
			memcpy(&got, row + c->latent + d / 128 * 4, 4);
			ck_assert_uint_eq(got, number_code(&scale, 0, KV_F32));
			want = number_encode(KV_F8_E4M3, (double)((float)x / scale));
			got = number_code(row, d, KV_F8_E4M3);
		} else {
			if (c->kv_dtype != c->dtype)
				want = number_encode(c->kv_dtype, (double)((float)x / scale));
			got = number_code(row, d, c->kv_dtype);
		}
		if (isnan(x) && c->kv_dtype != c->dtype && (c->kv_dtype != KV_BYTES || d < c->latent))
			ck_assert(isnan(number_decode(c->kv_dtype == KV_BYTES ? KV_F8_E4M3
									      : c->kv_dtype, got)));
		else
			ck_assert_msg(want == got, "type %d to %d, element %d (%g): %#x, %#x is right",
				      c->dtype, c->kv_dtype, d, x, got, want);
	}
}

#define ROWS   23
#define BLOCKS 5
#define SIZE   8

static void *put(const void *from, size_t bytes)
{
	void *p = buffer_new(bytes);

	buffer_put(p, from, bytes);
	return p;
}

/* Loop: formats of rows, dense and with gaps. What no slot names keeps its bytes. */
START_TEST(rows_are_what_the_format_says_and_nothing_else_changes)
{
	const struct row_case *c = &row_cases[_i / 2];
	int gap = _i % 2 ? 16 : 0, dim = c->latent + c->rope;
	size_t element = kv_dtype_bytes(c->dtype);
	struct kv_view view = {.block_tokens = SIZE, .n_heads = 1, .dtype = c->kv_dtype, .scale = c->scale};
	char *latent, *rope, *whole, *pool, *before;
	int64_t slots[ROWS], row;
	size_t bytes;

	view.head_dim = c->kv_dtype == KV_BYTES ? kv_mla_packed_bytes(c->latent, c->rope) : dim;
	row = view.head_dim * (int64_t)kv_dtype_bytes(c->kv_dtype);
	view.token_stride = view.head_stride = row + gap;
	view.block_stride = view.token_stride * SIZE + 4 * gap;
	bytes = (size_t)(BLOCKS * view.block_stride);
	latent = calloc((size_t)(ROWS * (c->latent + gap)), element);
	rope = calloc((size_t)(ROWS * (c->rope + gap)) + 1, element);
	whole = calloc((size_t)(ROWS * dim), element);
	pool = malloc(bytes);
	before = malloc(bytes);
	memset(before, 0x5a, bytes);
	for (int t = 0; t < ROWS; t++) {
		slots[t] = t % 5 == 4 ? -1 - t : (t * 11 + 3) % (BLOCKS * SIZE);
		for (int d = 0; d < dim; d++) {
			uint32_t code = number_encode(c->dtype, input(t, d));

			number_set(whole, t * dim + d, c->dtype, code);
			if (d < c->latent)
				number_set(latent, t * (c->latent + gap) + d, c->dtype, code);
			else
				number_set(rope, t * (c->rope + gap) + d - c->latent, c->dtype, code);
		}
	}
	struct kv_mla_write_args w = {
		.size = sizeof(w),
		.device = buffer_device,
		.dtype = c->dtype,
		.n_tokens = ROWS,
		.latent_dim = c->latent,
		.rope_dim = c->rope,
		.latent = put(latent, (size_t)(ROWS * (c->latent + gap)) * element),
		.rope = put(rope, (size_t)(ROWS * (c->rope + gap)) * element + 1),
		.latent_stride = c->latent + gap,
		.rope_stride = c->rope + gap,
		.slots = put(slots, sizeof(slots)),
		.cache = view,
	};
	w.cache.base = put(before, bytes);
	ck_assert_msg(kv_mla_write(&w) == 0, "%s", kv_error_text());
	buffer_get(pool, w.cache.base, bytes);
	for (int t = 0; t < ROWS; t++) {
		char *at = pool + slots[t] / SIZE * view.block_stride + slots[t] % SIZE * view.token_stride;

		if (slots[t] < 0)
			continue;
		expect_row(c, at, whole + (size_t)(t * dim) * element);
		memset(at, 0x5a, (size_t)row);
	}
	ck_assert_mem_eq(pool, before, bytes);
	buffer_free((void *)w.latent);
	buffer_free((void *)w.rope);
	buffer_free((void *)w.slots);
	buffer_free(w.cache.base);
	free(latent);
	free(rope);
	free(whole);
	free(pool);
	free(before);
}
END_TEST

/* Loop: formats. A piece of each context, from the middle of a block on. */
START_TEST(a_piece_of_a_context_comes_back_as_it_was_written)
{
	const struct row_case *c = &row_cases[_i];
	struct mla_spec s = mla_spec_default();
	const int32_t first[] = {3, 0, 17, 5}, loc[] = {0, 9, 9, 30, 31};
	struct mla_problem *p;
	size_t element = kv_dtype_bytes(c->dtype), bytes;
	char *latent, *rope;

	s.dtype = c->dtype;
	s.kv_dtype = c->kv_dtype;
	s.latent = c->latent;
	s.rope = c->rope;
	s.scale = c->scale;
	s.heads = 1;
	s.block_tokens = 16;
	for (int b = 0; b < 4; b++)
		mla_spec_add(&s, 12 + 13 * b, 1);
	p = mla_problem_new(&s);
	bytes = 33 * (size_t)c->latent * element;
	latent = malloc(bytes);
	rope = malloc(33 * (size_t)c->rope * element + 1);
	struct kv_mla_read_args a = {
		.size = sizeof(a),
		.device = buffer_device,
		.dtype = c->dtype,
		.n_seqs = 4,
		.n_tokens = 31,
		.latent_dim = c->latent,
		.rope_dim = c->rope,
		.latent = buffer_new(bytes),
		.rope = buffer_new(33 * (size_t)c->rope * element),
		.start_loc = put(loc, sizeof(loc)),
		.first = put(first, sizeof(first)),
		.block_table = p->table,
		.table_width = p->args.table_width,
		.cache = p->args.k,
	};
	buffer_fill(a.latent, 0x5a, bytes);
	buffer_fill(a.rope, 0x5a, 33 * (size_t)c->rope * element);
	ck_assert_msg(kv_mla_read(&a) == 0, "%s", kv_error_text());
	buffer_get(latent, a.latent, bytes);
	buffer_get(rope, a.rope, 33 * (size_t)c->rope * element);
	for (int b = 0; b < 4; b++)
		for (int i = loc[b]; i < loc[b + 1]; i++) {
			int j = first[b] + i - loc[b];
			int64_t block = p->host_table[b * p->args.table_width + j / 16];
			const double *row = p->rows + (block * 16 + j % 16) * p->dim;

			for (int d = 0; d < p->dim; d++) {
				double want = number_decode(c->dtype, number_encode(c->dtype, row[d]));
				double got = d < c->latent
						     ? number_get(latent, i * c->latent + d, c->dtype)
						     : number_get(rope, i * c->rope + d - c->latent,
								  c->dtype);

				ck_assert_msg(want == got, "row %d element %d: %g, %g is right", i, d,
					      got, want);
			}
		}
	for (size_t i = 31 * (size_t)c->latent * element; i < bytes; i++)
		ck_assert_int_eq(latent[i], 0x5a);
	buffer_free(a.latent);
	buffer_free(a.rope);
	buffer_free((void *)a.start_loc);
	buffer_free((void *)a.first);
	mla_problem_free(p);
	free(latent);
	free(rope);
}
END_TEST

enum shape {
	ONE, SMALL, EDGES, RAGGED, VERIFY, CHUNK, WIDE, MANY, LONG, ANCHOR, EMPTY, PADDED, N_SHAPES
};

static void add_shape(struct mla_spec *s, enum shape shape)
{
	static const int32_t edges[] = {1, 63, 64, 65, 127, 128, 129};

	switch (shape) {
	case ONE:
		mla_spec_add(s, 1, 1);
		break;
	case SMALL:
		mla_spec_add(s, 200, 1);
		break;
	case EDGES:
		for (int i = 0; i < COUNT(edges); i++)
			mla_spec_add(s, edges[i], 1);
		break;
	case RAGGED:
		for (int i = 0; i < 9; i++)
			mla_spec_add(s, 1 + i * i * 11, 1);
		break;
	case VERIFY:
		for (int i = 0; i < 4; i++)
			mla_spec_add(s, 70 + 50 * i, 1 + i);
		break;
	case CHUNK:
		mla_spec_add(s, 150, 11);
		mla_spec_add(s, 9, 9);
		mla_spec_add(s, 90, 1);
		break;
	case WIDE:
		for (int i = 0; i < 40; i++)
			mla_spec_add(s, 30 + 7 * i, 1);
		break;
	case MANY:
		for (int i = 0; i < MLA_SEQS; i++)
			mla_spec_add(s, 1 + i % 67, 1);
		break;
	case LONG:
		mla_spec_add(s, 4097, 1);
		break;
	case ANCHOR:
		mla_spec_add(s, 3000, 2);
		for (int i = 0; i < 20; i++)
			mla_spec_add(s, 5 + i, 1 + i % 2);
		break;
	case EMPTY:
		mla_spec_add(s, 0, 1);
		mla_spec_add(s, 100, 1);
		mla_spec_add(s, 0, 0);
		mla_spec_add(s, 33, 0);
		break;
	default:
		mla_spec_add(s, 80, 2);
		mla_spec_add(s, 17, 1);
		s->pad_seqs = 5;
		s->pad_tokens = 7;
	}
}

static void check_on_all(const struct mla_spec *s)
{
	struct mla_problem *p = mla_problem_new(s);
	int n = 0;

	for (int i = 0; kv_attn_backends[i]; i++)
		if (kv_attn_backends[i]->device == buffer_device)
			n += mla_problem_check(p, kv_attn_backends[i]) == 0;
	ck_assert_msg(n > 0, "no backend can: %s", kv_error_text());
	mla_problem_free(p);
}

START_TEST(decode_is_right_whatever_the_lengths)
{
	struct mla_spec s = mla_spec_default();

	if (_i == MANY)
		s.heads = 4;
	add_shape(&s, (enum shape)_i);
	check_on_all(&s);
}
END_TEST

static const int32_t head_counts[] = {1, 2, 3, 5, 8, 20, 32, 64, 80, 128};

START_TEST(decode_is_right_for_any_number_of_heads)
{
	struct mla_spec s = mla_spec_default();

	s.heads = head_counts[_i];
	mla_spec_add(&s, 131, 1);
	mla_spec_add(&s, 40, s.heads <= 64 ? 3 : 1);
	mla_spec_add(&s, 260, 1);
	check_on_all(&s);
}
END_TEST

static const struct {
	int dtype, kv_dtype, latent, rope, block_tokens, out_f32, gap;
	float scale;
} format_cases[] = {
	{KV_F16, KV_F16, 512, 64, 64, 0, 0, 1},	  {KV_F32, KV_F32, 512, 64, 64, 0, 0, 1},
	{KV_BF16, KV_BF16, 512, 64, 16, 0, 0, 1}, {KV_BF16, KV_BF16, 512, 64, 32, 0, 16, 1},
	{KV_BF16, KV_BF16, 512, 64, 1, 0, 0, 1},  {KV_BF16, KV_BF16, 512, 64, 128, 1, 0, 1},
	{KV_BF16, KV_F8_E4M3, 512, 64, 64, 0, 0, 0.03f}, {KV_F16, KV_F8_E4M3, 512, 64, 16, 1, 0, 0.5f},
	{KV_BF16, KV_F8_E5M2, 512, 64, 64, 0, 0, 0.1f}, {KV_BF16, KV_BYTES, 512, 64, 64, 0, 0, 1},
	{KV_F16, KV_BYTES, 512, 64, 32, 0, 0, 1}, {KV_BF16, KV_BYTES, 512, 64, 64, 1, 48, 1},
	{KV_BF16, KV_BF16, 256, 32, 64, 0, 0, 1}, {KV_BF16, KV_BF16, 128, 64, 24, 0, 0, 1},
	{KV_BF16, KV_BF16, 512, 0, 64, 0, 0, 1},  {KV_F32, KV_BF16, 48, 16, 64, 0, 0, 1},
};

START_TEST(decode_is_right_for_every_format_of_rows)
{
	struct mla_spec s = mla_spec_default();

	s.dtype = format_cases[_i].dtype;
	s.kv_dtype = format_cases[_i].kv_dtype;
	s.latent = format_cases[_i].latent;
	s.rope = format_cases[_i].rope;
	s.block_tokens = format_cases[_i].block_tokens;
	s.out_f32 = format_cases[_i].out_f32;
	s.gap = format_cases[_i].gap;
	s.scale = format_cases[_i].scale;
	s.q_gap = _i % 3 == 1 ? 64 : 0;
	s.out_gap = _i % 3 == 2 ? 32 : 0;
	mla_spec_add(&s, 140, 2);
	mla_spec_add(&s, 63, 1);
	mla_spec_add(&s, 400, 1);
	check_on_all(&s);
}
END_TEST

/* Scores of hundreds: weights of 0 and 1, and sums that must not overflow. */
START_TEST(loud_queries_neither_overflow_nor_lose_the_largest)
{
	struct mla_spec s = mla_spec_default();

	s.loudness = 300;
	mla_spec_add(&s, 700, 1);
	mla_spec_add(&s, 65, 4);
	check_on_all(&s);
}
END_TEST

/* Loop: interleave. Parts of ranks, merged, are the whole; each of them is right by itself. */
START_TEST(parts_of_ranks_that_share_the_context_merge_to_the_whole)
{
	enum { RANKS = 3, H = 16, T = 6, D = 512 };
	struct mla_spec s = mla_spec_default();
	struct mla_problem *whole;
	size_t part = (size_t)T * H * D * sizeof(float), part_lse = (size_t)T * H * sizeof(float);
	char *parts = buffer_new(RANKS * part), *lses = buffer_new(RANKS * part_lse), *out;
	char *rank_out;
	float *lse = malloc(part_lse), *rank_lse;
	double error, lse_error;

	s.out_f32 = 1;
	mla_spec_add(&s, 300, 1);
	mla_spec_add(&s, 2, 2); /* a rank has nothing of it */
	mla_spec_add(&s, 77, 3);
	whole = mla_problem_new(&s);
	s.cp_size = RANKS;
	s.cp_interleave = _i ? 16 : 1;
	for (s.cp_rank = 0; s.cp_rank < RANKS; s.cp_rank++) {
		struct mla_problem *p;
		int used = -1;

		check_on_all(&s);
		p = mla_problem_new(&s);
		/* The same tokens as the whole has, at this rank's places. */
		for (int b = 0; b < s.n_seqs; b++)
			for (int64_t j = 0; j < s.lens[b]; j++) {
				int64_t at = j / s.cp_interleave, i;
				int64_t from, to, row = whole->args.k.token_stride;
				char *copy = malloc((size_t)row);

				if (at % RANKS == s.cp_rank) {
					i = at / RANKS * s.cp_interleave + j % s.cp_interleave;
					from = whole->host_table[b * whole->args.table_width + j / 64] *
						       whole->args.k.block_stride + j % 64 * row;
					to = p->host_table[b * p->args.table_width + i / 64] *
						     p->args.k.block_stride + i % 64 * row;
					buffer_get(copy, whole->pool + from, (size_t)row);
					buffer_put(p->pool + to, copy, (size_t)row);
				}
				free(copy);
			}
		for (int i = 0; kv_attn_backends[i] && used < 0; i++)
			if (kv_attn_backends[i]->device == buffer_device) {
				used = mla_problem_run(p, kv_attn_backends[i], 0xff, NULL, &rank_out,
						       &rank_lse);
				if (used == 0) {
					buffer_put(parts + (size_t)s.cp_rank * part, rank_out, part);
					buffer_put(lses + (size_t)s.cp_rank * part_lse, rank_lse,
						   part_lse);
				}
				free(rank_out);
				free(rank_lse);
			}
		ck_assert_int_eq(used, 0);
		mla_problem_free(p);
	}
	struct kv_merge_args m = {
		.size = sizeof(m),
		.device = buffer_device,
		.dtype = KV_F32,
		.n_parts = RANKS,
		.n_tokens = T,
		.n_heads = H,
		.head_dim = D,
		.parts = parts,
		.part_lse = (float *)(void *)lses,
		.out = whole->args.out,
		.lse = whole->args.lse,
	};
	ck_assert_msg(kv_merge(&m) == 0, "%s", kv_error_text());
	out = malloc(part);
	buffer_get(out, whole->args.out, part);
	buffer_get(lse, whole->args.lse, part_lse);
	mla_problem_errors(whole, out, lse, &error, &lse_error);
	ck_assert_msg(error < 4e-3 && lse_error < 2e-3, "%g, %g", error, lse_error);
	mla_problem_free(whole);
	buffer_free(parts);
	buffer_free(lses);
	free(out);
	free(lse);
}
END_TEST

/* A row's bits are those of the answer of the same call with other neighbours, if `invariant`. */
START_TEST(queries_that_see_all_keys_are_right)
{
	struct mla_spec s = mla_spec_default();

	s.not_causal = 1;
	mla_spec_add(&s, 90, 3);
	mla_spec_add(&s, 200, 3);
	check_on_all(&s);
}
END_TEST

/* D02: the page that starts at element 2^32 of its layer. */
START_TEST(a_page_past_two_to_the_32_elements_is_itself)
{
	const int64_t pages = 262146, stride = 32 * 512 * 2;
	size_t bytes = (size_t)(pages * stride);
	uint16_t *rows, q[512], *out;
	const int32_t table[] = {262145, 1}, lens[] = {32, 32}, loc[] = {0, 1, 2};
	char *pool;

	if (buffer_bytes_free() < bytes + ((size_t)1 << 30))
		return;
	pool = buffer_new_sparse(bytes);
	rows = malloc((size_t)stride);
	for (int page = 0; page < 2; page++) {
		for (int i = 0; i < stride / 2; i++)
			rows[i] = (uint16_t)number_encode(KV_BF16, page + 1);
		buffer_put(pool + (page ? 262145 : 1) * stride, rows, (size_t)stride);
	}
	for (int i = 0; i < 512; i++)
		q[i] = (uint16_t)number_encode(KV_BF16, 0.01);
	struct kv_attention_args a = {
		.size = sizeof(a),
		.device = buffer_device,
		.dtype = KV_BF16,
		.n_seqs = 2,
		.n_tokens = 2,
		.n_heads_q = 1,
		.max_query_len = 1,
		.max_seq_len = 32,
		.table_width = 1,
		.q = buffer_new(2048),
		.out = buffer_new(2048),
		.query_start_loc = put(loc, sizeof(loc)),
		.seq_lens = put(lens, sizeof(lens)),
		.block_table = put(table, sizeof(table)),
		.k = {pool, stride, 1024, 1024, 32, 1, 512, KV_BF16, 1, 0},
		.sm_scale = 0.05f,
		.window_left = -1,
		.causal = 1,
		.latent_dim = 512,
	};
	buffer_put((void *)a.q, q, 1024);
	buffer_put((char *)a.q + 1024, q, 1024);
	out = malloc(2048);
	for (int i = 0; kv_attn_backends[i]; i++) {
		const struct kv_attn_backend *backend = kv_attn_backends[i];

		if (backend->device != buffer_device)
			continue;
		a.workspace_bytes = backend->workspace_bytes ? backend->workspace_bytes(&a) : 0;
		a.workspace = a.workspace_bytes ? buffer_new(a.workspace_bytes) : NULL;
		if (a.workspace)
			buffer_fill(a.workspace, 0, a.workspace_bytes);
		buffer_fill(a.out, 0xff, 2048);
		if (kv_attention_on(backend, &a) == 0) {
			buffer_get(out, a.out, 2048);
			for (int d = 0; d < 1024; d++)
				ck_assert_msg(number_get(out, d, KV_BF16) == (d < 512 ? 2 : 1),
					      "%s: element %d is %g", backend->name, d,
					      number_get(out, d, KV_BF16));
		}
		if (a.workspace)
			buffer_free(a.workspace);
	}
	buffer_free((void *)a.q);
	buffer_free(a.out);
	buffer_free((void *)a.query_start_loc);
	buffer_free((void *)a.seq_lens);
	buffer_free((void *)a.block_table);
	buffer_free_sparse(pool, bytes);
	free(rows);
	free(out);
}
END_TEST

/*
 * Prefill as of DeepSeek: heads of 192 and 128 over K and V that lie without gaps, sequence after
 * sequence, as blocks that overlap. The context as a part, the new tokens as another, merged.
 */
START_TEST(dense_rows_as_blocks_that_overlap_are_attended_in_parts)
{
	enum { H = 2, DK = 192, DV = 128, P = 64, ROWS_ALL = 111, NEW = 71 };
	static const int lens[] = {70, 41}, news[] = {30, 41};
	int32_t loc[] = {0, 30, 71}, contexts[] = {40, 0}, table[4], table_new[4];
	uint16_t *k = calloc((ROWS_ALL + P) * H * DK, 2), *v = calloc((ROWS_ALL + P) * H * DV, 2);
	uint16_t *q = calloc(NEW * H * DK, 2);
	float *out = malloc(NEW * H * DV * sizeof(*out));
	size_t part = NEW * H * DV, part_lse = NEW * H, workspace = 0;

	for (int i = 0; i < ROWS_ALL * H * DK; i++)
		k[i] = (uint16_t)number_encode(KV_BF16, number_random(1, (uint64_t)i, 0, 0));
	for (int i = 0; i < ROWS_ALL * H * DV; i++)
		v[i] = (uint16_t)number_encode(KV_BF16, number_random(2, (uint64_t)i, 0, 0));
	for (int i = 0; i < NEW * H * DK; i++)
		q[i] = (uint16_t)number_encode(KV_BF16, number_random(3, (uint64_t)i, 0, 0));
	for (int b = 0, start = 0; b < 2; start += lens[b++])
		for (int i = 0; i < 2; i++) {
			table[2 * b + i] = start + P * i;
			table_new[2 * b + i] = start + lens[b] - news[b] + P * i;
		}
	float *parts = buffer_new(2 * part * sizeof(float)), *lses = buffer_new(2 * part_lse * sizeof(float));
	struct kv_attention_args a = {
		.size = sizeof(a),
		.device = buffer_device,
		.dtype = KV_BF16,
		.n_seqs = 2,
		.n_tokens = NEW,
		.n_heads_q = H,
		.max_query_len = 41,
		.max_seq_len = 70,
		.table_width = 2,
		.q = put(q, NEW * H * DK * 2),
		.out = parts,
		.lse = lses,
		.query_start_loc = put(loc, sizeof(loc)),
		.seq_lens = put(contexts, sizeof(contexts)),
		.block_table = put(table, sizeof(table)),
		.k = {put(k, (ROWS_ALL + P) * H * DK * 2), H * DK * 2, H * DK * 2, DK * 2, P, H, DK, KV_BF16,
		      1, 0},
		.v = {put(v, (ROWS_ALL + P) * H * DV * 2), H * DV * 2, H * DV * 2, DV * 2, P, H, DV, KV_BF16,
		      1, 0},
		.window_left = -1,
		.out_dtype = KV_F32,
	};
	ck_assert_int_eq(kv_attention_workspace_bytes(&a, &workspace), 0);
	a.workspace_bytes = workspace;
	a.workspace = workspace ? buffer_new(workspace) : NULL;
	if (workspace)
		buffer_fill(a.workspace, 0, workspace);
	ck_assert_msg(kv_attention(&a) == 0, "%s", kv_error_text());
	buffer_get(out, a.out, 4); /* it is done: its lengths may change */
	a.causal = 1;
	a.out = parts + part;
	a.lse = lses + part_lse;
	buffer_put((void *)a.seq_lens, news, sizeof(news));
	buffer_put((void *)a.block_table, table_new, sizeof(table_new));
	ck_assert_msg(kv_attention(&a) == 0, "%s", kv_error_text());
	struct kv_merge_args m = {
		.size = sizeof(m),
		.device = buffer_device,
		.dtype = KV_F32,
		.n_parts = 2,
		.n_tokens = NEW,
		.n_heads = H,
		.head_dim = DV,
		.parts = parts,
		.part_lse = lses,
		.out = buffer_new(part * sizeof(float)),
	};
	ck_assert_msg(kv_merge(&m) == 0, "%s", kv_error_text());
	buffer_get(out, m.out, part * sizeof(float));
	void *all[] = {parts, lses, (void *)a.q, (void *)a.query_start_loc, (void *)a.seq_lens,
		       (void *)a.block_table, a.k.base, a.v.base, m.out, a.workspace};

	for (int i = 0; i < COUNT(all); i++)
		if (all[i])
			buffer_free(all[i]);
	for (int t = 0; t < NEW * H; t++) {
		int b = t / H >= loc[1], start = b ? lens[0] : 0, h = t % H;
		int pos = lens[b] - news[b] + t / H - loc[b];
		double sum = 0, right[DV] = {0}, error = 0, norm = 0;

		for (int j = 0; j <= pos; j++) {
			double x = 0;

			for (int d = 0; d < DK; d++)
				x += number_get(q, t * DK + d, KV_BF16) *
				     number_get(k, ((start + j) * H + h) * DK + d, KV_BF16);
			x = exp(x / sqrt(DK));
			sum += x;
			for (int d = 0; d < DV; d++)
				right[d] += x * number_get(v, ((start + j) * H + h) * DV + d, KV_BF16);
		}
		for (int d = 0; d < DV; d++) {
			double e = (double)out[t * DV + d] - right[d] / sum;

			error += e * e;
			norm += right[d] / sum * right[d] / sum;
		}
		ck_assert_msg(sqrt(error / norm) < 4e-3, "row %d: %g", t, sqrt(error / norm));
	}
	free(k);
	free(v);
	free(q);
	free(out);
}
END_TEST

static struct kv_attention_args some_args(void)
{
	static char memory[4096] __attribute__((aligned(256)));

	return (struct kv_attention_args){
		.size = sizeof(struct kv_attention_args),
		.device = buffer_device,
		.dtype = KV_BF16,
		.n_heads_q = 16,
		.max_query_len = 1,
		.k = {memory, 64 * 1152, 1152, 1152, 64, 1, 576, KV_BF16, 1, 0},
		.sm_scale = 0.07f,
		.window_left = -1,
		.causal = 1,
		.latent_dim = 512,
		.rope_dim = 64,
	};
}

START_TEST(a_backend_for_k_and_v_says_that_latents_are_not_its_own)
{
	struct kv_attention_args a = some_args();
	const char *name = buffer_device == KV_DEVICE_HOST ? "cpu" : "cuda", *chosen;
	uint64_t reasons = 0;
	char text[512];

	ck_assert_int_eq(kv_attention_validate(name, &a, &reasons, text, sizeof(text)), -ENOTSUP);
	ck_assert(reasons & KV_ATTN_BIT(MLA));
	ck_assert_ptr_nonnull(strstr(text, "latent attention wanted"));
	ck_assert_int_eq(kv_attention_select(&a, &chosen), 0);
	ck_assert_str_ne(chosen, name);
}
END_TEST

static const struct {
	int field;
	const char *text;
} wrong[] = {{0, "sm_scale"}, {1, "head_dim"}, {2, "n_heads"}, {3, "latent_dim"}, {4, "head_dim"},
	     {5, "k_scales"}, {6, "rope_dim"}};

START_TEST(a_wrong_field_is_named)
{
	struct kv_attention_args a = some_args();
	const char *name;
	float scale = 1;

	switch (wrong[_i].field) {
	case 0:
		a.sm_scale = 0;
		break;
	case 1:
		a.k.head_dim = 512;
		break;
	case 2:
		a.k.n_heads = 2;
		break;
	case 3:
		a.latent_dim = 70000;
		break;
	case 4:
		a.k.dtype = KV_BYTES;
		break;
	case 5:
		a.k.dtype = KV_BYTES;
		a.k.head_dim = 656;
		a.k_scales = &scale;
		break;
	default:
		a.rope_dim = -1;
	}
	ck_assert_int_eq(kv_attention_select(&a, &name), -EINVAL);
	ck_assert_msg(strstr(kv_error_text(), wrong[_i].text) != NULL, "%s", kv_error_text());
}
END_TEST

/* DeepSeek-V3, planned; its pool's layout; rows of layer 60 written there; decode from it. */
START_TEST(what_is_planned_for_a_model_can_be_written_and_attended)
{
	static const char config[] =
		"{\"architectures\": [\"DeepseekV3ForCausalLM\"], \"model_type\": \"deepseek_v3\","
		"\"num_hidden_layers\": 61, \"num_attention_heads\": 128, \"num_key_value_heads\": 128,"
		"\"hidden_size\": 7168, \"kv_lora_rank\": 512, \"q_lora_rank\": 1536,"
		"\"qk_nope_head_dim\": 128, \"qk_rope_head_dim\": 64, \"v_head_dim\": 128,"
		"\"torch_dtype\": \"bfloat16\", \"max_position_embeddings\": 163840,"
		"\"vocab_size\": 129280}";
	static const struct {
		uint32_t kv_type;
		int dtype, head_dim;
	} types[] = {{KV_KV_AUTO, KV_BF16, 576}, {KV_KV_F8, KV_F8_E4M3, 576}, {KV_KV_F8_PACKED, KV_BYTES, 656}};
	KV_OPTIONS(kv_plan_options, options, .budget_bytes = (uint64_t)64 << 20, .context = 128,
		   .block_tokens = 64, .layout = KV_PLAN_FLAT, .chunk_tokens = 64);
	struct kv_arch *arch = NULL;
	struct kv_plan *plan = NULL;
	struct kv_component *components;
	struct kv_layout layout;
	uint64_t offsets[128], bytes;
	struct mla_spec s = mla_spec_default();
	struct mla_problem *p;
	char *pool, *copy;
	int64_t slots[100], at;

	options.kv_type = types[_i].kv_type;
	ck_assert_msg(kv_arch_parse(config, sizeof(config) - 1, "config", &arch) == 0, "%s", kv_error_text());
	ck_assert_msg(kv_plan_arch(arch, NULL, &options, &plan) == 0, "%s", kv_error_text());
	components = calloc(plan->n_components, sizeof(*components));
	ck_assert_int_eq(kv_plan_pool_layout(plan, 0, components, &layout), 61);
	ck_assert_int_eq(kv_layout_block_bytes(&layout, offsets, &bytes), 0);
	ck_assert_uint_eq(components[60].dtype, (unsigned)types[_i].dtype);
	ck_assert_uint_eq(components[60].head_dim, (unsigned)types[_i].head_dim);
	ck_assert_uint_ge(plan->pools[0].n_blocks, 4);

	/* A problem whose rows then lie in the planned pool: blocks 3 and 1, layer 60. */
	s.kv_dtype = types[_i].dtype;
	s.dtype = KV_BF16;
	s.heads = 128;
	mla_spec_add(&s, 100, 2);
	p = mla_problem_new(&s);
	pool = buffer_new((size_t)(plan->pools[0].n_blocks * bytes));
	buffer_fill(pool, 0xff, (size_t)(plan->pools[0].n_blocks * bytes));
	for (int i = 0; i < 100; i++)
		slots[i] = (i < 64 ? 3 : 1) * 64 + i % 64;

	struct kv_view view = p->args.k;
	int32_t loc[] = {0, 100}, table[] = {3, 1};
	struct kv_mla_read_args r = {
		.size = sizeof(r),
		.device = buffer_device,
		.dtype = KV_BF16,
		.n_seqs = 1,
		.n_tokens = 100,
		.latent_dim = 512,
		.rope_dim = 64,
		.latent = buffer_new(100 * 1024),
		.rope = buffer_new(100 * 128),
		.start_loc = put(loc, sizeof(loc)),
		.block_table = p->table,
		.table_width = p->args.table_width,
		.cache = view,
	};
	ck_assert_int_eq(kv_mla_read(&r), 0);
	view.base = pool + offsets[60];
	view.block_stride = (int64_t)bytes;
	struct kv_mla_write_args w = {
		.size = sizeof(w),
		.device = buffer_device,
		.dtype = KV_BF16,
		.n_tokens = 100,
		.latent_dim = 512,
		.rope_dim = 64,
		.latent = r.latent,
		.rope = r.rope,
		.slots = put(slots, sizeof(slots)),
		.cache = view,
	};
	ck_assert_int_eq(kv_mla_write(&w), 0);
	at = 3 * (int64_t)bytes + (int64_t)offsets[60];
	copy = malloc(8);
	buffer_get(copy, pool + at - 8, 8); /* layer 59's end is as it was */
	ck_assert_mem_eq(copy, "\xff\xff\xff\xff\xff\xff\xff\xff", 8);
	free(copy);
	p->args.k = view;
	buffer_put(p->table, table, sizeof(table));
	for (int i = 0; kv_attn_backends[i]; i++)
		if (kv_attn_backends[i]->device == buffer_device)
			mla_problem_check(p, kv_attn_backends[i]);
	buffer_free(r.latent);
	buffer_free(r.rope);
	buffer_free((void *)r.start_loc);
	buffer_free((void *)w.slots);
	buffer_free(pool);
	mla_problem_free(p);
	free(components);
	kv_plan_free(plan);
	kv_arch_free(arch);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("kernels/mla");
	TCase *rows = tcase_create("rows"), *decode = tcase_create("decode");
	TCase *calls = tcase_create("calls");

	tcase_add_loop_test(rows, rows_are_what_the_format_says_and_nothing_else_changes, 0,
			    2 * COUNT(row_cases));
	tcase_add_loop_test(rows, a_piece_of_a_context_comes_back_as_it_was_written, 0,
			    COUNT(row_cases));
	tcase_add_loop_test(decode, decode_is_right_whatever_the_lengths, 0, N_SHAPES);
	tcase_add_loop_test(decode, decode_is_right_for_any_number_of_heads, 0, COUNT(head_counts));
	tcase_add_loop_test(decode, decode_is_right_for_every_format_of_rows, 0, COUNT(format_cases));
	tcase_add_test(decode, loud_queries_neither_overflow_nor_lose_the_largest);
	tcase_add_loop_test(decode, parts_of_ranks_that_share_the_context_merge_to_the_whole, 0, 2);
	tcase_add_test(decode, queries_that_see_all_keys_are_right);
	tcase_add_test(calls, a_page_past_two_to_the_32_elements_is_itself);
	tcase_add_test(calls, a_backend_for_k_and_v_says_that_latents_are_not_its_own);
	tcase_add_test(calls, dense_rows_as_blocks_that_overlap_are_attended_in_parts);
	tcase_add_loop_test(calls, a_wrong_field_is_named, 0, COUNT(wrong));
	tcase_add_loop_test(calls, what_is_planned_for_a_model_can_be_written_and_attended, 0, 3);
	tcase_set_timeout(rows, 60);
	tcase_set_timeout(decode, 60);
	tcase_set_timeout(calls, 60);
	suite_add_tcase(suite, rows);
	suite_add_tcase(suite, decode);
	suite_add_tcase(suite, calls);
	return run_on_device(suite);
}
