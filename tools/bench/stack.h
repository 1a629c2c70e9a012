/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The yardsticks of `kvbench lease`: what handing out blocks costs where nobody shares anything.
 * The functions stand in a file of their own, so that a caller calls them, as it calls a library.
 */
#ifndef KV_TOOLS_BENCH_STACK_H
#define KV_TOOLS_BENCH_STACK_H

#include <pthread.h>
#include <stdint.h>

/* An array in private memory: the least that a free list can be. The caller knows what is in it. */
struct kv_array_stack {
	uint32_t n;
	int32_t ids[1024];
};

int32_t kv_array_stack_pop(struct kv_array_stack *stack);
void kv_array_stack_push(struct kv_array_stack *stack, int32_t id);

/* A free list that threads share: next[id] is the id behind it, -1 at the end. */
struct kv_mutex_list {
	pthread_mutex_t lock;
	int32_t first;
	int32_t next[1024];
};

int32_t kv_mutex_list_pop(struct kv_mutex_list *list);
void kv_mutex_list_push(struct kv_mutex_list *list, int32_t id);

#endif
