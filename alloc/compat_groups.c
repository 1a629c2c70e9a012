/* SPDX-License-Identifier: Apache-2.0 */
/* Reference calculators: layer labels to cache groups, and how many pages each group needs. */
#include <stdio.h>
#include <string.h>

#include "alloc/compat.h"
#include "include/internal/error.h"

const char *kv_compat_label(char layer)
{
	switch (layer) {
	case 'F':
		return "full_attention";
	case 'S':
		return "sliding_attention";
	case 'L':
		return "linear_attention";
	case 'C':
		return "chunked_attention";
	case 'M':
		return "mamba";
	default:
		return "unknown";
	}
}

static int check_window(const char *layers, const struct kv_compat_window *window)
{
	switch (window->scalar.kind) {
	case KV_COMPAT_NULL:
	case KV_COMPAT_INT:
		return 0;
	case KV_COMPAT_BOOL:
	case KV_COMPAT_OTHER:
		return kv_error(KV_FAULT_WINDOW_BAD_TYPE,
				"sliding_window: a number or a list of numbers needed");
	case KV_COMPAT_LIST:
		break;
	}
	if (window->n_list != strlen(layers))
		return kv_error(KV_FAULT_WINDOW_LIST_LENGTH,
				"sliding_window: %zu values for %zu layers", window->n_list,
				strlen(layers));
	for (size_t i = 0; i < window->n_list; i++)
		if (window->list[i].kind != KV_COMPAT_NULL && window->list[i].kind != KV_COMPAT_INT)
			return kv_error(KV_FAULT_WINDOW_NOT_INT,
					"sliding_window[%zu]: a number or null needed", i);
	return 0;
}

/* Window of a layer; 0: none. */
static int64_t layer_window(const struct kv_compat_window *window, size_t i)
{
	const struct kv_compat_value *v =
		window->scalar.kind == KV_COMPAT_LIST ? &window->list[i] : &window->scalar;

	return v->kind == KV_COMPAT_NULL || v->kind == KV_COMPAT_OTHER ? 0 : v->value;
}

static int check_layer(const char *layers, const struct kv_compat_window *window, size_t i)
{
	if (!strchr("FSL", layers[i]))
		return kv_error(KV_FAULT_UNKNOWN_LAYER_TYPE,
				"layer_types[%zu]: '%s' given; full_attention, sliding_attention, "
				"linear_attention exist",
				i, kv_compat_label(layers[i]));
	if (layers[i] == 'S' && layer_window(window, i) <= 0)
		return kv_error(KV_FAULT_SLIDING_WITHOUT_WINDOW,
				"sliding_window: layer %zu slides and has no positive window", i);
	if (layers[i] != 'S' && window->scalar.kind == KV_COMPAT_LIST &&
	    layer_window(window, i) > 0)
		return kv_error(KV_FAULT_FULL_WITH_WINDOW,
				"sliding_window[%zu]: layer does not slide and has a window", i);
	return 0;
}

int kv_compat_groups(const char *layers, const struct kv_compat_window *window, int64_t page_size,
		     struct kv_compat_group *ret_groups, size_t *ret_n_groups,
		     uint32_t *ret_layer_group)
{
	size_t n = 0;
	int64_t first_window = 0;
	bool several = false;
	int r;

	r = check_window(layers, window);
	if (r)
		return r;
	for (size_t i = 0; layers[i]; i++) {
		r = check_layer(layers, window, i);
		if (r)
			return r;
		if (layers[i] != 'S')
			continue;
		if (first_window && first_window != layer_window(window, i))
			several = true;
		first_window = layer_window(window, i);
	}

	for (size_t i = 0; layers[i]; i++) {
		struct kv_compat_group g = {
			.retention = layers[i] == 'S' ? KV_COMPAT_SLIDING : KV_COMPAT_FULL_HISTORY,
			.family = layers[i] == 'L' ? KV_COMPAT_STATE : KV_COMPAT_HISTORY,
			.rows_per_page = page_size,
			.entry_stride = 1,
			.has_window = layers[i] == 'S',
			.window = layers[i] == 'S' ? layer_window(window, i) : 0,
		};
		size_t k;

		if (several && layers[i] == 'S')
			snprintf(g.id, sizeof(g.id), "%s_%lld", kv_compat_label(layers[i]),
				 (long long)g.window);
		else
			snprintf(g.id, sizeof(g.id), "%s", kv_compat_label(layers[i]));
		for (k = 0; k < n && strcmp(ret_groups[k].id, g.id); k++)
			;
		if (k == n)
			ret_groups[n++] = g;
		ret_layer_group[i] = (uint32_t)k;
	}
	*ret_n_groups = n;
	return 0;
}

void kv_compat_occurrence(const char *layers, int64_t *ret_index)
{
	int64_t seen[256] = {0};

	for (size_t i = 0; layers[i]; i++)
		ret_index[i] = seen[(unsigned char)layers[i]]++;
}

int64_t kv_compat_slab_size(const char *layers, const struct kv_compat_window *window,
			    bool flat_ext)
{
	int64_t n_full = 0, n_sliding = 0, only = 0;
	size_t n = strlen(layers);

	if (!flat_ext || !n || window->scalar.kind == KV_COMPAT_OTHER)
		return 0;
	if (window->scalar.kind == KV_COMPAT_LIST && window->n_list != n)
		return 0;
	for (size_t i = 0; i < n; i++) {
		if (layers[i] == 'F') {
			n_full++;
		} else if (layers[i] == 'S') {
			n_sliding++;
			if (window->scalar.kind != KV_COMPAT_LIST || layer_window(window, i) <= 0)
				continue;
			if (only && only != layer_window(window, i))
				return 0;
			only = layer_window(window, i);
		} else {
			return 0;
		}
	}
	return n_full == n_sliding ? n_full : 0;
}

static int check_load(const struct kv_compat_load *load)
{
	if (load->n_requests < 0 || load->max_scheduled < 0 || load->max_total < 0 ||
	    load->max_context < 0 || load->decode_tokens < 0 || load->overlap_depth < 0 ||
	    load->margin < 0)
		return kv_error(KV_FAULT_NEGATIVE_ARGUMENT, "load: a field is negative");
	if (load->overlap_depth > 1)
		return kv_error(KV_FAULT_BAD_OVERLAP_DEPTH,
				"overlap_schedule_depth: %lld given, 0 or 1 allowed",
				(long long)load->overlap_depth);
	if (load->overlap_depth && !load->decode_tokens)
		return kv_error(KV_FAULT_OVERLAP_NEEDS_DECODE_TOKENS,
				"decode_input_tokens: 0 with overlapped scheduling");
	return 0;
}

static int check_group(const struct kv_compat_group *g)
{
	if (g->rows_per_page * g->entry_stride <= 0)
		return kv_error(KV_FAULT_BAD_PAGE_ROWS, "group %s: %lld rows of %lld tokens", g->id,
				(long long)g->rows_per_page, (long long)g->entry_stride);
	if (g->retention == KV_COMPAT_BAD_RETENTION)
		return kv_error(KV_FAULT_BAD_RETENTION,
				"group %s: retention is neither full_history nor sliding_window",
				g->id);
	if (g->retention == KV_COMPAT_SLIDING && (!g->has_window || g->window <= 0))
		return kv_error(KV_FAULT_SLIDING_GROUP_WITHOUT_WINDOW,
				"group %s: slides and has no positive window", g->id);
	return 0;
}

int kv_compat_page_counts(const struct kv_compat_group *groups, size_t n,
			  const struct kv_compat_load *load, int64_t *ret_pages)
{
	int r;

	r = check_load(load);
	if (r)
		return r;
	for (size_t i = 0; i < n; i++) {
		const struct kv_compat_group *g = &groups[i];
		int64_t raw = g->rows_per_page * g->entry_stride;
		int64_t live = load->n_requests, total = load->max_total, extra, full;

		r = check_group(g);
		if (r)
			return r;
		extra = live * kv_ceil_div(load->overlap_depth * load->decode_tokens, raw);
		if (g->retention == KV_COMPAT_SLIDING) {
			ret_pages[i] =
				live * kv_ceil_div(kv_min64(g->window - 1, load->max_context),
						   raw) +
				kv_ceil_div(kv_min64(load->max_scheduled, total), raw) + live +
				extra + 1 + load->margin;
			continue;
		}
		full = kv_ceil_div(total, raw) + live + extra + 1 + load->margin;
		if (g->family == KV_COMPAT_STATE)
			full = kv_min64(2 * live + total / raw + extra + 1 + load->margin, full);
		ret_pages[i] = full;
	}
	return 0;
}

int kv_compat_capture_width(const struct kv_compat_group *group, int64_t max_context,
			    int64_t tokens_per_req, int64_t overlap_depth, int64_t *ret_columns)
{
	int64_t raw = group->rows_per_page * group->entry_stride;
	int64_t ahead = (overlap_depth + 1) * tokens_per_req;
	int r;

	if (tokens_per_req <= 0)
		return kv_error(KV_FAULT_BAD_MAX_TOKENS_PER_REQ,
				"max_tokens_per_req: %lld given, must be positive",
				(long long)tokens_per_req);
	if (overlap_depth < 0 || overlap_depth > 1)
		return kv_error(KV_FAULT_BAD_OVERLAP_DEPTH,
				"overlap_schedule_depth: %lld given, 0 or 1 allowed",
				(long long)overlap_depth);
	r = check_group(group);
	if (r)
		return r;
	if (group->retention == KV_COMPAT_SLIDING)
		*ret_columns = kv_ceil_div(kv_min64(group->window, max_context) + ahead, raw) + 1;
	else
		*ret_columns = kv_ceil_div(max_context + ahead, raw);
	return 0;
}
