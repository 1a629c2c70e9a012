/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/attention_split.cuh"

int kv_split_launch_f8(const struct kv_split_params *params, int head_dim, int n_row_tiles,
		       int n_heads, int n_parts, void *stream)
{
	if (head_dim == 64)
		return launch_dim<KV_F8_E4M3, 64>(params, n_row_tiles, n_heads, n_parts, stream);
	return launch_dim<KV_F8_E4M3, 128>(params, n_row_tiles, n_heads, n_parts, stream);
}
