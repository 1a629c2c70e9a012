/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scores of an indexer of up to 64 heads by the matrix units, from pages of 64 tokens or multiples.
 *
 *	D [64 keys, 64 heads] = K [64, 128] Q^T, e4m3, sums in f32 inside wgmma (m64n64k32, 4 steps)
 *	score[key] = k_scale[key] * sum_h w[h] max(D[key][h], 0)
 *
 * Work: a warpgroup has a run of tiles of 64 keys of one sequence and up to QUERIES of its queries,
 * whose Q lie in shared memory; tiles come through a ring of STAGES by cp.async, in rows of 128
 * bytes whose 16-byte units are turned by the row. A thread has 2 keys times 16 heads of D; 4
 * threads add up. Lacking heads are zeros with weight 0.
 *
 * H200, 64 heads, one query a sequence, graph of calls over four tables: 8 x 64k tokens 24.0 us
 * (2.88 TB/s), with top-k 2048 50.1 us; 1 x 64k 30.4 us; 128 x 8k 141 us; 64 queries of 32k 461
 * TFLOP/s.
 */
#include "kernels/device/hopper.cuh"
#include "kernels/device/launch.cuh"
#include "kernels/device/mma.cuh"
#include "kernels/device/warp.cuh"
#include "kernels/dsa.h"

#define THREADS	    128
#define KEYS	    64
#define HEADS	    64
#define QUERIES	    4
#define STAGES	    4
#define MAX_TILES   64 /* of a run */
#define TILE_BYTES  (KEYS * KV_INDEX_DIM)
#define STAGE_BYTES (TILE_BYTES + 1024) /* scales behind the codes; tiles begin at 1024s */

#ifdef KV_HAVE_SM90A
static const bool have_sm90a = true;
#else
static const bool have_sm90a = false;
#endif

struct score_params {
	struct kv_index_args a;
	int32_t n_runs; /* of a sequence */
	int32_t n_tiles; /* of a run */
	int32_t n_groups; /* of QUERIES queries */
	int32_t queries; /* room for so many in shared memory */
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
/* d [64, 64] = (add ? d : 0) + a [64, 32] b [64, 32]^T, e4m3 along k in both */
__device__ static inline void multiply(float (&d)[32], uint64_t a, uint64_t b, int add)
{
	asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
		     "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" KV_P32
		     "}, %32, %33, p, 1, 1; }"
		     : KV_C32(d, 0)
		     : "l"(a), "l"(b), "r"(add));
}

__device__ static inline void copy16(uint32_t to, const char *from)
{
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ static inline void fetch(const struct kv_index_args &a, uint32_t to, int64_t block, int row)
{
	const char *codes = (const char *)kv_index_codes(&a.cache, block, row);

#pragma unroll
	for (int i = 0; i < TILE_BYTES / 16 / THREADS; i++) {
		int c = threadIdx.x + i * THREADS, r = c / 8, u = c % 8;

		copy16(to + r * 128 + ((u ^ r % 8) * 16), codes + c * 16);
	}
	if (threadIdx.x < KEYS * 4 / 16)
		copy16(to + TILE_BYTES + threadIdx.x * 16,
		       (const char *)kv_index_scales(&a.cache, block, row) + threadIdx.x * 16);
}
#endif

__global__ void __launch_bounds__(THREADS) score_tiles(const __grid_constant__ struct score_params p)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
	extern __shared__ char raw[];
	__shared__ int32_t blocks[MAX_TILES];
	__shared__ float weights[QUERIES][HEADS];
	const struct kv_index_args &a = p.a;
	int run = blockIdx.x % p.n_runs, rest = blockIdx.x / p.n_runs;
	int group = rest % p.n_groups, b = rest / p.n_groups;
	int64_t start = a.query_start_loc ? a.query_start_loc[b] : b;
	int64_t end = a.query_start_loc ? a.query_start_loc[b + 1] : b + 1;
	int64_t t0 = start + group * QUERIES, most, first = (int64_t)run * p.n_tiles;
	int n_queries = (int)(end - t0 < QUERIES ? end - t0 : QUERIES), n_tiles, p_tiles;
	int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, quad = lane % 4;
	char *base = raw + (1024 - (uint32_t)__cvta_generic_to_shared(raw) % 1024) % 1024;
	uint32_t q_at = (uint32_t)__cvta_generic_to_shared(base);
	uint32_t ring = q_at + p.queries * TILE_BYTES;
	const float *scales = (const float *)(base + p.queries * TILE_BYTES + TILE_BYTES);

	if (n_queries <= 0)
		return;
	most = kv_index_keys(&a, b, t0 + n_queries - 1);
	n_tiles = (int)min((int64_t)p.n_tiles, (most + KEYS - 1) / KEYS - first);
	if (n_tiles <= 0)
		return;
	p_tiles = a.cache.block_tokens / KEYS;
	for (int i = threadIdx.x; i < n_tiles; i += THREADS)
		blocks[i] = a.block_table[(int64_t)b * a.table_width + (first + i) / p_tiles];
	for (int i = threadIdx.x; i < n_queries * HEADS; i += THREADS)
		weights[i / HEADS][i % HEADS] =
			i % HEADS < a.n_heads
				? a.weights[(t0 + i / HEADS) * a.weights_stride + i % HEADS]
				: 0;
	for (int i = threadIdx.x; i < n_queries * TILE_BYTES / 16; i += THREADS) {
		int n = i / (TILE_BYTES / 16), r = i / 8 % HEADS, u = i % 8;
		uint4 x = {};

		if (r < a.n_heads)
			x = *(const uint4 *)((const char *)a.q + (t0 + n) * a.q_stride +
					     r * KV_INDEX_DIM + u * 16);
		*(uint4 *)(base + n * TILE_BYTES + r * 128 + ((u ^ r % 8) * 16)) = x;
	}
	__syncthreads();
	for (int i = 0; i < STAGES - 1; i++) {
		if (i < n_tiles)
			fetch(a, ring + i * STAGE_BYTES, blocks[i],
			      (int)((first + i) % p_tiles) * KEYS);
		kv_copy_commit();
	}
	for (int i = 0; i < n_tiles; i++) {
		uint32_t at = ring + i % STAGES * STAGE_BYTES;
		int next = i + STAGES - 1;
		int64_t j = (first + i) * KEYS + 16 * warp + g;
		float scale[2];

		kv_copy_wait<STAGES - 2>();
		kv_fence_async();
		__syncthreads(); /* tile i is there; all are through with the stage of i - 1 */
		if (next < n_tiles)
			fetch(a, ring + next % STAGES * STAGE_BYTES, blocks[next],
			      (int)((first + next) % p_tiles) * KEYS);
		kv_copy_commit();
		for (int r = 0; r < 2; r++)
			scale[r] = scales[i % STAGES * (STAGE_BYTES / 4) + 16 * warp + g + 8 * r];
		for (int n = 0; n < n_queries; n++) {
			int64_t n_keys = kv_index_keys(&a, b, t0 + n);
			float d[32], sum[2] = {0, 0};

			__syncwarp(); /* stores above were some lanes' */
			kv_wgmma_fence();
#pragma unroll
			for (int k = 0; k < KV_INDEX_DIM / 32; k++)
				multiply(d, kv_wgmma_operand(at + 32 * k, 0, 1024),
					 kv_wgmma_operand(q_at + n * TILE_BYTES + 32 * k, 0, 1024), k);
			kv_wgmma_commit();
			kv_wgmma_hold(d);
			kv_wgmma_wait<0>();
			kv_wgmma_hold(d);
#pragma unroll
			for (int c = 0; c < HEADS / 8; c++) {
				float2 w = *(const float2 *)&weights[n][8 * c + 2 * quad];

				sum[0] += fmaxf(d[4 * c], 0) * w.x;
				sum[0] += fmaxf(d[4 * c + 1], 0) * w.y;
				sum[1] += fmaxf(d[4 * c + 2], 0) * w.x;
				sum[1] += fmaxf(d[4 * c + 3], 0) * w.y;
			}
#pragma unroll
			for (int r = 0; r < 2; r++) {
				sum[r] += __shfl_xor_sync(KV_ALL_LANES, sum[r], 1);
				sum[r] += __shfl_xor_sync(KV_ALL_LANES, sum[r], 2);
				if (quad == 0 && j + 8 * r < n_keys)
					a.scores[(t0 + n) * a.scores_stride + j + 8 * r] =
						sum[r] * scale[r];
			}
		}
	}
#endif
}

extern "C" int kv_index_score_wgmma(const struct kv_index_args *args)
{
	struct score_params p = {};
	int device = 0, major = 0, sms = 132;
	int64_t tiles = ((int64_t)args->max_seq_len + KEYS - 1) / KEYS, total, blocks;
	uint64_t bits = (uint64_t)(uintptr_t)args->cache.base | (uint64_t)args->cache.block_stride |
			(uint64_t)(uintptr_t)args->q | (uint64_t)args->q_stride;
	size_t shared;

	if (!have_sm90a)
		return kv_error(-ENOTSUP, "wgmma: built without sm_90a");
	if (cudaGetDevice(&device) != cudaSuccess ||
	    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) !=
		    cudaSuccess ||
	    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
		cudaGetLastError();
		return kv_error(-EIO, "device: none that CUDA knows");
	}
	if (major != 9 || args->n_heads > HEADS || args->cache.head_dim != KV_INDEX_ROW_FP8 ||
	    args->cache.block_tokens % KEYS || bits % 16)
		return kv_error(-ENOTSUP, "wgmma: sm_90, up to %d heads, e4m3, blocks of multiples "
					  "of %d tokens and 16-byte alignment wanted",
				HEADS, KEYS);
	if (!tiles || !args->max_query_len)
		return 0;
	p.a = *args;
	p.n_groups = (args->max_query_len + QUERIES - 1) / QUERIES;
	total = tiles * args->n_seqs * p.n_groups;
	p.n_tiles = (int32_t)((total + 4 * sms - 1) / (4 * sms));
	p.n_tiles = p.n_tiles < STAGES ? STAGES : p.n_tiles > MAX_TILES ? MAX_TILES : p.n_tiles;
	p.n_runs = (int32_t)((tiles + p.n_tiles - 1) / p.n_tiles);
	p.queries = args->max_query_len < QUERIES ? args->max_query_len : QUERIES;
	blocks = (int64_t)p.n_runs * p.n_groups * args->n_seqs;
	if (blocks > INT32_MAX)
		return kv_error(-ENOTSUP, "n_seqs: %d given, too many for one launch",
				args->n_seqs);
	shared = 1024 + (size_t)p.queries * TILE_BYTES + STAGES * STAGE_BYTES;
	return kv_launch("index_score", score_tiles, dim3((unsigned)blocks), THREADS, shared,
			 args->stream, p);
}
