/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a GPU does a second, for kvbench: plain loops over much memory, and the vendor's product of
 * matrices where its library is at hand. Each is a graph, replayed; the median counts.
 */
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include <cuda_runtime.h>
#include <dlfcn.h>

#include "tools/bench/device_ceilings.h"

#define ROUNDS 7
#define RUN    ((size_t)16 << 10) /* of a gather */
#define CHAIN  64		  /* small kernels in a graph */
#define SIDE   8192		  /* of a matrix */

static void check(cudaError_t e, const char *what)
{
	if (e == cudaSuccess)
		return;
	fprintf(stderr, "kvbench: %s: %s (%s)\n", what, cudaGetErrorName(e), cudaGetErrorString(e));
	exit(1);
}

__device__ uint32_t kv_bench_sink;

/* Eight loads of 16 bytes of a thread in flight; run i of 16 KiB lies at turn(i). */
template <bool GATHER>
static __global__ void __launch_bounds__(512) read_all(const uint4 *from, int64_t n)
{
	constexpr int run = RUN / 16;
	const int64_t n_runs = n / run;
	uint32_t x = 0;

	for (int64_t i = blockIdx.x * (int64_t)blockDim.x * 8 + threadIdx.x; i < n;
	     i += (int64_t)gridDim.x * blockDim.x * 8) {
		uint4 u[8];

#pragma unroll
		for (int j = 0; j < 8; j++) {
			int64_t at = i + j * (int)blockDim.x;

			/* an odd factor permutes a power of two of runs */
			if (GATHER)
				at = (at / run * 2654435761LL & (n_runs - 1)) * run + at % run;
			u[j] = at < n ? __ldcs(from + at) : make_uint4(0, 0, 0, 0);
		}
#pragma unroll
		for (int j = 0; j < 8; j++)
			x ^= u[j].x ^ u[j].y ^ u[j].z ^ u[j].w;
	}
	if (x == 0x12345678)
		kv_bench_sink = x;
}

static __global__ void write_all(uint4 *to, int64_t n)
{
	for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
	     i += (int64_t)gridDim.x * blockDim.x)
		__stcs(to + i, make_uint4(1, 2, 3, 4));
}

static __global__ void nothing(uint32_t *to)
{
	if (threadIdx.x == 0)
		*to += 1;
}

template <typename F> static double median_seconds(F queue)
{
	cudaStream_t stream;
	cudaGraphExec_t exec;
	cudaGraph_t graph;
	cudaEvent_t a, b;
	float ms[ROUNDS];

	check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
	check(cudaEventCreate(&a), "cudaEventCreate");
	check(cudaEventCreate(&b), "cudaEventCreate");
	check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
	queue(stream);
	check(cudaStreamEndCapture(stream, &graph), "capture");
	check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
	check(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
	for (float &t : ms) {
		check(cudaEventRecord(a, stream), "cudaEventRecord");
		check(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
		check(cudaEventRecord(b, stream), "cudaEventRecord");
		check(cudaStreamSynchronize(stream), "replay");
		check(cudaEventElapsedTime(&t, a, b), "cudaEventElapsedTime");
	}
	check(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
	check(cudaGraphDestroy(graph), "cudaGraphDestroy");
	check(cudaEventDestroy(a), "cudaEventDestroy");
	check(cudaEventDestroy(b), "cudaEventDestroy");
	check(cudaStreamDestroy(stream), "cudaStreamDestroy");
	std::sort(ms, ms + ROUNDS);
	return ms[ROUNDS / 2] * 1e-3;
}

static unsigned processors(void)
{
	int device, n;

	check(cudaGetDevice(&device), "cudaGetDevice");
	check(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device), "attribute");
	return (unsigned)n;
}

extern "C" double kv_bench_cuda_read(const void *from, size_t bytes)
{
	unsigned n = processors() * 4;

	return (double)bytes / median_seconds([=](cudaStream_t s) {
		       read_all<false><<<n, 512, 0, s>>>((const uint4 *)from, (int64_t)(bytes / 16));
	       });
}

/* FLOP a second of a bf16 product by the vendor's library; 0: there is none. */
static double matmul(void *a, void *b, void *c)
{
	typedef int create(void **);
	typedef int set_stream(void *, cudaStream_t);
	typedef int gemm(void *, int, int, int, int, int, const void *, const void *, int, int,
			 const void *, int, int, const void *, void *, int, int, int, int);
	void *library = NULL, *handle = NULL;
	const float one = 1, zero = 0;
	const int bf16 = 14, f32 = 68, any = -1;
	double seconds;
	bool failed = false;

	for (const char *name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so"})
		library = library ? library : dlopen(name, RTLD_LAZY | RTLD_LOCAL);
	create *new_handle = library ? (create *)dlsym(library, "cublasCreate_v2") : NULL;
	set_stream *to_stream = library ? (set_stream *)dlsym(library, "cublasSetStream_v2") : NULL;
	gemm *product = library ? (gemm *)dlsym(library, "cublasGemmEx") : NULL;

	if (!new_handle || !to_stream || !product || new_handle(&handle))
		return 0;
	/* Once outside of a capture: it may allocate. */
	failed = product(handle, 1, 0, SIDE, SIDE, SIDE, &one, a, bf16, SIDE, b, bf16, SIDE, &zero, c,
			 bf16, SIDE, f32, any);
	check(cudaDeviceSynchronize(), "matmul");
	if (failed)
		return 0;
	seconds = median_seconds([&](cudaStream_t s) {
		to_stream(handle, s);
		product(handle, 1, 0, SIDE, SIDE, SIDE, &one, a, bf16, SIDE, b, bf16, SIDE, &zero, c,
			bf16, SIDE, f32, any);
	});
	return 2.0 * SIDE * SIDE * SIDE / seconds;
}

extern "C" void kv_bench_cuda_ceilings(void *to, void *from, size_t bytes, struct kv_bench_ceilings *ret)
{
	const size_t matrix = (size_t)2 * SIDE * SIDE;
	const int64_t n = (int64_t)(bytes / 16);
	unsigned n_sms = processors();

	ret->read = kv_bench_cuda_read(from, bytes);
	ret->gather = (double)bytes / median_seconds([=](cudaStream_t s) {
			      read_all<true><<<n_sms * 4, 512, 0, s>>>((const uint4 *)from, n);
		      });
	ret->write = (double)bytes / median_seconds([=](cudaStream_t s) {
			     write_all<<<n_sms * 8, 512, 0, s>>>((uint4 *)to, n);
		     });
	ret->empty = median_seconds([=](cudaStream_t s) {
			     for (int i = 0; i < CHAIN; i++)
				     nothing<<<1, 32, 0, s>>>((uint32_t *)to);
		     }) /
		     CHAIN;
	if (bytes >= 2 * matrix)
		ret->matmul = matmul(from, (char *)from + matrix, to);
}
