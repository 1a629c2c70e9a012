/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "alloc/blake2b.h"

static const uint64_t iv[8] = {
	0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
	0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

/* Which word of the message comes when; the last two of twelve rounds are the first two again. */
static const uint8_t sigma[10][16] = {
	{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
	{14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
	{11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
	{7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
	{9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
	{2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
	{12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
	{13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
	{6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
	{10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static uint64_t turned(uint64_t x, int n)
{
	return x >> n | x << (64 - n);
}

static uint64_t word_at(const uint8_t *p)
{
	uint64_t x = 0;

	for (int i = 0; i < 8; i++)
		x |= (uint64_t)p[i] << 8 * i;
	return x;
}

static inline void mix(uint64_t *a, uint64_t *b, uint64_t *c, uint64_t *d, uint64_t x, uint64_t y)
{
	*a += *b + x;
	*d = turned(*d ^ *a, 32);
	*c += *d;
	*b = turned(*b ^ *c, 24);
	*a += *b + y;
	*d = turned(*d ^ *a, 16);
	*c += *d;
	*b = turned(*b ^ *c, 63);
}

static void compress(struct kv_blake2b *b, const uint8_t *block, int is_last)
{
	uint64_t v[16], m[16];

	for (int i = 0; i < 8; i++) {
		v[i] = b->h[i];
		v[i + 8] = iv[i];
	}
	for (int i = 0; i < 16; i++)
		m[i] = word_at(block + 8 * i);
	v[12] ^= b->n;
	v[14] ^= is_last ? UINT64_MAX : 0;
	for (int r = 0; r < 12; r++) {
		const uint8_t *s = sigma[r % 10];

		for (int i = 0; i < 4; i++)
			mix(&v[i], &v[4 + i], &v[8 + i], &v[12 + i], m[s[2 * i]], m[s[2 * i + 1]]);
		for (int i = 0; i < 4; i++)
			mix(&v[i], &v[4 + (i + 1) % 4], &v[8 + (i + 2) % 4], &v[12 + (i + 3) % 4],
			    m[s[8 + 2 * i]], m[s[9 + 2 * i]]);
	}
	for (int i = 0; i < 8; i++)
		b->h[i] ^= v[i] ^ v[i + 8];
}

void kv_blake2b_init(struct kv_blake2b *b)
{
	memset(b, 0, sizeof(*b));
	memcpy(b->h, iv, sizeof(iv));
	/* Parameters: length of the digest, no key, fanout and depth 1. */
	b->h[0] ^= 0x01010000 ^ KV_DIGEST_BYTES;
}

void kv_blake2b_add(struct kv_blake2b *b, const void *data, size_t n)
{
	const uint8_t *p = data;

	while (n) {
		size_t part = sizeof(b->buffer) - b->used;

		/* The last block waits for the end, also when it is full. */
		if (!part) {
			b->n += sizeof(b->buffer);
			compress(b, b->buffer, 0);
			b->used = 0;
			continue;
		}
		part = part < n ? part : n;
		memcpy(b->buffer + b->used, p, part);
		b->used += part;
		p += part;
		n -= part;
	}
}

void kv_blake2b_end(struct kv_blake2b *b, uint8_t ret_digest[KV_DIGEST_BYTES])
{
	b->n += b->used;
	memset(b->buffer + b->used, 0, sizeof(b->buffer) - b->used);
	compress(b, b->buffer, 1);
	for (int i = 0; i < KV_DIGEST_BYTES; i++)
		ret_digest[i] = (uint8_t)(b->h[i / 8] >> 8 * (i % 8));
}
