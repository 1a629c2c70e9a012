/* SPDX-License-Identifier: Apache-2.0 */
#include "alloc/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

struct kv_key kv_key_next(uint64_t seed, struct kv_key parent, const int32_t *tokens,
			  size_t n_tokens)
{
	XXH128_hash_t h = XXH3_128bits_withSeed(tokens, n_tokens * sizeof(*tokens),
						seed ^ parent.lo ^ (parent.hi << 1));

	return (struct kv_key){ h.low64, h.high64 };
}
