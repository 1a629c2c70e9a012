/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "tools/engine/error.h"
#include "tools/engine/model_parts.h"

/* A tensor "blk.<layer>.<name>.weight", or "<name>.weight" for layer -1, of a given shape */
static int find_tensor(const struct kv_model *model, const struct kv_gguf *file, int layer,
		       const char *name, uint64_t n_rows, uint64_t n_cols,
		       const struct kv_tensor **ret)
{
	char full[64];
	int r;

	if (layer < 0)
		snprintf(full, sizeof(full), "%s.weight", name);
	else
		snprintf(full, sizeof(full), "blk.%d.%s.weight", layer, name);

	r = kv_gguf_tensor(file, full, ret);
	if (r < 0)
		return r;
	if ((*ret)->n_rows != n_rows || (*ret)->n_cols != n_cols)
		return kv_engine_error(
			-EINVAL, "model: tensor %s is %llu x %llu, %llu x %llu needed", full,
			(unsigned long long)(*ret)->n_rows, (unsigned long long)(*ret)->n_cols,
			(unsigned long long)n_rows, (unsigned long long)n_cols);
	return 0;
}

static int load_matrix(struct kv_model *model, const struct kv_gguf *file, int layer,
		       const char *name, uint64_t n_rows, uint64_t n_cols, struct kv_matrix **ret)
{
	const struct kv_tensor *tensor;
	int r;

	r = find_tensor(model, file, layer, name, n_rows, n_cols, &tensor);
	if (r < 0)
		return r;
	return model->dense->ops->matrix_new(model->dense, tensor, ret);
}

/* A norm's weights: one row, which becomes plain floats on the device */
static int put_norm(struct kv_model *model, const struct kv_tensor *tensor, float **ret)
{
	const struct kv_dense_ops *ops = model->dense->ops;
	struct kv_matrix *matrix;
	int32_t zero = 0;
	const int32_t *index;
	int r;

	*ret = ops->alloc(model->dense, tensor->n_cols * sizeof(**ret));
	if (!*ret)
		return -ENOMEM;
	r = ops->matrix_new(model->dense, tensor, &matrix);
	if (r < 0)
		return r;

	index = ops->show(model->dense, model->room.rows, &zero, sizeof(zero));
	ops->embed(model->dense, matrix, index, 1, *ret);
	r = ops->finish(model->dense);
	ops->matrix_free(model->dense, matrix);
	return r;
}

static int load_norm(struct kv_model *model, const struct kv_gguf *file, int layer,
		     const char *name, uint32_t width, float **ret)
{
	const struct kv_tensor *tensor;
	int r;

	r = find_tensor(model, file, layer, name, 1, width, &tensor);
	return r < 0 ? r : put_norm(model, tensor, ret);
}

/* A norm of heads, in the order of their rows */
static int load_head_norm(struct kv_model *model, const struct kv_gguf *file, int layer,
			  const char *name, float **ret)
{
	struct kv_turned turned = {0};
	const struct kv_tensor *tensor;
	int r;

	r = find_tensor(model, file, layer, name, 1, model->shape.head_dim, &tensor);
	if (r < 0 || !model->shape.halves)
		return r < 0 ? r : put_norm(model, tensor, ret);
	r = kv_model_turn_norm(model, tensor, &turned);
	if (r < 0)
		return r;
	r = put_norm(model, &turned.tensor, ret);
	free(turned.data);
	return r;
}

/* Wq or Wk */
static int load_heads(struct kv_model *model, const struct kv_gguf *file, int layer, const char *name,
		      uint64_t n_rows, struct kv_turned *turned, struct kv_matrix **ret)
{
	const struct kv_tensor *tensor;
	int r;

	if (!model->shape.halves)
		return load_matrix(model, file, layer, name, n_rows, model->shape.n_embd, ret);
	r = find_tensor(model, file, layer, name, n_rows, model->shape.n_embd, &tensor);
	if (!r)
		r = kv_model_turn_rows(model, tensor, turned);
	return r < 0 ? r : model->dense->ops->matrix_new(model->dense, &turned->tensor, ret);
}

static int load_norms(struct kv_model *model, const struct kv_gguf *file, int i)
{
	uint32_t width = model->shape.n_embd;
	struct layer *layer = &model->layers[i];
	int r;

	r = load_norm(model, file, i, "attn_norm", width, &layer->attn_norm);
	if (!r)
		r = load_norm(model, file, i, "ffn_norm", width, &layer->ffn_norm);
	if (r < 0 || !model->shape.more_norms)
		return r;

	r = load_norm(model, file, i, "post_attention_norm", width, &layer->attn_post_norm);
	if (!r)
		r = load_norm(model, file, i, "post_ffw_norm", width, &layer->ffn_post_norm);
	if (!r)
		r = load_head_norm(model, file, i, "attn_q_norm", &layer->q_norm);
	if (!r)
		r = load_head_norm(model, file, i, "attn_k_norm", &layer->k_norm);
	return r;
}

static int load_layer(struct kv_model *model, const struct kv_gguf *file, int i)
{
	const struct kv_model_shape *s = &model->shape;
	struct layer *layer = &model->layers[i];
	uint32_t n_q = s->n_heads * s->head_dim, n_kv = s->n_kv_heads * s->head_dim;
	const struct {
		const char *name;
		uint32_t n_rows;
		uint32_t n_cols;
		struct kv_matrix **ret;
	} matrices[] = {
		{"attn_v", n_kv, s->n_embd, &layer->v},
		{"attn_output", s->n_embd, n_q, &layer->o},
		{"ffn_gate", s->n_ff, s->n_embd, &layer->gate},
		{"ffn_up", s->n_ff, s->n_embd, &layer->up},
		{"ffn_down", s->n_embd, s->n_ff, &layer->down},
	};
	int r;

	layer->slides = s->slides[i];
	r = load_heads(model, file, i, "attn_q", n_q, &layer->turned_q, &layer->q);
	if (!r)
		r = load_heads(model, file, i, "attn_k", n_kv, &layer->turned_k, &layer->k);
	if (r < 0)
		return r;
	for (size_t m = 0; m < sizeof(matrices) / sizeof(matrices[0]); m++) {
		r = load_matrix(model, file, i, matrices[m].name, matrices[m].n_rows,
				matrices[m].n_cols, matrices[m].ret);
		if (r < 0)
			return r;
	}
	return load_norms(model, file, i);
}

static int load_weights(struct kv_model *model, const struct kv_gguf *file)
{
	const struct kv_model_shape *s = &model->shape;
	const struct kv_tensor *tensor;
	int r;

	model->layers = calloc(s->n_layers, sizeof(*model->layers));
	if (!model->layers)
		return kv_engine_error(-ENOMEM, "no memory for %u layers", s->n_layers);

	r = load_matrix(model, file, -1, "token_embd", s->n_vocab, s->n_embd, &model->embedding);
	if (r < 0)
		return r;
	model->output = model->embedding;
	r = kv_gguf_tensor(file, "output.weight", &tensor);
	if (r != -ENOENT) {
		r = load_matrix(model, file, -1, "output", s->n_vocab, s->n_embd, &model->output);
		if (r < 0)
			return r;
	}
	r = load_norm(model, file, -1, "output_norm", s->n_embd, &model->output_norm);
	if (r < 0)
		return r;

	for (uint32_t i = 0; i < s->n_layers; i++) {
		r = load_layer(model, file, i);
		if (r < 0)
			return r;
	}
	return 0;
}

static int make_angles(struct kv_model *model, uint32_t kind, float base, float scale)
{
	uint32_t n_rot = model->shape.n_rot;
	uint64_t n = (uint64_t)model->max_tokens * n_rot;

	model->room.angles[kind] = model->dense->ops->alloc(model->dense, n * sizeof(float));
	if (!model->room.angles[kind])
		return -ENOMEM;
	model->angles[kind] = calloc(n, sizeof(float));
	model->frequencies[kind] = calloc(n_rot / 2, sizeof(float));
	if (!model->angles[kind] || !model->frequencies[kind])
		return kv_engine_error(-ENOMEM, "no memory for angles");
	for (uint32_t i = 0; i < n_rot / 2; i++)
		model->frequencies[kind][i] = 1.0f / powf(base, 2.0f * i / n_rot) / scale;
	return 0;
}

/* Room for the blocks of one more group of layers */
static int add_group(struct kv_model *model)
{
	const struct kv_dense_ops *ops = model->dense->ops;
	uint64_t n_table = (uint64_t)model->max_seqs * model->max_blocks;
	uint32_t g = model->n_groups++;

	model->room.slots[g] = ops->alloc(model->dense, model->max_tokens * sizeof(int64_t));
	model->room.block_table[g] = ops->alloc(model->dense, n_table * sizeof(int32_t));
	return model->room.slots[g] && model->room.block_table[g] ? 0 : -ENOMEM;
}

int kv_model_use_groups(struct kv_model *model, const uint32_t *of_layer, uint32_t n_groups)
{
	int r;

	if (!n_groups || n_groups > KV_MODEL_MAX_GROUPS)
		return kv_engine_error(-EINVAL, "model: %u groups of layers, 1..%d allowed", n_groups,
				       KV_MODEL_MAX_GROUPS);
	while (model->n_groups < n_groups) {
		r = add_group(model);
		if (r < 0)
			return r;
	}
	for (uint32_t i = 0; i < model->shape.n_layers; i++) {
		if (of_layer[i] >= n_groups)
			return kv_engine_error(-EINVAL, "model: layer %u is of group %u, there are %u",
					       i, of_layer[i], n_groups);
		model->layers[i].group = of_layer[i];
	}
	return 0;
}

/* What only the host can do so far */
static int check_device(const struct kv_model *model)
{
	const struct kv_model_shape *s = &model->shape;

	if ((s->gelu || s->more_norms || s->embd_scale) && !model->dense->ops->gelu_multiply)
		return kv_engine_error(-ENOTSUP,
				       "model: %s is computed on the host alone, not on a GPU: use a "
				       "kvcached with --host memory",
				       s->name);
	return 0;
}

static int make_room(struct kv_model *model)
{
	const struct kv_model_shape *s = &model->shape;
	const struct kv_dense_ops *ops = model->dense->ops;
	uint64_t n_q = (uint64_t)s->n_heads * s->head_dim, n_kv = s->n_kv_heads * s->head_dim;
	uint64_t n = model->max_tokens, n_seqs = model->max_seqs;
	struct activations *act = &model->act;
	struct inputs *room = &model->room;
	const struct {
		void *ret; /* address of a pointer */
		uint64_t bytes;
	} buffers[] = {
		{&act->h, n * s->n_embd * sizeof(float)},
		{&act->x, n * s->n_embd * sizeof(float)},
		{&act->q, n * n_q * sizeof(float)},
		{&act->k, n * n_kv * sizeof(float)},
		{&act->v, n * n_kv * sizeof(float)},
		{&act->a, n * n_q * sizeof(float)},
		{&act->gate, n * s->n_ff * sizeof(float)},
		{&act->up, n * s->n_ff * sizeof(float)},
		{&act->picked, n_seqs * s->n_embd * sizeof(float)},
		{&act->logits, n_seqs * s->n_vocab * sizeof(float)},
		{&room->tokens, n * sizeof(int32_t)},
		{&room->query_start_loc, (n_seqs + 1) * sizeof(int32_t)},
		{&room->seq_lens, n_seqs * sizeof(int32_t)},
		{&room->rows, n_seqs * sizeof(int32_t)},
	};

	int r;

	for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
		void *p = ops->alloc(model->dense, buffers[i].bytes);

		if (!p)
			return -ENOMEM;
		memcpy(buffers[i].ret, &p, sizeof(p));
	}

	model->n_angles = s->rope_base_sliding ? 2 : 1;
	for (uint32_t i = 0; i < model->n_angles; i++) {
		r = make_angles(model, i, i ? s->rope_base_sliding : s->rope_base,
				i ? 1 : s->rope_scale);
		if (r < 0)
			return r;
	}
	return add_group(model);
}

int kv_model_new(const struct kv_gguf *file, struct kv_dense *dense, uint32_t max_tokens,
		 uint32_t max_seqs, uint32_t max_blocks, struct kv_model **ret)
{
	struct kv_model *model = calloc(1, sizeof(*model));
	int r;

	if (!model)
		return kv_engine_error(-ENOMEM, "no memory for the model");

	model->dense = dense;
	model->max_tokens = max_tokens;
	model->max_seqs = max_seqs;
	model->max_blocks = max_blocks;
	r = kv_model_shape_read(file, &model->shape);
	if (!r)
		r = check_device(model);
	if (!r)
		r = make_room(model);
	if (!r)
		r = load_weights(model, file);
	if (r < 0) {
		kv_model_free(model);
		return r;
	}
	*ret = model;
	return 0;
}

static void free_layer(struct kv_dense *dense, struct layer *layer)
{
	const struct kv_dense_ops *ops = dense->ops;

	ops->release(dense, layer->attn_norm);
	ops->release(dense, layer->ffn_norm);
	ops->release(dense, layer->q_norm);
	ops->release(dense, layer->k_norm);
	ops->release(dense, layer->attn_post_norm);
	ops->release(dense, layer->ffn_post_norm);
	ops->matrix_free(dense, layer->q);
	ops->matrix_free(dense, layer->k);
	ops->matrix_free(dense, layer->v);
	ops->matrix_free(dense, layer->o);
	ops->matrix_free(dense, layer->gate);
	ops->matrix_free(dense, layer->up);
	ops->matrix_free(dense, layer->down);
	free(layer->turned_q.data);
	free(layer->turned_k.data);
}

struct kv_model *kv_model_free(struct kv_model *model)
{
	const struct kv_dense_ops *ops;
	struct kv_dense *dense;

	if (!model)
		return NULL;

	dense = model->dense;
	ops = dense->ops;
	for (uint32_t i = 0; model->layers && i < model->shape.n_layers; i++)
		free_layer(dense, &model->layers[i]);
	free(model->layers);
	if (model->output != model->embedding)
		ops->matrix_free(dense, model->output);
	ops->matrix_free(dense, model->embedding);
	ops->release(dense, model->output_norm);

	model->graphs = kv_model_graphs_free(model, model->graphs);
	ops->release(dense, model->act.h);
	ops->release(dense, model->act.x);
	ops->release(dense, model->act.q);
	ops->release(dense, model->act.k);
	ops->release(dense, model->act.v);
	ops->release(dense, model->act.a);
	ops->release(dense, model->act.gate);
	ops->release(dense, model->act.up);
	ops->release(dense, model->act.picked);
	ops->release(dense, model->act.logits);
	ops->release(dense, model->room.tokens);
	ops->release(dense, model->room.query_start_loc);
	ops->release(dense, model->room.seq_lens);
	ops->release(dense, model->room.rows);
	for (uint32_t i = 0; i < model->n_groups; i++) {
		ops->release(dense, model->room.slots[i]);
		ops->release(dense, model->room.block_table[i]);
	}
	for (uint32_t i = 0; i < 2; i++) {
		ops->release(dense, model->room.angles[i]);
		free(model->angles[i]);
		free(model->frequencies[i]);
	}
	free(model);
	return NULL;
}

const struct kv_model_shape *kv_model_shape(const struct kv_model *model)
{
	return &model->shape;
}
