/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Work on blocks: writing K and V, attention over block tables, copying blocks.
 *
 * Each operation takes a struct of pointers, sizes and strides, and a device. On KV_DEVICE_CUDA all
 * pointers are device pointers, `stream` is a cudaStream_t (or CUstream), work is queued there,
 * nothing is allocated or awaited, and a call can be captured in a graph. On KV_DEVICE_HOST all
 * pointers are host pointers, `stream` is ignored and the work is finished on return.
 *
 * Mathematics (kernels/attention_ref.c is the definition of right):
 *   query row i of sequence b stands at position p = seq_lens[b] - q_len(b) + i
 *   x_j = sm_scale * k_scale * (q . k_j), for j <= p (causal) and j >= p - window_left
 *   x_j = softcap * tanh(x_j / softcap)                                   if softcap > 0
 *   out = v_scale * sum_j e^(x_j) v_j / sum_j e^(x_j);   lse = ln sum_j e^(x_j)
 *   a row that sees no key: out = 0, lse = -inf
 * Sources: online softmax arXiv:1805.02867; paged attention arXiv:2309.06180.
 *
 * A call is repeatable to the bit. With `invariant` the value of a row depends, besides, on that
 * row's query and keys alone: not on the batch it runs in, on how a prompt was cut into chunks, or
 * on which ids its blocks have. Without, faster backends may run, whose sums fall into parts that
 * depend on the lengths of the whole batch; and NaN in K or V of a token may then spoil all rows of
 * its sequence in the call.
 *
 * Threads: every function may be called from any thread at any time.
 */
#ifndef KVCACHED_ATTENTION_H
#define KVCACHED_ATTENTION_H

#include <kvcached/layout.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kv_write_args {
	size_t size;
	int32_t device;	    /* enum kv_device */
	int32_t dtype;	    /* of key and value */
	int64_t n_tokens;   /* T */
	const void *key;    /* [T, n_heads, head_dim] of k */
	const void *value;  /* [T, n_heads, head_dim] of v */
	int64_t key_stride; /* elements from token to token; 0: dense */
	int64_t value_stride;
	const int64_t *slots; /* [T]; negative: the token is skipped */
	struct kv_view k;
	struct kv_view v;
	void *stream;
};

/**
 * kv_write() - store K and V of T tokens at their slots
 *
 * A block id is slots[t] / block_tokens. To an 8-bit type values are stored as
 * round-to-nearest-even(x / scale), saturated at +-448; NaN stays NaN.
 *
 * Return: 0; -EINVAL if a field is out of range; -ENOTSUP if no backend can do it (no such device
 * in this build, sizes); -ENOMEM (host memory for scratch); -EIO on a CUDA error. kv_error_text()
 * names the field.
 */
int kv_write(const struct kv_write_args *args);

struct kv_attention_args {
	size_t size;
	int32_t device;	   /* enum kv_device */
	int32_t dtype;	   /* of q and out: f32, f16, bf16 */
	int32_t n_seqs;	   /* B; padded sequences have q_len 0 */
	int32_t n_tokens;  /* T: rows of q and out; rows past query_start_loc[B] stay untouched */
	int32_t n_heads_q; /* a multiple of the view's n_heads */
	int32_t max_query_len;		/* at least the longest q_len */
	int32_t max_seq_len;		/* at least the longest seq_len */
	int32_t table_width;		/* entries of a row of block_table */
	const void *q;			/* [T, n_heads_q, head_dim] */
	void *out;			/* [T, n_heads_q, v.head_dim]; apart from q */
	float *lse;			/* [T, n_heads_q] natural log, or NULL */
	const int32_t *query_start_loc; /* [B + 1] */
	const int32_t *seq_lens;	/* [B] tokens in cache, the new ones included */
	const int32_t *block_table;	/* [B, table_width] */
	struct kv_view k;
	struct kv_view v;
	float sm_scale;	     /* 0: 1 / sqrt(head_dim) */
	float softcap;	     /* 0: none */
	int32_t window_left; /* keys before p that are visible; -1: all */
	int32_t causal;	     /* 1, or 0: every query sees all seq_len keys */
	int32_t invariant;   /* 1: only backends whose rows have the same bits in every batch */
	size_t workspace_bytes;
	void *workspace; /* see kv_attention_workspace_bytes(); NULL: only backends that need none
			  */
	void *stream;
};

/**
 * kv_attention() - attention of new tokens over the blocks of their sequences
 *
 * Decode (one query a sequence), chunked prefill and mixed batches are the same call. What lies in
 * a block past seq_len has no influence, NaN included.
 *
 * Return: as kv_write().
 */
int kv_attention(const struct kv_attention_args *args);

#define KV_WORKSPACE_ALIGN 256

/**
 * kv_attention_workspace_bytes() - the workspace with which the fastest backend can run @args
 * @ret_bytes: bytes; 0: it needs none
 *
 * Goes by sizes, types and strides: of pointers only the views' bases are looked at, and lengths in
 * memory are not. It does not depend on n_seqs, max_seq_len or table_width, and grows with
 * max_query_len: one workspace of the largest max_query_len serves all steps and layers of a model.
 * The caller zeroes it once, before its first use; each call leaves it ready for the next. Calls
 * that may run at the same time need one each.
 *
 * Return: as kv_write().
 */
int kv_attention_workspace_bytes(const struct kv_attention_args *args, size_t *ret_bytes);

struct kv_copy_args {
	size_t size;
	int32_t device; /* enum kv_device */
	int32_t n_pairs;
	const kv_block_id *pairs; /* [n_pairs, 2] source, destination: on the HOST, any device */
	int32_t n_views;
	const struct kv_view *views; /* [n_views], on the host */
	void *stream;
};

/**
 * kv_copy_blocks() - copy whole blocks, bit for bit, in every view given
 *
 * A pair whose ids are equal is skipped. No destination may be another pair's source or
 * destination (-EINVAL).
 *
 * Return: as kv_write().
 */
int kv_copy_blocks(const struct kv_copy_args *args);

/**
 * kv_backend_names() - the backends of this build for @device, most preferred first
 *
 * KVCACHED_BACKEND=name in the environment picks one for a whole run; KVCACHED_THREADS=n bounds the
 * threads of a call on the host (default: the CPUs the process may use, at most 8).
 * Return: a static list that ends with NULL.
 */
const char *const *kv_backend_names(enum kv_device device);

#ifdef __cplusplus
}
#endif
#endif
