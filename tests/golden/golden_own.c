/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include <kvcached/metadata.h>
#include <kvcached/plan.h>
#include <kvcached/recurrent.h>
#include <kvcached/slots.h>

#include "tests/golden/golden.h"
#include "tests/golden/golden_own.h"

static struct kv_plan_group group_in(const struct kv_compat_group *g)
{
	struct kv_plan_group group = {
		.kind = g->retention == KV_COMPAT_SLIDING	  ? KV_GROUP_WINDOW
			: g->retention == KV_COMPAT_BAD_RETENTION ? 0
			: g->family == KV_COMPAT_STATE		  ? KV_GROUP_STATE
								  : KV_GROUP_FULL,
		.window = (uint32_t)kv_max64(0, g->window),
		.block_tokens = (uint32_t)kv_max64(0, g->rows_per_page * g->entry_stride)};

	snprintf(group.name, sizeof(group.name), "%.20s", g->id);
	return group;
}

bool own_load_blocks(const struct kv_compat_group *groups, size_t n,
		     const struct kv_compat_load *load, int fault, const int64_t *pages)
{
	const struct kv_plan_load of = {
		.n_seqs = (uint64_t)load->n_requests,
		.n_tokens = (uint64_t)load->max_total,
		.context = (uint64_t)load->max_context,
		.step_tokens = (uint64_t)load->max_scheduled,
		.ahead_tokens = (uint64_t)(load->overlap_depth * load->decode_tokens),
		.margin_blocks = (uint64_t)load->margin};
	bool refused = false;

	if (fault == KV_FAULT_NEGATIVE_ARGUMENT || fault == KV_FAULT_BAD_OVERLAP_DEPTH ||
	    fault == KV_FAULT_OVERLAP_NEEDS_DECODE_TOKENS)
		return true;
	for (size_t i = 0; i < n && !refused; i++) {
		struct kv_plan_group group = group_in(&groups[i]);
		uint64_t blocks;

		if (group.kind == KV_GROUP_STATE && !group.block_tokens)
			return true; /* rows without checkpoints, here */
		refused = kv_plan_load_blocks(&group, &of, &blocks) < 0;
		/* Of windows the engine's number is too small where each sequence's step crosses a boundary. */
		if (!refused && !fault && group.kind != KV_GROUP_WINDOW && blocks != (uint64_t)pages[i])
			return false;
	}
	return refused == (fault != 0);
}

bool own_table_columns(const struct kv_compat_group *group, int64_t context, int64_t tokens,
		       int64_t overlap, int fault, int64_t columns)
{
	struct kv_plan_group g = group_in(group);
	uint64_t got;
	int r;

	if (fault == KV_FAULT_BAD_OVERLAP_DEPTH)
		return true;
	r = kv_plan_table_columns(&g, (uint64_t)context,
				  (uint64_t)kv_max64(0, (1 + overlap) * tokens), 1, &got);
	return fault ? r < 0 : !r && got == (uint64_t)columns;
}

static int32_t *narrow(const int64_t *values, size_t n)
{
	int32_t *got = golden_alloc(n, sizeof(*got));

	for (size_t i = 0; i < n; i++)
		got[i] = (int32_t)values[i];
	return got;
}

bool own_row_slots(const struct kv_compat_v4_slots *in, int fault, const int64_t *slots)
{
	int64_t *got = golden_alloc(in->n_positions, sizeof(*got));
	int32_t *seqs = golden_alloc(in->n_positions, sizeof(*seqs));
	size_t repeat = in->n_requests ? in->n_positions / in->n_requests : 1;
	struct kv_row_slots_args args = {
		.size = sizeof(args),
		.n_tokens = (int64_t)in->n_positions,
		.n_seqs = (int32_t)in->table.n_rows,
		.table_width = (int32_t)in->table.width,
		.block_rows = (int32_t)in->rows_per_page,
		.stride = (int32_t)in->entry_stride,
		.null_block = -1,
		.is_write = in->compressed,
		.positions = in->positions,
		.token_to_seq = seqs,
		.block_table = in->table.ids,
		.first_blocks =
			in->base_offsets ? narrow(in->base_offsets, in->table.n_rows) : NULL,
		.slots = got};

	if (fault == KV_FAULT_SHAPE_NOT_MULTIPLE)
		return true;
	for (size_t i = 0; i < in->n_positions; i++)
		seqs[i] = !in->n_requests || (in->valid && !in->valid[i])
				  ? -1
				  : (int32_t)in->requests[i / repeat];
	if (kv_row_slots(&args) < 0)
		return fault != 0;
	return !fault && !memcmp(got, slots, in->n_positions * sizeof(*got));
}

bool own_slots(const struct kv_compat_table *table, size_t row, int64_t first, int64_t n,
	       int64_t block_tokens, const int64_t *slots)
{
	int64_t skip = kv_max64(0, -first); /* before the sequence: clamped there, left out here */
	int32_t n_query = (int32_t)(n - skip), n_computed = (int32_t)(first + skip);
	int64_t *got = golden_alloc((size_t)n, sizeof(*got));
	struct kv_metadata_args args = {.size = sizeof(args),
					.device = KV_DEVICE_HOST,
					.n_seqs = 1,
					.n_tokens = n_query,
					.table_width = (int32_t)table->width,
					.block_tokens = (int32_t)block_tokens,
					.null_block = -1,
					.n_query = &n_query,
					.n_computed = &n_computed,
					.slots = got,
					.block_table = table->ids + row * table->width};

	if (n_query <= 0 || !table->width)
		return true;
	if (kv_metadata_build(&args) < 0)
		return false;
	for (int64_t i = 0; i < n_query; i++) {
		int64_t column = (n_computed + i) / block_tokens;
		bool covered = column < (int64_t)table->width && args.block_table[column] >= 0;

		if (got[i] != (covered ? slots[skip + i] : KV_SLOT_PAD))
			return false;
	}
	return true;
}

bool own_state_rows(const struct kv_compat_table *table, int64_t interval, const int64_t *n_tokens,
		    const int32_t *rows)
{
	for (size_t i = 0; i < table->n_rows; i++) {
		int32_t len = (int32_t)n_tokens[i], got;
		int r = kv_state_rows(table->ids + i * table->width, (int32_t)table->width, &len, 1,
				      (int32_t)interval, 0, &got);

		if (len <= 0)
			continue; /* no state: the reference says row 0, or column -1 */
		if (r < 0 ? (len - 1) / interval < (int64_t)table->width : got != rows[i])
			return false;
	}
	return true;
}

bool own_tracks(int64_t page_size, int64_t chunk, int64_t conv_len, const int64_t *seq_lens,
		const int64_t *prefix_lens, const int64_t *working, const int64_t *track, size_t n,
		const struct kv_compat_extend *expected)
{
	struct kv_state_track *got = golden_alloc(n, sizeof(*got));
	size_t n_tracks = 0, n_finals = 0;

	for (size_t i = 0; i < n; i++)
		if (seq_lens[i] <= prefix_lens[i])
			return true; /* a prefill of nothing */
	if (kv_state_tracks(narrow(expected->query_start, n + 1), narrow(prefix_lens, n),
			    (int32_t)n, (int32_t)page_size, (int32_t)chunk, got) < 0)
		return false;
	for (size_t i = 0; i < n; i++) {
		const struct kv_compat_track *t = &expected->tracks[n_tracks];

		if (track[i] < 0)
			continue;
		if (got[i].after >= 0) {
			if (n_tracks++ == expected->n_tracks || got[i].after != t->source ||
			    got[i].before != t->source_before ||
			    got[i].conv_end != t->conv_first + conv_len || track[i] != t->target)
				return false;
		}
		if (got[i].at_end) {
			if (n_finals == expected->n_finals ||
			    expected->final_source[n_finals] != working[i] ||
			    expected->final_target[n_finals] != track[i])
				return false;
			n_finals++;
		}
	}
	return n_tracks == expected->n_tracks && n_finals == expected->n_finals;
}
