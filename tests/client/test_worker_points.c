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

static const int times[] = {1, 4}; /* that it comes by */
static char once[200];
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
	with_another_pool(client);
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
	int nth = times[_i / N_POINTS];
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
	if (point == KV_KILLPOINT_worker_rebuilt)
		daemon_kill_worker();
	live(client);
	/* That it doesn't come by a second time in a life is no fault; the first it must. */
	expect(nth > 1 || access(once, F_OK) < 0, "no worker has come by %s", name);
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
			    whatever_point_a_worker_dies_at_its_clients_go_on_and_nothing_is_lost, 0,
			    N_POINTS * (int)(sizeof(times) / sizeof(times[0])));
	suite_add_tcase(s, tcase);
	return daemon_run_tests(s);
}
