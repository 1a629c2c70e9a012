/* SPDX-License-Identifier: Apache-2.0 */
/* A process that forks: its child can do nothing with its handles, and keeps nothing alive. */
#include <errno.h>
#include <signal.h>
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

/* All that a child may try with the handles of its parent. */
static void use_inherited_handles(struct kv_client *own, struct kv_pool *mine, struct kv_seq *seq,
				  struct kv_seq *preempted, struct kv_gseq *group, struct kv_batch *batch)
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
	refused(kv_seq_preempt(seq, NULL), -ECHILD, "fork");
	refused(kv_seq_resume(preempted, 400, TIMEOUT, &n), -ECHILD, "fork");
	ck_assert_uint_eq(kv_seq_preempted(preempted), 320);
	refused(kv_seq_promise(seq, tokens_of(1, 400), 400, TIMEOUT, &n), -ECHILD, "fork");
	refused(kv_seq_follow(seq, tokens_of(1, 400), 400, TIMEOUT, &n), -ECHILD, "fork");
	refused(kv_gseq_resume(group, 400, TIMEOUT, &n), -ECHILD, "fork");
	ck_assert_uint_eq(kv_gseq_preempted(group), 320);
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
	struct kv_seq *seq, *preempted;
	struct kv_groups *groups;
	struct kv_gseq *group; /* preempted, too */
	struct kv_batch *batch;
};

static struct parents begin_parent(void)
{
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = 4, .max_tokens = 64,
		   .max_blocks_per_seq = 30);
	struct kv_group full = {.kind = KV_GROUP_FULL};
	KV_OPTIONS(kv_groups_options, one, .groups = &full, .n_groups = 1);
	struct parents p = {.client = client_new()};

	p.pool = pool_new_mapped(p.client, "pool", 0);
	full.pool = p.pool;
	must(kv_blocks_take(p.pool, 100, ids, TIMEOUT));
	must(kv_blocks_give(p.pool, 5, ids + 95));
	p.seq = seq_published(p.client, p.pool, 1, 320);
	p.preempted = seq_new(p.pool, 2, 320, NULL);
	must(kv_seq_preempt(p.preempted, NULL));
	must(kv_groups_new(&one, &p.groups));
	must(kv_gseq_new(p.groups, &p.group));
	must(kv_gseq_reserve(p.group, 320, TIMEOUT));
	must(kv_gseq_append(p.group, tokens_of(3, 320), 320));
	must(kv_gseq_preempt(p.group, NULL));
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
		use_inherited_handles(p.client, p.pool, p.seq, p.preempted, p.group, p.batch);
		/* It connects anew; the ends of the old handles end nothing of that. */
		own = client_new();
		mine = pool_new_mapped(own, "pool", 0);
		must(kv_blocks_take(mine, 50, ids, TIMEOUT));
		for (int i = 0; i < 50; i++)
			block_fill(mine, ids[i], 0x31);
		kv_seq_free(p.seq, NULL);
		kv_seq_free(p.preempted, NULL);
		kv_gseq_free(p.group, NULL);
		kv_groups_free(p.groups);
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
	kv_seq_free(p.preempted, NULL);
	kv_gseq_free(p.group, NULL);
	kv_groups_free(p.groups);
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
	expect_gone_soon(client, pid);
	ck_assert_int_eq(kill(child, 0), 0);
	ck_assert_uint_eq(stats().blocks_leased, 0);
	ck_assert_uint_eq(stats().blocks_quarantined, 0);
	ck_assert_uint_eq(stats().blocks_cached_held, 0);
	must(kv_blocks_take(pool, N_BLOCKS, ids, TIMEOUT));
	must(kv_blocks_give(pool, N_BLOCKS, ids));
	ck_assert_int_eq(kill(child, SIGKILL), 0);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/forked");
	TCase *tcase = tcase_create("forked");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase,
		       a_forked_child_can_do_nothing_with_its_parents_handles_and_connect_anew);
	tcase_add_test(tcase, a_child_that_lives_on_keeps_nothing_of_its_dead_parent);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
