/* SPDX-License-Identifier: Apache-2.0 */
/* daemon/loop.c: what a watch hears, and when. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/daemon/loop_case.h"

static void fill(int fd)
{
	char message[4096] = {0};

	while (send(fd, message, sizeof(message), MSG_DONTWAIT) > 0)
		;
	ck_assert_int_eq(errno, EAGAIN);
}

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

int main(int argc, char **argv)
{
	TCase *tcase = tcase_create("kind");

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
	return loop_main(argc, argv, tcase);
}
