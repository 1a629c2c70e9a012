/* SPDX-License-Identifier: Apache-2.0 */
/* Traces of the scheduler: events in, plans out. */
#include <string.h>

#include "alloc/compat_scheduler.h"
#include "tests/golden/golden_scheduler.h"

static json_t *out_moves(const struct kv_compat_move *moves, size_t n)
{
	json_t *list = json_array();

	for (size_t i = 0; i < n; i++)
		json_array_append_new(
			list, json_pack("{s:I, s:o, s:o}", "op_id", (json_int_t)moves[i].op_id,
					"device", out_ints32(moves[i].device.id, moves[i].device.n),
					"host", out_ints32(moves[i].host.id, moves[i].host.n)));
	return list;
}

/* Rows of a group, padded to the longest with -1. */
static json_t *out_group_table(const struct kv_compat_plan *plan, size_t g)
{
	json_t *rows = json_array();
	size_t width = 0;

	for (size_t i = 0; i < plan->n; i++)
		if (plan->list[i].tables->list[g].n > width)
			width = plan->list[i].tables->list[g].n;
	for (size_t i = 0; i < plan->n; i++) {
		const struct kv_compat_ids *ids = &plan->list[i].tables->list[g];
		json_t *row = out_ints32(ids->id, ids->n);

		while (json_array_size(row) < width)
			json_array_append_new(row, json_integer(-1));
		json_array_append_new(rows, row);
	}
	return rows;
}

static json_t *out_plan(const struct kv_compat_plan *plan, const json_t *groups, bool has_host)
{
	json_t *requests = json_array(), *tables = json_object(), *out, *group;
	size_t g;

	for (size_t i = 0; i < plan->n; i++) {
		const struct kv_compat_scheduled *q = &plan->list[i];
		json_t *request =
			json_pack("{s:s, s:s, s:I, s:I}", "id", q->id, "type",
				  q->prefill ? "prefill" : "decode", "input_length",
				  (json_int_t)q->n_tokens, "pool_index", (json_int_t)q->pool_index);

		if (q->prefill)
			json_object_set_new(request, "prefix_len", json_integer(q->prefix));
		json_array_append_new(requests, request);
	}
	json_array_foreach(groups, g, group) json_object_set_new(
		tables, in_text(group, "group_id", ""), out_group_table(plan, g));
	out = json_pack("{s:o, s:I, s:I, s:I, s:I, s:I}", "requests", requests, "free_blocks",
			(json_int_t)plan->n_free, "active_blocks", (json_int_t)plan->n_active,
			"waiting", (json_int_t)plan->n_waiting, "prefilling",
			(json_int_t)plan->n_prefilling, "decoding", (json_int_t)plan->n_decoding);
	if (plan->n)
		json_object_set(out, "tables", tables);
	json_decref(tables);
	if (plan->n_stores)
		json_object_set_new(out, "stores", out_moves(plan->stores, plan->n_stores));
	if (plan->n_loads)
		json_object_set_new(out, "loads", out_moves(plan->loads, plan->n_loads));
	if (plan->oom)
		json_object_set_new(out, "oom", json_pack("[s]", plan->oom));
	if (has_host) {
		json_object_set_new(out, "host_cached", json_integer(plan->n_host_cached));
		json_object_set_new(out, "host_free", json_integer(plan->n_host_free));
	}
	return out;
}

static void deliver(struct kv_compat_sched *s, const json_t *event)
{
	const char *ev = in_text(event, "ev", ""), *id = in_text(event, "id", "");
	size_t n;
	int64_t *wide = in_ints(event, "tokens", &n);
	int32_t *tokens = golden_alloc(n, sizeof(*tokens));

	for (size_t i = 0; i < n; i++)
		tokens[i] = (int32_t)wide[i];
	if (!strcmp(ev, "submit"))
		kv_compat_sched_submit(s, id, tokens, n);
	else if (!strcmp(ev, "result"))
		kv_compat_sched_result(s, id, tokens, n);
	else if (!strcmp(ev, "finish") || !strcmp(ev, "abort"))
		kv_compat_sched_end(s, id);
	else
		kv_compat_sched_moved(s, !strcmp(ev, "write_done"), in_int(event, "op_id", 0),
				      in_bool(event, "success", true));
}

int golden_scheduler_trace(const json_t *in, json_t **ret_out)
{
	const json_t *config = json_object_get(in, "config");
	const json_t *groups = json_object_get(config, "groups");
	struct kv_compat_sched_config c = {
		.n_blocks = (int32_t)in_int(config, "total_blocks", 0),
		.n_host_blocks = (int32_t)in_int(config, "host_blocks", 0),
		.max_tokens = in_int(config, "max_scheduled_tokens", 0),
		.max_batch = in_int(config, "max_batch_size", 0),
		.decode_tokens = in_int(config, "decode_input_tokens", 1),
		.caching = !in_bool(config, "disable_prefix_cache", false),
		.mixed = in_bool(config, "enable_mixed_prefill_decode", false),
	};
	json_t *plans = json_array(), *step, *event;
	struct kv_compat_sched *s;
	size_t i, k;
	int r;

	*ret_out = json_pack("{s:o}", "plans", plans);
	c.n_groups = golden_cache_groups(groups, c.groups);
	r = kv_compat_sched_new(&c, &s);
	if (r)
		return r;
	json_array_foreach(json_object_get(in, "steps"), i, step)
	{
		struct kv_compat_plan plan;

		json_array_foreach(step, k, event) deliver(s, event);
		kv_compat_sched_step(s, &plan);
		json_array_append_new(plans, out_plan(&plan, groups, c.n_host_blocks > 1));
	}
	kv_compat_sched_free(s);
	return 0;
}
