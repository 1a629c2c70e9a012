/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sequences that give way and go on later, and trees of forks: beams and samples of one prompt. What each
 * has in its blocks is compared with its tokens, byte for byte.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/client/hybrid.h"

#define N_BEAMS	 64
#define N_BLOCKS 400
#define N_STEPS	 40
#define PROMPT	 100

static struct kv_client *client;
static struct kv_pool *pool;
static struct kv_view view;

static void setup_of(uint32_t n_blocks)
{
	daemon_start("--host", "32M");
	client = client_new();
	pool = pool_new_mapped(client, "pool", n_blocks);
	must(kv_pool_view(pool, 0, 0, &view));
}

static void setup(void)
{
	setup_of(N_BLOCKS);
}

static void teardown(void)
{
	struct kv_pool_stats s;

	must(kv_ping(client, TIMEOUT));
	s = pool_stats(client, "pool");
	expect(s.blocks_cached_held == 0, "%llu held", (unsigned long long)s.blocks_cached_held);
	kv_pool_close(pool);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

static int32_t *token_at(const struct kv_seq *seq, size_t i)
{
	const kv_block_id *ids;

	kv_seq_blocks(seq, &ids);
	return (int32_t *)(void *)((char *)view.base + ids[i / BLOCK_TOKENS] * view.block_stride +
				   (int64_t)(i % BLOCK_TOKENS) * view.token_stride);
}

/* Appends tokens up to @n and writes each one's "K", which is the token itself. */
static void compute(struct kv_seq *seq, const int32_t *tokens, size_t n)
{
	size_t len = kv_seq_len(seq);

	must(kv_seq_append(seq, tokens + len, n - len));
	for (size_t i = len; i < n; i++)
		*token_at(seq, i) = tokens[i];
}

static void has_its_bytes(const struct kv_seq *seq, const int32_t *tokens, size_t n)
{
	ck_assert_uint_eq(kv_seq_len(seq), n);
	for (size_t i = 0; i < n; i++)
		expect(*token_at(seq, i) == tokens[i], "token %zu of %zu is %d, not %d", i, n,
		       *token_at(seq, i), tokens[i]);
}

static void copy_noted(struct kv_seq *seq)
{
	KV_OPTIONS(kv_batch_options, sizes, .max_seqs = 1, .max_tokens = 64, .max_blocks_per_seq = 32);
	struct kv_batch_item item = {seq, 1};
	struct kv_batch *batch;

	must(kv_batch_new(pool, &sizes, &batch));
	must(kv_batch_build(batch, &item, 1, 0, 0));
	must(kv_batch_copy(batch, NULL));
	kv_batch_free(batch);
}

static uint64_t in_use(void)
{
	struct kv_session_stats s;

	must(kv_ping(client, TIMEOUT));
	expect(session_stats(client, getpid(), &s), "there is no session");
	return s.blocks_leased + s.blocks_held - s.blocks_idle;
}

static struct kv_seq *computed(const int32_t *tokens, size_t n)
{
	struct kv_seq *seq;

	must(kv_seq_new(pool, &seq));
	must(kv_seq_reserve(seq, n, TIMEOUT));
	compute(seq, tokens, n);
	return seq;
}

/* ---- preemption ---- */

START_TEST(a_preempted_sequence_holds_nothing_and_takes_up_the_very_blocks_that_are_still_cached)
{
	const int32_t *tokens = tokens_of(1, 200);
	struct kv_seq *seq = computed(tokens, PROMPT);
	kv_block_id before[PROMPT / BLOCK_TOKENS];
	const kv_block_id *ids;
	size_t len;

	kv_seq_blocks(seq, &ids);
	memcpy(before, ids, sizeof(before));
	ck_assert_uint_eq(kv_seq_preempted(seq), 0);
	must(kv_seq_preempt(seq, NULL));
	ck_assert_uint_eq(kv_seq_preempted(seq), PROMPT);
	ck_assert_uint_eq(kv_seq_len(seq), 0);
	ck_assert_uint_eq(kv_seq_capacity(seq), 0);
	ck_assert_uint_eq(in_use(), 0);
	ck_assert_uint_eq(pool_stats(client, "pool").blocks_cached, PROMPT / BLOCK_TOKENS);

	/* 96 of 100 tokens come back without a byte written. */
	must(kv_seq_resume(seq, PROMPT + 10, TIMEOUT, &len));
	ck_assert_uint_eq(len, PROMPT / BLOCK_TOKENS * BLOCK_TOKENS);
	ck_assert_uint_eq(kv_seq_preempted(seq), 0);
	ck_assert_uint_ge(kv_seq_capacity(seq), PROMPT + 10);
	kv_seq_blocks(seq, &ids);
	ck_assert_mem_eq(before, ids, sizeof(before));
	compute(seq, kv_seq_tokens(seq), PROMPT);
	compute(seq, tokens, PROMPT + 10);
	has_its_bytes(seq, tokens, PROMPT + 10);
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(a_preempted_sequence_whose_blocks_were_taken_is_computed_anew_from_its_own_tokens)
{
	struct kv_seq *seq = computed(tokens_of(1, PROMPT), PROMPT);
	kv_block_id ids[N_BLOCKS];
	size_t len;

	must(kv_seq_preempt(seq, NULL));
	must(kv_blocks_take(pool, N_BLOCKS, ids, TIMEOUT)); /* all that there is */
	for (int i = 0; i < N_BLOCKS; i++)
		block_fill(pool, ids[i], 0xee);
	ck_assert_int_eq(kv_seq_resume(seq, PROMPT, 0, &len), KV_NO_ROOM);
	ck_assert_uint_eq(kv_seq_preempted(seq), PROMPT);
	must(kv_blocks_give(pool, N_BLOCKS, ids));
	must(kv_seq_resume(seq, PROMPT, TIMEOUT, &len));
	ck_assert_uint_eq(len, 0);
	compute(seq, kv_seq_tokens(seq), PROMPT);
	has_its_bytes(seq, tokens_of(1, PROMPT), PROMPT);
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(without_room_for_the_rest_it_stays_preempted_and_what_was_found_is_let_go)
{
	struct kv_seq *seq = computed(tokens_of(1, PROMPT), PROMPT);
	struct kv_pool_stats before, after;
	kv_block_id ids[N_BLOCKS];
	size_t len = 7;

	must(kv_seq_preempt(seq, NULL));
	must(kv_ping(client, TIMEOUT));
	/* The cached six stay: the others are taken. */
	must(kv_blocks_take(pool, N_BLOCKS - PROMPT / BLOCK_TOKENS, ids, TIMEOUT));
	before = pool_stats(client, "pool");
	for (int i = 0; i < 1000; i++)
		ck_assert_int_eq(kv_seq_resume(seq, PROMPT, 0, &len), KV_NO_ROOM);
	must(kv_ping(client, TIMEOUT));
	after = pool_stats(client, "pool");
	ck_assert_uint_eq(len, 7);
	ck_assert_uint_eq(kv_seq_preempted(seq), PROMPT);
	ck_assert_uint_eq(after.blocks_cached, PROMPT / BLOCK_TOKENS);
	ck_assert_uint_eq(after.blocks_cached_held, 0);
	ck_assert_uint_eq(after.blocks_leased, before.blocks_leased);
	ck_assert_uint_eq(after.hit_tokens_total, before.hit_tokens_total);
	ck_assert_int_eq(kv_seq_resume(seq, (size_t)BLOCK_TOKENS * (N_BLOCKS + 1), 0, &len), KV_TOO_LARGE);
	refused(kv_seq_resume(seq, PROMPT - 1, 0, &len), -EINVAL, "it had 100");
	must(kv_blocks_give(pool, N_BLOCKS - PROMPT / BLOCK_TOKENS, ids));
	must(kv_seq_resume(seq, PROMPT, 0, &len));
	ck_assert_uint_eq(len, PROMPT / BLOCK_TOKENS * BLOCK_TOKENS);
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(fields_and_extras_outlast_a_preemption)
{
	const int32_t *tokens = tokens_of(1, PROMPT);
	struct kv_extra image = {.tag = KV_TAG_IMAGE, .position = 20, .n_tokens = 30, .bytes = "cat",
				 .n_bytes = 3};
	struct kv_seq *seq, *other;
	size_t len;

	must(kv_seq_new(pool, &seq));
	must(kv_seq_field(seq, KV_TAG_SALT, "a", 1));
	must(kv_seq_extra(seq, &image));
	must(kv_seq_reserve(seq, PROMPT, TIMEOUT));
	compute(seq, tokens, PROMPT);
	must(kv_seq_preempt(seq, NULL));
	must(kv_ping(client, TIMEOUT));
	ck_assert_uint_eq(hit_of(pool, 1, PROMPT), 0);
	must(kv_seq_fork(seq, &other));
	ck_assert_uint_eq(kv_seq_preempted(other), PROMPT);
	must(kv_seq_resume(other, PROMPT, TIMEOUT, &len));
	ck_assert_uint_eq(len, 96);
	kv_seq_free(other, NULL);
	must(kv_seq_resume(seq, PROMPT, TIMEOUT, &len));
	ck_assert_uint_eq(len, 96);
	compute(seq, kv_seq_tokens(seq), PROMPT);
	has_its_bytes(seq, tokens, PROMPT);
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(what_is_no_preempted_sequence_cannot_be_resumed)
{
	struct kv_seq *seq;
	size_t len;

	must(kv_seq_new(pool, &seq));
	refused(kv_seq_resume(seq, 10, 0, &len), -EINVAL, "isn't preempted");
	must(kv_seq_reserve(seq, 100, TIMEOUT));
	must(kv_seq_preempt(seq, NULL)); /* no tokens, but blocks */
	ck_assert_uint_eq(kv_seq_capacity(seq), 0);
	ck_assert_uint_eq(in_use(), 0);
	refused(kv_seq_resume(seq, 10, 0, &len), -EINVAL, "isn't preempted");
	must(kv_seq_reserve(seq, 40, TIMEOUT));
	compute(seq, tokens_of(1, 40), 40);
	refused(kv_seq_resume(seq, 40, 0, &len), -EINVAL, "isn't preempted");
	must(kv_seq_preempt(seq, NULL));
	must(kv_seq_reserve(seq, 40, TIMEOUT));
	compute(seq, tokens_of(2, 40), 40); /* it begins anew */
	refused(kv_seq_resume(seq, 40, 0, &len), -EINVAL, "isn't preempted");
	must(kv_seq_preempt(seq, NULL));
	must(kv_seq_rollback(seq, 0, NULL));
	ck_assert_uint_eq(kv_seq_preempted(seq), 0);
	kv_seq_free(seq, NULL);
}
END_TEST

START_TEST(a_preempted_hybrid_goes_on_from_its_last_checkpoint_with_the_same_output)
{
	const int32_t *tokens = tokens_of(1, 90);
	struct kv_gseq *seq;
	struct model m;
	size_t len = 0;

	model_open(&m, 100, 40, N_DRAFTS);
	must(kv_gseq_new(m.groups, &seq));
	must(kv_gseq_field(seq, KV_TAG_SALT, "a", 1));
	for (size_t to = 10; to <= 80; to += 7) {
		size_t n = to - len;

		must(kv_gseq_reserve(seq, to, TIMEOUT));
		must(kv_gseq_append(seq, tokens + len, n));
		model_copy(&m, seq);
		expect(model_run(&m, seq, tokens, n) == expected_output(tokens, to), "at %zu", to);
		must(kv_gseq_preempt(seq, NULL));
		ck_assert_uint_eq(kv_gseq_preempted(seq), to);
		ck_assert_uint_eq(kv_gseq_len(seq), 0);
		must(kv_ping(m.client, TIMEOUT));
		for (int g = 0; g < 3; g++)
			ck_assert_uint_eq(pool_stats(m.client, model_names[g]).blocks_cached_held, 0);
		must(kv_gseq_resume(seq, to, TIMEOUT, &len));
		ck_assert_uint_eq(kv_gseq_preempted(seq), 0);
		ck_assert_uint_eq(len, (to - 1) / INTERVAL * INTERVAL);
		ck_assert_mem_eq(kv_gseq_tokens(seq), tokens, to * sizeof(*tokens));
	}
	kv_gseq_free(seq, NULL);
	model_close(&m);
}
END_TEST

/* ---- what others do meanwhile ---- */

static void setup_lru(void)
{
	daemon_start("--host", "32M", "--policy", "lru");
	client = client_new();
	pool = pool_new_mapped(client, "pool", N_BLOCKS);
	must(kv_pool_view(pool, 0, 0, &view));
}

/* Takes so much that half of what is cached has to go, and gives it back. */
static void squeeze(struct kv_client *c, struct kv_pool *p, const char *name)
{
	static kv_block_id ids[N_BLOCKS];
	struct kv_pool_info info;
	uint32_t n;

	must(kv_ping(c, TIMEOUT));
	kv_pool_info(p, &info);
	n = (uint32_t)(info.max_blocks - pool_stats(c, name).blocks_cached / 2);
	must(kv_blocks_take(p, n, ids, TIMEOUT));
	must(kv_blocks_give(p, n, ids));
	must(kv_ping(c, TIMEOUT));
}

START_TEST(a_preempted_sequence_was_used_last_so_that_what_was_let_go_before_is_evicted_first)
{
	struct kv_seq *seq = computed(tokens_of(1, PROMPT), PROMPT);
	size_t len;

	must(kv_seq_publish(seq, NULL));
	kv_seq_free(seq_published(client, pool, 2, PROMPT), NULL);
	must(kv_seq_preempt(seq, NULL));
	squeeze(client, pool, "pool");
	ck_assert_uint_eq(hit_of(pool, 2, PROMPT), 0);
	must(kv_seq_resume(seq, PROMPT, TIMEOUT, &len));
	ck_assert_uint_eq(len, PROMPT / BLOCK_TOKENS * BLOCK_TOKENS);
	kv_seq_free(seq, NULL);
}
END_TEST

static struct kv_gseq *hybrid(const struct model *m, const int32_t *tokens, size_t n)
{
	struct kv_gseq *seq;

	must(kv_gseq_new(m->groups, &seq));
	for (size_t len = 0; len < n;) {
		size_t step = n - len < INTERVAL ? n - len : INTERVAL;

		must(kv_gseq_reserve(seq, len + step, TIMEOUT));
		must(kv_gseq_append(seq, tokens + len, step));
		model_copy(m, seq);
		model_run(m, seq, tokens, step);
		must(kv_gseq_publish(seq, NULL));
		len += step;
	}
	must(kv_ping(m->client, TIMEOUT));
	return seq;
}

/* Freed or preempted: its last checkpoint and its blocks were used until then. */
START_TEST(a_preempted_or_ended_hybrid_was_used_last_in_all_groups)
{
	const size_t n = 4 * INTERVAL + 1;
	struct kv_gseq *seq, *again;
	int32_t tokens[4 * INTERVAL + 1];
	struct model m;
	size_t len;

	model_open(&m, 100, 40, 0);
	memcpy(tokens, tokens_of(1, n), sizeof(tokens));
	seq = hybrid(&m, tokens, n);
	kv_gseq_free(hybrid(&m, tokens_of(2, n), n), NULL);
	if (_i)
		must(kv_gseq_preempt(seq, NULL));
	else
		seq = kv_gseq_free(seq, NULL);
	for (int g = 0; g < 3; g++)
		squeeze(m.client, m.pools[g], model_names[g]);
	if (_i) {
		must(kv_gseq_resume(seq, n, TIMEOUT, &len));
	} else {
		must(kv_gseq_new(m.groups, &again));
		must(kv_gseq_lookup(again, tokens, n, &len));
		seq = again;
	}
	ck_assert_uint_eq(len, 4 * INTERVAL);
	kv_gseq_free(seq, NULL);
	model_close(&m);
}
END_TEST

/*
 * Another one has the first three blocks in common, and the last three of six for its own content by now.
 * Whole keys, and keys that are all equal: then only tokens and parents tell them apart.
 */
START_TEST(a_block_evicted_and_reused_since_the_preemption_is_not_taken_for_the_old_one)
{
	const size_t n = 6 * BLOCK_TOKENS, common = 3 * BLOCK_TOKENS;
	int32_t tokens[6 * BLOCK_TOKENS], others[6 * BLOCK_TOKENS];
	kv_block_id before[6];
	struct kv_seq *seq, *other;
	const kv_block_id *ids;
	size_t len;

	if (_i)
		setenv("KVCACHED_TEST_KEY_BITS", "0", 1);
	setup_of(6);
	memcpy(tokens, tokens_of(1, n), sizeof(tokens));
	memcpy(others, tokens_of(2, n), sizeof(others));
	memcpy(others, tokens, common * sizeof(*tokens));
	seq = computed(tokens, n);
	kv_seq_blocks(seq, &ids);
	memcpy(before, ids, sizeof(before));
	must(kv_seq_preempt(seq, NULL));
	must(kv_ping(client, TIMEOUT));

	must(kv_seq_new(pool, &other));
	must(kv_seq_lookup(other, others, n, &len));
	ck_assert_uint_eq(len, common);
	must(kv_seq_reserve(other, n, TIMEOUT));
	compute(other, others, n);
	must(kv_seq_publish(other, NULL));
	must(kv_ping(client, TIMEOUT));
	kv_seq_blocks(other, &ids);
	for (int i = 3; i < 6; i++)
		expect(ids[i] == before[3] || ids[i] == before[4] || ids[i] == before[5],
		       "block %d isn't one of those that were evicted", ids[i]);

	/* While the other one holds them there is no room, and nothing of its is touched. */
	ck_assert_int_eq(kv_seq_resume(seq, n, 0, &len), KV_NO_ROOM);
	has_its_bytes(other, others, n);
	kv_seq_free(other, NULL);
	must(kv_seq_resume(seq, n, TIMEOUT, &len));
	ck_assert_uint_eq(len, common);
	compute(seq, tokens, n);
	has_its_bytes(seq, tokens, n);
	must(kv_seq_new(pool, &other));
	must(kv_seq_lookup(other, others, n, &len));
	ck_assert_uint_eq(len, common);
	kv_seq_free(other, NULL);
	kv_seq_free(seq, NULL);
	teardown();
}
END_TEST

/* ---- trees ---- */

START_TEST(sixty_four_samples_of_one_prompt_have_it_once)
{
	int32_t prompt[PROMPT], tokens[N_BEAMS][PROMPT + N_STEPS];
	struct kv_seq *seqs[N_BEAMS];
	uint64_t shared = PROMPT / BLOCK_TOKENS;

	memcpy(prompt, tokens_of(1, PROMPT), sizeof(prompt));
	seqs[0] = computed(prompt, PROMPT);
	for (int i = 1; i < N_BEAMS; i++)
		must(kv_seq_fork(seqs[0], &seqs[i]));
	ck_assert_uint_le(in_use(), shared + 1);
	for (int i = 0; i < N_BEAMS; i++) {
		memcpy(tokens[i], prompt, sizeof(prompt));
		for (int k = PROMPT; k < PROMPT + N_STEPS; k++)
			tokens[i][k] = i * 1000 + k;
	}
	for (size_t n = PROMPT + 1; n <= PROMPT + N_STEPS; n++) {
		for (int i = 0; i < N_BEAMS; i++) {
			must(kv_seq_reserve(seqs[i], n, TIMEOUT));
			copy_noted(seqs[i]);
			compute(seqs[i], tokens[i], n);
		}
	}
	for (int i = 0; i < N_BEAMS; i++)
		has_its_bytes(seqs[i], tokens[i], PROMPT + N_STEPS);
	/* 6 blocks of the prompt in common; the 7th, partly filled, was copied, and two more have come. */
	ck_assert_uint_eq(in_use(), shared + N_BEAMS * 3);
	for (int i = 0; i < N_BEAMS; i++)
		kv_seq_free(seqs[i], NULL);
}
END_TEST

struct beam {
	struct kv_seq *seq;
	int32_t tokens[PROMPT + N_STEPS];
};

static struct beam beams[N_BEAMS], next[N_BEAMS];

/* The best go on, some of them several times; those that nobody follows end. */
START_TEST(a_beam_search_of_sixty_four_keeps_what_each_beam_has_said)
{
	uint64_t most = 0;

	srandom(7);
	memcpy(beams[0].tokens, tokens_of(1, PROMPT), PROMPT * sizeof(int32_t));
	beams[0].seq = computed(beams[0].tokens, PROMPT);
	for (int i = 1; i < N_BEAMS; i++) {
		memcpy(beams[i].tokens, beams[0].tokens, PROMPT * sizeof(int32_t));
		must(kv_seq_fork(beams[0].seq, &beams[i].seq));
	}
	for (size_t n = PROMPT + 1; n <= PROMPT + N_STEPS; n++) {
		for (int i = 0; i < N_BEAMS; i++) {
			int from = (int)(random() % N_BEAMS) * (int)(random() % N_BEAMS) / N_BEAMS;

			memcpy(next[i].tokens, beams[from].tokens, sizeof(next[i].tokens));
			must(kv_seq_fork(beams[from].seq, &next[i].seq));
			next[i].tokens[n - 1] = i * 1000 + (int32_t)n;
		}
		for (int i = 0; i < N_BEAMS; i++)
			kv_seq_free(beams[i].seq, NULL);
		memcpy(beams, next, sizeof(beams));
		for (int i = 0; i < N_BEAMS; i++) {
			must(kv_seq_reserve(beams[i].seq, n, TIMEOUT));
			copy_noted(beams[i].seq);
			compute(beams[i].seq, beams[i].tokens, n);
			if (n % 8 == 0)
				must(kv_seq_publish(beams[i].seq, NULL));
		}
		if (n % 5 == 0) {
			for (int i = 0; i < N_BEAMS; i++)
				has_its_bytes(beams[i].seq, beams[i].tokens, n);
			most = in_use() > most ? in_use() : most;
		}
	}
	expect(most < N_BLOCKS / 2, "%llu blocks in use", (unsigned long long)most);
	/* One after the other gives way; what is shared stays for the rest. */
	for (int i = 0; i < N_BEAMS / 2; i++)
		must(kv_seq_preempt(beams[i].seq, NULL));
	for (int i = N_BEAMS / 2; i < N_BEAMS; i++)
		has_its_bytes(beams[i].seq, beams[i].tokens, PROMPT + N_STEPS);
	for (int i = 0; i < N_BEAMS; i++) {
		size_t len;

		if (i >= N_BEAMS / 2) {
			kv_seq_free(beams[i].seq, NULL);
			continue;
		}
		must(kv_seq_resume(beams[i].seq, PROMPT + N_STEPS, TIMEOUT, &len));
		expect(len >= PROMPT / BLOCK_TOKENS * BLOCK_TOKENS, "beam %d: %zu tokens left", i, len);
		compute(beams[i].seq, kv_seq_tokens(beams[i].seq), PROMPT + N_STEPS);
		has_its_bytes(beams[i].seq, beams[i].tokens, PROMPT + N_STEPS);
		kv_seq_free(beams[i].seq, NULL);
	}
}
END_TEST

START_TEST(a_tree_of_sixty_four_hybrid_sequences_each_says_what_its_own_tokens_say)
{
	static struct model m;
	static int32_t tokens[N_BEAMS][64];
	struct kv_gseq *seqs[N_BEAMS];

	model_open(&m, 1000, 400, N_DRAFTS);
	memcpy(tokens[0], tokens_of(3, 64), sizeof(tokens[0]));
	must(kv_gseq_new(m.groups, &seqs[0]));
	must(kv_gseq_reserve(seqs[0], 21, TIMEOUT));
	must(kv_gseq_append(seqs[0], tokens[0], 21));
	model_run(&m, seqs[0], tokens[0], 21);
	must(kv_gseq_publish(seqs[0], NULL));
	/* 1, 2, 4, ... 64: each level goes on for three tokens before the next. */
	for (int n = 1, len = 21; n <= N_BEAMS; n *= 2, len += 3) {
		for (int i = 0; i < n; i++) {
			for (int k = len; k < len + 3; k++)
				tokens[i][k] = i * 100 + k;
			must(kv_gseq_reserve(seqs[i], (size_t)len + 3, TIMEOUT));
			must(kv_gseq_append(seqs[i], tokens[i] + len, 3));
			model_copy(&m, seqs[i]);
			expect(model_run(&m, seqs[i], tokens[i], 3) ==
				       expected_output(tokens[i], (size_t)len + 3),
			       "sequence %d of %d at %d", i, n, len + 3);
			must(kv_gseq_done(seqs[i], (size_t)len + 3, NULL));
		}
		for (int i = 0; n < N_BEAMS && i < n; i++) {
			must(kv_gseq_fork(seqs[i], &seqs[n + i]));
			memcpy(tokens[n + i], tokens[i], sizeof(tokens[i]));
		}
	}
	for (int i = 0; i < N_BEAMS; i++)
		kv_gseq_free(seqs[i], NULL);
	model_close(&m);
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("preempt");
	TCase *preempt = tcase_create("preempt"), *trees = tcase_create("trees");
	TCase *used = tcase_create("used last"), *reused = tcase_create("reused");

	tcase_add_checked_fixture(preempt, setup, teardown);
	tcase_set_timeout(preempt, 60);
	tcase_add_test(preempt,
		       a_preempted_sequence_holds_nothing_and_takes_up_the_very_blocks_that_are_still_cached);
	tcase_add_test(preempt,
		       a_preempted_sequence_whose_blocks_were_taken_is_computed_anew_from_its_own_tokens);
	tcase_add_test(preempt, without_room_for_the_rest_it_stays_preempted_and_what_was_found_is_let_go);
	tcase_add_test(preempt, fields_and_extras_outlast_a_preemption);
	tcase_add_test(preempt, what_is_no_preempted_sequence_cannot_be_resumed);
	tcase_add_test(preempt, a_preempted_hybrid_goes_on_from_its_last_checkpoint_with_the_same_output);
	suite_add_tcase(s, preempt);
	tcase_add_checked_fixture(used, setup_lru, teardown);
	tcase_set_timeout(used, 60);
	tcase_add_test(used, a_preempted_sequence_was_used_last_so_that_what_was_let_go_before_is_evicted_first);
	tcase_add_loop_test(used, a_preempted_or_ended_hybrid_was_used_last_in_all_groups, 0, 2);
	suite_add_tcase(s, used);
	tcase_set_timeout(reused, 60);
	tcase_add_loop_test(reused,
			    a_block_evicted_and_reused_since_the_preemption_is_not_taken_for_the_old_one, 0, 2);
	suite_add_tcase(s, reused);
	tcase_add_checked_fixture(trees, setup, teardown);
	tcase_set_timeout(trees, 60);
	tcase_add_test(trees, sixty_four_samples_of_one_prompt_have_it_once);
	tcase_add_test(trees, a_beam_search_of_sixty_four_keeps_what_each_beam_has_said);
	tcase_add_test(trees, a_tree_of_sixty_four_hybrid_sequences_each_says_what_its_own_tokens_say);
	suite_add_tcase(s, trees);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
