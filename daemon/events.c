/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who is told of what, and when. A feed is what has a topic and counts its messages; its streams
 * are the pools in which an engine, or a rank of it, has sessions. AllBlocksCleared is of all that
 * a rank has: so a feed begins anew as a whole.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "daemon/daemon.h"
#include "daemon/events.h"
#include "daemon/events_stream.h"
#include "daemon/log.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"

#define BLOCKS_A_TURN 256 /* of a stream in one iteration of the loop */
#define ROOM_PAUSE    (5 * KV_MSEC)
#define WELCOME_PAUSE KV_SEC
#define TOPIC_BYTES   (2 * KV_NAME_MAX + 8)

struct feed {
	struct kv_link link; /* kv_events::feeds */
	char topic[TOPIC_BYTES];
	uint64_t sequence;
	uint32_t n_streams;
	bool restart; /* all is to be told anew */
};

struct stream {
	struct kv_link link; /* kv_events::streams */
	struct feed *feed;
	char name[KV_NAME_MAX]; /* of the clients */
	int64_t rank;
	uint32_t n_sessions;
	bool is_new; /* its list was made in this turn, and nothing of it is told yet */
	struct kv_event_stream blocks;
};

/* Where the sequence of an engine that has gone goes on if it comes back. */
struct past {
	char topic[TOPIC_BYTES];
	uint64_t sequence;
};

#define PASTS 256 /* the oldest is forgotten */

struct kv_events {
	struct kv_daemon *daemon;
	struct past pasts[PASTS];
	uint32_t n_pasts; /* ever */
	struct kv_event_sender *sender;
	struct kv_task *task;
	struct kv_timer *timer; /* the queue was full: look again */
	struct kv_watch *watch; /* somebody has subscribed */
	struct kv_timer *welcome_timer;
	int64_t welcomed_ns; /* when all was told for that last */
	struct kv_link feeds, streams;
	bool legacy;
	uint64_t n_batches, n_restarts;
};

static struct stream *stream_at(struct kv_link *link)
{
	return kv_container_of(link, struct stream, link);
}

static double wall_clock(void)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Hands what is packed to the sender. False: the queue is full, or no memory; it is lost. */
static bool send_batch(struct kv_events *e, struct feed *feed, struct kv_pack *pack, int64_t rank)
{
	size_t n;
	void *payload = kv_pack_take(pack, wall_clock(), rank, &n);

	if (!payload)
		return false;
	if (!kv_event_sender_push(e->sender, feed->topic, feed->sequence, payload, n)) {
		free(payload);
		return false;
	}
	feed->sequence++;
	e->n_batches++;
	return true;
}

static void restart(struct kv_events *e, struct feed *feed)
{
	if (!feed->restart)
		e->n_restarts++;
	feed->restart = true;
}

/* What the stream has packed. If it can't be sent the feed starts anew. */
static bool send_stream(struct kv_events *e, struct stream *s)
{
	if (!s->blocks.pack.n_events)
		return true;
	if (!send_batch(e, s->feed, &s->blocks.pack, s->rank)) {
		restart(e, s->feed);
		return false;
	}
	kv_event_stream_sent(&s->blocks);
	return true;
}

/* All that a rank was told of is no more, and AllBlocksCleared. False: it couldn't be sent. */
static bool clear_rank(struct kv_events *e, struct feed *feed, int64_t rank)
{
	struct kv_pack pack = {.legacy = e->legacy};

	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next) {
		struct stream *s = stream_at(l);

		if (s->feed == feed && s->rank == rank)
			kv_event_stream_take_back(&s->blocks, &pack);
	}
	kv_pack_cleared(&pack);
	if (!send_batch(e, feed, &pack, rank))
		return false;
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next) {
		struct stream *s = stream_at(l);

		if (s->feed == feed && s->rank == rank)
			kv_event_stream_sent(&s->blocks);
	}
	return true;
}

/* All that a feed has told is no more. False: it couldn't be sent, and is tried again. */
static bool clear_feed(struct kv_events *e, struct feed *feed)
{
	/* What is packed says nothing any more; what it said is gone stands in the streams, too. */
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next) {
		if (stream_at(l)->feed == feed)
			kv_pack_drop(&stream_at(l)->blocks.pack);
	}
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next) {
		struct stream *s = stream_at(l);
		bool is_first = true;

		for (struct kv_link *k = e->streams.next; k != l; k = k->next)
			is_first &= stream_at(k)->feed != s->feed || stream_at(k)->rank != s->rank;
		if (s->feed == feed && is_first && !clear_rank(e, feed, s->rank))
			return false;
	}
	return true;
}

/* All that is cached is to be told. It is put in order once for all streams of a pool that begin in
 * a turn. */
static bool list_all(struct kv_events *e, struct stream *s)
{
	const struct stream *other = NULL;

	for (struct kv_link *l = e->streams.next; !other && l != &e->streams; l = l->next) {
		if (stream_at(l)->is_new && stream_at(l)->blocks.pool == s->blocks.pool)
			other = stream_at(l);
	}
	s->is_new = !(other ? kv_event_stream_stored_alike(&s->blocks, &other->blocks)
			    : kv_event_stream_stored_all(&s->blocks));
	return s->is_new;
}

static void begin_anew(struct kv_events *e)
{
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next)
		stream_at(l)->is_new = false;
	for (struct kv_link *k = e->feeds.next; k != &e->feeds; k = k->next) {
		struct feed *feed = kv_container_of(k, struct feed, link);

		if (!feed->restart || !kv_event_sender_has_room(e->sender) || !clear_feed(e, feed))
			continue;
		feed->restart = false;
		for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next)
			feed->restart |= stream_at(l)->feed == feed && !list_all(e, stream_at(l));
	}
}

/* Return: whether there is more to tell. */
static bool advance(struct kv_events *e, struct stream *s)
{
	bool more;

	if (s->feed->restart || !kv_event_sender_has_room(e->sender))
		return true;
	more = kv_event_stream_pack(&s->blocks, BLOCKS_A_TURN);
	return !send_stream(e, s) || more;
}

static void work(void *arg)
{
	struct kv_events *e = arg;
	bool more = false;

	begin_anew(e);
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next)
		more |= advance(e, stream_at(l));
	if (!more)
		return;
	if (kv_event_sender_has_room(e->sender))
		kv_task_queue(e->task);
	else
		kv_timer_set(e->timer, ROOM_PAUSE);
}

static void removed(void *arg, int32_t id)
{
	struct kv_pool *pool = arg;
	struct kv_events *e = pool->daemon->events;

	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next) {
		struct stream *s = stream_at(l);

		if (s->blocks.pool == pool &&
		    kv_event_stream_left(&s->blocks, id, s->feed->restart))
			kv_task_queue(e->task);
	}
}

static int compare_moves(const void *a, const void *b)
{
	const struct kv_books_move *x = a, *y = b;

	return (x->from > y->from) - (x->from < y->from);
}

void kv_events_moved(struct kv_events *e, struct kv_pool *pool, struct kv_books_move *moves,
		     uint32_t n)
{
	if (!e || !n)
		return;
	qsort(moves, n, sizeof(*moves), compare_moves);
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next) {
		if (stream_at(l)->blocks.pool == pool)
			kv_event_stream_moved(&stream_at(l)->blocks, moves, n);
	}
}

void kv_events_published(struct kv_events *e, struct kv_pool *pool, int32_t id)
{
	if (!e)
		return;
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next) {
		struct stream *s = stream_at(l);

		if (s->blocks.pool != pool || s->feed->restart)
			continue;
		if (kv_event_stream_stored(&s->blocks, id) < 0)
			restart(e, s->feed);
		kv_task_queue(e->task);
	}
}

void kv_events_before_grant(struct kv_events *e, struct kv_pool *pool)
{
	if (!e)
		return;
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next) {
		struct stream *s = stream_at(l);

		if (s->blocks.pool == pool && !s->feed->restart)
			send_stream(e, s);
	}
}

void kv_events_restart(struct kv_events *e, struct kv_pool *pool)
{
	if (!e)
		return;
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next) {
		if (stream_at(l)->blocks.pool == pool)
			stream_at(l)->feed->restart = true;
	}
	kv_task_queue(e->task);
}

static void welcome(void *arg)
{
	struct kv_events *e = arg;

	e->welcomed_ns = kv_loop_now(e->daemon->loop);
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next)
		stream_at(l)->feed->restart = true;
	kv_task_queue(e->task);
}

static void subscribed(uint32_t events, void *arg)
{
	struct kv_events *e = arg;
	int64_t wait = e->welcomed_ns + WELCOME_PAUSE - kv_loop_now(e->daemon->loop);
	uint64_t n;

	(void)events;
	if (read(kv_event_sender_fd(e->sender), &n, sizeof(n)) == sizeof(n))
		kv_timer_set(e->welcome_timer, wait > 0 ? wait : 0);
}

/* ---- feeds ---- */

/* "engine/3" is rank 3 of "engine". */
static int64_t topic_of(const char *name, const struct kv_pool *pool, char topic[TOPIC_BYTES])
{
	const char *slash = strrchr(name, '/');
	size_t n = strlen(name);
	char *end = NULL;
	int64_t rank = 0;

	if (slash && slash[1] >= '0' && slash[1] <= '9') {
		rank = strtol(slash + 1, &end, 10);
		if (!*end)
			n = (size_t)(slash - name);
		else
			rank = 0;
	}
	snprintf(topic, TOPIC_BYTES, "kv@%.*s@%s", (int)n, name,
		 *pool->model ? pool->model : pool->name);
	return rank;
}

static void keep_sequence(struct kv_events *e, const struct feed *feed)
{
	struct past *past = &e->pasts[e->n_pasts++ % PASTS];

	strcpy(past->topic, feed->topic);
	past->sequence = feed->sequence;
}

static void find_sequence(struct kv_events *e, struct feed *feed)
{
	for (uint32_t i = 0; i < PASTS; i++) {
		struct past *past = &e->pasts[i];

		if (strcmp(past->topic, feed->topic))
			continue;
		feed->sequence = past->sequence;
		past->topic[0] = 0;
		return;
	}
}

static struct feed *feed_of(struct kv_events *e, const char *topic)
{
	struct feed *feed;

	for (struct kv_link *l = e->feeds.next; l != &e->feeds; l = l->next) {
		feed = kv_container_of(l, struct feed, link);
		if (!strcmp(feed->topic, topic))
			return feed;
	}
	feed = calloc(1, sizeof(*feed));
	if (!feed)
		return NULL;
	strcpy(feed->topic, topic);
	feed->restart = true;
	find_sequence(e, feed);
	kv_link_init(&feed->link);
	kv_list_append(&e->feeds, &feed->link);
	return feed;
}

static void feed_unref(struct kv_events *e, struct feed *feed)
{
	if (feed->n_streams)
		return;
	keep_sequence(e, feed);
	kv_link_unlink(&feed->link);
	free(feed);
}

/* ---- streams ---- */

static struct stream *stream_of(struct kv_events *e, const struct kv_session *session)
{
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next) {
		struct stream *s = stream_at(l);

		if (s->blocks.pool == session->pool && !strcmp(s->name, session->peer->name))
			return s;
	}
	return NULL;
}

/* The least number that no other pool of the rank has. */
static uint32_t free_group(struct kv_events *e, const struct feed *feed, int64_t rank)
{
	uint32_t group = 0;

	for (struct kv_link *l = e->streams.next; l != &e->streams;) {
		struct stream *s = stream_at(l);

		l = l->next;
		if (s->feed == feed && s->rank == rank && s->blocks.group == group) {
			group++;
			l = e->streams.next;
		}
	}
	return group;
}

static bool has_rank(struct kv_events *e, const struct feed *feed, int64_t rank)
{
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next) {
		if (stream_at(l)->feed == feed && stream_at(l)->rank == rank)
			return true;
	}
	return false;
}

static struct stream *stream_new(struct kv_events *e, struct kv_session *session)
{
	kv_cleanup(kv_freep) struct stream *s = calloc(1, sizeof(*s));
	char topic[TOPIC_BYTES];

	if (!s)
		return NULL;
	s->rank = topic_of(session->peer->name, session->pool, topic);
	s->feed = feed_of(e, topic);
	if (!s->feed)
		return NULL;
	/* A rank begins with AllBlocksCleared, and all of its feed is listed then. */
	s->feed->restart |= !has_rank(e, s->feed, s->rank);
	if (kv_event_stream_init(&s->blocks, session->pool, free_group(e, s->feed, s->rank),
				 e->legacy) < 0 ||
	    (!s->feed->restart && kv_event_stream_stored_all(&s->blocks) < 0)) {
		kv_event_stream_deinit(&s->blocks);
		feed_unref(e, s->feed);
		return NULL;
	}
	s->feed->n_streams++;
	strcpy(s->name, session->peer->name);
	kv_link_init(&s->link);
	kv_list_append(&e->streams, &s->link);
	return kv_steal(s);
}

void kv_events_attached(struct kv_events *e, struct kv_session *session)
{
	struct stream *s;

	if (!e)
		return;
	s = stream_of(e, session);
	if (!s) {
		s = stream_new(e, session);
		if (!s) {
			kv_log(KV_LOG_WARN, "events: no memory for '%s'", session->peer->name);
			return;
		}
		session->pool->books.left = removed;
		session->pool->books.left_arg = session->pool;
		kv_task_queue(e->task);
	}
	s->n_sessions++;
}

static void stream_free(struct kv_events *e, struct stream *s)
{
	struct feed *feed = s->feed;

	kv_event_stream_take_back(&s->blocks, &s->blocks.pack);
	kv_link_unlink(&s->link);
	if (!has_rank(e, feed, s->rank))
		kv_pack_cleared(&s->blocks.pack);
	if (s->blocks.pack.n_events && !send_batch(e, feed, &s->blocks.pack, s->rank))
		kv_log(KV_LOG_WARN, "events: the end of '%s' could not be told", feed->topic);
	feed->n_streams--;
	feed_unref(e, feed);
	kv_event_stream_deinit(&s->blocks);
	free(s);
}

void kv_events_detached(struct kv_events *e, struct kv_session *session)
{
	struct stream *s = e ? stream_of(e, session) : NULL;

	if (s && !--s->n_sessions)
		stream_free(e, s);
}

uint64_t kv_events_batches(const struct kv_events *e)
{
	return e ? e->n_batches : 0;
}

uint64_t kv_events_restarts(const struct kv_events *e)
{
	return e ? e->n_restarts : 0;
}

/* Sessions that were there before: another worker's, which has died. */
static void attach_all(struct kv_events *e)
{
	for (struct kv_link *l = e->daemon->pools.next; l != &e->daemon->pools; l = l->next) {
		struct kv_pool *pool = kv_container_of(l, struct kv_pool, link);

		for (uint32_t i = 0; i < KV_MAX_SESSIONS; i++) {
			if (pool->slots[i])
				kv_events_attached(e, pool->slots[i]);
		}
	}
}

/* ENDPOINT[,KEY=VALUE...]; @words is cut up */
static int parse(char *words, struct kv_events *e, const char **endpoint, const char **replay)
{
	char *word = strtok(words, ",");

	if (!word || !strstr(word, "://"))
		return kv_error(-EINVAL,
				"--events: '%s' given; an endpoint like tcp://*:5557 is needed",
				word ? word : "");
	*endpoint = word;
	while ((word = strtok(NULL, ","))) {
		if (!strncmp(word, "replay=", 7))
			*replay = word + 7;
		else if (!strcmp(word, "encoding=legacy"))
			e->legacy = true;
		else if (strcmp(word, "encoding=current"))
			return kv_error(-EINVAL,
					"--events: '%s' given; replay=ENDPOINT, encoding=current "
					"and encoding=legacy are known",
					word);
	}
	return 0;
}

int kv_events_start(struct kv_daemon *d, const char *text, struct kv_events **ret)
{
	kv_cleanup(kv_freep) char *words = strdup(text);
	struct kv_events *e = calloc(1, sizeof(*e));
	const char *endpoint = NULL, *replay = NULL;
	int r = words && e ? 0 : -ENOMEM;

	if (r < 0) {
		free(e);
		return r;
	}
	e->daemon = d;
	kv_link_init(&e->feeds);
	kv_link_init(&e->streams);
	r = parse(words, e, &endpoint, &replay);
	if (!r)
		r = kv_task_new(d->loop, work, e, &e->task);
	if (!r)
		r = kv_timer_new(d->loop, work, e, &e->timer);
	if (!r)
		r = kv_timer_new(d->loop, welcome, e, &e->welcome_timer);
	if (!r)
		r = kv_event_sender_new(endpoint, replay, &e->sender);
	if (!r)
		r = kv_loop_watch(d->loop, kv_event_sender_fd(e->sender), KV_LOOP_IN, subscribed, e,
				  &e->watch);
	if (r < 0) {
		kv_events_stop(e);
		return r;
	}
	attach_all(e);
	kv_log(KV_LOG_INFO, "events on %s%s%s, %s encoding", endpoint, replay ? ", replay on " : "",
	       replay ? replay : "", e->legacy ? "legacy" : "current");
	*ret = e;
	return 0;
}

struct kv_events *kv_events_stop(struct kv_events *e)
{
	if (!e)
		return NULL;
	while (!kv_link_is_alone(&e->streams))
		stream_free(e, stream_at(e->streams.next));
	kv_task_free(e->task);
	kv_timer_free(e->timer);
	kv_timer_free(e->welcome_timer);
	kv_watch_free(e->watch);
	kv_event_sender_free(e->sender);
	free(e);
	return NULL;
}
