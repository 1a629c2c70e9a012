/* SPDX-License-Identifier: Apache-2.0 */
/* attention_split.cuh: sums of warps and of thread blocks together, to the result. */
#ifndef KV_KERNELS_SPLIT_MERGE_CUH
#define KV_KERNELS_SPLIT_MERGE_CUH

#include "kernels/sink.h"
#include "kernels/split_tile.cuh"

/* Sums of some of a row's keys, at 4 elements. */
struct sums {
	float m;
	float l;
	float4 o;
};

/* a += N others; those past the end have m NONE and l 0 */
template <int N>
__device__ static void add(struct sums &a, const float2 (&ml)[N], const float4 (&o)[N])
{
	float m = a.m, f;

#pragma unroll
	for (int i = 0; i < N; i++)
		m = fmaxf(m, ml[i].x);
	f = kv_exp2(a.m - m);
	a.m = m;
	a.l *= f;
	a.o.x *= f;
	a.o.y *= f;
	a.o.z *= f;
	a.o.w *= f;
#pragma unroll
	for (int i = 0; i < N; i++) {
		f = kv_exp2(ml[i].x - m);
		a.l = fmaf(f, ml[i].y, a.l);
		a.o.x = fmaf(f, o[i].x, a.o.x);
		a.o.y = fmaf(f, o[i].y, a.o.y);
		a.o.z = fmaf(f, o[i].z, a.o.z);
		a.o.w = fmaf(f, o[i].w, a.o.w);
	}
}

/* Elements d to d + 3 of a row's result; @row: of the request and head */
template <typename S>
__device__ static void store_result(const struct kv_split_params &p, const struct segment &s,
				    int head, int row, int d, const struct sums &x)
{
	float scale = p.v_scales ? p.v_scales[head] : p.v.scale;
	float factor = x.l == 0 ? 0 : scale / x.l, lse = 0;
	int head_q = head * p.group + row % p.group;
	int64_t token = s.start + row / p.group, at = token * p.out_stride + head_q * S::dim + d;
	uint2 u;

	if (p.sinks || (p.lse && d == 0)) /* m + log2 l in units of ln 2 */
		lse = x.l == 0 ? -INFINITY : (x.m + log2f(x.l)) * 0.693147180559945f;
	if (p.sinks) {
		float sink = p.sinks[head_q];

		factor *= kv_sink_factor(sink, lse);
		lse = p.lse_with_sink ? kv_sink_lse(sink, lse) : lse;
	}
	if (p.lse && d == 0)
		p.lse[token * p.lse_stride + head_q * p.lse_head_stride] = lse;
	if (p.out_dtype == KV_F32) {
		*(float4 *)((float *)p.out + at) = make_float4(
			x.o.x * factor, x.o.y * factor, x.o.z * factor, x.o.w * factor);
		return;
	}
	if (p.out_dtype == KV_BF16)
		u = make_uint2(kv_pack<KV_BF16>(x.o.x * factor, x.o.y * factor),
			       kv_pack<KV_BF16>(x.o.z * factor, x.o.w * factor));
	else
		u = make_uint2(kv_pack<KV_F16>(x.o.x * factor, x.o.y * factor),
			       kv_pack<KV_F16>(x.o.z * factor, x.o.w * factor));
	*(uint2 *)((uint16_t *)p.out + at) = u;
}

/* A slot of the workspace: [heads][rows][D] sums, then m and l: [level][heads][rows][2]. */
template <typename S> __device__ static float *slot_of(const struct kv_split_params &p, int slot)
{
	constexpr int rows = S::n * KV_SPLIT_ROWS;

	return p.sums + (int64_t)slot * p.heads * S::h * rows * (S::dim + 4);
}

/*
 * Sums of parts 0, step, 2 step, ... below @n of an entry, in that order, to the result, or to the
 * slot of the first of them. Part 0 is in slot @slot0, part i in 2 (part + i).
 */
template <typename S>
__device__ static void merge(const struct kv_split_params &p, const struct segment &s, int part,
			     int slot0, int n, int step, bool last)
{
	constexpr int rows = S::n * KV_SPLIT_ROWS, quads = S::dim / 4;
	constexpr int side = S::threads == 128 ? 2 : 1; /* results of a thread side by side */
	int n_heads = p.heads * S::h, count = n_heads * rows * quads;
	int head0 = s.entry / s.chunks * n_heads, row0 = s.entry % s.chunks * rows;
	int n_rows = min(rows, s.q_len * p.group - row0);

	for (int i0 = threadIdx.x; i0 < count; i0 += side * S::threads) {
		struct sums x[side];

#pragma unroll
		for (int e = 0; e < side; e++)
			x[e] = {NONE, 0, make_float4(0, 0, 0, 0)};
		for (int j0 = 0; j0 < n; j0 += LOADS * step) {
			float4 o[side][LOADS];
			float2 ml[side][LOADS];

#pragma unroll
			for (int e = 0; e < side; e++) {
				int i = i0 + e * S::threads, at = i / quads;
				bool real = i < count && at % rows < n_rows;

#pragma unroll
				for (int j = 0; j < LOADS; j++) {
					int k = j0 + j * step;
					const float *slot =
						slot_of<S>(p, k ? 2 * (part + k) : slot0);

					ml[e][j] = make_float2(NONE, 0);
					o[e][j] = make_float4(0, 0, 0, 0);
					if (!real || k >= n)
						continue;
					o[e][j] = __ldcg((const float4 *)slot + i);
					ml[e][j] = __ldcg(
						(const float2 *)(slot + n_heads * rows * S::dim) +
						(step > 1) * n_heads * rows + at);
				}
			}
#pragma unroll
			for (int e = 0; e < side; e++)
				add(x[e], ml[e], o[e]);
		}
#pragma unroll
		for (int e = 0; e < side; e++) {
			int i = i0 + e * S::threads, at = i / quads, d = i % quads * 4;
			float *slot = slot_of<S>(p, slot0);

			if (i >= count || at % rows >= n_rows)
				continue;
			if (last) {
				store_result<S>(p, s, head0 + at / rows, row0 + at % rows, d, x[e]);
				continue;
			}
			*((float4 *)slot + i) = x[e].o;
			if (d == 0)
				*((float2 *)(slot + n_heads * rows * S::dim) + n_heads * rows +
				  at) = make_float2(x[e].m, x[e].l);
		}
	}
}

/* Adds this thread block to @counter; true for the last of @n, which also sets it back to 0. */
__device__ static bool arrive(uint32_t *counter, int n)
{
	__shared__ bool is_last;

	__syncthreads(); /* all of this thread block's sums are stored */
	if (threadIdx.x == 0) {
		uint32_t before;

		/* Pairs with that of the other thread blocks: the last sees the sums of all. */
		asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
			     : "=r"(before)
			     : "l"(counter)
			     : "memory");
		is_last = before == (uint32_t)n - 1;
		if (is_last)
			*counter = 0;
	}
	__syncthreads();
	return is_last;
}

/* This thread block's sums of an entry that others share are stored: merge if it is the last. */
template <typename S>
__device__ static void share(const struct kv_split_params &p, const struct cut &c,
			     const struct segment &s)
{
	int part, n, slot0;

	if (c.per_entry) {
		part = blockIdx.x / c.per_entry * c.per_entry;
		n = c.per_entry;
		slot0 = 2 * part;
	} else {
		int entry = s.at - s.t0;

		part = part_of(c, entry);
		n = part_of(c, entry + s.n - 1) - part + 1;
		slot0 = 2 * part + (part_start(c, part) != entry);
	}

	int mine = (int)blockIdx.x - part, first = mine / KV_SPLIT_MERGE * KV_SPLIT_MERGE;

	if (n > KV_SPLIT_MERGE) {
		/* The last group may start where another entry does: it has its own counters. */
		if (!arrive(p.counters + (first ? 2 * gridDim.x : 0) + part + first,
			    min(n - first, KV_SPLIT_MERGE)))
			return;
		merge<S>(p, s, part + first, first ? 2 * (part + first) : slot0,
			 min(n - first, KV_SPLIT_MERGE), 1, false);
		if (arrive(p.counters + gridDim.x + part,
			   (n + KV_SPLIT_MERGE - 1) / KV_SPLIT_MERGE))
			merge<S>(p, s, part, slot0, n, KV_SPLIT_MERGE, true);
		return;
	}
	if (arrive(p.counters + part, n))
		merge<S>(p, s, part, slot0, n, 1, true);
}

/* 8 or 16 bytes at @at of the shared memory of thread block @rank of the cluster; before sm_90 there are none. */
__device__ static float2 load_near2(uint32_t at, int rank)
{
#if __CUDA_ARCH__ >= 900
	float2 x;

	asm volatile("{ .reg .b32 a; mapa.shared::cluster.u32 a, %2, %3;\n"
		     "ld.shared::cluster.v2.f32 {%0, %1}, [a]; }"
		     : "=f"(x.x), "=f"(x.y)
		     : "r"(at), "r"(rank)
		     : "memory");
	return x;
#else
	return {};
#endif
}

__device__ static float4 load_near4(uint32_t at, int rank)
{
#if __CUDA_ARCH__ >= 900
	float4 x;

	asm volatile("{ .reg .b32 a; mapa.shared::cluster.u32 a, %4, %5;\n"
		     "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [a]; }"
		     : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
		     : "r"(at), "r"(rank)
		     : "memory");
	return x;
#else
	return {};
#endif
}

/*
 * Sums of the thread blocks of a cluster, in the order of the keys, each of which lie at @mine in
 * their shared memory: a thread block brings every so-manieth 4 elements together.
 */
template <typename S>
__device__ static void merge_near(const struct kv_split_params &p, const struct segment &s,
				  const float *mine)
{
	constexpr int rows = S::n * KV_SPLIT_ROWS, quads = S::dim / 4;
	int row0 = s.entry % s.chunks * rows, n_rows = min(rows, s.q_len * p.group - row0);
	int count = n_rows * quads, rank = blockIdx.x % p.near;
	uint32_t from = (uint32_t)__cvta_generic_to_shared(mine);

	kv_cluster_sync(); /* all sums are there */
	for (int i = threadIdx.x * p.near + rank; i < count; i += S::threads * p.near) {
		struct sums y = {NONE, 0, make_float4(0, 0, 0, 0)};

		for (int j0 = 0; j0 < p.near; j0 += LOADS) {
			float2 ml[LOADS];
			float4 o[LOADS];

#pragma unroll
			for (int j = 0; j < LOADS; j++) {
				ml[j] = make_float2(NONE, 0);
				o[j] = make_float4(0, 0, 0, 0);
				if (j0 + j >= p.near)
					continue;
				o[j] = load_near4(from + i * 16, j0 + j);
				ml[j] = load_near2(from + rows * S::dim * 4 + i / quads * 8, j0 + j);
			}
			add(y, ml, o);
		}
		store_result<S>(p, s, s.entry / s.chunks, row0 + i / quads, i % quads * 4, y);
	}
	kv_cluster_sync(); /* no thread block ends while others read of it */
}

/* Sums of the warps of a head together: to the result, or to the workspace. */
template <typename S>
__device__ static void finish(const struct kv_split_params &p, const struct cut &c,
			      const struct segment &s, float *ring, float *scratch,
			      struct state<S> &x)
{
	constexpr int rows = S::n * KV_SPLIT_ROWS, quads = S::dim / 4;
	int g = threadIdx.x % KV_WARP / 4, t = threadIdx.x % 4, warp = threadIdx.x / KV_WARP;
	int per_head = S::warps / p.heads;
	int row0 = s.entry % s.chunks * rows;
	bool near = S::near && c.near;
	bool whole = s.t1 - s.t0 == s.n && !near;
	float *mine = scratch + warp * S::sums;
	float *totals = scratch + S::warps * S::sums; /* [warp][row] m, l */

#pragma unroll
	for (int n = 0; n < S::columns; n++) {
		__syncthreads();
#pragma unroll
		for (int j = 0; j < 2; j++) {
			float l = x.l[n][j];

			l += __shfl_xor_sync(KV_ALL_LANES, l, 4);
			l += __shfl_xor_sync(KV_ALL_LANES, l, 8);
			l += __shfl_xor_sync(KV_ALL_LANES, l, 16);
			if (g == 0)
				*(float2 *)(totals + (warp * KV_SPLIT_ROWS + 2 * t + j) * 2) =
					make_float2(x.m[n][j], l);
#pragma unroll
			for (int d = 0; d < S::dim / 16; d++) {
				/* element e of row r lies at e ^ 8 (r / 2): lanes meet no bank
				 * twice */
				float *to = mine + (2 * t + j) * S::sum_row;

				if (S::type == KV_F8_E4M3) {
					*(float2 *)(to + ((d * 16 + 2 * g) ^ 8 * t)) =
						make_float2(x.o[n][d][j], x.o[n][d][j + 2]);
				} else {
					to[(d * 16 + g) ^ 8 * t] = x.o[n][d][j];
					to[(d * 16 + g + 8) ^ 8 * t] = x.o[n][d][j + 2];
				}
			}
		}
		__syncthreads();
		for (int i = threadIdx.x; i < p.heads * KV_SPLIT_ROWS * quads; i += S::threads) {
			int d = i % quads * 4, r = i / quads % KV_SPLIT_ROWS;
			int set = i / quads / KV_SPLIT_ROWS, head = set * S::h + n / S::n;
			int row = n % S::n * KV_SPLIT_ROWS + r;
			struct sums y = {NONE, 0, make_float4(0, 0, 0, 0)};
			float2 ml[S::warps];
			float4 o[S::warps];

			if (row0 + row >= s.q_len * p.group)
				continue;
#pragma unroll
			for (int k = 0; k < S::warps; k++) {
				int w = set * per_head + k;

				ml[k] = make_float2(NONE, 0);
				o[k] = make_float4(0, 0, 0, 0);
				if (k >= per_head)
					continue;
				ml[k] = *(float2 *)(totals + (w * KV_SPLIT_ROWS + r) * 2);
				o[k] = *(float4 *)(scratch + w * S::sums + r * S::sum_row +
						   (d ^ 8 * (r / 2)));
			}
			add(y, ml, o);
			if (whole) {
				store_result<S>(p, s, s.entry / s.chunks * p.heads * S::h + head,
						row0 + row, d, y);
				continue;
			}

			int at = head * rows + row;
			/* What was fetched is used up. */
			float *slot = near ? ring : slot_of<S>(p, 2 * blockIdx.x + s.later);

			*(float4 *)(slot + at * S::dim + d) = y.o;
			if (d == 0)
				*(float2 *)(slot + p.heads * S::h * rows * S::dim + at * 2) =
					make_float2(y.m, y.l);
		}
	}
	if (near)
		merge_near<S>(p, s, ring);
	else if (!whole)
		share<S>(p, c, s);
}

#endif
