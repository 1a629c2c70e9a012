/* SPDX-License-Identifier: Apache-2.0 */
/* Batch metadata: arguments, the host's build, and blocks of two sizes. */
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "include/internal/error.h"
#include "include/internal/public.h"
#include "kernels/check.h"
#include "kernels/metadata.h"

static int check(const struct kv_metadata_args *a)
{
	const struct {
		const char *name;
		int64_t given, min, max;
	} ranges[] = {
		{"n_seqs", a->n_seqs, 0, INT32_MAX - 1},
		{"n_tokens", a->n_tokens, 0, INT32_MAX},
		{"table_width", a->table_width, 0, INT32_MAX},
		{"block_tokens", a->block_tokens, 1, KV_MAX_BLOCK_TOKENS},
		{"null_block", a->null_block, -1, INT32_MAX},
		{"cp_size", a->cp_size, 0, 65536},
		{"cp_rank", a->cp_rank, 0, a->cp_size > 1 ? a->cp_size - 1 : 0},
		{"cp_interleave", a->cp_interleave, 0, KV_MAX_BLOCK_TOKENS},
		{"advance", a->advance, 0, 1},
	};
	int r;

	for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
		r = kv_check_range(ranges[i].name, ranges[i].given, ranges[i].min, ranges[i].max);
		if (r < 0)
			return r;
	}
	if (!a->n_seqs)
		return 0;
	r = kv_check_pointer("n_query", a->n_query, 4);
	if (r < 0)
		return r;
	r = kv_check_pointer("n_computed", a->n_computed, 4);
	if (r < 0 || !a->slots || !a->table_width)
		return r;
	return kv_check_pointer("block_table", a->block_table, 4);
}

/* What the device's build has no way to report. */
static int check_lengths(const struct kv_metadata_args *a)
{
	int64_t total = 0;

	for (int b = 0; b < a->n_seqs; b++) {
		int64_t rejected = a->advance && a->n_rejected ? a->n_rejected[b] : 0;
		int64_t n = a->advance ? a->n_query[b] != 0 : a->n_query[b];

		if (a->n_query[b] < 0 || a->n_computed[b] < 0 || rejected < 0 ||
		    rejected > a->n_query[b] ||
		    (int64_t)a->n_computed[b] + a->n_query[b] + n > INT32_MAX)
			return kv_error(-EINVAL, "n_query[%d], n_computed[%d]: %d, %d given (%lld "
					"rejected), 0 or more and at most 2^31 in all allowed", b, b,
					a->n_query[b], a->n_computed[b], (long long)rejected);
		total += n;
	}
	if (total > a->n_tokens)
		return kv_error(-E2BIG, "n_tokens: room for %d given, the sequences have %lld",
				a->n_tokens, (long long)total);
	return 0;
}

int kv_metadata_host(const struct kv_metadata_args *a)
{
	int32_t t = 0, longest[2] = {0, 0};
	int r = check_lengths(a);

	if (r < 0)
		return r;
	if (a->query_start_loc)
		a->query_start_loc[0] = 0;
	for (int b = 0; b < a->n_seqs; b++) {
		int32_t n;

		if (a->advance)
			kv_metadata_advance(a, b);
		n = a->n_query[b];
		kv_metadata_sequence(a, b);
		for (int i = 0; i < n; i++)
			kv_metadata_token(a, t++, b, i);
		if (a->query_start_loc)
			a->query_start_loc[b + 1] = t;
		longest[0] = n > longest[0] ? n : longest[0];
		if (n && a->n_computed[b] + n > longest[1])
			longest[1] = a->n_computed[b] + n;
	}
	for (; t < a->n_tokens; t++)
		kv_metadata_pad(a, t);
	if (a->max_lens) {
		a->max_lens[0] = longest[0];
		a->max_lens[1] = longest[1];
	}
	return 0;
}

KV_PUBLIC int kv_metadata_build(const struct kv_metadata_args *args)
{
	struct kv_metadata_args a = {0};
	size_t given = args->size;
	int r;

	if (given != offsetof(struct kv_metadata_args, cp_empty)) {
		r = kv_check_size("kv_metadata_args", given, sizeof(*args));
		if (r < 0)
			return r;
	}
	memcpy(&a, args, given);
	r = kv_check_device(a.device);
	if (r < 0)
		return r;
	r = check(&a);
	if (r < 0)
		return r;
	if (!a.cp_size)
		a.cp_size = 1;
	if (!a.cp_interleave)
		a.cp_interleave = 1;
	return a.device == KV_DEVICE_CUDA ? kv_metadata_cuda(&a) : kv_metadata_host(&a);
}

KV_PUBLIC int32_t kv_cp_local_len(int32_t size, int32_t rank, int32_t interleave, int32_t len)
{
	return (int32_t)kv_local_len(size, rank, interleave > 0 ? interleave : 1, len);
}

KV_PUBLIC int32_t kv_cp_local_bound(int32_t size, int32_t interleave, int32_t max_len)
{
	int64_t round = (int64_t)size * interleave;

	return (int32_t)((max_len + round - 1) / round * interleave);
}

KV_PUBLIC int kv_table_block_size(int32_t pool_tokens, const int32_t *sizes, int n_sizes)
{
	char text[128];
	size_t n = 0;
	int best = 0;

	text[0] = 0;
	for (int i = 0; i < n_sizes; i++) {
		if (sizes[i] > best && pool_tokens % sizes[i] == 0)
			best = sizes[i];
		if (n < sizeof(text))
			n += (size_t)snprintf(text + n, sizeof(text) - n, "%s%d", i ? ", " : "",
					      sizes[i]);
	}
	if (best)
		return best;
	return kv_error(-ENOTSUP, "block_tokens: the pool has %d, and none of the kernel's sizes (%s) "
			"divides it", pool_tokens, text);
}

KV_PUBLIC void kv_table_expand(const kv_block_id *ids, int n, int32_t ratio, kv_block_id *ret)
{
	for (int i = 0; i < n; i++)
		for (int k = 0; k < ratio; k++)
			ret[i * ratio + k] = ids[i] * ratio + k;
}

KV_PUBLIC int kv_view_split(const struct kv_view *view, int32_t kernel_tokens, struct kv_view *ret)
{
	if (kernel_tokens < 1 || view->block_tokens % kernel_tokens)
		return kv_error(-EINVAL, "kernel_tokens: %d given, it does not divide a block of %d",
				kernel_tokens, view->block_tokens);
	if (kernel_tokens != view->block_tokens &&
	    view->block_stride != view->token_stride * view->block_tokens)
		return kv_error(-ENOTSUP, "view: blocks lie %lld bytes apart and their %d tokens %lld: "
				"blocks of %d would not lie at a constant stride",
				(long long)view->block_stride, view->block_tokens,
				(long long)view->token_stride, kernel_tokens);
	*ret = *view;
	ret->block_tokens = kernel_tokens;
	ret->block_stride = view->block_stride / (view->block_tokens / kernel_tokens);
	return 0;
}
