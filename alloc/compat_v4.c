/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reference calculators: DeepSeek V4, where each layer keeps a window of raw rows, and most keep
 * compressed rows (one for every 4 or 128 tokens), the compressor's state, and an indexer.
 *
 * A block of n rows: n value rows of token_stride bytes, then n scale rows, rounded up to a
 * multiple of the stride.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/compat_pools.h"
#include "include/internal/error.h"

int kv_compat_v4_window(enum kv_compat_value_kind kind, int64_t window)
{
	if (kind == KV_COMPAT_OTHER)
		return kv_error(KV_FAULT_V4_WINDOW_MISSING, "sliding_window: not in the config");
	if (kind == KV_COMPAT_NULL)
		return kv_error(KV_FAULT_V4_WINDOW_NONE, "sliding_window: null in the config");
	if (window <= 0)
		return kv_error(KV_FAULT_V4_WINDOW_NOT_POSITIVE,
				"sliding_window: %lld given, must be positive", (long long)window);
	return 0;
}

int kv_compat_v4_init(struct kv_compat_v4 *v4, const int64_t *ratios, size_t n_ratios,
		      const int64_t *indices, size_t n_indices)
{
	int64_t nope = v4->head_dim - v4->rope_dim, d = v4->index_head_dim;
	int r;

	v4->n_layers = indices ? n_indices : n_ratios;
	if (v4->n_layers > KV_COMPAT_MAX_LAYERS)
		return kv_error(KV_FAULT_OUT_OF_RANGE, "layers: %zu given, at most %d",
				v4->n_layers, KV_COMPAT_MAX_LAYERS);
	for (size_t i = 0; i < v4->n_layers; i++) {
		int64_t index = indices ? indices[i] : (int64_t)i;

		if (index < 0 || (size_t)index >= n_ratios)
			return kv_error(KV_FAULT_V4_LAYER_INDEX_RANGE,
					"layer index: %lld given, the model has %zu ratios",
					(long long)index, n_ratios);
		if (ratios[index] != 0 && ratios[index] != 1 && ratios[index] != 4 &&
		    ratios[index] != 128)
			return kv_error(KV_FAULT_V4_BAD_RATIO,
					"compress_ratios[%lld]: %lld given; 0, 1, 4, 128 exist",
					(long long)index, (long long)ratios[index]);
		v4->ratio[i] = kv_max64(ratios[index], 1);
	}
	if (nope <= 0)
		return kv_error(KV_FAULT_V4_HEAD_NOT_LARGER_THAN_ROPE,
				"head_dim: %lld is not larger than qk_rope_head_dim %lld",
				(long long)v4->head_dim, (long long)v4->rope_dim);
	if (nope % 64)
		return kv_error(KV_FAULT_V4_NOPE_NOT_MULTIPLE_64,
				"head_dim - qk_rope_head_dim: %lld is no multiple of 64",
				(long long)nope);
	if (v4->fp4_indexer && d % 32)
		return kv_error(KV_FAULT_V4_MXFP4_INDEX_DIM,
				"index_head_dim: %lld is no multiple of 32", (long long)d);
	if (!v4->fp4_indexer && d % 128)
		return kv_error(KV_FAULT_V4_FP8_INDEX_DIM,
				"index_head_dim: %lld is no multiple of 128", (long long)d);
	r = kv_compat_v4_window(KV_COMPAT_INT, v4->window);
	if (r)
		return r;
	v4->token_stride = nope + 2 * v4->rope_dim;
	v4->scale_bytes = nope / 64 + 1;
	v4->row_bytes = v4->token_stride + v4->scale_bytes;
	v4->indexer_row_bytes = v4->fp4_indexer ? d / 2 + d / 32 : d + d / 128 * 4;
	return 0;
}

int64_t kv_compat_v4_block_bytes(const struct kv_compat_v4 *v4, int64_t rows)
{
	return kv_ceil_div(v4->row_bytes * rows, v4->token_stride) * v4->token_stride;
}

int64_t kv_compat_v4_storage_rows(const struct kv_compat_v4 *v4, int64_t ratio)
{
	return ratio > 1 ? kv_max64(256 / ratio, 1) : v4->page_size;
}

int64_t kv_compat_v4_state_rows(const struct kv_compat_v4 *v4, int64_t ratio)
{
	return ratio == 4 ? 4 : ratio == 128 ? 8 : v4->page_size;
}

int64_t kv_compat_v4_state_width(const struct kv_compat_v4 *v4, int64_t ratio)
{
	return ratio == 4 ? 2 * v4->head_dim : v4->head_dim;
}

int64_t kv_compat_v4_indexer_page_bytes(const struct kv_compat_v4 *v4)
{
	return kv_max64(64, kv_compat_v4_storage_rows(v4, 4)) * v4->indexer_row_bytes;
}

int64_t kv_compat_v4_cell_bytes(const struct kv_compat_v4 *v4)
{
	int64_t page = v4->page_size, cell = 0;

	for (size_t i = 0; i < v4->n_layers; i++) {
		int64_t r = v4->ratio[i];

		cell += kv_ceil_div(kv_compat_v4_block_bytes(v4, page), page);
		if (r == 1)
			continue;
		cell += kv_ceil_div(kv_compat_v4_block_bytes(v4, kv_compat_v4_storage_rows(v4, r)),
				    page);
		cell += kv_compat_v4_state_width(v4, r) * 8;
		if (r == 4)
			cell += kv_ceil_div(kv_compat_v4_indexer_page_bytes(v4), page) +
				2 * v4->index_head_dim * 8;
	}
	return cell;
}

size_t kv_compat_v4_groups(const struct kv_compat_v4 *v4, struct kv_compat_group *ret_groups,
			   int64_t *ret_page_bytes)
{
	static const int64_t ratios[] = {4, 128};
	int64_t n_of[2] = {0};
	size_t n = 0;

	for (size_t i = 0; i < v4->n_layers; i++) {
		n_of[0] += v4->ratio[i] == 4;
		n_of[1] += v4->ratio[i] == 128;
	}
	ret_groups[n] = (struct kv_compat_group){
		.id = "v4.swa_kv",
		.retention = KV_COMPAT_SLIDING,
		.family = KV_COMPAT_STATE,
		.rows_per_page = 64,
		.entry_stride = 1,
		.has_window = true,
		.window = v4->window,
	};
	ret_page_bytes[n++] = (int64_t)v4->n_layers * kv_compat_v4_block_bytes(v4, 64);
	for (size_t k = 0; k < 2; k++) {
		int64_t r = ratios[k], rows = kv_compat_v4_storage_rows(v4, r);

		if (!n_of[k])
			continue;
		ret_groups[n] = (struct kv_compat_group){
			.retention = KV_COMPAT_SLIDING,
			.family = KV_COMPAT_STATE,
			.rows_per_page = kv_compat_v4_state_rows(v4, r),
			.entry_stride = 1,
			.has_window = true,
			.window = r == 4 ? 8 : 128,
		};
		snprintf(ret_groups[n].id, KV_COMPAT_ID, "v4.c%llda.compressor_state",
			 (long long)r);
		ret_page_bytes[n++] = n_of[k] * kv_compat_v4_state_rows(v4, r) *
				      kv_compat_v4_state_width(v4, r) * 8;
		ret_groups[n] = (struct kv_compat_group){
			.retention = KV_COMPAT_FULL_HISTORY,
			.family = KV_COMPAT_HISTORY,
			.rows_per_page = rows,
			.entry_stride = r,
		};
		snprintf(ret_groups[n].id, KV_COMPAT_ID, "v4.c%llda.compressed_kv", (long long)r);
		ret_page_bytes[n++] =
			n_of[k] * (kv_compat_v4_block_bytes(v4, rows) +
				   (r == 4 ? kv_compat_v4_indexer_page_bytes(v4) : 0));
	}
	if (n_of[0]) {
		ret_groups[n] = (struct kv_compat_group){
			.id = "v4.c4a.indexer_compressor_state",
			.retention = KV_COMPAT_SLIDING,
			.family = KV_COMPAT_STATE,
			.rows_per_page = 4,
			.entry_stride = 1,
			.has_window = true,
			.window = 8,
		};
		ret_page_bytes[n++] = n_of[0] * 4 * 2 * v4->index_head_dim * 8;
	}
	return n;
}

int kv_compat_v4_estimate(const struct kv_compat_v4 *v4, const struct kv_compat_load *load,
			  int64_t *ret_bytes, int64_t *ret_counts)
{
	struct kv_compat_group groups[KV_COMPAT_V4_GROUPS];
	int64_t page_bytes[KV_COMPAT_V4_GROUPS], counts[KV_COMPAT_V4_GROUPS], bytes = 0;
	size_t n = kv_compat_v4_groups(v4, groups, page_bytes);
	int r;

	r = kv_compat_page_counts(groups, n, load, counts);
	if (r)
		return r;
	for (size_t i = 0; i < n; i++)
		bytes += counts[i] * page_bytes[i];
	if (ret_counts)
		memcpy(ret_counts, counts, n * sizeof(counts[0]));
	*ret_bytes = bytes;
	return 0;
}

int kv_compat_v4_profile(const struct kv_compat_v4 *v4, const struct kv_compat_load *load,
			 int64_t available, int64_t draft_cell, int64_t *ret_pages)
{
	struct kv_compat_load l = *load;
	int64_t fits = 0, fails = 1, bytes;
	bool compressed = false;
	int r;

	if (available <= 0) {
		*ret_pages = 0;
		return 0;
	}
	if (draft_cell < 0)
		return kv_error(KV_FAULT_NEGATIVE_ARGUMENT, "draft bytes per token: %lld given",
				(long long)draft_cell);
	l.max_scheduled = kv_max64(0, l.max_scheduled);
	for (size_t i = 0; i < v4->n_layers; i++)
		compressed |= v4->ratio[i] > 1;

	/* Bytes grow with pages: double until it no longer fits, then halve the gap. */
	for (;;) {
		l.max_total = fails * v4->page_size;
		r = kv_compat_v4_estimate(v4, &l, &bytes, NULL);
		if (r)
			return r;
		if (bytes + l.max_total * draft_cell > available)
			break;
		if (!compressed) {
			/* D: with windows only, memory does not bound the answer. */
			*ret_pages = kv_max64(
				1, kv_ceil_div(l.n_requests * l.max_context, v4->page_size));
			return 0;
		}
		fits = fails;
		fails *= 2;
	}
	while (fails - fits > 1) {
		int64_t mid = fits + (fails - fits) / 2;

		l.max_total = mid * v4->page_size;
		r = kv_compat_v4_estimate(v4, &l, &bytes, NULL);
		if (r)
			return r;
		if (bytes + l.max_total * draft_cell > available)
			fails = mid;
		else
			fits = mid;
	}
	*ret_pages = fits;
	return 0;
}

int kv_compat_v4_fp4_row(int64_t row_bytes, int64_t ret_dims[3])
{
	/* 32 values: 16 bytes and a scale byte */
	if (row_bytes < 0 || row_bytes % 17)
		return kv_error(KV_FAULT_V4_ROW_BYTES_MISALIGNED,
				"row of %lld bytes: no multiple of 17", (long long)row_bytes);
	ret_dims[0] = row_bytes / 17 * 32;
	ret_dims[1] = row_bytes / 17 * 16;
	ret_dims[2] = row_bytes / 17;
	return 0;
}

int kv_compat_v4_fp8_row(int64_t row_bytes, int64_t ret_dims[2])
{
	/* 128 values: 128 bytes and a float scale */
	if (row_bytes < 0 || row_bytes % 132)
		return kv_error(KV_FAULT_V4_ROW_BYTES_MISALIGNED,
				"row of %lld bytes: no multiple of 132", (long long)row_bytes);
	ret_dims[0] = row_bytes / 132 * 128;
	ret_dims[1] = row_bytes / 132 * 4;
	return 0;
}

bool kv_compat_v4_state_ratio(const char *group_id, int64_t *ret_ratio)
{
	char *end;
	int64_t ratio;

	if (strncmp(group_id, "v4.c", 4))
		return false;
	ratio = strtoll(group_id + 4, &end, 10);
	if (end == group_id + 4 || strcmp(end, "a.compressor_state"))
		return false;
	*ret_ratio = ratio;
	return true;
}
