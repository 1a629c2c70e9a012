/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Work on blocks: writing K and V, reading them back, attention over block tables, copying blocks.
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

	/* Of 8-bit types; unused while NULL. A caller that gives a smaller `size` has none of them. */
	const float *k_scales; /* [n_heads] in place of k.scale */
	const float *v_scales;
	struct kv_view k_row_scales; /* f32, head_dim 1: receives the scale of each row, which is then
				      * max(largest |x|, 1e-4) / (448 or 57344); base NULL: none */
	struct kv_view v_row_scales;
};

/**
 * kv_write() - store K and V of T tokens at their slots
 *
 * A block id is slots[t] / block_tokens. To an 8-bit type values are stored as
 * round-to-nearest-even(x / scale), saturated at +-448 (e4m3) or +-57344 (e5m2); NaN stays NaN.
 *
 * Return: 0; -EINVAL if a field is out of range; -ENOTSUP if no backend can do it (no such device
 * in this build, sizes); -ENOMEM (host memory for scratch); -EIO on a CUDA error. kv_error_text()
 * names the field.
 */
int kv_write(const struct kv_write_args *args);

struct kv_read_args {
	size_t size;
	int32_t device;	   /* enum kv_device */
	int32_t dtype;	   /* of key and value: f32, f16, bf16 */
	int32_t n_seqs;	   /* B */
	int32_t n_tokens;  /* rows of key and value; none past them is written */
	void *key;	   /* [n_tokens, n_heads, head_dim] of k; NULL: only value */
	void *value;	   /* the same of v; NULL: only key */
	int64_t key_stride; /* elements from token to token; 0: dense */
	int64_t value_stride;
	const int32_t *start_loc;   /* [B + 1] rows that receive sequence b's tokens */
	const int32_t *first;	    /* [B] its token that comes first, or NULL: 0 */
	const int32_t *block_table; /* [B, table_width] */
	int32_t table_width;
	int32_t reserved;
	struct kv_view k;
	struct kv_view v;
	void *stream;
	const float *k_scales; /* as in kv_write_args */
	const float *v_scales;
	struct kv_view k_row_scales;
	struct kv_view v_row_scales;
};

/**
 * kv_read() - K and V of sequences from their blocks to rows one after the other
 *
 * Row start_loc[b] + i receives token first[b] + i of sequence b: bit for bit where the types are the
 * same, else as code times scale, rounded once. Tokens outside the table are not read, and their rows
 * stay as they are; so do rows outside start_loc's.
 *
 * Return: as kv_write().
 */
int kv_read(const struct kv_read_args *args);

/*
 * The first part, up to `stream`, is enough for causal attention over a paged cache. Fields of the
 * second part are unused while they are 0 or NULL; a caller built against an older header gives a
 * smaller `size`, and the rest counts as 0. A backend that cannot do what a field asks for is not
 * used; if none can, kv_attention_validate() (backend.h) has every reason.
 *
 * Which keys the query at position p sees, of keys j in [0, seq_len):
 *	j <= p                           if causal (seq_causal, where given, decides for each sequence)
 *	p - window_left <= j             if window_left >= 0, or j < window_prefix_lens[b]
 *	j <= p + window_right            if not causal and window_right > 0
 *	  or first <= j <= last          with doc_ranges: even a key that the lines above hide; with
 *	                                 doc_clamped only if also p - window_left <= j
 *	key_begin <= j < key_end         always
 * With a tree mask the last q_len keys are the new tokens themselves: row t sees new key i if bit i
 * of its mask says so, and not by causality; a new token stands at position seq_len - q_len + depth,
 * depth being the number of bits in its mask less one.
 *
 * Scores: x = sm_scale k_scale (q . k); softcap; x += slope_h (j - p); mask. A sink is one more logit
 * of its query head, neither scaled nor capped, with no value: it grows the denominator of out.
 *
 * Cross-attention: seq_lens are the encoder's lengths, causal 0. Layers that share a cache: views of
 * the layer that was written, and no kv_write(). Decode over parts of the context on several ranks
 * (cp_size > 1): seq_lens stay global; token j lies on rank (j / cp_interleave) % cp_size, at local
 * index j / (cp_interleave cp_size) cp_interleave + j % cp_interleave, which is what block_table
 * covers; combine the ranks' out and lse with kv_merge().
 */
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

	/* Second part. */
	const float *sinks;	   /* [n_heads_q] */
	const float *alibi_slopes; /* [n_heads_q] */
	const float *k_scales;	   /* [k.n_heads] in place of k.scale, of 8-bit types */
	const float *v_scales;
	struct kv_view k_row_scales; /* f32, head_dim 1: a scale of each (block, token, head), in place
				      * of k.scale; base NULL: none */
	struct kv_view v_row_scales;
	const uint8_t *seq_causal;	   /* [B] 0 or 1, in place of causal */
	const int32_t *window_prefix_lens; /* [B] keys from 0 on that no window hides */
	const int32_t *doc_ranges; /* [T, 2] first and last position, -1 -1: none; first >= last: none */
	const uint32_t *tree_mask; /* [T, tree_words] bit i % 32 of word i / 32: new key i */
	int32_t tree_words;	   /* 32 * tree_words is at least max_query_len */
	int32_t doc_clamped;	   /* 1: the window bounds ranges too */
	int32_t window_right;	   /* > 0, not causal: keys after p that are visible; 0: all */
	int32_t lse_with_sink;	   /* 1: lse is of the denominator, the sink in it; 0: of the keys */
	int32_t key_begin;
	int32_t key_end; /* 0: seq_len */
	int32_t shared_prefix; /* tokens at the start that all sequences have in the blocks of row 0, a
				* multiple of block_tokens: read once for all. Of out as if 0 */
	int32_t cp_size;       /* 0, 1: none */
	int32_t cp_rank;
	int32_t cp_interleave; /* 0: 1 */
	int32_t quantize;      /* 1: q and weights may be rounded to 8 bits; error up to 6e-2 */
	int32_t out_dtype;     /* 0: dtype; f32 for parts that are merged */
	int64_t q_token_stride; /* elements; 0: n_heads_q * k.head_dim */
	int64_t out_token_stride;
	int64_t lse_token_stride; /* floats; both 0: [T, n_heads_q] */
	int64_t lse_head_stride;
	int32_t latent_dim; /* > 0: latent attention (mla.h): k's rows are [latent | rope], V is the
			     * latent part and v unused; q is [T, n_heads_q, latent_dim + rope_dim] */
	int32_t rope_dim;
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
 * max_query_len, and with n_tokens where there is a shared_prefix: one workspace of the largest serves
 * all steps and layers of a model.
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
