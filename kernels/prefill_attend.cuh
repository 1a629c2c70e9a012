/* SPDX-License-Identifier: Apache-2.0 */
/* attention_prefill.cuh: the other warpgroups attend, 64 rows each. */
#ifndef KV_KERNELS_PREFILL_ATTEND_CUH
#define KV_KERNELS_PREFILL_ATTEND_CUH

#include "kernels/device/mma.cuh"
#include "kernels/prefill_fetch.cuh"
#include "kernels/sink.h"

enum { /* named barriers */
	TURN = 1,	       /* + group: it may issue its products */
	QUERIES = TURN + 3,    /* + group: its rows of q are rewritten */
};

/*
 * A thread's part of 64 rows: rows 16 w + g and + 8 of warp w, lane 4 g + t; columns 2 t and 2 t + 1
 * of each 8.
 */
template <typename S> struct attend_state {
	float s[S::keys / 2]; /* scores, then weights */
	float o[S::dim / 2];
	uint32_t p[S::keys / 4]; /* weights of the tile before, in 16 bits */
	float m[2];		 /* largest score, unscaled */
	float l[2];		 /* sum of weights, of this lane's columns */
	float alpha[2];		 /* what a new maximum makes of old sums */
	float scale[2];		 /* of scores, to units of ln 2 */
	float inner[2];		 /* softcap: of scores, to the argument of tanh */
	int lo[2];		 /* keys that the rows see */
	int hi[2];
};

template <typename S>
__device__ static void issue_scores(const struct kv_prefill_params &p, uint32_t q, uint32_t k,
				    struct attend_state<S> &x)
{
	kv_wgmma_fence();
#pragma unroll
	for (int i = 0; i < S::dim / 16; i++)
		kv_wgmma_scores<S::math>(
			x.s,
			kv_wgmma_operand(q + i / 4 * S::rows * 128 + i % 4 * 32, 0, 1024),
			kv_wgmma_operand(k + i / 4 * p.chunk_bytes + i % 4 * 32, 0, p.group_bytes),
			i != 0);
	kv_wgmma_commit();
}

template <typename S>
__device__ static void issue_sums(const struct kv_prefill_params &p, uint32_t v,
				  struct attend_state<S> &x)
{
	kv_wgmma_fence();
#pragma unroll
	for (int i = 0; i < S::keys / 16; i++)
		kv_wgmma_sums<S::math>(x.o, x.p + 4 * i,
				       kv_wgmma_operand(v + i * 2 * p.group_bytes, p.chunk_bytes,
							p.group_bytes));
	kv_wgmma_commit();
}

/* This warp is done with a stage. */
__device__ static void release(uint32_t barrier)
{
	if (threadIdx.x % KV_WARP == 0)
		kv_barrier_arrive(barrier);
}

template <typename S> __device__ static void cap(struct attend_state<S> &x)
{
#pragma unroll
	for (int i = 0; i < S::keys / 2; i++) /* tanh y = 1 - 2 / (1 + e^2y) */
		x.s[i] = 1 - __fdividef(2, 1 + kv_exp2(x.s[i] * x.inner[i / 2 % 2]));
}

/* Scores of keys that a row doesn't see. */
template <typename S> __device__ static void mask(int key, struct attend_state<S> &x)
{
	int t = threadIdx.x % 4;

#pragma unroll
	for (int r = 0; r < 2; r++) {
		int lo = x.lo[r] - key - 2 * t, hi = x.hi[r] - key - 2 * t;

#pragma unroll
		for (int i = 0; i < S::keys / 4; i++) {
			int column = i / 2 * 8 + i % 2;
			float &s = x.s[i / 2 * 4 + r * 2 + i % 2];

			s = column >= lo && column < hi ? s : -INFINITY;
		}
	}
}

/* Scores to weights; sums so far are worth alpha of what they were. */
template <typename S> __device__ static void soften(struct attend_state<S> &x)
{
#pragma unroll
	for (int r = 0; r < 2; r++) {
		float m = x.m[r], zero, sum = 0;

#pragma unroll
		for (int i = 0; i < S::keys / 4; i++)
			m = fmaxf(m, x.s[i / 2 * 4 + r * 2 + i % 2]);
		m = fmaxf(m, __shfl_xor_sync(KV_ALL_LANES, m, 1));
		m = fmaxf(m, __shfl_xor_sync(KV_ALL_LANES, m, 2));
		zero = m == -INFINITY ? 0 : m * x.scale[r]; /* nothing is seen so far */
		x.alpha[r] = kv_exp2(fmaf(x.m[r], x.scale[r], -zero));
		x.m[r] = m;
#pragma unroll
		for (int i = 0; i < S::keys / 4; i++) {
			float &s = x.s[i / 2 * 4 + r * 2 + i % 2];

			s = kv_exp2(fmaf(s, x.scale[r], -zero));
			sum += s;
		}
		x.l[r] = fmaf(x.l[r], x.alpha[r], sum);
	}
}

template <typename S> __device__ static void pack_weights(struct attend_state<S> &x)
{
#pragma unroll
	for (int i = 0; i < S::keys / 4; i++)
		x.p[i] = kv_pack<S::math>(x.s[2 * i], x.s[2 * i + 1]);
}

template <typename S> __device__ static void rescale(struct attend_state<S> &x)
{
#pragma unroll
	for (int i = 0; i < S::dim / 2; i++)
		x.o[i] *= x.alpha[i / 2 % 2];
}

/*
 * e4m3: this group's rows of q become f16. One of bf16 is scaled by a power of 2 so that its largest
 * element lies near 2^8: f16 then holds its values but for those 2^-22 times as large.
 */
template <typename S>
__device__ static void rewrite_q(const struct kv_prefill_params &p, uint32_t q, float *unit, int group)
{
	int row = threadIdx.x % KV_WARPGROUP / 2, half = threadIdx.x % 2;
	float factor = 1, most = 0;

	if (p.dtype == KV_BF16) {
		int power;
		uint32_t w[4];

#pragma unroll
		for (int pass = 0; pass < 2; pass++) {
#pragma unroll 4
			for (int i = 0; i < S::dim / 16; i++) {
				int u = half * (S::dim / 16) + i;
				uint32_t at = q + u / 8 * S::rows * 128 + row * 128 +
					      (u % 8 ^ row % 8) * 16;

				asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
					     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
					     : "r"(at)
					     : "memory");
#pragma unroll
				for (int j = 0; j < 4; j++) {
					float low = __uint_as_float(w[j] << 16);
					float high = __uint_as_float(w[j] & 0xffff0000);

					if (pass == 0)
						most = fmaxf(most, fmaxf(fabsf(low), fabsf(high)));
					else
						w[j] = kv_pack<KV_F16>(low * factor, high * factor);
				}
				if (pass == 1)
					asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(
							     at),
						     "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
						     : "memory");
			}
			if (pass == 1)
				break;
			most = fmaxf(most, __shfl_xor_sync(KV_ALL_LANES, most, 1));
			power = min(max((int)(__float_as_uint(most) >> 23) - 127 - 8, -118), 118);
			factor = __uint_as_float((uint32_t)(127 - power) << 23);
		}
		factor = __uint_as_float((uint32_t)(127 + power) << 23);
	}
	if (half == 0)
		unit[row] = factor;
	kv_fence_async();
	kv_named_sync(QUERIES + group, KV_WARPGROUP);
}

/* The rows' sums to out: a quad's lanes trade, so that each stores 16 bytes. */
template <typename S>
__device__ static void store(const struct kv_prefill_params &p, const struct item &it, int row,
			     struct attend_state<S> &x)
{
	int t = threadIdx.x % 4;

#pragma unroll
	for (int r = 0; r < 2; r++) {
		int at_row = it.row0 + row + 8 * r;
		int i = token_of(p, at_row), h = at_row - i * p.group;
		int head = it.head * p.group + h;
		uint16_t *out = (uint16_t *)p.out + (it.start + i) * p.out_stride +
				(int64_t)head * p.head_dim_v;
		bool real = i < it.q_len;
		float l = x.l[r], factor, lse;

		l += __shfl_xor_sync(KV_ALL_LANES, l, 1);
		l += __shfl_xor_sync(KV_ALL_LANES, l, 2);
		factor = l == 0 ? 0 : p.v_scale / l;
		if (p.v_scales)
			factor *= p.v_scales[it.head];
		/* m + log2 l in units of ln 2 */
		lse = l == 0 ? -INFINITY
			     : (x.m[r] * x.scale[r] + log2f(l)) * 0.693147180559945f;
		if (p.sinks && real) {
			float sink = p.sinks[head];

			factor *= kv_sink_factor(sink, lse);
			lse = p.lse_with_sink ? kv_sink_lse(sink, lse) : lse;
		}
		if (real && p.lse && t == 0)
			p.lse[(it.start + i) * p.lse_stride + head * p.lse_head_stride] = lse;
#pragma unroll
		for (int d = 0; d < S::dim; d += 32) { /* lane t: columns d + 8 t.. */
			uint32_t w[4], y;

#pragma unroll
			for (int j = 0; j < 4; j++) {
				float a = x.o[(d / 8 + j) * 4 + 2 * r] * factor;
				float b = x.o[(d / 8 + j) * 4 + 2 * r + 1] * factor;

				w[j] = p.dtype == KV_BF16 ? kv_pack<KV_BF16>(a, b)
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
			if (real && d + 8 * t < p.head_dim_v)
				*(uint4 *)(out + d + 8 * t) = make_uint4(w[0], w[1], w[2], w[3]);
		}
	}
}

/*
 * The next tile: products of q with its keys, and of the last tile's weights with V, are under way
 * together; then weights of this one. EDGE: not all rows see all of it.
 */
template <typename S, bool EDGE>
__device__ static __forceinline__ void step(const struct kv_prefill_params &p, uint32_t shared,
					    struct prefill_board<S> *board,
					    uint32_t q, int turn, int next_turn, int tile,
					    struct ring<S::stages> &k, struct ring<S::stages> &v,
					    struct attend_state<S> &x)
{
	kv_barrier_wait(shared_of(&board->k_full[k.at]), k.turn);
	if (S::turns)
		kv_named_sync(turn, 2 * KV_WARPGROUP);
	issue_scores<S>(p, q, shared + S::k_at + k.at * S::tile, x);
	kv_barrier_wait(shared_of(&board->v_full[v.at]), v.turn);
	issue_sums<S>(p, shared + S::v_at + v.at * S::tile, x);
	if (S::turns)
		kv_named_arrive(next_turn, 2 * KV_WARPGROUP);
	kv_wgmma_wait<1>();
	kv_wgmma_hold(x.s);
	release(shared_of(&board->k_empty[k.at]));
	k.next();
	if (S::capped)
		cap<S>(x);
	if (EDGE)
		mask<S>(tile * S::keys, x);
	soften<S>(x);
	kv_wgmma_wait<0>();
	kv_wgmma_hold(x.o);
	release(shared_of(&board->v_empty[v.at]));
	v.next();
	kv_wgmma_hold(x.s);
	pack_weights<S>(x);
	if (__any_sync(KV_ALL_LANES, x.alpha[0] != 1 || x.alpha[1] != 1))
		rescale<S>(x);
}

/*
 * A group's loop. Products with the next keys are under way while weights of the last are
 * calculated, and groups take turns to issue theirs: while one calculates weights, the others' products
 * have the tensor cores.
 */
template <typename S>
__device__ static void attend(const struct kv_prefill_params &p, uint32_t shared,
			      struct prefill_board<S> *board)
{
	int group = threadIdx.x / KV_WARPGROUP - 1, lane = threadIdx.x % KV_WARP;
	int row = group * 64 + threadIdx.x % KV_WARPGROUP / KV_WARP * 16 + lane / 4;
	int turn = TURN + group, next_turn = TURN + (group + 1) % S::groups;
	struct ring<S::stages> k, v;
	struct ring<SLOTS> slot;
	struct attend_state<S> x;
	struct ring<S::q_stages> q_ring;

	if (S::turns && group == S::groups - 1)
		kv_named_arrive(next_turn, 2 * KV_WARPGROUP);
	for (;;) {
		struct item it = next_item<S>(board, slot);
		uint32_t q;
		int tile;

		if (it.b < 0)
			break;
#pragma unroll
		for (int r = 0; r < 2; r++) {
			int at = it.len - it.q_len +
				 min(token_of(p, it.row0 + row + 8 * r), it.q_len - 1);

			x.lo[r] = p.window_left >= 0 ? max(at - p.window_left, p.key_begin)
						     : p.key_begin;
			x.hi[r] = it.causal ? min(at + 1, it.bound) : it.bound;
			x.m[r] = -INFINITY;
			x.l[r] = 0;
			x.scale[r] = p.capped || !p.k_scales ? p.outer
							     : p.outer * p.k_scales[it.head];
			x.inner[r] = p.k_scales ? p.inner * p.k_scales[it.head] : p.inner;
		}
#pragma unroll
		for (int i = 0; i < S::dim / 2; i++)
			x.o[i] = 0;
		if (it.last < it.first) {
			store<S>(p, it, row, x);
			continue;
		}
		q = shared + S::q_at + q_ring.at * S::q_tile + group * 64 * 128;
		kv_barrier_wait(shared_of(&board->q_full[q_ring.at]), q_ring.turn);
		if constexpr (S::wide) {
			rewrite_q<S>(p, q, board->unit + group * 64, group);
#pragma unroll
			for (int r = 0; r < 2; r++) {
				float unit = board->unit[row + 8 * r];

				x.scale[r] *= p.capped ? 1 : unit;
				x.inner[r] *= unit;
			}
		}
		kv_barrier_wait(shared_of(&board->k_full[k.at]), k.turn);
		issue_scores<S>(p, q, shared + S::k_at + k.at * S::tile, x);
		kv_wgmma_wait<0>();
		kv_wgmma_hold(x.s);
		release(shared_of(&board->k_empty[k.at]));
		k.next();
		if (S::capped)
			cap<S>(x);
		mask<S>(it.last * S::keys, x);
		soften<S>(x);
		pack_weights<S>(x);
		tile = it.last - 1;
		/* Tiles that not all rows see whole, at the end and, by the window, at the start. */
		for (; tile >= it.first && (tile + 1) * S::keys > it.all_hi; tile--)
			step<S, true>(p, shared, board, q, turn, next_turn, tile, k, v, x);
		for (; tile >= it.first && tile * S::keys >= it.all_lo; tile--)
			step<S, false>(p, shared, board, q, turn, next_turn, tile, k, v, x);
		for (; tile >= it.first; tile--)
			step<S, true>(p, shared, board, q, turn, next_turn, tile, k, v, x);
		release(shared_of(&board->q_empty[q_ring.at]));
		q_ring.next();
		kv_barrier_wait(shared_of(&board->v_full[v.at]), v.turn);
		issue_sums<S>(p, shared + S::v_at + v.at * S::tile, x);
		kv_wgmma_wait<0>();
		kv_wgmma_hold(x.o);
		release(shared_of(&board->v_empty[v.at]));
		v.next();
		store<S>(p, it, row, x);
	}
	if (S::turns && group == 0)
		kv_named_sync(turn, 2 * KV_WARPGROUP);
}

#endif
