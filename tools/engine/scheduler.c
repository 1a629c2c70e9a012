/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tools/engine/error.h"
#include "tools/engine/scheduler.h"

#define SHORT_WAIT   KV_SEC /* of a lone sequence, before it gives its blocks to others */
#define ROOM_WAIT    (3 * KV_SEC) /* in the queue: longer than the daemon gives others to answer */
#define ROOM_PAUSE   (10 * KV_MSEC)
#define PROMISE_TIME (10 * KV_SEC) /* renewed with each chunk */
#define FOLLOW_TIME  KV_SEC	   /* without a new block: then it is computed all the same */
#define FOLLOW_PAUSE (KV_MSEC / 5) /* between two looks at what the first engine did */

/* Room for steps to come, of a request that had to go: doubled each time, so many times. */
#define AHEAD_BLOCKS	4
#define AHEAD_DOUBLINGS 16

struct kv_scheduler {
	struct kv_scheduler_options options;
	uint32_t block_tokens; /* hits and promises are multiples of it, in all groups */
	struct kv_batch *batches[KV_MODEL_MAX_GROUPS]; /* of one step, with each group's blocks */
	struct kv_request *waiting;
	struct kv_request **running; /* [n_running of max_batch] oldest first */
	uint32_t n_running;
	struct kv_batch_item *items; /* [max_batch] of the step that is being made */
	struct kv_request **members; /* whose they are */
	uint32_t n_items;
	int32_t *rows;	 /* [max_batch] batch rows whose logits are wanted */
	float *logits;	 /* [max_batch, n_vocab] */
};

static int64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * KV_SEC + t.tv_nsec;
}

static int lib_error(int r, const char *what)
{
	return kv_engine_error(r, "%s: %s", what, kv_error_text());
}

int kv_scheduler_new(const struct kv_scheduler_options *options, struct kv_scheduler **ret)
{
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = options->max_batch,
		   .max_tokens = options->chunk + options->max_batch,
		   .max_blocks_per_seq = options->max_blocks);
	struct kv_scheduler *s = calloc(1, sizeof(*s));
	uint32_t n = options->max_batch;
	int r;

	if (!s)
		return kv_engine_error(-ENOMEM, "no memory for the scheduler");

	s->options = *options;
	s->block_tokens = kv_groups_unit(options->pools->groups);
	s->running = calloc(n, sizeof(*s->running));
	s->items = calloc(n, sizeof(*s->items));
	s->members = calloc(n, sizeof(*s->members));
	s->rows = calloc(n, sizeof(*s->rows));
	s->logits = calloc((size_t)n * kv_model_shape(options->model)->n_vocab, sizeof(*s->logits));
	if (!s->running || !s->items || !s->members || !s->rows || !s->logits) {
		kv_scheduler_free(s);
		return kv_engine_error(-ENOMEM, "no memory for a batch of %u", n);
	}
	for (uint32_t g = 0; g < options->pools->n_groups; g++) {
		r = kv_batch_new(options->pools->group_pools[g], &sizes, &s->batches[g]);
		if (r < 0) {
			kv_scheduler_free(s);
			return lib_error(r, "kv_batch_new");
		}
	}
	*ret = s;
	return 0;
}

static void release(struct kv_scheduler *s, struct kv_request *request)
{
	request->seq = kv_gseq_free(request->seq, s->options.stream);
}

struct kv_scheduler *kv_scheduler_free(struct kv_scheduler *s)
{
	if (!s)
		return NULL;

	for (uint32_t i = 0; i < s->n_running; i++)
		release(s, s->running[i]);
	for (uint32_t g = 0; g < KV_MODEL_MAX_GROUPS; g++)
		kv_batch_free(s->batches[g]);
	free(s->running);
	free(s->items);
	free(s->members);
	free(s->rows);
	free(s->logits);
	free(s);
	return NULL;
}

void kv_scheduler_add(struct kv_scheduler *s, struct kv_request *request)
{
	struct kv_request **end = &s->waiting;

	while (*end)
		end = &(*end)->next;
	*end = request;
	request->next = NULL;
	request->added_ns = now_ns();
}

static void tell(struct kv_scheduler *s, struct kv_request *request, int32_t token)
{
	if (s->options.on_token)
		s->options.on_token(s->options.context, request, token);
}

static void end_request(struct kv_scheduler *s, struct kv_request *request, int error)
{
	request->done = true;
	request->error = error;
	if (error)
		snprintf(request->why, sizeof(request->why), "%s", kv_engine_error_text());
	release(s, request);
	tell(s, request, -1);
}

static void leave_running(struct kv_scheduler *s, uint32_t i)
{
	s->n_running--;
	memmove(&s->running[i], &s->running[i + 1], (s->n_running - i) * sizeof(*s->running));
}

static void preempt(struct kv_scheduler *s, uint32_t i)
{
	struct kv_request *request = s->running[i];

	release(s, request);
	request->n_preempted++;
	request->next = s->waiting;
	s->waiting = request;
	leave_running(s, i);
}

/* Find what is cached from the sequence's length on; it grows by that. */
static int look_up(struct kv_scheduler *s, struct kv_request *request)
{
	size_t before = kv_gseq_len(request->seq), hit;
	int r;

	if (!s->options.share)
		return 0;

	r = kv_gseq_follow(request->seq, request->tokens.at, request->tokens.n, 0, &hit);
	if (r < 0)
		return lib_error(r, "kv_gseq_follow");

	/* After a preemption it would mostly find its own work again. */
	if (!request->n_preempted)
		request->n_hit += kv_gseq_len(request->seq) - before;
	return r;
}

/*
 * Room to ask for, in tokens. Who had to go would soon have to again, where others wait for every
 * block: each time it comes back with room for twice as many steps, at most for all that it has
 * left.
 *
 * Where layers slide, a prompt as a whole would take blocks for tokens that windows have left behind by its
 * end: who comes for the first time begins with a chunk.
 */
static size_t room_for(const struct kv_scheduler *s, const struct kv_request *request)
{
	uint32_t n =
		request->n_preempted < AHEAD_DOUBLINGS ? request->n_preempted : AHEAD_DOUBLINGS;
	size_t ahead = n ? (size_t)(AHEAD_BLOCKS * s->block_tokens) << n : 0;
	size_t n_ctx = kv_model_shape(s->options.model)->n_ctx, n_new, left, most;
	size_t first = kv_gseq_len(request->seq) + s->options.chunk;

	if (kv_model_shape(s->options.model)->window && !n && first < request->tokens.n)
		return first;
	n_new = request->tokens.n - request->n_prompt;
	left = request->max_new > n_new ? request->max_new - n_new : 0;
	most = n_ctx > request->tokens.n ? n_ctx - request->tokens.n : 0;
	left = left < most ? left : most;
	return request->tokens.n + (ahead < left ? ahead : left);
}

/* Return: 0; KV_NO_ROOM; KV_TOO_LARGE; negative. On any but 0 the request holds nothing. */
static int try_admit(struct kv_scheduler *s, struct kv_request *request, bool look, int64_t timeout)
{
	size_t n_hit = request->n_hit;
	int r;

	r = kv_gseq_new(s->options.pools->groups, &request->seq);
	if (r < 0)
		return lib_error(r, "kv_gseq_new");

	r = look ? look_up(s, request) : 0;
	if (r < 0) {
		release(s, request);
		return r;
	}

	r = kv_gseq_reserve(request->seq, room_for(s, request), timeout);
	if (r == KV_TOO_LARGE && request->n_preempted)
		r = kv_gseq_reserve(request->seq, request->tokens.n, timeout);
	if (r < 0)
		lib_error(r, "kv_gseq_reserve");
	if (r) {
		release(s, request);
		request->n_hit = n_hit;
	}
	return r;
}

/*
 * Like try_admit(), for one that has to wait. Holding what it found in the cache it would keep
 * those from ending whose blocks it waits for: so it waits with nothing, in the daemon's queue, for
 * all its blocks, and what is still cached then is found before the first step. Where others hold
 * what it found, it needs less than that: it looks again now and then.
 */
static int wait_admit(struct kv_scheduler *s, struct kv_request *request)
{
	int64_t deadline = now_ns() + s->options.wait_ns, left;
	const struct timespec pause = {.tv_nsec = ROOM_PAUSE};
	int r;

	for (;;) {
		r = try_admit(s, request, true, 0);
		left = deadline - now_ns();
		if (r != KV_NO_ROOM || left <= 0)
			return r;
		r = try_admit(s, request, false, left < ROOM_WAIT ? left : ROOM_WAIT);
		if (r != KV_NO_ROOM || now_ns() >= deadline)
			return r;
		nanosleep(&pause, NULL);
	}
}

/* Let waiting requests run, in their order, as long as there is room. */
static int admit(struct kv_scheduler *s)
{
	int r;

	while (s->waiting && s->n_running < s->options.max_batch) {
		struct kv_request *request = s->waiting;

		r = s->n_running ? try_admit(s, request, true, 0) : wait_admit(s, request);
		if (r < 0)
			return r;
		if (r == KV_NO_ROOM && s->n_running)
			return 0;

		s->waiting = request->next;
		if (r == KV_NO_ROOM) {
			kv_engine_error(-ENOSPC, "no room for %zu tokens within %lld s",
					request->tokens.n,
					(long long)(s->options.wait_ns / KV_SEC));
			end_request(s, request, -ENOSPC);
		} else if (r == KV_TOO_LARGE) {
			kv_engine_error(-ENOSPC, "the pool never has room for %zu tokens",
					request->tokens.n);
			end_request(s, request, -ENOSPC);
		} else {
			s->running[s->n_running++] = request;
		}
	}
	return 0;
}

/*
 * Room for @n_tokens of running sequence @i: the youngest sequences go until there is some.
 * Return: 0; KV_NO_ROOM: it had to go itself; negative.
 */
static int make_room(struct kv_scheduler *s, uint32_t i, size_t n_tokens)
{
	struct kv_request *request = s->running[i];
	int r;

	for (;;) {
		r = kv_gseq_reserve(request->seq, n_tokens, s->n_running > 1 ? 0 : SHORT_WAIT);
		if (r < 0)
			return lib_error(r, "kv_gseq_reserve");
		if (!r)
			return 0;
		if (r == KV_TOO_LARGE) {
			kv_engine_error(-ENOSPC, "the pool never has room for %zu tokens",
					n_tokens);
			leave_running(s, i);
			end_request(s, request, -ENOSPC);
			return KV_NO_ROOM;
		}

		preempt(s, s->n_running - 1);
		if (s->n_running <= i)
			return KV_NO_ROOM;
	}
}

/*
 * Between two chunks of a prompt: has another engine computed what comes next, or is it about to? Then it is
 * waited for; else it is ours, and others wait.
 */
static int look_ahead(struct kv_scheduler *s, struct kv_request *request)
{
	size_t len = kv_gseq_len(request->seq), whole = request->tokens.n - request->tokens.n % s->block_tokens;
	size_t promised;
	int r, answer;

	if (!s->options.share || len % s->block_tokens)
		return 0;
	/* Where another engine's blocks were first, the library changes over to them here. */
	r = kv_gseq_publish(request->seq, s->options.stream);
	if (r < 0)
		return lib_error(r, "kv_gseq_publish");
	answer = look_up(s, request);
	if (answer < 0)
		return answer;
	if (kv_gseq_len(request->seq) > len || answer != KV_PROMISED)
		request->follow_until = 0;
	if (answer == KV_PROMISED) {
		if (!request->follow_until)
			request->follow_until = now_ns() + FOLLOW_TIME;
		request->follows = now_ns() < request->follow_until;
		return 0;
	}
	r = kv_gseq_promise(request->seq, request->tokens.at, request->tokens.n, PROMISE_TIME, &promised);
	if (r < 0)
		return lib_error(r, "kv_gseq_promise");
	/* Another one may have been faster. */
	request->follows = promised == kv_gseq_len(request->seq) && promised < whole;
	if (promised < whole)
		request->n_ours = promised;
	return 0;
}

/* How many tokens of a sequence this step computes, of @budget for prompts */
static uint32_t tokens_of_step(const struct kv_scheduler *s, const struct kv_request *request,
			       uint32_t budget)
{
	size_t len = kv_gseq_len(request->seq), pending = request->n_ours - len, end;

	if (pending == 1)
		return 1;
	if (pending <= budget)
		return pending;

	end = (len + budget) / s->block_tokens * s->block_tokens;
	return end > len ? end - len : budget;
}

/* Decide who takes part, and make room for it. Members with n_step 0 don't. */
static int plan_step(struct kv_scheduler *s)
{
	uint32_t budget = s->options.chunk;
	struct kv_request *request;
	size_t len;
	int r;

	for (uint32_t i = 0; i < s->n_running;) {
		request = s->running[i];
		request->n_step = 0;
		request->follows = false;
		request->n_ours = request->tokens.n;
		if (kv_gseq_len(request->seq) + 1 < request->tokens.n) {
			r = look_ahead(s, request);
			if (r < 0)
				return r;
		}

		len = kv_gseq_len(request->seq);
		if (!request->follows)
			request->n_step = tokens_of_step(s, request, budget);
		if (len + 1 < request->tokens.n)
			budget -= request->n_step;
		r = make_room(s, i, len + request->n_step);
		if (r < 0)
			return r;
		i += r == 0;
	}
	return 0;
}

/* Whose turn it is, with the tokens of this step appended */
static int choose_members(struct kv_scheduler *s)
{
	int r;

	s->n_items = 0;
	for (uint32_t i = 0; i < s->n_running; i++) {
		struct kv_request *request = s->running[i];
		size_t len = kv_gseq_len(request->seq);

		if (!request->n_step)
			continue; /* its turn comes later */
		r = kv_gseq_append(request->seq, request->tokens.at + len, request->n_step);
		if (r < 0)
			return lib_error(r, "kv_gseq_append");
		s->members[s->n_items++] = request;
	}
	return 0;
}

/* The step's arrays, with the blocks of each group */
static int build_batches(struct kv_scheduler *s, struct kv_batch_data *ret)
{
	int r;

	for (uint32_t g = 0; g < s->options.pools->n_groups; g++) {
		for (uint32_t i = 0; i < s->n_items; i++)
			s->items[i] = (struct kv_batch_item){
				.seq = kv_gseq_seq(s->members[i]->seq, g),
				.n_query = s->members[i]->n_step,
			};
		r = kv_batch_build(s->batches[g], s->items, s->n_items, 0, 0);
		if (r < 0)
			return lib_error(r, "kv_batch_build");
		r = kv_batch_copy(s->batches[g], s->options.stream);
		if (r < 0)
			return lib_error(r, "kv_batch_copy");
		ret[g] = *kv_batch_data(s->batches[g]);
	}
	return 0;
}

/* What a step computed is shown to others; of windows, what no later token sees goes. */
static int finish_members(struct kv_scheduler *s)
{
	int r;

	for (uint32_t i = 0; i < s->n_items; i++) {
		struct kv_gseq *seq = s->members[i]->seq;

		r = s->options.share ? kv_gseq_publish(seq, s->options.stream) : 0;
		if (r < 0)
			return lib_error(r, "kv_gseq_publish");
		r = kv_gseq_done(seq, kv_gseq_len(seq), s->options.stream);
		if (r < 0)
			return lib_error(r, "kv_gseq_done");
	}
	return 0;
}

/* The next token of a request whose tokens are all computed */
static int choose(struct kv_scheduler *s, struct kv_request *request, const float *logits)
{
	const struct kv_model_shape *shape = kv_model_shape(s->options.model);
	size_t n_new = request->tokens.n - request->n_prompt;
	int token, r;

	if (!n_new && request->logits)
		memcpy(request->logits, logits, shape->n_vocab * sizeof(*logits));
	if (request->max_new) {
		token = kv_sampler_pick(&request->sampler, logits, shape->n_vocab);
		if (token < 0)
			return token;
		r = kv_tokens_push(&request->tokens, token);
		if (r < 0)
			return r;

		request->last_ns = now_ns();
		if (!n_new++)
			request->first_ns = request->last_ns;
		tell(s, request, token);
		if (n_new < request->max_new && request->tokens.n < shape->n_ctx &&
		    (s->options.ignore_end || !kv_tokenizer_is_end(s->options.tokenizer, token)))
			return 0;
	}

	for (uint32_t i = 0; i < s->n_running; i++)
		if (s->running[i] == request)
			leave_running(s, i);
	end_request(s, request, 0);
	return 0;
}

static int run_step(struct kv_scheduler *s)
{
	uint32_t n_vocab = kv_model_shape(s->options.model)->n_vocab, n_rows = 0;
	const struct timespec pause = {.tv_nsec = FOLLOW_PAUSE};
	struct kv_batch_data data[KV_MODEL_MAX_GROUPS];
	int r;

	r = choose_members(s);
	if (r < 0)
		return r;
	if (!s->n_items) {
		nanosleep(&pause, NULL);
		return 0;
	}
	r = build_batches(s, data);
	if (r < 0)
		return r;

	for (uint32_t i = 0; i < s->n_items; i++)
		if (kv_gseq_len(s->members[i]->seq) == s->members[i]->tokens.n)
			s->rows[n_rows++] = data->query_start_loc[i + 1] - 1;
	r = kv_model_step(s->options.model, data, s->options.pools->views, s->rows, n_rows, s->logits);
	if (r < 0)
		return r;
	r = finish_members(s);
	if (r < 0)
		return r;

	n_rows = 0;
	for (uint32_t i = 0; i < s->n_items; i++) {
		if (kv_gseq_len(s->members[i]->seq) != s->members[i]->tokens.n)
			continue;
		r = choose(s, s->members[i], s->logits + (size_t)n_rows++ * n_vocab);
		if (r < 0)
			return r;
	}
	return 0;
}

int kv_scheduler_run(struct kv_scheduler *s)
{
	int r;

	while (s->waiting || s->n_running) {
		r = admit(s);
		if (r < 0)
			return r;
		r = plan_step(s);
		if (r < 0)
			return r;
		if (!s->n_running)
			continue;
		r = run_step(s);
		if (r < 0)
			return r;
	}
	return 0;
}
