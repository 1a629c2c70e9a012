/* SPDX-License-Identifier: Apache-2.0 */
/*
 * BLAKE2b with a digest of 32 bytes, as in RFC 7693, without a key: where two inputs must not be
 * taken for one and are too long to be kept and compared. Nobody knows two inputs of one digest,
 * and nobody finds them by trying: that takes 2^128 tries.
 */
#ifndef KV_ALLOC_BLAKE2B_H
#define KV_ALLOC_BLAKE2B_H

#include <stddef.h>
#include <stdint.h>

#define KV_DIGEST_BYTES 32

struct kv_blake2b {
	uint64_t h[8];
	uint64_t n; /* bytes that were compressed */
	size_t used;
	uint8_t buffer[128];
};

void kv_blake2b_init(struct kv_blake2b *b);
void kv_blake2b_add(struct kv_blake2b *b, const void *data, size_t n);
void kv_blake2b_end(struct kv_blake2b *b, uint8_t ret_digest[KV_DIGEST_BYTES]);

#endif
