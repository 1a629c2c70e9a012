/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ghosts: keys of blocks that were evicted not long ago, and what was known of them. A ring in
 * order of eviction and a table from key to place in it; two keys that want one place of the table
 * cost the older its memory, nothing else.
 */
#ifndef KV_ALLOC_GHOST_H
#define KV_ALLOC_GHOST_H

#include <stdbool.h>
#include <stdint.h>

#include "alloc/hash.h"

struct kv_ghost {
	struct kv_key key; /* {0, 0}: it has come back, or was overwritten */
	uint64_t last;	   /* use */
	uint32_t n_uses;
	uint8_t class;
};

struct kv_ghosts {
	struct kv_ghost *ring; /* [room], a power of two */
	uint32_t *table;       /* [4 * room] place in the ring + 1 */
	uint32_t room;
	uint64_t head, tail; /* of the ring: [tail, head) */
};

void kv_ghosts_deinit(struct kv_ghosts *g);

/**
 * kv_ghosts_add() - remember an evicted block
 * @most: how many to remember; the oldest go beyond that
 *
 * Without memory for more it remembers fewer.
 */
void kv_ghosts_add(struct kv_ghosts *g, const struct kv_ghost *ghost, uint32_t most);

/* kv_ghosts_prefetch() - @key is going to be added soon */
void kv_ghosts_prefetch(const struct kv_ghosts *g, struct kv_key key);

/* kv_ghosts_take() - the block of @key comes back. True: it was known, @ret is what of it was */
bool kv_ghosts_take(struct kv_ghosts *g, struct kv_key key, struct kv_ghost *ret);

/* kv_ghosts_at() - number @i of [tail, head) in order of eviction, taken modulo; NULL: it has come back */
const struct kv_ghost *kv_ghosts_at(const struct kv_ghosts *g, uint64_t i);

#endif
