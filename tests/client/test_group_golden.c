/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hits across groups against another engine's answers (tests/golden/README.md has where they are
 * from). Each vector's blocks are published one by one, then the prompt is looked up.
 *
 * Left out, as there is no such thing here: drafts that drop a block (eagle), context split over ranks
 * (dcp), hits that end inside a block, windows of one token (there one block is held, here none).
 */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/client.h"

#define MOST_GROUPS 4

static struct kv_client *client;
static uint32_t n_run;

static void setup(void)
{
	daemon_start("--host", "64M");
	client = client_new();
}

static void teardown(void)
{
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

static struct kv_pool *open_pool(const char *name, uint32_t block_tokens)
{
	static const struct kv_component k = {
		.role = KV_ROLE_K, .dtype = KV_F32, .n_heads = 1, .head_dim = 64, .scale = 1};
	struct kv_layout layout = {.kind = KV_LAYOUT_FLAT, .block_tokens = block_tokens,
				   .n_components = 1, .components = &k};
	KV_OPTIONS(kv_pool_options, what, .name = name, .layout = &layout, .max_bytes = 1 << 20);
	struct kv_pool *pool;

	must(kv_pool_open(client, &what, &pool));
	return pool;
}

/* A vector, as far as it can be said here. */
struct vector {
	const char *id;
	uint32_t n;
	struct kv_group groups[MOST_GROUPS];
	uint32_t sizes[MOST_GROUPS]; /* tokens of a block, or from state to state */
	const json_t *cached[MOST_GROUPS]; /* indices of hashes: a list, or keys of an object */
	size_t hash_tokens, n_tokens, expected;
	const json_t *blocks;
};

static size_t number(const json_t *object, const char *name, size_t otherwise)
{
	const json_t *x = json_object_get(object, name);

	return json_is_integer(x) ? (size_t)json_integer_value(x) : otherwise;
}

/* False: this can't be said. */
static bool read_group(struct vector *v, const json_t *spec)
{
	const char *kind = json_string_value(json_object_get(spec, "kind"));
	struct kv_group *g = &v->groups[v->n];

	if (v->n == MOST_GROUPS)
		return false;
	*g = (struct kv_group){0};
	v->sizes[v->n] = (uint32_t)number(spec, "block_size", 0);
	if (!strcmp(kind, "full_attention")) {
		g->kind = KV_GROUP_FULL;
	} else if (!strcmp(kind, "sliding_window")) {
		g->kind = KV_GROUP_WINDOW;
		g->window = (uint32_t)number(spec, "sliding_window", 0);
	} else if (!strcmp(kind, "chunked_local_attention")) {
		g->kind = KV_GROUP_CHUNKED;
		g->window = (uint32_t)number(spec, "attention_chunk_size", 0);
	} else if (!strcmp(kind, "mamba")) {
		g->kind = KV_GROUP_STATE;
		g->interval = v->sizes[v->n];
	} else {
		return false;
	}
	v->n++;
	return g->kind != KV_GROUP_WINDOW || g->window > 1;
}

static bool is_cached(const struct vector *v, uint32_t g, size_t block)
{
	size_t index = (block + 1) * v->sizes[g] / v->hash_tokens - 1;
	char key[24];
	size_t i;
	json_t *x;

	if (json_is_object(v->cached[g])) {
		snprintf(key, sizeof(key), "%zu", index);
		return json_object_get(v->cached[g], key);
	}
	json_array_foreach(v->cached[g], i, x) {
		if ((size_t)json_integer_value(x) == index)
			return true;
	}
	return false;
}

/* Block @i alone: the ones before it have left a window of one token. A state: the row alone. */
static void publish_one(const struct vector *v, uint32_t g, size_t i, const int32_t *tokens)
{
	struct kv_group alone = v->groups[g];
	KV_OPTIONS(kv_groups_options, what, .groups = &alone, .n_groups = 1);
	size_t size = v->sizes[g];
	struct kv_groups *groups;
	struct kv_gseq *seq;

	if (alone.kind != KV_GROUP_STATE) {
		alone.kind = KV_GROUP_WINDOW;
		alone.window = 1;
	}
	must(kv_groups_new(&what, &groups));
	must(kv_gseq_new(groups, &seq));
	must(kv_gseq_reserve(seq, (i + 1) * size, TIMEOUT));
	must(kv_gseq_append(seq, tokens, i * size));
	must(kv_gseq_done(seq, i * size, NULL));
	must(kv_gseq_append(seq, tokens + i * size, size));
	must(kv_gseq_publish(seq, NULL));
	kv_gseq_free(seq, NULL);
	kv_groups_free(groups);
}

static void publish(const struct vector *v, const int32_t *tokens)
{
	for (uint32_t g = 0; g < v->n; g++) {
		size_t n = v->n_tokens / v->sizes[g], i;
		struct kv_seq *seq;

		for (i = 0; i < n; i++) {
			if (is_cached(v, g, i) && v->groups[g].kind != KV_GROUP_FULL)
				publish_one(v, g, i, tokens);
			else if (!is_cached(v, g, i) && v->groups[g].kind == KV_GROUP_FULL)
				break; /* what comes later has no parent */
		}
		if (v->groups[g].kind != KV_GROUP_FULL)
			continue;
		must(kv_seq_new(v->groups[g].pool, &seq));
		must(kv_seq_reserve(seq, i * v->sizes[g], TIMEOUT));
		must(kv_seq_append(seq, tokens, i * v->sizes[g]));
		must(kv_seq_publish(seq, NULL));
		kv_seq_free(seq, NULL);
	}
	must(kv_ping(client, TIMEOUT));
}

static void check_blocks(const struct vector *v, const struct kv_gseq *seq)
{
	for (uint32_t g = 0; g < v->n; g++) {
		const json_t *expected = json_array_get(v->blocks, g);
		const struct kv_seq *part = kv_gseq_seq(seq, g);
		struct kv_pool_info info;
		const kv_block_id *ids;
		size_t n;

		if (!part)
			continue;
		kv_pool_info(v->groups[g].pool, &info);
		n = kv_seq_blocks(part, &ids);
		expect(n == json_array_size(expected), "%s, group %u: %zu blocks, %zu expected", v->id,
		       g, n, json_array_size(expected));
		for (size_t i = 0; i < n; i++)
			expect((ids[i] != info.null_block) ==
				       (json_integer_value(json_array_get(expected, i)) != 0),
			       "%s, group %u: block %zu is %d", v->id, g, i, ids[i]);
	}
}

static void run(struct vector *v)
{
	KV_OPTIONS(kv_groups_options, what, .groups = v->groups, .n_groups = v->n);
	char names[MOST_GROUPS][16];
	int32_t tokens[512];
	struct kv_groups *groups;
	struct kv_gseq *seq;
	size_t hit;

	for (int32_t i = 0; i < 512; i++)
		tokens[i] = 1000 + i;
	for (uint32_t g = 0; g < v->n; g++) {
		snprintf(names[g], sizeof(names[g]), "group%u", g);
		v->groups[g].pool = open_pool(
			names[g], v->groups[g].kind == KV_GROUP_STATE ? 1 : v->sizes[g]);
	}
	publish(v, tokens);
	must(kv_groups_new(&what, &groups));
	must(kv_gseq_new(groups, &seq));
	must(kv_gseq_lookup(seq, tokens, v->n_tokens, &hit));
	expect(hit == v->expected, "%s: %zu tokens are found, %zu expected", v->id, hit, v->expected);
	check_blocks(v, seq);
	kv_gseq_free(seq, NULL);
	kv_groups_free(groups);
	for (uint32_t g = 0; g < v->n; g++) {
		kv_pool_close(v->groups[g].pool);
		must(kv_pool_drop(client, names[g], TIMEOUT));
	}
	n_run++;
}

static json_t *load(const char *file)
{
	char path[512];
	json_error_t error;
	json_t *root;

	snprintf(path, sizeof(path), "%s/%s", KV_GROUP_GOLDEN_DIR, file);
	root = json_load_file(path, 0, &error);
	expect(root, "%s: %s", path, error.text);
	return root;
}

START_TEST(hits_of_several_groups_are_as_long_as_another_engine_says)
{
	json_t *root = load("hybrid_hit.json"), *x;
	size_t i;

	json_array_foreach(json_object_get(root, "cases"), i, x) {
		const json_t *in = json_object_get(x, "in"), *out = json_object_get(x, "out"), *spec;
		struct vector v = {.id = json_string_value(json_object_get(x, "id")),
				   .hash_tokens = number(in, "hash_block_size", 0),
				   .n_tokens = number(in, "max_cache_hit_length", 0) + 1,
				   .expected = number(out, "hit_tokens", 0),
				   .blocks = json_object_get(out, "blocks")};
		bool applies = !json_object_get(out, "error") && number(in, "dcp", 1) == 1 &&
			       !json_array_size(json_object_get(in, "eagle_groups")) &&
			       !json_is_true(json_object_get(out, "partial_hits_enabled"));
		size_t g;

		json_array_foreach(json_object_get(in, "groups"), g, spec) {
			v.cached[g] = json_array_get(json_object_get(in, "cached_hash_indices"), g);
			applies = applies && read_group(&v, spec);
		}
		/* Here states lie where all groups' blocks end. */
		for (uint32_t k = 0; applies && k < v.n; k++)
			applies = v.groups[k].kind != KV_GROUP_STATE ||
				  v.sizes[k] == number(out, "alignment_tokens", 0);
		if (applies)
			run(&v);
	}
	json_decref(root);
	ck_assert_uint_ge(n_run, 17);
}
END_TEST

START_TEST(hits_of_one_group_are_as_long_as_another_engine_says)
{
	json_t *root = load("prefix_hit.json"), *x;
	size_t i;

	json_array_foreach(json_object_get(root, "cases"), i, x) {
		const json_t *in = json_object_get(x, "in"), *out = json_object_get(x, "out");
		const json_t *spec = json_object_get(in, "spec");
		struct vector v = {.id = json_string_value(json_object_get(x, "id")),
				   .hash_tokens = number(in, "hash_block_size", 0),
				   .n_tokens = number(in, "max_length", 0) + 1,
				   .expected = number(out, "hit_tokens", 0),
				   .blocks = json_object_get(out, "blocks"),
				   .cached = {json_array_get(
					   json_object_get(in, "cached_hash_index_to_block"), 0)}};

		if (!json_object_get(out, "error") && number(in, "dcp", 1) == 1 &&
		    json_array_size(v.blocks) == 1 &&
		    !json_is_true(json_object_get(in, "drop_eagle_block")) && read_group(&v, spec) &&
		    v.sizes[0] == number(in, "alignment_tokens", 0))
			run(&v);
	}
	json_decref(root);
	ck_assert_uint_ge(n_run, 35);
}
END_TEST

/* Blocks at the beginning that have left a sequence of @n tokens, all of them done. */
static size_t n_left(const struct vector *v, const struct kv_group *group, size_t n)
{
	KV_OPTIONS(kv_groups_options, what, .groups = group, .n_groups = 1);
	struct kv_groups *groups;
	struct kv_pool_info info;
	const kv_block_id *ids;
	struct kv_gseq *seq;
	size_t left = 0, n_blocks;

	kv_pool_info(group->pool, &info);
	must(kv_groups_new(&what, &groups));
	must(kv_gseq_new(groups, &seq));
	must(kv_gseq_reserve(seq, n, TIMEOUT));
	must(kv_gseq_append(seq, tokens_of(1, n), n));
	must(kv_gseq_done(seq, n, NULL));
	n_blocks = kv_seq_blocks(kv_gseq_seq(seq, 0), &ids);
	while (left < n_blocks && ids[left] == info.null_block)
		left++;
	for (size_t i = left; i < n_blocks; i++)
		expect(ids[i] != info.null_block, "%s: block %zu has left, one before it hasn't", v->id, i);
	kv_gseq_free(seq, NULL);
	kv_groups_free(groups);
	return left;
}

START_TEST(blocks_leave_windows_and_chunks_when_another_engine_says)
{
	json_t *root = load("window_and_mask.json"), *x;
	size_t i, n_tried = 0;

	json_array_foreach(json_object_get(root, "cases"), i, x) {
		const json_t *in = json_object_get(x, "in"), *out = json_object_get(x, "out");
		const json_t *spec = json_object_get(in, "spec");
		struct vector v = {.id = json_string_value(json_object_get(x, "id"))};
		size_t n = number(in, "num_computed_tokens", 0);

		/* Here nothing is kept beyond what the next token sees. */
		if (strcmp(json_string_value(json_object_get(x, "tag")), "skipped_tokens") || !n ||
		    number(spec, "extra_retained_tokens", 0) || !read_group(&v, spec) ||
		    v.groups[0].kind == KV_GROUP_STATE)
			continue;
		v.groups[0].pool = open_pool(v.id, v.sizes[0]);
		ck_assert_uint_eq(n_left(&v, &v.groups[0], n), number(out, "skipped_whole_blocks", 0));
		kv_pool_close(v.groups[0].pool);
		n_tried++;
	}
	json_decref(root);
	ck_assert_uint_ge(n_tried, 8);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("group_golden");
	TCase *tcase = tcase_create("golden");

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_set_timeout(tcase, 120);
	tcase_add_test(tcase, hits_of_several_groups_are_as_long_as_another_engine_says);
	tcase_add_test(tcase, hits_of_one_group_are_as_long_as_another_engine_says);
	tcase_add_test(tcase, blocks_leave_windows_and_chunks_when_another_engine_says);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
