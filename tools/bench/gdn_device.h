/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the benchmarks of state rows run: gdn_device_cuda.c, a GPU, or gdn_device_host.c, this
 * machine, of a build without CUDA. Failures of the device end the program.
 */
#ifndef KV_TOOLS_BENCH_GDN_DEVICE_H
#define KV_TOOLS_BENCH_GDN_DEVICE_H

#include <stdbool.h>
#include <stddef.h>

enum kv_device;

extern const int kv_bench_device; /* enum kv_device */

bool kv_bench_device_present(char *ret_name, size_t bytes);

void *kv_bench_device_alloc(size_t bytes);
void kv_bench_device_free(void *p);
void kv_bench_device_put(void *to, const void *from, size_t bytes);
void kv_bench_device_get(void *to, const void *from, size_t bytes);
/* to[:] = from[:] over and over */
void kv_bench_device_tile(void *to, size_t to_bytes, const void *from, size_t from_bytes);

/*
 * kv_bench_device_time() - seconds of one of call(arg, 0..n-1, stream): the median of replays of a
 * graph of them, or on the host of rounds. Return: 0, or what a call returned.
 */
int kv_bench_device_time(int (*call)(void *arg, int i, void *stream), void *arg, int n,
			 double *ret_seconds);

/* kv_bench_device_copy() - bytes read and written a second by the device's copy */
double kv_bench_device_copy(void *to, const void *from, size_t bytes);

#endif
