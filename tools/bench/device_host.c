/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/bench/bench.h"
#include "tools/bench/device.h"

#define ROUNDS	      3
#define CEILING_BYTES ((size_t)64 << 20)

static bool device_present(char *ret_name, size_t bytes)
{
	snprintf(ret_name, bytes, "host");
	return true;
}

static void *device_alloc(size_t bytes)
{
	void *p = calloc(1, bytes ? bytes : 1);

	if (!p) {
		fprintf(stderr, "kvbench: no memory for %zu bytes\n", bytes);
		exit(KV_BENCH_FAILED);
	}
	return p;
}

static void device_free(void *p)
{
	free(p);
}

static void device_put(void *to, const void *from, size_t bytes)
{
	memcpy(to, from, bytes);
}

static void device_get(void *to, const void *from, size_t bytes)
{
	memcpy(to, from, bytes);
}

static void device_tile(void *to, size_t to_bytes, const void *from, size_t from_bytes)
{
	for (size_t done = 0, n; done < to_bytes; done += n) {
		n = from_bytes < to_bytes - done ? from_bytes : to_bytes - done;
		memcpy((char *)to + done, from, n);
	}
}

static int device_time(int (*call)(void *arg, int i, void *stream), void *arg, int n,
		       double *ret_seconds)
{
	double seconds[ROUNDS];

	for (int round = 0; round < ROUNDS; round++) {
		int64_t start = kv_bench_now();

		for (int i = 0; i < n; i++) {
			int r = call(arg, i, NULL);

			if (r)
				return r;
		}
		seconds[round] = (double)(kv_bench_now() - start) / 1e9 / n;
	}
	*ret_seconds = kv_bench_median(seconds, ROUNDS);
	return 0;
}

static double device_copy(void *to, const void *from, size_t bytes)
{
	double seconds[ROUNDS];

	for (int round = 0; round < ROUNDS; round++) {
		int64_t start = kv_bench_now();

		memcpy(to, from, bytes);
		seconds[round] = (double)(kv_bench_now() - start + 1) / 1e9;
	}
	return 2 * (double)bytes / kv_bench_median(seconds, ROUNDS);
}

static double device_read(const void *from, size_t bytes)
{
	const uint64_t *words = from;
	volatile uint64_t sink;
	double seconds[ROUNDS];

	for (int round = 0; round < ROUNDS; round++) {
		int64_t start = kv_bench_now();
		uint64_t x[4] = {0};

		for (size_t i = 0; i + 4 <= bytes / 8; i += 4)
			for (int j = 0; j < 4; j++)
				x[j] ^= words[i + (size_t)j];
		sink = x[0] ^ x[1] ^ x[2] ^ x[3];
		seconds[round] = (double)(kv_bench_now() - start + 1) / 1e9;
	}
	(void)sink;
	return (double)bytes / kv_bench_median(seconds, ROUNDS);
}

static void device_ceilings(struct kv_bench_ceilings *ret)
{
	void *from = device_alloc(CEILING_BYTES), *to = device_alloc(CEILING_BYTES);

	memset(to, 1, CEILING_BYTES);
	ret->read = device_read(from, CEILING_BYTES);
	ret->copy = device_copy(to, from, CEILING_BYTES);
	device_free(from);
	device_free(to);
}

const struct kv_bench_device kv_bench_host = {
	.name = "host",
	.device = KV_DEVICE_HOST,
	.present = device_present,
	.alloc = device_alloc,
	.free = device_free,
	.put = device_put,
	.get = device_get,
	.tile = device_tile,
	.time = device_time,
	.copy = device_copy,
	.read = device_read,
	.ceilings = device_ceilings,
};
