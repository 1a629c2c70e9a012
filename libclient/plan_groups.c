/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From a plan to the groups of a sequence. Groups of a plan whose components lie in the same blocks take
 * and leave them together: they are one group, which keeps what the most demanding of them needs.
 */
#include <errno.h>

#include "libclient/group.h"

static bool is_together(const struct kv_plan *plan, const struct kv_plan_group *a,
			const struct kv_plan_group *b)
{
	return a->pool == b->pool && plan->layout != KV_PLAN_SLAB && plan->layout != KV_PLAN_GROUPED;
}

/* A state inside of blocks is there where its block is: all of them are kept. */
static uint32_t kind_in_block(const struct kv_plan *plan, const struct kv_plan_group *group)
{
	bool inside = group->kind == KV_GROUP_STATE && plan->pools[group->pool].block_tokens;

	return inside ? KV_GROUP_FULL : group->kind;
}

static void join(const struct kv_plan *plan, struct kv_group *to, const struct kv_plan_group *group)
{
	uint32_t kind = kind_in_block(plan, group);
	uint32_t window = kind == KV_GROUP_FULL ? 0 : group->window;

	if (to->kind == KV_GROUP_WINDOW && kind == KV_GROUP_WINDOW) {
		to->window = window > to->window ? window : to->window;
	} else if (to->kind != kind || to->window != window) {
		to->kind = KV_GROUP_FULL;
		to->window = 0;
	}
}

static int check_pool(const struct kv_plan *plan, uint32_t g, const struct kv_pool *pool)
{
	const struct kv_plan_group *group = &plan->groups[g];
	const struct kv_plan_pool *planned = &plan->pools[group->pool];
	uint32_t tokens;

	if (!pool)
		return kv_error(-EINVAL, "pools[%u]: none given; group '%s' has its blocks there",
				group->pool, group->name);
	tokens = pool->head.block_tokens;
	if (pool->head.block_bytes != planned->block_bytes)
		return kv_error(-EINVAL, "pools[%u]: its blocks have %llu bytes, the plan's %llu",
				group->pool, (unsigned long long)pool->head.block_bytes,
				(unsigned long long)planned->block_bytes);
	if (group->kind != KV_GROUP_STATE && group->block_tokens != tokens)
		return kv_error(-ENOTSUP, "groups[%u]: '%s' has %u tokens in a block, its pool %u; plan "
				"with layout grouped or split", g, group->name, group->block_tokens, tokens);
	return 0;
}

static struct kv_group new_group(const struct kv_plan *plan, const struct kv_plan_group *group,
				 struct kv_pool *pool, const struct kv_plan_options *options,
				 uint32_t interval)
{
	struct kv_group to = { .kind = kind_in_block(plan, group), .pool = pool };

	if (to.kind == KV_GROUP_STATE) {
		to.interval = interval ? interval : (uint32_t)plan->prefix_tokens;
		to.n_drafts = options ? options->draft_tokens : 0;
		to.n_checkpoints = options ? options->n_checkpoints : 0;
	} else if (to.kind != KV_GROUP_FULL) {
		to.window = group->window;
	}
	return to;
}

KV_PUBLIC int kv_plan_to_groups(const struct kv_plan *plan, struct kv_pool *const *pools,
				const struct kv_plan_options *options, uint32_t interval,
				struct kv_group *ret_groups, uint32_t *ret_which)
{
	struct kv_plan_options o = { 0 };
	uint32_t which[KV_MAX_GROUPS], n = 0;
	int r = options ? kv_options_copy(&o, sizeof(o), options) : 0;

	if (r < 0)
		return r;
	if (plan->n_groups > KV_MAX_GROUPS)
		return kv_error(-ENOTSUP, "n_groups: the plan has %u, at most %d are possible",
				plan->n_groups, KV_MAX_GROUPS);
	if (!interval && plan->prefix_tokens > UINT32_MAX)
		return kv_error(-ENOTSUP, "prefix_tokens: %llu, groups meet too rarely",
				(unsigned long long)plan->prefix_tokens);
	for (uint32_t g = 0; g < plan->n_groups; g++) {
		const struct kv_plan_group *group = &plan->groups[g];
		uint32_t k = 0;

		which[g] = UINT32_MAX;
		if (group->kind == KV_GROUP_CROSS)
			continue;
		r = check_pool(plan, g, pools[group->pool]);
		if (r < 0)
			return r;
		while (k < g && (which[k] == UINT32_MAX || !is_together(plan, &plan->groups[k], group)))
			k++;
		if (k < g) {
			which[g] = which[k];
			join(plan, &ret_groups[which[g]], group);
		} else {
			which[g] = n;
			ret_groups[n++] = new_group(plan, group, pools[group->pool],
						    options ? &o : NULL, interval);
		}
	}
	for (uint32_t g = 0; ret_which && g < plan->n_groups; g++)
		ret_which[g] = which[g];
	return (int)n;
}
