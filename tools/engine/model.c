/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "tools/engine/error.h"
#include "tools/engine/model.h"

struct layer {
	float *attn_norm; /* [n_embd] */
	float *ffn_norm;  /* [n_embd] */
	struct kv_matrix *q;
	struct kv_matrix *k;
	struct kv_matrix *v;
	struct kv_matrix *o;
	struct kv_matrix *gate;
	struct kv_matrix *up;
	struct kv_matrix *down;
};

/* Rows of activations, [max_tokens, ...]; logits and picked have max_seqs rows. */
struct activations {
	float *h; /* n_embd */
	float *x; /* n_embd */
	float *q; /* n_heads * head_dim */
	float *k; /* n_kv_heads * head_dim */
	float *v;
	float *a;    /* as q */
	float *gate; /* n_ff */
	float *up;
	float *picked; /* n_embd */
	float *logits; /* n_vocab */
};

/* Room on the device for what a step reads from the host */
struct inputs {
	int32_t *tokens;
	int64_t *slots;
	int32_t *query_start_loc;
	int32_t *seq_lens;
	int32_t *block_table;
	int32_t *rows;
	float *angles; /* [max_tokens, n_rot / 2, 2] */
};

struct kv_model {
	struct kv_model_shape shape;
	struct kv_dense *dense;
	uint32_t max_tokens;
	uint32_t max_seqs;
	uint32_t max_blocks;
	struct layer *layers;
	struct kv_matrix *embedding;
	struct kv_matrix *output; /* its own matrix, or the embedding */
	float *output_norm;
	struct activations act;
	struct inputs room;
	float *frequencies; /* host, [n_rot / 2] radians a token */
	float *angles;	    /* host, as room.angles */
};

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

/* A step's inputs as the device reads them */
struct step {
	uint32_t n; /* tokens */
	const int32_t *tokens;
	const int64_t *slots;
	const float *angles;
	struct kv_attention_args attention; /* all but the views */
};

static void fill_angles(struct kv_model *model, const int64_t *positions, uint32_t n)
{
	uint32_t n_rot = model->shape.n_rot;

	for (uint32_t t = 0; t < n; t++) {
		float *angles = model->angles + (size_t)t * n_rot;

		for (uint32_t i = 0; i < n_rot / 2; i++) {
			float angle = (float)positions[t] * model->frequencies[i];

			angles[2 * i] = cosf(angle);
			angles[2 * i + 1] = sinf(angle);
		}
	}
}

static int begin_step(struct kv_model *model, const struct kv_batch_data *b, uint32_t n_rows,
		      struct step *ret)
{
	const struct kv_model_shape *s = &model->shape;
	struct kv_dense *dense = model->dense;
	const struct kv_dense_ops *ops = dense->ops;
	struct inputs *room = &model->room;
	uint32_t n = b->n_real_tokens;

	if (n > model->max_tokens || b->n_seqs > model->max_seqs || n_rows > model->max_seqs ||
	    (uint64_t)b->n_seqs * b->table_width > (uint64_t)model->max_seqs * model->max_blocks)
		return kv_engine_error(-E2BIG,
				       "step of %u tokens, %u sequences with %u blocks each: the "
				       "model was made for %u, %u and %u",
				       n, b->n_seqs, b->table_width, model->max_tokens,
				       model->max_seqs, model->max_blocks);

	fill_angles(model, b->positions, n);
	ret->n = n;
	ret->tokens = ops->show(dense, room->tokens, b->tokens, n * sizeof(*b->tokens));
	ret->slots = ops->show(dense, room->slots, b->slots, n * sizeof(*b->slots));
	ret->angles = ops->show(dense, room->angles, model->angles,
				(size_t)n * s->n_rot * sizeof(*model->angles));
	ret->attention = (struct kv_attention_args){
		.size = sizeof(ret->attention),
		.device = dense->device,
		.dtype = KV_F32,
		.n_seqs = b->n_seqs,
		.n_tokens = n,
		.n_heads_q = s->n_heads,
		.max_query_len = b->max_query_len,
		.max_seq_len = b->max_seq_len,
		.table_width = b->table_width,
		.q = model->act.q,
		.out = model->act.a,
		.query_start_loc = ops->show(dense, room->query_start_loc, b->query_start_loc,
					     (b->n_seqs + 1) * sizeof(*b->query_start_loc)),
		.seq_lens = ops->show(dense, room->seq_lens, b->seq_lens,
				      b->n_seqs * sizeof(*b->seq_lens)),
		.block_table =
			ops->show(dense, room->block_table, b->block_table,
				  (size_t)b->n_seqs * b->table_width * sizeof(*b->block_table)),
		.window_left = -1,
		.causal = 1,
		.invariant = 1,
		.stream = dense->stream,
	};
	return 0;
}

static int attend(struct kv_model *model, const struct step *step, const struct kv_view *k,
		  const struct kv_view *v)
{
	struct kv_attention_args attention = step->attention;
	struct kv_write_args write = {
		.size = sizeof(write),
		.device = model->dense->device,
		.dtype = KV_F32,
		.n_tokens = step->n,
		.key = model->act.k,
		.value = model->act.v,
		.slots = step->slots,
		.k = *k,
		.v = *v,
		.stream = model->dense->stream,
	};
	int r;

	r = kv_write(&write);
	if (r < 0)
		return kv_engine_error(r, "kv_write: %s", kv_error_text());

	attention.k = *k;
	attention.v = *v;
	r = kv_attention(&attention);
	if (r < 0)
		return kv_engine_error(r, "kv_attention: %s", kv_error_text());
	return 0;
}

static int run_layer(struct kv_model *model, const struct step *step, const struct layer *layer,
		     const struct kv_view *k, const struct kv_view *v)
{
	const struct kv_model_shape *s = &model->shape;
	struct kv_dense *dense = model->dense;
	const struct kv_dense_ops *ops = dense->ops;
	struct activations *a = &model->act;
	uint32_t n = step->n;
	int r;

	ops->rms_norm(dense, a->h, layer->attn_norm, n, s->n_embd, s->norm_eps, a->x);
	ops->matmul(dense, a->x, n,
		    (struct kv_matmul[]){{layer->q, a->q, false},
					 {layer->k, a->k, false},
					 {layer->v, a->v, false}},
		    3);
	ops->rope(dense, a->q, step->angles, n, s->n_heads, s->head_dim, s->n_rot);
	ops->rope(dense, a->k, step->angles, n, s->n_kv_heads, s->head_dim, s->n_rot);
	r = attend(model, step, k, v);
	if (r < 0)
		return r;
	ops->matmul(dense, a->a, n, &(struct kv_matmul){layer->o, a->h, true}, 1);

	ops->rms_norm(dense, a->h, layer->ffn_norm, n, s->n_embd, s->norm_eps, a->x);
	ops->matmul(dense, a->x, n,
		    (struct kv_matmul[]){{layer->gate, a->gate, false}, {layer->up, a->up, false}},
		    2);
	ops->silu_multiply(dense, a->gate, a->up, n, s->n_ff);
	ops->matmul(dense, a->gate, n, &(struct kv_matmul){layer->down, a->h, true}, 1);
	return 0;
}

int kv_model_step(struct kv_model *model, const struct kv_batch_data *batch,
		  const struct kv_view *views, const int32_t *rows, uint32_t n_rows, float *logits)
{
	const struct kv_model_shape *s = &model->shape;
	struct kv_dense *dense = model->dense;
	const struct kv_dense_ops *ops = dense->ops;
	struct activations *a = &model->act;
	const int32_t *shown;
	struct step step = {0};
	int r;

	r = begin_step(model, batch, n_rows, &step);
	if (r < 0)
		return r;

	ops->embed(dense, model->embedding, step.tokens, step.n, a->h);
	for (uint32_t i = 0; i < s->n_layers; i++) {
		r = run_layer(model, &step, &model->layers[i], &views[2 * i], &views[2 * i + 1]);
		if (r < 0)
			return r;
	}
	if (n_rows) {
		shown = ops->show(dense, model->room.rows, rows, n_rows * sizeof(*rows));
		ops->pick(dense, a->h, s->n_embd, shown, n_rows, a->picked);
		ops->rms_norm(dense, a->picked, model->output_norm, n_rows, s->n_embd, s->norm_eps,
			      a->picked);
		ops->matmul(dense, a->picked, n_rows,
			    &(struct kv_matmul){model->output, a->logits, false}, 1);
		ops->download(dense, logits, a->logits,
			      (size_t)n_rows * s->n_vocab * sizeof(*logits));
	}
	return ops->finish(dense);
}

/* One sequence of @n new tokens whose blocks are all the null block */
static int warm_up_step(struct kv_model *model, const struct kv_view *views, kv_block_id null_block,
			uint32_t n)
{
	uint32_t width = (n + views[0].block_tokens - 1) / views[0].block_tokens;
	kv_cleanup(kv_freep) int32_t *table = calloc(width, sizeof(*table));
	kv_cleanup(kv_freep) int64_t *slots = calloc(n, sizeof(*slots));
	kv_cleanup(kv_freep) int64_t *positions = calloc(n, sizeof(*positions));
	kv_cleanup(kv_freep) int32_t *tokens = calloc(n, sizeof(*tokens));
	kv_cleanup(kv_freep) float *logits = calloc(model->shape.n_vocab, sizeof(*logits));
	const int32_t starts[] = {0, n}, lens[] = {n}, last = n - 1;
	struct kv_batch_data batch = {
		.n_seqs = 1,
		.n_tokens = n,
		.n_real_seqs = 1,
		.n_real_tokens = n,
		.max_query_len = n,
		.max_seq_len = n,
		.table_width = width,
		.block_table = table,
		.slots = slots,
		.query_start_loc = starts,
		.seq_lens = lens,
		.positions = positions,
		.tokens = tokens,
	};

	if (!table || !slots || !positions || !tokens || !logits)
		return kv_engine_error(-ENOMEM, "no memory for the warm-up");

	for (uint32_t i = 0; i < width; i++)
		table[i] = null_block;
	for (uint32_t i = 0; i < n; i++)
		slots[i] = KV_SLOT_PAD;
	return kv_model_step(model, &batch, views, &last, 1, logits);
}

int kv_model_warm_up(struct kv_model *model, const struct kv_view *views, kv_block_id null_block)
{
	uint32_t room = model->max_blocks * (uint32_t)views[0].block_tokens;
	int r;

	r = warm_up_step(model, views, null_block, 1);
	if (r < 0)
		return r;
	return warm_up_step(model, views, null_block,
			    model->max_tokens < room ? model->max_tokens : room);
}
