/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/simd.h"

const struct kv_simd *const *kv_simd_sets(void)
{
	static const struct kv_simd *const sets[] = {&kv_simd_base, NULL};

	return sets;
}
