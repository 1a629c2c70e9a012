/* SPDX-License-Identifier: Apache-2.0 */
/* SHA-256, FIPS 180-4: keys that other programs calculate too. */
#ifndef KV_ALLOC_SHA256_H
#define KV_ALLOC_SHA256_H

#include <stddef.h>
#include <stdint.h>

#define KV_SHA256 32 /* bytes */

struct kv_sha256 {
	uint32_t h[8];
	uint8_t block[64];
	uint64_t len;
};

void kv_sha256_start(struct kv_sha256 *s);
void kv_sha256_add(struct kv_sha256 *s, const void *data, size_t n);
void kv_sha256_end(struct kv_sha256 *s, uint8_t ret[KV_SHA256]);

#endif
