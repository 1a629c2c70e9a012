/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench gdn, mamba, conv: work on state rows, beside the device's copy.
 *
 * A case is a shape, lanes and tokens a lane. Its inputs and rows are random. The rows of the calls
 * of a graph differ from call to call, until at least 256 MiB are touched: a state comes from
 * memory, not from the cache of the call before. Before a case is timed its first call is held
 * against the reference on the host, over all tokens of a lane or two and one key head; a wrong
 * case has no time. Then copy, case, copy; the share is of their mean.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "tools/bench/bench.h"
#include "tools/bench/device.h"
#include "tools/bench/noise.h"

#define ROTATED	   ((size_t)256 << 20)
#define MAX_CALLS  64
#define TILE	   ((size_t)8 << 20) /* bytes of random content, over and over */
#define COPY_BYTES ((size_t)1 << 30)
#define CONV_WIDTH 4
#define TOLERANCE  1e-2 /* of products of bf16; a step is below 4e-3 */
#define CHECKED	   2	/* lanes */

enum what {
	GDN,
	MAMBA,
	CONV,
};

struct shape {
	const char *name;
	int32_t heads_k, heads, dim_k, dim_v;
};

static const struct shape tp1 = {"qwen3-next/tp1", 16, 32, 128, 128};
static const struct shape tp4 = {"qwen3-next/tp4", 4, 8, 128, 128};
static const struct shape mamba2 = {"mamba2/128x64x128", 8, 128, 128, 64};

static const struct bench_case {
	enum what what;
	const struct shape *shape;
	int32_t lanes, tokens; /* a lane */
	int32_t state_dtype;
	bool host; /* small enough for a build without CUDA */
} cases[] = {
	{GDN, &tp1, 1, 1, KV_F32, true},	   {GDN, &tp1, 8, 1, KV_F32, true},
	{GDN, &tp1, 32, 1, KV_F32, false},	   {GDN, &tp1, 64, 1, KV_F32, false},
	{GDN, &tp1, 128, 1, KV_F32, false},	   {GDN, &tp1, 256, 1, KV_F32, false},
	{GDN, &tp1, 1, 1, KV_BF16, true},	   {GDN, &tp1, 64, 1, KV_BF16, false},
	{GDN, &tp1, 256, 1, KV_BF16, false},	   {GDN, &tp1, 64, 4, KV_F32, false},
	{GDN, &tp4, 1, 1, KV_F32, true},	   {GDN, &tp4, 8, 1, KV_F32, true},
	{GDN, &tp4, 32, 1, KV_F32, false},	   {GDN, &tp4, 128, 1, KV_F32, false},
	{GDN, &tp4, 256, 1, KV_F32, false},	   {GDN, &tp4, 1, 128, KV_F32, true},
	{GDN, &tp1, 1, 4096, KV_F32, false},	   {GDN, &tp1, 1, 16384, KV_F32, false},
	{GDN, &tp4, 1, 4096, KV_F32, false},	   {GDN, &tp4, 1, 16384, KV_F32, false},
	{GDN, &tp1, 16, 1024, KV_F32, false},	   {MAMBA, &mamba2, 1, 1, KV_F32, true},
	{MAMBA, &mamba2, 64, 1, KV_F32, false},	   {MAMBA, &mamba2, 256, 1, KV_F32, false},
	{MAMBA, &mamba2, 1, 16384, KV_F32, false}, {CONV, &tp1, 1, 1, KV_BF16, true},
	{CONV, &tp1, 64, 1, KV_BF16, true},	   {CONV, &tp1, 256, 1, KV_BF16, false},
	{CONV, &tp1, 1, 4096, KV_BF16, false},	   {CONV, &tp1, 1, 16384, KV_BF16, false},
};

/* One case at work. Sizes in bytes unless they say tokens. */
struct work {
	const struct bench_case *c;
	int32_t channels, inputs; /* elements of a token: of the convolution, of q | k | v */
	int32_t n_calls;
	int64_t rows, tokens;
	size_t row_bytes, conv_row_bytes, out_row;
	bool fused;
	/* The device's. */
	char *state, *conv, *x, *gates, *weight, *out;
	float *a_log;
	int32_t *row_ids, *loc;
	char *workspace;
	size_t workspace_bytes;
	/* What the device has, on the host. */
	uint16_t *host_x, *host_gates, *host_weight;
	float *host_a_log;
};

static uint16_t *random_bf16(size_t n, uint64_t seed)
{
	uint16_t *to = malloc(n * sizeof(*to));

	for (size_t i = 0; to && i < n; i++)
		to[i] = to_bf16((float)uniform(&seed));
	return to;
}

/* Random states in the type of the rows: f32 or bf16. */
static char *random_states(int dtype, uint64_t seed)
{
	char *to = malloc(TILE);

	for (size_t i = 0; to && i < TILE / kv_dtype_bytes(dtype); i++) {
		float x = (float)uniform(&seed) / 4;

		if (dtype == KV_F32)
			((float *)(void *)to)[i] = x;
		else
			((uint16_t *)(void *)to)[i] = to_bf16(x);
	}
	return to;
}

static struct kv_state_batch batch_of(const struct work *w, int call, const int32_t *loc,
				      const int32_t *row_ids)
{
	struct kv_state_batch t = {.n_seqs = w->c->lanes,
				   .n_tokens = (int32_t)w->tokens,
				   .max_query_len = w->c->tokens,
				   .null_row = -1,
				   .query_start_loc = w->c->tokens > 1 ? loc : NULL,
				   .read_rows = row_ids + (size_t)call * (size_t)w->c->lanes};

	return t;
}

static struct kv_conv_rows conv_rows(const struct work *w, void *base)
{
	return (struct kv_conv_rows){.base = base,
				     .row_stride = (int64_t)w->conv_row_bytes,
				     .tap_stride = (int64_t)w->channels * 2,
				     .channel_stride = 2,
				     .dtype = KV_BF16};
}

static struct kv_view state_view(const struct work *w, void *base)
{
	const struct shape *s = w->c->shape;
	int64_t head = (int64_t)s->dim_k * s->dim_v * (int64_t)kv_dtype_bytes(w->c->state_dtype);

	return (struct kv_view){.base = base,
				.block_stride = (int64_t)w->row_bytes,
				.head_stride = head,
				.block_tokens = 1,
				.n_heads = s->heads,
				.head_dim = s->dim_k * s->dim_v,
				.dtype = w->c->state_dtype,
				.scale = 1};
}

static struct kv_gdn_args gdn_args(const struct work *w, int call)
{
	const struct shape *s = w->c->shape;
	int64_t qk = (int64_t)s->heads_k * s->dim_k * 2;
	struct kv_gdn_args a = {.size = sizeof(a),
				.device = kv_bench_device,
				.dtype = KV_BF16,
				.batch = batch_of(w, call, w->loc, w->row_ids),
				.n_heads_k = s->heads_k,
				.n_heads_v = s->heads,
				.dim_k = s->dim_k,
				.dim_v = s->dim_v,
				.q = w->x,
				.k = w->x + qk,
				.v = w->x + 2 * qk,
				.q_stride = w->inputs,
				.k_stride = w->inputs,
				.v_stride = w->inputs,
				.a = w->gates,
				.b = w->gates + s->heads * 2,
				.a_stride = 2 * s->heads,
				.b_stride = 2 * s->heads,
				.a_log = w->a_log,
				.normalize = 1,
				.out = w->out,
				.state = state_view(w, w->state),
				.workspace = w->workspace,
				.workspace_bytes = w->workspace_bytes};

	if (w->fused) {
		a.conv_weight = w->weight;
		a.conv_width = CONV_WIDTH;
		a.conv_activation = KV_ACTIVATION_SILU;
		a.conv = conv_rows(w, w->conv);
	}
	return a;
}

static struct kv_ssd_args ssd_args(const struct work *w, int call)
{
	const struct shape *s = w->c->shape;
	int64_t values = (int64_t)s->heads * s->dim_v * 2, grouped = (int64_t)s->heads_k * s->dim_k;

	return (struct kv_ssd_args){.size = sizeof(struct kv_ssd_args),
				    .device = kv_bench_device,
				    .dtype = KV_BF16,
				    .batch = batch_of(w, call, w->loc, w->row_ids),
				    .n_groups = s->heads_k,
				    .n_heads = s->heads,
				    .head_dim = s->dim_v,
				    .state_dim = s->dim_k,
				    .x = w->x,
				    .b = w->x + values,
				    .c = w->x + values + grouped * 2,
				    .x_stride = w->inputs,
				    .b_stride = w->inputs,
				    .c_stride = w->inputs,
				    .dt = w->gates,
				    .dt_stride = 2 * s->heads,
				    .a_log = w->a_log,
				    .out = w->out,
				    .state = state_view(w, w->state),
				    .workspace = w->workspace,
				    .workspace_bytes = w->workspace_bytes};
}

static struct kv_conv1d_args conv_args(const struct work *w, int call)
{
	return (struct kv_conv1d_args){.size = sizeof(struct kv_conv1d_args),
				       .device = kv_bench_device,
				       .dtype = KV_BF16,
				       .batch = batch_of(w, call, w->loc, w->row_ids),
				       .n_channels = w->channels,
				       .width = CONV_WIDTH,
				       .activation = KV_ACTIVATION_SILU,
				       .x = w->x,
				       .weight = w->weight,
				       .out = w->out,
				       .state = conv_rows(w, w->conv)};
}

static int call(void *arg, int i, void *stream)
{
	const struct work *w = arg;
	struct kv_gdn_args gdn;
	struct kv_ssd_args ssd;
	struct kv_conv1d_args conv;

	switch (w->c->what) {
	case GDN:
		gdn = gdn_args(w, i);
		gdn.stream = stream;
		return kv_gdn(&gdn);
	case MAMBA:
		ssd = ssd_args(w, i);
		ssd.stream = stream;
		return kv_ssd(&ssd);
	default:
		conv = conv_args(w, i);
		conv.stream = stream;
		return kv_conv1d(&conv);
	}
}

/* Bytes that a call must read and write: states, inputs, outputs. */
static double bytes_moved(const struct work *w)
{
	double lanes = w->c->lanes, states = w->c->what == CONV ? 0 : (double)w->row_bytes;

	if (w->fused || w->c->what == CONV)
		states += (double)w->conv_row_bytes;
	return lanes * 2 * states +
	       (double)w->tokens * ((double)w->inputs * 2 + (double)w->out_row);
}

static int set_up(struct work *w)
{
	const struct shape *s = w->c->shape;
	kv_cleanup(kv_freep) char *states = random_states(w->c->state_dtype, 7);
	kv_cleanup(kv_freep) uint16_t *taps = random_bf16(TILE / 2, 8);
	kv_cleanup(kv_freep) int32_t *ids = NULL;
	kv_cleanup(kv_freep) int32_t *loc = NULL;
	struct kv_gdn_args gdn;
	struct kv_ssd_args ssd;
	uint64_t seed = 11;
	size_t per_call;

	w->fused = w->c->what == GDN && w->c->tokens <= 4;
	w->channels = w->inputs = 2 * s->heads_k * s->dim_k + s->heads * s->dim_v;
	w->tokens = (int64_t)w->c->lanes * w->c->tokens;
	w->row_bytes = (size_t)s->heads * (size_t)s->dim_k * (size_t)s->dim_v *
		       kv_dtype_bytes(w->c->state_dtype);
	w->conv_row_bytes = (size_t)w->channels * (CONV_WIDTH - 1) * 2;
	w->out_row = 2 * (w->c->what == CONV ? (size_t)w->channels
					     : (size_t)s->heads * (size_t)s->dim_v);
	per_call = (size_t)w->c->lanes * (w->c->what == CONV ? w->conv_row_bytes : w->row_bytes);
	w->n_calls = (int32_t)(ROTATED / per_call + 1);
	if (w->n_calls > MAX_CALLS)
		w->n_calls = MAX_CALLS;
	if (w->c->tokens > 4 && w->n_calls > 4)
		w->n_calls = 4;
	if (kv_bench_device == KV_DEVICE_HOST)
		w->n_calls = 1;
	w->rows = (int64_t)w->n_calls * w->c->lanes;

	ids = calloc((size_t)w->rows, sizeof(*ids));
	loc = calloc((size_t)w->c->lanes + 1, sizeof(*loc));
	w->host_x = random_bf16((size_t)w->tokens * (size_t)w->inputs, 1);
	w->host_gates = random_bf16((size_t)w->tokens * 2 * (size_t)s->heads, 2);
	w->host_weight = random_bf16((size_t)w->channels * CONV_WIDTH, 3);
	w->host_a_log = calloc((size_t)s->heads, sizeof(float));
	if (!states || !taps || !ids || !loc || !w->host_x || !w->host_gates || !w->host_weight ||
	    !w->host_a_log)
		return -ENOMEM;
	for (int32_t i = 0; i < s->heads; i++)
		w->host_a_log[i] = (float)uniform(&seed);
	for (int64_t i = 0; i < w->rows; i++)
		ids[i] = (int32_t)i;
	for (int64_t i = w->rows - 1; i > 0; i--) { /* rows of a call lie apart */
		int64_t j = (int64_t)((uniform(&seed) + 1) / 2 * (double)(i + 1)) % (i + 1);
		int32_t t = ids[i];

		ids[i] = ids[j];
		ids[j] = t;
	}
	for (int32_t i = 0; i <= w->c->lanes; i++)
		loc[i] = i * w->c->tokens;

	w->state = kv_bench_device_alloc(w->c->what == CONV ? 1 : (size_t)w->rows * w->row_bytes);
	w->conv = kv_bench_device_alloc((size_t)w->rows * w->conv_row_bytes);
	w->x = kv_bench_device_alloc((size_t)w->tokens * (size_t)w->inputs * 2);
	w->gates = kv_bench_device_alloc((size_t)w->tokens * 4 * (size_t)s->heads);
	w->weight = kv_bench_device_alloc((size_t)w->channels * CONV_WIDTH * 2);
	w->out = kv_bench_device_alloc((size_t)w->tokens * w->out_row);
	w->a_log = kv_bench_device_alloc((size_t)s->heads * sizeof(float));
	w->row_ids = kv_bench_device_alloc((size_t)w->rows * sizeof(int32_t));
	w->loc = kv_bench_device_alloc(((size_t)w->c->lanes + 1) * sizeof(int32_t));
	if (w->c->what != CONV)
		kv_bench_device_tile(w->state, (size_t)w->rows * w->row_bytes, states, TILE);
	kv_bench_device_tile(w->conv, (size_t)w->rows * w->conv_row_bytes, taps, TILE);
	kv_bench_device_put(w->x, w->host_x, (size_t)w->tokens * (size_t)w->inputs * 2);
	kv_bench_device_put(w->gates, w->host_gates, (size_t)w->tokens * 4 * (size_t)s->heads);
	kv_bench_device_put(w->weight, w->host_weight, (size_t)w->channels * CONV_WIDTH * 2);
	kv_bench_device_put(w->a_log, w->host_a_log, (size_t)s->heads * sizeof(float));
	kv_bench_device_put(w->row_ids, ids, (size_t)w->rows * sizeof(int32_t));
	kv_bench_device_put(w->loc, loc, ((size_t)w->c->lanes + 1) * sizeof(int32_t));

	if (w->c->tokens == 1 || w->c->what == CONV)
		return 0;
	if (w->c->what == GDN) {
		gdn = gdn_args(w, 0);
		if (kv_gdn_workspace_bytes(&gdn, &w->workspace_bytes) < 0)
			return -EINVAL;
	} else {
		ssd = ssd_args(w, 0);
		if (kv_ssd_workspace_bytes(&ssd, &w->workspace_bytes) < 0)
			return -EINVAL;
	}
	if (w->workspace_bytes)
		w->workspace = kv_bench_device_alloc(w->workspace_bytes);
	return 0;
}

static void tear_down(struct work *w)
{
	void *device[] = {w->state, w->conv,  w->x,	  w->gates, w->weight,
			  w->out,   w->a_log, w->row_ids, w->loc,   w->workspace};
	void *host[] = {w->host_x, w->host_gates, w->host_weight, w->host_a_log};

	for (size_t i = 0; i < sizeof(device) / sizeof(*device); i++)
		if (device[i])
			kv_bench_device_free(device[i]);
	for (size_t i = 0; i < sizeof(host) / sizeof(*host); i++)
		free(host[i]);
}

/* A lane's rows before the call, and what the reference makes of them. */
struct lane_check {
	char *state, *conv, *out;
};

/*
 * The reference over lane @lane, of one key head and its heads (the whole of it for a convolution):
 * the same arguments, on the host, with pointers moved to the lane and strides as they are.
 */
static int run_reference(const struct work *w, int lane, const struct lane_check *k)
{
	const struct shape *s = w->c->shape;
	int32_t loc[] = {0, w->c->tokens}, row = 0, group = s->heads / s->heads_k;
	int64_t at = (int64_t)lane * w->c->tokens;
	struct work one = *w;
	struct bench_case c = *w->c;
	struct kv_gdn_args gdn;
	struct kv_ssd_args ssd;
	struct kv_conv1d_args conv;
	int64_t head = (int64_t)w->row_bytes / s->heads;

	c.lanes = 1;
	one.c = &c;
	one.tokens = c.tokens;
	one.x = (char *)(w->host_x + at * w->inputs);
	one.gates = (char *)(w->host_gates + at * 2 * s->heads);
	one.weight = (char *)w->host_weight;
	one.a_log = w->host_a_log;
	one.state = k->state;
	one.conv = k->conv;
	one.out = k->out;
	one.row_ids = &row;
	one.loc = loc;
	one.workspace_bytes = 0;
	one.workspace = NULL;
	switch (w->c->what) {
	case GDN:
		gdn = gdn_args(&one, 0);
		gdn.device = KV_DEVICE_HOST;
		if (!w->fused) {
			gdn.n_heads_k = 1;
			gdn.n_heads_v = group;
			gdn.state.n_heads = group;
			gdn.state.head_stride = head;
			gdn.out_stride = (int64_t)w->out_row / 2;
		}
		return kv_gdn(&gdn);
	case MAMBA:
		ssd = ssd_args(&one, 0);
		ssd.device = KV_DEVICE_HOST;
		ssd.n_groups = 1;
		ssd.n_heads = ssd.state.n_heads = group < 4 ? group : 4;
		ssd.out_stride = (int64_t)w->out_row / 2;
		return kv_ssd(&ssd);
	default:
		conv = conv_args(&one, 0);
		conv.device = KV_DEVICE_HOST;
		return kv_conv1d(&conv);
	}
}

/* ||got - right|| / ||right|| */
static double distance(const void *got, const void *right, size_t n, int dtype)
{
	double error = 0, norm = 0;

	for (size_t i = 0; i < n; i++) {
		double x = dtype == KV_F32 ? (double)((const float *)got)[i]
					   : (double)from_bf16(((const uint16_t *)got)[i]);
		double y = dtype == KV_F32 ? (double)((const float *)right)[i]
					   : (double)from_bf16(((const uint16_t *)right)[i]);

		error += (x - y) * (x - y);
		norm += y * y;
	}
	return sqrt(error / (norm > 0 ? norm : 1));
}

/* Heads that the reference did of a lane: their elements of out and of the row come first. */
static size_t heads_checked(const struct work *w)
{
	size_t group = (size_t)(w->c->shape->heads / w->c->shape->heads_k);

	if (w->c->what == MAMBA)
		return group < 4 ? group : 4;
	return w->fused ? (size_t)w->c->shape->heads : group;
}

/* The first call against the reference. @ret_error: the larger of out's and the state's */
static int check(struct work *w, double *ret_error)
{
	int n = w->c->lanes < CHECKED ? w->c->lanes : CHECKED, lanes[] = {0, w->c->lanes - 1};
	kv_cleanup(kv_freep) int32_t *ids = malloc((size_t)w->c->lanes * sizeof(*ids));
	size_t lane_out = (size_t)w->c->tokens * w->out_row;
	struct lane_check k[CHECKED] = {0};
	int r = 0;

	*ret_error = 0;
	if (!ids)
		return -ENOMEM;
	kv_bench_device_get(ids, w->row_ids, (size_t)w->c->lanes * sizeof(*ids));
	for (int i = 0; i < n; i++) {
		size_t row = (size_t)ids[lanes[i]];

		k[i].state = malloc(w->row_bytes);
		k[i].conv = malloc(w->conv_row_bytes);
		k[i].out = calloc(1, lane_out);
		if (!k[i].state || !k[i].conv || !k[i].out)
			r = -ENOMEM;
		if (!r && w->c->what != CONV)
			kv_bench_device_get(k[i].state, w->state + row * w->row_bytes,
					    w->row_bytes);
		if (!r)
			kv_bench_device_get(k[i].conv, w->conv + row * w->conv_row_bytes,
					    w->conv_row_bytes);
	}
	if (!r)
		r = call(w, 0, NULL);
	for (int i = 0; i < n && !r; i++) {
		kv_cleanup(kv_freep) char *out = malloc(lane_out);
		kv_cleanup(kv_freep) char *state = malloc(w->row_bytes);
		const struct shape *s = w->c->shape;
		size_t width = w->c->what == CONV ? (size_t)w->channels
						  : heads_checked(w) * (size_t)s->dim_v;
		double e;

		r = !out || !state ? -ENOMEM : run_reference(w, lanes[i], &k[i]);
		if (r)
			break;
		kv_bench_device_get(out, w->out + (size_t)lanes[i] * lane_out, lane_out);
		for (int t = 0; t < w->c->tokens; t++) { /* what was done, side by side */
			memmove(out + (size_t)t * width * 2, out + (size_t)t * w->out_row,
				width * 2);
			memmove(k[i].out + (size_t)t * width * 2, k[i].out + (size_t)t * w->out_row,
				width * 2);
		}
		e = distance(out, k[i].out, (size_t)w->c->tokens * width, KV_BF16);
		*ret_error = e > *ret_error || isnan(e) ? e : *ret_error;
		if (w->c->what == CONV)
			continue;
		kv_bench_device_get(state, w->state + (size_t)ids[lanes[i]] * w->row_bytes,
				    w->row_bytes);
		e = distance(state, k[i].state,
			     heads_checked(w) * (size_t)s->dim_k * (size_t)s->dim_v,
			     w->c->state_dtype);
		*ret_error = e > *ret_error || isnan(e) ? e : *ret_error;
	}
	for (int i = 0; i < n; i++) {
		free(k[i].state);
		free(k[i].conv);
		free(k[i].out);
	}
	return r;
}

struct yardstick {
	char *to, *from;
	size_t bytes;
};

static int run_case(struct kv_bench *b, const struct bench_case *c, const struct yardstick *copy)
{
	struct work w = {.c = c};
	double seconds = 0, error, rate;
	int r = set_up(&w);

	if (!r)
		r = check(&w, &error);
	if (r) {
		tear_down(&w);
		return kv_bench_broken(b, c->shape->name, r);
	}
	rate = kv_bench_device_copy(copy->to, copy->from, copy->bytes);
	if (error < TOLERANCE)
		r = kv_bench_device_time(call, &w, w.n_calls, &seconds);
	rate = (rate + kv_bench_device_copy(copy->to, copy->from, copy->bytes)) / 2;
	if (!r) {
		struct kv_emit *e = &b->emit;
		bool right = error < TOLERANCE;
		double moved = bytes_moved(&w);

		kv_emit_open(e, NULL, '{');
		kv_emit_text(e, "shape", c->shape->name);
		kv_emit_text(e, "state", c->state_dtype == KV_F32 ? "f32" : "bf16");
		kv_emit_number(e, "lanes", (uint64_t)c->lanes);
		kv_emit_number(e, "tokens", (uint64_t)c->tokens);
		kv_emit_real(e, "error", error);
		kv_emit_real(e, "seconds", right ? seconds : NAN);
		kv_emit_real(e, "bytes_per_second", right ? moved / seconds : NAN);
		kv_emit_real(e, "copy_bytes_per_second", rate);
		kv_emit_close(e);
		kv_emit_cell(e, "%s", c->shape->name);
		kv_emit_cell(e, "%s", c->state_dtype == KV_F32 ? "f32" : "bf16");
		kv_emit_cell(e, "%d", c->lanes);
		kv_emit_cell(e, "%d", c->tokens);
		kv_emit_cell(e, "%.1e", error);
		kv_emit_cell(e, right ? "%.2f" : "WRONG", seconds * 1e6);
		kv_emit_cell(e, right ? "%.3f" : "-", moved / seconds / 1e12);
		kv_emit_cell(e, right ? "%.3f" : "-", moved / seconds / rate);
	}
	tear_down(&w);
	return r		   ? kv_bench_broken(b, c->shape->name, r)
	       : error < TOLERANCE ? KV_BENCH_DONE
				   : kv_bench_refuse(b, KV_BENCH_FAILED,
						     "%s: %d lanes of %d tokens are off by %g",
						     c->shape->name, c->lanes, c->tokens, error);
}

static bool runs(const struct bench_case *c, enum what what)
{
	return c->what == what && (kv_bench_device != KV_DEVICE_HOST || c->host);
}

static int run_all(struct kv_bench *b, enum what what)
{
	struct yardstick copy = {.bytes = COPY_BYTES};
	uint64_t done = 0, n_cases = 0;
	char name[128];
	int status = KV_BENCH_DONE;

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
		n_cases += runs(&cases[i], what);
	if (!kv_bench_device_present(name, sizeof(name)))
		return kv_bench_refuse(b, KV_BENCH_FAILED, "no GPU; --device host measures this machine");
	if (kv_bench_device == KV_DEVICE_HOST)
		copy.bytes = COPY_BYTES / 8;
	copy.to = kv_bench_device_alloc(copy.bytes);
	copy.from = kv_bench_device_alloc(copy.bytes);
	kv_emit_open(&b->emit, NULL, '{');
	kv_emit_text(&b->emit, "device", name);
	kv_emit_open(&b->emit, "cases", '[');
	kv_emit_head(&b->emit, "<SHAPE", "<STATE", ">LANES", ">TOKENS", ">ERROR", ">US", ">TB/S",
		     ">OF COPY", NULL);
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		int s;

		if (!runs(&cases[i], what))
			continue;
		kv_bench_progress(b, done++, n_cases, "cases");
		s = run_case(b, &cases[i], &copy);
		status = status ? status : s;
	}
	kv_bench_progress(b, n_cases, n_cases, "cases");
	kv_emit_close(&b->emit);
	kv_emit_close(&b->emit);
	kv_emit_table(&b->emit);
	kv_bench_device_free(copy.to);
	kv_bench_device_free(copy.from);
	return status;
}

int kv_bench_gdn(struct kv_bench *b)
{
	return run_all(b, GDN);
}

int kv_bench_mamba(struct kv_bench *b)
{
	return run_all(b, MAMBA);
}

int kv_bench_conv(struct kv_bench *b)
{
	return run_all(b, CONV);
}
