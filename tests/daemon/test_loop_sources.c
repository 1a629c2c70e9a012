/* SPDX-License-Identifier: Apache-2.0 */
/* daemon/loop.c: many descriptors at once, processes, conversations, signals, a random walk. */
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/daemon/loop_case.h"

/* Sets the soft limit of descriptors to the hard one; how many watches of @n fit. */
static int make_room_for(int n)
{
	struct rlimit limit;

	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = limit.rlim_max;
	setrlimit(RLIMIT_NOFILE, &limit);
	return limit.rlim_cur < (rlim_t)n + 100 ? (int)limit.rlim_cur - 100 : n;
}

static struct ear *many;
static int n_many;

static void free_many(uint32_t events, void *arg)
{
	int i;

	for (i = 0; i < n_many; i++)
		ear_close(&many[i]);
}

START_TEST(ten_thousand_watches_are_all_served)
{
	struct ear freer = {.fd = make_eventfd(0)};
	int i, n_steps;

	n_many = make_room_for(10000);
	ck_assert_int_ge(n_many, 2000);
	many = calloc((size_t)n_many, sizeof(*many));
	for (i = 0; i < n_many; i++) {
		many[i].fd = make_eventfd(0);
		ear_watch(&many[i], KV_LOOP_IN);
	}
	step();

	/* One of many. */
	ck_assert_int_eq(eventfd_write(many[n_many / 2].fd, 1), 0);
	step();
	ck_assert_int_eq(many[n_many / 2].n_calls, 1);
	drain(many[n_many / 2].fd);
	many[n_many / 2].n_calls = 0;

	/* All at once, and all again: each gets its turn. */
	for (i = 0; i < n_many; i++)
		ck_assert_int_eq(eventfd_write(many[i].fd, 1), 0);
	for (n_steps = 0; n_steps < 200; n_steps++)
		step();
	for (i = 0; i < n_many; i++) {
		ck_assert_int_ge(many[i].n_calls, 4);
		drain(many[i].fd);
		many[i].n_calls = 0;
	}
	step();
	for (i = 0; i < n_many; i++)
		ck_assert_int_eq(many[i].n_calls, 0);

	/* Freed in one call, with the kernel waiting for all of them. */
	ck_assert_int_eq(kv_loop_watch(loop, freer.fd, KV_LOOP_OUT, free_many, NULL, &freer.watch),
			 0);
	step();
	ck_assert_int_eq(many[0].fd, -1);
	ear_close(&freer);
	free(many);
}
END_TEST

START_TEST(a_process_that_dies_is_seen_through_its_pidfd)
{
	struct ear ear = {0};
	pid_t pid;

	pid = fork();
	if (pid == 0) {
		pause();
		_exit(0);
	}
	ear.fd = (int)syscall(SYS_pidfd_open, pid, 0);
	ck_assert_int_ge(ear.fd, 0);
	ear_watch(&ear, KV_LOOP_IN);
	step();
	ck_assert_int_eq(ear.n_calls, 0);
	ck_assert_int_eq(kill(pid, SIGKILL), 0);
	ck_assert_int_eq(kv_loop_step(loop, 10 * KV_SEC), 0);
	ck_assert_int_eq(ear.n_calls, 1);
	ck_assert_uint_eq(ear.events & KV_LOOP_IN, KV_LOOP_IN);
	ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
	step();
	ck_assert_int_eq(ear.n_calls, 2);
	ear_close(&ear);
}
END_TEST

#define N_ROUNDS 3000

static void *echo(void *arg)
{
	int fd = *(int *)arg;
	char c;

	while (recv(fd, &c, 1, 0) == 1 && send(fd, &c, 1, 0) == 1)
		;
	return NULL;
}

static void answer(uint32_t events, void *arg)
{
	struct ear *ear = arg;
	char c;

	if (recv(ear->fd, &c, 1, MSG_DONTWAIT) != 1)
		return;
	if (++ear->n_calls == N_ROUNDS)
		kv_loop_stop(loop);
	else
		ck_assert_int_eq(send(ear->fd, &c, 1, 0), 1);
}

START_TEST(no_wake_up_is_missed_in_a_conversation)
{
	struct ear ear = {0};
	pthread_t thread;
	int fds[2];

	make_pair(fds);
	ck_assert_int_eq(fcntl(fds[1], F_SETFL, 0), 0);
	ear.fd = fds[0];
	ck_assert_int_eq(kv_loop_watch(loop, ear.fd, KV_LOOP_IN, answer, &ear, &ear.watch), 0);
	ck_assert_int_eq(pthread_create(&thread, NULL, echo, &fds[1]), 0);
	ck_assert_int_eq(send(ear.fd, "x", 1, 0), 1);
	ck_assert_int_eq(kv_loop_run(loop), 0);
	ck_assert_int_eq(ear.n_calls, N_ROUNDS);
	ear_close(&ear);
	pthread_join(thread, NULL);
	close(fds[1]);
}
END_TEST

/*
 * A random walk against poll(2): whatever was done, two steps call exactly the watches that poll
 * calls ready, each at least once. (One step isn't enough where io_uring first has to take back a
 * request for other events.)
 */
#define N_WALK 24

static void walk_open(struct ear *ear, int *peer)
{
	int fds[2];

	make_pair(fds);
	*ear = (struct ear){.fd = fds[0]};
	*peer = fds[1];
	ear_watch(ear, (uint32_t)(rand() % 4) & 1 ? KV_LOOP_IN : KV_LOOP_IN | KV_LOOP_OUT);
}

START_TEST(a_random_walk_agrees_with_poll)
{
	static const uint32_t events_of[] = {0, KV_LOOP_IN, KV_LOOP_OUT, KV_LOOP_IN | KV_LOOP_OUT};
	struct ear ears[N_WALK];
	uint32_t events[N_WALK];
	int peers[N_WALK];
	struct pollfd fd;
	int i, k, n;

	srand(7);
	for (i = 0; i < N_WALK; i++) {
		walk_open(&ears[i], &peers[i]);
		events[i] = KV_LOOP_IN;
		ck_assert_int_eq(kv_watch_events(ears[i].watch, events[i]), 0);
	}
	for (n = 0; n < 4000; n++) {
		for (k = rand() % 6; k > 0; k--) {
			i = rand() % N_WALK;
			switch (rand() % 8) {
			case 0:
			case 1:
				if (peers[i] >= 0)
					send(peers[i], "x", 1, MSG_DONTWAIT);
				break;
			case 2:
				drain(ears[i].fd);
				break;
			case 3:
				events[i] = events_of[rand() % 4];
				ck_assert_int_eq(kv_watch_events(ears[i].watch, events[i]), 0);
				break;
			case 4:
				send(ears[i].fd, "y", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
				break;
			case 5:
				if (peers[i] >= 0)
					drain(peers[i]);
				break;
			case 6: /* the watch goes, the descriptor stays */
				ears[i].watch = kv_watch_free(ears[i].watch);
				ear_watch(&ears[i], events[i]);
				break;
			case 7: /* the peer dies; then both go, and the numbers come again */
				if (peers[i] >= 0) {
					close(peers[i]);
					peers[i] = -1;
					break;
				}
				ear_close(&ears[i]);
				walk_open(&ears[i], &peers[i]);
				events[i] = KV_LOOP_OUT;
				ck_assert_int_eq(kv_watch_events(ears[i].watch, events[i]), 0);
				break;
			}
		}
		for (i = 0; i < N_WALK; i++)
			ears[i].n_calls = 0;
		step();
		step();
		for (i = 0; i < N_WALK; i++) {
			fd = (struct pollfd){.fd = ears[i].fd,
					     .events = (short)(events[i] | POLLRDHUP)};
			ck_assert_int_ge(poll(&fd, 1, 0), 0);
			if (!events[i])
				fd.revents = 0;
			ck_assert_msg(
				ears[i].n_calls <= 2 && !ears[i].n_calls == !fd.revents,
				"round %d: watch %d (events %#x) called %d times, poll says %#x", n,
				i, events[i], ears[i].n_calls, fd.revents);
			if (fd.revents)
				ck_assert_uint_eq(ears[i].events, (uint32_t)fd.revents);
		}
	}
	for (i = 0; i < N_WALK; i++) {
		ear_close(&ears[i]);
		close(peers[i]);
	}
}
END_TEST

static struct kv_signals *signals;
static int n_signals[65];

static void on_signal(const struct signalfd_siginfo *info, void *arg)
{
	n_signals[info->ssi_signo]++;
	ck_assert_int_eq((pid_t)info->ssi_pid, getpid());
	if (info->ssi_signo == SIGTERM)
		signals = kv_signals_free(signals);
}

START_TEST(signals_come_as_events)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigaddset(&set, SIGHUP);
	sigaddset(&set, SIGTERM);
	ck_assert_int_eq(kv_loop_signals(loop, &set, on_signal, NULL, &signals), 0);
	step();
	ck_assert_int_eq(kill(getpid(), SIGHUP), 0);
	ck_assert_int_eq(kill(getpid(), SIGUSR1), 0);
	ck_assert_int_eq(kv_loop_step(loop, KV_SEC), 0);
	ck_assert_int_eq(kv_loop_step(loop, KV_SEC), 0);
	step();
	ck_assert_int_eq(n_signals[SIGHUP], 1);
	ck_assert_int_eq(n_signals[SIGUSR1], 1);
	ck_assert_int_eq(kill(getpid(), SIGTERM), 0);
	ck_assert_int_eq(kv_loop_step(loop, KV_SEC), 0);
	ck_assert_int_eq(n_signals[SIGTERM], 1);
	ck_assert_ptr_null(signals);
	ck_assert_int_eq(kill(getpid(), SIGHUP), 0); /* still blocked */
	step();
	ck_assert_int_eq(n_signals[SIGHUP], 1);
}
END_TEST

int main(int argc, char **argv)
{
	TCase *tcase = tcase_create("kind");

	tcase_add_test(tcase, ten_thousand_watches_are_all_served);
	tcase_add_test(tcase, a_process_that_dies_is_seen_through_its_pidfd);
	tcase_add_test(tcase, no_wake_up_is_missed_in_a_conversation);
	tcase_add_test(tcase, a_random_walk_agrees_with_poll);
	tcase_add_test(tcase, signals_come_as_events);
	return loop_main(argc, argv, tcase);
}
