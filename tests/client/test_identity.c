/* SPDX-License-Identifier: Apache-2.0 */
/* What besides tokens decides about a hit: fields, extras, epochs; and keys that collide. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/client.h"
#include "tests/support/process.h"

static struct kv_client *client;
static struct kv_pool *pool;

static void setup(void)
{
	daemon_start("--host", "16M");
	client = client_new();
	pool = pool_new(client, "pool", 0);
}

static void teardown(void)
{
	kv_pool_close(pool);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

/* ---- fields ---- */

/* Tags with values, up to a tag of 0. */
struct field {
	uint32_t tag;
	const char *bytes;
	size_t n;
};

#define N_SPACES 14
static const struct field spaces[N_SPACES][4] = {
	{{0}},
	{{KV_TAG_ADAPTER, "X", 1}},
	{{KV_TAG_SALT, "X", 1}},
	{{KV_TAG_SALT, "ab", 2}, {KV_TAG_OWN, "c", 1}},
	{{KV_TAG_SALT, "a", 1}, {KV_TAG_OWN, "bc", 2}},
	{{KV_TAG_SALT, "org_1", 5}, {KV_TAG_OWN, "2345", 4}},
	{{KV_TAG_SALT, "org_12345", 9}, {KV_TAG_OWN, "", 0}},
	{{KV_TAG_SALT, "org_12345", 9}},
	{{KV_TAG_SALT, "", 0}},
	{{KV_TAG_ADAPTER, "", 0}},
	{{KV_TAG_ADAPTER, "", 0}, {KV_TAG_SALT, "", 0}},
	{{KV_TAG_SALT, "\0", 1}},
	{{KV_TAG_SALT, "a name that is so long that it doesn't fit in a row of a hundred and twelve "
		       "bytes and is kept as a digest", 106}},
	{{KV_TAG_SALT, "a name that is so long that it doesn't fit in a row of a hundred and twelve "
		       "bytes and is kept as a digesT", 106}},
};

static struct kv_seq *seq_in(int space)
{
	struct kv_seq *seq;

	must(kv_seq_new(pool, &seq));
	for (const struct field *f = spaces[space]; f->tag; f++)
		must(kv_seq_field(seq, f->tag, f->bytes, f->n));
	return seq;
}

/* Reserves, appends, publishes and frees. */
static void commit(struct kv_seq *seq, const int32_t *tokens, size_t n)
{
	size_t len = kv_seq_len(seq);

	must(kv_seq_reserve(seq, n, 0));
	must(kv_seq_append(seq, tokens + len, n - len));
	must(kv_seq_publish(seq, NULL));
	must(kv_ping(client, TIMEOUT));
	kv_seq_free(seq, NULL);
}

static size_t look_up(struct kv_seq *seq, const int32_t *tokens, size_t n)
{
	size_t hit;

	must(kv_seq_lookup(seq, tokens, n, &hit));
	kv_seq_free(seq, NULL);
	return hit;
}

/* D20. */
START_TEST(fields_of_a_namespace_cannot_imitate_each_other)
{
	const int32_t *tokens = tokens_of(1, 65);

	for (int space = 0; space < N_SPACES; space++) {
		for (int other = space; other < N_SPACES; other++)
			expect(look_up(seq_in(other), tokens, 65) == 0, "%d finds %d's", other, space);
		commit(seq_in(space), tokens, 64);
		expect(look_up(seq_in(space), tokens, 65) == 64, "%d doesn't find its own", space);
		expect(look_up(seq_in(space), tokens, 64) == 48, "%d: the last token is left", space);
	}
	for (int space = 0; space < N_SPACES; space++)
		expect(look_up(seq_in(space), tokens, 65) == 64, "%d doesn't find its own", space);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached, 4 * N_SPACES);
}
END_TEST

START_TEST(the_order_in_which_fields_are_said_makes_no_difference_and_a_fork_has_them)
{
	const int32_t *tokens = tokens_of(1, 65);
	struct kv_seq *seq, *child;

	must(kv_seq_new(pool, &seq));
	must(kv_seq_field(seq, KV_TAG_SALT, "s", 1));
	must(kv_seq_field(seq, KV_TAG_ADAPTER, "a", 1));
	must(kv_seq_reserve(seq, 20, 0));
	must(kv_seq_append(seq, tokens, 20));
	must(kv_seq_fork(seq, &child));
	kv_seq_free(seq, NULL);
	commit(child, tokens, 64);

	must(kv_seq_new(pool, &seq));
	must(kv_seq_field(seq, KV_TAG_ADAPTER, "a", 1));
	must(kv_seq_field(seq, KV_TAG_SALT, "s", 1));
	ck_assert_uint_eq(look_up(seq, tokens, 65), 64);
}
END_TEST

START_TEST(fields_and_extras_that_come_too_late_or_twice_are_refused)
{
	const int32_t *tokens = tokens_of(1, 65);
	struct kv_extra extra = {.tag = KV_TAG_IMAGE, .position = 4, .n_tokens = 3};
	struct kv_seq *seq;

	must(kv_seq_new(pool, &seq));
	must(kv_seq_field(seq, KV_TAG_SALT, "s", 1));
	refused(kv_seq_field(seq, KV_TAG_SALT, "s", 1), -EEXIST, "2");
	refused(kv_seq_field(seq, 0, "s", 1), -EINVAL, "tag");
	/* By which the second group of a pool is told from the first: layers of others would be found. */
	refused(kv_seq_field(seq, 255, "\1\0\0", 4), -EINVAL, "256");
	refused(kv_seq_field(seq, 9, "s", KV_IDENTITY_MAX + 1), -EINVAL, "digest");
	must(kv_seq_reserve(seq, 20, 0));
	must(kv_seq_append(seq, tokens, 5));
	refused(kv_seq_field(seq, KV_TAG_ADAPTER, "a", 1), -EBUSY, "5 tokens");
	refused(kv_seq_extra(seq, &extra), -EBUSY, "4");
	extra.position = 5;
	must(kv_seq_extra(seq, &extra));
	extra.n_tokens = 0;
	refused(kv_seq_extra(seq, &extra), -EINVAL, "n_tokens");
	extra.n_tokens = UINT64_MAX;
	refused(kv_seq_extra(seq, &extra), -EINVAL, "2^48");
	kv_seq_free(seq, NULL);
}
END_TEST

/* ---- images ---- */

#define IMAGE 77 /* the placeholder's id */

static struct kv_pool *small_blocks(void)
{
	static const struct kv_component kv[] = {
		{.role = KV_ROLE_K, .dtype = KV_F32, .n_heads = 1, .head_dim = 16, .scale = 1},
		{.role = KV_ROLE_V, .dtype = KV_F32, .n_heads = 1, .head_dim = 16, .scale = 1},
	};
	struct kv_layout layout = {.kind = KV_LAYOUT_FLAT, .block_tokens = 4, .n_components = 2,
				   .components = kv};
	KV_OPTIONS(kv_pool_options, what, .name = "images", .layout = &layout);
	struct kv_pool *p;

	must(kv_pool_open(client, &what, &p));
	return p;
}

static struct kv_seq *with_images(struct kv_pool *p, const char *a, uint64_t first, const char *b)
{
	struct kv_seq *seq;

	must(kv_seq_new(p, &seq));
	if (a)
		must(kv_seq_extra(seq, &(struct kv_extra){.tag = KV_TAG_IMAGE, .position = 2,
							  .n_tokens = 5, .first = first,
							  .bytes = a, .n_bytes = strlen(a)}));
	if (b)
		must(kv_seq_extra(seq, &(struct kv_extra){.tag = KV_TAG_IMAGE, .position = 9,
							  .n_tokens = 3, .bytes = b,
							  .n_bytes = strlen(b)}));
	return seq;
}

/* D21. */
START_TEST(image_content_is_part_of_what_is_looked_for)
{
	static const int32_t tokens[] = {1,	2,     IMAGE, IMAGE, IMAGE, IMAGE, IMAGE,
					 3,	4,     IMAGE, IMAGE, IMAGE, 5};
	struct kv_pool *p = small_blocks();

	commit(with_images(p, "a", 0, "b"), tokens, 12);
	ck_assert_uint_eq(look_up(with_images(p, "a", 0, "b"), tokens, 13), 12);
	ck_assert_uint_eq(look_up(with_images(p, "a", 0, "c"), tokens, 13), 8);
	ck_assert_uint_eq(look_up(with_images(p, "d", 0, "b"), tokens, 13), 0);
	ck_assert_uint_eq(look_up(with_images(p, "a", 1, "b"), tokens, 13), 0);
	ck_assert_uint_eq(look_up(with_images(p, NULL, 0, NULL), tokens, 13), 0);
	ck_assert_uint_eq(look_up(with_images(p, "a", 0, NULL), tokens, 13), 8);

	/* Text alone finds text alone, images elsewhere or not. */
	commit(with_images(p, NULL, 0, NULL), tokens, 12);
	ck_assert_uint_eq(look_up(with_images(p, NULL, 0, NULL), tokens, 13), 12);
	ck_assert_uint_eq(look_up(with_images(p, NULL, 0, "b"), tokens, 13), 8);
	ck_assert_uint_eq(look_up(with_images(p, "a", 0, "b"), tokens, 13), 12);
	kv_pool_close(p);
}
END_TEST

START_TEST(a_rollback_forgets_what_stood_at_the_positions_given_up)
{
	static const int32_t tokens[] = {1, 2, 3, 4, IMAGE, IMAGE, IMAGE, IMAGE, 5};
	struct kv_pool *p = small_blocks();
	struct kv_extra image = {.tag = KV_TAG_IMAGE, .position = 4, .n_tokens = 4, .bytes = "a",
				 .n_bytes = 1};
	struct kv_seq *seq;

	must(kv_seq_new(p, &seq));
	must(kv_seq_extra(seq, &image));
	must(kv_seq_reserve(seq, 8, 0));
	must(kv_seq_append(seq, tokens, 8));
	must(kv_seq_rollback(seq, 4, NULL));
	image.bytes = "b";
	must(kv_seq_extra(seq, &image));
	commit(seq, tokens, 8);

	must(kv_seq_new(p, &seq));
	must(kv_seq_extra(seq, &image));
	ck_assert_uint_eq(look_up(seq, tokens, 9), 8);
	must(kv_seq_new(p, &seq));
	image.bytes = "a";
	must(kv_seq_extra(seq, &image));
	ck_assert_uint_eq(look_up(seq, tokens, 9), 4);
	kv_pool_close(p);
}
END_TEST

/* ---- epochs ---- */

/* D23. */
START_TEST(a_weight_update_ends_the_life_of_what_was_cached)
{
	const int32_t *tokens = tokens_of(1, 853);
	struct kv_seq *seq, *running, *begun;
	uint64_t epoch, held;
	size_t hit;

	must(kv_seq_new(pool, &seq));
	commit(seq, tokens, 853);
	must(kv_seq_new(pool, &running));
	must(kv_seq_lookup(running, tokens, 400, &hit));
	ck_assert_uint_eq(hit, 384);
	must(kv_seq_new(pool, &begun));
	must(kv_seq_reserve(begun, 32, 0));
	must(kv_seq_append(begun, tokens_of(2, 32), 16));
	ck_assert_uint_eq(hit_of(pool, 1, 853), 848);

	must(kv_pool_new_epoch(client, "pool", &epoch, &held, TIMEOUT));
	ck_assert_uint_eq(epoch, 1);
	ck_assert_uint_eq(held, 384 / BLOCK_TOKENS);
	ck_assert_uint_eq(kv_pool_epoch(pool), 1);
	ck_assert_uint_eq(hit_of(pool, 1, 853), 0);
	/* What nobody held is free; what was held is still where it was. */
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached, 384 / BLOCK_TOKENS);
	ck_assert_int_eq(memcmp(kv_seq_tokens(running), tokens_of(1, 384), 384 * 4), 0);

	/* Those of the old epoch go on, and show nothing any more. */
	must(kv_seq_reserve(running, 800, 0));
	must(kv_seq_append(running, tokens_of(1, 853) + 384, 416));
	must(kv_seq_publish(running, NULL));
	must(kv_seq_append(begun, tokens_of(2, 32) + 16, 16));
	must(kv_seq_publish(begun, NULL));
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached, 384 / BLOCK_TOKENS);
	ck_assert_uint_eq(hit_of(pool, 1, 853), 0);
	ck_assert_uint_eq(hit_of(pool, 2, 33), 0);

	/* The new epoch has its own. */
	must(kv_seq_new(pool, &seq));
	commit(seq, tokens_of(1, 853), 853);
	ck_assert_uint_eq(hit_of(pool, 1, 853), 848);
	kv_seq_free(running, NULL);
	kv_seq_free(begun, NULL);
	ck_assert_uint_eq(hit_of(pool, 1, 853), 848);
}
END_TEST

START_TEST(blocks_of_an_old_epoch_go_before_all_others_once_they_are_let_go)
{
	struct kv_pool *small = pool_new(client, "small", 12);
	struct kv_seq *old = seq_published(client, small, 1, 64), *fresh;
	kv_block_id ids[8];
	uint64_t held;

	must(kv_pool_new_epoch(client, "small", NULL, &held, TIMEOUT));
	ck_assert_uint_eq(held, 4);
	fresh = seq_published(client, small, 2, 64);
	kv_seq_free(fresh, NULL);
	kv_seq_free(old, NULL); /* used last, and worth nothing */
	must(kv_blocks_take(small, 8, ids, TIMEOUT));
	ck_assert_uint_eq(hit_of(small, 2, 65), 64);
	ck_assert_uint_eq(pool_stats(client, "small").blocks_cached, 4);
	must(kv_blocks_give(small, 8, ids));
	kv_pool_close(small);
}
END_TEST

START_TEST(an_engine_that_keeps_its_epoch_shows_nothing_as_new_until_it_joins)
{
	KV_OPTIONS(kv_pool_options, what, .name = "pool", .model = "small", .keep_epoch = 1);
	struct kv_pool *late;

	must(kv_pool_open(client, &what, &late));
	must(kv_pool_new_epoch(client, "pool", NULL, NULL, TIMEOUT));
	ck_assert_uint_eq(kv_pool_epoch(late), 0);
	kv_seq_free(seq_published(client, late, 1, 64), NULL);
	ck_assert_uint_eq(hit_of(pool, 1, 65), 0);
	ck_assert_uint_eq(hit_of(late, 1, 65), 0);
	kv_seq_free(seq_published(client, pool, 2, 64), NULL);
	ck_assert_uint_eq(hit_of(pool, 2, 65), 64);
	ck_assert_uint_eq(hit_of(late, 2, 65), 0);

	kv_pool_join_epoch(late);
	ck_assert_uint_eq(kv_pool_epoch(late), 1);
	ck_assert_uint_eq(hit_of(late, 2, 65), 64);
	kv_seq_free(seq_published(client, late, 1, 64), NULL);
	ck_assert_uint_eq(hit_of(pool, 1, 65), 64);
	kv_pool_close(late);
}
END_TEST

START_TEST(a_new_epoch_of_a_pool_that_is_not_there_is_refused)
{
	refused(kv_pool_new_epoch(client, "nothing", NULL, NULL, TIMEOUT), -ENOENT, "nothing");
}
END_TEST

/* ---- keys that collide ---- */

static void setup_collisions(void)
{
	setenv("KVCACHED_TEST_KEY_BITS", "0", 1);
	setup();
	unsetenv("KVCACHED_TEST_KEY_BITS");
}

/* D19. */
START_TEST(equal_keys_of_different_tokens_cost_a_miss_and_never_give_a_wrong_hit)
{
	/* Every key is 0, both of its buckets are the first: eight can be there at once. */
	for (int32_t prompt = 1; prompt <= 8; prompt++) {
		ck_assert_uint_eq(hit_of(pool, prompt, 17), 0);
		kv_seq_free(seq_published(client, pool, prompt, 16), NULL);
		for (int32_t other = 1; other <= 12; other++)
			expect(hit_of(pool, other, 17) == (other <= prompt ? 16u : 0u),
			       "%d prompts are there, %d is looked for", prompt, other);
	}
	/* The next one isn't cached, and nothing else happens. */
	kv_seq_free(seq_published(client, pool, 9, 16), NULL);
	ck_assert_uint_eq(hit_of(pool, 9, 17), 0);
	ck_assert_uint_eq(hit_of(pool, 8, 17), 16);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached, 8);
}
END_TEST

/* D19. */
START_TEST(equal_keys_of_chains_and_namespaces_are_told_apart)
{
	const int32_t *tokens = tokens_of(1, 65);
	struct kv_seq *seq;

	commit(seq_in(1), tokens, 64);
	ck_assert_uint_eq(look_up(seq_in(0), tokens, 65), 0);
	ck_assert_uint_eq(look_up(seq_in(2), tokens, 65), 0);
	ck_assert_uint_eq(look_up(seq_in(1), tokens, 65), 64);
	/* The second block of one chain is not the first of another. */
	ck_assert_uint_eq(look_up(seq_in(1), tokens + 16, 49), 0);
	commit(seq_in(0), tokens + 16, 32);
	ck_assert_uint_eq(look_up(seq_in(0), tokens + 16, 49), 32);
	ck_assert_uint_eq(look_up(seq_in(1), tokens, 65), 64);

	must(kv_pool_new_epoch(client, "pool", NULL, NULL, TIMEOUT));
	ck_assert_uint_eq(look_up(seq_in(1), tokens, 65), 0);
	must(kv_seq_new(pool, &seq));
	kv_seq_free(seq, NULL);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("identity");
	TCase *tcase = tcase_create("identity"), *collisions = tcase_create("collisions");

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, fields_of_a_namespace_cannot_imitate_each_other);
	tcase_add_test(tcase,
		       the_order_in_which_fields_are_said_makes_no_difference_and_a_fork_has_them);
	tcase_add_test(tcase, fields_and_extras_that_come_too_late_or_twice_are_refused);
	tcase_add_test(tcase, image_content_is_part_of_what_is_looked_for);
	tcase_add_test(tcase, a_rollback_forgets_what_stood_at_the_positions_given_up);
	tcase_add_test(tcase, a_weight_update_ends_the_life_of_what_was_cached);
	tcase_add_test(tcase, blocks_of_an_old_epoch_go_before_all_others_once_they_are_let_go);
	tcase_add_test(tcase, an_engine_that_keeps_its_epoch_shows_nothing_as_new_until_it_joins);
	tcase_add_test(tcase, a_new_epoch_of_a_pool_that_is_not_there_is_refused);
	suite_add_tcase(s, tcase);
	tcase_add_checked_fixture(collisions, setup_collisions, teardown);
	tcase_set_timeout(collisions, 60);
	tcase_add_test(collisions, equal_keys_of_different_tokens_cost_a_miss_and_never_give_a_wrong_hit);
	tcase_add_test(collisions, equal_keys_of_chains_and_namespaces_are_told_apart);
	suite_add_tcase(s, collisions);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
