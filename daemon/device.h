/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The owner's side of device memory: which devices there are, and one arena on each, made once and
 * exported to clients and movers. Nothing here touches the bytes (kernels/memory.h does).
 *
 * A device kind is a table of functions; device_host.c and device_cuda.c are complete pairs.
 * Threads: start-up only, before the event loop runs. No function here runs on the loop.
 */
#ifndef KV_DAEMON_DEVICE_H
#define KV_DAEMON_DEVICE_H

#include <stdint.h>

#include "include/internal/arena_export.h"

struct kv_device_info {
	uint8_t uuid[KV_UUID_BYTES];
	char name[64]; /* "NVIDIA H200" or "host memory" */
	uint64_t total_bytes;
	uint64_t free_bytes; /* when asked */
};

/* An arena as its owner holds it. Freed by ops->arena_free(). */
struct kv_arena {
	struct kv_arena_export export; /* what others are told */
	int *fds;		       /* [export.n_fds], close-on-exec; owned */
	void *owner;		       /* of the device's implementation */
};

struct kv_device_ops {
	const char *name; /* "host", "cuda" */

	/*
	 * Device @ordinal (cuda: the driver's number).
	 * Return: 0; -ENODEV if there is no such device or no driver; -ENOTSUP if this build has
	 * none; the text (kv_error_text()) says which, and what devices there are.
	 */
	int (*info)(int ordinal, struct kv_device_info *ret);

	/*
	 * Makes an arena of exactly @bytes (a multiple of 2 MiB) on device @ordinal.
	 * @kind: enum kv_export_kind, or 0: the best kind that passes a probe with a data check
	 *        (a helper process imports, writes and reads back a pattern).
	 * @granule_bytes: bytes of one vmm granule (a multiple of 2 MiB); 0: one for the whole.
	 *
	 * Return: 0; -ENOMEM with both numbers (asked, free) in the text; -ENOTSUP if @kind can't
	 * work on this device, with the reason; other negative errno.
	 */
	int (*arena_new)(int ordinal, uint64_t bytes, uint32_t kind, uint64_t granule_bytes,
			 struct kv_arena **ret);

	/* Gives the memory back. NULL is allowed. */
	void (*arena_free)(struct kv_arena *arena);
};

extern const struct kv_device_ops kv_device_host;
extern const struct kv_device_ops kv_device_cuda; /* without CUDA in the build: -ENOTSUP */

#endif
