/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Paged prefill and extend, timed in TFLOP/s: 4 D for each pair of a query head and a key it sees.
 *
 * A case is a head shape, a batch with q_len new tokens and kv_len in all (or ragged lengths), a page
 * size and types. Rows drawn at random are held against float64 on the values that are stored: a
 * wrong case has no time. Two block tables of disjoint pages in random order take turns; the time is
 * the median of single calls between events, after some that warm up.
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
#include "kernels/dtype.h"
#include "kernels/view.h"

#define CHECKED 192 /* rows held against float64 */
#define TABLES	2

#define cuda_ok(call)                                                                 \
	do {                                                                          \
		cudaError_t e_ = (call);                                              \
		if (e_ != cudaSuccess) {                                              \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, \
				cudaGetErrorString(e_));                              \
			exit(1);                                                      \
		}                                                                     \
	} while (0)

struct options {
	std::vector<std::string> shapes{"32/8/128"};
	std::vector<std::string> points{"1,8192,8192", "4,2048,2048", "1,2048,32768", "8,512,4096",
					"1,32768,32768"};
	std::vector<std::string> dtypes{"bf16"};
	std::vector<int> pages{16};
	std::string backend = "wgmma", layout = "nhd";
	bool ragged = false;
	int window = -1, runs = 30;
	double softcap = 0, seconds = 0.1;
};

struct bench_case {
	int heads_q, heads_kv, dim, batch, q_len, kv_len, page;
	std::string dtype, name;
};

struct pick { /* a row that is checked */
	int b, i, head;
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

/* A row in double; x: room for its scores. */
static __global__ void answer(struct kv_attention_args a, const struct pick *picks, double *scores,
			      double *out, double *ret_lse)
{
	__shared__ double red[256];
	struct pick pick = picks[blockIdx.x];
	int b = pick.b, h = pick.head, group = a.n_heads_q / a.k.n_heads;
	int start = a.query_start_loc[b], q_len = a.query_start_loc[b + 1] - start;
	int len = a.seq_lens[b];
	struct kv_span span = kv_span_seen(len - q_len + pick.i, len, a.causal, a.window_left);
	const int32_t *table = a.block_table + (int64_t)b * a.table_width;
	double *x = scores + (int64_t)blockIdx.x * a.max_seq_len, m = -DBL_MAX, l = 0;

	for (int64_t j = span.lo + threadIdx.x; j < span.hi; j += blockDim.x) {
		const char *k =
			(const char *)a.k.base + kv_view_offset(&a.k, table[j / a.k.block_tokens],
								j % a.k.block_tokens, h / group);
		double s = 0;

		for (int d = 0; d < a.k.head_dim; d++)
			s += (double)kv_element_load(
				     a.q,
				     ((int64_t)(start + pick.i) * a.n_heads_q + h) * a.k.head_dim + d,
				     a.dtype) *
			     (double)kv_element_load(k, d, a.k.dtype);
		s *= (double)a.k.scale / sqrt((double)a.k.head_dim);
		x[j] = a.softcap > 0 ? (double)a.softcap * tanh(s / (double)a.softcap) : s;
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
		ret_lse[blockIdx.x] = m + log(l);
	for (int d = threadIdx.x; d < a.v.head_dim; d += blockDim.x) {
		double o = 0;

		for (int64_t j = span.lo; j < span.hi; j++) {
			const char *v = (const char *)a.v.base +
					kv_view_offset(&a.v, table[j / a.v.block_tokens],
						       j % a.v.block_tokens, h / group);

			o += x[j] * (double)kv_element_load(v, d, a.v.dtype);
		}
		out[(int64_t)blockIdx.x * a.v.head_dim + d] = o / l * (double)a.v.scale;
	}
}

static int dtype_of(const std::string &name)
{
	return name == "bf16" ? KV_BF16 : name == "f16" ? KV_F16 : KV_F8_E4M3;
}

template <typename T> static T *upload(const std::vector<T> &from)
{
	T *p;

	cuda_ok(cudaMalloc(&p, from.size() * sizeof(T)));
	cuda_ok(cudaMemcpy(p, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
	return p;
}

/* Relative error of CHECKED rows, the first and the last of each request among them. */
static double error_of(const struct kv_attention_args &a, const std::vector<int> &loc)
{
	int dim = a.v.head_dim;
	std::vector<struct pick> picks;
	std::vector<double> right((size_t)CHECKED * dim), right_lse(CHECKED);
	std::vector<uint16_t> out(dim);
	std::mt19937_64 random(5);
	double error = 0, norm = 0, lse_error = 0, *x, *o, *l;
	struct pick *picks_gpu;

	for (int n = 0; n < CHECKED; n++) {
		int b = n < 2 * a.n_seqs ? n / 2 : (int)(random() % (uint64_t)a.n_seqs);
		int q_len = loc[b + 1] - loc[b];

		picks.push_back({b,
				 n < 2 * a.n_seqs ? n % 2 * (q_len - 1)
						  : (int)(random() % (uint64_t)q_len),
				 (int)(random() % (uint64_t)a.n_heads_q)});
	}
	picks_gpu = upload(picks);
	cuda_ok(cudaMalloc(&x, (size_t)CHECKED * a.max_seq_len * sizeof(double)));
	cuda_ok(cudaMalloc(&o, right.size() * sizeof(double)));
	cuda_ok(cudaMalloc(&l, CHECKED * sizeof(double)));
	answer<<<CHECKED, 256>>>(a, picks_gpu, x, o, l);
	cuda_ok(cudaDeviceSynchronize());
	cuda_ok(cudaMemcpy(right.data(), o, right.size() * 8, cudaMemcpyDeviceToHost));
	cuda_ok(cudaMemcpy(right_lse.data(), l, CHECKED * 8, cudaMemcpyDeviceToHost));
	for (int n = 0; n < CHECKED; n++) {
		int64_t row = (int64_t)(loc[picks[n].b] + picks[n].i) * a.n_heads_q + picks[n].head;
		float lse;

		cuda_ok(cudaMemcpy(out.data(), (uint16_t *)a.out + row * dim, dim * 2,
				   cudaMemcpyDeviceToHost));
		cuda_ok(cudaMemcpy(&lse, a.lse + row, 4, cudaMemcpyDeviceToHost));
		for (int d = 0; d < dim; d++) {
			double y = kv_element_load(out.data(), d, a.dtype);
			double z = right[(size_t)n * dim + d];

			error += (y - z) * (y - z);
			norm += z * z;
		}
		lse_error = fmax(lse_error, fabs(lse - right_lse[n]));
		if (lse != lse)
			lse_error = INFINITY;
	}
	for (void *p : {(void *)x, (void *)o, (void *)l, (void *)picks_gpu})
		cuda_ok(cudaFree(p));
	error = sqrt(error / norm);
	return lse_error <= 2e-3 ? error : NAN;
}

static void run(const struct options &o, const struct bench_case &c)
{
	const struct kv_attn_backend *backend = kv_attn_find(o.backend.c_str(), KV_DEVICE_CUDA);
	int kv_dtype = dtype_of(c.dtype), q_dtype = kv_dtype == KV_F16 ? KV_F16 : KV_BF16;
	int64_t row = c.dim * (int64_t)kv_dtype_bytes(kv_dtype), half = row * c.heads_kv * c.page;
	std::vector<int> lens(c.batch, c.kv_len), loc(1, 0);
	std::mt19937_64 random(3);
	struct kv_attention_args a = {};
	int64_t n_ids = 0;
	double pairs = 0;

	for (int b = 0; b < c.batch; b++) {
		int q_len = c.q_len;

		if (o.ragged) { /* both of an exponential law, at most 4 times the mean */
			double u = -log(1 - (double)(random() >> 11) * 0x1p-53);

			q_len = (int)fmax(1, fmin(4, u) * c.q_len);
			lens[b] = q_len + (int)(fmin(4, u) * (c.kv_len - c.q_len));
		}
		loc.push_back(loc[b] + q_len);
		n_ids += (lens[b] + c.page - 1) / c.page;
		a.max_query_len = std::max(a.max_query_len, q_len);
		a.max_seq_len = std::max(a.max_seq_len, lens[b]);
		for (int i = 0; i < q_len; i++) {
			struct kv_span s = kv_span_seen(lens[b] - q_len + i, lens[b], 1, o.window);

			pairs += (double)(s.hi - s.lo);
		}
	}

	int width = (a.max_seq_len + c.page - 1) / c.page;
	int64_t n_blocks = n_ids * TABLES, next = 0;
	std::vector<int32_t> ids(n_blocks), table((size_t)TABLES * c.batch * width, 0);
	int64_t n_q = (int64_t)loc.back() * c.heads_q * c.dim;
	char *pool, *q, *out;
	float *lse;

	std::iota(ids.begin(), ids.end(), 0);
	std::shuffle(ids.begin(), ids.end(), random);
	for (int i = 0; i < TABLES; i++)
		for (int b = 0; b < c.batch; b++)
			for (int j = 0; j * c.page < lens[b]; j++)
				table[(size_t)((i * c.batch + b) * width + j)] = ids[next++];
	cuda_ok(cudaMalloc(&pool, (size_t)(2 * half * n_blocks)));
	fill<<<132 * 8, 512>>>(pool, 2 * half * n_blocks / (int64_t)kv_dtype_bytes(kv_dtype), kv_dtype,
			       1);
	cuda_ok(cudaMalloc(&q, (size_t)(n_q * 2)));
	cuda_ok(cudaMalloc(&out, (size_t)(n_q * 2)));
	cuda_ok(cudaMalloc(&lse, (size_t)(n_q / c.dim * 4)));
	fill<<<132 * 8, 512>>>(q, n_q, q_dtype, 99);
	cuda_ok(cudaMemset(out, 0xff, (size_t)(n_q * 2)));
	cuda_ok(cudaMemset(lse, 0xff, (size_t)(n_q / c.dim * 4)));

	int32_t *table_gpu = upload(table), *loc_gpu = upload(loc), *lens_gpu = upload(lens);
	cudaStream_t stream;

	cuda_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	a.size = sizeof(a);
	a.device = KV_DEVICE_CUDA;
	a.dtype = q_dtype;
	a.n_seqs = c.batch;
	a.n_tokens = loc.back();
	a.n_heads_q = c.heads_q;
	a.table_width = width;
	a.q = q;
	a.out = out;
	a.lse = lse;
	a.query_start_loc = loc_gpu;
	a.seq_lens = lens_gpu;
	a.block_table = table_gpu;
	a.k.base = pool;
	a.k.block_tokens = c.page;
	a.k.n_heads = c.heads_kv;
	a.k.head_dim = c.dim;
	a.k.dtype = kv_dtype;
	a.k.block_stride = o.layout.find("flat") != std::string::npos ? 2 * half : half;
	a.k.token_stride = row * c.heads_kv;
	a.k.head_stride = row;
	if (o.layout.find("hnd") != std::string::npos) {
		a.k.token_stride = row;
		a.k.head_stride = row * c.page;
	}
	a.k.scale = kv_dtype == KV_F8_E4M3 ? 0.5f : 1;
	a.v = a.k;
	a.v.base = pool + (a.k.block_stride != half ? half : half * n_blocks);
	a.v.scale = kv_dtype == KV_F8_E4M3 ? 0.25f : 1;
	a.window_left = o.window;
	a.softcap = (float)o.softcap;
	a.causal = 1;
	a.stream = stream;
	a.workspace_bytes = backend->workspace_bytes ? backend->workspace_bytes(&a) : 0;
	cuda_ok(cudaMalloc(&a.workspace, a.workspace_bytes + 1));
	cuda_ok(cudaMemset(a.workspace, 0, a.workspace_bytes + 1));
	cuda_ok(cudaDeviceSynchronize());
	printf("%-9s %-14s p%-3d %-4s ", c.name.c_str(),
	       (std::to_string(c.batch) + "," + std::to_string(c.q_len) + "," +
		std::to_string(c.kv_len))
		       .c_str(),
	       c.page, c.dtype.c_str());
	if (kv_attention_on(backend, &a) < 0) {
		printf("%s\n", kv_error_text());
	} else {
		double error, tolerance = q_dtype == KV_F16 ? 1e-3 : 5e-3, spent = 0;
		std::vector<double> times;
		cudaEvent_t from, to;
		float ms;

		cuda_ok(cudaStreamSynchronize(stream));
		error = error_of(a, loc);
		cuda_ok(cudaEventCreate(&from));
		cuda_ok(cudaEventCreate(&to));
		for (int n = 0; error <= tolerance && n < 1000 &&
				(n < o.runs + 5 || spent < o.seconds); n++) {
			a.block_table = table_gpu + (size_t)(n % TABLES) * c.batch * width;
			cuda_ok(cudaEventRecord(from, stream));
			if (kv_attention_on(backend, &a) < 0)
				exit(1);
			cuda_ok(cudaEventRecord(to, stream));
			cuda_ok(cudaEventSynchronize(to));
			cuda_ok(cudaEventElapsedTime(&ms, from, to));
			if (n >= 5)
				times.push_back(ms * 1e-3);
			spent += ms * 1e-3;
		}
		cuda_ok(cudaEventDestroy(from));
		cuda_ok(cudaEventDestroy(to));
		std::sort(times.begin(), times.end());
		if (times.empty())
			printf("WRONG: off by %g\n", error);
		else
			printf("%10.1f us (best %.1f) %6.1f TFLOP/s  err %.1e\n",
			       times[times.size() / 2] * 1e6, times[0] * 1e6,
			       4 * pairs * c.dim * c.heads_q / times[times.size() / 2] * 1e-12, error);
	}
	fflush(stdout);
	cuda_ok(cudaStreamDestroy(stream));
	for (void *p : {(void *)pool, (void *)q, (void *)out, (void *)lse, (void *)table_gpu,
			(void *)loc_gpu, (void *)lens_gpu, a.workspace})
		cuda_ok(cudaFree(p));
}

static std::vector<std::string> words(const char *list, char between)
{
	std::vector<std::string> ret;
	std::string text = list;

	for (size_t at = 0; at <= text.size();) {
		size_t end = std::min(text.find(between, at), text.size());

		ret.push_back(text.substr(at, end - at));
		at = end + 1;
	}
	return ret;
}

static const char usage[] =
	"usage: prefill_bench [--shape HQ/HKV/D,...] [--point B,QLEN,KVLEN;...] [--page N,...]\n"
	"       [--dtype bf16,f16,fp8] [--layout nhd|hnd|nhd-flat|hnd-flat] [--ragged]\n"
	"       [--window N] [--softcap C] [--runs N] [--seconds S] [--backend NAME]\n";

int main(int argc, char **argv)
{
	static const struct option longs[] = {
		{"shape", 1, 0, 's'},	{"point", 1, 0, 'x'},	{"page", 1, 0, 'p'},
		{"dtype", 1, 0, 'd'},	{"layout", 1, 0, 'l'},	{"ragged", 0, 0, 'r'},
		{"window", 1, 0, 'w'},	{"softcap", 1, 0, 'c'}, {"runs", 1, 0, 'n'},
		{"seconds", 1, 0, 'S'}, {"backend", 1, 0, 'k'}, {0, 0, 0, 0}};
	struct options o;
	int c;

	while ((c = getopt_long(argc, argv, "", longs, NULL)) >= 0) {
		switch (c) {
		case 's':
			o.shapes = words(optarg, ',');
			break;
		case 'x':
			o.points = words(optarg, ';');
			break;
		case 'p':
			o.pages.clear();
			for (const std::string &word : words(optarg, ','))
				o.pages.push_back(atoi(word.c_str()));
			break;
		case 'd':
			o.dtypes = words(optarg, ',');
			break;
		case 'l':
			o.layout = optarg;
			break;
		case 'r':
			o.ragged = true;
			break;
		case 'w':
			o.window = atoi(optarg);
			break;
		case 'c':
			o.softcap = atof(optarg);
			break;
		case 'n':
			o.runs = atoi(optarg);
			break;
		case 'S':
			o.seconds = atof(optarg);
			break;
		case 'k':
			o.backend = optarg;
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
	for (const std::string &dtype : o.dtypes)
		for (const std::string &shape : o.shapes)
			for (const std::string &point : o.points)
				for (int page : o.pages) {
					struct bench_case one = {};

					one.page = page;
					one.dtype = dtype;
					one.name = shape;
					if (sscanf(shape.c_str(), "%d/%d/%d", &one.heads_q,
						   &one.heads_kv, &one.dim) != 3 ||
					    sscanf(point.c_str(), "%d,%d,%d", &one.batch,
						   &one.q_len, &one.kv_len) != 3) {
						fputs(usage, stderr);
						return 2;
					}
					run(o, one);
				}
	return 0;
}
