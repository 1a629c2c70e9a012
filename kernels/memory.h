/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The user's side of device memory: attach to an arena that another process owns, and the few things
 * that both clients and movers do with bytes, streams and events.
 *
 * An arena that is attached several times in a process is mapped once and counted, per arena epoch.
 * Mappings are not inherited by forked children (host: MADV_DONTFORK; CUDA is unusable there).
 *
 * Threads: any, at any time; attach and detach take one lock. The caller's current CUDA context is
 * left as it was. The primary context is used, never one of our own.
 */
#ifndef KV_KERNELS_MEMORY_H
#define KV_KERNELS_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "include/internal/arena_export.h"

struct kv_memory;

/**
 * kv_memory_attach() - map an arena into this process
 * @export: what the owner said
 * @fds:    [export->n_fds]; stay the caller's (they may be closed after the call)
 * @read_only: map without the right to write (host and vmm; ipc: -ENOTSUP)
 *
 * Return: 0; -ENODEV if this process has no such GPU (the text names the UUID); -ENOTSUP;
 *         -ENOMEM; -EIO on a CUDA error, with its name in the text.
 */
int kv_memory_attach(const struct kv_arena_export *export, const int *fds, bool read_only,
		     struct kv_memory **ret);

/* Unmaps when the last user in the process detaches. NULL is allowed; returns NULL. */
struct kv_memory *kv_memory_detach(struct kv_memory *memory);

/* Address of the arena's first byte in this process (a device pointer for CUDA). */
void *kv_memory_base(const struct kv_memory *memory);

/* enum kv_device (include/kvcached/types.h): the device whose kernels can reach it. */
int kv_memory_device(const struct kv_memory *memory);

/*
 * Work on the bytes of an arena. Host: done on return. CUDA: queued on @stream (NULL: a stream of
 * the attachment's own), kv_memory_sync() waits for that one.
 * Return: 0, -EINVAL (outside the arena), -EIO.
 */
int kv_memory_zero(struct kv_memory *memory, uint64_t offset, uint64_t bytes, void *stream);
int kv_memory_copy(struct kv_memory *memory, uint64_t to, uint64_t from, uint64_t bytes,
		   void *stream);
int kv_memory_read(struct kv_memory *memory, uint64_t offset, void *to, uint64_t bytes);
int kv_memory_write(struct kv_memory *memory, uint64_t offset, const void *from, uint64_t bytes);
int kv_memory_sync(struct kv_memory *memory);

/*
 * Events: has the work that was queued on a stream so far finished? On a host device every event
 * has passed. Timing is off.
 */
struct kv_event;
int kv_event_new(int device, struct kv_event **ret);
struct kv_event *kv_event_free(struct kv_event *event);
int kv_event_record(struct kv_event *event, void *stream);
/* 1: passed; 0: not yet; -EIO: the context is broken, its work will never be known to finish */
int kv_event_query(struct kv_event *event);

/* Host memory that a GPU can copy from without staging; plain memory where there is no CUDA. */
int kv_pinned_new(int device, size_t bytes, void **ret);
void *kv_pinned_free(int device, void *p);

#endif
