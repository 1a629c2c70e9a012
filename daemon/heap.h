/* SPDX-License-Identifier: Apache-2.0 */
/* What the daemon's heap says of itself: heap_jemalloc.c or heap_libc.c, chosen by the build. */
#ifndef KV_DAEMON_HEAP_H
#define KV_DAEMON_HEAP_H

#include <stdint.h>

const char *kv_heap_name(void);
uint64_t kv_heap_bytes(void); /* allocated and not freed */

struct kv_heap_sizes {
	uint64_t active, resident, mapped, retained; /* 0: this heap doesn't say */
};

struct kv_heap_sizes kv_heap_sizes(void); /* as of the last kv_heap_bytes() */

#endif
