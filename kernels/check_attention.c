/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arguments of attention, field by field. Arrays are looked at on the host only: there lengths and
 * tables are checked too, on a GPU kernels stay inside them.
 */
#include <errno.h>
#include <math.h>

#include "include/internal/error.h"
#include "kernels/attention.h"
#include "kernels/check.h"
#include "kernels/mla.h"
#include "kernels/view.h"

/* Bytes of a caller that knows no field after `stream`. */
#define FIRST_PART offsetof(struct kv_attention_args, sinks)

/* Lengths and tables, where they can be read. */
static int check_sequences(const struct kv_attention_args *args)
{
	const int32_t *loc = args->query_start_loc;

	if (loc[0] < 0)
		return kv_error(-EINVAL, "query_start_loc[0]: %d given, at least 0 needed", loc[0]);
	for (int b = 0; b < args->n_seqs; b++) {
		int64_t q_len = (int64_t)loc[b + 1] - loc[b];
		int64_t len = args->seq_lens[b];
		int64_t local = kv_local_len(args->cp_size, args->cp_rank, args->cp_interleave, len);
		int64_t n_blocks = (local + args->k.block_tokens - 1) / args->k.block_tokens;
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
		if (args->seq_causal && args->seq_causal[b] > 1)
			return kv_error(-EINVAL, "seq_causal[%d]: %d given, 0 or 1 allowed", b,
					args->seq_causal[b]);
		first = kv_span_seen(len - q_len, len, args->causal, args->window_left).lo;
		first = kv_local_len(args->cp_size, args->cp_rank, args->cp_interleave, first);
		if (args->window_prefix_lens || args->doc_ranges)
			first = 0;
		for (int64_t i = first / args->k.block_tokens; i < n_blocks; i++)
			if (table[i] < 0)
				return kv_error(-EINVAL,
						"block_table[%d][%lld]: %d given, a block id (0 or "
						"more) needed for a sequence of %lld tokens",
						b, (long long)i, table[i], (long long)len);
	}
	return 0;
}

/* A number that is 0 or 1. */
static int check_flags(const struct kv_attention_args *a)
{
	const struct {
		const char *name;
		int32_t value;
	} flags[] = {
		{"causal", a->causal},		     {"invariant", a->invariant},
		{"doc_clamped", a->doc_clamped},     {"quantize", a->quantize},
		{"lse_with_sink", a->lse_with_sink},
	};

	for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++) {
		int r = kv_check_range(flags[i].name, flags[i].value, 0, 1);

		if (r < 0)
			return r;
	}
	return 0;
}

static int check_ranks(const struct kv_attention_args *a)
{
	int r;

	r = kv_check_range("cp_size", a->cp_size, 0, 65536);
	if (r < 0)
		return r;
	r = kv_check_range("cp_rank", a->cp_rank, 0, a->cp_size > 1 ? a->cp_size - 1 : 0);
	if (r < 0)
		return r;
	return kv_check_range("cp_interleave", a->cp_interleave, 0, KV_MAX_BLOCK_TOKENS);
}

static int check_stride(const char *name, int64_t given, int64_t dense)
{
	if (!given || given >= dense)
		return 0;
	return kv_error(-EINVAL, "%s: %lld elements given, 0 (dense) or at least %lld allowed", name,
			(long long)given, (long long)dense);
}

/* The fields after `stream`. */
static int check_second_part(const struct kv_attention_args *a)
{
	int r;

	r = kv_check_scales(&a->k, &a->v, a->k_scales, a->v_scales, &a->k_row_scales,
			    &a->v_row_scales);
	if (r < 0)
		return r;
	r = check_ranks(a);
	if (r < 0)
		return r;
	r = kv_check_range("window_right", a->window_right, 0, INT32_MAX);
	if (r < 0)
		return r;
	r = kv_check_range("key_begin", a->key_begin, 0, INT32_MAX);
	if (r < 0)
		return r;
	r = kv_check_range("key_end", a->key_end, 0, INT32_MAX);
	if (r < 0)
		return r;
	r = kv_check_range("shared_prefix", a->shared_prefix, 0, INT32_MAX);
	if (r < 0)
		return r;
	if (a->shared_prefix % a->k.block_tokens)
		return kv_error(-EINVAL, "shared_prefix: %d given, a multiple of %d (k.block_tokens) "
				"expected", a->shared_prefix, a->k.block_tokens);
	if (a->tree_mask && (int64_t)a->tree_words * 32 < a->max_query_len)
		return kv_error(-EINVAL, "tree_words: %d given, too few for max_query_len (%d) bits",
				a->tree_words, a->max_query_len);
	if (a->lse_with_sink && !a->sinks)
		return kv_error(-EINVAL, "lse_with_sink: 1 given, and no sinks");
	if (!a->lse_token_stride != !a->lse_head_stride || a->lse_token_stride < 0 ||
	    a->lse_head_stride < 0)
		return kv_error(-EINVAL, "lse_token_stride, lse_head_stride: %lld, %lld given, both 0 "
				"(dense) or both above 0 expected", (long long)a->lse_token_stride,
				(long long)a->lse_head_stride);
	r = a->out_dtype ? kv_check_dtype(a->out_dtype) : 0;
	if (r < 0)
		return r;
	r = check_stride("q_token_stride", a->q_token_stride,
			 (int64_t)a->n_heads_q * kv_attention_dim(a));
	if (r < 0)
		return r;
	return check_stride("out_token_stride", a->out_token_stride,
			    (int64_t)a->n_heads_q * a->v.head_dim);
}

/* What stands for 0 in the fields that have a default. */
static void fill_in(struct kv_attention_args *a)
{
	if (a->sm_scale == 0)
		a->sm_scale = 1 / sqrtf((float)a->k.head_dim);
	if (a->cp_size < 1)
		a->cp_size = 1;
	if (a->cp_interleave < 1)
		a->cp_interleave = 1;
	if (!a->out_dtype)
		a->out_dtype = a->dtype;
	if (!a->q_token_stride)
		a->q_token_stride = (int64_t)a->n_heads_q * kv_attention_dim(a);
	if (!a->out_token_stride)
		a->out_token_stride = (int64_t)a->n_heads_q * a->v.head_dim;
	if (!a->lse_token_stride) {
		a->lse_token_stride = a->n_heads_q;
		a->lse_head_stride = 1;
	}
}

/* Blocks that are only read may overlap: @view as if they did not, for the check of its strides. */
static struct kv_view apart(const struct kv_view *view)
{
	int64_t row = kv_view_row_bytes(view);
	struct kv_view v = *view;

	if (row > 0 && view->token_stride > 0 && view->block_tokens > 1 && view->block_tokens <= 65536 &&
	    view->token_stride < INT64_MAX / 65536 && view->block_stride >= view->token_stride &&
	    view->block_stride % view->token_stride == 0)
		v.block_stride = INT64_MAX / 2 / row * row;
	return v;
}

static int check_attention_sizes(const struct kv_attention_args *a)
{
	struct kv_view k = apart(&a->k), v = apart(&a->v);
	int r;

	r = kv_check_range("n_seqs", a->n_seqs, 0, INT32_MAX - 1);
	if (r < 0)
		return r;
	r = kv_check_range("n_tokens", a->n_tokens, 0, INT32_MAX);
	if (r < 0)
		return r;
	r = kv_check_range("max_query_len", a->max_query_len, 0, INT32_MAX);
	if (r < 0)
		return r;
	r = kv_check_range("max_seq_len", a->max_seq_len, 0, INT32_MAX);
	if (r < 0)
		return r;
	r = kv_check_range("table_width", a->table_width, 0, INT32_MAX);
	if (r < 0)
		return r;
	r = check_flags(a);
	if (r < 0)
		return r;
	r = kv_check_range("window_left", a->window_left, -1, INT32_MAX);
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
	r = a->latent_dim ? kv_mla_check_view(&a->k, a->latent_dim, a->rope_dim)
			  : kv_check_views(&k, &v);
	if (r < 0)
		return r;
	if (a->k.dtype == KV_BYTES && (a->k_scales || a->k_row_scales.base))
		return kv_error(-EINVAL, "k_scales, k_row_scales: given, packed rows have their own");
	if (a->latent_dim && a->sm_scale == 0)
		return kv_error(-EINVAL, "sm_scale: 0 given; of latent attention it isn't known from the "
					 "sizes: 1 / sqrt(nope + rope) of the model");
	if (a->n_heads_q < 1 || a->n_heads_q > KV_MAX_HEADS || a->n_heads_q % a->k.n_heads)
		return kv_error(-EINVAL,
				"n_heads_q: %d given, a multiple of k.n_heads (%d) up to %d "
				"expected",
				a->n_heads_q, a->k.n_heads, KV_MAX_HEADS);
	return check_second_part(a);
}

static int check_attention_pointers(const struct kv_attention_args *a)
{
	const struct {
		const char *name;
		const void *p;
		size_t align;
	} optional[] = {
		{"lse", a->lse, 4},
		{"sinks", a->sinks, 4},
		{"alibi_slopes", a->alibi_slopes, 4},
		{"k_scales", a->k_scales, 4},
		{"v_scales", a->v_scales, 4},
		{"window_prefix_lens", a->window_prefix_lens, 4},
		{"doc_ranges", a->doc_ranges, 4},
		{"tree_mask", a->tree_mask, 4},
	};
	size_t element = kv_dtype_bytes(a->dtype);
	int r;

	r = kv_check_pointer("q", a->q, element);
	if (r < 0)
		return r;
	r = kv_check_pointer("out", a->out, kv_dtype_bytes(a->out_dtype));
	if (r < 0)
		return r;
	if (a->out == a->q)
		return kv_error(-EINVAL, "out: the same memory as q");
	for (size_t i = 0; i < sizeof(optional) / sizeof(optional[0]); i++) {
		r = optional[i].p ? kv_check_pointer(optional[i].name, optional[i].p,
						     optional[i].align)
				  : 0;
		if (r < 0)
			return r;
	}
	r = kv_check_pointer("query_start_loc", a->query_start_loc, sizeof(*a->query_start_loc));
	if (r < 0)
		return r;
	r = kv_check_pointer("seq_lens", a->seq_lens, sizeof(*a->seq_lens));
	if (r < 0)
		return r;
	if (a->workspace_bytes) {
		r = kv_check_pointer("workspace", a->workspace, KV_WORKSPACE_ALIGN);
		if (r < 0)
			return r;
	}
	if (!a->table_width)
		return 0;
	return kv_check_pointer("block_table", a->block_table, sizeof(*a->block_table));
}

/* V is a part of K's rows. */
static void resolve_latent(struct kv_attention_args *a)
{
	if (kv_mla_is_packed(&a->k))
		a->k.scale = 1;
	a->v = a->k;
	a->v.head_dim = a->latent_dim;
	a->v_scales = a->k_scales;
	a->v_row_scales = a->k_row_scales;
}

int kv_attention_resolve_sizes(const struct kv_attention_args *args, struct kv_attention_args *ret)
{
	struct kv_attention_args a;
	int r;

	if (args->size < FIRST_PART || args->size > sizeof(a))
		return kv_error(-EINVAL, "kv_attention_args.size: %zu given, %zu..%zu expected",
				args->size, FIRST_PART, sizeof(a));
	memset(&a, 0, sizeof(a));
	memcpy(&a, args, args->size);
	a.size = sizeof(a);
	r = kv_check_range("latent_dim", a.latent_dim, 0, 65536);
	if (r < 0)
		return r;
	if (a.latent_dim)
		resolve_latent(&a);
	r = kv_check_device(a.device);
	if (r < 0)
		return r;
	r = kv_check_dtype(a.dtype);
	if (r < 0)
		return r;
	r = check_attention_sizes(&a);
	if (r < 0)
		return r;
	fill_in(&a);
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

