/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "include/internal/cleanup.h"
#include "tools/engine/error.h"
#include "tools/engine/model_parts.h"

void kv_model_fill_angles(const struct kv_model *model, uint32_t kind, const int64_t *positions,
			  uint32_t n, float *angles)
{
	uint32_t n_rot = model->shape.n_rot;

	for (uint32_t t = 0; t < n; t++, angles += n_rot) {
		for (uint32_t i = 0; i < n_rot / 2; i++) {
			float angle = (float)positions[t] * model->frequencies[kind][i];

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
		.sm_scale = model->shape.attn_scale,
		.softcap = model->shape.attn_softcap,
		.window_left = -1,
		.causal = 1,
		.invariant = 1,
		.stream = model->dense->stream,
	};
}

static int check_step(const struct kv_model *model, const struct kv_batch_data *b, uint32_t n_rows)
{
	uint32_t width = 0;

	for (uint32_t g = 0; g < model->n_groups; g++)
		width = b[g].table_width > width ? b[g].table_width : width;
	if (b->n_real_tokens > model->max_tokens || b->n_seqs > model->max_seqs ||
	    n_rows > model->max_seqs ||
	    (uint64_t)b->n_seqs * width > (uint64_t)model->max_seqs * model->max_blocks)
		return kv_engine_error(-E2BIG,
				       "step of %u tokens, %u sequences with %u blocks each: the "
				       "model was made for %u, %u and %u",
				       b->n_real_tokens, b->n_seqs, width, model->max_tokens,
				       model->max_seqs, model->max_blocks);
	for (uint32_t g = 1; g < model->n_groups; g++)
		if (b[g].n_real_tokens != b->n_real_tokens || b[g].n_seqs != b->n_seqs)
			return kv_engine_error(-EINVAL,
					       "step of %u tokens and %u sequences, in group %u of %u "
					       "and %u",
					       b->n_real_tokens, b->n_seqs, g, b[g].n_real_tokens,
					       b[g].n_seqs);
	return 0;
}

static int begin_step(struct kv_model *model, const struct kv_batch_data *b, uint32_t n_rows,
		      struct kv_model_run *ret)
{
	const struct kv_model_shape *s = &model->shape;
	struct kv_dense *dense = model->dense;
	const struct kv_dense_ops *ops = dense->ops;
	struct inputs *room = &model->room;
	uint32_t n = b->n_real_tokens;
	int r;

	r = check_step(model, b, n_rows);
	if (r < 0)
		return r;

	ret->n = n;
	ret->tokens = ops->show(dense, room->tokens, b->tokens, n * sizeof(*b->tokens));
	for (uint32_t i = 0; i < model->n_angles; i++) {
		kv_model_fill_angles(model, i, b->positions, n, model->angles[i]);
		ret->angles[i] = ops->show(dense, room->angles[i], model->angles[i],
					   (size_t)n * s->n_rot * sizeof(float));
	}
	ret->attention = kv_model_attention(model);
	ret->attention.n_seqs = (int32_t)b->n_seqs;
	ret->attention.n_tokens = (int32_t)n;
	ret->attention.max_query_len = (int32_t)b->max_query_len;
	ret->attention.max_seq_len = (int32_t)b->max_seq_len;
	ret->attention.query_start_loc =
		ops->show(dense, room->query_start_loc, b->query_start_loc,
			  (b->n_seqs + 1) * sizeof(*b->query_start_loc));
	ret->attention.seq_lens = ops->show(dense, room->seq_lens, b->seq_lens,
					    b->n_seqs * sizeof(*b->seq_lens));
	for (uint32_t g = 0; g < model->n_groups; g++)
		ret->blocks[g] = (struct kv_model_blocks){
			.slots = ops->show(dense, room->slots[g], b[g].slots,
					   n * sizeof(*b->slots)),
			.block_table = ops->show(dense, room->block_table[g], b[g].block_table,
						 (size_t)b->n_seqs * b[g].table_width *
							 sizeof(*b->block_table)),
			.table_width = (int32_t)b[g].table_width,
		};
	return 0;
}

static int attend(struct kv_model *model, const struct kv_model_run *step, const struct layer *layer,
		  const struct kv_view *k, const struct kv_view *v)
{
	const struct kv_model_blocks *blocks = &step->blocks[layer->group];
	struct kv_attention_args attention = step->attention;
	struct kv_write_args write = {
		.size = sizeof(write),
		.device = model->dense->device,
		.dtype = KV_F32,
		.n_tokens = step->n,
		.key = model->act.k,
		.value = model->act.v,
		.slots = blocks->slots,
		.k = *k,
		.v = *v,
		.stream = model->dense->stream,
	};
	int r;

	r = kv_write(&write);
	if (r < 0)
		return kv_engine_error(r, "kv_write: %s", kv_error_text());

	attention.block_table = blocks->block_table;
	attention.table_width = blocks->table_width;
	if (layer->slides)
		attention.window_left = (int32_t)model->shape.window - 1;
	attention.k = *k;
	attention.v = *v;
	r = kv_attention(&attention);
	if (r < 0)
		return kv_engine_error(r, "kv_attention: %s", kv_error_text());
	return 0;
}

/* h += what w makes of x, normed where the model does that */
static void add_to_stream(struct kv_model *model, const float *x, uint32_t n, const struct kv_matrix *w,
			  const float *norm)
{
	const struct kv_model_shape *s = &model->shape;
	const struct kv_dense_ops *ops = model->dense->ops;
	struct activations *a = &model->act;

	ops->matmul(model->dense, x, n, &(struct kv_matmul){w, norm ? a->x : a->h, !norm}, 1);
	if (!norm)
		return;
	ops->rms_norm(model->dense, a->x, norm, n, s->n_embd, s->norm_eps, a->x);
	ops->add(model->dense, a->x, n, s->n_embd, a->h);
}

static int run_attention(struct kv_model *model, const struct kv_model_run *step,
			 const struct layer *layer, const struct kv_view *k, const struct kv_view *v)
{
	const struct kv_model_shape *s = &model->shape;
	struct kv_dense *dense = model->dense;
	const struct kv_dense_ops *ops = dense->ops;
	struct activations *a = &model->act;
	const float *angles = step->angles[layer->slides && model->n_angles > 1];
	uint32_t n = step->n;
	int r;

	ops->rms_norm(dense, a->h, layer->attn_norm, n, s->n_embd, s->norm_eps, a->x);
	ops->matmul(dense, a->x, n,
		    (struct kv_matmul[]){{layer->q, a->q, false},
					 {layer->k, a->k, false},
					 {layer->v, a->v, false}},
		    3);
	if (layer->q_norm) {
		ops->rms_norm(dense, a->q, layer->q_norm, (size_t)n * s->n_heads, s->head_dim,
			      s->norm_eps, a->q);
		ops->rms_norm(dense, a->k, layer->k_norm, (size_t)n * s->n_kv_heads, s->head_dim,
			      s->norm_eps, a->k);
	}
	ops->rope(dense, a->q, angles, n, s->n_heads, s->head_dim, s->n_rot);
	ops->rope(dense, a->k, angles, n, s->n_kv_heads, s->head_dim, s->n_rot);
	r = attend(model, step, layer, k, v);
	if (r < 0)
		return r;
	add_to_stream(model, a->a, n, layer->o, layer->attn_post_norm);
	return 0;
}

static void run_gates(struct kv_model *model, uint32_t n, const struct layer *layer)
{
	const struct kv_model_shape *s = &model->shape;
	struct kv_dense *dense = model->dense;
	const struct kv_dense_ops *ops = dense->ops;
	struct activations *a = &model->act;

	ops->rms_norm(dense, a->h, layer->ffn_norm, n, s->n_embd, s->norm_eps, a->x);
	ops->matmul(dense, a->x, n,
		    (struct kv_matmul[]){{layer->gate, a->gate, false}, {layer->up, a->up, false}},
		    2);
	if (s->gelu)
		ops->gelu_multiply(dense, a->gate, a->up, n, s->n_ff);
	else
		ops->silu_multiply(dense, a->gate, a->up, n, s->n_ff);
	add_to_stream(model, a->gate, n, layer->down, layer->ffn_post_norm);
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
	if (s->embd_scale)
		ops->scale(dense, a->h, run->n, s->n_embd, s->embd_scale);
	for (uint32_t i = 0; i < s->n_layers; i++) {
		r = run_attention(model, run, &model->layers[i], &views[2 * i], &views[2 * i + 1]);
		if (r < 0)
			return r;
		run_gates(model, run->n, &model->layers[i]);
	}
	if (!n_rows)
		return 0;
	ops->pick(dense, a->h, s->n_embd, rows, n_rows, a->picked);
	ops->rms_norm(dense, a->picked, model->output_norm, n_rows, s->n_embd, s->norm_eps,
		      a->picked);
	ops->matmul(dense, a->picked, n_rows, &(struct kv_matmul){model->output, a->logits, false}, 1);
	return 0;
}

/* On the host, where the logits are by now */
static void cap_logits(const struct kv_model *model, float *logits, uint32_t n_rows)
{
	size_t n = (size_t)n_rows * model->shape.n_vocab;
	float cap = model->shape.logit_softcap;

	for (size_t i = 0; cap > 0 && i < n; i++)
		logits[i] = cap * tanhf(logits[i] / cap);
}

static int run_step(struct kv_model *model, const struct kv_batch_data *batches,
		    const struct kv_view *views, const int32_t *rows, uint32_t n_rows, float *logits)
{
	struct kv_dense *dense = model->dense;
	const struct kv_dense_ops *ops = dense->ops;
	struct kv_model_run run = {0};
	const int32_t *shown = NULL;
	int r;

	r = begin_step(model, batches, n_rows, &run);
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

int kv_model_step(struct kv_model *model, const struct kv_batch_data *batches,
		  const struct kv_view *views, const int32_t *rows, uint32_t n_rows, float *logits)
{
	int r;

	r = kv_model_graphs_fit(model, batches, n_rows)
		    ? kv_model_graphs_step(model, batches, views, logits)
		    : run_step(model, batches, views, rows, n_rows, logits);
	if (r < 0)
		return r;
	cap_logits(model, logits, n_rows);
	return 0;
}

/* One sequence of @n new tokens whose blocks are all the null block */
static int warm_up_step(struct kv_model *model, const struct kv_view *views,
			const kv_block_id *null_blocks, uint32_t n)
{
	struct kv_batch_data batches[KV_MODEL_MAX_GROUPS];
	uint32_t n_groups = model->n_groups, width = (n + views[0].block_tokens - 1) / views[0].block_tokens;
	kv_cleanup(kv_freep) int32_t *table = calloc((size_t)n_groups * width, sizeof(*table));
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
		.slots = slots,
		.query_start_loc = starts,
		.seq_lens = lens,
		.positions = positions,
		.tokens = tokens,
	};

	if (!table || !slots || !positions || !tokens || !logits)
		return kv_engine_error(-ENOMEM, "no memory for the warm-up");

	for (uint32_t i = 0; i < n_groups * width; i++)
		table[i] = null_blocks[i / width];
	for (uint32_t i = 0; i < n; i++)
		slots[i] = KV_SLOT_PAD;
	for (uint32_t g = 0; g < n_groups; g++) {
		batches[g] = batch;
		batches[g].block_table = table + (size_t)g * width;
	}
	return kv_model_step(model, batches, views, &last, 1, logits);
}

int kv_model_warm_up(struct kv_model *model, const struct kv_view *views,
		     const kv_block_id *null_blocks)
{
	uint32_t room = model->max_blocks * (uint32_t)views[0].block_tokens;
	struct kv_model_graphs *graphs = model->graphs;
	int r;

	model->graphs = NULL; /* kernels are loaded before any is captured */
	r = warm_up_step(model, views, null_blocks, 1);
	if (!r)
		r = warm_up_step(model, views, null_blocks,
				 model->max_tokens < room ? model->max_tokens : room);
	model->graphs = graphs;
	return !r && graphs ? warm_up_step(model, views, null_blocks, 1) : r;
}
