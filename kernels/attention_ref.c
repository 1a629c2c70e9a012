/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention, the definition of right: plain loops, one row at a time, sums in double.
 *
 *	x_j = sm_scale k_scale (q . k_j); x_j = c tanh(x_j / c) if softcap c > 0
 *	x_j += slope (position of j - position of q) with ALiBi
 *	m = max x_j; out = v_scale sum e^(x_j - m) v_j / sum e^(x_j - m); lse = m + ln sum e^(x_j - m)
 *	with a sink s: out / (1 + e^(s - lse)), and lse + ln(1 + e^(s - lse)) where it is asked for
 *
 * over the keys j that the row sees, by kernels/visible.h. Keys that it does not see are not read. Of
 * latents, k_j is the row [latent | rope] and v_j its latent part.
 */
#include <errno.h>
#include <math.h>

#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "kernels/attention.h"
#include "kernels/mla.h"
#include "kernels/visible.h"

/* One row: query head @h of row @t of q and out, of sequence @b. */
struct row {
	int64_t b;
	int64_t t;
	int64_t h;
	int64_t kv_head;
	struct kv_visibility rules;
	struct kv_visible sees;
};

/* The elements of @view that belong to key @j and the row's head. */
static const void *key_row(const struct kv_attention_args *args, const struct kv_view *view,
			   const struct row *row, int64_t j)
{
	int64_t column = j / view->block_tokens;
	kv_block_id block = args->block_table[row->b * args->table_width + column];

	return kv_view_row(view, block, j % view->block_tokens, row->kv_head);
}

/* Element @d of a key's row, before the scale that all elements share. */
static double element(const struct kv_attention_args *args, const struct kv_view *view,
		      const void *row, int d)
{
	if (kv_mla_is_packed(view))
		return (double)kv_mla_element(view, row, d, args->latent_dim, args->dtype);
	return (double)kv_element_load(row, d, view->dtype);
}

/* What a stored value of key @j is multiplied by. */
static double scale_of(const struct kv_attention_args *args, const struct kv_view *view,
		       const struct kv_view *rows, const float *heads, const struct row *row,
		       int64_t j)
{
	float scale;

	if (!rows->base)
		return heads ? (double)heads[row->kv_head] : (double)view->scale;
	memcpy(&scale, key_row(args, rows, row, j), sizeof(scale));
	return (double)scale;
}

static double score(const struct kv_attention_args *args, const struct row *row, int64_t j)
{
	const void *k = key_row(args, &args->k, row, j);
	int64_t q_at = row->t * args->q_token_stride + row->h * kv_attention_dim(args);
	double x = 0;

	for (int d = 0; d < kv_attention_dim(args); d++)
		x += (double)kv_element_load(args->q, q_at + d, args->dtype) *
		     element(args, &args->k, k, d);
	x *= (double)args->sm_scale *
	     scale_of(args, &args->k, &args->k_row_scales, args->k_scales, row, j);
	if (args->softcap > 0)
		x = args->softcap * tanh(x / args->softcap);
	if (args->alibi_slopes)
		x += (double)args->alibi_slopes[row->h] *
		     (double)(kv_visible_position(&row->rules, &row->sees, j) - row->sees.position);
	return x;
}

/* Brings a row's sink in: returns what out is multiplied by, and changes its lse. */
static double sink(const struct kv_attention_args *args, const struct row *row, double *lse)
{
	double s, factor;

	if (!args->sinks)
		return 1;
	s = (double)args->sinks[row->h];
	factor = 1 / (1 + exp(s - *lse));
	if (args->lse_with_sink) {
		double top = fmax(s, *lse);

		*lse = top == -INFINITY ? top : top + log(exp(s - top) + exp(*lse - top));
	}
	return factor;
}

/* @x: room for a score of each key; @sum: room for v.head_dim sums */
static void attend(const struct kv_attention_args *args, const struct row *row, double *x,
		   double *sum)
{
	const struct kv_range *all = &row->sees.all;
	int64_t at = row->t * args->out_token_stride + row->h * args->v.head_dim;
	double m = -INFINITY, l = 0, lse, factor;

	for (int64_t j = all->lo; j < all->hi; j++) {
		if (!kv_visible_sees(&row->rules, &row->sees, j))
			continue;
		x[j] = score(args, row, j);
		if (!(x[j] <= m)) /* NaN too */
			m = x[j];
	}
	for (int d = 0; d < args->v.head_dim; d++)
		sum[d] = 0;
	for (int64_t j = all->lo; j < all->hi && m != -INFINITY; j++) {
		const void *v;
		double e, scale;

		if (!kv_visible_sees(&row->rules, &row->sees, j))
			continue;
		v = key_row(args, &args->v, row, j);
		scale = scale_of(args, &args->v, &args->v_row_scales, args->v_scales, row, j);
		e = exp(x[j] - m);
		l += e;
		for (int d = 0; d < args->v.head_dim; d++)
			sum[d] += e * scale * element(args, &args->v, v, d);
	}
	lse = l == 0 ? -INFINITY : m + log(l);
	factor = sink(args, row, &lse);
	for (int d = 0; d < args->v.head_dim; d++)
		kv_element_store(args->out, at + d, args->out_dtype,
				 l == 0 ? 0 : (float)(factor * sum[d] / l));
	if (args->lse)
		args->lse[row->t * args->lse_token_stride + row->h * args->lse_head_stride] =
			(float)lse;
}

static int attention(const struct kv_attention_args *args)
{
	kv_cleanup(kv_freep) double *x = malloc(((size_t)args->max_seq_len + 1) * sizeof(*x));
	kv_cleanup(kv_freep) double *sum = malloc((size_t)args->v.head_dim * sizeof(*sum));
	struct row row = {.rules = kv_visibility_of(args)};

	if (!x || !sum)
		return kv_error(-ENOMEM, "attention: no memory for %d scores", args->max_seq_len);
	for (row.b = 0; row.b < args->n_seqs; row.b++) {
		int64_t start = args->query_start_loc[row.b];
		int64_t q_len = args->query_start_loc[row.b + 1] - start;

		for (int64_t i = 0; i < q_len; i++) {
			row.t = start + i;
			row.sees = kv_visible_row(&row.rules, row.b, start, i, q_len,
						  args->seq_lens[row.b]);
			for (row.h = 0; row.h < args->n_heads_q; row.h++) {
				row.kv_head = row.h / (args->n_heads_q / args->k.n_heads);
				attend(args, &row, x, sum);
			}
		}
	}
	return 0;
}

const struct kv_attn_backend kv_attn_ref = {
	.name = "ref",
	.device = KV_DEVICE_HOST,
	.caps = {.features = KV_ATTN_EVERYTHING | KV_ATTN_BIT(MLA) | KV_ATTN_BIT(NON_MLA),
		 .dtypes = 1u << KV_F32 | 1u << KV_F16 | 1u << KV_BF16,
		 .kv_dtypes = KV_ATTN_ALL_TYPES | 1u << KV_BYTES,
		 .kinds = 1u << KV_KIND_DECODER | 1u << KV_KIND_ENCODER_ONLY | 1u << KV_KIND_CROSS},
	.attention = attention,
	.write = kv_write_ref,
	.copy = kv_copy_ref,
};
