/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The worker dies at each numbered point of what it writes down (include/internal/killpoint.h), at the first and
 * at later times that it comes there, while a client does all there is to do. Each time no call of the
 * client fails, the books balance, nothing is lost or anybody else's, and what was cached is found.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "include/internal/killpoint.h"
#include "tests/support/client.h"
#include "tests/support/process.h"
#include "tests/support/raw.h"

#define N_BLOCKS 2000
#define N_KEPT	 200
#define N_SCATTERED 3000 /* blocks */
#define FIRST	 KV_KILLPOINT_worker_book_written
#define N_POINTS (KV_N_KILLPOINTS - FIRST)

static char once[200];
static bool kill_midway; /* once more: the worker after it may die while it takes over */
static kv_block_id ids[8000], kept[N_KEPT];

/* Is hung up on: what it leases is set aside until it ends. A worker may die meanwhile. */
static void breaks_the_rules(struct process *self, void *arg)
{
	int fd = raw_connect();
	struct kv_msg_hello hello = {.name = "raw", .version = "0.1.0"};
	struct kv_msg_lease lease = {.n = 10};

	(void)arg;
	raw_send(fd, KV_MSG_HELLO, (char *)&hello + sizeof(hello.head),
		 sizeof(hello) - sizeof(hello.head));
	if (raw_receive(fd, NULL) && raw_open(fd, "one", 0, NULL)) {
		raw_send(fd, KV_MSG_LEASE, (char *)&lease + sizeof(lease.head),
			 sizeof(lease) - sizeof(lease.head));
		raw_receive(fd, NULL);
		raw_send(fd, 999, NULL, 0);
		raw_receive(fd, NULL);
	}
	process_say(self, 0);
	process_wait(self);
}

static void with_another_pool(struct kv_client *client)
{
	struct kv_pool *two = pool_new_mapped(client, "two", 0);
	struct kv_pool_info info;
	uint32_t n;

	kv_pool_info(two, &info);
	n = info.max_blocks < 5000 ? (uint32_t)info.max_blocks : 5000;
	/* More than is free: extents change hands. */
	if (!kv_blocks_take(two, n, ids, TIMEOUT))
		must(kv_blocks_give(two, n, ids));
	kv_pool_close(two);
	must(kv_pool_drop(client, "two", TIMEOUT));
}

/* Every second block of a pool is cached: they move together. */
static void with_a_pool_that_is_compacted(struct kv_client *client)
{
	struct kv_pool *three = pool_new_mapped(client, "three", 0);
	static struct kv_seq *seqs[N_SCATTERED];

	for (int32_t i = 0; i < N_SCATTERED; i++)
		seqs[i] = seq_new(three, 100 + i, BLOCK_TOKENS, NULL);
	for (int32_t i = 0; i < N_SCATTERED; i++) {
		if (i & 1)
			must(kv_seq_publish(seqs[i], NULL));
		kv_seq_free(seqs[i], NULL);
	}
	/* What a client keeps ready, how much and from where, would keep extents from moving. */
	kv_pool_close(three);
	wait_until(!pool_stats(client, "three").blocks_leased);
	must(kv_pool_compact(client, "three", 0, TIMEOUT));
	wait_until(!pool_stats(client, "three").compacting);
	must(kv_pool_drop(client, "three", TIMEOUT));
}

/* Of one who doesn't ask again when the worker has died before it answered. */
static void change_without_a_word(const char *name)
{
	struct kv_msg_pool_set set = {.change = KV_LIMIT_MIN | KV_LIMIT_MAX | KV_LIMIT_WEIGHT,
				      .weight = 2,
				      .min_bytes = 1 << 20,
				      .max_bytes = 2 << 20};
	int fd = raw_hello();

	strcpy(set.name, name);
	raw_send(fd, KV_MSG_POOL_SET, (char *)&set + sizeof(set.head), sizeof(set) - sizeof(set.head));
	raw_receive(fd, NULL);
	close(fd);
}

/* Who asks hears of what became of it, and all of it became of it or nothing. */
static void with_other_limits(struct kv_client *client)
{
	struct kv_pool *four = pool_new_mapped(client, "four", 1000);
	struct kv_pool_stats s = pool_stats(client, "four");
	KV_OPTIONS(kv_pool_limits, limits, .change = KV_LIMIT_MIN | KV_LIMIT_MAX | KV_LIMIT_WEIGHT,
		   .min_bytes = 3 << 20, .max_bytes = 6 << 20, .weight = 7,
		   .revision = s.limits_revision);
	uint64_t revision, epoch;
	struct kv_pool_info info;

	must(kv_pool_set(client, "four", &limits, &revision, TIMEOUT));
	s = pool_stats(client, "four");
	kv_pool_info(four, &info);
	expect(revision == limits.revision + 1 && s.limits_revision == revision, "revision %llu",
	       (unsigned long long)s.limits_revision);
	expect(s.min_bytes == 3 << 20 && s.max_bytes == 6 << 20 && s.weight == 7,
	       "min %llu, max %llu, weight %llu", (unsigned long long)s.min_bytes,
	       (unsigned long long)s.max_bytes, (unsigned long long)s.weight);
	expect(info.max_blocks == (6 << 20) / BLOCK_BYTES - 1, "max_blocks %llu",
	       (unsigned long long)info.max_blocks);

	change_without_a_word("four");
	s = pool_stats(client, "four");
	expect((s.min_bytes == 3 << 20 && s.max_bytes == 6 << 20 && s.weight == 7) ||
		       (s.min_bytes == 1 << 20 && s.max_bytes == 2 << 20 && s.weight == 2),
	       "min %llu, max %llu, weight %llu", (unsigned long long)s.min_bytes,
	       (unsigned long long)s.max_bytes, (unsigned long long)s.weight);

	kv_seq_free(seq_published(client, four, 1, 10 * BLOCK_TOKENS), NULL);
	must(kv_pool_new_epoch(client, "four", &epoch, NULL, TIMEOUT));
	/* Asked twice, two have ended. */
	expect(kv_pool_epoch(four) == epoch && (epoch == 1 || epoch == 2), "epoch %llu",
	       (unsigned long long)epoch);
	kv_pool_join_epoch(four);
	ck_assert_uint_eq(hit_of(four, 1, 10 * BLOCK_TOKENS + 1), 0);
	kv_seq_free(seq_published(client, four, 1, 10 * BLOCK_TOKENS), NULL);
	ck_assert_uint_eq(hit_of(four, 1, 10 * BLOCK_TOKENS + 1), 10 * BLOCK_TOKENS);
	kv_pool_close(four);
	must(kv_pool_drop(client, "four", TIMEOUT));
}

/* Takes one after the other until more have come for the magazine, which nobody has looked at yet.
 */
static uint32_t take_until_more_is_posted(struct kv_client *client, struct kv_pool *pool)
{
	struct kv_session_stats s;
	uint64_t before = 0;
	uint32_t n = 0;

	do {
		before = n ? s.blocks_idle : UINT64_MAX;
		must(kv_blocks_take(pool, 1, &ids[n++], TIMEOUT));
		must(kv_ping(client, TIMEOUT));
		ck_assert(session_stats(client, getpid(), &s));
	} while (s.blocks_idle <= before && n < N_BLOCKS / 2);
	return n;
}

/* Another worker calls back what a session has idle when that session has made a call. */
static void take_what_the_other_has_idle(struct kv_pool *rival, struct kv_pool *other, uint32_t n,
					 kv_block_id *to)
{
	int64_t deadline = now_ns() + TIMEOUT;

	while (kv_blocks_take(rival, n, to, 200 * KV_MSEC)) {
		expect(now_ns() < deadline, "idle leases aren't called back");
		ck_assert_int_eq(kv_blocks_take(other, N_BLOCKS, ids + N_BLOCKS, 0), KV_NO_ROOM);
	}
}

/* Another session takes what @pool has idle, in its stack and its ring, and asks for more than it
 * may have. */
static void with_a_rival(struct kv_client *client, struct kv_pool *pool)
{
	uint32_t n = N_BLOCKS - N_KEPT - 20, most = n * 3 / 4,
		 n_taken = take_until_more_is_posted(client, pool);
	struct kv_pool *rival = pool_new(client, "one", 0);

	take_what_the_other_has_idle(rival, pool, n - n_taken, ids + n_taken);
	must(kv_blocks_give(rival, n - n_taken, ids + n_taken));
	must(kv_blocks_give(pool, n_taken, ids));
	take_what_the_other_has_idle(rival, pool, n, ids);
	must(kv_blocks_give(rival, n, ids));
	/* The first has more than its half, and hears that the other waits. */
	must(kv_blocks_take(pool, most, ids, TIMEOUT));
	ck_assert_int_eq(kv_blocks_take(rival, n - most + 1, ids + most, 50 * KV_MSEC), KV_NO_ROOM);
	must(kv_blocks_give(pool, most, ids));
	kv_pool_close(rival);
	wait_until(pool_stats(client, "one").n_sessions == 1);
}

static void live(struct kv_client *client)
{
	struct kv_pool *one = pool_new_mapped(client, "one", N_BLOCKS);
	struct process *other;
	struct kv_seq *held, *twin;
	size_t hit;

	must(kv_blocks_take(one, N_KEPT, kept, TIMEOUT));
	for (int i = 0; i < N_KEPT; i++)
		block_fill(one, kept[i], i & 0xff);
	held = seq_published(client, one, 1, 20 * BLOCK_TOKENS);
	must(kv_seq_new(one, &twin));
	must(kv_seq_reserve(twin, 20 * BLOCK_TOKENS, TIMEOUT));
	must(kv_seq_append(twin, tokens_of(1, 20 * BLOCK_TOKENS), 20 * BLOCK_TOKENS));
	must(kv_seq_publish(twin, NULL));
	must(kv_ping(client, TIMEOUT));
	must(kv_seq_publish(twin, NULL));
	kv_seq_free(twin, NULL);
	for (int32_t prompt = 2; prompt < 12; prompt++)
		kv_seq_free(seq_published(client, one, prompt, 30 * BLOCK_TOKENS), NULL);

	other = process_start(breaks_the_rules, NULL);
	process_hear(other);
	process_kill(other);
	wait_until(pool_stats(client, "one").n_sessions == 1);
	if (kill_midway)
		daemon_kill_worker();
	with_another_pool(client);
	with_other_limits(client);
	with_a_rival(client, one);
	with_a_pool_that_is_compacted(client);

	/* All that isn't held: evicts everything else. */
	must(kv_blocks_take(one, N_BLOCKS - N_KEPT - 20, ids, TIMEOUT));
	must(kv_blocks_give(one, N_BLOCKS - N_KEPT - 20, ids));
	must(kv_ping(client, TIMEOUT));
	books_balance(client);
	for (int i = 0; i < N_KEPT; i++)
		expect(block_is(one, kept[i], i & 0xff), "block %d was given to somebody else",
		       kept[i]);
	kv_seq_free(seq_new(one, 1, 20 * BLOCK_TOKENS + 1, &hit), NULL);
	ck_assert_uint_eq(hit, 20 * BLOCK_TOKENS);
	must(kv_blocks_give(one, N_KEPT, kept));
	kv_seq_free(held, NULL);
	kv_pool_close(one);
	wait_until(pool_stats(client, "one").n_sessions == 0);
}

START_TEST(whatever_point_a_worker_dies_at_its_clients_go_on_and_nothing_is_lost)
{
	enum kv_killpoint point = FIRST + (enum kv_killpoint)(_i % N_POINTS);
	const char *name = kv_killpoint_name(point);
	/* Limits are written down when a pool is made, too: three of them, before they change. */
	bool later = _i >= N_POINTS, is_limits = point == KV_KILLPOINT_worker_limits_saved ||
						 point == KV_KILLPOINT_worker_limits_shown;
	int nth = is_limits ? 4 + later : later ? 4 : 1;
	struct kv_client *client;
	struct kv_pool_stats s;
	char text[100];
	int fd;

	snprintf(once, sizeof(once), "%s/once", daemon_folder());
	fd = open(once, O_CREAT | O_WRONLY, 0600);
	ck_assert_int_ge(fd, 0);
	close(fd);
	snprintf(text, sizeof(text), "%s:%d", name, nth);
	setenv("KVCACHED_KILL_POINT", text, 1);
	setenv("KVCACHED_KILL_ONCE", once, 1);
	/* The last points are of memory that changes hands by granules. */
	daemon_start("--host", "16M", "--log-level", "error",
		     point > KV_KILLPOINT_worker_rebuilt ? "--isolate" : NULL);
	unsetenv("KVCACHED_KILL_POINT");
	unsetenv("KVCACHED_KILL_ONCE");
	client = client_new();
	kill_midway =
		point >= KV_KILLPOINT_worker_pools_taken && point <= KV_KILLPOINT_worker_rebuilt;
	live(client);
	/* That it doesn't come by a second time in a life is no fault; the first it must. */
	expect((later && !is_limits) || access(once, F_OK) < 0, "no worker has come by %s", name);
	unlink(once);

	s = pool_stats(client, "one");
	ck_assert_uint_eq(s.blocks_leased, 0);
	ck_assert_uint_eq(s.blocks_quarantined, 0);
	ck_assert_uint_eq(s.blocks_cached_held, 0);
	ck_assert_uint_ge(s.blocks_cached, 20);
	must(kv_pool_drop(client, "one", TIMEOUT));
	wait_until(gpu_stats(client).bytes_free == 16 << 20);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}
END_TEST

int main(void)
{
	Suite *s = suite_create("client/worker_points");
	TCase *tcase = tcase_create("worker_points");

	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(tcase,
			    whatever_point_a_worker_dies_at_its_clients_go_on_and_nothing_is_lost,
			    0, 2 * N_POINTS);
	suite_add_tcase(s, tcase);
	return daemon_run_tests(s);
}
