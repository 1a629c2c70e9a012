/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Element types as bits: f16, bf16 and e4m3 to and from f32, for host and device code alike.
 *
 *	f16   1 sign, 5 exponent (bias 15), 10 mantissa
 *	bf16  1 sign, 8 exponent (bias 127), 7 mantissa: the upper half of an f32
 *	e4m3  1 sign, 4 exponent (bias 7), 3 mantissa; 0x7f is NaN, there is no infinity
 *	e5m2  1 sign, 5 exponent (bias 15), 2 mantissa: the upper half of an f16
 *
 * Widening is exact. Narrowing rounds to nearest even; NaN stays NaN with its sign. f16 and bf16
 * overflow to infinity, e4m3 saturates at +-448, e5m2 at +-57344. Only integer operations and single float
 * operations whose result is exact or is the rounding wanted, so all backends store equal bits.
 */
#ifndef KV_KERNELS_DTYPE_H
#define KV_KERNELS_DTYPE_H

#include <stdint.h>
#include <string.h>

#include <kvcached/types.h>

#ifdef __CUDACC__
#define KV_HD __host__ __device__
#else
#define KV_HD
#endif

KV_HD static inline uint32_t kv_f32_bits(float x)
{
	uint32_t u;

	memcpy(&u, &x, sizeof(u));
	return u;
}

KV_HD static inline float kv_f32_from_bits(uint32_t u)
{
	float x;

	memcpy(&x, &u, sizeof(x));
	return x;
}

KV_HD static inline float kv_f16_to_f32(uint16_t h)
{
	uint32_t sign = (uint32_t)(h & 0x8000) << 16;
	uint32_t mag = h & 0x7fff;

	if (mag < 0x400) /* zero and subnormals: steps of 2^-24 */
		return kv_f32_from_bits(sign | kv_f32_bits((float)mag * 0x1p-24f));
	if (mag >= 0x7c00)
		return kv_f32_from_bits(sign | 0x7f800000 | (mag & 0x3ff) << 13);
	return kv_f32_from_bits(sign | ((mag << 13) + ((127u - 15) << 23)));
}

KV_HD static inline uint16_t kv_f32_to_f16(float x)
{
	uint32_t u = kv_f32_bits(x);
	uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
	uint32_t mag = u & 0x7fffffff;

	if (mag > 0x7f800000)
		return (uint16_t)(sign | 0x7e00 | (mag >> 13 & 0x3ff));
	if (mag >= 0x477ff000) /* 65520: half a step above the largest, rounds to infinity */
		return (uint16_t)(sign | 0x7c00);
	if (mag <
	    0x38800000) /* below 2^-14; the steps of 0.5f are 2^-24, so the sum rounds there */
		return (uint16_t)(sign |
				  (kv_f32_bits(kv_f32_from_bits(mag) + 0.5f) - kv_f32_bits(0.5f)));
	mag += 0xfff + (mag >> 13 & 1);
	return (uint16_t)(sign | ((mag >> 13) - ((127u - 15) << 10)));
}

KV_HD static inline float kv_bf16_to_f32(uint16_t h)
{
	return kv_f32_from_bits((uint32_t)h << 16);
}

KV_HD static inline uint16_t kv_f32_to_bf16(float x)
{
	uint32_t u = kv_f32_bits(x);

	if ((u & 0x7fffffff) > 0x7f800000)
		return (uint16_t)(u >> 16 |
				  0x40); /* quiet, so that the upper half is not infinity */
	return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

KV_HD static inline float kv_e4m3_to_f32(uint8_t c)
{
	uint32_t sign = (uint32_t)(c & 0x80) << 24;
	uint32_t mag = c & 0x7f;

	if (mag == 0x7f)
		return kv_f32_from_bits(sign | 0x7fc00000);
	if (mag < 8) /* zero and subnormals: steps of 2^-9 */
		return kv_f32_from_bits(sign | kv_f32_bits((float)mag * 0x1p-9f));
	return kv_f32_from_bits(sign | ((mag << 20) + ((127u - 7) << 23)));
}

KV_HD static inline uint8_t kv_f32_to_e4m3(float x)
{
	uint32_t u = kv_f32_bits(x);
	uint8_t sign = (uint8_t)(u >> 24 & 0x80);
	uint32_t mag = u & 0x7fffffff;

	if (mag > 0x7f800000)
		return (uint8_t)(sign | 0x7f);
	if (mag >= 0x43e00000) /* 448 */
		return (uint8_t)(sign | 0x7e);
	if (mag < 0x3c800000) /* below 2^-6; the steps of 2^14 are 2^-9, so the sum rounds there */
		return (uint8_t)(sign | (kv_f32_bits(kv_f32_from_bits(mag) + 0x1p14f) -
					 kv_f32_bits(0x1p14f)));
	mag += 0x7ffff + (mag >> 20 & 1);
	return (uint8_t)(sign | ((mag >> 20) - ((127u - 7) << 3)));
}

KV_HD static inline float kv_e5m2_to_f32(uint8_t c)
{
	return kv_f16_to_f32((uint16_t)(c << 8));
}

KV_HD static inline uint8_t kv_f32_to_e5m2(float x)
{
	uint32_t u = kv_f32_bits(x);
	uint8_t sign = (uint8_t)(u >> 24 & 0x80);
	uint32_t mag = u & 0x7fffffff;

	if (mag > 0x7f800000)
		return (uint8_t)(sign | 0x7f);
	if (mag >= 0x47600000) /* 57344 */
		return (uint8_t)(sign | 0x7b);
	if (mag < 0x38800000) /* below 2^-14; the steps of 2^7 are 2^-16, so the sum rounds there */
		return (uint8_t)(sign | (kv_f32_bits(kv_f32_from_bits(mag) + 0x1p7f) -
					 kv_f32_bits(0x1p7f)));
	mag += 0xfffff + (mag >> 21 & 1);
	return (uint8_t)(sign | ((mag >> 21) - ((127u - 15) << 2)));
}

/* The largest finite value of an 8-bit type. */
KV_HD static inline float kv_f8_max(int dtype)
{
	return dtype == KV_F8_E5M2 ? 57344.0f : 448.0f;
}

extern const float kv_e4m3_values[256]; /* host: kv_e4m3_to_f32() of each code */

/* Element @i of an array of @dtype. */
KV_HD static inline float kv_element_load(const void *p, int64_t i, int dtype)
{
	switch (dtype) {
	case KV_F32:
		return ((const float *)p)[i];
	case KV_F16:
		return kv_f16_to_f32(((const uint16_t *)p)[i]);
	case KV_BF16:
		return kv_bf16_to_f32(((const uint16_t *)p)[i]);
	case KV_F8_E5M2:
		return kv_e5m2_to_f32(((const uint8_t *)p)[i]);
	default:
		return kv_e4m3_to_f32(((const uint8_t *)p)[i]);
	}
}

KV_HD static inline void kv_element_store(void *p, int64_t i, int dtype, float x)
{
	switch (dtype) {
	case KV_F32:
		((float *)p)[i] = x;
		break;
	case KV_F16:
		((uint16_t *)p)[i] = kv_f32_to_f16(x);
		break;
	case KV_BF16:
		((uint16_t *)p)[i] = kv_f32_to_bf16(x);
		break;
	case KV_F8_E5M2:
		((uint8_t *)p)[i] = kv_f32_to_e5m2(x);
		break;
	default:
		((uint8_t *)p)[i] = kv_f32_to_e4m3(x);
	}
}

#endif
