/* SPDX-License-Identifier: Apache-2.0 */
/* Reference calculators: content keys of pages. */
#include <string.h>

#include "alloc/compat_cache.h"
#include "alloc/sha256.h"

static void update_u32(struct kv_sha256 *s, uint32_t x)
{
	kv_sha256_add(
		s,
		(uint8_t[]){(uint8_t)x, (uint8_t)(x >> 8), (uint8_t)(x >> 16), (uint8_t)(x >> 24)},
		4);
}

void kv_compat_page_hash(struct kv_compat_text prior, const int32_t *tokens, size_t n_tokens,
			 const struct kv_compat_text *extra, size_t n_extra,
			 uint8_t ret_hash[KV_COMPAT_HASH])
{
	struct kv_sha256 s;

	kv_sha256_start(&s);
	update_u32(&s, (uint32_t)prior.len);
	kv_sha256_add(&s, prior.data, prior.len);
	update_u32(&s, (uint32_t)n_tokens);
	for (size_t i = 0; i < n_tokens; i++)
		update_u32(&s, (uint32_t)tokens[i]);
	if (n_extra)
		update_u32(&s, (uint32_t)n_extra);
	for (size_t i = 0; i < n_extra; i++) {
		update_u32(&s, (uint32_t)extra[i].len);
		kv_sha256_add(&s, extra[i].data, extra[i].len);
	}
	kv_sha256_end(&s, ret_hash);
}

void kv_compat_fold_hash(const uint8_t (*hashes)[KV_COMPAT_HASH], size_t n,
			 uint8_t ret_hash[KV_COMPAT_HASH])
{
	static const char digits[] = "0123456789abcdef";
	uint8_t r[KV_COMPAT_HASH];
	size_t prior = 0;

	if (n == 1) {
		memcpy(ret_hash, hashes[0], KV_COMPAT_HASH);
		return;
	}
	for (size_t i = 0; i < n; i++) {
		char hex[2 * KV_COMPAT_HASH];
		struct kv_compat_text extra = {hex, sizeof(hex)};

		for (size_t k = 0; k < KV_COMPAT_HASH; k++) {
			hex[2 * k] = digits[hashes[i][k] >> 4];
			hex[2 * k + 1] = digits[hashes[i][k] & 15];
		}
		kv_compat_page_hash((struct kv_compat_text){r, prior}, NULL, 0, &extra, 1, r);
		prior = KV_COMPAT_HASH;
	}
	memcpy(ret_hash, r, KV_COMPAT_HASH);
}
