/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams of events. What is stored goes through a stream's list, [at, n) of which has still to be
 * told: (serial, id) in order of serials, in which parents stand before their children. A block that
 * isn't what the list says any more when its turn comes has been evicted meanwhile, and is left out.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "daemon/daemon.h"
#include "daemon/events.h"
#include "daemon/events_pack.h"
#include "daemon/log.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"

#define BLOCKS_A_TURN 256 /* of a stream in one iteration of the loop */
#define RUN_MAX 64	  /* blocks of one event */
#define ROOM_PAUSE (5 * KV_MSEC)
#define WELCOME_PAUSE KV_SEC
#define TOPIC_BYTES (2 * KV_NAME_MAX + 8)

struct entry {
	uint64_t serial;
	int32_t id;
};

struct stream {
	struct kv_link link; /* kv_events::streams */
	struct kv_pool *pool;
	char name[KV_NAME_MAX]; /* of the clients */
	char topic[TOPIC_BYTES];
	int64_t rank;
	uint32_t n_sessions;
	uint64_t sequence;
	bool restart; /* all is to be told anew */
	bool is_new;  /* its list was made in this turn, and nothing of it is told yet */
	struct entry *list;
	size_t at, n, room;
	struct kv_pack pack;
};

/* Where the sequence of an engine that has gone goes on if it comes back. */
struct past {
	char topic[TOPIC_BYTES];
	int64_t rank;
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
	struct kv_link streams;
	bool legacy;
	uint64_t n_batches, n_restarts;
};

static double wall_clock(void)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static const char *medium_of(const struct kv_pool *pool)
{
	return pool->daemon->config.host ? "CPU" : "GPU";
}

static const char *kind_of(const struct kv_pool *pool)
{
	for (uint32_t i = 0; i < pool->layout.n_components; i++) {
		if (pool->layout.components[i].role != KV_ROLE_STATE)
			return "full_attention";
	}
	return "mamba";
}

/* Hands what is packed to the sender. False: the queue is full, or no memory; it is lost. */
static bool send_batch(struct kv_events *e, struct stream *s)
{
	size_t n;
	void *payload = kv_pack_take(&s->pack, wall_clock(), s->rank, &n);

	if (!payload)
		return false;
	if (!kv_event_sender_push(e->sender, s->topic, s->sequence, payload, n)) {
		free(payload);
		return false;
	}
	s->sequence++;
	e->n_batches++;
	return true;
}

static int compare(const void *a, const void *b)
{
	const struct entry *x = a, *y = b;

	return (x->serial > y->serial) - (x->serial < y->serial);
}

static int make_room(struct stream *s, size_t n)
{
	size_t room = s->room ? s->room : 64;
	void *list;

	if (n <= s->room)
		return 0;
	while (room < n)
		room *= 2;
	list = realloc(s->list, room * sizeof(*s->list));
	if (!list)
		return -ENOMEM;
	s->list = list;
	s->room = room;
	return 0;
}

static bool is_reachable(const struct kv_books *b, int32_t id)
{
	return b->books[id].state == KV_BLOCK_CACHED && !b->books[id].stale;
}

/* The stream's list becomes all that is cached. */
static int list_all(struct stream *s)
{
	const struct kv_books *b = &s->pool->books;
	int r = make_room(s, b->n_cached);

	s->at = s->n = 0;
	if (r < 0)
		return r;
	for (uint32_t id = 0; id < b->head->id_limit && s->n < s->room; id++) {
		if (is_reachable(b, (int32_t)id))
			s->list[s->n++] = (struct entry){ b->books[id].serial, (int32_t)id };
	}
	qsort(s->list, s->n, sizeof(*s->list), compare);
	return 0;
}

/* Of the same pool, and listed just now. */
static int list_alike(struct stream *s, const struct stream *other)
{
	int r = make_room(s, other->n);

	s->at = s->n = 0;
	if (r < 0 || !other->n)
		return r;
	memcpy(s->list, other->list, other->n * sizeof(*s->list));
	s->n = other->n;
	return 0;
}

/* From the list's next on: blocks that follow one another, as one event. Return: entries used. */
static size_t pack_run(struct stream *s, size_t most)
{
	const struct kv_books *b = &s->pool->books;
	uint64_t hashes[RUN_MAX], extras[RUN_MAX], before = 0;
	const int32_t *tokens[RUN_MAX];
	struct kv_stored event = { .block_tokens = s->pool->layout.block_tokens,
				   .hashes = hashes,
				   .tokens = tokens,
				   .extras = extras,
				   .medium = medium_of(s->pool),
				   .kind = kind_of(s->pool) };
	size_t used = 0;

	for (; used < most && event.n_blocks < RUN_MAX; used++) {
		const struct entry *entry = &s->list[s->at + used];
		const struct kv_book *book = &b->books[entry->id];
		uint32_t i = event.n_blocks;

		if (!is_reachable(b, entry->id) || book->serial != entry->serial)
			continue;
		if (i && (book->parent < 0 || b->books[book->parent].serial != before))
			break;
		if (!i && book->parent >= 0) {
			event.has_parent = true;
			event.parent = b->books[book->parent].key.lo;
		}
		hashes[i] = book->key.lo;
		extras[i] = book->parent_serial & KV_SERIAL_ROW ? book->key.hi : 0;
		tokens[i] = kv_shm_tokens(s->pool->blocks, s->pool->head, entry->id);
		before = book->serial;
		event.n_blocks++;
	}
	if (event.n_blocks)
		kv_pack_stored(&s->pack, &event);
	return used;
}

/*
 * Streams that begin anew: that all is gone is told, and all that is cached is listed; it is put in order once
 * for all streams of a pool.
 */
static void begin_anew(struct kv_events *e)
{
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next) {
		struct stream *s = kv_container_of(l, struct stream, link), *other = NULL;

		s->is_new = false;
		if (!s->restart || !kv_event_sender_has_room(e->sender))
			continue;
		s->pack.n_events = 0;
		s->pack.n = 0;
		kv_pack_cleared(&s->pack);
		if (!send_batch(e, s))
			continue;
		for (struct kv_link *k = e->streams.next; !other && k != l; k = k->next) {
			other = kv_container_of(k, struct stream, link);
			if (!other->is_new || other->pool != s->pool)
				other = NULL;
		}
		s->is_new = !(other ? list_alike(s, other) : list_all(s));
		s->restart = !s->is_new;
	}
}

/* Return: whether there is more to tell. */
static bool advance(struct kv_events *e, struct stream *s)
{
	size_t turn = BLOCKS_A_TURN;

	if (s->restart || !kv_event_sender_has_room(e->sender))
		return true;
	while (s->at < s->n && turn) {
		size_t left = s->n - s->at, used = pack_run(s, left < turn ? left : turn);

		s->at += used;
		turn -= used < turn ? used : turn;
	}
	if (s->pack.n_events && !send_batch(e, s)) {
		s->restart = true;
		e->n_restarts++;
		return true;
	}
	if (s->at == s->n)
		s->at = s->n = 0;
	return s->n;
}

static void work(void *arg)
{
	struct kv_events *e = arg;
	bool more = false;

	begin_anew(e);
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next)
		more |= advance(e, kv_container_of(l, struct stream, link));
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
	const struct kv_book *book = &pool->books.books[id];

	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next) {
		struct stream *s = kv_container_of(l, struct stream, link);

		if (s->pool != pool || s->restart)
			continue;
		kv_pack_removed(&s->pack, book->key.lo, medium_of(pool));
		kv_task_queue(e->task);
	}
}

void kv_events_published(struct kv_events *e, struct kv_pool *pool, int32_t id)
{
	if (!e)
		return;
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next) {
		struct stream *s = kv_container_of(l, struct stream, link);

		if (s->pool != pool || s->restart)
			continue;
		/* Nobody takes it: starting anew is shorter than a list of what came and went. */
		if (s->n > 2 * (size_t)pool->books.n_total + 64 || make_room(s, s->n + 1) < 0) {
			s->restart = true;
			e->n_restarts++;
		} else {
			s->list[s->n++] = (struct entry){ pool->books.books[id].serial, id };
		}
		kv_task_queue(e->task);
	}
}

void kv_events_before_grant(struct kv_events *e, struct kv_pool *pool)
{
	if (!e)
		return;
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next) {
		struct stream *s = kv_container_of(l, struct stream, link);

		if (s->pool == pool && s->pack.n_events && !s->restart && !send_batch(e, s)) {
			s->restart = true;
			e->n_restarts++;
		}
	}
}

void kv_events_restart(struct kv_events *e, struct kv_pool *pool)
{
	if (!e)
		return;
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next) {
		struct stream *s = kv_container_of(l, struct stream, link);

		if (s->pool == pool)
			s->restart = true;
	}
	kv_task_queue(e->task);
}

static void welcome(void *arg)
{
	struct kv_events *e = arg;

	e->welcomed_ns = kv_loop_now(e->daemon->loop);
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next)
		kv_container_of(l, struct stream, link)->restart = true;
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

/* "engine/3" is rank 3 of "engine". */
static void set_topic(struct stream *s)
{
	const char *slash = strrchr(s->name, '/');
	char *end = NULL;
	size_t n = strlen(s->name);

	if (slash && slash[1] >= '0' && slash[1] <= '9') {
		s->rank = strtol(slash + 1, &end, 10);
		if (!*end)
			n = (size_t)(slash - s->name);
		else
			s->rank = 0;
	}
	snprintf(s->topic, sizeof(s->topic), "kv@%.*s@%s", (int)n, s->name,
		 *s->pool->model ? s->pool->model : s->pool->name);
}

static void keep_sequence(struct kv_events *e, const struct stream *s)
{
	struct past *past = &e->pasts[e->n_pasts++ % PASTS];

	strcpy(past->topic, s->topic);
	past->rank = s->rank;
	past->sequence = s->sequence;
}

static void find_sequence(struct kv_events *e, struct stream *s)
{
	for (uint32_t i = 0; i < PASTS; i++) {
		struct past *past = &e->pasts[i];

		if (past->rank != s->rank || strcmp(past->topic, s->topic))
			continue;
		s->sequence = past->sequence;
		past->topic[0] = 0;
		return;
	}
}

static struct stream *stream_of(struct kv_events *e, const struct kv_session *session)
{
	for (struct kv_link *l = e->streams.next; l != &e->streams; l = l->next) {
		struct stream *s = kv_container_of(l, struct stream, link);

		if (s->pool == session->pool && !strcmp(s->name, session->peer->name))
			return s;
	}
	return NULL;
}

void kv_events_attached(struct kv_events *e, struct kv_session *session)
{
	struct stream *s;

	if (!e)
		return;
	s = stream_of(e, session);
	if (!s) {
		s = calloc(1, sizeof(*s));
		if (!s) {
			kv_log(KV_LOG_WARN, "events: no memory for '%s'", session->peer->name);
			return;
		}
		s->pool = session->pool;
		s->restart = true;
		s->pack.legacy = e->legacy;
		strcpy(s->name, session->peer->name);
		set_topic(s);
		find_sequence(e, s);
		kv_link_init(&s->link);
		kv_list_append(&e->streams, &s->link);
		session->pool->books.left = removed;
		session->pool->books.left_arg = session->pool;
		kv_task_queue(e->task);
	}
	s->n_sessions++;
}

static void stream_free(struct kv_events *e, struct stream *s)
{
	size_t n;

	kv_pack_cleared(&s->pack);
	if (!send_batch(e, s))
		kv_log(KV_LOG_WARN, "events: the end of '%s' could not be told", s->topic);
	keep_sequence(e, s);
	kv_link_unlink(&s->link);
	free(kv_pack_take(&s->pack, 0, 0, &n));
	free(s->list);
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
		return kv_error(-EINVAL, "--events: '%s' given; an endpoint like tcp://*:5557 is needed",
				word ? word : "");
	*endpoint = word;
	while ((word = strtok(NULL, ","))) {
		if (!strncmp(word, "replay=", 7))
			*replay = word + 7;
		else if (!strcmp(word, "encoding=legacy"))
			e->legacy = true;
		else if (strcmp(word, "encoding=current"))
			return kv_error(-EINVAL, "--events: '%s' given; replay=ENDPOINT, encoding=current "
					"and encoding=legacy are known", word);
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
		stream_free(e, kv_container_of(e->streams.next, struct stream, link));
	kv_task_free(e->task);
	kv_timer_free(e->timer);
	kv_timer_free(e->welcome_timer);
	kv_watch_free(e->watch);
	kv_event_sender_free(e->sender);
	free(e);
	return NULL;
}
