/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mla_tile.cuh: warps 0 to 3 bring tiles and q.
 *
 * Rows that do not lie together (chosen ones), or that are to be widened, come by cp.async: a warp has 16
 * of a tile's 64 rows, and 512 contiguous bytes of one at a time. Codes land in the last two boxes of the
 * part they belong to and are widened from there to the whole of it. While one part is under way, the one
 * before is made ready; before a wait for room all are.
 */
#ifndef KV_KERNELS_MLA_FETCH_CUH
#define KV_KERNELS_MLA_FETCH_CUH

#include "kernels/mla_tile.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* BOXES_OF_16, warp 0. Where 32 runs of keys lie is found out at once, by a lane each. */
__device__ static void fetch_boxes(const struct params &x, uint32_t shared, struct board *board)
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

/* BOXES_OF_16, warps 1 to 3. */
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

/* A part under way. */
struct coming {
	uint32_t full; /* its barrier; 0: there is none */
	uint32_t tile;
	int box;	 /* the first; of q -1 */
	float2 scales; /* packed: of row lane % 16, of the part's first and second 128 columns */
};

/* 16 bytes; of a row that is not there 0. */
__device__ static void copy16(uint32_t to, const char *from, bool there)
{
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
		     "r"(there ? 16 : 0)
		     : "memory");
}

/* Where the row of key @j begins, from the cache's base on; -1: there is none. */
__device__ static int64_t row_of(const struct kv_mla_params &p, const struct mla_part &s, int j)
{
	int32_t block, row;

	if (j < s.lo || j >= s.hi)
		return -1;
	if (p.chosen) {
		int32_t slot = p.chosen[(int64_t)s.b * p.top_k + j];

		if (slot < 0)
			return -1;
		block = slot / p.k.block_tokens;
		row = slot - block * p.k.block_tokens;
	} else {
		int column = j / p.k.block_tokens;

		row = j - column * p.k.block_tokens;
		block = p.block_table[(int64_t)s.b * p.table_width + column];
	}
	return kv_view_offset(&p.k, block, row, 0);
}

/* A part of this warp's rows; lane i % 16 has the place of row i. */
template <enum source SOURCE>
__device__ static void copy_part(const struct kv_mla_params &p, uint32_t tile, int part, int64_t row)
{
	int lane = threadIdx.x % KV_WARP, row0 = threadIdx.x / KV_WARP * 16;
	const char *base = (const char *)p.k.base;
	bool wide = SOURCE == ROWS_OF_16 || (SOURCE == PACKED_ROWS && part == POSITION);
	/* 16-byte pieces of a row, and where they begin in it */
	int pieces = (part == POSITION ? 8 : 32) / (wide ? 1 : 2);
	int first = SOURCE == PACKED_ROWS && part == POSITION ? LATENT + LATENT / KV_MLA_TILE * 4
							      : first_box(part) * (wide ? 128 : 64);

#pragma unroll
	for (int i = 0; i < 16 * pieces / KV_WARP; i++) {
		int at = i * KV_WARP + lane, r = at / pieces, u = at % pieces;
		int64_t from = __shfl_sync(KV_ALL_LANES, row, r);
		uint32_t to = tile + (row0 + r) * 128;

		if (wide)
			to += (first_box(part) + u / 8) * BOX + (u % 8 ^ r % 8) * 16;
		else if (part == POSITION)
			to += first_box(part) * BOX + (4 + u) * 16;
		else
			to += (first_box(part) + 2 + u / 8) * BOX + u % 8 * 16;
		copy16(to, base + (from < 0 ? 0 : from) + first + u * 16, from >= 0);
	}
}

/* Four codes times @scale, as 16 bits. */
template <int TYPE, enum source SOURCE>
__device__ static void widen4(uint32_t codes, float scale, uint32_t &low, uint32_t &high)
{
	float2 a, b;

	kv_e4m3x4_to_f16(codes, low, high);
	if (TYPE == KV_F16 && SOURCE == ROWS_OF_8)
		return;
	a = __half22float2(*(__half2 *)&low);
	b = __half22float2(*(__half2 *)&high);
	low = kv_pack<TYPE>(a.x * scale, a.y * scale);
	high = kv_pack<TYPE>(b.x * scale, b.y * scale);
}

/* Codes of 16 rows, N pieces a lane, become what products take. Each lane reads what it had copied. */
template <int TYPE, enum source SOURCE, int N>
__device__ static void widen_part(const struct coming &c)
{
	constexpr int pieces = N * KV_WARP / 16; /* of a row */
	int lane = threadIdx.x % KV_WARP, row0 = threadIdx.x / KV_WARP * 16;
	uint32_t x[4 * N];

#pragma unroll
	for (int i = 0; i < N; i++) {
		int at = i * KV_WARP + lane, r = row0 + at / pieces, u = at % pieces;
		uint32_t from = c.tile + r * 128 +
				(pieces == 4 ? c.box * BOX + (4 + u) * 16
					     : (c.box + 2 + u / 8) * BOX + u % 8 * 16);

		asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
			     : "=r"(x[4 * i]), "=r"(x[4 * i + 1]), "=r"(x[4 * i + 2]),
			       "=r"(x[4 * i + 3])
			     : "r"(from)
			     : "memory");
	}
	__syncwarp();
#pragma unroll
	for (int i = 0; i < N; i++) {
		int at = i * KV_WARP + lane, r = at / pieces, u = at % pieces, odd = u / 4 % 2;
		uint32_t to = c.tile + (c.box + u / 4) * BOX + (row0 + r) * 128;
		uint32_t y[8];
		float scale = 1;

		if (SOURCE == PACKED_ROWS) {
			float first = __shfl_sync(KV_ALL_LANES, c.scales.x, r);
			float second = __shfl_sync(KV_ALL_LANES, c.scales.y, r);

			scale = u < 8 ? first : second;
		}
#pragma unroll
		for (int j = 0; j < 4; j++)
			widen4<TYPE, SOURCE>(x[4 * i + j], scale, y[2 * j], y[2 * j + 1]);
		/* Lanes of every second box store the halves the other way round: no bank twice. */
#pragma unroll
		for (int half = 0; half < 2; half++) {
			bool second = half != odd;
			int unit = u % 4 * 2 + second;

			asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(
					     to + (unit ^ r % 8) * 16),
				     "r"(second ? y[4] : y[0]), "r"(second ? y[5] : y[1]),
				     "r"(second ? y[6] : y[2]), "r"(second ? y[7] : y[3])
				     : "memory");
		}
	}
}

/* What was copied is there, and becomes what products take. */
template <int TYPE, enum source SOURCE> __device__ static void finish(struct coming &c)
{
	if (SOURCE == ROWS_OF_8 && c.box == first_box(POSITION))
		widen_part<TYPE, SOURCE, 2>(c);
	else if (SOURCE != ROWS_OF_16 && c.box >= 0 && c.box != first_box(POSITION))
		widen_part<TYPE, SOURCE, 8>(c);
	kv_fence_async();
	kv_barrier_arrive(c.full);
	c.full = 0;
}

/* Until there is room; parts under way are finished before, for they may be what it waits for. */
template <int TYPE, enum source SOURCE>
__device__ static void wait_for_room(uint32_t empty, uint32_t turn, struct coming &c)
{
	if (__all_sync(KV_ALL_LANES, kv_barrier_ready(empty, turn)))
		return;
	if (c.full) {
		kv_copy_wait<0>();
		finish<TYPE, SOURCE>(c);
	}
	kv_barrier_wait(empty, turn);
}

/* @next has been asked for: the one before it can be finished. */
template <int TYPE, enum source SOURCE>
__device__ static void follow(struct coming &c, const struct coming &next)
{
	kv_copy_commit();
	if (c.full) {
		kv_copy_wait<1>();
		finish<TYPE, SOURCE>(c);
	}
	c = next;
}

__device__ static void copy_q(const struct kv_mla_params &p, const struct mla_part &s, uint32_t to)
{
	for (int i = threadIdx.x; i < s.n_rows * (DIM / 8); i += KV_WARPGROUP) {
		int row = i / (DIM / 8), u = i % (DIM / 8), at = s.row0 + row;
		int64_t token = s.start + at / p.n_heads;
		const char *from = (const char *)p.q +
				   (token * p.q_stride + (int64_t)(at % p.n_heads) * DIM + u * 8) * 2;

		copy16(to + u / 8 * ROWS * 128 + row * 128 + (u % 8 ^ row % 8) * 16, from, true);
	}
}

/* Sources but BOXES_OF_16, warps 0 to 3. */
template <int TYPE, enum source SOURCE>
__device__ static void fetch_rows(const struct params &x, uint32_t shared, struct board *board)
{
	const struct kv_mla_params &p = x.p;
	int lane = threadIdx.x % KV_WARP, warp = threadIdx.x / KV_WARP, chunk = blockIdx.y;
	int mine = warp * 16 + lane % 16;
	struct coming c = {};
	struct mla_part s;
	uint32_t n = 0, n_q = 0;

	if (!mla_plan(p, blockIdx.x, chunk, s))
		return;
	for (;; n_q++) {
		int64_t row = row_of(p, s, s.first + s.t0 * KV_MLA_KEYS + mine);

		for (int t = s.t0; t < s.t1; t++, n++) {
			int stage = n % STAGES, turn = n / STAGES % STAGES;
			uint32_t tile = shared + KV_AT + stage * TILE;
			uint32_t there = __ballot_sync(KV_ALL_LANES, row >= 0);
			float4 scales = make_float4(0, 0, 0, 0);
			int64_t next = -1; /* comes while this waits */

			if (t + 1 < s.t1)
				next = row_of(p, s, s.first + (t + 1) * KV_MLA_KEYS + mine);
			if (SOURCE == PACKED_ROWS && row >= 0)
				scales = *(const float4 *)((const char *)p.k.base + row + LATENT);
#pragma unroll
			for (int part = 0; part < PARTS; part++) {
				struct coming to = {shared_of(&board->full[stage][part]), tile,
						    first_box(part),
						    part == LEFT ? make_float2(scales.x, scales.y)
								 : make_float2(scales.z, scales.w)};

				wait_for_room<TYPE, SOURCE>(shared_of(&board->empty[stage][part]),
							    turn ^ 1, c);
				if (part == LEFT && lane == 0)
					((uint16_t *)&board->valid[stage])[warp] = (uint16_t)there;
				copy_part<SOURCE>(p, tile, part, row);
				follow<TYPE, SOURCE>(c, to);
			}
			if (t == s.t0) {
				struct coming to = {shared_of(&board->q_full), 0, -1, {}};

				wait_for_room<TYPE, SOURCE>(shared_of(&board->q_empty),
							    (n_q & 1) ^ 1, c);
				copy_q(p, s, shared + Q_AT);
				follow<TYPE, SOURCE>(c, to);
			}
			row = next;
		}
		if (!s.left)
			break;
		mla_next(p, chunk, s);
	}
	kv_copy_wait<0>();
	finish<TYPE, SOURCE>(c);
}

#endif
#endif
