/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Block tables that stay from step to step: rows of ids in memory of the caller's (pinned, say), which
 * grow as sequences do. For engines that keep a row a request; a kv_batch makes its table anew.
 *
 * A table is of the kernel's blocks: where a pool's block is `ratio` of those, each id given becomes
 * ratio entries, id * ratio and on. n_blocks counts entries; what a row has past them is of no meaning
 * until it is cleared: kernels go by lengths.
 *
 * Threads: calls on one table take turns; tables of their own are apart.
 */
#ifndef KVCACHED_TABLE_H
#define KVCACHED_TABLE_H

#include <kvcached/metadata.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kv_table {
	int32_t *ids;	   /* [n_rows, width] */
	int32_t *n_blocks; /* [n_rows] entries in use */
	int32_t n_rows;
	int32_t width;		/* of a row, in entries */
	int32_t ratio;		/* entries of an id; 0: 1 */
	kv_block_id null_block; /* what cleared entries hold */
};

/**
 * kv_table_append() - more blocks at the end of a row
 * @ids: [n] of the pool's blocks
 *
 * Return: 0; -EINVAL: there is no such row, or an id is below 0; -E2BIG: the row is not wide enough.
 * Then nothing has changed, and the text has the numbers.
 */
int kv_table_append(struct kv_table *table, int32_t row, const kv_block_id *ids, int32_t n);

/* kv_table_set() - these blocks in place of a row's; otherwise as kv_table_append() */
int kv_table_set(struct kv_table *table, int32_t row, const kv_block_id *ids, int32_t n);

/* kv_table_clear() - a row without blocks: the entries in use become null_block. Return: 0; -EINVAL. */
int kv_table_clear(struct kv_table *table, int32_t row);

/* kv_table_move() - row @from's blocks to row @to, in place of its own; @from is cleared. Return: as it. */
int kv_table_move(struct kv_table *table, int32_t from, int32_t to);

/* kv_table_swap() - exchange two rows, all entries of them. Return: 0; -EINVAL. */
int kv_table_swap(struct kv_table *table, int32_t a, int32_t b);

/**
 * kv_table_width() - entries of a row that holds @n_blocks of a pool
 * @block_tokens:  of the pool's blocks
 * @kernel_tokens: of the kernel's; 0: the same
 * @align_tokens:  a row's tokens are a multiple of this, as far as whole blocks allow; -1: they need not
 *		   be (rows of states)
 *
 * Return: entries; -EINVAL: kernel_tokens doesn't divide the block, or a number is out of range.
 */
int64_t kv_table_width(int32_t n_blocks, int32_t block_tokens, int32_t kernel_tokens,
		       int32_t align_tokens);

/* A block size that a kernel does. */
struct kv_block_rule {
	int32_t tokens;
	int32_t multiples; /* 1: every multiple of tokens; 0: tokens alone */
};

/**
 * kv_table_common_size() - one block size for several kernels that share a table
 * @rules:   [n_kernels] each kernel's; it does what any of its rules allows
 * @n_rules: [n_kernels]
 *
 * Return: @pool_tokens, if all do it; else the largest single size (multiples 0) that divides it and
 * that all do; -ENOTSUP: there is none. kv_table_expand() makes the table's ids.
 */
int kv_table_common_size(int32_t pool_tokens, const struct kv_block_rule *const *rules,
			 const int32_t *n_rules, int32_t n_kernels);

#ifdef __cplusplus
}
#endif
#endif
