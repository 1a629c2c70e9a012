/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `kvctl pool set NAME --min --max --weight` while a client is at work and another one sleeps: each limit holds
 * up and down from when kvctl has ended, for both, and neither makes a call because of it.
 *
 * The one at work goes round: it takes all it can get, gives it back, and says how much it was. What it
 * began to take under an older limit it may keep, so the first round that counts is the next one.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "tests/support/client.h"
#include "tests/support/process.h"

#define MIB	   ((uint64_t)1 << 20)
#define BLOCKS	   512 /* of a MiB */
#define ALL	   (64 * BLOCKS)
#define AT_ONCE_MS 2000 /* of which nothing is waiting: rounds of a busy machine */

/* Processes of a test see the same. */
struct seen {
	atomic_uint round;	/* how many are over */
	atomic_uint peak;	/* blocks that the last one had at once */
	atomic_uint max_blocks; /* kv_pool_info() in that round */
	atomic_bool stop;
};

static struct seen *seen;
static struct kv_client *client;
static struct process *busy, *idle;

/* Return: the time when kvctl had ended, and with it the change had been made. */
static int64_t kvctl_set(const char *what)
{
	char command[512];
	int status;

	snprintf(command, sizeof(command), "%s -s %s -t 20 pool set %s > /dev/null", getenv("KVCTL_BIN"),
		 daemon_socket(), what);
	status = system(command);
	expect(WIFEXITED(status) && !WEXITSTATUS(status), "kvctl pool set %s: status %#x", what, status);
	return now_ns();
}

/* @timeout: for each step; what comes from others is zeroed first */
static uint32_t take_all(struct kv_pool *pool, kv_block_id *ids, int64_t timeout)
{
	uint32_t n = 0, step = BLOCKS;

	while (step) {
		if (n + step <= ALL && kv_blocks_take(pool, step, ids + n, timeout) == 0)
			n += step;
		else
			step /= 2;
	}
	return n;
}

static void goes_round(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool = pool_new(own, arg, 0);
	static kv_block_id ids[ALL];

	process_say(self, 0);
	while (!atomic_load(&seen->stop)) {
		uint32_t n = take_all(pool, ids, 0);
		struct kv_pool_info info;

		kv_pool_info(pool, &info);
		must(kv_blocks_give(pool, n, ids));
		atomic_store(&seen->peak, n);
		atomic_store(&seen->max_blocks, (unsigned)info.max_blocks);
		atomic_fetch_add(&seen->round, 1);
	}
	kv_pool_close(pool);
	kv_disconnect(own);
}

/* Fills its pool with what is cached, keeps leases at hand, and sleeps; woken it says what it may have. */
static void sleeps(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool = pool_new(own, arg, 0);
	static kv_block_id ids[ALL];

	for (int32_t i = 0; i < 40; i++)
		kv_seq_free(seq_published(own, pool, 1 + i, BLOCKS * BLOCK_TOKENS), NULL);
	for (int i = 0; i < 20; i++) {
		must(kv_blocks_take(pool, 120, ids, TIMEOUT));
		must(kv_blocks_give(pool, 120, ids));
	}
	process_say(self, 0);
	for (;;) {
		struct kv_pool_info info;
		uint32_t n;

		process_wait(self);
		if (atomic_load(&seen->stop))
			break;
		kv_pool_info(pool, &info);
		n = take_all(pool, ids, 50 * KV_MSEC);
		process_say(self, (int64_t)info.max_blocks);
		process_say(self, n);
		process_wait(self);
		must(kv_blocks_give(pool, n, ids));
		process_say(self, 0);
	}
	kv_pool_close(pool);
	kv_disconnect(own);
}

/* The first round that began after now, and what it had. */
static uint32_t next_peak(void)
{
	unsigned round = atomic_load(&seen->round);

	wait_until(atomic_load(&seen->round) >= round + 2);
	return atomic_load(&seen->peak);
}

/* A round of @n blocks at least ends within AT_ONCE_MS of @set. */
static void rises_to(uint32_t n, int64_t set)
{
	wait_until(atomic_load(&seen->peak) >= n);
	expect(now_ns() - set < AT_ONCE_MS * KV_MSEC, "%u blocks after %lld ms", n,
	       (long long)((now_ns() - set) / KV_MSEC));
}

/* The sleeper looks and takes all it can; @ret_max: what it may have. Return: blocks it got. */
static uint32_t woken(uint64_t *ret_max)
{
	uint32_t n;

	process_go(idle);
	*ret_max = (uint64_t)process_hear(idle);
	n = (uint32_t)process_hear(idle);
	return n;
}

static void sleeps_again(void)
{
	process_go(idle);
	process_hear(idle);
}

static void setup(void)
{
	seen = mmap(NULL, sizeof(*seen), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	ck_assert(seen != MAP_FAILED);
	daemon_start("--host", "64M");
	client = client_new();
}

static void teardown(void)
{
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

static void start(const char *name_of_idle, const char *name_of_busy)
{
	idle = process_start(sleeps, (void *)name_of_idle);
	process_hear(idle);
	busy = process_start(goes_round, (void *)name_of_busy);
	process_hear(busy);
	next_peak();
}

static void end(void)
{
	atomic_store(&seen->stop, true);
	process_go(idle);
	process_end(idle);
	process_end(busy);
}

/* What the sleeper has above its maximum leaves while it sleeps; the other's next round keeps to its own. */
START_TEST(kvctl_pool_set_max_is_obeyed_at_once_by_an_idle_and_a_busy_client_down_and_up)
{
	struct kv_session_stats s;
	uint64_t max;
	int64_t set;
	uint32_t n;

	start("idle", "busy");
	kvctl_set("idle --max 4M");
	ck_assert_uint_le(pool_stats(client, "idle").extent_bytes, 4 * MIB);
	ck_assert(session_stats(client, idle->pid, &s));
	ck_assert_uint_le(s.blocks_leased + s.blocks_held, 4 * BLOCKS - 1);
	rises_to(58 * BLOCKS, now_ns()); /* the busy one has what the sleeper may no longer keep */

	kvctl_set("busy --max 10M");
	n = next_peak();
	expect(n >= 9 * BLOCKS && n <= 10 * BLOCKS - 1, "%u blocks under a maximum of 10 MiB", n);
	ck_assert_uint_eq(atomic_load(&seen->max_blocks), 10 * BLOCKS - 1);
	n = woken(&max);
	ck_assert_uint_eq(max, 4 * BLOCKS - 1);
	expect(n >= 3 * BLOCKS && n <= 4 * BLOCKS - 1, "%u blocks under a maximum of 4 MiB", n);
	sleeps_again();

	set = kvctl_set("busy --max 30M");
	rises_to(29 * BLOCKS, set);
	ck_assert_uint_le(next_peak(), 30 * BLOCKS - 1);
	kvctl_set("idle --max 20M");
	n = woken(&max);
	ck_assert_uint_eq(max, 20 * BLOCKS - 1);
	expect(n >= 19 * BLOCKS && n <= 20 * BLOCKS - 1, "%u blocks under a maximum of 20 MiB", n);
	sleeps_again();
	end();
}
END_TEST

/* The one at work takes what the sleeper has cached, down to the sleeper's minimum and no further. */
START_TEST(kvctl_pool_set_min_is_obeyed_at_once_for_an_idle_and_by_a_busy_client_up_and_down)
{
	uint64_t max;
	int64_t set;
	uint32_t n;

	start("idle", "busy");
	rises_to(60 * BLOCKS, now_ns());
	kvctl_set("idle --min 40M --max 40M");
	n = next_peak();
	expect(n <= 24 * BLOCKS, "%u blocks beside a minimum of 40 MiB", n);
	n = woken(&max);
	expect(n >= 39 * BLOCKS, "%u blocks under a minimum of 40 MiB", n);
	rises_to(22 * BLOCKS, now_ns());
	sleeps_again();

	set = kvctl_set("idle --min 0 --max 0");
	rises_to(60 * BLOCKS, set);
	set = kvctl_set("busy --min 50M");
	rises_to(50 * BLOCKS, set);
	n = woken(&max);
	expect(n <= 14 * BLOCKS, "%u blocks for the sleeper beside a minimum of 50 MiB", n);
	sleeps_again();
	kvctl_set("busy --min 0");
	end();
}
END_TEST

/* Looks its prompts up again and again, so that nothing else makes it the one that gives. */
static void reads(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool = pool_new(own, arg, 0);

	for (int32_t i = 0; i < 28; i++)
		kv_seq_free(seq_published(own, pool, 1 + i, BLOCKS * BLOCK_TOKENS), NULL);
	process_say(self, 0);
	while (!atomic_load(&seen->stop)) {
		for (int32_t i = 0; i < 28; i++)
			hit_of(pool, 1 + i, BLOCKS * BLOCK_TOKENS + 1);
		atomic_fetch_add(&seen->round, 1);
	}
	kv_pool_close(pool);
	kv_disconnect(own);
}

static void fills(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool = pool_new(own, arg, 0);

	for (int32_t i = 0; i < 28; i++)
		kv_seq_free(seq_published(own, pool, 1 + i, BLOCKS * BLOCK_TOKENS), NULL);
	process_say(self, 0);
	process_wait(self);
	kv_pool_close(pool);
	kv_disconnect(own);
}

/* Who is above its share by the new weight gives, whatever it did before: once the sleeper, once the other. */
START_TEST(kvctl_pool_set_weight_is_obeyed_at_once_by_an_idle_and_a_busy_client_up_and_down)
{
	static const char *const to[][2] = {
		{"idle --weight 1", "busy --weight 6"}, {"busy --weight 1", "idle --weight 6"}};
	const char *gives = _i ? "busy" : "idle", *keeps = _i ? "idle" : "busy";
	struct kv_pool *third = pool_new(client, "third", 0);
	static kv_block_id ids[ALL];
	uint64_t had;

	idle = process_start(fills, (void *)"idle");
	process_hear(idle);
	busy = process_start(reads, (void *)"busy");
	process_hear(busy);
	/* The other way round first. */
	kvctl_set(to[!_i][0]);
	kvctl_set(to[!_i][1]);
	ck_assert_uint_gt(pool_stats(client, gives).share_bytes, 40 * MIB);
	kvctl_set(to[_i][0]);
	kvctl_set(to[_i][1]);
	ck_assert_uint_eq(pool_stats(client, keeps).share_bytes, 48 * MIB);
	ck_assert_uint_eq(pool_stats(client, gives).share_bytes, 8 * MIB);
	had = pool_stats(client, keeps).blocks_cached;
	must(kv_blocks_take(third, 14 * BLOCKS, ids, AT_ONCE_MS * KV_MSEC));
	ck_assert_uint_eq(pool_stats(client, keeps).blocks_cached, had);
	ck_assert_uint_le(pool_stats(client, gives).blocks_cached, 20 * BLOCKS);
	must(kv_blocks_give(third, 14 * BLOCKS, ids));
	atomic_store(&seen->stop, true);
	process_go(idle);
	process_end(idle);
	process_end(busy);
	kv_pool_close(third);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/pool_set");
	TCase *tcase = tcase_create("pool_set");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, kvctl_pool_set_max_is_obeyed_at_once_by_an_idle_and_a_busy_client_down_and_up);
	tcase_add_test(tcase, kvctl_pool_set_min_is_obeyed_at_once_for_an_idle_and_by_a_busy_client_up_and_down);
	tcase_add_loop_test(
		tcase, kvctl_pool_set_weight_is_obeyed_at_once_by_an_idle_and_a_busy_client_up_and_down, 0, 2);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
