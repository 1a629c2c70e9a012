/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lanes in chunks: the cut, which is made on the device, and the order of the launches. Lanes of
 * fewer than CHUNK_MIN_LEN tokens are done in steps by a launch of their own, for which they exit
 * here.
 *
 * Chunks are cut at multiples of 64 from each multiple of `interval` on, counted from the beginning
 * of the sequence: so checkpoints stand at ends of chunks, and a prompt is cut alike however it
 * came.
 */
#include "kernels/device/launch.cuh"
#include "kernels/gdn_chunk.cuh"
#include "kernels/gdn_chunk.h"
#include "kernels/gdn_step.h"

#define PLAN_THREADS 1024

/* Chunks of a sequence before the one that has position @at. */
__device__ static int64_t chunk_index(int64_t at, int64_t interval)
{
	return at / interval * ((interval + CHUNK - 1) / CHUNK) + at % interval / CHUNK;
}

/* Where chunk @i of a sequence begins. */
__device__ static int64_t chunk_start(int64_t i, int64_t interval)
{
	int64_t each = (interval + CHUNK - 1) / CHUNK;

	return i / each * interval + i % each * CHUNK;
}

__device__ static int lane_chunks(const struct kv_lane &lane, int64_t interval)
{
	if (lane.len < CHUNK_MIN_LEN || lane.pad)
		return 0;
	return (int)(chunk_index(lane.computed + lane.len - 1, interval) -
		     chunk_index(lane.computed, interval)) +
	       1;
}

__global__ void __launch_bounds__(PLAN_THREADS) plan_kernel(struct chunk_params p)
{
	__shared__ int32_t sums[PLAN_THREADS];
	const int tid = (int)threadIdx.x, n_seqs = p.a.batch.n_seqs;
	const int64_t interval = p.a.batch.interval;
	int32_t before = 0;

	kv_let_grids_start();
	kv_wait_for_grids();
	for (int b0 = 0; b0 < n_seqs; b0 += PLAN_THREADS) {
		int b = b0 + tid, n = 0;

		if (b < n_seqs)
			n = lane_chunks(kv_lane_get(&p.a.batch, b), interval);
		sums[tid] = n;
		__syncthreads();
		for (int step = 1; step < PLAN_THREADS && step < n_seqs - b0; step *= 2) {
			int x = tid >= step ? sums[tid - step] : 0;

			__syncthreads();
			sums[tid] += x;
			__syncthreads();
		}
		if (b < n_seqs)
			p.first[b] = before + sums[tid] - n;
		before += sums[n_seqs - b0 < PLAN_THREADS ? n_seqs - b0 - 1 : PLAN_THREADS - 1];
		__syncthreads();
	}
	if (tid == 0)
		p.first[n_seqs] = *p.total = before;
	__syncthreads();
	for (int b = tid / 32; b < n_seqs; b += PLAN_THREADS / 32) { /* a warp a lane */
		struct kv_lane lane = kv_lane_get(&p.a.batch, b);
		int n = lane_chunks(lane, interval);
		int64_t i0 = chunk_index(lane.computed, interval);

		for (int i = tid % 32; i < n; i += 32) {
			int64_t from = chunk_start(i0 + i, interval);
			int64_t to = chunk_start(i0 + i + 1, interval);
			struct chunk_entry e = {};

			from = from > lane.computed ? from : lane.computed;
			if (to > lane.computed + lane.len)
				to = lane.computed + lane.len;
			e.lane = b;
			e.start = (int32_t)(lane.start + from - lane.computed);
			e.len = (int32_t)(to - from);
			p.entries[p.first[b] + i] = e;
		}
	}
}

static size_t round_up(size_t bytes)
{
	return (bytes + 255) & ~(size_t)255;
}

/* Chunks at most: whole ones, and at each end of a lane and of an interval one that is not. */
static int64_t most_chunks(const struct kv_recur *a)
{
	int64_t tokens = a->batch.n_tokens, lanes = tokens / CHUNK_MIN_LEN + 1;

	if (lanes > a->batch.n_seqs)
		lanes = a->batch.n_seqs;
	return tokens / CHUNK + (a->batch.interval % CHUNK ? tokens / a->batch.interval : 0) +
	       3 * lanes;
}

static int64_t channels(const struct kv_recur *a)
{
	return 2 * (int64_t)a->heads_k * a->dim_k + (int64_t)a->heads * a->dim_v;
}

/* Divides the workspace. @ret_x: output of a convolution in front. Return: bytes. */
static size_t divide(const struct kv_recur *a, struct chunk_params *p, char **ret_x)
{
	int64_t n = most_chunks(a);
	char *base = (char *)a->workspace;
	size_t at = 0;

	p->a = *a;
	p->n_max = (int32_t)n;
	p->head_bytes = chunk_head_bytes(a->rule, a->dim_v);
	p->total = (int32_t *)(base + at);
	at += 256;
	p->first = (int32_t *)(base + at);
	at += round_up(((size_t)a->batch.n_seqs + 1) * sizeof(int32_t));
	p->entries = (struct chunk_entry *)(base + at);
	at += round_up((size_t)n * sizeof(struct chunk_entry));
	p->qk = base + at;
	at += (size_t)n * (size_t)a->heads_k * 2 * TILE_QK;
	p->heads = base + at;
	at += round_up((size_t)n * (size_t)a->heads * (size_t)p->head_bytes);
	*ret_x = base + at;
	if (a->conv_weight)
		at += round_up((size_t)a->batch.n_tokens * (size_t)channels(a) * 2);
	return at;
}

extern "C" size_t kv_recur_chunk_workspace(const struct kv_recur *args)
{
	struct chunk_params p;
	char *x;

	return divide(args, &p, &x);
}

extern "C" void kv_recur_chunk_compare(const struct kv_recur *args, struct kv_state_reasons *why)
{
	const bool delta = args->rule == KV_RULE_DELTA;
	uint64_t bits = (uint64_t)(uintptr_t)args->out | (uint64_t)(args->out_stride * 2);
	size_t bytes = kv_recur_chunk_workspace(args);
	int device, major;

#ifndef KV_HAVE_SM90A
	kv_state_because(why, KV_STATE_REASON_CAPABILITY,
			 "device: chunk needs sm_90a, for which this build has no code");
#endif
	if (cudaGetDevice(&device) == cudaSuccess &&
	    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
		    cudaSuccess &&
	    major > 9) /* what is older is refused as by steps */
		kv_state_because(why, KV_STATE_REASON_CAPABILITY,
				 "device: compute capability %d, chunk needs 9.0", major);
	if (args->dtype != KV_BF16)
		kv_state_because(why, KV_STATE_REASON_DTYPE,
				 "dtype: %d given, chunk takes %d (bf16)", args->dtype, KV_BF16);
	if (args->dim_k != CHUNK_DK)
		kv_state_because(why, KV_STATE_REASON_DIM_K, "%s: %d given, chunk takes %d",
				 delta ? "dim_k" : "state_dim", args->dim_k, CHUNK_DK);
	if (args->dim_v != 64 && args->dim_v != 128)
		kv_state_because(why, KV_STATE_REASON_DIM_V, "%s: %d given, chunk takes 64 and 128",
				 delta ? "dim_v" : "head_dim", args->dim_v);
	if (args->heads / args->heads_k > CHUNK_GROUP)
		kv_state_because(why, KV_STATE_REASON_GROUP,
				 "heads: %d for each of %d given, chunk takes up to %d",
				 args->heads / args->heads_k, args->heads_k, CHUNK_GROUP);
	if (args->batch.max_query_len < CHUNK_MIN_LEN)
		kv_state_because(why, KV_STATE_REASON_SHORT,
				 "max_query_len: %d given, chunk takes lanes from %d on",
				 args->batch.max_query_len, CHUNK_MIN_LEN);
	if (args->batch.step_rows)
		kv_state_because(why, KV_STATE_REASON_STEPS,
				 "step_rows: given, chunk keeps no states between tokens");
	if (!args->conv_weight)
		bits |= (uint64_t)(uintptr_t)args->q | (uint64_t)(uintptr_t)args->k |
			(uint64_t)(uintptr_t)args->v | (uint64_t)(args->q_stride * 2) |
			(uint64_t)(args->k_stride * 2) | (uint64_t)(args->v_stride * 2);
	if (bits % 16)
		kv_state_because(why, KV_STATE_REASON_ALIGNMENT,
				 "q, k, v, out: bases and strides are not multiples of 16 bytes");
	if (args->workspace_bytes < bytes)
		kv_state_because(why, KV_STATE_REASON_WORKSPACE,
				 "workspace_bytes: %zu given, chunk needs %zu",
				 args->workspace_bytes, bytes);
	kv_recur_step_compare(args, why); /* it leaves short lanes to steps */
}

extern "C" int kv_recur_chunk(const struct kv_recur *args)
{
	struct chunk_params p;
	struct kv_recur a = *args;
	char *x;
	int r;

	divide(args, &p, &x);
	if (args->conv_weight) {
		struct kv_conv1d_args conv;
		int64_t qk = (int64_t)a.heads_k * a.dim_k;

		kv_recur_conv(args, x, &conv);
		r = kv_conv1d_cuda(&conv);
		if (r < 0)
			return r;
		a.q = x;
		a.k = x + 2 * qk;
		a.v = x + 4 * qk;
		a.q_stride = a.k_stride = a.v_stride = conv.n_channels;
		a.conv_weight = NULL;
	}
	p.a = a;
	r = kv_recur_step_lanes(&a, CHUNK_MIN_LEN - 1);
	if (r < 0)
		return r;
	r = kv_launch_cluster("cut into chunks", plan_kernel, dim3(1), PLAN_THREADS, 0, 1,
			      true, args->stream, p);
	if (r < 0)
		return r;
	r = kv_recur_prep(&a, &p);
	return r < 0 ? r : kv_recur_scan(&a, &p);
}
