/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copying blocks on a GPU. Pairs and views lie on the host; they go as parameters of the launch, by
 * value and in chunks, so that nothing is allocated or staged and a graph captures them.
 *
 * Work: blockIdx.x is the pair, y the view, z a share of the block's bytes, in units of up to 16.
 */
#include "kernels/attention.h"
#include "kernels/device/launch.cuh"
#include "kernels/view.h"

#define THREADS 256
#define SHARES	8
#define UNROLL	4
#define PAIRS	256 /* of a launch: 2 KiB of 4 KiB of parameters */
#define VIEWS	12  /* of a launch */

struct copy_view {
	char *base;
	int64_t block_stride;
	int64_t token_stride;
	int64_t head_stride;
	int64_t row_units; /* units from row to row; a dense block is one row */
	int32_t n_heads;   /* rows of a token; 1 if dense */
	int32_t n_rows;	   /* of a block; 1 if dense */
	int32_t unit;	   /* bytes: 16, 8, 4, 2 or 1 */
	int32_t reserved;
};

struct copy_params {
	struct copy_view views[VIEWS];
	kv_block_id pairs[PAIRS][2];
};

/* A dense block: several loads are under way before the first store waits for its own. */
template <typename Unit>
__device__ static void copy_dense(const Unit *source, Unit *target, int64_t n)
{
	constexpr int64_t step = SHARES * THREADS;
	int64_t i = (int64_t)blockIdx.z * THREADS + threadIdx.x;

	for (; i + (UNROLL - 1) * step < n; i += UNROLL * step) {
		Unit part[UNROLL];

#pragma unroll
		for (int k = 0; k < UNROLL; k++)
			part[k] = source[i + k * step];
#pragma unroll
		for (int k = 0; k < UNROLL; k++)
			target[i + k * step] = part[k];
	}
	for (; i < n; i += step)
		target[i] = source[i];
}

template <typename Unit>
__device__ static void copy_block(const struct copy_view &view, int64_t from, int64_t to)
{
	const char *source = view.base + from * view.block_stride;
	char *target = view.base + to * view.block_stride;
	int64_t n = view.row_units * view.n_rows;

	if (view.n_rows == 1) {
		copy_dense((const Unit *)source, (Unit *)target, n);
		return;
	}
	for (int64_t i = (int64_t)blockIdx.z * THREADS + threadIdx.x; i < n;
	     i += SHARES * THREADS) {
		int64_t row = i / view.row_units;
		int64_t at = row / view.n_heads * view.token_stride +
			     row % view.n_heads * view.head_stride +
			     i % view.row_units * (int64_t)sizeof(Unit);

		*(Unit *)(target + at) = *(const Unit *)(source + at);
	}
}

__global__ void __launch_bounds__(THREADS) copy_blocks(struct copy_params p)
{
	const struct copy_view &view = p.views[blockIdx.y];
	int64_t from = p.pairs[blockIdx.x][0], to = p.pairs[blockIdx.x][1];

	if (from == to)
		return;
	switch (view.unit) {
	case 16:
		copy_block<uint4>(view, from, to);
		break;
	case 8:
		copy_block<uint2>(view, from, to);
		break;
	case 4:
		copy_block<uint32_t>(view, from, to);
		break;
	case 2:
		copy_block<uint16_t>(view, from, to);
		break;
	default:
		copy_block<uint8_t>(view, from, to);
	}
}

static struct copy_view describe(const struct kv_view *view)
{
	struct copy_view c = {};
	int64_t row = kv_view_row_bytes(view);
	bool dense = kv_view_is_dense(view);
	uint64_t bits;

	if (dense)
		row *= (int64_t)view->n_heads * view->block_tokens;
	bits = (uint64_t)(uintptr_t)view->base | (uint64_t)view->block_stride | (uint64_t)row;
	if (!dense)
		bits |= (uint64_t)view->token_stride | (uint64_t)view->head_stride;
	c.unit = 16;
	while (bits % (uint64_t)c.unit)
		c.unit /= 2;
	c.base = (char *)view->base;
	c.block_stride = view->block_stride;
	c.token_stride = view->token_stride;
	c.head_stride = view->head_stride;
	c.row_units = row / c.unit;
	c.n_heads = dense ? 1 : view->n_heads;
	c.n_rows = dense ? 1 : view->n_heads * view->block_tokens;
	return c;
}

extern "C" int kv_copy_cuda(const struct kv_copy_args *args)
{
	struct copy_params p = {};

	for (int v = 0; v < args->n_views; v += VIEWS) {
		int n_views = args->n_views - v < VIEWS ? args->n_views - v : VIEWS;

		for (int i = 0; i < n_views; i++)
			p.views[i] = describe(&args->views[v + i]);
		for (int i = 0; i < args->n_pairs; i += PAIRS) {
			int n_pairs = args->n_pairs - i < PAIRS ? args->n_pairs - i : PAIRS;
			int r;

			memcpy(p.pairs, args->pairs + 2 * (int64_t)i, sizeof(p.pairs[0]) * n_pairs);
			r = kv_launch("copy", copy_blocks,
				      dim3((unsigned)n_pairs, (unsigned)n_views, SHARES), THREADS,
				      0, args->stream, p);
			if (r < 0)
				return r;
		}
	}
	return 0;
}
