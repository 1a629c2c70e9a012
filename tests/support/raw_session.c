/* SPDX-License-Identifier: Apache-2.0 */
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "include/internal/ring.h"
#include "tests/support/client.h"
#include "tests/support/raw_session.h"

static void *map(int fd, uint64_t bytes, int protection)
{
	void *p = mmap(NULL, bytes, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);

	expect(p != MAP_FAILED, "pages of %llu bytes can't be mapped", (unsigned long long)bytes);
	close(fd);
	return p;
}

struct raw_session raw_session(const char *name, uint64_t max_bytes)
{
	struct raw_session s = {.fd = raw_hello()};
	const struct kv_msg_pool_opened *opened;
	int fds[3];

	opened = (const void *)raw_open(s.fd, name, max_bytes, fds);
	expect(opened && opened->head.type == KV_MSG_POOL_OPENED, "'%s' isn't opened: %s", name,
	       opened ? ((const struct kv_msg_error *)opened)->text : "hung up");
	s.head = map(fds[0], opened->index_bytes, PROT_READ);
	s.blocks = map(fds[1], opened->blocks_bytes, PROT_READ | PROT_WRITE);
	s.shm = map(fds[2], opened->session_bytes, PROT_READ | PROT_WRITE);
	/* It makes its barriers itself. */
	s.shm->fenced = 1;
	return s;
}

void raw_session_close(struct raw_session *s)
{
	expect(!raw_send(s->fd, KV_MSG_POOL_CLOSE, NULL, 0), "hung up");
	expect(raw_receive(s->fd, NULL), "no answer to a close");
	raw_session_end(s);
}

void raw_session_end(struct raw_session *s)
{
	close(s->fd);
	munmap(s->shm, s->shm->bytes);
	munmap(s->blocks, s->head->blocks_bytes);
	munmap(s->head, s->head->index_bytes);
}

void raw_lease(struct raw_session *s, uint32_t n, int64_t timeout)
{
	struct kv_msg_lease msg = {.n = n, .timeout_ns = timeout};

	expect(!raw_send(s->fd, KV_MSG_LEASE, (char *)&msg + sizeof(msg.head), sizeof(msg) - sizeof(msg.head)),
	       "hung up");
}

int raw_leased(struct raw_session *s, uint32_t *ret_n)
{
	const struct kv_msg_leased *answer = (const void *)raw_receive(s->fd, NULL);

	expect(answer && answer->head.type == KV_MSG_LEASED, "no answer to a lease: %s",
	       answer ? ((const struct kv_msg_error *)answer)->text : "hung up, or nothing in time");
	if (ret_n)
		*ret_n = answer->n;
	return answer->answer;
}

bool raw_is_answered(const struct raw_session *s, int ms)
{
	struct pollfd p = {.fd = s->fd, .events = POLLIN};

	return poll(&p, 1, ms) == 1;
}

uint32_t raw_take(struct raw_session *s, int32_t *ret_ids, uint32_t most)
{
	const int32_t *grants = (const int32_t *)((char *)s->shm + s->shm->grants_offset);
	uint32_t tail = s->shm->grants.tail, n = 0;

	for (; tail != kv_load_acquire(&s->shm->grants.head) && n < most; tail++)
		ret_ids[n++] = grants[tail & (s->shm->grant_capacity - 1)];
	kv_ring_consume(&s->shm->grants, tail);
	return n;
}

void raw_op(struct raw_session *s, const struct kv_op *op)
{
	struct kv_op *ops = (struct kv_op *)((char *)s->shm + s->shm->ops_offset);

	expect(kv_ring_writable(&s->shm->ops, s->op_head, s->shm->op_capacity) > 0, "the ring is full");
	ops[s->op_head & (s->shm->op_capacity - 1)] = *op;
	kv_ring_post(&s->shm->ops, ++s->op_head);
}

void raw_kick(struct raw_session *s)
{
	expect(!raw_send(s->fd, KV_MSG_KICK, NULL, 0), "hung up");
}

void raw_ping(struct raw_session *s)
{
	const struct kv_wire_head *answer;

	expect(!raw_send(s->fd, KV_MSG_PING, NULL, 0), "hung up");
	answer = raw_receive(s->fd, NULL);
	expect(answer && answer->type == KV_MSG_OK, "no answer to a ping");
}
