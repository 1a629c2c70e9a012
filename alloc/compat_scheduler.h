/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reference calculators: the reference engine's scheduler over its block manager: which requests
 * run in each step, on which blocks, and what moves to and from the host. See compat.h.
 *
 * Memory is allocated as requests come; running out of it aborts, as this is a simulation.
 */
#ifndef KV_ALLOC_COMPAT_SCHEDULER_H
#define KV_ALLOC_COMPAT_SCHEDULER_H

#include "alloc/compat_cache.h"

struct kv_compat_sched_config {
	int32_t n_blocks;
	int32_t n_host_blocks; /* <= 1: no host tier */
	int64_t max_tokens;    /* scheduled in a step */
	int64_t max_batch;     /* requests in a step, and requests that hold blocks */
	int64_t decode_tokens;
	bool caching;
	bool mixed; /* prefills and decodes in one step */
	struct kv_compat_cache_group groups[KV_COMPAT_MAX_GROUPS];
	size_t n_groups;
};

struct kv_compat_move {
	int64_t op_id;
	struct kv_compat_ids device, host;
};

struct kv_compat_scheduled {
	const char *id;
	bool prefill;
	int64_t n_tokens;
	int64_t prefix; /* tokens in the cache before; of a prefill */
	int64_t pool_index;
	const struct kv_compat_tables *tables; /* valid until the next call */
};

struct kv_compat_plan {
	struct kv_compat_scheduled *list; /* prefills first */
	size_t n;
	const struct kv_compat_move *stores, *loads;
	size_t n_stores, n_loads;
	const char *oom; /* a request that was given up; NULL: none */
	int64_t n_free, n_active, n_waiting, n_prefilling, n_decoding;
	int64_t n_host_cached, n_host_free;
};

struct kv_compat_sched;

int kv_compat_sched_new(const struct kv_compat_sched_config *config, struct kv_compat_sched **ret);
struct kv_compat_sched *kv_compat_sched_free(struct kv_compat_sched *s);
void kv_compat_sched_submit(struct kv_compat_sched *s, const char *id, const int32_t *tokens,
			    size_t n);
void kv_compat_sched_result(struct kv_compat_sched *s, const char *id, const int32_t *tokens,
			    size_t n);
/* A request ends: finished or aborted. */
void kv_compat_sched_end(struct kv_compat_sched *s, const char *id);
/* A move to the host (@store) or back has ended. */
void kv_compat_sched_moved(struct kv_compat_sched *s, bool store, int64_t op_id, bool success);
void kv_compat_sched_step(struct kv_compat_sched *s, struct kv_compat_plan *ret_plan);

#endif
