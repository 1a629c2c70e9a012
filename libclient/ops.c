/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the daemon is told without waiting: ops in a ring that it works off, and a kick that wakes it.
 *
 * A full ring is worked off before the next message is answered, so one ping makes room. Where the daemon
 * doesn't answer (it stands still: a debugger, a suspended machine) ops are kept in a list of ours from then
 * on, in their order, and sent by later calls as the ring takes them: nothing waits twice for it, and
 * nothing is lost.
 */
#include <errno.h>
#include <stdlib.h>

#include "include/internal/killpoint.h"
#include "include/internal/ring.h"
#include "libclient/internal.h"

int kv_pool_lost(struct kv_pool *pool, int r)
{
	if (r == -ECONNRESET || r == -EPROTO)
		pool->lost = true;
	return r;
}

static int64_t room_of(const struct kv_pool *pool)
{
	return kv_ring_writable(&pool->session->ops, pool->op_head, pool->op_capacity);
}

static void put(struct kv_pool *pool, const struct kv_op *op)
{
	pool->ops[pool->op_head & (pool->op_capacity - 1)] = *op;
	KV_KILLPOINT(client_op_written);
	kv_ring_post(&pool->session->ops, ++pool->op_head);
	KV_KILLPOINT(client_op_posted);
	pool->ops_posted = true;
}

static void forget_late(struct kv_pool *pool)
{
	kv_add_relaxed(&pool->client->n_late, -(uint32_t)(pool->n_late - pool->late_at));
	pool->late_at = pool->n_late = 0;
}

/* As many as there is room for. */
static void send_late(struct kv_pool *pool)
{
	int64_t room = pool->n_late ? room_of(pool) : 0;

	for (; room > 0 && pool->late_at < pool->n_late; room--) {
		put(pool, &pool->late[pool->late_at++]);
		kv_add_relaxed(&pool->client->n_late, -1u);
	}
	if (pool->late_at == pool->n_late)
		forget_late(pool);
}

static int keep(struct kv_pool *pool, const struct kv_op *op)
{
	int r = kv_seq_grow((void **)&pool->late, &pool->late_room, pool->n_late + 1, sizeof(*op));

	if (r < 0)
		return r;
	pool->late[pool->n_late++] = *op;
	kv_add_relaxed(&pool->client->n_late, 1);
	return 0;
}

/* Any message makes the daemon work the ring off before it answers. */
static int make_room(struct kv_pool *pool)
{
	struct kv_msg_plain ping = { .head = { .type = KV_MSG_PING, .size = sizeof(ping) } };

	return kv_connection_call(&pool->connection, &ping, KV_MSG_OK, sizeof(ping), NULL, 0, NULL,
				  kv_deadline(0));
}

int kv_ops_post(struct kv_pool *pool, const struct kv_op *op)
{
	int64_t room;
	int r;

	if (__builtin_expect(pool->n_late, 0)) {
		send_late(pool);
		if (pool->n_late)
			return keep(pool, op);
	}
	room = room_of(pool);
	if (room == 0) {
		r = make_room(pool);
		if (r == -ECONNRESET || r == -EPROTO)
			return kv_pool_lost(pool, r);
		room = room_of(pool);
		if (r < 0 && room == 0)
			return keep(pool, op);
	}
	if (room <= 0)
		return kv_pool_lost(pool, kv_error(-EPROTO, "daemon: its ring of ops makes no sense"));
	put(pool, op);
	return 0;
}

void kv_ops_try(struct kv_pool *pool, const struct kv_op *op)
{
	if (!pool->n_late && room_of(pool) > pool->op_capacity / 2)
		kv_ops_post(pool, op);
	else
		kv_ops_kick(pool);
}

void kv_ops_give(struct kv_pool *pool, kv_block_id id)
{
	struct kv_op op = { .kind = KV_OP_GIVE, .id = id };

	/* If the daemon is gone, so are its books: a restart rebuilds them without this lease. */
	kv_ops_post(pool, &op);
}

void kv_ops_kick(struct kv_pool *pool)
{
	struct kv_msg_plain kick = { .head = { .type = KV_MSG_KICK, .size = sizeof(kick) } };
	int r;

	if (__builtin_expect(pool->n_late, 0))
		send_late(pool);
	if (!pool->ops_posted)
		return;
	pool->ops_posted = false;
	/* Pairs with the store in the daemon's drain: if it has not looked since, it will. */
	if (kv_exchange_seq(&pool->session->kick, 1))
		return;
	KV_KILLPOINT(client_kick_set);
	r = kv_connection_post(&pool->connection, &kick);
	if (r > 0) {
		/* A kick that says that it was sent, and wasn't, would be the last one. */
		kv_store_seq(&pool->session->kick, 0);
		pool->ops_posted = true;
	}
	kv_pool_lost(pool, r);
}

void kv_ops_finish(struct kv_pool *pool)
{
	size_t before;

	do {
		before = pool->n_late - pool->late_at;
		if (!before || make_room(pool) < 0)
			return;
		send_late(pool);
	} while (pool->n_late - pool->late_at < before);
}

void kv_ops_deinit(struct kv_pool *pool)
{
	forget_late(pool);
	free(pool->late);
}
