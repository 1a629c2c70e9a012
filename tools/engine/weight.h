/* SPDX-License-Identifier: Apache-2.0 */
/* How GGUF files store weights: formats, and what a row of each takes. */
#ifndef KV_ENGINE_WEIGHT_H
#define KV_ENGINE_WEIGHT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Types of tensor elements, as the file numbers them. Quantised rows are blocks.
 *
 * Of 32 elements; d and m are f16:
 *	Q8_0  d, i8 q[32]			w = d * q
 *	Q4_0  d, u8 q[16]			w = d * (q - 8)
 *	Q4_1  d, m, u8 q[16]			w = d * q + m
 *	Q5_0  d, u32 high, u8 q[16]		w = d * (q - 16)
 *	Q5_1  d, m, u32 high, u8 q[16]		w = d * q + m
 * Byte i of 4-bit q holds element i in its low half and element i + 16 in its high half; bit i of
 * `high` is the fifth bit of element i.
 *
 * Of 256 elements ("K"), in parts that have scales of their own:
 *	Q4_K  d, m, u8 scales[12], u8 q[128]		w = d * scale * q - m * least
 *	Q5_K  d, m, u8 scales[12], u8 high[32], u8 q[128]	the same
 *	Q6_K  u8 q[128], u8 high[64], i8 scales[16], d	w = d * scale * (q - 32)
 * Q4_K and Q5_K have 8 parts of 32. Of parts 0..3 the low 6 bits of scales[part] are the scale, those of
 * scales[part + 4] the least; of parts 4..7 the halves of scales[part + 4] are the low 4 bits of scale and
 * least, the high 2 bits of scales[part - 4] and scales[part] the rest. 32 bytes of q hold an even part
 * in their low halves and the next in their high ones; bit `part` of high[i] is the fifth bit.
 * Q6_K has 16 parts of 16. 64 bytes of q are 128 elements: those of the first two runs of 32 in the low
 * halves, of the others in the high ones; high[i] has two bits for element i of each run.
 */
enum kv_weight_type {
	KV_WEIGHT_F32 = 0,
	KV_WEIGHT_F16 = 1,
	KV_WEIGHT_Q4_0 = 2,
	KV_WEIGHT_Q4_1 = 3,
	KV_WEIGHT_Q5_0 = 6,
	KV_WEIGHT_Q5_1 = 7,
	KV_WEIGHT_Q8_0 = 8,
	KV_WEIGHT_Q4_K = 12,
	KV_WEIGHT_Q5_K = 13,
	KV_WEIGHT_Q6_K = 14,
	KV_WEIGHT_BF16 = 30,
};

/* kv_weight_row_bytes() - bytes of a row of @n elements; 0 for an unknown type or a broken row */
uint64_t kv_weight_row_bytes(uint32_t type, uint64_t n);

/* kv_weight_block() - elements of a block, 1 where there are no blocks; 0 for an unknown type */
uint32_t kv_weight_block(uint32_t type);

/* kv_weight_names() - the types there are, "F32 (0), F16 (1), ..." */
const char *kv_weight_names(void);

#ifdef __cplusplus
}
#endif
#endif
