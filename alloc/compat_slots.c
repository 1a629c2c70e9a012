/* SPDX-License-Identifier: Apache-2.0 */
/* Reference calculators: block tables to slots. */
#include <string.h>

#include "alloc/compat_rows.h"
#include "include/internal/error.h"

static int32_t at(const struct kv_compat_table *t, size_t row, int64_t column)
{
	if (!t->width)
		return 0;
	column = kv_max64(0, kv_min64(column, (int64_t)t->width - 1));
	return t->ids[row * t->width + (size_t)column];
}

static int check_state(const struct kv_compat_table *t, int64_t page_size, const int64_t *before,
		       const int64_t *after, const int32_t *in, const int32_t *out)
{
	for (size_t i = 0; i < t->n_rows; i++)
		if (after[i] < 1)
			return kv_error(KV_FAULT_AFTER_NOT_POSITIVE,
					"row %zu: %lld tokens after the step", i,
					(long long)after[i]);
	for (size_t i = 0; i < t->n_rows; i++)
		if ((after[i] - 1) / page_size >= (int64_t)t->width)
			return kv_error(KV_FAULT_OUT_SLOT_PAST_TABLE,
					"row %zu: token %lld is past a table of %zu blocks", i,
					(long long)after[i] - 1, t->width);
	for (size_t i = 0; i < t->n_rows; i++)
		if (before[i] > 0 && in[i] <= 0)
			return kv_error(KV_FAULT_IN_PAGE_HOLE, "row %zu: reads a hole", i);
	for (size_t i = 0; i < t->n_rows; i++)
		if (out[i] <= 0)
			return kv_error(KV_FAULT_OUT_PAGE_HOLE, "row %zu: writes a hole", i);
	for (size_t i = 0; i < t->n_rows; i++)
		for (size_t k = 0; k < i; k++)
			if (out[i] == out[k])
				return kv_error(KV_FAULT_OUT_PAGE_DUPLICATE,
						"rows %zu and %zu: both write block %d", k, i,
						out[i]);
	return 0;
}

int kv_compat_state_blocks(const struct kv_compat_table *table, int64_t page_size,
			   const int64_t *before, const int64_t *after, bool validate,
			   int32_t *ret_in, int32_t *ret_out)
{
	for (size_t i = 0; i < table->n_rows; i++) {
		ret_in[i] =
			before[i] > 0 ? at(table, i, kv_floor_div(before[i] - 1, page_size)) : 0;
		ret_out[i] = at(table, i, kv_floor_div(after[i] - 1, page_size));
	}
	return validate ? check_state(table, page_size, before, after, ret_in, ret_out) : 0;
}

int64_t kv_compat_slot(const struct kv_compat_table *table, size_t row, int64_t position,
		       int64_t page_size)
{
	position = kv_max64(position, 0);
	return at(table, row, position / page_size) * page_size + position % page_size;
}

void kv_compat_decode_slots(const struct kv_compat_table *table, const int64_t *seq_lens,
			    int64_t page_size, int64_t n_tokens, int64_t *ret_slots)
{
	for (size_t i = 0; i < table->n_rows; i++)
		for (int64_t k = 0; k < n_tokens; k++)
			*ret_slots++ =
				kv_compat_slot(table, i, seq_lens[i] - n_tokens + k, page_size);
}

size_t kv_compat_extend_slots(const struct kv_compat_table *table, const int64_t *prefix_lens,
			      const int64_t *extend_lens, int64_t page_size, int64_t *ret_slots)
{
	size_t n = 0;

	for (size_t i = 0; i < table->n_rows; i++)
		for (int64_t k = 0; k < extend_lens[i]; k++)
			ret_slots[n++] = kv_compat_slot(table, i, prefix_lens[i] + k, page_size);
	return n;
}

int kv_compat_select_group(const char *layer_group, const char *const *groups, size_t n,
			   size_t *ret_group)
{
	for (size_t i = 0; i < n; i++)
		if (!strcmp(groups[i], layer_group)) {
			*ret_group = i;
			return 0;
		}
	if (n != 1)
		return kv_error(KV_FAULT_UNKNOWN_GROUP, "group '%s': not among %zu", layer_group,
				n);
	*ret_group = 0;
	return 0;
}

int kv_compat_check_delivered(const char *const *captured, size_t n_captured,
			      const char *const *delivered, size_t n_delivered, int64_t bs)
{
	if (!n_captured || bs <= 0)
		return 0;
	if (!n_delivered)
		return kv_error(KV_FAULT_FLAT_TABLES_MISSING, "replay: no tables for %zu groups",
				n_captured);
	for (size_t i = 0; i < n_captured; i++) {
		size_t k;

		for (k = 0; k < n_delivered && strcmp(captured[i], delivered[k]); k++)
			;
		if (k == n_delivered)
			return kv_error(KV_FAULT_FLAT_GROUP_MISSING,
					"replay: no table for group %s", captured[i]);
	}
	return 0;
}

int kv_compat_fill_captured(const struct kv_compat_table *table, size_t buffer_width, int32_t fill,
			    int32_t *ret_buffer)
{
	if (table->width < 1 || table->width > buffer_width)
		return kv_error(KV_FAULT_TABLE_WIDTH, "table: %zu columns, 1..%zu captured",
				table->width, buffer_width);
	for (size_t i = 0; i < table->n_rows; i++)
		for (size_t k = 0; k < buffer_width; k++)
			*ret_buffer++ = k < table->width ? table->ids[i * table->width + k] : fill;
	return 0;
}

int kv_compat_v4_slots(const struct kv_compat_v4_slots *in, int64_t *ret_slots)
{
	size_t repeat;

	if (in->rows_per_page <= 0)
		return kv_error(KV_FAULT_BAD_ROWS_PER_PAGE, "rows per page: %lld given",
				(long long)in->rows_per_page);
	if (in->entry_stride <= 0)
		return kv_error(KV_FAULT_BAD_ENTRY_STRIDE, "tokens per row: %lld given",
				(long long)in->entry_stride);
	if (in->n_positions && (!in->n_requests || in->n_positions % in->n_requests))
		return kv_error(KV_FAULT_SHAPE_NOT_MULTIPLE, "%zu requests for %zu tokens",
				in->n_requests, in->n_positions);
	repeat = in->n_requests ? in->n_positions / in->n_requests : 1;
	for (size_t i = 0; i < in->n_positions; i++) {
		int64_t pos = in->positions[i], req = in->requests[i / repeat];
		int64_t row = kv_floor_div(pos, in->entry_stride), page, id;

		ret_slots[i] = -1;
		if (req < 0 || req >= (int64_t)in->table.n_rows || (in->valid && !in->valid[i]) ||
		    (in->compressed && (pos + 1) % in->entry_stride))
			continue;
		page = kv_floor_div(row, in->rows_per_page) -
		       (in->base_offsets ? in->base_offsets[req] : 0);
		if (page < 0 || page >= (int64_t)in->table.width)
			continue;
		id = at(&in->table, (size_t)req, page);
		if (id >= 0)
			ret_slots[i] =
				id * in->rows_per_page + kv_floor_mod(row, in->rows_per_page);
	}
	return 0;
}

int kv_compat_index_k(int64_t index_head_dim, int64_t page_size, int64_t slot, int64_t byte,
		      int64_t group, struct kv_compat_index_k *ret)
{
	int64_t page = slot / page_size, in_page = slot % page_size;
	int r;

	r = kv_compat_dsa_index_row(index_head_dim, &ret->row_bytes);
	if (r)
		return r;
	/* A page: all values, then all scales. */
	ret->value_offset = page * page_size * ret->row_bytes + in_page * index_head_dim + byte;
	ret->scale_offset = page * page_size * ret->row_bytes + page_size * index_head_dim +
			    (in_page * (index_head_dim / 128) + group) * 4;
	return 0;
}
