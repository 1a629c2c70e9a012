/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A random walk of all operations (walk.h). Two attachments to each pool work side by side, so that all the
 * time something is evicted, refused, moved, zeroed, found, forked, rolled back and preempted.
 *
 * $KV_WALK_STEPS: how many (200,000), $KV_WALK_SEED: which.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/client/walk.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || \
	__has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define STEPS 20000
#else
#define STEPS 200000
#endif
#define ROW_FLOATS 4096
#define N_BLOCKS   110
#define N_ROWS	   60

struct walk_count walked;
struct model walk_models[2];
uint64_t walk_step;

static uint64_t state;

uint32_t walk_pick(uint32_t n)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (uint32_t)(state >> 32) % n;
}

void walk_tokens(int32_t *tokens, uint32_t prompt)
{
	for (uint32_t i = 0; i < MOST_LEN + 8; i++)
		tokens[i] = (int32_t)(i < 17 * (prompt % 3 + 1) ? prompt % 2 : prompt) * 1000 +
			    (int32_t)i;
}

static uint64_t from_env(const char *name, uint64_t otherwise)
{
	const char *text = getenv(name);

	return text ? strtoull(text, NULL, 10) : otherwise;
}

static void one_step(void)
{
	uint32_t what = walk_pick(100);

	if (what < 48)
		walk_groups();
	else if (what < 82)
		walk_plain();
	else
		walk_capacity();
}

#define N(what) ((unsigned long long)walked.what)

static void say(uint64_t n)
{
	printf("%llu steps: %llu tokens found, %llu refused, %llu too large, %llu rolled back, %llu not, "
	       "%llu forks\n", (unsigned long long)n, N(hits), N(refused), N(too_large), N(rollbacks),
	       N(impossible), N(forks));
	printf("%llu preempted, %llu tokens found at resuming, %llu promised, %llu waits for others, "
	       "%llu hits that had to be, %llu of %llu blocks stayed private, %llu tokens found in part of a "
	       "block, %llu given up\n", N(preempted), N(resumed_tokens), N(promised), N(followed), N(sure),
	       N(private), N(settled), N(partial), N(fell_back));
	printf("%llu limits set, %llu refused, %llu compactions, %llu claims of all, %llu leases, %llu epochs, "
	       "%llu MiB moved between pools, %llu MiB zeroed\n", N(sets), N(sets_refused), N(compactions),
	       N(claims), N(raw_blocks), N(epochs),
	       (unsigned long long)daemon_stats(walk_models[0].client).moved_bytes_total >> 20,
	       (unsigned long long)gpu_stats(walk_models[0].client).scrubbed_bytes_total >> 20);
	fflush(stdout); /* a failure that follows would lose it */
}

static void expect_variety(uint64_t n)
{
	expect(walked.hits > n / 20 && walked.refused > n / 1000 && walked.rollbacks > n / 500 &&
		       walked.impossible > n / 1000 && walked.forks > n / 200 &&
		       walked.preempted > n / 1000 && walked.resumed_tokens > n / 100 &&
		       walked.promised > n / 1000 && walked.followed > n / 5000 &&
		       walked.sure > n / 1000 && walked.partial > n / 500 && walked.sets > n / 500 && walked.compactions > n / 500 &&
		       walked.claims > n / 5000 && walked.raw_blocks > n / 50,
	       "a walk on which little happens");
	/* Of an epoch that is over, or as said at settle(). */
	expect(walked.private < walked.settled / 2, "most of what is published is not shown");
	expect(daemon_stats(walk_models[0].client).moved_bytes_total > n * 100,
	       "a walk on which little memory changes its pool");
}

START_TEST(whatever_is_done_in_whatever_order_every_sequence_says_what_its_tokens_say)
{
	uint64_t n = from_env("KV_WALK_STEPS", STEPS), seed = from_env("KV_WALK_SEED", 1);

	daemon_start("--host", "24M");
	model_row_floats = ROW_FLOATS;
	for (int i = 0; i < 2; i++)
		model_open(&walk_models[i], N_BLOCKS, N_ROWS, N_DRAFTS);
	walk_plain_open();
	walk_capacity_open();
	state = seed * 0x9e3779b97f4a7c15 + 1;
	for (walk_step = 0; walk_step < n; walk_step++)
		one_step();
	walk_groups_end();
	walk_plain_end();
	walk_capacity_end();
	for (int i = 0; i < 2; i++)
		must(kv_ping(walk_models[i].client, TIMEOUT));
	books_balance(walk_models[0].client);
	for (int g = 0; g < 3; g++)
		ck_assert_uint_eq(pool_stats(walk_models[0].client, model_names[g]).blocks_cached_held, 0);
	ck_assert_uint_eq(pool_stats(walk_models[0].client, "plain").blocks_cached_held, 0);
	say(n);
	if (n >= 20000)
		expect_variety(n);
	walk_plain_close();
	walk_capacity_close();
	for (int i = 0; i < 2; i++)
		model_close(&walk_models[i]);
	daemon_stop();
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("walk");
	TCase *tcase = tcase_create("walk");

	tcase_set_timeout(tcase, 36000);
	tcase_add_test(tcase, whatever_is_done_in_whatever_order_every_sequence_says_what_its_tokens_say);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
