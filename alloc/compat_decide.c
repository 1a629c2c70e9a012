/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reference calculators: from a server's options and a model's geometry to pools.
 *
 * Order: force backend names, grow the block for recurrent state, size one of five ways, clamp,
 * then build backends and pools.
 */
#include <stdlib.h>
#include <string.h>

#include "alloc/compat_pools.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"

struct work {
	struct kv_compat_mha_out mha;
	struct kv_compat_mamba_out mamba;
	struct kv_compat_tensors tensors;
	struct kv_compat_v4 v4, v4_draft;
	struct kv_compat_state state;
	const char *dtype, *draft_dtype;
	char labels[KV_COMPAT_MAX_LAYERS + 1];
	int64_t n_state, n_full;
	int64_t available, layer_cell, draft_cell;
	int64_t max_bs;
	bool hybrid, flat_state;
	struct kv_compat_load load;
};

static void workp(struct work **w)
{
	free(*w);
}

static const char *arch_of(enum kv_compat_kind kind)
{
	return kind == KV_COMPAT_MLA || kind == KV_COMPAT_V4 ? "MLA"
	       : kind == KV_COMPAT_DSA			     ? "DSA"
							     : "MHA";
}

static int64_t state_bytes(const struct work *w)
{
	return w->state.conv_bytes + w->state.ssm_bytes;
}

static int measure(const struct kv_compat_server *s, struct work *w)
{
	int64_t itemsize, index_row;
	int r;

	r = kv_compat_kv_dtype(s->kv_dtype, &w->dtype);
	if (r)
		return r;
	itemsize = kv_compat_itemsize(w->dtype);
	w->max_bs = kv_floor_div(s->max_num_seqs, s->attn_dp);
	w->load = (struct kv_compat_load){
		.n_requests = w->max_bs,
		.max_scheduled = s->chunked_prefill,
		.max_context = s->context,
		.decode_tokens = 1,
	};
	switch (s->kind) {
	case KV_COMPAT_MHA:
	case KV_COMPAT_GDN:
		w->layer_cell =
			kv_compat_mha_cell(s->n_kv_heads, s->head_dim, s->attn_tp, itemsize);
		break;
	case KV_COMPAT_MLA:
	case KV_COMPAT_DSA:
		w->layer_cell =
			kv_compat_mla_cell(s->lora, s->rope, itemsize, s->per_token_head, 2);
		if (s->kind == KV_COMPAT_MLA)
			break;
		r = kv_compat_dsa_index_row(s->index_head_dim, &index_row);
		if (r)
			return r;
		w->layer_cell += index_row;
		break;
	case KV_COMPAT_V4:
		break;
	}
	w->draft_cell = s->speculative && s->kind != KV_COMPAT_V4 ? w->layer_cell : 0;
	w->draft_dtype = w->dtype;
	if (s->speculative && !strcmp(s->speculative, "DFLASH") &&
	    (s->kind == KV_COMPAT_MHA || s->kind == KV_COMPAT_GDN)) {
		w->draft_dtype = "bfloat16"; /* its kernels read nothing else */
		w->draft_cell = kv_compat_mha_cell(s->n_kv_heads, s->head_dim, s->attn_tp, 2);
	}
	w->available = kv_compat_available_bytes(s->min_free_bytes, s->world_size, s->utilization,
						 s->total_gib);
	return 0;
}

static int measure_v4(const struct kv_compat_server *s, int64_t block, struct work *w)
{
	struct kv_compat_v4 v4 = {
		.head_dim = s->head_dim,
		.rope_dim = s->rope,
		.index_head_dim = s->index_head_dim,
		.window = s->v4_window,
		.page_size = block,
		.fp4_indexer = s->fp4_indexer,
	};
	int64_t indices[KV_COMPAT_MAX_LAYERS];
	int r;

	w->v4 = w->v4_draft = v4;
	for (size_t i = 0; i < s->n_layers; i++)
		indices[i] = (int64_t)i;
	r = kv_compat_v4_init(&w->v4, s->ratios, s->n_ratios, indices, s->n_layers);
	if (r || !s->speculative)
		return r;
	/* The draft's layers follow the target's. */
	for (size_t i = 0; i < s->n_nextn; i++)
		indices[i] = (int64_t)(s->n_layers + i);
	r = kv_compat_v4_init(&w->v4_draft, s->ratios, s->n_ratios, indices, s->n_nextn);
	if (r)
		return r;
	w->draft_cell = kv_compat_v4_cell_bytes(&w->v4_draft);
	return 0;
}

static int measure_state(const struct kv_compat_server *s, struct work *w, int64_t *ret_block)
{
	struct kv_compat_component rows[2] = {{.group = "kv", .slot_bytes = w->layer_cell},
					      {.group = "state"}};
	int r;

	r = kv_compat_gdn_state(&s->gdn, &w->state);
	if (r || !s->flat_ext)
		return r;
	w->flat_state = true;
	rows[1].const_bytes = state_bytes(w);
	return kv_compat_equalize(rows, 2, *ret_block, *ret_block, ret_block, NULL);
}

static int size_flat_state(struct work *w, int64_t block, int64_t *ret_pages)
{
	int64_t per_block = w->n_full * w->layer_cell * block + w->n_state * state_bytes(w) +
			    w->draft_cell * block;
	struct kv_compat_component all = {.const_bytes = per_block};
	struct kv_compat_binding binding;
	struct kv_compat_flat plan;
	int r;

	r = kv_compat_flat_plan(&all, 1, block, 0, w->available, &plan, &binding);
	if (r)
		return r;
	*ret_pages = plan.n_blocks;
	return 0;
}

static int size_pages(const struct kv_compat_server *s, struct work *w, int64_t block,
		      int64_t *ret_pages, int64_t *ret_chunks)
{
	int64_t slab = kv_compat_slab_size(w->labels, &s->window, s->flat_ext);
	int64_t layers = slab ? slab : (int64_t)s->n_layers;
	struct kv_compat_split split;
	int r;

	if (s->kind == KV_COMPAT_V4) {
		struct kv_compat_load load = w->load;

		load.decode_tokens = s->speculative ? s->spec_tokens : 1;
		load.overlap_depth = s->overlap_depth;
		w->load = load;
		return kv_compat_v4_profile(&w->v4, &load, w->available, w->draft_cell, ret_pages);
	}
	if (w->flat_state)
		return size_flat_state(w, block, ret_pages);
	if (w->n_state && s->has_max_mamba) {
		/* D: the memory of the state rows is not deducted. */
		*ret_chunks = s->max_mamba;
		layers = w->n_full;
	} else if (w->n_state) {
		r = kv_compat_cache_budget(w->available, w->n_full * w->layer_cell + w->draft_cell,
					   block, state_bytes(w), w->n_state,
					   s->speculative ? s->spec_tokens : 0, s->mamba_ratio,
					   &split);
		if (r)
			return r;
		*ret_pages = split.kv_pages;
		*ret_chunks = split.n_chunks;
		return 0;
	}
	return kv_compat_max_pages(w->available, layers * w->layer_cell + w->draft_cell, block,
				   ret_pages);
}

static int choose_backends(const struct kv_compat_server *s, const struct work *w,
			   struct kv_compat_decision *d)
{
	const char *arch = arch_of(s->kind);
	bool is_hybrid_name = s->backend && !strcmp(s->backend, "hybrid_linear_attn");
	const char *name = is_hybrid_name ? NULL : s->backend;
	int r;

	d->server_backend = name;
	if (s->kind == KV_COMPAT_V4)
		d->server_backend = name = "deepseek_v4";
	if (w->hybrid)
		d->server_backend = "hybrid_linear_attn";
	r = kv_compat_backend(name, arch, true, &d->backend_class);
	if (r)
		return r;
	if (w->hybrid) {
		d->full_class = d->backend_class;
		d->backend_class = "HybridLinearAttnBackend";
		d->flat_state_active = w->flat_state;
	}
	if (!s->speculative)
		return 0;
	/* The drafter's name is unset, except where the draft is of a forced kind as well. */
	if (w->hybrid || s->kind == KV_COMPAT_V4)
		d->draft_class = w->hybrid ? d->full_class : d->backend_class;
	else
		r = kv_compat_backend(NULL, arch, true, &d->draft_class);
	return r;
}

static int build_mha(const struct kv_compat_server *s, struct work *w, struct kv_compat_decision *d)
{
	struct kv_compat_mha_pool pool = {
		.tokens = d->tokens,
		.page_size = d->block_size,
		.dtype = w->dtype,
		.local_heads = kv_compat_local_heads(s->n_kv_heads, s->attn_tp),
		.head_dim = s->head_dim,
		.n_layers = s->n_layers,
		.layers = w->labels,
		.window = s->window,
		.flat_ext = s->flat_ext,
		.load = w->load,
	};
	int r;

	d->map_step = 1;
	if (w->flat_state) {
		pool.has_state = true;
		pool.n_conv_dims = 2;
		pool.n_ssm_dims = 3;
		memcpy(pool.conv_shape, w->state.conv_shape, sizeof(w->state.conv_shape));
		memcpy(pool.ssm_shape, w->state.ssm_shape, sizeof(w->state.ssm_shape));
		pool.conv_dtype = "bfloat16";
		pool.ssm_dtype = "float32";
	} else if (w->hybrid) {
		pool.n_layers = (size_t)w->n_full;
		pool.layers = "";
		d->map_first = d->map_step = 4;
		d->map_first--;
	}
	d->mapped = w->hybrid;
	d->pool_layers = pool.n_layers;
	r = kv_compat_mha_tensors(&pool, &w->mha);
	if (r)
		return r;
	d->n_groups = w->mha.n_groups;
	memcpy(d->groups, w->mha.groups, d->n_groups * sizeof(d->groups[0]));
	d->allocated_bytes += w->mha.tensors.total_bytes;
	if (!s->speculative)
		return 0;
	pool.n_layers = 1;
	pool.dtype = w->draft_dtype;
	pool.layers = "";
	pool.has_state = false;
	pool.window = (struct kv_compat_window){0};
	r = kv_compat_mha_tensors(&pool, &w->mha);
	if (r)
		return r;
	d->draft_layers = 1;
	d->n_draft_groups = w->mha.n_groups;
	memcpy(d->draft_groups, w->mha.groups, d->n_draft_groups * sizeof(d->groups[0]));
	d->allocated_bytes += w->mha.tensors.total_bytes;
	return 0;
}

static int build_mla(const struct kv_compat_server *s, struct work *w, struct kv_compat_decision *d)
{
	struct kv_compat_mla_pool pool = {
		.tokens = d->tokens,
		.page_size = d->block_size,
		.dtype = w->dtype,
		.model_dtype = "bfloat16",
		.per_token_head = s->per_token_head,
		.lora = s->lora,
		.rope = s->rope,
		.n_layers = s->n_layers,
		.index_head_dim = s->kind == KV_COMPAT_DSA ? s->index_head_dim : 0,
	};
	int64_t page_bytes;
	int r;

	d->pool_layers = s->n_layers;
	r = kv_compat_mla_tensors(&pool, &w->tensors, &page_bytes);
	if (r)
		return r;
	d->allocated_bytes += w->tensors.total_bytes;
	if (!s->speculative)
		return 0;
	pool.n_layers = d->draft_layers = 1;
	r = kv_compat_mla_tensors(&pool, &w->tensors, &page_bytes);
	d->allocated_bytes += w->tensors.total_bytes;
	return r;
}

static int build_v4(const struct kv_compat_server *s, struct work *w, struct kv_compat_decision *d)
{
	int64_t counts[KV_COMPAT_V4_GROUPS], bytes[KV_COMPAT_V4_GROUPS];
	int r;

	d->pool_layers = s->n_layers;
	r = kv_compat_v4_tensors(&w->v4, d->tokens, (int64_t)s->n_layers, &w->load, &w->tensors,
				 counts);
	if (r)
		return r;
	d->n_groups = kv_compat_v4_groups(&w->v4, d->groups, bytes);
	d->allocated_bytes += w->tensors.total_bytes;
	if (!s->speculative)
		return 0;
	d->draft_layers = s->n_nextn;
	r = kv_compat_v4_tensors(&w->v4_draft, d->tokens, (int64_t)s->n_nextn, &w->load,
				 &w->tensors, counts);
	if (r)
		return r;
	d->n_draft_groups = 1;
	memcpy(d->draft_groups, d->groups, sizeof(d->groups[0]));
	d->allocated_bytes += w->tensors.total_bytes;
	return 0;
}

static void build_mamba(const struct kv_compat_server *s, struct work *w,
			struct kv_compat_decision *d)
{
	struct kv_compat_mamba_pool pool = {
		.size = (d->n_chunks ? d->n_chunks : w->max_bs) + 1,
		.n_layers = w->n_state,
		.n_draft_tokens = s->speculative ? s->spec_tokens : 0,
		.max_requests = w->max_bs + 1,
		.n_conv_dims = 2,
		.n_ssm_dims = 3,
		.conv_dtype = "bfloat16",
		.ssm_dtype = "float32",
	};

	memcpy(pool.conv_shape, w->state.conv_shape, sizeof(w->state.conv_shape));
	memcpy(pool.ssm_shape, w->state.ssm_shape, sizeof(w->state.ssm_shape));
	kv_compat_mamba_tensors(&pool, &w->mamba);
	d->mamba_rows = w->mamba.total_rows;
	d->mamba_base = w->mamba.draft_base;
	d->allocated_bytes += w->mamba.tensors.total_bytes;
}

int kv_compat_decide(const struct kv_compat_server *s, struct kv_compat_decision *ret)
{
	kv_cleanup(workp) struct work *w = calloc(1, sizeof(*w));
	struct kv_compat_decision *d = ret;
	int64_t pages = 0;
	int r;

	if (!w)
		return kv_error(KV_FAULT_NO_MEMORY, "no memory for %zu bytes", sizeof(*w));
	if (s->n_layers > KV_COMPAT_MAX_LAYERS || strlen(s->layers) > KV_COMPAT_MAX_LAYERS)
		return kv_error(KV_FAULT_OUT_OF_RANGE, "layers: more than %d",
				KV_COMPAT_MAX_LAYERS);
	memset(d, 0, sizeof(*d));
	strcpy(w->labels, s->layers);
	d->block_size = s->block_size;
	r = measure(s, w);
	if (r)
		return r;
	if (s->kind == KV_COMPAT_GDN) {
		for (size_t i = 0; i < s->n_layers; i++)
			w->labels[i] = i % 4 == 3 ? 'F' : 'L';
		for (size_t i = 0; w->labels[i]; i++) {
			w->n_state += w->labels[i] == 'L';
			w->n_full += w->labels[i] == 'F';
		}
		w->hybrid = s->hybrid_arch;
		r = measure_state(s, w, &d->block_size);
	} else if (s->kind == KV_COMPAT_V4) {
		r = measure_v4(s, d->block_size, w);
	}
	if (r)
		return r;

	r = size_pages(s, w, d->block_size, &pages, &d->n_chunks);
	if (r)
		return r;
	r = kv_compat_max_tokens(pages, d->block_size,
				 s->has_max_total ? &s->max_total_tokens : NULL, &d->tokens);
	if (r)
		return r;
	if (d->tokens <= 0)
		return kv_error(KV_FAULT_POOL_TOKENS_NOT_POSITIVE,
				"memory: %lld bytes are left for the pool, not one page fits",
				(long long)w->available);
	d->device_pages = kv_floor_div(d->tokens, d->block_size);

	r = choose_backends(s, w, d);
	if (r)
		return r;
	if (s->kind == KV_COMPAT_V4)
		r = build_v4(s, w, d);
	else if (s->kind == KV_COMPAT_MLA || s->kind == KV_COMPAT_DSA)
		r = build_mla(s, w, d);
	else
		r = build_mha(s, w, d);
	if (r)
		return r;
	if (w->hybrid && !w->flat_state)
		build_mamba(s, w, d);
	return 0;
}
