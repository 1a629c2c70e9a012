/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A vector of f32 for the instruction set a file is compiled for, and the few operations on it
 * that vector extensions of the compiler lack. LANES, and the operations, are the same in all
 * sets but for fused multiply-add, which the base set rounds twice.
 */
#ifndef KV_KERNELS_SIMD_VEC_H
#define KV_KERNELS_SIMD_VEC_H

#include <math.h>

#include "kernels/dtype.h"

#if defined(__AVX512F__)
#define LANES	 16
#define SET	 kv_simd_avx512
#define SET_NAME "avx512"
#elif defined(__AVX2__)
#define LANES	 8
#define SET	 kv_simd_avx2
#define SET_NAME "avx2"
#else
#define LANES	 4
#define SET	 kv_simd_base
#define SET_NAME "base"
#endif

#if defined(__AVX2__)
#include <immintrin.h>
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

static inline vf vf_load(const float *p)
{
	vf v;

	memcpy(&v, p, sizeof(v));
	return v;
}

static inline void vf_store(float *p, vf v)
{
	memcpy(p, &v, sizeof(v));
}

static inline vf vf_all(float x)
{
	return x - (vf){0};
}

/* 0, 1, 2, ... */
static inline vi vi_count(void)
{
	vi v = {0};

	for (int i = 0; i < LANES; i++)
		v[i] = i;
	return v;
}

/* a * b + c */
static inline vf vf_fma(vf a, vf b, vf c)
{
#if defined(__AVX512F__)
	return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
	return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
	return a * b + c;
#endif
}

static inline vf vf_select(vi mask, vf yes, vf no)
{
	return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}

/* NaN if either is */
static inline vf vf_max(vf a, vf b)
{
	return vf_select((b > a) | (b != b), b, a);
}

static inline float vf_reduce_max(vf v)
{
	float t[LANES];

	vf_store(t, v);
	for (int i = 1; i < LANES; i++)
		t[0] = t[i] > t[0] || t[i] != t[i] ? t[i] : t[0];
	return t[0];
}

/* In an order that is the same each time. */
static inline float vf_reduce_add(vf v)
{
	float t[LANES];

	vf_store(t, v);
	for (int width = LANES / 2; width; width /= 2)
		for (int i = 0; i < width; i++)
			t[i] += t[i + width];
	return t[0];
}

/*
 * e^x for x <= 0 within 1.5 units in the last place; 0 below -87; NaN for NaN.
 * x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7 (5e-9 at the ends).
 */
static inline vf vf_exp(vf x)
{
	vf n = x * 1.44269504f + 0x1.8p23f; /* adding 1.5 * 2^23 rounds to an integer */
	vu bits = (vu)n << 23;		    /* of which the low 9 bits are the exponent to add */
	vf r, y;

	n -= 0x1.8p23f;
	r = x - n * 0x1.62e4p-1f; /* few bits: n times it is exact */
	r = r - n * 0x1.7f7d1cp-20f;
	y = vf_fma(vf_all(1.0f / 5040), r, vf_all(1.0f / 720));
	y = vf_fma(y, r, vf_all(1.0f / 120));
	y = vf_fma(y, r, vf_all(1.0f / 24));
	y = vf_fma(y, r, vf_all(1.0f / 6));
	y = vf_fma(y, r, vf_all(0.5f));
	y = vf_fma(y, r * r, r) + 1.0f;
	y = (vf)((vu)y + bits);
	y = vf_select(x < -87.0f, vf_all(0), y);
	return vf_select(x != x, x, y);
}

/* tanh x within 2e-7 absolutely, which is what an error of a score in e^score amounts to */
static inline vf vf_tanh(vf x)
{
	vu sign = (vu)x & 0x80000000u;
	vf t = vf_exp(-2.0f * (vf)((vu)x ^ sign));

	return (vf)((vu)((1.0f - t) / (1.0f + t)) | sign);
}

/* Rows i and i + LANES / 2 riffled: after log2(LANES) rounds the square is transposed. */
#if LANES == 16
#define RIFFLE_LO(a, b) \
	__builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define RIFFLE_HI(a, b) \
	__builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif LANES == 8
#define RIFFLE_LO(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define RIFFLE_HI(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define RIFFLE_LO(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define RIFFLE_HI(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#endif

static inline void vf_transpose(vf square[LANES])
{
	for (int round = 1; round < LANES; round *= 2) {
		vf next[LANES];

		for (int i = 0; i < LANES / 2; i++) {
			next[2 * i] = RIFFLE_LO(square[i], square[i + LANES / 2]);
			next[2 * i + 1] = RIFFLE_HI(square[i], square[i + LANES / 2]);
		}
		memcpy(square, next, sizeof(next));
	}
}

static inline vf vf_from_bf16(const uint16_t *p)
{
	vh h;

	memcpy(&h, p, sizeof(h));
	return (vf)(__builtin_convertvector(h, vu) << 16);
}

static inline void vf_to_bf16(uint16_t *p, vf x)
{
	vu u = (vu)x;
	vu even = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
	vu nan = u >> 16 | 0x40u;
	vu mask = (vu)(x != x);
	vh h = __builtin_convertvector((mask & nan) | (~mask & even), vh);

	memcpy(p, &h, sizeof(h));
}

static inline vf vf_from_f16(const uint16_t *p)
{
#if defined(__AVX512F__)
	return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__)
	return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
	vf v;

	for (int i = 0; i < LANES; i++)
		v[i] = kv_f16_to_f32(p[i]);
	return v;
#endif
}

static inline void vf_to_f16(uint16_t *p, vf x)
{
#if defined(__AVX512F__)
	_mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
	_mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
	for (int i = 0; i < LANES; i++)
		p[i] = kv_f32_to_f16(x[i]);
#endif
}

#endif
