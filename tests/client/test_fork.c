/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What lies in memory when sequences share blocks and then write: forks, rollbacks into published
 * tokens, twins, evictions, two sessions of one pool (bytes.h).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/client/bytes.h"

#define SIZE	  4 /* tokens of a block */
#define MAX_LEN	  64
#define MAX_BATCH 8

static struct kv_client *client;
static struct kv_pool *pool, *other; /* 60 blocks; two sessions, both mapped */
static struct kv_batch *batch, *other_batch;

static struct kv_pool *open_pool(void)
{
	return bytes_pool(client, "pool", SIZE, 60);
}

static struct kv_batch *new_batch(struct kv_pool *p)
{
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = MAX_BATCH,
		   .max_tokens = MAX_BATCH * MAX_LEN, .max_blocks_per_seq = MAX_LEN / SIZE);
	struct kv_batch *b;

	must(kv_batch_new(p, &sizes, &b));
	return b;
}

static void setup(void)
{
	daemon_start("--host", "16M");
	client = client_new();
	pool = open_pool();
	other = open_pool();
	batch = new_batch(pool);
	other_batch = new_batch(other);
}

static void teardown(void)
{
	kv_batch_free(batch);
	kv_batch_free(other_batch);
	kv_pool_close(pool);
	kv_pool_close(other);
	books_balance(client);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_leased, 0);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached_held, 0);
	kv_disconnect(client);
	daemon_stop();
}

static void step_one(struct kv_seq *seq, uint32_t n_query)
{
	struct kv_batch_item item = {seq, n_query};

	bytes_step(pool, batch, &item, 1);
}

/* ---- helpers ---- */

static struct kv_seq *computed(int32_t prompt, size_t n)
{
	struct kv_seq *seq;

	must(kv_seq_new(pool, &seq));
	must(kv_seq_reserve(seq, n, TIMEOUT));
	must(kv_seq_append(seq, tokens_of(prompt, n), n));
	step_one(seq, (uint32_t)n);
	return seq;
}

static void go_on(struct kv_seq *seq, int32_t token)
{
	must(kv_seq_reserve(seq, kv_seq_len(seq) + 1, TIMEOUT));
	must(kv_seq_append(seq, &token, 1));
	step_one(seq, 1);
}

static kv_block_id block(const struct kv_seq *seq, size_t i)
{
	const kv_block_id *ids;

	ck_assert_uint_lt(i, kv_seq_blocks(seq, &ids));
	return ids[i];
}

/* ---- forks ---- */

START_TEST(a_fork_shares_all_blocks_until_one_writes)
{
	struct kv_seq *seq = computed(1, 10), *fork;
	uint64_t before = pool_stats(client, "pool").blocks_leased;

	must(kv_seq_fork(seq, &fork));
	ck_assert_uint_eq(kv_seq_len(fork), 10);
	ck_assert_mem_eq(kv_seq_tokens(fork), tokens_of(1, 10), 40);
	for (size_t i = 0; i < 3; i++)
		ck_assert_int_eq(block(fork, i), block(seq, i));
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_leased, before);

	/* The place is shared: nothing may be written there yet. */
	refused(kv_seq_append(fork, &(int32_t){5}, 1), -EPERM, "reserve");
	refused(kv_seq_append(seq, &(int32_t){5}, 1), -EPERM, "reserve");
	kv_seq_free(fork, NULL);
	must(kv_seq_append(seq, &(int32_t){5}, 1));
	kv_seq_free(seq, NULL);
}
END_TEST

/* Who writes first: the parent, the child, both in one batch; at every place in a block. */
START_TEST(after_a_fork_each_has_its_own_bytes)
{
	for (size_t len = 1; len <= 9; len++) {
		struct kv_seq *seq = computed(1, len), *fork;

		must(kv_seq_fork(seq, &fork));
		if (_i == 2) {
			struct kv_batch_item items[] = {{seq, 1}, {fork, 1}};

			must(kv_seq_reserve(seq, len + 1, TIMEOUT));
			must(kv_seq_reserve(fork, len + 1, TIMEOUT));
			must(kv_seq_append(seq, &(int32_t){100}, 1));
			must(kv_seq_append(fork, &(int32_t){200}, 1));
			bytes_step(pool, batch, items, 2);
		} else {
			go_on(_i ? fork : seq, 100);
			go_on(_i ? seq : fork, 200);
		}
		for (size_t i = 0; i < len / SIZE; i++)
			expect(block(seq, i) == block(fork, i), "whole block %zu was copied", i);
		expect(block(seq, len / SIZE) != block(fork, len / SIZE),
		       "both write into one block at %zu", len);
		for (int32_t i = 0; i < 6; i++) {
			go_on(seq, 300 + i);
			go_on(fork, 400 + i);
			bytes_right(pool, seq, "parent", (int)len);
			bytes_right(pool, fork, "child", (int)len);
		}
		kv_seq_free(_i ? seq : fork, NULL);
		bytes_right(pool, _i ? fork : seq, "survivor", (int)len);
		go_on(_i ? fork : seq, 500);
		bytes_right(pool, _i ? fork : seq, "survivor", (int)len);
		kv_seq_free(_i ? fork : seq, NULL);
	}
}
END_TEST

START_TEST(a_fork_of_a_fork_that_has_not_run_yet_has_the_bytes_of_the_first)
{
	struct kv_seq *seqs[5] = {computed(1, 6)};
	struct kv_batch_item items[5];

	/* Each is given its own block before any copy is done, and forked again. */
	for (int i = 1; i < 5; i++) {
		must(kv_seq_fork(seqs[i - 1], &seqs[i]));
		must(kv_seq_reserve(seqs[i], 7, TIMEOUT));
	}
	for (int i = 0; i < 5; i++) {
		must(kv_seq_reserve(seqs[i], 7, TIMEOUT));
		must(kv_seq_append(seqs[i], &(int32_t){i}, 1));
		items[i] = (struct kv_batch_item){seqs[i], 1};
	}
	bytes_step(pool, batch, items, 5);
	for (int i = 0; i < 5; i++) {
		bytes_right(pool, seqs[i], "fork", i);
		for (int k = 0; k < i; k++)
			ck_assert_int_ne(block(seqs[i], 1), block(seqs[k], 1));
	}
	for (int i = 0; i < 5; i++)
		kv_seq_free(seqs[i], NULL);
}
END_TEST

/* The order in which the copies of one batch are done must not matter. */
START_TEST(no_copy_of_a_batch_reads_what_another_writes)
{
	struct kv_seq *seqs[4] = {computed(1, 6)};
	struct kv_batch_item items[4];
	const struct kv_batch_data *d = kv_batch_data(batch);

	for (int i = 1; i < 4; i++) {
		must(kv_seq_fork(seqs[i - 1], &seqs[i]));
		must(kv_seq_reserve(seqs[i], 7, TIMEOUT));
	}
	for (int i = 0; i < 4; i++)
		items[i] = (struct kv_batch_item){seqs[i], 1};
	must(kv_batch_build(batch, items, 4, 0, 0));
	ck_assert_uint_ge(d->n_copies, 3);
	for (uint32_t i = 0; i < d->n_copies; i++) {
		for (uint32_t k = 0; k < d->n_copies; k++)
			expect(d->copies[2 * i] != d->copies[2 * k + 1],
			       "block %d is the source of a copy and the target of another",
			       d->copies[2 * i]);
	}
	must(kv_batch_copy(batch, NULL));
	for (int i = 0; i < 4; i++)
		kv_seq_free(seqs[i], NULL);
}
END_TEST

START_TEST(a_fork_that_ends_before_its_copy_takes_it_along)
{
	struct kv_seq *seq = computed(1, 6), *fork;

	for (int i = 0; i < 100; i++) {
		must(kv_seq_fork(seq, &fork));
		must(kv_seq_reserve(fork, 7, TIMEOUT));
		kv_seq_free(fork, NULL);
	}
	go_on(seq, 9);
	ck_assert_uint_eq(kv_batch_data(batch)->n_copies, 0);
	bytes_right(pool, seq, "parent", 0);
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(copies_are_done_once)
{
	struct kv_seq *seq = computed(1, 6), *fork;
	struct kv_batch_item item;

	must(kv_seq_fork(seq, &fork));
	go_on(fork, 9);
	ck_assert_uint_eq(kv_batch_data(batch)->n_copies, 1);
	/* The parent is alone now and writes into its block: a second copy would carry that over.
	 */
	go_on(seq, 8);
	must(kv_batch_copy(batch, NULL));
	bytes_right(pool, fork, "fork", 0);
	item = (struct kv_batch_item){fork, 1};
	must(kv_batch_build(batch, &item, 1, 0, 0));
	ck_assert_uint_eq(kv_batch_data(batch)->n_copies, 0);
	kv_seq_free(seq, NULL);
	kv_seq_free(fork, NULL);
}
END_TEST

/* ---- published blocks ---- */

START_TEST(writing_after_a_rollback_into_published_tokens_changes_no_shared_block)
{
	struct kv_seq *seq = computed(1, 12), *reader;
	size_t hit;

	must(kv_seq_publish(seq, NULL));
	must(kv_ping(client, TIMEOUT));
	must(kv_seq_new(other, &reader));
	must(kv_seq_lookup(reader, tokens_of(1, 13), 13, &hit));
	ck_assert_uint_eq(hit, 12);
	for (size_t to = 11; to >= 1; to--) {
		must(kv_seq_rollback(seq, to, NULL));
		go_on(seq, 777);
		go_on(seq, 778);
		bytes_right(other, reader, "reader", (int)to);
		bytes_right(pool, seq, "writer", (int)to);
	}
	/* One that comes now finds the first one's bytes, too. */
	kv_seq_free(reader, NULL);
	must(kv_seq_new(other, &reader));
	must(kv_seq_lookup(reader, tokens_of(1, 13), 13, &hit));
	ck_assert_uint_eq(hit, 12);
	bytes_right(other, reader, "late reader", 0);
	kv_seq_free(reader, NULL);
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(writing_after_a_rollback_that_outran_the_answer_changes_no_shared_block)
{
	for (int round = 0; round < 100; round++) {
		struct kv_seq *seq = computed(round, 8), *reader;
		size_t hit;

		must(kv_seq_publish(seq, NULL));
		must(kv_seq_rollback(seq, 6, NULL)); /* published by now, or not yet */
		go_on(seq, 777);
		go_on(seq, 778);
		must(kv_ping(client, TIMEOUT));
		must(kv_seq_new(other, &reader));
		must(kv_seq_lookup(reader, tokens_of(round, 9), 9, &hit));
		expect(hit == 8, "round %d: hit %zu", round, hit);
		bytes_right(other, reader, "reader", round);
		bytes_right(pool, seq, "writer", round);
		kv_seq_free(reader, NULL);
		kv_seq_free(seq, NULL);
	}
}
END_TEST

/* ---- all of it at random ---- */

#define N_SEQS 6

struct one {
	struct kv_seq *seq;
	bool is_other;
	bool waits; /* for its session's next batch, which does its copy */
};

static unsigned seed;

static uint32_t below(uint32_t n)
{
	return (uint32_t)rand_r(&seed) % n;
}

/* A step of one of the sessions: all its copies are done. */
static void walk_batch(struct one *all, bool is_other, const struct kv_batch_item *items,
		       uint32_t n)
{
	bytes_step(is_other ? other : pool, is_other ? other_batch : batch, items, n);
	for (int i = 0; i < N_SEQS; i++)
		all[i].waits = all[i].waits && all[i].is_other != is_other;
}

static void walk_begin(struct one *all, struct one *one)
{
	int32_t tokens[MAX_LEN];
	size_t n = 1 + below(40), hit;
	struct kv_batch_item item;

	one->is_other = below(2);
	one->waits = false;
	for (size_t i = 0; i < n; i++)
		tokens[i] = below(8) ? 1 : 2; /* so that beginnings are often the same */
	must(kv_seq_new(one->is_other ? other : pool, &one->seq));
	must(kv_seq_lookup(one->seq, tokens, n, &hit));
	bytes_right(one->is_other ? other : pool, one->seq, "hit", (int)hit);
	if (kv_seq_reserve(one->seq, n, 0)) {
		one->seq = kv_seq_free(one->seq, NULL);
		return;
	}
	must(kv_seq_append(one->seq, tokens + hit, n - hit));
	item = (struct kv_batch_item){one->seq, (uint32_t)(n - hit)};
	walk_batch(all, one->is_other, &item, 1);
}

/* Those of one session that have room get a few tokens each, in one batch. */
static void walk_step(struct one *all, bool is_other)
{
	struct kv_batch_item items[N_SEQS];
	uint32_t n = 0;

	for (int i = 0; i < N_SEQS; i++) {
		struct kv_seq *seq = all[i].seq;
		uint32_t more = 1 + below(5);

		if (!seq || all[i].is_other != is_other || below(3) == 0 ||
		    kv_seq_len(seq) + more > MAX_LEN ||
		    kv_seq_reserve(seq, kv_seq_len(seq) + more, 0))
			continue;
		for (uint32_t k = 0; k < more; k++)
			must(kv_seq_append(seq, &(int32_t){below(8) ? 1 : 2}, 1));
		items[n++] = (struct kv_batch_item){seq, more};
	}
	walk_batch(all, is_other, items, n);
}

static void walk_one(struct one *all, struct one *one)
{
	struct one *free_place = NULL;

	for (int i = 0; i < N_SEQS; i++) {
		if (!all[i].seq)
			free_place = &all[i];
	}
	switch (below(6)) {
	case 0:
		one->seq = kv_seq_free(one->seq, NULL);
		break;
	case 1:
		must(kv_seq_rollback(one->seq, below((uint32_t)kv_seq_len(one->seq) + 1), NULL));
		if (!kv_seq_len(one->seq))
			one->seq = kv_seq_free(one->seq, NULL);
		break;
	case 2:
		if (!free_place)
			break;
		must(kv_seq_fork(one->seq, &free_place->seq));
		free_place->is_other = one->is_other;
		/* Perhaps it is given its own block, and is forked again before the next step. */
		free_place->waits = one->waits;
		if (below(2) && !kv_seq_reserve(free_place->seq, kv_seq_len(one->seq) + 1, 0))
			free_place->waits = true;
		break;
	default:
		must(kv_seq_publish(one->seq, NULL));
	}
}

START_TEST(whatever_sequences_do_each_finds_its_own_bytes)
{
	struct one all[N_SEQS] = {0};

	seed = (unsigned)_i + 1;
	for (int round = 0; round < 3000; round++) {
		struct one *one = &all[below(N_SEQS)];

		if (!one->seq)
			walk_begin(all, one);
		else if (below(2))
			walk_step(all, below(2));
		else
			walk_one(all, one);
		if (below(4) == 0)
			must(kv_ping(client, TIMEOUT));
		for (int i = 0; i < N_SEQS; i++) {
			if (all[i].seq && !all[i].waits)
				bytes_right(all[i].is_other ? other : pool, all[i].seq, "walk",
					     round);
		}
		if (round % 100 == 0)
			books_balance(client);
	}
	{
		struct kv_pool_stats s = pool_stats(client, "pool");

		expect(s.hit_tokens_total > 500 && s.published_total > 500 &&
			       s.duplicates_total > 20 && s.evictions_total > 50,
		       "hits %llu published %llu duplicates %llu evictions %llu",
		       (unsigned long long)s.hit_tokens_total,
		       (unsigned long long)s.published_total,
		       (unsigned long long)s.duplicates_total,
		       (unsigned long long)s.evictions_total);
	}
	for (int i = 0; i < N_SEQS; i++)
		kv_seq_free(all[i].seq, NULL);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/fork");
	TCase *tcase = tcase_create("fork");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, a_fork_shares_all_blocks_until_one_writes);
	tcase_add_loop_test(tcase, after_a_fork_each_has_its_own_bytes, 0, 3);
	tcase_add_test(tcase, a_fork_of_a_fork_that_has_not_run_yet_has_the_bytes_of_the_first);
	tcase_add_test(tcase, no_copy_of_a_batch_reads_what_another_writes);
	tcase_add_test(tcase, a_fork_that_ends_before_its_copy_takes_it_along);
	tcase_add_test(tcase, copies_are_done_once);
	tcase_add_test(tcase,
		       writing_after_a_rollback_into_published_tokens_changes_no_shared_block);
	tcase_add_test(tcase,
		       writing_after_a_rollback_that_outran_the_answer_changes_no_shared_block);
	tcase_add_loop_test(tcase, whatever_sequences_do_each_finds_its_own_bytes, 0, 4);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
