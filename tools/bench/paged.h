/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvbench attention, write, merge: what the three share. paged.c has the options, the product of their
 * lists, the ceilings and the table; each benchmark checks one case and times it.
 */
#ifndef KV_TOOLS_BENCH_PAGED_H
#define KV_TOOLS_BENCH_PAGED_H

#include "tools/bench/bench.h"
#include "tools/bench/device.h"

#define KV_BENCH_ROTATED ((int64_t)256 << 20) /* bytes that the calls of a graph touch at least */
#define KV_BENCH_MAX_R	 64		      /* calls of a graph */

struct kv_bench_case {
	int heads_q, heads_kv, dim;
	int batch, query, context; /* sequences (write: tokens), new tokens and all tokens of each */
	int page, dtype;	   /* dtype: enum kv_dtype, of the cache */
	bool hnd, flat;		   /* flat: K and V of a block, of all layers, lie together */
	bool ragged;
};

struct kv_bench_result {
	double seconds; /* of a call */
	double bytes;	/* that it must read and write */
	double flops;
	double ceiling; /* bytes a second that the device reads, or reads and writes, beside it */
	double error;	/* |out - answer| / |answer| */
	char backend[KV_NAME_MAX];
};

typedef int kv_bench_run(const struct kv_bench *b, const struct kv_bench_case *c,
			 struct kv_bench_result *ret);

/* The type of q, of new K and V, and of parts: the cache's own, or bf16 for 8 bits. */
int kv_bench_wide_type(int dtype);

/* kv_bench_tolerance() - of |out - answer| / |answer|, results being of @dtype's arithmetic */
double kv_bench_tolerance(int dtype);

/* kv_bench_case_name() - for a message. By value: until the end of the full expression. */
struct kv_bench_name {
	char text[96];
};
struct kv_bench_name kv_bench_case_name(const struct kv_bench_case *c);

/* A view of one layer, K and V apart or of blocks of @layers; @base: of this part of the pool */
struct kv_view kv_bench_view(const struct kv_bench_case *c, int layers);

/*
 * Noise: device memory holds it over and over, so that the host knows what lies where. Elements are
 * uniform in [-2, 2).
 */
#define KV_BENCH_NOISE (((int64_t)8 << 20) + 1280) /* bytes */

void *kv_bench_noise_new(int64_t n, int dtype);		 /* [n] elements in device memory */
void *kv_bench_pool(int64_t bytes, int dtype);		 /* one that is kept for the next case */
const char *kv_bench_noise_at(int dtype, int64_t offset); /* 4096 bytes of it on the host */
uint32_t kv_bench_random(void);
void *kv_bench_upload(const void *from, size_t bytes);

/*
 * kv_bench_time_case() - of a case whose result is right, between two looks at the ceiling
 * @copies: the ceiling is a copy, not a read
 *
 * Return: exit status.
 */
int kv_bench_time_case(const struct kv_bench *b, const char *what,
		       int (*call)(void *context, int i, void *stream), void *context, int n, bool copies,
		       struct kv_bench_result *ret);

/* attention_right.c: how far @args' output is from the answer in double, at a few rows. */
struct kv_bench_attention {
	struct kv_attention_args args; /* of table 0 */
	struct kv_bench_case c;
	int32_t *tables; /* host, [n, batch, width] */
	int32_t *device_tables;
	int32_t *lens, *starts; /* host; starts: [batch + 1] rows of q */
	double n_keys, n_pairs;	/* keys read; pairs of a query and a key it sees */
	int64_t block_stride, k_at, v_at; /* of the pool, bytes */
	int n, layers;
};

kv_bench_run kv_bench_run_attention, kv_bench_run_write, kv_bench_run_merge;

double kv_bench_attention_error(const struct kv_bench_attention *a);

#endif
