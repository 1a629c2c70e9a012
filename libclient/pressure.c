/* SPDX-License-Identifier: Apache-2.0 */
/* Notices of the daemon that others wait for memory: looked at in each step, or slept for. */
#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "libclient/internal.h"

static int read_notice(const struct kv_pool *pool, struct kv_pressure *ret)
{
	const struct kv_shm_session *s = pool->session;

	/* Pairs with the release in the daemon's notice. */
	ret->sequence = kv_load_acquire(&s->pressure);
	ret->n_blocks = kv_load_relaxed(&s->pressure_blocks);
	ret->deadline_ns = kv_load_relaxed(&s->pressure_deadline);
	return ret->n_blocks > 0;
}

KV_PUBLIC int kv_pool_pressure(struct kv_pool *pool, struct kv_pressure *ret)
{
	int r = kv_forked(pool->fork_generation);

	if (r < 0)
		return r;
	r = read_notice(pool, ret);
	if (kv_granules_stale(pool))
		kv_granules_let_go(pool);
	return r;
}

KV_PUBLIC int kv_pool_pressure_wait(struct kv_pool *pool, uint32_t sequence, int64_t timeout,
				    struct kv_pressure *ret)
{
	int64_t deadline = kv_until(timeout);
	int r = kv_forked(pool->fork_generation);

	if (r < 0)
		return r;
	for (;;) {
		int64_t left = deadline - kv_now();
		struct timespec t = { .tv_sec = left / KV_SEC, .tv_nsec = left % KV_SEC };

		r = read_notice(pool, ret);
		if (ret->sequence != sequence)
			return 1;
		if (left <= 0)
			return 0;
		/* The daemon counts it up, then wakes who sleeps for it: no notice is missed in between. */
		syscall(SYS_futex, &pool->session->pressure, FUTEX_WAIT, sequence, &t, NULL, 0);
	}
}
