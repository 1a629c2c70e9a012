/* SPDX-License-Identifier: Apache-2.0 */
/* Compaction: what is cached moves together under clients that look it up, hold it and let it go. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/client.h"
#include "tests/support/process.h"

#define MIB	 ((uint64_t)1 << 20)
#define CHAIN	 4 /* blocks of a prompt */
#define N_CHAINS 3000
#define LEN	 (CHAIN * BLOCK_TOKENS)

static struct kv_client *client;
static struct kv_pool *pool;
static struct kv_seq *seqs[N_CHAINS];
static uint32_t n_alive;
static bool alive[N_CHAINS];

/* Every byte of a block says whose it is. */
static int mark_of(int32_t prompt, uint32_t i)
{
	return 1 + (prompt * 7 + (int)i) % 251;
}

static void setup(void)
{
	daemon_start("--host", "64M");
	client = client_new();
	pool = pool_new_mapped(client, "pool", 0);
	for (int32_t k = 0; k < N_CHAINS; k++) {
		const kv_block_id *ids;

		seqs[k] = seq_new(pool, k, LEN, NULL);
		ck_assert_uint_eq(kv_seq_blocks(seqs[k], &ids), CHAIN);
		for (uint32_t i = 0; i < CHAIN; i++)
			block_fill(pool, ids[i], mark_of(k, i));
	}
	/* Every second one, at random, is published and let go; the others go without a trace. */
	srandom(1);
	n_alive = 0;
	for (int32_t k = 0; k < N_CHAINS; k++) {
		alive[k] = random() & 1;
		n_alive += alive[k];
		if (alive[k])
			must(kv_seq_publish(seqs[k], NULL));
		kv_seq_free(seqs[k], NULL);
	}
	must(kv_ping(client, TIMEOUT));
}

static void teardown(void)
{
	kv_pool_close(pool);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

/* All that was published is found, with its bytes. */
static void everything_is_found(void)
{
	for (int32_t k = 0; k < N_CHAINS; k++) {
		const kv_block_id *ids;
		struct kv_seq *seq;
		size_t hit;

		must(kv_seq_new(pool, &seq));
		must(kv_seq_lookup(seq, tokens_of(k, LEN + 1), LEN + 1, &hit));
		expect(hit == (alive[k] ? LEN : 0), "prompt %d: %zu tokens found", k, hit);
		kv_seq_blocks(seq, &ids);
		for (uint32_t i = 0; i < hit / BLOCK_TOKENS; i++)
			expect(block_is(pool, ids[i], mark_of(k, i)),
			       "block %d of prompt %d has other bytes", ids[i], k);
		kv_seq_free(seq, NULL);
	}
}

static bool is_over(void)
{
	return !pool_stats(client, "pool").compacting;
}

START_TEST(a_pool_half_full_of_random_survivors_gets_its_extents_back)
{
	struct kv_pool_stats before = pool_stats(client, "pool"), after;

	ck_assert_uint_ge(before.fragmented_bytes, 8 * MIB);
	must(kv_pool_compact(client, "pool", 0, TIMEOUT));
	wait_until(is_over());
	after = pool_stats(client, "pool");
	ck_assert_uint_eq(after.blocks_cached, n_alive * CHAIN);
	ck_assert_uint_eq(after.blocks_moving, 0);
	ck_assert_uint_gt(after.compacting_ns_total, 0);
	ck_assert_uint_ge(after.spare_bytes * 100, after.extent_bytes * 45);
	ck_assert_uint_le(after.fragmented_bytes, 3 * MIB);
	books_balance(client);
	everything_is_found();
}
END_TEST

START_TEST(with_a_cap_it_takes_its_time)
{
	int64_t start = now_ns();

	must(kv_pool_compact(client, "pool", 8 * MIB, TIMEOUT));
	wait_until(is_over());
	/* About 6 MiB are copied, 64 MiB a batch: one batch, and the look at what is left after it. */
	ck_assert_int_ge(now_ns() - start, 200 * KV_MSEC);
	everything_is_found();
}
END_TEST

START_TEST(what_somebody_holds_stays_where_it_is)
{
	struct kv_seq *held[N_CHAINS / 3];
	kv_block_id before[N_CHAINS / 3][CHAIN];
	const kv_block_id *ids;
	size_t hit;

	for (int32_t k = 0; k < N_CHAINS / 3; k++) {
		must(kv_seq_new(pool, &held[k]));
		must(kv_seq_lookup(held[k], tokens_of(k, LEN + 1), LEN + 1, &hit));
		kv_seq_blocks(held[k], &ids);
		memcpy(before[k], ids, hit / BLOCK_TOKENS * sizeof(*ids));
	}
	must(kv_pool_compact(client, "pool", 0, TIMEOUT));
	wait_until(is_over());
	books_balance(client);
	everything_is_found();
	for (int32_t k = 0; k < N_CHAINS / 3; k++) {
		size_t n = kv_seq_blocks(held[k], &ids);

		for (uint32_t i = 0; i < n; i++) {
			ck_assert_int_eq(ids[i], before[k][i]);
			expect(block_is(pool, ids[i], mark_of(k, i)), "a held block changed");
		}
		kv_seq_free(held[k], NULL);
	}
}
END_TEST

static void looks_up_all_the_time(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *mine = pool_new_mapped(own, "pool", 0);
	int64_t end = now_ns() + 1000 * KV_MSEC;
	uint64_t n_hits = 0;

	(void)arg;
	process_say(self, 0);
	for (int32_t k = 0; now_ns() < end; k = (k + 1) % N_CHAINS) {
		const kv_block_id *ids;
		struct kv_seq *seq;
		size_t hit;

		must(kv_seq_new(mine, &seq));
		must(kv_seq_lookup(seq, tokens_of(k, LEN + 1), LEN + 1, &hit));
		kv_seq_blocks(seq, &ids);
		/* A block that moves at this moment may be missed. What is found is right, and stays so. */
		for (uint32_t i = 0; i < hit / BLOCK_TOKENS; i++)
			expect(block_is(mine, ids[i], mark_of(k, i)), "prompt %d, block %u", k, i);
		n_hits += hit > 0;
		kv_seq_free(seq, NULL);
	}
	process_say(self, (int64_t)n_hits);
	kv_pool_close(mine);
	kv_disconnect(own);
}

START_TEST(clients_at_work_never_see_other_bytes_even_if_movers_die)
{
	struct process *readers[2];

	for (int i = 0; i < 2; i++) {
		readers[i] = process_start(looks_up_all_the_time, NULL);
		process_hear(readers[i]);
	}
	for (int round = 0; round < 10; round++) {
		must(kv_pool_compact(client, "pool", 0, TIMEOUT));
		if (_i) {
			pid_t mover = (pid_t)gpu_stats(client).mover_pid;

			if (mover)
				kill(mover, SIGKILL);
		}
		sleep_ms(40);
	}
	for (int i = 0; i < 2; i++) {
		ck_assert_int_gt(process_hear(readers[i]), 0);
		process_end(readers[i]);
	}
	wait_until(is_over());
	books_balance(client);
	everything_is_found();
}
END_TEST

START_TEST(a_pool_that_needs_extents_gets_them_by_compaction_and_nothing_is_forgotten)
{
	KV_OPTIONS(kv_pool_options, what, .name = "other", .layout = small_layout(),
		   .timeout = TIMEOUT);
	uint64_t cached = pool_stats(client, "pool").blocks_cached;
	struct kv_pool *other;
	kv_block_id *ids = calloc(26000, sizeof(*ids));

	must(kv_pool_open(client, &what, &other));
	/* 46 MiB: all that nobody owns, and half of what lies beside cached blocks. */
	must(kv_blocks_take(other, 23500, ids, TIMEOUT));
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached, cached);
	ck_assert_uint_gt(pool_stats(client, "pool").compacted_bytes_total, 0);
	everything_is_found();
	kv_pool_close(other);
	free(ids);
}
END_TEST

static void waits_for_room(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *tight = pool_new(own, "tight", 4);
	kv_block_id id;

	(void)arg;
	process_say(self, 0);
	must(kv_blocks_take(tight, 1, &id, TIMEOUT));
	process_say(self, id);
	must(kv_blocks_give(tight, 1, &id));
	kv_pool_close(tight);
	kv_disconnect(own);
}

/* The room that is waited for may be of any pool: who waits may need the mover and the memory's bandwidth. */
START_TEST(it_pauses_while_anybody_waits_for_room_and_goes_on_then)
{
	struct kv_pool *tight = pool_new(client, "tight", 4);
	struct process *other;
	kv_block_id ids[4];

	must(kv_blocks_take(tight, 4, ids, TIMEOUT));
	other = process_start(waits_for_room, NULL);
	process_hear(other);
	wait_until(pool_stats(client, "tight").waiting == 1);
	must(kv_pool_compact(client, "pool", 0, TIMEOUT));
	for (int i = 0; i < 20; i++) {
		struct kv_pool_stats now = pool_stats(client, "pool");

		ck_assert_uint_eq(now.compacting, 1);
		ck_assert_uint_eq(now.blocks_moving, 0);
		ck_assert_uint_eq(now.compacted_bytes_total, 0);
		sleep_ms(20);
	}
	ck_assert_uint_eq(pool_stats(client, "tight").waiting, 1);
	must(kv_blocks_give(tight, 4, ids));
	ck_assert_int_gt(process_hear(other), 0);
	process_end(other);
	wait_until(is_over());
	ck_assert_uint_gt(pool_stats(client, "pool").compacted_bytes_total, 4 * MIB);
	everything_is_found();
	kv_pool_close(tight);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/compact");
	TCase *tcase = tcase_create("compact");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, a_pool_half_full_of_random_survivors_gets_its_extents_back);
	tcase_add_test(tcase, with_a_cap_it_takes_its_time);
	tcase_add_test(tcase, it_pauses_while_anybody_waits_for_room_and_goes_on_then);
	tcase_add_test(tcase, what_somebody_holds_stays_where_it_is);
	tcase_add_loop_test(tcase, clients_at_work_never_see_other_bytes_even_if_movers_die, 0, 2);
	tcase_add_test(tcase,
		       a_pool_that_needs_extents_gets_them_by_compaction_and_nothing_is_forgotten);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
