/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Metadata of recurrent layers (Mamba, gated delta net): which rows hold a batch's states, where
 * its chunks begin, which sequences decode.
 *
 * state.h has the operations. What kv_state_batch of state.h takes is made by kv_state_lanes(); the
 * calls here serve engines with tables and kernels of their own. All of them are of the host:
 * arrays are host memory, and the work is done on return. For lengths that only a GPU knows there
 * is kv_metadata_build(); these counts go by upper bounds, or after a copy back.
 *
 * Symbols: R sequences; query_start_loc [R + 1] as in batch.h; n_computed [R] tokens before the
 * step; interval: tokens from one state that is kept to the next.
 *
 * Source of the rules: vLLM v1's attention interface (their results are held against its own);
 * ReplaySSM there: a decode keeps the inputs of its last steps in a ring, and its state is stored
 * only when the ring is full.
 * Threads: every function may be called from any thread at any time.
 */
#ifndef KVCACHED_RECURRENT_H
#define KVCACHED_RECURRENT_H

#include <kvcached/schedule.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KV_CONV_PROGRAM 8 /* tokens of a program of kv_conv_programs() */

/**
 * kv_state_rows() - the rows of a table that a step's states lie in
 * @block_table: [R, table_width]
 * @seq_lens:	 [R] tokens, this step's included; 0: padding, whose column is the first
 * @interval:	 of a table by position, where the running state has the column of its last token;
 *		 0: a table of rows (one, or all that there are), which is copied as it is
 * @n_drafts:	 columns after the first, one for the state after each draft; 0 with @interval 0
 * @ret_rows:	 [R, 1 + n_drafts]; with @interval 0: [R, table_width]
 *
 * Return: 0; -EINVAL: a number or a length below 0; -ERANGE: a column lies outside the table. The
 * text names the sequence; nothing was written.
 */
int kv_state_rows(const int32_t *block_table, int32_t table_width, const int32_t *seq_lens,
		  int32_t n_seqs, int32_t interval, int32_t n_drafts, int32_t *ret_rows);

/**
 * kv_state_columns() - columns of a table that keeps the state of every interval
 * @ret_last_computed:	 [R] of the last state there is, 0 where there is none. Each may be NULL
 * @ret_first_scheduled: [R] of the first state that the step makes
 * @ret_last_scheduled:	 [R] of the last one
 *
 * A state in the middle of an interval has that interval's column.
 * Return: 0; -EINVAL: @interval below 1, or a length below 0.
 */
int kv_state_columns(const int32_t *n_computed, const int32_t *seq_lens, int32_t n_seqs,
		     int32_t interval, int32_t *ret_last_computed, int32_t *ret_first_scheduled,
		     int32_t *ret_last_scheduled);

/**
 * kv_replay_steps() - where a decode writes its inputs, and whether it stores its state
 * @bases:	   [R] tokens of each sequence when its state was last set up: at its (re)admission
 * @n_query:	   [R] tokens of the step; 0: padding, taken as step 0
 * @room:	   steps that the ring holds
 * @interval:	   states are also stored where a sequence comes to a multiple of it, and the ring
 *		   starts anew there; 0: they are not
 * @ret_write_pos: [R] place in the ring
 * @ret_flush:	   [R] 1: the step stores the state, after which the ring is empty
 *
 * A sequence with fewer tokens than its base (the rest of a prompt) writes at 0 and stores.
 * Return: 0; -EINVAL: an array is missing, or a number is out of range; the text names it.
 */
int kv_replay_steps(const int32_t *n_computed, const int32_t *bases, const int32_t *n_query,
		    int32_t n_seqs, int32_t room, int32_t interval, int32_t *ret_write_pos,
		    uint8_t *ret_flush);

/**
 * kv_state_chunks() - chunks of a batch that end where the sequences' own do
 * @chunk:		 tokens; a sequence first finishes the chunk that it is inside of
 * @ret_chunk_start_loc: [n + 1] first token of each chunk, then the number of tokens
 * @ret_chunk_seq:	 [n] whose it is
 * @ret_last_chunk:	 [R] the last chunk of each sequence; -1: it has no tokens
 *
 * kv_state_chunks_bound() says for how many chunks there must be room.
 * Return: n; -EINVAL: @chunk below 1, a length below 0.
 */
int kv_state_chunks(const int32_t *query_start_loc, const int32_t *n_computed, int32_t n_seqs,
		    int32_t chunk, int32_t *ret_chunk_start_loc, int32_t *ret_chunk_seq,
		    int32_t *ret_last_chunk);

/*
 * kv_state_chunks_bound() - no more chunks than these, whatever n_computed is
 * @query_start_loc: [@n_seqs + 1], from 0
 * @chunk:	     tokens, 1 or more
 *
 * Return: how many, for the room of kv_state_chunks().
 */
int64_t kv_state_chunks_bound(const int32_t *query_start_loc, int32_t n_seqs, int32_t chunk);

/**
 * kv_conv_programs() - a batch's tokens in programs of KV_CONV_PROGRAM, for a grid of thread blocks
 * @ret_seq:	[room] whose tokens a program has
 * @ret_offset: [room] which of that sequence's programs it is
 * @room:	of both, kv_conv_programs_room() of how many there are; what is not used is -1
 *
 * kv_conv1d() needs no such plan.
 * Return: how many; -E2BIG: @room is too small; nothing was written.
 */
int64_t kv_conv_programs(const int32_t *query_start_loc, int32_t n_seqs, int32_t *ret_seq,
			 int32_t *ret_offset, int64_t room);

/* kv_conv_programs_room() - for kv_conv_programs(). Return: entries: twice @n_programs, and 2048 or more. */
int64_t kv_conv_programs_room(int64_t n_programs);

/**
 * kv_split_states() - where decoding sequences end, in a batch of a recurrent layer
 * @seq_lens:	 [R] upper bounds
 * @prefilling:	 [R] 1: its prompt isn't done
 * @threshold:	 queries up to which a sequence decodes: 1; with accepted counts, 1 + drafts
 *
 * As kv_split_decodes() with prefilling, but for a sequence with one query and a state: it decodes,
 * be it the last of its prompt.
 */
void kv_split_states(const int32_t *query_start_loc, const int32_t *seq_lens,
		     const uint8_t *prefilling, int32_t n_seqs, int32_t n_tokens, int32_t threshold,
		     struct kv_split *ret);

/* Sequences of a batch in which some verify drafts. */
struct kv_draft_split {
	int32_t n_verify; /* sequences, in no order */
	int32_t n_decodes;
	int32_t n_prefills;
	int32_t n_verify_tokens;
	int32_t n_decode_tokens;
	int32_t n_prefill_tokens;
};

/**
 * kv_split_drafts() - sequences that verify drafts, and the others
 * @n_drafts:	[R] drafts of each; -1: it verifies none
 * @ret_verify: [R] 1: it verifies, 0: it doesn't
 *
 * Where sequences verify, none decodes: those with one query are prefills, whose kernel takes any
 * length. Where no sequence has a draft, none verifies, and the others are split as by
 * kv_split_decodes() with threshold 1.
 */
void kv_split_drafts(const int32_t *query_start_loc, const int32_t *n_drafts, int32_t n_seqs,
		     int32_t n_tokens, uint8_t *ret_verify, struct kv_draft_split *ret);

/* Which of a step's states of one sequence are to be kept. */
struct kv_state_track {
	int64_t after;	 /* among the states after each whole chunk of all sequences; -1: none in the midst */
	int64_t before;	 /* the same state among those before each chunk, a last part of one included */
	int64_t conv_end; /* packed token that its convolution's window ends before */
	int32_t n_tokens; /* of the sequence there */
	uint8_t at_end;	 /* 1: the state after the step is one to keep */
};

/**
 * kv_state_tracks() - what chunk kernels put out of a prefill that later sequences can go on from
 * @interval: tokens from one state that is kept to the next
 * @chunk:    of the kernel, which puts out the state after, or before, each
 * @ret:      [R]
 *
 * Of each sequence the last multiple of the interval that the step passes, if a chunk ends there. kv_gdn() and
 * kv_ssd() (state.h) need no such list: they store those states themselves.
 * Return: 0; -EINVAL: @interval or @chunk below 1, a length below 0.
 */
int kv_state_tracks(const int32_t *query_start_loc, const int32_t *n_computed, int32_t n_seqs, int32_t interval,
		    int32_t chunk, struct kv_state_track *ret);

#ifdef __cplusplus
}
#endif
#endif
