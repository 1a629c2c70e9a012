/* SPDX-License-Identifier: Apache-2.0 */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/error.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/mla_problem.h"
#include "tests/kernels/number.h"

struct mla_spec mla_spec_default(void)
{
	return (struct mla_spec){.dtype = KV_BF16,
				 .kv_dtype = KV_BF16,
				 .latent = 512,
				 .rope = 64,
				 .heads = 16,
				 .block_tokens = 64};
}

void mla_spec_add(struct mla_spec *spec, int32_t len, int32_t q_len)
{
	ck_assert_int_lt(spec->n_seqs, MLA_SEQS);
	spec->lens[spec->n_seqs] = len;
	spec->q_lens[spec->n_seqs++] = q_len;
}

static int64_t local_len(const struct mla_spec *s, int64_t len)
{
	int64_t n = 0, size = s->cp_size > 1 ? s->cp_size : 1;
	int64_t interleave = s->cp_interleave > 0 ? s->cp_interleave : 1;

	if (size == 1)
		return len;
	for (int64_t j = 0; j < len; j++)
		n += j / interleave % size == s->cp_rank;
	return n;
}

/* Of local token @i. */
static int64_t position(const struct mla_spec *s, int64_t i)
{
	int64_t size = s->cp_size > 1 ? s->cp_size : 1;
	int64_t interleave = s->cp_interleave > 0 ? s->cp_interleave : 1;

	return i / interleave * interleave * size + s->cp_rank * interleave + i % interleave;
}

static void *put(const void *from, size_t bytes)
{
	void *p = buffer_new(bytes);

	buffer_put(p, from, bytes);
	return p;
}

/* Every token of every sequence to its slot, through kv_mla_write(); one row in 7 is padding. */
static void write_rows(struct mla_problem *p, const struct kv_view *view)
{
	const struct mla_spec *s = &p->spec;
	int64_t capacity = 0, n = 0;
	uint16_t *latent, *rope;
	int64_t *slots;

	for (int b = 0; b < s->n_seqs; b++)
		capacity += local_len(s, s->lens[b]) * 7 / 6 + 2;
	latent = calloc((size_t)capacity * (size_t)s->latent, kv_dtype_bytes(s->dtype));
	rope = calloc((size_t)capacity * (size_t)s->rope + 1, kv_dtype_bytes(s->dtype));
	slots = calloc((size_t)capacity, sizeof(*slots));
	for (int b = 0; b < s->n_seqs; b++)
		for (int64_t i = 0, local = local_len(s, s->lens[b]); i < local;) {
			int64_t block = p->host_table[b * p->args.table_width + i / s->block_tokens];

			slots[n] = n % 7 == 3 ? -1 : block * s->block_tokens + i % s->block_tokens;
			for (int d = 0; d < s->latent + s->rope; d++) {
				double x = 2 * number_random(5, (uint64_t)b, (uint64_t)i, (uint64_t)d);

				x = slots[n] < 0 ? NAN : x;
				number_set(d < s->latent ? latent : rope,
					   d < s->latent ? n * s->latent + d
							 : n * s->rope + d - s->latent,
					   s->dtype, number_encode(s->dtype, x));
			}
			i += slots[n++] >= 0;
		}

	struct kv_mla_write_args w = {
		.size = sizeof(w),
		.device = buffer_device,
		.dtype = s->dtype,
		.n_tokens = n,
		.latent_dim = s->latent,
		.rope_dim = s->rope,
		.latent = put(latent, (size_t)n * (size_t)s->latent * kv_dtype_bytes(s->dtype)),
		.rope = put(rope, (size_t)n * (size_t)s->rope * kv_dtype_bytes(s->dtype)),
		.slots = put(slots, (size_t)n * sizeof(*slots)),
		.cache = *view,
	};
	ck_assert_msg(kv_mla_write(&w) == 0, "%s", kv_error_text());
	free(latent);
	free(rope);
	free(slots);
	latent = malloc(1);
	buffer_get(latent, w.latent, n ? 1 : 0); /* it is done */
	free(latent);
	buffer_free((void *)w.latent);
	buffer_free((void *)w.rope);
	buffer_free((void *)w.slots);
}

/* What lies in the pool, in double. */
static void read_rows(struct mla_problem *p, const struct kv_view *view)
{
	const struct mla_spec *s = &p->spec;
	char *pool = malloc(p->pool_bytes);

	buffer_get(pool, p->pool, p->pool_bytes);
	p->rows = calloc((size_t)p->n_blocks * (size_t)s->block_tokens * (size_t)p->dim, sizeof(double));
	for (int64_t r = 0; r < (int64_t)p->n_blocks * s->block_tokens; r++) {
		const char *row = pool + r / s->block_tokens * view->block_stride +
				  r % s->block_tokens * view->token_stride;

		for (int d = 0; d < p->dim; d++) {
			double *x = &p->rows[r * p->dim + d];

			if (s->kv_dtype != KV_BYTES)
				*x = number_get(row, d, s->kv_dtype) * (double)view->scale;
			else if (d < s->latent)
				*x = number_get(row, d, KV_F8_E4M3) *
				     number_get(row + s->latent, d / 128, KV_F32);
			else
				*x = number_get(row + s->latent + s->latent / 32, d - s->latent, s->dtype);
		}
	}
	free(pool);
}

static void answer_row(struct mla_problem *p, int b, int64_t t, int64_t pos, int h, double *x)
{
	const struct mla_spec *s = &p->spec;
	int64_t local = local_len(s, s->lens[b]), stride = p->args.q_token_stride;
	double m = -INFINITY, sum = 0, *out = p->out + (t * s->heads + h) * s->latent;

	for (int d = 0; d < s->latent; d++)
		out[d] = 0;
	for (int64_t j = 0; j < local; j++) {
		int64_t block = p->host_table[b * p->args.table_width + j / s->block_tokens];
		const double *row = p->rows + (block * s->block_tokens + j % s->block_tokens) * p->dim;

		x[j] = -INFINITY;
		if (!s->not_causal && position(s, j) > pos)
			continue;
		x[j] = 0;
		for (int d = 0; d < p->dim; d++)
			x[j] += number_get(p->host_q, t * stride + h * p->dim + d, s->dtype) * row[d];
		x[j] *= (double)p->args.sm_scale;
		m = fmax(m, x[j]);
	}
	for (int64_t j = 0; j < local && m > -INFINITY; j++) {
		int64_t block = p->host_table[b * p->args.table_width + j / s->block_tokens];
		const double *row = p->rows + (block * s->block_tokens + j % s->block_tokens) * p->dim;
		double e = exp(x[j] - m);

		if (e == 0)
			continue;
		sum += e;
		for (int d = 0; d < s->latent; d++)
			out[d] += e * row[d];
	}
	for (int d = 0; d < s->latent && sum > 0; d++)
		out[d] /= sum;
	p->lse[t * s->heads + h] = sum > 0 ? m + log(sum) : -INFINITY;
}

/* Of large problems the first, the middle and the last heads only: the rest is NaN, not looked at. */
static bool is_checked(const struct mla_problem *p, int h)
{
	double work = 0;

	for (int b = 0; b < p->spec.n_seqs; b++)
		work += (double)p->spec.lens[b] * p->spec.q_lens[b] * p->spec.heads * p->dim;
	return work < 2e7 || h == 0 || h == p->spec.heads / 2 + 1 || h == p->spec.heads - 1;
}

static void answer(struct mla_problem *p)
{
	const struct mla_spec *s = &p->spec;
	double *x;
	int32_t longest = 0;
	int64_t t = 0;

	for (int b = 0; b < s->n_seqs; b++)
		longest = s->lens[b] > longest ? s->lens[b] : longest;
	x = calloc((size_t)longest + 1, sizeof(*x));
	for (int b = 0; b < s->n_seqs; b++)
		for (int i = 0; i < s->q_lens[b]; i++, t++)
			for (int h = 0; h < s->heads; h++) {
				if (is_checked(p, h))
					answer_row(p, b, t, s->lens[b] - s->q_lens[b] + i, h, x);
				else
					p->lse[t * s->heads + h] = NAN;
			}
	free(x);
}

struct mla_problem *mla_problem_new(const struct mla_spec *spec)
{
	struct mla_problem *p = calloc(1, sizeof(*p));
	const struct mla_spec *s = &p->spec;
	int32_t loc[MLA_SEQS + 1] = {0}, next = 0, width = 1, longest = 0, most = 0, rows;
	struct kv_view view = {0};
	size_t element = kv_dtype_bytes(spec->dtype);
	int64_t q_stride;

	p->spec = *spec;
	p->dim = s->latent + s->rope;
	view.head_dim = s->kv_dtype == KV_BYTES ? kv_mla_packed_bytes(s->latent, s->rope) : p->dim;
	view.dtype = s->kv_dtype;
	view.n_heads = 1;
	view.block_tokens = s->block_tokens;
	view.scale = s->kv_dtype == KV_BYTES || s->scale == 0 ? 1 : s->scale;
	view.token_stride = view.head_dim * (int64_t)kv_dtype_bytes(s->kv_dtype) + s->gap;
	view.head_stride = view.token_stride;
	view.block_stride = (view.token_stride * s->block_tokens + 255) / 256 * 256;
	for (int b = 0; b < s->n_seqs; b++) {
		int32_t n = (int32_t)((local_len(s, s->lens[b]) + s->block_tokens - 1) / s->block_tokens);

		width = n > width ? n : width;
		p->n_blocks += n;
		longest = s->lens[b] > longest ? s->lens[b] : longest;
		most = s->q_lens[b] > most ? s->q_lens[b] : most;
		loc[b + 1] = loc[b] + s->q_lens[b];
	}
	for (int b = s->n_seqs; b < s->n_seqs + s->pad_seqs; b++)
		loc[b + 1] = loc[b];
	rows = s->n_seqs + s->pad_seqs;
	p->n_tokens = loc[rows] + s->pad_tokens;
	p->n_blocks = p->n_blocks * 5 / 4 + 3;
	p->pool_bytes = (size_t)(p->n_blocks * view.block_stride);
	p->pool = buffer_new(p->pool_bytes);
	buffer_fill(p->pool, 0xff, p->pool_bytes); /* NaN in every type */
	view.base = p->pool;

	/* Blocks in an order that has nothing to do with the sequences'. */
	p->host_table = calloc((size_t)rows * (size_t)width + 1, sizeof(*p->host_table));
	for (int i = 0; i < rows * width; i++)
		p->host_table[i] = -1;
	for (int b = 0; b < s->n_seqs; b++)
		for (int i = 0; i * s->block_tokens < local_len(s, s->lens[b]); i++) {
			int step = p->n_blocks % 7 ? 7 : p->n_blocks % 5 ? 5 : 11;

			if (p->n_blocks % step == 0)
				step = 1;
			p->host_table[b * width + i] = (int32_t)((next++ * (int64_t)step + 2) % p->n_blocks);
		}
	q_stride = (int64_t)s->heads * p->dim + s->q_gap;
	p->host_q = malloc((size_t)(p->n_tokens * q_stride) * element + 1);
	memset(p->host_q, 0xff, (size_t)(p->n_tokens * q_stride) * element);
	for (int64_t t = 0; t < loc[s->n_seqs]; t++)
		for (int i = 0; i < s->heads * p->dim; i++)
			number_set(p->host_q, t * q_stride + i, s->dtype,
				   number_encode(s->dtype, (s->loudness > 0 ? s->loudness : 1) *
								   number_random(9, (uint64_t)t,
										 (uint64_t)i, 1)));
	p->q = put(p->host_q, (size_t)(p->n_tokens * q_stride) * element);
	p->loc = put(loc, (size_t)(rows + 1) * sizeof(*loc));
	p->lens = buffer_new((size_t)rows * sizeof(int32_t) + 4);
	p->table = put(p->host_table, (size_t)rows * (size_t)width * sizeof(int32_t));
	p->args = (struct kv_attention_args){
		.size = sizeof(p->args),
		.device = buffer_device,
		.dtype = s->dtype,
		.n_seqs = rows,
		.n_tokens = p->n_tokens,
		.n_heads_q = s->heads,
		.max_query_len = most,
		.max_seq_len = longest,
		.table_width = width,
		.q = p->q,
		.query_start_loc = p->loc,
		.seq_lens = p->lens,
		.block_table = p->table,
		.k = view,
		.sm_scale = 0.0721688f,
		.window_left = -1,
		.causal = !s->not_causal,
		.cp_size = s->cp_size,
		.cp_rank = s->cp_rank,
		.cp_interleave = s->cp_interleave,
		.out_dtype = s->out_f32 ? KV_F32 : 0,
		.q_token_stride = q_stride,
		.out_token_stride = (int64_t)s->heads * s->latent + s->out_gap,
		.latent_dim = s->latent,
		.rope_dim = s->rope,
	};
	p->out_bytes = (size_t)(p->n_tokens * p->args.out_token_stride) *
		       (s->out_f32 ? sizeof(float) : element);
	p->lse_bytes = (size_t)p->n_tokens * (size_t)s->heads * sizeof(float);
	p->args.out = buffer_new(p->out_bytes);
	p->args.lse = buffer_new(p->lse_bytes);
	p->out = calloc((size_t)p->n_tokens * (size_t)s->heads * (size_t)s->latent + 1, sizeof(double));
	p->lse = calloc((size_t)p->n_tokens * (size_t)s->heads + 1, sizeof(double));
	write_rows(p, &view);
	read_rows(p, &view);
	mla_problem_lengths(p, s->lens);
	return p;
}

void mla_problem_lengths(struct mla_problem *p, const int32_t *lens)
{
	int32_t all[MLA_SEQS] = {0};

	memmove(p->spec.lens, lens, (size_t)p->spec.n_seqs * sizeof(*lens));
	memcpy(all, lens, (size_t)p->spec.n_seqs * sizeof(*lens));
	buffer_put(p->lens, all, (size_t)p->args.n_seqs * sizeof(*all));
	answer(p);
}

void mla_problem_free(struct mla_problem *p)
{
	buffer_free(p->pool);
	buffer_free(p->q);
	buffer_free(p->loc);
	buffer_free(p->lens);
	buffer_free(p->table);
	buffer_free(p->args.out);
	buffer_free(p->args.lse);
	free(p->host_q);
	free(p->rows);
	free(p->host_table);
	free(p->out);
	free(p->lse);
	free(p);
}

double mla_problem_tolerance(const struct mla_spec *spec)
{
	if (spec->dtype == KV_F32)
		return 1e-5;
	if (kv_dtype_bytes(spec->kv_dtype) == 1)
		return 5e-3;
	return spec->dtype == KV_F16 ? 6e-4 : 4e-3;
}

static double out_get(const struct mla_problem *p, const char *out, int64_t t, int h, int d)
{
	int64_t at = t * p->args.out_token_stride + h * p->spec.latent + d;

	return number_get(out, at, p->spec.out_f32 ? KV_F32 : p->spec.dtype);
}

void mla_problem_errors(const struct mla_problem *p, const char *out, const float *lse,
			double *ret_out, double *ret_lse)
{
	const struct mla_spec *s = &p->spec;
	int64_t real = p->n_tokens - s->pad_tokens;
	double worst = 0, worst_lse = 0;

	for (int64_t i = 0; i < real * s->heads; i++) {
		double error = 0, norm = 0, e;

		if (isnan(p->lse[i]))
			continue;
		for (int d = 0; d < s->latent; d++) {
			double right = p->out[i * s->latent + d];
			double got = out_get(p, out, i / s->heads, (int)(i % s->heads), d);

			error += (got - right) * (got - right);
			norm += right * right;
		}
		e = norm > 0 ? sqrt(error / norm) : sqrt(error);
		if (!(e <= worst)) /* NaN too */
			worst = e;
		e = p->lse[i] == (double)lse[i] ? 0 : fabs(p->lse[i] - (double)lse[i]);
		if (!(e <= worst_lse))
			worst_lse = e;
	}
	*ret_out = worst;
	*ret_lse = worst_lse;
}

int mla_problem_run(struct mla_problem *p, const struct kv_attn_backend *backend, int poison,
		    void *stream, char **ret_out, float **ret_lse)
{
	struct kv_attention_args a = p->args;
	void *workspace = NULL;
	int r;

	a.workspace_bytes = backend->workspace_bytes ? backend->workspace_bytes(&a) : 0;
	if (a.workspace_bytes) {
		a.workspace = workspace = buffer_new(a.workspace_bytes);
		buffer_fill(workspace, 0, a.workspace_bytes);
	}
	a.stream = stream;
	buffer_fill(a.out, poison, p->out_bytes);
	buffer_fill(a.lse, poison, p->lse_bytes);
	r = kv_attention_on(backend, &a);
	*ret_out = malloc(p->out_bytes + 1);
	*ret_lse = malloc(p->lse_bytes + 1);
	buffer_get(*ret_out, a.out, p->out_bytes);
	buffer_get(*ret_lse, a.lse, p->lse_bytes);
	if (workspace)
		buffer_free(workspace);
	return r;
}

/* Rows past the last query, and what lies between rows, are as they were. */
static void expect_untouched(const struct mla_problem *p, const char *out, const float *lse, int poison)
{
	const struct mla_spec *s = &p->spec;
	size_t element = s->out_f32 ? sizeof(float) : kv_dtype_bytes(s->dtype);
	size_t row = (size_t)(s->heads * s->latent) * element;
	size_t stride = (size_t)p->args.out_token_stride * element;
	int64_t real = p->n_tokens - s->pad_tokens;

	for (int64_t t = 0; t < p->n_tokens; t++)
		for (size_t i = t < real ? row : 0; i < stride; i++)
			ck_assert_msg((unsigned char)out[(size_t)t * stride + i] == poison,
				      "out: byte %zu of row %lld was written", i, (long long)t);
	for (int64_t i = real * s->heads * 4; i < p->n_tokens * s->heads * 4; i++)
		ck_assert_msg(((const unsigned char *)lse)[i] == poison,
			      "lse: of row %lld was written", (long long)(i / 4 / s->heads));
}

int mla_problem_check(struct mla_problem *p, const struct kv_attn_backend *backend)
{
	char *out, *again;
	float *lse, *lse_again;
	double error, lse_error;
	int r = mla_problem_run(p, backend, 0xff, NULL, &out, &lse);

	if (r == 0) {
		ck_assert_int_eq(mla_problem_run(p, backend, 0x7e, NULL, &again, &lse_again), 0);
		expect_untouched(p, out, lse, 0xff);
		expect_untouched(p, again, lse_again, 0x7e);
		mla_problem_errors(p, again, lse_again, &error, &lse_error);
		ck_assert_msg(error <= mla_problem_tolerance(&p->spec) && lse_error <= 2e-3,
			      "%s: error %.2e of out (%.1e allowed), %.2e of lse", backend->name, error,
			      mla_problem_tolerance(&p->spec), lse_error);
		mla_problem_errors(p, out, lse, &error, &lse_error);
		ck_assert_msg(error <= mla_problem_tolerance(&p->spec), "%s: %.2e", backend->name, error);
		for (int64_t t = 0; t < p->n_tokens - p->spec.pad_tokens; t++) {
			size_t element = p->spec.out_f32 ? 4 : kv_dtype_bytes(p->spec.dtype);
			size_t at = (size_t)(t * p->args.out_token_stride) * element;

			ck_assert_msg(!memcmp(out + at, again + at,
					      (size_t)(p->spec.heads * p->spec.latent) * element),
				      "%s: row %lld has other bits in a second run", backend->name,
				      (long long)t);
		}
		free(again);
		free(lse_again);
	} else {
		ck_assert_msg(r == -ENOTSUP, "%s: %s", backend->name, kv_error_text());
	}
	free(out);
	free(lse);
	return r;
}
