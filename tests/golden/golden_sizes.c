/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of sizes, profiling, groups and the flat plan. */
#include <stdio.h>
#include <string.h>

#include "tests/golden/golden.h"
#include "tests/golden/golden_own.h"

static int gdn_state_shapes(const json_t *in, json_t **ret_out)
{
	struct kv_compat_gdn gdn = {
		.key_head_dim = in_int(in, "key_head_dim", 0),
		.n_key_heads = in_int(in, "num_key_heads", 0),
		.value_head_dim = in_int(in, "value_head_dim", 0),
		.n_value_heads = in_int(in, "num_value_heads", 0),
		.conv_kernel = in_int(in, "conv_kernel", 0),
		.attn_tp = in_int(in, "attn_tp", 1),
		.conv_itemsize = kv_compat_itemsize(in_text(in, "conv_dtype", "bfloat16")),
		.ssm_itemsize = kv_compat_itemsize(in_text(in, "ssm_dtype", "float32")),
	};
	struct kv_compat_state s;
	int r;

	r = kv_compat_gdn_state(&gdn, &s);
	if (r)
		return r;
	*ret_out = json_pack("{s:o, s:o, s:I, s:I, s:[s, s]}", "conv_shape",
			     out_ints(s.conv_shape, 2), "ssm_shape", out_ints(s.ssm_shape, 3),
			     "conv_bytes", (json_int_t)s.conv_bytes, "ssm_bytes",
			     (json_int_t)s.ssm_bytes, "order", "conv", "ssm");
	return 0;
}

static int state_const_bytes(const json_t *in, json_t **ret_out)
{
	const char *key;
	json_t *shape;

	*ret_out = json_object();
	json_object_foreach((json_t *)in, key, shape)
	{
		char name[32] = "", dtype[64];
		const char *end = strstr(key, "_shape");
		size_t n;
		int64_t *dims;

		if (!end)
			continue;
		memcpy(name, key, (size_t)(end - key));
		snprintf(dtype, sizeof(dtype), "%s_dtype", name);
		dims = ints_of(shape, &n);
		json_object_set_new(*ret_out, name,
				    json_integer(kv_compat_shape_bytes(
					    dims, n, kv_compat_itemsize(in_text(in, dtype, "")))));
	}
	return 0;
}

static int64_t kv_itemsize(const char *option, int *ret_fault)
{
	const char *dtype = "";

	*ret_fault = kv_compat_kv_dtype(option, &dtype);
	return kv_compat_itemsize(dtype);
}

static int resolve_kv_dtype(const json_t *in, json_t **ret_out)
{
	const char *dtype;
	int r;

	r = kv_compat_kv_dtype(in_text(in, "name", ""), &dtype);
	if (r)
		return r;
	*ret_out = json_pack("{s:s, s:I}", "dtype", dtype, "itemsize",
			     (json_int_t)kv_compat_itemsize(dtype));
	return 0;
}

static int mha_cell_size(const json_t *in, json_t **ret_out)
{
	int64_t heads = in_int(in, "num_kv_heads", 0), tp = in_int(in, "attn_tp", 1);
	int64_t itemsize;
	int r;

	itemsize = kv_itemsize(in_text(in, "kv_cache_dtype", "auto"), &r);
	if (r)
		return r;
	*ret_out = json_pack(
		"{s:I, s:I}", "cell_bytes",
		(json_int_t)kv_compat_mha_cell(heads, in_int(in, "head_dim", 0), tp, itemsize),
		"local_kv_heads", (json_int_t)kv_compat_local_heads(heads, tp));
	return 0;
}

static int latent_cell(const json_t *in, int64_t *ret_cell)
{
	int64_t itemsize;
	int r;

	itemsize = kv_itemsize(in_text(in, "kv_cache_dtype", "auto"), &r);
	if (r)
		return r;
	*ret_cell = kv_compat_mla_cell(in_int(in, "kv_lora_rank", 0),
				       in_int(in, "qk_rope_head_dim", 0), itemsize,
				       !strcmp(in_text(in, "quant_method", ""), "per_token_head"),
				       kv_compat_itemsize(in_text(in, "model_dtype", "bfloat16")));
	return 0;
}

static int mla_cell_size(const json_t *in, json_t **ret_out)
{
	int64_t cell;
	int r;

	r = latent_cell(in, &cell);
	if (r)
		return r;
	*ret_out = json_pack("{s:I}", "cell_bytes", (json_int_t)cell);
	return 0;
}

static int dsa_cell_size(const json_t *in, json_t **ret_out)
{
	int64_t cell, row;
	int r;

	r = latent_cell(in, &cell);
	if (r)
		return r;
	r = kv_compat_dsa_index_row(in_int(in, "index_head_dim", 0), &row);
	if (r)
		return r;
	*ret_out = json_pack("{s:I, s:I}", "cell_bytes", (json_int_t)(cell + row),
			     "index_row_bytes", (json_int_t)row);
	return 0;
}

static int dsa_index_row(const json_t *in, json_t **ret_out)
{
	int64_t row;
	int r;

	r = kv_compat_dsa_index_row(in_int(in, "index_head_dim", 0), &row);
	if (r)
		return r;
	*ret_out = json_pack("{s:I}", "row_bytes", (json_int_t)row);
	return 0;
}

static int available_bytes(const json_t *in, json_t **ret_out)
{
	*ret_out = json_pack("{s:I}", "available_bytes",
			     (json_int_t)kv_compat_available_bytes(
				     in_int(in, "min_free_bytes", 0), in_int(in, "world_size", 1),
				     in_real(in, "gpu_memory_utilization", 0),
				     in_real(in, "total_gpu_memory_gib", 0)));
	return 0;
}

static bool has(const json_t *in, const char *key)
{
	const json_t *v = json_object_get(in, key);

	return v && !json_is_null(v);
}

static int64_t draft_cell(const json_t *in, const char *override)
{
	const json_t *draft = json_object_get(in, "draft");

	if (override && has(in, override))
		return in_int(in, override, 0);
	return in_int(draft, "cell_bytes", 0) * in_int(draft, "layers", 0);
}

static int max_num_pages(const json_t *in, json_t **ret_out)
{
	int64_t cell = has(in, "cell_override")
			       ? in_int(in, "cell_override", 0)
			       : in_int(in, "cell_bytes", 0) * in_int(in, "layers", 0);
	int64_t pages;
	int r;

	r = kv_compat_max_pages(in_int(in, "available_bytes", 0),
				cell + draft_cell(in, "draft_cell_override"),
				in_int(in, "page_size", 1), &pages);
	if (r)
		return r;
	*ret_out = json_pack("{s:I}", "pages", (json_int_t)pages);
	return 0;
}

static int cache_budget(const json_t *in, json_t **ret_out)
{
	struct kv_compat_split s;
	int r;

	r = kv_compat_cache_budget(
		in_int(in, "available_bytes", 0),
		in_int(in, "cell_bytes", 0) * in_int(in, "kv_layers", 0) + draft_cell(in, NULL),
		in_int(in, "page_size", 1), in_int(in, "state_bytes_per_layer", 0),
		in_int(in, "linear_layers", 0), in_int(in, "draft_tokens", 0),
		in_real(in, "mamba_ratio", 0.9), &s);
	if (r)
		return r;
	*ret_out = json_pack("{s:I, s:I, s:I}", "kv_pages", (json_int_t)s.kv_pages, "mamba_chunks",
			     (json_int_t)s.n_chunks, "bytes_per_chunk", (json_int_t)s.chunk_bytes);
	return 0;
}

static int resolve_max_num_tokens(const json_t *in, json_t **ret_out)
{
	int64_t limit = in_int(in, "max_total_tokens", 0), tokens;
	int r;

	r = kv_compat_max_tokens(in_int(in, "profiled_pages", 0), in_int(in, "page_size", 1),
				 has(in, "max_total_tokens") ? &limit : NULL, &tokens);
	if (r)
		return r;
	*ret_out = json_pack("{s:I}", "tokens", (json_int_t)tokens);
	return 0;
}

static int draft_cell_size(const json_t *in, json_t **ret_out)
{
	int64_t bytes = has(in, "override")
				? in_int(in, "override", 0)
				: in_int(in, "draft_cell_bytes", 0) * in_int(in, "draft_layers", 0);

	*ret_out = json_pack("{s:I}", "bytes_per_token", (json_int_t)bytes);
	return 0;
}

static int layer_divisor(const json_t *in, json_t **ret_out)
{
	struct kv_compat_window window;
	int64_t slab;

	in_window(in, "window", &window);
	slab = kv_compat_slab_size(in_text(in, "layers", ""), &window,
				   in_bool(in, "flat_ext", false));
	*ret_out = json_pack("{s:I}", "divisor",
			     (json_int_t)(slab ? slab : in_int(in, "num_layers", 0)));
	return 0;
}

static int group_specs(const json_t *in, json_t **ret_out)
{
	const char *layers = in_text(in, "layers", "");
	size_t n = strlen(layers), n_groups;
	struct kv_compat_group *groups = golden_alloc(n, sizeof(*groups));
	uint32_t *of = golden_alloc(n, sizeof(*of));
	struct kv_compat_window window;
	json_t *specs = json_array(), *runs = json_array();
	int r;

	in_window(in, "window", &window);
	r = kv_compat_groups(layers, &window, in_int(in, "page_size", 1), groups, &n_groups, of);
	for (size_t i = 0; !r && i < n_groups; i++)
		json_array_append_new(specs, out_group(&groups[i]));
	for (size_t i = 0; !r && i < n; i++)
		out_run(runs, json_string(groups[of[i]].id));
	*ret_out = json_pack("{s:o, s:o}", "specs", specs, "layer_group_ids_rle", runs);
	return r;
}

static int slab_group_size(const json_t *in, json_t **ret_out)
{
	const char *layers = in_text(in, "layers", "");
	size_t n = strlen(layers);
	int64_t *index = golden_alloc(n, sizeof(*index)), slab;
	struct kv_compat_window window;
	json_t *occurrence;

	in_window(in, "window", &window);
	slab = kv_compat_slab_size(layers, &window, in_bool(in, "flat_ext", false));
	kv_compat_occurrence(layers, index);
	occurrence = out_ints(index, n);
	*ret_out = json_pack("{s:o, s:o}", "group_size", slab ? json_integer(slab) : json_null(),
			     "occurrence_index", occurrence);
	return 0;
}

static int page_counts(const json_t *in, json_t **ret_out)
{
	const json_t *specs = json_object_get(in, "specs");
	size_t n = json_array_size(specs);
	struct kv_compat_group *groups = golden_alloc(n, sizeof(*groups));
	int64_t *pages = golden_alloc(n, sizeof(*pages));
	struct kv_compat_load load = {
		.n_requests = in_int(in, "max_live_requests", 0),
		.max_scheduled = in_int(in, "max_scheduled_tokens", 0),
		.max_total = in_int(in, "max_total_tokens", 0),
		.max_context = in_int(in, "max_context_len", 0),
		.decode_tokens = in_int(in, "decode_input_tokens", 1),
		.overlap_depth = in_int(in, "overlap_schedule_depth", 0),
		.margin = in_int(in, "safety_margin", 0),
	};
	json_t *counts;
	int r;

	for (size_t i = 0; i < n; i++)
		group_of(json_array_get(specs, i), &groups[i]);
	r = kv_compat_page_counts(groups, n, &load, pages);
	if (!own_load_blocks(groups, n, &load, r, pages))
		return GOLDEN_OWN_DIFFERS;
	if (r)
		return r;
	counts = json_object();
	for (size_t i = 0; i < n; i++)
		json_object_set_new(counts, groups[i].id, json_integer(pages[i]));
	*ret_out = json_pack("{s:o}", "counts", counts);
	return 0;
}

static int capture_width(const json_t *in, json_t **ret_out)
{
	int64_t context = in_int(in, "max_context_len", 0), tokens = in_int(in, "max_tokens_per_req", 1);
	int64_t overlap = in_int(in, "overlap_schedule_depth", 0), columns = 0;
	struct kv_compat_group group;
	int r;

	group_of(json_object_get(in, "spec"), &group);
	r = kv_compat_capture_width(&group, context, tokens, overlap, &columns);
	if (!own_table_columns(&group, context, tokens, overlap, r, columns))
		return GOLDEN_OWN_DIFFERS;
	if (r)
		return r;
	*ret_out = json_pack("{s:I}", "columns", (json_int_t)columns);
	return 0;
}

static json_t *out_binding(const struct kv_compat_binding *b, const struct kv_compat_component *c)
{
	return json_pack("[I, s, I, s, I, I]", (json_int_t)b->tensor, c->group,
			 (json_int_t)c->layer, c->name, (json_int_t)b->bytes,
			 (json_int_t)b->row_offset);
}

static json_t *out_flat(const struct kv_compat_flat *plan)
{
	return json_pack("{s:I, s:I, s:I, s:I, s:I}", "block_size", (json_int_t)plan->block_tokens,
			 "block_bytes", (json_int_t)plan->block_bytes, "num_blocks",
			 (json_int_t)plan->n_blocks, "num_tensors", (json_int_t)plan->n_tensors,
			 "total_bytes", (json_int_t)plan->total_bytes);
}

static void tensor_name(const struct kv_compat_component *c, char *name, size_t size)
{
	snprintf(name, size, "flat_%s_%lld_%s", c->group, (long long)c->layer, c->name);
}

/* Tensors in full, and as runs of sizes: vectors have the one or the other. */
static void out_flat_tensors(json_t *out, const struct kv_compat_component *comps, size_t n,
			     const struct kv_compat_flat *plan,
			     const struct kv_compat_binding *bindings)
{
	json_t *list = json_array(), *runs = json_array();
	char name[160];

	for (size_t i = 0; i < n; i++) {
		int64_t bytes = bindings[i].bytes * plan->n_blocks;

		tensor_name(&comps[i], name, sizeof(name));
		out_run(runs, json_integer(bytes));
		json_array_append_new(list, json_pack("{s:s, s:I, s:[o]}", "name", name, "nbytes",
						      (json_int_t)bytes, "bindings",
						      out_binding(&bindings[i], &comps[i])));
		if (!i)
			json_object_set_new(out, "first_name", json_string(name));
	}
	if (n)
		json_object_set_new(out, "last_name", json_string(name));
	json_object_set_new(out, "tensors", list);
	json_object_set_new(out, "tensor_bytes_rle", runs);
}

static int flat_plan(const json_t *in, json_t **ret_out)
{
	const char *layers = in_text(in, "layers", "");
	const json_t *state = json_object_get(in, "state_const_bytes");
	size_t n_state = json_array_size(state), n;
	size_t room = strlen(layers) * (n_state + 1);
	struct kv_compat_named_bytes *named = golden_alloc(n_state, sizeof(*named));
	struct kv_compat_component *comps = golden_alloc(room, sizeof(*comps));
	struct kv_compat_binding *bindings = golden_alloc(room, sizeof(*bindings));
	struct kv_compat_flat plan;
	int64_t block = in_int(in, "block_size", 0), equalized;
	int r;

	for (size_t i = 0; i < n_state; i++) {
		json_t *pair = json_array_get(state, i);

		snprintf(named[i].name, sizeof(named[i].name), "%s",
			 json_string_value(json_array_get(pair, 0)));
		named[i].bytes = json_integer_value(json_array_get(pair, 1));
	}
	n = kv_compat_flat_components(layers, in_int(in, "kv_bytes_per_slot", 0), named, n_state,
				      comps);
	r = kv_compat_equalize(comps, n, block, in_int(in, "alignment", block), &equalized, NULL);
	if (r) {
		*ret_out = json_pack("{s:s}", "stage", "equalize");
		return r;
	}
	r = kv_compat_flat_plan(comps, n, equalized, in_int(in, "reserved_bytes_per_block", 0),
				in_int(in, "budget_bytes", 0), &plan, bindings);
	if (r) {
		*ret_out = json_pack("{s:s, s:I}", "stage", "plan_component_tensors",
				     "equalized_block_size", (json_int_t)equalized);
		return r;
	}
	*ret_out = out_flat(&plan);
	json_object_set_new(*ret_out, "equalized_block_size", json_integer(equalized));
	out_flat_tensors(*ret_out, comps, n, &plan, bindings);
	return 0;
}

static int plan_tensors(const json_t *in, json_t **ret_out)
{
	const json_t *list = json_object_get(in, "components"), *c;
	size_t n = json_array_size(list), i, at = 0;
	struct kv_compat_component *comps = golden_alloc(n, sizeof(*comps));
	struct kv_compat_binding *bindings = golden_alloc(n, sizeof(*bindings));
	int64_t *bytes = golden_alloc(n, sizeof(*bytes));
	int64_t block = in_int(in, "block_size", 0), solved, row;
	struct kv_compat_flat plan;
	json_t *tensors;
	int r;

	json_array_foreach(list, i, c)
	{
		snprintf(comps[i].group, sizeof(comps[i].group), "%s",
			 json_string_value(json_array_get(c, 0)));
		snprintf(comps[i].name, sizeof(comps[i].name), "%s",
			 json_string_value(json_array_get(c, 2)));
		comps[i].layer = json_integer_value(json_array_get(c, 1));
		comps[i].slot_bytes = json_integer_value(json_array_get(c, 3));
		comps[i].const_bytes = json_integer_value(json_array_get(c, 4));
	}
	r = kv_compat_equalize(comps, n, block, in_int(in, "alignment", 1), &solved, &row);
	if (r) {
		*ret_out = json_pack("{s:s}", "stage", "solve_page_geometry");
		return r;
	}
	r = kv_compat_slot_plan(comps, n, solved, in_int(in, "budget_bytes", 0), &plan, bindings,
				bytes);
	if (r) {
		*ret_out =
			json_pack("{s:s, s:I, s:I}", "stage", "plan_tensors", "solved_block_size",
				  (json_int_t)solved, "solved_block_bytes", (json_int_t)row);
		return r;
	}
	tensors = json_array();
	for (int64_t t = 0; t < plan.n_tensors; t++) {
		json_t *bound = json_array();
		char name[32];

		for (; at < n && bindings[at].tensor == t; at++)
			json_array_append_new(
				bound, out_binding(&bindings[at], &comps[bindings[at].component]));
		snprintf(name, sizeof(name), "flat_slab_%lld", (long long)t);
		json_array_append_new(tensors, json_pack("{s:s, s:I, s:o}", "name", name, "nbytes",
							 (json_int_t)bytes[t], "bindings", bound));
	}
	*ret_out = out_flat(&plan);
	json_object_set_new(*ret_out, "solved_block_size", json_integer(solved));
	json_object_set_new(*ret_out, "solved_block_bytes", json_integer(row));
	json_object_set_new(*ret_out, "tensors", tensors);
	return 0;
}

const struct golden_kind golden_sizes[] = {
	{"gdn_state_shapes", gdn_state_shapes},
	{"state_const_bytes", state_const_bytes},
	{"resolve_kv_dtype", resolve_kv_dtype},
	{"mha_cell_size", mha_cell_size},
	{"mla_cell_size", mla_cell_size},
	{"dsa_cell_size", dsa_cell_size},
	{"dsa_index_row", dsa_index_row},
	{"available_bytes", available_bytes},
	{"max_num_pages", max_num_pages},
	{"cache_budget", cache_budget},
	{"resolve_max_num_tokens", resolve_max_num_tokens},
	{"draft_cell_size", draft_cell_size},
	{"layer_divisor", layer_divisor},
	{"group_specs", group_specs},
	{"slab_group_size", slab_group_size, "occurrence_index"},
	{"page_counts", page_counts},
	{"capture_width", capture_width},
	{"flat_plan", flat_plan},
	{"plan_tensors", plan_tensors},
	{NULL, NULL},
};
