/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decisions over a batch's lengths on the host: which part decodes, in which order, how much at a
 * time, whether a common prefix is worth a pass of its own, what a graph can hold.
 *
 * Source of the rules: vLLM v1's attention interface (their results are held against its own).
 * Threads: every function may be called from any thread at any time.
 */
#ifndef KVCACHED_SCHEDULE_H
#define KVCACHED_SCHEDULE_H

#include <kvcached/batch.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kv_split {
	int32_t n_decodes; /* sequences; they come first */
	int32_t n_extends;
	int32_t n_prefills;
	int32_t n_decode_tokens;
	int32_t n_extend_tokens;
	int32_t n_prefill_tokens; /* with padding, if n_tokens has it */
};

/**
 * kv_split_decodes() - where decoding sequences end, in a batch that has them first
 * @query_start_loc: [n_seqs + 1]
 * @n_tokens:	     with padding, or not: the prefills get the rest
 * @threshold:	     queries up to which a sequence decodes: 1, or 1 + drafts
 * @uniform:	     1: all decodes must have as many queries as the first (padding has none)
 * @prefilling:	     [n_seqs] 1: its prompt isn't done: such a sequence does not decode however short; or
 *		     NULL: short extends count as decodes
 */
void kv_split_decodes(const int32_t *query_start_loc, int32_t n_seqs, int32_t n_tokens,
		      int32_t threshold, int uniform, const uint8_t *prefilling,
		      struct kv_split *ret);

/* kv_split_extends() - decodes, then extends, then prefills (no context): @seq_lens: upper bounds */
void kv_split_extends(const int32_t *query_start_loc, const int32_t *seq_lens, int32_t n_seqs,
		      int32_t threshold, struct kv_split *ret);

/**
 * kv_reorder() - the order in which kv_split_decodes() finds them
 * @ret_order: [n_seqs] which sequence comes at each place. Sequences whose place is in the right part
 *	       stay where they are
 *
 * Parts: decodes, short extends (queries <= threshold, in the prompt), long extends, prefills.
 * Return: how many moved.
 */
int kv_reorder(const int32_t *n_query, const int32_t *n_computed, const int32_t *n_prompt,
	       int32_t n_seqs, int32_t threshold, int32_t *ret_order);

/**
 * kv_reorder_threshold() - queries up to which a sequence may decode
 * @base:     of the backend; 0: it does not reorder
 * @n_drafts: speculative tokens of a step, if the backend takes them as a decode; else 0
 * @parallel: 1: drafted in parallel, which takes twice as many
 * @one_only: 1: under context parallelism it decodes one token at a time
 *
 * Return: the threshold; 0: none. Of several backends the least above 0 counts.
 */
int32_t kv_reorder_threshold(int32_t base, int32_t n_drafts, int parallel, int one_only);

/**
 * kv_prefill_chunks() - runs of sequences whose lengths fit a workspace together
 * @ret_bounds: [n_seqs + 1] the first of each run, then n_seqs
 *
 * Return: how many runs; -EINVAL: one sequence alone is too long, or the workspace has no room.
 */
int kv_prefill_chunks(const int32_t *seq_lens, int32_t n_seqs, int32_t workspace_tokens,
		      int32_t *ret_bounds);

struct kv_cascade_query {
	size_t size;
	int32_t prefix;		/* tokens, kv_cascade_prefix() */
	int32_t n_seqs;
	const int32_t *n_query; /* [n_seqs] */
	int32_t n_heads_q;
	int32_t n_heads_kv;
	int32_t n_multiprocessors;
	int32_t cp_size;
	int32_t positions; /* 1: a window, ALiBi or chunks: scores go by positions */
};

/* kv_cascade_prefix() - tokens in common that every sequence has computed, in whole blocks */
int32_t kv_cascade_prefix(int32_t n_common_blocks, int32_t block_tokens, const int32_t *n_computed,
			  int32_t n_seqs);

/* kv_cascade_decide() - is reading the prefix once for all faster than once for each? Return: 1: yes; 0: no. */
int kv_cascade_decide(const struct kv_cascade_query *query);

/* What an engine asks of graphs, and gets. */
enum kv_graph_mode {
	KV_GRAPHS_NONE,
	KV_GRAPHS_PIECEWISE,	      /* between attention calls */
	KV_GRAPHS_FULL,		      /* every step */
	KV_GRAPHS_FULL_DECODE,	      /* steps that only decode */
	KV_GRAPHS_FULL_AND_PIECEWISE, /* decode as one graph, others in pieces */
};

/**
 * kv_graph_mode() - the mode nearest to @wanted that backends of @support can have
 * @support:   enum kv_graph_support, the least of all backends (backend.h)
 * @pieces:    1: the model can be captured in pieces between its attention calls
 * @query_len: queries of a sequence in a decode step
 *
 * Return: enum kv_graph_mode; -ENOTSUP: every step was wanted in a graph, and none can be.
 */
int kv_graph_mode(int wanted, int support, int pieces, int32_t query_len);

/**
 * kv_local_chunks() - attention inside chunks of @chunk tokens, as a batch of more, shorter sequences
 * @ret_*: room for kv_local_chunks_bound() sequences; ret_rows: [n][chunk / block_tokens] columns of
 *	   each one's part of block_table's row
 *
 * Return: sequences; -EINVAL: chunk is no multiple of block_tokens.
 */
int kv_local_chunks(const int32_t *query_start_loc, const int32_t *seq_lens, int32_t n_seqs,
		    const int32_t *block_table, int32_t table_width, int32_t block_tokens,
		    int32_t chunk, int32_t *ret_query_start_loc, int32_t *ret_seq_lens,
		    int32_t *ret_rows);

/* kv_local_chunks_bound() - how many sequences kv_local_chunks() may make of these */
int64_t kv_local_chunks_bound(const int32_t *query_start_loc, int32_t n_seqs, int32_t chunk);

/**
 * kv_doc_rows() - doc_ranges of attention.h from documents by sequence
 * @docs:     [n_docs] { sequence, first, last } positions, of which first >= last is passed over
 * @ret_rows: [n_tokens, 2]; -1 -1 outside of documents
 *
 * Return: 1; 0: no token lies in one: leave the argument NULL.
 */
int kv_doc_rows(const int32_t (*docs)[3], int32_t n_docs, const int32_t *query_start_loc,
		const int32_t *seq_lens, int32_t n_seqs, int32_t (*ret_rows)[2]);

/**
 * kv_doc_table() - documents by sequence as a padded array, for kernels that look them up
 * @docs:      [n_docs] { sequence, first, last }; those of a sequence keep their order
 * @width:     ranges that a row has room for
 * @ret_table: [n_seqs, width, 2]; 0 0 where a sequence has fewer; NULL: count only
 *
 * kv_attention() takes doc_ranges by token, from kv_doc_rows(), and not this form.
 * Return: the most documents of a sequence (0: leave the argument NULL); -E2BIG if those are more
 * than @width; -EINVAL: a sequence that isn't one; -ENOMEM. Then nothing was written.
 */
int kv_doc_table(const int32_t (*docs)[3], int32_t n_docs, int32_t n_seqs, int32_t width,
		 int32_t *ret_table);

/* kv_query_lens() - queries of each sequence; @ret_n_query: [n_seqs] */
void kv_query_lens(const int32_t *query_start_loc, int32_t n_seqs, int32_t *ret_n_query);

/**
 * kv_computed_tokens() - tokens of each sequence before the step: its length less its queries
 * @ret_n_computed: [n_seqs]
 *
 * Where drafts were trimmed on the device, its offsets and those that the host knows differ, and so
 * do the results.
 */
void kv_computed_tokens(const int32_t *query_start_loc, const int32_t *seq_lens, int32_t n_seqs,
			int32_t *ret_n_computed);

/**
 * kv_cp_empty_rows() - rows for which a rank has no key, before what the ranks have is combined
 * @cp_local_lens: [n_seqs] tokens of each sequence on this rank
 * @n_rows:	   of out and lse, past the last query too
 * @ret_empty:	   [n_rows] 1: the row's lse has to be -infinity: its sequence has no token here, or it
 *		   belongs to none; 0
 *
 * kv_attention() gives -infinity for the former; the latter it leaves as they are. On a device:
 * cp_empty of kv_metadata_build().
 */
void kv_cp_empty_rows(const int32_t *cp_local_lens, const int32_t *query_start_loc, int32_t n_seqs,
		      int32_t n_rows, uint8_t *ret_empty);

/**
 * kv_logits_rows() - the tokens of a batch that logits are wanted of, as a batch of their own
 * @logits_indices:	 [n_indices] tokens of the batch, rising
 * @ret_query_start_loc: [n_seqs + 1] over logits_indices
 *
 * For layers that only read a cache which an earlier layer wrote ("fast prefill"): their other rows
 * reach no output.
 * Return: the most of a sequence; -EINVAL: an index is outside the batch, or does not rise.
 */
int kv_logits_rows(const int32_t *query_start_loc, int32_t n_seqs, const int32_t *logits_indices,
		   int32_t n_indices, int32_t *ret_query_start_loc);

/**
 * kv_batch_logits_only() - the step with only the rows that logits are wanted of
 * @data:	     with logits_indices, of kv_batch_logits()
 * @query_start_loc: [n_seqs + 1] filled; the view refers to it
 *
 * A view; what is by token (slots, positions, tokens, token_to_seq, doc_ranges) and n_computed are
 * dropped (NULL): rows of q are to be gathered by logits_indices. A step of single queries stays
 * as it is.
 * Return: 0; -EINVAL: the batch has no logits_indices.
 */
int kv_batch_logits_only(const struct kv_batch_data *data, int32_t *query_start_loc,
			 struct kv_batch_data *ret);

/**
 * kv_sink_tables() - sequences that also see blocks of sinks, which come before their own
 * @sinks:	  [n_sinks] blocks, full of tokens that every sequence sees
 * @ret_table:	  [n_seqs, n_sinks + table_width]
 * @ret_seq_lens: [n_seqs] with the sinks' tokens; 0 stays 0
 *
 * For layers whose sinks are keys in the cache; sinks that are logits are kv_attention_args.sinks.
 * Return: 0; -EINVAL: a number below 0; -EOVERFLOW: a length past 2^31. Then nothing was written.
 */
int kv_sink_tables(const int32_t *block_table, int32_t table_width, const int32_t *seq_lens,
		   int32_t n_seqs, const kv_block_id *sinks, int32_t n_sinks, int32_t block_tokens,
		   int32_t *ret_table, int32_t *ret_seq_lens);

/**
 * kv_batch_cross() - the same queries over the encoder's tokens
 * @data:	 with encoder_lens, of kv_batch_annotate()
 * @block_table: [n_seqs, table_width] of the encoder's tokens
 * @slots:	 of kv_encoder_slots(), in the step that encodes; or NULL: nothing is written
 *
 * A view for kv_attention() with causal 0: seq_lens are the encoder's lengths. What holds of the
 * decoder's tokens alone is dropped (NULL).
 * Return: 0; -EINVAL: the batch has no encoder_lens.
 */
int kv_batch_cross(const struct kv_batch_data *data, const int32_t *block_table, uint32_t table_width,
		   const int64_t *slots, struct kv_batch_data *ret);

/* kv_encoder_slots() - slots of the encoder's tokens: all of each sequence. Return: how many. */
int64_t kv_encoder_slots(const int32_t *encoder_lens, int32_t n_seqs, const int32_t *block_table,
			 int32_t table_width, int32_t block_tokens, int64_t *ret_slots);

/**
 * kv_token_to_seq() - whose each token is, into a buffer that is reused
 * @n_mapped: tokens of all sequences as the host knows them; @query_start_loc may know better
 * @room:     of the buffer
 *
 * Fills max(n_mapped, n_tokens) entries: sequences in turn, then 0; others stay as they are.
 * Return: how many; -EINVAL: the buffer is too small, or the counts differ.
 */
int64_t kv_token_to_seq(const int32_t *query_start_loc, int32_t n_seqs, int32_t n_mapped,
			int32_t n_tokens, int32_t *buffer, int64_t room);

/**
 * kv_batch_unpadded() - the first @n_seqs sequences and @n_tokens tokens of a batch
 *
 * A view: arrays stay where they are. What is by token and not in this order any more is dropped
 * (NULL): positions, token_to_seq, doc_ranges; and the bounds of lengths.
 */
void kv_batch_unpadded(const struct kv_batch_data *data, uint32_t n_seqs, uint32_t n_tokens,
		       struct kv_batch_data *ret);

/* kv_batch_regroup() - the same step for another group of layers: with its table and slots */
void kv_batch_regroup(const struct kv_batch_data *data, const int32_t *block_table,
		      uint32_t table_width, const int64_t *slots, struct kv_batch_data *ret);

#ifdef __cplusplus
}
#endif
#endif
