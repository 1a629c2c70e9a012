/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dense layers on a GPU, in plain kernels: right and reproducible first.
 *
 *	out[t][r] (+)= sum_i x[t][i] w[r][i]
 *
 * All numbers are f32; weights are widened when they are loaded. What is fused is written so (this
 * file is compiled with -fmad=false).
 *
 * Work of the product: a warp has TILE_W rows of w and NX rows of x. A lane sums elements 4 * lane
 * to 4 * lane + 3 of every 128, ascending; then lanes are added in a butterfly, 16 apart first.
 *That is the whole order of a sum: NX and the grid change which sums share a load, none of their
 *bits.
 */
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <cuda_runtime.h>
#include <kvcached/types.h>

#include "tools/engine/dense.h"
#include "tools/engine/error.h"
#include "tools/engine/rows.h"

#define WARP	     32
#define WARPS	     4 /* of a block of the product */
#define TILE_W	     4
#define TILE_X	     8
#define THREADS	     256
#define UPLOAD_BYTES (8 << 20) /* of widened weights that are copied at a time */

struct kv_matrix {
	float *w; /* device, [n_rows, n_cols] */
	size_t n_rows;
	size_t n_cols;
};

struct dense_cuda {
	struct kv_dense dense; /* first: what callers hold */
	cudaStream_t stream;
	cudaError_t error; /* the first since the last finish() */
	const char *what;  /* it failed at */
};

/* Products */

static __device__ float sum_lanes(float x)
{
	for (int apart = WARP / 2; apart; apart /= 2)
		x += __shfl_xor_sync(~0u, x, apart);
	return x;
}

static __device__ const float4 *row4(const float *rows, size_t i, size_t n, size_t k)
{
	return (const float4 *)(rows + (i < n ? i : n - 1) * k);
}

template <int NX>
static __global__ void multiply(const float *w, size_t n_w, const float *x, size_t n_x, size_t k,
				float *out, bool add)
{
	size_t r0 = ((size_t)blockIdx.x * WARPS + threadIdx.x / WARP) * TILE_W;
	size_t t0 = (size_t)blockIdx.y * NX;
	int lane = threadIdx.x % WARP;
	float sums[NX][TILE_W] = {};

	for (size_t i = lane; i < k / 4; i += WARP) {
		float4 b[TILE_W];

#pragma unroll
		for (int r = 0; r < TILE_W; r++)
			b[r] = row4(w, r0 + r, n_w, k)[i];
#pragma unroll
		for (int t = 0; t < NX; t++) {
			float4 a = row4(x, t0 + t, n_x, k)[i];

#pragma unroll
			for (int r = 0; r < TILE_W; r++) {
				float s = sums[t][r];

				s = fmaf(a.x, b[r].x, s);
				s = fmaf(a.y, b[r].y, s);
				s = fmaf(a.z, b[r].z, s);
				sums[t][r] = fmaf(a.w, b[r].w, s);
			}
		}
	}

#pragma unroll
	for (int t = 0; t < NX; t++) {
#pragma unroll
		for (int r = 0; r < TILE_W; r++) {
			float s = sum_lanes(sums[t][r]);

			/* out[t0 + t][r0 + r] */
			if (lane == 0 && t0 + t < n_x && r0 + r < n_w) {
				float *to = &out[(t0 + t) * n_w + r0 + r];

				*to = add ? *to + s : s;
			}
		}
	}
}

/* Rows */

static __global__ void copy_rows(const float *rows, size_t width, const int32_t *index, float *out)
{
	const float *from = rows + (size_t)index[blockIdx.x] * width;

	for (size_t i = threadIdx.x; i < width; i += THREADS)
		out[blockIdx.x * width + i] = from[i];
}

/* A block has a row: threads sum every THREADS-th square, then halves are added to halves. */
static __global__ void norm_rows(const float *x, const float *weight, size_t width, float eps,
				 float *out)
{
	const float *row = x + blockIdx.x * width;
	__shared__ float sums[THREADS];
	float sum = 0, scale;

	for (size_t i = threadIdx.x; i < width; i += THREADS)
		sum = fmaf(row[i], row[i], sum);
	sums[threadIdx.x] = sum;
	for (int n = THREADS / 2; n; n /= 2) {
		__syncthreads();
		if (threadIdx.x < n)
			sums[threadIdx.x] += sums[threadIdx.x + n];
	}
	__syncthreads();
	scale = 1 / sqrtf(sums[0] / width + eps);
	for (size_t i = threadIdx.x; i < width; i += THREADS)
		out[blockIdx.x * width + i] = row[i] * scale * weight[i];
}

/* A thread has a pair; x [n, n_heads, head_dim], angles [n, n_rot] */
static __global__ void turn_pairs(float *x, const float *angles, size_t n_pairs, uint32_t n_heads,
				  uint32_t head_dim, uint32_t n_rot)
{
	size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
	size_t pair = i % (n_rot / 2), head = i / (n_rot / 2), row = head / n_heads;
	float cosine, sine, a, b, *at;

	if (i >= n_pairs)
		return;

	at = x + head * head_dim + 2 * pair;
	cosine = angles[row * n_rot + 2 * pair];
	sine = angles[row * n_rot + 2 * pair + 1];
	a = at[0];
	b = at[1];
	at[0] = a * cosine - b * sine;
	at[1] = a * sine + b * cosine;
}

static __global__ void gate_elements(float *gate, const float *up, size_t n)
{
	size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;

	if (i < n)
		gate[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
}

/* The host's side */

static struct dense_cuda *from_dense(struct kv_dense *dense)
{
	return (struct dense_cuda *)dense;
}

static int cuda_error(cudaError_t e, const char *what)
{
	return kv_engine_error(-EIO, "CUDA: %s: %s (%s)", what, cudaGetErrorString(e),
			       cudaGetErrorName(e));
}

/* Is it worth queueing more? */
static bool sound(const struct dense_cuda *cuda)
{
	return cuda->error == cudaSuccess;
}

static void note(struct dense_cuda *cuda, cudaError_t e, const char *what)
{
	if (e == cudaSuccess || !sound(cuda))
		return;
	cuda->error = e;
	cuda->what = what;
}

static unsigned blocks_for(size_t n, size_t of)
{
	return (unsigned)((n + of - 1) / of);
}

static void cuda_close(struct kv_dense *dense)
{
	struct dense_cuda *cuda = from_dense(dense);

	if (cuda->stream)
		cudaStreamDestroy(cuda->stream);
	free(cuda);
}

static void *cuda_alloc(struct kv_dense *dense, size_t bytes)
{
	struct dense_cuda *cuda = from_dense(dense);
	cudaError_t e;
	void *p;

	e = cudaMalloc(&p, bytes ? bytes : 1);
	if (e) {
		kv_engine_error(-ENOMEM, "CUDA: cudaMalloc of %zu bytes: %s", bytes,
				cudaGetErrorString(e));
		return NULL;
	}
	note(cuda, cudaMemsetAsync(p, 0, bytes, cuda->stream), "clearing memory");
	return p;
}

static void cuda_release(struct kv_dense *dense, void *p)
{
	cudaFree(p);
}

static const void *cuda_show(struct kv_dense *dense, void *room, const void *from, size_t bytes)
{
	struct dense_cuda *cuda = from_dense(dense);

	if (sound(cuda))
		note(cuda, cudaMemcpyAsync(room, from, bytes, cudaMemcpyHostToDevice, cuda->stream),
		     "copying to the GPU");
	return room;
}

static void cuda_download(struct kv_dense *dense, void *to, const void *from, size_t bytes)
{
	struct dense_cuda *cuda = from_dense(dense);

	if (sound(cuda))
		note(cuda, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, cuda->stream),
		     "copying from the GPU");
}

/* Widens some rows at a time and copies them; the rows are done on return. */
static int upload_rows(const struct kv_tensor *t, float *to)
{
	const struct kv_rows *rows = kv_rows_all()[0];
	size_t n_at_once = UPLOAD_BYTES / (t->n_cols * sizeof(float)) + 1;
	float *buffer = (float *)malloc(n_at_once * t->n_cols * sizeof(*buffer));
	cudaError_t e = cudaSuccess;

	if (!buffer)
		return kv_engine_error(-ENOMEM, "no memory to widen weights");

	for (uint64_t first = 0; !e && first < t->n_rows; first += n_at_once) {
		size_t n = t->n_rows - first < n_at_once ? t->n_rows - first : n_at_once;

		for (size_t i = 0; i < n; i++)
			rows->widen(t->type, (const char *)t->data + (first + i) * t->row_bytes,
				    buffer + i * t->n_cols, t->n_cols);
		e = cudaMemcpy(to + first * t->n_cols, buffer, n * t->n_cols * sizeof(*buffer),
			       cudaMemcpyHostToDevice);
	}
	free(buffer);
	return e ? cuda_error(e, "copying weights to the GPU") : 0;
}

static int cuda_matrix_new(struct kv_dense *dense, const struct kv_tensor *t,
			   struct kv_matrix **ret)
{
	struct kv_matrix *matrix;
	cudaError_t e;
	int r;

	if (t->n_cols % KV_ROWS_MULTIPLE)
		return kv_engine_error(-ENOTSUP,
				       "tensor %.*s has rows of %llu elements, a multiple of %d is "
				       "needed",
				       (int)t->name.len, t->name.at, (unsigned long long)t->n_cols,
				       KV_ROWS_MULTIPLE);

	matrix = (struct kv_matrix *)calloc(1, sizeof(*matrix));
	if (!matrix)
		return kv_engine_error(-ENOMEM, "no memory for a matrix");

	matrix->n_rows = t->n_rows;
	matrix->n_cols = t->n_cols;
	e = cudaMalloc((void **)&matrix->w, t->n_rows * t->n_cols * sizeof(float));
	r = e ? cuda_error(e, "memory for weights") : upload_rows(t, matrix->w);
	if (r < 0) {
		dense->ops->matrix_free(dense, matrix);
		return r;
	}
	*ret = matrix;
	return 0;
}

static void cuda_matrix_free(struct kv_dense *dense, struct kv_matrix *matrix)
{
	if (!matrix)
		return;
	cudaFree(matrix->w);
	free(matrix);
}

static void copy(struct dense_cuda *cuda, const float *rows, size_t width, const int32_t *index,
		 size_t n, float *out)
{
	if (!n || !sound(cuda))
		return;
	copy_rows<<<(unsigned)n, THREADS, 0, cuda->stream>>>(rows, width, index, out);
	note(cuda, cudaGetLastError(), "copying rows");
}

static void cuda_embed(struct kv_dense *dense, const struct kv_matrix *matrix,
		       const int32_t *tokens, size_t n, float *out)
{
	copy(from_dense(dense), matrix->w, matrix->n_cols, tokens, n, out);
}

static void cuda_pick(struct kv_dense *dense, const float *x, size_t width, const int32_t *rows,
		      size_t n, float *out)
{
	copy(from_dense(dense), x, width, rows, n, out);
}

static void cuda_rms_norm(struct kv_dense *dense, const float *x, const float *weight, size_t n,
			  size_t width, float eps, float *out)
{
	struct dense_cuda *cuda = from_dense(dense);

	if (!n || !sound(cuda))
		return;
	norm_rows<<<(unsigned)n, THREADS, 0, cuda->stream>>>(x, weight, width, eps, out);
	note(cuda, cudaGetLastError(), "norm");
}

static void cuda_matmul(struct kv_dense *dense, const float *x, size_t n,
			const struct kv_matmul *jobs, size_t n_jobs)
{
	struct dense_cuda *cuda = from_dense(dense);

	for (size_t i = 0; n && i < n_jobs && sound(cuda); i++) {
		const struct kv_matrix *m = jobs[i].w;
		unsigned n_blocks = blocks_for(m->n_rows, WARPS * TILE_W);

		if (n == 1)
			multiply<1><<<n_blocks, WARPS * WARP, 0, cuda->stream>>>(
				m->w, m->n_rows, x, n, m->n_cols, jobs[i].out, jobs[i].add);
		else
			multiply<TILE_X><<<dim3(n_blocks, blocks_for(n, TILE_X)), WARPS * WARP, 0,
					   cuda->stream>>>(m->w, m->n_rows, x, n, m->n_cols,
							   jobs[i].out, jobs[i].add);
		note(cuda, cudaGetLastError(), "matrix product");
	}
}

static void cuda_rope(struct kv_dense *dense, float *x, const float *angles, size_t n,
		      uint32_t n_heads, uint32_t head_dim, uint32_t n_rot)
{
	struct dense_cuda *cuda = from_dense(dense);
	size_t n_pairs = n * n_heads * (n_rot / 2);

	if (!n_pairs || !sound(cuda))
		return;
	turn_pairs<<<blocks_for(n_pairs, THREADS), THREADS, 0, cuda->stream>>>(
		x, angles, n_pairs, n_heads, head_dim, n_rot);
	note(cuda, cudaGetLastError(), "positions");
}

static void cuda_silu_multiply(struct kv_dense *dense, float *gate, const float *up, size_t n,
			       size_t width)
{
	struct dense_cuda *cuda = from_dense(dense);

	if (!n || !sound(cuda))
		return;
	gate_elements<<<blocks_for(n * width, THREADS), THREADS, 0, cuda->stream>>>(gate, up,
										    n * width);
	note(cuda, cudaGetLastError(), "gates");
}

static int cuda_record(struct kv_dense *dense)
{
	cudaError_t e = cudaStreamBeginCapture(from_dense(dense)->stream,
					       cudaStreamCaptureModeThreadLocal);

	return e ? cuda_error(e, "recording a graph") : 0;
}

static int cuda_recorded(struct kv_dense *dense, void **ret_graph)
{
	struct dense_cuda *cuda = from_dense(dense);
	cudaGraphExec_t exec = NULL;
	cudaGraph_t graph = NULL;
	cudaError_t e;

	note(cuda, cudaStreamEndCapture(cuda->stream, &graph), "recording a graph");
	if (sound(cuda))
		note(cuda, cudaGraphInstantiate(&exec, graph, 0), "making a graph");
	if (graph)
		cudaGraphDestroy(graph);
	e = cuda->error;
	cuda->error = cudaSuccess;
	if (e) {
		cudaGetLastError();
		return cuda_error(e, cuda->what);
	}
	*ret_graph = exec;
	return 0;
}

static void cuda_replay(struct kv_dense *dense, void *graph)
{
	struct dense_cuda *cuda = from_dense(dense);

	if (sound(cuda))
		note(cuda, cudaGraphLaunch((cudaGraphExec_t)graph, cuda->stream), "a step's graph");
}

static void cuda_graph_free(struct kv_dense *dense, void *graph)
{
	if (graph)
		cudaGraphExecDestroy((cudaGraphExec_t)graph);
}

static void *cuda_alloc_host(struct kv_dense *dense, size_t bytes)
{
	cudaError_t e;
	void *p;

	e = cudaHostAlloc(&p, bytes ? bytes : 1, cudaHostAllocDefault);
	if (!e)
		return p;
	kv_engine_error(-ENOMEM, "CUDA: cudaHostAlloc of %zu bytes: %s", bytes,
			cudaGetErrorString(e));
	return NULL;
}

static void cuda_release_host(struct kv_dense *dense, void *p)
{
	cudaFreeHost(p);
}

static int cuda_finish(struct kv_dense *dense)
{
	struct dense_cuda *cuda = from_dense(dense);
	cudaError_t e;

	note(cuda, cudaStreamSynchronize(cuda->stream), "waiting for the GPU");
	e = cuda->error;
	cuda->error = cudaSuccess;
	return e ? cuda_error(e, cuda->what) : 0;
}

static const struct kv_dense_ops ops = {
	cuda_close,	 cuda_alloc,	   cuda_release,       cuda_show,   cuda_download,
	cuda_matrix_new, cuda_matrix_free, cuda_embed,	       cuda_pick,   cuda_rms_norm,
	cuda_matmul,	 cuda_rope,	   cuda_silu_multiply, cuda_record, cuda_recorded,
	cuda_replay,	 cuda_graph_free,  cuda_alloc_host,    cuda_release_host, cuda_finish,
};

/* "GPU-" and the bytes in hex, grouped 4-2-2-2-6 */
static void write_uuid(const cudaUUID_t *uuid, char ret[48])
{
	int n = snprintf(ret, 48, "GPU");

	for (int i = 0; i < 16; i++) {
		bool group = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;

		n += snprintf(ret + n, 48 - n, "%s%02x", group ? "-" : "",
			      (unsigned char)uuid->bytes[i]);
	}
}

static int find_device(const char *uuid, int *ret)
{
	struct cudaDeviceProp properties;
	cudaError_t e;
	char name[48];
	int n = 0;

	e = cudaGetDeviceCount(&n);
	if (e && e != cudaErrorNoDevice && e != cudaErrorInsufficientDriver)
		return cuda_error(e, "counting GPUs");

	for (int i = 0; i < n; i++) {
		e = cudaGetDeviceProperties(&properties, i);
		if (e)
			return cuda_error(e, "looking at a GPU");
		write_uuid(&properties.uuid, name);
		if (!strcmp(name, uuid)) {
			*ret = i;
			return 0;
		}
	}
	return kv_engine_error(-ENODEV, "GPU %s isn't visible to this process, which sees %d", uuid,
			       n);
}

extern "C" int kv_dense_cuda(const char *uuid, struct kv_dense **ret)
{
	struct dense_cuda *cuda;
	int device, r;
	cudaError_t e;

	r = find_device(uuid, &device);
	if (r < 0)
		return r;
	e = cudaSetDevice(device);
	if (e)
		return cuda_error(e, "choosing a GPU");

	cuda = (struct dense_cuda *)calloc(1, sizeof(*cuda));
	if (!cuda)
		return kv_engine_error(-ENOMEM, "no memory for the dense layers");
	e = cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking);
	if (e) {
		free(cuda);
		return cuda_error(e, "making a stream");
	}
	cuda->dense.ops = &ops;
	cuda->dense.device = KV_DEVICE_CUDA;
	cuda->dense.stream = cuda->stream;
	*ret = &cuda->dense;
	return 0;
}
