/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kv_write_rope(), and kv_write() with a scale for each head or row: write_rope.c checks, the host
 * does it in write_rope_ref.c, a GPU in write_rope.cu.
 */
#ifndef KV_KERNELS_WRITE_ROPE_H
#define KV_KERNELS_WRITE_ROPE_H

#include <kvcached/rope.h>

#include "kernels/view.h"

#define KV_ROPE_MAX_DIM 512

#ifdef __cplusplus
extern "C" {
#endif

/* @args: resolved, T > 0 */
int kv_write_rope_host(const struct kv_rope_args *args);
int kv_write_rope_cuda(const struct kv_rope_args *args);

/* kv_write() of resolved arguments that have scales of heads or rows. */
int kv_write_scaled(const struct kv_write_args *args);

#ifdef __cplusplus
}
#endif

/* The scale of a row whose largest magnitude is @top. */
KV_HD static inline float kv_row_scale(float top, int dtype)
{
	return (top > 1e-4f ? top : 1e-4f) / kv_f8_max(dtype);
}

/* Where elements @i and *@ret_other of a head that turn together lie. */
KV_HD static inline int kv_rope_pair(int i, int rot, int pairs, int *ret_other)
{
	*ret_other = pairs ? 2 * i + 1 : i + rot / 2;
	return pairs ? 2 * i : i;
}

#endif
