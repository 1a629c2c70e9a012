/* SPDX-License-Identifier: Apache-2.0 */
/* Several threads in one process: one client for all, a pool handle for each. For the thread
 * sanitizer. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/client.h"

#define N_THREADS 6

static struct kv_client *client;
static atomic_bool stop;

static void setup(void)
{
	daemon_start("--host", "64M");
	client = client_new();
	atomic_store(&stop, false);
}

static void teardown(void)
{
	books_balance(client);
	ck_assert_uint_eq(daemon_stats(client).n_sessions, 0);
	kv_disconnect(client);
	daemon_stop();
}

/* check's assertions are for the main thread: here a failure is a text that the thread returns. */
#define try(call)                                                                     \
	do {                                                                          \
		int result_ = (call);                                                 \
                                                                                      \
		if (result_) {                                                        \
			static _Thread_local char text_[300];                         \
                                                                                      \
			snprintf(text_, sizeof(text_), "%s: %d (%s)", #call, result_, \
				 result_ < 0 ? kv_error_text() : "");                 \
			return strdup(text_);                                         \
		}                                                                     \
	} while (0)

static void run(void *(*const *threads)(void *), int n)
{
	pthread_t ids[N_THREADS];

	for (int i = 0; i < n; i++)
		ck_assert_int_eq(pthread_create(&ids[i], NULL, threads[i], NULL), 0);
	for (int i = 0; i < n; i++) {
		void *text;

		ck_assert_int_eq(pthread_join(ids[i], &text), 0);
		ck_assert_msg(text == NULL, "thread %d: %s", i, (char *)text);
	}
}

static int open_pool(const char *name, struct kv_pool **ret)
{
	KV_OPTIONS(kv_pool_options, what, .name = name, .model = "small", .layout = small_layout(),
		   .mapped = 1, .timeout = TIMEOUT);

	return kv_pool_open(client, &what, ret);
}

/* An engine's life: prompts that others have too, forks, publishing, freeing. */
static void *works(void *arg)
{
	unsigned seed = (unsigned)(uintptr_t)&arg;
	struct kv_pool *pool;

	try(open_pool("pool", &pool));
	for (int i = 0; i < 300; i++) {
		int32_t tokens[200];
		size_t n = 1 + (size_t)rand_r(&seed) % 199, hit;
		struct kv_seq *seq, *fork;
		const kv_block_id *ids;

		for (size_t k = 0; k < n; k++)
			tokens[k] = (int32_t)k + (i % 7) * 1000;
		try(kv_seq_new(pool, &seq));
		try(kv_seq_lookup(seq, tokens, n, &hit));
		try(kv_seq_reserve(seq, n + 1, TIMEOUT));
		try(kv_seq_append(seq, tokens + hit, n - hit));
		kv_seq_blocks(seq, &ids);
		for (size_t k = 0; k < hit / BLOCK_TOKENS; k++)
			try(memcmp(block_at(pool, ids[k]), tokens + k * BLOCK_TOKENS, 64));
		for (size_t k = hit / BLOCK_TOKENS; k < n / BLOCK_TOKENS; k++)
			memcpy(block_at(pool, ids[k]), tokens + k * BLOCK_TOKENS, 64);
		try(kv_seq_publish(seq, NULL));
		try(kv_seq_fork(seq, &fork));
		kv_seq_free(seq, NULL);
		try(kv_seq_rollback(fork, n / 2, NULL));
		kv_seq_free(fork, NULL);
	}
	kv_pool_close(pool);
	return NULL;
}

static void *takes_and_gives(void *arg)
{
	struct kv_pool *pool;

	(void)arg;
	try(open_pool("other", &pool));
	for (int i = 0; i < 2000; i++) {
		kv_block_id ids[64];

		try(kv_blocks_take(pool, 64, ids, TIMEOUT));
		try(kv_blocks_give(pool, 64, ids));
	}
	kv_pool_close(pool);
	return NULL;
}

static void *comes_and_goes(void *arg)
{
	(void)arg;
	for (int i = 0; i < 100; i++) {
		struct kv_pool *pool;
		KV_OPTIONS(kv_pool_options, none, .name = "nothing of that name");

		try(open_pool("brief", &pool));
		kv_pool_close(pool);
		try(kv_pool_open(client, &none, &pool) == -ENOENT ? 0 : -1);
		/* The text is this thread's own. */
		try(strstr(kv_error_text(), "nothing of that name") ? 0 : -1);
	}
	return NULL;
}

static void *asks(void *arg)
{
	(void)arg;
	while (!atomic_load(&stop)) {
		struct kv_check_result result;
		void *items;
		size_t n;

		try(kv_ping(client, TIMEOUT));
		for (int kind = KV_STAT_DAEMON; kind <= KV_STAT_SESSION; kind++) {
			try(kv_stats(client, (enum kv_stat_kind)kind, &items, &n, TIMEOUT));
			free(items);
		}
		try(kv_check(client, &result, TIMEOUT));
		try((int)result.n_errors);
		try(kv_pool_drop(client, "nobody's", TIMEOUT) == -ENOENT ? 0 : -1);
		try(strstr(kv_error_text(), "nobody's") ? 0 : -1);
	}
	return NULL;
}

START_TEST(threads_with_pools_of_their_own_do_not_disturb_each_other)
{
	static void *(*const threads[])(void *) = {works, works,	   works,
						   works, takes_and_gives, comes_and_goes};
	pthread_t asking[2];

	for (int i = 0; i < 2; i++)
		ck_assert_int_eq(pthread_create(&asking[i], NULL, asks, NULL), 0);
	run(threads, N_THREADS);
	atomic_store(&stop, true);
	for (int i = 0; i < 2; i++) {
		void *text;

		ck_assert_int_eq(pthread_join(asking[i], &text), 0);
		ck_assert_msg(text == NULL, "asking: %s", (char *)text);
	}
	ck_assert_uint_gt(pool_stats(client, "pool").hit_tokens_total, 10000);
}
END_TEST

static void *connects(void *arg)
{
	(void)arg;
	for (int i = 0; i < 100; i++) {
		KV_OPTIONS(kv_connect_options, how, .name = "thread", .timeout = TIMEOUT);
		struct kv_client *own;

		try(kv_connect(&how, &own));
		try(kv_ping(own, TIMEOUT));
		kv_disconnect(own);
	}
	return NULL;
}

START_TEST(threads_that_connect_at_the_same_time_each_get_a_connection)
{
	static void *(*const threads[])(void *) = {connects, connects, connects,
						   connects, connects, connects};

	run(threads, N_THREADS);
	wait_until(daemon_stats(client).n_clients == 1);
}
END_TEST

/* A pool may wander: one thread makes it, another uses it, one after the other. */
static struct kv_pool *wandering;

static void *uses_what_another_opened(void *arg)
{
	struct kv_seq *seq;

	(void)arg;
	try(kv_seq_new(wandering, &seq));
	try(kv_seq_reserve(seq, 100, TIMEOUT));
	try(kv_seq_append(seq, (const int32_t[100]){1}, 100));
	try(kv_seq_publish(seq, NULL));
	kv_seq_free(seq, NULL);
	return NULL;
}

START_TEST(a_pool_may_be_used_by_one_thread_after_another)
{
	static void *(*const threads[])(void *) = {uses_what_another_opened};

	must(open_pool("pool", &wandering));
	for (int i = 0; i < 20; i++)
		run(threads, 1);
	kv_pool_close(wandering);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/threads");
	TCase *tcase = tcase_create("threads");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, threads_with_pools_of_their_own_do_not_disturb_each_other);
	tcase_add_test(tcase, threads_that_connect_at_the_same_time_each_get_a_connection);
	tcase_add_test(tcase, a_pool_may_be_used_by_one_thread_after_another);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
