/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sparse latent attention by mla_tile.cuh: each query token is a request whose keys are its chosen slots.
 *
 * Where there are as many tokens as fill the thread blocks, each of these takes whole tokens, and
 * nothing is merged; else tokens are cut into equal runs of tiles, in the caller's workspace.
 */
#include <climits>

#include "kernels/attention.h"
#include "kernels/dsa.h"
#include "kernels/mla_tile.cuh"

#define PART_TILES 8 /* what a cut costs at most, in the time of tiles */

/* As a call of dense decode, one query of top_k keys a request. */
static struct kv_attention_args as_dense(const struct kv_sparse_mla_args *args)
{
	struct kv_attention_args a = {};

	a.dtype = a.out_dtype = args->dtype;
	a.n_seqs = a.n_tokens = args->n_tokens;
	a.n_heads_q = args->n_heads;
	a.max_query_len = 1;
	a.q = args->q;
	a.out = args->out;
	a.lse = args->lse;
	a.q_token_stride = args->q_stride;
	a.out_token_stride = args->out_stride;
	a.lse_token_stride = args->n_heads;
	a.lse_head_stride = 1;
	a.k = args->cache;
	a.k.scale = args->cache.dtype == KV_F8_E4M3 ? args->cache.scale : 1;
	a.v = a.k;
	a.sm_scale = args->sm_scale;
	a.latent_dim = args->latent_dim;
	a.rope_dim = args->rope_dim;
	a.workspace = args->workspace;
	a.workspace_bytes = args->workspace_bytes;
	return a;
}

static int rows_of(const struct kv_sparse_mla_args *args)
{
	return args->n_heads < ROWS ? args->n_heads : ROWS;
}

static int chunks_of(const struct kv_sparse_mla_args *args)
{
	return (args->n_heads + ROWS - 1) / ROWS;
}

extern "C" size_t kv_sparse_mla_wgmma_workspace(const struct kv_sparse_mla_args *args)
{
	struct kv_attention_args a = as_dense(args);

	if (args->device != KV_DEVICE_CUDA || args->latent_dim != LATENT || args->rope_dim != ROPE)
		return 0;
	return kv_mla_workspace(&a, rows_of(args), chunks_of(args));
}

static int refuse(const struct kv_sparse_mla_args *args)
{
	const struct kv_view *c = &args->cache;
	uint64_t bits = (uint64_t)(uintptr_t)c->base | (uint64_t)c->block_stride |
			(uint64_t)c->token_stride | (uint64_t)(uintptr_t)args->q |
			(uint64_t)(uintptr_t)args->out | (uint64_t)args->q_stride * 2 |
			(uint64_t)args->out_stride * 2;
	int device = 0, major = 0, minor = 0;

#ifndef KV_HAVE_SM90A
	return kv_error(-ENOTSUP, "wgmma: built without sm_90a");
#endif
	if (cudaGetDevice(&device) != cudaSuccess ||
	    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
	    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
		cudaGetLastError();
		return kv_error(-EIO, "device: none that CUDA knows");
	}
	if (major != 9 || minor != 0 || args->latent_dim != LATENT || args->rope_dim != ROPE ||
	    args->dtype == KV_F32 ||
	    (c->dtype != args->dtype && c->dtype != KV_F8_E4M3 && c->dtype != KV_BYTES) || bits % 16)
		return kv_error(-ENOTSUP, "wgmma: sm_90, rows of %d + %d in q's 16 bits, e4m3 or packed, "
					  "and 16-byte alignment wanted",
				LATENT, ROPE);
	if (args->n_tokens > INT_MAX / ((args->top_k + KV_MLA_KEYS - 1) / KV_MLA_KEYS) - 1024)
		return kv_error(-ENOTSUP, "n_tokens: %d given, too many for one launch", args->n_tokens);
	return 0;
}

/* Thread blocks and the tiles of their runs. Return: whether some request lies in two runs. */
static bool cut(struct kv_mla_params *p, bool may)
{
	int tiles = (p->top_k + KV_MLA_KEYS - 1) / KV_MLA_KEYS;
	int whole = (p->n_seqs + p->groups - 1) / p->groups; /* tokens of a thread block */
	int equal = (int)(((int64_t)p->n_seqs * tiles + p->groups - 1) / p->groups);

	if (may && (int64_t)whole * tiles > equal + PART_TILES) {
		p->each = equal;
		return equal % tiles != 0;
	}
	p->each = whole * tiles;
	p->groups = (p->n_seqs + whole - 1) / whole;
	return false;
}

extern "C" int kv_sparse_mla_wgmma(const struct kv_sparse_mla_args *args)
{
	struct kv_attention_args a = as_dense(args);
	size_t needed = kv_sparse_mla_wgmma_workspace(args);
	struct params x = {};
	int n_chunks, r = refuse(args);
	bool merged;

	if (r < 0)
		return r;
	if (a.workspace_bytes < needed)
		a.workspace = NULL;
	n_chunks = kv_mla_describe(&a, rows_of(args), &x.p);
	x.p.chosen = args->chosen;
	x.p.top_k = args->top_k;
	x.p.groups = kv_mla_groups(n_chunks);
	merged = cut(&x.p, a.workspace != NULL);
	r = args->cache.dtype == KV_BYTES     ? launch_tiles<PACKED_ROWS>(x, args->dtype, n_chunks, args->stream)
	    : args->cache.dtype == KV_F8_E4M3 ? launch_tiles<ROWS_OF_8>(x, args->dtype, n_chunks, args->stream)
					      : launch_tiles<ROWS_OF_16>(x, args->dtype, n_chunks,
									 args->stream);
	return r < 0 || !merged ? r : kv_mla_merge(&x.p, n_chunks, args->stream);
}
