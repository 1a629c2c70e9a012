/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The way of a step's q and k from the projection to attention, in one pass: RMS norm of each head,
 * rotary position embedding, and the write of K and V at their slots.
 *
 *	norm	x_d <- x_d w_d / sqrt(mean(x^2) + eps)			with q_norm, k_norm
 *	rope	(a, b) <- (a cos - b sin, b cos + a sin), cos and sin those of the token's position
 *		a, b: elements i, i + rot / 2 (halves), or 2 i, 2 i + 1 (pairs), for i < rot / 2
 *	write	kv_write() of the result
 *
 * q and key are changed in place; arithmetic is f32 and rounds once, and what is written is the
 * rounded key. A token whose position is not in [0, n_positions) is left as it is and not written. A
 * token whose slot is negative is rotated and not written (another rank writes it, say).
 * Source: RoFormer, arXiv:2104.09864.
 */
#ifndef KVCACHED_ROPE_H
#define KVCACHED_ROPE_H

#include <kvcached/attention.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kv_rope_args {
	size_t size;
	struct kv_write_args write; /* its key, value, slots, views, scales, device, dtype, stream */
	int32_t n_heads_q;	    /* 0: no q */
	int32_t rot;		    /* elements of a head that turn: even, up to k.head_dim; 0: none */
	int32_t pairs;		    /* 1: adjacent pairs; 0: halves */
	int32_t n_positions;	    /* rows of cos_sin */
	void *q;		    /* [T, n_heads_q, k.head_dim] */
	int64_t q_stride;	    /* elements from token to token; 0: dense */
	const int64_t *positions;   /* [T] */
	const float *cos_sin;	    /* [n_positions, rot]: rot / 2 cosines, then as many sines */
	const void *q_norm;	    /* [k.head_dim] of dtype; NULL: no norm */
	const void *k_norm;
	float eps; /* of both norms */
	int32_t reserved;
};

/**
 * kv_write_rope() - norm, rotate and write K and V of T tokens; norm and rotate their q
 *
 * Return: as kv_write().
 */
int kv_write_rope(const struct kv_rope_args *args);

#ifdef __cplusplus
}
#endif
#endif
