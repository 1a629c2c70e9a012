/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batch metadata from lengths alone: what kv_batch_build() makes of sequences, made of arrays, on the
 * host or by one GPU kernel, with equal results. So lengths that only the device knows (after drafts
 * were rejected, say) need no copy back, and the build can be part of a captured graph.
 *
 *	query_start_loc	[R + 1] sums of n_query; repeats past the real sequences
 *	seq_lens	[R] n_computed + n_query; 0 where n_query is 0
 *	positions	[T] n_computed + i for query i of its sequence; 0 past the last
 *	slots		[T] where the position lies; -1: padding, another rank's token, a position that
 *			the table row does not cover, or the null block: it must not be written
 *	token_to_seq	[T] whose the token is; 0 past the last
 *	is_prefilling	[R] 1 while n_computed < n_prompt
 *	cp_local_lens	[R] of seq_lens' tokens those on this rank
 *	cp_empty	[T] 1 where that is 0 for the token's sequence, and past the last token: such a
 *			row's lse counts as -infinity when ranks combine; else 0
 *
 * Rows of block_table are those of the kernel's block size; kv_table_expand() makes them of a pool's
 * larger blocks. Threads: every function may be called from any thread at any time.
 */
#ifndef KVCACHED_METADATA_H
#define KVCACHED_METADATA_H

#include <kvcached/layout.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KV_METADATA_MAX_SEQS 8192 /* of one build on a GPU */

struct kv_metadata_args {
	size_t size;
	int32_t device;	      /* enum kv_device: where all arrays lie */
	int32_t n_seqs;	      /* R, the padded ones included */
	int32_t n_tokens;     /* T: room of the outputs by token */
	int32_t table_width;
	int32_t block_tokens; /* of the table's blocks */
	int32_t null_block;   /* its slots are padding; -1: there is none */
	int32_t cp_size;      /* 0, 1: one rank; see attention.h */
	int32_t cp_rank;
	int32_t cp_interleave; /* 0: 1 */
	int32_t advance;       /* 1: first go on to the next step: n_computed += n_query - n_rejected;
				* n_query = 1, if it is not 0. For drafting, in place */
	int32_t *n_query;      /* [R] */
	int32_t *n_computed;   /* [R] */
	const int32_t *n_rejected; /* [R] of the last step's queries; or NULL */
	const int32_t *n_prompt;   /* [R] or NULL: nothing is prefilling */
	const int32_t *rows;	   /* [R] row of block_table of each; NULL: its own number */
	const int32_t *block_table;
	int32_t *query_start_loc; /* outputs: each may be NULL */
	int32_t *seq_lens;
	int32_t *cp_local_lens;
	int32_t *token_to_seq;
	int64_t *positions;
	int64_t *slots;
	uint8_t *is_prefilling;
	int32_t *max_lens; /* [2] longest query, longest sequence */
	void *stream;
	uint8_t *cp_empty; /* output; a caller that gives a smaller `size` has none */
};

/**
 * kv_metadata_build() - the arrays of one step
 *
 * Tokens past n_tokens are left out; on the host that is -E2BIG, and nothing is written.
 * Return: 0; -EINVAL: the text names the field; -E2BIG; -ENOTSUP: no such device in this build, or
 * more than KV_METADATA_MAX_SEQS on a GPU; -EIO.
 */
int kv_metadata_build(const struct kv_metadata_args *args);

/* kv_cp_local_len() - how many of @len tokens lie on @rank of @size; they sum to @len over ranks */
int32_t kv_cp_local_len(int32_t size, int32_t rank, int32_t interleave, int32_t len);

/* kv_cp_local_bound() - no rank has more of at most @max_len tokens */
int32_t kv_cp_local_bound(int32_t size, int32_t interleave, int32_t max_len);

/**
 * kv_table_block_size() - the kernel's block for a pool's block
 * @sizes: [n_sizes] that the kernel does
 *
 * Return: the largest size that divides @pool_tokens; -ENOTSUP: none does.
 */
int kv_table_block_size(int32_t pool_tokens, const int32_t *sizes, int n_sizes);

/* kv_table_expand() - ids of a pool's blocks as ids of @ratio smaller ones each: @ret: [n * ratio] */
void kv_table_expand(const kv_block_id *ids, int n, int32_t ratio, kv_block_id *ret);

/**
 * kv_view_split() - a view of blocks of @kernel_tokens, for ids that kv_table_expand() makes
 *
 * Return: 0; -EINVAL: it does not divide the block; -ENOTSUP: the smaller blocks would not lie at a
 * constant stride (padding between blocks, several layers in one, heads before tokens).
 */
int kv_view_split(const struct kv_view *view, int32_t kernel_tokens, struct kv_view *ret);

#ifdef __cplusplus
}
#endif
#endif
