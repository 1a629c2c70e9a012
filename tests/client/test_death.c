/* SPDX-License-Identifier: Apache-2.0 */
/* What comes back, what stays and what must not happen when a process dies, forks, hangs or leaves.
 */
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/client.h"
#include "tests/support/process.h"

#define N_BLOCKS 2000
/* From a death to the end of its traces. */
#define SOON (5 * KV_SEC)

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

static bool is_gone(pid_t pid)
{
	struct kv_session_stats s;

	return !session_stats(client, pid, &s);
}

static void expect_gone_soon(pid_t pid)
{
	int64_t start = now_ns();

	wait_until(is_gone(pid));
	ck_assert_int_lt(now_ns() - start, SOON);
}

/* ---- kill -9 ---- */

/* Takes 1,000 blocks: 200 of them cached, and shared with the test; holds prefixes; reserves. */
static void rich(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *mine = pool_new_mapped(own, "pool", 0);
	struct kv_seq *reserved, *published;
	size_t hit;

	(void)arg;
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

START_TEST(a_killed_client_gives_everything_back)
{
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
	expect_gone_soon(pid);

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

START_TEST(what_was_not_published_dies_with_its_process_whoever_gets_the_block)
{
	struct process *other = process_start(half_done, NULL);
	pid_t pid = other->pid;
	kv_block_id third = (kv_block_id)process_hear(other);
	bool came_back = false;

	ck_assert_uint_eq(hit_of(pool, 1, 65), 32);
	process_kill(other);
	expect_gone_soon(pid);
	ck_assert_uint_eq(hit_of(pool, 1, 65), 32);
	must(kv_blocks_take(pool, N_BLOCKS / 2, ids, TIMEOUT)); /* what came back last goes first */
	for (int i = 0; i < N_BLOCKS / 2; i++)
		came_back |= ids[i] == third;
	ck_assert(came_back);
	ck_assert_uint_eq(hit_of(pool, 1, 65), 32);
	must(kv_blocks_give(pool, N_BLOCKS / 2, ids));
}
END_TEST

/* Publishes and dies in the next instruction: the op stands in its ring, the daemon may be asleep.
 */
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
		expect_gone_soon(pid);
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

	snprintf(path, sizeof(path), "/proc/%d/fd", daemon_pid());
	dir = opendir(path);
	ck_assert_ptr_nonnull(dir);
	while ((e = readdir(dir))) {
		ssize_t size;

		snprintf(path, sizeof(path), "/proc/%d/fd/%s", daemon_pid(), e->d_name);
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
		wait_until(is_gone(pid));
		if (i == 20) {
			wait_until(daemon_stats(client).n_clients == 2);
			fds = daemon_fds();
			memfds = n_memfds();
			rss = daemon_rss();
		}
	}
	wait_until(daemon_stats(client).n_clients == 2);
	ck_assert_uint_eq(daemon_fds(), fds);
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
	expect_gone_soon(pid);
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
	expect_gone_soon(pid);
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

/* Shuts every connection of this process to the daemon, behind the library's back. */
static void cut_connections(void)
{
	for (int fd = 3; fd < 200; fd++) {
		struct sockaddr_un address = {0};
		socklen_t size = sizeof(address);

		if (!getpeername(fd, (struct sockaddr *)&address, &size) &&
		    !strcmp(address.sun_path, daemon_socket()))
			shutdown(fd, SHUT_RDWR);
	}
}

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
	/* It may go on reading and writing what it has; what needs the daemon is refused. */
	block_fill(mine, ids[0], 1);
	refused(kv_blocks_take(mine, N_BLOCKS, ids, TIMEOUT), -ECONNRESET, "");
	refused(kv_ping(own, TIMEOUT), -ECONNRESET, "");
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
	expect_gone_soon(pid);
	ck_assert_uint_eq(stats().blocks_quarantined, 0);
	ck_assert_uint_eq(stats().blocks_cached_held, 0);
	ck_assert_uint_eq(hit_of(pool, 1, 321), 320);
	must(kv_blocks_take(pool, N_BLOCKS, ids, TIMEOUT));
	must(kv_blocks_give(pool, N_BLOCKS, ids));
}
END_TEST

/* ---- forks ---- */

/* All that a child may try with the handles of its parent. */
static void use_inherited_handles(struct kv_client *own, struct kv_pool *mine, struct kv_seq *seq,
				  struct kv_batch *batch)
{
	KV_OPTIONS(kv_pool_options, what, .name = "pool");
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = 1, .max_tokens = 1,
		   .max_blocks_per_seq = 1);
	struct kv_batch_item item = {seq, 1};
	struct kv_check_result result;
	struct kv_pool_info info;
	struct kv_batch *another_batch;
	struct kv_pool *another_pool;
	struct kv_seq *another;
	const kv_block_id *own_ids;
	const struct kv_gpu *gpus;
	struct kv_view view;
	void *items;
	size_t n;

	refused(kv_ping(own, TIMEOUT), -ECHILD, "fork");
	refused(kv_stats(own, KV_STAT_POOL, &items, &n, TIMEOUT), -ECHILD, "fork");
	refused(kv_check(own, &result, TIMEOUT), -ECHILD, "fork");
	refused(kv_pool_drop(own, "pool", TIMEOUT), -ECHILD, "fork");
	refused(kv_pool_open(own, &what, &another_pool), -ECHILD, "fork");
	refused(kv_pool_view(mine, 0, 0, &view), -ECHILD, "fork");
	refused(kv_blocks_take(mine, 1, ids, 0), -ECHILD, "fork");
	refused(kv_blocks_take(mine, 900, ids, TIMEOUT), -ECHILD, "fork");
	refused(kv_blocks_give(mine, 1, ids), -ECHILD, "fork");
	refused(kv_seq_new(mine, &another), -ECHILD, "fork");
	refused(kv_seq_lookup(seq, tokens_of(1, 400), 400, &n), -ECHILD, "fork");
	refused(kv_seq_reserve(seq, 1000, TIMEOUT), -ECHILD, "fork");
	refused(kv_seq_append(seq, &(int32_t){1}, 1), -ECHILD, "fork");
	refused(kv_seq_fork(seq, &another), -ECHILD, "fork");
	refused(kv_seq_rollback(seq, 10, NULL), -ECHILD, "fork");
	refused(kv_seq_publish(seq, NULL), -ECHILD, "fork");
	refused(kv_batch_new(mine, &sizes, &another_batch), -ECHILD, "fork");
	refused(kv_batch_build(batch, &item, 1, 0, 0), -ECHILD, "fork");
	refused(kv_batch_copy(batch, NULL), -ECHILD, "fork");
	/* What only looks at the process's own memory looks. */
	kv_pool_info(mine, &info);
	ck_assert_uint_eq(info.block_tokens, BLOCK_TOKENS);
	ck_assert_uint_eq(kv_pool_layout(mine)->n_components, 2);
	ck_assert_int_eq(kv_client_gpus(own, &gpus), 1);
	ck_assert_uint_eq(kv_seq_len(seq), 320);
	ck_assert_uint_eq(kv_seq_capacity(seq), 320);
	ck_assert_uint_eq(kv_seq_blocks(seq, &own_ids), 20);
	ck_assert_ptr_nonnull(kv_batch_data(batch));
}

struct parents {
	struct kv_client *client;
	struct kv_pool *pool;
	struct kv_seq *seq;
	struct kv_batch *batch;
};

static struct parents begin_parent(void)
{
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = 4, .max_tokens = 64,
		   .max_blocks_per_seq = 30);
	struct parents p = {.client = client_new()};

	p.pool = pool_new_mapped(p.client, "pool", 0);
	must(kv_blocks_take(p.pool, 100, ids, TIMEOUT));
	must(kv_blocks_give(p.pool, 5, ids + 95));
	p.seq = seq_published(p.client, p.pool, 1, 320);
	must(kv_batch_new(p.pool, &sizes, &p.batch));
	return p;
}

static void forks(struct process *self, void *arg)
{
	struct parents p = begin_parent();
	struct kv_client *own;
	struct kv_pool *mine;
	pid_t child;
	int status;

	(void)self;
	(void)arg;
	child = fork();
	if (child == 0) {
		use_inherited_handles(p.client, p.pool, p.seq, p.batch);
		/* It connects anew; the ends of the old handles end nothing of that. */
		own = client_new();
		mine = pool_new_mapped(own, "pool", 0);
		must(kv_blocks_take(mine, 50, ids, TIMEOUT));
		for (int i = 0; i < 50; i++)
			block_fill(mine, ids[i], 0x31);
		kv_seq_free(p.seq, NULL);
		kv_batch_free(p.batch);
		kv_pool_close(p.pool);
		kv_disconnect(p.client);
		for (int i = 0; i < 50; i++)
			expect(block_is(mine, ids[i], 0x31), "block %d", ids[i]);
		ck_assert_uint_eq(hit_of(mine, 1, 321), 320);
		must(kv_blocks_give(mine, 50, ids));
		must(kv_ping(own, TIMEOUT));
		kv_pool_close(mine);
		kv_disconnect(own);
		_exit(0);
	}
	ck_assert_int_eq(waitpid(child, &status, 0), child);
	ck_assert_int_eq(status, 0);
	/* And the parent has noticed nothing. */
	must(kv_blocks_take(p.pool, 5, ids + 95, TIMEOUT));
	must(kv_blocks_give(p.pool, 100, ids));
	must(kv_ping(p.client, TIMEOUT));
	kv_batch_free(p.batch);
	kv_seq_free(p.seq, NULL);
	kv_pool_close(p.pool);
	kv_disconnect(p.client);
}

START_TEST(a_forked_child_can_do_nothing_with_its_parents_handles_and_connect_anew)
{
	struct process *other = process_start(forks, NULL);

	process_end(other);
	ck_assert_uint_eq(stats().blocks_leased, 0);
	ck_assert_uint_eq(stats().blocks_quarantined, 0);
	wait_until(daemon_stats(client).n_clients == 2);
}
END_TEST

static void leaves_a_child(struct process *self, void *arg)
{
	pid_t child;

	(void)arg;
	begin_parent();
	child = fork();
	if (child == 0) {
		/* Some way of doing it that knows of no library: it keeps everything open. */
		for (;;)
			pause();
	}
	process_say(self, child);
	process_wait(self);
}

START_TEST(a_child_that_lives_on_keeps_nothing_of_its_dead_parent)
{
	struct process *other = process_start(leaves_a_child, NULL);
	pid_t pid = other->pid, child = (pid_t)process_hear(other);

	process_kill(other);
	expect_gone_soon(pid);
	ck_assert_int_eq(kill(child, 0), 0);
	ck_assert_uint_eq(stats().blocks_leased, 0);
	ck_assert_uint_eq(stats().blocks_quarantined, 0);
	ck_assert_uint_eq(stats().blocks_cached_held, 0);
	must(kv_blocks_take(pool, N_BLOCKS, ids, TIMEOUT));
	must(kv_blocks_give(pool, N_BLOCKS, ids));
	ck_assert_int_eq(kill(child, SIGKILL), 0);
}
END_TEST

/* ---- the daemon's own processes ---- */

static bool has_mover_other_than(uint64_t old)
{
	uint64_t pid = gpu_stats(client).mover_pid;

	return pid && pid != old;
}

START_TEST(a_mover_that_dies_is_replaced_and_nothing_is_lost)
{
	struct kv_pool *dirty = pool_new_mapped(client, "dirty", 0), *clean;
	uint64_t mover, free_before;

	kv_pool_close(dirty);
	must(kv_pool_drop(client, "dirty", TIMEOUT));
	wait_until(gpu_stats(client).bytes_scrubbing == 0);
	free_before = gpu_stats(client).bytes_free;
	for (int i = 0; i < 5; i++) {
		uint32_t n = 20000;
		kv_block_id *list = malloc(n * sizeof(*list));

		dirty = pool_new_mapped(client, "dirty", 0);
		must(kv_blocks_take(dirty, n, list, TIMEOUT));
		for (uint32_t k = 0; k < n; k++)
			block_fill(dirty, list[k], 0xff);
		free(list);
		mover = gpu_stats(client).mover_pid;
		kv_pool_close(dirty);
		must(kv_pool_drop(client, "dirty", TIMEOUT));
		ck_assert_int_eq(kill((pid_t)mover, SIGKILL), 0); /* zeroing now, or just done */
		books_balance(client);
		wait_until(has_mover_other_than(mover));
		wait_until(gpu_stats(client).bytes_free == free_before);
		books_balance(client);
	}
	ck_assert_uint_eq(daemon_children(), 1);
	clean = pool_new_mapped(client, "clean", 0);
	{
		uint32_t n = 20000;
		kv_block_id *list = malloc(n * sizeof(*list));

		must(kv_blocks_take(clean, n, list, TIMEOUT));
		for (uint32_t k = 0; k < n; k++)
			expect(block_is(clean, list[k], 0), "block %d was handed out dirty",
			       list[k]);
		free(list);
	}
	kv_pool_close(clean);
}
END_TEST

START_TEST(a_mover_that_hangs_does_not_stop_the_service)
{
	uint64_t mover = gpu_stats(client).mover_pid;

	ck_assert_int_eq(kill((pid_t)mover, SIGSTOP), 0);
	must(kv_blocks_take(pool, N_BLOCKS, ids, TIMEOUT));
	must(kv_blocks_give(pool, N_BLOCKS, ids));
	must(kv_ping(client, TIMEOUT));
	books_balance(client);
	/* teardown: SIGTERM ends the daemon and this mover, too. */
}
END_TEST

static void works_until_told(struct process *self, void *arg)
{
	struct kv_client *own = client_new();
	struct kv_pool *mine = pool_new_mapped(own, "pool", 0);
	kv_block_id some[16];
	struct kv_seq *seq;
	size_t hit;
	int r = 0;

	(void)arg;
	must(kv_blocks_take(mine, 16, some, TIMEOUT));
	seq = seq_published(own, mine, 1, 320);
	block_fill(mine, some[3], 0x5c);
	process_say(self, 0);
	process_wait(self);
	/* The daemon is gone. What is mapped is still there; calls say so, and none hangs. */
	for (int i = 0; i < 2000 && r != -ECONNRESET; i++) {
		r = kv_blocks_take(mine, 1, ids, TIMEOUT);
		if (!r)
			kv_blocks_give(mine, 1, ids);
		else
			ck_assert_int_eq(r, -ECONNRESET);
		r = r ? r : kv_ping(own, TIMEOUT);
	}
	ck_assert_int_eq(r, -ECONNRESET);
	ck_assert(block_is(mine, some[3], 0x5c));
	must(kv_seq_new(mine, &seq));
	must(kv_seq_lookup(seq, tokens_of(1, 321), 321, &hit));
	ck_assert_uint_eq(hit, 320);
	kv_seq_free(seq, NULL);
	kv_pool_close(mine);
	kv_disconnect(own);
}

START_TEST(when_the_daemon_ends_its_clients_go_on_with_what_they_have)
{
	struct process *others[3];
	pid_t mover = (pid_t)gpu_stats(client).mover_pid;

	for (int i = 0; i < 3; i++) {
		others[i] = process_start(works_until_told, NULL);
		process_hear(others[i]);
	}
	if (_i) {
		daemon_kill();
		wait_until(kill(mover, 0) < 0 && errno == ESRCH);
		unlink(daemon_socket());
	} else {
		daemon_stop();
	}
	for (int i = 0; i < 3; i++)
		process_go(others[i]);
	for (int i = 0; i < 3; i++)
		process_end(others[i]);
	kv_pool_close(pool);
	kv_disconnect(client);
	setup();
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
	tcase_add_test(tcase,
		       a_forked_child_can_do_nothing_with_its_parents_handles_and_connect_anew);
	tcase_add_test(tcase, a_child_that_lives_on_keeps_nothing_of_its_dead_parent);
	tcase_add_test(tcase, a_mover_that_dies_is_replaced_and_nothing_is_lost);
	tcase_add_test(tcase, a_mover_that_hangs_does_not_stop_the_service);
	tcase_add_loop_test(tcase, when_the_daemon_ends_its_clients_go_on_with_what_they_have, 0,
			    2);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
