/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench colocate: two models share a memory of --capacity blocks, whose bursts are opposite: the second
 * serves the same requests as the first, half a trace later. Once with one pool for all, once with half of
 * the memory for each, as a static split would have it.
 *
 * Time is the trace's, not the clock's. A request comes, is looked up, and is admitted if there is room for
 * all its tokens at once; if not it is turned away. It holds its blocks until it would have been computed and
 * decoded, at the rates below. What counts is tokens of requests that were admitted: from the cache, or
 * to be computed.
 *
 *   bursts   each model has the first half of the trace's requests, and nothing to do in the other half
 *   overlap  each has all of them; while the second half of the one runs, the other has its first
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "include/internal/cleanup.h"
#include "tools/bench/replay.h"

#define PREFILL_RATE 10000.0 /* tokens a second, of those that were not found */
#define DECODE_RATE  50.0    /* tokens a second of one sequence */
#define EXTENT	     ((uint64_t)2 << 20)
#define MOST_LIVE    4096u

/* The models' blocks have different sizes; capacity is counted in the first's. */
static const uint32_t token_bytes[2] = {256, 320};

struct live {
	double ends;
	struct kv_seq *seq;
};

struct side {
	struct kv_pool *pool;
	uint64_t tokens_asked, tokens_found, tokens_admitted, n_requests, n_turned_away;
};

struct run {
	struct kv_bench *bench;
	const struct kv_trace *trace;
	struct kv_client *client;
	struct side sides[2];
	struct live live[MOST_LIVE];
	uint32_t n_live, most_live;
	int32_t *tokens;
};

static int open_side(struct run *run, int i, uint64_t max_bytes)
{
	struct kv_component k = {.role = KV_ROLE_K, .dtype = KV_F32, .n_heads = 1,
				 .head_dim = token_bytes[i] / 4, .scale = 1};
	struct kv_layout layout = {.kind = KV_LAYOUT_FLAT, .block_tokens = KV_TRACE_BLOCK,
				   .n_components = 1, .components = &k};
	KV_OPTIONS(kv_pool_options, what, .name = i ? "second" : "first", .layout = &layout,
		   .max_bytes = max_bytes, .timeout = KV_BENCH_TIMEOUT);
	int r = kv_pool_open(run->client, &what, &run->sides[i].pool);

	return r < 0 ? kv_bench_broken(run->bench, "colocate", r) : KV_BENCH_DONE;
}

/* What has been decoded by @now. */
static void end_until(struct run *run, double now)
{
	for (uint32_t i = 0; i < run->n_live;) {
		if (run->live[i].ends > now) {
			i++;
			continue;
		}
		kv_seq_free(run->live[i].seq, NULL);
		run->live[i] = run->live[--run->n_live];
	}
}

static size_t expand(struct run *run, const struct kv_trace_request *q)
{
	size_t prompt = (size_t)q->n_ids * KV_TRACE_BLOCK + 1;

	for (uint32_t i = 0; i < q->n_ids; i++)
		kv_trace_expand(run->trace->ids[q->first_id + i],
				run->tokens + (size_t)i * KV_TRACE_BLOCK);
	run->tokens[prompt - 1] = 0;
	return prompt;
}

/* Return: 0, also where there was no room. */
static int serve(struct run *run, struct side *side, const struct kv_trace_request *q, double now)
{
	size_t prompt = expand(run, q), total = prompt + q->output_length, hit;
	struct kv_seq *seq;
	int r = kv_seq_new(side->pool, &seq);

	if (r < 0)
		return r;
	side->n_requests++;
	side->tokens_asked += total;
	r = kv_seq_lookup(seq, run->tokens, prompt, &hit);
	if (!r)
		r = run->n_live < MOST_LIVE ? kv_seq_reserve(seq, total, 0) : KV_NO_ROOM;
	if (r) {
		kv_seq_free(seq, NULL);
		side->n_turned_away += r > 0;
		return r < 0 ? r : 0;
	}
	r = kv_seq_append(seq, run->tokens + hit, prompt - hit);
	if (!r)
		r = kv_seq_publish(seq, NULL);
	side->tokens_found += hit;
	side->tokens_admitted += total;
	run->live[run->n_live++] = (struct live){
		now + (double)(prompt - hit) / PREFILL_RATE + q->output_length / DECODE_RATE, seq};
	run->most_live = run->n_live > run->most_live ? run->n_live : run->most_live;
	return r ? r : kv_ping(run->client, KV_BENCH_TIMEOUT);
}

/* Both models' requests in the order of their times. */
static int play(struct run *run, size_t n, double shift)
{
	const struct kv_trace_request *q = run->trace->requests;
	size_t next[2] = {0, 0};
	int r = 0;

	while (!r && (next[0] < n || next[1] < n)) {
		double first = next[0] < n ? q[next[0]].timestamp / 1000 : 1e300;
		double second = next[1] < n ? q[next[1]].timestamp / 1000 + shift : 1e300;
		int i = second < first;

		end_until(run, i ? second : first);
		r = serve(run, &run->sides[i], &q[next[i]], i ? second : first);
		next[i]++;
		kv_bench_progress(run->bench, next[0] + next[1], 2 * n, "requests");
	}
	end_until(run, 1e300);
	return r;
}

static int run_once(struct kv_bench *b, const struct kv_trace *trace, bool bursts, bool split,
		    struct run *ret)
{
	uint64_t bytes = (uint64_t)b->capacity * KV_TRACE_BLOCK * token_bytes[0];
	double half = trace->requests[trace->n_requests - 1].timestamp / 2000;
	size_t n = trace->n_requests;
	int status, r;

	*ret = (struct run){.bench = b, .trace = trace};
	ret->tokens = calloc(trace->longest_input + 1, sizeof(*ret->tokens));
	if (!ret->tokens)
		return kv_bench_broken(b, "colocate", -ENOMEM);
	for (n = 0; n < trace->n_requests; n++) {
		if (bursts && trace->requests[n].timestamp / 1000 >= half)
			break;
	}
	bytes = (bytes + EXTENT - 1) / EXTENT * EXTENT;
	status = kv_bench_serve(b, bytes);
	if (!status)
		status = kv_bench_connect(b, &ret->client);
	for (int i = 0; !status && i < 2; i++)
		status = open_side(ret, i, split ? bytes / 2 : 0);
	if (!status) {
		r = play(ret, n, half);
		status = r < 0 ? kv_bench_broken(b, "colocate", r) : KV_BENCH_DONE;
	}
	end_until(ret, 1e300);
	for (int i = 0; i < 2; i++)
		kv_pool_close(ret->sides[i].pool);
	kv_disconnect(ret->client);
	kv_bench_end(b);
	free(ret->tokens);
	return status;
}

static uint64_t admitted(const struct run *run)
{
	return run->sides[0].tokens_admitted + run->sides[1].tokens_admitted;
}

static void show_run(struct kv_emit *e, const char *name, const struct run *run)
{
	const struct side *a = &run->sides[0], *b = &run->sides[1];
	uint64_t asked = a->tokens_asked + b->tokens_asked;

	kv_emit_open(e, name, '{');
	kv_emit_number(e, "tokens_asked", asked);
	kv_emit_number(e, "tokens_admitted", admitted(run));
	kv_emit_number(e, "tokens_found", a->tokens_found + b->tokens_found);
	kv_emit_number(e, "requests", a->n_requests + b->n_requests);
	kv_emit_number(e, "turned_away", a->n_turned_away + b->n_turned_away);
	kv_emit_number(e, "most_at_once", run->most_live);
	kv_emit_close(e);
	kv_emit_line(e, "  %-7s %5.1f %% of %.1f M tokens (%4.1f %% from the cache), %" PRIu64
			" of %" PRIu64 " requests turned away, at most %u at once",
		     name, 100.0 * (double)admitted(run) / (double)asked, (double)asked / 1e6,
		     100.0 * (double)(a->tokens_found + b->tokens_found) / (double)asked,
		     a->n_turned_away + b->n_turned_away, a->n_requests + b->n_requests, run->most_live);
}

static int compare(struct kv_bench *b, const struct kv_trace *trace, bool bursts)
{
	kv_cleanup(kv_freep) struct run *runs = calloc(2, sizeof(*runs));
	struct kv_emit *e = &b->emit;
	double ratio;
	int status = KV_BENCH_DONE;

	if (!runs)
		return kv_bench_broken(b, "colocate", -ENOMEM);
	for (int split = 0; split < 2 && !status; split++)
		status = run_once(b, trace, bursts, split, &runs[split]);
	if (status)
		return status;
	ratio = (double)admitted(&runs[0]) / (double)admitted(&runs[1]);
	kv_emit_open(e, bursts ? "bursts" : "overlap", '{');
	kv_emit_line(e, "%s: %.2f times the split's tokens", bursts ? "bursts" : "overlap", ratio);
	show_run(e, "shared", &runs[0]);
	show_run(e, "split", &runs[1]);
	kv_emit_real(e, "ratio", ratio);
	kv_emit_close(e);
	return KV_BENCH_DONE;
}

int kv_bench_colocate(struct kv_bench *b)
{
	struct kv_emit *e = &b->emit;
	struct kv_trace trace;
	char text[512];
	int status;

	if (b->socket)
		return kv_bench_refuse(b, KV_BENCH_USAGE, "colocate starts daemons of its own: no --socket");
	if (kv_trace_read(b->file, &trace, text, sizeof(text)) < 0)
		return kv_bench_refuse(b, KV_BENCH_FAILED, "%s", text);
	kv_emit_open(e, NULL, '{');
	kv_emit_number(e, "capacity", b->capacity);
	status = compare(b, &trace, true);
	if (!status)
		status = compare(b, &trace, false);
	kv_emit_close(e);
	kv_trace_deinit(&trace);
	return status;
}
