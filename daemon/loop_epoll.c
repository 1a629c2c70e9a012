/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The event loop's kind that works everywhere: level-triggered epoll.
 *
 * A paused watch is taken out of the set, since epoll reports hang-ups of whatever is in it.
 * Timeouts are rounded up to a millisecond: epoll_pwait2() would be finer, but where io_uring is
 * refused old kernels and system call filters are likely.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>

#include "daemon/loop_kind.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"

#define N_EVENTS 256 /* taken by one wait; the kernel goes round where more are ready */

struct epoll {
	int fd;
	struct epoll_event events[N_EVENTS];
};

static int epoll_init(struct kv_loop *loop)
{
	kv_cleanup(kv_freep) struct epoll *epoll = NULL;

	epoll = calloc(1, sizeof(*epoll));
	if (!epoll)
		return kv_error(-ENOMEM, "epoll: out of memory");
	epoll->fd = epoll_create1(EPOLL_CLOEXEC);
	if (epoll->fd < 0)
		return kv_error(-errno, "epoll: epoll_create1: %m");
	loop->kind = kv_steal(epoll);
	return 0;
}

static void epoll_deinit(struct kv_loop *loop)
{
	struct epoll *epoll = loop->kind;

	close(epoll->fd);
	free(epoll);
}

static int control(struct kv_watch *watch, int op, uint32_t events)
{
	struct epoll *epoll = watch->loop->kind;
	struct epoll_event event = {.events = events | EPOLLRDHUP, .data.ptr = watch};

	if (epoll_ctl(epoll->fd, op, watch->fd, &event) < 0)
		return kv_error(-errno, "epoll: watch of descriptor %d: %m", watch->fd);
	return 0;
}

static int epoll_watch_add(struct kv_watch *watch)
{
	return watch->events ? control(watch, EPOLL_CTL_ADD, watch->events) : 0;
}

static int epoll_watch_events(struct kv_watch *watch, uint32_t events)
{
	int op = EPOLL_CTL_MOD;

	if (!watch->events)
		op = EPOLL_CTL_ADD;
	if (!events)
		op = EPOLL_CTL_DEL;
	return control(watch, op, events);
}

static void epoll_watch_free(struct kv_watch *watch)
{
	int r;

	if (watch->events) {
		/* Fails if the descriptor was closed before: then events of a duplicate of it
		 * could still name this watch. */
		r = control(watch, EPOLL_CTL_DEL, 0);
		assert(r == 0);
	}
	free(watch);
}

static int epoll_wait_ready(struct kv_loop *loop, int64_t timeout_ns)
{
	struct epoll *epoll = loop->kind;
	int64_t timeout_ms = -1;
	int i, n;

	if (timeout_ns >= 0) {
		timeout_ms = timeout_ns / 1000000 + (timeout_ns % 1000000 != 0);
		if (timeout_ms > INT32_MAX)
			timeout_ms = INT32_MAX;
	}
	n = epoll_wait(epoll->fd, epoll->events, N_EVENTS, (int)timeout_ms);
	if (n < 0)
		return errno == EINTR ? 0 : kv_error(-errno, "epoll: epoll_wait: %m");
	for (i = 0; i < n; i++)
		kv_watch_ready(epoll->events[i].data.ptr, epoll->events[i].events);
	return 0;
}

const struct kv_loop_ops kv_loop_epoll = {
	.name = "epoll",
	.init = epoll_init,
	.deinit = epoll_deinit,
	.watch_add = epoll_watch_add,
	.watch_events = epoll_watch_events,
	.watch_free = epoll_watch_free,
	.wait = epoll_wait_ready,
};
