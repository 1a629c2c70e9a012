/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model of the Llama or Gemma 3 architecture: RMSNorm, grouped-query attention with RoPE, gated layers.
 *
 *	h = embed(token)				Gemma: * sqrt(n_embd)
 *	each layer:  x = norm(h);  q, k, v = x Wq, x Wk, x Wv		Gemma: q, k = norm(q), norm(k)
 *	             q, k turned by position;  k, v -> cache
 *	             h += attention(q, cache) Wo	Gemma: norm of that
 *	             x = norm(h);  h += (f(x Wg) * x Wu) Wd	f = silu; Gemma: tanh's GELU, norm of that
 *	logits = norm(h) Wout
 *
 * Some of Gemma's layers slide: they see a window of tokens, and turn by another base.
 *
 * K and V live in the blocks that a kv_batch names; the model has no memory of its own from step to
 * step. Rows of a step don't influence each other except through the cache.
 *
 * Threads: one at a time.
 */
#ifndef KV_ENGINE_MODEL_H
#define KV_ENGINE_MODEL_H

#include <kvcached/kvcached.h>

#include "tools/engine/dense.h"
#include "tools/engine/gguf.h"

#define KV_MODEL_MAX_LAYERS (KV_MAX_COMPONENTS / 2)
#define KV_MODEL_MAX_GROUPS 4

struct kv_model;

struct kv_model_shape {
	const char *name; /* of the architecture, static */
	uint32_t n_layers;
	uint32_t n_embd;
	uint32_t n_ff;
	uint32_t n_heads;
	uint32_t n_kv_heads;
	uint32_t head_dim;
	uint32_t n_rot; /* elements of a head that RoPE turns */
	uint32_t n_ctx;
	uint32_t n_vocab;
	float rope_base;
	float rope_scale; /* positions are divided by it, in layers that don't slide */
	float norm_eps;

	/* Of Gemma; 0 elsewhere. */
	bool halves;	  /* RoPE turns elements i and i + n_rot / 2, not 2i and 2i + 1 */
	bool gelu;
	bool more_norms;  /* of q, k and what a layer adds */
	float embd_scale; /* of embeddings; 0: 1 */
	float attn_scale; /* of scores; 0: 1 / sqrt(head_dim) */
	float attn_softcap;
	float logit_softcap;
	uint32_t window; /* tokens that a token of a sliding layer sees, itself included */
	float rope_base_sliding;
	bool slides[KV_MODEL_MAX_LAYERS];
};

/* kv_model_shape_read() - from the file's metadata. Return: 0; -EINVAL; -ENOENT; -ENOTSUP. */
int kv_model_shape_read(const struct kv_gguf *file, struct kv_model_shape *ret);

/**
 * kv_model_new() - load the weights
 * @file:	must outlive the model
 * @dense:	who computes; must outlive the model
 * @max_tokens: rows of the largest step
 * @max_seqs:	sequences of the largest step, and rows whose logits one step can give
 * @max_blocks: blocks of the longest sequence
 *
 * Return: 0; -ENOENT or -EINVAL if a tensor is missing or has a wrong shape; -ENOTSUP; -ENOMEM;
 *         -EIO.
 */
int kv_model_new(const struct kv_gguf *file, struct kv_dense *dense, uint32_t max_tokens,
		 uint32_t max_seqs, uint32_t max_blocks, struct kv_model **ret);

/**
 * kv_model_use_groups() - layers whose K and V lie in different blocks
 * @of_layer: [n_layers] its group; without this call all have group 0
 *
 * A step then has a batch for each. Before kv_model_use_graphs().
 * Return: 0; -EINVAL for more than KV_MODEL_MAX_GROUPS; -ENOMEM.
 */
int kv_model_use_groups(struct kv_model *model, const uint32_t *of_layer, uint32_t n_groups);

/**
 * kv_model_use_graphs() - decode steps become one graph launch each, where the device has graphs
 *
 * Text is the same: rows have the same bits in every batch. Return: 0 (also where it has none);
 * -ENOMEM.
 */
int kv_model_use_graphs(struct kv_model *model);

/* NULL is allowed; returns NULL. */
struct kv_model *kv_model_free(struct kv_model *model);

const struct kv_model_shape *kv_model_shape(const struct kv_model *model);

/**
 * kv_model_step() - compute a batch: its K and V into the cache, and logits of some rows
 * @batches: [n_groups] copies done; of the same sequences and tokens
 * @views:  [2 * n_layers] K and V of each layer, as kv_layout_uniform() orders them
 * @rows:   [n_rows] rows of the batch whose next-token logits are wanted
 * @logits: host, [n_rows, n_vocab]
 *
 * Work is over on return. Return: 0; -E2BIG if the batch is larger than the model was made for;
 * -EINVAL; -ENOTSUP if the kernels can't run it; -EIO.
 */
int kv_model_step(struct kv_model *model, const struct kv_batch_data *batches,
		  const struct kv_view *views, const int32_t *rows, uint32_t n_rows, float *logits);

/**
 * kv_model_warm_up() - run steps that read null blocks, [n_groups], and write nothing
 *
 * Loads what a device loads at first use, so that the first request doesn't wait for it.
 * Return: as kv_model_step().
 */
int kv_model_warm_up(struct kv_model *model, const struct kv_view *views,
		     const kv_block_id *null_blocks);

#endif
