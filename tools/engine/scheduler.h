/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Continuous batching: requests wait, run together, and leave when they are done.
 *
 *	waiting --admit: lookup, reserve the prompt--> running --last token--> done
 *	   ^                                              |
 *	   +------------- preempt: no room for it --------+
 *
 * Every step computes one token of each sequence that decodes, and a chunk of the prompts that
 * don't yet. When a running sequence needs a block and there is none, the youngest gives all of its
 * blocks back and waits; what it had published stays cached for its return.
 *
 * Chunks end where blocks end, and between two of them the prompt is looked up again. Who is about to
 * compute its next blocks promises them (kv_gseq_promise()); who finds them promised by another engine waits
 * for them in place of computing them too, and goes on by itself when nothing comes of it.
 *
 * Threads: one at a time.
 */
#ifndef KV_ENGINE_SCHEDULER_H
#define KV_ENGINE_SCHEDULER_H

#include <kvcached/kvcached.h>

#include "tools/engine/model.h"
#include "tools/engine/pools.h"
#include "tools/engine/sampler.h"
#include "tools/engine/tokenizer.h"

struct kv_scheduler;

struct kv_request {
	/* Given: the prompt, to which the generated tokens are appended. */
	struct kv_tokens tokens;
	size_t n_prompt;
	uint32_t max_new; /* tokens to generate at most */
	struct kv_sampler sampler;
	float *logits; /* [n_vocab] filled with those after the prompt; or NULL */

	/* Told. */
	size_t n_hit; /* prompt tokens that were found, not computed */
	uint32_t n_preempted;
	int64_t added_ns; /* monotonic clock */
	int64_t first_ns; /* first generated token */
	int64_t last_ns;
	bool done;
	int error; /* 0, or why it ended early; then `why` says more */
	char why[256];

	/* The scheduler's. */
	struct kv_gseq *seq;
	uint32_t n_step;   /* tokens of the step that is being made */
	bool follows;	      /* another engine computes what comes next */
	int64_t follow_until; /* when that isn't waited for any longer; 0: it doesn't wait */
	size_t n_ours;	      /* tokens up to which nobody else computes it */
	struct kv_request *next; /* kv_scheduler::waiting */
};

struct kv_scheduler_options {
	const struct kv_engine_pools *pools; /* mapped */
	struct kv_model *model; /* made for chunk + max_batch tokens, max_batch sequences */
	const struct kv_tokenizer *tokenizer;
	void *stream;	     /* the model's */
	uint32_t max_batch;  /* sequences that run together */
	uint32_t chunk;	     /* prompt tokens of a step */
	uint32_t max_blocks; /* of the longest sequence */
	bool share;	     /* look up and publish */
	bool ignore_end;     /* generate max_new tokens, whatever the model says */
	int64_t wait_ns;     /* how long a request may wait for room while nothing runs */

	/* A token was generated, or the request is done (token -1). May be NULL. */
	void (*on_token)(void *context, struct kv_request *request, int32_t token);
	void *context;
};

/* kv_scheduler_new() - Return: 0; -ENOMEM; errors of kv_batch_new() */
int kv_scheduler_new(const struct kv_scheduler_options *options, struct kv_scheduler **ret);

/* Sequences that still run give their blocks back. NULL is allowed; returns NULL. */
struct kv_scheduler *kv_scheduler_free(struct kv_scheduler *scheduler);

/* kv_scheduler_add() - last in the queue; @request stays the caller's and must not move */
void kv_scheduler_add(struct kv_scheduler *scheduler, struct kv_request *request);

/**
 * kv_scheduler_run() - until every request is done
 *
 * A request that can't be served ends with its error; the others go on.
 * Return: 0; an error of library, model or kernels that ends the run.
 */
int kv_scheduler_run(struct kv_scheduler *scheduler);

#endif
