/* SPDX-License-Identifier: Apache-2.0 */
/* What has to stand in `out` and in every row after a call, in double precision. */
#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/kernels/buffer.h"
#include "tests/kernels/number.h"
#include "tests/kernels/state_problem.h"
#include "tests/support/expect.h"

struct answer {
	struct state_problem *p;
	char *before; /* [n_rows][row_bytes] as they were */
	char *conv_before;
	double *x;	/* convolved, rounded: [T, channels] */
	double *out;	/* [T, out_width] */
	double *states; /* [n_rows][heads * elements], NaN where nothing was written */
	double *convs;	/* [n_rows][taps * channels] */
	bool *written;	/* [n_rows] */
};

static bool is_null(const struct state_problem *p, int row)
{
	return row < 0 || row == p->spec.null_row;
}

static double rounded(int dtype, double x)
{
	return number_decode(dtype, number_encode(dtype, x));
}

static double softplus(double x)
{
	return x > 20 ? x : log(1 + exp(x));
}

struct lane {
	int b;
	int start;
	int len;
	int computed;
	int read;
	bool fresh;
	bool pad;
};

static int write_row(const struct state_spec *s, const struct lane *l)
{
	return s->no_write ? s->interval ? s->table[l->b][(l->computed + l->len - 1) / s->interval]
			     : s->step_width ? -1
					     : s->read[l->b]
			   : s->write[l->b];
}

static struct lane lane_of(const struct state_problem *p, int b, int start)
{
	const struct state_spec *s = &p->spec;
	struct lane l = {b,
			 start,
			 s->q_lens[b],
			 s->no_computed ? 0 : s->computed[b],
			 -1,
			 !s->no_computed && s->computed[b] == 0,
			 true};

	if (l.fresh) {
		l.pad = is_null(p, write_row(s, &l));
		for (int i = 0; i < s->step_width; i++)
			l.pad &= is_null(p, s->steps[b][i]);
		return l;
	}
	l.read = s->accepts ? s->steps[b][s->accepted[b] - 1] : s->read[b];
	l.pad = is_null(p, l.read);
	return l;
}

/* Calls store(row, n) for each row that gets the state after n tokens of the lane. */
static void
each_row(struct answer *a, const struct lane *l,
	 void (*store)(struct answer *a, const struct lane *l, int row, int n, void *of), void *of)
{
	const struct state_spec *s = &a->p->spec;

	for (int n = 1; n <= l->len; n++) {
		int at = l->computed + n;

		if (s->interval && at % s->interval == 0 && at / s->interval <= COLUMNS)
			store(a, l, s->table[l->b][at / s->interval - 1], n, of);
		if (n <= s->step_width)
			store(a, l, s->steps[l->b][n - 1], n, of);
	}
	store(a, l, write_row(s, l), l->len, of);
}

static double conv_input(const struct answer *a, const struct lane *l, int at, int c)
{
	const struct state_problem *p = a->p;

	if (at >= 0)
		return number_get(p->x, (l->start + at) * p->in_stride + c, p->spec.dtype);
	if (l->fresh)
		return 0;
	return number_get(a->conv_before + l->read * p->conv_row_bytes,
			  conv_at(p, p->spec.conv_width - 1 + at, c), p->spec.conv_dtype);
}

static void store_conv(struct answer *a, const struct lane *l, int row, int n, void *of)
{
	struct state_problem *p = a->p;

	if (is_null(p, row))
		return;
	a->written[row] = true;
	for (int j = 0; j < p->spec.conv_width - 1; j++)
		for (int c = 0; c < p->channels; c++)
			a->convs[row * conv_elements(p) + conv_at(p, j, c)] =
				rounded(p->spec.conv_dtype,
					conv_input(a, l, n - p->spec.conv_width + 1 + j, c));
}

static void answer_conv(struct answer *a, const struct lane *l)
{
	struct state_problem *p = a->p;
	const struct state_spec *s = &p->spec;

	for (int i = 0; i < l->len; i++)
		for (int c = 0; c < p->channels; c++) {
			double y = number_get(p->bias, c, s->dtype);

			if (!s->conv_width) {
				a->x[(int64_t)(l->start + i) * p->channels + c] =
					conv_input(a, l, i, c);
				continue;
			}
			for (int j = 0; j < s->conv_width; j++)
				y += number_get(p->weight, c * s->conv_width + j, s->dtype) *
				     conv_input(a, l, i - s->conv_width + 1 + j, c);
			if (s->activation)
				y = y / (1 + exp(-y));
			a->x[(int64_t)(l->start + i) * p->channels + c] =
				s->kind == PROBLEM_CONV ? y : rounded(s->dtype, y);
		}
	if (s->conv_width)
		each_row(a, l, store_conv, NULL);
}

/* A head's sequence: what is needed of each token. */
struct solved {
	int h;
	double *k;     /* [len][dim_k] */
	double *w;     /* [len][dim_v]: what each token adds along its k */
	double *gamma; /* [len] log decay from the lane's start on */
	double *first; /* [dim_v][dim_k] */
};

static void store_state(struct answer *a, const struct lane *l, int row, int n, void *of)
{
	struct solved *v = of;
	const struct state_spec *s = &a->p->spec;
	double *to;

	if (is_null(a->p, row))
		return;
	a->written[row] = true;
	to = a->states + (row * a->p->heads + v->h) * state_elements(s);
	for (int64_t e = 0; e < state_elements(s); e++)
		to[e] = exp(v->gamma[n - 1]) * v->first[e];
	for (int i = 0; i < n; i++) {
		double decay = exp(v->gamma[n - 1] - v->gamma[i]);

		for (int d = 0; d < s->dim_v; d++)
			for (int j = 0; j < s->dim_k; j++)
				to[d * s->dim_k + j] +=
					decay * v->w[i * s->dim_v + d] * v->k[i * s->dim_k + j];
	}
}

static double dot(const double *a, const double *b, int n)
{
	double sum = 0;

	for (int i = 0; i < n; i++)
		sum += a[i] * b[i];
	return sum;
}

/* w_i = beta_i (v_i - e^gamma_i S0 k_i - sum_{j < i} e^(gamma_i - gamma_j) (k_i k_j) w_j) */
static void answer_head(struct answer *a, const struct lane *l, int h)
{
	struct state_problem *p = a->p;
	const struct state_spec *s = &p->spec;
	bool delta = s->kind == PROBLEM_DELTA;
	int nk = s->dim_k, nv = s->dim_v, hk = h / s->group, per_head = p->heads + s->gap;
	int at_q = delta ? hk * nk : p->heads * nv + s->heads_k * nk + hk * nk;
	int at_k = delta ? (s->heads_k + hk) * nk : p->heads * nv + hk * nk;
	int at_v = delta ? 2 * s->heads_k * nk + h * nv : h * nv;
	struct solved v = {h, calloc((size_t)(l->len * nk), sizeof(double)),
			   calloc((size_t)(l->len * nv), sizeof(double)),
			   calloc((size_t)l->len, sizeof(double)),
			   calloc((size_t)state_elements(s), sizeof(double))};
	double *q = calloc((size_t)nk, sizeof(double)), total = 0;

	for (int64_t e = 0; e < state_elements(s) && !l->fresh; e++)
		v.first[e] = number_get(a->before + l->read * p->row_bytes,
					h * state_elements(s) + e, s->state_dtype);
	for (int i = 0; i < l->len; i++) {
		const double *x = a->x + (int64_t)(l->start + i) * p->channels;
		int64_t at = (int64_t)(l->start + i) * per_head + h;
		double gate = number_get(p->a, at, s->dtype) + (double)p->dt_bias[h];
		double norm_q = 1, norm_k = 1, beta = 0, dt = softplus(gate);
		double *k = v.k + i * nk, *w = v.w + i * nv;

		memcpy(k, x + at_k, sizeof(double) * (size_t)nk);
		memcpy(q, x + at_q, sizeof(double) * (size_t)nk);
		if (delta) {
			beta = 1 / (1 + exp(-number_get(p->b, at, s->dtype)));
			if (s->normalize) {
				norm_k = 1 / sqrt(dot(k, k, nk) + 1e-6);
				norm_q = 1 / sqrt(dot(q, q, nk) + 1e-6);
			}
			norm_q /= sqrt(nk);
		} else {
			dt = fmin(fmax(dt, (double)0.01f), 1.5);
		}
		for (int j = 0; j < nk; j++) {
			k[j] *= norm_k;
			q[j] *= norm_q;
		}
		total += -exp((double)p->a_log[h]) * dt;
		v.gamma[i] = total;
		for (int d = 0; d < nv; d++)
			w[d] = delta ? x[at_v + d] - exp(total) * dot(v.first + d * nk, k, nk)
				     : dt * x[at_v + d];
		for (int j = 0; j < i && delta; j++) {
			double f = exp(total - v.gamma[j]) * dot(k, v.k + j * nk, nk);

			for (int d = 0; d < nv; d++)
				w[d] -= f * v.w[j * nv + d];
		}
		for (int d = 0; d < nv && delta; d++)
			w[d] *= beta;
		for (int d = 0; d < nv; d++)
			a->out[(l->start + i) * p->out_width + h * nv + d] =
				exp(total) * dot(v.first + d * nk, q, nk) +
				(delta ? 0 : (double)p->d[h] * x[at_v + d]);
		for (int j = 0; j <= i; j++) {
			double f = exp(total - v.gamma[j]) * dot(q, v.k + j * nk, nk);

			for (int d = 0; d < nv; d++)
				a->out[(l->start + i) * p->out_width + h * nv + d] +=
					f * v.w[j * nv + d];
		}
	}
	each_row(a, l, store_state, &v);
	free(v.k);
	free(v.w);
	free(v.gamma);
	free(v.first);
	free(q);
}

static void answer_all(struct answer *a)
{
	struct state_problem *p = a->p;
	int start = 0;

	for (int b = 0; b < p->spec.n_lanes; b++) {
		struct lane l = lane_of(p, b, start);

		start += l.len;
		if (l.pad || !l.len)
			continue;
		answer_conv(a, &l);
		if (p->spec.kind == PROBLEM_CONV)
			memcpy(a->out + l.start * p->out_width,
			       a->x + (int64_t)l.start * p->channels,
			       sizeof(double) * (size_t)(l.len * p->channels));
		for (int h = 0; h < p->heads; h++)
			answer_head(a, &l, h);
	}
}

/*
 * By the type of what is stored; and where a convolution's output is rounded on the way, elements
 * that lie between two numbers of that type may go either way.
 */
static double tolerance(const struct state_spec *s, int dtype)
{
	double stored = dtype == KV_BF16 ? 4e-3 : dtype == KV_F16 ? 6e-4 : 2e-5;
	double between = s->kind != PROBLEM_DELTA || !s->conv_width ? 0
			 : s->dtype == KV_BF16			    ? 2e-3
			 : s->dtype == KV_F16			    ? 3e-4
								    : 0;

	if (s->tolerance > 0 && buffer_device == KV_DEVICE_CUDA)
		return s->tolerance;
	return stored + between;
}

/* ||got - right|| / ||right|| over elements of @dtype; half a step of f16's smallest is no error */
static double distance(const void *got, int dtype, const double *right, int64_t n)
{
	double error = 0, norm = 0, step = dtype == KV_F16 ? 0x1p-25 : 0;

	for (int64_t i = 0; i < n; i++) {
		double d = fabs(number_get(got, i, dtype) - right[i]);

		error += d > step || isnan(d) ? (d - step) * (d - step) : 0;
		norm += right[i] * right[i];
	}
	return sqrt(error / (norm > 0 ? norm : 1));
}

static void check_out(struct answer *a, const char *name, const char *out)
{
	struct state_problem *p = a->p;
	const struct state_spec *s = &p->spec;
	int64_t element = (int64_t)kv_dtype_bytes(s->dtype);
	int start = 0;

	for (int b = 0; b < s->n_lanes; b++) {
		struct lane l = lane_of(p, b, start);
		double *right = malloc(sizeof(double) * (size_t)(l.len * p->out_width + 1));
		char *got = malloc((size_t)(l.len * p->out_width * element) + 1);
		double d;

		for (int i = 0; i < l.len; i++) {
			memcpy(got + i * p->out_width * element,
			       out + (start + i) * p->out_stride * element,
			       (size_t)(p->out_width * element));
			for (int64_t e = 0; e < p->out_width; e++)
				right[i * p->out_width + e] =
					l.pad ? 0 : a->out[(start + i) * p->out_width + e];
			for (int64_t e = p->out_width * element; e < p->out_stride * element; e++)
				expect(out[(start + i) * p->out_stride * element + e] == OUT_POISON,
				       "%s: a gap of out was written, token %d", name, start + i);
		}
		d = distance(got, s->dtype, right, l.len * p->out_width);
		expect(l.pad ? d == 0 : d < tolerance(s, s->dtype),
		       "%s: out of lane %d (%d tokens after %d) is off by %g", name, b, l.len,
		       l.computed, d);
		start += l.len;
		free(right);
		free(got);
	}
	for (int64_t e = start * p->out_stride * element;
	     e < (start + s->spare_tokens) * p->out_stride * element; e++)
		expect(out[e] == OUT_POISON, "%s: out past the last lane was written", name);
}

static void check_rows(struct answer *a, const char *name)
{
	struct state_problem *p = a->p;
	const struct state_spec *s = &p->spec;
	int64_t n = p->heads * state_elements(s);
	char *after = malloc((size_t)p->row_bytes + 1);
	char *conv_after = malloc((size_t)p->conv_row_bytes + 1);

	for (int row = 0; row < s->n_rows; row++) {
		const char *before = a->before + row * p->row_bytes;
		const char *conv_before = a->conv_before + row * p->conv_row_bytes;
		int64_t used = n * (int64_t)kv_dtype_bytes(s->state_dtype);

		buffer_get(after, (char *)p->rows + row * p->row_bytes, (size_t)p->row_bytes);
		buffer_get(conv_after, (char *)p->conv_rows + row * p->conv_row_bytes,
			   (size_t)p->conv_row_bytes);
		if (!a->written[row]) {
			expect(memcmp(after, before, (size_t)p->row_bytes) == 0,
			       "%s: row %d changed, which no lane writes", name, row);
			expect(memcmp(conv_after, conv_before, (size_t)p->conv_row_bytes) == 0,
			       "%s: row %d of the convolution changed, which no lane writes", name,
			       row);
			continue;
		}
		if (n) {
			double d = distance(after, s->state_dtype, a->states + row * n, n);

			expect(d < tolerance(s, s->state_dtype),
			       "%s: the state in row %d is off by %g", name, row, d);
			expect(memcmp(after + used, before + used, (size_t)(p->row_bytes - used)) ==
				       0,
			       "%s: the gap behind row %d was written", name, row);
		}
		if (s->conv_width) /* copies */
			expect(distance(conv_after, s->conv_dtype,
					a->convs + row * conv_elements(p), conv_elements(p)) == 0,
			       "%s: the convolution's row %d is not its last inputs", name, row);
	}
	free(after);
	free(conv_after);
}

void *state_problem_check(struct state_problem *p, const struct kv_state_backend *backend)
{
	const struct state_spec *s = &p->spec;
	size_t bytes = (size_t)(p->row_bytes * s->n_rows);
	size_t conv_bytes = (size_t)(p->conv_row_bytes * s->n_rows);
	struct answer a = {
		.p = p,
		.before = malloc(bytes + 1),
		.conv_before = malloc(conv_bytes + 1),
		.x = calloc((size_t)(p->n_tokens * p->channels + 1), sizeof(double)),
		.out = calloc((size_t)(p->n_tokens * p->out_width + 1), sizeof(double)),
		.states = calloc((size_t)(s->n_rows * p->heads * state_elements(s) + 1),
				 sizeof(double)),
		.convs = calloc((size_t)(s->n_rows * conv_elements(p) + 1), sizeof(double)),
		.written = calloc((size_t)s->n_rows, sizeof(bool)),
	};
	char *out;

	buffer_get(a.before, p->rows, bytes);
	buffer_get(a.conv_before, p->conv_rows, conv_bytes);
	answer_all(&a);
	out = state_problem_run(p, backend);
	check_out(&a, backend->name, out);
	check_rows(&a, backend->name);
	free(a.before);
	free(a.conv_before);
	free(a.x);
	free(a.out);
	free(a.states);
	free(a.convs);
	free(a.written);
	return out;
}
