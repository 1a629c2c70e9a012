/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slots of rows that stand for several tokens, and of tables that begin late: what layers with compressed K
 * and V (DeepSeek-V4) write to and read from. Where a row is a token and a table begins with its sequence,
 * kv_metadata_build() (metadata.h) is the call.
 *
 *	row of position p	p / stride
 *	its block		block_table[seq][row / block_rows - first_blocks[seq]]
 *	its slot		block * block_rows + row % block_rows
 *
 * Host only: arrays are host memory, and the work is done on return. Threads: it may be called from any
 * thread at any time.
 */
#ifndef KVCACHED_SLOTS_H
#define KVCACHED_SLOTS_H

#include <kvcached/types.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kv_row_slots_args {
	size_t size;
	int64_t n_tokens;     /* T */
	int32_t n_seqs;	      /* rows of the table */
	int32_t table_width;
	int32_t block_rows;   /* rows that a block holds */
	int32_t stride;	      /* tokens that a row stands for */
	int32_t null_block;   /* it has no slots; -1: there is none */
	int32_t is_write;     /* 1: a slot for the last token of a row alone, with which the row is made */
	const int64_t *positions;    /* [T] */
	const int32_t *token_to_seq; /* [T] whose it is; below 0, n_seqs and above: padding */
	const int32_t *block_table;  /* [n_seqs, table_width]; below 0: no block */
	const int32_t *first_blocks; /* [n_seqs] which of its sequence's blocks a table begins with; NULL: 0 */
	int64_t *slots;		     /* [T] out; KV_SLOT_PAD: padding, a row that the table doesn't cover */
};

/**
 * kv_row_slots() - where the rows of tokens lie
 *
 * Return: 0; -EINVAL: the text names the field, nothing was written.
 */
int kv_row_slots(const struct kv_row_slots_args *args);

#ifdef __cplusplus
}
#endif
#endif
