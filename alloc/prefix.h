/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The prefix index in shared pages (include/internal/shm.h): from a key to blocks that may have it.
 *
 *   bucket  8 words of one cache line; a word is tag << 32 | id + 1, 0 is an empty place
 *   a key's entries lie in bucket a(key) or b(key), nowhere else, from the key's own place in it on:
 *   a lookup reads one word as a rule and two cache lines at most, and removing an entry is one
 *   store, with nothing to move
 *
 * The table has at least twice as many places as the pool can have blocks, so that both buckets
 * being full is a curiosity: then the block stays unpublished.
 *
 * Threads: one writer (the daemon); any number of readers in other processes, without a lock.
 */
#ifndef KV_ALLOC_PREFIX_H
#define KV_ALLOC_PREFIX_H

#include "alloc/hash.h"
#include "include/internal/atomic.h"
#include "include/internal/shm.h"

struct kv_prefix {
	uint64_t *words; /* [n_buckets][KV_BUCKET_WORDS] */
	uint32_t n_buckets;
	uint32_t id_limit;
};

/* kv_prefix_buckets() - buckets for a pool of @id_limit blocks: a power of two */
uint32_t kv_prefix_buckets(uint32_t id_limit);

static inline uint32_t kv_prefix_bucket(const struct kv_prefix *prefix, struct kv_key key, int i)
{
	return (uint32_t)(i ? key.lo >> 32 : key.lo) & (prefix->n_buckets - 1);
}

/* The place in its buckets where the search for a key begins. */
static inline uint32_t kv_prefix_place(struct kv_key key)
{
	return (uint32_t)(key.hi >> 32) % KV_BUCKET_WORDS;
}

/**
 * kv_prefix_find() - the next block that may have @key
 * @cursor: 0 at first; the search goes on from there
 *
 * Return: an id below id_limit, or -1.
 */
static inline int32_t kv_prefix_find(const struct kv_prefix *prefix, struct kv_key key,
				     uint32_t *cursor)
{
	while (*cursor < 2 * KV_BUCKET_WORDS) {
		uint32_t i = (*cursor)++;
		uint32_t bucket = kv_prefix_bucket(prefix, key, i >= KV_BUCKET_WORDS);
		uint32_t place = (kv_prefix_place(key) + i) % KV_BUCKET_WORDS;
		uint64_t word = kv_load_acquire(
			&prefix->words[(uint64_t)bucket * KV_BUCKET_WORDS + place]);
		uint32_t id = (uint32_t)word - 1;

		if ((uint32_t)word && word >> 32 == (uint32_t)key.hi && id < prefix->id_limit)
			return (int32_t)id;
	}
	return -1;
}

/* kv_prefix_prefetch() - the line that kv_prefix_find() looks at first */
static inline void kv_prefix_prefetch(const struct kv_prefix *prefix, struct kv_key key)
{
	__builtin_prefetch(&prefix->words[(uint64_t)kv_prefix_bucket(prefix, key, 0) *
					  KV_BUCKET_WORDS]);
}

/* kv_prefix_insert() - Return: 0; -ENOSPC if both buckets are full. */
int kv_prefix_insert(struct kv_prefix *prefix, struct kv_key key, int32_t id);

/* kv_prefix_rename() - an entry names another block, by one store. Return: 0; -ENOENT. */
int kv_prefix_rename(struct kv_prefix *prefix, struct kv_key key, int32_t from, int32_t to);

/* kv_prefix_remove() - Return: 0; -ENOENT if it isn't there. */
int kv_prefix_remove(struct kv_prefix *prefix, struct kv_key key, int32_t id);

#endif
