/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The key of a block in a prefix: XXH3-128 over its tokens, seeded by the pool and by the key of the
 * block before it. A key only narrows the search; a hit is what compares equal, token by token and
 * parent by parent (alloc/prefix.h), so a collision costs a miss.
 */
#ifndef KV_ALLOC_HASH_H
#define KV_ALLOC_HASH_H

#include <stddef.h>
#include <stdint.h>

struct kv_key {
	uint64_t lo, hi;
};

/* kv_key_next() - @parent is {0, 0} for the first block of a chain */
struct kv_key kv_key_next(uint64_t seed, struct kv_key parent, const int32_t *tokens,
			  size_t n_tokens);

/* kv_key_fold() - what the first block of a chain, or one with a row, follows: @data as well */
struct kv_key kv_key_fold(uint64_t seed, struct kv_key parent, const void *data, size_t n_bytes);

#endif
