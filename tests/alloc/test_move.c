/* SPDX-License-Identifier: Apache-2.0 */
/* alloc/move.c: which blocks would change their place so that extents run empty. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "tests/alloc/chain.h"
#include "tests/support/expect.h"

#define EXTENT	 8 /* blocks */
#define MOST	 64
#define COUNT(a) (uint32_t)(sizeof(a) / sizeof((a)[0]))

static struct kv_books_move moves[MOST];

/* Extents of which n_cached[i] blocks are cached and the rest is free, but for the null block. */
static void lay_out(const uint32_t *n_cached, uint32_t n_extents)
{
	uint32_t n_blocks = n_extents * EXTENT - 1;
	int32_t ids[MOST];

	pages_deinit(&p);
	pages_init_extents(&p, n_blocks, BLOCK_TOKENS, EXTENT);
	kv_books_grant(b, A, n_blocks, ids);
	for (uint32_t i = 0; i < n_blocks; i++) {
		const int32_t *tokens = tokens_of(ids[i], 0);
		struct kv_key key = pages_key(&p, (struct kv_key){0, 0}, tokens);

		if ((uint32_t)ids[i] % EXTENT >= EXTENT - n_cached[ids[i] / EXTENT])
			ck_assert_int_eq(client_publish(&p, A, ids[i], -1, key, tokens, tick(1)),
					 KV_PUBLISHED);
		ck_assert_int_eq(kv_books_give(b, A, ids[i]), 0);
		if (pages_is_held(&p, ids[i], A))
			client_unpin(&p, ids[i], A);
	}
}

static uint32_t plan(uint32_t n_extents, uint32_t *ret_empty)
{
	return kv_books_move_plan(b, n_extents, moves, MOST, ret_empty);
}

/* Each was tried in the place of the other, for ever: who planned it never answered again. */
START_TEST(extents_that_fit_nowhere_are_tried_once)
{
	static const uint32_t n_cached[] = {7, 5, 5, 5};
	uint32_t n_empty;

	lay_out(n_cached, COUNT(n_cached));
	ck_assert_uint_eq(b->n_cached, 22);
	/* Two of the 5 go to the last free ones of the other two; there is no room for another two.
	 */
	ck_assert_uint_eq(plan(4, &n_empty), 5);
	ck_assert_uint_eq(n_empty, 1);
	kv_books_move_forget(b);
	ck_assert_uint_eq(b->n_cached, 22);

	lay_out((const uint32_t[]){7, 5, 5}, 3);
	ck_assert_uint_eq(plan(2, &n_empty), 0);
	ck_assert_uint_eq(n_empty, 0);
	ck_assert_uint_eq(b->n_moving, 0);
	ck_assert_uint_eq(b->n_free, 6);
}
END_TEST

START_TEST(the_emptiest_extents_run_empty_into_the_fullest)
{
	static const uint32_t n_cached[] = {7, 1, 6, 2, 5};
	uint32_t n_empty;

	lay_out(n_cached, COUNT(n_cached));
	ck_assert_uint_eq(plan(2, &n_empty), 3);
	ck_assert_uint_eq(n_empty, 2);
	for (int i = 0; i < 3; i++) {
		ck_assert(moves[i].from / EXTENT == 1 || moves[i].from / EXTENT == 3);
		ck_assert(moves[i].to / EXTENT == 2 || moves[i].to / EXTENT == 4);
	}
	kv_books_move_forget(b);
}
END_TEST

/* While one batch is copied the next one is planned: no block and no place is in both. */
START_TEST(a_batch_is_planned_while_another_is_under_way)
{
	static const uint32_t n_cached[] = {5, 1, 5, 2, 5, 1, 4};
	struct kv_books_move first[MOST];
	uint32_t n_empty, n, more;
	char text[256];

	lay_out(n_cached, COUNT(n_cached));
	n = plan(1, &n_empty);
	ck_assert_uint_eq(n_empty, 1);
	memcpy(first, moves, sizeof(first));
	more = plan(2, &n_empty);
	ck_assert_uint_eq(n_empty, 2);
	ck_assert_uint_gt(more, 0);
	ck_assert_uint_eq(b->n_moving, n + more);
	for (uint32_t i = 0; i < n; i++)
		for (uint32_t k = 0; k < more; k++)
			expect(first[i].from != moves[k].from && first[i].to != moves[k].to &&
				       first[i].to / EXTENT != moves[k].from / EXTENT &&
				       moves[k].to / EXTENT != first[i].from / EXTENT,
			       "move %u of the first and %u of the second", i, k);
	ck_assert_uint_eq(kv_books_move_end(b, first, n, true), n);
	ck_assert_uint_eq(kv_books_move_end(b, moves, more, true), more);
	ck_assert_uint_eq(b->n_moving, 0);
	ck_assert_uint_eq(b->n_cached, 23);
	ck_assert_uint_eq(kv_space_n_spare(&b->space), 3);
	expect(!kv_books_check(b, NULL, text, sizeof(text)), "%s", text);
	/* Those that have moved are still found in the order in which they go. */
	ck_assert_uint_eq(kv_books_evict(b, 23, true), 23);
	expect(!kv_books_check(b, NULL, text, sizeof(text)), "%s", text);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("alloc/move");
	TCase *tcase = tcase_create("move");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	tcase_set_timeout(tcase, 10);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, extents_that_fit_nowhere_are_tried_once);
	tcase_add_test(tcase, the_emptiest_extents_run_empty_into_the_fullest);
	tcase_add_test(tcase, a_batch_is_planned_while_another_is_under_way);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
