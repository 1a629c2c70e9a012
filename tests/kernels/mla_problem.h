/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Problems of latent attention: a pool of rows in shuffled blocks on the device under test, written
 * by kv_mla_write(), and the answer in double over what then lies there.
 */
#ifndef KV_TESTS_KERNELS_MLA_PROBLEM_H
#define KV_TESTS_KERNELS_MLA_PROBLEM_H

#include "kernels/attention.h"
#include "kernels/mla.h"

#define MLA_SEQS 512

struct mla_spec {
	int32_t dtype;	  /* of q and what is written */
	int32_t kv_dtype; /* of rows; KV_BYTES: packed */
	int32_t latent, rope, heads, block_tokens;
	float scale; /* of 8-bit rows; 0: 1 */
	int32_t n_seqs;
	int32_t lens[MLA_SEQS], q_lens[MLA_SEQS];
	int32_t pad_seqs, pad_tokens; /* rows of the call without a query */
	int32_t cp_size, cp_rank, cp_interleave;
	int32_t not_causal;
	int32_t out_f32;
	int32_t gap; /* bytes between rows */
	int32_t q_gap, out_gap; /* elements between tokens */
	double loudness; /* of q; 0: 1 */
};

struct mla_problem {
	struct mla_spec spec;
	struct kv_attention_args args; /* of the device */
	int32_t n_tokens, n_blocks, dim;
	size_t pool_bytes, out_bytes, lse_bytes;
	char *pool; /* the device's */
	void *q;
	int32_t *loc, *lens, *table;
	/* The host's. */
	char *host_q;
	double *rows; /* [n_blocks * block_tokens, dim] code times scale */
	int32_t *host_table;
	double *out, *lse; /* right: [T, heads, latent], [T, heads] */
};

/* Latents of @spec: 512 + 64, bf16, 16 heads, blocks of 64. */
struct mla_spec mla_spec_default(void);
void mla_spec_add(struct mla_spec *spec, int32_t len, int32_t q_len);

struct mla_problem *mla_problem_new(const struct mla_spec *spec);
void mla_problem_free(struct mla_problem *p);

/* New lengths, in the memory that is there: none above what it had. */
void mla_problem_lengths(struct mla_problem *p, const int32_t *lens);

/*
 * Runs it on @backend; -ENOTSUP if that can't. Else 0, after a check of each row, of padding and of
 * repetition: a second run has the same bits.
 */
int mla_problem_check(struct mla_problem *p, const struct kv_attn_backend *backend);

/* One call, into memory filled with @poison. Out is copied to *ret_out (to be freed). */
int mla_problem_run(struct mla_problem *p, const struct kv_attn_backend *backend, int poison,
		    void *stream, char **ret_out, float **ret_lse);

/* The largest error of a row's norm, and of lse, against the answer. */
void mla_problem_errors(const struct mla_problem *p, const char *out, const float *lse,
			double *ret_out, double *ret_lse);
double mla_problem_tolerance(const struct mla_spec *spec);

#endif
