/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/engine/rows.h"

const struct kv_rows *const *kv_rows_all(void)
{
	static const struct kv_rows *const all[] = {
#ifdef KV_ROWS_X86
		&kv_rows_avx512,
		&kv_rows_avx2,
#endif
		&kv_rows_base,
		NULL,
	};

#ifdef KV_ROWS_X86
	/* The tables' order makes what a processor can run a tail of the list. */
	if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
	    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
		return all;
	if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
		return all + 1;
	return all + 2;
#else
	return all;
#endif
}
