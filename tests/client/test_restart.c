/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon's worker dies, or is replaced, under its clients. To look at the time in between, the keeper is
 * stopped: then no other worker comes until it goes on.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "include/internal/shm.h"
#include "tests/support/client.h"
#include "tests/support/process.h"
#include "tests/support/raw.h"

#define N_BLOCKS 2000

static struct kv_client *client;
static struct kv_pool *pool;
static kv_block_id ids[20000];

static void setup(void)
{
	daemon_start("--host", "64M", "--log-level", "error");
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

static void gap_begins(void)
{
	ck_assert_int_eq(kill(daemon_pid(), SIGSTOP), 0);
	daemon_kill_worker();
}

static void gap_ends(void)
{
	ck_assert_int_eq(kill(daemon_pid(), SIGCONT), 0);
}

static uint64_t restarts(void)
{
	return daemon_stats(client).worker_restarts;
}

static bool state_is(pid_t pid, const char *state)
{
	struct kv_session_stats s;

	return session_stats(client, pid, &s) && !strcmp(s.state, state);
}

/* ---- what goes on ---- */

START_TEST(without_a_worker_blocks_are_taken_found_and_given_with_no_error)
{
	struct kv_pool *large = pool_new(client, "large", 20000);
	struct kv_seq *published = seq_published(client, large, 1, 20 * BLOCK_TOKENS);

	for (int i = 0; i < 100; i++) {
		must(kv_blocks_take(large, 16, ids, TIMEOUT));
		must(kv_blocks_give(large, 16, ids));
	}
	must(kv_ping(client, TIMEOUT));
	gap_begins();
	for (int i = 0; i < 2000; i++) {
		expect(!kv_blocks_take(large, 16, ids, 0), "%s", kv_error_text());
		expect(!kv_blocks_give(large, 16, ids), "%s", kv_error_text());
		expect(hit_of(large, 1, 20 * BLOCK_TOKENS + 1) == 20 * BLOCK_TOKENS, "no hit");
	}
	gap_ends();
	/* More than there is at hand: this needs the worker that comes. */
	must(kv_blocks_take(large, 2000, ids, TIMEOUT));
	must(kv_blocks_give(large, 2000, ids));
	ck_assert_uint_eq(restarts(), 1);
	kv_seq_free(published, NULL);
	books_balance(client);
	kv_pool_close(large);
}
END_TEST

START_TEST(calls_wait_for_the_worker_that_comes_and_not_longer_than_they_may)
{
	int64_t start;

	gap_begins();
	start = now_ns();
	refused(kv_ping(client, 100 * KV_MSEC), -ETIMEDOUT, "being restarted");
	ck_assert_int_ge(now_ns() - start, 90 * KV_MSEC);
	ck_assert_int_lt(now_ns() - start, 5 * KV_SEC);
	gap_ends();
	must(kv_ping(client, TIMEOUT));
	must(kv_blocks_take(pool, 1500, ids, 0));
	must(kv_blocks_give(pool, 1500, ids));
}
END_TEST

START_TEST(what_was_cached_leased_and_held_is_so_after_a_restart)
{
	struct kv_seq *held = seq_published(client, pool, 1, 30 * BLOCK_TOKENS);
	struct kv_pool_stats before, after;
	size_t hit;

	kv_seq_free(seq_published(client, pool, 2, 50 * BLOCK_TOKENS), NULL);
	must(kv_blocks_take(pool, 300, ids, TIMEOUT));
	for (int i = 0; i < 300; i++)
		block_fill(pool, ids[i], 0x5a);
	must(kv_ping(client, TIMEOUT));
	before = pool_stats(client, "pool");
	daemon_kill_worker();
	after = pool_stats(client, "pool");
	ck_assert_uint_eq(after.blocks_total, before.blocks_total);
	ck_assert_uint_eq(after.blocks_free, before.blocks_free);
	ck_assert_uint_eq(after.blocks_leased, before.blocks_leased);
	ck_assert_uint_eq(after.blocks_cached, 80);
	ck_assert_uint_eq(after.blocks_cached_held, 30);
	ck_assert_uint_eq(after.published_total, before.published_total);
	ck_assert_uint_eq(after.grants_total, before.grants_total);
	ck_assert_uint_eq(after.max_bytes, before.max_bytes);
	ck_assert_str_eq(after.layout, before.layout);
	books_balance(client);
	ck_assert_uint_eq(hit_of(pool, 2, 50 * BLOCK_TOKENS + 1), 50 * BLOCK_TOKENS);
	/* The chain is published on, and cached blocks go when room is needed, but not the held ones. */
	kv_seq_free(seq_new(pool, 1, 40 * BLOCK_TOKENS, &hit), NULL);
	ck_assert_uint_eq(hit, 30 * BLOCK_TOKENS);
	must(kv_blocks_take(pool, (uint32_t)(N_BLOCKS - 330), ids + 300, TIMEOUT));
	ck_assert_int_eq(kv_blocks_take(pool, 1, ids + N_BLOCKS, 0), KV_NO_ROOM);
	for (int i = 0; i < 300; i++)
		expect(block_is(pool, ids[i], 0x5a), "block %d was given to somebody else", ids[i]);
	must(kv_blocks_give(pool, N_BLOCKS - 330 + 300, ids));
	ck_assert_uint_eq(hit_of(pool, 1, 30 * BLOCK_TOKENS + 1), 30 * BLOCK_TOKENS);
	kv_seq_free(held, NULL);
}
END_TEST

static void sleeps(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *mine = pool_new_mapped(own, "pool", 0);

	(void)arg;
	must(kv_blocks_take(mine, 300, ids, TIMEOUT));
	seq_published(own, mine, 7, 20 * BLOCK_TOKENS);
	process_say(self, 0);
	process_wait(self);
	must(kv_blocks_give(mine, 300, ids));
	must(kv_blocks_take(mine, 900, ids, TIMEOUT));
	process_say(self, 0);
	process_wait(self);
	kv_pool_close(mine);
	kv_disconnect(own);
}

START_TEST(a_client_that_sleeps_through_a_restart_keeps_all_and_comes_back_with_its_next_call)
{
	struct process *other = process_start(sleeps, NULL);

	process_hear(other);
	daemon_kill_worker();
	must(kv_ping(client, TIMEOUT));
	ck_assert(state_is(other->pid, "away"));
	ck_assert_uint_ge(pool_stats(client, "pool").blocks_leased, 300);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_quarantined, 0);
	books_balance(client);
	process_go(other);
	process_hear(other);
	ck_assert(state_is(other->pid, "live"));
	books_balance(client);
	process_go(other);
	process_end(other);
	wait_until(pool_stats(client, "pool").n_sessions == 1);
}
END_TEST

START_TEST(a_client_that_dies_while_there_is_no_worker_gives_everything_back)
{
	struct process *other = process_start(sleeps, NULL);

	process_hear(other);
	gap_begins();
	process_kill(other);
	gap_ends();
	wait_until(pool_stats(client, "pool").n_sessions == 1);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached_held, 0);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_quarantined, 0);
	ck_assert_uint_eq(hit_of(pool, 7, 20 * BLOCK_TOKENS + 1), 20 * BLOCK_TOKENS);
	must(kv_blocks_take(pool, N_BLOCKS, ids, TIMEOUT));
	must(kv_blocks_give(pool, N_BLOCKS, ids));
}
END_TEST

static void opens(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *mine;

	(void)arg;
	process_say(self, 0);
	process_wait(self);
	mine = pool_new_mapped(own, "another", 0);
	must(kv_blocks_take(mine, 10, ids, TIMEOUT));
	must(kv_blocks_give(mine, 10, ids));
	kv_pool_close(mine);
	kv_disconnect(own);
}

START_TEST(a_pool_that_is_opened_while_there_is_no_worker_is_opened_by_the_next)
{
	struct process *other = process_start(opens, NULL);

	process_hear(other);
	gap_begins();
	process_go(other);
	sleep_ms(30);
	gap_ends();
	process_end(other);
	must(kv_pool_drop(client, "another", TIMEOUT));
}
END_TEST

#define N_CONNECTING 4

/* Connects over and over, until it is told that it is over. */
static void connects(struct process *self, void *arg)
{
	const int *over = arg;

	process_say(self, 0);
	while (!__atomic_load_n(over, __ATOMIC_RELAXED))
		kv_disconnect(client_new());
}

/* Between connect and WELCOME there is a worker's death in the way of one in a few. */
START_TEST(who_connects_while_workers_die_is_connected)
{
	struct process *others[N_CONNECTING];
	int *over = mmap(NULL, sizeof(*over), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
			 -1, 0);

	ck_assert_ptr_ne(over, MAP_FAILED);
	for (int i = 0; i < N_CONNECTING; i++) {
		others[i] = process_start(connects, over);
		process_hear(others[i]);
	}
	for (int i = 0; i < 15; i++) {
		must(kv_ping(client, TIMEOUT)); /* one that has not served yet has a delay */
		sleep_ms(i);
		daemon_kill_worker();
	}
	__atomic_store_n(over, 1, __ATOMIC_RELAXED);
	for (int i = 0; i < N_CONNECTING; i++)
		process_end(others[i]);
	ck_assert_int_eq(munmap(over, sizeof(*over)), 0);
}
END_TEST

START_TEST(memory_that_was_being_zeroed_is_zero_when_it_is_handed_out)
{
	struct kv_pool *dirty = pool_new_mapped(client, "dirty", 0), *clean;
	uint32_t n = 15000;

	must(kv_blocks_take(dirty, n, ids, TIMEOUT));
	for (uint32_t i = 0; i < n; i++)
		block_fill(dirty, ids[i], 0xff);
	kv_pool_close(dirty);
	must(kv_pool_drop(client, "dirty", TIMEOUT));
	daemon_kill_worker();
	clean = pool_new_mapped(client, "clean", 0);
	must(kv_blocks_take(clean, n, ids, TIMEOUT));
	for (uint32_t i = 0; i < n; i++)
		expect(block_is(clean, ids[i], 0), "block %d was handed out dirty", ids[i]);
	kv_pool_close(clean);
}
END_TEST

static bool has_another_than(uint64_t worker)
{
	return daemon_stats(client).worker_pid != worker;
}

START_TEST(a_worker_that_is_told_to_end_is_replaced_and_a_new_one_each_time)
{
	int64_t start = now_ns();

	kv_seq_free(seq_published(client, pool, 1, 20 * BLOCK_TOKENS), NULL);
	for (int i = 0; i < 30; i++) {
		pid_t worker = daemon_worker();

		ck_assert_int_eq(kill(worker, i % 2 ? SIGKILL : SIGTERM), 0);
		wait_until(has_another_than((uint64_t)worker));
		must(kv_blocks_take(pool, 1000, ids, TIMEOUT));
		must(kv_blocks_give(pool, 1000, ids));
		expect(hit_of(pool, 1, 20 * BLOCK_TOKENS + 1) == 20 * BLOCK_TOKENS, "no hit");
		books_balance(client);
	}
	ck_assert_uint_eq(restarts(), 30);
	ck_assert_int_lt(now_ns() - start, 40 * KV_SEC);
}
END_TEST

/* ---- who may come back ---- */

static void tries_to_take_it(struct process *self, void *arg)
{
	const struct kv_msg_resume *how = arg;
	int fd = raw_hello();

	ck_assert_int_eq(
		raw_send(fd, KV_MSG_RESUME, (const char *)how + sizeof(how->head),
			 sizeof(*how) - sizeof(how->head)),
		0);
	ck_assert(raw_is_error(raw_receive(fd, NULL), -ENOENT, "take up again"));
	process_say(self, 0);
	process_wait(self);
}

START_TEST(a_session_is_its_own_process_to_take_up_again)
{
	struct kv_msg_resume how = {0};
	const struct kv_msg_pool_opened *opened;
	const struct kv_msg_welcome *welcome;
	struct process *other;
	struct kv_msg_hello hello = {.name = "raw", .version = "0.1.0"};
	int fds[3], fd = raw_connect();

	ck_assert_int_eq(raw_send(fd, KV_MSG_HELLO, (char *)&hello + sizeof(hello.head),
				  sizeof(hello) - sizeof(hello.head)),
			 0);
	welcome = (const void *)raw_receive(fd, NULL);
	ck_assert_uint_eq(welcome->head.type, KV_MSG_WELCOME);
	how.boot_nonce = welcome->boot_nonce;
	opened = (const void *)raw_open(fd, "raw", 0, fds);
	ck_assert_uint_eq(opened->head.type, KV_MSG_POOL_OPENED);
	how.pool_id = opened->pool_id;
	how.session_id = opened->session_id;
	how.token = opened->token;
	how.slot = opened->slot;
	ck_assert_int_eq(raw_send(fd, KV_MSG_PING, NULL, 0), 0); /* it has heard of its session */
	ck_assert_uint_eq(raw_receive(fd, NULL)->type, KV_MSG_OK);
	daemon_kill_worker();
	close(fd);

	other = process_start(tries_to_take_it, &how);
	process_hear(other);
	process_go(other);
	process_end(other);
	for (int i = 0; i < 4; i++) {
		struct kv_msg_resume wrong = how;

		wrong.boot_nonce += i == 0;
		wrong.session_id += i == 1;
		wrong.token += i == 2;
		wrong.slot += i == 3 ? 1000000 : 0;
		fd = raw_hello();
		raw_send(fd, KV_MSG_RESUME, (char *)&wrong + sizeof(wrong.head),
			 sizeof(wrong) - sizeof(wrong.head));
		ck_assert(raw_is_error(raw_receive(fd, NULL), -ENOENT, "take up again"));
		close(fd);
	}
	fd = raw_hello();
	raw_send(fd, KV_MSG_RESUME, (char *)&how + sizeof(how.head), sizeof(how) - sizeof(how.head));
	ck_assert_uint_eq(raw_receive(fd, NULL)->type, KV_MSG_OK);
	raw_send(fd, KV_MSG_POOL_CLOSE, NULL, 0);
	ck_assert_uint_eq(raw_receive(fd, NULL)->type, KV_MSG_OK);
	close(fd);
	for (int i = 0; i < 3; i++)
		close(fds[i]);
	must(kv_pool_drop(client, "raw", TIMEOUT));
}
END_TEST

static void breaks_the_rules(struct process *self, void *arg)
{
	const struct kv_msg_pool_opened *opened;
	int fd = raw_hello();

	(void)arg;
	opened = (const void *)raw_open(fd, "pool", 0, NULL);
	ck_assert_uint_eq(opened->head.type, KV_MSG_POOL_OPENED);
	raw_send(fd, 999, NULL, 0);
	ck_assert_ptr_null(raw_receive(fd, NULL));
	process_say(self, 0);
	process_wait(self);
}

START_TEST(who_was_hung_up_on_stays_so)
{
	struct process *other = process_start(breaks_the_rules, NULL);

	process_hear(other);
	ck_assert(state_is(other->pid, "dying"));
	daemon_kill_worker();
	must(kv_ping(client, TIMEOUT));
	ck_assert(state_is(other->pid, "dying"));
	books_balance(client);
	process_kill(other);
	wait_until(pool_stats(client, "pool").n_sessions == 1);
}
END_TEST

/* ---- kvctl restart-worker ---- */

START_TEST(a_worker_is_replaced_on_request_and_nothing_is_lost)
{
	char copy[200], command[600];
	uint64_t worker = daemon_stats(client).worker_pid;

	kv_seq_free(seq_published(client, pool, 1, 20 * BLOCK_TOKENS), NULL);
	must(kv_worker_restart(client, NULL, TIMEOUT));
	ck_assert_uint_ne(daemon_stats(client).worker_pid, worker);
	ck_assert_uint_eq(hit_of(pool, 1, 20 * BLOCK_TOKENS + 1), 20 * BLOCK_TOKENS);

	/* Another file: it runs it from then on, also when that is gone and the worker dies. */
	snprintf(copy, sizeof(copy), "%s/kvcached-new", daemon_folder());
	snprintf(command, sizeof(command), "cp '%s' '%s'", getenv("KVCACHED_BIN"), copy);
	ck_assert_int_eq(system(command), 0);
	must(kv_worker_restart(client, copy, TIMEOUT));
	for (int i = 0; i < 2; i++) {
		char link[64], target[300] = "";

		snprintf(link, sizeof(link), "/proc/%d/exe", daemon_worker());
		ck_assert_int_gt(readlink(link, target, sizeof(target) - 1), 0);
		ck_assert_msg(strstr(target, "kvcached-new"), "it runs %s", target);
		ck_assert_uint_eq(hit_of(pool, 1, 20 * BLOCK_TOKENS + 1), 20 * BLOCK_TOKENS);
		must(kv_blocks_take(pool, 1000, ids, TIMEOUT));
		must(kv_blocks_give(pool, 1000, ids));
		if (!i)
			ck_assert_int_eq(unlink(copy), 0);
		worker = (uint64_t)daemon_kill_worker();
		wait_until(has_another_than(worker));
	}
	books_balance(client);
}
END_TEST

START_TEST(a_program_that_cannot_take_over_is_refused_with_the_reason)
{
	uint64_t worker = daemon_stats(client).worker_pid;
	char fifo[200];

	refused(kv_worker_restart(client, "/nowhere/at/all", TIMEOUT), -ENOENT, "/nowhere/at/all");
	refused(kv_worker_restart(client, "kvcached", TIMEOUT), -EINVAL, "absolute");
	refused(kv_worker_restart(client, "/bin/echo", TIMEOUT), -EPROTO, "'--shm-version' to");
	refused(kv_worker_restart(client, "/bin/true", TIMEOUT), -EPROTO, "answers ''");
	refused(kv_worker_restart(client, "/etc/passwd", TIMEOUT), -EPROTO, "/etc/passwd");
	/* A pipe that nobody writes: opening it would stop the service. */
	snprintf(fifo, sizeof(fifo), "%s/fifo", daemon_folder());
	ck_assert_int_eq(mkfifo(fifo, 0600), 0);
	refused(kv_worker_restart(client, fifo, TIMEOUT), -EINVAL, "is no file");
	unlink(fifo);
	refused(kv_worker_restart(client, "/dev", TIMEOUT), -EINVAL, "'/dev' is no file");
	ck_assert_uint_eq(daemon_stats(client).worker_pid, worker);
	books_balance(client);
}
END_TEST

START_TEST(an_older_binary_is_refused_with_both_versions_and_nothing_changes)
{
	uint64_t worker = daemon_stats(client).worker_pid;
	char command[600], text[2000] = "";
	FILE *out;

	kv_seq_free(seq_published(client, pool, 1, 20 * BLOCK_TOKENS), NULL);
	refused(kv_worker_restart(client, KV_OLDER_WORKER, TIMEOUT), -EPROTO,
		"it answers 'shm-1' to --shm-version, the memory in use is of version '" KV_SHM_VERSION "'");
	snprintf(command, sizeof(command), "'%s' -t 20 -s '%s' restart-worker --binary '%s' 2>&1", KVCTL, daemon_socket(),
		 KV_OLDER_WORKER);
	out = popen(command, "r");
	ck_assert_ptr_nonnull(out);
	text[fread(text, 1, sizeof(text) - 1, out)] = 0;
	ck_assert_int_ne(pclose(out), 0);
	expect(strstr(text, "'shm-1'") && strstr(text, KV_SHM_VERSION) && strstr(text, "start the new one"),
	       "kvctl says '%s'", text);
	ck_assert_uint_eq(daemon_stats(client).worker_pid, worker);
	ck_assert_uint_eq(daemon_stats(client).programs_given_up, 0);
	ck_assert_uint_eq(hit_of(pool, 1, 20 * BLOCK_TOKENS + 1), 20 * BLOCK_TOKENS);
	books_balance(client);
}
END_TEST

START_TEST(a_program_that_does_not_serve_gives_way_to_the_one_before)
{
	uint64_t worker = daemon_stats(client).worker_pid;

	kv_seq_free(seq_published(client, pool, 1, 20 * BLOCK_TOKENS), NULL);
	refused(kv_worker_restart(client, KV_FALSE_WORKER, TIMEOUT), -EIO, "before it served");
	ck_assert_uint_ne(daemon_stats(client).worker_pid, worker);
	ck_assert_uint_eq(daemon_stats(client).programs_given_up, 1);
	ck_assert_uint_eq(hit_of(pool, 1, 20 * BLOCK_TOKENS + 1), 20 * BLOCK_TOKENS);
	books_balance(client);
}
END_TEST

/* ---- the keeper ---- */

static void works_on(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *mine = pool_new_mapped(own, "pool", 0);

	(void)arg;
	must(kv_blocks_take(mine, 300, ids, TIMEOUT));
	process_say(self, 0);
	process_wait(self);
	block_fill(mine, ids[0], 1); /* its memory is there as long as it is */
	ck_assert(block_is(mine, ids[0], 1));
	refused(kv_blocks_take(mine, N_BLOCKS - 300, ids + 300, TIMEOUT), -ECONNRESET,
		"closed the connection");
	refused(kv_ping(own, TIMEOUT), -ECONNRESET, "closed the connection");
	kv_pool_close(mine);
	kv_disconnect(own);
}

START_TEST(a_keeper_that_is_killed_takes_all_along_and_clients_are_told)
{
	struct process *other = process_start(works_on, NULL);
	int64_t start = now_ns();

	process_hear(other);
	daemon_kill(); /* waits for worker and mover */
	ck_assert_int_lt(now_ns() - start, 10 * KV_SEC);
	process_go(other);
	process_end(other);
	refused(kv_ping(client, TIMEOUT), -ECONNRESET, "closed the connection");
	kv_pool_close(pool);
	kv_disconnect(client);
	setup();
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached, 0);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("client/restart");
	TCase *tcase = tcase_create("restart");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, without_a_worker_blocks_are_taken_found_and_given_with_no_error);
	tcase_add_test(tcase, calls_wait_for_the_worker_that_comes_and_not_longer_than_they_may);
	tcase_add_test(tcase, what_was_cached_leased_and_held_is_so_after_a_restart);
	tcase_add_test(
		tcase,
		a_client_that_sleeps_through_a_restart_keeps_all_and_comes_back_with_its_next_call);
	tcase_add_test(tcase, a_client_that_dies_while_there_is_no_worker_gives_everything_back);
	tcase_add_test(tcase, a_pool_that_is_opened_while_there_is_no_worker_is_opened_by_the_next);
	tcase_add_test(tcase, who_connects_while_workers_die_is_connected);
	tcase_add_test(tcase, memory_that_was_being_zeroed_is_zero_when_it_is_handed_out);
	tcase_add_test(tcase, a_worker_that_is_told_to_end_is_replaced_and_a_new_one_each_time);
	tcase_add_test(tcase, a_session_is_its_own_process_to_take_up_again);
	tcase_add_test(tcase, who_was_hung_up_on_stays_so);
	tcase_add_test(tcase, a_worker_is_replaced_on_request_and_nothing_is_lost);
	tcase_add_test(tcase, a_program_that_cannot_take_over_is_refused_with_the_reason);
	tcase_add_test(tcase, an_older_binary_is_refused_with_both_versions_and_nothing_changes);
	tcase_add_test(tcase, a_program_that_does_not_serve_gives_way_to_the_one_before);
	tcase_add_test(tcase, a_keeper_that_is_killed_takes_all_along_and_clients_are_told);
	suite_add_tcase(s, tcase);
	return daemon_run_tests(s);
}
