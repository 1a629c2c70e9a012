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
#include "kernels/view.h"

#define MAX_HEADS    65535 /* one axis of a CUDA grid */
#define MAX_HEAD_DIM 65536

static int check_size(const char *name, size_t given, size_t wanted)
{
	if (given == wanted)
		return 0;
	return kv_error(-EINVAL, "%s.size: %zu given, %zu expected", name, given, wanted);
}

static int check_device(int32_t device)
{
	if (device == KV_DEVICE_HOST || device == KV_DEVICE_CUDA)
		return 0;
	return kv_error(-EINVAL, "device: %d given, %d (host) or %d (CUDA) allowed", device,
			KV_DEVICE_HOST, KV_DEVICE_CUDA);
}

/* Types that compute: what q, out, key and value may have. */
static int check_dtype(int32_t dtype)
{
	if (dtype == KV_F32 || dtype == KV_F16 || dtype == KV_BF16)
		return 0;
	return kv_error(-EINVAL, "dtype: %d given, %d (f32), %d (f16) or %d (bf16) allowed", dtype,
			KV_F32, KV_F16, KV_BF16);
}

static int check_range(const char *name, int64_t given, int64_t min, int64_t max)
{
	if (given >= min && given <= max)
		return 0;
	return kv_error(-EINVAL, "%s: %lld given, %lld..%lld allowed", name, (long long)given,
			(long long)min, (long long)max);
}

static int check_pointer(const char *name, const void *p, size_t align)
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

	if (!element || view->dtype > KV_F8_E4M3) /* bytes have no arithmetic */
		return kv_error(-EINVAL, "%s.dtype: %d given, %d..%d allowed", name, view->dtype,
				KV_F32, KV_F8_E4M3);
	if (view->block_tokens < 1 || view->block_tokens > KV_MAX_BLOCK_TOKENS)
		return kv_error(-EINVAL, "%s.block_tokens: %d given, 1..%d allowed", name,
				view->block_tokens, KV_MAX_BLOCK_TOKENS);
	if (view->n_heads < 1 || view->n_heads > MAX_HEADS)
		return kv_error(-EINVAL, "%s.n_heads: %d given, 1..%d allowed", name, view->n_heads,
				MAX_HEADS);
	if (view->head_dim < 1 || view->head_dim > MAX_HEAD_DIM)
		return kv_error(-EINVAL, "%s.head_dim: %d given, 1..%d allowed", name,
				view->head_dim, MAX_HEAD_DIM);
	if (view->dtype == KV_F8_E4M3 && !(view->scale > 0 && isfinite(view->scale)))
		return kv_error(-EINVAL,
				"%s.scale: %g given; an 8-bit view needs the scale it is written "
				"with, finite and above 0",
				name, (double)view->scale);
	if (view->dtype != KV_F8_E4M3 && view->scale != 1)
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
	    view->head_stride > INT64_MAX / (4 * MAX_HEADS))
		return kv_error(-EINVAL, "%s.token_stride, head_stride: %lld, %lld are too large",
				name, (long long)view->token_stride, (long long)view->head_stride);
	last = (view->block_tokens - 1) * view->token_stride +
	       (view->n_heads - 1) * view->head_stride + row;
	return check_stride(name, "block_stride", view->block_stride, last, element);
}

/* K and V of one component pair. */
static int check_views(const struct kv_view *k, const struct kv_view *v)
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

int kv_write_resolve(const struct kv_write_args *args, struct kv_write_args *ret)
{
	struct kv_write_args a;
	size_t element;
	int r;

	r = check_size("kv_write_args", args->size, sizeof(*args));
	if (r < 0)
		return r;
	a = *args;
	r = check_device(a.device);
	if (r < 0)
		return r;
	r = check_dtype(a.dtype);
	if (r < 0)
		return r;
	r = check_range("n_tokens", a.n_tokens, 0, INT32_MAX);
	if (r < 0)
		return r;
	r = check_views(&a.k, &a.v);
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
		r = check_pointer("key", a.key, element);
		if (r < 0)
			return r;
		r = check_pointer("value", a.value, element);
		if (r < 0)
			return r;
		r = check_pointer("slots", a.slots, sizeof(*a.slots));
		if (r < 0)
			return r;
	}
	*ret = a;
	return 0;
}

/* Lengths and tables, where they can be read. */
static int check_sequences(const struct kv_attention_args *args)
{
	const int32_t *loc = args->query_start_loc;

	if (loc[0] < 0)
		return kv_error(-EINVAL, "query_start_loc[0]: %d given, at least 0 needed", loc[0]);
	for (int b = 0; b < args->n_seqs; b++) {
		int64_t q_len = (int64_t)loc[b + 1] - loc[b];
		int64_t len = args->seq_lens[b];
		int64_t n_blocks = (len + args->k.block_tokens - 1) / args->k.block_tokens;
		const kv_block_id *table = args->block_table + (int64_t)b * args->table_width;
		int64_t first;

		if (q_len < 0 || q_len > args->max_query_len || loc[b + 1] > args->n_tokens)
			return kv_error(-EINVAL,
					"query_start_loc[%d]: %d after %d given; 0..max_query_len "
					"(%d) rows a sequence and n_tokens (%d) in all allowed",
					b + 1, loc[b + 1], loc[b], args->max_query_len,
					args->n_tokens);
		if (len < 0 || len > args->max_seq_len || n_blocks > args->table_width)
			return kv_error(-EINVAL,
					"seq_lens[%d]: %lld given, 0..max_seq_len (%d) and at most "
					"table_width (%d) blocks of %d tokens allowed",
					b, (long long)len, args->max_seq_len, args->table_width,
					args->k.block_tokens);
		if (!q_len)
			continue;
		first = kv_span_seen(len - q_len, len, args->causal, args->window_left).lo;
		for (int64_t i = first / args->k.block_tokens; i < n_blocks; i++)
			if (table[i] < 0)
				return kv_error(-EINVAL,
						"block_table[%d][%lld]: %d given, a block id (0 or "
						"more) needed for a sequence of %lld tokens",
						b, (long long)i, table[i], (long long)len);
	}
	return 0;
}

static int check_attention_sizes(const struct kv_attention_args *a)
{
	int r;

	r = check_range("n_seqs", a->n_seqs, 0, INT32_MAX - 1);
	if (r < 0)
		return r;
	r = check_range("n_tokens", a->n_tokens, 0, INT32_MAX);
	if (r < 0)
		return r;
	r = check_range("max_query_len", a->max_query_len, 0, INT32_MAX);
	if (r < 0)
		return r;
	r = check_range("max_seq_len", a->max_seq_len, 0, INT32_MAX);
	if (r < 0)
		return r;
	r = check_range("table_width", a->table_width, 0, INT32_MAX);
	if (r < 0)
		return r;
	r = check_range("causal", a->causal, 0, 1);
	if (r < 0)
		return r;
	r = check_range("invariant", a->invariant, 0, 1);
	if (r < 0)
		return r;
	r = check_range("window_left", a->window_left, -1, INT32_MAX);
	if (r < 0)
		return r;
	if (!isfinite(a->sm_scale))
		return kv_error(-EINVAL, "sm_scale: %g given, a finite number expected",
				(double)a->sm_scale);
	if (!(a->softcap >= 0 && isfinite(a->softcap)))
		return kv_error(-EINVAL,
				"softcap: %g given, 0 (none) or a finite number above 0 "
				"expected",
				(double)a->softcap);
	r = check_views(&a->k, &a->v);
	if (r < 0)
		return r;
	if (a->n_heads_q < 1 || a->n_heads_q > MAX_HEADS || a->n_heads_q % a->k.n_heads)
		return kv_error(-EINVAL,
				"n_heads_q: %d given, a multiple of k.n_heads (%d) up to %d "
				"expected",
				a->n_heads_q, a->k.n_heads, MAX_HEADS);
	return 0;
}

static int check_attention_pointers(const struct kv_attention_args *a)
{
	size_t element = kv_dtype_bytes(a->dtype);
	int r;

	r = check_pointer("q", a->q, element);
	if (r < 0)
		return r;
	r = check_pointer("out", a->out, element);
	if (r < 0)
		return r;
	if (a->out == a->q)
		return kv_error(-EINVAL, "out: the same memory as q");
	if (a->lse) {
		r = check_pointer("lse", a->lse, sizeof(*a->lse));
		if (r < 0)
			return r;
	}
	r = check_pointer("query_start_loc", a->query_start_loc, sizeof(*a->query_start_loc));
	if (r < 0)
		return r;
	r = check_pointer("seq_lens", a->seq_lens, sizeof(*a->seq_lens));
	if (r < 0)
		return r;
	if (a->workspace_bytes) {
		r = check_pointer("workspace", a->workspace, KV_WORKSPACE_ALIGN);
		if (r < 0)
			return r;
	}
	if (!a->table_width)
		return 0;
	return check_pointer("block_table", a->block_table, sizeof(*a->block_table));
}

int kv_attention_resolve_sizes(const struct kv_attention_args *args, struct kv_attention_args *ret)
{
	struct kv_attention_args a;
	int r;

	r = check_size("kv_attention_args", args->size, sizeof(*args));
	if (r < 0)
		return r;
	a = *args;
	r = check_device(a.device);
	if (r < 0)
		return r;
	r = check_dtype(a.dtype);
	if (r < 0)
		return r;
	r = check_attention_sizes(&a);
	if (r < 0)
		return r;
	if (a.sm_scale == 0)
		a.sm_scale = 1 / sqrtf((float)a.k.head_dim);
	*ret = a;
	return 0;
}

int kv_attention_resolve(const struct kv_attention_args *args, struct kv_attention_args *ret)
{
	struct kv_attention_args a;
	int r;

	r = kv_attention_resolve_sizes(args, &a);
	if (r < 0)
		return r;
	if (a.n_seqs && a.n_tokens) {
		r = check_attention_pointers(&a);
		if (r < 0)
			return r;
		if (a.device == KV_DEVICE_HOST) {
			r = check_sequences(&a);
			if (r < 0)
				return r;
		}
	}
	*ret = a;
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

	r = check_size("kv_copy_args", args->size, sizeof(*args));
	if (r < 0)
		return r;
	r = check_device(args->device);
	if (r < 0)
		return r;
	r = check_range("n_pairs", args->n_pairs, 0, INT32_MAX);
	if (r < 0)
		return r;
	r = check_range("n_views", args->n_views, 0, INT32_MAX);
	if (r < 0)
		return r;
	if (args->n_views) {
		r = check_pointer("views", args->views, _Alignof(struct kv_view));
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
	r = check_pointer("pairs", args->pairs, sizeof(*args->pairs));
	if (r < 0)
		return r;
	return check_pairs(args->pairs, args->n_pairs);
}
