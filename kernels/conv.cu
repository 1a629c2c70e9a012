/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Causal convolution over the tokens of each lane, with history in state rows.
 *
 *	y[t][c] = bias[c] + sum_j weight[c][j] x[t - W + 1 + j][c];  out = silu(y)
 *
 * Work: a thread has VEC channels and a tile of tokens, and slides over them with the last W - 1
 *inputs in registers. Tiles are cut from the tokens of all lanes; which lane a tile begins in is
 *found by the thread block from query_start_loc. A lane's first W - 1 tokens, and all its rows,
 *belong to the tile in which it begins: so the thread that reads a row is the one that writes it,
 *and a call in place needs no order among thread blocks.
 */
#include "kernels/gdn_launch.cuh"

#define THREADS	 128
#define MAX_TILE 64

struct conv_params {
	struct kv_conv1d_args a;
	int32_t tile; /* tokens */
};

/* Types of a kernel: everything f16 or bf16 (FAST), or whatever the arguments say. */
enum conv_types {
	TYPES_F16 = KV_F16,
	TYPES_BF16 = KV_BF16,
	TYPES_ANY,
};

/* VEC elements at @i, a multiple of VEC; 8 bytes where VEC is 4 */
template <int VEC, int TYPES>
__device__ static void load(float (&to)[VEC], const void *from, int64_t i, int dtype)
{
	if constexpr (VEC == 4) {
		uint2 u = *(const uint2 *)((const uint16_t *)from + i);
		uint16_t h[VEC];

		memcpy(h, &u, sizeof(u));
#pragma unroll
		for (int v = 0; v < VEC; v++)
			to[v] = kv_io_load<KV_IO16>(h, v, TYPES == TYPES_BF16);
	} else {
		to[0] = kv_element_load(from, i, dtype);
	}
}

template <int VEC, int TYPES>
__device__ static void store(void *to, int64_t i, int dtype, const float (&from)[VEC])
{
	if constexpr (VEC == 4) {
		uint16_t h[VEC];
		uint2 u;

#pragma unroll
		for (int v = 0; v < VEC; v++)
			h[v] = kv_to_16(from[v], TYPES == TYPES_BF16);
		memcpy(&u, h, sizeof(u));
		*(uint2 *)((uint16_t *)to + i) = u;
	} else {
		kv_element_store(to, i, dtype, from[0]);
	}
}

/* Where the tokens of lane @b end. */
__device__ static int64_t lane_end(const struct kv_state_batch &t, int64_t b)
{
	return t.query_start_loc ? t.query_start_loc[b + 1] : b + 1;
}

/* The first lane that ends after token @t0. */
__device__ static int first_lane(const struct kv_state_batch &t, int64_t t0)
{
	int n = 0;

	if (!t.query_start_loc)
		return (int)t0;
	for (int i = 0; i < t.n_seqs; i += THREADS)
		n += __syncthreads_count(i + (int)threadIdx.x < t.n_seqs &&
					 t.query_start_loc[i + (int)threadIdx.x + 1] <= t0);
	return n;
}

template <int VEC, int W> struct channels {
	float weight[VEC][W];
	float bias[VEC];
	int c;
};

/* Input @at of the lane, history before its first token. */
template <int VEC, int W, int TYPES>
__device__ static void input(const struct kv_conv1d_args &a, const struct kv_lane &lane,
			     const float (&history)[W - 1][VEC], int64_t at, int c,
			     float (&to)[VEC])
{
	if (at >= 0) {
		load<VEC, TYPES>(to, a.x, (lane.start + at) * a.x_stride + c, a.dtype);
		return;
	}
#pragma unroll
	for (int j = 0; j < W - 1; j++)
		if (at == j - (W - 1))
#pragma unroll
			for (int v = 0; v < VEC; v++)
				to[v] = history[j][v];
}

/* The state after @n tokens of the lane to @row. */
template <int VEC, int W, int TYPES>
__device__ static void store_row(const struct kv_conv1d_args &a, const struct kv_lane &lane,
				 const float (&history)[W - 1][VEC], int64_t n, int c, int32_t row)
{
	if (kv_row_is_null(&a.batch, row))
		return;
	for (int j = 0; j < W - 1; j++) {
		char *to = (char *)a.state.base + kv_conv_offset(&a.state, row, j, c);
		float x[VEC];

		input<VEC, W, TYPES>(a, lane, history, n - W + 1 + j, c, x);
		store<VEC, TYPES>(to, 0, a.state.dtype, x);
	}
}

template <int VEC, int W, int TYPES>
__device__ static void load_history(const struct kv_conv1d_args &a, const struct kv_lane &lane,
				    int c, float (&history)[W - 1][VEC])
{
#pragma unroll
	for (int j = 0; j < W - 1; j++) {
		if (lane.fresh) {
#pragma unroll
			for (int v = 0; v < VEC; v++)
				history[j][v] = 0;
		} else {
			load<VEC, TYPES>(history[j],
					 (const char *)a.state.base +
						 kv_conv_offset(&a.state, lane.read, j, c),
					 0, a.state.dtype);
		}
	}
}

/* Tokens @from..@to of the batch, all of one lane; window: the W - 1 inputs before them. */
template <int VEC, int W, int TYPES>
__device__ static void slide(const struct kv_conv1d_args &a, const struct channels<VEC, W> &ch,
			     float (&window)[W - 1][VEC], int64_t from, int64_t to)
{
#pragma unroll 4
	for (int64_t t = from; t < to; t++) {
		float x[VEC], y[VEC];

		load<VEC, TYPES>(x, a.x, t * a.x_stride + ch.c, a.dtype);
#pragma unroll
		for (int v = 0; v < VEC; v++) {
			y[v] = ch.bias[v];
#pragma unroll
			for (int j = 0; j < W - 1; j++)
				y[v] += ch.weight[v][j] * window[j][v];
			y[v] += ch.weight[v][W - 1] * x[v];
			if (a.activation == KV_ACTIVATION_SILU)
				y[v] = __fdividef(y[v], 1 + __expf(-y[v]));
#pragma unroll
			for (int j = 0; j < W - 2; j++)
				window[j][v] = window[j + 1][v];
			window[W - 2][v] = x[v];
		}
		store<VEC, TYPES>(a.out, t * a.out_stride + ch.c, a.dtype, y);
	}
}

/* What of lane @b belongs to the tile of tokens @t0..@t1. */
template <int VEC, int W, int TYPES>
__device__ static void run_lane(const struct kv_conv1d_args &a, const struct channels<VEC, W> &ch,
				int64_t b, int64_t t0, int64_t t1)
{
	struct kv_lane lane = kv_lane_get(&a.batch, b);
	int64_t end = lane.start + lane.len, from = lane.start, to = end;
	bool owner = lane.start >= t0;
	float window[W - 1][VEC], history[W - 1][VEC];

	if (!owner) /* its first W - 1 tokens are another tile's */
		from = t0 > lane.start + W - 1 ? t0 : lane.start + W - 1;
	if (to > t1)
		to = owner && t1 < lane.start + W - 1 ? lane.start + W - 1 : t1;
	if (to > end)
		to = end;
	if (lane.pad) {
		const float zero[VEC] = {};

		for (int64_t t = from; t < to; t++)
			store<VEC, TYPES>(a.out, t * a.out_stride + ch.c, a.dtype, zero);
		return;
	}
	if (owner) {
		load_history<VEC, W, TYPES>(a, lane, ch.c, history);
		memcpy(window, history, sizeof(window));
	} else if (from < to) {
#pragma unroll
		for (int j = 0; j < W - 1; j++)
			load<VEC, TYPES>(window[j], a.x, (from - W + 1 + j) * a.x_stride + ch.c,
					 a.dtype);
	}
	slide<VEC, W, TYPES>(a, ch, window, from, to);
	if (!owner)
		return;
	store_row<VEC, W, TYPES>(a, lane, history, lane.len, ch.c, lane.write);
	for (int i = 0; i < lane.len && i < a.batch.step_width; i++)
		store_row<VEC, W, TYPES>(a, lane, history, i + 1, ch.c,
					 kv_step_row(&a.batch, b, i));
	for (int64_t n = (lane.computed / a.batch.interval + 1) * a.batch.interval;
	     a.batch.table && n <= lane.computed + lane.len; n += a.batch.interval)
		store_row<VEC, W, TYPES>(a, lane, history, n - lane.computed, ch.c,
					 kv_checkpoint_row(&a.batch, b, n));
}

template <int VEC, int W, int TYPES>
__global__ void __launch_bounds__(THREADS) convolve(struct conv_params p)
{
	const struct kv_conv1d_args &a = p.a;
	int64_t t0 = (int64_t)blockIdx.x * p.tile, t1 = t0 + p.tile;
	int first = first_lane(a.batch, t0);
	struct channels<VEC, W> ch;

	ch.c = (int)(blockIdx.y * THREADS + threadIdx.x) * VEC;
	if (ch.c >= a.n_channels)
		return;
#pragma unroll
	for (int v = 0; v < VEC; v++) {
		ch.bias[v] = a.bias ? kv_element_load(a.bias, ch.c + v, a.dtype) : 0;
#pragma unroll
		for (int j = 0; j < W; j++)
			ch.weight[v][j] =
				kv_element_load(a.weight, (int64_t)(ch.c + v) * W + j, a.dtype);
	}
	for (int64_t b = first; b < a.batch.n_seqs; b++) {
		int64_t start = a.batch.query_start_loc ? a.batch.query_start_loc[b] : b;

		if (start >= t1)
			break;
		if (lane_end(a.batch, b) > start)
			run_lane<VEC, W, TYPES>(a, ch, b, t0, t1);
	}
}

/* Four channels at a time: 16-bit types, aligned to 8 bytes everywhere. */
static bool is_wide(const struct kv_conv1d_args *a)
{
	uint64_t bits = (uint64_t)(uintptr_t)a->x | (uint64_t)(uintptr_t)a->out |
			(uint64_t)(a->x_stride * 2) | (uint64_t)(a->out_stride * 2) |
			(uint64_t)(uintptr_t)a->state.base | (uint64_t)a->state.row_stride |
			(uint64_t)a->state.tap_stride;

	return a->width == 4 && a->dtype != KV_F32 && a->state.dtype == a->dtype &&
	       a->state.channel_stride == 2 && a->n_channels % 4 == 0 && bits % 8 == 0;
}

extern "C" int kv_conv1d_cuda(const struct kv_conv1d_args *args)
{
	static void (*const narrow[])(struct conv_params) = {
		convolve<1, 2, TYPES_ANY>, convolve<1, 3, TYPES_ANY>, convolve<1, 4, TYPES_ANY>,
		convolve<1, 5, TYPES_ANY>, convolve<1, 6, TYPES_ANY>, convolve<1, 7, TYPES_ANY>,
		convolve<1, 8, TYPES_ANY>};
	void (*kernel)(struct conv_params) = narrow[args->width - 2];
	bool wide = is_wide(args);
	int64_t per_block = THREADS * (wide ? 4 : 1);
	int64_t columns = (args->n_channels + per_block - 1) / per_block; /* 8192 at most */
	/* Tiles as long as keep eight thread blocks on each of 132 multiprocessors. */
	int64_t tile = args->batch.n_tokens * columns / 1056;
	struct conv_params p;

	p.a = *args;
	p.tile = (int32_t)(tile < 1 ? 1 : tile > MAX_TILE ? MAX_TILE : tile);
	if (wide)
		kernel = args->dtype == KV_BF16 ? convolve<4, 4, TYPES_BF16>
						: convolve<4, 4, TYPES_F16>;
	return kv_launch_cluster(
		"convolution", kernel,
		dim3((unsigned)((args->batch.n_tokens + p.tile - 1) / p.tile), (unsigned)columns),
		THREADS, 0, 1, false, args->stream, p);
}
