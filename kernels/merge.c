/* SPDX-License-Identifier: Apache-2.0 */
/* kv_merge(): its arguments, field by field, and which device does it. */
#include <errno.h>

#include "include/internal/error.h"
#include "include/internal/public.h"
#include "kernels/check.h"
#include "kernels/merge.h"

static int check_sizes(const struct kv_merge_args *a)
{
	const struct {
		const char *name;
		int64_t given, min, max;
	} ranges[] = {
		{"n_parts", a->n_parts, 1, 65536},
		{"n_tokens", a->n_tokens, 0, INT32_MAX},
		{"n_heads", a->n_heads, 1, KV_MAX_HEADS},
		{"head_dim", a->head_dim, 1, 65536},
		{"lse_with_sink", a->lse_with_sink, 0, a->sinks ? 1 : 0},
		{"only_part", a->only_part, 0, a->n_parts},
		{"part_stride", a->part_stride, 0, INT64_MAX / 65536 / 4},
		{"token_stride", a->token_stride, 0, INT64_MAX / INT32_MAX / 4},
		{"out_token_stride", a->out_token_stride, 0, INT64_MAX / INT32_MAX / 4},
		{"lse_part_stride", a->lse_part_stride, 0, INT64_MAX / 65536 / 4},
		{"lse_token_stride", a->lse_token_stride, 0, INT64_MAX / INT32_MAX / 4},
		{"lse_head_stride", a->lse_head_stride, 0, INT64_MAX / INT32_MAX / 4},
	};

	for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
		int r = kv_check_range(ranges[i].name, ranges[i].given, ranges[i].min,
				       ranges[i].max);

		if (r < 0)
			return r;
	}
	if (a->base != 0 && a->base != 2)
		return kv_error(-EINVAL, "base: %d given, 0 (e) or 2 allowed", a->base);
	if (!a->lse_token_stride != !a->lse_head_stride)
		return kv_error(-EINVAL, "lse_token_stride, lse_head_stride: %lld, %lld given, both 0 "
					 "(dense) or both above 0 expected",
				(long long)a->lse_token_stride, (long long)a->lse_head_stride);
	return 0;
}

static int check_pointers(const struct kv_merge_args *a)
{
	const struct {
		const char *name;
		const void *p;
		size_t align;
		int optional;
	} pointers[] = {
		{"parts", a->parts, kv_dtype_bytes(a->part_dtype), 0},
		{"part_lse", a->part_lse, 4, 0},
		{"out", a->out, kv_dtype_bytes(a->dtype), 0},
		{"lse", a->lse, 4, 1},
		{"sinks", a->sinks, 4, 1},
		{"n_real", a->n_real, 4, 1},
	};

	for (size_t i = 0; i < sizeof(pointers) / sizeof(pointers[0]); i++) {
		int r = pointers[i].optional && !pointers[i].p
				? 0
				: kv_check_pointer(pointers[i].name, pointers[i].p,
						   pointers[i].align);

		if (r < 0)
			return r;
	}
	if (a->out == a->parts)
		return kv_error(-EINVAL, "out: the same memory as parts");
	return 0;
}

static void fill_in(struct kv_merge_args *a)
{
	if (!a->token_stride)
		a->token_stride = (int64_t)a->n_heads * a->head_dim;
	if (!a->part_stride)
		a->part_stride = a->token_stride * a->n_tokens;
	if (!a->lse_token_stride) {
		a->lse_token_stride = a->n_heads;
		a->lse_head_stride = 1;
	}
	if (!a->lse_part_stride)
		a->lse_part_stride = (int64_t)a->n_heads * a->n_tokens;
	if (!a->out_token_stride)
		a->out_token_stride = (int64_t)a->n_heads * a->head_dim;
}

KV_PUBLIC int kv_merge(const struct kv_merge_args *args)
{
	struct kv_merge_args a;
	int r;

	r = kv_check_size("kv_merge_args", args->size, sizeof(*args));
	if (r < 0)
		return r;
	a = *args;
	r = kv_check_device(a.device);
	if (r < 0)
		return r;
	r = kv_check_dtype(a.dtype);
	if (r < 0)
		return r;
	a.part_dtype = a.part_dtype ?: a.dtype;
	r = kv_check_dtype(a.part_dtype);
	if (r < 0)
		return r;
	r = check_sizes(&a);
	if (r < 0 || !a.n_tokens)
		return r;
	r = check_pointers(&a);
	if (r < 0)
		return r;
	fill_in(&a);
	return a.device == KV_DEVICE_CUDA ? kv_merge_cuda(&a) : kv_merge_host(&a);
}
