/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of pages, strides, groups and block counts of the other engine. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/compat_vllm.h"
#include "tests/golden/golden.h"

/* The class of error in the reference's language. */
static const char *class_of(int fault)
{
	return fault == KV_FAULT_ASSERTION     ? "AssertionError"
	       : fault == KV_FAULT_BAD_CONFIG  ? "ValueError"
	       : fault == KV_FAULT_UNSUPPORTED ? "NotImplementedError"
					       : kv_fault_name(fault);
}

/* Errors are outputs here. */
static int failed(int fault, json_t **ret_out)
{
	*ret_out = json_pack("{s:s}", "error", class_of(fault));
	return 0;
}

static json_t *number_or_error(int fault, int64_t number)
{
	return fault ? json_pack("{s:s}", "error", class_of(fault)) : json_integer(number);
}

static void put_text(const json_t *in, const char *key, char *to, size_t size)
{
	snprintf(to, size, "%s", in_text(in, key, ""));
}

static void spec_of(const json_t *in, struct kv_vspec *s)
{
	const char *kind = in_text(in, "kind", "");
	const json_t *fraction = json_object_get(in, "tokens_per_state"), *shape;
	size_t i;

	memset(s, 0, sizeof(*s));
	for (int k = 0; k <= KV_VSPEC_HIDDEN; k++)
		if (!strcmp(kv_vspec_name((enum kv_vspec_kind)k), kind))
			s->kind = (enum kv_vspec_kind)k;
	s->block = in_int(in, "block_size", 0);
	s->n_heads = in_int(in, "num_kv_heads", 1);
	s->head = in_int(in, "head_size", 0);
	s->head_v = in_int(in, "head_size_v", -1);
	put_text(in, "dtype", s->dtype, sizeof(s->dtype));
	put_text(in, "cache_dtype_str", s->cache_dtype, sizeof(s->cache_dtype));
	put_text(in, "model_version", s->version, sizeof(s->version));
	put_text(in, "mamba_cache_mode", s->mode, sizeof(s->mode));
	s->itemsize = kv_compat_itemsize(s->dtype);
	s->quant = in_int(in, "kv_quant_mode", 0);
	s->padded = in_int(in, "page_size_padded", 0);
	s->head_slots = in_int(in, "num_head_slots", 0);
	s->content = in_int(in, "state_content_bytes", 0);
	s->tokens_per_state = in_int(in, "tokens_per_state", 1);
	s->per = 1;
	if (json_is_array(fraction)) {
		s->tokens_per_state = json_integer_value(json_array_get(fraction, 0));
		s->per = json_integer_value(json_array_get(fraction, 1));
	}
	s->window = in_int(in, "sliding_window", 0);
	s->extra = in_int(in, "extra_retained_tokens", 0);
	s->chunk = in_int(in, "attention_chunk_size", 0);
	s->rswa = in_int(in, "rswa_window", 0);
	s->sink = in_int(in, "sink_len", 0);
	s->alignment = in_int(in, "alignment", 0);
	s->n_spec = in_int(in, "num_speculative_blocks", 0);
	s->n_checkpoints = in_int(in, "num_prefill_checkpoint_blocks", 0);
	json_array_foreach(json_object_get(in, "shapes"), i, shape)
	{
		const char *dtype =
			json_string_value(json_array_get(json_object_get(in, "dtypes"), i));
		size_t n;
		int64_t *dims = ints_of(shape, &n);

		s->state_bytes += kv_compat_shape_bytes(dims, n, kv_compat_itemsize(dtype));
		for (size_t k = 0; k < n; k++)
			s->state_shape = s->state_shape * 1000003 + (uint64_t)dims[k];
		s->state_shape = s->state_shape * 31 + (uint64_t)kv_compat_itemsize(dtype);
	}
}

static void config_of(const json_t *in, struct kv_vconfig *c)
{
	memset(c, 0, sizeof(*c));
	c->max_len = in_int(in, "max_model_len", 4096);
	c->in_flight = in_int(in, "max_in_flight", 2048);
	c->dcp = in_int(in, "dcp", 1);
	c->encoder = in_int(in, "enc", 0);
	c->has_override = json_is_integer(json_object_get(in, "override"));
	c->override_blocks = in_int(in, "override", 0);
	c->disable_hybrid = in_bool(in, "disable_hybrid", false);
	c->block = in_int(in, "block_size", 16);
	c->caching = in_bool(in, "caching", true);
	c->has_unit = json_is_integer(json_object_get(in, "unit"));
	c->unit = in_int(in, "unit", 0);
	c->auto_len = in_int(in, "orig", 0) == -1;
	snprintf(c->mode, sizeof(c->mode), "%s", in_text(in, "mamba_mode", "none"));
	snprintf(c->layout, sizeof(c->layout), "%s", in_text(in, "layout", "LBNHC"));
}

static int page_size(const json_t *in, json_t **ret_out)
{
	struct kv_vconfig c;
	struct kv_vspec s;
	int64_t bytes = 0, blocks = 0;
	int r, r_bytes, r_blocks;

	spec_of(json_object_get(in, "spec"), &s);
	config_of(json_object_get(in, "config"), &c);
	r = kv_vspec_init(&s);
	if (r)
		return failed(r, ret_out);
	r_bytes = kv_vspec_max_bytes(&s, &c, &bytes);
	r_blocks = kv_vspec_max_blocks(&s, &c, &blocks);
	*ret_out = json_pack(
		"{s:I, s:I, s:I, s:I, s:s, s:I, s:o, s:o, s:I}", "page_size_bytes",
		(json_int_t)kv_vspec_page(&s), "num_states", (json_int_t)kv_vspec_states(&s),
		"num_heads", (json_int_t)kv_vspec_slots(&s), "state_content_size_bytes",
		(json_int_t)kv_vspec_content(&s), "kind", kv_vspec_name(s.kind),
		"unpadded_page_size_bytes", (json_int_t)kv_vspec_dense(&s),
		"max_memory_usage_bytes", number_or_error(r_bytes, bytes), "max_num_blocks_per_req",
		number_or_error(r_blocks, blocks), "max_admission_blocks_per_request",
		(json_int_t)kv_vspec_admission(&s, &c));
	return 0;
}

static int quant_mode(const json_t *in, json_t **ret_out)
{
	struct kv_vquant q;

	kv_compat_quant_mode(in_text(in, "kv_cache_dtype", ""), &q);
	*ret_out = json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:o}", "mode", q.mode, "mode_name",
			     q.name, "quantized", q.mode != 0, "per_token_head",
			     q.mode >= 2 && q.mode <= 4, "nvfp4", q.mode == 5, "turboquant",
			     q.mode >= 6 && q.mode <= 9, "storage_element_bytes",
			     q.storage_bytes ? json_integer(q.storage_bytes) : json_null());
	return 0;
}

static int layout_strides(const json_t *in, json_t **ret_out)
{
	const char *layout = in_text(in, "layout", "LBNHC");
	int64_t n_layers = in_int(in, "num_layers", 1), n_blocks = in_int(in, "num_blocks", 1);
	int64_t kernel = in_int(in, "kernel_block_size", 0), shape[5], strides[5], view[4];
	int64_t view_strides[5];
	struct kv_vspec s;
	int r;

	spec_of(json_object_get(in, "spec"), &s);
	r = kv_vspec_init(&s);
	if (!r)
		r = kv_vspec_strides(&s, layout, n_layers, n_blocks, 0,
				     in_int(in, "interleaved_block_stride", 0), strides);
	if (r)
		return failed(r, ret_out);
	shape[0] = n_layers;
	shape[1] = n_blocks;
	shape[2] = kv_vspec_slots(&s);
	shape[3] = kv_vspec_states(&s);
	shape[4] = kv_vspec_content(&s);
	*ret_out = json_pack("{s:o, s:o}", "manager_shape_LBHNC", out_ints(shape, 5),
			     "manager_strides_LBHNC", out_ints(strides, 5));
	if (!kernel)
		return 0;
	r = kv_vspec_kernel_view(&s, layout, n_blocks, kernel, strides, view, view_strides);
	json_object_set_new(*ret_out, "kernel_view",
			    r ? json_pack("{s:s}", "error", class_of(r))
			      : json_pack("{s:o, s:o}", "shape_BHNC", out_ints(view, 4),
					  "strides_LBHNC", out_ints(view_strides, 5)));
	return 0;
}

/* The vector lists places; their addresses follow from the strides that were computed. */
static void ask_addresses(const json_t *expected, json_t *out)
{
	const json_t *view = json_object_get(json_object_get(out, "kernel_view"), "strides_LBHNC");
	const json_t *strides = view ? view : json_object_get(out, "manager_strides_LBHNC");
	json_t *places = json_object_get(expected, "addresses"), *place, *list;
	size_t i;

	if (!places || !strides)
		return;
	list = json_array();
	json_array_foreach(places, i, place)
	{
		json_int_t at = 0;

		for (size_t k = 0; k < 4; k++)
			at += json_integer_value(json_array_get(json_array_get(place, 0), k)) *
			      json_integer_value(json_array_get(strides, k));
		json_array_append_new(list, json_pack("[O, I]", json_array_get(place, 0), at));
	}
	json_object_set_new(out, "addresses", list);
}

static json_t *out_spec(const struct kv_vspec *s, int64_t page)
{
	json_t *out = json_pack("{s:s, s:I, s:I}", "kind", kv_vspec_name(s->kind), "block_size",
				(json_int_t)s->block, "page_size_bytes", (json_int_t)page);

	if (s->window)
		json_object_set_new(out, "sliding_window", json_integer(s->window));
	if (s->chunk)
		json_object_set_new(out, "attention_chunk_size", json_integer(s->chunk));
	if (s->padded)
		json_object_set_new(out, "page_size_padded", json_integer(s->padded));
	return out;
}

static json_t *out_layers(const struct kv_vplan *p, const struct kv_vworker *w,
			  const uint32_t *layer, size_t n)
{
	json_t *names = json_array();

	for (size_t i = 0; i < n; i++)
		if (w->has[layer[i]])
			json_array_append_new(names, json_string(p->layer[layer[i]].name));
	return names;
}

static json_t *out_vgroup(const struct kv_vplan *p, const struct kv_vworker *w,
			  const struct kv_vgroup *g)
{
	json_t *spec = out_spec(&g->spec, kv_vgroup_page(p, w, g));

	if (g->uniform) {
		json_t *layers = json_object();

		for (size_t i = 0; i < g->n; i++)
			if (w->has[g->layer[i]]) {
				const struct kv_vlayer *l = &p->layer[g->layer[i]];
				json_t *own = out_spec(&l->spec, kv_vspec_page(&l->spec));

				json_object_del(own, "sliding_window");
				json_object_del(own, "page_size_padded");
				json_object_set_new(layers, l->name, own);
			}
		json_object_del(spec, "sliding_window");
		json_object_del(spec, "page_size_padded");
		json_object_set_new(spec, "uniform_type", json_true());
		json_object_set_new(spec, "layers", layers);
	}
	return json_pack("{s:o, s:o}", "layers", out_layers(p, w, g->layer, g->n), "spec", spec);
}

static json_t *out_worker(const struct kv_vplan *p, const struct kv_vworker *w)
{
	json_t *groups = json_array(), *tensors = json_array();

	for (size_t g = 0; g < p->n_groups; g++)
		json_array_append_new(groups, out_vgroup(p, w, &p->group[g]));
	for (size_t t = 0; t < w->n_tensors; t++) {
		const struct kv_vtensor *x = &w->tensor[t];

		json_array_append_new(
			tensors,
			json_pack("{s:I, s:o, s:I, s:I, s:I}", "size", (json_int_t)x->size,
				  "layers", out_layers(p, w, x->layer, x->n), "layer_stride",
				  (json_int_t)x->layer_stride, "block_stride",
				  (json_int_t)x->block_stride, "offset", (json_int_t)x->offset));
	}
	return json_pack("{s:I, s:o, s:o, s:b, s:b, s:b}", "num_blocks", (json_int_t)w->n_blocks,
			 "groups", groups, "tensors", tensors, "needs_zeroing",
			 w->has_mamba || w->mixed, "has_mamba", w->has_mamba, "mixed_precision",
			 w->mixed);
}

/* Printed with nine decimals. */
static double rounded(double x)
{
	char text[64];

	snprintf(text, sizeof(text), "%.9f", x);
	return strtod(text, NULL);
}

static int kv_config(const json_t *in, json_t **ret_out)
{
	struct kv_vplan *p = golden_alloc(1, sizeof(*p));
	json_t *workers = json_object_get(in, "workers"), *list, *pair, *out, *block, *max;
	int64_t scheduler, hash;
	struct kv_vconfig c;
	size_t i, k;
	int r = 0;

	config_of(json_object_get(in, "config"), &c);
	json_array_foreach(workers, i, list)
	{
		p->worker[p->n_workers].available = json_integer_value(
			json_array_get(json_object_get(in, "available_memory"), i));
		json_array_foreach(list, k, pair)
		{
			const char *name = json_string_value(json_array_get(pair, 0));
			size_t l;

			for (l = 0; l < p->n_layers && strcmp(p->layer[l].name, name); l++)
				;
			if (l == p->n_layers) {
				p->n_layers++;
				p->layer[l].name = name;
				spec_of(json_array_get(pair, 1), &p->layer[l].spec);
				r = r ? r : kv_vspec_init(&p->layer[l].spec);
			}
			p->worker[p->n_workers].has[l] = true;
		}
		p->n_workers++;
	}
	if (!r)
		r = kv_vplan_make(p, &c);
	if (r)
		return failed(r, ret_out);
	out = json_array();
	block = json_array();
	max = json_array();
	for (i = 0; i < p->n_workers; i++) {
		json_array_append_new(out, out_worker(p, &p->worker[i]));
		json_array_append_new(block, json_integer(p->worker[i].block_bytes));
		json_array_append_new(max, json_integer(p->worker[i].max_bytes));
	}
	r = kv_vplan_unit(p, &c, &scheduler, &hash);
	*ret_out =
		json_pack("{s:o, s:I, s:I, s:f, s:o, s:o, s:o}", "workers", out, "max_model_len",
			  (json_int_t)p->max_len, "capacity_tokens", (json_int_t)p->capacity_tokens,
			  "max_concurrency", rounded(p->concurrency), "bytes_per_block", block,
			  "max_memory_usage_bytes", max, "scheduler_and_hash_block_size",
			  r ? json_pack("{s:s}", "error", class_of(r))
			    : json_pack("[I, I]", (json_int_t)scheduler, (json_int_t)hash));
	return 0;
}

const struct golden_kind golden_vllm[] = {
	{"page_size", page_size},
	{"quant_mode", quant_mode},
	{"layout_strides", layout_strides, NULL, ask_addresses},
	{"kv_config", kv_config},
	{NULL, NULL},
};
