/* SPDX-License-Identifier: Apache-2.0 */
/* Reference calculators: specs of layers, their pages, strides, and block sizes of kernels. */
#include <string.h>

#include "alloc/compat_vllm.h"
#include "include/internal/error.h"

const char *kv_vspec_name(enum kv_vspec_kind kind)
{
	static const char *const names[] = {
		"full_attention",
		"mla_attention",
		"sliding_window",
		"sliding_window_mla",
		"chunked_local_attention",
		"mamba",
		"cross_attention",
		"encoder_only_attention",
		"sink_full_attention",
		"rswa",
		"hidden_state",
	};

	return names[kind];
}

static bool is_mla(const struct kv_vspec *s)
{
	return s->kind == KV_VSPEC_MLA || s->kind == KV_VSPEC_SLIDING_MLA ||
	       s->kind == KV_VSPEC_HIDDEN;
}

static int64_t round_up(int64_t x, int64_t unit)
{
	return kv_ceil_div(x, unit) * unit;
}

int64_t kv_vspec_states(const struct kv_vspec *s)
{
	if (s->kind == KV_VSPEC_MAMBA || s->tokens_per_state <= 0)
		return 1;
	return kv_floor_div(s->block * s->per, s->tokens_per_state);
}

int64_t kv_vspec_slots(const struct kv_vspec *s)
{
	return s->kind == KV_VSPEC_MAMBA ? 1 : s->head_slots ? s->head_slots : s->n_heads;
}

int64_t kv_vspec_content(const struct kv_vspec *s)
{
	if (s->kind == KV_VSPEC_MAMBA)
		return s->state_bytes;
	return s->content ? s->content : (s->head + s->head_v) * s->itemsize;
}

int64_t kv_vspec_dense(const struct kv_vspec *s)
{
	return kv_vspec_slots(s) * kv_vspec_states(s) * kv_vspec_content(s);
}

int64_t kv_vspec_page(const struct kv_vspec *s)
{
	return s->padded ? s->padded : kv_vspec_dense(s);
}

int kv_vspec_init(struct kv_vspec *s)
{
	if (!s->per)
		s->per = 1;
	if (!s->tokens_per_state)
		s->tokens_per_state = 1;
	if (s->head_v < 0)
		s->head_v = is_mla(s) ? 0 : s->head;
	if (s->kind == KV_VSPEC_SLIDING_MLA && *s->version && strcmp(s->version, "deepseek_v4"))
		return kv_error(KV_FAULT_ASSERTION, "model_version: '%s' is not known", s->version);
	if (is_mla(s) && s->alignment && !s->padded &&
	    round_up(kv_vspec_dense(s), s->alignment) != kv_vspec_dense(s))
		s->padded = round_up(kv_vspec_dense(s), s->alignment);
	if (s->padded && s->padded < kv_vspec_dense(s))
		return kv_error(KV_FAULT_ASSERTION, "page_size_padded: %lld given, %lld needed",
				(long long)s->padded, (long long)kv_vspec_dense(s));
	return 0;
}

int64_t kv_vspec_admission(const struct kv_vspec *s, const struct kv_vconfig *c)
{
	if (s->kind == KV_VSPEC_SLIDING || s->kind == KV_VSPEC_SLIDING_MLA)
		return kv_ceil_div(kv_min64(s->window - 1 + s->extra + c->in_flight, c->max_len),
				   s->block) +
		       1;
	if (s->kind == KV_VSPEC_CHUNKED)
		return kv_ceil_div(kv_min64(s->chunk + c->in_flight, c->max_len), s->block);
	return 0;
}

/* Blocks of a request of the maximum length. */
static int max_request(const struct kv_vspec *s, const struct kv_vconfig *c, int64_t *ret_blocks)
{
	switch (s->kind) {
	case KV_VSPEC_SLIDING:
	case KV_VSPEC_SLIDING_MLA:
		if (c->dcp > 1)
			return kv_error(KV_FAULT_ASSERTION, "windows can't be split over ranks");
		*ret_blocks = kv_vspec_admission(s, c);
		return 0;
	case KV_VSPEC_CHUNKED:
		*ret_blocks = kv_vspec_admission(s, c);
		return 0;
	case KV_VSPEC_MAMBA:
		if (!strcmp(c->mode, "all"))
			*ret_blocks = kv_ceil_div(c->max_len, s->block) + s->n_spec;
		else if (!strcmp(c->mode, "align"))
			*ret_blocks = 2 + s->n_spec + s->n_checkpoints;
		else
			*ret_blocks = 1 + s->n_spec;
		return 0;
	case KV_VSPEC_CROSS:
		*ret_blocks = kv_ceil_div(c->encoder, s->block);
		return 0;
	case KV_VSPEC_ENCODER:
		*ret_blocks = 0;
		return 0;
	default:
		*ret_blocks = kv_ceil_div(kv_ceil_div(c->max_len, c->dcp), s->block);
		return 0;
	}
}

int kv_vspec_max_bytes(const struct kv_vspec *s, const struct kv_vconfig *c, int64_t *ret_bytes)
{
	int64_t blocks;
	int r;

	r = max_request(s, c, &blocks);
	if (r)
		return r;
	*ret_bytes = blocks * kv_vspec_page(s);
	return 0;
}

int kv_vspec_max_blocks(const struct kv_vspec *s, const struct kv_vconfig *c, int64_t *ret_blocks)
{
	if (s->kind != KV_VSPEC_MAMBA) {
		*ret_blocks = kv_ceil_div(c->max_len, s->block * c->dcp);
		return 0;
	}
	if (!strcmp(c->mode, "align")) {
		*ret_blocks = kv_ceil_div(c->max_len, s->block) + s->n_spec;
		return 0;
	}
	return max_request(s, c, ret_blocks);
}

int kv_vspec_strides(const struct kv_vspec *s, const char *layout, int64_t n_layers,
		     int64_t n_blocks, int64_t fixed_layer, int64_t fixed_block,
		     int64_t ret_strides[5])
{
	static const char axes[] = "LBHNC";
	const int64_t shape[5] = {n_layers, n_blocks, kv_vspec_slots(s), kv_vspec_states(s),
				  kv_vspec_content(s)};
	int64_t product = 1;

	/* C counts bytes, so its stride is 1. */
	for (int i = 4; i >= 0; i--) {
		int axis = (int)(strchr(axes, layout[i]) - axes);

		/* Outside of a page only L and B are left: there the padding goes. */
		if (s->padded && axis < 2 && product == kv_vspec_dense(s) && product < s->padded)
			product = s->padded;
		if (axis == 0 && fixed_layer)
			product = fixed_layer;
		ret_strides[axis] = product;
		product *= shape[axis];
	}
	if (s->padded && s->padded != kv_vspec_dense(s)) {
		bool outside = false;

		for (int i = 4; i >= 0; i--) {
			int axis = (int)(strchr(axes, layout[i]) - axes);

			outside |= axis < 2 && shape[axis] != 1;
			if (outside && axis >= 2 && shape[axis] != 1)
				return kv_error(KV_FAULT_ASSERTION,
						"layout %s: a page is not in one piece, and padded",
						layout);
		}
	}
	if (fixed_block)
		ret_strides[1] = fixed_block;
	return 0;
}

int kv_vspec_kernel_view(const struct kv_vspec *s, const char *layout, int64_t n_blocks,
			 int64_t kernel_block, const int64_t strides[5], int64_t ret_shape[4],
			 int64_t ret_strides[5])
{
	struct kv_vspec small = *s;
	int64_t ratio;
	int r;

	if (kernel_block <= 0 || s->block % kernel_block)
		return kv_error(KV_FAULT_ASSERTION, "kernel block: %lld does not divide %lld",
				(long long)kernel_block, (long long)s->block);
	ratio = s->block / kernel_block;
	if (ratio > 1 && (strides[1] != kv_vspec_dense(s) || kv_vspec_page(s) != kv_vspec_dense(s)))
		return kv_error(
			KV_FAULT_BAD_CONFIG,
			"kernel block: pages of layout %s are not dense; a smaller block or "
			"a layout with layers outermost is needed",
			layout);
	small.block = kernel_block;
	r = kv_vspec_strides(&small, layout, 1, n_blocks * ratio, strides[0], 0, ret_strides);
	if (r)
		return r;
	ret_strides[1] = strides[1] / ratio;
	ret_shape[0] = n_blocks * ratio;
	ret_shape[1] = kv_vspec_slots(s);
	ret_shape[2] = kv_vspec_states(&small);
	ret_shape[3] = kv_vspec_content(s);
	if (ratio == 1)
		memcpy(ret_strides, strides, 5 * sizeof(strides[0]));
	return 0;
}

void kv_compat_quant_mode(const char *cache_dtype, struct kv_vquant *ret)
{
	static const struct {
		const char *text;
		bool prefix;
		int mode;
		const char *name;
	} rows[] = {
		{"int4_per_token_head", false, 4, "INT4_PER_TOKEN_HEAD"},
		{"int8_per_token_head", false, 2, "INT8_PER_TOKEN_HEAD"},
		{"fp8_per_token_head", false, 3, "FP8_PER_TOKEN_HEAD"},
		{"nvfp4_ds_mla", false, 10, "NVFP4_DS_MLA"},
		{"nvfp4", true, 5, "NVFP4"},
		{"turboquant_k8v4", false, 6, "TURBOQUANT_K8V4"},
		{"turboquant_4bit_nc", false, 7, "TURBOQUANT_4BIT_NC"},
		{"turboquant_k3v4_nc", false, 8, "TURBOQUANT_K3V4_NC"},
		{"turboquant_3bit_nc", false, 9, "TURBOQUANT_3BIT_NC"},
		{"fp8", true, 1, "FP8_PER_TENSOR"},
	};

	*ret = (struct kv_vquant){.mode = 0, .name = "NONE"};
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
		if (rows[i].prefix ? !strncmp(cache_dtype, rows[i].text, strlen(rows[i].text))
				   : !strcmp(cache_dtype, rows[i].text)) {
			*ret = (struct kv_vquant){rows[i].mode, rows[i].name, 1};
			return;
		}
	if (!strcmp(cache_dtype, "float16") || !strcmp(cache_dtype, "bfloat16") ||
	    !strcmp(cache_dtype, "half"))
		ret->storage_bytes = 2;
	else if (!strcmp(cache_dtype, "float") || !strcmp(cache_dtype, "float32"))
		ret->storage_bytes = 4;
	else if (strcmp(cache_dtype, "auto"))
		ret->storage_bytes = 1;
}
