/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of batches: metadata, slots, splits, cascade, chunks and masks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/metadata.h>
#include <kvcached/schedule.h>
#include <kvcached/table.h>

#include "kernels/visible.h"
#include "tests/golden/golden.h"

static int refused(const char *class, json_t **ret_out)
{
	*ret_out = json_pack("{s:s}", "error", class);
	return 0;
}

/* Rows of any widths, padded with 0 to the widest. */
static int32_t *ragged(const json_t *rows, size_t *ret_n, size_t *ret_width)
{
	size_t r, c;
	json_t *row, *value;
	int32_t *table;

	*ret_n = json_array_size(rows);
	*ret_width = 0;
	json_array_foreach(rows, r, row)
		if (json_array_size(row) > *ret_width)
			*ret_width = json_array_size(row);
	table = golden_alloc(*ret_n * *ret_width, sizeof(*table));
	json_array_foreach(rows, r, row)
		json_array_foreach(row, c, value)
			table[r * *ret_width + c] = (int32_t)json_integer_value(value);
	return table;
}

/* ---- tables ---- */

static int table_width(const json_t *in, json_t **ret_out)
{
	const json_t *alignment = json_object_get(in, "token_alignment");
	int64_t width = kv_table_width(
		(int32_t)in_int(in, "max_num_blocks", 0), (int32_t)in_int(in, "block_size", 1),
		(int32_t)in_int(in, "kernel_block_size", 0),
		json_is_integer(alignment) ? (int32_t)json_integer_value(alignment) : -1);

	if (width < 0)
		return refused("ValueError", ret_out);
	*ret_out = json_pack("{s:I}", "width", (json_int_t)width);
	return 0;
}

static int block_size_choice(const json_t *in, json_t **ret_out)
{
	json_t *backends = json_object_get(in, "backends"), *list, *item;
	size_t n = json_array_size(backends), i, k;
	const struct kv_block_rule **rules = golden_alloc(n, sizeof(*rules));
	int32_t *counts = golden_alloc(n, sizeof(*counts));
	int size;

	if (!backends)
		return table_width(in, ret_out);
	json_array_foreach(backends, i, list)
	{
		struct kv_block_rule *own = golden_alloc(json_array_size(list), sizeof(*own));

		json_array_foreach(list, k, item) own[k] =
			json_is_string(item)
				? (struct kv_block_rule){atoi(json_string_value(item) + 1), 1}
				: (struct kv_block_rule){(int32_t)json_integer_value(item), 0};
		rules[i] = own;
		counts[i] = (int32_t)json_array_size(list);
	}
	size = kv_table_common_size((int32_t)in_int(in, "manager_block_size", 1), rules, counts,
				    (int32_t)n);
	if (size < 0)
		return refused("ValueError", ret_out);
	*ret_out = json_pack("{s:i}", "kernel_block_size", size);
	return 0;
}

static int table_op(struct kv_table *t, const json_t *op)
{
	const char *what = json_string_value(json_array_get(op, 0));
	int32_t row = (int32_t)json_integer_value(json_array_get(op, 1)), ids[64];
	const json_t *arg = json_array_get(op, 2);
	int32_t other = (int32_t)json_integer_value(arg), n = (int32_t)json_array_size(arg);

	for (int32_t i = 0; i < n; i++)
		ids[i] = (int32_t)json_integer_value(json_array_get(arg, (size_t)i));
	if (!strcmp(what, "add"))
		return kv_table_set(t, row, ids, n);
	if (!strcmp(what, "append"))
		return kv_table_append(t, row, ids, n);
	if (!strcmp(what, "clear"))
		return kv_table_clear(t, row);
	return !strcmp(what, "move") ? kv_table_move(t, row, other) : kv_table_swap(t, row, other);
}

static int block_table_ops(const json_t *in, json_t **ret_out)
{
	int32_t kernel = (int32_t)in_int(in, "kernel_block_size", 1);
	int32_t block = (int32_t)in_int(in, "manager_block_size", 1);
	struct kv_table t = {.n_rows = (int32_t)in_int(in, "max_reqs", 0), .ratio = block / kernel};
	json_t *op;
	size_t i;

	t.width = (int32_t)in_int(in, "max_manager_blocks_per_req", 0) * t.ratio;
	t.ids = golden_alloc((size_t)(t.n_rows * t.width), sizeof(*t.ids));
	t.n_blocks = golden_alloc((size_t)t.n_rows, sizeof(*t.n_blocks));
	*ret_out = json_array();
	json_array_foreach(json_object_get(in, "ops"), i, op)
	{
		json_t *rows = json_array();
		int r = table_op(&t, op);

		for (int32_t row = 0; row < t.n_rows; row++)
			json_array_append_new(rows, out_ints32(t.ids + row * t.width, (size_t)t.width));
		json_array_append_new(*ret_out, json_pack("{s:o, s:o, s:o}", "error",
							  r < 0 ? json_string("ValueError") : json_null(),
							  "num_blocks_per_row",
							  out_ints32(t.n_blocks, (size_t)t.n_rows), "table",
							  rows));
	}
	return 0;
}

/* ---- metadata ---- */

static int slot_mapping(const json_t *in, json_t **ret_out)
{
	size_t n_loc, n_pos, n_rows, width;
	int32_t *loc = in_ints32(in, "query_start_loc", &n_loc);
	int64_t *positions = in_ints(in, "positions", &n_pos);
	int32_t *blocks = ragged(json_object_get(in, "manager_block_tables"), &n_rows, &width);
	int32_t kernel = (int32_t)in_int(in, "kernel_block_size", 1);
	int32_t ratio = (int32_t)in_int(in, "manager_block_size", 1) / kernel;
	size_t n_seqs = n_loc - 1, room = (size_t)in_int(in, "max_num_tokens", 0);
	int32_t *table = golden_alloc((n_seqs + 1) * width * (size_t)ratio, sizeof(*table));
	int32_t *n_query = golden_alloc(n_seqs, sizeof(*n_query));
	int32_t *n_computed = golden_alloc(n_seqs, sizeof(*n_computed));
	int64_t *slots = golden_alloc(room, sizeof(*slots));
	struct kv_metadata_args args = {
		.size = sizeof(args),
		.device = KV_DEVICE_HOST,
		.n_seqs = (int32_t)n_seqs,
		.n_tokens = (int32_t)room,
		.table_width = (int32_t)width * ratio,
		.block_tokens = kernel,
		.null_block = -1,
		.cp_size = (int32_t)in_int(in, "cp_world_size", 1),
		.cp_rank = (int32_t)in_int(in, "cp_rank", 0),
		.cp_interleave = (int32_t)in_int(in, "cp_interleave", 1),
		.n_query = n_query,
		.n_computed = n_computed,
		.block_table = table,
		.slots = slots,
	};
	json_t *tables = json_array();
	size_t given = json_array_size(json_object_get(in, "manager_block_tables"));

	for (size_t b = 0; b < n_seqs; b++) {
		n_query[b] = loc[b + 1] - loc[b];
		n_computed[b] = n_query[b] ? (int32_t)positions[loc[b]] : 0;
	}
	for (size_t b = 0; b < given; b++) {
		size_t n = json_array_size(
			json_array_get(json_object_get(in, "manager_block_tables"), b));
		int32_t *row = table + b * width * (size_t)ratio;

		kv_table_expand(blocks + b * width, (int)n, ratio, row);
		json_array_append_new(tables, out_ints32(row, n * (size_t)ratio));
	}
	if (kv_metadata_build(&args) < 0) {
		json_decref(tables);
		return refused("AssertionError", ret_out);
	}
	*ret_out = json_pack("{s:o, s:o}", "kernel_block_tables", tables, "slot_mapping",
			     out_ints(slots, room));
	return 0;
}

static int local_lens(const json_t *in, json_t **ret_out)
{
	size_t n;
	int32_t *lens = in_ints32(in, "seq_lens", &n);
	int32_t size = (int32_t)in_int(in, "dcp_size", 1), rank = (int32_t)in_int(in, "dcp_rank", -1);
	int32_t interleave = (int32_t)in_int(in, "interleave", 1);
	json_t *list = json_array();

	for (size_t b = 0; b < n; b++) {
		json_t *all = json_array();

		for (int32_t r = 0; r < size; r++)
			json_array_append_new(
				all, json_integer(kv_cp_local_len(size, r, interleave, lens[b])));
		json_array_append_new(list, rank < 0 ? json_incref(all)
						     : json_incref(json_array_get(all, (size_t)rank)));
		json_decref(all);
	}
	*ret_out = json_pack("{s:o, s:i}", "local_seq_lens", list, "max_local_bound",
			     kv_cp_local_bound(size, interleave,
					       (int32_t)in_int(in, "max_seq_len", 0)));
	return 0;
}

static int token_to_seq(const json_t *in, json_t **ret_out)
{
	size_t n_loc, n_host;
	int32_t *loc = in_ints32(in, "query_start_loc_device", &n_loc);
	int32_t *host = in_ints32(in, "query_start_loc_cpu", &n_host);
	int32_t n_tokens = (int32_t)in_int(in, "num_actual_tokens", 0), mapped = host[n_host - 1];
	int64_t least = mapped > n_tokens ? mapped : n_tokens;
	int64_t room = in_int(in, "buffer_len", least), n, second;
	int32_t *buffer = golden_alloc((size_t)room, sizeof(*buffer));

	for (int64_t i = 0; i < room; i++)
		buffer[i] = -7;
	n = kv_token_to_seq(loc, (int32_t)n_loc - 1, mapped, n_tokens, buffer, room);
	second = in_int(in, "second_num_actual_tokens", -1);
	if (n < 0)
		return refused("AssertionError", ret_out);
	*ret_out = json_pack("{s:o, s:o, s:I}", "indices", out_ints32(buffer, (size_t)n_tokens),
			     "buffer_after", out_ints32(buffer, (size_t)room), "cache_len",
			     (json_int_t)n);
	if (second >= 0) /* what is there serves a later call, if it is long enough */
		json_object_set_new(*ret_out, "second_call",
				    second > n ? json_pack("{s:s}", "error", "AssertionError")
					       : json_pack("{s:o}", "indices",
							   out_ints32(buffer, (size_t)second)));
	return 0;
}

/* The arrays of a padded batch; what the vectors leave open is made up as they do. */
static int unpadded(const json_t *in, json_t **ret_out)
{
	size_t n_loc, n, n_causal;
	int32_t *loc = in_ints32(in, "query_start_loc", &n_loc);
	int32_t *lens = in_ints32(in, "seq_lens", &n);
	int64_t *causal = in_ints(in, "causal", &n_causal);
	int32_t *table = golden_alloc(2 * n, sizeof(*table));
	int32_t *local = golden_alloc(n, sizeof(*local)), *bases = golden_alloc(n, sizeof(*bases));
	uint8_t *by_seq = golden_alloc(n, 1), *prefilling = golden_alloc(n, 1);
	uint32_t seqs = (uint32_t)in_int(in, "unpad_reqs", 0);
	struct kv_batch_data data = {.n_seqs = (uint32_t)n,
				     .n_tokens = (uint32_t)in_int(in, "num_actual_tokens", 0),
				     .table_width = 2,
				     .block_table = table,
				     .query_start_loc = loc,
				     .seq_lens = lens,
				     .seq_lens_upper = lens,
				     .positions = (const int64_t *)(const void *)table,
				     .token_to_seq = table,
				     .doc_ranges = table,
				     .is_prefilling = prefilling,
				     .cp_local_lens = local,
				     .window_prefix_lens = lens,
				     .replay_bases = bases,
				     .seq_causal = n_causal ? by_seq : NULL};
	struct kv_batch_data out;
	json_t *rows = json_array(), *flags = json_array();
	bool dropped;

	for (size_t b = 0; b < n; b++) {
		int32_t q = loc[b + 1] - loc[b];

		data.max_query_len = q > (int32_t)data.max_query_len ? (uint32_t)q : data.max_query_len;
		data.max_seq_len = lens[b] > (int32_t)data.max_seq_len ? (uint32_t)lens[b]
								       : data.max_seq_len;
		prefilling[b] = b == 0;
		local[b] = lens[b] / 2;
		bases[b] = lens[b] - 1;
		table[2 * b] = (int32_t)(2 * b);
		table[2 * b + 1] = (int32_t)(2 * b + 1);
		if (n_causal)
			by_seq[b] = causal[b] != 0;
	}
	kv_batch_unpadded(&data, seqs, (uint32_t)in_int(in, "unpad_tokens", 0), &out);
	for (size_t b = 0; b < out.n_seqs; b++)
		json_array_append_new(rows, out_ints32(out.block_table + 2 * b, 2));
	dropped = !out.positions && !out.token_to_seq && !out.doc_ranges && !out.seq_lens_upper;
	for (size_t b = 0; b < out.n_seqs; b++)
		json_array_append_new(flags, json_boolean(out.is_prefilling[b]));
	*ret_out = json_pack("{s:o, s:o, s:i, s:i, s:i, s:i, s:o, s:i, s:o, s:o, s:o, s:o, s:o}",
			     "query_start_loc",
			     out_ints32(out.query_start_loc, out.n_seqs + 1), "seq_lens",
			     out_ints32(out.seq_lens, out.n_seqs), "num_reqs", (int)out.n_seqs,
			     "num_actual_tokens", (int)out.n_tokens, "max_query_len",
			     (int)out.max_query_len, "max_seq_len", (int)out.max_seq_len, "block_table",
			     rows, "slot_mapping_len", (int)out.n_tokens, "is_prefilling",
			     flags, "dcp_local_seq_lens", out_ints32(out.cp_local_lens, out.n_seqs),
			     "rswa_prefix_lens", out_ints32(out.window_prefix_lens, out.n_seqs),
			     "replayssm_decode_base", out_ints32(out.replay_bases, out.n_seqs),
			     "dropped_to_null",
			     json_pack("[s, s, s, s, s]", dropped ? "positions" : "kept",
				       "mm_req_doc_ranges", "seq_lens_cpu_upper_bound",
				       "_num_computed_tokens_cache", "_token_to_req_indices_cache"));
	if (!n_causal) {
		json_object_set_new(*ret_out, "causal",
				    json_boolean(in_bool(in, "causal", true) && !out.seq_causal));
	} else {
		json_t *list = json_array();

		for (size_t b = 0; b < out.n_seqs; b++)
			json_array_append_new(list, json_integer(out.seq_causal[b]));
		json_object_set_new(*ret_out, "causal", list);
	}
	return 0;
}

static int derived(const json_t *in, json_t **ret_out)
{
	size_t n_loc, n_host, n;
	int32_t *loc = in_ints32(in, "query_start_loc", &n_loc);
	int32_t *host = in_ints32(in, "query_start_loc_cpu", &n_host);
	int32_t *lens = in_ints32(in, "seq_lens", &n);
	int32_t *query = golden_alloc(n, 4), *device = golden_alloc(n, 4), *cpu = golden_alloc(n, 4);

	kv_query_lens(loc, (int32_t)n, query);
	kv_computed_tokens(loc, lens, (int32_t)n, device);
	kv_computed_tokens(host, lens, (int32_t)n, cpu);
	*ret_out = json_pack("{s:I, s:o, s:o, s:o}", "batch_size", (json_int_t)n, "naive_query_lens",
			     out_ints32(query, n), "num_computed_tokens_device",
			     out_ints32(device, n), "num_computed_tokens_from_cpu_copy",
			     out_ints32(cpu, n));
	return 0;
}

static int common_metadata(const json_t *in, json_t **ret_out)
{
	if (json_object_get(in, "query_start_loc_device"))
		return token_to_seq(in, ret_out);
	return json_object_get(in, "unpad_reqs") ? unpadded(in, ret_out) : derived(in, ret_out);
}

static int batch_split(const json_t *in, json_t **ret_out)
{
	int32_t threshold = (int32_t)in_int(in, "decode_threshold", 1);
	size_t n, n_loc, k;
	struct kv_split s;

	if (json_object_get(in, "num_scheduled")) {
		int32_t *query = in_ints32(in, "num_scheduled", &n);
		int32_t *computed = in_ints32(in, "num_computed", &k);
		int32_t *prompt = in_ints32(in, "num_prompt", &k);
		int32_t *order = golden_alloc(n, sizeof(*order));
		int moved = kv_reorder(query, computed, prompt, (int32_t)n, threshold, order);
		json_t *list = json_array();

		for (size_t b = 0; b < n; b++)
			json_array_append_new(list, json_sprintf("r%d", order[b]));
		*ret_out = json_pack("{s:b, s:o}", "changed", moved > 0, "order", list);
		return 0;
	}
	if (json_object_get(in, "workspace_size")) {
		int32_t *lens = in_ints32(in, "seq_lens", &n);
		int32_t *bounds = golden_alloc(n + 1, sizeof(*bounds));
		int64_t offset = in_int(in, "request_offset", 0);
		int chunks = kv_prefill_chunks(lens, (int32_t)n,
					       (int32_t)in_int(in, "workspace_size", 0), bounds);
		json_t *list = json_array();

		for (int c = 0; c < chunks; c++)
			json_array_append_new(list,
					      json_pack("[I, I]", (json_int_t)(offset + bounds[c]),
							(json_int_t)(offset + bounds[c + 1])));
		*ret_out = chunks < 0 ? json_pack("{s:s}", "error", "AssertionError")
				      : json_pack("{s:O}", "bounds", list);
		json_decref(list);
		return 0;
	}
	int32_t *loc = in_ints32(in, "query_start_loc", &n_loc);
	int32_t *lens = in_ints32(in, "seq_lens", &n);
	int32_t n_seqs = (int32_t)n_loc - 1;

	if (!json_object_get(in, "num_actual_tokens")) {
		kv_split_extends(loc, lens, n_seqs, threshold, &s);
	} else {
		const json_t *flags = json_object_get(in, "is_prefilling");
		uint8_t *prefilling = golden_alloc((size_t)n_seqs + 1, 1);
		bool shorts = in_bool(in, "treat_short_extends_as_decodes", true);

		for (int32_t b = 0; b < n_seqs; b++) {
			const json_t *f = json_array_get(flags, (size_t)b);

			prefilling[b] = json_is_true(f) || json_integer_value(f);
		}
		if (!shorts && !json_is_array(flags))
			return refused("AssertionError", ret_out);
		kv_split_decodes(loc, n_seqs, (int32_t)in_int(in, "num_actual_tokens", 0), threshold,
				 in_bool(in, "require_uniform", false), shorts ? NULL : prefilling, &s);
	}
	*ret_out = json_pack("{s:i, s:i, s:i, s:i, s:i, s:i}", "num_decodes", s.n_decodes,
			     "num_extends", s.n_extends, "num_prefills", s.n_prefills,
			     "num_decode_tokens", s.n_decode_tokens, "num_extend_tokens",
			     s.n_extend_tokens, "num_prefill_tokens", s.n_prefill_tokens);
	return 0;
}

/* Their exchanges of rows are one way of many to an order: they must lead to ours. */
static void ask_swaps(const json_t *expected, json_t *out)
{
	json_t *swaps = json_object_get(expected, "swaps"), *order = json_object_get(out, "order"), *swap;
	json_t *rows = json_array();
	size_t i, n = json_array_size(order);

	for (i = 0; i < n; i++)
		json_array_append_new(rows, json_sprintf("r%d", (int)i));
	json_array_foreach(swaps, i, swap)
	{
		size_t a = (size_t)json_integer_value(json_array_get(swap, 0));
		size_t b = (size_t)json_integer_value(json_array_get(swap, 1));
		json_t *row = json_incref(json_array_get(rows, a));

		json_array_set(rows, a, json_array_get(rows, b));
		json_array_set_new(rows, b, row);
	}
	if (swaps && json_equal(rows, order))
		json_object_set(out, "swaps", swaps);
	json_decref(rows);
}

static int cascade(const json_t *in, json_t **ret_out)
{
	size_t n;

	if (json_object_get(in, "num_common_prefix_blocks")) {
		int32_t *computed = in_ints32(in, "num_computed_tokens", &n);

		*ret_out = json_pack(
			"{s:i}", "common_prefix_len",
			kv_cascade_prefix((int32_t)in_int(in, "num_common_prefix_blocks", 0),
					  (int32_t)in_int(in, "block_size", 1), computed, (int32_t)n));
		return 0;
	}
	struct kv_cascade_query q = {
		.size = sizeof(q),
		.prefix = (int32_t)in_int(in, "common_prefix_len", 0),
		.n_query = in_ints32(in, "query_lens", &n),
		.n_heads_q = (int32_t)in_int(in, "num_query_heads", 1),
		.n_heads_kv = (int32_t)in_int(in, "num_kv_heads", 1),
		.n_multiprocessors = (int32_t)in_int(in, "num_sms", 1),
		.cp_size = (int32_t)in_int(in, "dcp_world_size", 1),
		.positions = in_bool(in, "use_alibi", false) ||
			     in_bool(in, "use_sliding_window", false) ||
			     in_bool(in, "use_local_attention", false),
	};
	q.n_seqs = (int32_t)n;
	*ret_out = json_pack("{s:b}", "use_cascade", kv_cascade_decide(&q));
	return 0;
}

/* ---- masks ---- */

static json_t *visible(const struct kv_visibility *v, int64_t q_len, int64_t len)
{
	json_t *rows = json_array();

	for (int64_t i = 0; i < q_len; i++) {
		struct kv_visible row = kv_visible_row(v, 0, 0, i, q_len, len);
		json_t *list = json_array();

		for (int64_t j = 0; j < len; j++)
			if (kv_visible_sees(v, &row, j))
				json_array_append_new(list, json_integer(j));
		json_array_append_new(rows, list);
	}
	return rows;
}

static int32_t (*docs_of(const json_t *ranges, int32_t b, int32_t (*docs)[3], int *n))[3]
{
	json_t *range;
	size_t i;

	json_array_foreach(ranges, i, range)
	{
		docs[*n][0] = b;
		docs[*n][1] = (int32_t)json_integer_value(json_array_get(range, 0));
		docs[(*n)++][2] = (int32_t)json_integer_value(json_array_get(range, 1));
	}
	return docs;
}

static int masks(const json_t *in, json_t **ret_out)
{
	int32_t docs[64][3], prefix = (int32_t)in_int(in, "prefix_len", 0);
	int64_t q_len = in_int(in, "seqlen_q", 0), len = in_int(in, "seqlen_k", 0);
	struct kv_visibility v = {.causal = 1, .window_left = -1, .cp_size = 1, .cp_interleave = 1};
	const json_t *ranges = json_object_get(in, "ranges");
	size_t n_loc, n_lens;
	int n_docs = 0;

	if (json_object_get(in, "prefix_len")) {
		v.prefix_lens = &prefix;
		v.window_left = (int32_t)in_int(in, "window", 0) - 1;
		*ret_out = json_pack("{s:o}", "visible", visible(&v, q_len, len));
		return 0;
	}
	if (json_object_get(in, "seqlen_k")) {
		int32_t loc[2] = {0, (int32_t)q_len}, lens[1] = {(int32_t)len};
		int32_t(*rows)[2] = golden_alloc((size_t)q_len, sizeof(*rows));

		docs_of(ranges, 0, docs, &n_docs);
		if (kv_doc_rows(docs, n_docs, loc, lens, 1, rows))
			v.doc_ranges = rows[0];
		v.window_left = (int32_t)in_int(in, "sliding_window", 0) - 1;
		v.doc_clamped = in_bool(in, "clamp_bidirectional_to_window", false);
		*ret_out = json_pack("{s:o}", "visible", visible(&v, q_len, len));
		return 0;
	}
	int32_t *loc = in_ints32(in, "query_start_loc", &n_loc);
	int32_t *lens = in_ints32(in, "seq_lens", &n_lens);
	int32_t(*rows)[2] = golden_alloc((size_t)loc[n_loc - 1] + 1, sizeof(*rows));
	json_t *list = json_array(), *value;
	const char *key;
	int32_t n;

	json_object_foreach((json_t *)ranges, key, value) docs_of(value, atoi(key), docs, &n_docs);
	n = kv_doc_rows(docs, n_docs, loc, lens, (int32_t)n_loc - 1, rows) ? loc[n_loc - 1] : 0;
	for (int32_t t = 0; t < n; t++)
		json_array_append_new(list, json_pack("[i, i]", rows[t][0], rows[t][1]));
	*ret_out = json_pack("{s:i, s:o}", "rows_written", n, "rows", list);
	return 0;
}

static int local_chunks(const json_t *in, json_t **ret_out)
{
	size_t n_loc, n_lens, n_rows, width;
	int32_t *loc = in_ints32(in, "query_start_loc", &n_loc);
	int32_t *lens = in_ints32(in, "seq_lens", &n_lens);
	int32_t *table = in_table(in, "block_table", &n_rows, &width);
	int32_t chunk = (int32_t)in_int(in, "chunk_size", 1);
	int32_t block = (int32_t)in_int(in, "block_size", 1), longest[2] = {0, 0};
	size_t room = (size_t)kv_local_chunks_bound(loc, (int32_t)n_loc - 1, chunk);
	int32_t *out_loc = golden_alloc(room + 1, sizeof(*out_loc));
	int32_t *out_lens = golden_alloc(room, sizeof(*out_lens));
	size_t columns = (size_t)(chunk / block);
	int32_t *rows = golden_alloc(room * columns + 1, sizeof(*rows));
	int n = kv_local_chunks(loc, lens, (int32_t)n_loc - 1, table, (int32_t)width, block, chunk,
				out_loc, out_lens, rows);
	json_t *list = json_array(), *computed = json_array();

	for (int i = 0; i < n; i++) {
		int32_t q = out_loc[i + 1] - out_loc[i];

		longest[0] = q > longest[0] ? q : longest[0];
		longest[1] = out_lens[i] > longest[1] ? out_lens[i] : longest[1];
		json_array_append_new(list, out_ints32(rows + (size_t)i * columns, columns));
		json_array_append_new(computed, json_integer(out_lens[i] - q));
	}
	if (n < 0) {
		json_decref(list);
		json_decref(computed);
		return refused("AssertionError", ret_out);
	}
	*ret_out = json_pack("{s:i, s:o, s:o, s:o, s:i, s:i, s:o}", "num_reqs", n, "query_start_loc",
			     out_ints32(out_loc, (size_t)n + 1), "seq_lens",
			     out_ints32(out_lens, (size_t)n), "block_table", list, "max_query_len",
			     longest[0], "max_seq_len", longest[1], "num_computed_tokens", computed);
	return 0;
}

/* Ranges by sequence as a padded array. */
static int padded_ranges(const json_t *in, json_t **ret_out)
{
	int32_t docs[64][3], n_seqs = (int32_t)in_int(in, "num_seqs", 0), *table;
	const json_t *ranges = json_object_get(in, "ranges");
	json_t *tensor = json_array(), *value;
	const char *key;
	int n_docs = 0, width;

	json_object_foreach((json_t *)ranges, key, value) docs_of(value, atoi(key), docs, &n_docs);
	width = kv_doc_table(docs, n_docs, n_seqs, 0, NULL);
	table = golden_alloc((size_t)(n_seqs * width), 2 * sizeof(*table));
	if (kv_doc_table(docs, n_docs, n_seqs, width, table) != width) {
		json_decref(tensor);
		return refused("ValueError", ret_out);
	}
	for (int32_t b = 0; b < n_seqs; b++) {
		json_t *row = json_array();

		for (int32_t i = 0; i < width; i++)
			json_array_append_new(row, out_ints32(table + (b * width + i) * 2, 2));
		json_array_append_new(tensor, row);
	}
	*ret_out = json_pack("{s:o}", "tensor", width ? json_incref(tensor) : json_null());
	json_decref(tensor);
	return 0;
}

static int local_and_masks(const json_t *in, json_t **ret_out)
{
	if (json_object_get(in, "chunk_size"))
		return local_chunks(in, ret_out);
	return json_object_get(in, "num_seqs") ? padded_ranges(in, ret_out) : masks(in, ret_out);
}

const struct golden_kind golden_batch[] = {
	{"block_size_choice", block_size_choice},
	{"block_table_ops", block_table_ops},
	{"slot_mapping", slot_mapping},
	{"dcp_local_lens", local_lens},
	{"common_metadata", common_metadata},
	{"batch_split", batch_split, NULL, ask_swaps},
	{"cascade", cascade},
	{"local_and_masks", local_and_masks},
	{NULL, NULL},
};
