/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of DeepSeek V4's layout, and of backend names and start-up checks. */
#include <stdio.h>
#include <string.h>

#include "alloc/compat_pools.h"
#include "tests/golden/golden.h"

static int v4_of(const json_t *in, const char *ratios_key, struct kv_compat_v4 *v4)
{
	size_t n_ratios, n_indices;
	int64_t *ratios = in_ints(in, ratios_key, &n_ratios);
	int64_t *indices = in_ints(in, "layer_indices", &n_indices);

	memset(v4, 0, sizeof(*v4));
	v4->head_dim = in_int(in, "head_dim", 512);
	v4->rope_dim = in_int(in, "rope_dim", 64);
	v4->index_head_dim = in_int(in, "index_head_dim", 128);
	v4->window = in_int(in, "window", 128);
	v4->page_size = in_int(in, "page_size", 256);
	v4->fp4_indexer = in_bool(in, "fp4_indexer", false);
	return kv_compat_v4_init(v4, ratios, n_ratios, indices, n_indices);
}

static json_t *by_ratio(const struct kv_compat_v4 *v4,
			int64_t (*f)(const struct kv_compat_v4 *, int64_t))
{
	return json_pack("{s:I, s:I, s:I}", "1", (json_int_t)f(v4, 1), "4", (json_int_t)f(v4, 4),
			 "128", (json_int_t)f(v4, 128));
}

static int v4_layout(const json_t *in, json_t **ret_out)
{
	static const int64_t compressed[] = {4, 128};
	struct kv_compat_group groups[KV_COMPAT_V4_GROUPS];
	int64_t page_bytes[KV_COMPAT_V4_GROUPS], page = in_int(in, "page_size", 256);
	json_t *specs, *bytes, *cells, *widths;
	struct kv_compat_v4 v4;
	size_t n;
	int r;

	r = v4_of(in, "ratios", &v4);
	if (r)
		return r;
	n = kv_compat_v4_groups(&v4, groups, page_bytes);
	specs = json_array();
	bytes = json_object();
	cells = json_object();
	widths = json_array();
	for (size_t i = 0; i < n; i++) {
		json_array_append_new(specs, out_group(&groups[i]));
		json_object_set_new(bytes, groups[i].id, json_integer(page_bytes[i]));
	}
	for (size_t i = 0; i < 2; i++) {
		char key[8];

		snprintf(key, sizeof(key), "%d", (int)compressed[i]);
		json_object_set_new(
			cells, key,
			json_integer(kv_ceil_div(
				kv_compat_v4_block_bytes(
					&v4, kv_compat_v4_storage_rows(&v4, compressed[i])),
				page)));
	}
	/* The vectors list the width of the first layers only. */
	for (size_t i = 0; i < v4.n_layers && i < 6; i++)
		json_array_append_new(widths,
				      json_integer(kv_compat_v4_state_width(&v4, v4.ratio[i])));
	*ret_out = json_pack(
		"{s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:I, s:o, s:I, s:o, s:o}",
		"layer_ratio", out_ints(v4.ratio, v4.n_layers), "swa_token_stride",
		(json_int_t)v4.token_stride, "swa_scale_dim", (json_int_t)v4.scale_bytes,
		"swa_row_bytes", (json_int_t)v4.row_bytes, "swa_block_bytes_page",
		(json_int_t)kv_compat_v4_block_bytes(&v4, page), "swa_block_bytes_64",
		(json_int_t)kv_compat_v4_block_bytes(&v4, 64), "swa_cell_bytes",
		(json_int_t)kv_ceil_div(kv_compat_v4_block_bytes(&v4, page), page),
		"storage_block_size", by_ratio(&v4, kv_compat_v4_storage_rows),
		"compressor_state_block_size", by_ratio(&v4, kv_compat_v4_state_rows),
		"compressed_cell_bytes", cells, "indexer_row_bytes",
		(json_int_t)v4.indexer_row_bytes, "state_width", widths, "cache_cell_size",
		(json_int_t)kv_compat_v4_cell_bytes(&v4), "specs", specs, "page_bytes", bytes);
	return 0;
}

static int fp4_row(const json_t *in, json_t **ret_out)
{
	int64_t dims[3];
	int r;

	r = kv_compat_v4_fp4_row(in_int(in, "row_bytes", 0), dims);
	if (r)
		return r;
	*ret_out = json_pack("{s:o}", "result", out_ints(dims, 3));
	return 0;
}

static int fp8_row(const json_t *in, json_t **ret_out)
{
	int64_t dims[2];
	int r;

	r = kv_compat_v4_fp8_row(in_int(in, "row_bytes", 0), dims);
	if (r)
		return r;
	*ret_out = json_pack("{s:o}", "result", out_ints(dims, 2));
	return 0;
}

static int parse_state_group_id(const json_t *in, json_t **ret_out)
{
	int64_t ratio;
	bool found = kv_compat_v4_state_ratio(in_text(in, "group_id", ""), &ratio);

	*ret_out = json_pack("{s:o}", "ratio", found ? json_integer(ratio) : json_null());
	return 0;
}

static struct kv_compat_load load_of(const json_t *in)
{
	return (struct kv_compat_load){
		.n_requests = in_int(in, "max_live_requests", 0),
		.max_scheduled = in_int(in, "max_scheduled_tokens", 0),
		.max_total = in_int(in, "max_total_tokens", 0),
		.max_context = in_int(in, "max_context_len", 0),
		.decode_tokens = in_int(in, "decode_input_tokens", 1),
		.overlap_depth = in_int(in, "overlap_schedule_depth", 0),
	};
}

static int v4_profile(const json_t *in, json_t **ret_out)
{
	struct kv_compat_load load = load_of(in);
	struct kv_compat_group groups[KV_COMPAT_V4_GROUPS];
	int64_t pages, bytes, counts[KV_COMPAT_V4_GROUPS], page_bytes[KV_COMPAT_V4_GROUPS];
	int64_t draft = in_int(in, "draft_cache_cell_size", 0);
	struct kv_compat_v4 v4;
	json_t *by_group;
	size_t n;
	int r;

	r = v4_of(in, "model_ratios", &v4);
	if (r)
		return r;
	r = kv_compat_v4_profile(&v4, &load, in_int(in, "available_bytes", 0), draft, &pages);
	if (r)
		return r;
	load.max_total = pages * v4.page_size;
	load.max_scheduled = kv_max64(0, load.max_scheduled);
	r = kv_compat_v4_estimate(&v4, &load, &bytes, counts);
	if (r)
		return r;
	n = kv_compat_v4_groups(&v4, groups, page_bytes);
	by_group = json_object();
	for (size_t i = 0; i < n; i++)
		json_object_set_new(by_group, groups[i].id, json_integer(counts[i]));
	*ret_out = json_pack("{s:I, s:o, s:I}", "pages", (json_int_t)pages, "counts_at_result",
			     by_group, "bytes_at_result",
			     (json_int_t)(bytes + load.max_total * draft));
	return 0;
}

static int v4_estimate_bytes(const json_t *in, json_t **ret_out)
{
	struct kv_compat_load load = load_of(in);
	struct kv_compat_v4 v4;
	int64_t bytes;
	int r;

	r = v4_of(in, "model_ratios", &v4);
	if (r)
		return r;
	r = kv_compat_v4_estimate(&v4, &load, &bytes, NULL);
	if (r)
		return r;
	*ret_out = json_pack("{s:I}", "bytes", (json_int_t)bytes);
	return 0;
}

static int v4_resolve_window(const json_t *in, json_t **ret_out)
{
	const char *word = in_text(in, "window", "");
	int64_t window = in_int(in, "window", 0);
	int r;

	r = kv_compat_v4_window(!strcmp(word, "MISSING") ? KV_COMPAT_OTHER
				: *word			 ? KV_COMPAT_NULL
							 : KV_COMPAT_INT,
				window);
	if (r)
		return r;
	*ret_out = json_pack("{s:I}", "window", (json_int_t)window);
	return 0;
}

static int resolve_backend(const json_t *in, json_t **ret_out)
{
	const char *class;
	int r;

	r = kv_compat_backend(in_text(in, "name", NULL), in_text(in, "arch", ""),
			      !strcmp(in_text(in, "platform", ""), "nvidia"), &class);
	if (r)
		return r;
	*ret_out = json_pack("{s:s}", "backend", class);
	return 0;
}

static int validate_flat_config(const json_t *in, json_t **ret_out)
{
	struct kv_compat_flat_check check = {
		.flat_ext = in_bool(in, "flat_ext", false),
		.uses_flat = in_bool(in, "uses_flat", false),
		.uses_paged = in_bool(in, "uses_paged", false),
		.flat_spec_capable = in_bool(in, "flat_spec_capable", false),
		.n_groups = in_int(in, "num_groups", 0),
		.speculative = in_text(in, "speculative", NULL),
	};
	int r;

	r = kv_compat_check_flat(&check);
	if (r)
		return r;
	*ret_out = json_pack("{s:b}", "ok", 1);
	return 0;
}

static int host_pages(const json_t *in, json_t **ret_out)
{
	int64_t pages;
	int r;

	r = kv_compat_host_pages(in_int(in, "bytes_per_host_page", 0),
				 in_int(in, "device_pool_size", 0), in_int(in, "page_size", 0),
				 in_real(in, "host_ratio", 0), in_real(in, "host_size_gb", 0),
				 &pages);
	if (r)
		return r;
	*ret_out = json_pack("{s:I}", "pages", (json_int_t)pages);
	return 0;
}

const struct golden_kind golden_v4[] = {
	{"v4_layout", v4_layout},
	{"mxfp4_from_row_bytes", fp4_row},
	{"fp8_from_row_bytes", fp8_row},
	{"parse_state_group_id", parse_state_group_id},
	{"v4_profile", v4_profile},
	{"v4_estimate_bytes", v4_estimate_bytes},
	{"v4_resolve_window", v4_resolve_window},
	{"resolve_backend", resolve_backend},
	{"validate_flat_config", validate_flat_config},
	{"host_pages", host_pages},
	{NULL, NULL},
};
