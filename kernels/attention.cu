/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention over block tables on a GPU: any head size up to 256, any block size, all types.
 *
 *	x_j = scale q . k_j; x_j = c tanh(x_j / c) if c > 0; out = v_scale sum e^x_j v_j / sum e^x_j
 *
 * Numbers are f32: products and sums are fused multiply-adds, scores are in natural units, lse is
 * m + ln l. q and out are f32, f16 or bf16; K and V those or e4m3.
 *
 * Work: a block of 8 warps takes up to 8 * SLOTS rows of one sequence and one KV head; row r is
 * query r / group at query head kv_head * group + r % group. Keys come in tiles of 32, widened to
 * f32 in shared memory once for all rows. A warp has SLOTS rows. For scores a lane is a key (the
 * sum runs over d, ascending); for out a lane is every 32nd element (the sum runs over keys,
 * ascending).
 *
 * The value of a row depends on its query and keys alone, to the bit: a tile starts at a multiple
 * of 32 tokens; all of a row's keys are walked by its own warp, in order, with no split that the
 * batch or the length could move; SLOTS changes which rows share a load and no operation on any of
 * them (this file is compiled with -fmad=false: what is fused is written so). A key that a row does
 * not see is left out, it is not multiplied by 0.
 *
 * H200, 32/8 heads of 128, bf16, blocks of 16, one call between events: decode of 64 x 4096 tokens
 * 1.49 ms (0.72 TB/s), 1 x 1024 tokens 136 us; prefill of 2048 tokens 3.7 ms (9.2 TFLOP/s).
 *
 * Nothing is allocated and no size is read back: a launch can be captured, and its grid comes from
 * max_query_len and n_seqs.
 */
#include <climits>
#include <cmath>

#include "kernels/attention.h"
#include "kernels/device/dtype.cuh"
#include "kernels/device/launch.cuh"
#include "kernels/device/warp.cuh"
#include "kernels/view.h"

#define WARPS	8
#define THREADS (WARPS * KV_WARP)
#define TILE	KV_WARP /* keys: one a lane */
#define FETCH	4	/* 16-byte loads a thread has in flight */

struct attend_params {
	const void *q;
	void *out;
	float *lse;
	const int32_t *query_start_loc;
	const int32_t *seq_lens;
	const int32_t *block_table;
	struct kv_view k;
	struct kv_view v;
	int32_t dtype;
	int32_t n_tokens;
	int32_t n_heads_q;
	int32_t group; /* query heads of a KV head */
	int32_t table_width;
	int32_t n_parts; /* thread blocks of a sequence and KV head */
	int32_t window_left;
	int32_t causal;
	float scale; /* of scores: sm_scale * k_scale */
	float softcap;
	bool wide_k; /* rows of K can be read 16 bytes at a time */
	bool wide_v;
};

/* Floats of a row in shared memory: q and K are padded with zeros to whole float4. */
__host__ __device__ static int padded(int d)
{
	return (d + 3) / 4 * 4;
}

/* K rows start one bank apart, so that lanes that read one d of 32 keys do not collide. */
__host__ __device__ static int k_pitch(int d)
{
	return padded(d) + 1;
}

/* Bytes from view->base to key @j's row. */
__device__ static int64_t key_offset(const struct kv_view &view, const int32_t *table, int j,
				     int head)
{
	return kv_view_offset(&view, table[j / view.block_tokens], j % view.block_tokens, head);
}

/*
 * to[j - tile][:] = view row of key j, for j in [lo, hi) of the tile; other rows are left alone.
 * Element type T, 16 bytes at a time, or one element where rows are not aligned to that.
 */
template <int T>
__device__ static void stage_as(const struct kv_view &view, const int32_t *table, int head,
				int64_t tile, struct kv_span in, bool wide, float *to, int pitch)
{
	constexpr int n = kv_vector<T>::n;
	const char *base = (const char *)view.base;
	int at = (int)tile, first = (int)(in.lo - tile), rows = (int)(in.hi - in.lo);

	if (!wide) {
		for (int i = threadIdx.x; i < rows * view.head_dim; i += THREADS) {
			int row = first + i / view.head_dim, d = i % view.head_dim;

			to[row * pitch + d] = kv_element_load(
				base + key_offset(view, table, at + row, head), d, T);
		}
		return;
	}

	int units = view.head_dim / n;

	for (int start = threadIdx.x; start < rows * units; start += THREADS * FETCH) {
		uint4 data[FETCH];

#pragma unroll
		for (int f = 0; f < FETCH; f++) {
			int i = start + f * THREADS;

			if (i < rows * units)
				data[f] = __ldg(
					(const uint4 *)(base + key_offset(view, table,
									  at + first + i / units,
									  head)) +
					i % units);
		}
#pragma unroll
		for (int f = 0; f < FETCH; f++) {
			int i = start + f * THREADS;
			float x[n];

			if (i >= rows * units)
				break;
			kv_vector<T>::widen(data[f], x);
#pragma unroll
			for (int e = 0; e < n; e++)
				to[(first + i / units) * pitch + i % units * n + e] = x[e];
		}
	}
}

__device__ static void stage(const struct kv_view &view, const int32_t *table, int head,
			     int64_t tile, struct kv_span in, bool wide, float *to, int pitch)
{
	switch (view.dtype) {
	case KV_F32:
		stage_as<KV_F32>(view, table, head, tile, in, wide, to, pitch);
		break;
	case KV_F16:
		stage_as<KV_F16>(view, table, head, tile, in, wide, to, pitch);
		break;
	case KV_BF16:
		stage_as<KV_BF16>(view, table, head, tile, in, wide, to, pitch);
		break;
	default:
		stage_as<KV_F8_E4M3>(view, table, head, tile, in, wide, to, pitch);
	}
}

/* A row's softmax so far: out holds 32nd elements lane, lane + 32, ... relative to m. */
template <int CHUNKS> struct row_state {
	float m;
	float l;
	float out[CHUNKS];
};

/* Keys [a, b) of a tile. */
struct range {
	int a;
	int b;
};

__device__ static struct range clip(struct kv_span span, int64_t tile)
{
	int64_t a = span.lo - tile, b = span.hi - tile;

	return {(int)(a < 0 ? 0 : a > TILE ? TILE : a), (int)(b < 0 ? 0 : b > TILE ? TILE : b)};
}

/* x[s] = q row s . K row of this lane */
template <int SLOTS>
__device__ static void score(const float *q, const float *k, int dk, float (&x)[SLOTS])
{
#pragma unroll
	for (int s = 0; s < SLOTS; s++)
		x[s] = 0;
	for (int d = 0; d < dk; d += 4) {
		float k0 = k[d], k1 = k[d + 1], k2 = k[d + 2], k3 = k[d + 3];

#pragma unroll
		for (int s = 0; s < SLOTS; s++) {
			float4 y = *(const float4 *)(q + s * dk + d);

			x[s] = fmaf(y.x, k0, x[s]);
			x[s] = fmaf(y.y, k1, x[s]);
			x[s] = fmaf(y.z, k2, x[s]);
			x[s] = fmaf(y.w, k3, x[s]);
		}
	}
}

/*
 * Turns this lane's score into its weight relative to the new m, and brings the row to it.
 * Return: the keys that weigh something: @in, or none if all scores are -infinity.
 */
template <int CHUNKS>
__device__ static struct range soften(const struct attend_params &p, struct range in, float &x,
				      struct row_state<CHUNKS> &row)
{
	int lane = threadIdx.x % KV_WARP;
	float m, factor;

	x *= p.scale;
	if (p.softcap > 0)
		x = p.softcap * tanhf(x / p.softcap);
	if (lane < in.a || lane >= in.b)
		x = -INFINITY;
	m = kv_max(row.m, kv_warp_max(x));
	if (m == -INFINITY)
		return {0, 0};
	x = expf(x - m);
	factor = expf(row.m - m);
	row.m = m;
	row.l = fmaf(row.l, factor, kv_warp_add(x));
#pragma unroll
	for (int c = 0; c < CHUNKS; c++)
		row.out[c] *= factor;
	return in;
}

/* out[s][:] += sum over j in in[s] of weight[s][j] v[j][:] */
template <int SLOTS, int CHUNKS>
__device__ static void weigh(const float *v, int dv, const struct range (&in)[SLOTS],
			     const float (&weight)[SLOTS], struct row_state<CHUNKS> (&row)[SLOTS])
{
	int lane = threadIdx.x % KV_WARP;
	int lo = TILE, hi = 0;

#pragma unroll
	for (int s = 0; s < SLOTS; s++) {
		if (in[s].a < in[s].b) {
			lo = min(lo, in[s].a);
			hi = max(hi, in[s].b);
		}
	}
	for (int j = lo; j < hi; j++) {
		float x[CHUNKS];

#pragma unroll
		for (int c = 0; c < CHUNKS; c++)
			x[c] = c * KV_WARP + lane < dv ? v[j * dv + c * KV_WARP + lane] : 0;
#pragma unroll
		for (int s = 0; s < SLOTS; s++) {
			float w = __shfl_sync(KV_ALL_LANES, weight[s], j);

			if (j < in[s].a || j >= in[s].b)
				continue;
#pragma unroll
			for (int c = 0; c < CHUNKS; c++)
				row[s].out[c] = fmaf(w, x[c], row[s].out[c]);
		}
	}
}

template <int SLOTS, int CHUNKS>
__global__ void __launch_bounds__(THREADS, 2) attend(struct attend_params p)
{
	extern __shared__ float4 shared[];
	int dk = padded(p.k.head_dim), dv = p.v.head_dim;
	float *q = (float *)shared;		     /* [WARPS * SLOTS][dk] */
	float *k = q + WARPS * SLOTS * dk;	     /* [TILE][k_pitch] */
	float *v = k + TILE * k_pitch(p.k.head_dim); /* [TILE][dv] */
	int lane = threadIdx.x % KV_WARP, warp = threadIdx.x / KV_WARP;
	int b = blockIdx.x / p.n_parts, head = blockIdx.y;
	int64_t start = p.query_start_loc[b];
	int64_t q_len = min((int64_t)p.query_start_loc[b + 1], (int64_t)p.n_tokens) - start;
	int64_t len = p.seq_lens[b];
	int64_t covered = (int64_t)p.table_width * p.k.block_tokens;
	int64_t n_rows = q_len * p.group;
	int64_t first = (int64_t)(blockIdx.x % p.n_parts) * WARPS * SLOTS;
	int64_t last = min(first + WARPS * SLOTS, n_rows) - 1;
	const int32_t *table = p.block_table + (int64_t)b * p.table_width;
	struct row_state<CHUNKS> row[SLOTS];
	struct kv_span seen[SLOTS], all;
	int64_t at[SLOTS]; /* row of q and out in units of a head; -1: no row in this slot */

	if (start < 0 || first > last)
		return;
	for (int i = threadIdx.x; i < WARPS * SLOTS * dk; i += THREADS) {
		int64_t r = first + i / dk;
		int64_t t = start + r / p.group;
		int d = i % dk;

		q[i] = r > last || d >= p.k.head_dim
			       ? 0
			       : kv_element_load(p.q,
						 (t * p.n_heads_q + head * p.group + r % p.group) *
								 p.k.head_dim +
							 d,
						 p.dtype);
	}
	for (int i = threadIdx.x; i < TILE * k_pitch(p.k.head_dim); i += THREADS)
		k[i] = 0;

		/* Rows that a warp has side by side are consecutive: they see nearly the same keys.
		 */
#pragma unroll
	for (int s = 0; s < SLOTS; s++) {
		int64_t r = first + warp * SLOTS + s;

		row[s] = {-INFINITY, 0, {}};
		seen[s] = {0, 0};
		at[s] = -1;
		if (r > last)
			continue;
		seen[s] = kv_span_seen(len - q_len + r / p.group, len, p.causal, p.window_left);
		seen[s].hi = min(seen[s].hi, covered);
		at[s] = (start + r / p.group) * p.n_heads_q + head * p.group + r % p.group;
	}
	all.lo = kv_span_seen(len - q_len + first / p.group, len, p.causal, p.window_left).lo;
	all.hi = kv_span_seen(len - q_len + last / p.group, len, p.causal, p.window_left).hi;
	all.hi = min(all.hi, covered);

	for (int64_t tile = all.lo / TILE * TILE; tile < all.hi; tile += TILE) {
		struct kv_span in = {max(all.lo, tile), min(all.hi, tile + TILE)};
		struct range sees[SLOTS];
		float x[SLOTS];
		bool any = false;

		__syncthreads();
		stage(p.k, table, head, tile, in, p.wide_k, k, k_pitch(p.k.head_dim));
		stage(p.v, table, head, tile, in, p.wide_v, v, dv);
		__syncthreads();
#pragma unroll
		for (int s = 0; s < SLOTS; s++) {
			sees[s] = clip(seen[s], tile);
			any = any || sees[s].a < sees[s].b;
		}
		if (!any)
			continue;
		score<SLOTS>(q + warp * SLOTS * dk, k + lane * k_pitch(p.k.head_dim), dk, x);
#pragma unroll
		for (int s = 0; s < SLOTS; s++)
			if (sees[s].a < sees[s].b)
				sees[s] = soften<CHUNKS>(p, sees[s], x[s], row[s]);
		weigh<SLOTS, CHUNKS>(v, dv, sees, x, row);
	}

#pragma unroll
	for (int s = 0; s < SLOTS; s++) {
		float factor = row[s].l == 0 ? 0 : p.v.scale / row[s].l;

		if (at[s] < 0)
			continue;
#pragma unroll
		for (int c = 0; c < CHUNKS; c++)
			if (c * KV_WARP + lane < dv)
				kv_element_store(p.out, at[s] * dv + c * KV_WARP + lane, p.dtype,
						 row[s].out[c] * factor);
		if (p.lse && lane == 0)
			p.lse[at[s]] = row[s].l == 0 ? -INFINITY : row[s].m + logf(row[s].l);
	}
}

/* Rows of @view start and go on in whole 16 bytes. */
static bool is_wide(const struct kv_view *view)
{
	uint64_t bits = (uint64_t)(uintptr_t)view->base | (uint64_t)view->block_stride |
			(uint64_t)view->token_stride | (uint64_t)view->head_stride |
			(uint64_t)kv_view_row_bytes(view);

	return bits % 16 == 0;
}

template <int SLOTS>
static int launch(struct attend_params *p, int64_t max_rows, int n_seqs, void *stream)
{
	int64_t n_parts = (max_rows + WARPS * SLOTS - 1) / (WARPS * SLOTS);
	size_t shared = sizeof(float) *
			((size_t)(WARPS * SLOTS) * padded(p->k.head_dim) +
			 (size_t)TILE * k_pitch(p->k.head_dim) + (size_t)TILE * p->v.head_dim);
	dim3 grid((unsigned)(n_parts * n_seqs), (unsigned)p->k.n_heads);
	void (*kernel)(struct attend_params) = attend<SLOTS, 8>;

	if (p->v.head_dim <= 64)
		kernel = attend<SLOTS, 2>;
	else if (p->v.head_dim <= 128)
		kernel = attend<SLOTS, 4>;
	p->n_parts = (int32_t)n_parts;
	return kv_launch("attention", kernel, grid, THREADS, shared, stream, *p);
}

extern "C" void kv_attention_cuda_refuse(const struct kv_attention_args *args,
					 struct kv_refusals *refusals)
{
	int64_t max_rows = (int64_t)args->max_query_len * (args->n_heads_q / args->k.n_heads);

	if ((max_rows / WARPS + 1) * args->n_seqs > INT_MAX)
		kv_refuse(refusals, KV_ATTN_SIZE,
			  "max_query_len, n_seqs: %d, %d given, their product is too large for one "
			  "launch",
			  args->max_query_len, args->n_seqs);
}

extern "C" int kv_attention_cuda(const struct kv_attention_args *args)
{
	int group = args->n_heads_q / args->k.n_heads;
	int64_t max_rows = (int64_t)args->max_query_len * group;
	struct attend_params p = {};

	if (max_rows == 0)
		return 0;
	p.q = args->q;
	p.out = args->out;
	p.lse = args->lse;
	p.query_start_loc = args->query_start_loc;
	p.seq_lens = args->seq_lens;
	p.block_table = args->block_table;
	p.k = args->k;
	p.v = args->v;
	p.dtype = args->dtype;
	p.n_tokens = args->n_tokens;
	p.n_heads_q = args->n_heads_q;
	p.group = group;
	p.table_width = args->table_width;
	p.window_left = args->window_left;
	p.causal = args->causal;
	p.scale = args->sm_scale * args->k.scale;
	p.softcap = args->softcap;
	p.wide_k = is_wide(&args->k);
	p.wide_v = is_wide(&args->v);
	return max_rows <= WARPS ? launch<1>(&p, max_rows, args->n_seqs, args->stream)
				 : launch<4>(&p, max_rows, args->n_seqs, args->stream);
}
