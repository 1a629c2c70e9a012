/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "include/internal/cleanup.h"
#include "tools/engine/error.h"
#include "tools/engine/pools.h"

static int lib_error(int r, const char *what)
{
	return kv_engine_error(r, "%s: %s", what, kv_error_text());
}

/* What the file says of its layers, planned for all of the device */
static int plan(const struct kv_engine_pools_options *o, struct kv_plan **ret_plan)
{
	uint32_t type = o->kv_dtype == KV_F32	? KV_KV_F32
			: o->kv_dtype == KV_F16 ? KV_KV_F16
						: KV_KV_BF16;
	KV_OPTIONS(kv_plan_options, planning, .budget_bytes = o->gpu->arena_bytes,
		   .block_tokens = o->block_tokens, .kv_type = type, .layout = KV_PLAN_GROUPED,
		   .chunk_tokens = o->chunk);
	struct kv_arch *arch;
	const void *bytes;
	size_t size;
	int r;

	bytes = kv_gguf_bytes(o->file, &size);
	r = kv_arch_parse_gguf(bytes, size, o->path, &arch);
	if (r < 0)
		return lib_error(r, "kv_arch_parse_gguf");
	r = kv_plan_arch(arch, NULL, &planning, ret_plan);
	kv_arch_free(arch);
	return r < 0 ? lib_error(r, "kv_plan_arch") : 0;
}

static void free_plan(struct kv_plan **p)
{
	kv_plan_free(*p);
}

/* The planner's windows must be those that the model computes with. */
static int check_plan(const struct kv_engine_pools_options *o, const struct kv_plan *p)
{
	const struct kv_model_shape *s = o->shape;

	if (p->n_pools > KV_MODEL_MAX_GROUPS || p->n_groups > KV_MODEL_MAX_GROUPS ||
	    p->n_components != 2 * s->n_layers)
		return kv_engine_error(-ENOTSUP,
				       "model: its plan has %u groups in %u pools with %u components, "
				       "not at most %d with K and V of %u layers",
				       p->n_groups, p->n_pools, p->n_components, KV_MODEL_MAX_GROUPS,
				       s->n_layers);
	for (uint32_t i = 0; i < p->n_components; i++) {
		const struct kv_plan_component *c = &p->components[i];
		const struct kv_plan_group *group = &p->groups[c->group];
		uint32_t window = group->kind == KV_GROUP_WINDOW ? group->window : 0;

		if (c->layer >= s->n_layers || window != (s->slides[c->layer] ? s->window : 0))
			return kv_engine_error(-ENOTSUP,
					       "model: its plan has layer %u in group %s, with a window "
					       "of %u tokens; the file's is %u",
					       c->layer, group->name, window,
					       c->layer < s->n_layers && s->slides[c->layer] ? s->window
											     : 0);
	}
	return 0;
}

static int open_pool(const struct kv_engine_pools_options *o, const struct kv_plan *p, uint32_t i,
		     struct kv_engine_pools *pools)
{
	const struct kv_layout *layout;
	int r;

	/* Of several pools each may have all: how long sequences are decides who needs how much. */
	KV_OPTIONS(kv_pool_options, options, .name = o->name, .model = o->model,
		   .revision = o->revision, .name_space = o->name_space, .plan = p, .plan_pool = i,
		   .max_bytes = p->n_pools > 1 ? o->gpu->arena_bytes : 0,
		   .gpu_mask = 1u << o->gpu->index, .mapped = 1);
	if ((size_t)snprintf(pools->names[i], KV_NAME_MAX, "%s%s%s", o->name,
			     p->n_pools > 1 ? "." : "", p->n_pools > 1 ? p->pools[i].name : "") >=
	    KV_NAME_MAX)
		return kv_engine_error(-EINVAL, "pool %s.%s: a name has at most %d bytes", o->name,
				       p->pools[i].name, KV_NAME_MAX - 1);
	r = kv_pool_open(o->client, &options, &pools->pools[i]);
	if (r < 0)
		return lib_error(r, "kv_pool_open");
	pools->n_pools++;

	layout = kv_pool_layout(pools->pools[i]);
	for (uint32_t c = 0; c < layout->n_components; c++) {
		const struct kv_component *part = &layout->components[c];

		r = kv_pool_view(pools->pools[i], o->gpu->index, c,
				 &pools->views[2 * part->layer + (part->role == KV_ROLE_V)]);
		if (r < 0)
			return lib_error(r, "kv_pool_view");
	}
	return 0;
}

static int make_groups(const struct kv_plan *p, struct kv_engine_pools *pools)
{
	struct kv_group groups[KV_MODEL_MAX_GROUPS];
	uint32_t which[KV_MODEL_MAX_GROUPS];
	int r;

	r = kv_plan_to_groups(p, pools->pools, NULL, 0, groups, which);
	if (r < 0)
		return lib_error(r, "kv_plan_to_groups");
	pools->n_groups = (uint32_t)r;
	for (uint32_t g = 0; g < pools->n_groups; g++)
		pools->group_pools[g] = groups[g].pool;
	for (uint32_t i = 0; i < p->n_components; i++)
		pools->of_layer[p->components[i].layer] = which[p->components[i].group];

	KV_OPTIONS(kv_groups_options, options, .n_groups = pools->n_groups, .groups = groups);
	r = kv_groups_new(&options, &pools->groups);
	return r < 0 ? lib_error(r, "kv_groups_new") : 0;
}

int kv_engine_pools_open(const struct kv_engine_pools_options *o, struct kv_engine_pools *ret)
{
	kv_cleanup(free_plan) struct kv_plan *p = NULL;
	uint32_t n_layers = o->shape->n_layers;
	int r;

	*ret = (struct kv_engine_pools){.client = o->client};
	r = plan(o, &p);
	if (!r)
		r = check_plan(o, p);
	if (r < 0)
		return r;

	ret->views = calloc(2 * n_layers, sizeof(*ret->views));
	ret->of_layer = calloc(n_layers, sizeof(*ret->of_layer));
	if (!ret->views || !ret->of_layer)
		r = kv_engine_error(-ENOMEM, "no memory for %u layers", n_layers);
	for (uint32_t i = 0; !r && i < p->n_pools; i++)
		r = open_pool(o, p, i, ret);
	if (!r)
		r = make_groups(p, ret);
	if (r < 0)
		kv_engine_pools_close(ret, o->name_space);
	return r;
}

void kv_engine_pools_close(struct kv_engine_pools *pools, bool drop)
{
	kv_groups_free(pools->groups);
	for (uint32_t i = 0; i < pools->n_pools; i++) {
		kv_pool_close(pools->pools[i]);
		if (drop)
			kv_pool_drop(pools->client, pools->names[i], KV_SEC);
	}
	free(pools->views);
	free(pools->of_layer);
	*pools = (struct kv_engine_pools){0};
}
