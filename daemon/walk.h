/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A long answer: a walk over the blocks of all pools, in slices of some 0.1 ms. While it goes on nothing
 * else is read from its connection; others are served between two slices, and pools come and go.
 */
#ifndef KV_DAEMON_WALK_H
#define KV_DAEMON_WALK_H

#include <stdbool.h>
#include <stdint.h>

struct kv_daemon;
struct kv_peer;
struct kv_pool;

/* The beginning of what whoever answers keeps of it, freed by free(). */
struct kv_walk {
	/* The next slice of a pool; *@began is false before its first. False: that was its last. */
	bool (*slice)(struct kv_walk *walk, struct kv_pool *pool, bool began);
	void (*end)(struct kv_walk *walk, struct kv_peer *peer); /* there are no more: the answer */
	uint64_t pool_id; /* of that where it is, or that it has done last */
	bool began;
};

/* kv_walk_start() - @peer is answered by @walk, which is handed over */
void kv_walk_start(struct kv_peer *peer, struct kv_walk *walk);
/* kv_walk_on() - a slice of the walk of @peer; after the last its answer is sent, and it is over */
void kv_walk_on(struct kv_peer *peer);
/* kv_walk_next() - likewise, of any. False: there are no more pools */
bool kv_walk_next(struct kv_daemon *d, struct kv_walk *walk);

#endif
