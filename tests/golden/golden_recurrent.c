/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of recurrent layers: rows, columns, chunks, programs, steps of a replay. */
#include <errno.h>
#include <string.h>

#include <kvcached/recurrent.h>

#include "tests/golden/golden.h"

static int refused(json_t **ret_out)
{
	*ret_out = json_pack("{s:s}", "error", "AssertionError");
	return 0;
}

static json_t *out_bytes(const uint8_t *values, size_t n)
{
	json_t *list = json_array();

	for (size_t i = 0; i < n; i++)
		json_array_append_new(list, json_integer(values[i]));
	return list;
}

static int replay(const json_t *in, json_t **ret_out)
{
	size_t n, k;
	int32_t *computed = in_ints32(in, "num_computed_tokens", &n);
	int32_t *bases = in_ints32(in, "decode_base", &k), *query = in_ints32(in, "query_lens", &k);
	int32_t *write_pos = golden_alloc(n, sizeof(*write_pos));
	uint8_t *flush = golden_alloc(n, 1);

	if (kv_replay_steps(
		    computed, bases, query, (int32_t)n, (int32_t)in_int(in, "buffer_len", 0),
		    in_bool(in, "align_mode", false) ? (int32_t)in_int(in, "block_size", 0) : 0,
		    write_pos, flush) < 0)
		return refused(ret_out);
	*ret_out = json_pack("{s:o, s:o}", "write_pos", out_ints32(write_pos, n), "is_flush",
			     out_bytes(flush, n));
	return 0;
}

static int rows(const json_t *in, json_t **ret_out)
{
	bool aligned = !strcmp(in_text(in, "mode", ""), "align");
	int32_t drafts = aligned ? (int32_t)in_int(in, "num_speculative_blocks", 0) : 0;
	size_t n, width, n_lens, each;
	int32_t *table = in_table(in, "block_table", &n, &width);
	int32_t *lens = in_ints32(in, "seq_lens", &n_lens), *got = golden_alloc(n * width, 4);
	json_t *list = json_array();

	each = aligned ? 1 + (size_t)drafts : width;
	if (kv_state_rows(table, (int32_t)width, lens, (int32_t)n,
			  aligned ? (int32_t)in_int(in, "block_size", 0) : 0, drafts, got) < 0) {
		json_decref(list);
		return refused(ret_out);
	}
	for (size_t b = 0; b < n; b++)
		json_array_append_new(list, out_ints32(got + b * each, each));
	*ret_out = json_pack("{s:o}", "rows", list);
	return 0;
}

static int columns(const json_t *in, json_t **ret_out)
{
	size_t n, k;
	int32_t *computed = in_ints32(in, "num_computed", &n),
		*lens = in_ints32(in, "seq_lens", &k);
	int32_t *last = golden_alloc(n, 4), *first = golden_alloc(n, 4), *end = golden_alloc(n, 4);

	if (kv_state_columns(computed, lens, (int32_t)n, (int32_t)in_int(in, "block_size", 0), last,
			     first, end) < 0)
		return refused(ret_out);
	*ret_out = json_pack("{s:o, s:o, s:o}", "last_computed", out_ints32(last, n),
			     "first_scheduled", out_ints32(first, n), "last_scheduled",
			     out_ints32(end, n));
	return 0;
}

static int chunks(const json_t *in, json_t **ret_out)
{
	int32_t chunk = (int32_t)in_int(in, "chunk_size", 0);
	size_t n, n_loc, room;
	int32_t *computed = in_ints32(in, "num_computed", &n);
	int32_t *loc = in_ints32(in, "query_start_loc", &n_loc);
	int32_t *starts, *seqs, *last = golden_alloc(n, 4);
	int r;

	room = (size_t)kv_state_chunks_bound(loc, (int32_t)n, chunk);
	starts = golden_alloc(room + 1, 4);
	seqs = golden_alloc(room, 4);
	r = kv_state_chunks(loc, computed, (int32_t)n, chunk, starts, seqs, last);
	if (r < 0 || (size_t)r > room)
		return refused(ret_out);
	*ret_out = json_pack(
		"{s:o, s:o, s:o}", "cu_chunk_seqlen", out_ints32(starts, (size_t)r + 1), "seq_idx",
		out_ints32(seqs, (size_t)r), "last_chunk_indices", out_ints32(last, n));
	return 0;
}

static int programs(const json_t *in, json_t **ret_out)
{
	size_t n;
	int32_t *lens = in_ints32(in, "query_lens", &n), *loc = golden_alloc(n + 1, 4);
	int64_t room = kv_conv_programs_room(0), total;
	int32_t *seqs = golden_alloc((size_t)room, 4), *offsets = golden_alloc((size_t)room, 4);
	int32_t *nums = golden_alloc(n, 4);

	for (size_t b = 0; b < n; b++)
		loc[b + 1] = loc[b] + lens[b];
	total = kv_conv_programs(loc, (int32_t)n, seqs, offsets, room);
	if (total < 0)
		return refused(ret_out);
	for (int64_t i = 0; i < total; i++)
		nums[seqs[i]]++;
	*ret_out = json_pack("{s:o, s:I, s:o, s:o, s:I, s:i}", "nums", out_ints32(nums, n), "total",
			     (json_int_t)total, "batch_ptr_prefix", out_ints32(seqs, (size_t)total),
			     "offset_prefix", out_ints32(offsets, (size_t)total), "buffer_len",
			     (json_int_t)kv_conv_programs_room(total), "pad_value", seqs[room - 1]);
	return 0;
}

static int ssm_metadata(const json_t *in, json_t **ret_out)
{
	if (json_object_get(in, "decode_base"))
		return replay(in, ret_out);
	if (json_object_get(in, "block_table"))
		return rows(in, ret_out);
	if (json_object_get(in, "chunk_size"))
		return chunks(in, ret_out);
	return json_object_get(in, "num_computed") ? columns(in, ret_out) : programs(in, ret_out);
}

const struct golden_kind golden_recurrent[] = {
	{"ssm_metadata", ssm_metadata},
	{NULL, NULL},
};
