/* SPDX-License-Identifier: Apache-2.0 */
/* alloc/heap.c: smallest stamp first, whatever the order of coming. */
#include <check.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/heap.h"
#include "tests/alloc/random.h"
#include "tests/support/expect.h"

static struct kv_heap heap;

static void teardown(void)
{
	free(heap.items);
	memset(&heap, 0, sizeof(heap));
}

START_TEST(stamps_come_out_in_order)
{
	enum { N = 5000 }; /* past the first growth of the array */
	static bool seen[N];
	struct random r = {1};
	uint64_t last = 0;

	for (int32_t id = 0; id < N; id++)
		expect(kv_heap_push(&heap, random_below(&r, N / 4), id) == 0, "id %d", id);
	for (int i = 0; i < N; i++) {
		expect(heap.n == (uint32_t)(N - i), "pop %d", i);
		expect(heap.items[0].stamp >= last, "pop %d", i);
		expect(!seen[heap.items[0].id], "pop %d", i);
		seen[heap.items[0].id] = true;
		last = heap.items[0].stamp;
		kv_heap_pop(&heap);
	}
	ck_assert_uint_eq(heap.n, 0);
}
END_TEST

START_TEST(the_top_with_a_later_stamp_goes_to_its_place)
{
	for (int32_t id = 0; id < 8; id++)
		kv_heap_push(&heap, (uint64_t)id * 10, id);
	kv_heap_restamp_top(&heap, 35);
	for (int i = 0; i < 8; i++) {
		const int32_t order[] = {1, 2, 3, 0, 4, 5, 6, 7};

		ck_assert_int_eq(heap.items[0].id, order[i]);
		kv_heap_pop(&heap);
	}
}
END_TEST

START_TEST(the_largest_stamp_there_is_is_a_stamp)
{
	kv_heap_push(&heap, UINT64_MAX, 1);
	kv_heap_push(&heap, 0, 2);
	kv_heap_push(&heap, UINT64_MAX - 1, 3);
	ck_assert_int_eq(heap.items[0].id, 2);
	kv_heap_restamp_top(&heap, UINT64_MAX);
	ck_assert_int_eq(heap.items[0].id, 3);
}
END_TEST

START_TEST(a_random_walk_agrees_with_a_plain_list)
{
	enum { MOST = 300 };
	struct kv_heap_item list[MOST];
	struct random r = {(uint64_t)_i};
	uint32_t n = 0;

	for (int step = 0; step < 50000; step++) {
		uint32_t least = 0, op = random_below(&r, 5);

		for (uint32_t i = 1; i < n; i++)
			least = list[i].stamp < list[least].stamp ? i : least;
		expect(heap.n == n, "step %d", step);
		if (n) {
			/* Equal stamps may come in any order: the plain list takes the heap's. */
			expect(heap.items[0].stamp == list[least].stamp, "step %d", step);
			while (list[least].id != heap.items[0].id)
				least = (least + 1) % n;
			expect(heap.items[0].stamp == list[least].stamp, "step %d", step);
		}
		if (n && op == 0) {
			kv_heap_pop(&heap);
			list[least] = list[--n];
		} else if (n && op < 3) {
			list[least].stamp += random_below(&r, 50);
			kv_heap_restamp_top(&heap, list[least].stamp);
		} else if (n < MOST) {
			list[n] = (struct kv_heap_item){random_below(&r, 1000), step};
			expect(kv_heap_push(&heap, list[n].stamp, list[n].id) == 0, "step %d",
			       step);
			n++;
		}
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("alloc/heap");
	TCase *tcase = tcase_create("heap");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, NULL, teardown);
	tcase_add_test(tcase, stamps_come_out_in_order);
	tcase_add_test(tcase, the_top_with_a_later_stamp_goes_to_its_place);
	tcase_add_test(tcase, the_largest_stamp_there_is_is_a_stamp);
	tcase_add_loop_test(tcase, a_random_walk_agrees_with_a_plain_list, 0, 4);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
