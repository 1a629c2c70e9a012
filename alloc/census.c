/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Now and then the cached blocks and the ghosts are counted by class and age, some of them at a time:
 * each stands for as many as there are of its kind, and for the time until the next counting.
 */
#include "alloc/pool_parts.h"

#define LEAST_TIME   256  /* uses of the pool between two countings */
#define PART	     16	  /* of the blocks are counted each time, */
#define LEAST_COUNT  256  /* but not fewer than this, */
#define MOST_COUNT   4096 /* nor more: it is time in which the worker does nothing else */
/* What was counted fades to 1/e in so many uses of the pool, and as many for each of its blocks. */
#define MEMORY	     100000.0
#define MEMORY_BLOCK 2.0

static uint32_t part_of(uint64_t n)
{
	uint64_t part = n / PART;

	part = part < LEAST_COUNT ? LEAST_COUNT : part > MOST_COUNT ? MOST_COUNT : part;
	return (uint32_t)(part < n ? part : n);
}

static void count_cached(struct kv_books *b, uint64_t time)
{
	uint32_t n = part_of(b->n_cached), tries = 4 * n + 64;

	while (n && tries--) {
		const struct kv_book *book;

		b->census_id = kv_books_next_used(b, b->census_id);
		if (b->census_id < 0)
			continue;
		book = &b->books[b->census_id];
		if (book->state != KV_BLOCK_CACHED || book->stale)
			continue;
		kv_worth_lived(&b->saved->worth, kv_books_class(b, b->census_id),
			       b->now - book->last, (double)b->n_cached / part_of(b->n_cached), time);
		n--;
	}
}

static void count_ghosts(struct kv_books *b, uint64_t time)
{
	uint64_t n = b->ghosts.head - b->ghosts.tail;
	uint32_t part = part_of(n);

	for (uint32_t k = 0; k < part; k++) {
		const struct kv_ghost *ghost = kv_ghosts_at(&b->ghosts, b->census_ghost++);

		if (ghost)
			kv_worth_lived(&b->saved->worth, ghost->class, b->now - ghost->last,
				       (double)n / part, time);
	}
}

void kv_books_census(struct kv_books *b)
{
	uint64_t time = b->now - b->census_last;
	uint64_t pause = b->n_total / PART;
	double fade;

	if (b->now < b->census_at)
		return;
	if (b->census_ghost < b->ghosts.tail || b->census_ghost >= b->ghosts.head)
		b->census_ghost = b->ghosts.tail;
	count_cached(b, time);
	count_ghosts(b, time);
	fade = (double)time / (MEMORY + MEMORY_BLOCK * b->n_total);
	kv_worth_learn(&b->saved->worth, 1 / (1 + fade));
	b->census_last = b->now;
	b->census_at = b->now + (pause > LEAST_TIME ? pause : LEAST_TIME);
}
