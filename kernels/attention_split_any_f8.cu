/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/attention_split.cuh"

int kv_split_launch_any_f8(const struct kv_split_params *params,
			     const struct kv_split_choice *choice, void *stream)
{
	switch (choice->head_dim) {
	case 64:
		return launch_any<KV_F8_E4M3, 64>(params, choice, stream);
	case 96:
		return launch_any<KV_F8_E4M3, 96>(params, choice, stream);
	case 128:
		return launch_any<KV_F8_E4M3, 128>(params, choice, stream);
	case 192:
		return launch_any<KV_F8_E4M3, 192>(params, choice, stream);
	default:
		return launch_any<KV_F8_E4M3, 256>(params, choice, stream);
	}
}
