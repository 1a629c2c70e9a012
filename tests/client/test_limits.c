/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Limits that change under clients that work and clients that sleep; who gives when memory is short;
 * waiting in turn; idle leases called back; notices and what becomes of those who don't answer.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/client.h"
#include "tests/support/process.h"
#include "tests/support/raw_session.h"

#define MIB	((uint64_t)1 << 20)
#define ARENA	(64 * MIB)
#define MAX_IDS 40000
#define A_MIB	512 /* blocks of the small layout */

static struct kv_client *client;
static kv_block_id ids[MAX_IDS], more[MAX_IDS];

static void setup(void)
{
	daemon_start("--host", "64M");
	client = client_new();
}

static void teardown(void)
{
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

/* CPU time of the worker. */
static uint64_t cpu_ns(void)
{
	unsigned long long ns = 0;
	char path[64];
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%llu/schedstat",
		 (unsigned long long)daemon_stats(client).worker_pid);
	f = fopen(path, "r");
	ck_assert_ptr_nonnull(f);
	ck_assert_int_eq(fscanf(f, "%llu", &ns), 1);
	fclose(f);
	return ns;
}

static int set(const char *name, uint32_t change, uint64_t min, uint64_t max, uint32_t weight)
{
	KV_OPTIONS(kv_pool_limits, limits, .change = change, .min_bytes = min, .max_bytes = max,
		   .weight = weight);

	return kv_pool_set(client, name, &limits, NULL, TIMEOUT);
}

static void fill_cache(struct kv_pool *pool, int32_t prompt, uint32_t n_blocks)
{
	for (uint32_t n = 0; n < n_blocks; n += 64)
		kv_seq_free(seq_published(client, pool, prompt++, 64 * BLOCK_TOKENS), NULL);
}

static uint64_t max_blocks(struct kv_pool *pool)
{
	struct kv_pool_info info;

	kv_pool_info(pool, &info);
	return info.max_blocks;
}

static int by_id(const void *a, const void *b)
{
	return *(const kv_block_id *)a - *(const kv_block_id *)b;
}

/* ---- limits ---- */

START_TEST(a_maximum_goes_down_and_up_at_once_and_has_a_revision)
{
	struct kv_pool *pool = pool_new(client, "pool", 0);
	uint64_t revision = pool_stats(client, "pool").limits_revision;

	fill_cache(pool, 1, 40 * A_MIB);
	ck_assert_uint_ge(pool_stats(client, "pool").extent_bytes, 40 * MIB);
	must(set("pool", KV_LIMIT_MAX, 0, 10 * MIB, 0));
	ck_assert_uint_eq(pool_stats(client, "pool").limits_revision, revision + 1);
	ck_assert_uint_le(pool_stats(client, "pool").extent_bytes, 12 * MIB);
	ck_assert_uint_eq(max_blocks(pool), 10 * A_MIB - 1);
	ck_assert_int_eq(kv_blocks_take(pool, 10 * A_MIB, ids, TIMEOUT), KV_TOO_LARGE);
	must(kv_blocks_take(pool, 10 * A_MIB - 1, ids, TIMEOUT));
	ck_assert_int_eq(kv_blocks_take(pool, 1, more, 0), KV_NO_ROOM);
	books_balance(client);

	must(set("pool", KV_LIMIT_MAX, 0, 0, 0));
	ck_assert_uint_eq(pool_stats(client, "pool").max_bytes, ARENA);
	must(kv_blocks_take(pool, 30 * A_MIB, more, TIMEOUT));
	must(kv_blocks_give(pool, 30 * A_MIB, more));
	must(kv_blocks_give(pool, 10 * A_MIB - 1, ids));
	kv_pool_close(pool);
}
END_TEST

/* More blocks than are evicted in one turn of the loop, and than are counted in one. */
START_TEST(a_large_cache_makes_room_for_a_large_lease_or_stays_as_it_is)
{
	const uint32_t n = 10 * A_MIB - 64;
	struct kv_pool *pool = pool_new(client, "pool", n + 63);
	struct kv_seq *held;
	uint64_t before;

	fill_cache(pool, 1, n);
	held = seq_new(pool, 1, 64 * BLOCK_TOKENS, NULL);
	must(kv_ping(client, TIMEOUT));
	before = pool_stats(client, "pool").evictions_total;
	ck_assert_int_eq(kv_blocks_take(pool, n, ids, 50 * KV_MSEC), KV_NO_ROOM);
	ck_assert_uint_eq(pool_stats(client, "pool").evictions_total, before);
	must(kv_blocks_take(pool, n - 128, ids, TIMEOUT));
	ck_assert_uint_ge(pool_stats(client, "pool").evictions_total, before + n - 256);
	ck_assert_uint_eq(hit_of(pool, 1, 64 * BLOCK_TOKENS), 63 * BLOCK_TOKENS);
	must(kv_blocks_give(pool, n - 128, ids));
	kv_seq_free(held, NULL);
	kv_pool_close(pool);
}
END_TEST

START_TEST(what_is_in_use_above_a_lower_maximum_leaves_as_it_is_given_back)
{
	struct kv_pool *pool = pool_new(client, "pool", 0);

	must(kv_blocks_take(pool, 30 * A_MIB, ids, TIMEOUT));
	qsort(ids, 30 * A_MIB, sizeof(*ids), by_id); /* given back, they empty extent after extent */
	must(set("pool", KV_LIMIT_MAX, 0, 10 * MIB, 0));
	ck_assert_uint_ge(pool_stats(client, "pool").blocks_leased, 30 * A_MIB);
	ck_assert_int_eq(kv_blocks_take(pool, 1, more, 0), KV_NO_ROOM);
	must(kv_blocks_give(pool, 15 * A_MIB, ids));
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_le(pool_stats(client, "pool").extent_bytes, 19 * MIB);
	must(kv_blocks_give(pool, 14 * A_MIB, ids + 15 * A_MIB));
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_le(pool_stats(client, "pool").extent_bytes, 12 * MIB);
	must(kv_blocks_take(pool, 8 * A_MIB, more, TIMEOUT));
	kv_pool_close(pool);
}
END_TEST

START_TEST(memory_that_came_under_a_lower_maximum_is_used_when_it_is_raised)
{
	struct kv_pool *pool = pool_new(client, "pool", 255), *other = pool_new(client, "other", 0);

	must(kv_blocks_take(pool, 255, ids, TIMEOUT)); /* a quarter of its one extent */
	must(kv_blocks_take(other, 31 * 1024 - 1, more, TIMEOUT)); /* all the rest */
	must(set("pool", KV_LIMIT_MAX, 0, 2 * MIB, 0));
	must(kv_blocks_take(pool, 1023 - 255, ids + 255, TIMEOUT));
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_total, 1023);
	kv_pool_close(pool);
	kv_pool_close(other);
}
END_TEST

START_TEST(a_weight_is_there_from_the_start_if_who_opens_the_pool_says_one)
{
	KV_OPTIONS(kv_pool_options, what, .name = "heavy", .layout = small_layout(), .weight = 3);
	struct kv_pool *pool, *other = pool_new(client, "light", 0);

	must(kv_pool_open(client, &what, &pool));
	ck_assert_uint_eq(pool_stats(client, "heavy").weight, 3);
	ck_assert_uint_eq(pool_stats(client, "light").weight, 1);
	kv_pool_close(pool);
	what.name = "wrong";
	what.weight = KV_WEIGHT_MAX + 1;
	refused(kv_pool_open(client, &what, &pool), -EINVAL, "weight: 10001");
	kv_pool_close(other);
}
END_TEST

START_TEST(limits_that_cannot_be_are_refused_and_change_nothing)
{
	struct kv_pool *a = pool_new(client, "a", 0), *b = pool_new(client, "b", 0);
	KV_OPTIONS(kv_pool_limits, stale, .change = KV_LIMIT_WEIGHT, .weight = 2, .revision = 99);
	struct kv_pool_stats before;

	must(set("a", KV_LIMIT_MIN | KV_LIMIT_WEIGHT, 40 * MIB, 0, 7));
	before = pool_stats(client, "b");
	refused(set("b", KV_LIMIT_MIN, 30 * MIB, 0, 0), -ENOMEM, "41943040 of 67108864");
	refused(set("b", KV_LIMIT_MIN | KV_LIMIT_MAX, 5 * MIB, 4 * MIB, 0), -EINVAL, "min_bytes");
	refused(set("b", KV_LIMIT_MAX, 0, BLOCK_BYTES, 0), -EINVAL, "max_bytes: 2048");
	refused(set("b", KV_LIMIT_WEIGHT, 0, 0, 0), -EINVAL, "weight: 0");
	refused(set("b", KV_LIMIT_WEIGHT, 0, 0, KV_WEIGHT_MAX + 1), -EINVAL, "10001");
	refused(set("c", KV_LIMIT_WEIGHT, 0, 0, 1), -ENOENT, "'c'");
	refused(kv_pool_set(client, "b", &stale, NULL, TIMEOUT), -ESTALE, "revision: 99");
	ck_assert_uint_eq(pool_stats(client, "b").limits_revision, before.limits_revision);
	ck_assert_uint_eq(pool_stats(client, "b").max_bytes, before.max_bytes);
	ck_assert_uint_eq(pool_stats(client, "a").weight, 7);
	/* What others have been promised can never be had: that is said at once, not waited for. */
	ck_assert_int_eq(kv_blocks_take(b, 30 * A_MIB, ids, TIMEOUT), KV_TOO_LARGE);
	must(kv_blocks_take(b, 20 * A_MIB, ids, TIMEOUT));
	kv_pool_close(a);
	kv_pool_close(b);
}
END_TEST

START_TEST(limits_outlive_the_worker)
{
	struct kv_pool *pool = pool_new(client, "pool", 0);

	must(set("pool", KV_LIMIT_MAX | KV_LIMIT_MIN | KV_LIMIT_WEIGHT, 4 * MIB, 10 * MIB, 5));
	daemon_kill_worker();
	kv_pool_close(pool);
	kv_disconnect(client);
	client = client_new();
	pool = pool_new(client, "pool", 0);
	ck_assert_uint_eq(pool_stats(client, "pool").max_bytes, 10 * MIB);
	ck_assert_uint_eq(pool_stats(client, "pool").min_bytes, 4 * MIB);
	ck_assert_uint_eq(pool_stats(client, "pool").weight, 5);
	ck_assert_uint_eq(max_blocks(pool), 10 * A_MIB - 1);
	ck_assert_int_eq(kv_blocks_take(pool, 10 * A_MIB, ids, TIMEOUT), KV_TOO_LARGE);
	kv_pool_close(pool);
}
END_TEST

/* D17. */
START_TEST(what_never_fits_is_refused_at_once_and_keeps_nobody_waiting)
{
	struct kv_pool *pool = pool_new(client, "pool", 4790);
	int64_t start = now_ns();

	ck_assert_int_eq(kv_blocks_take(pool, 6250, ids, TIMEOUT), KV_TOO_LARGE);
	must(kv_blocks_take(pool, 100, ids, TIMEOUT));
	expect(now_ns() - start < 2000 * KV_MSEC, "it took %lld ms",
	       (long long)((now_ns() - start) / KV_MSEC));
	ck_assert_uint_eq(pool_stats(client, "pool").no_room_total, 0);
	kv_pool_close(pool);
}
END_TEST

/* ---- weights ---- */

START_TEST(pools_above_their_share_give_first)
{
	struct kv_pool *light = pool_new(client, "light", 0), *heavy = pool_new(client, "heavy", 0);
	struct kv_pool *third;
	struct kv_pool_stats s;

	must(set("light", KV_LIMIT_WEIGHT, 0, 0, 1));
	must(set("heavy", KV_LIMIT_WEIGHT, 0, 0, 3));
	fill_cache(heavy, 1, 30 * A_MIB);
	fill_cache(light, 1, 28 * A_MIB);
	third = pool_new(client, "third", 0);
	must(set("third", KV_LIMIT_WEIGHT, 0, 0, 2));
	/* Shares of 64 MiB: a sixth, a half, a third. Only "light" is above its own. */
	s = pool_stats(client, "light");
	ck_assert_uint_ge(s.share_bytes, 8 * MIB);
	ck_assert_uint_le(s.share_bytes, 12 * MIB);
	must(kv_blocks_take(third, 14 * A_MIB, ids, TIMEOUT));
	ck_assert_uint_ge(pool_stats(client, "heavy").blocks_cached, 29 * A_MIB);
	ck_assert_uint_le(pool_stats(client, "light").blocks_cached, 20 * A_MIB);
	/* What the mover has yet to clean is not taken from others once more. */
	ck_assert_uint_le(pool_stats(client, "third").extent_bytes, 18 * MIB);
	books_balance(client);
	kv_pool_close(light);
	kv_pool_close(heavy);
	kv_pool_close(third);
}
END_TEST

/*
 * It asks for nearly all there is, so that it has what others gave only when the mover has cleaned the
 * last of it: until then the clean reserve took from it what it had, over and over.
 */
START_TEST(what_a_waiting_pool_has_got_is_not_taken_from_it_for_the_reserve)
{
	struct kv_pool *from = pool_new(client, "from", 0), *to = pool_new(client, "to", 0);
	uint64_t moved, had;

	fill_cache(from, 1, 61 * A_MIB);
	must(kv_ping(client, TIMEOUT));
	had = pool_stats(client, "from").extent_bytes;
	moved = daemon_stats(client).moved_bytes_total;
	must(kv_blocks_take(to, 60 * A_MIB, ids, TIMEOUT));
	ck_assert_uint_le(daemon_stats(client).moved_bytes_total - moved, had);
	must(kv_blocks_give(to, 60 * A_MIB, ids));
	kv_pool_close(from);
	kv_pool_close(to);
}
END_TEST

START_TEST(of_two_caches_the_one_that_nobody_uses_gives)
{
	struct kv_pool *used = pool_new(client, "used", 0), *asleep = pool_new(client, "asleep", 0);
	struct kv_pool *wants = pool_new(client, "wants", 0);

	/* Neither is above its share. */
	must(set("used", KV_LIMIT_WEIGHT, 0, 0, 100));
	must(set("asleep", KV_LIMIT_WEIGHT, 0, 0, 100));
	fill_cache(asleep, 1, 28 * A_MIB);
	fill_cache(used, 1, 28 * A_MIB);
	for (int round = 0; round < 12; round++) {
		sleep_ms(30);
		for (int32_t i = 0; i < 28 * 8; i++)
			hit_of(used, 1 + i, 64 * BLOCK_TOKENS + 1);
		must(kv_ping(client, TIMEOUT));
	}
	must(kv_blocks_take(wants, 16 * A_MIB, ids, TIMEOUT));
	ck_assert_uint_ge(pool_stats(client, "used").blocks_cached,
			  pool_stats(client, "asleep").blocks_cached + 6 * A_MIB);
	kv_pool_close(used);
	kv_pool_close(asleep);
	kv_pool_close(wants);
}
END_TEST

/* ---- idle leases ---- */

static void keeps_a_magazine(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool = pool_new(own, "pool", 0);
	kv_block_id some[200];

	(void)arg;
	/* Until the daemon has filled its magazine. */
	for (int i = 0; i < 20; i++) {
		must(kv_blocks_take(pool, 120, some, TIMEOUT));
		must(kv_blocks_give(pool, 120, some));
	}
	process_say(self, 0);
	process_wait(self); /* sleeps: it calls nothing */
	for (int i = 0; i < 20; i++) {
		must(kv_blocks_take(pool, 10, some, TIMEOUT));
		must(kv_blocks_give(pool, 10, some));
	}
	process_say(self, 0);
	process_wait(self);
	kv_pool_close(pool);
	kv_disconnect(own);
}

START_TEST(a_client_that_sleeps_keeps_no_idle_lease_from_others_even_without_a_timeout)
{
	struct kv_pool *pool = pool_new(client, "pool", 4096);
	struct process *sleeper = process_start(keeps_a_magazine, NULL);
	struct kv_session_stats s;

	process_hear(sleeper);
	ck_assert(session_stats(client, sleeper->pid, &s));
	ck_assert_uint_gt(s.blocks_idle, 0);
	sleep_ms(20); /* leases of this very moment are left alone */
	must(kv_blocks_take(pool, 4096, ids, 0));
	ck_assert(session_stats(client, sleeper->pid, &s));
	ck_assert_uint_eq(s.blocks_leased, 0);
	books_balance(client);
	must(kv_blocks_give(pool, 4096, ids));
	must(kv_ping(client, TIMEOUT));
	process_go(sleeper);
	process_hear(sleeper);
	books_balance(client);
	process_go(sleeper);
	process_end(sleeper);
	kv_pool_close(pool);
}
END_TEST

/* Two that take all they can get from each other, as fast as they can: no block is ever two's. */
static void takes_and_gives(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool = pool_new_mapped(own, "pool", 0);
	int mark = 1 + (int)(intptr_t)arg;
	kv_block_id some[300];
	int64_t end = now_ns() + 700 * KV_MSEC;
	uint64_t n = 0;

	while (now_ns() < end) {
		uint32_t want = 1 + (uint32_t)(n * 7919 % 290);
		int r = kv_blocks_take(pool, want, some, (n % 3) * KV_MSEC);

		if (r == KV_NO_ROOM)
			continue;
		ck_assert_int_eq(r, 0);
		for (uint32_t i = 0; i < want; i++)
			block_at(pool, some[i])[8 * mark] = (unsigned char)mark;
		for (uint32_t i = 0; i < want; i++) {
			for (int other = 1; other <= 3; other++)
				expect(block_at(pool, some[i])[8 * other] ==
					       (other == mark ? mark : 0),
				       "block %d is used by two", some[i]);
			block_at(pool, some[i])[8 * mark] = 0;
		}
		must(kv_blocks_give(pool, want, some));
		n++;
	}
	process_say(self, (int64_t)n);
	kv_pool_close(pool);
	kv_disconnect(own);
}

START_TEST(calling_leases_back_from_clients_at_work_never_gives_a_block_to_two)
{
	struct kv_pool *pool = pool_new(client, "pool", 400);
	struct process *others[3];

	for (intptr_t i = 0; i < 3; i++)
		others[i] = process_start(takes_and_gives, (void *)i);
	for (int i = 0; i < 3; i++) {
		ck_assert_int_gt(process_hear(others[i]), 0);
		process_end(others[i]);
	}
	books_balance(client);
	kv_pool_close(pool);
}
END_TEST

/* ---- waiting in turn ---- */

static void waits_for(struct process *self, void *arg)
{
	uint32_t n = (uint32_t)(intptr_t)arg;
	struct kv_client *own = client_new();
	struct kv_pool *pool = pool_new(own, "pool", 0);
	kv_block_id *some = calloc(n, sizeof(*some));

	process_say(self, 0);
	must(kv_blocks_take(pool, n, some, TIMEOUT));
	process_say(self, now_ns());
	process_wait(self);
	must(kv_blocks_give(pool, n, some));
	free(some);
	kv_pool_close(pool);
	kv_disconnect(own);
}

/* Behind those that wait already */
static struct process *begins_to_wait(intptr_t n_blocks)
{
	uint64_t n = pool_stats(client, "pool").waiting;
	struct process *p = process_start(waits_for, (void *)n_blocks);

	process_hear(p);
	wait_until(pool_stats(client, "pool").waiting == n + 1);
	return p;
}

static void ends(struct process *served)
{
	process_go(served);
	process_end(served);
}

START_TEST(a_large_request_is_not_starved_by_small_ones_and_nothing_passes_those_who_wait)
{
	struct kv_pool *pool = pool_new(client, "pool", 1000);
	struct process *large, *small;

	must(kv_blocks_take(pool, 1000, ids, TIMEOUT));
	large = begins_to_wait(900);
	small = begins_to_wait(50);
	/* Enough for the small one and for us: but the large one was there before. */
	must(kv_blocks_give(pool, 500, ids));
	must(kv_ping(client, TIMEOUT));
	ck_assert_int_eq(kv_blocks_take(pool, 10, more, 0), KV_NO_ROOM);
	sleep_ms(50);
	ck_assert_uint_eq(pool_stats(client, "pool").waiting, 2);
	/* Enough for the large one alone: it is served, and the small one after it. */
	must(kv_blocks_give(pool, 400, ids + 500));
	must(kv_ping(client, TIMEOUT));
	process_hear(large);
	ck_assert_uint_eq(pool_stats(client, "pool").waiting, 1);
	must(kv_blocks_give(pool, 50, ids + 900));
	must(kv_ping(client, TIMEOUT));
	process_hear(small);
	ends(large);
	ends(small);
	books_balance(client);
	kv_pool_close(pool);
}
END_TEST

/* Seen as: the large one got NO_ROOM at its deadline, the small one, which came later, was served. */
START_TEST(what_was_granted_to_who_waited_is_not_called_back_before_it_wakes)
{
	struct kv_pool *pool = pool_new(client, "pool", 1000);
	struct process *large, *small;

	must(kv_blocks_take(pool, 1000, ids, TIMEOUT));
	large = begins_to_wait(900);
	small = begins_to_wait(50);
	kill(large->pid, SIGSTOP);
	must(kv_blocks_give(pool, 900, ids));
	must(kv_ping(client, TIMEOUT));
	wait_until(pool_stats(client, "pool").waiting == 1);
	sleep_ms(100);
	expect(pool_stats(client, "pool").waiting == 1, "the small one got what the large one had been granted");
	kill(large->pid, SIGCONT);
	process_hear(large);
	must(kv_blocks_give(pool, 50, ids + 900));
	must(kv_ping(client, TIMEOUT));
	process_hear(small);
	ends(large);
	ends(small);
	kv_pool_close(pool);
}
END_TEST

/* But who stands still keeps nobody waiting for long. */
START_TEST(what_was_granted_to_a_stopped_client_is_called_back_in_the_end)
{
	struct kv_pool *pool = pool_new(client, "pool", 1000);
	struct process *stopped, *other;

	must(kv_blocks_take(pool, 1000, ids, TIMEOUT));
	stopped = begins_to_wait(900);
	kill(stopped->pid, SIGSTOP);
	must(kv_blocks_give(pool, 900, ids));
	other = process_start(waits_for, (void *)(intptr_t)50);
	process_hear(other);
	process_hear(other);
	ends(other);
	kill(stopped->pid, SIGCONT);
	process_hear(stopped);
	ends(stopped);
	kv_pool_close(pool);
}
END_TEST

static void lets_go_later(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool = pool_new(own, "pool", 0);
	struct kv_seq *seq = seq_published(own, pool, 1, 64 * BLOCK_TOKENS);

	(void)arg;
	process_say(self, 0);
	process_wait(self);
	kv_seq_free(seq, NULL);
	process_say(self, now_ns());
	process_wait(self);
	kv_pool_close(pool);
	kv_disconnect(own);
}

START_TEST(who_waits_is_served_when_a_cached_block_is_let_go)
{
	struct kv_pool *pool = pool_new(client, "pool", 64);
	struct process *holder = process_start(lets_go_later, NULL), *waiter;
	int64_t let_go, served;

	process_hear(holder);
	waiter = process_start(waits_for, (void *)(intptr_t)60);
	process_hear(waiter);
	wait_until(pool_stats(client, "pool").waiting == 1);
	sleep_ms(150); /* the timer has backed off by now */
	process_go(holder);
	let_go = process_hear(holder);
	served = process_hear(waiter);
	expect(served - let_go < 1000 * KV_MSEC, "served %lld ms later",
	       (long long)((served - let_go) / KV_MSEC));
	process_go(waiter);
	process_go(holder);
	process_end(waiter);
	process_end(holder);
	kv_pool_close(pool);
}
END_TEST

/* ---- pressure ---- */

struct greedy {
	bool answers;
};

static void holds_most(struct process *self, void *arg)
{
	const struct greedy *how = arg;
	struct kv_client *own = client_new();
	struct kv_pool *pool = pool_new(own, "pool", 0);
	struct kv_pressure p = {0};
	kv_block_id some[900], one;
	int r;

	must(kv_blocks_take(pool, 900, some, TIMEOUT));
	ck_assert_int_eq(kv_pool_pressure(pool, &p), 0);
	process_say(self, 0);
	wait_until(kv_pool_pressure(pool, &p) == 1);
	ck_assert_uint_gt(p.n_blocks, 0);
	ck_assert_uint_le(p.n_blocks, 400);
	ck_assert_int_gt(p.deadline_ns, now_ns() - 1000 * KV_MSEC);
	if (how->answers) {
		must(kv_blocks_give(pool, p.n_blocks, some));
		wait_until(kv_pool_pressure(pool, &p) == 0);
		process_say(self, 0);
	} else {
		while (now_ns() < p.deadline_ns + 20 * KV_MSEC)
			sleep_ms(5);
		r = kv_blocks_take(pool, 1, &one, 200 * KV_MSEC);
		ck_assert_int_eq(r, KV_NO_ROOM);
		process_say(self, now_ns());
	}
	process_wait(self);
	kv_pool_close(pool);
	kv_disconnect(own);
}

START_TEST(who_has_more_than_its_share_is_asked_and_gets_no_more_if_it_does_not_answer)
{
	struct greedy how = {.answers = _i};
	struct kv_pool *pool = pool_new(client, "pool", 1000);
	struct process *greedy = process_start(holds_most, &how), *needy;

	process_hear(greedy);
	needy = process_start(waits_for, (void *)(intptr_t)400);
	process_hear(needy);
	process_hear(greedy);
	if (how.answers) {
		process_hear(needy);
		process_go(needy);
		process_end(needy);
	} else {
		ck_assert_uint_eq(pool_stats(client, "pool").waiting, 1); /* what is in use stays */
		process_kill(needy);
	}
	process_go(greedy);
	process_end(greedy);
	books_balance(client);
	kv_pool_close(pool);
}
END_TEST

/* Who speaks the protocol itself and says of its idle leases what it likes. */
START_TEST(who_lies_about_its_idle_leases_is_asked_and_gets_no_more_all_the_same)
{
	struct kv_pool *pool = pool_new(client, "pool", 1000);
	struct raw_session liar = raw_session("pool", 0);
	struct process *needy;
	static int32_t taken[900];
	uint32_t n;

	raw_lease(&liar, 900, TIMEOUT);
	ck_assert_int_eq(raw_leased(&liar, &n), 0);
	ck_assert_uint_eq(raw_take(&liar, taken, 900), 900);
	if (_i) { /* all are, but it is always just looking at them */
		kv_store_release(&liar.shm->n_stack, 900);
		kv_store_seq(&liar.shm->busy, 1);
	} /* or none is */
	needy = process_start(waits_for, (void *)(intptr_t)400);
	process_hear(needy);
	wait_until(kv_load_acquire(&liar.shm->pressure_blocks) > 0);
	while (now_ns() < kv_load_relaxed(&liar.shm->pressure_deadline) + 20 * KV_MSEC)
		sleep_ms(5);
	/* Refused at once. */
	raw_lease(&liar, 1, TIMEOUT);
	ck_assert(raw_is_answered(&liar, 1000));
	ck_assert_int_eq(raw_leased(&liar, &n), KV_NO_ROOM);
	process_kill(needy);
	raw_session_end(&liar);
	kv_pool_close(pool);
}
END_TEST

#define N_HELD 290 /* prompts */

START_TEST(leases_of_who_is_refused_cost_the_daemon_little_however_large_the_cache)
{
	struct kv_pool *pool = pool_new(client, "pool", 30000);
	struct raw_session greedy = raw_session("pool", 0);
	struct process *needy;
	struct kv_seq *held[N_HELD];
	static int32_t taken[10700];
	uint64_t start, pings, refusals;

	for (int i = 0; i < N_HELD; i++)
		held[i] = seq_published(client, pool, i, 64 * BLOCK_TOKENS);
	raw_lease(&greedy, 10700, TIMEOUT);
	ck_assert_int_eq(raw_leased(&greedy, NULL), 0);
	ck_assert_uint_eq(raw_take(&greedy, taken, 10700), 10700);
	needy = process_start(waits_for, (void *)(intptr_t)4000);
	process_hear(needy);
	wait_until(kv_load_acquire(&greedy.shm->pressure_blocks) > 0);
	while (now_ns() < kv_load_relaxed(&greedy.shm->pressure_deadline) + 20 * KV_MSEC)
		sleep_ms(5);
	start = cpu_ns();
	for (int i = 0; i < 1000; i++)
		raw_ping(&greedy);
	pings = cpu_ns() - start;
	start = cpu_ns();
	for (int i = 0; i < 1000; i++) {
		raw_lease(&greedy, 1, 0);
		ck_assert_int_eq(raw_leased(&greedy, NULL), KV_NO_ROOM);
	}
	refusals = cpu_ns() - start;
	/* Two walks over the blocks for each would be ten times as much. */
	expect(refusals < 4 * pings, "1000 refusals cost %llu us, 1000 pings %llu us",
	       (unsigned long long)refusals / 1000, (unsigned long long)pings / 1000);
	process_kill(needy);
	for (int i = 0; i < N_HELD; i++)
		kv_seq_free(held[i], NULL);
	raw_session_close(&greedy);
	kv_pool_close(pool);
}
END_TEST

/* A thread of an engine that does nothing but wait for notices. */
static void *waits_for_notices(void *arg)
{
	struct kv_pressure p = {0};
	int64_t start = now_ns();

	if (kv_pool_pressure_wait(arg, 0, 20 * KV_MSEC, &p) != 0 || now_ns() - start < 20 * KV_MSEC)
		return "a notice without a reason, or no wait";
	start = now_ns();
	if (kv_pool_pressure_wait(arg, 0, 2 * TIMEOUT, &p) != 1)
		return "no notice";
	if (now_ns() - start > TIMEOUT)
		return "it slept on";
	return p.sequence == 1 && p.n_blocks ? NULL : "a notice that asks for nothing";
}

START_TEST(a_thread_that_sleeps_for_a_notice_is_woken_by_it)
{
	struct kv_pool *pool = pool_new(client, "pool", 1000);
	struct kv_pressure p;
	struct process *needy;
	void *wrong = NULL;
	pthread_t thread;

	must(kv_blocks_take(pool, 900, ids, TIMEOUT));
	ck_assert_int_eq(pthread_create(&thread, NULL, waits_for_notices, pool), 0);
	sleep_ms(50);
	needy = process_start(waits_for, (void *)(intptr_t)400);
	process_hear(needy);
	ck_assert_int_eq(pthread_join(thread, &wrong), 0);
	expect(!wrong, "%s", (const char *)wrong);
	ck_assert_int_eq(kv_pool_pressure(pool, &p), 1);
	must(kv_blocks_give(pool, p.n_blocks, ids)); /* what on_pressure() does */
	process_hear(needy);
	process_go(needy);
	process_end(needy);
	kv_pool_close(pool);
}
END_TEST

static void asks_while_pressed(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *pool = pool_new(own, "pool", 0);
	struct kv_pressure p = {0};
	kv_block_id some[900], rest[100];

	must(kv_blocks_take(pool, 900, some, TIMEOUT));
	process_say(self, 0);
	wait_until(kv_pool_pressure(pool, &p) == 1);
	must(kv_blocks_take(pool, 100, rest, TIMEOUT));
	process_say(self, 0);
	process_wait(self);
	kv_pool_close(pool);
	kv_disconnect(own);
}

START_TEST(a_notice_ends_with_those_who_waited_even_while_who_got_it_waits_itself)
{
	struct kv_pool *pool = pool_new(client, "pool", 1000);
	struct process *greedy, *needy;

	must(kv_blocks_take(pool, 100, ids, TIMEOUT));
	greedy = process_start(asks_while_pressed, NULL);
	process_hear(greedy);
	needy = process_start(waits_for, (void *)(intptr_t)400);
	process_hear(needy);
	wait_until(pool_stats(client, "pool").waiting == 2);
	process_kill(needy);
	wait_until(pool_stats(client, "pool").waiting == 1);
	sleep_ms(1500); /* past the deadline of the notice */
	ck_assert_uint_eq(pool_stats(client, "pool").waiting, 1);
	must(kv_blocks_give(pool, 100, ids));
	must(kv_ping(client, TIMEOUT));
	process_hear(greedy);
	process_go(greedy);
	process_end(greedy);
	kv_pool_close(pool);
}
END_TEST

/* ---- an idle daemon ---- */

START_TEST(a_daemon_with_nothing_to_do_uses_no_cpu)
{
	struct kv_pool *a = pool_new(client, "a", 0), *b = pool_new(client, "b", 0);
	uint64_t before, after;

	fill_cache(a, 1, 20 * A_MIB);
	fill_cache(b, 1, 20 * A_MIB);
	sleep_ms(100);
	before = cpu_ns();
	sleep_ms(2000);
	after = cpu_ns();
	/* The question itself is all: a loop that polled once a millisecond would take 10 ms. */
	expect(after - before < 3000000, "%llu us in 2 s",
	       (unsigned long long)((after - before) / 1000));
	kv_pool_close(a);
	kv_pool_close(b);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/limits");
	TCase *tcase = tcase_create("limits");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, a_maximum_goes_down_and_up_at_once_and_has_a_revision);
	tcase_add_test(tcase, a_large_cache_makes_room_for_a_large_lease_or_stays_as_it_is);
	tcase_add_test(tcase, what_is_in_use_above_a_lower_maximum_leaves_as_it_is_given_back);
	tcase_add_test(tcase, memory_that_came_under_a_lower_maximum_is_used_when_it_is_raised);
	tcase_add_test(tcase, a_weight_is_there_from_the_start_if_who_opens_the_pool_says_one);
	tcase_add_test(tcase, limits_that_cannot_be_are_refused_and_change_nothing);
	tcase_add_test(tcase, limits_outlive_the_worker);
	tcase_add_test(tcase, what_never_fits_is_refused_at_once_and_keeps_nobody_waiting);
	tcase_add_test(tcase, pools_above_their_share_give_first);
	tcase_add_test(tcase,
		       what_a_waiting_pool_has_got_is_not_taken_from_it_for_the_reserve);
	tcase_add_test(tcase, of_two_caches_the_one_that_nobody_uses_gives);
	tcase_add_test(tcase,
		       a_client_that_sleeps_keeps_no_idle_lease_from_others_even_without_a_timeout);
	tcase_add_test(tcase, calling_leases_back_from_clients_at_work_never_gives_a_block_to_two);
	tcase_add_test(
		tcase,
		a_large_request_is_not_starved_by_small_ones_and_nothing_passes_those_who_wait);
	tcase_add_test(tcase, what_was_granted_to_who_waited_is_not_called_back_before_it_wakes);
	tcase_add_test(tcase, what_was_granted_to_a_stopped_client_is_called_back_in_the_end);
	tcase_add_test(tcase, who_waits_is_served_when_a_cached_block_is_let_go);
	tcase_add_loop_test(
		tcase,
		who_has_more_than_its_share_is_asked_and_gets_no_more_if_it_does_not_answer, 0, 2);
	tcase_add_loop_test(tcase, who_lies_about_its_idle_leases_is_asked_and_gets_no_more_all_the_same, 0, 2);
	tcase_add_test(tcase, leases_of_who_is_refused_cost_the_daemon_little_however_large_the_cache);
	tcase_add_test(tcase, a_thread_that_sleeps_for_a_notice_is_woken_by_it);
	tcase_add_test(tcase,
		       a_notice_ends_with_those_who_waited_even_while_who_got_it_waits_itself);
	tcase_add_test(tcase, a_daemon_with_nothing_to_do_uses_no_cpu);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
