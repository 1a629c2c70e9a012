/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention over the axes that matter, crossed: every number of heads a KV head with every head size,
 * and each of these with every block size, window, cap, type, with and without sinks and slopes. The
 * lengths of a batch are those at which something begins or ends, up to 4097, and one of 33,000.
 */
#include <check.h>

#include "tests/kernels/buffer.h"
#include "tests/kernels/problem.h"
#include "tests/kernels/run.h"

#define COUNT(a) (int)(sizeof(a) / sizeof((a)[0]))
#define WHOLE	 33000

static const int groups[] = {1, 2, 4, 5, 7, 8, 16};
static const int dims[] = {64, 80, 96, 128, 192, 256};
static const int block_sizes[] = {16, 32, 64, 128};
static const int windows[] = {-1, 0, 1, 127, WHOLE};
static const float caps[] = {0, 30, 50};
static const struct {
	int dtype, kv_dtype;
} types[] = {{KV_BF16, KV_BF16}, {KV_F16, KV_F16}, {KV_BF16, KV_F8_E4M3}, {KV_F32, KV_F32}, {KV_F16, KV_F8_E4M3}};

static void add(struct problem_spec *spec, int q_len, int len)
{
	spec->q_lens[spec->n_seqs] = q_len;
	spec->lens[spec->n_seqs++] = len;
}

/* Group @g with size @d; the steps of the other axes have no factor in common with their lengths. */
static struct problem_spec spec_of(int g, int d)
{
	struct problem_spec spec = problem_default();

	spec.n_heads_kv = 1;
	spec.group = groups[g];
	spec.dk = spec.dv = dims[d];
	spec.block_tokens = block_sizes[(g + d) % COUNT(block_sizes)];
	spec.window_left = windows[(g + 2 * d) % COUNT(windows)];
	spec.softcap = caps[(2 * g + d) % COUNT(caps)];
	spec.dtype = types[(3 * g + d) % COUNT(types)].dtype;
	spec.k_dtype = spec.v_dtype = types[(3 * g + d) % COUNT(types)].kv_dtype;
	spec.k_scale = 0.0625f;
	spec.v_scale = 0.3f;
	spec.sinks = (g + d / 2) % 2;
	spec.alibi = (g / 2 + d) % 2;
	spec.kind = d % 2 ? KV_LAYOUT_PAGED : KV_LAYOUT_FLAT;
	spec.head_major = g % 2;
	spec.shuffle = 1 + g + 7 * d;
	return spec;
}

/* At least one backend of the device runs it, whatever it is. */
static void check_on_all(struct problem_spec *spec)
{
	struct problem *p;
	int n = 0;

	if (spec->window_left == WHOLE) /* as wide as the longest, which is the last */
		spec->window_left = spec->lens[spec->n_seqs - 1];
	p = problem_new(spec);
	for (int i = 0; problem_backends()[i]; i++)
		if (problem_can_run(p, problem_backends()[i])) {
			problem_check(p, problem_backends()[i]);
			n++;
		}
	ck_assert_int_gt(n, 0);
	problem_free(p);
}

START_TEST(every_axis_meets_every_group_and_head_size)
{
	struct problem_spec spec = spec_of(_i % COUNT(groups), _i / COUNT(groups));
	int size = spec.block_tokens;
	const int lens[] = {0, 1, size - 1, size, size + 1, 1000, 4097};

	for (int b = 0; b < COUNT(lens); b++)
		add(&spec, _i % 2 && lens[b] > 2 ? 1 + b % 3 : 1, lens[b]);
	check_on_all(&spec);
}
END_TEST

/* Each group once, and with it each head size. */
START_TEST(a_context_of_33_thousand_tokens_agrees_with_the_answer)
{
	struct problem_spec spec = spec_of(_i, _i % COUNT(dims));

	add(&spec, 1, WHOLE);
	check_on_all(&spec);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("kernels/attention_plan");
	TCase *tcase = tcase_create("plan");

	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, every_axis_meets_every_group_and_head_size, 0,
			    COUNT(groups) * COUNT(dims));
	tcase_add_loop_test(tcase, a_context_of_33_thousand_tokens_agrees_with_the_answer, 0,
			    COUNT(groups));
	suite_add_tcase(suite, tcase);
	return run_on_device(suite);
}
