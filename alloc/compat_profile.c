/* SPDX-License-Identifier: Apache-2.0 */
/* Reference calculators: from free memory to pages, chunks and tokens. */
#include "alloc/compat.h"
#include "include/internal/error.h"

#define GIB ((double)(1ll << 30))

int64_t kv_compat_available_bytes(int64_t min_free_bytes, int64_t world_size, double utilization,
				  double total_gib)
{
	double free_bytes = (double)min_free_bytes;

	/* D: ranks agree on the minimum through a float32 reduction, which drops low bits. */
	if (world_size > 1)
		free_bytes = (double)(float)free_bytes;
	return (int64_t)((free_bytes / GIB - total_gib * (1 - utilization)) * GIB);
}

int kv_compat_max_pages(int64_t available, int64_t cell, int64_t page_size, int64_t *ret_pages)
{
	if (cell <= 0)
		return kv_error(KV_FAULT_CELL_SIZE_NOT_POSITIVE,
				"bytes per token: %lld given, must be positive", (long long)cell);
	*ret_pages = kv_floor_div(kv_floor_div(available, cell) + page_size - 1, page_size);
	return 0;
}

int kv_compat_cache_budget(int64_t available, int64_t cell, int64_t page_size,
			   int64_t state_bytes_per_layer, int64_t n_state_layers,
			   int64_t n_draft_tokens, double ratio, struct kv_compat_split *ret_split)
{
	int64_t kv_bytes = (int64_t)((double)available / (1 + ratio));
	struct kv_compat_split s;

	if (cell <= 0)
		return kv_error(KV_FAULT_CELL_SIZE_NOT_POSITIVE,
				"bytes per token: %lld given, must be positive", (long long)cell);

	s.chunk_bytes = n_state_layers * state_bytes_per_layer * (1 + n_draft_tokens);
	if (s.chunk_bytes <= 0)
		return kv_error(KV_FAULT_DIVISION_BY_ZERO, "state bytes per chunk: 0");
	s.kv_pages = kv_floor_div(kv_bytes, cell * page_size);
	s.n_chunks = kv_max64(kv_floor_div(available - kv_bytes, s.chunk_bytes), 2);
	*ret_split = s;
	return 0;
}

int kv_compat_max_tokens(int64_t pages, int64_t page_size, const int64_t *max_total_tokens,
			 int64_t *ret_tokens)
{
	int64_t tokens = pages * page_size;

	if (max_total_tokens) {
		int64_t limit = kv_floor_div(*max_total_tokens, page_size);

		if (limit < 1)
			return kv_error(KV_FAULT_MAX_TOTAL_BELOW_ONE_PAGE,
					"max_total_tokens: %lld is less than a page of %lld",
					(long long)*max_total_tokens, (long long)page_size);
		tokens = kv_min64(tokens, limit * page_size);
	}
	*ret_tokens = tokens;
	return 0;
}
