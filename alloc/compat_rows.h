/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reference calculators: block tables to slots, and the rows of recurrent state. See compat.h.
 *
 * Tables are [n_rows][width] int32: a block id, 0 the null block or a hole, -1 beyond the row's
 * end. A slot is id * block_size + offset; -1 writes nothing.
 */
#ifndef KV_ALLOC_COMPAT_ROWS_H
#define KV_ALLOC_COMPAT_ROWS_H

#include "alloc/compat.h"

struct kv_compat_table {
	const int32_t *ids;
	size_t n_rows, width;
};

/* ---- slots (compat_slots.c) ---- */

/* The state blocks that a step reads (0: none) and writes, for each row. */
int kv_compat_state_blocks(const struct kv_compat_table *table, int64_t page_size,
			   const int64_t *before, const int64_t *after, bool validate,
			   int32_t *ret_in, int32_t *ret_out);

/* @n_tokens written for each row, the last at seq_len - 1; ret_slots[n_rows * n_tokens] */
void kv_compat_decode_slots(const struct kv_compat_table *table, const int64_t *seq_lens,
			    int64_t page_size, int64_t n_tokens, int64_t *ret_slots);

/* Rows one after the other; returns how many slots: the sum of @extend_lens. */
size_t kv_compat_extend_slots(const struct kv_compat_table *table, const int64_t *prefix_lens,
			      const int64_t *extend_lens, int64_t page_size, int64_t *ret_slots);

/* Position of a token in row @row; a position before 0 counts as 0. */
int64_t kv_compat_slot(const struct kv_compat_table *table, size_t row, int64_t position,
		       int64_t page_size);

/* The group a layer reads: its own, or the only one there is. Index into @groups. */
int kv_compat_select_group(const char *layer_group, const char *const *groups, size_t n,
			   size_t *ret_group);

/* A captured graph's buffers are filled from these groups: each must be delivered. */
int kv_compat_check_delivered(const char *const *captured, size_t n_captured,
			      const char *const *delivered, size_t n_delivered, int64_t bs);

/* Rows copied into a captured buffer [n_rows][buffer_width], the rest of each row filled. */
int kv_compat_fill_captured(const struct kv_compat_table *table, size_t buffer_width, int32_t fill,
			    int32_t *ret_buffer);

struct kv_compat_v4_slots {
	struct kv_compat_table table;
	int64_t rows_per_page, entry_stride;
	const int64_t *base_offsets; /* [n_rows] first logical page of each row, or NULL: 0 */
	const int64_t *positions;
	size_t n_positions;
	const int64_t *requests; /* table row of each position */
	size_t n_requests;	 /* n_positions, or a divisor: each is repeated */
	const int64_t *valid;	 /* [n_positions] 0: a padded token; or NULL */
	bool compressed;	 /* a row is written when its last token arrives */
};

int kv_compat_v4_slots(const struct kv_compat_v4_slots *in, int64_t *ret_slots);

struct kv_compat_index_k {
	int64_t row_bytes, value_offset, scale_offset;
};

int kv_compat_index_k(int64_t index_head_dim, int64_t page_size, int64_t slot, int64_t byte,
		      int64_t group, struct kv_compat_index_k *ret);

/* ---- rows of recurrent state (compat_mamba.c) ---- */

struct kv_compat_mamba_rows {
	int64_t draft_base, draft_per_request;
	int64_t *current; /* [n_current] row that a request's state lies in; -1: its working row */
	size_t n_current;
};

void kv_compat_mamba_reset(struct kv_compat_mamba_rows *m, const int64_t *requests,
			   const int64_t *working, size_t n);
/* @cow: a row to read from in place of the working row, or -1; NULL: none */
void kv_compat_mamba_current(const struct kv_compat_mamba_rows *m, const int64_t *requests,
			     const int64_t *working, const int64_t *cow, size_t n, int64_t *ret);
/* ret[n * n_tokens]: where the state after each verified token goes */
void kv_compat_mamba_verify(const struct kv_compat_mamba_rows *m, const int64_t *requests,
			    const int64_t *working, size_t n, int64_t n_tokens, int64_t *ret);
void kv_compat_mamba_accept(struct kv_compat_mamba_rows *m, const int64_t *requests,
			    const int64_t *working, const int64_t *accepted, size_t n,
			    int64_t n_tokens);

struct kv_compat_track {
	int64_t source, source_before; /* chunk state after, and before, in the two layouts */
	int64_t target;
	int64_t conv_first; /* packed token where the conv window starts, before clamping */
};

struct kv_compat_extend {
	int64_t *query_start;		/* [n + 1] */
	struct kv_compat_track *tracks; /* [n] snapshots inside the chunk */
	size_t n_tracks;
	int64_t *final_source, *final_target; /* [n] snapshots at the chunk's end */
	size_t n_finals;
};

void kv_compat_extend_tracks(int64_t page_size, int64_t chunk, int64_t conv_len,
			     const int64_t *seq_lens, const int64_t *prefix_lens,
			     const int64_t *working, const int64_t *track, size_t n,
			     struct kv_compat_extend *ret);

#endif
