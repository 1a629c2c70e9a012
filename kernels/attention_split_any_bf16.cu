/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/attention_split.cuh"

int kv_split_launch_any_bf16(const struct kv_split_params *params,
			     const struct kv_split_choice *choice, void *stream)
{
	switch (choice->head_dim) {
	case 64:
		return launch_any<KV_BF16, 64>(params, choice, stream);
	case 80:
		return launch_any<KV_BF16, 80>(params, choice, stream);
	case 96:
		return launch_any<KV_BF16, 96>(params, choice, stream);
	case 112:
		return launch_any<KV_BF16, 112>(params, choice, stream);
	case 128:
		return launch_any<KV_BF16, 128>(params, choice, stream);
	case 192:
		return launch_any<KV_BF16, 192>(params, choice, stream);
	default:
		return launch_any<KV_BF16, 256>(params, choice, stream);
	}
}
