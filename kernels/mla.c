/* SPDX-License-Identifier: Apache-2.0 */
/* kv_mla_write() and kv_mla_read(): check every field, then the device's. */
#include <errno.h>

#include "include/internal/error.h"
#include "include/internal/public.h"
#include "kernels/check.h"
#include "kernels/mla.h"

static int check_packed(const struct kv_view *view, int32_t latent_dim, int32_t rope_dim)
{
	int32_t bytes = kv_mla_packed_bytes(latent_dim, rope_dim);

	if (latent_dim % KV_MLA_TILE)
		return kv_error(-EINVAL, "latent_dim: %d given, packed rows have a scale for %d",
				latent_dim, KV_MLA_TILE);
	if (view->head_dim != bytes)
		return kv_error(-EINVAL, "cache.head_dim: %d bytes given, packed rows of %d + %d have %d",
				view->head_dim, latent_dim, rope_dim, bytes);
	if (((uintptr_t)view->base | (uint64_t)view->token_stride | (uint64_t)view->block_stride) % 4)
		return kv_error(-EINVAL, "cache: base and strides of packed rows are multiples of 4");
	return 0;
}

int kv_mla_check_view(const struct kv_view *view, int32_t latent_dim, int32_t rope_dim)
{
	struct kv_view bytes = *view;
	int r;

	r = kv_check_range("latent_dim", latent_dim, 1, 65536);
	if (r == 0)
		r = kv_check_range("rope_dim", rope_dim, 0, 65536);
	if (r < 0)
		return r;
	if (view->n_heads != 1)
		return kv_error(-EINVAL, "cache.n_heads: %d given, latents have 1", view->n_heads);
	if (kv_mla_is_packed(view)) {
		r = check_packed(view, latent_dim, rope_dim);
		bytes.dtype = KV_F8_E4M3; /* as far as sizes go */
		bytes.scale = 1;
	} else if (view->head_dim != latent_dim + rope_dim) {
		r = kv_error(-EINVAL, "cache.head_dim: %d given, latent_dim + rope_dim is %d",
			     view->head_dim, latent_dim + rope_dim);
	}
	return r < 0 ? r : kv_check_views(&bytes, &bytes);
}

static int resolve_stride(const char *name, int64_t given, int64_t dense, int64_t *ret)
{
	if (given && given < dense)
		return kv_error(-EINVAL, "%s: %lld elements given, 0 (dense) or at least %lld allowed",
				name, (long long)given, (long long)dense);
	*ret = given ? given : dense;
	return 0;
}

/* What both calls have. */
static int check_rows(int32_t device, int32_t dtype, const struct kv_view *view, int32_t latent_dim,
		      int32_t rope_dim)
{
	int r = kv_check_device(device);

	if (r == 0)
		r = kv_check_dtype(dtype);
	if (r == 0)
		r = kv_mla_check_view(view, latent_dim, rope_dim);
	if (r == 0 && kv_mla_is_packed(view) && dtype == KV_F32)
		r = kv_error(-EINVAL, "dtype: %d (f32) given, packed rows are of f16 or bf16", dtype);
	return r;
}

static int check_memory(const void *latent, const void *rope, int32_t rope_dim, int32_t dtype)
{
	size_t element = kv_dtype_bytes(dtype);
	int r = kv_check_pointer("latent", latent, element);

	return r < 0 || !rope_dim ? r : kv_check_pointer("rope", rope, element);
}

KV_PUBLIC int kv_mla_write(const struct kv_mla_write_args *args)
{
	struct kv_mla_write_args a;
	int r = kv_check_size("kv_mla_write_args", args->size, sizeof(*args));

	if (r < 0)
		return r;
	a = *args;
	r = check_rows(a.device, a.dtype, &a.cache, a.latent_dim, a.rope_dim);
	if (r == 0)
		r = kv_check_range("n_tokens", a.n_tokens, 0, INT32_MAX);
	if (r == 0)
		r = resolve_stride("latent_stride", a.latent_stride, a.latent_dim, &a.latent_stride);
	if (r == 0)
		r = resolve_stride("rope_stride", a.rope_stride, a.rope_dim, &a.rope_stride);
	if (r < 0 || !a.n_tokens)
		return r;
	r = check_memory(a.latent, a.rope, a.rope_dim, a.dtype);
	if (r == 0)
		r = kv_check_pointer("slots", a.slots, sizeof(*a.slots));
	if (r < 0)
		return r;
	return a.device == KV_DEVICE_CUDA ? kv_mla_write_cuda(&a) : kv_mla_write_host(&a);
}

KV_PUBLIC int kv_mla_read(const struct kv_mla_read_args *args)
{
	struct kv_mla_read_args a;
	int r = kv_check_size("kv_mla_read_args", args->size, sizeof(*args));

	if (r < 0)
		return r;
	a = *args;
	r = check_rows(a.device, a.dtype, &a.cache, a.latent_dim, a.rope_dim);
	if (r == 0)
		r = kv_check_range("n_seqs", a.n_seqs, 0, INT32_MAX - 1);
	if (r == 0)
		r = kv_check_range("n_tokens", a.n_tokens, 0, INT32_MAX);
	if (r == 0)
		r = kv_check_range("table_width", a.table_width, 0, INT32_MAX);
	if (r == 0)
		r = resolve_stride("latent_stride", a.latent_stride, a.latent_dim, &a.latent_stride);
	if (r == 0)
		r = resolve_stride("rope_stride", a.rope_stride, a.rope_dim, &a.rope_stride);
	if (r < 0 || !a.n_tokens || !a.n_seqs || !a.table_width)
		return r;
	r = check_memory(a.latent, a.rope, a.rope_dim, a.dtype);
	if (r == 0)
		r = kv_check_pointer("start_loc", a.start_loc, sizeof(*a.start_loc));
	if (r == 0)
		r = kv_check_pointer("block_table", a.block_table, sizeof(*a.block_table));
	if (r == 0 && a.device == KV_DEVICE_HOST)
		r = kv_check_reads(a.start_loc, a.first, a.n_seqs, a.block_table, a.table_width,
				   a.cache.block_tokens);
	if (r < 0)
		return r;
	return a.device == KV_DEVICE_CUDA ? kv_mla_read_cuda(&a) : kv_mla_read_host(&a);
}
