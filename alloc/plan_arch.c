/* SPDX-License-Identifier: Apache-2.0 */
/* Plans: a model's layers to groups and components. */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvcached/plan.h>

#include "alloc/plan.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/public.h"

struct draft {
	const struct kv_plan_options *o;
	const struct kv_arch *model;
	struct kv_plan_group *groups;
	struct kv_plan_component *components;
	uint32_t n_groups, n_components;
	uint32_t layer; /* of the plan */
	uint32_t tp, block_tokens;
};

#define MAX_GROUPS 256u
#define PER_LAYER  10u

static const struct {
	uint8_t dtype;
	uint8_t bits;
} kv_types[] = {
	[KV_KV_F32] = {KV_F32, 32},	   [KV_KV_F16] = {KV_F16, 16},
	[KV_KV_BF16] = {KV_BF16, 16},	   [KV_KV_F8] = {KV_F8_E4M3, 8},
	[KV_KV_INT8] = {KV_BYTES, 8},	   [KV_KV_F4] = {KV_BYTES, 4},
	[KV_KV_F8_PACKED] = {KV_BYTES, 8},
};

static void freep_draft(struct draft *d)
{
	free(d->groups);
	free(d->components);
}

/* The group with these properties, made if there is none. */
static int group_of(struct draft *d, const char *name, uint8_t kind, uint32_t window,
		    uint32_t stride, uint32_t block_tokens, uint16_t *ret_group)
{
	struct kv_plan_group *g;

	for (uint32_t i = 0; i < d->n_groups; i++) {
		g = &d->groups[i];
		if (g->kind == kind && g->window == window && g->stride == stride &&
		    g->block_tokens == block_tokens && !strcmp(g->name, name)) {
			*ret_group = (uint16_t)i;
			return 0;
		}
	}
	if (d->n_groups == MAX_GROUPS)
		return kv_error(-EINVAL, "model: more than %u kinds of layers", MAX_GROUPS);
	g = &d->groups[d->n_groups];
	*g = (struct kv_plan_group){
		.kind = kind,
		.window = window,
		.stride = stride,
		.block_tokens = block_tokens,
	};
	snprintf(g->name, sizeof(g->name), "%s", name);
	*ret_group = (uint16_t)d->n_groups++;
	return 0;
}

static struct kv_plan_component *add(struct draft *d, uint16_t group, const char *name, int role,
				     int dtype, uint32_t n_heads, uint32_t head_dim)
{
	struct kv_plan_component *c = &d->components[d->n_components++];

	memset(c, 0, sizeof(*c));
	snprintf(c->name, sizeof(c->name), "%s", name);
	c->layer = (uint16_t)d->layer;
	c->group = group;
	c->role = (uint8_t)role;
	c->dtype = (uint8_t)dtype;
	c->n_heads = n_heads;
	c->head_dim = head_dim;
	c->slot_bytes = (uint64_t)n_heads * head_dim * kv_dtype_bytes(dtype);
	return c;
}

static uint32_t kv_type(const struct draft *d)
{
	if (d->o->kv_type)
		return d->o->kv_type;
	return d->model->dtype == KV_F32       ? KV_KV_F32
	       : d->model->dtype == KV_F16     ? KV_KV_F16
	       : d->model->dtype == KV_F8_E4M3 ? KV_KV_F8
					       : KV_KV_BF16;
}

/* K or V of one layer's heads. */
static int add_heads(struct draft *d, uint16_t group, bool v, uint32_t n_heads, uint32_t dim)
{
	uint32_t type = kv_type(d);
	int role = v ? KV_ROLE_V : KV_ROLE_K;

	switch (type) {
	case KV_KV_F8_PACKED:
		return kv_error(-EINVAL,
				"kv_type: packed rows are for latent attention, layer %u has heads",
				d->layer);
	case KV_KV_F4:
		if (dim % 16)
			return kv_error(
				-EINVAL,
				"kv_type: 4-bit values share a scale among 16, layer %u has "
				"heads of %u",
				d->layer, dim);
		add(d, group, v ? "v" : "k", role, KV_BYTES, n_heads, dim / 2 + dim / 16);
		break;
	default:
		add(d, group, v ? "v" : "k", role, kv_types[type].dtype, n_heads, dim);
	}
	if (d->o->scales == KV_SCALES_TOKEN_HEAD) {
		if (kv_types[type].bits != 8)
			return kv_error(-EINVAL, "scales: of each token need an 8-bit kv_type");
		add(d, group, v ? "v_scale" : "k_scale", v ? KV_ROLE_V_SCALE : KV_ROLE_K_SCALE,
		    KV_F32, n_heads, 1);
	}
	return 0;
}

static int add_latent(struct draft *d, uint16_t group, const struct kv_arch_layer *l)
{
	uint32_t type = kv_type(d), dim = l->latent_dim + l->rope_dim;

	if (type == KV_KV_F8_PACKED) {
		if (l->latent_dim % 128)
			return kv_error(-EINVAL,
					"kv_type: packed rows have a scale for 128, layer %u has a "
					"latent of %u",
					d->layer, l->latent_dim);
		dim = l->latent_dim + l->latent_dim / 128 * 4 + l->rope_dim * 2;
		add(d, group, "latent", KV_ROLE_K, KV_BYTES, 1, dim);
	} else if (type == KV_KV_F4) {
		return kv_error(-EINVAL, "kv_type: latent attention has no 4-bit rows");
	} else if (d->o->scales == KV_SCALES_TOKEN_HEAD) {
		if (kv_types[type].bits != 8)
			return kv_error(-EINVAL, "scales: of each token need an 8-bit kv_type");
		add(d, group, "latent", KV_ROLE_K, kv_types[type].dtype, 1, l->latent_dim);
		add(d, group, "latent_scale", KV_ROLE_K_SCALE, KV_F32, 1, 1);
		add(d, group, "rope", KV_ROLE_V, KV_BF16, 1, l->rope_dim);
	} else {
		add(d, group, "latent", KV_ROLE_K, kv_types[type].dtype, 1, dim);
	}
	if (!l->index_dim)
		return 0;
	if (l->index_dim % 128)
		return kv_error(-EINVAL, "index_dim: %u given, a multiple of 128 is needed",
				l->index_dim);
	/* 8-bit values, a float scale for 128 of them */
	add(d, group, "index_k", KV_ROLE_INDEX, KV_BYTES, 1, l->index_dim + l->index_dim / 128 * 4);
	return 0;
}

static int add_v4(struct draft *d, const struct kv_arch_layer *l)
{
	uint32_t nope = l->latent_dim, stride = nope + 2 * l->rope_dim,
		 row = stride + nope / 64 + 1;
	uint32_t head = l->latent_dim + l->rope_dim, r = l->compress, index, width;
	uint32_t state_rows = r == 4 ? 4 : 8;
	char name[24];
	uint16_t group;
	int err;

	if (!nope || nope % 64)
		return kv_error(-EINVAL, "latent_dim: %u given, a multiple of 64 is needed", nope);
	if (r > 1 && r != 4 && r != 128)
		return kv_error(-EINVAL, "compress: %u given; 0, 1, 4, 128 exist", r);
	err = group_of(d, "window", KV_GROUP_WINDOW, l->window, 1, 64, &group);
	if (err)
		return err;
	add(d, group, "kv", KV_ROLE_K, KV_BYTES, 1, row)->round = stride;
	if (r <= 1)
		return 0;

	snprintf(name, sizeof(name), "c%u.state", r);
	err = group_of(d, name, KV_GROUP_WINDOW, r == 4 ? 8 : 128, 1, state_rows, &group);
	if (err)
		return err;
	width = r == 4 ? 2 * head : head;
	add(d, group, "compressor", KV_ROLE_V, KV_F32, 1, 2 * width);
	snprintf(name, sizeof(name), "c%u.kv", r);
	err = group_of(d, name, KV_GROUP_FULL, 0, r, d->block_tokens, &group);
	if (err)
		return err;
	add(d, group, "compressed", KV_ROLE_V_SCALE, KV_BYTES, 1, row)->round = stride;
	if (r != 4 || !l->index_dim)
		return 0;

	if (l->index_dim % (d->o->fp4_indexer ? 32 : 128))
		return kv_error(-EINVAL, "index_dim: %u given, a multiple of %u is needed",
				l->index_dim, d->o->fp4_indexer ? 32 : 128);
	index = d->o->fp4_indexer ? l->index_dim / 2 + l->index_dim / 32
				  : l->index_dim + l->index_dim / 128 * 4;
	add(d, group, "index_k", KV_ROLE_INDEX, KV_BYTES, 1, index);
	err = group_of(d, "c4.index_state", KV_GROUP_WINDOW, 8, 1, 4, &group);
	if (err)
		return err;
	add(d, group, "index_state", KV_ROLE_K_SCALE, KV_F32, 1, 4 * l->index_dim);
	return 0;
}

static int add_state(struct draft *d, const struct kv_arch_layer *l)
{
	uint32_t tp = d->tp, groups = l->conv_groups, channels;
	uint8_t dtype = d->o->state_type ? (uint8_t)d->o->state_type : d->model->state_dtype;
	struct kv_plan_component *c;
	uint16_t group;
	int r;

	if (l->conv_inner % tp || l->state_heads % tp)
		return kv_error(-EINVAL,
				"tp: %u ranks, layer %u has %u channels and %u state heads", tp,
				d->layer, l->conv_inner, l->state_heads);
	/* Ranks beyond the number of groups hold copies. */
	groups = groups % tp ? 1 : groups / tp;
	channels = l->conv_inner / tp + (l->conv_groups ? 2 * groups * l->conv_group_dim : 0);
	r = group_of(d, "state", KV_GROUP_STATE, 0, 1, 0, &group);
	if (r)
		return r;
	if (l->conv_width && channels) {
		c = add(d, group, "conv", KV_ROLE_STATE, d->model->dtype, channels, l->conv_width);
		c->const_bytes = c->slot_bytes;
		c->slot_bytes = 0;
	}
	c = add(d, group, "recurrent", KV_ROLE_STATE, dtype, l->state_heads / tp,
		l->state_rows * l->state_cols);
	c->const_bytes = c->slot_bytes;
	c->slot_bytes = 0;
	return 0;
}

/* K and V of an encoder's output: a constant of the sequence. */
static int add_cross(struct draft *d, const struct kv_arch_layer *l, uint32_t n_heads)
{
	uint32_t first = d->n_components, heads;
	uint16_t group;
	int r;

	if (!d->model->encoder_tokens)
		return kv_error(-EINVAL, "encoder_tokens: 0, and layer %u attends to an encoder",
				d->layer);
	r = kv_plan_local_heads(n_heads, d->tp, &heads);
	if (!r)
		r = group_of(d, "cross", KV_GROUP_CROSS, 0, 1, 0, &group);
	if (!r)
		r = add_heads(d, group, false, heads, l->head_dim);
	if (!r)
		r = add_heads(d, group, true, heads, l->v_head_dim);
	if (r)
		return r;
	for (uint32_t i = first; i < d->n_components; i++) {
		d->components[i].const_bytes =
			d->components[i].slot_bytes * d->model->encoder_tokens;
		d->components[i].slot_bytes = 0;
	}
	return 0;
}

static int add_layer(struct draft *d, const struct kv_arch_layer *l)
{
	uint32_t heads = 0;
	uint16_t group;
	char name[24];
	int r;

	if (l->kind == KV_LAYER_NONE || l->shares >= 0)
		return 0;
	if (l->kind == KV_LAYER_STATE)
		return add_state(d, l);
	if (l->form == KV_FORM_V4)
		return add_v4(d, l);
	if (l->state_heads) { /* beside its attention */
		r = add_state(d, l);
		if (r)
			return r;
	}
	if (l->kind == KV_LAYER_CROSS)
		return add_cross(d, l, l->n_kv_heads);
	if (l->form == KV_FORM_HEADS) {
		r = kv_plan_local_heads(l->n_kv_heads, d->tp, &heads);
		if (r)
			return r;
	}
	switch (l->kind) {
	case KV_LAYER_WINDOW:
	case KV_LAYER_CHUNKED:
		if (!l->window)
			return kv_error(-EINVAL, "layer %u: a window of 0 tokens", d->layer);
		snprintf(name, sizeof(name), "%s%u",
			 l->kind == KV_LAYER_WINDOW ? "window" : "chunk", l->window);
		r = group_of(d, name,
			     l->kind == KV_LAYER_WINDOW ? KV_GROUP_WINDOW : KV_GROUP_CHUNKED,
			     l->window, 1, d->block_tokens, &group);
		break;
	default:
		r = group_of(d, "full", KV_GROUP_FULL, 0, 1, d->block_tokens, &group);
	}
	if (r)
		return r;
	if (l->form == KV_FORM_LATENT) {
		r = add_latent(d, group, l);
	} else {
		r = add_heads(d, group, false, heads, l->head_dim);
		if (!r)
			r = add_heads(d, group, true, heads, l->v_head_dim);
	}
	if (!r && l->cross_heads)
		r = add_cross(d, l, l->cross_heads);
	return r;
}

static int add_model(struct draft *d, const struct kv_arch *model)
{
	int r;

	d->model = model;
	for (uint32_t i = 0; i < model->n_layers; i++, d->layer++) {
		r = add_layer(d, &model->layers[i]);
		if (r)
			return r;
	}
	return 0;
}

/* Tokens a flat block needs so that no layer's state is larger than a layer's K and V in it. */
static uint32_t equalized(const struct draft *d)
{
	uint64_t most_slot = 0, most_const = 0, slot = 0, constant = 0, needed;

	for (uint32_t i = 0; i < d->n_components; i++) {
		const struct kv_plan_component *c = &d->components[i];

		if (!i || c->layer != d->components[i - 1].layer)
			slot = constant = 0;
		slot += c->slot_bytes;
		if (d->groups[c->group].kind == KV_GROUP_STATE)
			constant += c->const_bytes;
		most_slot = slot > most_slot ? slot : most_slot;
		most_const = constant > most_const ? constant : most_const;
	}
	if (!most_const || !most_slot)
		return d->block_tokens;
	needed = most_const / most_slot + (most_const % most_slot != 0);
	if (needed <= d->block_tokens)
		return d->block_tokens;
	needed = (needed + d->block_tokens - 1) / d->block_tokens * d->block_tokens;
	return needed > KV_PLAN_MAX_BLOCK_TOKENS ? KV_PLAN_MAX_BLOCK_TOKENS : (uint32_t)needed;
}

/* Smaller groups of a slab take more tokens into the same bytes. */
static void fill_slab(struct draft *d)
{
	uint64_t bytes[MAX_GROUPS] = {0}, most = 0;

	for (uint32_t i = 0; i < d->n_components; i++) {
		const struct kv_plan_component *c = &d->components[i];
		const struct kv_plan_group *g = &d->groups[c->group];

		if (!g->block_tokens)
			continue;
		bytes[c->group] +=
			(c->slot_bytes * (g->block_tokens / g->stride) + KV_BLOCK_ALIGN - 1) /
			KV_BLOCK_ALIGN * KV_BLOCK_ALIGN;
		most = bytes[c->group] > most ? bytes[c->group] : most;
	}
	for (uint32_t g = 0; g < d->n_groups; g++) {
		uint64_t tokens = d->groups[g].block_tokens;

		if (bytes[g] && tokens * (most / bytes[g]) <= KV_PLAN_MAX_BLOCK_TOKENS)
			d->groups[g].block_tokens = (uint32_t)(tokens * (most / bytes[g]));
	}
}

static int plan_as(struct draft *d, uint32_t layout, struct kv_plan **ret_plan)
{
	struct kv_plan_options o = *d->o;
	struct kv_plan_group groups[MAX_GROUPS];
	bool has_state = false;
	int r;

	o.layout = layout;
	memcpy(groups, d->groups, d->n_groups * sizeof(groups[0]));
	for (uint32_t g = 0; g < d->n_groups; g++)
		has_state |= groups[g].kind == KV_GROUP_STATE;
	if (layout == KV_PLAN_FLAT && has_state && o.draft_tokens)
		return kv_error(-EINVAL,
				"layout: flat blocks hold one state each, and %u draft "
				"tokens need one more each; split has rows for them",
				o.draft_tokens);
	if (layout == KV_PLAN_FLAT || layout == KV_PLAN_SPLIT || layout == KV_PLAN_PAGED) {
		uint32_t tokens = layout == KV_PLAN_FLAT ? equalized(d) : d->block_tokens;

		for (uint32_t g = 0; g < d->n_groups; g++)
			if (d->groups[g].block_tokens)
				d->groups[g].block_tokens = tokens;
	} else if (layout == KV_PLAN_SLAB) {
		fill_slab(d);
	}
	r = kv_plan_groups(d->groups, d->n_groups, d->components, d->n_components, &o, ret_plan);
	memcpy(d->groups, groups, d->n_groups * sizeof(groups[0]));
	return r;
}

static bool better(const struct kv_plan *a, const struct kv_plan *b)
{
	if (a->n_seqs != b->n_seqs)
		return a->n_seqs > b->n_seqs;
	return a->n_tokens > b->n_tokens;
}

static int plan_best(struct draft *d, struct kv_plan **ret_plan)
{
	static const uint32_t layouts[] = {KV_PLAN_FLAT, KV_PLAN_SPLIT, KV_PLAN_GROUPED,
					   KV_PLAN_SLAB};
	struct kv_plan *best = NULL;
	int r = 0, first = 0;

	for (size_t i = 0; i < sizeof(layouts) / sizeof(layouts[0]); i++) {
		struct kv_plan *plan = NULL;

		r = plan_as(d, layouts[i], &plan);
		if (r) {
			first = first ? first : r;
			continue;
		}
		if (best && !better(plan, best)) {
			kv_plan_free(plan);
			continue;
		}
		kv_plan_free(best);
		best = plan;
	}
	if (!best)
		return first;
	*ret_plan = best;
	return 0;
}

static int check_options(const struct kv_plan_options *o)
{
	if (o->layout > KV_PLAN_SLAB)
		return kv_error(-EINVAL, "layout: %u is not a kv_plan_layout", o->layout);
	if (o->kv_type > KV_KV_F8_PACKED)
		return kv_error(-EINVAL, "kv_type: %u is not a kv_kv_type", o->kv_type);
	if (o->scales > KV_SCALES_TOKEN_HEAD)
		return kv_error(-EINVAL, "scales: %u is not a kv_kv_scales", o->scales);
	if (o->state_type && !kv_dtype_bytes((int)o->state_type))
		return kv_error(-EINVAL, "state_type: %u is not a kv_dtype", o->state_type);
	if (o->tp > 4096)
		return kv_error(-EINVAL, "tp: %u given, at most 4096 ranks", o->tp);
	if (o->block_tokens > KV_PLAN_MAX_BLOCK_TOKENS)
		return kv_error(-EINVAL, "block_tokens: %u given, at most %u", o->block_tokens,
				KV_PLAN_MAX_BLOCK_TOKENS);
	return 0;
}

KV_PUBLIC int kv_plan_arch(const struct kv_arch *model, const struct kv_arch *draft,
			   const struct kv_plan_options *options, struct kv_plan **ret_plan)
{
	kv_cleanup(freep_draft) struct draft d = {0};
	struct kv_plan_options o = {0};
	uint32_t n_layers = model->n_layers + (draft ? draft->n_layers : 0);
	bool v4 = false;
	int r;

	if (options->size < sizeof(size_t) || options->size > 4096)
		return kv_error(-EINVAL, "options.size: %zu given; sizeof the struct is needed",
				options->size);
	memcpy(&o, options, options->size < sizeof(o) ? options->size : sizeof(o));
	o.size = sizeof(o);
	r = check_options(&o);
	if (r)
		return r;
	if (!o.context)
		o.context = model->context;
	if (!o.context)
		return kv_error(-EINVAL, "context: not given, and the model does not say");
	for (uint32_t i = 0; i < model->n_layers; i++)
		v4 |= model->layers[i].form == KV_FORM_V4;
	d.o = &o;
	d.tp = o.tp ? o.tp : 1;
	d.block_tokens = o.block_tokens ? o.block_tokens : v4 ? 256 : 64;
	d.groups = calloc(MAX_GROUPS, sizeof(*d.groups));
	d.components = calloc((size_t)n_layers * PER_LAYER + 1, sizeof(*d.components));
	if (!d.groups || !d.components)
		return -ENOMEM;
	r = add_model(&d, model);
	if (!r && draft)
		r = add_model(&d, draft);
	if (r)
		return r;
	if (!d.n_components)
		return kv_error(-EINVAL, "model: none of its %u layers keeps anything", n_layers);
	if (o.layout != KV_PLAN_AUTO)
		return plan_as(&d, o.layout, ret_plan);
	return plan_best(&d, ret_plan);
}
