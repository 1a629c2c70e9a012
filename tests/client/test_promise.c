/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting for what another session computes: promises, and what ends them. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/client.h"
#include "tests/support/process.h"
#include "tests/support/raw_session.h"

#define N 161 /* tokens of the prompt: ten blocks, and one to compute */

static struct kv_client *client;
static struct kv_pool *pool;

static void setup(void)
{
	daemon_start("--host", "32M");
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

/* Promises @n tokens for a time, and computes them block by block: one each time it is told to. */
static void writer(struct process *self, void *arg)
{
	int64_t time = *(int64_t *)arg;
	struct kv_client *own = client_new();
	struct kv_pool *p = pool_new(own, "pool", 0);
	const int32_t *tokens = tokens_of(1, N);
	struct kv_seq *seq;
	size_t promised;

	must(kv_seq_new(p, &seq));
	must(kv_seq_promise(seq, tokens, N, time, &promised));
	process_say(self, (int64_t)promised);
	for (size_t i = 0; i < 10; i++) {
		process_wait(self);
		must(kv_seq_reserve(seq, (i + 1) * BLOCK_TOKENS, 0));
		must(kv_seq_append(seq, tokens + i * BLOCK_TOKENS, BLOCK_TOKENS));
		must(kv_seq_publish(seq, NULL));
		must(kv_ping(own, TIMEOUT));
		process_say(self, 0);
	}
	kv_seq_free(seq, NULL);
	kv_pool_close(p);
	kv_disconnect(own);
}

static int64_t minute = 60 * KV_SEC, moment = KV_SEC / 2;

static int follow(struct kv_seq *seq, int64_t timeout, size_t expected)
{
	size_t hit;
	int r = kv_seq_follow(seq, tokens_of(1, N), N, timeout, &hit);

	expect(hit == expected, "%zu tokens are found, %zu expected", hit, expected);
	return r;
}

START_TEST(a_reader_attaches_to_blocks_that_a_live_session_computes_one_after_the_other)
{
	struct process *other = process_start(writer, &minute);
	struct kv_seq *seq;
	size_t promised;

	ck_assert_int_eq(process_hear(other), 160);
	must(kv_seq_new(pool, &seq));
	ck_assert_int_eq(follow(seq, 0, 0), KV_PROMISED);
	must(kv_seq_promise(seq, tokens_of(1, N), N, minute, &promised));
	ck_assert_uint_eq(promised, 0); /* it is the other's */
	for (size_t i = 0; i < 9; i++) {
		process_go(other);
		process_hear(other);
		ck_assert_int_eq(follow(seq, 0, (i + 1) * BLOCK_TOKENS), KV_PROMISED);
	}
	process_go(other);
	ck_assert_int_eq(follow(seq, 20 * KV_SEC, 160), 0); /* waits for the last one */
	process_hear(other);
	process_end(other);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached, 10);
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(a_reader_goes_on_by_itself_when_the_writer_is_killed)
{
	struct process *other = process_start(writer, &minute);
	struct kv_seq *seq;
	int64_t start;

	process_hear(other);
	must(kv_seq_new(pool, &seq));
	process_go(other);
	process_hear(other);
	ck_assert_int_eq(follow(seq, 0, 16), KV_PROMISED);
	process_kill(other);
	start = now_ns();
	ck_assert_int_eq(follow(seq, 30 * KV_SEC, 16), 0);
	expect(now_ns() - start < 20 * KV_SEC, "it waited for its deadline");
	/* It is the reader's turn. */
	{
		size_t promised;

		must(kv_seq_promise(seq, tokens_of(1, N), N, minute, &promised));
		ck_assert_uint_eq(promised, 160);
	}
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(a_deadline_ends_a_wait_and_a_promise_ends_by_its_own)
{
	struct process *other = process_start(writer, &moment);
	struct kv_seq *seq;
	int64_t start = now_ns();

	process_hear(other);
	must(kv_seq_new(pool, &seq));
	ck_assert_int_eq(follow(seq, 20 * KV_MSEC, 0), KV_PROMISED);
	ck_assert_int_ge(now_ns() - start, 20 * KV_MSEC);
	/*
	 * The writer does nothing: what it promised isn't believed for longer than it said, by who would wait
	 * for ever either; that timeout overflows nothing.
	 */
	ck_assert_int_eq(follow(seq, INT64_MAX, 0), 0);
	kv_seq_free(seq, NULL);
	process_kill(other);
}
END_TEST

START_TEST(a_promise_ends_with_its_sequence_and_with_a_rollback)
{
	KV_OPTIONS(kv_pool_options, what, .name = "pool", .model = "small");
	const int32_t *tokens = tokens_of(1, N);
	struct kv_seq *seq, *other;
	struct kv_pool *second;

	must(kv_pool_open(client, &what, &second));
	must(kv_seq_new(second, &other));
	must(kv_seq_new(pool, &seq));
	must(kv_seq_promise(other, tokens, N, minute, NULL));
	ck_assert_int_eq(follow(seq, 0, 0), KV_PROMISED);
	must(kv_seq_rollback(other, 0, NULL));
	ck_assert_int_eq(follow(seq, 0, 0), 0);
	must(kv_seq_promise(other, tokens, N, minute, NULL));
	ck_assert_int_eq(follow(seq, 0, 0), KV_PROMISED);
	kv_seq_free(other, NULL);
	ck_assert_int_eq(follow(seq, 0, 0), 0);
	/* One's own are no reason to wait. */
	must(kv_seq_new(pool, &other));
	must(kv_seq_promise(other, tokens, N, minute, NULL));
	ck_assert_int_eq(follow(seq, 0, 0), 0);
	kv_seq_free(other, NULL);
	kv_seq_free(seq, NULL);
	kv_pool_close(second);
}
END_TEST

START_TEST(a_promise_of_what_was_published_does_not_outlast_its_sequence_and_its_block)
{
	KV_OPTIONS(kv_pool_options, what, .name = "pool", .model = "small");
	const int32_t *tokens = tokens_of(1, N);
	struct kv_seq *seq, *other;
	struct kv_pool *second;
	int64_t start;

	must(kv_pool_open(client, &what, &second));
	must(kv_seq_new(second, &other));
	must(kv_seq_promise(other, tokens, N, minute, NULL));
	must(kv_seq_reserve(other, N, TIMEOUT));
	must(kv_seq_append(other, tokens, N - 1));
	must(kv_seq_publish(other, NULL));
	kv_seq_free(other, NULL); /* before it has had an answer */
	must(kv_ping(client, TIMEOUT));
	must(kv_pool_drop(client, "pool", TIMEOUT));
	must(kv_seq_new(pool, &seq));
	start = now_ns();
	ck_assert_int_eq(follow(seq, 40 * KV_SEC, 0), 0);
	expect(now_ns() - start < 20 * KV_SEC, "a reader waits for what nobody computes");
	kv_seq_free(seq, NULL);
	kv_pool_close(second);
}
END_TEST

START_TEST(a_promise_of_one_who_was_killed_is_not_taken_for_one_of_who_came_after_it)
{
	struct process *other = process_start(writer, &minute);
	struct kv_pool *second;
	struct kv_seq *seq;

	process_hear(other);
	process_kill(other);
	must(kv_seq_new(pool, &seq));
	wait_until(follow(seq, 0, 0) == 0);
	second = pool_new(client, "pool", 0); /* in the place of the one that died */
	ck_assert_int_eq(follow(seq, 0, 0), 0);
	kv_seq_free(seq, NULL);
	kv_pool_close(second);
}
END_TEST

/* ---- long after ---- */

#define DAY ((int64_t)86400 * KV_SEC)

static uint64_t *find_promise(struct raw_session *look)
{
	uint64_t *words = kv_shm_promises(look->blocks, look->head);

	for (uint32_t i = 0; i < KV_PROMISES; i++) {
		if (words[i])
			return &words[i];
	}
	ck_abort_msg("there is no promise");
}

/* It ended so long ago. */
static void make_old(uint64_t *word, uint64_t promise, int64_t age)
{
	uint32_t until = (uint32_t)((now_ns() - age) / (KV_SEC / 16)) & 0xffffff;

	kv_store_release(word, (promise & ~(uint64_t)0xffffff) | until);
}

START_TEST(a_promise_that_ended_days_ago_is_not_believed_again)
{
	static const int64_t ages[] = {KV_SEC, DAY, 6 * DAY, 6 * DAY + DAY / 2, 8 * DAY, 10 * DAY, 12 * DAY};
	struct raw_session look = raw_session("pool", 0);
	struct kv_pool *second = pool_new(client, "pool", 0);
	struct kv_seq *seq, *other;
	uint64_t *word, promise;

	must(kv_seq_new(second, &other));
	must(kv_seq_new(pool, &seq));
	must(kv_seq_promise(other, tokens_of(1, 17), 17, minute, NULL));
	ck_assert_int_eq(follow(seq, 0, 0), KV_PROMISED);
	word = find_promise(&look);
	promise = *word;
	for (size_t i = 0; i < sizeof(ages) / sizeof(ages[0]); i++) {
		make_old(word, promise, ages[i]);
		expect(follow(seq, 0, 0) == 0, "one of %lld hours ago is believed",
		       (long long)(ages[i] / (3600 * KV_SEC)));
	}
	/* Nor does it stay until the clock comes round: 12.1 days. */
	make_old(word, promise, 60 * KV_SEC);
	wait_until(!kv_load_acquire(word));
	kv_seq_free(seq, NULL);
	kv_seq_free(other, NULL);
	kv_pool_close(second);
	raw_session_close(&look);
}
END_TEST

/* ---- many at once ---- */

/* Each computes only what nobody else does. Says how many blocks that were. */
static void racer(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *p = pool_new(own, "pool", 0);
	const int32_t *tokens = tokens_of(7, N);
	size_t hit, promised, n_computed = 0;
	struct kv_seq *seq;

	(void)arg;
	must(kv_seq_new(p, &seq));
	process_say(self, 0);
	process_wait(self);
	do {
		int r = kv_seq_follow(seq, tokens, N, 20 * KV_SEC, &hit);

		expect(r == 0, "follow: %d", r);
		if (hit == 160)
			break;
		must(kv_seq_promise(seq, tokens, N, minute, &promised));
		if (promised <= hit)
			continue;
		/* Another one's promise may have ended between: then its block is there by now. */
		must(kv_seq_lookup(seq, tokens, N, &promised));
		if (promised > hit)
			continue;
		sleep_ms(2); /* a step */
		must(kv_seq_reserve(seq, hit + BLOCK_TOKENS, 0));
		must(kv_seq_append(seq, tokens + hit, BLOCK_TOKENS));
		must(kv_seq_publish(seq, NULL));
		must(kv_ping(own, TIMEOUT));
		must(kv_seq_publish(seq, NULL)); /* what became of it */
		n_computed++;
	} while (kv_seq_len(seq) < 160);
	process_say(self, (int64_t)n_computed);
	process_wait(self);
	kv_seq_free(seq, NULL);
	kv_pool_close(p);
	kv_disconnect(own);
}

START_TEST(engines_that_want_the_same_at_once_compute_it_once)
{
	struct process *all[6];
	int64_t n_computed = 0;

	for (int i = 0; i < 6; i++)
		all[i] = process_start(racer, NULL);
	for (int i = 0; i < 6; i++)
		process_hear(all[i]);
	for (int i = 0; i < 6; i++)
		process_go(all[i]);
	for (int i = 0; i < 6; i++)
		n_computed += process_hear(all[i]);
	expect(n_computed == 10, "%lld blocks were computed", (long long)n_computed);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached, 10);
	for (int i = 0; i < 6; i++)
		process_go(all[i]);
	for (int i = 0; i < 6; i++)
		process_end(all[i]);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("promise");
	TCase *tcase = tcase_create("promise");

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase,
		       a_reader_attaches_to_blocks_that_a_live_session_computes_one_after_the_other);
	tcase_add_test(tcase, a_reader_goes_on_by_itself_when_the_writer_is_killed);
	tcase_add_test(tcase, a_deadline_ends_a_wait_and_a_promise_ends_by_its_own);
	tcase_add_test(tcase, a_promise_ends_with_its_sequence_and_with_a_rollback);
	tcase_add_test(tcase, a_promise_of_what_was_published_does_not_outlast_its_sequence_and_its_block);
	tcase_add_test(tcase, a_promise_of_one_who_was_killed_is_not_taken_for_one_of_who_came_after_it);
	tcase_add_test(tcase, a_promise_that_ended_days_ago_is_not_believed_again);
	tcase_add_test(tcase, engines_that_want_the_same_at_once_compute_it_once);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
