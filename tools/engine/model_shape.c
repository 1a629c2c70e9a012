/* SPDX-License-Identifier: Apache-2.0 */
/* What a file says of its model, and whether model.c can compute it. */
#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include "tools/engine/error.h"
#include "tools/engine/model.h"

static int read_or(const struct kv_gguf *file, const char *key, uint32_t fallback, uint32_t *ret)
{
	int r = kv_gguf_u32(file, key, ret);

	if (r != -ENOENT)
		return r;
	*ret = fallback;
	return 0;
}

static int check_shape(const struct kv_model_shape *s)
{
	const struct {
		const char *name;
		uint32_t value;
		uint32_t most;
	} fields[] = {
		{"block_count", s->n_layers, KV_MAX_COMPONENTS / 2},
		{"embedding_length", s->n_embd, 65536},
		{"feed_forward_length", s->n_ff, 65536},
		{"attention.head_count", s->n_heads, 1024},
		{"attention.head_count_kv", s->n_kv_heads, s->n_heads},
		{"attention.key_length", s->head_dim, 1024},
		{"rope.dimension_count", s->n_rot, s->head_dim},
		{"context_length", s->n_ctx, 1u << 24},
		{"vocabulary", s->n_vocab, 1u << 24},
	};

	for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
		if (!fields[i].value || fields[i].value > fields[i].most)
			return kv_engine_error(-EINVAL, "model: llama.%s is %u, 1..%u allowed",
					       fields[i].name, fields[i].value, fields[i].most);
	if (s->n_heads % s->n_kv_heads)
		return kv_engine_error(-EINVAL,
				       "model: %u heads are no multiple of %u K and V heads",
				       s->n_heads, s->n_kv_heads);
	if (s->n_rot % 2)
		return kv_engine_error(-EINVAL, "model: rope.dimension_count is %u, must be even",
				       s->n_rot);
	if (!(s->rope_base > 0) || !(s->norm_eps >= 0))
		return kv_engine_error(-EINVAL, "model: rope.freq_base %g, norm epsilon %g",
				       s->rope_base, s->norm_eps);
	return 0;
}

static int read_numbers(const struct kv_gguf *file, struct kv_model_shape *s)
{
	const struct {
		const char *key;
		uint32_t *ret;
	} needed[] = {
		{"llama.block_count", &s->n_layers},
		{"llama.embedding_length", &s->n_embd},
		{"llama.feed_forward_length", &s->n_ff},
		{"llama.attention.head_count", &s->n_heads},
		{"llama.context_length", &s->n_ctx},
	};
	int r;

	for (size_t i = 0; i < sizeof(needed) / sizeof(needed[0]); i++) {
		r = kv_gguf_u32(file, needed[i].key, needed[i].ret);
		if (r < 0)
			return r;
	}
	r = read_or(file, "llama.attention.head_count_kv", s->n_heads, &s->n_kv_heads);
	if (r < 0)
		return r;
	r = read_or(file, "llama.attention.key_length", s->n_heads ? s->n_embd / s->n_heads : 0,
		    &s->head_dim);
	if (r < 0)
		return r;
	r = read_or(file, "llama.rope.dimension_count", s->head_dim, &s->n_rot);
	if (r < 0)
		return r;
	r = kv_gguf_f32(file, "llama.attention.layer_norm_rms_epsilon", &s->norm_eps);
	if (r < 0)
		return r;

	s->rope_base = 10000;
	r = kv_gguf_f32(file, "llama.rope.freq_base", &s->rope_base);
	return r == -ENOENT ? 0 : r;
}

static bool text_is(struct kv_text text, const char *s)
{
	return text.len == strlen(s) && !memcmp(text.at, s, text.len);
}

/* What changes the mathematics and isn't done here must stop the model, not spoil its text. */
static int refuse_unknown(const struct kv_gguf *file)
{
	const struct kv_tensor *tensor;
	struct kv_text text;
	int r;

	r = kv_gguf_text(file, "general.architecture", &text);
	if (r < 0)
		return r;
	if (!text_is(text, "llama"))
		return kv_engine_error(-ENOTSUP,
				       "model: architecture %.*s, only llama is supported",
				       (int)(text.len < 64 ? text.len : 64), text.at);

	r = kv_gguf_text(file, "llama.rope.scaling.type", &text);
	if (r < 0 && r != -ENOENT)
		return r;
	if ((!r && !text_is(text, "none")) ||
	    kv_gguf_tensor(file, "rope_freqs.weight", &tensor) != -ENOENT)
		return kv_engine_error(-ENOTSUP, "model: RoPE scaling is not supported");
	if (kv_gguf_tensor(file, "blk.0.ffn_gate_inp.weight", &tensor) != -ENOENT)
		return kv_engine_error(-ENOTSUP, "model: mixtures of experts are not supported");
	if (kv_gguf_tensor(file, "blk.0.attn_q.bias", &tensor) != -ENOENT)
		return kv_engine_error(-ENOTSUP, "model: biases are not supported");
	return 0;
}

int kv_model_shape_read(const struct kv_gguf *file, struct kv_model_shape *ret)
{
	struct kv_model_shape shape = {0};
	const struct kv_tensor *embedding;
	int r;

	r = refuse_unknown(file);
	if (r < 0)
		return r;
	r = kv_gguf_tensor(file, "token_embd.weight", &embedding);
	if (r < 0)
		return r;
	r = read_numbers(file, &shape);
	if (r < 0)
		return r;

	shape.n_vocab = embedding->n_rows < UINT32_MAX ? embedding->n_rows : UINT32_MAX;
	r = check_shape(&shape);
	if (r < 0)
		return r;

	*ret = shape;
	return 0;
}
