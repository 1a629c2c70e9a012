/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench attention: rows of the output against sums in double.
 *
 * The first and last query of the first and last sequence, for the first and last head. What lies in the
 * pool is noise that the host knows, so that only rows of q and of the output come from the device.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dtype.h"
#include "tools/bench/paged.h"

#define LSE_TOLERANCE 2e-3

static void load_row(double *to, const char *from, int n, int dtype)
{
	for (int d = 0; d < n; d++)
		to[d] = (double)kv_element_load(from, d, dtype);
}

/* Keys that the query at @p sees: [*ret_lo, *ret_hi) */
static void seen(const struct kv_attention_args *args, int64_t p, int len, int *ret_lo, int *ret_hi)
{
	*ret_hi = args->causal && p + 1 < len ? (int)p + 1 : len;
	*ret_lo = args->window_left >= 0 && p > args->window_left ? (int)(p - args->window_left) : 0;
}

/* Query @i of @seq, head @h. @q: [dim]. Return: ln of the sum of weights. */
static double answer(const struct kv_bench_attention *a, int seq, int i, int h, const double *q,
		     double *out)
{
	const struct kv_attention_args *args = &a->args;
	const struct kv_view *k = &args->k, *v = &args->v;
	const int32_t *table = a->tables + (int64_t)seq * args->table_width;
	int dim = k->head_dim, h_kv = h / (args->n_heads_q / k->n_heads), lo, hi;
	int q_len = a->starts[seq + 1] - a->starts[seq], len = a->lens[seq];
	double l = 0, m = -INFINITY, key[1024];

	memset(out, 0, (size_t)dim * sizeof(*out));
	seen(args, (int64_t)len - q_len + i, len, &lo, &hi);
	for (int j = lo; j < hi; j++) {
		int64_t at = table[j / k->block_tokens] * k->block_stride +
			     j % k->block_tokens * k->token_stride + h_kv * k->head_stride;
		double x = 0, factor, e;

		load_row(key, kv_bench_noise_at(k->dtype, a->k_at + at), dim, k->dtype);
		for (int d = 0; d < dim; d++)
			x += q[d] * key[d];
		x *= (double)k->scale / sqrt(dim);
		if (args->softcap > 0)
			x = (double)args->softcap * tanh(x / (double)args->softcap);
		factor = x > m ? exp(m - x) : 1;
		m = x > m ? x : m;
		e = exp(x - m);
		l = l * factor + e;
		load_row(key, kv_bench_noise_at(v->dtype, a->v_at + at), dim, v->dtype);
		if (factor < 1)
			for (int d = 0; d < dim; d++)
				out[d] *= factor;
		for (int d = 0; d < dim; d++)
			out[d] += e * key[d];
	}
	for (int d = 0; d < dim; d++)
		out[d] = l > 0 ? out[d] * (double)v->scale / l : 0;
	return m + log(l);
}

double kv_bench_attention_error(const struct kv_bench_attention *a)
{
	const struct kv_attention_args *args = &a->args;
	int dim = args->k.head_dim;
	size_t bytes = (size_t)dim * kv_dtype_bytes(args->dtype);
	char *got = malloc(bytes);
	double *q = malloc(2 * (size_t)dim * sizeof(*q)), *right = q + dim, error = 0, norm = 0;
	bool lse_is_right = true;

	if (!got || !q)
		abort();
	for (int n = 0; n < 8; n++) {
		int seq = n & 1 ? args->n_seqs - 1 : 0, h = n & 2 ? args->n_heads_q - 1 : 0;
		int i = n & 4 ? a->starts[seq + 1] - a->starts[seq] - 1 : 0;
		int64_t row = (int64_t)(a->starts[seq] + i) * args->n_heads_q + h;
		double lse;
		float got_lse;

		if (n & 4 && i == 0)
			continue; /* it has been looked at */
		kv_bench_device_get(got, (const char *)args->q + row * (int64_t)bytes, bytes);
		load_row(q, got, dim, args->dtype);
		lse = answer(a, seq, i, h, q, right);
		kv_bench_device_get(got, (const char *)args->out + row * (int64_t)bytes, bytes);
		kv_bench_device_get(&got_lse, args->lse + row, sizeof(got_lse));
		lse_is_right &= fabs((double)got_lse - lse) <= LSE_TOLERANCE;
		for (int d = 0; d < dim; d++) {
			double x = (double)kv_element_load(got, d, args->dtype);

			error += (x - right[d]) * (x - right[d]);
			norm += right[d] * right[d];
		}
	}
	free(got);
	free(q);
	return lse_is_right ? sqrt(error / norm) : NAN;
}
