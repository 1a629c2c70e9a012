/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads that stay: a step of a model runs some hundred short parallel loops, and starting a
 * thread takes as long as one of them. A thread that finds no work spins for some microseconds,
 * then sleeps.
 *
 * One caller at a time. Which thread does an item is undefined.
 */
#ifndef KV_ENGINE_THREADS_H
#define KV_ENGINE_THREADS_H

#include <stddef.h>

struct kv_threads;

/*
 * kv_threads_new() - @n threads, the caller's own included; 0: the CPUs this process may run on
 *
 * Return: 0; -ENOMEM; -EAGAIN if a thread can't be started.
 */
int kv_threads_new(unsigned n, struct kv_threads **ret);

/* NULL is allowed; returns NULL. */
struct kv_threads *kv_threads_free(struct kv_threads *threads);

unsigned kv_threads_n(const struct kv_threads *threads);

/* kv_threads_run() - call run(context, item, thread) for every item below @n; back when all are
 * done */
void kv_threads_run(struct kv_threads *threads, size_t n,
		    void (*run)(void *context, size_t item, unsigned thread), void *context);

#endif
