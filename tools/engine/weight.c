/* SPDX-License-Identifier: Apache-2.0 */
#include <stddef.h>

#include "tools/engine/weight.h"

#define N_OF(table) (sizeof(table) / sizeof((table)[0]))

static const struct format {
	uint32_t type;
	uint32_t n;	/* elements of a block */
	uint32_t bytes; /* of a block */
} formats[] = {
	{KV_WEIGHT_F32, 1, 4},	     {KV_WEIGHT_F16, 1, 2},	  {KV_WEIGHT_BF16, 1, 2},
	{KV_WEIGHT_Q4_0, 32, 18},    {KV_WEIGHT_Q4_1, 32, 20},	  {KV_WEIGHT_Q5_0, 32, 22},
	{KV_WEIGHT_Q5_1, 32, 24},    {KV_WEIGHT_Q8_0, 32, 34},	  {KV_WEIGHT_Q4_K, 256, 144},
	{KV_WEIGHT_Q5_K, 256, 176},  {KV_WEIGHT_Q6_K, 256, 210},
};

static const struct format *find(uint32_t type)
{
	for (size_t i = 0; i < N_OF(formats); i++)
		if (formats[i].type == type)
			return &formats[i];
	return NULL;
}

uint64_t kv_weight_row_bytes(uint32_t type, uint64_t n)
{
	const struct format *format = find(type);
	uint64_t ret;

	if (!format || n % format->n ||
	    __builtin_mul_overflow(n / format->n, (uint64_t)format->bytes, &ret))
		return 0;
	return ret;
}

uint32_t kv_weight_block(uint32_t type)
{
	const struct format *format = find(type);

	return format ? format->n : 0;
}

const char *kv_weight_names(void)
{
	return "F32 (0), F16 (1), BF16 (30), Q4_0 (2), Q4_1 (3), Q5_0 (6), Q5_1 (7), Q8_0 (8), "
	       "Q4_K (12), Q5_K (13) and Q6_K (14)";
}
