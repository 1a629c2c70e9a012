/* SPDX-License-Identifier: Apache-2.0 */
/* Between attention_split.cu (what can run, which kernel) and attention_split_*.cu (the kernels).
 */
#ifndef KV_KERNELS_ATTENTION_SPLIT_H
#define KV_KERNELS_ATTENTION_SPLIT_H

#include "kernels/attention.h"
#include "kernels/visible.h"

#define KV_SPLIT_COUNTERS 3  /* arrays of n_parts uint32_t at the start of the workspace */
#define KV_SPLIT_MERGE	  16 /* sums that one thread block merges */
#define KV_SPLIT_FIXED	  8  /* thread blocks of an entry's cluster, of invariant calls */
#define KV_SPLIT_ROWS	  8  /* rows of q that one matrix instruction takes */

/* What a kernel is for. */
enum kv_split_kind {
	KV_SPLIT_PLAIN, /* causal or not, a window, softcap, sinks: heads of 64 and 128 */
	KV_SPLIT_ANY,	/* besides, all that kernels/visible.h knows, ALiBi; other head sizes */
	KV_SPLIT_NEAR,	/* as PLAIN, of few entries: thread blocks of an entry are a cluster. Or of any
			 * number, and `fixed`: invariant calls */
};

struct kv_split_params {
	const void *q;
	void *out;
	float *lse;
	const int32_t *query_start_loc;
	const int32_t *seq_lens;
	const int32_t *block_table;
	const float *sinks;    /* [n_heads_q] or NULL */
	const float *slopes;   /* [n_heads_q] or NULL */
	const float *k_scales; /* [KV heads] or NULL */
	const float *v_scales;
	uint32_t *counters; /* [KV_SPLIT_COUNTERS, n_parts] all 0 between calls */
	float *sums;	    /* [n_parts, 2] slots: [heads][rows][D + 4] */
	struct kv_view k;
	struct kv_view v;
	struct kv_visibility sees; /* of KV_SPLIT_ANY */
	struct kv_view k_rows;	   /* of KV_SPLIT_ANY and e4m3: scales of rows; base NULL: none */
	struct kv_view v_rows;
	int64_t q_stride;	   /* elements from token to token */
	int64_t out_stride;
	int64_t lse_stride;
	int64_t lse_head_stride;
	int32_t dtype; /* of q */
	int32_t out_dtype;
	int32_t lse_with_sink;
	int32_t n_seqs;
	int32_t n_tokens;
	int32_t n_heads_q;
	int32_t group; /* query heads of a KV head */
	int32_t table_width;
	int32_t block_mask; /* block_tokens - 1 if that is a power of 2; else -1 */
	int32_t n_chunks;   /* of rows: a chunk is what a thread block has at a time */
	int32_t heads;	    /* sets of KV heads that a thread block works on side by side */
	int32_t n_sets;	    /* of p.heads sets: what a request has of them */
	int32_t blocks;	    /* thread blocks of a multiprocessor */
	int32_t near;	    /* thread blocks of a cluster; 1: no cluster */
	int32_t min_tiles;  /* a thread block gets no fewer, if that leaves some without work */
	int32_t window_left;
	int32_t causal;
	float inner; /* softcap: factor of q . k inside tanh; else unused */
	float outer; /* log2 e times softcap, or times the scale of scores */
	bool capped;
	bool fixed; /* an entry is a cluster's, and who has a tile goes by its place in the sequence */
};

/*
 * Warps of a thread block, and thread blocks of a multiprocessor, for heads of @dim elements and
 * @row_bytes of a token that a warp reads: 4, 8 or 16 warps in all, by what fits in registers and
 * shared memory. Their rings take 192 KiB, their sums 32 * dim bytes of a warp.
 */
static constexpr int kv_split_warps(int kind, int row_bytes)
{
	return kind != KV_SPLIT_NEAR && row_bytes >= 160 ? 4 : 8;
}

static constexpr int kv_split_blocks(int kind, int dim, int row_bytes, int columns)
{
	if (kind == KV_SPLIT_NEAR || dim > 128)
		return 1;
	return row_bytes >= 160 || (dim <= 64 && columns == 1) ? 2 : 1;
}

/* Which kernel, and on how many thread blocks. */
struct kv_split_choice {
	int kind; /* enum kv_split_kind */
	int head_dim;
	int n_row_tiles; /* rows of q in multiples of 8: 1, 2 or 4 */
	int n_heads;	 /* of a warp */
	int n_parts;
};

typedef int kv_split_launch(const struct kv_split_params *params,
			    const struct kv_split_choice *choice, void *stream);

#ifdef __cplusplus
extern "C" {
#endif
kv_split_launch kv_split_launch_bf16, kv_split_launch_f16, kv_split_launch_f8;
/* Of KV_SPLIT_ANY. */
kv_split_launch kv_split_launch_any_bf16, kv_split_launch_any_f16, kv_split_launch_any_f8;

#ifdef __cplusplus
}
#endif
#endif
