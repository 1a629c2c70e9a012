/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "include/internal/cleanup.h"
#include "include/internal/socket.h"
#include "include/internal/wire.h"

int64_t kv_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * KV_SEC + t.tv_nsec;
}

int kv_socket_send(int fd, const void *data, size_t size, const int *fds, uint32_t n_fds,
		   int dont_wait)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * KV_WIRE_MAX_FDS)];
	} control;
	struct iovec iov = { (void *)data, size };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
	ssize_t n;

	if (n_fds > KV_WIRE_MAX_FDS)
		return -EINVAL;
	if (n_fds) {
		struct cmsghdr *c = &control.align;

		memset(&control, 0, sizeof(control));
		msg.msg_control = &control;
		msg.msg_controllen = CMSG_SPACE(sizeof(int) * n_fds);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int) * n_fds);
		memcpy(CMSG_DATA(c), fds, sizeof(int) * n_fds);
	}
	do
		n = sendmsg(fd, &msg, MSG_NOSIGNAL | (dont_wait ? MSG_DONTWAIT : 0));
	while (n < 0 && errno == EINTR);
	return n < 0 ? -errno : 0;
}

static uint32_t take_fds(struct msghdr *msg, int *fds, uint32_t max_fds)
{
	uint32_t n = 0;

	for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
		size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < count; i++) {
			int got;

			memcpy(&got, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
			if (fds && n < max_fds)
				fds[n++] = got;
			else
				kv_close(got);
		}
	}
	return n;
}

int64_t kv_socket_receive(int fd, void *data, size_t size, int *fds, uint32_t max_fds,
			  uint32_t *ret_n_fds, int dont_wait)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * KV_WIRE_MAX_FDS)];
	} control;
	struct iovec iov = { data, size };
	struct msghdr msg = { .msg_iov = &iov,
			      .msg_iovlen = 1,
			      .msg_control = fds ? &control : NULL,
			      .msg_controllen = fds ? sizeof(control) : 0 };
	uint32_t n_fds;
	ssize_t n;

	do
		n = recvmsg(fd, &msg, MSG_CMSG_CLOEXEC | (dont_wait ? MSG_DONTWAIT : 0));
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return -errno;

	n_fds = take_fds(&msg, fds, max_fds);
	if (msg.msg_flags & MSG_TRUNC || (fds && msg.msg_flags & MSG_CTRUNC)) {
		while (fds && n_fds)
			kv_close(fds[--n_fds]);
		return -EMSGSIZE;
	}
	if (ret_n_fds)
		*ret_n_fds = n_fds;
	return n;
}

int kv_socket_wait(int fd, short events, int64_t deadline_ns)
{
	for (;;) {
		struct pollfd p = { .fd = fd, .events = events };
		int64_t left = deadline_ns - kv_now();
		struct timespec t = { left / KV_SEC, left % KV_SEC };
		int r;

		if (left <= 0)
			t = (struct timespec){ 0, 0 };
		r = ppoll(&p, 1, &t, NULL);
		if (r > 0)
			return 0;
		if (r < 0 && errno != EINTR)
			return -errno;
		if (r == 0 && left <= 0)
			return -ETIMEDOUT;
	}
}
