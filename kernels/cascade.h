/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention over a prefix that all sequences share, read once for all of them: two passes and a
 * merge, each pass on whichever backend can.
 *
 *	shared	all queries as one sequence, over keys [0, shared_prefix) of table row 0, all visible
 *	own	each sequence's queries over its keys from shared_prefix on, by the rules of the call
 *
 * Both write f32 and lse to the end of the workspace; its start is the passes' own workspace, so that
 * it is the same memory in calls with and without a prefix. Sinks enter in the merge.
 */
#ifndef KV_KERNELS_CASCADE_H
#define KV_KERNELS_CASCADE_H

#include <stdbool.h>

#include "kernels/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Whether @args (resolved) run in two passes. If not, the prefix is read for each sequence: what
 * comes out is the same. So it is with one sequence; with a window or ALiBi, which go by positions;
 * if rows must not depend on the batch; and if the workspace is too small.
 */
bool kv_cascade_wanted(const struct kv_attention_args *args);

/* Bytes that the passes' results take; 0: no cascade for such arguments. */
size_t kv_cascade_bytes(const struct kv_attention_args *args);

void kv_cascade_passes(const struct kv_attention_args *args, struct kv_attention_args *ret_shared,
		       struct kv_attention_args *ret_own);

/* @backend: NULL: the first that can, for each pass */
int kv_cascade(const struct kv_attn_backend *backend, const struct kv_attention_args *args);

/* merge.cu: offsets[0..1] = first and last of query_start_loc, *length = @prefix */
int kv_cascade_prepare_cuda(const struct kv_attention_args *args, int32_t *offsets);

#ifdef __cplusplus
}
#endif
#endif
