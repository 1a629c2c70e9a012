/* SPDX-License-Identifier: Apache-2.0 */
/* The backends of a build with CUDA; gdn_backends_host.c is the other one of the pair. */
#include "kernels/gdn.h"

const struct kv_state_backend kv_state_cuda = {
	.name = "cuda",
	.device = KV_DEVICE_CUDA,
	.compare = kv_recur_step_compare,
	.run = kv_recur_step,
	.convolve = kv_conv1d_cuda,
};

const struct kv_state_backend kv_state_chunk = {
	.name = "chunk",
	.device = KV_DEVICE_CUDA,
	.compare = kv_recur_chunk_compare,
	.workspace_bytes = kv_recur_chunk_workspace,
	.run = kv_recur_chunk,
	.convolve = kv_conv1d_cuda,
};

const struct kv_state_backend *const kv_state_backends[] = {&kv_state_chunk, &kv_state_cuda,
							    &kv_state_ref, NULL};
