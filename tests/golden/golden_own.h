/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the public calls make of a vector's input, beside the reference calculator: true if it is the same.
 * Inputs that the public call's types can't hold, and those that it refuses and the other engine clamps, count as
 * the same: the reference alone answers for them.
 */
#ifndef KV_TESTS_GOLDEN_OWN_H
#define KV_TESTS_GOLDEN_OWN_H

#include "alloc/compat_rows.h"

/* @fault: what the reference said; 0: @pages or @columns */
bool own_load_blocks(const struct kv_compat_group *groups, size_t n, const struct kv_compat_load *load, int fault,
		     const int64_t *pages);
bool own_table_columns(const struct kv_compat_group *group, int64_t context, int64_t tokens, int64_t overlap,
		       int fault, int64_t columns);
bool own_row_slots(const struct kv_compat_v4_slots *in, int fault, const int64_t *slots);
/* Slots of @n positions of a row of a table, from @first on. */
bool own_slots(const struct kv_compat_table *table, size_t row, int64_t first, int64_t n, int64_t block_tokens,
	       const int64_t *slots);
bool own_state_rows(const struct kv_compat_table *table, int64_t interval, const int64_t *n_tokens,
		    const int32_t *rows);
bool own_tracks(int64_t page_size, int64_t chunk, int64_t conv_len, const int64_t *seq_lens,
		const int64_t *prefix_lens, const int64_t *working, const int64_t *track, size_t n,
		const struct kv_compat_extend *expected);

#endif
