/* SPDX-License-Identifier: Apache-2.0 */
/* alloc/space.c: free blocks by extent, beside a model that looks at every block each time. */
#include <check.h>
#include <stdlib.h>

#include "alloc/space.h"
#include "tests/alloc/random.h"
#include "tests/support/expect.h"

#define EXTENT	 ((uint64_t)65536)
#define N_EXTENT 24
#define MAX_IDS	 2048
#define N_STEPS	 20000

/* Smaller than an extent, not a divisor of it, as large, larger, larger and no multiple. */
static const uint64_t sizes[] = {1024, 4096, 12288, 40960, 65536, 131072, 163840};

static struct kv_space s;
static bool used[MAX_IDS], present[MAX_IDS], owned[N_EXTENT + 1];
static uint64_t size;
static uint32_t n_ids;
static struct random r;

static uint32_t below(uint32_t n)
{
	return random_below(&r, n);
}

static bool touches(uint32_t id, uint32_t i)
{
	return id * size < (i + 1) * EXTENT && (id + 1) * size > i * EXTENT;
}

static bool is_covered(uint32_t id)
{
	bool covered = true;

	for (uint32_t i = 0; i < N_EXTENT; i++)
		covered &= owned[i] || !touches(id, i);
	return covered && (id + 1) * size <= N_EXTENT * EXTENT;
}

static bool is_free(uint32_t id)
{
	return present[id] && !used[id];
}

/* The share of blocks in use of an extent, in 16 parts; -1: nobody touches it */
static int share(uint32_t i)
{
	uint32_t n = 0, n_used = 0;

	for (uint32_t id = 0; id < n_ids; id++) {
		n += present[id] && touches(id, i);
		n_used += used[id] && touches(id, i);
	}
	return n ? (int)(16 * n_used / n) : -1;
}

static void take_extent(void)
{
	uint32_t i = below(N_EXTENT);

	if (owned[i])
		return;
	owned[i] = true;
	kv_space_own(&s, i, true);
	for (uint32_t id = 0; id < n_ids; id++) {
		if (touches(id, i) && !present[id] && is_covered(id)) {
			present[id] = true;
			kv_space_add(&s, (int32_t)id);
		}
	}
}

static void give_extent(void)
{
	int32_t i = kv_space_spare(&s);
	uint32_t n_spare = 0;

	for (uint32_t k = 0; k < N_EXTENT; k++)
		n_spare += owned[k] && share(k) <= 0;
	/* With many blocks in an extent a share of none in 16 may still be one of them. */
	for (uint32_t k = 0; k < N_EXTENT; k++) {
		bool any = false;

		for (uint32_t id = 0; id < n_ids; id++)
			any |= used[id] && touches(id, k);
		n_spare -= owned[k] && share(k) == 0 && any;
	}
	expect(kv_space_n_spare(&s) == n_spare && (i >= 0) == (n_spare > 0), "%u spare, not %u",
	       kv_space_n_spare(&s), n_spare);
	if (i < 0)
		return;
	for (uint32_t id = 0; id < n_ids; id++) {
		if (!touches(id, (uint32_t)i) || !present[id])
			continue;
		expect(!used[id], "extent %d is spare, block %u of it in use", i, id);
		present[id] = false;
		kv_space_remove(&s, (int32_t)id);
	}
	owned[i] = false;
	kv_space_own(&s, (uint32_t)i, false);
}

static void use_block(void)
{
	int32_t id = kv_space_pick(&s);
	int best = -1, mine = -1;

	for (uint32_t i = 0; i < N_EXTENT; i++) {
		bool has_free = false;
		int of_i = share(i);

		for (uint32_t k = 0; k < n_ids; k++)
			has_free |= is_free(k) && touches(k, i);
		if (has_free && of_i > best)
			best = of_i;
		if (id >= 0 && touches((uint32_t)id, i) && of_i > mine)
			mine = of_i;
	}
	expect((id >= 0) == (best >= 0), "picked %d", id);
	if (id < 0)
		return;
	expect(is_free((uint32_t)id), "block %d isn't free", id);
	expect(mine == best, "block %d of an extent filled to %d/16, another to %d/16", id, mine,
	       best);
	kv_space_use(&s, id);
	used[id] = true;
}

static void release_block(void)
{
	uint32_t first = below(n_ids);

	for (uint32_t k = 0; k < n_ids; k++) {
		uint32_t id = (first + k) % n_ids;

		if (!used[id])
			continue;
		kv_space_release(&s, (int32_t)id);
		used[id] = false;
		return;
	}
}

START_TEST(free_blocks_come_from_the_fullest_extents_and_spare_extents_are_known)
{
	void (*const walks[])(void) = {take_extent, give_extent, use_block,	use_block,
				       use_block,   use_block,	 release_block, release_block};

	size = sizes[_i];
	n_ids = (uint32_t)(N_EXTENT * EXTENT / size);
	r.state = (uint64_t)_i + 1;
	ck_assert_int_eq(kv_space_init(&s, n_ids, size, EXTENT), 0);
	for (int step = 0; step < (n_ids > 300 ? N_STEPS / 10 : N_STEPS); step++) {
		uint32_t n_free = 0;

		/* Long spells of more taking than giving, and of the opposite. */
		if (step / 300 % 2)
			walks[below(8)]();
		else
			walks[below(6) + 2 * (step / 300 % 4 == 0)]();
		for (uint32_t id = 0; id < n_ids; id++) {
			n_free += is_free(id);
			expect(kv_space_is_free(&s, (int32_t)id) == is_free(id), "bit of %u", id);
		}
		expect(s.n_free == n_free, "%u free, not %u", s.n_free, n_free);
		expect(!kv_space_check(&s, used), "step %d: the check finds errors", step);
	}
	kv_space_deinit(&s);
}
END_TEST

START_TEST(without_extents_all_blocks_lie_in_one)
{
	ck_assert_int_eq(kv_space_init(&s, 100, 0, 0), 0);
	for (int32_t id = 0; id < 100; id++)
		kv_space_add(&s, id);
	ck_assert_int_eq(kv_space_pick(&s), 0);
	kv_space_use(&s, 0);
	ck_assert_int_eq(kv_space_spare(&s), -1);
	kv_space_release(&s, 0);
	ck_assert_int_eq(kv_space_spare(&s), 0);
	kv_space_deinit(&s);
}
END_TEST

START_TEST(a_wrong_count_or_bit_is_found)
{
	bool none[100] = {false};

	ck_assert_int_eq(kv_space_init(&s, 100, 1024, EXTENT), 0);
	kv_space_own(&s, 0, true);
	kv_space_add(&s, 5);
	kv_space_add(&s, 6);
	ck_assert_uint_eq(kv_space_check(&s, none), 0);
	s.extents[0].n_free++;
	ck_assert_uint_ne(kv_space_check(&s, none), 0);
	s.extents[0].n_free--;
	s.free[0] ^= 1 << 5;
	ck_assert_uint_ne(kv_space_check(&s, none), 0);
	s.free[0] ^= 1 << 5;
	none[6] = true;
	ck_assert_uint_ne(kv_space_check(&s, none), 0);
	kv_space_deinit(&s);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("alloc/space");
	TCase *tcase = tcase_create("space");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(tcase,
			    free_blocks_come_from_the_fullest_extents_and_spare_extents_are_known,
			    0, sizeof(sizes) / sizeof(sizes[0]));
	tcase_add_test(tcase, without_extents_all_blocks_lie_in_one);
	tcase_add_test(tcase, a_wrong_count_or_bit_is_found);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
