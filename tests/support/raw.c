/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/support/client.h"
#include "tests/support/raw.h"

static uint64_t buffer[KV_WIRE_MAX / sizeof(uint64_t)];

int raw_connect(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct timeval limit = {.tv_sec = DEADLINE_MS / 1000};
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	strcpy(address.sun_path, daemon_socket());
	if (connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
		close(fd);
		return -1;
	}
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	return fd;
}

int raw_send_fds(int fd, uint16_t type, const void *body, size_t size, int what, uint32_t n)
{
	union {
		struct cmsghdr head;
		char bytes[CMSG_SPACE(sizeof(int) * 253)];
	} control = {0};
	struct kv_wire_head head;
	struct iovec parts[] = {{&head, sizeof(head)}, {(void *)body, size}};
	struct msghdr msg = {.msg_iov = parts, .msg_iovlen = 2};

	kv_wire_init(&head, type, (uint32_t)(sizeof(head) + size), 1);
	if (n) {
		msg.msg_control = &control;
		msg.msg_controllen = CMSG_SPACE(sizeof(int) * n);
		control.head.cmsg_level = SOL_SOCKET;
		control.head.cmsg_type = SCM_RIGHTS;
		control.head.cmsg_len = CMSG_LEN(sizeof(int) * n);
		for (uint32_t i = 0; i < n; i++)
			memcpy(CMSG_DATA(&control.head) + i * sizeof(int), &what, sizeof(int));
	}
	return sendmsg(fd, &msg, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

int raw_send(int fd, uint16_t type, const void *body, size_t size)
{
	return raw_send_fds(fd, type, body, size, -1, 0);
}

const struct kv_wire_head *raw_receive(int fd, int *ret_fds)
{
	const struct kv_wire_head *head = (const void *)buffer;
	union {
		struct cmsghdr head;
		char bytes[CMSG_SPACE(sizeof(int) * 3)];
	} control;
	struct iovec part = {buffer, sizeof(buffer)};
	struct msghdr msg = {.msg_iov = &part,
			     .msg_iovlen = 1,
			     .msg_control = ret_fds ? &control : NULL,
			     .msg_controllen = ret_fds ? sizeof(control) : 0};
	ssize_t n = recvmsg(fd, &msg, MSG_CMSG_CLOEXEC);
	const struct cmsghdr *c;

	/* Hung up on before it read what we sent: the error comes once, then what it had said. */
	if (n < 0 && errno == ECONNRESET)
		n = recvmsg(fd, &msg, MSG_CMSG_CLOEXEC);
	c = CMSG_FIRSTHDR(&msg);
	if (n <= 0)
		return NULL;
	expect(n >= (ssize_t)sizeof(*head) && head->magic == KV_WIRE_MAGIC && head->size == n,
	       "an answer of %zd bytes makes no sense", n);
	if (ret_fds)
		memset(ret_fds, 0xff, 3 * sizeof(int));
	if (ret_fds && c)
		memcpy(ret_fds, CMSG_DATA(c), c->cmsg_len - CMSG_LEN(0));
	return head;
}

int raw_hello(void)
{
	struct kv_msg_hello hello = {.name = "raw", .version = "0"};
	const struct kv_wire_head *answer;
	int fd = raw_connect();

	expect(fd >= 0, "no connection");
	raw_send(fd, KV_MSG_HELLO, (char *)&hello + sizeof(hello.head),
		 sizeof(hello) - sizeof(hello.head));
	answer = raw_receive(fd, NULL);
	expect(answer && answer->type == KV_MSG_WELCOME, "no welcome: %s",
	       answer ? ((const struct kv_msg_error *)answer)->text : "hung up");
	return fd;
}

static const struct kv_wire_head *open_as(int fd, uint16_t type, const char *name, uint64_t max_bytes,
					  int *ret_fds)
{
	const struct kv_layout *layout = small_layout();
	struct kv_msg_pool_open msg = {.model = "small",
				       .tp_ranks = 1,
				       .gpu_mask = 1,
				       .max_bytes = max_bytes,
				       .layout_kind = layout->kind,
				       .block_tokens = layout->block_tokens,
				       .n_components = 2};
	const size_t head = sizeof(msg.head), list = 2 * sizeof(struct kv_component);
	char body[sizeof(msg) + 2 * sizeof(struct kv_component)];

	strncpy(msg.name, name, sizeof(msg.name) - 1);
	memcpy(body, (char *)&msg + head, sizeof(msg) - head);
	memcpy(body + sizeof(msg) - head, layout->components, list);
	raw_send(fd, type, body, sizeof(msg) - head + list);
	return raw_receive(fd, ret_fds);
}

const struct kv_wire_head *raw_open(int fd, const char *name, uint64_t max_bytes, int *ret_fds)
{
	return open_as(fd, KV_MSG_POOL_OPEN, name, max_bytes, ret_fds);
}

const struct kv_wire_head *raw_open_read(int fd, const char *name, int *ret_fds)
{
	return open_as(fd, KV_MSG_POOL_OPEN_READ, name, 0, ret_fds);
}

bool raw_is_error(const struct kv_wire_head *answer, int error, const char *words)
{
	const struct kv_msg_error *e = (const void *)answer;

	return answer && answer->type == KV_MSG_ERROR && e->error == error &&
	       strstr(e->text, words);
}
