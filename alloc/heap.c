/* SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "alloc/heap.h"

static void sift_down(struct kv_heap *heap, uint32_t i)
{
	struct kv_heap_item item = heap->items[i];

	for (;;) {
		uint32_t child = 2 * i + 1;

		if (child >= heap->n)
			break;
		if (child + 1 < heap->n &&
		    heap->items[child + 1].stamp < heap->items[child].stamp)
			child++;
		if (heap->items[child].stamp >= item.stamp)
			break;
		heap->items[i] = heap->items[child];
		i = child;
	}
	heap->items[i] = item;
}

int kv_heap_reserve(struct kv_heap *heap, uint32_t n)
{
	uint32_t room = heap->room ? heap->room : 1024;
	void *items;

	if (n <= heap->room)
		return 0;
	while (room < n)
		room *= 2;
	items = realloc(heap->items, (size_t)room * sizeof(*heap->items));
	if (!items)
		return -ENOMEM;
	heap->items = items;
	heap->room = room;
	return 0;
}

int kv_heap_push(struct kv_heap *heap, uint64_t stamp, int32_t id)
{
	uint32_t i = heap->n;

	if (kv_heap_reserve(heap, heap->n + 1) < 0)
		return -ENOMEM;
	heap->n++;
	while (i && heap->items[(i - 1) / 2].stamp > stamp) {
		heap->items[i] = heap->items[(i - 1) / 2];
		i = (i - 1) / 2;
	}
	heap->items[i] = (struct kv_heap_item){ stamp, id };
	return 0;
}

void kv_heap_pop(struct kv_heap *heap)
{
	assert(heap->n);
	heap->items[0] = heap->items[--heap->n];
	if (heap->n)
		sift_down(heap, 0);
}

void kv_heap_order(struct kv_heap *heap)
{
	for (uint32_t i = heap->n / 2; i--;)
		sift_down(heap, i);
}

void kv_heap_restamp_top(struct kv_heap *heap, uint64_t stamp)
{
	heap->items[0].stamp = stamp;
	sift_down(heap, 0);
}
