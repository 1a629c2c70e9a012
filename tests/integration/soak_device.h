/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes of the soak's blocks: writing and verifying what tokens should hold, by the CPU in host memory,
 * by kernels on a GPU. What is queued is done in order; kernels may take their time before they write.
 *
 *   word w of side s (0: K, 1: V) of a token with hash h:   h + 0x9e3779b1 * (2 * w + s)
 */
#ifndef KV_TESTS_SOAK_DEVICE_H
#define KV_TESTS_SOAK_DEVICE_H

#include <stdint.h>

#ifdef __CUDACC__
#define SOAK_HD __host__ __device__
#else
#define SOAK_HD
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct soak_token {
	int64_t offset; /* of its K, in bytes from the mapping of K */
	uint32_t hash;
	uint32_t reserved;
};

struct soak_memory {
	void *sides[2]; /* K and V */
	uint32_t words; /* of 4 bytes, of a token in each */
};

struct soak_device;

/* In the process that uses it. Return: 0; negative: there is no such device. */
int soak_device_open(int gpu, struct soak_device **ret);
void *soak_device_stream(struct soak_device *device);

/* Queued; @tokens is copied. @delay_us: a kernel waits so long before it writes. */
void soak_device_write(struct soak_device *device, const struct soak_memory *memory,
		       const struct soak_token *tokens, uint32_t n, uint32_t delay_us);
void soak_device_verify(struct soak_device *device, const struct soak_memory *memory,
			const struct soak_token *tokens, uint32_t n);

/* soak_device_wait() - until all is done. Return: wrong words found so far; -1: the device is broken */
int64_t soak_device_wait(struct soak_device *device);

SOAK_HD static inline uint32_t soak_word(uint32_t hash, uint32_t w, uint32_t side)
{
	return hash + 0x9e3779b1u * (2 * w + side);
}

#ifdef __cplusplus
}
#endif
#endif
