/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "include/internal/killpoint.h"
#include "libclient/internal.h"

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

int kv_connection_open(struct kv_connection *c, const char *socket, const char *name,
		       int64_t deadline, struct kv_msg_welcome *ret_welcome)
{
	struct kv_msg_hello hello = { .head = { .type = KV_MSG_HELLO, .size = sizeof(hello) } };
	int r;

	*c = (struct kv_connection){ .fd = -1 };
	kv_link_init(&c->link);
	c->buffer = malloc(KV_WIRE_MAX);
	if (!c->buffer)
		return -ENOMEM;
	r = connect_to(socket, deadline, &c->fd);
	if (r < 0)
		goto fail;
	kv_fork_add(c);
	KV_KILLPOINT(client_connected);
	strncpy(hello.name, name, sizeof(hello.name) - 1);
	strncpy(hello.version, kv_version(), sizeof(hello.version) - 1);
	r = kv_connection_call(c, &hello, KV_MSG_WELCOME, sizeof(struct kv_msg_welcome), NULL, 0, NULL,
			       deadline);
	if (r < 0)
		goto fail;
	KV_KILLPOINT(client_greeted);
	if (ret_welcome)
		memcpy(ret_welcome, c->buffer, sizeof(*ret_welcome));
	return 0;
fail:
	kv_connection_close(c);
	return r;
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

static int send_request(struct kv_connection *c, struct kv_wire_head *head, int64_t deadline)
{
	int r;

	if (c->fd < 0)
		return lost();
	*head = (struct kv_wire_head){ KV_WIRE_MAGIC, KV_WIRE_VERSION, head->type, 0, head->size,
				       ++c->tag ? c->tag : ++c->tag };
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

int kv_connection_call(struct kv_connection *c, void *request, uint16_t type, uint32_t size,
		       int *fds, uint32_t max_fds, uint32_t *ret_n_fds, int64_t deadline)
{
	const struct kv_wire_head *answer = (const void *)c->buffer;
	const struct kv_msg_error *error = (const void *)c->buffer;
	uint32_t n_fds = 0;
	int64_t n;
	int r = send_request(c, request, deadline);

	if (r < 0)
		return r;
	KV_KILLPOINT(client_request_sent);
	for (;;) {
		r = kv_socket_wait(c->fd, POLLIN, deadline);
		if (r < 0)
			return kv_error(r, "no answer from the daemon: %s", strerror(-r));
		n = receive(c, fds, max_fds, &n_fds);
		if (n == -EAGAIN)
			continue;
		if (n == 0 || n == -ECONNRESET)
			return lost();
		if (n < 0)
			return kv_error((int)n, "receive: %s", strerror((int)-n));
		if (n < (int64_t)sizeof(*answer) || answer->magic != KV_WIRE_MAGIC ||
		    answer->size != n) {
			drop_fds(fds, n_fds);
			return kv_error(-EPROTO, "what listens there is not kvcached");
		}
		/* An answer to a call that was given up is passed over; tag 0 is meant for any call. */
		if (answer->tag == c->tag || !answer->tag)
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

int kv_connection_post(struct kv_connection *c, void *request)
{
	struct kv_wire_head *head = request;
	int r;

	if (c->fd < 0)
		return lost();
	*head = (struct kv_wire_head){ KV_WIRE_MAGIC, KV_WIRE_VERSION, head->type, 0, head->size, 0 };
	r = kv_socket_send(c->fd, head, head->size, NULL, 0, 1);
	KV_KILLPOINT(client_posted);
	return r == -EAGAIN ? 0 : r == -EPIPE || r == -ECONNRESET ? lost() : r;
}
