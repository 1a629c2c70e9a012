/* SPDX-License-Identifier: Apache-2.0 */
/* Copying blocks: each row, or the whole block where its rows leave no gap. */
#include "kernels/attention.h"
#include "kernels/view.h"

static void copy_block(const struct kv_view *view, int64_t from, int64_t to)
{
	size_t row = (size_t)kv_view_row_bytes(view);

	if (kv_view_is_dense(view)) {
		memcpy(kv_view_row(view, to, 0, 0), kv_view_row(view, from, 0, 0),
		       row * (size_t)view->n_heads * (size_t)view->block_tokens);
		return;
	}
	for (int64_t t = 0; t < view->block_tokens; t++)
		for (int64_t h = 0; h < view->n_heads; h++)
			memcpy(kv_view_row(view, to, t, h), kv_view_row(view, from, t, h), row);
}

int kv_copy_ref(const struct kv_copy_args *args)
{
	for (int i = 0; i < args->n_pairs; i++) {
		kv_block_id from = args->pairs[2 * i], to = args->pairs[2 * i + 1];

		if (from == to)
			continue;
		for (int v = 0; v < args->n_views; v++)
			copy_block(&args->views[v], from, to);
	}
	return 0;
}
