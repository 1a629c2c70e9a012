/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "include/internal/cleanup.h"
#include "tools/engine/error.h"
#include "tools/engine/model_parts.h"

void kv_model_fill_angles(const struct kv_model *model, const int64_t *positions, uint32_t n,
			  float *angles)
{
	uint32_t n_rot = model->shape.n_rot;

	for (uint32_t t = 0; t < n; t++, angles += n_rot) {
		for (uint32_t i = 0; i < n_rot / 2; i++) {
			float angle = (float)positions[t] * model->frequencies[i];

			angles[2 * i] = cosf(angle);
			angles[2 * i + 1] = sinf(angle);
		}
	}
}

struct kv_attention_args kv_model_attention(const struct kv_model *model)
{
	return (struct kv_attention_args){
		.size = sizeof(struct kv_attention_args),
		.device = model->dense->device,
		.dtype = KV_F32,
		.n_heads_q = (int32_t)model->shape.n_heads,
		.q = model->act.q,
		.out = model->act.a,
		.window_left = -1,
		.causal = 1,
		.invariant = 1,
		.stream = model->dense->stream,
	};
}

static int begin_step(struct kv_model *model, const struct kv_batch_data *b, uint32_t n_rows,
		      struct kv_model_run *ret)
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

	kv_model_fill_angles(model, b->positions, n, model->angles);
	ret->n = n;
	ret->tokens = ops->show(dense, room->tokens, b->tokens, n * sizeof(*b->tokens));
	ret->slots = ops->show(dense, room->slots, b->slots, n * sizeof(*b->slots));
	ret->angles = ops->show(dense, room->angles, model->angles,
				(size_t)n * s->n_rot * sizeof(*model->angles));
	ret->attention = kv_model_attention(model);
	ret->attention.n_seqs = (int32_t)b->n_seqs;
	ret->attention.n_tokens = (int32_t)n;
	ret->attention.max_query_len = (int32_t)b->max_query_len;
	ret->attention.max_seq_len = (int32_t)b->max_seq_len;
	ret->attention.table_width = (int32_t)b->table_width;
	ret->attention.query_start_loc =
		ops->show(dense, room->query_start_loc, b->query_start_loc,
			  (b->n_seqs + 1) * sizeof(*b->query_start_loc));
	ret->attention.seq_lens = ops->show(dense, room->seq_lens, b->seq_lens,
					    b->n_seqs * sizeof(*b->seq_lens));
	ret->attention.block_table =
		ops->show(dense, room->block_table, b->block_table,
			  (size_t)b->n_seqs * b->table_width * sizeof(*b->block_table));
	return 0;
}

static int attend(struct kv_model *model, const struct kv_model_run *step, const struct kv_view *k,
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

static int run_layer(struct kv_model *model, const struct kv_model_run *step, const struct layer *layer,
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

int kv_model_queue(struct kv_model *model, const struct kv_model_run *run,
		   const struct kv_view *views, const int32_t *rows, uint32_t n_rows)
{
	const struct kv_model_shape *s = &model->shape;
	struct kv_dense *dense = model->dense;
	const struct kv_dense_ops *ops = dense->ops;
	struct activations *a = &model->act;
	int r;

	ops->embed(dense, model->embedding, run->tokens, run->n, a->h);
	for (uint32_t i = 0; i < s->n_layers; i++) {
		r = run_layer(model, run, &model->layers[i], &views[2 * i], &views[2 * i + 1]);
		if (r < 0)
			return r;
	}
	if (!n_rows)
		return 0;
	ops->pick(dense, a->h, s->n_embd, rows, n_rows, a->picked);
	ops->rms_norm(dense, a->picked, model->output_norm, n_rows, s->n_embd, s->norm_eps,
		      a->picked);
	ops->matmul(dense, a->picked, n_rows, &(struct kv_matmul){model->output, a->logits, false}, 1);
	return 0;
}

int kv_model_step(struct kv_model *model, const struct kv_batch_data *batch,
		  const struct kv_view *views, const int32_t *rows, uint32_t n_rows, float *logits)
{
	struct kv_dense *dense = model->dense;
	const struct kv_dense_ops *ops = dense->ops;
	struct kv_model_run run = {0};
	const int32_t *shown = NULL;
	int r;

	if (kv_model_graphs_fit(model, batch, n_rows))
		return kv_model_graphs_step(model, batch, views, logits);
	r = begin_step(model, batch, n_rows, &run);
	if (r < 0)
		return r;
	if (n_rows)
		shown = ops->show(dense, model->room.rows, rows, n_rows * sizeof(*rows));
	r = kv_model_queue(model, &run, views, shown, n_rows);
	if (r < 0)
		return r;
	if (n_rows)
		ops->download(dense, logits, model->act.logits,
			      (size_t)n_rows * model->shape.n_vocab * sizeof(*logits));
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
	struct kv_model_graphs *graphs = model->graphs;
	int r;

	model->graphs = NULL; /* kernels are loaded before any is captured */
	r = warm_up_step(model, views, null_block, 1);
	if (!r)
		r = warm_up_step(model, views, null_block,
				 model->max_tokens < room ? model->max_tokens : room);
	model->graphs = graphs;
	return !r && graphs ? warm_up_step(model, views, null_block, 1) : r;
}
