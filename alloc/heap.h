/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A binary heap of (stamp, id), smallest stamp first: the order in which cached blocks are looked at
 * for eviction. Stamps in the heap may be older than the block's real one; who pops, compares.
 */
#ifndef KV_ALLOC_HEAP_H
#define KV_ALLOC_HEAP_H

#include <stdint.h>

struct kv_heap_item {
	uint64_t stamp;
	int32_t id;
};

struct kv_heap {
	struct kv_heap_item *items;
	uint32_t n, room;
};

int kv_heap_reserve(struct kv_heap *heap, uint32_t n); /* room for @n in all: 0 or -ENOMEM */
int kv_heap_push(struct kv_heap *heap, uint64_t stamp, int32_t id); /* 0 or -ENOMEM */
void kv_heap_pop(struct kv_heap *heap);				    /* heap->n > 0 */
void kv_heap_order(struct kv_heap *heap);			    /* after stamps were changed */
void kv_heap_restamp_top(struct kv_heap *heap, uint64_t stamp);	    /* not smaller than it was */

#endif
