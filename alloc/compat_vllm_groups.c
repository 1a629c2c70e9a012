/* SPDX-License-Identifier: Apache-2.0 */
/* Reference calculators: which layers share a group, and pages of one size. */
#include <stdlib.h>
#include <string.h>

#include "alloc/compat_vllm.h"
#include "include/internal/error.h"

static bool is_full(const struct kv_vspec *s)
{
	return s->kind == KV_VSPEC_FULL || s->kind == KV_VSPEC_SINK || s->kind == KV_VSPEC_RSWA ||
	       s->kind == KV_VSPEC_MLA || s->kind == KV_VSPEC_HIDDEN;
}

static bool is_sliding(const struct kv_vspec *s)
{
	return s->kind == KV_VSPEC_SLIDING || s->kind == KV_VSPEC_SLIDING_MLA;
}

/* Equal but for windows and chunks, which full attention may have after promotion. */
static bool same_base(const struct kv_vspec *a, const struct kv_vspec *b)
{
	return a->kind == b->kind && a->block == b->block && a->n_heads == b->n_heads &&
	       a->head == b->head && a->head_v == b->head_v && !strcmp(a->dtype, b->dtype) &&
	       a->quant == b->quant && a->padded == b->padded && a->head_slots == b->head_slots &&
	       a->content == b->content && a->tokens_per_state == b->tokens_per_state &&
	       a->per == b->per && a->extra == b->extra && a->rswa == b->rswa &&
	       a->sink == b->sink && !strcmp(a->cache_dtype, b->cache_dtype) &&
	       !strcmp(a->version, b->version) && a->state_shape == b->state_shape &&
	       a->state_bytes == b->state_bytes && a->n_spec == b->n_spec &&
	       a->n_checkpoints == b->n_checkpoints && !strcmp(a->mode, b->mode);
}

bool kv_vspec_equal(const struct kv_vspec *a, const struct kv_vspec *b)
{
	return same_base(a, b) && a->window == b->window && a->chunk == b->chunk;
}

/* KV_FAULT_ASSERTION: not mergeable; KV_FAULT_BAD_CONFIG: a contradiction. */
static int merge(struct kv_vspec *into, const struct kv_vspec *s)
{
	if (!same_base(into, s))
		return KV_FAULT_ASSERTION;
	if (into->kind != KV_VSPEC_FULL)
		return kv_vspec_equal(into, s) ? 0 : KV_FAULT_ASSERTION;
	if ((into->window && s->window && into->window != s->window) ||
	    (into->chunk && s->chunk && into->chunk != s->chunk))
		return kv_error(KV_FAULT_BAD_CONFIG,
				"full attention layers have windows of %lld "
				"and %lld",
				(long long)into->window, (long long)s->window);
	into->window = into->window ? into->window : s->window;
	into->chunk = into->chunk ? into->chunk : s->chunk;
	return into->window && into->chunk ? KV_FAULT_ASSERTION : 0;
}

static int merge_all(const struct kv_vplan *p, const uint32_t *layer, size_t n,
		     struct kv_vspec *ret)
{
	*ret = p->layer[layer[0]].spec;
	for (size_t i = 1; i < n; i++) {
		int r = merge(ret, &p->layer[layer[i]].spec);

		if (r)
			return r;
	}
	return 0;
}

static bool same_type(const struct kv_vspec *a, const struct kv_vspec *b)
{
	if (a->block != b->block)
		return false;
	if (is_full(a))
		return is_full(b);
	if (is_sliding(a))
		return is_sliding(b) && a->window == b->window;
	if (a->kind != b->kind)
		return false;
	if (a->kind == KV_VSPEC_CHUNKED)
		return a->chunk == b->chunk;
	if (a->kind == KV_VSPEC_MAMBA)
		return a->n_spec == b->n_spec && a->n_checkpoints == b->n_checkpoints;
	return true;
}

static bool uniform_type(const struct kv_vplan *p, const uint32_t *layer, size_t n)
{
	for (size_t i = 1; i < n; i++)
		if (!same_type(&p->layer[layer[0]].spec, &p->layer[layer[i]].spec))
			return false;
	return true;
}

static struct kv_vgroup *new_group(struct kv_vplan *p, bool uniform)
{
	struct kv_vgroup *g = &p->group[p->n_groups++];

	memset(g, 0, sizeof(*g));
	g->uniform = uniform;
	return g;
}

static int finish_group(struct kv_vplan *p, struct kv_vgroup *g)
{
	if (!g->uniform)
		return merge_all(p, g->layer, g->n, &g->spec);
	g->spec = p->layer[g->layer[0]].spec;
	return 0;
}

static int one_group(struct kv_vplan *p, const uint32_t *layer, size_t n, bool uniform)
{
	struct kv_vgroup *g = new_group(p, uniform);

	memcpy(g->layer, layer, n * sizeof(layer[0]));
	g->n = n;
	return finish_group(p, g);
}

/* Sliding and chunked layers become full ones of the same bytes. */
static int promote(struct kv_vplan *p, const uint32_t *layer, size_t n)
{
	bool has_full = false, has_other = false, several = false;
	int64_t block = 0;

	for (size_t i = 0; i < n; i++) {
		const struct kv_vspec *s = &p->layer[layer[i]].spec;

		if (is_full(s)) {
			several |= block && block != s->block;
			block = s->block;
			has_full = true;
		}
		has_other |= is_sliding(s) || s->kind == KV_VSPEC_CHUNKED;
	}
	for (size_t i = 0; has_full && has_other && i < n; i++) {
		struct kv_vspec *s = &p->layer[layer[i]].spec;

		if (!is_sliding(s) && s->kind != KV_VSPEC_CHUNKED)
			continue;
		s->kind = s->kind == KV_VSPEC_SLIDING_MLA ? KV_VSPEC_MLA : KV_VSPEC_FULL;
		if (s->kind == KV_VSPEC_MLA)
			s->window = 0;
		if (!several && block)
			s->block = block;
		if (s->padded)
			s->padded = kv_max64(s->padded, kv_vspec_dense(s));
	}
	if (!uniform_type(p, layer, n))
		return kv_error(KV_FAULT_BAD_CONFIG, "without hybrid groups layers must be of one "
						     "type");
	return 0;
}

static int unify(struct kv_vplan *p, const uint32_t *layer, size_t n)
{
	int64_t page = 0;

	for (size_t i = 0; i < n; i++)
		page = kv_max64(page, kv_vspec_page(&p->layer[layer[i]].spec));
	for (size_t i = 0; i < n; i++) {
		struct kv_vspec *s = &p->layer[layer[i]].spec;
		int64_t own = kv_vspec_page(s);

		if (own == page)
			continue;
		if (s->kind == KV_VSPEC_MAMBA) {
			s->padded = page;
		} else if (page % own == 0) {
			s->block *= page / own;
			if (s->padded)
				s->padded = page;
		} else if (s->kind != KV_VSPEC_MLA && s->kind != KV_VSPEC_SLIDING_MLA) {
			s->padded = page;
		} else {
			return KV_FAULT_UNSUPPORTED;
		}
	}
	return 0;
}

/* Buckets of equal specs, merged into earlier ones where that is possible. */
struct buckets {
	uint32_t layer[KV_VPLAN_LAYERS][KV_VPLAN_LAYERS];
	size_t n_layers[KV_VPLAN_LAYERS], n;
};

static int bucket_equal(const struct kv_vplan *p, const uint32_t *layer, size_t n,
			struct buckets *b)
{
	b->n = 0;
	for (size_t i = 0; i < n; i++) {
		size_t k;

		for (k = 0; k < b->n; k++)
			if (kv_vspec_equal(&p->layer[b->layer[k][0]].spec,
					   &p->layer[layer[i]].spec))
				break;
		if (k == b->n)
			b->n_layers[b->n++] = 0;
		b->layer[k][b->n_layers[k]++] = layer[i];
	}
	for (size_t k = 1; k < b->n; k++)
		for (size_t j = 0; j < k; j++) {
			struct kv_vspec merged;
			uint32_t both[KV_VPLAN_LAYERS];
			int r;

			memcpy(both, b->layer[j], b->n_layers[j] * sizeof(both[0]));
			memcpy(both + b->n_layers[j], b->layer[k],
			       b->n_layers[k] * sizeof(both[0]));
			r = merge_all(p, both, b->n_layers[j] + b->n_layers[k], &merged);
			if (r == KV_FAULT_BAD_CONFIG)
				return r;
			if (r)
				continue;
			memcpy(b->layer[j], both, sizeof(both));
			b->n_layers[j] += b->n_layers[k];
			for (size_t m = k; m + 1 < b->n; m++) {
				memcpy(b->layer[m], b->layer[m + 1], sizeof(both));
				b->n_layers[m] = b->n_layers[m + 1];
			}
			b->n--;
			k--;
			break;
		}
	return 0;
}

static int uniform_pages(struct kv_vplan *p, const uint32_t *layer, size_t n, struct buckets *b)
{
	int64_t least = INT64_MAX, most = 0, size;
	int r;

	r = bucket_equal(p, layer, n, b);
	if (r)
		return r;
	for (size_t k = 0; k < b->n; k++) {
		least = kv_min64(least, (int64_t)b->n_layers[k]);
		most = kv_max64(most, (int64_t)b->n_layers[k]);
	}
	size = 2 * most < 3 * least ? most : least; /* most < 1.5 * least */
	for (size_t k = 0; k < b->n; k++) {
		size_t groups = (size_t)kv_ceil_div((int64_t)b->n_layers[k], size);

		for (size_t i = 0; i < groups; i++) {
			struct kv_vgroup *g = new_group(p, false);

			for (size_t j = i; j < b->n_layers[k]; j += groups)
				g->layer[g->n++] = b->layer[k][j];
			r = finish_group(p, g);
			if (r)
				return r;
		}
	}
	return 0;
}

/* Layers of equal page size per distinct size; 0: the bucket is not balanced. */
static int64_t repeats_of(const struct kv_vplan *p, const uint32_t *layer, size_t n,
			  size_t *ret_sizes)
{
	int64_t page[KV_VPLAN_LAYERS], count[KV_VPLAN_LAYERS] = {0};
	size_t k = 0;

	for (size_t i = 0; i < n; i++) {
		int64_t own = kv_vspec_page(&p->layer[layer[i]].spec);
		size_t j;

		for (j = 0; j < k && page[j] != own; j++)
			;
		if (j == k)
			page[k++] = own;
		count[j]++;
	}
	*ret_sizes = k;
	for (size_t j = 1; j < k; j++)
		if (count[j] != count[0])
			return 0;
	return count[0];
}

static int64_t pages_of(const struct kv_vplan *p, const uint32_t *layer, size_t n)
{
	int64_t sum = 0;

	for (size_t i = 0; i < n; i++)
		sum += kv_vspec_page(&p->layer[layer[i]].spec);
	return sum;
}

/* A bucket dealt out to @n_groups groups, the layers of each page size in turn. */
static int deal(struct kv_vplan *p, const uint32_t *layer, size_t n, size_t n_groups)
{
	for (size_t i = 0; i < n_groups; i++) {
		struct kv_vgroup *g = new_group(p, true);
		int r;

		for (size_t j = 0; j < n; j++) {
			int64_t own = kv_vspec_page(&p->layer[layer[j]].spec);
			size_t before = 0;

			for (size_t m = 0; m < j; m++)
				before += kv_vspec_page(&p->layer[layer[m]].spec) == own;
			if (before % n_groups == i)
				g->layer[g->n++] = layer[j];
		}
		r = finish_group(p, g);
		if (r)
			return r;
	}
	return 0;
}

static int packed(struct kv_vplan *p, const uint32_t *layer, size_t n, struct buckets *b)
{
	int64_t repeats[KV_VPLAN_LAYERS], floor = 0, most = 0, best = 0, least_waste = INT64_MAX;
	int64_t anchor = 0;

	b->n = 0;
	for (size_t i = 0; i < n; i++) {
		size_t k;

		for (k = 0; k < b->n; k++)
			if (same_type(&p->layer[b->layer[k][0]].spec, &p->layer[layer[i]].spec))
				break;
		if (k == b->n)
			b->n_layers[b->n++] = 0;
		b->layer[k][b->n_layers[k]++] = layer[i];
	}
	for (size_t k = 0; k < b->n; k++) {
		size_t sizes;

		repeats[k] = repeats_of(p, b->layer[k], b->n_layers[k], &sizes);
		most = kv_max64(most, repeats[k]);
		if (sizes > 1)
			floor = kv_max64(floor, repeats[k]);
	}
	for (int64_t d = floor; floor && d <= most; d++) {
		int64_t waste = 0;

		for (size_t k = 0; k < b->n; k++)
			if (repeats[k])
				waste += kv_floor_mod(d - repeats[k] % d, d);
		if (waste <= least_waste) {
			least_waste = waste;
			best = d;
		}
	}
	for (size_t k = 0; k < b->n; k++) {
		int64_t groups = best && repeats[k] ? kv_ceil_div(repeats[k], best) : 1;

		if (p->layer[b->layer[k][0]].spec.kind != KV_VSPEC_MAMBA)
			anchor = kv_max64(
				anchor,
				kv_ceil_div(pages_of(p, b->layer[k], b->n_layers[k]), groups));
	}
	for (size_t k = 0; k < b->n; k++) {
		int64_t groups = best && repeats[k] ? kv_ceil_div(repeats[k], best) : 1;
		int r;

		if (p->layer[b->layer[k][0]].spec.kind == KV_VSPEC_MAMBA && anchor)
			while (groups < (int64_t)b->n_layers[k] &&
			       kv_ceil_div((int64_t)b->n_layers[k], groups) *
					       kv_vspec_page(&p->layer[b->layer[k][0]].spec) >
				       anchor)
				groups++;
		r = deal(p, b->layer[k], b->n_layers[k], (size_t)groups);
		if (r)
			return r;
	}
	return 0;
}

static bool pages_differ(const struct kv_vplan *p, const uint32_t *layer, size_t n)
{
	for (size_t i = 1; i < n; i++)
		if (kv_vspec_page(&p->layer[layer[i]].spec) !=
		    kv_vspec_page(&p->layer[layer[0]].spec))
			return true;
	return false;
}

/* Layers of hidden states: each its own group, of blocks that fit the common page. */
static int add_hidden(struct kv_vplan *p, const uint32_t *hidden, size_t n)
{
	int64_t block = 0, page = 0;

	for (size_t g = 0; g < p->n_groups; g++) {
		int64_t own = p->group[g].spec.block;

		page = kv_max64(page, kv_vspec_page(&p->group[g].spec));
		while (block && own) {
			int64_t t = block % own;

			block = own;
			own = t;
		}
		block = block ? block : own;
	}
	for (size_t i = 0; i < n; i++) {
		struct kv_vspec *s = &p->layer[hidden[i]].spec;
		int64_t token = kv_vspec_dense(s) / s->block;
		int64_t most = kv_max64(1, token ? page / token : 1), d;

		for (d = kv_min64(most, block); d > 1 && block % d; d--)
			;
		s->block = kv_max64(d, 1);
		s->padded = page;
		if (one_group(p, &hidden[i], 1, false))
			return KV_FAULT_ASSERTION;
	}
	return 0;
}

static int make_groups(struct kv_vplan *p, const struct kv_vconfig *c, struct buckets *b)
{
	uint32_t layer[KV_VPLAN_LAYERS], hidden[KV_VPLAN_LAYERS];
	size_t n = 0, n_hidden = 0;
	struct kv_vspec merged;
	int r;

	p->n_groups = 0;
	for (size_t i = 0; i < p->n_layers; i++)
		layer[n++] = (uint32_t)i;
	if (!n)
		return 0;
	if (c->disable_hybrid) {
		r = promote(p, layer, n);
		if (r)
			return r;
	}
	r = merge_all(p, layer, n, &merged);
	if (r == KV_FAULT_BAD_CONFIG)
		return r;
	if (!r)
		return one_group(p, layer, n, false);
	if (uniform_type(p, layer, n))
		return one_group(p, layer, n, true);
	if (c->layout[0] == 'B' && pages_differ(p, layer, n))
		return packed(p, layer, n, b);
	n = 0;
	for (size_t i = 0; i < p->n_layers; i++)
		if (p->layer[i].spec.kind == KV_VSPEC_HIDDEN)
			hidden[n_hidden++] = (uint32_t)i;
		else
			layer[n++] = (uint32_t)i;
	r = unify(p, layer, n);
	if (r) {
		bool mla = false, sliding = false, other = n_hidden != 0;

		for (size_t i = 0; i < n; i++) {
			mla |= p->layer[layer[i]].spec.kind == KV_VSPEC_MLA;
			sliding |= p->layer[layer[i]].spec.kind == KV_VSPEC_SLIDING;
			other |= p->layer[layer[i]].spec.kind == KV_VSPEC_SLIDING_MLA ||
				 p->layer[layer[i]].spec.kind == KV_VSPEC_CHUNKED;
		}
		if (!mla || !sliding || other)
			return kv_error(KV_FAULT_UNSUPPORTED, "page sizes can't be unified");
		r = promote(p, layer, n);
		return r ? r : one_group(p, layer, n, true);
	}
	r = uniform_pages(p, layer, n, b);
	return r ? r : add_hidden(p, hidden, n_hidden);
}

int kv_vplan_groups(struct kv_vplan *p, const struct kv_vconfig *c)
{
	struct buckets *b = calloc(1, sizeof(*b));
	int r;

	if (!b)
		return kv_error(KV_FAULT_NO_MEMORY, "no memory for %zu bytes", sizeof(*b));
	r = make_groups(p, c, b);
	free(b);
	return r;
}
