/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which keys a row of an attention call sees, for host and device code alike: the rules of
 * include/kvcached/attention.h as up to three ranges and, for new tokens of a tree, a bit each.
 *
 * Keys are numbered as the block table has them: on one rank of several that is the local index,
 * which grows with the position, so a range of positions is a range of local indices.
 */
#ifndef KV_KERNELS_VISIBLE_H
#define KV_KERNELS_VISIBLE_H

#include <kvcached/attention.h>

#include "kernels/view.h"

/* The part of kv_attention_args that decides. */
struct kv_visibility {
	const uint8_t *seq_causal;
	const int32_t *prefix_lens;
	const int32_t *doc_ranges;
	const uint32_t *tree_mask;
	int32_t tree_words;
	int32_t doc_clamped;
	int32_t causal;
	int32_t window_left;
	int32_t window_right;
	int32_t begin;
	int32_t end; /* 0: none */
	int32_t cp_size;
	int32_t cp_rank;
	int32_t cp_interleave;
};

struct kv_range {
	int64_t lo;
	int64_t hi;
};

/* What one query sees. */
struct kv_visible {
	struct kv_range span;	/* causal, and the window */
	struct kv_range prefix; /* that no window hides */
	struct kv_range doc;	/* of the query's document */
	struct kv_range tree;	/* new tokens, each with a bit in mask */
	struct kv_range all;	/* smallest range with all of them */
	const uint32_t *masks;	/* of new token 0: [q_len, tree_words] */
	const uint32_t *mask;	/* of this query */
	int64_t context;	/* position of new token 0 */
	int64_t position;	/* of the query */
};

static inline struct kv_visibility kv_visibility_of(const struct kv_attention_args *args)
{
	struct kv_visibility v;

	v.seq_causal = args->seq_causal;
	v.prefix_lens = args->window_prefix_lens;
	v.doc_ranges = args->doc_ranges;
	v.tree_mask = args->tree_mask;
	v.tree_words = args->tree_words;
	v.doc_clamped = args->doc_clamped;
	v.causal = args->causal;
	v.window_left = args->window_left;
	v.window_right = args->window_right;
	v.begin = args->key_begin;
	v.end = args->key_end;
	v.cp_size = args->cp_size;
	v.cp_rank = args->cp_rank;
	v.cp_interleave = args->cp_interleave;
	return v;
}

KV_HD static inline int kv_count_bits(uint32_t x)
{
	x -= x >> 1 & 0x55555555;
	x = (x & 0x33333333) + (x >> 2 & 0x33333333);
	x = (x + (x >> 4)) & 0x0f0f0f0f;
	return (int)(x * 0x01010101 >> 24);
}

/* How deep in its tree the token with this mask stands: its ancestors, itself left out. */
KV_HD static inline int64_t kv_tree_depth(const uint32_t *mask, int32_t words)
{
	int64_t n = 0;

	for (int32_t w = 0; w < words; w++)
		n += kv_count_bits(mask[w]);
	return n ? n - 1 : 0;
}

KV_HD static inline int64_t kv_least(int64_t a, int64_t b)
{
	return a < b ? a : b;
}

KV_HD static inline int64_t kv_most(int64_t a, int64_t b)
{
	return a > b ? a : b;
}

/* Positions [lo, hi) that the key range leaves, as local indices. */
KV_HD static inline struct kv_range kv_visible_range(const struct kv_visibility *v, int64_t lo,
						     int64_t hi)
{
	struct kv_range range;

	lo = kv_most(lo, v->begin);
	if (v->end)
		hi = kv_least(hi, v->end);
	range.lo = kv_local_len(v->cp_size, v->cp_rank, v->cp_interleave, kv_most(lo, 0));
	range.hi = kv_local_len(v->cp_size, v->cp_rank, v->cp_interleave, kv_most(hi, 0));
	if (range.hi < range.lo)
		range.hi = range.lo;
	return range;
}

KV_HD static inline void kv_visible_widen(struct kv_range *all, const struct kv_range *part)
{
	if (part->lo >= part->hi)
		return;
	all->lo = all->lo < all->hi ? kv_least(all->lo, part->lo) : part->lo;
	all->hi = kv_most(all->hi, part->hi);
}

/* Query @i of the @q_len of sequence @b, whose rows in q begin at @start; @len keys, all ranks' */
KV_HD static inline struct kv_visible kv_visible_row(const struct kv_visibility *v, int64_t b,
						     int64_t start, int64_t i, int64_t q_len,
						     int64_t len)
{
	const struct kv_range none = {0, 0};
	struct kv_visible row = {none, none, none, none, none, NULL, NULL, len - q_len, 0};
	int causal = v->seq_causal ? v->seq_causal[b] : v->causal;
	int64_t p = len - q_len + i, hi = len, left;

	if (v->tree_mask) {
		row.masks = v->tree_mask + start * v->tree_words;
		row.mask = row.masks + i * v->tree_words;
		p = row.context + kv_tree_depth(row.mask, v->tree_words);
		hi = row.context;
		row.tree = kv_visible_range(v, row.context, len);
	} else if (causal) {
		hi = kv_least(p + 1, len);
	} else if (v->window_right > 0) {
		hi = kv_least(p + v->window_right + 1, len);
	}
	row.position = p;
	left = v->window_left >= 0 ? kv_most(p - v->window_left, 0) : 0;
	row.span = kv_visible_range(v, left, hi);
	if (v->prefix_lens)
		row.prefix = kv_visible_range(v, 0, kv_least(v->prefix_lens[b], hi));
	if (v->doc_ranges) {
		int64_t first = v->doc_ranges[2 * (start + i)];
		int64_t last = v->doc_ranges[2 * (start + i) + 1];

		if (first >= 0 && first < last)
			row.doc = kv_visible_range(v, v->doc_clamped ? kv_most(first, left) : first,
						   kv_least(last + 1, len));
	}
	kv_visible_widen(&row.all, &row.span);
	kv_visible_widen(&row.all, &row.prefix);
	kv_visible_widen(&row.all, &row.doc);
	kv_visible_widen(&row.all, &row.tree);
	return row;
}

KV_HD static inline int kv_range_has(const struct kv_range *range, int64_t j)
{
	return j >= range->lo && j < range->hi;
}

/* Whether the query sees key @j, of the tree. */
KV_HD static inline int kv_visible_in_tree(const struct kv_visibility *v,
					   const struct kv_visible *row, int64_t j)
{
	int64_t i = kv_global_position(v->cp_size, v->cp_rank, v->cp_interleave, j) - row->context;
	int64_t depth;

	if (!(row->mask[i / 32] >> i % 32 & 1))
		return 0;
	if (v->window_left < 0)
		return 1;
	depth = kv_tree_depth(row->masks + i * v->tree_words, v->tree_words);
	return row->position - (row->context + depth) <= v->window_left;
}

/* Whether the query sees key @j (local). */
KV_HD static inline int kv_visible_sees(const struct kv_visibility *v, const struct kv_visible *row,
					int64_t j)
{
	return kv_range_has(&row->span, j) || kv_range_has(&row->prefix, j) ||
	       kv_range_has(&row->doc, j) ||
	       (kv_range_has(&row->tree, j) && kv_visible_in_tree(v, row, j));
}

/* The bits of [lo, hi) in the 32 keys from @tile on. */
KV_HD static inline uint32_t kv_range_bits(const struct kv_range *range, int64_t tile)
{
	int64_t a = kv_least(kv_most(range->lo - tile, 0), 32);
	int64_t b = kv_least(kv_most(range->hi - tile, 0), 32);

	return (uint32_t)((UINT64_C(1) << b) - (UINT64_C(1) << a));
}

/* A bit for each of the 32 keys from @tile on: whether the query sees it. */
KV_HD static inline uint32_t kv_visible_bits(const struct kv_visibility *v,
					     const struct kv_visible *row, int64_t tile)
{
	uint32_t bits = kv_range_bits(&row->span, tile) | kv_range_bits(&row->prefix, tile) |
			kv_range_bits(&row->doc, tile);
	uint32_t tree = kv_range_bits(&row->tree, tile) & ~bits;

	for (int64_t j = 0; tree && j < 32; j++)
		if (tree >> j & 1 && kv_visible_in_tree(v, row, tile + j))
			bits |= UINT32_C(1) << j;
	return bits;
}

/* Position of key @j (local) for ALiBi: that of a token of the tree goes by its depth. */
KV_HD static inline int64_t kv_visible_position(const struct kv_visibility *v,
						const struct kv_visible *row, int64_t j)
{
	int64_t at = kv_global_position(v->cp_size, v->cp_rank, v->cp_interleave, j);

	if (!row->mask || at < row->context)
		return at;
	return row->context +
	       kv_tree_depth(row->masks + (at - row->context) * v->tree_words, v->tree_words);
}

#endif
