/* SPDX-License-Identifier: Apache-2.0 */
/* kvcached/schedule.h: what golden vectors don't ask, and what it refuses. */
#include <check.h>
#include <errno.h>
#include <string.h>

#include <kvcached/client.h>
#include <kvcached/schedule.h>

START_TEST(documents_of_a_sequence_keep_their_order_in_a_padded_row)
{
	static const int32_t docs[][3] = {{2, 30, 40}, {0, 5, 9}, {2, 1, 4}, {2, 50, 51}};
	static const int32_t right[3][4][2] = {{{5, 9}}, {{0}}, {{30, 40}, {1, 4}, {50, 51}}};
	int32_t table[3][4][2];

	memset(table, 0x55, sizeof(table));
	ck_assert_int_eq(kv_doc_table(docs, 4, 3, 0, NULL), 3);
	ck_assert_int_eq(kv_doc_table(docs, 4, 3, 2, table[0][0]), -E2BIG);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "width: room for 2"));
	ck_assert_int_eq(kv_doc_table(docs, 4, 2, 4, table[0][0]), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "docs[0]: sequence 2"));
	ck_assert_int_eq(table[0][0][0], 0x55555555);
	ck_assert_int_eq(kv_doc_table(docs, 4, 3, 4, table[0][0]), 3);
	ck_assert_mem_eq(table, right, sizeof(right));
}
END_TEST

START_TEST(rows_of_a_sequence_without_tokens_here_and_of_none_are_empty)
{
	static const int32_t local[] = {4, 0, 0, 1}, loc[] = {0, 2, 5, 5, 6};
	static const uint8_t right[] = {0, 0, 1, 1, 1, 0, 1, 1};
	uint8_t empty[8];

	memset(empty, 0x55, sizeof(empty));
	kv_cp_empty_rows(local, loc, 4, 8, empty);
	ck_assert_mem_eq(empty, right, sizeof(right));
	memset(empty, 0x55, sizeof(empty));
	kv_cp_empty_rows(local, loc, 4, 3, empty); /* fewer rows than queries */
	ck_assert_mem_eq(empty, right, 3);
	ck_assert_int_eq(empty[3], 0x55);
}
END_TEST

START_TEST(tokens_that_logits_are_wanted_of_rise_and_are_of_the_batch)
{
	static const int32_t loc[] = {0, 4, 4, 6, 9}, good[] = {3, 5, 6, 8}, right[] = {0, 1, 1, 2, 4};
	static const int32_t bad[][2] = {{3, 3}, {3, 2}, {-1, 3}, {8, 9}};
	int32_t got[5];

	ck_assert_int_eq(kv_logits_rows(loc, 4, good, 4, got), 2);
	ck_assert_mem_eq(got, right, sizeof(right));
	ck_assert_int_eq(kv_logits_rows(loc, 4, good, 0, got), 0);
	ck_assert_int_eq(got[4], 0);
	for (int i = 0; i < 4; i++) {
		ck_assert_int_eq(kv_logits_rows(loc, 4, bad[i], 2, got), -EINVAL);
		ck_assert_ptr_nonnull(strstr(kv_error_text(), i == 2 ? "logits_indices[0]"
								     : "logits_indices[1]"));
	}
}
END_TEST

START_TEST(sinks_come_before_a_sequences_own_blocks)
{
	static const int32_t table[] = {7, 8, 9, 0, 0, 0}, lens[] = {33, 0}, long_lens[] = {INT32_MAX - 31};
	static const int32_t right[] = {1, 2, 7, 8, 9, 1, 2, 0, 0, 0};
	static const kv_block_id sinks[] = {1, 2};
	int32_t got[10], got_lens[2];

	memset(got, 0x55, sizeof(got));
	ck_assert_int_eq(kv_sink_tables(table, 3, long_lens, 1, sinks, 2, 16, got, got_lens), -EOVERFLOW);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "seq_lens[0]"));
	ck_assert_int_eq(kv_sink_tables(table, 3, lens, 2, sinks, 2, 0, got, got_lens), -EINVAL);
	ck_assert_int_eq(got[0], 0x55555555);
	ck_assert_int_eq(kv_sink_tables(table, 3, lens, 2, sinks, 2, 16, got, got_lens), 0);
	ck_assert_mem_eq(got, right, sizeof(right));
	ck_assert_int_eq(got_lens[0], 65);
	ck_assert_int_eq(got_lens[1], 0);
}
END_TEST

START_TEST(cross_attention_has_the_encoders_lengths_and_table)
{
	static const int32_t loc[] = {0, 1, 4}, lens[] = {9, 12}, encoder[] = {40, 0}, table[] = {3, 4, 0, 0};
	struct kv_batch_data data = {.n_seqs = 2, .n_tokens = 4, .max_query_len = 3, .max_seq_len = 12,
				     .query_start_loc = loc, .seq_lens = lens, .seq_lens_upper = lens,
				     .window_prefix_lens = lens, .cp_local_lens = lens};
	struct kv_batch_data got;

	ck_assert_int_eq(kv_batch_cross(&data, table, 2, NULL, &got), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "encoder_lens"));
	data.encoder_lens = encoder;
	ck_assert_int_eq(kv_batch_cross(&data, table, 2, NULL, &got), 0);
	ck_assert_ptr_eq(got.seq_lens, encoder);
	ck_assert_ptr_eq(got.query_start_loc, loc);
	ck_assert_ptr_eq(got.block_table, table);
	ck_assert_uint_eq(got.max_seq_len, 40);
	ck_assert_uint_eq(got.max_query_len, 3);
	ck_assert_ptr_null(got.window_prefix_lens);
	ck_assert_ptr_null(got.cp_local_lens);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("client/schedule");
	TCase *tcase = tcase_create("schedule");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	suite_add_tcase(suite, tcase);
	tcase_add_test(tcase, documents_of_a_sequence_keep_their_order_in_a_padded_row);
	tcase_add_test(tcase, rows_of_a_sequence_without_tokens_here_and_of_none_are_empty);
	tcase_add_test(tcase, sinks_come_before_a_sequences_own_blocks);
	tcase_add_test(tcase, cross_attention_has_the_encoders_lengths_and_table);
	tcase_add_test(tcase, tokens_that_logits_are_wanted_of_rise_and_are_of_the_batch);
	srunner_run_all(runner, CK_NORMAL);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
