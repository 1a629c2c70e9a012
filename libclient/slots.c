/* SPDX-License-Identifier: Apache-2.0 */
/* Slots of rows that stand for several tokens, in tables that may begin late. */
#include <errno.h>
#include <kvcached/slots.h>
#include <string.h>

#include "include/internal/error.h"
#include "include/internal/public.h"

static int check(const struct kv_row_slots_args *a)
{
	if (a->n_tokens < 0 || a->n_seqs < 0 || a->table_width < 0)
		return kv_error(
			-EINVAL,
			"n_tokens, n_seqs, table_width: %lld, %d, %d given, 0 or more allowed",
			(long long)a->n_tokens, a->n_seqs, a->table_width);
	if (a->block_rows < 1)
		return kv_error(-EINVAL, "block_rows: %d given, 1 or more allowed", a->block_rows);
	if (a->stride < 1)
		return kv_error(-EINVAL, "stride: %d given, 1 or more allowed", a->stride);
	if (a->n_tokens && (!a->positions || !a->token_to_seq || !a->slots))
		return kv_error(-EINVAL,
				"positions, token_to_seq, slots: NULL given, arrays of %lld needed",
				(long long)a->n_tokens);
	if (a->n_tokens && a->n_seqs && a->table_width && !a->block_table)
		return kv_error(-EINVAL, "block_table: NULL given, %d rows of %d needed", a->n_seqs,
				a->table_width);
	for (int64_t t = 0; t < a->n_tokens; t++)
		if (a->positions[t] < 0 && a->token_to_seq[t] >= 0 &&
		    a->token_to_seq[t] < a->n_seqs)
			return kv_error(-EINVAL, "positions[%lld]: %lld given, 0 or more allowed",
					(long long)t, (long long)a->positions[t]);
	return 0;
}

static int64_t slot_of(const struct kv_row_slots_args *a, int64_t position, int32_t seq)
{
	int64_t row = position / a->stride, column;
	int32_t id;

	if (seq < 0 || seq >= a->n_seqs || (a->is_write && (position + 1) % a->stride))
		return KV_SLOT_PAD;
	column = row / a->block_rows - (a->first_blocks ? a->first_blocks[seq] : 0);
	if (column < 0 || column >= a->table_width)
		return KV_SLOT_PAD;
	id = a->block_table[(int64_t)seq * a->table_width + column];
	return id < 0 || id == a->null_block ? KV_SLOT_PAD
					     : (int64_t)id * a->block_rows + row % a->block_rows;
}

KV_PUBLIC int kv_row_slots(const struct kv_row_slots_args *args)
{
	struct kv_row_slots_args a = {0};
	int r;

	if (args->size < sizeof(size_t))
		return kv_error(-EINVAL, "args.size: %zu given", args->size);
	memcpy(&a, args, args->size < sizeof(a) ? args->size : sizeof(a));
	r = check(&a);
	if (r < 0)
		return r;
	for (int64_t t = 0; t < a.n_tokens; t++)
		a.slots[t] = slot_of(&a, a.positions[t], a.token_to_seq[t]);
	return 0;
}
