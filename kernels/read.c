/* SPDX-License-Identifier: Apache-2.0 */
/* kv_read(): every field, then the device's; and the host's, which is the definition of right. */
#include <errno.h>

#include "include/internal/error.h"
#include "include/internal/public.h"
#include "kernels/check.h"
#include "kernels/read.h"

static int resolve_side(const char *name, void *to, const struct kv_view *view, int32_t dtype,
			int64_t *stride)
{
	int64_t dense = (int64_t)view->n_heads * view->head_dim;

	if (*stride && *stride < dense)
		return kv_error(-EINVAL,
				"%s_stride: %lld elements given, 0 (dense) or at least %lld "
				"allowed",
				name, (long long)*stride, (long long)dense);
	*stride = *stride ? *stride : dense;
	return to ? kv_check_pointer(name, to, kv_dtype_bytes(dtype)) : 0;
}

static int check_sizes(const struct kv_read_args *a)
{
	int r = kv_check_device(a->device);

	if (r == 0)
		r = kv_check_dtype(a->dtype);
	if (r == 0)
		r = kv_check_views(&a->k, &a->v);
	if (r == 0)
		r = kv_check_scales(&a->k, &a->v, a->k_scales, a->v_scales, &a->k_row_scales,
				    &a->v_row_scales);
	if (r == 0)
		r = kv_check_range("n_seqs", a->n_seqs, 0, INT32_MAX - 1);
	if (r == 0)
		r = kv_check_range("n_tokens", a->n_tokens, 0, INT32_MAX);
	if (r == 0)
		r = kv_check_range("table_width", a->table_width, 0, INT32_MAX);
	return r;
}

int kv_read_host(const struct kv_read_args *a)
{
	for (int64_t b = 0; b < a->n_seqs; b++) {
		int64_t start = a->start_loc[b], end = a->start_loc[b + 1];
		int64_t first = a->first ? a->first[b] : 0, size = a->k.block_tokens;

		for (int64_t i = start; i < end && i < a->n_tokens; i++) {
			int64_t j = first + i - start, column = j / size;

			for (int is_v = 0; is_v < 2 && j >= 0 && column < a->table_width; is_v++) {
				struct kv_read_side s = kv_read_side(a, is_v);
				int32_t n = s.view->n_heads * s.view->head_dim;

				for (int32_t e = 0; e < n && s.to; e++)
					kv_read_element(a, &s,
							a->block_table[b * a->table_width + column],
							j % size, i, e);
			}
		}
	}
	return 0;
}

KV_PUBLIC int kv_read(const struct kv_read_args *args)
{
	struct kv_read_args a;
	int r = kv_check_size("kv_read_args", args->size, sizeof(*args));

	if (r < 0)
		return r;
	a = *args;
	r = check_sizes(&a);
	if (r == 0)
		r = resolve_side("key", a.key, &a.k, a.dtype, &a.key_stride);
	if (r == 0)
		r = resolve_side("value", a.value, &a.v, a.dtype, &a.value_stride);
	if (r == 0 && !a.key && !a.value)
		r = kv_error(-EINVAL, "key, value: both NULL");
	if (r < 0 || !a.n_tokens || !a.n_seqs || !a.table_width)
		return r;
	r = kv_check_pointer("start_loc", a.start_loc, sizeof(*a.start_loc));
	if (r == 0)
		r = kv_check_pointer("block_table", a.block_table, sizeof(*a.block_table));
	if (r == 0 && a.device == KV_DEVICE_HOST)
		r = kv_check_reads(a.start_loc, a.first, a.n_seqs, a.block_table, a.table_width,
				   a.k.block_tokens);
	if (r < 0)
		return r;
	return a.device == KV_DEVICE_CUDA ? kv_read_cuda(&a) : kv_read_host(&a);
}
