/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Cached blocks change their place, so that extents run empty. Which and where to is planned here; who
 * has the bytes copies them; then each block changes over by itself, if nobody holds it and it is still
 * the one that was copied. The order of stores is that of include/internal/shm.h and alloc/saved.h.
 */
#include <stdlib.h>
#include <string.h>

#include "alloc/pool_parts.h"
#include "include/internal/killpoint.h"

/*
 * What a move touches lies anywhere: so many moves ahead the memory of blocks is asked for, and half as
 * many ahead what their books name.
 */
#define AHEAD 8u

static void prefetch(const struct kv_books *b, int32_t id)
{
	const char *book = (const char *)&b->books[id];

	__builtin_prefetch(book, 1);
	__builtin_prefetch(book + sizeof(struct kv_book) - 1, 1);
	__builtin_prefetch(&b->descriptors[id], 1);
}

/* Blocks that are looked at soon: the next extent of a list, as far as it is one of few. */
static void prefetch_extent(const struct kv_books *b, int32_t i)
{
	int32_t first, end;

	if (i < 0)
		return;
	kv_space_blocks(&b->space, (uint32_t)i, &first, &end);
	for (int32_t id = first; id < end && id < first + (int32_t)AHEAD; id++) {
		__builtin_prefetch(&b->books[id].life);
		__builtin_prefetch(&b->descriptors[id]);
	}
}

static bool may_move(const struct kv_books *b, int32_t id)
{
	return b->books[id].state == KV_BLOCK_CACHED && !b->books[id].stale &&
	       !kv_books_is_held(b, id);
}

static bool is_in_use(const struct kv_books *b, int32_t id)
{
	return b->books[id].state != KV_BLOCK_FREE && b->books[id].state != KV_BLOCK_ABSENT;
}

/* Blocks that touch extent @i and would have to move; -1: one of them can't, or more than @most. */
static int64_t movable(const struct kv_books *b, uint32_t i, uint32_t most)
{
	int32_t first, end;
	uint32_t n = 0;

	kv_space_blocks(&b->space, i, &first, &end);
	for (int32_t id = first; id < end; id++) {
		/* Picked for another, and its book doesn't say so yet. */
		if (b->books[id].state == KV_BLOCK_FREE && !kv_space_is_free(&b->space, id))
			return -1;
		if (!is_in_use(b, id))
			continue;
		if (!may_move(b, id) || ++n > most)
			return -1;
	}
	return n;
}

/* A free block, which is picked, is taken for the content of @from: its book says which that was. */
static void begin(struct kv_books *b, int32_t from, int32_t to)
{
	b->books[to].serial = b->books[from].serial;
	kv_books_set_state(b, to, KV_BLOCK_MOVING, 0);
	b->n_free--;
	b->n_moving++;
	KV_KILLPOINT(worker_move_begun);
}

/* Back to where it was: nothing had become visible. */
static void undo(struct kv_books *b, int32_t to)
{
	b->n_moving--;
	kv_books_push_free(b, to);
}

/* All blocks of an extent, or none. Return: how many moves were added; -1: there is no room for them. */
static int64_t plan_extent(struct kv_books *b, uint32_t i, int class, struct kv_books_move *moves,
			    uint32_t most)
{
	int64_t need = movable(b, i, most);
	int32_t first, end;
	uint32_t n = 0;

	if (need <= 0)
		return 0;
	b->space.extents[i].leaving = true;
	kv_space_blocks(&b->space, i, &first, &end);
	for (int32_t id = first; id < end; id++) {
		int32_t to;

		if (!is_in_use(b, id))
			continue;
		to = kv_space_pick_above(&b->space, class);
		if (to < 0)
			break;
		kv_space_use(&b->space, to);
		moves[n++] = (struct kv_books_move){ id, to };
	}
	if (n == need)
		return n;
	while (n)
		kv_space_release(&b->space, moves[--n].to);
	b->space.extents[i].leaving = false;
	return -1;
}

/* From where to where, as far as it is known without the books of the blocks that are moved to. */
static uint32_t choose(struct kv_books *b, uint32_t n_extents, struct kv_books_move *moves,
		       uint32_t most, uint32_t *ret_extents)
{
	uint32_t n = 0;

	/* From the emptiest on; into extents that are at least as full. */
	for (int c = KV_SPACE_PART; c < KV_SPACE_CLASSES && *ret_extents < n_extents; c++) {
		int32_t next;

		for (int32_t i = b->space.lists[c]; i >= 0 && *ret_extents < n_extents; i = next) {
			int64_t got = 0;

			next = b->space.extents[i].next;
			prefetch_extent(b, next);
			if (!b->space.extents[i].leaving)
				got = plan_extent(b, (uint32_t)i, c - 1, moves + n, most - n);
			/* Fuller ones have more that must move, and less room to move to. */
			if (got < 0)
				return n;
			n += (uint32_t)got;
			*ret_extents += got > 0;
			/* What was filled may have left this list: the next one is looked up anew. */
			if (next >= 0 && b->space.extents[next].class != c)
				next = b->space.lists[c];
			if (got && next == i)
				next = b->space.extents[i].next;
		}
	}
	return n;
}

uint32_t kv_books_move_plan(struct kv_books *b, uint32_t n_extents, struct kv_books_move *moves,
			    uint32_t most, uint32_t *ret_extents)
{
	uint32_t n;

	*ret_extents = 0;
	if (!b->renamed)
		b->renamed = calloc(b->head->id_limit / 64 + 1, sizeof(*b->renamed));
	if (!b->renamed)
		return 0;
	n = choose(b, n_extents, moves, most, ret_extents);
	for (uint32_t i = 0; i < n; i++) {
		if (i + AHEAD < n)
			prefetch(b, moves[i + AHEAD].to);
		begin(b, moves[i].from, moves[i].to);
	}
	return n;
}

/* What stands in the shared pages about a block's content. */
static void copy_descriptor(struct kv_books *b, int32_t from, int32_t to)
{
	const struct kv_book *book = &b->books[from];
	struct kv_shm_block *d = &b->descriptors[to];
	const struct kv_shm_block *old = &b->descriptors[from];

	memcpy(kv_shm_tokens(b->shared, b->head, to), kv_shm_tokens(b->shared, b->head, from),
	       b->head->block_tokens * sizeof(int32_t));
	if (book->parent_serial & KV_SERIAL_ROW)
		memcpy(kv_shm_row(b->shared, b->head, to), kv_shm_row(b->shared, b->head, from),
		       sizeof(struct kv_shm_row));
	kv_store_relaxed(&d->key_lo, book->key.lo);
	kv_store_relaxed(&d->key_hi, book->key.hi);
	kv_store_relaxed(&d->parent_serial, book->parent_serial);
	kv_store_relaxed(&d->serial, book->serial);
	kv_store_relaxed(&d->stamp, kv_load_relaxed(&old->stamp));
}

/* The chain goes through @to: parent, siblings, children. */
static void relink(struct kv_books *b, int32_t to)
{
	struct kv_book *book = &b->books[to];

	if (book->parent >= 0) {
		if (book->prev_sibling >= 0)
			b->books[book->prev_sibling].next_sibling = to;
		else
			b->books[book->parent].first_child = to;
		if (book->next_sibling >= 0)
			b->books[book->next_sibling].prev_sibling = to;
	}
	for (int32_t c = book->n_children ? book->first_child : -1; c >= 0;
	     c = b->books[c].next_sibling)
		b->books[c].parent = to;
}

static bool change_over(struct kv_books *b, int32_t from, int32_t to)
{
	struct kv_book *old = &b->books[from], *book = &b->books[to], next;
	uint64_t life = book->life;
	uint32_t since = old->since;

	if (old->serial != book->serial || !may_move(b, from))
		return false;
	kv_books_set_state(b, from, KV_BLOCK_EVICTING, 0);
	KV_KILLPOINT(worker_move_evicting);
	if (kv_books_is_held(b, from)) {
		kv_books_set_state(b, from, KV_BLOCK_CACHED, 0);
		return false;
	}
	copy_descriptor(b, from, to);
	next = *old;
	next.life = life;
	*book = next;
	kv_books_doubt(b, from);
	kv_books_doubt(b, to);
	KV_KILLPOINT(worker_move_described);
	kv_books_set_state(b, to, KV_BLOCK_CACHED, 0);
	book->since = since;
	relink(b, to);
	kv_prefix_rename(&b->prefix, old->key, from, to);
	kv_stem_rename(&b->stems, old->stem, from, to);
	old->stem = 0;
	KV_KILLPOINT(worker_block_moved);
	b->n_moving--;
	old->in_lru = false;
	kv_books_push_free(b, from);
	return true;
}

/*
 * The eviction order names blocks by where they were: one look at it for all that have moved. Who has is
 * a bit, and stands where it is now in the book of where it was.
 */
static void rename_in_order(struct kv_books *b)
{
	for (uint32_t i = 0; i < b->lru.n; i++) {
		uint32_t id = (uint32_t)b->lru.items[i].id;
		uint64_t bit = (uint64_t)1 << id % 64;

		if (b->renamed[id / 64] & bit) {
			b->renamed[id / 64] &= ~bit;
			b->lru.items[i].id = b->books[id].parent;
		}
	}
}

/* First what a move touches of both blocks, then what their books name. */
static void prefetch_move(const struct kv_books *b, const struct kv_books_move *moves, uint32_t n,
			  uint32_t i)
{
	if (i + AHEAD < n) {
		const struct kv_books_move *m = &moves[i + AHEAD];

		prefetch(b, m->from);
		prefetch(b, m->to);
		__builtin_prefetch(kv_shm_tokens(b->shared, b->head, m->from));
		__builtin_prefetch(kv_shm_tokens(b->shared, b->head, m->to), 1);
	}
	if (i + AHEAD / 2 < n) {
		const struct kv_book *book = &b->books[moves[i + AHEAD / 2].from];

		kv_prefix_prefetch(&b->prefix, book->key);
		kv_stem_prefetch(&b->stems, book->stem);
		if (book->parent >= 0)
			__builtin_prefetch(&b->books[book->parent], 1);
	}
}

uint32_t kv_books_move_end(struct kv_books *b, const struct kv_books_move *moves, uint32_t n,
			   bool copied)
{
	uint32_t done = 0;
	bool renamed = false;

	for (uint32_t i = 0; i < n; i++) {
		int32_t from = moves[i].from, to = moves[i].to;

		prefetch_move(b, moves, n, i);
		for (uint32_t e = kv_space_first(&b->space, from);
		     e <= kv_space_last(&b->space, from); e++)
			b->space.extents[e].leaving = false;
		if (!copied || !change_over(b, from, to)) {
			undo(b, to);
			continue;
		}
		done++;
		if (b->books[to].in_lru) {
			b->books[from].parent = to;
			b->renamed[(uint32_t)from / 64] |= (uint64_t)1 << (uint32_t)from % 64;
			renamed = true;
		}
	}
	if (renamed)
		rename_in_order(b);
	return done;
}

void kv_books_move_forget(struct kv_books *b)
{
	for (int32_t id = 0; b->n_moving && (uint32_t)id < b->head->id_limit; id++) {
		if (b->books[id].state == KV_BLOCK_MOVING)
			undo(b, id);
	}
}
