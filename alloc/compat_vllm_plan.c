/* SPDX-License-Identifier: Apache-2.0 */
/* Reference calculators: block counts, tensors and units of all workers. */
#include <string.h>

#include "alloc/compat_vllm.h"
#include "include/internal/error.h"

int64_t kv_vgroup_page(const struct kv_vplan *p, const struct kv_vworker *w,
		       const struct kv_vgroup *g)
{
	int64_t sum = 0;

	if (!g->uniform)
		return kv_vspec_page(&g->spec);
	for (size_t i = 0; i < g->n; i++)
		if (!w || w->has[g->layer[i]])
			sum += kv_vspec_page(&p->layer[g->layer[i]].spec);
	return sum;
}

static int64_t layer_pages(const struct kv_vplan *p, const struct kv_vworker *w,
			   const struct kv_vgroup *g)
{
	int64_t sum = 0;

	for (size_t i = 0; i < g->n; i++)
		if (w->has[g->layer[i]])
			sum += g->uniform ? kv_vspec_page(&p->layer[g->layer[i]].spec)
					  : kv_vspec_page(&g->spec);
	return sum;
}

/* Blocks of a request of the maximum length, over groups. */
static int request_blocks(const struct kv_vplan *p, const struct kv_vconfig *c, int64_t *ret_blocks)
{
	*ret_blocks = 0;
	for (size_t g = 0; g < p->n_groups; g++) {
		int64_t bytes;
		int r;

		r = kv_vspec_max_bytes(&p->group[g].spec, c, &bytes);
		if (r)
			return r;
		*ret_blocks += kv_ceil_div(bytes, kv_vspec_page(&p->group[g].spec));
	}
	return 0;
}

static int fits(const struct kv_vplan *p, const struct kv_vconfig *config, int64_t len, bool *ret)
{
	struct kv_vconfig c = *config;
	int64_t blocks;
	int r;

	c.max_len = len;
	r = request_blocks(p, &c, &blocks);
	if (r)
		return r;
	*ret = true;
	for (size_t w = 0; w < p->n_workers; w++) {
		const struct kv_vworker *worker = &p->worker[w];
		int64_t bytes = worker->block_bytes * (worker->n_blocks - 1);

		*ret &= worker->block_bytes * blocks <= bytes;
	}
	return 0;
}

static int check_length(struct kv_vplan *p, struct kv_vconfig *c)
{
	int64_t low = 0, high = c->max_len + 1;
	bool ok;
	int r;

	r = fits(p, c, c->max_len, &ok);
	if (r || ok)
		return r;
	while (high - low > 1) {
		int64_t mid = low + (high - low) / 2;

		r = fits(p, c, mid, &ok);
		if (r)
			return r;
		if (ok)
			low = mid;
		else
			high = mid;
	}
	if (!c->auto_len || !low)
		return kv_error(KV_FAULT_BAD_CONFIG,
				"max_model_len: %lld tokens do not fit, %lld would",
				(long long)c->max_len, (long long)low);
	c->max_len = low;
	return 0;
}

static int check_layout(const struct kv_vplan *p, const char *layout)
{
	bool compact =
		(layout[0] == 'L' && layout[1] == 'B') || (layout[0] == 'B' && layout[1] == 'L');
	int64_t page = 0;
	bool mixed = false;

	for (size_t g = 0; g < p->n_groups; g++)
		for (size_t i = 0; i < p->group[g].n; i++) {
			int64_t own = p->group[g].uniform
					      ? kv_vspec_page(&p->layer[p->group[g].layer[i]].spec)
					      : kv_vspec_page(&p->group[g].spec);

			mixed |= page && own != page;
			page = own;
		}
	if (mixed && (!compact || (p->n_groups > 1 && layout[0] == 'L')))
		return kv_error(KV_FAULT_BAD_CONFIG,
				"layout %s: pages of several sizes need a layout of whole blocks",
				layout);
	return 0;
}

/* One tensor for each group and distinct spec in it. */
static int make_tensors(const struct kv_vplan *p, struct kv_vworker *w, const char *layout)
{
	w->n_tensors = 0;
	for (size_t g = 0; g < p->n_groups; g++) {
		const struct kv_vgroup *group = &p->group[g];
		int64_t before = 0;
		size_t first = w->n_tensors;

		for (size_t i = 0; i < group->n; i++) {
			uint32_t l = group->layer[i];
			struct kv_vtensor *t = NULL;

			if (!w->has[l])
				continue;
			for (size_t k = first; k < w->n_tensors && !t; k++)
				if (!group->uniform ||
				    kv_vspec_equal(&p->layer[w->tensor[k].layer[0]].spec,
						   &p->layer[l].spec))
					t = &w->tensor[k];
			if (!t) {
				t = &w->tensor[w->n_tensors++];
				memset(t, 0, sizeof(*t));
			}
			t->layer[t->n++] = l;
		}
		for (size_t k = first; k < w->n_tensors; k++) {
			struct kv_vtensor *t = &w->tensor[k];
			const struct kv_vspec *s =
				group->uniform ? &p->layer[t->layer[0]].spec : &group->spec;
			int64_t strides[5], page = kv_vspec_page(s);
			int r;

			r = kv_vspec_strides(s, layout, (int64_t)t->n, w->n_blocks, 0,
					     layout[0] == 'B' ? w->block_bytes : 0, strides);
			if (r)
				return r;
			t->size = w->block_bytes * w->n_blocks;
			t->layer_stride = strides[0];
			t->block_stride = strides[1];
			t->offset = before * (kv_max64(strides[0], page) / page);
			before += page * (int64_t)t->n;
		}
	}
	return 0;
}

static void note_precisions(const struct kv_vplan *p, struct kv_vworker *w)
{
	const struct kv_vspec *first = NULL;

	for (size_t i = 0; i < p->n_layers; i++) {
		const struct kv_vspec *s = &p->layer[i].spec;

		if (!w->has[i])
			continue;
		if (s->kind == KV_VSPEC_MAMBA) {
			w->has_mamba = true;
			continue;
		}
		first = first ? first : s;
		w->mixed |= strcmp(first->dtype, s->dtype) || first->quant != s->quant;
	}
}

int kv_vplan_make(struct kv_vplan *p, struct kv_vconfig *c)
{
	int64_t least = INT64_MAX, blocks = 0;
	int r;

	r = kv_vplan_groups(p, c);
	if (r)
		return r;
	p->max_len = c->max_len;
	for (size_t i = 0; i < p->n_workers; i++) {
		struct kv_vworker *w = &p->worker[i];

		if (!p->n_groups) {
			w->n_blocks = 1;
			continue;
		}
		if (w->available <= 0)
			return kv_error(KV_FAULT_BAD_CONFIG, "no memory is left for the cache");
		w->block_bytes = 0;
		for (size_t g = 0; g < p->n_groups; g++)
			w->block_bytes = kv_max64(w->block_bytes, layer_pages(p, w, &p->group[g]));
		if (!w->block_bytes)
			return kv_error(KV_FAULT_BAD_CONFIG, "worker %zu: has no layers", i);
		w->n_blocks = c->has_override ? c->override_blocks : w->available / w->block_bytes;
	}
	if (!p->n_groups)
		return 0;
	r = check_layout(p, c->layout);
	if (!r)
		r = check_length(p, c);
	if (!r)
		r = request_blocks(p, c, &blocks);
	if (r)
		return r;
	p->max_len = c->max_len;
	for (size_t i = 0; i < p->n_workers; i++)
		least = kv_min64(least, p->worker[i].n_blocks);
	for (size_t i = 0; i < p->n_workers; i++) {
		p->worker[i].n_blocks = least;
		p->worker[i].max_bytes = p->worker[i].block_bytes * blocks;
		note_precisions(p, &p->worker[i]);
		r = make_tensors(p, &p->worker[i], c->layout);
		if (r)
			return r;
	}
	p->concurrency = (double)least / (double)blocks;
	p->capacity_tokens = (int64_t)(p->concurrency * (double)c->max_len);
	return 0;
}

static int64_t gcd(int64_t a, int64_t b)
{
	while (b) {
		int64_t t = a % b;

		a = b;
		b = t;
	}
	return a;
}

int kv_vplan_unit(const struct kv_vplan *p, const struct kv_vconfig *c, int64_t *ret_scheduler,
		  int64_t *ret_hash)
{
	int64_t lcm = 1, common = 0, unit;
	bool loose_mamba = false;

	for (size_t g = 0; g < p->n_groups; g++) {
		const struct kv_vspec *s = &p->group[g].spec;
		int64_t block = s->block * (s->kind == KV_VSPEC_MAMBA ? 1 : c->dcp);

		if (p->n_groups == 1)
			block = s->block * c->dcp;
		lcm = lcm / gcd(lcm, block) * block;
		common = gcd(common, block);
		loose_mamba |= s->kind == KV_VSPEC_MAMBA && strcmp(s->mode, "align");
	}
	*ret_scheduler = lcm;
	*ret_hash = lcm;
	if (p->n_groups <= 1 || !c->caching || loose_mamba)
		return 0;
	unit = c->has_unit ? c->unit : common;
	for (size_t g = 0; g < p->n_groups; g++) {
		const struct kv_vspec *s = &p->group[g].spec;

		if (unit <= 0 || s->block * (s->kind == KV_VSPEC_MAMBA ? 1 : c->dcp) % unit)
			return kv_error(KV_FAULT_BAD_CONFIG,
					"hash unit: %lld does not divide a block of %lld",
					(long long)unit, (long long)s->block);
	}
	*ret_hash = unit;
	return 0;
}
