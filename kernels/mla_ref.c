/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of latents on the host, the definition of right: one element at a time. */
#include <math.h>

#include "kernels/mla.h"

/* row[at + d] = from[d], rounded to the view's type */
static void store(const struct kv_view *view, char *row, int at, const void *from, int64_t from_at,
		  int n, int dtype)
{
	size_t bytes = kv_dtype_bytes(dtype);

	if (dtype == view->dtype) { /* bit for bit, NaN included */
		memcpy(row + (size_t)at * bytes, (const char *)from + (size_t)from_at * bytes,
		       (size_t)n * bytes);
		return;
	}
	for (int d = 0; d < n; d++)
		kv_element_store(row, at + d, view->dtype,
				 kv_element_load(from, from_at + d, dtype) / view->scale);
}

static void store_packed(const struct kv_mla_write_args *args, char *row, int64_t t)
{
	int64_t at = t * args->latent_stride;

	for (int d0 = 0; d0 < args->latent_dim; d0 += KV_MLA_TILE) {
		float top = 0, scale;

		for (int d = d0; d < d0 + KV_MLA_TILE; d++)
			top = fmaxf(top, fabsf(kv_element_load(args->latent, at + d, args->dtype)));
		scale = kv_mla_scale(top);
		memcpy(row + kv_mla_scales_at(args->latent_dim) + d0 / KV_MLA_TILE * 4, &scale,
		       sizeof(scale));
		for (int d = d0; d < d0 + KV_MLA_TILE; d++)
			kv_element_store(row, d, KV_F8_E4M3,
					 kv_element_load(args->latent, at + d, args->dtype) / scale);
	}
	memcpy(row + kv_mla_rope_at(args->latent_dim),
	       (const char *)args->rope + t * args->rope_stride * 2, (size_t)args->rope_dim * 2);
}

int kv_mla_write_host(const struct kv_mla_write_args *args)
{
	const struct kv_view *view = &args->cache;

	for (int64_t t = 0; t < args->n_tokens; t++) {
		int64_t slot = args->slots[t];
		char *row;

		if (slot < 0)
			continue;
		row = kv_view_row(view, slot / view->block_tokens, slot % view->block_tokens, 0);
		if (kv_mla_is_packed(view)) {
			store_packed(args, row, t);
			continue;
		}
		store(view, row, 0, args->latent, t * args->latent_stride, args->latent_dim,
		      args->dtype);
		store(view, row, args->latent_dim, args->rope, t * args->rope_stride,
		      args->rope_dim, args->dtype);
	}
	return 0;
}

/* Token @j of sequence @b to row @to. */
static void read_token(const struct kv_mla_read_args *args, int64_t b, int64_t j, int64_t to)
{
	const struct kv_view *view = &args->cache;
	int64_t column = j / view->block_tokens;
	kv_block_id block;
	const void *row;

	if (j < 0 || column >= args->table_width)
		return;
	block = args->block_table[b * args->table_width + column];
	row = kv_view_row(view, block, j % view->block_tokens, 0);
	for (int d = 0; d < args->latent_dim + args->rope_dim; d++) {
		float x = kv_mla_element(view, row, d, args->latent_dim, args->dtype);

		if (d < args->latent_dim)
			kv_element_store(args->latent, to * args->latent_stride + d, args->dtype, x);
		else
			kv_element_store(args->rope, to * args->rope_stride + d - args->latent_dim,
					 args->dtype, x);
	}
}

int kv_mla_read_host(const struct kv_mla_read_args *args)
{
	for (int64_t b = 0; b < args->n_seqs; b++) {
		int64_t start = args->start_loc[b], end = args->start_loc[b + 1];
		int64_t first = args->first ? args->first[b] : 0;

		for (int64_t i = start; i < end && i < args->n_tokens; i++)
			read_token(args, b, first + i - start, i);
	}
	return 0;
}
