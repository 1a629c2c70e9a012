/* SPDX-License-Identifier: Apache-2.0 */
/* kvcached/slots.h against its definition, row by row, and kv_state_tracks() against
 * kv_state_chunks(). */
#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/client.h>
#include <kvcached/recurrent.h>
#include <kvcached/slots.h>

#include "tests/support/expect.h"

#define TOKENS 300
#define SEQS   5
#define WIDTH  7

struct problem {
	int64_t positions[TOKENS], slots[TOKENS];
	int32_t seqs[TOKENS], table[SEQS * WIDTH], first[SEQS];
	struct kv_row_slots_args args;
};

static void random_problem(unsigned seed, struct problem *p)
{
	srand(seed);
	p->args = (struct kv_row_slots_args){.size = sizeof(p->args),
					     .n_tokens = TOKENS,
					     .n_seqs = SEQS,
					     .table_width = WIDTH,
					     .block_rows = 1 + rand() % 9,
					     .stride = 1 + rand() % 5,
					     .null_block = rand() % 2 ? 3 : -1,
					     .is_write = rand() % 2,
					     .positions = p->positions,
					     .token_to_seq = p->seqs,
					     .block_table = p->table,
					     .first_blocks = rand() % 2 ? p->first : NULL,
					     .slots = p->slots};
	for (int i = 0; i < SEQS * WIDTH; i++)
		p->table[i] = rand() % 20 - 2;
	for (int i = 0; i < SEQS; i++)
		p->first[i] = rand() % 4;
	for (int i = 0; i < TOKENS; i++) {
		p->seqs[i] = rand() % (SEQS + 2) - 1;
		p->positions[i] = rand() % 400;
	}
}

/* Rows are walked through from the sequence's first on, until the position's. */
static int64_t walked(const struct problem *p, int t)
{
	int64_t row = 0, block = 0, in_block = 0, in_row = 0;
	int32_t seq = p->seqs[t], column, id;

	if (seq < 0 || seq >= SEQS)
		return -1;
	for (int64_t at = 0; at < p->positions[t]; at++) {
		if (++in_row < p->args.stride)
			continue;
		in_row = 0;
		row++;
		if (++in_block == p->args.block_rows) {
			in_block = 0;
			block++;
		}
	}
	column = (int32_t)block - (p->args.first_blocks ? p->first[seq] : 0);
	if ((p->args.is_write && in_row != p->args.stride - 1) || column < 0 || column >= WIDTH)
		return -1;
	id = p->table[seq * WIDTH + column];
	return id < 0 || id == p->args.null_block ? -1
						  : id * (int64_t)p->args.block_rows + in_block;
}

START_TEST(a_rows_slot_is_where_walking_there_ends)
{
	struct problem p;
	int n_found = 0;

	random_problem((unsigned)_i, &p);
	ck_assert_int_eq(kv_row_slots(&p.args), 0);
	for (int t = 0; t < TOKENS; t++) {
		expect(p.slots[t] == walked(&p, t), "token %d: %lld, not %lld", t,
		       (long long)p.slots[t], (long long)walked(&p, t));
		n_found += p.slots[t] >= 0;
	}
	/* A table that begins late and has small blocks may cover none of them. */
	ck_assert(n_found || p.args.block_rows * p.args.stride < 5);
}
END_TEST

START_TEST(what_can_not_be_is_refused_by_name_and_writes_nothing)
{
	struct problem p, wrong;
	const struct {
		size_t at;
		int32_t value;
		const char *words;
	} cases[] = {{offsetof(struct kv_row_slots_args, block_rows), 0, "block_rows: 0"},
		     {offsetof(struct kv_row_slots_args, stride), -1, "stride: -1"},
		     {offsetof(struct kv_row_slots_args, n_seqs), -2, "n_seqs"},
		     {offsetof(struct kv_row_slots_args, table_width), -2, "table_width"}};

	random_problem(1, &p);
	p.args.is_write = 0;
	p.seqs[7] = 0;
	for (size_t i = 0; i < 6; i++) {
		memset(p.slots, 0x55, sizeof(p.slots));
		wrong.args = p.args;
		if (i < 4)
			memcpy((char *)&wrong.args + cases[i].at, &cases[i].value, 4);
		if (i == 4)
			wrong.args.block_table = NULL;
		p.positions[7] = i == 5 ? -3 : 3;
		ck_assert_int_eq(kv_row_slots(&wrong.args), -EINVAL);
		expect(strstr(kv_error_text(), i < 4	? cases[i].words
					       : i == 4 ? "block_table"
							: "positions[7]: -3"),
		       "'%s'", kv_error_text());
		ck_assert_int_eq(p.slots[0], 0x5555555555555555);
	}
	p.args.size = 0;
	ck_assert_int_eq(kv_row_slots(&p.args), -EINVAL);
}
END_TEST

/* The state in question is that after the tokens before it: so many chunks from the sequence's
 * first. */
START_TEST(a_tracked_state_lies_at_a_multiple_where_a_chunk_ends)
{
	int32_t loc[SEQS + 1] = {0}, computed[SEQS], chunk, interval, starts[2000], seqs[2000],
			   last[SEQS];
	struct kv_state_track got[SEQS];

	srand((unsigned)_i);
	chunk = 1 + rand() % 6;
	interval = chunk * (1 + rand() % 4);
	for (int b = 0; b < SEQS; b++) {
		computed[b] = rand() % 3 * interval;
		loc[b + 1] = loc[b] + rand() % 60;
	}
	ck_assert_int_eq(kv_state_tracks(loc, computed, SEQS, interval, chunk, got), 0);
	/* All begin at a chunk's start: then these are the kernel's chunks. */
	ck_assert_int_ge(kv_state_chunks(loc, computed, SEQS, chunk, starts, seqs, last), 0);
	for (int b = 0; b < SEQS; b++) {
		int32_t len = loc[b + 1] - loc[b], end = computed[b] + len,
			kept = end / interval * interval;

		ck_assert_int_eq(got[b].at_end, len && kept == end);
		ck_assert_int_eq(got[b].after >= 0, kept > computed[b] && kept < end);
		if (got[b].after < 0)
			continue;
		ck_assert_int_eq(got[b].n_tokens, kept);
		ck_assert_int_eq(got[b].conv_end, loc[b] + kept - computed[b]);
		/* The chunk that begins with that state. */
		ck_assert_int_eq(starts[got[b].before], got[b].conv_end);
		ck_assert_int_eq(seqs[got[b].before], b);
	}
	ck_assert_int_eq(kv_state_tracks(loc, computed, SEQS, 0, chunk, got), -EINVAL);
	ck_assert_int_eq(kv_state_tracks(loc, computed, SEQS, interval, 0, got), -EINVAL);
	loc[1] = -1;
	ck_assert_int_eq(kv_state_tracks(loc, computed, SEQS, interval, chunk, got), -EINVAL);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("client/slots");
	SRunner *runner = srunner_create(suite);
	TCase *tcase = tcase_create("slots");
	int n_failed;

	tcase_add_loop_test(tcase, a_rows_slot_is_where_walking_there_ends, 0, 200);
	tcase_add_test(tcase, what_can_not_be_is_refused_by_name_and_writes_nothing);
	tcase_add_loop_test(tcase, a_tracked_state_lies_at_a_multiple_where_a_chunk_ends, 0, 200);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
