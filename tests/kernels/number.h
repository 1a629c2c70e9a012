/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Element types by arithmetic in double, apart from kernels/dtype.h and nothing like it: what the
 * tests hold it against.
 */
#ifndef KV_TESTS_KERNELS_NUMBER_H
#define KV_TESTS_KERNELS_NUMBER_H

#include <stdint.h>

/* The value of @code, a bit pattern of @dtype. */
double number_decode(int dtype, uint32_t code);

/* The code nearest to @x, ties to even; e4m3 and e5m2 saturate, the others go to infinity. */
uint32_t number_encode(int dtype, double x);

double number_get(const void *array, int64_t i, int dtype);
void number_set(void *array, int64_t i, int dtype, uint32_t code);
uint32_t number_code(const void *array, int64_t i, int dtype);

/* In [-1, 1), the same for the same numbers. */
double number_random(uint64_t seed, uint64_t a, uint64_t b, uint64_t c);

#endif
