/* SPDX-License-Identifier: Apache-2.0 */
/* Which step kernel runs, and its launch; the work is in gdn_step.cuh. */
#include "kernels/gdn_step.h"

#include "kernels/gdn_launch.cuh"

#define FEW_BLOCKS  528 /* four on each of 132 multiprocessors */
#define ROOM_BLOCKS 64	/* which leave room for the grid behind them */

/* gdn_step_<state>_<inputs>.cu */
extern const struct step_table kv_step_f32_io16, kv_step_f32_io32, kv_step_bf16_io16,
	kv_step_bf16_io32;

static const struct step_table *const tables[2][2] = {{&kv_step_f32_io16, &kv_step_f32_io32},
						      {&kv_step_bf16_io16, &kv_step_bf16_io32}};

static int dim_index(int dim_k)
{
	return dim_k == 64 ? 0 : dim_k == 128 ? 1 : dim_k == 256 ? 2 : -1;
}

static int kind_of(const struct kv_recur *a)
{
	return a->rule == KV_RULE_SSD ? STEP_SSD : a->conv_weight ? STEP_DELTA_CONV : STEP_DELTA;
}

static const struct step_function *find(const struct kv_recur *a, int i_rows)
{
	const struct step_table *table =
		tables[a->state.dtype != KV_F32][a->dtype == KV_F32 ? KV_IO32 : KV_IO16];

	return &table->kernels[kind_of(a)][dim_index(a->dim_k)][i_rows];
}

extern "C" void kv_recur_step_compare(const struct kv_recur *args, struct kv_state_reasons *why)
{
	uint64_t bits = (uint64_t)(uintptr_t)args->state.base | (uint64_t)args->state.head_stride |
			(uint64_t)args->state.block_stride;
	int device, major;

	if (dim_index(args->dim_k) < 0)
		kv_state_because(why, KV_STATE_REASON_DIM_K,
				 "dim_k: %d given, cuda takes 64, 128 and 256", args->dim_k);
	if (args->dim_v % 16)
		kv_state_because(why, KV_STATE_REASON_DIM_V,
				 "dim_v: %d given, cuda takes multiples of 16", args->dim_v);
	if (bits % 16)
		kv_state_because(why, KV_STATE_REASON_ALIGNMENT,
				 "state: base and strides are not multiples of 16 bytes");
	if (args->batch.n_seqs > 65535)
		kv_state_because(why, KV_STATE_REASON_N_SEQS,
				 "n_seqs: %d given, cuda takes up to 65535", args->batch.n_seqs);
	if (args->conv_weight && args->conv_width != STEP_CONV)
		kv_state_because(why, KV_STATE_REASON_CONV_WIDTH,
				 "conv_width: %d given, cuda takes %d", args->conv_width, STEP_CONV);
	if (args->conv_weight && (uintptr_t)args->conv_weight % 16)
		kv_state_because(why, KV_STATE_REASON_CONV_WEIGHT,
				 "conv_weight: %p is not a multiple of 16 bytes",
				 args->conv_weight);
	if (args->conv_weight && args->conv.dtype != args->dtype)
		kv_state_because(why, KV_STATE_REASON_CONV_DTYPE,
				 "conv state.dtype: %d given, cuda takes dtype's, %d",
				 args->conv.dtype, args->dtype);
	if (cudaGetDevice(&device) == cudaSuccess &&
	    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
		    cudaSuccess &&
	    major < 9)
		kv_state_because(why, KV_STATE_REASON_CAPABILITY,
				 "device: compute capability %d, cuda needs 9.0 or more", major);
}

/* (head, rows) pairs of a key head, of 16 << i rows */
static int units(const struct kv_recur *a, int i)
{
	return a->heads / a->heads_k * (a->dim_v / (16 << i));
}

/* Four channels are one load, everywhere. */
static bool is_wide(const struct kv_recur *a)
{
	int64_t size = a->dtype == KV_F32 ? 4 : 2;
	uint64_t bits = (uint64_t)(uintptr_t)a->q | (uint64_t)(a->q_stride * size) |
			(uint64_t)(uintptr_t)a->k | (uint64_t)(a->k_stride * size) |
			(uint64_t)(uintptr_t)a->v | (uint64_t)(a->v_stride * size);

	if (a->conv_weight) {
		if (a->conv.channel_stride != size)
			return false;
		bits |= (uint64_t)(uintptr_t)a->conv_bias | (uint64_t)(uintptr_t)a->conv.base |
			(uint64_t)a->conv.row_stride | (uint64_t)a->conv.tap_stride;
	}
	return bits % (uint64_t)(4 * size) == 0;
}

/*
 * 16 << i rows of S a thread block: as many as leave enough of them. With a convolution in front
 * those of a key head are a cluster, and where they don't fit in one, each has several units in
 * turn.
 */
static int choose_rows(const struct kv_recur *a)
{
	int best = -1;

	for (int i = 0; i < STEP_ROWS; i++) {
		bool fits;

		if (a->dim_v % (16 << i) || !find(a, i)->kernel)
			continue;
		fits = best >= 0 && (!a->conv_weight || units(a, best) <= STEP_MAX_CLUSTER);
		if (fits && (int64_t)a->batch.n_seqs * a->heads_k * units(a, i) < FEW_BLOCKS)
			break;
		best = i;
	}
	return best;
}

extern "C" int kv_recur_step_lanes(const struct kv_recur *args, int max_len)
{
	int longest = args->batch.max_query_len > 1 ? args->batch.max_query_len : 1;
	int rows = choose_rows(args), cluster = 1, streamed, r;
	int64_t n_blocks;
	const struct step_function *f = find(args, rows);
	struct step_params p;

	if (max_len > longest)
		max_len = longest;
	streamed = kv_recur_stream_tokens(args, max_len);
	if (streamed) {
		r = kv_recur_stream(args, streamed);
		if (r < 0 || streamed >= max_len)
			return r;
	}
	p.a = *args;
	p.min_len = streamed + 1;
	p.max_len = max_len;
	p.wide = is_wide(args);
	p.group = args->heads / args->heads_k;
	p.units = units(args, rows);
	p.blocks = p.units;
	if (args->conv_weight) {
		while (p.blocks > STEP_MAX_CLUSTER || p.units % p.blocks)
			p.blocks--;
		cluster = p.blocks;
	}
	n_blocks = (int64_t)p.blocks * args->heads_k * args->batch.n_seqs;
	return kv_launch_cluster(
		"step", f->kernel,
		dim3((unsigned)p.blocks, (unsigned)args->heads_k, (unsigned)args->batch.n_seqs),
		f->threads, (size_t)f->shared_bytes, cluster, n_blocks <= ROOM_BLOCKS, args->stream, p);
}

extern "C" int kv_recur_step(const struct kv_recur *args)
{
	return kv_recur_step_lanes(args, INT32_MAX);
}
