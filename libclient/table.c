/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of block ids that stay from step to step, and the block size that kernels share. */
#include <errno.h>
#include <kvcached/table.h>
#include <string.h>

#include "include/internal/error.h"
#include "include/internal/public.h"

static int32_t *row_of(const struct kv_table *t, int32_t row)
{
	return t->ids + (int64_t)row * t->width;
}

static int check_row(const struct kv_table *t, int32_t row)
{
	if (row >= 0 && row < t->n_rows)
		return 0;
	return kv_error(-EINVAL, "row: %d given, the table has %d", row, t->n_rows);
}

/* @ids from entry @at of the row on. */
static int put(struct kv_table *t, int32_t row, int32_t at, const kv_block_id *ids, int32_t n)
{
	int32_t ratio = t->ratio > 0 ? t->ratio : 1;

	if (n < 0)
		return kv_error(-EINVAL, "n: %d given, 0 or more allowed", n);
	if (at + (int64_t)n * ratio > t->width)
		return kv_error(-E2BIG, "n: %d ids given (%d entries each), row %d has %d of %d in use", n,
				ratio, row, at, t->width);
	for (int32_t i = 0; i < n; i++)
		if (ids[i] < 0 || ids[i] > (INT32_MAX - ratio + 1) / ratio)
			return kv_error(-EINVAL, "ids[%d]: %d given, 0..%d allowed", i, ids[i],
					(INT32_MAX - ratio + 1) / ratio);
	kv_table_expand(ids, n, ratio, row_of(t, row) + at);
	t->n_blocks[row] = at + n * ratio;
	return 0;
}

KV_PUBLIC int kv_table_append(struct kv_table *table, int32_t row, const kv_block_id *ids, int32_t n)
{
	int r = check_row(table, row);

	return r < 0 ? r : put(table, row, table->n_blocks[row], ids, n);
}

KV_PUBLIC int kv_table_set(struct kv_table *table, int32_t row, const kv_block_id *ids, int32_t n)
{
	int r = check_row(table, row);

	return r < 0 ? r : put(table, row, 0, ids, n);
}

KV_PUBLIC int kv_table_clear(struct kv_table *table, int32_t row)
{
	int r = check_row(table, row);

	if (r < 0)
		return r;
	for (int32_t i = 0; i < table->n_blocks[row]; i++)
		row_of(table, row)[i] = table->null_block;
	table->n_blocks[row] = 0;
	return 0;
}

KV_PUBLIC int kv_table_move(struct kv_table *table, int32_t from, int32_t to)
{
	int r = check_row(table, from);

	if (!r)
		r = check_row(table, to);
	if (r < 0 || from == to)
		return r;
	memcpy(row_of(table, to), row_of(table, from),
	       (size_t)table->n_blocks[from] * sizeof(*table->ids));
	table->n_blocks[to] = table->n_blocks[from];
	return kv_table_clear(table, from);
}

KV_PUBLIC int kv_table_swap(struct kv_table *table, int32_t a, int32_t b)
{
	int r = check_row(table, a);
	int32_t n;

	if (!r)
		r = check_row(table, b);
	if (r < 0)
		return r;
	for (int32_t i = 0; i < table->width; i++) {
		int32_t id = row_of(table, a)[i];

		row_of(table, a)[i] = row_of(table, b)[i];
		row_of(table, b)[i] = id;
	}
	n = table->n_blocks[a];
	table->n_blocks[a] = table->n_blocks[b];
	table->n_blocks[b] = n;
	return 0;
}

KV_PUBLIC int64_t kv_table_width(int32_t n_blocks, int32_t block_tokens, int32_t kernel_tokens,
				 int32_t align_tokens)
{
	int64_t unit, width;

	if (n_blocks < 0 || block_tokens < 1 || kernel_tokens < 0)
		return kv_error(-EINVAL, "n_blocks, block_tokens, kernel_tokens: %d, %d, %d given; from 0, "
					 "1, 0 on allowed", n_blocks, block_tokens, kernel_tokens);
	if (!align_tokens || align_tokens < -1)
		return kv_error(-EINVAL, "align_tokens: %d given, -1 or 1 and more allowed", align_tokens);
	kernel_tokens = kernel_tokens ? kernel_tokens : block_tokens;
	if (block_tokens % kernel_tokens)
		return kv_error(-EINVAL, "kernel_tokens: %d given, it does not divide a block of %d",
				kernel_tokens, block_tokens);
	width = (int64_t)n_blocks * (block_tokens / kernel_tokens);
	unit = align_tokens / kernel_tokens;
	return unit > 1 ? (width + unit - 1) / unit * unit : width;
}

static int does(const struct kv_block_rule *rules, int32_t n, int32_t tokens)
{
	for (int32_t i = 0; i < n; i++)
		if (rules[i].multiples ? rules[i].tokens > 0 && tokens % rules[i].tokens == 0
				       : tokens == rules[i].tokens)
			return 1;
	return 0;
}

KV_PUBLIC int kv_table_common_size(int32_t pool_tokens, const struct kv_block_rule *const *rules,
				   const int32_t *n_rules, int32_t n_kernels)
{
	int32_t best = 0, first = -1; /* kernel that doesn't do the pool's */

	for (int32_t k = 0; k < n_kernels && first < 0; k++)
		first = does(rules[k], n_rules[k], pool_tokens) ? -1 : k;
	if (first < 0)
		return pool_tokens;
	for (int32_t k = 0; k < n_kernels; k++) {
		for (int32_t i = 0; i < n_rules[k]; i++) {
			int32_t size = rules[k][i].tokens, all = 1;

			if (rules[k][i].multiples || size <= best || pool_tokens % size)
				continue;
			for (int32_t other = 0; other < n_kernels && all; other++)
				all = does(rules[other], n_rules[other], size);
			best = all ? size : best;
		}
	}
	if (best)
		return best;
	return kv_error(-ENOTSUP, "pool_tokens: %d given, kernel %d doesn't do that, and no size that "
				  "divides it is one that all do", pool_tokens, first);
}
