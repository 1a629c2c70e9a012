/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Paged decode attention, timed beside the read rate of the memory.
 *
 * A case is a head shape, a context, a batch, a page size, types and a layout. Its pool is random;
 * R block tables of disjoint pages in random order touch at least 256 MiB, so that nothing is warm
 * in the L2. First two requests are held against float64 on the values that are stored: a wrong
 * case has no time. Then ceiling, case, ceiling: a graph of R calls, replayed, the median; the
 * ceiling is a plain read of the same memory.
 */
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <getopt.h>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <cuda_runtime.h>

#include "include/internal/error.h"
#include "kernels/attention.h"
#include "kernels/attention_split.h"
#include "kernels/dtype.h"
#include "kernels/view.h"

#define ROTATED (256LL << 20) /* bytes that the calls of a graph touch at least */
#define MAX_R	64

#define cuda_ok(call)                                                                 \
	do {                                                                          \
		cudaError_t e_ = (call);                                              \
		if (e_ != cudaSuccess) {                                              \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, \
				cudaGetErrorString(e_));                              \
			exit(1);                                                      \
		}                                                                     \
	} while (0)

struct shape {
	const char *name;
	int heads_q, heads_kv, dim;
};

static const struct shape shapes[] = {
	{"32/8/128", 32, 8, 128}, {"8/1/128", 8, 1, 128}, {"64/8/64", 64, 8, 64},
	{"16/2/256", 16, 2, 256}, {"32/8/96", 32, 8, 96}};

struct options {
	std::vector<std::string> shapes{"32/8/128", "8/1/128", "64/8/64"};
	std::vector<std::string> dtypes{"bf16"};
	std::vector<std::string> layouts{"nhd"};
	std::vector<std::string> points; /* CONTEXTxBATCH; overrides the two below */
	std::vector<int> batches{1, 8, 32, 128, 256};
	std::vector<int> contexts{1024, 4096, 16384, 65536};
	std::vector<int> pages{16};
	std::vector<int> heads{0}, sets{0}, min_tiles{0}, parts{0};
	std::string backend = "split", ragged, peers;
	bool json = false;
	int q_len = 1, window = -1, near = 0;
	double seconds = 0.03; /* of a case */
};

struct bench_case {
	struct shape shape;
	std::string dtype, layout;
	int context, batch, page, heads, sets, min_tiles, parts;
};

static __device__ uint32_t hash(uint64_t x)
{
	x ^= x >> 33;
	x *= 0xff51afd7ed558ccdULL;
	x ^= x >> 33;
	x *= 0xc4ceb9fe1a85ec53ULL;
	return (uint32_t)(x >> 32);
}

/* Uniform in [-2, 2). */
static __global__ void fill(void *to, int64_t n, int dtype, uint64_t seed)
{
	for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
	     i += (int64_t)gridDim.x * blockDim.x)
		kv_element_store(to, i, dtype, (float)(int32_t)hash(seed + (uint64_t)i) * 0x1p-30f);
}

static __global__ void __launch_bounds__(512) read_all(const uint4 *from, int64_t n, uint32_t *sink)
{
	uint32_t x = 0;
	int64_t i = blockIdx.x * (int64_t)blockDim.x * 8 + threadIdx.x;

	for (; i < n; i += (int64_t)gridDim.x * blockDim.x * 8) {
		uint4 u[8];

#pragma unroll
		for (int j = 0; j < 8; j++)
			u[j] = i + j * blockDim.x < n ? __ldcs(from + i + j * blockDim.x)
						      : make_uint4(0, 0, 0, 0);
#pragma unroll
		for (int j = 0; j < 8; j++)
			x ^= u[j].x ^ u[j].y ^ u[j].z ^ u[j].w;
	}
	if (x == 0x12345678)
		*sink = x;
}

/* Row (query token, head) in double: blockIdx = (head, query), one request. */
static __global__ void answer(struct kv_attention_args a, int b, double *x, double *out,
			      double *ret_lse)
{
	__shared__ double red[256];
	int h = blockIdx.x, i = blockIdx.y, group = a.n_heads_q / a.k.n_heads;
	int start = a.query_start_loc[b], q_len = a.query_start_loc[b + 1] - start;
	int len = a.seq_lens[b];
	struct kv_span span = kv_span_seen(len - q_len + i, len, a.causal, a.window_left);
	const int32_t *table = a.block_table + (int64_t)b * a.table_width;
	double m = -DBL_MAX, l = 0;
	int64_t row = (int64_t)i * a.n_heads_q + h;

	x += row * len;
	for (int64_t j = span.lo + threadIdx.x; j < span.hi; j += blockDim.x) {
		const char *k =
			(const char *)a.k.base + kv_view_offset(&a.k, table[j / a.k.block_tokens],
								j % a.k.block_tokens, h / group);
		double s = 0;

		for (int d = 0; d < a.k.head_dim; d++)
			s += (double)kv_element_load(
				     a.q,
				     ((int64_t)(start + i) * a.n_heads_q + h) * a.k.head_dim + d,
				     a.dtype) *
			     (double)kv_element_load(k, d, a.k.dtype);
		x[j] = s * (double)a.k.scale / sqrt((double)a.k.head_dim);
		m = fmax(m, x[j]);
	}
	red[threadIdx.x] = m;
	__syncthreads();
	for (int t = 0; t < (int)blockDim.x; t++)
		m = fmax(m, red[t]);
	__syncthreads();
	for (int64_t j = span.lo + threadIdx.x; j < span.hi; j += blockDim.x) {
		x[j] = exp(x[j] - m);
		l += x[j];
	}
	red[threadIdx.x] = l;
	__syncthreads();
	l = 0;
	for (int t = 0; t < (int)blockDim.x; t++)
		l += red[t];
	if (threadIdx.x == 0)
		ret_lse[row] = m + log(l);
	/* two threads an element: even and odd keys */
	__syncthreads();
	int d = threadIdx.x % a.v.head_dim, part = threadIdx.x / a.v.head_dim;
	int parts = blockDim.x / a.v.head_dim;
	double o = 0;

	for (int64_t j = span.lo + part; j < span.hi; j += parts) {
		const char *v =
			(const char *)a.v.base + kv_view_offset(&a.v, table[j / a.v.block_tokens],
								j % a.v.block_tokens, h / group);

		o += x[j] * (double)kv_element_load(v, d, a.v.dtype);
	}
	red[threadIdx.x] = o;
	__syncthreads();
	if (part == 0) {
		for (int t = 1; t < parts; t++)
			o += red[t * a.v.head_dim + d];
		out[row * a.v.head_dim + d] = o / l * (double)a.v.scale;
	}
}

static int dtype_of(const std::string &name)
{
	return name == "bf16" ? KV_BF16 : name == "f16" ? KV_F16 : KV_F8_E4M3;
}

struct memory {
	char *pool;
	size_t pool_bytes;
	int filled_dtype;
	uint32_t *sink;
	cudaStream_t stream;
};

static double time_graph(cudaGraphExec_t graph, cudaStream_t stream, int calls, double seconds)
{
	cudaEvent_t a, b;
	std::vector<double> times;
	double spent = 0;
	float ms;

	cuda_ok(cudaEventCreate(&a));
	cuda_ok(cudaEventCreate(&b));
	cuda_ok(cudaGraphLaunch(graph, stream));
	cuda_ok(cudaStreamSynchronize(stream));
	while (times.size() < 5 || (spent < seconds && times.size() < 200)) {
		cuda_ok(cudaEventRecord(a, stream));
		cuda_ok(cudaGraphLaunch(graph, stream));
		cuda_ok(cudaEventRecord(b, stream));
		cuda_ok(cudaEventSynchronize(b));
		cuda_ok(cudaEventElapsedTime(&ms, a, b));
		times.push_back(ms * 1e-3 / calls);
		spent += ms * 1e-3;
	}
	cuda_ok(cudaEventDestroy(a));
	cuda_ok(cudaEventDestroy(b));
	std::sort(times.begin(), times.end());
	return times[times.size() / 2];
}

/* Bytes a second of a plain read, over a part of the pool that no cache holds. */
static double ceiling(struct memory *m)
{
	int64_t bytes = std::min<int64_t>((int64_t)m->pool_bytes, 4LL << 30);
	cudaGraphExec_t exec;
	cudaGraph_t graph;
	double t;

	cuda_ok(cudaStreamBeginCapture(m->stream, cudaStreamCaptureModeGlobal));
	read_all<<<132 * 4, 512, 0, m->stream>>>((const uint4 *)m->pool, bytes / 16, m->sink);
	cuda_ok(cudaStreamEndCapture(m->stream, &graph));
	cuda_ok(cudaGraphInstantiate(&exec, graph, 0));
	t = time_graph(exec, m->stream, 1, 0);
	cuda_ok(cudaGraphExecDestroy(exec));
	cuda_ok(cudaGraphDestroy(graph));
	return (double)bytes / t;
}

template <typename T> static T *upload(const std::vector<T> &from)
{
	T *p;

	cuda_ok(cudaMalloc(&p, from.size() * sizeof(T)));
	cuda_ok(cudaMemcpy(p, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
	return p;
}

/* Relative error of requests 0 and the last against float64. */
static double error_of(const struct kv_attention_args &a, const std::vector<int> &lens, int q_len)
{
	double error = 0, norm = 0, lse_error = 0;
	int rows = q_len * a.n_heads_q, dim = a.v.head_dim;

	for (int b : {0, a.n_seqs - 1}) {
		std::vector<double> right((size_t)rows * dim), right_lse(rows);
		std::vector<uint16_t> out((size_t)rows * dim);
		std::vector<float> lse(rows);
		double *x, *o, *l;

		cuda_ok(cudaMalloc(&x, (size_t)rows * lens[b] * sizeof(double)));
		cuda_ok(cudaMalloc(&o, right.size() * sizeof(double)));
		cuda_ok(cudaMalloc(&l, rows * sizeof(double)));
		answer<<<dim3(a.n_heads_q, q_len), 256>>>(a, b, x, o, l);
		cuda_ok(cudaDeviceSynchronize());
		cuda_ok(cudaMemcpy(right.data(), o, right.size() * 8, cudaMemcpyDeviceToHost));
		cuda_ok(cudaMemcpy(right_lse.data(), l, rows * 8, cudaMemcpyDeviceToHost));
		cuda_ok(cudaMemcpy(out.data(), (uint16_t *)a.out + (int64_t)b * rows * dim,
				   out.size() * 2, cudaMemcpyDeviceToHost));
		cuda_ok(cudaMemcpy(lse.data(), a.lse + (int64_t)b * rows, rows * 4,
				   cudaMemcpyDeviceToHost));
		for (size_t i = 0; i < out.size(); i++) {
			double y = kv_element_load(out.data(), (int64_t)i, a.dtype);

			error += (y - right[i]) * (y - right[i]);
			norm += right[i] * right[i];
		}
		for (int i = 0; i < rows; i++)
			lse_error = fmax(lse_error, fabs(lse[i] - right_lse[i]));
		cuda_ok(cudaFree(x));
		cuda_ok(cudaFree(o));
		cuda_ok(cudaFree(l));
	}
	error = sqrt(error / norm);
	return lse_error <= 2e-3 ? error : NAN;
}

/* Mean @context: lengths of an exponential law, none above 4 times the mean, or of a file. */
static std::vector<int> lengths_of(const struct options &o, const struct bench_case &c)
{
	std::vector<int> lens(c.batch, c.context);
	std::mt19937_64 random(7);

	if (o.ragged.empty())
		return lens;
	if (o.ragged == "random") {
		for (int &n : lens) {
			double u = (double)(random() >> 11) * 0x1p-53;

			n = (int)std::min(4.0 * c.context, 1 - c.context * log(1 - u));
		}
		return lens;
	}
	FILE *file = fopen(o.ragged.c_str(), "r");

	if (!file) {
		perror(o.ragged.c_str());
		exit(2);
	}
	for (int &n : lens) {
		if (fscanf(file, "%d", &n) != 1) {
			rewind(file);
			if (fscanf(file, "%d", &n) != 1)
				exit(2);
		}
	}
	fclose(file);
	return lens;
}

/* Best peer's time in us, from a file of lines "shape context batch dtype us name"; 0 if none. */
static double peer_of(const struct options &o, const struct bench_case &c, const char *kind)
{
	char shape[32], dtype[16], name[64];
	int context, batch;
	double us, found = 0;
	FILE *file = o.peers.empty() ? NULL : fopen(o.peers.c_str(), "r");

	if (!file)
		return 0;
	while (fscanf(file, "%31s %d %d %15s %lf %63s", shape, &context, &batch, dtype, &us,
		      name) == 6)
		if (c.shape.name == std::string(shape) && context == c.context &&
		    batch == c.batch && std::string(dtype) == kind)
			found = us;
	fclose(file);
	return found;
}

/* Returns the error text of a case that could not be timed, or "". */
static std::string run(const struct options &o, const struct bench_case &c, struct memory *m)
{
	const struct kv_attn_backend *backend = kv_attn_find(o.backend.c_str(), KV_DEVICE_CUDA);
	int kv_dtype = dtype_of(c.dtype), dim = c.shape.dim;
	int q_dtype = kv_dtype == KV_F16 ? KV_F16 : KV_BF16;
	std::vector<int> lens = lengths_of(o, c);
	int64_t row = dim * (int64_t)kv_dtype_bytes(kv_dtype);
	int64_t half = row * c.shape.heads_kv * c.page; /* bytes of K of a block */
	int64_t tokens = std::accumulate(lens.begin(), lens.end(), (int64_t)0);
	int max_len = *std::max_element(lens.begin(), lens.end());
	int width = (max_len + c.page - 1) / c.page;
	int64_t n_ids = 0, bytes = 0;
	struct kv_attention_args a = {};
	bool flat = c.layout.find("flat") != std::string::npos;

	for (int n : lens) {
		n_ids += (n + c.page - 1) / c.page;
		bytes += std::min(n, o.window >= 0 ? o.window + o.q_len : n) * row *
			 c.shape.heads_kv * 2;
	}
	int64_t r = std::min<int64_t>(MAX_R, (ROTATED + bytes - 1) / bytes);
	int64_t n_blocks = n_ids * r;

	if (n_blocks * half * 2 > (int64_t)m->pool_bytes)
		return "pool too small";
	if (m->filled_dtype != kv_dtype) {
		fill<<<132 * 8, 512>>>(m->pool,
				       (int64_t)m->pool_bytes / (int64_t)kv_dtype_bytes(kv_dtype),
				       kv_dtype, 1);
		cuda_ok(cudaDeviceSynchronize());
		m->filled_dtype = kv_dtype;
	}

	std::vector<int32_t> ids(n_blocks), table((size_t)r * c.batch * width, 0), loc(c.batch + 1);
	std::mt19937_64 random(3);
	std::iota(ids.begin(), ids.end(), 0);
	std::shuffle(ids.begin(), ids.end(), random);
	int64_t next = 0;

	for (int64_t i = 0; i < r; i++)
		for (int b = 0; b < c.batch; b++)
			for (int j = 0; j * c.page < lens[b]; j++)
				table[(size_t)((i * c.batch + b) * width + j)] = ids[next++];
	for (int b = 0; b <= c.batch; b++)
		loc[b] = b * o.q_len;

	int64_t n_q = (int64_t)c.batch * o.q_len * c.shape.heads_q * dim;
	int32_t *table_gpu = upload(table), *loc_gpu = upload(loc);
	int32_t *lens_gpu = upload(std::vector<int32_t>(lens.begin(), lens.end()));
	char *q, *out;
	float *lse;

	cuda_ok(cudaMalloc(&q, (size_t)(n_q * 2 * r)));
	cuda_ok(cudaMalloc(&out, (size_t)(n_q * 2 * r)));
	cuda_ok(cudaMalloc(&lse, (size_t)(n_q / dim * 4 * r)));
	fill<<<132, 512>>>(q, n_q * r, q_dtype, 99);
	cuda_ok(cudaMemset(out, 0xff, (size_t)(n_q * 2 * r)));
	cuda_ok(cudaMemset(lse, 0xff, (size_t)(n_q / dim * 4 * r)));

	a.size = sizeof(a);
	a.device = KV_DEVICE_CUDA;
	a.dtype = q_dtype;
	a.n_seqs = c.batch;
	a.n_tokens = c.batch * o.q_len;
	a.n_heads_q = c.shape.heads_q;
	a.max_query_len = o.q_len;
	a.max_seq_len = max_len;
	a.table_width = width;
	a.query_start_loc = loc_gpu;
	a.seq_lens = lens_gpu;
	a.k.base = m->pool;
	a.k.block_tokens = c.page;
	a.k.n_heads = c.shape.heads_kv;
	a.k.head_dim = dim;
	a.k.dtype = kv_dtype;
	a.k.block_stride = flat ? 2 * half : half;
	a.k.token_stride = row * c.shape.heads_kv;
	a.k.head_stride = row;
	if (c.layout.find("hnd") != std::string::npos) {
		a.k.token_stride = row;
		a.k.head_stride = row * c.page;
	}
	a.k.scale = kv_dtype == KV_F8_E4M3 ? 0.5f : 1;
	a.v = a.k;
	a.v.base = m->pool + (flat ? half : half * n_blocks);
	a.v.scale = kv_dtype == KV_F8_E4M3 ? 0.25f : 1;
	a.window_left = o.window;
	a.causal = 1;
	a.stream = m->stream;
	kv_split_tuning = {c.heads, c.sets, c.min_tiles, c.parts, o.near};
	a.workspace_bytes = backend->workspace_bytes ? backend->workspace_bytes(&a) : 0;
	cuda_ok(cudaMalloc(&a.workspace, a.workspace_bytes + 1));
	cuda_ok(cudaMemset(a.workspace, 0, a.workspace_bytes + 1));
	cuda_ok(cudaDeviceSynchronize());

	cudaGraphExec_t exec;
	cudaGraph_t graph;
	std::string failed;

	cuda_ok(cudaStreamBeginCapture(m->stream, cudaStreamCaptureModeGlobal));
	for (int64_t i = 0; i < r && failed.empty(); i++) {
		a.q = q + i * n_q * 2;
		a.out = out + i * n_q * 2;
		a.lse = lse + i * n_q / dim;
		a.block_table = table_gpu + i * c.batch * width;
		if (kv_attention_on(backend, &a) < 0)
			failed = kv_error_text();
	}
	cuda_ok(cudaStreamEndCapture(m->stream, &graph));
	if (failed.empty()) {
		double error, us, before, after, ratio, peer = peer_of(o, c, c.dtype.c_str());
		double tolerance = q_dtype == KV_F16 ? 1e-3 : 5e-3;

		cuda_ok(cudaGraphInstantiate(&exec, graph, 0));
		cuda_ok(cudaGraphLaunch(exec, m->stream));
		cuda_ok(cudaStreamSynchronize(m->stream));
		error = error_of(a, lens, o.q_len);
		if (!(error <= tolerance)) {
			char text[64];

			snprintf(text, sizeof(text), "WRONG: off by %g", error);
			failed = text;
		} else {
			before = ceiling(m);
			us = time_graph(exec, m->stream, (int)r, o.seconds) * 1e6;
			after = ceiling(m);
			ratio = (double)bytes / us * 1e6 / ((before + after) / 2);
			if (o.json)
				printf("{\"shape\":\"%s\",\"context\":%d,\"batch\":%d,\"page\":%d,"
				       "\"dtype\":\"%s\",\"layout\":\"%s\",\"ragged\":%s,\"heads\":"
				       "%d,"
				       "\"min_tiles\":%d,\"parts\":%d,\"us\":%.3f,\"bytes\":%lld,"
				       "\"read\":%.4g,\"ceiling_before\":%.4g,\"ceiling_after\":%."
				       "4g,"
				       "\"fraction\":%.4f,\"error\":%.2e,\"peer_us\":%.2f}\n",
				       c.shape.name, c.context, c.batch, c.page, c.dtype.c_str(),
				       c.layout.c_str(), o.ragged.empty() ? "false" : "true",
				       c.heads, c.min_tiles, c.parts, us, (long long)bytes,
				       (double)bytes / us * 1e6, before, after, ratio, error, peer);
			else
				printf("%-8s %6dx%-4d p%-3d %-4s %-7s %d/%d/%d/%-3d %9.2f us %6.3f "
				       "TB/s "
				       "%5.1f%% of %.3f %.3f  err %.1e  peer %8.2f  x%.3f%s\n",
				       c.shape.name, c.context, c.batch, c.page, c.dtype.c_str(),
				       c.layout.c_str(), c.heads, c.sets, c.min_tiles, c.parts, us,
				       (double)bytes / us * 1e-6, 100 * ratio, before * 1e-12,
				       after * 1e-12, error, peer, peer / us,
				       fabs(before / after - 1) > 0.02 ? "  MOOD" : "");
		}
		cuda_ok(cudaGraphExecDestroy(exec));
	}
	cuda_ok(cudaGraphDestroy(graph));
	for (void *p : {(void *)q, (void *)out, (void *)lse, (void *)table_gpu, (void *)loc_gpu,
			(void *)lens_gpu, a.workspace})
		cuda_ok(cudaFree(p));
	return failed;
}

static std::vector<std::string> words(const char *list)
{
	std::vector<std::string> ret;
	std::string text = list;

	for (size_t at = 0; at <= text.size();) {
		size_t end = std::min(text.find(',', at), text.size());

		ret.push_back(text.substr(at, end - at));
		at = end + 1;
	}
	return ret;
}

static std::vector<int> numbers(const char *list)
{
	std::vector<int> ret;

	for (const std::string &word : words(list))
		ret.push_back(atoi(word.c_str()));
	return ret;
}

static const char usage[] =
	"usage: attention_bench [--shape HQ/HKV/D,...] [--batch N,...] [--context N,...]\n"
	"       [--point CONTEXTxBATCH,...] [--page N,...] [--dtype bf16,f16,fp8]\n"
	"       [--layout nhd,hnd,nhd-flat,hnd-flat] [--ragged random|FILE] [--backend NAME]\n"
	"       [--q-len N] [--window N] [--heads N,...] [--sets N,...] [--min-tiles N,...] "
	"[--parts N,...] [--near N]\n"
	"       [--peers FILE] [--seconds S] [--json]\n";

int main(int argc, char **argv)
{
	static const struct option longs[] = {{"shape", 1, 0, 's'},
					      {"batch", 1, 0, 'b'},
					      {"context", 1, 0, 'c'},
					      {"page", 1, 0, 'p'},
					      {"dtype", 1, 0, 'd'},
					      {"layout", 1, 0, 'l'},
					      {"ragged", 1, 0, 'r'},
					      {"backend", 1, 0, 'k'},
					      {"heads", 1, 0, 'H'},
					      {"min-tiles", 1, 0, 'm'},
					      {"sets", 1, 0, 'e'},
					      {"parts", 1, 0, 'n'},
					      {"near", 1, 0, 'C'},
					      {"peers", 1, 0, 'P'},
					      {"point", 1, 0, 'x'},
					      {"seconds", 1, 0, 'S'},
					      {"q-len", 1, 0, 'q'},
					      {"window", 1, 0, 'w'},
					      {"json", 0, 0, 'j'},
					      {0, 0, 0, 0}};
	struct options o;
	struct memory m = {};
	int c, n_failed = 0, max_page = 0;

	while ((c = getopt_long(argc, argv, "", longs, NULL)) >= 0) {
		switch (c) {
		case 's':
			o.shapes = words(optarg);
			break;
		case 'b':
			o.batches = numbers(optarg);
			break;
		case 'c':
			o.contexts = numbers(optarg);
			break;
		case 'x':
			o.points = words(optarg);
			break;
		case 'p':
			o.pages = numbers(optarg);
			break;
		case 'd':
			o.dtypes = words(optarg);
			break;
		case 'l':
			o.layouts = words(optarg);
			break;
		case 'r':
			o.ragged = optarg;
			break;
		case 'k':
			o.backend = optarg;
			break;
		case 'H':
			o.heads = numbers(optarg);
			break;
		case 'e':
			o.sets = numbers(optarg);
			break;
		case 'm':
			o.min_tiles = numbers(optarg);
			break;
		case 'n':
			o.parts = numbers(optarg);
			break;
		case 'C':
			o.near = atoi(optarg);
			break;
		case 'P':
			o.peers = optarg;
			break;
		case 'S':
			o.seconds = atof(optarg);
			break;
		case 'q':
			o.q_len = atoi(optarg);
			break;
		case 'w':
			o.window = atoi(optarg);
			break;
		case 'j':
			o.json = true;
			break;
		default:
			fputs(usage, stderr);
			return 2;
		}
	}
	if (!kv_attn_find(o.backend.c_str(), KV_DEVICE_CUDA)) {
		fprintf(stderr, "--backend %s: there is none\n", o.backend.c_str());
		return 2;
	}
	if (o.points.empty())
		for (int context : o.contexts)
			for (int batch : o.batches)
				o.points.push_back(std::to_string(context) + "x" +
						   std::to_string(batch));
	for (int page : o.pages)
		max_page = std::max(max_page, page);

	std::vector<struct bench_case> cases;
	int64_t most = 4LL << 30;

	for (const std::string &dtype : o.dtypes)
		for (const std::string &name : o.shapes)
			for (const std::string &point : o.points)
				for (int page : o.pages)
					for (const std::string &layout : o.layouts)
						for (int heads : o.heads)
							for (int sets : o.sets)
								for (int tiles : o.min_tiles)
									for (int parts : o.parts)
										for (const struct
										     shape &s :
										     shapes) {
											struct bench_case one = {
												s,
												dtype,
												layout,
												0,
												0,
												page,
												heads,
												sets,
												tiles,
												parts};

											if (name != s.name ||
											    sscanf(point.c_str(),
												   "%dx%d",
												   &one.context,
												   &one.batch) !=
												    2)
												continue;
											cases.push_back(
												one);
											most = std::max(
												most,
												(int64_t)(one.context +
													  page) *
													one.batch *
													s.heads_kv *
													s.dim *
													2 *
													(int64_t)kv_dtype_bytes(dtype_of(
														dtype)) *
													(o.ragged.empty()
														 ? 1
														 : 2));
										}
	m.pool_bytes = (size_t)most;
	cuda_ok(cudaMalloc(&m.pool, m.pool_bytes));
	cuda_ok(cudaMalloc(&m.sink, 4));
	cuda_ok(cudaStreamCreateWithFlags(&m.stream, cudaStreamNonBlocking));
	for (const struct bench_case &one : cases) {
		std::string failed = run(o, one, &m);

		if (!failed.empty()) {
			printf("%-8s %6dx%-4d p%-3d %-4s %-7s %s\n", one.shape.name, one.context,
			       one.batch, one.page, one.dtype.c_str(), one.layout.c_str(),
			       failed.c_str());
			n_failed++;
		}
		fflush(stdout);
	}
	return n_failed ? 1 : 0;
}
