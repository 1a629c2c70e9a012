/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/attention_split.cuh"

int kv_split_launch_f16(const struct kv_split_params *params, const struct kv_split_choice *choice,
			 void *stream)
{
	if (choice->head_dim == 64)
		return launch_dim<KV_F16, 64>(params, choice, stream);
	return launch_dim<KV_F16, 128>(params, choice, stream);
}
