/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Merging on a GPU.
 *
 *	out[t][h][:] = factor sum_r w_r parts[r][t][h][:]; w_r = e^(L_r - max L)     (kernels/merge.h)
 *
 * Work: 2^lane_bits threads take one row (t, h), each in pieces of 8 elements; all of them calculate
 * the row's weights, whose logarithms lie in one line of the cache. Rows of parts that are aligned to
 * 16 bytes are read so.
 */
#include "kernels/cascade.h"
#include "kernels/device/dtype.cuh"
#include "kernels/device/launch.cuh"
#include "kernels/merge.h"

#define THREADS 256
#define PIECE	8

struct merge_params {
	struct kv_merge_args a;
	int32_t lane_bits; /* threads of a row: 2^lane_bits */
	bool wide;	   /* pieces of parts and of out are aligned to 16 bytes */
};

/* x[:] = elements [d, d + PIECE) of a row at @p */
template <int T> __device__ static void load_piece(const char *p, float (&x)[PIECE])
{
	constexpr int n = kv_vector<T>::n;

#pragma unroll
	for (int i = 0; i < PIECE; i += n)
		kv_vector<T>::widen(*(const uint4 *)(p + i * 16 / n), x + i);
}

__device__ static void load(const struct merge_params &p, int64_t at, int d, float (&x)[PIECE])
{
	const char *row = (const char *)p.a.parts;

	if (!p.wide) {
		for (int i = 0; i < PIECE; i++)
			x[i] = d + i < p.a.head_dim
				       ? kv_element_load(row, at + d + i, p.a.part_dtype)
				       : 0;
	} else if (p.a.part_dtype == KV_F32) {
		load_piece<KV_F32>(row + (at + d) * 4, x);
	} else if (p.a.part_dtype == KV_F16) {
		load_piece<KV_F16>(row + (at + d) * 2, x);
	} else {
		load_piece<KV_BF16>(row + (at + d) * 2, x);
	}
}

__device__ static void store(const struct merge_params &p, int64_t at, int d, const float (&x)[PIECE])
{
	char *row = (char *)p.a.out;

	if (!p.wide) {
		for (int i = 0; i < PIECE && d + i < p.a.head_dim; i++)
			kv_element_store(row, at + d + i, p.a.dtype, x[i]);
	} else if (p.a.dtype == KV_F32) {
		float4 *to = (float4 *)(row + (at + d) * 4);

		to[0] = make_float4(x[0], x[1], x[2], x[3]);
		to[1] = make_float4(x[4], x[5], x[6], x[7]);
	} else {
		uint16_t h[PIECE];
		uint4 bits;

#pragma unroll
		for (int i = 0; i < PIECE; i++)
			h[i] = p.a.dtype == KV_F16 ? kv_f32_to_f16(x[i]) : kv_f32_to_bf16(x[i]);
		memcpy(&bits, h, sizeof(bits));
		*(uint4 *)(row + (at + d) * 2) = bits;
	}
}

__global__ void __launch_bounds__(THREADS) merge(struct merge_params p)
{
	const struct kv_merge_args &a = p.a;
	int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, row_at = i >> p.lane_bits;
	int64_t t = row_at / a.n_heads;
	int h = (int)(row_at % a.n_heads), lanes = 1 << p.lane_bits;
	int64_t n = a.n_real ? min(*a.n_real, a.n_tokens) : a.n_tokens;
	int lane = (int)(i & (lanes - 1));
	const float *lse;
	struct kv_merge_row row;

	if (t >= n)
		return;
	lse = a.part_lse + t * a.lse_token_stride + h * a.lse_head_stride;
	row = kv_merge_row(&a, lse, h);
	for (int d = lane * PIECE; d < a.head_dim; d += lanes * PIECE) {
		float sum[PIECE] = {}, x[PIECE];

		for (int64_t r = 0; r < a.n_parts; r++) {
			float w = kv_merge_weight(&a, lse, r, &row);

			if (w == 0)
				continue;
			load(p, r * a.part_stride + t * a.token_stride + (int64_t)h * a.head_dim, d, x);
#pragma unroll
			for (int e = 0; e < PIECE; e++)
				sum[e] = fmaf(w, x[e], sum[e]);
		}
#pragma unroll
		for (int e = 0; e < PIECE; e++)
			sum[e] *= row.factor;
		store(p, t * a.out_token_stride + (int64_t)h * a.head_dim, d, sum);
	}
	if (a.lse && lane == 0)
		a.lse[t * a.n_heads + h] = row.lse;
}

extern "C" int kv_merge_cuda(const struct kv_merge_args *args)
{
	struct merge_params p = {};
	int64_t part = (int64_t)kv_dtype_bytes(args->part_dtype), out = (int64_t)kv_dtype_bytes(args->dtype);
	uint64_t bits = (uint64_t)(uintptr_t)args->parts | (uint64_t)(uintptr_t)args->out |
			(uint64_t)(args->part_stride * part) | (uint64_t)(args->token_stride * part) |
			(uint64_t)(args->out_token_stride * out) |
			(uint64_t)(args->head_dim % PIECE ? 1 : 0);
	int64_t blocks;

	p.a = *args;
	p.wide = bits % 16 == 0;
	while ((PIECE << p.lane_bits) < args->head_dim && p.lane_bits < 5)
		p.lane_bits++;
	blocks = (((int64_t)args->n_tokens * args->n_heads << p.lane_bits) + THREADS - 1) / THREADS;
	if (blocks > INT32_MAX)
		return kv_error(-ENOTSUP, "n_tokens, n_heads: %d, %d given, too many for one launch",
				args->n_tokens, args->n_heads);
	return kv_launch("merge", merge, dim3((unsigned)blocks), THREADS, 0, args->stream, p);
}

struct prepare_params {
	const int32_t *query_start_loc;
	int32_t *offsets;
	int32_t n_seqs;
	int32_t prefix;
};

__global__ void prepare(struct prepare_params p)
{
	p.offsets[0] = p.query_start_loc[0];
	p.offsets[1] = p.query_start_loc[p.n_seqs];
	p.offsets[2] = p.prefix;
}

extern "C" int kv_cascade_prepare_cuda(const struct kv_attention_args *args, int32_t *offsets)
{
	struct prepare_params p = {args->query_start_loc, offsets, args->n_seqs,
				   args->shared_prefix};

	return kv_launch("attention", prepare, dim3(1), 1, 0, args->stream, p);
}
