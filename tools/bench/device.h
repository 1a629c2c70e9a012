/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the benchmarks of kernels run: a GPU (device_cuda.c) or this machine
 * (device_host.c), which a build without CUDA has alone. Failures of the device end the
 * program.
 */
#ifndef KV_TOOLS_BENCH_DEVICE_H
#define KV_TOOLS_BENCH_DEVICE_H

#include <stdbool.h>
#include <stddef.h>

/* Bytes a second, but where it says otherwise; 0: not measured here. */
struct kv_bench_ceilings {
	double read, write;
	double copy;   /* read and written */
	double gather; /* runs of 16 KiB in random order */
	double empty;  /* seconds of a small kernel in a graph of 64 that depend on each other */
	double matmul; /* FLOP a second: bf16, 8192 x 8192 x 8192 */
};

/* What a device does; the calls below go to the chosen one's. */
struct kv_bench_device {
	const char *name;
	int device; /* enum kv_device */
	bool (*present)(char *ret_name, size_t bytes);
	void *(*alloc)(size_t bytes);
	void (*free)(void *p);
	void (*put)(void *to, const void *from, size_t bytes);
	void (*get)(void *to, const void *from, size_t bytes);
	void (*tile)(void *to, size_t to_bytes, const void *from, size_t from_bytes);
	int (*time)(int (*call)(void *arg, int i, void *stream), void *arg, int n,
		    double *ret_seconds);
	double (*copy)(void *to, const void *from, size_t bytes);
	double (*read)(const void *from, size_t bytes);
	void (*ceilings)(struct kv_bench_ceilings *ret);
};

/* Of this build, the default first; ends with NULL. */
extern const struct kv_bench_device *const kv_bench_devices[];

extern int kv_bench_device; /* enum kv_device, of the chosen one */

/* kv_bench_device_choose() - by its name. Return: is there such a device in this build? */
bool kv_bench_device_choose(const char *name);

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

/* kv_bench_device_read() - bytes a second of a plain read */
double kv_bench_device_read(const void *from, size_t bytes);

void kv_bench_device_ceilings(struct kv_bench_ceilings *ret);

#endif
