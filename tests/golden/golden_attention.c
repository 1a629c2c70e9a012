/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of the attention interface: capabilities, graphs, merge, bytes of a cache write. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/backend.h>
#include <kvcached/merge.h>
#include <kvcached/schedule.h>

#include "tests/golden/golden.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static int refused(const char *class, json_t **ret_out)
{
	*ret_out = json_pack("{s:s}", "error", class);
	return 0;
}

/* ---- capabilities ---- */

static int dtype_of(const char *name)
{
	static const struct {
		const char *name;
		int dtype;
	} names[] = {{"float16", KV_F16}, {"bfloat16", KV_BF16}, {"float32", KV_F32},
		     {"fp8", KV_F8_E4M3}, {"auto", 0}};

	for (size_t i = 0; i < COUNT(names); i++)
		if (!strcmp(names[i].name, name))
			return names[i].dtype;
	return -1;
}

static int kind_of(const char *name)
{
	return !strcmp(name, "decoder")	       ? KV_KIND_DECODER
	       : !strcmp(name, "encoder")      ? KV_KIND_ENCODER
	       : !strcmp(name, "encoder_only") ? KV_KIND_ENCODER_ONLY
					       : KV_KIND_CROSS;
}

/* 16, or "m16" */
static int32_t size_of(const json_t *v)
{
	return json_is_string(v) ? atoi(json_string_value(v) + 1) : (int32_t)json_integer_value(v);
}

static void caps_of(const json_t *c, struct kv_attention_caps *caps)
{
	static const struct {
		const char *key;
		uint64_t bit;
	} features[] = {
		{"mla", KV_ATTN_BIT(MLA)},
		{"sparse", KV_ATTN_BIT(SPARSE)},
		{"sink", KV_ATTN_BIT(SINKS)},
		{"per_head", KV_ATTN_BIT(HEAD_SCALES)},
		{"sliding_window", KV_ATTN_BIT(WINDOW)},
		{"non_causal", KV_ATTN_BIT(NON_CAUSAL)},
		{"mm_prefix", KV_ATTN_BIT(BIDIRECTIONAL)},
		{"batch_invariance", KV_ATTN_BIT(INVARIANT)},
		{"non_causal_dcp", KV_ATTN_BIT(NON_CAUSAL_CP)},
		{"impl_pcp", KV_ATTN_BIT(PREFILL_CP)},
	};
	const json_t *list;
	json_t *value;
	size_t i;

	*caps = (struct kv_attention_caps){
		.size = sizeof(*caps),
		.features = KV_ATTN_BIT(DECODE_CP),
		.dtypes = 1u << KV_F16 | 1u << KV_BF16,
		.kv_dtypes = 1u | 1u << KV_F16 | 1u << KV_BF16,
		.kinds = 1u << KV_KIND_DECODER,
	};
	for (i = 0; i < COUNT(features); i++)
		if (in_bool(c, features[i].key, false))
			caps->features |= features[i].bit;
	if (in_bool(c, "no_impl", false))
		caps->features &= ~KV_ATTN_BIT(PREFILL_CP);
	if (in_bool(c, "kv_connector", true))
		caps->features |= KV_ATTN_BIT(CONNECTOR);
	if (!in_bool(c, "ssm", false))
		caps->features |= KV_ATTN_BIT(DEVICE_LENGTHS);
	json_array_foreach(json_object_get(c, "head_sizes"), i, value)
		caps->head_dims[i] = (int32_t)json_integer_value(value);
	json_array_foreach(json_object_get(c, "kernel_block_sizes"), i, value)
		caps->block_tokens[i] = size_of(value);
	list = json_object_get(c, "kv_cache_dtypes");
	if (list)
		caps->kv_dtypes = 0;
	json_array_foreach(list, i, value)
		caps->kv_dtypes |= 1u << dtype_of(json_string_value(value));
	list = json_object_get(c, "min_cc");
	if (list)
		caps->capability_min = (int32_t)(10 * json_integer_value(json_array_get(list, 0)) +
						 json_integer_value(json_array_get(list, 1)));
	list = json_object_get(c, "attn_types");
	if (list)
		caps->kinds = 0;
	json_array_foreach(list, i, value) caps->kinds |= 1u << kind_of(json_string_value(value));
}

static void query_of(const json_t *q, struct kv_attention_query *query)
{
	static const struct {
		const char *key;
		uint64_t bit;
	} features[] = {
		{"use_mla", KV_ATTN_BIT(MLA)},
		{"has_sink", KV_ATTN_BIT(SINKS)},
		{"use_sparse", KV_ATTN_BIT(SPARSE)},
		{"use_mm_prefix", KV_ATTN_BIT(BIDIRECTIONAL)},
		{"use_per_head_quant_scales", KV_ATTN_BIT(HEAD_SCALES)},
		{"has_sliding_window", KV_ATTN_BIT(WINDOW)},
		{"use_non_causal", KV_ATTN_BIT(NON_CAUSAL)},
		{"use_batch_invariant", KV_ATTN_BIT(INVARIANT)},
		{"use_kv_connector", KV_ATTN_BIT(CONNECTOR)},
		{"use_pcp", KV_ATTN_BIT(PREFILL_CP)},
		{"use_adaptive_verification", KV_ATTN_BIT(DEVICE_LENGTHS)},
		{"use_dcp", KV_ATTN_BIT(DECODE_CP)},
	};
	const json_t *cc = json_object_get(q, "capability");
	const char *cache = in_text(q, "kv_cache_dtype", NULL);

	*query = (struct kv_attention_query){
		.size = sizeof(*query),
		.dtype = dtype_of(in_text(q, "dtype", "")),
		.head_dim_k = (int32_t)in_int(q, "head_size", 0),
		.block_tokens = (int32_t)in_int(q, "block_size", 0),
		.kind = kind_of(in_text(q, "attn_type", "")),
		.capability = (int32_t)(10 * json_integer_value(json_array_get(cc, 0)) +
					json_integer_value(json_array_get(cc, 1))),
	};
	if (cache)
		query->k_dtype = dtype_of(cache) ? dtype_of(cache) : query->dtype;
	for (size_t i = 0; i < COUNT(features); i++)
		if (in_bool(q, features[i].key, false))
			query->features |= features[i].bit;
}

static int validate(const json_t *in, json_t **ret_out)
{
	static const struct {
		int reason;
		const char *name;
	} names[] = {
		{KV_ATTN_HEAD_DIM, "HEAD_SIZE"},
		{KV_ATTN_DTYPE, "DTYPE"},
		{KV_ATTN_KV_DTYPE, "KV_CACHE_DTYPE"},
		{KV_ATTN_BLOCK_TOKENS, "BLOCK_SIZE"},
		{KV_ATTN_BIDIRECTIONAL, "MM_PREFIX"},
		{KV_ATTN_MLA, "MLA"},
		{KV_ATTN_NON_MLA, "NON_MLA"},
		{KV_ATTN_SINKS, "SINK"},
		{KV_ATTN_SPARSE, "SPARSE"},
		{KV_ATTN_NON_SPARSE, "NON_SPARSE"},
		{KV_ATTN_HEAD_SCALES, "PER_HEAD_QUANT_SCALES"},
		{KV_ATTN_CAPABILITY, "COMPUTE_CAPABILITY"},
		{KV_ATTN_KIND, "ATTN_TYPE"},
		{KV_ATTN_WINDOW, "SLIDING_WINDOW"},
		{KV_ATTN_NON_CAUSAL, "NON_CAUSAL"},
		{KV_ATTN_NON_CAUSAL_CP, "NON_CAUSAL_MLA_DCP"},
		{KV_ATTN_INVARIANT, "BATCH_INVARIANCE"},
		{KV_ATTN_CONNECTOR, "KV_CONNECTOR"},
		{KV_ATTN_PREFILL_CP, "PCP"},
		{KV_ATTN_DEVICE_LENGTHS, "DEVICE_CPU_QUERY_LENS_MISMATCH"},
		{KV_ATTN_COMBINATION, "COMBINATION"},
	};
	const json_t *c = json_object_get(in, "capabilities"), *q = json_object_get(in, "query");
	json_t *reasons = json_array();
	struct kv_attention_caps caps;
	struct kv_attention_query query;
	char text[2048];
	uint64_t bits;

	caps_of(c, &caps);
	query_of(q, &query);
	bits = kv_attention_compare(&caps, &query, text, sizeof(text));
	if (in_text(c, "combination", NULL) && /* a backend's own rule, in the vectors this one */
	    (in_bool(q, "has_sink", false) || !strcmp(in_text(q, "kv_cache_dtype", ""), "fp8")))
		bits |= KV_ATTN_BIT(COMBINATION);
	for (size_t i = 0; i < COUNT(names); i++)
		if (bits >> names[i].reason & 1)
			json_array_append_new(reasons, json_string(names[i].name));
	*ret_out = json_pack("{s:o}", "reasons", reasons);
	return 0;
}

static int thresholds(const json_t *in, json_t **ret_out)
{
	const json_t *sizes = json_object_get(in, "kernel_block_sizes");
	struct kv_attention_caps caps = {.size = sizeof(caps)};
	int32_t wanted = (int32_t)in_int(in, "default", 0), t;
	json_t *value;
	size_t i;

	if (sizes) {
		json_array_foreach(sizes, i, value) caps.block_tokens[i] = size_of(value);
		t = kv_attention_block_size(&caps, wanted);
		*ret_out = json_pack("{s:i, s:b}", "preferred", t, "default_supported", t == wanted);
		return 0;
	}
	t = kv_reorder_threshold(
		(int32_t)in_int(in, "base_threshold", 0),
		in_bool(in, "supports_spec_as_decode", false)
			? (int32_t)in_int(in, "num_speculative_tokens", 0)
			: 0,
		in_bool(in, "parallel_drafting", false),
		in_int(in, "dcp_size", 1) > 1 && !in_bool(in, "supports_dcp_with_varlen", false));
	*ret_out = json_pack("{s:o}", "threshold", t ? json_integer(t) : json_null());
	return 0;
}

static int graph_mode(const json_t *in, json_t **ret_out)
{
	static const char *const modes[] = {"NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY",
					    "FULL_AND_PIECEWISE"};
	static const char *const levels[] = {"NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH",
					     "ALWAYS"};
	int wanted = 0, support = 0, r;

	for (size_t i = 0; i < COUNT(modes); i++)
		wanted = strcmp(modes[i], in_text(in, "requested_mode", "")) ? wanted : (int)i;
	for (size_t i = 0; i < COUNT(levels); i++)
		support = strcmp(levels[i], in_text(in, "min_support", "")) ? support : (int)i;
	r = kv_graph_mode(wanted, support, in_bool(in, "attention_in_splitting_ops", false),
			  (int32_t)in_int(in, "uniform_decode_query_len", 1));
	if (r < 0)
		return refused("ValueError", ret_out);
	*ret_out = json_pack("{s:s}", "mode", modes[r]);
	return 0;
}

/* ---- merge ---- */

static float number(const json_t *v)
{
	const char *text = json_string_value(v);

	if (text)
		return !strcmp(text, "nan") ? NAN : !strcmp(text, "inf") ? INFINITY : -INFINITY;
	return (float)json_number_value(v);
}

/* All numbers in @v, in order. */
static void flatten(const json_t *v, float *to, size_t *n)
{
	json_t *item;
	size_t i;

	if (!json_is_array(v))
		to[(*n)++] = number(v);
	json_array_foreach(v, i, item) flatten(item, to, n);
}

static json_t *out_float(float x)
{
	return x == -INFINITY ? json_string("-inf") : json_real((double)x);
}

static json_t *out_floats(const float *x, size_t n)
{
	json_t *list = json_array();

	for (size_t i = 0; i < n; i++)
		json_array_append_new(list, out_float(x[i]));
	return list;
}

static int merge(const json_t *in, json_t **ret_out)
{
	const json_t *outs = json_object_get(in, "partial_out_NBHD");
	const json_t *lses = json_object_get(in, "lse_NBH");
	float parts[4096], lse[1024], out[4096], out_lse[1024];
	size_t n_parts = 0, n_lse = 0, rows = 1, n = 2;
	struct kv_merge_args args = {.size = sizeof(args),
				     .device = KV_DEVICE_HOST,
				     .dtype = KV_F32,
				     .parts = parts,
				     .part_lse = lse,
				     .out = out,
				     .lse = out_lse,
				     .n_heads = 1};

	if (outs) {
		n = json_array_size(outs);
		rows = json_array_size(json_array_get(outs, 0));
		args.n_heads = (int32_t)json_array_size(
			json_array_get(json_array_get(outs, 0), 0));
		flatten(outs, parts, &n_parts);
		flatten(lses, lse, &n_lse);
		args.base = strcmp(in_text(in, "base", "e"), "2") ? 0 : 2;
	} else {
		flatten(json_object_get(in, "prefix_out"), parts, &n_parts);
		flatten(json_object_get(in, "suffix_out"), parts, &n_parts);
		lse[0] = number(json_object_get(in, "prefix_lse"));
		lse[1] = number(json_object_get(in, "suffix_lse"));
		n_lse = 2;
	}
	args.n_parts = (int32_t)n;
	args.n_tokens = (int32_t)rows;
	args.head_dim = (int32_t)(n_parts / n_lse);
	if (kv_merge(&args) < 0)
		return refused("ValueError", ret_out);
	if (outs)
		*ret_out = json_pack("{s:o, s:o}", "out_BHD", out_floats(out, n_parts / n), "lse_BH",
				     out_floats(out_lse, n_lse / n));
	else
		*ret_out = json_pack("{s:o, s:o}", "out", out_floats(out, n_parts / n), "lse",
				     out_float(out_lse[0]));
	return 0;
}

/* Rows that a rank has no keys for: by local lengths, or past the last query. */
static int lse_combine(const json_t *in, json_t **ret_out)
{
	size_t n_lens, n_loc, rows = (size_t)in_int(in, "num_rows", 0);
	json_t *list;

	if (!rows)
		return merge(in, ret_out);
	int32_t *lens = in_ints32(in, "local_seq_lens", &n_lens);
	int32_t *loc = in_ints32(in, "query_start_loc", &n_loc);
	uint8_t *empty = golden_alloc(rows, 1);

	kv_cp_empty_rows(lens, loc, (int32_t)n_lens, (int32_t)rows, empty);
	list = json_array();
	for (size_t t = 0; t < rows; t++)
		json_array_append_new(list, json_boolean(empty[t]));
	*ret_out = json_pack("{s:o}", "row_masked", list);
	return 0;
}

static void take_near(const json_t *expected, json_t *got)
{
	json_t *item;
	size_t i;

	json_array_foreach(expected, i, item)
		if (json_is_number(item) &&
		    fabs(json_number_value(item) -
			 json_number_value(json_array_get(got, i))) <=
			    1e-6 * (1 + fabs(json_number_value(item))))
			json_array_set(got, i, item);
}

/* Numbers within 1e-6 of the expected ones count as those. */
static void ask_merge(const json_t *expected, json_t *out)
{
	const char *key;
	json_t *value;

	json_object_foreach((json_t *)expected, key, value)
	{
		json_t *got = json_object_get(out, key);

		if (json_is_array(value))
			take_near(value, got);
		else if (json_is_number(value) && json_is_number(got) &&
			 fabs(json_number_value(value) - json_number_value(got)) <= 1e-6)
			json_object_set(out, key, value);
	}
}

const struct golden_kind golden_attention[] = {
	{"validate_configuration", validate},
	{"builder_thresholds", thresholds},
	{"cudagraph_mode", graph_mode},
	{"lse_combine", lse_combine, NULL, ask_merge},
	{NULL, NULL},
};
