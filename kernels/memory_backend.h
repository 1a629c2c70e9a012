/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Between memory.c and the devices: what an attachment is, and the table of functions that a device
 * fills. memory.c has checked arguments (ranges, rights, number of fds, forks) before any call.
 */
#ifndef KV_KERNELS_MEMORY_BACKEND_H
#define KV_KERNELS_MEMORY_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "include/internal/arena_export.h"

enum kv_memory_state {
	KV_MEMORY_CHANGING, /* a thread maps or unmaps it; others wait */
	KV_MEMORY_READY,
};

struct kv_memory {
	const struct kv_memory_backend *backend;
	struct kv_arena_export export;
	bool read_only;
	bool *mapped; /* [export.n_fds] of a sparse arena: which granules are; or NULL */
	enum kv_memory_state state;
	unsigned int n_users;
	unsigned int process; /* counts forks: differs in a child */
	void *base;
	int ordinal; /* of the device in this process; 0 for the host */
	void *own;   /* of the backend */
	struct kv_memory *next;
};

/* An event begins with its device; a backend's struct has this as its first member. */
struct kv_event {
	const struct kv_memory_backend *backend;
};

struct kv_memory_backend {
	int device; /* enum kv_device */

	int (*attach)(struct kv_memory *memory, const int *fds); /* sets base, ordinal, own */
	void (*detach)(struct kv_memory *memory);

	/* Of a sparse arena: only its addresses; one granule, where none is; none, where one is. */
	int (*reserve)(struct kv_memory *memory);
	int (*map)(struct kv_memory *memory, uint32_t i, int fd);
	int (*unmap)(struct kv_memory *memory, uint32_t i);
	/* Memory of a granule's size that nobody has; its bytes are anything. */
	int (*granule_new)(struct kv_memory *memory, uint64_t bytes, int *ret_fd);
	/* What processes that still map granule @i keep of it goes back where that can be done. */
	void (*empty)(struct kv_memory *memory, uint32_t i);

	int (*zero)(struct kv_memory *memory, uint64_t offset, uint64_t bytes, void *stream);
	int (*copy)(struct kv_memory *memory, uint64_t to, uint64_t from, uint64_t bytes,
		    void *stream);
	/* NULL: pair by pair will do */
	int (*copy_blocks)(struct kv_memory *memory, uint64_t block_bytes,
			   const int32_t (*pairs)[2], uint32_t n_pairs);
	int (*read)(struct kv_memory *memory, uint64_t offset, void *to, uint64_t bytes);
	int (*write)(struct kv_memory *memory, uint64_t offset, const void *from, uint64_t bytes);
	int (*sync)(struct kv_memory *memory);

	int (*event_new)(struct kv_event **ret);
	void (*event_free)(struct kv_event *event);
	int (*event_record)(struct kv_event *event, void *stream);
	int (*event_query)(struct kv_event *event);

	int (*pinned_new)(size_t bytes, void **ret);
	void (*pinned_free)(void *p);

	/* In the child of a fork(); async-signal-safe. */
	void (*forked)(void);
};

/* Where granule @i begins, and its length: the last may be shorter. */
static inline uint64_t kv_granule_offset(const struct kv_arena_export *export, uint32_t i)
{
	return i * export->granule_bytes;
}

static inline uint64_t kv_granule_length(const struct kv_arena_export *export, uint32_t i)
{
	uint64_t left = export->bytes - kv_granule_offset(export, i);

	return left < export->granule_bytes ? left : export->granule_bytes;
}

extern const struct kv_memory_backend kv_memory_host;
extern const struct kv_memory_backend kv_memory_cuda; /* without CUDA in the build: -ENOTSUP */

#endif
