/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the free blocks of a pool lie: a bit for each block, and for each extent of the arena how many
 * blocks that touch it are in use and how many are free.
 *
 *   NONE   not the pool's            EMPTY  free blocks only: can leave the pool as it is
 *   BARE   the pool's, no block      PART   some of each, in 16 classes by the share in use
 *   FULL   used blocks only
 *
 * Blocks are handed out from the fullest extents first, so that the others run empty. A block that
 * reaches into several extents counts in each of them. All but init is O(1) a block and extent.
 */
#ifndef KV_ALLOC_SPACE_H
#define KV_ALLOC_SPACE_H

#include <stdbool.h>
#include <stdint.h>

enum kv_space_class {
	KV_SPACE_NONE = 0,
	KV_SPACE_BARE = 1,
	KV_SPACE_EMPTY = 2,
	KV_SPACE_FULL = 3,
	KV_SPACE_PART = 4, /* the emptiest of 16 */
	KV_SPACE_CLASSES = 20,
};

struct kv_space_extent {
	uint32_t n_used, n_free;
	int32_t next, prev; /* in the list of its class; -1: none */
	uint32_t first;	    /* block that begins in it or behind it */
	uint32_t from;	    /* word of kv_space::free: no free block that begins here lies before it */
	uint8_t class;
	bool owned;
	bool touched; /* was owned at some time */
	bool leaving; /* its blocks are being moved elsewhere: nothing is moved into it */
};

struct kv_space {
	uint64_t block_bytes;
	uint32_t shift; /* log2 of the bytes of an extent */
	uint32_t n_extents, id_limit;
	uint32_t n_free;
	uint32_t classes; /* bit c: list c has an extent */
	int32_t lists[KV_SPACE_CLASSES];
	uint32_t n_in[KV_SPACE_CLASSES];
	uint64_t *free; /* bit id */
	struct kv_space_extent *extents; /* [n_extents + 1]; the last is an end */
};

/* kv_space_init() - @extent_bytes: a power of two; 0: all is one extent, which is owned. 0; -ENOMEM */
int kv_space_init(struct kv_space *s, uint32_t id_limit, uint64_t block_bytes,
		  uint64_t extent_bytes);
void kv_space_deinit(struct kv_space *s);

/* kv_space_own() - extent @i comes to the pool, or leaves it: then no block may touch it */
void kv_space_own(struct kv_space *s, uint32_t i, bool owned);

void kv_space_add(struct kv_space *s, int32_t id);    /* absent -> free */
void kv_space_remove(struct kv_space *s, int32_t id); /* free -> absent */
void kv_space_use(struct kv_space *s, int32_t id);    /* free -> used */
void kv_space_release(struct kv_space *s, int32_t id); /* used -> free */

static inline bool kv_space_is_free(const struct kv_space *s, int32_t id)
{
	return s->free[(uint32_t)id / 64] >> (uint32_t)id % 64 & 1;
}

/* kv_space_pick() - the free block to hand out next; -1: none. It stays free. */
int32_t kv_space_pick(struct kv_space *s);

/* kv_space_pick_in() - a free block that begins in extent @i; -1: none */
int32_t kv_space_pick_in(struct kv_space *s, uint32_t i);

/* kv_space_pick_above() - likewise, of an extent of a class above @class that isn't leaving; -1: none */
int32_t kv_space_pick_above(struct kv_space *s, int class);

/* kv_space_spare() - an extent that no block in use touches; -1: none */
static inline int32_t kv_space_spare(const struct kv_space *s)
{
	return s->lists[KV_SPACE_BARE] >= 0 ? s->lists[KV_SPACE_BARE] : s->lists[KV_SPACE_EMPTY];
}

static inline uint32_t kv_space_n_spare(const struct kv_space *s)
{
	return s->n_in[KV_SPACE_BARE] + s->n_in[KV_SPACE_EMPTY];
}

/* kv_space_n_free_spare() - free blocks that begin in EMPTY extents; a walk over words of bits of these */
uint32_t kv_space_n_free_spare(const struct kv_space *s);

/* Extents that a block touches: [first, last]; of one extent the blocks that touch it: [first, end) */
static inline uint32_t kv_space_first(const struct kv_space *s, int32_t id)
{
	return (uint32_t)((uint64_t)id * s->block_bytes >> s->shift);
}

static inline uint32_t kv_space_last(const struct kv_space *s, int32_t id)
{
	uint64_t end = ((uint64_t)id + 1) * s->block_bytes;

	return (uint32_t)((end ? end - 1 : 0) >> s->shift);
}

void kv_space_blocks(const struct kv_space *s, uint32_t i, int32_t *ret_first, int32_t *ret_end);

/* kv_space_check() - counts and lists against the bits and @used: [id_limit]. Return: what is wrong. */
uint32_t kv_space_check(const struct kv_space *s, const bool *used);
uint32_t kv_space_check_lists(const struct kv_space *s); /* likewise, of extents in their lists alone */

#endif
