/* SPDX-License-Identifier: Apache-2.0 */
/* Field cases of room, and of what lies in it when it is handed out: D05, D17 and D31
 * (tests/cases.md). */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/client.h"
#include "tests/support/process.h"

static struct kv_pool *of(struct kv_client *client, const char *name,
			  const struct kv_component *components, uint32_t n_components,
			  uint32_t block_tokens, uint64_t block_bytes, uint32_t n_blocks)
{
	struct kv_layout layout = {.kind = KV_LAYOUT_FLAT,
				   .block_tokens = block_tokens,
				   .n_components = n_components,
				   .components = components};
	KV_OPTIONS(kv_pool_options, what, .name = name, .layout = &layout, .mapped = 1,
		   .timeout = TIMEOUT, .max_bytes = n_blocks ? (n_blocks + 1) * block_bytes : 0);
	struct kv_pool_info info;
	struct kv_pool *pool;

	must(kv_pool_open(client, &what, &pool));
	kv_pool_info(pool, &info);
	ck_assert_uint_eq(info.block_bytes, block_bytes);
	return pool;
}

/* ---- D05 ---- */

#define HEADS  2
#define DIM    64
#define SIZE   16	       /* tokens of a block */
#define LEN    3	       /* that are written */
#define STATE  4096	       /* f32 of a row */
#define ENOUGH (500 * KV_MSEC) /* for memory to be cleaned, where there is still some */

static struct kv_pool *states(struct kv_client *client)
{
	static const struct kv_component row = {.role = KV_ROLE_STATE,
						.dtype = KV_F32,
						.n_heads = 1,
						.head_dim = STATE,
						.scale = 1};

	return of(client, "states", &row, 1, 1, STATE * 4, 0);
}

static struct kv_pool *keys_and_values(struct kv_client *client, int dtype)
{
	struct kv_component kv[2] = {
		{.role = KV_ROLE_K, .dtype = dtype, .n_heads = HEADS, .head_dim = DIM, .scale = 1},
		{.role = KV_ROLE_V, .dtype = dtype, .n_heads = HEADS, .head_dim = DIM, .scale = 1}};

	return of(client, "kv", kv, 2, SIZE,
		  (uint64_t)2 * SIZE * HEADS * DIM * (dtype == KV_F8_E4M3 ? 1 : 2), 0);
}

static kv_block_id ids[4096];

/* All that the pool can have becomes 0xff: NaN in every type. Return: blocks. */
static uint32_t soil(struct kv_pool *pool)
{
	uint32_t n = 0;

	while (n < 4096 && kv_blocks_take(pool, 1, ids + n, ENOUGH) == 0)
		block_fill(pool, ids[n++], 0xff);
	return n;
}

/* Takes a block, writes three tokens and attends to them; by kernels that load whole blocks, if
 * they like. */
static void attends_to_three(struct kv_client *client, int dtype)
{
	struct kv_pool *pool = keys_and_values(client, dtype);
	float key[LEN][HEADS * DIM], value[LEN][HEADS * DIM], q[HEADS * DIM], out[HEADS * DIM];
	int32_t starts[] = {0, 1}, len = LEN, table;
	int64_t slots[LEN];
	struct kv_write_args write = {.size = sizeof(write),
				      .device = KV_DEVICE_HOST,
				      .dtype = KV_F32,
				      .n_tokens = LEN,
				      .key = key,
				      .value = value,
				      .slots = slots};
	struct kv_attention_args attend = {.size = sizeof(attend),
					   .device = KV_DEVICE_HOST,
					   .dtype = KV_F32,
					   .n_seqs = 1,
					   .n_tokens = 1,
					   .n_heads_q = HEADS,
					   .max_query_len = 1,
					   .max_seq_len = LEN,
					   .table_width = 1,
					   .q = q,
					   .out = out,
					   .query_start_loc = starts,
					   .seq_lens = &len,
					   .block_table = &table,
					   .window_left = -1,
					   .causal = 1};
	unsigned n_taken = 0, i;
	size_t bytes;

	must(kv_pool_view(pool, 0, 0, &write.k));
	must(kv_pool_view(pool, 0, 1, &write.v));
	attend.k = write.k;
	attend.v = write.v;
	/* Until there is no more: whichever memory the states had is among them. */
	while (n_taken < 4096 && kv_blocks_take(pool, 1, &ids[n_taken], ENOUGH) == 0) {
		expect(block_is(pool, ids[n_taken], 0), "block %d has old bytes", ids[n_taken]);
		n_taken++;
	}
	ck_assert_uint_gt(n_taken, 100);
	for (int t = 0; t < LEN; t++) {
		for (int e = 0; e < HEADS * DIM; e++) {
			key[t][e] = 0;
			value[t][e] = (float)(1 << t); /* exact in all types */
			q[e] = 1;
		}
	}
	must(kv_attention_workspace_bytes(&attend, &bytes));
	attend.workspace_bytes = bytes;
	attend.workspace = bytes ? calloc(1, bytes) : NULL;
	for (i = 0; i < n_taken; i += n_taken / 8) {
		table = ids[i];
		for (int t = 0; t < LEN; t++)
			slots[t] = (int64_t)ids[i] * SIZE + t;
		must(kv_write(&write));
		must(kv_attention(&attend));
		for (int e = 0; e < HEADS * DIM; e++)
			expect(fabsf(out[e] - 7.0f / 3) < 1e-2f, "block %d, element %d: %g", ids[i],
			       e, (double)out[e]);
	}
	free(attend.workspace);
	must(kv_blocks_give(pool, n_taken, ids));
	kv_pool_close(pool);
}

static void soils_and_dies(struct process *self, void *arg)
{
	struct kv_client *own = client_new();

	process_say(self, soil(*(int *)arg ? keys_and_values(own, KV_BF16) : states(own)));
	process_wait(self);
}

START_TEST(d05_memory_that_was_another_kinds_is_zero_and_nothing_of_it_is_seen)
{
	static const int dtypes[] = {KV_BF16, KV_F8_E4M3};
	struct kv_client *client;
	struct process *other;
	struct kv_pool *pool;
	int is_kv = 0;

	daemon_start("--host", "24M");
	client = client_new();
	/* States before, by this process. */
	pool = states(client);
	ck_assert_uint_gt(soil(pool), 400);
	kv_pool_close(pool);
	must(kv_pool_drop(client, "states", TIMEOUT));
	attends_to_three(client, dtypes[_i]);
	must(kv_pool_drop(client, "kv", TIMEOUT));

	/* By another one, that dies. */
	other = process_start(soils_and_dies, &is_kv);
	ck_assert_int_gt(process_hear(other), 400);
	process_kill(other);
	wait_until(daemon_stats(client).n_sessions == 0);
	must(kv_pool_drop(client, "states", TIMEOUT));
	attends_to_three(client, dtypes[_i]);
	must(kv_pool_drop(client, "kv", TIMEOUT));

	/* The other way round: a row of state where K and V were. */
	is_kv = 1;
	other = process_start(soils_and_dies, &is_kv);
	ck_assert_int_gt(process_hear(other), 400);
	process_kill(other);
	wait_until(daemon_stats(client).n_sessions == 0);
	must(kv_pool_drop(client, "kv", TIMEOUT));
	pool = states(client);
	for (uint32_t n = 0; n < 4096 && kv_blocks_take(pool, 1, ids, ENOUGH) == 0; n++)
		expect(block_is(pool, ids[0], 0), "row %d has old bytes", ids[0]);
	kv_pool_close(pool);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}
END_TEST

/* ---- D17 ---- */

/* 256 bytes of 16 tokens, and of a state. */
static const struct kv_component narrow = {
	.role = KV_ROLE_K, .dtype = KV_F32, .n_heads = 1, .head_dim = 4, .scale = 1};
static const struct kv_component row = {
	.role = KV_ROLE_STATE, .dtype = KV_F32, .n_heads = 1, .head_dim = 64, .scale = 1};

static int64_t since(int64_t start)
{
	return now_ns() - start;
}

START_TEST(d17_what_exceeds_the_pool_is_refused_at_once_though_a_sequence_may_be_longer)
{
	KV_OPTIONS(kv_pool_options, what, .name = "pool", .max_seq_tokens = 262144,
		   .timeout = TIMEOUT);
	struct kv_client *client;
	struct kv_pool *pool, *other;
	int64_t best = INT64_MAX, start;
	struct kv_seq *seq;

	daemon_start("--host", "32M");
	client = client_new();
	other = of(client, "pool", &narrow, 1, 16, 256, 4790);
	must(kv_pool_open(client, &what, &pool));
	must(kv_seq_new(pool, &seq));
	/* A busy machine may be slow once, and not ten times. */
	for (int i = 0; i < 10; i++) {
		start = now_ns();
		ck_assert_int_eq(kv_seq_reserve(seq, 100000, TIMEOUT), KV_TOO_LARGE);
		ck_assert_int_eq(kv_blocks_take(pool, 6250, ids, TIMEOUT), KV_TOO_LARGE);
		best = since(start) < best ? since(start) : best;
	}
	expect(best < 10 * KV_MSEC, "it took %lld us", (long long)(best / 1000));
	ck_assert_uint_eq(kv_seq_capacity(seq), 0);
	ck_assert_int_eq(kv_seq_reserve(seq, 262145, TIMEOUT), KV_TOO_LARGE);
	must(kv_blocks_take(other, 100, ids, 0));
	must(kv_blocks_give(other, 100, ids));
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_eq(pool_stats(client, "pool").no_room_total, 0);
	/* All that there is can be had: 4,790 blocks are not held by what was refused. */
	must(kv_seq_reserve(seq, 76640, TIMEOUT));
	kv_seq_free(seq, NULL);
	kv_pool_close(other);
	kv_pool_close(pool);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}
END_TEST

/* ---- D31 ---- */

START_TEST(d31_sixty_four_short_sequences_cost_a_block_and_three_rows_each)
{
	static const char *const names[] = {"attention", "state0", "state1", "state2"};
	struct kv_group groups[4];
	KV_OPTIONS(kv_groups_options, what, .groups = groups, .n_groups = 4);
	struct kv_gseq *seqs[65];
	struct kv_client *client;
	struct kv_groups *all;
	struct kv_pool *pools[4];
	struct kv_pool_info info;

	daemon_start("--host", "64M");
	client = client_new();
	for (int g = 0; g < 4; g++) {
		pools[g] = of(client, names[g], g ? &row : &narrow, 1, g ? 1 : 16, 256,
			      g ? 64 : 10000);
		groups[g] = (struct kv_group){.kind = g ? KV_GROUP_STATE : KV_GROUP_FULL,
					      .pool = pools[g],
					      .interval = g ? 16 : 0};
	}
	kv_pool_info(pools[0], &info);
	ck_assert_uint_eq(info.max_blocks * info.block_tokens, 160000);
	kv_pool_info(pools[3], &info);
	ck_assert_uint_eq(info.max_blocks, 64);
	must(kv_groups_new(&what, &all));
	for (int i = 0; i < 64; i++) {
		must(kv_gseq_new(all, &seqs[i]));
		expect(kv_gseq_reserve(seqs[i], 12, TIMEOUT) == 0, "sequence %d", i);
		ck_assert_uint_eq(kv_seq_capacity(kv_gseq_seq(seqs[i], 0)), 16);
	}
	must(kv_gseq_new(all, &seqs[64]));
	ck_assert_int_eq(kv_gseq_reserve(seqs[64], 12, 0), KV_NO_ROOM);
	ck_assert_uint_eq(kv_seq_capacity(kv_gseq_seq(seqs[64], 0)), 0);
	/* All the others are there to be had: it was for rows. */
	for (uint32_t n = 9936; n; n -= n < 4096 ? n : 4096)
		must(kv_blocks_take(pools[0], n < 4096 ? n : 4096, ids, TIMEOUT));
	ck_assert_int_eq(kv_blocks_take(pools[0], 1, ids, 0), KV_NO_ROOM);
	for (int i = 0; i < 65; i++)
		kv_gseq_free(seqs[i], NULL);
	kv_groups_free(all);
	for (int g = 0; g < 4; g++)
		kv_pool_close(pools[g]);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("cases_room");
	TCase *tcase = tcase_create("cases_room");

	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(
		tcase, d05_memory_that_was_another_kinds_is_zero_and_nothing_of_it_is_seen, 0, 2);
	tcase_add_test(
		tcase,
		d17_what_exceeds_the_pool_is_refused_at_once_though_a_sequence_may_be_longer);
	tcase_add_test(tcase, d31_sixty_four_short_sequences_cost_a_block_and_three_rows_each);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
