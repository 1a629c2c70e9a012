/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvctl check: what the worker believes of every block, against what it shows to clients in the shared
 * pages, and the extents of all pools against the map of each device. Nothing is repaired: a word that
 * a client has written over is written again with the block's next change.
 */
#include <stdio.h>
#include <string.h>

#include "daemon/daemon.h"
#include "daemon/log.h"

/* Those from number @first on, up to @n_items; all are counted. */
struct list {
	struct kv_error_stats *items;
	uint32_t first, n_items;
	uint32_t at, n;
	const struct kv_pool *pool; /* that is being walked; NULL: devices */
	char *text;		    /* the first of all; or NULL */
	size_t size;
};

static void add(void *arg, int32_t id, const char *text)
{
	struct list *list = arg;
	const struct kv_pool *pool = list->pool;
	struct kv_error_stats *e;

	if (!list->at && list->text)
		snprintf(list->text, list->size, "%s%s%s%s", pool ? "pool '" : "", pool ? pool->name : "",
			 pool ? "': " : "", text);
	if (list->at++ < list->first || list->n == list->n_items)
		return;
	e = &list->items[list->n++];
	memset(e, 0, sizeof(*e));
	snprintf(e->text, sizeof(e->text), "%s", text);
	if (!pool)
		return;
	e->pool_id = pool->id;
	snprintf(e->pool, sizeof(e->pool), "%s", pool->name);
	if (id >= 0) {
		const struct kv_book *book = &pool->books.books[id];
		uint64_t word = kv_load_relaxed(&pool->books.descriptors[id].word);

		e->is_block = 1;
		e->block = (uint64_t)id;
		snprintf(e->pages_state, sizeof(e->pages_state), "%s",
			 kv_block_state_name(kv_block_state(word)));
		e->pages_slot = kv_block_owner(word);
		e->pages_generation = kv_block_generation(word);
		snprintf(e->books_state, sizeof(e->books_state), "%s", kv_block_state_name(book->state));
		e->books_slot = book->owner;
		e->books_generation = book->generation;
	}
}

static uint64_t walk_pool(const struct kv_pool *pool, struct list *list)
{
	bool live[KV_MAX_SESSIONS];

	for (uint32_t i = 0; i < KV_MAX_SESSIONS; i++)
		live[i] = pool->slots[i];
	if (list)
		list->pool = pool;
	return kv_books_errors(&pool->books, live, list ? add : NULL, list);
}

/* All pools, then the devices. Return: how much is wrong. */
static uint64_t walk(struct kv_daemon *d, struct list *list)
{
	uint64_t owned = 0, counted = 0, n_wrong, n = 0;
	char text[128];

	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);

		n += walk_pool(pool, list);
		owned += (uint64_t)pool->n_extents * (uint64_t)__builtin_popcount(pool->gpu_mask);
	}
	for (uint32_t g = 0; g < d->n_gpus; g++)
		counted += d->extents.n_state[g][KV_EXTENT_OWNED];
	n_wrong = kv_extents_check(&d->extents);
	list->pool = NULL;
	if (n_wrong) {
		snprintf(text, sizeof(text), "%llu counts of extents are not what the devices' maps say",
			 (unsigned long long)n_wrong);
		add(list, -1, text);
	}
	if (owned != counted) {
		snprintf(text, sizeof(text), "pools own %llu extents, the devices' maps say %llu",
			 (unsigned long long)owned, (unsigned long long)counted);
		add(list, -1, text);
	}
	return n + (n_wrong > 0) + (owned != counted);
}

void kv_control_check(struct kv_peer *peer, uint32_t tag)
{
	struct kv_daemon *d = peer->daemon;
	struct kv_msg_checked reply = { 0 };
	struct kv_check_result *result = &reply.result;
	struct list list = { .text = result->first_error, .size = sizeof(result->first_error) };

	result->n_errors = walk(d, &list);
	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		result->n_pools++;
		result->n_blocks += kv_container_of(l, struct kv_pool, link)->books.n_total;
	}
	if (result->n_errors)
		kv_log(KV_LOG_ERROR, "check: %llu errors; first: %s",
		       (unsigned long long)result->n_errors, result->first_error);
	kv_wire_init(&reply.head, KV_MSG_CHECKED, sizeof(reply), tag);
	kv_peer_send(peer, &reply, sizeof(reply), NULL, 0);
}

static void balance(const struct kv_pool *pool, struct kv_balance_stats *s)
{
	const struct kv_books *b = &pool->books;
	uint32_t n[KV_BLOCK_STATES];

	kv_books_pages_count(b, n);
	s->id = pool->id;
	snprintf(s->name, sizeof(s->name), "%s", pool->name);
	s->blocks_total = b->n_total;
	s->blocks_free = b->n_free;
	s->blocks_leased = b->n_leased;
	s->blocks_cached = b->n_cached;
	s->blocks_quarantined = b->n_quarantined;
	s->blocks_moving = b->n_moving;
	s->pages_free = n[KV_BLOCK_FREE];
	s->pages_leased = n[KV_BLOCK_LEASED] + n[KV_BLOCK_TWIN];
	s->pages_cached = n[KV_BLOCK_CACHED] + n[KV_BLOCK_EVICTING];
	s->pages_quarantined = n[KV_BLOCK_QUARANTINED];
	s->pages_moving = n[KV_BLOCK_MOVING];
	s->n_errors = walk_pool(pool, NULL);
}

uint32_t kv_check_balance(struct kv_daemon *d, uint32_t first, uint32_t n, void *items)
{
	struct kv_balance_stats *s = items;
	uint32_t i = 0, done = 0;

	for (struct kv_link *l = d->pools.next; l != &d->pools && done < n; l = l->next) {
		if (i++ >= first)
			balance(kv_container_of(l, struct kv_pool, link), &s[done++]);
	}
	return done;
}

uint32_t kv_check_errors(struct kv_daemon *d, uint32_t first, uint32_t n, void *items)
{
	struct list list = { .items = items, .first = first, .n_items = n };
	uint64_t total = walk(d, &list);

	if (!n)
		return total < KV_CHECK_ERRORS ? (uint32_t)total : KV_CHECK_ERRORS;
	return list.n;
}
