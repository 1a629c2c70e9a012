/* SPDX-License-Identifier: Apache-2.0 */
/* The daemon's own processes: a mover that dies or hangs, and the end of it all. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/client.h"
#include "tests/support/process.h"

#define N_BLOCKS 2000

static struct kv_client *client;
static struct kv_pool *pool;
static kv_block_id ids[N_BLOCKS];

static void setup(void)
{
	daemon_start("--host", "64M");
	client = client_new();
	pool = pool_new_mapped(client, "pool", N_BLOCKS);
}

static void teardown(void)
{
	kv_pool_close(pool);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

static bool has_mover_other_than(uint64_t old)
{
	uint64_t pid = gpu_stats(client).mover_pid;

	return pid && pid != old;
}

START_TEST(a_mover_that_dies_is_replaced_and_nothing_is_lost)
{
	struct kv_pool *dirty = pool_new_mapped(client, "dirty", 0), *clean;
	uint64_t mover, free_before;

	kv_pool_close(dirty);
	must(kv_pool_drop(client, "dirty", TIMEOUT));
	wait_until(gpu_stats(client).bytes_scrubbing == 0);
	free_before = gpu_stats(client).bytes_free;
	for (int i = 0; i < 5; i++) {
		uint32_t n = 20000;
		kv_block_id *list = malloc(n * sizeof(*list));

		dirty = pool_new_mapped(client, "dirty", 0);
		must(kv_blocks_take(dirty, n, list, TIMEOUT));
		for (uint32_t k = 0; k < n; k++)
			block_fill(dirty, list[k], 0xff);
		free(list);
		mover = gpu_stats(client).mover_pid;
		kv_pool_close(dirty);
		must(kv_pool_drop(client, "dirty", TIMEOUT));
		ck_assert_int_eq(kill((pid_t)mover, SIGKILL), 0); /* zeroing now, or just done */
		books_balance(client);
		wait_until(has_mover_other_than(mover));
		wait_until(gpu_stats(client).bytes_free == free_before);
		books_balance(client);
	}
	ck_assert_uint_eq(daemon_children(), 1);
	clean = pool_new_mapped(client, "clean", 0);
	{
		uint32_t n = 20000;
		kv_block_id *list = malloc(n * sizeof(*list));

		must(kv_blocks_take(clean, n, list, TIMEOUT));
		for (uint32_t k = 0; k < n; k++)
			expect(block_is(clean, list[k], 0), "block %d was handed out dirty",
			       list[k]);
		free(list);
	}
	kv_pool_close(clean);
}
END_TEST

START_TEST(a_mover_that_hangs_does_not_stop_the_service)
{
	uint64_t mover = gpu_stats(client).mover_pid;

	ck_assert_int_eq(kill((pid_t)mover, SIGSTOP), 0);
	must(kv_blocks_take(pool, N_BLOCKS, ids, TIMEOUT));
	must(kv_blocks_give(pool, N_BLOCKS, ids));
	must(kv_ping(client, TIMEOUT));
	books_balance(client);
	/* teardown: SIGTERM ends the daemon and this mover, too. */
}
END_TEST

static void works_until_told(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *mine = pool_new_mapped(own, "pool", 0);
	kv_block_id some[16];
	struct kv_seq *seq;
	size_t hit;
	int r = 0;

	(void)arg;
	must(kv_blocks_take(mine, 16, some, TIMEOUT));
	seq = seq_published(own, mine, 1, 320);
	block_fill(mine, some[3], 0x5c);
	process_say(self, 0);
	process_wait(self);
	/* The daemon is gone. What is mapped is still there; calls say so, and none hangs. */
	for (int i = 0; i < 2000 && r != -ECONNRESET; i++) {
		r = kv_blocks_take(mine, 1, ids, TIMEOUT);
		if (!r)
			kv_blocks_give(mine, 1, ids);
		else
			ck_assert_int_eq(r, -ECONNRESET);
		r = r ? r : kv_ping(own, TIMEOUT);
	}
	ck_assert_int_eq(r, -ECONNRESET);
	ck_assert(block_is(mine, some[3], 0x5c));
	must(kv_seq_new(mine, &seq));
	must(kv_seq_lookup(seq, tokens_of(1, 321), 321, &hit));
	ck_assert_uint_eq(hit, 320);
	kv_seq_free(seq, NULL);
	kv_pool_close(mine);
	kv_disconnect(own);
}

START_TEST(when_the_daemon_ends_its_clients_go_on_with_what_they_have)
{
	struct process *others[3];
	pid_t mover = (pid_t)gpu_stats(client).mover_pid;

	for (int i = 0; i < 3; i++) {
		others[i] = process_start(works_until_told, NULL);
		process_hear(others[i]);
	}
	if (_i) {
		daemon_kill();
		wait_until(kill(mover, 0) < 0 && errno == ESRCH);
		unlink(daemon_socket());
	} else {
		daemon_stop();
	}
	for (int i = 0; i < 3; i++)
		process_go(others[i]);
	for (int i = 0; i < 3; i++)
		process_end(others[i]);
	kv_pool_close(pool);
	kv_disconnect(client);
	setup();
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/mover");
	TCase *tcase = tcase_create("mover");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, a_mover_that_dies_is_replaced_and_nothing_is_lost);
	tcase_add_test(tcase, a_mover_that_hangs_does_not_stop_the_service);
	tcase_add_loop_test(tcase, when_the_daemon_ends_its_clients_go_on_with_what_they_have, 0,
			    2);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
