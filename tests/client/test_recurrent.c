/* SPDX-License-Identifier: Apache-2.0 */
/* kvcached/recurrent.h on random batches, against its rules one token at a time; and what it
 * refuses. */
#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/client.h>
#include <kvcached/recurrent.h>

#include "tests/support/expect.h"

#define SEQS   12
#define TOKENS 1200

struct batch {
	int32_t n, loc[SEQS + 1], computed[SEQS], lens[SEQS];
};

static void random_batch(unsigned seed, struct batch *b)
{
	srand(seed);
	b->n = rand() % (SEQS + 1);
	b->loc[0] = 0;
	for (int32_t i = 0; i < b->n; i++) {
		int32_t len = rand() % 4 ? rand() % 3 : rand() % 100;

		b->loc[i + 1] = b->loc[i] + len;
		b->computed[i] = rand() % 200;
		b->lens[i] = b->computed[i] + len;
	}
}

START_TEST(chunks_are_those_of_the_sequences_own_positions)
{
	int32_t chunk = 1 + _i % 17, starts[TOKENS + 1], seqs[TOKENS], last[SEQS], t = 0;
	struct batch b;
	int n, at = -1;

	random_batch((unsigned)_i, &b);
	n = kv_state_chunks(b.loc, b.computed, b.n, chunk, starts, seqs, last);
	ck_assert_int_ge(n, 0);
	ck_assert_int_le(n, (int)kv_state_chunks_bound(b.loc, b.n, chunk));
	for (int32_t s = 0; s < b.n; s++) {
		for (int32_t p = b.computed[s]; p < b.lens[s]; p++, t++) {
			/* A chunk begins where the sequence's tokens do, and at each multiple. */
			if (p == b.computed[s] || p % chunk == 0) {
				at++;
				expect(at < n && starts[at] == t && seqs[at] == s,
				       "chunk %d: token %d of sequence %d, %d of %d is right", at,
				       starts[at], seqs[at], t, s);
			}
		}
		expect(last[s] == (b.lens[s] > b.computed[s] ? at : -1),
		       "sequence %d: last chunk %d", s, last[s]);
	}
	ck_assert_int_eq(at + 1, n);
	ck_assert_int_eq(starts[n], t);
}
END_TEST

START_TEST(programs_cover_each_token_once)
{
	int64_t room = kv_conv_programs_room(0), n;
	int32_t *seqs = malloc((size_t)room * 4), *offsets = malloc((size_t)room * 4), t = 0;
	struct batch b;

	random_batch((unsigned)_i, &b);
	n = kv_conv_programs(b.loc, b.n, seqs, offsets, room);
	ck_assert_int_ge(n, 0);
	for (int64_t i = 0; i < n; i++) {
		int32_t end, s = seqs[i];

		expect(t == b.loc[s] + offsets[i] * KV_CONV_PROGRAM, "program %d", (int)i);
		end = t + KV_CONV_PROGRAM;
		t = end < b.loc[s + 1] ? end : b.loc[s + 1];
	}
	ck_assert_int_eq(t, b.loc[b.n]);
	for (int64_t i = n; i < room; i++)
		expect(seqs[i] == -1 && offsets[i] == -1, "entry %d is no padding", (int)i);
	if (n) {
		seqs[0] = -7;
		ck_assert_int_eq((int)kv_conv_programs(b.loc, b.n, seqs, offsets, n - 1), -E2BIG);
		ck_assert_int_eq(seqs[0], -7);
	}
	free(seqs);
	free(offsets);
}
END_TEST

/* A decode token by token: the ring fills, is stored, and starts anew. */
START_TEST(a_replay_stores_when_the_ring_is_full_and_at_intervals)
{
	int32_t room = 1 + _i % 5, interval = _i / 5 ? 16 : 0, base = 21, write_pos, one = 1;
	int32_t in_ring = 0, since = base;
	uint8_t flush;

	for (int32_t computed = base; computed < base + 80; computed++) {
		if (interval && computed % interval == 0 && computed > base) {
			in_ring = 0;
			since = computed;
		}
		ck_assert_int_eq(kv_replay_steps(&computed, &base, &one, 1, room, interval,
						 &write_pos, &flush),
				 0);
		expect(write_pos == in_ring, "%d tokens: written at %d, %d is right", computed,
		       write_pos, in_ring);
		expect(flush == (in_ring == room - 1 ||
				 (interval && (computed + 1) % interval == 0)),
		       "%d tokens (%d in the ring): flush %d", computed, computed - since, flush);
		in_ring = in_ring == room - 1 ? 0 : in_ring + 1;
	}
}
END_TEST

START_TEST(a_row_is_the_column_of_the_last_token_and_its_drafts)
{
	int32_t table[2][6] = {{10, 11, 12, 13, 14, 15}, {20, 21, 22, 23, 24, 25}};
	int32_t lens[2] = {17, 64}, rows[6] = {0}, first[2], last[2], computed[2] = {16, 63};

	ck_assert_int_eq(kv_state_rows(table[0], 6, lens, 2, 16, 2, rows), 0);
	ck_assert_mem_eq(rows, ((int32_t[]){11, 12, 13, 23, 24, 25}), sizeof(rows));
	rows[0] = -7;
	ck_assert_int_eq(kv_state_rows(table[0], 6, lens, 2, 16, 3, rows), -ERANGE);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "seq_lens[1]"));
	ck_assert_int_eq(rows[0], -7);
	ck_assert_int_eq(kv_state_columns(computed, lens, 2, 16, NULL, first, last), 0);
	ck_assert_mem_eq(first, ((int32_t[]){1, 3}), sizeof(first));
	ck_assert_mem_eq(last, ((int32_t[]){1, 3}), sizeof(last));
}
END_TEST

START_TEST(the_last_token_of_a_prompt_decodes_and_a_first_one_does_not)
{
	static const int32_t loc[] = {0, 1, 2, 3, 7}, lens[] = {9, 30, 1, 40};
	static const uint8_t prefilling[] = {0, 1, 1, 1};
	struct kv_split s;

	kv_split_states(loc, lens, prefilling, 4, 8, 1, &s);
	ck_assert_int_eq(s.n_decodes, 2);
	ck_assert_int_eq(s.n_decode_tokens, 2);
	ck_assert_int_eq(s.n_prefills, 2);
	ck_assert_int_eq(s.n_prefill_tokens, 6); /* one of them padding */
}
END_TEST

START_TEST(where_some_verify_no_other_decodes)
{
	static const int32_t loc[] = {0, 3, 4, 6, 7}, drafts[] = {2, -1, 1, 0},
			     none[] = {0, -1, -1, 0};
	struct kv_draft_split s;
	uint8_t verify[4];

	kv_split_drafts(loc, drafts, 4, 7, verify, &s);
	ck_assert_mem_eq(verify, ((uint8_t[]){1, 0, 1, 1}), 4);
	ck_assert_int_eq(s.n_verify, 3);
	ck_assert_int_eq(s.n_verify_tokens, 6);
	ck_assert_int_eq(s.n_decodes, 0);
	ck_assert_int_eq(s.n_prefills, 1);
	ck_assert_int_eq(s.n_prefill_tokens, 1);
	kv_split_drafts(loc + 1, none + 1, 1, 1, verify, &s); /* no draft at all: a plain batch */
	ck_assert_int_eq(verify[0], 0);
	ck_assert_int_eq(s.n_verify + s.n_prefills, 0);
	ck_assert_int_eq(s.n_decodes, 1);
}
END_TEST

static int32_t ints[8];
static uint8_t bytes[8];

START_TEST(a_wrong_field_is_named)
{
	static const int32_t good[] = {0, 1, 2}, bad[] = {1, -1, 3}, falls[] = {0, 5, 4};
	static const char *const fields[] = {"bases",	 "n_query[1]", "n_computed[1]",
					     "room",	 "interval",   "interval",
					     "n_drafts", "chunk",      "query_start_loc[2]"};
	int r = 0;

	if (_i < 5)
		r = kv_replay_steps(_i == 2 ? bad : good, _i == 0 ? NULL : good,
				    _i == 1 ? bad : good, 3, _i == 3 ? 0 : 4, _i == 4 ? -1 : 0,
				    ints, bytes);
	else if (_i == 5)
		r = kv_state_columns(good, good, 3, 0, ints, ints, ints);
	else if (_i == 6)
		r = kv_state_rows(good, 3, good, 1, 0, 1, ints);
	else
		r = kv_state_chunks(_i == 8 ? falls : good, good, 2, _i == 7 ? 0 : 4, ints, ints,
				    ints);
	ck_assert_int_eq(r, -EINVAL);
	ck_assert_msg(strstr(kv_error_text(), fields[_i]), "\"%s\" has no %s", kv_error_text(),
		      fields[_i]);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("client/recurrent");
	TCase *tcase = tcase_create("recurrent");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	suite_add_tcase(suite, tcase);
	tcase_add_loop_test(tcase, chunks_are_those_of_the_sequences_own_positions, 0, 200);
	tcase_add_loop_test(tcase, programs_cover_each_token_once, 0, 50);
	tcase_add_loop_test(tcase, a_replay_stores_when_the_ring_is_full_and_at_intervals, 0, 10);
	tcase_add_test(tcase, a_row_is_the_column_of_the_last_token_and_its_drafts);
	tcase_add_test(tcase, the_last_token_of_a_prompt_decodes_and_a_first_one_does_not);
	tcase_add_test(tcase, where_some_verify_no_other_decodes);
	tcase_add_loop_test(tcase, a_wrong_field_is_named, 0, 9);
	srunner_run_all(runner, CK_NORMAL);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
