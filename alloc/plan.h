/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of plan.c and plan_arch.c; the interface is <kvcached/plan.h>.
 */
#ifndef KV_ALLOC_PLAN_H
#define KV_ALLOC_PLAN_H

#include <kvcached/plan.h>

#define KV_PLAN_MAX_COMPONENTS	 16384u
#define KV_PLAN_MAX_BLOCK_TOKENS (1u << 20)

/**
 * kv_plan_pool_name() - what a pool of a plan is called
 * @name: of the model's pools: its own where the plan has one pool, else "NAME.POOL"
 *
 * Return: 0; -EINVAL if it is longer than a name may be.
 */
int kv_plan_pool_name(const struct kv_plan *plan, uint32_t pool, const char *name,
		      char ret_name[KV_NAME_MAX]);

#endif
