/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Models from GGUF metadata. The keys that matter here are put into an object under the names of a
 * Hugging Face config, so that one reader knows what architectures mean.
 *
 *	magic "GGUF", u32 version, u64 n_tensors, u64 n_pairs, pairs of
 *	(string key, u32 type, value); string: u64 length, bytes; array: u32 type, u64 n, values
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "include/internal/error.h"
#include "include/internal/public.h"
#include "libclient/arch.h"

enum gguf_type {
	GGUF_U8,
	GGUF_I8,
	GGUF_U16,
	GGUF_I16,
	GGUF_U32,
	GGUF_I32,
	GGUF_F32,
	GGUF_BOOL,
	GGUF_STRING,
	GGUF_ARRAY,
	GGUF_U64,
	GGUF_I64,
	GGUF_F64,
};

struct cursor {
	const uint8_t *data;
	size_t len, at;
	bool broken; /* a read went past the end */
};

static uint64_t take(struct cursor *c, size_t n)
{
	uint64_t x = 0;

	if (c->len - c->at < n) {
		c->broken = true;
		c->at = c->len;
		return 0;
	}
	for (size_t i = 0; i < n; i++)
		x |= (uint64_t)c->data[c->at + i] << (8 * i);
	c->at += n;
	return x;
}

/* A string's bytes; NULL at the end of the data. */
static const char *take_text(struct cursor *c, size_t *ret_len)
{
	uint64_t len = take(c, 8);
	const char *text = (const char *)c->data + c->at;

	*ret_len = 0;
	if (c->broken || c->len - c->at < len) {
		c->broken = true;
		c->at = c->len;
		return NULL;
	}
	c->at += len;
	*ret_len = len;
	return text;
}

static size_t size_of(uint32_t type)
{
	static const uint8_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

	return type < sizeof(sizes) ? sizes[type] : 0;
}

/* A value as JSON; NULL: one that nobody asks for (a float, a long list), or broken data. */
static json_t *take_value(struct cursor *c, uint32_t type, bool nested)
{
	const char *text;
	size_t len;
	uint64_t n, bits;
	uint32_t item;
	json_t *list;

	switch (type) {
	case GGUF_STRING:
		text = take_text(c, &len);
		return text ? json_stringn(text, len) : NULL;
	case GGUF_ARRAY:
		item = (uint32_t)take(c, 4);
		n = take(c, 8);
		if (nested || c->broken) {
			c->broken = true;
			return NULL;
		}
		list = n <= KV_ARCH_MAX_LAYERS ? json_array() : NULL;
		for (uint64_t i = 0; i < n && !c->broken; i++) {
			json_t *v = take_value(c, item, true);

			if (list)
				json_array_append_new(list, v ? v : json_null());
			else
				json_decref(v);
		}
		return list;
	case GGUF_F32:
	case GGUF_F64:
		take(c, size_of(type));
		return NULL;
	case GGUF_BOOL:
		return json_boolean(take(c, 1));
	default:
		if (!size_of(type)) {
			c->broken = true;
			return NULL;
		}
		bits = take(c, size_of(type));
		return bits > INT64_MAX ? NULL : json_integer((json_int_t)bits);
	}
}

static const struct {
	const char *gguf, *config; /* gguf: after "<architecture>." */
} names[] = {
	{"block_count", "num_hidden_layers"},
	{"context_length", "max_position_embeddings"},
	{"embedding_length", "hidden_size"},
	{"attention.head_count", "num_attention_heads"},
	{"attention.head_count_kv", "num_key_value_heads"},
	{"attention.key_length", "head_dim"},
	{"attention.value_length", "v_head_dim"},
	{"attention.sliding_window", "sliding_window"},
	{"attention.sliding_window_pattern", "sliding_window_pattern"},
	{"attention.chunk_size", "attention_chunk_size"},
	{"attention.kv_lora_rank", "kv_lora_rank"},
	{"attention.indexer.key_length", "index_head_dim"},
	{"attention.shared_kv_layers", "num_kv_shared_layers"},
	{"rope.dimension_count", "qk_rope_head_dim"},
	{"full_attention_interval", "full_attention_interval"},
	{"ssm.conv_kernel", "conv_kernel"},
	{"ssm.inner_size", "ssm_inner_size"},
	{"ssm.state_size", "ssm_state_size"},
	{"ssm.time_step_rank", "ssm_heads"},
	{"ssm.group_count", "n_groups"},
};

static const struct {
	const char *gguf, *model_type;
} types[] = {
	{"llama", "llama"},
	{"llama4", "llama4"},
	{"mistral3", "mistral"},
	{"qwen2", "qwen2"},
	{"qwen2moe", "qwen2_moe"},
	{"qwen3", "qwen3"},
	{"qwen3moe", "qwen3_moe"},
	{"qwen3next", "qwen3_next"},
	{"qwen35", "qwen3_5"},
	{"qwen35moe", "qwen3_5_moe"},
	{"gemma", "gemma"},
	{"gemma2", "gemma2"},
	{"gemma3", "gemma3"},
	{"gpt-oss", "gpt_oss"},
	{"phi3", "phi3"},
	{"glm4", "glm4"},
	{"glm4moe", "glm4_moe"},
	{"chatglm", "chatglm"},
	{"deepseek2", "deepseek_v2"},
	{"minimax-m2", "minimax_m2"},
	{"nemotron_h", "nemotron_h"},
	{"granitehybrid", "granitemoehybrid"},
	{"jamba", "jamba"},
	{"falcon-h1", "falcon_h1"},
	{"mamba2", "mamba2"},
	{"starcoder2", "starcoder2"},
	{"cohere2", "cohere2"},
	{"granite", "granite"},
};

/*
 * Models whose layers differ list their KV heads, and which layers slide. A layer without KV heads
 * is recurrent. @heads: what was listed; the config keeps the most.
 */
static int list_layers(json_t *config, const char *type, const json_t *heads)
{
	json_t *slides = json_object_get(config, "sliding_window_pattern"), *layers;
	size_t n = json_array_size(heads) ? json_array_size(heads) : json_array_size(slides);
	bool differ = json_is_array(slides);
	json_int_t most = 0;

	if (json_array_size(heads) && differ && json_array_size(slides) != n)
		return kv_error(-EINVAL,
				"attention.sliding_window_pattern: %zu layers, %zu have heads",
				json_array_size(slides), n);
	layers = json_array();
	for (size_t i = 0; i < n; i++) {
		const json_t *slide = json_array_get(slides, i);
		json_int_t k = json_integer_value(json_array_get(heads, i));
		const char *name = "attention";

		if (heads && !k) {
			name = "mamba";
			differ = true;
		} else if (json_is_true(slide) || json_integer_value(slide)) {
			name = strcmp(type, "llama4") ? "sliding_attention" : "chunked_attention";
		}
		json_array_append_new(layers, json_string(name));
		most = k > most ? k : most;
	}
	if (heads)
		json_object_set_new(config, "num_key_value_heads", json_integer(most));
	if (differ)
		json_object_set(config, "layer_types", layers);
	json_decref(layers);
	return 0;
}

static int give_heads(const json_t *heads, struct kv_arch *model)
{
	for (uint32_t i = 0; heads && i < model->n_layers; i++) {
		json_int_t n = json_integer_value(json_array_get(heads, i));
		struct kv_arch_layer *l = &model->layers[i];

		if (l->kind == KV_LAYER_STATE || l->form != KV_FORM_HEADS)
			continue;
		if (n < 1 || n > 65536)
			return kv_error(-EINVAL,
					"attention.head_count_kv[%u]: %lld, 1..65536 allowed", i,
					(long long)n);
		l->n_kv_heads = (uint32_t)n;
	}
	return 0;
}

/* Recurrences say their sizes otherwise than configs do. */
static void rename_state(json_t *config, const char *type)
{
	json_int_t inner = json_integer_value(json_object_get(config, "ssm_inner_size"));
	json_int_t heads = json_integer_value(json_object_get(config, "ssm_heads"));
	json_int_t groups = json_integer_value(json_object_get(config, "n_groups"));
	json_int_t state = json_integer_value(json_object_get(config, "ssm_state_size"));
	json_int_t hidden = json_integer_value(json_object_get(config, "hidden_size"));

	if (!inner)
		return;
	if (!strncmp(type, "qwen3_", 6) && heads) {
		json_object_set_new(config, "linear_num_value_heads", json_integer(heads));
		json_object_set_new(config, "linear_value_head_dim", json_integer(inner / heads));
		json_object_set_new(config, "linear_num_key_heads", json_integer(groups));
		json_object_set_new(config, "linear_key_head_dim", json_integer(state));
		json_object_set(config, "linear_conv_kernel_dim",
				json_object_get(config, "conv_kernel"));
	} else if (!strcmp(type, "jamba")) {
		json_object_set_new(config, "mamba_expand",
				    json_integer(hidden > 0 ? inner / hidden : 0));
	} else if (heads) {
		json_object_set_new(config, "mamba_num_heads", json_integer(heads));
		json_object_set_new(config, "mamba_head_dim", json_integer(inner / heads));
	}
}

static int from_pairs(const json_t *pairs, const char *what, struct kv_arch **ret_model)
{
	const char *arch = kv_json_text(pairs, "general.architecture", ""), *type = NULL;
	struct kv_arch *model = NULL;
	json_t *config, *heads;
	char key[128];
	int r;

	for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
		if (!strcmp(types[i].gguf, arch))
			type = types[i].model_type;
	if (!type)
		return kv_error(-ENOTSUP, "%s: general.architecture '%s' is not known", what, arch);
	config = json_pack("{s:s, s:s}", "model_type", type, "name",
			   kv_json_text(pairs, "general.name", ""));
	if (!config)
		return kv_error(-EINVAL, "%s: general.name is no text", what);
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		snprintf(key, sizeof(key), "%s.%s", arch, names[i].gguf);
		if (kv_json_has(pairs, key))
			json_object_set(config, names[i].config, json_object_get(pairs, key));
	}
	/* A file has the value type of weights, not of K and V: engines keep those in 16 bits. */
	json_object_set_new(config, "torch_dtype", json_string("float16"));
	heads = json_object_get(config, "num_key_value_heads");
	heads = json_is_array(heads) ? json_incref(heads) : NULL;
	r = list_layers(config, type, heads);
	rename_state(config, type);
	if (!r)
		r = kv_arch_from_hf(config, what, &model);
	if (!r)
		r = give_heads(heads, model);
	json_decref(heads);
	json_decref(config);
	if (r) {
		kv_arch_free(model);
		return r;
	}
	*ret_model = model;
	return 0;
}

KV_PUBLIC int kv_arch_parse_gguf(const void *data, size_t len, const char *what,
				 struct kv_arch **ret_model)
{
	struct cursor c = {.data = data, .len = len};
	uint32_t magic = (uint32_t)take(&c, 4), version = (uint32_t)take(&c, 4);
	uint64_t n_pairs;
	json_t *pairs;
	int r;

	take(&c, 8); /* tensors */
	n_pairs = take(&c, 8);
	if (c.broken || magic != 0x46554747)
		return kv_error(-EINVAL, "%s: is no GGUF file", what);
	if (version < 2 || version > 3)
		return kv_error(-ENOTSUP, "%s: GGUF version %u, 2 and 3 are known", what, version);
	pairs = json_object();
	for (uint64_t i = 0; i < n_pairs && !c.broken; i++) {
		size_t key_len;
		const char *key = take_text(&c, &key_len);
		uint32_t type = (uint32_t)take(&c, 4);
		json_t *value = take_value(&c, type, false);
		char name[128];

		if (!key || !value || key_len >= sizeof(name)) {
			json_decref(value);
			continue;
		}
		memcpy(name, key, key_len);
		name[key_len] = 0;
		json_object_set_new(pairs, name, value);
	}
	r = c.broken ? kv_error(-EINVAL, "%s: ends inside its metadata", what)
		     : from_pairs(pairs, what, ret_model);
	json_decref(pairs);
	return kv_arch_named(r, what);
}
