/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A socket to the daemon, and calls over it.
 *
 * When a worker of the daemon dies the connection ends, and is taken up again by the next call or post:
 * connect, HELLO, and RESUME for a pool's session. The pages are the same, so nothing is mapped
 * anew. A call waits for the worker that comes, up to its deadline, and is sent again.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "include/internal/killpoint.h"
#include "libclient/internal.h"

/* How often a request is sent: what has ended so many workers is not given to another one. */
#define TRIES 3
/* How often a call is hung up on while it says hello. */
#define HANG_UPS 10

static int connect_to(const char *path, int64_t deadline, int *ret)
{
	kv_cleanup(kv_closep) int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct sockaddr_un address = { .sun_family = AF_UNIX };

	if (fd < 0)
		return kv_error(-errno, "socket: %s", strerror(errno));
	if (strlen(path) >= sizeof(address.sun_path))
		return kv_error(-ENAMETOOLONG, "socket: '%s' is longer than %zu bytes", path,
				sizeof(address.sun_path) - 1);
	strcpy(address.sun_path, path);
	while (connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
		int r = -errno;

		if (r != -EAGAIN && r != -EINTR)
			return kv_error(r, "no daemon at '%s': %s", path, strerror(-r));
		/* The daemon's queue is full: it is busy accepting. */
		if (kv_now() >= deadline)
			return kv_error(-ETIMEDOUT, "the daemon at '%s' doesn't accept", path);
		poll(NULL, 0, 1);
	}
	*ret = kv_steal_fd(&fd);
	return 0;
}

/* One connection and its HELLO. Nothing is kept of it if that fails. */
static int open_once(struct kv_connection *c, const char *socket, struct kv_msg_hello *hello,
		     int64_t deadline)
{
	int r = connect_to(socket, deadline, &c->fd);

	if (r < 0)
		return r;
	kv_fork_add(c);
	KV_KILLPOINT(client_connected);
	r = kv_connection_call(c, hello, KV_MSG_WELCOME, sizeof(struct kv_msg_welcome), NULL, 0, NULL,
			       deadline);
	if (r < 0) {
		kv_fork_remove(c);
		c->fd = kv_close(c->fd);
	}
	return r;
}

int kv_connection_open(struct kv_connection *c, const char *socket, const char *name,
		       int64_t deadline, struct kv_msg_welcome *ret_welcome)
{
	struct kv_msg_hello hello = { .head = { .type = KV_MSG_HELLO, .size = sizeof(hello) } };
	int tries = 0, r;

	*c = (struct kv_connection){ .fd = -1 };
	kv_link_init(&c->link);
	c->buffer = malloc(KV_WIRE_MAX);
	if (!c->buffer)
		return kv_no_memory();
	strncpy(hello.name, name, sizeof(hello.name) - 1);
	strncpy(hello.version, kv_version(), sizeof(hello.version) - 1);
	/* A worker that dies between connect and WELCOME takes the connection along, not the call. */
	do
		r = open_once(c, socket, &hello, deadline);
	while (r == -ECONNRESET && ++tries < TRIES && kv_now() < deadline);
	if (r < 0) {
		free(c->buffer);
		c->buffer = NULL;
		return r;
	}
	KV_KILLPOINT(client_greeted);
	c->boot_nonce = ((const struct kv_msg_welcome *)c->buffer)->boot_nonce;
	if (ret_welcome)
		memcpy(ret_welcome, c->buffer, sizeof(*ret_welcome));
	return 0;
}

void kv_connection_close(struct kv_connection *c)
{
	if (c->buffer)
		kv_fork_remove(c);
	c->fd = kv_close(c->fd);
	free(c->buffer);
	c->buffer = NULL;
}

static int lost(void)
{
	return kv_error(-ECONNRESET, "the daemon has closed the connection");
}

static uint32_t next_tag(struct kv_connection *c)
{
	return ++c->tag ? c->tag : ++c->tag;
}

static int send_request(struct kv_connection *c, struct kv_wire_head *head, int64_t deadline)
{
	int r;

	if (c->fd < 0)
		return lost();
	*head = (struct kv_wire_head){ KV_WIRE_MAGIC, KV_WIRE_VERSION, head->type, 0, head->size,
				       next_tag(c) };
	while ((r = kv_socket_send(c->fd, head, head->size, NULL, 0, 1)) == -EAGAIN) {
		r = kv_socket_wait(c->fd, POLLOUT, deadline);
		if (r < 0)
			return kv_error(r, "the daemon doesn't read: %s", strerror(-r));
	}
	/* It has hung up: perhaps it has said why, and that is still to be read. */
	if (r == -EPIPE || r == -ECONNRESET)
		return 0;
	return r < 0 ? kv_error(r, "send: %s", strerror(-r)) : 0;
}

static int64_t receive(struct kv_connection *c, int *fds, uint32_t max_fds, uint32_t *ret_n_fds)
{
	int64_t n = kv_socket_receive(c->fd, c->buffer, KV_WIRE_MAX, fds, max_fds, ret_n_fds, 1);

	/* Hung up on before it read what we sent: the error comes once, then what it had said. */
	return n == -ECONNRESET ?
		       kv_socket_receive(c->fd, c->buffer, KV_WIRE_MAX, fds, max_fds, ret_n_fds, 1) :
		       n;
}

static void drop_fds(int *fds, uint32_t n)
{
	while (n)
		kv_close(fds[--n]);
}

/* What came with a message was cut off. */
static int no_descriptor(void)
{
	struct rlimit files = { 0 };

	getrlimit(RLIMIT_NOFILE, &files);
	return kv_error(-EMFILE, "receive: the daemon's descriptors didn't come through: this process may have %llu open "
			"files (RLIMIT_NOFILE), and has none left", (unsigned long long)files.rlim_cur);
}

/* The answer with tag @tag. */
static int receive_answer(struct kv_connection *c, uint32_t tag, uint16_t type, uint32_t size,
			  int *fds, uint32_t max_fds, uint32_t *ret_n_fds, int64_t deadline)
{
	const struct kv_wire_head *answer = (const void *)c->buffer;
	const struct kv_msg_error *error = (const void *)c->buffer;
	uint32_t n_fds = 0;
	int64_t n;
	int r;

	for (;;) {
		r = kv_socket_wait(c->fd, POLLIN, deadline);
		if (r < 0)
			return kv_error(r, "no answer from the daemon: %s", strerror(-r));
		n = receive(c, fds, max_fds, &n_fds);
		if (n == -EAGAIN)
			continue;
		if (n == 0 || n == -ECONNRESET)
			return lost();
		if (n == -EMSGSIZE && fds)
			return no_descriptor();
		if (n < 0)
			return kv_error((int)n, "receive: %s", strerror((int)-n));
		if (n < (int64_t)sizeof(*answer) || answer->magic != KV_WIRE_MAGIC ||
		    answer->size != n) {
			drop_fds(fds, n_fds);
			return kv_error(-EPROTO, "what listens there is not kvcached");
		}
		/* An answer to a call that was given up is passed over; tag 0 is meant for any call. */
		if (answer->tag == tag || !answer->tag)
			break;
		drop_fds(fds, n_fds);
	}
	if (answer->type == KV_MSG_ERROR && n == sizeof(*error)) {
		drop_fds(fds, n_fds);
		return kv_error(error->error < 0 ? error->error : -EPROTO, "%.*s",
				(int)sizeof(error->text), error->text);
	}
	if (answer->version != KV_WIRE_VERSION) {
		drop_fds(fds, n_fds);
		return kv_error(-EPROTO, "the daemon speaks version %u of the protocol, kvclient %s "
				"version %d", answer->version, kv_version(), KV_WIRE_VERSION);
	}
	if (answer->type != type || n < size) {
		drop_fds(fds, n_fds);
		return kv_error(-EPROTO, "daemon: answer of type %u and %u bytes, type %u and %u wanted",
				answer->type, answer->size, type, size);
	}
	KV_KILLPOINT(client_answered);
	if (ret_n_fds)
		*ret_n_fds = n_fds;
	return 0;
}

static int call_once(struct kv_connection *c, void *request, uint16_t type, uint32_t size, int *fds,
		     uint32_t max_fds, uint32_t *ret_n_fds, int64_t deadline)
{
	int r = send_request(c, request, deadline);

	if (r < 0)
		return r;
	KV_KILLPOINT(client_request_sent);
	return receive_answer(c, c->tag, type, size, fds, max_fds, ret_n_fds, deadline);
}

/* ---- when a worker of the daemon has died ---- */

static void hang_up(struct kv_connection *c)
{
	c->fd = kv_close(c->fd);
	c->hello_tag = c->resume_tag = 0;
}

static int send_now(struct kv_connection *c, struct kv_wire_head *head, uint32_t tag)
{
	*head = (struct kv_wire_head){ KV_WIRE_MAGIC, KV_WIRE_VERSION, head->type, 0, head->size, tag };
	return kv_socket_send(c->fd, head, head->size, NULL, 0, 1);
}

/*
 * The first half of taking a connection up again: connects and says all that has to be said, without
 * waiting. The socket belongs to the keeper: what is sent before another worker runs is kept for
 * it. 0; -ECONNRESET with a text: there is no daemon any more.
 */
static int begin_again(struct kv_connection *c)
{
	struct kv_msg_hello hello = { .head = { .type = KV_MSG_HELLO, .size = sizeof(hello) } };
	char why[KV_ERROR_BYTES];
	int r = connect_to(c->socket, 0, &c->fd);

	if (r == -ETIMEDOUT) /* more clients connect than fit its queue: later */
		return -EAGAIN;
	if (r == -EMFILE || r == -ENFILE || r == -ENOBUFS || r == -ENOMEM)
		return r;
	if (r < 0) {
		snprintf(why, sizeof(why), "%s", kv_error_text());
		return kv_error(-ECONNRESET, "the daemon has closed the connection; %s", why);
	}
	strncpy(hello.name, c->name, sizeof(hello.name) - 1);
	strncpy(hello.version, kv_version(), sizeof(hello.version) - 1);
	c->hello_tag = next_tag(c);
	r = send_now(c, &hello.head, c->hello_tag);
	if (!r && c->resume.head.type) {
		c->resume_tag = next_tag(c);
		r = send_now(c, &c->resume.head, c->resume_tag);
	}
	if (r < 0) {
		hang_up(c);
		return -EAGAIN;
	}
	return 0;
}

/* The second half: the answers. 0; -EAGAIN: that worker has died as well; else negative with text. */
static int finish(struct kv_connection *c, int64_t deadline)
{
	int r = 0;

	if (c->hello_tag) {
		r = receive_answer(c, c->hello_tag, KV_MSG_WELCOME, sizeof(struct kv_msg_welcome), NULL,
				   0, NULL, deadline);
		if (!r && ((const struct kv_msg_welcome *)c->buffer)->boot_nonce != c->boot_nonce)
			r = kv_error(-ESTALE, "another daemon was started at '%s': connect anew",
				     c->socket);
		if (!r)
			c->hello_tag = 0;
	}
	if (!r && c->resume_tag) {
		r = receive_answer(c, c->resume_tag, KV_MSG_OK, sizeof(struct kv_msg_plain), NULL, 0,
				   NULL, deadline);
		if (!r)
			c->resume_tag = 0;
	}
	if (r == -ECONNRESET)
		return -EAGAIN;
	if (r == -ETIMEDOUT)
		return kv_error(r, "the daemon at '%s' is being restarted, and not back in time", c->socket);
	/* Refused: there is nothing to come back to. */
	if (r == -ESTALE || r == -ENOENT) {
		c->resume.head.type = 0;
		c->socket = NULL;
		hang_up(c);
		return -ECONNRESET;
	}
	return r;
}

/* Makes sure that there is a connection, to the same daemon, with the same session. */
static int be_connected(struct kv_connection *c, int64_t deadline)
{
	int64_t pause = KV_MSEC;
	int n = 0;

	while (c->fd < 0 || c->hello_tag || c->resume_tag) {
		int r = 0;

		if (!c->socket)
			return lost();
		if (c->fd < 0)
			r = begin_again(c);
		if (!r)
			r = finish(c, deadline);
		if (!r)
			break;
		if (r != -EAGAIN)
			return r;
		hang_up(c);
		if (++n == HANG_UPS || kv_now() >= deadline)
			return kv_error(-ETIMEDOUT, "the daemon at '%s' hangs up before it answers",
					c->socket);
		kv_socket_wait(-1, 0, kv_now() + pause); /* for nothing */
		pause = pause < 100 * KV_MSEC ? 2 * pause : pause;
	}
	return 0;
}

int kv_connection_call(struct kv_connection *c, void *request, uint16_t type, uint32_t size,
		       int *fds, uint32_t max_fds, uint32_t *ret_n_fds, int64_t deadline)
{
	for (int tries = 1;; tries++) {
		int r = be_connected(c, deadline);

		c->n_tries = tries;
		if (!r)
			r = call_once(c, request, type, size, fds, max_fds, ret_n_fds, deadline);
		if (r != -ECONNRESET || !c->socket)
			return r;
		hang_up(c);
		if (tries == TRIES)
			return r;
	}
}

int kv_connection_post(struct kv_connection *c, void *request)
{
	struct kv_wire_head *head = request;

	/* Twice: the second time on a connection to the worker that comes. */
	for (int tries = 0; tries < 2; tries++) {
		int r = c->fd < 0 ? (c->socket ? begin_again(c) : lost()) : 0;

		if (r == -EAGAIN)
			return 1;
		if (r < 0)
			return r;
		r = send_now(c, head, 0);
		KV_KILLPOINT(client_posted);
		if (r != -EPIPE && r != -ECONNRESET)
			return r == -EAGAIN ? 1 : r;
		hang_up(c);
	}
	return c->socket ? 1 : lost();
}
