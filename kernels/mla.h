/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of latents, for host and device code alike; kv_mla_write() and kv_mla_read() inside: mla.c
 * checks, mla_ref.c is the host's, mla_write.cu the GPU's (with cuda_absent.c in builds without CUDA).
 */
#ifndef KV_KERNELS_MLA_H
#define KV_KERNELS_MLA_H

#include <kvcached/attention.h>
#include <kvcached/mla.h>

#include "kernels/view.h"

#ifdef __cplusplus
extern "C" {
#endif

/* args: resolved, tokens > 0 */
int kv_mla_write_host(const struct kv_mla_write_args *args);
int kv_mla_write_cuda(const struct kv_mla_write_args *args);
int kv_mla_read_host(const struct kv_mla_read_args *args);
int kv_mla_read_cuda(const struct kv_mla_read_args *args);

#ifdef __cplusplus
}
#endif

/* Elements of a head of q. */
KV_HD static inline int32_t kv_attention_dim(const struct kv_attention_args *args)
{
	return args->latent_dim ? args->latent_dim + args->rope_dim : args->k.head_dim;
}

KV_HD static inline bool kv_mla_is_packed(const struct kv_view *view)
{
	return view->dtype == KV_BYTES;
}

/* The scale of 128 elements of a packed row, of which @top is the largest magnitude. */
KV_HD static inline float kv_mla_scale(float top)
{
	const float least = 1.17549435e-38f;
	float scale = top / 448.0f;

	return scale > least ? scale : least;
}

/* Element @d of [latent | rope] of the row at @row: code times scale; @dtype: of packed rope parts. */
KV_HD static inline float kv_mla_element(const struct kv_view *view, const void *row, int d,
					 int latent_dim, int dtype)
{
	const char *bytes = (const char *)row;
	float scale;

	if (!kv_mla_is_packed(view))
		return kv_element_load(row, d, view->dtype) * view->scale;
	if (d >= latent_dim)
		return kv_element_load(bytes + latent_dim + latent_dim / KV_MLA_TILE * 4,
				       d - latent_dim, dtype);
	memcpy(&scale, bytes + latent_dim + d / KV_MLA_TILE * 4, sizeof(scale));
	return kv_element_load(row, d, KV_F8_E4M3) * scale;
}

#endif
