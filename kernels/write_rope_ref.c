/* SPDX-License-Identifier: Apache-2.0 */
/* Norm, rotation and write on the host: a row, one head of one token, after the other. */
#include <math.h>

#include "kernels/write_rope.h"

/* x[:] *= w / sqrt(mean of squares + eps) */
static void norm(float *x, int n, const void *w, int dtype, float eps)
{
	double sum = 0;
	float factor;

	for (int d = 0; d < n; d++)
		sum += (double)x[d] * (double)x[d];
	factor = (float)(1 / sqrt(sum / n + (double)eps));
	for (int d = 0; d < n; d++)
		x[d] *= factor * kv_element_load(w, d, dtype);
}

static void turn(const struct kv_rope_args *a, float *x, int64_t position)
{
	const float *cos = a->cos_sin + position * a->rot, *sin = cos + a->rot / 2;

	for (int i = 0; i < a->rot / 2; i++) {
		int other, one = kv_rope_pair(i, a->rot, a->pairs, &other);
		float p = x[one], q = x[other];

		x[one] = p * cos[i] - q * sin[i];
		x[other] = q * cos[i] + p * sin[i];
	}
}

/* A row of q or key: norm, turn, back in place; x is what it then holds. */
static void prepare(const struct kv_rope_args *a, void *row, int64_t at, int64_t t, const void *w,
		    float *x)
{
	int n = a->write.k.head_dim, dtype = a->write.dtype;

	for (int d = 0; d < n; d++)
		x[d] = kv_element_load(row, at + d, dtype);
	if (!w && !a->rot)
		return;
	if (w)
		norm(x, n, w, dtype, a->eps);
	if (a->rot)
		turn(a, x, a->positions[t]);
	for (int d = 0; d < n; d++) {
		kv_element_store(row, at + d, dtype, x[d]);
		x[d] = kv_element_load(row, at + d, dtype);
	}
}

/* A row into the cache. @source: of the view's type where that is the row's, to be copied as it is. */
static void store(const struct kv_view *view, const struct kv_view *rows, const float *scales,
		  int64_t slot, int h, const float *x, const char *source, int dtype)
{
	int64_t block = slot / view->block_tokens, token = slot % view->block_tokens;
	char *to = kv_view_row(view, block, token, h);
	float scale = scales ? scales[h] : view->scale, top = 0;

	if (view->dtype == dtype) { /* bit for bit, NaN included */
		memcpy(to, source, (size_t)kv_view_row_bytes(view));
		return;
	}
	if (rows->base) {
		for (int d = 0; d < view->head_dim; d++)
			top = fmaxf(top, fabsf(x[d]));
		scale = kv_row_scale(top, view->dtype);
		memcpy(kv_view_row(rows, block, token, h), &scale, sizeof(scale));
	}
	for (int d = 0; d < view->head_dim; d++)
		kv_element_store(to, d, view->dtype, x[d] / scale);
}

int kv_write_rope_host(const struct kv_rope_args *a)
{
	const struct kv_write_args *w = &a->write;
	int64_t element = (int64_t)kv_dtype_bytes(w->dtype);
	float x[KV_ROPE_MAX_DIM];

	for (int64_t t = 0; t < w->n_tokens; t++) {
		int64_t slot = w->slots[t];

		if (a->rot && (a->positions[t] < 0 || a->positions[t] >= a->n_positions))
			continue;
		for (int h = 0; h < a->n_heads_q; h++)
			prepare(a, a->q, t * a->q_stride + (int64_t)h * w->k.head_dim, t, a->q_norm, x);
		for (int h = 0; h < w->k.n_heads; h++) {
			int64_t at = t * w->key_stride + (int64_t)h * w->k.head_dim;

			prepare(a, (void *)(uintptr_t)w->key, at, t, a->k_norm, x);
			if (slot >= 0)
				store(&w->k, &w->k_row_scales, w->k_scales, slot, h, x,
				      (const char *)w->key + at * element, w->dtype);
		}
		for (int h = 0; h < w->v.n_heads && slot >= 0; h++) {
			int64_t at = t * w->value_stride + (int64_t)h * w->v.head_dim;

			for (int d = 0; d < w->v.head_dim; d++)
				x[d] = kv_element_load(w->value, at + d, w->dtype);
			store(&w->v, &w->v_row_scales, w->v_scales, slot, h, x,
			      (const char *)w->value + at * element, w->dtype);
		}
	}
	return 0;
}
