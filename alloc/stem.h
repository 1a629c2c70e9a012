/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Cached blocks by what they follow and how they begin, in the index's pages behind its buckets: for a
 * prompt that has only the first tokens of a block in common with what is cached.
 *
 *   stem    the first tokens of a block: an eighth of it, at least 1 and at most 8
 *   bucket  8 words of one cache line; a word is tag << 32 | id + 1, 0 is an empty place
 *
 * A key has one bucket: who looks for it reads one line, and at most 8 blocks are tried. More blocks may
 * follow the same and begin with the same stem (what comes after a system prompt): the latest are
 * found. A block that finds no empty place takes another's. So nothing depends on an entry being there, and
 * each is confirmed by the block itself, token by token.
 *
 * Where its entry is stands in the block's book: taking it out is one store, and needs none of the tokens,
 * which clients write.
 *
 * Threads: one writer (the daemon); any number of readers in other processes, without a lock.
 */
#ifndef KV_ALLOC_STEM_H
#define KV_ALLOC_STEM_H

#include <stdbool.h>

#include "alloc/hash.h"
#include "include/internal/atomic.h"
#include "include/internal/shm.h"

#define KV_STEM_TOKENS 8u

struct kv_stems {
	uint64_t *words; /* [n_buckets][KV_BUCKET_WORDS] */
	uint32_t n_buckets; /* a power of two; 0: blocks of one token have no beginning of their own */
	uint32_t id_limit;
};

/* kv_stem_buckets() - buckets for a pool of @id_limit blocks of @block_tokens; a power of two, or 0 */
uint32_t kv_stem_buckets(uint32_t id_limit, uint32_t block_tokens);

static inline uint32_t kv_stem_tokens(uint32_t block_tokens)
{
	uint32_t n = block_tokens / 8;

	return n < 1 ? 1 : n < KV_STEM_TOKENS ? n : KV_STEM_TOKENS;
}

/**
 * kv_stem_key() - of blocks that begin with the stem of @tokens
 * @follows: what their descriptors say of parent, epoch and row
 * @row:     theirs; NULL: they have none
 */
struct kv_key kv_stem_key(const struct kv_shm_pool *head, uint64_t follows,
			  const struct kv_shm_row *row, const int32_t *tokens);

/**
 * kv_stem_find() - the next block that may have @key
 * @cursor: 0 at first; the search goes on from there
 *
 * Return: an id below id_limit, or -1.
 */
static inline int32_t kv_stem_find(const struct kv_stems *stems, struct kv_key key, uint32_t *cursor)
{
	const uint64_t *bucket = stems->words + (uint64_t)((uint32_t)key.lo & (stems->n_buckets - 1)) *
						       KV_BUCKET_WORDS;

	while (*cursor < KV_BUCKET_WORDS) {
		uint64_t word = kv_load_acquire(&bucket[(*cursor)++]);
		uint32_t id = (uint32_t)word - 1;

		if ((uint32_t)word && word >> 32 == (uint32_t)key.hi && id < stems->id_limit)
			return (int32_t)id;
	}
	return -1;
}

/* kv_stem_place() - where an entry of @key and @id is to stand, counted from 1 */
uint32_t kv_stem_place(const struct kv_stems *stems, struct kv_key key, int32_t id);
/* kv_stem_put() - it stands there from now on */
void kv_stem_put(struct kv_stems *stems, uint32_t place, struct kv_key key, int32_t id);
static inline void kv_stem_prefetch(const struct kv_stems *stems, uint32_t place)
{
	if (place)
		__builtin_prefetch(&stems->words[place - 1], 1);
}

/* kv_stem_rename(), kv_stem_remove() - the entry of @id at @place, if it is still there; 0 is nowhere */
void kv_stem_rename(struct kv_stems *stems, uint32_t place, int32_t from, int32_t to);
void kv_stem_remove(struct kv_stems *stems, uint32_t place, int32_t id);

#endif
