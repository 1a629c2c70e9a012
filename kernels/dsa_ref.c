/* SPDX-License-Identifier: Apache-2.0 */
/* The indexer and sparse attention in double, one element at a time: the definition of right. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "kernels/dsa.h"

/* Largest |x| of key[0..n-1]; NaN counts for nothing. */
static float largest(const struct kv_index_write_args *a, int64_t at, int n)
{
	float most = 0;

	for (int d = 0; d < n; d++) {
		float x = fabsf(kv_element_load(a->key, at + d, a->dtype));

		most = x > most ? x : most;
	}
	return most;
}

static int write_ref(const struct kv_index_write_args *a)
{
	for (int64_t t = 0; t < a->n_tokens; t++) {
		int64_t block = a->slots[t] / a->cache.block_tokens;
		int64_t row = a->slots[t] % a->cache.block_tokens, at = t * a->key_stride;
		uint8_t *codes, *scales;

		if (a->slots[t] < 0)
			continue;
		codes = kv_index_codes(&a->cache, block, row);
		scales = kv_index_scales(&a->cache, block, row);
		if (a->cache.head_dim == KV_INDEX_ROW_FP8) {
			float scale = kv_index_scale(largest(a, at, KV_INDEX_DIM), a->pow2_scales);

			for (int d = 0; d < KV_INDEX_DIM; d++)
				codes[d] = kv_f32_to_e4m3(
					kv_element_load(a->key, at + d, a->dtype) / scale);
			memcpy(scales, &scale, sizeof(scale));
			continue;
		}
		for (int tile = 0; tile < KV_INDEX_DIM / KV_INDEX_FP4_TILE; tile++)
			scales[tile] = kv_index_scale_fp4(
				largest(a, at + tile * KV_INDEX_FP4_TILE, KV_INDEX_FP4_TILE));
		for (int i = 0; i < KV_INDEX_DIM / 2; i++) {
			float scale = kv_ue8m0_to_f32(scales[2 * i / KV_INDEX_FP4_TILE]);
			float low = kv_element_load(a->key, at + 2 * i, a->dtype) / scale;
			float high = kv_element_load(a->key, at + 2 * i + 1, a->dtype) / scale;

			codes[i] = (uint8_t)(kv_f32_to_e2m1(low) | kv_f32_to_e2m1(high) << 4);
		}
	}
	return 0;
}

static void score_query(const struct kv_index_args *a, int64_t t, struct kv_index_query query)
{
	const int32_t *table = a->block_table + (int64_t)query.seq * a->table_width;

	for (int64_t j = 0; j < query.n_keys; j++) {
		int64_t block = table[j / a->cache.block_tokens], row = j % a->cache.block_tokens;
		double key[KV_INDEX_DIM], sum = 0;

		for (int d = 0; d < KV_INDEX_DIM; d++)
			key[d] = kv_index_key(&a->cache, block, row, d);
		for (int64_t h = 0; h < a->n_heads; h++) {
			const uint8_t *q =
				(const uint8_t *)a->q + t * a->q_stride + h * KV_INDEX_DIM;
			double x = 0;

			for (int d = 0; d < KV_INDEX_DIM; d++)
				x += kv_e4m3_values[q[d]] * key[d];
			sum += x > 0 ? x * a->weights[t * a->weights_stride + h] : 0;
		}
		a->scores[t * a->scores_stride + j] =
			(float)(sum * kv_index_key_scale(&a->cache, block, row));
	}
}

static int score_ref(const struct kv_index_args *a)
{
	for (int64_t t = 0; t < a->n_tokens; t++) {
		struct kv_index_query query = kv_index_query_get(a, t);

		if (query.seq >= 0)
			score_query(a, t, query);
	}
	return 0;
}

struct scored {
	float score;
	int64_t j;
};

static int by_score(const void *a, const void *b)
{
	const struct scored *x = a, *y = b;

	if (x->score != y->score)
		return (x->score < y->score) - (x->score > y->score);
	return (x->j > y->j) - (x->j < y->j);
}

static int by_position(const void *a, const void *b)
{
	const struct scored *x = a, *y = b;

	return (x->j > y->j) - (x->j < y->j);
}

static int select_ref(const struct kv_index_args *a)
{
	kv_cleanup(kv_freep) struct scored *all = malloc(sizeof(*all) * ((size_t)a->max_seq_len + 1));

	if (!all)
		return kv_error(-ENOMEM, "max_seq_len: no memory for %d scores", a->max_seq_len);
	for (int64_t t = 0; t < a->n_tokens; t++) {
		struct kv_index_query query = kv_index_query_get(a, t);
		int32_t *chosen = a->chosen + t * a->top_k;
		int64_t n = query.n_keys < a->top_k ? query.n_keys : a->top_k;

		if (query.seq < 0)
			continue;
		for (int64_t j = 0; j < query.n_keys; j++) {
			float x = a->scores[t * a->scores_stride + j];

			all[j] = (struct scored){isnan(x) ? -INFINITY : x, j};
		}
		qsort(all, (size_t)query.n_keys, sizeof(*all), by_score);
		qsort(all, (size_t)n, sizeof(*all), by_position);
		for (int64_t i = 0; i < a->top_k; i++) {
			int64_t j = i < n ? all[i].j : 0;
			int32_t block = a->block_table[(int64_t)query.seq * a->table_width +
						       j / a->cache.block_tokens];

			chosen[i] = i >= n ? -1
				    : a->form == KV_INDEX_POSITIONS
					    ? (int32_t)j
					    : (int32_t)((int64_t)block * a->cache.block_tokens +
							j % a->cache.block_tokens);
		}
	}
	return 0;
}

/* Head @h of query @t; @x receives its scores, @sum [latent_dim]. */
static void attend(const struct kv_sparse_mla_args *a, int64_t t, int64_t h, double *x, double *sum)
{
	int dim = a->latent_dim + a->rope_dim;
	int64_t at = t * a->q_stride + h * dim;
	double most = -INFINITY, total = 0;

	for (int i = 0; i < a->top_k; i++) {
		int64_t slot = a->chosen[t * a->top_k + i];
		const char *row;

		x[i] = -INFINITY;
		if (slot < 0)
			continue;
		row = kv_view_row(&a->cache, slot / a->cache.block_tokens,
				  slot % a->cache.block_tokens, 0);
		x[i] = 0;
		for (int d = 0; d < dim; d++)
			x[i] += (double)kv_element_load(a->q, at + d, a->dtype) *
				kv_latent_element(a, row, d);
		x[i] *= a->sm_scale;
		most = x[i] > most || isnan(x[i]) ? x[i] : most;
	}
	for (int d = 0; d < a->latent_dim; d++)
		sum[d] = 0;
	for (int i = 0; i < a->top_k; i++) {
		int64_t slot = a->chosen[t * a->top_k + i];
		double p = slot < 0 ? 0 : exp(x[i] - most);
		const char *row;

		if (p == 0)
			continue;
		row = kv_view_row(&a->cache, slot / a->cache.block_tokens,
				  slot % a->cache.block_tokens, 0);
		total += p;
		for (int d = 0; d < a->latent_dim; d++)
			sum[d] += p * kv_latent_element(a, row, d);
	}
	for (int d = 0; d < a->latent_dim; d++)
		kv_element_store(a->out, t * a->out_stride + h * a->latent_dim + d, a->dtype,
				 total == 0 ? 0 : (float)(sum[d] / total));
	if (a->lse)
		a->lse[t * a->n_heads + h] = total == 0 ? -INFINITY : (float)(most + log(total));
}

static int attend_ref(const struct kv_sparse_mla_args *a)
{
	kv_cleanup(kv_freep) double *x =
		malloc(sizeof(double) * ((size_t)a->top_k + (size_t)a->latent_dim));

	if (!x)
		return kv_error(-ENOMEM, "top_k: no memory for %d scores", a->top_k);
	for (int64_t t = 0; t < a->n_tokens; t++)
		for (int64_t h = 0; h < a->n_heads; h++)
			attend(a, t, h, x, x + a->top_k);
	return 0;
}

const struct kv_dsa_backend kv_dsa_ref = {
	.name = "ref",
	.device = KV_DEVICE_HOST,
	.write = write_ref,
	.score = score_ref,
	.select = select_ref,
	.attend = attend_ref,
};
