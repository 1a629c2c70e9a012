/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention of many queries a sequence over block tables, at the speed of the tensor cores of sm_90a.
 *
 *	x_j = scale q . k_j; x_j = c tanh(x_j / c) if c > 0; out = v_scale sum e^x_j v_j / sum e^x_j
 *
 * Types as of attention_split.cuh: products in the cache's 16-bit type, or in f16 for e4m3, whose
 * values f16 holds exactly; sums in f32. Scores are kept in units of ln 2.
 *
 * An item is a tile of 128 rows - query tokens by query heads of a KV head - and the keys that some
 * row sees, visited from the last to the first in tiles of 128 (80 or 64 for 256 columns). Items are
 * handed out by a counter, those with the most keys first, to one thread block a multiprocessor:
 *
 *	warp 0		takes items, has the copy engine bring K: a box for each 16, 32 or 64 tokens,
 *			which lie in one block, and 64 columns; block_tokens is a multiple of 16
 *	warp 1		the same for V
 *	warps 2, 3	bring q of the next item
 *	warps 1 to 3	of an e4m3 cache: make f16 of what was brought; warp 0 does the rest
 *	warps 4 to 11	two groups with 64 rows each: S = Q K^T, P = e^S, O += P V by wgmma, P and O in
 *			registers
 *
 * A group issues the products of the next keys with q before it calculates weights of the last ones,
 * and groups take turns, so that the tensor cores have work while weights are calculated. V past the
 * last key is set to 0, for its weights are 0, and 0 times what lies there may be NaN.
 *
 * A row's sums go over tiles that lie at multiples of their size in the sequence: they are the same
 * bits in each run. Method: FlashAttention-3, arXiv:2407.08608. Speed: tests/bench/NOTES.md.
 */
#include "kernels/device/launch.cuh"
#include "kernels/prefill_attend.cuh"

template <typename S>
__global__ void __launch_bounds__(S::threads, 1)
	attend_prefill(const __grid_constant__ struct kv_prefill_params p)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
	extern __shared__ char memory[];
	__shared__ struct prefill_board<S> board;
	uint32_t shared = (shared_of(memory) + 1023) / 1024 * 1024;
	int group = __shfl_sync(KV_ALL_LANES, threadIdx.x / KV_WARPGROUP, 0);

	if (threadIdx.x == 0) {
		constexpr int warps = S::groups * 4;

		for (int i = 0; i < SLOTS; i++) {
			kv_barrier_init(shared_of(&board.item_full[i]), 1);
			kv_barrier_init(shared_of(&board.item_empty[i]), warps + 3);
		}
		for (int i = 0; i < S::q_stages; i++) {
			kv_barrier_init(shared_of(&board.q_full[i]), S::q_warps * KV_WARP);
			kv_barrier_init(shared_of(&board.q_empty[i]), warps);
		}
		for (int i = 0; i < S::stages; i++) {
			kv_barrier_init(shared_of(&board.k_full[i]), S::wide ? WIDENERS : 1);
			kv_barrier_init(shared_of(&board.v_full[i]), S::wide ? WIDENERS : 1);
			kv_barrier_init(shared_of(&board.k_empty[i]), warps);
			kv_barrier_init(shared_of(&board.v_empty[i]), warps);
		}
		kv_barrier_init(shared_of(&board.landed), 1);
		for (int i = 0; i < S::raw_stages; i++) {
			kv_barrier_init(shared_of(&board.raw_k_full[i]), 1);
			kv_barrier_init(shared_of(&board.raw_v_full[i]), 1);
			kv_barrier_init(shared_of(&board.raw_k_empty[i]), WIDENERS);
			kv_barrier_init(shared_of(&board.raw_v_empty[i]), WIDENERS);
		}
		kv_barrier_init_fence();
		kv_tma_prefetch_map(&p.k_map);
		kv_tma_prefetch_map(&p.v_map);
	}
	__syncthreads();
	if (group == 0) {
		int warp = __shfl_sync(KV_ALL_LANES, threadIdx.x / KV_WARP, 0);

		kv_registers_fewer<S::few>();
		if (warp == 0)
			fetch<S>(p, shared, &board);
		else if (S::wide)
			widen<S>(p, shared, &board);
		else if (warp == 1)
			fetch_values<S>(p, shared, &board);
		else
			fetch_q<S>(p, shared, &board);
	} else {
		kv_registers_more<S::many>();
		attend<S>(p, shared, &board);
	}
#endif
}

template <int TYPE, int D, int GROUPS>
static int launch_prefill(const struct kv_prefill_params *params, int n_blocks, void *stream)
{
	typedef struct prefill_shape<TYPE, D, GROUPS, false> plain;
	typedef struct prefill_shape<TYPE, D, GROUPS, true> capped;

	if (params->capped)
		return kv_launch("attention", attend_prefill<capped>, dim3((unsigned)n_blocks),
				 capped::threads, capped::shared, stream, *params);
	return kv_launch("attention", attend_prefill<plain>, dim3((unsigned)n_blocks),
			 plain::threads, plain::shared, stream, *params);
}

template <int TYPE>
static int launch_columns(const struct kv_prefill_params *params, int columns, int n_blocks,
			  void *stream)
{
	if (columns == 64)
		return launch_prefill<TYPE, 64, 2>(params, n_blocks, stream);
	if (columns == 128)
		return launch_prefill<TYPE, 128, 2>(params, n_blocks, stream);
	return launch_prefill<TYPE, 256, 2>(params, n_blocks, stream);
}
