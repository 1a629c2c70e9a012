/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A random walk of all operations on sequences of three groups, against a naive model: a list of
 * tokens for each sequence, and the model's output worked out anew from it. Two attachments work side
 * by side in pools that are too small for them, so that all the time something is evicted, refused,
 * found, forked and rolled back.
 *
 * $KV_WALK_STEPS: how many (200,000), $KV_WALK_SEED: which.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/client/hybrid.h"

#define MOST_SEQS 10
#define MOST_LEN  90
#define N_PROMPTS 6
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || \
	__has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define STEPS 20000
#else
#define STEPS 200000
#endif

struct own {
	struct kv_gseq *seq;
	const struct model *model;
	int32_t tokens[MOST_LEN + 8];
	int salt;
};

static struct model models[2];
static struct own owns[MOST_SEQS];
static uint32_t n_owns;
static uint64_t state, n_hits, n_refused, n_rollbacks, n_impossible, n_forks;

static uint32_t pick(uint32_t n)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (uint32_t)(state >> 32) % n;
}

/* Prompts share beginnings: they part at a token of their own. */
static void fill_prompt(int32_t *tokens, uint32_t prompt)
{
	for (uint32_t i = 0; i < MOST_LEN + 8; i++)
		tokens[i] = (int32_t)(i < 17 * (prompt % 3 + 1) ? prompt % 2 : prompt) * 1000 +
			    (int32_t)i;
}

static void end(uint32_t i)
{
	kv_gseq_free(owns[i].seq, NULL);
	owns[i] = owns[--n_owns];
}

static void begin(void)
{
	struct own *own = &owns[n_owns];
	size_t hit, n;

	if (n_owns == MOST_SEQS)
		end(pick(n_owns));
	own = &owns[n_owns++];
	own->model = &models[pick(2)];
	own->salt = (int)pick(3);
	must(kv_gseq_new(own->model->groups, &own->seq));
	if (own->salt)
		must(kv_gseq_field(own->seq, KV_TAG_SALT, own->salt == 1 ? "a" : "b", 1));
	fill_prompt(own->tokens, pick(N_PROMPTS));
	n = 1 + pick(MOST_LEN);
	must(kv_gseq_lookup(own->seq, own->tokens, n, &hit));
	expect(hit < n && hit % INTERVAL == 0, "%zu of %zu tokens are found", hit, n);
	n_hits += hit;
}

/* A step; now and then one of drafts, of which some are rolled back. */
static void compute(uint32_t i)
{
	struct own *own = &owns[i];
	size_t len = kv_gseq_len(own->seq), n = 1 + pick(pick(2) ? 4 : 30), keep;
	int r;

	if (len + n > MOST_LEN)
		n = MOST_LEN - len;
	if (!n) {
		end(i);
		return;
	}
	r = kv_gseq_reserve(own->seq, len + n, 0);
	expect(r == 0 || r == KV_NO_ROOM, "reserve: %d (%s)", r, kv_error_text());
	expect(kv_gseq_len(own->seq) == len, "reserve changed the length");
	if (r) {
		n_refused++;
		end(pick(n_owns));
		return;
	}
	must(kv_gseq_append(own->seq, own->tokens + len, n));
	model_copy(own->model, own->seq);
	expect(model_run(own->model, own->seq, own->tokens, n) ==
		       expected_output(own->tokens, len + n),
	       "sequence %u is wrong after %zu + %zu tokens", i, len, n);
	keep = len + n;
	if (n > 1 && n <= 1 + N_DRAFTS && pick(3) == 0) {
		keep = len + 1 + pick((uint32_t)n);
		keep = keep > len + n ? len + n : keep;
		must(kv_gseq_rollback(own->seq, keep, NULL));
		for (size_t k = keep; k < MOST_LEN + 8; k++) /* what comes is something else */
			own->tokens[k] += 7;
	}
	if (pick(4))
		must(kv_gseq_publish(own->seq, NULL));
	if (pick(4))
		must(kv_gseq_done(own->seq, keep, NULL));
}

static void fork_one(uint32_t i)
{
	struct own *child;

	if (n_owns == MOST_SEQS)
		return;
	child = &owns[n_owns++];
	*child = owns[i];
	must(kv_gseq_fork(owns[i].seq, &child->seq));
	for (size_t k = kv_gseq_len(child->seq); k < MOST_LEN + 8; k++)
		child->tokens[k] += (int32_t)pick(2);
	n_forks++;
}

static void roll_back(uint32_t i)
{
	struct own *own = &owns[i];
	size_t len = kv_gseq_len(own->seq), to = pick((uint32_t)len + 1);
	int r = kv_gseq_rollback(own->seq, to, NULL);

	expect(r == 0 || r == -ENODATA, "rollback: %d (%s)", r, kv_error_text());
	expect(kv_gseq_len(own->seq) == (r ? len : to), "rollback: %zu tokens", kv_gseq_len(own->seq));
	n_rollbacks += !r;
	n_impossible += r != 0;
}

/* What an attached pool needs not tell: it may have been evicted, by us or by an operator. */
static void disturb(void)
{
	struct kv_client *client = models[pick(2)].client;
	const char *name = model_names[pick(3)];

	if (pick(4)) {
		must(kv_pool_drop(client, name, TIMEOUT));
		return;
	}
	for (int g = 0; g < 3; g++)
		must(kv_pool_new_epoch(client, model_names[g], NULL, NULL, TIMEOUT));
	for (uint32_t prompt = 0; prompt < N_PROMPTS; prompt++) {
		int32_t tokens[MOST_LEN + 8];
		struct kv_gseq *seq;
		size_t hit;

		fill_prompt(tokens, prompt);
		must(kv_gseq_new(models[0].groups, &seq));
		must(kv_gseq_lookup(seq, tokens, MOST_LEN, &hit));
		expect(hit == 0, "%zu tokens of an epoch that is over are found", hit);
		kv_gseq_free(seq, NULL);
	}
}

static void step(void)
{
	uint32_t what = pick(1000), i;

	if (!n_owns || what < 60) {
		begin();
		return;
	}
	i = pick(n_owns);
	if (what < 800)
		compute(i);
	else if (what < 840)
		fork_one(i);
	else if (what < 930)
		roll_back(i);
	else if (what < 995)
		end(i);
	else if (what < 999)
		must(kv_ping(models[0].client, TIMEOUT));
	else
		disturb();
}

static uint64_t from_env(const char *name, uint64_t otherwise)
{
	const char *text = getenv(name);

	return text ? strtoull(text, NULL, 10) : otherwise;
}

START_TEST(whatever_is_done_in_whatever_order_every_sequence_says_what_its_tokens_say)
{
	uint64_t n = from_env("KV_WALK_STEPS", STEPS), seed = from_env("KV_WALK_SEED", 1);

	daemon_start("--host", "16M");
	model_open(&models[0], 110, 40, N_DRAFTS);
	model_open(&models[1], 110, 40, N_DRAFTS);
	state = seed * 0x9e3779b97f4a7c15 + 1;
	for (uint64_t k = 0; k < n; k++) {
		step();
		if (k % 4096 == 0)
			books_balance(models[0].client);
	}
	while (n_owns)
		end(0);
	must(kv_ping(models[0].client, TIMEOUT));
	for (int g = 0; g < 3; g++)
		ck_assert_uint_eq(pool_stats(models[0].client, model_names[g]).blocks_cached_held, 0);
	printf("%llu steps: %llu tokens found, %llu refused, %llu rolled back, %llu not, %llu forks\n",
	       (unsigned long long)n, (unsigned long long)n_hits, (unsigned long long)n_refused,
	       (unsigned long long)n_rollbacks, (unsigned long long)n_impossible,
	       (unsigned long long)n_forks);
	if (n >= 20000)
		expect(n_hits > n / 20 && n_refused > n / 1000 && n_rollbacks > n / 500 &&
			       n_impossible > n / 500 && n_forks > n / 200,
		       "a walk on which little happens");
	model_close(&models[0]);
	model_close(&models[1]);
	daemon_stop();
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("walk");
	TCase *tcase = tcase_create("walk");

	tcase_set_timeout(tcase, 7200);
	tcase_add_test(tcase, whatever_is_done_in_whatever_order_every_sequence_says_what_its_tokens_say);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
