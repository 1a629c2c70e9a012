/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Each call of one kind that a whole session causes fails once, the first, the second, and so on to
 * the last; and then the same with all that come after it failing, too. Daemon and library are in
 * this process (tests/fuzz/inside.h). The session may be refused or cut off. Nothing crashes or
 * hangs, another client doesn't notice, the books balance, no descriptor stays open; under a
 * sanitizer, no memory either.
 */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "include/internal/error.h"
#include "libclient/internal.h"
#include "tests/fuzz/inside.h"
#include "tests/support/expect.h"

#define BLOCK_TOKENS 16
#define N_HONEST     20

/* ---- calls that fail ---- */

enum call {
	MALLOC,
	MEMFD,
	FTRUNCATE,
	MMAP,
	GETRANDOM,
	EPOLL,
	SOCKET,
	SEND,
	RECEIVE,
	WAIT,
	N_CALLS
};

static struct {
	bool armed;
	enum inside_who whose;
	enum call call;
	int error;
	bool after; /* all after the n-th, too */
	int left;   /* until the n-th */
	int n_failed;
	bool every_second; /* a storm: no n-th */
	unsigned n_storm;
} fault;

static bool fails(enum call call)
{
	if (!fault.armed || fault.call != call || fault.whose != inside_runs)
		return false;
	if (fault.every_second ? fault.n_storm++ % 2 : fault.left-- > 0)
		return false;
	if (!fault.every_second && !fault.after && fault.n_failed)
		return false;
	fault.n_failed++;
	errno = fault.error;
	return true;
}

/* What the linker puts in place of name() (--wrap). */
#define FAULTY(type, name, call, failure, parameters, arguments)          \
	type __real_##name parameters;                                    \
	type __wrap_##name parameters;                                    \
	type __wrap_##name parameters                                     \
	{                                                                 \
		return fails(call) ? (failure) : __real_##name arguments; \
	}

FAULTY(void *, malloc, MALLOC, NULL, (size_t n), (n))
FAULTY(void *, calloc, MALLOC, NULL, (size_t n, size_t size), (n, size))
FAULTY(void *, realloc, MALLOC, NULL, (void *p, size_t n), (p, n))
FAULTY(int, memfd_create, MEMFD, -1, (const char *name, unsigned flags), (name, flags))
FAULTY(int, ftruncate, FTRUNCATE, -1, (int fd, off_t n), (fd, n))
FAULTY(int, ftruncate64, FTRUNCATE, -1, (int fd, off_t n), (fd, n))
FAULTY(void *, mmap, MMAP, MAP_FAILED,
       (void *at, size_t n, int protection, int flags, int fd, off_t offset),
       (at, n, protection, flags, fd, offset))
FAULTY(void *, mmap64, MMAP, MAP_FAILED,
       (void *at, size_t n, int protection, int flags, int fd, off_t offset),
       (at, n, protection, flags, fd, offset))
FAULTY(ssize_t, getrandom, GETRANDOM, -1, (void *p, size_t n, unsigned flags), (p, n, flags))
FAULTY(int, socket, SOCKET, -1, (int domain, int type, int protocol), (domain, type, protocol))
FAULTY(ssize_t, recvmsg, RECEIVE, -1, (int fd, struct msghdr *msg, int flags), (fd, msg, flags))
FAULTY(int, epoll_wait, WAIT, -1, (int fd, struct epoll_event *events, int n, int timeout),
       (fd, events, n, timeout))

/* To the keeper it is tried until it works (daemon/keeping.c). */
ssize_t __real_sendmsg(int fd, const struct msghdr *msg, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *msg, int flags);

ssize_t __wrap_sendmsg(int fd, const struct msghdr *msg, int flags)
{
	return !inside_is_keeper(fd) && fails(SEND) ? -1 : __real_sendmsg(fd, msg, flags);
}

/* Taking a descriptor out of the set can't fail. */
int __real_epoll_ctl(int fd, int op, int what, struct epoll_event *event);
int __wrap_epoll_ctl(int fd, int op, int what, struct epoll_event *event);

int __wrap_epoll_ctl(int fd, int op, int what, struct epoll_event *event)
{
	return op != EPOLL_CTL_DEL && fails(EPOLL) ? -1 : __real_epoll_ctl(fd, op, what, event);
}

/* ---- the library's way to the daemon ---- */

int __wrap_connect(int fd, const struct sockaddr *address, socklen_t size);
int __wrap_kv_socket_wait(int fd, short events, int64_t deadline_ns);

int __wrap_connect(int fd, const struct sockaddr *address, socklen_t size)
{
	uint64_t peer;
	int end = inside_connect(&peer);

	expect(dup3(end, fd, O_CLOEXEC) == fd, "dup3");
	close(end);
	return 0;
}

int __wrap_kv_socket_wait(int fd, short events, int64_t deadline_ns)
{
	int64_t pause = KV_MSEC;

	for (;; pause *= 2) {
		struct pollfd p = {.fd = fd, .events = events};

		inside_step();
		if (poll(&p, 1, 0) > 0)
			return 0;
		if (kv_now() >= deadline_ns)
			return -ETIMEDOUT;
		inside_zero(false);
		inside_advance(pause);
	}
}

/* ---- sessions ---- */

static int connect_as(const char *name, struct kv_client **ret)
{
	KV_OPTIONS(kv_connect_options, how, .socket = "/", .name = name);

	return kv_connect(&how, ret);
}

static int open_pool(struct kv_client *client, const char *name, struct kv_pool **ret)
{
	static const struct kv_component components[] = {{0, KV_ROLE_K, KV_F32, 1, 16, 1, 0, 0},
							 {0, KV_ROLE_V, KV_F32, 1, 16, 1, 0, 0}};
	static const struct kv_layout layout = {KV_LAYOUT_FLAT, 0, BLOCK_TOKENS, 2, components};
	KV_OPTIONS(kv_pool_options, what, .name = name, .layout = &layout, .max_bytes = 1 << 18,
		   .mapped = 1);

	return kv_pool_open(client, &what, ret);
}

/* A sequence of 20 blocks, found, computed, shown, forked, cut and let go. */
static int use_sequence(struct kv_pool *pool, int32_t first)
{
	struct kv_seq *seq, *fork = NULL;
	int32_t tokens[20 * BLOCK_TOKENS + 3];
	const size_t n = sizeof(tokens) / sizeof(tokens[0]);
	size_t hit = 0;
	int r = kv_seq_new(pool, &seq);

	if (r < 0)
		return r;
	for (size_t i = 0; i < n; i++)
		tokens[i] = first + (int32_t)i;
	r = kv_seq_lookup(seq, tokens, n, &hit);
	if (!r)
		r = kv_seq_reserve(seq, n, KV_MSEC);
	if (!r)
		r = kv_seq_append(seq, tokens + hit, n - hit);
	if (!r)
		r = kv_seq_publish(seq, NULL);
	if (!r)
		r = kv_seq_fork(seq, &fork);
	if (!r)
		r = kv_seq_reserve(fork, n + 5, 0);
	if (!r)
		r = kv_seq_rollback(seq, 40, NULL);
	kv_seq_free(fork, NULL);
	kv_seq_free(seq, NULL);
	return r;
}

#define NOTHING "nothing was said of it"

/* Whoever refuses says why. */
static int told(int r, const char *call)
{
	expect(r >= 0 || (kv_error_text()[0] && !strstr(kv_error_text(), NOTHING)), "%s gives %d and says '%s'", call,
	       r, kv_error_text());
	return r;
}

#define TOLD(call) (kv_error(0, NOTHING), told(call, #call))

/* Everything once. It may be refused anywhere; it may not be told nonsense. */
static void whole_session(void)
{
	struct kv_client *client;
	struct kv_pool *pool;
	kv_block_id ids[100];
	void *stats;
	size_t n;

	if (TOLD(connect_as("faulty", &client)) < 0)
		return;
	if (!TOLD(open_pool(client, "faulty", &pool))) {
		if (!TOLD(kv_blocks_take(pool, 100, ids, 0)))
			TOLD(kv_blocks_give(pool, 100, ids));
		for (int32_t i = 0; i < 8;
		     i++) /* more than there is room for: others are evicted */
			TOLD(use_sequence(pool, i * 1000));
		TOLD(use_sequence(pool, 0));
		TOLD(kv_ping(client, 0));
		if (!TOLD(kv_stats(client, KV_STAT_SESSION, &stats, &n, 0)))
			free(stats);
		kv_pool_close(pool);
	}
	TOLD(kv_pool_drop(client, "faulty", 0));
	kv_disconnect(client);
}

static struct kv_client *honest;
static struct kv_pool *honest_pool;
static kv_block_id honest_ids[N_HONEST];

static void honest_begins(void)
{
	expect(!connect_as("honest", &honest), "%s", kv_error_text());
	expect(!open_pool(honest, "honest", &honest_pool), "%s", kv_error_text());
	expect(!kv_blocks_take(honest_pool, N_HONEST, honest_ids, 0), "%s", kv_error_text());
}

static void honest_goes_on(void)
{
	kv_block_id more[60];

	expect(!kv_ping(honest, 0), "%s", kv_error_text());
	expect(!kv_blocks_take(honest_pool, 60, more, KV_SEC), "%s", kv_error_text());
	expect(!kv_blocks_give(honest_pool, 60, more), "%s", kv_error_text());
	expect(!use_sequence(honest_pool, 7), "%s", kv_error_text());
	inside_check(NULL);
}

static void honest_ends(void)
{
	expect(!kv_blocks_give(honest_pool, N_HONEST, honest_ids), "%s", kv_error_text());
	kv_pool_close(honest_pool);
	kv_disconnect(honest);
	inside_step();
}

/* Return: how many calls failed. */
static int try(int n)
{
	inside_start(false);
	honest_begins();
	fault.left = n;
	fault.n_failed = 0;
	fault.armed = true;
	whole_session();
	fault.armed = false;
	inside_step();
	honest_goes_on();
	honest_ends();
	inside_ended(INSIDE_ALL);
	inside_check(NULL);
	inside_is_quiet();
	inside_stop();
	return fault.n_failed;
}

static const struct {
	enum inside_who whose;
	enum call call;
	int error;
	int at_least; /* so many such calls there are */
} faults[] = {
	{INSIDE_DAEMON, MALLOC, ENOMEM, 15},
	{true, MEMFD, EMFILE, 3},
	{true, MEMFD, ENOSPC, 3},
	{INSIDE_DAEMON, FTRUNCATE, ENOSPC, 3},
	{true, MMAP, ENOMEM, 3},
	{true, GETRANDOM, ENOSYS, 1},
	{INSIDE_DAEMON, EPOLL, ENOSPC, 4},
	{true, SEND, ENOBUFS, 10},
	{true, RECEIVE, ENOMEM, 10},
	{INSIDE_CLIENTS, MALLOC, ENOMEM, 20},
	{false, MMAP, ENOMEM, 4},
	{false, SOCKET, EMFILE, 2},
	{INSIDE_CLIENTS, SEND, ENOBUFS, 10},
	{false, RECEIVE, ENOMEM, 10},
};

START_TEST(whichever_call_fails_the_session_suffers_alone)
{
	int n = 0;

	memset(&fault, 0, sizeof(fault));
	fault.whose = faults[_i / 2].whose;
	fault.call = faults[_i / 2].call;
	fault.error = faults[_i / 2].error;
	fault.after = _i % 2;
	while (try(n))
		n++;
	expect(n >= faults[_i / 2].at_least, "only %d calls could fail", n);
}
END_TEST

/* Signals that interrupt every second call change nothing. */
START_TEST(interrupted_calls_are_made_again)
{
	static const enum call calls[] = {SEND, RECEIVE, WAIT};

	memset(&fault, 0, sizeof(fault));
	fault.whose = _i % 2 ? INSIDE_DAEMON : INSIDE_CLIENTS;
	fault.call = calls[_i / 2];
	fault.error = EINTR;
	fault.every_second = true;
	inside_start(false);
	fault.armed = true;
	honest_begins();
	for (int i = 0; i < 20; i++)
		honest_goes_on();
	honest_ends();
	fault.armed = false;
	expect(fault.call == WAIT || fault.n_failed > 20, "%d calls were interrupted",
	       fault.n_failed);
	inside_step();
	inside_ended(INSIDE_ALL);
	inside_is_quiet();
	inside_stop();
}
END_TEST

/* The clock goes on by an hour, a year, a century: who waits is answered, nothing else happens. */
START_TEST(a_clock_that_jumps_ends_waits_and_nothing_else)
{
	static const int64_t jumps[] = {3600, 365 * 86400L, 100 * 365 * 86400L};
	struct kv_pool *second;
	kv_block_id all[127 - N_HONEST], one;

	memset(&fault, 0, sizeof(fault));
	inside_start(false);
	honest_begins();
	expect(!open_pool(honest, "honest", &second), "%s", kv_error_text());
	for (int i = 0; i < 3; i++) {
		expect(!kv_blocks_take(honest_pool, 127 - N_HONEST, all, 0), "%s", kv_error_text());
		expect(kv_blocks_take(second, 1, &one, KV_SEC) == KV_NO_ROOM, "there was room");
		inside_advance(jumps[i] * KV_SEC);
		expect(kv_blocks_take(second, 1, &one, KV_SEC) == KV_NO_ROOM, "there was room");
		expect(!kv_blocks_give(honest_pool, 127 - N_HONEST, all), "%s", kv_error_text());
		honest_goes_on();
	}
	kv_pool_close(second);
	honest_ends();
	inside_ended(INSIDE_ALL);
	inside_is_quiet();
	inside_stop();
}
END_TEST

/* ---- numbers of ops come round ---- */

/* A block was given back before the daemon had said what became of it; then came @n_ops others. */
static size_t hit_after(uint32_t n_ops)
{
	int32_t tokens[2 * BLOCK_TOKENS] = {(int32_t)n_ops};
	struct kv_seq *seq;
	size_t hit = 0;
	kv_block_id id;

	expect(!kv_seq_new(honest_pool, &seq) && !kv_seq_reserve(seq, BLOCK_TOKENS + 1, KV_SEC) &&
		       !kv_seq_append(seq, tokens, BLOCK_TOKENS + 1) && !kv_seq_publish(seq, NULL),
	       "%s", kv_error_text());
	id = seq->table[0];
	kv_seq_free(seq, NULL);
	expect(honest_pool->refs[id] & KV_REF_GIVEN, "block %d isn't given", id);
	expect(!kv_ping(honest, 0), "%s", kv_error_text());
	honest_pool->gives[id] -= n_ops;
	expect(!kv_seq_new(honest_pool, &seq) && !kv_seq_lookup(seq, tokens, BLOCK_TOKENS + 1, &hit), "%s",
	       kv_error_text());
	kv_seq_free(seq, NULL);
	return hit;
}

START_TEST(a_block_given_back_2_to_31_ops_ago_is_found)
{
	static const uint32_t n_ops[] = {0, 1, 5000, INT32_MAX, (uint32_t)1 << 31, ((uint32_t)1 << 31) + 1,
					 UINT32_MAX - 5000};

	memset(&fault, 0, sizeof(fault));
	inside_start(false);
	honest_begins();
	for (size_t i = 0; i < sizeof(n_ops) / sizeof(n_ops[0]); i++)
		expect(hit_after(n_ops[i]) == BLOCK_TOKENS, "after %u ops it isn't found", n_ops[i]);
	honest_ends();
	inside_ended(INSIDE_ALL);
	inside_stop();
}
END_TEST

/* ---- numbers of pools ---- */

START_TEST(an_opening_that_is_refused_uses_up_no_number_of_a_pool)
{
	KV_OPTIONS(kv_pool_options, what, .name = "greedy", .min_bytes = INSIDE_ARENA);
	struct kv_pool *pool;
	uint64_t next;

	memset(&fault, 0, sizeof(fault));
	inside_start(false);
	honest_begins();
	what.layout = kv_pool_layout(honest_pool);
	next = *inside_next_pool();
	for (int i = 0; i < 10; i++)
		expect(kv_pool_open(honest, &what, &pool) == -ENOMEM, "it was there");
	ck_assert_uint_eq(*inside_next_pool(), next);
	what.min_bytes = 0;
	expect(!kv_pool_open(honest, &what, &pool), "%s", kv_error_text());
	ck_assert_uint_eq(*inside_next_pool(), next + 1);
	kv_pool_close(pool);
	honest_ends();
	inside_ended(INSIDE_ALL);
	inside_stop();
}
END_TEST

/* Extents name their pool by 32 bits. */
START_TEST(numbers_of_pools_that_come_round_pass_over_those_in_use)
{
	struct kv_pool *pools[3];

	memset(&fault, 0, sizeof(fault));
	inside_start(false);
	honest_begins();
	*inside_next_pool() = UINT32_MAX;
	for (int i = 0; i < 3; i++) {
		char name[16];

		snprintf(name, sizeof(name), "late-%d", i);
		expect(!open_pool(honest, name, &pools[i]), "%s", kv_error_text());
	}
	/* Neither 0 nor 1, which is the first one's. */
	ck_assert_uint_eq(*inside_next_pool(), UINT32_MAX + (uint64_t)5);
	inside_check(NULL);
	for (int i = 0; i < 3; i++)
		kv_pool_close(pools[i]);
	honest_ends();
	inside_ended(INSIDE_ALL);
	inside_stop();
}
END_TEST

int main(void)
{
	Suite *s = suite_create("daemon/faults");
	TCase *tcase = tcase_create("faults");
	SRunner *runner;
	int n_failed;

	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(tcase, whichever_call_fails_the_session_suffers_alone, 0,
			    2 * sizeof(faults) / sizeof(faults[0]));
	tcase_add_loop_test(tcase, interrupted_calls_are_made_again, 0, 6);
	tcase_add_test(tcase, a_clock_that_jumps_ends_waits_and_nothing_else);
	tcase_add_test(tcase, a_block_given_back_2_to_31_ops_ago_is_found);
	tcase_add_test(tcase, an_opening_that_is_refused_uses_up_no_number_of_a_pool);
	tcase_add_test(tcase, numbers_of_pools_that_come_round_pass_over_those_in_use);
	suite_add_tcase(s, tcase);
	runner = srunner_create(s);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
