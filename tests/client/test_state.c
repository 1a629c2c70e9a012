/* SPDX-License-Identifier: Apache-2.0 */
/* Recurrent state in a block beside K and V: where a sequence's starts, and that others' is not in it. */
#include <stdlib.h>
#include <string.h>

#include "tests/support/client.h"

#define N_STATE 64 /* f32 */

static struct kv_client *client;
static struct kv_pool *pool;
static struct kv_batch *batch;
static const struct kv_batch_data *data;
static struct kv_view state;

/* K and V of one head of 16 f32, and a state of 64 f32: three components of a layer. */
static const struct kv_component components[] = {
	{.role = KV_ROLE_K, .dtype = KV_F32, .n_heads = 1, .head_dim = 16, .scale = 1},
	{.role = KV_ROLE_V, .dtype = KV_F32, .n_heads = 1, .head_dim = 16, .scale = 1},
	{.role = KV_ROLE_STATE, .dtype = KV_F32, .n_heads = 1, .head_dim = N_STATE, .scale = 1},
};

static void setup(void)
{
	struct kv_layout layout = {.kind = KV_LAYOUT_FLAT,
				   .block_tokens = BLOCK_TOKENS,
				   .n_components = 3,
				   .components = components};
	KV_OPTIONS(kv_pool_options, what, .name = "hybrid", .layout = &layout, .mapped = 1);
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = 4, .max_tokens = 64,
		   .max_blocks_per_seq = 16);

	daemon_start("--host", "16M");
	client = client_new();
	must(kv_pool_open(client, &what, &pool));
	must(kv_batch_new(pool, &sizes, &batch));
	must(kv_pool_view(pool, 0, 2, &state));
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

static float *row_of(kv_block_id id)
{
	return (float *)(void *)((char *)state.base + (int64_t)id * state.block_stride);
}

/*
 * The simplest recurrent layer: every element of the state adds up the tokens. It runs as a kernel
 * would, from the arrays of the batch alone: the state lies in the first block of the table.
 */
static void run_layer(const struct kv_seq *seq, uint32_t n_query)
{
	struct kv_batch_item item = {.seq = (struct kv_seq *)seq, .n_query = n_query};

	must(kv_batch_build(batch, &item, 1, 0, 0));
	for (uint32_t b = 0; b < data->n_seqs; b++) {
		float *row = row_of(data->block_table[b * data->table_width]);

		for (int i = 0; i < N_STATE; i++) {
			float sum = data->n_computed[b] ? row[i] : 0;

			for (int32_t t = data->query_start_loc[b]; t < data->query_start_loc[b + 1]; t++)
				sum += (float)data->tokens[t] * (float)(i + 1);
			row[i] = sum;
		}
	}
}

static void state_is(const struct kv_seq *seq, float sum)
{
	const kv_block_id *ids;

	kv_seq_blocks(seq, &ids);
	for (int i = 0; i < N_STATE; i++)
		expect(row_of(ids[0])[i] == sum * (float)(i + 1), "element %d is %g, %g expected", i,
		       (double)row_of(ids[0])[i], (double)sum * (i + 1));
}

/* D06. */
START_TEST(a_new_sequence_starts_from_the_zero_state_whatever_its_row_held)
{
	static const int32_t first[] = {1, 2, 3, 4, 5}, second[] = {10, 20};
	kv_block_id used;
	const kv_block_id *ids;
	struct kv_seq *seq;

	must(kv_seq_new(pool, &seq));
	must(kv_seq_reserve(seq, 16, 0));
	kv_seq_blocks(seq, &ids);
	used = ids[0];
	for (int i = 0; i < N_STATE; i++)
		row_of(used)[i] = 7;
	kv_seq_free(seq, NULL);

	must(kv_seq_new(pool, &seq));
	must(kv_seq_reserve(seq, 16, 0));
	kv_seq_blocks(seq, &ids);
	ck_assert_int_eq(ids[0], used); /* the last one given is the first one taken */
	must(kv_seq_append(seq, first, 5));
	run_layer(seq, 5);
	ck_assert_int_eq(data->n_computed[0], 0);
	state_is(seq, 15);

	/* The second chunk goes on from the first. */
	must(kv_seq_append(seq, second, 2));
	run_layer(seq, 2);
	ck_assert_int_eq(data->n_computed[0], 5);
	state_is(seq, 45);
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(a_state_has_its_own_bytes_in_a_block)
{
	kv_block_id ids[3];
	struct kv_view k, v;

	must(kv_pool_view(pool, 0, 0, &k));
	must(kv_pool_view(pool, 0, 1, &v));
	must(kv_blocks_take(pool, 3, ids, 0));
	for (int b = 0; b < 3; b++) {
		memset((char *)k.base + ids[b] * k.block_stride, 1, BLOCK_TOKENS * 16 * 4);
		memset((char *)v.base + ids[b] * v.block_stride, 2, BLOCK_TOKENS * 16 * 4);
		memset(row_of(ids[b]), 3, N_STATE * 4);
	}
	for (int b = 0; b < 3; b++) {
		const char *at[] = {(char *)k.base + ids[b] * k.block_stride,
				    (char *)v.base + ids[b] * v.block_stride,
				    (char *)row_of(ids[b])};
		const size_t n[] = {BLOCK_TOKENS * 16 * 4, BLOCK_TOKENS * 16 * 4, N_STATE * 4};

		for (int c = 0; c < 3; c++)
			for (size_t i = 0; i < n[c]; i++)
				expect(at[c][i] == c + 1, "block %d, component %d, byte %zu", b, c, i);
	}
	must(kv_blocks_give(pool, 3, ids));
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("state");
	TCase *tcase = tcase_create("state");

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, a_new_sequence_starts_from_the_zero_state_whatever_its_row_held);
	tcase_add_test(tcase, a_state_has_its_own_bytes_in_a_block);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
