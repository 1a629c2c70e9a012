/* SPDX-License-Identifier: Apache-2.0 */
/* daemon/helper.c: helpers that answer, die, hang, and outlive their parent. */
#include <check.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/helper.h"
#include "include/internal/socket.h"
#include "include/kvcached/types.h"

static int count_fds(void)
{
	DIR *dir = opendir("/proc/self/fd");
	int n = 0;

	ck_assert_ptr_nonnull(dir);
	while (readdir(dir))
		n++;
	closedir(dir);
	return n;
}

/* Sends arg's number of memfds, the i-th of i + 1 bytes, and then the answer. */
static void send_files(const struct kv_helper_end *end, const void *arg)
{
	struct kv_helper_reply reply = {.export.bytes = 77};
	int fds[KV_HELPER_MAX_FDS];
	uint32_t n_fds = 0;

	for (uint32_t i = 0; i < *(const uint32_t *)arg; i++) {
		fds[n_fds] = memfd_create("helper", MFD_CLOEXEC);
		if (fds[n_fds] < 0 || ftruncate(fds[n_fds], (off_t)i + 1) < 0)
			_exit(1);
		if (++n_fds < KV_HELPER_MAX_FDS && i + 1 < *(const uint32_t *)arg)
			continue;
		if (kv_helper_send_fds(end, fds, n_fds) < 0)
			_exit(2);
		while (n_fds)
			close(fds[--n_fds]);
	}
	kv_helper_reply(end, 0, &reply);
}

START_TEST(an_answer_comes_with_its_files_in_order)
{
	const uint32_t n = 600; /* more than one packet holds */
	const int n_before = count_fds();
	struct kv_helper_reply reply;
	int fds[600];

	ck_assert_msg(kv_helper_run(send_files, &n, 20 * KV_SEC, fds, n, &reply) == 0, "%s",
		      kv_error_text());
	ck_assert_uint_eq(reply.export.bytes, 77);
	for (uint32_t i = 0; i < n; i++) {
		ck_assert_int_eq(lseek(fds[i], 0, SEEK_END), (off_t)i + 1);
		ck_assert_int_eq(fcntl(fds[i], F_GETFD), FD_CLOEXEC);
		close(fds[i]);
	}
	ck_assert_int_eq(count_fds(), n_before);
	ck_assert_int_eq(waitpid(-1, NULL, WNOHANG), -1); /* no child is left */
}
END_TEST

START_TEST(too_few_files_are_an_error_and_none_stays_open)
{
	const int n_before = count_fds();
	struct kv_helper_reply reply;
	uint32_t n = 3;
	int fds[4];

	ck_assert_int_eq(kv_helper_run(send_files, &n, 20 * KV_SEC, fds, 4, &reply), -EIO);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "sent 3"));
	ck_assert_int_eq(count_fds(), n_before);
	/* Those that nobody expects are closed. */
	ck_assert_int_eq(kv_helper_run(send_files, &n, 20 * KV_SEC, NULL, 0, &reply), 0);
	ck_assert_int_eq(count_fds(), n_before);
}
END_TEST

static void refuse(const struct kv_helper_end *end, const void *arg)
{
	struct kv_helper_reply reply = {0};

	kv_helper_reply(end, kv_error(-ENOTSUP, "colour: %d given", 5), &reply);
}

static void segfault(const struct kv_helper_end *end, const void *arg)
{
	raise(SIGSEGV);
}

static void say_nothing(const struct kv_helper_end *end, const void *arg)
{
}

static void hang(const struct kv_helper_end *end, const void *arg)
{
	pause();
}

static const struct {
	kv_helper_job *job;
	int r;
	const char *text;
} failures[] = {
	{refuse, -ENOTSUP, "colour: 5 given"},
	{segfault, -EIO, "signal 11"},
	{say_nothing, -EIO, "without an answer"},
	{hang, -ETIMEDOUT, "in time"},
};

START_TEST(a_helper_that_fails_costs_nothing_else)
{
	const int n_before = count_fds();
	struct kv_helper_reply reply;
	const int64_t start = kv_now();

	ck_assert_int_eq(kv_helper_run(failures[_i].job, NULL, KV_SEC / 5, NULL, 0, &reply),
			 failures[_i].r);
	ck_assert_msg(strstr(kv_error_text(), failures[_i].text), "%s", kv_error_text());
	ck_assert_int_lt(kv_now() - start, 5 * KV_SEC);
	ck_assert_int_eq(waitpid(-1, NULL, WNOHANG), -1);
	ck_assert_int_eq(count_fds(), n_before);
}
END_TEST

/* Answers with the descriptors it has beside 0..2, in bytes, and stays. */
static void hold(const struct kv_helper_end *end, const void *arg)
{
	struct kv_helper_reply reply = {0};

	kv_helper_close_others(end);
	for (int fd = 3; fd < 1024; fd++)
		reply.export.bytes += fcntl(fd, F_GETFD) >= 0;
	reply.export.owner_pid = getpid();
	kv_helper_reply(end, 0, &reply);
	kv_helper_wait_for_stop(end);
}

START_TEST(a_helper_that_stays_holds_nothing_of_its_parent_and_ends_when_told)
{
	struct kv_helper helper;
	struct kv_helper_reply reply;
	const int64_t start = kv_now();
	int fds[8];

	for (int i = 0; i < 8; i += 2)
		ck_assert_int_eq(pipe(fds + i), 0);
	ck_assert_int_eq(kv_helper_start(hold, NULL, 20 * KV_SEC, &helper), 0);
	ck_assert_int_eq(kv_helper_receive(&helper, 20 * KV_SEC, NULL, 0, &reply), 0);
	ck_assert_uint_le(reply.export.bytes, 2); /* the socket, and perhaps a pidfd */

	/* What ends a whole group must not end it. */
	ck_assert_int_eq(kill(reply.export.owner_pid, SIGTERM), 0);
	ck_assert_int_eq(kill(reply.export.owner_pid, SIGINT), 0);
	usleep(50000);
	ck_assert_int_eq(waitpid(reply.export.owner_pid, NULL, WNOHANG), 0);

	kv_helper_stop(&helper);
	ck_assert_int_eq(kill(reply.export.owner_pid, 0), -1);
	ck_assert_int_lt(kv_now() - start, 5 * KV_SEC);
}
END_TEST

/* If not @closed, a third process keeps the socket's other end open: only the death can tell. */
static void outlive_parent(bool closed)
{
	struct kv_helper helper;
	struct kv_helper_reply reply;
	int pipes[2];
	char c;

	/* The pipe's writing end is in the helper too: it reads empty when both have ended. */
	ck_assert_int_eq(pipe(pipes), 0);
	if (fork() == 0) {
		close(pipes[0]);
		dup2(pipes[1], 1); /* what close_others() leaves */
		close(pipes[1]);
		if (kv_helper_start(hold, NULL, 20 * KV_SEC, &helper) < 0 ||
		    kv_helper_receive(&helper, 20 * KV_SEC, NULL, 0, &reply) < 0)
			_exit(1);
		if (!closed && fork() == 0) {
			close(1);
			sleep(3);
			_exit(0);
		}
		raise(SIGKILL);
	}
	close(pipes[1]);
	ck_assert_int_eq(kv_socket_wait(pipes[0], POLLIN | POLLHUP, kv_now() + 2 * KV_SEC), 0);
	ck_assert_int_eq(read(pipes[0], &c, 1), 0);
	close(pipes[0]);
}

START_TEST(a_helper_that_stays_ends_with_its_parent)
{
	outlive_parent(true);
	outlive_parent(false);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("daemon/helper");
	TCase *tcase = tcase_create("helper");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, an_answer_comes_with_its_files_in_order);
	tcase_add_test(tcase, too_few_files_are_an_error_and_none_stays_open);
	tcase_add_loop_test(tcase, a_helper_that_fails_costs_nothing_else, 0,
			    sizeof(failures) / sizeof(failures[0]));
	tcase_add_test(tcase, a_helper_that_stays_holds_nothing_of_its_parent_and_ends_when_told);
	tcase_add_test(tcase, a_helper_that_stays_ends_with_its_parent);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
