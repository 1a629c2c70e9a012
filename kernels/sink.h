/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A sink, one more logit of a row that has no value, brought in after the sums over keys are there:
 *
 *	out' = out / (1 + e^(sink - lse));  lse' = ln(e^lse + e^sink)
 *
 * Exact, and no partial sum needs to know of it; so it enters once, however a row was cut.
 */
#ifndef KV_KERNELS_SINK_H
#define KV_KERNELS_SINK_H

#include <math.h>

#include "kernels/dtype.h"

/* What out is multiplied by; 0 for a row without keys, 1 for a sink of -infinity. */
KV_HD static inline float kv_sink_factor(float sink, float lse)
{
	return lse == -INFINITY ? 0 : 1 / (1 + expf(sink - lse));
}

KV_HD static inline float kv_sink_lse(float sink, float lse)
{
	float top = lse < sink ? sink : lse, other = lse < sink ? lse : sink;

	return other == -INFINITY ? top : top + log1pf(expf(other - top));
}

#endif
