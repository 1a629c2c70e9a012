/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long a restart takes: from kill -9 of the worker to the first new grant, in a pool whose
 *blocks are all there: most of them cached in chains, some leased. What counts is the number of
 *blocks, not their bytes: 64 GiB of blocks of 32 KiB are 2,097,152, as are 4 GiB of the blocks of
 *this test.
 *
 *	restart_time [MIB [KILLS]]	of host memory, sparse; 128 and 5 in the suite
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/client.h"

#define CHAIN 100 /* blocks */

static int mib = 128, kills = 5;

static int compare(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return (x > y) - (x < y);
}

static void fill(struct kv_client *client, struct kv_pool *pool, uint32_t n_chains)
{
	int32_t *tokens = calloc(CHAIN * BLOCK_TOKENS, sizeof(*tokens));

	for (uint32_t i = 0; i < n_chains; i++) {
		struct kv_seq *seq;

		for (int k = 0; k < CHAIN * BLOCK_TOKENS; k++)
			tokens[k] = k ? k : (int32_t)i;
		must(kv_seq_new(pool, &seq));
		must(kv_seq_reserve(seq, CHAIN * BLOCK_TOKENS, TIMEOUT));
		must(kv_seq_append(seq, tokens, CHAIN * BLOCK_TOKENS));
		must(kv_seq_publish(seq, NULL));
		kv_seq_free(seq, NULL);
	}
	free(tokens);
	must(kv_ping(client, TIMEOUT));
}

START_TEST(after_a_kill_the_next_grant_comes_soon_and_what_was_cached_is_found)
{
	struct kv_client *client;
	struct kv_pool *pool;
	struct kv_pool_info info;
	int64_t *times = calloc((size_t)kills, sizeof(*times));
	int64_t *answers = calloc((size_t)kills, sizeof(*answers));
	uint32_t fds;
	kv_block_id ids[1000];
	char size[32];
	int32_t token[CHAIN * BLOCK_TOKENS + 1];

	ck_assert(times && answers);
	snprintf(size, sizeof(size), "%dM", mib);
	daemon_start("--host", size, "--log-level", "error");
	client = client_new();
	pool = pool_new(client, "large", 0);
	kv_pool_info(pool, &info);
	fill(client, pool, (uint32_t)(info.max_blocks / CHAIN) - 20);
	for (int k = 0; k <= CHAIN * BLOCK_TOKENS; k++)
		token[k] = k ? k : 7;
	fds = daemon_fds();
	for (int i = 0; i < kills; i++) {
		struct kv_seq *seq;
		int64_t start;
		size_t hit;

		start = now_ns();
		ck_assert_int_eq(kill(daemon_worker(), SIGKILL), 0);
		/* On a connection without a pool: the next worker has taken all over, and serves. */
		must(kv_ping(client, TIMEOUT));
		answers[i] = now_ns() - start;
		/* More than a magazine has at hand. */
		must(kv_blocks_take(pool, 1000, ids, TIMEOUT));
		times[i] = now_ns() - start;
		must(kv_seq_new(pool, &seq));
		must(kv_seq_lookup(seq, token, CHAIN * BLOCK_TOKENS + 1, &hit));
		ck_assert_uint_eq(hit, CHAIN * BLOCK_TOKENS);
		kv_seq_free(seq, NULL);
		must(kv_blocks_give(pool, 1000, ids));
		must(kv_ping(client, TIMEOUT));
		books_balance(client);
	}
	qsort(times, (size_t)kills, sizeof(times[0]), compare);
	qsort(answers, (size_t)kills, sizeof(answers[0]), compare);
	printf("%llu blocks, %llu cached: first answer %.1f ms after kill -9; first grant in the "
	       "pool median %.1f "
	       "ms, 95%% %.1f ms, 99%% %.1f ms, %.1f to %.1f (%d kills)\n",
	       (unsigned long long)pool_stats(client, "large").blocks_total,
	       (unsigned long long)pool_stats(client, "large").blocks_cached,
	       (double)answers[kills / 2] / 1e6, (double)times[kills / 2] / 1e6,
	       (double)times[kills * 95 / 100] / 1e6, (double)times[kills * 99 / 100] / 1e6,
	       (double)times[0] / 1e6, (double)times[kills - 1] / 1e6, kills);
	ck_assert_uint_eq(daemon_fds(), fds);
	free(times);
	free(answers);
	kv_pool_close(pool);
	kv_disconnect(client);
	daemon_stop();
}
END_TEST

int main(int argc, char **argv)
{
	Suite *s = suite_create("integration/restart_time");
	TCase *tcase = tcase_create("restart_time");

	if (argc > 1)
		mib = atoi(argv[1]);
	if (argc > 2)
		kills = atoi(argv[2]);
	tcase_set_timeout(tcase, 600 + kills);
	tcase_add_test(tcase,
		       after_a_kill_the_next_grant_comes_soon_and_what_was_cached_is_found);
	suite_add_tcase(s, tcase);
	return daemon_run_tests(s);
}
