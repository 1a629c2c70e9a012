/* SPDX-License-Identifier: Apache-2.0 */
/* Between memory_cuda.c (arenas) and memory_cuda_stream.c (events, pinned memory). */
#ifndef KV_KERNELS_MEMORY_CUDA_H
#define KV_KERNELS_MEMORY_CUDA_H

#include "kernels/cuda_driver.h"
#include "kernels/memory_backend.h"

/* The GPU whose arena was attached last in this process, the driver's number; -1: none yet. */
extern _Atomic int kv_memory_cuda_last;

/*
 * kv_memory_cuda_prop() - how a granule on @device is allocated: exported as a file descriptor. It asks for
 * GPUDirect RDMA where the GPU can: that cannot be added later.
 */
void kv_memory_cuda_prop(const struct kv_cuda *cuda, CUdevice device, CUmemAllocationProp *ret);

int kv_memory_cuda_event_new(struct kv_event **ret);
void kv_memory_cuda_event_free(struct kv_event *event);
int kv_memory_cuda_event_record(struct kv_event *event, void *stream);
int kv_memory_cuda_event_query(struct kv_event *event);
int kv_memory_cuda_pinned_new(size_t bytes, void **ret);
void kv_memory_cuda_pinned_free(void *p);

#endif
