/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sparse attention (DSA: DeepSeek-V3.2, V4): an indexer scores every cached token, the best top_k
 * are attended to.
 *
 * Each token has a key of 128 elements in the indexer's cache, one for all heads. A block of it is
 * split: first the codes of its tokens one after the other, then their scales. A view of dtype
 * KV_BYTES, n_heads 1 says by its head_dim which:
 *
 *	head_dim  codes of a token              scales of a token
 *	132	  128 e4m3                      1 f32: x = code * scale
 *	68	  64 bytes: 128 e2m1, element   4 ue8m0 (2^(byte - 127)), one for each 32 elements
 *		  2 i in the lower half of
 *		  byte i
 *
 *	code byte c of row r    base + block * block_stride + r * code_bytes + c
 *	scale byte s of row r   base + block * block_stride + block_tokens * code_bytes + r * 4 + s
 *
 * token_stride and head_stride are not looked at. With 64 tokens a block has 8448 or 4352 bytes.
 *
 * Mathematics (kernels/dsa_ref.c is the definition of right), query t at position p of its sequence:
 *	score(t, j) = k_scale_j * sum_h w[t][h] max(q[t][h] . k_j, 0)	for j <= p, in f32
 *	chosen: the top_k largest; of equal ones those at lower positions; a score of NaN
 *	        counts as -infinity, a product of NaN as 0
 * then attention of t over latent rows of the chosen tokens alone, as in mla.h:
 *	x_j = sm_scale (q[t][h] . [latent_j | rope_j]);  out = sum e^(x_j) latent_j / sum e^(x_j)
 * Source: DeepSeek-V3.2, arXiv:2512.02556; top-k by radix, one digit a pass.
 *
 * Calls are as those of attention.h: on KV_DEVICE_CUDA all pointers are the device's, nothing is
 * allocated or awaited, a call can be captured in a graph, and lengths are read at each replay.
 * A call is repeatable to the bit. Threads: any function, any thread, any time.
 */
#ifndef KVCACHED_DSA_H
#define KVCACHED_DSA_H

#include <kvcached/layout.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KV_INDEX_DIM	  128
#define KV_INDEX_ROW_FP8  132 /* head_dim of a view */
#define KV_INDEX_ROW_FP4  68
#define KV_INDEX_FP4_TILE 32 /* elements that share a scale */

struct kv_index_write_args {
	size_t size;
	int32_t device; /* enum kv_device */
	int32_t dtype;	/* of key: f32, f16, bf16 */
	int64_t n_tokens;
	const void *key;      /* [T, 128] */
	int64_t key_stride;   /* elements from token to token; 0: dense */
	const int64_t *slots; /* [T] block * block_tokens + row; negative: the token is skipped */
	struct kv_view cache;
	int32_t pow2_scales; /* 1: e4m3's scales are rounded up to powers of 2 */
	int32_t reserved;
	void *stream;
};

/**
 * kv_index_write() - store the keys of T tokens at their slots
 *
 * e4m3: scale = max(largest |x|, 1e-4) / 448, codes are round(x / scale), NaN stays NaN. e2m1:
 * scale = the least power of 2 that is largest |x| / 6 or more, in 2^-126..2^127; codes are
 * round-to-nearest-even(x / scale), at most 6; NaN, which the type lacks, becomes 6.
 * NaN doesn't count for a scale.
 *
 * Return: 0; -EINVAL if a field is out of range; -ENOTSUP if no backend can do it; -EIO on a CUDA
 * error. kv_error_text() has every reason.
 */
int kv_index_write(const struct kv_index_write_args *args);

enum kv_index_form {
	KV_INDEX_SLOTS = 0,	/* block * block_tokens + row, as kv_sparse_mla() takes them */
	KV_INDEX_POSITIONS = 1, /* in the sequence */
};

struct kv_index_args {
	size_t size;
	int32_t device; /* enum kv_device */
	int32_t form;	/* enum kv_index_form */
	int32_t n_seqs;
	int32_t n_tokens;      /* T: rows of q and chosen; those in no sequence stay untouched */
	int32_t max_query_len; /* at least the queries of the longest sequence */
	int32_t max_seq_len;   /* at least the longest; keys past it are not looked at */
	int32_t table_width;
	int32_t n_heads; /* of the indexer: 64 or 32; any up to 256 */
	int32_t top_k;	 /* 1..65536; 2048 */
	int32_t reserved;
	const void *q;			/* [T, n_heads, 128] e4m3 */
	const float *weights;		/* [T, n_heads]; q's scale, 1 / sqrt(n_heads) and so on in them */
	int64_t q_stride;		/* elements from token to token; 0: dense */
	int64_t weights_stride;
	const int32_t *query_start_loc; /* [B + 1]; NULL: one query a sequence, T == B */
	const int32_t *seq_lens;	/* [B] the new tokens included */
	const int32_t *block_table;	/* [B, table_width] */
	struct kv_view cache;
	int32_t *chosen; /* [T, top_k] by ascending position, then -1; NULL: scores alone */
	float *scores;	 /* [T, scores_stride]: the keys that t sees, what is past them stays as it
			  * is; or NULL: they are kept in the workspace */
	int64_t scores_stride; /* floats; a multiple of 4, at least max_seq_len; 0: that, rounded up */
	size_t workspace_bytes;
	void *workspace; /* see kv_index_workspace_bytes(); its content means nothing between calls */
	void *stream;
};

/**
 * kv_index_choose() - scores of all cached tokens for each query, and which are the best
 *
 * Return: as kv_index_write().
 */
int kv_index_choose(const struct kv_index_args *args);

/* kv_index_workspace_bytes() - T * max_seq_len f32 where `scores` is NULL. Return: 0; -EINVAL. */
int kv_index_workspace_bytes(const struct kv_index_args *args, size_t *ret_bytes);

struct kv_sparse_mla_args {
	size_t size;
	int32_t device; /* enum kv_device */
	int32_t dtype;	/* of q and out: f32, f16, bf16; and of rope in packed rows */
	int32_t n_tokens;
	int32_t n_heads; /* 1..1024 */
	int32_t latent_dim;
	int32_t rope_dim;
	int32_t top_k; /* width of chosen */
	float sm_scale;
	const void *q;	      /* [T, n_heads, latent_dim + rope_dim] */
	int64_t q_stride;     /* elements from token to token; 0: dense */
	const int32_t *chosen; /* [T, top_k] slots in any order, none twice; negative: none */
	struct kv_view cache; /* rows as in mla.h: 576 elements, or packed (KV_BYTES, 656 bytes) */
	void *out;	      /* [T, n_heads, latent_dim] */
	int64_t out_stride;
	float *lse; /* [T, n_heads] natural log, or NULL */
	size_t workspace_bytes;
	void *workspace; /* see kv_sparse_mla_workspace_bytes() */
	void *stream;
};

/**
 * kv_sparse_mla() - attention of each query over its own chosen latent rows: decode and prefill
 *
 * A query without any: out = 0, lse = -infinity.
 *
 * Return: as kv_index_write().
 */
int kv_sparse_mla(const struct kv_sparse_mla_args *args);

/**
 * kv_sparse_mla_workspace_bytes() - for parts of few queries' work on many multiprocessors
 *
 * Without it (NULL) each query is one part. Its content means nothing between calls.
 * Return: 0; -EINVAL.
 */
int kv_sparse_mla_workspace_bytes(const struct kv_sparse_mla_args *args, size_t *ret_bytes);

/**
 * kv_index_write_validate() - why the call would be refused
 * @text: receives a sentence for each reason, joined by "; ", cut to @text_bytes
 *
 * No pointer is followed. Return: 0; -EINVAL; -ENOTSUP.
 */
int kv_index_write_validate(const struct kv_index_write_args *args, char *text, size_t text_bytes);

/* kv_index_validate() - likewise, of kv_index_choose() */
int kv_index_validate(const struct kv_index_args *args, char *text, size_t text_bytes);

/* kv_sparse_mla_validate() - likewise, of kv_sparse_mla() */
int kv_sparse_mla_validate(const struct kv_sparse_mla_args *args, char *text, size_t text_bytes);

#ifdef __cplusplus
}
#endif
#endif
