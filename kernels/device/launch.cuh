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

	if (shared_bytes > 48 * 1024)
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

#endif
