/* SPDX-License-Identifier: Apache-2.0 */
/* kvbench write: K and V at random slots. kvbench merge: parts of attention into one. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dtype.h"
#include "tools/bench/paged.h"

/* ---- write ---- */

static int call_write(void *context, int i, void *stream)
{
	struct kv_write_args args = *(struct kv_write_args *)context;

	args.stream = stream;
	return kv_write(&args);
}

/* Tokens of the batch at slots in random order; bf16, or f32, into the type asked for. */
int kv_bench_run_write(const struct kv_bench *b, const struct kv_bench_case *p, struct kv_bench_result *ret)
{
	int kv_dtype = p->dtype, dtype = kv_bench_wide_type(kv_dtype);
	int64_t n = p->batch, page = p->page, n_blocks = (n + page - 1) / page;
	int64_t row = (int64_t)p->heads_kv * p->dim, half;
	size_t bytes = (size_t)row * kv_dtype_bytes(dtype);
	int64_t *slots = malloc((size_t)n * sizeof(*slots));
	struct kv_write_args args = {.size = sizeof(args), .device = kv_bench_device, .dtype = dtype};
	char *from = malloc(bytes), *block;
	int status = KV_BENCH_DONE;

	if (!slots || !from)
		abort();
	for (int64_t t = 0; t < n; t++)
		slots[t] = t;
	for (int64_t t = n - 1; t > 0; t--) {
		int64_t j = kv_bench_random() % (uint64_t)(t + 1), slot = slots[t];

		slots[t] = slots[j];
		slots[j] = slot;
	}
	args.k = kv_bench_view(p, 1);
	args.n_tokens = n;
	args.key = kv_bench_noise_new(n * row, dtype);
	args.value = kv_bench_noise_new(n * row, dtype);
	args.slots = kv_bench_upload(slots, (size_t)n * sizeof(*slots));
	half = p->flat ? args.k.block_stride / 2 : args.k.block_stride;
	args.k.base = kv_bench_device_alloc((size_t)(2 * half * n_blocks));
	args.v = args.k;
	args.v.base = (char *)args.k.base + (p->flat ? half : half * n_blocks);
	block = malloc((size_t)args.k.block_stride);
	if (!block)
		abort();
	if (call_write(&args, 0, NULL) < 0)
		status = kv_bench_refuse(b, KV_BENCH_FAILED, "write: %s", kv_error_text());
	for (int64_t t = 0; t < n && !status; t += n > 8 ? n / 8 : 1) {
		kv_bench_device_get(from, (const char *)args.key + t * (int64_t)bytes, bytes);
		kv_bench_device_get(block, (char *)args.k.base + slots[t] / page * args.k.block_stride,
				    (size_t)args.k.block_stride);
		for (int64_t e = 0; e < row; e++) {
			const char *to = block + slots[t] % page * args.k.token_stride +
					 e / p->dim * args.k.head_stride;
			uint32_t right = 0;

			kv_element_store(&right, 0, kv_dtype, kv_element_load(from, e, dtype));
			if (memcmp(&right, to + e % p->dim * (int64_t)kv_dtype_bytes(kv_dtype),
				   kv_dtype_bytes(kv_dtype)) != 0 && !status)
				status = kv_bench_refuse(b, KV_BENCH_FAILED,
							 "write: token %lld, element %lld is wrong: no time",
							 (long long)t, (long long)e);
		}
	}
	ret->bytes = 2.0 * (double)(n * row) *
		     (double)(kv_dtype_bytes(dtype) + kv_dtype_bytes(kv_dtype));
	if (!status)
		status = kv_bench_time_case(b, "kv_write", call_write, &args, 8, true, ret);
	kv_bench_device_free((void *)(uintptr_t)args.key);
	kv_bench_device_free((void *)(uintptr_t)args.value);
	kv_bench_device_free((void *)(uintptr_t)args.slots);
	kv_bench_device_free(args.k.base);
	free(slots);
	free(from);
	free(block);
	return status;
}

/* ---- merge ---- */

#define PARTS 4

static int call_merge(void *context, int i, void *stream)
{
	struct kv_merge_args args = *(struct kv_merge_args *)context;

	args.stream = stream;
	return kv_merge(&args);
}

/* PARTS parts of the batch's rows. */
int kv_bench_run_merge(const struct kv_bench *b, const struct kv_bench_case *p, struct kv_bench_result *ret)
{
	int64_t rows = (int64_t)p->batch * p->heads_q, n = rows * p->dim;
	int dtype = kv_bench_wide_type(p->dtype);
	size_t element = kv_dtype_bytes(dtype);
	struct kv_merge_args args = {.size = sizeof(args),
				     .device = kv_bench_device,
				     .dtype = dtype,
				     .n_parts = PARTS,
				     .n_tokens = p->batch,
				     .n_heads = p->heads_q,
				     .head_dim = p->dim,
				     .parts = kv_bench_noise_new(PARTS * n, dtype),
				     .part_lse = kv_bench_noise_new(PARTS * rows, KV_F32),
				     .out = kv_bench_device_alloc((size_t)n * element)};
	char *parts = malloc((size_t)(PARTS * n) * element), *out = malloc((size_t)n * element);
	float *lse = malloc((size_t)(PARTS * rows) * sizeof(*lse));
	int status = KV_BENCH_DONE;
	double error = 0, norm = 0;

	if (!parts || !out || !lse)
		abort();
	if (call_merge(&args, 0, NULL) < 0)
		status = kv_bench_refuse(b, KV_BENCH_FAILED, "merge: %s", kv_error_text());
	kv_bench_device_get(parts, args.parts, (size_t)(PARTS * n) * element);
	kv_bench_device_get(lse, args.part_lse, (size_t)(PARTS * rows) * sizeof(*lse));
	kv_bench_device_get(out, args.out, (size_t)n * element);
	for (int64_t i = 0; i < n; i++) {
		double sum = 0, weights = 0, x;

		for (int r = 0; r < PARTS; r++) {
			double w = exp((double)lse[r * rows + i / p->dim]);

			sum += w * (double)kv_element_load(parts, r * n + i, dtype);
			weights += w;
		}
		x = (double)kv_element_load(out, i, dtype) - sum / weights;
		error += x * x;
		norm += sum / weights * (sum / weights);
	}
	ret->error = sqrt(error / norm);
	ret->bytes = (double)((PARTS + 1) * n) * (double)element + 4.0 * PARTS * (double)rows;
	if (!status && !(ret->error <= kv_bench_tolerance(dtype)))
		status = kv_bench_refuse(b, KV_BENCH_FAILED, "merge: off by %g: no time", ret->error);
	if (!status)
		status = kv_bench_time_case(b, "kv_merge", call_merge, &args, 8, true, ret);
	kv_bench_device_free((void *)(uintptr_t)args.parts);
	kv_bench_device_free((void *)(uintptr_t)args.part_lse);
	kv_bench_device_free(args.out);
	free(parts);
	free(out);
	free(lse);
	return status;
}

