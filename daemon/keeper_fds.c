/* SPDX-License-Identifier: Apache-2.0 */
/* What the keeper holds for the worker: descriptors by kind and number, in order of arrival. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/keeper.h"
#include "include/internal/cleanup.h"

struct kv_deposit *kv_deposit_free(struct kv_deposit *deposit)
{
	if (!deposit)
		return NULL;
	for (uint32_t i = 0; i < deposit->n_fds; i++)
		kv_close(deposit->fds[i]);
	kv_link_unlink(&deposit->link);
	free(deposit);
	return NULL;
}

static struct kv_deposit *find(const struct kv_link *list, uint32_t kind, uint64_t id, uint32_t part)
{
	for (struct kv_link *l = list->next; l != list; l = l->next) {
		struct kv_deposit *d = kv_container_of(l, struct kv_deposit, link);

		if (d->kind == kind && d->id == id && d->part == part)
			return d;
	}
	return NULL;
}

int kv_deposits_put(struct kv_link *list, const struct kv_keeper_msg *msg, const int *fds)
{
	struct kv_deposit *d = malloc(sizeof(*d) + msg->n_fds * sizeof(*fds));

	if (!d) {
		for (uint32_t i = 0; i < msg->n_fds; i++)
			kv_close(fds[i]);
		return -ENOMEM;
	}
	*d = (struct kv_deposit){
		.kind = msg->kind, .part = msg->part, .n_fds = msg->n_fds, .id = msg->id};
	memcpy(d->fds, fds, msg->n_fds * sizeof(*fds));
	kv_deposit_free(find(list, msg->kind, msg->id, msg->part));
	kv_list_append(list, &d->link);
	return 0;
}

struct kv_deposit *kv_deposits_find(const struct kv_link *list, const struct kv_deposit *from,
				    uint32_t kind)
{
	for (const struct kv_link *l = from ? from->link.next : list->next; l != list; l = l->next) {
		struct kv_deposit *d = kv_container_of(l, struct kv_deposit, link);

		if (d->kind == kind)
			return d;
	}
	return NULL;
}

struct kv_deposit *kv_deposits_get(const struct kv_link *list, uint32_t kind, uint64_t id)
{
	return find(list, kind, id, 0);
}

void kv_deposits_drop(struct kv_link *list, uint32_t kind, uint64_t id)
{
	struct kv_link *next;

	for (struct kv_link *l = list->next; l != list; l = next) {
		struct kv_deposit *d = kv_container_of(l, struct kv_deposit, link);

		next = l->next;
		if (d->kind == kind && d->id == id)
			kv_deposit_free(d);
	}
}
