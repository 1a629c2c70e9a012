/* SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/extent.h"
#include "include/internal/atomic.h"
#include "include/internal/killpoint.h"

#define for_each_gpu(e, g, mask)                                                                   \
	for (uint32_t g = 0; g < (e)->n_gpus; g++)                                                 \
		if ((mask) >> g & 1)

uint64_t kv_extents_map_bytes(uint32_t n_gpus, const uint64_t *arena_bytes, uint64_t extent_bytes)
{
	uint64_t n = 0;

	for (uint32_t g = 0; g < n_gpus; g++)
		n += arena_bytes[g] / extent_bytes;
	return n * sizeof(struct kv_extent);
}

static void lay_out(struct kv_extents *e, uint32_t n_gpus, const uint64_t *arena_bytes,
		    uint64_t extent_bytes, void *memory)
{
	struct kv_extent *map = memory;

	memset(e, 0, sizeof(*e));
	e->bytes = extent_bytes;
	e->n_gpus = n_gpus;
	for (uint32_t g = 0; g < n_gpus; g++) {
		e->n[g] = (uint32_t)(arena_bytes[g] / extent_bytes);
		e->map[g] = map;
		map += e->n[g];
	}
}

void kv_extents_init_in(struct kv_extents *e, uint32_t n_gpus, const uint64_t *arena_bytes,
			uint64_t extent_bytes, bool clean, void *memory)
{
	lay_out(e, n_gpus, arena_bytes, extent_bytes, memory);
	for (uint32_t g = 0; g < n_gpus; g++) {
		for (uint32_t i = 0; !clean && i < e->n[g]; i++)
			e->map[g][i].state = KV_EXTENT_DIRTY;
		e->n_state[g][clean ? KV_EXTENT_CLEAN : KV_EXTENT_DIRTY] = e->n[g];
	}
}

int kv_extents_init(struct kv_extents *e, uint32_t n_gpus, const uint64_t *arena_bytes,
		    uint64_t extent_bytes, bool clean)
{
	void *memory = calloc(1, kv_extents_map_bytes(n_gpus, arena_bytes, extent_bytes) + 1);

	memset(e, 0, sizeof(*e));
	if (!memory)
		return -ENOMEM;
	kv_extents_init_in(e, n_gpus, arena_bytes, extent_bytes, clean, memory);
	e->own_memory = memory;
	return 0;
}

void kv_extents_adopt(struct kv_extents *e, uint32_t n_gpus, const uint64_t *arena_bytes,
		      uint64_t extent_bytes, void *memory)
{
	lay_out(e, n_gpus, arena_bytes, extent_bytes, memory);
	for (uint32_t g = 0; g < n_gpus; g++) {
		for (uint32_t i = 0; i < e->n[g]; i++) {
			/* Whose a dirty one was is not to be believed: the number may come again. */
			if (e->map[g][i].state >= KV_EXTENT_DIRTY)
				e->map[g][i] = (struct kv_extent){ .state = KV_EXTENT_DIRTY };
			e->n_state[g][e->map[g][i].state]++;
		}
	}
}

void kv_extents_deinit(struct kv_extents *e)
{
	free(e->own_memory);
	memset(e, 0, sizeof(*e));
}

static void set(struct kv_extents *e, uint32_t gpu, uint32_t i, uint32_t state, uint32_t owner)
{
	const struct kv_extent next = { .owner = owner, .state = state };

	kv_store_release(&e->map[gpu][i].word, next.word);
	KV_KILLPOINT(worker_extent_written);
}

void kv_extents_reset(struct kv_extents *e, uint32_t gpu, uint32_t i)
{
	e->n_state[gpu][e->map[gpu][i].state]--;
	e->n_state[gpu][KV_EXTENT_DIRTY]++;
	set(e, gpu, i, KV_EXTENT_DIRTY, 0);
}

static uint32_t shortest(const struct kv_extents *e, uint32_t mask)
{
	uint32_t n = UINT32_MAX;

	for_each_gpu(e, g, mask)
		n = e->n[g] < n ? e->n[g] : n;
	return n == UINT32_MAX ? 0 : n;
}

static bool usable(const struct kv_extents *e, uint32_t mask, uint32_t i, bool with_dirty)
{
	for_each_gpu(e, g, mask) {
		uint32_t s = e->map[g][i].state;

		if (s == KV_EXTENT_OWNED || s == KV_EXTENT_HELD ||
		    (s != KV_EXTENT_CLEAN && !with_dirty))
			return false;
	}
	return true;
}

uint32_t kv_extents_find(const struct kv_extents *e, uint32_t mask, uint32_t n_min, uint32_t n_max,
			 uint32_t *ret_first)
{
	uint32_t end = shortest(e, mask), best = 0, run = 0;

	for (uint32_t i = 0; i < end && best < n_max; i++) {
		run = usable(e, mask, i, false) ? run + 1 : 0;
		if (run > best) {
			best = run;
			*ret_first = i + 1 - run;
		}
	}
	return best >= n_min ? best : 0;
}

uint32_t kv_extents_available(const struct kv_extents *e, uint32_t mask, bool with_dirty)
{
	uint32_t end = shortest(e, mask), n = 0;

	if (mask && !(mask & (mask - 1))) {
		const uint32_t *n_state = e->n_state[__builtin_ctz(mask)];

		return with_dirty ? end - n_state[KV_EXTENT_OWNED] - n_state[KV_EXTENT_HELD] :
				    n_state[KV_EXTENT_CLEAN];
	}
	for (uint32_t i = 0; i < end; i++)
		n += usable(e, mask, i, with_dirty);
	return n;
}

static bool usable_by(const struct kv_extents *e, uint32_t mask, uint32_t i, uint32_t owner)
{
	for_each_gpu(e, g, mask) {
		const struct kv_extent *extent = &e->map[g][i];

		if (extent->state != KV_EXTENT_CLEAN &&
		    (extent->state != KV_EXTENT_DIRTY || extent->owner != owner))
			return false;
	}
	return true;
}

uint32_t kv_extents_usable(const struct kv_extents *e, uint32_t mask, uint32_t owner)
{
	uint32_t end = shortest(e, mask), n = 0;
	bool dirty = false;

	for_each_gpu(e, g, mask)
		dirty |= e->n_state[g][KV_EXTENT_DIRTY];
	if (!dirty)
		return kv_extents_available(e, mask, false);
	for (uint32_t i = 0; i < end; i++)
		n += usable_by(e, mask, i, owner);
	return n;
}

uint32_t kv_extents_run(const struct kv_extents *e, uint32_t mask, uint32_t owner, uint32_t n_max,
			uint32_t *at, uint32_t *ret_first)
{
	uint32_t end = shortest(e, mask), n = 0, i = *at;

	while (i < end && !usable_by(e, mask, i, owner))
		i++;
	*ret_first = i;
	for (; i < end && n < n_max && usable_by(e, mask, i, owner); i++)
		n++;
	*at = i;
	return n;
}

static void move(struct kv_extents *e, uint32_t gpu, uint32_t first, uint32_t n, uint32_t from,
		 uint32_t to, uint32_t owner)
{
	assert(first + n <= e->n[gpu] && from != to);
	for (uint32_t i = first; i < first + n; i++) {
		assert(e->map[gpu][i].state == from);
		set(e, gpu, i, to, owner);
	}
	e->n_state[gpu][from] -= n;
	e->n_state[gpu][to] += n;
}

void kv_extents_take(struct kv_extents *e, uint32_t mask, uint32_t first, uint32_t n, uint32_t owner)
{
	for_each_gpu(e, g, mask) {
		for (uint32_t i = first; i < first + n; i++)
			move(e, g, i, 1, e->map[g][i].state, KV_EXTENT_OWNED, owner);
	}
}

void kv_extents_give(struct kv_extents *e, uint32_t mask, uint32_t first, uint32_t n)
{
	for_each_gpu(e, g, mask) {
		for (uint32_t i = first; i < first + n; i++)
			move(e, g, i, 1, KV_EXTENT_OWNED, KV_EXTENT_DIRTY, e->map[g][i].owner);
	}
}

uint32_t kv_extents_scrub_next(struct kv_extents *e, uint32_t gpu, uint32_t n_max, uint32_t *at,
			       uint32_t *ret_first)
{
	uint32_t first = *at, n = 0;

	if (!e->n_state[gpu][KV_EXTENT_DIRTY])
		return 0;
	while (first < e->n[gpu] && e->map[gpu][first].state != KV_EXTENT_DIRTY)
		first++;
	while (n < n_max && first + n < e->n[gpu] && e->map[gpu][first + n].state == KV_EXTENT_DIRTY)
		n++;
	*at = first + n;
	if (n)
		move(e, gpu, first, n, KV_EXTENT_DIRTY, KV_EXTENT_SCRUBBING, 0);
	*ret_first = first;
	return n;
}

uint32_t kv_extents_scrub(struct kv_extents *e, uint32_t gpu, uint32_t n_max, uint32_t *ret_first)
{
	uint32_t at = 0;

	return kv_extents_scrub_next(e, gpu, n_max, &at, ret_first);
}

void kv_extents_cleaned(struct kv_extents *e, uint32_t gpu, uint32_t first, uint32_t n)
{
	move(e, gpu, first, n, KV_EXTENT_SCRUBBING, KV_EXTENT_CLEAN, 0);
}

void kv_extents_scrub_failed(struct kv_extents *e, uint32_t gpu, uint32_t first, uint32_t n)
{
	move(e, gpu, first, n, KV_EXTENT_SCRUBBING, KV_EXTENT_DIRTY, 0);
}

void kv_extents_scrub_one(struct kv_extents *e, uint32_t gpu, uint32_t i)
{
	move(e, gpu, i, 1, e->map[gpu][i].state, KV_EXTENT_SCRUBBING, 0);
}

void kv_extents_withhold(struct kv_extents *e, uint32_t gpu, uint32_t i)
{
	move(e, gpu, i, 1, KV_EXTENT_SCRUBBING, KV_EXTENT_HELD, 0);
}

uint32_t kv_extents_check(const struct kv_extents *e)
{
	uint32_t wrong = 0;

	for (uint32_t g = 0; g < e->n_gpus; g++) {
		uint32_t n[KV_EXTENT_STATES] = { 0 };

		for (uint32_t i = 0; i < e->n[g]; i++) {
			if (e->map[g][i].state < KV_EXTENT_STATES)
				n[e->map[g][i].state]++;
			else
				wrong++;
		}
		for (int s = 0; s < KV_EXTENT_STATES; s++)
			wrong += n[s] != e->n_state[g][s];
	}
	return wrong;
}
