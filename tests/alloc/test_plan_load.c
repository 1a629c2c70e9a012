/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kv_plan_load_blocks() against schedules: sequences grow, slide and end at random within a load,
 * and never need more blocks than it says; kv_plan_table_columns() against the columns that they
 * fill.
 */
#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/plan.h>

#include "include/internal/error.h"
#include "tests/support/expect.h"

#define MAX_SEQS 12

static struct kv_plan_group group_of(uint8_t kind)
{
	return (struct kv_plan_group){.name = "g",
				      .kind = kind,
				      .block_tokens = 1 + (uint32_t)rand() % 20,
				      .window = 1 + (uint32_t)rand() % 70};
}

/* Blocks of a sequence with @len tokens of which @done have results; the table's columns in
 * *ret_columns. */
static uint64_t held(const struct kv_plan_group *g, uint64_t done, uint64_t len,
		     uint64_t *ret_columns)
{
	uint64_t first = 0, n = (len + g->block_tokens - 1) / g->block_tokens;

	if (g->kind == KV_GROUP_WINDOW && done + 1 > g->window)
		first = (done + 1 - g->window) / g->block_tokens;
	*ret_columns = n - first;
	return n - first;
}

START_TEST(a_load_never_needs_more_blocks_than_are_said)
{
	static const uint8_t kinds[] = {KV_GROUP_FULL, KV_GROUP_WINDOW};
	struct kv_plan_load load;
	uint64_t done[MAX_SEQS] = {0}, len[MAX_SEQS] = {0}, bound, width, most = 0;
	struct kv_plan_group g;

	srand((unsigned)_i);
	g = group_of(kinds[_i % 2]);
	load = (struct kv_plan_load){.n_seqs = 1 + (uint64_t)rand() % MAX_SEQS,
				     .context = 1 + (uint64_t)rand() % 300,
				     .step_tokens = 1 + (uint64_t)rand() % 100,
				     .ahead_tokens = (uint64_t)rand() % 4};
	load.n_tokens = load.n_seqs * (load.context + load.ahead_tokens);
	ck_assert_int_eq(kv_plan_load_blocks(&g, &load, &bound), 0);
	ck_assert_int_eq(kv_plan_table_columns(&g, load.context,
					       load.step_tokens + load.ahead_tokens, 1, &width),
			 0);
	for (int step = 0; step < 400; step++) {
		uint64_t left = load.step_tokens, blocks = 1, columns;

		for (uint64_t s = 0; s < load.n_seqs; s++) {
			uint64_t n = left ? (uint64_t)rand() % (left + 1) : 0;

			done[s] = len[s]; /* the step before is back */
			if (len[s] == load.context)
				done[s] = len[s] = 0; /* another one takes its place */
			if (n > load.context - len[s])
				n = load.context - len[s];
			len[s] += n;
			left -= n;
			blocks += held(&g, done[s], len[s], &columns);
			expect(columns <= width, "step %d: %llu columns of %llu", step,
			       (unsigned long long)columns, (unsigned long long)width);
		}
		expect(blocks <= bound, "step %d: %llu blocks of %llu", step,
		       (unsigned long long)blocks, (unsigned long long)bound);
		most = blocks > most ? blocks : most;
	}
	ck_assert_uint_gt(most, 1);
}
END_TEST

/* Sequences whose window begins with a block's last token, and a step that brings as many as it can
 * over the next. */
START_TEST(a_step_can_be_made_that_needs_all_of_a_windows_blocks)
{
	struct kv_plan_group g;
	struct kv_plan_load load;
	uint64_t bound, blocks = 1, left, behind, edge, columns;

	srand((unsigned)_i);
	g = group_of(KV_GROUP_WINDOW);
	g.window = 2 + (uint32_t)rand() % 70;
	g.block_tokens = 2 + (uint32_t)rand() % 20;
	load = (struct kv_plan_load){.n_seqs = 1 + (uint64_t)rand() % MAX_SEQS,
				     .context = 10000,
				     .step_tokens = (uint64_t)rand() % 100};
	ck_assert_int_eq(kv_plan_load_blocks(&g, &load, &bound), 0);
	left = load.step_tokens;
	/* done - window + 1 is one before a boundary */
	behind = (100 * g.block_tokens - 1) + g.window - 1;
	edge = g.block_tokens - behind % g.block_tokens + 1;
	edge = edge > g.block_tokens ? edge - g.block_tokens : edge;
	for (uint64_t s = 0; s < load.n_seqs; s++) {
		uint64_t n = left < edge ? 0 : edge;

		left -= n;
		if (s == load.n_seqs - 1)
			n += left;
		blocks += held(&g, behind, behind + n, &columns);
	}
	ck_assert_uint_eq(blocks, bound);
}
END_TEST

START_TEST(rows_of_state_are_two_a_sequence_and_one_for_each_interval)
{
	struct kv_plan_group g = {.name = "state", .kind = KV_GROUP_STATE};
	struct kv_plan_load load = {.n_seqs = 64, .n_tokens = 64 * 100000, .context = 131072};
	uint64_t n;

	ck_assert_int_eq(kv_plan_load_blocks(&g, &load, &n), 0);
	ck_assert_uint_eq(n, 2 * 64 + 1);
	g.block_tokens = 1024;
	ck_assert_int_eq(kv_plan_load_blocks(&g, &load, &n), 0);
	ck_assert_uint_eq(n,
			  64 + 6250 + 1); /* a row for each 1,024 tokens: no fewer would be read */
	load.n_tokens = 64 * 1025;	  /* 64 rows of 65 lie at a boundary */
	ck_assert_int_eq(kv_plan_load_blocks(&g, &load, &n), 0);
	ck_assert_uint_eq(n, 64 + 65 + 1);
}
END_TEST

START_TEST(tables_that_begin_with_their_sequence_have_all_its_columns)
{
	struct kv_plan_group g = {
		.name = "w", .kind = KV_GROUP_WINDOW, .block_tokens = 16, .window = 128};
	uint64_t n;

	ck_assert_int_eq(kv_plan_table_columns(&g, 4096, 8, 0, &n), 0);
	ck_assert_uint_eq(n, 257);
	ck_assert_int_eq(kv_plan_table_columns(&g, 4096, 8, 1, &n), 0);
	ck_assert_uint_eq(n, 10);
	g.kind = KV_GROUP_FULL;
	ck_assert_int_eq(kv_plan_table_columns(&g, 4096, 8, 1, &n), 0);
	ck_assert_uint_eq(n, 257);
}
END_TEST

static void refused(int r, int error, const char *words)
{
	ck_assert_int_eq(r, error);
	expect(strstr(kv_error_text(), words), "'%s' says nothing of '%s'", kv_error_text(), words);
}

START_TEST(what_can_not_be_is_refused_by_name)
{
	struct kv_plan_group g = {.name = "odd", .kind = KV_GROUP_CROSS, .block_tokens = 16};
	struct kv_plan_load load = {.n_seqs = 1, .n_tokens = 1};
	uint64_t n;

	refused(kv_plan_load_blocks(&g, &load, &n), -EINVAL, "'odd': kind");
	g.kind = KV_GROUP_WINDOW;
	refused(kv_plan_load_blocks(&g, &load, &n), -EINVAL, "'odd': window");
	refused(kv_plan_table_columns(&g, 1, 1, 0, &n), -EINVAL, "'odd': window");
	g.kind = KV_GROUP_FULL;
	refused(kv_plan_table_columns(&g, 1, 0, 0, &n), -EINVAL, "ahead_tokens");
	g.block_tokens = 0;
	refused(kv_plan_load_blocks(&g, &load, &n), -EINVAL, "'odd': block_tokens");
	g.kind = KV_GROUP_STATE;
	refused(kv_plan_table_columns(&g, 1, 1, 0, &n), -EINVAL, "'odd': block_tokens");
	g = (struct kv_plan_group){.name = "big", .kind = KV_GROUP_FULL, .block_tokens = 1};
	load = (struct kv_plan_load){.n_seqs = UINT64_MAX,
				     .ahead_tokens = UINT64_MAX,
				     .n_tokens = UINT64_MAX,
				     .margin_blocks = UINT64_MAX};
	refused(kv_plan_load_blocks(&g, &load, &n), -EOVERFLOW, "n_seqs: 18446744073709551615");
	refused(kv_plan_table_columns(&g, UINT64_MAX, UINT64_MAX, 0, &n), -EOVERFLOW, "context");
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("alloc/plan_load");
	SRunner *runner = srunner_create(suite);
	TCase *tcase = tcase_create("plan_load");
	int n_failed;

	tcase_add_loop_test(tcase, a_load_never_needs_more_blocks_than_are_said, 0, 200);
	tcase_add_loop_test(tcase, a_step_can_be_made_that_needs_all_of_a_windows_blocks, 0, 200);
	tcase_add_test(tcase, rows_of_state_are_two_a_sequence_and_one_for_each_interval);
	tcase_add_test(tcase, tables_that_begin_with_their_sequence_have_all_its_columns);
	tcase_add_test(tcase, what_can_not_be_is_refused_by_name);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
