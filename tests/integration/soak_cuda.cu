/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A thread block writes or verifies one token: its threads take the words of K and V in turn. Tokens of a
 * launch travel through a ring in pinned memory, read by the kernels where it lies; a part of it is
 * used again when the launch that read it has ended.
 */
#include <cuda_runtime.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/integration/soak_device.h"

#define ROOM 65536u /* tokens under way */

struct soak_device {
	cudaStream_t stream;
	struct soak_token *tokens; /* [ROOM], pinned */
	uint32_t used;
	unsigned long long *n_wrong; /* pinned, written by kernels */
	bool broken;
};

static __device__ uint32_t *at(const struct soak_memory &memory, const struct soak_token &token,
			       uint32_t side)
{
	return (uint32_t *)((char *)memory.sides[side] + token.offset);
}

static __global__ void write_tokens(struct soak_memory memory, const struct soak_token *tokens,
				    uint64_t delay_ns)
{
	const struct soak_token token = tokens[blockIdx.x];
	uint64_t start, now;

	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
	do
		asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
	while (now - start < delay_ns);
	for (uint32_t i = threadIdx.x; i < 2 * memory.words; i += blockDim.x) {
		uint32_t side = i & 1, w = i >> 1;

		at(memory, token, side)[w] = soak_word(token.hash, w, side);
	}
}

static __global__ void verify_tokens(struct soak_memory memory, const struct soak_token *tokens,
				     unsigned long long *n_wrong)
{
	const struct soak_token token = tokens[blockIdx.x];

	for (uint32_t i = threadIdx.x; i < 2 * memory.words; i += blockDim.x) {
		uint32_t side = i & 1, w = i >> 1;

		if (at(memory, token, side)[w] != soak_word(token.hash, w, side))
			atomicAdd_system(n_wrong, 1ull);
	}
}

int soak_device_open(int gpu, struct soak_device **ret)
{
	struct soak_device *d;

	if (!gpu)
		return -ENODEV;
	d = (struct soak_device *)calloc(1, sizeof(*d));
	if (!d)
		return -ENOMEM;
	if (cudaSetDevice(0) != cudaSuccess ||
	    cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking) != cudaSuccess ||
	    cudaMallocHost((void **)&d->tokens, ROOM * sizeof(*d->tokens)) != cudaSuccess ||
	    cudaMallocHost((void **)&d->n_wrong, sizeof(*d->n_wrong)) != cudaSuccess) {
		free(d);
		return -ENODEV;
	}
	*d->n_wrong = 0;
	*ret = d;
	return 0;
}

void *soak_device_stream(struct soak_device *d)
{
	return d->stream;
}

static const struct soak_token *hand_over(struct soak_device *d, const struct soak_token *tokens,
					  uint32_t n)
{
	struct soak_token *to;

	if (d->used + n > ROOM) {
		d->broken |= cudaStreamSynchronize(d->stream) != cudaSuccess;
		d->used = 0;
	}
	to = d->tokens + d->used;
	memcpy(to, tokens, n * sizeof(*tokens));
	d->used += n;
	return to;
}

void soak_device_write(struct soak_device *d, const struct soak_memory *memory,
		       const struct soak_token *tokens, uint32_t n, uint32_t delay_us)
{
	if (!n)
		return;
	write_tokens<<<n, 64, 0, d->stream>>>(*memory, hand_over(d, tokens, n), delay_us * 1000ull);
	d->broken |= cudaGetLastError() != cudaSuccess;
}

void soak_device_verify(struct soak_device *d, const struct soak_memory *memory,
			const struct soak_token *tokens, uint32_t n)
{
	if (!n)
		return;
	verify_tokens<<<n, 64, 0, d->stream>>>(*memory, hand_over(d, tokens, n), d->n_wrong);
	d->broken |= cudaGetLastError() != cudaSuccess;
}

int64_t soak_device_wait(struct soak_device *d)
{
	d->broken |= cudaStreamSynchronize(d->stream) != cudaSuccess;
	return d->broken ? -1 : (int64_t)*(volatile unsigned long long *)d->n_wrong;
}
