/* SPDX-License-Identifier: Apache-2.0 */
/* Choosing the next token from logits. The same seed and logits give the same tokens. */
#ifndef KV_ENGINE_SAMPLER_H
#define KV_ENGINE_SAMPLER_H

#include <stddef.h>
#include <stdint.h>

struct kv_sampler {
	float temperature; /* 0: the largest logit, the lowest id among equals */
	uint32_t top_k;	   /* choose among the k likeliest; 0: all */
	float top_p;	   /* and among the likeliest that together have probability p; 1: all */
	uint64_t state;	   /* the seed, then wherever it got to */
};

/* kv_sampler_pick() - @logits [n]. Return: a token id, or -ENOMEM. */
int kv_sampler_pick(struct kv_sampler *sampler, const float *logits, size_t n);

#endif
