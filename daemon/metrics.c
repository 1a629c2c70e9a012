/* SPDX-License-Identifier: Apache-2.0 */
/* Enough of HTTP/1.1 to answer GET: one request a connection, which is closed after the answer. */
#include <errno.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/daemon.h"
#include "daemon/log.h"
#include "daemon/metrics.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"

#define METRICS_MAX 16 /* connections */
#define METRICS_DEADLINE (10 * KV_SEC)
#define REQUEST_MAX 8192 /* bytes of a request's head */

struct connection {
	struct kv_link link; /* kv_metrics::connections */
	struct kv_metrics *metrics;
	int fd;
	struct kv_watch *watch;
	struct kv_timer *timer;
	size_t n_read;
	char *answer; /* NULL: still reading */
	size_t len, sent;
	char request[REQUEST_MAX + 1];
};

struct kv_metrics {
	struct kv_daemon *daemon;
	int fd;
	struct kv_watch *watch;
	struct kv_link connections;
	uint32_t n_connections;
};

static struct connection *connection_free(struct connection *c)
{
	kv_watch_free(c->watch);
	kv_timer_free(c->timer);
	kv_close(c->fd);
	kv_link_unlink(&c->link);
	c->metrics->n_connections--;
	free(c->answer);
	free(c);
	return NULL;
}

/* Sends what the socket takes. */
static void send_more(struct connection *c)
{
	while (c->sent < c->len) {
		ssize_t n = send(c->fd, c->answer + c->sent, c->len - c->sent,
				 MSG_DONTWAIT | MSG_NOSIGNAL);

		if (n < 0 && errno == EAGAIN) {
			if (kv_watch_events(c->watch, KV_LOOP_OUT) < 0)
				connection_free(c);
			return;
		}
		if (n <= 0) {
			connection_free(c);
			return;
		}
		c->sent += (size_t)n;
	}
	connection_free(c);
}

static int answer(struct connection *c, const char *status, const char *type, const char *body,
		  size_t len, bool with_body)
{
	FILE *out = open_memstream(&c->answer, &c->len);

	if (!out)
		return -ENOMEM;
	fprintf(out, "HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n"
		"Connection: close\r\n\r\n", status, type, len);
	if (with_body)
		fwrite(body, 1, len, out);
	return fclose(out) ? -ENOMEM : 0;
}

static int refuse(struct connection *c, const char *status)
{
	return answer(c, status, "text/plain; charset=utf-8", status, strlen(status), true);
}

/* Does a header of the request hold a word? Both in lower case or not. */
static bool header_has(const char *request, const char *header, const char *word)
{
	size_t n = strlen(header), m = strlen(word);

	for (const char *line = strstr(request, "\r\n"); line; line = strstr(line, "\r\n")) {
		const char *end;

		line += 2;
		if (strncasecmp(line, header, n) || line[n] != ':')
			continue;
		end = strstr(line, "\r\n");
		for (const char *at = line + n; end && at + m <= end; at++) {
			if (!strncasecmp(at, word, m))
				return true;
		}
	}
	return false;
}

static int answer_request(struct connection *c)
{
	bool get = !strncmp(c->request, "GET ", 4), head = !strncmp(c->request, "HEAD ", 5), open;
	kv_cleanup(kv_freep) char *text = NULL;
	const char *path = strchr(c->request, ' ');
	size_t len, n;

	if (!get && !head)
		return refuse(c, "405 Method Not Allowed");
	n = strcspn(++path, " ?\r");
	if (n != 8 || strncmp(path, "/metrics", 8))
		return refuse(c, "404 Not Found");
	open = header_has(c->request, "accept", "application/openmetrics-text");
	text = kv_metrics_text(c->metrics->daemon, open, &len);
	if (!text)
		return refuse(c, "503 Service Unavailable");
	return answer(c, "200 OK",
		      open ? "application/openmetrics-text; version=1.0.0; charset=utf-8" :
			     "text/plain; version=0.0.4; charset=utf-8",
		      text, len, get);
}

static void on_request(uint32_t events, void *arg)
{
	struct connection *c = arg;
	ssize_t n;
	int r;

	(void)events;
	if (c->answer) {
		send_more(c);
		return;
	}
	n = recv(c->fd, c->request + c->n_read, REQUEST_MAX - c->n_read, MSG_DONTWAIT);
	if (n < 0 && errno == EAGAIN)
		return;
	if (n <= 0) {
		connection_free(c);
		return;
	}
	c->n_read += (size_t)n;
	c->request[c->n_read] = 0;
	if (strstr(c->request, "\r\n\r\n"))
		r = answer_request(c);
	else if (c->n_read == REQUEST_MAX)
		r = refuse(c, "431 Request Header Fields Too Large");
	else
		return;
	if (r < 0)
		connection_free(c);
	else
		send_more(c);
}

static void too_slow(void *arg)
{
	connection_free(arg);
}

static void connection_new(struct kv_metrics *m, int fd)
{
	struct kv_loop *loop = m->daemon->loop;
	struct connection *c = calloc(1, sizeof(*c));

	if (!c) {
		kv_close(fd);
		return;
	}
	c->metrics = m;
	c->fd = fd;
	kv_link_init(&c->link);
	kv_list_append(&m->connections, &c->link);
	m->n_connections++;
	if (kv_timer_new(loop, too_slow, c, &c->timer) < 0 ||
	    kv_loop_watch(loop, fd, KV_LOOP_IN, on_request, c, &c->watch) < 0) {
		connection_free(c);
		return;
	}
	kv_timer_set(c->timer, METRICS_DEADLINE);
}

static void on_connection(uint32_t events, void *arg)
{
	struct kv_metrics *m = arg;
	int fd = accept4(m->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	(void)events;
	if (fd < 0)
		return;
	/* The one that has waited longest makes room: it is the slowest. */
	if (m->n_connections == METRICS_MAX)
		connection_free(kv_container_of(m->connections.next, struct connection, link));
	connection_new(m, fd);
}

/* "HOST:PORT" to a listening socket */
static int listen_on(const char *address, int *ret)
{
	struct addrinfo hints = { .ai_flags = AI_PASSIVE | AI_NUMERICHOST | AI_NUMERICSERV,
				  .ai_socktype = SOCK_STREAM }, *found;
	kv_cleanup(kv_closep) int fd = -1;
	char host[64] = "";
	const char *colon = strrchr(address, ':');
	size_t n = colon ? (size_t)(colon - address) : 0;
	int yes = 1, r;

	if (!colon || n >= sizeof(host) || !colon[1])
		return kv_error(-EINVAL, "--metrics: '%s' given; an address like 127.0.0.1:9400 is needed",
				address);
	if (n > 1 && address[0] == '[' && colon[-1] == ']')
		memcpy(host, address + 1, n - 2);
	else
		memcpy(host, address, n);
	r = getaddrinfo(*host ? host : NULL, colon + 1, &hints, &found);
	if (r)
		return kv_error(-EINVAL, "--metrics: '%s': %s; an address like 127.0.0.1:9400 is needed",
				address, gai_strerror(r));
	fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	r = fd < 0 ? -errno : 0;
	if (!r)
		setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
	if (!r && (bind(fd, found->ai_addr, found->ai_addrlen) < 0 || listen(fd, 16) < 0))
		r = -errno;
	freeaddrinfo(found);
	if (r < 0)
		return kv_error(r, "--metrics: '%s': %s", address, strerror(-r));
	*ret = kv_steal_fd(&fd);
	return 0;
}

int kv_metrics_start(struct kv_daemon *d, const char *address, struct kv_metrics **ret)
{
	struct kv_metrics *m = calloc(1, sizeof(*m));
	int r;

	if (!m)
		return kv_error(-ENOMEM, "--metrics: no memory");
	m->daemon = d;
	m->fd = -1;
	kv_link_init(&m->connections);
	r = listen_on(address, &m->fd);
	if (!r)
		r = kv_loop_watch(d->loop, m->fd, KV_LOOP_IN, on_connection, m, &m->watch);
	if (r < 0) {
		kv_metrics_stop(m);
		return r;
	}
	kv_log(KV_LOG_INFO, "metrics on http://%s/metrics", address);
	*ret = m;
	return 0;
}

struct kv_metrics *kv_metrics_stop(struct kv_metrics *m)
{
	if (!m)
		return NULL;
	while (!kv_link_is_alone(&m->connections))
		connection_free(kv_container_of(m->connections.next, struct connection, link));
	kv_watch_free(m->watch);
	kv_close(m->fd);
	free(m);
	return NULL;
}
