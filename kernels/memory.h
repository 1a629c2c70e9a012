/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The user's side of device memory: attach to an arena that another process owns, and the few
 * things that both clients and movers do with bytes, streams and events.
 *
 * An arena that is attached several times in a process is mapped once for each protection, and
 * counted. Arenas are told apart by epoch and GPU, never by handle or address: both can repeat.
 *
 * fork(): a child inherits no mapping (host: MADV_DONTFORK), and CUDA is unusable in it. From the
 * first attach on, a fork handler makes the child forget what was attached, and close the GPU's
 * file descriptors where CUDA was used: they would keep a dead parent's kernels running. What the
 * child still holds of its parent's attachments it may only detach, which then does nothing.
 *
 * Threads: any, at any time; attach and detach of one arena wait for each other, and no lock is
 * held in a driver call. The caller's current CUDA context is left as it was. The primary context
 * is used, never one of our own. Nothing happens at exit.
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
 * Return: 0; -EINVAL if @export and @fds don't fit together, or a memfd is short or can shrink;
 *         -ENODEV if this process has no such GPU (the text names the UUID); -ENOTSUP;
 *         -ENOMEM; -EIO on a CUDA error, with its name in the text; -ETIMEDOUT if another thread's
 *         attach or detach of the arena does not end.
 */
int kv_memory_attach(const struct kv_arena_export *export, const int *fds, bool read_only,
		     struct kv_memory **ret);

/*
 * Unmaps when the last user in the process detaches. NULL is allowed; returns NULL.
 * All work on the arena must have finished. ipc: waits for the running kernels of this process.
 */
struct kv_memory *kv_memory_detach(struct kv_memory *memory);

/*
 * Sparse attachments, of arenas whose export says so: the addresses of the whole arena, at which single
 * granules are mapped, taken away, and mapped again while work on others goes on. Each attachment is one
 * by itself, for one thread at a time. What isn't mapped can't be reached: a host access there is a
 * SIGSEGV, one by a GPU a fault of this process's context.
 *
 * attach_sparse: as kv_memory_attach(). map: granule @i is @fd (the caller's) from now on; one that was
 * mapped there is unmapped first. unmap: no work on granule @i may be queued or running; none there is
 * no error. renew: for the owner: gives up granule @i, and maps memory there that no other process has;
 * *ret_fd, the caller's, is its descriptor, its bytes are anything.
 * Return: 0; -EINVAL; -ENOMEM, also if a GPU has no memory for it; -ECHILD; -EIO with the text.
 */
int kv_memory_attach_sparse(const struct kv_arena_export *export, bool read_only,
			    struct kv_memory **ret);
int kv_memory_map(struct kv_memory *memory, uint32_t i, int fd);
int kv_memory_unmap(struct kv_memory *memory, uint32_t i);
int kv_memory_renew(struct kv_memory *memory, uint32_t i, int *ret_fd);

/* kv_memory_host_new() - a memfd for an arena or granule in host memory, zero, of fixed size */
int kv_memory_host_new(uint64_t bytes, int *ret_fd);

/* kv_memory_ref() - one more user of an attachment: one more kv_memory_detach(). Return: @memory. */
struct kv_memory *kv_memory_ref(struct kv_memory *memory);

/* kv_memory_ordinal() - the device's number among this process's CUDA devices; 0 for the host */
int kv_memory_ordinal(const struct kv_memory *memory);

/* Address of the arena's first byte in this process (a device pointer for CUDA). */
void *kv_memory_base(const struct kv_memory *memory);

/* enum kv_device (include/kvcached/types.h): the device whose kernels can reach it. */
int kv_memory_device(const struct kv_memory *memory);

/*
 * Work on the bytes of an arena. Host: done on return. CUDA: zero and copy are queued on @stream
 * (NULL: a stream of the attachment's own), kv_memory_sync() waits for that one; read and write
 * come after what is queued on it and are done on return. Ranges of a copy don't overlap.
 * Return: 0, -EINVAL (outside the arena), -EPERM (attached read-only), -ECHILD (attached before
 * a fork), -EIO, -ETIMEDOUT (the attachment's own stream was not done after KV_MEMORY_WAIT).
 */
#define KV_MEMORY_WAIT ((int64_t)60 * 1000000000)
int kv_memory_zero(struct kv_memory *memory, uint64_t offset, uint64_t bytes, void *stream);
int kv_memory_copy(struct kv_memory *memory, uint64_t to, uint64_t from, uint64_t bytes,
		   void *stream);
/*
 * kv_memory_copy_blocks() - each pair is (from, to), ids of blocks of @block_bytes; no id is in two
 *
 * On the attachment's own stream. A GPU copies many by one kernel.
 */
int kv_memory_copy_blocks(struct kv_memory *memory, uint64_t block_bytes, const int32_t (*pairs)[2],
			  uint32_t n_pairs);
int kv_memory_read(struct kv_memory *memory, uint64_t offset, void *to, uint64_t bytes);
int kv_memory_write(struct kv_memory *memory, uint64_t offset, const void *from, uint64_t bytes);
int kv_memory_sync(struct kv_memory *memory);

/*
 * Events: has the work that was queued on a stream so far finished? On a host device every event
 * has passed. Timing is off. @device is enum kv_device.
 *
 * record: @stream names the GPU. NULL is the legacy default stream of the context that is current,
 * or else of the GPU attached last. -EBUSY if the stream is being captured in a graph.
 */
struct kv_event;
int kv_event_new(int device, struct kv_event **ret);
struct kv_event *kv_event_free(struct kv_event *event);
int kv_event_record(struct kv_event *event, void *stream);
/*
 * 1: passed, or never recorded; 0: not yet; -EIO: the context is broken, its work will never be
 * known to finish
 */
int kv_event_query(struct kv_event *event);

/*
 * Host memory that a GPU can copy from without staging; plain memory for KV_DEVICE_HOST. Aligned to
 * 256 B, zeroed. CUDA: usable in every context; it keeps a context alive until freed (the current
 * one's GPU, or else the one attached last; -ENODEV if there is neither).
 */
int kv_pinned_new(int device, size_t bytes, void **ret);
void *kv_pinned_free(int device, void *p);

#endif
