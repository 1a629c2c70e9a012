/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention over block tables on a GPU: any head size up to 256, any block size, all types.
 *
 *	x_j = scale q . k_j; x_j = c tanh(x_j / c) if c > 0; x_j += slope (p_j - p)
 *	out = v_scale sum e^x_j v_j / sum e^x_j, over the keys that kernels/visible.h lets a row see
 *
 * Numbers are f32: products and sums are fused multiply-adds, scores are in natural units, lse is
 * m + ln l. q and out are f32, f16 or bf16; K and V those, e4m3 or e5m2.
 *
 * Work: a block of 8 warps takes up to 8 * SLOTS rows of one sequence and one KV head; row r is
 * query r / group at query head kv_head * group + r % group. Keys come in tiles of 32, widened to
 * f32 in shared memory once for all rows. A warp has SLOTS rows. For scores a lane is a key (the
 * sum runs over d, ascending); for out a lane is every 32nd element (the sum runs over keys,
 * ascending). What a row sees of a tile is a word with a bit for each key.
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
#include "kernels/sink.h"
#include "kernels/visible.h"

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
	const float *sinks;
	const float *alibi_slopes;
	const float *k_scales; /* of each KV head; NULL: one, in scale */
	const float *v_scales;
	struct kv_view k;
	struct kv_view v;
	struct kv_view k_rows; /* scales of each row; base NULL: none */
	struct kv_view v_rows;
	struct kv_visibility rules;
	int64_t q_stride; /* elements from token to token */
	int64_t out_stride;
	int64_t lse_stride;
	int64_t lse_head_stride;
	int32_t dtype;
	int32_t out_dtype;
	int32_t n_tokens;
	int32_t n_heads_q;
	int32_t group; /* query heads of a KV head */
	int32_t table_width;
	int32_t n_parts; /* thread blocks of a sequence and KV head */
	int32_t lse_with_sink;
	float scale; /* of scores: sm_scale, times k.scale where that is the scale of all */
	float v_scale;
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

/* The scale of key @j's row, where each has its own; else 1. */
__device__ static float row_scale(const struct kv_view &rows, const int32_t *table, int j, int head)
{
	return rows.base ? *(const float *)((const char *)rows.base + key_offset(rows, table, j, head))
			 : 1;
}

/*
 * to[j - tile][:] = view row of key j, for the keys in @bits; other rows are left alone. Element
 * type T, 16 bytes at a time, or one element where rows are not aligned to that.
 */
template <int T>
__device__ static void stage_as(const struct kv_view &view, const struct kv_view &scales,
				const int32_t *table, int head, int at, uint32_t bits, bool wide,
				float *to, int pitch)
{
	constexpr int n = kv_vector<T>::n;
	const char *base = (const char *)view.base;
	int first = __ffs((int)bits) - 1, rows = KV_WARP - __clz((int)bits) - first;

	if (!wide) {
		for (int i = threadIdx.x; i < rows * view.head_dim; i += THREADS) {
			int row = first + i / view.head_dim, d = i % view.head_dim;

			if (bits >> row & 1)
				to[row * pitch + d] =
					kv_element_load(base + key_offset(view, table, at + row,
									  head),
							d, T) *
					row_scale(scales, table, at + row, head);
		}
		return;
	}

	int units = view.head_dim / n;

	for (int start = threadIdx.x; start < rows * units; start += THREADS * FETCH) {
		uint4 data[FETCH];

#pragma unroll
		for (int f = 0; f < FETCH; f++) {
			int i = start + f * THREADS, row = first + i / units;

			if (i < rows * units && bits >> row & 1)
				data[f] = __ldg((const uint4 *)(base + key_offset(view, table,
										  at + row, head)) +
						i % units);
		}
#pragma unroll
		for (int f = 0; f < FETCH; f++) {
			int i = start + f * THREADS, row = first + i / units;
			float x[n], scale;

			if (i >= rows * units)
				break;
			if (!(bits >> row & 1))
				continue;
			scale = row_scale(scales, table, at + row, head);
			kv_vector<T>::widen(data[f], x);
#pragma unroll
			for (int e = 0; e < n; e++)
				to[row * pitch + i % units * n + e] = x[e] * scale;
		}
	}
}

__device__ static void stage(const struct kv_view &view, const struct kv_view &scales,
			     const int32_t *table, int head, int at, uint32_t bits, bool wide,
			     float *to, int pitch)
{
	switch (view.dtype) {
	case KV_F32:
		stage_as<KV_F32>(view, scales, table, head, at, bits, wide, to, pitch);
		break;
	case KV_F16:
		stage_as<KV_F16>(view, scales, table, head, at, bits, wide, to, pitch);
		break;
	case KV_BF16:
		stage_as<KV_BF16>(view, scales, table, head, at, bits, wide, to, pitch);
		break;
	case KV_F8_E5M2:
		stage_as<KV_F8_E5M2>(view, scales, table, head, at, bits, wide, to, pitch);
		break;
	default:
		stage_as<KV_F8_E4M3>(view, scales, table, head, at, bits, wide, to, pitch);
	}
}

/* A row's softmax so far: out holds 32nd elements lane, lane + 32, ... relative to m. */
template <int CHUNKS> struct row_state {
	float m;
	float l;
	float out[CHUNKS];
};

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
 * Turns this lane's score into its weight relative to the new m, and brings the row to it. @lean is
 * what ALiBi adds. Return: the keys that weigh something: @bits, or none if all scores are -infinity.
 */
template <int CHUNKS>
__device__ static uint32_t soften(const struct attend_params &p, float scale, float lean,
				  uint32_t bits, float &x, struct row_state<CHUNKS> &row)
{
	int lane = threadIdx.x % KV_WARP;
	float m, factor;

	x *= scale;
	if (p.softcap > 0)
		x = p.softcap * tanhf(x / p.softcap);
	if (p.alibi_slopes)
		x += lean;
	if (!(bits >> lane & 1))
		x = -INFINITY;
	m = kv_max(row.m, kv_warp_max(x));
	if (m == -INFINITY)
		return 0;
	x = expf(x - m);
	factor = expf(row.m - m);
	row.m = m;
	row.l = fmaf(row.l, factor, kv_warp_add(x));
#pragma unroll
	for (int c = 0; c < CHUNKS; c++)
		row.out[c] *= factor;
	return bits;
}

/* out[s][:] += sum over the keys j in bits[s] of weight[s][j] v[j][:] */
template <int SLOTS, int CHUNKS>
__device__ static void weigh(const float *v, int dv, const uint32_t (&bits)[SLOTS],
			     const float (&weight)[SLOTS], struct row_state<CHUNKS> (&row)[SLOTS])
{
	int lane = threadIdx.x % KV_WARP;
	uint32_t some = 0;

#pragma unroll
	for (int s = 0; s < SLOTS; s++)
		some |= bits[s];
	for (int j = __ffs((int)some) - 1; j >= 0 && some >> j; j++) {
		float x[CHUNKS];

		if (!(some >> j & 1))
			continue;
#pragma unroll
		for (int c = 0; c < CHUNKS; c++)
			x[c] = c * KV_WARP + lane < dv ? v[j * dv + c * KV_WARP + lane] : 0;
#pragma unroll
		for (int s = 0; s < SLOTS; s++) {
			float w = __shfl_sync(KV_ALL_LANES, weight[s], j);

			if (!(bits[s] >> j & 1))
				continue;
#pragma unroll
			for (int c = 0; c < CHUNKS; c++)
				row[s].out[c] = fmaf(w, x[c], row[s].out[c]);
		}
		if (j == KV_WARP - 1)
			break;
	}
}

/* Stores a row: @t its token, @h its query head, @scale of V. */
template <int CHUNKS>
__device__ static void finish(const struct attend_params &p, int64_t t, int h, float scale,
			      const struct row_state<CHUNKS> &row)
{
	int lane = threadIdx.x % KV_WARP, dv = p.v.head_dim;
	float lse = row.l == 0 ? -INFINITY : row.m + logf(row.l);
	float factor = row.l == 0 ? 0 : scale / row.l;

	if (p.sinks)
		factor *= kv_sink_factor(p.sinks[h], lse);
#pragma unroll
	for (int c = 0; c < CHUNKS; c++)
		if (c * KV_WARP + lane < dv)
			kv_element_store(p.out, t * p.out_stride + h * dv + c * KV_WARP + lane,
					 p.out_dtype, row.out[c] * factor);
	if (p.lse && lane == 0)
		p.lse[t * p.lse_stride + h * p.lse_head_stride] =
			p.lse_with_sink ? kv_sink_lse(p.sinks[h], lse) : lse;
}

template <int SLOTS, int CHUNKS>
__global__ void __launch_bounds__(THREADS, 2) attend(struct attend_params p)
{
	extern __shared__ float4 shared[];
	__shared__ struct kv_visible rows[WARPS * SLOTS];
	__shared__ int lo, hi;
	__shared__ uint32_t some[3]; /* keys of a tile that a row of the block sees; in turns */
	int dk = padded(p.k.head_dim), dv = p.v.head_dim;
	float *q = (float *)shared;		     /* [WARPS * SLOTS][dk] */
	float *k = q + WARPS * SLOTS * dk;	     /* [TILE][k_pitch] */
	float *v = k + TILE * k_pitch(p.k.head_dim); /* [TILE][dv] */
	int lane = threadIdx.x % KV_WARP, warp = threadIdx.x / KV_WARP, turn = 0;
	int b = blockIdx.x / p.n_parts, head = blockIdx.y;
	int64_t start = p.query_start_loc[b];
	int64_t q_len = min((int64_t)p.query_start_loc[b + 1], (int64_t)p.n_tokens) - start;
	int64_t len = p.seq_lens[b];
	int64_t covered = (int64_t)p.table_width * p.k.block_tokens;
	int64_t n_rows = q_len * p.group;
	int64_t first = (int64_t)(blockIdx.x % p.n_parts) * WARPS * SLOTS;
	int64_t last = min(first + WARPS * SLOTS, n_rows) - 1;
	const int32_t *table = p.block_table + (int64_t)b * p.table_width;
	float scale = p.k_scales ? p.scale * p.k_scales[head] : p.scale;
	struct row_state<CHUNKS> row[SLOTS];

	if (start < 0 || first > last)
		return;
	if (threadIdx.x == 0) {
		lo = INT_MAX;
		hi = 0;
		some[0] = some[1] = some[2] = 0;
	}
	for (int i = threadIdx.x; i < WARPS * SLOTS * dk; i += THREADS) {
		int64_t r = first + i / dk;
		int64_t t = start + r / p.group;
		int d = i % dk;

		q[i] = r > last || d >= p.k.head_dim
			       ? 0
			       : kv_element_load(p.q,
						 t * p.q_stride +
							 (head * p.group + r % p.group) *
								 p.k.head_dim +
							 d,
						 p.dtype);
	}
	for (int i = threadIdx.x; i < TILE * k_pitch(p.k.head_dim); i += THREADS)
		k[i] = 0;
	__syncthreads();
	/* Rows that a warp has side by side are consecutive: they see nearly the same keys. */
	if (threadIdx.x < WARPS * SLOTS) {
		struct kv_visible *mine = &rows[threadIdx.x];

		memset(mine, 0, sizeof(*mine)); /* a row that is not there sees nothing */
		if (first + threadIdx.x <= last)
			*mine = kv_visible_row(&p.rules, b, start,
					       (first + threadIdx.x) / p.group, q_len, len);
		mine->span.hi = min(mine->span.hi, covered);
		mine->prefix.hi = min(mine->prefix.hi, covered);
		mine->doc.hi = min(mine->doc.hi, covered);
		mine->tree.hi = min(mine->tree.hi, covered);
		if (mine->all.lo < mine->all.hi) {
			atomicMin(&lo, (int)mine->all.lo);
			atomicMax(&hi, (int)min(mine->all.hi, covered));
		}
	}
#pragma unroll
	for (int s = 0; s < SLOTS; s++)
		row[s] = {-INFINITY, 0, {}};
	__syncthreads();

	for (int tile = lo / TILE * TILE; tile < hi; tile += TILE, turn = (turn + 1) % 3) {
		uint32_t bits[SLOTS], mine = 0, staged;
		float x[SLOTS];

#pragma unroll
		for (int s = 0; s < SLOTS; s++) {
			bits[s] = __ballot_sync(KV_ALL_LANES,
						kv_visible_sees(&p.rules, &rows[warp * SLOTS + s],
								tile + lane));
			mine |= bits[s];
		}
		if (lane == 0 && mine)
			atomicOr(&some[turn], mine);
		__syncthreads(); /* and all warps are done with the last tile */
		staged = some[turn];
		if (threadIdx.x == 0) /* all have read it, none has come to its next use */
			some[(turn + 2) % 3] = 0;
		if (!staged)
			continue;
		stage(p.k, p.k_rows, table, head, tile, staged, p.wide_k, k,
		      k_pitch(p.k.head_dim));
		stage(p.v, p.v_rows, table, head, tile, staged, p.wide_v, v, dv);
		__syncthreads();
		if (!mine)
			continue;
		score<SLOTS>(q + warp * SLOTS * dk, k + lane * k_pitch(p.k.head_dim), dk, x);
#pragma unroll
		for (int s = 0; s < SLOTS; s++) {
			const struct kv_visible *r = &rows[warp * SLOTS + s];
			float lean = 0;

			if (!bits[s])
				continue;
			if (p.alibi_slopes && bits[s] >> lane & 1)
				lean = p.alibi_slopes[head * p.group +
						      (int)((first + warp * SLOTS + s) % p.group)] *
				       (float)(kv_visible_position(&p.rules, r, tile + lane) -
					       r->position);
			bits[s] = soften<CHUNKS>(p, scale, lean, bits[s], x[s], row[s]);
		}
		weigh<SLOTS, CHUNKS>(v, dv, bits, x, row);
	}

#pragma unroll
	for (int s = 0; s < SLOTS; s++) {
		int64_t r = first + warp * SLOTS + s;

		if (r <= last)
			finish<CHUNKS>(p, start + r / p.group, head * p.group + (int)(r % p.group),
				       p.v_scales ? p.v_scales[head] : p.v_scale, row[s]);
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
	p.sinks = args->sinks;
	p.alibi_slopes = args->alibi_slopes;
	p.k_scales = args->k_scales;
	p.v_scales = args->v_scales;
	p.k_rows = args->k_row_scales;
	p.v_rows = args->v_row_scales;
	p.rules = kv_visibility_of(args);
	p.q_stride = args->q_token_stride;
	p.out_stride = args->out_token_stride;
	p.lse_stride = args->lse_token_stride;
	p.lse_head_stride = args->lse_head_stride;
	p.out_dtype = args->out_dtype;
	p.lse_with_sink = args->lse_with_sink;
	p.scale = args->sm_scale;
	p.v_scale = 1;
	if (!args->k_scales && !args->k_row_scales.base)
		p.scale *= args->k.scale;
	if (!args->v_scales && !args->v_row_scales.base)
		p.v_scale = args->v.scale;
	p.softcap = args->softcap;
	p.wide_k = is_wide(&args->k);
	p.wide_v = is_wide(&args->v);
	return max_rows <= WARPS ? launch<1>(&p, max_rows, args->n_seqs, args->stream)
				 : launch<4>(&p, max_rows, args->n_seqs, args->stream);
}
