/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs golden vectors: golden [suite]. A suite is a folder of $KV_GOLDEN_DIR (default: the folder
 * tests/golden of the tree). Names each failing id on stderr and ends with one line of counts.
 * Exit: 0 all passed, 1 some failed, 2 nothing could be read.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "tests/golden/golden.h"

static const struct golden_kind *const tables[] = {golden_sizes, golden_v4,	golden_pools,
						   golden_slots, golden_traces, golden_vllm,
						   golden_attention, golden_batch,	golden_recurrent, golden_write,
						   golden_keys};

static struct chunk {
	struct chunk *next;
	max_align_t data[];
} * chunks;

static int n_passed, n_failed, n_skipped;

void *golden_alloc(size_t n, size_t size)
{
	struct chunk *c = calloc(1, sizeof(*c) + (n + 1) * size);

	if (!c)
		abort();
	c->next = chunks;
	chunks = c;
	return c->data;
}

static void free_chunks(void)
{
	while (chunks) {
		struct chunk *next = chunks->next;

		free(chunks);
		chunks = next;
	}
}

int64_t in_int(const json_t *in, const char *key, int64_t otherwise)
{
	const json_t *v = json_object_get(in, key);

	return json_is_integer(v) ? json_integer_value(v) : otherwise;
}

double in_real(const json_t *in, const char *key, double otherwise)
{
	const json_t *v = json_object_get(in, key);

	return json_is_number(v) ? json_number_value(v) : otherwise;
}

bool in_bool(const json_t *in, const char *key, bool otherwise)
{
	const json_t *v = json_object_get(in, key);

	return json_is_boolean(v) ? json_boolean_value(v) : otherwise;
}

const char *in_text(const json_t *in, const char *key, const char *otherwise)
{
	const json_t *v = json_object_get(in, key);

	return json_is_string(v) ? json_string_value(v) : otherwise;
}

int64_t *ints_of(const json_t *list, size_t *ret_n)
{
	int64_t *values;

	*ret_n = json_array_size(list);
	if (!json_is_array(list))
		return NULL;
	values = golden_alloc(*ret_n, sizeof(*values));
	for (size_t i = 0; i < *ret_n; i++) {
		const json_t *v = json_array_get(list, i);

		values[i] = json_is_boolean(v) ? json_boolean_value(v) : json_integer_value(v);
	}
	return values;
}

int64_t *in_ints(const json_t *in, const char *key, size_t *ret_n)
{
	return ints_of(json_object_get(in, key), ret_n);
}

int32_t *in_ints32(const json_t *in, const char *key, size_t *ret_n)
{
	int64_t *wide = in_ints(in, key, ret_n);
	int32_t *values = golden_alloc(*ret_n, sizeof(*values));

	for (size_t i = 0; i < *ret_n; i++)
		values[i] = (int32_t)wide[i];
	return values;
}

int32_t *table_of(const json_t *rows, size_t *ret_rows, size_t *ret_width)
{
	int32_t *table;

	*ret_rows = json_array_size(rows);
	*ret_width = json_array_size(json_array_get(rows, 0));
	if (!json_is_array(rows))
		return NULL;
	table = golden_alloc(*ret_rows * *ret_width, sizeof(*table));
	for (size_t r = 0; r < *ret_rows; r++)
		for (size_t c = 0; c < *ret_width; c++)
			table[r * *ret_width + c] = (int32_t)json_integer_value(
				json_array_get(json_array_get(rows, r), c));
	return table;
}

int32_t *in_table(const json_t *in, const char *key, size_t *ret_rows, size_t *ret_width)
{
	return table_of(json_object_get(in, key), ret_rows, ret_width);
}

static struct kv_compat_value value_of(const json_t *v)
{
	struct kv_compat_value value = {.kind = KV_COMPAT_OTHER};

	if (json_is_null(v) || !v)
		value.kind = KV_COMPAT_NULL;
	else if (json_is_boolean(v))
		value = (struct kv_compat_value){KV_COMPAT_BOOL, json_is_true(v)};
	else if (json_is_integer(v))
		value = (struct kv_compat_value){KV_COMPAT_INT, json_integer_value(v)};
	else if (json_is_array(v))
		value.kind = KV_COMPAT_LIST;
	return value;
}

void in_window(const json_t *in, const char *key, struct kv_compat_window *ret_window)
{
	const json_t *v = json_object_get(in, key);
	struct kv_compat_value *list;

	*ret_window = (struct kv_compat_window){.scalar = value_of(v)};
	if (!json_is_array(v))
		return;
	list = golden_alloc(json_array_size(v), sizeof(*list));
	for (size_t i = 0; i < json_array_size(v); i++)
		list[i] = value_of(json_array_get(v, i));
	ret_window->list = list;
	ret_window->n_list = json_array_size(v);
}

void group_of(const json_t *in, struct kv_compat_group *ret_group)
{
	const char *retention = in_text(in, "retention", "");

	*ret_group = (struct kv_compat_group){
		.retention = !strcmp(retention, "full_history")	    ? KV_COMPAT_FULL_HISTORY
			     : !strcmp(retention, "sliding_window") ? KV_COMPAT_SLIDING
								    : KV_COMPAT_BAD_RETENTION,
		.family = !strcmp(in_text(in, "family", ""), "state") ? KV_COMPAT_STATE
								      : KV_COMPAT_HISTORY,
		.rows_per_page = in_int(in, "rows_per_page", 0),
		.entry_stride = in_int(in, "entry_stride_tokens", 1),
		.window = in_int(in, "sliding_window_tokens", 0),
		.has_window = json_is_integer(json_object_get(in, "sliding_window_tokens")),
	};
	snprintf(ret_group->id, sizeof(ret_group->id), "%s", in_text(in, "group_id", ""));
}

json_t *out_ints(const int64_t *values, size_t n)
{
	json_t *list = json_array();

	for (size_t i = 0; i < n; i++)
		json_array_append_new(list, json_integer(values[i]));
	return list;
}

json_t *out_ints32(const int32_t *values, size_t n)
{
	json_t *list = json_array();

	for (size_t i = 0; i < n; i++)
		json_array_append_new(list, json_integer(values[i]));
	return list;
}

json_t *out_group(const struct kv_compat_group *g)
{
	return json_pack("{s:s, s:s, s:I, s:I, s:o, s:s}", "group_id", g->id, "retention",
			 g->retention == KV_COMPAT_SLIDING ? "sliding_window" : "full_history",
			 "rows_per_page", (json_int_t)g->rows_per_page, "entry_stride_tokens",
			 (json_int_t)g->entry_stride, "sliding_window_tokens",
			 g->has_window ? json_integer(g->window) : json_null(), "family",
			 g->family == KV_COMPAT_STATE ? "state" : "history");
}

void out_run(json_t *runs, json_t *value)
{
	json_t *last = json_array_get(runs, json_array_size(runs) - 1);

	if (last && json_equal(json_array_get(last, 0), value)) {
		json_integer_set(json_array_get(last, 1),
				 json_integer_value(json_array_get(last, 1)) + 1);
		json_decref(value);
		return;
	}
	json_array_append_new(runs, json_pack("[o, i]", value, 1));
}

static const struct golden_kind *find(const char *fn)
{
	for (size_t t = 0; t < sizeof(tables) / sizeof(tables[0]); t++)
		for (const struct golden_kind *k = tables[t]; k->fn; k++)
			if (!strcmp(k->fn, fn))
				return k;
	return NULL;
}

/* The error's own fields are kind and type (of the reference's language); the rest must agree. */
static bool same_error(const json_t *expected, int fault, const json_t *details)
{
	const char *key;
	json_t *value;

	if (fault <= 0 || strcmp(in_text(expected, "kind", ""), kv_fault_name(fault)))
		return false;
	json_object_foreach(
		(json_t *)expected, key,
		value) if (strcmp(key, "kind") && strcmp(key, "type") && details &&
			   !json_equal(value, json_object_get(details, key))) return false;
	return true;
}

/* Lists may be given as runs: [[value, n], ...] */
static bool same_value(const json_t *expected, const json_t *got)
{
	size_t i, at = 0;
	json_t *run;

	if (json_equal(expected, got))
		return true;
	if (!json_is_array(expected) || !json_is_array(got))
		return false;
	json_array_foreach(expected, i, run)
	{
		if (json_array_size(run) != 2)
			return false;
		for (json_int_t n = json_integer_value(json_array_get(run, 1)); n > 0; n--)
			if (!json_equal(json_array_get(run, 0), json_array_get(got, at++)))
				return false;
	}
	return at == json_array_size(got);
}

static bool same_output(const json_t *expected, const json_t *got, const char *optional)
{
	const char *key;
	json_t *value;

	if (!json_is_object(expected) || !got)
		return json_equal(expected, got);
	json_object_foreach(
		(json_t *)expected, key,
		value) if (!(optional && json_is_null(value) && !strcmp(key, optional)) &&
			   !same_value(value, json_object_get(got, key))) return false;
	return true;
}

static void report(const char *id, int fault, const json_t *got, const json_t *expected)
{
	fprintf(stderr, "FAIL %s\n", id);
	if (!getenv("KV_GOLDEN_VERBOSE"))
		return;
	if (fault)
		fprintf(stderr, "  fault %d %s: %s\n", fault, kv_fault_name(fault),
			kv_error_text());
	fprintf(stderr, "  expected ");
	json_dumpf(expected, stderr, JSON_ENCODE_ANY | JSON_COMPACT | JSON_SORT_KEYS);
	fprintf(stderr, "\n  got      ");
	if (got)
		json_dumpf(got, stderr, JSON_ENCODE_ANY | JSON_COMPACT | JSON_SORT_KEYS);
	fprintf(stderr, "\n");
}

/* Errors inside an output: the class of the reference's language says nothing here. */
static void drop_error_types(json_t *value)
{
	const char *key;
	json_t *item;
	size_t i;

	json_array_foreach(value, i, item) drop_error_types(item);
	json_object_foreach(value, key, item)
	{
		if (!strcmp(key, "error"))
			json_object_del(item, "type");
		drop_error_types(item);
	}
}

static void run_vector(const char *id, const char *fn, const json_t *in, json_t *expected,
		       const json_t *error)
{
	const struct golden_kind *kind = find(fn);
	json_t *out = NULL;
	bool passed;
	int r;

	if (!kind) {
		fprintf(stderr, "SKIP %s: nothing computes %s\n", id, fn);
		n_skipped++;
		return;
	}
	drop_error_types(expected);
	r = kind->run(in, &out);
	if (r == GOLDEN_SKIP) {
		fprintf(stderr, "SKIP %s: left out of this project\n", id);
		n_skipped++;
		free_chunks();
		return;
	}
	if (!r && kind->ask && expected)
		kind->ask(expected, out);
	passed = error ? same_error(error, r, out)
		       : !r && same_output(expected, out, kind->optional);
	if (passed)
		n_passed++;
	else
		n_failed++;
	if (!passed)
		report(id, r, out, error ? error : expected);
	json_decref(out);
	free_chunks();
}

/* tokenspeed: {vectors: [{id, fn, input, output|error}]}; vllm: {suite, cases: [{id, in, out}]} */
static void run_file(const char *path)
{
	json_error_t where;
	json_t *file = json_load_file(path, 0, &where), *v;
	size_t i;

	if (!file) {
		fprintf(stderr, "FAIL %s: line %d: %s\n", path, where.line, where.text);
		n_failed++;
		return;
	}
	json_array_foreach(json_object_get(file, "vectors"), i, v) run_vector(
		in_text(v, "id", "?"), in_text(v, "fn", "?"), json_object_get(v, "input"),
		json_object_get(v, "output"), json_object_get(v, "error"));
	json_array_foreach(json_object_get(file, "cases"), i, v)
		run_vector(in_text(v, "id", "?"), in_text(file, "suite", "?"),
			   json_object_get(v, "in"), json_object_get(v, "out"), NULL);
	json_decref(file);
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
	return strcmp((*a)->d_name, (*b)->d_name);
}

static int is_json(const struct dirent *d)
{
	size_t n = strlen(d->d_name);

	return n > 5 && !strcmp(d->d_name + n - 5, ".json");
}

static void run_folder(const char *path)
{
	struct dirent **entries;
	int n = scandir(path, &entries, is_json, by_name);
	char file[4096];

	for (int i = 0; i < n; i++) {
		snprintf(file, sizeof(file), "%s/%s", path, entries[i]->d_name);
		run_file(file);
		free(entries[i]);
	}
	if (n >= 0)
		free(entries);
}

int main(int argc, char **argv)
{
	const char *dir = getenv("KV_GOLDEN_DIR");
	char path[2048];

	if (!dir)
		dir = KV_GOLDEN_DIR;
	run_folder(dir);
	for (int i = 0; i < 2; i++) {
		const char *suite = i ? "vllm" : "tokenspeed";

		if (argc > 1 && strcmp(argv[1], suite))
			continue;
		snprintf(path, sizeof(path), "%s/%s", dir, suite);
		run_folder(path);
	}
	printf("golden: %d passed, %d failed, %d skipped\n", n_passed, n_failed, n_skipped);
	if (!n_passed && !n_failed && !n_skipped) {
		fprintf(stderr, "%s: holds no vectors\n", dir);
		return 2;
	}
	return n_failed ? 1 : 0;
}
