/* SPDX-License-Identifier: Apache-2.0 */
/* The arrays of a step: tables, slots, positions, padding; and what is refused. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/client.h"

#define MAX_SEQS   8
#define MAX_TOKENS 256
#define WIDTH	   64

static struct kv_client *client;
static struct kv_pool *pool;
static struct kv_batch *batch;
static const struct kv_batch_data *data;
static kv_block_id null_block;

static void setup(void)
{
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = MAX_SEQS, .max_tokens = MAX_TOKENS,
		   .max_blocks_per_seq = WIDTH);
	struct kv_pool_info info;

	daemon_start("--host", "16M");
	client = client_new();
	pool = pool_new_mapped(client, "pool", 200);
	kv_pool_info(pool, &info);
	null_block = info.null_block;
	must(kv_batch_new(pool, &sizes, &batch));
	data = kv_batch_data(batch);
}

static void teardown(void)
{
	kv_batch_free(batch);
	kv_pool_close(pool);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

static int32_t entry(uint32_t row, uint32_t column)
{
	return data->block_table[(size_t)row * data->table_width + column];
}

/* Row @row names the sequence's blocks, and then the null block to its end. */
static void expect_row(uint32_t row, const struct kv_seq *seq)
{
	const kv_block_id *ids = NULL;
	size_t n = seq ? kv_seq_blocks(seq, &ids) : 0;

	for (uint32_t i = 0; i < data->table_width; i++)
		expect(entry(row, i) == (i < n ? ids[i] : null_block),
		       "row %u, column %u: block %d", row, i, entry(row, i));
}

/* Tokens @first.. of the arrays are the last @n of the sequence. */
static void expect_tokens(uint32_t first, const struct kv_seq *seq, uint32_t n)
{
	const kv_block_id *ids;
	size_t at = kv_seq_len(seq) - n;

	kv_seq_blocks(seq, &ids);
	for (uint32_t i = 0; i < n; i++, at++) {
		int64_t slot = (int64_t)ids[at / 16] * 16 + (int64_t)(at % 16);

		expect(data->positions[first + i] == (int64_t)at, "position of token %u",
		       first + i);
		expect(data->tokens[first + i] == kv_seq_tokens(seq)[at], "token %u", first + i);
		expect(data->slots[first + i] == slot, "slot of token %u: %lld, not %lld",
		       first + i, (long long)data->slots[first + i], (long long)slot);
	}
}

static void expect_padding(uint32_t n_seqs, uint32_t n_tokens)
{
	for (uint32_t i = n_seqs; i < data->n_seqs; i++) {
		expect_row(i, NULL);
		expect(data->seq_lens[i] == 0 && data->n_computed[i] == 0,
		       "seq_lens[%u] is %d, n_computed %d", i, data->seq_lens[i],
		       data->n_computed[i]);
		expect(data->query_start_loc[i + 1] == (int32_t)n_tokens, "query_start_loc[%u]",
		       i + 1);
	}
	for (uint32_t i = n_tokens; i < data->n_tokens; i++)
		expect(data->slots[i] == KV_SLOT_PAD && data->positions[i] == 0 &&
			       data->tokens[i] == 0,
		       "padded token %u: slot %lld", i, (long long)data->slots[i]);
}

START_TEST(a_batch_of_several_sequences_has_all_that_kernels_read)
{
	/* A prompt, a decode step, a part of a prompt. */
	struct kv_seq *seqs[] = {seq_new(pool, 1, 40, NULL), seq_new(pool, 2, 17, NULL),
				 seq_new(pool, 3, 100, NULL)};
	struct kv_batch_item items[] = {{seqs[0], 40}, {seqs[1], 1}, {seqs[2], 32}};
	static const int32_t starts[] = {0, 40, 41, 73}, lens[] = {40, 17, 100};
	static const int32_t before[] = {0, 16, 68}; /* 0: the first chunk of its sequence */

	must(kv_batch_build(batch, items, 3, 0, 0));
	ck_assert_uint_eq(data->n_seqs, 3);
	ck_assert_uint_eq(data->n_real_seqs, 3);
	ck_assert_uint_eq(data->n_tokens, 73);
	ck_assert_uint_eq(data->n_real_tokens, 73);
	ck_assert_uint_eq(data->max_query_len, 40);
	ck_assert_uint_eq(data->max_seq_len, 100);
	ck_assert_uint_eq(data->table_width, WIDTH);
	ck_assert_uint_eq(data->n_copies, 0);
	ck_assert_mem_eq(data->query_start_loc, starts, sizeof(starts));
	ck_assert_mem_eq(data->seq_lens, lens, sizeof(lens));
	ck_assert_mem_eq(data->n_computed, before, sizeof(before));
	for (uint32_t i = 0; i < 3; i++) {
		expect_row(i, seqs[i]);
		expect_tokens((uint32_t)starts[i], seqs[i], items[i].n_query);
		kv_seq_free(seqs[i], NULL);
	}
}
END_TEST

START_TEST(padding_names_no_block_and_no_slot)
{
	struct kv_seq *seq = seq_new(pool, 1, 64, NULL);
	struct kv_batch_item item = {seq, 64};

	must(kv_batch_build(batch, &item, 1, 5, 128));
	ck_assert_uint_eq(data->n_seqs, 5);
	ck_assert_uint_eq(data->n_real_seqs, 1);
	ck_assert_uint_eq(data->n_tokens, 128);
	ck_assert_uint_eq(data->n_real_tokens, 64);
	expect_row(0, seq);
	expect_tokens(0, seq, 64);
	expect_padding(1, 64);

	/* Fewer than there are: no padding. */
	must(kv_batch_build(batch, &item, 1, 1, 10));
	ck_assert_uint_eq(data->n_seqs, 1);
	ck_assert_uint_eq(data->n_tokens, 64);

	/* Nothing but padding: a replica that has no work takes part in a step. */
	must(kv_batch_build(batch, NULL, 0, 3, 16));
	ck_assert_uint_eq(data->n_real_seqs, 0);
	ck_assert_uint_eq(data->max_seq_len, 0);
	ck_assert_uint_eq(data->max_query_len, 0);
	expect_padding(0, 0);
	kv_seq_free(seq, NULL);
}
END_TEST

/* D03. What is written through the slots of a padded batch: the tokens' own places and nothing else. */
START_TEST(padded_rows_touch_no_byte)
{
	struct kv_seq *seq = seq_new(pool, 1, 64, NULL);
	struct kv_batch_item item = {seq, 64};
	const int32_t n_rows = 128, row = 16;
	float *keys = malloc((size_t)n_rows * row * sizeof(float));
	float *values = malloc((size_t)n_rows * row * sizeof(float));
	const kv_block_id *ids;
	struct kv_write_args args;
	struct kv_pool_info info;

	for (int32_t i = 0; i < n_rows * row; i++)
		keys[i] = values[i] = i < 64 * row ? (float)i : __builtin_nanf("");
	kv_pool_info(pool, &info);
	kv_seq_blocks(seq, &ids);
	/* The blocks around: the null block too must stay as it is. */
	block_fill(pool, null_block, 0x55);
	for (int i = 0; i < 4; i++)
		block_fill(pool, ids[i], 0x55);
	must(kv_batch_build(batch, &item, 1, 8, (uint32_t)n_rows));
	args = (struct kv_write_args){.size = sizeof(args),
				      .device = KV_DEVICE_HOST,
				      .n_tokens = (int32_t)data->n_tokens,
				      .slots = data->slots,
				      .key = keys,
				      .value = values,
				      .dtype = KV_F32};
	must(kv_pool_view(pool, 0, 0, &args.k));
	must(kv_pool_view(pool, 0, 1, &args.v));
	must(kv_write(&args));
	ck_assert(block_is(pool, null_block, 0x55));
	for (int32_t t = 0; t < 64; t++) {
		const float *k = (const float *)(block_at(pool, ids[t / 16]) + t % 16 * 64);

		for (int32_t e = 0; e < row; e++)
			expect(k[e] == (float)(t * row + e) && k[e + 256] == k[e],
			       "token %d, element %d: %g", t, e, (double)k[e]);
	}
	free(keys);
	free(values);
	kv_seq_free(seq, NULL);
}
END_TEST

/* D10. */
START_TEST(a_reused_row_has_no_leftovers)
{
	struct kv_seq *large = seq_new(pool, 1, 54 * 16, NULL),
		      *small = seq_new(pool, 2, 43 * 16, NULL);
	struct kv_batch_item both[] = {{large, 1}, {small, 1}}, swapped[] = {{small, 1}, {large, 1}};
	struct kv_batch_item one = {small, 1};

	must(kv_batch_build(batch, both, 2, 0, 0));
	expect_row(0, large);
	expect_row(1, small);
	for (int i = 0; i < 2; i++) {
		must(kv_batch_build(batch, i ? both : swapped, 2, 0, 0));
		expect_row((uint32_t)i, small);
		expect_row((uint32_t)!i, large);
	}
	must(kv_seq_preempt(large, NULL));
	must(kv_batch_build(batch, &one, 1, 2, 0));
	expect_row(0, small);
	expect_row(1, NULL);
	kv_seq_free(large, NULL);
	large = seq_new(pool, 1, 54 * 16, NULL);
	must(kv_batch_build(batch, both, 2, 0, 0));
	kv_seq_free(large, NULL);
	must(kv_batch_build(batch, &one, 1, 2, 0)); /* it moves up into the longer one's row */
	expect_row(0, small);
	expect_row(1, NULL);

	must(kv_seq_rollback(small, 20 * 16, NULL));
	must(kv_batch_build(batch, &one, 1, 2, 0));
	expect_row(0, small);
	kv_seq_free(small, NULL);
	must(kv_batch_build(batch, NULL, 0, 2, 0));
	expect_row(0, NULL);
	expect_row(1, NULL);
}
END_TEST

START_TEST(random_batches_have_exactly_what_they_should)
{
	struct kv_seq *seqs[MAX_SEQS] = {0};
	unsigned seed = 3;

	for (int round = 0; round < 500; round++) {
		struct kv_batch_item items[MAX_SEQS];
		uint32_t n = 0, n_tokens = 0, pad_seqs, pad_tokens;

		for (int i = 0; i < MAX_SEQS; i++) {
			uint32_t query = 1 + (uint32_t)rand_r(&seed) % 20;
			size_t len = query + (size_t)rand_r(&seed) % 300;

			seqs[i] = kv_seq_free(seqs[i], NULL);
			if (rand_r(&seed) % 3 == 0)
				continue;
			must(kv_seq_new(pool, &seqs[i]));
			if (kv_seq_reserve(seqs[i], len, 0))
				continue;
			must(kv_seq_append(seqs[i], tokens_of(round, len), len));
			items[n++] = (struct kv_batch_item){seqs[i], query};
		}
		pad_seqs = (uint32_t)rand_r(&seed) % (MAX_SEQS + 1);
		pad_tokens = (uint32_t)rand_r(&seed) % (MAX_TOKENS + 1);
		must(kv_batch_build(batch, items, n, pad_seqs, pad_tokens));
		for (uint32_t i = 0; i < n; i++) {
			expect(data->query_start_loc[i] == (int32_t)n_tokens, "round %d", round);
			expect(data->seq_lens[i] == (int32_t)kv_seq_len(items[i].seq), "round %d",
			       round);
			expect(data->n_computed[i] == data->seq_lens[i] - (int32_t)items[i].n_query,
			       "round %d", round);
			expect_row(i, items[i].seq);
			expect_tokens(n_tokens, items[i].seq, items[i].n_query);
			n_tokens += items[i].n_query;
		}
		expect(data->n_real_tokens == n_tokens && data->n_real_seqs == n, "round %d",
		       round);
		expect_padding(n, n_tokens);
	}
	for (int i = 0; i < MAX_SEQS; i++)
		kv_seq_free(seqs[i], NULL);
}
END_TEST

/* D11. */
START_TEST(draft_tokens_go_where_the_table_says)
{
	/* A pool of 4 tokens a block; drafts at the end of one block and into the next. */
	struct kv_component components[2];
	struct kv_layout layout = {
		.kind = KV_LAYOUT_FLAT, .block_tokens = 4, .components = components};
	KV_OPTIONS(kv_pool_options, what, .name = "four", .layout = &layout);
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = 1, .max_tokens = 16,
		   .max_blocks_per_seq = 4);
	struct kv_pool *four;
	struct kv_batch *b;
	struct kv_seq *seq;
	struct kv_batch_item item;
	const kv_block_id *ids;
	kv_block_id held;

	layout.n_components = kv_layout_uniform(components, 1, 1, 16, KV_F32, 1, 1);
	must(kv_pool_open(client, &what, &four));
	must(kv_batch_new(four, &sizes, &b));
	must(kv_seq_new(four, &seq));
	must(kv_seq_reserve(seq, 4, TIMEOUT));
	must(kv_blocks_take(four, 1, &held, TIMEOUT)); /* so that the next block is no neighbour */
	must(kv_seq_append(seq, tokens_of(1, 3), 3));
	must(kv_seq_reserve(seq, 9, TIMEOUT));
	must(kv_seq_append(seq, tokens_of(2, 4), 4));
	item = (struct kv_batch_item){seq, 4};
	must(kv_batch_build(b, &item, 1, 0, 0));
	kv_seq_blocks(seq, &ids);
	ck_assert_int_eq(kv_batch_data(b)->slots[0], ids[0] * 4 + 3);
	for (int i = 0; i < 3; i++)
		ck_assert_int_eq(kv_batch_data(b)->slots[1 + i], ids[1] * 4 + i);
	must(kv_seq_append(seq, tokens_of(3, 2), 2));
	item.n_query = 2;
	must(kv_batch_build(b, &item, 1, 0, 0));
	ck_assert_int_eq(kv_batch_data(b)->slots[0], ids[1] * 4 + 3);
	ck_assert_int_eq(kv_batch_data(b)->slots[1], ids[2] * 4);

	/* Three of the six are rejected: the next token goes to the first one's place. */
	must(kv_seq_rollback(seq, 6, NULL));
	must(kv_seq_append(seq, tokens_of(4, 1), 1));
	item.n_query = 1;
	must(kv_batch_build(b, &item, 1, 0, 0));
	ck_assert_int_eq(kv_batch_data(b)->slots[0], ids[1] * 4 + 2);
	ck_assert_int_eq(kv_batch_data(b)->positions[0], 6);
	must(kv_blocks_give(four, 1, &held));
	kv_seq_free(seq, NULL);
	kv_batch_free(b);
	kv_pool_close(four);
}
END_TEST

/* ---- limits ---- */

START_TEST(what_exceeds_a_batch_is_named_and_changes_nothing)
{
	struct kv_seq *seq = seq_new(pool, 1, 40, NULL), *longer = seq_new(pool, 2, 65 * 16, NULL);
	struct kv_batch_item item = {seq, 3}, items[MAX_SEQS + 1];
	struct kv_pool *stranger = pool_new(client, "stranger", 10);
	struct kv_seq *foreign = seq_new(stranger, 3, 5, NULL);

	must(kv_batch_build(batch, &item, 1, 2, 7));
	for (int i = 0; i <= MAX_SEQS; i++)
		items[i] = (struct kv_batch_item){seq, 40};
	refused(kv_batch_build(batch, items, MAX_SEQS + 1, 0, 0), -E2BIG, "max_seqs is 8");
	refused(kv_batch_build(batch, items, 7, 0, 0), -E2BIG, "max_tokens is 256");
	refused(kv_batch_build(batch, items, 1, MAX_SEQS + 1, 0), -E2BIG, "max_seqs is 8");
	refused(kv_batch_build(batch, items, 1, 0, MAX_TOKENS + 1), -E2BIG, "max_tokens is 256");
	items[1] = (struct kv_batch_item){longer, 1};
	refused(kv_batch_build(batch, items, 2, 0, 0), -E2BIG, "items[1].seq: 65 blocks");
	items[1] = (struct kv_batch_item){seq, 0};
	refused(kv_batch_build(batch, items, 2, 0, 0), -EINVAL, "items[1].n_query: 0");
	items[1] = (struct kv_batch_item){seq, 41};
	refused(kv_batch_build(batch, items, 2, 0, 0), -EINVAL, "items[1].n_query: 41");
	items[1] = (struct kv_batch_item){foreign, 1};
	refused(kv_batch_build(batch, items, 2, 0, 0), -EINVAL, "items[1].seq");
	ck_assert_uint_eq(data->n_seqs, 2);
	ck_assert_uint_eq(data->n_tokens, 7);
	expect_row(0, seq);
	expect_tokens(0, seq, 3);
	expect_padding(1, 3);
	kv_seq_free(seq, NULL);
	kv_seq_free(longer, NULL);
	kv_seq_free(foreign, NULL);
	kv_pool_close(stranger);
}
END_TEST

START_TEST(a_batch_of_no_size_is_refused)
{
	static const uint32_t sizes[][3] = {
		{0, 1, 1}, {1, 0, 1}, {1, 1, 0}, {1 << 25, 1, 1}, {1, UINT32_MAX, 1}};

	for (int i = 0; i < 5; i++) {
		KV_OPTIONS(kv_batch_options, o, .max_seqs = sizes[i][0], .max_tokens = sizes[i][1],
			   .max_blocks_per_seq = sizes[i][2]);
		struct kv_batch *b = NULL;

		refused(kv_batch_new(pool, &o, &b), -EINVAL, "max_seqs");
		ck_assert_ptr_null(b);
	}
	{
		struct kv_batch_options o = {
			.max_seqs = 1, .max_tokens = 1, .max_blocks_per_seq = 1};
		struct kv_batch *b = NULL;

		refused(kv_batch_new(pool, &o, &b), -EINVAL, "options.size: 0");
	}
}
END_TEST

/* Once each build of it failed, and the first took the copies along that others had noted. */
START_TEST(a_batch_of_a_rank_that_cannot_be_is_refused_before_it_takes_copies)
{
	static const struct kv_batch_options ranks[] = {
		{.cp_size = 2, .cp_rank = 2}, {.cp_rank = 1}, {.cp_size = UINT32_MAX}, {.cp_interleave = UINT32_MAX}};

	for (size_t i = 0; i < sizeof(ranks) / sizeof(ranks[0]); i++) {
		struct kv_batch_options o = ranks[i];
		struct kv_batch *b;

		o.size = sizeof(o);
		o.max_seqs = o.max_tokens = o.max_blocks_per_seq = 4;
		refused(kv_batch_new(pool, &o, &b), -EINVAL, "cp_rank");
	}
}
END_TEST

START_TEST(copies_of_a_pool_that_is_not_mapped_go_to_who_maps_it)
{
	struct kv_pool *scheduler = pool_new(client, "pool", 0);
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = 2, .max_tokens = 64,
		   .max_blocks_per_seq = 8);
	struct kv_seq *seq = seq_new(scheduler, 1, 20, NULL), *fork;
	struct kv_batch_item item;
	struct kv_batch *b;
	const kv_block_id *ids;
	kv_block_id from;

	must(kv_batch_new(scheduler, &sizes, &b));
	kv_seq_blocks(seq, &ids);
	from = ids[1];
	must(kv_seq_fork(seq, &fork));
	must(kv_seq_reserve(fork, 21, TIMEOUT));
	must(kv_seq_append(fork, tokens_of(9, 1), 1));
	item = (struct kv_batch_item){fork, 1};
	must(kv_batch_build(b, &item, 1, 0, 0));
	kv_seq_blocks(fork, &ids);
	ck_assert_uint_eq(kv_batch_data(b)->n_copies, 1);
	ck_assert_int_eq(kv_batch_data(b)->copies[0], from);
	ck_assert_int_eq(kv_batch_data(b)->copies[1], ids[1]);
	refused(kv_batch_copy(b, NULL), -ENXIO, "not mapped");
	must(kv_batch_build(b, &item, 1, 0, 0));
	ck_assert_uint_eq(kv_batch_data(b)->n_copies, 0);
	must(kv_batch_copy(b, NULL));
	kv_seq_free(seq, NULL);
	kv_seq_free(fork, NULL);
	kv_batch_free(b);
	kv_pool_close(scheduler);
}
END_TEST

START_TEST(logits_are_of_the_last_tokens_and_gone_with_the_next_build)
{
	struct kv_seq *seqs[] = {seq_new(pool, 1, 40, NULL), seq_new(pool, 2, 17, NULL),
				 seq_new(pool, 3, 100, NULL)};
	struct kv_batch_item items[] = {{seqs[0], 40}, {seqs[1], 3}, {seqs[2], 32}};
	static const uint32_t counts[] = {1, 3, 0}, too_many[] = {1, 4, 0}, one[] = {1};
	static const int32_t indices[] = {39, 40, 41, 42, 42, 42}, starts[] = {0, 1, 4, 4, 4};
	int32_t loc[MAX_SEQS + 1];
	struct kv_batch_data view;

	must(kv_batch_build(batch, items, 3, 4, 80));
	ck_assert_int_eq(kv_batch_logits_only(data, loc, &view), -EINVAL);
	refused(kv_batch_logits(batch, too_many, 3, 0), -EINVAL, "n_logits[1]: 4 given");
	refused(kv_batch_logits(batch, counts, 2, 0), -EINVAL, "n: 2 given");
	refused(kv_batch_logits(batch, counts, 3, MAX_TOKENS + 1), -E2BIG, "pad");
	must(kv_batch_logits(batch, counts, 3, 6));
	ck_assert_uint_eq(data->n_logits, 4);
	ck_assert_uint_eq(data->n_logits_padded, 6);
	ck_assert_uint_eq(data->max_logits_per_seq, 3);
	ck_assert_mem_eq(data->logits_indices, indices, sizeof(indices));

	must(kv_batch_logits_only(data, loc, &view));
	ck_assert_mem_eq(view.query_start_loc, starts, sizeof(starts));
	ck_assert_uint_eq(view.n_tokens, 4);
	ck_assert_uint_eq(view.max_query_len, 3);
	ck_assert_ptr_null(view.slots);
	ck_assert_ptr_eq(view.seq_lens, data->seq_lens);

	must(kv_batch_build(batch, items + 1, 1, 0, 0));
	ck_assert_ptr_null(data->logits_indices);
	items[1].n_query = 1;
	must(kv_batch_build(batch, items + 1, 1, 0, 0));
	must(kv_batch_logits(batch, one, 1, 0));
	must(kv_batch_logits_only(data, loc, &view)); /* single queries: as it is */
	ck_assert_mem_eq(&view, data, sizeof(view));
	for (uint32_t i = 0; i < 3; i++)
		kv_seq_free(seqs[i], NULL);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/batch");
	TCase *tcase = tcase_create("batch");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, a_batch_of_several_sequences_has_all_that_kernels_read);
	tcase_add_test(tcase, padding_names_no_block_and_no_slot);
	tcase_add_test(tcase, logits_are_of_the_last_tokens_and_gone_with_the_next_build);
	tcase_add_test(tcase, padded_rows_touch_no_byte);
	tcase_add_test(tcase, a_reused_row_has_no_leftovers);
	tcase_add_test(tcase, random_batches_have_exactly_what_they_should);
	tcase_add_test(tcase, draft_tokens_go_where_the_table_says);
	tcase_add_test(tcase, what_exceeds_a_batch_is_named_and_changes_nothing);
	tcase_add_test(tcase, a_batch_of_no_size_is_refused);
	tcase_add_test(tcase, a_batch_of_a_rank_that_cannot_be_is_refused_before_it_takes_copies);
	tcase_add_test(tcase, copies_of_a_pool_that_is_not_mapped_go_to_who_maps_it);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
