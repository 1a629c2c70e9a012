/* SPDX-License-Identifier: Apache-2.0 */
/* The backends of a build with CUDA; backends_host.c is the other one of the pair. */
#include "kernels/attention.h"

const struct kv_attn_backend kv_attn_cuda = {
	.name = "cuda",
	.device = KV_DEVICE_CUDA,
	.can_run = kv_attention_cuda_can_run,
	.attention = kv_attention_cuda,
	.write = kv_write_cuda,
	.copy = kv_copy_cuda,
};

const struct kv_attn_backend kv_attn_split = {
	.name = "split",
	.device = KV_DEVICE_CUDA,
	.can_run = kv_attention_split_can_run,
	.workspace_bytes = kv_attention_split_workspace,
	.attention = kv_attention_split,
	.write = kv_write_cuda,
	.copy = kv_copy_cuda,
};

const struct kv_attn_backend *const kv_attn_backends[] = {&kv_attn_split, &kv_attn_cuda,
							  &kv_attn_cpu, &kv_attn_ref, NULL};
