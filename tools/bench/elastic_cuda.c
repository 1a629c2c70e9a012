/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the driver takes for memory that moves between processes by mapping: VMM calls for each page of
 * 2 MiB, as engines make them that grow and shrink a KV cache; and how fast it copies.
 */
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "tools/bench/elastic.h"

#define PAGE   ((size_t)2 << 20)
#define ROUNDS 5

/* cuda.h renames some calls by macro: the names looked up are those that it means. */
#define NAME(call)  NAME_(call)
#define NAME_(call) #call
#define CALLS(X)                                                                               \
	X(cuInit) X(cuDeviceGet) X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease)      \
	X(cuCtxSetCurrent) X(cuCtxSynchronize) X(cuMemAddressReserve) X(cuMemAddressFree)      \
	X(cuMemCreate) X(cuMemRelease) X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess)             \
	X(cuMemAlloc) X(cuMemFree) X(cuMemcpyDtoD)

static struct {
#define MEMBER(call) __typeof__(call) *call;
	CALLS(MEMBER)
} driver;

static CUcontext context;

static bool find_calls(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	bool all = library;

	if (!library)
		return false;
#define LOOK_UP(call) all &= (driver.call = (__typeof__(driver.call))dlsym(library, NAME(call))) != 0;
	CALLS(LOOK_UP)
	return all;
}

static bool begin(CUdevice *device)
{
	if (context)
		return true;
	return find_calls() && !driver.cuInit(0) && !driver.cuDeviceGet(device, 0) &&
	       !driver.cuDevicePrimaryCtxRetain(&context, *device) &&
	       !driver.cuCtxSetCurrent(context);
}

/* ms of one round; < 0: a call failed */
static double one_round(CUdevice device, size_t n, CUmemGenericAllocationHandle *pages)
{
	CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
				    .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
	CUmemAccessDesc access = {prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
	CUdeviceptr at;
	int64_t start;
	CUresult r = driver.cuMemAddressReserve(&at, n * PAGE, 0, 0, 0);

	if (r)
		return -1;
	start = kv_bench_now();
	for (size_t i = 0; !r && i < n; i++) {
		r = driver.cuMemCreate(&pages[i], PAGE, &prop, 0);
		if (!r)
			r = driver.cuMemMap(at + i * PAGE, PAGE, 0, pages[i], 0);
		if (!r)
			r = driver.cuMemSetAccess(at + i * PAGE, PAGE, &access, 1);
	}
	for (size_t i = 0; !r && i < n; i++) {
		r = driver.cuMemUnmap(at + i * PAGE, PAGE);
		if (!r)
			r = driver.cuMemRelease(pages[i]);
	}
	start = kv_bench_now() - start;
	driver.cuMemAddressFree(at, n * PAGE);
	return r ? -1 : (double)start / 1e6;
}

double kv_elastic_driver_ms(uint64_t bytes, char *why, size_t size)
{
	size_t n = bytes / PAGE;
	CUmemGenericAllocationHandle *pages = calloc(n, sizeof(*pages));
	double ms[ROUNDS];
	CUdevice device = 0;

	if (!pages || !begin(&device)) {
		snprintf(why, size, "there is no driver or no GPU");
		free(pages);
		return 0;
	}
	for (int i = 0; i < ROUNDS; i++) {
		ms[i] = one_round(device, n, pages);
		if (ms[i] < 0) {
			snprintf(why, size, "a call of the driver failed (is there memory left?)");
			free(pages);
			return 0;
		}
	}
	free(pages);
	return kv_bench_median(ms, ROUNDS);
}

double kv_elastic_copy_rate(uint64_t bytes, uint64_t total)
{
	CUdeviceptr from = 0, to = 0;
	CUdevice device = 0;
	double rates[ROUNDS] = {0};

	if (!begin(&device))
		return 0;
	if (!driver.cuMemAlloc(&from, total) && !driver.cuMemAlloc(&to, total)) {
		for (int i = 0; i < ROUNDS; i++) {
			int64_t start = kv_bench_now();

			for (uint64_t at = 0; at + bytes <= total; at += bytes)
				driver.cuMemcpyDtoD(to + at, from + at, bytes);
			driver.cuCtxSynchronize();
			rates[i] = (double)(total / bytes * bytes) * 1e9 /
				   (double)(kv_bench_now() - start);
		}
	}
	driver.cuMemFree(from);
	driver.cuMemFree(to);
	return kv_bench_median(rates, ROUNDS);
}
