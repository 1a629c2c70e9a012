/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model inside: model.c makes it, model_halves.c reorders weights, model_step.c computes, model_graph.c
 * replays decode steps.
 */
#ifndef KV_ENGINE_MODEL_PARTS_H
#define KV_ENGINE_MODEL_PARTS_H

#include "tools/engine/model.h"

/* Weights in an order that isn't the file's */
struct kv_turned {
	struct kv_tensor tensor;
	void *data; /* from malloc() */
};

struct layer {
	float *attn_norm;      /* [n_embd] */
	float *ffn_norm;       /* [n_embd] */
	float *q_norm;	       /* [head_dim], or NULL, as the following */
	float *k_norm;	       /* [head_dim] */
	float *attn_post_norm; /* [n_embd] */
	float *ffn_post_norm;  /* [n_embd] */
	uint32_t group;
	bool slides;
	struct kv_turned turned_q;
	struct kv_turned turned_k;
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
	int32_t *query_start_loc;
	int32_t *seq_lens;
	int32_t *rows;
	float *angles[2]; /* [max_tokens, n_rot / 2, 2]; the second, of sliding layers, may be NULL */
	int64_t *slots[KV_MODEL_MAX_GROUPS];
	int32_t *block_table[KV_MODEL_MAX_GROUPS];
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
	uint32_t n_groups;
	uint32_t n_angles;     /* 2 if some layers turn by another base */
	float *frequencies[2]; /* host, [n_rot / 2] radians a token */
	float *angles[2];      /* host, as room.angles */
	struct kv_model_graphs *graphs; /* NULL: steps are launched piece by piece */
};

/* Where the layers of a group have their K and V in a step */
struct kv_model_blocks {
	const int64_t *slots;
	const int32_t *block_table;
	int32_t table_width;
};

/* A step's inputs as the device reads them */
struct kv_model_run {
	uint32_t n; /* tokens */
	const int32_t *tokens;
	const float *angles[2];
	struct kv_model_blocks blocks[KV_MODEL_MAX_GROUPS];
	struct kv_attention_args attention; /* all but views and blocks */
};

/*
 * kv_model_turn_rows() - rows of each head in the order that dense.h turns
 * kv_model_turn_norm() - likewise the elements of a norm, [head_dim]
 *
 * @ret->data is the caller's. Return: 0; -ENOMEM; -ENOTSUP, the norm is quantised.
 */
int kv_model_turn_rows(const struct kv_model *model, const struct kv_tensor *from,
		       struct kv_turned *ret);
int kv_model_turn_norm(const struct kv_model *model, const struct kv_tensor *from,
		       struct kv_turned *ret);

/* angles[t] of positions[t], for n tokens: [n, n_rot / 2, 2] cosine and sine; @kind: which frequencies */
void kv_model_fill_angles(const struct kv_model *model, uint32_t kind, const int64_t *positions,
			  uint32_t n, float *angles);

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
bool kv_model_graphs_fit(const struct kv_model *model, const struct kv_batch_data *batches,
			 uint32_t n_rows);
int kv_model_graphs_step(struct kv_model *model, const struct kv_batch_data *batches,
			 const struct kv_view *views, float *logits);

#endif
