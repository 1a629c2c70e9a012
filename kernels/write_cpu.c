/* SPDX-License-Identifier: Apache-2.0 */
/* Writing K and V in runs: a head's row, or all heads of a token where they leave no gap. */
#include "kernels/attention.h"
#include "kernels/simd.h"
#include "kernels/view.h"

#define CHUNK 256 /* elements converted at a time */

/* to[:] = from[:] / scale */
static void write_run(const struct kv_simd *simd, const struct kv_view *view, void *to,
		      const void *from, int dtype, int64_t n)
{
	int64_t bytes_to = (int64_t)kv_dtype_bytes(view->dtype);
	int64_t bytes_from = (int64_t)kv_dtype_bytes(dtype);

	if (dtype == view->dtype) {
		memcpy(to, from, (size_t)(n * bytes_to));
		return;
	}
	for (int64_t i = 0; i < n; i += CHUNK) {
		int64_t m = n - i < CHUNK ? n - i : CHUNK;
		float x[CHUNK];

		simd->widen(x, (const char *)from + i * bytes_from, dtype, m);
		if (view->scale != 1)
			for (int64_t j = 0; j < m; j++)
				x[j] /= view->scale;
		simd->narrow((char *)to + i * bytes_to, view->dtype, x, m);
	}
}

/* view[slot / P][slot % P][h][:] = from[t][h][:], for one of K and V */
static void write_one(const struct kv_simd *simd, const struct kv_write_args *args,
		      const struct kv_view *view, const void *from, int64_t stride)
{
	bool dense = view->head_stride == kv_view_row_bytes(view);
	int64_t n_runs = dense ? 1 : view->n_heads;
	int64_t n = (int64_t)view->head_dim * view->n_heads / n_runs;
	int64_t bytes = (int64_t)kv_dtype_bytes(args->dtype);

	for (int64_t t = 0; t < args->n_tokens; t++) {
		int64_t slot = args->slots[t];

		for (int64_t h = 0; h < n_runs && slot >= 0; h++)
			write_run(simd, view,
				  kv_view_row(view, slot / view->block_tokens,
					      slot % view->block_tokens, h),
				  (const char *)from + (t * stride + h * n) * bytes, args->dtype,
				  n);
	}
}

int kv_write_simd(const struct kv_simd *simd, const struct kv_write_args *args)
{
	write_one(simd, args, &args->k, args->key, args->key_stride);
	write_one(simd, args, &args->v, args->value, args->value_stride);
	return 0;
}
