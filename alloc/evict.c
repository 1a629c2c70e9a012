/* SPDX-License-Identifier: Apache-2.0 */
/* Which cached blocks go when room is needed: policies, what they know, and the going itself. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/pool_parts.h"
#include "include/internal/killpoint.h"

static void push_lru(struct kv_books *b, int32_t id, uint64_t stamp)
{
	int r = kv_heap_push(&b->lru, stamp, id);

	assert(r == 0); /* kv_books_publish() has made room for all that is cached */
	(void)r;
	b->books[id].in_lru = true;
}

static void pop_lru(struct kv_books *b)
{
	b->books[b->lru.items[0].id].in_lru = false;
	kv_heap_pop(&b->lru);
}

static uint64_t newest_stamp(const struct kv_books *b)
{
	return kv_load_relaxed(&((struct kv_shm_blocks *)b->shared)->clock);
}

/* Clients write stamps: none may be later than now, or a block could stay for ever. */
static uint64_t score_lru(const struct kv_books *b, int32_t id)
{
	uint64_t stamp = kv_load_relaxed(&b->descriptors[id].stamp), now = newest_stamp(b);

	return stamp < now ? stamp : now;
}

uint8_t kv_books_class(const struct kv_books *b, int32_t id)
{
	const struct kv_book *book = &b->books[id];

	return kv_worth_class(book->n_uses, book->went_on,
			      (uint64_t)book->depth * b->head->block_tokens);
}

static uint64_t score_worth(const struct kv_books *b, int32_t id)
{
	return kv_worth_score(&b->saved->worth, kv_books_class(b, id), b->now - b->books[id].last);
}

static double uses_worth(const struct kv_books *b, uint64_t score)
{
	double uses;

	(void)b;
	memcpy(&uses, &score, sizeof(uses));
	return uses;
}

/* Used once since: that is all that LRU knows. */
static double uses_lru(const struct kv_books *b, uint64_t score)
{
	return 1 / (1 + (double)(newest_stamp(b) - score));
}

static const struct kv_policy worth = {"worth", score_worth, uses_worth, true};
static const struct kv_policy lru = {"lru", score_lru, uses_lru, false};

const struct kv_policy *const kv_policies[] = {&worth, &lru, NULL};

/* Before all others if its epoch is over. */
static uint64_t score_of(const struct kv_books *b, int32_t id)
{
	return b->books[id].stale ? 0 : b->policy->score(b, id);
}

/* Behind all others, until it is looked at again. */
static uint64_t last_score(const struct kv_books *b)
{
	return b->policy->fades ? UINT64_MAX : newest_stamp(b) + 1;
}

static void use(struct kv_books *b, int32_t id, uint8_t class, uint64_t last)
{
	kv_worth_used(&b->saved->worth, class, b->now - last);
	b->books[id].n_uses += b->books[id].n_uses < UINT16_MAX;
}

/* A block that is published anew, and may have been here before. */
void kv_books_remember(struct kv_books *b, int32_t id)
{
	struct kv_book *book = &b->books[id];
	struct kv_ghost ghost;

	b->now++;
	book->n_uses = 0;
	book->went_on = false;
	if (kv_ghosts_take(&b->ghosts, book->key, &ghost)) {
		book->n_uses = (uint16_t)ghost.n_uses;
		use(b, id, ghost.class, ghost.last);
	}
	book->last = b->now;
	kv_books_census(b);
}

int kv_books_touch(struct kv_books *b, int32_t id, uint32_t n)
{
	int seen = 0;

	if (id < 0 || (uint32_t)id >= b->head->id_limit)
		return -EINVAL;
	if (n > b->books[id].depth)
		n = b->books[id].depth + 1;
	b->now += n;
	/* Who found them may have let go since, and they may be gone or others by now. */
	for (; n && id >= 0 && b->books[id].state == KV_BLOCK_CACHED; n--, seen++) {
		use(b, id, kv_books_class(b, id), b->books[id].last);
		b->books[id].last = b->now;
		id = b->books[id].parent;
	}
	kv_books_census(b);
	return seen;
}

void kv_books_enlist(struct kv_books *b, int32_t id)
{
	push_lru(b, id, score_of(b, id));
}

bool kv_books_is_held(const struct kv_books *b, int32_t id)
{
	uint64_t held = 0;

	/* Pairs with the or in a client's pin (shm.h): either it sees EVICTING, or we see its bit.
	 */
	for (int i = 0; i < KV_HOLDER_WORDS; i++)
		held |= kv_load_seq(&b->descriptors[id].holders[i]);
	return held;
}

static void prefetch(const struct kv_books *b, int32_t id)
{
	__builtin_prefetch(&b->books[id], 1);
	__builtin_prefetch(&b->descriptors[id], 1);
}

/* Takes a block without children out of reach, for kv_books_evict(). False: it's held. */
static bool withdraw(struct kv_books *b, int32_t id)
{
	int32_t parent;

	if (kv_books_is_held(b, id))
		return false;
	kv_books_set_state(b, id, KV_BLOCK_EVICTING, 0);
	if (kv_books_is_held(b, id)) {
		kv_books_set_state(b, id, KV_BLOCK_CACHED, 0);
		return false;
	}
	parent = kv_books_unlink_child(b, id);
	if (parent >= 0 && !b->books[parent].n_children && !b->books[parent].in_lru)
		kv_books_enlist(b, parent);
	return true;
}

static void put_back(struct kv_books *b, struct kv_heap_item item)
{
	kv_books_link_child(b, item.id);
	kv_books_set_state(b, item.id, KV_BLOCK_CACHED, 0);
	push_lru(b, item.id, item.stamp);
}

/* All scores anew: between two of these a block of a policy that fades can only seem worth more. */
static void refresh(struct kv_books *b)
{
	for (uint32_t i = 0; i < b->lru.n; i++)
		b->lru.items[i].stamp = score_of(b, b->lru.items[i].id);
	kv_heap_order(&b->lru);
	b->unscored = false;
	b->refresh_in = b->lru.n / 16 + 16;
	b->refreshed_at = b->now;
	b->set_aside = false;
}

/* While no block is used no score changes: those in the heap are right, and who evicts many needs them once. */
static bool is_fresh(const struct kv_books *b)
{
	return b->policy->fades && b->refreshed_at == b->now;
}

/* Those that were held and stand behind all others are looked at again all the same. */
static bool is_faded(const struct kv_books *b)
{
	return b->policy->fades && !b->refresh_in && (!is_fresh(b) || b->set_aside);
}

/* Brings a block to the top of the heap whose score is right, and that ends its chain. */
static bool settle_top(struct kv_books *b)
{
	while (b->lru.n) {
		struct kv_heap_item top;
		uint64_t score;

		if (b->unscored || is_faded(b))
			refresh(b);
		top = b->lru.items[0];
		if (b->books[top.id].n_children) {
			pop_lru(b);
			continue;
		}
		if (is_fresh(b))
			return true;
		score = score_of(b, top.id);
		if (score <= top.stamp)
			return true;
		kv_heap_restamp_top(&b->lru, score);
	}
	return false;
}

bool kv_books_least(struct kv_books *b, double *ret_uses)
{
	/* Those that were held when they should have gone stand behind all others. */
	if (!settle_top(b) || b->lru.items[0].stamp >= last_score(b))
		return false;
	*ret_uses = b->policy->uses(b, b->lru.items[0].stamp);
	return true;
}

#define MANY 32u /* victims */

/*
 * The blocks that the policy wants to go leave the heap for the front of `victims`: ends of chains,
 * and then their parents. Those that are held are set aside at its back, so that each is tried
 * once, and end up behind all others in the order.
 */
static uint32_t choose_victims(struct kv_books *b, uint32_t n)
{
	uint32_t found = 0, n_held = 0;

	/* The first of the heap are about those that go: their memory comes all at once. */
	for (uint32_t i = 0; n >= MANY && i < n && i < b->lru.n; i++)
		prefetch(b, b->lru.items[i].id);
	while (found < n && settle_top(b)) {
		struct kv_heap_item top = b->lru.items[0];

		pop_lru(b);
		/* Its parent or the next in the order will be looked at soon. */
		if (b->lru.n)
			prefetch(b, b->lru.items[0].id);
		if (b->books[top.id].parent >= 0)
			prefetch(b, b->books[top.id].parent);
		b->refresh_in -= b->refresh_in > 0;
		if (withdraw(b, top.id))
			b->victims[found++] = top;
		else
			b->victims[b->n_victims_room - ++n_held] = top;
	}
	b->set_aside = b->set_aside || n_held;
	for (; n_held; n_held--)
		push_lru(b, b->victims[b->n_victims_room - n_held].id, last_score(b));
	return found;
}

/* It is gone, but if its tokens come again soon that says something about its like. */
static void keep_ghost(struct kv_books *b, int32_t id)
{
	const struct kv_book *book = &b->books[id];
	struct kv_ghost ghost = {.key = book->key,
				 .last = book->last,
				 .n_uses = book->n_uses,
				 .class = kv_books_class(b, id)};

	kv_ghosts_add(&b->ghosts, &ghost, 3 * b->n_total);
}

/* Blocks of epochs that are over were held, and stand where held ones do: not those let go since. */
static void look_at_stale(struct kv_books *b)
{
	uint32_t kept = 0;
	bool found = false;

	for (uint32_t i = 0; i < b->n_stale; i++) {
		int32_t id = b->stale_ids[i];

		if (!b->books[id].stale)
			continue;
		b->stale_ids[kept++] = id;
		found = found || !kv_books_is_held(b, id);
	}
	b->n_stale = kept;
	if (found)
		refresh(b);
}

int64_t kv_books_new_epoch(struct kv_books *b)
{
	int32_t *ids = realloc(b->stale_ids, (b->n_cached + 1) * sizeof(*ids));

	if (!ids)
		return -ENOMEM;
	b->stale_ids = ids;
	b->epoch++;
	for (uint32_t i = 0; i < b->head->id_limit; i++)
		b->books[i].stale = b->books[i].state == KV_BLOCK_CACHED;
	refresh(b);
	b->n_stale = 0; /* they are noted anew, with those that come to it */
	kv_books_evict(b, b->n_cached, false);
	for (uint32_t i = 0; i < b->head->id_limit; i++) {
		if (b->books[i].stale)
			b->stale_ids[b->n_stale++] = (int32_t)i;
	}
	return b->n_stale;
}

uint32_t kv_books_evict(struct kv_books *b, uint32_t n, bool all)
{
	uint32_t found;

	if (b->n_stale)
		look_at_stale(b);

	if (n > b->n_cached) {
		if (all)
			return 0;
		n = b->n_cached;
	}
	if (b->n_cached > b->n_victims_room) {
		uint32_t room = b->lru.room;
		void *victims = realloc(b->victims, room * sizeof(*b->victims));

		if (!victims)
			return 0;
		b->victims = victims;
		b->n_victims_room = room;
	}
	found = choose_victims(b, n);
	if (found < n && all) {
		while (found)
			put_back(b, b->victims[--found]);
		return 0;
	}
	for (uint32_t i = 0; i < found; i++) {
		if (i + 8 < found) {
			struct kv_key key = b->books[b->victims[i + 8].id].key;

			kv_prefix_prefetch(&b->prefix, key);
			kv_stem_prefetch(&b->stems, b->books[b->victims[i + 8].id].stem);
			kv_ghosts_prefetch(&b->ghosts, key);
		}
		kv_books_doubt(b, b->victims[i].id);
		kv_prefix_remove(&b->prefix, b->books[b->victims[i].id].key, b->victims[i].id);
		kv_books_remove_stem(b, b->victims[i].id);
		KV_KILLPOINT(worker_index_removed);
		if (!b->books[b->victims[i].id].stale)
			keep_ghost(b, b->victims[i].id);
		if (b->left)
			b->left(b->left_arg, b->victims[i].id);
		kv_books_push_free(b, b->victims[i].id);
	}
	b->n_cached -= found;
	b->n_evicted += found;
	return found;
}
