/* SPDX-License-Identifier: Apache-2.0 */
/* alloc/pool.c: blocks come, are leased, given, published; what changes and what is left alone. */
#include <check.h>
#include <errno.h>
#include <string.h>

#include "tests/alloc/chain.h"

/* ---- adding and removing ---- */

START_TEST(blocks_begin_free_and_the_null_block_is_none_of_them)
{
	ck_assert_uint_eq(b->n_total, N_BLOCKS);
	expect_counts(N_BLOCKS, 0, 0, 0);
	ck_assert_uint_eq(pages_state(&p, 0), KV_BLOCK_NULL);
	ck_assert(!kv_books_is_free(b, 0));
	ck_assert(!kv_books_is_absent(b, 0));
	for (int32_t id = 1; id <= N_BLOCKS; id++)
		ck_assert(kv_books_is_free(b, id));
}
END_TEST

START_TEST(the_null_block_is_never_handed_out_nor_taken_back)
{
	int32_t ids[N_BLOCKS];

	kv_books_grant(b, A, N_BLOCKS, ids);
	for (int i = 0; i < N_BLOCKS; i++)
		ck_assert_int_ne(ids[i], 0);
	ck_assert_int_eq(kv_books_give(b, A, 0), -EINVAL);
	ck_assert_int_eq(client_publish(&p, A, 0, -1, (struct kv_key){1, 1}, tokens_of(1, 0), 1),
			 -EINVAL);
	ck_assert(!client_pin(&p, 0, A));
	kv_books_remove(b, 0, 1);
	ck_assert_uint_eq(pages_state(&p, 0), KV_BLOCK_NULL);
}
END_TEST

START_TEST(a_removed_range_is_absent_and_comes_back_with_another_generation)
{
	uint32_t generation = b->books[5].generation;
	int32_t ids[N_BLOCKS];

	kv_books_remove(b, 4, 4);
	ck_assert_uint_eq(b->n_total, N_BLOCKS - 4);
	expect_counts(N_BLOCKS - 4, 0, 0, 0);
	for (int32_t id = 1; id <= N_BLOCKS; id++)
		ck_assert_int_eq(kv_books_is_absent(b, id), id >= 4 && id < 8);
	kv_books_grant(b, A, N_BLOCKS - 4, ids);
	for (int i = 0; i < N_BLOCKS - 4; i++)
		ck_assert(ids[i] < 4 || ids[i] >= 8);
	pages_check(&p, NULL, "removed");
	ck_assert_int_eq(kv_books_give(b, A, 5), -EINVAL);

	ck_assert_int_eq(kv_books_add(b, 5), 0);
	ck_assert_uint_eq(b->n_total, N_BLOCKS - 3);
	ck_assert_uint_gt(b->books[5].generation, generation);
	kv_books_grant(b, A, 1, ids);
	ck_assert_int_eq(ids[0], 5);
}
END_TEST

/* ---- leases ---- */

START_TEST(granted_blocks_are_distinct_and_leased_to_their_session)
{
	int32_t ids[N_BLOCKS];
	bool seen[N_BLOCKS + 1] = {0};

	kv_books_grant(b, A, 10, ids);
	kv_books_grant(b, C, 6, ids + 10);
	expect_counts(0, 16, 0, 0);
	for (int i = 0; i < N_BLOCKS; i++) {
		uint64_t word = b->descriptors[ids[i]].word;

		ck_assert(!seen[ids[i]]);
		seen[ids[i]] = true;
		ck_assert_uint_eq(kv_block_state(word), KV_BLOCK_LEASED);
		ck_assert_uint_eq(kv_block_owner(word), i < 10 ? A : C);
	}
	ck_assert_uint_eq(b->n_granted, 16);
}
END_TEST

/* D14. */
START_TEST(a_block_given_twice_is_free_once)
{
	int32_t ids[N_BLOCKS];

	kv_books_grant(b, A, 2, ids);
	ck_assert_int_eq(kv_books_give(b, A, ids[0]), 0);
	ck_assert_int_eq(kv_books_give(b, A, ids[0]), -EINVAL);
	expect_counts(15, 1, 0, 0);
	pages_check(&p, NULL, "after the second give");

	/* 15 distinct ids, each once. */
	{
		bool seen[N_BLOCKS + 1] = {0};
		int32_t all[N_BLOCKS];

		kv_books_grant(b, B, 15, all);
		for (int i = 0; i < 15; i++) {
			ck_assert(!seen[all[i]] && all[i] != ids[1]);
			seen[all[i]] = true;
		}
	}
}
END_TEST

START_TEST(a_block_of_another_session_cannot_be_given)
{
	int32_t id;

	kv_books_grant(b, A, 1, &id);
	ck_assert_int_eq(kv_books_give(b, B, id), -EINVAL);
	ck_assert_int_eq(kv_books_give(b, A + 64, id), -EINVAL);
	expect_counts(15, 1, 0, 0);
	ck_assert_int_eq(kv_books_give(b, A, id), 0);
}
END_TEST

START_TEST(ids_that_no_block_has_are_refused)
{
	const int32_t ids[] = {-1, INT32_MIN, N_BLOCKS + 1, INT32_MAX};

	for (int i = 0; i < 4; i++) {
		struct kv_op op = {.kind = KV_OP_PUBLISH, .id = ids[i], .parent = -1};

		ck_assert_int_eq(kv_books_give(b, A, ids[i]), -EINVAL);
		ck_assert_int_eq(kv_books_publish(b, A, &op), -EINVAL);
	}
	expect_counts(16, 0, 0, 0);
}
END_TEST

START_TEST(a_given_block_changes_its_generation)
{
	int32_t first, second;
	uint32_t generation;

	kv_books_grant(b, A, 1, &first);
	generation = kv_block_generation(b->descriptors[first].word);
	kv_books_give(b, A, first);
	kv_books_grant(b, A, 1, &second);
	ck_assert_int_eq(first, second); /* the hottest one first */
	ck_assert_uint_gt(kv_block_generation(b->descriptors[first].word), generation);
}
END_TEST

/* ---- publishing ---- */

START_TEST(only_published_blocks_are_found)
{
	struct chain c = {.n = 4};

	kv_books_grant(b, A, 4, c.ids);
	ck_assert_uint_eq(hit(B, 1, 4), 0);
	for (uint32_t i = 0; i < 2; i++) {
		c.keys[i] = pages_key(&p, parent_key(&c, i), tokens_of(1, i));
		client_publish(&p, A, c.ids[i], i ? c.ids[i - 1] : -1, c.keys[i], tokens_of(1, i),
			       tick(1));
	}
	ck_assert_uint_eq(hit(B, 1, 4), 2);
	expect_counts(12, 2, 2, 0);

	/* The session dies: what was shown stays, the rest is free, and is not found by its new
	 * owner. */
	kv_books_forget(b, A);
	expect_counts(14, 0, 2, 0);
	ck_assert_uint_eq(hit(B, 1, 4), 2);
	kv_books_grant(b, B, 14, c.ids);
	ck_assert_uint_eq(hit(C, 1, 4), 2);
}
END_TEST

START_TEST(its_publisher_holds_a_published_block_from_the_first_moment)
{
	struct chain c = computed(A, 1, 3);

	for (uint32_t i = 0; i < 3; i++)
		ck_assert(pages_is_held(&p, c.ids[i], A));
	ck_assert_uint_eq(kv_books_evict(b, 1, false), 0);
	ck_assert_int_eq(kv_books_give(b, A, c.ids[2]), 0); /* a give lets go of a cached block */
	ck_assert_int_eq(kv_books_give(b, A, c.ids[2]), -EINVAL);
	ck_assert_uint_eq(kv_books_evict(b, 3, false), 1);
	expect_counts(14, 0, 2, 0);
}
END_TEST

START_TEST(content_that_is_cached_already_becomes_a_twin)
{
	struct chain c = computed(A, 1, 2);
	int32_t mine[2];

	kv_books_grant(b, B, 2, mine);
	ck_assert_int_eq(client_publish(&p, B, mine[0], -1, c.keys[0], tokens_of(1, 0), tick(1)),
			 KV_PUBLISH_TWIN);
	ck_assert_uint_eq(pages_state(&p, mine[0]), KV_BLOCK_TWIN);
	ck_assert_int_eq((int32_t)b->descriptors[mine[0]].key_lo, c.ids[0]);
	ck_assert_uint_eq(b->descriptors[mine[0]].serial, b->descriptors[c.ids[0]].serial);
	/* The chain goes on from the twin, although the client names its own block. */
	ck_assert_int_eq(
		client_publish(&p, B, mine[1], mine[0], c.keys[1], tokens_of(1, 1), tick(1)),
		KV_PUBLISH_TWIN);
	expect_counts(12, 2, 2, 0);
	ck_assert_uint_eq(b->n_duplicates, 2);
	ck_assert_uint_eq(b->n_published, 2);
	ck_assert_int_eq(kv_books_give(b, B, mine[0]), 0);
	ck_assert_int_eq(kv_books_give(b, B, mine[1]), 0);
	expect_counts(14, 0, 2, 0);
	ck_assert_uint_eq(hit(C, 1, 2), 2);
}
END_TEST

START_TEST(a_new_block_after_a_twin_is_a_child_of_the_cached_one)
{
	struct chain c = computed(A, 1, 1);
	struct kv_key next;
	int32_t mine[2];

	kv_books_grant(b, B, 2, mine);
	client_publish(&p, B, mine[0], -1, c.keys[0], tokens_of(1, 0), tick(1));
	next = pages_key(&p, c.keys[0], tokens_of(1, 1));
	ck_assert_int_eq(client_publish(&p, B, mine[1], mine[0], next, tokens_of(1, 1), tick(1)),
			 KV_PUBLISHED);
	ck_assert_int_eq(b->books[mine[1]].parent, c.ids[0]);
	ck_assert_uint_eq(hit(C, 1, 2), 2);
	ck_assert_int_eq(kv_books_give(b, B, mine[0]), 0);
	ck_assert_uint_eq(hit(C, 1, 2), 2);
}
END_TEST

START_TEST(a_twin_whose_original_was_evicted_carries_no_chain_on)
{
	struct chain c = computed(A, 1, 1);
	int32_t mine[2];

	kv_books_grant(b, B, 2, mine);
	client_publish(&p, B, mine[0], -1, c.keys[0], tokens_of(1, 0), tick(1));
	release(&c, A);
	ck_assert_uint_eq(kv_books_evict(b, 1, true), 1);
	/* Other content moves into the place of the original: it has another serial. */
	computed(A, 2, 14);
	ck_assert_int_eq(client_publish(&p, B, mine[1], mine[0],
					pages_key(&p, c.keys[0], tokens_of(1, 1)), tokens_of(1, 1),
					tick(1)),
			 KV_PUBLISH_REFUSED);
	ck_assert_uint_eq(pages_state(&p, mine[1]), KV_BLOCK_LEASED);
	ck_assert_uint_eq(hit(C, 1, 2), 0);
}
END_TEST

START_TEST(a_block_is_not_published_after_a_parent_that_is_gone)
{
	struct chain c = computed(A, 1, 1);
	struct kv_op op = {.kind = KV_OP_PUBLISH, .parent = c.ids[0], .stamp = 1};
	int32_t other;

	op.parent_serial = b->descriptors[c.ids[0]].serial;
	kv_books_grant(b, A, 1, &op.id);
	release(&c, A);
	kv_books_evict(b, 1, true);
	ck_assert_int_eq(kv_books_publish(b, A, &op), KV_PUBLISH_REFUSED);

	/* Its place is cached again, with other content. */
	kv_books_grant(b, B, 1, &other);
	ck_assert_int_eq(other, c.ids[0]);
	client_publish(&p, B, other, -1, (struct kv_key){9, 9}, tokens_of(9, 0), tick(1));
	ck_assert_int_eq(kv_books_publish(b, A, &op), KV_PUBLISH_REFUSED);

	/* A parent that is leased, and was never shown. */
	kv_books_grant(b, A, 1, &op.parent);
	op.parent_serial = 0;
	ck_assert_int_eq(kv_books_publish(b, A, &op), KV_PUBLISH_REFUSED);
	op.parent = N_BLOCKS + 1;
	ck_assert_int_eq(kv_books_publish(b, A, &op), KV_PUBLISH_REFUSED);
	op.parent = -2;
	ck_assert_int_eq(kv_books_publish(b, A, &op), KV_PUBLISH_REFUSED);
	ck_assert_int_eq(kv_books_give(b, A, op.id), 0);
}
END_TEST

START_TEST(what_is_not_leased_by_a_session_is_not_published_by_it)
{
	struct chain c = computed(A, 1, 1);
	int32_t id;

	kv_books_grant(b, A, 1, &id);
	ck_assert_int_eq(client_publish(&p, B, id, -1, (struct kv_key){1, 1}, tokens_of(5, 0), 1),
			 -EINVAL);
	/* Its own parent; a block that is cached; one that is free. */
	ck_assert_int_eq(client_publish(&p, A, id, id, (struct kv_key){1, 1}, tokens_of(5, 0), 1),
			 -EINVAL);
	ck_assert_int_eq(client_publish(&p, A, c.ids[0], -1, c.keys[0], tokens_of(1, 0), 1),
			 -EINVAL);
	kv_books_give(b, A, id);
	ck_assert_int_eq(client_publish(&p, A, id, -1, (struct kv_key){1, 1}, tokens_of(5, 0), 1),
			 -EINVAL);
	expect_counts(15, 0, 1, 0);
}
END_TEST

/* ---- collisions ---- */

/* D19. */
START_TEST(equal_keys_with_other_tokens_never_hit_each_other)
{
	struct kv_key key = {1, 1};
	int32_t one, two, found;

	p.key_mask = 0; /* every key is {0, 0} */
	key = pages_key(&p, key, tokens_of(1, 0));
	kv_books_grant(b, A, 1, &one);
	kv_books_grant(b, A, 1, &two);
	ck_assert_int_eq(client_publish(&p, A, one, -1, key, tokens_of(1, 0), 1), KV_PUBLISHED);
	ck_assert_int_eq(client_find(&p, B, key, 0, tokens_of(2, 0)), -1);
	ck_assert(!pages_is_held(&p, one, B));

	ck_assert_int_eq(client_publish(&p, A, two, -1, key, tokens_of(2, 0), 2), KV_PUBLISHED);
	found = client_find(&p, B, key, 0, tokens_of(2, 0));
	ck_assert_int_eq(found, two);
	found = client_find(&p, B, key, 0, tokens_of(1, 0));
	ck_assert_int_eq(found, one);
	ck_assert_int_eq(client_find(&p, B, key, 0, tokens_of(3, 0)), -1);
}
END_TEST

START_TEST(equal_keys_and_tokens_after_other_parents_never_hit_each_other)
{
	struct chain one, two;
	int32_t child[2];
	struct kv_key key;

	p.key_mask = 0;
	one = computed(A, 1, 1);
	two = computed(A, 2, 1);
	key = one.keys[0];
	kv_books_grant(b, A, 2, child);
	ck_assert_int_eq(client_publish(&p, A, child[0], one.ids[0], key, tokens_of(7, 0), 1),
			 KV_PUBLISHED);
	/* Same tokens, other parent: another content, and no twin. */
	ck_assert_int_eq(client_find(&p, B, key, b->books[two.ids[0]].serial, tokens_of(7, 0)), -1);
	ck_assert_int_eq(client_find(&p, B, key, 0, tokens_of(7, 0)), -1);
	ck_assert_int_eq(client_publish(&p, A, child[1], two.ids[0], key, tokens_of(7, 0), 1),
			 KV_PUBLISHED);
	ck_assert_int_eq(client_find(&p, B, key, b->books[one.ids[0]].serial, tokens_of(7, 0)),
			 child[0]);
	ck_assert_int_eq(client_find(&p, B, key, b->books[two.ids[0]].serial, tokens_of(7, 0)),
			 child[1]);
}
END_TEST

START_TEST(more_equal_keys_than_the_index_has_places_for_stay_private)
{
	int32_t ids[N_BLOCKS];
	int n = 0;

	p.key_mask = 0; /* one bucket of eight places for all */
	kv_books_grant(b, A, N_BLOCKS, ids);
	for (int i = 0; i < N_BLOCKS; i++) {
		int r = client_publish(&p, A, ids[i], -1, (struct kv_key){0, 0}, tokens_of(i, 0),
				       1);

		ck_assert_int_eq(r, i < KV_BUCKET_WORDS ? KV_PUBLISHED : KV_PUBLISH_REFUSED);
		n += r == KV_PUBLISHED;
	}
	expect_counts(0, N_BLOCKS - KV_BUCKET_WORDS, KV_BUCKET_WORDS, 0);
	pages_check(&p, NULL, "index full");
	for (int i = n; i < N_BLOCKS; i++)
		ck_assert_int_eq(kv_books_give(b, A, ids[i]), 0);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("alloc/pool");
	TCase *tcase = tcase_create("pool");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, blocks_begin_free_and_the_null_block_is_none_of_them);
	tcase_add_test(tcase, the_null_block_is_never_handed_out_nor_taken_back);
	tcase_add_test(tcase, a_removed_range_is_absent_and_comes_back_with_another_generation);
	tcase_add_test(tcase, granted_blocks_are_distinct_and_leased_to_their_session);
	tcase_add_test(tcase, a_block_given_twice_is_free_once);
	tcase_add_test(tcase, a_block_of_another_session_cannot_be_given);
	tcase_add_test(tcase, ids_that_no_block_has_are_refused);
	tcase_add_test(tcase, a_given_block_changes_its_generation);
	tcase_add_test(tcase, only_published_blocks_are_found);
	tcase_add_test(tcase, its_publisher_holds_a_published_block_from_the_first_moment);
	tcase_add_test(tcase, content_that_is_cached_already_becomes_a_twin);
	tcase_add_test(tcase, a_new_block_after_a_twin_is_a_child_of_the_cached_one);
	tcase_add_test(tcase, a_twin_whose_original_was_evicted_carries_no_chain_on);
	tcase_add_test(tcase, a_block_is_not_published_after_a_parent_that_is_gone);
	tcase_add_test(tcase, what_is_not_leased_by_a_session_is_not_published_by_it);
	tcase_add_test(tcase, equal_keys_with_other_tokens_never_hit_each_other);
	tcase_add_test(tcase, equal_keys_and_tokens_after_other_parents_never_hit_each_other);
	tcase_add_test(tcase, more_equal_keys_than_the_index_has_places_for_stay_private);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
