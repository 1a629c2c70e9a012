/* SPDX-License-Identifier: Apache-2.0 */
/* alloc/worth.c, ghost.c, evict.c: what is learned of blocks, and what it brings. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "tests/alloc/pages.h"
#include "tests/alloc/random.h"
#include "tests/support/expect.h"

/* ---- worth ---- */

START_TEST(of_blocks_nothing_is_known_of_the_older_is_worth_less)
{
	static struct kv_worth w;

	memset(&w, 0, sizeof(w));
	for (uint64_t age = 0; age < 1u << 20; age = age * 2 + 1)
		ck_assert_uint_gt(kv_worth_score(&w, 3, age), kv_worth_score(&w, 7, age * 2 + 1));
}
END_TEST

/*
 * A class of which 1,000 blocks stand at each age up to @oldest, in steps of 10 uses of the pool, and
 * @n_uses of which are used in each step at ages from @first to @last.
 */
static void live(struct kv_worth *w, uint8_t class, uint64_t oldest, uint64_t first, uint64_t last,
		 uint32_t n_uses)
{
	for (uint64_t age = 0; age < oldest; age += 10) {
		kv_worth_lived(w, class, age, 1000, 10);
		for (uint32_t i = 0; age >= first && age < last && i < n_uses; i++)
			kv_worth_used(w, class, age);
	}
}

/* Class 1 comes back at ages of 4,000 to 6,000; class 2 never does. */
START_TEST(what_comes_back_outlives_what_does_not_however_fresh_that_is)
{
	static struct kv_worth w;

	memset(&w, 0, sizeof(w));
	live(&w, 1, 50000, 4000, 6000, 10);
	live(&w, 2, 50000, 0, 0, 0);
	kv_worth_learn(&w, 1);
	ck_assert_uint_gt(kv_worth_score(&w, 1, 3000), kv_worth_score(&w, 2, 300));
	/* It is worth more the nearer its time is, and little once that has passed. */
	ck_assert_uint_gt(kv_worth_score(&w, 1, 3500), kv_worth_score(&w, 1, 300));
	ck_assert_uint_gt(kv_worth_score(&w, 1, 300), kv_worth_score(&w, 1, 20000));
}
END_TEST

START_TEST(what_is_learned_follows_a_load_that_changes)
{
	static struct kv_worth w;

	memset(&w, 0, sizeof(w));
	live(&w, 1, 9000, 900, 1200, 50);
	live(&w, 2, 9000, 0, 0, 0);
	kv_worth_learn(&w, 0.9);
	ck_assert_uint_gt(kv_worth_score(&w, 1, 500), kv_worth_score(&w, 2, 500));
	for (int i = 0; i < 50; i++) {
		live(&w, 2, 9000, 900, 1200, 50);
		live(&w, 1, 9000, 0, 0, 0);
		kv_worth_learn(&w, 0.9);
	}
	ck_assert_uint_gt(kv_worth_score(&w, 2, 500), kv_worth_score(&w, 1, 500));
}
END_TEST

/* Within what is one age in the sums, too. */
START_TEST(where_all_classes_are_used_alike_the_older_is_worth_less)
{
	static struct kv_worth w;

	memset(&w, 0, sizeof(w));
	for (uint64_t age = 0; age < 100000; age += 10) {
		for (uint8_t c = 0; c < 4; c++) {
			kv_worth_lived(&w, c, age, 1000.0 * (double)(age + 100), 1);
			for (int i = 0; i < 100; i++)
				kv_worth_used(&w, c, age);
		}
	}
	kv_worth_learn(&w, 1);
	for (uint64_t age = 300; age < 40000; age += age / 50 + 1)
		ck_assert_uint_gt(kv_worth_score(&w, 1, age), kv_worth_score(&w, 2, age + age / 50 + 1));
}
END_TEST

/* ---- ghosts ---- */

START_TEST(the_last_evicted_are_remembered_and_not_those_before)
{
	struct kv_ghosts g = {0};
	struct kv_ghost ghost = {0}, got;
	uint32_t n_back = 0;

	for (uint64_t i = 0; i < 5000; i++) {
		ghost.key = (struct kv_key){i, (i + 1) * 0x9e3779b97f4a7c15ull};
		ghost.last = i;
		kv_ghosts_add(&g, &ghost, 1000);
	}
	ck_assert_uint_eq(g.head - g.tail, 1000);
	for (uint64_t i = g.tail; i < g.head; i++)
		ck_assert_uint_eq(kv_ghosts_at(&g, i)->last, 4000 + i - g.tail);
	ghost.key = (struct kv_key){10, 11 * 0x9e3779b97f4a7c15ull};
	ck_assert(!kv_ghosts_take(&g, ghost.key, &got));
	ghost.key = (struct kv_key){4990, 4991 * 0x9e3779b97f4a7c15ull};
	ck_assert(kv_ghosts_take(&g, ghost.key, &got));
	ck_assert_uint_eq(got.last, 4990);
	/* It has come back: it is no ghost any more. */
	ck_assert(!kv_ghosts_take(&g, ghost.key, &got));
	for (uint64_t i = g.tail; i < g.head; i++)
		n_back += !kv_ghosts_at(&g, i);
	ck_assert_uint_eq(n_back, 1);
	kv_ghosts_deinit(&g);
}
END_TEST

START_TEST(keys_that_share_a_place_of_the_table_are_told_apart)
{
	struct kv_ghosts g = {0};
	struct kv_ghost ghost = {.key = {1, 77}}, got;

	kv_ghosts_add(&g, &ghost, 8);
	ck_assert(!kv_ghosts_take(&g, (struct kv_key){2, 77}, &got));
	ck_assert(kv_ghosts_take(&g, (struct kv_key){1, 77}, &got));
	kv_ghosts_deinit(&g);
}
END_TEST

/* ---- a load ---- */

#define CAPACITY 400
#define ROUNDS	 6000

/* One prompt: found as far as it is cached, the rest computed, all let go. Return: blocks found. */
static uint32_t ask(struct pages *p, int32_t prompt, uint32_t n)
{
	struct kv_key key = {0, 0};
	uint64_t serial = 0, *clock = &((struct kv_shm_blocks *)p->shared)->clock;
	int32_t ids[64];
	uint32_t found = 0;

	for (uint32_t i = 0; i < n; i++) {
		int32_t tokens[4] = {prompt, (int32_t)i, 0, 0}, id = -1;
		struct kv_key next = pages_key(p, key, tokens);

		if (found == i)
			id = client_find(p, 0, next, serial, tokens);
		if (id >= 0) {
			found++;
		} else {
			if (!p->books.n_free)
				ck_assert_uint_eq(kv_books_evict(&p->books, 1, true), 1);
			kv_books_grant(&p->books, 0, 1, &id);
			ck_assert_int_eq(client_publish(p, 0, id, i ? ids[i - 1] : -1, next, tokens,
							*clock + n - i),
					 KV_PUBLISHED);
		}
		ids[i] = id;
		key = next;
		serial = p->books.books[id].serial;
	}
	if (found)
		kv_books_touch(&p->books, ids[found - 1], found);
	*clock += n;
	for (uint32_t i = 0; i < n; i++) {
		kv_store_relaxed(&p->books.descriptors[ids[i]].stamp, *clock - i);
		client_unpin(p, ids[i], 0);
	}
	return found;
}

/*
 * A few prompts that come again and again, seldom enough that what is asked once in between would
 * push them out: 40 of 5 blocks, one of them every other time, 20 blocks asked once the other time.
 */
static uint64_t blocks_found(const struct kv_policy *policy)
{
	struct pages p;
	struct random r = {3};
	uint64_t found = 0;

	pages_init(&p, CAPACITY, 4);
	p.books.policy = policy;
	for (int32_t i = 0; i < ROUNDS; i++) {
		if (i % 2)
			found += ask(&p, (int32_t)random_below(&r, 40), 5);
		else
			ask(&p, 1000 + i, 20);
		if (i % 500 == 0)
			pages_check(&p, NULL, policy->name);
	}
	pages_check(&p, NULL, policy->name);
	pages_deinit(&p);
	return found;
}

START_TEST(prompts_that_come_again_outlive_a_flood_of_those_that_do_not)
{
	uint64_t worth = blocks_found(kv_policies[0]), lru = blocks_found(kv_policies[1]);
	uint64_t all = (uint64_t)ROUNDS / 2 * 5;

	ck_assert_str_eq(kv_policies[0]->name, "worth");
	ck_assert_str_eq(kv_policies[1]->name, "lru");
	expect(worth > all * 8 / 10, "worth found %llu of %llu", (unsigned long long)worth,
	       (unsigned long long)all);
	expect(worth > lru * 3 / 2, "worth found %llu, lru %llu of %llu", (unsigned long long)worth,
	       (unsigned long long)lru, (unsigned long long)all);
}
END_TEST

/* ---- loads of other kinds, at several sizes of the cache ---- */

struct load {
	struct random r;
	int32_t next, recent[512]; /* prompts */
	uint32_t lengths[512];
};

/* Ever the same prompts, one after the other. */
static int32_t in_turn(struct load *load, uint32_t *n)
{
	*n = 10;
	return load->next++ % 120;
}

/* Conversations that grow by two blocks at a time, end at some time, and never come back. */
static int32_t conversations(struct load *load, uint32_t *n)
{
	uint32_t k = random_below(&load->r, 40);

	if (!load->lengths[k] || load->lengths[k] > 40 || !random_below(&load->r, 8)) {
		load->recent[k] = load->next++;
		load->lengths[k] = 1 + random_below(&load->r, 6);
	}
	load->lengths[k] += 2;
	*n = load->lengths[k];
	return load->recent[k];
}

/* What was asked last is asked next, most of the time: nothing beats LRU. */
static int32_t the_latest(struct load *load, uint32_t *n)
{
	uint32_t k = 0;
	int32_t prompt;

	if (!random_below(&load->r, 3)) {
		k = 511;
		load->recent[k] = load->next++;
	} else {
		while (k < 511 && random_below(&load->r, 30))
			k++;
	}
	prompt = load->recent[k];
	memmove(load->recent + 1, load->recent, k * sizeof(prompt));
	load->recent[0] = prompt;
	*n = 3 + (uint32_t)prompt % 9;
	return prompt;
}

/* A few prompts often, many seldom, and a tail of its own for each: that comes behind as another. */
static int32_t skewed(struct load *load, uint32_t *n)
{
	uint32_t most = 1u << random_below(&load->r, 9);

	*n = 8;
	return random_below(&load->r, 3) ? (int32_t)random_below(&load->r, most) : 100000 + load->next++;
}

/* The same, and every 1,000 requests all is new. */
static int32_t in_phases(struct load *load, uint32_t *n)
{
	return skewed(load, n) + load->next / 1000 * 1000;
}

static const struct {
	const char *name;
	int32_t (*ask)(struct load *load, uint32_t *n);
} loads[] = {{"in turn", in_turn},
	     {"conversations", conversations},
	     {"the latest", the_latest},
	     {"skewed", skewed},
	     {"in phases", in_phases}};

static const uint32_t capacities[] = {300, 1000, 2500};

#define N_LOADS	     (int)(sizeof(loads) / sizeof(loads[0]))
#define N_CAPACITIES (int)(sizeof(capacities) / sizeof(capacities[0]))

static uint64_t found_of(int load, uint32_t capacity, const struct kv_policy *policy)
{
	static struct load l;
	struct pages p;
	uint64_t found = 0;

	l = (struct load){.r = {7}, .next = 1};
	pages_init(&p, capacity, 4);
	p.books.policy = policy;
	for (int i = 0; i < ROUNDS; i++) {
		uint32_t n;
		int32_t prompt = loads[load].ask(&l, &n);

		found += ask(&p, prompt, n);
	}
	pages_check(&p, NULL, loads[load].name);
	pages_deinit(&p);
	return found;
}

START_TEST(what_is_learned_is_never_worse_than_lru)
{
	int load = _i / N_CAPACITIES;
	uint32_t capacity = capacities[_i % N_CAPACITIES];
	uint64_t worth = found_of(load, capacity, kv_policies[0]);
	uint64_t lru = found_of(load, capacity, kv_policies[1]);

	expect((double)worth >= 0.98 * (double)lru, "%s, %u blocks: worth found %llu, lru %llu",
	       loads[load].name, capacity, (unsigned long long)worth, (unsigned long long)lru);
}
END_TEST

START_TEST(a_touch_of_what_is_not_cached_changes_nothing)
{
	struct pages p;

	pages_init(&p, 4, 4);
	ck_assert_int_eq(kv_books_touch(&p.books, -1, 1), -22);
	ck_assert_int_eq(kv_books_touch(&p.books, (int32_t)p.head.id_limit, 1), -22);
	ck_assert_int_eq(kv_books_touch(&p.books, 2, UINT32_MAX), 0);
	ck_assert_uint_le(p.books.now, 1);
	pages_check(&p, NULL, "touch");
	pages_deinit(&p);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("alloc/policy");
	TCase *tcase = tcase_create("policy");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, of_blocks_nothing_is_known_of_the_older_is_worth_less);
	tcase_add_test(tcase, what_comes_back_outlives_what_does_not_however_fresh_that_is);
	tcase_add_test(tcase, what_is_learned_follows_a_load_that_changes);
	tcase_add_test(tcase, where_all_classes_are_used_alike_the_older_is_worth_less);
	tcase_add_test(tcase, the_last_evicted_are_remembered_and_not_those_before);
	tcase_add_test(tcase, keys_that_share_a_place_of_the_table_are_told_apart);
	tcase_add_test(tcase, prompts_that_come_again_outlive_a_flood_of_those_that_do_not);
	tcase_add_loop_test(tcase, what_is_learned_is_never_worse_than_lru, 0,
			    N_LOADS * N_CAPACITIES);
	tcase_add_test(tcase, a_touch_of_what_is_not_cached_changes_nothing);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_NORMAL);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
