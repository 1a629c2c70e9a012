/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parts of latent decode to the result, and what both kernels of it share on the host.
 *
 *	M = max m_i; out = sum 2^(m_i - M) o_i / sum 2^(m_i - M) l_i; lse = ln 2 (M + log2 sum)
 *
 * A thread block takes rows of a request that lies in several parts. Of few parts, or where there are
 * many rows, a warp takes a whole row; else the thread block 128 columns of one: a warp a quarter of the
 * parts, a lane 4 columns.
 * It is launched while the parts are still calculated, so that its start costs nothing, and waits for
 * them. The order of sums is that of the parts.
 */
#include "kernels/device/launch.cuh"
#include "kernels/device/mma.cuh"
#include "kernels/mla_plan.cuh"

#define THREADS	 128
#define COLUMNS	 128
#define MAX_PARTS 1024
#define LOADS	 8
#define FEW	 4 /* parts that a warp adds as fast as a thread block */

__device__ static void merge_row(const struct kv_mla_params &p, const struct mla_part &s, int chunk,
				 int part0, int n, int row, int d0)
{
	__shared__ float weights[MAX_PARTS];
	__shared__ float sums[THREADS / KV_WARP][COLUMNS];
	__shared__ float tops[THREADS / KV_WARP], alls[THREADS / KV_WARP];
	int lane = threadIdx.x % KV_WARP, warp = threadIdx.x / KV_WARP, d = d0 + 4 * lane;
	float top = -INFINITY, all = 0;
	float4 o = make_float4(0, 0, 0, 0);

	for (int i = threadIdx.x; i < n; i += THREADS) {
		float2 x = __ldcg(mla_slot_stats(p, mla_slot(p, part0 + i, chunk, i == 0)) + row);

		weights[i] = x.x;
		top = fmaxf(top, x.x);
	}
	top = kv_warp_max(top);
	if (lane == 0)
		tops[warp] = top;
	__syncthreads();
#pragma unroll
	for (int i = 0; i < THREADS / KV_WARP; i++)
		top = fmaxf(top, tops[i]);
	for (int i = threadIdx.x; i < n; i += THREADS) {
		float2 x = __ldcg(mla_slot_stats(p, mla_slot(p, part0 + i, chunk, i == 0)) + row);
		float w = x.y > 0 ? kv_exp2(x.x - top) : 0;

		weights[i] = w;
		all = fmaf(w, x.y, all);
	}
	all = kv_warp_add(all);
	if (lane == 0)
		alls[warp] = all;
	__syncthreads();
	all = 0;
#pragma unroll
	for (int i = 0; i < THREADS / KV_WARP; i++)
		all += alls[i];
	if (d < p.latent) {
		for (int i0 = warp; i0 < n; i0 += LOADS * THREADS / KV_WARP) {
			float4 x[LOADS];

#pragma unroll
			for (int j = 0; j < LOADS; j++) {
				int i = i0 + j * THREADS / KV_WARP;

				x[j] = make_float4(0, 0, 0, 0);
				if (i < n)
					x[j] = __ldcg((const float4 *)(mla_slot(p, part0 + i, chunk,
										i == 0) +
								       (int64_t)row * p.latent + d));
			}
#pragma unroll
			for (int j = 0; j < LOADS; j++) {
				int i = i0 + j * THREADS / KV_WARP;
				float w = i < n ? weights[i] : 0;

				if (w == 0)
					continue;
				o.x = fmaf(w, x[j].x, o.x);
				o.y = fmaf(w, x[j].y, o.y);
				o.z = fmaf(w, x[j].z, o.z);
				o.w = fmaf(w, x[j].w, o.w);
			}
		}
	}
	*(float4 *)&sums[warp][4 * lane] = o;
	__syncthreads();
	d = d0 + threadIdx.x;
	row += s.row0;

	int64_t token = s.start + row / p.n_heads;
	int head = row % p.n_heads;

	if (d < p.latent) {
		float x = 0;

#pragma unroll
		for (int i = 0; i < THREADS / KV_WARP; i++)
			x += sums[i][threadIdx.x];
		kv_element_store(p.out, token * p.out_stride + (int64_t)head * p.latent + d, p.out_dtype,
				 all > 0 ? x * p.v_scale / all : 0);
	}
	if (p.lse && d == 0)
		p.lse[token * p.lse_stride + head * p.lse_head_stride] =
			all > 0 ? (top + log2f(all)) * 0.693147180559945f : -INFINITY;
	__syncthreads(); /* before the next row's weights */
}

/* A row of few parts, by a warp. */
__device__ static void merge_few(const struct kv_mla_params &p, const struct mla_part &s, int chunk,
				 int part0, int n, int row)
{
	int lane = threadIdx.x % KV_WARP, all_row = s.row0 + row, head = all_row % p.n_heads;
	int64_t token = s.start + all_row / p.n_heads;
	float2 x = make_float2(-INFINITY, 0);
	float top, all, w;

	if (lane < n)
		x = __ldcg(mla_slot_stats(p, mla_slot(p, part0 + lane, chunk, lane == 0)) + row);
	top = kv_warp_max(x.x);
	w = x.y > 0 ? kv_exp2(x.x - top) : 0;
	all = kv_warp_add(w * x.y);
	for (int d0 = 0; d0 < p.latent; d0 += 4 * COLUMNS) {
		float4 o[4] = {};

		for (int i0 = 0; i0 < n; i0 += 2) {
			float4 y[2][4];

#pragma unroll
			for (int i = 0; i < 2; i++) {
				const float *slot = mla_slot(p, part0 + i0 + i, chunk, i0 + i == 0) +
						    (int64_t)row * p.latent;

#pragma unroll
				for (int j = 0; j < 4; j++) {
					int d = d0 + j * COLUMNS + 4 * lane;

					y[i][j] = make_float4(0, 0, 0, 0);
					if (i0 + i < n && d < p.latent)
						y[i][j] = __ldcg((const float4 *)(slot + d));
				}
			}
#pragma unroll
			for (int i = 0; i < 2; i++) {
				float f = __shfl_sync(KV_ALL_LANES, w, (i0 + i) % KV_WARP);

				if (i0 + i >= n || f == 0)
					continue;
#pragma unroll
				for (int j = 0; j < 4; j++) {
					o[j].x = fmaf(f, y[i][j].x, o[j].x);
					o[j].y = fmaf(f, y[i][j].y, o[j].y);
					o[j].z = fmaf(f, y[i][j].z, o[j].z);
					o[j].w = fmaf(f, y[i][j].w, o[j].w);
				}
			}
		}
		for (int j = 0; j < 4; j++) {
			int d = d0 + j * COLUMNS + 4 * lane;
			int64_t to = token * p.out_stride + (int64_t)head * p.latent + d;
			float f = all > 0 ? p.v_scale / all : 0;

			if (d >= p.latent)
				continue;
			kv_element_store(p.out, to, p.out_dtype, o[j].x * f);
			kv_element_store(p.out, to + 1, p.out_dtype, o[j].y * f);
			kv_element_store(p.out, to + 2, p.out_dtype, o[j].z * f);
			kv_element_store(p.out, to + 3, p.out_dtype, o[j].w * f);
		}
	}
	if (p.lse && lane == 0)
		p.lse[token * p.lse_stride + head * p.lse_head_stride] =
			all > 0 ? (top + log2f(all)) * 0.693147180559945f : -INFINITY;
}

/* Until the kernel before is done, and what it stored can be read. */
__device__ static void wait_for_parts(void)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__global__ void __launch_bounds__(THREADS) merge_parts(const __grid_constant__ struct kv_mla_params p)
{
	int chunk = blockIdx.y, slices = (p.latent + COLUMNS - 1) / COLUMNS;
	struct mla_part s;
	int at, each;
	bool waited = false;

	for (int b = blockIdx.x; b < p.n_seqs; b += gridDim.x) {
		int part0, n;

		mla_load(p, b, chunk, s);
		if (!s.n)
			continue;
		each = mla_each(p, mla_total(p, chunk, b, &at));
		part0 = at / each;
		n = (at + s.n - 1) / each - part0 + 1;
		if (n == 1)
			continue;
		if (!waited)
			wait_for_parts();
		waited = true;
		if (n <= FEW || (n <= KV_WARP && s.n_rows * slices > (int)gridDim.z)) {
			for (int row = blockIdx.z * (THREADS / KV_WARP) + threadIdx.x / KV_WARP;
			     row < s.n_rows; row += gridDim.z * (THREADS / KV_WARP))
				merge_few(p, s, chunk, part0, n, row);
			continue;
		}
		for (int i = blockIdx.z; i < s.n_rows * slices; i += gridDim.z)
			merge_row(p, s, chunk, part0, n, i / slices, i % slices * COLUMNS);
	}
	if (!waited) /* this kernel ends after the one before */
		wait_for_parts();
}

int kv_mla_merge(const struct kv_mla_params *p, int n_chunks, void *stream)
{
	int units = p->n_seqs < 128 ? p->n_seqs : 128;
	int slices = p->rows * ((p->latent + COLUMNS - 1) / COLUMNS);
	int z = 1056 / (units * n_chunks);
	struct kv_mla_params params = *p;
	void *args[] = {&params};
	cudaLaunchAttribute early = {};
	cudaLaunchConfig_t config = {};
	cudaError_t e;

	if (p->groups == 1)
		return 0;
	z = z < 1 ? 1 : z > slices ? slices : z;
	early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
	early.val.programmaticStreamSerializationAllowed = 1;
	config.gridDim = dim3((unsigned)units, (unsigned)n_chunks, (unsigned)z);
	config.blockDim = dim3(THREADS);
	config.stream = (cudaStream_t)stream;
	config.attrs = &early;
	config.numAttrs = 1;
	e = cudaLaunchKernelExC(&config, (const void *)merge_parts, args);
	if (e == cudaSuccess)
		return 0;
	cudaGetLastError();
	return kv_error(-EIO, "attention: CUDA: %s (%s)", cudaGetErrorName(e), cudaGetErrorString(e));
}

static int multiprocessors(void)
{
	int device = 0, n = 0;

	if (cudaGetDevice(&device) != cudaSuccess ||
	    cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
		cudaGetLastError();
	return n;
}

int kv_mla_groups(int n_chunks)
{
	int n = multiprocessors() / n_chunks;

	n = n > MAX_PARTS ? MAX_PARTS : n;
	return n < 1 ? 1 : n;
}

size_t kv_mla_workspace(const struct kv_attention_args *args, int rows, int n_chunks)
{
	int n = multiprocessors(); /* at least chunks times groups of any call */

	return (size_t)(n > n_chunks ? n : n_chunks) * 2 * (size_t)rows *
	       (size_t)(args->latent_dim + 4) * sizeof(float);
}

int kv_mla_describe(const struct kv_attention_args *args, int rows, struct kv_mla_params *p)
{
	int n_chunks = (int)(((int64_t)args->max_query_len * args->n_heads_q + rows - 1) / rows);

	memset(p, 0, sizeof(*p));
	p->q = args->q;
	p->out = args->out;
	p->lse = args->lse;
	p->query_start_loc = args->query_start_loc;
	p->seq_lens = args->seq_lens;
	p->block_table = args->block_table;
	p->sums = (float *)args->workspace;
	p->k = args->k;
	p->q_stride = args->q_token_stride;
	p->out_stride = args->out_token_stride;
	p->lse_stride = args->lse_token_stride;
	p->lse_head_stride = args->lse_head_stride;
	p->dtype = args->dtype;
	p->out_dtype = args->out_dtype;
	p->n_seqs = args->n_seqs;
	p->n_tokens = args->n_tokens;
	p->n_heads = args->n_heads_q;
	p->latent = args->latent_dim;
	p->rope = args->rope_dim;
	p->rows = rows;
	p->groups = args->workspace ? kv_mla_groups(n_chunks) : 1;
	p->table_width = args->table_width;
	p->causal = args->causal;
	p->cp_size = args->cp_size;
	p->cp_rank = args->cp_rank;
	p->cp_interleave = args->cp_interleave;
	p->key_begin = args->key_begin;
	p->key_end = args->key_end ? args->key_end : INT32_MAX;
	p->scale = args->sm_scale * args->k.scale * 1.44269504088896f;
	p->v_scale = args->v.scale;
	return n_chunks;
}
