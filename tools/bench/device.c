/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "tools/bench/bench.h"
#include "tools/bench/device.h"

extern const struct kv_bench_device kv_bench_cuda, kv_bench_host;

const struct kv_bench_device *const kv_bench_devices[] = {
#ifdef KV_HAVE_CUDA
	&kv_bench_cuda,
#endif
	&kv_bench_host,
	NULL,
};

#ifdef KV_HAVE_CUDA
static const struct kv_bench_device *chosen = &kv_bench_cuda;
int kv_bench_device = KV_DEVICE_CUDA;
#else
static const struct kv_bench_device *chosen = &kv_bench_host;
int kv_bench_device = KV_DEVICE_HOST;
#endif

bool kv_bench_device_choose(const char *name)
{
	for (int i = 0; kv_bench_devices[i]; i++)
		if (!strcmp(kv_bench_devices[i]->name, name)) {
			chosen = kv_bench_devices[i];
			kv_bench_device = chosen->device;
			return true;
		}
	return false;
}

bool kv_bench_device_present(char *ret_name, size_t bytes)
{
	return chosen->present(ret_name, bytes);
}

void *kv_bench_device_alloc(size_t bytes)
{
	return chosen->alloc(bytes);
}

void kv_bench_device_free(void *p)
{
	chosen->free(p);
}

void kv_bench_device_put(void *to, const void *from, size_t bytes)
{
	chosen->put(to, from, bytes);
}

void kv_bench_device_get(void *to, const void *from, size_t bytes)
{
	chosen->get(to, from, bytes);
}

void kv_bench_device_tile(void *to, size_t to_bytes, const void *from, size_t from_bytes)
{
	chosen->tile(to, to_bytes, from, from_bytes);
}

int kv_bench_device_time(int (*call)(void *arg, int i, void *stream), void *arg, int n,
			 double *ret_seconds)
{
	return chosen->time(call, arg, n, ret_seconds);
}

double kv_bench_device_copy(void *to, const void *from, size_t bytes)
{
	return chosen->copy(to, from, bytes);
}

double kv_bench_device_read(const void *from, size_t bytes)
{
	return chosen->read(from, bytes);
}

void kv_bench_device_ceilings(struct kv_bench_ceilings *ret)
{
	chosen->ceilings(ret);
}
