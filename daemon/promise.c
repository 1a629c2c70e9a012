/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Promises that are over (shm.h) leave their pools' pages long before the clock comes round to them again,
 * and those of a session before its slot has another one.
 */
#include "daemon/daemon.h"
#include "include/internal/killpoint.h"
#include "include/internal/socket.h"

#define CLEAR_PAUSE (5 * KV_SEC) /* some 10 us of each pool */

void kv_promises_clear(struct kv_pool *pool, uint32_t slot)
{
	uint64_t *words = kv_shm_promises(pool->blocks, pool->head);
	int64_t now = kv_now();

	for (uint32_t i = 0; i < KV_PROMISES; i++) {
		uint64_t word = kv_load_relaxed(&words[i]);

		/* Who writes another one meanwhile keeps it. */
		if (word && (kv_promise_slot(word) == slot || kv_promise_is_over(word, now)))
			kv_compare_exchange(&words[i], &word, 0);
	}
	KV_KILLPOINT(worker_promises_cleared);
}

static void clear_all(void *arg)
{
	struct kv_daemon *d = arg;

	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next)
		kv_promises_clear(kv_container_of(l, struct kv_pool, link), UINT32_MAX);
	kv_timer_set(d->promise_timer, CLEAR_PAUSE);
}

int kv_promises_start(struct kv_daemon *d)
{
	int r = kv_timer_new(d->loop, clear_all, d, &d->promise_timer);

	if (r >= 0)
		kv_timer_set(d->promise_timer, CLEAR_PAUSE);
	return r;
}
