/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of the tensors that pools allocate, and of the whole decision. */
#include <stdio.h>
#include <string.h>

#include "alloc/compat_pools.h"
#include "tests/golden/golden.h"

static void in_shape(const json_t *in, const char *key, int64_t *ret_shape, size_t *ret_n)
{
	int64_t *dims = in_ints(in, key, ret_n);

	for (size_t i = 0; i < *ret_n && i < 4; i++)
		ret_shape[i] = dims[i];
}

static struct kv_compat_load pool_load(const json_t *in)
{
	return (struct kv_compat_load){
		.n_requests = in_int(in, "max_batch_size", 0),
		.max_scheduled = in_int(in, "max_scheduled_tokens", 0),
		.max_context = in_int(in, "max_context_len", 0),
		.decode_tokens = in_int(in, "decode_input_tokens", 1),
		.overlap_depth = in_int(in, "overlap_schedule_depth", 0),
	};
}

/* [[shape, dtype, bytes, tag, repeat], ...]: equal neighbours are one entry. */
static json_t *out_tensors(const struct kv_compat_tensors *t)
{
	json_t *list = json_array();

	for (size_t i = 0, n; i < t->n; i += n) {
		const struct kv_compat_tensor *x = &t->list[i];

		for (n = 1; i + n < t->n; n++) {
			const struct kv_compat_tensor *y = &t->list[i + n];

			if (x->n_dims != y->n_dims || strcmp(x->dtype, y->dtype) ||
			    memcmp(x->shape, y->shape, x->n_dims * sizeof(x->shape[0])) ||
			    x->tag != y->tag)
				break;
		}
		json_array_append_new(list, json_pack("[o, s, I, s?, I]",
						      out_ints(x->shape, x->n_dims), x->dtype,
						      (json_int_t)x->bytes, x->tag, (json_int_t)n));
	}
	return list;
}

static json_t *out_counts(const struct kv_compat_group *groups, const int64_t *counts, size_t n)
{
	json_t *by_group = json_object();

	for (size_t i = 0; i < n; i++)
		json_object_set_new(by_group, groups[i].id, json_integer(counts[i]));
	return by_group;
}

static int mha_pool(const json_t *in, json_t **ret_out)
{
	struct kv_compat_mha_out *out = golden_alloc(1, sizeof(*out));
	struct kv_compat_mha_pool pool = {
		.tokens = in_int(in, "size_tokens", 0),
		.page_size = in_int(in, "page_size", 1),
		.dtype = in_text(in, "kv_dtype", ""),
		.local_heads = in_int(in, "local_kv_heads", 0),
		.head_dim = in_int(in, "head_dim", 0),
		.n_layers = (size_t)in_int(in, "layers", 0),
		.layers = in_text(in, "layer_types", ""),
		.flat_ext = in_bool(in, "flat_ext", false),
		.disaggregated = in_bool(in, "pd_disaggregation", false),
		.load = pool_load(in),
		.has_state = json_is_array(json_object_get(in, "conv_shape")),
		.conv_dtype = in_text(in, "conv_dtype", "bfloat16"),
		.ssm_dtype = in_text(in, "ssm_dtype", "float32"),
	};
	json_t *buffers, *specs;
	int r;

	in_shape(in, "conv_shape", pool.conv_shape, &pool.n_conv_dims);
	in_shape(in, "ssm_shape", pool.ssm_shape, &pool.n_ssm_dims);
	in_window(in, "window", &pool.window);
	r = kv_compat_mha_tensors(&pool, out);
	if (r)
		return r;
	buffers = json_array();
	specs = json_array();
	for (size_t l = 0; l < pool.n_layers; l++)
		json_array_append_new(buffers, out->k_buffer[l] < 0
						       ? json_null()
						       : json_integer(out->k_buffer[l]));
	for (size_t i = 0; i < out->n_groups; i++)
		json_array_append_new(specs, out_group(&out->groups[i]));
	*ret_out = json_pack("{s:o, s:I, s:o, s:[I, I], s:b, s:I, s:o, s:o, s:o}", "tensors",
			     out_tensors(&out->tensors), "total_bytes",
			     (json_int_t)out->tensors.total_bytes, "k_buffer_of_layer", buffers,
			     "kv_size_bytes", (json_int_t)out->k_bytes, (json_int_t)out->v_bytes,
			     "supports_hierarchical", out->hierarchical, "state_slab_pairs",
			     (json_int_t)out->n_state_pairs, "state_rows",
			     out->state_rows ? json_integer(out->state_rows) : json_null(), "specs",
			     specs, "counts", out_counts(out->groups, out->counts, out->n_groups));
	return 0;
}

static int latent_pool(const json_t *in, json_t **ret_out)
{
	struct kv_compat_tensors *tensors = golden_alloc(1, sizeof(*tensors));
	struct kv_compat_mla_pool pool = {
		.tokens = in_int(in, "size_tokens", 0),
		.page_size = in_int(in, "page_size", 1),
		.dtype = in_text(in, "kv_dtype", ""),
		.model_dtype = in_text(in, "model_dtype", "bfloat16"),
		.per_token_head = !strcmp(in_text(in, "quant_method", ""), "per_token_head"),
		.lora = in_int(in, "kv_lora_rank", 0),
		.rope = in_int(in, "qk_rope_head_dim", 0),
		.n_layers = (size_t)in_int(in, "layers", 0),
		.index_head_dim = in_int(in, "index_head_dim", 0),
	};
	int64_t page_bytes, parts = pool.per_token_head ? 3 : 1;
	json_t *offsets = json_array();
	int r;

	r = kv_compat_mla_tensors(&pool, tensors, &page_bytes);
	/* Where a layer's buffers stand in the list handed to the other side of a transfer. */
	for (int64_t l = 0; l < 2 && l < (int64_t)pool.n_layers; l++) {
		json_t *of_layer = json_array();

		for (int64_t k = 0; k < parts + !!pool.index_head_dim; k++)
			json_array_append_new(of_layer,
					      json_integer(k * (int64_t)pool.n_layers + l));
		json_array_append_new(offsets, of_layer);
	}
	*ret_out = json_pack("{s:o, s:I, s:I, s:o}", "tensors", out_tensors(tensors), "total_bytes",
			     (json_int_t)tensors->total_bytes, "page_size_bytes",
			     (json_int_t)page_bytes, "layerwise_offsets_first2", offsets);
	return r;
}

static int mamba_pool(const json_t *in, json_t **ret_out)
{
	struct kv_compat_mamba_out *out = golden_alloc(1, sizeof(*out));
	struct kv_compat_mamba_pool pool = {
		.size = in_int(in, "size", 0),
		.n_layers = in_int(in, "num_layers", 0),
		.n_draft_tokens = in_int(in, "speculative_num_draft_tokens", 0),
		.max_requests = in_int(in, "max_req_pool_size", 0),
		.conv_dtype = in_text(in, "conv_dtype", "bfloat16"),
		.ssm_dtype = in_text(in, "ssm_dtype", "float32"),
	};

	in_shape(in, "conv_shape", pool.conv_shape, &pool.n_conv_dims);
	in_shape(in, "ssm_shape", pool.ssm_shape, &pool.n_ssm_dims);
	kv_compat_mamba_tensors(&pool, out);
	*ret_out = json_pack(
		"{s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "tensors", out_tensors(&out->tensors),
		"total_bytes", (json_int_t)out->tensors.total_bytes, "base_size",
		(json_int_t)pool.size, "current_input_size", (json_int_t)out->current_size,
		"draft_slots_per_req", (json_int_t)out->draft_per_request, "draft_base",
		(json_int_t)out->draft_base, "draft_total_slots", (json_int_t)out->draft_total,
		"total_size", (json_int_t)out->total_rows);
	return 0;
}

/* Tensors of equal shape and type, in order of first appearance: [[shape, dtype, n], ...] */
static json_t *out_kinds(const struct kv_compat_tensors *t)
{
	json_t *kinds = json_array(), *kind;

	for (size_t i = 0; i < t->n; i++) {
		json_t *shape = out_ints(t->list[i].shape, t->list[i].n_dims);
		json_t *found = NULL;
		size_t k;

		json_array_foreach(kinds, k,
				   kind) if (json_equal(json_array_get(kind, 0), shape) &&
					     !strcmp(json_string_value(json_array_get(kind, 1)),
						     t->list[i].dtype)) found =
			json_array_get(kind, 2);
		if (found) {
			json_integer_set(found, json_integer_value(found) + 1);
			json_decref(shape);
		} else {
			json_array_append_new(kinds,
					      json_pack("[o, s, i]", shape, t->list[i].dtype, 1));
		}
	}
	return kinds;
}

static int v4_pool(const json_t *in, json_t **ret_out)
{
	static const char *const names[] = {"swa", "compressed", "compressor_state", "indexer",
					    "indexer_state"};
	struct kv_compat_tensors *tensors = golden_alloc(1, sizeof(*tensors));
	struct kv_compat_v4 v4 = {
		.head_dim = in_int(in, "head_dim", 512),
		.rope_dim = in_int(in, "rope_dim", 64),
		.index_head_dim = in_int(in, "index_head_dim", 128),
		.window = in_int(in, "window", 128),
		.page_size = in_int(in, "page_size", 256),
		.fp4_indexer = in_bool(in, "fp4_indexer", false),
	};
	struct kv_compat_load load = pool_load(in);
	struct kv_compat_group groups[KV_COMPAT_V4_GROUPS];
	int64_t counts[KV_COMPAT_V4_GROUPS], bytes[KV_COMPAT_V4_GROUPS];
	int64_t tokens = in_int(in, "size_tokens", 0);
	size_t n_ratios, n, at = 0;
	int64_t *ratios = in_ints(in, "ratios", &n_ratios);
	json_t *first, *required;
	int r;

	r = kv_compat_v4_init(&v4, ratios, n_ratios, NULL, 0);
	if (r)
		return r;
	r = kv_compat_v4_tensors(&v4, tokens, in_int(in, "layer_num", 0), &load, tensors, counts);
	if (r)
		return r;
	n = kv_compat_v4_groups(&v4, groups, bytes);
	required = json_array();
	first = json_array();
	for (size_t i = 0; i < n; i++)
		if (groups[i].family == KV_COMPAT_HISTORY)
			json_array_append_new(required, json_string(groups[i].id));
	for (size_t l = 0; l < v4.n_layers && l < 5; l++) {
		size_t has = v4.ratio[l] == 1 ? 1 : v4.ratio[l] == 4 ? 5 : 3;
		json_t *layer = json_object();

		for (size_t k = 0; k < 5; k++)
			json_object_set_new(layer, names[k],
					    k < has ? out_ints(tensors->list[at + k].shape,
							       tensors->list[at + k].n_dims)
						    : json_null());
		at += has;
		json_array_append_new(first, layer);
	}
	*ret_out =
		json_pack("{s:o, s:I, s:o, s:I, s:I, s:o, s:o}", "tensor_kinds", out_kinds(tensors),
			  "total_bytes", (json_int_t)tensors->total_bytes, "first_layers", first,
			  "num_pages", (json_int_t)(tokens / v4.page_size + 1),
			  "swa_capacity_slots", (json_int_t)(counts[0] * 64), "required_groups",
			  required, "counts", out_counts(groups, counts, n));
	return 0;
}

static void in_geometry(const json_t *g, struct kv_compat_server *s)
{
	size_t n;
	int64_t *ratios = in_ints(g, "ratios", &n);

	for (size_t i = 0; i < n && i < KV_COMPAT_MAX_LAYERS; i++)
		s->ratios[i] = ratios[i];
	s->n_ratios = n;
	s->n_layers = (size_t)in_int(g, "layers", 0);
	s->layers = in_text(g, "codes", "");
	in_window(g, "window", &s->window);
	s->v4_window = in_int(g, "window", 0);
	s->n_kv_heads = in_int(g, "kv", 0);
	s->head_dim = in_int(g, "hd", 0);
	s->hybrid_arch = in_bool(g, "hybrid_arch", false);
	s->lora = in_int(g, "lora", 0);
	s->rope = in_int(g, "rope", 0);
	s->index_head_dim = in_int(g, "idx", 0);
	s->n_nextn = (size_t)in_int(g, "nextn", 0);
	s->gdn = (struct kv_compat_gdn){
		.key_head_dim = in_int(g, "khd", 0),
		.n_key_heads = in_int(g, "kh", 0),
		.value_head_dim = in_int(g, "vhd", 0),
		.n_value_heads = in_int(g, "vh", 0),
		.conv_kernel = in_int(g, "conv", 0),
		.attn_tp = s->attn_tp,
		.conv_itemsize = 2,
		.ssm_itemsize = 4,
	};
}

static json_t *out_pool(const struct kv_compat_server *s, const struct kv_compat_decision *d,
			bool draft)
{
	static const char *const inner[] = {"MHATokenToKVPool", "MLATokenToKVPool",
					    "DSATokenToKVPool", "MHATokenToKVPool",
					    "DeepseekV4TokenToKVPool"};
	size_t n_layers = draft ? d->draft_layers : d->pool_layers;
	json_t *groups = json_array(), *pool;

	for (size_t i = 0; i < (draft ? d->n_draft_groups : d->n_groups); i++)
		json_array_append_new(groups,
				      json_string(draft ? d->draft_groups[i].id : d->groups[i].id));
	pool = json_pack("{s:s, s:I, s:I, s:I, s:o}", "type",
			 d->mapped ? "LayerMappedKVPool" : inner[s->kind], "layers",
			 (json_int_t)n_layers, "size", (json_int_t)d->tokens, "page_size",
			 (json_int_t)d->block_size, "groups", groups);
	if (d->mapped) {
		json_t *map = json_array();
		bool identity = !draft && d->map_step == 1;

		json_object_set_new(pool, "inner", json_string(inner[s->kind]));
		/* An identity map is listed as one run. */
		if (identity)
			json_array_append_new(map, json_pack("[i, I]", 0, (json_int_t)n_layers));
		for (size_t i = 0; !identity && i < n_layers; i++)
			json_array_append_new(
				map, json_pack("[I, I]",
					       draft ? (json_int_t)i
						     : (json_int_t)(d->map_first +
								    (int64_t)i * d->map_step),
					       (json_int_t)i));
		json_object_set_new(pool, "mapping", map);
	}
	return pool;
}

static json_t *out_class(const struct kv_compat_decision *d)
{
	json_t *backend = json_pack("{s:s}", "type", d->backend_class);

	if (d->full_class) {
		json_object_set_new(backend, "full", json_string(d->full_class));
		json_object_set_new(backend, "flat_state_active",
				    json_boolean(d->flat_state_active));
	}
	return backend;
}

static json_t *positive_or_null(int64_t value)
{
	return value ? json_integer(value) : json_null();
}

static int create_attn_components(const json_t *in, json_t **ret_out)
{
	static const char *const kinds[] = {"MHA", "MLA", "DSA", "GDN", "V4"};
	struct kv_compat_server *s = golden_alloc(1, sizeof(*s));
	struct kv_compat_decision *d = golden_alloc(1, sizeof(*d));
	const json_t *limit = json_object_get(in, "max_total_tokens");
	int r;

	for (int i = 0; i < 5; i++)
		if (!strcmp(kinds[i], in_text(in, "kind", "")))
			s->kind = (enum kv_compat_kind)i;
	s->attn_tp = in_int(in, "attn_tp", 1);
	s->attn_dp = in_int(in, "attn_dp", 1);
	s->world_size = in_int(in, "world_size", 1);
	s->flat_ext = in_bool(in, "flat_ext", false);
	s->min_free_bytes = in_int(in, "min_free_bytes", 0);
	s->total_gib = in_real(in, "total_gpu_memory_gib", 0);
	s->utilization = in_real(in, "util", kv_compat_utilization(s->world_size));
	s->block_size = in_int(in, "block_size", 64);
	s->kv_dtype = in_text(in, "kv_dtype", "auto");
	s->per_token_head = !strcmp(in_text(in, "quant", "none"), "per_token_head");
	s->max_num_seqs = in_int(in, "max_num_seqs", 160);
	s->chunked_prefill = in_int(in, "chunk", 8192);
	s->context = in_int(in, "context_len", 0);
	s->has_max_total = json_is_integer(limit);
	s->max_total_tokens = json_integer_value(limit);
	s->speculative = in_text(in, "spec", NULL);
	s->spec_tokens = in_int(in, "spec_tokens", 0);
	s->backend = in_text(in, "backend", NULL);
	s->mamba_ratio = in_real(in, "ratio", 0.9);
	s->has_max_mamba = json_is_integer(json_object_get(in, "max_mamba"));
	s->max_mamba = in_int(in, "max_mamba", 0);
	s->fp4_indexer = in_bool(in, "fp4", in_bool(in, "cfg_fp4", false));
	s->overlap_depth = in_int(in, "overlap", 0);
	in_geometry(json_object_get(in, "geometry"), s);
	r = kv_compat_decide(s, d);
	if (r)
		return r;
	*ret_out = json_pack(
		"{s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:s?, s:I}",
		"effective_block_size", (json_int_t)d->block_size, "max_num_tokens",
		(json_int_t)d->tokens, "num_device_pages", (json_int_t)d->device_pages,
		"mamba_chunks", (json_int_t)d->n_chunks, "mamba_pool_rows",
		positive_or_null(d->mamba_rows), "mamba_pool_base", positive_or_null(d->mamba_base),
		"backend", out_class(d), "pool", out_pool(s, d, false), "draft_backend",
		d->draft_class ? json_pack("{s:s}", "type", d->draft_class) : json_null(),
		"draft_pool", d->draft_class ? out_pool(s, d, true) : json_null(),
		"server_attention_backend", d->server_backend, "allocated_bytes",
		(json_int_t)d->allocated_bytes);
	return 0;
}

const struct golden_kind golden_pools[] = {
	{"mha_pool", mha_pool},
	{"mla_pool", latent_pool},
	{"dsa_pool", latent_pool},
	{"simple_mamba_pool", mamba_pool},
	{"v4_pool", v4_pool},
	{"create_attn_components", create_attn_components},
	{NULL, NULL},
};
