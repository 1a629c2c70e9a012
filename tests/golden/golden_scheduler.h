/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KV_TESTS_GOLDEN_SCHEDULER_H
#define KV_TESTS_GOLDEN_SCHEDULER_H

#include "alloc/compat_cache.h"
#include "tests/golden/golden.h"

/* Groups of a trace's config; returns how many. */
size_t golden_cache_groups(const json_t *list, struct kv_compat_cache_group *ret_groups);

int golden_scheduler_trace(const json_t *in, json_t **ret_out);

#endif
