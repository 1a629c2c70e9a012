/* SPDX-License-Identifier: Apache-2.0 */
#include <cpuid.h>
#include <stdbool.h>

#include "kernels/simd.h"

/* clang 14 doesn't know the name for __builtin_cpu_supports(). */
static bool has_f16c(void)
{
	unsigned int a, b, c, d;

	return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

const struct kv_simd *const *kv_simd_sets(void)
{
	static const struct kv_simd *const sets[] = {&kv_simd_avx512, &kv_simd_avx2, &kv_simd_base,
						     NULL};

	__builtin_cpu_init();
	if (__builtin_cpu_supports("avx512f"))
		return sets;
	if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
		return sets + 1;
	return sets + 2;
}
