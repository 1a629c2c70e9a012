/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Latent decode by tiles of 64 rows and 64 keys on sm_90a: what dense and sparse calls share.
 *
 *	x_j = scale q . [ckv_j | kpe_j]; out = sum e^x_j ckv_j / sum e^x_j		512 + 64 elements
 *
 * A thread block has 64 rows - query tokens by heads - and a run of keys, in tiles of 64 (mla_plan.cuh).
 * A tile is brought once, as 9 boxes of 64 columns, and is K and V both. Two tiles fit beside q:
 *
 *	warps 0 to 3	bring tiles and q (mla_fetch.cuh)
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
#ifndef KV_KERNELS_MLA_TILE_CUH
#define KV_KERNELS_MLA_TILE_CUH

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

/* How rows come to be tiles. */
enum source {
	BOXES_OF_16, /* of 16 bits, 16 or more tokens of a block at a time, by the copy engine */
	ROWS_OF_16,  /* of 16 bits, each from its own place */
	ROWS_OF_8,   /* e4m3, widened to the type of q */
	PACKED_ROWS, /* "DS" rows, code times scale rounded to the type of q */
};

enum { /* named barriers */
	CLEARED = 1, /* + warpgroup */
};

struct params {
	CUtensorMap map; /* BOXES_OF_16: elements, keys of a block, 1, blocks */
	struct kv_mla_params p;
	int run;       /* keys of a box: 16, 32 or 64 */
	int runs_bits; /* of a tile: 2^runs_bits */
};

struct board {
	uint64_t full[STAGES][PARTS];
	uint64_t empty[STAGES][PARTS];
	uint64_t q_full;
	uint64_t q_empty;
	uint64_t p_full;
	uint64_t p_empty;
	uint64_t valid[STAGES]; /* rows: a bit for each key that there is */
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ static uint32_t shared_of(const void *p)
{
	return (uint32_t)__cvta_generic_to_shared(p);
}

/* What all lanes have: the compiler may keep it in a register of the warp. */
__device__ static uint32_t same(uint32_t x)
{
	return __shfl_sync(KV_ALL_LANES, x, 0);
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
	uint64_t b = kv_wgmma_operand(same(v), BOX, 1024);

	kv_wgmma_fence();
#pragma unroll
	for (int i = 0; i < KV_MLA_KEYS / 16; i++)
		kv_wgmma_sums<TYPE>(o, w + 4 * i, kv_wgmma_further(b, i * 2048));
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
	uint64_t a = kv_wgmma_operand(same(q), 0, 1024);
	uint64_t b = kv_wgmma_operand(same(tile), 0, 1024);

#pragma unroll
	for (int part = 0; part < PARTS; part++) {
		kv_barrier_wait(shared_of(&board->full[stage][part]), turn);
		kv_wgmma_fence();
#pragma unroll
		for (int i = 0; i < n_boxes(part) * 4; i++) {
			int at = (first_box(part) + i / 4) * BOX + i % 4 * 32;

			kv_wgmma_scores<TYPE>(c, kv_wgmma_further(a, at), kv_wgmma_further(b, at),
					      part || i);
		}
	}
	kv_wgmma_commit();
}

/* Scores of keys without a bit in @valid. */
__device__ static void mask_holes(float (&c)[32], uint64_t valid)
{
	int t = threadIdx.x % 4;

	if (valid == ~0ull)
		return;
#pragma unroll
	for (int i = 0; i < 32; i++)
		if (!(valid >> (i / 4 * 8 + 2 * t + i % 2) & 1))
			c[i] = -INFINITY;
}

/* Warps 4 to 7: scores and weights, and the left half of the sums. */
template <int TYPE, enum source SOURCE>
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
			if (SOURCE != BOXES_OF_16 && p.chosen)
				mask_holes(c, board->valid[stage]);
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
			if (SOURCE == BOXES_OF_16 && key + KV_MLA_KEYS > s.hi)
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
template <int TYPE, enum source SOURCE>
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
			if (SOURCE == BOXES_OF_16 && key + KV_MLA_KEYS > s.hi)
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

#include "kernels/mla_fetch.cuh"

template <int TYPE, enum source SOURCE>
__global__ void __launch_bounds__(THREADS, 1) attend_latent(const __grid_constant__ struct params x)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
	extern __shared__ char memory[];
	__shared__ struct board board;
	uint32_t shared = (shared_of(memory) + 1023) / 1024 * 1024;
	int group = __shfl_sync(KV_ALL_LANES, threadIdx.x / KV_WARPGROUP, 0);
	constexpr bool boxes = SOURCE == BOXES_OF_16;
	constexpr int few = boxes ? 56 : SOURCE == ROWS_OF_16 ? 72 : 96; /* registers of warps 0 to 3 */

	if (threadIdx.x == 0) {
		for (int i = 0; i < STAGES; i++) {
			for (int j = 0; j < PARTS; j++) {
				kv_barrier_init(shared_of(&board.full[i][j]),
						boxes ? 1 : KV_WARPGROUP);
				kv_barrier_init(shared_of(&board.empty[i][j]), 4);
			}
		}
		kv_barrier_init(shared_of(&board.q_full), boxes ? 3 * KV_WARP : KV_WARPGROUP);
		kv_barrier_init(shared_of(&board.q_empty), 4);
		kv_barrier_init(shared_of(&board.p_full), 4);
		kv_barrier_init(shared_of(&board.p_empty), 4);
		kv_barrier_init_fence();
		if (boxes)
			kv_tma_prefetch_map(&x.map);
	}
	__syncthreads();
	asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
	if (group == 0) {
		kv_registers_fewer<few>();
		if (!boxes)
			fetch_rows<TYPE, SOURCE>(x, shared, &board);
		else if (__shfl_sync(KV_ALL_LANES, threadIdx.x / KV_WARP, 0) == 0)
			fetch_boxes(x, shared, &board);
		else
			fetch_q(x, shared, &board);
	} else {
		kv_registers_more<(3 * 168 - few) / 2 / 8 * 8>();
		if (group == 1)
			attend<TYPE, SOURCE>(x, shared, &board);
		else
			attend_right<TYPE, SOURCE>(x, shared, &board);
	}
#endif
}

/* Host. */

/* Of rows as SOURCE says, for q of @type. */
template <enum source SOURCE>
static int launch_tiles(const struct params &x, int type, int n_chunks, void *stream)
{
	dim3 grid((unsigned)x.p.groups, (unsigned)n_chunks);

	return type == KV_BF16 ? kv_launch("attention", attend_latent<KV_BF16, SOURCE>, grid, THREADS,
					   SHARED, stream, x)
			       : kv_launch("attention", attend_latent<KV_F16, SOURCE>, grid, THREADS,
					   SHARED, stream, x);
}

#endif
