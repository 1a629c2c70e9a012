/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arguments of the calls on state rows, field by field: all that are wrong are told, not the first
 * alone. Lengths, counts and rows are looked at on the host only, and when all else is right; on a
 * GPU kernels take what is out of range as padding.
 */
#include <errno.h>
#include <stdlib.h>

#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "kernels/gdn.h"

#define MAX_HEADS    4096
#define MAX_CHANNELS (1 << 20)
#define NO_INTERVAL  (1 << 30)

#define wrong(w, ...) kv_state_because(w, 0, __VA_ARGS__)

/* Return: 0, or -EINVAL with all that is wrong. */
static int told(const struct kv_state_reasons *w)
{
	return w->len ? kv_error(-EINVAL, "%s", w->text) : 0;
}

static void check_range(struct kv_state_reasons *w, const char *name, int64_t given, int64_t min,
			int64_t max)
{
	if (given < min || given > max)
		wrong(w, "%s: %lld given, %lld..%lld allowed", name, (long long)given,
		      (long long)min, (long long)max);
}

static void check_pointer(struct kv_state_reasons *w, const char *name, const void *p, size_t align)
{
	if (!p)
		wrong(w, "%s: NULL", name);
	else if (align && (uintptr_t)p % align)
		wrong(w, "%s: %p is not a multiple of %zu", name, p, align);
}

static void check_head(struct kv_state_reasons *w, int32_t device, int32_t dtype)
{
	if (device != KV_DEVICE_HOST && device != KV_DEVICE_CUDA)
		wrong(w, "device: %d given, %d (host) or %d (CUDA) allowed", device, KV_DEVICE_HOST,
		      KV_DEVICE_CUDA);
	if (dtype != KV_F32 && dtype != KV_F16 && dtype != KV_BF16)
		wrong(w, "dtype: %d given, %d (f32), %d (f16) or %d (bf16) allowed", dtype, KV_F32,
		      KV_F16, KV_BF16);
}

static int check_size(const char *name, size_t given, size_t wanted)
{
	return given == wanted ? 0
			       : kv_error(-EINVAL, "%s.size: %zu given, %zu expected", name, given,
					  wanted);
}

static int64_t resolve_stride(struct kv_state_reasons *w, const char *name, int64_t given,
			      int64_t dense)
{
	if (given && (given < dense || given > INT32_MAX))
		wrong(w, "%s: %lld elements given, 0 (dense) or %lld..%d allowed", name,
		      (long long)given, (long long)dense, INT32_MAX);
	return given ? given : dense;
}

/* Everything but what the arrays hold. */
static void check_batch(struct kv_state_reasons *w, struct kv_state_batch *t, bool sizes_only)
{
	check_range(w, "n_seqs", t->n_seqs, 0, INT32_MAX - 1);
	check_range(w, "n_tokens", t->n_tokens, 0, INT32_MAX);
	check_range(w, "max_query_len", t->max_query_len, 0, INT32_MAX);
	check_range(w, "null_row", t->null_row, -1, INT32_MAX);
	check_range(w, "table_width", t->table_width, 0, INT32_MAX);
	check_range(w, "step_width", t->step_width, 0, 1024);
	check_range(w, "interval", t->interval, t->table ? 1 : 0, NO_INTERVAL);
	if (!t->query_start_loc && !sizes_only && t->n_tokens != t->n_seqs)
		wrong(w,
		      "query_start_loc: NULL means a token a lane, but n_tokens is %d and n_seqs "
		      "%d",
		      t->n_tokens, t->n_seqs);
	if (!t->query_start_loc && t->max_query_len > 1)
		wrong(w, "max_query_len: %d given, query_start_loc is NULL", t->max_query_len);
	if (t->table && !t->n_computed)
		wrong(w, "n_computed: NULL; a table is entered by it");
	if (!t->step_rows != !t->step_width)
		wrong(w, "step_width: %d given, step_rows is %s", t->step_width,
		      t->step_rows ? "given" : "NULL");
	if (t->n_accepted && !t->step_rows)
		wrong(w, "n_accepted: given, step_rows is NULL");
	if (!t->table)
		t->interval = NO_INTERVAL;
	if (sizes_only || !t->n_seqs)
		return;
	if (!t->read_rows && !t->table && !t->n_accepted)
		wrong(w, "read_rows: NULL, and there is no table and no n_accepted");
	else if (!t->write_rows && !t->table && !t->step_rows)
		check_pointer(w, "read_rows", t->read_rows, sizeof(int32_t));
	if (t->query_start_loc)
		check_pointer(w, "query_start_loc", t->query_start_loc, sizeof(int32_t));
}

struct use {
	int32_t row;
	int32_t lane;
	bool writes;
};

static int compare_uses(const void *a, const void *b)
{
	const struct use *x = a, *y = b;

	if (x->row != y->row)
		return (x->row > y->row) - (x->row < y->row);
	return (int)y->writes - (int)x->writes; /* writers first */
}

static void add_use(const struct kv_state_batch *t, struct use *uses, size_t *n, int32_t row,
		    int32_t lane, bool writes)
{
	if (!kv_row_is_null(t, row))
		uses[(*n)++] = (struct use){row, lane, writes};
}

/* Columns and counts that a kernel would take as padding. */
static int check_lane(const struct kv_state_batch *t, int32_t b)
{
	int64_t computed = t->n_computed ? t->n_computed[b] : 0, end;
	struct kv_lane lane;

	if (computed < 0 || computed > NO_INTERVAL)
		return kv_error(-EINVAL, "n_computed[%d]: %lld given, 0..%d allowed", b,
				(long long)computed, NO_INTERVAL);
	lane = kv_lane_get(t, b);
	end = computed + lane.len;
	if (!lane.len)
		return 0;
	if (!lane.fresh && t->n_accepted &&
	    (t->n_accepted[b] < 1 || t->n_accepted[b] > t->step_width))
		return kv_error(-EINVAL, "n_accepted[%d]: %d given, 1..step_width (%d) allowed", b,
				t->n_accepted[b], t->step_width);
	if (!lane.fresh && !t->n_accepted && !t->read_rows &&
	    (computed - 1) / t->interval >= t->table_width)
		return kv_error(-EINVAL,
				"n_computed[%d]: the state after %lld tokens is in column %lld of "
				"intervals of %d, the table has %d",
				b, (long long)computed, (long long)((computed - 1) / t->interval),
				t->interval, t->table_width);
	if (t->table && !lane.pad && (end - 1) / t->interval >= t->table_width)
		return kv_error(-EINVAL,
				"table_width: the state after %lld tokens of lane %d is in column "
				"%lld of intervals of %d, the table has %d",
				(long long)end, b, (long long)((end - 1) / t->interval),
				t->interval, t->table_width);
	return 0;
}

/* No row that a lane writes is another's, and no lane is wrong in itself. */
static int check_rows(const struct kv_state_batch *t)
{
	const int32_t *loc = t->query_start_loc;
	size_t most = (size_t)t->n_seqs * (2 + (size_t)t->step_width), n = 0;
	kv_cleanup(kv_freep) struct use *uses = NULL;
	int r;

	for (int32_t b = 0; b < t->n_seqs; b++) {
		if (loc && (loc[b] < 0 || loc[b + 1] < loc[b] || loc[b + 1] > t->n_tokens ||
			    loc[b + 1] - loc[b] > t->max_query_len))
			return kv_error(-EINVAL,
					"query_start_loc[%d]: %d after %d given; 0..max_query_len "
					"(%d) tokens a lane and n_tokens (%d) in all allowed",
					b + 1, loc[b + 1], loc[b], t->max_query_len, t->n_tokens);
		r = check_lane(t, b);
		if (r < 0)
			return r;
		if (t->table)
			most += (size_t)((loc ? loc[b + 1] - loc[b] : 1) / t->interval) + 1;
	}
	uses = malloc((most + 1) * sizeof(*uses));
	if (!uses)
		return kv_error(-ENOMEM, "rows: no memory to check %zu", most);
	for (int32_t b = 0; b < t->n_seqs; b++) {
		struct kv_lane lane = kv_lane_get(t, b);

		if (!lane.len || lane.pad)
			continue;
		if (!lane.fresh)
			add_use(t, uses, &n, lane.read, b, false);
		add_use(t, uses, &n, lane.write, b, true);
		for (int32_t i = 0; i < t->step_width && i < lane.len; i++)
			add_use(t, uses, &n, kv_step_row(t, b, i), b, true);
		for (int64_t c = lane.computed / t->interval + 1;
		     t->table && c * t->interval <= lane.computed + lane.len; c++)
			add_use(t, uses, &n, kv_checkpoint_row(t, b, c * t->interval), b, true);
	}
	qsort(uses, n, sizeof(*uses), compare_uses);
	for (size_t i = 1, first = 0; i < n; i++) {
		if (uses[i].row != uses[first].row)
			first = i;
		if (uses[first].writes && uses[i].lane != uses[first].lane)
			return kv_error(-EINVAL,
					"rows: lane %d writes row %d, which lane %d %s too",
					uses[first].lane, uses[i].row, uses[i].lane,
					uses[i].writes ? "writes" : "reads");
	}
	return 0;
}

static void check_conv_rows(struct kv_state_reasons *w, const struct kv_conv_rows *rows,
			    bool sizes_only, int64_t channels, int64_t taps)
{
	int64_t element = (int64_t)kv_dtype_bytes(rows->dtype);

	if (rows->dtype != KV_F32 && rows->dtype != KV_F16 && rows->dtype != KV_BF16) {
		wrong(w, "conv state.dtype: %d given, %d (f32), %d (f16) or %d (bf16) allowed",
		      rows->dtype, KV_F32, KV_F16, KV_BF16);
		return;
	}
	if (rows->channel_stride < element || rows->channel_stride % element ||
	    rows->tap_stride < element || rows->tap_stride % element)
		wrong(w,
		      "conv state.tap_stride, channel_stride: %lld, %lld given, multiples of the "
		      "element, %lld bytes, expected",
		      (long long)rows->tap_stride, (long long)rows->channel_stride,
		      (long long)element);
	if (rows->tap_stride > INT32_MAX || rows->channel_stride > INT32_MAX ||
	    rows->row_stride % element ||
	    rows->row_stride <
		    (taps - 1) * rows->tap_stride + (channels - 1) * rows->channel_stride + element)
		wrong(w,
		      "conv state.row_stride: %lld bytes given, too few for %lld taps of %lld "
		      "channels at strides %lld, %lld",
		      (long long)rows->row_stride, (long long)taps, (long long)channels,
		      (long long)rows->tap_stride, (long long)rows->channel_stride);
	if (!sizes_only)
		check_pointer(w, "conv state.base", rows->base, (size_t)element);
}

static void check_conv(struct kv_state_reasons *w, int32_t width, int32_t activation)
{
	check_range(w, "width", width, 2, KV_MAX_CONV_WIDTH);
	check_range(w, "activation", activation, KV_ACTIVATION_NONE, KV_ACTIVATION_SILU);
}

int kv_conv1d_resolve(const struct kv_conv1d_args *args, struct kv_conv1d_args *ret)
{
	struct kv_conv1d_args a = *args;
	size_t element = kv_dtype_bytes(a.dtype);
	struct kv_state_reasons w = {0};
	int r = check_size("kv_conv1d_args", a.size, sizeof(a));
	bool works = a.batch.n_seqs && a.batch.n_tokens;

	if (r < 0)
		return r;
	check_head(&w, a.device, a.dtype);
	check_batch(&w, &a.batch, false);
	check_range(&w, "n_channels", a.n_channels, 1, MAX_CHANNELS);
	check_conv(&w, a.width, a.activation);
	a.x_stride = resolve_stride(&w, "x_stride", a.x_stride, a.n_channels);
	a.out_stride = resolve_stride(&w, "out_stride", a.out_stride, a.n_channels);
	if (works) {
		check_conv_rows(&w, &a.state, false, a.n_channels, a.width - 1);
		check_pointer(&w, "x", a.x, element);
		check_pointer(&w, "weight", a.weight, element);
		check_pointer(&w, "out", a.out, element);
		if (a.out && a.out == a.x)
			wrong(&w, "out: the same memory as x");
	}
	r = told(&w);
	if (!r && works && a.device == KV_DEVICE_HOST)
		r = check_rows(&a.batch);
	if (r < 0)
		return r;
	*ret = a;
	return 0;
}

static void check_state(struct kv_state_reasons *w, const struct kv_recur *a, bool sizes_only)
{
	const struct kv_view *s = &a->state;
	int64_t element = (int64_t)kv_dtype_bytes(s->dtype);
	int64_t head = (int64_t)a->dim_k * a->dim_v * element;

	if (s->dtype != KV_F32 && s->dtype != KV_BF16) {
		wrong(w, "state.dtype: %d given, %d (f32) or %d (bf16) allowed", s->dtype, KV_F32,
		      KV_BF16);
		return;
	}
	if (s->n_heads != a->heads)
		wrong(w, "state.n_heads: %d given, %d expected", s->n_heads, a->heads);
	if (s->head_dim != a->dim_k * a->dim_v)
		wrong(w, "state.head_dim: %d given, %d * %d = %d expected", s->head_dim, a->dim_v,
		      a->dim_k, a->dim_k * a->dim_v);
	if (s->head_stride < (s->n_heads > 1 ? head : 0) || s->head_stride % element ||
	    s->head_stride > ((int64_t)1 << 40))
		wrong(w,
		      "state.head_stride: %lld bytes given, %lld or more in elements of %lld "
		      "needed",
		      (long long)s->head_stride, (long long)head, (long long)element);
	else if (s->block_stride < (s->n_heads - 1) * s->head_stride + head ||
		 s->block_stride % element)
		wrong(w,
		      "state.block_stride: %lld bytes given, %lld or more in elements of %lld "
		      "needed",
		      (long long)s->block_stride,
		      (long long)((s->n_heads - 1) * s->head_stride + head), (long long)element);
	if (!sizes_only)
		check_pointer(w, "state.base", s->base, (size_t)element);
}

/* What both have, then all that was wrong; the rows last. Return: 0; -EINVAL; -ENOMEM. */
static int check_recur(struct kv_state_reasons *w, struct kv_recur *a, bool sizes_only)
{
	size_t element = kv_dtype_bytes(a->dtype);
	const void *inputs[] = {a->q, a->k, a->v, a->a, a->out};
	const char *const names_delta[] = {"q", "k", "v", "a", "out"};
	const char *const names_ssd[] = {"c", "b", "x", "dt", "out"};
	const char *const *names = a->rule == KV_RULE_DELTA ? names_delta : names_ssd;
	const bool one = a->conv_weight; /* k and v lie in q's tensor */
	int r;

	check_batch(w, &a->batch, sizes_only);
	sizes_only = sizes_only || !a->batch.n_seqs || !a->batch.n_tokens;
	check_state(w, a, sizes_only);
	for (int i = 0; i < 5 && !sizes_only; i++) {
		if (one && (i == 1 || i == 2))
			continue;
		check_pointer(w, names[i], inputs[i], element);
		if (i < 4 && a->out && a->out == inputs[i])
			wrong(w, "out: the same memory as %s", names[i]);
	}
	if (!sizes_only) {
		check_pointer(w, "a_log", a->a_log, sizeof(float));
		if (a->workspace_bytes)
			check_pointer(w, "workspace", a->workspace, 256);
	}
	r = told(w);
	return !r && !sizes_only && a->device == KV_DEVICE_HOST ? check_rows(&a->batch) : r;
}

/* Heads and sizes that both have, under their own names. */
static void check_dims(struct kv_state_reasons *w, const char *const names[4],
		       const struct kv_recur *a)
{
	check_range(w, names[0], a->heads_k, 1, MAX_HEADS);
	check_range(w, names[1], a->heads, 1, MAX_HEADS);
	check_range(w, names[2], a->dim_k, 1, KV_MAX_STATE_DIM);
	check_range(w, names[3], a->dim_v, 1, KV_MAX_STATE_DIM);
	if (a->heads_k > 0 && a->heads % a->heads_k)
		wrong(w, "%s: %d given, a multiple of %s (%d) expected", names[1], a->heads,
		      names[0], a->heads_k);
}

int kv_gdn_resolve(const struct kv_gdn_args *args, bool sizes_only, struct kv_recur *ret)
{
	static const char *const names[] = {"n_heads_k", "n_heads_v", "dim_k", "dim_v"};
	struct kv_state_reasons w = {0};
	int64_t qk, values;
	struct kv_recur a;
	int r = check_size("kv_gdn_args", args->size, sizeof(*args));

	if (r < 0)
		return r;
	a = (struct kv_recur){.device = args->device,
			      .dtype = args->dtype,
			      .rule = KV_RULE_DELTA,
			      .heads_k = args->n_heads_k,
			      .heads = args->n_heads_v,
			      .dim_k = args->dim_k,
			      .dim_v = args->dim_v,
			      .normalize = args->normalize,
			      .batch = args->batch,
			      .q = args->q,
			      .k = args->k,
			      .v = args->v,
			      .a = args->a,
			      .b = args->b,
			      .a_log = args->a_log,
			      .dt_bias = args->dt_bias,
			      .scale = args->scale,
			      .out = args->out,
			      .state = args->state,
			      .conv_weight = args->conv_weight,
			      .conv_bias = args->conv_bias,
			      .conv_width = args->conv_width,
			      .activation = args->conv_activation,
			      .conv = args->conv,
			      .workspace_bytes = args->workspace_bytes,
			      .workspace = args->workspace,
			      .stream = args->stream};
	check_head(&w, a.device, a.dtype);
	check_dims(&w, names, &a);
	qk = (int64_t)a.heads_k * a.dim_k;
	values = (int64_t)a.heads * a.dim_v;
	check_range(&w, "normalize", a.normalize, 0, 1);
	a.q_stride = resolve_stride(&w, "q_stride", args->q_stride,
				    a.conv_weight ? 2 * qk + values : qk);
	a.k_stride = a.v_stride = a.q_stride; /* as with a convolution in front */
	if (!a.conv_weight) {
		a.k_stride = resolve_stride(&w, "k_stride", args->k_stride, qk);
		a.v_stride = resolve_stride(&w, "v_stride", args->v_stride, values);
	}
	a.a_stride = resolve_stride(&w, "a_stride", args->a_stride, a.heads);
	a.b_stride = resolve_stride(&w, "b_stride", args->b_stride, a.heads);
	a.out_stride = resolve_stride(&w, "out_stride", args->out_stride, values);
	if (!isfinite(a.scale))
		wrong(&w, "scale: %g given, a finite number expected", (double)a.scale);
	if (a.scale == 0)
		a.scale = 1 / sqrtf((float)a.dim_k);
	if (a.conv_weight) { /* one tensor */
		size_t element = kv_dtype_bytes(a.dtype);

		a.k = a.q ? (const char *)a.q + (size_t)qk * element : NULL;
		a.v = a.q ? (const char *)a.k + (size_t)qk * element : NULL;
		check_conv(&w, a.conv_width, a.activation);
		check_conv_rows(&w, &a.conv, sizes_only, 2 * qk + values, a.conv_width - 1);
	}
	if (!sizes_only && a.batch.n_seqs && a.batch.n_tokens)
		check_pointer(&w, "b", a.b, kv_dtype_bytes(a.dtype));
	r = check_recur(&w, &a, sizes_only);
	if (r < 0)
		return r;
	*ret = a;
	return 0;
}

int kv_ssd_resolve(const struct kv_ssd_args *args, bool sizes_only, struct kv_recur *ret)
{
	static const char *const names[] = {"n_groups", "n_heads", "state_dim", "head_dim"};
	struct kv_state_reasons w = {0};
	int64_t grouped, values;
	struct kv_recur a;
	int r = check_size("kv_ssd_args", args->size, sizeof(*args));

	if (r < 0)
		return r;
	a = (struct kv_recur){.device = args->device,
			      .dtype = args->dtype,
			      .rule = KV_RULE_SSD,
			      .heads_k = args->n_groups,
			      .heads = args->n_heads,
			      .dim_k = args->state_dim,
			      .dim_v = args->head_dim,
			      .batch = args->batch,
			      .q = args->c,
			      .k = args->b,
			      .v = args->x,
			      .a = args->dt,
			      .a_log = args->a_log,
			      .dt_bias = args->dt_bias,
			      .d = args->d,
			      .scale = 1,
			      .dt_min = args->dt_min,
			      .dt_max = args->dt_max,
			      .out = args->out,
			      .state = args->state,
			      .workspace_bytes = args->workspace_bytes,
			      .workspace = args->workspace,
			      .stream = args->stream};
	check_head(&w, a.device, a.dtype);
	check_dims(&w, names, &a);
	grouped = (int64_t)a.heads_k * a.dim_k;
	values = (int64_t)a.heads * a.dim_v;
	a.q_stride = resolve_stride(&w, "c_stride", args->c_stride, grouped);
	a.k_stride = resolve_stride(&w, "b_stride", args->b_stride, grouped);
	a.v_stride = resolve_stride(&w, "x_stride", args->x_stride, values);
	a.a_stride = resolve_stride(&w, "dt_stride", args->dt_stride, a.heads);
	a.out_stride = resolve_stride(&w, "out_stride", args->out_stride, values);
	if (a.dt_min == 0 && a.dt_max == 0)
		a.dt_max = INFINITY;
	if (!(a.dt_min >= 0 && a.dt_max >= a.dt_min))
		wrong(&w, "dt_min, dt_max: %g, %g given, 0 <= dt_min <= dt_max expected",
		      (double)a.dt_min, (double)a.dt_max);
	r = check_recur(&w, &a, sizes_only);
	if (r < 0)
		return r;
	*ret = a;
	return 0;
}

void kv_recur_conv(const struct kv_recur *args, void *out, struct kv_conv1d_args *ret)
{
	int64_t channels =
		2 * (int64_t)args->heads_k * args->dim_k + (int64_t)args->heads * args->dim_v;

	*ret = (struct kv_conv1d_args){.size = sizeof(*ret),
				       .device = args->device,
				       .dtype = args->dtype,
				       .batch = args->batch,
				       .n_channels = (int32_t)channels,
				       .width = args->conv_width,
				       .activation = args->activation,
				       .x = args->q,
				       .x_stride = args->q_stride,
				       .weight = args->conv_weight,
				       .bias = args->conv_bias,
				       .out = out,
				       .out_stride = channels,
				       .state = args->conv,
				       .stream = args->stream};
}
