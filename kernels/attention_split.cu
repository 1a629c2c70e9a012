/* SPDX-License-Identifier: Apache-2.0 */
/* The split backend on the host: what it can run, and with which kernel. attention_split.cuh. */
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "kernels/attention_split.h"
#include "kernels/device/launch.cuh"
#include "kernels/view.h"

#define MAX_SHARED	 (228 * 1024)
#define RUN		 16	    /* tokens that must lie in one block */
#define MIN_TILES	 8	    /* of a part, over the sets of a thread block */
#define RUN_BYTES	 256	    /* of a token, read side by side */
#define MOST_NEAR	 16	    /* thread blocks of a cluster */
#define NEAR_TOKENS	 256	    /* of a thread block of a larger cluster, at most */
#define MOST_ROWS	 32	    /* of heads of other sizes than 64 and 128 */
#define MOST_ROWS_WIDE	 16	    /* of heads above 128, where a chunk has 8 */
#define LITTLE		 (64 << 20) /* bytes of K in all */
#define LITTLE_64	 (16 << 20) /* the same for rows of 64 bytes */
#define MAX_TOKEN_STRIDE (1 << 26)  /* times 16 it is an int */

/* To measure with, KVCACHED_SPLIT=HEADS,SETS,MIN_TILES,PARTS,NEAR; 0: as chosen below. */
struct tuning {
	int heads;
	int sets;
	int min_tiles;
	int n_parts;
	int near; /* thread blocks of a cluster; 1: none */
};

static struct tuning read_tuning(void)
{
	const char *text = getenv("KVCACHED_SPLIT");
	struct tuning t = {};

	if (text)
		sscanf(text, "%d,%d,%d,%d,%d", &t.heads, &t.sets, &t.min_tiles, &t.n_parts, &t.near);
	return t;
}

static const struct tuning &tuning(void)
{
	static const struct tuning t = read_tuning();

	return t;
}

/* How a call is cut; from sizes alone, so that it is the same for each step of a captured graph. */
struct split {
	struct kv_split_choice choice; /* n_parts: no more than run at a time */
	int n_chunks;		       /* of choice.n_row_tiles * 8 rows */
	int sets;     /* of choice.n_heads heads, side by side in a thread block */
	int n_blocks; /* thread blocks of a multiprocessor */
	int near;     /* thread blocks of a cluster */
	int most_parts;
};

static int attribute(cudaDeviceAttr which, int *ret)
{
	int device;
	cudaError_t e = cudaGetDevice(&device);

	if (e == cudaSuccess)
		e = cudaDeviceGetAttribute(ret, which, device);
	if (e == cudaSuccess)
		return 0;
	cudaGetLastError();
	return kv_error(-EIO, "attention: CUDA: %s (%s)", cudaGetErrorName(e),
			cudaGetErrorString(e));
}

/*
 * Little to read: then more and smaller parts count for more than the order of reading, and a warp
 * has one head. Goes by the bounds that the caller gives, not by lengths.
 */
static bool reads_little(const struct kv_attention_args *args)
{
	int64_t bytes = (int64_t)args->n_seqs * args->max_seq_len * args->k.n_heads *
			kv_view_row_bytes(&args->k);

	return bytes <= (kv_view_row_bytes(&args->k) > 64 ? LITTLE : LITTLE_64);
}

static int kind_of(const struct kv_attention_args *args)
{
	bool usual = args->k.head_dim == 64 || args->k.head_dim == 128;

	if (usual && !args->seq_causal && !args->window_prefix_lens && !args->doc_ranges &&
	    !args->tree_mask && !args->alibi_slopes && args->window_right <= 0 &&
	    args->key_begin <= 0 && !args->key_end && args->cp_size <= 1 && !args->k_row_scales.base)
		return KV_SPLIT_PLAIN;
	return KV_SPLIT_ANY;
}

/* Rows of a chunk, in eights: what registers hold of q and of sums. */
static int row_tiles(const struct kv_attention_args *args, int64_t rows)
{
	int dim = args->k.head_dim;
	int most = dim > 128 ? 1 : dim == 64 || dim == 128 ? 4 : 2;

	return rows <= 8 || most == 1 ? 1 : rows <= 16 || most == 2 ? 2 : 4;
}

/* Heads that a warp takes at a time: those in RUN_BYTES of a token, where there is such a kernel.
 */
static int wide_heads(const struct kv_attention_args *args, int n_row_tiles)
{
	int64_t row_bytes = kv_view_row_bytes(&args->k);
	int wide = (int)(RUN_BYTES / row_bytes);

	if (kind_of(args) == KV_SPLIT_ANY)
		return 1;
	if (n_row_tiles == 2 && args->k.head_dim == 64)
		wide = 2;
	else if (n_row_tiles > 1)
		return 1;
	/* Of two heads apart in memory each is a run of 1 KiB or more by itself. */
	if (args->k.head_stride != row_bytes && args->k.head_dim == 64)
		return 1;
	if (n_row_tiles == 1 && reads_little(args))
		return 1;
	return args->k.n_heads % wide ? 1 : wide;
}

/*
 * Thread blocks of a cluster that share an entry of the list; 1: none do. Only where there is little
 * to read: clusters do not find room on all multiprocessors at a time, and are no way to even out
 * lengths.
 */
static int near_blocks(const struct kv_attention_args *args, const struct split *split, int n_sms)
{
	int64_t entries = (int64_t)args->n_seqs * args->k.n_heads * split->n_chunks;

	if (kind_of(args) != KV_SPLIT_PLAIN || split->choice.n_row_tiles > 2)
		return 1;
	if (tuning().near)
		return tuning().near;
	for (int near = MOST_NEAR; near >= 4; near /= 2)
		if (entries * near <= n_sms / 2 && args->max_seq_len <= near * NEAR_TOKENS)
			return near;
	return 1;
}

/* An invariant call: one cluster for each chunk of rows there can be. */
static void split_fixed(const struct kv_attention_args *args, int64_t rows, struct split *ret)
{
	int tiles = rows > KV_SPLIT_ROWS ? 2 : 1;
	int64_t all_rows = (int64_t)args->n_tokens * (args->n_heads_q / args->k.n_heads);
	int64_t entries = (all_rows / (tiles * KV_SPLIT_ROWS) + args->n_seqs) * args->k.n_heads;

	ret->near = KV_SPLIT_FIXED;
	ret->n_chunks = (int)((rows + tiles * KV_SPLIT_ROWS - 1) / (tiles * KV_SPLIT_ROWS));
	ret->choice.kind = KV_SPLIT_NEAR;
	ret->choice.n_row_tiles = tiles;
	ret->choice.n_heads = 1;
	ret->choice.n_parts = entries < INT_MAX / KV_SPLIT_FIXED ? (int)entries * KV_SPLIT_FIXED : 0;
}

static int split_init(const struct kv_attention_args *args, struct split *ret)
{
	int64_t rows = (int64_t)args->max_query_len * (args->n_heads_q / args->k.n_heads);
	int64_t row_bytes = kv_view_row_bytes(&args->k);
	struct kv_split_choice *choice = &ret->choice;
	int64_t entries;
	int n_sms, r;

	r = attribute(cudaDevAttrMultiProcessorCount, &n_sms);
	if (r < 0)
		return r;
	ret->most_parts = 2 * n_sms;
	choice->head_dim = args->k.head_dim;
	choice->n_row_tiles = row_tiles(args, rows);
	ret->n_chunks = (int)((rows + choice->n_row_tiles * 8 - 1) / (choice->n_row_tiles * 8));
	ret->sets = 1;
	ret->n_blocks = 1;
	if (args->invariant) {
		split_fixed(args, rows, ret);
		return 0;
	}
	ret->near = near_blocks(args, ret, n_sms);
	choice->kind = ret->near > 1 ? KV_SPLIT_NEAR : kind_of(args);
	choice->n_heads = 1;
	choice->n_parts = n_sms;
	if (ret->near > 1) {
		entries = (int64_t)args->n_seqs * args->k.n_heads * ret->n_chunks;
		choice->n_parts = ret->near > 2 ? (int)entries * ret->near : n_sms / 2 * 2;
		return 0;
	}
	if (tuning().heads != 1)
		choice->n_heads = wide_heads(args, choice->n_row_tiles);
	/* Sets that follow one another in memory are read together. */
	while (!reads_little(args) && args->k.head_stride == row_bytes &&
	       2 * ret->sets * choice->n_heads * row_bytes <= RUN_BYTES &&
	       args->k.n_heads % (ret->sets * 2 * choice->n_heads) == 0)
		ret->sets *= 2;
	if (tuning().sets && args->k.n_heads % (tuning().sets * choice->n_heads) == 0)
		ret->sets = tuning().sets;
	/* Not a second thread block on a multiprocessor where it could never have work. */
	entries = (int64_t)args->n_seqs * (args->k.n_heads / (ret->sets * choice->n_heads)) *
		  ret->n_chunks;
	if (entries * KV_SPLIT_MERGE > n_sms)
		ret->n_blocks = kv_split_blocks(choice->kind, args->k.head_dim,
						(int)row_bytes * choice->n_heads,
						choice->n_row_tiles * choice->n_heads);
	choice->n_parts *= ret->n_blocks;
	if (tuning().n_parts)
		choice->n_parts = tuning().n_parts;
	return 0;
}

static size_t counter_bytes(const struct split *split)
{
	return ((size_t)split->most_parts * KV_SPLIT_COUNTERS * sizeof(uint32_t) + 255) / 256 * 256;
}

/* Of any split of these sizes, so that it goes by no length: two parts a multiprocessor. */
static size_t workspace_bytes(const struct kv_attention_args *args, const struct split *split)
{
	size_t n_parts = (size_t)split->most_parts;
	size_t heads = RUN_BYTES / (size_t)kv_view_row_bytes(&args->k);
	size_t rows = (heads ?: 1) * (size_t)split->choice.n_row_tiles * KV_SPLIT_ROWS;

	return counter_bytes(split) +
	       n_parts * 2 * rows * ((size_t)args->v.head_dim + 4) * sizeof(float);
}

extern "C" size_t kv_attention_split_workspace(const struct kv_attention_args *args)
{
	struct split split;

	return split_init(args, &split) < 0 ? 0 : workspace_bytes(args, &split);
}

/* Rows of @view start and go on in whole 16 bytes. */
static bool is_wide(const struct kv_view *view)
{
	uint64_t bits = (uint64_t)(uintptr_t)view->base | (uint64_t)view->block_stride |
			(uint64_t)view->token_stride | (uint64_t)view->head_stride;

	return bits % 16 == 0;
}

static void refuse_views(const struct kv_attention_args *args, struct kv_refusals *refusals)
{
	const struct kv_view *k = &args->k, *v = &args->v;

	if (!is_wide(k) || !is_wide(v) || k->token_stride > MAX_TOKEN_STRIDE ||
	    v->token_stride > MAX_TOKEN_STRIDE)
		kv_refuse(refusals, KV_ATTN_ALIGNMENT,
			  "k, v: 16 bytes are read at a time: base and strides must be multiples of "
			  "it, token_stride at most %d",
			  MAX_TOKEN_STRIDE);
	if (((uintptr_t)args->q | (uintptr_t)args->out) % 16 ||
	    (args->q_token_stride | args->out_token_stride) % 8)
		kv_refuse(refusals, KV_ATTN_ALIGNMENT,
			  "q, out: tokens must start at multiples of 16 bytes");
}

/* Heads of other sizes than 64 and 128: only few rows, and e4m3 only in whole 32 bytes. */
static void refuse_rows(const struct kv_attention_args *args, struct kv_refusals *refusals)
{
	int64_t rows = (int64_t)args->max_query_len * (args->n_heads_q / args->k.n_heads);
	int dim = args->k.head_dim, most = dim > 128 ? MOST_ROWS_WIDE : MOST_ROWS;

	if (dim == 64 || dim == 128)
		return;
	if (rows > most)
		kv_refuse(refusals, KV_ATTN_QUERY_ROWS,
			  "max_query_len: %lld rows given, of heads of %d up to %d are done",
			  (long long)rows, dim, most);
	if (args->k.dtype == KV_F8_E4M3 && dim % 32)
		kv_refuse(refusals, KV_ATTN_HEAD_DIM,
			  "k.head_dim: %d given, of e4m3 multiples of 32 are done", dim);
}

/* What depends on how the call would be cut; only of sizes that the table allows. */
static void refuse_split(const struct kv_attention_args *args, struct kv_refusals *refusals)
{
	struct split split;
	int shared;

	if (attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, &shared) < 0 ||
	    split_init(args, &split) < 0) {
		kv_refuse(refusals, KV_ATTN_DEVICE, "device: %s", kv_error_text());
		return;
	}
	if (shared < MAX_SHARED)
		kv_refuse(refusals, KV_ATTN_DEVICE,
			  "device: it has %d bytes of shared memory a multiprocessor, %d are needed",
			  shared, MAX_SHARED);
	if (!split.choice.n_parts)
		kv_refuse(refusals, KV_ATTN_SIZE, "n_tokens: %d given, too large", args->n_tokens);
	if (!args->invariant && (double)args->n_seqs * args->table_width * (args->k.block_tokens / RUN) *
		    args->k.n_heads / (split.sets * split.choice.n_heads) * split.n_chunks >
	    INT_MAX)
		kv_refuse(refusals, KV_ATTN_SIZE, "n_seqs, table_width: %d, %d given, too large",
			  args->n_seqs, args->table_width);
	if (!args->workspace || args->workspace_bytes < workspace_bytes(args, &split))
		kv_refuse(refusals, KV_ATTN_WORKSPACE, "workspace_bytes: %zu given, %zu needed",
			  args->workspace ? args->workspace_bytes : 0,
			  workspace_bytes(args, &split));
}

extern "C" void kv_attention_split_refuse(const struct kv_attention_args *args,
					  struct kv_refusals *refusals)
{
	const uint64_t sizes = KV_ATTN_BIT(HEAD_DIM) | KV_ATTN_BIT(DTYPE) | KV_ATTN_BIT(KV_DTYPE) |
			       KV_ATTN_BIT(BLOCK_TOKENS) | KV_ATTN_BIT(QUERY_ROWS);

	if (args->invariant && kind_of(args) != KV_SPLIT_PLAIN)
		kv_refuse(refusals, KV_ATTN_COMBINATION,
			  "invariant: done for heads of 64 and 128, without trees, documents, prefixes, "
			  "ALiBi, scales of rows, ranges of keys, ranks, seq_causal");
	refuse_views(args, refusals);
	refuse_rows(args, refusals);
	if (!(refusals->bits & sizes))
		refuse_split(args, refusals);
}

extern "C" int kv_attention_split(const struct kv_attention_args *args)
{
	static kv_split_launch *const launches[][3] = {
		{kv_split_launch_bf16, kv_split_launch_f16, kv_split_launch_f8},
		{kv_split_launch_any_bf16, kv_split_launch_any_f16, kv_split_launch_any_f8}};
	int type = args->k.dtype == KV_BF16 ? 0 : args->k.dtype == KV_F16 ? 1 : 2;
	const float log2_e = 1.44269504088896f;
	bool scaled = args->k_row_scales.base;
	float scale = args->sm_scale * (args->k_scales || scaled ? 1 : args->k.scale);
	struct kv_split_params p = {};
	struct split split;
	int r;

	if (!args->max_query_len)
		return 0;
	r = split_init(args, &split);
	if (r < 0)
		return r;
	p.q = args->q;
	p.out = args->out;
	p.lse = args->lse;
	p.query_start_loc = args->query_start_loc;
	p.seq_lens = args->seq_lens;
	p.block_table = args->block_table;
	p.counters = (uint32_t *)args->workspace;
	p.sums = (float *)((char *)args->workspace + counter_bytes(&split));
	p.sinks = args->sinks;
	p.slopes = args->alibi_slopes;
	p.k_scales = args->k_scales;
	p.v_scales = args->v_scales;
	p.k = args->k;
	p.v = args->v;
	p.k_rows = args->k_row_scales;
	p.v_rows = args->v_row_scales;
	if (scaled)
		p.v.scale = 1;
	p.fixed = args->invariant;
	p.sees = kv_visibility_of(args);
	p.q_stride = args->q_token_stride;
	p.out_stride = args->out_token_stride;
	p.lse_stride = args->lse_token_stride;
	p.lse_head_stride = args->lse_head_stride;
	p.dtype = args->dtype;
	p.out_dtype = args->out_dtype;
	p.lse_with_sink = args->lse_with_sink;
	p.n_seqs = args->n_seqs;
	p.n_tokens = args->n_tokens;
	p.n_heads_q = args->n_heads_q;
	p.group = args->n_heads_q / args->k.n_heads;
	p.table_width = args->table_width;
	p.block_mask =
		args->k.block_tokens & (args->k.block_tokens - 1) ? -1 : args->k.block_tokens - 1;
	p.n_chunks = split.n_chunks;
	p.heads = split.sets;
	p.blocks = split.n_blocks;
	p.near = split.near;
	p.n_sets = args->k.n_heads / (split.sets * split.choice.n_heads);
	p.min_tiles = tuning().min_tiles ?: MIN_TILES / split.sets;
	p.window_left = args->window_left;
	p.causal = args->causal;
	p.capped = args->softcap > 0;
	p.inner = p.capped ? 2 * log2_e * scale / args->softcap : 0;
	p.outer = p.capped ? log2_e * args->softcap : log2_e * scale;
	return launches[split.choice.kind == KV_SPLIT_ANY][type](&p, &split.choice, args->stream);
}
