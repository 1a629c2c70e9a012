/* SPDX-License-Identifier: Apache-2.0 */
/* alloc/stem.c, and what the books put there: who is found by how it begins, and who no more. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "tests/alloc/chain.h"
#include "tests/support/expect.h"

#define EXTENT 8 /* blocks */

/* ---- the table by itself ---- */

static struct kv_stems stems;

static void make(uint32_t id_limit)
{
	stems.id_limit = id_limit;
	stems.n_buckets = kv_stem_buckets(id_limit, 16);
	stems.words = calloc((size_t)stems.n_buckets * KV_BUCKET_WORDS, sizeof(uint64_t));
	ck_assert_ptr_nonnull(stems.words);
}

static void teardown_table(void)
{
	free(stems.words);
	memset(&stems, 0, sizeof(stems));
}

static uint32_t put(struct kv_key key, int32_t id)
{
	uint32_t place = kv_stem_place(&stems, key, id);

	kv_stem_put(&stems, place, key, id);
	return place;
}

static uint32_t count(struct kv_key key, int32_t id)
{
	uint32_t cursor = 0, n = 0;
	int32_t found;

	while ((found = kv_stem_find(&stems, key, &cursor)) >= 0)
		n += id < 0 || found == id;
	return n;
}

START_TEST(there_are_two_places_for_each_block_and_none_for_blocks_of_one_token)
{
	for (uint32_t id_limit = 1; id_limit < 5000; id_limit++) {
		uint32_t n = kv_stem_buckets(id_limit, 2);

		ck_assert_uint_eq(n & (n - 1), 0);
		ck_assert(n * KV_BUCKET_WORDS >= 2 * id_limit);
		ck_assert(n == 1 || n / 2 * KV_BUCKET_WORDS < 2 * id_limit);
		ck_assert_uint_eq(kv_stem_buckets(id_limit, 1), 0);
	}
	/* Places are counted in 32 bits. */
	ck_assert_uint_eq(kv_stem_buckets(INT32_MAX, 16), 1u << 28);
}
END_TEST

START_TEST(a_stem_is_an_eighth_of_a_block_at_least_one_token_and_at_most_eight)
{
	static const uint32_t expected[][2] = {{2, 1}, {4, 1}, {8, 1}, {16, 2}, {24, 3}, {64, 8}, {528, 8}};

	for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++)
		ck_assert_uint_eq(kv_stem_tokens(expected[i][0]), expected[i][1]);
}
END_TEST

START_TEST(of_more_than_eight_that_begin_alike_the_latest_eight_or_fewer_are_found)
{
	struct kv_key key = {77, 0x1234567800000abc};
	uint32_t places[40];

	make(100);
	for (int32_t id = 0; id < 40; id++) {
		places[id] = put(key, id);
		ck_assert_uint_eq(count(key, id), 1);
		ck_assert_uint_eq(count(key, -1), id < 8 ? (uint32_t)id + 1 : 8);
	}
	/* Who lost its place to another takes nothing out. */
	for (int32_t id = 0; id < 32; id++)
		kv_stem_remove(&stems, places[id], id);
	ck_assert_uint_eq(count(key, -1), 8);
	for (int32_t id = 32; id < 40; id++) {
		kv_stem_rename(&stems, places[id], id, id + 50);
		ck_assert_uint_eq(count(key, id), 0);
		ck_assert_uint_eq(count(key, id + 50), 1);
		kv_stem_remove(&stems, places[id], id);
		ck_assert_uint_eq(count(key, id + 50), 1);
		kv_stem_remove(&stems, places[id], id + 50);
	}
	ck_assert_uint_eq(count(key, -1), 0);
	/* A place that is none. */
	kv_stem_remove(&stems, 0, 1);
	kv_stem_remove(&stems, UINT32_MAX, 1);
}
END_TEST

/* ---- the books ---- */

/* Is block @id found by the beginning of @tokens, after that parent? */
static bool finds(uint64_t follows, const int32_t *tokens, int32_t id)
{
	struct kv_key key = kv_stem_key(&p.head, follows, NULL, tokens);
	uint32_t cursor = 0;
	int32_t found;

	while ((found = kv_stem_find(&b->stems, key, &cursor)) >= 0) {
		if (found == id)
			return true;
	}
	return false;
}

static uint64_t serial(const struct chain *c, uint32_t i)
{
	return i ? b->books[c->ids[i - 1]].serial : 0;
}

START_TEST(what_is_cached_is_found_by_its_beginning_until_it_is_evicted)
{
	struct chain c = computed(A, 1, 4);
	uint64_t serials[4];

	for (uint32_t i = 0; i < 4; i++) {
		serials[i] = serial(&c, i);
		expect(finds(serials[i], tokens_of(1, i), c.ids[i]), "block %u isn't found", i);
		expect(!finds(serials[i] + 1, tokens_of(1, i), c.ids[i]), "block %u follows another", i);
		expect(!finds(serials[i], tokens_of(2, i), c.ids[i]), "block %u begins otherwise", i);
	}
	release(&c, A);
	for (uint32_t left = 4; left; left--) {
		ck_assert_uint_eq(kv_books_evict(b, 1, true), 1);
		for (uint32_t i = 0; i < 4; i++)
			expect(finds(serials[i], tokens_of(1, i), c.ids[i]) == (i < left - 1),
			       "block %u of %u that are left", i, left - 1);
		pages_check(&p, NULL, "evicted");
	}
}
END_TEST

START_TEST(tokens_that_a_client_changes_behind_its_publishing_leave_no_entry_behind)
{
	struct chain c = computed(A, 1, 2);

	for (uint32_t i = 0; i < 2; i++)
		memset(kv_shm_tokens(p.shared, &p.head, c.ids[i]), 0xee, BLOCK_TOKENS * sizeof(int32_t));
	release(&c, A);
	ck_assert_uint_eq(kv_books_evict(b, 2, true), 2);
	for (uint64_t i = 0; i < (uint64_t)b->stems.n_buckets * KV_BUCKET_WORDS; i++)
		ck_assert_uint_eq(b->stems.words[i], 0);
}
END_TEST

START_TEST(blocks_that_are_moved_are_found_where_they_are)
{
	int32_t ids[2 * EXTENT - 1], where[2 * EXTENT];
	struct kv_books_move moves[EXTENT];
	uint32_t n_empty, n;

	/* Five blocks in the extent of the null block, two in the other. */
	pages_deinit(&p);
	pages_init_extents(&p, 2 * EXTENT - 1, BLOCK_TOKENS, EXTENT);
	kv_books_grant(b, A, 2 * EXTENT - 1, ids);
	for (uint32_t i = 0; i < 2 * EXTENT - 1; i++) {
		struct kv_key key = pages_key(&p, (struct kv_key){0, 0}, tokens_of(ids[i], 0));
		uint32_t at = (uint32_t)ids[i] % EXTENT;

		where[ids[i]] = at >= (ids[i] < EXTENT ? EXTENT - 5 : EXTENT - 2) ? ids[i] : -1;
		if (where[ids[i]] >= 0)
			ck_assert_int_eq(client_publish(&p, A, ids[i], -1, key, tokens_of(ids[i], 0), tick(1)),
					 KV_PUBLISHED);
		ck_assert_int_eq(kv_books_give(b, A, ids[i]), 0);
		if (pages_is_held(&p, ids[i], A))
			client_unpin(&p, ids[i], A);
	}
	n = kv_books_move_plan(b, 1, moves, EXTENT, &n_empty);
	ck_assert_uint_gt(n, 0);
	ck_assert_uint_eq(kv_books_move_end(b, moves, n, true), n);
	for (uint32_t i = 0; i < n; i++)
		where[moves[i].from] = moves[i].to;
	for (int32_t id = 1; id < 2 * EXTENT; id++) {
		expect(where[id] < 0 || finds(0, tokens_of(id, 0), where[id]), "block %d isn't found at %d", id,
		       where[id]);
		expect(where[id] == id || !finds(0, tokens_of(id, 0), id), "block %d is found at its old place",
		       id);
	}
	pages_check(&p, NULL, "moved");
	ck_assert_uint_eq(kv_books_evict(b, 7, true), 7);
	pages_check(&p, NULL, "evicted");
}
END_TEST

int main(void)
{
	Suite *s = suite_create("alloc/stem");
	TCase *table = tcase_create("table"), *books = tcase_create("books");
	SRunner *runner;
	int failed;

	tcase_add_checked_fixture(table, NULL, teardown_table);
	tcase_add_test(table, there_are_two_places_for_each_block_and_none_for_blocks_of_one_token);
	tcase_add_test(table, a_stem_is_an_eighth_of_a_block_at_least_one_token_and_at_most_eight);
	tcase_add_test(table, of_more_than_eight_that_begin_alike_the_latest_eight_or_fewer_are_found);
	suite_add_tcase(s, table);
	tcase_add_checked_fixture(books, setup, teardown);
	tcase_add_test(books, what_is_cached_is_found_by_its_beginning_until_it_is_evicted);
	tcase_add_test(books, tokens_that_a_client_changes_behind_its_publishing_leave_no_entry_behind);
	tcase_add_test(books, blocks_that_are_moved_are_found_where_they_are);
	suite_add_tcase(s, books);
	runner = srunner_create(s);
	srunner_run_all(runner, CK_ENV);
	failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return failed ? 1 : 0;
}
