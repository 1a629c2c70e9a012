/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An attention problem: a batch over a pool in the memory of the device under test, and its answer
 * in double precision, calculated from the values that are stored.
 *
 * Whatever no query may look at is NaN: unused rows of blocks, blocks of no sequence, gaps of the
 * layout. K, V and q of a sequence come from its name and the position alone, so that the same
 * sequence can be asked about in another batch.
 */
#ifndef KV_TESTS_KERNELS_PROBLEM_H
#define KV_TESTS_KERNELS_PROBLEM_H

#include "kernels/attention.h"

#define PROBLEM_SEQS 16

struct problem_spec {
	int n_seqs;
	int names[PROBLEM_SEQS]; /* seeds of their data */
	int q_lens[PROBLEM_SEQS];
	int lens[PROBLEM_SEQS];
	int n_heads_kv;
	int group;
	int dk;
	int dv;
	int block_tokens;
	int dtype;
	int k_dtype;
	int v_dtype;
	float k_scale; /* of 8-bit types */
	float v_scale;
	int kind; /* enum kv_layout_kind */
	bool head_major;
	int gap; /* elements between rows, so that they are not aligned to 16 bytes */
	int window_left;
	float softcap;
	float sm_scale;
	int causal;
	int invariant;
	int max_seq_len; /* 0: the longest of lens */
	int spare_rows;	 /* of q and out, past the last query */
	bool sinks;	 /* of +-20, -infinity and between, a head each */
	bool alibi;	 /* slopes 2^-i */
	bool head_scales; /* of 8-bit types: one a KV head */
	bool row_scales;  /* one a row */
	bool lse_with_sink;
	int seq_causal;	   /* 1: every second sequence is not causal, 0: causal decides */
	int window_right;
	int prefix;	   /* window_prefix_lens: prefix + 3 b */
	int docs;	   /* ranges of so many positions; 0: none */
	int doc_clamped;
	int tree;	   /* 1: the new tokens are a tree, 2: chains, 3: some rows see no new token */
	int cp_size;
	int cp_rank;
	int cp_interleave;
	int key_begin;
	int key_end;
	int shared_prefix; /* blocks of all sequences but the first are those of the first */
	int out_dtype;
	int strides;	   /* 1: rows of q, out and lse lie apart */
	bool unanswered; /* nothing is held against the answer: it is not calculated */
	int shuffle;	 /* which order the ids of blocks come in */
};

struct problem {
	struct problem_spec spec;
	struct kv_attention_args args; /* pointers are the device's */
	int n_rows;		       /* of q, the spare ones left out */
	int n_heads_q;
	size_t pool_bytes;
	void *pool;
	void *workspace; /* zeroed once */
	double *out;	 /* [n_rows, n_heads_q, dv] right answers */
	double *lse;	 /* [n_rows, n_heads_q] */
};

/* K and V that fit together: 16-bit floats, 2 KV heads of 64, blocks of 16, one name a sequence. */
struct problem_spec problem_default(void);

struct problem *problem_new(const struct problem_spec *spec);
struct problem *problem_free(struct problem *problem);

/* Whether @backend can run it; -ENOTSUP is the only reason not to. */
bool problem_can_run(const struct problem *problem, const struct kv_attn_backend *backend);

/* Of a result of @dtype by its norm, whose sums were exact to f32. */
double problem_tolerance(int dtype);

int problem_out_dtype(const struct problem *problem);

/* Runs @backend; the results, lse included, on the host: free() them. */
void problem_run(struct problem *problem, const struct kv_attn_backend *backend, void **ret_out,
		 float **ret_lse);

/* Runs @backend and holds the results against the answer, with the tolerance of the types. */
void problem_check(struct problem *problem, const struct kv_attn_backend *backend);

/* Backends of the device under test, and the vector sets this CPU has; ends with NULL. */
const struct kv_attn_backend *const *problem_backends(void);

#endif
