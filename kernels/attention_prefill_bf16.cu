/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/attention_prefill.cuh"

int kv_prefill_launch_bf16(const struct kv_prefill_params *params, int columns, int n_blocks,
			 void *stream)
{
	return launch_columns<KV_BF16>(params, columns, n_blocks, stream);
}
