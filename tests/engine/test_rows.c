/* SPDX-License-Identifier: Apache-2.0 */
/* Every instruction set against plain arithmetic, and each against itself in other company. */
#include <check.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tests/engine/golden_weights.h"
#include "tools/engine/gguf.h"
#include "tools/engine/rows.h"

#define K 192

static const struct kv_rows *rows; /* the set that is tested */

/* A machine with fewer sets tests its plainest one again. */
static void use_set(int i)
{
	const struct kv_rows *const *all = kv_rows_all();

	while (i-- && all[1])
		all++;
	rows = all[0];
	srand(1);
}

static float random_float(void)
{
	return rand() / (float)RAND_MAX * 4 - 2;
}

static double plain_half(uint16_t h)
{
	int exponent = h >> 10 & 31, fraction = h & 1023;
	double value = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);

	return h & 0x8000 ? -value : value;
}

/* Element @i of a row by the definition in gguf.h */
static double plain_weight(uint32_t type, const uint8_t *row, size_t i)
{
	size_t block = i / 32, j = i % 32;
	const uint8_t *at = row + block * kv_weight_row_bytes(type, 32), *q;
	uint16_t d, m;
	float f;

	memcpy(&d, at, sizeof(d));
	switch (type) {
	case KV_WEIGHT_F32:
		memcpy(&f, row + 4 * i, sizeof(f));
		return f;
	case KV_WEIGHT_F16:
		memcpy(&d, row + 2 * i, sizeof(d));
		return plain_half(d);
	case KV_WEIGHT_Q8_0:
		return plain_half(d) * (int8_t)at[2 + j];
	case KV_WEIGHT_Q4_0:
		q = at + 2;
		return plain_half(d) * ((j < 16 ? q[j] & 15 : q[j - 16] >> 4) - 8);
	case KV_WEIGHT_Q4_1:
		memcpy(&m, at + 2, sizeof(m));
		q = at + 4;
		return plain_half(d) * (j < 16 ? q[j] & 15 : q[j - 16] >> 4) + plain_half(m);
	}
	return NAN;
}

static const uint32_t types[] = {KV_WEIGHT_F32, KV_WEIGHT_F16, KV_WEIGHT_Q4_0, KV_WEIGHT_Q4_1,
				 KV_WEIGHT_Q8_0};

/* Random bytes, but no f16 that is infinite or NaN where one may stand, and f32 in range */
static void random_row(uint32_t type, uint8_t *row)
{
	size_t bytes = kv_weight_row_bytes(type, K), block = kv_weight_row_bytes(type, 32);

	for (size_t i = 0; i < bytes; i++)
		row[i] = rand();
	for (size_t i = 1; type == KV_WEIGHT_F16 && i < bytes; i += 2)
		row[i] &= 0xbf;
	for (size_t i = 0; type == KV_WEIGHT_F32 && i < K; i++)
		memcpy(row + 4 * i, &(float){random_float()}, 4);
	for (size_t i = 0; type >= KV_WEIGHT_Q4_0 && i < bytes; i += block) {
		row[i + 1] &= 0xbf;
		if (type == KV_WEIGHT_Q4_1)
			row[i + 3] &= 0xbf;
	}
}

START_TEST(weights_are_what_their_format_says)
{
	uint8_t row[K * 4];
	float out[K];

	use_set(_i);
	for (size_t t = 0; t < 5; t++) {
		for (int n = 0; n < 50; n++) {
			random_row(types[t], row);
			rows->widen(types[t], row, out, K);
			/* d * q is exact in float: only adding m rounds, once */
			for (size_t i = 0; i < K; i++)
				ck_assert_float_eq(out[i], (float)plain_weight(types[t], row, i));
		}
	}
}
END_TEST

/* By another program, golden_weights.py. */
START_TEST(every_format_is_read_as_others_read_it)
{
	float out[256], want;

	use_set(_i);
	for (size_t t = 0; t < sizeof(golden_weights) / sizeof(golden_weights[0]); t++) {
		const struct golden_weights *golden = &golden_weights[t];

		ck_assert_uint_gt(kv_weight_row_bytes(golden->type, 256), 0);
		ck_assert_uint_le(kv_weight_row_bytes(golden->type, 256), sizeof(golden->row));
		rows->widen(golden->type, golden->row, out, 256);
		for (int i = 0; i < 256; i++) {
			memcpy(&want, &golden->bits[i], sizeof(want));
			ck_assert_msg(out[i] == want, "type %u, element %d is %.9g, not %.9g",
				      golden->type, i, out[i], want);
		}
	}
}
END_TEST

START_TEST(a_row_has_whole_blocks)
{
	static const struct {
		uint32_t type;
		uint64_t n;
		uint64_t bytes;
	} cases[] = {
		{KV_WEIGHT_F32, 3, 12},	      {KV_WEIGHT_BF16, 3, 6},	    {KV_WEIGHT_Q5_0, 64, 44},
		{KV_WEIGHT_Q5_0, 33, 0},      {KV_WEIGHT_Q5_1, 32, 24},	    {KV_WEIGHT_Q4_K, 512, 288},
		{KV_WEIGHT_Q4_K, 32, 0},      {KV_WEIGHT_Q5_K, 256, 176},   {KV_WEIGHT_Q6_K, 256, 210},
		{KV_WEIGHT_Q6_K, 128, 0},     {10, 256, 0},		    {31, 256, 0},
		{KV_WEIGHT_F32, ~0ull, 0},
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		ck_assert_uint_eq(kv_weight_row_bytes(cases[i].type, cases[i].n), cases[i].bytes);
}
END_TEST

START_TEST(every_half_is_converted_exactly)
{
	uint16_t halves[65536];
	static float out[65536];

	for (int i = 0; i < 65536; i++)
		halves[i] = i;
	use_set(_i);
	rows->widen(KV_WEIGHT_F16, halves, out, 65536);
	for (int i = 0; i < 65536; i++) {
		if ((i & 0x7fff) > 0x7c00)
			ck_assert(isnan(out[i]));
		else if ((i & 0x7fff) == 0x7c00)
			ck_assert_float_eq(out[i], i & 0x8000 ? -INFINITY : INFINITY);
		else
			ck_assert_float_eq(out[i], (float)plain_half(i));
	}
}
END_TEST

START_TEST(products_are_near_those_in_double)
{
	enum { N_W = 7, N_X = 11 };
	float w[N_W * K], x[N_X * K], out[N_X * N_W];

	use_set(_i);
	for (int i = 0; i < N_W * K; i++)
		w[i] = random_float();
	for (int i = 0; i < N_X * K; i++)
		x[i] = random_float();
	for (int i = 0; i < N_X * N_W; i++)
		out[i] = i;
	rows->multiply(w, N_W, x, K, N_X, K, out, N_W, true);
	for (int t = 0; t < N_X; t++) {
		for (int r = 0; r < N_W; r++) {
			double sum = t * N_W + r;

			for (int i = 0; i < K; i++)
				sum += (double)x[t * K + i] * w[r * K + i];
			/* K products below 4, sums below 100, each step rounds by 2^-24 */
			ck_assert_float_eq_tol(out[t * N_W + r], sum, 1e-3);
		}
	}
}
END_TEST

START_TEST(a_product_has_the_same_bits_in_any_company)
{
	enum { N_W = 9, N_X = 10 };
	float w[N_W * K], x[N_X * K], alone, out[N_X * N_W];

	use_set(_i);
	for (int i = 0; i < N_W * K; i++)
		w[i] = random_float();
	for (int i = 0; i < N_X * K; i++)
		x[i] = random_float();
	for (size_t n_x = 1; n_x <= N_X; n_x++) {
		for (size_t n_w = 1; n_w <= N_W; n_w++) {
			rows->multiply(w, n_w, x, K, n_x, K, out, n_w, false);
			for (size_t t = 0; t < n_x; t++) {
				for (size_t r = 0; r < n_w; r++) {
					rows->multiply(w + r * K, 1, x + t * K, K, 1, K, &alone, 1,
						       false);
					ck_assert_mem_eq(&alone, &out[t * n_w + r], sizeof(alone));
				}
			}
		}
	}
}
END_TEST

START_TEST(norms_and_gates_are_near_those_in_double)
{
	float x[K], weight[K], out[K], gate[K], up[K];
	double squares = 0;

	use_set(_i);
	for (int i = 0; i < K; i++) {
		x[i] = random_float();
		weight[i] = random_float();
		up[i] = random_float();
		out[i] = gate[i] = (i - K / 2) * 1.3f; /* beyond where e^x ends */
		squares += (double)x[i] * x[i];
	}
	gate[3] = out[3] = 0;
	rows->silu_multiply(out, up, K);
	for (int i = 0; i < K; i++) {
		double want = gate[i] / (1 + exp(-(double)gate[i])) * up[i];

		/* Below e^-87 the answer is as good as zero. */
		ck_assert_double_le(fabs(out[i] - want), 1e-6 * fabs(want) + 1e-30);
	}
	memcpy(out, gate, sizeof(out));
	rows->gelu_multiply(out, up, K);
	for (int i = 0; i < K; i++) {
		double g = gate[i], u = sqrt(2 / acos(-1)) * (g + 0.044715 * g * g * g);
		double want = g / (1 + exp(-2 * u)) * up[i]; /* (1 + tanh(u)) / 2 */

		/* u is off by 2^-22 of itself, e^2u by twice as much. */
		ck_assert_double_le(fabs(out[i] - want),
				    (2e-6 + 5e-7 * fabs(u)) * fabs(want) + 1e-30);
	}
	rows->rms_norm(x, weight, out, K, 1e-5f);
	for (int i = 0; i < K; i++) {
		double want = x[i] * weight[i] / sqrt(squares / K + 1e-5);

		ck_assert_double_le(fabs(out[i] - want), 1e-6 * fabs(want));
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("engine/rows");
	TCase *tests = tcase_create("sets");
	SRunner *runner;
	int n_failed;

	tcase_set_timeout(tests, 120);
	tcase_add_loop_test(tests, weights_are_what_their_format_says, 0, 3);
	tcase_add_loop_test(tests, every_format_is_read_as_others_read_it, 0, 3);
	tcase_add_test(tests, a_row_has_whole_blocks);
	tcase_add_loop_test(tests, every_half_is_converted_exactly, 0, 3);
	tcase_add_loop_test(tests, products_are_near_those_in_double, 0, 3);
	tcase_add_loop_test(tests, a_product_has_the_same_bits_in_any_company, 0, 3);
	tcase_add_loop_test(tests, norms_and_gates_are_near_those_in_double, 0, 3);
	suite_add_tcase(suite, tests);
	runner = srunner_create(suite);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
