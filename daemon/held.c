/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How many cached blocks each session holds. Clients pin and unpin without a message, so that is known only
 * by a walk over the pool's descriptors: it is made when somebody has to know, and then not again until it
 * has cost a sixteenth of the time that has passed.
 */
#include "daemon/daemon.h"
#include "include/internal/socket.h"

#define COUNT_AGAIN KV_MSEC
#define COUNT_PART  16

void kv_held_update(struct kv_pool *pool)
{
	uint32_t held[KV_MAX_SESSIONS];
	int64_t start = kv_now(), pause;

	if (start < pool->count_held_ns)
		return;
	kv_books_count(&pool->books, NULL, held);
	for (uint32_t i = 0; i < KV_MAX_SESSIONS; i++) {
		struct kv_session *s = pool->slots[i];

		if (!s)
			continue;
		s->n_held = held[i];
		s->n_published_then = s->n_published;
	}
	pause = COUNT_PART * (kv_now() - start);
	pool->count_held_ns = start + (pause > COUNT_AGAIN ? pause : COUNT_AGAIN);
}
