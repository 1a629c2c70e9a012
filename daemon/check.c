/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvctl check: what the worker believes of every block, against what it shows to clients in the shared
 * pages, and the extents of all pools against the map of each device. Nothing is repaired: a word that
 * a client has written over is written again with the block's next change.
 *
 * It goes over all pools in slices (walk.h), so what it finds is of no one moment; but what it says is wrong
 * was wrong at one (alloc/pool_check.c).
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/daemon.h"
#include "daemon/log.h"
#include "daemon/walk.h"

/* A check under way: of all pools, for CHECK, or for STATS of balances or of errors. */
struct check {
	struct kv_walk walk;
	struct kv_daemon *daemon;
	uint32_t tag;
	struct kv_books_proof proof; /* of the pool where it is */
	const struct kv_pool *pool;  /* that; NULL: devices */
	uint64_t n_wrong;
	char first_error[sizeof(((struct kv_check_result *)NULL)->first_error)];
	uint32_t first, most; /* items of the answer */
	uint32_t at;	      /* items there were so far */
	struct kv_msg_stats_part *reply;
	uint64_t space[];
};

/* The next item of the answer, zero; NULL: there is no room for it, or it comes before what was asked for. */
static void *next_item(struct check *check)
{
	struct kv_msg_stats_part *reply = check->reply;

	if (!reply || check->at++ < check->first || reply->n == check->most)
		return NULL;
	return (char *)reply->items + (size_t)reply->n++ * reply->item_bytes;
}

static void note(struct check *check, const char *text)
{
	const struct kv_pool *pool = check->pool;

	if (!check->n_wrong++)
		snprintf(check->first_error, sizeof(check->first_error), "%s%s%s%s", pool ? "pool '" : "",
			 pool ? pool->name : "", pool ? "': " : "", text);
}

static void list(struct check *check, int32_t id, const char *text)
{
	const struct kv_pool *pool = check->pool;
	struct kv_error_stats *e = next_item(check);

	if (!e)
		return;
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

static void note_error(void *arg, int32_t id, const char *text)
{
	(void)id;
	note(arg, text);
}

static void list_error(void *arg, int32_t id, const char *text)
{
	note(arg, text);
	list(arg, id, text);
}

/* Return: false: that was the last of @pool. */
static bool prove(struct check *check, struct kv_pool *pool, bool began, kv_books_error_fn *each)
{
	bool live[KV_MAX_SESSIONS];

	if (!began)
		memset(&check->proof, 0, sizeof(check->proof));
	for (uint32_t i = 0; i < KV_MAX_SESSIONS; i++)
		live[i] = pool->slots[i];
	check->pool = pool;
	return kv_books_prove(&pool->books, &check->proof, live, each, check);
}

/* The extents of all pools against the devices' maps. */
static void check_devices(struct check *check, void (*each)(void *arg, int32_t id, const char *text))
{
	struct kv_daemon *d = check->daemon;
	uint64_t owned = 0, counted = 0, n_wrong = kv_extents_check(&d->extents);
	char text[128];

	check->pool = NULL;
	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		const struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);

		owned += (uint64_t)pool->n_extents * (uint64_t)__builtin_popcount(pool->gpu_mask);
	}
	for (uint32_t g = 0; g < d->n_gpus; g++)
		counted += d->extents.n_state[g][KV_EXTENT_OWNED];
	if (n_wrong) {
		snprintf(text, sizeof(text), "%llu counts of extents are not what the devices' maps say",
			 (unsigned long long)n_wrong);
		each(check, -1, text);
	}
	if (owned != counted) {
		snprintf(text, sizeof(text), "pools own %llu extents, the devices' maps say %llu",
			 (unsigned long long)owned, (unsigned long long)counted);
		each(check, -1, text);
	}
}

/* ---- CHECK ---- */

static bool check_slice(struct kv_walk *walk, struct kv_pool *pool, bool began)
{
	return prove((struct check *)walk, pool, began, note_error);
}

static void check_end(struct kv_walk *walk, struct kv_peer *peer)
{
	struct check *check = (struct check *)walk;
	struct kv_daemon *d = peer->daemon;
	struct kv_msg_checked reply = { 0 };
	struct kv_check_result *result = &reply.result;

	check_devices(check, note_error);
	result->n_errors = check->n_wrong;
	memcpy(result->first_error, check->first_error, sizeof(result->first_error));
	for (struct kv_link *l = d->pools.next; l != &d->pools; l = l->next) {
		result->n_pools++;
		result->n_blocks += kv_container_of(l, struct kv_pool, link)->books.n_total;
	}
	if (result->n_errors)
		kv_log(KV_LOG_ERROR, "check: %llu errors; first: %s",
		       (unsigned long long)result->n_errors, result->first_error);
	kv_wire_init(&reply.head, KV_MSG_CHECKED, sizeof(reply), check->tag);
	kv_peer_send(peer, &reply, sizeof(reply), NULL, 0);
}

/* ---- STATS of balances, of errors ---- */

static bool balance_slice(struct kv_walk *walk, struct kv_pool *pool, bool began)
{
	struct check *check = (struct check *)walk;
	const struct kv_books *b = &pool->books;
	const int64_t *shown = check->proof.shown;
	struct kv_balance_stats *s;

	if (prove(check, pool, began, NULL))
		return true;
	s = next_item(check);
	if (!s)
		return false;
	s->id = pool->id;
	snprintf(s->name, sizeof(s->name), "%s", pool->name);
	s->blocks_total = b->n_total;
	s->blocks_free = b->n_free;
	s->blocks_leased = b->n_leased;
	s->blocks_cached = b->n_cached;
	s->blocks_quarantined = b->n_quarantined;
	s->blocks_moving = b->n_moving;
	s->pages_free = b->n_free + (uint64_t)shown[KV_BLOCK_FREE];
	s->pages_leased = b->n_leased + (uint64_t)(shown[KV_BLOCK_LEASED] + shown[KV_BLOCK_TWIN]);
	s->pages_cached = b->n_cached + (uint64_t)(shown[KV_BLOCK_CACHED] + shown[KV_BLOCK_EVICTING]);
	s->pages_quarantined = b->n_quarantined + (uint64_t)shown[KV_BLOCK_QUARANTINED];
	s->pages_moving = b->n_moving + (uint64_t)shown[KV_BLOCK_MOVING];
	s->n_errors = check->proof.n_wrong;
	return false;
}

static bool errors_slice(struct kv_walk *walk, struct kv_pool *pool, bool began)
{
	return prove((struct check *)walk, pool, began, list_error);
}

static void send_items(struct kv_peer *peer, struct check *check, uint32_t total)
{
	struct kv_msg_stats_part *reply = check->reply;
	uint32_t end = check->first + reply->n;
	uint32_t size = (uint32_t)sizeof(*reply) + reply->n * reply->item_bytes;

	reply->left = reply->n && end < total ? total - end : 0;
	kv_wire_init(&reply->head, KV_MSG_STATS_PART, size, check->tag);
	kv_peer_send(peer, reply, size, NULL, 0);
}

static void balance_end(struct kv_walk *walk, struct kv_peer *peer)
{
	send_items(peer, (struct check *)walk, peer->daemon->n_pools);
}

static void errors_end(struct kv_walk *walk, struct kv_peer *peer)
{
	struct check *check = (struct check *)walk;

	check_devices(check, list_error);
	send_items(peer, check, check->at < KV_CHECK_ERRORS ? check->at : KV_CHECK_ERRORS);
}

/* ---- beginning ---- */

static void start(struct kv_peer *peer, struct kv_walk walk, uint32_t tag, uint32_t first, uint32_t item_bytes)
{
	struct check *check = calloc(1, sizeof(*check) + (item_bytes ? KV_WIRE_MAX : 0));

	if (!check) {
		kv_peer_error(peer, tag, -ENOMEM, "no memory for a check");
		return;
	}
	check->walk = walk;
	check->daemon = peer->daemon;
	check->tag = tag;
	check->first = first;
	if (item_bytes) {
		check->reply = (struct kv_msg_stats_part *)check->space;
		check->reply->item_bytes = item_bytes;
		check->most = (KV_WIRE_MAX - (uint32_t)sizeof(*check->reply)) / item_bytes;
	}
	kv_walk_start(peer, &check->walk);
}

void kv_control_check(struct kv_peer *peer, uint32_t tag)
{
	start(peer, (struct kv_walk){ .slice = check_slice, .end = check_end }, tag, 0, 0);
}

void kv_check_balance(struct kv_peer *peer, uint32_t tag, uint32_t first)
{
	start(peer, (struct kv_walk){ .slice = balance_slice, .end = balance_end }, tag, first,
	      sizeof(struct kv_balance_stats));
}

void kv_check_errors(struct kv_peer *peer, uint32_t tag, uint32_t first)
{
	start(peer, (struct kv_walk){ .slice = errors_slice, .end = errors_end }, tag, first,
	      sizeof(struct kv_error_stats));
}
