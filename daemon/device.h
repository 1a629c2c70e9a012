/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The owner's side of device memory: which devices there are, and one arena on each, made once and
 * exported to clients and movers. Nothing here touches the bytes (kernels/memory.h does).
 *
 * A device kind is a table of functions; device_host.c and device_cuda.c are complete pairs.
 * Threads: start-up only, before the event loop runs. No function here runs on the loop.
 *
 * The calling process never loads the CUDA driver: what needs it is done in forked helper
 * processes, which hand back file descriptors and figures. It must not have used CUDA itself before
 * (a driver doesn't survive a fork). A vmm arena is nothing but its descriptors; an ipc arena has
 * an owner process that lives until arena_free(), or as long as somebody has its owner_fd.
 */
#ifndef KV_DAEMON_DEVICE_H
#define KV_DAEMON_DEVICE_H

#include <stdint.h>

#include "include/internal/arena_export.h"
#include "include/internal/error.h"

#define KV_ARENA_UNIT ((uint64_t)2 << 20) /* sizes of arenas and granules are multiples */

struct kv_device_info {
	uint8_t uuid[KV_UUID_BYTES];
	char name[64]; /* "NVIDIA H200" or "host memory" */
	uint64_t total_bytes;
	uint64_t free_bytes; /* when asked; cuda: less what a context takes */
};

/* An arena as its owner holds it. Freed by ops->arena_free(). */
struct kv_arena {
	struct kv_arena_export export; /* what others are told */
	int *fds; /* [export.n_fds], close-on-exec; owned; sparse: -1 where a granule is being renewed */
	int owner_pidfd; /* ipc: readable when the owner died, no new user can attach then; or -1 */
	int owner_fd; /* ipc: the owner lives as long as any copy of this; or -1 */
	char why[KV_ERROR_BYTES]; /* how the kind was chosen: a line for the log */
	void *owner;		  /* of the device's implementation: it is told to end; or NULL */
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
	 * @kind: enum kv_export_kind, or 0: the best kind that works.
	 * @granule_bytes: bytes of one granule (a multiple of 2 MiB); 0: one for the whole. Of host
	 * memory, an arena of several is sparse.
	 *
	 * cuda: a second process attaches the arena as a client would, and checks that the first
	 * bytes of every granule keep what is written there. Then they are zero again.
	 *
	 * Return: 0; -ENOMEM with both numbers (asked, free) in the text; -ENOTSUP if @kind can't
	 * work on this device, with the reason; -EMFILE if there are more granules than this
	 * process may have files; other negative errno.
	 */
	int (*arena_new)(int ordinal, uint64_t bytes, uint32_t kind, uint64_t granule_bytes,
			 struct kv_arena **ret);

	/* Gives the memory back. NULL is allowed. */
	void (*arena_free)(struct kv_arena *arena);

	/*
	 * From now on the memory lives as long as any copy of its descriptors (fds, owner_fd), and
	 * arena_free() gives up only this process's.
	 */
	void (*arena_let_go)(struct kv_arena *arena);
};

extern const struct kv_device_ops kv_device_host;
extern const struct kv_device_ops kv_device_cuda; /* without CUDA in the build: -ENOTSUP */

/* kv_device_fits_files() - 0; -EMFILE if this process may not have a file for each of @n granules */
int kv_device_fits_files(uint64_t n, uint64_t granule_bytes);

/* kv_arena_epoch() - a number that no other arena has: random, not 0 */
int kv_arena_epoch(uint64_t *ret);

#endif
