/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Models in our own JSON: what kvctl prints, and how an unknown architecture is described by hand.
 *
 *	{ "kvcached_model": 1, "name": "x", "context": 8192, "dtype": "bf16",
 *	  "layers": [ { "repeat": 32, "kind": "full", "kv_heads": 8, "head_dim": 128 } ] }
 */
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/public.h"
#include "libclient/arch.h"

static const char *const kinds[] = {"none", "full", "window", "chunked", "state", "cross"};
static const char *const forms[] = {"heads", "latent", "v4"};

/* Fields of a layer that are numbers and 0 where they are not given. */
static const struct {
	const char *key;
	size_t offset;
} fields[] = {
	{"window", offsetof(struct kv_arch_layer, window)},
	{"kv_heads", offsetof(struct kv_arch_layer, n_kv_heads)},
	{"head_dim", offsetof(struct kv_arch_layer, head_dim)},
	{"v_head_dim", offsetof(struct kv_arch_layer, v_head_dim)},
	{"latent_dim", offsetof(struct kv_arch_layer, latent_dim)},
	{"rope_dim", offsetof(struct kv_arch_layer, rope_dim)},
	{"index_dim", offsetof(struct kv_arch_layer, index_dim)},
	{"compress", offsetof(struct kv_arch_layer, compress)},
	{"cross_heads", offsetof(struct kv_arch_layer, cross_heads)},
	{"conv_width", offsetof(struct kv_arch_layer, conv_width)},
	{"conv_inner", offsetof(struct kv_arch_layer, conv_inner)},
	{"conv_groups", offsetof(struct kv_arch_layer, conv_groups)},
	{"conv_group_dim", offsetof(struct kv_arch_layer, conv_group_dim)},
	{"state_heads", offsetof(struct kv_arch_layer, state_heads)},
	{"state_rows", offsetof(struct kv_arch_layer, state_rows)},
	{"state_cols", offsetof(struct kv_arch_layer, state_cols)},
};

#define N_FIELDS (sizeof(fields) / sizeof(fields[0]))

static void freep_model(struct kv_arch **model)
{
	kv_arch_free(*model);
}

static uint32_t *field(struct kv_arch_layer *l, size_t i)
{
	return (uint32_t *)(void *)((char *)l + fields[i].offset);
}

static int word_of(const char *const *words, size_t n, const char *key, const char *word,
		   uint8_t *ret)
{
	for (size_t i = 0; i < n; i++)
		if (!strcmp(words[i], word)) {
			*ret = (uint8_t)i;
			return 0;
		}
	return kv_error(-EINVAL, "%s: '%s' is none of %s, %s, %s, ...", key, word, words[0],
			words[1], words[2]);
}

static int read_layer(const json_t *object, struct kv_arch_layer *l)
{
	int r;

	r = word_of(kinds, 6, "kind", kv_json_text(object, "kind", "full"), &l->kind);
	if (!r)
		r = word_of(forms, 3, "form", kv_json_text(object, "form", "heads"), &l->form);
	for (size_t i = 0; !r && i < N_FIELDS; i++)
		r = kv_json_u32(object, fields[i].key, 0, field(l, i));
	if (r)
		return r;
	if (!kv_json_has(object, "v_head_dim"))
		l->v_head_dim = l->head_dim;
	l->shares = -1;
	if (kv_json_has(object, "shares")) {
		uint32_t shares;

		r = kv_json_u32(object, "shares", 0, &shares);
		if (r)
			return r;
		l->shares = (int32_t)shares;
	}
	return 0;
}

/* What the planner divides by or multiplies with is there. */
static int check_layer(const struct kv_arch_layer *l, uint32_t i)
{
	if (l->kind == KV_LAYER_NONE)
		return 0;
	if (l->shares >= 0) {
		if ((uint32_t)l->shares >= i)
			return kv_error(-EINVAL, "layers[%u].shares: %d is not an earlier layer", i,
					l->shares);
		return 0;
	}
	if (l->cross_heads &&
	    (l->kind == KV_LAYER_STATE || l->kind == KV_LAYER_CROSS || l->form != KV_FORM_HEADS))
		return kv_error(-EINVAL,
				"layers[%u].cross_heads: %u given, the layer has no heads besides "
				"them",
				i, l->cross_heads);
	if (l->kind == KV_LAYER_STATE && (!l->state_heads || !l->state_rows || !l->state_cols))
		return kv_error(-EINVAL, "layers[%u]: a state needs state_heads, _rows and _cols",
				i);
	if (l->kind == KV_LAYER_STATE)
		return 0;
	if (l->form == KV_FORM_HEADS && (!l->n_kv_heads || !l->head_dim || !l->v_head_dim))
		return kv_error(-EINVAL, "layers[%u]: heads need kv_heads and head_dim", i);
	if (l->form != KV_FORM_HEADS && !l->latent_dim)
		return kv_error(-EINVAL, "layers[%u]: latent rows need latent_dim", i);
	return 0;
}

int kv_arch_from_json(const json_t *object, const char *what, struct kv_arch **ret_model)
{
	kv_cleanup(freep_model) struct kv_arch *model = NULL;
	const json_t *layers = json_object_get(object, "layers"), *item;
	uint32_t n_layers = 0, repeat, version, context;
	size_t i;
	int r;

	r = kv_json_u32(object, "kvcached_model", -1, &version);
	if (r)
		return r;
	if (version != 1)
		return kv_error(-EINVAL, "kvcached_model: form %u given, 1 is known", version);
	json_array_foreach(layers, i, item)
	{
		r = kv_json_u32(item, "repeat", 1, &repeat);
		if (r)
			return r;
		n_layers += repeat > KV_ARCH_MAX_LAYERS ? KV_ARCH_MAX_LAYERS + 1 : repeat;
		if (n_layers > KV_ARCH_MAX_LAYERS)
			break;
	}
	r = kv_arch_new(n_layers, what, &model);
	if (r)
		return r;
	r = kv_json_u32(object, "context", 0, &context);
	if (!r)
		r = kv_json_u32(object, "encoder_tokens", 0, &model->encoder_tokens);
	if (r)
		return r;
	model->context = context;
	model->dtype = kv_json_dtype(kv_json_text(object, "dtype", "bf16"));
	model->state_dtype = kv_json_dtype(kv_json_text(object, "state_dtype", "f32"));
	if (!model->dtype || !model->state_dtype)
		return kv_error(-EINVAL, "dtype: bf16, f16, f32 and fp8 exist");
	snprintf(model->name, sizeof(model->name), "%s", kv_json_text(object, "name", ""));
	snprintf(model->architecture, sizeof(model->architecture), "%s",
		 kv_json_text(object, "architecture", "by hand"));
	n_layers = 0;
	json_array_foreach(layers, i, item)
	{
		struct kv_arch_layer layer = {0};

		r = kv_json_u32(item, "repeat", 1, &repeat);
		if (!r)
			r = read_layer(item, &layer);
		for (uint32_t k = 0; !r && k < repeat; k++) {
			r = check_layer(&layer, n_layers);
			model->layers[n_layers++] = layer;
		}
		if (r)
			return r;
	}
	*ret_model = kv_steal(model);
	return 0;
}

static const char *dtype_name(uint8_t dtype)
{
	return dtype == KV_F32	  ? "f32"
	       : dtype == KV_F16  ? "f16"
	       : dtype == KV_BF16 ? "bf16"
				  : "fp8";
}

static json_t *out_layer(struct kv_arch_layer *l)
{
	json_t *object = json_pack("{s:s}", "kind", kinds[l->kind]);

	if (l->kind != KV_LAYER_NONE && l->kind != KV_LAYER_STATE)
		json_object_set_new(object, "form", json_string(forms[l->form]));
	if (l->shares >= 0)
		json_object_set_new(object, "shares", json_integer(l->shares));
	for (size_t i = 0; i < N_FIELDS; i++)
		if (*field(l, i))
			json_object_set_new(object, fields[i].key, json_integer(*field(l, i)));
	return object;
}

KV_PUBLIC char *kv_arch_print(const struct kv_arch *model)
{
	json_t *layers = json_array(), *object;
	char *text;

	for (uint32_t i = 0, n; i < model->n_layers; i += n) {
		json_t *layer = out_layer(&model->layers[i]);

		for (n = 1; i + n < model->n_layers; n++) {
			json_t *next = out_layer(&model->layers[i + n]);
			bool same = json_equal(layer, next);

			json_decref(next);
			if (!same)
				break;
		}
		if (n > 1)
			json_object_set_new(layer, "repeat", json_integer(n));
		json_array_append_new(layers, layer);
	}
	object = json_pack("{s:i, s:s, s:s, s:I, s:s, s:s, s:o}", "kvcached_model", 1, "name",
			   model->name, "architecture", model->architecture, "context",
			   (json_int_t)model->context, "dtype", dtype_name(model->dtype),
			   "state_dtype", dtype_name(model->state_dtype), "layers", layers);
	if (!object)
		return NULL;
	if (model->encoder_tokens)
		json_object_set_new(object, "encoder_tokens", json_integer(model->encoder_tokens));
	text = json_dumps(object, JSON_INDENT(1));
	json_decref(object);
	return text;
}
