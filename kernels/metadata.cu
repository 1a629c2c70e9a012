/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batch metadata on a GPU, from lengths that lie there.
 *
 * Work: a thread block has TOKENS tokens of the outputs by token, and finds the offsets of all
 * sequences for itself: n_seqs is small, and so no block waits for another. Block 0 writes the arrays
 * by sequence. offsets[b] = sum of n_query[0..b), in shared memory; a token's sequence is the last one
 * that begins at or before it, found by bisection (empty ones are passed over).
 */
#include "kernels/device/launch.cuh"
#include "kernels/device/warp.cuh"
#include "kernels/metadata.h"

#define THREADS 256
#define TOKENS	1024 /* of a thread block */

/* offsets[0..n_seqs] from n_query; all threads take part. */
__device__ static void sum_up(const struct kv_metadata_args &a, int *offsets, int *parts)
{
	int each = (a.n_seqs + THREADS - 1) / THREADS, first = threadIdx.x * each, sum = 0;
	int last = min(first + each, a.n_seqs), lane = threadIdx.x % KV_WARP, before;

	for (int b = first; b < last; b++)
		sum += max(a.n_query[b], 0);
	before = sum;
	for (int step = 1; step < KV_WARP; step *= 2) { /* inclusive sum over the lanes */
		int other = __shfl_up_sync(KV_ALL_LANES, before, step);

		before += lane >= step ? other : 0;
	}
	if (lane == KV_WARP - 1)
		parts[threadIdx.x / KV_WARP] = before;
	__syncthreads();
	before -= sum;
	for (int w = 0; w < (int)threadIdx.x / KV_WARP; w++)
		before += parts[w];
	for (int b = first; b < last; b++) {
		offsets[b] = before;
		before += max(a.n_query[b], 0);
	}
	if (last == a.n_seqs && first <= last && (first < last || first == a.n_seqs))
		offsets[a.n_seqs] = before;
	__syncthreads();
}

/* The longest query and the longest sequence. */
__device__ static void find_longest(const struct kv_metadata_args &a)
{
	__shared__ int longest[2];

	if (threadIdx.x < 2)
		longest[threadIdx.x] = 0;
	__syncthreads();
	for (int b = threadIdx.x; b < a.n_seqs; b += THREADS) {
		if (a.n_query[b] > 0) {
			atomicMax(&longest[0], a.n_query[b]);
			atomicMax(&longest[1], a.n_computed[b] + a.n_query[b]);
		}
	}
	__syncthreads();
	if (threadIdx.x < 2)
		a.max_lens[threadIdx.x] = longest[threadIdx.x];
}

__global__ void __launch_bounds__(THREADS) build(struct kv_metadata_args a)
{
	extern __shared__ int offsets[]; /* [n_seqs + 1] */
	__shared__ int parts[THREADS / KV_WARP];
	int end = min((int)(blockIdx.x + 1) * TOKENS, a.n_tokens);

	sum_up(a, offsets, parts);
	if (blockIdx.x == 0) {
		for (int b = threadIdx.x; b < a.n_seqs; b += THREADS)
			kv_metadata_sequence(&a, b);
		for (int b = threadIdx.x; a.query_start_loc && b <= a.n_seqs; b += THREADS)
			a.query_start_loc[b] = min(offsets[b], a.n_tokens);
		if (a.max_lens)
			find_longest(a);
	}
	for (int t = blockIdx.x * TOKENS + threadIdx.x; t < end; t += THREADS) {
		int lo = 0, hi = a.n_seqs; /* offsets[lo] <= t < offsets[hi] */

		if (t >= offsets[a.n_seqs]) {
			kv_metadata_pad(&a, t);
			continue;
		}
		while (hi - lo > 1) {
			int mid = (lo + hi) / 2;

			*(offsets[mid] <= t ? &lo : &hi) = mid;
		}
		kv_metadata_token(&a, t, lo, t - offsets[lo]);
	}
}

__global__ void __launch_bounds__(THREADS) go_on(struct kv_metadata_args a)
{
	int b = blockIdx.x * THREADS + threadIdx.x;

	if (b < a.n_seqs)
		kv_metadata_advance(&a, b);
}

extern "C" int kv_metadata_cuda(const struct kv_metadata_args *args)
{
	unsigned blocks = (unsigned)((args->n_tokens + TOKENS - 1) / TOKENS);
	int r;

	if (args->n_seqs > KV_METADATA_MAX_SEQS)
		return kv_error(-ENOTSUP, "n_seqs: %d given, up to %d are done on a GPU", args->n_seqs,
				KV_METADATA_MAX_SEQS);
	if (args->advance && args->n_seqs) {
		r = kv_launch("metadata", go_on, dim3((unsigned)(args->n_seqs + THREADS - 1) / THREADS),
			      THREADS, 0, args->stream, *args);
		if (r < 0)
			return r;
	}
	return kv_launch("metadata", build, dim3(blocks ? blocks : 1), THREADS,
			 ((size_t)args->n_seqs + 1) * sizeof(int), args->stream, *args);
}
