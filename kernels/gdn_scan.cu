/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The walk over a lane's chunks, with the state in registers: gdn_chunk.cuh has the mathematics.
 *
 * Everything is transposed: rows are dim_v, so a warp with 16 rows of S needs no other warp. Its sums
 * S (f32, as mma puts them out) become the left operands of the next products by rounding alone.
 *
 *	V'^T = U^T - S W^T                      16 x 64   by the warp that has S:
 *	S    = e^c S + (V'^T e^(c - c_t)) K^    16 x 128  the chain from chunk to chunk
 *	O^T  = (S0 Q^^T) e^(c_t) + V'^T P^T     16 x 64   by a second warp, beside the chain
 *
 * The second warp gets S0 and V'^T, rounded, through shared memory. One more warp brings the tiles of
 * coming chunks. Thread blocks of one head, which differ in rows alone, are a cluster: each brings a
 * part of the tiles for all of them.
 *
 * Work: blockIdx is (rows, head, lane).
 */
#include "kernels/gdn_chunk.cuh"
#include "kernels/gdn_chunk.h"

#define STAGES 3

template <int PAIRS> struct scan_stage {
	char w[TILE_QK];
	char q[TILE_QK];
	char k[TILE_QK];
	char p[TILE_P];
	char u[PAIRS * CHUNK * 16 * 2];
	float gates[2][CHUNK]; /* e^(c_t), e^(c - c_t) */
};

template <int PAIRS> struct scan_shared {
	struct scan_stage<PAIRS> stages[STAGES];
	uint4 s[PAIRS][2][8][32]; /* S0 by parity of the chunk, as left operands */
	uint4 v[PAIRS][2][4][32]; /* V'^T */
	uint64_t full[STAGES];
	uint64_t empty[STAGES];
};

/* What does not change from chunk to chunk. */
struct walk {
	struct kv_lane lane;
	int64_t b;
	int64_t first; /* chunk */
	int32_t n;     /* chunks */
	int32_t h;
	int32_t v0; /* first of the thread block's rows of S */
	int32_t rank, cluster;
};

__device__ static void barrier_init(uint64_t *bar, int count)
{
	asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_at(bar)), "r"(count));
}

__device__ static void barrier_wait(uint64_t *bar, int phase)
{
	asm volatile(
		"{ .reg .pred p;\n"
		"again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
		"@!p bra again; }" ::"r"(shared_at(bar)),
		"r"(phase)
		: "memory");
}

/* Arrive at the same barrier of thread block @rank of the cluster. */
__device__ static void barrier_arrive(uint64_t *bar, int rank)
{
	asm volatile("{ .reg .b32 at;\n"
		     "mapa.shared::cluster.u32 at, %0, %1;\n"
		     "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [at]; }" ::"r"(
			     shared_at(bar)),
		     "r"(rank)
		     : "memory");
}

__device__ static void cluster_sync(void)
{
	asm volatile("barrier.cluster.arrive.release.aligned;\n"
		     "barrier.cluster.wait.acquire.aligned;" ::
			     : "memory");
}

/* The pair's barriers: S0 and V' are there; they have been read. */
__device__ static void pair_sync(int id)
{
	asm volatile("bar.sync %0, 64;" ::"r"(id) : "memory");
}

__device__ static void pair_arrive(int id)
{
	asm volatile("bar.arrive %0, 64;" ::"r"(id) : "memory");
}

__device__ static int pair_full(int pair, int c)
{
	return 1 + pair * 4 + (c & 1);
}

__device__ static int pair_empty(int pair, int c)
{
	return 3 + pair * 4 + (c & 1);
}

/* @bytes to this thread block, or this one's share of them to all of the cluster. */
__device__ static void bring(void *to, const char *from, int bytes, uint64_t *bar)
{
	asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
		     "[%0], [%1], %2, [%3];" ::"r"(shared_at(to)),
		     "l"(from), "r"(bytes), "r"(shared_at(bar))
		     : "memory");
}

__device__ static void bring_all(char *to, const char *from, int bytes, uint64_t *bar,
				 const struct walk &w)
{
	int part = bytes / w.cluster, at = w.rank * part;

	if (w.cluster == 1) {
		bring(to, from, bytes, bar);
		return;
	}
	asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
		     ".multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(shared_at(to + at)),
		     "l"(from + at), "r"(part), "r"(shared_at(bar)),
		     "h"((uint16_t)((1 << w.cluster) - 1))
		     : "memory");
}

template <int RULE, int PAIRS>
__device__ static void bring_chunks(const struct chunk_params &p, const struct walk &w,
				    struct scan_shared<PAIRS> &m)
{
	const int hk = w.h / (p.a.heads / p.a.heads_k);
	const int bytes = sizeof(m.stages[0]) - (RULE == KV_RULE_DELTA ? 0 : TILE_QK);

	for (int c = 0; c < w.n; c++) {
		struct scan_stage<PAIRS> &s = m.stages[c % STAGES];
		uint64_t *bar = &m.full[c % STAGES];
		const int64_t chunk = w.first + c;
		const char *qk = p.qk + (chunk * p.a.heads_k + hk) * (2 * TILE_QK);
		const char *head = p.heads + (chunk * p.a.heads + w.h) * p.head_bytes;

		if (c >= STAGES)
			barrier_wait(&m.empty[c % STAGES], (c / STAGES - 1) & 1);
		asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
				     shared_at(bar)),
			     "r"(bytes)
			     : "memory");
		if (RULE == KV_RULE_DELTA)
			bring_all(s.w, head, TILE_QK, bar, w);
		bring_all(s.k, qk + TILE_QK, TILE_QK, bar, w);
		bring_all(s.q, qk, TILE_QK, bar, w);
		bring_all(s.p, head + chunk_at_p(RULE), TILE_P, bar, w);
		bring(s.u, head + chunk_at_u(RULE) + w.v0 * CHUNK * 2, sizeof(s.u), bar);
		bring(s.gates, head + chunk_at_gates(RULE, p.a.dim_v), TILE_GATES, bar);
	}
}

/* This warp has read stage c. */
template <int PAIRS>
__device__ static void release(struct scan_shared<PAIRS> &m, const struct walk &w, int c)
{
	const int lane = (int)threadIdx.x % 32;

	__syncwarp();
	if (lane < w.cluster)
		barrier_arrive(&m.empty[c % STAGES], lane);
}

/* S of this warp's 16 rows from @from: [row][CHUNK_DK] */
template <int STATE>
__device__ static void load_rows(float (&s)[16][4], const struct chunk_params &p,
				 const struct walk &w, int row0)
{
	const int lane = (int)threadIdx.x % 32;
	const char *from =
		(const char *)p.a.state.base + kv_state_offset(&p.a.state, w.lane.read, w.h);

#pragma unroll
	for (int n = 0; n < 16; n++)
#pragma unroll
		for (int half = 0; half < 2; half++) {
			int64_t at = (int64_t)(row0 + lane / 4 + 8 * half) * CHUNK_DK + 8 * n +
				     lane % 4 * 2;
			float2 x = make_float2(0, 0);

			if (!w.lane.fresh && STATE == KV_F32)
				x = *(const float2 *)((const float *)from + at);
			else if (!w.lane.fresh)
				x = __bfloat1622float2(*(
					const __nv_bfloat162 *)((const __nv_bfloat16 *)from + at));
			s[n][2 * half] = x.x;
			s[n][2 * half + 1] = x.y;
		}
}

template <int STATE>
__device__ static void store_rows(const float (&s)[16][4], const struct chunk_params &p,
				  const struct walk &w, int row0, int32_t row)
{
	const int lane = (int)threadIdx.x % 32;
	char *to;

	if (kv_row_is_null(&p.a.batch, row))
		return;
	to = (char *)p.a.state.base + kv_state_offset(&p.a.state, row, w.h);
#pragma unroll
	for (int n = 0; n < 16; n++)
#pragma unroll
		for (int half = 0; half < 2; half++) {
			int64_t at = (int64_t)(row0 + lane / 4 + 8 * half) * CHUNK_DK + 8 * n +
				     lane % 4 * 2;
			float x = s[n][2 * half], y = s[n][2 * half + 1];

			if (STATE == KV_F32)
				*(float2 *)((float *)to + at) = make_float2(x, y);
			else
				*(uint32_t *)((uint16_t *)to + at) = kv_pack<KV_BF16>(x, y);
		}
}

/* Sums of two tiles side by side as a left operand of 16 columns. */
__device__ static uint4 operand(const float (&x)[4], const float (&y)[4])
{
	return make_uint4(kv_pack<KV_BF16>(x[0], x[1]), kv_pack<KV_BF16>(x[2], x[3]),
			  kv_pack<KV_BF16>(y[0], y[1]), kv_pack<KV_BF16>(y[2], y[3]));
}

/* acc[8 tokens a tile] += X rows^T, for a tile of rows [token][CHUNK_DK], columns 16 k.. */
__device__ static void times_rows(float (&acc)[8][4], const uint4 &x, uint32_t tile, int k)
{
	const int lane = (int)threadIdx.x % 32;

#pragma unroll
	for (int n = 0; n < 4; n++) {
		uint32_t y[4];

		kv_ldmatrix(y, frag_cols<16>(tile, 16 * n, 16 * k, lane));
		kv_mma<KV_BF16>(acc[2 * n], {x.x, x.y, x.z, x.w}, {y[0], y[1]});
		kv_mma<KV_BF16>(acc[2 * n + 1], {x.x, x.y, x.z, x.w}, {y[2], y[3]});
	}
}

/* The chain: S from chunk to chunk. */
template <int RULE, int PAIRS, int STATE>
__device__ static void walk_state(const struct chunk_params &p, const struct walk &w,
				  struct scan_shared<PAIRS> &m, int pair)
{
	const int lane = (int)threadIdx.x % 32, row0 = w.v0 + 16 * pair;
	float s[16][4];
	uint4 left[8];

	load_rows<STATE>(s, p, w, row0);
	for (int c = 0; c < w.n; c++) {
		struct scan_stage<PAIRS> &stage = m.stages[c % STAGES];
		float acc[8][4] = {}, decay;
		uint4 v[4];

#pragma unroll
		for (int k = 0; k < 8; k++)
			left[k] = operand(s[2 * k], s[2 * k + 1]);
		if (c >= 2)
			pair_sync(pair_empty(pair, c));
#pragma unroll
		for (int k = 0; k < 8; k++)
			m.s[pair][c & 1][k][lane] = left[k];
		barrier_wait(&m.full[c % STAGES], c / STAGES & 1);
		if (RULE == KV_RULE_DELTA)
#pragma unroll
			for (int k = 0; k < 8; k++)
				times_rows(acc, left[k], shared_at(stage.w), k);
#pragma unroll
		for (int n = 0; n < 8; n++) { /* U - S W^T */
			uint2 u = ((const uint2 *)stage.u)[(pair * 8 + n) * 32 + lane];

			acc[n][0] = kv_bf16_to_f32((uint16_t)u.x) - acc[n][0];
			acc[n][1] = kv_bf16_to_f32((uint16_t)(u.x >> 16)) - acc[n][1];
			acc[n][2] = kv_bf16_to_f32((uint16_t)u.y) - acc[n][2];
			acc[n][3] = kv_bf16_to_f32((uint16_t)(u.y >> 16)) - acc[n][3];
		}
#pragma unroll
		for (int k = 0; k < 4; k++)
			m.v[pair][c & 1][k][lane] = operand(acc[2 * k], acc[2 * k + 1]);
		pair_arrive(pair_full(pair, c));
		decay = stage.gates[0][CHUNK - 1];
#pragma unroll
		for (int n = 0; n < 8; n++) {
			float2 g = *(const float2 *)&stage.gates[1][8 * n + lane % 4 * 2];

			acc[n][0] *= g.x;
			acc[n][1] *= g.y;
			acc[n][2] *= g.x;
			acc[n][3] *= g.y;
		}
#pragma unroll
		for (int k = 0; k < 4; k++)
			v[k] = operand(acc[2 * k], acc[2 * k + 1]);
#pragma unroll
		for (int n = 0; n < 16; n++)
#pragma unroll
			for (int i = 0; i < 4; i++)
				s[n][i] *= decay;
#pragma unroll
		for (int k = 0; k < 4; k++)
#pragma unroll
			for (int n = 0; n < 8; n++) {
				uint32_t y[4];

				kv_ldmatrix_trans(
					y, frag_rows<16>(shared_at(stage.k), 16 * k, 16 * n, lane));
				kv_mma<KV_BF16>(s[2 * n], {v[k].x, v[k].y, v[k].z, v[k].w},
						{y[0], y[1]});
				kv_mma<KV_BF16>(s[2 * n + 1], {v[k].x, v[k].y, v[k].z, v[k].w},
						{y[2], y[3]});
			}
		release(m, w, c);
		if (p.a.batch.table) {
			struct chunk_entry e = p.entries[w.first + c];
			int64_t n = w.lane.computed + e.start - w.lane.start + e.len;

			store_rows<STATE>(s, p, w, row0, kv_checkpoint_row(&p.a.batch, w.b, n));
		}
	}
	store_rows<STATE>(s, p, w, row0, w.lane.write);
}

/* Two rows of a tile of O^T, transposed, to out; + D x */
template <int RULE>
__device__ static void store_tile(const float (&acc)[4], const struct chunk_params &p,
				  const struct walk &w, const struct chunk_entry &e, int row0,
				  int n)
{
	const int lane = (int)threadIdx.x % 32, t = 8 * n + lane / 4;
	float x[4] = {acc[0], acc[1], acc[2], acc[3]};
	uint32_t low, high;
	uint16_t *to = (uint16_t *)p.a.out + ((int64_t)e.start + t) * p.a.out_stride +
		       w.h * p.a.dim_v + row0 + lane % 4 * 2;

	if (RULE == KV_RULE_SSD && p.a.d) {
#pragma unroll
		for (int i = 0; i < 4; i++) {
			int token = 8 * n + lane % 4 * 2 + (i & 1);

			if (token < e.len)
				x[i] += p.a.d[w.h] *
					kv_io_load<KV_IO16>(p.a.v,
							    ((int64_t)e.start + token) *
									    p.a.v_stride +
								    w.h * p.a.dim_v + row0 +
								    lane / 4 + 8 * (i / 2),
							    true);
		}
	}
	low = kv_transpose(kv_pack<KV_BF16>(x[0], x[1]));
	high = kv_transpose(kv_pack<KV_BF16>(x[2], x[3]));
	if (t < e.len) {
		*(uint32_t *)to = low;
		*(uint32_t *)(to + 8) = high;
	}
}

/* What is put out, a step behind the chain. */
template <int RULE, int PAIRS>
__device__ static void walk_out(const struct chunk_params &p, const struct walk &w,
				struct scan_shared<PAIRS> &m, int pair)
{
	const int lane = (int)threadIdx.x % 32, row0 = w.v0 + 16 * pair;

	for (int c = 0; c < w.n; c++) {
		struct scan_stage<PAIRS> &stage = m.stages[c % STAGES];
		struct chunk_entry e = p.entries[w.first + c];
		float acc[8][4] = {};
		uint4 v[4];

		barrier_wait(&m.full[c % STAGES], c / STAGES & 1);
		pair_sync(pair_full(pair, c));
#pragma unroll
		for (int k = 0; k < 8; k++)
			times_rows(acc, m.s[pair][c & 1][k][lane], shared_at(stage.q), k);
#pragma unroll
		for (int k = 0; k < 4; k++)
			v[k] = m.v[pair][c & 1][k][lane];
		if (c + 2 < w.n)
			pair_arrive(pair_empty(pair, c));
#pragma unroll
		for (int n = 0; n < 8; n++) {
			float2 g = *(const float2 *)&stage.gates[0][8 * n + lane % 4 * 2];

			acc[n][0] *= g.x;
			acc[n][1] *= g.y;
			acc[n][2] *= g.x;
			acc[n][3] *= g.y;
		}
#pragma unroll
		for (int k = 0; k < 4; k++)
#pragma unroll
			for (int n = k; n < 4; n++) { /* tokens before or at: P is triangular */
				uint32_t y[4];

				kv_ldmatrix(y,
					    frag_cols<8>(shared_at(stage.p), 16 * n, 16 * k, lane));
				kv_mma<KV_BF16>(acc[2 * n], {v[k].x, v[k].y, v[k].z, v[k].w},
						{y[0], y[1]});
				kv_mma<KV_BF16>(acc[2 * n + 1], {v[k].x, v[k].y, v[k].z, v[k].w},
						{y[2], y[3]});
			}
		release(m, w, c);
#pragma unroll
		for (int n = 0; n < 8; n++)
			store_tile<RULE>(acc[n], p, w, e, row0, n);
	}
}

/* Rows of out of a lane that is padding. */
template <int PAIRS>
__device__ static void clear(const struct chunk_params &p, const struct walk &w)
{
	for (int i = (int)threadIdx.x; i < w.lane.len * 16 * PAIRS; i += (int)blockDim.x)
		((uint16_t *)p.a.out)[(w.lane.start + i / (16 * PAIRS)) * p.a.out_stride +
				      w.h * p.a.dim_v + w.v0 + i % (16 * PAIRS)] = 0;
}

template <int RULE, int PAIRS, int STATE>
__global__ void __launch_bounds__(64 * PAIRS + 32, 1) scan_kernel(struct chunk_params p)
{
	extern __shared__ __align__(128) char shared[];
	struct scan_shared<PAIRS> &m = *(struct scan_shared<PAIRS> *)shared;
	const int warp = (int)threadIdx.x / 32;
	struct walk w;

	w.b = blockIdx.z;
	w.lane = kv_lane_get(&p.a.batch, w.b);
	w.h = (int32_t)blockIdx.y;
	w.rank = (int32_t)blockIdx.x;
	w.cluster = (int32_t)gridDim.x;
	w.v0 = w.rank * 16 * PAIRS;
	if (w.lane.len < CHUNK_MIN_LEN)
		return;
	if (w.lane.pad) {
		clear<PAIRS>(p, w);
		return;
	}
	w.first = p.first[w.b];
	w.n = p.first[w.b + 1] - (int32_t)w.first;
	if (threadIdx.x == 0) {
		for (int i = 0; i < STAGES; i++) {
			barrier_init(&m.full[i], 1);
			barrier_init(&m.empty[i], 2 * PAIRS * w.cluster);
		}
		asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
	}
	cluster_sync();
	if (warp < PAIRS)
		walk_state<RULE, PAIRS, STATE>(p, w, m, warp);
	else if (warp < 2 * PAIRS)
		walk_out<RULE, PAIRS>(p, w, m, warp - PAIRS);
	else if (threadIdx.x % 32 == 0)
		bring_chunks<RULE, PAIRS>(p, w, m);
	__syncwarp();
	cluster_sync(); /* others may still arrive at this one's barriers */
}

template <int RULE, int PAIRS>
static int launch(const struct kv_recur *args, const struct chunk_params *params)
{
	void (*kernel)(struct chunk_params) = args->state.dtype == KV_F32
						      ? scan_kernel<RULE, PAIRS, KV_F32>
						      : scan_kernel<RULE, PAIRS, KV_BF16>;
	int slices = args->dim_v / (16 * PAIRS);

	return kv_launch_cluster(
		"walk over chunks", kernel,
		dim3((unsigned)slices, (unsigned)args->heads, (unsigned)args->batch.n_seqs),
		64 * PAIRS + 32, sizeof(struct scan_shared<PAIRS>), slices, args->stream, *params);
}

extern "C" int kv_recur_scan(const struct kv_recur *args, const struct chunk_params *params)
{
	/* Few heads: one warp of rows a thread block, so that more multiprocessors work. */
	bool few = args->dim_v / 32 * args->heads * (int64_t)args->batch.n_seqs < 64;

	if (args->rule == KV_RULE_DELTA)
		return few ? launch<KV_RULE_DELTA, 1>(args, params)
			   : launch<KV_RULE_DELTA, 2>(args, params);
	return few ? launch<KV_RULE_SSD, 1>(args, params) : launch<KV_RULE_SSD, 2>(args, params);
}
