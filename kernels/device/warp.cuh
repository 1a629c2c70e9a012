/* SPDX-License-Identifier: Apache-2.0 */
/* Reductions over the 32 lanes of a warp, in one order; every lane gets the result. */
#ifndef KV_KERNELS_DEVICE_WARP_CUH
#define KV_KERNELS_DEVICE_WARP_CUH

#define KV_WARP	     32
#define KV_ALL_LANES 0xffffffffu

/* NaN if either is; fmaxf() would drop it */
__device__ static inline float kv_max(float a, float b)
{
	return b > a || b != b ? b : a;
}

__device__ static inline float kv_warp_max(float x)
{
	for (int step = KV_WARP / 2; step; step /= 2)
		x = kv_max(x, __shfl_xor_sync(KV_ALL_LANES, x, step));
	return x;
}

__device__ static inline float kv_warp_add(float x)
{
	for (int step = KV_WARP / 2; step; step /= 2)
		x += __shfl_xor_sync(KV_ALL_LANES, x, step);
	return x;
}

#endif
