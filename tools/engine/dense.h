/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The dense part of a model on one device: everything but attention and the cache.
 *
 * Activations are float32 rows in the device's memory. Operations are queued in order; those on the
 * host are done on return. An operation that fails is remembered and later ones are skipped:
 * finish() waits and tells.
 *
 * Batch invariance: a row of a result has the same bits whatever rows are computed with it. A
 * prompt that is partly found in the cache, or runs in a batch, so gives the same text as one
 * alone.
 *
 * Threads: one at a time.
 */
#ifndef KV_ENGINE_DENSE_H
#define KV_ENGINE_DENSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tools/engine/gguf.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kv_matrix; /* weights on the device */

struct kv_dense {
	const struct kv_dense_ops *ops;
	int device;   /* enum kv_device */
	void *stream; /* work is queued here; NULL on the host */
};

/* out[t][:] (+)= x[t][:] . w^T */
struct kv_matmul {
	const struct kv_matrix *w;
	float *out; /* [n_rows of x, n_rows of w] */
	bool add;
};

struct kv_dense_ops {
	void (*close)(struct kv_dense *dense);

	/* Memory of the device, zeroed. NULL, with a text, if there is none. */
	void *(*alloc)(struct kv_dense *dense, size_t bytes);
	void (*release)(struct kv_dense *dense, void *p); /* NULL is allowed */

	/*
	 * Bytes of the host as the device reads them: @from itself where it can, else a copy at
	 * @room. @from may change after finish().
	 */
	const void *(*show)(struct kv_dense *dense, void *room, const void *from, size_t bytes);
	void (*download)(struct kv_dense *dense, void *to, const void *from, size_t bytes);

	/* @tensor must outlive the matrix. Return: 0, -ENOMEM, -ENOTSUP, -EIO. */
	int (*matrix_new)(struct kv_dense *dense, const struct kv_tensor *tensor,
			  struct kv_matrix **ret);
	void (*matrix_free)(struct kv_dense *dense, struct kv_matrix *matrix); /* NULL is allowed */

	/* out[t] = row tokens[t] of the matrix */
	void (*embed)(struct kv_dense *dense, const struct kv_matrix *matrix, const int32_t *tokens,
		      size_t n, float *out);
	/* out[t] = row rows[t] of x, [.., width] */
	void (*pick)(struct kv_dense *dense, const float *x, size_t width, const int32_t *rows,
		     size_t n, float *out);
	/* out[t][i] = x[t][i] * weight[i] / sqrt(mean(x[t]^2) + eps) */
	void (*rms_norm)(struct kv_dense *dense, const float *x, const float *weight, size_t n,
			 size_t width, float eps, float *out);
	void (*matmul)(struct kv_dense *dense, const float *x, size_t n,
		       const struct kv_matmul *jobs, size_t n_jobs);
	/*
	 * Turn the pairs (2i, 2i+1) of the first n_rot elements of each head by angle i of the row:
	 * x [n, n_heads, head_dim], angles [n, n_rot / 2, 2] cosine and sine.
	 */
	void (*rope)(struct kv_dense *dense, float *x, const float *angles, size_t n,
		     uint32_t n_heads, uint32_t head_dim, uint32_t n_rot);
	/* gate[t][i] = silu(gate[t][i]) * up[t][i] */
	void (*silu_multiply)(struct kv_dense *dense, float *gate, const float *up, size_t n,
			      size_t width);

	/*
	 * Graphs; all NULL where the device has none. What is queued between record() and
	 * recorded() runs when replay() queues it, any number of times. Memory of alloc_host() can
	 * be shown and downloaded to inside one: it is read or written at each replay.
	 */
	int (*record)(struct kv_dense *dense);
	int (*recorded)(struct kv_dense *dense, void **ret_graph); /* after a failure too */
	void (*replay)(struct kv_dense *dense, void *graph);
	void (*graph_free)(struct kv_dense *dense, void *graph); /* NULL is allowed */
	void *(*alloc_host)(struct kv_dense *dense, size_t bytes);
	void (*release_host)(struct kv_dense *dense, void *p); /* NULL is allowed */

	/* Wait for what was queued. Return: 0, or the first failure since the last call. */
	int (*finish)(struct kv_dense *dense);

	/* What not every model needs; all NULL where the device can't. */

	/* gate[t][i] = gelu(gate[t][i]) * up[t][i], gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) */
	void (*gelu_multiply)(struct kv_dense *dense, float *gate, const float *up, size_t n,
			      size_t width);
	/* out[t][i] += x[t][i] */
	void (*add)(struct kv_dense *dense, const float *x, size_t n, size_t width, float *out);
	/* x[t][i] *= factor */
	void (*scale)(struct kv_dense *dense, float *x, size_t n, size_t width, float factor);
};

/* kv_dense_cpu() - on the host, with @n_threads (0: one for each CPU) */
int kv_dense_cpu(unsigned n_threads, struct kv_dense **ret);

/*
 * kv_dense_cuda() - on the GPU with this UUID ("GPU-xxxxxxxx-...")
 *
 * Return: 0; -ENOTSUP in a build without CUDA; -ENODEV if this process sees no such GPU; -EIO.
 */
int kv_dense_cuda(const char *uuid, struct kv_dense **ret);

/* kv_dense_close() - NULL is allowed. Return: NULL. */
static inline struct kv_dense *kv_dense_close(struct kv_dense *dense)
{
	if (dense)
		dense->ops->close(dense);
	return NULL;
}

#ifdef __cplusplus
}
#endif
#endif
