/* SPDX-License-Identifier: Apache-2.0 */
/* A session of raw.h with its pages: what a client of libkvclient does there, or what it never would. */
#ifndef KV_TESTS_SUPPORT_RAW_SESSION_H
#define KV_TESTS_SUPPORT_RAW_SESSION_H

#include "include/internal/shm.h"
#include "tests/support/raw.h"

struct raw_session {
	int fd;
	struct kv_shm_pool *head; /* a copy */
	void *blocks;
	struct kv_shm_session *shm;
	uint32_t op_head;
};

/* raw_session() - HELLO, POOL_OPEN of the small layout, and the pages mapped; fails the test otherwise */
struct raw_session raw_session(const char *name, uint64_t max_bytes);
void raw_session_close(struct raw_session *s); /* POOL_CLOSE, and hangs up */
void raw_session_end(struct raw_session *s); /* hangs up: what it has stays until this process ends */

/* raw_lease() - LEASE, without waiting for the answer */
void raw_lease(struct raw_session *s, uint32_t n, int64_t timeout);
/* raw_leased() - the next answer, which must be LEASED. Return: what it answers; *ret_n: how many */
int raw_leased(struct raw_session *s, uint32_t *ret_n);
/* raw_is_answered() - is there something to receive within @ms? */
bool raw_is_answered(const struct raw_session *s, int ms);

/* raw_take() - all ids that were granted: as a client, which then has none that are idle. Return: how many */
uint32_t raw_take(struct raw_session *s, int32_t *ret_ids, uint32_t most);

/* raw_op() - into the ring; no KICK */
void raw_op(struct raw_session *s, const struct kv_op *op);
void raw_kick(struct raw_session *s);
/* raw_ping() - and its answer: the ring has been worked off */
void raw_ping(struct raw_session *s);

#endif
