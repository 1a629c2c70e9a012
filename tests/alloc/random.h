/* SPDX-License-Identifier: Apache-2.0 */
/* Seeded numbers, the same on every machine: a walk that fails can be walked again. */
#ifndef KV_TESTS_ALLOC_RANDOM_H
#define KV_TESTS_ALLOC_RANDOM_H

#include <stdint.h>

struct random {
	uint64_t state;
};

/* splitmix64 */
static inline uint64_t random_next(struct random *r)
{
	uint64_t z = r->state += 0x9e3779b97f4a7c15ull;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ z >> 27) * 0x94d049bb133111ebull;
	return z ^ z >> 31;
}

/* 0..n-1 */
static inline uint32_t random_below(struct random *r, uint32_t n)
{
	return (uint32_t)((random_next(r) >> 32) * n >> 32);
}

#endif
