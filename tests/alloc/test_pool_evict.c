/* SPDX-License-Identifier: Apache-2.0 */
/* alloc/pool.c, pool_check.c: what is evicted, what stays; a session's end; the check itself. */
#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/alloc/chain.h"
#include "tests/alloc/random.h"
#include "tests/support/expect.h"

/* ---- eviction ---- */

/* D24. */
START_TEST(an_evicted_block_is_forgotten_everywhere)
{
	struct chain first, second, third;

	resize(4);
	first = computed(A, 1, 4);
	use(&first);
	release(&first, A);
	ck_assert_uint_eq(kv_books_evict(b, 4, true), 4);
	second = computed(A, 2, 4);
	use(&second);
	release(&second, A);
	ck_assert_uint_eq(hit(B, 1, 4), 0);
	ck_assert_uint_eq(hit(B, 2, 4), 4);

	/* One more: the end of the second chain goes, and its place takes other content. */
	ck_assert_uint_eq(kv_books_evict(b, 1, true), 1);
	third = computed(A, 3, 1);
	ck_assert_int_eq(third.ids[0], second.ids[3]);
	ck_assert_uint_eq(hit(B, 1, 4), 0);
	ck_assert_uint_eq(hit(B, 2, 4), 3);
	ck_assert_uint_eq(hit(B, 3, 4), 1);
}
END_TEST

static void shuffle(struct random *r, int32_t *ids, uint32_t n)
{
	for (uint32_t i = n - 1; i; i--) {
		uint32_t k = random_below(r, i + 1);
		int32_t id = ids[i];

		ids[i] = ids[k];
		ids[k] = id;
	}
}

/* D25. */
START_TEST(the_end_of_a_chain_goes_first_in_whatever_order_it_was_released)
{
	struct random r = {5};

	for (int round = 0; round < 200; round++) {
		struct chain c;
		int32_t order[3], id;

		resize(3);
		c = computed(A, 1, 3);
		/* As the library stamps a chain, and as a client leaves it that was killed. */
		if (round % 2)
			use(&c);
		memcpy(order, c.ids, sizeof(order));
		shuffle(&r, order, 3);
		for (int i = 0; i < 3; i++)
			client_unpin(&p, order[i], A);
		expect(kv_books_evict(b, 1, true) == 1, "round %d", round);
		kv_books_grant(b, B, 1, &id);
		expect(id == c.ids[2], "round %d: block %d of the chain went", round, id);
		expect(hit(C, 1, 3) == 2, "round %d", round);
		pages_check(&p, NULL, "one evicted");
	}
}
END_TEST

START_TEST(the_least_recently_used_prefix_goes_first)
{
	struct chain c[4];

	for (int32_t i = 0; i < 4; i++) {
		c[i] = computed(A, i, 2);
		use(&c[i]);
		release(&c[i], A);
	}
	use(&c[0]); /* as a lookup does: now 1 is the oldest, then 2, 3, 0 */
	for (int i = 0; i < 4; i++) {
		const int32_t order[] = {1, 2, 3, 0};

		ck_assert_uint_eq(kv_books_evict(b, 2, true), 2);
		for (int32_t k = 0; k < 4; k++) {
			bool gone = false;

			for (int j = 0; j <= i; j++)
				gone |= order[j] == k;
			ck_assert_uint_eq(hit(B, k, 2), gone ? 0 : 2);
		}
	}
}
END_TEST

START_TEST(a_held_block_and_what_leads_to_it_stay)
{
	struct chain c = computed(A, 1, 5), other = computed(A, 2, 2);

	release(&c, A);
	release(&other, A);
	ck_assert(client_pin(&p, c.ids[2], C));
	/* 7 cached; ids 0, 1, 2 of the chain must stay. */
	ck_assert_uint_eq(kv_books_evict(b, 5, true), 0);
	expect_counts(9, 0, 7, 0);
	pages_check(&p, NULL, "nothing evicted");
	ck_assert_uint_eq(hit(B, 1, 5), 5);
	ck_assert_uint_eq(hit(B, 2, 2), 2);
	ck_assert_uint_eq(kv_books_evict(b, 5, false), 4);
	ck_assert_uint_eq(hit(B, 1, 5), 3);
	ck_assert_uint_eq(hit(B, 2, 2), 0);
	client_unpin(&p, c.ids[2], C);
	ck_assert_uint_eq(kv_books_evict(b, 3, true), 3);
	expect_counts(16, 0, 0, 0);
}
END_TEST

START_TEST(all_that_nobody_holds_can_be_evicted_at_once)
{
	/* However its stamps lie: a chain published block by block by a client that was killed. */
	struct random r = {(uint64_t)_i};
	uint32_t n = 300 + random_below(&r, 300);
	int32_t *ids = malloc(n * sizeof(*ids));

	resize(n);
	kv_books_grant(b, A, n, ids);
	for (uint32_t i = 0; i < n; i++) {
		struct kv_key key = {i * 2654435761u, i};

		expect(client_publish(&p, A, ids[i], i ? ids[i - 1] : -1, key,
				      tokens_of((int32_t)i, 0), tick(1)) == KV_PUBLISHED,
		       "block %u", i);
		if (_i > 1)
			b->descriptors[ids[i]].stamp = random_below(&r, n);
	}
	kv_books_forget(b, A);
	expect_counts(0, 0, n, 0);
	ck_assert_uint_eq(kv_books_evict(b, n, true), n);
	expect_counts(n, 0, 0, 0);
	free(ids);
}
END_TEST

START_TEST(evicting_more_than_is_cached_is_all_or_nothing)
{
	struct chain c = computed(A, 1, 3);

	release(&c, A);
	ck_assert_uint_eq(kv_books_evict(b, 4, true), 0);
	expect_counts(13, 0, 3, 0);
	ck_assert_uint_eq(kv_books_evict(b, 0, true), 0);
	ck_assert_uint_eq(kv_books_evict(b, UINT32_MAX, false), 3);
	expect_counts(16, 0, 0, 0);
	ck_assert_uint_eq(b->n_evicted, 3);
	ck_assert_uint_eq(kv_books_evict(b, 1, false), 0);
}
END_TEST

START_TEST(a_failed_eviction_leaves_the_order_as_it_was)
{
	struct chain c[3];

	for (int32_t i = 0; i < 3; i++) {
		c[i] = computed(A, i, 2);
		use(&c[i]);
		release(&c[i], A);
	}
	client_pin(&p, c[2].ids[1], C);
	for (int i = 0; i < 50; i++)
		ck_assert_uint_eq(kv_books_evict(b, 5, true), 0);
	for (int32_t i = 0; i < 3; i++)
		ck_assert_uint_eq(hit(B, i, 2), 2);
	ck_assert_uint_eq(kv_books_evict(b, 2, true), 2);
	ck_assert_uint_eq(hit(B, 0, 2), 0);
	ck_assert_uint_eq(hit(B, 1, 2), 2);
}
END_TEST

START_TEST(a_pin_on_a_block_that_is_not_cached_is_a_miss)
{
	struct chain c = computed(A, 1, 1);
	int32_t id;

	release(&c, A);
	kv_books_evict(b, 1, true);
	ck_assert(!client_pin(&p, c.ids[0], C));
	ck_assert(!pages_is_held(&p, c.ids[0], C));
	kv_books_grant(b, A, 1, &id);
	ck_assert(!client_pin(&p, id, C));
	/* A bit set for a moment on a leased block keeps nothing from happening to it. */
	kv_or_seq(&b->descriptors[id].holders[C / 64], (uint64_t)1 << C % 64);
	ck_assert_int_eq(kv_books_give(b, A, id), 0);
	kv_books_grant(b, B, 1, &id);
	client_unpin(&p, id, C);
}
END_TEST

/* ---- a session's end ---- */

START_TEST(the_leases_of_a_session_that_may_still_write_are_set_aside)
{
	struct chain c = computed(A, 1, 2);
	int32_t ids[5], other;

	kv_books_grant(b, A, 5, ids);
	kv_books_grant(b, B, 1, &other);
	client_publish(&p, A, ids[4], -1, c.keys[0], tokens_of(1, 0), 1); /* a twin */
	kv_books_quarantine(b, A);
	expect_counts(8, 1, 2, 5);
	for (int i = 0; i < 5; i++) {
		ck_assert_uint_eq(pages_state(&p, ids[i]), KV_BLOCK_QUARANTINED);
		ck_assert_int_eq(kv_books_give(b, A, ids[i]), -EINVAL);
	}
	/* What it had cached is complete and stays findable, and its bit still protects it. */
	ck_assert_uint_eq(hit(C, 1, 2), 2);
	ck_assert_uint_eq(kv_books_evict(b, 2, false), 0);
	pages_check(&p, NULL, "quarantined");

	kv_books_quarantine(b, A);
	expect_counts(8, 1, 2, 5);
	kv_books_forget(b, A);
	expect_counts(13, 1, 2, 0);
	ck_assert_uint_eq(kv_books_evict(b, 2, false), 2);
}
END_TEST

START_TEST(a_forgotten_session_leaves_no_bit_and_no_lease)
{
	bool live[KV_MAX_SESSIONS] = {[B] = true};
	struct chain c = computed(A, 1, 3);
	int32_t ids[4];

	kv_books_grant(b, A, 4, ids);
	for (uint32_t i = 0; i < 3; i++)
		ck_assert(client_pin(&p, c.ids[i], B));
	/* In the middle of a pin, on a block that is not cached. */
	kv_or_seq(&b->descriptors[ids[0]].holders[A / 64], (uint64_t)1 << A % 64);
	kv_or_seq(&b->descriptors[12].holders[A / 64], (uint64_t)1 << A % 64);
	kv_books_forget(b, A);
	expect_counts(13, 0, 3, 0);
	pages_check(&p, live, "A is gone");
	for (uint32_t i = 0; i < 3; i++) {
		ck_assert(!pages_is_held(&p, c.ids[i], A));
		ck_assert(pages_is_held(&p, c.ids[i], B));
	}
	ck_assert_uint_eq(kv_books_evict(b, 3, false), 0);
}
END_TEST

START_TEST(leases_and_holds_are_counted_for_each_session)
{
	uint32_t leased[KV_MAX_SESSIONS] = {0}, held[KV_MAX_SESSIONS] = {0};
	struct chain c = computed(A, 1, 3);
	int32_t ids[4];

	kv_books_grant(b, C, 4, ids);
	client_publish(&p, C, ids[0], -1, c.keys[0], tokens_of(1, 0), 1); /* a twin is a lease */
	client_pin(&p, c.ids[0], B);
	client_pin(&p, c.ids[0], C);
	client_unpin(&p, c.ids[2], A);
	ck_assert_uint_eq(kv_books_count(b, leased, held), 2);
	ck_assert_uint_eq(leased[C], 4);
	ck_assert_uint_eq(leased[A], 0);
	ck_assert_uint_eq(held[A], 2);
	ck_assert_uint_eq(held[B], 1);
	ck_assert_uint_eq(held[C], 1);
	ck_assert_uint_eq(kv_books_count(b, NULL, NULL), 2);
}
END_TEST

/* ---- the check itself ---- */

static void corrupt(int what)
{
	struct chain c = computed(A, 1, 3);
	struct kv_books *w = &p.books;

	switch (what) {
	case 0: /* each of the counters */
		w->n_free--;
		break;
	case 1:
		w->n_cached++;
		break;
	case 2:
		w->n_leased++;
		break;
	case 3:
		w->n_quarantined++;
		break;
	case 4:
		w->n_total++;
		break;
	case 5: /* a free block of which the bits know nothing */
		w->space.free[0] &= w->space.free[0] - 1;
		break;
	case 6: /* a client writes a descriptor's word */
		w->descriptors[7].word ^= 1;
		break;
	case 7: /* a cached block is not in the index */
		kv_prefix_remove(&w->prefix, c.keys[1], c.ids[1]);
		break;
	case 8: /* a block is in the index and not cached */
		kv_prefix_insert(&w->prefix, c.keys[0], kv_space_pick(&w->space));
		break;
	case 9: /* a parent that isn't cached any more */
		w->books[c.ids[1]].serial++;
		break;
	case 10:
		w->books[c.ids[1]].n_children++;
		break;
	case 11: /* a block that can never be evicted, one that would be twice */
		w->lru.items[1] = w->lru.items[0];
		break;
	case 12:
		w->lru.n--;
		break;
	}
}

START_TEST(whatever_is_wrong_in_the_books_is_found)
{
	char text[200] = "";

	corrupt(_i);
	ck_assert_uint_gt(kv_books_check(b, NULL, text, sizeof(text)), 0);
	ck_assert_int_gt(strlen(text), 10);
	resize(N_BLOCKS);
}
END_TEST

START_TEST(bits_and_leases_of_sessions_that_are_not_there_are_found)
{
	bool live[KV_MAX_SESSIONS] = {[A] = true};
	struct chain c = computed(A, 1, 1);
	char text[200] = "";
	int32_t id;

	pages_check(&p, live, "A alone");
	client_pin(&p, c.ids[0], B);
	ck_assert_uint_eq(kv_books_check(b, live, text, sizeof(text)), 1);
	ck_assert_ptr_nonnull(strstr(text, "slot 40"));
	client_unpin(&p, c.ids[0], B);
	kv_books_grant(b, C, 1, &id);
	ck_assert_uint_eq(kv_books_check(b, live, text, sizeof(text)), 1);
	ck_assert_ptr_nonnull(strstr(text, "slot 100"));
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("alloc/pool_evict");
	TCase *tcase = tcase_create("pool_evict");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, an_evicted_block_is_forgotten_everywhere);
	tcase_add_test(tcase, the_end_of_a_chain_goes_first_in_whatever_order_it_was_released);
	tcase_add_test(tcase, the_least_recently_used_prefix_goes_first);
	tcase_add_test(tcase, a_held_block_and_what_leads_to_it_stay);
	tcase_add_loop_test(tcase, all_that_nobody_holds_can_be_evicted_at_once, 0, 6);
	tcase_add_test(tcase, evicting_more_than_is_cached_is_all_or_nothing);
	tcase_add_test(tcase, a_failed_eviction_leaves_the_order_as_it_was);
	tcase_add_test(tcase, a_pin_on_a_block_that_is_not_cached_is_a_miss);
	tcase_add_test(tcase, the_leases_of_a_session_that_may_still_write_are_set_aside);
	tcase_add_test(tcase, a_forgotten_session_leaves_no_bit_and_no_lease);
	tcase_add_test(tcase, leases_and_holds_are_counted_for_each_session);
	tcase_add_loop_test(tcase, whatever_is_wrong_in_the_books_is_found, 0, 13);
	tcase_add_test(tcase, bits_and_leases_of_sessions_that_are_not_there_are_found);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
