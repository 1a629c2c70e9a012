/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sequences of a model with three groups (hybrid.h): what is found, kept, rolled back and refused in all
 * of them or in none.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "tests/client/hybrid.h"
#include "tests/support/process.h"

static struct model m;

static void setup(void)
{
	daemon_start("--host", "32M");
	model_open(&m, 200, 64, N_DRAFTS);
}

static void teardown(void)
{
	struct kv_client *client = client_new();

	model_close(&m);
	books_balance(client);
	for (int g = 0; g < 3; g++) {
		struct kv_pool_stats s = pool_stats(client, model_names[g]);

		expect(!s.blocks_leased && !s.blocks_cached_held, "%s: %llu leased, %llu held",
		       model_names[g], (unsigned long long)s.blocks_leased,
		       (unsigned long long)s.blocks_cached_held);
	}
	kv_disconnect(client);
	daemon_stop();
}

/* Appends up to @to, in steps of @chunk, and checks each step's output. */
static void compute(const struct model *model, struct kv_gseq *seq, const int32_t *tokens, size_t to,
		    size_t chunk)
{
	while (kv_gseq_len(seq) < to) {
		size_t len = kv_gseq_len(seq), n = to - len < chunk ? to - len : chunk;

		must(kv_gseq_reserve(seq, len + n, TIMEOUT));
		must(kv_gseq_append(seq, tokens + len, n));
		expect(model_run(model, seq, tokens, n) == expected_output(tokens, len + n),
		       "after %zu + %zu tokens", len, n);
		must(kv_gseq_publish(seq, NULL));
		must(kv_gseq_done(seq, len + n, NULL));
	}
}

static struct kv_gseq *new_seq(const struct model *model)
{
	struct kv_gseq *seq;

	must(kv_gseq_new(model->groups, &seq));
	return seq;
}

static size_t look_up(struct kv_gseq *seq, const int32_t *tokens, size_t n)
{
	size_t hit;

	must(kv_gseq_lookup(seq, tokens, n, &hit));
	return hit;
}

static size_t hit_now(const int32_t *tokens, size_t n)
{
	struct kv_gseq *seq = new_seq(&m);
	size_t hit = look_up(seq, tokens, n);

	kv_gseq_free(seq, NULL);
	return hit;
}

static void settled(void)
{
	must(kv_ping(m.client, TIMEOUT));
}

/* ---- hits ---- */

START_TEST(chunks_of_any_size_give_the_same_output_and_what_was_published_is_found_in_all_groups)
{
	const int32_t *tokens = tokens_of(1, 100);
	struct kv_gseq *seq = new_seq(&m);
	size_t chunk = (size_t)_i, hit;

	compute(&m, seq, tokens, 53, chunk);
	kv_gseq_free(seq, NULL);
	settled();
	ck_assert_uint_eq(kv_groups_unit(m.groups), 8);
	/* The last token is left to compute; a hit ends where all groups' blocks do. */
	ck_assert_uint_eq(hit_now(tokens, 100), 48);
	ck_assert_uint_eq(hit_now(tokens, 49), 48);
	ck_assert_uint_eq(hit_now(tokens, 48), 40);
	ck_assert_uint_eq(hit_now(tokens, 8), 0);

	seq = new_seq(&m);
	hit = look_up(seq, tokens, 80);
	ck_assert_uint_eq(hit, 48);
	compute(&m, seq, tokens, 80, 11);
	kv_gseq_free(seq, NULL);
}
END_TEST

/* Attention has so many units, and checkpoints are at bit i for i + 1 units: what is found of five? */
static const struct {
	size_t n_attention;
	unsigned checkpoints;
	size_t expected; /* units */
} offers[] = {
	{3, 0x08, 0}, {8, 0x88, 4}, {7, 0x88, 4}, {8, 0, 0}, {4, 0x08, 4}, {5, 0x0c, 4}, {2, 0x0f, 2},
	{0, 0x0f, 0},
};

/* D28. */
START_TEST(a_hit_is_offered_only_where_every_group_has_it)
{
	const int32_t *tokens = tokens_of(1, 80);
	struct kv_group parts[2] = {{.kind = KV_GROUP_FULL, .pool = m.pools[FULL_G]},
				    {.kind = KV_GROUP_WINDOW, .pool = m.pools[WINDOW_G],
				     .window = WINDOW}};
	struct kv_group state = {.kind = KV_GROUP_STATE, .pool = m.pools[STATE_G],
				 .interval = INTERVAL};
	struct {
		struct kv_group *groups;
		uint32_t n;
	} both[2] = {{parts, 2}, {&state, 1}};

	for (int k = 0; k < 2; k++) {
		KV_OPTIONS(kv_groups_options, what, .groups = both[k].groups,
			   .n_groups = both[k].n);
		struct kv_groups *groups;

		must(kv_groups_new(&what, &groups));
		for (size_t unit = 1; unit <= 8; unit++) {
			struct kv_gseq *seq;

			if (k ? !(offers[_i].checkpoints >> (unit - 1) & 1) :
				unit > offers[_i].n_attention)
				continue;
			must(kv_gseq_new(groups, &seq));
			must(kv_gseq_reserve(seq, unit * 8, TIMEOUT));
			must(kv_gseq_append(seq, tokens, unit * 8));
			must(kv_gseq_publish(seq, NULL));
			kv_gseq_free(seq, NULL);
		}
		kv_groups_free(groups);
	}
	settled();
	ck_assert_uint_eq(hit_now(tokens, 41), offers[_i].expected * 8);
}
END_TEST

START_TEST(fields_and_extras_are_told_apart_in_every_group)
{
	const int32_t *tokens = tokens_of(1, 40);
	struct kv_extra image = {.tag = KV_TAG_IMAGE, .position = 10, .n_tokens = 3, .bytes = "a",
				 .n_bytes = 1};
	struct kv_gseq *seq = new_seq(&m);

	must(kv_gseq_field(seq, KV_TAG_SALT, "s", 1));
	must(kv_gseq_extra(seq, &image));
	compute(&m, seq, tokens, 24, 8);
	kv_gseq_free(seq, NULL);
	settled();
	ck_assert_uint_eq(hit_now(tokens, 40), 0);
	for (int k = 0; k < 4; k++) {
		seq = new_seq(&m);
		must(kv_gseq_field(seq, KV_TAG_SALT, k == 1 ? "t" : "s", 1));
		image.bytes = k == 2 ? "b" : "a";
		if (k != 3)
			must(kv_gseq_extra(seq, &image));
		/* The image is in the second unit: the first one is the same without it. */
		ck_assert_uint_eq(look_up(seq, tokens, 40), k == 0 ? 24 : k == 1 ? 0 : 8);
		kv_gseq_free(seq, NULL);
	}
	for (int g = 0; g < 3; g++)
		must(kv_pool_new_epoch(m.client, model_names[g], NULL, NULL, TIMEOUT));
	seq = new_seq(&m);
	image.bytes = "a";
	must(kv_gseq_field(seq, KV_TAG_SALT, "s", 1));
	must(kv_gseq_extra(seq, &image));
	ck_assert_uint_eq(look_up(seq, tokens, 40), 0);
	compute(&m, seq, tokens, 24, 8);
	kv_gseq_free(seq, NULL);
}
END_TEST

/*
 * A search, or a promise, makes the digest of what is before the first block; a field that is said after it must
 * stand in it. It once didn't: one tenant found the first blocks of another, and showed it its own.
 */
START_TEST(a_field_that_is_said_after_a_search_counts_for_the_first_block_as_well)
{
	struct kv_group window = {.kind = KV_GROUP_WINDOW, .pool = m.pools[WINDOW_G], .window = WINDOW};
	KV_OPTIONS(kv_groups_options, what, .groups = &window, .n_groups = 1);
	const int32_t *tokens = tokens_of(1, 40);
	struct kv_groups *groups;
	size_t hit;

	must(kv_groups_new(&what, &groups));
	/* Whose blocks are cached without a field, and under one. */
	for (int k = 0; k < 2; k++) {
		struct kv_gseq *seq;

		must(kv_gseq_new(groups, &seq));
		if (_i)
			must(kv_gseq_promise(seq, tokens, 9, KV_SEC, NULL));
		must(kv_gseq_lookup(seq, tokens, 9, &hit));
		ck_assert_uint_eq(hit, k ? 8 : 0);
		if (k) {
			kv_gseq_free(seq, NULL);
			must(kv_gseq_new(groups, &seq));
			/* What is searched first isn't cached: the sequence stays empty. */
			must(kv_gseq_lookup(seq, tokens_of(2, 9), 9, &hit));
			tokens = tokens_of(1, 40);
			must(kv_gseq_field(seq, KV_TAG_SALT, "s", 1));
			must(kv_gseq_lookup(seq, tokens, 9, &hit));
			expect(!hit, "%zu tokens of others are found under a salt", hit);
		}
		must(kv_gseq_reserve(seq, 8, TIMEOUT));
		must(kv_gseq_append(seq, tokens, 8));
		must(kv_gseq_publish(seq, NULL));
		settled();
		kv_gseq_free(seq, NULL);
	}
	/* Two of each: none of the second was taken for one of the first. */
	ck_assert_uint_eq(pool_stats(m.client, model_names[WINDOW_G]).blocks_cached, 4);
	kv_groups_free(groups);
}
END_TEST

/* An update of the weights in the middle of a search: at the next look at the clock, which is in the first group. */
static struct {
	void (*at_clock)(void);
	struct model model;
	struct kv_groups *groups;
	struct kv_gseq *seq;
} fresh;

__attribute__((visibility("default"))) int clock_gettime(clockid_t clock, struct timespec *ret)
{
	void (*now)(void) = fresh.at_clock;

	fresh.at_clock = NULL;
	if (now)
		now();
	return (int)syscall(SYS_clock_gettime, clock, ret);
}

static struct kv_groups *attention_groups(const struct model *model)
{
	struct kv_group parts[2] = {{.kind = KV_GROUP_FULL, .pool = model->pools[FULL_G]},
				    {.kind = KV_GROUP_WINDOW, .pool = model->pools[WINDOW_G], .window = WINDOW}};
	KV_OPTIONS(kv_groups_options, what, .groups = parts, .n_groups = 2);
	struct kv_groups *groups;

	must(kv_groups_new(&what, &groups));
	return groups;
}

static struct kv_gseq *published_and_held(const struct model *model, struct kv_groups *groups)
{
	struct kv_gseq *seq;

	must(kv_gseq_new(groups, &seq));
	must(kv_gseq_reserve(seq, 16, TIMEOUT));
	must(kv_gseq_append(seq, tokens_of(1, 16), 16));
	must(kv_gseq_publish(seq, NULL));
	must(kv_ping(model->client, TIMEOUT));
	return seq;
}

static void update_weights(void)
{
	for (int g = 0; g < 2; g++)
		must(kv_pool_new_epoch(fresh.model.client, model_names[g], NULL, NULL, TIMEOUT));
	fresh.seq = published_and_held(&fresh.model, fresh.groups);
}

/* Is block @i of group @g the one that was computed with the new weights? */
static bool is_fresh(const struct kv_gseq *seq, uint32_t g, size_t i)
{
	const kv_block_id *ids, *fresh_ids;

	kv_seq_blocks(kv_gseq_seq(seq, g), &ids);
	kv_seq_blocks(kv_gseq_seq(fresh.seq, g), &fresh_ids);
	return ids[i] == fresh_ids[i];
}

START_TEST(a_search_finds_nothing_of_two_epochs_whenever_the_weights_change)
{
	struct kv_groups *groups = attention_groups(&m), *before;
	struct kv_gseq *held, *seq;
	struct model old;
	size_t hit;

	model_open(&old, 0, 0, N_DRAFTS);
	model_open(&fresh.model, 0, 0, N_DRAFTS);
	before = attention_groups(&old);
	fresh.groups = attention_groups(&fresh.model);
	held = published_and_held(&old, before);

	must(kv_gseq_new(groups, &seq));
	fresh.at_clock = update_weights;
	must(kv_gseq_lookup(seq, tokens_of(1, 17), 17, &hit));
	ck_assert_ptr_null(fresh.at_clock);
	ck_assert_uint_eq(hit, 16);
	for (size_t i = 2; i < 4; i++)
		expect(is_fresh(seq, 0, i) == is_fresh(seq, 1, i), "block %zu: new weights in one group alone", i);

	kv_gseq_free(seq, NULL);
	kv_gseq_free(held, NULL);
	kv_gseq_free(fresh.seq, NULL);
	kv_groups_free(groups);
	kv_groups_free(before);
	kv_groups_free(fresh.groups);
	model_close(&old);
	model_close(&fresh.model);
}
END_TEST

START_TEST(checkpoints_of_a_fork_are_shown_after_an_update_of_the_weights_too)
{
	const int32_t *tokens = tokens_of(1, 40);
	struct kv_gseq *seq, *fork;

	for (int g = 0; g < 3; g++)
		must(kv_pool_new_epoch(m.client, model_names[g], NULL, NULL, TIMEOUT));
	seq = new_seq(&m);
	compute(&m, seq, tokens, 5, 5);
	must(kv_gseq_fork(seq, &fork));
	kv_gseq_free(seq, NULL);
	must(kv_gseq_reserve(fork, 16, TIMEOUT));
	model_copy(&m, fork);
	compute(&m, fork, tokens, 16, 11);
	kv_gseq_free(fork, NULL);
	settled();
	ck_assert_uint_eq(hit_now(tokens, 40), 16);
}
END_TEST

START_TEST(a_search_goes_on_from_what_a_sequence_has_published_itself)
{
	const int32_t *tokens = tokens_of(1, 80);
	struct kv_gseq *a = new_seq(&m), *b = new_seq(&m);

	compute(&m, a, tokens, 16, 8);
	compute(&m, b, tokens, 40, 8);
	settled();
	must(kv_gseq_publish(a, NULL));
	must(kv_gseq_reserve(a, 60, TIMEOUT));
	ck_assert_uint_eq(look_up(a, tokens, 80), 40);
	compute(&m, a, tokens, 64, 5);
	kv_gseq_free(b, NULL);
	kv_gseq_free(a, NULL);
}
END_TEST

static void engine(struct process *self, void *arg)
{
	const int32_t *tokens = tokens_of(1, 100);
	struct model own;
	struct kv_gseq *seq;

	(void)arg;
	model_open(&own, 200, 64, N_DRAFTS);
	for (size_t to = 33;; to = 77) {
		process_wait(self);
		seq = new_seq(&own);
		process_say(self, (int64_t)look_up(seq, tokens, 100));
		compute(&own, seq, tokens, to, 7);
		must(kv_ping(own.client, TIMEOUT));
		kv_gseq_free(seq, NULL);
		process_say(self, 0);
		if (to == 77)
			break;
	}
	model_close(&own);
}

START_TEST(a_second_process_continues_from_the_firsts_checkpoint_and_blocks_with_the_same_output)
{
	struct process *a = process_start(engine, NULL), *b = process_start(engine, NULL);
	/* A computes 33, B finds 32 of them and computes its own 33; A finds 32 and goes on to 77. */
	static const int64_t expected[4] = {0, 32, 32, 72};

	for (int i = 0; i < 4; i++) {
		struct process *p = i % 2 ? b : a;

		process_go(p);
		ck_assert_int_eq(process_hear(p), expected[i]);
		process_hear(p);
	}
	process_end(a);
	process_end(b);
}
END_TEST

/* ---- room ---- */

/* D31. */
START_TEST(a_short_request_takes_a_block_and_a_row_and_is_refused_for_rows_alone)
{
	const int32_t *tokens = tokens_of(1, 12);
	struct kv_gseq *seqs[65];
	uint64_t before;

	model_close(&m);
	{
		struct kv_client *client = client_new();

		must(kv_pool_drop(client, model_names[STATE_G], TIMEOUT));
		kv_disconnect(client);
	}
	model_open(&m, 200, 64, 0);
	for (int i = 0; i < 64; i++) {
		seqs[i] = new_seq(&m);
		expect(kv_gseq_reserve(seqs[i], 3, 0) == 0, "sequence %d", i);
	}
	settled();
	seqs[64] = new_seq(&m);
	before = pool_stats(m.client, model_names[FULL_G]).blocks_free;
	ck_assert_int_eq(kv_gseq_reserve(seqs[64], 3, 0), KV_NO_ROOM);
	ck_assert_uint_eq(kv_seq_capacity(kv_gseq_seq(seqs[64], FULL_G)), 0);
	ck_assert_int_eq(kv_gseq_append(seqs[64], tokens, 1), -ENOSPC);
	/* What the refusal had taken for the other groups has gone back, but for a magazine's fill. */
	ck_assert_uint_ge(pool_stats(m.client, model_names[FULL_G]).blocks_free + 32, before);
	kv_gseq_free(seqs[0], NULL);
	must(kv_gseq_reserve(seqs[64], 3, TIMEOUT));
	for (int i = 1; i < 65; i++)
		kv_gseq_free(seqs[i], NULL);
	ck_assert_int_eq(kv_gseq_reserve(seqs[0] = new_seq(&m), 4 * 201, 0), KV_TOO_LARGE);
	kv_gseq_free(seqs[0], NULL);
}
END_TEST

/* D15. */
START_TEST(a_failed_admission_leaves_nothing_behind_a_thousand_times)
{
	const int32_t *tokens = tokens_of(1, 80);
	struct kv_gseq *holder = new_seq(&m), *big = new_seq(&m);
	struct kv_pool_stats before[3];

	compute(&m, holder, tokens, 24, 8);
	settled();
	must(kv_gseq_publish(holder, NULL));
	/* All other blocks of the full group are somebody's. */
	must(kv_gseq_reserve(big, (200 - 8) * SIZE, TIMEOUT));
	settled();
	for (int g = 0; g < 3; g++)
		before[g] = pool_stats(m.client, model_names[g]);
	for (int i = 0; i < 1000; i++) {
		struct kv_gseq *seq = new_seq(&m);

		expect(look_up(seq, tokens, 80) == 24, "round %d", i);
		expect(kv_gseq_reserve(seq, 24 + 10 * SIZE, 0) == KV_NO_ROOM, "round %d", i);
		kv_gseq_free(seq, NULL);
	}
	settled();
	for (int g = 0; g < 3; g++) {
		struct kv_pool_stats now = pool_stats(m.client, model_names[g]);

		ck_assert_uint_eq(now.blocks_cached, before[g].blocks_cached);
		ck_assert_uint_eq(now.blocks_cached_held, before[g].blocks_cached_held);
		expect(now.blocks_leased <= before[g].blocks_leased + 16, "%s: %llu leased, was %llu",
		       model_names[g], (unsigned long long)now.blocks_leased,
		       (unsigned long long)before[g].blocks_leased);
	}
	kv_gseq_free(big, NULL);
	compute(&m, holder, tokens, 80, 8);
	kv_gseq_free(holder, NULL);
}
END_TEST

/* More sequences, one after the other, than any group has blocks or rows for. */
START_TEST(a_freed_sequence_gives_back_its_blocks_and_its_rows)
{
	const int32_t *tokens = tokens_of(1, 24);

	for (int i = 0; i < 150; i++) {
		struct kv_gseq *seq = new_seq(&m);

		expect(kv_gseq_reserve(seq, 24, TIMEOUT) == 0, "round %d", i);
		must(kv_gseq_append(seq, tokens, 24));
		if (i % 50 == 0)
			ck_assert(model_run(&m, seq, tokens, 24) == expected_output(tokens, 24));
		kv_gseq_free(seq, NULL);
	}
	settled();
	ck_assert_uint_eq(hit_now(tokens, 24), 0); /* nor did they leave anything that is found */
}
END_TEST

/* ---- rollback, fork, drafts ---- */

/* D29. */
START_TEST(a_rollback_is_in_all_groups_or_in_none)
{
	const int32_t *tokens = tokens_of(1, 40);
	int32_t others[40], read, write, computed, steps[1 + N_DRAFTS], table[32];
	struct kv_state_lanes lanes = {.read_rows = &read, .write_rows = &write, .n_computed = &computed,
				       .step_rows = steps, .table = table, .table_width = 32};
	unsigned char state[64 * 4], keys[SIZE * 64 * 4];
	struct kv_gseq *seq;
	const kv_block_id *ids;
	size_t n_blocks;

	/* One row a sequence: there is no state but the current and at checkpoints. */
	model_close(&m);
	model_open(&m, 200, 64, 0);
	seq = new_seq(&m);
	compute(&m, seq, tokens, 16, 16);
	must(kv_gseq_reserve(seq, 20, TIMEOUT));
	must(kv_gseq_append(seq, tokens + 16, 4));
	ck_assert(model_run(&m, seq, tokens, 4) == expected_output(tokens, 20));
	must(kv_state_lanes(&seq, 1, 1, STATE_G, &lanes));
	kv_seq_blocks(kv_gseq_seq(seq, FULL_G), &ids);
	memcpy(state, block_at(m.pools[STATE_G], write), sizeof(state));
	memcpy(keys, block_at(m.pools[FULL_G], ids[4]), sizeof(keys));
	refused(kv_gseq_rollback(seq, 18, NULL), -ENODATA, "20");
	refused(kv_gseq_rollback(seq, 8, NULL), -ENODATA, "8");
	refused(kv_gseq_rollback(seq, 21, NULL), -EINVAL, "21");
	ck_assert_uint_eq(kv_gseq_len(seq), 20);
	n_blocks = kv_seq_blocks(kv_gseq_seq(seq, FULL_G), &ids);
	ck_assert_uint_eq(n_blocks, 5);
	ck_assert_mem_eq(block_at(m.pools[STATE_G], write), state, sizeof(state));
	ck_assert_mem_eq(block_at(m.pools[FULL_G], ids[4]), keys, sizeof(keys));
	/* Nothing was touched: the next token goes on from the state and the K and V of 20. */
	must(kv_gseq_reserve(seq, 21, TIMEOUT));
	must(kv_gseq_append(seq, tokens + 20, 1));
	ck_assert(model_run(&m, seq, tokens, 1) == expected_output(tokens, 21));

	must(kv_gseq_rollback(seq, 16, NULL));
	ck_assert_uint_eq(kv_gseq_len(seq), 16);
	ck_assert_uint_eq(kv_seq_len(kv_gseq_seq(seq, FULL_G)), 16);
	ck_assert_uint_eq(kv_seq_len(kv_gseq_seq(seq, WINDOW_G)), 16);
	ck_assert_uint_eq(kv_seq_blocks(kv_gseq_seq(seq, FULL_G), &ids), 4);
	memcpy(others, tokens, sizeof(others));
	others[17] = 12345;
	compute(&m, seq, others, 40, 3);

	/* Window blocks that have left can't come back. */
	refused(kv_gseq_rollback(seq, 24, NULL), -ENODATA, "24");
	must(kv_gseq_rollback(seq, 0, NULL));
	ck_assert_uint_eq(kv_seq_blocks(kv_gseq_seq(seq, FULL_G), &ids), 0);
	ck_assert_uint_eq(kv_seq_blocks(kv_gseq_seq(seq, WINDOW_G), &ids), 0);
	compute(&m, seq, tokens, 24, 6);
	kv_gseq_free(seq, NULL);
}
END_TEST

START_TEST(drafts_are_rolled_back_to_any_token_of_their_step)
{
	int32_t tokens[60], drafts[60];
	struct kv_gseq *seq = new_seq(&m);

	memcpy(tokens, tokens_of(1, 60), sizeof(tokens));
	compute(&m, seq, tokens, 13, 13);
	for (size_t len = 13; len + 4 < 60;) {
		size_t accepted = 1 + len % 4; /* of the one that is sure and three drafts */

		memcpy(drafts, tokens, sizeof(drafts));
		for (size_t i = len + accepted; i < len + 4; i++)
			drafts[i] += 1000;
		must(kv_gseq_reserve(seq, len + 4, TIMEOUT));
		must(kv_gseq_append(seq, drafts + len, 4));
		expect(model_run(&m, seq, drafts, 4) == expected_output(drafts, len + 4), "drafts at %zu",
		       len);
		must(kv_gseq_rollback(seq, len + accepted, NULL));
		must(kv_gseq_publish(seq, NULL));
		must(kv_gseq_done(seq, len + accepted, NULL));
		len += accepted;
	}
	/* Which of them were rejected is not to be seen in what is found. */
	settled();
	ck_assert_uint_ge(hit_now(tokens, 60), 16);
	{
		struct kv_gseq *other = new_seq(&m);

		look_up(other, tokens, 60);
		compute(&m, other, tokens, 60, 9);
		kv_gseq_free(other, NULL);
	}
	kv_gseq_free(seq, NULL);
}
END_TEST

START_TEST(forks_go_on_from_one_state_each_for_itself)
{
	int32_t tokens[40], others[40];
	struct kv_gseq *seq = new_seq(&m), *forks[8];

	memcpy(tokens, tokens_of(1, 40), sizeof(tokens));
	compute(&m, seq, tokens, 19, 7);
	for (int i = 0; i < 8; i++)
		must(kv_gseq_fork(i % 2 ? forks[i - 1] : seq, &forks[i]));
	refused(kv_gseq_append(forks[0], tokens + 19, 1), -EPERM, "shared");
	for (int i = 0; i < 8; i++) {
		memcpy(others, tokens, sizeof(others));
		for (int k = 19; k < 40; k++)
			others[k] += i * 100;
		must(kv_gseq_reserve(forks[i], 40, TIMEOUT));
		model_copy(&m, forks[i]);
		compute(&m, forks[i], others, 40, 5);
	}
	for (int i = 0; i < 8; i++)
		kv_gseq_free(forks[i], NULL);
	must(kv_gseq_reserve(seq, 40, TIMEOUT));
	compute(&m, seq, tokens, 19, 5);
	kv_gseq_free(seq, NULL);
}
END_TEST

/* ---- promises ---- */

START_TEST(a_hybrid_is_followed_while_it_is_computed_and_its_promise_ends_with_it)
{
	int32_t tokens[60];
	struct model other;
	struct kv_gseq *writer, *reader;
	size_t hit, promised;
	int64_t start;

	memcpy(tokens, tokens_of(5, 60), sizeof(tokens));
	model_open(&other, 0, 0, N_DRAFTS);
	writer = new_seq(&other);
	reader = new_seq(&m);
	must(kv_gseq_promise(writer, tokens, 60, 60 * KV_SEC, &promised));
	ck_assert_uint_eq(promised, 56);
	ck_assert_int_eq(kv_gseq_follow(reader, tokens, 60, 0, &hit), KV_PROMISED);
	must(kv_gseq_promise(reader, tokens, 60, KV_SEC, &promised));
	ck_assert_uint_eq(promised, 0); /* it is the other's */
	for (size_t to = 8; to <= 40; to += 8) {
		compute(&other, writer, tokens, to, 8);
		must(kv_ping(other.client, TIMEOUT));
		ck_assert_int_eq(kv_gseq_follow(reader, tokens, 60, 0, &hit), KV_PROMISED);
		ck_assert_uint_eq(hit, to);
	}
	/* Given up: the reader's turn. */
	kv_gseq_free(writer, NULL);
	start = now_ns();
	must(kv_gseq_follow(reader, tokens, 60, 40 * KV_SEC, &hit));
	ck_assert_uint_eq(hit, 40);
	expect(now_ns() - start < 20 * KV_SEC, "it waits for nobody");
	must(kv_gseq_promise(reader, tokens, 60, KV_SEC, &promised));
	ck_assert_uint_eq(promised, 56);
	compute(&m, reader, tokens, 60, 9);
	kv_gseq_free(reader, NULL);

	/* A rollback and a preemption take promises back. */
	tokens[0]++;
	writer = new_seq(&other);
	reader = new_seq(&m);
	must(kv_gseq_promise(writer, tokens, 60, 60 * KV_SEC, NULL));
	ck_assert_int_eq(kv_gseq_follow(reader, tokens, 60, 0, &hit), KV_PROMISED);
	must(kv_gseq_rollback(writer, 0, NULL));
	must(kv_gseq_follow(reader, tokens, 60, 0, &hit));
	must(kv_gseq_promise(writer, tokens, 60, 60 * KV_SEC, NULL));
	ck_assert_int_eq(kv_gseq_follow(reader, tokens, 60, 0, &hit), KV_PROMISED);
	must(kv_gseq_preempt(writer, NULL));
	must(kv_gseq_follow(reader, tokens, 60, 0, &hit));
	/* So does a promise of something else. */
	must(kv_gseq_promise(writer, tokens, 60, 60 * KV_SEC, NULL));
	must(kv_gseq_promise(writer, tokens_of(6, 60), 60, 60 * KV_SEC, NULL));
	must(kv_gseq_follow(reader, tokens, 60, 0, &hit));
	ck_assert_int_eq(kv_gseq_follow(reader, tokens_of(6, 60), 60, 0, &hit), KV_PROMISED);
	kv_gseq_free(writer, NULL);
	kv_gseq_free(reader, NULL);
	model_close(&other);
}
END_TEST

/* ---- windows ---- */

/* D32. */
START_TEST(window_blocks_leave_behind_finished_tokens_not_scheduled_ones)
{
	struct kv_pool *pool = open_pool(m.client, "window.128", 32, 100);
	struct kv_group group = {.kind = KV_GROUP_WINDOW, .pool = pool, .window = 128};
	KV_OPTIONS(kv_groups_options, what, .groups = &group, .n_groups = 1);
	const int32_t *tokens = tokens_of(1, 200);
	struct kv_groups *groups;
	struct kv_pool_info info;
	const kv_block_id *ids;
	struct kv_gseq *seq;

	kv_pool_info(pool, &info);
	must(kv_groups_new(&what, &groups));
	must(kv_gseq_new(groups, &seq));
	must(kv_gseq_reserve(seq, 200, TIMEOUT));
	must(kv_gseq_append(seq, tokens, 158));
	must(kv_gseq_done(seq, 158, NULL));
	must(kv_gseq_append(seq, tokens + 158, 1));
	must(kv_gseq_done(seq, 158, NULL));
	kv_seq_blocks(kv_gseq_seq(seq, 0), &ids);
	ck_assert_int_ne(ids[0], info.null_block);
	must(kv_gseq_done(seq, 159, NULL));
	kv_seq_blocks(kv_gseq_seq(seq, 0), &ids);
	ck_assert_int_eq(ids[0], info.null_block);
	ck_assert_int_ne(ids[1], info.null_block);

	/* Five drafts in flight, four of them rejected: what one token needs is there. */
	must(kv_gseq_append(seq, tokens + 159, 31));
	must(kv_gseq_done(seq, 190, NULL));
	must(kv_gseq_append(seq, tokens + 190, 5));
	must(kv_gseq_done(seq, 190, NULL));
	must(kv_gseq_rollback(seq, 191, NULL));
	kv_seq_blocks(kv_gseq_seq(seq, 0), &ids);
	ck_assert_int_ne(ids[(191 - 127) / 32], info.null_block);
	must(kv_gseq_done(seq, 191, NULL));
	kv_seq_blocks(kv_gseq_seq(seq, 0), &ids);
	ck_assert_int_eq(ids[1], info.null_block);
	ck_assert_int_ne(ids[2], info.null_block);
	kv_gseq_free(seq, NULL);
	kv_groups_free(groups);
	kv_pool_close(pool);
}
END_TEST

START_TEST(a_sequence_longer_than_the_pool_fits_in_a_window)
{
	struct kv_pool *pool = open_pool(m.client, "window.small", SIZE, 6);
	struct kv_group group = {.kind = KV_GROUP_CHUNKED, .pool = pool, .window = 8};
	KV_OPTIONS(kv_groups_options, what, .groups = &group, .n_groups = 1);
	const int32_t *tokens = tokens_of(1, 400);
	struct kv_groups *groups;
	struct kv_gseq *seq;

	must(kv_groups_new(&what, &groups));
	must(kv_gseq_new(groups, &seq));
	for (size_t len = 0; len < 400; len += 4) {
		must(kv_gseq_reserve(seq, len + 4, TIMEOUT));
		must(kv_gseq_append(seq, tokens + len, 4));
		must(kv_gseq_publish(seq, NULL));
		must(kv_gseq_done(seq, len + 4, NULL));
	}
	kv_gseq_free(seq, NULL);
	kv_groups_free(groups);
	kv_pool_close(pool);
}
END_TEST

/* ---- groups in one pool; padding; refusals ---- */

START_TEST(groups_that_share_a_pool_never_find_each_others_blocks)
{
	struct kv_pool *pool = m.pools[FULL_G];
	struct kv_group four[4] = {{.kind = KV_GROUP_FULL, .pool = pool},
				   {.kind = KV_GROUP_FULL, .pool = pool},
				   {.kind = KV_GROUP_WINDOW, .pool = pool, .window = 8},
				   {.kind = KV_GROUP_WINDOW, .pool = pool, .window = 8}};
	KV_OPTIONS(kv_groups_options, what, .groups = four, .n_groups = 4);
	const int32_t *tokens = tokens_of(1, 33);
	struct kv_groups *groups;
	struct kv_gseq *a, *b;
	const kv_block_id *of_a, *of_b;

	must(kv_groups_new(&what, &groups));
	must(kv_gseq_new(groups, &a));
	must(kv_gseq_reserve(a, 32, TIMEOUT));
	must(kv_gseq_append(a, tokens, 32));
	must(kv_gseq_publish(a, NULL));
	settled();
	ck_assert_uint_eq(pool_stats(m.client, model_names[FULL_G]).blocks_cached, 4 * 8);
	must(kv_gseq_new(groups, &b));
	ck_assert_uint_eq(look_up(b, tokens, 33), 32);
	for (uint32_t g = 0; g < 4; g++) {
		kv_seq_blocks(kv_gseq_seq(a, g), &of_a);
		kv_seq_blocks(kv_gseq_seq(b, g), &of_b);
		for (int i = g < 2 ? 0 : 6; i < 8; i++)
			expect(of_a[i] == of_b[i], "group %u, block %d: %d, not %d", g, i, of_b[i],
			       of_a[i]);
	}
	kv_gseq_free(a, NULL);
	kv_gseq_free(b, NULL);
	kv_groups_free(groups);
}
END_TEST

START_TEST(a_reservation_that_groups_of_one_pool_cannot_have_costs_it_none_of_its_cache)
{
	struct kv_pool *pool = m.pools[FULL_G];
	struct kv_group two[2] = {{.kind = KV_GROUP_FULL, .pool = pool},
				  {.kind = KV_GROUP_WINDOW, .pool = pool, .window = 8}};
	KV_OPTIONS(kv_groups_options, what, .groups = two, .n_groups = 2);
	const int32_t *tokens = tokens_of(1, 33);
	struct kv_groups *groups;
	struct kv_gseq *a, *b;
	kv_block_id ids[174];
	size_t hit;

	must(kv_groups_new(&what, &groups));
	must(kv_gseq_new(groups, &a));
	must(kv_gseq_reserve(a, 32, TIMEOUT));
	must(kv_gseq_append(a, tokens, 32));
	must(kv_gseq_publish(a, NULL));
	settled();
	kv_gseq_free(a, NULL);
	must(kv_blocks_take(pool, 174, ids, TIMEOUT));
	/* 16 are cached and 10 free: enough for one of the two. */
	must(kv_gseq_new(groups, &b));
	ck_assert_int_eq(kv_gseq_reserve(b, 20 * SIZE, 0), KV_NO_ROOM);
	settled();
	ck_assert_uint_eq(pool_stats(m.client, model_names[FULL_G]).blocks_cached, 2 * 8);
	must(kv_gseq_lookup(b, tokens, 33, &hit));
	ck_assert_uint_eq(hit, 32);
	kv_gseq_free(b, NULL);

	/* Each of them could have so many by itself: both never can. */
	must(kv_gseq_new(groups, &b));
	ck_assert_int_eq(kv_gseq_reserve(b, 101 * SIZE, 0), KV_TOO_LARGE);
	must(kv_gseq_reserve(b, 13 * SIZE, TIMEOUT));
	/* Nor can they when they have some of it: nobody waits for that. */
	must(kv_blocks_give(pool, 174, ids));
	must(kv_gseq_reserve(b, 90 * SIZE, TIMEOUT));
	ck_assert_int_eq(kv_gseq_reserve(b, 101 * SIZE, TIMEOUT), KV_TOO_LARGE);
	must(kv_gseq_reserve(b, 100 * SIZE, TIMEOUT));
	kv_gseq_free(b, NULL);
	kv_groups_free(groups);
}
END_TEST

/* Its own blocks lie before those that the search passed over, and once stayed there to its end. */
START_TEST(a_window_that_a_search_has_moved_far_on_leaves_its_own_blocks_behind_too)
{
	struct kv_group window = {.kind = KV_GROUP_WINDOW, .pool = m.pools[WINDOW_G], .window = WINDOW};
	KV_OPTIONS(kv_groups_options, what, .groups = &window, .n_groups = 1);
	const int32_t *tokens = tokens_of(1, 41);
	struct kv_groups *groups;
	struct kv_gseq *seqs[2];
	const kv_block_id *ids;
	struct kv_pool_info info;
	size_t hit;

	must(kv_groups_new(&what, &groups));
	kv_pool_info(m.pools[WINDOW_G], &info);
	/* The first has computed 8 tokens when the second has 40. */
	for (int k = 0; k < 2; k++) {
		must(kv_gseq_new(groups, &seqs[k]));
		must(kv_gseq_reserve(seqs[k], k ? 40 : 8, TIMEOUT));
		must(kv_gseq_append(seqs[k], tokens, k ? 40 : 8));
		must(kv_gseq_publish(seqs[k], NULL));
		settled();
	}
	must(kv_gseq_lookup(seqs[0], tokens, 41, &hit));
	ck_assert_uint_eq(hit, 40);
	must(kv_gseq_done(seqs[0], 40, NULL));
	ck_assert_uint_eq(kv_seq_blocks(kv_gseq_seq(seqs[0], 0), &ids), 10);
	for (int i = 0; i < 10; i++)
		expect((ids[i] == info.null_block) == (i < 8), "block %d is %d", i, ids[i]);
	must(kv_gseq_done(seqs[1], 40, NULL));
	must(kv_ping(m.client, TIMEOUT));
	ck_assert_uint_eq(pool_stats(m.client, model_names[WINDOW_G]).blocks_cached_held, 2);
	for (int k = 0; k < 2; k++)
		kv_gseq_free(seqs[k], NULL);
	kv_groups_free(groups);
}
END_TEST

/* D07. */
START_TEST(padding_lanes_name_the_null_row_and_take_none)
{
	const int32_t *tokens = tokens_of(1, 8);
	int32_t read[8], write[8], computed[8], steps[8][1 + N_DRAFTS], table[8][2];
	struct kv_state_lanes lanes = {.read_rows = read, .write_rows = write,
				       .n_computed = computed, .step_rows = steps[0],
				       .table = table[0], .table_width = 2};
	struct kv_pool_info info;
	struct kv_gseq *seqs[5];

	kv_pool_info(m.pools[STATE_G], &info);
	for (int i = 0; i < 5; i++) {
		seqs[i] = new_seq(&m);
		must(kv_gseq_reserve(seqs[i], 8, TIMEOUT));
		must(kv_gseq_append(seqs[i], tokens, i < 4 ? 5 : 1));
	}
	must(kv_state_lanes(seqs, 5, 8, STATE_G, &lanes));
	for (int i = 0; i < 5; i++) {
		ck_assert_int_eq(read[i], -1);
		ck_assert(i < 4 ? write[i] >= 0 && write[i] != info.null_block : write[i] == -1);
		ck_assert(i < 4 ? steps[i][0] == -1 : steps[i][0] >= 0);
		ck_assert_int_eq(computed[i], 0);
		for (int k = 0; k < i; k++)
			ck_assert_int_ne(write[i], write[k]);
	}
	for (int i = 5; i < 8; i++) {
		ck_assert_int_eq(read[i], info.null_block);
		ck_assert_int_eq(write[i], info.null_block);
		ck_assert_int_eq(steps[i][N_DRAFTS], info.null_block);
		ck_assert_int_eq(table[i][1], info.null_block);
		ck_assert_int_eq(computed[i], 0);
	}
	refused(kv_state_lanes(seqs, 5, 8, FULL_G, &lanes), -EINVAL, "no state");
	lanes.step_rows = NULL;
	refused(kv_state_lanes(seqs, 5, 8, STATE_G, &lanes), -EINVAL, "step_rows");
	for (int i = 0; i < 5; i++)
		kv_gseq_free(seqs[i], NULL);
}
END_TEST

START_TEST(groups_that_cannot_be_are_refused_by_name)
{
	struct kv_pool *pool = m.pools[FULL_G], *rows = m.pools[STATE_G];
	const struct {
		struct kv_group group;
		const char *words;
	} wrong[] = {
		{{.kind = KV_GROUP_FULL}, "groups[1].pool"},
		{{.kind = KV_GROUP_CROSS, .pool = pool}, "groups[1].kind"},
		{{.kind = KV_GROUP_WINDOW, .pool = pool}, "groups[1].window"},
		{{.kind = KV_GROUP_STATE, .pool = rows}, "groups[1].interval"},
		{{.kind = KV_GROUP_STATE, .pool = rows, .interval = 6}, "multiple"},
		{{.kind = KV_GROUP_STATE, .pool = rows, .interval = 8, .n_drafts = 300}, "n_drafts"},
	};

	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
		struct kv_group two[2] = {{.kind = KV_GROUP_FULL, .pool = pool}, wrong[i].group};
		KV_OPTIONS(kv_groups_options, what, .groups = two, .n_groups = 2);
		struct kv_groups *groups;

		refused(kv_groups_new(&what, &groups), -EINVAL, wrong[i].words);
		what.n_groups = 0;
		refused(kv_groups_new(&what, &groups), -EINVAL, "n_groups");
	}
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("group");
	TCase *tcase = tcase_create("group");

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(
		tcase,
		chunks_of_any_size_give_the_same_output_and_what_was_published_is_found_in_all_groups,
		1, 20);
	tcase_add_loop_test(tcase, a_hit_is_offered_only_where_every_group_has_it, 0,
			    sizeof(offers) / sizeof(offers[0]));
	tcase_add_test(tcase, fields_and_extras_are_told_apart_in_every_group);
	tcase_add_test(tcase, a_search_finds_nothing_of_two_epochs_whenever_the_weights_change);
	tcase_add_test(tcase, checkpoints_of_a_fork_are_shown_after_an_update_of_the_weights_too);
	tcase_add_loop_test(tcase, a_field_that_is_said_after_a_search_counts_for_the_first_block_as_well, 0, 2);
	tcase_add_test(tcase, a_search_goes_on_from_what_a_sequence_has_published_itself);
	tcase_add_test(
		tcase,
		a_second_process_continues_from_the_firsts_checkpoint_and_blocks_with_the_same_output);
	tcase_add_test(tcase,
		       a_short_request_takes_a_block_and_a_row_and_is_refused_for_rows_alone);
	tcase_add_test(tcase, a_failed_admission_leaves_nothing_behind_a_thousand_times);
	tcase_add_test(tcase, a_freed_sequence_gives_back_its_blocks_and_its_rows);
	tcase_add_test(tcase, a_rollback_is_in_all_groups_or_in_none);
	tcase_add_test(tcase, drafts_are_rolled_back_to_any_token_of_their_step);
	tcase_add_test(tcase, forks_go_on_from_one_state_each_for_itself);
	tcase_add_test(tcase, a_hybrid_is_followed_while_it_is_computed_and_its_promise_ends_with_it);
	tcase_add_test(tcase, window_blocks_leave_behind_finished_tokens_not_scheduled_ones);
	tcase_add_test(tcase, a_sequence_longer_than_the_pool_fits_in_a_window);
	tcase_add_test(tcase, groups_that_share_a_pool_never_find_each_others_blocks);
	tcase_add_test(tcase,
		       a_reservation_that_groups_of_one_pool_cannot_have_costs_it_none_of_its_cache);
	tcase_add_test(tcase, a_window_that_a_search_has_moved_far_on_leaves_its_own_blocks_behind_too);
	tcase_add_test(tcase, padding_lanes_name_the_null_row_and_take_none);
	tcase_add_test(tcase, groups_that_cannot_be_are_refused_by_name);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
