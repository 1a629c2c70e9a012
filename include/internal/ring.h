/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Single producer, single consumer, in shared pages. The other side's index is untrusted: it is loaded
 * once, and a distance that can't be is an error, never a read outside.
 */
#ifndef KV_INTERNAL_RING_H
#define KV_INTERNAL_RING_H

#include <errno.h>
#include <stdint.h>

#include "include/internal/atomic.h"
#include "include/internal/shm.h"

/* kv_ring_readable() - items the consumer may take now; -EPROTO if the indexes make no sense */
static inline int64_t kv_ring_readable(const struct kv_ring *ring, uint32_t tail,
				       uint32_t capacity)
{
	/* Pairs with the release in kv_ring_post(): items below head are visible from here on. */
	uint32_t n = kv_load_acquire(&ring->head) - tail;

	return n <= capacity ? (int64_t)n : -EPROTO;
}

/* kv_ring_writable() - free places the producer may fill now; -EPROTO likewise */
static inline int64_t kv_ring_writable(const struct kv_ring *ring, uint32_t head,
				       uint32_t capacity)
{
	/* Pairs with the release in kv_ring_consume(): places below tail have been read. */
	uint32_t n = head - kv_load_acquire(&ring->tail);

	return n <= capacity ? (int64_t)(capacity - n) : -EPROTO;
}

static inline void kv_ring_post(struct kv_ring *ring, uint32_t new_head)
{
	kv_store_release(&ring->head, new_head);
}

static inline void kv_ring_consume(struct kv_ring *ring, uint32_t new_tail)
{
	kv_store_release(&ring->tail, new_tail);
}

#endif
