/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Latent attention (MLA: DeepSeek-V2, V3, R1; Kimi K2): one latent vector a token in place of K and V.
 *
 * A token's row in the cache is [latent | rope]: its compressed KV after the norm, and the part of K
 * that carries the position, after rotation; one of each for all heads, so on every rank. Rows are of
 * one of three formats, and a view says which:
 *
 *	view.dtype	    view.head_dim	    row
 *	f32, f16, bf16	    latent + rope (576)	    elements as they are
 *	e4m3, e5m2	    latent + rope (576)	    round(x / view.scale), saturated
 *	KV_BYTES	    kv_mla_packed_bytes()   "DS" row, 656 bytes for 512 + 64: e4m3 codes of the
 *			    (656)		    latent; an f32 scale for each 128 of them; the rope
 *						    part in the 16-bit type of the call, unscaled
 *
 * n_heads is 1; blocks are of any number of tokens. `kvctl plan` and kv_plan_arch() give a model's
 * component "latent" in this form (kv_plan_options.kv_type: auto, fp8, or packed).
 *
 * Decode, in the space of latents ("absorbed"), is kv_attention() with latent_dim and rope_dim set:
 *
 *	q	  [T, H, latent_dim + rope_dim]: q_nope W_UK[h] | q_pe after rotation
 *	k	  view of the rows; v is not looked at: V of a token is the latent part of its row
 *	sm_scale  must be given: 1 / sqrt(nope + rope) of the model (192: 0.0722), times mscale^2
 *	out	  [T, H, latent_dim]; W_UV[h] makes heads of it. lse as of all attention
 *
 * Several new tokens a sequence (verification of drafts), ranks that share the context (cp_size),
 * parts and their merge: as of all attention; kv_attention_validate() says what a backend leaves out.
 *
 * Prefill is plain attention of H heads of 192 and 128: kv_attention() over K and V that were made of
 * latents (W_UK, W_UV) in memory of the caller's, as if it were blocks:
 *
 *	new tokens	k.base = K [T, H, 192], block_stride = 64 * token_stride with block_tokens 64;
 *			or, where sequences follow each other without gaps, block_stride =
 *			token_stride and block_table[b][i] = first row of b + 64 i: blocks may overlap
 *			where they are only read. Memory up to the end of the last block must be there.
 *	context		in pieces: kv_mla_read() brings latents of a piece from the cache; K and V of
 *			them; kv_attention() with causal 0, out_dtype f32, lse
 *	together	kv_merge() of the parts
 *
 * Source: DeepSeek-V2, arXiv:2405.04434. Threads: any function, any thread, any time.
 */
#ifndef KVCACHED_MLA_H
#define KVCACHED_MLA_H

#include <kvcached/layout.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KV_MLA_TILE 128 /* latent elements that share a scale in a packed row */

/* Where the parts of a packed row begin, in bytes. */
static inline int32_t kv_mla_scales_at(int32_t latent_dim)
{
	return latent_dim;
}

static inline int32_t kv_mla_rope_at(int32_t latent_dim)
{
	return latent_dim + latent_dim / KV_MLA_TILE * 4;
}

static inline int32_t kv_mla_packed_bytes(int32_t latent_dim, int32_t rope_dim)
{
	return kv_mla_rope_at(latent_dim) + rope_dim * 2;
}

struct kv_mla_write_args {
	size_t size;
	int32_t device; /* enum kv_device */
	int32_t dtype;	/* of latent and rope: f32, f16, bf16; packed rows: 16 bits */
	int64_t n_tokens;
	int32_t latent_dim;
	int32_t rope_dim;
	const void *latent;    /* [T, latent_dim] */
	const void *rope;      /* [T, rope_dim] */
	int64_t latent_stride; /* elements from token to token; 0: dense */
	int64_t rope_stride;
	const int64_t *slots; /* [T] block * block_tokens + row; negative: the token is skipped */
	struct kv_view cache;
	void *stream;
};

/**
 * kv_mla_write() - store the rows of T tokens at their slots
 *
 * To rows of the same type bit for bit; to e4m3 and e5m2 as kv_write(). Packed rows: the scale of
 * 128 elements is max(largest |x| / 448, smallest normal f32), the codes are of x / scale; an element
 * of NaN stays NaN and doesn't count for the scale.
 *
 * Return: 0; -EINVAL if a field is out of range (kv_error_text() names it); -ENOTSUP if this build
 * has no such device; -EIO on a CUDA error.
 */
int kv_mla_write(const struct kv_mla_write_args *args);

struct kv_mla_read_args {
	size_t size;
	int32_t device;	   /* enum kv_device */
	int32_t dtype;	   /* of latent and rope: f32, f16, bf16; of packed rows what was written */
	int32_t n_seqs;	   /* B */
	int32_t n_tokens;  /* rows of latent and rope; none past them is written */
	int32_t latent_dim;
	int32_t rope_dim;
	void *latent;	   /* [n_tokens, latent_dim] */
	void *rope;	   /* [n_tokens, rope_dim] */
	int64_t latent_stride; /* elements from token to token; 0: dense */
	int64_t rope_stride;
	const int32_t *start_loc;   /* [B + 1] rows that receive sequence b's tokens */
	const int32_t *first;	    /* [B] its token that comes first, or NULL: 0 */
	const int32_t *block_table; /* [B, table_width] */
	int32_t table_width;
	int32_t reserved;
	struct kv_view cache;
	void *stream;
};

/**
 * kv_mla_read() - tokens of sequences from their blocks to rows one after the other
 *
 * Row start_loc[b] + i receives token first[b] + i of sequence b, code times scale where rows are of
 * 8 bits. Tokens outside the table are not read, and their rows stay as they are.
 *
 * Return: as kv_mla_write().
 */
int kv_mla_read(const struct kv_mla_read_args *args);

#ifdef __cplusplus
}
#endif
#endif
