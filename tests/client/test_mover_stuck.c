/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Movers that do not end, as one in a call of a driver that doesn't return: killed, and for a while still
 * there, perhaps still writing. Nobody waits for them: not the worker, not the next worker, no client. What
 * they were given stays out of use until they have ended.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/client.h"
#include "tests/support/process.h"

#define N_BLOCKS 1000
#define CHAIN	 4 /* blocks of a prompt */
#define N_CHAINS 3000
#define LEN	 (CHAIN * BLOCK_TOKENS)
/* What takes longer has waited for a mover: those that do not end are kept for seconds. */
#define SOON (5 * KV_SEC)

static struct kv_client *client;
static struct kv_pool *pool;
static kv_block_id ids[N_BLOCKS];

static pid_t mover_pid(void)
{
	return (pid_t)gpu_stats(client).mover_pid;
}

static void setup(void)
{
	daemon_start("--host", "64M");
	client = client_new();
	pool = pool_new_mapped(client, "pool", 0);
	wait_until(mover_pid());
}

static void teardown(void)
{
	kv_pool_close(pool);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

/* ---- a process that can't end ---- */

/* It is traced, and a traced process stops on its way out, SIGKILL or not. */
static void keeps_from_ending(struct process *self, void *arg)
{
	pid_t pid = *(pid_t *)arg;
	int status;

	if (ptrace(PTRACE_SEIZE, pid, NULL, PTRACE_O_TRACEEXIT) < 0) {
		process_say(self, -errno);
		return;
	}
	process_say(self, 0);
	for (;;) {
		expect(waitpid(pid, &status, 0) == pid && WIFSTOPPED(status), "status %#x", status);
		if (status >> 16 == PTRACE_EVENT_EXIT)
			break;
		/* Other signals it gets as ever; stopped by one it stays until it is killed. */
		if (status >> 16 == PTRACE_EVENT_STOP)
			ptrace(PTRACE_LISTEN, pid, NULL, NULL);
		else
			ptrace(PTRACE_CONT, pid, NULL, WSTOPSIG(status));
	}
	process_say(self, 0);
	process_wait(self);
}

static struct process *keep_from_ending(pid_t pid)
{
	struct process *keeper = process_start(keeps_from_ending, &pid);
	int64_t r = process_hear(keeper);

	if (r < 0) {
		fprintf(stderr, "ptrace: %s: passed over\n", strerror((int)-r));
		process_end(keeper);
		return NULL;
	}
	return keeper;
}

static void let_end(struct process *keeper)
{
	process_go(keeper);
	process_end(keeper);
}

/* ---- what goes on ---- */

static void everything_but_zeroing_goes_on(void)
{
	KV_OPTIONS(kv_connect_options, how, .socket = daemon_socket(), .name = "new",
		   .timeout = SOON);
	struct kv_client *other;
	struct kv_pool *mine;
	int64_t start = now_ns();

	must(kv_ping(client, SOON));
	must(kv_blocks_take(pool, N_BLOCKS, ids, SOON));
	must(kv_blocks_give(pool, N_BLOCKS, ids));
	ck_assert_uint_eq(hit_of(pool, 3, LEN + 1), LEN);
	must(kv_connect(&how, &other));
	mine = pool_new(other, "pool", 0);
	must(kv_blocks_take(mine, 10, ids, SOON));
	must(kv_blocks_give(mine, 10, ids));
	kv_pool_close(mine);
	kv_disconnect(other);
	books_balance(client);
	expect(now_ns() - start < SOON, "it took %lld ms",
	       (long long)((now_ns() - start) / KV_MSEC));
}

static void dirty_some(void)
{
	struct kv_pool *dirty = pool_new_mapped(client, "dirty", 0);

	must(kv_blocks_take(dirty, N_BLOCKS, ids, TIMEOUT));
	for (int i = 0; i < N_BLOCKS; i++)
		block_fill(dirty, ids[i], 0xff);
	kv_pool_close(dirty);
	must(kv_pool_drop(client, "dirty", TIMEOUT));
}

static void publish_prompts(void)
{
	static struct kv_seq *seqs[N_CHAINS];

	for (int32_t k = 0; k < N_CHAINS; k++)
		seqs[k] = seq_new(pool, k, LEN, NULL);
	/* Every second one stays: there are holes everywhere. */
	for (int32_t k = 0; k < N_CHAINS; k++) {
		if (k % 2)
			must(kv_seq_publish(seqs[k], NULL));
		kv_seq_free(seqs[k], NULL);
	}
	must(kv_ping(client, TIMEOUT));
}

/* Another mover than @old runs and has done what was left to do. */
static void all_is_zeroed_by_another_than(pid_t old)
{
	wait_until(mover_pid() && mover_pid() != old);
	wait_until(gpu_stats(client).bytes_scrubbing == 0);
	wait_until(!gpu_stats(client).mover_error[0]);
}

START_TEST(a_worker_that_takes_over_does_not_wait_for_a_mover_that_does_not_end)
{
	struct process *kept;
	pid_t mover = mover_pid();

	publish_prompts();
	kept = keep_from_ending(mover);
	if (!kept)
		return;
	ck_assert_int_eq(kill(mover, SIGSTOP), 0);
	dirty_some();
	ck_assert_uint_gt(gpu_stats(client).bytes_scrubbing, 0);
	for (int i = 0; i < 3; i++) {
		daemon_kill_worker();
		if (!i)
			process_hear(kept);
		everything_but_zeroing_goes_on();
		ck_assert_uint_gt(gpu_stats(client).bytes_scrubbing, 0);
		ck_assert_int_eq(mover_pid(), mover);
	}
	let_end(kept);
	wait_until(mover_pid() && mover_pid() != mover);
	wait_until(gpu_stats(client).bytes_scrubbing == 0);
	books_balance(client);
}
END_TEST

/* D18: who writes to blocks that others have given up is the mover; it may end at any time, or not. */
START_TEST(what_it_was_copying_to_is_handed_out_when_it_has_ended)
{
	struct process *kept;
	pid_t mover = mover_pid();
	uint32_t n_moving;

	publish_prompts();
	kept = keep_from_ending(mover);
	if (!kept)
		return;
	ck_assert_int_eq(kill(mover, SIGSTOP), 0);
	must(kv_pool_compact(client, "pool", 0, TIMEOUT));
	n_moving = (uint32_t)pool_stats(client, "pool").blocks_moving;
	ck_assert_uint_gt(n_moving, 0);
	daemon_kill_worker();
	process_hear(kept);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_moving, n_moving);
	everything_but_zeroing_goes_on();
	/* An operator who asks for more is heard when there is a mover. */
	must(kv_pool_compact(client, "pool", 0, SOON));
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_moving, n_moving);
	everything_but_zeroing_goes_on();
	let_end(kept);
	wait_until(!pool_stats(client, "pool").compacting);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_moving, 0);
	ck_assert_uint_eq(hit_of(pool, 3, LEN + 1), LEN);
}
END_TEST

START_TEST(a_mover_that_answers_nothing_is_replaced_and_nobody_waits_for_its_end)
{
	struct process *kept;
	pid_t mover = mover_pid();

	publish_prompts();
	kept = keep_from_ending(mover);
	if (!kept)
		return;
	ck_assert_int_eq(kill(mover, SIGSTOP), 0);
	dirty_some();
	/* Half a minute is what a job may take. */
	for (int i = 0; i < 60 && !gpu_stats(client).mover_error[0]; i++) {
		sleep_ms(1000);
		everything_but_zeroing_goes_on();
	}
	ck_assert_str_eq(gpu_stats(client).mover_error, "no answer in 30 s");
	process_hear(kept);
	everything_but_zeroing_goes_on();
	ck_assert_int_eq(mover_pid(), mover);
	ck_assert_uint_gt(gpu_stats(client).bytes_scrubbing, 0);
	let_end(kept);
	all_is_zeroed_by_another_than(mover);
}
END_TEST

START_TEST(the_daemon_stops_although_a_mover_does_not_end)
{
	struct process *kept = keep_from_ending(mover_pid());
	int64_t start = now_ns();

	kv_pool_close(pool);
	kv_disconnect(client);
	ck_assert_int_eq(kill(daemon_pid(), SIGTERM), 0);
	if (kept) {
		process_hear(kept);
		sleep_ms(300);
		let_end(kept);
	}
	daemon_ended();
	expect(now_ns() - start < 15 * KV_SEC, "it took %lld ms",
	       (long long)((now_ns() - start) / KV_MSEC));
}
END_TEST

static Suite *suite(void)
{
	const char *loop = getenv("KV_TEST_EVENT_LOOP");
	Suite *s = suite_create("client/mover_stuck");
	TCase *tcase = tcase_create("mover"), *end = tcase_create("end");

	tcase_set_timeout(tcase, 120);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase,
		       a_worker_that_takes_over_does_not_wait_for_a_mover_that_does_not_end);
	tcase_add_test(tcase, what_it_was_copying_to_is_handed_out_when_it_has_ended);
	if (!loop || strcmp(loop, "epoll")) /* once: it takes half a minute */
		tcase_add_test(
			tcase,
			a_mover_that_answers_nothing_is_replaced_and_nobody_waits_for_its_end);
	suite_add_tcase(s, tcase);
	tcase_set_timeout(end, 60);
	tcase_add_checked_fixture(end, setup, NULL);
	tcase_add_test(end, the_daemon_stops_although_a_mover_does_not_end);
	suite_add_tcase(s, end);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
