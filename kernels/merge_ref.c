/* SPDX-License-Identifier: Apache-2.0 */
/* Merging on the host: a row after the other. */
#include "kernels/merge.h"

static void merge_row(const struct kv_merge_args *a, int64_t t, int h)
{
	const float *lse = a->part_lse + t * a->lse_token_stride + h * a->lse_head_stride;
	int64_t to = t * a->out_token_stride + (int64_t)h * a->head_dim;
	int64_t from = t * a->token_stride + (int64_t)h * a->head_dim;
	struct kv_merge_row row = kv_merge_row(a, lse, h);

	for (int d = 0; d < a->head_dim; d++) {
		float sum = 0;

		for (int64_t r = 0; r < a->n_parts; r++) {
			float w = kv_merge_weight(a, lse, r, &row);

			if (w != 0)
				sum = fmaf(w, kv_element_load(a->parts, r * a->part_stride + from + d,
							      a->part_dtype), sum);
		}
		kv_element_store(a->out, to + d, a->dtype, sum * row.factor);
	}
	if (a->lse)
		a->lse[t * a->n_heads + h] = row.lse;
}

int kv_merge_host(const struct kv_merge_args *args)
{
	int64_t n = args->n_real && *args->n_real < args->n_tokens ? *args->n_real : args->n_tokens;

	for (int64_t t = 0; t < n; t++)
		for (int h = 0; h < args->n_heads; h++)
			merge_row(args, t, h);
	return 0;
}
