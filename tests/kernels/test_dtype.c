/* SPDX-License-Identifier: Apache-2.0 */
/* Every code of every type, against arithmetic in double. */
#include <check.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "kernels/dtype.h"
#include "kernels/simd.h"
#include "tests/support/expect.h"
#include "tests/kernels/number.h"

static const struct {
	int dtype;
	uint32_t n_codes;
} types[] = {{KV_F16, 1 << 16}, {KV_BF16, 1 << 16}, {KV_F8_E4M3, 1 << 8}, {KV_F8_E5M2, 1 << 8}};

static bool same(double a, double b)
{
	return (isnan(a) && isnan(b)) || (a == b && signbit(a) == signbit(b));
}

START_TEST(every_code_widens_to_its_value)
{
	int dtype = types[_i].dtype;
	uint32_t n = types[_i].n_codes;
	float *wide = malloc(n * sizeof(*wide));
	char *codes = malloc(n * sizeof(uint32_t));

	for (uint32_t c = 0; c < n; c++) {
		float x;

		number_set(codes, c, dtype, c);
		x = kv_element_load(codes, c, dtype);
		expect(same((double)x, number_decode(dtype, c)), "0x%x is %g, right is %g", c,
		       (double)x, number_decode(dtype, c));
		if (dtype == KV_F8_E4M3)
			expect(same((double)kv_e4m3_values[c], number_decode(dtype, c)), "0x%x", c);
	}
	for (int s = 0; kv_simd_sets()[s]; s++) {
		kv_simd_sets()[s]->widen(wide, codes, dtype, n);
		for (uint32_t c = 0; c < n; c++)
			expect(same((double)wide[c], number_decode(dtype, c)), "%s: 0x%x is %g",
			       kv_simd_sets()[s]->name, c, (double)wide[c]);
	}
	free(wide);
	free(codes);
}
END_TEST

/* @x and its negative narrow to the right code, by hand and in every vector set. */
static void check_narrow(int dtype, float x)
{
	for (int side = 0; side < 2; side++, x = -x) {
		uint32_t right = number_encode(dtype, (double)x), code = 0;
		float many[35];
		char codes[35 * 4];

		kv_element_store(&code, 0, dtype, x);
		expect(same(number_decode(dtype, code), number_decode(dtype, right)),
		       "type %d: %.9g becomes 0x%x, right is 0x%x", dtype, (double)x, code, right);
		for (int i = 0; i < 35; i++)
			many[i] = x;
		for (int s = 0; kv_simd_sets()[s]; s++) {
			kv_simd_sets()[s]->narrow(codes, dtype, many, 35);
			for (int i = 0; i < 35; i++)
				expect(number_code(codes, i, dtype) == code,
				       "%s: type %d: %.9g becomes 0x%x, by hand 0x%x",
				       kv_simd_sets()[s]->name, dtype, (double)x,
				       number_code(codes, i, dtype), code);
		}
	}
}

/* At every value, halfway to the next, and just beside halfway: where rounding turns. */
START_TEST(every_number_narrows_to_the_nearest_code)
{
	int dtype = types[_i].dtype;
	uint32_t n_finite = types[_i].n_codes / 2;

	for (uint32_t c = 0; c < n_finite; c++) {
		float here = (float)number_decode(dtype, c);
		float next = (float)number_decode(dtype, c + 1 < n_finite ? c + 1 : c);
		float half = here / 2 + next / 2;

		check_narrow(dtype, here);
		if (!isfinite(here) || !isfinite(next))
			continue;
		check_narrow(dtype, half);
		check_narrow(dtype, nextafterf(half, INFINITY));
		check_narrow(dtype, nextafterf(half, 0));
	}
	check_narrow(dtype, INFINITY);
	check_narrow(dtype, 0x1.fffffep127f);
	check_narrow(dtype, 65504);
	check_narrow(dtype, 65519.996f);
	check_narrow(dtype, 65520);
	check_narrow(dtype, 0x1p-149f);
	check_narrow(dtype, 0x1p-126f);
	for (int i = 0; i < 100000; i++)
		check_narrow(dtype, (float)ldexp(number_random(6, (uint64_t)i, 0, 0), i % 60 - 40));
}
END_TEST

START_TEST(nan_of_every_kind_stays_nan)
{
	static const uint32_t nans[] = {0x7fc00000, 0xffc00000, 0x7f800001, 0xff800001, 0x7fffffff};

	for (int i = 0; i < 5; i++)
		check_narrow(types[_i].dtype, kv_f32_from_bits(nans[i]));
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("kernels/dtype");
	TCase *tcase = tcase_create("dtype");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(tcase, every_code_widens_to_its_value, 0, 4);
	tcase_add_loop_test(tcase, every_number_narrows_to_the_nearest_code, 0, 4);
	tcase_add_loop_test(tcase, nan_of_every_kind_stays_nan, 0, 4);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_NORMAL);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
