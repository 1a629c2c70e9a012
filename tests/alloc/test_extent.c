/* SPDX-License-Identifier: Apache-2.0 */
/* alloc/extent.c: every state an extent can be in, on one GPU and on several. */
#include <check.h>
#include <stdlib.h>

#include "alloc/extent.h"
#include "tests/alloc/random.h"
#include "tests/support/expect.h"

#define EXTENT ((uint64_t)2 << 20)

static struct kv_extents e;

/* @sizes: extents of each arena; what is left over of an arena is too small for one more. */
static void make(uint32_t n_gpus, const uint32_t *sizes, bool clean)
{
	uint64_t bytes[KV_MAX_GPUS];

	for (uint32_t i = 0; i < n_gpus; i++)
		bytes[i] = sizes[i] * EXTENT + EXTENT - 1;
	ck_assert_int_eq(kv_extents_init(&e, n_gpus, bytes, EXTENT, clean), 0);
	ck_assert_uint_eq(kv_extents_check(&e), 0);
}

static void make_one(uint32_t n)
{
	make(1, &n, true);
}

static void teardown(void)
{
	kv_extents_deinit(&e);
}

START_TEST(memory_that_is_not_known_to_be_zero_is_dirty_until_it_was_scrubbed)
{
	uint32_t n = 5, first;

	make(1, &n, false);
	ck_assert_uint_eq(kv_extents_available(&e, 1, false), 0);
	ck_assert_uint_eq(kv_extents_available(&e, 1, true), 5);
	ck_assert_uint_eq(kv_extents_find(&e, 1, 1, 5, &first), 0);

	ck_assert_uint_eq(kv_extents_scrub(&e, 0, 3, &first), 3);
	ck_assert_uint_eq(first, 0);
	ck_assert_uint_eq(kv_extents_available(&e, 1, false), 0);
	kv_extents_cleaned(&e, 0, 0, 3);
	ck_assert_uint_eq(kv_extents_available(&e, 1, false), 3);
	ck_assert_uint_eq(kv_extents_scrub(&e, 0, 3, &first), 2);
	ck_assert_uint_eq(first, 3);
	ck_assert_uint_eq(kv_extents_scrub(&e, 0, 3, &first), 0);
	ck_assert_uint_eq(kv_extents_check(&e), 0);
}
END_TEST

START_TEST(the_first_of_the_longest_runs_is_found)
{
	uint32_t first = 77;

	/* . . x . . . x . . . . x . . . .	runs of 2, 3, 4, 4 */
	make_one(16);
	kv_extents_take(&e, 1, 2, 1, 9);
	kv_extents_take(&e, 1, 6, 1, 9);
	kv_extents_take(&e, 1, 11, 1, 9);
	ck_assert_uint_eq(kv_extents_find(&e, 1, 1, 16, &first), 4);
	ck_assert_uint_eq(first, 7);
	/* The first run that has as many as are wanted will do. */
	ck_assert_uint_eq(kv_extents_find(&e, 1, 1, 3, &first), 3);
	ck_assert_uint_eq(first, 3);
	ck_assert_uint_eq(kv_extents_find(&e, 1, 1, 1, &first), 1);
	ck_assert_uint_eq(first, 0);
	ck_assert_uint_eq(kv_extents_find(&e, 1, 5, 16, &first), 0);
}
END_TEST

START_TEST(what_was_taken_belongs_to_its_pool_alone)
{
	uint32_t first;

	make_one(8);
	ck_assert_uint_eq(kv_extents_find(&e, 1, 3, 3, &first), 3);
	kv_extents_take(&e, 1, first, 3, 42);
	for (uint32_t i = 0; i < 8; i++) {
		ck_assert_int_eq(kv_extents_owned(&e, 0, i, 42), i < 3);
		ck_assert_int_eq(kv_extents_owned(&e, 0, i, 0), 0);
	}
	ck_assert_int_eq(kv_extents_owned(&e, 0, 8, 42), 0);
	ck_assert_int_eq(kv_extents_owned(&e, 0, UINT32_MAX, 42), 0);
	ck_assert_uint_eq(kv_extents_find(&e, 1, 3, 3, &first), 3);
	ck_assert_uint_eq(first, 3);
}
END_TEST

START_TEST(what_was_given_back_is_taken_again_only_after_it_was_zeroed)
{
	uint32_t first;

	make_one(4);
	kv_extents_take(&e, 1, 0, 4, 1);
	kv_extents_give(&e, 1, 1, 2);
	ck_assert_int_eq(kv_extents_owned(&e, 0, 1, 1), 0);
	ck_assert_uint_eq(kv_extents_find(&e, 1, 1, 4, &first), 0);
	ck_assert_uint_eq(kv_extents_available(&e, 1, true), 2);

	ck_assert_uint_eq(kv_extents_scrub(&e, 0, 1, &first), 1);
	ck_assert_uint_eq(first, 1);
	ck_assert_uint_eq(kv_extents_find(&e, 1, 1, 4, &first), 0);

	/* Its mover died: half zeroed is not zeroed. */
	kv_extents_scrub_failed(&e, 0, 1, 1);
	ck_assert_uint_eq(kv_extents_find(&e, 1, 1, 4, &first), 0);
	ck_assert_uint_eq(kv_extents_scrub(&e, 0, 4, &first), 2);
	ck_assert_uint_eq(first, 1);
	kv_extents_cleaned(&e, 0, 1, 2);
	ck_assert_uint_eq(kv_extents_find(&e, 1, 1, 4, &first), 2);
	ck_assert_uint_eq(first, 1);
	ck_assert_uint_eq(kv_extents_check(&e), 0);
}
END_TEST

START_TEST(a_pool_on_several_gpus_gets_the_same_places_on_all_of_them)
{
	const uint32_t sizes[] = {8, 5, 8};
	uint32_t first;

	make(3, sizes, true);
	kv_extents_take(&e, 1u << 0, 0, 2, 1); /* x x . . . . . . */
	kv_extents_take(&e, 1u << 1, 3, 1, 2); /* . . . x .	   */

	ck_assert_uint_eq(kv_extents_find(&e, 3, 1, 8, &first), 1);
	ck_assert_uint_eq(first, 2);
	ck_assert_uint_eq(kv_extents_find(&e, 7, 1, 8, &first), 1);
	ck_assert_uint_eq(kv_extents_available(&e, 7, false), 2);
	/* The smallest arena of those asked for is the limit, not that of the others. */
	ck_assert_uint_eq(kv_extents_find(&e, 5, 1, 8, &first), 6);
	ck_assert_uint_eq(first, 2);
	ck_assert_uint_eq(kv_extents_find(&e, 1u << 2, 1, 8, &first), 8);

	kv_extents_take(&e, 7, 4, 1, 3);
	for (uint32_t g = 0; g < 3; g++)
		ck_assert_int_eq(kv_extents_owned(&e, g, 4, 3), 1);
	kv_extents_give(&e, 7, 4, 1);
	for (uint32_t g = 0; g < 3; g++)
		ck_assert_uint_eq(e.n_state[g][KV_EXTENT_DIRTY], 1);

	/* Zeroed on two of three: not yet. */
	for (uint32_t g = 0; g < 3; g++) {
		ck_assert_uint_eq(kv_extents_available(&e, 7, false), 1);
		ck_assert_uint_eq(kv_extents_scrub(&e, g, 9, &first), 1);
		kv_extents_cleaned(&e, g, first, 1);
	}
	ck_assert_uint_eq(kv_extents_available(&e, 7, false), 2);
	ck_assert_uint_eq(kv_extents_check(&e), 0);
}
END_TEST

START_TEST(an_arena_smaller_than_an_extent_has_none)
{
	uint32_t n = 0, first;

	make(1, &n, true);
	ck_assert_uint_eq(kv_extents_find(&e, 1, 1, 1, &first), 0);
	ck_assert_uint_eq(kv_extents_available(&e, 1, true), 0);
	ck_assert_uint_eq(kv_extents_scrub(&e, 0, 1, &first), 0);
}
END_TEST

START_TEST(a_wrong_count_is_found)
{
	make_one(4);
	kv_extents_take(&e, 1, 0, 1, 1);
	e.n_state[0][KV_EXTENT_OWNED]++;
	ck_assert_uint_eq(kv_extents_check(&e), 1);
	e.n_state[0][KV_EXTENT_OWNED]--;
	e.map[0][2].state = KV_EXTENT_DIRTY;
	ck_assert_uint_eq(kv_extents_check(&e), 2);
}
END_TEST

/* ---- a walk beside plain arrays ---- */

#define N_GPUS	 2
#define N	 24
#define N_OWNERS 3
#define N_STEPS	 50000

struct place {
	char state; /* c, o, d, s */
	uint32_t owner;
};

static struct place plain[N_GPUS][N];

static bool is_clean(uint32_t mask, uint32_t i)
{
	for (uint32_t g = 0; g < N_GPUS; g++) {
		if (mask >> g & 1 && plain[g][i].state != 'c')
			return false;
	}
	return true;
}

/* The longest run of at most @n_max, by trying every start. */
static uint32_t longest(uint32_t mask, uint32_t n_max, uint32_t *ret_first)
{
	uint32_t best = 0;

	for (uint32_t i = 0; i < N; i++) {
		uint32_t n = 0;

		while (n < n_max && i + n < N && is_clean(mask, i + n))
			n++;
		if (n > best) {
			best = n;
			*ret_first = i;
		}
	}
	return best;
}

static void set(uint32_t mask, uint32_t first, uint32_t n, char state, uint32_t owner)
{
	for (uint32_t g = 0; g < N_GPUS; g++) {
		for (uint32_t i = first; mask >> g & 1 && i < first + n; i++)
			plain[g][i] = (struct place){state, owner};
	}
}

static void walk_take(struct random *r, uint32_t mask)
{
	uint32_t n_max = 1 + random_below(r, 6), n_min = 1 + random_below(r, n_max);
	uint32_t first = 0, want_first = 0, want = longest(mask, n_max, &want_first);
	uint32_t n = kv_extents_find(&e, mask, n_min, n_max, &first);

	expect(n == (want >= n_min ? want : 0), "find gives %u", n);
	if (!n)
		return;
	expect(first == want_first, "run at %u, %u expected", first, want_first);
	/* Owners stand for pools, and a pool has one mask. */
	kv_extents_take(&e, mask, first, n, mask);
	set(mask, first, n, 'o', mask);
}

static void walk_give(struct random *r, uint32_t mask)
{
	uint32_t g = (uint32_t)__builtin_ctz(mask), i = random_below(r, N);

	expect(kv_extents_owned(&e, g, i, mask) ==
		       (plain[g][i].state == 'o' && plain[g][i].owner == mask),
	       "owner of %u on %u", i, g);
	if (!kv_extents_owned(&e, g, i, mask))
		return;
	kv_extents_give(&e, mask, i, 1);
	set(mask, i, 1, 'd', 0);
}

static void walk_scrub(struct random *r, uint32_t g)
{
	uint32_t n_max = 1 + random_below(r, 4), want_first = 0, want = 0, first = 0, n;

	while (want_first < N && plain[g][want_first].state != 'd')
		want_first++;
	while (want < n_max && want_first + want < N && plain[g][want_first + want].state == 'd')
		want++;
	n = kv_extents_scrub(&e, g, n_max, &first);
	expect(n == want, "scrub gives %u, %u expected", n, want);
	if (!n)
		return;
	expect(first == want_first, "run at %u, %u expected", first, want_first);
	set(1u << g, first, n, 's', 0);
}

static void walk_end_scrub(struct random *r, uint32_t g)
{
	for (uint32_t i = 0; i < N; i++) {
		if (plain[g][i].state != 's')
			continue;
		if (random_below(r, 4)) {
			kv_extents_cleaned(&e, g, i, 1);
			plain[g][i].state = 'c';
		} else {
			kv_extents_scrub_failed(&e, g, i, 1);
			plain[g][i].state = 'd';
		}
	}
}

static void compare(void)
{
	for (uint32_t mask = 1; mask < 1u << N_GPUS; mask++) {
		uint32_t clean = 0, usable = 0;

		for (uint32_t i = 0; i < N; i++) {
			bool owned = false;

			for (uint32_t g = 0; g < N_GPUS; g++)
				owned |= mask >> g & 1 && plain[g][i].state == 'o';
			clean += is_clean(mask, i);
			usable += !owned;
		}
		expect(kv_extents_available(&e, mask, false) == clean, "clean on %#x", mask);
		expect(kv_extents_available(&e, mask, true) == usable, "usable on %#x", mask);
	}
	expect(!kv_extents_check(&e), "wrong counts");
}

START_TEST(a_random_walk_agrees_with_plain_arrays)
{
	const uint32_t sizes[] = {N, N};
	struct random r = {(uint64_t)_i};

	make(2, sizes, true);
	set(3, 0, N, 'c', 0);
	for (int step = 0; step < N_STEPS; step++) {
		uint32_t mask = 1 + random_below(&r, N_OWNERS);

		switch (random_below(&r, 8)) {
		case 0:
			walk_take(&r, mask);
			break;
		case 1:
			walk_scrub(&r, random_below(&r, N_GPUS));
			break;
		case 2:
			walk_end_scrub(&r, random_below(&r, N_GPUS));
			break;
		default:
			walk_give(&r, mask);
		}
		compare();
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("alloc/extent");
	TCase *tcase = tcase_create("extent");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, NULL, teardown);
	tcase_add_test(tcase, memory_that_is_not_known_to_be_zero_is_dirty_until_it_was_scrubbed);
	tcase_add_test(tcase, the_first_of_the_longest_runs_is_found);
	tcase_add_test(tcase, what_was_taken_belongs_to_its_pool_alone);
	tcase_add_test(tcase, what_was_given_back_is_taken_again_only_after_it_was_zeroed);
	tcase_add_test(tcase, a_pool_on_several_gpus_gets_the_same_places_on_all_of_them);
	tcase_add_test(tcase, an_arena_smaller_than_an_extent_has_none);
	tcase_add_test(tcase, a_wrong_count_is_found);
	tcase_add_loop_test(tcase, a_random_walk_agrees_with_plain_arrays, 0, 4);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
