/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of latents on a GPU: to their slots, and back.
 *
 * A warp has a row. Rows of the same type go in pieces of 16 bytes where all is aligned. Of a packed
 * row a warp has 128 elements at a time, 4 a lane: their largest, then their codes.
 */
#include "kernels/device/launch.cuh"
#include "kernels/device/warp.cuh"
#include "kernels/mla.h"

#define THREADS 128
#define WARPS	(THREADS / KV_WARP)

struct write_params {
	struct kv_mla_write_args a;
	int32_t element;
	int32_t wide; /* pieces of 16 bytes */
};

/* @n elements to element @at of a row. */
__device__ static void copy_row(const struct write_params &p, char *row, int at, const char *from, int n)
{
	const struct kv_view &view = p.a.cache;
	int lane = threadIdx.x % KV_WARP;

	if (p.wide) {
		for (int i = lane; i < n * p.element / 16; i += KV_WARP)
			((uint4 *)(row + at * p.element))[i] = ((const uint4 *)from)[i];
		return;
	}
	for (int d = lane; d < n; d += KV_WARP) {
		if (p.a.dtype != view.dtype)
			kv_element_store(row, at + d, view.dtype,
					 __fdiv_rn(kv_element_load(from, d, p.a.dtype), view.scale));
		else if (p.element == 2)
			((uint16_t *)row)[at + d] = ((const uint16_t *)from)[d];
		else
			((uint32_t *)row)[at + d] = ((const uint32_t *)from)[d];
	}
}

__device__ static void pack_row(const struct write_params &p, char *row, const char *latent,
				const char *rope)
{
	int lane = threadIdx.x % KV_WARP, n = p.a.latent_dim;
	uint16_t *end = (uint16_t *)(row + n + n / KV_MLA_TILE * 4);

	for (int d0 = 0; d0 < n; d0 += KV_MLA_TILE) {
		float x[4], top = 0, scale;
		uint32_t codes = 0;

		for (int i = 0; i < 4; i++) {
			x[i] = kv_element_load(latent, d0 + 4 * lane + i, p.a.dtype);
			top = fmaxf(top, fabsf(x[i]));
		}
		for (int step = KV_WARP / 2; step; step /= 2)
			top = fmaxf(top, __shfl_xor_sync(KV_ALL_LANES, top, step));
		scale = __fdiv_rn(top, 448.0f);
		scale = scale > 1.17549435e-38f ? scale : 1.17549435e-38f;
		for (int i = 0; i < 4; i++)
			codes |= (uint32_t)kv_f32_to_e4m3(__fdiv_rn(x[i], scale)) << 8 * i;
		((uint32_t *)(row + d0))[lane] = codes;
		if (lane == 0)
			*(float *)(row + n + d0 / KV_MLA_TILE * 4) = scale;
	}
	for (int d = lane; d < p.a.rope_dim; d += KV_WARP)
		end[d] = ((const uint16_t *)rope)[d];
}

__global__ void __launch_bounds__(THREADS) write_latents(const __grid_constant__ struct write_params p)
{
	int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / KV_WARP, slot;
	const struct kv_view &view = p.a.cache;
	const char *latent, *rope;
	char *row;

	if (t >= p.a.n_tokens)
		return;
	slot = p.a.slots[t];
	if (slot < 0)
		return;
	latent = (const char *)p.a.latent + t * p.a.latent_stride * p.element;
	rope = (const char *)p.a.rope + t * p.a.rope_stride * p.element;
	row = (char *)view.base +
	      kv_view_offset(&view, slot / view.block_tokens, slot % view.block_tokens, 0);
	if (kv_mla_is_packed(&view)) {
		pack_row(p, row, latent, rope);
		return;
	}
	copy_row(p, row, 0, latent, p.a.latent_dim);
	copy_row(p, row, p.a.latent_dim, rope, p.a.rope_dim);
}

__global__ void __launch_bounds__(THREADS) read_latents(const __grid_constant__ struct kv_mla_read_args a)
{
	int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / KV_WARP, block, j;
	const struct kv_view &view = a.cache;
	int lane = threadIdx.x % KV_WARP, lo = 0, hi = a.n_seqs;
	const char *row;

	if (i >= a.n_tokens || i < a.start_loc[0] || i >= a.start_loc[a.n_seqs])
		return;
	while (hi - lo > 1) { /* start_loc[lo] <= i < start_loc[hi] */
		int mid = (lo + hi) / 2;

		if (a.start_loc[mid] <= i)
			lo = mid;
		else
			hi = mid;
	}
	j = i - a.start_loc[lo] + (a.first ? a.first[lo] : 0);
	if (j < 0 || j / view.block_tokens >= a.table_width)
		return;
	block = a.block_table[(int64_t)lo * a.table_width + j / view.block_tokens];
	row = (const char *)view.base + kv_view_offset(&view, block, j % view.block_tokens, 0);
	for (int d = lane; d < a.latent_dim + a.rope_dim; d += KV_WARP) {
		float x = kv_mla_element(&view, row, d, a.latent_dim, a.dtype);

		if (d < a.latent_dim)
			kv_element_store(a.latent, i * a.latent_stride + d, a.dtype, x);
		else
			kv_element_store(a.rope, i * a.rope_stride + d - a.latent_dim, a.dtype, x);
	}
}

static dim3 grid_of(int64_t rows)
{
	return dim3((unsigned)((rows + WARPS - 1) / WARPS));
}

extern "C" int kv_mla_write_cuda(const struct kv_mla_write_args *args)
{
	struct write_params p = {};
	uint64_t bits;

	p.a = *args;
	p.element = (int32_t)kv_dtype_bytes(args->dtype);
	bits = (uint64_t)(uintptr_t)args->cache.base | (uint64_t)args->cache.block_stride |
	       (uint64_t)args->cache.token_stride | (uint64_t)(uintptr_t)args->latent |
	       (uint64_t)(uintptr_t)args->rope | (uint64_t)(args->latent_stride * p.element) |
	       (uint64_t)(args->rope_stride * p.element) | (uint64_t)(args->latent_dim * p.element) |
	       (uint64_t)(args->rope_dim * p.element);
	p.wide = args->dtype == args->cache.dtype && bits % 16 == 0;
	return kv_launch("mla_write", write_latents, grid_of(args->n_tokens), THREADS, 0, args->stream, p);
}

extern "C" int kv_mla_read_cuda(const struct kv_mla_read_args *args)
{
	return kv_launch("mla_read", read_latents, grid_of(args->n_tokens), THREADS, 0, args->stream, *args);
}
