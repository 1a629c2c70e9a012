/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of tables to slots, and of rows of recurrent state. */
#include <stdio.h>
#include <string.h>

#include "alloc/compat_rows.h"
#include "tests/golden/golden.h"
#include "tests/golden/golden_own.h"

static struct kv_compat_table table_in(const json_t *rows)
{
	struct kv_compat_table t;

	t.ids = table_of(rows, &t.n_rows, &t.width);
	return t;
}

static json_t *out_rows(const int32_t *ids, size_t n_rows, size_t width)
{
	json_t *rows = json_array();

	for (size_t i = 0; i < n_rows; i++)
		json_array_append_new(rows, out_ints32(ids + i * width, width));
	return rows;
}

static json_t *out_rows64(const int64_t *ids, size_t n_rows, size_t width)
{
	json_t *rows = json_array();

	for (size_t i = 0; i < n_rows; i++)
		json_array_append_new(rows, out_ints(ids + i * width, width));
	return rows;
}

static int own_differs(json_t **ret_out)
{
	json_decref(*ret_out);
	*ret_out = NULL;
	return GOLDEN_OWN_DIFFERS;
}

static int state_page_indices(const json_t *in, json_t **ret_out)
{
	struct kv_compat_table t = table_in(json_object_get(in, "table"));
	size_t n;
	int64_t *before = in_ints(in, "before", &n), *after = in_ints(in, "after", &n);
	int32_t *state_in = golden_alloc(n, 4), *state_out = golden_alloc(n, 4);
	int r;

	r = kv_compat_state_blocks(&t, in_int(in, "page_size", 1), before, after,
				   in_bool(in, "validate", false), state_in, state_out);
	if (!own_state_rows(&t, in_int(in, "page_size", 1), before, state_in) ||
	    !own_state_rows(&t, in_int(in, "page_size", 1), after, state_out))
		return GOLDEN_OWN_DIFFERS;
	if (r)
		return r;
	*ret_out = json_pack("{s:o, s:o}", "state_in", out_ints32(state_in, n), "state_out",
			     out_ints32(state_out, n));
	return 0;
}

static int decode_write_locs(const json_t *in, json_t **ret_out)
{
	int64_t n_tokens = in_int(in, "tokens_per_req", 1);
	const char *group;
	json_t *rows;
	size_t n;
	int64_t *lens = in_ints(in, "seq_lens", &n);
	int64_t *slots = golden_alloc(n * (size_t)n_tokens, sizeof(*slots));

	*ret_out = json_object();
	json_object_foreach(json_object_get(in, "tables"), group, rows)
	{
		struct kv_compat_table t = table_in(rows);

		kv_compat_decode_slots(&t, lens, in_int(in, "page_size", 1), n_tokens, slots);
		for (size_t i = 0; i < n; i++)
			if (!own_slots(&t, i, lens[i] - n_tokens, n_tokens, in_int(in, "page_size", 1),
				       slots + i * (size_t)n_tokens))
				return own_differs(ret_out);
		json_object_set_new(*ret_out, group, out_ints(slots, n * (size_t)n_tokens));
	}
	return 0;
}

static int extend_write_locs(const json_t *in, json_t **ret_out)
{
	const char *group;
	json_t *rows;
	size_t n, total = 0;
	int64_t *prefix = in_ints(in, "prefix_lens", &n), *extend = in_ints(in, "extend_lens", &n);
	int64_t *slots;

	for (size_t i = 0; i < n; i++)
		total += (size_t)extend[i];
	slots = golden_alloc(total, sizeof(*slots));
	*ret_out = json_object();
	json_object_foreach(json_object_get(in, "tables"), group, rows)
	{
		struct kv_compat_table t = table_in(rows);

		kv_compat_extend_slots(&t, prefix, extend, in_int(in, "page_size", 1), slots);
		for (size_t i = 0, at = 0; i < n; at += (size_t)extend[i++])
			if (!own_slots(&t, i, prefix[i], extend[i], in_int(in, "page_size", 1), slots + at))
				return own_differs(ret_out);
		json_object_set_new(*ret_out, group, out_ints(slots, total));
	}
	return 0;
}

/* The rows of some requests, whole pages up to a length. */
static int build_page_table(const json_t *in, json_t **ret_out)
{
	struct kv_compat_table t = table_in(json_object_get(in, "req_to_page"));
	size_t n, width = (size_t)kv_ceil_div(in_int(in, "max_seq_len", 0),
					      in_int(in, "page_size", 1));
	int64_t *rows = in_ints(in, "req_pool_indices", &n);
	json_t *table = json_array();

	for (size_t i = 0; i < n; i++)
		json_array_append_new(table, out_ints32(t.ids + (size_t)rows[i] * t.width,
							width < t.width ? width : t.width));
	*ret_out = json_pack("{s:o}", "table", table);
	return 0;
}

static int token_indices_from_pages(const json_t *in, json_t **ret_out)
{
	struct kv_compat_table t = table_in(json_object_get(in, "req_to_page"));
	struct kv_compat_table positions = table_in(json_object_get(in, "token_positions"));
	size_t n;
	int64_t *rows = in_ints(in, "req_pool_indices", &n);
	int64_t *slots = golden_alloc(n * positions.width, sizeof(*slots));

	for (size_t i = 0; i < n; i++)
		for (size_t k = 0; k < positions.width; k++)
			slots[i * positions.width + k] = kv_compat_slot(
				&t, (size_t)rows[i], positions.ids[i * positions.width + k],
				in_int(in, "page_size", 1));
	for (size_t i = 0; i < n * positions.width; i++)
		if (!own_slots(&t, (size_t)rows[i / positions.width], positions.ids[i], 1, in_int(in, "page_size", 1),
			       slots + i))
			return GOLDEN_OWN_DIFFERS;
	*ret_out = json_pack("{s:o}", "slots", out_rows64(slots, n, positions.width));
	return 0;
}

static const char **names_of(const json_t *list, size_t *ret_n)
{
	const char **names = golden_alloc(json_array_size(list), sizeof(*names));

	*ret_n = json_array_size(list);
	for (size_t i = 0; i < *ret_n; i++)
		names[i] = json_string_value(json_array_get(list, i));
	return names;
}

static int select_group(const json_t *in, json_t **ret_out)
{
	size_t n, chosen;
	const char **groups = names_of(json_object_get(in, "groups"), &n);
	int r;

	r = kv_compat_select_group(in_text(in, "layer_group", ""), groups, n, &chosen);
	if (r)
		return r;
	*ret_out = json_pack("{s:s}", "chosen", groups[chosen]);
	return 0;
}

static int graph_stale_guard(const json_t *in, json_t **ret_out)
{
	size_t n_captured, n_delivered;
	const char **captured = names_of(json_object_get(in, "captured"), &n_captured);
	const char **delivered = names_of(json_object_get(in, "delivered"), &n_delivered);
	int r;

	r = kv_compat_check_delivered(captured, n_captured, delivered, n_delivered,
				      in_int(in, "bs", 0));
	if (!r)
		*ret_out = json_pack("{s:b}", "ok", 1);
	return r;
}

static bool listed(const json_t *list, const char *name)
{
	const json_t *v;
	size_t i;

	json_array_foreach(list, i, v) if (!strcmp(json_string_value(v), name)) return true;
	return false;
}

static int graph_replay(const json_t *in, json_t **ret_out)
{
	size_t width = (size_t)in_int(in, "max_num_pages", 1), i;
	int64_t n_tokens = in_int(in, "tokens_per_req", 1);
	json_t *step, *steps = json_array();
	int r;

	*ret_out = json_pack("{s:o}", "steps", steps);
	json_array_foreach(json_object_get(in, "steps"), i, step)
	{
		json_t *buffers = json_object(), *rows;
		json_t *step_out = json_pack("{s:o}", "buffers", buffers);
		const char *group;

		json_array_append_new(steps, step_out);
		json_object_foreach(json_object_get(step, "tables"), group, rows)
		{
			struct kv_compat_table t = table_in(rows), padded;
			size_t n_slots = t.n_rows * (size_t)n_tokens, n;
			int64_t *lens = in_ints(step, "seq_lens", &n);
			int64_t *slots = golden_alloc(n_slots, sizeof(*slots));
			int32_t *buffer = golden_alloc(t.n_rows * width, sizeof(*buffer));

			if (listed(json_object_get(in, "state_groups"), group))
				continue;
			r = kv_compat_fill_captured(&t, width, (int32_t)in_int(in, "tail_pad", 0),
						    buffer);
			if (r) {
				json_object_set_new(step_out, "error",
						    json_pack("{s:s}", "kind", kv_fault_name(r)));
				json_object_del(step_out, "buffers");
				break;
			}
			padded = (struct kv_compat_table){buffer, t.n_rows, width};
			kv_compat_decode_slots(&padded, lens, in_int(in, "page_size", 1), n_tokens,
					       slots);
			json_object_set_new(buffers, group,
					    json_pack("[o, o]", out_rows(buffer, t.n_rows, width),
						      out_ints(slots, n_slots)));
		}
	}
	return 0;
}

static int v4_slots(const json_t *in, bool compressed, json_t **ret_out)
{
	struct kv_compat_v4_slots v = {
		.table = table_in(json_object_get(in, "table")),
		.rows_per_page = in_int(in, "rows_per_page", 0),
		.entry_stride = in_int(in, compressed ? "ratio" : "entry_stride", 0),
		.compressed = compressed,
	};
	size_t n;
	int64_t *slots;
	int r;

	v.base_offsets = in_ints(in, "base_offsets", &n);
	v.positions = in_ints(in, "positions", &v.n_positions);
	v.requests = in_ints(in, "req_indices", &v.n_requests);
	v.valid = in_ints(in, "valid", &n);
	slots = golden_alloc(v.n_positions, sizeof(*slots));
	r = kv_compat_v4_slots(&v, slots);
	if (!own_row_slots(&v, r, slots))
		return GOLDEN_OWN_DIFFERS;
	if (r)
		return r;
	*ret_out = json_pack("{s:o}", "slots", out_ints(slots, v.n_positions));
	return 0;
}

static int v4_group_slots(const json_t *in, json_t **ret_out)
{
	return v4_slots(in, false, ret_out);
}

static int v4_compressed_slots(const json_t *in, json_t **ret_out)
{
	return v4_slots(in, true, ret_out);
}

static int index_k_offsets(const json_t *in, json_t **ret_out)
{
	struct kv_compat_index_k k;
	int r;

	r = kv_compat_index_k(in_int(in, "index_head_dim", 0), in_int(in, "page_size", 1),
			      in_int(in, "slot", 0), in_int(in, "byte", 0), in_int(in, "group", 0),
			      &k);
	if (r)
		return r;
	*ret_out = json_pack("{s:I, s:I, s:I}", "row_bytes", (json_int_t)k.row_bytes,
			     "value_byte_offset", (json_int_t)k.value_offset, "scale_byte_offset",
			     (json_int_t)k.scale_offset);
	return 0;
}

static void mamba_of(int64_t size, int64_t n_draft, int64_t max_requests,
		     struct kv_compat_mamba_rows *ret)
{
	ret->draft_base = size;
	ret->draft_per_request = kv_max64(0, n_draft - 1);
	ret->n_current = (size_t)(max_requests > 0 ? max_requests + 1 : size);
	ret->current = golden_alloc(ret->n_current, sizeof(*ret->current));
	for (size_t i = 0; i < ret->n_current; i++)
		ret->current[i] = -1;
}

static int mamba_pool_trace(const json_t *in, json_t **ret_out)
{
	struct kv_compat_mamba_rows m;
	json_t *op, *results = json_array();
	size_t i;

	mamba_of(in_int(in, "size", 0), in_int(in, "speculative_num_draft_tokens", 0),
		 in_int(in, "max_req_pool_size", 0), &m);
	json_array_foreach(json_object_get(in, "ops"), i, op)
	{
		const char *name = in_text(op, "op", "");
		int64_t n_tokens = in_int(op, "draft_token_num", 1);
		size_t n, n_cow;
		int64_t *req = in_ints(op, "req", &n), *working = in_ints(op, "working", &n);
		int64_t *cow = in_ints(op, "cow", &n_cow);
		int64_t *rows = golden_alloc(n * (size_t)n_tokens, sizeof(*rows));

		if (!strcmp(name, "reset")) {
			kv_compat_mamba_reset(&m, req, working, n);
			json_array_append_new(results, json_null());
		} else if (!strcmp(name, "verify")) {
			kv_compat_mamba_verify(&m, req, working, n, n_tokens, rows);
			json_array_append_new(results, out_rows64(rows, n, (size_t)n_tokens));
		} else if (!strcmp(name, "update")) {
			kv_compat_mamba_accept(&m, req, working, in_ints(op, "accepted", &n_cow), n,
					       n_tokens);
			json_array_append_new(results, out_ints(m.current, m.n_current));
		} else {
			kv_compat_mamba_current(&m, req, working, cow, n, rows);
			json_array_append_new(results, out_ints(rows, n));
		}
	}
	*ret_out =
		json_pack("{s:o, s:o, s:I}", "results", results, "current_input_indices",
			  out_ints(m.current, m.n_current), "draft_base", (json_int_t)m.draft_base);
	return 0;
}

static json_t *some_or_null(json_t *list)
{
	if (json_array_size(list))
		return list;
	json_decref(list);
	return json_null();
}

static int extend_metadata(const json_t *in, json_t **ret_out)
{
	int64_t conv_len = in_int(in, "conv_state_len", 0);
	size_t n;
	int64_t *lens = in_ints(in, "seq_lens", &n), *prefix = in_ints(in, "prefix_lens", &n);
	int64_t *working = in_ints(in, "working", &n), *track = in_ints(in, "track", &n);
	struct kv_compat_extend e = {
		.query_start = golden_alloc(n + 1, 8),
		.tracks = golden_alloc(n, sizeof(struct kv_compat_track)),
		.final_source = golden_alloc(n, 8),
		.final_target = golden_alloc(n, 8),
	};
	json_t *source = json_array(), *before = json_array(), *target = json_array();
	json_t *conv = json_array();

	kv_compat_extend_tracks(in_int(in, "page_size", 1), in_int(in, "fla_chunk", 64), conv_len,
				lens, prefix, working, track, n, &e);
	if (!own_tracks(in_int(in, "page_size", 1), in_int(in, "fla_chunk", 64), conv_len, lens, prefix, working,
			track, n, &e))
		return GOLDEN_OWN_DIFFERS;
	for (size_t i = 0; i < e.n_tracks; i++) {
		json_t *window = json_array();

		json_array_append_new(source, json_integer(e.tracks[i].source));
		json_array_append_new(before, json_integer(e.tracks[i].source_before));
		json_array_append_new(target, json_integer(e.tracks[i].target));
		for (int64_t k = 0; k < conv_len; k++)
			json_array_append_new(
				window,
				json_integer(kv_max64(0, kv_min64(e.tracks[i].conv_first + k,
								  e.query_start[n] - 1))));
		json_array_append_new(conv, window);
	}
	*ret_out = json_pack(
		"{s:o, s:o, s:n, s:o, s:o, s:o, s:o, s:o, s:o, s:n, s:n}", "query_start_loc",
		out_ints(e.query_start, n + 1), "cache_indices", out_ints(working, n),
		"output_indices", "track_ssm_src", some_or_null(source), "track_ssm_src_fla",
		some_or_null(before), "track_ssm_dst", some_or_null(target), "track_conv_indices",
		some_or_null(conv), "final_src", some_or_null(out_ints(e.final_source, e.n_finals)),
		"final_dst", some_or_null(out_ints(e.final_target, e.n_finals)), "state_in",
		"state_out");
	return 0;
}

/* Query starts of a padded batch: padding rows are empty. */
static json_t *out_starts(size_t n, size_t n_real, int64_t width)
{
	json_t *starts = json_array();

	for (size_t i = 0; i <= n; i++)
		json_array_append_new(starts,
				      json_integer((int64_t)(i < n_real ? i : n_real) * width));
	return starts;
}

static int flat_decode_replay(const json_t *in, json_t **ret_out)
{
	struct kv_compat_table t = table_in(json_object_get(in, "table"));
	size_t n = (size_t)in_int(in, "bs", 0), n_real, k;
	int64_t *after = in_ints(in, "seq_lens", &k), *before = golden_alloc(n, 8);
	int32_t *state_in = golden_alloc(n, 4), *state_out = golden_alloc(n, 4);
	int32_t *none = golden_alloc(n, 4);
	int r;

	n_real = n - (size_t)in_int(in, "num_padding", 0);
	for (size_t i = 0; i < n; i++) {
		none[i] = -1;
		before[i] = after[i] - 1;
	}
	r = kv_compat_state_blocks(&t, in_int(in, "page_size", 1), before, after, false, state_in,
				   state_out);
	for (size_t i = n_real; i < n; i++)
		state_in[i] = state_out[i] = -1;
	*ret_out = json_pack("{s:{s:o, s:o}, s:{s:o, s:o, s:o, s:o}}", "capture", "state_in",
			     out_ints32(none, n), "state_out", out_ints32(none, n), "replay",
			     "query_start_loc", out_starts(n, n_real, 1), "cache_indices",
			     out_ints32(none, n), "state_in", out_ints32(state_in, n), "state_out",
			     out_ints32(state_out, n));
	return r;
}

static int verify_replay(const json_t *in, json_t **ret_out)
{
	int64_t n_tokens = in_int(in, "spec_tokens", 1);
	size_t n = (size_t)in_int(in, "bs", 0), n_working, k;
	size_t n_real = n - (size_t)in_int(in, "num_padding", 0);
	int64_t *req = in_ints(in, "req", &k), *given = in_ints(in, "working", &n_working);
	int64_t *cow = in_ints(in, "cow", &k), *working = golden_alloc(n, 8);
	int64_t *input = golden_alloc(n, 8), *outputs = golden_alloc(n * (size_t)n_tokens, 8);
	struct kv_compat_mamba_rows m;

	for (size_t i = 0; i < n; i++)
		working[i] = i < n_real && i < n_working ? given[i] : -1;
	mamba_of(in_int(in, "pool_size", 0), n_tokens, in_int(in, "max_req_pool_size", 0), &m);
	kv_compat_mamba_current(&m, req, working, cow, n, input);
	kv_compat_mamba_verify(&m, req, working, n, n_tokens, outputs);
	*ret_out = json_pack("{s:o, s:o, s:o}", "query_start_loc", out_starts(n, n_real, n_tokens),
			     "cache_indices", out_ints(input, n), "output_indices",
			     out_rows64(outputs, n, (size_t)n_tokens));
	return 0;
}

const struct golden_kind golden_slots[] = {
	{"state_page_indices", state_page_indices},
	{"decode_write_locs", decode_write_locs},
	{"extend_write_locs", extend_write_locs},
	{"build_page_table", build_page_table},
	{"token_indices_from_pages", token_indices_from_pages},
	{"select_group", select_group},
	{"graph_replay", graph_replay},
	{"graph_stale_guard", graph_stale_guard},
	{"v4_group_slots", v4_group_slots},
	{"v4_compressed_slots", v4_compressed_slots},
	{"index_k_offsets", index_k_offsets},
	{"mamba_pool_trace", mamba_pool_trace},
	{"extend_metadata", extend_metadata},
	{"flat_decode_replay", flat_decode_replay},
	{"verify_replay", verify_replay},
	{NULL, NULL},
};
