/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A real kvcached for a test in C, on a socket of its own.
 *
 *	daemon_start("--host", "64M");		in the test or its fixture
 *	... kv_connect() to daemon_socket() ...
 *	daemon_stop();				SIGTERM: status 0, and nothing may stay behind
 *
 *	int main(void)
 *	{
 *		return daemon_run_tests(suite());
 *	}
 *
 * The program is $KVCACHED_BIN, its event loop $KV_TEST_EVENT_LOOP. Every wait has a deadline. The
 * daemon dies with the process that started it, so a test that fails leaves none; what the
 * daemons of a failed run said is shown at the end.
 */
#ifndef KV_TESTS_SUPPORT_DAEMON_H
#define KV_TESTS_SUPPORT_DAEMON_H

#include <check.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "tests/support/expect.h"

/* A wait that ends well ends soon; sanitizers on a busy machine are slow. */
#define DEADLINE_MS 20000

/* daemon_run_tests() - run the suite. Return: main()'s; 77 if this event loop is refused here. */
int daemon_run_tests(Suite *suite);

/* daemon_start() - and wait until it listens */
#define daemon_start(...) daemon_start_with((const char *const[]){__VA_ARGS__, NULL})
void daemon_start_with(const char *const *options);

/* daemon_stop() - SIGTERM; it ends with 0, its socket file and its processes are gone */
void daemon_stop(void);

/* daemon_ended() - it was told to stop, by a signal: wait for it, and likewise */
void daemon_ended(void);

/* daemon_kill() - SIGKILL for its keeper; its worker has ended as well on return, files stay */
void daemon_kill(void);

/* daemon_kill_worker() - SIGKILL for its worker alone. Return: the pid it had. */
pid_t daemon_kill_worker(void);

const char *daemon_socket(void);
const char *daemon_folder(void); /* the program's, removed at its end */
pid_t daemon_pid(void);	   /* of its keeper, which ends with it */
pid_t daemon_worker(void); /* of its worker; waits until there is one */

/**
 * daemon_refused() - start one that must not start
 * @ret_text: filled with what it said on stderr; [size]
 *
 * Return: its exit status.
 */
#define daemon_refused(text, size, ...) \
	daemon_refused_with(text, size, (const char *const[]){__VA_ARGS__, NULL})
int daemon_refused_with(char *ret_text, size_t size, const char *const *options);

/* ---- what the daemon uses ---- */

uint32_t daemon_fds(void);	/* open descriptors of keeper and worker, when both have come to rest */
uint64_t daemon_rss(void);	/* resident bytes of both */
uint32_t daemon_children(void); /* processes of the worker: movers */

/* Growth of memory that is none: a heap keeps some of what was freed, a sanitizer most of it. */
#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
#define NO_GROWTH (512 << 20) /* it keeps its notes on memory that was mapped once */
#elif defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#define NO_GROWTH (128 << 20)
#else
#define NO_GROWTH (2 << 20)
#endif

/* ---- time ---- */

int64_t now_ns(void);
void sleep_ms(int ms);

/* wait_until() - look again and again until @condition; fails when DEADLINE_MS are over */
#define wait_until(condition)                                                                  \
	do {                                                                                   \
		int64_t deadline_ = now_ns() + (int64_t)DEADLINE_MS * 1000000;                 \
                                                                                               \
		while (!(condition)) {                                                         \
			expect(now_ns() < deadline_, "not so in %d s: %s", DEADLINE_MS / 1000, \
			       #condition);                                                    \
			sleep_ms(1);                                                           \
		}                                                                              \
	} while (0)

#endif
