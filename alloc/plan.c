/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans: groups and components to pools within a budget.
 *
 * How many fit: n sequences of the given context are the largest number with
 *	sum over pools of (blocks_once + n * blocks_per_seq) * block_bytes <= budget
 * and what is left serves one more, shorter sequence, as long as it can be. So the count of no pool
 * ever falls when the budget grows, pools stay in proportion, and a plan made with its own size as
 * the budget is the same plan. If the number of sequences is given and they all fit, what is left
 * extends the pools of groups that keep all tokens: that is room for prefixes.
 */
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

#define MAX_BLOCK_BYTES ((uint64_t)1 << 40)
#define MAX_TOKENS	((uint64_t)1 << 40) /* of a sequence */

static uint64_t ceil_div(uint64_t a, uint64_t b)
{
	return a / b + (a % b != 0);
}

static uint64_t min_u64(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

static uint64_t max_u64(uint64_t a, uint64_t b)
{
	return a > b ? a : b;
}

static void free_plan(struct kv_plan **plan)
{
	kv_plan_free(*plan);
}

static bool is_row(const struct kv_plan_group *g)
{
	return g->kind == KV_GROUP_STATE || g->kind == KV_GROUP_CROSS;
}

static int check_group(const struct kv_plan_group *g, uint32_t i)
{
	if (g->kind < KV_GROUP_FULL || g->kind > KV_GROUP_CROSS)
		return kv_error(-EINVAL, "groups[%u].kind: %u is not a kv_group_kind", i, g->kind);
	if (is_row(g))
		return 0;
	if ((g->kind == KV_GROUP_WINDOW || g->kind == KV_GROUP_CHUNKED) && !g->window)
		return kv_error(-EINVAL, "groups[%u].window: 0 given, a window of tokens is needed",
				i);
	if (!g->stride)
		return kv_error(-EINVAL, "groups[%u].stride: 0 given, 1 or more tokens a row", i);
	if (!g->block_tokens || g->block_tokens > KV_PLAN_MAX_BLOCK_TOKENS)
		return kv_error(-EINVAL, "groups[%u].block_tokens: %u given, 1..%u allowed", i,
				g->block_tokens, KV_PLAN_MAX_BLOCK_TOKENS);
	return 0;
}

/* Bytes of a component in a block. */
static int size_component(const struct kv_plan_group *g, struct kv_plan_component *c, uint32_t i)
{
	uint64_t rows = is_row(g) ? 1 : ceil_div(g->block_tokens, g->stride), bytes;
	uint64_t round = c->round ? c->round : 1;

	if (is_row(g) && c->slot_bytes)
		return kv_error(
			-EINVAL,
			"components[%u].slot_bytes: %llu given, a state has const_bytes only", i,
			(unsigned long long)c->slot_bytes);
	if (__builtin_mul_overflow(c->slot_bytes, rows, &bytes) || bytes > MAX_BLOCK_BYTES ||
	    c->const_bytes > MAX_BLOCK_BYTES)
		return kv_error(-EOVERFLOW, "components[%u]: more than 2^40 bytes in a block", i);
	c->bytes = ceil_div(bytes, round) * round + c->const_bytes;
	return 0;
}

/* Where blocks of all groups end, which is where cached prefixes can. */
static uint64_t common_tokens(const struct kv_plan *plan)
{
	uint64_t common = 1;

	for (uint32_t g = 0; g < plan->n_groups; g++) {
		uint64_t a = common, b = plan->groups[g].block_tokens;

		if (is_row(&plan->groups[g]))
			continue;
		while (b) {
			uint64_t t = a % b;

			a = b;
			b = t;
		}
		if (__builtin_mul_overflow(common / a, (uint64_t)plan->groups[g].block_tokens,
					   &common))
			return UINT64_MAX;
	}
	return common;
}

/* Which pool a group's blocks come from, and the pools. */
static int assign_pools(struct kv_plan *plan)
{
	bool shared = plan->layout != KV_PLAN_GROUPED;
	bool states_inside = plan->layout == KV_PLAN_FLAT;
	uint32_t common = UINT32_MAX;

	for (uint32_t g = 0; g < plan->n_groups; g++) {
		struct kv_plan_group *group = &plan->groups[g];
		bool joins = shared &&
			     (!is_row(group) || (states_inside && group->kind == KV_GROUP_STATE));
		struct kv_plan_pool *pool;

		if (joins && common != UINT32_MAX) {
			group->pool = common;
			continue;
		}
		group->pool = plan->n_pools++;
		pool = &plan->pools[group->pool];
		pool->paged = plan->layout == KV_PLAN_PAGED && joins;
		if (joins)
			common = group->pool;
		snprintf(pool->name, sizeof(pool->name), "%s",
			 joins ? (plan->layout == KV_PLAN_SLAB ? "slab" : "blocks") : group->name);
	}
	for (uint32_t g = 0; g < plan->n_groups; g++) {
		const struct kv_plan_group *group = &plan->groups[g];
		struct kv_plan_pool *pool = &plan->pools[group->pool];

		if (is_row(group))
			continue;
		if (pool->block_tokens && plan->layout != KV_PLAN_SLAB &&
		    pool->block_tokens != group->block_tokens)
			return kv_error(
				-EINVAL,
				"groups[%u].block_tokens: %u given, others of its pool have "
				"%u",
				g, group->block_tokens, pool->block_tokens);
		pool->block_tokens = (uint32_t)max_u64(pool->block_tokens, group->block_tokens);
	}
	return 0;
}

/* Offsets of components; sizes of groups and pools. In a slab each group starts at 0. */
static int place_components(struct kv_plan *plan)
{
	bool slab = plan->layout == KV_PLAN_SLAB;
	int r;

	for (uint32_t p = 0; p < plan->n_pools; p++) {
		struct kv_plan_pool *pool = &plan->pools[p];
		uint64_t at = 0;

		for (uint32_t g = 0; g < plan->n_groups; g++) {
			struct kv_plan_group *group = &plan->groups[g];
			uint64_t payload = 0;

			if (group->pool != p)
				continue;
			if (slab)
				at = 0;
			for (uint32_t i = 0; i < plan->n_components; i++) {
				struct kv_plan_component *c = &plan->components[i];

				if (c->group != g)
					continue;
				r = size_component(group, c, i);
				if (r)
					return r;
				c->offset = at;
				at += ceil_div(c->bytes, KV_BLOCK_ALIGN) * KV_BLOCK_ALIGN;
				payload += c->bytes;
				if (at > MAX_BLOCK_BYTES)
					return kv_error(-EOVERFLOW,
							"pool %s: a block would exceed 2^40 bytes",
							pool->name);
			}
			group->payload_bytes = payload;
			pool->block_bytes = max_u64(pool->block_bytes, at);
			pool->payload_bytes = slab ? max_u64(pool->payload_bytes, payload)
						   : pool->payload_bytes + payload;
		}
		if (!pool->block_bytes)
			return kv_error(-EINVAL, "pool %s: its components have 0 bytes",
					pool->name);
	}
	return 0;
}

/* Blocks of a group that @tokens of a sequence hold between steps. */
static uint64_t group_blocks(const struct kv_plan_group *g, uint64_t tokens, uint64_t rows)
{
	uint64_t all;

	if (!tokens)
		return 0;
	if (g->kind == KV_GROUP_STATE)
		return rows;
	if (g->kind == KV_GROUP_CROSS)
		return 1;
	all = ceil_div(tokens, g->block_tokens);
	switch (g->kind) {
	case KV_GROUP_WINDOW:
		/* The window may start and end inside a block. */
		return min_u64(all, ceil_div(g->window - 1, g->block_tokens) + 1);
	case KV_GROUP_CHUNKED:
		return min_u64(all, ceil_div(g->window, g->block_tokens) +
					    (g->window % g->block_tokens != 0));
	default:
		return all;
	}
}

/* Blocks beyond group_blocks() while a chunk of a prompt is being written. */
static uint64_t group_once(const struct kv_plan_group *g, uint64_t context, uint64_t chunk)
{
	uint64_t all, kept;

	if (g->kind != KV_GROUP_WINDOW && g->kind != KV_GROUP_CHUNKED)
		return 0;
	all = ceil_div(context, g->block_tokens);
	kept = group_blocks(g, context, 0);
	return min_u64(all - kept, ceil_div(chunk, g->block_tokens));
}

static void pool_blocks(const struct kv_plan *plan, uint64_t tokens, uint64_t *ret_blocks)
{
	bool slab = plan->layout == KV_PLAN_SLAB;

	memset(ret_blocks, 0, plan->n_pools * sizeof(ret_blocks[0]));
	for (uint32_t g = 0; g < plan->n_groups; g++) {
		const struct kv_plan_group *group = &plan->groups[g];
		uint64_t *n = &ret_blocks[group->pool];
		uint64_t rows = plan->pools[group->pool].block_tokens ? 1 : plan->rows_per_seq;
		uint64_t blocks = group_blocks(group, tokens, rows);

		*n = slab ? *n + blocks : max_u64(*n, blocks);
	}
}

/* Blocks that @tokens more would take from pools that keep them for good. */
static void pool_growth(const struct kv_plan *plan, uint64_t tokens, uint64_t *ret_blocks)
{
	bool slab = plan->layout == KV_PLAN_SLAB, has_full = false, has_tokens = false;

	memset(ret_blocks, 0, plan->n_pools * sizeof(ret_blocks[0]));
	for (uint32_t g = 0; g < plan->n_groups; g++) {
		has_full |= plan->groups[g].kind == KV_GROUP_FULL;
		has_tokens |= !is_row(&plan->groups[g]);
	}
	for (uint32_t g = 0; g < plan->n_groups; g++) {
		const struct kv_plan_group *group = &plan->groups[g];
		uint64_t *n = &ret_blocks[group->pool], blocks;

		if (has_full ? group->kind != KV_GROUP_FULL : has_tokens && is_row(group))
			continue;
		blocks = is_row(group) ? tokens : ceil_div(tokens, group->block_tokens);
		*n = slab ? *n + blocks : max_u64(*n, blocks);
	}
}

/* Bytes of @blocks in each pool; more than 2^64 counts as more than any budget. */
static unsigned __int128 bytes_of(const struct kv_plan *plan, const uint64_t *blocks)
{
	unsigned __int128 sum = 0;

	for (uint32_t p = 0; p < plan->n_pools; p++)
		sum += (unsigned __int128)blocks[p] * plan->pools[p].block_bytes;
	return sum;
}

typedef void blocks_fn(const struct kv_plan *plan, uint64_t tokens, uint64_t *ret_blocks);

/* Most tokens, up to @max, whose blocks fit in @bytes. */
static uint64_t tokens_in(const struct kv_plan *plan, blocks_fn *blocks_of, uint64_t bytes,
			  uint64_t max, uint64_t *scratch)
{
	uint64_t fits = 0, fails = max + 1;

	while (fails - fits > 1) {
		uint64_t mid = fits + (fails - fits) / 2;

		blocks_of(plan, mid, scratch);
		if (bytes_of(plan, scratch) > bytes)
			fails = mid;
		else
			fits = mid;
	}
	return fits;
}

static int fit(struct kv_plan *plan, uint64_t max_seqs, uint64_t *blocks, uint64_t *scratch)
{
	unsigned __int128 once, per_seq;
	uint64_t left, rest;
	bool all;

	for (uint32_t p = 0; p < plan->n_pools; p++)
		scratch[p] = plan->pools[p].blocks_once;
	once = bytes_of(plan, scratch);
	pool_blocks(plan, plan->context, blocks);
	per_seq = bytes_of(plan, blocks);
	if (per_seq > UINT64_MAX)
		return kv_error(-EOVERFLOW, "context: %llu tokens take more than 2^64 bytes",
				(unsigned long long)plan->context);
	plan->seq_bytes = (uint64_t)per_seq;
	pool_blocks(plan, 1, scratch);
	if (once + bytes_of(plan, scratch) > plan->budget_bytes) {
		once += bytes_of(plan, scratch);
		return kv_error(-ENOSPC,
				"budget_bytes: %llu given, %llu needed for the null block and a "
				"sequence of one token",
				(unsigned long long)plan->budget_bytes,
				once > UINT64_MAX ? ~0ull : (unsigned long long)once);
	}
	left = plan->budget_bytes - (uint64_t)once;
	plan->n_seqs = left / plan->seq_bytes;
	all = max_seqs && plan->n_seqs >= max_seqs;
	if (all)
		plan->n_seqs = max_seqs;
	left -= plan->n_seqs * plan->seq_bytes;
	rest = tokens_in(plan, all ? pool_growth : pool_blocks, left,
			 all ? min_u64(left, MAX_TOKENS) : plan->context, scratch);
	(all ? pool_growth : pool_blocks)(plan, rest, scratch);
	for (uint32_t p = 0; p < plan->n_pools; p++)
		plan->pools[p].n_blocks =
			plan->pools[p].blocks_once + plan->n_seqs * blocks[p] + scratch[p];
	if (__builtin_mul_overflow(plan->n_seqs, plan->context, &plan->n_tokens) ||
	    __builtin_add_overflow(plan->n_tokens, rest, &plan->n_tokens))
		plan->n_tokens = UINT64_MAX;
	return 0;
}

/* Bytes of a sequence that hold something, and of a token and a state. */
static void need(struct kv_plan *plan)
{
	for (uint32_t i = 0; i < plan->n_components; i++) {
		const struct kv_plan_component *c = &plan->components[i];
		const struct kv_plan_group *g = &plan->groups[c->group];
		uint64_t kept = plan->context;

		if (is_row(g)) {
			plan->state_bytes += g->kind == KV_GROUP_STATE ? c->const_bytes : 0;
			plan->seq_need_bytes += c->const_bytes;
			continue;
		}
		if (g->kind == KV_GROUP_FULL)
			plan->token_bytes += ceil_div(c->slot_bytes, g->stride);
		else
			kept = min_u64(kept, g->window);
		plan->seq_need_bytes += c->slot_bytes * (kept / g->stride);
	}
}

static void sum_up(struct kv_plan *plan)
{
	uint64_t at = 0;

	for (uint32_t p = 0; p < plan->n_pools; p++) {
		struct kv_plan_pool *pool = &plan->pools[p];

		pool->offset = at;
		pool->bytes = pool->n_blocks * pool->block_bytes;
		at += pool->bytes;
		plan->null_bytes += pool->block_bytes;
		plan->align_bytes += pool->n_blocks * (pool->block_bytes - pool->payload_bytes);
	}
	plan->used_bytes = at;
	plan->waste_bytes = plan->budget_bytes - at;
}

static int build(struct kv_plan *plan, const struct kv_plan_options *options)
{
	kv_cleanup(kv_freep) uint64_t *blocks = NULL;
	uint64_t chunk = options->chunk_tokens ? options->chunk_tokens : 2048;
	int r;

	r = assign_pools(plan);
	if (r)
		return r;
	r = place_components(plan);
	if (r)
		return r;

	blocks = calloc(2 * (size_t)plan->n_pools, sizeof(*blocks));
	if (!blocks)
		return -ENOMEM;
	for (uint32_t p = 0; p < plan->n_pools; p++)
		plan->pools[p].blocks_once = 1;
	pool_blocks(plan, plan->context, blocks);
	for (uint32_t g = 0; g < plan->n_groups; g++) {
		struct kv_plan_group *group = &plan->groups[g];
		struct kv_plan_pool *pool = &plan->pools[group->pool];
		uint64_t once = group_once(group, plan->context, chunk);

		group->blocks_per_seq = group_blocks(group, plan->context,
						     pool->block_tokens ? 1 : plan->rows_per_seq);
		pool->blocks_per_seq = blocks[group->pool];
		/* Where another group of the same blocks keeps more, nothing is added. */
		if (plan->layout == KV_PLAN_SLAB)
			pool->blocks_once += once;
		else if (group->blocks_per_seq == pool->blocks_per_seq)
			pool->blocks_once = max_u64(pool->blocks_once, 1 + once);
	}
	r = fit(plan, options->n_seqs, blocks, blocks + plan->n_pools);
	if (r)
		return r;
	plan->prefix_tokens = common_tokens(plan);
	need(plan);
	sum_up(plan);
	return 0;
}

KV_PUBLIC int kv_plan_groups(const struct kv_plan_group *groups, uint32_t n_groups,
			     const struct kv_plan_component *components, uint32_t n_components,
			     const struct kv_plan_options *options, struct kv_plan **ret_plan)
{
	kv_cleanup(free_plan) struct kv_plan *plan = NULL;
	int r;

	if (options->layout < KV_PLAN_FLAT || options->layout > KV_PLAN_SLAB)
		return kv_error(-EINVAL, "layout: %u is not a kv_plan_layout", options->layout);
	if (!n_groups || n_groups > UINT16_MAX)
		return kv_error(-EINVAL, "groups: %u given, at least one is needed", n_groups);
	if (!n_components || n_components > KV_PLAN_MAX_COMPONENTS)
		return kv_error(-EINVAL, "components: %u given, 1..%u allowed", n_components,
				KV_PLAN_MAX_COMPONENTS);
	if (!options->context || options->context > MAX_TOKENS)
		return kv_error(-EINVAL, "context: %llu given, 1..2^40 tokens allowed",
				(unsigned long long)options->context);
	plan = calloc(1, sizeof(*plan));
	if (!plan)
		return -ENOMEM;
	plan->groups = calloc(n_groups, sizeof(*plan->groups));
	plan->components = calloc(n_components, sizeof(*plan->components));
	plan->pools = calloc(n_groups, sizeof(*plan->pools));
	if (!plan->groups || !plan->components || !plan->pools)
		return -ENOMEM;
	plan->layout = options->layout;
	plan->budget_bytes = options->budget_bytes;
	plan->context = options->context;
	plan->rows_per_seq = 1 + (uint64_t)options->draft_tokens + options->n_checkpoints;
	plan->n_groups = n_groups;
	plan->n_components = n_components;
	memcpy(plan->groups, groups, n_groups * sizeof(*groups));
	memcpy(plan->components, components, n_components * sizeof(*components));
	for (uint32_t g = 0; g < n_groups; g++) {
		r = check_group(&groups[g], g);
		if (r)
			return r;
	}
	for (uint32_t g = 0; g < n_groups; g++)
		if (options->kernel_tokens && !is_row(&groups[g]) && groups[g].stride == 1 &&
		    groups[g].block_tokens % options->kernel_tokens)
			return kv_error(-EINVAL,
					"kernel_tokens: %u does not divide group %s's blocks of %u",
					options->kernel_tokens, groups[g].name,
					groups[g].block_tokens);
	for (uint32_t i = 0; i < n_components; i++)
		if (components[i].group >= n_groups)
			return kv_error(-EINVAL, "components[%u].group: %u given, %u groups", i,
					components[i].group, n_groups);
	r = build(plan, options);
	if (r)
		return r;
	*ret_plan = kv_steal(plan);
	return 0;
}

KV_PUBLIC struct kv_plan *kv_plan_free(struct kv_plan *plan)
{
	if (!plan)
		return NULL;
	free(plan->groups);
	free(plan->components);
	free(plan->pools);
	free(plan);
	return NULL;
}

KV_PUBLIC void kv_plan_cost(const struct kv_plan *plan, uint64_t tokens, uint64_t *ret_blocks)
{
	pool_blocks(plan, tokens, ret_blocks);
}
