/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The event loop of one thread: descriptors that are ready, timers, deferred tasks, signals.
 *
 * Two complete kinds stand behind one interface, io_uring and epoll, chosen when the loop is made.
 * Both report readiness, not completion: a callback is called in every iteration for as long as its
 * descriptor is ready, so a callback may read as little as it likes and nothing is lost.
 *
 * One iteration: wait; call the watches that are ready; call the timers that are due, earliest
 * first; run the tasks that are queued. Every object may be freed in any callback, its own
 * included, and is never called again from then on, even if its event is already at hand.
 *
 * Not here: reading and writing (a callback can come late, when another one has emptied the
 * descriptor already: use O_NONBLOCK or MSG_DONTWAIT), threads (all calls belong to the thread that
 * runs the loop), and waking the loop from elsewhere (watch an eventfd).
 *
 * A wait costs nothing while it sleeps, and no event allocates memory.
 */
#ifndef KV_DAEMON_LOOP_H
#define KV_DAEMON_LOOP_H

#include <signal.h>
#include <stdint.h>
#include <sys/signalfd.h>

struct kv_loop;
struct kv_watch;
struct kv_timer;
struct kv_task;
struct kv_signals;

enum kv_loop_kind {
	KV_LOOP_AUTO = 0, /* io_uring; epoll where io_uring is refused */
	KV_LOOP_IO_URING = 1,
	KV_LOOP_EPOLL = 2,
};

/* As in poll(2). Watches with any event wanted also get ERR, HUP and RDHUP for as long as they
 * hold. */
enum kv_loop_events {
	KV_LOOP_IN = 0x001,
	KV_LOOP_OUT = 0x004,
	KV_LOOP_ERR = 0x008,
	KV_LOOP_HUP = 0x010,	/* nobody is at the other end; pidfd: dead and reaped */
	KV_LOOP_RDHUP = 0x2000, /* the other end will send no more */
};

typedef void kv_watch_fn(uint32_t events, void *arg);
typedef void kv_timer_fn(void *arg);
typedef void kv_task_fn(void *arg);
typedef void kv_signal_fn(const struct signalfd_siginfo *info, void *arg);

/*
 * kv_loop_new() - makes a loop of the kind asked for
 *
 * io_uring is probed by making the ring and passing one request through it.
 *
 * Return: 0; a kind asked for by name that is refused gives the errno and the reason in
 *         kv_error_text(); -ENOMEM, -EMFILE.
 */
int kv_loop_new(enum kv_loop_kind kind, struct kv_loop **ret);

/* Nothing may be left on the loop. NULL is allowed. Returns NULL. */
struct kv_loop *kv_loop_free(struct kv_loop *loop);
void kv_loop_freep(struct kv_loop **loop);

/* kv_loop_kind_parse() - "auto", "io_uring", "epoll" to its number; -EINVAL with text */
int kv_loop_kind_parse(const char *text);

/* kv_loop_name() - the kind taken: "io_uring" or "epoll" */
const char *kv_loop_name(const struct kv_loop *loop);

/* kv_loop_why() - why this kind: "asked for", "io_uring works", or why io_uring was refused */
const char *kv_loop_why(const struct kv_loop *loop);

/*
 * kv_loop_run() - iterates until kv_loop_stop()
 *
 * The iteration in which kv_loop_stop() is called is finished first, its tasks included.
 * Return: 0; negative errno if waiting itself failed: the loop is of no more use.
 */
int kv_loop_run(struct kv_loop *loop);
void kv_loop_stop(struct kv_loop *loop);

/*
 * kv_loop_step() - one iteration that sleeps at most @timeout_ns
 * @timeout_ns: 0 takes what is there; < 0: as long as it needs
 *
 * It may sleep shorter, and call nothing.
 */
int kv_loop_step(struct kv_loop *loop, int64_t timeout_ns);

/* kv_loop_turn() - the number of the iteration */
uint64_t kv_loop_turn(const struct kv_loop *loop);

/* kv_loop_now() - CLOCK_MONOTONIC in ns, read once when the iteration's wait has ended */
int64_t kv_loop_now(const struct kv_loop *loop);

/*
 * kv_loop_watch() - calls @fn while @fd is ready
 * @fd:     of something that can be polled; stays the caller's, and open until the watch is freed.
 *          A descriptor has one watch; kv_loop_watch() on a duplicate of it is fine.
 * @events: KV_LOOP_IN, KV_LOOP_OUT, both, or 0: paused, not even a hang-up is reported
 *
 * Return: 0; -EBADF; -EEXIST if @fd has a watch; -EINVAL; -EPERM if @fd is a file or folder, which
 *         can't be polled; -ENOMEM, -ENOSPC.
 */
int kv_loop_watch(struct kv_loop *loop, int fd, uint32_t events, kv_watch_fn *fn, void *arg,
		  struct kv_watch **ret);

/*
 * kv_watch_events() - what is wanted from now on
 *
 * What is no longer wanted is not heard of again; what is newly wanted, in the next iteration or
 * the one after it.
 * Return: 0; -EINVAL; -ENOMEM, -ENOSPC.
 */
int kv_watch_events(struct kv_watch *watch, uint32_t events);

/*
 * kv_watch_free() - ends the watch; NULL is allowed; returns NULL
 *
 * Afterwards the loop holds nothing of the descriptor: closing it is a hang-up for the peer at
 * once, and its number can be used again.
 */
struct kv_watch *kv_watch_free(struct kv_watch *watch);

/* A timer is off until it is set, and off again when it is called. Timers set for the same time
 * are called in the order in which they were set. */
int kv_timer_new(struct kv_loop *loop, kv_timer_fn *fn, void *arg, struct kv_timer **ret);
struct kv_timer *kv_timer_free(struct kv_timer *timer);

/* kv_timer_set() - calls it @delay_ns from now, never earlier; < 0: off. Replaces what was set. */
void kv_timer_set(struct kv_timer *timer, int64_t delay_ns);

/*
 * A task is work put off to the end of the iteration, when no callback is on the stack: teardown,
 * or one flush for many changes. Queued any number of times it runs once; queued by a task it runs
 * in the next iteration, which doesn't sleep.
 */
int kv_task_new(struct kv_loop *loop, kv_task_fn *fn, void *arg, struct kv_task **ret);
struct kv_task *kv_task_free(struct kv_task *task);
void kv_task_queue(struct kv_task *task);

/*
 * kv_loop_signals() - takes the signals in @set as events, one call for each
 *
 * They are blocked in this thread from here on, also after kv_signals_free(). Call it before other
 * threads start; a child that execs must unblock them.
 */
int kv_loop_signals(struct kv_loop *loop, const sigset_t *set, kv_signal_fn *fn, void *arg,
		    struct kv_signals **ret);
struct kv_signals *kv_signals_free(struct kv_signals *signals);

#endif
