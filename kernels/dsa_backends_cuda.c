/* SPDX-License-Identifier: Apache-2.0 */
/* The backends of a build with CUDA; dsa_backends_host.c is the other one of the pair. */
#include "kernels/dsa.h"

/* By the matrix units of sm_90a. */
static const struct kv_dsa_backend dsa_wgmma = {
	.name = "wgmma",
	.device = KV_DEVICE_CUDA,
	.score = kv_index_score_wgmma,
	.attend = kv_sparse_mla_wgmma,
	.attend_workspace = kv_sparse_mla_wgmma_workspace,
};

/* Any sizes and types, on any device. */
static const struct kv_dsa_backend dsa_cuda = {
	.name = "cuda",
	.device = KV_DEVICE_CUDA,
	.write = kv_index_write_cuda,
	.score = kv_index_score_cuda,
	.select = kv_index_select_cuda,
	.attend = kv_sparse_mla_cuda,
};

const struct kv_dsa_backend *const kv_dsa_backends[] = {&dsa_wgmma, &dsa_cuda, &kv_dsa_ref, NULL};
