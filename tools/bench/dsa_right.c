/* SPDX-License-Identifier: Apache-2.0 */
/* kvbench dsa: right answers, in double, from the formulas of include/kvcached/dsa.h. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "tools/bench/dsa.h"
#include "tools/bench/device.h"

#define BLOCK  KV_BENCH_DSA_BLOCK
#define DIM    KV_BENCH_DSA_DIM
#define LATENT KV_BENCH_DSA_LATENT

static double e4m3(uint8_t code)
{
	int exponent = code >> 3 & 15, mantissa = code & 7;
	double x = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);

	return code & 0x80 ? -x : x;
}

static double bf16(const char *from, int64_t i)
{
	uint16_t h;
	uint32_t u;
	float x;

	memcpy(&h, from + 2 * i, sizeof(h));
	u = (uint32_t)h << 16;
	memcpy(&x, &u, sizeof(x));
	return (double)x;
}

/* Key @row of a block of the indexer's, scales multiplied in. Return: a token's only scale, or 0.
 */
static double key_get(const char *block, int32_t row_bytes, int row, double key[KV_INDEX_DIM])
{
	static const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
	int codes = row_bytes - 4;
	const uint8_t *code = (const uint8_t *)block + row * codes;
	const uint8_t *scales = (const uint8_t *)block + BLOCK * codes + row * 4;
	float scale = 0;

	if (row_bytes == KV_INDEX_ROW_FP8)
		memcpy(&scale, scales, sizeof(scale));
	for (int d = 0; d < KV_INDEX_DIM; d++) {
		uint8_t half = code[d / 2] >> 4 * (d % 2) & 15;

		key[d] = row_bytes == KV_INDEX_ROW_FP8
				 ? e4m3(code[d]) * (double)scale
				 : (half & 8 ? -1 : 1) * e2m1[half & 7] *
					   ldexp(1, scales[d / KV_INDEX_FP4_TILE] - 127);
	}
	return (double)scale;
}

static int64_t slot_of(const struct kv_bench_dsa *w, int32_t b, int32_t j)
{
	return (int64_t)w->host_table[(int64_t)b * w->width + j / BLOCK] * BLOCK + j % BLOCK;
}

/* All scores of sequence @b's query. */
static int check_scores(const struct kv_bench_dsa *w, int32_t b, const float *scores, double *error,
			double *norm)
{
	const struct kv_bench_dsa_case *c = w->c;
	size_t block_bytes = (size_t)w->view.block_stride;
	int32_t n = c->heads * KV_INDEX_DIM;
	kv_cleanup(kv_freep) char *block = malloc(block_bytes);
	kv_cleanup(kv_freep) double *q = malloc((size_t)n * sizeof(*q));
	double key[KV_INDEX_DIM];

	if (!block || !q)
		return -ENOMEM;
	for (int32_t i = 0; i < n; i++)
		q[i] = e4m3((uint8_t)w->host_q[(int64_t)b * n + i]);
	for (int32_t j = 0; j < c->tokens; j++) {
		double right = 0, x;

		if (j % BLOCK == 0)
			kv_bench_device_get(
				block, w->pool + (size_t)(slot_of(w, b, j) / BLOCK) * block_bytes,
				block_bytes);
		key_get(block, c->row, j % BLOCK, key);
		for (int32_t h = 0; h < c->heads; h++) {
			double sum[4] = {0}; /* four chains: one would wait for itself */

			for (int d = 0; d < KV_INDEX_DIM; d++)
				sum[d % 4] += q[h * KV_INDEX_DIM + d] * key[d];
			right += fmax(sum[0] + sum[1] + sum[2] + sum[3], 0) *
				 (double)w->host_weights[(int64_t)b * c->heads + h];
		}
		x = (double)scores[j] - right;
		*error += x * x;
		*norm += right * right;
	}
	return 0;
}

/* Is @chosen the top_k of these scores, by position, of equal ones the first? */
static bool is_best(const struct kv_bench_dsa *w, int32_t b, const float *scores,
		    const int32_t *chosen, bool *in)
{
	const struct kv_bench_dsa_case *c = w->c;
	int32_t next = 0, n = c->top_k < c->tokens ? c->top_k : c->tokens;
	float least = INFINITY;
	bool left_out = false;

	memset(in, 0, (size_t)c->tokens * sizeof(*in));
	for (int32_t i = 0; i < n; i++) {
		while (next < c->tokens && slot_of(w, b, next) != chosen[i])
			next++;
		if (next == c->tokens)
			return false;
		least = fminf(least, scores[next]);
		in[next++] = true;
	}
	for (int32_t i = n; i < c->top_k; i++)
		if (chosen[i] != -1)
			return false;
	for (int32_t j = 0; j < c->tokens; j++) {
		if ((!in[j] && !(scores[j] <= least)) || (in[j] && scores[j] == least && left_out))
			return false;
		left_out |= !in[j] && scores[j] == least;
	}
	return true;
}

static int check_index(const struct kv_bench_dsa *w, double *ret_error)
{
	const struct kv_bench_dsa_case *c = w->c;
	size_t n_scores = (size_t)(c->seqs * w->scores_stride);
	size_t n_chosen = (size_t)c->seqs * (size_t)c->top_k;
	kv_cleanup(kv_freep) float *scores = malloc(n_scores * sizeof(*scores));
	kv_cleanup(kv_freep) int32_t *chosen = malloc(n_chosen * sizeof(*chosen));
	kv_cleanup(kv_freep) bool *in = malloc((size_t)c->tokens * sizeof(*in));
	double error = 0, norm = 0;
	int r;

	if (!scores || !chosen || !in)
		return -ENOMEM;
	kv_bench_device_get(scores, w->scores, n_scores * sizeof(*scores));
	r = check_scores(w, 0, scores, &error, &norm);
	if (!r && c->seqs > 1)
		r = check_scores(w, c->seqs - 1, scores + (c->seqs - 1) * w->scores_stride, &error,
				 &norm);
	*ret_error = sqrt(error / norm);
	if (r || c->what == KV_BENCH_DSA_SCORE)
		return r;
	kv_bench_device_get(chosen, w->chosen, n_chosen * sizeof(*chosen));
	for (int32_t b = 0; b < c->seqs; b++)
		if (!is_best(w, b, scores + b * w->scores_stride, chosen + (int64_t)b * c->top_k,
			     in))
			*ret_error = 1;
	return 0;
}

/* Element @d of a latent row: bf16, or packed as in mla.h. */
static double latent_get(const struct kv_bench_dsa *w, const char *row, int d)
{
	float scale;

	if (w->view.dtype == KV_BF16)
		return bf16(row, d);
	if (d >= LATENT)
		return bf16(row + LATENT + LATENT / 128 * 4, d - LATENT);
	memcpy(&scale, row + LATENT + d / 128 * 4, sizeof(scale));
	return e4m3((uint8_t)row[d]) * (double)scale;
}

/* All heads of query @t. */
static int check_query(const struct kv_bench_dsa *w, int32_t t, double *error, double *norm)
{
	const struct kv_bench_dsa_case *c = w->c;
	size_t out_bytes = (size_t)c->heads * LATENT * 2, n = (size_t)c->top_k;
	kv_cleanup(kv_freep) char *out = malloc(out_bytes);
	kv_cleanup(kv_freep) double *rows = malloc(n * DIM * sizeof(*rows));
	kv_cleanup(kv_freep) double *x = malloc(n * sizeof(*x));
	char row[DIM * 2];

	if (!out || !rows || !x)
		return -ENOMEM;
	kv_bench_device_get(out, w->out + (size_t)t * out_bytes, out_bytes);
	for (size_t i = 0; i < n; i++) {
		int64_t slot = w->host_chosen[(size_t)t * n + i];

		kv_bench_device_get(row, w->pool + slot * w->view.token_stride,
				    (size_t)w->view.token_stride);
		for (int d = 0; d < DIM; d++)
			rows[i * DIM + (size_t)d] = latent_get(w, row, d);
	}
	for (int32_t h = 0; h < c->heads; h++) {
		const char *q = w->host_q + ((int64_t)t * c->heads + h) * DIM * 2;
		double right[LATENT] = {0}, most = -INFINITY, total = 0;
		double own[DIM];

		for (int d = 0; d < DIM; d++)
			own[d] = bf16(q, d);
		for (size_t i = 0; i < n; i++) {
			double sum[4] = {0};

			for (int d = 0; d < DIM; d++)
				sum[d % 4] += own[d] * rows[i * DIM + (size_t)d];
			x[i] = (sum[0] + sum[1] + sum[2] + sum[3]) * (double)KV_BENCH_DSA_SCALE;
			most = fmax(most, x[i]);
		}
		for (size_t i = 0; i < n; i++) {
			double weight = exp(x[i] - most);

			total += weight;
			for (int d = 0; d < LATENT; d++)
				right[d] += weight * rows[i * DIM + (size_t)d];
		}
		for (int d = 0; d < LATENT; d++) {
			double y = right[d] / total, e = bf16(out, (int64_t)h * LATENT + d) - y;

			*error += e * e;
			*norm += y * y;
		}
	}
	return 0;
}

/* Stored elements are no farther from the key's than half of the gap between their neighbours. */
static bool row_is_right(const struct kv_bench_dsa *w, const char *block, int row,
			 const char *given)
{
	double key[KV_INDEX_DIM], most = 0, scale = key_get(block, w->c->row, row, key);
	int per_scale = w->c->row == KV_INDEX_ROW_FP8 ? KV_INDEX_DIM : KV_INDEX_FP4_TILE;

	for (int d = 0; d < KV_INDEX_DIM; d++)
		most = fmax(most, fabs(bf16(given, d)));
	if (per_scale == KV_INDEX_DIM && !(fabs(scale * 448 / fmax(most, 1e-4) - 1) < 1e-6))
		return false;
	for (int d = 0; d < KV_INDEX_DIM; d++) {
		double x = bf16(given, d), gap;

		if (per_scale == KV_INDEX_DIM) {
			int exponent = x == 0 ? -6 : ilogb(x / scale);

			gap = ldexp(scale, (exponent < -6 ? -6 : exponent) - 3);
		} else {
			double tile = 0;

			for (int i = 0; i < per_scale; i++)
				tile = fmax(tile, fabs(bf16(given, d / per_scale * per_scale + i)));
			scale = ldexp(1, (int)ceil(log2(tile / 6)));
			gap = scale * (fabs(x) > 4 * scale ? 2 : fabs(x) > 2 * scale ? 1 : 0.5);
		}
		if (!(fabs(key[d] - x) <= gap / 2 * (1 + 1e-5)))
			return false;
	}
	return true;
}

static int check_write(const struct kv_bench_dsa *w, double *ret_error)
{
	size_t block_bytes = (size_t)w->view.block_stride;
	kv_cleanup(kv_freep) char *block = malloc(block_bytes);

	if (!block)
		return -ENOMEM;
	*ret_error = 0;
	for (int32_t t = 0; t < w->c->seqs; t++) {
		int64_t slot = w->host_slots[t];

		kv_bench_device_get(block, w->pool + (size_t)(slot / BLOCK) * block_bytes,
				    block_bytes);
		if (!row_is_right(w, block, (int)(slot % BLOCK),
				  w->host_q + (int64_t)t * KV_INDEX_DIM * 2))
			*ret_error = 1;
	}
	return 0;
}

int kv_bench_dsa_right(const struct kv_bench_dsa *w, double *ret_error)
{
	double error = 0, norm = 0;
	int r;

	if (w->c->what == KV_BENCH_DSA_WRITE)
		return check_write(w, ret_error);
	if (w->c->what != KV_BENCH_DSA_ATTEND)
		return check_index(w, ret_error);
	r = check_query(w, 0, &error, &norm);
	if (!r && w->c->seqs > 1)
		r = check_query(w, w->c->seqs - 1, &error, &norm);
	*ret_error = sqrt(error / norm);
	return r;
}
