/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A loop is announced by a new round number; items are taken from one counter. Sleeping and waking
 * meet through two pairs of sequentially consistent accesses: the sleeper announces itself, then
 * looks for work; the waker publishes work, then looks for sleepers. One of them sees the other.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "tools/engine/error.h"
#include "tools/engine/threads.h"

#define MAX_THREADS 256
#define SPINS	    2000 /* some 20 us: the gap between two loops of a decode step */

struct worker {
	struct kv_threads *threads;
	pthread_t id;
	unsigned i;
};

struct kv_threads {
	unsigned n;
	unsigned n_started; /* workers; the caller is thread 0 and has none */
	struct worker *workers;

	void (*run)(void *context, size_t item, unsigned thread);
	void *context;
	size_t n_items;
	bool stop;
	atomic_size_t next;
	atomic_uint round;    /* a new number: the five words above say what to do */
	atomic_uint pending;  /* workers that haven't finished this round */
	atomic_uint sleepers; /* workers in wake */
	atomic_bool waiting;  /* the caller is in done */

	pthread_mutex_t lock;
	pthread_cond_t wake;
	pthread_cond_t done;
};

static void relax(void)
{
#ifdef __x86_64__
	__builtin_ia32_pause();
#endif
}

static void take_items(struct kv_threads *threads, unsigned thread)
{
	size_t item;

	while ((item = atomic_fetch_add_explicit(&threads->next, 1, memory_order_relaxed)) <
	       threads->n_items)
		threads->run(threads->context, item, thread);
}

static void wait_for_round(struct kv_threads *threads, unsigned seen)
{
	for (int i = 0; i < SPINS; i++) {
		if (atomic_load(&threads->round) != seen)
			return;
		relax();
	}

	pthread_mutex_lock(&threads->lock);
	atomic_fetch_add(&threads->sleepers, 1);
	while (atomic_load(&threads->round) == seen)
		pthread_cond_wait(&threads->wake, &threads->lock);
	atomic_fetch_sub(&threads->sleepers, 1);
	pthread_mutex_unlock(&threads->lock);
}

static void *work(void *arg)
{
	struct worker *worker = arg;
	struct kv_threads *threads = worker->threads;
	unsigned seen = 0;

	for (;;) {
		wait_for_round(threads, seen);
		seen++;
		if (threads->stop)
			return NULL;

		take_items(threads, worker->i);
		if (atomic_fetch_sub(&threads->pending, 1) == 1 && atomic_load(&threads->waiting)) {
			pthread_mutex_lock(&threads->lock);
			pthread_cond_signal(&threads->done);
			pthread_mutex_unlock(&threads->lock);
		}
	}
}

static void announce(struct kv_threads *threads)
{
	atomic_store(&threads->pending, threads->n_started);
	atomic_fetch_add(&threads->round, 1);
	if (!atomic_load(&threads->sleepers))
		return;

	pthread_mutex_lock(&threads->lock);
	pthread_cond_broadcast(&threads->wake);
	pthread_mutex_unlock(&threads->lock);
}

static void wait_for_workers(struct kv_threads *threads)
{
	for (int i = 0; i < SPINS; i++) {
		if (!atomic_load(&threads->pending))
			return;
		relax();
	}

	pthread_mutex_lock(&threads->lock);
	atomic_store(&threads->waiting, true);
	while (atomic_load(&threads->pending))
		pthread_cond_wait(&threads->done, &threads->lock);
	atomic_store(&threads->waiting, false);
	pthread_mutex_unlock(&threads->lock);
}

void kv_threads_run(struct kv_threads *threads, size_t n,
		    void (*run)(void *context, size_t item, unsigned thread), void *context)
{
	if (n < 2 || !threads->n_started) {
		for (size_t i = 0; i < n; i++)
			run(context, i, 0);
		return;
	}

	threads->run = run;
	threads->context = context;
	threads->n_items = n;
	atomic_store_explicit(&threads->next, 0, memory_order_relaxed);
	announce(threads);
	take_items(threads, 0);
	wait_for_workers(threads);
}

static unsigned usable_cpus(void)
{
	cpu_set_t set;

	if (sched_getaffinity(0, sizeof(set), &set) < 0)
		return 1;
	return CPU_COUNT(&set);
}

int kv_threads_new(unsigned n, struct kv_threads **ret)
{
	struct kv_threads *threads = calloc(1, sizeof(*threads));
	sigset_t all, before;
	int r = 0;

	if (!threads)
		return kv_engine_error(-ENOMEM, "no memory for threads");

	threads->n = n ? n : usable_cpus();
	threads->n = threads->n < MAX_THREADS ? threads->n : MAX_THREADS;
	pthread_mutex_init(&threads->lock, NULL);
	pthread_cond_init(&threads->wake, NULL);
	pthread_cond_init(&threads->done, NULL);
	threads->workers = calloc(threads->n, sizeof(*threads->workers));
	if (!threads->workers)
		r = -ENOMEM;

	/* Signals are for the program's main thread. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	for (unsigned i = 1; !r && i < threads->n; i++) {
		struct worker *worker = &threads->workers[i - 1];

		worker->threads = threads;
		worker->i = i;
		r = -pthread_create(&worker->id, NULL, work, worker);
		threads->n_started += !r;
	}
	pthread_sigmask(SIG_SETMASK, &before, NULL);

	if (r < 0) {
		kv_threads_free(threads);
		return kv_engine_error(r, "can't start %u threads", n);
	}
	*ret = threads;
	return 0;
}

struct kv_threads *kv_threads_free(struct kv_threads *threads)
{
	if (!threads)
		return NULL;

	threads->stop = true;
	announce(threads);
	for (unsigned i = 0; i < threads->n_started; i++)
		pthread_join(threads->workers[i].id, NULL);
	pthread_cond_destroy(&threads->done);
	pthread_cond_destroy(&threads->wake);
	pthread_mutex_destroy(&threads->lock);
	free(threads->workers);
	free(threads);
	return NULL;
}

unsigned kv_threads_n(const struct kv_threads *threads)
{
	return threads->n;
}
