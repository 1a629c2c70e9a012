/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of keys, and traces of the block pool, its groups, and paged tables. */
#include <stdlib.h>
#include <string.h>

#include "alloc/compat_cache.h"
#include "tests/golden/golden.h"
#include "tests/golden/golden_scheduler.h"

static json_t *out_key(const uint8_t *hash, const uint32_t *group)
{
	uint8_t key[KV_KEYS_BYTES + KV_KEYS_GROUP_BYTES];
	size_t n = group ? sizeof(key) : KV_KEYS_BYTES;
	char text[2 * sizeof(key) + 1];

	memcpy(key, hash, KV_KEYS_BYTES);
	if (group)
		kv_keys_pack(hash, KV_KEYS_BYTES, *group, key);
	for (size_t i = 0; i < n; i++)
		snprintf(text + 2 * i, 3, "%02x", key[i]);
	return json_string(text);
}

static size_t unhex(const char *hex, uint8_t *bytes)
{
	size_t n = strlen(hex) / 2;

	for (size_t i = 0; i < n; i++)
		bytes[i] = (uint8_t)strtoul((char[]){hex[2 * i], hex[2 * i + 1], 0}, NULL, 16);
	return n;
}

static int page_hashes(const json_t *in, json_t **ret_out)
{
	size_t n_tokens, page = (size_t)in_int(in, "page_size", 1);
	int64_t *wide = in_ints(in, "tokens", &n_tokens);
	int32_t *tokens = golden_alloc(n_tokens, sizeof(*tokens));
	size_t n = n_tokens / page, fold = (size_t)in_int(in, "fold", 1);
	size_t first = (size_t)in_int(in, "first_base", 0);
	uint8_t(*hashes)[KV_COMPAT_HASH] = golden_alloc(n + 1, KV_COMPAT_HASH);
	uint32_t group = (uint32_t)in_int(in, "group_id", 0);
	json_t *out = json_array(), *keys = json_array(), *folded = json_array();
	uint8_t prior[KV_COMPAT_HASH];
	const uint8_t *before = unhex(in_text(in, "prior", ""), prior) ? prior : NULL;

	for (size_t i = 0; i < n_tokens; i++)
		tokens[i] = (int32_t)wide[i];
	for (size_t i = 0; i < n; i++) {
		const json_t *list = json_array_get(json_object_get(in, "extra_keys"), i);
		size_t n_extra = json_array_size(list);
		struct kv_page_extra *extra = golden_alloc(n_extra, sizeof(*extra));

		for (size_t k = 0; k < n_extra; k++)
			extra[k] = (struct kv_page_extra){
				json_string_value(json_array_get(list, k)),
				json_string_length(json_array_get(list, k)),
			};
		kv_page_key(before, tokens + i * page, page, extra, n_extra, hashes[i]);
		before = hashes[i];
		json_array_append_new(out, out_key(hashes[i], NULL));
		json_array_append_new(keys, out_key(hashes[i], &group));
	}
	/* Whole blocks start at absolute base pages that are multiples of fold. */
	for (size_t i = (fold - first % fold) % fold; i + fold <= n; i += fold) {
		uint8_t hash[KV_COMPAT_HASH];

		kv_page_key_fold(hashes[i], fold, hash);
		json_array_append_new(folded, out_key(hash, &group));
	}
	*ret_out = json_pack("{s:o, s:o, s:o}", "hashes", out, "group_keys", keys, "folded_keys",
			     folded);
	return 0;
}

static struct kv_compat_key key_of(const char *label)
{
	struct kv_compat_key key = {.group = 0};

	strncpy((char *)key.hash, label, KV_COMPAT_HASH - 1);
	return key;
}

static int block_pool_trace(const json_t *in, json_t **ret_out)
{
	const json_t *config = json_object_get(in, "config");
	json_t *results = json_array(), *op;
	struct kv_compat_blocks pool;
	size_t i;
	int r;

	*ret_out = json_pack("{s:o}", "results", results);
	r = kv_compat_blocks_init(&pool, (int32_t)in_int(config, "total_blocks", 0),
				  in_bool(config, "enable_caching", true));
	if (r)
		return r;
	json_array_foreach(json_object_get(in, "ops"), i, op)
	{
		const char *name = in_text(op, "op", "");
		struct kv_compat_key key = key_of(in_text(op, "key", ""));
		int32_t n = (int32_t)in_int(op, "n", 0), id = (int32_t)in_int(op, "id", 0);
		int32_t *ids = golden_alloc((size_t)kv_max64(n, 0), sizeof(*ids));
		json_t *result = json_object(), *refs = json_array();
		int64_t n_cached_free = 0;
		size_t k;

		r = 0;
		if (!strcmp(name, "alloc")) {
			n = kv_compat_blocks_alloc(&pool, n, ids);
			json_object_set_new(result, "ids", out_ints32(ids, (size_t)n));
		} else if (!strcmp(name, "free")) {
			int64_t *wide = in_ints(op, "ids", &k);

			ids = golden_alloc(k, sizeof(*ids));
			for (size_t j = 0; j < k; j++)
				ids[j] = (int32_t)wide[j];
			r = kv_compat_blocks_free(&pool, ids, k);
		} else if (!strcmp(name, "cache")) {
			r = kv_compat_blocks_register(&pool, id, &key);
		} else if (!strcmp(name, "touch")) {
			kv_compat_blocks_touch(&pool, id);
		} else {
			id = kv_compat_blocks_find(&pool, &key);
			if (!strcmp(name, "lookup_touch"))
				kv_compat_blocks_touch(&pool, id);
			json_object_set_new(result, "id", id ? json_integer(id) : json_null());
		}
		if (r)
			json_object_set_new(result, "error", json_string(kv_fault_name(r)));
		for (int32_t b = 0; b < pool.n; b++) {
			json_array_append_new(refs, json_integer(pool.block[b].refs));
			n_cached_free += pool.block[b].key.set && !pool.block[b].refs;
		}
		json_object_set_new(result, "refs", refs);
		json_object_set_new(result, "free", json_integer(pool.n_free));
		json_object_set_new(result, "cached", json_integer(pool.n_cached));
		json_object_set_new(result, "cached_free", json_integer(n_cached_free));
		json_array_append_new(results, result);
	}
	kv_compat_blocks_deinit(&pool);
	return 0;
}

static int paged_table_trace(const json_t *in, json_t **ret_out)
{
	const json_t *config = json_object_get(in, "config");
	bool slides = !strcmp(in_text(config, "retention", ""), "sliding_window");
	json_t *ops = json_object_get(in, "ops"), *results = json_array(), *op;
	struct kv_compat_ids *segments = golden_alloc(json_array_size(ops), sizeof(*segments));
	size_t i, n_segments = 0, dropped = 0;
	struct kv_compat_paged p;
	int r;

	*ret_out = json_pack("{s:o}", "results", results);
	r = kv_compat_paged_init(&p, in_int(config, "rows_per_page", 1),
				 in_int(config, "entry_stride_tokens", 1),
				 slides ? in_int(config, "sliding_window_tokens", 0) : 0,
				 (int32_t)in_int(config, "total_pages", 0));
	if (r)
		return r;
	json_array_foreach(ops, i, op)
	{
		const char *name = in_text(op, "op", "");
		int64_t target = in_int(op, "target_tokens", 0), base = 0;
		struct kv_compat_ids ids = {0};
		json_t *result = json_object();

		r = 0;
		if (!strcmp(name, "acquire")) {
			r = kv_compat_paged_acquire(&p, target);
		} else if (!strcmp(name, "drop_oldest_snapshot")) {
			if (dropped < n_segments)
				kv_compat_paged_give(&p, &segments[dropped++]);
		} else if (!strcmp(name, "commit_history") || !strcmp(name, "checkpoint_state")) {
			r = kv_compat_paged_commit(&p, target, *name == 'c' && name[1] == 'h', &ids,
						   &base);
			if (!r) {
				json_object_set_new(result, "segment_pages",
						    out_ints32(ids.id, ids.n));
				json_object_set_new(result, "segment_base_logical_page",
						    json_integer(base));
				segments[n_segments++] = ids;
				ids = (struct kv_compat_ids){0};
			}
		} else {
			if (!strcmp(name, "release_skipped"))
				kv_compat_paged_skip(&p, in_int(op, "window_lower_bound", 0), &ids);
			else if (!strcmp(name, "rewind_tail"))
				kv_compat_paged_rewind(&p, target, &ids);
			else
				kv_compat_paged_release(&p, &ids);
			json_object_set_new(result, "released", out_ints32(ids.id, ids.n));
		}
		free(ids.id);
		if (r)
			json_object_set_new(result, "error", json_string(kv_fault_name(r)));
		json_object_set_new(result, "pages", out_ints32(p.pages.id, p.pages.n));
		json_object_set_new(result, "base_logical_page", json_integer(p.base));
		json_object_set_new(result, "borrowed", json_integer((json_int_t)p.n_borrowed));
		json_object_set_new(result, "owned",
				    json_integer((json_int_t)(p.pages.n - p.n_borrowed)));
		json_object_set_new(result, "cursor", json_integer(p.cursor));
		json_object_set_new(result, "committed", json_integer(p.committed));
		json_object_set_new(result, "available", json_integer((json_int_t)p.n_stack));
		json_object_set_new(result, "failed_allocs", json_integer(p.n_failed));
		json_array_append_new(results, result);
	}
	for (i = 0; i < n_segments; i++)
		free(segments[i].id);
	kv_compat_paged_deinit(&p);
	return 0;
}

struct request {
	char id[32];
	struct kv_compat_tables tables;
	struct kv_compat_hashes hashes;
	int32_t *tokens;
	size_t n_tokens;
	bool live;
};

size_t golden_cache_groups(const json_t *list, struct kv_compat_cache_group *ret_groups)
{
	size_t i;
	json_t *g;

	json_array_foreach(list, i, g)
	{
		const char *kind = in_text(g, "kind", "");

		ret_groups[i] = (struct kv_compat_cache_group){
			.kind = !strcmp(kind, "full")	   ? KV_COMPAT_CACHE_FULL
				: !strcmp(kind, "sliding") ? KV_COMPAT_CACHE_SLIDING
							   : KV_COMPAT_CACHE_STATE,
			.block = in_int(g, "block_size", 1),
			.window = in_int(g, "window", 0),
		};
	}
	return json_array_size(list);
}

static json_t *out_tables(const struct kv_compat_cache *c, const struct kv_compat_tables *t)
{
	json_t *tables = json_array();

	for (size_t g = 0; g < c->n_groups; g++)
		json_array_append_new(tables, out_ints32(t->list[g].id, t->list[g].n));
	return tables;
}

static json_t *admit(const struct kv_compat_cache *c, struct request *q, const json_t *op)
{
	int64_t chunk = in_int(op, "chunk_tokens", 0);
	json_t *result, *groups = json_array();
	struct kv_compat_match m;
	int64_t needed, cost;
	size_t n;
	int64_t *prompt = in_ints(op, "prompt", &n);
	bool admitted;

	q->tokens = golden_alloc(n + 4096, sizeof(*q->tokens));
	q->n_tokens = n;
	for (size_t i = 0; i < n; i++)
		q->tokens[i] = (int32_t)prompt[i];
	kv_compat_hashes_extend(&q->hashes, q->tokens, n, c->base);
	kv_compat_cache_match(c, c->pool, &q->hashes, ((int64_t)n - 1) / c->base * c->base, 0, &m);
	needed = kv_compat_cache_need(c, NULL, chunk + in_int(op, "decode_reserve", 0));
	cost = kv_compat_cache_claim_cost(c, &m);
	for (size_t g = 0; g < c->n_groups; g++) {
		json_int_t n_hits = 0; /* without the holes */

		for (size_t i = 0; i < m.list[g].n; i++)
			n_hits += m.list[g].id[i] != 0;
		json_array_append_new(groups, json_pack("{s:o, s:I}", "blocks",
							out_ints32(m.list[g].id, m.list[g].n),
							"num_hit_blocks", n_hits));
	}
	result = json_pack("{s:I, s:I, s:I, s:o}", "hit_tokens", (json_int_t)m.hit_tokens,
			   "blocks_needed", (json_int_t)needed, "blocks_consumed_by_claim",
			   (json_int_t)cost, "match", groups);
	admitted = needed + cost <= c->pool->n_free;
	if (admitted) {
		kv_compat_cache_claim(c, &m, &q->tables);
		kv_compat_cache_acquire(c, &q->tables, chunk);
		json_object_set_new(result, "tables", out_tables(c, &q->tables));
	}
	json_object_set_new(result, "admitted", json_boolean(admitted));
	q->live = admitted;
	kv_compat_match_deinit(&m);
	return result;
}

static json_t *step(const struct kv_compat_cache *c, struct request *q, const json_t *op)
{
	bool prefill = !strcmp(in_text(op, "op", ""), "prefill_chunk");
	bool decode = !strcmp(in_text(op, "op", ""), "decode_step");
	int64_t tokens = prefill ? in_int(op, "tokens", 0) : in_int(op, "reserve_tokens", 0);
	int64_t computed = in_int(op, "computed", 0);
	int64_t needed =
		kv_compat_cache_need(c, &q->tables, tokens + in_int(op, "decode_reserve", 0));
	int64_t credit = kv_compat_cache_credit(c, &q->tables, computed, false);
	bool admitted = needed <= c->pool->n_free + credit;
	json_t *result = json_pack("{s:I, s:I, s:b}", "slide_credit", (json_int_t)credit,
				   "blocks_needed", (json_int_t)needed, "admitted", admitted);

	if (!admitted)
		return result;
	if (!decode || computed / c->base > in_int(op, "first_slot", 0))
		kv_compat_cache_register(c, &q->tables, &q->hashes, in_int(op, "first_slot", 0),
					 computed);
	kv_compat_cache_expire(c, &q->tables, computed);
	kv_compat_cache_acquire(c, &q->tables, tokens);
	json_object_set_new(result, "tables", out_tables(c, &q->tables));
	if (json_is_integer(json_object_get(op, "next_token"))) {
		q->tokens[q->n_tokens++] = (int32_t)in_int(op, "next_token", 0);
		kv_compat_hashes_extend(&q->hashes, q->tokens, q->n_tokens, c->base);
	}
	return result;
}

static int coordinator_trace(const json_t *in, json_t **ret_out)
{
	const json_t *config = json_object_get(in, "config");
	json_t *ops = json_object_get(in, "ops"), *results = json_array(), *op;
	struct request *all = golden_alloc(json_array_size(ops), sizeof(*all));
	struct kv_compat_cache_group groups[KV_COMPAT_MAX_GROUPS];
	struct kv_compat_blocks pool;
	struct kv_compat_cache c;
	size_t i, n = 0;
	int r;

	*ret_out = json_pack("{s:o}", "results", results);
	r = kv_compat_blocks_init(&pool, (int32_t)in_int(config, "total_blocks", 0), true);
	if (r)
		return r;
	kv_compat_cache_init(&c, &pool, groups,
			     golden_cache_groups(json_object_get(config, "groups"), groups));
	json_array_foreach(ops, i, op)
	{
		const char *name = in_text(op, "op", ""), *id = in_text(op, "id", "");
		struct request *q = NULL;
		json_t *result;

		for (size_t k = 0; k < n; k++)
			if (!strcmp(all[k].id, id))
				q = &all[k];
		if (!q || !strcmp(name, "admit")) {
			q = &all[n++];
			snprintf(q->id, sizeof(q->id), "%s", id);
			result = admit(&c, q, op);
		} else if (!strcmp(name, "free")) {
			kv_compat_cache_release(&c, &q->tables);
			result = json_object();
		} else {
			result = step(&c, q, op);
		}
		json_object_set_new(result, "free", json_integer(pool.n_free));
		json_object_set_new(result, "cached", json_integer(pool.n_cached));
		if (!strcmp(name, "admit"))
			json_object_del(result, "cached");
		json_array_append_new(results, result);
	}
	for (i = 0; i < n; i++) {
		kv_compat_cache_release(&c, &all[i].tables);
		free(all[i].hashes.hash);
	}
	kv_compat_blocks_deinit(&pool);
	return 0;
}

const struct golden_kind golden_traces[] = {
	{"page_hashes", page_hashes},
	{"block_pool_trace", block_pool_trace},
	{"paged_table_trace", paged_table_trace},
	{"coordinator_trace", coordinator_trace},
	{"scheduler_trace", golden_scheduler_trace},
	{NULL, NULL},
};
