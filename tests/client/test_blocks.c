/* SPDX-License-Identifier: Apache-2.0 */
/* Taking and giving blocks: all or nothing, at once or after a wait, each by one owner at a time.
 */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/shm.h"
#include "tests/support/client.h"
#include "tests/support/process.h"

static struct kv_client *client;
static struct kv_pool *pool; /* 15 blocks: so few that no session keeps idle ones */
static kv_block_id ids[20000];

static void setup(void)
{
	daemon_start("--host", "64M");
	client = client_new();
	pool = pool_new(client, "pool", 15);
}

static void teardown(void)
{
	books_balance(client);
	kv_pool_close(pool);
	kv_disconnect(client);
	daemon_stop();
}

/* Leased, and not only at hand in a magazine. */
static uint64_t n_taken(void)
{
	size_t n;
	struct kv_session_stats *all;
	uint64_t taken = 0;

	must(kv_stats(client, KV_STAT_SESSION, (void **)&all, &n, TIMEOUT));
	for (size_t i = 0; i < n; i++)
		taken += all[i].blocks_leased - all[i].blocks_idle;
	free(all);
	return taken;
}

START_TEST(blocks_taken_are_distinct_and_none_is_the_null_block)
{
	static bool seen[1 << 20];
	struct kv_pool *other = pool_new(client, "pool", 0);
	struct kv_pool_info info;

	kv_pool_info(pool, &info);
	must(kv_blocks_take(pool, 9, ids, TIMEOUT));
	must(kv_blocks_take(other, 6, ids + 9, TIMEOUT));
	for (int i = 0; i < 15; i++) {
		expect(ids[i] >= 0 && ids[i] < info.id_limit && ids[i] != info.null_block,
		       "block %d", ids[i]);
		expect(!seen[ids[i]], "block %d was taken twice", ids[i]);
		seen[ids[i]] = true;
	}
	must(kv_blocks_give(other, 6, ids + 9));
	kv_pool_close(other);
	must(kv_blocks_give(pool, 9, ids));
}
END_TEST

START_TEST(taking_none_takes_none)
{
	must(kv_blocks_take(pool, 0, NULL, 0));
	must(kv_blocks_give(pool, 0, NULL));
	ck_assert_uint_eq(n_taken(), 0);
}
END_TEST

START_TEST(more_than_there_are_is_not_now_and_takes_nothing)
{
	struct kv_pool *other = pool_new(client, "pool", 0);

	must(kv_blocks_take(pool, 11, ids, TIMEOUT));
	ck_assert_int_eq(kv_blocks_take(other, 5, ids + 11, 0), KV_NO_ROOM);
	ck_assert_uint_eq(n_taken(), 11);
	must(kv_blocks_take(other, 4, ids + 11, 0));
	ck_assert_int_eq(kv_blocks_take(other, 1, ids, 0), KV_NO_ROOM);
	ck_assert_uint_ge(pool_stats(client, "pool").no_room_total, 2);
	kv_pool_close(other);
	must(kv_blocks_give(pool, 11, ids));
}
END_TEST

START_TEST(more_than_the_pool_ever_has_is_never_and_said_at_once)
{
	struct kv_pool *other = pool_new(client, "pool", 0);
	int64_t start = now_ns();

	ck_assert_int_eq(kv_blocks_take(pool, 16, ids, TIMEOUT), KV_TOO_LARGE);
	ck_assert_int_eq(kv_blocks_take(pool, UINT32_MAX, ids, TIMEOUT), KV_TOO_LARGE);
	ck_assert_int_lt(now_ns() - start, 10 * KV_MSEC);
	ck_assert_uint_eq(n_taken(), 0);
	must(kv_blocks_take(other, 15, ids, 0));
	kv_pool_close(other);
}
END_TEST

START_TEST(a_wait_for_room_ends_when_its_time_is_over)
{
	struct kv_pool *other = pool_new(client, "pool", 0);
	int64_t start, waited;

	must(kv_blocks_take(pool, 15, ids, TIMEOUT));
	start = now_ns();
	ck_assert_int_eq(kv_blocks_take(other, 1, ids, 150 * KV_MSEC), KV_NO_ROOM);
	waited = now_ns() - start;
	ck_assert_int_ge(waited, 150 * KV_MSEC);
	ck_assert_int_lt(waited, 5 * KV_SEC);
	ck_assert_uint_eq(pool_stats(client, "pool").waiting, 0);
	kv_pool_close(other);
}
END_TEST

/* ---- giving ---- */

/* D14. */
START_TEST(a_block_in_a_list_twice_is_given_once_and_the_second_time_is_an_error)
{
	kv_block_id twice[2], all[14];
	static bool seen[1 << 20];

	must(kv_blocks_take(pool, 2, ids, TIMEOUT));
	twice[0] = twice[1] = ids[0];
	refused(kv_blocks_give(pool, 2, twice), -EINVAL, "ids[1]");
	ck_assert_uint_eq(n_taken(), 1);
	must(kv_blocks_take(pool, 14, all, 0));
	for (int i = 0; i < 14; i++) {
		expect(!seen[all[i]] && all[i] != ids[1], "block %d was taken twice", all[i]);
		seen[all[i]] = true;
	}
	ck_assert_int_eq(kv_blocks_take(pool, 1, ids, 0), KV_NO_ROOM);
}
END_TEST

START_TEST(what_is_not_ones_own_cannot_be_given_and_the_rest_of_the_list_is)
{
	struct kv_pool *other = pool_new(client, "pool", 0);
	kv_block_id list[6], foreign;
	struct kv_pool_info info;

	kv_pool_info(pool, &info);
	must(kv_blocks_take(other, 1, &foreign, TIMEOUT));
	must(kv_blocks_take(pool, 3, ids, TIMEOUT));
	list[0] = ids[0];
	list[1] = foreign;
	list[2] = info.id_limit;
	list[3] = -1;
	list[4] = info.null_block; /* ignored: it pads tables */
	list[5] = ids[1];
	refused(kv_blocks_give(pool, 6, list), -EINVAL, "ids[3]");
	ck_assert_uint_eq(n_taken(), 2);
	must(kv_blocks_give(pool, 1, &info.null_block));
	must(kv_blocks_give(pool, 1, ids + 2));
	must(kv_blocks_give(other, 1, &foreign));
	wait_until(n_taken() == 0);
	kv_pool_close(other);
}
END_TEST

START_TEST(a_closed_pool_gives_back_what_it_had)
{
	struct kv_pool *other = pool_new(client, "pool", 0);

	must(kv_blocks_take(other, 13, ids, TIMEOUT));
	kv_pool_close(other);
	ck_assert_uint_eq(n_taken(), 0);
	must(kv_blocks_take(pool, 15, ids, 0));
}
END_TEST

/* Without idle blocks, and with them: then a take may be refused while another session has some. */
START_TEST(taking_and_giving_at_random_never_hands_a_block_out_twice)
{
	const char *name = _i ? "large" : "pool";
	static int owner[1 << 20];
	static kv_block_id held[4][400];
	struct kv_pool *pools[4];
	uint32_t n_held[4] = {0}, n_refused = 0;
	unsigned seed = 7;

	memset(owner, -1, sizeof(owner));
	for (int i = 0; i < 4; i++)
		pools[i] = pool_new(client, name, 400);
	for (int step = 0; step < 20000; step++) {
		int i = rand_r(&seed) % 4;
		uint32_t n = (uint32_t)rand_r(&seed) % (_i ? 60 : 5);
		kv_block_id *end = held[i] + n_held[i];

		if (rand_r(&seed) % 2) {
			if (kv_blocks_take(pools[i], n, end, 0)) {
				n_refused++;
				continue;
			}
			for (uint32_t k = 0; k < n; k++) {
				expect(owner[end[k]] < 0, "block %d has two owners", end[k]);
				owner[end[k]] = i;
			}
			n_held[i] += n;
		} else {
			n = n < n_held[i] ? n : n_held[i];
			for (uint32_t k = 1; k <= n; k++)
				owner[*(end - k)] = -1;
			expect(!kv_blocks_give(pools[i], n, end - n), "%s", kv_error_text());
			n_held[i] -= n;
		}
		if (step % 2000 == 0)
			books_balance(client);
	}
	expect(n_refused > 100 && n_refused < 10000, "%u of 10000 takes refused", n_refused);
	for (int i = 0; i < 4; i++)
		kv_pool_close(pools[i]);
	ck_assert_uint_eq(n_taken(), 0);
}
END_TEST

/* ---- magazines ---- */

START_TEST(blocks_at_hand_are_taken_and_given_without_the_daemon)
{
	struct kv_pool *large = pool_new(client, "large", 20000);

	/* The first takes fill the magazine; a stopped daemon shows that later ones need nobody. */
	for (int i = 0; i < 100; i++) {
		must(kv_blocks_take(large, 16, ids, TIMEOUT));
		must(kv_blocks_give(large, 16, ids));
	}
	must(kv_ping(client, TIMEOUT));
	ck_assert_int_eq(kill(daemon_worker(), SIGSTOP), 0);
	for (int i = 0; i < 10000; i++) {
		expect(!kv_blocks_take(large, 16, ids, 0), "%s", kv_error_text());
		expect(!kv_blocks_give(large, 16, ids), "%s", kv_error_text());
	}
	ck_assert_int_eq(kill(daemon_worker(), SIGCONT), 0);
	must(kv_ping(client, TIMEOUT));
	books_balance(client);
	kv_pool_close(large);
}
END_TEST

/* The pages of the session with idle leases, found as whoever scribbles in memory finds them. */
static struct kv_shm_session *pages_with_idle(void)
{
	FILE *f = fopen("/proc/self/maps", "re");
	struct kv_shm_session *found = NULL;
	uintptr_t start;
	char line[512];

	ck_assert_ptr_nonnull(f);
	while (fgets(line, sizeof(line), f)) {
		if (strstr(line, "memfd:kvcached-session") && sscanf(line, "%" SCNxPTR, &start) == 1 &&
		    ((struct kv_shm_session *)start)->n_stack)
			found = (struct kv_shm_session *)start;
	}
	fclose(f);
	ck_assert_ptr_nonnull(found);
	return found;
}

START_TEST(a_scribbled_stack_of_idle_leases_costs_leases_and_no_process)
{
	static const uint32_t counts[] = { UINT32_MAX, 1u << 31, 1u << 20 };
	struct kv_pool *large = pool_new(client, "large", 5000);
	struct kv_shm_session *s;
	kv_block_id *stack;
	int r;

	must(kv_blocks_take(large, 10, ids, TIMEOUT));
	must(kv_blocks_give(large, 10, ids));
	s = pages_with_idle();
	stack = (kv_block_id *)((char *)s + s->stack_offset);
	for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
		s->n_stack = counts[i]; /* counts as none: others come */
		must(kv_blocks_take(large, 10, ids, TIMEOUT));
		must(kv_blocks_give(large, 10, ids));
	}
	ck_assert_uint_ge(s->n_stack, 10);
	ck_assert_uint_le(s->n_stack, s->grant_capacity);
	for (uint32_t i = 0; i < s->n_stack - 1; i++)
		stack[i] = i % 2 ? INT32_MIN : INT32_MAX;
	r = kv_blocks_take(large, 10, ids, TIMEOUT);
	expect(r == -EPROTO, "take: %d (%s)", r, kv_error_text());
	kv_pool_close(large);
	must(kv_pool_drop(client, "large", TIMEOUT));
}
END_TEST

START_TEST(a_pool_that_grows_is_used_to_its_last_block)
{
	struct kv_pool *large = pool_new(client, "large", 20000);

	for (uint32_t n = 0; n < 20000; n += 500)
		must(kv_blocks_take(large, 500, ids + n, TIMEOUT));
	ck_assert_int_eq(kv_blocks_take(large, 1, ids, 0), KV_NO_ROOM);
	ck_assert_uint_eq(pool_stats(client, "large").blocks_total, 20000);
	books_balance(client);
	kv_pool_close(large);
}
END_TEST

static void wants_the_rest(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *mine = pool_new(own, "large", 0);

	(void)arg;
	process_say(self, 0);
	process_say(self, kv_blocks_take(mine, 101, ids, TIMEOUT));
	process_wait(self);
	kv_pool_close(mine);
	kv_disconnect(own);
}

START_TEST(idle_blocks_of_one_session_go_to_another_that_waits)
{
	struct kv_pool *busy = pool_new(client, "large", 400);
	struct process *wants;

	/* It has some more at hand, and goes on working. */
	must(kv_blocks_take(busy, 300, ids, TIMEOUT));
	wants = process_start(wants_the_rest, NULL);
	process_hear(wants);
	wait_until(pool_stats(client, "large").waiting == 1);
	must(kv_blocks_give(busy, 1, ids));
	ck_assert_int_eq(process_hear(wants), 0);
	process_go(wants);
	process_end(wants);
	kv_pool_close(busy);
}
END_TEST

/* ---- waiting for another process ---- */

enum end { GIVES, FREES, CLOSES, DIES };

static void holder(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *mine = pool_new(own, "pool", 0);
	struct kv_seq *seq = NULL;
	enum end end = *(enum end *)arg;

	if (end == FREES) {
		seq = seq_published(own, mine, 1, 9 * BLOCK_TOKENS);
	} else {
		must(kv_blocks_take(mine, 9, ids, TIMEOUT));
	}
	process_say(self, 0);
	process_wait(self);
	switch (end) {
	case GIVES:
		must(kv_blocks_give(mine, 9, ids));
		break;
	case FREES: /* cached blocks are let go without a message */
		kv_seq_free(seq, NULL);
		break;
	case CLOSES:
		kv_pool_close(mine);
		break;
	case DIES:
		raise(SIGKILL);
	}
	process_wait(self);
}

static void waiter(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *mine = pool_new(own, "pool", 0);

	(void)arg;
	process_say(self, 0);
	process_say(self, kv_blocks_take(mine, 12, ids, TIMEOUT));
	process_wait(self);
	kv_pool_close(mine);
	kv_disconnect(own);
}

START_TEST(who_waits_gets_what_another_process_lets_go)
{
	enum end end = (enum end)_i;
	struct process *has = process_start(holder, &end), *wants;
	int64_t start;

	process_hear(has);
	wants = process_start(waiter, NULL);
	process_hear(wants);
	wait_until(pool_stats(client, "pool").waiting == 1);
	start = now_ns();
	process_go(has);
	ck_assert_int_eq(process_hear(wants), 0);
	ck_assert_int_lt(now_ns() - start, 5 * KV_SEC);
	ck_assert_uint_eq(pool_stats(client, "pool").waiting, 0);
	books_balance(client);
	process_go(wants);
	process_end(wants);
	process_kill(has);
	wait_until(n_taken() == 0);
}
END_TEST

START_TEST(one_who_waits_and_dies_is_forgotten)
{
	struct process *wants;

	must(kv_blocks_take(pool, 15, ids, TIMEOUT));
	wants = process_start(waiter, NULL);
	process_hear(wants);
	wait_until(pool_stats(client, "pool").waiting == 1);
	process_kill(wants);
	wait_until(pool_stats(client, "pool").waiting == 0);
	must(kv_blocks_give(pool, 15, ids));
	must(kv_blocks_take(pool, 15, ids, TIMEOUT));
}
END_TEST

START_TEST(a_stopped_daemon_holds_nobody_longer_than_the_deadline)
{
	struct kv_pool *other = pool_new(client, "pool", 0);
	int64_t start = now_ns();

	ck_assert_int_eq(kill(daemon_worker(), SIGSTOP), 0);
	ck_assert_int_eq(kv_ping(client, 100 * KV_MSEC), -ETIMEDOUT);
	ck_assert_int_lt(now_ns() - start, 2 * KV_SEC);
	ck_assert_int_eq(kill(daemon_worker(), SIGCONT), 0);
	/* The answer that comes too late is not taken for that of a later call. */
	must(kv_ping(client, TIMEOUT));
	books_balance(client);
	kv_pool_close(other);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/blocks");
	TCase *tcase = tcase_create("blocks");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, blocks_taken_are_distinct_and_none_is_the_null_block);
	tcase_add_test(tcase, taking_none_takes_none);
	tcase_add_test(tcase, more_than_there_are_is_not_now_and_takes_nothing);
	tcase_add_test(tcase, more_than_the_pool_ever_has_is_never_and_said_at_once);
	tcase_add_test(tcase, a_wait_for_room_ends_when_its_time_is_over);
	tcase_add_test(tcase,
		       a_block_in_a_list_twice_is_given_once_and_the_second_time_is_an_error);
	tcase_add_test(tcase, what_is_not_ones_own_cannot_be_given_and_the_rest_of_the_list_is);
	tcase_add_test(tcase, a_closed_pool_gives_back_what_it_had);
	tcase_add_loop_test(tcase, taking_and_giving_at_random_never_hands_a_block_out_twice, 0, 2);
	tcase_add_test(tcase, blocks_at_hand_are_taken_and_given_without_the_daemon);
	tcase_add_test(tcase, idle_blocks_of_one_session_go_to_another_that_waits);
	tcase_add_test(tcase, a_scribbled_stack_of_idle_leases_costs_leases_and_no_process);
	tcase_add_test(tcase, a_pool_that_grows_is_used_to_its_last_block);
	tcase_add_loop_test(tcase, who_waits_gets_what_another_process_lets_go, GIVES, DIES + 1);
	tcase_add_test(tcase, one_who_waits_and_dies_is_forgotten);
	tcase_add_test(tcase, a_stopped_daemon_holds_nobody_longer_than_the_deadline);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
