/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of pages as TokenSpeed makes them. */
#include <kvcached/keys.h>
#include <string.h>

#include "alloc/sha256.h"
#include "include/internal/public.h"

static void add_u32(struct kv_sha256 *s, size_t x)
{
	const uint8_t bytes[] = {(uint8_t)x, (uint8_t)(x >> 8), (uint8_t)(x >> 16),
				 (uint8_t)(x >> 24)};

	kv_sha256_add(s, bytes, sizeof(bytes));
}

static void add_sized(struct kv_sha256 *s, const void *bytes, size_t n)
{
	add_u32(s, n);
	if (n)
		kv_sha256_add(s, bytes, n);
}

KV_PUBLIC void kv_page_key(const uint8_t *prior, const int32_t *tokens, size_t n_tokens,
			   const struct kv_page_extra *extras, size_t n_extras, uint8_t *ret_key)
{
	struct kv_sha256 s;

	kv_sha256_start(&s);
	add_sized(&s, prior, prior ? KV_SHA256 : 0);
	add_u32(&s, n_tokens);
	for (size_t i = 0; i < n_tokens; i++)
		add_u32(&s, (uint32_t)tokens[i]);
	if (n_extras)
		add_u32(&s, n_extras);
	for (size_t i = 0; i < n_extras; i++)
		add_sized(&s, extras[i].bytes, extras[i].n_bytes);
	kv_sha256_end(&s, ret_key);
}

KV_PUBLIC void kv_page_key_fold(const uint8_t *keys, size_t n, uint8_t *ret_key)
{
	static const char digits[] = "0123456789abcdef";
	uint8_t key[KV_SHA256] = {0};

	for (size_t i = 0; i < n; i++) {
		char hex[2 * KV_SHA256];
		struct kv_page_extra extra = {hex, sizeof(hex)};

		for (size_t k = 0; k < KV_SHA256; k++) {
			hex[2 * k] = digits[keys[i * KV_SHA256 + k] >> 4];
			hex[2 * k + 1] = digits[keys[i * KV_SHA256 + k] & 15];
		}
		kv_page_key(i ? key : NULL, NULL, 0, &extra, 1, key);
	}
	memcpy(ret_key, n == 1 ? keys : key, KV_SHA256);
}
