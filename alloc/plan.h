/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of plan.c and plan_arch.c; the interface is <kvcached/plan.h>.
 */
#ifndef KV_ALLOC_PLAN_H
#define KV_ALLOC_PLAN_H

#define KV_PLAN_MAX_COMPONENTS	 16384u
#define KV_PLAN_MAX_BLOCK_TOKENS (1u << 20)

#endif
