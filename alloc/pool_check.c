/* SPDX-License-Identifier: Apache-2.0 */
/* Proves the books of a pool: states against counters, free bits, heap, index, chains and mirror. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/pool.h"

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

static bool is_indexed(const struct kv_books *b, int32_t id)
{
	uint32_t cursor = 0;
	int32_t c;

	while ((c = kv_prefix_find(&b->prefix, b->books[id].key, &cursor)) >= 0) {
		if (c == id)
			return true;
	}
	return false;
}

static void check_cached(const struct kv_books *b, int32_t id, uint32_t *children,
			 struct report *r)
{
	const struct kv_book *book = &b->books[id];

	if (!is_indexed(b, id))
		wrong(r, id, "block %d is cached but not in the index", id);
	if (!book->n_children && !book->in_lru)
		wrong(r, id, "block %d ends a cached chain but is not in the eviction order", id);
	if (book->parent < 0)
		return;
	if (b->books[book->parent].state != KV_BLOCK_CACHED ||
	    b->books[book->parent].serial != (book->parent_serial & ~KV_SERIAL_ROW))
		wrong(r, id, "block %d is cached but its parent %d is not", id, book->parent);
	children[book->parent]++;
}

static void check_block(const struct kv_books *b, int32_t id, const bool *live, uint32_t *n,
			uint32_t *children, struct report *r)
{
	const struct kv_book *book = &b->books[id];
	uint64_t word = kv_load_relaxed(&b->descriptors[id].word);

	n[book->state]++;
	if (book->state != KV_BLOCK_ABSENT &&
	    word != kv_block_word(book->generation, book->owner, book->state))
		wrong(r, id, "block %d: descriptor says %#llx, the books say %#llx", id,
		      (unsigned long long)word,
		      (unsigned long long)kv_block_word(book->generation, book->owner, book->state));
	if (book->state == KV_BLOCK_CACHED)
		check_cached(b, id, children, r);
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

/* @seen: [id_limit], zero; how often each block stands in the list that is looked at */
static void check_lists(const struct kv_books *b, uint32_t n_indexed, uint32_t *seen,
			struct report *r)
{
	uint32_t n_in_lru = 0;

	for (uint32_t i = 0; i < b->lru.n; i++) {
		int32_t id = b->lru.items[i].id;

		if (b->books[id].state != KV_BLOCK_CACHED || !b->books[id].in_lru)
			wrong(r, id, "block %d is in the eviction order but not cached", id);
		if (seen[id]++)
			wrong(r, id, "block %d is in the eviction order twice", id);
	}
	for (uint32_t i = 0; i < b->head->id_limit; i++)
		n_in_lru += b->books[i].in_lru;
	if (n_in_lru != b->lru.n)
		wrong(r, -1, "%u blocks are in the eviction order, the books say %u", b->lru.n, n_in_lru);
	if (n_indexed != b->n_cached)
		wrong(r, -1, "%u blocks are in the index, %u are cached", n_indexed, b->n_cached);
}

/* Children by their lists: each has its parent, and there are as many as the parent says. */
static void check_children(const struct kv_books *b, int32_t id, struct report *r)
{
	const struct kv_book *book = &b->books[id];
	uint32_t n = 0;

	for (int32_t c = book->n_children ? book->first_child : -1; c >= 0 && n <= book->n_children;
	     c = b->books[c].next_sibling, n++) {
		if (b->books[c].state != KV_BLOCK_CACHED || b->books[c].parent != id)
			wrong(r, c, "block %d is listed as a child of block %d, and isn't", c, id);
	}
	if (n != book->n_children)
		wrong(r, id, "block %d lists %u children of %u", id, n, book->n_children);
}

/* Not every cached block has an entry (stem.h); whoever has one is cached, and knows where it stands. */
static void check_stems(const struct kv_books *b, struct report *r)
{
	for (uint32_t i = 0; i < b->stems.n_buckets * KV_BUCKET_WORDS; i++) {
		int32_t id = (int32_t)(uint32_t)b->stems.words[i] - 1;

		if (!b->stems.words[i])
			continue;
		if ((uint32_t)id >= b->head->id_limit)
			wrong(r, -1, "place %u of the stems names block %d", i, id);
		else if (b->books[id].state != KV_BLOCK_CACHED || b->books[id].stem != i + 1)
			wrong(r, id, "block %d stands in the stems at place %u, its book says %s, place %u", id,
			      i, kv_block_state_name(b->books[id].state), b->books[id].stem - 1);
	}
}

static void check_space(const struct kv_books *b, struct report *r)
{
	bool *used = calloc(b->head->id_limit, sizeof(*used));
	uint32_t n = 0;

	for (uint32_t i = 0; used && i < b->head->id_limit; i++) {
		bool is_free = b->books[i].state == KV_BLOCK_FREE;

		used[i] = !is_free && b->books[i].state != KV_BLOCK_ABSENT;
		if (is_free != kv_space_is_free(&b->space, (int32_t)i))
			wrong(r, (int32_t)i, "block %u is %sfree, the bits say otherwise", i, is_free ? "" : "not ");
	}
	n = used ? kv_space_check(&b->space, used) : 1;
	if (n)
		wrong(r, -1, "%u counts of blocks in extents are wrong", n);
	free(used);
}

uint64_t kv_books_errors(const struct kv_books *b, const bool *live, kv_books_error_fn *each, void *arg)
{
	struct report r = { each, arg, 0 };
	uint32_t n[16] = { 0 }, n_indexed = 0;
	uint32_t *children = calloc(b->head->id_limit, sizeof(*children));

	if (!children) {
		wrong(&r, -1, "no memory for the check");
		return r.n;
	}
	for (uint32_t i = 0; i < b->head->id_limit; i++)
		check_block(b, (int32_t)i, live, n, children, &r);
	for (uint32_t i = 0; i < b->head->id_limit; i++) {
		if (b->books[i].state == KV_BLOCK_CACHED && b->books[i].n_children != children[i])
			wrong(&r, (int32_t)i, "block %u has %u cached children, the books say %u", i,
			      children[i], b->books[i].n_children);
		else if (b->books[i].state == KV_BLOCK_CACHED)
			check_children(b, (int32_t)i, &r);
	}
	check_space(b, &r);
	check_stems(b, &r);
	memset(children, 0, b->head->id_limit * sizeof(*children));
	for (uint64_t i = 0; i < (uint64_t)b->prefix.n_buckets * KV_BUCKET_WORDS; i++)
		n_indexed += b->prefix.words[i] != 0;
	check_lists(b, n_indexed, children, &r);
	free(children);

	if (n[KV_BLOCK_FREE] != b->n_free || n[KV_BLOCK_CACHED] != b->n_cached ||
	    n[KV_BLOCK_LEASED] + n[KV_BLOCK_TWIN] != b->n_leased ||
	    n[KV_BLOCK_QUARANTINED] != b->n_quarantined || n[KV_BLOCK_EVICTING] ||
	    n[KV_BLOCK_MOVING] != b->n_moving)
		wrong(&r, -1,
		      "states count free %u leased %u cached %u quarantined %u evicting %u; the books "
		      "say %u %u %u %u 0",
		      n[KV_BLOCK_FREE], n[KV_BLOCK_LEASED] + n[KV_BLOCK_TWIN], n[KV_BLOCK_CACHED],
		      n[KV_BLOCK_QUARANTINED], n[KV_BLOCK_EVICTING], b->n_free, b->n_leased,
		      b->n_cached, b->n_quarantined);
	if (b->n_free + b->n_leased + b->n_cached + b->n_quarantined + b->n_moving != b->n_total)
		wrong(&r, -1,
		      "free %u + leased %u + cached %u + quarantined %u + moving %u is not total %u",
		      b->n_free, b->n_leased, b->n_cached, b->n_quarantined, b->n_moving,
		      b->n_total);
	return r.n;
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

void kv_books_pages_count(const struct kv_books *b, uint32_t n[KV_BLOCK_STATES])
{
	memset(n, 0, KV_BLOCK_STATES * sizeof(*n));
	for (uint32_t i = 0; i < b->head->id_limit; i++) {
		uint32_t state = kv_block_state(kv_load_relaxed(&b->descriptors[i].word));

		if (state < KV_BLOCK_STATES)
			n[state]++;
	}
}
