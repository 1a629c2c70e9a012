/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One engine of `kvbench replay`: for each request look up, reserve, append, publish, free, and
 * nothing in between. Where there is no room it lets go of what it found and starts again: engines
 * that wait for one another while each holds its prefix would wait for ever.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include "include/internal/cleanup.h"
#include "tools/bench/replay.h"

#define GO_TIMEOUT_MS	60000
#define ROOM_TIMEOUT	(100 * KV_MSEC) /* of one try */
#define REQUEST_TIMEOUT (60 * KV_SEC)

struct engine {
	struct kv_replay *replay;
	struct kv_replay_result *result;
	struct kv_client *client;
	struct kv_pool *pool;
	int32_t *tokens; /* of the request in work: blocks, one more, output */
};

/* Return: length of the prompt, a token more than its blocks. */
static size_t expand(struct engine *e, const struct kv_trace_request *q)
{
	const struct kv_trace *trace = &e->replay->trace;
	size_t prompt = (size_t)q->n_ids * KV_TRACE_BLOCK + 1;

	for (uint32_t i = 0; i < q->n_ids; i++)
		kv_trace_expand(trace->ids[q->first_id + i],
				e->tokens + (size_t)i * KV_TRACE_BLOCK);
	for (uint32_t i = 0; i <= q->output_length; i++)
		e->tokens[prompt - 1 + i] = (int32_t)i;
	return prompt;
}

/* 0: found and reserved. KV_NO_ROOM: not in REQUEST_TIMEOUT. */
static int begin(struct engine *e, size_t prompt, size_t total, struct kv_seq **ret_seq,
		 size_t *ret_hit)
{
	int64_t deadline = kv_bench_now() + REQUEST_TIMEOUT;

	for (;;) {
		struct kv_seq *seq;
		int r = kv_seq_new(e->pool, &seq);

		if (r)
			return r;
		r = kv_seq_lookup(seq, e->tokens, prompt, ret_hit);
		if (!r)
			r = kv_seq_reserve(seq, total, ROOM_TIMEOUT);
		if (!r) {
			*ret_seq = seq;
			return 0;
		}
		kv_seq_free(seq, NULL);
		if (r != KV_NO_ROOM || kv_bench_now() > deadline)
			return r;
		e->result->n_waits++;
	}
}

static int serve(struct engine *e, const struct kv_trace_request *q)
{
	size_t prompt = expand(e, q), hit;
	struct kv_seq *seq;
	int r = begin(e, prompt, prompt + q->output_length, &seq, &hit);

	e->result->n_too_large += r == KV_TOO_LARGE;
	e->result->n_not_served += r == KV_NO_ROOM;
	if (r)
		return r < 0 ? r : 0;
	r = kv_seq_append(seq, e->tokens + hit, prompt - hit);
	if (!r)
		r = kv_seq_publish(seq, NULL);
	if (!r)
		r = kv_seq_append(seq, e->tokens + prompt, q->output_length);
	kv_seq_free(seq, NULL);
	/* An engine computes for longer than it takes to show what it has: the next request finds it. */
	if (!r)
		r = kv_ping(e->client, KV_BENCH_TIMEOUT);
	e->result->blocks_hit += hit / KV_TRACE_BLOCK;
	e->result->n_served += !r;
	return r;
}

static int replay_all(struct engine *e)
{
	const struct kv_trace *trace = &e->replay->trace;
	uint64_t i;
	int r = 0;

	while (!r && (i = __atomic_fetch_add(&e->replay->shared->next, 1, __ATOMIC_RELAXED)) <
			     trace->n_requests)
		r = serve(e, &trace->requests[i]);
	e->result->ended_ns = kv_bench_now();
	return r ? kv_bench_broken(e->replay->bench, "replay", r) : KV_BENCH_DONE;
}

static int start_together(const struct engine *e, int ready_fd, int go_fd)
{
	struct pollfd go = {.fd = go_fd, .events = POLLIN};

	if (write(ready_fd, "", 1) != 1 || poll(&go, 1, GO_TIMEOUT_MS) != 1)
		return kv_bench_refuse(e->replay->bench, KV_BENCH_FAILED,
				       "replay: the engines didn't start together");
	return KV_BENCH_DONE;
}

int kv_replay_engine(struct kv_replay *replay, uint32_t number, int ready_fd, int go_fd)
{
	size_t most = (size_t)replay->trace.longest_input + replay->trace.longest_output + 1;
	kv_cleanup(kv_freep) int32_t *tokens = calloc(most, sizeof(*tokens));
	struct engine e = {
		.replay = replay, .result = &replay->shared->results[number], .tokens = tokens};
	int status;

	if (!tokens)
		return kv_bench_broken(replay->bench, "replay", -ENOMEM);
	status = kv_bench_connect(replay->bench, &e.client);
	if (status)
		return status;
	status = kv_bench_open(replay->bench, e.client, &replay->what, &e.pool);
	if (!status) {
		status = start_together(&e, ready_fd, go_fd);
		if (!status)
			status = replay_all(&e);
		kv_pool_close(e.pool);
	}
	kv_disconnect(e.client);
	return status;
}
