/* SPDX-License-Identifier: Apache-2.0 */
/* Processes that share one pool: what one has computed the other finds, byte for byte. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/client.h"
#include "tests/support/process.h"

static struct kv_client *client;

static void setup(void)
{
	daemon_start("--host", "32M");
	client = client_new();
}

static void teardown(void)
{
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

/* ---- one computes, another finds ---- */

/* The bytes of block @i of a prompt. */
static int byte_of(int32_t prompt, size_t i)
{
	return (int)((uint32_t)prompt * 31 + i * 7 + 1) & 0xff;
}

/* Looks a prompt up, checks what is found, computes the rest, publishes. Return: tokens found. */
static size_t serve(struct kv_client *own, struct kv_pool *pool, int32_t prompt, size_t n)
{
	const kv_block_id *ids;
	struct kv_seq *seq;
	size_t hit;

	seq = seq_new(pool, prompt, n, &hit);
	kv_seq_blocks(seq, &ids);
	for (size_t i = 0; i < hit / BLOCK_TOKENS; i++)
		expect(block_is(pool, ids[i], byte_of(prompt, i)), "prompt %d: block %zu is wrong",
		       prompt, i);
	for (size_t i = hit / BLOCK_TOKENS; i < n / BLOCK_TOKENS; i++)
		block_fill(pool, ids[i], byte_of(prompt, i));
	must(kv_seq_publish(seq, NULL));
	must(kv_ping(own, TIMEOUT));
	kv_seq_free(seq, NULL);
	return hit;
}

static void engine(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool = pool_new_mapped(own, "pool", 0);

	(void)arg;
	for (int i = 0; i < 3; i++) {
		process_wait(self);
		process_say(self, (int64_t)serve(own, pool, 1, 161 + (size_t)i * 160));
	}
	kv_pool_close(pool);
	kv_disconnect(own);
}

START_TEST(a_prompt_computed_by_one_process_is_found_by_another_and_back_again)
{
	struct process *a = process_start(engine, NULL), *b = process_start(engine, NULL);
	/* A computes 160; B finds them and goes on to 320; A finds those, and so on. */
	static const int64_t expected[6] = {0, 160, 160, 320, 320, 480};
	static const int who[6] = {0, 1, 1, 0, 0, 1};

	for (int i = 0; i < 6; i++) {
		struct process *p = who[i] ? b : a;
		int64_t hit;

		process_go(p);
		hit = process_hear(p);
		expect(hit == expected[i], "step %d: %lld tokens found", i, (long long)hit);
	}
	process_end(a);
	process_end(b);
	/* Both have ended, and the cache is there. */
	{
		struct kv_pool *pool = pool_new(client, "pool", 0);

		ck_assert_uint_eq(hit_of(pool, 1, 481), 480);
		ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached_held, 0);
		kv_pool_close(pool);
	}
}
END_TEST

static void racer(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool = pool_new_mapped(own, "pool", 0);

	(void)arg;
	process_say(self, 0);
	process_wait(self);
	for (int32_t prompt = 0; prompt < 30; prompt++)
		serve(own, pool, prompt, 321);
	process_say(self, 0);
	process_wait(self);
	for (int32_t prompt = 0; prompt < 30; prompt++)
		expect(serve(own, pool, prompt, 321) == 320, "prompt %d is not there", prompt);
	kv_pool_close(pool);
	kv_disconnect(own);
}

START_TEST(several_that_compute_the_same_at_the_same_time_end_with_one_copy)
{
	struct process *racers[4];

	for (int i = 0; i < 4; i++)
		racers[i] = process_start(racer, NULL);
	for (int round = 0; round < 2; round++) {
		for (int i = 0; i < 4; i++)
			process_hear(racers[i]);
		books_balance(client);
		if (round)
			ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached, 30 * 20);
		for (int i = 0; i < 4; i++)
			process_go(racers[i]);
	}
	for (int i = 0; i < 4; i++)
		process_end(racers[i]);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_leased, 0);
}
END_TEST

/* Small pool, many prompts: blocks are evicted and pinned at the same time, all the time. */
static void crowded(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool = pool_new_mapped(own, "small", 200);
	unsigned seed = (unsigned)getpid();

	process_say(self, 0);
	for (int i = 0; i < *(int *)arg; i++)
		serve(own, pool, rand_r(&seed) % 40, 1 + (size_t)rand_r(&seed) % 160);
	kv_pool_close(pool);
	kv_disconnect(own);
}

START_TEST(what_is_found_while_others_evict_is_always_right)
{
	int n = 1500;
	struct process *all[4];

	for (int i = 0; i < 4; i++)
		all[i] = process_start(crowded, &n);
	for (int i = 0; i < 4; i++)
		process_hear(all[i]);
	for (int i = 0; i < 50; i++)
		books_balance(client);
	for (int i = 0; i < 4; i++)
		process_end(all[i]);
	{
		struct kv_pool_stats s = pool_stats(client, "small");

		expect(s.evictions_total > 1000 && s.hit_tokens_total > 10000,
		       "%llu evictions, %llu tokens hit", (unsigned long long)s.evictions_total,
		       (unsigned long long)s.hit_tokens_total);
		ck_assert_uint_eq(s.blocks_leased, 0);
		ck_assert_uint_eq(s.blocks_cached_held, 0);
	}
}
END_TEST

/* ---- coming and going ---- */

static uint32_t own_fds(void)
{
	DIR *dir = opendir("/proc/self/fd");
	uint32_t n = 0;

	while (readdir(dir))
		n++;
	closedir(dir);
	return n;
}

static uint32_t own_mappings(void)
{
	FILE *f = fopen("/proc/self/maps", "r");
	uint32_t n = 0;
	int c;

	while ((c = fgetc(f)) != EOF)
		n += c == '\n';
	fclose(f);
	return n;
}

static void come_and_go(int n)
{
	for (int i = 0; i < n; i++) {
		struct kv_client *own = client_new();
		struct kv_pool *pool =
			i % 2 ? pool_new(own, "pool", 0) : pool_new_mapped(own, "pool", 0);
		kv_block_id ids[20];

		must(kv_blocks_take(pool, 20, ids, TIMEOUT));
		if (i % 3)
			must(kv_blocks_give(pool, 20, ids));
		kv_pool_close(pool);
		kv_disconnect(own);
	}
}

START_TEST(attaching_and_detaching_a_thousand_times_leaves_nothing)
{
	struct kv_pool *stays = pool_new(client, "pool", 0);
	uint32_t fds, own, mappings;
	uint64_t rss;

	come_and_go(100); /* heaps reach their size */
	wait_until(daemon_stats(client).n_clients == 2);
	fds = daemon_fds();
	rss = daemon_rss();
	own = own_fds();
	mappings = own_mappings();
	come_and_go(1000);
	wait_until(daemon_stats(client).n_clients == 2);
	wait_until(daemon_fds() == fds);
	expect(daemon_rss() < rss + NO_GROWTH, "kvcached grew from %llu to %llu bytes",
	       (unsigned long long)rss, (unsigned long long)daemon_rss());
	ck_assert_uint_eq(own_fds(), own);
	expect(own_mappings() <= mappings + 4, "%u mappings became %u", mappings, own_mappings());
	ck_assert_uint_eq(daemon_stats(client).n_sessions, 1);
	kv_pool_close(stays);
}
END_TEST

START_TEST(a_pool_that_comes_and_goes_a_thousand_times_leaves_nothing)
{
	uint32_t fds = 0;
	uint64_t rss = 0;

	for (int i = 0; i < 1100; i++) {
		struct kv_pool *pool = pool_new(client, "brief", 0);

		kv_seq_free(seq_published(client, pool, 1, 64), NULL);
		kv_pool_close(pool);
		must(kv_pool_drop(client, "brief", TIMEOUT));
		expect(daemon_stats(client).n_pools == 0, "round %d: the pool stays", i);
		if (i == 100) {
			fds = daemon_fds();
			rss = daemon_rss();
		}
	}
	wait_until(daemon_fds() == fds);
	expect(daemon_rss() < rss + NO_GROWTH, "kvcached grew from %llu to %llu bytes",
	       (unsigned long long)rss, (unsigned long long)daemon_rss());
	wait_until(gpu_stats(client).bytes_free == 32 << 20);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/share");
	TCase *tcase = tcase_create("share");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, a_prompt_computed_by_one_process_is_found_by_another_and_back_again);
	tcase_add_test(tcase, several_that_compute_the_same_at_the_same_time_end_with_one_copy);
	tcase_add_test(tcase, what_is_found_while_others_evict_is_always_right);
	tcase_add_test(tcase, attaching_and_detaching_a_thousand_times_leaves_nothing);
	tcase_add_test(tcase, a_pool_that_comes_and_goes_a_thousand_times_leaves_nothing);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
