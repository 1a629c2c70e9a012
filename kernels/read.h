/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of K and V from blocks: one element, the same for host and device. */
#ifndef KV_KERNELS_READ_H
#define KV_KERNELS_READ_H

#include <kvcached/attention.h>

#include "kernels/view.h"

#ifdef __cplusplus
extern "C" {
#endif

int kv_read_host(const struct kv_read_args *args); /* args: checked, defaults filled in */
int kv_read_cuda(const struct kv_read_args *args);

#ifdef __cplusplus
}
#endif

/* One of K and V. */
struct kv_read_side {
	const struct kv_view *view;
	const struct kv_view *row_scales;
	const float *scales;
	void *to; /* NULL: not wanted */
	int64_t stride;
};

KV_HD static inline struct kv_read_side kv_read_side(const struct kv_read_args *a, int is_v)
{
	struct kv_read_side s = {
		is_v ? &a->v : &a->k,
		is_v ? &a->v_row_scales : &a->k_row_scales,
		is_v ? a->v_scales : a->k_scales,
		is_v ? a->value : a->key,
		is_v ? a->value_stride : a->key_stride,
	};

	return s;
}

/* to[row][e] = view[block][token][e / head_dim][e % head_dim], e in [0, n_heads * head_dim) */
KV_HD static inline void kv_read_element(const struct kv_read_args *a, const struct kv_read_side *s,
					 int64_t block, int64_t token, int64_t row, int32_t e)
{
	const struct kv_view *view = s->view;
	int32_t h = e / view->head_dim;
	const char *from = (const char *)view->base + kv_view_offset(view, block, token, h);
	int64_t at = row * s->stride + e;
	float scale = view->scale;

	if (view->dtype == a->dtype) { /* bit for bit, NaN included */
		if (a->dtype != KV_F32)
			((uint16_t *)s->to)[at] = ((const uint16_t *)from)[e % view->head_dim];
		else
			((uint32_t *)s->to)[at] = ((const uint32_t *)from)[e % view->head_dim];
		return;
	}
	if (s->scales)
		scale = s->scales[h];
	if (s->row_scales->base)
		scale = *(const float *)((const char *)s->row_scales->base +
					 kv_view_offset(s->row_scales, block, token, h));
	kv_element_store(s->to, at, a->dtype,
			 kv_element_load(from, e % view->head_dim, view->dtype) * scale);
}

#endif
