/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The event loop's kind over io_uring: one poll request a watch.
 *
 * Requests are one-shot and made again before the next wait. The kernel looks at the descriptor
 * when it takes a request, so readiness that a callback left over completes it at once: that is
 * level triggering, all of it in the one system call that waits. A multishot poll reports edges;
 * what a callback leaves unread would never be heard of again.
 *
 *	     watch_add            wait: poll_add            completion
 *	new -----------> due  ---------------------> armed ------------> due, ready
 *	                  ^   events changed: poll_remove |
 *	                  +-------------------------------+
 *
 * A request holds a reference to the file, so a freed watch's request is removed at once and not at
 * the next wait: else the peer of a closed socket would not see the hang-up. The completion of a
 * request names its watch by address, so the memory of a freed watch stays until that has come.
 *
 * Overflow of the completion ring is kept by the kernel (IORING_FEAT_NODROP) and costs only time.
 */
#include <errno.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/loop_kind.h"
#include "include/internal/error.h"
#include "include/internal/cleanup.h"

#define N_SUBMISSIONS 512
#define N_COMPLETIONS 8192 /* 128 KiB */
#define N_BATCH	      64

#define NEEDED_FEATURES (IORING_FEAT_NODROP | IORING_FEAT_EXT_ARG)
#define PROBE_NS	1000000000

struct uring {
	struct io_uring ring;
	struct kv_link due;   /* kv_watch::due_link: those whose request isn't what it should be */
	struct kv_link dying; /* kv_watch::due_link: freed, with the completion still to come */
};

static const char *hint(int r)
{
	switch (r) {
	case -EPERM:
		return " (a seccomp profile, or sysctl kernel.io_uring_disabled)";
	case -ENOSYS:
		return " (the kernel or a sandbox has no io_uring)";
	case -EINVAL:
		return " (the kernel is older than 5.11)";
	case -ENOMEM:
		return " (memory, or RLIMIT_MEMLOCK)";
	default:
		return "";
	}
}

static int refused(int r, const char *call)
{
	return kv_error(r, "io_uring refused: %s: %s%s", call, strerror(-r), hint(r));
}

/* A filter can allow making a ring and refuse its use: send one request through. */
static int probe(struct io_uring *ring)
{
	struct __kernel_timespec ts = {.tv_sec = PROBE_NS / 1000000000};
	struct io_uring_cqe *cqe = NULL;
	int r;

	io_uring_prep_nop(io_uring_get_sqe(ring));
	r = io_uring_submit_and_wait_timeout(ring, &cqe, 1, &ts, NULL);
	if (r < 0 || !cqe)
		return refused(r < 0 ? r : -ETIME, "io_uring_enter");
	io_uring_cqe_seen(ring, cqe);
	return 0;
}

static int uring_init(struct kv_loop *loop)
{
	struct io_uring_params params = {.flags = IORING_SETUP_CQSIZE, .cq_entries = N_COMPLETIONS};
	kv_cleanup(kv_freep) struct uring *uring = NULL;
	int r;

	uring = calloc(1, sizeof(*uring));
	if (!uring)
		return kv_error(-ENOMEM, "io_uring: out of memory");
	kv_link_init(&uring->due);
	kv_link_init(&uring->dying);

	r = io_uring_queue_init_params(N_SUBMISSIONS, &uring->ring, &params);
	if (r < 0)
		return refused(r, "io_uring_setup");

	if ((params.features & NEEDED_FEATURES) != NEEDED_FEATURES)
		r = refused(-EINVAL, "features");
	else
		r = probe(&uring->ring);
	if (r < 0) {
		io_uring_queue_exit(&uring->ring);
		return r;
	}

	loop->kind = kv_steal(uring);
	return 0;
}

static void free_all(struct kv_link *list)
{
	struct kv_link *link;

	while ((link = kv_list_take_first(list)))
		free(kv_container_of(link, struct kv_watch, due_link));
}

static void uring_deinit(struct kv_loop *loop)
{
	struct uring *uring = loop->kind;

	io_uring_queue_exit(&uring->ring);
	free_all(&uring->due);
	free_all(&uring->dying);
	free(uring);
}

static void complete(struct uring *uring, struct kv_watch *watch, int res)
{
	watch->armed = 0;
	watch->cancelled = false;
	kv_link_unlink(&watch->due_link);
	if (watch->freed) {
		free(watch);
		return;
	}

	kv_list_append(&uring->due, &watch->due_link);
	if (res >= 0)
		kv_watch_ready(watch, (uint32_t)res);
	else if (res != -ECANCELED)
		kv_watch_ready(watch, KV_LOOP_ERR);
}

/* Takes in all completions there are. Calls no callback. */
static void harvest(struct uring *uring)
{
	struct io_uring_cqe *cqes[N_BATCH];
	struct kv_watch *watch;
	unsigned i, n;

	while ((n = io_uring_peek_batch_cqe(&uring->ring, cqes, N_BATCH))) {
		for (i = 0; i < n; i++) {
			watch = io_uring_cqe_get_data(cqes[i]);
			if (watch) /* NULL: a removal's own completion */
				complete(uring, watch, cqes[i]->res);
		}
		io_uring_cq_advance(&uring->ring, n);
	}
}

/* NULL only while the kernel is out of memory. */
static struct io_uring_sqe *take_sqe(struct uring *uring)
{
	struct io_uring_sqe *sqe;

	sqe = io_uring_get_sqe(&uring->ring);
	if (!sqe) {
		io_uring_submit(&uring->ring);
		sqe = io_uring_get_sqe(&uring->ring);
	}
	return sqe;
}

/* Queues the submission that brings the kernel's request nearer to what @watch wants. */
static bool sync_request(struct uring *uring, struct kv_watch *watch)
{
	uint32_t events = watch->freed ? 0 : watch->events;
	struct io_uring_sqe *sqe;

	if (watch->armed == events || watch->cancelled)
		return true;
	sqe = take_sqe(uring);
	if (!sqe)
		return false;

	if (watch->armed) {
		/* Armed anew, if at all, when the old request's completion has come. */
		io_uring_prep_poll_remove(sqe, (uintptr_t)watch);
		io_uring_sqe_set_data(sqe, NULL);
		watch->cancelled = true;
	} else {
		io_uring_prep_poll_add(sqe, watch->fd, events);
		io_uring_sqe_set_data(sqe, watch);
		watch->armed = events;
	}
	return true;
}

static void sync_requests(struct uring *uring)
{
	struct kv_watch *watch;
	struct kv_link *link;

	while ((link = kv_list_take_first(&uring->due))) {
		watch = kv_container_of(link, struct kv_watch, due_link);
		if (!sync_request(uring, watch)) {
			kv_list_append(&uring->due, link);
			return;
		}
		if (watch->freed)
			kv_list_append(&uring->dying, link);
	}
}

static int uring_watch_add(struct kv_watch *watch)
{
	struct uring *uring = watch->loop->kind;

	kv_list_append(&uring->due, &watch->due_link);
	return 0;
}

static int uring_watch_events(struct kv_watch *watch, uint32_t events)
{
	struct uring *uring = watch->loop->kind;

	if (kv_link_is_alone(&watch->due_link))
		kv_list_append(&uring->due, &watch->due_link);
	return 0;
}

static void uring_watch_free(struct kv_watch *watch)
{
	struct uring *uring = watch->loop->kind;

	kv_link_unlink(&watch->due_link);
	if (!watch->armed) {
		free(watch);
		return;
	}

	watch->freed = true;
	if (!sync_request(uring, watch)) {
		kv_list_append(&uring->due, &watch->due_link);
		return;
	}
	kv_list_append(&uring->dying, &watch->due_link);
	/* If the kernel can't take it now, it takes it with the next wait. */
	io_uring_submit(&uring->ring);
	harvest(uring); /* so that freeing many never fills the completion ring */
}

static int uring_wait(struct kv_loop *loop, int64_t timeout_ns)
{
	struct uring *uring = loop->kind;
	struct __kernel_timespec ts = {.tv_sec = timeout_ns / 1000000000,
				       .tv_nsec = timeout_ns % 1000000000};
	struct io_uring_cqe *cqe;
	int r;

	/* Again where a removal was all that completed: the watch is to be armed with new events.
	 */
	do {
		sync_requests(uring);
		r = io_uring_submit_and_wait_timeout(&uring->ring, &cqe, 1,
						     timeout_ns < 0 ? NULL : &ts, NULL);
		harvest(uring);
	} while (r >= 0 && kv_link_is_alone(&loop->ready) && !kv_link_is_alone(&uring->due));

	switch (r < 0 ? r : 0) {
	case 0:
	case -ETIME:
	case -EINTR:
	case -EAGAIN: /* the kernel is short of memory: what wasn't submitted is the next time */
	case -EBUSY:  /* completions were waiting: harvested by now */
		return 0;
	default:
		return kv_error(r, "io_uring: io_uring_enter: %s", strerror(-r));
	}
}

const struct kv_loop_ops kv_loop_uring = {
	.name = "io_uring",
	.init = uring_init,
	.deinit = uring_deinit,
	.watch_add = uring_watch_add,
	.watch_events = uring_watch_events,
	.watch_free = uring_watch_free,
	.wait = uring_wait,
};
