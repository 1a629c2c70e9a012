/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reference calculators: the block manager of the reference engine, step by step. See compat.h.
 *
 * What our own pool and prefix index do differently (verified hits, reclaim order, leases) is in
 * alloc/pool.h and alloc/prefix.h; this is the behaviour that an engine had before.
 */
#ifndef KV_ALLOC_COMPAT_CACHE_H
#define KV_ALLOC_COMPAT_CACHE_H

#include <kvcached/keys.h>

#include "alloc/compat.h"

#define KV_COMPAT_HASH KV_KEYS_BYTES /* of kv_page_key() */

/* ---- block pool (compat_blocks.c) ---- */

struct kv_compat_key {
	uint8_t hash[KV_COMPAT_HASH];
	uint32_t group;
	uint32_t set; /* 0: no key */
};

struct kv_compat_block {
	struct kv_compat_key key;
	uint64_t registered; /* order of registration */
	int32_t refs;
	int32_t prev, next; /* free list; head and tail are links of block 0 */
};

struct kv_compat_blocks {
	struct kv_compat_block *block; /* [n]; 0 is the null block */
	int32_t n;
	int32_t n_free, n_cached;
	bool caching;
	uint64_t clock;
};

int kv_compat_blocks_init(struct kv_compat_blocks *p, int32_t n, bool caching);
void kv_compat_blocks_deinit(struct kv_compat_blocks *p);
/* All or nothing: returns @n, or 0. The oldest free blocks first; a key they had is forgotten. */
int32_t kv_compat_blocks_alloc(struct kv_compat_blocks *p, int32_t n, int32_t *ret_ids);
/* The last of a batch is freed first, so a chain's tail is reused before its head. */
int kv_compat_blocks_free(struct kv_compat_blocks *p, const int32_t *ids, size_t n);
int kv_compat_blocks_register(struct kv_compat_blocks *p, int32_t id,
			      const struct kv_compat_key *key);
/* The oldest registration of a key; 0: none. Takes no reference. */
int32_t kv_compat_blocks_find(const struct kv_compat_blocks *p, const struct kv_compat_key *key);
void kv_compat_blocks_touch(struct kv_compat_blocks *p, int32_t id);

/* ---- groups of one pool (compat_coordinator.c) ---- */

#define KV_COMPAT_MAX_GROUPS 8

enum kv_compat_cache_kind {
	KV_COMPAT_CACHE_FULL,
	KV_COMPAT_CACHE_SLIDING,
	KV_COMPAT_CACHE_STATE, /* a window of 2 of which only page ends are registered */
};

struct kv_compat_cache_group {
	enum kv_compat_cache_kind kind;
	int64_t block; /* tokens */
	int64_t window;
};

struct kv_compat_ids {
	int32_t *id;
	size_t n, room;
};

/* A request's blocks: one list a group, 0 for holes; tail: tokens free in the last block. */
struct kv_compat_tables {
	struct kv_compat_ids list[KV_COMPAT_MAX_GROUPS];
	int64_t tail[KV_COMPAT_MAX_GROUPS];
};

struct kv_compat_hashes {
	uint8_t (*hash)[KV_COMPAT_HASH]; /* of base pages */
	size_t n, room;
};

struct kv_compat_cache {
	struct kv_compat_blocks *pool;
	struct kv_compat_cache_group group[KV_COMPAT_MAX_GROUPS];
	size_t n_groups;
	int64_t base, lcm;
	/* Called for each block that gets a key; NULL: nobody listens. */
	void (*registered)(void *who, int32_t id, const struct kv_compat_key *key);
	void *who;
};

struct kv_compat_match {
	struct kv_compat_ids list[KV_COMPAT_MAX_GROUPS]; /* 0: a hole */
	int64_t hit_tokens;
};

void kv_compat_ids_push(struct kv_compat_ids *ids, int32_t id);
void kv_compat_cache_init(struct kv_compat_cache *c, struct kv_compat_blocks *pool,
			  const struct kv_compat_cache_group *groups, size_t n);
/* Adds the hashes of whole base pages of @tokens that are missing. */
void kv_compat_hashes_extend(struct kv_compat_hashes *h, const int32_t *tokens, size_t n_tokens,
			     int64_t base);
void kv_compat_cache_key(const struct kv_compat_cache *c, size_t group,
			 const struct kv_compat_hashes *h, size_t block, struct kv_compat_key *ret);
/**
 * kv_compat_cache_match() - the longest prefix that every group has
 * @pool:  where to look: the cache's own, or a host tier's with the same groups
 * @floor: tokens below this are taken as there; the lists start at floor / block
 */
void kv_compat_cache_match(const struct kv_compat_cache *c, const struct kv_compat_blocks *pool,
			   const struct kv_compat_hashes *h, int64_t max_tokens, int64_t floor,
			   struct kv_compat_match *ret);
void kv_compat_match_deinit(struct kv_compat_match *m);
/* Matched blocks that nobody holds: they leave the free list when claimed. */
int64_t kv_compat_cache_claim_cost(const struct kv_compat_cache *c,
				   const struct kv_compat_match *m);
void kv_compat_cache_claim(const struct kv_compat_cache *c, const struct kv_compat_match *m,
			   struct kv_compat_tables *t);
/* Blocks that @n more tokens need; @t NULL: on empty tables. */
int64_t kv_compat_cache_need(const struct kv_compat_cache *c, const struct kv_compat_tables *t,
			     int64_t n);
int64_t kv_compat_cache_credit(const struct kv_compat_cache *c, const struct kv_compat_tables *t,
			       int64_t computed, bool keyed_only);
/* Blocks below every window at @computed tokens become holes. */
void kv_compat_cache_expire(const struct kv_compat_cache *c, struct kv_compat_tables *t,
			    int64_t computed);
/* Gives keys to the full blocks of @computed tokens, from base page @first on. */
void kv_compat_cache_register(const struct kv_compat_cache *c, const struct kv_compat_tables *t,
			      const struct kv_compat_hashes *h, int64_t first, int64_t computed);
/* All or nothing over groups. */
bool kv_compat_cache_acquire(const struct kv_compat_cache *c, struct kv_compat_tables *t,
			     int64_t n);
void kv_compat_cache_release(const struct kv_compat_cache *c, struct kv_compat_tables *t);

/* ---- compact table of one group (compat_paged.c) ---- */

struct kv_compat_paged {
	int64_t rows, stride;
	int64_t window; /* 0: full history */
	int32_t *stack; /* free pages, the last is taken first */
	size_t n_stack;
	struct kv_compat_ids pages; /* borrowed ones, then owned ones */
	size_t n_borrowed;
	int64_t base; /* logical page of pages.id[0] */
	int64_t cursor, committed;
	int64_t n_failed;
};

int kv_compat_paged_init(struct kv_compat_paged *p, int64_t rows, int64_t stride, int64_t window,
			 int32_t n_pages);
void kv_compat_paged_deinit(struct kv_compat_paged *p);
int kv_compat_paged_acquire(struct kv_compat_paged *p, int64_t target);
/* ret_released: pages that leave the table, in order; the owned ones go back */
void kv_compat_paged_skip(struct kv_compat_paged *p, int64_t lower,
			  struct kv_compat_ids *ret_released);
void kv_compat_paged_rewind(struct kv_compat_paged *p, int64_t target,
			    struct kv_compat_ids *ret_released);
/* The owned pages up to @target go to a snapshot and stay visible; ret_base: its first page. */
int kv_compat_paged_commit(struct kv_compat_paged *p, int64_t target, bool state,
			   struct kv_compat_ids *ret_segment, int64_t *ret_base);
void kv_compat_paged_release(struct kv_compat_paged *p, struct kv_compat_ids *ret_released);
/* A snapshot's pages come back to the allocator. */
void kv_compat_paged_give(struct kv_compat_paged *p, const struct kv_compat_ids *segment);

#endif
