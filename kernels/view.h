/* SPDX-License-Identifier: Apache-2.0 */
/* Addresses in a view, and which keys a query sees: what every kernel shares, host and device. */
#ifndef KV_KERNELS_VIEW_H
#define KV_KERNELS_VIEW_H

#include <stdbool.h>

#include <kvcached/layout.h>

#include "kernels/dtype.h"

/* Bytes from view->base to the head_dim elements of (block, token, head). */
KV_HD static inline int64_t kv_view_offset(const struct kv_view *view, int64_t block, int64_t token,
					   int64_t head)
{
	return block * view->block_stride + token * view->token_stride + head * view->head_stride;
}

static inline void *kv_view_row(const struct kv_view *view, int64_t block, int64_t token,
				int64_t head)
{
	return (char *)view->base + kv_view_offset(view, block, token, head);
}

static inline int64_t kv_view_row_bytes(const struct kv_view *view)
{
	return (int64_t)view->head_dim * (int64_t)kv_dtype_bytes(view->dtype);
}

/* All rows of a block follow one another with no gap, so that a block is one run of bytes. */
static inline bool kv_view_is_dense(const struct kv_view *view)
{
	int64_t row = kv_view_row_bytes(view);

	return (view->head_stride == row && view->token_stride == row * view->n_heads) ||
	       (view->token_stride == row && view->head_stride == row * view->block_tokens);
}

/*
 * Of the tokens [0, len) those that lie on @rank of @size, in rounds of @interleave a rank. It is
 * also the local index of token len, if that lies on the rank, and of the next one that does.
 */
KV_HD static inline int64_t kv_local_len(int32_t size, int32_t rank, int32_t interleave, int64_t len)
{
	int64_t whole, rest;

	if (size <= 1)
		return len;
	whole = len / ((int64_t)interleave * size) * interleave;
	rest = len - whole * size - (int64_t)rank * interleave;
	return whole + (rest < 0 ? 0 : rest > interleave ? interleave : rest);
}

/* The position of local token @j of @rank. */
KV_HD static inline int64_t kv_global_position(int32_t size, int32_t rank, int32_t interleave,
					       int64_t j)
{
	if (size <= 1)
		return j;
	return (j / interleave * size + rank) * interleave + j % interleave;
}

/* Keys [lo, hi) that the query at position @p sees in a sequence of @len keys. */
struct kv_span {
	int64_t lo;
	int64_t hi;
};

KV_HD static inline struct kv_span kv_span_seen(int64_t p, int64_t len, int causal,
						int64_t window_left)
{
	struct kv_span span;

	span.lo = window_left >= 0 && p > window_left ? p - window_left : 0;
	span.hi = causal && p + 1 < len ? p + 1 : len;
	if (span.hi < span.lo)
		span.hi = span.lo;
	return span;
}

#endif
