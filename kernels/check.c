/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arguments of the public calls, field by field. What lies behind a pointer is looked at on the
 * host only: there lengths and tables are checked too, on a GPU kernels stay inside them.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>

#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "kernels/attention.h"
#include "kernels/check.h"
#include "kernels/view.h"

#define MAX_HEAD_DIM 65536
/* Bytes of a caller that knows no field after `stream`. */
#define WRITE_FIRST offsetof(struct kv_write_args, k_scales)

int kv_check_size(const char *name, size_t given, size_t wanted)
{
	if (given == wanted)
		return 0;
	return kv_error(-EINVAL, "%s.size: %zu given, %zu expected", name, given, wanted);
}

int kv_check_device(int32_t device)
{
	if (device == KV_DEVICE_HOST || device == KV_DEVICE_CUDA)
		return 0;
	return kv_error(-EINVAL, "device: %d given, %d (host) or %d (CUDA) allowed", device,
			KV_DEVICE_HOST, KV_DEVICE_CUDA);
}

/* Types that compute: what q, out, key and value may have. */
int kv_check_dtype(int32_t dtype)
{
	if (dtype == KV_F32 || dtype == KV_F16 || dtype == KV_BF16)
		return 0;
	return kv_error(-EINVAL, "dtype: %d given, %d (f32), %d (f16) or %d (bf16) allowed", dtype,
			KV_F32, KV_F16, KV_BF16);
}

int kv_check_range(const char *name, int64_t given, int64_t min, int64_t max)
{
	if (given >= min && given <= max)
		return 0;
	return kv_error(-EINVAL, "%s: %lld given, %lld..%lld allowed", name, (long long)given,
			(long long)min, (long long)max);
}

int kv_check_pointer(const char *name, const void *p, size_t align)
{
	if (!p)
		return kv_error(-EINVAL, "%s: NULL", name);
	if ((uintptr_t)p % align)
		return kv_error(-EINVAL, "%s: %p is not a multiple of %zu", name, p, align);
	return 0;
}

static int check_stride(const char *view, const char *name, int64_t given, int64_t min,
			int64_t element)
{
	if (given < min)
		return kv_error(-EINVAL, "%s.%s: %lld bytes given, at least %lld needed", view,
				name, (long long)given, (long long)min);
	if (given % element)
		return kv_error(-EINVAL, "%s.%s: %lld is not a multiple of the element, %lld bytes",
				view, name, (long long)given, (long long)element);
	return 0;
}

static int check_view(const char *name, const struct kv_view *view)
{
	int64_t element = (int64_t)kv_dtype_bytes(view->dtype);
	int64_t row, last;
	int r;

	if (!element || view->dtype == KV_BYTES) /* bytes have no arithmetic */
		return kv_error(-EINVAL, "%s.dtype: %d given, %d..%d or %d allowed", name,
				view->dtype, KV_F32, KV_F8_E4M3, KV_F8_E5M2);
	if (view->block_tokens < 1 || view->block_tokens > KV_MAX_BLOCK_TOKENS)
		return kv_error(-EINVAL, "%s.block_tokens: %d given, 1..%d allowed", name,
				view->block_tokens, KV_MAX_BLOCK_TOKENS);
	if (view->n_heads < 1 || view->n_heads > KV_MAX_HEADS)
		return kv_error(-EINVAL, "%s.n_heads: %d given, 1..%d allowed", name, view->n_heads,
				KV_MAX_HEADS);
	if (view->head_dim < 1 || view->head_dim > MAX_HEAD_DIM)
		return kv_error(-EINVAL, "%s.head_dim: %d given, 1..%d allowed", name,
				view->head_dim, MAX_HEAD_DIM);
	if (element == 1 && !(view->scale > 0 && isfinite(view->scale)))
		return kv_error(-EINVAL,
				"%s.scale: %g given; an 8-bit view needs the scale it is written "
				"with, finite and above 0",
				name, (double)view->scale);
	if (element != 1 && view->scale != 1)
		return kv_error(-EINVAL,
				"%s.scale: %g given, 1 expected for types wider than 8 bits", name,
				(double)view->scale);
	if (!view->base)
		return kv_error(-EINVAL, "%s.base: NULL", name);
	if ((uintptr_t)view->base % (uintptr_t)element)
		return kv_error(-EINVAL, "%s.base: %p is not a multiple of the element, %lld bytes",
				name, view->base, (long long)element);

	row = view->head_dim * element;
	r = check_stride(name, "token_stride", view->token_stride, view->block_tokens > 1 ? row : 0,
			 element);
	if (r < 0)
		return r;
	r = check_stride(name, "head_stride", view->head_stride, view->n_heads > 1 ? row : 0,
			 element);
	if (r < 0)
		return r;
	if (view->token_stride > INT64_MAX / (4 * KV_MAX_BLOCK_TOKENS) ||
	    view->head_stride > INT64_MAX / (4 * KV_MAX_HEADS))
		return kv_error(-EINVAL, "%s.token_stride, head_stride: %lld, %lld are too large",
				name, (long long)view->token_stride, (long long)view->head_stride);
	last = (view->block_tokens - 1) * view->token_stride +
	       (view->n_heads - 1) * view->head_stride + row;
	return check_stride(name, "block_stride", view->block_stride, last, element);
}

/* K and V of one component pair. */
int kv_check_views(const struct kv_view *k, const struct kv_view *v)
{
	int r;

	r = check_view("k", k);
	if (r < 0)
		return r;
	r = check_view("v", v);
	if (r < 0)
		return r;
	if (k->n_heads != v->n_heads)
		return kv_error(-EINVAL, "v.n_heads: %d given, k has %d", v->n_heads, k->n_heads);
	if (k->block_tokens != v->block_tokens)
		return kv_error(-EINVAL, "v.block_tokens: %d given, k has %d", v->block_tokens,
				k->block_tokens);
	return 0;
}

int kv_check_row_scales(const char *name, const struct kv_view *scales, const struct kv_view *view)
{
	if (kv_dtype_bytes(view->dtype) != 1)
		return kv_error(-EINVAL, "%s: given for a type wider than 8 bits", name);
	if (scales->dtype != KV_F32 || scales->head_dim != 1 || scales->n_heads != view->n_heads ||
	    scales->block_tokens != view->block_tokens)
		return kv_error(-EINVAL, "%s: %d heads of %d of type %d in blocks of %d given, %d of 1 "
				"of type %d (f32) in blocks of %d expected", name, scales->n_heads,
				scales->head_dim, scales->dtype, scales->block_tokens, view->n_heads,
				KV_F32, view->block_tokens);
	return check_view(name, scales);
}

static int resolve_stride(const char *name, int64_t given, const struct kv_view *view, int64_t *ret)
{
	int64_t dense = (int64_t)view->n_heads * view->head_dim;

	if (given && given < dense)
		return kv_error(-EINVAL,
				"%s: %lld elements given, 0 (dense) or at least %lld allowed", name,
				(long long)given, (long long)dense);
	*ret = given ? given : dense;
	return 0;
}

/* Scales of heads or rows: of 8-bit views, and not both. */
int kv_check_scales(const struct kv_view *k, const struct kv_view *v, const float *k_scales,
		    const float *v_scales, const struct kv_view *k_rows, const struct kv_view *v_rows)
{
	int r;

	if ((k_scales && kv_dtype_bytes(k->dtype) != 1) || (v_scales && kv_dtype_bytes(v->dtype) != 1))
		return kv_error(-EINVAL, "k_scales, v_scales: given for a type wider than 8 bits");
	if (!k_rows->base && !v_rows->base)
		return 0;
	if (!k_rows->base || !v_rows->base || k_scales || v_scales)
		return kv_error(-EINVAL, "k_row_scales, v_row_scales: both or none, and not with "
					 "k_scales or v_scales");
	r = kv_check_row_scales("k_row_scales", k_rows, k);
	if (r < 0)
		return r;
	return kv_check_row_scales("v_row_scales", v_rows, v);
}

int kv_write_resolve(const struct kv_write_args *args, struct kv_write_args *ret)
{
	struct kv_write_args a;
	size_t element;
	int r;

	if (args->size < WRITE_FIRST || args->size > sizeof(a))
		return kv_error(-EINVAL, "kv_write_args.size: %zu given, %zu..%zu expected", args->size,
				WRITE_FIRST, sizeof(a));
	memset(&a, 0, sizeof(a));
	memcpy(&a, args, args->size);
	a.size = sizeof(a);
	r = kv_check_device(a.device);
	if (r < 0)
		return r;
	r = kv_check_dtype(a.dtype);
	if (r < 0)
		return r;
	r = kv_check_range("n_tokens", a.n_tokens, 0, INT32_MAX);
	if (r < 0)
		return r;
	r = kv_check_views(&a.k, &a.v);
	if (r < 0)
		return r;
	r = kv_check_scales(&a.k, &a.v, a.k_scales, a.v_scales, &a.k_row_scales, &a.v_row_scales);
	if (r < 0)
		return r;
	r = resolve_stride("key_stride", a.key_stride, &a.k, &a.key_stride);
	if (r < 0)
		return r;
	r = resolve_stride("value_stride", a.value_stride, &a.v, &a.value_stride);
	if (r < 0)
		return r;
	if (a.n_tokens) {
		element = kv_dtype_bytes(a.dtype);
		r = kv_check_pointer("key", a.key, element);
		if (r < 0)
			return r;
		r = kv_check_pointer("value", a.value, element);
		if (r < 0)
			return r;
		r = kv_check_pointer("slots", a.slots, sizeof(*a.slots));
		if (r < 0)
			return r;
	}
	*ret = a;
	return 0;
}

int kv_check_reads(const int32_t *start_loc, const int32_t *first, int32_t n_seqs,
		   const int32_t *block_table, int32_t table_width, int32_t block_tokens)
{
	for (int64_t b = 0; b < n_seqs; b++) {
		int64_t start = start_loc[b], n = start_loc[b + 1] - start;
		int64_t begin = first ? first[b] : 0;

		if (start < 0 || n < 0)
			return kv_error(-EINVAL, "start_loc[%lld]: %d after %lld given, from 0 on and no "
						 "smaller expected",
					(long long)b + 1, start_loc[b + 1], (long long)start);
		for (int64_t i = begin / block_tokens;
		     n && i <= (begin + n - 1) / block_tokens && i < table_width; i++)
			if (i >= 0 && block_table[b * table_width + i] < 0)
				return kv_error(-EINVAL, "block_table[%lld][%lld]: %d given, a block id (0 "
							 "or more) needed",
						(long long)b, (long long)i,
						block_table[b * table_width + i]);
	}
	return 0;
}

static int compare_ids(const void *a, const void *b)
{
	kv_block_id x = *(const kv_block_id *)a, y = *(const kv_block_id *)b;

	return (x > y) - (x < y);
}

/* Destinations differ from one another and from every other pair's source. */
static int check_pairs(const kv_block_id *pairs, int64_t n_pairs)
{
	kv_cleanup(kv_freep) kv_block_id *to = malloc((size_t)n_pairs * sizeof(*to));

	if (!to)
		return kv_error(-ENOMEM, "pairs: no memory to check %lld", (long long)n_pairs);
	for (int64_t i = 0; i < n_pairs; i++) {
		if (pairs[2 * i] < 0 || pairs[2 * i + 1] < 0)
			return kv_error(-EINVAL, "pairs[%lld]: %d to %d given, ids are 0 or more",
					(long long)i, pairs[2 * i], pairs[2 * i + 1]);
		to[i] = pairs[2 * i + 1];
	}
	qsort(to, (size_t)n_pairs, sizeof(*to), compare_ids);
	for (int64_t i = 1; i < n_pairs; i++)
		if (to[i] == to[i - 1])
			return kv_error(-EINVAL, "pairs: block %d is the destination of two",
					to[i]);
	for (int64_t i = 0; i < n_pairs; i++)
		if (pairs[2 * i] != pairs[2 * i + 1] &&
		    bsearch(&pairs[2 * i], to, (size_t)n_pairs, sizeof(*to), compare_ids))
			return kv_error(
				-EINVAL,
				"pairs: block %d is a source and another pair's destination",
				pairs[2 * i]);
	return 0;
}

int kv_copy_check(const struct kv_copy_args *args)
{
	int r;

	r = kv_check_size("kv_copy_args", args->size, sizeof(*args));
	if (r < 0)
		return r;
	r = kv_check_device(args->device);
	if (r < 0)
		return r;
	r = kv_check_range("n_pairs", args->n_pairs, 0, INT32_MAX);
	if (r < 0)
		return r;
	r = kv_check_range("n_views", args->n_views, 0, INT32_MAX);
	if (r < 0)
		return r;
	if (args->n_views) {
		r = kv_check_pointer("views", args->views, _Alignof(struct kv_view));
		if (r < 0)
			return r;
	}
	for (int i = 0; i < args->n_views; i++) {
		char name[24];

		snprintf(name, sizeof(name), "views[%d]", i);
		r = check_view(name, &args->views[i]);
		if (r < 0)
			return r;
	}
	if (!args->n_pairs)
		return 0;
	r = kv_check_pointer("pairs", args->pairs, sizeof(*args->pairs));
	if (r < 0)
		return r;
	return check_pairs(args->pairs, args->n_pairs);
}
