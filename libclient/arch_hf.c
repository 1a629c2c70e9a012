/* SPDX-License-Identifier: Apache-2.0 */
/* Models from a Hugging Face config.json: the fields that all architectures share. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "libclient/arch.h"

static void freep_model(struct kv_arch **model)
{
	kv_arch_free(*model);
}

/* Multimodal configs keep the language model's fields in an object of their own. */
static const json_t *text_part(const json_t *config)
{
	static const char *const names[] = {"text_config", "llm_config", "language_config"};

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (json_is_object(json_object_get(config, names[i])))
			return json_object_get(config, names[i]);
	return config;
}

static uint8_t dtype_of(const json_t *text, const json_t *config)
{
	const char *name = kv_json_text(text, "torch_dtype", kv_json_text(text, "dtype", NULL));
	uint8_t dtype;

	if (!name)
		name = kv_json_text(config, "torch_dtype", kv_json_text(config, "dtype", ""));
	dtype = kv_json_dtype(name);
	return dtype ? dtype : KV_BF16;
}

/* Tokens that a picture leaves for cross attention: patches and a class token of each tile. */
static int encoder_tokens(const json_t *config, uint32_t *ret_tokens)
{
	const json_t *vision = json_object_get(config, "vision_config");
	uint32_t image, patch, tiles;
	int r;

	*ret_tokens = 0;
	if (!json_is_object(vision) || !kv_json_has(vision, "max_num_tiles"))
		return 0;
	r = kv_json_u32(vision, "image_size", -1, &image);
	if (!r)
		r = kv_json_u32(vision, "patch_size", -1, &patch);
	if (!r)
		r = kv_json_u32(vision, "max_num_tiles", -1, &tiles);
	if (r)
		return r;
	if (!patch || image / patch > 4096 || tiles > 4096)
		return kv_error(-EINVAL, "vision_config: %u tiles of %u in patches of %u", tiles,
				image, patch);
	*ret_tokens = ((image / patch) * (image / patch) + 1) * tiles;
	return 0;
}

/* Decoders behind an encoder have names of their own for what all models have. */
static int decoder_part(json_t *config, uint32_t *ret_encoder_tokens)
{
	static const char *const names[][2] = {
		{"decoder_layers", "num_hidden_layers"},
		{"decoder_attention_heads", "num_attention_heads"},
		{"d_model", "hidden_size"},
		{"max_target_positions", "max_position_embeddings"},
	};

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (kv_json_has(config, names[i][0]))
			json_object_set(config, names[i][1], json_object_get(config, names[i][0]));
	return kv_json_u32(config, "max_source_positions", -1, ret_encoder_tokens);
}

static int read_model(const json_t *config, const json_t *text, const char *type, const char *what,
		      struct kv_arch **ret_model)
{
	kv_cleanup(freep_model) struct kv_arch *model = NULL;
	const char *class =
		json_string_value(json_array_get(json_object_get(config, "architectures"), 0));
	const char *state = kv_json_text(text, "mamba_ssm_dtype",
					 kv_json_text(text, "mamba_ssm_cache_dtype", "float32"));
	uint32_t n_layers, context;
	int r;

	r = kv_json_u32_of(text, "num_hidden_layers",
			   kv_json_has(text, "num_layers") ? "num_layers" : "n_layer", -1,
			   &n_layers);
	if (r)
		return r;
	r = kv_arch_new(n_layers, what, &model);
	if (r)
		return r;
	r = kv_json_u32_of(text, "max_position_embeddings",
			   kv_json_has(text, "seq_length") ? "seq_length" : "max_sequence_length",
			   0, &context);
	if (!r)
		r = encoder_tokens(config, &model->encoder_tokens);
	if (r)
		return r;
	model->context = context;
	model->dtype = dtype_of(text, config);
	model->state_dtype = kv_json_dtype(state);
	if (!model->state_dtype)
		model->state_dtype = KV_F32;
	snprintf(model->name, sizeof(model->name), "%s",
		 kv_json_text(config, "_name_or_path", kv_json_text(config, "name", "")));
	snprintf(model->architecture, sizeof(model->architecture), "%s", class ? class : type);
	r = kv_arch_fill_layers(text, type, model);
	if (r)
		return r;
	*ret_model = kv_steal(model);
	return 0;
}

int kv_arch_from_hf(const json_t *config, const char *what, struct kv_arch **ret_model)
{
	const json_t *text = text_part(config);
	const char *type = kv_json_text(text, "model_type", kv_json_text(config, "model_type", ""));
	uint32_t encoder_tokens;
	json_t *decoder;
	int r;

	if (strcmp(type, "whisper"))
		return read_model(config, text, type, what, ret_model);
	decoder = json_copy((json_t *)text);
	if (!decoder)
		return kv_no_memory();
	r = decoder_part(decoder, &encoder_tokens);
	if (!r)
		r = read_model(config, decoder, type, what, ret_model);
	if (!r)
		(*ret_model)->encoder_tokens = encoder_tokens;
	json_decref(decoder);
	return r;
}
