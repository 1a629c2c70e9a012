/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include <kvcached/types.h>

#include "tests/kernels/number.h"

static const struct format {
	int bits;
	int mantissa;
	int e_min; /* exponent of the smallest normal number */
} formats[] = {
	[KV_F32] = {32, 23, -126},
	[KV_F16] = {16, 10, -14},
	[KV_BF16] = {16, 7, -126},
	[KV_F8_E4M3] = {8, 3, -6},
	[KV_F8_E5M2] = {8, 2, -14},
};

/* Codes above the largest finite one. */
static uint32_t code_infinity(int dtype)
{
	const struct format *f = &formats[dtype];
	uint32_t all = (uint32_t)((1ull << (f->bits - 1)) - 1);

	return dtype == KV_F8_E4M3 ? all : all >> f->mantissa << f->mantissa;
}

double number_decode(int dtype, uint32_t code)
{
	const struct format *f = &formats[dtype];
	double sign = code >> (f->bits - 1) & 1 ? -1 : 1;
	uint32_t mag = code & (uint32_t)((1ull << (f->bits - 1)) - 1);
	int exponent = (int)(mag >> f->mantissa);
	double fraction = mag & ((1u << f->mantissa) - 1);

	if (dtype == KV_F8_E4M3 && mag == 0x7f)
		return NAN;
	if (dtype != KV_F8_E4M3 && mag >= code_infinity(dtype))
		return fraction == 0 ? sign * INFINITY : (double)NAN;
	if (exponent == 0)
		return sign * ldexp(fraction, f->e_min - f->mantissa);
	return sign * ldexp((1u << f->mantissa) + fraction, exponent - 1 + f->e_min - f->mantissa);
}

uint32_t number_encode(int dtype, double x)
{
	const struct format *f = &formats[dtype];
	uint32_t sign = (signbit(x) ? 1u : 0u) << (f->bits - 1);
	uint32_t infinity = code_infinity(dtype);
	double steps;
	int e;

	if (isnan(x) && dtype == KV_F8_E5M2)
		return sign | 0x7f;
	if (isnan(x))
		return sign | infinity | (dtype == KV_F8_E4M3 ? 0 : 1u << (f->mantissa - 1));
	if (isinf(x))
		return sign | (kv_dtype_bytes(dtype) == 1 ? infinity - 1 : infinity);
	if (x == 0)
		return sign;
	frexp(x, &e);
	e--; /* |x| = 1.something * 2^e */
	if (e < f->e_min)
		e = f->e_min;
	if (e > 200)
		e = 200;
	steps = rint(ldexp(fabs(x), f->mantissa - e)) +
		(double)(e - f->e_min) * (1u << f->mantissa);
	if (steps < infinity)
		return sign | (uint32_t)steps;
	return sign | (kv_dtype_bytes(dtype) == 1 ? infinity - 1 : infinity);
}

uint32_t number_code(const void *array, int64_t i, int dtype)
{
	uint32_t code = 0; /* little endian: the low bytes come first */
	size_t bytes = kv_dtype_bytes(dtype);

	memcpy(&code, (const char *)array + i * (int64_t)bytes, bytes);
	return code;
}

double number_get(const void *array, int64_t i, int dtype)
{
	return number_decode(dtype, number_code(array, i, dtype));
}

void number_set(void *array, int64_t i, int dtype, uint32_t code)
{
	size_t bytes = kv_dtype_bytes(dtype);

	memcpy((char *)array + i * (int64_t)bytes, &code, bytes);
}

static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
	x = (x ^ x >> 27) * 0x94d049bb133111eb;
	return x ^ x >> 31;
}

double number_random(uint64_t seed, uint64_t a, uint64_t b, uint64_t c)
{
	uint64_t x = mix(seed + mix(a + mix(b + mix(c))));

	return (double)(x >> 11) / 0x1p52 - 1;
}
