/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The books after the death of their owner: what alloc/saved.h keeps is made whole, and all that
 * follows from it is worked out. Linear in the blocks of the pool's extents; nothing is sorted:
 * scores are worked out at the first eviction.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/pool_parts.h"

#define NOWHERE UINT64_MAX /* serial of no parent: out of every lookup's reach */

/* Every block that lies in extents of the pool only: calls @each for it. */
static void for_each(struct kv_books *b, struct kv_books_found *found,
		     void (*each)(struct kv_books *b, int32_t id, struct kv_books_found *found))
{
	const struct kv_space *s = &b->space;
	int32_t next = 0;

	for (uint32_t i = 0; i < s->n_extents; i++) {
		int32_t first, end;

		if (!s->extents[i].owned)
			continue;
		kv_space_blocks(s, i, &first, &end);
		for (int32_t id = first > next ? first : next; id < end; id++) {
			uint32_t from = kv_space_first(s, id), last = kv_space_last(s, id);

			next = id + 1;
			while (from <= last && s->extents[from].owned)
				from++;
			if (from > last)
				each(b, id, found);
		}
	}
}

/* The word of a book, of which nothing else is known yet: no counter, no list. */
static void move(struct kv_books *b, int32_t id, uint8_t state)
{
	struct kv_book *book = &b->books[id];
	struct kv_book next = { .generation = book->generation, .state = state };

	if (state == KV_BLOCK_FREE)
		next.generation++;
	book->life = next.life;
}

/* Or will be, once it is resolved. */
static bool is_cached(const struct kv_book *book)
{
	return book->state == KV_BLOCK_CACHED || book->state == KV_BLOCK_EVICTING;
}

static bool has_parent(const struct kv_books *b, const struct kv_book *book)
{
	if (book->parent == -1)
		return true;
	return book->parent >= 0 && (uint32_t)book->parent < b->head->id_limit &&
	       is_cached(&b->books[book->parent]) &&
	       b->books[book->parent].serial == (book->parent_serial & ~KV_SERIAL_ROW);
}

static void resolve(struct kv_books *b, int32_t id, struct kv_books_found *found)
{
	struct kv_book *book = &b->books[id];

	book->in_lru = false;
	book->n_children = 0;
	book->first_child = -1;
	/* The next blocks' pages are on their way while this one is looked at. */
	__builtin_prefetch(book + 8, 1);
	switch (book->state) {
	case KV_BLOCK_LEASED:
	case KV_BLOCK_TWIN:
		if (book->owner < KV_MAX_SESSIONS && found->live[book->owner] &&
		    book->posted < found->granted[book->owner])
			return;
		found->n_unposted++;
		move(b, id, KV_BLOCK_FREE);
		return;
	case KV_BLOCK_QUARANTINED:
		if (book->owner >= KV_MAX_SESSIONS || !found->live[book->owner])
			move(b, id, KV_BLOCK_FREE);
		return;
	case KV_BLOCK_EVICTING:
		move(b, id, KV_BLOCK_CACHED);
		/* fall through */
	case KV_BLOCK_CACHED:
		b->n_cached++;
		found->n_orphans += !has_parent(b, book);
		return;
	case KV_BLOCK_NULL:
		if (id != b->head->null_block)
			move(b, id, KV_BLOCK_FREE);
		return;
	case KV_BLOCK_ABSENT:
		found->n_absent++;
		return;
	case KV_BLOCK_FREE:
		return;
	case KV_BLOCK_MOVING:
		if (found->moving)
			return;
		/* fall through */
	default:
		move(b, id, KV_BLOCK_FREE);
	}
}

static void drop_orphans(struct kv_books *b, int32_t id, struct kv_books_found *found)
{
	struct kv_book *book = &b->books[id];

	if (book->state != KV_BLOCK_CACHED || has_parent(b, book))
		return;
	found->n_dropped++;
	kv_books_doubt(b, id);
	kv_prefix_remove(&b->prefix, book->key, id);
	kv_books_remove_stem(b, id);
	if (!kv_books_is_held(b, id)) {
		move(b, id, KV_BLOCK_FREE);
		return;
	}
	/* It can't be found any more; the last holder's letting go makes it evictable. */
	book->parent = -1;
	book->parent_serial = NOWHERE;
	kv_prefix_insert(&b->prefix, book->key, id);
}

static void mirror(uint64_t *word, uint64_t value, bool *wrong)
{
	if (kv_load_relaxed(word) != value) {
		kv_store_relaxed(word, value);
		*wrong = true;
	}
}

/* Counts it, puts it where it belongs, and says in its descriptor what it is. */
static void account(struct kv_books *b, int32_t id, struct kv_books_found *found)
{
	struct kv_book *book = &b->books[id];
	struct kv_shm_block *d = &b->descriptors[id];
	uint64_t word = kv_block_word(book->generation, book->owner, book->state);
	bool wrong = false;

	if (book->state != KV_BLOCK_ABSENT) {
		kv_space_add(&b->space, id);
		if (book->state != KV_BLOCK_FREE)
			kv_space_use(&b->space, id);
		if (book->state != KV_BLOCK_NULL)
			b->n_total++;
	}
	switch (book->state) {
	case KV_BLOCK_FREE:
		b->n_free++;
		break;
	case KV_BLOCK_TWIN:
		mirror(&d->key_lo, (uint64_t)book->parent, &wrong);
		mirror(&d->serial, book->serial, &wrong);
		/* fall through */
	case KV_BLOCK_LEASED:
		b->n_leased++;
		b->n_leased_by[book->owner]++;
		break;
	case KV_BLOCK_QUARANTINED:
		b->n_quarantined++;
		break;
	case KV_BLOCK_MOVING:
		b->n_moving++;
		break;
	case KV_BLOCK_CACHED:
		b->n_cached++;
		if (book->last > b->now)
			b->now = book->last;
		kv_books_link_child(b, id);
		mirror(&d->key_lo, book->key.lo, &wrong);
		mirror(&d->key_hi, book->key.hi, &wrong);
		mirror(&d->parent_serial, book->parent_serial, &wrong);
		mirror(&d->serial, book->serial, &wrong);
		break;
	default:
		break;
	}
	/* Last: a client that sees the state sees what belongs to it. */
	if (kv_load_relaxed(&d->word) != word) {
		kv_store_seq(&d->word, word);
		wrong = true;
	}
	found->n_mirrored += wrong;
}

/* The ends of chains, in no order, and what is of epochs that are over: the first eviction works their scores out. */
static void enlist(struct kv_books *b, int32_t id, struct kv_books_found *found)
{
	struct kv_book *book = &b->books[id];

	(void)found;
	if (book->state != KV_BLOCK_CACHED)
		return;
	if (book->stale)
		b->stale_ids[b->n_stale++] = id;
	if (book->n_children)
		return;
	b->lru.items[b->lru.n++] = (struct kv_heap_item){ 0, id };
	book->in_lru = true;
}

/* One entry if it is cached, none if not. */
static void settle_entry(struct kv_books *b, int32_t id, struct kv_books_found *found)
{
	const struct kv_book *book = &b->books[id];
	uint32_t n = 0;

	while (!kv_prefix_remove(&b->prefix, book->key, id))
		n++;
	if (book->state == KV_BLOCK_CACHED && kv_prefix_insert(&b->prefix, book->key, id) < 0) {
		/* Both buckets are full: it isn't reachable, so neither is what follows it. */
		found->n_dropped++;
		move(b, id, KV_BLOCK_FREE);
		b->n_cached--;
		found->n_orphans++; /* what follows it, if anything does */
	}
	if (book->state != KV_BLOCK_CACHED)
		kv_books_remove_stem(b, id);
	found->n_index += n != (book->state == KV_BLOCK_CACHED);
}

static uint32_t count_entries(const struct kv_books *b)
{
	uint64_t n_words = (uint64_t)b->prefix.n_buckets * KV_BUCKET_WORDS;
	uint32_t n = 0;

	for (uint64_t i = 0; i < n_words; i++)
		n += b->prefix.words[i] != 0;
	return n;
}

static void reinsert(struct kv_books *b, int32_t id, struct kv_books_found *found)
{
	const struct kv_book *book = &b->books[id];

	if (book->state != KV_BLOCK_CACHED)
		return;
	found->n_index++;
	if (kv_prefix_insert(&b->prefix, book->key, id) < 0 && !kv_books_is_held(b, id)) {
		found->n_dropped++;
		kv_books_remove_stem(b, id);
		move(b, id, KV_BLOCK_FREE);
	}
}

/* The index has other entries than there are cached blocks: somebody else wrote to it. */
static void rebuild_index(struct kv_books *b, struct kv_books_found *found)
{
	memset(b->prefix.words, 0,
	       (uint64_t)b->prefix.n_buckets * KV_BUCKET_WORDS * sizeof(*b->prefix.words));
	for_each(b, found, reinsert);
}

int kv_books_rebuild(struct kv_books *b, struct kv_books_found *found)
{
	const struct kv_books_saved *saved = b->saved;
	uint32_t before;

	if (saved->magic != KV_SAVED_MAGIC)
		return -EPROTO;
	found->n_unposted = found->n_dropped = found->n_mirrored = found->n_index = 0;
	found->n_orphans = found->n_absent = 0;
	for_each(b, found, resolve);
	for (int i = 0; i < 2; i++) {
		int32_t id = saved->doubt[i] - 1;

		if (id >= 0 && (uint32_t)id < b->head->id_limit)
			settle_entry(b, id, found);
	}
	if (count_entries(b) != b->n_cached) {
		rebuild_index(b, found);
		found->n_orphans++;
	}
	/* Dropping one may orphan others. */
	while (found->n_orphans) {
		before = found->n_dropped;
		for_each(b, found, drop_orphans);
		if (found->n_dropped == before)
			break;
	}

	b->n_cached = 0;
	for_each(b, found, account);
	b->stale_ids = malloc((b->n_cached + 1) * sizeof(*b->stale_ids));
	if (!b->stale_ids || kv_heap_reserve(&b->lru, b->n_cached) < 0)
		return -ENOMEM;
	for_each(b, found, enlist);
	b->unscored = true;
	b->now++;
	b->census_last = b->census_at = b->now;
	b->n_published = saved->n_published;
	b->n_duplicates = saved->n_duplicates;
	b->n_evicted = saved->n_evicted;
	b->n_granted = saved->n_granted;
	return 0;
}
