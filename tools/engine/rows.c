/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One source for every instruction set: ROWS_NAME names the table, ROWS_LANES is how many floats a
 * vector has, ROWS_TILE_X how many rows of x are multiplied at once (what fits in registers).
 *
 * A dot product keeps ROWS_LANES partial sums, lane j summing elements j, j + ROWS_LANES, ... in
 * order; then the upper half of the lanes is added to the lower half until one is left. The
 * compiler may fuse a multiply and an add (-ffp-contract=fast, everywhere alike), never reorder.
 */
#include <string.h>

#include "tools/engine/gguf.h"
#include "tools/engine/rows.h"

#define TILE_W 4 /* rows of w in a tile */

/*
 * UNROLL: loops over a tile must disappear, or its sums don't stay in registers.
 * LOOP: gcc makes 16 scalar steps of such a loop, unless it is told to leave it one.
 */
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#define LOOP
#else
#define UNROLL _Pragma("GCC unroll 8")
#define LOOP   _Pragma("GCC unroll 1")
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(4 * ROWS_LANES)));
typedef int32_t lanes_int __attribute__((vector_size(4 * ROWS_LANES)));
typedef float lanes_4 __attribute__((vector_size(16)));

INLINE lanes load(const float *p)
{
	lanes v;

	memcpy(&v, p, sizeof(v));
	return v;
}

INLINE void store(float *p, lanes v)
{
	memcpy(p, &v, sizeof(v));
}

INLINE float sum_4(lanes_4 v)
{
	return (v[0] + v[2]) + (v[1] + v[3]);
}

#if ROWS_LANES == 4
INLINE float sum(lanes v)
{
	return sum_4(v);
}
#else
INLINE float sum(lanes v)
{
	lanes_4 part[ROWS_LANES / 4];

	memcpy(part, &v, sizeof(v));
#if ROWS_LANES == 16
	part[0] += part[2];
	part[1] += part[3];
#endif
	return sum_4(part[0] + part[1]);
}
#endif

#include "tools/engine/rows_widen.h"

/* nx and nw are constants where this is inlined: the sums live in registers. */
INLINE void tile(const float *w, int nw, const float *x, size_t x_stride, int nx, size_t k,
		 float *out, size_t out_stride, bool add)
{
	lanes acc[ROWS_TILE_X][TILE_W] = {0};

	for (size_t i = 0; i < k; i += ROWS_LANES) {
		lanes wi[TILE_W];

		UNROLL
		for (int r = 0; r < nw; r++)
			wi[r] = load(w + r * k + i);
		UNROLL
		for (int t = 0; t < nx; t++) {
			lanes xi = load(x + t * x_stride + i);

			UNROLL
			for (int r = 0; r < nw; r++)
				acc[t][r] += xi * wi[r];
		}
	}
	UNROLL
	for (int t = 0; t < nx; t++) {
		UNROLL
		for (int r = 0; r < nw; r++) {
			float *to = out + t * out_stride + r;

			*to = add ? *to + sum(acc[t][r]) : sum(acc[t][r]);
		}
	}
}

static void multiply(const float *w, size_t n_w, const float *x, size_t x_stride, size_t n_x,
		     size_t k, float *out, size_t out_stride, bool add)
{
	size_t t = 0, r;

	for (; t + ROWS_TILE_X <= n_x; t += ROWS_TILE_X) {
		for (r = 0; r + TILE_W <= n_w; r += TILE_W)
			tile(w + r * k, TILE_W, x + t * x_stride, x_stride, ROWS_TILE_X, k,
			     out + t * out_stride + r, out_stride, add);
		for (; r < n_w; r++)
			tile(w + r * k, 1, x + t * x_stride, x_stride, ROWS_TILE_X, k,
			     out + t * out_stride + r, out_stride, add);
	}
	for (; t < n_x; t++) {
		for (r = 0; r + TILE_W <= n_w; r += TILE_W)
			tile(w + r * k, TILE_W, x + t * x_stride, x_stride, 1, k,
			     out + t * out_stride + r, out_stride, add);
		for (; r < n_w; r++)
			tile(w + r * k, 1, x + t * x_stride, x_stride, 1, k,
			     out + t * out_stride + r, out_stride, add);
	}
}

static void rms_norm(const float *x, const float *weight, float *out, size_t n, float eps)
{
	lanes squares = {0};
	float scale;

	for (size_t i = 0; i < n; i += ROWS_LANES)
		squares += load(x + i) * load(x + i);
	scale = 1 / __builtin_sqrtf(sum(squares) / n + eps);
	for (size_t i = 0; i < n; i += ROWS_LANES)
		store(out + i, load(x + i) * scale * load(weight + i));
}

/*
 * e^x = 2^n * e^f, x = n ln 2 + f, |f| <= ln 2 / 2; e^f by its Taylor series to f^7: relative error
 * below 3e-7. Inputs are held to +-87, where 2^n is a normal number.
 */
INLINE lanes exponential(lanes x)
{
	static const float taylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1, 1};
	lanes low = (lanes){0} - 87, high = (lanes){0} + 87, n, f, e;
	lanes_int bits;

	x = (lanes)(((lanes_int)x & (x > low)) | ((lanes_int)low & ~(x > low)));
	x = (lanes)(((lanes_int)x & (x < high)) | ((lanes_int)high & ~(x < high)));

	n = x * 1.44269504f + 0x1.8p23f; /* the low bits of the sum are the nearest integer */
	bits = (lanes_int)n << 23;
	n -= 0x1.8p23f;
	f = x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f; /* ln 2 in two parts */

	e = (lanes){0} + 1.0f / 5040;
	for (size_t i = 0; i < sizeof(taylor) / sizeof(taylor[0]); i++)
		e = e * f + taylor[i];
	return (lanes)((lanes_int)e + bits);
}

static void silu_multiply(float *gate, const float *up, size_t n)
{
	for (size_t i = 0; i < n; i += ROWS_LANES) {
		lanes g = load(gate + i);

		store(gate + i, g / (1 + exponential(-g)) * load(up + i));
	}
}

/* (1 + tanh(u)) / 2 = 1 / (1 + e^-2u) */
static void gelu_multiply(float *gate, const float *up, size_t n)
{
	for (size_t i = 0; i < n; i += ROWS_LANES) {
		lanes g = load(gate + i);
		lanes u = g * (1 + 0.044715f * g * g) * 0.7978845608f; /* sqrt(2 / pi) */

		store(gate + i, g / (1 + exponential(-2 * u)) * load(up + i));
	}
}

const struct kv_rows ROWS_NAME = {
	.name = ROWS_TEXT,
	.widen = widen,
	.multiply = multiply,
	.rms_norm = rms_norm,
	.silu_multiply = silu_multiply,
	.gelu_multiply = gelu_multiply,
};
