/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads for the length of one call.
 *
 * They are started and joined by the call that uses them, so that a process that forks, exits or
 * unloads the library never has any of ours. Starting one costs about 20 us: callers ask for as
 * many as the work pays for. All signals are blocked in them.
 */
#ifndef KV_KERNELS_WORKERS_H
#define KV_KERNELS_WORKERS_H

/* KVCACHED_THREADS (1..64), else the CPUs this process may run on, at most 8. Read once. */
int kv_workers_max(void);

/*
 * kv_workers_run() - call run(context, i) for i in 0..n-1, each on its own thread
 * @n: 1..kv_workers_max(); i = 0 is the calling thread
 *
 * Where a thread can't be started its call runs on the calling thread.
 */
void kv_workers_run(int n, void (*run)(void *context, int i), void *context);

#endif
