/* SPDX-License-Identifier: Apache-2.0 */
/* Reference calculators: bytes of types, state tensors and KV cells. */
#include <errno.h>
#include <string.h>

#include "alloc/compat.h"
#include "include/internal/error.h"

const char *kv_fault_name(int fault)
{
	static const char *const names[] = {"",
#define KV_FAULT_ITEM(name) #name,
					    KV_FAULTS(KV_FAULT_ITEM)
#undef KV_FAULT_ITEM
	};

	if (fault < 0 || (size_t)fault >= sizeof(names) / sizeof(names[0]))
		return "";
	return names[fault];
}

int64_t kv_compat_itemsize(const char *dtype)
{
	static const struct {
		const char *name;
		int64_t bytes;
	} types[] = {
		{"float32", 4}, {"int32", 4}, {"bfloat16", 2}, {"float16", 2}, {"float8_e4m3fn", 1},
		{"uint8", 1},	{"int8", 1},  {"float64", 8},  {"int64", 8},
	};

	for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
		if (!strcmp(types[i].name, dtype))
			return types[i].bytes;
	return 0;
}

int kv_compat_kv_dtype(const char *option, const char **ret_dtype)
{
	if (!strcmp(option, "auto") || !strcmp(option, "bfloat16"))
		*ret_dtype = "bfloat16";
	else if (!strcmp(option, "fp8") || !strcmp(option, "fp8_e4m3"))
		*ret_dtype = "float8_e4m3fn";
	else
		return kv_error(KV_FAULT_BAD_KV_DTYPE,
				"kv_cache_dtype: '%s' given; auto, bfloat16, fp8, fp8_e4m3 exist",
				option);
	return 0;
}

int64_t kv_compat_shape_bytes(const int64_t *shape, size_t n_dims, int64_t itemsize)
{
	int64_t bytes = itemsize;

	for (size_t i = 0; i < n_dims; i++)
		bytes *= shape[i];
	return bytes;
}

int kv_compat_gdn_state(const struct kv_compat_gdn *gdn, struct kv_compat_state *ret_state)
{
	int64_t channels =
		2 * gdn->key_head_dim * gdn->n_key_heads + gdn->value_head_dim * gdn->n_value_heads;
	struct kv_compat_state s;

	if (gdn->attn_tp < 1 || channels % gdn->attn_tp || gdn->n_value_heads % gdn->attn_tp)
		return kv_error(KV_FAULT_NOT_DIVISIBLE,
				"attn_tp: %lld divides neither %lld channels nor %lld value heads",
				(long long)gdn->attn_tp, (long long)channels,
				(long long)gdn->n_value_heads);

	s.conv_shape[0] = channels / gdn->attn_tp;
	s.conv_shape[1] = gdn->conv_kernel - 1;
	s.ssm_shape[0] = gdn->n_value_heads / gdn->attn_tp;
	s.ssm_shape[1] = gdn->key_head_dim;
	s.ssm_shape[2] = gdn->value_head_dim;
	s.conv_bytes = kv_compat_shape_bytes(s.conv_shape, 2, gdn->conv_itemsize);
	s.ssm_bytes = kv_compat_shape_bytes(s.ssm_shape, 3, gdn->ssm_itemsize);
	*ret_state = s;
	return 0;
}

/* D: 8 heads on 3 ranks count as 2 each; our planner refuses what neither divides. */
int64_t kv_compat_local_heads(int64_t n_kv_heads, int64_t attn_tp)
{
	return kv_max64(kv_floor_div(n_kv_heads, attn_tp), 1);
}

int64_t kv_compat_mha_cell(int64_t n_kv_heads, int64_t head_dim, int64_t attn_tp, int64_t itemsize)
{
	return kv_compat_local_heads(n_kv_heads, attn_tp) * head_dim * 2 * itemsize;
}

int64_t kv_compat_mla_cell(int64_t lora, int64_t rope, int64_t itemsize, bool per_token_head,
			   int64_t model_itemsize)
{
	if (per_token_head)
		return lora * itemsize + rope * model_itemsize + 4; /* one f32 scale a token */
	return (lora + rope) * itemsize;
}

int kv_compat_dsa_index_row(int64_t index_head_dim, int64_t *ret_bytes)
{
	if (index_head_dim <= 0 || index_head_dim % 128)
		return kv_error(KV_FAULT_BAD_INDEX_HEAD_DIM,
				"index_head_dim: %lld given, a positive multiple of 128 needed",
				(long long)index_head_dim);
	*ret_bytes = index_head_dim + index_head_dim / 128 * 4; /* fp8 values, one f32 per 128 */
	return 0;
}
