/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client dies at each of the library's numbered points in turn (include/internal/killpoint.h), at the
 * first and later times that it comes there. Each time: all blocks can be had again at once, the
 * books balance, and who shared the pool with it has what it had.
 */
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "include/internal/killpoint.h"
#include "tests/client/hybrid.h"

#define N_BLOCKS 200
#define N_OWN	 40
#define PROMPT	 7 /* published by the test, too */
#define LEN	 (6 * BLOCK_TOKENS)
#define PROMISED	  8
#define FIRST_OF_GRANULES (KV_KILLPOINT_client_closed + 1)
#define LAST		  (KV_KILLPOINT_worker_book_written - 1)

static struct kv_client *client;
static struct kv_pool *pool;
static struct kv_seq *shared;
static kv_block_id own[N_OWN];

static void batch_copies(struct kv_pool *a)
{
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = 1, .max_tokens = 1,
		   .max_blocks_per_seq = 1);
	struct kv_batch *batch;

	must(kv_batch_new(a, &sizes, &batch));
	must(kv_batch_build(batch, NULL, 0, 0, 0));
	expect(kv_batch_data(batch)->n_copies == 1, "%u copies", kv_batch_data(batch)->n_copies);
	must(kv_batch_copy(batch, NULL));
	kv_batch_free(batch);
}

/* The first tokens of a cached block by a copy. */
static void finds_a_part(struct kv_pool *a)
{
	int32_t tokens[LEN];
	struct kv_seq *seq;
	size_t hit;

	memcpy(tokens, tokens_of(PROMPT, LEN), sizeof(tokens));
	tokens[LEN - 6] = -2;
	must(kv_seq_new(a, &seq));
	must(kv_seq_lookup_partial(seq, tokens, LEN, &hit));
	expect(hit == LEN - 6, "hit %zu", hit);
	must(kv_seq_reserve(seq, LEN, TIMEOUT));
	batch_copies(a);
	must(kv_seq_append(seq, tokens + hit, LEN - hit));
	must(kv_seq_publish(seq, NULL));
	kv_seq_free(seq, NULL);
}

/* One session promises, the other waits in vain; one is preempted and goes on. */
static void promises_and_steps_back(struct kv_client *mine, struct kv_pool *a)
{
	struct kv_pool *b = pool_new(mine, "pool", 0);
	struct kv_seq *promising, *following, *seq;
	size_t n;

	must(kv_seq_new(a, &promising));
	must(kv_seq_promise(promising, tokens_of(PROMISED, LEN), LEN, KV_SEC, NULL));
	must(kv_seq_new(b, &following));
	expect(kv_seq_follow(following, tokens_of(PROMISED, LEN), LEN, 3 * KV_MSEC, &n) ==
		       KV_PROMISED,
	       "nobody has promised it");
	kv_seq_free(following, NULL);
	kv_seq_free(promising, NULL);
	kv_pool_close(b);

	seq = seq_published(mine, a, (int32_t)getpid() + 1, LEN + 3);
	must(kv_seq_preempt(seq, NULL));
	must(kv_seq_resume(seq, LEN + 4, TIMEOUT, &n));
	kv_seq_free(seq, NULL);
}

/* A sequence in three pools, whose blocks and states are shown one after the other. */
static void lives_in_groups(void)
{
	struct model model;
	struct kv_gseq *seq;
	int32_t tokens[24];

	memcpy(tokens, tokens_of((int32_t)getpid(), 24), sizeof(tokens));
	model_open(&model, 64, 16, 0);
	must(kv_gseq_new(model.groups, &seq));
	must(kv_gseq_promise(seq, tokens, 24, KV_SEC, NULL));
	for (size_t n = 8; n <= 24; n += 8) {
		must(kv_gseq_reserve(seq, n, TIMEOUT));
		must(kv_gseq_append(seq, tokens + n - 8, 8));
		model_run(&model, seq, tokens, 8);
		must(kv_gseq_publish(seq, NULL));
		must(kv_gseq_done(seq, n, NULL));
	}
	must(kv_gseq_preempt(seq, NULL));
	kv_gseq_free(seq, NULL);
	model_close(&model);
}

/* Everything a client does, so that it comes by every point. */
static void whole_life(void)
{
	struct kv_client *mine = client_new();
	struct kv_pool *a = pool_new_mapped(mine, "pool", 0);
	struct kv_seq *found, *fresh, *forked, *twin;
	kv_block_id ids[60];
	size_t hit;

	must(kv_blocks_take(a, 60, ids, TIMEOUT));
	must(kv_blocks_give(a, 60, ids));
	/* Computes what is cached already, and hears of it when it is asked to publish again. */
	must(kv_seq_new(a, &twin));
	must(kv_seq_reserve(twin, LEN, TIMEOUT));
	must(kv_seq_append(twin, tokens_of(PROMPT, LEN), LEN));
	must(kv_seq_publish(twin, NULL));
	must(kv_ping(mine, TIMEOUT));
	must(kv_seq_publish(twin, NULL));
	found = seq_new(a, PROMPT, LEN + 1, &hit);
	expect(hit == LEN, "hit %zu", hit);
	fresh = seq_published(mine, a, (int32_t)getpid(), LEN + 5);
	must(kv_seq_fork(fresh, &forked));
	must(kv_seq_reserve(forked, LEN + 20, TIMEOUT));
	must(kv_seq_append(forked, tokens_of(3, 10), 10));
	must(kv_seq_rollback(forked, LEN - BLOCK_TOKENS, NULL));
	kv_seq_free(forked, NULL);
	kv_seq_free(found, NULL);
	kv_seq_free(twin, NULL);
	kv_seq_free(fresh, NULL);
	finds_a_part(a);
	promises_and_steps_back(mine, a);
	lives_in_groups();
	kv_pool_close(a);
	kv_disconnect(mine);
}

/* In another process, which names what to die of in its environment. Return: its wait status. */
static int life(const char *name, const char *value, int64_t *ret_end)
{
	struct pollfd end = {.events = POLLIN};
	pid_t pid = fork();
	int status;

	ck_assert_int_ge(pid, 0);
	if (!pid) {
		setenv(name, value, 1);
		whole_life();
		_exit(0);
	}
	end.fd = (int)syscall(SYS_pidfd_open, pid, 0);
	expect(poll(&end, 1, DEADLINE_MS) == 1, "%s: it hangs", value);
	*ret_end = now_ns();
	close(end.fd);
	expect(waitpid(pid, &status, 0) == pid, "waitpid");
	return status;
}

static void start(bool isolate)
{
	daemon_start("--host", "64M", isolate ? "--isolate" : NULL);
	client = client_new();
	pool = pool_new_mapped(client, "pool", N_BLOCKS);
	must(kv_blocks_take(pool, N_OWN, own, TIMEOUT));
	for (int i = 0; i < N_OWN; i++)
		block_fill(pool, own[i], i);
	shared = seq_published(client, pool, PROMPT, LEN);
}

static void setup(void)
{
	start(false);
}

static void setup_isolated(void)
{
	start(true);
}

static void teardown(void)
{
	kv_seq_free(shared, NULL);
	kv_pool_close(pool);
	kv_disconnect(client);
	daemon_stop();
}

static void comes_by(int first, int last)
{
	char path[200];
	unsigned char *seen;
	int64_t end;
	int fd;

	snprintf(path, sizeof(path), "%s/seen", daemon_folder());
	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	ck_assert_int_eq(ftruncate(fd, KV_N_KILLPOINTS), 0);
	seen = mmap(NULL, KV_N_KILLPOINTS, PROT_READ, MAP_SHARED, fd, 0);
	close(fd);
	ck_assert_int_eq(life("KVCACHED_KILL_SEEN", path, &end), 0);
	for (int i = first; i <= last; i++)
		expect(seen[i], "nobody has come by %s", kv_killpoint_name((enum kv_killpoint)i));
	munmap(seen, KV_N_KILLPOINTS);
}

START_TEST(an_ordinary_life_comes_by_every_point)
{
	comes_by(0, KV_KILLPOINT_client_closed);
}
END_TEST

START_TEST(a_life_with_granules_comes_by_their_points)
{
	comes_by(FIRST_OF_GRANULES, LAST);
}
END_TEST

/* Nobody but the test has anything: whoever asks for all the rest gets it. */
static int64_t reusable(void)
{
	static kv_block_id rest[N_BLOCKS];
	uint32_t n = N_BLOCKS - N_OWN - LEN / BLOCK_TOKENS;

	must(kv_blocks_take(pool, n, rest, TIMEOUT));
	must(kv_blocks_give(pool, n, rest));
	return now_ns();
}

static int compare(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return x < y ? -1 : x > y;
}

/* What the dead one promised nobody waits for, and what it had in other pools is free. */
static void nothing_is_left(const char *value)
{
	struct kv_seq *seq;
	void *pools;
	size_t n;
	int r;

	wait_until(daemon_stats(client).n_clients == 2);
	must(kv_seq_new(pool, &seq));
	r = kv_seq_follow(seq, tokens_of(PROMISED, LEN), LEN, TIMEOUT, &n);
	expect(!r, "%s: its promise stands", value);
	kv_seq_free(seq, NULL);
	must(kv_stats(client, KV_STAT_POOL, &pools, &n, TIMEOUT));
	for (size_t i = 0; i < n; i++) {
		const struct kv_pool_stats *s = (const struct kv_pool_stats *)pools + i;

		expect(!strcmp(s->name, "pool") || !(s->blocks_leased || s->blocks_cached_held),
		       "%s: pool '%s': %llu leased, %llu held", value, s->name,
		       (unsigned long long)s->blocks_leased,
		       (unsigned long long)s->blocks_cached_held);
	}
	free(pools);
}

static void deaths(int first, int last)
{
	static const int passes[] = {1, 2, 3, 5, 8, 13, 30};
	static int64_t times[KV_N_KILLPOINTS * 8];
	int n = 0, n_whole = 0;

	for (int point = first; point <= last; point++) {
		const char *name = kv_killpoint_name((enum kv_killpoint)point);

		for (size_t i = 0; i < sizeof(passes) / sizeof(passes[0]); i++) {
			char value[100];
			int64_t end;
			int status;

			snprintf(value, sizeof(value), "%s:%d", name, passes[i]);
			status = life("KVCACHED_KILL_POINT", value, &end);
			expect(status == SIGKILL || (status == 0 && passes[i] > 1),
			       "%s: status %#x", value, status);
			times[n++] = reusable() - end;
			books_balance(client);
			for (int k = 0; k < N_OWN; k++)
				expect(block_is(pool, own[k], k), "%s: block %d", value, own[k]);
			expect(hit_of(pool, PROMPT, LEN + 1) == LEN, "%s: a prefix is lost", value);
			nothing_is_left(value);
			n_whole += !status;
			if (!status)
				break; /* it doesn't come there so often */
		}
	}
	qsort(times, (size_t)n, sizeof(times[0]), compare);
	printf("%d deaths at %d points; from the pidfd to all blocks taken again: median %.2f ms, "
	       "99%% "
	       "%.2f ms, longest %.2f ms\n",
	       n - n_whole, last - first + 1, (double)times[n / 2] / 1e6,
	       (double)times[n * 99 / 100] / 1e6, (double)times[n - 1] / 1e6);
	ck_assert_int_ge(n - n_whole, 2 * (last - first));
	wait_until(daemon_stats(client).n_clients == 2);
}

START_TEST(whatever_point_a_client_dies_at_its_blocks_come_back_and_nobody_else_loses_any)
{
	deaths(0, KV_KILLPOINT_client_closed);
}
END_TEST

START_TEST(wherever_a_client_dies_at_its_granules_its_blocks_come_back)
{
	deaths(FIRST_OF_GRANULES, LAST);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/killpoints");
	TCase *tcase = tcase_create("killpoints"), *isolated = tcase_create("isolated");

	tcase_set_timeout(tcase, 120);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, an_ordinary_life_comes_by_every_point);
	tcase_add_test(
		tcase,
		whatever_point_a_client_dies_at_its_blocks_come_back_and_nobody_else_loses_any);
	suite_add_tcase(s, tcase);
	tcase_set_timeout(isolated, 120);
	tcase_add_checked_fixture(isolated, setup_isolated, teardown);
	tcase_add_test(isolated, a_life_with_granules_comes_by_their_points);
	tcase_add_test(isolated, wherever_a_client_dies_at_its_granules_its_blocks_come_back);
	suite_add_tcase(s, isolated);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
