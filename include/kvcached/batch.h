/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batches: what a step's kernels read, built from sequences.
 *
 * All arrays lie in host memory that the device can read (pinned, mapped), so an engine hands them
 * straight to kernels or copies them in one go. A batch is reused from step to step; what it
 * shows is valid until its next build.
 *
 * A sequence takes part with its last n_query tokens: those just appended. Rows past the real ones,
 * up to the padded size, are: query_start_loc repeated, seq_lens and n_computed 0, table rows of the null
 * block, slots -1, positions 0, tokens 0. Columns past a sequence's blocks hold the null block.
 */
#ifndef KVCACHED_BATCH_H
#define KVCACHED_BATCH_H

#include <kvcached/sequence.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kv_batch;

struct kv_batch_options {
	size_t size;
	uint32_t max_seqs;
	uint32_t max_tokens;
	uint32_t max_blocks_per_seq; /* width of the block table */
	uint32_t cp_size;	     /* 0, 1: one rank; else slots are those of cp_rank's tokens */
	uint32_t cp_rank;
	uint32_t cp_interleave; /* 0: 1 */
};

struct kv_batch_item {
	struct kv_seq *seq;
	uint32_t n_query; /* 1..len */
};

struct kv_batch_data {
	uint32_t n_seqs;   /* padded */
	uint32_t n_tokens; /* padded */
	uint32_t n_real_seqs;
	uint32_t n_real_tokens;
	uint32_t max_query_len;
	uint32_t max_seq_len;
	uint32_t table_width;
	uint32_t n_copies;
	const int32_t *block_table;	/* [n_seqs, table_width] */
	const int64_t *slots;		/* [n_tokens] */
	const int32_t *query_start_loc; /* [n_seqs + 1] */
	const int32_t *seq_lens;	/* [n_seqs] */
	const int64_t *positions;	/* [n_tokens] */
	const int32_t *tokens;		/* [n_tokens] */
	const int32_t *n_computed; /* [n_seqs] tokens before this step's. 0: its first chunk, in
				    * which recurrent state starts from zero, whatever the row holds */
	const kv_block_id *copies;	/* [n_copies, 2] source, destination; before any write */
	const int32_t *token_to_seq;	/* [n_tokens] whose it is; 0 past the last */
	const int32_t *seq_lens_upper;	/* [n_seqs] on the host: no sequence is longer; here exact */
	const int32_t *cp_local_lens;	/* [n_seqs] tokens on this rank; NULL: one rank */
	/* By kv_batch_annotate(); NULL before, and where no note asks for it. */
	const uint8_t *is_prefilling;	   /* [n_seqs] its prompt isn't done; padding 0 */
	const uint8_t *seq_causal;	   /* [n_seqs]; padding 1 */
	const int32_t *encoder_lens;	   /* [n_seqs]; padding 0 */
	const int32_t *window_prefix_lens; /* [n_seqs]; padding 0 */
	const int32_t *replay_bases;	   /* [n_seqs] tokens when recurrent state was last set up */
	const int32_t *doc_ranges;	   /* [n_tokens, 2] first and last position; -1 -1 outside */
	/* By kv_batch_logits(); NULL and 0 before. */
	const int32_t *logits_indices; /* [n_logits_padded] tokens of the batch, rising; then the last
					* one again (0 if there is none) */
	uint32_t n_logits;
	uint32_t n_logits_padded;
	uint32_t max_logits_per_seq;
	uint32_t reserved;
};

/* What an engine knows of a sequence and its cache doesn't. */
struct kv_batch_note {
	int32_t n_prompt; /* tokens; 0: not prefilling */
	int32_t encoder_len;
	int32_t window_prefix_len;
	int32_t replay_base;
	int32_t not_causal; /* 1: its queries see all keys */
	int32_t n_docs;
	const int32_t (*docs)[2]; /* [n_docs] first and last position */
};

/* kv_batch_new() - Return: 0; -EINVAL for a size of 0, or a rank that can't be; -ENOMEM. */
int kv_batch_new(struct kv_pool *pool, const struct kv_batch_options *options,
		 struct kv_batch **ret);

/* kv_batch_free() - NULL is allowed. Return: NULL. */
struct kv_batch *kv_batch_free(struct kv_batch *batch);

/**
 * kv_batch_build() - the arrays of one step
 * @items:	[n_items], one for each sequence of the step
 * @pad_seqs:	at least this many rows; 0: no padding
 * @pad_tokens: at least this many tokens; 0: no padding
 *
 * The copies noted by kv_seq_reserve() since the last build come with it; they must be done before the
 * step writes: by kv_batch_copy(), or by workers that are sent `copies`.
 * Return: 0; -E2BIG if it exceeds the batch's sizes (the text says which); -EINVAL.
 */
int kv_batch_build(struct kv_batch *batch, const struct kv_batch_item *items, uint32_t n_items,
		   uint32_t pad_seqs, uint32_t pad_tokens);

/* kv_batch_data() - the arrays of the last build, valid until the next one. Never NULL. */
const struct kv_batch_data *kv_batch_data(const struct kv_batch *batch);

/**
 * kv_batch_annotate() - what the last build's sequences have besides
 * @notes: [n_real_seqs], one for each item of the build
 *
 * Return: 0; -EINVAL: a count or a length that cannot be.
 */
int kv_batch_annotate(struct kv_batch *batch, const struct kv_batch_note *notes, uint32_t n_notes);

/**
 * kv_batch_logits() - which of the last build's tokens logits are wanted of
 * @n_logits: [n] for each item of the build how many of its queries, the last ones: 1 in a decode, 1 +
 *	      drafts in a verification, 0 in a prompt's chunk that isn't its last
 * @pad:      at least so many entries; 0: no padding
 *
 * Return: 0; -EINVAL: the text names the item; -E2BIG: @pad exceeds max_tokens.
 */
int kv_batch_logits(struct kv_batch *batch, const uint32_t *n_logits, uint32_t n, uint32_t pad);

/**
 * kv_batch_copy() - do this build's copies on every device this pool is mapped on
 *
 * Return: 0; -ENXIO if the pool isn't mapped; -EIO.
 */
int kv_batch_copy(struct kv_batch *batch, void *stream);

#ifdef __cplusplus
}
#endif
#endif
