/* SPDX-License-Identifier: Apache-2.0 */
/* A model inside: model.c makes it, model_step.c computes, model_graph.c replays decode steps. */
#ifndef KV_ENGINE_MODEL_PARTS_H
#define KV_ENGINE_MODEL_PARTS_H

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
	struct kv_model_graphs *graphs; /* NULL: steps are launched piece by piece */
};

/* A step's inputs as the device reads them */
struct kv_model_run {
	uint32_t n; /* tokens */
	const int32_t *tokens;
	const int64_t *slots;
	const float *angles;
	struct kv_attention_args attention; /* all but the views */
};

/* angles[t] of positions[t], for n tokens: [n, n_rot / 2, 2] cosine and sine */
void kv_model_fill_angles(const struct kv_model *model, const int64_t *positions, uint32_t n,
			  float *angles);

/* The fields that every step's attention has in common; pointers and sizes of the batch are open. */
struct kv_attention_args kv_model_attention(const struct kv_model *model);

/* Queues all layers and, for @n_rows > 0, the logits of rows @rows (device) into act.logits. */
int kv_model_queue(struct kv_model *model, const struct kv_model_run *run,
		   const struct kv_view *views, const int32_t *rows, uint32_t n_rows);

/*
 * model_graph.c: decode steps as one graph launch. A graph is captured for each of a few batch sizes,
 * at its first use; smaller batches are padded with sequences that have no query. What a step reads
 * is put into pinned memory, from which the graph's first node copies it.
 */
int kv_model_graphs_new(struct kv_model *model, struct kv_model_graphs **ret);
struct kv_model_graphs *kv_model_graphs_free(struct kv_model *model, struct kv_model_graphs *graphs);

/* Whether a step is one that graphs can do: one query a sequence, and its logits wanted. */
bool kv_model_graphs_fit(const struct kv_model *model, const struct kv_batch_data *batch,
			 uint32_t n_rows);
int kv_model_graphs_step(struct kv_model *model, const struct kv_batch_data *batch,
			 const struct kv_view *views, float *logits);

#endif
