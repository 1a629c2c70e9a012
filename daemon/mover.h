/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What worker and mover say to each other on their private socket. First the arena with its fds (as
 * many packets as they need: runs of those there are, the last one ends at n_fds), then jobs, one at a
 * time; a job's answer repeats its number, and a new granule's descriptor comes with it.
 */
#ifndef KV_DAEMON_MOVER_H
#define KV_DAEMON_MOVER_H

#include "include/internal/arena_export.h"

struct kv_mover_arena {
	struct kv_arena_export export;
	uint32_t first_fd;
	uint32_t n_fds; /* in this packet */
};

enum kv_mover_op {
	KV_MOVER_READY = 0, /* mover to worker: attached, or the error */
	KV_MOVER_ZERO = 1, /* at offset, and n_pairs other ranges: offset and bytes, in extents of unit */
	KV_MOVER_RENEW = 3, /* sparse: the granule at offset gets memory that nobody has, zeroed */
	KV_MOVER_COPY = 2, /* n_pairs blocks of `bytes`, from and to as follows the job */
};

struct kv_mover_job {
	uint64_t number;
	uint64_t offset;
	uint64_t bytes;
	uint32_t op;
	int32_t result; /* of an answer: 0 or negative errno */
	char text[128]; /* of an answer that failed */
	uint32_t n_pairs;
	uint32_t unit_log2; /* of ZERO */
};

#define KV_MOVER_PAIRS 4096

struct kv_mover_copy {
	struct kv_mover_job job;
	int32_t pairs[KV_MOVER_PAIRS][2];
};

#endif
