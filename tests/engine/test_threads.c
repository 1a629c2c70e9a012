/* SPDX-License-Identifier: Apache-2.0 */
#include <check.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "tools/engine/threads.h"

#define MAX_ITEMS 100

struct count {
	unsigned n_threads;
	atomic_int items[MAX_ITEMS];
	atomic_int in[64]; /* a thread's number is never used twice at a time */
};

static void count_item(void *context, size_t item, unsigned thread)
{
	struct count *count = context;

	ck_assert_uint_lt(thread, count->n_threads);
	ck_assert_int_eq(atomic_fetch_add(&count->in[thread], 1), 0);
	atomic_fetch_add(&count->items[item], 1);
	atomic_fetch_sub(&count->in[thread], 1);
}

static void run_rounds(struct kv_threads *threads, int n_rounds, int pause_us)
{
	struct count count = {.n_threads = kv_threads_n(threads)};

	for (int round = 0; round < n_rounds; round++) {
		size_t n = round % (MAX_ITEMS + 1);

		for (size_t i = 0; i < MAX_ITEMS; i++)
			atomic_store(&count.items[i], 0);
		kv_threads_run(threads, n, count_item, &count);
		for (size_t i = 0; i < MAX_ITEMS; i++)
			ck_assert_int_eq(atomic_load(&count.items[i]), i < n);
		if (pause_us)
			usleep(pause_us);
	}
}

START_TEST(every_item_is_done_once)
{
	struct kv_threads *threads;

	ck_assert_int_eq(kv_threads_new(_i, &threads), 0);
	if (_i)
		ck_assert_uint_eq(kv_threads_n(threads), _i);
	run_rounds(threads, 1500, 0);
	run_rounds(threads, 100, 300); /* long enough for all to fall asleep */
	kv_threads_free(threads);
}
END_TEST

START_TEST(threads_end_at_once_or_asleep)
{
	struct kv_threads *threads;

	for (int i = 0; i < 200; i++) {
		ck_assert_int_eq(kv_threads_new(4, &threads), 0);
		if (i % 2)
			usleep(500);
		ck_assert_ptr_null(kv_threads_free(threads));
	}
	ck_assert_ptr_null(kv_threads_free(NULL));
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("engine/threads");
	TCase *tests = tcase_create("tests");
	SRunner *runner;
	int n_failed;

	tcase_set_timeout(tests, 120);
	tcase_add_loop_test(tests, every_item_is_done_once, 0, 6);
	tcase_add_test(tests, threads_end_at_once_or_asleep);
	suite_add_tcase(suite, tests);
	runner = srunner_create(suite);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
