/* SPDX-License-Identifier: Apache-2.0 */
/* The backends of a build with CUDA; backends_host.c is the other one of the pair. */
#include "kernels/attention.h"

#define WGMMA_FEATURES                                                                          \
	(KV_ATTN_BIT(WINDOW) | KV_ATTN_BIT(NON_CAUSAL) | KV_ATTN_BIT(CONNECTOR) |               \
	 KV_ATTN_BIT(DEVICE_LENGTHS) | KV_ATTN_BIT(SOFTCAP) | KV_ATTN_BIT(LSE) |                \
	 KV_ATTN_BIT(SINKS) | KV_ATTN_BIT(LSE_WITH_SINK) | KV_ATTN_BIT(STRIDES) |               \
	 KV_ATTN_BIT(HEAD_SCALES) | KV_ATTN_BIT(SEQ_CAUSAL) | KV_ATTN_BIT(KEY_RANGE))

const struct kv_attn_backend kv_attn_cuda = {
	.name = "cuda",
	.device = KV_DEVICE_CUDA,
	.caps = {.features = KV_ATTN_EVERYTHING,
		 .dtypes = 1u << KV_F32 | 1u << KV_F16 | 1u << KV_BF16,
		 .kv_dtypes = KV_ATTN_ALL_TYPES,
		 .kinds = 1u << KV_KIND_DECODER | 1u << KV_KIND_ENCODER_ONLY | 1u << KV_KIND_CROSS,
		 .head_dim_max = 256,
		 .graph = KV_GRAPH_ALWAYS},
	.refuse = kv_attention_cuda_refuse,
	.attention = kv_attention_cuda,
	.write = kv_write_cuda,
	.copy = kv_copy_cuda,
};

const struct kv_attn_backend kv_attn_split = {
	.name = "split",
	.device = KV_DEVICE_CUDA,
	.caps = {.features = KV_ATTN_EVERYTHING,
		 .dtypes = 1u << KV_F16 | 1u << KV_BF16,
		 .kv_dtypes = 1u | 1u << KV_F8_E4M3,
		 .kinds = 1u << KV_KIND_DECODER | 1u << KV_KIND_ENCODER_ONLY | 1u << KV_KIND_CROSS,
		 .head_dims = {64, 80, 96, 112, 128, 192, 256},
		 .block_tokens = {16},
		 .capability_min = 90,
		 .max_query_rows = 64,
		 .graph = KV_GRAPH_ALWAYS,
		 .same_head_dims = 1,
		 .same_kv_dtypes = 1},
	.refuse = kv_attention_split_refuse,
	.workspace_bytes = kv_attention_split_workspace,
	.attention = kv_attention_split,
	.write = kv_write_cuda,
	.copy = kv_copy_cuda,
};

const struct kv_attn_backend kv_attn_wgmma = {
	.name = "wgmma",
	.device = KV_DEVICE_CUDA,
	.caps = {.features = WGMMA_FEATURES,
		 .dtypes = 1u << KV_F16 | 1u << KV_BF16,
		 .kv_dtypes = 1u | 1u << KV_F8_E4M3,
		 .kinds = 1u << KV_KIND_DECODER | 1u << KV_KIND_ENCODER_ONLY | 1u << KV_KIND_CROSS,
		 .head_dim_max = 256,
		 .head_dim_multiple = 8,
		 .block_tokens = {16},
		 .capability_min = 90,
		 .capability_max = 90,
		 .graph = KV_GRAPH_ALWAYS,
		 .same_kv_dtypes = 1},
	.refuse = kv_attention_prefill_refuse,
	.workspace_bytes = kv_attention_prefill_workspace,
	.attention = kv_attention_prefill,
	.write = kv_write_cuda,
	.copy = kv_copy_cuda,
};

#define LATENT_FEATURES                                                                         \
	(KV_ATTN_BIT(MLA) | KV_ATTN_BIT(NON_CAUSAL) | KV_ATTN_BIT(NON_CAUSAL_CP) |              \
	 KV_ATTN_BIT(CONNECTOR) | KV_ATTN_BIT(DEVICE_LENGTHS) | KV_ATTN_BIT(DECODE_CP) |        \
	 KV_ATTN_BIT(KEY_RANGE) | KV_ATTN_BIT(LSE) | KV_ATTN_BIT(STRIDES) | KV_ATTN_BIT(OUT_DTYPE))

const struct kv_attn_backend kv_attn_mla = {
	.name = "mla",
	.device = KV_DEVICE_CUDA,
	.caps = {.features = LATENT_FEATURES,
		 .dtypes = 1u << KV_F16 | 1u << KV_BF16,
		 .kv_dtypes = 1u | 1u << KV_F8_E4M3 | 1u << KV_BYTES,
		 .kinds = 1u << KV_KIND_DECODER,
		 .head_dims = {576, 512},
		 .block_tokens = {16},
		 .capability_min = 90,
		 .capability_max = 90,
		 .graph = KV_GRAPH_ALWAYS},
	.refuse = kv_mla_wgmma_refuse,
	.workspace_bytes = kv_mla_wgmma_workspace,
	.attention = kv_mla_wgmma,
	.write = kv_write_cuda,
	.copy = kv_copy_cuda,
};

const struct kv_attn_backend kv_attn_mla_any = {
	.name = "mla_any",
	.device = KV_DEVICE_CUDA,
	.caps = {.features = LATENT_FEATURES,
		 .dtypes = 1u << KV_F32 | 1u << KV_F16 | 1u << KV_BF16,
		 .kv_dtypes = KV_ATTN_ALL_TYPES | 1u << KV_BYTES,
		 .kinds = 1u << KV_KIND_DECODER,
		 .head_dim_max = 1024,
		 .head_dim_multiple = 4,
		 .graph = KV_GRAPH_ALWAYS},
	.refuse = kv_mla_any_refuse,
	.workspace_bytes = kv_mla_any_workspace,
	.attention = kv_mla_any,
	.write = kv_write_cuda,
	.copy = kv_copy_cuda,
};

const struct kv_attn_backend *const kv_attn_backends[] = {
	&kv_attn_split, &kv_attn_wgmma, &kv_attn_cuda, &kv_attn_mla, &kv_attn_mla_any, &kv_attn_cpu,
	&kv_attn_ref, NULL};
