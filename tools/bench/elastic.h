/* SPDX-License-Identifier: Apache-2.0 */
/* kvbench elastic, compact: pools with the block sizes of models, and the driver to compare with. */
#ifndef KV_TOOLS_BENCH_ELASTIC_H
#define KV_TOOLS_BENCH_ELASTIC_H

#include "tools/bench/bench.h"

struct kv_elastic_model {
	const char *name;
	uint32_t block_tokens, n_layers, n_heads, head_dim; /* one head: K alone, as latent rows are */
};

uint64_t kv_elastic_block_bytes(const struct kv_elastic_model *m);

/* kv_elastic_open() - Return: exit status. */
int kv_elastic_open(const struct kv_bench *b, struct kv_client *client,
		    const struct kv_elastic_model *m, const char *name, uint64_t max_bytes,
		    struct kv_pool **ret);

/**
 * kv_elastic_driver_ms() - create, map, set access, unmap and release of @bytes in pages of 2 MiB
 * @why: what kept it from being measured; [size]
 *
 * Return: ms, the median of several rounds; 0 where there is no GPU.
 */
double kv_elastic_driver_ms(uint64_t bytes, char *why, size_t size);

/* kv_elastic_copy_rate() - bytes a second of copying on the device, in pieces of @bytes; 0: no GPU */
double kv_elastic_copy_rate(uint64_t bytes, uint64_t total);

#endif
