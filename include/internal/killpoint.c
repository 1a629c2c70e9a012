/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "include/internal/killpoint.h"

static const char *const names[] = {
#define KV_KILLPOINT_TEXT(name) #name,
	KV_KILLPOINTS(KV_KILLPOINT_TEXT)
#undef KV_KILLPOINT_TEXT
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t looked; /* the process that has looked at its environment: a forked one looks again */
static int chosen = -1;	      /* enum kv_killpoint */
static unsigned long due;     /* passes of it, this one included, until it kills */
static const char *once_path; /* or NULL */
static unsigned char *seen;   /* [KV_N_KILLPOINTS] in a file, or NULL */

const char *kv_killpoint_name(enum kv_killpoint point)
{
	return names[point];
}

static void choose(const char *text)
{
	size_t length = strcspn(text, ":");

	for (int i = 0; i < KV_N_KILLPOINTS; i++) {
		if (!strncmp(names[i], text, length) && !names[i][length])
			chosen = i;
	}
	due = text[length] ? strtoul(text + length + 1, NULL, 10) : 1;
}

static void look_at_environment(void)
{
	const char *point = getenv("KVCACHED_KILL_POINT"), *path = getenv("KVCACHED_KILL_SEEN");

	chosen = -1;
	once_path = getenv("KVCACHED_KILL_ONCE");
	if (point)
		choose(point);
	if (path) {
		int fd = open(path, O_RDWR | O_CLOEXEC);
		void *p = fd < 0 ? MAP_FAILED
				 : mmap(NULL, KV_N_KILLPOINTS, PROT_READ | PROT_WRITE, MAP_SHARED,
					fd, 0);

		if (fd >= 0)
			close(fd);
		if (p != MAP_FAILED)
			seen = p;
	}
}

void kv_killpoint_pass(enum kv_killpoint point)
{
	int saved = errno;

	pthread_mutex_lock(&lock);
	if (looked != getpid())
		look_at_environment();
	looked = getpid();
	pthread_mutex_unlock(&lock);
	if (seen)
		__atomic_store_n(&seen[point], 1, __ATOMIC_RELAXED);
	if ((int)point == chosen && __atomic_fetch_sub(&due, 1, __ATOMIC_RELAXED) == 1 &&
	    (!once_path || !unlink(once_path)))
		kill(getpid(), SIGKILL);
	errno = saved;
}
