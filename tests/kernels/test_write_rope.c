/* SPDX-License-Identifier: Apache-2.0 */
/* Norm, rotation and scaled writes on the device under test, against arithmetic in double. */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/rope.h>

#include "include/internal/error.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/number.h"
#include "tests/kernels/problem.h"
#include "tests/kernels/run.h"
#include "tests/support/expect.h"

#define COUNT(a)    (int)(sizeof(a) / sizeof((a)[0]))
#define TOKENS	    9
#define POSITIONS   40
#define BLOCKS	    3
#define BLOCK	    8
#define MAX_HEADS   4
#define MAX_DIM	    200
#define ROW_MAX	    (MAX_HEADS * MAX_DIM)

struct fused {
	int heads_q, heads, dim, dim_v, rot, dtype, kv_dtype;
	bool pairs, norm, head_scales, row_scales;
	float eps;
};

static const struct fused cases[] = {
	{4, 2, 64, 64, 64, KV_F32, KV_F32, false, false, false, false, 0},
	{4, 2, 64, 64, 64, KV_BF16, KV_BF16, false, true, false, false, 1e-6f},
	{2, 2, 128, 96, 32, KV_F16, KV_F16, true, true, false, false, 1e-5f},
	{3, 1, 40, 24, 20, KV_BF16, KV_F8_E4M3, false, false, true, false, 0},
	{2, 1, 128, 128, 128, KV_F16, KV_F8_E4M3, true, false, false, true, 0},
	{0, 2, 64, 64, 0, KV_F32, KV_F8_E5M2, false, false, false, true, 0},
	{1, 1, 199, 7, 6, KV_F32, KV_F8_E4M3, false, true, false, false, 0.1f},
	{4, 4, 64, 64, 64, KV_BF16, KV_F16, true, true, false, false, 1e-6f},
	{0, 3, 64, 64, 0, KV_BF16, KV_F8_E4M3, false, false, true, false, 0},
};

static const int64_t slots[TOKENS] = {8, 9, -1, 23, 0, 15, 17, 4, 5};
/* A step's positions; one is past the table: that token is left alone. */
static const int64_t positions[TOKENS] = {0, 1, 2, 39, 7, 40, 11, 12, 31};

/* Angles of position @p. */
static double angle(int64_t p, int i)
{
	return (double)p * pow(10000, -i / 16.0);
}

static double element(int which, int t, int e)
{
	return 3 * number_random((uint64_t)which, (uint64_t)t, (uint64_t)e, 0);
}

/* What a head's row should become, from the stored values; x: [dim] in and out */
static void right_row(const struct fused *c, double *x, int64_t position, bool normed,
		      const double *weights)
{
	double sum = 0;

	for (int d = 0; d < c->dim; d++)
		sum += x[d] * x[d];
	for (int d = 0; d < c->dim && normed; d++)
		x[d] *= weights[d] / sqrt(sum / c->dim + (double)c->eps);
	for (int i = 0; i < c->rot / 2; i++) {
		int a = c->pairs ? 2 * i : i, b = c->pairs ? 2 * i + 1 : i + c->rot / 2;
		double cosine = (double)(float)cos(angle(position, i));
		double sine = (double)(float)sin(angle(position, i));
		double p = x[a], q = x[b];

		x[a] = p * cosine - q * sine;
		x[b] = q * cosine + p * sine;
	}
}

static void *upload(const void *from, size_t bytes)
{
	void *p = buffer_new(bytes);

	buffer_put(p, from, bytes);
	return p;
}

static struct kv_view view_of(const struct fused *c, int dim, int dtype, float scale)
{
	int64_t row = (int64_t)dim * (int64_t)kv_dtype_bytes(dtype);

	return (struct kv_view){.block_stride = row * c->heads * BLOCK,
				.token_stride = row * c->heads,
				.head_stride = row,
				.block_tokens = BLOCK,
				.n_heads = c->heads,
				.head_dim = dim,
				.dtype = dtype,
				.scale = kv_dtype_bytes(dtype) == 1 ? scale : 1};
}

/* Rows [TOKENS][heads][dim] of random values of @dtype. */
static char *random_rows(int which, int heads, int dim, int dtype)
{
	char *rows = malloc((size_t)(TOKENS * heads * dim) * 4 + 4);

	for (int t = 0; t < TOKENS; t++)
		for (int e = 0; e < heads * dim; e++)
			number_set(rows, t * heads * dim + e, dtype,
				   number_encode(dtype, element(which, t, e)));
	return rows;
}

/* The rows of q or key that came back: turned where they should be, bit-equal where not. */
static void check_rows(const struct fused *c, const char *name, const char *before, const char *after,
		       int heads, const double *weights)
{
	for (int t = 0; t < TOKENS; t++) {
		for (int h = 0; h < heads; h++) {
			int64_t at = (int64_t)(t * heads + h) * c->dim;
			double x[MAX_DIM], error = 0, norm = 0;
			bool touched = !c->rot || positions[t] < POSITIONS;

			for (int d = 0; d < c->dim; d++)
				x[d] = number_get(before, at + d, c->dtype);
			if (touched)
				right_row(c, x, positions[t], c->norm, weights);
			for (int d = 0; d < c->dim; d++) {
				double got = number_get(after, at + d, c->dtype);

				error += (got - x[d]) * (got - x[d]);
				norm += x[d] * x[d];
				expect((touched && (c->rot || c->norm)) || got == x[d],
				       "%s: token %d head %d element %d is %g, right is %g", name, t, h,
				       d, got, x[d]);
			}
			expect(sqrt(error) <= problem_tolerance(c->dtype) * sqrt(norm),
			       "%s: token %d head %d is off by %g of its %g", name, t, h, sqrt(error),
			       sqrt(norm));
		}
	}
}

/* The cache after the write: code for code what the (changed) rows say, nothing else touched. */
static void check_cache(const struct fused *c, const struct kv_view *view, const char *cache,
			const float *scales, const float *head_scales, const char *rows)
{
	bool written[BLOCKS * BLOCK] = {false};
	int dim = view->head_dim;

	for (int t = 0; t < TOKENS; t++) {
		if (slots[t] < 0 || (c->rot && positions[t] >= POSITIONS))
			continue;
		written[slots[t]] = true;
		for (int h = 0; h < c->heads; h++) {
			int64_t at = (int64_t)(t * c->heads + h) * dim;
			int64_t to = (slots[t] * c->heads + h) * dim;
			float scale = c->head_scales ? head_scales[h] : view->scale;
			double top = 0;

			for (int d = 0; d < dim; d++)
				top = fmax(top, fabs(number_get(rows, at + d, c->dtype)));
			if (c->row_scales) {
				float max = view->dtype == KV_F8_E5M2 ? 57344 : 448;

				scale = fmaxf((float)top, 1e-4f) / max;
				ck_assert_float_eq(scales[slots[t] * c->heads + h], scale);
			}
			for (int d = 0; d < dim; d++) {
				float x = (float)number_get(rows, at + d, c->dtype);
				uint32_t right = number_encode(view->dtype, (double)(x / scale));

				expect(number_code(cache, to + d, view->dtype) == right,
				       "token %d head %d element %d: 0x%x, right is 0x%x", t, h, d,
				       number_code(cache, to + d, view->dtype), right);
			}
		}
	}
	for (int64_t s = 0; s < BLOCKS * BLOCK; s++)
		for (int64_t b = 0; b < view->token_stride && !written[s]; b++)
			expect(cache[s * view->token_stride + b] == 0x5a, "slot %lld was written",
			       (long long)s);
}

START_TEST(rows_are_normed_turned_and_written)
{
	const struct fused *c = &cases[_i];
	struct kv_view scale_view = view_of(c, 1, KV_F32, 1);
	size_t q_bytes = (size_t)(TOKENS * c->heads_q * c->dim) * kv_dtype_bytes(c->dtype);
	size_t k_bytes = (size_t)(TOKENS * c->heads * c->dim) * kv_dtype_bytes(c->dtype);
	size_t v_bytes = (size_t)(TOKENS * c->heads * c->dim_v) * kv_dtype_bytes(c->dtype);
	size_t scale_bytes = sizeof(float) * BLOCKS * BLOCK * (size_t)c->heads;
	char *q = random_rows(1, c->heads_q, c->dim, c->dtype);
	char *key = random_rows(2, c->heads, c->dim, c->dtype);
	char *value = random_rows(3, c->heads, c->dim_v, c->dtype), *got;
	float heads[MAX_HEADS] = {0.25f, 0.3f, 2, 0.0625f};
	float table[POSITIONS * MAX_DIM], scales[BLOCKS * BLOCK * MAX_HEADS];
	char weights[2][MAX_DIM * 4];
	double w[2][MAX_DIM];
	struct kv_view views[2] = {view_of(c, c->dim, c->kv_dtype, 0.3f),
				   view_of(c, c->dim_v, c->kv_dtype, 0.125f)};
	struct kv_rope_args a = {.size = sizeof(a),
				 .n_heads_q = c->heads_q,
				 .rot = c->rot,
				 .pairs = c->pairs,
				 .n_positions = POSITIONS,
				 .eps = c->eps};

	for (int p = 0; p < POSITIONS; p++)
		for (int i = 0; i < c->rot / 2; i++) {
			table[p * c->rot + i] = (float)cos(angle(p, i));
			table[p * c->rot + c->rot / 2 + i] = (float)sin(angle(p, i));
		}
	for (int i = 0; i < 2; i++)
		for (int d = 0; d < c->dim; d++) {
			number_set(weights[i], d, c->dtype,
				   number_encode(c->dtype, 1 + element(8 + i, 0, d) / 4));
			w[i][d] = number_get(weights[i], d, c->dtype);
		}
	for (int i = 0; i < 2; i++) {
		size_t bytes = (size_t)(views[i].block_stride * BLOCKS);

		views[i].base = buffer_new(bytes);
		buffer_fill(views[i].base, 0x5a, bytes);
	}
	a.write = (struct kv_write_args){.size = sizeof(a.write),
					 .device = buffer_device,
					 .dtype = c->dtype,
					 .n_tokens = TOKENS,
					 .key = upload(key, k_bytes),
					 .value = upload(value, v_bytes),
					 .slots = upload(slots, sizeof(slots)),
					 .k = views[0],
					 .v = views[1]};
	a.q = upload(q, q_bytes);
	a.positions = upload(positions, sizeof(positions));
	a.cos_sin = upload(table, sizeof(table));
	if (c->norm) {
		a.q_norm = upload(weights[0], sizeof(weights[0]));
		a.k_norm = upload(weights[1], sizeof(weights[1]));
	}
	if (c->head_scales)
		a.write.k_scales = a.write.v_scales = upload(heads, sizeof(heads));
	if (c->row_scales) {
		a.write.k_row_scales = a.write.v_row_scales = scale_view;
		a.write.k_row_scales.base = buffer_new(scale_bytes);
		a.write.v_row_scales.base = buffer_new(scale_bytes);
	}
	/* Without rotation it is kv_write(), which must come to the same. */
	if (c->rot || c->norm || c->heads_q)
		ck_assert_msg(kv_write_rope(&a) == 0, "%s", kv_error_text());
	else
		ck_assert_msg(kv_write(&a.write) == 0, "%s", kv_error_text());

	got = malloc(q_bytes + k_bytes + v_bytes + 1);
	if (q_bytes)
		buffer_get(got, a.q, q_bytes);
	check_rows(c, "q", q, got, c->heads_q, w[0]);
	buffer_get(got, a.write.key, k_bytes);
	check_rows(c, "key", key, got, c->heads, w[1]);
	for (int i = 0; i < 2; i++) {
		size_t bytes = (size_t)(views[i].block_stride * BLOCKS);
		char *cache = malloc(bytes);

		buffer_get(cache, views[i].base, bytes);
		if (c->row_scales)
			buffer_get(scales, i ? a.write.v_row_scales.base : a.write.k_row_scales.base,
				   scale_bytes);
		check_cache(c, &views[i], cache, scales, heads, i ? value : got);
		free(cache);
		buffer_free(views[i].base);
	}
	buffer_free((void *)(uintptr_t)a.write.key);
	buffer_free((void *)(uintptr_t)a.write.value);
	buffer_free((void *)(uintptr_t)a.write.slots);
	buffer_free(a.q);
	buffer_free((void *)(uintptr_t)a.positions);
	buffer_free((void *)(uintptr_t)a.cos_sin);
	buffer_free((void *)(uintptr_t)a.q_norm);
	buffer_free((void *)(uintptr_t)a.k_norm);
	buffer_free((void *)(uintptr_t)a.write.k_scales);
	if (c->row_scales) {
		buffer_free(a.write.k_row_scales.base);
		buffer_free(a.write.v_row_scales.base);
	}
	free(q);
	free(key);
	free(value);
	free(got);
}
END_TEST

static float pool[64], row[64], table[64];
static const int64_t one_slot[] = {0}, one_position[] = {0};

START_TEST(rope_names_the_field_that_is_wrong)
{
	static const char *const fields[] = {"size", "n_heads_q", "rot", "rot", "pairs", "n_positions",
					     "eps", "q_stride", "q:", "positions", "cos_sin"};
	struct kv_view view = {pool, 256, 32, 32, 8, 1, 8, KV_F32, 1, 0};
	struct kv_rope_args a = {.size = sizeof(a),
				 .write = {.size = sizeof(a.write),
					   .device = buffer_device,
					   .dtype = KV_F32,
					   .n_tokens = 1,
					   .key = row,
					   .value = row,
					   .slots = one_slot,
					   .k = view,
					   .v = view},
				 .n_heads_q = 1,
				 .rot = 8,
				 .n_positions = 8,
				 .q = row,
				 .positions = one_position,
				 .cos_sin = table,
				 .q_norm = row};

	a.size -= _i == 0;
	a.n_heads_q = _i == 1 ? -1 : 1;
	a.rot = _i == 2 ? 7 : _i == 3 ? 10 : 8;
	a.pairs = _i == 4 ? 2 : 0;
	a.n_positions = _i == 5 ? 0 : 8;
	a.eps = _i == 6 ? NAN : 0;
	a.q_stride = _i == 7 ? 7 : 0;
	a.q = _i == 8 ? NULL : row;
	a.positions = _i == 9 ? NULL : one_position;
	a.cos_sin = _i == 10 ? NULL : table;
	ck_assert_int_eq(kv_write_rope(&a), -EINVAL);
	ck_assert_msg(strstr(kv_error_text(), fields[_i]), "\"%s\" has no %s", kv_error_text(),
		      fields[_i]);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("kernels/write_rope");
	TCase *tcase = tcase_create("write_rope");

	suite_add_tcase(suite, tcase);
	tcase_add_loop_test(tcase, rows_are_normed_turned_and_written, 0, COUNT(cases));
	tcase_add_loop_test(tcase, rope_names_the_field_that_is_wrong, 0, 11);
	return run_on_device(suite);
}
