/* SPDX-License-Identifier: Apache-2.0 */
/* Which lanes stream, and their launch; the work is in gdn_stream.cuh. */
#include "kernels/gdn_stream.cuh"

#define STREAM_R	  1
#define STREAM_MIN_PIECES 64 /* fewer leave too many of 132 multiprocessors idle */

static int n_multiprocessors(void)
{
	int device = 0, n = 0;

	if (cudaGetDevice(&device) != cudaSuccess ||
	    cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
		return 1;
	return n;
}

static int shared_room(void)
{
	int device = 0, n = 0;

	if (cudaGetDevice(&device) != cudaSuccess ||
	    cudaDeviceGetAttribute(&n, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
		    cudaSuccess)
		return 0;
	return n;
}

/* Bytes of the vectors of a lane's tokens, of all pieces in shared memory. */
static size_t vector_bytes(const struct kv_recur *a, int tokens)
{
	int width = 2 * STREAM_DK + a->heads / a->heads_k * a->dim_v;

	return STREAM_AHEAD * sizeof(float) * (size_t)tokens * (size_t)width;
}

extern "C" int kv_recur_stream_tokens(const struct kv_recur *a, int max_len)
{
	const int group = a->heads / a->heads_k;
	uint64_t bits = (uint64_t)(uintptr_t)a->q | (uint64_t)(a->q_stride * 2);
	int tokens = max_len < STREAM_TOKENS ? max_len : STREAM_TOKENS;
	size_t room = (size_t)shared_room() / 3; /* the rest is for tiles */

	if (a->rule != KV_RULE_DELTA || a->dtype == KV_F32 || a->dim_k != STREAM_DK ||
	    a->dim_v % (4 * STREAM_ROWWARP * STREAM_R) || group > STREAM_GROUP)
		return 0;
	if ((int64_t)a->batch.n_seqs * a->heads_k < STREAM_MIN_PIECES)
		return 0;
	if (a->conv_weight) {
		bits |= (uint64_t)(uintptr_t)a->conv_weight | (uint64_t)(uintptr_t)a->conv_bias |
			(uint64_t)(uintptr_t)a->conv.base | (uint64_t)a->conv.row_stride |
			(uint64_t)a->conv.tap_stride;
		if (a->conv.channel_stride != 2)
			return 0;
	} else {
		bits |= (uint64_t)(uintptr_t)a->k | (uint64_t)(a->k_stride * 2) |
			(uint64_t)(uintptr_t)a->v | (uint64_t)(a->v_stride * 2);
	}
	if (bits % 8)
		return 0;
	while (tokens > 0 && vector_bytes(a, tokens) > room)
		tokens--;
	return tokens;
}

template <int CONV, int STATE> static int launch(const struct stream_params &p, int room)
{
	typedef stream<CONV, STREAM_R, STATE> work;
	struct stream_params q = p;
	size_t fixed = sizeof(struct stream_shared) + vector_bytes(&p.a, p.tokens);
	int grid = n_multiprocessors();

	q.stages = (int)(((size_t)room - fixed) / work::TILE);
	if (q.stages > STREAM_STAGES)
		q.stages = STREAM_STAGES;
	if (grid > q.pieces)
		grid = q.pieces;
	return kv_launch_near("steps of many lanes", stream_kernel<CONV, STREAM_R, STATE>, grid, 1,
			      STREAM_THREADS, fixed + (size_t)q.stages * work::TILE, p.a.stream, q);
}

extern "C" int kv_recur_stream(const struct kv_recur *args, int max_len)
{
	const bool conv = args->conv_weight, f32 = args->state.dtype == KV_F32;
	struct stream_params p;
	int room = shared_room();

	p.a = *args;
	p.max_len = p.tokens = max_len;
	p.stages = 0;
	p.pieces = args->batch.n_seqs * args->heads_k;
	if (f32)
		return conv ? launch<1, KV_F32>(p, room) : launch<0, KV_F32>(p, room);
	return conv ? launch<1, KV_BF16>(p, room) : launch<0, KV_BF16>(p, room);
}
