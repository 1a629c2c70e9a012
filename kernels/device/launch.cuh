/* SPDX-License-Identifier: Apache-2.0 */
/* Starting kernels, with the error of this launch alone. */
#ifndef KV_KERNELS_DEVICE_LAUNCH_CUH
#define KV_KERNELS_DEVICE_LAUNCH_CUH

#include <cerrno>
#include <cuda_runtime.h>

#include "include/internal/error.h"

/*
 * kv_launch() - queue kernel(params), with a call of one struct, on @stream
 *
 * Return: 0; -EIO. An error that was there before, of other work, stays for its own caller.
 */
template <typename Params>
static int kv_launch(const char *name, void (*kernel)(Params), dim3 grid, int threads,
		     size_t shared_bytes, void *stream, Params params)
{
	void *args[] = {&params};
	cudaError_t e = cudaSuccess;

	/* Above 48 KiB together with what the kernel itself declares, of which it has some. */
	if (shared_bytes > 24 * 1024)
		e = cudaFuncSetAttribute((const void *)kernel,
					 cudaFuncAttributeMaxDynamicSharedMemorySize,
					 (int)shared_bytes);
	if (e == cudaSuccess)
		e = cudaLaunchKernel((const void *)kernel, grid, dim3((unsigned)threads), args,
				     shared_bytes, (cudaStream_t)stream);
	if (e == cudaSuccess)
		return 0;
	cudaGetLastError();
	return kv_error(-EIO, "%s: CUDA: %s (%s)", name, cudaGetErrorName(e),
			cudaGetErrorString(e));
}

/*
 * The same in clusters of @near thread blocks, on a device of sm_90 or later. The kernel may be on
 * its multiprocessors before those in front of it have ended: it begins with kv_wait_for_grids().
 */
template <typename Params>
static int kv_launch_near(const char *name, void (*kernel)(Params), int n_blocks, int near,
			  int threads, size_t shared_bytes, void *stream, Params params)
{
	cudaLaunchAttribute attrs[2] = {};
	cudaLaunchConfig_t config = {};
	void *args[] = {&params};
	cudaError_t e;

	attrs[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attrs[0].val.programmaticStreamSerializationAllowed = 1;
	attrs[1].id = cudaLaunchAttributeClusterDimension;
	attrs[1].val.clusterDim.x = (unsigned)near;
	attrs[1].val.clusterDim.y = attrs[1].val.clusterDim.z = 1;
	config.gridDim = dim3((unsigned)n_blocks);
	config.blockDim = dim3((unsigned)threads);
	config.dynamicSmemBytes = shared_bytes;
	config.stream = (cudaStream_t)stream;
	config.attrs = attrs;
	config.numAttrs = near > 1 ? 2 : 1;
	e = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
				 (int)shared_bytes);
	if (e == cudaSuccess && near > 8)
		e = cudaFuncSetAttribute((const void *)kernel,
					 cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
	if (e == cudaSuccess)
		e = cudaLaunchKernelExC(&config, (const void *)kernel, args);
	if (e == cudaSuccess)
		return 0;
	cudaGetLastError();
	return kv_error(-EIO, "%s: CUDA: %s (%s)", name, cudaGetErrorName(e),
			cudaGetErrorString(e));
}

/* Until the grids in front have ended and all they wrote is seen. */
__device__ static inline void kv_wait_for_grids(void)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The grid behind may come onto multiprocessors that have room; it waits as this one did. */
__device__ static inline void kv_let_grids_start(void)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* All threads of a cluster; what they stored to shared memory is seen by the others. */
__device__ static inline void kv_cluster_sync(void)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("barrier.cluster.arrive.release.aligned;\n"
		     "barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

#endif
