/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences: growing, finding a prefix, publishing, forking, rolling back, ending. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/client.h"

static struct kv_client *client;
static struct kv_pool *pool;	/* 64 blocks */
static struct kv_pool *other;	/* a session of its own in the same pool */
static struct kv_pool *more[3]; /* so many that none of them keeps idle blocks */

static void setup(void)
{
	daemon_start("--host", "16M");
	client = client_new();
	pool = pool_new(client, "pool", 64);
	other = pool_new(client, "pool", 0);
	for (int i = 0; i < 3; i++)
		more[i] = pool_new(client, "pool", 0);
}

static void teardown(void)
{
	kv_pool_close(pool);
	kv_pool_close(other);
	for (int i = 0; i < 3; i++)
		kv_pool_close(more[i]);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

static size_t n_blocks(const struct kv_seq *seq)
{
	const kv_block_id *ids;

	return kv_seq_blocks(seq, &ids);
}

static kv_block_id block(const struct kv_seq *seq, size_t i)
{
	const kv_block_id *ids;

	ck_assert_uint_lt(i, kv_seq_blocks(seq, &ids));
	return ids[i];
}

/* A step: with it the copies are on their way that the reservation noted. */
static void step(struct kv_batch *batch, struct kv_seq *seq, uint32_t n_query)
{
	struct kv_batch_item item = {seq, n_query};

	must(kv_batch_build(batch, &item, 1, 0, 0));
}

/* How many blocks can be taken: those that nobody uses. They are given back. */
static uint32_t n_free(struct kv_pool *p)
{
	kv_block_id ids[64];
	uint32_t n = 0;

	while (n < 64 && kv_blocks_take(p, 1, ids + n, 0) == 0)
		n++;
	must(kv_blocks_give(p, n, ids));
	return n;
}

/* ---- growing ---- */

START_TEST(an_empty_sequence_has_nothing)
{
	struct kv_seq *seq;

	must(kv_seq_new(pool, &seq));
	ck_assert_uint_eq(kv_seq_len(seq), 0);
	ck_assert_uint_eq(kv_seq_capacity(seq), 0);
	ck_assert_uint_eq(n_blocks(seq), 0);
	must(kv_seq_reserve(seq, 0, 0));
	must(kv_seq_append(seq, NULL, 0));
	must(kv_seq_publish(seq, NULL));
	must(kv_seq_rollback(seq, 0, NULL));
	ck_assert_uint_eq(n_blocks(seq), 0);
	kv_seq_free(seq, NULL);
}
END_TEST

/* D12. */
START_TEST(lengths_at_block_boundaries_need_the_blocks_they_need)
{
	static const struct {
		size_t len, blocks;
	} cases[] = {{0, 0}, {1, 1}, {15, 1}, {16, 1}, {17, 2}, {32, 2}, {33, 3}};

	for (int i = 0; i < 7; i++) {
		struct kv_seq *seq;
		size_t n = cases[i].len;
		bool is_full = n % BLOCK_TOKENS == 0;

		must(kv_seq_new(pool, &seq));
		must(kv_seq_reserve(seq, n, TIMEOUT));
		ck_assert_uint_eq(n_blocks(seq), cases[i].blocks);
		ck_assert_uint_eq(kv_seq_capacity(seq), cases[i].blocks * BLOCK_TOKENS);
		must(kv_seq_append(seq, tokens_of(1, n), n));
		ck_assert_uint_eq(kv_seq_len(seq), n);
		/* One token more: it has a place, or it needs a block first. */
		ck_assert_int_eq(kv_seq_append(seq, tokens_of(1, 1), 1), is_full ? -ENOSPC : 0);
		kv_seq_free(seq, NULL);
	}
}
END_TEST

/* D12. */
START_TEST(decoding_takes_a_block_exactly_before_the_token_that_needs_it)
{
	struct kv_seq *seq;

	must(kv_seq_new(pool, &seq));
	for (int32_t n = 1; n <= 33; n++) {
		size_t before = n_blocks(seq);

		must(kv_seq_reserve(seq, (size_t)n, TIMEOUT));
		expect(n_blocks(seq) - before == (n == 1 || n == 17 || n == 33), "token %d", n);
		must(kv_seq_append(seq, &n, 1));
	}
	for (int32_t n = 0; n < 33; n++)
		expect(kv_seq_tokens(seq)[n] == n + 1, "token %d", n);
	kv_seq_free(seq, NULL);
}
END_TEST

/* D08. */
START_TEST(growing_charges_the_difference_and_changes_no_block)
{
	KV_OPTIONS(kv_pool_options, what, .name = "pool", .model = "small", .max_seq_tokens = 256);
	struct kv_seq *seq, *neighbour = seq_new(pool, 2, 100, NULL);
	struct kv_pool *bounded;
	kv_block_id first[7], all[13], next[7];
	const kv_block_id *ids;

	kv_seq_blocks(neighbour, &ids);
	memcpy(next, ids, sizeof(next));
	must(kv_pool_open(client, &what, &bounded));
	must(kv_seq_new(bounded, &seq));
	must(kv_seq_reserve(seq, 100, TIMEOUT));
	ck_assert_uint_eq(kv_seq_blocks(seq, &ids), 7);
	memcpy(first, ids, sizeof(first));
	must(kv_seq_reserve(seq, 200, TIMEOUT));
	ck_assert_uint_eq(kv_seq_blocks(seq, &ids), 13);
	ck_assert_mem_eq(ids, first, sizeof(first));
	memcpy(all, ids, sizeof(all));
	ck_assert_uint_eq(n_free(pool), 64 - 13 - 7);

	/* Again, and less: nothing. More than there ever is: refused, and nothing. */
	must(kv_seq_reserve(seq, 200, TIMEOUT));
	must(kv_seq_reserve(seq, 100, TIMEOUT));
	ck_assert_int_eq(kv_seq_reserve(seq, 257, TIMEOUT), KV_TOO_LARGE);
	ck_assert_int_eq(kv_seq_reserve(neighbour, 64 * 16 + 1, TIMEOUT), KV_TOO_LARGE);
	ck_assert_int_eq(kv_seq_reserve(seq, SIZE_MAX, TIMEOUT), KV_TOO_LARGE);
	ck_assert_uint_eq(kv_seq_blocks(seq, &ids), 13);
	ck_assert_mem_eq(ids, all, sizeof(all));
	ck_assert_uint_eq(n_free(pool), 64 - 13 - 7);
	kv_seq_blocks(neighbour, &ids);
	ck_assert_mem_eq(ids, next, sizeof(next));
	must(kv_seq_reserve(seq, 256, TIMEOUT));
	ck_assert_uint_eq(kv_seq_blocks(seq, &ids), 16);
	kv_seq_free(seq, NULL);
	kv_pool_close(bounded);
	kv_seq_free(neighbour, NULL);
	ck_assert_uint_eq(n_free(pool), 64);
}
END_TEST

START_TEST(a_reservation_without_room_leaves_the_sequence_as_it_was)
{
	struct kv_seq *seq = seq_new(pool, 1, 40, NULL), *large = seq_new(pool, 2, 800, NULL);
	const kv_block_id *ids;
	kv_block_id before[3];

	ck_assert_uint_eq(kv_seq_blocks(seq, &ids), 3);
	memcpy(before, ids, sizeof(before));
	for (int i = 0; i < 100; i++)
		ck_assert_int_eq(kv_seq_reserve(seq, 300, 0), KV_NO_ROOM);
	ck_assert_uint_eq(kv_seq_blocks(seq, &ids), 3);
	ck_assert_mem_eq(ids, before, sizeof(before));
	ck_assert_uint_eq(kv_seq_len(seq), 40);
	ck_assert_uint_eq(kv_seq_capacity(seq), 48);
	ck_assert_uint_eq(n_free(pool), 64 - 3 - 50);
	kv_seq_free(large, NULL);
	must(kv_seq_reserve(seq, 300, 0));
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(a_failed_admission_leaves_nothing_behind)
{
	struct kv_seq *holds, *rest;
	struct kv_pool_stats before, after;

	holds = seq_published(client, other, 1, 10 * 16);
	rest = seq_new(other, 2, 50 * 16, NULL);
	before = pool_stats(client, "pool");
	for (int i = 0; i < 1000; i++) {
		struct kv_seq *seq;
		size_t hit;

		must(kv_seq_new(pool, &seq));
		must(kv_seq_lookup(seq, tokens_of(1, 300), 300, &hit));
		expect(hit == 160, "hit %zu", hit);
		expect(kv_seq_reserve(seq, 320, 0) == KV_NO_ROOM, "round %d", i);
		kv_seq_free(seq, NULL);
	}
	after = pool_stats(client, "pool");
	ck_assert_uint_eq(after.blocks_leased, before.blocks_leased);
	ck_assert_uint_eq(after.blocks_cached, before.blocks_cached);
	ck_assert_uint_eq(after.blocks_cached_held, before.blocks_cached_held);
	ck_assert_uint_eq(after.evictions_total, 0);
	kv_seq_free(holds, NULL);
	kv_seq_free(rest, NULL);
}
END_TEST

/* ---- finding ---- */

/* D26. */
START_TEST(a_hit_is_whole_blocks_and_leaves_one_token_to_compute)
{
	static const size_t cases[][2] = {{0, 0},   {1, 0},   {16, 0},	{17, 16}, {32, 16},
					  {64, 48}, {65, 64}, {80, 64}, {81, 80}, {200, 80}};
	struct kv_seq *seq = seq_published(client, other, 1, 80);

	for (int i = 0; i < 10; i++)
		expect(hit_of(pool, 1, cases[i][0]) == cases[i][1], "%zu tokens hit %zu",
		       cases[i][0], hit_of(pool, 1, cases[i][0]));
	kv_seq_free(seq, NULL);
	for (int i = 0; i < 10; i++)
		expect(hit_of(pool, 1, cases[i][0]) == cases[i][1], "%zu tokens, unheld",
		       cases[i][0]);
}
END_TEST

/* D22. */
START_TEST(only_what_was_published_is_found)
{
	struct kv_seq *seq;

	must(kv_seq_new(other, &seq));
	must(kv_seq_reserve(seq, 64, TIMEOUT));
	ck_assert_uint_eq(hit_of(pool, 1, 65), 0);
	must(kv_seq_append(seq, tokens_of(1, 64), 40));
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_eq(hit_of(pool, 1, 65), 0);
	must(kv_seq_publish(seq, NULL)); /* 40 tokens: two whole blocks */
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_eq(hit_of(pool, 1, 65), 32);
	must(kv_seq_append(seq, tokens_of(1, 64) + 40, 24));
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_eq(hit_of(pool, 1, 65), 32);
	must(kv_seq_publish(seq, NULL));
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_eq(hit_of(pool, 1, 65), 64);
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(what_was_published_before_a_ping_is_found_after_it)
{
	/* Each prompt once: as the daemon evicts the old ones the pool is full all the time. */
	for (int32_t prompt = 0; prompt < 1000; prompt++) {
		struct kv_seq *seq = seq_published(client, other, prompt, 48);

		expect(hit_of(pool, prompt, 49) == 48, "prompt %d", prompt);
		kv_seq_free(seq, NULL);
	}
	books_balance(client);
}
END_TEST

START_TEST(prompts_that_differ_anywhere_share_what_is_before_it)
{
	struct kv_seq *seq = seq_published(client, other, 1, 64);

	for (size_t at = 0; at < 64; at++) {
		int32_t tokens[65];
		size_t hit;

		memcpy(tokens, tokens_of(1, 65), sizeof(tokens));
		tokens[at] ^= 1;
		{
			struct kv_seq *mine;

			must(kv_seq_new(pool, &mine));
			must(kv_seq_lookup(mine, tokens, 65, &hit));
			kv_seq_free(mine, NULL);
		}
		expect(hit == at / 16 * 16, "token %zu differs, hit %zu", at, hit);
	}
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(a_found_sequence_has_the_publishers_blocks_and_goes_on_from_there)
{
	struct kv_seq *one = seq_published(client, other, 1, 48), *two;
	size_t hit;

	two = seq_new(pool, 1, 70, &hit);
	ck_assert_uint_eq(hit, 48);
	ck_assert_uint_eq(kv_seq_len(two), 70);
	ck_assert_uint_eq(n_blocks(two), 5);
	for (size_t i = 0; i < 3; i++)
		ck_assert_int_eq(block(two, i), block(one, i));
	ck_assert_mem_eq(kv_seq_tokens(two), tokens_of(1, 70), 70 * 4);

	/* What it adds is found by the first one's session. */
	must(kv_seq_publish(two, NULL));
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_eq(hit_of(other, 1, 70), 64);
	kv_seq_free(one, NULL);
	kv_seq_free(two, NULL);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached_held, 0);
	ck_assert_uint_eq(hit_of(pool, 1, 70), 64);
}
END_TEST

START_TEST(a_lookup_goes_on_where_somebody_else_has_come_to_meanwhile)
{
	struct kv_seq *ahead = seq_published(client, other, 1, 32), *behind;
	size_t hit;

	must(kv_seq_new(pool, &behind));
	must(kv_seq_lookup(behind, tokens_of(1, 100), 100, &hit));
	ck_assert_uint_eq(hit, 32);
	must(kv_seq_reserve(behind, 100, TIMEOUT)); /* its own blocks, not written yet */
	ck_assert_uint_eq(n_blocks(behind), 7);
	must(kv_seq_reserve(ahead, 96, TIMEOUT));
	must(kv_seq_append(ahead, tokens_of(1, 96) + 32, 64));
	must(kv_seq_publish(ahead, NULL));
	must(kv_ping(client, TIMEOUT));

	must(kv_seq_lookup(behind, tokens_of(1, 100), 100, &hit));
	ck_assert_uint_eq(hit, 96);
	ck_assert_uint_eq(n_blocks(behind), 7);
	for (size_t i = 0; i < 6; i++)
		ck_assert_int_eq(block(behind, i), block(ahead, i));
	must(kv_seq_append(behind, tokens_of(1, 100) + 96, 4));
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_eq(n_free(pool), 64 - 7); /* the four that were not needed are back */
	kv_seq_free(ahead, NULL);
	kv_seq_free(behind, NULL);
}
END_TEST

START_TEST(a_lookup_that_makes_no_sense_is_refused)
{
	struct kv_seq *seq = seq_new(pool, 1, 20, NULL);
	size_t hit = 7;

	refused(kv_seq_lookup(seq, tokens_of(1, 40), 40, &hit), -EINVAL, "20 tokens");
	must(kv_seq_append(seq, tokens_of(1, 32) + 20, 12));
	refused(kv_seq_lookup(seq, tokens_of(2, 40), 40, &hit), -EINVAL, "beginning");
	refused(kv_seq_lookup(seq, tokens_of(1, 31), 31, &hit), -EINVAL, "beginning");
	ck_assert_uint_eq(hit, 7);
	must(kv_seq_lookup(seq, tokens_of(1, 40), 40, &hit));
	ck_assert_uint_eq(hit, 32);
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(lookups_and_hits_are_counted_in_tokens)
{
	struct kv_seq *seq = seq_published(client, other, 1, 64);
	uint64_t asked = pool_stats(client, "pool").lookup_tokens_total;

	hit_of(pool, 1, 65);
	hit_of(pool, 2, 65);
	ck_assert_uint_eq(pool_stats(client, "pool").lookup_tokens_total, asked + 130);
	ck_assert_uint_eq(pool_stats(client, "pool").hit_tokens_total, 64);
	kv_seq_free(seq, NULL);
}
END_TEST

/* ---- publishing ---- */

START_TEST(publishing_again_publishes_nothing_again)
{
	struct kv_seq *seq = seq_published(client, pool, 1, 40);
	uint64_t n = pool_stats(client, "pool").published_total;

	ck_assert_uint_eq(n, 2);
	for (int i = 0; i < 10; i++) {
		must(kv_seq_publish(seq, NULL));
		must(kv_ping(client, TIMEOUT));
	}
	ck_assert_uint_eq(pool_stats(client, "pool").published_total, 2);
	ck_assert_uint_eq(pool_stats(client, "pool").duplicates_total, 0);
	kv_seq_free(seq, NULL);
}
END_TEST

/* Both compute the same prompt; the second is told of the first one's blocks and takes them. */
START_TEST(a_twin_of_what_is_cached_is_exchanged_for_it)
{
	struct kv_pool *second = _i ? other : pool;
	struct kv_seq *one, *two;

	must(kv_seq_new(pool, &one));
	must(kv_seq_new(second, &two));
	must(kv_seq_reserve(one, 50, TIMEOUT));
	must(kv_seq_reserve(two, 50, TIMEOUT));
	must(kv_seq_append(one, tokens_of(1, 50), 50));
	must(kv_seq_append(two, tokens_of(1, 50), 50));
	must(kv_seq_publish(one, NULL));
	must(kv_ping(client, TIMEOUT));
	must(kv_seq_publish(two, NULL));
	must(kv_ping(client, TIMEOUT));
	for (size_t i = 0; i < 3; i++)
		ck_assert_int_ne(block(one, i), block(two, i));
	ck_assert_uint_eq(pool_stats(client, "pool").duplicates_total, 3);

	must(kv_seq_publish(two, NULL)); /* a later call: the tables in use are old by now */
	for (size_t i = 0; i < 3; i++)
		ck_assert_int_eq(block(one, i), block(two, i));
	ck_assert_int_ne(block(one, 3), block(two, 3));
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_eq(n_free(pool), 64 - 5);

	/* It goes on as one that had found them. */
	must(kv_seq_reserve(two, 64, TIMEOUT));
	must(kv_seq_append(two, tokens_of(1, 64) + 50, 14));
	must(kv_seq_publish(two, NULL));
	must(kv_ping(client, TIMEOUT));
	kv_seq_free(one, NULL);
	ck_assert_uint_eq(hit_of(other, 1, 65), 64);
	kv_seq_free(two, NULL);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached_held, 0);
	ck_assert_uint_eq(n_free(pool), 64);
}
END_TEST

/* Its own blocks take the place of what was evicted, also those that were refused meanwhile. */
START_TEST(a_twin_whose_original_is_evicted_before_the_exchange_is_shown_itself)
{
	struct kv_seq *one = seq_published(client, pool, 1, 48), *two, *child;
	kv_block_id ids[64];
	uint32_t n;

	must(kv_seq_new(other, &two));
	must(kv_seq_reserve(two, 80, TIMEOUT));
	must(kv_seq_append(two, tokens_of(1, 48), 48));
	must(kv_seq_publish(two, NULL));
	must(kv_ping(client, TIMEOUT));
	must(kv_seq_fork(two, &child));
	kv_seq_free(one, NULL);
	must(kv_ping(client, TIMEOUT));
	n = n_free(pool);
	must(kv_blocks_take(pool, n, ids, TIMEOUT)); /* all that are free, and the three cached ones */
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached, 0);
	must(kv_blocks_give(pool, n, ids));
	must(kv_seq_append(two, tokens_of(1, 80) + 48, 32));
	if (_i) { /* what lies behind is asked for, and refused, before it is known */
		must(kv_seq_publish(child, NULL));
		must(kv_seq_publish(two, NULL));
	}
	for (int i = 0; i < 3; i++) {
		must(kv_seq_publish(two, NULL));
		must(kv_seq_publish(child, NULL));
		must(kv_ping(client, TIMEOUT));
	}
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached, 5);
	ck_assert_uint_eq(pool_stats(client, "pool").duplicates_total, 3);
	kv_seq_free(two, NULL);
	kv_seq_free(child, NULL);
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_eq(hit_of(pool, 1, 81), 80);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached_held, 0);
	ck_assert_uint_eq(n_free(pool), 64);
}
END_TEST

/* Each time it is shown anew another had the same, and was evicted before the exchange. */
START_TEST(a_twin_whose_originals_are_evicted_one_after_the_other_is_shown_in_the_end)
{
	struct kv_seq *two;
	kv_block_id ids[64];

	must(kv_seq_new(other, &two));
	must(kv_seq_reserve(two, 48, TIMEOUT));
	must(kv_seq_append(two, tokens_of(1, 48), 48));
	for (int round = 0; round < 4; round++) {
		uint32_t n;

		kv_seq_free(seq_published(client, pool, 1, 48), NULL);
		must(kv_seq_publish(two, NULL));
		must(kv_ping(client, TIMEOUT));
		n = n_free(pool);
		must(kv_blocks_take(pool, n, ids, TIMEOUT));
		ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached, 0);
		must(kv_blocks_give(pool, n, ids));
		must(kv_ping(client, TIMEOUT));
	}
	for (int i = 0; i < 2; i++) {
		must(kv_seq_publish(two, NULL));
		must(kv_ping(client, TIMEOUT));
	}
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached, 3);
	kv_seq_free(two, NULL);
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_eq(hit_of(pool, 1, 49), 48);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached_held, 0);
	ck_assert_uint_eq(n_free(pool), 64);
}
END_TEST

START_TEST(a_twin_that_was_never_exchanged_goes_back_at_the_end)
{
	struct kv_seq *one, *two;

	must(kv_seq_new(other, &two));
	must(kv_seq_reserve(two, 48, TIMEOUT));
	must(kv_seq_append(two, tokens_of(1, 48), 48));
	one = seq_published(client, pool, 1, 48);
	must(kv_seq_publish(two, NULL));
	kv_seq_free(two, NULL); /* its blocks are submitted, unanswered, and given */
	must(kv_ping(client, TIMEOUT));
	kv_seq_free(one, NULL);
	ck_assert_uint_eq(hit_of(pool, 1, 49), 48);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached, 3);
	ck_assert_uint_eq(n_free(pool), 64);
}
END_TEST

START_TEST(sequences_freed_right_after_publishing_stay_cached)
{
	for (int32_t prompt = 0; prompt < 4; prompt++) {
		struct kv_seq *seq = seq_new(pool, prompt, 64, NULL);

		must(kv_seq_publish(seq, NULL));
		kv_seq_free(seq, NULL);
	}
	must(kv_ping(client, TIMEOUT));
	for (int32_t prompt = 0; prompt < 4; prompt++)
		expect(hit_of(other, prompt, 65) == 64, "prompt %d", prompt);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached_held, 0);
	ck_assert_uint_eq(n_free(pool), 64);
}
END_TEST

/* ---- eviction ---- */

/* D24. */
START_TEST(an_evicted_prefix_is_forgotten_and_its_blocks_serve_another)
{
	struct kv_pool *four = pool_new(client, "four", 4);

	kv_seq_free(seq_published(client, four, 1, 64), NULL);
	ck_assert_uint_eq(hit_of(four, 1, 65), 64);
	kv_seq_free(seq_published(client, four, 2, 64), NULL);
	ck_assert_uint_eq(hit_of(four, 1, 65), 0);
	ck_assert_uint_eq(hit_of(four, 2, 65), 64);
	kv_seq_free(seq_published(client, four, 3, 16), NULL);
	ck_assert_uint_eq(hit_of(four, 1, 65), 0);
	ck_assert_uint_eq(hit_of(four, 2, 65), 48);
	ck_assert_uint_eq(hit_of(four, 3, 17), 16);
	kv_pool_close(four);
}
END_TEST

/* D25. */
START_TEST(the_end_of_a_prefix_goes_first)
{
	struct kv_pool *three = pool_new(client, "three", 3);
	kv_block_id last, id;

	for (int round = 0; round < 200; round++) {
		struct kv_seq *seq = seq_published(client, three, 1, 48);

		last = block(seq, 2);
		kv_seq_free(seq, NULL);
		must(kv_blocks_take(three, 1, &id, TIMEOUT));
		expect(id == last, "round %d: block %d, not %d", round, id, last);
		expect(hit_of(three, 1, 49) == 32, "round %d", round);
		must(kv_blocks_give(three, 1, &id));
		must(kv_pool_drop(client, "three", TIMEOUT));
	}
	kv_pool_close(three);
}
END_TEST

/* D25. */
START_TEST(the_least_recently_used_prompt_goes_first)
{
	struct kv_pool *four = pool_new(client, "four", 4);
	kv_block_id ids[2];

	kv_seq_free(seq_published(client, four, 1, 32), NULL);
	kv_seq_free(seq_published(client, four, 2, 32), NULL);
	ck_assert_uint_eq(hit_of(four, 1, 33), 32); /* used: now 2 is the older one */
	must(kv_blocks_take(four, 2, ids, TIMEOUT));
	ck_assert_uint_eq(hit_of(four, 1, 33), 32);
	ck_assert_uint_eq(hit_of(four, 2, 33), 0);
	kv_pool_close(four);
}
END_TEST

START_TEST(dropping_forgets_what_nobody_holds)
{
	struct kv_seq *held = seq_published(client, pool, 1, 32);

	kv_seq_free(seq_published(client, pool, 2, 32), NULL);
	must(kv_pool_drop(client, "pool", TIMEOUT));
	ck_assert_uint_eq(hit_of(other, 1, 33), 32);
	ck_assert_uint_eq(hit_of(other, 2, 33), 0);
	kv_seq_free(held, NULL);
	must(kv_pool_drop(client, "pool", TIMEOUT));
	ck_assert_uint_eq(hit_of(other, 1, 33), 0);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached, 0);
}
END_TEST

/* ---- rolling back ---- */

START_TEST(rolling_back_forgets_tokens_and_lets_blocks_go)
{
	struct kv_seq *seq = seq_new(pool, 1, 70, NULL);
	kv_block_id first = block(seq, 0);

	refused(kv_seq_rollback(seq, 71, NULL), -EINVAL, "71");
	must(kv_seq_rollback(seq, 70, NULL));
	ck_assert_uint_eq(kv_seq_len(seq), 70);
	must(kv_seq_rollback(seq, 33, NULL));
	ck_assert_uint_eq(kv_seq_len(seq), 33);
	ck_assert_uint_eq(n_blocks(seq), 3);
	must(kv_seq_rollback(seq, 32, NULL));
	ck_assert_uint_eq(n_blocks(seq), 2);
	must(kv_seq_reserve(seq, 33, TIMEOUT));
	must(kv_seq_append(seq, tokens_of(2, 1), 1));
	ck_assert_int_eq(kv_seq_tokens(seq)[32], tokens_of(2, 1)[0]);
	must(kv_seq_rollback(seq, 0, NULL));
	ck_assert_uint_eq(n_blocks(seq), 0);
	ck_assert_uint_eq(n_free(pool), 64);
	must(kv_seq_reserve(seq, 5, TIMEOUT));
	ck_assert_int_ge(first, 0);
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(rolling_back_before_the_answer_to_a_publish_is_no_harm)
{
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = 1, .max_tokens = 64,
		   .max_blocks_per_seq = 8);
	struct kv_batch *batch;

	must(kv_batch_new(pool, &sizes, &batch));
	for (int32_t round = 0; round < 200; round++) {
		struct kv_seq *seq = seq_new(pool, round, 48, NULL);

		step(batch, seq, 48);
		must(kv_seq_publish(seq, NULL));
		if (round % 2)
			must(kv_ping(client, TIMEOUT));
		must(kv_seq_rollback(seq, 20, NULL));
		must(kv_seq_reserve(seq, 40, TIMEOUT));
		must(kv_seq_append(seq, tokens_of(round + 5000, 20), 20));
		step(batch, seq, 20);
		must(kv_seq_publish(seq, NULL));
		must(kv_ping(client, TIMEOUT));
		expect(hit_of(other, round, 49) == 48, "round %d", round);
		kv_seq_free(seq, NULL);
	}
	kv_batch_free(batch);
	books_balance(client);
	ck_assert_uint_eq(n_free(pool), 64);
}
END_TEST

/*
 * Lengths that come of a wrong subtraction: looking up SIZE_MAX tokens went on for ever. And what says that there is no
 * memory once left the text of an earlier failure.
 */
START_TEST(a_prompt_of_more_tokens_than_there_is_memory_is_refused_at_once)
{
	static const size_t lengths[] = {SIZE_MAX, SIZE_MAX / 2 + 2, SIZE_MAX / 16 + 1};
	const int32_t *tokens = tokens_of(1, 16);
	struct kv_seq *seq;
	size_t hit;

	must(kv_seq_new(pool, &seq));
	refused(kv_seq_field(seq, 0, NULL, 0), -EINVAL, "tag");
	refused(kv_seq_lookup(seq, tokens, lengths[_i], &hit), -ENOMEM, "no memory");
	ck_assert_uint_eq(kv_seq_len(seq), 0);
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(room_that_a_sequence_has_stays_when_the_pool_may_have_less)
{
	KV_OPTIONS(kv_pool_limits, less, .change = KV_LIMIT_MAX, .max_bytes = 21 * BLOCK_BYTES);
	struct kv_seq *seq;

	must(kv_seq_new(pool, &seq));
	must(kv_seq_reserve(seq, 40 * BLOCK_TOKENS, TIMEOUT));
	must(kv_pool_set(client, "pool", &less, NULL, TIMEOUT));
	must(kv_seq_reserve(seq, 40 * BLOCK_TOKENS, 0));
	must(kv_seq_append(seq, tokens_of(1, 600), 600));
	must(kv_seq_reserve(seq, 601, 0));
	ck_assert_int_eq(kv_seq_reserve(seq, 41 * BLOCK_TOKENS, TIMEOUT), KV_TOO_LARGE);
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(what_is_not_given_is_named)
{
	struct kv_layout layout = *small_layout();
	KV_OPTIONS(kv_pool_options, what, .name = "none", .layout = &layout);
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = 2, .max_tokens = 8, .max_blocks_per_seq = 4);
	struct kv_batch_item item = {NULL, 1};
	struct kv_groups *groups;
	struct kv_batch *batch;
	struct kv_pool *p;

	refused(kv_pool_open(client, NULL, &p), -EINVAL, "options: NULL");
	refused(kv_batch_new(pool, NULL, &batch), -EINVAL, "options: NULL");
	refused(kv_groups_new(NULL, &groups), -EINVAL, "options: NULL");
	layout.components = NULL;
	refused(kv_pool_open(client, &what, &p), -EINVAL, "layout.components: NULL");
	refused(kv_pool_drop(client, NULL, 0), -EINVAL, "name: NULL");
	refused(kv_pool_new_epoch(client, NULL, NULL, NULL, 0), -EINVAL, "name: NULL");
	refused(kv_pool_compact(client, NULL, 0, 0), -EINVAL, "name: NULL");
	must(kv_batch_new(pool, &sizes, &batch));
	refused(kv_batch_build(batch, &item, 1, 0, 0), -EINVAL, "items[0].seq");
	refused(kv_batch_build(batch, NULL, 1, 0, 0), -EINVAL, "items: NULL");
	refused(kv_batch_build(batch, &item, UINT32_MAX, 0, 0), -E2BIG, "max_seqs is 2");
	kv_batch_free(batch);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/sequence");
	TCase *tcase = tcase_create("sequence");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, an_empty_sequence_has_nothing);
	tcase_add_test(tcase, lengths_at_block_boundaries_need_the_blocks_they_need);
	tcase_add_test(tcase, decoding_takes_a_block_exactly_before_the_token_that_needs_it);
	tcase_add_test(tcase, growing_charges_the_difference_and_changes_no_block);
	tcase_add_test(tcase, a_reservation_without_room_leaves_the_sequence_as_it_was);
	tcase_add_test(tcase, a_failed_admission_leaves_nothing_behind);
	tcase_add_test(tcase, a_hit_is_whole_blocks_and_leaves_one_token_to_compute);
	tcase_add_test(tcase, only_what_was_published_is_found);
	tcase_add_test(tcase, what_was_published_before_a_ping_is_found_after_it);
	tcase_add_test(tcase, prompts_that_differ_anywhere_share_what_is_before_it);
	tcase_add_test(tcase, a_found_sequence_has_the_publishers_blocks_and_goes_on_from_there);
	tcase_add_test(tcase, a_lookup_goes_on_where_somebody_else_has_come_to_meanwhile);
	tcase_add_test(tcase, a_lookup_that_makes_no_sense_is_refused);
	tcase_add_test(tcase, lookups_and_hits_are_counted_in_tokens);
	tcase_add_test(tcase, publishing_again_publishes_nothing_again);
	tcase_add_loop_test(tcase, a_twin_of_what_is_cached_is_exchanged_for_it, 0, 2);
	tcase_add_loop_test(tcase, a_twin_whose_original_is_evicted_before_the_exchange_is_shown_itself, 0, 2);
	tcase_add_test(tcase, a_twin_whose_originals_are_evicted_one_after_the_other_is_shown_in_the_end);
	tcase_add_test(tcase, a_twin_that_was_never_exchanged_goes_back_at_the_end);
	tcase_add_test(tcase, sequences_freed_right_after_publishing_stay_cached);
	tcase_add_test(tcase, an_evicted_prefix_is_forgotten_and_its_blocks_serve_another);
	tcase_add_test(tcase, the_end_of_a_prefix_goes_first);
	tcase_add_test(tcase, the_least_recently_used_prompt_goes_first);
	tcase_add_test(tcase, dropping_forgets_what_nobody_holds);
	tcase_add_test(tcase, rolling_back_forgets_tokens_and_lets_blocks_go);
	tcase_add_test(tcase, rolling_back_before_the_answer_to_a_publish_is_no_harm);
	tcase_add_loop_test(tcase, a_prompt_of_more_tokens_than_there_is_memory_is_refused_at_once, 0, 3);
	tcase_add_test(tcase, room_that_a_sequence_has_stays_when_the_pool_may_have_less);
	tcase_add_test(tcase, what_is_not_given_is_named);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
