/* SPDX-License-Identifier: Apache-2.0 */
/* What comes back, what stays and what must not happen when a process dies, hangs or leaves. */
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/client.h"
#include "tests/support/process.h"

#define N_BLOCKS 2000

static struct kv_client *client;
static struct kv_pool *pool;
static kv_block_id ids[N_BLOCKS];

static void setup(void)
{
	daemon_start("--host", "64M");
	client = client_new();
	pool = pool_new_mapped(client, "pool", N_BLOCKS);
}

static void teardown(void)
{
	kv_pool_close(pool);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

static struct kv_pool_stats stats(void)
{
	return pool_stats(client, "pool");
}

/* Nobody but this test leases anything. */
static void expect_only_own_leases(void)
{
	struct kv_session_stats own;

	ck_assert(session_stats(client, getpid(), &own));
	ck_assert_uint_eq(stats().blocks_leased, own.blocks_leased);
	ck_assert_uint_eq(stats().blocks_quarantined, 0);
}

/* ---- kill -9 ---- */

/* Takes 1,000 blocks: 200 of them cached, and shared with the test; 10 rows; holds prefixes; reserves. */
static void rich(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *mine = pool_new_mapped(own, "pool", 0), *rows = pool_new(own, "rows", 20);
	struct kv_seq *reserved, *published;
	size_t hit;

	(void)arg;
	must(kv_blocks_take(rows, 10, ids, TIMEOUT));
	must(kv_blocks_take(mine, 700, ids, TIMEOUT));
	for (int32_t prompt = 1; prompt <= 3; prompt++) {
		seq_new(mine, prompt, 20 * BLOCK_TOKENS + 1, &hit);
		expect(hit == 20 * BLOCK_TOKENS, "hit %zu", hit);
	}
	published = seq_published(own, mine, 4, 200 * BLOCK_TOKENS);
	must(kv_seq_new(mine, &reserved));
	must(kv_seq_reserve(reserved, 50 * BLOCK_TOKENS, TIMEOUT));
	must(kv_seq_append(reserved, tokens_of(5, 40 * BLOCK_TOKENS), 40 * BLOCK_TOKENS));
	process_say(self, (int64_t)kv_seq_len(published));
	process_wait(self);
}

/* D36. Ten thousand deaths in a row: tests/integration/kills.c. */
START_TEST(a_killed_client_gives_everything_back)
{
	struct kv_pool *rows = pool_new(client, "rows", 20);
	struct kv_seq *seqs[3], *shares;
	struct kv_pool_stats before;
	struct process *other;
	pid_t pid;
	size_t hit;

	for (int32_t i = 0; i < 3; i++)
		seqs[i] = seq_published(client, pool, i + 1, 20 * BLOCK_TOKENS);
	before = stats();
	other = process_start(rich, NULL);
	pid = other->pid;
	process_hear(other);
	shares = seq_new(pool, 4, 200 * BLOCK_TOKENS + 1, &hit);
	ck_assert_uint_eq(hit, 200 * BLOCK_TOKENS);
	process_kill(other);
	expect_gone_soon(client, pid);

	expect_only_own_leases();
	ck_assert_uint_eq(stats().blocks_cached, before.blocks_cached + 200);
	ck_assert_uint_eq(stats().blocks_cached_held, 260); /* the test's own */
	books_balance(client);
	kv_seq_free(shares, NULL);
	for (int i = 0; i < 3; i++)
		kv_seq_free(seqs[i], NULL);
	ck_assert_uint_eq(stats().blocks_cached_held, 0);
	/* What it had published is still found, what it had only computed is not. */
	ck_assert_uint_eq(hit_of(pool, 4, 200 * BLOCK_TOKENS + 1), 200 * BLOCK_TOKENS);
	ck_assert_uint_eq(hit_of(pool, 5, 40 * BLOCK_TOKENS + 1), 0);
	must(kv_blocks_take(pool, N_BLOCKS, ids, TIMEOUT));
	must(kv_blocks_give(pool, N_BLOCKS, ids));
	must(kv_blocks_take(rows, 20, ids, TIMEOUT));
	kv_pool_close(rows);
}
END_TEST

/* 64 tokens reserved, 32 of them published, the rest never. */
static void half_done(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *mine = pool_new_mapped(own, "pool", 0);
	struct kv_seq *seq;
	const kv_block_id *own_ids;

	(void)arg;
	must(kv_seq_new(mine, &seq));
	must(kv_seq_reserve(seq, 64, TIMEOUT));
	must(kv_seq_append(seq, tokens_of(1, 64), 32));
	must(kv_seq_publish(seq, NULL));
	must(kv_seq_append(seq, tokens_of(1, 64) + 32, 32));
	must(kv_ping(own, TIMEOUT));
	kv_seq_blocks(seq, &own_ids);
	process_say(self, own_ids[2]);
	process_wait(self);
}

/* D22: only what was published can be found, also after its owner was killed. */
START_TEST(what_was_not_published_dies_with_its_process_whoever_gets_the_block)
{
	struct process *other = process_start(half_done, NULL);
	pid_t pid = other->pid;
	kv_block_id third = (kv_block_id)process_hear(other);
	bool came_back = false;

	ck_assert_uint_eq(hit_of(pool, 1, 65), 32);
	process_kill(other);
	expect_gone_soon(client, pid);
	ck_assert_uint_eq(hit_of(pool, 1, 65), 32);
	must(kv_blocks_take(pool, N_BLOCKS / 2, ids, TIMEOUT)); /* what came back last goes first */
	for (int i = 0; i < N_BLOCKS / 2; i++)
		came_back |= ids[i] == third;
	ck_assert(came_back);
	ck_assert_uint_eq(hit_of(pool, 1, 65), 32);
	must(kv_blocks_give(pool, N_BLOCKS / 2, ids));
}
END_TEST

/* Publishes and dies in the next instruction: the op stands in its ring, the daemon may be asleep. */
static void last_word(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *mine = pool_new(own, "pool", 0);
	struct kv_seq *seq = seq_new(mine, *(int32_t *)arg, 320, NULL);

	(void)self;
	must(kv_seq_publish(seq, NULL));
	raise(SIGKILL);
}

START_TEST(what_was_published_in_the_last_moment_counts)
{
	for (int32_t prompt = 0; prompt < 20; prompt++) {
		struct process *other = process_start(last_word, &prompt);
		pid_t pid = other->pid;

		process_died(other);
		expect_gone_soon(client, pid);
		expect(hit_of(pool, prompt, 321) == 320, "prompt %d", prompt);
	}
	expect_only_own_leases();
}
END_TEST

static uint32_t n_memfds(void)
{
	char path[300], target[100];
	struct dirent *e;
	uint32_t n = 0;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/fd", daemon_worker());
	dir = opendir(path);
	ck_assert_ptr_nonnull(dir);
	while ((e = readdir(dir))) {
		ssize_t size;

		snprintf(path, sizeof(path), "/proc/%d/fd/%s", daemon_worker(), e->d_name);
		size = readlink(path, target, sizeof(target));
		n += size > 7 && !memcmp(target, "/memfd:", 7);
	}
	closedir(dir);
	return n;
}

START_TEST(a_hundred_deaths_leave_no_descriptor_no_file_and_no_memory)
{
	uint32_t fds = 0, memfds = 0;
	uint64_t rss = 0;
	int32_t prompt = 1;

	for (int32_t i = 1; i <= 3; i++)
		kv_seq_free(seq_published(client, pool, i, 20 * BLOCK_TOKENS), NULL);
	for (int i = 0; i < 120; i++) {
		struct process *other =
			i % 2 ? process_start(rich, NULL) : process_start(half_done, &prompt);
		pid_t pid = other->pid;

		if (i % 3) /* or at any moment of its beginning */
			process_hear(other);
		process_kill(other);
		wait_until(session_is_gone(client, pid));
		if (i == 20) {
			wait_until(daemon_stats(client).n_clients == 2);
			fds = daemon_fds();
			memfds = n_memfds();
			rss = daemon_rss();
		}
	}
	wait_until(daemon_stats(client).n_clients == 2);
	wait_until(daemon_fds() == fds);
	ck_assert_uint_eq(n_memfds(), memfds);
	expect(daemon_rss() < rss + NO_GROWTH, "kvcached grew from %llu to %llu bytes",
	       (unsigned long long)rss, (unsigned long long)daemon_rss());
	expect_only_own_leases();
	ck_assert_uint_eq(stats().blocks_cached_held, 0);
	must(kv_blocks_take(pool, N_BLOCKS, ids, TIMEOUT));
	must(kv_blocks_give(pool, N_BLOCKS, ids));
}
END_TEST

static void in_two_pools(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *mine[3];

	(void)arg;
	for (int i = 0; i < 3; i++) {
		mine[i] = pool_new(own, i ? "second" : "pool", 0);
		must(kv_blocks_take(mine[i], 100, ids, TIMEOUT));
	}
	process_say(self, 0);
	process_wait(self);
}

START_TEST(a_death_ends_all_sessions_of_the_process)
{
	struct process *other = process_start(in_two_pools, NULL);
	pid_t pid = other->pid;

	process_hear(other);
	ck_assert_uint_eq(daemon_stats(client).n_sessions, 4);
	process_kill(other);
	expect_gone_soon(client, pid);
	wait_until(daemon_stats(client).n_sessions == 1);
	wait_until(daemon_stats(client).n_clients == 2);
	ck_assert_uint_eq(pool_stats(client, "second").blocks_leased, 0);
	ck_assert_uint_eq(stats().blocks_leased, 0);
}
END_TEST

/* ---- other ends ---- */

static void exits(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *mine = pool_new_mapped(own, "pool", 0);

	(void)self;
	(void)arg;
	must(kv_blocks_take(mine, 100, ids, TIMEOUT));
	seq_published(own, mine, 1, 320);
}

START_TEST(a_process_that_ends_without_closing_its_pool_gives_everything_back)
{
	struct process *other = process_start(exits, NULL);
	pid_t pid = other->pid;

	process_end(other);
	expect_gone_soon(client, pid);
	ck_assert_uint_eq(stats().blocks_leased, 0);
	ck_assert_uint_eq(stats().blocks_cached_held, 0);
	ck_assert_uint_eq(hit_of(pool, 1, 321), 320);
}
END_TEST

static void takes_some(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *mine = pool_new_mapped(own, "pool", 0);

	(void)arg;
	must(kv_blocks_take(mine, N_BLOCKS - 500, ids, TIMEOUT));
	for (int i = 0; i < N_BLOCKS - 500; i++)
		block_fill(mine, ids[i], 0x42);
	process_say(self, 0);
	process_wait(self);
	for (int i = 0; i < N_BLOCKS - 500; i++)
		expect(block_is(mine, ids[i], 0x42), "block %d was given to somebody else", ids[i]);
	must(kv_blocks_give(mine, N_BLOCKS - 500, ids));
	kv_pool_close(mine);
	kv_disconnect(own);
}

START_TEST(a_stopped_process_is_not_a_dead_one)
{
	struct process *other = process_start(takes_some, NULL);
	struct kv_session_stats s;

	process_hear(other);
	ck_assert_int_eq(kill(other->pid, SIGSTOP), 0);
	sleep_ms(300);
	ck_assert(session_stats(client, other->pid, &s));
	ck_assert_str_eq(s.state, "live");
	ck_assert_int_eq(kv_blocks_take(pool, 501, ids, 50 * KV_MSEC), KV_NO_ROOM);
	must(kv_blocks_take(pool, 100, ids, TIMEOUT));
	for (int i = 0; i < 100; i++)
		block_fill(pool, ids[i], 0x99);
	ck_assert_int_eq(kill(other->pid, SIGCONT), 0);
	process_go(other);
	process_end(other);
	must(kv_blocks_give(pool, 100, ids));
}
END_TEST

static void loses_its_connection(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *mine = pool_new_mapped(own, "pool", 0);

	(void)arg;
	must(kv_blocks_take(mine, 300, ids, TIMEOUT));
	seq_published(own, mine, 1, 320);
	cut_connections();
	process_say(self, 0);
	process_wait(self);
	/* It may go on reading and writing what it has; what needs the session is refused. */
	block_fill(mine, ids[0], 1);
	refused(kv_blocks_take(mine, N_BLOCKS, ids, TIMEOUT), -ECONNRESET, "take up again");
	must(kv_ping(own, TIMEOUT)); /* there is no session in this one: it is simply made anew */
	kv_pool_close(mine);
	kv_disconnect(own);
	process_say(self, 0);
	process_wait(self);
}

START_TEST(blocks_of_a_lost_connection_wait_for_the_end_of_the_process)
{
	struct process *other = process_start(loses_its_connection, NULL);
	pid_t pid = other->pid;
	struct kv_session_stats s;

	process_hear(other);
	wait_until(session_stats(client, pid, &s) && !strcmp(s.state, "dying"));
	ck_assert_uint_ge(stats().blocks_quarantined, 300);
	ck_assert_uint_eq(stats().blocks_leased, 0);
	ck_assert_uint_eq(stats().blocks_cached_held, 20);
	books_balance(client);
	/* It could still write them: nobody gets them. */
	ck_assert_int_eq(kv_blocks_take(pool, N_BLOCKS - 299, ids, 50 * KV_MSEC), KV_NO_ROOM);
	process_go(other);
	process_hear(other);
	ck_assert_uint_ge(stats().blocks_quarantined, 300); /* it closed its pool; it lives */
	process_kill(other);
	expect_gone_soon(client, pid);
	ck_assert_uint_eq(stats().blocks_quarantined, 0);
	ck_assert_uint_eq(stats().blocks_cached_held, 0);
	ck_assert_uint_eq(hit_of(pool, 1, 321), 320);
	must(kv_blocks_take(pool, N_BLOCKS, ids, TIMEOUT));
	must(kv_blocks_give(pool, N_BLOCKS, ids));
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/death");
	TCase *tcase = tcase_create("death");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, a_killed_client_gives_everything_back);
	tcase_add_test(tcase, what_was_not_published_dies_with_its_process_whoever_gets_the_block);
	tcase_add_test(tcase, what_was_published_in_the_last_moment_counts);
	tcase_add_test(tcase, a_hundred_deaths_leave_no_descriptor_no_file_and_no_memory);
	tcase_add_test(tcase, a_death_ends_all_sessions_of_the_process);
	tcase_add_test(tcase, a_process_that_ends_without_closing_its_pool_gives_everything_back);
	tcase_add_test(tcase, a_stopped_process_is_not_a_dead_one);
	tcase_add_test(tcase, blocks_of_a_lost_connection_wait_for_the_end_of_the_process);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
