/* SPDX-License-Identifier: Apache-2.0 */
/* daemon/loop.c and its two kinds: test_loop [epoll|io_uring]; every case runs on both. */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "daemon/loop.h"
#include "include/internal/error.h"
#include "include/kvcached/types.h"

static enum kv_loop_kind kind; /* of this run of the suite */
static bool have_uring;

static struct kv_loop *loop;

static int64_t clock_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * KV_SEC + ts.tv_nsec;
}

static void setup(void)
{
	ck_assert_msg(kv_loop_new(kind, &loop) == 0, "%s", kv_error_text());
}

static void teardown(void)
{
	loop = kv_loop_free(loop);
}

static void step(void)
{
	ck_assert_int_eq(kv_loop_step(loop, 0), 0);
}

/* A watched descriptor and what was heard of it. */
struct ear {
	struct kv_watch *watch;
	int fd;
	int n_calls;
	uint32_t events;   /* of the last call */
	bool read_one;	   /* each call takes one message */
	struct ear *frees; /* freed and closed by the call; may be the ear itself */
};

static void ear_close(struct ear *ear)
{
	ear->watch = kv_watch_free(ear->watch);
	if (ear->fd >= 0)
		close(ear->fd);
	ear->fd = -1;
}

static void hear(uint32_t events, void *arg)
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

static void ear_watch(struct ear *ear, uint32_t events)
{
	ck_assert_msg(kv_loop_watch(loop, ear->fd, events, hear, ear, &ear->watch) == 0, "%s",
		      kv_error_text());
}

static void make_pair(int fds[2])
{
	ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds),
			 0);
}

static int make_eventfd(unsigned value)
{
	int fd = eventfd(value, EFD_CLOEXEC | EFD_NONBLOCK);

	ck_assert_int_ge(fd, 0);
	return fd;
}

static void fill(int fd)
{
	char message[4096] = {0};

	while (send(fd, message, sizeof(message), MSG_DONTWAIT) > 0)
		;
	ck_assert_int_eq(errno, EAGAIN);
}

static void drain(int fd)
{
	char message[4096];

	while (read(fd, message, sizeof(message)) > 0)
		;
}

/* Watches */

START_TEST(an_unread_descriptor_is_called_in_every_step)
{
	struct ear ear = {.fd = make_eventfd(0)};
	int i;

	ear_watch(&ear, KV_LOOP_IN);
	step();
	ck_assert_int_eq(ear.n_calls, 0);
	ck_assert_int_eq(eventfd_write(ear.fd, 1), 0);
	for (i = 1; i <= 5; i++) {
		step();
		ck_assert_int_eq(ear.n_calls, i);
		ck_assert_uint_eq(ear.events, KV_LOOP_IN);
	}
	drain(ear.fd);
	step();
	ck_assert_int_eq(ear.n_calls, 5);
	ear_close(&ear);
}
END_TEST

START_TEST(messages_left_unread_are_reported_again_one_by_one)
{
	struct ear ear = {.read_one = true};
	int fds[2];
	int i;

	make_pair(fds);
	ear.fd = fds[0];
	ear_watch(&ear, KV_LOOP_IN);
	step();
	for (i = 0; i < 7; i++)
		ck_assert_int_eq(send(fds[1], "x", 1, 0), 1);
	for (i = 0; i < 20; i++)
		step();
	ck_assert_int_eq(ear.n_calls, 7);
	ear_close(&ear);
	close(fds[1]);
}
END_TEST

START_TEST(a_full_socket_is_writable_when_its_peer_has_read)
{
	struct ear ear = {0};
	int fds[2];

	make_pair(fds);
	ear.fd = fds[0];
	fill(ear.fd);
	ear_watch(&ear, KV_LOOP_OUT);
	step();
	ck_assert_int_eq(ear.n_calls, 0);
	drain(fds[1]);
	step();
	ck_assert_int_eq(ear.n_calls, 1);
	ck_assert_uint_eq(ear.events, KV_LOOP_OUT);
	ear_close(&ear);
	close(fds[1]);
}
END_TEST

START_TEST(readable_and_writable_is_one_call)
{
	struct ear ear = {.fd = make_eventfd(1)};

	ear_watch(&ear, KV_LOOP_IN | KV_LOOP_OUT);
	step();
	ck_assert_int_eq(ear.n_calls, 1);
	ck_assert_uint_eq(ear.events, KV_LOOP_IN | KV_LOOP_OUT);
	ear_close(&ear);
}
END_TEST

START_TEST(changed_events_hold_from_the_next_step)
{
	struct ear ear = {.fd = make_eventfd(0)};
	int i;

	ear_watch(&ear, KV_LOOP_IN);
	step(); /* from here on the kernel knows of it */
	for (i = 1; i <= 3; i++) {
		ck_assert_int_eq(kv_watch_events(ear.watch, KV_LOOP_OUT), 0);
		step();
		ck_assert_int_eq(ear.n_calls, i);
		ck_assert_uint_eq(ear.events, KV_LOOP_OUT);
		ck_assert_int_eq(kv_watch_events(ear.watch, KV_LOOP_IN), 0);
		step();
		step();
		ck_assert_int_eq(ear.n_calls, i);
	}
	/* There and back again before anybody looks. */
	ck_assert_int_eq(kv_watch_events(ear.watch, KV_LOOP_OUT), 0);
	ck_assert_int_eq(kv_watch_events(ear.watch, KV_LOOP_IN), 0);
	ck_assert_int_eq(eventfd_write(ear.fd, 1), 0);
	step();
	ck_assert_int_eq(ear.n_calls, 4);
	ck_assert_uint_eq(ear.events, KV_LOOP_IN);
	ear_close(&ear);
}
END_TEST

START_TEST(a_paused_watch_hears_nothing_until_it_is_resumed)
{
	struct ear ear = {0};
	int fds[2];

	make_pair(fds);
	ear.fd = fds[0];
	ear_watch(&ear, KV_LOOP_IN);
	step();
	ck_assert_int_eq(kv_watch_events(ear.watch, 0), 0);
	ck_assert_int_eq(send(fds[1], "x", 1, 0), 1);
	close(fds[1]);
	step();
	step();
	ck_assert_int_eq(ear.n_calls, 0);
	ck_assert_int_eq(kv_watch_events(ear.watch, KV_LOOP_IN), 0);
	step();
	ck_assert_int_eq(ear.n_calls, 1);
	ck_assert_uint_eq(ear.events, KV_LOOP_IN | KV_LOOP_HUP | KV_LOOP_RDHUP);
	/* Freed while paused. */
	ck_assert_int_eq(kv_watch_events(ear.watch, 0), 0);
	ear_close(&ear);
}
END_TEST

START_TEST(a_hang_up_is_reported_whatever_is_wanted)
{
	static const uint32_t wanted[] = {KV_LOOP_IN, KV_LOOP_OUT};
	struct ear ear = {0};
	int fds[2];
	size_t i;

	for (i = 0; i < 2; i++) {
		make_pair(fds);
		ear.fd = fds[0];
		fill(ear.fd); /* not writable either */
		ear_watch(&ear, wanted[i]);
		step();
		ear.n_calls = 0;

		ck_assert_int_eq(shutdown(fds[1], SHUT_WR), 0);
		step();
		ck_assert_int_eq(ear.n_calls, 1);
		ck_assert_uint_eq(ear.events & ~KV_LOOP_IN, KV_LOOP_RDHUP);

		drain(fds[1]);
		close(fds[1]);
		step();
		ck_assert_int_eq(ear.n_calls, 2);
		ck_assert_uint_eq(ear.events & (KV_LOOP_HUP | KV_LOOP_RDHUP),
				  KV_LOOP_HUP | KV_LOOP_RDHUP);
		ck_assert_uint_eq(ear.events & (KV_LOOP_IN | KV_LOOP_OUT), wanted[i]);
		ear_close(&ear);
	}
}
END_TEST

START_TEST(closing_after_the_free_is_a_hang_up_for_the_peer_at_once)
{
	struct ear ear = {0};
	int fds[2];
	char c;

	make_pair(fds);
	ear.fd = fds[0];
	ear_watch(&ear, KV_LOOP_IN);
	step();
	ear_close(&ear);
	ck_assert_int_eq(recv(fds[1], &c, 1, MSG_DONTWAIT), 0);
	close(fds[1]);
}
END_TEST

START_TEST(a_watch_freed_in_its_own_call_is_not_called_again)
{
	struct ear ear = {.fd = make_eventfd(1), .frees = &ear};
	int fd = dup(ear.fd); /* keeps the event alive */

	ear_watch(&ear, KV_LOOP_IN);
	step();
	step();
	ck_assert_int_eq(ear.n_calls, 1);
	close(fd);
}
END_TEST

START_TEST(a_watch_freed_by_another_of_the_same_batch_is_not_called)
{
	struct ear a = {.fd = make_eventfd(1)};
	struct ear b = {.fd = make_eventfd(1)};
	struct ear c = {.fd = make_eventfd(1)};

	a.frees = &b;
	b.frees = &a;
	ear_watch(&a, KV_LOOP_IN);
	ear_watch(&b, KV_LOOP_IN);
	ear_watch(&c, KV_LOOP_IN);
	step();
	ck_assert_int_eq(a.n_calls + b.n_calls, 1);
	ck_assert_int_eq(c.n_calls, 1);
	step();
	ck_assert_int_eq(a.n_calls + b.n_calls, 2);
	ck_assert_int_eq(c.n_calls, 2);
	ear_close(&a);
	ear_close(&b);
	ear_close(&c);
}
END_TEST

/* In its call: frees another watch and gives that one's number to a descriptor that isn't ready. */
struct swap {
	struct ear ear;
	struct ear *old;
	struct ear *young;
};

static void swap_fds(uint32_t events, void *arg)
{
	struct swap *swap = arg;
	int fd = make_eventfd(0);
	int number = swap->old->fd;

	swap->ear.n_calls++;
	drain(swap->ear.fd);
	ear_close(swap->old);
	swap->young->fd = fcntl(fd, F_DUPFD_CLOEXEC, number);
	ck_assert_int_eq(swap->young->fd, number);
	close(fd);
	ear_watch(swap->young, KV_LOOP_IN);
}

START_TEST(a_new_descriptor_with_an_old_number_hears_nothing_of_the_old)
{
	struct ear old = {.fd = -1}, young = {.fd = -1};
	struct swap swap = {.ear = {.fd = make_eventfd(0)}, .old = &old, .young = &young};
	int i, is_ready, duplicate;

	ck_assert_int_eq(
		kv_loop_watch(loop, swap.ear.fd, KV_LOOP_IN, swap_fds, &swap, &swap.ear.watch), 0);
	for (i = 0; i < 20; i++) {
		is_ready = i % 2; /* in the batch already, or only known to the kernel */
		old = (struct ear){.fd = make_eventfd(0)};
		duplicate = dup(old.fd);
		young = (struct ear){.fd = -1};
		ear_watch(&old, KV_LOOP_IN);
		step();
		ck_assert_int_eq(eventfd_write(swap.ear.fd, 1), 0);
		if (is_ready)
			ck_assert_int_eq(eventfd_write(old.fd, 1), 0);
		step();
		ck_assert_int_eq(swap.ear.n_calls, i + 1);
		ck_assert_int_eq(eventfd_write(duplicate, 1), 0); /* the old one is still alive */
		old.n_calls = 0;
		step();
		step();
		ck_assert_int_eq(young.n_calls, 0);
		ck_assert_int_eq(old.n_calls, 0);
		ck_assert_int_eq(eventfd_write(young.fd, 1), 0);
		step();
		ck_assert_int_eq(young.n_calls, 1);
		ear_close(&young);
		close(duplicate);
	}
	ear_close(&swap.ear);
}
END_TEST

START_TEST(a_descriptor_can_be_watched_anew_after_the_free)
{
	struct ear old = {.fd = make_eventfd(1)};
	struct ear young = {.fd = old.fd};
	int i;

	for (i = 0; i < 10; i++) {
		ear_watch(&old, i % 2 ? KV_LOOP_IN : KV_LOOP_OUT);
		step();
		old.watch = kv_watch_free(old.watch);
		ear_watch(&young, KV_LOOP_IN);
		old.n_calls = 0;
		young.n_calls = 0;
		step();
		ck_assert_int_eq(old.n_calls, 0);
		ck_assert_int_eq(young.n_calls, 1);
		young.watch = kv_watch_free(young.watch);
	}
	close(old.fd);
}
END_TEST

START_TEST(what_cannot_be_watched_is_refused_with_the_reason)
{
	struct ear ear = {.fd = make_eventfd(0)};
	struct kv_watch *watch = NULL;
	int file;

	file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
	ear_watch(&ear, KV_LOOP_IN);
	ck_assert_int_eq(kv_loop_watch(loop, ear.fd, KV_LOOP_IN, hear, &ear, &watch), -EEXIST);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "one already"));
	ck_assert_int_eq(kv_loop_watch(loop, -1, KV_LOOP_IN, hear, &ear, &watch), -EBADF);
	ck_assert_int_eq(kv_loop_watch(loop, 9999, KV_LOOP_IN, hear, &ear, &watch), -EBADF);
	ck_assert_int_eq(kv_loop_watch(loop, file, KV_LOOP_IN, hear, &ear, &watch), -EPERM);
	ck_assert_int_eq(kv_loop_watch(loop, ear.fd, KV_LOOP_HUP, hear, &ear, &watch), -EINVAL);
	ck_assert_int_eq(kv_watch_events(ear.watch, 0x8000), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "0x8000"));
	ck_assert_ptr_null(watch);
	close(file);
	ear_close(&ear);
}
END_TEST

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

/* Timers and tasks: each call notes a number. */

static int notes[4096];
static int n_notes;

struct noter {
	struct kv_timer *timer;
	struct kv_task *task;
	int number;
	int64_t again_ns;    /* > 0: the timer sets itself again */
	int n_queues;	     /* > 0: the task queues itself again */
	struct noter *frees; /* may be itself */
};

static void note(void *arg)
{
	struct noter *noter = arg;

	ck_assert_int_lt(n_notes, 4096);
	notes[n_notes++] = noter->number;
	if (noter->again_ns)
		kv_timer_set(noter->timer, noter->again_ns);
	if (noter->n_queues > 0) {
		noter->n_queues--;
		kv_task_queue(noter->task);
	}
	if (noter->frees) {
		noter->frees->timer = kv_timer_free(noter->frees->timer);
		noter->frees->task = kv_task_free(noter->frees->task);
	}
}

static void make_timer(struct noter *noter, int number)
{
	*noter = (struct noter){.number = number};
	ck_assert_int_eq(kv_timer_new(loop, note, noter, &noter->timer), 0);
}

static void make_task(struct noter *noter, int number)
{
	*noter = (struct noter){.number = number};
	ck_assert_int_eq(kv_task_new(loop, note, noter, &noter->task), 0);
}

/* Steps until @n notes are there, or for 10 s. */
static void step_until(int n)
{
	int64_t end_ns = clock_ns() + 10 * KV_SEC;

	while (n_notes < n && clock_ns() < end_ns)
		ck_assert_int_eq(kv_loop_step(loop, KV_SEC), 0);
	ck_assert_int_ge(n_notes, n);
}

START_TEST(timers_are_called_in_order_and_never_early)
{
	static const int delay_ms[] = {30, 10, 20, 10, 0};
	static const int order[] = {4, 1, 3, 2, 0};
	struct noter noters[5];
	int64_t start_ns;
	int i;

	start_ns = clock_ns();
	for (i = 0; i < 5; i++) {
		make_timer(&noters[i], i);
		kv_timer_set(noters[i].timer, delay_ms[i] * KV_MSEC);
	}
	for (i = 0; i < 5; i++) {
		step_until(i + 1);
		ck_assert_int_eq(notes[i], order[i]);
		ck_assert_int_ge(kv_loop_now(loop) - start_ns, delay_ms[order[i]] * KV_MSEC);
	}
	step();
	ck_assert_int_eq(n_notes, 5);
	for (i = 0; i < 5; i++)
		kv_timer_free(noters[i].timer);
}
END_TEST

START_TEST(a_timer_set_again_forgets_the_time_before)
{
	struct noter a, b, never;

	make_timer(&a, 1);
	make_timer(&b, 2);
	make_timer(&never, 3);
	kv_timer_set(a.timer, 0);
	kv_timer_set(never.timer, 0);
	kv_timer_set(b.timer, 5 * KV_MSEC);
	kv_timer_set(a.timer, 10 * KV_MSEC);
	kv_timer_set(never.timer, -1);
	step_until(2);
	ck_assert_int_eq(notes[0], 2);
	ck_assert_int_eq(notes[1], 1);
	kv_timer_set(never.timer, INT64_MAX); /* no overflow into the past */
	step();
	ck_assert_int_eq(n_notes, 2);
	kv_timer_free(a.timer);
	kv_timer_free(b.timer);
	kv_timer_free(never.timer);
}
END_TEST

START_TEST(timers_may_be_freed_in_calls)
{
	struct noter a, b, c;

	make_timer(&a, 1);
	make_timer(&b, 2);
	make_timer(&c, 3);
	a.frees = &b; /* due in the same iteration */
	c.frees = &c;
	kv_timer_set(a.timer, 0);
	kv_timer_set(b.timer, 0);
	kv_timer_set(c.timer, 0);
	step();
	step();
	ck_assert_int_eq(n_notes, 2);
	ck_assert_int_eq(notes[0], 1);
	ck_assert_int_eq(notes[1], 3);
	kv_timer_free(a.timer);
}
END_TEST

START_TEST(a_timer_that_sets_itself_lets_others_run)
{
	struct ear ear = {.fd = make_eventfd(1)};
	struct noter noter;
	int i;

	make_timer(&noter, 1);
	noter.again_ns = 1;
	kv_timer_set(noter.timer, 0);
	ear_watch(&ear, KV_LOOP_IN);
	for (i = 1; i <= 10; i++) {
		step_until(i);
		ck_assert_int_eq(ear.n_calls >= i, 1);
	}
	kv_timer_free(noter.timer);
	ear_close(&ear);
}
END_TEST

START_TEST(a_thousand_random_timers_come_in_the_order_of_their_times)
{
	static struct noter noters[1000];
	static int delay_us[1000];
	int i, k, n = 0;

	srand(11);
	for (i = 0; i < 1000; i++)
		make_timer(&noters[i], i);
	for (k = 0; k < 5000; k++) {
		i = rand() % 1000;
		/* Far enough apart that the time it takes to set them doesn't count. */
		delay_us[i] = rand() % 4 ? 200000 + rand() % 8 * 50000 : -1;
		kv_timer_set(noters[i].timer, delay_us[i] < 0 ? -1 : delay_us[i] * (int64_t)1000);
		if (rand() % 8 == 0) {
			kv_timer_free(noters[i].timer);
			make_timer(&noters[i], i);
			delay_us[i] = -1;
		}
	}
	for (i = 0; i < 1000; i++)
		n += delay_us[i] > 0;
	step_until(n);
	ck_assert_int_eq(n_notes, n);
	for (i = 1; i < n; i++)
		ck_assert_int_le(delay_us[notes[i - 1]], delay_us[notes[i]]);
	for (i = 0; i < 1000; i++)
		kv_timer_free(noters[i].timer);
}
END_TEST

START_TEST(a_task_queued_often_runs_once)
{
	struct noter a, b, freed;
	int64_t start_ns;

	make_task(&a, 1);
	make_task(&b, 2);
	make_task(&freed, 3);
	kv_task_queue(a.task);
	kv_task_queue(freed.task);
	kv_task_queue(b.task);
	kv_task_queue(a.task);
	kv_task_free(freed.task);
	start_ns = clock_ns();
	ck_assert_int_eq(kv_loop_step(loop, 10 * KV_SEC), 0);
	ck_assert_int_lt(clock_ns() - start_ns, 5 * KV_SEC);
	step();
	ck_assert_int_eq(n_notes, 2);
	ck_assert_int_eq(notes[0], 1);
	ck_assert_int_eq(notes[1], 2);
	kv_task_free(a.task);
	kv_task_free(b.task);
}
END_TEST

START_TEST(tasks_may_queue_themselves_and_free_each_other)
{
	struct noter again, a, b;

	make_task(&again, 1);
	make_task(&a, 2);
	make_task(&b, 3);
	again.n_queues = 2;
	a.frees = &b;
	kv_task_queue(again.task);
	kv_task_queue(a.task);
	kv_task_queue(b.task);
	ck_assert_int_eq(kv_loop_step(loop, 10 * KV_SEC), 0);
	ck_assert_int_eq(n_notes, 2);
	ck_assert_int_eq(kv_loop_step(loop, 10 * KV_SEC), 0);
	ck_assert_int_eq(kv_loop_step(loop, 10 * KV_SEC), 0);
	ck_assert_int_eq(n_notes, 4);
	step();
	ck_assert_int_eq(n_notes, 4);
	kv_task_free(again.task);
	kv_task_free(a.task);
}
END_TEST

static void stop_and_queue(uint32_t events, void *arg)
{
	kv_loop_stop(loop);
	kv_task_queue(arg);
}

START_TEST(stopping_finishes_the_iteration)
{
	struct ear a = {.fd = make_eventfd(1)}, b = {.fd = make_eventfd(1)};
	struct noter noter;

	make_task(&noter, 1);
	ck_assert_int_eq(
		kv_loop_watch(loop, a.fd, KV_LOOP_IN, stop_and_queue, noter.task, &a.watch), 0);
	ear_watch(&b, KV_LOOP_IN);
	ck_assert_int_eq(kv_loop_run(loop), 0);
	ck_assert_int_eq(b.n_calls, 1);
	ck_assert_int_eq(n_notes, 1);
	ck_assert_int_eq(kv_loop_run(loop), 0); /* and can be run again */
	ck_assert_int_eq(b.n_calls, 2);
	kv_task_free(noter.task);
	ear_close(&a);
	ear_close(&b);
}
END_TEST

/* Signals */

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

/* Costs */

static int64_t cpu_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
	return ts.tv_sec * KV_SEC + ts.tv_nsec;
}

START_TEST(an_idle_loop_takes_no_processor_time)
{
	struct ear ears[100];
	int64_t start_ns, used_ns;
	int i;

	for (i = 0; i < 100; i++) {
		ears[i] = (struct ear){.fd = make_eventfd(0)};
		ear_watch(&ears[i], KV_LOOP_IN);
	}
	step();
	start_ns = clock_ns();
	used_ns = cpu_ns();
	while (clock_ns() - start_ns < 500 * KV_MSEC)
		ck_assert_int_eq(kv_loop_step(loop, 500 * KV_MSEC), 0);
	ck_assert_int_lt(cpu_ns() - used_ns, 10 * KV_MSEC);
	for (i = 0; i < 100; i++)
		ear_close(&ears[i]);
}
END_TEST

/* Counts what the loop asks of the heap (linked with --wrap). */
static long n_allocations;

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t size);

void *__wrap_malloc(size_t size)
{
	n_allocations++;
	return __real_malloc(size);
}

void *__wrap_calloc(size_t n, size_t size)
{
	n_allocations++;
	return __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t size)
{
	n_allocations++;
	return __real_realloc(p, size);
}

static void hear_only(uint32_t events, void *arg)
{
	struct noter *noter = arg;

	n_notes++;
	kv_timer_set(noter->timer, n_notes % 3 ? KV_SEC : -1);
	kv_task_queue(noter->task);
}

static void do_nothing(void *arg)
{
}

START_TEST(events_timers_and_tasks_allocate_nothing)
{
	struct kv_watch *watches[50];
	struct noter noter = {0};
	long before;
	int i;

	before = n_allocations;
	ck_assert_int_eq(kv_timer_new(loop, do_nothing, NULL, &noter.timer), 0);
	ck_assert_int_gt(n_allocations, before); /* the count counts */
	ck_assert_int_eq(kv_task_new(loop, do_nothing, NULL, &noter.task), 0);
	for (i = 0; i < 50; i++)
		ck_assert_int_eq(kv_loop_watch(loop, make_eventfd(1), KV_LOOP_IN, hear_only, &noter,
					       &watches[i]),
				 0);
	before = n_allocations;
	for (i = 0; i < 1000; i++)
		kv_loop_step(loop, 0); /* no ck_assert here: it allocates */
	before = n_allocations - before;
	ck_assert_int_eq(n_notes, 50000);
	ck_assert_int_eq(before, 0);
	for (i = 0; i < 50; i++)
		kv_watch_free(watches[i]);
	kv_timer_free(noter.timer);
	kv_task_free(noter.task);
}
END_TEST

/* The choice */

START_TEST(a_kind_asked_for_is_taken)
{
	ck_assert_str_eq(kv_loop_name(loop), kind == KV_LOOP_EPOLL ? "epoll" : "io_uring");
	ck_assert_str_eq(kv_loop_why(loop), "asked for");
	ck_assert_int_eq(kv_loop_kind_parse(kv_loop_name(loop)), (int)kind);
}
END_TEST

START_TEST(kinds_have_names)
{
	ck_assert_int_eq(kv_loop_kind_parse("auto"), KV_LOOP_AUTO);
	ck_assert_int_eq(kv_loop_kind_parse("select"), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "'select'"));
	ck_assert_int_eq(kv_loop_new(7, &loop), -EINVAL);
}
END_TEST

/* What container profiles do: the call fails with @error. For the rest of the process. */
static void refuse(int call, int error)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)call, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {.len = 4, .filter = code};

	ck_assert_int_eq(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
	ck_assert_int_eq(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

static const struct {
	int call;
	int error;
	const char *reason;
} refusals[] = {
	{SYS_io_uring_setup, EPERM, "io_uring_setup: Operation not permitted"},
	{SYS_io_uring_setup, ENOSYS, "io_uring_setup: Function not implemented"},
	{SYS_io_uring_setup, EINVAL, "io_uring_setup: Invalid argument"},
	{SYS_io_uring_enter, EPERM, "io_uring_enter: Operation not permitted"},
};

START_TEST(where_io_uring_is_refused_auto_takes_epoll_and_says_why)
{
	struct ear ear = {.fd = make_eventfd(1)};

	refuse(refusals[_i].call, refusals[_i].error);

	ck_assert_int_lt(kv_loop_new(KV_LOOP_IO_URING, &loop), 0);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "io_uring refused"));

	ck_assert_int_eq(kv_loop_new(KV_LOOP_AUTO, &loop), 0);
	ck_assert_str_eq(kv_loop_name(loop), "epoll");
	/* Without io_uring on this machine at all the first call fails, whatever is refused. */
	if (have_uring)
		ck_assert_msg(strstr(kv_loop_why(loop), refusals[_i].reason), "%s",
			      kv_loop_why(loop));
	ear_watch(&ear, KV_LOOP_IN);
	step();
	ck_assert_int_eq(ear.n_calls, 1);
	ear_close(&ear);
	teardown();
}
END_TEST

START_TEST(auto_takes_io_uring_where_it_works)
{
	ck_assert_int_eq(kv_loop_new(KV_LOOP_AUTO, &loop), 0);
	ck_assert_str_eq(kv_loop_name(loop), have_uring ? "io_uring" : "epoll");
	teardown();
}
END_TEST

static Suite *kind_suite(void)
{
	Suite *suite =
		suite_create(kind == KV_LOOP_EPOLL ? "daemon/loop epoll" : "daemon/loop io_uring");
	TCase *tcase = tcase_create("kind");

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, an_unread_descriptor_is_called_in_every_step);
	tcase_add_test(tcase, messages_left_unread_are_reported_again_one_by_one);
	tcase_add_test(tcase, a_full_socket_is_writable_when_its_peer_has_read);
	tcase_add_test(tcase, readable_and_writable_is_one_call);
	tcase_add_test(tcase, changed_events_hold_from_the_next_step);
	tcase_add_test(tcase, a_paused_watch_hears_nothing_until_it_is_resumed);
	tcase_add_test(tcase, a_hang_up_is_reported_whatever_is_wanted);
	tcase_add_test(tcase, closing_after_the_free_is_a_hang_up_for_the_peer_at_once);
	tcase_add_test(tcase, a_watch_freed_in_its_own_call_is_not_called_again);
	tcase_add_test(tcase, a_watch_freed_by_another_of_the_same_batch_is_not_called);
	tcase_add_test(tcase, a_new_descriptor_with_an_old_number_hears_nothing_of_the_old);
	tcase_add_test(tcase, a_descriptor_can_be_watched_anew_after_the_free);
	tcase_add_test(tcase, what_cannot_be_watched_is_refused_with_the_reason);
	tcase_add_test(tcase, ten_thousand_watches_are_all_served);
	tcase_add_test(tcase, a_process_that_dies_is_seen_through_its_pidfd);
	tcase_add_test(tcase, no_wake_up_is_missed_in_a_conversation);
	tcase_add_test(tcase, a_random_walk_agrees_with_poll);
	tcase_add_test(tcase, timers_are_called_in_order_and_never_early);
	tcase_add_test(tcase, a_timer_set_again_forgets_the_time_before);
	tcase_add_test(tcase, timers_may_be_freed_in_calls);
	tcase_add_test(tcase, a_timer_that_sets_itself_lets_others_run);
	tcase_add_test(tcase, a_thousand_random_timers_come_in_the_order_of_their_times);
	tcase_add_test(tcase, a_task_queued_often_runs_once);
	tcase_add_test(tcase, tasks_may_queue_themselves_and_free_each_other);
	tcase_add_test(tcase, stopping_finishes_the_iteration);
	tcase_add_test(tcase, signals_come_as_events);
	tcase_add_test(tcase, an_idle_loop_takes_no_processor_time);
	tcase_add_test(tcase, events_timers_and_tasks_allocate_nothing);
	tcase_add_test(tcase, a_kind_asked_for_is_taken);
	suite_add_tcase(suite, tcase);
	return suite;
}

static Suite *choice_suite(void)
{
	Suite *suite = suite_create("daemon/loop choice");
	TCase *tcase = tcase_create("choice");

	tcase_add_test(tcase, kinds_have_names);
	tcase_add_loop_test(tcase, where_io_uring_is_refused_auto_takes_epoll_and_says_why, 0,
			    (int)(sizeof(refusals) / sizeof(refusals[0])));
	tcase_add_test(tcase, auto_takes_io_uring_where_it_works);
	suite_add_tcase(suite, tcase);
	return suite;
}

static int run(Suite *suite)
{
	SRunner *runner = srunner_create(suite);
	int n_failed;

	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed;
}

int main(int argc, char **argv)
{
	int n_failed;

	have_uring = kv_loop_new(KV_LOOP_IO_URING, &loop) == 0;
	loop = kv_loop_free(loop);
	kind = argc > 1 ? kv_loop_kind_parse(argv[1]) : KV_LOOP_EPOLL;
	if (kind == KV_LOOP_IO_URING && !have_uring) {
		fprintf(stderr, "%s\n", kv_error_text());
		return 77;
	}

	n_failed = run(choice_suite());
	n_failed += run(kind_suite());
	return n_failed ? 1 : 0;
}
