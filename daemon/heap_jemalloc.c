/* SPDX-License-Identifier: Apache-2.0 */
#include <jemalloc/jemalloc.h>

#include "daemon/heap.h"

const char *kv_heap_name(void)
{
	return "jemalloc";
}

uint64_t kv_heap_bytes(void)
{
	uint64_t epoch = 1;
	size_t bytes = 0, size = sizeof(bytes);

	/* Figures are kept until the epoch is moved on. */
	mallctl("epoch", NULL, NULL, &epoch, sizeof(epoch));
	mallctl("stats.allocated", &bytes, &size, NULL, 0);
	return bytes;
}

static uint64_t size_of(const char *what)
{
	size_t bytes = 0, size = sizeof(bytes);

	mallctl(what, &bytes, &size, NULL, 0);
	return bytes;
}

struct kv_heap_sizes kv_heap_sizes(void)
{
	return (struct kv_heap_sizes){ .active = size_of("stats.active"),
				       .resident = size_of("stats.resident"),
				       .mapped = size_of("stats.mapped"),
				       .retained = size_of("stats.retained") };
}
