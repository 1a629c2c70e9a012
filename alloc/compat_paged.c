/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reference calculators: the compact table of one paged group.
 *
 * pages = borrowed ++ owned, consecutive logical pages from `base`. Borrowed pages belong to a
 * snapshot and stay readable; only owned ones go back when they are dropped.
 */
#include <stdlib.h>
#include <string.h>

#include "alloc/compat_cache.h"
#include "include/internal/error.h"

void kv_compat_ids_push(struct kv_compat_ids *ids, int32_t id)
{
	if (ids->n == ids->room) {
		ids->room = ids->room ? 2 * ids->room : 16;
		ids->id = realloc(ids->id, ids->room * sizeof(ids->id[0]));
		if (!ids->id)
			abort(); /* a simulation of a few hundred blocks */
	}
	ids->id[ids->n++] = id;
}

int kv_compat_paged_init(struct kv_compat_paged *p, int64_t rows, int64_t stride, int64_t window,
			 int32_t n_pages)
{
	memset(p, 0, sizeof(*p));
	p->rows = rows;
	p->stride = stride;
	p->window = window;
	p->stack = calloc((size_t)kv_max64(n_pages, 1), sizeof(p->stack[0]));
	if (!p->stack)
		return kv_error(KV_FAULT_NO_MEMORY, "no memory for %d pages", n_pages);
	for (int32_t id = 1; id < n_pages; id++)
		p->stack[p->n_stack++] = id;
	return 0;
}

void kv_compat_paged_deinit(struct kv_compat_paged *p)
{
	free(p->stack);
	free(p->pages.id);
	memset(p, 0, sizeof(*p));
}

/* Drops pages [first, first + n) of the table; owned ones go back. */
static void drop(struct kv_compat_paged *p, size_t first, size_t n,
		 struct kv_compat_ids *ret_released)
{
	for (size_t i = first; i < first + n; i++) {
		if (i >= p->n_borrowed)
			p->stack[p->n_stack++] = p->pages.id[i];
		kv_compat_ids_push(ret_released, p->pages.id[i]);
	}
	if (first < p->n_borrowed)
		p->n_borrowed -= first + n < p->n_borrowed ? n : p->n_borrowed - first;
	if (p->pages.n > first + n)
		memmove(p->pages.id + first, p->pages.id + first + n,
			(p->pages.n - first - n) * sizeof(p->pages.id[0]));
	p->pages.n -= n;
}

int kv_compat_paged_acquire(struct kv_compat_paged *p, int64_t target)
{
	int64_t pages = kv_ceil_div(kv_ceil_div(target, p->stride), p->rows);
	int64_t n = pages - (p->base + (int64_t)p->pages.n);

	if (n > (int64_t)p->n_stack) {
		p->n_failed++;
		return kv_error(KV_FAULT_NO_PAGES, "%lld pages asked for, %zu free", (long long)n,
				p->n_stack);
	}
	for (int64_t i = 0; i < n; i++)
		kv_compat_ids_push(&p->pages, p->stack[--p->n_stack]);
	p->cursor = kv_max64(p->cursor, target);
	return 0;
}

void kv_compat_paged_skip(struct kv_compat_paged *p, int64_t lower,
			  struct kv_compat_ids *ret_released)
{
	int64_t first = kv_floor_div(lower, p->rows * p->stride);
	int64_t n = kv_min64(first - p->base, (int64_t)p->pages.n);

	if (!p->window || first <= p->base)
		return;
	if (!p->pages.n) {
		p->base = first;
		return;
	}
	drop(p, 0, (size_t)n, ret_released);
	p->base += n;
}

void kv_compat_paged_rewind(struct kv_compat_paged *p, int64_t target,
			    struct kv_compat_ids *ret_released)
{
	int64_t keep, raw = p->rows * p->stride;

	if (target >= p->cursor)
		return;
	target = kv_max64(target, p->committed);
	keep = kv_max64(kv_ceil_div(target, raw) - p->base, (int64_t)p->n_borrowed);
	if (keep < (int64_t)p->pages.n)
		drop(p, (size_t)keep, p->pages.n - (size_t)keep, ret_released);
	p->cursor = target;
}

int kv_compat_paged_commit(struct kv_compat_paged *p, int64_t target, bool state,
			   struct kv_compat_ids *ret_segment, int64_t *ret_base)
{
	int64_t raw = p->rows * p->stride, n;
	struct kv_compat_ids dropped = {0};

	*ret_base = 0;
	if (target > p->cursor)
		return kv_error(KV_FAULT_TARGET_PAST_CURSOR, "%lld is past the cursor %lld",
				(long long)target, (long long)p->cursor);
	if (target % raw)
		return kv_error(KV_FAULT_NOT_PAGE_ALIGNED, "%lld is no multiple of a page of %lld",
				(long long)target, (long long)raw);
	if (target <= p->committed)
		return 0;
	if (state)
		kv_compat_paged_skip(p, kv_max64(0, target - p->window), &dropped);
	free(dropped.id);
	n = target / raw - p->base - (int64_t)p->n_borrowed;
	*ret_base = p->base + (int64_t)p->n_borrowed;
	for (int64_t i = 0; i < n; i++)
		kv_compat_ids_push(ret_segment, p->pages.id[p->n_borrowed++]);
	p->committed = target;
	return 0;
}

void kv_compat_paged_release(struct kv_compat_paged *p, struct kv_compat_ids *ret_released)
{
	drop(p, 0, p->pages.n, ret_released);
	p->base = p->cursor = p->committed = 0;
}

void kv_compat_paged_give(struct kv_compat_paged *p, const struct kv_compat_ids *segment)
{
	for (size_t i = 0; i < segment->n; i++)
		p->stack[p->n_stack++] = segment->id[i];
}
