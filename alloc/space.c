/* SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/space.h"

#define NO_SHIFT 63

int kv_space_init(struct kv_space *s, uint32_t id_limit, uint64_t block_bytes,
		  uint64_t extent_bytes)
{
	memset(s, 0, sizeof(*s));
	s->block_bytes = block_bytes;
	s->id_limit = id_limit;
	s->shift = extent_bytes ? (uint32_t)__builtin_ctzll(extent_bytes) : NO_SHIFT;
	/* The arena may end with less than a block, in an extent that no block touches. */
	s->n_extents = 1;
	if (extent_bytes)
		s->n_extents += (uint32_t)(((uint64_t)id_limit + 1) * block_bytes >> s->shift);
	s->free = calloc(id_limit / 64 + 1, sizeof(*s->free));
	s->extents = calloc(s->n_extents + 1, sizeof(*s->extents));
	if (!s->free || !s->extents) {
		kv_space_deinit(s);
		return -ENOMEM;
	}
	for (int c = 0; c < KV_SPACE_CLASSES; c++)
		s->lists[c] = -1;
	for (uint32_t i = 1; i <= s->n_extents; i++) {
		uint64_t first = extent_bytes ?
			(((uint64_t)i << s->shift) + block_bytes - 1) / block_bytes : id_limit;

		s->extents[i].first = first < id_limit ? (uint32_t)first : id_limit;
	}
	if (!extent_bytes)
		kv_space_own(s, 0, true);
	return 0;
}

void kv_space_deinit(struct kv_space *s)
{
	free(s->free);
	free(s->extents);
	memset(s, 0, sizeof(*s));
}

static uint8_t class_of(const struct kv_space_extent *e)
{
	if (!e->owned)
		return KV_SPACE_NONE;
	if (!e->n_used)
		return e->n_free ? KV_SPACE_EMPTY : KV_SPACE_BARE;
	if (!e->n_free)
		return KV_SPACE_FULL;
	return (uint8_t)(KV_SPACE_PART +
			 (uint64_t)e->n_used * 16 / ((uint64_t)e->n_used + e->n_free));
}

static void unlist(struct kv_space *s, uint32_t i)
{
	struct kv_space_extent *e = &s->extents[i];

	if (e->class == KV_SPACE_NONE)
		return;
	if (e->prev >= 0)
		s->extents[e->prev].next = e->next;
	else
		s->lists[e->class] = e->next;
	if (e->next >= 0)
		s->extents[e->next].prev = e->prev;
	if (!--s->n_in[e->class])
		s->classes &= ~(1u << e->class);
}

static void enlist(struct kv_space *s, uint32_t i, uint8_t class)
{
	struct kv_space_extent *e = &s->extents[i];

	e->class = class;
	if (class == KV_SPACE_NONE)
		return;
	e->prev = -1;
	e->next = s->lists[class];
	if (e->next >= 0)
		s->extents[e->next].prev = (int32_t)i;
	s->lists[class] = (int32_t)i;
	s->n_in[class]++;
	s->classes |= 1u << class;
}

static void sort_in(struct kv_space *s, uint32_t i)
{
	uint8_t class = class_of(&s->extents[i]);

	if (class == s->extents[i].class)
		return;
	unlist(s, i);
	enlist(s, i, class);
}

void kv_space_own(struct kv_space *s, uint32_t i, bool owned)
{
	assert(owned || (!s->extents[i].n_used && !s->extents[i].n_free));
	s->extents[i].owned = owned;
	s->extents[i].touched |= owned;
	sort_in(s, i);
}

static void account(struct kv_space *s, int32_t id, int used, int free)
{
	uint32_t i = kv_space_first(s, id), last = kv_space_last(s, id);

	for (; i <= last; i++) {
		s->extents[i].n_used += (uint32_t)used;
		s->extents[i].n_free += (uint32_t)free;
		sort_in(s, i);
	}
	s->n_free += (uint32_t)free;
}

static void set_bit(struct kv_space *s, int32_t id)
{
	uint32_t word = (uint32_t)id / 64;
	struct kv_space_extent *e = &s->extents[kv_space_first(s, id)];

	assert(!kv_space_is_free(s, id));
	s->free[word] |= (uint64_t)1 << (uint32_t)id % 64;
	if (word < e->from)
		e->from = word;
}

static void clear_bit(struct kv_space *s, int32_t id)
{
	assert(kv_space_is_free(s, id));
	s->free[(uint32_t)id / 64] &= ~((uint64_t)1 << (uint32_t)id % 64);
}

void kv_space_add(struct kv_space *s, int32_t id)
{
	set_bit(s, id);
	account(s, id, 0, 1);
}

void kv_space_remove(struct kv_space *s, int32_t id)
{
	clear_bit(s, id);
	account(s, id, 0, -1);
}

void kv_space_use(struct kv_space *s, int32_t id)
{
	clear_bit(s, id);
	account(s, id, 1, -1);
}

void kv_space_release(struct kv_space *s, int32_t id)
{
	set_bit(s, id);
	account(s, id, -1, 1);
}

void kv_space_blocks(const struct kv_space *s, uint32_t i, int32_t *ret_first, int32_t *ret_end)
{
	uint32_t first = s->extents[i].first;

	/* One that begins before it may reach into it. */
	if (first && s->shift != NO_SHIFT && first * s->block_bytes > (uint64_t)i << s->shift)
		first--;
	*ret_first = (int32_t)first;
	*ret_end = (int32_t)s->extents[i + 1].first;
}

int32_t kv_space_pick_in(struct kv_space *s, uint32_t i)
{
	struct kv_space_extent *e = &s->extents[i];
	uint32_t first = e->first, end = s->extents[i + 1].first, word;

	if (first >= end)
		return -1;
	for (word = e->from > first / 64 ? e->from : first / 64; word <= (end - 1) / 64; word++) {
		uint64_t bits = s->free[word];

		if (word == first / 64)
			bits &= ~(uint64_t)0 << first % 64;
		if (word == (end - 1) / 64)
			bits &= ~(uint64_t)0 >> (63 - (end - 1) % 64);
		if (bits) {
			e->from = word;
			return (int32_t)(word * 64 + (uint32_t)__builtin_ctzll(bits));
		}
	}
	e->from = word;
	return -1;
}

/*
 * A free block that touches an extent begins in it or before it: blocks larger than an extent begin
 * in one of the extents that they cover.
 */
static int32_t pick_touching(struct kv_space *s, uint32_t i)
{
	int32_t id = kv_space_pick_in(s, i), first, end;

	if (id >= 0)
		return id;
	kv_space_blocks(s, i, &first, &end);
	return first < end && kv_space_is_free(s, first) ? first : -1;
}

int32_t kv_space_pick(struct kv_space *s)
{
	uint32_t part = s->classes >> KV_SPACE_PART;
	int c = part ? KV_SPACE_PART + 31 - __builtin_clz(part) : KV_SPACE_EMPTY;
	int32_t id;

	if (!s->n_free)
		return -1;
	id = pick_touching(s, (uint32_t)s->lists[c]);
	assert(id >= 0);
	return id;
}

/* Bits of free blocks in [first, end). */
static uint32_t count_bits(const struct kv_space *s, uint32_t first, uint32_t end)
{
	uint32_t n = 0;

	for (uint32_t word = first / 64; first < end && word <= (end - 1) / 64; word++) {
		uint64_t bits = s->free[word];

		if (word == first / 64)
			bits &= ~(uint64_t)0 << first % 64;
		if (word == (end - 1) / 64)
			bits &= ~(uint64_t)0 >> (63 - (end - 1) % 64);
		n += (uint32_t)__builtin_popcountll(bits);
	}
	return n;
}

uint32_t kv_space_n_free_spare(const struct kv_space *s)
{
	uint32_t n = 0;

	/* A block that reaches into several is counted where it begins. */
	for (int32_t i = s->lists[KV_SPACE_EMPTY]; i >= 0; i = s->extents[i].next)
		n += count_bits(s, s->extents[i].first, s->extents[i + 1].first);
	return n;
}

int32_t kv_space_pick_above(struct kv_space *s, int class)
{
	for (int c = KV_SPACE_CLASSES - 1; c > class && c >= KV_SPACE_PART; c--) {
		for (int32_t i = s->lists[c]; i >= 0; i = s->extents[i].next) {
			int32_t id = s->extents[i].leaving ? -1 : kv_space_pick_in(s, (uint32_t)i);

			/* Not one that reaches into an extent which is to run empty. */
			if (id >= 0 && !s->extents[kv_space_last(s, id)].leaving)
				return id;
		}
	}
	return -1;
}

uint32_t kv_space_check_lists(const struct kv_space *s)
{
	uint32_t wrong = 0, n = 0, n_listed = 0;

	for (uint32_t i = 0; i < s->n_extents; i++) {
		wrong += class_of(&s->extents[i]) != s->extents[i].class;
		n += s->extents[i].class != KV_SPACE_NONE;
	}
	for (int c = 1; c < KV_SPACE_CLASSES; c++) {
		uint32_t n_here = 0;

		for (int32_t i = s->lists[c]; i >= 0 && n_here <= s->n_extents;
		     i = s->extents[i].next, n_here++)
			wrong += s->extents[i].class != c;
		wrong += n_here != s->n_in[c] || (s->classes >> c & 1) != (n_here > 0);
		n_listed += n_here;
	}
	return wrong + (n != n_listed);
}

uint32_t kv_space_check(const struct kv_space *s, const bool *used)
{
	uint32_t *counts = calloc(2 * (size_t)s->n_extents, sizeof(*counts)), wrong = 0, n_free = 0;

	if (!counts)
		return 1;
	for (uint32_t id = 0; id < s->id_limit; id++) {
		bool is_free = kv_space_is_free(s, (int32_t)id);

		wrong += is_free && used[id];
		n_free += is_free;
		if (!is_free && !used[id])
			continue;
		for (uint32_t i = kv_space_first(s, (int32_t)id);
		     i <= kv_space_last(s, (int32_t)id); i++)
			counts[2 * i + is_free]++;
	}
	for (uint32_t i = 0; i < s->n_extents; i++)
		wrong += counts[2 * i] != s->extents[i].n_used ||
			 counts[2 * i + 1] != s->extents[i].n_free;
	free(counts);
	return wrong + (n_free != s->n_free) + kv_space_check_lists(s);
}
