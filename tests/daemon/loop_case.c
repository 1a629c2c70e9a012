/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "tests/daemon/loop_case.h"

enum kv_loop_kind kind;
bool have_uring;
struct kv_loop *loop;

int64_t clock_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * KV_SEC + ts.tv_nsec;
}

void setup(void)
{
	ck_assert_msg(kv_loop_new(kind, &loop) == 0, "%s", kv_error_text());
}

void teardown(void)
{
	loop = kv_loop_free(loop);
}

void step(void)
{
	ck_assert_int_eq(kv_loop_step(loop, 0), 0);
}

void ear_close(struct ear *ear)
{
	ear->watch = kv_watch_free(ear->watch);
	if (ear->fd >= 0)
		close(ear->fd);
	ear->fd = -1;
}

void hear(uint32_t events, void *arg)
{
	struct ear *ear = arg;
	char buf[64];

	ear->n_calls++;
	ear->events = events;
	if (ear->read_one)
		ck_assert_int_ge(read(ear->fd, buf, sizeof(buf)), 0);
	if (ear->frees)
		ear_close(ear->frees);
}

void ear_watch(struct ear *ear, uint32_t events)
{
	ck_assert_msg(kv_loop_watch(loop, ear->fd, events, hear, ear, &ear->watch) == 0, "%s",
		      kv_error_text());
}

int make_eventfd(unsigned value)
{
	int fd = eventfd(value, EFD_CLOEXEC | EFD_NONBLOCK);

	ck_assert_int_ge(fd, 0);
	return fd;
}

void make_pair(int fds[2])
{
	ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds),
			 0);
}

void drain(int fd)
{
	char message[4096];

	while (read(fd, message, sizeof(message)) > 0)
		;
}

int loop_main(int argc, char **argv, TCase *tcase)
{
	Suite *suite;
	SRunner *runner;
	int n_failed;

	have_uring = kv_loop_new(KV_LOOP_IO_URING, &loop) == 0;
	loop = kv_loop_free(loop);
	kind = argc > 1 ? kv_loop_kind_parse(argv[1]) : KV_LOOP_EPOLL;
	if (kind == KV_LOOP_IO_URING && !have_uring) {
		fprintf(stderr, "%s\n", kv_error_text());
		return 77;
	}

	suite = suite_create(kind == KV_LOOP_EPOLL ? "daemon/loop epoll" : "daemon/loop io_uring");
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_set_timeout(tcase, 60);
	suite_add_tcase(suite, tcase);
	runner = srunner_create(suite);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
