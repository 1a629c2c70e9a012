/* SPDX-License-Identifier: Apache-2.0 */
/* Plans: their equations, their pools as layouts, and budgets of clients that share a device. */
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

/* Components that lie in one block together: of one pool, and in a slab of one group. */
static int together(const struct kv_plan *plan, const struct kv_plan_component *a,
		    const struct kv_plan_component *b)
{
	if (plan->layout == KV_PLAN_SLAB)
		return a->group == b->group;
	return plan->groups[a->group].pool == plan->groups[b->group].pool;
}

static int by_place(const void *a, const void *b, void *plan)
{
	const struct kv_plan_component *x = *(const struct kv_plan_component *const *)a;
	const struct kv_plan_component *y = *(const struct kv_plan_component *const *)b;
	const struct kv_plan *p = plan;
	uint32_t pool_x = p->groups[x->group].pool, pool_y = p->groups[y->group].pool;

	if (pool_x != pool_y)
		return pool_x < pool_y ? -1 : 1;
	if (p->layout == KV_PLAN_SLAB && x->group != y->group)
		return x->group < y->group ? -1 : 1;
	if (x->offset != y->offset)
		return x->offset < y->offset ? -1 : 1;
	return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static int check_components(const struct kv_plan *plan, const struct kv_plan_component **sorted)
{
	for (uint32_t i = 0; i < plan->n_components; i++)
		sorted[i] = &plan->components[i];
	qsort_r(sorted, plan->n_components, sizeof(sorted[0]), by_place, (void *)plan);
	for (uint32_t i = 0; i < plan->n_components; i++) {
		const struct kv_plan_component *c = sorted[i];
		const struct kv_plan_pool *pool = &plan->pools[plan->groups[c->group].pool];

		if (c->offset % KV_BLOCK_ALIGN || c->offset + c->bytes > pool->block_bytes)
			return kv_error(-EUCLEAN,
					"component %s of layer %u: lies outside its block", c->name,
					c->layer);
		if (i && together(plan, sorted[i - 1], c) &&
		    sorted[i - 1]->offset + sorted[i - 1]->bytes > c->offset)
			return kv_error(-EUCLEAN, "component %s of layer %u: overlaps another",
					c->name, c->layer);
	}
	return 0;
}

KV_PUBLIC int kv_plan_check(const struct kv_plan *plan)
{
	kv_cleanup(kv_freep) const struct kv_plan_component **sorted = NULL;
	uint64_t at = 0;

	sorted = calloc(plan->n_components, sizeof(sorted[0]));
	if (!sorted)
		return -ENOMEM;
	for (uint32_t p = 0; p < plan->n_pools; p++) {
		const struct kv_plan_pool *pool = &plan->pools[p];

		if (pool->offset != at || pool->bytes != pool->n_blocks * pool->block_bytes)
			return kv_error(-EUCLEAN, "pool %s: does not start where the last ended",
					pool->name);
		if (pool->block_bytes % KV_BLOCK_ALIGN || pool->n_blocks < 2)
			return kv_error(-EUCLEAN, "pool %s: %llu blocks of %llu bytes", pool->name,
					(unsigned long long)pool->n_blocks,
					(unsigned long long)pool->block_bytes);
		if (pool->n_blocks < pool->blocks_once + plan->n_seqs * pool->blocks_per_seq)
			return kv_error(-EUCLEAN, "pool %s: too small for the plan's sequences",
					pool->name);
		at += pool->bytes;
	}
	if (at != plan->used_bytes || plan->used_bytes + plan->waste_bytes != plan->budget_bytes)
		return kv_error(-EUCLEAN, "used %llu + waste %llu is not the budget %llu",
				(unsigned long long)plan->used_bytes,
				(unsigned long long)plan->waste_bytes,
				(unsigned long long)plan->budget_bytes);
	return check_components(plan, sorted);
}

/* Tokens of a block; of an encoder, whose K and V are a constant of the plan. */
static int layout_tokens(const struct kv_plan_pool *p, const struct kv_plan_component *c,
			 uint32_t *ret_tokens)
{
	uint64_t tokens = p->block_tokens ? p->block_tokens : 1;
	uint64_t row = (uint64_t)c->n_heads * c->head_dim * kv_dtype_bytes(c->dtype);

	if (!p->block_tokens && c->role != KV_ROLE_STATE && row)
		tokens = c->const_bytes / row;
	if (tokens > KV_MAX_BLOCK_TOKENS)
		return kv_error(-ENOTSUP,
				"pool %s: blocks of %llu tokens, a kv_layout has at most %d",
				p->name, (unsigned long long)tokens, KV_MAX_BLOCK_TOKENS);
	*ret_tokens = (uint32_t)tokens;
	return 0;
}

/* Strides and sizes that a layout has by itself are those of the plan. */
static int check_layout(const struct kv_plan_pool *p, const struct kv_layout *layout)
{
	uint64_t bytes;
	int r = kv_layout_block_bytes(layout, NULL, &bytes);

	if (r)
		return r == -EINVAL ? -ENOTSUP : r;
	/* Bytes that the plan rounds up to at the end are of no component: a pool needs none. */
	if (layout->flags & KV_LAYOUT_PLACED ? bytes > p->block_bytes : bytes != p->block_bytes)
		return kv_error(
			-ENOTSUP,
			"pool %s: its blocks have %llu bytes, as a kv_layout they would have %llu",
			p->name, (unsigned long long)p->block_bytes, (unsigned long long)bytes);
	return 0;
}

/* Groups take turns in a block, rows stand for several tokens, or a component's bytes are rounded. */
static bool must_be_placed(const struct kv_plan *plan, uint32_t pool)
{
	if (plan->pools[pool].paged || !plan->pools[pool].block_tokens)
		return false;
	if (plan->layout == KV_PLAN_SLAB)
		return true;
	for (uint32_t i = 0; i < plan->n_components; i++) {
		const struct kv_plan_group *g = &plan->groups[plan->components[i].group];

		if (g->pool == pool && (plan->components[i].round > 1 || g->stride > 1))
			return true;
	}
	return false;
}

static uint32_t placed_rows(const struct kv_plan_group *g, const struct kv_plan_component *c)
{
	return c->role == KV_ROLE_STATE ? 0 : (g->block_tokens + g->stride - 1) / g->stride;
}

KV_PUBLIC int kv_plan_pool_layout(const struct kv_plan *plan, uint32_t pool,
				  struct kv_component *components, struct kv_layout *ret_layout)
{
	const struct kv_plan_pool *p;
	struct kv_layout layout = {.components = components};
	uint32_t n = 0;
	bool placed;
	int r;

	if (pool >= plan->n_pools)
		return kv_error(-EINVAL, "pool: %u given, the plan has %u", pool, plan->n_pools);
	p = &plan->pools[pool];
	placed = must_be_placed(plan, pool);
	/* As they lie in a block: group by group. */
	for (uint32_t i = 0, g = 0; g < plan->n_groups; i = (i + 1) % plan->n_components, g += !i) {
		const struct kv_plan_component *c = &plan->components[i];

		if (c->group != g || plan->groups[g].pool != pool)
			continue;
		if (n == KV_MAX_COMPONENTS)
			return kv_error(-ENOTSUP,
					"pool %s: more than %d components, a kv_layout has "
					"no more",
					p->name, KV_MAX_COMPONENTS);
		r = layout_tokens(p, c, &layout.block_tokens);
		if (r)
			return r;
		components[n++] = (struct kv_component){
			.layer = c->layer,
			.role = c->role,
			.dtype = c->dtype,
			.n_heads = c->n_heads,
			.head_dim = c->head_dim,
			.scale = 1,
			.n_rows = placed ? placed_rows(&plan->groups[g], c) : 0,
			.offset = placed ? c->offset : 0,
		};
	}
	layout.flags = placed ? KV_LAYOUT_PLACED : 0;
	layout.kind = p->paged ? KV_LAYOUT_PAGED : KV_LAYOUT_FLAT;
	layout.n_components = n;
	r = check_layout(p, &layout);
	if (r)
		return r;
	*ret_layout = layout;
	return (int)n;
}

int kv_plan_pool_name(const struct kv_plan *plan, uint32_t pool, const char *name,
		      char ret_name[KV_NAME_MAX])
{
	const char *part = plan->n_pools > 1 ? plan->pools[pool].name : "";
	char full[KV_NAME_MAX];

	if ((size_t)snprintf(full, sizeof(full), "%s%s%s", name, *part ? "." : "", part) >=
	    sizeof(full))
		return kv_error(-EINVAL, "name: '%s%s%s' has more than %d bytes", name,
				*part ? "." : "", part, KV_NAME_MAX - 1);
	memcpy(ret_name, full, sizeof(full));
	return 0;
}

KV_PUBLIC int kv_plan_local_heads(uint32_t n_heads, uint32_t tp, uint32_t *ret_heads)
{
	if (!n_heads || !tp)
		return kv_error(-EINVAL, "KV heads: %u on %u ranks, at least 1 of each is needed",
				n_heads, tp);
	if (n_heads % tp && tp % n_heads)
		return kv_error(-EINVAL, "tp: %u ranks and %u KV heads, neither divides the other",
				tp, n_heads);
	*ret_heads = n_heads > tp ? n_heads / tp : 1;
	return 0;
}

KV_PUBLIC uint32_t kv_plan_first_head(uint32_t n_heads, uint32_t tp, uint32_t rank)
{
	return (uint32_t)((uint64_t)rank * n_heads / tp);
}

KV_PUBLIC int kv_plan_budget(const struct kv_plan_rank *ranks, uint32_t n, uint32_t share_ppm,
			     uint64_t *ret_bytes)
{
	uint64_t least = UINT64_MAX;

	if (share_ppm > 1000000)
		return kv_error(-EINVAL, "share_ppm: %u given, at most 1000000 (all)", share_ppm);
	if (!n)
		return kv_error(-EINVAL, "ranks: none given");
	for (uint32_t i = 0; i < n; i++) {
		uint64_t share =
			(uint64_t)((unsigned __int128)ranks[i].total_bytes * share_ppm / 1000000);

		if (ranks[i].own_bytes >= share)
			return kv_error(
				-ENOSPC,
				"ranks[%u].own_bytes: %llu in use by the client itself, its "
				"share is %llu",
				i, (unsigned long long)ranks[i].own_bytes,
				(unsigned long long)share);
		share -= ranks[i].own_bytes;
		least = share < least ? share : least;
	}
	for (uint32_t i = 0; i < n; i++)
		if (ranks[i].free_bytes < least)
			return kv_error(
				-ENOSPC,
				"ranks[%u].free_bytes: %llu, and the client's share leaves it "
				"%llu: the shares given so far can't be served together",
				i, (unsigned long long)ranks[i].free_bytes,
				(unsigned long long)least);
	*ret_bytes = least;
	return 0;
}

static uint64_t room_of(const struct kv_plan_share *s)
{
	return s->max_bytes && s->max_bytes < s->grant_bytes ? 0
	       : s->max_bytes				     ? s->max_bytes - s->grant_bytes
							     : UINT64_MAX;
}

KV_PUBLIC int kv_plan_colocate(uint64_t budget_bytes, struct kv_plan_share *shares, uint32_t n)
{
	unsigned __int128 minimum = 0;
	uint64_t left;

	for (uint32_t i = 0; i < n; i++) {
		minimum += shares[i].min_bytes;
		if (shares[i].max_bytes && shares[i].max_bytes < shares[i].min_bytes)
			return kv_error(-EINVAL, "pools[%u]: max %llu is below min %llu", i,
					(unsigned long long)shares[i].max_bytes,
					(unsigned long long)shares[i].min_bytes);
		shares[i].grant_bytes = shares[i].min_bytes;
	}
	if (minimum > budget_bytes)
		return kv_error(-ENOSPC, "budget_bytes: %llu given, the minima sum up to %llu",
				(unsigned long long)budget_bytes,
				minimum > UINT64_MAX ? ~0ull : (unsigned long long)minimum);
	left = budget_bytes - (uint64_t)minimum;
	/* Each round ends with the money spent or with a pool at its maximum. */
	for (;;) {
		uint64_t weights = 0, round = left;

		for (uint32_t i = 0; i < n; i++)
			weights +=
				room_of(&shares[i]) ? (shares[i].weight ? shares[i].weight : 1) : 0;
		if (!weights || !left)
			return 0;
		for (uint32_t i = 0; i < n && left; i++) {
			uint64_t room = room_of(&shares[i]), part;

			if (!room)
				continue;
			part = (uint64_t)((unsigned __int128)round *
					  (shares[i].weight ? shares[i].weight : 1) / weights);
			part = part < room ? part : room;
			shares[i].grant_bytes += part;
			left -= part;
		}
		if (left == round) { /* less than a byte each */
			for (uint32_t i = 0; i < n && left; i++)
				if (room_of(&shares[i])) {
					shares[i].grant_bytes++;
					left--;
				}
		}
	}
}
