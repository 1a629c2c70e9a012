/* SPDX-License-Identifier: Apache-2.0 */
/* The worker's side of the keeper: what it is handed, and what it puts down. */
#include <errno.h>
#include <poll.h>
#include <string.h>

#include "daemon/keeping.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"
#include "include/kvcached/types.h"

/* Both sides read as soon as they are sent to: longer means that something is badly wrong. */
#define KEEPER_WAIT (30 * KV_SEC)

static int gone(int r)
{
	return kv_error(r < 0 ? r : -ECONNRESET, "the keeper: %s",
			r < 0 ? strerror(-r) : "it has ended");
}

int kv_keeping_begin(struct kv_keeping *k, int fd, int *ret_listen_fd)
{
	kv_cleanup(kv_closep) int listen_fd = -1;
	int fds[KV_KEEPER_MAX_FDS];
	struct kv_keeper_msg msg;

	k->fd = fd;
	k->restarts = 0;
	kv_link_init(&k->found);
	for (;;) {
		uint32_t n_fds = 0;
		int64_t n;
		int r = kv_socket_wait(fd, POLLIN, kv_now() + KEEPER_WAIT);

		if (r < 0)
			return gone(r);
		n = kv_socket_receive(fd, &msg, sizeof(msg), fds, KV_KEEPER_MAX_FDS, &n_fds, 1);
		if (n == -EAGAIN)
			continue;
		if (n != sizeof(msg) || msg.n_fds != n_fds) {
			while (n_fds)
				kv_close(fds[--n_fds]);
			return gone((int)n);
		}
		if (msg.type == KV_KEEPER_START) {
			k->restarts = msg.restarts;
			k->n_given_up = msg.n_given_up;
			k->answers = msg.part;
			*ret_listen_fd = kv_steal_fd(&listen_fd);
			return 0;
		}
		if (msg.type == KV_KEEPER_LISTEN && n_fds == 1) {
			listen_fd = fds[0];
			continue;
		}
		r = kv_deposits_put(&k->found, &msg, fds);
		if (r < 0)
			return kv_error(r, "no memory for what the keeper has");
	}
}

void kv_keeping_adopted(struct kv_keeping *k)
{
	while (k->found.next && !kv_link_is_alone(&k->found))
		kv_deposit_free(kv_container_of(k->found.next, struct kv_deposit, link));
}

void kv_keeping_end(struct kv_keeping *k)
{
	kv_keeping_adopted(k);
	k->fd = kv_close(k->fd);
}

static int tell(struct kv_keeping *k, const struct kv_keeper_msg *msg, const int *fds)
{
	int64_t deadline = kv_now() + KEEPER_WAIT;
	int r;

	if (k->fd < 0) /* a worker by itself, in a test */
		return 0;
	while ((r = kv_socket_send(k->fd, msg, sizeof(*msg), fds, msg->n_fds, 1)) == -EAGAIN ||
	       r == -ETOOMANYREFS || r == -ENOBUFS || r == -ENOMEM) {
		/* It reads at once; only a stopped keeper lets the queue fill up, or a kernel short of
		 * memory: what is not told would be kept for ever. */
		if (r == -EAGAIN)
			kv_socket_wait(k->fd, POLLOUT, deadline);
		else
			poll(NULL, 0, 1);
		if (kv_now() >= deadline)
			return gone(-ETIMEDOUT);
	}
	return r < 0 ? gone(r) : 0;
}

/* What became of the deposit that was sent last. */
static int hear(struct kv_keeping *k, const struct kv_keeper_msg *deposit)
{
	int64_t deadline = kv_now() + KEEPER_WAIT;
	struct kv_keeper_msg msg;

	while (k->answers) {
		int64_t n;
		int r = kv_socket_wait(k->fd, POLLIN, deadline);

		if (r < 0)
			return gone(r);
		n = kv_socket_receive(k->fd, &msg, sizeof(msg), NULL, 0, NULL, 1);
		if (n == -EAGAIN)
			continue;
		if (n != sizeof(msg))
			return gone((int)n);
		/* Others are those of a call that waited too long. */
		if (msg.kind != deposit->kind || msg.id != deposit->id)
			continue;
		if (msg.type == KV_KEEPER_KEPT && msg.part == deposit->part)
			return 0;
		if (msg.type == KV_KEEPER_REFUSED)
			return kv_error(-(int)msg.part, "the keeper can't hold it for another worker: %s%s",
					strerror((int)msg.part),
					msg.part == EMFILE ? " (RLIMIT_NOFILE of kvcached, LimitNOFILE= of its "
							     "unit)" :
							     "");
	}
	return 0;
}

int kv_keeping_put(struct kv_keeping *k, uint32_t kind, uint64_t id, const int *fds, uint32_t n_fds)
{
	struct kv_keeper_msg msg = {.type = KV_KEEPER_DEPOSIT, .kind = kind, .id = id};
	uint32_t done = 0;

	do {
		int r;

		msg.n_fds = n_fds - done < KV_KEEPER_MAX_FDS ? n_fds - done : KV_KEEPER_MAX_FDS;
		r = tell(k, &msg, fds + done);
		if (!r)
			r = hear(k, &msg);
		if (r < 0 && msg.part)
			kv_keeping_drop(k, kind, id); /* its other parts */
		if (r < 0)
			return r;
		done += msg.n_fds;
		msg.part++;
	} while (done < n_fds);
	return 0;
}

void kv_keeping_drop(struct kv_keeping *k, uint32_t kind, uint64_t id)
{
	struct kv_keeper_msg msg = {.type = KV_KEEPER_DROP, .kind = kind, .id = id};

	tell(k, &msg, NULL);
}

int kv_keeping_ready(struct kv_keeping *k)
{
	struct kv_keeper_msg msg = {.type = KV_KEEPER_READY};

	return tell(k, &msg, NULL);
}

int kv_keeping_alive(struct kv_keeping *k)
{
	struct kv_keeper_msg msg = {.type = KV_KEEPER_ALIVE};

	return tell(k, &msg, NULL);
}

int kv_keeping_binary(struct kv_keeping *k, int fd)
{
	struct kv_keeper_msg msg = {.type = KV_KEEPER_BINARY, .n_fds = fd >= 0};

	return tell(k, &msg, &fd);
}
