/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/attention_prefill.cuh"

int kv_prefill_launch_f8(const struct kv_prefill_params *params, int columns, int n_blocks,
			 void *stream)
{
	return launch_columns<KV_F8_E4M3>(params, columns, n_blocks, stream);
}
