/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A ring of links inside the objects they chain. The list itself is a link that belongs to no
 * object; a link that is in no list points to itself, so unlinking twice is harmless.
 *
 *	struct kv_link link; <- in the object, with a comment that says which list
 */
#ifndef KV_INTERNAL_LIST_H
#define KV_INTERNAL_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct kv_link {
	struct kv_link *prev;
	struct kv_link *next;
};

#define kv_container_of(p, type, member) ((type *)(void *)((char *)(p)-offsetof(type, member)))

static inline void kv_link_init(struct kv_link *link)
{
	link->prev = link;
	link->next = link;
}

/* Of a list: has it no member? Of a member: is it in no list? */
static inline bool kv_link_is_alone(const struct kv_link *link)
{
	return link->next == link;
}

static inline void kv_link_unlink(struct kv_link *link)
{
	link->prev->next = link->next;
	link->next->prev = link->prev;
	kv_link_init(link);
}

/* Puts @link, which is in no list, at the end of @list. */
static inline void kv_list_append(struct kv_link *list, struct kv_link *link)
{
	link->prev = list->prev;
	link->next = list;
	list->prev->next = link;
	list->prev = link;
}

/* Moves all members of @from to the end of @to. */
static inline void kv_list_move(struct kv_link *to, struct kv_link *from)
{
	if (kv_link_is_alone(from))
		return;
	from->next->prev = to->prev;
	to->prev->next = from->next;
	from->prev->next = to;
	to->prev = from->prev;
	kv_link_init(from);
}

/* Takes the first member out of @list; NULL if there is none. */
static inline struct kv_link *kv_list_take_first(struct kv_link *list)
{
	struct kv_link *link = list->next;

	if (link == list)
		return NULL;
	kv_link_unlink(link);
	return link;
}

#endif
