/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the walk over chunks needs, of all chunks at once: gdn_chunk.cuh says what.
 *
 * Work: a thread block of 8 warps has a chunk and a key head, with the heads that share it one
 * after the other. K^ K^T and Q^ K^T are made once and stay in registers. T comes by 16 x 16
 * blocks: those on the diagonal by forward substitution, a column a lane; then, of each pair of
 * diagonal blocks and at last of the two pairs, what is below: T21 = -T22 A21 T11, half a block a
 * warp, on the tensor cores with tf32 split in two, which is f32's accuracy.
 */
#include "kernels/device/launch.cuh"
#include "kernels/gdn_chunk.h"
#include "kernels/gdn_chunk.cuh"

#define WARPS	8
#define THREADS (32 * WARPS)
#define PITCH	72 /* f32 in a row of A and T: mma's loads meet no bank twice */

struct prep_shared {
	char q[TILE_QK]; /* Q^; then P of each head */
	char k[TILE_QK];
	char v[TILE_QK];
	union {
		float x[CHUNK][PITCH]; /* A below the diagonal; T_ij in place of block (j, i) */
		char w[TILE_QK];
	};
	char t_beta[TILE_P];  /* T diag(beta) */
	char t_decay[TILE_P]; /* T diag(beta e^c) */
	char p[TILE_P];
	float gates[2][CHUNK];		/* e^(c_t), e^(c - c_t) */
	float sum[CHUNK_GROUP][CHUNK];	/* c_t */
	float beta[CHUNK_GROUP][CHUNK]; /* or dt; 0 past the last token */
};

/* c_t and beta_t of head @h by one warp, two tokens a lane. */
__device__ static void head_gates(const struct kv_recur &a, const struct chunk_entry &c, int h,
				  float *sum, float *beta)
{
	const int lane = (int)threadIdx.x % 32;
	const float rate = -__expf(a.a_log[h]), bias = a.dt_bias ? a.dt_bias[h] : 0;
	float g[2], total;

#pragma unroll
	for (int i = 0; i < 2; i++) {
		int t = 2 * lane + i;
		int64_t at = (int64_t)c.start + t;
		float x, b;

		g[i] = b = 0;
		if (t < c.len) {
			x = kv_softplus_f(kv_io_load<KV_IO16>(a.a, at * a.a_stride + h, true) +
					  bias);
			if (a.rule == KV_RULE_SSD)
				b = x = fminf(fmaxf(x, a.dt_min), a.dt_max);
			else
				b = kv_sigmoid(kv_io_load<KV_IO16>(a.b, at * a.b_stride + h, true));
			g[i] = rate * x;
		}
		beta[t] = b;
	}
	total = g[0] + g[1];
	for (int step = 1; step < 32; step *= 2) {
		float x = __shfl_up_sync(0xffffffff, total, step);

		if (lane >= step)
			total += x;
	}
	sum[2 * lane] = total - g[1];
	sum[2 * lane + 1] = total;
}

/* 8 bf16, over the length of their row of 16 threads if asked for, times @scale. */
__device__ static uint4 direction(uint4 from, bool normalize, float scale)
{
	float x[8], sum = 0;
	uint4 to;

	kv_vector<KV_BF16>::widen(from, x);
#pragma unroll
	for (int i = 0; i < 8; i++)
		sum += x[i] * x[i];
	for (int step = 1; step < 16; step *= 2)
		sum += __shfl_xor_sync(0xffffffff, sum, step);
	if (normalize)
		scale *= rsqrtf(sum + (float)KV_NORM_EPS);
	to.x = kv_pack<KV_BF16>(x[0] * scale, x[1] * scale);
	to.y = kv_pack<KV_BF16>(x[2] * scale, x[3] * scale);
	to.z = kv_pack<KV_BF16>(x[4] * scale, x[5] * scale);
	to.w = kv_pack<KV_BF16>(x[6] * scale, x[7] * scale);
	return to;
}

__device__ static void load_qk(const struct kv_recur &a, const struct chunk_entry &c, int hk,
			       struct prep_shared &s)
{
	const int piece = (int)threadIdx.x % 16;
	uint4 q[4], k[4];

#pragma unroll
	for (int i = 0; i < 4; i++) {
		int row = (int)threadIdx.x / 16 + 16 * i;
		int64_t t = (int64_t)c.start + row;
		int64_t at = hk * CHUNK_DK + 8 * piece;

		q[i] = k[i] = make_uint4(0, 0, 0, 0);
		if (row < c.len) {
			q[i] = __ldg((const uint4 *)((const uint16_t *)a.q + t * a.q_stride + at));
			k[i] = __ldg((const uint4 *)((const uint16_t *)a.k + t * a.k_stride + at));
		}
	}
#pragma unroll
	for (int i = 0; i < 4; i++) {
		int to = tile_at<16>((int)threadIdx.x / 16 + 16 * i, piece);

		if (a.rule == KV_RULE_DELTA) {
			q[i] = direction(q[i], a.normalize, a.scale);
			k[i] = direction(k[i], a.normalize, 1);
		}
		*(uint4 *)(s.q + to) = q[i];
		*(uint4 *)(s.k + to) = k[i];
	}
}

/* On its way when this returns. */
template <int DV>
__device__ static void load_v(const struct kv_recur &a, const struct chunk_entry &c, int h,
			      struct prep_shared &s)
{
	constexpr int PIECES = DV / 8;

#pragma unroll 1 /* addresses take registers */
	for (int i = 0; i < CHUNK * PIECES / THREADS; i++) {
		int at = (int)threadIdx.x + THREADS * i, row = at / PIECES, piece = at % PIECES;
		int64_t t = (int64_t)c.start + (row < c.len ? row : 0);

		asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
				     shared_at(s.v + tile_at<PIECES>(row, piece))),
			     "l"((const uint4 *)((const uint16_t *)a.v + t * a.v_stride + h * DV) +
				 piece),
			     "r"(row < c.len ? 16 : 0) /* the rest of the 16 bytes becomes 0 */
			     : "memory");
	}
	asm volatile("cp.async.commit_group;" ::: "memory");
}

/* acc[n] = rows @m.. of @rows times rows 8 n.. of K^, up to the diagonal */
__device__ static void products(float (&acc)[8][4], const char *rows, const char *k, int m)
{
	const int lane = (int)threadIdx.x % 32;

	memset(acc, 0, sizeof(acc));
#pragma unroll
	for (int kk = 0; kk < CHUNK_DK; kk += 16) {
		uint32_t x[4];

		kv_ldmatrix(x, frag_rows<16>(shared_at(rows), 16 * m, kk, lane));
#pragma unroll
		for (int n = 0; n < 4; n++) {
			uint32_t y[4];

			if (n > m)
				continue;
			kv_ldmatrix(y, frag_cols<16>(shared_at(k), 16 * n, kk, lane));
			kv_mma<KV_BF16>(acc[2 * n], x, {y[0], y[1]});
			kv_mma<KV_BF16>(acc[2 * n + 1], x, {y[2], y[3]});
		}
	}
}

/* From products: A (f32, warps 0..3) or P (bf16, warps 4..7), with decays. */
__device__ static void store_products(const float (&acc)[8][4], struct prep_shared &s, int head,
				      int m, bool is_p)
{
	const int lane = (int)threadIdx.x % 32;
	const float *sum = s.sum[head];

#pragma unroll
	for (int n = 0; n < 8; n++) {
		if (n > 2 * m + 1)
			continue;
#pragma unroll
		for (int half = 0; half < 2; half++) {
			int i = 16 * m + lane / 4 + 8 * half, j = 8 * n + lane % 4 * 2;
			float x = acc[n][2 * half], y = acc[n][2 * half + 1];

			if (is_p) {
				x = i >= j ? x * __expf(sum[i] - sum[j]) : 0;
				y = i >= j + 1 ? y * __expf(sum[i] - sum[j + 1]) : 0;
				*(uint32_t *)(s.p + tile_at<8>(i, n) + lane % 4 * 4) =
					kv_pack<KV_BF16>(x, y);
			} else {
				float beta = s.beta[head][i];

				s.x[i][j] = i > j ? beta * x * __expf(sum[i] - sum[j]) : 0;
				s.x[i][j + 1] =
					i > j + 1 ? beta * y * __expf(sum[i] - sum[j + 1]) : 0;
			}
		}
	}
}

/* The inverse of I + A of block (b, b), in its place: a column a lane, by two half warps alike. */
__device__ static void invert_diagonal(struct prep_shared &s, int b)
{
	const int column = (int)threadIdx.x % 16;
	float t[16];

#pragma unroll
	for (int i = 0; i < 16; i++) {
		t[i] = i == column ? 1 : 0;
#pragma unroll
		for (int l = 0; l < i; l++)
			t[i] -= s.x[16 * b + i][16 * b + l] * t[l];
	}
	__syncwarp();
#pragma unroll
	for (int i = 0; i < 16; i++)
		s.x[16 * b + i][16 * b + column] = t[i];
}

struct split {
	uint32_t high, low;
};

/* x as the sum of two tf32 */
__device__ static struct split split_tf32(float x)
{
	struct split y;

	asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y.high) : "f"(x));
	asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y.low) : "f"(x - __uint_as_float(y.high)));
	return y;
}

__device__ static void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
	asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
		     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
		     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* c += X Y: 16 x 16 of f32 at @x, 16 x 8 at @y */
__device__ static void half_product(float (&c)[4], const float *x, const float *y)
{
	const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
	float rest[4] = {};

#pragma unroll
	for (int k = 0; k < 16; k += 8) {
		struct split b0 = split_tf32(y[(k + t) * PITCH + g]);
		struct split b1 = split_tf32(y[(k + t + 4) * PITCH + g]);
		uint32_t high[4], low[4];

#pragma unroll
		for (int i = 0; i < 4; i++) {
			struct split v =
				split_tf32(x[(g + 8 * (i & 1)) * PITCH + k + t + 4 * (i / 2)]);

			high[i] = v.high;
			low[i] = v.low;
		}
		mma_tf32(c, high, {b0.high, b1.high});
		mma_tf32(rest, low, {b0.high, b1.high});
		mma_tf32(rest, high, {b0.low, b1.low});
	}
#pragma unroll
	for (int i = 0; i < 4; i++)
		c[i] += rest[i];
}

__device__ static void store_half(float *to, const float (&c)[4], float sign)
{
	const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;

#pragma unroll
	for (int i = 0; i < 4; i++)
		to[(g + 8 * (i / 2)) * PITCH + 2 * t + (i & 1)] = sign * c[i];
}

/*
 * Blocks T_ij below the diagonal, each in place of block (j, i), where A_il T_lj stands before. By
 * all warps, half of a block's columns each; @at: of those columns in a block.
 */
__device__ static void invert_rest(struct prep_shared &s)
{
	const int warp = (int)threadIdx.x / 32, at = warp % 2 * 8, b = warp / 2;
	const int i = 2 + b / 2, j = b % 2;
	float y[4] = {}, t[4] = {};

	if (b < 2) { /* (1, 0) and (3, 2) */
		const int d = 32 * b;
		float *to = &s.x[d][d + 16 + at];

		half_product(y, &s.x[d + 16][d], &s.x[d][d + at]);
		store_half(to, y, 1);
		__syncwarp();
		half_product(t, &s.x[d + 16][d + 16], to);
		__syncwarp();
		store_half(to, t, -1);
	}
	__syncthreads();
	memset(y, 0, sizeof(y));
	memset(t, 0, sizeof(t));
	for (int l = j; l < 2; l++)
		half_product(y, &s.x[16 * i][16 * l], &s.x[16 * j][16 * l + at]);
	store_half(&s.x[16 * j][16 * i + at], y, 1);
	__syncthreads();
	if (i == 3)
		half_product(t, &s.x[32][48], &s.x[16 * j][32 + at]);
	half_product(t, &s.x[16 * i][16 * i], &s.x[16 * j][16 * i + at]);
	__syncthreads();
	store_half(&s.x[16 * j][16 * i + at], t, -1);
}

/* T to bf16, its columns times beta, and times beta e^c. */
__device__ static void scale_columns(struct prep_shared &s, int head)
{
	const int i = (int)threadIdx.x / 4, j0 = (int)threadIdx.x % 4 * 16;
	const int row = j0 / 16 < i / 16 ? j0 + i % 16 : i,
		  col = j0 / 16 < i / 16 ? i / 16 * 16 : j0;

	if (j0 / 16 > i / 16)
		return;
#pragma unroll
	for (int piece = 0; piece < 2; piece++) {
		uint32_t b[4], d[4];

#pragma unroll
		for (int n = 0; n < 4; n++) {
			int j = 8 * piece + 2 * n;
			float x = s.x[row][col + j] * s.beta[head][j0 + j];
			float y = s.x[row][col + j + 1] * s.beta[head][j0 + j + 1];

			b[n] = kv_pack<KV_BF16>(x, y);
			d[n] = kv_pack<KV_BF16>(x * __expf(s.sum[head][j0 + j]),
						y * __expf(s.sum[head][j0 + j + 1]));
		}
		memcpy(s.t_beta + tile_at<8>(i, j0 / 8 + piece), b, sizeof(b));
		memcpy(s.t_decay + tile_at<8>(i, j0 / 8 + piece), d, sizeof(d));
	}
}

/* W = (T diag(beta e^c)) K^, 16 rows and half of the columns a warp */
__device__ static void make_w(struct prep_shared &s)
{
	const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
	const int m = warp % 4, n0 = warp / 4 * 64;
	float acc[8][4] = {};

#pragma unroll
	for (int k = 0; k < 4; k++) {
		uint32_t x[4];

		if (k > m)
			continue;
		kv_ldmatrix(x, frag_rows<8>(shared_at(s.t_decay), 16 * m, 16 * k, lane));
#pragma unroll
		for (int n = 0; n < 4; n++) {
			uint32_t y[4];

			kv_ldmatrix_trans(y,
					  frag_rows<16>(shared_at(s.k), 16 * k, n0 + 16 * n, lane));
			kv_mma<KV_BF16>(acc[2 * n], x, {y[0], y[1]});
			kv_mma<KV_BF16>(acc[2 * n + 1], x, {y[2], y[3]});
		}
	}
#pragma unroll
	for (int n = 0; n < 8; n++)
#pragma unroll
		for (int half = 0; half < 2; half++)
			*(uint32_t *)(s.w + tile_at<16>(16 * m + lane / 4 + 8 * half, n0 / 8 + n) +
				      lane % 4 * 4) =
				kv_pack<KV_BF16>(acc[n][2 * half], acc[n][2 * half + 1]);
}

/* Sums of 16 tokens and 8 rows of S to U, as the walk takes them. */
__device__ static void store_u(char *to, int m, int n, const float (&x)[4])
{
	((uint2 *)to)[(n * 4 + m) * 32 + (int)threadIdx.x % 32] =
		make_uint2(kv_pack<KV_BF16>(x[0], x[1]), kv_pack<KV_BF16>(x[2], x[3]));
}

/* U = (T diag(beta)) V, 16 tokens and half of the columns a warp */
template <int DV> __device__ static void make_u(struct prep_shared &s, char *to)
{
	const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
	const int m = warp % 4, n0 = warp / 4 * (DV / 2);
	float acc[DV / 16][4] = {};

#pragma unroll
	for (int k = 0; k < 4; k++) {
		uint32_t x[4];

		if (k > m)
			continue;
		kv_ldmatrix(x, frag_rows<8>(shared_at(s.t_beta), 16 * m, 16 * k, lane));
#pragma unroll
		for (int n = 0; n < DV / 32; n++) {
			uint32_t y[4];

			kv_ldmatrix_trans(y, frag_rows<DV / 8>(shared_at(s.v), 16 * k, n0 + 16 * n,
							       lane));
			kv_mma<KV_BF16>(acc[2 * n], x, {y[0], y[1]});
			kv_mma<KV_BF16>(acc[2 * n + 1], x, {y[2], y[3]});
		}
	}
#pragma unroll
	for (int n = 0; n < DV / 16; n++)
		store_u(to, m, n0 / 8 + n, acc[n]);
}

/* The same of Mamba-2: U = diag(dt) x */
template <int DV> __device__ static void scale_u(struct prep_shared &s, int head, char *to)
{
	const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
	const int m = warp % 4, n0 = warp / 4 * (DV / 16);

#pragma unroll
	for (int n = n0; n < n0 + DV / 16; n++) {
		float x[4];

#pragma unroll
		for (int half = 0; half < 2; half++) {
			int t = 16 * m + lane / 4 + 8 * half;
			uint32_t u = *(const uint32_t *)(s.v + tile_at<DV / 8>(t, n) + lane % 4 * 4);
			float dt = s.beta[head][t];

			x[2 * half] = kv_bf16_to_f32((uint16_t)u) * dt;
			x[2 * half + 1] = kv_bf16_to_f32((uint16_t)(u >> 16)) * dt;
		}
		store_u(to, m, n, x);
	}
}

template <int RULE, int DV>
__device__ static void run_head(const struct chunk_params &p, const struct chunk_entry &c,
				struct prep_shared &s, const float (&acc)[8][4], int head, int h,
				char *to)
{
	const int warp = (int)threadIdx.x / 32, m = warp % 4;

	load_v<DV>(p.a, c, h, s);
	if (threadIdx.x == 0)
		bulk_wait_read(); /* what is written here was stored of the head before */
	__syncthreads();
	if ((int)threadIdx.x < CHUNK) {
		float last = s.sum[head][CHUNK - 1], sum = s.sum[head][threadIdx.x];

		s.gates[0][threadIdx.x] = __expf(sum);
		s.gates[1][threadIdx.x] = __expf(last - sum);
	}
	if (warp >= 4 || RULE == KV_RULE_DELTA)
		store_products(acc, s, head, m, warp >= 4);
	if (RULE == KV_RULE_DELTA) {
		__syncthreads();
		if (warp < 4)
			invert_diagonal(s, warp);
		__syncthreads();
		invert_rest(s);
		__syncthreads();
		scale_columns(s, head);
		asm volatile("cp.async.wait_group 0;" ::: "memory");
		__syncthreads();
		make_w(s); /* where A and T were */
		make_u<DV>(s, to + chunk_at_u(RULE));
	} else {
		asm volatile("cp.async.wait_group 0;" ::: "memory");
		__syncthreads();
		scale_u<DV>(s, head, to + chunk_at_u(RULE));
	}
	fence_async();
	__syncthreads();
	if (threadIdx.x == 0) {
		if (RULE == KV_RULE_DELTA)
			bulk_store(to, shared_at(s.w), TILE_QK);
		bulk_store(to + chunk_at_p(RULE), shared_at(s.p), TILE_P);
		bulk_store(to + chunk_at_gates(RULE, DV), shared_at(s.gates), TILE_GATES);
		bulk_commit();
	}
}

template <int RULE, int DV>
__global__ void __launch_bounds__(THREADS, 2) prep_kernel(struct chunk_params p)
{
	extern __shared__ __align__(128) char shared[];
	struct prep_shared &s = *(struct prep_shared *)shared;
	const int warp = (int)threadIdx.x / 32, hk = (int)blockIdx.y;
	const int group = p.a.heads / p.a.heads_k;
	const int64_t chunk = blockIdx.x;
	struct chunk_entry c;
	float acc[8][4];
	char *qk;

	kv_wait_for_grids();
	if (chunk >= *p.total)
		return;
	c = p.entries[chunk];
	load_qk(p.a, c, hk, s);
	for (int head = warp; head < group; head += WARPS)
		head_gates(p.a, c, hk * group + head, s.sum[head], s.beta[head]);
	for (int i = (int)threadIdx.x; i < TILE_P / 16; i += THREADS) /* heads fill its lower half */
		((uint4 *)s.p)[i] = make_uint4(0, 0, 0, 0);
	fence_async();
	__syncthreads();
	if (threadIdx.x == 0) {
		qk = p.qk + (chunk * p.a.heads_k + hk) * (2 * TILE_QK);
		bulk_store(qk, shared_at(s.q), TILE_QK);
		bulk_store(qk + TILE_QK, shared_at(s.k), TILE_QK);
		bulk_commit();
	}
	products(acc, warp < 4 ? s.k : s.q, s.k, warp % 4);
	for (int head = 0; head < group; head++) {
		int h = hk * group + head;

		run_head<RULE, DV>(p, c, s, acc, head, h,
				   p.heads + (chunk * p.a.heads + h) * p.head_bytes);
	}
	if (threadIdx.x == 0)
		bulk_wait();
}

extern "C" int kv_recur_prep(const struct kv_recur *args, const struct chunk_params *params)
{
	void (*kernel)(struct chunk_params);

	if (args->rule == KV_RULE_DELTA)
		kernel = args->dim_v == 128 ? prep_kernel<KV_RULE_DELTA, 128>
					    : prep_kernel<KV_RULE_DELTA, 64>;
	else
		kernel = args->dim_v == 128 ? prep_kernel<KV_RULE_SSD, 128>
					    : prep_kernel<KV_RULE_SSD, 64>;
	return kv_launch_cluster("chunk preparation", kernel,
				 dim3((unsigned)params->n_max, (unsigned)args->heads_k), THREADS,
				 sizeof(struct prep_shared), 1, true, args->stream, *params);
}
