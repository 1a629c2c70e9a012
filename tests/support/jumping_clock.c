/* SPDX-License-Identifier: Apache-2.0 */
/* To be loaded before libc: the wall clock jumps by an hour, forth and back, each time it is asked. */
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))

static int64_t jump(void)
{
	static unsigned int n;

	return __atomic_fetch_add(&n, 1, __ATOMIC_RELAXED) % 2 ? 3600 : -3600;
}

PUBLIC int clock_gettime(clockid_t clock, struct timespec *ret)
{
	int r = (int)syscall(SYS_clock_gettime, clock, ret);

	if (!r && clock == CLOCK_REALTIME)
		ret->tv_sec += jump();
	return r;
}

PUBLIC int gettimeofday(struct timeval *restrict ret, void *restrict zone)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	*ret = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
	return 0;
}

PUBLIC time_t time(time_t *ret)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	if (ret)
		*ret = now.tv_sec;
	return now.tv_sec;
}
