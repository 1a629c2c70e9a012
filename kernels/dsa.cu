/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The indexer's write and top-k, and scores and sparse attention for any sizes, on a GPU.
 *
 *	write	a warp a token, 4 elements a lane
 *	score	a warp a key of one query, 4 of its elements a lane, heads one after the other
 *	select	threshold by radix over the bits of the scores as an ordered integer: 11, 11, 10
 *		bits, the highest first; then what is above it, and as many of the equal ones, in
 *		order of position. RANKS thread blocks a query, each with a part of its keys; they
 *		add their histograms in each other's shared memory.
 *	attend	a thread block a head of a query: scores in shared memory, then a thread a column
 *
 * All sums are in one order: calls are repeatable to the bit.
 */
#include <cooperative_groups.h>

#include "kernels/device/launch.cuh"
#include "kernels/device/warp.cuh"
#include "kernels/dsa.h"

namespace cg = cooperative_groups;

#define THREADS 256

/* Bits whose order as integers is that of the numbers; NaN as -infinity. */
__device__ static inline uint32_t ordered(float x)
{
	uint32_t u = isnan(x) ? 0xff800000u : kv_f32_bits(x + 0.0f); /* -0 is 0 */

	return u & 0x80000000u ? ~u : u | 0x80000000u;
}

__global__ void __launch_bounds__(THREADS) write_keys(struct kv_index_write_args a)
{
	int64_t t = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / KV_WARP;
	int lane = threadIdx.x % KV_WARP;
	int64_t block, row;
	float x[4], most = 0;

	if (t >= a.n_tokens || a.slots[t] < 0)
		return;
	block = a.slots[t] / a.cache.block_tokens;
	row = a.slots[t] % a.cache.block_tokens;
	for (int i = 0; i < 4; i++) {
		x[i] = kv_element_load(a.key, t * a.key_stride + 4 * lane + i, a.dtype);
		most = fmaxf(most, fabsf(x[i]));
	}
	if (a.cache.head_dim == KV_INDEX_ROW_FP8) {
		float scale = kv_index_scale(kv_warp_max(most), a.pow2_scales);
		uint32_t codes = 0;

		for (int i = 0; i < 4; i++)
			codes |= (uint32_t)kv_f32_to_e4m3(__fdiv_rn(x[i], scale)) << 8 * i;
		((uint32_t *)kv_index_codes(&a.cache, block, row))[lane] = codes;
		if (lane == 0)
			*(float *)kv_index_scales(&a.cache, block, row) = scale;
	} else {
		uint16_t codes = 0;
		uint8_t code;

		for (int step = 1; step < 8; step *= 2) /* 8 lanes are a tile of 32 */
			most = fmaxf(most, __shfl_xor_sync(KV_ALL_LANES, most, step));
		code = kv_index_scale_fp4(most);
		for (int i = 0; i < 4; i++)
			codes |= (uint16_t)(kv_f32_to_e2m1(
						    __fdiv_rn(x[i], kv_ue8m0_to_f32(code)))
					    << 4 * i);
		((uint16_t *)kv_index_codes(&a.cache, block, row))[lane] = codes;
		if (lane % 8 == 0)
			kv_index_scales(&a.cache, block, row)[lane / 8] = code;
	}
}

extern "C" int kv_index_write_cuda(const struct kv_index_write_args *args)
{
	int64_t blocks = (args->n_tokens * KV_WARP + THREADS - 1) / THREADS;

	return kv_launch("index_write", write_keys, dim3((unsigned)blocks), THREADS, 0, args->stream,
			 *args);
}

/* Grid: x over keys, y over queries in rounds. */
__global__ void __launch_bounds__(THREADS) score_keys(struct kv_index_args a)
{
	int lane = threadIdx.x % KV_WARP, warp = threadIdx.x / KV_WARP;

	for (int64_t t = blockIdx.y; t < a.n_tokens; t += gridDim.y) {
		struct kv_index_query query = kv_index_query_get(&a, t);
		const int32_t *table = a.block_table + (int64_t)query.seq * a.table_width;

		for (int64_t j = (int64_t)blockIdx.x * (THREADS / KV_WARP) + warp;
		     query.seq >= 0 && j < query.n_keys;
		     j += (int64_t)gridDim.x * (THREADS / KV_WARP)) {
			int64_t block = table[j / a.cache.block_tokens];
			int64_t row = j % a.cache.block_tokens;
			float key[4], sum = 0;

			for (int i = 0; i < 4; i++)
				key[i] = kv_index_key(&a.cache, block, row, 4 * lane + i);
			for (int64_t h = 0; h < a.n_heads; h++) {
				const uint8_t *q = (const uint8_t *)a.q + t * a.q_stride +
						   h * KV_INDEX_DIM + 4 * lane;
				float x = 0;

				for (int i = 0; i < 4; i++)
					x += kv_e4m3_to_f32(q[i]) * key[i];
				x = kv_warp_add(x);
				sum += fmaxf(x, 0) * a.weights[t * a.weights_stride + h];
			}
			if (lane == 0)
				a.scores[t * a.scores_stride + j] =
					sum * kv_index_key_scale(&a.cache, block, row);
		}
	}
}

extern "C" int kv_index_score_cuda(const struct kv_index_args *args)
{
	int64_t keys = ((int64_t)args->max_seq_len + THREADS / KV_WARP - 1) / (THREADS / KV_WARP);
	dim3 grid((unsigned)(keys < 4096 ? keys : 4096),
		  (unsigned)(args->n_tokens < 65535 ? args->n_tokens : 65535));

	if (!args->max_seq_len)
		return 0;
	return kv_launch("index_score", score_keys, grid, THREADS, 0, args->stream, *args);
}

#define SELECT_THREADS 512
#define BINS	       2048
#define MAX_RANKS      8
#define TILE	       (4 * SELECT_THREADS) /* keys that a thread block puts in order at a time */

struct select_shared {
	uint32_t counts[3][BINS]; /* of this rank */
	uint32_t parts[3][BINS / MAX_RANKS]; /* of all ranks, bins BINS / RANKS * rank .. */
	uint32_t warps[SELECT_THREADS / KV_WARP];
	uint32_t totals[2]; /* of this rank: keys above the threshold, and equal to it */
	uint32_t bin;
	uint32_t left;
};

/* Sum of @x over the threads before this one; *ret_total over all. Ends with no barrier. */
__device__ static uint32_t scan_block(uint32_t x, uint32_t *warps, uint32_t *ret_total)
{
	int lane = threadIdx.x % KV_WARP, warp = threadIdx.x / KV_WARP;
	uint32_t sum = x, before = 0, total = 0;

	for (int step = 1; step < KV_WARP; step *= 2) {
		uint32_t y = __shfl_up_sync(KV_ALL_LANES, sum, step);

		sum += lane >= step ? y : 0;
	}
	__syncthreads(); /* the last call's sums have been read */
	if (lane == KV_WARP - 1)
		warps[warp] = sum;
	__syncthreads();
	for (int w = 0; w < SELECT_THREADS / KV_WARP; w++) {
		before += w < warp ? warps[w] : 0;
		total += warps[w];
	}
	*ret_total = total;
	return before + sum - x;
}

template <int RANKS> __device__ static inline void sync_ranks(void)
{
#if __CUDA_ARCH__ >= 900
	if (RANKS > 1) {
		cg::this_cluster().sync();
		return;
	}
#endif
	__syncthreads();
}

/* What @p, in this block's shared memory, is in that of @rank. */
template <int RANKS, typename T> __device__ static inline T *of_rank(T *p, int rank)
{
#if __CUDA_ARCH__ >= 900
	if (RANKS > 1)
		return cg::this_cluster().map_shared_rank(p, rank);
#endif
	return p;
}

/* Keys [lo, hi) of @scores, 4 at a time: call(key, ordered bits). lo is a multiple of 4. */
template <typename Call>
__device__ static inline void each_key(const float *scores, int64_t lo, int64_t hi, Call call)
{
	for (int64_t j = lo + 4 * threadIdx.x; j < hi; j += TILE) {
		float4 x = __ldcg((const float4 *)(scores + j));
		float four[4] = {x.x, x.y, x.z, x.w};

#pragma unroll
		for (int i = 0; i < 4; i++)
			if (j + i < hi)
				call(j + i, ordered(four[i]));
	}
}

__device__ static inline int32_t name_key(const struct kv_index_args &a, const int32_t *table,
					  int64_t j)
{
	if (a.form == KV_INDEX_POSITIONS)
		return (int32_t)j;
	return (int32_t)((int64_t)table[j / a.cache.block_tokens] * a.cache.block_tokens +
			 j % a.cache.block_tokens);
}

/* The digit in which the @left-th largest falls, and how many of that digit it takes. */
template <int RANKS>
__device__ static void find_bin(struct select_shared &s, int pass, int n_bins, uint32_t left)
{
	uint32_t four[BINS / SELECT_THREADS], sum = 0, total, above;

	/* Thread i has bins from the top: n_bins - 1 - 4 i and the three below it. */
#pragma unroll
	for (int i = 0; i < BINS / SELECT_THREADS; i++) {
		int bin = n_bins - 1 - (BINS / SELECT_THREADS) * (int)threadIdx.x - i;

		four[i] = bin < 0	? 0
			  : RANKS > 1 ? of_rank<RANKS>(s.parts[pass], bin / (BINS / RANKS))
						[bin % (BINS / RANKS)]
				      : s.counts[pass][bin];
		sum += four[i];
	}
	above = scan_block(sum, s.warps, &total);
#pragma unroll
	for (int i = 0; i < BINS / SELECT_THREADS; i++) {
		if (above < left && left <= above + four[i]) {
			s.bin = n_bins - 1 - (BINS / SELECT_THREADS) * threadIdx.x - i;
			s.left = left - above;
		}
		above += four[i];
	}
	__syncthreads();
}

template <int RANKS>
__global__ void __launch_bounds__(SELECT_THREADS) select_keys(struct kv_index_args a)
{
	__shared__ struct select_shared s;
	int64_t t = blockIdx.x / RANKS;
	int rank = blockIdx.x % RANKS;
	struct kv_index_query query = kv_index_query_get(&a, t);
	const int32_t *table = a.block_table + (int64_t)query.seq * a.table_width;
	const float *scores = a.scores + t * a.scores_stride;
	int32_t *chosen = a.chosen + t * a.top_k;
	int64_t part = ((query.n_keys + RANKS - 1) / RANKS + 3) / 4 * 4;
	int64_t lo = rank * part, hi = lo + part < query.n_keys ? lo + part : query.n_keys;
	uint32_t prefix = 0, left = (uint32_t)a.top_k, before[2] = {0, 0}, mine[2] = {0, 0};
	const int shifts[4] = {32, 21, 10, 0};

	if (query.seq < 0) /* so for all ranks */
		return;
	if (query.n_keys <= a.top_k) {
		for (int64_t i = (int64_t)rank * SELECT_THREADS + threadIdx.x; i < a.top_k;
		     i += (int64_t)RANKS * SELECT_THREADS)
			chosen[i] = i < query.n_keys ? name_key(a, table, i) : -1;
		return;
	}
	for (int i = threadIdx.x; i < 3 * BINS; i += SELECT_THREADS)
		s.counts[0][i] = 0;
	__syncthreads();
#pragma unroll
	for (int pass = 0; pass < 3; pass++) {
		int shift = shifts[pass + 1], n_bins = 1 << (shifts[pass] - shift);

		each_key(scores, lo, hi, [&](int64_t, uint32_t u) {
			if (pass == 0 || u >> shifts[pass] == prefix)
				atomicAdd(&s.counts[pass][u >> shift & (n_bins - 1)], 1u);
		});
		sync_ranks<RANKS>();
		for (int i = threadIdx.x; RANKS > 1 && i < BINS / RANKS; i += SELECT_THREADS) {
			int bin = rank * (BINS / RANKS) + i;
			uint32_t sum = 0;

#pragma unroll
			for (int r = 0; r < RANKS; r++)
				sum += of_rank<RANKS>(s.counts[pass], r)[bin];
			s.parts[pass][i] = sum;
		}
		sync_ranks<RANKS>();
		find_bin<RANKS>(s, pass, n_bins, left);
		prefix = pass == 0 ? s.bin : prefix << (shifts[pass] - shift) | s.bin;
		left = s.left;
	}

	/* prefix is the threshold; of those equal to it the first `left` are chosen. */
	each_key(scores, lo, hi, [&](int64_t, uint32_t u) {
		mine[0] += u > prefix;
		mine[1] += u == prefix;
	});
	for (int i = 0; i < 2; i++) {
		uint32_t total;

		scan_block(mine[i], s.warps, &total);
		if (threadIdx.x == 0)
			s.totals[i] = total;
	}
	sync_ranks<RANKS>();
	for (int r = 0; r < rank; r++)
		for (int i = 0; i < 2; i++)
			before[i] += of_rank<RANKS>(s.totals, r)[i];
	for (int64_t first = lo; first < hi; first += TILE) {
		int64_t j = first + 4 * threadIdx.x;
		uint32_t u[4], both = 0, total; /* above the threshold, and equal << 16 */
		uint32_t above, equal;

#pragma unroll
		for (int i = 0; i < 4; i++) {
			u[i] = j + i < hi ? ordered(__ldcg(scores + j + i)) : 0;
			both += (u[i] > prefix) + ((uint32_t)(u[i] == prefix && j + i < hi) << 16);
		}
		both = scan_block(both, s.warps, &total);
		above = before[0] + (both & 0xffff);
		equal = before[1] + (both >> 16);
#pragma unroll
		for (int i = 0; i < 4; i++) {
			bool same = u[i] == prefix && j + i < hi;

			if (u[i] > prefix || (same && equal < left))
				chosen[above + (equal < left ? equal : left)] =
					name_key(a, table, j + i);
			above += u[i] > prefix;
			equal += same;
		}
		before[0] += total & 0xffff;
		before[1] += total >> 16;
	}
	sync_ranks<RANKS>(); /* nobody's shared memory goes while another reads it */
}

/* Thread blocks that share a row: a cluster, where the device has them and rows are long. */
static int ranks_of(const struct kv_index_args *args)
{
#ifdef KV_HAVE_SM90A
	int device, major;

	if (args->max_seq_len > 4096 && cudaGetDevice(&device) == cudaSuccess &&
	    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
	    major == 9)
		return 8;
#endif
	return 1;
}

extern "C" int kv_index_select_cuda(const struct kv_index_args *args)
{
	struct kv_index_args a = *args;
	void *params[] = {&a};
	cudaLaunchConfig_t config = {};
	cudaLaunchAttribute attribute = {};
	int ranks = ranks_of(args);
	cudaError_t e;

	if ((int64_t)args->n_tokens * ranks > INT32_MAX)
		return kv_error(-ENOTSUP, "n_tokens: %d given, too many for one launch",
				args->n_tokens);
	config.gridDim = dim3((unsigned)(args->n_tokens * ranks));
	config.blockDim = dim3(SELECT_THREADS);
	config.stream = (cudaStream_t)args->stream;
	attribute.id = cudaLaunchAttributeClusterDimension;
	attribute.val.clusterDim.x = (unsigned)ranks;
	attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
	config.attrs = &attribute;
	config.numAttrs = ranks > 1;
	e = cudaLaunchKernelExC(&config,
				ranks > 1 ? (const void *)select_keys<8>
					  : (const void *)select_keys<1>,
				params);
	if (e == cudaSuccess)
		return 0;
	cudaGetLastError();
	return kv_error(-EIO, "index_select: CUDA: %s (%s)", cudaGetErrorName(e),
			cudaGetErrorString(e));
}

/* x[top_k] scores, then powers; q[latent_dim + rope_dim] */
__global__ void __launch_bounds__(THREADS) attend_rows(struct kv_sparse_mla_args a)
{
	extern __shared__ float x[];
	__shared__ float warps[THREADS / KV_WARP];
	float *q = x + a.top_k;
	int64_t t = blockIdx.x / a.n_heads, h = blockIdx.x % a.n_heads;
	const int32_t *chosen = a.chosen + t * a.top_k;
	int dim = a.latent_dim + a.rope_dim, lane = threadIdx.x % KV_WARP;
	float most = -INFINITY, total = 0;

	for (int d = threadIdx.x; d < dim; d += THREADS)
		q[d] = kv_element_load(a.q, t * a.q_stride + h * dim + d, a.dtype);
	__syncthreads();
	for (int i = threadIdx.x / KV_WARP; i < a.top_k; i += THREADS / KV_WARP) {
		int64_t slot = chosen[i];
		float sum = 0;

		if (slot >= 0) {
			const char *row = (const char *)a.cache.base +
					  kv_view_offset(&a.cache, slot / a.cache.block_tokens,
							 slot % a.cache.block_tokens, 0);

			for (int d = lane; d < dim; d += KV_WARP)
				sum += q[d] * kv_latent_element(&a, row, d);
		}
		sum = kv_warp_add(sum) * a.sm_scale;
		sum = slot < 0 ? -INFINITY : sum;
		most = kv_max(most, sum);
		if (lane == 0)
			x[i] = sum;
	}
	if (lane == 0)
		warps[threadIdx.x / KV_WARP] = most;
	__syncthreads();
	for (int w = 0; w < THREADS / KV_WARP; w++)
		most = kv_max(most, warps[w]);
	for (int i = 0; i < a.top_k; i++) /* all alike, in one order */
		total += x[i] == -INFINITY ? 0 : expf(x[i] - most);
	for (int d = threadIdx.x; d < a.latent_dim; d += THREADS) {
		float sum = 0;

		for (int i = 0; i < a.top_k; i++) {
			int64_t slot = chosen[i];

			if (slot < 0)
				continue;
			sum += expf(x[i] - most) *
			       kv_latent_element(&a,
						 (const char *)a.cache.base +
							 kv_view_offset(
								 &a.cache,
								 slot / a.cache.block_tokens,
								 slot % a.cache.block_tokens, 0),
						 d);
		}
		kv_element_store(a.out, t * a.out_stride + h * a.latent_dim + d, a.dtype,
				 total == 0 ? 0 : sum / total);
	}
	if (a.lse && threadIdx.x == 0)
		a.lse[t * a.n_heads + h] = total == 0 ? -INFINITY : most + logf(total);
}

extern "C" int kv_sparse_mla_cuda(const struct kv_sparse_mla_args *args)
{
	size_t shared = ((size_t)args->top_k + args->latent_dim + args->rope_dim) * sizeof(float);
	int64_t blocks = (int64_t)args->n_tokens * args->n_heads;

	if (shared > 200 * 1024)
		return kv_error(-ENOTSUP, "top_k: %d given, too many for shared memory",
				args->top_k);
	if (blocks > INT32_MAX)
		return kv_error(-ENOTSUP, "n_tokens: %d given, too many for one launch",
				args->n_tokens);
	return kv_launch("sparse_mla", attend_rows, dim3((unsigned)blocks), THREADS, shared,
			 args->stream, *args);
}
