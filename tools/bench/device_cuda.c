/* SPDX-License-Identifier: Apache-2.0 */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

#include "tools/bench/bench.h"
#include "tools/bench/device.h"
#include "tools/bench/device_ceilings.h"

#define ROUNDS	    15
#define COPY_ROUNDS 9
#define CEILING_BYTES ((size_t)1 << 30)

static void check(cudaError_t e, const char *what)
{
	if (e == cudaSuccess)
		return;
	fprintf(stderr, "kvbench: %s: %s (%s)\n", what, cudaGetErrorName(e), cudaGetErrorString(e));
	exit(KV_BENCH_FAILED);
}

static bool device_present(char *ret_name, size_t bytes)
{
	struct cudaDeviceProp properties;
	int n = 0;

	if (cudaGetDeviceCount(&n) != cudaSuccess || n < 1)
		return false;
	check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
	snprintf(ret_name, bytes, "%s", properties.name);
	return true;
}

static void *device_alloc(size_t bytes)
{
	void *p;

	check(cudaMalloc(&p, bytes ? bytes : 1), "cudaMalloc");
	return p;
}

static void device_free(void *p)
{
	check(cudaFree(p), "cudaFree");
}

static void device_put(void *to, const void *from, size_t bytes)
{
	check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copy to the device");
}

static void device_get(void *to, const void *from, size_t bytes)
{
	check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
	check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copy from the device");
}

static void device_tile(void *to, size_t to_bytes, const void *from, size_t from_bytes)
{
	size_t done = from_bytes < to_bytes ? from_bytes : to_bytes;

	device_put(to, from, done);
	for (size_t n; done < to_bytes; done += n) {
		n = done < to_bytes - done ? done : to_bytes - done;
		check(cudaMemcpy((char *)to + done, to, n, cudaMemcpyDeviceToDevice), "copy");
	}
}

static double replay(cudaGraphExec_t graph, cudaStream_t stream, cudaEvent_t a, cudaEvent_t b)
{
	float ms;

	check(cudaEventRecord(a, stream), "cudaEventRecord");
	check(cudaGraphLaunch(graph, stream), "cudaGraphLaunch");
	check(cudaEventRecord(b, stream), "cudaEventRecord");
	check(cudaStreamSynchronize(stream), "replay");
	check(cudaEventElapsedTime(&ms, a, b), "cudaEventElapsedTime");
	return ms / 1e3;
}

static int device_time(int (*call)(void *arg, int i, void *stream), void *arg, int n,
		       double *ret_seconds)
{
	double seconds[ROUNDS];
	cudaGraphExec_t exec;
	cudaStream_t stream;
	cudaEvent_t a, b;
	cudaGraph_t graph;
	int r = 0;

	check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
	check(cudaEventCreate(&a), "cudaEventCreate");
	check(cudaEventCreate(&b), "cudaEventCreate");
	check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
	for (int i = 0; i < n && !r; i++)
		r = call(arg, i, stream);
	check(cudaStreamEndCapture(stream, &graph), "capture");
	if (!r) {
		check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
		replay(exec, stream, a, b);
		replay(exec, stream, a, b);
		for (int i = 0; i < ROUNDS; i++)
			seconds[i] = replay(exec, stream, a, b) / n;
		*ret_seconds = kv_bench_median(seconds, ROUNDS);
		check(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
	}
	check(cudaGraphDestroy(graph), "cudaGraphDestroy");
	check(cudaEventDestroy(a), "cudaEventDestroy");
	check(cudaEventDestroy(b), "cudaEventDestroy");
	check(cudaStreamDestroy(stream), "cudaStreamDestroy");
	return r;
}

/* Eagerly: as a node of a graph the same copy runs at two thirds of the rate. */
static double device_copy(void *to, const void *from, size_t bytes)
{
	double seconds[COPY_ROUNDS];
	cudaStream_t stream;
	cudaEvent_t a, b;
	float ms;

	check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
	check(cudaEventCreate(&a), "cudaEventCreate");
	check(cudaEventCreate(&b), "cudaEventCreate");
	for (int i = -1; i < COPY_ROUNDS; i++) {
		check(cudaEventRecord(a, stream), "cudaEventRecord");
		check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "copy");
		check(cudaEventRecord(b, stream), "cudaEventRecord");
		check(cudaStreamSynchronize(stream), "copy");
		check(cudaEventElapsedTime(&ms, a, b), "cudaEventElapsedTime");
		if (i >= 0)
			seconds[i] = ms / 1e3;
	}
	check(cudaEventDestroy(a), "cudaEventDestroy");
	check(cudaEventDestroy(b), "cudaEventDestroy");
	check(cudaStreamDestroy(stream), "cudaStreamDestroy");
	return 2 * (double)bytes / kv_bench_median(seconds, COPY_ROUNDS);
}

static void device_ceilings(struct kv_bench_ceilings *ret)
{
	void *from = device_alloc(CEILING_BYTES), *to = device_alloc(CEILING_BYTES);

	check(cudaMemset(from, 1, CEILING_BYTES), "cudaMemset");
	ret->copy = device_copy(to, from, CEILING_BYTES);
	kv_bench_cuda_ceilings(to, from, CEILING_BYTES, ret);
	device_free(from);
	device_free(to);
}

const struct kv_bench_device kv_bench_cuda = {
	.name = "cuda",
	.device = KV_DEVICE_CUDA,
	.present = device_present,
	.alloc = device_alloc,
	.free = device_free,
	.put = device_put,
	.get = device_get,
	.tile = device_tile,
	.time = device_time,
	.copy = device_copy,
	.read = kv_bench_cuda_read,
	.ceilings = device_ceilings,
};
