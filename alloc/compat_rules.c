/* SPDX-License-Identifier: Apache-2.0 */
/* Reference calculators: small rules. */
#include <string.h>

#include "alloc/compat_rules.h"
#include "include/internal/error.h"

struct kv_compat_class kv_compat_classify(const char *const *architectures, size_t n)
{
	static const char *const hybrids[] = {
		"Qwen3_5ForConditionalGeneration",
		"Qwen3_5MoeForConditionalGeneration",
		"Qwen3_5ForConditionalGenerationNextN",
		"Qwen3_5MoeForConditionalGenerationNextN",
	};
	struct kv_compat_class class = {0};

	for (size_t i = 0; i < n; i++)
		for (size_t k = 0; k < sizeof(hybrids) / sizeof(hybrids[0]); k++)
			class.hybrid |= !strcmp(architectures[i], hybrids[k]);
	class.v4 = n && (!strcmp(architectures[0], "DeepseekV4ForCausalLM") ||
			 !strcmp(architectures[0], "DeepseekV4ForCausalLMNextN"));
	return class;
}

const char *kv_compat_forced_backend(struct kv_compat_class class, const char *name)
{
	if (class.v4)
		return "deepseek_v4";
	if (class.hybrid)
		return "hybrid_linear_attn";
	return name && !strcmp(name, "hybrid_linear_attn") ? NULL : name;
}

int64_t kv_compat_default_block(struct kv_compat_class class, int64_t block_size)
{
	return class.v4 && block_size == 64 ? 256 : block_size;
}

int kv_compat_check_page(const char *backend, int64_t page_size, const char *kv_dtype)
{
	bool tokenspeed = !strcmp(backend, "tokenspeed_mla");

	if ((tokenspeed || !strcmp(backend, "trtllm_mla")) && page_size != 32 && page_size != 64)
		return kv_error(KV_FAULT_BAD_PAGE_SIZE, "block_size: %lld given, %s reads 32 or 64",
				(long long)page_size, backend);
	if (!strcmp(backend, "dsa") && page_size != 64)
		return kv_error(KV_FAULT_BAD_PAGE_SIZE, "block_size: %lld given, %s reads 64",
				(long long)page_size, backend);
	if (tokenspeed && strcmp(kv_dtype, "float8_e4m3fn"))
		return kv_error(KV_FAULT_BAD_KV_DTYPE,
				"kv_cache_dtype: %s given, %s reads fp8_e4m3", kv_dtype, backend);
	return 0;
}

int kv_compat_check_dsa_dtype(const char *kv_option, bool fp8)
{
	const char *dtype;
	int r;

	r = kv_compat_kv_dtype(kv_option, &dtype);
	if (r)
		return r;
	if (kv_compat_itemsize(dtype) == 1 && !fp8)
		return kv_error(
			KV_FAULT_DSA_FP8_PLATFORM,
			"kv_cache_dtype: %s given, sparse attention has no such kernel here",
			kv_option);
	return 0;
}

bool kv_compat_fp4_indexer(const bool *server, const bool *config)
{
	return server ? *server : config && *config;
}

static int check_layer(size_t n_layers, size_t layer)
{
	if (layer < n_layers)
		return 0;
	return kv_error(KV_FAULT_OUT_OF_RANGE, "layer: %zu given, the pool has %zu", layer,
			n_layers);
}

int kv_compat_layer_kv(const struct kv_compat_mha_out *pool, size_t n_layers, size_t layer,
		       int64_t *ret_buffer)
{
	int r;

	r = check_layer(n_layers, layer);
	if (r)
		return r;
	if (pool->k_buffer[layer] < 0)
		return kv_error(KV_FAULT_NO_KV_ON_STATE_LAYER, "layer %zu: has a state, no K and V",
				layer);
	*ret_buffer = pool->k_buffer[layer];
	return 0;
}

int kv_compat_layer_state(const struct kv_compat_mha_out *pool, size_t n_layers, size_t layer,
			  int64_t *ret_pair)
{
	int64_t pair = 0;
	int r;

	r = check_layer(n_layers, layer);
	if (r)
		return r;
	if (pool->k_buffer[layer] >= 0)
		return kv_error(KV_FAULT_NOT_A_STATE_LAYER, "layer %zu: has K and V, no state",
				layer);
	for (size_t l = 0; l < layer; l++)
		pair += pool->k_buffer[l] < 0;
	*ret_pair = pair;
	return 0;
}

int kv_compat_transfer_order(const struct kv_compat_mha_out *pool, size_t n_layers, size_t layer,
			     int64_t ret_index[2])
{
	int r;

	r = check_layer(n_layers, layer);
	if (r)
		return r;
	if (pool->n_state_pairs)
		return kv_error(
			KV_FAULT_PD_ON_FLAT_GDN,
			"transfer: a pool with states in its blocks has no list of K and V");
	ret_index[0] = (int64_t)layer;
	ret_index[1] = (int64_t)(n_layers + layer);
	return 0;
}

int kv_compat_map_layer(const int64_t *layers, size_t n, int64_t layer, int64_t *ret_layer)
{
	for (size_t i = 0; i < n; i++)
		if (layers[i] == layer) {
			*ret_layer = (int64_t)i;
			return 0;
		}
	return kv_error(KV_FAULT_OUT_OF_RANGE, "layer: %lld has no place in the pool",
			(long long)layer);
}

void kv_compat_copy_tile(int64_t row_bytes, int64_t *ret_tile, int *ret_warps)
{
	*ret_tile = row_bytes >= 8192 ? 512 : row_bytes >= 4096 ? 256 : 128;
	*ret_warps = *ret_tile == 512 ? 8 : 4;
}
