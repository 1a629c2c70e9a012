/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Proves the books of a pool: states against counters, free bits, heap, index, chains and mirror.
 *
 * It is done in slices, between which blocks may change: all but the counts of the whole is said of one
 * block, one entry or one extent and what they touch, so it holds at every moment.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/pool.h"

#define PART	  8192u /* of a slice, a block is 8 */
#define LONG_LIST 1024u

struct report {
	kv_books_error_fn *each; /* or NULL */
	void *arg;
	uint64_t n;
};

/* @id: the block it is about, or -1 */
static void wrong(struct report *r, int32_t id, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

static void wrong(struct report *r, int32_t id, const char *format, ...)
{
	char text[192];
	va_list args;

	r->n++;
	if (!r->each)
		return;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	r->each(r->arg, id, text);
}

/* How often it stands in its two buckets, which may be the same one. */
static uint32_t n_indexed(const struct kv_books *b, int32_t id)
{
	struct kv_key key = b->books[id].key;
	uint64_t word = (uint64_t)(uint32_t)key.hi << 32 | (uint32_t)(id + 1);
	uint32_t n = 0, before = UINT32_MAX;

	for (int i = 0; i < 2; i++) {
		uint32_t bucket = kv_prefix_bucket(&b->prefix, key, i);

		for (uint32_t k = 0; bucket != before && k < KV_BUCKET_WORDS; k++)
			n += b->prefix.words[(uint64_t)bucket * KV_BUCKET_WORDS + k] == word;
		before = bucket;
	}
	return n;
}

/* Among its parent's children: who stands beside it says the same. */
static void check_place(const struct kv_books *b, int32_t id, struct report *r)
{
	const struct kv_book *book = &b->books[id], *parent = &b->books[book->parent];
	int32_t here = book->prev_sibling < 0 ? parent->n_children ? parent->first_child : -1 :
						b->books[book->prev_sibling].next_sibling;

	if (parent->state != KV_BLOCK_CACHED || parent->serial != (book->parent_serial & ~KV_SERIAL_ROW))
		wrong(r, id, "block %d is cached but its parent %d is not", id, book->parent);
	if (here != id || (book->next_sibling >= 0 && b->books[book->next_sibling].prev_sibling != id))
		wrong(r, id, "block %d is a child of block %d, whose list has block %d in its place", id,
		      book->parent, here);
}

/*
 * Children by their list: each has its parent, and there are as many as the parent says. Of a list too long
 * for one slice only the beginning is looked at: each of its blocks proves its own place.
 */
static void check_children(const struct kv_books *b, int32_t id, struct report *r)
{
	const struct kv_book *book = &b->books[id];
	uint32_t n = 0;

	for (int32_t c = book->n_children ? book->first_child : -1; c >= 0 && n <= book->n_children;
	     c = b->books[c].next_sibling, n++) {
		if (b->books[c].state != KV_BLOCK_CACHED || b->books[c].parent != id)
			wrong(r, c, "block %d is listed as a child of block %d, and isn't", c, id);
		if (n == LONG_LIST)
			return;
	}
	if (n != book->n_children)
		wrong(r, id, "block %d lists %u children of %u", id, n, book->n_children);
}

static void check_cached(const struct kv_books *b, int32_t id, struct report *r)
{
	const struct kv_book *book = &b->books[id];
	uint32_t n = n_indexed(b, id);

	if (!n)
		wrong(r, id, "block %d is cached but not in the index", id);
	else if (n > 1)
		wrong(r, id, "block %d is in the index %u times", id, n);
	if (!book->n_children && !book->in_lru)
		wrong(r, id, "block %d ends a cached chain but is not in the eviction order", id);
	if (book->parent >= 0)
		check_place(b, id, r);
	check_children(b, id, r);
}

static void check_block(const struct kv_books *b, int32_t id, const bool *live, struct report *r)
{
	const struct kv_book *book = &b->books[id];
	uint64_t word = kv_load_relaxed(&b->descriptors[id].word);

	if (book->state != KV_BLOCK_ABSENT &&
	    word != kv_block_word(book->generation, book->owner, book->state))
		wrong(r, id, "block %d: descriptor says %#llx, the books say %#llx", id,
		      (unsigned long long)word,
		      (unsigned long long)kv_block_word(book->generation, book->owner, book->state));
	if ((book->state == KV_BLOCK_FREE) != kv_space_is_free(&b->space, id))
		wrong(r, id, "block %d is %sfree, the bits say otherwise", id,
		      book->state == KV_BLOCK_FREE ? "" : "not ");
	if (book->state == KV_BLOCK_CACHED)
		check_cached(b, id, r);
	if ((book->state == KV_BLOCK_LEASED || book->state == KV_BLOCK_TWIN) && live &&
	    !live[book->owner])
		wrong(r, id, "block %d is leased to slot %u, where no session is", id, book->owner);
	for (uint32_t w = 0; live && w < KV_HOLDER_WORDS; w++) {
		uint64_t held = kv_load_relaxed(&b->descriptors[id].holders[w]);

		/* A pin that is being undone may show a bit for a moment, but only of a session. */
		for (; held; held &= held - 1) {
			uint32_t slot = w * 64 + (uint32_t)__builtin_ctzll(held);

			if (!live[slot])
				wrong(r, id, "block %d is held by slot %u, where no session is", id, slot);
		}
	}
}

/* Whoever has an entry is cached, and its key belongs there. */
static void check_index(const struct kv_books *b, uint64_t i, struct report *r)
{
	uint32_t bucket = (uint32_t)(i / KV_BUCKET_WORDS);
	int32_t id = (int32_t)(uint32_t)b->prefix.words[i] - 1;
	struct kv_key key;

	if (!b->prefix.words[i])
		return;
	if ((uint32_t)id >= b->head->id_limit) {
		wrong(r, -1, "place %llu of the index names block %d", (unsigned long long)i, id);
		return;
	}
	key = b->books[id].key;
	if (b->books[id].state != KV_BLOCK_CACHED || b->prefix.words[i] >> 32 != (uint32_t)key.hi ||
	    (bucket != kv_prefix_bucket(&b->prefix, key, 0) && bucket != kv_prefix_bucket(&b->prefix, key, 1)))
		wrong(r, id, "place %llu of the index names block %d, which is %s%s", (unsigned long long)i, id,
		      kv_block_state_name(b->books[id].state),
		      b->books[id].state == KV_BLOCK_CACHED ? ", by another key" : "");
}

/* Not every cached block has an entry (stem.h); whoever has one is cached, and knows where it stands. */
static void check_stem(const struct kv_books *b, uint64_t i, struct report *r)
{
	int32_t id = (int32_t)(uint32_t)b->stems.words[i] - 1;

	if (!b->stems.words[i])
		return;
	if ((uint32_t)id >= b->head->id_limit)
		wrong(r, -1, "place %llu of the stems names block %d", (unsigned long long)i, id);
	else if (b->books[id].state != KV_BLOCK_CACHED || b->books[id].stem != i + 1)
		wrong(r, id, "block %d stands in the stems at place %llu, its book says %s, place %u", id,
		      (unsigned long long)i, kv_block_state_name(b->books[id].state), b->books[id].stem - 1);
}

/* Return: how many blocks touch extent @i. */
static uint32_t check_extent(const struct kv_books *b, uint32_t i, struct report *r)
{
	const struct kv_space_extent *e = &b->space.extents[i];
	uint32_t n_free = 0, n_used = 0;
	int32_t first, end;

	kv_space_blocks(&b->space, i, &first, &end);
	for (int32_t id = first; id < end; id++) {
		n_free += b->books[id].state == KV_BLOCK_FREE;
		n_used += b->books[id].state != KV_BLOCK_FREE && b->books[id].state != KV_BLOCK_ABSENT;
	}
	if (n_free != e->n_free || n_used != e->n_used)
		wrong(r, -1, "extent %u has %u blocks free and %u in use, it says %u and %u", i, n_free, n_used,
		      e->n_free, e->n_used);
	return (uint32_t)(end - first);
}

static void check_order(const struct kv_books *b, uint32_t n_in_lru, struct report *r)
{
	uint64_t *seen = calloc(b->head->id_limit / 64 + 1, sizeof(*seen));

	for (uint32_t i = 0; seen && i < b->lru.n; i++) {
		int32_t id = b->lru.items[i].id;
		uint64_t bit = (uint64_t)1 << (uint32_t)id % 64;

		if (b->books[id].state != KV_BLOCK_CACHED || !b->books[id].in_lru)
			wrong(r, id, "block %d is in the eviction order but not cached", id);
		if (seen[(uint32_t)id / 64] & bit)
			wrong(r, id, "block %d is in the eviction order twice", id);
		seen[(uint32_t)id / 64] |= bit;
	}
	if (!seen)
		wrong(r, -1, "no memory for the check");
	if (n_in_lru != b->lru.n)
		wrong(r, -1, "%u blocks are in the eviction order, the books say %u", b->lru.n, n_in_lru);
	free(seen);
}

/* What can only be said of all blocks at once: a short look at each. */
static void check_counts(const struct kv_books *b, struct report *r)
{
	uint32_t n[16] = {0}, n_in_lru = 0, n_lists = kv_space_check_lists(&b->space);

	for (uint32_t i = 0; i < b->head->id_limit; i++) {
		n[b->books[i].state & 15]++;
		n_in_lru += b->books[i].in_lru;
	}
	if (n_lists)
		wrong(r, -1, "%u extents are in a wrong list", n_lists);
	check_order(b, n_in_lru, r);
	if (n[KV_BLOCK_FREE] != b->n_free || n[KV_BLOCK_CACHED] != b->n_cached ||
	    n[KV_BLOCK_LEASED] + n[KV_BLOCK_TWIN] != b->n_leased ||
	    n[KV_BLOCK_QUARANTINED] != b->n_quarantined || n[KV_BLOCK_EVICTING] ||
	    n[KV_BLOCK_MOVING] != b->n_moving || n[KV_BLOCK_FREE] != b->space.n_free)
		wrong(r, -1,
		      "states count free %u leased %u cached %u quarantined %u evicting %u; the books "
		      "say %u %u %u %u 0, the extents %u free",
		      n[KV_BLOCK_FREE], n[KV_BLOCK_LEASED] + n[KV_BLOCK_TWIN], n[KV_BLOCK_CACHED],
		      n[KV_BLOCK_QUARANTINED], n[KV_BLOCK_EVICTING], b->n_free, b->n_leased,
		      b->n_cached, b->n_quarantined, b->space.n_free);
	if (b->n_free + b->n_leased + b->n_cached + b->n_quarantined + b->n_moving != b->n_total)
		wrong(r, -1,
		      "free %u + leased %u + cached %u + quarantined %u + moving %u is not total %u",
		      b->n_free, b->n_leased, b->n_cached, b->n_quarantined, b->n_moving,
		      b->n_total);
}

/* Where the pages show another state than the books. */
static void compare_state(const struct kv_books *b, uint32_t id, struct kv_books_proof *proof)
{
	uint32_t shown = kv_block_state(kv_load_relaxed(&b->descriptors[id].word));

	if (shown < KV_BLOCK_STATES)
		proof->shown[shown]++;
	proof->shown[b->books[id].state]--;
}

enum stage { BLOCKS, INDEX, STEMS, EXTENTS, COUNTS, DONE };

static uint64_t end_of(const struct kv_books *b, uint32_t stage)
{
	switch (stage) {
	case BLOCKS:
		return b->head->id_limit;
	case INDEX:
		return (uint64_t)b->prefix.n_buckets * KV_BUCKET_WORDS;
	case STEMS:
		return (uint64_t)b->stems.n_buckets * KV_BUCKET_WORDS;
	case EXTENTS:
		return b->space.n_extents;
	default:
		return 1;
	}
}

/* Return: what it cost, in PART a slice. */
static uint32_t check_one(const struct kv_books *b, struct kv_books_proof *proof, const bool *live,
			  struct report *r)
{
	switch (proof->stage) {
	case BLOCKS:
		check_block(b, (int32_t)proof->at, live, r);
		compare_state(b, (uint32_t)proof->at, proof);
		return 8;
	case INDEX:
		check_index(b, proof->at, r);
		return b->prefix.words[proof->at] ? 4 : 1;
	case STEMS:
		check_stem(b, proof->at, r);
		return b->stems.words[proof->at] ? 4 : 1;
	case EXTENTS:
		return check_extent(b, (uint32_t)proof->at, r);
	default:
		check_counts(b, r);
		return PART;
	}
}

bool kv_books_prove(const struct kv_books *b, struct kv_books_proof *proof, const bool *live,
		    kv_books_error_fn *each, void *arg)
{
	struct report r = {each, arg, 0};

	for (uint32_t left = proof->part ? proof->part : PART; left && proof->stage != DONE;) {
		uint32_t cost;

		if (proof->at == end_of(b, proof->stage)) {
			proof->stage++;
			proof->at = 0;
			continue;
		}
		cost = check_one(b, proof, live, &r);
		proof->at++;
		left -= cost < left ? cost : left;
	}
	proof->n_wrong += r.n;
	return proof->stage != DONE;
}

uint64_t kv_books_errors(const struct kv_books *b, const bool *live, kv_books_error_fn *each, void *arg)
{
	struct kv_books_proof proof = {0};

	while (kv_books_prove(b, &proof, live, each, arg))
		;
	return proof.n_wrong;
}

struct first {
	char *text;
	size_t size;
};

static void take_first(void *arg, int32_t id, const char *text)
{
	struct first *first = arg;

	(void)id;
	if (first->size)
		snprintf(first->text, first->size, "%s", text);
	first->size = 0;
}

uint64_t kv_books_check(const struct kv_books *b, const bool *live, char *text, size_t size)
{
	struct first first = { text, size };

	return kv_books_errors(b, live, take_first, &first);
}
