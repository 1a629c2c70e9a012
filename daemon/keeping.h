/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The worker's side of the keeper (keeper.h): what it was handed, and what it puts down. A call waits for
 * an answer, which takes some 20 us, and while the keeper is stopped at most 30 s.
 */
#ifndef KV_DAEMON_KEEPING_H
#define KV_DAEMON_KEEPING_H

#include <stdbool.h>

#include "daemon/keeper.h"

/* What the worker was handed. */
struct kv_keeping {
	int fd;	       /* of the keeper */
	uint32_t restarts, n_given_up; /* as START says */
	bool answers;		       /* likewise: it says what became of a deposit */
	struct kv_link found; /* kv_deposit::link: what there was at the start, until it is adopted */
};

/* kv_keeping_begin() - receive all up to START. 0; negative with text */
int kv_keeping_begin(struct kv_keeping *k, int fd, int *ret_listen_fd);
void kv_keeping_adopted(struct kv_keeping *k); /* what is still in `found` isn't needed here */
void kv_keeping_end(struct kv_keeping *k);

/* The descriptors stay the caller's. 0; negative with text: the keeper has no room, is gone, or does not read */
int kv_keeping_put(struct kv_keeping *k, uint32_t kind, uint64_t id, const int *fds, uint32_t n_fds);
void kv_keeping_drop(struct kv_keeping *k, uint32_t kind, uint64_t id);
int kv_keeping_ready(struct kv_keeping *k);
int kv_keeping_alive(struct kv_keeping *k); /* this process's loop turns */
/* kv_keeping_binary() - this process is about to end; another is to run @fd, or if it is -1 the same */
int kv_keeping_binary(struct kv_keeping *k, int fd);

#endif
