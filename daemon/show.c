/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one block is, for kvctl block show: state and place in its prefix by the books; tokens and what else it
 * was computed from by the pages, which its pool's clients can write. All within one moment of the loop.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/identity.h"
#include "daemon/daemon.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"

#define CLOCK_NS (KV_SEC / 10)

void kv_clock_update(struct kv_daemon *d)
{
	d->clock = (uint32_t)(kv_now() / CLOCK_NS);
}

static bool has_content(const struct kv_book *book)
{
	return book->state == KV_BLOCK_CACHED || book->state == KV_BLOCK_EVICTING ||
	       book->state == KV_BLOCK_TWIN;
}

/* The block that a chain with @id begins with; of a twin, the one whose content it has. */
static int32_t first_of(const struct kv_books *b, int32_t id)
{
	int32_t at = b->books[id].state == KV_BLOCK_TWIN ? b->books[id].parent : id;

	while (b->books[at].parent >= 0)
		at = b->books[at].parent;
	return at;
}

static void describe_content(const struct kv_pool *pool, int32_t id, struct kv_block_stats *s)
{
	const struct kv_books *b = &pool->books;
	const struct kv_book *own = &b->books[id];
	/* A twin has another's content: its place in the prefix stands there. */
	int32_t at = own->state == KV_BLOCK_TWIN ? own->parent : id, first = first_of(b, id);
	const struct kv_book *book = &b->books[at];
	const struct kv_shm_row *row;
	char text[sizeof(s->identity)];

	s->n_tokens = pool->head->block_tokens;
	/* KV_SERIAL_ROOT stands beside every epoch but the first, which is 0. */
	s->epoch = b->books[first].parent_serial & ~(KV_SERIAL_ROW | KV_SERIAL_ROOT);
	s->is_stale = book->stale;
	s->position = (uint64_t)book->depth * pool->head->block_tokens;
	s->parent = (uint64_t)(own->state == KV_BLOCK_TWIN ? at : book->depth ? book->parent : 0);
	s->n_children = book->n_children;
	s->uses_total = book->n_uses;
	s->idle_uses = b->now - book->last;
	/* Fields stand in the first block's row, extras in that of each block they reach into. */
	if (b->books[first].parent_serial & KV_SERIAL_ROW) {
		row = kv_shm_row(pool->blocks, pool->head, first);
		s->is_loose = first == at && kv_load_relaxed(&row->form) == KV_ROW_PREFIX;
		kv_identity_describe(row, s->identity, sizeof(s->identity));
	}
	if (first == at || !(book->parent_serial & KV_SERIAL_ROW))
		return;
	kv_identity_describe(kv_shm_row(pool->blocks, pool->head, at), text, sizeof(text));
	snprintf(s->identity + strlen(s->identity), sizeof(s->identity) - strlen(s->identity), "%s%s",
		 *s->identity ? ", " : "", text);
}

static void describe(const struct kv_pool *pool, int32_t id, struct kv_block_stats *s)
{
	const struct kv_books *b = &pool->books;
	const struct kv_book *book = &b->books[id];
	uint32_t now = pool->daemon->clock;

	s->pool_id = pool->id;
	snprintf(s->pool, sizeof(s->pool), "%s", pool->name);
	s->id = (uint64_t)id;
	snprintf(s->state, sizeof(s->state), "%s", kv_block_state_name(book->state));
	s->since_ns = book->since && now > book->since ? (uint64_t)(now - book->since) * CLOCK_NS : 0;
	s->generation = book->generation;
	s->offset_bytes = pool->layout.kind == KV_LAYOUT_FLAT ? (uint64_t)id * pool->block_bytes : 0;
	if (has_content(book))
		describe_content(pool, id, s);
}

static bool has_it(const struct kv_pool *pool, uint32_t slot, int32_t id)
{
	const struct kv_book *book = &pool->books.books[id];
	const struct kv_shm_block *d = &pool->books.descriptors[id];

	switch (book->state) {
	case KV_BLOCK_LEASED:
	case KV_BLOCK_TWIN:
	case KV_BLOCK_QUARANTINED:
		return book->owner == slot;
	case KV_BLOCK_CACHED:
	case KV_BLOCK_EVICTING:
		return kv_load_relaxed(&d->holders[slot / 64]) >> slot % 64 & 1;
	default:
		return false;
	}
}

void kv_show_block(struct kv_peer *peer, const struct kv_msg_block *msg)
{
	kv_cleanup(kv_freep) struct kv_msg_block_shown *reply = calloc(1, KV_WIRE_MAX);
	struct kv_pool *pool = kv_pool_find(peer->daemon, msg->pool);
	int r = kv_user_may_open(peer, msg->pool, true);
	struct kv_session_stats *sessions;
	uint32_t size;

	if (!r && !pool)
		r = kv_error(-ENOENT, "pool: there is no '%s'", msg->pool);
	if (!r && msg->id >= pool->head->id_limit)
		r = kv_error(-EINVAL, "id: %u given, blocks of pool '%s' are 0 to %u", msg->id, msg->pool,
			     pool->head->id_limit - 1);
	if (!r && !reply)
		r = kv_error(-ENOMEM, "no memory");
	if (r < 0) {
		kv_peer_error(peer, msg->head.tag, r, "%s", kv_error_text());
		return;
	}
	describe(pool, (int32_t)msg->id, &reply->block);
	kv_held_update(pool);
	sessions = (struct kv_session_stats *)reply->items;
	for (uint32_t i = 0; i < KV_MAX_SESSIONS; i++) {
		if (pool->slots[i] && has_it(pool, i, (int32_t)msg->id))
			kv_control_session(pool->slots[i], pool->books.n_leased_by[i],
					   (uint32_t)pool->slots[i]->n_held,
					   &sessions[reply->n_sessions++]);
	}
	reply->block.n_sessions = reply->n_sessions;
	size = (uint32_t)sizeof(*reply) + reply->n_sessions * (uint32_t)sizeof(*sessions);
	reply->n_tokens = (KV_WIRE_MAX - size) / (uint32_t)sizeof(int32_t);
	if (reply->n_tokens > reply->block.n_tokens)
		reply->n_tokens = (uint32_t)reply->block.n_tokens;
	reply->block.n_listed = reply->n_tokens;
	memcpy((char *)reply + size, kv_shm_tokens(pool->blocks, pool->head, (int32_t)msg->id),
	       reply->n_tokens * sizeof(int32_t));
	size += reply->n_tokens * (uint32_t)sizeof(int32_t);
	kv_wire_init(&reply->head, KV_MSG_BLOCK_SHOWN, size, msg->head.tag);
	kv_peer_send(peer, reply, size, NULL, 0);
}

_Static_assert(sizeof(struct kv_msg_block_shown) + KV_MAX_SESSIONS * sizeof(struct kv_session_stats) <=
		       KV_WIRE_MAX - 16384,
	       "there is room for 4096 tokens beside all sessions");
