/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where an engine's K and V are: a pool for each group of layers that keep the same tokens, as the library plans
 * them from the model's file. Layers that see all tokens are a group, sliding ones another, whose blocks
 * go when no later token sees them.
 *
 * Threads: one at a time.
 */
#ifndef KV_ENGINE_POOLS_H
#define KV_ENGINE_POOLS_H

#include <kvcached/kvcached.h>

#include "tools/engine/gguf.h"
#include "tools/engine/model.h"

struct kv_engine_pools {
	struct kv_client *client;
	char names[KV_MODEL_MAX_GROUPS][KV_NAME_MAX];
	struct kv_pool *pools[KV_MODEL_MAX_GROUPS];
	uint32_t n_pools;
	struct kv_groups *groups;
	struct kv_pool *group_pools[KV_MODEL_MAX_GROUPS]; /* of each group */
	uint32_t n_groups;
	struct kv_view *views; /* [2 * n_layers] K and V of each layer */
	uint32_t *of_layer;    /* [n_layers] its group */
};

struct kv_engine_pools_options {
	struct kv_client *client;
	const struct kv_gpu *gpu;
	const struct kv_gguf *file;
	const char *path; /* of the file, for words */
	const struct kv_model_shape *shape;
	const char *name; /* of the pool; where there are several "NAME.GROUP" */
	const char *model; /* and the other parts of kv_pool_options that say what is shared */
	const char *revision;
	const char *name_space;
	int kv_dtype; /* enum kv_dtype */
	uint32_t block_tokens;
	uint32_t chunk; /* tokens of a step */
};

/* kv_engine_pools_open() - Return: 0; an error of the library; -ENOTSUP, plan and model differ; -ENOMEM */
int kv_engine_pools_open(const struct kv_engine_pools_options *options, struct kv_engine_pools *ret);

/* kv_engine_pools_close() - @drop: nobody else knows them. All zero is allowed. */
void kv_engine_pools_close(struct kv_engine_pools *pools, bool drop);

#endif
