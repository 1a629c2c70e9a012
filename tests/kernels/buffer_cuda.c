/* SPDX-License-Identifier: Apache-2.0 */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

#include <kvcached/types.h>

#include "tests/kernels/buffer.h"

const int buffer_device = KV_DEVICE_CUDA;

static void check(cudaError_t e, const char *what)
{
	if (e == cudaSuccess)
		return;
	fprintf(stderr, "%s: %s (%s)\n", what, cudaGetErrorName(e), cudaGetErrorString(e));
	abort();
}

bool buffer_device_present(void)
{
	int n = 0;

	return cudaGetDeviceCount(&n) == cudaSuccess && n > 0;
}

size_t buffer_bytes_free(void)
{
	size_t bytes_free, bytes_total;

	check(cudaMemGetInfo(&bytes_free, &bytes_total), "cudaMemGetInfo");
	return bytes_free;
}

void *buffer_new(size_t bytes)
{
	void *p = NULL;

	check(cudaMalloc(&p, bytes ? bytes : 1), "cudaMalloc");
	return p;
}

void *buffer_new_sparse(size_t bytes)
{
	void *p = buffer_new(bytes);

	buffer_fill(p, 0, bytes);
	return p;
}

void *buffer_free(void *p)
{
	check(cudaFree(p), "cudaFree");
	return NULL;
}

void buffer_free_sparse(void *p, size_t bytes)
{
	buffer_free(p);
}

void buffer_put(void *to, const void *from, size_t bytes)
{
	check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy to the device");
}

void buffer_get(void *to, const void *from, size_t bytes)
{
	check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
	check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy from the device");
}

void buffer_fill(void *to, int byte, size_t bytes)
{
	check(cudaMemset(to, byte, bytes), "cudaMemset");
}
