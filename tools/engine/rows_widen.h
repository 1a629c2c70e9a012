/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Widening rows of weights to floats (weight.h has the formats): a part of rows.c, compiled with it for each
 * instruction set.
 *
 * All products are exact in float: d has 11 bits of precision, a scale up to 8, q up to 6, so where m is
 * added or taken away that is the one rounding, fused or not.
 */
#ifndef KV_ENGINE_ROWS_WIDEN_H
#define KV_ENGINE_ROWS_WIDEN_H

#include <string.h>

#include "tools/engine/weight.h"

/* f16 to f32 by arithmetic: shifted to the place of f32's fields, the exponent is 112 too small */
INLINE float half(uint16_t h)
{
	uint32_t bits = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
	uint32_t special = (h & 0x7c00) == 0x7c00 ? 0x7f800000 : 0; /* infinity, NaN */
	float f;

	memcpy(&f, &bits, sizeof(f));
	f *= 0x1p112f;
	memcpy(&bits, &f, sizeof(f));
	bits |= sign | special;
	memcpy(&f, &bits, sizeof(f));
	return f;
}

INLINE float half_at(const uint8_t *p)
{
	uint16_t h;

	memcpy(&h, p, sizeof(h));
	return half(h);
}

static void widen_f16(const uint8_t *restrict row, float *restrict out, size_t n)
{
	for (size_t i = 0; i < n; i++)
		out[i] = half_at(row + 2 * i);
}

static void widen_q8_0(const uint8_t *restrict row, float *restrict out, size_t n)
{
	for (size_t i = 0; i < n; i += 32, row += 34) {
		const int8_t *q = (const int8_t *)row + 2;
		float d = half_at(row);

		for (int j = 0; j < 32; j++)
			out[i + j] = d * q[j];
	}
}

/* out[i] = d * (q[i] - offset) + m for the low halves of 16 bytes, then for the high ones */
INLINE void widen_nibbles(const uint8_t *restrict q, float d, int offset, float m,
			  float *restrict out)
{
	uint8_t low[16], high[16];

	for (int j = 0; j < 16; j++) {
		low[j] = q[j] & 15;
		high[j] = q[j] >> 4;
	}
	LOOP for (int j = 0; j < 16; j++) out[j] = d * (low[j] - offset) + m;
	LOOP for (int j = 0; j < 16; j++) out[16 + j] = d * (high[j] - offset) + m;
}

static void widen_q4_0(const uint8_t *restrict row, float *restrict out, size_t n)
{
	for (size_t i = 0; i < n; i += 32, row += 18)
		widen_nibbles(row + 2, half_at(row), 8, 0, out + i);
}

static void widen_q4_1(const uint8_t *restrict row, float *restrict out, size_t n)
{
	for (size_t i = 0; i < n; i += 32, row += 20)
		widen_nibbles(row + 4, half_at(row), 0, half_at(row + 2), out + i);
}

static void widen_bf16(const uint8_t *restrict row, float *restrict out, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		uint32_t bits = (uint32_t)(row[2 * i] | row[2 * i + 1] << 8) << 16;

		memcpy(out + i, &bits, sizeof(bits));
	}
}

/* w = d * (q - less) + m, q of 4 bits and one of @high */
INLINE void widen_fives(const uint8_t *restrict at, const uint8_t *restrict q, float d, int less, float m,
			float *restrict out)
{
	uint32_t high;

	memcpy(&high, at, sizeof(high));
	for (int j = 0; j < 16; j++) {
		int low_q = (q[j] & 15) | (high >> j & 1) << 4;
		int high_q = q[j] >> 4 | (high >> (j + 16) & 1) << 4;

		out[j] = d * (low_q - less) + m;
		out[j + 16] = d * (high_q - less) + m;
	}
}

static void widen_q5_0(const uint8_t *restrict row, float *restrict out, size_t n)
{
	for (size_t i = 0; i < n; i += 32, row += 22)
		widen_fives(row + 2, row + 6, half_at(row), 16, 0, out + i);
}

static void widen_q5_1(const uint8_t *restrict row, float *restrict out, size_t n)
{
	for (size_t i = 0; i < n; i += 32, row += 24)
		widen_fives(row + 4, row + 8, half_at(row), 0, half_at(row + 2), out + i);
}

/* Scale and least of one of the 8 parts of Q4_K and Q5_K */
INLINE void part_scale(const uint8_t *scales, int part, float *ret_scale, float *ret_least)
{
	if (part < 4) {
		*ret_scale = scales[part] & 63;
		*ret_least = scales[part + 4] & 63;
	} else {
		*ret_scale = (scales[part + 4] & 15) | (scales[part - 4] >> 6) << 4;
		*ret_least = scales[part + 4] >> 4 | (scales[part] >> 6) << 4;
	}
}

/* @high: NULL, or a fifth bit for each element */
INLINE void widen_parts(const uint8_t *restrict block, const uint8_t *restrict high,
			const uint8_t *restrict q, float *restrict out)
{
	float d = half_at(block), m = half_at(block + 2), scale, least;

	LOOP
	for (int part = 0; part < 8; part++, out += 32) {
		int shift = part % 2 * 4;

		part_scale(block + 4, part, &scale, &least);
		scale *= d;
		least *= m;
		for (int i = 0; i < 32; i++) {
			int five = high ? (high[i] >> part & 1) << 4 : 0;

			out[i] = scale * ((q[i] >> shift & 15) | five) - least;
		}
		q += part % 2 * 32;
	}
}

static void widen_q4_k(const uint8_t *restrict row, float *restrict out, size_t n)
{
	for (size_t i = 0; i < n; i += 256, row += 144)
		widen_parts(row, NULL, row + 16, out + i);
}

static void widen_q5_k(const uint8_t *restrict row, float *restrict out, size_t n)
{
	for (size_t i = 0; i < n; i += 256, row += 176)
		widen_parts(row, row + 16, row + 48, out + i);
}

static void widen_q6_k(const uint8_t *restrict row, float *restrict out, size_t n)
{
	for (size_t i = 0; i < n; i += 256, row += 210) {
		const int8_t *scales = (const int8_t *)row + 192;
		float d = half_at(row + 208);

		LOOP
		for (int run = 0; run < 8; run++, out += 32) {
			const uint8_t *q = row + run / 4 * 64 + run % 2 * 32;
			const uint8_t *high = row + 128 + run / 4 * 32;
			int shift = run % 4 / 2 * 4;

			for (int j = 0; j < 32; j++) {
				int value = (q[j] >> shift & 15) |
					    (high[j] >> run % 4 * 2 & 3) << 4;

				out[j] = d * scales[2 * run + j / 16] * (value - 32);
			}
		}
	}
}

static void widen(uint32_t type, const void *row, float *out, size_t n)
{
	switch (type) {
	case KV_WEIGHT_F32:
		memcpy(out, row, n * sizeof(*out));
		break;
	case KV_WEIGHT_F16:
		widen_f16(row, out, n);
		break;
	case KV_WEIGHT_BF16:
		widen_bf16(row, out, n);
		break;
	case KV_WEIGHT_Q8_0:
		widen_q8_0(row, out, n);
		break;
	case KV_WEIGHT_Q4_0:
		widen_q4_0(row, out, n);
		break;
	case KV_WEIGHT_Q4_1:
		widen_q4_1(row, out, n);
		break;
	case KV_WEIGHT_Q5_0:
		widen_q5_0(row, out, n);
		break;
	case KV_WEIGHT_Q5_1:
		widen_q5_1(row, out, n);
		break;
	case KV_WEIGHT_Q4_K:
		widen_q4_k(row, out, n);
		break;
	case KV_WEIGHT_Q5_K:
		widen_q5_k(row, out, n);
		break;
	case KV_WEIGHT_Q6_K:
		widen_q6_k(row, out, n);
		break;
	}
}

#endif
