/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The indexer and sparse attention, of every backend of the device, against answers in double made
 * from the stored bytes. What is chosen is held against the scores that were given out, so that it
 * must be right to the last tie.
 */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/error.h"
#include "kernels/dsa.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/number.h"
#include "tests/kernels/run.h"
#include "tests/support/expect.h"

#define COUNT(a) (int)(sizeof(a) / sizeof((a)[0]))
#define DIM	 KV_INDEX_DIM
#define POISON	 0xff /* NaN as e4m3 and as f32 */

struct index_spec {
	int seed;
	int n_seqs;
	int lens[512];
	int queries[512];
	int heads;
	int top_k;
	int page;
	int form;
	int row; /* KV_INDEX_ROW_* */
	int dtype;
	bool ties;  /* keys of 3 kinds alone */
	bool plain; /* no query_start_loc */
	bool pow2;
};

struct index_problem {
	struct index_spec s;
	struct kv_index_args args;
	int n_tokens; /* queries */
	int n_blocks;
	int width;
	int most;
	size_t block_bytes;
	int32_t *table; /* host's copies */
	int32_t *starts;
	uint8_t *cache;
	uint8_t *q;
	float *weights;
	void *buffers[16];
	int n_buffers;
};

static void *put(struct index_problem *p, const void *from, size_t bytes)
{
	void *b = buffer_new(bytes);

	if (from)
		buffer_put(b, from, bytes);
	else
		buffer_fill(b, POISON, bytes);
	p->buffers[p->n_buffers++] = b;
	return b;
}

static double code_value(const uint8_t *block, const struct index_spec *s, int row, int d, double *scale)
{
	int code_bytes = s->row - 4;
	const uint8_t *scales = block + s->page * code_bytes + row * 4;
	static const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
	float f;
	int code;

	if (s->row == KV_INDEX_ROW_FP8) {
		memcpy(&f, scales, sizeof(f));
		*scale = (double)f;
		return number_decode(KV_F8_E4M3, block[row * code_bytes + d]);
	}
	*scale = 1;
	code = block[row * code_bytes + d / 2] >> 4 * (d % 2) & 15;
	return (code & 8 ? -1 : 1) * e2m1[code & 7] * ldexp(1, scales[d / 32] - 127);
}

static double key_value(const struct index_spec *s, int b, int j, int d)
{
	double x = number_random((uint64_t)s->seed, (uint64_t)(s->ties ? 0 : b),
				 (uint64_t)(s->ties ? j * j % 3 : j), (uint64_t)d);

	return 3 * x * x * x; /* some small, so that subnormal codes are met */
}

/* Bytes of row @row must be what the element's definition says, in double. */
static void check_row(const struct index_problem *p, const uint8_t *block, int row, const char *key)
{
	const struct index_spec *s = &p->s;
	double most = 0, scale, x;

	for (int d = 0; d < DIM; d++)
		most = fmax(most, fabs(number_get(key, d, s->dtype)));
	for (int d = 0; d < DIM; d++) {
		double stored = code_value(block, s, row, d, &scale);

		x = number_get(key, d, s->dtype);
		if (s->row == KV_INDEX_ROW_FP8) {
			double right = (double)(float)(fmax(most, 1e-4) / 448);

			if (s->pow2)
				right = ldexp(1, (int)ceil(log2(right)));
			expect(fabs(scale / right - 1) < 2e-7, "scale %g, not %g", scale, right);
			expect(stored == number_decode(KV_F8_E4M3,
						       number_encode(KV_F8_E4M3,
								     (double)((float)x / (float)scale))),
			       "element %d: %g of %g", d, stored, x);
		} else {
			double tile = 0, step;

			for (int i = 0; i < 32; i++)
				tile = fmax(tile,
					    fabs(number_get(key, d / 32 * 32 + i, s->dtype)));
			step = ldexp(1, (int)ceil(log2(tile / 6)));
			/* half of the gap between neighbours: 0.5, 1 or 2 steps */
			expect(fabs(stored - x) <= step * (fabs(x) > 4 * step	? 1
							   : fabs(x) > 2 * step ? 0.5
										: 0.25) *
								   (1 + 1e-9),
			       "element %d: %g of %g by %g", d, stored, x, step);
		}
	}
}

static void write_all(struct index_problem *p)
{
	const struct index_spec *s = &p->s;
	size_t element = kv_dtype_bytes(s->dtype);
	int total = 1;
	uint8_t *untouched;
	int64_t *slots;
	char *keys;

	for (int b = 0; b < s->n_seqs; b++)
		total += s->lens[b];
	slots = malloc(sizeof(*slots) * (size_t)total);
	keys = malloc((size_t)total * DIM * element);
	slots[0] = -1;
	for (int d = 0; d < DIM; d++)
		number_set(keys, d, s->dtype, number_encode(s->dtype, NAN));
	for (int b = 0, t = 1; b < s->n_seqs; b++)
		for (int j = 0; j < s->lens[b]; j++, t++) {
			slots[t] = (int64_t)p->table[b * p->width + j / s->page] * s->page +
				   j % s->page;
			for (int d = 0; d < DIM; d++)
				number_set(keys, (int64_t)t * DIM + d, s->dtype,
					   number_encode(s->dtype, key_value(s, b, j, d)));
		}
	KV_OPTIONS(kv_index_write_args, w, .device = buffer_device, .dtype = s->dtype,
		   .n_tokens = total, .pow2_scales = s->pow2, .cache = p->args.cache);
	w.key = put(p, keys, (size_t)total * DIM * element);
	w.slots = put(p, slots, sizeof(*slots) * (size_t)total);
	ck_assert_msg(kv_index_write(&w) == 0, "%s", kv_error_text());
	buffer_get(p->cache, p->args.cache.base, p->block_bytes * (size_t)p->n_blocks);
	untouched = malloc(p->block_bytes * (size_t)p->n_blocks);
	memset(untouched, 1, p->block_bytes * (size_t)p->n_blocks);
	for (int t = 1; t < total; t++) {
		int64_t block = slots[t] / s->page;
		int row = (int)(slots[t] % s->page), codes = s->row - 4;
		size_t at = (size_t)block * p->block_bytes;

		check_row(p, p->cache + at, row, keys + (size_t)t * DIM * element);
		memset(untouched + at + row * codes, 0, (size_t)codes);
		memset(untouched + at + s->page * codes + row * 4, 0, 4);
	}
	for (size_t i = 0; i < p->block_bytes * (size_t)p->n_blocks; i++)
		expect(!untouched[i] || p->cache[i] == POISON, "byte %zu is nobody's", i);
	free(untouched);
	free(slots);
	free(keys);
}

static struct index_problem *problem_new(const struct index_spec *spec)
{
	struct index_problem *p = calloc(1, sizeof(*p));
	const struct index_spec *s = &p->s;
	int next = 0;

	p->s = *spec;
	p->starts = calloc((size_t)s->n_seqs + 1, sizeof(int32_t));
	for (int b = 0; b < s->n_seqs; b++) {
		int n = (s->lens[b] + s->page - 1) / s->page;

		p->starts[b + 1] = p->starts[b] + s->queries[b];
		p->width = n > p->width ? n : p->width;
		p->most = s->lens[b] > p->most ? s->lens[b] : p->most;
		p->n_blocks += n;
	}
	p->n_tokens = p->starts[s->n_seqs];
	p->n_blocks = (p->n_blocks + 3) | 1;
	while (p->n_blocks % 7 == 0 || p->n_blocks % 3 == 0)
		p->n_blocks += 2;
	p->block_bytes = (size_t)s->page * (size_t)s->row + 32;
	p->table = malloc(sizeof(int32_t) * (size_t)(s->n_seqs * p->width + 1));
	for (int b = 0; b < s->n_seqs; b++)
		for (int c = 0; c < p->width; c++) /* unused entries would crash */
			p->table[b * p->width + c] = c < (s->lens[b] + s->page - 1) / s->page
							     ? next++ * 21 % p->n_blocks
							     : INT32_MAX;
	p->cache = malloc(p->block_bytes * (size_t)p->n_blocks);
	p->q = malloc((size_t)(p->n_tokens * s->heads * DIM) + 1);
	p->weights = malloc(sizeof(float) * (size_t)(p->n_tokens * s->heads + 1));
	for (int i = 0; i < p->n_tokens * s->heads * DIM; i++)
		p->q[i] = (uint8_t)number_encode(
			KV_F8_E4M3, 4 * number_random(7, (uint64_t)s->seed, (uint64_t)i, 0));
	for (int i = 0; i < p->n_tokens * s->heads; i++)
		p->weights[i] = (float)(0.5 + number_random(8, (uint64_t)s->seed, (uint64_t)i, 1));
	p->args = (struct kv_index_args){
		.size = sizeof(p->args),
		.device = buffer_device,
		.form = s->form,
		.n_seqs = s->n_seqs,
		.n_tokens = p->n_tokens,
		.max_seq_len = p->most + 3,
		.table_width = p->width,
		.n_heads = s->heads,
		.top_k = s->top_k,
		.scores_stride = (p->most + 3 + 7) / 4 * 4,
		.cache = {.block_stride = (int64_t)p->block_bytes,
			  .block_tokens = s->page,
			  .n_heads = 1,
			  .head_dim = s->row,
			  .dtype = KV_BYTES},
	};
	for (int b = 0; b < s->n_seqs; b++)
		p->args.max_query_len = s->queries[b] > p->args.max_query_len
						? s->queries[b]
						: p->args.max_query_len;
	p->args.cache.base = put(p, NULL, p->block_bytes * (size_t)p->n_blocks);
	p->args.q = put(p, p->q, (size_t)(p->n_tokens * s->heads * DIM));
	p->args.weights = put(p, p->weights, sizeof(float) * (size_t)(p->n_tokens * s->heads));
	p->args.seq_lens = put(p, s->lens, sizeof(int32_t) * (size_t)s->n_seqs);
	p->args.block_table = put(p, p->table, sizeof(int32_t) * (size_t)(s->n_seqs * p->width));
	if (!s->plain)
		p->args.query_start_loc =
			put(p, p->starts, sizeof(int32_t) * (size_t)(s->n_seqs + 1));
	p->args.scores = put(p, NULL, sizeof(float) * (size_t)(p->n_tokens * p->args.scores_stride));
	p->args.chosen = put(p, NULL, sizeof(int32_t) * (size_t)(p->n_tokens * s->top_k));
	write_all(p);
	return p;
}

static void problem_free(struct index_problem *p)
{
	for (int i = 0; i < p->n_buffers; i++)
		buffer_free(p->buffers[i]);
	free(p->table);
	free(p->starts);
	free(p->cache);
	free(p->q);
	free(p->weights);
	free(p);
}

static double score_right(const struct index_problem *p, int t, int b, int j)
{
	const struct index_spec *s = &p->s;
	const uint8_t *block =
		p->cache + (size_t)p->table[b * p->width + j / s->page] * p->block_bytes;
	double key[DIM], sum = 0, scale = 1;

	for (int d = 0; d < DIM; d++)
		key[d] = code_value(block, s, j % s->page, d, &scale);
	for (int h = 0; h < s->heads; h++) {
		double x = 0;

		for (int d = 0; d < DIM; d++)
			x += number_decode(KV_F8_E4M3, p->q[(t * s->heads + h) * DIM + d]) * key[d];
		sum += fmax(x, 0) * (double)p->weights[t * s->heads + h];
	}
	return sum * scale;
}

/* Row @t of chosen is the top_k of its scores, by position. */
static void check_chosen(const struct index_problem *p, int t, int b, int n_keys, const float *scores,
			 const int32_t *chosen)
{
	const struct index_spec *s = &p->s;
	int n = 0, last = -1, equal = 0, taken = 0;
	bool *in = calloc((size_t)n_keys + 1, 1);
	float least = INFINITY;

	for (int i = 0; i < s->top_k; i++) {
		int j = last + 1;

		if (i >= n_keys) {
			expect(chosen[i] == -1, "query %d: entry %d is %d", t, i, chosen[i]);
			continue;
		}
		if (s->form == KV_INDEX_POSITIONS)
			j = chosen[i];
		else /* the next position with this slot */
			while (j < n_keys && p->table[b * p->width + j / s->page] * s->page +
							     j % s->page !=
						     chosen[i])
				j++;
		expect(j > last && j < n_keys, "query %d: entry %d is %d", t, i, chosen[i]);
		last = j;
		in[j] = true;
		least = fminf(least, scores[j]);
		n++;
	}
	for (int j = 0; j < n_keys; j++) {
		expect(in[j] || scores[j] <= least, "query %d: key %d was left out", t, j);
		if (scores[j] == least) { /* the first of the equal ones are in */
			expect(!in[j] || taken == equal, "query %d: ties, key %d", t, j);
			equal++;
			taken += in[j];
		}
	}
	expect(n == (s->top_k < n_keys ? s->top_k : n_keys), "query %d: %d chosen", t, n);
	free(in);
}

static void check_by(struct index_problem *p, const struct kv_dsa_backend *backend, double tolerance)
{
	const struct index_spec *s = &p->s;
	size_t n_scores = (size_t)(p->n_tokens * p->args.scores_stride);
	size_t n_chosen = (size_t)(p->n_tokens * s->top_k);
	float *scores = malloc(n_scores * 4), *again = malloc(n_scores * 4), poison;
	int32_t *chosen = malloc(n_chosen * 4), *chosen_again = malloc(n_chosen * 4);
	double error = 0, norm = 0;

	memset(&poison, POISON, sizeof(poison));
	for (int run = 0; run < 2; run++) {
		buffer_fill(p->args.scores, POISON, n_scores * 4);
		buffer_fill(p->args.chosen, 0x7e, n_chosen * 4);
		ck_assert_msg(kv_index_choose_on(backend, &p->args) == 0, "%s: %s", backend->name,
			      kv_error_text());
		buffer_get(run ? again : scores, p->args.scores, n_scores * 4);
		buffer_get(run ? chosen_again : chosen, p->args.chosen, n_chosen * 4);
	}
	ck_assert_mem_eq(scores, again, n_scores * 4);
	ck_assert_mem_eq(chosen, chosen_again, n_chosen * 4);
	for (int b = 0; b < s->n_seqs; b++)
		for (int t = p->starts[b]; t < p->starts[b + 1]; t++) {
			int n_keys = s->lens[b] - (p->starts[b + 1] - 1 - t);
			const float *row = scores + t * p->args.scores_stride;

			n_keys = n_keys < 0 ? 0 : n_keys;
			for (int j = 0; j < n_keys; j++) {
				double right = score_right(p, t, b, j), d = (double)row[j] - right;

				error += d * d;
				norm += right * right;
			}
			for (int j = n_keys; j < p->args.scores_stride; j++)
				expect(memcmp(&row[j], &poison, 4) == 0,
				       "%s: query %d wrote past its keys, %d", backend->name, t, j);
			check_chosen(p, t, b, n_keys, row, chosen + (int64_t)t * s->top_k);
		}
	expect(error <= tolerance * tolerance * norm, "%s: scores are off by %g", backend->name,
	       sqrt(error / norm));
	free(scores);
	free(again);
	free(chosen);
	free(chosen_again);
}

static void spec_check(const struct index_spec *spec)
{
	struct index_problem *p = problem_new(spec);

	for (int i = 0; kv_dsa_backends[i]; i++) {
		const struct kv_dsa_backend *backend = kv_dsa_backends[i];
		struct kv_index_args a = p->args;

		a.chosen = NULL;
		if (backend->device != buffer_device || !backend->score ||
		    kv_index_choose_on(backend, &a) == -ENOTSUP)
			continue;
		/* the matrix units' own sums of e4m3 products have fewer bits than f32 */
		check_by(p, backend, strcmp(backend->name, "wgmma") ? 1e-5 : 2e-3);
	}
	problem_free(p);
}

static struct index_spec spec_default(void)
{
	return (struct index_spec){.heads = 4,
				   .top_k = 32,
				   .page = 64,
				   .row = KV_INDEX_ROW_FP8,
				   .dtype = KV_BF16};
}

START_TEST(what_is_chosen_is_the_best_of_right_scores)
{
	static const struct {
		int lens[6], queries[6], heads, top_k, page;
	} cases[] = {
		{{1, 63, 64, 65, 128, 31}, {1, 1, 1, 1, 1, 1}, 4, 32, 64},
		{{500, 3, 0, 77, 200, 129}, {1, 2, 0, 5, 3, 1}, 3, 64, 64},
		{{700, 64, 32, 33, 1, 90}, {9, 1, 1, 1, 1, 1}, 2, 100, 128},
		{{100, 40, 17, 16, 15, 1}, {1, 4, 1, 1, 2, 1}, 4, 16, 16},
		{{5000, 9000, 64, 2049, 2048, 2047}, {1, 1, 1, 1, 1, 2}, 2, 2048, 64},
		{{300, 200, 100, 1, 2, 3}, {1, 1, 1, 1, 1, 1}, 64, 128, 64},
		{{300, 200, 100, 1, 2, 3}, {4, 1, 4, 1, 2, 3}, 32, 50, 64},
	};
	struct index_spec s = spec_default();

	s.seed = _i;
	s.n_seqs = 6;
	memcpy(s.lens, cases[_i / 2].lens, sizeof(cases[0].lens));
	memcpy(s.queries, cases[_i / 2].queries, sizeof(cases[0].queries));
	s.heads = cases[_i / 2].heads;
	s.top_k = cases[_i / 2].top_k;
	s.page = cases[_i / 2].page;
	s.form = _i % 2;
	s.pow2 = _i % 2;
	s.dtype = _i % 3 == 0 ? KV_BF16 : _i % 3 == 1 ? KV_F32 : KV_F16;
	spec_check(&s);
}
END_TEST

START_TEST(of_equal_scores_the_lowest_positions_are_chosen)
{
	struct index_spec s = spec_default();

	s.seed = 20 + _i;
	s.n_seqs = 3;
	s.ties = true;
	s.top_k = _i ? 2048 : 100;
	for (int b = 0; b < 3; b++) {
		s.lens[b] = _i ? 4090 + 3 * b : 333 + 64 * b;
		s.queries[b] = 1 + b % 2;
	}
	spec_check(&s);
}
END_TEST

START_TEST(any_batch_is_right)
{
	static const int batches[] = {1, 2, 33, 200, 512};
	struct index_spec s = spec_default();

	s.n_seqs = batches[_i];
	s.seed = 30 + _i;
	s.plain = _i % 2;
	s.top_k = 16;
	for (int b = 0; b < s.n_seqs; b++) {
		s.lens[b] = 1 + b * 37 % 90;
		s.queries[b] = 1;
	}
	spec_check(&s);
}
END_TEST

START_TEST(keys_of_four_bits_are_stored_and_scored)
{
	struct index_spec s = spec_default();

	s.seed = 50;
	s.row = KV_INDEX_ROW_FP4;
	s.dtype = _i ? KV_F32 : KV_BF16;
	s.n_seqs = 3;
	for (int b = 0; b < 3; b++) {
		s.lens[b] = 65 * (b + 1);
		s.queries[b] = 1 + b;
	}
	spec_check(&s);
}
END_TEST

/* D02, of the indexer: a block that begins past 2^32 bytes. */
START_TEST(blocks_past_4_gib_are_their_own)
{
	size_t stride = (size_t)1 << 27, bytes = 34 * stride;
	int32_t table[] = {33}, len = 64, chosen[64];
	int64_t slots[64];
	float keys[64 * DIM], weight = 1, scores[64];
	uint8_t q[DIM];
	struct index_problem p = {.n_buffers = 0};

	if (buffer_bytes_free() < 2 * bytes)
		return;
	for (int j = 0; j < 64; j++)
		slots[j] = 33 * 64 + j;
	for (int i = 0; i < 64 * DIM; i++)
		keys[i] = (float)(1 + i / DIM);
	memset(q, (int)number_encode(KV_F8_E4M3, 1), sizeof(q));
	KV_OPTIONS(kv_index_write_args, w, .device = buffer_device, .dtype = KV_F32, .n_tokens = 64,
		   .cache = {.block_stride = (int64_t)stride,
			     .block_tokens = 64,
			     .n_heads = 1,
			     .head_dim = KV_INDEX_ROW_FP8,
			     .dtype = KV_BYTES});
	KV_OPTIONS(kv_index_args, a, .device = buffer_device, .n_seqs = 1, .n_tokens = 1,
		   .max_query_len = 1, .max_seq_len = 64, .table_width = 1, .n_heads = 1,
		   .top_k = 64);
	w.cache.base = buffer_new_sparse(bytes);
	w.key = put(&p, keys, sizeof(keys));
	w.slots = put(&p, slots, sizeof(slots));
	ck_assert_msg(kv_index_write(&w) == 0, "%s", kv_error_text());
	a.cache = w.cache;
	a.q = put(&p, q, sizeof(q));
	a.weights = put(&p, &weight, sizeof(weight));
	a.seq_lens = put(&p, &len, sizeof(len));
	a.block_table = put(&p, table, sizeof(table));
	a.chosen = put(&p, NULL, sizeof(chosen));
	a.scores = put(&p, NULL, sizeof(scores));
	ck_assert_msg(kv_index_choose(&a) == 0, "%s", kv_error_text());
	buffer_get(chosen, a.chosen, sizeof(chosen));
	buffer_get(scores, a.scores, sizeof(scores));
	for (int j = 0; j < 64; j++) {
		ck_assert_int_eq(chosen[j], slots[j]);
		expect(fabsf(scores[j] / (float)(DIM * (j + 1)) - 1) < 1e-3f, "%g",
		       (double)scores[j]);
	}
	for (int i = 0; i < p.n_buffers; i++)
		buffer_free(p.buffers[i]);
	buffer_free_sparse(w.cache.base, bytes);
}
END_TEST

/* D02, of latent rows: as above, row j of the block is j + 1 everywhere. q = 0: out is their mean. */
START_TEST(latent_rows_past_4_gib_are_their_own)
{
	enum { DIM_ALL = 576, LATENT = 512, ROWS = 64 };
	size_t stride = (size_t)1 << 27, bytes = 34 * stride;
	struct index_problem p = {.n_buffers = 0};
	char rows[ROWS * DIM_ALL * 2], out[LATENT * 2], q[DIM_ALL * 2] = {0};
	int32_t chosen[ROWS];

	if (buffer_bytes_free() < 2 * bytes)
		return;
	for (int i = 0; i < ROWS * DIM_ALL; i++)
		number_set(rows, i, KV_BF16, number_encode(KV_BF16, 1 + i / DIM_ALL));
	for (int j = 0; j < ROWS; j++)
		chosen[j] = 33 * ROWS + j;
	KV_OPTIONS(kv_sparse_mla_args, a, .device = buffer_device, .dtype = KV_BF16, .n_tokens = 1,
		   .n_heads = 1, .latent_dim = LATENT, .rope_dim = DIM_ALL - LATENT, .top_k = ROWS,
		   .sm_scale = 1,
		   .cache = {.block_stride = (int64_t)stride,
			     .token_stride = 2 * DIM_ALL,
			     .head_stride = 2 * DIM_ALL,
			     .block_tokens = ROWS,
			     .n_heads = 1,
			     .head_dim = DIM_ALL,
			     .dtype = KV_BF16,
			     .scale = 1});
	a.cache.base = buffer_new_sparse(bytes);
	buffer_put((char *)a.cache.base + 33 * stride, rows, sizeof(rows));
	a.q = put(&p, q, sizeof(q));
	a.chosen = put(&p, chosen, sizeof(chosen));
	a.out = put(&p, NULL, sizeof(out));
	ck_assert_msg(kv_sparse_mla(&a) == 0, "%s", kv_error_text());
	buffer_get(out, a.out, sizeof(out));
	for (int d = 0; d < LATENT; d++)
		expect(number_get(out, d, KV_BF16) == 32.5, "element %d is %g", d,
		       number_get(out, d, KV_BF16));
	for (int i = 0; i < p.n_buffers; i++)
		buffer_free(p.buffers[i]);
	buffer_free_sparse(a.cache.base, bytes);
}
END_TEST

struct sparse_case {
	int n_tokens, heads, latent, rope, top_k, page, dtype, cache_dtype;
	double holes; /* part of chosen that is -1 */
	double tolerance;
};

/* A latent row as the format says, of random numbers; value[] receives what it stands for. */
static void make_row(const struct sparse_case *c, char *row, int seed, double *value)
{
	int dim = c->latent + c->rope;

	for (int d = 0; d < dim; d++) {
		double x = number_random(3, (uint64_t)seed, (uint64_t)d, 9);

		if (c->cache_dtype == KV_BYTES && d < c->latent) {
			float scale = 0.25f + (float)(d / 128);

			row[d] = (char)number_encode(KV_F8_E4M3, 4 * x);
			memcpy(row + c->latent + d / 128 * 4, &scale, 4);
			value[d] = number_decode(KV_F8_E4M3, (uint8_t)row[d]) * (double)scale;
		} else if (c->cache_dtype == KV_BYTES) {
			char *at = row + c->latent + c->latent / 128 * 4;

			number_set(at, d - c->latent, c->dtype, number_encode(c->dtype, x));
			value[d] = number_get(at, d - c->latent, c->dtype);
		} else {
			number_set(row, d, c->cache_dtype, number_encode(c->cache_dtype, 2 * x));
			value[d] = number_get(row, d, c->cache_dtype) *
				   (kv_dtype_bytes(c->cache_dtype) == 1 ? 0.5 : 1);
		}
	}
}

static const struct sparse_case sparse_cases[] = {
	{3, 16, 512, 64, 128, 64, KV_BF16, KV_BF16, 0, 4e-3},
	{1, 128, 512, 64, 100, 64, KV_BF16, KV_BF16, 0.3, 4e-3},
	{2, 64, 512, 64, 256, 64, KV_BF16, KV_BYTES, 0.1, 5e-3},
	{5, 1, 512, 64, 70, 16, KV_BF16, KV_BF16, 0.9, 4e-3},
	{2, 5, 512, 64, 65, 64, KV_F16, KV_F16, 0.2, 6e-4},
	{2, 3, 128, 32, 33, 8, KV_F32, KV_F32, 0.2, 2e-5},
	{2, 4, 512, 64, 64, 64, KV_BF16, KV_F8_E4M3, 0.2, 4e-3},
	{9, 70, 512, 64, 64, 64, KV_BF16, KV_BYTES, 1, 5e-3},
	{1, 8, 512, 64, 2048, 64, KV_BF16, KV_BF16, 0.01, 4e-3},
	{40, 2, 512, 64, 190, 64, KV_BF16, KV_BF16, 0.5, 4e-3},
	{150, 3, 512, 64, 129, 64, KV_BF16, KV_BF16, 0.3, 4e-3}, /* more than run at a time */
	{70, 128, 512, 64, 65, 32, KV_BF16, KV_BF16, 0.1, 4e-3},
	{3, 80, 512, 64, 300, 64, KV_BF16, KV_F8_E4M3, 0.4, 5e-3},
	{2, 130, 512, 64, 200, 64, KV_F16, KV_BYTES, 0.2, 5e-3},
	{70, 2, 512, 64, 256, 64, KV_F16, KV_F8_E4M3, 0, 5e-3},
};

static void check_attended(const struct sparse_case *c, const struct kv_sparse_mla_args *a,
			   const char *name, const double *q, const double *values,
			   const int32_t *chosen, const char *out, const float *lse)
{
	int dim = c->latent + c->rope;
	double *x = malloc(sizeof(double) * (size_t)c->top_k), error = 0, norm = 1e-30;
	double *right = malloc(sizeof(double) * (size_t)c->latent);

	for (int row = 0; row < c->n_tokens * c->heads; row++) {
		const int32_t *own = chosen + (int64_t)(row / c->heads) * c->top_k;
		double most = -INFINITY, total = 0, l;

		memset(right, 0, sizeof(double) * (size_t)c->latent);
		for (int i = 0; i < c->top_k; i++) {
			x[i] = own[i] < 0 ? -INFINITY : 0;
			for (int d = 0; d < dim && own[i] >= 0; d++)
				x[i] += q[row * dim + d] * values[own[i] * dim + d];
			x[i] *= (double)a->sm_scale;
			most = fmax(most, x[i]);
		}
		for (int i = 0; i < c->top_k; i++) {
			double w = own[i] < 0 ? 0 : exp(x[i] - most);

			total += w;
			for (int d = 0; d < c->latent && w > 0; d++)
				right[d] += w * values[own[i] * dim + d];
		}
		l = most + log(total);
		expect(total == 0 ? lse[row] == -INFINITY : fabs((double)lse[row] - l) < 2e-3,
		       "%s: lse of row %d is %g, not %g", name, row, (double)lse[row], l);
		for (int d = 0; d < c->latent; d++) {
			double y = total == 0 ? 0 : right[d] / total;
			double e = number_get(out, (int64_t)row * c->latent + d, c->dtype) - y;

			error += e * e;
			norm += y * y;
		}
	}
	expect(error <= c->tolerance * c->tolerance * norm, "%s: out is off by %g", name,
	       sqrt(error / norm));
	free(x);
	free(right);
}

START_TEST(attention_over_chosen_rows_is_right)
{
	const struct sparse_case *c = &sparse_cases[_i];
	int dim = c->latent + c->rope, n_blocks = (c->top_k + 300) / c->page + 2;
	int n_slots = n_blocks * c->page, n_rows = c->n_tokens * c->heads;
	size_t row_bytes = c->cache_dtype == KV_BYTES ? (size_t)(c->latent + c->latent / 32 + c->rope * 2)
						      : (size_t)dim * kv_dtype_bytes(c->cache_dtype);
	size_t element = kv_dtype_bytes(c->dtype), out_bytes = (size_t)(n_rows * c->latent) * element;
	char *cache = malloc(row_bytes * (size_t)n_slots), *out = malloc(out_bytes);
	char *q_bytes = malloc((size_t)(n_rows * dim) * element), *again = malloc(out_bytes);
	double *values = malloc(sizeof(double) * (size_t)(n_slots * dim));
	double *q = malloc(sizeof(double) * (size_t)(n_rows * dim));
	int32_t *chosen = malloc(sizeof(int32_t) * (size_t)(c->n_tokens * c->top_k));
	float *lse = malloc(sizeof(float) * (size_t)n_rows);
	bool *used = calloc((size_t)n_slots, 1);
	struct index_problem p = {.n_buffers = 0};
	size_t workspace = 0;

	for (int t = 0; t < c->n_tokens; t++)
		for (int i = 0; i < c->top_k; i++) {
			int slot = (t * 31 + i * (n_slots % 7 ? 7 : 11)) % n_slots;
			bool hole = number_random(4, (uint64_t)_i, (uint64_t)t, (uint64_t)i) <
				    2 * c->holes - 1;

			chosen[t * c->top_k + i] = hole ? -1 - i % 3 : slot;
			used[slot] |= !hole;
		}
	memset(cache, POISON, row_bytes * (size_t)n_slots); /* what nobody chose is NaN */
	for (int i = 0; i < n_slots; i++)
		if (used[i])
			make_row(c, cache + (size_t)i * row_bytes, i, values + i * dim);
	for (int i = 0; i < n_rows * dim; i++) {
		number_set(q_bytes, i, c->dtype,
			   number_encode(c->dtype, number_random(5, (uint64_t)_i, (uint64_t)i, 1)));
		q[i] = number_get(q_bytes, i, c->dtype);
	}
	KV_OPTIONS(kv_sparse_mla_args, a, .device = buffer_device, .dtype = c->dtype,
		   .n_tokens = c->n_tokens, .n_heads = c->heads, .latent_dim = c->latent,
		   .rope_dim = c->rope, .top_k = c->top_k, .sm_scale = 0.0722f,
		   .cache = {.block_stride = (int64_t)row_bytes * c->page,
			     .token_stride = (int64_t)row_bytes,
			     .head_stride = (int64_t)row_bytes,
			     .block_tokens = c->page,
			     .n_heads = 1,
			     .head_dim = c->cache_dtype == KV_BYTES ? (int32_t)row_bytes : dim,
			     .dtype = c->cache_dtype,
			     .scale = 0.5f});
	a.q = put(&p, q_bytes, (size_t)(n_rows * dim) * element);
	a.chosen = put(&p, chosen, sizeof(int32_t) * (size_t)(c->n_tokens * c->top_k));
	a.cache.base = put(&p, cache, row_bytes * (size_t)n_slots);
	a.out = put(&p, NULL, out_bytes);
	a.lse = put(&p, NULL, sizeof(float) * (size_t)n_rows);
	ck_assert_msg(kv_sparse_mla_workspace_bytes(&a, &workspace) == 0, "%s", kv_error_text());
	for (int i = 0; kv_dsa_backends[i]; i++)
		for (int parts = 0; parts < 2; parts++) {
			const struct kv_dsa_backend *backend = kv_dsa_backends[i];

			a.workspace_bytes = parts ? workspace : 0;
			a.workspace = a.workspace_bytes ? put(&p, NULL, workspace) : NULL;
			if (backend->device != buffer_device || !backend->attend ||
			    (parts && !workspace) || kv_sparse_mla_on(backend, &a) == -ENOTSUP)
				continue;
			for (int run = 0; run < 2; run++) {
				buffer_fill(a.out, POISON, out_bytes);
				ck_assert_msg(kv_sparse_mla_on(backend, &a) == 0, "%s",
					      kv_error_text());
				buffer_get(run ? again : out, a.out, out_bytes);
			}
			buffer_get(lse, a.lse, sizeof(float) * (size_t)n_rows);
			ck_assert_mem_eq(out, again, out_bytes);
			check_attended(c, &a, backend->name, q, values, chosen, out, lse);
		}
	for (int i = 0; i < p.n_buffers; i++)
		buffer_free(p.buffers[i]);
	free(cache);
	free(out);
	free(again);
	free(q_bytes);
	free(values);
	free(q);
	free(chosen);
	free(lse);
	free(used);
}
END_TEST

START_TEST(a_refusal_has_every_reason)
{
	char text[512];

	KV_OPTIONS(kv_index_args, a, .device = buffer_device, .n_seqs = -1, .n_heads = 0,
		   .cache = {.block_tokens = 64, .n_heads = 2, .head_dim = 5, .dtype = KV_F32});
	KV_OPTIONS(kv_sparse_mla_args, m, .device = buffer_device, .dtype = KV_F32, .n_heads = 1,
		   .latent_dim = 512, .rope_dim = 64, .top_k = 0,
		   .cache = {.block_tokens = 0, .n_heads = 1, .head_dim = 656, .dtype = KV_BYTES});
	KV_OPTIONS(kv_index_write_args, w, .device = 7, .dtype = KV_F8_E4M3, .n_tokens = 1,
		   .pow2_scales = 2);
	static const char *const index[] = {"n_seqs", "n_heads: 0", "top_k", "cache.n_heads",
					    "cache.dtype", "cache.head_dim"};
	static const char *const sparse[] = {"top_k", "sm_scale", "block_tokens", "dtype",
					     "token_stride"};
	static const char *const write[] = {"device", "dtype", "pow2_scales", "key: NULL",
					    "slots: NULL"};

	ck_assert_int_eq(kv_index_validate(&a, text, sizeof(text)), -EINVAL);
	for (int i = 0; i < COUNT(index); i++)
		ck_assert_msg(strstr(text, index[i]) != NULL, "%s: not in: %s", index[i], text);
	ck_assert_int_eq(kv_index_choose(&a), -EINVAL);
	ck_assert_str_eq(kv_error_text(), text);
	ck_assert_int_eq(kv_sparse_mla_validate(&m, text, sizeof(text)), -EINVAL);
	for (int i = 0; i < COUNT(sparse); i++)
		ck_assert_msg(strstr(text, sparse[i]) != NULL, "%s: not in: %s", sparse[i], text);
	ck_assert_int_eq(kv_index_write_validate(&w, text, sizeof(text)), -EINVAL);
	for (int i = 0; i < COUNT(write); i++)
		ck_assert_msg(strstr(text, write[i]) != NULL, "%s: not in: %s", write[i], text);
	w.size--;
	ck_assert_int_eq(kv_index_write(&w), -EINVAL);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("kernels/dsa");
	TCase *tcase = tcase_create("dsa");

	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, what_is_chosen_is_the_best_of_right_scores, 0, 14);
	tcase_add_loop_test(tcase, of_equal_scores_the_lowest_positions_are_chosen, 0, 2);
	tcase_add_loop_test(tcase, any_batch_is_right, 0, 5);
	tcase_add_loop_test(tcase, keys_of_four_bits_are_stored_and_scored, 0, 2);
	tcase_add_test(tcase, blocks_past_4_gib_are_their_own);
	tcase_add_test(tcase, latent_rows_past_4_gib_are_their_own);
	tcase_add_loop_test(tcase, attention_over_chosen_rows_is_right, 0, COUNT(sparse_cases));
	tcase_add_test(tcase, a_refusal_has_every_reason);
	suite_add_tcase(suite, tcase);
	return run_on_device(suite);
}
