/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vector code of the cpu backend. simd.c is compiled once per instruction set, each time into
 * one struct kv_simd; kv_simd_sets() goes by the CPU it runs on (no ifunc: sanitizers cannot run
 * before those resolve).
 */
#ifndef KV_KERNELS_SIMD_H
#define KV_KERNELS_SIMD_H

#include <kvcached/attention.h>

#define KV_SIMD_TILE	 32 /* keys that are worked on together; a tile starts at a multiple of it */
#define KV_SIMD_MAX_ROWS 64 /* rows of an item */

/*
 * A part of an attention call for one thread: consecutive rows of one sequence and one KV head.
 * Row r is query r / group at query head kv_head * group + r % group.
 */
struct kv_simd_item {
	int32_t b; /* sequence */
	int32_t kv_head;
	int64_t first;	/* row */
	int32_t n_rows; /* 1..KV_SIMD_MAX_ROWS */
};

struct kv_simd {
	const char *name;

	/* Bytes of scratch for attend(); 64-byte aligned, zero before its first use. */
	size_t (*scratch_bytes)(int head_dim_k, int head_dim_v);
	void (*attend)(const struct kv_attention_args *args, const struct kv_simd_item *item,
		       float *scratch);

	/* to[i] = from[i], from any type */
	void (*widen)(float *to, const void *from, int dtype, int64_t n);
	/* to[i] = from[i], rounded to any type */
	void (*narrow)(void *to, int dtype, const float *from, int64_t n);
};

extern const struct kv_simd kv_simd_base;   /* what every CPU of the architecture has */
extern const struct kv_simd kv_simd_avx2;   /* with fma and f16c */
extern const struct kv_simd kv_simd_avx512; /* avx512f */

/* kv_simd_sets() - those this CPU can run, best first, NULL last. simd_x86.c, simd_other.c: a pair.
 */
const struct kv_simd *const *kv_simd_sets(void);

/* The cpu backend on one of them. */
int kv_attention_simd(const struct kv_simd *simd, const struct kv_attention_args *args);
int kv_write_simd(const struct kv_simd *simd, const struct kv_write_args *args);

#endif
