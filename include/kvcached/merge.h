/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Merging attention over parts of the keys into attention over all of them.
 *
 * Parts are what kv_attention() gave over disjoint sets of keys, with its lse: pieces of one long
 * context, a prefix that many requests share and what each has of its own, or the ranks that hold
 * every so-manieth token.
 *
 *	M = max L_r; w_r = e^(L_r - M); out = sum w_r O_r / sum w_r; lse = M + ln sum w_r
 *
 * L_r of NaN or infinity counts as -infinity. A part of weight 0 is not looked at: its rows may hold
 * anything. A row without any part that weighs something: out 0, lse -infinity. The order of sums is
 * that of the parts: a call is repeatable to the bit.
 */
#ifndef KVCACHED_MERGE_H
#define KVCACHED_MERGE_H

#include <kvcached/types.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kv_merge_args {
	size_t size;
	int32_t device;	    /* enum kv_device */
	int32_t dtype;	    /* of out: f32, f16, bf16 */
	int32_t part_dtype; /* of parts; 0: dtype */
	int32_t n_parts;    /* R, 1..65536 */
	int32_t n_tokens;   /* T */
	int32_t n_heads;    /* H */
	int32_t head_dim;   /* D */
	const void *parts;  /* [R, T, H, D] */
	const float *part_lse; /* [R, T, H] */
	void *out;	       /* [T, H, D]; apart from parts */
	float *lse;	       /* [T, H] or NULL; apart from part_lse */
	const float *sinks;    /* [H] or NULL: brought in once, here, and in no part */
	const int32_t *n_real; /* where the call's arrays lie: rows from *n_real on stay untouched; NULL:
				* all are done */
	int32_t base;	       /* of lse, in and out: 0: e; 2 */
	int32_t lse_with_sink; /* 1: lse has the sink in it */
	int32_t only_part;     /* r + 1: out is part r's share, e^(L_r - L) O_r, which ranks add up; 0 */
	int32_t reserved;
	int64_t part_stride; /* elements from part to part; 0: dense, as are the following */
	int64_t token_stride;
	int64_t lse_part_stride;
	int64_t lse_token_stride; /* of part_lse; both 0: [T, H] */
	int64_t lse_head_stride;
	int64_t out_token_stride;
	void *stream;
};

/**
 * kv_merge() - merge @n_parts parts of T rows of H heads
 *
 * Pointers, stream and completion are as in attention.h.
 * Return: 0; -EINVAL: the text names the field; -ENOTSUP: no such device in this build; -EIO.
 */
int kv_merge(const struct kv_merge_args *args);

#ifdef __cplusplus
}
#endif
#endif
