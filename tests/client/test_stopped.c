/* SPDX-License-Identifier: Apache-2.0 */
/* A daemon that stands still (a debugger, a suspended machine): its clients go on, wait once, and lose nothing. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/client.h"

#define N_BLOCKS 12000
/* The one wait for a daemon that doesn't answer is 5 s. */
#define ONE_WAIT (15 * KV_SEC)

static struct kv_client *client, *other;
static struct kv_pool *pool;
static kv_block_id ids[N_BLOCKS];
static pid_t worker;

static void setup(void)
{
	daemon_start("--host", "64M");
	client = client_new();
	other = client_new();
	pool = pool_new(client, "pool", 0);
	worker = daemon_worker();
}

static void teardown(void)
{
	kv_pool_close(pool);
	books_balance(other);
	kv_disconnect(client);
	kv_disconnect(other);
	daemon_stop();
}

static struct kv_pool_stats stats(void)
{
	return pool_stats(other, "pool");
}

/* Whoever makes calls sends what could not be sent. */
static bool all_is_sent(void)
{
	must(kv_pool_map(pool, TIMEOUT));
	return !kv_ping(client, TIMEOUT);
}

START_TEST(giving_more_blocks_than_its_ring_holds_waits_once_and_loses_none)
{
	int64_t start;

	must(kv_blocks_take(pool, N_BLOCKS, ids, TIMEOUT));
	kill(worker, SIGSTOP);
	start = now_ns();
	for (int i = 0; i < N_BLOCKS; i++) {
		must(kv_blocks_give(pool, 1, &ids[i]));
		expect(now_ns() - start < ONE_WAIT, "after %lld s %d of %d blocks are given",
		       (long long)((now_ns() - start) / KV_SEC), i, N_BLOCKS);
	}
	/* The promise of a ping is that all of it has been worked off: it can't be made. */
	kill(worker, SIGCONT);
	refused(kv_ping(client, TIMEOUT), -EAGAIN, "ops");
	wait_until(all_is_sent());
	ck_assert_uint_le(stats().blocks_leased, 512); /* its magazine */
	numbers_add_up(other);
	/* And they can be had again, all of them. */
	must(kv_blocks_take(pool, N_BLOCKS, ids, TIMEOUT));
	must(kv_blocks_give(pool, N_BLOCKS, ids));
}
END_TEST

START_TEST(a_long_prompt_that_is_published_meanwhile_is_found_afterwards)
{
	const size_t n = 10000 * BLOCK_TOKENS;
	int64_t start;
	struct kv_seq *seq;
	size_t hit;

	seq = seq_new(pool, 1, n, &hit);
	kill(worker, SIGSTOP);
	start = now_ns();
	must(kv_seq_publish(seq, NULL));
	kv_seq_free(seq, NULL);
	expect(now_ns() - start < ONE_WAIT, "publishing took %lld s", (long long)((now_ns() - start) / KV_SEC));
	kill(worker, SIGCONT);
	wait_until(all_is_sent());
	ck_assert_uint_eq(stats().blocks_cached, 10000);
	ck_assert_uint_eq(stats().blocks_cached_held, 0);
	ck_assert_uint_eq(hit_of(pool, 1, n + 1), n);
}
END_TEST

START_TEST(a_pool_that_is_closed_then_has_sent_all_that_it_had_to_say)
{
	const size_t n = 10000 * BLOCK_TOKENS;
	struct kv_pool *mine = pool_new(client, "pool", 0);
	struct kv_seq *seq;
	size_t hit;

	seq = seq_new(mine, 1, n, &hit);
	kill(worker, SIGSTOP);
	must(kv_seq_publish(seq, NULL));
	kill(worker, SIGCONT);
	kv_seq_free(seq, NULL);
	kv_pool_close(mine);
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_eq(stats().blocks_cached, 10000);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/stopped");
	TCase *t = tcase_create("stopped");

	tcase_set_timeout(t, 90);
	tcase_add_checked_fixture(t, setup, teardown);
	tcase_add_test(t, giving_more_blocks_than_its_ring_holds_waits_once_and_loses_none);
	tcase_add_test(t, a_long_prompt_that_is_published_meanwhile_is_found_afterwards);
	tcase_add_test(t, a_pool_that_is_closed_then_has_sent_all_that_it_had_to_say);
	suite_add_tcase(s, t);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
