/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The recurrences token by token, in double: the definition of right. A state is rounded where it
 * is stored, inputs are taken as they are stored.
 */
#include <errno.h>
#include <stdlib.h>

#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "kernels/gdn_ref.h"

double kv_softplus(double x)
{
	return x > 20 ? x : log1p(exp(x));
}

void kv_state_load(const struct kv_view *state, int64_t row, int64_t head, double *s)
{
	const char *from = (const char *)state->base + kv_state_offset(state, row, head);

	for (int64_t i = 0; i < state->head_dim; i++)
		s[i] = (double)kv_element_load(from, i, state->dtype);
}

/* bf16 takes the nearest f32 first: of doubles that are sums of such, that is the same */
void kv_state_store(const struct kv_state_batch *batch, const struct kv_view *state, int32_t row,
		    int64_t head, const double *s)
{
	char *to;

	if (kv_row_is_null(batch, row))
		return;
	to = (char *)state->base + kv_state_offset(state, row, head);
	for (int64_t i = 0; i < state->head_dim; i++)
		kv_element_store(to, i, state->dtype, (float)s[i]);
}

/* to[:] = from[:] * scale, and over its length before that if @normalize */
static void load_direction(const void *from, int64_t at, int dtype, int n, bool normalize,
			   double scale, double *to)
{
	double sum = 0;

	for (int i = 0; i < n; i++) {
		to[i] = (double)kv_element_load(from, at + i, dtype);
		sum += to[i] * to[i];
	}
	for (int i = 0; i < n; i++)
		to[i] *= normalize ? scale / sqrt(sum + KV_NORM_EPS) : scale;
}

/* S += (beta (v - S k)) k^T after the decay; out = S q */
static void step_delta(const struct kv_recur *p, int64_t t, int64_t h, double *s, double *out)
{
	int64_t hk = h / (p->heads / p->heads_k);
	int nk = p->dim_k;
	double q[KV_MAX_STATE_DIM], k[KV_MAX_STATE_DIM];
	double a = (double)kv_element_load(p->a, t * p->a_stride + h, p->dtype);
	double b = (double)kv_element_load(p->b, t * p->b_stride + h, p->dtype);
	double bias = p->dt_bias ? (double)p->dt_bias[h] : 0;
	double decay = exp(-exp((double)p->a_log[h]) * kv_softplus(a + bias));
	double beta = 1 / (1 + exp(-b));

	load_direction(p->q, t * p->q_stride + hk * nk, p->dtype, nk, p->normalize,
		       (double)p->scale, q);
	load_direction(p->k, t * p->k_stride + hk * nk, p->dtype, nk, p->normalize, 1, k);
	for (int i = 0; i < p->dim_v; i++) {
		double *row = s + (int64_t)i * nk, u = 0, delta;

		for (int j = 0; j < nk; j++) {
			row[j] *= decay;
			u += row[j] * k[j];
		}
		delta = beta * ((double)kv_element_load(p->v, t * p->v_stride + h * p->dim_v + i,
							p->dtype) -
				u);
		out[i] = 0;
		for (int j = 0; j < nk; j++) {
			row[j] += delta * k[j];
			out[i] += row[j] * q[j];
		}
	}
}

/* All tokens of a lane for one head; s: [dim_v][dim_k], out: [dim_v] */
static void run_lane(const struct kv_recur *p, int64_t b, const struct kv_lane *lane, int64_t h,
		     double *s, double *out)
{
	if (lane->fresh)
		memset(s, 0, sizeof(*s) * (size_t)p->state.head_dim);
	else
		kv_state_load(&p->state, lane->read, h, s);
	for (int64_t i = 0; i < lane->len; i++) {
		int64_t t = lane->start + i, n = lane->computed + i + 1;

		if (p->rule == KV_RULE_DELTA)
			step_delta(p, t, h, s, out);
		else
			kv_ssd_step_ref(p, t, h, s, out);
		for (int64_t v = 0; v < p->dim_v; v++)
			kv_element_store(p->out, t * p->out_stride + h * p->dim_v + v, p->dtype,
					 (float)out[v]);
		kv_state_store(&p->batch, &p->state, kv_checkpoint_row(&p->batch, b, n), h, s);
		kv_state_store(&p->batch, &p->state, kv_step_row(&p->batch, b, i), h, s);
	}
	kv_state_store(&p->batch, &p->state, lane->write, h, s);
}

/* Rows of out of a lane that is padding. */
static void clear_lane(const struct kv_recur *p, const struct kv_lane *lane)
{
	size_t bytes = (size_t)p->heads * (size_t)p->dim_v * kv_dtype_bytes(p->dtype);

	for (int64_t i = 0; i < lane->len; i++)
		memset((char *)p->out + (size_t)((lane->start + i) * p->out_stride) *
						kv_dtype_bytes(p->dtype),
		       0, bytes);
}

static int run_recurrence(const struct kv_recur *p)
{
	kv_cleanup(kv_freep) double *s =
		malloc(sizeof(*s) * ((size_t)p->state.head_dim + (size_t)p->dim_v));

	if (!s)
		return kv_error(-ENOMEM, "state: no memory for %d elements", p->state.head_dim);
	for (int32_t b = 0; b < p->batch.n_seqs; b++) {
		struct kv_lane lane = kv_lane_get(&p->batch, b);

		if (lane.pad)
			clear_lane(p, &lane);
		for (int32_t h = 0; h < p->heads && !lane.pad && lane.len > 0; h++)
			run_lane(p, b, &lane, h, s, s + p->state.head_dim);
	}
	return 0;
}

/* With a convolution in front: its output, rounded, is what the recurrence takes. */
static int run_ref(const struct kv_recur *args)
{
	size_t element = kv_dtype_bytes(args->dtype);
	struct kv_conv1d_args conv;
	struct kv_recur p = *args;
	kv_cleanup(kv_freep) char *x = NULL;
	int r;

	if (!args->conv_weight)
		return run_recurrence(args);
	kv_recur_conv(args, NULL, &conv);
	x = calloc((size_t)args->batch.n_tokens * (size_t)conv.n_channels, element);
	if (!x)
		return kv_error(-ENOMEM, "convolution: no memory for %d tokens of %d channels",
				args->batch.n_tokens, conv.n_channels);
	conv.out = x;
	r = kv_conv1d_ref(&conv);
	if (r < 0)
		return r;
	p.q = x;
	p.k = x + (size_t)args->heads_k * (size_t)args->dim_k * element;
	p.v = x + 2 * (size_t)args->heads_k * (size_t)args->dim_k * element;
	p.q_stride = p.k_stride = p.v_stride = conv.n_channels;
	return run_recurrence(&p);
}

const struct kv_state_backend kv_state_ref = {
	.name = "ref",
	.device = KV_DEVICE_HOST,
	.run = run_ref,
	.convolve = kv_conv1d_ref,
};
