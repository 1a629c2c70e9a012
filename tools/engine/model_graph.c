/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decode steps as graphs.
 *
 * Sizes double from 1; a batch uses the smallest that holds it. The inputs of a size lie one after
 * the other, in pinned memory and, at equal offsets, on the device:
 *
 *	slots [n] of each group | angles [n, n_rot] of each base | tokens [n] | rows [n]
 *	| query_start_loc [n + 1] | seq_lens [n] | block_table [n, max_blocks] of each group
 *
 * One copy, the layers, the logits' copy back: nothing in a graph goes by a length, so it serves any
 * lengths up to the model's. Padding is a sequence with no query, whose row of activations nobody
 * looks at. Views are part of a graph: other views, other graphs.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tools/engine/error.h"
#include "tools/engine/model_parts.h"

#define MAX_SIZES 16 /* 1, 2, 4, ... */

struct kv_model_graphs {
	void *host; /* pinned */
	void *device;
	float *logits; /* pinned, [max_seqs, n_vocab] */
	void *graphs[MAX_SIZES]; /* NULL: not captured yet */
	struct kv_view *views; /* of the captured ones, [2 * n_layers] */
};

/* Offsets of a size's inputs. */
struct places {
	size_t angles, tokens, rows, query_start_loc, seq_lens, block_table, bytes; /* slots: at 0 */
};

static struct places places_of(const struct kv_model *model, size_t n)
{
	struct places p = {0};

	p.angles = model->n_groups * n * sizeof(int64_t);
	p.tokens = p.angles + model->n_angles * n * model->shape.n_rot * sizeof(float);
	p.rows = p.tokens + n * sizeof(int32_t);
	p.query_start_loc = p.rows + n * sizeof(int32_t);
	p.seq_lens = p.query_start_loc + (n + 1) * sizeof(int32_t);
	p.block_table = p.seq_lens + n * sizeof(int32_t);
	p.bytes = p.block_table + model->n_groups * n * model->max_blocks * sizeof(int32_t);
	return p;
}

/* The smallest size for @n sequences, as a power of 2. */
static int size_for(uint32_t n)
{
	int size = 0;

	while (1u << size < n)
		size++;
	return size;
}

/* Sequences that the graph of a size has room for: not more than the model has. */
static uint32_t width_of(const struct kv_model *model, int size)
{
	return 1u << size < model->max_seqs ? 1u << size : model->max_seqs;
}

int kv_model_graphs_new(struct kv_model *model, struct kv_model_graphs **ret)
{
	const struct kv_dense_ops *ops = model->dense->ops;
	struct places p = places_of(model, model->max_seqs);
	struct kv_model_graphs *g;

	if (!ops->record || size_for(model->max_seqs) >= MAX_SIZES) {
		*ret = NULL;
		return 0;
	}
	g = calloc(1, sizeof(*g));
	if (!g)
		return kv_engine_error(-ENOMEM, "no memory for graphs");
	g->host = ops->alloc_host(model->dense, p.bytes);
	g->device = ops->alloc(model->dense, p.bytes);
	g->logits = ops->alloc_host(model->dense, (size_t)model->max_seqs * model->shape.n_vocab *
							  sizeof(float));
	g->views = calloc(2 * model->shape.n_layers, sizeof(*g->views));
	if (!g->host || !g->device || !g->logits || !g->views) {
		kv_model_graphs_free(model, g);
		return kv_engine_error(-ENOMEM, "no memory for graphs of %u sequences",
				       model->max_seqs);
	}
	*ret = g;
	return 0;
}

static void forget(struct kv_model *model, struct kv_model_graphs *g)
{
	for (int i = 0; i < MAX_SIZES; i++) {
		model->dense->ops->graph_free(model->dense, g->graphs[i]);
		g->graphs[i] = NULL;
	}
}

struct kv_model_graphs *kv_model_graphs_free(struct kv_model *model, struct kv_model_graphs *g)
{
	const struct kv_dense_ops *ops = model->dense->ops;

	if (!g)
		return NULL;
	forget(model, g);
	ops->release_host(model->dense, g->host);
	ops->release_host(model->dense, g->logits);
	ops->release(model->dense, g->device);
	free(g->views);
	free(g);
	return NULL;
}

bool kv_model_graphs_fit(const struct kv_model *model, const struct kv_batch_data *b,
			 uint32_t n_rows)
{
	for (uint32_t g = 0; g < model->n_groups; g++)
		if (b[g].table_width > model->max_blocks)
			return false;
	return model->graphs && b->max_query_len == 1 && b->n_real_tokens == b->n_real_seqs &&
	       n_rows == b->n_real_seqs && n_rows && n_rows <= model->max_seqs;
}

/* One group's slots and table, padded to @n sequences */
static void fill_blocks(const struct kv_model *model, const struct kv_batch_data *b, uint32_t n,
			int64_t *slots, int32_t *table)
{
	uint32_t real = b->n_real_seqs, width = model->max_blocks;

	memcpy(slots, b->slots, real * sizeof(*slots));
	for (uint32_t i = real; i < n; i++)
		slots[i] = KV_SLOT_PAD;
	for (uint32_t i = 0; i < real; i++) {
		memcpy(table + (size_t)i * width, b->block_table + (size_t)i * b->table_width,
		       b->table_width * sizeof(int32_t));
		for (uint32_t c = b->table_width; c < width; c++)
			table[(size_t)i * width + c] = table[(size_t)i * width];
	}
	memset(table + (size_t)real * width, 0, (size_t)(n - real) * width * sizeof(int32_t));
}

/* Puts a step's inputs, padded to @n sequences, where the graph's copy finds them. */
static void fill(const struct kv_model *model, const struct kv_batch_data *b, uint32_t n)
{
	struct places p = places_of(model, n);
	uint32_t real = b->n_real_seqs, pad = n - real, n_rot = model->shape.n_rot;
	char *to = model->graphs->host;
	float *angles = (float *)(void *)(to + p.angles);
	int32_t *loc = (int32_t *)(void *)(to + p.query_start_loc);
	int32_t *rows = (int32_t *)(void *)(to + p.rows);

	for (uint32_t g = 0; g < model->n_groups; g++)
		fill_blocks(model, &b[g], n, (int64_t *)(void *)to + (size_t)g * n,
			    (int32_t *)(void *)(to + p.block_table) +
				    (size_t)g * n * model->max_blocks);
	for (uint32_t i = 0; i < model->n_angles; i++, angles += (size_t)n * n_rot) {
		kv_model_fill_angles(model, i, b->positions, real, angles);
		memset(angles + (size_t)real * n_rot, 0, (size_t)pad * n_rot * sizeof(float));
	}
	memcpy(to + p.tokens, b->tokens, real * sizeof(int32_t));
	memset(to + p.tokens + real * sizeof(int32_t), 0, pad * sizeof(int32_t));
	for (uint32_t i = 0; i < n; i++) {
		rows[i] = (int32_t)(i < real ? i : 0);
		loc[i + 1] = (int32_t)(i < real ? i + 1 : real);
	}
	loc[0] = 0;
	memcpy(to + p.seq_lens, b->seq_lens, real * sizeof(int32_t));
	memset(to + p.seq_lens + real * sizeof(int32_t), 0, pad * sizeof(int32_t));
}

static int capture(struct kv_model *model, const struct kv_view *views, uint32_t n, void **ret)
{
	const struct kv_dense_ops *ops = model->dense->ops;
	struct kv_model_graphs *g = model->graphs;
	struct places p = places_of(model, n);
	const char *at = g->device;
	struct kv_model_run run = {
		.n = n,
		.tokens = (const int32_t *)(const void *)(at + p.tokens),
		.attention = kv_model_attention(model),
	};
	void *graph = NULL;
	int r, ended;

	for (uint32_t i = 0; i < model->n_angles; i++)
		run.angles[i] = (const float *)(const void *)(at + p.angles) +
				(size_t)i * n * model->shape.n_rot;
	for (uint32_t i = 0; i < model->n_groups; i++)
		run.blocks[i] = (struct kv_model_blocks){
			.slots = (const int64_t *)(const void *)at + (size_t)i * n,
			.block_table = (const int32_t *)(const void *)(at + p.block_table) +
				       (size_t)i * n * model->max_blocks,
			.table_width = (int32_t)model->max_blocks,
		};
	run.attention.n_seqs = run.attention.n_tokens = (int32_t)n;
	run.attention.max_query_len = 1;
	run.attention.max_seq_len = (int32_t)model->shape.n_ctx;
	run.attention.query_start_loc = (const int32_t *)(const void *)(at + p.query_start_loc);
	run.attention.seq_lens = (const int32_t *)(const void *)(at + p.seq_lens);
	r = ops->record(model->dense);
	if (r < 0)
		return r;
	ops->show(model->dense, g->device, g->host, p.bytes);
	r = kv_model_queue(model, &run, views, (const int32_t *)(const void *)(at + p.rows), n);
	ops->download(model->dense, g->logits, model->act.logits,
		      (size_t)n * model->shape.n_vocab * sizeof(float));
	ended = ops->recorded(model->dense, &graph);
	if (r < 0 && !ended)
		ops->graph_free(model->dense, graph); /* of a part of the layers */
	if (r < 0 || ended < 0)
		return r < 0 ? r : ended;
	*ret = graph;
	return 0;
}

int kv_model_graphs_step(struct kv_model *model, const struct kv_batch_data *batches,
			 const struct kv_view *views, float *logits)
{
	const struct kv_dense_ops *ops = model->dense->ops;
	size_t views_bytes = 2 * model->shape.n_layers * sizeof(*views);
	struct kv_model_graphs *g = model->graphs;
	int size = size_for(batches->n_real_seqs), r;
	uint32_t n = width_of(model, size);

	if (memcmp(g->views, views, views_bytes) != 0) {
		forget(model, g);
		memcpy(g->views, views, views_bytes);
	}
	fill(model, batches, n);
	if (!g->graphs[size]) {
		r = capture(model, views, n, &g->graphs[size]);
		if (r < 0)
			return r;
	}
	ops->replay(model->dense, g->graphs[size]);
	r = ops->finish(model->dense);
	if (r < 0)
		return r;
	memcpy(logits, g->logits, (size_t)batches->n_real_seqs * model->shape.n_vocab * sizeof(float));
	return 0;
}

int kv_model_use_graphs(struct kv_model *model)
{
	return kv_model_graphs_new(model, &model->graphs);
}
