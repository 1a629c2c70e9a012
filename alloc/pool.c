/* SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/pool.h"
#include "alloc/pool_parts.h"
#include "include/internal/killpoint.h"

#define COUNTED_A_TIME 4096u /* some 0.1 ms */

uint64_t kv_books_saved_bytes(uint32_t id_limit)
{
	return KV_SAVED_BYTES + (uint64_t)id_limit * sizeof(struct kv_book);
}

int kv_books_init_in(struct kv_books *b, const struct kv_shm_pool *head, uint64_t *index,
		     void *shared, void *memory)
{
	memset(b, 0, sizeof(*b));
	b->head = head;
	b->shared = shared;
	b->descriptors = kv_shm_descriptors(shared, head);
	b->prefix = (struct kv_prefix){ index, head->n_buckets, head->id_limit };
	b->stems = (struct kv_stems){ index + (uint64_t)head->n_buckets * KV_BUCKET_WORDS,
				      (uint32_t)head->n_stem_buckets, head->id_limit };
	b->policy = kv_policies[1];
	b->epoch = head->epoch;
	b->saved = memory;
	b->books = (struct kv_book *)((char *)memory + KV_SAVED_BYTES);
	if (!b->saved->magic) {
		b->saved->serial_limit = 1;
		b->saved->magic = KV_SAVED_MAGIC;
	}
	b->next_serial = b->saved->serial_limit;
	return kv_space_init(&b->space, head->id_limit, head->block_bytes, 0);
}

int kv_books_init(struct kv_books *b, const struct kv_shm_pool *head, uint64_t *index, void *shared)
{
	void *memory = calloc(1, kv_books_saved_bytes(head->id_limit));
	int r;

	if (!memory) {
		memset(b, 0, sizeof(*b));
		return -ENOMEM;
	}
	r = kv_books_init_in(b, head, index, shared, memory);
	b->own_memory = memory;
	return r;
}

int kv_books_set_extents(struct kv_books *b, uint64_t extent_bytes)
{
	assert(!b->n_total);
	kv_space_deinit(&b->space);
	return kv_space_init(&b->space, b->head->id_limit, b->head->block_bytes, extent_bytes);
}

void kv_books_deinit(struct kv_books *b)
{
	free(b->own_memory);
	kv_space_deinit(&b->space);
	free(b->lru.items);
	free(b->victims);
	free(b->stale_ids);
	free(b->renamed);
	kv_ghosts_deinit(&b->ghosts);
	memset(b, 0, sizeof(*b));
}

static void set_life(struct kv_books *b, int32_t id, uint32_t generation, uint8_t state,
		     uint16_t owner)
{
	const struct kv_book next = { .generation = generation, .owner = owner, .state = state };

	/* A block that was to be evicted and is held has been cached all the time. */
	if (b->clock && state != KV_BLOCK_EVICTING &&
	    (state != KV_BLOCK_CACHED || b->books[id].state != KV_BLOCK_EVICTING))
		b->books[id].since = *b->clock;
	/* What the state needs stands in the book already: this is the moment (alloc/saved.h). */
	kv_store_release(&b->books[id].life, next.life);
	KV_KILLPOINT(worker_book_written);
	/*
	 * Pairs with the loads in a client's pin: what was written to the descriptor comes first. Only
	 * EVICTING is followed by a look at the holders (shm.h) and must not be passed by it.
	 */
	if (state == KV_BLOCK_EVICTING)
		kv_store_seq(&b->descriptors[id].word, kv_block_word(generation, owner, state));
	else
		kv_store_release(&b->descriptors[id].word, kv_block_word(generation, owner, state));
	KV_KILLPOINT(worker_book_mirrored);
}

/* Moves the books and their mirror to a state; counters are the caller's. */
void kv_books_set_state(struct kv_books *b, int32_t id, uint8_t state, uint16_t owner)
{
	set_life(b, id, b->books[id].generation, state, owner);
}

void kv_books_push_free(struct kv_books *b, int32_t id)
{
	b->books[id].stale = false;
	set_life(b, id, b->books[id].generation + 1, KV_BLOCK_FREE, 0);
	kv_space_release(&b->space, id);
	b->n_free++;
}

void kv_books_doubt(struct kv_books *b, int32_t id)
{
	struct kv_books_saved *saved = b->saved;

	if (saved->doubt[~saved->n_doubt & 1] == id + 1)
		return;
	/* Released before the entry changes, which is a release as well. */
	kv_store_release(&saved->doubt[saved->n_doubt & 1], id + 1);
	kv_store_release(&saved->n_doubt, saved->n_doubt ^ 1);
	KV_KILLPOINT(worker_index_in_doubt);
}

void kv_books_save_counts(struct kv_books *b)
{
	b->saved->n_published = b->n_published;
	b->saved->n_duplicates = b->n_duplicates;
	b->saved->n_evicted = b->n_evicted;
	b->saved->n_granted = b->n_granted;
}

int kv_books_add(struct kv_books *b, int32_t id)
{
	assert(kv_books_is_absent(b, id));
	kv_space_add(&b->space, id);
	if (id == b->head->null_block) {
		kv_space_use(&b->space, id);
		kv_books_set_state(b, id, KV_BLOCK_NULL, 0);
		return 0;
	}
	set_life(b, id, b->books[id].generation + 1, KV_BLOCK_FREE, 0);
	b->n_total++;
	b->n_free++;
	return 0;
}

bool kv_books_is_absent(const struct kv_books *b, int32_t id)
{
	return b->books[id].state == KV_BLOCK_ABSENT;
}

bool kv_books_is_free(const struct kv_books *b, int32_t id)
{
	return b->books[id].state == KV_BLOCK_FREE;
}

void kv_books_remove(struct kv_books *b, int32_t first, int32_t n)
{
	for (int32_t id = first; id < first + n && (uint32_t)id < b->head->id_limit; id++) {
		if (!kv_books_is_free(b, id))
			continue;
		kv_books_set_state(b, id, KV_BLOCK_ABSENT, 0);
		kv_space_remove(&b->space, id);
		b->n_total--;
		b->n_free--;
	}
}

void kv_books_prefetch(const struct kv_books *b, uint32_t id)
{
	if (id >= b->head->id_limit)
		return;
	__builtin_prefetch(&b->books[id].life, 1);
	__builtin_prefetch(&b->descriptors[id], 1);
}

void kv_books_give_extent(struct kv_books *b, uint32_t i)
{
	int32_t first, end, later = (int32_t)i;

	/* Extents go one after the other: a later one's memory is on its way while this one goes. */
	for (int k = 0; k < 4 && later >= 0; k++)
		later = b->space.extents[later].next;
	if (later >= 0)
		kv_books_prefetch(b, b->space.extents[later].first);
	kv_space_blocks(&b->space, i, &first, &end);
	kv_books_remove(b, first, end - first);
	kv_space_own(&b->space, i, false);
}

int32_t kv_books_grant_one(struct kv_books *b, uint32_t slot, uint64_t posted)
{
	int32_t id = kv_space_pick(&b->space);

	assert(id >= 0);
	kv_space_use(&b->space, id);
	b->books[id].posted = posted;
	kv_books_set_state(b, id, KV_BLOCK_LEASED, (uint16_t)slot);
	b->n_free--;
	b->n_leased++;
	b->n_leased_by[slot]++;
	b->n_granted++;
	return id;
}

void kv_books_grant(struct kv_books *b, uint32_t slot, uint32_t n, int32_t *ret_ids)
{
	assert(n <= b->n_free);
	for (uint32_t i = 0; i < n; i++)
		ret_ids[i] = kv_books_grant_one(b, slot, 0);
}

static uint64_t *holder_word(const struct kv_books *b, int32_t id, uint32_t slot)
{
	return &b->descriptors[id].holders[slot / 64];
}

static bool is_leased_by(const struct kv_book *book, uint32_t slot)
{
	return (book->state == KV_BLOCK_LEASED || book->state == KV_BLOCK_TWIN) &&
	       book->owner == slot;
}

int kv_books_give(struct kv_books *b, uint32_t slot, int32_t id)
{
	if (id < 0 || (uint32_t)id >= b->head->id_limit)
		return -EINVAL;
	if (is_leased_by(&b->books[id], slot)) {
		b->n_leased--;
		b->n_leased_by[slot]--;
		kv_books_push_free(b, id);
		return 0;
	}
	if (b->books[id].state == KV_BLOCK_CACHED) {
		uint64_t bit = (uint64_t)1 << slot % 64;

		return kv_and_release(holder_word(b, id, slot), ~bit) & bit ? 0 : -EINVAL;
	}
	return -EINVAL;
}

/* Were both computed from the same? They follow the same, and both have a row or none. */
static bool is_same(const struct kv_books *b, int32_t id, int32_t other, bool rows)
{
	size_t bytes = b->head->block_tokens * sizeof(int32_t);

	return !memcmp(kv_shm_tokens(b->shared, b->head, id),
		       kv_shm_tokens(b->shared, b->head, other), bytes) &&
	       (!rows || !memcmp(kv_shm_row(b->shared, b->head, id),
				 kv_shm_row(b->shared, b->head, other), sizeof(struct kv_shm_row)));
}

/* The block of @key after a parent of @parent_serial with the content of block @id; -1: none. */
static int32_t find_twin(const struct kv_books *b, struct kv_key key, uint64_t parent_serial,
			 int32_t id)
{
	uint32_t cursor = 0;
	int32_t c;

	while ((c = kv_prefix_find(&b->prefix, key, &cursor)) >= 0) {
		const struct kv_book *book = &b->books[c];

		if (book->state == KV_BLOCK_CACHED && book->key.lo == key.lo &&
		    book->key.hi == key.hi && book->parent_serial == parent_serial &&
		    is_same(b, c, id, parent_serial & KV_SERIAL_ROW))
			return c;
	}
	return -1;
}

/* The cached block that a chain goes on from: *parent itself, or its twin. False: there is none. */
static bool resolve_parent(const struct kv_books *b, uint32_t slot, const struct kv_op *op,
			   int32_t *parent, uint64_t *ret_serial)
{
	const struct kv_book *book;

	*parent = op->parent;
	*ret_serial = kv_serial_root(b->epoch);
	if (op->parent == -1)
		return op->parent_serial == *ret_serial;
	if (op->parent < 0 || (uint32_t)op->parent >= b->head->id_limit)
		return false;

	book = &b->books[op->parent];
	if (book->state == KV_BLOCK_TWIN && book->owner == slot) {
		*parent = book->parent;
		*ret_serial = book->serial;
		book = &b->books[*parent];
		return book->state == KV_BLOCK_CACHED && book->serial == *ret_serial &&
		       !book->stale;
	}
	*ret_serial = book->serial;
	return book->state == KV_BLOCK_CACHED && !book->stale &&
	       (!op->parent_serial || op->parent_serial == book->serial);
}

int32_t kv_books_link_child(struct kv_books *b, int32_t id)
{
	struct kv_book *book = &b->books[id], *parent;

	if (book->parent < 0)
		return -1;
	parent = &b->books[book->parent];
	book->next_sibling = parent->n_children++ ? parent->first_child : -1;
	book->prev_sibling = -1;
	if (book->next_sibling >= 0)
		b->books[book->next_sibling].prev_sibling = id;
	parent->first_child = id;
	return book->parent;
}

int32_t kv_books_unlink_child(struct kv_books *b, int32_t id)
{
	struct kv_book *book = &b->books[id];

	if (book->parent < 0)
		return -1;
	if (book->prev_sibling >= 0)
		b->books[book->prev_sibling].next_sibling = book->next_sibling;
	else
		b->books[book->parent].first_child = book->next_sibling;
	if (book->next_sibling >= 0)
		b->books[book->next_sibling].prev_sibling = book->prev_sibling;
	b->books[book->parent].n_children--;
	return book->parent;
}

/* How it begins can be looked for. Its place stands in its book before its entry does (alloc/saved.h). */
static void put_stem(struct kv_books *b, int32_t id, uint64_t follows)
{
	int32_t tokens[KV_STEM_TOKENS];
	struct kv_shm_row row;
	struct kv_key key;

	if (!b->stems.n_buckets)
		return;
	memcpy(tokens, kv_shm_tokens(b->shared, b->head, id),
	       kv_stem_tokens(b->head->block_tokens) * sizeof(*tokens));
	if (follows & KV_SERIAL_ROW)
		row = *kv_shm_row(b->shared, b->head, id);
	key = kv_stem_key(b->head, follows, follows & KV_SERIAL_ROW ? &row : NULL, tokens);
	b->books[id].stem = kv_stem_place(&b->stems, key, id);
	kv_fence_compiler();
	kv_stem_put(&b->stems, b->books[id].stem, key, id);
	KV_KILLPOINT(worker_stem_put);
}

void kv_books_remove_stem(struct kv_books *b, int32_t id)
{
	kv_stem_remove(&b->stems, b->books[id].stem, id);
	b->books[id].stem = 0;
}

static uint64_t next_serial(struct kv_books *b)
{
	if (b->next_serial == b->saved->serial_limit)
		kv_store_release(&b->saved->serial_limit, b->next_serial + KV_SERIALS_A_TIME);
	return b->next_serial++;
}

int kv_books_publish(struct kv_books *b, uint32_t slot, const struct kv_op *op)
{
	struct kv_key key = { op->key_lo, op->key_hi };
	struct kv_shm_block *d;
	struct kv_book *book;
	uint64_t parent_serial;
	int32_t parent, twin;
	bool again;

	if (op->id < 0 || (uint32_t)op->id >= b->head->id_limit)
		return -EINVAL;
	book = &b->books[op->id];
	d = &b->descriptors[op->id];
	/* Two sequences that share it may both have asked; what came of the first they see. */
	if (op->flags & KV_OP_AGAIN && book->state == KV_BLOCK_CACHED &&
	    kv_load_relaxed(holder_word(b, op->id, slot)) >> slot % 64 & 1)
		return KV_PUBLISH_TWIN;
	again = op->flags & KV_OP_AGAIN && book->state == KV_BLOCK_TWIN;
	if ((book->state != KV_BLOCK_LEASED && !again) || book->owner != slot || op->parent == op->id)
		return -EINVAL;
	if (again)
		kv_books_set_state(b, op->id, KV_BLOCK_LEASED, (uint16_t)slot);
	if (!resolve_parent(b, slot, op, &parent, &parent_serial))
		return KV_PUBLISH_REFUSED;

	if (op->flags & KV_OP_ROW)
		parent_serial |= KV_SERIAL_ROW;
	twin = find_twin(b, key, parent_serial, op->id);
	if (twin >= 0) {
		book->parent = twin;
		book->serial = b->books[twin].serial;
		kv_store_relaxed(&d->key_lo, (uint64_t)twin);
		kv_store_relaxed(&d->serial, book->serial);
		kv_books_set_state(b, op->id, KV_BLOCK_TWIN, (uint16_t)slot);
		b->n_duplicates += !again;
		return KV_PUBLISH_TWIN;
	}
	/* Room for every cached block: from here on a push can't fail. */
	if (kv_heap_reserve(&b->lru, b->n_cached + 1) < 0)
		return -ENOMEM;
	book->key = key;
	kv_books_doubt(b, op->id);
	if (kv_prefix_insert(&b->prefix, key, op->id) < 0)
		return KV_PUBLISH_REFUSED;
	KV_KILLPOINT(worker_index_inserted);
	put_stem(b, op->id, parent_serial);

	book->parent = parent;
	book->parent_serial = parent_serial;
	book->serial = next_serial(b);
	book->n_children = 0;
	book->first_child = -1;
	book->depth = 0;
	kv_books_link_child(b, op->id);
	if (parent >= 0) {
		b->books[parent].went_on = true;
		book->depth = b->books[parent].depth + 1;
	}
	kv_books_remember(b, op->id);
	kv_store_relaxed(&d->key_lo, key.lo);
	kv_store_relaxed(&d->key_hi, key.hi);
	kv_store_relaxed(&d->parent_serial, parent_serial);
	kv_store_relaxed(&d->serial, book->serial);
	kv_store_relaxed(&d->stamp, op->stamp);
	/* Its publisher holds it from the first moment on. */
	kv_or_seq(holder_word(b, op->id, slot), (uint64_t)1 << slot % 64);
	kv_books_set_state(b, op->id, KV_BLOCK_CACHED, 0);
	kv_books_enlist(b, op->id);
	b->n_leased--;
	b->n_leased_by[slot]--;
	b->n_cached++;
	b->n_published++;
	return KV_PUBLISHED;
}

static bool has_used(const struct kv_space_extent *e)
{
	return e->n_used;
}

static bool was_touched(const struct kv_space_extent *e)
{
	return e->touched;
}

/* The next block after @id that begins in an extent of which @is_wanted; -1: none. */
static int32_t next_in(const struct kv_books *b, int32_t id,
		       bool (*is_wanted)(const struct kv_space_extent *e))
{
	const struct kv_space *s = &b->space;

	for (id++; (uint32_t)id < b->head->id_limit; id++) {
		uint32_t i = kv_space_first(s, id);
		int32_t first, end;

		if (is_wanted(&s->extents[i]))
			return id;
		kv_space_blocks(s, i, &first, &end);
		id = end - 1 > id ? end - 1 : id;
	}
	return -1;
}

int32_t kv_books_next_used(const struct kv_books *b, int32_t id)
{
	return next_in(b, id, has_used);
}

void kv_books_quarantine(struct kv_books *b, uint32_t slot)
{
	for (int32_t i = -1; b->n_leased_by[slot] && (i = next_in(b, i, has_used)) >= 0;) {
		if (!is_leased_by(&b->books[i], slot))
			continue;
		b->n_leased--;
		b->n_leased_by[slot]--;
		b->n_quarantined++;
		kv_books_set_state(b, i, KV_BLOCK_QUARANTINED, (uint16_t)slot);
	}
}

void kv_books_forget(struct kv_books *b, uint32_t slot)
{
	uint64_t bit = (uint64_t)1 << slot % 64;

	/* A bit has no effect on a block that isn't cached, but must not wait for the slot's next owner. */
	for (int32_t i = -1; (i = next_in(b, i, was_touched)) >= 0;) {
		struct kv_book *book = &b->books[i];

		if (kv_load_relaxed(holder_word(b, i, slot)) & bit)
			kv_and_release(holder_word(b, i, slot), ~bit);
		if (is_leased_by(book, slot)) {
			b->n_leased--;
			b->n_leased_by[slot]--;
			kv_books_push_free(b, i);
		} else if (book->state == KV_BLOCK_QUARANTINED && book->owner == slot) {
			b->n_quarantined--;
			kv_books_push_free(b, i);
		}
	}
}

bool kv_books_count_on(const struct kv_books *b, struct kv_books_count *count)
{
	for (uint32_t n = 0; n < COUNTED_A_TIME; n++) {
		count->at = next_in(b, count->at, has_used);
		if (count->at < 0)
			return false;
		if (b->books[count->at].state != KV_BLOCK_CACHED)
			continue;
		count->n_cached++;
		count->n_held += kv_books_is_held(b, count->at);
		for (uint32_t w = 0; w < KV_HOLDER_WORDS; w++) {
			uint64_t bits = kv_load_relaxed(&b->descriptors[count->at].holders[w]);

			for (; bits; bits &= bits - 1)
				count->held[w * 64 + (uint32_t)__builtin_ctzll(bits)]++;
		}
	}
	return true;
}

uint32_t kv_books_count(const struct kv_books *b, uint32_t *leased, uint32_t *held)
{
	struct kv_books_count count = {.at = -1};

	while (kv_books_count_on(b, &count))
		;
	if (leased)
		memcpy(leased, b->n_leased_by, sizeof(b->n_leased_by));
	if (held)
		memcpy(held, count.held, sizeof(count.held));
	return count.n_held;
}
