/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Steps of many lanes: the states stream through shared memory. The mathematics are gdn_step.cuh's.
 *
 * A piece of work is a lane and a key head: the heads that share it, all their rows. A thread block
 * stays on its multiprocessor, takes one piece after the other and has three kinds of warps:
 *
 *	loader     a thread; brings tiles of 32 rows of S by bulk copies, as far ahead as there is
 *	           room: about 190 KiB are on their way at any time
 *	tokens     two teams of 4 warps, a piece in turn: convolution, its state, norms, gates of
 *	           coming pieces
 *	rows       8 warps; a tile to registers, which frees its place; all tokens; the tile to its rows
 *
 * so that what a piece needs before its first sum (rows, inputs, taps: loads that wait for loads)
 * passes while the pieces before it are at work: with
 * that much on its way a load takes microseconds. No two thread blocks have channels of a convolution
 * or rows of a state in common: nothing waits for another thread block.
 *
 * Shapes: dim_k 128; a row of S is 8 lanes', 16 elements each, R rows a lane. f16 or bf16 inputs.
 */
#ifndef KV_KERNELS_GDN_STREAM_CUH
#define KV_KERNELS_GDN_STREAM_CUH

#include "kernels/device/hopper.cuh"
#include "kernels/device/launch.cuh"
#include "kernels/gdn_step.cuh"

#define STREAM_DK      128
#define STREAM_E       16 /* elements of a row, of a lane */
#define STREAM_ROWWARP 8
#define STREAM_TOKWARP 4 /* of each of the teams */
#define STREAM_TEAMS   2
#define STREAM_AHEAD   4 /* pieces in shared memory; a multiple of the teams */
#define STREAM_THREADS (32 * (STREAM_ROWWARP + STREAM_TEAMS * STREAM_TOKWARP + 1))
#define STREAM_STAGES  32 /* at most */
#define STREAM_TOKENS  16 /* of a lane, at most */
#define STREAM_GROUP   8  /* heads of a key head, at most */
#define STREAM_KEEPS   3  /* rows a state after a token may go to */

struct stream_params {
	struct kv_recur a;
	int32_t max_len; /* lanes of more tokens are others' */
	int32_t stages;	 /* tiles in shared memory */
	int32_t tokens;	 /* of a lane in shared memory: at least max_len */
	int32_t pieces;
};

/* What the rows' warps need to know of a piece, beside its tokens' vectors. */
struct stream_piece {
	int64_t start;
	int32_t len; /* 0: nothing is to be done */
	int32_t h0;
	bool fresh, pad;
	int32_t keep[STREAM_TOKENS][STREAM_KEEPS]; /* -1: none */
	float g[STREAM_TOKENS][STREAM_GROUP];
	float beta[STREAM_TOKENS][STREAM_GROUP];
};

/* Then: float vectors[STREAM_AHEAD][tokens][q | k | v], char tiles[stages][]. */
struct stream_shared {
	uint64_t full[STREAM_STAGES], empty[STREAM_STAGES];
	uint64_t known[STREAM_AHEAD], used[STREAM_AHEAD]; /* pieces[] */
	struct stream_piece pieces[STREAM_AHEAD];
};

template <int CONV, int R, int STATE> struct stream {
	static constexpr int N = step_piece<STATE>::n;
	static constexpr int ROWS = 4 * STREAM_ROWWARP * R;
	static constexpr int ROW_BYTES = STREAM_DK * (16 / N);
	static constexpr int TILE = ROWS * ROW_BYTES;
	static constexpr int TAPS = STEP_CONV - 1;

	/* A place in a ring, and how often it came round. */
	struct place {
		int at, phase;

		__device__ void next(int n)
		{
			if (++at == n) {
				at = 0;
				phase ^= 1;
			}
		}

		/* @by pieces further */
		__device__ void skip(int by)
		{
			at += by;
			if (at >= STREAM_AHEAD) {
				at -= STREAM_AHEAD;
				phase ^= 1;
			}
		}
	};

	struct block {
		const struct stream_params &p;
		struct stream_shared &m;
		float *vectors;
		char *tiles;
		int group, width; /* heads of a key head; channels of it and them */
	};

	static __device__ uint32_t at(const void *p)
	{
		return (uint32_t)__cvta_generic_to_shared(p);
	}

	static __device__ bool is_mine(const struct block &w, const struct kv_lane &lane)
	{
		return lane.len > 0 && lane.len <= w.p.max_len;
	}

	static __device__ void load_tiles(const struct block &w)
	{
		const struct kv_recur &a = w.p.a;
		struct place stage = {0, 1}; /* the first round finds all free */

		for (int piece = (int)blockIdx.x; piece < w.p.pieces; piece += (int)gridDim.x) {
			struct kv_lane lane = kv_lane_get(&a.batch, piece / a.heads_k);
			int h0 = piece % a.heads_k * w.group;

			if (!is_mine(w, lane) || lane.pad || lane.fresh)
				continue;
			for (int h = h0; h < h0 + w.group; h++) {
				const char *from = (const char *)a.state.base +
						   kv_state_offset(&a.state, lane.read, h);

				for (int v0 = 0; v0 < a.dim_v; v0 += ROWS, stage.next(w.p.stages)) {
					kv_barrier_wait(at(&w.m.empty[stage.at]),
							(uint32_t)stage.phase);
					bulk_load(w.tiles + stage.at * TILE,
						  from + (int64_t)v0 * ROW_BYTES, TILE,
						  &w.m.full[stage.at]);
				}
			}
		}
	}

	/* Four channels at @from, in elements. */
	static __device__ void load4(float (&to)[4], const void *from, int64_t i, bool bf16)
	{
		uint2 u = *(const uint2 *)((const uint16_t *)from + i);
		uint16_t h[4];

		memcpy(h, &u, sizeof(u));
#pragma unroll
		for (int c = 0; c < 4; c++)
			to[c] = kv_io_load<KV_IO16>(h, c, bf16);
	}

	static __device__ void store4(void *to, const float (&x)[4], bool bf16)
	{
		uint16_t h[4];
		uint2 u;

#pragma unroll
		for (int c = 0; c < 4; c++)
			h[c] = kv_to_16(x[c], bf16);
		memcpy(&u, h, sizeof(u));
		*(uint2 *)to = u;
	}

	/* The input channels at @i (of the piece's), without a convolution: q, k, v as they come. */
	static __device__ void load_input(const struct kv_recur &a, int64_t t, int i, int hk,
					  int h0, bool bf16, float (&x)[4])
	{
		if (i < STREAM_DK)
			load4(x, a.q, t * a.q_stride + hk * STREAM_DK + i, bf16);
		else if (i < 2 * STREAM_DK)
			load4(x, a.k, t * a.k_stride + hk * STREAM_DK + i - STREAM_DK, bf16);
		else
			load4(x, a.v, t * a.v_stride + h0 * a.dim_v + i - 2 * STREAM_DK, bf16);
	}

	/* Over the length of the warp's 128 channels */
	static __device__ void direct(float (&y)[4], bool normalize, float scale)
	{
		float sum = y[0] * y[0] + y[1] * y[1] + y[2] * y[2] + y[3] * y[3];

		for (int step = 1; step < 32; step *= 2)
			sum += __shfl_xor_sync(0xffffffff, sum, step);
		if (normalize)
			scale *= rsqrtf(sum + (float)KV_NORM_EPS);
#pragma unroll
		for (int c = 0; c < 4; c++)
			y[c] *= scale;
	}

	static __device__ void store_taps(const struct kv_recur &a, const float (&taps)[TAPS][4],
					  int32_t row, int channel, bool bf16)
	{
		if (kv_row_is_null(&a.batch, row))
			return;
#pragma unroll
		for (int j = 0; j < TAPS; j++)
			store4((char *)a.conv.base + kv_conv_offset(&a.conv, row, j, channel),
			       taps[j], bf16);
	}

	/* Channels @i.. of the piece, of all its tokens, to @to; what the convolution keeps to rows. */
	static __device__ void run_channels(const struct block &w, const struct kv_lane &lane,
					    int64_t b, int hk, int i, float *to)
	{
		const struct kv_recur &a = w.p.a;
		const bool bf16 = a.dtype == KV_BF16;
		const int h0 = hk * w.group;
		const int channel = i < STREAM_DK     ? hk * STREAM_DK + i
				    : i < 2 * STREAM_DK ? (a.heads_k + hk - 1) * STREAM_DK + i
							: 2 * (a.heads_k - 1) * STREAM_DK +
								  h0 * a.dim_v + i;
		float taps[TAPS][4] = {}, weight[4][STEP_CONV], bias[4] = {};

		if (CONV) {
#pragma unroll
			for (int j = 0; j < TAPS && !lane.fresh; j++)
				load4(taps[j],
				      (const char *)a.conv.base +
					      kv_conv_offset(&a.conv, lane.read, j, channel),
				      0, bf16);
#pragma unroll
			for (int c = 0; c < 4; c++)
				load4(weight[c], a.conv_weight, (channel + c) * STEP_CONV, bf16);
			if (a.conv_bias)
				load4(bias, a.conv_bias, channel, bf16);
		}
		for (int t = 0; t < lane.len; t++) {
			float x[4], y[4];

			if (CONV)
				load4(x, a.q, (lane.start + t) * a.q_stride + channel, bf16);
			else
				load_input(a, lane.start + t, i, hk, h0, bf16, y);
#pragma unroll
			for (int c = 0; c < 4 && CONV; c++) {
				y[c] = bias[c];
#pragma unroll
				for (int j = 0; j < TAPS; j++) {
					y[c] += weight[c][j] * taps[j][c];
					taps[j][c] = j + 1 < TAPS ? taps[j + 1][c] : x[c];
				}
				y[c] += weight[c][TAPS] * x[c];
				if (a.activation == KV_ACTIVATION_SILU)
					y[c] = __fdividef(y[c], 1 + __expf(-y[c]));
				y[c] = kv_io_round<KV_IO16>(y[c], bf16);
			}
			if (i < 2 * STREAM_DK) /* a warp's 128 channels are q, or k */
				direct(y, a.normalize, i < STREAM_DK ? a.scale : 1);
			*(float4 *)&to[t * w.width + i] = make_float4(y[0], y[1], y[2], y[3]);
			if (!CONV)
				continue;
			if (a.batch.table)
				store_taps(a, taps,
					   kv_checkpoint_row(&a.batch, b, lane.computed + t + 1),
					   channel, bf16);
			if (a.batch.step_rows)
				store_taps(a, taps, kv_step_row(&a.batch, b, t), channel, bf16);
		}
		if (CONV)
			store_taps(a, taps, lane.write, channel, bf16);
	}

	static __device__ int32_t live(const struct kv_recur &a, int32_t row)
	{
		return kv_row_is_null(&a.batch, row) ? -1 : row;
	}

	/* Gates of (token, head) number @i of the piece. */
	static __device__ void run_gate(const struct block &w, const struct kv_lane &lane,
					int h0, struct stream_piece &to, int i)
	{
		const struct kv_recur &a = w.p.a;
		const bool bf16 = a.dtype == KV_BF16;
		int t = i / w.group, j = i % w.group, h = h0 + j;
		float x = kv_io_load<KV_IO16>(a.a, (lane.start + t) * a.a_stride + h, bf16) +
			  (a.dt_bias ? a.dt_bias[h] : 0);

		to.g[t][j] = __expf(-__expf(a.a_log[h]) * kv_softplus_f(x));
		to.beta[t][j] = kv_sigmoid(
			kv_io_load<KV_IO16>(a.b, (lane.start + t) * a.b_stride + h, bf16));
	}

	static __device__ void run_tokens(const struct block &w, int team)
	{
		const struct kv_recur &a = w.p.a;
		const int thread = (int)threadIdx.x % (32 * STREAM_TOKWARP);
		struct place buffer = {team, 1};

		for (int piece = (int)(blockIdx.x + team * gridDim.x); piece < w.p.pieces;
		     piece += STREAM_TEAMS * (int)gridDim.x, buffer.skip(STREAM_TEAMS)) {
			const int64_t b = piece / a.heads_k;
			const int hk = piece % a.heads_k;
			struct kv_lane lane = kv_lane_get(&a.batch, b);
			struct stream_piece &to = w.m.pieces[buffer.at];
			float *vectors = w.vectors + buffer.at * w.p.tokens * w.width;
			const bool mine = is_mine(w, lane);

			kv_barrier_wait(at(&w.m.used[buffer.at]), (uint32_t)buffer.phase);
			if (thread == 0) {
				to.start = lane.start;
				to.len = mine ? lane.len : 0;
				to.h0 = hk * w.group;
				to.fresh = lane.fresh;
				to.pad = lane.pad;
			}
			if (mine && !lane.pad) {
				if (thread < lane.len) {
					int32_t *keep = to.keep[thread];

					keep[0] = live(a, kv_checkpoint_row(&a.batch, b,
									    lane.computed + thread +
										    1));
					keep[1] = live(a, kv_step_row(&a.batch, b, thread));
					keep[2] = thread + 1 == lane.len ? live(a, lane.write) : -1;
				}
				for (int i = thread; i < lane.len * w.group;
				     i += 32 * STREAM_TOKWARP)
					run_gate(w, lane, hk * w.group, to, i);
				for (int i = 4 * thread; i < w.width; i += 128 * STREAM_TOKWARP)
					run_channels(w, lane, b, hk, i, vectors);
			}
			kv_barrier_arrive(at(&w.m.known[buffer.at]));
		}
	}

	/* Columns of element e of a lane, from its first; rows of a lane lie 4 apart. */
	static __device__ constexpr int column(int e)
	{
		return e / N * (8 * N) + e % N;
	}

	static __device__ constexpr int offset(int i, int e)
	{
		return i * 4 * ROW_BYTES + column(e) * (16 / N);
	}

	static __device__ void load_vector(float (&to)[STREAM_E], const float *from)
	{
#pragma unroll
		for (int e = 0; e < STREAM_E; e += 4) {
			float4 x = *(const float4 *)&from[column(e)];

			to[e] = x.x, to[e + 1] = x.y, to[e + 2] = x.z, to[e + 3] = x.w;
		}
	}

	/* q and k of a token, a lane's columns, and their product. */
	struct directions {
		float q[STREAM_E], k[STREAM_E], kq;

		__device__ void load(const float *vector, int column0)
		{
			load_vector(q, vector + column0);
			load_vector(k, vector + STREAM_DK + column0);
			kq = 0;
#pragma unroll
			for (int e = 0; e < STREAM_E; e++)
				kq += k[e] * q[e];
			kq = sum8(kq);
		}
	};

	/* A token of a tile: @s becomes the next state, out is stored. */
	static __device__ void next(float (&s)[R][STREAM_E], const struct directions &d,
				    const float *v, float g, float beta, void *out, bool bf16)
	{
		const int lane8 = (int)threadIdx.x % 8;
		float u[R] = {}, o[R] = {}, mine = 0;

#pragma unroll
		for (int i = 0; i < R; i++)
#pragma unroll
			for (int e = 0; e < STREAM_E; e++) {
				u[i] += s[i][e] * d.k[e];
				o[i] += s[i][e] * d.q[e];
			}
#pragma unroll
		for (int i = 0; i < R; i++) {
			u[i] = sum8(u[i]);
			o[i] = sum8(o[i]);
		}
#pragma unroll
		for (int i = 0; i < R; i++) {
			float delta = beta * (v[4 * i] - g * u[i]);

#pragma unroll
			for (int e = 0; e < STREAM_E; e++)
				s[i][e] = g * s[i][e] + delta * d.k[e];
			if (lane8 == i)
				mine = g * o[i] + delta * d.kq;
		}
		if (lane8 < R)
			kv_io_store<KV_IO16>(out, 4 * lane8, bf16, mine);
	}

	static __device__ void store_rows(const float (&s)[R][STREAM_E], char *to)
	{
#pragma unroll
		for (int i = 0; i < R; i++)
#pragma unroll
			for (int e = 0; e < STREAM_E; e += N)
				step_piece<STATE>::store(to + offset(i, e), &s[i][e]);
	}

	/* Where a lane's elements of head h0's first tile go, or NULL. */
	static __device__ char *place_of(const struct kv_recur &a, const struct stream_piece &piece,
					 int32_t row, int from)
	{
		return row < 0 ? NULL
			       : (char *)a.state.base + kv_state_offset(&a.state, row, piece.h0) +
					 from;
	}

	/* A tile in @s over all tokens of a piece that has several; @at: its bytes from head h0's. */
	static __device__ void run_tile(float (&s)[R][STREAM_E], const struct block &w,
					const struct stream_piece &piece, const float *vectors,
					int from, int64_t at, int j, int v0, uint16_t *out)
	{
		const struct kv_recur &a = w.p.a;
		struct directions d;

		for (int t = 0; t < piece.len; t++, out += a.out_stride) {
			d.load(vectors + t * w.width, (int)threadIdx.x % 8 * N);
			next(s, d, vectors + t * w.width + 2 * STREAM_DK + j * a.dim_v + v0,
			     piece.g[t][j], piece.beta[t][j], out, a.dtype == KV_BF16);
			for (int n = 0; n < STREAM_KEEPS; n++) {
				char *to = place_of(a, piece, piece.keep[t][n], from);

				if (to)
					store_rows(s, to + at);
			}
		}
	}

	/* All tiles of a piece. @ONE: it has one token, whose q and k stay in registers. */
	template <bool ONE>
	static __device__ void run_piece(const struct block &w, const struct stream_piece &piece,
					 const float *vectors, struct place &stage)
	{
		const struct kv_recur &a = w.p.a;
		const int lane = (int)threadIdx.x % 32;
		const int row0 = (int)threadIdx.x / 32 * (4 * R) + lane / 8;
		const int from = row0 * ROW_BYTES + lane % 8 * 16;
		const bool fresh = piece.fresh, bf16 = a.dtype == KV_BF16;
		uint16_t *out = (uint16_t *)a.out + piece.start * a.out_stride +
				piece.h0 * a.dim_v + row0;
		const float *v = vectors + 2 * STREAM_DK + row0;
		struct directions d;
		char *to[STREAM_KEEPS];

		if (ONE) {
			d.load(vectors, lane % 8 * N);
#pragma unroll
			for (int n = 0; n < STREAM_KEEPS; n++)
				to[n] = place_of(a, piece, piece.keep[0][n], from);
		}
		for (int j = 0; j < w.group; j++) {
			const float g = piece.g[0][j], beta = piece.beta[0][j];
			int64_t at_s = j * a.state.head_stride;

			for (int v0 = 0; v0 < a.dim_v;
			     v0 += ROWS, at_s += TILE, out += ROWS, v += ROWS) {
				float s[R][STREAM_E] = {};

				if (!fresh) {
					kv_barrier_wait(at(&w.m.full[stage.at]),
							(uint32_t)stage.phase);
#pragma unroll
					for (int i = 0; i < R; i++)
#pragma unroll
						for (int e = 0; e < STREAM_E; e += N)
							step_piece<STATE>::load(
								&s[i][e],
								w.tiles + stage.at * TILE + from +
									offset(i, e));
				}
				if (ONE)
					next(s, d, v, g, beta, out, bf16);
				else
					run_tile(s, w, piece, vectors, from, at_s, j, v0 + row0,
						 out);
				if (!fresh) {
					__syncwarp();
					if (lane == 0)
						kv_barrier_arrive_read(at(&w.m.empty[stage.at]));
					stage.next(w.p.stages);
				}
				if (ONE)
#pragma unroll
					for (int n = 0; n < STREAM_KEEPS; n++)
						if (to[n])
							store_rows(s, to[n] + at_s);
			}
		}
	}

	static __device__ void run_rows(const struct block &w)
	{
		struct place buffer = {0, 0}, stage = {0, 0};

		for (int n = (int)blockIdx.x; n < w.p.pieces;
		     n += (int)gridDim.x, buffer.skip(1)) {
			const struct stream_piece &piece = w.m.pieces[buffer.at];
			const float *vectors = w.vectors + buffer.at * w.p.tokens * w.width;

			kv_barrier_wait(at(&w.m.known[buffer.at]), (uint32_t)buffer.phase);
			if (piece.len && piece.pad)
				clear(w.p.a, piece, w.group);
			else if (piece.len == 1)
				run_piece<true>(w, piece, vectors, stage);
			else if (piece.len)
				run_piece<false>(w, piece, vectors, stage);
			__syncwarp();
			if (threadIdx.x % 32 == 0)
				kv_barrier_arrive_read(at(&w.m.used[buffer.at]));
		}
	}

	/* Rows of out of a lane that is padding. */
	static __device__ void clear(const struct kv_recur &a, const struct stream_piece &piece,
				     int group)
	{
		for (int t = 0; t < piece.len; t++)
			for (int i = (int)threadIdx.x; i < group * a.dim_v;
			     i += 32 * STREAM_ROWWARP)
				((uint16_t *)a.out)[(piece.start + t) * a.out_stride +
						    piece.h0 * a.dim_v + i] = 0;
	}

	static __device__ void run(const struct stream_params &p, char *shared)
	{
		struct stream_shared &m = *(struct stream_shared *)shared;
		const int group = p.a.heads / p.a.heads_k;
		const int width = 2 * STREAM_DK + group * p.a.dim_v;
		float *vectors = (float *)(shared + sizeof(m));
		const struct block w = {p,	 m,
					vectors, (char *)(vectors + STREAM_AHEAD * p.tokens * width),
					group,	 width};
		const int warp = (int)threadIdx.x / 32;

		if (threadIdx.x == 0) {
			for (int i = 0; i < p.stages; i++) {
				kv_barrier_init(at(&m.full[i]), 1);
				kv_barrier_init(at(&m.empty[i]), STREAM_ROWWARP);
			}
			for (int i = 0; i < STREAM_AHEAD; i++) {
				kv_barrier_init(at(&m.known[i]), 32 * STREAM_TOKWARP);
				kv_barrier_init(at(&m.used[i]), STREAM_ROWWARP);
			}
			kv_barrier_init_fence();
		}
		__syncthreads();
		kv_let_grids_start();
		kv_wait_for_grids();
		if (warp < STREAM_ROWWARP)
			run_rows(w);
		else if (warp < STREAM_ROWWARP + STREAM_TEAMS * STREAM_TOKWARP)
			run_tokens(w, (warp - STREAM_ROWWARP) / STREAM_TOKWARP);
		else if (threadIdx.x % 32 == 0)
			load_tiles(w);
	}
};

template <int CONV, int R, int STATE>
__global__ void __launch_bounds__(STREAM_THREADS, 1) stream_kernel(struct stream_params p)
{
	extern __shared__ __align__(128) char shared[];

	stream<CONV, R, STATE>::run(p, shared);
}

#endif
