/* SPDX-License-Identifier: Apache-2.0 */
/* What the daemon's heap says of itself: heap_jemalloc.c or heap_libc.c, chosen by the build. */
#ifndef KV_DAEMON_HEAP_H
#define KV_DAEMON_HEAP_H

#include <stdint.h>

const char *kv_heap_name(void);
uint64_t kv_heap_bytes(void); /* allocated and not freed */

#endif
