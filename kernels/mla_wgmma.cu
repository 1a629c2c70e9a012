/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Latent decode at the speed of the memory, or of the tensor cores, of sm_90a.
 *
 *	x_j = scale q . [ckv_j | kpe_j]; out = sum e^x_j ckv_j / sum e^x_j		512 + 64 elements
 *
 * A thread block has 64 rows - query tokens by heads - and a run of keys, in tiles of 64 (mla_plan.cuh).
 * A tile is brought once, as 9 boxes of 64 columns, and is K and V both. Two tiles fit beside q:
 *
 *	warp 0		has the copy engine bring tiles, a box for each 16, 32 or 64 keys of a block
 *	warps 1 to 3	bring q of the next request
 *	warps 4 to 7	S = Q K^T (36 wgmma), P = e^S, O += P V for columns 0 to 255
 *	warps 8 to 11	O += P V for columns 256 to 511, with the P that the others left in shared memory
 *
 * Products of P with V are issued before those of q with the next keys: V's columns are then free while
 * scores are calculated, and the next tile but one comes in that time. A tile's columns have barriers in
 * three sets: those of the second half of V, of the position, of the first half.
 *
 * Keys past the last are 0 in V, whatever lies there; rows past the last are calculated and not stored.
 * Method: FlashMLA's split of columns over two warpgroups (github.com/deepseek-ai/FlashMLA, 2025-04).
 * Speed: tests/bench/NOTES_mla.md.
 */
#include <climits>
#include <dlfcn.h>

#include "kernels/attention.h"
#include "kernels/device/hopper.cuh"
#include "kernels/device/launch.cuh"
#include "kernels/device/mma.cuh"
#include "kernels/mla_plan.cuh"

#define ROWS	64
#define LATENT	512
#define ROPE	64
#define DIM	(LATENT + ROPE)
#define BOX	(KV_MLA_KEYS * 128) /* bytes of 64 keys, 64 columns */
#define BOXES	9
#define TILE	(BOXES * BOX)
#define STAGES	2
#define THREADS 384
#define SLACK	8.0f /* weights stay below 2^SLACK: only then are sums brought to a new maximum */

#define Q_AT	 0
#define KV_AT	 (BOXES * ROWS * 128)
#define P_AT	 (KV_AT + STAGES * TILE)
#define ALPHA_AT (P_AT + KV_WARPGROUP * 64)
#define SHARED	 (ALPHA_AT + KV_WARPGROUP * 8 + 1024)

enum part { RIGHT, POSITION, LEFT, PARTS };

enum { /* named barriers */
	CLEARED = 1, /* + warpgroup */
};

struct params {
	CUtensorMap map; /* elements, keys of a block, 1, blocks */
	struct kv_mla_params p;
	int run; /* keys of a box: 16, 32 or 64 */
	int runs_bits; /* of a tile: 2^runs_bits */
};

struct board {
	uint64_t full[STAGES][PARTS];
	uint64_t empty[STAGES][PARTS];
	uint64_t q_full;
	uint64_t q_empty;
	uint64_t p_full;
	uint64_t p_empty;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ static uint32_t shared_of(const void *p)
{
	return (uint32_t)__cvta_generic_to_shared(p);
}

/* Boxes of a part: the first, and how many. */
__device__ static constexpr int first_box(int part)
{
	return part == RIGHT ? 4 : part == POSITION ? 8 : 0;
}

__device__ static constexpr int n_boxes(int part)
{
	return part == POSITION ? 1 : 4;
}

/* Warp 0. Where 32 runs of keys lie is found out at once, by a lane each. */
__device__ static void fetch(const struct params &x, uint32_t shared, struct board *board)
{
	const struct kv_mla_params &p = x.p;
	int lane = threadIdx.x % KV_WARP, chunk = blockIdx.y, per_tile = 1 << x.runs_bits;
	struct mla_part s;
	uint32_t n = 0;

	if (!mla_plan(p, blockIdx.x, chunk, s))
		return;
	for (;;) {
		int id = 0, row = 0; /* block, and key in it */

		for (int t = s.t0; t < s.t1; t++, n++) {
			int key = s.first + t * KV_MLA_KEYS;
			int at = ((t - s.t0) << x.runs_bits) % KV_WARP;
			int stage = n % STAGES, turn = n / STAGES % STAGES;
			int runs = min(max((s.hi - key + x.run - 1) >> (6 - x.runs_bits), 0), per_tile);
			uint32_t to = shared + KV_AT + stage * TILE;

			if (at == 0) {
				int k = key + lane * x.run, column = k / p.k.block_tokens;

				row = k - column * p.k.block_tokens;
				id = 0;
				if (k < s.hi)
					id = p.block_table[(int64_t)s.b * p.table_width + column];
			}
#pragma unroll
			for (int part = 0; part < PARTS; part++) {
				uint32_t full = shared_of(&board->full[stage][part]);

				kv_barrier_wait(shared_of(&board->empty[stage][part]), turn ^ 1);
				if (lane == 0)
					kv_barrier_expect(full, (uint32_t)(n_boxes(part) * runs *
									   x.run * 128));
				__syncwarp();
				for (int r = 0; r < runs; r++) {
					int block = __shfl_sync(KV_ALL_LANES, id, at + r);
					int from = __shfl_sync(KV_ALL_LANES, row, at + r);

					if (lane < n_boxes(part)) {
						int box = first_box(part) + lane;

						kv_tma_load(to + box * BOX + r * x.run * 128, &x.map,
							    full, box * 64, from, 0, block);
					}
				}
			}
		}
		if (!s.left)
			return;
		mla_next(p, chunk, s);
	}
}

/* Warps 1 to 3. */
__device__ static void fetch_q(const struct params &x, uint32_t shared, struct board *board)
{
	const struct kv_mla_params &p = x.p;
	int chunk = blockIdx.y;
	uint64_t policy = kv_policy_once();
	struct mla_part s;
	uint32_t n = 0;

	if (!mla_plan(p, blockIdx.x, chunk, s))
		return;
	for (;; n++) {
		kv_barrier_wait(shared_of(&board->q_empty), (n & 1) ^ 1);
		for (int i = threadIdx.x - KV_WARP; i < s.n_rows * (DIM / 8); i += 3 * KV_WARP) {
			int row = i / (DIM / 8), u = i % (DIM / 8), at = s.row0 + row;
			int64_t token = s.start + at / p.n_heads;
			const uint16_t *from = (const uint16_t *)p.q + token * p.q_stride +
					       (int64_t)(at % p.n_heads) * DIM + u * 8;

			kv_copy16(shared + Q_AT + u / 8 * ROWS * 128 + row * 128 +
					  (u % 8 ^ row % 8) * 16,
				  from, policy);
		}
		asm volatile("cp.async.wait_all;" ::: "memory");
		kv_fence_async();
		kv_barrier_arrive(shared_of(&board->q_full));
		if (!s.left)
			return;
		mla_next(p, chunk, s);
	}
}

/* This warp is done with something. */
__device__ static void release(uint32_t barrier)
{
	__syncwarp();
	if (threadIdx.x % KV_WARP == 0)
		kv_barrier_arrive(barrier);
}

/* V's columns of boxes @box.. of keys from @keys on become 0. */
__device__ static void clear_keys(uint32_t tile, int box, int keys, int group)
{
	int n = (KV_MLA_KEYS - keys) * 8;

	for (int i = threadIdx.x % KV_WARPGROUP; i < 4 * n; i += KV_WARPGROUP)
		asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
				     tile + (box + i / n) * BOX + keys * 128 + i % n * 16),
			     "r"(0)
			     : "memory");
	kv_fence_async();
	kv_named_sync(CLEARED + group, KV_WARPGROUP);
}

template <int TYPE>
__device__ static void issue_sums(float (&o)[128], const uint32_t (&w)[16], uint32_t v)
{
	kv_wgmma_fence();
#pragma unroll
	for (int i = 0; i < KV_MLA_KEYS / 16; i++)
		kv_wgmma_sums<TYPE>(o, w + 4 * i, kv_wgmma_operand(v + i * 2048, BOX, 1024));
	kv_wgmma_commit();
}

__device__ static void rescale(float (&o)[128], const float (&alpha)[2])
{
	if (!__any_sync(KV_ALL_LANES, alpha[0] != 1 || alpha[1] != 1))
		return;
#pragma unroll
	for (int i = 0; i < 128; i++)
		o[i] *= alpha[i / 2 % 2];
}

/* Columns @column.. of the rows' sums: to the result, or to a slot. */
__device__ static void store(const struct kv_mla_params &p, const struct mla_part &s, float *slot,
			     int column, const float (&o)[128])
{
	int lane = threadIdx.x % KV_WARP, t = lane % 4;
	int row = threadIdx.x % KV_WARPGROUP / KV_WARP * 16 + lane / 4;

#pragma unroll
	for (int r = 0; r < 2; r++) {
		int at = row + 8 * r, all = s.row0 + at;
		bool real = at < s.n_rows;
		int64_t token = s.start + all / p.n_heads;
		int64_t to = token * p.out_stride + (int64_t)(all % p.n_heads) * LATENT + column;

		if (slot || p.out_dtype == KV_F32) {
			float *f = slot ? slot + at * LATENT + column : (float *)p.out + to;

#pragma unroll
			for (int j = 0; j < 32; j++)
				if (real)
					*(float2 *)(f + 8 * j + 2 * t) = make_float2(
						o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
			continue;
		}
#pragma unroll
		for (int d = 0; d < 256; d += 32) { /* lane t: columns d + 8 t.. */
			uint32_t w[4], y;

#pragma unroll
			for (int j = 0; j < 4; j++) {
				float a = o[(d / 8 + j) * 4 + 2 * r], b = o[(d / 8 + j) * 4 + 2 * r + 1];

				w[j] = p.out_dtype == KV_BF16 ? kv_pack<KV_BF16>(a, b)
							      : kv_pack<KV_F16>(a, b);
			}
			/* 4 x 4 transposed, in two steps of trades */
#pragma unroll
			for (int k = 1; k <= 2; k *= 2) {
#pragma unroll
				for (int j = 0; j < 4; j++) {
					if (j & k)
						continue;
					y = __shfl_xor_sync(KV_ALL_LANES, t & k ? w[j] : w[j | k], k);
					if (t & k)
						w[j] = y;
					else
						w[j | k] = y;
				}
			}
			if (real)
				*(uint4 *)((uint16_t *)p.out + to + d + 8 * t) =
					make_uint4(w[0], w[1], w[2], w[3]);
		}
	}
}

__device__ static float *slot_of(const struct kv_mla_params &p, const struct mla_part &s)
{
	if (s.t0 == 0 && s.t1 == s.n)
		return NULL;
	return mla_slot(p, blockIdx.x, blockIdx.y, s.t0 == 0);
}

template <int TYPE>
__device__ static void issue_scores(float (&c)[32], uint32_t q, uint32_t tile, struct board *board,
				    int stage, int turn)
{
#pragma unroll
	for (int part = 0; part < PARTS; part++) {
		kv_barrier_wait(shared_of(&board->full[stage][part]), turn);
		kv_wgmma_fence();
#pragma unroll
		for (int i = 0; i < n_boxes(part) * 4; i++) {
			int at = (first_box(part) + i / 4) * BOX + i % 4 * 32;

			kv_wgmma_scores<TYPE>(c, kv_wgmma_operand(q + at, 0, 1024),
					      kv_wgmma_operand(tile + at, 0, 1024), part || i);
		}
	}
	kv_wgmma_commit();
}

/* Warps 4 to 7: scores and weights, and the left half of the sums. */
template <int TYPE>
__device__ static void attend(const struct params &x, uint32_t shared, struct board *board)
{
	const struct kv_mla_params &p = x.p;
	int lane = threadIdx.x % KV_WARP, chunk = blockIdx.y, t4 = lane % 4;
	int row = threadIdx.x % KV_WARPGROUP / KV_WARP * 16 + lane / 4;
	uint32_t p_at = shared + P_AT + threadIdx.x % KV_WARPGROUP * 16;
	uint32_t alpha_at = shared + ALPHA_AT + threadIdx.x % KV_WARPGROUP * 8;
	struct mla_part s;
	float o[128], c[32];
	uint32_t n = 0, n_q = 0, n_p = 0, w[16];

	if (!mla_plan(p, blockIdx.x, chunk, s))
		return;
	for (;; n_q++) {
		float m[2], l[2], alpha[2];
		int hi[2], lowest = s.hi;

#pragma unroll
		for (int r = 0; r < 2; r++) {
			int at = min(row + 8 * r, s.n_rows - 1);

			hi[r] = mla_sees(p, s, (s.row0 + at) / p.n_heads);
			m[r] = -INFINITY;
			l[r] = 0;
		}
		lowest = mla_sees(p, s, s.row0 / p.n_heads);
#pragma unroll
		for (int i = 0; i < 128; i++)
			o[i] = 0;
		kv_barrier_wait(shared_of(&board->q_full), n_q & 1);
		issue_scores<TYPE>(c, shared + Q_AT, shared + KV_AT + n % STAGES * TILE, board,
				   n % STAGES, n / STAGES % STAGES);
		kv_wgmma_wait<0>();
		kv_wgmma_hold(c);
		for (int t = s.t0; t < s.t1; t++, n++) {
			int key = s.first + t * KV_MLA_KEYS, stage = n % STAGES;
			uint32_t tile = shared + KV_AT + stage * TILE;

			release(shared_of(&board->empty[stage][POSITION]));
			if (t + 1 == s.t1)
				release(shared_of(&board->q_empty));
			if (key + KV_MLA_KEYS > lowest || key < s.lo) {
#pragma unroll
				for (int i = 0; i < 32; i++) {
					int at = key + i / 4 * 8 + 2 * t4 + i % 2;

					if (at >= hi[i / 2 % 2] || at < s.lo)
						c[i] = -INFINITY;
				}
			}
#pragma unroll
			for (int r = 0; r < 2; r++) {
				float top = m[r], zero, sum = 0;

#pragma unroll
				for (int i = 0; i < 16; i++)
					top = fmaxf(top, c[i / 2 * 4 + 2 * r + i % 2]);
				top = fmaxf(top, __shfl_xor_sync(KV_ALL_LANES, top, 1));
				top = fmaxf(top, __shfl_xor_sync(KV_ALL_LANES, top, 2));
				alpha[r] = 1;
				if ((top - m[r]) * p.scale > SLACK) {
					alpha[r] = kv_exp2((m[r] - top) * p.scale);
					m[r] = top;
				}
				zero = m[r] == -INFINITY ? 0 : m[r] * p.scale;
#pragma unroll
				for (int i = 0; i < 16; i++) {
					float &y = c[i / 2 * 4 + 2 * r + i % 2];

					y = kv_exp2(fmaf(y, p.scale, -zero));
					sum += y;
				}
				l[r] = fmaf(l[r], alpha[r], sum);
			}
#pragma unroll
			for (int i = 0; i < 16; i++)
				w[i] = kv_pack<TYPE>(c[2 * i], c[2 * i + 1]);
			kv_barrier_wait(shared_of(&board->p_empty), (n_p & 1) ^ 1);
#pragma unroll
			for (int i = 0; i < 4; i++)
				asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(
						     p_at + i * KV_WARPGROUP * 16),
					     "r"(w[4 * i]), "r"(w[4 * i + 1]), "r"(w[4 * i + 2]),
					     "r"(w[4 * i + 3])
					     : "memory");
			asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(alpha_at), "f"(alpha[0]),
				     "f"(alpha[1])
				     : "memory");
			release(shared_of(&board->p_full));
			n_p++;
			rescale(o, alpha);
			if (key + KV_MLA_KEYS > s.hi)
				clear_keys(tile, 0, max(s.hi - key, 0), 0);
			issue_sums<TYPE>(o, w, tile);
			if (t + 1 < s.t1) {
				issue_scores<TYPE>(c, shared + Q_AT,
						   shared + KV_AT + (n + 1) % STAGES * TILE, board,
						   (n + 1) % STAGES, (n + 1) / STAGES % STAGES);
				kv_wgmma_wait<1>();
				kv_wgmma_hold(o);
				release(shared_of(&board->empty[stage][LEFT]));
				kv_wgmma_wait<0>();
				kv_wgmma_hold(c);
			} else {
				kv_wgmma_wait<0>();
				kv_wgmma_hold(o);
				release(shared_of(&board->empty[stage][LEFT]));
			}
		}

		float *slot = slot_of(p, s);

#pragma unroll
		for (int r = 0; r < 2; r++) {
			int at = row + 8 * r, all = s.row0 + at;

			l[r] += __shfl_xor_sync(KV_ALL_LANES, l[r], 1);
			l[r] += __shfl_xor_sync(KV_ALL_LANES, l[r], 2);
			alpha[r] = slot ? 1 : l[r] > 0 ? p.v_scale / l[r] : 0;
			if (at >= s.n_rows || t4)
				continue;
			if (slot)
				mla_slot_stats(p, slot)[at] =
					make_float2(l[r] > 0 ? m[r] * p.scale : -INFINITY, l[r]);
			else if (p.lse)
				p.lse[(s.start + all / p.n_heads) * p.lse_stride +
				      all % p.n_heads * p.lse_head_stride] =
					l[r] > 0 ? (m[r] * p.scale + log2f(l[r])) * 0.693147180559945f
						 : -INFINITY;
		}
		kv_barrier_wait(shared_of(&board->p_empty), (n_p & 1) ^ 1);
		asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(alpha_at), "f"(alpha[0]),
			     "f"(alpha[1])
			     : "memory");
		release(shared_of(&board->p_full));
		n_p++;
		rescale(o, alpha);
		store(p, s, slot, 0, o);
		if (!s.left)
			return;
		mla_next(p, chunk, s);
	}
}

/* Warps 8 to 11: the right half of the sums. */
template <int TYPE>
__device__ static void attend_right(const struct params &x, uint32_t shared, struct board *board)
{
	const struct kv_mla_params &p = x.p;
	int chunk = blockIdx.y;
	uint32_t p_at = shared + P_AT + threadIdx.x % KV_WARPGROUP * 16;
	uint32_t alpha_at = shared + ALPHA_AT + threadIdx.x % KV_WARPGROUP * 8;
	struct mla_part s;
	float o[128], alpha[2];
	uint32_t n = 0, n_p = 0, w[16];

	if (!mla_plan(p, blockIdx.x, chunk, s))
		return;
	for (;;) {
#pragma unroll
		for (int i = 0; i < 128; i++)
			o[i] = 0;
		for (int t = s.t0; t <= s.t1; t++, n_p++) {
			int key = s.first + t * KV_MLA_KEYS, stage = n % STAGES;
			uint32_t tile = shared + KV_AT + stage * TILE;

			kv_barrier_wait(shared_of(&board->p_full), n_p & 1);
#pragma unroll
			for (int i = 0; i < 4; i++)
				asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
					     : "=r"(w[4 * i]), "=r"(w[4 * i + 1]), "=r"(w[4 * i + 2]),
					       "=r"(w[4 * i + 3])
					     : "r"(p_at + i * KV_WARPGROUP * 16)
					     : "memory");
			asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
				     : "=f"(alpha[0]), "=f"(alpha[1])
				     : "r"(alpha_at)
				     : "memory");
			release(shared_of(&board->p_empty));
			rescale(o, alpha);
			if (t == s.t1)
				continue; /* it was the last factor */
			if (key + KV_MLA_KEYS > s.hi)
				clear_keys(tile, 4, max(s.hi - key, 0), 1);
			issue_sums<TYPE>(o, w, tile + 4 * BOX);
			kv_wgmma_wait<0>();
			kv_wgmma_hold(o);
			release(shared_of(&board->empty[stage][RIGHT]));
			n++;
		}
		store(p, s, slot_of(p, s), 256, o);
		if (!s.left)
			return;
		mla_next(p, chunk, s);
	}
}
#endif

template <int TYPE>
__global__ void __launch_bounds__(THREADS, 1) attend_latent(const __grid_constant__ struct params x)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
	extern __shared__ char memory[];
	__shared__ struct board board;
	uint32_t shared = (shared_of(memory) + 1023) / 1024 * 1024;
	int group = __shfl_sync(KV_ALL_LANES, threadIdx.x / KV_WARPGROUP, 0);

	if (threadIdx.x == 0) {
		for (int i = 0; i < STAGES; i++) {
			for (int j = 0; j < PARTS; j++) {
				kv_barrier_init(shared_of(&board.full[i][j]), 1);
				kv_barrier_init(shared_of(&board.empty[i][j]), 4);
			}
		}
		kv_barrier_init(shared_of(&board.q_full), 3 * KV_WARP);
		kv_barrier_init(shared_of(&board.q_empty), 4);
		kv_barrier_init(shared_of(&board.p_full), 4);
		kv_barrier_init(shared_of(&board.p_empty), 4);
		kv_barrier_init_fence();
		kv_tma_prefetch_map(&x.map);
	}
	__syncthreads();
	asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
	if (group == 0) {
		kv_registers_fewer<56>();
		if (__shfl_sync(KV_ALL_LANES, threadIdx.x / KV_WARP, 0) == 0)
			fetch(x, shared, &board);
		else
			fetch_q(x, shared, &board);
	} else {
		kv_registers_more<224>();
		if (group == 1)
			attend<TYPE>(x, shared, &board);
		else
			attend_right<TYPE>(x, shared, &board);
	}
#endif
}

typedef CUresult encode_tiled(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
			      const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
			      const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
			      CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver's, which the runtime has loaded; NULL before 12.0. */
static encode_tiled *find_encode(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);

	return library ? (encode_tiled *)dlsym(library, "cuTensorMapEncodeTiled") : NULL;
}

static encode_tiled *encode(void)
{
	static encode_tiled *const found = find_encode();

	return found;
}

static int describe_map(CUtensorMap *map, const struct kv_view *view, int run)
{
	cuuint64_t sizes[] = {DIM, (cuuint64_t)view->block_tokens, 1, INT_MAX};
	cuuint64_t strides[] = {(cuuint64_t)view->token_stride, (cuuint64_t)view->token_stride,
				(cuuint64_t)view->block_stride};
	cuuint32_t box[] = {64, (cuuint32_t)run, 1, 1}, steps[] = {1, 1, 1, 1};
	CUresult e = encode()(map,
			      view->dtype == KV_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
						     : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
			      4, view->base, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
			      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
			      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);

	if (e == CUDA_SUCCESS)
		return 0;
	return kv_error(-EIO, "attention: CUDA error %d describing latents to the copy engine", e);
}

/* Rows of a chunk in the workspace. */
static int rows_of(const struct kv_attention_args *args)
{
	int64_t rows = (int64_t)args->max_query_len * args->n_heads_q;

	return rows < 1 ? 1 : rows < ROWS ? (int)rows : ROWS;
}

static int chunks_of(const struct kv_attention_args *args)
{
	int64_t n = ((int64_t)args->max_query_len * args->n_heads_q + ROWS - 1) / ROWS;

	return n < 1 ? 1 : n > INT_MAX ? INT_MAX : (int)n;
}

extern "C" size_t kv_mla_wgmma_workspace(const struct kv_attention_args *args)
{
	return kv_mla_workspace(args, rows_of(args), chunks_of(args));
}

extern "C" void kv_mla_wgmma_refuse(const struct kv_attention_args *args, struct kv_refusals *refusals)
{
	const struct kv_view *k = &args->k;
	int device = 0, major = 0, minor = 0;
	size_t needed = kv_mla_wgmma_workspace(args);

#ifndef KV_HAVE_SM90A
	kv_refuse(refusals, KV_ATTN_DEVICE, "device: this build has no kernels of sm_90a");
#endif
	if (cudaGetDevice(&device) != cudaSuccess ||
	    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
	    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
		cudaGetLastError();
		kv_refuse(refusals, KV_ATTN_DEVICE, "device: none answers");
	} else if (major != 9 || minor != 0) {
		kv_refuse(refusals, KV_ATTN_CAPABILITY, "device: compute capability %d.%d, 9.0 needed",
			  major, minor);
	}
	if (args->latent_dim && (args->latent_dim != LATENT || args->rope_dim != ROPE))
		kv_refuse(refusals, KV_ATTN_HEAD_DIM, "latent_dim, rope_dim: %d, %d given, it does %d, %d",
			  args->latent_dim, args->rope_dim, LATENT, ROPE);
	if (((uintptr_t)k->base | (uint64_t)k->block_stride | (uint64_t)k->token_stride) % 16 ||
	    k->token_stride >= 1LL << 40 || k->block_stride >= 1LL << 40)
		kv_refuse(refusals, KV_ATTN_ALIGNMENT,
			  "k: base and strides must be multiples of 16 bytes, strides below 2^40");
	if (((uintptr_t)args->q | (uintptr_t)args->out) % 16 ||
	    (args->q_token_stride | args->out_token_stride) % 8)
		kv_refuse(refusals, KV_ATTN_ALIGNMENT,
			  "q, out: tokens must start at multiples of 16 bytes");
	if (args->sm_scale < 0)
		kv_refuse(refusals, KV_ATTN_COMBINATION, "sm_scale: %g given, positive ones are done",
			  (double)args->sm_scale);
	if (chunks_of(args) > 65535)
		kv_refuse(refusals, KV_ATTN_SIZE, "max_query_len: %d given, too large",
			  args->max_query_len);
	if (!encode())
		kv_refuse(refusals, KV_ATTN_DEVICE,
			  "device: its driver is older than 12.0, which is needed");
	if (!args->workspace || args->workspace_bytes < needed)
		kv_refuse(refusals, KV_ATTN_WORKSPACE, "workspace_bytes: %zu given, %zu needed",
			  args->workspace ? args->workspace_bytes : 0, needed);
}

extern "C" int kv_mla_wgmma(const struct kv_attention_args *args)
{
	struct params x = {};
	int n_chunks, r;
	dim3 grid;

	if (!args->max_query_len)
		return 0;
	n_chunks = kv_mla_describe(args, rows_of(args), &x.p);
	x.run = 16;
	while (x.run < KV_MLA_KEYS && args->k.block_tokens % (2 * x.run) == 0)
		x.run *= 2;
	while (x.run << x.runs_bits < KV_MLA_KEYS)
		x.runs_bits++;
	r = describe_map(&x.map, &args->k, x.run);
	if (r < 0)
		return r;
	grid = dim3((unsigned)x.p.groups, (unsigned)n_chunks);
	r = args->k.dtype == KV_BF16
		    ? kv_launch("attention", attend_latent<KV_BF16>, grid, THREADS, SHARED,
				args->stream, x)
		    : kv_launch("attention", attend_latent<KV_F16>, grid, THREADS, SHARED,
				args->stream, x);
	return r < 0 ? r : kv_mla_merge(&x.p, n_chunks, args->stream);
}
