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
static int load_norm(struct kv_model *model, const struct kv_gguf *file, int layer,
		     const char *name, float **ret)
{
	const struct kv_dense_ops *ops = model->dense->ops;
	uint32_t width = model->shape.n_embd;
	const struct kv_tensor *tensor;
	struct kv_matrix *matrix;
	int32_t zero = 0;
	const int32_t *index;
	int r;

	r = find_tensor(model, file, layer, name, 1, width, &tensor);
	if (r < 0)
		return r;
	*ret = ops->alloc(model->dense, width * sizeof(**ret));
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
		{"attn_q", n_q, s->n_embd, &layer->q},
		{"attn_k", n_kv, s->n_embd, &layer->k},
		{"attn_v", n_kv, s->n_embd, &layer->v},
		{"attn_output", s->n_embd, n_q, &layer->o},
		{"ffn_gate", s->n_ff, s->n_embd, &layer->gate},
		{"ffn_up", s->n_ff, s->n_embd, &layer->up},
		{"ffn_down", s->n_embd, s->n_ff, &layer->down},
	};
	int r;

	for (size_t m = 0; m < sizeof(matrices) / sizeof(matrices[0]); m++) {
		r = load_matrix(model, file, i, matrices[m].name, matrices[m].n_rows,
				matrices[m].n_cols, matrices[m].ret);
		if (r < 0)
			return r;
	}
	r = load_norm(model, file, i, "attn_norm", &layer->attn_norm);
	if (r < 0)
		return r;
	return load_norm(model, file, i, "ffn_norm", &layer->ffn_norm);
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
	r = load_norm(model, file, -1, "output_norm", &model->output_norm);
	if (r < 0)
		return r;

	for (uint32_t i = 0; i < s->n_layers; i++) {
		r = load_layer(model, file, i);
		if (r < 0)
			return r;
	}
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
		{&room->slots, n * sizeof(int64_t)},
		{&room->query_start_loc, (n_seqs + 1) * sizeof(int32_t)},
		{&room->seq_lens, n_seqs * sizeof(int32_t)},
		{&room->block_table, n_seqs * model->max_blocks * sizeof(int32_t)},
		{&room->rows, n_seqs * sizeof(int32_t)},
		{&room->angles, n * s->n_rot * sizeof(float)},
	};

	for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
		void *p = ops->alloc(model->dense, buffers[i].bytes);

		if (!p)
			return -ENOMEM;
		memcpy(buffers[i].ret, &p, sizeof(p));
	}

	model->angles = calloc(n * s->n_rot, sizeof(*model->angles));
	model->frequencies = calloc(s->n_rot / 2, sizeof(*model->frequencies));
	if (!model->angles || !model->frequencies)
		return kv_engine_error(-ENOMEM, "no memory for angles");
	for (uint32_t i = 0; i < s->n_rot / 2; i++)
		model->frequencies[i] = 1.0f / powf(s->rope_base, 2.0f * i / s->n_rot);
	return 0;
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
	ops->matrix_free(dense, layer->q);
	ops->matrix_free(dense, layer->k);
	ops->matrix_free(dense, layer->v);
	ops->matrix_free(dense, layer->o);
	ops->matrix_free(dense, layer->gate);
	ops->matrix_free(dense, layer->up);
	ops->matrix_free(dense, layer->down);
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
	ops->release(dense, model->room.slots);
	ops->release(dense, model->room.query_start_loc);
	ops->release(dense, model->room.seq_lens);
	ops->release(dense, model->room.block_table);
	ops->release(dense, model->room.rows);
	ops->release(dense, model->room.angles);
	free(model->angles);
	free(model->frequencies);
	free(model);
	return NULL;
}

const struct kv_model_shape *kv_model_shape(const struct kv_model *model)
{
	return &model->shape;
}
