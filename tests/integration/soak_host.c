/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>

#include "tests/integration/soak_device.h"

struct soak_device {
	int64_t n_wrong;
};

int soak_device_open(int gpu, struct soak_device **ret)
{
	if (gpu)
		return -ENODEV;
	*ret = calloc(1, sizeof(**ret));
	return *ret ? 0 : -ENOMEM;
}

void *soak_device_stream(struct soak_device *device)
{
	(void)device;
	return NULL;
}

static uint32_t *at(const struct soak_memory *memory, const struct soak_token *token, uint32_t side)
{
	return (uint32_t *)((char *)memory->sides[side] + token->offset);
}

void soak_device_write(struct soak_device *device, const struct soak_memory *memory,
		       const struct soak_token *tokens, uint32_t n, uint32_t delay_us)
{
	(void)device;
	(void)delay_us;
	for (uint32_t i = 0; i < n; i++) {
		for (uint32_t side = 0; side < 2; side++) {
			for (uint32_t w = 0; w < memory->words; w++)
				at(memory, &tokens[i], side)[w] =
					soak_word(tokens[i].hash, w, side);
		}
	}
}

void soak_device_verify(struct soak_device *device, const struct soak_memory *memory,
			const struct soak_token *tokens, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		for (uint32_t side = 0; side < 2; side++) {
			for (uint32_t w = 0; w < memory->words; w++)
				device->n_wrong += at(memory, &tokens[i], side)[w] !=
						   soak_word(tokens[i].hash, w, side);
		}
	}
}

int64_t soak_device_wait(struct soak_device *device)
{
	return device->n_wrong;
}
