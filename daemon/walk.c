/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "daemon/daemon.h"
#include "daemon/walk.h"
#include "include/internal/cleanup.h"

/* Pools stand in the order of their ids. */
static struct kv_pool *find(struct kv_daemon *d, uint64_t from)
{
	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);

		if (pool->id >= from)
			return pool;
	}
	return NULL;
}

bool kv_walk_next(struct kv_daemon *d, struct kv_walk *walk)
{
	struct kv_pool *pool = find(d, walk->pool_id + !walk->began);

	if (!pool)
		return false;
	/* The one it was in may have ended. */
	walk->began = walk->began && pool->id == walk->pool_id;
	walk->pool_id = pool->id;
	walk->began = walk->slice(walk, pool, walk->began);
	return true;
}

void kv_walk_start(struct kv_peer *peer, struct kv_walk *walk)
{
	peer->walk = walk;
}

void kv_walk_on(struct kv_peer *peer)
{
	struct kv_walk *walk = peer->walk;

	if (kv_walk_next(peer->daemon, walk))
		return;
	peer->walk = NULL;
	walk->end(walk, peer);
	free(walk);
}
