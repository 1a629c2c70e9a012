/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention backends: what each can do, why it can't run a problem, which one will.
 *
 * A backend states its sizes, types and features in a table, struct kv_attention_caps. A problem is
 * held against the table field by field, and against what only the backend knows (alignment, memory
 * of the device); every reason is collected, none ends the search. A reason is a bit, and a sentence
 * that names the field, what was given and what would do.
 *
 * Bits have one meaning in three places: in caps.features, "can"; in query.features, "needs"; in
 * what kv_attention_validate() returns, "refused because of".
 *
 * Threads: every function may be called from any thread at any time.
 */
#ifndef KVCACHED_BACKEND_H
#define KVCACHED_BACKEND_H

#include <kvcached/attention.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bit numbers, in the order in which reasons are listed. KV_ATTN_BIT(SINKS) is the mask. */
enum kv_attention_reason {
	KV_ATTN_HEAD_DIM,	/* of K or V */
	KV_ATTN_DTYPE,		/* of q and out */
	KV_ATTN_KV_DTYPE,	/* of the cache */
	KV_ATTN_BLOCK_TOKENS,
	KV_ATTN_BIDIRECTIONAL,	/* doc_ranges */
	KV_ATTN_MLA,		/* latent attention wanted, of a backend for K and V */
	KV_ATTN_NON_MLA,	/* the reverse; can, with MLA: does both */
	KV_ATTN_SINKS,
	KV_ATTN_SPARSE,		/* chosen keys wanted, of a backend that reads all */
	KV_ATTN_NON_SPARSE,	/* the reverse; can, with SPARSE: does both */
	KV_ATTN_HEAD_SCALES,	/* k_scales, v_scales */
	KV_ATTN_CAPABILITY,	/* compute capability of the device */
	KV_ATTN_KIND,		/* decoder, encoder, cross */
	KV_ATTN_WINDOW,		/* window_left */
	KV_ATTN_NON_CAUSAL,	/* causal 0 */
	KV_ATTN_NON_CAUSAL_CP,	/* MLA, not causal, and context parallel */
	KV_ATTN_INVARIANT,
	KV_ATTN_CONNECTOR,	/* blocks that come from elsewhere while layers run */
	KV_ATTN_PREFILL_CP,	/* queries spread over ranks */
	KV_ATTN_DEVICE_LENGTHS, /* lengths that only the device knows */
	KV_ATTN_SOFTCAP,
	KV_ATTN_ALIBI,
	KV_ATTN_TREE,		/* tree_mask */
	KV_ATTN_SEQ_CAUSAL,
	KV_ATTN_WINDOW_PREFIX,	/* window_prefix_lens */
	KV_ATTN_WINDOW_RIGHT,
	KV_ATTN_ROW_SCALES,	/* k_row_scales, v_row_scales */
	KV_ATTN_DECODE_CP,	/* cp_size > 1 */
	KV_ATTN_KEY_RANGE,	/* key_begin, key_end */
	KV_ATTN_SHARED_PREFIX,	/* in the kernel itself; without it, two passes and a merge do it */
	KV_ATTN_LSE,
	KV_ATTN_LSE_WITH_SINK,
	KV_ATTN_STRIDES,	/* q_token_stride, out_token_stride, lse strides */
	KV_ATTN_OUT_DTYPE,	/* out_dtype other than dtype */
	KV_ATTN_LAYOUT,		/* strides of the views */
	KV_ATTN_QUANTIZE,	/* can: uses the permission; never a reason */
	KV_ATTN_QUERY_ROWS,	/* max_query_len times query heads of a KV head */
	KV_ATTN_ALIGNMENT,	/* of pointers and strides */
	KV_ATTN_WORKSPACE,
	KV_ATTN_SIZE,		/* too large for one launch */
	KV_ATTN_DEVICE,		/* what the device has */
	KV_ATTN_COMBINATION,	/* fields that are each allowed, and not together */
	KV_ATTN_REASONS,
};

#define KV_ATTN_BIT(reason) (UINT64_C(1) << KV_ATTN_##reason)

enum kv_attention_kind {
	KV_KIND_DECODER = 0,
	KV_KIND_ENCODER = 1,	  /* an encoder of an encoder-decoder: no cache of its own */
	KV_KIND_ENCODER_ONLY = 2,
	KV_KIND_CROSS = 3,
};

/* Strides inside a block: bits of caps.layouts, one of them in query.layout. */
#define KV_ATTN_NHD	1u /* [token][head][element], heads without a gap */
#define KV_ATTN_HND	2u /* [head][token][element], tokens without a gap */
#define KV_ATTN_STRIDED 4u /* any other */

/* What may be captured in a graph. */
enum kv_graph_support {
	KV_GRAPH_NEVER = 0,
	KV_GRAPH_SINGLE_TOKEN = 1, /* decode with one query a sequence */
	KV_GRAPH_UNIFORM = 2,	   /* decode with equally many queries a sequence */
	KV_GRAPH_ALWAYS = 3,
};

#define KV_ATTN_SIZES 8

struct kv_attention_caps {
	size_t size;
	uint64_t features;  /* bits of enum kv_attention_reason */
	uint32_t dtypes;    /* bits 1 << enum kv_dtype, of q and out */
	uint32_t kv_dtypes; /* the same, of the cache; bit 0: q's own; 0: any */
	uint32_t layouts;   /* KV_ATTN_NHD, ...; 0: any */
	uint32_t kinds;	    /* bits 1 << enum kv_attention_kind */
	int32_t head_dims[KV_ATTN_SIZES]; /* up to the first 0; none: any, within the next fields */
	int32_t head_dim_max;		  /* 0: any */
	int32_t head_dim_multiple;	  /* 0: 1 */
	int32_t block_tokens[KV_ATTN_SIZES]; /* multiples of any of these, up to the first 0; none: any */
	int32_t capability_min; /* 10 * major + minor; 0: any, or the host */
	int32_t capability_max;
	int32_t max_query_rows; /* queries of a sequence times query heads of a KV head; 0: any. Of
				 * invariant problems, if it does them, any number */
	int32_t lse_base;	/* 0: natural log; 2 */
	int32_t graph;		/* enum kv_graph_support */
	int32_t same_head_dims; /* 1: K's and V's must be equal */
	int32_t same_kv_dtypes; /* 1: K's and V's types must be equal */
};

/* A problem by its sizes, before there is memory; 0: not asked. */
struct kv_attention_query {
	size_t size;
	uint64_t features; /* bits of enum kv_attention_reason that it needs */
	int32_t dtype;
	int32_t k_dtype;
	int32_t v_dtype;
	int32_t head_dim_k;
	int32_t head_dim_v;
	int32_t block_tokens;
	uint32_t layout;
	int32_t kind;
	int32_t capability;
	int32_t max_query_rows;
};

/**
 * kv_attention_compare() - a problem against a table
 * @text: receives a sentence for each reason, joined by "; ", cut to @text_bytes; or NULL
 *
 * Return: bits of all reasons; 0: it can.
 */
uint64_t kv_attention_compare(const struct kv_attention_caps *caps,
			      const struct kv_attention_query *query, char *text, size_t text_bytes);

/* kv_attention_query_of() - the query that @args amount to. Return: 0; -EINVAL. */
int kv_attention_query_of(const struct kv_attention_args *args, struct kv_attention_query *ret);

/* kv_attention_caps() - the table of @backend. Return: 0; -ENOENT: the build has no such backend. */
int kv_attention_caps(enum kv_device device, const char *backend, struct kv_attention_caps *ret);

/**
 * kv_attention_validate() - whether @backend can run @args, and every reason why not
 * @backend: one of kv_backend_names() for args->device
 *
 * Looks at no pointer but the views', and at whether optional ones are NULL. Return: 0: it can;
 * -ENOTSUP: @ret_reasons (if not NULL) and @text have all reasons; -EINVAL: a field is out of range;
 * -ENOENT: no such backend.
 */
int kv_attention_validate(const char *backend, const struct kv_attention_args *args,
			  uint64_t *ret_reasons, char *text, size_t text_bytes);

/**
 * kv_attention_select() - the backend that kv_attention() takes for @args
 * @ret_name: a static string
 *
 * Return: 0; -ENOTSUP: none can, kv_error_text() has each one's reasons; -EINVAL.
 */
int kv_attention_select(const struct kv_attention_args *args, const char **ret_name);

/**
 * kv_attention_block_size() - the block size nearest to one's wish
 *
 * Return: @wanted, if the table allows it; else the smallest size that it lists.
 */
int32_t kv_attention_block_size(const struct kv_attention_caps *caps, int32_t wanted);

/* kv_attention_reason_name() - "sinks"; NULL past the last */
const char *kv_attention_reason_name(int reason);

#ifdef __cplusplus
}
#endif
#endif
