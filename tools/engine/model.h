/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model of the Llama architecture: RMSNorm, grouped-query attention with RoPE, SwiGLU.
 *
 *	h = embed(token)
 *	each layer:  x = norm(h);  q, k, v = x Wq, x Wk, x Wv;  q, k turned by position
 *	             k, v -> cache;  h += attention(q, cache) Wo
 *	             x = norm(h);  h += (silu(x Wg) * x Wu) Wd
 *	logits = norm(h) Wout
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

struct kv_model;

struct kv_model_shape {
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
	float norm_eps;
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
 * @batch:  copies done
 * @views:  [2 * n_layers] K and V of each layer, as kv_layout_uniform() orders them
 * @rows:   [n_rows] rows of the batch whose next-token logits are wanted
 * @logits: host, [n_rows, n_vocab]
 *
 * Work is over on return. Return: 0; -E2BIG if the batch is larger than the model was made for;
 * -EINVAL; -ENOTSUP if the kernels can't run it; -EIO.
 */
int kv_model_step(struct kv_model *model, const struct kv_batch_data *batch,
		  const struct kv_view *views, const int32_t *rows, uint32_t n_rows, float *logits);

/**
 * kv_model_warm_up() - run steps that read the null block and write nothing
 *
 * Loads what a device loads at first use, so that the first request doesn't wait for it.
 * Return: as kv_model_step().
 */
int kv_model_warm_up(struct kv_model *model, const struct kv_view *views, kv_block_id null_block);

#endif
