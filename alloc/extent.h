/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Extents: which pool each part of each arena belongs to.
 *
 * Every arena is cut into extents of one size. A pool that spans several GPUs owns the same indexes
 * on all of them, so that a block id means the same place everywhere.
 *
 *   CLEAN --take--> OWNED --give--> DIRTY --scrub--> SCRUBBING --cleaned--> CLEAN
 *                                                    ^    |
 *                                        scrub_one --+    +--withhold--> HELD
 *   n_clean + n_owned + n_dirty + n_scrubbing + n_held == n     on each GPU
 *
 * HELD: it has no memory, because processes of its last pool keep it (daemon/isolate.c).
 *
 * An extent that leaves a pool is zeroed before another can take it: a new owner finds no foreign
 * bytes. The pool that it belonged to may take it back as it is, as long as nobody has begun to zero it:
 * the bytes are its own. Pure bookkeeping; zeroing is the mover's work.
 */
#ifndef KV_ALLOC_EXTENT_H
#define KV_ALLOC_EXTENT_H

#include <stdbool.h>
#include <stdint.h>

#include "include/kvcached/types.h"

enum kv_extent_state {
	KV_EXTENT_CLEAN = 0,
	KV_EXTENT_OWNED = 1,
	KV_EXTENT_DIRTY = 2,
	KV_EXTENT_SCRUBBING = 3,
	KV_EXTENT_HELD = 4,
	KV_EXTENT_STATES
};

struct kv_extent {
	union {
		uint64_t word; /* changed by one store: the map may outlive its owner */
		struct {
			uint32_t owner; /* pool number, where OWNED; where DIRTY, whose it was, or 0 */
			uint32_t state;
		};
	};
};

struct kv_extents {
	uint64_t bytes; /* of one extent */
	uint32_t n_gpus;
	uint32_t n[KV_MAX_GPUS]; /* extents of each arena */
	uint32_t n_state[KV_MAX_GPUS][KV_EXTENT_STATES];
	struct kv_extent *map[KV_MAX_GPUS];
	void *own_memory; /* of the maps, where the caller gave none */
};

/* kv_extents_init() - @clean: whether fresh memory is known to be zero. Return: 0 or -ENOMEM. */
int kv_extents_init(struct kv_extents *e, uint32_t n_gpus, const uint64_t *arena_bytes,
		    uint64_t extent_bytes, bool clean);
void kv_extents_deinit(struct kv_extents *e);

/*
 * kv_extents_init_in() - likewise, with a map that outlives this process
 * @memory: kv_extents_map_bytes(), the caller's; zero
 *
 * kv_extents_adopt() goes on with such a map as another process left it, at whatever instruction:
 * what was being scrubbed is dirty again.
 */
void kv_extents_init_in(struct kv_extents *e, uint32_t n_gpus, const uint64_t *arena_bytes,
			uint64_t extent_bytes, bool clean, void *memory);
void kv_extents_adopt(struct kv_extents *e, uint32_t n_gpus, const uint64_t *arena_bytes,
		      uint64_t extent_bytes, void *memory);
uint64_t kv_extents_map_bytes(uint32_t n_gpus, const uint64_t *arena_bytes, uint64_t extent_bytes);

/* kv_extents_reset() - after an adoption, extent @i of @gpu becomes DIRTY, whatever it was */
void kv_extents_reset(struct kv_extents *e, uint32_t gpu, uint32_t i);

/**
 * kv_extents_find() - a run that is CLEAN on all GPUs of @gpu_mask
 * @n_min, @n_max: how long; the longest run up to n_max, the first of them
 *
 * Return: its length, or 0 if none has n_min.
 */
uint32_t kv_extents_find(const struct kv_extents *e, uint32_t gpu_mask, uint32_t n_min,
			 uint32_t n_max, uint32_t *ret_first);

/* How many extents are CLEAN, or will be once scrubbed (not HELD), on every GPU of the mask. */
uint32_t kv_extents_available(const struct kv_extents *e, uint32_t gpu_mask, bool with_dirty);

/* Extents that pool @owner can take now: clean ones, and dirty ones that were its own. */
uint32_t kv_extents_usable(const struct kv_extents *e, uint32_t gpu_mask, uint32_t owner);

/**
 * kv_extents_run() - the first run at or after *@at of what pool @owner can take now
 * @n_max: it is cut there
 *
 * Return: its length; *@at is behind it. 0: there is none.
 */
uint32_t kv_extents_run(const struct kv_extents *e, uint32_t gpu_mask, uint32_t owner, uint32_t n_max,
			uint32_t *at, uint32_t *ret_first);

void kv_extents_take(struct kv_extents *e, uint32_t gpu_mask, uint32_t first, uint32_t n,
		     uint32_t owner);
void kv_extents_give(struct kv_extents *e, uint32_t gpu_mask, uint32_t first, uint32_t n);

/* kv_extents_scrub() - the next dirty run of at most @n_max on @gpu becomes SCRUBBING; 0: none */
uint32_t kv_extents_scrub(struct kv_extents *e, uint32_t gpu, uint32_t n_max, uint32_t *ret_first);
/* kv_extents_scrub_next() - likewise, at *@at or behind it, which is moved on: one walk for many runs */
uint32_t kv_extents_scrub_next(struct kv_extents *e, uint32_t gpu, uint32_t n_max, uint32_t *at,
			       uint32_t *ret_first);
void kv_extents_cleaned(struct kv_extents *e, uint32_t gpu, uint32_t first, uint32_t n);

/* The scrub was not done (its mover died): DIRTY again. */
void kv_extents_scrub_failed(struct kv_extents *e, uint32_t gpu, uint32_t first, uint32_t n);

/* Of one extent: DIRTY or HELD becomes SCRUBBING; SCRUBBING becomes HELD. */
void kv_extents_scrub_one(struct kv_extents *e, uint32_t gpu, uint32_t i);
void kv_extents_withhold(struct kv_extents *e, uint32_t gpu, uint32_t i);

static inline bool kv_extents_owned(const struct kv_extents *e, uint32_t gpu, uint32_t i,
				    uint32_t owner)
{
	return i < e->n[gpu] && e->map[gpu][i].state == KV_EXTENT_OWNED &&
	       e->map[gpu][i].owner == owner;
}

/* kv_extents_check() - counts against the map. Return: how many numbers are wrong. */
uint32_t kv_extents_check(const struct kv_extents *e);

#endif
