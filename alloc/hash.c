/* SPDX-License-Identifier: Apache-2.0 */
#include "alloc/hash_inline.h"

struct kv_key kv_key_next(uint64_t seed, struct kv_key parent, const int32_t *tokens,
			  size_t n_tokens)
{
	return kv_key_next_inline(seed, parent, tokens, n_tokens);
}

struct kv_key kv_key_fold(uint64_t seed, struct kv_key parent, const void *data, size_t n_bytes)
{
	XXH128_hash_t h = XXH3_128bits_withSeed(data, n_bytes, seed + parent.lo + (parent.hi << 1));

	return (struct kv_key){ h.low64, h.high64 };
}
