/* SPDX-License-Identifier: Apache-2.0 */
/* kv_key_next() for loops over the blocks of a prompt, where a call each would show. */
#ifndef KV_ALLOC_HASH_INLINE_H
#define KV_ALLOC_HASH_INLINE_H

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "alloc/hash.h"

static inline struct kv_key kv_key_next_inline(uint64_t seed, struct kv_key parent,
					       const int32_t *tokens, size_t n_tokens)
{
	XXH128_hash_t h = XXH3_128bits_withSeed(tokens, n_tokens * sizeof(*tokens),
						seed ^ parent.lo ^ (parent.hi << 1));

	return (struct kv_key){ h.low64, h.high64 };
}

#endif
