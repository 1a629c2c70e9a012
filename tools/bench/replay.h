/* SPDX-License-Identifier: Apache-2.0 */
/* kvbench replay: what the process that reports and the engines that replay share. */
#ifndef KV_TOOLS_BENCH_REPLAY_H
#define KV_TOOLS_BENCH_REPLAY_H

#include "tools/bench/bench.h"
#include "tools/bench/trace.h"

#define KV_REPLAY_MAX_ENGINES 64u

/* One engine writes; all is read when it has ended. */
struct kv_replay_result {
	uint64_t blocks_hit;
	uint64_t n_served;
	uint64_t n_too_large; /* for the pool as a whole */
	uint64_t n_not_served;
	uint64_t n_waits; /* times that there was no room, and the request started again */
	int64_t ended_ns;
} __attribute__((aligned(64)));

/* In memory that engines inherit. */
struct kv_replay_shared {
	uint64_t next __attribute__((aligned(64))); /* request that nobody has begun */
	struct kv_replay_result results[KV_REPLAY_MAX_ENGINES] __attribute__((aligned(64)));
};

struct kv_replay {
	struct kv_bench *bench;
	struct kv_bench_pool what;
	struct kv_trace trace;
	struct kv_replay_shared *shared;
};

/**
 * kv_replay_engine() - connects, says so, and replays until no request is left
 * @ready_fd: one byte is written when it is attached
 * @go_fd:    at its end all begin
 *
 * Runs in a process of its own. Return: exit status of that process.
 */
int kv_replay_engine(struct kv_replay *replay, uint32_t number, int ready_fd, int go_fd);

#endif
