/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For frameworks: memory that outlives the handle it came from, and components as tensors.
 *
 * A tensor of an array library lives as long as somebody has it, which may be longer than the pool or
 * batch whose memory it shows. A hold keeps that memory mapped: nothing that was read through an
 * address of it becomes a fault. What the bytes mean is another matter: blocks belong to others as
 * soon as they are given back.
 *
 * Threads: any, at any time. In a forked child a hold may only be freed, which then does nothing.
 */
#ifndef KVCACHED_TENSOR_H
#define KVCACHED_TENSOR_H

#include <kvcached/batch.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kv_hold;

/**
 * kv_pool_hold() - keep an arena of a mapped pool mapped, whatever becomes of the pool
 *
 * Return: 0; -EINVAL for a number out of range; -ENXIO if the pool isn't mapped there; -ENOMEM.
 */
int kv_pool_hold(const struct kv_pool *pool, uint32_t gpu, struct kv_hold **ret);

/* kv_batch_hold() - keep the arrays of a batch, also after kv_batch_free(). Return: 0 or -ENOMEM. */
int kv_batch_hold(struct kv_batch *batch, struct kv_hold **ret);

/* kv_hold_free() - NULL is allowed. Return: NULL. */
struct kv_hold *kv_hold_free(struct kv_hold *hold);

/**
 * kv_pool_ordinal() - the number that a device of the pool has in this process
 *
 * Return: the CUDA ordinal, 0 for host memory; -EINVAL; -ENXIO if the pool isn't mapped there.
 */
int kv_pool_ordinal(const struct kv_pool *pool, uint32_t gpu);

/**
 * kv_pool_dlpack() - a component of all blocks as a DLPack tensor that holds the arena
 * @ret: a struct DLManagedTensor * (version 0 of its ABI); the receiver calls its deleter, in any
 *	 thread, at any time
 *
 * Its shape is [blocks, rows, heads, elements], without rows for KV_ROLE_STATE; its strides are the
 * view's. Only blocks that are held may be read or written. KV_F8_E4M3 is DLPack's float8_e4m3fn,
 * KV_BYTES are uint8.
 *
 * Source: DLPack, https://dmlc.github.io/dlpack/latest/.
 * Return: 0; as kv_pool_hold().
 */
int kv_pool_dlpack(const struct kv_pool *pool, uint32_t gpu, uint32_t component, void **ret);

#ifdef __cplusplus
}
#endif
#endif
