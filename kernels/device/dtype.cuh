/* SPDX-License-Identifier: Apache-2.0 */
/* 16 bytes of elements to f32, exactly. */
#ifndef KV_KERNELS_DEVICE_DTYPE_CUH
#define KV_KERNELS_DEVICE_DTYPE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "kernels/dtype.h"

/* elements<T>: how many of type T (enum kv_dtype) 16 bytes hold, and their values. */
template <int T> struct kv_vector;

template <> struct kv_vector<KV_F32> {
	static constexpr int n = 4;

	static __device__ void widen(const uint4 &from, float *to)
	{
		memcpy(to, &from, sizeof(from));
	}
};

template <> struct kv_vector<KV_F16> {
	static constexpr int n = 8;

	static __device__ void widen(const uint4 &from, float *to)
	{
		__half h[n];

		memcpy(h, &from, sizeof(h));
		for (int i = 0; i < n; i++)
			to[i] = __half2float(h[i]);
	}
};

template <> struct kv_vector<KV_BF16> {
	static constexpr int n = 8;

	static __device__ void widen(const uint4 &from, float *to)
	{
		uint16_t h[n];

		memcpy(h, &from, sizeof(h));
		for (int i = 0; i < n; i++)
			to[i] = kv_bf16_to_f32(h[i]);
	}
};

template <> struct kv_vector<KV_F8_E4M3> {
	static constexpr int n = 16;

	static __device__ void widen(const uint4 &from, float *to)
	{
		__nv_fp8_storage_t c[n];

		memcpy(c, &from, sizeof(c));
		for (int i = 0; i < n; i++) /* every code is a value of f16 */
			to[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw(c[i], __NV_E4M3)));
	}
};

template <> struct kv_vector<KV_F8_E5M2> {
	static constexpr int n = 16;

	static __device__ void widen(const uint4 &from, float *to)
	{
		uint8_t c[n];

		memcpy(c, &from, sizeof(c));
		for (int i = 0; i < n; i++) /* the upper half of an f16 */
			to[i] = __half2float(__ushort_as_half((unsigned short)(c[i] << 8)));
	}
};

#endif
