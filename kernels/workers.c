/* SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>

#include "kernels/workers.h"

#define MAX_THREADS	64
#define DEFAULT_THREADS 8

struct worker {
	void (*run)(void *context, int i);
	void *context;
	int i;
	bool started;
	pthread_t thread;
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int max_threads;

static void init(void)
{
	const char *text = getenv("KVCACHED_THREADS");
	char *end;
	cpu_set_t cpus;
	long n;

	if (text) {
		n = strtol(text, &end, 10);
		if (*text && !*end && n >= 1) {
			max_threads = n > MAX_THREADS ? MAX_THREADS : (int)n;
			return;
		}
	}
	n = sched_getaffinity(0, sizeof(cpus), &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
	max_threads = n > DEFAULT_THREADS ? DEFAULT_THREADS : (int)n;
}

int kv_workers_max(void)
{
	pthread_once(&once, init);
	return max_threads;
}

static void *start(void *p)
{
	struct worker *worker = p;

	worker->run(worker->context, worker->i);
	return NULL;
}

void kv_workers_run(int n, void (*run)(void *context, int i), void *context)
{
	struct worker workers[MAX_THREADS];
	sigset_t all, before;

	if (n > 1) { /* threads inherit the mask: the host program's handlers stay on its own */
		sigfillset(&all);
		pthread_sigmask(SIG_SETMASK, &all, &before);
		for (int i = 1; i < n; i++) {
			workers[i] = (struct worker){.run = run, .context = context, .i = i};
			workers[i].started =
				pthread_create(&workers[i].thread, NULL, start, &workers[i]) == 0;
		}
		pthread_sigmask(SIG_SETMASK, &before, NULL);
	}
	run(context, 0);
	for (int i = 1; i < n; i++) {
		if (workers[i].started)
			pthread_join(workers[i].thread, NULL);
		else
			run(context, i);
	}
}
