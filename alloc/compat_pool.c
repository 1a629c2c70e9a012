/* SPDX-License-Identifier: Apache-2.0 */
/* Reference calculators: the tensors that the reference's pools allocate. */
#include <string.h>

#include "alloc/compat_pools.h"
#include "include/internal/error.h"

static void add(struct kv_compat_tensors *t, const int64_t *shape, size_t n_dims, const char *dtype,
		const char *tag)
{
	struct kv_compat_tensor *x = &t->list[t->n++];

	memcpy(x->shape, shape, n_dims * sizeof(shape[0]));
	x->n_dims = n_dims;
	x->dtype = dtype;
	x->tag = tag;
	x->bytes = kv_compat_shape_bytes(shape, n_dims, kv_compat_itemsize(dtype));
	t->total_bytes += x->bytes;
}

static const char *stored_as(const char *dtype)
{
	return kv_compat_itemsize(dtype) == 1 ? "uint8" : dtype;
}

static int check_state(const struct kv_compat_mha_pool *pool)
{
	struct kv_compat_component rows[3] = {
		{.group = "kv",
		 .slot_bytes =
			 pool->local_heads * pool->head_dim * 2 * kv_compat_itemsize(pool->dtype)},
		{.group = "state",
		 .const_bytes = kv_compat_shape_bytes(pool->conv_shape, pool->n_conv_dims,
						      kv_compat_itemsize(pool->conv_dtype))},
		{.group = "state",
		 .const_bytes = kv_compat_shape_bytes(pool->ssm_shape, pool->n_ssm_dims,
						      kv_compat_itemsize(pool->ssm_dtype))},
	};
	int64_t equalized;
	int r;

	r = kv_compat_equalize(rows, 3, pool->page_size, 1, &equalized, NULL);
	if (r)
		return r;
	if (equalized != pool->page_size)
		return kv_error(KV_FAULT_PAGE_SIZE_NOT_EQUALIZED,
				"page_size: %lld given, a state row needs %lld",
				(long long)pool->page_size, (long long)equalized);
	return 0;
}

static int publish_groups(const struct kv_compat_mha_pool *pool, struct kv_compat_mha_out *out)
{
	uint32_t layer_group[KV_COMPAT_MAX_LAYERS];
	struct kv_compat_load load = pool->load;
	int r;

	r = kv_compat_groups(*pool->layers ? pool->layers : "F", &pool->window, pool->page_size,
			     out->groups, &out->n_groups, layer_group);
	if (r)
		return r;
	load.max_total = pool->tokens;
	return kv_compat_page_counts(out->groups, out->n_groups, &load, out->counts);
}

int kv_compat_mha_tensors(const struct kv_compat_mha_pool *pool, struct kv_compat_mha_out *ret_out)
{
	int64_t kv[] = {pool->tokens + pool->page_size, pool->local_heads, pool->head_dim};
	int64_t slab, n_kv = 0, occurrence[KV_COMPAT_MAX_LAYERS] = {0};
	struct kv_compat_mha_out *out = ret_out;
	size_t n_labels = strlen(pool->layers);
	bool flat_state;
	int r;

	memset(out, 0, sizeof(*out));
	if (pool->n_layers > KV_COMPAT_MAX_LAYERS || n_labels > KV_COMPAT_MAX_LAYERS)
		return kv_error(KV_FAULT_OUT_OF_RANGE, "layers: more than %d",
				KV_COMPAT_MAX_LAYERS);
	if (pool->has_state) {
		r = check_state(pool);
		if (r)
			return r;
		if (pool->tokens % pool->page_size)
			return kv_error(KV_FAULT_POOL_NOT_WHOLE_PAGES,
					"size: %lld tokens are no multiple of a page of %lld",
					(long long)pool->tokens, (long long)pool->page_size);
	}
	slab = kv_compat_slab_size(pool->layers, &pool->window, pool->flat_ext);
	if (slab && pool->disaggregated)
		return kv_error(KV_FAULT_SLAB_WITH_PD,
				"hybrid slab: layers share memory, which disaggregation cannot do");
	flat_state = pool->has_state && pool->flat_ext && strchr(pool->layers, 'L');
	kv_compat_occurrence(pool->layers, occurrence);
	for (size_t l = 0; l < pool->n_layers; l++) {
		if (flat_state && l < n_labels && pool->layers[l] == 'L') {
			out->k_buffer[l] = -1;
			out->n_state_pairs++;
		} else if (slab) {
			out->k_buffer[l] = occurrence[l];
			n_kv = slab;
		} else {
			out->k_buffer[l] = n_kv++;
		}
	}
	for (int64_t i = 0; i < 2 * n_kv; i++)
		add(&out->tensors, kv, 3, stored_as(pool->dtype), "kv_cache");
	out->k_bytes = out->v_bytes = out->tensors.total_bytes / 2;
	if (flat_state) {
		int64_t conv[5], ssm[5];

		out->state_rows = pool->tokens / pool->page_size + 1;
		conv[0] = ssm[0] = out->state_rows;
		memcpy(conv + 1, pool->conv_shape, pool->n_conv_dims * sizeof(conv[0]));
		memcpy(ssm + 1, pool->ssm_shape, pool->n_ssm_dims * sizeof(ssm[0]));
		for (int64_t i = 0; i < out->n_state_pairs; i++) {
			add(&out->tensors, conv, pool->n_conv_dims + 1, pool->conv_dtype,
			    "kv_cache");
			add(&out->tensors, ssm, pool->n_ssm_dims + 1, pool->ssm_dtype, "kv_cache");
		}
	}
	out->hierarchical = !slab && !flat_state;
	return pool->flat_ext ? publish_groups(pool, out) : 0;
}

int kv_compat_mla_tensors(const struct kv_compat_mla_pool *pool,
			  struct kv_compat_tensors *ret_tensors, int64_t *ret_page_bytes)
{
	int64_t slots = pool->tokens + pool->page_size, index_row = 0;
	struct kv_compat_tensors *t = ret_tensors;
	int r;

	memset(t, 0, sizeof(*t));
	if (pool->n_layers > KV_COMPAT_MAX_LAYERS)
		return kv_error(KV_FAULT_OUT_OF_RANGE, "layers: more than %d",
				KV_COMPAT_MAX_LAYERS);
	if (pool->index_head_dim) {
		r = kv_compat_dsa_index_row(pool->index_head_dim, &index_row);
		if (r)
			return r;
	}
	for (size_t l = 0; l < pool->n_layers; l++) {
		if (pool->per_token_head) {
			add(t, (int64_t[]){slots, 1, pool->lora}, 3, stored_as(pool->dtype),
			    "kv_cache");
			add(t, (int64_t[]){slots, 1, 1}, 3, "float32", "kv_cache");
			add(t, (int64_t[]){slots, 1, pool->rope}, 3, pool->model_dtype, "kv_cache");
		} else {
			add(t, (int64_t[]){slots, 1, pool->lora + pool->rope}, 3,
			    stored_as(pool->dtype), "kv_cache");
		}
	}
	/* D: outside the region that sleep and wake know about. */
	for (size_t l = 0; index_row && l < pool->n_layers; l++)
		add(t, (int64_t[]){slots, index_row}, 2, "uint8", "default");
	*ret_page_bytes = t->total_bytes / slots * pool->page_size;
	return 0;
}

void kv_compat_mamba_tensors(const struct kv_compat_mamba_pool *pool,
			     struct kv_compat_mamba_out *ret_out)
{
	struct kv_compat_mamba_out *out = ret_out;
	int64_t conv[5] = {pool->n_layers}, ssm[5] = {pool->n_layers};

	memset(out, 0, sizeof(*out));
	out->current_size = pool->max_requests > 0 ? pool->max_requests + 1 : pool->size;
	out->draft_per_request = kv_max64(0, pool->n_draft_tokens - 1);
	out->draft_base = pool->size;
	out->draft_total = out->current_size * out->draft_per_request;
	out->total_rows = pool->size + out->draft_total;
	conv[1] = ssm[1] = out->total_rows;
	memcpy(conv + 2, pool->conv_shape, pool->n_conv_dims * sizeof(conv[0]));
	memcpy(ssm + 2, pool->ssm_shape, pool->n_ssm_dims * sizeof(ssm[0]));
	add(&out->tensors, conv, pool->n_conv_dims + 2, pool->conv_dtype, NULL);
	add(&out->tensors, ssm, pool->n_ssm_dims + 2, pool->ssm_dtype, NULL);
	add(&out->tensors, &out->current_size, 1, "int32", NULL);
}

int kv_compat_v4_tensors(const struct kv_compat_v4 *v4, int64_t tokens, int64_t layer_num,
			 const struct kv_compat_load *load, struct kv_compat_tensors *ret_tensors,
			 int64_t *ret_counts)
{
	struct kv_compat_tensors *t = ret_tensors;
	struct kv_compat_group groups[KV_COMPAT_V4_GROUPS];
	int64_t page_bytes[KV_COMPAT_V4_GROUPS];
	int64_t swa = 0, states[2] = {0}, kv[2] = {0}, indexer = 0;
	struct kv_compat_load l = *load;
	size_t n;
	int r;

	memset(t, 0, sizeof(*t));
	if (tokens <= 0)
		return kv_error(KV_FAULT_POOL_SIZE_NOT_POSITIVE, "size: %lld tokens given",
				(long long)tokens);
	if (layer_num != (int64_t)v4->n_layers)
		return kv_error(KV_FAULT_V4_LAYER_NUM_MISMATCH, "layers: %lld, and %zu ratios",
				(long long)layer_num, v4->n_layers);
	l.max_total = tokens;
	n = kv_compat_v4_groups(v4, groups, page_bytes);
	r = kv_compat_page_counts(groups, n, &l, ret_counts);
	if (r)
		return r;
	for (size_t i = 0; i < n; i++) {
		bool is_4 = strstr(groups[i].id, "c4a.");

		if (!i)
			swa = ret_counts[i];
		else if (strstr(groups[i].id, "indexer"))
			indexer = ret_counts[i];
		else if (groups[i].family == KV_COMPAT_STATE)
			states[!is_4] = ret_counts[i];
		else
			kv[!is_4] = ret_counts[i];
	}
	for (size_t i = 0; i < v4->n_layers; i++) {
		int64_t ratio = v4->ratio[i];
		int k = ratio == 128;

		add(t, (int64_t[]){swa, kv_compat_v4_block_bytes(v4, 64)}, 2, "uint8", NULL);
		if (ratio == 1)
			continue;
		add(t,
		    (int64_t[]){kv[k],
				kv_compat_v4_block_bytes(v4, kv_compat_v4_storage_rows(v4, ratio))},
		    2, "uint8", NULL);
		add(t,
		    (int64_t[]){states[k], kv_compat_v4_state_rows(v4, ratio),
				2 * kv_compat_v4_state_width(v4, ratio)},
		    3, "float32", NULL);
		if (ratio != 4)
			continue;
		add(t, (int64_t[]){kv[0], kv_compat_v4_indexer_page_bytes(v4)}, 2, "uint8", NULL);
		add(t, (int64_t[]){indexer, 4, 4 * v4->index_head_dim}, 3, "float32", NULL);
	}
	return 0;
}
