/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of single fields, shared by check.c and check_attention.c. -EINVAL: the text names it. */
#ifndef KV_KERNELS_CHECK_H
#define KV_KERNELS_CHECK_H

#include <kvcached/attention.h>

#define KV_MAX_HEADS 65535 /* one axis of a CUDA grid */

int kv_check_size(const char *name, size_t given, size_t wanted);
int kv_check_device(int32_t device);
int kv_check_dtype(int32_t dtype); /* types that compute: what q, out, key and value may have */
int kv_check_range(const char *name, int64_t given, int64_t min, int64_t max);
int kv_check_pointer(const char *name, const void *p, size_t align);
int kv_check_views(const struct kv_view *k, const struct kv_view *v);
int kv_mla_check_view(const struct kv_view *view, int32_t latent_dim, int32_t rope_dim);

/* One f32 for each row of @view, or base NULL. */
int kv_check_row_scales(const char *name, const struct kv_view *scales, const struct kv_view *view);
int kv_check_scales(const struct kv_view *k, const struct kv_view *v, const float *k_scales,
		    const float *v_scales, const struct kv_view *k_rows, const struct kv_view *v_rows);

/* Arrays of the host that name tokens to be read: their rows are there, their blocks may be read. @first: or NULL */
int kv_check_reads(const int32_t *start_loc, const int32_t *first, int32_t n_seqs,
		   const int32_t *block_table, int32_t table_width, int32_t block_tokens);

#endif
