/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long something took, counted in buckets: up to 250 ns, 1 us, 4 us, ... 4.2 s, and longer. One
 * writer; others may read while it counts, and see each number as it was a moment ago.
 */
#ifndef KV_INTERNAL_LATENCY_H
#define KV_INTERNAL_LATENCY_H

#include <stdint.h>

#include "include/internal/atomic.h"

#define KV_LATENCY_BUCKETS 14 /* the last has no bound */

struct kv_latency {
	uint64_t n[KV_LATENCY_BUCKETS];
	uint64_t sum_ns;
};

/* kv_latency_bound() - the most nanoseconds that bucket @i < KV_LATENCY_BUCKETS - 1 counts */
static inline uint64_t kv_latency_bound(unsigned i)
{
	return (uint64_t)250 << 2 * i;
}

static inline void kv_latency_add(struct kv_latency *latency, uint64_t ns)
{
	unsigned i = 0;

	while (i < KV_LATENCY_BUCKETS - 1 && ns > kv_latency_bound(i))
		i++;
	kv_store_relaxed(&latency->n[i], latency->n[i] + 1);
	kv_store_relaxed(&latency->sum_ns, latency->sum_ns + ns);
}

/* kv_latency_sum() - what @more counted as well */
static inline void kv_latency_sum(struct kv_latency *latency, const struct kv_latency *more)
{
	for (unsigned i = 0; i < KV_LATENCY_BUCKETS; i++)
		latency->n[i] += kv_load_relaxed(&more->n[i]);
	latency->sum_ns += kv_load_relaxed(&more->sum_ns);
}

#endif
