/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cascade.h"
#include "kernels/merge.h"

#define ALIGN 256

/* What lies at the end of the workspace. */
struct scratch {
	float *out;	  /* [2, T, n_heads_q, v.head_dim] */
	float *lse;	  /* [2, T, n_heads_q] */
	int32_t *offsets; /* [2] query_start_loc of the shared pass, then its seq_lens */
	size_t bytes;
};

static size_t aligned(size_t bytes)
{
	return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static struct scratch lay_out(const struct kv_attention_args *args)
{
	size_t rows = 2 * (size_t)args->n_tokens * (size_t)args->n_heads_q;
	size_t out = aligned(rows * (size_t)args->v.head_dim * sizeof(float));
	size_t lse = aligned(rows * sizeof(float));
	struct scratch s = {.bytes = out + lse + ALIGN};
	char *end = (char *)args->workspace + args->workspace_bytes / ALIGN * ALIGN;

	if (!args->workspace || args->workspace_bytes < s.bytes)
		return s;
	s.out = (float *)(void *)(end - s.bytes);
	s.lse = (float *)(void *)(end - s.bytes + out);
	s.offsets = (int32_t *)(void *)(end - ALIGN);
	return s;
}

size_t kv_cascade_bytes(const struct kv_attention_args *args)
{
	bool dense = args->lse_head_stride == 1 && args->lse_token_stride == args->n_heads_q;

	if (!args->shared_prefix || args->n_seqs < 2 || args->invariant || args->window_left >= 0 ||
	    args->alibi_slopes || args->key_begin || args->key_end || (args->lse && !dense))
		return 0;
	return lay_out(args).bytes;
}

bool kv_cascade_wanted(const struct kv_attention_args *args)
{
	size_t bytes = kv_cascade_bytes(args);

	return bytes && args->workspace && args->workspace_bytes >= bytes + ALIGN;
}

void kv_cascade_passes(const struct kv_attention_args *args, struct kv_attention_args *ret_shared,
		       struct kv_attention_args *ret_own)
{
	struct scratch s = lay_out(args);
	int64_t rows = (int64_t)args->n_tokens * args->n_heads_q;
	struct kv_attention_args pass = *args;

	pass.sinks = NULL;
	pass.lse_with_sink = 0;
	pass.shared_prefix = 0;
	pass.out_dtype = KV_F32;
	pass.out_token_stride = 0;
	pass.lse_token_stride = pass.lse_head_stride = 0;
	pass.workspace_bytes = args->workspace_bytes / ALIGN * ALIGN - s.bytes;
	*ret_shared = *ret_own = pass;

	ret_shared->n_seqs = 1;
	ret_shared->max_query_len = args->n_tokens;
	ret_shared->max_seq_len = args->shared_prefix;
	ret_shared->query_start_loc = s.offsets;
	ret_shared->seq_lens = s.offsets + 2;
	ret_shared->causal = 0;
	ret_shared->window_right = 0;
	ret_shared->seq_causal = NULL;
	ret_shared->window_prefix_lens = NULL;
	ret_shared->doc_ranges = NULL;
	ret_shared->tree_mask = NULL;
	ret_shared->out = s.out;
	ret_shared->lse = s.lse;

	ret_own->key_begin = args->shared_prefix;
	ret_own->out = s.out + rows * args->v.head_dim;
	ret_own->lse = s.lse + rows;
}

static int prepare(const struct kv_attention_args *args, int32_t *offsets)
{
	if (args->device == KV_DEVICE_CUDA)
		return kv_cascade_prepare_cuda(args, offsets);
	offsets[0] = args->query_start_loc[0];
	offsets[1] = args->query_start_loc[args->n_seqs];
	offsets[2] = args->shared_prefix;
	return 0;
}

int kv_cascade(const struct kv_attn_backend *backend, const struct kv_attention_args *args)
{
	struct scratch s = lay_out(args);
	struct kv_attention_args shared, own;
	struct kv_merge_args merge = {
		.size = sizeof(merge),
		.device = args->device,
		.dtype = args->out_dtype,
		.part_dtype = KV_F32,
		.n_parts = 2,
		.n_tokens = args->n_tokens,
		.n_heads = args->n_heads_q,
		.head_dim = args->v.head_dim,
		.parts = s.out,
		.part_lse = s.lse,
		.out = args->out,
		.lse = args->lse,
		.sinks = args->sinks,
		.n_real = args->query_start_loc + args->n_seqs,
		.lse_with_sink = args->lse_with_sink,
		.out_token_stride = args->out_token_stride,
		.stream = args->stream,
	};
	int r;

	kv_cascade_passes(args, &shared, &own);
	r = prepare(args, s.offsets);
	if (r < 0)
		return r;
	r = kv_attention_on(backend, &shared);
	if (r < 0)
		return r;
	r = kv_attention_on(backend, &own);
	return r < 0 ? r : kv_merge(&merge);
}
