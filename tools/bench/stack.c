/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/stack.h"

int32_t kv_array_stack_pop(struct kv_array_stack *stack)
{
	return stack->ids[--stack->n];
}

void kv_array_stack_push(struct kv_array_stack *stack, int32_t id)
{
	stack->ids[stack->n++] = id;
}

int32_t kv_mutex_list_pop(struct kv_mutex_list *list)
{
	int32_t id;

	pthread_mutex_lock(&list->lock);
	id = list->first;
	if (id >= 0)
		list->first = list->next[id];
	pthread_mutex_unlock(&list->lock);
	return id;
}

void kv_mutex_list_push(struct kv_mutex_list *list, int32_t id)
{
	pthread_mutex_lock(&list->lock);
	list->next[id] = list->first;
	list->first = id;
	pthread_mutex_unlock(&list->lock);
}
