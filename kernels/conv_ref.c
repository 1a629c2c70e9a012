/* SPDX-License-Identifier: Apache-2.0 */
/* Causal convolution in double, one element at a time: the definition of right. */
#include "kernels/gdn_ref.h"

/* Input @at of a lane, of which those before its first token stand in @history. */
static double input(const struct kv_conv1d_args *p, const struct kv_lane *lane, int64_t at,
		    int64_t c, const float *history)
{
	if (at < 0)
		return (double)history[p->width - 1 + at];
	return (double)kv_element_load(p->x, (lane->start + at) * p->x_stride + c, p->dtype);
}

/* The state after @n tokens of the lane: its inputs n - width + 1 .. n - 1. */
static void store(const struct kv_conv1d_args *p, const struct kv_lane *lane, int64_t n, int64_t c,
		  const float *history, int32_t row)
{
	if (kv_row_is_null(&p->batch, row))
		return;
	for (int64_t j = 0; j < p->width - 1; j++)
		kv_element_store((char *)p->state.base + kv_conv_offset(&p->state, row, j, c), 0,
				 p->state.dtype,
				 (float)input(p, lane, n - p->width + 1 + j, c, history));
}

static void run_channel(const struct kv_conv1d_args *p, int64_t b, const struct kv_lane *lane,
			int64_t c)
{
	float history[KV_MAX_CONV_WIDTH] = {0};

	for (int64_t j = 0; j < p->width - 1 && !lane->fresh; j++)
		history[j] = kv_element_load((const char *)p->state.base +
						     kv_conv_offset(&p->state, lane->read, j, c),
					     0, p->state.dtype);
	for (int64_t i = 0; i < lane->len; i++) {
		double y = p->bias ? (double)kv_element_load(p->bias, c, p->dtype) : 0;

		for (int64_t j = 0; j < p->width; j++)
			y += (double)kv_element_load(p->weight, c * p->width + j, p->dtype) *
			     input(p, lane, i - p->width + 1 + j, c, history);
		if (p->activation == KV_ACTIVATION_SILU)
			y /= 1 + exp(-y);
		kv_element_store(p->out, (lane->start + i) * p->out_stride + c, p->dtype, (float)y);
		store(p, lane, i + 1, c, history,
		      kv_checkpoint_row(&p->batch, b, lane->computed + i + 1));
		store(p, lane, i + 1, c, history, kv_step_row(&p->batch, b, i));
	}
	store(p, lane, lane->len, c, history, lane->write);
}

int kv_conv1d_ref(const struct kv_conv1d_args *p)
{
	for (int64_t b = 0; b < p->batch.n_seqs; b++) {
		struct kv_lane lane = kv_lane_get(&p->batch, b);
		size_t element = kv_dtype_bytes(p->dtype);

		for (int64_t i = 0; i < lane.len && lane.pad; i++)
			memset((char *)p->out +
				       (size_t)((lane.start + i) * p->out_stride) * element,
			       0, (size_t)p->n_channels * element);
		for (int64_t c = 0; c < p->n_channels && !lane.pad && lane.len > 0; c++)
			run_channel(p, b, &lane, c);
	}
	return 0;
}
