/* SPDX-License-Identifier: Apache-2.0 */
/* Starting kernels in clusters, and the vector loads that all kernels on state rows use. */
#ifndef KV_KERNELS_GDN_LAUNCH_CUH
#define KV_KERNELS_GDN_LAUNCH_CUH

#include <cerrno>
#include <cuda_runtime.h>

#include "include/internal/error.h"
#include "kernels/device/dtype.cuh"
#include "kernels/gdn.h"

/*
 * kv_launch() with @cluster thread blocks along x in a cluster; 1: none. @early: the kernel may be
 * there before those in front of it have ended, and begins with kv_wait_for_grids().
 */
template <typename Params>
static int kv_launch_cluster(const char *name, void (*kernel)(Params), dim3 grid, int threads,
			     size_t shared_bytes, int cluster, bool early, void *stream,
			     Params params)
{
	cudaLaunchConfig_t config = {};
	cudaLaunchAttribute attributes[2] = {}, *next = attributes;
	cudaError_t e = cudaSuccess;

	config.gridDim = grid;
	config.blockDim = dim3((unsigned)threads);
	config.dynamicSmemBytes = shared_bytes;
	config.stream = (cudaStream_t)stream;
	if (cluster > 1) {
		next->id = cudaLaunchAttributeClusterDimension;
		next->val.clusterDim.x = (unsigned)cluster;
		next->val.clusterDim.y = next->val.clusterDim.z = 1;
		next++;
	}
	if (early) {
		next->id = cudaLaunchAttributeProgrammaticStreamSerialization;
		next->val.programmaticStreamSerializationAllowed = 1;
		next++;
	}
	config.attrs = attributes;
	config.numAttrs = (unsigned)(next - attributes);
	if (shared_bytes > 48 * 1024)
		e = cudaFuncSetAttribute((const void *)kernel,
					 cudaFuncAttributeMaxDynamicSharedMemorySize,
					 (int)shared_bytes);
	if (e == cudaSuccess)
		e = cudaLaunchKernelEx(&config, kernel, params);
	if (e == cudaSuccess)
		return 0;
	cudaGetLastError();
	return kv_error(-EIO, "%s: CUDA: %s (%s)", name, cudaGetErrorName(e),
			cudaGetErrorString(e));
}

__device__ static inline float kv_sigmoid(float x)
{
	return 1 / (1 + __expf(-x));
}

/* ln(1 + e^x); x above 20 */
__device__ static inline float kv_softplus_f(float x)
{
	return x > 20 ? x : log1pf(__expf(x));
}

/*
 * Inputs and outputs of the calls: KV_IO16, f16 or bf16 by a flag without a branch, so that loads
 * can be on their way together; KV_IO32, f32.
 */
enum kv_io {
	KV_IO16,
	KV_IO32,
};

template <int IO> __device__ static inline float kv_io_load(const void *from, int64_t i, bool bf16)
{
	if constexpr (IO == KV_IO32) {
		return ((const float *)from)[i];
	} else {
		uint16_t u = ((const uint16_t *)from)[i];

		return bf16 ? __uint_as_float((uint32_t)u << 16)
			    : __half2float(__ushort_as_half(u));
	}
}

__device__ static inline uint16_t kv_to_16(float x, bool bf16)
{
	uint16_t b = __bfloat16_as_ushort(__float2bfloat16_rn(x));
	uint16_t h = __half_as_ushort(__float2half_rn(x));

	return bf16 ? b : h;
}

template <int IO> __device__ static inline void kv_io_store(void *to, int64_t i, bool bf16, float x)
{
	if constexpr (IO == KV_IO32)
		((float *)to)[i] = x;
	else
		((uint16_t *)to)[i] = kv_to_16(x, bf16);
}

/* As the type stores it. */
template <int IO> __device__ static inline float kv_io_round(float x, bool bf16)
{
	if constexpr (IO == KV_IO32)
		return x;
	uint16_t u = kv_to_16(x, bf16);

	return bf16 ? __uint_as_float((uint32_t)u << 16) : __half2float(__ushort_as_half(u));
}

#endif
