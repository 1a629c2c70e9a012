/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pinning against evicting (include/internal/shm.h), by two threads as fast as they can: the owner
 * of the books evicts one block and publishes it again, a client pins it and lets it go.
 */
#include <check.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "tests/alloc/chain.h"
#include "tests/support/expect.h"

#define ENOUGH	    100000 /* of each */
#define MOST_MS	    5000
#define OWNER_SLOT  0
#define CLIENT_SLOT 70

static atomic_ulong n_pins, n_torn;
static atomic_bool stop;
static int32_t block; /* the only one there is, but the null block */

static uint64_t word(void)
{
	return kv_load_seq(&p.books.descriptors[block].word);
}

static void *pins(void *arg)
{
	(void)arg;
	while (!atomic_load(&stop)) {
		uint64_t before;

		if (!client_pin(&p, block, CLIENT_SLOT))
			continue;
		/* Held: it may be looked at for eviction, but it is the same block all the time. */
		before = word();
		for (int i = 0; i < 30; i++) {
			uint64_t now = word();

			if (kv_block_generation(now) != kv_block_generation(before) ||
			    (kv_block_state(now) != KV_BLOCK_CACHED &&
			     kv_block_state(now) != KV_BLOCK_EVICTING))
				atomic_fetch_add(&n_torn, 1);
		}
		client_unpin(&p, block, CLIENT_SLOT);
		atomic_fetch_add(&n_pins, 1);
	}
	return NULL;
}

static int64_t now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void publish(void)
{
	int32_t id;

	kv_books_grant(b, OWNER_SLOT, 1, &id);
	expect(client_publish(&p, OWNER_SLOT, id, -1, (struct kv_key){1, 1}, tokens_of(1, 0),
			      tick(1)) == KV_PUBLISHED,
	       "publishing again");
	client_unpin(&p, id, OWNER_SLOT);
}

START_TEST(a_block_is_never_evicted_from_under_a_pin)
{
	int64_t end = now_ms() + MOST_MS;
	unsigned long n_evicted = 0, n_kept = 0;
	pthread_t client;

	resize(1);
	block = 1;
	publish();
	ck_assert_int_eq(pthread_create(&client, NULL, pins, NULL), 0);
	/* Until both have come to their turn, and in each other's way. */
	while ((n_evicted < ENOUGH || n_kept < 100 || atomic_load(&n_pins) < ENOUGH) &&
	       now_ms() < end) {
		for (int i = 0; i < 100; i++) {
			if (kv_books_evict(b, 1, true)) {
				n_evicted++;
				publish();
			} else {
				n_kept++;
			}
		}
	}
	atomic_store(&stop, true);
	ck_assert_int_eq(pthread_join(client, NULL), 0);
	ck_assert_uint_eq(atomic_load(&n_torn), 0);
	expect(n_evicted > 1000 && atomic_load(&n_pins) > 1000, "%lu evicted, %lu kept, %lu pins",
	       n_evicted, n_kept, atomic_load(&n_pins));
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("alloc/pool_race");
	TCase *tcase = tcase_create("pool_race");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, a_block_is_never_evicted_from_under_a_pin);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
