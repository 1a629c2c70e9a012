/* SPDX-License-Identifier: Apache-2.0 */
/*
 * KV events for routers: which blocks each engine can find in the cache, told over ZMQ in the messages
 * that vLLM's consumers read.
 *
 *   feed     kv@NAME@MODEL, the topic: what one engine can reach. A client name that ends with /N is
 *            data-parallel rank N of it (and no /N is in the topic).
 *   stream   of a feed: the sessions of one client name in one pool, which is a group of the rank
 *   message  topic | sequence, 8 bytes big-endian, from 0 in each feed | MessagePack payload
 *
 * A rank begins with AllBlocksCleared and a BlockStored for all that is cached, parents before
 * children; then a block is stored when its publishing is done, and removed before it can be granted
 * to anyone. It ends with AllBlocksCleared when its last session does. What was stored before an
 * AllBlocksCleared is removed by name in the same message: some consumers pass over AllBlocksCleared.
 *
 * Who subscribes late is told as well: a new subscription makes all streams begin anew, once a second at
 * most.
 *
 * The loop never waits. It encodes events into a queue of bounded size, from which a thread of its
 * own sends. While the queue is full, stored events wait in the stream's list; a removal can't wait: if
 * one finds the queue full, the stream starts anew (AllBlocksCleared, then all that is cached) as soon
 * as there is room. What ZMQ drops for slow subscribers (its high-water mark is 100,000 messages) they
 * see as a gap in the sequence, and can ask the replay socket for.
 */
#ifndef KV_DAEMON_EVENTS_H
#define KV_DAEMON_EVENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kv_books_move;
struct kv_daemon;
struct kv_events;
struct kv_pool;
struct kv_session;

/**
 * kv_events_start() - publish events as @text says: ENDPOINT[,replay=ENDPOINT][,encoding=current|legacy]
 *
 * Return: 0; -EINVAL, -ENOTSUP (built without ZMQ), or what binding the sockets gave; the text says.
 */
int kv_events_start(struct kv_daemon *d, const char *text, struct kv_events **ret);
struct kv_events *kv_events_stop(struct kv_events *events); /* NULL is allowed; returns NULL */

/* What happens; @events may be NULL: then nobody is told. */
void kv_events_attached(struct kv_events *events, struct kv_session *session);
void kv_events_detached(struct kv_events *events, struct kv_session *session);
void kv_events_published(struct kv_events *events, struct kv_pool *pool, int32_t id);
/* kv_events_moved() - @moves were made, and are put in another order here */
void kv_events_moved(struct kv_events *events, struct kv_pool *pool, struct kv_books_move *moves, uint32_t n);
/* kv_events_before_grant() - removals are in the queue before a block can be used again */
void kv_events_before_grant(struct kv_events *events, struct kv_pool *pool);
void kv_events_restart(struct kv_events *events, struct kv_pool *pool); /* all of it, anew */

uint64_t kv_events_batches(const struct kv_events *events);
uint64_t kv_events_restarts(const struct kv_events *events); /* because the queue was full */

/* ---- events_zmq.c: the thread that sends, or events_zmq_absent.c ---- */

struct kv_event_sender;

int kv_event_sender_new(const char *endpoint, const char *replay, struct kv_event_sender **ret);
/* kv_event_sender_push() - false: the queue is full. Else @payload is the sender's, to be freed. */
bool kv_event_sender_push(struct kv_event_sender *sender, const char *topic, uint64_t sequence,
			  void *payload, size_t n);
int kv_event_sender_fd(const struct kv_event_sender *sender); /* readable: somebody has subscribed */
bool kv_event_sender_has_room(const struct kv_event_sender *sender);
/* Sends what is queued, for a moment at most. */
struct kv_event_sender *kv_event_sender_free(struct kv_event_sender *sender);

#endif
