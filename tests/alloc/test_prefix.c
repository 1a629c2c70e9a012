/* SPDX-License-Identifier: Apache-2.0 */
/* alloc/prefix.c and hash.c: what a key finds, and what it must not. */
#include <check.h>
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/prefix.h"
#include "tests/alloc/random.h"
#include "tests/support/expect.h"

static struct kv_prefix prefix;

static void make(uint32_t id_limit)
{
	prefix.id_limit = id_limit;
	prefix.n_buckets = kv_prefix_buckets(id_limit);
	prefix.words = calloc((size_t)prefix.n_buckets * KV_BUCKET_WORDS, sizeof(uint64_t));
	ck_assert_ptr_nonnull(prefix.words);
}

static void teardown(void)
{
	free(prefix.words);
	memset(&prefix, 0, sizeof(prefix));
}

static bool finds(struct kv_key key, int32_t id)
{
	uint32_t cursor = 0;
	int32_t found;

	while ((found = kv_prefix_find(&prefix, key, &cursor)) >= 0) {
		if (found == id)
			return true;
	}
	return false;
}

static uint32_t count(struct kv_key key)
{
	uint32_t cursor = 0, n = 0;

	while (kv_prefix_find(&prefix, key, &cursor) >= 0)
		n++;
	return n;
}

START_TEST(the_table_has_two_places_for_each_block)
{
	for (uint32_t id_limit = 1; id_limit < 5000; id_limit++) {
		uint32_t n = kv_prefix_buckets(id_limit);

		ck_assert_uint_eq(n & (n - 1), 0);
		ck_assert(n * KV_BUCKET_WORDS >= 2 * id_limit);
		ck_assert(n == 2 || n / 2 * KV_BUCKET_WORDS < 2 * id_limit);
	}
	/* The largest pool there can be. */
	ck_assert_uint_eq(kv_prefix_buckets(INT32_MAX), 1u << 29);
}
END_TEST

START_TEST(a_block_is_found_from_its_insertion_to_its_removal)
{
	struct kv_key key = {0x123456789abcdef0ull, 0xfedcba9876543210ull}, other = key;

	make(100);
	ck_assert(!finds(key, 0));
	ck_assert_int_eq(kv_prefix_insert(&prefix, key, 0), 0);
	ck_assert_int_eq(kv_prefix_insert(&prefix, key, 99), 0);
	ck_assert(finds(key, 0));
	ck_assert(finds(key, 99));
	other.hi ^= 1;
	ck_assert_uint_eq(count(other), 0);
	ck_assert_int_eq(kv_prefix_remove(&prefix, other, 0), -ENOENT);
	ck_assert_int_eq(kv_prefix_remove(&prefix, key, 1), -ENOENT);
	ck_assert_int_eq(kv_prefix_remove(&prefix, key, 0), 0);
	ck_assert_int_eq(kv_prefix_remove(&prefix, key, 0), -ENOENT);
	ck_assert(!finds(key, 0));
	ck_assert(finds(key, 99));
}
END_TEST

START_TEST(a_pool_full_of_blocks_with_keys_of_their_own_finds_a_place_for_each)
{
	const int32_t n = 50000;
	struct kv_key key = {0, 0};

	make((uint32_t)n);
	for (int32_t id = 0; id < n; id++) {
		key = kv_key_next(7, key, &id, 1);
		expect(kv_prefix_insert(&prefix, key, id) == 0, "block %d", id);
	}
	key = (struct kv_key){0, 0};
	for (int32_t id = 0; id < n; id++) {
		key = kv_key_next(7, key, &id, 1);
		expect(finds(key, id), "block %d", id);
		expect(kv_prefix_remove(&prefix, key, id) == 0, "block %d", id);
	}
	for (uint64_t i = 0; i < (uint64_t)prefix.n_buckets * KV_BUCKET_WORDS; i++)
		expect(!prefix.words[i], "word %llu", (unsigned long long)i);
}
END_TEST

START_TEST(two_full_buckets_are_said_to_be_full_and_stay_as_they_are)
{
	struct kv_key key = {(uint64_t)5 << 32 | 3, 11}, neighbour = {(uint64_t)9 << 32 | 8, 11};

	make(1000);
	ck_assert_int_eq(kv_prefix_insert(&prefix, neighbour, 500), 0);
	for (int32_t id = 0; id < 2 * KV_BUCKET_WORDS; id++)
		ck_assert_int_eq(kv_prefix_insert(&prefix, key, id), 0);
	ck_assert_int_eq(kv_prefix_insert(&prefix, key, 100), -ENOSPC);
	ck_assert_uint_eq(count(key), 2 * KV_BUCKET_WORDS);
	ck_assert(!finds(key, 100));
	ck_assert(finds(neighbour, 500));
	ck_assert_int_eq(kv_prefix_remove(&prefix, key, 4), 0);
	ck_assert_int_eq(kv_prefix_insert(&prefix, key, 100), 0);
	ck_assert(finds(key, 100));
}
END_TEST

START_TEST(a_key_whose_two_buckets_are_one_finds_all_its_blocks)
{
	struct kv_key key = {(uint64_t)6 << 32 | 6, 1};

	make(1000);
	for (int32_t id = 0; id < KV_BUCKET_WORDS; id++)
		ck_assert_int_eq(kv_prefix_insert(&prefix, key, id), 0);
	ck_assert_int_eq(kv_prefix_insert(&prefix, key, 100), -ENOSPC);
	for (int32_t id = 0; id < KV_BUCKET_WORDS; id++) {
		ck_assert(finds(key, id));
		ck_assert_int_eq(kv_prefix_remove(&prefix, key, id), 0);
	}
	ck_assert_uint_eq(count(key), 0);
}
END_TEST

START_TEST(a_place_that_names_no_block_of_the_pool_is_passed_over)
{
	struct kv_key key = {0, 0xabcd};

	make(10);
	for (uint32_t i = 0; i < prefix.n_buckets * KV_BUCKET_WORDS; i++)
		prefix.words[i] = key.hi << 32 | (i % 2 ? 11 : 0xffffffff);
	ck_assert_uint_eq(count(key), 0);
	prefix.words[3] = key.hi << 32 | 10;
	ck_assert(finds(key, 9));
}
END_TEST

START_TEST(a_random_walk_agrees_with_a_plain_list)
{
	enum { N_KEYS = 40, N_IDS = 60 };
	static bool in[N_KEYS][N_IDS];
	struct kv_key keys[N_KEYS];
	struct random r = {(uint64_t)_i};

	make(N_IDS);
	memset(in, 0, sizeof(in));
	/* Few tags: keys share buckets, and some share their tag too but not their bucket. */
	for (int k = 0; k < N_KEYS; k++)
		keys[k] = (struct kv_key){random_next(&r), random_below(&r, 8)};
	for (int step = 0; step < 30000; step++) {
		uint32_t k = random_below(&r, N_KEYS), id = random_below(&r, N_IDS);
		int result;

		if (in[k][id]) {
			expect(kv_prefix_remove(&prefix, keys[k], (int32_t)id) == 0, "step %d",
			       step);
			in[k][id] = false;
		} else {
			/* One key has an id at a time, as a block has. */
			for (int other = 0; other < N_KEYS; other++) {
				if (in[other][id])
					kv_prefix_remove(&prefix, keys[other], (int32_t)id);
				in[other][id] = false;
			}
			result = kv_prefix_insert(&prefix, keys[k], (int32_t)id);
			in[k][id] = !result;
			expect(!result || result == -ENOSPC, "step %d", step);
		}
		for (int other = 0; other < N_KEYS; other++) {
			if (in[other][id])
				expect(finds(keys[other], (int32_t)id), "step %d", step);
		}
		if (step % 100)
			continue;
		for (int i = 0; i < N_KEYS; i++) {
			for (int32_t b = 0; b < N_IDS; b++)
				expect(!in[i][b] || finds(keys[i], b), "step %d", step);
		}
	}
}
END_TEST

/* ---- keys ---- */

START_TEST(a_key_follows_from_seed_parent_and_every_token)
{
	int32_t tokens[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
	struct kv_key none = {0, 0}, parent = {77, 78}, keys[40];
	int n = 0;

	keys[n++] = kv_key_next(1, none, tokens, 16);
	keys[n++] = kv_key_next(2, none, tokens, 16);
	keys[n++] = kv_key_next(1, parent, tokens, 16);
	parent.lo++;
	keys[n++] = kv_key_next(1, parent, tokens, 16);
	parent.hi++;
	keys[n++] = kv_key_next(1, parent, tokens, 16);
	keys[n++] = kv_key_next(1, none, tokens, 15);
	for (int i = 0; i < 16; i++) {
		tokens[i] ^= 1 << 20;
		keys[n++] = kv_key_next(1, none, tokens, 16);
		tokens[i] ^= 1 << 20;
	}
	for (int i = 0; i < n; i++) {
		for (int k = 0; k < i; k++)
			ck_assert(keys[i].lo != keys[k].lo && keys[i].hi != keys[k].hi);
	}
	keys[n] = kv_key_next(1, none, tokens, 16);
	ck_assert(keys[n].lo == keys[0].lo && keys[n].hi == keys[0].hi);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("alloc/prefix");
	TCase *tcase = tcase_create("prefix");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, NULL, teardown);
	tcase_add_test(tcase, the_table_has_two_places_for_each_block);
	tcase_add_test(tcase, a_block_is_found_from_its_insertion_to_its_removal);
	tcase_add_test(tcase, a_pool_full_of_blocks_with_keys_of_their_own_finds_a_place_for_each);
	tcase_add_test(tcase, two_full_buckets_are_said_to_be_full_and_stay_as_they_are);
	tcase_add_test(tcase, a_key_whose_two_buckets_are_one_finds_all_its_blocks);
	tcase_add_test(tcase, a_place_that_names_no_block_of_the_pool_is_passed_over);
	tcase_add_loop_test(tcase, a_random_walk_agrees_with_a_plain_list, 0, 4);
	tcase_add_test(tcase, a_key_follows_from_seed_parent_and_every_token);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
