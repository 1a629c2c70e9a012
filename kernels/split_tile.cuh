/* SPDX-License-Identifier: Apache-2.0 */
/* attention_split.cuh: a warp fetches tiles of K and V, and attends to them. */
#ifndef KV_KERNELS_SPLIT_TILE_CUH
#define KV_KERNELS_SPLIT_TILE_CUH

#include "kernels/device/mma.cuh"
#include "kernels/split_plan.cuh"

/* A warp's tiles of a segment: t0 + first, and every so-manieth after it, of one head of the set. */
struct share {
	int first;
	int step;
	int head_in_set;
};

/*
 * Warps of a head take turns. Fixed: those of all thread blocks of the cluster do, and a tile is the same
 * warp's in each call, by its place in the sequence.
 */
template <typename S>
__device__ static struct share share_of(const struct kv_split_params &p, const struct segment &s)
{
	int warp = threadIdx.x / KV_WARP, per_head = S::warps / p.heads;
	struct share w = {warp % per_head, per_head, warp / per_head};

	if (S::near && p.fixed) {
		w.step = p.near * per_head;
		w.first += (int)(blockIdx.x % p.near) * per_head - s.first / S::tokens % w.step;
		w.first += w.first < 0 ? w.step : 0;
	}
	return w;
}

/* What a warp fetches next. */
struct cursor {
	struct segment s;
	int tile;  /* next tile of the segment; beyond t1: all is fetched */
	int n_ids; /* ids that are still in lanes */
	int id;	   /* lane i: block of run i since the last load */
};

template <typename S>
__device__ static void cursor_skip_empty(const struct kv_split_params &p, struct cursor &c,
					 const struct share &w)
{
	while (c.tile >= c.s.t1 && c.s.left) {
		next_segment<S>(p, c.s);
		c.tile = c.s.t0 + w.first;
		c.n_ids = 0;
	}
}

/* Scales of a run's rows: 16 of K, then 16 of V, a lane each; 0 where no key is. */
__device__ static void fetch_scales(const struct kv_split_params &p, int id, int in_block, int head, int j,
				    const struct segment &s, uint32_t to)
{
	int lane = threadIdx.x % KV_WARP, row = lane % RUN;
	const struct kv_view *view = lane < RUN ? &p.k_rows : &p.v_rows;
	bool there = j + row >= s.lo && j + row < s.hi;
	const char *from = (const char *)view->base +
			   kv_view_offset(view, id, in_block + (there ? row : 0), head);

	asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + lane * 4),
		     "l"(from), "r"(there ? 4 : 0)
		     : "memory");
}

/* K and V of the cursor's tile into a stage at @to; the cursor goes on. */
template <typename S>
__device__ static void fetch(const struct kv_split_params &p, struct cursor &c, const struct share &w,
			     uint32_t to, uint64_t policy)
{
	constexpr int copies = RUN * S::units / KV_WARP; /* a lane's, of a run */
	int lane = threadIdx.x % KV_WARP;
	int token = token_of<S>(c.s, c.tile);
	int head = (c.s.entry / c.s.chunks * p.heads + w.head_in_set) * S::h;

	if (c.tile >= c.s.t1)
		return;
	if (!c.n_ids) { /* of the next 32 / runs tiles */
		int j = token_of<S>(c.s, c.tile + lane / S::runs * w.step) + lane % S::runs * RUN;

		c.id = j < c.s.hi ? p.block_table[(int64_t)c.s.b * p.table_width +
						  j / p.k.block_tokens]
				  : 0;
		c.n_ids = KV_WARP;
	}
#pragma unroll
	for (int r = 0; r < S::runs; r++) {
		int id = __shfl_sync(KV_ALL_LANES, c.id, KV_WARP - c.n_ids + r);
		int j = token + r * RUN;
		int in_block = p.block_mask >= 0 ? j & p.block_mask : j % p.k.block_tokens;
		const char *k = (const char *)p.k.base + kv_view_offset(&p.k, id, in_block, head);
		const char *v = (const char *)p.v.base + kv_view_offset(&p.v, id, in_block, head);
		bool whole = j >= c.s.lo && j + RUN <= c.s.hi;

#pragma unroll
		for (int i = 0; i < copies; i++) {
			int unit = i * KV_WARP + lane;
			int row = unit / S::units, u = unit % S::units;
			uint32_t at = to + (r * RUN + row) * S::row + (u ^ S::turn(row)) * 16;
			int h = u / S::head_units;
			const char *from_k = k + row * (int)p.k.token_stride + h * p.k.head_stride +
					     u % S::head_units * 16;
			const char *from_v = v + row * (int)p.v.token_stride + h * p.v.head_stride +
					     u % S::head_units * 16;

			if (whole) {
				kv_copy16(at, from_k, policy);
				kv_copy16(at + S::tile, from_v, policy);
			} else {
				int n = j + row >= c.s.lo && j + row < c.s.hi ? 16 : 0;

				kv_copy16(at, from_k, n, policy);
				kv_copy16(at + S::tile, from_v, n, policy);
			}
		}
		if (S::scaled && p.k_rows.base)
			fetch_scales(p, id, in_block, head, j, c.s, to + 2 * S::tile + r * RUN * 8);
	}
	c.n_ids -= S::runs;
	c.tile += w.step;
	cursor_skip_empty<S>(p, c, w);
}

/* A warp's queries and sums. Column j of a tile: its query row 2 t + j, lane = 4 g + t. */
template <typename S> struct state {
	uint32_t q[S::columns][S::dim / 16][2]; /* B operands */
	float unit[S::columns][2];		/* e4m3: what 1 in q stands for */
	float m[S::columns][2];
	float l[S::columns][2];		     /* of this lane's keys */
	float o[S::columns][S::dim / 16][4]; /* C operands, O^T */
	float slope[S::any ? S::columns : 1][2]; /* ALiBi, in units of ln 2 */
	int position[S::any ? S::columns : 1][2];
	float v_unit; /* scales of rows: what 1 in a sum stands for, a power of 2 */
};

/* Which query of the request column @n's row @i of this segment is; rows there are not: the last. */
template <typename S>
__device__ static int query_of(const struct kv_split_params &p, const struct segment &s, int n, int i)
{
	int row = (s.entry % s.chunks * S::n + n % S::n) * KV_SPLIT_ROWS + i;

	return min(row / p.group, s.q_len - 1);
}

template <typename S>
__device__ static struct kv_visible visible_row(const struct kv_split_params &p,
						const struct segment &s, int i)
{
	return kv_visible_row(&p.sees, s.b, s.start, i, s.q_len, s.len);
}

/*
 * q of a segment. For e4m3 k-index 2t, 2t + 1, 2t + 8, 2t + 9 of an instruction is element 4t.. of
 * 16, as ldmatrix brings K; scale_q() then makes f16 of it.
 */
template <typename S>
__device__ static void load_q(const struct kv_split_params &p, const struct segment &s,
			      int head_in_set, struct state<S> &x)
{
	int g = threadIdx.x % KV_WARP / 4, t = threadIdx.x % 4;
	int head = (s.entry / s.chunks * p.heads + head_in_set) * S::h;

#pragma unroll
	for (int n = 0; n < S::columns; n++) {
		int row = (s.entry % s.chunks * S::n + n % S::n) * KV_SPLIT_ROWS + g;
		bool real = row < s.q_len * p.group;
		int64_t at = (s.start + row / p.group) * p.q_stride +
			     ((head + n / S::n) * p.group + row % p.group) * S::dim;
		const uint16_t *q = (const uint16_t *)p.q + (real ? at : 0);

		x.unit[n][0] = x.unit[n][1] = S::type == KV_F8_E4M3 && p.k_scales
						      ? p.k_scales[head + n / S::n]
						      : 1;
#pragma unroll
		for (int k = 0; k < S::dim / 16; k++) {
			if (S::type == KV_F8_E4M3) {
				uint2 u = *(const uint2 *)(q + 16 * k + 4 * t);

				x.q[n][k][0] = real ? u.x : 0;
				x.q[n][k][1] = real ? u.y : 0;
			} else {
				x.q[n][k][0] = real ? *(const uint32_t *)(q + 16 * k + 2 * t) : 0;
				x.q[n][k][1] =
					real ? *(const uint32_t *)(q + 16 * k + 2 * t + 8) : 0;
			}
		}
		if constexpr (S::any) {
#pragma unroll
			for (int j = 0; j < 2 && p.slopes; j++) {
				int i = query_of<S>(p, s, n, 2 * t + j);
				int h = ((s.entry % s.chunks * S::n + n % S::n) * KV_SPLIT_ROWS +
					 2 * t + j) %
					p.group;

				x.slope[n][j] = p.slopes[(head + n / S::n) * p.group + h] *
						1.44269504088896f;
				x.position[n][j] = (int)visible_row<S>(p, s, i).position;
			}
		}
	}
}

/*
 * A row of bf16 is scaled by a power of 2 so that its largest element lies near 2^8: f16 then holds
 * its values but for those 2^-22 times as large.
 */
template <typename S>
__device__ static void scale_q(const struct kv_split_params &p, struct state<S> &x)
{
	int t = threadIdx.x % 4;

	if (p.dtype != KV_BF16)
		return;
#pragma unroll
	for (int n = 0; n < S::columns; n++) {
		__nv_bfloat162 most = __floats2bfloat162_rn(0, 0);
		float factor;
		int power;

#pragma unroll
		for (int k = 0; k < S::dim / 8; k++)
			most = __hmax2(most, __habs2(*(__nv_bfloat162 *)&x.q[n][k / 2][k % 2]));
		factor = fmaxf(__low2float(most), __high2float(most));
		factor = fmaxf(factor, __shfl_xor_sync(KV_ALL_LANES, factor, 1));
		factor = fmaxf(factor, __shfl_xor_sync(KV_ALL_LANES, factor, 2));
		power = min(max((int)(__float_as_uint(factor) >> 23) - 127 - 8, -118), 118);
		factor = __uint_as_float((uint32_t)(127 - power) << 23);
#pragma unroll
		for (int k = 0; k < S::dim / 8; k++) {
			uint32_t u = x.q[n][k / 2][k % 2];

			x.q[n][k / 2][k % 2] =
				kv_pack<KV_F16>(__uint_as_float(u << 16) * factor,
						__uint_as_float(u & 0xffff0000) * factor);
		}
		factor = __uint_as_float((uint32_t)(127 + power) << 23);
		x.unit[n][0] *= __shfl_sync(KV_ALL_LANES, factor, 8 * t);
		x.unit[n][1] *= __shfl_sync(KV_ALL_LANES, factor, 8 * t + 4);
	}
}

template <typename S> __device__ static void clear(struct state<S> &x)
{
	x.v_unit = 0;
#pragma unroll
	for (int n = 0; n < S::columns; n++) {
		x.m[n][0] = x.m[n][1] = NONE;
		x.l[n][0] = x.l[n][1] = 0;
#pragma unroll
		for (int d = 0; d < S::dim / 16; d++)
			x.o[n][d][0] = x.o[n][d][1] = x.o[n][d][2] = x.o[n][d][3] = 0;
	}
}

/* score[r][n] = S^T of run r and tile n, K in the stage at @k */
template <typename S>
__device__ static void scores(const struct state<S> &x, uint32_t k,
			      float (&score)[S::runs][S::columns][4])
{
	int lane = threadIdx.x % KV_WARP;

#pragma unroll
	for (int r = 0; r < S::runs; r++) {
		uint32_t row = k + (r * RUN + lane % 16) * S::row;

#pragma unroll
		for (int n = 0; n < S::columns; n++)
			score[r][n][0] = score[r][n][1] = score[r][n][2] = score[r][n][3] = 0;
			/* e goes around the heads so that sums of one do not wait for themselves */
#pragma unroll
		for (int e = 0; e < S::units; e += 2) {
			int h = e / 2 % S::h, u = e / 2 / S::h * 2;
			uint32_t a[4];

			kv_ldmatrix(a, row + ((h * S::head_units + u + lane / 16) ^
					      S::turn(lane % 16)) *
						       16);
			if (S::type == KV_F8_E4M3) {
				uint32_t low[4], high[4];

				kv_e4m3x4_to_f16(a[0], low[0], low[2]);
				kv_e4m3x4_to_f16(a[1], low[1], low[3]);
				kv_e4m3x4_to_f16(a[2], high[0], high[2]);
				kv_e4m3x4_to_f16(a[3], high[1], high[3]);
#pragma unroll
				for (int n = h * S::n; n < (h + 1) * S::n; n++) {
					kv_mma<KV_F16>(score[r][n], low, x.q[n][u]);
					kv_mma<KV_F16>(score[r][n], high, x.q[n][u + 1]);
				}
			} else {
				/* matrices (keys 0-7, 8-15) x (unit u, u + 1) are a0 to a3 */
#pragma unroll
				for (int n = h * S::n; n < (h + 1) * S::n; n++)
					kv_mma<S::type>(score[r][n], a, x.q[n][u / 2]);
			}
		}
	}
}

/* Keys that a row does not see get the score that weighs nothing. @token: first of the tile */
template <typename S>
__device__ static void mask(const struct kv_split_params &p, const struct segment &s, int token,
			    float nothing, float (&score)[S::runs][S::columns][4])
{
	int g = threadIdx.x % KV_WARP / 4, t = threadIdx.x % 4;

#pragma unroll
	for (int n = 0; n < S::columns; n++) {
#pragma unroll
		for (int j = 0; j < 2; j++) {
			int row =
				(s.entry % s.chunks * S::n + n % S::n) * KV_SPLIT_ROWS + 2 * t + j;
			struct kv_span span = row_sees(p, s, row);

#pragma unroll
			for (int r = 0; r < S::runs; r++) {
				int key = token + r * RUN + g;

				if (key < span.lo || key >= span.hi)
					score[r][n][j] = nothing;
				if (key + 8 < span.lo || key + 8 >= span.hi)
					score[r][n][2 + j] = nothing;
			}
		}
	}
}

/* KV_SPLIT_ANY: the same, by kernels/visible.h. */
template <typename S>
__device__ static void mask_any(const struct kv_split_params &p, const struct segment &s, int token,
				float nothing, float (&score)[S::runs][S::columns][4])
{
	const struct kv_range there = {s.lo, s.hi};
	int g = threadIdx.x % KV_WARP / 4, t = threadIdx.x % 4;

#pragma unroll 1
	for (int j = 0; j < 2; j++) {
		uint32_t bits[S::columns];

#pragma unroll
		for (int n = 0; n < S::columns; n++) {
			struct kv_visible row =
				visible_row<S>(p, s, query_of<S>(p, s, n, 2 * t + j));

			bits[n] = kv_visible_bits(&p.sees, &row, token) &
				  kv_range_bits(&there, token);
		}
#pragma unroll
		for (int n = 0; n < S::columns; n++)
#pragma unroll
			for (int r = 0; r < S::runs; r++)
#pragma unroll
				for (int i = 0; i < 4; i++)
					if (i % 2 == j && !(bits[n] >> (r * RUN + i / 2 * 8 + g) & 1))
						score[r][n][i] = nothing;
	}
}

/* KV_SPLIT_ANY: scores in units of ln 2, with what ALiBi adds. */
template <typename S>
__device__ static void lean(const struct kv_split_params &p, const struct segment &s, int token,
			    const struct state<S> &x, float (&score)[S::runs][S::columns][4])
{
	int g = threadIdx.x % KV_WARP / 4;
	struct kv_visible tree = {};

	tree.context = s.len - s.q_len;
	tree.masks = tree.mask =
		p.sees.tree_mask ? p.sees.tree_mask + (int64_t)s.start * p.sees.tree_words : NULL;
#pragma unroll
	for (int r = 0; r < S::runs; r++)
#pragma unroll
		for (int k = 0; k < 2; k++) {
			int j = token + r * RUN + k * 8 + g;
			int at = j < s.hi ? (int)kv_visible_position(&p.sees, &tree, j) : 0;

#pragma unroll
			for (int n = 0; n < S::columns; n++)
#pragma unroll
				for (int i = 0; i < 2; i++)
					score[r][n][2 * k + i] =
						fmaf(score[r][n][2 * k + i], p.outer,
						     x.slope[n][i] * (float)(at - x.position[n][i]));
		}
}

/* Scores to weights; sums come to a new maximum if a weight would pass 2^SLACK. */
template <typename S>
__device__ static void soften(float outer, struct state<S> &x,
			      float (&score)[S::runs][S::columns][4])
{
	float most = 0;

#pragma unroll
	for (int r = 0; r < S::runs; r++)
#pragma unroll
		for (int n = 0; n < S::columns; n++)
#pragma unroll
			for (int i = 0; i < 4; i++)
				most = fmaxf(most, fmaf(score[r][n][i], outer, -x.m[n][i & 1]));

	if (__any_sync(KV_ALL_LANES, most > SLACK)) {
#pragma unroll
		for (int n = 0; n < S::columns; n++) {
#pragma unroll
			for (int j = 0; j < 2; j++) {
				float m = x.m[n][j], factor;

#pragma unroll
				for (int r = 0; r < S::runs; r++)
					m = fmaxf(m, fmaxf(score[r][n][j] * outer,
							   score[r][n][j + 2] * outer));
				m = fmaxf(m, __shfl_xor_sync(KV_ALL_LANES, m, 4));
				m = fmaxf(m, __shfl_xor_sync(KV_ALL_LANES, m, 8));
				m = fmaxf(m, __shfl_xor_sync(KV_ALL_LANES, m, 16));
				/* by this row's scores alone, whatever others have */
				m = m - x.m[n][j] > SLACK ? m : x.m[n][j];
				factor = kv_exp2(x.m[n][j] - m);
				x.m[n][j] = m;
				x.l[n][j] *= factor;
#pragma unroll
				for (int d = 0; d < S::dim / 16; d++) {
					x.o[n][d][j] *= factor;
					x.o[n][d][j + 2] *= factor;
				}
			}
		}
	}
#pragma unroll
	for (int r = 0; r < S::runs; r++)
#pragma unroll
		for (int n = 0; n < S::columns; n++)
#pragma unroll
			for (int i = 0; i < 4; i++) {
				score[r][n][i] =
					kv_exp2(fmaf(score[r][n][i], outer, -x.m[n][i & 1]));
				x.l[n][i & 1] += score[r][n][i];
			}
}

/* Multiplies what belongs to keys by the 16 scales a run at @at. */
template <typename S>
__device__ static void scale_keys(uint32_t at, float factor, float (&x)[S::runs][S::columns][4])
{
	int g = threadIdx.x % KV_WARP / 4;

#pragma unroll
	for (int r = 0; r < S::runs; r++)
#pragma unroll
		for (int k = 0; k < 2; k++) {
			float scale;

			asm volatile("ld.shared.f32 %0, [%1];"
				     : "=f"(scale)
				     : "r"(at + (r * 2 * RUN + k * 8 + g) * 4)
				     : "memory");
#pragma unroll
			for (int n = 0; n < S::columns; n++) {
				x[r][n][2 * k] *= scale * factor;
				x[r][n][2 * k + 1] *= scale * factor;
			}
		}
}

/*
 * Weights of rows that have scales: in f16, so in units of a power of 2 that is no smaller than any scale
 * so far. @at: of V's scales in the stage.
 */
template <typename S>
__device__ static void scale_weights(uint32_t at, struct state<S> &x,
				     float (&weight)[S::runs][S::columns][4])
{
	int lane = threadIdx.x % KV_WARP;
	float most = 0;

#pragma unroll
	for (int r = 0; r < S::runs; r++) {
		float scale;

		asm volatile("ld.shared.f32 %0, [%1];"
			     : "=f"(scale)
			     : "r"(at + (r * 2 * RUN + lane % RUN) * 4)
			     : "memory");
		most = fmaxf(most, fabsf(scale));
	}
	most = __uint_as_float(__reduce_max_sync(KV_ALL_LANES, __float_as_uint(most)));
	if (most > x.v_unit && most < 0x1p126f) {
		float unit = __uint_as_float((__float_as_uint(most) & 0x7f800000) + 0x800000);
		float factor = x.v_unit / unit;

		x.v_unit = unit;
#pragma unroll
		for (int n = 0; n < S::columns; n++)
#pragma unroll
			for (int d = 0; d < S::dim / 16; d++)
#pragma unroll
				for (int i = 0; i < 4; i++)
					x.o[n][d][i] *= factor;
	}
	scale_keys<S>(at, x.v_unit > 0 ? 1 / x.v_unit : 0, weight);
}

/* Sums in units of 1 again. */
template <typename S> __device__ static void unscale_sums(struct state<S> &x)
{
#pragma unroll
	for (int n = 0; n < S::columns; n++)
#pragma unroll
		for (int d = 0; d < S::dim / 16; d++)
#pragma unroll
			for (int i = 0; i < 4; i++)
				x.o[n][d][i] *= x.v_unit;
}

/* O^T += V^T P^T, V in the stage at @v */
template <typename S>
__device__ static void weigh(struct state<S> &x, uint32_t v,
			     const float (&weight)[S::runs][S::columns][4])
{
	constexpr int type = S::type == KV_BF16 ? KV_BF16 : KV_F16;
	int lane = threadIdx.x % KV_WARP;

#pragma unroll
	for (int r = 0; r < S::runs; r++) {
		uint32_t w[S::columns][2];

#pragma unroll
		for (int n = 0; n < S::columns; n++) {
			w[n][0] = kv_transpose(kv_pack<type>(weight[r][n][0], weight[r][n][1]));
			w[n][1] = kv_transpose(kv_pack<type>(weight[r][n][2], weight[r][n][3]));
		}
		if (S::type == KV_F8_E4M3) {
			uint32_t row = v + (r * RUN + lane % 16) * S::row;

#pragma unroll
			for (int e = 0; e < S::units; e += 2) {
				int h = e / S::head_units, u = e % S::head_units;
				uint32_t c[4], a[4], b[4];

				/*
				 * 16 bits of a transposed matrix are elements 2g, 2g + 1 of a key:
				 * bytes 0, 2 belong to one row of V^T, 1, 3 to the next.
				 */
				kv_ldmatrix_trans(c, row + ((e + lane / 16) ^ S::turn(lane % 16)) *
								     16);
#pragma unroll
				for (int i = 0; i < 4; i++)
					c[i] = __byte_perm(c[i], 0, 0x3120);
				kv_e4m3x4_to_f16(c[0], a[0], a[1]);
				kv_e4m3x4_to_f16(c[1], a[2], a[3]);
				kv_e4m3x4_to_f16(c[2], b[0], b[1]);
				kv_e4m3x4_to_f16(c[3], b[2], b[3]);
#pragma unroll
				for (int n = h * S::n; n < (h + 1) * S::n; n++) {
					kv_mma<KV_F16>(x.o[n][u], a, w[n]);
					kv_mma<KV_F16>(x.o[n][u + 1], b, w[n]);
				}
			}
		} else {
			int key = lane % 8 + lane / 16 * 8;
			uint32_t row = v + (r * RUN + key) * S::row;

#pragma unroll
			for (int e = 0; e < S::units; e += 2) {
				int h = e / S::head_units, d = e % S::head_units / 2;
				uint32_t a[4];

				kv_ldmatrix_trans(a,
						  row + ((e + lane / 8 % 2) ^ S::turn(key)) * 16);
#pragma unroll
				for (int n = h * S::n; n < (h + 1) * S::n; n++)
					kv_mma<type>(x.o[n][d], a, w[n]);
			}
		}
	}
}

template <typename S>
__device__ static void attend_tile(const struct kv_split_params &p, const struct segment &s,
				   int token, uint32_t stage, struct state<S> &x)
{
	int chunk = s.entry % s.chunks * S::n * KV_SPLIT_ROWS;
	int last = min(chunk + S::n * KV_SPLIT_ROWS, s.q_len * p.group) - 1;
	float score[S::runs][S::columns][4];
	float outer = p.outer;

	scores<S>(x, stage, score);
	if (S::type == KV_F8_E4M3)
#pragma unroll
		for (int r = 0; r < S::runs; r++)
#pragma unroll
			for (int n = 0; n < S::columns; n++)
#pragma unroll
				for (int i = 0; i < 4; i++)
					score[r][n][i] *= x.unit[n][i & 1];
	if (S::scaled && p.k_rows.base)
		scale_keys<S>(stage + 2 * S::tile, 1, score);
	if (p.capped) /* tanh y = 1 - 2 / (1 + e^2y) */
#pragma unroll
		for (int r = 0; r < S::runs; r++)
#pragma unroll
			for (int n = 0; n < S::columns; n++)
#pragma unroll
				for (int i = 0; i < 4; i++)
					score[r][n][i] =
						1 - __fdividef(2, 1 + kv_exp2(score[r][n][i] *
									      p.inner));
	if constexpr (S::any) {
		if (p.slopes) {
			lean<S>(p, s, token, x, score);
			outer = 1;
		}
		if ((token < s.all_lo || token + S::tokens > min(s.all_hi, s.hi)) &&
		    (token < s.lo || token + S::tokens > s.before_hi))
			mask_any<S>(p, s, token, outer < 0 ? INFINITY : -INFINITY, score);
	} else if (token < s.lo || token + S::tokens > s.hi ||
		   (s.q_len > 1 && (token < row_sees(p, s, last).lo ||
				    token + S::tokens > row_sees(p, s, chunk).hi))) {
		/* Rows of a chunk ascend, and so do the ends of what they see. */
		mask<S>(p, s, token, outer < 0 ? INFINITY : -INFINITY, score);
	}
	soften<S>(outer, x, score);
	if (S::scaled && p.k_rows.base)
		scale_weights<S>(stage + 2 * S::tile + RUN * 4, x, score);
	weigh<S>(x, stage + S::tile, score);
}

#endif
