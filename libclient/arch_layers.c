/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a model_type means for the cache of each layer. To add an architecture: a row in types[],
 * and a function if its layers follow a rule of their own.
 *
 * A config's own list of layers (layer_types) comes before any rule of the architecture.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "include/internal/error.h"
#include "libclient/arch.h"

/* How the layers of an architecture take turns where the config has no list of them. */
enum turn {
	ALL_FULL,
	ALL_WINDOW,	/* sliding_window, if it is not null, is every layer's */
	WINDOW_OPTION,	/* use_sliding_window, from layer max_window_layers on */
	EVEN_WINDOW,	/* layers 0, 2, 4, ... slide */
	PATTERN_WINDOW, /* all slide but each sliding_window_pattern-th */
	CHUNK_NO_ROPE,	/* chunks, but each fourth layer attends to all */
	EACH_NTH_FULL,	/* recurrent, but each full_attention_interval-th */
};

enum recurrence {
	NO_STATE,
	GDN,
	MAMBA1,
	MAMBA2,
	LIGHTNING,
	KDA,
};

struct arch {
	const char *type;
	enum turn turn;
	enum recurrence state;
	uint32_t pattern;  /* default of PATTERN_WINDOW, EACH_NTH_FULL */
	uint32_t head_dim; /* default, where hidden_size / heads is not meant */
};

static const struct arch types[] = {
	{"llama", ALL_FULL},
	{"mllama_text_model", ALL_FULL},
	{"whisper", ALL_FULL},
	{"llama4_text", CHUNK_NO_ROPE},
	{"llama4", CHUNK_NO_ROPE},
	{"mistral", ALL_WINDOW},
	{"ministral", ALL_WINDOW},
	{"ministral3", ALL_WINDOW},
	{"mixtral", ALL_WINDOW},
	{"qwen2", WINDOW_OPTION},
	{"qwen2_moe", WINDOW_OPTION},
	{"qwen2_vl_text", WINDOW_OPTION},
	{"qwen2_5_vl_text", WINDOW_OPTION},
	{"qwen3", WINDOW_OPTION, NO_STATE, 0, 128},
	{"qwen3_moe", WINDOW_OPTION},
	{"qwen3_vl_text", ALL_FULL},
	{"qwen3_vl_moe_text", ALL_FULL},
	{"qwen3_next", EACH_NTH_FULL, GDN, 4, 256},
	{"qwen3_5", EACH_NTH_FULL, GDN, 4, 256},
	{"qwen3_5_text", EACH_NTH_FULL, GDN, 4, 256},
	{"qwen3_5_moe", EACH_NTH_FULL, GDN, 4, 256},
	{"qwen3_5_moe_text", EACH_NTH_FULL, GDN, 4, 256},
	{"gemma", ALL_FULL, NO_STATE, 0, 256},
	{"gemma2", EVEN_WINDOW, NO_STATE, 0, 256},
	{"gemma3", PATTERN_WINDOW, NO_STATE, 6, 256},
	{"gemma3_text", PATTERN_WINDOW, NO_STATE, 6, 256},
	{"gemma3n_text", PATTERN_WINDOW, NO_STATE, 5, 256},
	{"gpt_oss", EVEN_WINDOW, NO_STATE, 0, 64},
	{"phi", ALL_FULL},
	{"phi3", ALL_WINDOW},
	{"phimoe", ALL_WINDOW},
	{"glm", ALL_FULL},
	{"glm4", ALL_FULL},
	{"glm4_moe", ALL_FULL},
	{"glm4_moe_lite", ALL_FULL},
	{"glm_moe_dsa", ALL_FULL},
	{"chatglm", ALL_FULL},
	{"deepseek_v2", ALL_FULL},
	{"deepseek_v3", ALL_FULL},
	{"deepseek_v32", ALL_FULL},
	{"deepseek_v4", ALL_FULL},
	{"kimi_k2", ALL_FULL},
	{"kimi_linear", ALL_FULL, KDA},
	{"minimax", ALL_FULL, LIGHTNING},
	{"minimax_text_01", ALL_FULL, LIGHTNING},
	{"minimax_m1", ALL_FULL, LIGHTNING},
	{"minimax_m2", ALL_FULL},
	{"nemotron_h", ALL_FULL, MAMBA2},
	{"granite", ALL_FULL},
	{"granitemoe", ALL_FULL},
	{"granitemoehybrid", ALL_FULL, MAMBA2},
	{"bamba", ALL_FULL, MAMBA2},
	{"jamba", ALL_FULL, MAMBA1},
	{"falcon_h1", ALL_FULL, MAMBA2},
	{"mamba2", ALL_FULL, MAMBA2},
	{"cohere", ALL_FULL},
	{"cohere2", PATTERN_WINDOW, NO_STATE, 4, 0},
	{"olmo2", ALL_FULL},
	{"starcoder2", ALL_WINDOW},
	{"internlm2", ALL_FULL},
	{"stablelm", ALL_FULL},
};

/* Dimensions that all attention layers of a model share. */
struct reader {
	const json_t *config;
	const struct arch *arch;
	struct kv_arch *model;
	struct kv_arch_layer attention, state;
	uint32_t window, hidden;
};

static int read_window(struct reader *rd)
{
	const char *key =
		rd->arch->turn == CHUNK_NO_ROPE ? "attention_chunk_size" : "sliding_window";

	return kv_json_u32(rd->config, key, 0, &rd->window);
}

static int read_attention(struct reader *rd)
{
	struct kv_arch_layer *l = &rd->attention;
	const json_t *c = rd->config;
	uint32_t heads;
	int r;

	l->kind = KV_LAYER_FULL;
	l->shares = -1;
	if (kv_json_has(c, "kv_lora_rank")) {
		l->form = KV_FORM_LATENT;
		r = kv_json_u32(c, "kv_lora_rank", -1, &l->latent_dim);
		if (!r)
			r = kv_json_u32(c, "qk_rope_head_dim", -1, &l->rope_dim);
		if (!r)
			r = kv_json_u32(c, "index_head_dim", 0, &l->index_dim);
		if (!r && !l->latent_dim)
			r = kv_error(-EINVAL, "kv_lora_rank: 0 given");
		return r;
	}
	r = kv_json_u32_of(c, "num_attention_heads", "n_head", -1, &heads);
	if (r)
		return r;
	if (!heads)
		return kv_error(-EINVAL, "num_attention_heads: 0 given");
	r = kv_json_u32_of(c, "num_key_value_heads", "multi_query_group_num", heads,
			   &l->n_kv_heads);
	if (r)
		return r;
	r = kv_json_u32_of(
		c, "head_dim", kv_json_has(c, "kv_channels") ? "kv_channels" : "attention_head_dim",
		rd->arch->head_dim ? rd->arch->head_dim : rd->hidden / heads, &l->head_dim);
	if (r)
		return r;
	l->v_head_dim = l->head_dim;
	if (!l->n_kv_heads || !l->head_dim || l->head_dim > 65536)
		return kv_error(-EINVAL, "head_dim: %u KV heads of %u", l->n_kv_heads, l->head_dim);
	return 0;
}

static int read_gdn(struct reader *rd)
{
	struct kv_arch_layer *l = &rd->state;
	uint32_t k_heads, v_heads, k_dim, v_dim, width;
	int r;

	r = kv_json_u32(rd->config, "linear_num_key_heads", -1, &k_heads);
	if (!r)
		r = kv_json_u32(rd->config, "linear_num_value_heads", -1, &v_heads);
	if (!r)
		r = kv_json_u32(rd->config, "linear_key_head_dim", -1, &k_dim);
	if (!r)
		r = kv_json_u32(rd->config, "linear_value_head_dim", -1, &v_dim);
	if (!r)
		r = kv_json_u32(rd->config, "linear_conv_kernel_dim", -1, &width);
	if (r)
		return r;
	if (k_heads > 4096 || v_heads > 4096 || k_dim > 65536 || v_dim > 65536 || !width)
		return kv_error(-EINVAL, "linear_conv_kernel_dim: %u; %u heads of %u, %u of %u",
				width, k_heads, k_dim, v_heads, v_dim);
	l->conv_width = width - 1;
	l->conv_inner = 2 * k_heads * k_dim + v_heads * v_dim;
	l->state_heads = v_heads;
	l->state_rows = k_dim;
	l->state_cols = v_dim;
	return 0;
}

/* Names differ; the first that is there counts. */
static int read_any(const struct reader *rd, const char *const *keys, int64_t otherwise,
		    uint32_t *ret)
{
	for (; keys[1]; keys++)
		if (kv_json_has(rd->config, keys[0]))
			break;
	return kv_json_u32(rd->config, keys[0], otherwise, ret);
}

#define KEYS(...) ((const char *const[]){__VA_ARGS__, NULL})

static int read_mamba(struct reader *rd, bool second)
{
	struct kv_arch_layer *l = &rd->state;
	uint32_t expand, inner, heads, head_dim, state, width;
	int r;

	r = read_any(rd, KEYS("mamba_expand", "expand"), 2, &expand);
	if (!r)
		r = read_any(rd, KEYS("ssm_state_size", "mamba_d_state", "state_size"), -1, &state);
	if (!r)
		r = read_any(rd, KEYS("conv_kernel", "mamba_d_conv"), 4, &width);
	if (r)
		return r;
	if (expand > 64 || rd->hidden > 1 << 20 || state > 65536 || !width || width > 1024)
		return kv_error(-EINVAL, "mamba: expand %u of %u, state %u, convolution %u", expand,
				rd->hidden, state, width);
	inner = expand * rd->hidden;
	l->conv_width = width - 1;
	if (!second) { /* a row of states for each channel */
		l->conv_inner = l->state_heads = inner;
		l->state_rows = 1;
		l->state_cols = state;
		return 0;
	}
	r = read_any(rd, KEYS("mamba_num_heads", "mamba_n_heads", "num_heads"), -1, &heads);
	if (!r)
		r = read_any(rd, KEYS("mamba_head_dim", "mamba_d_head", "head_dim"),
			     heads ? inner / heads : 0, &head_dim);
	if (!r)
		r = read_any(rd, KEYS("n_groups", "mamba_n_groups"), 1, &l->conv_groups);
	if (r)
		return r;
	if (!heads || heads > 65536 || !head_dim || head_dim > 65536 || !state)
		return kv_error(-EINVAL, "mamba: %u heads of %u, state %u", heads, head_dim, state);
	l->conv_inner = heads * head_dim;
	l->conv_group_dim = state;
	l->state_heads = heads;
	l->state_rows = head_dim;
	l->state_cols = state;
	return 0;
}

static int read_state(struct reader *rd)
{
	const json_t *kda = json_object_get(rd->config, "linear_attn_config");
	struct kv_arch_layer *l = &rd->state;
	uint32_t heads, dim, width;
	int r;

	l->kind = KV_LAYER_STATE;
	l->shares = -1;
	switch (rd->arch->state) {
	case NO_STATE:
		return 0;
	case GDN:
		r = read_gdn(rd);
		break;
	case MAMBA1:
	case MAMBA2:
		r = read_mamba(rd, rd->arch->state == MAMBA2);
		break;
	case LIGHTNING: /* a square matrix for each head, no convolution */
		r = kv_json_u32(rd->config, "num_attention_heads", -1, &l->state_heads);
		l->state_rows = l->state_cols = rd->attention.head_dim;
		break;
	default: /* KDA: convolutions of q, k and v */
		r = kv_json_u32(kda, "num_heads", -1, &heads);
		if (!r)
			r = kv_json_u32(kda, "head_dim", -1, &dim);
		if (!r)
			r = kv_json_u32(kda, "short_conv_kernel_size", 4, &width);
		if (r)
			return r;
		if (!width || heads > 65536 || dim > 4096)
			return kv_error(-EINVAL, "linear_attn_config: %u heads of %u", heads, dim);
		l->conv_width = width - 1;
		l->conv_inner = 3 * heads * dim;
		l->state_heads = heads;
		l->state_rows = l->state_cols = dim;
	}
	if (!r && (!l->state_heads || !l->state_rows || !l->state_cols))
		r = kv_error(-EINVAL, "%s: a state of %u x %u x %u", rd->arch->type, l->state_heads,
			     l->state_rows, l->state_cols);
	return r;
}

static void put_window(struct reader *rd, uint32_t i, uint8_t kind)
{
	struct kv_arch_layer *l = &rd->model->layers[i];

	*l = rd->attention;
	/* A window that the context can't leave is none. */
	if (rd->model->context && rd->window >= rd->model->context)
		return;
	l->kind = kind;
	l->window = rd->window;
}

static void put_beside(struct kv_arch_layer *l, const struct kv_arch_layer *attention)
{
	l->kind = attention->kind;
	l->form = attention->form;
	l->n_kv_heads = attention->n_kv_heads;
	l->head_dim = attention->head_dim;
	l->v_head_dim = attention->v_head_dim;
	l->latent_dim = attention->latent_dim;
	l->rope_dim = attention->rope_dim;
	l->index_dim = attention->index_dim;
}

/* One layer by the name its config gives it. */
static int put_named(struct reader *rd, uint32_t i, const char *name)
{
	struct kv_arch_layer *l = &rd->model->layers[i];

	if (!strcmp(name, "full_attention") || !strcmp(name, "attention") || !strcmp(name, "*")) {
		*l = rd->attention;
	} else if (!strcmp(name, "sliding_attention") || !strcmp(name, "chunked_attention")) {
		if (!rd->window)
			return kv_error(-EINVAL, "layer_types[%u]: %s, and no window is given", i,
					name);
		put_window(rd, i, *name == 's' ? KV_LAYER_WINDOW : KV_LAYER_CHUNKED);
	} else if (!strcmp(name, "linear_attention") || !strcmp(name, "mamba") ||
		   !strcmp(name, "M") || !strcmp(name, "hybrid")) {
		if (rd->arch->state == NO_STATE)
			return kv_error(-ENOTSUP, "layer_types[%u]: %s layers of %s are not known",
					i, name, rd->arch->type);
		*l = rd->state;
		if (*name == 'h') /* attention and a state side by side */
			put_beside(l, &rd->attention);
	} else if (!strcmp(name, "-") || !strcmp(name, "E") || !strcmp(name, "mlp") ||
		   !strcmp(name, "moe")) {
		l->kind = KV_LAYER_NONE;
	} else {
		return kv_error(-ENOTSUP, "layer_types[%u]: '%s' is not known", i, name);
	}
	return 0;
}

static int put_list(struct reader *rd, const json_t *list, const char *key)
{
	if (json_array_size(list) != rd->model->n_layers)
		return kv_error(-EINVAL, "%s: %zu given for %u layers", key, json_array_size(list),
				rd->model->n_layers);
	for (uint32_t i = 0; i < rd->model->n_layers; i++) {
		const char *name = json_string_value(json_array_get(list, i));
		int r;

		if (!name)
			return kv_error(-EINVAL, "%s[%u]: a word is needed", key, i);
		r = put_named(rd, i, name);
		if (r)
			return r;
	}
	return 0;
}

/* Numbers of the layers that a list names, from @first on. */
static bool listed(const json_t *list, uint32_t i, uint32_t first)
{
	const json_t *v;
	size_t k;

	json_array_foreach(list, k,
			   v) if (json_integer_value(v) == (json_int_t)i + first) return true;
	return false;
}

static int put_by_rule(struct reader *rd)
{
	uint32_t n = rd->model->n_layers, pattern, first = 0, use;
	const json_t *c = rd->config;
	const char *key = rd->arch->turn == EACH_NTH_FULL   ? "full_attention_interval"
			  : rd->arch->turn == CHUNK_NO_ROPE ? "no_rope_layer_interval"
							    : "sliding_window_pattern";
	int r;

	r = kv_json_u32(c, key, rd->arch->pattern ? rd->arch->pattern : 4, &pattern);
	if (!r)
		r = kv_json_u32(c, "max_window_layers", 0, &first);
	if (r)
		return r;
	if (!pattern)
		return kv_error(-EINVAL, "%s: 0 given", key);
	use = json_is_true(json_object_get(c, "use_sliding_window"));
	for (uint32_t i = 0; i < n; i++) {
		bool nth = (i + 1) % pattern == 0, slides = false;

		switch (rd->arch->turn) {
		case ALL_FULL:
			break;
		case ALL_WINDOW:
			slides = true;
			break;
		case WINDOW_OPTION:
			slides = use && i >= first;
			break;
		case EVEN_WINDOW:
			slides = i % 2 == 0;
			break;
		case PATTERN_WINDOW:
		case CHUNK_NO_ROPE:
			slides = !nth;
			break;
		case EACH_NTH_FULL:
			rd->model->layers[i] = nth ? rd->attention : rd->state;
			continue;
		}
		if (slides && rd->window)
			put_window(rd, i,
				   rd->arch->turn == CHUNK_NO_ROPE ? KV_LAYER_CHUNKED
								   : KV_LAYER_WINDOW);
		else
			rd->model->layers[i] = rd->attention;
	}
	return 0;
}

/* Nemotron-H: one character a layer. */
static int put_pattern(struct reader *rd, const char *pattern)
{
	if (strlen(pattern) != rd->model->n_layers)
		return kv_error(-EINVAL, "hybrid_override_pattern: %zu characters for %u layers",
				strlen(pattern), rd->model->n_layers);
	for (uint32_t i = 0; i < rd->model->n_layers; i++) {
		int r = put_named(rd, i, (char[]){pattern[i], 0});

		if (r)
			return r;
	}
	return 0;
}

/* Jamba: attention in each attn_layer_period-th layer. */
static int put_period(struct reader *rd)
{
	uint32_t period, offset;
	int r;

	r = kv_json_u32(rd->config, "attn_layer_period", -1, &period);
	if (!r)
		r = kv_json_u32(rd->config, "attn_layer_offset", -1, &offset);
	if (r)
		return r;
	if (!period)
		return kv_error(-EINVAL, "attn_layer_period: 0 given");
	for (uint32_t i = 0; i < rd->model->n_layers; i++)
		rd->model->layers[i] = i % period == offset ? rd->attention : rd->state;
	return 0;
}

/* DeepSeek V4: a ratio for each layer; those after the last belong to the draft. */
static int put_v4(struct reader *rd)
{
	const json_t *ratios = json_object_get(rd->config, "compress_ratios");
	struct kv_arch_layer v4 = {.kind = KV_LAYER_WINDOW, .form = KV_FORM_V4, .shares = -1};
	uint32_t head;
	int r;

	r = kv_json_u32(rd->config, "head_dim", -1, &head);
	if (!r)
		r = kv_json_u32(rd->config, "qk_rope_head_dim", -1, &v4.rope_dim);
	if (!r)
		r = kv_json_u32(rd->config, "index_head_dim", 0, &v4.index_dim);
	if (!r)
		r = kv_json_u32(rd->config, "sliding_window", -1, &v4.window);
	if (r)
		return r;
	if (head <= v4.rope_dim)
		return kv_error(-EINVAL, "head_dim: %u is not larger than qk_rope_head_dim %u",
				head, v4.rope_dim);
	if (!v4.window)
		return kv_error(-EINVAL, "sliding_window: 0 given");
	if (json_array_size(ratios) < rd->model->n_layers)
		return kv_error(-EINVAL, "compress_ratios: %zu given for %u layers",
				json_array_size(ratios), rd->model->n_layers);
	v4.latent_dim = head - v4.rope_dim;
	for (uint32_t i = 0; i < rd->model->n_layers; i++) {
		json_int_t ratio = json_integer_value(json_array_get(ratios, i));

		if (ratio != 0 && ratio != 1 && ratio != 4 && ratio != 128)
			return kv_error(-EINVAL, "compress_ratios[%u]: 0, 1, 4 and 128 exist", i);
		v4.compress = (uint32_t)ratio;
		rd->model->layers[i] = v4;
	}
	return 0;
}

/* The last layers may read the K and V of the last of their kind before them. */
static int share_last(struct reader *rd)
{
	uint32_t n = rd->model->n_layers, n_shared;
	int r;

	r = kv_json_u32(rd->config, "num_kv_shared_layers", 0, &n_shared);
	if (r)
		return r;
	if (n_shared >= n && n_shared)
		return kv_error(-EINVAL, "num_kv_shared_layers: %u of %u layers", n_shared, n);
	for (uint32_t i = n - n_shared; i < n; i++)
		for (uint32_t k = n - n_shared; k-- > 0;)
			if (rd->model->layers[k].kind == rd->model->layers[i].kind) {
				rd->model->layers[i].shares = (int32_t)k;
				break;
			}
	return 0;
}

static int put_layers(struct reader *rd)
{
	const json_t *c = rd->config, *list;
	const char *const keys[] = {"layer_types", "layers_block_type"};
	int r;

	for (size_t i = 0; i < 2; i++)
		if (json_is_array(json_object_get(c, keys[i])))
			return put_list(rd, json_object_get(c, keys[i]), keys[i]);
	if (kv_json_text(c, "hybrid_override_pattern", NULL))
		return put_pattern(rd, kv_json_text(c, "hybrid_override_pattern", ""));
	if (rd->arch->state == MAMBA1)
		return put_period(rd);
	if (!strcmp(rd->arch->type, "mamba2") || !strcmp(rd->arch->type, "falcon_h1")) {
		for (uint32_t i = 0; i < rd->model->n_layers; i++) {
			r = put_named(rd, i, *rd->arch->type == 'm' ? "mamba" : "hybrid");
			if (r)
				return r;
		}
		return 0;
	}
	if (rd->arch->state == KDA || rd->arch->state == LIGHTNING) {
		const json_t *kda = json_object_get(c, "linear_attn_config");

		list = rd->arch->state == KDA ? json_object_get(kda, "full_attn_layers")
					      : json_object_get(c, "attn_type_list");
		if (!json_is_array(list))
			return kv_error(-EINVAL, "%s: no list says which layers attend to all",
					rd->arch->type);
		for (uint32_t i = 0; i < rd->model->n_layers; i++) {
			bool full = rd->arch->state == KDA
					    ? listed(list, i, 1)
					    : json_integer_value(json_array_get(list, i)) == 1;

			rd->model->layers[i] = full ? rd->attention : rd->state;
		}
		return 0;
	}
	if (rd->arch->state == MAMBA2) {
		list = json_object_get(c, "attn_layer_indices");
		if (!json_is_array(list))
			return kv_error(-EINVAL, "%s: no list says which layers are recurrent",
					rd->arch->type);
		for (uint32_t i = 0; i < rd->model->n_layers; i++)
			rd->model->layers[i] = listed(list, i, 0) ? rd->attention : rd->state;
		return 0;
	}
	return put_by_rule(rd);
}

int kv_arch_fill_layers(const json_t *config, const char *type, struct kv_arch *model)
{
	struct reader rd = {.config = config, .model = model};
	const json_t *cross = json_object_get(config, "cross_attention_layers");
	int r;

	for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
		if (!strcmp(types[i].type, type))
			rd.arch = &types[i];
	if (!rd.arch)
		return kv_error(-ENOTSUP,
				"model_type: '%s' is not known; describe its layers by hand, as "
				"kvctl plan --model prints them",
				type);
	if (json_is_array(json_object_get(config, "compress_ratios")))
		return put_v4(&rd);
	r = kv_json_u32(config, "hidden_size", 0, &rd.hidden);
	if (!r)
		r = read_window(&rd);
	if (!r && strcmp(type, "mamba2"))
		r = read_attention(&rd);
	if (!r)
		r = read_state(&rd);
	if (!r)
		r = put_layers(&rd);
	if (!r)
		r = share_last(&rd);
	if (r)
		return r;
	for (uint32_t i = 0; i < model->n_layers; i++) {
		struct kv_arch_layer *l = &model->layers[i];

		if (!strcmp(type, "whisper")) /* to its own tokens, and to the sound */
			l->cross_heads = l->n_kv_heads;
		if (!listed(cross, i, 0))
			continue;
		if (l->kind != KV_LAYER_FULL || l->form != KV_FORM_HEADS || l->state_heads ||
		    l->shares >= 0 || l->cross_heads)
			return kv_error(-EINVAL, "cross_attention_layers: layer %u has no heads",
					i);
		l->kind = KV_LAYER_CROSS;
	}
	return 0;
}
