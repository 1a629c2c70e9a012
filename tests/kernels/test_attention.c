/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of every backend of the device against the answer in double precision. */
#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/error.h"
#include "tests/kernels/buffer.h"
#include "tests/support/expect.h"
#include "tests/kernels/number.h"
#include "tests/kernels/problem.h"
#include "tests/kernels/run.h"

#define COUNT(a) (int)(sizeof(a) / sizeof((a)[0]))

static const int groups[] = {1, 2, 4, 5, 7, 8, 16};
static const int dims[] = {40, 64, 80, 96, 128, 192, 256};
static const int block_sizes[] = {1, 16, 32, 64, 128};
static const int types[] = {KV_F32, KV_F16, KV_BF16};
static const int kv_types[] = {KV_F32, KV_F16, KV_BF16, KV_F8_E4M3};
static const int windows[] = {-1, 0, 1, 127, 1000};
static const float softcaps[] = {0, 30, 50};

static void check_all(const struct problem_spec *spec)
{
	struct problem *p = problem_new(spec);

	for (int i = 0; problem_backends()[i]; i++)
		if (problem_can_run(p, problem_backends()[i]))
			problem_check(p, problem_backends()[i]);
	problem_free(p);
}

static void add(struct problem_spec *spec, int q_len, int len)
{
	spec->q_lens[spec->n_seqs] = q_len;
	spec->lens[spec->n_seqs++] = len;
}

/*
 * Every group with every head size (the loop's index) and block size; the other axes advance with
 * the problem, by a step that meets all of their combinations in the end.
 */
START_TEST(every_shape_agrees_with_the_answer)
{
	int i_group = _i % COUNT(groups), i_dim = _i / COUNT(groups);

	for (int i = 0; i < COUNT(block_sizes); i++) {
		struct problem_spec spec = problem_default();
		int n = _i * COUNT(block_sizes) + i, axes = n * 1147; /* 31 * 37 */
		int size = block_sizes[i];

		spec.group = groups[i_group];
		spec.dk = spec.dv = dims[i_dim];
		spec.block_tokens = size;
		spec.dtype = types[axes % 3];
		spec.k_dtype = spec.v_dtype = kv_types[axes / 3 % 4];
		spec.kind = axes / 12 % 2 ? KV_LAYOUT_PAGED : KV_LAYOUT_FLAT;
		spec.head_major = axes / 24 % 2;
		spec.window_left = windows[axes / 48 % 5];
		spec.softcap = softcaps[axes / 240 % 3];
		spec.causal = axes / 720 % 4 != 0;
		spec.k_scale = 0.0625f;
		spec.v_scale = 0.3f;
		spec.spare_rows = n % 4;
		spec.shuffle = n;
		add(&spec, 1, 0);
		add(&spec, 1, 1);
		add(&spec, n % 2 ? 1 : (size < 20 ? size : 20), size);
		add(&spec, n % 2 ? 3 : 1, size - 1);
		add(&spec, 2 + n % 3, size + 1);
		add(&spec, 1 + n % 2, 1000);
		check_all(&spec);
	}
}
END_TEST

static int pick(int n, int i, int min, int max)
{
	double x = number_random(12345, (uint64_t)n, (uint64_t)i, 0);

	return min + (int)((x + 1) / 2 * (max - min + 1));
}

/*
 * Decode, with queries to verify: long, ragged, many splits and few, all that a backend for long
 * contexts may do in its own way; each problem twice, since a workspace serves call after call.
 */
START_TEST(decode_agrees_with_the_answer)
{
	static const int lens[][PROBLEM_SEQS] = {
		{1},
		{4097},
		{33000}, /* once; later rounds have 6000 */
		{5000, 1, 0, 17, 2049, 16, 15, 3000, 255, 256, 257, 1, 1, 900, 40, 7},
		{100, 100, 100, 100, 100, 100, 100, 100, 100, 100, 100, 100, 100, 100, 100, 100},
	};
	static const int heads[][2] = {{1, 8}, {8, 4}, {2, 1}, {4, 16}, {3, 7}, {1, 5}};
	static const int queries[] = {1, 1, 2, 4, 7};

	for (int i = 0; i < COUNT(lens); i++) {
		struct problem_spec spec = problem_default();
		int n = _i * COUNT(lens) + i;
		struct problem *p;

		spec.n_heads_kv = heads[n % COUNT(heads)][0];
		spec.group = heads[n % COUNT(heads)][1];
		if (lens[i][0] > 5000 && spec.n_heads_kv > 2)
			spec.n_heads_kv = 1; /* the answer takes long */
		spec.dk = spec.dv = n % 2 ? 64 : 128;
		spec.block_tokens = 16 << n % 3;
		if (n % 7 == 3)
			spec.block_tokens = 48;
		spec.dtype = n / 2 % 2 ? KV_F16 : KV_BF16;
		spec.k_dtype = spec.v_dtype = n / 4 % 2 ? KV_F8_E4M3 : spec.dtype;
		spec.k_scale = 0.0625f;
		spec.v_scale = 0.3f;
		spec.kind = n % 5 % 2 ? KV_LAYOUT_PAGED : KV_LAYOUT_FLAT;
		spec.head_major = n / 3 % 2;
		spec.window_left = n % 11 == 5 ? 700 : n % 11 == 8 ? 0 : -1;
		spec.softcap = n % 13 == 6 ? 30 : 0;
		spec.sm_scale = n % 17 == 9 ? -0.1f : 0;
		spec.causal = n % 19 != 4;
		spec.spare_rows = n % 4;
		spec.shuffle = n;
		for (int b = 0; b < PROBLEM_SEQS && (b == 0 || lens[i][1]); b++) {
			int q_len = queries[(n + b % 3) % COUNT(queries)];

			int len = lens[i][b] == 33000 && _i ? 6000 : lens[i][b];

			add(&spec, len && q_len > len ? 1 : q_len, len);
		}
		p = problem_new(&spec);
		for (int k = 0; problem_backends()[k]; k++) {
			if (!problem_can_run(p, problem_backends()[k]))
				continue;
			if (strcmp(problem_backends()[k]->name, "ref") == 0 && spec.lens[0] > 5000)
				continue;
			problem_check(p, problem_backends()[k]);
			problem_check(p, problem_backends()[k]);
		}
		problem_free(p);
	}
}
END_TEST

/*
 * Prompts, chunks of prompts, and decoding sequences beside them: tiles of rows and of keys that end
 * where sequences do and where they don't, windows that begin in the middle of one.
 */
START_TEST(prefill_agrees_with_the_answer)
{
	static const int lens[][4][2] = {
		{{300, 300}},
		{{1, 129}, {64, 512}, {0, 0}, {200, 777}},
		{{128, 128}, {33, 33}, {1, 1}, {5, 1000}},
		{{257, 640}, {17, 17}},
		{{40, 15}, {3, 0}, {90, 400}},
	};
	static const int heads[][2] = {{2, 4}, {1, 8}, {2, 1}, {1, 12}, {3, 3}, {1, 5}};
	static const int dims_kv[][2] = {{128, 128}, {64, 64},	 {256, 256}, {96, 96},
					 {80, 80},   {192, 128}, {32, 48},   {128, 128}};

	for (int i = 0; i < COUNT(lens); i++) {
		struct problem_spec spec = problem_default();
		int n = _i * COUNT(lens) + i;
		struct problem *p;

		spec.n_heads_kv = heads[n % COUNT(heads)][0];
		spec.group = heads[n % COUNT(heads)][1];
		spec.dk = dims_kv[_i % COUNT(dims_kv)][0];
		spec.dv = dims_kv[_i % COUNT(dims_kv)][1];
		spec.block_tokens = 16 << n % 4;
		if (n % 7 == 3)
			spec.block_tokens = 48;
		spec.dtype = n / 2 % 2 ? KV_F16 : KV_BF16;
		spec.k_dtype = spec.v_dtype = n % 3 == 1 ? KV_F8_E4M3 : spec.dtype;
		spec.k_scale = 0.0625f;
		spec.v_scale = 0.3f;
		spec.kind = n % 5 % 2 ? KV_LAYOUT_PAGED : KV_LAYOUT_FLAT;
		spec.head_major = n / 3 % 2;
		spec.window_left = n % 11 == 5 ? 100 : n % 11 == 8 ? 0 : n % 11 == 2 ? 300 : -1;
		spec.softcap = n % 6 == 4 ? 30 : 0;
		spec.causal = n % 9 != 4;
		spec.spare_rows = n % 4;
		spec.shuffle = n;
		for (int b = 0; b < 4; b++)
			if (lens[i][b][0])
				add(&spec, lens[i][b][0], lens[i][b][1]);
		p = problem_new(&spec);
		for (int k = 0; problem_backends()[k]; k++) {
			if (!problem_can_run(p, problem_backends()[k]))
				continue;
			problem_check(p, problem_backends()[k]);
			problem_check(p, problem_backends()[k]);
		}
		problem_free(p);
	}
}
END_TEST

/* Small rows, several heads of which a warp may take at once where it has much to read. */
START_TEST(heads_side_by_side_agree_with_the_answer)
{
	static const struct {
		int dtype, kv_dtype, dim, n_heads, group, q_len;
	} cases[] = {
		{KV_BF16, KV_BF16, 64, 4, 8, 1},    {KV_F16, KV_F16, 64, 4, 12, 1},
		{KV_BF16, KV_F8_E4M3, 64, 4, 8, 1}, {KV_F16, KV_F8_E4M3, 64, 2, 4, 4},
		{KV_F16, KV_F8_E4M3, 128, 2, 8, 1}, {KV_BF16, KV_F8_E4M3, 128, 6, 3, 2},
	};

	for (int much = 0; much < 2; much++) {
		struct problem_spec spec = problem_default();
		struct problem *p;

		spec.dtype = cases[_i].dtype;
		spec.k_dtype = spec.v_dtype = cases[_i].kv_dtype;
		spec.k_scale = 0.0625f;
		spec.v_scale = 0.3f;
		spec.dk = spec.dv = cases[_i].dim;
		spec.n_heads_kv = cases[_i].n_heads;
		spec.group = cases[_i].group;
		spec.max_seq_len = much ? 1 << 20 : 0; /* a bound: backends may go by it */
		add(&spec, cases[_i].q_len, 700);
		add(&spec, 1, 33);
		add(&spec, cases[_i].q_len, 2100);
		p = problem_new(&spec);
		for (int k = 0; problem_backends()[k]; k++) {
			const struct kv_attn_backend *backend = problem_backends()[k];

			if (backend->caps.features & KV_ATTN_BIT(MLA))
				continue;
			ck_assert(problem_can_run(p, backend));
			problem_check(p, backend);
		}
		problem_free(p);
	}
}
END_TEST

/* One call after another, on one workspace, has the same bits. */
START_TEST(a_call_is_repeatable_to_the_bit)
{
	struct problem_spec spec = problem_default();
	struct problem *p;

	spec.group = 8;
	spec.dk = spec.dv = 128;
	add(&spec, 1, 9000);
	add(&spec, 1, 40);
	add(&spec, 1, 3000);
	p = problem_new(&spec);
	for (int i = 0; problem_backends()[i]; i++) {
		size_t bytes = (size_t)(p->n_rows * p->n_heads_q * spec.dv) * 2;
		void *first, *out;
		float *lse;

		if (!problem_can_run(p, problem_backends()[i]))
			continue;
		problem_run(p, problem_backends()[i], &first, &lse);
		free(lse);
		for (int n = 0; n < 5; n++) {
			problem_run(p, problem_backends()[i], &out, &lse);
			ck_assert_mem_eq(out, first, bytes);
			free(out);
			free(lse);
		}
		free(first);
	}
	problem_free(p);
}
END_TEST

/* Sizes of no multiple, K and V of different types and sizes, rows of no alignment, empty batches.
 */
START_TEST(odd_shapes_agree_with_the_answer)
{
	for (int n = _i * 20; n < (_i + 1) * 20; n++) {
		struct problem_spec spec = problem_default();
		int n_seqs = pick(n, 0, 0, 5);

		spec.n_heads_kv = pick(n, 1, 1, 3);
		spec.group = pick(n, 2, 1, 20);
		spec.dk = pick(n, 3, 0, 3) ? pick(n, 4, 1, 70) : pick(n, 5, 1, 256);
		spec.dv = pick(n, 6, 0, 1) ? spec.dk : pick(n, 7, 1, 256);
		spec.block_tokens = pick(n, 8, 0, 3) ? pick(n, 9, 1, 40) : pick(n, 10, 1, 2048);
		spec.dtype = types[pick(n, 11, 0, 2)];
		spec.k_dtype = kv_types[pick(n, 12, 0, 3)];
		spec.v_dtype = kv_types[pick(n, 13, 0, 3)];
		spec.k_scale = (float)pick(n, 14, 1, 9) / 20;
		spec.v_scale = (float)pick(n, 15, 1, 9) / 20;
		spec.kind = pick(n, 16, KV_LAYOUT_FLAT, KV_LAYOUT_PAGED);
		spec.head_major = pick(n, 17, 0, 1);
		spec.gap = pick(n, 18, 0, 2);
		spec.window_left = pick(n, 19, 0, 1) ? -1 : pick(n, 20, 0, 90);
		spec.softcap = pick(n, 21, 0, 2) ? 0 : 20;
		spec.sm_scale = pick(n, 22, 0, 1) ? 0 : 0.2f;
		spec.causal = pick(n, 23, 0, 3) != 0;
		spec.spare_rows = pick(n, 24, 0, 3);
		spec.shuffle = n;
		for (int b = 0; b < n_seqs; b++)
			add(&spec, pick(n, 30 + b, 0, 1) ? 1 : pick(n, 40 + b, 0, 90),
			    pick(n, 50 + b, 0, 150));
		check_all(&spec);
	}
}
END_TEST

/* Bytes of the row of position @pos of sequence 0 in @p, on one backend. */
static const char *row_of(const struct problem *p, const void *out, int b, int pos,
			  size_t *ret_bytes)
{
	int row = pos - (p->spec.lens[b] - p->spec.q_lens[b]);

	for (int i = 0; i < b; i++)
		row += p->spec.q_lens[i];
	*ret_bytes = (size_t)(p->n_heads_q * p->spec.dv) * kv_dtype_bytes(p->spec.dtype);
	return (const char *)out + (size_t)row * *ret_bytes;
}

/* Sequence 0's rows in @spec's problem (where it stands at @b) are those of @whole, bit for bit. */
static void expect_same_bits(const struct kv_attn_backend *backend, const struct problem *whole,
			     const void *whole_out, const float *whole_lse,
			     const struct problem_spec *spec, int b)
{
	struct problem *p = problem_new(spec);
	float *lse;
	void *out;

	problem_run(p, backend, &out, &lse);
	for (int pos = spec->lens[b] - spec->q_lens[b]; pos < spec->lens[b]; pos++) {
		size_t bytes, n_lse = (size_t)p->n_heads_q;
		const char *mine = row_of(p, out, b, pos, &bytes);
		const char *right = row_of(whole, whole_out, 0, pos, &bytes);
		size_t my_row = (size_t)(mine - (const char *)out) / bytes;

		expect(memcmp(mine, right, bytes) == 0,
		       "%s: position %d differs in a batch of %d, chunk of %d", backend->name, pos,
		       spec->n_seqs, spec->q_lens[b]);
		expect(memcmp(lse + my_row * n_lse, whole_lse + (size_t)pos * n_lse,
			      n_lse * sizeof(float)) == 0,
		       "%s: lse of position %d differs", backend->name, pos);
	}
	free(out);
	free(lse);
	problem_free(p);
}

/* Prefill at once, in chunks, and token by token, alone and among others, with other block ids. */
static void expect_batch_leaves_no_trace(const struct kv_attn_backend *backend,
					 const struct problem_spec *base)
{
	static const int chunks[] = {1, 2, 7, 33, 64, 100};
	struct problem_spec spec = *base;
	struct problem *whole;
	float *lse;
	void *out;
	int len = 210;

	spec.unanswered = true;
	spec.invariant = 1;
	add(&spec, len, len);
	whole = problem_new(&spec);
	if (!problem_can_run(whole, backend)) {
		problem_free(whole);
		return;
	}
	problem_run(whole, backend, &out, &lse);
	for (int c = 0; c < COUNT(chunks); c++) {
		for (int done = c; done + chunks[c] <= len; done += c < 2 ? 41 : chunks[c]) {
			spec = *base;
			spec.unanswered = true;
			spec.invariant = 1;
			spec.shuffle = done + 1;
			add(&spec, chunks[c], done + chunks[c]);
			expect_same_bits(backend, whole, out, lse, &spec, 0);
			if (done % 3)
				continue;
			spec.names[0] = 17; /* now among others, one longer than all before */
			spec.q_lens[0] = c % 2 ? 130 : 1;
			spec.lens[0] = 130 + done;
			spec.names[1] = 0;
			add(&spec, chunks[c], done + chunks[c]);
			add(&spec, 1, 3);
			expect_same_bits(backend, whole, out, lse, &spec, 1);
		}
	}
	free(out);
	free(lse);
	problem_free(whole);
}

START_TEST(a_row_has_the_same_bits_in_every_batch_and_chunk)
{
	static const struct {
		int dk, dv, group, size, window, k_dtype, v_dtype, dtype;
		float softcap;
	} cases[] = {
		{64, 64, 3, 16, -1, KV_F16, KV_F16, KV_F32, 0},
		{64, 64, 3, 16, 50, KV_F16, KV_F16, KV_F32, 0},
		{128, 128, 8, 16, -1, KV_BF16, KV_BF16, KV_BF16, 0},
		{40, 24, 1, 5, -1, KV_F32, KV_F8_E4M3, KV_F32, 20},
		{256, 200, 2, 64, 70, KV_F8_E4M3, KV_F32, KV_F32, 0},
		{64, 64, 8, 16, 50, KV_F16, KV_F16, KV_F16, 0},
		{128, 128, 3, 32, -1, KV_F8_E4M3, KV_F8_E4M3, KV_BF16, 30},
		{64, 64, 1, 16, 100, KV_F8_E4M3, KV_F8_E4M3, KV_F16, 0},
	};

	for (int i = 0; problem_backends()[i]; i++) {
		struct problem_spec spec = problem_default();

		if (_i > 1 && strcmp(problem_backends()[i]->name, "ref") == 0)
			continue; /* it works row by row, and slowly */
		spec.n_heads_kv = 1 + _i % 2;
		spec.group = cases[_i].group;
		spec.dk = cases[_i].dk;
		spec.dv = cases[_i].dv;
		spec.block_tokens = cases[_i].size;
		spec.window_left = cases[_i].window;
		spec.k_dtype = cases[_i].k_dtype;
		spec.v_dtype = cases[_i].v_dtype;
		spec.dtype = cases[_i].dtype;
		spec.softcap = cases[_i].softcap;
		expect_batch_leaves_no_trace(problem_backends()[i], &spec);
	}
}
END_TEST

/* D04: four sequences, room for 128 tokens each, used partly; the rest once 0, NaN and infinity. */
START_TEST(content_beyond_the_sequence_length_has_no_influence)
{
	static const uint16_t fills[] = {0, 0x7e00, 0x7c00, 0xfc00, 0xffff};
	static const int lens[] = {32, 64, 96, 48};
	const int size = 16, n_blocks = 4 * 128 / 16, heads = 8, dim = 64;

	for (int i = 0; problem_backends()[i]; i++) {
		const struct kv_attn_backend *backend = problem_backends()[i];
		int64_t row = dim * 2, half = row * heads * size;

		if (backend->caps.features & KV_ATTN_BIT(MLA))
			continue; /* it does latents only */

		size_t pool_bytes = (size_t)(2 * half * n_blocks);
		size_t out_bytes = sizeof(lens) / sizeof(*lens) * 8 * 64 * 2;
		char *pool = malloc(pool_bytes), *first = NULL;
		int32_t table[4 * 8], loc[] = {0, 1, 2, 3, 4};
		uint16_t q[4 * 8 * 64];
		struct kv_attention_args args = {
			.size = sizeof(args),
			.device = buffer_device,
			.dtype = KV_F16,
			.n_seqs = 4,
			.n_tokens = 4,
			.n_heads_q = heads,
			.max_query_len = 1,
			.max_seq_len = 128,
			.table_width = 8,
			.q = buffer_new(sizeof(q)),
			.out = buffer_new(out_bytes),
			.query_start_loc = buffer_new(sizeof(loc)),
			.seq_lens = buffer_new(sizeof(lens)),
			.block_table = buffer_new(sizeof(table)),
			.k = {buffer_new(pool_bytes), 2 * half, row * heads, row, size, heads, dim,
			      KV_F16, 1, 0},
			.window_left = -1,
			.causal = 1,
		};

		args.v = args.k;
		args.v.base = (char *)args.k.base + half;
		ck_assert_int_eq(kv_attention_workspace_bytes(&args, &args.workspace_bytes), 0);
		args.workspace = buffer_new(args.workspace_bytes);
		buffer_fill(args.workspace, 0, args.workspace_bytes);
		for (int b = 0; b < 32; b++)
			table[b] = (b * 5 + 3) % n_blocks;
		for (int d = 0; d < COUNT(q); d++)
			q[d] = (uint16_t)number_encode(KV_F16, number_random(1, (uint64_t)d, 0, 0));
		buffer_put((void *)(uintptr_t)args.q, q, sizeof(q));
		buffer_put((void *)(uintptr_t)args.query_start_loc, loc, sizeof(loc));
		buffer_put((void *)(uintptr_t)args.seq_lens, lens, sizeof(lens));
		buffer_put((void *)(uintptr_t)args.block_table, table, sizeof(table));
		for (int f = 0; f < COUNT(fills); f++) {
			uint16_t *cells = (uint16_t *)(void *)pool;
			char *out = malloc(out_bytes);

			for (int64_t c = 0; c < 2 * half / 2 * n_blocks; c++)
				cells[c] = fills[f];
			for (int64_t b = 0; b < 4; b++)
				for (int64_t j = 0; j < lens[b]; j++)
					for (int64_t c = 0; c < 2 * heads * dim; c++) {
						int64_t at = table[b * 8 + j / size] * half +
							     c / (heads * dim) * half / 2 +
							     j % size * heads * dim +
							     c % (heads * dim);
						double x = number_random(2, (uint64_t)b,
									 (uint64_t)j, (uint64_t)c);

						cells[at] = (uint16_t)number_encode(KV_F16, x);
					}
			buffer_put(args.k.base, pool, pool_bytes);
			ck_assert_msg(kv_attention_on(backend, &args) == 0, "%s", kv_error_text());
			buffer_get(out, args.out, out_bytes);
			for (int64_t d = 0; d < 4 * heads * dim; d++)
				expect(isfinite(number_get(out, d, KV_F16)),
				       "%s: element %lld with the rest 0x%x", backend->name,
				       (long long)d, fills[f]);
			if (first)
				ck_assert_mem_eq(out, first, out_bytes);
			else
				first = out;
			if (out != first)
				free(out);
		}
		free(first);
		free(pool);
		buffer_free(args.k.base);
		buffer_free(args.workspace);
		buffer_free(args.out);
		buffer_free((void *)(uintptr_t)args.q);
		buffer_free((void *)(uintptr_t)args.query_start_loc);
		buffer_free((void *)(uintptr_t)args.seq_lens);
		buffer_free((void *)(uintptr_t)args.block_table);
	}
}
END_TEST

/* A key that a row doesn't see is left out, whatever its V holds; one that it sees is not. */
START_TEST(a_later_token_with_nan_spoils_only_rows_that_see_it)
{
	for (int i = 0; problem_backends()[i]; i++) {
		struct problem_spec spec = problem_default();
		const int len = 120, bad = 41, window = 40;
		struct problem *p;
		int32_t table[120];
		char row[128];
		float *lse;
		void *out;

		spec.block_tokens = 1; /* so that block id and position go together */
		spec.window_left = window;
		spec.invariant = 1;
		add(&spec, len, len);
		p = problem_new(&spec);
		if (!problem_can_run(p, problem_backends()[i])) {
			problem_free(p);
			continue;
		}
		for (int h = 0; h < 2; h++) {
			buffer_get(table, p->args.block_table, sizeof(table));
			memset(row, 0xff, sizeof(row));
			buffer_put((char *)p->args.v.base + table[bad] * p->args.v.block_stride +
					   h * p->args.v.head_stride,
				   row, sizeof(row));
		}
		problem_run(p, problem_backends()[i], &out, &lse);
		for (int64_t pos = 0; pos < len; pos++)
			for (int64_t d = 0; d < p->n_heads_q * spec.dv; d++) {
				double x = number_get(out, pos * p->n_heads_q * spec.dv + d,
						      spec.dtype);

				expect(isnan(x) == (pos >= bad && pos <= bad + window),
				       "%s: position %lld has %g", problem_backends()[i]->name,
				       (long long)pos, x);
			}
		free(out);
		free(lse);
		problem_free(p);
	}
}
END_TEST

START_TEST(a_score_of_nan_or_infinity_does_not_pass_for_an_empty_row)
{
	static const double values[] = {NAN, INFINITY};

	for (int i = 0; problem_backends()[i]; i++) {
		for (int v = 0; v < COUNT(values); v++) {
			struct problem_spec spec = problem_default();
			struct problem *p;
			uint16_t q[6 * 64];
			float *lse;
			void *out;

			add(&spec, 1, 1);
			p = problem_new(&spec);
			if (!problem_can_run(p, problem_backends()[i])) {
				problem_free(p);
				continue;
			}
			for (int d = 0; d < COUNT(q); d++)
				q[d] = (uint16_t)number_encode(KV_F16, values[v]);
			buffer_put((void *)(uintptr_t)p->args.q, q, sizeof(q));
			problem_run(p, problem_backends()[i], &out, &lse);
			ck_assert(isnan(number_get(out, 0, spec.dtype)));
			ck_assert(isnan(lse[0]));
			free(out);
			free(lse);
			problem_free(p);
		}
	}
}
END_TEST

/* CK_RUN_CASE picks one: "odd" and "dirt" are small enough for compute-sanitizer. */
static TCase *add_case(Suite *suite, const char *name)
{
	TCase *tcase = tcase_create(name);

	tcase_set_timeout(tcase, 300);
	suite_add_tcase(suite, tcase);
	return tcase;
}

int main(void)
{
	Suite *suite = suite_create("kernels/attention");
	TCase *tcase;

	tcase_add_loop_test(add_case(suite, "grid"), every_shape_agrees_with_the_answer, 0,
			    COUNT(groups) * COUNT(dims));
	tcase = add_case(suite, "decode");
	tcase_add_loop_test(tcase, decode_agrees_with_the_answer, 0, 12);
	tcase_add_loop_test(tcase, heads_side_by_side_agree_with_the_answer, 0, 6);
	tcase_add_test(tcase, a_call_is_repeatable_to_the_bit);
	tcase_add_loop_test(add_case(suite, "prefill"), prefill_agrees_with_the_answer, 0,
			    buffer_device == KV_DEVICE_CUDA ? 16 : 3);
	tcase_add_loop_test(add_case(suite, "odd"), odd_shapes_agree_with_the_answer, 0, 10);
	tcase_add_loop_test(add_case(suite, "bits"),
			    a_row_has_the_same_bits_in_every_batch_and_chunk, 0, 8);
	tcase = add_case(suite, "dirt");
	tcase_add_test(tcase, content_beyond_the_sequence_length_has_no_influence);
	tcase_add_test(tcase, a_later_token_with_nan_spoils_only_rows_that_see_it);
	tcase_add_test(tcase, a_score_of_nan_or_infinity_does_not_pass_for_an_empty_row);
	return run_on_device(suite);
}
