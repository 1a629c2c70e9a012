/* SPDX-License-Identifier: Apache-2.0 */
/* Reference calculators: several groups of one pool that share prefixes together. */
#include <stdlib.h>
#include <string.h>

#include "alloc/compat_cache.h"

static int64_t gcd(int64_t a, int64_t b)
{
	while (b) {
		int64_t t = a % b;

		a = b;
		b = t;
	}
	return a;
}

void kv_compat_cache_init(struct kv_compat_cache *c, struct kv_compat_blocks *pool,
			  const struct kv_compat_cache_group *groups, size_t n)
{
	memset(c, 0, sizeof(*c));
	c->pool = pool;
	c->n_groups = n;
	c->base = c->lcm = groups[0].block;
	for (size_t g = 0; g < n; g++) {
		c->group[g] = groups[g];
		if (groups[g].kind == KV_COMPAT_CACHE_STATE)
			c->group[g].window = 2;
		c->base = gcd(c->base, groups[g].block);
		c->lcm = c->lcm / gcd(c->lcm, groups[g].block) * groups[g].block;
	}
}

void kv_compat_hashes_extend(struct kv_compat_hashes *h, const int32_t *tokens, size_t n_tokens,
			     int64_t base)
{
	size_t n = n_tokens / (size_t)base;

	if (n > h->room) {
		h->room = 2 * n;
		h->hash = realloc(h->hash, h->room * sizeof(h->hash[0]));
		if (!h->hash)
			abort(); /* a simulation of a few hundred pages */
	}
	for (; h->n < n; h->n++) {
		const uint8_t *prior = h->n ? h->hash[h->n - 1] : NULL;

		kv_page_key(prior, tokens + h->n * (size_t)base, (size_t)base, NULL, 0, h->hash[h->n]);
	}
}

void kv_compat_cache_key(const struct kv_compat_cache *c, size_t group,
			 const struct kv_compat_hashes *h, size_t block, struct kv_compat_key *ret)
{
	size_t m = (size_t)(c->group[group].block / c->base);

	memset(ret, 0, sizeof(*ret));
	ret->group = (uint32_t)group;
	kv_page_key_fold(h->hash[block * m], m, ret->hash);
}

static int32_t find(const struct kv_compat_cache *c, const struct kv_compat_blocks *pool, size_t g,
		    const struct kv_compat_hashes *h, int64_t block)
{
	struct kv_compat_key key;

	kv_compat_cache_key(c, g, h, (size_t)block, &key);
	return kv_compat_blocks_find(pool, &key);
}

/* Longest run of hits from block @begin. Fills @ids, returns the boundary in blocks. */
static int64_t match_full(const struct kv_compat_cache *c, const struct kv_compat_blocks *pool,
			  size_t g, const struct kv_compat_hashes *h, int64_t begin, int64_t end,
			  struct kv_compat_ids *ids)
{
	ids->n = 0;
	for (int64_t b = begin; b < end; b++) {
		int32_t id = find(c, pool, g, h, b);

		if (!id)
			return b;
		kv_compat_ids_push(ids, id);
	}
	return kv_max64(begin, end);
}

/* The last boundary with enough hits behind it, or with hits all the way down to @begin. */
static int64_t match_window(const struct kv_compat_cache *c, const struct kv_compat_blocks *pool,
			    size_t g, const struct kv_compat_hashes *h, int64_t begin, int64_t end,
			    struct kv_compat_ids *ids)
{
	int64_t need = kv_ceil_div(c->group[g].window - 1, c->group[g].block);
	int64_t boundary = end, b;

	for (;;) {
		for (b = boundary - 1; b >= begin && b >= boundary - need; b--)
			if (!find(c, pool, g, h, b))
				break;
		if (b < begin || b < boundary - need)
			break;
		boundary = b;
	}
	ids->n = 0;
	for (b = begin; b < boundary; b++)
		kv_compat_ids_push(ids, b < boundary - need ? 0 : find(c, pool, g, h, b));
	return kv_max64(begin, boundary);
}

void kv_compat_cache_match(const struct kv_compat_cache *c, const struct kv_compat_blocks *pool,
			   const struct kv_compat_hashes *h, int64_t max_tokens, int64_t floor,
			   struct kv_compat_match *ret)
{
	int64_t boundary = max_tokens, before;

	memset(ret, 0, sizeof(*ret));
	boundary = kv_max64(floor, boundary / c->lcm * c->lcm);
	for (size_t g = 0; g < c->n_groups; g++) {
		int64_t block = c->group[g].block;

		if (c->group[g].kind != KV_COMPAT_CACHE_FULL)
			continue;
		boundary = kv_min64(boundary, block * match_full(c, pool, g, h, floor / block,
								 boundary / block, &ret->list[g]));
		boundary = kv_max64(floor, boundary / c->lcm * c->lcm);
	}
	do {
		before = boundary;
		for (size_t g = 0; g < c->n_groups; g++) {
			int64_t block = c->group[g].block;

			if (c->group[g].kind == KV_COMPAT_CACHE_FULL)
				continue;
			boundary = kv_min64(boundary,
					    block * match_window(c, pool, g, h, floor / block,
								 boundary / block, &ret->list[g]));
			boundary = kv_max64(floor, boundary / c->lcm * c->lcm);
		}
	} while (boundary != before);
	ret->hit_tokens = boundary;
	for (size_t g = 0; g < c->n_groups; g++)
		ret->list[g].n = (size_t)kv_min64((int64_t)ret->list[g].n,
						  (boundary - floor) / c->group[g].block);
}

void kv_compat_match_deinit(struct kv_compat_match *m)
{
	for (size_t g = 0; g < KV_COMPAT_MAX_GROUPS; g++)
		free(m->list[g].id);
	memset(m, 0, sizeof(*m));
}

int64_t kv_compat_cache_claim_cost(const struct kv_compat_cache *c, const struct kv_compat_match *m)
{
	int64_t n = 0;

	for (size_t g = 0; g < c->n_groups; g++)
		for (size_t i = 0; i < m->list[g].n; i++)
			n += m->list[g].id[i] && !c->pool->block[m->list[g].id[i]].refs;
	return n;
}

void kv_compat_cache_claim(const struct kv_compat_cache *c, const struct kv_compat_match *m,
			   struct kv_compat_tables *t)
{
	for (size_t g = 0; g < c->n_groups; g++)
		for (size_t i = 0; i < m->list[g].n; i++) {
			kv_compat_blocks_touch(c->pool, m->list[g].id[i]);
			kv_compat_ids_push(&t->list[g], m->list[g].id[i]);
		}
}

static int64_t need(const struct kv_compat_cache *c, const struct kv_compat_tables *t, size_t g,
		    int64_t n)
{
	int64_t tail = t ? t->tail[g] : 0;

	return n <= tail ? 0 : kv_ceil_div(n - tail, c->group[g].block);
}

int64_t kv_compat_cache_need(const struct kv_compat_cache *c, const struct kv_compat_tables *t,
			     int64_t n)
{
	int64_t sum = 0;

	for (size_t g = 0; g < c->n_groups; g++)
		sum += need(c, t, g, n);
	return sum;
}

/* Blocks of a group below its window at @computed tokens. */
static int64_t n_expired(const struct kv_compat_cache *c, const struct kv_compat_tables *t,
			 size_t g, int64_t computed)
{
	if (c->group[g].kind == KV_COMPAT_CACHE_FULL)
		return 0;
	return kv_max64(
		0, kv_min64((int64_t)t->list[g].n,
			    kv_floor_div(computed - c->group[g].window + 1, c->group[g].block)));
}

int64_t kv_compat_cache_credit(const struct kv_compat_cache *c, const struct kv_compat_tables *t,
			       int64_t computed, bool keyed_only)
{
	int64_t credit = 0;

	for (size_t g = 0; g < c->n_groups; g++)
		for (int64_t i = n_expired(c, t, g, computed) - 1; i >= 0 && t->list[g].id[i];
		     i--) {
			const struct kv_compat_block *b = &c->pool->block[t->list[g].id[i]];

			credit += b->refs == 1 && (b->key.set || !keyed_only);
		}
	return credit;
}

void kv_compat_cache_expire(const struct kv_compat_cache *c, struct kv_compat_tables *t,
			    int64_t computed)
{
	for (size_t g = 0; g < c->n_groups; g++) {
		struct kv_compat_ids batch = {0};

		for (int64_t i = n_expired(c, t, g, computed) - 1; i >= 0 && t->list[g].id[i];
		     i--) {
			kv_compat_ids_push(&batch, t->list[g].id[i]);
			t->list[g].id[i] = 0;
		}
		kv_compat_blocks_free(c->pool, batch.id, batch.n);
		free(batch.id);
	}
}

static void give_key(const struct kv_compat_cache *c, const struct kv_compat_tables *t, size_t g,
		     const struct kv_compat_hashes *h, int64_t block)
{
	struct kv_compat_key key;
	int32_t id;

	if (block < 0 || block >= (int64_t)t->list[g].n)
		return;
	id = t->list[g].id[block];
	if (!id || c->pool->block[id].key.set || !c->pool->caching)
		return;
	kv_compat_cache_key(c, g, h, (size_t)block, &key);
	kv_compat_blocks_register(c->pool, id, &key);
	if (c->registered)
		c->registered(c->who, id, &key);
}

void kv_compat_cache_register(const struct kv_compat_cache *c, const struct kv_compat_tables *t,
			      const struct kv_compat_hashes *h, int64_t first, int64_t computed)
{
	for (size_t g = 0; g < c->n_groups; g++) {
		int64_t block = c->group[g].block;

		if (c->group[g].kind == KV_COMPAT_CACHE_STATE) {
			if (computed % block == 0)
				give_key(c, t, g, h, computed / block - 1);
			continue;
		}
		/* A block is new if any of its base pages is. */
		for (int64_t b = first * c->base / block; b < computed / block; b++)
			give_key(c, t, g, h, b);
	}
}

bool kv_compat_cache_acquire(const struct kv_compat_cache *c, struct kv_compat_tables *t, int64_t n)
{
	if (kv_compat_cache_need(c, t, n) > c->pool->n_free)
		return false;
	for (size_t g = 0; g < c->n_groups; g++) {
		int64_t blocks = need(c, t, g, n), block = c->group[g].block;

		for (int64_t i = 0; i < blocks; i++) {
			int32_t id;

			kv_compat_blocks_alloc(c->pool, 1, &id);
			kv_compat_ids_push(&t->list[g], id);
		}
		t->tail[g] += blocks * block - n;
	}
	return true;
}

void kv_compat_cache_release(const struct kv_compat_cache *c, struct kv_compat_tables *t)
{
	for (size_t g = 0; g < c->n_groups; g++) {
		kv_compat_blocks_free(c->pool, t->list[g].id, t->list[g].n);
		free(t->list[g].id);
	}
	memset(t, 0, sizeof(*t));
}
