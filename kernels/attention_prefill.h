/* SPDX-License-Identifier: Apache-2.0 */
/* Between attention_prefill.cu (what can run, which kernel) and attention_prefill_*.cu. */
#ifndef KV_KERNELS_ATTENTION_PREFILL_H
#define KV_KERNELS_ATTENTION_PREFILL_H

#include <cuda.h>

#include "kernels/attention.h"

#define KV_PREFILL_RUN 16 /* tokens that lie in one block */

struct kv_prefill_params {
	/* [block][head][token][element], or as kv_prefill_params::whole says */
	CUtensorMap k_map;
	CUtensorMap v_map;
	const void *q;
	void *out;
	float *lse;
	const int32_t *query_start_loc;
	const int32_t *seq_lens;
	const int32_t *block_table;
	const float *sinks;	   /* [n_heads_q] or NULL */
	const float *k_scales;	   /* [n_heads_kv] or NULL */
	const float *v_scales;
	const uint8_t *seq_causal; /* [n_seqs] or NULL: by causal */
	int64_t q_stride;	   /* elements from token to token */
	int64_t out_stride;
	int64_t lse_stride;
	int64_t lse_head_stride;
	uint32_t *counters; /* [2] items handed out, thread blocks done: 0 between calls */
	int32_t dtype;	    /* of q and out */
	int32_t n_seqs;
	int32_t n_tokens;
	int32_t n_heads_q;
	int32_t n_heads_kv;
	int32_t group; /* query heads of a KV head */
	uint32_t group_factor; /* 2^32 / group, rounded up: exact for rows below 2^32 / group */
	int32_t head_dim_k;
	int32_t head_dim_v;
	int32_t table_width;
	int32_t block_tokens;
	int32_t run;	      /* tokens of a box of the copy engine: 16, 32 or 64 of one block */
	/*
	 * 1: a box has whole rows, [block][token / 8][64 columns][token % 8][element], and a head is
	 * so many steps along the second or the third of these; 0: 64 columns of a row.
	 */
	int32_t whole;
	int32_t head_rows;
	int32_t head_columns;
	int32_t group_bytes; /* shared memory: from 8 tokens to the next 8, */
	int32_t chunk_bytes; /* and from 64 columns to the next */
	int32_t block_shift; /* log2 of block_tokens if that is a power of 2; else -1 */
	int32_t window_left;
	int32_t causal;
	int32_t key_begin;
	int32_t key_end; /* INT32_MAX: none */
	int32_t lse_with_sink;
	float inner; /* softcap: factor of q . k inside tanh; else unused */
	float outer; /* log2 e times softcap, or times the scale of scores */
	float v_scale;
	bool capped;
};

/* Columns of a row of q, k and v in shared memory, the least that holds @dim elements. */
static inline int kv_prefill_columns(int dim)
{
	return dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
}

/* The kernel of @columns; one thread block on each of @n_blocks multiprocessors. */
typedef int kv_prefill_launch(const struct kv_prefill_params *params, int columns, int n_blocks,
			      void *stream);

#ifdef __cplusplus
extern "C" {
#endif
int kv_prefill_launch_bf16(const struct kv_prefill_params *params, int columns, int n_blocks,
			   void *stream);
int kv_prefill_launch_f16(const struct kv_prefill_params *params, int columns, int n_blocks,
			  void *stream);
int kv_prefill_launch_f8(const struct kv_prefill_params *params, int columns, int n_blocks,
			 void *stream);
#ifdef __cplusplus
}
#endif
#endif
