/* SPDX-License-Identifier: Apache-2.0 */
/* The wgmma backend on the host: what it can run, and with which kernel. attention_prefill.cuh. */
#include <climits>

#include "kernels/attention_prefill.h"
#include "kernels/device/launch.cuh"
#include "kernels/device/tensor_map.cuh"
#include "kernels/view.h"

#define COUNTER_BYTES 256 /* of the workspace; at its start, as those of split: 0 between calls */
#define MAX_STRIDE    (1LL << 40)
#define FEW_ROWS      64 /* q_len * group up to which split reads faster than this one calculates */

static int cuda_error(cudaError_t e)
{
	cudaGetLastError();
	return kv_error(-EIO, "attention: CUDA: %s (%s)", cudaGetErrorName(e),
			cudaGetErrorString(e));
}

static int attribute(cudaDeviceAttr which, int *ret)
{
	int device;
	cudaError_t e = cudaGetDevice(&device);

	if (e == cudaSuccess)
		e = cudaDeviceGetAttribute(ret, which, device);
	return e == cudaSuccess ? 0 : cuda_error(e);
}

/*
 * Whether a box can have whole rows of @view, of 128 or 256 columns: five dimensions describe it if
 * heads follow one another as columns do, or as tokens do.
 */
static bool whole_rows(const struct kv_view *view, int columns, int32_t *ret_head_rows,
		       int32_t *ret_head_columns)
{
	if (columns == 64 || view->head_dim != columns || view->dtype == KV_F8_E4M3)
		return false;
	*ret_head_rows = *ret_head_columns = 0;
	if (view->head_stride == kv_view_row_bytes(view)) {
		*ret_head_columns = columns / 64;
		return true;
	}
	*ret_head_rows = (int32_t)(view->head_stride / (8 * view->token_stride));
	return view->head_stride % (8 * view->token_stride) == 0 &&
	       view->head_stride / (8 * view->token_stride) < INT_MAX / view->n_heads;
}

/* A box of @run tokens of one block and head, all columns; see kv_prefill_params::whole. */
static int describe_whole(CUtensorMap *map, const struct kv_view *view, int run, int head_rows)
{
	cuuint64_t groups = (cuuint64_t)view->block_tokens / 8;
	cuuint64_t chunks = (cuuint64_t)view->head_dim / 64, heads = (cuuint64_t)view->n_heads;
	cuuint64_t sizes[] = {64, 8, head_rows ? chunks : chunks * heads,
			      head_rows ? (heads - 1) * (cuuint64_t)head_rows + groups : groups,
			      INT_MAX};
	cuuint64_t strides[] = {(cuuint64_t)view->token_stride, 128,
				8 * (cuuint64_t)view->token_stride, (cuuint64_t)view->block_stride};
	cuuint32_t box[] = {64, 8, (cuuint32_t)chunks, (cuuint32_t)run / 8, 1};
	cuuint32_t steps[] = {1, 1, 1, 1, 1};
	CUresult e = kv_tensor_encode()(map,
			      view->dtype == KV_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
						     : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
			      5, view->base, sizes, strides, box, steps,
			      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
			      CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
			      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);

	if (e == CUDA_SUCCESS)
		return 0;
	return kv_error(-EIO, "attention: CUDA error %d describing a view to the copy engine", e);
}

/* A box: @run tokens of one block and head; all of @columns of e4m3, else 64 elements. */
static int describe(CUtensorMap *map, const struct kv_view *view, int columns, int run)
{
	bool wide = view->dtype == KV_F8_E4M3;
	CUtensorMapDataType type = wide			     ? CU_TENSOR_MAP_DATA_TYPE_UINT8
				   : view->dtype == KV_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
							     : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
	cuuint64_t sizes[] = {(cuuint64_t)view->head_dim, (cuuint64_t)view->block_tokens,
			      (cuuint64_t)view->n_heads, INT_MAX};
	cuuint64_t strides[] = {(cuuint64_t)view->token_stride, (cuuint64_t)view->head_stride,
				(cuuint64_t)view->block_stride};
	cuuint32_t box[] = {(cuuint32_t)(wide ? columns : 64), (cuuint32_t)run, 1, 1};
	cuuint32_t steps[] = {1, 1, 1, 1};
	CUresult e = kv_tensor_encode()(map, type, 4, view->base, sizes, strides, box, steps,
			      CU_TENSOR_MAP_INTERLEAVE_NONE,
			      wide ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
			      CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
			      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);

	if (e == CUDA_SUCCESS)
		return 0;
	return kv_error(-EIO, "attention: CUDA error %d describing a view to the copy engine", e);
}

/* Both views, whole rows if it can be. */
static int describe_views(const struct kv_attention_args *args, int columns,
			  struct kv_prefill_params *p)
{
	int32_t rows = 0, v_rows = 0, head_columns = 0, v_columns = 0;
	int keys = columns < 256 ? 128 : args->k.dtype == KV_F8_E4M3 ? 64 : 80, r;

	p->whole = whole_rows(&args->k, columns, &rows, &head_columns) &&
		   whole_rows(&args->v, columns, &v_rows, &v_columns) && rows == v_rows;
	p->group_bytes = p->whole ? columns / 64 * 1024 : 1024;
	p->chunk_bytes = p->whole ? 1024 : keys * 128;
	p->head_rows = rows;
	p->head_columns = head_columns;
	if (p->whole) {
		r = describe_whole(&p->k_map, &args->k, p->run, rows);
		return r < 0 ? r : describe_whole(&p->v_map, &args->v, p->run, rows);
	}
	r = describe(&p->k_map, &args->k, columns, p->run);
	return r < 0 ? r : describe(&p->v_map, &args->v, columns, p->run);
}

extern "C" size_t kv_attention_prefill_workspace(const struct kv_attention_args *args)
{
	struct kv_attention_args decode = *args;
	struct kv_refusals refusals = {};
	int group = args->n_heads_q / args->k.n_heads;
	size_t bytes;

	/* One workspace serves the decode steps of a model as well. */
	if ((int64_t)decode.max_query_len * group > FEW_ROWS)
		decode.max_query_len = FEW_ROWS / group > 1 ? FEW_ROWS / group : 1;
	decode.workspace = &decode; /* some memory: only its size is looked at */
	decode.workspace_bytes = SIZE_MAX;
	kv_attn_refuse(&kv_attn_split, &decode, &refusals);
	bytes = refusals.bits ? 0 : kv_attention_split_workspace(&decode);
	return bytes > COUNTER_BYTES ? bytes : COUNTER_BYTES;
}

static void refuse_view(const struct kv_view *view, const char *name, struct kv_refusals *refusals)
{
	uint64_t bits = (uint64_t)(uintptr_t)view->base | (uint64_t)view->block_stride |
			(uint64_t)view->token_stride | (uint64_t)view->head_stride |
			(uint64_t)kv_view_row_bytes(view);

	if (bits % 16 || view->token_stride <= 0 || view->head_stride <= 0 ||
	    view->block_stride <= 0 || view->token_stride >= MAX_STRIDE ||
	    view->head_stride >= MAX_STRIDE || view->block_stride >= MAX_STRIDE)
		kv_refuse(refusals, KV_ATTN_ALIGNMENT,
			  "%s: base, strides and rows must be multiples of 16 bytes, strides above 0 "
			  "and below 2^40",
			  name);
}

extern "C" void kv_attention_prefill_refuse(const struct kv_attention_args *args,
					    struct kv_refusals *refusals)
{
	int group = args->n_heads_q / args->k.n_heads, major = 0, minor = 0;

#ifndef KV_HAVE_SM90A
	kv_refuse(refusals, KV_ATTN_DEVICE, "device: this build has no kernels of sm_90a");
#endif
	if (attribute(cudaDevAttrComputeCapabilityMajor, &major) < 0 ||
	    attribute(cudaDevAttrComputeCapabilityMinor, &minor) < 0)
		kv_refuse(refusals, KV_ATTN_DEVICE, "device: %s", kv_error_text());
	else if (major != 9 || minor != 0)
		kv_refuse(refusals, KV_ATTN_CAPABILITY, "device: compute capability %d.%d, 9.0 needed",
			  major, minor);
	refuse_view(&args->k, "k", refusals);
	refuse_view(&args->v, "v", refusals);
	if (((uintptr_t)args->q | (uintptr_t)args->out) % 16 ||
	    (args->q_token_stride | args->out_token_stride) % 8)
		kv_refuse(refusals, KV_ATTN_ALIGNMENT,
			  "q, out: tokens must start at multiples of 16 bytes");
	if (args->sm_scale < 0)
		kv_refuse(refusals, KV_ATTN_COMBINATION, "sm_scale: %g given, positive ones are done",
			  (double)args->sm_scale);
	if (((double)args->max_query_len * group + 256) * group > UINT32_MAX)
		kv_refuse(refusals, KV_ATTN_SIZE, "max_query_len: %d given, too large",
			  args->max_query_len);
	if (!kv_tensor_encode())
		kv_refuse(refusals, KV_ATTN_DEVICE,
			  "device: its driver is older than 12.0, which is needed");
	if (!args->workspace || args->workspace_bytes < COUNTER_BYTES)
		kv_refuse(refusals, KV_ATTN_WORKSPACE, "workspace_bytes: %zu given, %d needed",
			  args->workspace ? args->workspace_bytes : 0, COUNTER_BYTES);
}

extern "C" int kv_attention_prefill(const struct kv_attention_args *args)
{
	kv_prefill_launch *launch = args->k.dtype == KV_BF16  ? kv_prefill_launch_bf16
				    : args->k.dtype == KV_F16 ? kv_prefill_launch_f16
							      : kv_prefill_launch_f8;
	const float log2_e = 1.44269504088896f;
	float scale = args->sm_scale * (args->k_scales ? 1 : args->k.scale);
	int dim = args->k.head_dim > args->v.head_dim ? args->k.head_dim : args->v.head_dim;
	int columns = kv_prefill_columns(dim), n_blocks, r;
	struct kv_prefill_params p = {};

	if (!args->max_query_len)
		return 0;
	r = attribute(cudaDevAttrMultiProcessorCount, &n_blocks);
	p.run = KV_PREFILL_RUN;
	while (columns < 256 && p.run < 64 && args->k.block_tokens % (2 * p.run) == 0)
		p.run *= 2;
	if (r == 0)
		r = describe_views(args, columns, &p);
	if (r < 0)
		return r;
	p.q = args->q;
	p.out = args->out;
	p.lse = args->lse;
	p.query_start_loc = args->query_start_loc;
	p.seq_lens = args->seq_lens;
	p.block_table = args->block_table;
	p.counters = (uint32_t *)args->workspace;
	p.dtype = args->dtype;
	p.n_seqs = args->n_seqs;
	p.n_tokens = args->n_tokens;
	p.n_heads_q = args->n_heads_q;
	p.n_heads_kv = args->k.n_heads;
	p.group = args->n_heads_q / args->k.n_heads;
	p.group_factor = (uint32_t)(((1ULL << 32) + p.group - 1) / (uint32_t)p.group);
	p.head_dim_k = args->k.head_dim;
	p.head_dim_v = args->v.head_dim;
	p.table_width = args->table_width;
	p.block_tokens = args->k.block_tokens;
	p.block_shift = -1;
	if (!(p.block_tokens & (p.block_tokens - 1)))
		p.block_shift = __builtin_ctz((unsigned)p.block_tokens);
	p.window_left = args->window_left < INT_MAX / 2 ? args->window_left : -1;
	p.causal = args->causal;
	p.capped = args->softcap > 0;
	p.inner = p.capped ? 2 * log2_e * scale / args->softcap : 0;
	p.outer = p.capped ? log2_e * args->softcap : log2_e * scale;
	p.v_scale = args->v_scales ? 1 : args->v.scale;
	p.sinks = args->sinks;
	p.k_scales = args->k_scales;
	p.v_scales = args->v_scales;
	p.seq_causal = args->seq_causal;
	p.q_stride = args->q_token_stride;
	p.out_stride = args->out_token_stride;
	p.lse_stride = args->lse_token_stride;
	p.lse_head_stride = args->lse_head_stride;
	p.key_begin = args->key_begin;
	p.key_end = args->key_end ? args->key_end : INT32_MAX;
	p.lse_with_sink = args->lse_with_sink;
	return launch(&p, columns, n_blocks, args->stream);
}
