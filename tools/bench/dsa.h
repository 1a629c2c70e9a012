/* SPDX-License-Identifier: Apache-2.0 */
/* kvbench dsa: one case's arrays, and whether its first call was right (dsa_right.c). */
#ifndef KV_TOOLS_BENCH_DSA_H
#define KV_TOOLS_BENCH_DSA_H

#include <stdbool.h>
#include <stdint.h>

#include <kvcached/dsa.h>

#define KV_BENCH_DSA_BLOCK  64 /* tokens */
#define KV_BENCH_DSA_LATENT 512
#define KV_BENCH_DSA_ROPE   64
#define KV_BENCH_DSA_DIM    (KV_BENCH_DSA_LATENT + KV_BENCH_DSA_ROPE)
#define KV_BENCH_DSA_SCALE  0.0721688f /* 1 / sqrt(128 + 64) */

enum kv_bench_dsa_work {
	KV_BENCH_DSA_CHOOSE, /* scores and top-k of one query a sequence */
	KV_BENCH_DSA_SCORE,  /* scores alone */
	KV_BENCH_DSA_ATTEND,
	KV_BENCH_DSA_WRITE, /* of seqs tokens */
};

struct kv_bench_dsa_case {
	enum kv_bench_dsa_work what;
	int32_t row; /* bytes of a token in the cache */
	int32_t heads, seqs, tokens, top_k;
	bool host; /* small enough for a build without CUDA */
};

struct kv_bench_dsa {
	const struct kv_bench_dsa_case *c;
	int32_t n_calls, width; /* blocks of a sequence */
	int64_t scores_stride;
	struct kv_view view;
	/* The device's; tables, chosen rows and slots are each call's own. */
	char *pool, *q, *out;
	float *weights, *scores;
	int32_t *table, *lens, *chosen;
	int64_t *slots;
	void *workspace;
	size_t workspace_bytes;
	/* The host's: of all calls, as the device's. */
	char *host_q; /* e4m3 for the indexer, bf16 for attention; of a write the keys, bf16 */
	float *host_weights;
	int32_t *host_table, *host_chosen;
	int64_t *host_slots;
};

/**
 * kv_bench_dsa_right() - hold the answer of call 0 against sums in double of what is stored
 * @ret_error: length of the difference over that of the right answer, of the first and the last
 *             query; 1 if a choice is not the best of its scores, or bytes written are wrong
 *
 * Return: 0; -ENOMEM.
 */
int kv_bench_dsa_right(const struct kv_bench_dsa *w, double *ret_error);

#endif
