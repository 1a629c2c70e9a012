/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writing K and V at slots on a GPU.
 *
 *	view[slot / P][slot % P][h][:] = from[t][h][:]            of the same type: bit for bit
 *	                               = round(from[t][h][:] / scale)  else, by kernels/dtype.h
 *
 * Work: 2^lane_bits threads take one row (t, h), in units of 16 bytes where types are equal and
 * rows aligned, else element by element. blockIdx.y: 0 is K, 1 is V.
 */
#include "kernels/attention.h"
#include "kernels/device/launch.cuh"
#include "kernels/view.h"

#define THREADS 256

struct write_one {
	const char *from;
	int64_t stride; /* bytes from token to token */
	struct kv_view view;
	int32_t units;	   /* of a row: 16-byte pieces, or elements */
	int32_t lane_bits; /* threads of a row: 2^lane_bits */
	bool wide;
};

struct write_params {
	struct write_one one[2];
	const int64_t *slots;
	int64_t n_tokens;
	int32_t dtype;
	int32_t element; /* its bytes */
};

__global__ void __launch_bounds__(THREADS) write_rows(struct write_params p)
{
	const struct write_one &w = p.one[blockIdx.y];
	int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
	int64_t row = i >> w.lane_bits;
	int lanes = 1 << w.lane_bits;
	int64_t t = row / w.view.n_heads, h = row % w.view.n_heads;
	int64_t slot;
	const char *from;
	char *to;

	if (t >= p.n_tokens)
		return;
	slot = p.slots[t];
	if (slot < 0)
		return;
	from = w.from + t * w.stride + h * w.view.head_dim * p.element;
	to = (char *)w.view.base +
	     kv_view_offset(&w.view, slot / w.view.block_tokens, slot % w.view.block_tokens, h);
	for (int u = (int)(i & (lanes - 1)); u < w.units; u += lanes) {
		if (w.wide)
			((uint4 *)to)[u] = ((const uint4 *)from)[u];
		else if (p.dtype == w.view.dtype && p.element == 2)
			((uint16_t *)to)[u] = ((const uint16_t *)from)[u];
		else if (p.dtype == w.view.dtype)
			((uint32_t *)to)[u] = ((const uint32_t *)from)[u];
		else
			kv_element_store(to, u, w.view.dtype,
					 kv_element_load(from, u, p.dtype) / w.view.scale);
	}
}

static struct write_one describe(const struct kv_write_args *args, const struct kv_view *view,
				 const void *from, int64_t stride)
{
	int64_t element = (int64_t)kv_dtype_bytes(args->dtype);
	struct write_one w = {};
	uint64_t bits = (uint64_t)(uintptr_t)view->base | (uint64_t)view->block_stride |
			(uint64_t)view->token_stride | (uint64_t)view->head_stride |
			(uint64_t)kv_view_row_bytes(view) | (uint64_t)(uintptr_t)from |
			(uint64_t)(stride * element);

	w.from = (const char *)from;
	w.stride = stride * element;
	w.view = *view;
	w.wide = view->dtype == args->dtype && bits % 16 == 0;
	w.units = w.wide ? (int32_t)(kv_view_row_bytes(view) / 16) : view->head_dim;
	while ((1 << w.lane_bits) < w.units && w.lane_bits < 5)
		w.lane_bits++;
	return w;
}

extern "C" int kv_write_cuda(const struct kv_write_args *args)
{
	struct write_params p = {};
	int lane_bits;
	int64_t threads, blocks;

	p.one[0] = describe(args, &args->k, args->key, args->key_stride);
	p.one[1] = describe(args, &args->v, args->value, args->value_stride);
	p.slots = args->slots;
	p.n_tokens = args->n_tokens;
	p.dtype = args->dtype;
	p.element = (int32_t)kv_dtype_bytes(args->dtype);
	lane_bits =
		p.one[0].lane_bits > p.one[1].lane_bits ? p.one[0].lane_bits : p.one[1].lane_bits;
	threads = (args->n_tokens * args->k.n_heads) << lane_bits;
	blocks = (threads + THREADS - 1) / THREADS;
	if (blocks > INT32_MAX)
		return kv_error(-ENOTSUP, "n_tokens: %lld given, too many for one launch of cuda",
				(long long)args->n_tokens);
	return kv_launch("write", write_rows, dim3((unsigned)blocks, 2), THREADS, 0, args->stream,
			 p);
}
