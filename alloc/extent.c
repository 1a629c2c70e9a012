/* SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/extent.h"

#define for_each_gpu(e, g, mask)                                                                   \
	for (uint32_t g = 0; g < (e)->n_gpus; g++)                                                 \
		if ((mask) >> g & 1)

int kv_extents_init(struct kv_extents *e, uint32_t n_gpus, const uint64_t *arena_bytes,
		    uint64_t extent_bytes, bool clean)
{
	memset(e, 0, sizeof(*e));
	e->bytes = extent_bytes;
	e->n_gpus = n_gpus;
	for (uint32_t g = 0; g < n_gpus; g++) {
		e->n[g] = (uint32_t)(arena_bytes[g] / extent_bytes);
		e->map[g] = calloc(e->n[g], sizeof(*e->map[g]));
		if (!e->map[g] && e->n[g]) {
			kv_extents_deinit(e);
			return -ENOMEM;
		}
		for (uint32_t i = 0; !clean && i < e->n[g]; i++)
			e->map[g][i].state = KV_EXTENT_DIRTY;
		e->n_state[g][clean ? KV_EXTENT_CLEAN : KV_EXTENT_DIRTY] = e->n[g];
	}
	return 0;
}

void kv_extents_deinit(struct kv_extents *e)
{
	for (uint32_t g = 0; g < e->n_gpus; g++)
		free(e->map[g]);
	memset(e, 0, sizeof(*e));
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
		uint8_t s = e->map[g][i].state;

		if (s == KV_EXTENT_OWNED || (s != KV_EXTENT_CLEAN && !with_dirty))
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

	for (uint32_t i = 0; i < end; i++)
		n += usable(e, mask, i, with_dirty);
	return n;
}

static void move(struct kv_extents *e, uint32_t gpu, uint32_t first, uint32_t n, uint8_t from,
		 uint8_t to, uint32_t owner)
{
	assert(first + n <= e->n[gpu]);
	for (uint32_t i = first; i < first + n; i++) {
		assert(e->map[gpu][i].state == from);
		e->map[gpu][i] = (struct kv_extent){ .owner = owner, .state = to };
	}
	e->n_state[gpu][from] -= n;
	e->n_state[gpu][to] += n;
}

void kv_extents_take(struct kv_extents *e, uint32_t mask, uint32_t first, uint32_t n, uint32_t owner)
{
	for_each_gpu(e, g, mask)
		move(e, g, first, n, KV_EXTENT_CLEAN, KV_EXTENT_OWNED, owner);
}

void kv_extents_give(struct kv_extents *e, uint32_t mask, uint32_t first, uint32_t n)
{
	for_each_gpu(e, g, mask)
		move(e, g, first, n, KV_EXTENT_OWNED, KV_EXTENT_DIRTY, 0);
}

uint32_t kv_extents_scrub(struct kv_extents *e, uint32_t gpu, uint32_t n_max, uint32_t *ret_first)
{
	uint32_t first = 0, n = 0;

	if (!e->n_state[gpu][KV_EXTENT_DIRTY])
		return 0;
	while (first < e->n[gpu] && e->map[gpu][first].state != KV_EXTENT_DIRTY)
		first++;
	while (n < n_max && first + n < e->n[gpu] && e->map[gpu][first + n].state == KV_EXTENT_DIRTY)
		n++;
	move(e, gpu, first, n, KV_EXTENT_DIRTY, KV_EXTENT_SCRUBBING, 0);
	*ret_first = first;
	return n;
}

void kv_extents_cleaned(struct kv_extents *e, uint32_t gpu, uint32_t first, uint32_t n)
{
	move(e, gpu, first, n, KV_EXTENT_SCRUBBING, KV_EXTENT_CLEAN, 0);
}

void kv_extents_scrub_failed(struct kv_extents *e, uint32_t gpu, uint32_t first, uint32_t n)
{
	move(e, gpu, first, n, KV_EXTENT_SCRUBBING, KV_EXTENT_DIRTY, 0);
}

uint32_t kv_extents_check(const struct kv_extents *e)
{
	uint32_t wrong = 0;

	for (uint32_t g = 0; g < e->n_gpus; g++) {
		uint32_t n[4] = { 0 };

		for (uint32_t i = 0; i < e->n[g]; i++)
			n[e->map[g][i].state & 3]++;
		for (int s = 0; s < 4; s++)
			wrong += n[s] != e->n_state[g][s];
	}
	return wrong;
}
