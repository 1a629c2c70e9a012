/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What must not happen before the GPU is done: giving a block back, and showing it to others.
 *
 * One list a pool, in order of asking; each item has an event on the stream it was asked with. An
 * item happens when its event has passed and all before it have happened, so that a block is
 * published before it is given, whatever streams were named. In host memory, and in a pool that
 * isn't mapped, the list stays empty: all happens at once.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "libclient/internal.h"

struct kv_later {
	struct kv_link link; /* kv_pool::later; the first member: the list is freed as such */
	struct kv_event *event; /* NULL: it only keeps its place in the order */
	uint32_t n_ids, n_ops;
	struct kv_op *ops; /* behind the struct */
	kv_block_id *ids;  /* behind the ops */
};

static void happen(struct kv_pool *pool, const struct kv_op *ops, uint32_t n_ops,
		   const kv_block_id *ids, uint32_t n_ids)
{
	for (uint32_t i = 0; i < n_ops; i++) {
		kv_ops_post(pool, &ops[i]);
		if (ops[i].flags & KV_OP_AGAIN)
			kv_again_posted(pool, ops[i].id);
	}
	for (uint32_t i = 0; i < n_ids; i++)
		kv_block_release(pool, ids[i]);
	kv_ops_kick(pool);
}

static struct kv_later *later_new(const struct kv_op *ops, uint32_t n_ops, const kv_block_id *ids,
				  uint32_t n_ids)
{
	struct kv_later *later = malloc(sizeof(*later) + n_ops * sizeof(*ops) + n_ids * sizeof(*ids));

	if (!later)
		return NULL;
	later->event = NULL;
	later->n_ops = n_ops;
	later->n_ids = n_ids;
	later->ops = (struct kv_op *)(later + 1);
	later->ids = (kv_block_id *)(later->ops + n_ops);
	if (n_ops)
		memcpy(later->ops, ops, n_ops * sizeof(*ops));
	if (n_ids)
		memcpy(later->ids, ids, n_ids * sizeof(*ids));
	kv_link_init(&later->link);
	return later;
}

static int add(struct kv_pool *pool, void *stream, const struct kv_op *ops, uint32_t n_ops,
	       const kv_block_id *ids, uint32_t n_ids)
{
	struct kv_later *later;
	int r;

	if (pool->device == KV_DEVICE_HOST) {
		happen(pool, ops, n_ops, ids, n_ids);
		return 0;
	}
	if (!n_ops && !n_ids)
		return 0;
	later = later_new(ops, n_ops, ids, n_ids);
	if (!later)
		return kv_no_memory();
	r = kv_event_new(pool->device, &later->event);
	if (!r)
		r = kv_event_record(later->event, stream);
	if (r < 0) {
		kv_event_free(later->event);
		free(later);
		return r;
	}
	kv_list_append(&pool->later, &later->link);
	kv_later_poll(pool);
	return 0;
}

void kv_later_drop(struct kv_pool *pool, kv_block_id id)
{
	struct kv_later *later = kv_link_is_alone(&pool->later) ? NULL : later_new(NULL, 0, &id, 1);

	if (later)
		kv_list_append(&pool->later, &later->link);
	else
		kv_block_release(pool, id);
}

int kv_later_release(struct kv_pool *pool, void *stream, const kv_block_id *ids, uint32_t n)
{
	return add(pool, stream, NULL, 0, ids, n);
}

int kv_later_publish(struct kv_pool *pool, void *stream, const struct kv_op *ops, uint32_t n)
{
	return add(pool, stream, ops, n, NULL, 0);
}

void kv_later_poll(struct kv_pool *pool)
{
	if (__builtin_expect(pool->n_late, 0))
		kv_ops_kick(pool);
	while (!kv_link_is_alone(&pool->later)) {
		struct kv_later *later = kv_container_of(pool->later.next, struct kv_later, link);
		int r = later->event ? kv_event_query(later->event) : 1;

		/* Broken: nobody will ever know when the writes ended. The daemon waits for our end. */
		if (r < 0)
			pool->lost = true;
		if (r <= 0)
			return;
		kv_link_unlink(&later->link);
		kv_event_free(later->event);
		happen(pool, later->ops, later->n_ops, later->ids, later->n_ids);
		free(later);
	}
}

int kv_later_finish(struct kv_pool *pool, int64_t deadline)
{
	for (;;) {
		kv_later_poll(pool);
		if (kv_link_is_alone(&pool->later))
			return 0;
		if (pool->lost)
			return -EIO;
		if (kv_now() >= deadline)
			return -ETIMEDOUT;
		poll(NULL, 0, 1);
	}
}
