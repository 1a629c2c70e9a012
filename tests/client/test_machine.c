/* SPDX-License-Identifier: Apache-2.0 */
/* Faults of the machine under a real daemon: what is refused, what is done again, who doesn't
 * notice. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include "tests/support/client.h"
#include "tests/support/process.h"

#define N_BLOCKS 1000

static struct kv_client *client;
static struct kv_pool *pool;
static kv_block_id ids[N_BLOCKS];
static char fault_path[200];

static void begin(const char *size)
{
	daemon_start("--host", size);
	client = client_new();
	pool = pool_new_mapped(client, "pool", 0);
	must(kv_blocks_take(pool, 100, ids, TIMEOUT));
	for (int i = 0; i < 100; i++)
		block_fill(pool, ids[i], i);
}

/* Whatever has happened: its blocks are its own, more can be had, what it publishes is found. */
static void goes_on(int32_t prompt)
{
	kv_block_id more[200];

	must(kv_blocks_take(pool, 200, more, TIMEOUT));
	must(kv_blocks_give(pool, 200, more));
	kv_seq_free(seq_published(client, pool, prompt, 10 * BLOCK_TOKENS), NULL);
	ck_assert_uint_eq(hit_of(pool, prompt, 10 * BLOCK_TOKENS + 1), 10 * BLOCK_TOKENS);
	for (int i = 0; i < 100; i++)
		expect(block_is(pool, ids[i], i), "block %d has other bytes", ids[i]);
}

static void end(void)
{
	must(kv_blocks_give(pool, 100, ids));
	books_balance(client);
	kv_pool_close(pool);
	kv_disconnect(client);
	daemon_stop();
}

/* ---- calls that fail in the daemon: tests/support/faults.c ---- */

static void preload(const char *variable)
{
	setenv("LD_PRELOAD", getenv("KV_FAULT_LIBRARY"), 1);
	snprintf(fault_path, sizeof(fault_path), "%s/fault", daemon_folder());
	setenv(variable, fault_path, 1);
}

static void set_fault(void)
{
	int fd = open(fault_path, O_CREAT | O_WRONLY, 0600);

	ck_assert_int_ge(fd, 0);
	close(fd);
}

/* A pool of its own, full of what is not zero. */
static void fill_second(const char *name)
{
	struct kv_pool *second = pool_new_mapped(client, name, 0);
	kv_block_id some[N_BLOCKS];

	must(kv_blocks_take(second, N_BLOCKS, some, TIMEOUT));
	for (int i = 0; i < N_BLOCKS; i++)
		block_fill(second, some[i], 0x5a);
	must(kv_blocks_give(second, N_BLOCKS, some));
	kv_pool_close(second);
	must(kv_pool_drop(client, name, TIMEOUT));
}

static void expect_zero(const char *name)
{
	struct kv_pool *second = pool_new_mapped(client, name, 0);
	kv_block_id some[N_BLOCKS];

	must(kv_blocks_take(second, N_BLOCKS, some, TIMEOUT));
	for (int i = 0; i < N_BLOCKS; i++)
		expect(block_is(second, some[i], 0), "block %d is not zero", some[i]);
	must(kv_blocks_give(second, N_BLOCKS, some));
	kv_pool_close(second);
}

START_TEST(a_device_that_reports_errors_is_named_and_its_work_is_done_when_it_works_again)
{
	KV_OPTIONS(kv_pool_options, what, .name = "third", .model = "small",
		   .layout = small_layout(), .min_bytes = 2 << 20, .timeout = 300 * KV_MSEC);
	struct kv_pool *third;

	preload("KV_FAULT_MOVER");
	begin("4M");
	set_fault();
	fill_second("second");
	wait_until(strstr(gpu_stats(client).mover_error, "no such job"));
	/* What isn't zeroed isn't handed out; what is there goes on. */
	ck_assert_int_eq(kv_pool_open(client, &what, &third), -ETIMEDOUT);
	for (int i = 0; i < 5; i++)
		goes_on(i);
	ck_assert_int_gt(gpu_stats(client).bytes_scrubbing, 0);
	ck_assert_int_eq(unlink(fault_path), 0);
	wait_until(!gpu_stats(client).mover_error[0]);
	expect_zero("second");
	end();
}
END_TEST

START_TEST(io_uring_refused_in_mid_service_costs_a_worker_and_nothing_else)
{
	const char *loop = getenv("KV_TEST_EVENT_LOOP");

	if (loop && !strcmp(loop, "epoll"))
		return;
	preload("KV_FAULT_URING");
	begin("8M");
	for (uint64_t i = 1; i <= 3; i++) {
		set_fault();
		wait_until(access(fault_path, F_OK) < 0);
		goes_on((int32_t)i);
		/* The first connection after it is to the worker that came. */
		wait_until(daemon_stats(client).worker_restarts == i);
	}
	end();
}
END_TEST

/* ---- descriptors ---- */

static uint32_t open_files(pid_t pid)
{
	char path[64];
	uint32_t n = 0;

	for (int fd = 0; fd < 400; fd++) {
		snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, fd);
		n += !access(path, F_OK) || errno != ENOENT;
	}
	return n;
}

START_TEST(a_daemon_out_of_descriptors_refuses_what_is_new_and_keeps_what_is_there)
{
	struct rlimit limit, old;
	struct kv_client *more[8];
	struct kv_pool *another;
	int n = 0;

	begin("8M");
	ck_assert_int_eq(prlimit(daemon_worker(), RLIMIT_NOFILE, NULL, &old), 0);
	limit = old;
	limit.rlim_cur = open_files(daemon_worker()) + 3;
	ck_assert_int_eq(prlimit(daemon_worker(), RLIMIT_NOFILE, &limit, NULL), 0);
	for (int i = 0; i < 8; i++) {
		KV_OPTIONS(kv_connect_options, how, .socket = daemon_socket(), .name = "more",
			   .timeout = 200 * KV_MSEC);

		n += !kv_connect(&how, &more[n]);
		goes_on(i);
	}
	ck_assert_int_lt(n, 8);
	if (n) {
		KV_OPTIONS(kv_pool_options, what, .name = "more", .model = "small",
			   .layout = small_layout(), .timeout = 500 * KV_MSEC);

		ck_assert_int_lt(kv_pool_open(more[0], &what, &another), 0);
	}
	goes_on(20);
	ck_assert_int_eq(prlimit(daemon_worker(), RLIMIT_NOFILE, &old, NULL), 0);
	another = pool_new(client, "more", 0);
	kv_pool_close(another);
	while (n)
		kv_disconnect(more[--n]);
	end();
}
END_TEST

/* The limit of open files that leaves a process room for @n more. */
static rlim_t room_for(pid_t pid, int n)
{
	char path[64], what[64];
	rlim_t fd = 0;

	for (;; fd++) {
		snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, (int)fd);
		if (readlink(path, what, sizeof(what)) < 0 && !n--)
			return fd;
	}
}

START_TEST(what_the_keeper_has_no_descriptor_for_is_refused_and_a_worker_that_comes_takes_over)
{
	struct rlimit old, limit;
	struct kv_pool *another;
	KV_OPTIONS(kv_pool_options, same, .name = "pool", .model = "small", .timeout = TIMEOUT);
	KV_OPTIONS(kv_pool_options, more, .name = "more", .model = "small", .layout = small_layout(),
		   .timeout = TIMEOUT);

	begin("64M");
	ck_assert_int_eq(prlimit(daemon_pid(), RLIMIT_NOFILE, NULL, &old), 0);
	limit = old;
	limit.rlim_cur = room_for(daemon_pid(), 4); /* a pool has five */
	ck_assert_int_eq(prlimit(daemon_pid(), RLIMIT_NOFILE, &limit, NULL), 0);
	refused(kv_pool_open(client, &more, &another), -EMFILE, "the keeper");
	limit.rlim_cur = room_for(daemon_pid(), 1); /* a session has two */
	ck_assert_int_eq(prlimit(daemon_pid(), RLIMIT_NOFILE, &limit, NULL), 0);
	refused(kv_pool_open(client, &same, &another), -EMFILE, "the keeper");
	goes_on(19);
	daemon_kill_worker();
	goes_on(20);
	ck_assert_uint_eq(daemon_stats(client).n_pools, 1);
	ck_assert_uint_eq(daemon_stats(client).n_sessions, 1);
	ck_assert_int_eq(prlimit(daemon_pid(), RLIMIT_NOFILE, &old, NULL), 0);
	must(kv_pool_open(client, &more, &another));
	daemon_kill_worker();
	must(kv_blocks_take(another, 1, ids + 100, TIMEOUT));
	kv_pool_close(another);
	end();
}
END_TEST

/* ---- interruptions ---- */

static void stops_the_worker(struct process *self, void *arg)
{
	pid_t worker = *(pid_t *)arg;

	process_say(self, 0);
	for (int i = 0; i < 300; i++) {
		kill(worker, SIGSTOP);
		usleep(300);
		kill(worker, SIGCONT);
		usleep(700);
	}
}

static void wake(int signal)
{
	(void)signal;
}

START_TEST(signals_that_interrupt_daemon_and_client_at_any_moment_change_nothing)
{
	const struct sigaction action = {.sa_handler = wake}; /* calls are not made again by libc */
	const struct itimerval often = {{0, 400}, {0, 400}}, never = {{0, 0}, {0, 0}};
	struct process *other;
	pid_t worker;

	begin("8M");
	worker = daemon_worker();
	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &often, NULL);
	other = process_start(stops_the_worker, &worker);
	process_hear(other);
	for (int i = 0; i < 60; i++)
		goes_on(i % 7);
	setitimer(ITIMER_REAL, &never, NULL);
	process_end(other);
	ck_assert_uint_eq(daemon_stats(client).worker_restarts, 0);
	end();
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/machine");
	TCase *tcase = tcase_create("machine");

	tcase_set_timeout(tcase, 60);
	if (getenv("KV_FAULT_LIBRARY")) {
		tcase_add_test(
			tcase,
			a_device_that_reports_errors_is_named_and_its_work_is_done_when_it_works_again);
		tcase_add_test(tcase,
			       io_uring_refused_in_mid_service_costs_a_worker_and_nothing_else);
	}
	tcase_add_test(
		tcase,
		what_the_keeper_has_no_descriptor_for_is_refused_and_a_worker_that_comes_takes_over);
	tcase_add_test(tcase,
		       a_daemon_out_of_descriptors_refuses_what_is_new_and_keeps_what_is_there);
	tcase_add_test(tcase,
		       signals_that_interrupt_daemon_and_client_at_any_moment_change_nothing);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
