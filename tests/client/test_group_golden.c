/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hits across groups against another engine's answers (tests/golden/README.md has where they are
 * from). Each vector's blocks are published one by one, then the prompt is looked up.
 *
 * A sequence that is split over ranks (dcp) has so many tokens in a block, on all of them together. Where hits
 * are to be multiples of more than a block, another group with such blocks, all of which are cached, says so.
 * Where our answer is another, `others` has it with why, and each of them must come.
 */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/client.h"

#define MOST_GROUPS 5

struct other {
	const char *id;
	size_t hit; /* ours */
	const char *why;
};

#define DRAFTS "a hit keeps its last block: who needs it computed anew for a draft rolls back"
#define PARTLY "a block is cached when it is complete"
#define ERROR  "refused there, for reasons of its own: here groups and blocks of any sizes go together"

static const struct other others[] = {
	{"hybrid_hit-g012", 0, ERROR},
	{"hybrid_hit-g016", 28, DRAFTS},
	{"hybrid_hit-g017", 28, DRAFTS},
	{"hybrid_hit-g018", 4, DRAFTS},
	{"hybrid_hit-g022", 8, ERROR},
	{"hybrid_hit-g023", 4, ERROR},
	{"hybrid_hit-g028", 44, DRAFTS},
	{"hybrid_hit-g035", 4, DRAFTS},
	{"prefix_hit-g013", 32, PARTLY},
	{"prefix_hit-g014", 32, PARTLY},
	{"prefix_hit-g015", 0, PARTLY},
	{"prefix_hit-g016", 16, PARTLY},
	{"prefix_hit-g017", 16, PARTLY},
	{"prefix_hit-g035", 4, DRAFTS},
	{"prefix_hit-g040", 36, ERROR},
	{"prefix_hit-g041", 32, ERROR},
	{"prefix_hit-g049", 8, ERROR},
	{"prefix_hit-g050", 12, ERROR},
	{"prefix_hit-g061", 12, DRAFTS},
	{"prefix_hit-g069", 8, DRAFTS},
	{"prefix_hit-g071", 4, DRAFTS},
	{"prefix_hit-g074", 6, DRAFTS},
};

static bool came[sizeof(others) / sizeof(*others)];

static struct kv_client *client;

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
	const json_t *cached[MOST_GROUPS]; /* indices of hashes: a list, or keys of an object; NULL: all */
	size_t hash_tokens, n_tokens;
	uint32_t ranks, align; /* align: hits are multiples of so many tokens */
	const json_t *blocks;
};

static size_t number(const json_t *object, const char *name, size_t otherwise)
{
	const json_t *x = json_object_get(object, name);

	return json_is_integer(x) ? (size_t)json_integer_value(x) : otherwise;
}

/* False: there is no such group. */
static bool read_group(struct vector *v, const json_t *spec)
{
	const char *kind = json_string_value(json_object_get(spec, "kind"));
	struct kv_group *g = &v->groups[v->n];

	ck_assert_uint_lt(v->n, MOST_GROUPS);
	*g = (struct kv_group){0};
	v->sizes[v->n] = (uint32_t)number(spec, "block_size", 0) * v->ranks;
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
		v->sizes[v->n] = g->interval = v->align;
	} else {
		return false;
	}
	v->n++;
	return true;
}

/* Where hits are to be multiples of more than blocks, a group that has all of such blocks. */
static void align(struct vector *v)
{
	uint32_t unit = 1;

	for (uint32_t g = 0; g < v->n; g++)
		unit = v->sizes[g] > unit ? v->sizes[g] : unit;
	if (unit >= v->align)
		return;
	ck_assert_uint_lt(v->n, MOST_GROUPS);
	v->groups[v->n] = (struct kv_group){.kind = KV_GROUP_FULL};
	v->cached[v->n] = NULL;
	v->sizes[v->n++] = v->align;
}

static bool is_cached(const struct vector *v, uint32_t g, size_t block)
{
	size_t index = (block + 1) * v->sizes[g] / v->hash_tokens - 1;
	char key[24];
	size_t i;
	json_t *x;

	if (!v->cached[g])
		return true;
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

/* A window of one token sees none before it: here nothing of it is held, there one block. */
static void check_blocks(const struct vector *v, const struct kv_gseq *seq)
{
	for (uint32_t g = 0; g < json_array_size(v->blocks); g++) {
		const json_t *expected = json_array_get(v->blocks, g);
		bool holds = v->groups[g].kind != KV_GROUP_WINDOW || v->groups[g].window > 1;
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
				       (holds && json_integer_value(json_array_get(expected, i)) != 0),
			       "%s, group %u: block %zu is %d", v->id, g, i, ids[i]);
	}
}

/* @out: what the other engine says */
static void compare(const struct vector *v, const struct kv_gseq *seq, size_t hit, const json_t *out)
{
	for (size_t i = 0; i < sizeof(others) / sizeof(*others); i++) {
		if (strcmp(others[i].id, v->id))
			continue;
		expect(hit == others[i].hit, "%s: %zu tokens are found, %zu expected: %s", v->id, hit, others[i].hit,
		       others[i].why);
		expect(hit != number(out, "hit_tokens", SIZE_MAX), "%s: as there", v->id);
		came[i] = true;
		return;
	}
	expect(hit == number(out, "hit_tokens", SIZE_MAX), "%s: %zu tokens are found, there %zu", v->id, hit,
	       number(out, "hit_tokens", SIZE_MAX));
	check_blocks(v, seq);
}

static void run(struct vector *v, const json_t *out)
{
	KV_OPTIONS(kv_groups_options, what, .groups = v->groups);
	char names[MOST_GROUPS][16];
	int32_t tokens[512];
	struct kv_groups *groups;
	struct kv_gseq *seq;
	size_t hit;

	align(v);
	what.n_groups = v->n;
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
	compare(v, seq, hit, out);
	kv_gseq_free(seq, NULL);
	kv_groups_free(groups);
	for (uint32_t g = 0; g < v->n; g++) {
		kv_pool_close(v->groups[g].pool);
		must(kv_pool_drop(client, names[g], TIMEOUT));
	}
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

/* All others of this suite have come. */
static void all_came(const char *suite)
{
	for (size_t i = 0; i < sizeof(others) / sizeof(*others); i++)
		expect(came[i] || strncmp(others[i].id, suite, strlen(suite)), "%s: as there", others[i].id);
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
				   .ranks = (uint32_t)number(in, "dcp", 1),
				   .blocks = json_object_get(out, "blocks")};
		size_t g;

		v.align = (uint32_t)number(out, "alignment_tokens", number(in, "scheduler_block_size", 0));
		json_array_foreach(json_object_get(in, "groups"), g, spec) {
			v.cached[g] = json_array_get(json_object_get(in, "cached_hash_indices"), g);
			ck_assert(read_group(&v, spec));
		}
		run(&v, out);
	}
	json_decref(root);
	ck_assert_uint_eq(i, 38);
	all_came("hybrid_hit");
}
END_TEST

START_TEST(hits_of_one_group_are_as_long_as_another_engine_says)
{
	json_t *root = load("prefix_hit.json"), *x;
	size_t i, n_refused = 0;

	json_array_foreach(json_object_get(root, "cases"), i, x) {
		const json_t *in = json_object_get(x, "in"), *out = json_object_get(x, "out");
		const json_t *spec = json_object_get(in, "spec"), *cached;
		struct vector v = {.id = json_string_value(json_object_get(x, "id")),
				   .hash_tokens = number(in, "hash_block_size", 0),
				   .n_tokens = number(in, "max_length", 0) + 1,
				   .ranks = (uint32_t)number(in, "dcp", 1),
				   .align = (uint32_t)number(in, "alignment_tokens", 0),
				   .blocks = json_object_get(out, "blocks")};
		size_t g;

		json_array_foreach(json_object_get(in, "cached_hash_index_to_block"), g, cached) {
			v.cached[g] = cached;
			n_refused += !read_group(&v, spec);
		}
		if (!v.n) { /* cross attention */
			ck_assert(json_object_get(out, "error"));
			continue;
		}
		run(&v, out);
	}
	json_decref(root);
	ck_assert_uint_eq(i, 77);
	ck_assert_uint_eq(n_refused, 1);
	all_came("prefix_hit");
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
	size_t i, n_tried = 0, n_vectors = 0;

	json_array_foreach(json_object_get(root, "cases"), i, x) {
		const json_t *in = json_object_get(x, "in"), *out = json_object_get(x, "out");
		const json_t *spec = json_object_get(in, "spec");
		struct vector v = {.id = json_string_value(json_object_get(x, "id"))};
		size_t n = number(in, "num_computed_tokens", 0);

		/* The others are about what a cache keeps of a window: here all, until others need the room. */
		if (strcmp(json_string_value(json_object_get(x, "tag")), "skipped_tokens"))
			continue;
		n_vectors++;
		v.ranks = 1;
		ck_assert(read_group(&v, spec));
		if (!n || v.groups[0].kind == KV_GROUP_STATE) {
			ck_assert_uint_eq(number(out, "skipped_whole_blocks", 0), 0);
			continue;
		}
		/* Tokens that are kept beyond what the next one sees are a wider window. */
		v.groups[0].window += (uint32_t)number(spec, "extra_retained_tokens", 0);
		v.groups[0].pool = open_pool(v.id, v.sizes[0]);
		ck_assert_uint_eq(n_left(&v, &v.groups[0], n), number(out, "skipped_whole_blocks", 0));
		kv_pool_close(v.groups[0].pool);
		n_tried++;
	}
	json_decref(root);
	ck_assert_uint_eq(n_vectors, 13);
	ck_assert_uint_eq(n_tried, 11);
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
