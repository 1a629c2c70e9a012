/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arithmetic of dense layers on a CPU, on rows of float32. rows.c is compiled once for each
 * instruction set below; kv_rows_best() picks what this processor has.
 *
 * Batch invariance: an output element is computed by one fixed sequence of operations that depends
 * on the lengths of its rows alone, so it has the same bits whatever else is computed beside it.
 * Bits differ between the sets (fused or not, lanes), never within one.
 */
#ifndef KV_ENGINE_ROWS_H
#define KV_ENGINE_ROWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KV_ROWS_MULTIPLE 16 /* every row length is a multiple of this */

struct kv_rows {
	const char *name;

	/* out[0..n) = the n elements of a row of weights of @type (enum kv_weight_type) */
	void (*widen)(uint32_t type, const void *row, float *out, size_t n);

	/* out[t * out_stride + r] (+)= sum_i x[t * x_stride + i] * w[r * k + i], t < n_x, r < n_w
	 */
	void (*multiply)(const float *w, size_t n_w, const float *x, size_t x_stride, size_t n_x,
			 size_t k, float *out, size_t out_stride, bool add);

	/* out[i] = x[i] * weight[i] / sqrt(mean(x^2) + eps) */
	void (*rms_norm)(const float *x, const float *weight, float *out, size_t n, float eps);

	/* gate[i] = gate[i] / (1 + e^-gate[i]) * up[i] */
	void (*silu_multiply)(float *gate, const float *up, size_t n);

	/* gate[i] = gate[i] / 2 * (1 + tanh(sqrt(2 / pi) * (gate[i] + 0.044715 gate[i]^3))) * up[i] */
	void (*gelu_multiply)(float *gate, const float *up, size_t n);
};

/* The sets of this build: the plain one, and those of x86-64. */
extern const struct kv_rows kv_rows_base;
#ifdef KV_ROWS_X86
extern const struct kv_rows kv_rows_avx2;
extern const struct kv_rows kv_rows_avx512;
#endif

/* kv_rows_all() - the sets this processor can run, best first; ends with NULL */
const struct kv_rows *const *kv_rows_all(void);

#ifdef __cplusplus
}
#endif

#endif
