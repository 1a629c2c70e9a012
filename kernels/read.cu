/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of K and V from blocks on a GPU.
 *
 * A warp has a row of the output, K's and V's; its lanes have elements side by side. Its sequence
 * is the last one that begins at or before it, found by bisection of start_loc.
 */
#include "kernels/device/launch.cuh"
#include "kernels/device/warp.cuh"
#include "kernels/read.h"

#define THREADS 128
#define WARPS	(THREADS / KV_WARP)

__global__ void __launch_bounds__(THREADS) read_rows(const __grid_constant__ struct kv_read_args a)
{
	int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / KV_WARP, j, column, block;
	int lane = threadIdx.x % KV_WARP, lo = 0, hi = a.n_seqs;

	if (i >= a.n_tokens || i < a.start_loc[0] || i >= a.start_loc[a.n_seqs])
		return;
	while (hi - lo > 1) { /* start_loc[lo] <= i < start_loc[hi] */
		int mid = (lo + hi) / 2;

		*(a.start_loc[mid] <= i ? &lo : &hi) = mid;
	}
	j = i - a.start_loc[lo] + (a.first ? a.first[lo] : 0);
	column = j / a.k.block_tokens;
	if (j < 0 || column >= a.table_width)
		return;
	block = a.block_table[(int64_t)lo * a.table_width + column];
	if (block < 0)
		return;
	for (int is_v = 0; is_v < 2; is_v++) {
		struct kv_read_side s = kv_read_side(&a, is_v);
		int n = s.view->n_heads * s.view->head_dim;

		for (int e = lane; e < n && s.to; e += KV_WARP)
			kv_read_element(&a, &s, block, j % a.k.block_tokens, i, e);
	}
}

extern "C" int kv_read_cuda(const struct kv_read_args *args)
{
	return kv_launch("read", read_rows, dim3((unsigned)((args->n_tokens + WARPS - 1) / WARPS)),
			 THREADS, 0, args->stream, *args);
}
