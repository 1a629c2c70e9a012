/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/attention_split.cuh"

int kv_split_launch_bf16(const struct kv_split_params *params, int head_dim, int n_row_tiles,
		       int n_parts, void *stream)
{
	switch (head_dim) {
	case 64:
		return launch_rows<KV_BF16, 64>(params, n_row_tiles, n_parts, stream);
	default:
		return launch_rows<KV_BF16, 128>(params, n_row_tiles, n_parts, stream);
	}
}
