/* SPDX-License-Identifier: Apache-2.0 */
#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/error.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/number.h"
#include "tests/kernels/state_problem.h"

struct state_spec state_spec_default(int kind)
{
	struct state_spec s = {.kind = kind,
			       .seed = 1,
			       .heads_k = kind == PROBLEM_CONV ? 256 : 2,
			       .group = 2,
			       .dim_k = 128,
			       .dim_v = kind == PROBLEM_SSD ? 64 : 128,
			       .dtype = KV_BF16,
			       .state_dtype = KV_F32,
			       .conv_width = kind == PROBLEM_SSD ? 0 : 4,
			       .conv_dtype = KV_BF16,
			       .activation = KV_ACTIVATION_SILU,
			       .normalize = true,
			       .n_rows = 8,
			       .null_row = -1};

	return s;
}

int state_spec_add(struct state_spec *spec, int q_len, int computed, int read, int write)
{
	int b = spec->n_lanes++;

	spec->q_lens[b] = q_len;
	spec->computed[b] = computed;
	spec->read[b] = read;
	spec->write[b] = write;
	spec->accepted[b] = 1;
	for (int i = 0; i < COLUMNS; i++)
		spec->table[b][i] = spec->steps[b][i] = -1;
	return b;
}

int64_t state_elements(const struct state_spec *s)
{
	return (int64_t)s->dim_k * s->dim_v;
}

int64_t conv_elements(const struct state_problem *p)
{
	return p->spec.conv_width ? (int64_t)(p->spec.conv_width - 1) * p->channels : 0;
}

static void *put(struct state_problem *p, const void *from, size_t bytes)
{
	void *to = buffer_new(bytes);

	buffer_put(to, from, bytes);
	p->arrays[p->n_arrays++] = to;
	return to;
}

static void put_rows(struct state_problem *p, int row, const char *state, const char *conv)
{
	if (state)
		buffer_put((char *)p->rows + row * p->row_bytes, state, (size_t)p->row_bytes);
	if (conv)
		buffer_put((char *)p->conv_rows + row * p->conv_row_bytes, conv,
			   (size_t)p->conv_row_bytes);
}

/* Elements lie where the strides say; what is between them stays as it is. */
int64_t conv_at(const struct state_problem *p, int64_t tap, int64_t c)
{
	return p->spec.channel_major ? c * (p->spec.conv_width - 1) + tap : tap * p->channels + c;
}

static void fill_row(struct state_problem *p, int row, uint64_t seed, const double *value)
{
	const struct state_spec *s = &p->spec;
	char *state = malloc((size_t)p->row_bytes + 1),
	     *conv = malloc((size_t)p->conv_row_bytes + 1);
	int64_t n = p->heads * state_elements(s);

	memset(state, 0xff, (size_t)p->row_bytes);
	memset(conv, 0xff, (size_t)p->conv_row_bytes);
	for (int64_t i = 0; i < n && s->kind != PROBLEM_CONV; i++)
		number_set(state, i, s->state_dtype,
			   number_encode(s->state_dtype,
					 value ? *value
					       : number_random(seed, 1, (uint64_t)i, 0) * 0.5));
	for (int64_t i = 0; i < conv_elements(p); i++)
		number_set(conv, i, s->conv_dtype,
			   number_encode(s->conv_dtype,
					 value ? *value : number_random(seed, 2, (uint64_t)i, 0)));
	put_rows(p, row, s->kind == PROBLEM_CONV ? NULL : state, s->conv_width ? conv : NULL);
	free(state);
	free(conv);
}

void state_problem_fill(struct state_problem *p, int row, uint64_t seed)
{
	fill_row(p, row, seed, NULL);
}

void state_problem_set(struct state_problem *p, int row, double value)
{
	fill_row(p, row, 0, &value);
}

int64_t state_problem_row_bytes(const struct state_problem *p)
{
	return (p->spec.kind == PROBLEM_CONV ? 0 : p->row_bytes) + p->conv_row_bytes;
}

void *state_problem_row(struct state_problem *p, int row)
{
	char *to = malloc((size_t)state_problem_row_bytes(p));
	int64_t state = p->spec.kind == PROBLEM_CONV ? 0 : p->row_bytes;

	if (state)
		buffer_get(to, (char *)p->rows + row * p->row_bytes, (size_t)state);
	if (p->conv_row_bytes)
		buffer_get(to + state, (char *)p->conv_rows + row * p->conv_row_bytes,
			   (size_t)p->conv_row_bytes);
	return to;
}

static void fill_array(char *to, int64_t n, int dtype, uint64_t seed, uint64_t kind, double scale)
{
	for (int64_t i = 0; i < n; i++)
		number_set(to, i, dtype,
			   number_encode(dtype, number_random(seed, kind, (uint64_t)i, 7) * scale));
}

void state_problem_inputs(struct state_problem *p, int seed)
{
	const struct state_spec *s = &p->spec;
	int64_t t = p->n_tokens + s->spare_tokens, start = 0;
	size_t element = kv_dtype_bytes(s->dtype);

	fill_array(p->x, t * p->in_stride, s->dtype, (uint64_t)seed, 1, 1);
	fill_array(p->a, t * (p->heads + s->gap), s->dtype, (uint64_t)seed, 2, 2);
	fill_array(p->b, t * (p->heads + s->gap), s->dtype, (uint64_t)seed, 3, 3);
	for (int b = 0; b < s->n_lanes; b++) {
		bool pad = s->read[b] < 0 || s->read[b] == s->null_row;

		if (pad && s->nan_inputs)
			for (int64_t i = 0; i < s->q_lens[b]; i++) {
				memset(p->x + (start + i) * p->in_stride * (int64_t)element, 0xff,
				       (size_t)p->in_stride * element);
				memset(p->a + (start + i) * (p->heads + s->gap) * (int64_t)element,
				       0xff, (size_t)p->heads * element);
				memset(p->b + (start + i) * (p->heads + s->gap) * (int64_t)element,
				       0xff, (size_t)p->heads * element);
			}
		start += s->q_lens[b];
	}
	if (!p->arrays[0])
		return;
	buffer_put(p->arrays[0], p->x, (size_t)(t * p->in_stride) * element);
	buffer_put(p->arrays[1], p->a, (size_t)(t * (p->heads + s->gap)) * element);
	buffer_put(p->arrays[2], p->b, (size_t)(t * (p->heads + s->gap)) * element);
}

static struct kv_state_batch *batch_of(struct state_problem *p)
{
	return p->spec.kind == PROBLEM_DELTA ? &p->gdn.batch
	       : p->spec.kind == PROBLEM_SSD ? &p->ssd.batch
					     : &p->conv.batch;
}

void state_problem_batch(struct state_problem *p)
{
	const struct state_spec *s = &p->spec;
	struct kv_state_batch *t = batch_of(p);
	size_t bytes = sizeof(int32_t) * (size_t)s->n_lanes;
	int32_t loc[LANES + 1] = {0};
	int32_t *wide = malloc(bytes * COLUMNS + 4);

	for (int b = 0; b < s->n_lanes; b++)
		loc[b + 1] = loc[b] + s->q_lens[b];
	buffer_put((void *)(uintptr_t)t->query_start_loc, loc, bytes + sizeof(int32_t));
	buffer_put((void *)(uintptr_t)t->read_rows, s->read, bytes);
	if (t->write_rows)
		buffer_put((void *)(uintptr_t)t->write_rows, s->write, bytes);
	if (t->n_computed)
		buffer_put((void *)(uintptr_t)t->n_computed, s->computed, bytes);
	if (t->table)
		buffer_put((void *)(uintptr_t)t->table, s->table, bytes * COLUMNS);
	if (t->n_accepted)
		buffer_put((void *)(uintptr_t)t->n_accepted, s->accepted, bytes);
	for (int b = 0; b < s->n_lanes; b++)
		for (int i = 0; i < s->step_width; i++)
			wide[b * s->step_width + i] = s->steps[b][i];
	if (t->step_rows)
		buffer_put((void *)(uintptr_t)t->step_rows, wide, bytes * (size_t)s->step_width);
	free(wide);
}

static void make_batch(struct state_problem *p)
{
	const struct state_spec *s = &p->spec;
	struct kv_state_batch *t = batch_of(p);
	size_t bytes = sizeof(int32_t) * (size_t)s->n_lanes;
	int32_t zero[(LANES + 1) * COLUMNS] = {0};

	t->n_seqs = s->n_lanes;
	t->n_tokens = p->n_tokens + s->spare_tokens;
	t->null_row = s->null_row;
	for (int b = 0; b < s->n_lanes; b++)
		if (s->q_lens[b] > t->max_query_len)
			t->max_query_len = s->q_lens[b];
	t->query_start_loc = put(p, zero, bytes + sizeof(int32_t));
	t->read_rows = put(p, zero, bytes);
	if (!s->no_write)
		t->write_rows = put(p, zero, bytes);
	if (!s->no_computed)
		t->n_computed = put(p, zero, bytes);
	if (s->interval) {
		t->table = put(p, zero, bytes * COLUMNS);
		t->table_width = COLUMNS;
		t->interval = s->interval;
	}
	if (s->step_width) {
		t->step_rows = put(p, zero, bytes * (size_t)s->step_width);
		t->step_width = s->step_width;
		if (s->accepts)
			t->n_accepted = put(p, zero, bytes);
	}
	state_problem_batch(p);
}

static struct kv_conv_rows conv_view(const struct state_problem *p)
{
	int64_t element = (int64_t)kv_dtype_bytes(p->spec.conv_dtype);

	return (struct kv_conv_rows){
		.base = p->conv_rows,
		.row_stride = p->conv_row_bytes,
		.tap_stride = p->spec.channel_major ? element : p->channels * element,
		.channel_stride =
			p->spec.channel_major ? (p->spec.conv_width - 1) * element : element,
		.dtype = p->spec.conv_dtype};
}

static void make_args(struct state_problem *p)
{
	const struct state_spec *s = &p->spec;
	int64_t element = (int64_t)kv_dtype_bytes(s->dtype);
	int64_t qk = (int64_t)s->heads_k * s->dim_k, wide = (int64_t)p->heads * s->dim_v;
	int64_t per_head = p->heads + s->gap;
	const char *x = p->arrays[0];
	struct kv_view state = {.base = p->rows,
				.block_stride = p->row_bytes,
				.head_stride =
					state_elements(s) * (int64_t)kv_dtype_bytes(s->state_dtype),
				.block_tokens = 1,
				.n_heads = p->heads,
				.head_dim = s->dim_k * s->dim_v,
				.dtype = s->state_dtype,
				.scale = 1};
	float *a_log = put(p, p->a_log, sizeof(float) * (size_t)p->heads);
	float *dt_bias = put(p, p->dt_bias, sizeof(float) * (size_t)p->heads);
	float *d = put(p, p->d, sizeof(float) * (size_t)p->heads);
	void *weight = put(p, p->weight, (size_t)(p->channels * KV_MAX_CONV_WIDTH * element));
	void *bias = put(p, p->bias, (size_t)(p->channels * element));

	p->gdn = (struct kv_gdn_args){.size = sizeof(p->gdn),
				      .device = buffer_device,
				      .dtype = s->dtype,
				      .n_heads_k = s->heads_k,
				      .n_heads_v = p->heads,
				      .dim_k = s->dim_k,
				      .dim_v = s->dim_v,
				      .q = x,
				      .k = x + qk * element,
				      .v = x + 2 * qk * element,
				      .a = p->arrays[1],
				      .b = p->arrays[2],
				      .q_stride = p->in_stride,
				      .k_stride = p->in_stride,
				      .v_stride = p->in_stride,
				      .a_stride = per_head,
				      .b_stride = per_head,
				      .a_log = a_log,
				      .dt_bias = dt_bias,
				      .normalize = s->normalize,
				      .out = p->out,
				      .out_stride = p->out_stride,
				      .state = state};
	if (s->conv_width) {
		p->gdn.conv_weight = weight;
		p->gdn.conv_bias = bias;
		p->gdn.conv_width = s->conv_width;
		p->gdn.conv_activation = s->activation;
		p->gdn.conv = conv_view(p);
	}
	p->ssd = (struct kv_ssd_args){.size = sizeof(p->ssd),
				      .device = buffer_device,
				      .dtype = s->dtype,
				      .n_groups = s->heads_k,
				      .n_heads = p->heads,
				      .head_dim = s->dim_v,
				      .state_dim = s->dim_k,
				      .x = x,
				      .b = x + wide * element,
				      .c = x + (wide + qk) * element,
				      .dt = p->arrays[1],
				      .x_stride = p->in_stride,
				      .b_stride = p->in_stride,
				      .c_stride = p->in_stride,
				      .dt_stride = per_head,
				      .a_log = a_log,
				      .dt_bias = dt_bias,
				      .d = d,
				      .dt_min = 0.01f,
				      .dt_max = 1.5f,
				      .out = p->out,
				      .out_stride = p->out_stride,
				      .state = state};
	p->conv = (struct kv_conv1d_args){.size = sizeof(p->conv),
					  .device = buffer_device,
					  .dtype = s->dtype,
					  .n_channels = p->channels,
					  .width = s->conv_width,
					  .activation = s->activation,
					  .x = x,
					  .x_stride = p->in_stride,
					  .weight = weight,
					  .bias = bias,
					  .out = p->out,
					  .out_stride = p->out_stride,
					  .state = conv_view(p)};
}

struct state_problem *state_problem_new(const struct state_spec *spec)
{
	struct state_problem *p = calloc(1, sizeof(*p));
	size_t element = kv_dtype_bytes(spec->dtype);
	int64_t tokens;

	p->spec = *spec;
	p->heads = spec->kind == PROBLEM_CONV ? 0 : spec->heads_k * spec->group;
	p->channels = spec->kind == PROBLEM_CONV
			      ? spec->heads_k
			      : 2 * spec->heads_k * spec->dim_k + p->heads * spec->dim_v;
	for (int b = 0; b < spec->n_lanes; b++)
		p->n_tokens += spec->q_lens[b];
	tokens = p->n_tokens + spec->spare_tokens;
	p->in_stride = p->channels + spec->gap;
	p->out_width = spec->kind == PROBLEM_CONV ? p->channels : (int64_t)p->heads * spec->dim_v;
	p->out_stride = p->out_width + spec->gap;
	p->row_bytes =
		(p->heads * state_elements(spec) * (int64_t)kv_dtype_bytes(spec->state_dtype)) +
		16 * spec->gap;
	p->conv_row_bytes = conv_elements(p) * (int64_t)kv_dtype_bytes(spec->conv_dtype) +
			    (spec->conv_width ? 16 * spec->gap : 0);
	p->rows = buffer_new((size_t)(p->row_bytes * spec->n_rows));
	p->conv_rows = buffer_new((size_t)(p->conv_row_bytes * spec->n_rows));
	buffer_fill(p->rows, 0xff, (size_t)(p->row_bytes * spec->n_rows));
	buffer_fill(p->conv_rows, 0xff, (size_t)(p->conv_row_bytes * spec->n_rows));
	p->out = buffer_new((size_t)(tokens * p->out_stride) * element);

	p->x = malloc((size_t)(tokens * p->in_stride) * element);
	p->a = malloc((size_t)(tokens * (p->heads + spec->gap) + 1) * element);
	p->b = malloc((size_t)(tokens * (p->heads + spec->gap) + 1) * element);
	p->weight = malloc((size_t)p->channels * KV_MAX_CONV_WIDTH * element);
	p->bias = malloc((size_t)p->channels * element);
	p->a_log = calloc((size_t)p->heads + 1, sizeof(float));
	p->dt_bias = calloc((size_t)p->heads + 1, sizeof(float));
	p->d = calloc((size_t)p->heads + 1, sizeof(float));
	state_problem_inputs(p, spec->seed);
	fill_array(p->weight, (int64_t)p->channels * KV_MAX_CONV_WIDTH, spec->dtype,
		   (uint64_t)spec->seed, 4, 1);
	fill_array(p->bias, p->channels, spec->dtype, (uint64_t)spec->seed, 5, 0.3);
	for (int h = 0; h < p->heads; h++) { /* decays from slow to quick */
		p->a_log[h] = (float)(number_random(3, (uint64_t)h, 1, 1) * 2 - 1);
		p->dt_bias[h] = (float)(number_random(3, (uint64_t)h, 1, 2) - 1);
		p->d[h] = (float)number_random(3, (uint64_t)h, 1, 3);
	}
	put(p, p->x, (size_t)(tokens * p->in_stride) * element);
	put(p, p->a, (size_t)(tokens * (p->heads + spec->gap)) * element);
	put(p, p->b, (size_t)(tokens * (p->heads + spec->gap)) * element);
	make_args(p);
	make_batch(p);
	for (int b = 0; b < spec->n_lanes; b++) {
		int row = spec->accepts ? spec->steps[b][spec->accepted[b] - 1] : spec->read[b];

		if (row >= 0 && row != spec->null_row && spec->computed[b])
			state_problem_fill(p, row, (uint64_t)row + 100);
	}
	return p;
}

struct state_problem *state_problem_free(struct state_problem *p)
{
	for (int i = 0; i < p->n_arrays; i++)
		buffer_free(p->arrays[i]);
	buffer_free(p->rows);
	buffer_free(p->conv_rows);
	buffer_free(p->out);
	if (p->workspace)
		buffer_free(p->workspace);
	free(p->x);
	free(p->a);
	free(p->b);
	free(p->weight);
	free(p->bias);
	free(p->a_log);
	free(p->dt_bias);
	free(p->d);
	free(p);
	return NULL;
}

static int resolve(struct state_problem *p, struct kv_recur *ret)
{
	return p->spec.kind == PROBLEM_DELTA ? kv_gdn_resolve(&p->gdn, true, ret)
					     : kv_ssd_resolve(&p->ssd, true, ret);
}

bool state_problem_can_run(struct state_problem *p, const struct kv_state_backend *backend)
{
	struct kv_conv1d_args conv;
	struct kv_recur recur;
	size_t bytes = 0;
	int r;

	if (p->spec.kind == PROBLEM_CONV) {
		ck_assert_int_eq(kv_conv1d_resolve(&p->conv, &conv), 0);
		r = 0;
	} else {
		r = resolve(p, &recur);
		ck_assert_msg(r == 0, "%s", kv_error_text());
		r = kv_recur_workspace(backend, &recur, &bytes);
	}
	if (r == -ENOTSUP)
		return false;
	ck_assert_int_eq(r, 0);
	if (p->workspace)
		p->workspace = buffer_free(p->workspace);
	if (bytes) {
		p->workspace = buffer_new(bytes);
		buffer_fill(p->workspace, 0xff, bytes);
	}
	p->gdn.workspace_bytes = p->ssd.workspace_bytes = bytes;
	p->gdn.workspace = p->ssd.workspace = p->workspace;
	return true;
}

int state_problem_call(struct state_problem *p, const struct kv_state_backend *backend,
		       void *stream)
{
	p->gdn.stream = p->ssd.stream = p->conv.stream = stream;
	return p->spec.kind == PROBLEM_DELTA ? kv_gdn_on(backend, &p->gdn)
	       : p->spec.kind == PROBLEM_SSD ? kv_ssd_on(backend, &p->ssd)
					     : kv_conv1d_on(backend, &p->conv);
}

void *state_problem_run(struct state_problem *p, const struct kv_state_backend *backend)
{
	size_t bytes = (size_t)((p->n_tokens + p->spec.spare_tokens) * p->out_stride) *
		       kv_dtype_bytes(p->spec.dtype);
	void *out = malloc(bytes + 1);
	int r;

	buffer_fill(p->out, OUT_POISON, bytes);
	r = state_problem_call(p, backend, NULL);
	ck_assert_msg(r == 0, "%s: %d %s", backend->name, r, kv_error_text());
	buffer_get(out, p->out, bytes);
	return out;
}

const struct kv_state_backend *const *state_problem_backends(void)
{
	static const struct kv_state_backend *list[8];
	int n = 0;

	for (int i = 0; kv_state_backends[i]; i++)
		if (kv_state_backends[i]->device == buffer_device)
			list[n++] = kv_state_backends[i];
	list[n] = NULL;
	return list;
}

static void expect_same_bytes(const char *what, const void *a, const void *b, size_t bytes)
{
	char *first = malloc(bytes + 1), *second = malloc(bytes + 1);

	buffer_get(first, a, bytes);
	buffer_get(second, b, bytes);
	ck_assert_msg(!memcmp(first, second, bytes), "%s: other bits in a second run", what);
	free(first);
	free(second);
}

void state_spec_check(const struct state_spec *spec)
{
	for (int i = 0; state_problem_backends()[i]; i++) {
		const struct kv_state_backend *backend = state_problem_backends()[i];
		struct state_problem *p = state_problem_new(spec), *again = state_problem_new(spec);
		size_t bytes = (size_t)((p->n_tokens + spec->spare_tokens) * p->out_stride) *
			       kv_dtype_bytes(spec->dtype);

		if (state_problem_can_run(p, backend) && state_problem_can_run(again, backend)) {
			free(state_problem_check(p, backend));
			free(state_problem_run(again, backend));
			expect_same_bytes(backend->name, p->out, again->out, bytes);
			expect_same_bytes(backend->name, p->rows, again->rows,
					  (size_t)(p->row_bytes * spec->n_rows));
			expect_same_bytes(backend->name, p->conv_rows, again->conv_rows,
					  (size_t)(p->conv_row_bytes * spec->n_rows));
		}
		state_problem_free(p);
		state_problem_free(again);
	}
}

void state_spec_check_drafts(const struct state_spec *spec, int n_rounds)
{
	for (int i = 0; state_problem_backends()[i]; i++) {
		const struct kv_state_backend *backend = state_problem_backends()[i];
		struct state_problem *p = state_problem_new(spec);

		for (int round = 0; round < n_rounds && state_problem_can_run(p, backend);
		     round++) {
			free(state_problem_check(p, backend));
			for (int b = 0; b < spec->n_lanes; b++)
				p->spec.accepted[b] = 1 + (round + b) % spec->q_lens[b];
			state_problem_inputs(p, 20 + round);
			state_problem_batch(p);
		}
		state_problem_free(p);
	}
}
