/* SPDX-License-Identifier: Apache-2.0 */
/* kvcached/table.h: rows against a naive model, and what is refused. */
#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/client.h>
#include <kvcached/table.h>

#include "tests/support/expect.h"

#define ROWS  5
#define WIDTH 12

static int32_t ids[ROWS * WIDTH], counts[ROWS];

static struct kv_table table_new(int32_t ratio)
{
	for (int i = 0; i < ROWS * WIDTH; i++)
		ids[i] = 7;
	memset(counts, 0, sizeof(counts));
	return (struct kv_table){ids, counts, ROWS, WIDTH, ratio, 7};
}

START_TEST(a_walk_leaves_rows_as_a_list_of_lists_has_them)
{
	int32_t ratio = 1 + _i % 3, model[ROWS][WIDTH], n[ROWS] = {0};
	struct kv_table t = table_new(ratio);

	srand((unsigned)_i);
	for (int step = 0; step < 2000; step++) {
		int a = rand() % ROWS, b = rand() % ROWS, op = rand() % 5, m = rand() % 4;
		kv_block_id given[4] = {rand() % 99, rand() % 99, rand() % 99, rand() % 99};
		int32_t at = op == 0 ? n[a] : 0;

		if (op < 2) {
			int r = op ? kv_table_set(&t, a, given, m) : kv_table_append(&t, a, given, m);
			int fits = at + m * ratio <= WIDTH;

			expect(r == (fits ? 0 : -E2BIG), "step %d: %d", step, r);
			if (fits) {
				for (int i = 0; i < m * ratio; i++)
					model[a][at + i] = given[i / ratio] * ratio + i % ratio;
				n[a] = at + m * ratio;
			}
		} else if (op == 2) {
			expect(kv_table_clear(&t, a) == 0, "clear");
			n[a] = 0;
		} else if (op == 3) {
			expect(kv_table_move(&t, a, b) == 0, "move");
			if (a != b) {
				memcpy(model[b], model[a], sizeof(model[a]));
				n[b] = n[a];
				n[a] = 0;
			}
		} else {
			int32_t row[WIDTH], k = n[a];

			expect(kv_table_swap(&t, a, b) == 0, "swap");
			memcpy(row, model[a], sizeof(row));
			memcpy(model[a], model[b], sizeof(row));
			memcpy(model[b], row, sizeof(row));
			n[a] = n[b];
			n[b] = k;
		}
		for (int row = 0; row < ROWS; row++)
			expect(counts[row] == n[row] && !memcmp(ids + row * WIDTH, model[row],
								(size_t)n[row] * sizeof(*ids)),
			       "step %d: row %d differs", step, row);
	}
}
END_TEST

START_TEST(a_cleared_row_names_the_null_block)
{
	struct kv_table t = table_new(2);

	ck_assert_int_eq(kv_table_append(&t, 1, (kv_block_id[]){3, 4}, 2), 0);
	ck_assert_int_eq(kv_table_move(&t, 1, 0), 0);
	ck_assert_int_eq(kv_table_clear(&t, 0), 0);
	for (int i = 0; i < ROWS * WIDTH; i++)
		expect(ids[i] == 7, "entry %d is %d", i, ids[i]);
}
END_TEST

START_TEST(what_is_refused_changes_nothing)
{
	struct kv_table t = table_new(3);
	kv_block_id one = 1, bad[] = {1, -1}, huge = INT32_MAX / 3 + 1;

	ck_assert_int_eq(kv_table_append(&t, ROWS, &one, 1), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "row: 5 given, the table has 5"));
	ck_assert_int_eq(kv_table_set(&t, -1, &one, 1), -EINVAL);
	ck_assert_int_eq(kv_table_clear(&t, -1), -EINVAL);
	ck_assert_int_eq(kv_table_move(&t, 0, ROWS), -EINVAL);
	ck_assert_int_eq(kv_table_swap(&t, ROWS, 0), -EINVAL);
	ck_assert_int_eq(kv_table_append(&t, 0, bad, 2), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "ids[1]: -1"));
	ck_assert_int_eq(kv_table_append(&t, 0, &huge, 1), -EINVAL);
	ck_assert_int_eq(kv_table_append(&t, 0, bad, INT32_MAX), -E2BIG);
	ck_assert_int_eq(kv_table_append(&t, 0, bad, -1), -EINVAL);
	for (int i = 0; i < ROWS * WIDTH; i++)
		expect(ids[i] == 7 && counts[i / WIDTH] == 0, "entry %d has changed", i);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("client/table");
	TCase *tcase = tcase_create("table");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	suite_add_tcase(suite, tcase);
	tcase_add_loop_test(tcase, a_walk_leaves_rows_as_a_list_of_lists_has_them, 0, 6);
	tcase_add_test(tcase, a_cleared_row_names_the_null_block);
	tcase_add_test(tcase, what_is_refused_changes_nothing);
	srunner_run_all(runner, CK_NORMAL);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
