/* SPDX-License-Identifier: Apache-2.0 */
/* kv_merge() on the device under test, against sums in double; and rows that some or all parts are
 * empty for. */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/merge.h>

#include "include/internal/error.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/number.h"
#include "tests/kernels/problem.h"
#include "tests/kernels/run.h"
#include "tests/support/expect.h"

#define COUNT(a) (int)(sizeof(a) / sizeof((a)[0]))

struct merge_case {
	int n_parts, n_tokens, n_heads, dim, part_dtype, dtype, base;
	bool sinks, lse_with_sink;
	int only_part; /* r + 1 */
	int gap;       /* elements between tokens and between parts, of lse and out too */
	int n_real;    /* rows that are done; 0: all */
};

static const struct merge_case cases[] = {
	{.n_parts = 1,
	 .n_tokens = 3,
	 .n_heads = 2,
	 .dim = 64,
	 .part_dtype = KV_F32,
	 .dtype = KV_F32},
	{.n_parts = 2,
	 .n_tokens = 30,
	 .n_heads = 8,
	 .dim = 128,
	 .part_dtype = KV_BF16,
	 .dtype = KV_BF16},
	{.n_parts = 3,
	 .n_tokens = 30,
	 .n_heads = 5,
	 .dim = 40,
	 .part_dtype = KV_F16,
	 .dtype = KV_F16},
	{.n_parts = 64,
	 .n_tokens = 9,
	 .n_heads = 4,
	 .dim = 64,
	 .part_dtype = KV_F32,
	 .dtype = KV_BF16},
	{.n_parts = 7,
	 .n_tokens = 20,
	 .n_heads = 3,
	 .dim = 199,
	 .part_dtype = KV_F32,
	 .dtype = KV_F16},
	{.n_parts = 4,
	 .n_tokens = 20,
	 .n_heads = 4,
	 .dim = 64,
	 .part_dtype = KV_F32,
	 .dtype = KV_F32,
	 .base = 2},
	{.n_parts = 4,
	 .n_tokens = 20,
	 .n_heads = 4,
	 .dim = 64,
	 .part_dtype = KV_F32,
	 .dtype = KV_F32,
	 .sinks = true},
	{.n_parts = 4,
	 .n_tokens = 20,
	 .n_heads = 4,
	 .dim = 64,
	 .part_dtype = KV_F32,
	 .dtype = KV_F32,
	 .sinks = true,
	 .lse_with_sink = true,
	 .base = 2},
	{.n_parts = 4,
	 .n_tokens = 20,
	 .n_heads = 4,
	 .dim = 64,
	 .part_dtype = KV_F32,
	 .dtype = KV_F32,
	 .only_part = 3},
	{.n_parts = 4,
	 .n_tokens = 20,
	 .n_heads = 4,
	 .dim = 64,
	 .part_dtype = KV_F32,
	 .dtype = KV_F32,
	 .gap = 7,
	 .n_real = 13},
	{.n_parts = 300,
	 .n_tokens = 2,
	 .n_heads = 1,
	 .dim = 8,
	 .part_dtype = KV_F32,
	 .dtype = KV_F32},
};

/* Every kind of row: [t % KINDS]. Elements of parts whose weight is 0 are NaN. */
enum kind {
	PLAIN,
	ALL_EMPTY,
	ONE_EMPTY,
	ONE_FULL,
	NOT_A_NUMBER,
	INFINITE,
	FAR_APART,
	LARGE,
	KINDS
};

static float lse_of(const struct merge_case *c, int r, int t, int h)
{
	float x = (float)(8 * number_random(1, (uint64_t)r, (uint64_t)t, (uint64_t)h));

	switch ((enum kind)(t % KINDS)) {
	case ALL_EMPTY:
		return r % 3 == 0 ? -INFINITY : r % 3 == 1 ? NAN : INFINITY;
	case ONE_EMPTY:
		return r == h % c->n_parts ? -INFINITY : x;
	case ONE_FULL:
		return r == h % c->n_parts ? x : -INFINITY;
	case NOT_A_NUMBER:
		return r == 0 ? NAN : x;
	case INFINITE:
		return r == c->n_parts - 1 ? INFINITY : x;
	case FAR_APART: /* weights of e^-200 are 0 in f32 */
		return x - (r ? 200.0f : 0);
	case LARGE: /* e^x is no f32 */
		return x + 500;
	default:
		return x;
	}
}

static double sink_of(int h)
{
	return h % 4 == 0 ? 20 : h % 4 == 1 ? -20 : h % 4 == 2 ? -INFINITY : 0.5;
}

struct right {
	double out[256], lse;
};

/* In natural logarithms; @weights: of each part in the sum. */
static void right_row(const struct merge_case *c, const char *parts, int64_t part_stride,
		      int64_t at, int t, int h, struct right *ret)
{
	double log_base = c->base == 2 ? log(2) : 1, top = -INFINITY, sum = 0;

	memset(ret, 0, sizeof(*ret));
	for (int r = 0; r < c->n_parts; r++) {
		double x = (double)lse_of(c, r, t, h);

		if (isfinite(x))
			top = fmax(top, x * log_base);
	}
	for (int r = 0; r < c->n_parts; r++) {
		double x = (double)lse_of(c, r, t, h);

		sum += isfinite(x) ? exp(x * log_base - top) : 0;
	}
	ret->lse = sum > 0 ? top + log(sum) : -INFINITY;
	for (int r = 0; r < c->n_parts && sum > 0; r++) {
		double x = (double)lse_of(c, r, t, h), w = exp(x * log_base - top);

		/* Less than any f32: the part is not looked at. */
		if (!isfinite(x) || w < 1e-46 || (c->only_part && c->only_part != r + 1))
			continue;
		for (int d = 0; d < c->dim; d++)
			ret->out[d] += w / sum *
				       number_get(parts, r * part_stride + at + d, c->part_dtype);
	}
	if (c->sinks) {
		double sink = sink_of(h), all;

		for (int d = 0; d < c->dim; d++)
			ret->out[d] *= sum > 0 ? 1 / (1 + exp(sink - ret->lse)) : 0;
		all = fmax(sink, ret->lse);
		if (c->lse_with_sink && all > -INFINITY)
			ret->lse = all + log(exp(sink - all) + exp(ret->lse - all));
	}
	ret->lse /= log_base;
}

static void *upload(const void *from, size_t bytes)
{
	void *p = buffer_new(bytes);

	buffer_put(p, from, bytes);
	return p;
}

START_TEST(parts_merge_to_the_whole_and_empty_ones_leave_no_trace)
{
	const struct merge_case *c = &cases[_i];
	int64_t row = (int64_t)c->n_heads * c->dim, token = row + c->gap;
	int64_t part = token * c->n_tokens + c->gap, lse_token = c->n_heads + c->gap;
	int64_t lse_part = lse_token * c->n_tokens + c->gap;
	size_t part_bytes = (size_t)(part * c->n_parts) * kv_dtype_bytes(c->part_dtype);
	size_t out_bytes = (size_t)(token * c->n_tokens) * kv_dtype_bytes(c->dtype);
	size_t lse_bytes = (size_t)(c->n_tokens * c->n_heads) * sizeof(float);
	char *parts = malloc(part_bytes), *out = malloc(out_bytes);
	float *lse = malloc((size_t)(lse_part * c->n_parts) * sizeof(*lse)),
	      *got_lse = malloc(lse_bytes);
	float sinks[16];
	int32_t n_real = c->n_real;
	struct kv_merge_args a = {.size = sizeof(a),
				  .device = buffer_device,
				  .dtype = c->dtype,
				  .part_dtype = c->part_dtype,
				  .n_parts = c->n_parts,
				  .n_tokens = c->n_tokens,
				  .n_heads = c->n_heads,
				  .head_dim = c->dim,
				  .base = c->base,
				  .lse_with_sink = c->lse_with_sink,
				  .only_part = c->only_part,
				  .out = buffer_new(out_bytes),
				  .lse = buffer_new(lse_bytes)};

	if (c->gap) {
		a.part_stride = part;
		a.token_stride = a.out_token_stride = token;
		a.lse_part_stride = lse_part;
		a.lse_token_stride = lse_token;
		a.lse_head_stride = 1;
	}
	for (int64_t e = 0; e < part * c->n_parts; e++) /* NaN wherever no weight leads */
		number_set(parts, e, c->part_dtype, number_encode(c->part_dtype, NAN));
	for (int r = 0; r < c->n_parts; r++)
		for (int t = 0; t < c->n_tokens; t++)
			for (int h = 0; h < c->n_heads; h++) {
				float x = lse_of(c, r, t, h);

				lse[r * lse_part + t * lse_token + h] = x;
				if (!isfinite(x) || (c->only_part && c->only_part != r + 1) ||
				    (t % KINDS == FAR_APART && r && c->n_parts > 1))
					continue;
				for (int d = 0; d < c->dim; d++)
					number_set(
						parts, r * part + t * token + h * c->dim + d,
						c->part_dtype,
						number_encode(c->part_dtype,
							      number_random(2, (uint64_t)r,
									    (uint64_t)(t * 64 + h),
									    (uint64_t)d)));
			}
	for (int h = 0; h < c->n_heads && h < 16; h++)
		sinks[h] = (float)sink_of(h);
	a.parts = upload(parts, part_bytes);
	a.part_lse = upload(lse, (size_t)(lse_part * c->n_parts) * sizeof(*lse));
	a.sinks = c->sinks ? upload(sinks, sizeof(sinks)) : NULL;
	a.n_real = c->n_real ? upload(&n_real, sizeof(n_real)) : NULL;
	buffer_fill(a.out, 0x5a, out_bytes);
	buffer_fill(a.lse, 0x5a, lse_bytes);
	ck_assert_msg(kv_merge(&a) == 0, "%s", kv_error_text());
	buffer_get(out, a.out, out_bytes);
	buffer_get(got_lse, a.lse, lse_bytes);

	for (int t = 0; t < c->n_tokens; t++) {
		int64_t rest = (token - row) * (int64_t)kv_dtype_bytes(c->dtype);
		const char *end = out + (t * token + row) * (int64_t)kv_dtype_bytes(c->dtype);

		for (int64_t b = 0; b < rest; b++)
			expect(end[b] == 0x5a, "behind token %d", t);
		for (int h = 0; h < c->n_heads; h++) {
			int64_t at = t * token + h * c->dim;
			double error = 0, norm = 0, l = (double)got_lse[t * c->n_heads + h];
			struct right right;

			if (c->n_real && t >= c->n_real) {
				uint32_t raw;

				memcpy(&raw, &got_lse[t * c->n_heads + h], 4);
				expect(raw == 0x5a5a5a5a && out[at * 4] == 0x5a,
				       "token %d was written", t);
				continue;
			}
			right_row(c, parts, part, at, t, h, &right);
			for (int d = 0; d < c->dim; d++) {
				double x = number_get(out, at + d, c->dtype);

				error += (x - right.out[d]) * (x - right.out[d]);
				norm += right.out[d] * right.out[d];
			}
			/* NaN fails, too; a row that only its sink fills is zero. */
			expect(norm > 0 ? sqrt(error) <=
						  problem_tolerance(c->dtype) * sqrt(norm) + 1e-9
					: error == 0,
			       "token %d (kind %d) head %d: off by %g of %g", t, t % KINDS, h,
			       sqrt(error), sqrt(norm));
			expect(l == right.lse ||
				       fabs(l - right.lse) <= 1e-4 + 1e-6 * fabs(right.lse),
			       "token %d (kind %d) head %d: lse %g, right is %g", t, t % KINDS, h,
			       l, right.lse);
		}
	}
	buffer_free((void *)(uintptr_t)a.parts);
	buffer_free((void *)(uintptr_t)a.part_lse);
	buffer_free((void *)(uintptr_t)a.sinks);
	buffer_free((void *)(uintptr_t)a.n_real);
	buffer_free(a.out);
	buffer_free(a.lse);
	free(parts);
	free(lse);
	free(out);
	free(got_lse);
}
END_TEST

/* What the ranks have of their own adds up to the whole. */
START_TEST(shares_of_ranks_add_up)
{
	enum { N = 4, T = KINDS, D = 16 };
	const struct merge_case c = {.n_parts = N, .n_tokens = T, .n_heads = 1, .dim = D};
	float parts[N * T * D], lse[N * T], whole[T * D], share[T * D], sum[T * D] = {0};
	struct kv_merge_args a = {.size = sizeof(a),
				  .device = buffer_device,
				  .dtype = KV_F32,
				  .n_parts = N,
				  .n_tokens = T,
				  .n_heads = 1,
				  .head_dim = D};

	for (int i = 0; i < N * T * D; i++)
		parts[i] = (float)number_random(5, (uint64_t)i, 0, 0);
	for (int r = 0; r < N; r++)
		for (int t = 0; t < T; t++)
			lse[r * T + t] = lse_of(&c, r, t, 0);
	a.parts = upload(parts, sizeof(parts));
	a.part_lse = upload(lse, sizeof(lse));
	a.out = buffer_new(sizeof(whole));
	ck_assert_int_eq(kv_merge(&a), 0);
	buffer_get(whole, a.out, sizeof(whole));
	for (int r = 0; r < N; r++) {
		a.only_part = r + 1;
		ck_assert_int_eq(kv_merge(&a), 0);
		buffer_get(share, a.out, sizeof(share));
		for (int i = 0; i < T * D; i++)
			sum[i] += share[i];
	}
	for (int i = 0; i < T * D; i++)
		expect(fabsf(sum[i] - whole[i]) <= 1e-6f, "element %d: %g, not %g", i,
		       (double)sum[i], (double)whole[i]);
	buffer_free((void *)(uintptr_t)a.parts);
	buffer_free((void *)(uintptr_t)a.part_lse);
	buffer_free(a.out);
}
END_TEST

static float floats[64], others[64];

START_TEST(a_wrong_field_is_named)
{
	static const char *const fields[] = {
		"size",		"device", "dtype",     "n_parts",  "n_tokens",	       "n_heads",
		"head_dim",	"base",	  "only_part", "out: the", "lse_token_stride", "part_lse",
		"lse_with_sink"};
	struct kv_merge_args a = {.size = sizeof(a) - (_i == 0),
				  .device = _i == 1 ? 7 : KV_DEVICE_HOST,
				  .dtype = _i == 2 ? KV_F8_E4M3 : KV_F32,
				  .n_parts = _i == 3 ? 0 : 2,
				  .n_tokens = _i == 4 ? -1 : 1,
				  .n_heads = _i == 5 ? 0 : 1,
				  .head_dim = _i == 6 ? 0 : 4,
				  .base = _i == 7 ? 10 : 0,
				  .only_part = _i == 8 ? 3 : 0,
				  .parts = floats,
				  .out = _i == 9 ? floats : others,
				  .lse_token_stride = _i == 10 ? 1 : 0,
				  .part_lse = _i == 11 ? NULL : floats,
				  .lse_with_sink = _i == 12};

	ck_assert_int_eq(kv_merge(&a), -EINVAL);
	ck_assert_msg(strstr(kv_error_text(), fields[_i]), "\"%s\" has no %s", kv_error_text(),
		      fields[_i]);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("kernels/merge");
	TCase *tcase = tcase_create("merge");

	suite_add_tcase(suite, tcase);
	tcase_add_loop_test(tcase, parts_merge_to_the_whole_and_empty_ones_leave_no_trace, 0,
			    COUNT(cases));
	tcase_add_test(tcase, shares_of_ranks_add_up);
	tcase_add_loop_test(tcase, a_wrong_field_is_named, 0, 13);
	return run_on_device(suite);
}
