/* SPDX-License-Identifier: Apache-2.0 */
/* Writing K and V, the definition of right: one element at a time. */
#include "kernels/attention.h"
#include "kernels/view.h"

/* view[slot / P][slot % P][h][:] = from[t][h][:] / scale, for one of K and V */
static void write_one(const struct kv_write_args *args, const struct kv_view *view,
		      const void *from, int64_t stride)
{
	for (int64_t t = 0; t < args->n_tokens; t++) {
		int64_t slot = args->slots[t];

		if (slot < 0)
			continue;
		for (int64_t h = 0; h < view->n_heads; h++) {
			void *to = kv_view_row(view, slot / view->block_tokens,
					       slot % view->block_tokens, h);
			int64_t at = t * stride + h * view->head_dim;

			for (int64_t d = 0; d < view->head_dim; d++) {
				float x;

				if (args->dtype == view->dtype) { /* bit for bit, NaN included */
					size_t bytes = kv_dtype_bytes(args->dtype);

					memcpy((char *)to + d * (int64_t)bytes,
					       (const char *)from + (at + d) * (int64_t)bytes,
					       bytes);
					continue;
				}
				x = kv_element_load(from, at + d, args->dtype);
				kv_element_store(to, d, view->dtype, x / view->scale);
			}
		}
	}
}

int kv_write_ref(const struct kv_write_args *args)
{
	write_one(args, &args->k, args->key, args->key_stride);
	write_one(args, &args->v, args->value, args->value_stride);
	return 0;
}
