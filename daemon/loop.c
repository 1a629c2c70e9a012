/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The parts of the event loop that both kinds share: the choice, the iteration, timers, tasks,
 * signals. loop_uring.c and loop_epoll.c only find out what is ready.
 *
 * Timers lie in a binary heap ordered by (time, order of setting). Room in it is made when a timer
 * is made, as room in the table of descriptors is when a watch is made; from there on nothing
 * allocates.
 */
#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "daemon/loop_kind.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"

_Static_assert(KV_LOOP_IN == POLLIN && KV_LOOP_OUT == POLLOUT && KV_LOOP_ERR == POLLERR &&
		       KV_LOOP_HUP == POLLHUP && KV_LOOP_RDHUP == POLLRDHUP,
	       "the kernel's numbers");

struct kv_timer {
	struct kv_loop *loop;
	kv_timer_fn *fn;
	void *arg;
	int64_t due_ns;
	uint64_t order;
	size_t i_heap; /* SIZE_MAX: off */
};

struct kv_task {
	struct kv_loop *loop;
	kv_task_fn *fn;
	void *arg;
	struct kv_link link; /* kv_loop::tasks */
};

struct kv_signals {
	struct kv_watch *watch;
	kv_signal_fn *fn;
	void *arg;
	int fd;
};

static int64_t clock_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * INT64_C(1000000000) + ts.tv_nsec;
}

int kv_loop_kind_parse(const char *text)
{
	if (!strcmp(text, "auto"))
		return KV_LOOP_AUTO;
	if (!strcmp(text, kv_loop_uring.name))
		return KV_LOOP_IO_URING;
	if (!strcmp(text, kv_loop_epoll.name))
		return KV_LOOP_EPOLL;
	return kv_error(-EINVAL, "event loop: '%s' given; auto, io_uring or epoll would be right",
			text);
}

static int init_kind(struct kv_loop *loop, const struct kv_loop_ops *ops, const char *why)
{
	int r;

	r = ops->init(loop);
	if (r < 0)
		return r;

	loop->ops = ops;
	snprintf(loop->why, sizeof(loop->why), "%s", why);
	return 0;
}

int kv_loop_new(enum kv_loop_kind kind, struct kv_loop **ret)
{
	kv_cleanup(kv_loop_freep) struct kv_loop *loop = NULL;
	int r;

	loop = calloc(1, sizeof(*loop));
	if (!loop)
		return kv_error(-ENOMEM, "event loop: out of memory");
	kv_link_init(&loop->ready);
	kv_link_init(&loop->tasks);
	loop->now_ns = clock_ns();

	switch (kind) {
	case KV_LOOP_AUTO:
		r = init_kind(loop, &kv_loop_uring, "io_uring works");
		if (r < 0)
			r = init_kind(loop, &kv_loop_epoll, kv_error_text());
		break;
	case KV_LOOP_IO_URING:
		r = init_kind(loop, &kv_loop_uring, "asked for");
		break;
	case KV_LOOP_EPOLL:
		r = init_kind(loop, &kv_loop_epoll, "asked for");
		break;
	default:
		r = kv_error(-EINVAL, "event loop: kind %d given, 0..2 allowed", kind);
	}
	if (r < 0)
		return r;

	*ret = kv_steal(loop);
	return 0;
}

struct kv_loop *kv_loop_free(struct kv_loop *loop)
{
	if (!loop)
		return NULL;

	assert(!loop->running);
	assert(loop->n_others == 0 && loop->n_timers == 0);
	if (loop->ops)
		loop->ops->deinit(loop);
	free(loop->by_fd);
	free(loop->heap);
	free(loop);
	return NULL;
}

void kv_loop_freep(struct kv_loop **loop)
{
	*loop = kv_loop_free(*loop);
}

const char *kv_loop_name(const struct kv_loop *loop)
{
	return loop->ops->name;
}

const char *kv_loop_why(const struct kv_loop *loop)
{
	return loop->why;
}

int64_t kv_loop_now(const struct kv_loop *loop)
{
	return loop->now_ns;
}

uint64_t kv_loop_turn(const struct kv_loop *loop)
{
	return loop->turn;
}

/* Watches */

static int make_room_for_fd(struct kv_loop *loop, int fd)
{
	struct kv_watch **by_fd;
	int n;

	if (fd < loop->n_by_fd)
		return 0;
	n = loop->n_by_fd ? loop->n_by_fd : 64;
	while (n <= fd)
		n *= 2;
	by_fd = realloc(loop->by_fd, (size_t)n * sizeof(*by_fd));
	if (!by_fd)
		return kv_error(-ENOMEM, "event loop: out of memory for descriptor %d", fd);
	memset(by_fd + loop->n_by_fd, 0, (size_t)(n - loop->n_by_fd) * sizeof(*by_fd));
	loop->by_fd = by_fd;
	loop->n_by_fd = n;
	return 0;
}

static int check_events(int fd, uint32_t events)
{
	if (events & ~(uint32_t)(KV_LOOP_IN | KV_LOOP_OUT))
		return kv_error(-EINVAL, "watch of descriptor %d: events %#x given, %#x allowed",
				fd, events, KV_LOOP_IN | KV_LOOP_OUT);
	return 0;
}

int kv_loop_watch(struct kv_loop *loop, int fd, uint32_t events, kv_watch_fn *fn, void *arg,
		  struct kv_watch **ret)
{
	kv_cleanup(kv_freep) struct kv_watch *watch = NULL;
	struct stat st;
	int r;

	r = check_events(fd, events);
	if (r < 0)
		return r;
	if (fstat(fd, &st) < 0)
		return kv_error(-errno, "watch of descriptor %d: %m", fd);
	if (S_ISREG(st.st_mode) || S_ISDIR(st.st_mode))
		return kv_error(-EPERM, "watch of descriptor %d: a file is always ready", fd);
	r = make_room_for_fd(loop, fd);
	if (r < 0)
		return r;
	if (loop->by_fd[fd])
		return kv_error(-EEXIST, "watch of descriptor %d: it has one already", fd);

	watch = calloc(1, sizeof(*watch));
	if (!watch)
		return kv_error(-ENOMEM, "watch of descriptor %d: out of memory", fd);
	watch->loop = loop;
	watch->fd = fd;
	watch->events = events;
	watch->fn = fn;
	watch->arg = arg;
	kv_link_init(&watch->ready_link);
	kv_link_init(&watch->due_link);

	r = loop->ops->watch_add(watch);
	if (r < 0)
		return r;

	loop->by_fd[fd] = watch;
	loop->n_others++;
	*ret = kv_steal(watch);
	return 0;
}

int kv_watch_events(struct kv_watch *watch, uint32_t events)
{
	int r;

	r = check_events(watch->fd, events);
	if (r < 0)
		return r;
	if (events == watch->events)
		return 0;

	r = watch->loop->ops->watch_events(watch, events);
	if (r < 0)
		return r;
	watch->events = events;
	return 0;
}

struct kv_watch *kv_watch_free(struct kv_watch *watch)
{
	struct kv_loop *loop;

	if (!watch)
		return NULL;

	loop = watch->loop;
	assert(loop->by_fd[watch->fd] == watch);
	loop->by_fd[watch->fd] = NULL;
	loop->n_others--;
	kv_link_unlink(&watch->ready_link);
	loop->ops->watch_free(watch);
	return NULL;
}

/* What of @revents @watch wants to hear now. */
static uint32_t wanted(const struct kv_watch *watch, uint32_t revents)
{
	return watch->events ? revents & (watch->events | KV_LOOP_ALWAYS) : 0;
}

void kv_watch_ready(struct kv_watch *watch, uint32_t revents)
{
	if (!wanted(watch, revents))
		return;
	if (kv_link_is_alone(&watch->ready_link)) {
		watch->revents = 0;
		kv_list_append(&watch->loop->ready, &watch->ready_link);
	}
	watch->revents |= revents;
}

/* Watches that become ready while callbacks run (a kind may look at any time) are called as well:
 * each can do so only once between two waits, so this ends. */
static void call_watches(struct kv_loop *loop)
{
	struct kv_watch *watch;
	struct kv_link *link;
	uint32_t events;

	while ((link = kv_list_take_first(&loop->ready))) {
		watch = kv_container_of(link, struct kv_watch, ready_link);
		events = wanted(watch, watch->revents);
		if (events)
			watch->fn(events, watch->arg); /* may free the watch */
	}
}

/* Timers */

static bool is_before(const struct kv_timer *a, const struct kv_timer *b)
{
	return a->due_ns != b->due_ns ? a->due_ns < b->due_ns : a->order < b->order;
}

static void heap_put(struct kv_loop *loop, size_t i, struct kv_timer *timer)
{
	loop->heap[i] = timer;
	timer->i_heap = i;
}

/* Places @timer, of which the heap has no copy, at or above the gap at @i. */
static void heap_up(struct kv_loop *loop, size_t i, struct kv_timer *timer)
{
	for (; i > 0 && is_before(timer, loop->heap[(i - 1) / 2]); i = (i - 1) / 2)
		heap_put(loop, i, loop->heap[(i - 1) / 2]);
	heap_put(loop, i, timer);
}

/* The same, at or below the gap. */
static void heap_down(struct kv_loop *loop, size_t i, struct kv_timer *timer)
{
	size_t child;

	while ((child = 2 * i + 1) < loop->n_heap) {
		if (child + 1 < loop->n_heap && is_before(loop->heap[child + 1], loop->heap[child]))
			child++;
		if (!is_before(loop->heap[child], timer))
			break;
		heap_put(loop, i, loop->heap[child]);
		i = child;
	}
	heap_put(loop, i, timer);
}

static void heap_remove(struct kv_timer *timer)
{
	struct kv_loop *loop = timer->loop;
	struct kv_timer *last;
	size_t i = timer->i_heap;

	if (i == SIZE_MAX)
		return;
	timer->i_heap = SIZE_MAX;
	last = loop->heap[--loop->n_heap];
	if (last == timer)
		return;
	if (i > 0 && is_before(last, loop->heap[(i - 1) / 2]))
		heap_up(loop, i, last);
	else
		heap_down(loop, i, last);
}

int kv_timer_new(struct kv_loop *loop, kv_timer_fn *fn, void *arg, struct kv_timer **ret)
{
	struct kv_timer **heap;
	struct kv_timer *timer;
	size_t room;

	if (loop->n_timers == loop->heap_room) {
		room = loop->heap_room ? loop->heap_room * 2 : 16;
		heap = realloc(loop->heap, room * sizeof(*heap));
		if (!heap)
			return kv_error(-ENOMEM, "event loop: out of memory for %zu timers", room);
		loop->heap = heap;
		loop->heap_room = room;
	}
	timer = calloc(1, sizeof(*timer));
	if (!timer)
		return kv_error(-ENOMEM, "event loop: out of memory for a timer");
	timer->loop = loop;
	timer->fn = fn;
	timer->arg = arg;
	timer->i_heap = SIZE_MAX;
	loop->n_timers++;
	*ret = timer;
	return 0;
}

struct kv_timer *kv_timer_free(struct kv_timer *timer)
{
	if (!timer)
		return NULL;

	heap_remove(timer);
	timer->loop->n_timers--;
	free(timer);
	return NULL;
}

void kv_timer_set(struct kv_timer *timer, int64_t delay_ns)
{
	struct kv_loop *loop = timer->loop;

	heap_remove(timer);
	if (delay_ns < 0)
		return;
	/* The clock, not kv_loop_now(): a slow callback before this one must not shorten the delay.
	 */
	if (__builtin_add_overflow(clock_ns(), delay_ns, &timer->due_ns))
		timer->due_ns = INT64_MAX;
	timer->order = loop->timer_order++;
	heap_up(loop, loop->n_heap++, timer);
}

static void call_timers(struct kv_loop *loop)
{
	uint64_t order_end =
		loop->timer_order; /* a timer set by these waits for the next iteration */
	struct kv_timer *timer;

	while (loop->n_heap) {
		timer = loop->heap[0];
		if (timer->due_ns > loop->now_ns || timer->order >= order_end)
			break;
		heap_remove(timer);
		timer->fn(timer->arg); /* may free the timer */
	}
}

/* Tasks */

int kv_task_new(struct kv_loop *loop, kv_task_fn *fn, void *arg, struct kv_task **ret)
{
	struct kv_task *task;

	task = calloc(1, sizeof(*task));
	if (!task)
		return kv_error(-ENOMEM, "event loop: out of memory for a task");
	task->loop = loop;
	task->fn = fn;
	task->arg = arg;
	kv_link_init(&task->link);
	loop->n_others++;
	*ret = task;
	return 0;
}

struct kv_task *kv_task_free(struct kv_task *task)
{
	if (!task)
		return NULL;

	kv_link_unlink(&task->link);
	task->loop->n_others--;
	free(task);
	return NULL;
}

void kv_task_queue(struct kv_task *task)
{
	if (kv_link_is_alone(&task->link))
		kv_list_append(&task->loop->tasks, &task->link);
}

static void call_tasks(struct kv_loop *loop)
{
	struct kv_link batch; /* without those that these queue */
	struct kv_task *task;
	struct kv_link *link;

	kv_link_init(&batch);
	kv_list_move(&batch, &loop->tasks);
	while ((link = kv_list_take_first(&batch))) {
		task = kv_container_of(link, struct kv_task, link);
		task->fn(task->arg); /* may free the task */
	}
}

/* Signals */

static void on_signal(uint32_t events, void *arg)
{
	struct kv_signals *signals = arg;
	struct signalfd_siginfo info;

	/* One at a time: the callback may free @signals, and readiness comes back for the rest. */
	if (read(signals->fd, &info, sizeof(info)) == sizeof(info))
		signals->fn(&info, signals->arg);
}

int kv_loop_signals(struct kv_loop *loop, const sigset_t *set, kv_signal_fn *fn, void *arg,
		    struct kv_signals **ret)
{
	kv_cleanup(kv_freep) struct kv_signals *signals = NULL;
	kv_cleanup(kv_closep) int fd = -1;
	int r;

	signals = calloc(1, sizeof(*signals));
	if (!signals)
		return kv_error(-ENOMEM, "event loop: out of memory for signals");
	fd = signalfd(-1, set, SFD_CLOEXEC | SFD_NONBLOCK);
	if (fd < 0)
		return kv_error(-errno, "signalfd: %m");
	r = kv_loop_watch(loop, fd, KV_LOOP_IN, on_signal, signals, &signals->watch);
	if (r < 0)
		return r;
	pthread_sigmask(SIG_BLOCK, set, NULL);

	signals->fn = fn;
	signals->arg = arg;
	signals->fd = kv_steal_fd(&fd);
	*ret = kv_steal(signals);
	return 0;
}

struct kv_signals *kv_signals_free(struct kv_signals *signals)
{
	if (!signals)
		return NULL;

	kv_watch_free(signals->watch);
	close(signals->fd);
	free(signals);
	return NULL;
}

/* The iteration */

static int64_t next_timeout(const struct kv_loop *loop, int64_t timeout_ns)
{
	int64_t left;

	if (!kv_link_is_alone(&loop->ready) || !kv_link_is_alone(&loop->tasks))
		return 0;
	if (!loop->n_heap)
		return timeout_ns;
	left = loop->heap[0]->due_ns - clock_ns();
	if (left < 0)
		left = 0;
	return timeout_ns < 0 || left < timeout_ns ? left : timeout_ns;
}

int kv_loop_step(struct kv_loop *loop, int64_t timeout_ns)
{
	int r;

	assert(!loop->running); /* a callback may not iterate */
	loop->running = true;
	r = loop->ops->wait(loop, next_timeout(loop, timeout_ns));
	loop->now_ns = clock_ns();
	loop->turn++;
	if (r >= 0) {
		call_watches(loop);
		call_timers(loop);
		call_tasks(loop);
		r = 0;
	}
	loop->running = false;
	return r;
}

int kv_loop_run(struct kv_loop *loop)
{
	int r = 0;

	while (!loop->stop && r >= 0)
		r = kv_loop_step(loop, -1);
	loop->stop = false;
	return r;
}

void kv_loop_stop(struct kv_loop *loop)
{
	loop->stop = true;
}
