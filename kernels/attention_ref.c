/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention, the definition of right: plain loops, one row at a time, sums in double.
 *
 *	x_j = sm_scale * k_scale * (q . k_j); x_j = c tanh(x_j / c) if softcap c > 0
 *	m = max x_j; out = v_scale * sum e^(x_j - m) v_j / sum e^(x_j - m); lse = m + ln sum e^(x_j
 *- m)
 *
 * over the keys j that the row sees. Keys that it does not see are not read.
 */
#include <errno.h>
#include <math.h>

#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "kernels/attention.h"
#include "kernels/view.h"

#define FEATURES                                                                            \
	(KV_ATTN_BIT(WINDOW) | KV_ATTN_BIT(NON_CAUSAL) | KV_ATTN_BIT(INVARIANT) |           \
	 KV_ATTN_BIT(CONNECTOR) | KV_ATTN_BIT(DEVICE_LENGTHS) | KV_ATTN_BIT(SOFTCAP) |      \
	 KV_ATTN_BIT(LSE))

/* One row: query head @h of the query at position @p of sequence @b, row @t of q and out. */
struct row {
	int64_t b;
	int64_t t;
	int64_t h;
	int64_t p;
};

static bool sees(const struct kv_attention_args *args, const struct row *row, int64_t j)
{
	if (args->causal && j > row->p)
		return false;
	return args->window_left < 0 || j >= row->p - args->window_left;
}

/* The elements of key or value @j of the row's head. */
static const void *key_row(const struct kv_attention_args *args, const struct kv_view *view,
			   const struct row *row, int64_t j)
{
	int64_t group = args->n_heads_q / view->n_heads;
	int64_t column = j / view->block_tokens;
	kv_block_id block = args->block_table[row->b * args->table_width + column];

	return kv_view_row(view, block, j % view->block_tokens, row->h / group);
}

static double score(const struct kv_attention_args *args, const struct row *row, int64_t j)
{
	const void *k = key_row(args, &args->k, row, j);
	int64_t q_at = (row->t * args->n_heads_q + row->h) * args->k.head_dim;
	double x = 0;

	for (int d = 0; d < args->k.head_dim; d++)
		x += (double)kv_element_load(args->q, q_at + d, args->dtype) *
		     (double)kv_element_load(k, d, args->k.dtype);
	x *= (double)args->sm_scale * (double)args->k.scale;
	if (args->softcap > 0)
		x = args->softcap * tanh(x / args->softcap);
	return x;
}

/* @x: room for seq_len scores; @sum: room for v.head_dim sums */
static void attend(const struct kv_attention_args *args, const struct row *row, double *x,
		   double *sum)
{
	int64_t len = args->seq_lens[row->b];
	int64_t at = row->t * args->n_heads_q + row->h;
	double m = -INFINITY, l = 0;

	for (int64_t j = 0; j < len; j++) {
		if (!sees(args, row, j))
			continue;
		x[j] = score(args, row, j);
		if (!(x[j] <= m)) /* NaN too */
			m = x[j];
	}
	for (int d = 0; d < args->v.head_dim; d++)
		sum[d] = 0;
	for (int64_t j = 0; j < len && m != -INFINITY; j++) {
		const void *v;
		double e;

		if (!sees(args, row, j))
			continue;
		v = key_row(args, &args->v, row, j);
		e = exp(x[j] - m);
		l += e;
		for (int d = 0; d < args->v.head_dim; d++)
			sum[d] += e * (double)kv_element_load(v, d, args->v.dtype);
	}
	for (int d = 0; d < args->v.head_dim; d++)
		kv_element_store(args->out, at * args->v.head_dim + d, args->dtype,
				 l == 0 ? 0 : (float)((double)args->v.scale * sum[d] / l));
	if (args->lse)
		args->lse[at] = l == 0 ? -INFINITY : (float)(m + log(l));
}

static int attention(const struct kv_attention_args *args)
{
	kv_cleanup(kv_freep) double *x = malloc(((size_t)args->max_seq_len + 1) * sizeof(*x));
	kv_cleanup(kv_freep) double *sum = malloc((size_t)args->v.head_dim * sizeof(*sum));

	if (!x || !sum)
		return kv_error(-ENOMEM, "attention: no memory for %d scores", args->max_seq_len);
	for (int64_t b = 0; b < args->n_seqs; b++) {
		int64_t first = args->query_start_loc[b];
		int64_t q_len = args->query_start_loc[b + 1] - first;

		for (int64_t i = 0; i < q_len; i++) {
			for (int64_t h = 0; h < args->n_heads_q; h++) {
				struct row row = {b, first + i, h, args->seq_lens[b] - q_len + i};

				attend(args, &row, x, sum);
			}
		}
	}
	return 0;
}

const struct kv_attn_backend kv_attn_ref = {
	.name = "ref",
	.device = KV_DEVICE_HOST,
	.caps = {.features = FEATURES,
		 .dtypes = 1u << KV_F32 | 1u << KV_F16 | 1u << KV_BF16,
		 .kv_dtypes = 1u << KV_F32 | 1u << KV_F16 | 1u << KV_BF16 | 1u << KV_F8_E4M3,
		 .kinds = 1u << KV_KIND_DECODER | 1u << KV_KIND_ENCODER_ONLY | 1u << KV_KIND_CROSS},
	.attention = attention,
	.write = kv_write_ref,
	.copy = kv_copy_ref,
};
