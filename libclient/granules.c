/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvcached --isolate: a pool is mapped granule by granule, and its page says which are its own
 * (include/internal/shm.h). Those that have left are unmapped and the daemon is told; the descriptors of
 * those that have come are asked for. Of one look at the page all is done that a block needs which was
 * granted or found before: its granule can't leave the pool while it is held.
 *
 * One comparison tells that nothing has changed (kv_granules_stale()): a pool that isn't mapped, or mapped
 * as a whole, has nothing to compare.
 */
#include <errno.h>
#include <stdlib.h>

#include "include/internal/killpoint.h"
#include "libclient/internal.h"

int kv_granules_init(struct kv_pool *pool, uint32_t gpu)
{
	pool->granules[gpu] = calloc(pool->head.n_granules + 1, sizeof(uint64_t));
	if (!pool->granules[gpu])
		return kv_error(-ENOMEM, "no memory for %llu granules",
				(unsigned long long)pool->head.n_granules);
	pool->sparse = true;
	return 0;
}

static const uint64_t *words_of(const struct kv_pool *pool)
{
	return kv_shm_granules(pool->index);
}

/* Return: 1 if any was unmapped; 0; negative: one is broken. */
static int unmap_left(struct kv_pool *pool, uint32_t gpu)
{
	const uint64_t *words = words_of(pool);
	uint64_t *mapped = pool->granules[gpu];
	int any = 0;

	for (uint32_t i = 0; i < pool->head.n_granules; i++) {
		int r;

		if (!mapped[i] || mapped[i] == kv_load_relaxed(&words[i]))
			continue;
		r = kv_memory_unmap(pool->memory[gpu], i);
		if (r < 0)
			return r;
		mapped[i] = 0;
		any = 1;
	}
	return any;
}

/* By @revision all that had left is unmapped, on all devices. */
static int let_go(struct kv_pool *pool, uint64_t revision)
{
	int any = 0;

	for (uint32_t gpu = 0; gpu < KV_MAX_GPUS; gpu++) {
		int r = pool->granules[gpu] ? unmap_left(pool, gpu) : 0;

		if (r < 0)
			return r;
		any |= r;
	}
	/* Pairs with the load in the daemon's is_let_go(). */
	kv_store_release(&pool->session->let_go, revision);
	KV_KILLPOINT(client_granules_let_go);
	if (any) {
		pool->ops_posted = true;
		kv_ops_kick(pool);
	}
	return 0;
}

void kv_granules_let_go(struct kv_pool *pool)
{
	const struct kv_shm_pool *page = pool->index;
	uint64_t revision = kv_load_acquire(&page->map_revision);

	if (kv_load_relaxed(&pool->session->let_go) != revision)
		let_go(pool, revision);
}

/* Asks for up to KV_WIRE_MAX_FDS granules, and maps what comes. */
static int fetch(struct kv_pool *pool, struct kv_msg_granules *ask, int64_t deadline)
{
	const struct kv_msg_granules_part *part = (const void *)pool->connection.buffer;
	int fds[KV_WIRE_MAX_FDS];
	uint32_t n_fds = 0;
	int r = kv_connection_call(&pool->connection, ask, KV_MSG_GRANULES_PART, sizeof(*part), fds,
				   KV_WIRE_MAX_FDS, &n_fds, deadline);

	if (!r && n_fds != part->n)
		r = kv_error(-EPROTO, "daemon: %u descriptors for %u granules", n_fds, part->n);
	for (uint32_t k = 0; !r && k < n_fds; k++) {
		const struct kv_granule_item *item = &part->items[k];

		if (item->index >= pool->head.n_granules)
			r = kv_error(-EPROTO, "daemon: it named granule %u, there are %llu", item->index,
				     (unsigned long long)pool->head.n_granules);
		else
			r = kv_memory_map(pool->memory[ask->gpu], item->index, fds[k]);
		if (!r)
			pool->granules[ask->gpu][item->index] = item->word;
		KV_KILLPOINT(client_granule_mapped);
	}
	while (n_fds)
		kv_close(fds[--n_fds]);
	return r;
}

static int map_new(struct kv_pool *pool, uint32_t gpu, int64_t deadline)
{
	struct kv_msg_granules ask = { .head = { .type = KV_MSG_GRANULES, .size = sizeof(ask) },
				       .gpu = gpu };
	const uint64_t *words = words_of(pool);
	int r = 0;

	for (uint32_t i = 0; !r && i < pool->head.n_granules; i++) {
		if (kv_load_relaxed(&words[i]) && !pool->granules[gpu][i])
			ask.index[ask.n++] = i;
		if (ask.n == KV_WIRE_MAX_FDS) {
			r = fetch(pool, &ask, deadline);
			ask.n = 0;
		}
	}
	return !r && ask.n ? fetch(pool, &ask, deadline) : r;
}

int kv_granules_sync(struct kv_pool *pool, int64_t deadline)
{
	const struct kv_shm_pool *page = pool->index;
	uint64_t revision = kv_load_acquire(&page->map_revision);
	int r = let_go(pool, revision);

	for (uint32_t gpu = 0; !r && gpu < KV_MAX_GPUS; gpu++)
		r = pool->granules[gpu] ? map_new(pool, gpu, deadline) : 0;
	if (!r)
		pool->map_seen = revision;
	return r;
}
