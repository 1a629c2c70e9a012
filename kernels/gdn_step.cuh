/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The recurrences token by token on a GPU: decode, drafts, and whatever the chunks can't take.
 *
 *	u = S k,  o = S q  (the state as it was);  delta = beta (v - g u), or dt x
 *	S = g S + delta k^T;  out = g o + delta (k q) [+ D x]
 *
 * both sums from one pass, so a state is read once and written once. Everything else is done here
 * too: the convolution with its state, silu, the gates, the norms of q and k.
 *
 * Shapes: S is [dim_v][dim_k], dim_k innermost. A thread block of 4 warps has 16 R rows of S of one
 * head; 8 lanes have a row, R rows a lane, in registers over all tokens; sums over k go by three
 * shuffles. Accumulation is f32.
 *
 * The convolution of q and k is done by every thread block of their key head, its state is written
 *by one. They are a cluster: who writes waits until all have read. That wait begins with the kernel
 *and ends with it, and costs nothing.
 */
#ifndef KV_KERNELS_GDN_STEP_CUH
#define KV_KERNELS_GDN_STEP_CUH

#include "kernels/device/launch.cuh"
#include "kernels/gdn_launch.cuh"
#include "kernels/gdn_step.h"

/* 16 bytes of state a piece: E elements of a row in E / N pieces. */
template <int STATE> struct step_piece;

template <> struct step_piece<KV_F32> {
	static constexpr int n = 4;

	static __device__ void load(float *to, const char *from)
	{
		float4 x = *(const float4 *)from;

		to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
	}

	static __device__ void store(char *to, const float *from)
	{
		__stcs((float4 *)to, make_float4(from[0], from[1], from[2], from[3]));
	}
};

template <> struct step_piece<KV_BF16> {
	static constexpr int n = 8;

	static __device__ void load(float *to, const char *from)
	{
		kv_vector<KV_BF16>::widen(*(const uint4 *)from, to);
	}

	static __device__ void store(char *to, const float *from)
	{
		__nv_bfloat162 h[4];
		uint4 u;

		for (int i = 0; i < 4; i++)
			h[i] = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
		memcpy(&u, h, sizeof(u));
		__stcs((uint4 *)to, u);
	}
};

/* After reads whose values have been used: it orders nothing, so it doesn't wait for anything. */
__device__ static inline void cluster_arrive(void)
{
	asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ static inline void cluster_wait(void)
{
	asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ static inline float sum8(float x)
{
	x += __shfl_xor_sync(0xffffffff, x, 1);
	x += __shfl_xor_sync(0xffffffff, x, 2);
	return x + __shfl_xor_sync(0xffffffff, x, 4);
}

/* What a bulk copy to shared memory tells when it is there. */
__device__ static inline void arrival_init(uint64_t *bar)
{
	asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(
		(uint32_t)__cvta_generic_to_shared(bar)));
	asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ static inline void bulk_load(void *to, const void *from, int bytes, uint64_t *bar)
{
	uint32_t at = (uint32_t)__cvta_generic_to_shared(bar);

	asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
		     : "memory");
	asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
		     "[%0], [%1], %2, [%3];" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
		     "l"(from), "r"(bytes), "r"(at)
		     : "memory");
}

__device__ static inline void arrival_wait(uint64_t *bar, int phase)
{
	asm volatile("{ .reg .pred p;\n"
		     "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
		     "@!p bra again; }" ::"r"((uint32_t)__cvta_generic_to_shared(bar)),
		     "r"(phase)
		     : "memory");
}

/* Four elements, @step bytes apart; @wide: side by side, and aligned to their size. */
template <int IO>
__device__ static inline void load_four(float (&to)[4], const void *from, int64_t step, bool wide,
					bool bf16)
{
	if (!wide) {
#pragma unroll
		for (int i = 0; i < 4; i++)
			to[i] = kv_io_load<IO>((const char *)from + i * step, 0, bf16);
	} else if constexpr (IO == KV_IO32) {
		float4 x = *(const float4 *)from;

		to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
	} else {
		uint2 u = *(const uint2 *)from;
		uint16_t h[4];

		memcpy(h, &u, sizeof(u));
#pragma unroll
		for (int i = 0; i < 4; i++)
			to[i] = kv_io_load<KV_IO16>(h, i, bf16);
	}
}

template <int IO>
__device__ static inline void store_four(void *to, int64_t step, bool wide, bool bf16,
					 const float (&x)[4])
{
	if (!wide) {
#pragma unroll
		for (int i = 0; i < 4; i++)
			kv_io_store<IO>((char *)to + i * step, 0, bf16, x[i]);
	} else if constexpr (IO == KV_IO32) {
		*(float4 *)to = make_float4(x[0], x[1], x[2], x[3]);
	} else {
		uint16_t h[4];
		uint2 u;

#pragma unroll
		for (int i = 0; i < 4; i++)
			h[i] = kv_to_16(x[i], bf16);
		memcpy(&u, h, sizeof(u));
		*(uint2 *)to = u;
	}
}

/* The four weights of a channel, which are aligned to their size. */
template <int IO>
__device__ static inline void channel_weights(const struct kv_recur &a, bool bf16, int c,
					      float (&to)[STEP_CONV])
{
	constexpr int size = IO == KV_IO32 ? 4 : 2;

	load_four<IO>(to, (const char *)a.conv_weight + (int64_t)c * STEP_CONV * size, size, true,
		      bf16);
}

template <int RULE, int CONV, int DK, int WARPS, int R, int STATE, int IO> struct step {
	static constexpr int E = DK / 8;
	static constexpr int N = step_piece<STATE>::n;
	static constexpr int THREADS = 32 * WARPS;
	static constexpr int ROWS = 4 * WARPS * R;	   /* of S, of a thread block */
	static constexpr int BYTES = ROWS * DK * (16 / N); /* of its state */
	static constexpr int SIZE = IO == KV_IO32 ? 4 : 2; /* of an input */
	/* Channels of the convolution a thread block has: q, k, v. Four side by side are a thread's. */
	static constexpr int CHANNELS = 2 * DK + ROWS;
	static constexpr int MINE = (CHANNELS / 4 + THREADS - 1) / THREADS;
	/* q's and k's channels are each those of one warp or a half: it makes their lengths 1. */
	static constexpr bool EARLY = RULE == KV_RULE_DELTA && DK <= 128;
	static constexpr int GATES = THREADS - 32; /* the thread that makes the gates and loads */

	struct shared {
		char state[BYTES];
		float token[2][CHANNELS];	     /* q, k before their norms, v; by parity */
		float taps[STEP_CONV - 1][CHANNELS]; /* what the convolution keeps, oldest first */
		float gates[2][2];		     /* decay, beta or dt; by parity */
		uint64_t arrived;
	};

	/* What of the tokens' tensor is channel @at of this thread block. */
	static __device__ int channel(const struct kv_recur &a, int at, int hk, int h, int v0)
	{
		return at < DK	     ? hk * DK + at
		       : at < 2 * DK ? a.heads_k * DK + hk * DK + at - DK
				     : 2 * a.heads_k * DK + h * a.dim_v + v0 + at - 2 * DK;
	}

	static __device__ void run(const struct step_params &p, struct shared &m)
	{
		const struct kv_recur &a = p.a;
		const int64_t b = blockIdx.z;
		const int hk = (int)blockIdx.y, rank = (int)blockIdx.x;
		const int slices = a.dim_v / ROWS;
		struct kv_lane lane;
		int turn = 0; /* counts tokens, over units: whose buffer is whose */
		int phase = 0;

		kv_wait_for_grids();
		lane = kv_lane_get(&a.batch, b);
		if (lane.len < p.min_len || lane.len > p.max_len)
			return;
		if (lane.pad) {
			clear(p, lane, hk, rank);
			return;
		}
		if (threadIdx.x == GATES)
			arrival_init(&m.arrived);
		/*
		 * Unit 0, whose thread block writes the convolution's q and k, is its last; and the
		 * others have read them when their last one has.
		 */
		for (int unit = p.units - p.blocks + rank; unit >= 0;
		     unit -= p.blocks, phase ^= 1) {
			int h = hk * p.group, v0 = unit;

			for (; v0 >= slices; v0 -= slices) /* few: quicker than to divide */
				h++;
			v0 *= ROWS;
			if (unit < p.units - p.blocks)
				__syncthreads(); /* all have read the state of the one before */
			if (threadIdx.x == GATES && !lane.fresh)
				bulk_load(m.state,
					  (const char *)a.state.base +
						  kv_state_offset(&a.state, lane.read, h) +
						  (int64_t)v0 * DK * (16 / N),
					  BYTES, &m.arrived);
			run_unit(p, m, lane, b, hk, h, v0, unit == rank, unit == 0, phase, turn);
		}
	}

	/* Rows of out of a lane that is padding. */
	static __device__ void clear(const struct step_params &p, const struct kv_lane &lane,
				     int hk, int rank)
	{
		const struct kv_recur &a = p.a;
		int group = a.heads / a.heads_k, slices = a.dim_v / ROWS;

		for (int unit = rank; unit < p.units; unit += p.blocks) {
			int h = hk * group + unit / slices, v0 = unit % slices * ROWS;

			for (int64_t i = 0; i < lane.len && (int)threadIdx.x < ROWS; i++)
				kv_element_store(a.out,
						 (lane.start + i) * a.out_stride + h * a.dim_v +
							 v0 + (int)threadIdx.x,
						 a.dtype, 0);
		}
	}

	/* This lane's first row of the thread block's, others follow by 4; and its first column. */
	static __device__ int row0(void)
	{
		return (int)threadIdx.x / 32 * (4 * R) + (int)threadIdx.x % 32 / 8;
	}

	static __device__ int column0(void)
	{
		return (int)threadIdx.x % 8 * N;
	}

	/* Columns of element e, from column0() */
	static __device__ constexpr int column(int e)
	{
		return e / N * (8 * N) + e % N;
	}

	/* Bytes from the lane's first element to those of its row i from column e. */
	static __device__ constexpr int offset(int i, int e)
	{
		return (i * 4 * DK + column(e)) * (16 / N);
	}

	static __device__ int offset0(void)
	{
		return (row0() * DK + column0()) * (16 / N);
	}

	static __device__ void load_state(float (&s)[R][E], struct shared &m, bool fresh, int phase)
	{
		const char *from = m.state + offset0();

		if (!fresh)
			arrival_wait(&m.arrived, phase);
#pragma unroll
		for (int i = 0; i < R; i++)
#pragma unroll
			for (int e = 0; e < E; e += N) {
				if (!fresh)
					step_piece<STATE>::load(&s[i][e], from + offset(i, e));
				else
#pragma unroll
					for (int n = 0; n < N; n++)
						s[i][e + n] = 0;
			}
	}

	static __device__ void store_state(const float (&s)[R][E], const struct kv_recur &a,
					   int32_t row, int h, int v0)
	{
		char *to = (char *)a.state.base + kv_state_offset(&a.state, row, h) +
			   (int64_t)v0 * DK * (16 / N) + offset0();

#pragma unroll
		for (int i = 0; i < R; i++)
#pragma unroll
			for (int e = 0; e < E; e += N)
				step_piece<STATE>::store(to + offset(i, e), &s[i][e]);
	}

	/* Over the length of the DK channels that the DK / 4 lanes around this one have */
	static __device__ void direct(float (&y)[4], bool normalize, float scale)
	{
		float sum = y[0] * y[0] + y[1] * y[1] + y[2] * y[2] + y[3] * y[3];

#pragma unroll
		for (int step = 1; step < DK / 4; step *= 2)
			sum += __shfl_xor_sync(0xffffffff, sum, step);
		if (normalize)
			scale *= rsqrtf(sum + (float)KV_NORM_EPS);
#pragma unroll
		for (int i = 0; i < 4; i++)
			y[i] *= scale;
	}

	/* @y: inputs of channels @c.., become outputs; @taps move on. */
	static __device__ void convolve(const struct kv_recur &a, bool bf16,
					float (&taps)[STEP_CONV - 1][4],
					const float (&weight)[4][STEP_CONV], const float (&bias)[4],
					float (&y)[4])
	{
#pragma unroll
		for (int i = 0; i < 4; i++) {
			float x = y[i];

			y[i] = bias[i];
#pragma unroll
			for (int j = 0; j < STEP_CONV - 1; j++) {
				y[i] += weight[i][j] * taps[j][i];
				taps[j][i] = j + 2 < STEP_CONV ? taps[j + 1][i] : x;
			}
			y[i] += weight[i][STEP_CONV - 1] * x;
			if (a.activation == KV_ACTIVATION_SILU)
				y[i] = __fdividef(y[i], 1 + __expf(-y[i]));
			y[i] = kv_io_round<IO>(y[i], bf16);
		}
	}

	/*
	 * Token @t to shared memory, convolved, q and k of length 1 if EARLY; @is_first: of the
	 * lane, whose history is in rows.
	 */
	static __device__ void load_token(const struct step_params &p, struct shared &m,
					  const struct kv_lane &lane, bool is_first, int64_t t,
					  int hk, int h, int v0, float *token)
	{
		const struct kv_recur &a = p.a;
		const bool bf16 = a.dtype == KV_BF16;

#pragma unroll
		for (int i = 0; i < MINE; i++) {
			int at = 4 * ((int)threadIdx.x + i * THREADS), c = channel(a, at, hk, h, v0);
			float y[4], taps[STEP_CONV - 1][4] = {}, weight[4][STEP_CONV], bias[4] = {};

			if (at >= CHANNELS)
				continue;
			if (CONV) {
				load_four<IO>(y, (const char *)a.q + (t * a.q_stride + c) * SIZE,
					      SIZE, p.wide, bf16);
#pragma unroll
				for (int j = 0; j < STEP_CONV - 1; j++)
					if (!is_first)
						load_four<KV_IO32>(taps[j], &m.taps[j][at], 4, true,
								   bf16);
					else if (!lane.fresh)
						load_four<IO>(taps[j],
							      (const char *)a.conv.base +
								      kv_conv_offset(&a.conv,
										     lane.read, j,
										     c),
							      a.conv.channel_stride, p.wide, bf16);
#pragma unroll
				for (int j = 0; j < 4; j++)
					channel_weights<IO>(a, bf16, c + j, weight[j]);
				if (a.conv_bias)
					load_four<IO>(bias, (const char *)a.conv_bias + c * SIZE,
						      SIZE, p.wide, bf16);
				convolve(a, bf16, taps, weight, bias, y);
#pragma unroll
				for (int j = 0; j < STEP_CONV - 1; j++)
					store_four<KV_IO32>(&m.taps[j][at], 4, true, bf16, taps[j]);
			} else {
				const void *from = at < DK ? a.q : at < 2 * DK ? a.k : a.v;
				int64_t e = at < DK ? t * a.q_stride + hk * DK + at
					    : at < 2 * DK
						    ? t * a.k_stride + hk * DK + at - DK
						    : t * a.v_stride + h * a.dim_v + v0 + at -
							      2 * DK;

				load_four<IO>(y, (const char *)from + e * SIZE, SIZE, p.wide, bf16);
			}
			if (EARLY && i == 0 && (int)threadIdx.x / 32 * 128 < 2 * DK) {
				/* of a warp that has v's too, they pass through unscaled */
				bool qk = at < 2 * DK;

				direct(y, a.normalize && qk, at < DK ? a.scale : 1);
			}
			store_four<KV_IO32>(&token[at], 4, true, bf16, y);
		}
	}

	/* The decay and beta of a token, or its dt, by one thread. */
	static __device__ void make_gates(const struct kv_recur &a, int64_t t, int h, float (&to)[2])
	{
		const bool bf16 = a.dtype == KV_BF16;
		float x = kv_io_load<IO>(a.a, t * a.a_stride + h, bf16);
		float b = RULE == KV_RULE_DELTA ? kv_io_load<IO>(a.b, t * a.b_stride + h, bf16) : 0;
		float rate = a.a_log[h];

		x = kv_softplus_f(x + (a.dt_bias ? a.dt_bias[h] : 0));
		if (RULE == KV_RULE_SSD)
			x = fminf(fmaxf(x, a.dt_min), a.dt_max);
		to[0] = __expf(-__expf(rate) * x);
		to[1] = RULE == KV_RULE_DELTA ? kv_sigmoid(b) : x;
	}

	static __device__ void run_unit(const struct step_params &p, struct shared &m,
					const struct kv_lane &lane, int64_t b, int hk, int h,
					int v0, bool is_last, bool writes_qk, int phase, int &turn)
	{
		const struct kv_recur &a = p.a;
		const bool bf16 = a.dtype == KV_BF16, ordered = CONV && is_last && p.blocks > 1;
		const float d = RULE == KV_RULE_SSD && a.d ? a.d[h] : 0;
		float s[R][E];

		for (int i = 0; i < lane.len; i++, turn ^= 1) {
			int64_t t = lane.start + i;

			if (threadIdx.x == GATES)
				make_gates(a, t, h, m.gates[turn]);
			load_token(p, m, lane, i == 0, t, hk, h, v0, m.token[turn]);
			if (ordered && i == 0)
				cluster_arrive(); /* the convolution's rows have been read */
			__syncthreads(); /* and the token before last has been read by all */
			if (i == 0)
				load_state(s, m, lane.fresh, phase);
			if (i == 0)
				kv_let_grids_start();
			next(s, a, bf16, t, h, v0, m.gates[turn][0], m.gates[turn][1], d,
			     m.token[turn], m.token[turn] + 2 * DK);
			keep(s, p, m, lane, b, i, hk, h, v0, writes_qk, ordered && i == 0);
		}
	}

	/* One token: @s becomes the next state, out is stored. */
	static __device__ void next(float (&s)[R][E], const struct kv_recur &a, bool bf16,
				    int64_t t, int h, int v0, float g, float beta, float d,
				    const float *qk, const float *vs)
	{
		float q[E], k[E], qq = 0, kk = 0, kq = 0, mine = 0;
		float scale_k = 1, scale_q = EARLY ? 1 : a.scale;
		int lane8 = (int)threadIdx.x % 8;

#pragma unroll
		for (int e = 0; e < E; e += 4) {
			float4 x = *(const float4 *)&qk[column0() + column(e)];
			float4 y = *(const float4 *)&qk[DK + column0() + column(e)];

			q[e] = x.x, q[e + 1] = x.y, q[e + 2] = x.z, q[e + 3] = x.w;
			k[e] = y.x, k[e + 1] = y.y, k[e + 2] = y.z, k[e + 3] = y.w;
		}
#pragma unroll
		for (int e = 0; e < E; e++) {
			qq += q[e] * q[e];
			kk += k[e] * k[e];
			kq += k[e] * q[e];
		}
		if (RULE == KV_RULE_DELTA && !EARLY && a.normalize) {
			scale_q *= rsqrtf(sum8(qq) + (float)KV_NORM_EPS);
			scale_k = rsqrtf(sum8(kk) + (float)KV_NORM_EPS);
		}
		kq = sum8(kq) * scale_q * scale_k;
#pragma unroll
		for (int i = 0; i < R; i++) {
			float u = 0, o = 0, v = vs[row0() + 4 * i], delta;

#pragma unroll
			for (int e = 0; e < E; e++) {
				u += s[i][e] * k[e];
				o += s[i][e] * q[e];
			}
			o = sum8(o) * scale_q;
			if (RULE == KV_RULE_DELTA)
				delta = beta * (v - g * scale_k * sum8(u));
			else
				delta = beta * v;
			o = g * o + delta * kq + d * v;
			delta *= scale_k;
#pragma unroll
			for (int e = 0; e < E; e++)
				s[i][e] = g * s[i][e] + delta * k[e];
			if (lane8 == i)
				mine = o;
		}
		if (lane8 < R)
			kv_io_store<IO>(a.out,
					t * a.out_stride + h * a.dim_v + v0 + row0() + 4 * lane8,
					bf16, mine);
	}

	/* The state after a token to @row. */
	static __device__ void keep_in(const float (&s)[R][E], const struct step_params &p,
				       const struct shared &m, int32_t row, int hk, int h, int v0,
				       bool writes_qk)
	{
		const struct kv_recur &a = p.a;

		if (kv_row_is_null(&a.batch, row))
			return;
		store_state(s, a, row, h, v0);
#pragma unroll
		for (int i = 0; i < MINE && CONV; i++) {
			int at = 4 * ((int)threadIdx.x + i * THREADS); /* whose taps are its own */
			int c = channel(a, at, hk, h, v0);

			if (at >= CHANNELS || (at < 2 * DK && !writes_qk))
				continue;
#pragma unroll
			for (int j = 0; j < STEP_CONV - 1; j++) {
				float taps[4];

				load_four<KV_IO32>(taps, &m.taps[j][at], 4, true, false);
				store_four<IO>((char *)a.conv.base +
						       kv_conv_offset(&a.conv, row, j, c),
					       a.conv.channel_stride, p.wide, a.dtype == KV_BF16,
					       taps);
			}
		}
	}

	/* The state after token @i of the lane, to all rows that keep it. */
	static __device__ void keep(const float (&s)[R][E], const struct step_params &p,
				    const struct shared &m, const struct kv_lane &lane, int64_t b,
				    int i, int hk, int h, int v0, bool writes_qk, bool waits)
	{
		const struct kv_state_batch &t = p.a.batch;

		if (waits)
			cluster_wait();
		if (t.table)
			keep_in(s, p, m, kv_checkpoint_row(&t, b, lane.computed + i + 1), hk, h, v0,
				writes_qk);
		if (t.step_rows)
			keep_in(s, p, m, kv_step_row(&t, b, i), hk, h, v0, writes_qk);
		if (i + 1 == lane.len)
			keep_in(s, p, m, lane.write, hk, h, v0, writes_qk);
	}
};

template <int RULE, int CONV, int DK, int WARPS, int R, int STATE, int IO>
__global__ void __launch_bounds__(32 * WARPS, STEP_MIN_BLOCKS(WARPS, R))
	step_kernel(struct step_params p)
{
	typedef step<RULE, CONV, DK, WARPS, R, STATE, IO> work;
	extern __shared__ __align__(128) char shared[];

	work::run(p, *(typename work::shared *)shared);
}

#define STEP_ROW(rule, conv, dk, warps, r, state, io)                                         \
	{                                                                                     \
		step_kernel<rule, conv, dk, warps, r, state, io>,                             \
			sizeof(step<rule, conv, dk, warps, r, state, io>::shared), 32 * warps \
	}
#define STEP_NONE          \
	{                  \
		NULL, 0, 0 \
	}
/* By rows of S a thread block: 16, 32, 64, 128. */
#define STEP_DIMS(rule, conv, state, io)                                                  \
	{                                                                                 \
		{STEP_ROW(rule, conv, 64, 4, 1, state, io), STEP_NONE,                    \
		 STEP_ROW(rule, conv, 64, 4, 4, state, io), STEP_NONE},                   \
			{STEP_ROW(rule, conv, 128, 4, 1, state, io),                      \
			 STEP_ROW(rule, conv, 128, 4, 2, state, io),                      \
			 STEP_ROW(rule, conv, 128, STEP_W64, 16 / STEP_W64, state, io),   \
			 STEP_ROW(rule, conv, 128, 8, 4, state, io)},                     \
		{                                                                         \
			STEP_ROW(rule, conv, 256, 4, 1, state, io), STEP_NONE, STEP_NONE, \
				STEP_NONE                                                 \
		}                                                                         \
	}
#define STEP_ALL(state, io)                                                                     \
	{                                                                                       \
		STEP_DIMS(KV_RULE_DELTA, 0, state, io), STEP_DIMS(KV_RULE_DELTA, 1, state, io), \
			STEP_DIMS(KV_RULE_SSD, 0, state, io)                                    \
	}

#endif
