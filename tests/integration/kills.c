/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kills [COUNT]: clients are killed one after the other, each at a random moment of a busy life;
 * 200 here, 10,000 by hand. After each: all that it had can be taken by another, the books balance,
 * and its neighbour's bytes are what they were. At the end the times from the pidfd to reuse are
 * printed, and the daemon has no descriptor more than at the start, and no more memory.
 */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/client.h"

#define N_BLOCKS 300
#define N_OWN	 50

static int count = 200;
static struct kv_client *client;
static struct kv_pool *pool;
static kv_block_id own[N_OWN];

/* Opens, takes, gives, looks up, computes, publishes, forks, closes, again and again. */
static void live(unsigned seed)
{
	struct kv_client *mine = client_new();

	for (;;) {
		struct kv_pool *a = pool_new_mapped(mine, "pool", 0);

		for (int round = 0; round < 4; round++) {
			kv_block_id ids[40];
			struct kv_seq *seq, *other;
			size_t n = 1 + (size_t)rand_r(&seed) % 600;

			if (!kv_blocks_take(a, 40, ids, KV_MSEC)) {
				for (int i = 0; i < 40; i++)
					block_fill(a, ids[i], 0xee);
				must(kv_blocks_give(a, 40, ids));
			}
			seq = seq_new(a, rand_r(&seed) % 5, n, NULL);
			must(kv_seq_publish(seq, NULL));
			must(kv_seq_fork(seq, &other));
			if (round % 2)
				must(kv_ping(mine, TIMEOUT));
			must(kv_seq_rollback(seq, n / 2, NULL));
			kv_seq_free(other, NULL);
			kv_seq_free(seq, NULL);
		}
		kv_pool_close(a);
	}
}

static pid_t start_client(unsigned seed)
{
	pid_t pid = fork();

	expect(pid >= 0, "fork");
	if (!pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		live(seed);
	}
	return pid;
}

/* Return: from its pidfd to all that it may have had in other hands. */
static int64_t kill_one(unsigned *seed)
{
	static kv_block_id rest[N_BLOCKS];
	pid_t pid = start_client((unsigned)rand_r(seed));
	struct pollfd end = {.fd = (int)syscall(SYS_pidfd_open, pid, 0), .events = POLLIN};
	int64_t dead, reused;

	usleep((unsigned)rand_r(seed) % 6000);
	kill(pid, SIGKILL);
	expect(poll(&end, 1, DEADLINE_MS) == 1, "it doesn't die");
	dead = now_ns();
	must(kv_blocks_take(pool, N_BLOCKS - N_OWN, rest, TIMEOUT));
	reused = now_ns();
	close(end.fd);
	expect(waitpid(pid, NULL, 0) == pid, "waitpid");
	must(kv_blocks_give(pool, N_BLOCKS - N_OWN, rest));
	books_balance(client);
	for (int i = 0; i < N_OWN; i++)
		expect(block_is(pool, own[i], i), "block %d was written by another", own[i]);
	return reused - dead;
}

static int compare(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return x < y ? -1 : x > y;
}

START_TEST(however_many_clients_are_killed_nothing_is_lost)
{
	int64_t *times = calloc((size_t)count, sizeof(*times)), start = now_ns();
	unsigned seed = (unsigned)start;
	uint32_t fds, in_time = 0;
	uint64_t rss;

	ck_assert_ptr_nonnull(times);
	printf("seed %u\n", seed);
	daemon_start("--host", "16M");
	client = client_new();
	pool = pool_new_mapped(client, "pool", N_BLOCKS);
	must(kv_blocks_take(pool, N_OWN, own, TIMEOUT));
	for (int i = 0; i < N_OWN; i++)
		block_fill(pool, own[i], i);
	for (int i = 0; i < 20; i++)
		kill_one(&seed);
	wait_until(daemon_stats(client).n_clients == 2);
	fds = daemon_fds();
	rss = daemon_rss();
	for (int i = 0; i < count; i++) {
		times[i] = kill_one(&seed);
		in_time += times[i] <= 5 * KV_MSEC;
	}
	wait_until(daemon_stats(client).n_clients == 2);
	qsort(times, (size_t)count, sizeof(*times), compare);
	printf("%d clients killed in %lld s; from the pidfd to reuse: median %.2f ms, 95%% %.2f "
	       "ms, 99%% %.2f ms, longest %.2f ms, %u within 5 ms; descriptors %+d, resident "
	       "bytes %+lld\n",
	       count, (long long)((now_ns() - start) / KV_SEC), (double)times[count / 2] / 1e6,
	       (double)times[count * 95 / 100] / 1e6, (double)times[count * 99 / 100] / 1e6,
	       (double)times[count - 1] / 1e6, in_time, (int)daemon_fds() - (int)fds,
	       (long long)daemon_rss() - (long long)rss);
	ck_assert_uint_eq(daemon_fds(), fds);
	expect(daemon_rss() < rss + NO_GROWTH, "kvcached has grown");
	must(kv_blocks_give(pool, N_OWN, own));
	kv_pool_close(pool);
	kv_disconnect(client);
	daemon_stop();
	free(times);
}
END_TEST

int main(int argc, char **argv)
{
	Suite *s = suite_create("integration/kills");
	TCase *tcase = tcase_create("kills");

	if (argc > 1)
		count = atoi(argv[1]);
	tcase_set_timeout(tcase, 60 + count);
	tcase_add_test(tcase, however_many_clients_are_killed_nothing_is_lost);
	suite_add_tcase(s, tcase);
	return daemon_run_tests(s);
}
