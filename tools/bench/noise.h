/* SPDX-License-Identifier: Apache-2.0 */
/* The inputs of the benchmarks of kernels: random numbers from a seed, and bf16. */
#ifndef KV_TOOLS_BENCH_NOISE_H
#define KV_TOOLS_BENCH_NOISE_H

#include <stdint.h>
#include <string.h>

/* uniform() - the next number of a sequence, in [-1, 1) */
static inline double uniform(uint64_t *seed)
{
	*seed = *seed * 6364136223846793005ull + 1442695040888963407ull;
	return (double)(*seed >> 40) / (1 << 23) - 1;
}

static inline uint16_t to_bf16(float x)
{
	uint32_t u;

	memcpy(&u, &x, sizeof(u));
	return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline float from_bf16(uint16_t h)
{
	uint32_t u = (uint32_t)h << 16;
	float x;

	memcpy(&x, &u, sizeof(x));
	return x;
}

#endif
