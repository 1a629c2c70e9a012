/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What loop.c and the two kinds of loop share, and nobody else includes.
 *
 * A kind turns readiness into kv_watch_ready() calls; loop.c calls the callbacks. In between an
 * event is a member of kv_loop::ready, so freeing a watch takes its event along.
 */
#ifndef KV_DAEMON_LOOP_KIND_H
#define KV_DAEMON_LOOP_KIND_H

#include <stdbool.h>

#include "daemon/loop.h"
#include "include/internal/list.h"

/* Reported whether wanted or not, as poll(2) and io_uring do. */
#define KV_LOOP_ALWAYS (KV_LOOP_ERR | KV_LOOP_HUP | KV_LOOP_RDHUP)

struct kv_watch {
	struct kv_loop *loop;
	kv_watch_fn *fn;
	void *arg;
	int fd;
	uint32_t events;	   /* wanted; 0: paused */
	uint32_t revents;	   /* reported and not yet delivered */
	struct kv_link ready_link; /* kv_loop::ready */

	/* Of io_uring. */
	struct kv_link due_link; /* uring::due, or uring::dying */
	uint32_t armed;		  /* events of the poll request that the kernel has; 0: none */
	bool cancelled;		  /* the kernel was told to complete it now */
	bool freed;		  /* the memory goes when the request has completed */
};

/* Functions return negative errno with text. */
struct kv_loop_ops {
	const char *name;
	int (*init)(struct kv_loop *loop);
	void (*deinit)(struct kv_loop *loop);
	int (*watch_add)(struct kv_watch *watch);
	int (*watch_events)(struct kv_watch *watch, uint32_t events); /* differ from the present */
	void (*watch_free)(struct kv_watch *watch);		      /* takes over the memory */

	/* Sleeps until something is ready or @timeout_ns (< 0: no limit) have passed. */
	int (*wait)(struct kv_loop *loop, int64_t timeout_ns);
};

struct kv_loop {
	const struct kv_loop_ops *ops;
	void *kind; /* of the kind's own */
	char why[256];
	int64_t now_ns;
	uint64_t turn;
	bool stop;
	bool running; /* an iteration is on the stack */

	struct kv_link ready; /* kv_watch::ready_link */
	struct kv_link tasks; /* kv_task::link, queued ones */

	struct kv_watch **by_fd; /* [n_by_fd], NULL where a descriptor has no watch */
	int n_by_fd;

	struct kv_timer *
		*heap; /* [n_heap] of [heap_room]: each parent is due before its children */
	size_t n_heap;
	size_t heap_room; /* >= n_timers, so that setting a timer can't fail */
	size_t n_timers;
	uint64_t timer_order; /* of the next timer set */

	size_t n_others; /* watches and tasks that are not freed */
};

/* kv_watch_ready() - @watch, which is not freed, is ready for @revents, if that is wanted */
void kv_watch_ready(struct kv_watch *watch, uint32_t revents);

extern const struct kv_loop_ops kv_loop_uring;
extern const struct kv_loop_ops kv_loop_epoll;

#endif
