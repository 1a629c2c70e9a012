/* SPDX-License-Identifier: Apache-2.0 */
#include <check.h>
#include <math.h>
#include <stdlib.h>

#include "tools/engine/sampler.h"

#define N     50
#define DRAWS 20000

/* Probabilities 1/2, 1/4, 1/8, ... in a shuffled order: place_of(k) is the k-th likeliest. */
static int place_of(int k)
{
	return (k * 7 + 3) % N;
}

static void make_logits(float *logits)
{
	for (int k = 0; k < N; k++)
		logits[place_of(k)] = -k * logf(2);
}

static void draw(struct kv_sampler sampler, int *counts)
{
	float logits[N];

	make_logits(logits);
	for (int i = 0; i < DRAWS; i++) {
		int token = kv_sampler_pick(&sampler, logits, N);

		ck_assert_int_ge(token, 0);
		ck_assert_int_lt(token, N);
		counts[token]++;
	}
}

START_TEST(no_temperature_takes_the_likeliest_of_the_lowest_id)
{
	struct kv_sampler sampler = {.state = 1};
	float logits[N];

	make_logits(logits);
	ck_assert_int_eq(kv_sampler_pick(&sampler, logits, N), place_of(0));
	logits[place_of(0)] = 0;
	logits[9] = logits[4] = 5;
	ck_assert_int_eq(kv_sampler_pick(&sampler, logits, N), 4);
	ck_assert_uint_eq(sampler.state, 1);
}
END_TEST

START_TEST(draws_have_the_probabilities_of_the_logits)
{
	int counts[N] = {0};

	draw((struct kv_sampler){.temperature = 1, .top_p = 1, .state = 5}, counts);
	for (int k = 0; k < 8; k++) {
		double p = ldexp(1, -k - 1);

		/* five standard deviations */
		ck_assert_double_le(fabs(counts[place_of(k)] - DRAWS * p),
				    5 * sqrt(DRAWS * p * (1 - p)));
	}
}
END_TEST

START_TEST(a_high_temperature_flattens)
{
	int counts[N] = {0};

	draw((struct kv_sampler){.temperature = 100, .top_p = 1, .state = 5}, counts);
	for (int k = 0; k < N; k++)
		ck_assert_int_gt(counts[place_of(k)], DRAWS / N / 2);
}
END_TEST

START_TEST(top_k_leaves_exactly_k)
{
	for (int top_k = 1; top_k < 6; top_k++) {
		int counts[N] = {0};

		draw((struct kv_sampler){.temperature = 1, .top_k = top_k, .top_p = 1, .state = 5},
		     counts);
		for (int k = 0; k < N; k++)
			ck_assert_int_eq(counts[place_of(k)] > 0, k < top_k);
	}
}
END_TEST

START_TEST(top_p_leaves_the_fewest_that_reach_p)
{
	static const struct {
		float p;
		int n;
	} cases[] = {{0, 1}, {0.49f, 1}, {0.6f, 2}, {0.74f, 2}, {0.8f, 3}};

	for (int i = 0; i < 5; i++) {
		int counts[N] = {0};

		draw((struct kv_sampler){.temperature = 1, .top_p = cases[i].p, .state = 5},
		     counts);
		for (int k = 0; k < N; k++)
			ck_assert_int_eq(counts[place_of(k)] > 0, k < cases[i].n);
	}
}
END_TEST

START_TEST(a_seed_repeats_and_another_differs)
{
	struct kv_sampler a = {.temperature = 1, .top_p = 1, .state = 5}, b = a, c = a;
	int same = 0, different = 0;
	float logits[N];

	make_logits(logits);
	c.state = 6;
	for (int i = 0; i < 100; i++) {
		int token = kv_sampler_pick(&a, logits, N);

		same += token == kv_sampler_pick(&b, logits, N);
		different += token != kv_sampler_pick(&c, logits, N);
	}
	ck_assert_int_eq(same, 100);
	ck_assert_int_gt(different, 30);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("engine/sampler");
	TCase *tests = tcase_create("tests");
	SRunner *runner;
	int n_failed;

	tcase_set_timeout(tests, 60);
	tcase_add_test(tests, no_temperature_takes_the_likeliest_of_the_lowest_id);
	tcase_add_test(tests, draws_have_the_probabilities_of_the_logits);
	tcase_add_test(tests, a_high_temperature_flattens);
	tcase_add_test(tests, top_k_leaves_exactly_k);
	tcase_add_test(tests, top_p_leaves_the_fewest_that_reach_p);
	tcase_add_test(tests, a_seed_repeats_and_another_differs);
	suite_add_tcase(suite, tests);
	runner = srunner_create(suite);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
