/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/plan.h"
#include "include/internal/error.h"
#include "libclient/pool_source.h"

static int read_config(struct kv_pool_source *source, struct kv_pool_options *o)
{
	struct kv_plan_options p = {.size = sizeof(p)};
	uint32_t tp;
	int r;

	if (o->planning && (o->planning->size < sizeof(size_t) || o->planning->size > 4096))
		return kv_error(-EINVAL, "planning.size: %zu given; sizeof the struct is needed",
				o->planning->size);
	if (o->planning)
		memcpy(&p, o->planning,
		       o->planning->size < sizeof(p) ? o->planning->size : sizeof(p));
	tp = p.tp ? p.tp : 1;
	if (o->tp_ranks && o->tp_ranks != tp)
		return kv_error(-EINVAL, "tp_ranks: %u given, planning.tp is %u", o->tp_ranks, tp);
	r = kv_arch_pools_read(o->config, &p, &source->config);
	if (r < 0)
		return r;
	source->sized = p.budget_bytes;
	o->tp_ranks = tp;
	o->plan = source->config.plan;
	o->model = o->model ? o->model : source->config.model;
	o->revision = o->revision ? o->revision : source->config.revision;
	return 0;
}

int kv_pool_source_init(struct kv_pool_source *source, struct kv_pool_options *o)
{
	int r;

	source->sized = o->plan;
	if (!!o->layout + !!o->plan + !!o->config > 1)
		return kv_error(-EINVAL,
				"layout, plan, config: one of them says the layout, %s are "
				"given",
				o->layout && o->plan && o->config ? "three" : "two");
	if (!o->config && o->planning)
		return kv_error(-EINVAL, "planning: given without a config to plan");
	if (o->config) {
		r = read_config(source, o);
		if (r < 0)
			return r;
	}
	if (!o->plan)
		return 0;
	if (o->plan_pool >= o->plan->n_pools)
		return kv_error(-EINVAL, "plan_pool: %u given, the plan has %u pools", o->plan_pool,
				o->plan->n_pools);
	source->components = calloc(o->plan->n_components, sizeof(*source->components));
	if (!source->components)
		return kv_no_memory();
	r = kv_plan_pool_layout(o->plan, o->plan_pool, source->components, &source->layout);
	if (r < 0)
		return r;
	r = kv_plan_pool_name(o->plan, o->plan_pool, o->name ? o->name : "", source->name);
	if (r < 0)
		return r;
	if (source->sized && !o->max_bytes)
		o->max_bytes = o->plan->pools[o->plan_pool].bytes;
	o->layout = &source->layout;
	o->name = source->name;
	return 0;
}

void kv_pool_source_deinit(struct kv_pool_source *source)
{
	kv_arch_pools_deinit(&source->config);
	free(source->components);
}
