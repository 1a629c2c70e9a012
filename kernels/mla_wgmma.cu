/* SPDX-License-Identifier: Apache-2.0 */
/* Latent decode over block tables by mla_tile.cuh: what it can run, and how it is launched. */
#include <climits>

#include "kernels/attention.h"
#include "kernels/device/tensor_map.cuh"
#include "kernels/mla_tile.cuh"

static int describe_map(CUtensorMap *map, const struct kv_view *view, int run)
{
	cuuint64_t sizes[] = {DIM, (cuuint64_t)view->block_tokens, 1, INT_MAX};
	cuuint64_t strides[] = {(cuuint64_t)view->token_stride, (cuuint64_t)view->token_stride,
				(cuuint64_t)view->block_stride};
	cuuint32_t box[] = {64, (cuuint32_t)run, 1, 1}, steps[] = {1, 1, 1, 1};
	CUresult e = kv_tensor_encode()(map,
			      view->dtype == KV_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
						     : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
			      4, view->base, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
			      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
			      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);

	if (e == CUDA_SUCCESS)
		return 0;
	return kv_error(-EIO, "attention: CUDA error %d describing latents to the copy engine", e);
}

/* Rows of a chunk in the workspace. */
static int rows_of(const struct kv_attention_args *args)
{
	int64_t rows = (int64_t)args->max_query_len * args->n_heads_q;

	return rows < 1 ? 1 : rows < ROWS ? (int)rows : ROWS;
}

static int chunks_of(const struct kv_attention_args *args)
{
	int64_t n = ((int64_t)args->max_query_len * args->n_heads_q + ROWS - 1) / ROWS;

	return n < 1 ? 1 : n > INT_MAX ? INT_MAX : (int)n;
}

extern "C" size_t kv_mla_wgmma_workspace(const struct kv_attention_args *args)
{
	return kv_mla_workspace(args, rows_of(args), chunks_of(args));
}

extern "C" void kv_mla_wgmma_refuse(const struct kv_attention_args *args, struct kv_refusals *refusals)
{
	const struct kv_view *k = &args->k;
	int device = 0, major = 0, minor = 0;
	size_t needed = kv_mla_wgmma_workspace(args);

#ifndef KV_HAVE_SM90A
	kv_refuse(refusals, KV_ATTN_DEVICE, "device: this build has no kernels of sm_90a");
#endif
	if (cudaGetDevice(&device) != cudaSuccess ||
	    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
	    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
		cudaGetLastError();
		kv_refuse(refusals, KV_ATTN_DEVICE, "device: none answers");
	} else if (major != 9 || minor != 0) {
		kv_refuse(refusals, KV_ATTN_CAPABILITY, "device: compute capability %d.%d, 9.0 needed",
			  major, minor);
	}
	if (args->latent_dim && (args->latent_dim != LATENT || args->rope_dim != ROPE))
		kv_refuse(refusals, KV_ATTN_HEAD_DIM, "latent_dim, rope_dim: %d, %d given, it does %d, %d",
			  args->latent_dim, args->rope_dim, LATENT, ROPE);
	if (((uintptr_t)k->base | (uint64_t)k->block_stride | (uint64_t)k->token_stride) % 16 ||
	    k->token_stride >= 1LL << 40 || k->block_stride >= 1LL << 40)
		kv_refuse(refusals, KV_ATTN_ALIGNMENT,
			  "k: base and strides must be multiples of 16 bytes, strides below 2^40");
	if (((uintptr_t)args->q | (uintptr_t)args->out) % 16 ||
	    (args->q_token_stride | args->out_token_stride) % 8)
		kv_refuse(refusals, KV_ATTN_ALIGNMENT,
			  "q, out: tokens must start at multiples of 16 bytes");
	if (args->sm_scale < 0)
		kv_refuse(refusals, KV_ATTN_COMBINATION, "sm_scale: %g given, positive ones are done",
			  (double)args->sm_scale);
	if (chunks_of(args) > 65535)
		kv_refuse(refusals, KV_ATTN_SIZE, "max_query_len: %d given, too large",
			  args->max_query_len);
	if (!kv_tensor_encode())
		kv_refuse(refusals, KV_ATTN_DEVICE,
			  "device: its driver is older than 12.0, which is needed");
	if (!args->workspace || args->workspace_bytes < needed)
		kv_refuse(refusals, KV_ATTN_WORKSPACE, "workspace_bytes: %zu given, %zu needed",
			  args->workspace ? args->workspace_bytes : 0, needed);
}

extern "C" int kv_mla_wgmma(const struct kv_attention_args *args)
{
	struct params x = {};
	int n_chunks, r;

	if (!args->max_query_len)
		return 0;
	n_chunks = kv_mla_describe(args, rows_of(args), &x.p);
	if (args->k.dtype == KV_F8_E4M3 || args->k.dtype == KV_BYTES) {
		r = args->k.dtype == KV_BYTES
			    ? launch_tiles<PACKED_ROWS>(x, args->dtype, n_chunks, args->stream)
			    : launch_tiles<ROWS_OF_8>(x, args->dtype, n_chunks, args->stream);
		return r < 0 ? r : kv_mla_merge(&x.p, n_chunks, args->stream);
	}
	x.run = 16;
	while (x.run < KV_MLA_KEYS && args->k.block_tokens % (2 * x.run) == 0)
		x.run *= 2;
	while (x.run << x.runs_bits < KV_MLA_KEYS)
		x.runs_bits++;
	r = describe_map(&x.map, &args->k, x.run);
	if (r < 0)
		return r;
	r = launch_tiles<BOXES_OF_16>(x, args->dtype, n_chunks, args->stream);
	return r < 0 ? r : kv_mla_merge(&x.p, n_chunks, args->stream);
}
