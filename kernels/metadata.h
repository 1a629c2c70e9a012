/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of include/kvcached/metadata.h, once for host and device. */
#ifndef KV_KERNELS_METADATA_H
#define KV_KERNELS_METADATA_H

#include <kvcached/metadata.h>

#include "kernels/view.h"

#ifdef __cplusplus
extern "C" {
#endif

int kv_metadata_host(const struct kv_metadata_args *args); /* args: checked, defaults filled in */
int kv_metadata_cuda(const struct kv_metadata_args *args);

#ifdef __cplusplus
}
#endif

/* Before the step: what the last one left of sequence @b. */
KV_HD static inline void kv_metadata_advance(const struct kv_metadata_args *a, int b)
{
	if (!a->n_query[b])
		return;
	a->n_computed[b] += a->n_query[b] - (a->n_rejected ? a->n_rejected[b] : 0);
	a->n_query[b] = 1;
}

KV_HD static inline int64_t kv_metadata_slot(const struct kv_metadata_args *a, int b,
					     int64_t position)
{
	int64_t local, column;
	int32_t row = a->rows ? a->rows[b] : b, block;

	if (a->cp_size > 1 && position / a->cp_interleave % a->cp_size != a->cp_rank)
		return KV_SLOT_PAD;
	local = kv_local_len(a->cp_size, a->cp_rank, a->cp_interleave, position);
	column = local / a->block_tokens;
	if (column >= a->table_width)
		return KV_SLOT_PAD;
	block = a->block_table[(int64_t)row * a->table_width + column];
	if (block < 0 || block == a->null_block)
		return KV_SLOT_PAD;
	return (int64_t)block * a->block_tokens + local % a->block_tokens;
}

/* The arrays by sequence, but for the offsets. */
KV_HD static inline void kv_metadata_sequence(const struct kv_metadata_args *a, int b)
{
	int32_t len = a->n_query[b] ? a->n_computed[b] + a->n_query[b] : 0;

	if (a->seq_lens)
		a->seq_lens[b] = len;
	if (a->cp_local_lens)
		a->cp_local_lens[b] =
			(int32_t)kv_local_len(a->cp_size, a->cp_rank, a->cp_interleave, len);
	if (a->is_prefilling)
		a->is_prefilling[b] =
			a->n_prompt && a->n_query[b] && a->n_computed[b] < a->n_prompt[b];
}

/* Token @t, query @i of sequence @b. */
KV_HD static inline void kv_metadata_token(const struct kv_metadata_args *a, int t, int b, int i)
{
	int64_t position = (int64_t)a->n_computed[b] + i;

	if (a->token_to_seq)
		a->token_to_seq[t] = b;
	if (a->positions)
		a->positions[t] = position;
	if (a->slots)
		a->slots[t] = kv_metadata_slot(a, b, position);
	if (a->cp_empty)
		a->cp_empty[t] = kv_local_len(a->cp_size, a->cp_rank, a->cp_interleave,
					      (int64_t)a->n_computed[b] + a->n_query[b]) == 0;
}

KV_HD static inline void kv_metadata_pad(const struct kv_metadata_args *a, int t)
{
	if (a->token_to_seq)
		a->token_to_seq[t] = 0;
	if (a->positions)
		a->positions[t] = 0;
	if (a->slots)
		a->slots[t] = KV_SLOT_PAD;
	if (a->cp_empty)
		a->cp_empty[t] = 1;
}

#endif
