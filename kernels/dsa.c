/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The public calls of sparse attention: hold every field against what it may be, note all that is
 * wrong, fill in strides, run the first backend that doesn't refuse.
 */
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

#include "include/internal/error.h"
#include "include/internal/public.h"
#include "kernels/dsa.h"

#define MAX_HEADS_INDEX 256
#define MAX_HEADS	1024
#define MAX_TOP_K	65536
#define MAX_DIM		1024

/* What is wrong, a sentence each. */
struct reasons {
	char text[KV_ERROR_BYTES];
	size_t used;
	int r;
};

__attribute__((format(printf, 3, 4))) static void wrong(struct reasons *w, int r,
							const char *format, ...)
{
	va_list args;
	int n;

	if (w->r && w->used < sizeof(w->text))
		w->used += (size_t)snprintf(w->text + w->used, sizeof(w->text) - w->used, "; ");
	if (w->used < sizeof(w->text)) {
		va_start(args, format);
		n = vsnprintf(w->text + w->used, sizeof(w->text) - w->used, format, args);
		va_end(args);
		w->used += n > 0 ? (size_t)n : 0;
	}
	w->r = w->r == -EINVAL ? w->r : r;
}

static void check_range(struct reasons *w, const char *name, int64_t given, int64_t min,
			int64_t max)
{
	if (given < min || given > max)
		wrong(w, -EINVAL, "%s: %lld given, %lld..%lld allowed", name, (long long)given,
		      (long long)min, (long long)max);
}

static void check_pointer(struct reasons *w, const char *name, const void *p, size_t align)
{
	if (!p)
		wrong(w, -EINVAL, "%s: NULL", name);
	else if ((uintptr_t)p % align)
		wrong(w, -EINVAL, "%s: %p is not a multiple of %zu", name, p, align);
}

static void check_device(struct reasons *w, int32_t device)
{
	if (device != KV_DEVICE_HOST && device != KV_DEVICE_CUDA)
		wrong(w, -EINVAL, "device: %d given, %d (host) or %d (CUDA) allowed", device,
		      KV_DEVICE_HOST, KV_DEVICE_CUDA);
	else if (device == KV_DEVICE_CUDA && kv_dsa_backends[0]->device != KV_DEVICE_CUDA)
		wrong(w, -ENOTSUP, "device: this build has no CUDA");
}

static void check_dtype(struct reasons *w, int32_t dtype)
{
	if (dtype != KV_F32 && dtype != KV_F16 && dtype != KV_BF16)
		wrong(w, -EINVAL, "dtype: %d given, %d (f32), %d (f16) or %d (bf16) allowed", dtype,
		      KV_F32, KV_F16, KV_BF16);
}

static void check_stride(struct reasons *w, const char *name, int64_t *stride, int64_t dense)
{
	if (!*stride)
		*stride = dense;
	else if (*stride < dense || *stride > INT32_MAX)
		wrong(w, -EINVAL, "%s: %lld elements given, 0 (dense) or %lld..%d allowed", name,
		      (long long)*stride, (long long)dense, INT32_MAX);
}

static void check_index_view(struct reasons *w, const struct kv_view *v, bool base)
{
	check_range(w, "cache.block_tokens", v->block_tokens, 1, KV_MAX_BLOCK_TOKENS);
	if (v->n_heads != 1)
		wrong(w, -EINVAL, "cache.n_heads: %d given, 1 expected", v->n_heads);
	if (v->dtype != KV_BYTES)
		wrong(w, -EINVAL, "cache.dtype: %d given, %d (bytes) expected", v->dtype, KV_BYTES);
	if (v->head_dim != KV_INDEX_ROW_FP8 && v->head_dim != KV_INDEX_ROW_FP4)
		wrong(w, -EINVAL,
		      "cache.head_dim: %d given, %d (e4m3 and a scale) or %d (e2m1 and 4 scales) "
		      "allowed",
		      v->head_dim, KV_INDEX_ROW_FP8, KV_INDEX_ROW_FP4);
	else if (v->block_stride < (int64_t)v->block_tokens * v->head_dim || v->block_stride % 4)
		wrong(w, -EINVAL,
		      "cache.block_stride: %lld bytes given, %lld or more in steps of 4 needed",
		      (long long)v->block_stride, (long long)v->block_tokens * v->head_dim);
	if (base)
		check_pointer(w, "cache.base", v->base, 4);
}

static void check_write(struct reasons *w, const struct kv_index_write_args *args,
			struct kv_index_write_args *a)
{
	if (args->size != sizeof(*a)) {
		wrong(w, -EINVAL, "kv_index_write_args.size: %zu given, %zu expected", args->size,
		      sizeof(*a));
		return;
	}
	*a = *args;
	check_device(w, a->device);
	check_dtype(w, a->dtype);
	check_range(w, "n_tokens", a->n_tokens, 0, INT32_MAX);
	check_range(w, "pow2_scales", a->pow2_scales, 0, 1);
	check_stride(w, "key_stride", &a->key_stride, KV_INDEX_DIM);
	check_index_view(w, &a->cache, a->n_tokens > 0);
	if (a->n_tokens > 0) {
		check_pointer(w, "key", a->key, kv_dtype_bytes(a->dtype) ?: 1);
		check_pointer(w, "slots", a->slots, sizeof(int64_t));
	}
}

/* Floats from token to token of scores that the caller does not keep. */
static int64_t scores_width(const struct kv_index_args *a)
{
	return ((int64_t)a->max_seq_len + 3) / 4 * 4;
}

static size_t index_workspace(const struct kv_index_args *a)
{
	return a->scores ? 0 : (size_t)a->n_tokens * (size_t)scores_width(a) * sizeof(float);
}

static void check_index(struct reasons *w, const struct kv_index_args *args, bool sizes_only,
			struct kv_index_args *a)
{
	if (args->size != sizeof(*a)) {
		wrong(w, -EINVAL, "kv_index_args.size: %zu given, %zu expected", args->size,
		      sizeof(*a));
		return;
	}
	*a = *args;
	check_device(w, a->device);
	check_range(w, "form", a->form, KV_INDEX_SLOTS, KV_INDEX_POSITIONS);
	check_range(w, "n_seqs", a->n_seqs, 0, INT32_MAX - 1);
	check_range(w, "n_tokens", a->n_tokens, 0, INT32_MAX);
	check_range(w, "max_query_len", a->max_query_len, 0, INT32_MAX);
	check_range(w, "max_seq_len", a->max_seq_len, 0, INT32_MAX - 4);
	check_range(w, "table_width", a->table_width, 0, INT32_MAX);
	check_range(w, "n_heads", a->n_heads, 1, MAX_HEADS_INDEX);
	check_range(w, "top_k", a->top_k, 1, MAX_TOP_K);
	check_stride(w, "q_stride", &a->q_stride, (int64_t)a->n_heads * KV_INDEX_DIM);
	check_stride(w, "weights_stride", &a->weights_stride, a->n_heads);
	check_stride(w, "scores_stride", &a->scores_stride, scores_width(a));
	if (a->scores_stride % 4)
		wrong(w, -EINVAL, "scores_stride: %lld given, a multiple of 4 expected",
		      (long long)a->scores_stride);
	check_index_view(w, &a->cache, !sizes_only && a->n_tokens > 0);
	if (!a->query_start_loc && a->n_tokens != a->n_seqs && !sizes_only)
		wrong(w, -EINVAL,
		      "query_start_loc: NULL means a query a sequence, but n_tokens is %d and "
		      "n_seqs %d",
		      a->n_tokens, a->n_seqs);
	if (sizes_only || !a->n_tokens || !a->n_seqs)
		return;
	check_pointer(w, "q", a->q, 1);
	check_pointer(w, "weights", a->weights, sizeof(float));
	check_pointer(w, "seq_lens", a->seq_lens, sizeof(int32_t));
	check_pointer(w, "block_table", a->block_table, sizeof(int32_t));
	if (a->chosen)
		check_pointer(w, "chosen", a->chosen, sizeof(int32_t));
	else if (!a->scores)
		wrong(w, -EINVAL, "chosen: NULL, and so is scores: there is nothing to do");
	if (a->scores) {
		check_pointer(w, "scores", a->scores, 16);
	} else if (a->max_seq_len > 0) {
		if (a->workspace_bytes < index_workspace(a))
			wrong(w, -EINVAL, "workspace_bytes: %zu given, %zu needed",
			      a->workspace_bytes, index_workspace(a));
		check_pointer(w, "workspace", a->workspace, 256);
	}
}

static void check_latent(struct reasons *w, const struct kv_sparse_mla_args *a, bool base)
{
	const struct kv_view *v = &a->cache;
	int64_t element = (int64_t)kv_dtype_bytes(v->dtype);
	int32_t row = v->dtype == KV_BYTES
			      ? a->latent_dim + a->latent_dim / 128 * 4 + a->rope_dim * 2
			      : a->latent_dim + a->rope_dim;

	check_range(w, "cache.block_tokens", v->block_tokens, 1, KV_MAX_BLOCK_TOKENS);
	if (v->n_heads != 1)
		wrong(w, -EINVAL, "cache.n_heads: %d given, 1 expected", v->n_heads);
	if (!element) {
		wrong(w, -EINVAL, "cache.dtype: %d given, which is no type", v->dtype);
		return;
	}
	if (v->dtype == KV_BYTES && a->latent_dim % 128)
		wrong(w, -EINVAL, "latent_dim: %d given, packed rows have multiples of 128",
		      a->latent_dim);
	if (v->dtype == KV_BYTES && kv_dtype_bytes(a->dtype) != 2)
		wrong(w, -EINVAL, "dtype: %d given, packed rows have 16-bit types", a->dtype);
	if (v->head_dim != row)
		wrong(w, -EINVAL, "cache.head_dim: %d given, %d expected of %d + %d", v->head_dim,
		      row, a->latent_dim, a->rope_dim);
	if (v->dtype == KV_BYTES)
		element = 4; /* scales */
	if (v->token_stride % element || v->token_stride < kv_view_row_bytes(v))
		wrong(w, -EINVAL,
		      "cache.token_stride: %lld bytes given, %lld or more in steps of %lld needed",
		      (long long)v->token_stride, (long long)kv_view_row_bytes(v),
		      (long long)element);
	if (v->block_stride % element || v->block_stride < kv_view_row_bytes(v))
		wrong(w, -EINVAL,
		      "cache.block_stride: %lld bytes given, %lld or more in steps of %lld needed",
		      (long long)v->block_stride, (long long)kv_view_row_bytes(v),
		      (long long)element);
	if (kv_dtype_bytes(v->dtype) == 1 && v->dtype != KV_BYTES &&
	    (!isfinite(v->scale) || v->scale <= 0))
		wrong(w, -EINVAL, "cache.scale: %g given, a positive number expected",
		      (double)v->scale);
	if (base)
		check_pointer(w, "cache.base", v->base, (size_t)element);
}

static void check_sparse(struct reasons *w, const struct kv_sparse_mla_args *args, bool sizes_only,
			 struct kv_sparse_mla_args *a)
{
	size_t element = kv_dtype_bytes(args->dtype) ?: 1;

	if (args->size != sizeof(*a)) {
		wrong(w, -EINVAL, "kv_sparse_mla_args.size: %zu given, %zu expected", args->size,
		      sizeof(*a));
		return;
	}
	*a = *args;
	check_device(w, a->device);
	check_dtype(w, a->dtype);
	check_range(w, "n_tokens", a->n_tokens, 0, INT32_MAX);
	check_range(w, "n_heads", a->n_heads, 1, MAX_HEADS);
	check_range(w, "latent_dim", a->latent_dim, 1, MAX_DIM);
	check_range(w, "rope_dim", a->rope_dim, 0, MAX_DIM);
	check_range(w, "top_k", a->top_k, 1, MAX_TOP_K);
	if (!isfinite(a->sm_scale) || a->sm_scale <= 0)
		wrong(w, -EINVAL, "sm_scale: %g given, a positive number expected",
		      (double)a->sm_scale);
	check_stride(w, "q_stride", &a->q_stride,
		     (int64_t)a->n_heads * (a->latent_dim + a->rope_dim));
	check_stride(w, "out_stride", &a->out_stride, (int64_t)a->n_heads * a->latent_dim);
	check_latent(w, a, !sizes_only && a->n_tokens > 0);
	if (sizes_only || !a->n_tokens)
		return;
	check_pointer(w, "q", a->q, element);
	check_pointer(w, "out", a->out, element);
	check_pointer(w, "chosen", a->chosen, sizeof(int32_t));
	if (a->out && a->out == a->q)
		wrong(w, -EINVAL, "out: the same memory as q");
	if (a->workspace)
		check_pointer(w, "workspace", a->workspace, 256);
}

static int tell(const struct reasons *w)
{
	return w->r ? kv_error(w->r, "%s", w->text) : 0;
}

static int tell_to(const struct reasons *w, char *text, size_t text_bytes)
{
	if (text && text_bytes)
		snprintf(text, text_bytes, "%s", w->text);
	return w->r;
}

static int refused(int32_t device)
{
	return kv_error(-ENOTSUP, "device: no backend of %s can do it",
			device == KV_DEVICE_CUDA ? "CUDA" : "the host");
}

#define EACH_BACKEND(b, first, wanted)                                                    \
	for (const struct kv_dsa_backend *const *at_ = kv_dsa_backends, *b; (b = *at_); at_++) \
		if (b->device == (wanted) && (!(first) || (first) == b))

int kv_index_write_on(const struct kv_dsa_backend *backend, const struct kv_index_write_args *args)
{
	struct kv_index_write_args a;
	struct reasons w = {0};

	check_write(&w, args, &a);
	if (w.r)
		return tell(&w);
	if (!a.n_tokens)
		return 0;
	EACH_BACKEND(b, backend, a.device) {
		int r = b->write ? b->write(&a) : -ENOTSUP;

		if (r != -ENOTSUP)
			return r;
	}
	return refused(a.device);
}

int kv_index_choose_on(const struct kv_dsa_backend *backend, const struct kv_index_args *args)
{
	struct kv_index_args a;
	struct reasons w = {0};
	int r = -ENOTSUP;

	check_index(&w, args, false, &a);
	if (w.r)
		return tell(&w);
	if (!a.n_tokens || !a.n_seqs)
		return 0;
	if (!a.query_start_loc)
		a.max_query_len = 1;
	if (!a.scores) {
		a.scores = a.workspace;
		a.scores_stride = scores_width(&a);
	}
	EACH_BACKEND(b, backend, a.device) {
		r = b->score ? b->score(&a) : -ENOTSUP;
		if (r != -ENOTSUP)
			break;
	}
	if (r == -ENOTSUP)
		return refused(a.device);
	if (r < 0 || !a.chosen)
		return r;
	EACH_BACKEND(b, (const struct kv_dsa_backend *)NULL, a.device) { /* backends share it */
		r = b->select ? b->select(&a) : -ENOTSUP;
		if (r != -ENOTSUP)
			return r;
	}
	return refused(a.device);
}

int kv_sparse_mla_on(const struct kv_dsa_backend *backend, const struct kv_sparse_mla_args *args)
{
	struct kv_sparse_mla_args a;
	struct reasons w = {0};

	check_sparse(&w, args, false, &a);
	if (w.r)
		return tell(&w);
	if (!a.n_tokens)
		return 0;
	EACH_BACKEND(b, backend, a.device) {
		int r = b->attend ? b->attend(&a) : -ENOTSUP;

		if (r != -ENOTSUP)
			return r;
	}
	return refused(a.device);
}

KV_PUBLIC int kv_index_write(const struct kv_index_write_args *args)
{
	return kv_index_write_on(NULL, args);
}

KV_PUBLIC int kv_index_choose(const struct kv_index_args *args)
{
	return kv_index_choose_on(NULL, args);
}

KV_PUBLIC int kv_sparse_mla(const struct kv_sparse_mla_args *args)
{
	return kv_sparse_mla_on(NULL, args);
}

KV_PUBLIC int kv_index_workspace_bytes(const struct kv_index_args *args, size_t *ret_bytes)
{
	struct kv_index_args a;
	struct reasons w = {0};

	check_index(&w, args, true, &a);
	if (w.r)
		return tell(&w);
	*ret_bytes = index_workspace(&a);
	return 0;
}

KV_PUBLIC int kv_sparse_mla_workspace_bytes(const struct kv_sparse_mla_args *args,
					    size_t *ret_bytes)
{
	struct kv_sparse_mla_args a;
	struct reasons w = {0};
	size_t most = 0;

	check_sparse(&w, args, true, &a);
	if (w.r)
		return tell(&w);
	EACH_BACKEND(b, (const struct kv_dsa_backend *)NULL, a.device) {
		size_t bytes = b->attend_workspace ? b->attend_workspace(&a) : 0;

		most = bytes > most ? bytes : most;
	}
	*ret_bytes = most;
	return 0;
}

KV_PUBLIC int kv_index_write_validate(const struct kv_index_write_args *args, char *text,
				      size_t text_bytes)
{
	struct kv_index_write_args a;
	struct reasons w = {0};

	check_write(&w, args, &a);
	return tell_to(&w, text, text_bytes);
}

KV_PUBLIC int kv_index_validate(const struct kv_index_args *args, char *text, size_t text_bytes)
{
	struct kv_index_args a;
	struct reasons w = {0};

	check_index(&w, args, false, &a);
	return tell_to(&w, text, text_bytes);
}

KV_PUBLIC int kv_sparse_mla_validate(const struct kv_sparse_mla_args *args, char *text,
				     size_t text_bytes)
{
	struct kv_sparse_mla_args a;
	struct reasons w = {0};

	check_sparse(&w, args, false, &a);
	return tell_to(&w, text, text_bytes);
}
