/* SPDX-License-Identifier: Apache-2.0 */
/* Batch metadata from lengths on the device under test, against plain loops here. */
#include <check.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/metadata.h>

#include "include/internal/error.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/number.h"
#include "tests/kernels/run.h"
#include "tests/support/expect.h"

#define MAX_SEQS   700
#define MAX_TOKENS 9000
#define COUNT(a)   (int)(sizeof(a) / sizeof((a)[0]))

/* A build's inputs and outputs in host memory. */
struct batch {
	struct kv_metadata_args args; /* sizes */
	int32_t n_query[MAX_SEQS], n_computed[MAX_SEQS], n_prompt[MAX_SEQS], rejected[MAX_SEQS];
	int32_t rows[MAX_SEQS];
	int32_t *table;
	int32_t query_start_loc[MAX_SEQS + 1], seq_lens[MAX_SEQS], local[MAX_SEQS];
	int32_t token_to_seq[MAX_TOKENS], max_lens[2];
	int64_t positions[MAX_TOKENS], slots[MAX_TOKENS];
	uint8_t prefilling[MAX_SEQS], empty[MAX_TOKENS];
};

static void *upload(const void *from, size_t bytes)
{
	void *p = buffer_new(bytes);

	buffer_put(p, from, bytes);
	return p;
}

/* Builds on the device; inputs that advance come back. */
static int run(struct batch *b)
{
	size_t r = (size_t)b->args.n_seqs, t = (size_t)b->args.n_tokens;
	struct kv_metadata_args a = b->args;
	const struct {
		void *host;
		void **device;
		size_t bytes;
		bool out;
	} arrays[] = {
		{b->n_query, (void **)&a.n_query, r * 4, true},
		{b->n_computed, (void **)&a.n_computed, r * 4, true},
		{b->n_prompt, (void **)&a.n_prompt, r * 4, false},
		{b->rejected, (void **)&a.n_rejected, r * 4, false},
		{b->rows, (void **)&a.rows, r * 4, false},
		{b->table, (void **)&a.block_table, r * (size_t)a.table_width * 4, false},
		{b->query_start_loc, (void **)&a.query_start_loc, (r + 1) * 4, true},
		{b->seq_lens, (void **)&a.seq_lens, r * 4, true},
		{b->local, (void **)&a.cp_local_lens, r * 4, true},
		{b->token_to_seq, (void **)&a.token_to_seq, t * 4, true},
		{b->positions, (void **)&a.positions, t * 8, true},
		{b->slots, (void **)&a.slots, t * 8, true},
		{b->prefilling, (void **)&a.is_prefilling, r, true},
		{b->max_lens, (void **)&a.max_lens, 8, true},
		{b->empty, (void **)&a.cp_empty, t, true},
	};
	int result;

	a.size = sizeof(a);
	a.device = buffer_device;
	for (int i = 0; i < COUNT(arrays); i++)
		*arrays[i].device = upload(arrays[i].host, arrays[i].bytes);
	result = kv_metadata_build(&a);
	for (int i = 0; i < COUNT(arrays); i++) {
		if (result == 0 && arrays[i].out)
			buffer_get(arrays[i].host, *arrays[i].device, arrays[i].bytes);
		buffer_free(*arrays[i].device);
	}
	return result;
}

/* Where a position lies: by the definition, dividing the long way. */
static int64_t slot_of(const struct batch *b, int seq, int64_t p)
{
	int64_t size = b->args.cp_size > 1 ? b->args.cp_size : 1;
	int64_t inter = b->args.cp_interleave > 1 ? b->args.cp_interleave : 1, local = 0, column;
	int32_t id;

	if (p / inter % size != b->args.cp_rank)
		return -1;
	for (int64_t j = 0; j < p; j++)
		local += j / inter % size == b->args.cp_rank;
	column = local / b->args.block_tokens;
	if (column >= b->args.table_width)
		return -1;
	id = b->table[(int64_t)b->rows[seq] * b->args.table_width + column];
	return id == b->args.null_block ? -1 : (int64_t)id * b->args.block_tokens +
						       local % b->args.block_tokens;
}

static void check_build(const struct batch *b)
{
	int t = 0, longest = 0, longest_seq = 0;

	ck_assert_int_eq(b->query_start_loc[0], 0);
	for (int s = 0; s < b->args.n_seqs; s++) {
		int n = b->n_query[s], len = n ? b->n_computed[s] + n : 0, local = 0;

		longest = n > longest ? n : longest;
		longest_seq = len > longest_seq ? len : longest_seq;
		for (int j = 0; j < len; j++)
			local += b->args.cp_size < 2 ||
				 j / b->args.cp_interleave % b->args.cp_size == b->args.cp_rank;
		expect(b->seq_lens[s] == len && b->local[s] == local, "sequence %d: %d, %d, not %d, %d",
		       s, b->seq_lens[s], b->local[s], len, local);
		expect(b->prefilling[s] == (n && b->n_computed[s] < b->n_prompt[s]), "sequence %d", s);
		for (int i = 0; i < n; i++, t++) {
			int64_t p = b->n_computed[s] + i;

			expect(b->empty[t] == (local == 0), "token %d: %d, its sequence has %d tokens here",
			       t, b->empty[t], local);
			expect(b->token_to_seq[t] == s && b->positions[t] == p &&
				       b->slots[t] == slot_of(b, s, p),
			       "token %d: sequence %d, position %lld, slot %lld; %d, %lld, %lld are "
			       "right",
			       t, b->token_to_seq[t], (long long)b->positions[t],
			       (long long)b->slots[t], s, (long long)p, (long long)slot_of(b, s, p));
		}
		expect(b->query_start_loc[s + 1] == t, "offset %d is %d, not %d", s + 1,
		       b->query_start_loc[s + 1], t);
	}
	for (; t < b->args.n_tokens; t++)
		expect(b->token_to_seq[t] == 0 && b->positions[t] == 0 && b->slots[t] == -1 &&
			       b->empty[t] == 1,
		       "padded token %d", t);
	ck_assert_int_eq(b->max_lens[0], longest);
	ck_assert_int_eq(b->max_lens[1], longest_seq);
}

static int pick(int n, int i, int min, int max)
{
	double x = number_random(4321, (uint64_t)n, (uint64_t)i, 0);

	return min + (int)((x + 1) / 2 * (max - min + 1));
}

static struct batch *batch_new(int n_seqs, int width)
{
	struct batch *b = calloc(1, sizeof(*b));

	b->args.n_seqs = n_seqs;
	b->args.table_width = width;
	b->args.block_tokens = 16;
	b->table = calloc((size_t)n_seqs * (size_t)width + 1, sizeof(*b->table));
	for (int s = 0; s < n_seqs; s++)
		b->rows[s] = s;
	return b;
}

static void batch_free(struct batch *b)
{
	free(b->table);
	free(b);
}

/* Decodes, prefills, empty ones in between, padding behind; then three steps on, in place. */
START_TEST(any_batch_has_the_arrays_that_its_lengths_say)
{
	static const int counts[] = {0, 1, 2, 31, 255, 256, 257, 700};
	int n_seqs = counts[_i], total = 0;
	struct batch *b = batch_new(n_seqs, 40);

	b->args.block_tokens = _i % 2 ? 16 : 5;
	b->args.null_block = 0;
	if (_i % 3 == 2) {
		b->args.cp_size = 3;
		b->args.cp_rank = 1;
		b->args.cp_interleave = _i % 2 ? 16 : 1;
	}
	for (int s = 0; s < n_seqs; s++) {
		b->n_query[s] = pick(_i, s, 0, 3) ? 1 : pick(_i, s + 1000, 0, 60);
		b->n_computed[s] = pick(_i, s + 2000, 0, 190);
		b->n_prompt[s] = pick(_i, s + 3000, 0, 220);
		b->rows[s] = n_seqs - 1 - s;
		total += b->n_query[s];
		for (int c = 0; c < 40; c++)
			b->table[s * 40 + c] = c < 35 ? pick(_i, s * 40 + c, 1, 9999) : 0;
	}
	b->args.n_tokens = total + _i;
	ck_assert_msg(run(b) == 0, "%s", kv_error_text());
	check_build(b);
	for (int step = 0; step < 3; step++) {
		int32_t query[MAX_SEQS], computed[MAX_SEQS];

		memcpy(query, b->n_query, sizeof(query));
		memcpy(computed, b->n_computed, sizeof(computed));
		for (int s = 0; s < n_seqs; s++)
			b->rejected[s] = b->n_query[s] > 1 ? pick(step, s, 0, 1) : 0;
		b->args.advance = 1;
		ck_assert_msg(run(b) == 0, "%s", kv_error_text());
		for (int s = 0; s < n_seqs; s++) {
			int went = query[s] ? query[s] - b->rejected[s] : 0;

			expect(b->n_query[s] == (query[s] != 0) &&
				       b->n_computed[s] == computed[s] + went,
			       "sequence %d after a step", s);
		}
		check_build(b);
	}
	batch_free(b);
}
END_TEST

/* D11, D39, and D09 in a row of its own width: single slots. */
START_TEST(slots_of_the_field_cases)
{
	static const struct {
		int size, width, table[3], cp_size, interleave;
		int position, rank;
		int64_t slot;
	} cases[] = {
		/* D09: positions that the row does not cover; a covered null block */
		{4, 1, {7}, 1, 1, 0, 0, 28},
		{4, 1, {7}, 1, 1, 3, 0, 31},
		{4, 1, {7}, 1, 1, 4, 0, -1},
		{4, 1, {7}, 1, 1, 1048575, 0, -1},
		{4, 2, {7, 0}, 1, 1, 5, 0, -1},
		/* D11: drafts across blocks that are no neighbours */
		{4, 2, {7, 3}, 1, 1, 3, 0, 31},
		{4, 2, {7, 3}, 1, 1, 4, 0, 12},
		{4, 2, {7, 3}, 1, 1, 6, 0, 14},
		{4, 3, {7, 3, 9}, 1, 1, 7, 0, 15},
		{4, 3, {7, 3, 9}, 1, 1, 8, 0, 36},
		/* D39: tokens spread over ranks */
		{16, 2, {9, 2}, 4, 1, 0, 0, 144},
		{16, 2, {9, 2}, 4, 1, 5, 1, 145},
		{16, 2, {9, 2}, 4, 1, 5, 0, -1},
		{16, 2, {9, 2}, 4, 1, 63, 3, 159},
		{16, 2, {9, 2}, 4, 1, 64, 0, 32},
		{16, 2, {9, 2}, 4, 16, 17, 1, 145},
	};
	struct batch *b = batch_new(2, cases[_i].width);

	b->args.block_tokens = cases[_i].size;
	b->args.cp_size = cases[_i].cp_size;
	b->args.cp_interleave = cases[_i].interleave;
	b->args.cp_rank = cases[_i].rank;
	b->args.n_tokens = 1;
	b->n_query[0] = 1;
	b->n_computed[0] = cases[_i].position;
	for (int c = 0; c < cases[_i].width; c++) {
		b->table[c] = cases[_i].table[c];
		b->table[cases[_i].width + c] = 36; /* the next row, which nothing may read */
	}
	ck_assert_msg(run(b) == 0, "%s", kv_error_text());
	ck_assert_int_eq(b->slots[0], cases[_i].slot);
	batch_free(b);
}
END_TEST

/*
 * D09: a table of 2 rows of 32 columns. Position 130 is one past the row: without a look at its width it would
 * be slot 146, the other row's.
 */
START_TEST(positions_past_the_row_and_null_blocks_have_no_slot)
{
	static const struct {
		int position;
		int64_t slot;
	} cases[] = {{0, 28}, {3, 31}, {130, -1}, {8192, -1}, {1048575, -1}};

	for (int null_block = 0; null_block < 10; null_block += 9) {
		for (int i = 0; i < COUNT(cases); i++) {
			struct batch *b = batch_new(2, 32);

			b->args.block_tokens = 4;
			b->args.n_tokens = 1;
			b->args.null_block = null_block;
			for (int c = 0; c < 64; c++)
				b->table[c] = null_block;
			b->table[0] = 7;
			b->table[32] = 36;
			b->n_query[0] = 1;
			b->n_computed[0] = cases[i].position;
			ck_assert_msg(run(b) == 0, "%s", kv_error_text());
			ck_assert_int_eq(b->slots[0], cases[i].slot);
			/* A column that the row covers, with the null block in it. */
			b->n_computed[0] = 4 * (1 + i);
			ck_assert_msg(run(b) == 0, "%s", kv_error_text());
			ck_assert_int_eq(b->slots[0], KV_SLOT_PAD);
			batch_free(b);
		}
	}
}
END_TEST

/*
 * D12: a row has the blocks that its tokens need and no more; the token after them has a place exactly where
 * the last block isn't full. D10: it has no leftovers of a longer sequence that had the row before.
 */
START_TEST(the_next_token_needs_a_block_exactly_at_a_boundary)
{
	static const struct {
		int size, len, blocks, in_last, whole;
		bool needs_one;
	} cases[] = {
		{16, 0, 0, 0, 0, true},	 {16, 1, 1, 1, 0, false},   {16, 15, 1, 15, 0, false},
		{16, 16, 1, 16, 1, true}, {16, 17, 2, 1, 1, false},  {16, 32, 2, 16, 2, true},
		{4, 8, 2, 4, 2, true},	 {16, 687, 43, 15, 42, false}, {16, 688, 43, 16, 43, true},
	};
	int size = cases[_i].size, len = cases[_i].len, blocks = cases[_i].blocks;
	struct batch *b = batch_new(1, 54);

	b->args.block_tokens = size;
	b->args.n_tokens = len + 1;
	for (int before = 1; before >= 0; before--) { /* the longer one, then ours */
		int held = before ? 54 : blocks;

		for (int c = 0; c < 54; c++)
			b->table[c] = c < held ? 100 * before + 7 + 3 * c : b->args.null_block;
		b->n_query[0] = len + 1;
		b->n_computed[0] = 0;
		ck_assert_msg(run(b) == 0, "%s", kv_error_text());
		for (int p = 0; p < len; p++)
			ck_assert_int_eq(b->slots[p],
					 (int64_t)b->table[p / size] * size + p % size);
	}
	ck_assert_int_eq(b->slots[len] == -1, cases[_i].needs_one);
	if (len) {
		ck_assert_int_eq(b->slots[len - 1] / size, b->table[blocks - 1]);
		ck_assert_int_eq(b->slots[len - 1] % size + 1, cases[_i].in_last);
	}
	ck_assert_int_eq(len / size, cases[_i].whole);
	batch_free(b);
}
END_TEST

/* D12: from 1 to 33 tokens by a token a step, in place, blocks being taken where a slot is missing. */
START_TEST(a_decode_loop_takes_blocks_before_tokens_17_and_33)
{
	struct batch *b = batch_new(1, 4);
	int taken = 1;

	b->args.n_tokens = 1;
	b->table[0] = 9;
	b->n_query[0] = 1;
	for (int len = 1; len <= 33; len++) {
		b->args.advance = len > 1;
		ck_assert_msg(run(b) == 0, "%s", kv_error_text());
		if (b->slots[0] == -1) {
			ck_assert_int_eq(len, taken == 1 ? 17 : 33);
			b->table[taken] = 9 - 2 * taken;
			taken++;
			b->args.advance = 0;
			ck_assert_msg(run(b) == 0, "%s", kv_error_text());
		}
		ck_assert_int_eq(b->seq_lens[0], len);
		ck_assert_int_eq(b->slots[0], b->table[taken - 1] * 16 + (len - 1) % 16);
	}
	ck_assert_int_eq(taken, 3);
	batch_free(b);
}
END_TEST

/* D39: local lengths sum to the length, whatever it is corrected to. */
START_TEST(local_lengths_of_all_ranks_sum_to_the_length)
{
	static const int32_t right[][11] = {
		/* length, ranks, interleave, then each rank's */
		{100, 4, 1, 25, 25, 25, 25},   {101, 4, 1, 26, 25, 25, 25}, {100, 2, 16, 52, 48},
		{33, 2, 16, 17, 16},	       {16, 2, 16, 16, 0},
		{1000, 8, 64, 128, 128, 128, 128, 128, 128, 128, 104},
	};

	for (int i = 0; i < COUNT(right); i++)
		for (int r = 0; r < right[i][1]; r++)
			ck_assert_int_eq(kv_cp_local_len(right[i][1], r, right[i][2], right[i][0]),
					 right[i][3 + r]);
	for (int len = 0; len < 500; len++) {
		int sum = 0;

		for (int r = 0; r < 5; r++) {
			int n = kv_cp_local_len(5, r, 7, len);

			sum += n;
			ck_assert_int_le(n, kv_cp_local_bound(5, 7, len));
		}
		ck_assert_int_eq(sum, len);
	}
}
END_TEST

/* D13 */
START_TEST(a_pools_block_may_be_larger_than_the_kernels)
{
	static const int32_t sizes[] = {16, 32, 64};
	const kv_block_id row[] = {3, 2, 5};
	kv_block_id *table = calloc(3 * 49, sizeof(*table));
	struct kv_view view = {.block_stride = 784 * 256,
			       .token_stride = 256,
			       .head_stride = 128,
			       .block_tokens = 784,
			       .n_heads = 2,
			       .head_dim = 64,
			       .dtype = KV_F16,
			       .scale = 1},
		       split;

	ck_assert_int_eq(kv_table_block_size(784, sizes, 3), 16);
	ck_assert_int_eq(kv_table_block_size(1056, sizes, 3), 32);
	ck_assert_int_eq(kv_table_block_size(2112, sizes, 3), 64);
	ck_assert_int_eq(kv_table_block_size(1000, sizes, 3), -ENOTSUP);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "1000"));
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "16, 32, 64"));
	kv_table_expand(row, 3, 49, table);
	for (int i = 0; i < 49; i++) {
		ck_assert_int_eq(table[i], 147 + i);
		ck_assert_int_eq(table[49 + i], 98 + i);
		ck_assert_int_eq(table[98 + i], 245 + i);
	}
	ck_assert_int_eq(table[800 / 16] * 16 + 800 % 16, 2 * 784 + 16);
	ck_assert_int_eq(kv_view_split(&view, 16, &split), 0);
	ck_assert_int_eq(split.block_tokens, 16);
	ck_assert_int_eq(split.block_stride, 16 * 256);
	view.block_stride += 256; /* padded */
	ck_assert_int_eq(kv_view_split(&view, 16, &split), -ENOTSUP);
	view.block_stride = 784 * 256;
	view.token_stride = 128; /* heads first */
	view.head_stride = 784 * 128;
	ck_assert_int_eq(kv_view_split(&view, 16, &split), -ENOTSUP);
	ck_assert_int_eq(kv_view_split(&view, 17, &split), -EINVAL);
	free(table);
}
END_TEST

START_TEST(lengths_that_do_not_fit_are_refused_or_left_out)
{
	struct batch *b = batch_new(3, 4);
	int r;

	b->n_query[0] = b->n_query[1] = b->n_query[2] = 5;
	b->args.n_tokens = 12;
	memset(b->slots, 0x55, sizeof(b->slots));
	r = run(b);
	if (buffer_device == KV_DEVICE_HOST)
		ck_assert_int_eq(r, -E2BIG);
	else
		ck_assert_int_eq(r, 0);
	for (int t = 12; t < MAX_TOKENS; t++)
		ck_assert_int_eq(b->slots[t], 0x5555555555555555);
	batch_free(b);
}
END_TEST

START_TEST(a_caller_that_knows_fewer_fields_gives_a_smaller_size)
{
	int32_t one = 1, none = 0;
	struct kv_metadata_args a = {.size = offsetof(struct kv_metadata_args, cp_empty),
				     .device = KV_DEVICE_HOST,
				     .n_seqs = 1,
				     .n_tokens = 1,
				     .block_tokens = 16,
				     .n_query = &one,
				     .n_computed = &none,
				     .cp_empty = (uint8_t *)1}; /* past its struct */

	ck_assert_int_eq(kv_metadata_build(&a), 0);
	a.size -= 8;
	ck_assert_int_eq(kv_metadata_build(&a), -EINVAL);
	a.size = sizeof(a) + 8;
	ck_assert_int_eq(kv_metadata_build(&a), -EINVAL);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("kernels/metadata");
	TCase *tcase = tcase_create("metadata");

	tcase_set_timeout(tcase, 120);
	suite_add_tcase(suite, tcase);
	tcase_add_loop_test(tcase, any_batch_has_the_arrays_that_its_lengths_say, 0, 8);
	tcase_add_loop_test(tcase, slots_of_the_field_cases, 0, 16);
	tcase_add_test(tcase, positions_past_the_row_and_null_blocks_have_no_slot);
	tcase_add_loop_test(tcase, the_next_token_needs_a_block_exactly_at_a_boundary, 0, 9);
	tcase_add_test(tcase, a_decode_loop_takes_blocks_before_tokens_17_and_33);
	tcase_add_test(tcase, local_lengths_of_all_ranks_sum_to_the_length);
	tcase_add_test(tcase, a_pools_block_may_be_larger_than_the_kernels);
	tcase_add_test(tcase, lengths_that_do_not_fit_are_refused_or_left_out);
	tcase_add_test(tcase, a_caller_that_knows_fewer_fields_gives_a_smaller_size);
	return run_on_device(suite);
}
