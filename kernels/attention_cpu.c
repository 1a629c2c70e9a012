/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cpu backend: attention cut into items of one sequence, one KV head and up to
 * KV_SIMD_MAX_ROWS rows, which threads take from one counter. simd.c does an item; which thread
 * does it, and what else is in its item, leaves no trace in a row's value.
 */
#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "kernels/attention.h"
#include "kernels/simd.h"
#include "kernels/workers.h"

/* Multiply-adds that pay for a thread: about 100 us of one core, 5 times what starting it costs. */
#define MACS_PER_THREAD 2000000

struct job {
	const struct kv_attention_args *args;
	const struct kv_simd *simd;
	char *scratch; /* [n_threads][scratch_bytes] */
	size_t scratch_bytes;
	atomic_int_least64_t next; /* item, over all sequences */
};

static int64_t rows_of(const struct kv_attention_args *args, int b)
{
	int64_t q_len = args->query_start_loc[b + 1] - args->query_start_loc[b];

	return q_len * (args->n_heads_q / args->k.n_heads);
}

/* Items of one KV head of sequence @b. */
static int64_t parts_of(const struct kv_attention_args *args, int b)
{
	return (rows_of(args, b) + KV_SIMD_MAX_ROWS - 1) / KV_SIMD_MAX_ROWS;
}

/* Takes items until none is left. They come in ascending order, so the sequence only advances. */
static void work(void *context, int thread)
{
	struct job *job = context;
	const struct kv_attention_args *args = job->args;
	float *scratch = (float *)(void *)(job->scratch + (size_t)thread * job->scratch_bytes);
	int64_t before = 0; /* items of the sequences before b */
	int b = 0;

	for (;;) {
		int64_t i = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
		struct kv_simd_item item;
		int64_t parts;

		while (b < args->n_seqs && i - before >= parts_of(args, b) * args->k.n_heads)
			before += parts_of(args, b++) * args->k.n_heads;
		if (b == args->n_seqs)
			return;
		parts = parts_of(args, b);
		item.b = b;
		item.kv_head = (int32_t)((i - before) / parts);
		item.first = (i - before) % parts * KV_SIMD_MAX_ROWS;
		item.n_rows = (int32_t)(rows_of(args, b) - item.first);
		if (item.n_rows > KV_SIMD_MAX_ROWS)
			item.n_rows = KV_SIMD_MAX_ROWS;
		job->simd->attend(args, &item, scratch);
	}
}

static int count_threads(const struct kv_attention_args *args)
{
	double macs = 0, d = args->k.head_dim + args->v.head_dim;
	int64_t n_items = 0;
	int n;

	for (int b = 0; b < args->n_seqs; b++) {
		macs += (double)rows_of(args, b) * args->k.n_heads * args->seq_lens[b] * d;
		n_items += parts_of(args, b) * args->k.n_heads;
	}
	if (macs < 2 * MACS_PER_THREAD || n_items < 2)
		return 1;
	n = kv_workers_max();
	if (n > n_items)
		n = (int)n_items;
	return macs / MACS_PER_THREAD < n ? (int)(macs / MACS_PER_THREAD) : n;
}

int kv_attention_simd(const struct kv_simd *simd, const struct kv_attention_args *args)
{
	kv_cleanup(kv_freep) char *scratch = NULL;
	int n_threads = count_threads(args);
	struct job job = {.args = args, .simd = simd};
	size_t bytes = simd->scratch_bytes(args->k.head_dim, args->v.head_dim);

	job.scratch_bytes = (bytes + 63) / 64 * 64;
	scratch = aligned_alloc(64, job.scratch_bytes * (size_t)n_threads);
	if (!scratch)
		return kv_error(-ENOMEM,
				"attention: no memory for the scratch of %d threads, %zu "
				"bytes each",
				n_threads, job.scratch_bytes);
	memset(scratch, 0, job.scratch_bytes * (size_t)n_threads);
	job.scratch = scratch;
	kv_workers_run(n_threads, work, &job);
	return 0;
}

static int attention(const struct kv_attention_args *args)
{
	return kv_attention_simd(kv_simd_sets()[0], args);
}

static int write_tokens(const struct kv_write_args *args)
{
	return kv_write_simd(kv_simd_sets()[0], args);
}

const struct kv_attn_backend kv_attn_cpu = {
	.name = "cpu",
	.device = KV_DEVICE_HOST,
	.caps = {.features = KV_ATTN_EVERYTHING,
		 .dtypes = 1u << KV_F32 | 1u << KV_F16 | 1u << KV_BF16,
		 .kv_dtypes = KV_ATTN_ALL_TYPES,
		 .kinds = 1u << KV_KIND_DECODER | 1u << KV_KIND_ENCODER_ONLY | 1u << KV_KIND_CROSS},
	.attention = attention,
	.write = write_tokens,
	.copy = kv_copy_ref,
};
