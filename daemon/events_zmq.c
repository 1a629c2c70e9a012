/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The thread that sends events. The loop puts messages into a ring of its own side only, and rings an
 * eventfd; the thread owns both sockets and the history for replay. Nothing here waits for the other.
 *
 *	XPUB	topic | sequence | payload
 *	ROUTER	asks: identity | empty | sequence [| topic]	answers: identity | empty | sequence | payload
 *		..., the last with sequence -1 and nothing in it
 *
 * A history of at most HISTORY_MAX messages and HISTORY_BYTES for all streams. Without a topic the
 * answers are those of the stream that was sent last, which is right where there is one.
 */
#include <endian.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <zmq.h>

#include "daemon/events.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"

#define QUEUE 4096u /* messages; a power of two */
#define HIGH_WATER 100000
#define HISTORY_MAX 10000u
#define HISTORY_BYTES ((size_t)64 << 20)
#define LINGER_MS 200
#define TOPIC_BYTES 160

struct message {
	char topic[TOPIC_BYTES];
	uint64_t sequence;
	void *payload;
	size_t n;
};

struct kv_event_sender {
	void *context, *pub, *router;
	int wake;	/* eventfd, for the thread */
	int subscribed; /* eventfd, for the loop */
	pthread_t thread;
	bool started;
	atomic_bool stop;
	atomic_uint head; /* the loop writes: messages put in */
	atomic_uint tail; /* the thread writes: messages taken out */
	struct message *queue;
	/* The thread's. */
	struct message *history; /* [HISTORY_MAX], a ring */
	uint32_t first, n_history;
	size_t history_bytes;
};

int kv_event_sender_fd(const struct kv_event_sender *s)
{
	return s->subscribed;
}

bool kv_event_sender_has_room(const struct kv_event_sender *s)
{
	return atomic_load_explicit(&s->head, memory_order_relaxed) -
		       atomic_load_explicit(&s->tail, memory_order_acquire) < QUEUE / 2;
}

bool kv_event_sender_push(struct kv_event_sender *s, const char *topic, uint64_t sequence, void *payload,
			  size_t n)
{
	unsigned head = atomic_load_explicit(&s->head, memory_order_relaxed);
	struct message *m = &s->queue[head % QUEUE];
	uint64_t one = 1;

	/* Pairs with the release in drain(): a place below tail is empty. */
	if (head - atomic_load_explicit(&s->tail, memory_order_acquire) == QUEUE)
		return false;
	*m = (struct message){ .sequence = sequence, .payload = payload, .n = n };
	strncpy(m->topic, topic, sizeof(m->topic) - 1);
	atomic_store_explicit(&s->head, head + 1, memory_order_release);
	if (write(s->wake, &one, sizeof(one)) < 0)
		return true; /* it is set already: the thread will look */
	return true;
}

static void drop_oldest(struct kv_event_sender *s)
{
	struct message *m = &s->history[s->first];

	s->history_bytes -= m->n;
	free(m->payload);
	s->first = (s->first + 1) % HISTORY_MAX;
	s->n_history--;
}

static void remember(struct kv_event_sender *s, const struct message *m)
{
	while (s->n_history && (s->n_history == HISTORY_MAX || s->history_bytes + m->n > HISTORY_BYTES))
		drop_oldest(s);
	s->history[(s->first + s->n_history++) % HISTORY_MAX] = *m;
	s->history_bytes += m->n;
}

/* It never waits: what a subscriber's queue has no room for it doesn't get. */
static void send_message(struct kv_event_sender *s, const struct message *m)
{
	uint64_t sequence = htobe64(m->sequence);

	if (zmq_send(s->pub, m->topic, strlen(m->topic), ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0 ||
	    zmq_send(s->pub, &sequence, sizeof(sequence), ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
		return;
	zmq_send(s->pub, m->payload, m->n, ZMQ_DONTWAIT);
}

static void drain(struct kv_event_sender *s)
{
	unsigned tail = atomic_load_explicit(&s->tail, memory_order_relaxed);

	/* Pairs with the release in push: messages below head are whole. */
	while (tail != atomic_load_explicit(&s->head, memory_order_acquire)) {
		struct message m = s->queue[tail % QUEUE];

		atomic_store_explicit(&s->tail, ++tail, memory_order_release);
		send_message(s, &m);
		if (s->router)
			remember(s, &m);
		else
			free(m.payload);
	}
}

static int answer(struct kv_event_sender *s, zmq_msg_t *identity, uint64_t sequence, const void *payload,
		  size_t n)
{
	uint64_t big = htobe64(sequence);

	if (zmq_send(s->router, zmq_msg_data(identity), zmq_msg_size(identity), ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0 ||
	    zmq_send(s->router, "", 0, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0 ||
	    zmq_send(s->router, &big, sizeof(big), ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
		return -errno;
	return zmq_send(s->router, payload, n, ZMQ_DONTWAIT) < 0 ? -errno : 0;
}

static void replay(struct kv_event_sender *s, zmq_msg_t *identity, uint64_t from, const char *topic)
{
	if (!*topic && s->n_history)
		topic = s->history[(s->first + s->n_history - 1) % HISTORY_MAX].topic;
	for (uint32_t i = 0; i < s->n_history; i++) {
		const struct message *m = &s->history[(s->first + i) % HISTORY_MAX];

		if (m->sequence >= from && !strcmp(m->topic, topic) &&
		    answer(s, identity, m->sequence, m->payload, m->n) < 0)
			return;
	}
	answer(s, identity, (uint64_t)-1, "", 0);
}

/* One request; frames that can't be are passed over. */
static void serve_replay(struct kv_event_sender *s)
{
	zmq_msg_t identity;
	char topic[TOPIC_BYTES] = "";
	uint64_t from = 0;
	bool more, good = false;

	zmq_msg_init(&identity);
	if (zmq_msg_recv(&identity, s->router, ZMQ_DONTWAIT) < 0)
		goto out;
	more = zmq_msg_more(&identity);
	for (int frame = 1; more; frame++) {
		zmq_msg_t part;

		zmq_msg_init(&part);
		if (zmq_msg_recv(&part, s->router, ZMQ_DONTWAIT) < 0) {
			zmq_msg_close(&part);
			break;
		}
		more = zmq_msg_more(&part);
		if (frame == 2 && zmq_msg_size(&part) == sizeof(from)) {
			memcpy(&from, zmq_msg_data(&part), sizeof(from));
			from = be64toh(from);
			good = true;
		} else if (frame == 3 && zmq_msg_size(&part) < sizeof(topic)) {
			memcpy(topic, zmq_msg_data(&part), zmq_msg_size(&part));
		}
		zmq_msg_close(&part);
	}
	if (good)
		replay(s, &identity, from, topic);
out:
	zmq_msg_close(&identity);
}

/* An XPUB socket says who comes (1) and goes (0). */
static void hear_subscribers(struct kv_event_sender *s)
{
	char what[TOPIC_BYTES];
	uint64_t one = 1;
	bool came = false;
	int n;

	while ((n = zmq_recv(s->pub, what, sizeof(what), ZMQ_DONTWAIT)) >= 0)
		came |= n && what[0] == 1;
	if (came && write(s->subscribed, &one, sizeof(one)) < 0)
		return; /* it is set already */
}

static void *run(void *arg)
{
	struct kv_event_sender *s = arg;
	zmq_pollitem_t items[3] = { { .fd = s->wake, .events = ZMQ_POLLIN },
				    { .socket = s->pub, .events = ZMQ_POLLIN },
				    { .socket = s->router, .events = ZMQ_POLLIN } };
	uint64_t n;

	while (!atomic_load(&s->stop)) {
		if (zmq_poll(items, s->router ? 3 : 2, -1) < 0 && errno != EINTR)
			break;
		if (items[0].revents && read(s->wake, &n, sizeof(n)) < 0 && errno != EAGAIN)
			break;
		drain(s);
		if (items[1].revents)
			hear_subscribers(s);
		if (s->router && items[2].revents)
			serve_replay(s);
	}
	drain(s);
	return NULL;
}

static int bind_socket(struct kv_event_sender *s, int type, const char *endpoint, void **ret)
{
	int linger = LINGER_MS, high_water = HIGH_WATER, verbose = 1;

	*ret = zmq_socket(s->context, type);
	if (!*ret)
		return kv_error(-errno, "--events: %s", zmq_strerror(errno));
	zmq_setsockopt(*ret, ZMQ_LINGER, &linger, sizeof(linger));
	zmq_setsockopt(*ret, ZMQ_SNDHWM, &high_water, sizeof(high_water));
	if (type == ZMQ_XPUB) /* each subscription is heard of, not the first of its kind alone */
		zmq_setsockopt(*ret, ZMQ_XPUB_VERBOSE, &verbose, sizeof(verbose));
	if (zmq_bind(*ret, endpoint) < 0)
		return kv_error(-errno, "--events: '%s': %s", endpoint, zmq_strerror(errno));
	return 0;
}

/* Signals are the loop's: no thread made from here takes one. */
static int start(struct kv_event_sender *s, const char *endpoint, const char *replay_endpoint)
{
	sigset_t all, before;
	int r;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	r = bind_socket(s, ZMQ_XPUB, endpoint, &s->pub);
	if (!r && replay_endpoint)
		r = bind_socket(s, ZMQ_ROUTER, replay_endpoint, &s->router);
	if (!r) {
		r = -pthread_create(&s->thread, NULL, run, s);
		s->started = !r;
	}
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return r;
}

int kv_event_sender_new(const char *endpoint, const char *replay_endpoint, struct kv_event_sender **ret)
{
	struct kv_event_sender *s = calloc(1, sizeof(*s));
	int r = -ENOMEM;

	if (!s)
		return r;
	s->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	s->subscribed = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	s->context = zmq_ctx_new();
	s->queue = calloc(QUEUE, sizeof(*s->queue));
	s->history = calloc(HISTORY_MAX, sizeof(*s->history));
	if (s->wake >= 0 && s->subscribed >= 0 && s->context && s->queue && s->history)
		r = start(s, endpoint, replay_endpoint);
	if (r < 0) {
		kv_event_sender_free(s);
		return r;
	}
	*ret = s;
	return 0;
}

struct kv_event_sender *kv_event_sender_free(struct kv_event_sender *s)
{
	uint64_t one = 1;

	if (!s)
		return NULL;
	if (s->started) {
		atomic_store(&s->stop, true);
		/* It is woken by what is set already, if it can't be set again. */
		if (write(s->wake, &one, sizeof(one)) >= 0 || errno == EAGAIN)
			pthread_join(s->thread, NULL);
	}
	while (s->n_history)
		drop_oldest(s);
	if (s->pub)
		zmq_close(s->pub);
	if (s->router)
		zmq_close(s->router);
	if (s->context)
		zmq_ctx_term(s->context); /* at most LINGER_MS */
	kv_close(s->wake);
	kv_close(s->subscribed);
	free(s->queue);
	free(s->history);
	free(s);
	return NULL;
}
