/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The walk over a lane's chunks, with the state in registers: gdn_chunk.cuh has the mathematics.
 *
 * A thread block has NV rows of S of one head (columns of V and O), and holds S^T [128][NV]. Four
 * warpgroups work on a chunk, by wgmma, in 64 rows each:
 *
 *	V    V'   = U - W S0^T                          64 tokens x NV      the chain from chunk
 *	S    S^T  = e^c S^T + K^^T (V' e^(c - c_t))     twice 64 of dim_k   to chunk
 *	O    O    = (Q^ S0^T) e^(c_t) + P V'            64 tokens x NV      beside it
 *
 * S0 and V', rounded, go from one to the others through shared memory, transposed as they are
 * stored, so that all right operands lie along their sums. They are there twice, by the parity of
 * the chunk: O may be a chunk behind. One more warp brings the tiles of coming chunks. (Thread blocks of
 * one head that share what each brings, as a cluster, wait for one another: 1.2 to 1.9 times slower.)
 *
 * Work: blockIdx is (rows, head, lane). Bound by what comes into a multiprocessor, 60 KiB a chunk.
 */
#include "kernels/device/hopper.cuh"
#include "kernels/device/launch.cuh"
#include "kernels/gdn_chunk.cuh"
#include "kernels/gdn_chunk.h"

#define STAGES	3
#define WARPS	16		   /* that work on a chunk */
#define THREADS (32 * WARPS + 32) /* and one that brings tiles */
#define HALF	(CHUNK * 128) /* bytes of 64 columns of a tile */

template <int NV> struct scan_stage {
	char w[TILE_QK];
	char q[TILE_QK];
	char k[TILE_QK];
	char p[TILE_P];
	char u[CHUNK * NV * 2];
};

template <int NV> struct scan_shared {
	struct scan_stage<NV> stages[STAGES];
	char s[2][CHUNK_DK * NV * 2]; /* S0: [half of dim_k][NV][64] */
	char v[2][CHUNK * NV * 2];    /* V': [NV][64] */
	char grown[2][CHUNK * NV * 2]; /* V' e^(c - c_t) */
	float gates[STAGES][2][CHUNK]; /* e^(c_t), e^(c - c_t) */
	uint64_t full[STAGES];
	uint64_t empty[STAGES];
	uint64_t s_full[2], v_full[2], out_done[2];
};

/* What does not change from chunk to chunk. */
struct walk {
	struct kv_lane lane;
	int64_t b;
	int64_t first; /* chunk */
	int32_t n;     /* chunks */
	int32_t h;
	int32_t v0; /* first of the thread block's rows of S */
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
/* c [64, N] = (add ? c : 0) + a b. @TA: the rows of a [64, 16] run along shared memory's */
template <int N, int TA> struct product;

template <int TA> struct product<32, TA> {
	static __device__ void run(float (&c)[16], uint64_t a, uint64_t b, int add)
	{
		asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0;\n"
			     "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
			     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
			     "%16, %17, p, 1, 1, %19, 0; }"
			     : KV_C8(c, 0), KV_C8(c, 8)
			     : "l"(a), "l"(b), "r"(add), "n"(TA));
	}
};

template <int TA> struct product<16, TA> {
	static __device__ void run(float (&c)[8], uint64_t a, uint64_t b, int add)
	{
		asm volatile("{ .reg .pred p; setp.ne.b32 p, %10, 0;\n"
			     "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
			     "{%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, %11, 0; }"
			     : KV_C8(c, 0)
			     : "l"(a), "l"(b), "r"(add), "n"(TA));
	}
};

/* acc = tile [64][128] times S0 [128][NV] */
template <int NV>
__device__ static void times_state(float (&acc)[NV / 2], const char *tile, const char *s)
{
	kv_wgmma_fence();
#pragma unroll
	for (int k = 0; k < CHUNK_DK / 16; k++)
		product<NV, 0>::run(
			acc, kv_wgmma_operand(shared_at(tile) + k / 4 * HALF + k % 4 * 32, 16, 1024),
			kv_wgmma_operand(shared_at(s) + k / 4 * (NV * 128) + k % 4 * 32, 16, 1024),
			k > 0);
	kv_wgmma_commit();
	kv_wgmma_wait<0>();
	kv_wgmma_hold(acc);
}

/* A warpgroup's [64, NV] to shared memory as [NV][64] bf16. */
template <int NV> __device__ static void store_turned(char *to, const float (&c)[NV / 2])
{
	const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % 4;
	const int row = lane % 8 + lane / 16 * 8, piece = 2 * warp + lane / 8 % 2;
	const uint32_t at = shared_at(to) + (uint32_t)(row * 128 + (piece ^ (row & 7)) * 16);

#pragma unroll
	for (int j = 0; j < NV / 8; j += 2)
		asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
				     at + j * 8 * 128),
			     "r"(kv_pack<KV_BF16>(c[4 * j], c[4 * j + 1])),
			     "r"(kv_pack<KV_BF16>(c[4 * j + 2], c[4 * j + 3])),
			     "r"(kv_pack<KV_BF16>(c[4 * j + 4], c[4 * j + 5])),
			     "r"(kv_pack<KV_BF16>(c[4 * j + 6], c[4 * j + 7]))
			     : "memory");
}

__device__ static void barrier_wait(uint64_t *bar, int phase)
{
	kv_barrier_wait(shared_at(bar), (uint32_t)phase);
}

__device__ static void bring(void *to, const char *from, int bytes, uint64_t *bar)
{
	asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
		     "[%0], [%1], %2, [%3];" ::"r"(shared_at(to)),
		     "l"(from), "r"(bytes), "r"(shared_at(bar))
		     : "memory");
}

template <int RULE, int NV>
__device__ static void bring_chunks(const struct chunk_params &p, const struct walk &w,
				    struct scan_shared<NV> &m)
{
	const int hk = w.h / (p.a.heads / p.a.heads_k);
	const int bytes = sizeof(m.stages[0]) + TILE_GATES - (RULE == KV_RULE_DELTA ? 0 : TILE_QK);

	for (int c = 0; c < w.n; c++) {
		const int at = c % STAGES;
		struct scan_stage<NV> &s = m.stages[at];
		uint64_t *bar = &m.full[at];
		const int64_t chunk = w.first + c;
		const char *qk = p.qk + (chunk * p.a.heads_k + hk) * (2 * TILE_QK);
		const char *head = p.heads + (chunk * p.a.heads + w.h) * p.head_bytes;

		if (c >= STAGES)
			barrier_wait(&m.empty[at], (c / STAGES - 1) & 1);
		kv_barrier_expect(shared_at(bar), (uint32_t)bytes);
		if (RULE == KV_RULE_DELTA)
			bring(s.w, head, TILE_QK, bar);
		bring(s.k, qk + TILE_QK, TILE_QK, bar);
		bring(s.u, head + chunk_at_u(RULE) + w.v0 * CHUNK * 2, sizeof(s.u), bar);
		bring(m.gates[at], head + chunk_at_gates(RULE, p.a.dim_v), TILE_GATES, bar);
		bring(s.q, qk, TILE_QK, bar);
		bring(s.p, head + chunk_at_p(RULE), TILE_P, bar);
	}
}

/* This warp has written what @bar counts, which the tensor core reads. */
__device__ static void tell_written(uint64_t *bar)
{
	fence_async();
	__syncwarp();
	if (threadIdx.x % 32 == 0)
		kv_barrier_arrive(shared_at(bar));
}

/* This warp has read it, and used it. */
__device__ static void tell_read(uint64_t *bar)
{
	__syncwarp();
	if (threadIdx.x % 32 == 0)
		kv_barrier_arrive(shared_at(bar));
}

/*
 * Element i of a thread's [64, NV] part of S^T, from dim_k @k0 on: where in the head's S. Rows of S
 * are dim_v's; i is as wgmma has it.
 */
__device__ static int64_t element_at(int i, int k0, int v0)
{
	const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % 4;
	int k = k0 + 16 * warp + lane / 4 + 8 * (i / 2 % 2);
	int v = v0 + i / 4 * 8 + lane % 4 * 2 + i % 2;

	return (int64_t)v * CHUNK_DK + k;
}

template <int NV, int STATE>
__device__ static void load_rows(float (&s)[NV / 2], const struct chunk_params &p,
				 const struct walk &w, int k0)
{
	const char *from =
		(const char *)p.a.state.base + kv_state_offset(&p.a.state, w.lane.read, w.h);

#pragma unroll
	for (int i = 0; i < NV / 2; i++) {
		int64_t at = element_at(i, k0, w.v0);

		if (w.lane.fresh)
			s[i] = 0;
		else if (STATE == KV_F32)
			s[i] = ((const float *)from)[at];
		else
			s[i] = kv_bf16_to_f32(((const uint16_t *)from)[at]);
	}
}

template <int NV, int STATE>
__device__ static void store_rows(const float (&s)[NV / 2], const struct chunk_params &p,
				  const struct walk &w, int k0, int32_t row)
{
	char *to;

	if (kv_row_is_null(&p.a.batch, row))
		return;
	to = (char *)p.a.state.base + kv_state_offset(&p.a.state, row, w.h);
#pragma unroll
	for (int i = 0; i < NV / 2; i++) {
		int64_t at = element_at(i, k0, w.v0);

		if (STATE == KV_F32)
			((float *)to)[at] = s[i];
		else
			((uint16_t *)to)[at] = kv_to_16(s[i], true);
	}
}

/* The chain, one half of dim_k: S from chunk to chunk. */
template <int NV, int STATE>
__device__ static void walk_state(const struct chunk_params &p, const struct walk &w,
				  struct scan_shared<NV> &m, int half)
{
	float s[NV / 2];

	load_rows<NV, STATE>(s, p, w, 64 * half);
	for (int c = 0; c < w.n; c++) {
		const int at = c % STAGES, turn = c & 1;
		const char *k = m.stages[at].k + half * HALF;
		float decay;

		if (c >= 2)
			barrier_wait(&m.out_done[turn], (c / 2 - 1) & 1);
		store_turned<NV>(m.s[turn] + half * (NV * 128), s);
		tell_written(&m.s_full[turn]);
		barrier_wait(&m.full[at], c / STAGES & 1);
		decay = m.gates[at][0][CHUNK - 1];
#pragma unroll
		for (int i = 0; i < NV / 2; i++)
			s[i] *= decay;
		barrier_wait(&m.v_full[turn], c / 2 & 1);
		kv_wgmma_hold(s);
		kv_wgmma_fence();
#pragma unroll
		for (int t = 0; t < CHUNK / 16; t++)
			product<NV, 1>::run(
				s, kv_wgmma_operand(shared_at(k) + t * 2048, 1024, 1024),
				kv_wgmma_operand(shared_at(m.grown[turn]) + t * 32, 16, 1024), 1);
		kv_wgmma_commit();
		kv_wgmma_wait<0>();
		kv_wgmma_hold(s);
		tell_read(&m.empty[at]);
		if (p.a.batch.table) {
			struct chunk_entry e = p.entries[w.first + c];
			int64_t n = w.lane.computed + e.start - w.lane.start + e.len;

			store_rows<NV, STATE>(s, p, w, 64 * half,
					      kv_checkpoint_row(&p.a.batch, w.b, n));
		}
	}
	store_rows<NV, STATE>(s, p, w, 64 * half, w.lane.write);
}

/* V' of each chunk, from S0. */
template <int RULE, int NV>
__device__ static void walk_values(const struct walk &w, struct scan_shared<NV> &m)
{
	const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % 4;
	const int row = 16 * warp + lane / 4;

	for (int c = 0; c < w.n; c++) {
		const int at = c % STAGES, turn = c & 1;
		struct scan_stage<NV> &stage = m.stages[at];
		float acc[NV / 2] = {}, grow[2];

		barrier_wait(&m.full[at], c / STAGES & 1);
		barrier_wait(&m.s_full[turn], c / 2 & 1);
		if (RULE == KV_RULE_DELTA)
			times_state<NV>(acc, stage.w, m.s[turn]);
		grow[0] = m.gates[at][1][row];
		grow[1] = m.gates[at][1][row + 8];
#pragma unroll
		for (int n = 0; n < NV / 8; n++) { /* U - W S0^T */
			uint2 u = ((const uint2 *)stage.u)[(n * 4 + warp) * 32 + lane];

			acc[4 * n] = kv_bf16_to_f32((uint16_t)u.x) - acc[4 * n];
			acc[4 * n + 1] = kv_bf16_to_f32((uint16_t)(u.x >> 16)) - acc[4 * n + 1];
			acc[4 * n + 2] = kv_bf16_to_f32((uint16_t)u.y) - acc[4 * n + 2];
			acc[4 * n + 3] = kv_bf16_to_f32((uint16_t)(u.y >> 16)) - acc[4 * n + 3];
		}
		if (c >= 2)
			barrier_wait(&m.out_done[turn], (c / 2 - 1) & 1);
		store_turned<NV>(m.v[turn], acc);
#pragma unroll
		for (int i = 0; i < NV / 2; i++)
			acc[i] *= grow[i / 2 % 2];
		store_turned<NV>(m.grown[turn], acc);
		tell_written(&m.v_full[turn]);
		tell_read(&m.empty[at]);
	}
}

/* Two elements of O side by side: + D x, to out. */
template <int RULE>
__device__ static void store_pair(const struct chunk_params &p, const struct walk &w, int64_t t,
				  int v, float x, float y)
{
	if (RULE == KV_RULE_SSD && p.a.d) {
		int64_t at = t * p.a.v_stride + w.h * p.a.dim_v + v;

		x += p.a.d[w.h] * kv_io_load<KV_IO16>(p.a.v, at, true);
		y += p.a.d[w.h] * kv_io_load<KV_IO16>(p.a.v, at + 1, true);
	}
	*(uint32_t *)((uint16_t *)p.a.out + t * p.a.out_stride + w.h * p.a.dim_v + v) =
		kv_pack<KV_BF16>(x, y);
}

/* What is put out, up to a chunk behind the chain. */
template <int RULE, int NV>
__device__ static void walk_out(const struct chunk_params &p, const struct walk &w,
				struct scan_shared<NV> &m)
{
	const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % 4;
	const int row = 16 * warp + lane / 4;

	for (int c = 0; c < w.n; c++) {
		const int at = c % STAGES, turn = c & 1;
		struct scan_stage<NV> &stage = m.stages[at];
		const struct chunk_entry e = p.entries[w.first + c];
		float acc[NV / 2] = {}, grow[2];

		barrier_wait(&m.full[at], c / STAGES & 1);
		barrier_wait(&m.s_full[turn], c / 2 & 1);
		times_state<NV>(acc, stage.q, m.s[turn]);
		grow[0] = m.gates[at][0][row];
		grow[1] = m.gates[at][0][row + 8];
#pragma unroll
		for (int i = 0; i < NV / 2; i++)
			acc[i] *= grow[i / 2 % 2];
		barrier_wait(&m.v_full[turn], c / 2 & 1);
		kv_wgmma_hold(acc);
		kv_wgmma_fence();
#pragma unroll
		for (int t = 0; t < CHUNK / 16; t++)
			product<NV, 0>::run(
				acc, kv_wgmma_operand(shared_at(stage.p) + t * 32, 16, 1024),
				kv_wgmma_operand(shared_at(m.v[turn]) + t * 32, 16, 1024), 1);
		kv_wgmma_commit();
		kv_wgmma_wait<0>();
		kv_wgmma_hold(acc);
		tell_read(&m.out_done[turn]);
		tell_read(&m.empty[at]);
#pragma unroll
		for (int i = 0; i < NV / 2; i += 2) {
			int t = row + 8 * (i / 2 % 2);

			if (t < e.len)
				store_pair<RULE>(p, w, (int64_t)e.start + t,
						 w.v0 + i / 4 * 8 + lane % 4 * 2, acc[i],
						 acc[i + 1]);
		}
	}
}

/* Rows of out of a lane that is padding. */
template <int NV> __device__ static void clear(const struct chunk_params &p, const struct walk &w)
{
	for (int i = (int)threadIdx.x; i < w.lane.len * NV; i += THREADS)
		((uint16_t *)p.a.out)[(w.lane.start + i / NV) * p.a.out_stride +
				      w.h * p.a.dim_v + w.v0 + i % NV] = 0;
}

template <int NV> __device__ static void init_barriers(struct scan_shared<NV> &m)
{
	for (int i = 0; i < STAGES; i++) {
		kv_barrier_init(shared_at(&m.full[i]), 1);
		kv_barrier_init(shared_at(&m.empty[i]), WARPS);
	}
	for (int i = 0; i < 2; i++) {
		kv_barrier_init(shared_at(&m.s_full[i]), 8);
		kv_barrier_init(shared_at(&m.v_full[i]), 4);
		kv_barrier_init(shared_at(&m.out_done[i]), 4);
	}
	kv_barrier_init_fence();
}

#endif

template <int RULE, int NV, int STATE>
__global__ void __launch_bounds__(THREADS, 1) scan_kernel(struct chunk_params p)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
	extern __shared__ __align__(1024) char shared[];
	struct scan_shared<NV> &m = *(struct scan_shared<NV> *)shared;
	const int group = (int)threadIdx.x / KV_WARPGROUP;
	struct walk w;

	kv_wait_for_grids();
	w.b = blockIdx.z;
	w.lane = kv_lane_get(&p.a.batch, w.b);
	w.h = (int32_t)blockIdx.y;
	w.v0 = (int32_t)blockIdx.x * NV;
	if (w.lane.len < CHUNK_MIN_LEN)
		return;
	if (w.lane.pad) {
		clear<NV>(p, w);
		return;
	}
	w.first = p.first[w.b];
	w.n = p.first[w.b + 1] - (int32_t)w.first;
	if (threadIdx.x == 0)
		init_barriers<NV>(m);
	__syncthreads();
	if (group == 0)
		walk_values<RULE, NV>(w, m);
	else if (group == 1)
		walk_out<RULE, NV>(p, w, m);
	else if (group < 4)
		walk_state<NV, STATE>(p, w, m, group - 2);
	else if (threadIdx.x % 32 == 0)
		bring_chunks<RULE, NV>(p, w, m);
#endif
}

template <int RULE, int NV>
static int launch(const struct kv_recur *args, const struct chunk_params *params)
{
	void (*kernel)(struct chunk_params) = args->state.dtype == KV_F32
						      ? scan_kernel<RULE, NV, KV_F32>
						      : scan_kernel<RULE, NV, KV_BF16>;
	int slices = args->dim_v / NV;

	return kv_launch_cluster(
		"walk over chunks", kernel,
		dim3((unsigned)slices, (unsigned)args->heads, (unsigned)args->batch.n_seqs),
		THREADS, sizeof(struct scan_shared<NV>), 1, true, args->stream, *params);
}

extern "C" int kv_recur_scan(const struct kv_recur *args, const struct chunk_params *params)
{
	/* Few heads: half as many rows a thread block, so that more multiprocessors work. */
	bool few = args->dim_v / 32 * args->heads * (int64_t)args->batch.n_seqs < 64;

	if (args->rule == KV_RULE_DELTA)
		return few ? launch<KV_RULE_DELTA, 16>(args, params)
			   : launch<KV_RULE_DELTA, 32>(args, params);
	return few ? launch<KV_RULE_SSD, 16>(args, params) : launch<KV_RULE_SSD, 32>(args, params);
}
