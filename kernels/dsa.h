/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backends of include/kvcached/dsa.h: dsa.c checks and fills in defaults, then calls the first row
 * of its device that doesn't refuse (-ENOTSUP).
 */
#ifndef KV_KERNELS_DSA_H
#define KV_KERNELS_DSA_H

#include <kvcached/dsa.h>

#include "kernels/view.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kv_dsa_backend {
	const char *name;
	int device; /* enum kv_device */

	/* Arguments are checked, strides are set. NULL, or -ENOTSUP: the next one. */
	int (*write)(const struct kv_index_write_args *args);
	int (*score)(const struct kv_index_args *args); /* into args->scores */
	int (*select)(const struct kv_index_args *args);
	int (*attend)(const struct kv_sparse_mla_args *args);
	size_t (*attend_workspace)(const struct kv_sparse_mla_args *args);
};

extern const struct kv_dsa_backend kv_dsa_ref;
extern const struct kv_dsa_backend *const kv_dsa_backends[]; /* preferred first, NULL last */

/* As the public calls, by one backend. */
int kv_index_write_on(const struct kv_dsa_backend *backend, const struct kv_index_write_args *args);
int kv_index_choose_on(const struct kv_dsa_backend *backend, const struct kv_index_args *args);
int kv_sparse_mla_on(const struct kv_dsa_backend *backend, const struct kv_sparse_mla_args *args);

int kv_index_write_cuda(const struct kv_index_write_args *args);
int kv_index_score_wgmma(const struct kv_index_args *args);
int kv_index_score_cuda(const struct kv_index_args *args);
int kv_index_select_cuda(const struct kv_index_args *args);
int kv_sparse_mla_wgmma(const struct kv_sparse_mla_args *args);
size_t kv_sparse_mla_wgmma_workspace(const struct kv_sparse_mla_args *args);
int kv_sparse_mla_cuda(const struct kv_sparse_mla_args *args);

#ifdef __cplusplus
}
#endif

/* Query @t's sequence, and how many keys it sees; the sequence is -1 if it is in none. */
struct kv_index_query {
	int32_t seq;
	int64_t n_keys;
};

/* Of the queries of sequence @b the row @t. */
KV_HD static inline int64_t kv_index_keys(const struct kv_index_args *a, int32_t b, int64_t t)
{
	int64_t end = a->query_start_loc ? a->query_start_loc[b + 1] : b + 1;
	int64_t n = a->seq_lens[b] - (end - 1 - t);
	int64_t most = (int64_t)a->table_width * a->cache.block_tokens;

	n = n < a->max_seq_len ? n : a->max_seq_len;
	n = n < most ? n : most;
	return n < 0 ? 0 : n;
}

KV_HD static inline struct kv_index_query kv_index_query_get(const struct kv_index_args *a, int64_t t)
{
	struct kv_index_query q = {-1, 0};
	int32_t low = 0, high = a->n_seqs;

	if (!a->query_start_loc) {
		q.seq = t < a->n_seqs ? (int32_t)t : -1;
	} else if (a->n_seqs > 0 && t >= a->query_start_loc[0] &&
		   t < a->query_start_loc[a->n_seqs]) {
		while (high - low > 1) { /* the last b whose first query is not past t */
			int32_t mid = low + (high - low) / 2;

			if (a->query_start_loc[mid] <= t)
				low = mid;
			else
				high = mid;
		}
		q.seq = low;
	}
	if (q.seq >= 0)
		q.n_keys = kv_index_keys(a, q.seq, t);
	return q;
}

KV_HD static inline int32_t kv_index_code_bytes(const struct kv_view *cache)
{
	return cache->head_dim - 4;
}

KV_HD static inline uint8_t *kv_index_codes(const struct kv_view *cache, int64_t block, int64_t row)
{
	return (uint8_t *)cache->base + block * cache->block_stride +
	       row * kv_index_code_bytes(cache);
}

KV_HD static inline uint8_t *kv_index_scales(const struct kv_view *cache, int64_t block, int64_t row)
{
	return kv_index_codes(cache, block, cache->block_tokens) + row * 4;
}

/* 2^(code - 127), exactly; 255 is NaN */
KV_HD static inline float kv_ue8m0_to_f32(uint8_t code)
{
	return kv_f32_from_bits(code == 0     ? 0x00400000u
				: code == 255 ? 0x7fc00000u
					      : (uint32_t)code << 23);
}

/* 0, 0.5, 1, 1.5, 2, 3, 4, 6 */
KV_HD static inline float kv_e2m1_to_f32(uint8_t code)
{
	uint32_t mag = code & 7u;
	float x = mag < 2 ? 0.5f * (float)mag
			  : (1 + 0.5f * (float)(mag & 1)) * (float)(1 << ((mag >> 1) - 1));

	return code & 8 ? -x : x;
}

/* To nearest, ties to the even code; what lies past 6, and NaN, to 6. */
KV_HD static inline uint8_t kv_f32_to_e2m1(float x)
{
	uint8_t sign = (uint8_t)(kv_f32_bits(x) >> 28 & 8);
	float mag = kv_f32_from_bits(kv_f32_bits(x) & 0x7fffffff);
	uint8_t code = mag <= 0.25f   ? 0
		       : mag < 0.75f  ? 1
		       : mag <= 1.25f ? 2
		       : mag < 1.75f  ? 3
		       : mag <= 2.5f  ? 4
		       : mag < 3.5f   ? 5
		       : mag <= 5.0f  ? 6
				      : 7;

	return sign | code;
}

/* The scale of a row whose largest |x| is @most. */
KV_HD static inline float kv_index_scale(float most, int pow2)
{
	float scale = (most > 1e-4f ? most : 1e-4f) / 448.0f;

	if (pow2) /* the exponent up by one, unless the mantissa is 0 */
		scale = kv_f32_from_bits((kv_f32_bits(scale) + 0x7fffff) & 0x7f800000);
	return scale;
}

/* The ue8m0 code of the least power of 2 at or above @most / 6. */
KV_HD static inline uint8_t kv_index_scale_fp4(float most)
{
	uint32_t code = (kv_f32_bits(most / 6.0f) + 0x7fffff) >> 23;

	return (uint8_t)(code < 1 ? 1 : code > 254 ? 254 : code);
}

/* Element @d of key (block, row) without its scale, and that scale. */
KV_HD static inline float kv_index_key(const struct kv_view *cache, int64_t block, int64_t row, int d)
{
	const uint8_t *codes = kv_index_codes(cache, block, row);

	if (cache->head_dim == KV_INDEX_ROW_FP4)
		return kv_e2m1_to_f32((uint8_t)(codes[d / 2] >> 4 * (d & 1) & 15)) *
		       kv_ue8m0_to_f32(kv_index_scales(cache, block, row)[d / KV_INDEX_FP4_TILE]);
	return kv_e4m3_to_f32(codes[d]);
}

KV_HD static inline float kv_index_key_scale(const struct kv_view *cache, int64_t block, int64_t row)
{
	float x = 1;

	if (cache->head_dim == KV_INDEX_ROW_FP8)
		memcpy(&x, kv_index_scales(cache, block, row), sizeof(x));
	return x;
}

/* Element @d of the latent row at @row: of [latent | rope]. */
KV_HD static inline float kv_latent_element(const struct kv_sparse_mla_args *a, const char *row, int d)
{
	const struct kv_view *c = &a->cache;
	int n = a->latent_dim;
	float scale;

	if (c->dtype != KV_BYTES)
		return c->dtype == KV_F8_E4M3 || c->dtype == KV_F8_E5M2
			       ? kv_element_load(row, d, c->dtype) * c->scale
			       : kv_element_load(row, d, c->dtype);
	if (d >= n)
		return kv_element_load(row + n + n / 128 * 4, d - n, a->dtype);
	memcpy(&scale, row + n + d / 128 * 4, sizeof(scale));
	return kv_e4m3_to_f32((uint8_t)row[d]) * scale;
}

#endif
