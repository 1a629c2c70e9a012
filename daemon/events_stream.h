/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pool as an engine finds it, as events: what has to be told, what was told, what is no more.
 * When messages are sent, and under which number, is for events.c.
 *
 * What is stored goes through a list, [at, n) of which has still to be told: (serial, id) in order
 * of serials, in which parents stand before their children. A block that isn't what the list says
 * any more when its turn comes has been evicted meanwhile, and is left out.
 *
 * What was told is a bit for each block. What is no more, and of which no message that was sent
 * says so, is in `gone`. Before AllBlocksCleared all of it is taken back by name: some consumers
 * pass over AllBlocksCleared.
 */
#ifndef KV_DAEMON_EVENTS_STREAM_H
#define KV_DAEMON_EVENTS_STREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/events_pack.h"

struct kv_books_move;
struct kv_pool;

struct kv_event_stream {
	struct kv_pool *pool;
	uint32_t group; /* which of the engine's pools */
	struct kv_event_entry *list;
	size_t at, n, room;
	uint64_t *told; /* a bit for each block that consumers take for stored */
	uint64_t *gone; /* hashes */
	size_t n_gone, gone_room;
	struct kv_pack pack;
};

int kv_event_stream_init(struct kv_event_stream *s, struct kv_pool *pool, uint32_t group,
			 bool legacy);
void kv_event_stream_deinit(struct kv_event_stream *s);

/* kv_event_stream_stored() - block @id is to be told. -ENOMEM; -E2BIG: nobody takes what is listed
 * already */
int kv_event_stream_stored(struct kv_event_stream *s, int32_t id);
/* kv_event_stream_stored_all() - all that is cached is to be told. 0; -ENOMEM */
int kv_event_stream_stored_all(struct kv_event_stream *s);
/* kv_event_stream_stored_alike() - what @other has listed just now, of the same pool. 0; -ENOMEM */
int kv_event_stream_stored_alike(struct kv_event_stream *s, const struct kv_event_stream *other);
/* kv_event_stream_left() - false: it was never told. Else that is in the pack, but if @in_doubt,
 * when all will be taken back */
bool kv_event_stream_left(struct kv_event_stream *s, int32_t id, bool in_doubt);
/* kv_event_stream_moved() - @moves, sorted by `from`, were made */
void kv_event_stream_moved(struct kv_event_stream *s, const struct kv_books_move *moves,
			   uint32_t n);
/* kv_event_stream_pack() - from the list, @most blocks. Return: whether there is more. */
bool kv_event_stream_pack(struct kv_event_stream *s, size_t most);
/* kv_event_stream_take_back() - all that was told is no more, by name, into @pack */
void kv_event_stream_take_back(struct kv_event_stream *s, struct kv_pack *pack);
/* kv_event_stream_sent() - what was packed is with the sender */
static inline void kv_event_stream_sent(struct kv_event_stream *s)
{
	s->n_gone = 0;
}

#endif
