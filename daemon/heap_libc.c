/* SPDX-License-Identifier: Apache-2.0 */
#include <malloc.h>

#include "daemon/heap.h"

const char *kv_heap_name(void)
{
	return "libc";
}

uint64_t kv_heap_bytes(void)
{
	struct mallinfo2 info = mallinfo2();

	return info.uordblks + info.hblkhd;
}

struct kv_heap_sizes kv_heap_sizes(void)
{
	struct mallinfo2 info = mallinfo2();

	return (struct kv_heap_sizes){ .mapped = info.arena + info.hblkhd };
}
