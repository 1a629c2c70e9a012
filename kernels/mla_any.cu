/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Latent decode for rows of any size and format, on any device: what mla_wgmma.cu leaves out.
 *
 * A thread block has 16 rows (query tokens by heads) and a run of keys (mla_plan.cuh), which it brings 16
 * at a time to shared memory as f32. Thread (r, j) has the score of row r and key j; then thread d has
 * columns d, d + 256, ... of all rows' sums. All arithmetic is in f32.
 */
#include <climits>

#include "kernels/attention.h"
#include "kernels/device/launch.cuh"
#include "kernels/device/mma.cuh"
#include "kernels/mla_plan.cuh"

#define ROWS	  16
#define STEP	  16 /* keys at a time */
#define THREADS	  (ROWS * STEP)
#define MAX_DIM	  1024
#define COLUMNS	  (MAX_DIM / THREADS) /* of a thread */

struct shared {
	float p[ROWS][STEP]; /* weights */
	float alpha[ROWS];
	float m[ROWS];
	float l[ROWS];
	float rows[]; /* q: [ROWS][stride], keys: [STEP][stride] */
};

/* Elements of a row in shared memory: odd, so that 16 rows lie in 16 banks. */
__host__ __device__ static int stride_of(int dim)
{
	return dim | 1;
}

__device__ static void load_q(const struct kv_mla_params &p, const struct mla_part &s, float *q)
{
	int dim = p.latent + p.rope;

	for (int i = threadIdx.x; i < ROWS * dim; i += THREADS) {
		int row = i / dim, d = i % dim, at = s.row0 + row;
		int64_t token = s.start + at / p.n_heads;

		q[row * stride_of(dim) + d] =
			row < s.n_rows ? kv_element_load(p.q, token * p.q_stride + at % p.n_heads * dim + d,
							 p.dtype)
				       : 0;
	}
}

/* Keys from @key on; 0 past the last. */
__device__ static void load_keys(const struct kv_mla_params &p, const struct mla_part &s, int key, float *to)
{
	int dim = p.latent + p.rope, j = threadIdx.x / (THREADS / STEP);
	struct kv_view view = p.k;
	int at = key + j;
	const char *row = NULL;

	view.scale = 1; /* it is part of p.scale and p.v_scale */
	if (at >= s.lo && at < s.hi) {
		int64_t block = p.block_table[(int64_t)s.b * p.table_width + at / view.block_tokens];

		row = (const char *)view.base + kv_view_offset(&view, block, at % view.block_tokens, 0);
	}
	for (int d = threadIdx.x % (THREADS / STEP); d < dim; d += THREADS / STEP)
		to[j * stride_of(dim) + d] =
			row ? kv_mla_element(&view, row, d, p.latent, p.dtype) : 0;
}

/* Scores of 16 keys, to weights of them; sums so far are worth alpha of what they were. */
__device__ static void soften(const struct kv_mla_params &p, const float *q, const float *keys, int key,
			      int lo, int hi, struct shared *x, float &m, float &l)
{
	int dim = p.latent + p.rope, r = threadIdx.x / STEP, j = threadIdx.x % STEP, at = key + j;
	float score = 0, top, alpha, w, sum;

	for (int d = 0; d < dim; d++)
		score = fmaf(q[r * stride_of(dim) + d], keys[j * stride_of(dim) + d], score);
	score = at >= lo && at < hi ? score * p.scale : -INFINITY;
	top = score;
#pragma unroll
	for (int step = STEP / 2; step; step /= 2)
		top = fmaxf(top, __shfl_xor_sync(KV_ALL_LANES, top, step));
	top = fmaxf(top, m);
	alpha = top == -INFINITY ? 1 : kv_exp2(m - top);
	w = top == -INFINITY ? 0 : kv_exp2(score - top);
	sum = w;
#pragma unroll
	for (int step = STEP / 2; step; step /= 2)
		sum += __shfl_xor_sync(KV_ALL_LANES, sum, step);
	l = fmaf(l, alpha, sum);
	m = top;
	x->p[r][j] = w;
	if (j == 0)
		x->alpha[r] = alpha;
}

__device__ static void store(const struct kv_mla_params &p, const struct mla_part &s, struct shared *x,
			     const float (&o)[ROWS][COLUMNS])
{
	bool whole = s.t0 == 0 && s.t1 == s.n;
	float *slot = mla_slot(p, blockIdx.x, blockIdx.y, s.t0 == 0);

#pragma unroll
	for (int r = 0; r < ROWS; r++) {
		int at = s.row0 + r;
		int64_t token = s.start + at / p.n_heads;
		int head = at % p.n_heads;
		float l = x->l[r];

		if (r >= s.n_rows)
			break;
#pragma unroll
		for (int c = 0; c < COLUMNS; c++) {
			int d = threadIdx.x + c * THREADS;

			if (d >= p.latent)
				break;
			if (whole)
				kv_element_store(p.out, token * p.out_stride + (int64_t)head * p.latent + d,
						 p.out_dtype, l > 0 ? o[r][c] * p.v_scale / l : 0);
			else
				slot[r * p.latent + d] = o[r][c];
		}
		if (threadIdx.x)
			continue;
		if (!whole)
			mla_slot_stats(p, slot)[r] = make_float2(x->m[r], l);
		else if (p.lse)
			p.lse[token * p.lse_stride + head * p.lse_head_stride] =
				l > 0 ? (x->m[r] + log2f(l)) * 0.693147180559945f : -INFINITY;
	}
}

__global__ void __launch_bounds__(THREADS) attend_any(const __grid_constant__ struct kv_mla_params p)
{
	extern __shared__ float4 memory[];
	struct shared *x = (struct shared *)memory;
	float *q = x->rows, *keys = q + ROWS * stride_of(p.latent + p.rope);
	int stride = stride_of(p.latent + p.rope), chunk = blockIdx.y;
	int r = threadIdx.x / STEP;
	struct mla_part s;

#if __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
	if (!mla_plan(p, blockIdx.x, chunk, s))
		return;
	for (;;) {
		float o[ROWS][COLUMNS] = {}, m = -INFINITY, l = 0;
		int hi = mla_sees(p, s, (s.row0 + min(r, s.n_rows - 1)) / p.n_heads);
		int end = min(s.first + s.t1 * KV_MLA_KEYS, s.hi);

		__syncthreads(); /* the part before is stored */
		load_q(p, s, q);
		for (int key = s.first + s.t0 * KV_MLA_KEYS; key < end; key += STEP) {
			load_keys(p, s, key, keys);
			__syncthreads();
			soften(p, q, keys, key, s.lo, hi, x, m, l);
			__syncthreads();
#pragma unroll
			for (int c = 0; c < COLUMNS; c++) {
				int d = threadIdx.x + c * THREADS;

				if (d >= p.latent)
					break;
#pragma unroll
				for (int i = 0; i < ROWS; i++)
					o[i][c] *= x->alpha[i];
				for (int j = 0; j < STEP; j++) {
					float v = keys[j * stride + d];

#pragma unroll
					for (int i = 0; i < ROWS; i++)
						o[i][c] = fmaf(x->p[i][j], v, o[i][c]);
				}
			}
			__syncthreads();
		}
		if (threadIdx.x % STEP == 0) {
			x->m[r] = m;
			x->l[r] = l;
		}
		__syncthreads();
		store(p, s, x, o);
		if (!s.left)
			return;
		mla_next(p, chunk, s);
	}
}

static size_t shared_bytes(const struct kv_attention_args *args)
{
	return sizeof(struct shared) +
	       (size_t)(ROWS + STEP) * (size_t)stride_of(args->latent_dim + args->rope_dim) * sizeof(float);
}

static int chunks_of(const struct kv_attention_args *args)
{
	int64_t n = ((int64_t)args->max_query_len * args->n_heads_q + ROWS - 1) / ROWS;

	return n < 1 ? 1 : n > INT_MAX ? INT_MAX : (int)n;
}

extern "C" size_t kv_mla_any_workspace(const struct kv_attention_args *args)
{
	return kv_mla_workspace(args, ROWS, chunks_of(args));
}

extern "C" void kv_mla_any_refuse(const struct kv_attention_args *args, struct kv_refusals *refusals)
{
	int device = 0, most = 0;
	size_t needed = shared_bytes(args);

	if (cudaGetDevice(&device) != cudaSuccess ||
	    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
		cudaGetLastError();
		kv_refuse(refusals, KV_ATTN_DEVICE, "device: none answers");
	} else if ((size_t)most < needed) {
		kv_refuse(refusals, KV_ATTN_DEVICE,
			  "device: %d bytes of shared memory a thread block, %zu needed", most, needed);
	}
	if (chunks_of(args) > 65535)
		kv_refuse(refusals, KV_ATTN_SIZE, "max_query_len: %d given, too large",
			  args->max_query_len);
	if (args->sm_scale < 0)
		kv_refuse(refusals, KV_ATTN_COMBINATION, "sm_scale: %g given, positive ones are done",
			  (double)args->sm_scale);
	needed = kv_mla_any_workspace(args);
	if (args->workspace && args->workspace_bytes < needed)
		kv_refuse(refusals, KV_ATTN_WORKSPACE, "workspace_bytes: %zu given, %zu needed, or none",
			  args->workspace_bytes, needed);
}

extern "C" int kv_mla_any(const struct kv_attention_args *args)
{
	struct kv_mla_params p;
	int n_chunks, r;

	if (!args->max_query_len)
		return 0;
	n_chunks = kv_mla_describe(args, ROWS, &p);
	r = kv_launch("attention", attend_any, dim3((unsigned)p.groups, (unsigned)n_chunks), THREADS,
		      shared_bytes(args), args->stream, p);
	return r < 0 ? r : kv_mla_merge(&p, n_chunks, args->stream);
}
