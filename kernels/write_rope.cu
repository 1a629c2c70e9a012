/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Norm, rotation and write on a GPU.
 *
 *	x <- x w / sqrt(mean x^2 + eps); (a, b) <- (a cos - b sin, b cos + a sin)
 *	view[slot / P][slot % P][h][:] = round(x / scale)
 *
 * Work: a warp has one row: a head of q, of key or of value of one token. Lane l has the pairs l,
 * l + 32, ... of the elements that turn together, and of those that don't the ones at the same step;
 * so a warp reads and writes neighbours, and nothing but sums crosses lanes.
 */
#include "kernels/device/launch.cuh"
#include "kernels/device/warp.cuh"
#include "kernels/write_rope.h"

#define THREADS 256
#define WARPS	(THREADS / KV_WARP)
#define PAIRS	(KV_ROPE_MAX_DIM / 2 / KV_WARP) /* of a lane */

/* The two elements of pair @i of a row of @dim; the second may lie past its end. */
__device__ static int place(const struct kv_rope_args &a, bool turns, int i, int dim, int *other)
{
	int rot = turns ? a.rot : 0, half = (dim - rot + 1) / 2;

	if (i < rot / 2)
		return kv_rope_pair(i, rot, a.pairs, other);
	*other = i + rot / 2 + half; /* what does not turn: by halves */
	return i + rot / 2;
}

/* A row in registers: x[p] and y[p] are the elements of pair lane + 32 p. */
struct row {
	float x[PAIRS];
	float y[PAIRS];
};

template <int DTYPE>
__device__ static void load(const struct kv_rope_args &a, bool turns, const void *from, int64_t at,
			    int dim, struct row &row)
{
	int lane = threadIdx.x % KV_WARP, n = (dim + 1) / 2;

#pragma unroll
	for (int p = 0; p < PAIRS; p++) {
		int i = lane + p * KV_WARP, other, one = place(a, turns, i, dim, &other);

		row.x[p] = i < n ? kv_element_load(from, at + one, DTYPE) : 0;
		row.y[p] = i < n && other < dim ? kv_element_load(from, at + other, DTYPE) : 0;
	}
}

__device__ static void norm(const struct kv_rope_args &a, const void *w, int dtype, int dim,
			    struct row &row)
{
	int lane = threadIdx.x % KV_WARP, n = (dim + 1) / 2;
	float sum = 0, factor;

#pragma unroll
	for (int p = 0; p < PAIRS; p++)
		sum = fmaf(row.x[p], row.x[p], fmaf(row.y[p], row.y[p], sum));
	factor = 1 / sqrtf(kv_warp_add(sum) / (float)dim + a.eps);
#pragma unroll
	for (int p = 0; p < PAIRS; p++) {
		int i = lane + p * KV_WARP, other, one = place(a, true, i, dim, &other);

		if (i < n)
			row.x[p] *= factor * kv_element_load(w, one, dtype);
		if (i < n && other < dim)
			row.y[p] *= factor * kv_element_load(w, other, dtype);
	}
}

__device__ static void turn(const struct kv_rope_args &a, int64_t position, struct row &row)
{
	const float *cos = a.cos_sin + position * a.rot, *sin = cos + a.rot / 2;
	int lane = threadIdx.x % KV_WARP;

#pragma unroll
	for (int p = 0; p < PAIRS; p++) {
		int i = lane + p * KV_WARP;

		if (i < a.rot / 2) {
			float c = cos[i], s = sin[i], x = row.x[p], y = row.y[p];

			row.x[p] = x * c - y * s;
			row.y[p] = y * c + x * s;
		}
	}
}

/* Writes a row as @DTYPE and rounds what the registers hold to it. */
template <int DTYPE>
__device__ static void put_back(const struct kv_rope_args &a, void *to, int64_t at, int dim,
				struct row &row)
{
	int lane = threadIdx.x % KV_WARP, n = (dim + 1) / 2;

#pragma unroll
	for (int p = 0; p < PAIRS; p++) {
		int i = lane + p * KV_WARP, other, one = place(a, true, i, dim, &other);

		if (i >= n)
			continue;
		kv_element_store(to, at + one, DTYPE, row.x[p]);
		row.x[p] = kv_element_load(to, at + one, DTYPE);
		if (other >= dim)
			continue;
		kv_element_store(to, at + other, DTYPE, row.y[p]);
		row.y[p] = kv_element_load(to, at + other, DTYPE);
	}
}

template <int DTYPE>
__device__ static void store(const struct kv_rope_args &a, bool turns, const struct kv_view &view,
			     const struct kv_view &rows, const float *scales, int64_t slot, int h,
			     const void *source, int64_t at, const struct row &row)
{
	int64_t block = slot / view.block_tokens, token = slot % view.block_tokens;
	char *to = (char *)view.base + kv_view_offset(&view, block, token, h);
	int lane = threadIdx.x % KV_WARP, n = (view.head_dim + 1) / 2;
	float scale = scales ? scales[h] : view.scale, top = 0;
	bool copy = view.dtype == DTYPE; /* bit for bit, NaN included */

	if (!copy && rows.base) {
#pragma unroll
		for (int p = 0; p < PAIRS; p++)
			top = fmaxf(top, fmaxf(fabsf(row.x[p]), fabsf(row.y[p])));
		for (int step = KV_WARP / 2; step; step /= 2)
			top = fmaxf(top, __shfl_xor_sync(KV_ALL_LANES, top, step));
		scale = kv_row_scale(top, view.dtype);
		if (lane == 0)
			*(float *)((char *)rows.base + kv_view_offset(&rows, block, token, h)) = scale;
	}
#pragma unroll
	for (int p = 0; p < PAIRS; p++) {
		int i = lane + p * KV_WARP, other;
		int one = place(a, turns, i, view.head_dim, &other);

		for (int side = 0; side < 2; side++) {
			int d = side ? other : one;

			if (i >= n || d >= view.head_dim)
				continue;
			if (copy && DTYPE == KV_F32)
				((uint32_t *)to)[d] = ((const uint32_t *)source)[at + d];
			else if (copy)
				((uint16_t *)to)[d] = ((const uint16_t *)source)[at + d];
			else
				kv_element_store(to, d, view.dtype,
						 (side ? row.y[p] : row.x[p]) / scale);
		}
	}
}

template <int DTYPE> __global__ void __launch_bounds__(THREADS) rotate(struct kv_rope_args a)
{
	const struct kv_write_args &w = a.write;
	int rows = a.n_heads_q + w.k.n_heads + w.v.n_heads;
	int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / KV_WARP, t = i / rows;
	int h = (int)(i % rows), dim = w.k.head_dim;
	bool is_q = h < a.n_heads_q, is_k = !is_q && h < a.n_heads_q + w.k.n_heads;
	const void *weights = is_q ? a.q_norm : a.k_norm;
	int64_t slot, at;
	struct row row;

	if (t >= w.n_tokens)
		return;
	slot = w.slots[t];
	if (a.rot && (a.positions[t] < 0 || a.positions[t] >= a.n_positions))
		return;
	if (!is_q && !is_k) {
		h -= a.n_heads_q + w.k.n_heads;
		at = t * w.value_stride + (int64_t)h * w.v.head_dim;
		if (slot < 0)
			return;
		load<DTYPE>(a, false, w.value, at, w.v.head_dim, row);
		store<DTYPE>(a, false, w.v, w.v_row_scales, w.v_scales, slot, h, w.value, at, row);
		return;
	}

	void *from = is_q ? a.q : (void *)w.key;

	h -= is_q ? 0 : a.n_heads_q;
	at = t * (is_q ? a.q_stride : w.key_stride) + (int64_t)h * dim;
	load<DTYPE>(a, true, from, at, dim, row);
	if (weights)
		norm(a, weights, DTYPE, dim, row);
	if (a.rot)
		turn(a, a.positions[t], row);
	if (weights || a.rot)
		put_back<DTYPE>(a, from, at, dim, row);
	if (is_k && slot >= 0)
		store<DTYPE>(a, true, w.k, w.k_row_scales, w.k_scales, slot, h, from, at, row);
}

extern "C" int kv_write_rope_cuda(const struct kv_rope_args *args)
{
	void (*kernel)(struct kv_rope_args) = args->write.dtype == KV_F32	? rotate<KV_F32>
					       : args->write.dtype == KV_F16 ? rotate<KV_F16>
									      : rotate<KV_BF16>;
	int64_t rows = args->n_heads_q + args->write.k.n_heads + args->write.v.n_heads;
	int64_t blocks = (args->write.n_tokens * rows + WARPS - 1) / WARPS;

	if (blocks > INT32_MAX)
		return kv_error(-ENOTSUP, "n_tokens: %lld given, too many for one launch",
				(long long)args->write.n_tokens);
	return kv_launch("write", kernel, dim3((unsigned)blocks), THREADS, 0, args->write.stream,
			 *args);
}
