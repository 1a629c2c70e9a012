/* SPDX-License-Identifier: Apache-2.0 */
/* What a file says of its model, and whether model.c can compute it. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "tools/engine/error.h"
#include "tools/engine/model.h"

#define N_OF(table) (sizeof(table) / sizeof((table)[0]))

struct reader {
	const struct kv_gguf *file;
	struct kv_model_shape shape;
};

/* The metadata key of an architecture: "llama.block_count" */
static const char *key_of(const struct reader *rd, const char *name, char ret[96])
{
	snprintf(ret, 96, "%s.%s", rd->shape.name, name);
	return ret;
}

static int read_needed(const struct reader *rd, const char *name, uint32_t *ret)
{
	char key[96];

	return kv_gguf_u32(rd->file, key_of(rd, name, key), ret);
}

/* These leave *@ret as it is where the file says nothing. */
static int read_u32(const struct reader *rd, const char *name, uint32_t *ret)
{
	int r = read_needed(rd, name, ret);

	return r == -ENOENT ? 0 : r;
}

static int read_f32(const struct reader *rd, const char *name, float *ret)
{
	char key[96];
	int r = kv_gguf_f32(rd->file, key_of(rd, name, key), ret);

	return r == -ENOENT ? 0 : r;
}

static int check_shape(const struct kv_model_shape *s)
{
	const struct {
		const char *name;
		uint32_t value;
		uint32_t most;
	} fields[] = {
		{"block_count", s->n_layers, KV_MODEL_MAX_LAYERS},
		{"embedding_length", s->n_embd, 65536},
		{"feed_forward_length", s->n_ff, 65536},
		{"attention.head_count", s->n_heads, 1024},
		{"attention.head_count_kv", s->n_kv_heads, s->n_heads},
		{"attention.key_length", s->head_dim, 1024},
		{"rope.dimension_count", s->n_rot, s->head_dim},
		{"context_length", s->n_ctx, 1u << 24},
		{"vocabulary", s->n_vocab, 1u << 24},
	};

	for (size_t i = 0; i < N_OF(fields); i++)
		if (!fields[i].value || fields[i].value > fields[i].most)
			return kv_engine_error(-EINVAL, "model: %s.%s is %u, 1..%u allowed",
					       s->name, fields[i].name, fields[i].value,
					       fields[i].most);
	if (s->n_heads % s->n_kv_heads)
		return kv_engine_error(-EINVAL,
				       "model: %u heads are no multiple of %u K and V heads",
				       s->n_heads, s->n_kv_heads);
	if (s->n_rot % 2)
		return kv_engine_error(-EINVAL, "model: rope.dimension_count is %u, must be even",
				       s->n_rot);
	if (!(s->rope_base > 0) || !(s->rope_scale > 0) || !(s->norm_eps >= 0))
		return kv_engine_error(-EINVAL,
				       "model: rope.freq_base %g, rope.scaling.factor %g, norm "
				       "epsilon %g",
				       s->rope_base, s->rope_scale, s->norm_eps);
	if (!(s->attn_softcap >= 0) || !(s->logit_softcap >= 0) || !(s->attn_scale >= 0) ||
	    !(s->rope_base_sliding >= 0))
		return kv_engine_error(-EINVAL,
				       "model: attn_logit_softcapping %g, final_logit_softcapping %g, "
				       "attention.scale %g, rope.freq_base_swa %g: none may be negative",
				       s->attn_softcap, s->logit_softcap, s->attn_scale,
				       s->rope_base_sliding);
	return 0;
}

static int read_numbers(struct reader *rd)
{
	struct kv_model_shape *s = &rd->shape;
	const struct {
		const char *name;
		uint32_t *ret;
	} needed[] = {
		{"block_count", &s->n_layers},		 {"embedding_length", &s->n_embd},
		{"feed_forward_length", &s->n_ff},	 {"attention.head_count", &s->n_heads},
		{"context_length", &s->n_ctx},
	};
	char key[96];
	int r;

	for (size_t i = 0; i < N_OF(needed); i++) {
		r = read_needed(rd, needed[i].name, needed[i].ret);
		if (r < 0)
			return r;
	}
	s->n_kv_heads = s->n_heads;
	r = read_u32(rd, "attention.head_count_kv", &s->n_kv_heads);
	if (r < 0)
		return r;
	s->head_dim = s->n_heads ? s->n_embd / s->n_heads : 0;
	r = read_u32(rd, "attention.key_length", &s->head_dim);
	if (r < 0)
		return r;
	s->n_rot = s->head_dim;
	r = read_u32(rd, "rope.dimension_count", &s->n_rot);
	if (r < 0)
		return r;
	r = kv_gguf_f32(rd->file, key_of(rd, "attention.layer_norm_rms_epsilon", key),
			&s->norm_eps);
	if (r < 0)
		return r;

	s->rope_base = 10000;
	s->rope_scale = 1;
	return read_f32(rd, "rope.freq_base", &s->rope_base);
}

static bool text_is(struct kv_text text, const char *s)
{
	return text.len == strlen(s) && !memcmp(text.at, s, text.len);
}

/* @linear: whether linear scaling can be done; *@ret stays as it is where there is none */
static int read_rope_scaling(const struct reader *rd, bool linear, float *ret)
{
	struct kv_text type;
	char key[96];
	int r;

	r = kv_gguf_text(rd->file, key_of(rd, "rope.scaling.type", key), &type);
	if (r == -ENOENT || (!r && text_is(type, "none")))
		return 0;
	if (r < 0)
		return r;
	if (!linear || !text_is(type, "linear"))
		return kv_engine_error(-ENOTSUP, "model: RoPE scaling %.*s is not supported",
				       (int)(type.len < 64 ? type.len : 64), type.at);
	return read_f32(rd, "rope.scaling.factor", ret);
}

static int read_llama(struct reader *rd)
{
	return read_rope_scaling(rd, false, NULL);
}

/* Which layers slide: a list, or the number of layers from one that doesn't to the next */
static int read_slides(struct reader *rd)
{
	kv_cleanup(kv_freep) int32_t *list = NULL;
	struct kv_model_shape *s = &rd->shape;
	uint32_t period = 6;
	char key[96];
	size_t n;
	int r;

	key_of(rd, "attention.sliding_window_pattern", key);
	r = kv_gguf_i32s(rd->file, key, &list, &n);
	if (r == -EINVAL) {
		r = kv_gguf_u32(rd->file, key, &period);
		if (!r && !period)
			r = kv_engine_error(-EINVAL, "model: %s is 0", key);
	}
	if (r < 0 && r != -ENOENT)
		return r;
	if (list && n != s->n_layers)
		return kv_engine_error(-EINVAL, "model: %s has %zu layers of %u", key, n,
				       s->n_layers);

	for (uint32_t i = 0; i < s->n_layers; i++)
		s->slides[i] = s->window && (list ? list[i] != 0 : (i + 1) % period != 0);
	return 0;
}

static int read_gemma3(struct reader *rd)
{
	struct kv_model_shape *s = &rd->shape;
	int r;

	s->halves = s->gelu = s->more_norms = true;
	s->embd_scale = sqrtf(s->n_embd);
	s->rope_base_sliding = 10000;
	if (s->n_layers == 62) /* the one size whose scores go by the width of the model */
		s->attn_scale = 1 / sqrtf((float)s->n_embd / s->n_heads);

	r = read_u32(rd, "attention.sliding_window", &s->window);
	if (!r)
		r = read_f32(rd, "rope.freq_base_swa", &s->rope_base_sliding);
	if (!r)
		r = read_f32(rd, "attention.scale", &s->attn_scale);
	if (!r)
		r = read_f32(rd, "attn_logit_softcapping", &s->attn_softcap);
	if (!r)
		r = read_f32(rd, "final_logit_softcapping", &s->logit_softcap);
	if (!r)
		r = read_rope_scaling(rd, true, &s->rope_scale);
	return r < 0 ? r : read_slides(rd);
}

static const struct arch {
	const char *name;
	int (*read)(struct reader *rd); /* what it has besides what all have */
} archs[] = {{"llama", read_llama}, {"gemma3", read_gemma3}};

static int find_arch(const struct kv_gguf *file, const struct arch **ret)
{
	struct kv_text text;
	int r;

	r = kv_gguf_text(file, "general.architecture", &text);
	if (r < 0)
		return r;
	for (size_t i = 0; i < N_OF(archs); i++) {
		if (!text_is(text, archs[i].name))
			continue;
		*ret = &archs[i];
		return 0;
	}
	return kv_engine_error(-ENOTSUP,
			       "model: architecture %.*s, llama and gemma3 are supported",
			       (int)(text.len < 64 ? text.len : 64), text.at);
}

/* What changes the mathematics and isn't done here must stop the model, not spoil its text. */
static int refuse_unknown(const struct kv_gguf *file)
{
	static const struct {
		const char *tensor;
		const char *what;
	} unknown[] = {
		{"rope_freqs.weight", "RoPE scaling by a table is"},
		{"blk.0.ffn_gate_inp.weight", "mixtures of experts are"},
		{"blk.0.attn_q.bias", "biases are"},
	};
	const struct kv_tensor *tensor;

	for (size_t i = 0; i < N_OF(unknown); i++)
		if (kv_gguf_tensor(file, unknown[i].tensor, &tensor) != -ENOENT)
			return kv_engine_error(-ENOTSUP, "model: %s not supported", unknown[i].what);
	return 0;
}

int kv_model_shape_read(const struct kv_gguf *file, struct kv_model_shape *ret)
{
	struct reader rd = {.file = file};
	const struct kv_tensor *embedding;
	const struct arch *arch = NULL;
	int r;

	r = find_arch(file, &arch);
	if (r < 0)
		return r;
	r = refuse_unknown(file);
	if (r < 0)
		return r;
	r = kv_gguf_tensor(file, "token_embd.weight", &embedding);
	if (r < 0)
		return r;

	rd.shape.name = arch->name;
	r = read_numbers(&rd);
	if (r < 0)
		return r;
	rd.shape.n_vocab = embedding->n_rows < UINT32_MAX ? embedding->n_rows : UINT32_MAX;
	r = check_shape(&rd.shape);
	if (!r)
		r = arch->read(&rd);
	if (!r)
		r = check_shape(&rd.shape);
	if (r < 0)
		return r;

	*ret = rd.shape;
	return 0;
}
