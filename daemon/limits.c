/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pool's minimum, maximum and weight: checked, changed while it runs, and shown in its shared page
 * with a revision, where clients read them before they ask for anything.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/daemon.h"
#include "daemon/log.h"
#include "include/internal/error.h"
#include "include/internal/killpoint.h"

uint64_t kv_limits_arena(const struct kv_daemon *d, uint32_t gpu_mask)
{
	uint64_t arena = UINT64_MAX;

	for (uint32_t g = 0; g < d->n_gpus; g++) {
		uint64_t bytes = (uint64_t)d->extents.n[g] * d->extents.bytes;

		if (gpu_mask >> g & 1 && bytes < arena)
			arena = bytes;
	}
	return arena;
}

/* What the minimums of other pools leave, on whichever of these devices they leave least. */
static uint64_t left_by_others(const struct kv_pool *pool)
{
	struct kv_daemon *d = pool->daemon;
	uint64_t least = UINT64_MAX;

	for (uint32_t g = 0; g < d->n_gpus; g++) {
		uint64_t left = (uint64_t)d->extents.n[g] * d->extents.bytes;

		if (!(pool->gpu_mask >> g & 1))
			continue;
		for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
			struct kv_pool *other = kv_container_of(l, struct kv_pool, link);

			if (other != pool && other->gpu_mask >> g & 1)
				left -= other->min_bytes < left ? other->min_bytes : left;
		}
		least = left < least ? left : least;
	}
	return least;
}

uint64_t kv_limits_most(const struct kv_pool *pool)
{
	uint64_t left;

	if (pool->layout.kind == KV_LAYOUT_PAGED) /* all that it has is its own, from the start */
		return pool->max_bytes;
	left = left_by_others(pool);
	left = left > pool->min_bytes ? left : pool->min_bytes;
	return left < pool->max_bytes ? left : pool->max_bytes;
}

uint64_t kv_limits_most_blocks(const struct kv_pool *pool)
{
	uint64_t n = kv_limits_most(pool) / pool->block_bytes;

	/* The null block takes the place of one. */
	n -= n > 0;
	return n < pool->max_blocks ? n : pool->max_blocks;
}

int kv_limits_check(const struct kv_pool *pool, struct kv_limits *limits)
{
	uint64_t arena = kv_limits_arena(pool->daemon, pool->gpu_mask);
	uint64_t left = left_by_others(pool), least = 2 * pool->block_bytes;

	if (!limits->max_bytes || limits->max_bytes > arena)
		limits->max_bytes = arena;
	if (limits->max_bytes < least)
		return kv_error(-EINVAL,
				"max_bytes: %llu given; the null block and one more of %llu bytes "
				"need %llu (the arena has %llu)",
				(unsigned long long)limits->max_bytes,
				(unsigned long long)pool->block_bytes, (unsigned long long)least,
				(unsigned long long)arena);
	if (limits->min_bytes > limits->max_bytes)
		return kv_error(-EINVAL, "min_bytes: %llu given, max_bytes is %llu",
				(unsigned long long)limits->min_bytes,
				(unsigned long long)limits->max_bytes);
	if (limits->min_bytes > left)
		return kv_error(-ENOMEM,
				"min_bytes: %llu asked, but %llu of %llu bytes are promised to other "
				"pools",
				(unsigned long long)limits->min_bytes, (unsigned long long)(arena - left),
				(unsigned long long)arena);
	if (!limits->weight || limits->weight > KV_WEIGHT_MAX)
		return kv_error(-EINVAL, "weight: %u given, 1 to %u are possible", limits->weight,
				KV_WEIGHT_MAX);
	return 0;
}

static void set(struct kv_pool *pool, const struct kv_limits *limits)
{
	pool->min_bytes = limits->min_bytes;
	pool->max_bytes = limits->max_bytes;
	pool->weight = limits->weight;
	/* The null block takes the place of one. */
	pool->max_blocks = limits->max_bytes / pool->block_bytes - 1;
}

void kv_limits_show(struct kv_pool *pool)
{
	struct kv_shm_limits *page = &pool->head->limits;

	kv_store_relaxed(&page->min_bytes, pool->min_bytes);
	kv_store_relaxed(&page->max_bytes, pool->max_bytes);
	kv_store_relaxed(&page->max_blocks, pool->max_blocks);
	kv_store_relaxed(&page->weight, pool->weight);
	/* Pairs with the load in kv_pool_max_blocks(): who sees the revision sees its limits. */
	kv_store_release(&page->revision, pool->limits_revision);
}

/* Written down before anybody sees them: what a client has seen is what the next worker goes by. */
void kv_limits_adopt(struct kv_pool *pool, const struct kv_limits *limits)
{
	struct kv_pool_record *record = pool->record;

	set(pool, limits);
	if (!pool->head) /* it is being made */
		return;
	record->limits[++pool->limits_revision % 2] =
		(struct kv_limits_record){ limits->min_bytes, limits->max_bytes, limits->weight };
	kv_store_release(&record->limits_revision, pool->limits_revision);
	KV_KILLPOINT(worker_limits_saved);
	kv_limits_show(pool);
	KV_KILLPOINT(worker_limits_shown);
}

void kv_limits_load(struct kv_pool *pool)
{
	const struct kv_pool_record *record = pool->record;
	const struct kv_limits_record *saved = &record->limits[record->limits_revision % 2];

	pool->limits_revision = record->limits_revision;
	set(pool, &(struct kv_limits){ saved->min_bytes, saved->max_bytes, (uint32_t)saved->weight });
}

/* Are the limits those that the message asks for, by the change of the revision that it names? */
static bool is_done(const struct kv_pool *pool, const struct kv_msg_pool_set *msg,
		    const struct kv_limits *limits)
{
	return msg->revision + 1 == pool->limits_revision && limits->min_bytes == pool->min_bytes &&
	       limits->max_bytes == pool->max_bytes && limits->weight == pool->weight;
}

static int change(struct kv_pool *pool, const struct kv_msg_pool_set *msg)
{
	struct kv_limits limits = { pool->min_bytes, pool->max_bytes, pool->weight };
	int r;

	if (msg->change & KV_LIMIT_MIN)
		limits.min_bytes = msg->min_bytes;
	if (msg->change & KV_LIMIT_MAX)
		limits.max_bytes = msg->max_bytes;
	if (msg->change & KV_LIMIT_WEIGHT)
		limits.weight = msg->weight;
	r = kv_limits_check(pool, &limits);
	/* Asked twice, the first time of a worker that died before it answered. */
	if (!r && msg->revision && is_done(pool, msg, &limits))
		return 0;
	if (msg->revision && msg->revision != pool->limits_revision)
		return kv_error(-ESTALE, "revision: %llu given, the limits of '%s' are at %llu",
				(unsigned long long)msg->revision, pool->name,
				(unsigned long long)pool->limits_revision);
	if (r < 0)
		return r;
	if (pool->slab_blocks && limits.max_bytes / pool->block_bytes > pool->slab_blocks) {
		if (msg->change & KV_LIMIT_MAX && msg->max_bytes)
			return kv_error(-ENOTSUP,
					"max_bytes: %llu given; '%s' is paged, its slab has %llu blocks "
					"of %llu bytes and stays as it is",
					(unsigned long long)msg->max_bytes, pool->name,
					(unsigned long long)pool->slab_blocks,
					(unsigned long long)pool->block_bytes);
		limits.max_bytes = pool->slab_blocks * pool->block_bytes;
	}
	kv_limits_adopt(pool, &limits);
	return 0;
}

void kv_limits_set(struct kv_peer *peer, const struct kv_msg_pool_set *msg)
{
	struct kv_pool *pool = kv_pool_find(peer->daemon, msg->name);
	struct kv_msg_pool_limits reply = { 0 };
	int r = pool ? kv_user_may_change(peer, pool) :
		       kv_error(-ENOENT, "there is no pool '%s'", msg->name);

	if (!r)
		r = change(pool, msg);
	if (r < 0) {
		kv_peer_error(peer, msg->head.tag, r, "%s", kv_error_text());
		return;
	}
	kv_log(KV_LOG_INFO, "pool '%s': limits %llu: min %llu, max %llu bytes, weight %u", pool->name,
	       (unsigned long long)pool->limits_revision, (unsigned long long)pool->min_bytes,
	       (unsigned long long)pool->max_bytes, pool->weight);
	reply.revision = pool->limits_revision;
	reply.min_bytes = pool->min_bytes;
	reply.max_bytes = pool->max_bytes;
	reply.weight = pool->weight;
	/* A minimum of one is what the others may no longer have. */
	for (struct kv_link *l = pool->daemon->pools.next; l != &pool->daemon->pools; l = l->next)
		kv_capacity_trim(kv_container_of(l, struct kv_pool, link));
	kv_capacity_magazines(pool);
	kv_capacity_serve(peer->daemon);
	kv_wire_init(&reply.head, KV_MSG_POOL_LIMITS, sizeof(reply), msg->head.tag);
	kv_peer_send(peer, &reply, sizeof(reply), NULL, 0);
}
