/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model must not notice how a prompt is cut, what runs beside it, where its blocks lie or how
 * many threads compute: that is what makes a cached prompt as good as a computed one, to the bit.
 */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/engine/cache.h"
#include "tests/engine/device.h"
#include "tools/engine/error.h"
#include "tools/engine/tiny.h"

#define N_PROMPT 150
#define N_VOCAB	 256

static struct kv_gguf *file;
static struct kv_dense *dense;
static struct kv_model *model;
static int32_t prompt[N_PROMPT];
static float whole[N_VOCAB]; /* logits after the prompt in one step */

static void setup_threads(unsigned n_threads)
{
	ck_assert_int_eq(kv_tiny_new("tiny", &file), 0);
	ck_assert_msg(device_open(n_threads, &dense) == 0, "%s", kv_engine_error_text());
	ck_assert_int_eq(kv_model_new(file, dense, 512, 8, 64, &model), 0);
	for (int i = 0; i < N_PROMPT; i++)
		prompt[i] = (i * 7 + i * i) % 26 + 'a';
}

static void step(struct cache *cache, const int32_t *tokens, uint32_t n, float *logits)
{
	cache_step(&cache, 1, model, &tokens, &n, logits);
}

static void setup(void)
{
	struct cache cache;

	setup_threads(2);
	cache_init(&cache, dense, kv_model_shape(model), KV_F32, 16);
	step(&cache, prompt, N_PROMPT, whole);
	cache_deinit(&cache);
}

static void teardown(void)
{
	model = kv_model_free(model);
	dense = kv_dense_close(dense);
	file = kv_gguf_free(file);
}

static void assert_same(const float *logits)
{
	ck_assert_mem_eq(logits, whole, sizeof(whole));
}

/* Chunk lengths: the last is repeated until the prompt is done. */
static const uint32_t cuts[][3] = {{1, 1, 1}, {16, 16, 16}, {7, 50, 64}, {149, 1, 1}};

START_TEST(a_prompt_in_chunks_gives_the_same_bits)
{
	float logits[N_VOCAB];
	struct cache cache;
	uint32_t n, i = 0;

	cache_init(&cache, dense, kv_model_shape(model), KV_F32, 16);
	while (cache.len < N_PROMPT) {
		n = cuts[_i][i < 3 ? i++ : 2];
		n = n < N_PROMPT - cache.len ? n : N_PROMPT - cache.len;
		step(&cache, prompt + cache.len, n, logits);
	}
	assert_same(logits);
	cache_deinit(&cache);
}
END_TEST

START_TEST(a_sequence_in_a_batch_gives_the_same_bits)
{
	struct cache caches[3], *all[3] = {&caches[0], &caches[1], &caches[2]};
	const int32_t *tokens[3] = {prompt + 3, prompt, prompt + 9};
	float logits[3 * N_VOCAB];
	uint32_t n[3] = {37, 100, 1};

	cache_init(&caches[0], dense, kv_model_shape(model), KV_F32, 48);
	cache_split(&caches[0], 16, &caches[1]);
	cache_split(&caches[0], 16, &caches[2]);
	cache_step(all, 3, model, tokens, n, logits);

	/* The middle one ends its prompt while the others go on. */
	tokens[0] += n[0];
	tokens[1] += n[1];
	tokens[2] += n[2];
	n[0] = 1;
	n[1] = 50;
	n[2] = 1;
	cache_step(all, 3, model, tokens, n, logits);
	assert_same(logits + N_VOCAB);
	for (int i = 0; i < 3; i++)
		cache_deinit(&caches[i]);
}
END_TEST

START_TEST(the_number_of_threads_leaves_no_trace)
{
	float logits[N_VOCAB];
	struct cache cache;

	teardown();
	setup_threads(_i);
	cache_init(&cache, dense, kv_model_shape(model), KV_F32, 16);
	step(&cache, prompt, N_PROMPT, logits);
	assert_same(logits);
	cache_deinit(&cache);
}
END_TEST

static float largest_error(const float *logits, float *ret_largest)
{
	float error = 0;

	*ret_largest = 0;
	for (int i = 0; i < N_VOCAB; i++) {
		*ret_largest = fmaxf(*ret_largest, fabsf(whole[i]));
		error = fmaxf(error, fabsf(whole[i] - logits[i]));
	}
	return error;
}

START_TEST(the_host_gives_nearly_the_same)
{
	struct kv_dense *host_dense;
	struct kv_model *host_model;
	struct cache cache, *caches = &cache;
	const int32_t *tokens = prompt;
	float logits[N_VOCAB], largest;
	uint32_t n = N_PROMPT;

	ck_assert_int_eq(kv_dense_cpu(2, &host_dense), 0);
	ck_assert_int_eq(kv_model_new(file, host_dense, 512, 8, 64, &host_model), 0);
	cache_init(&cache, host_dense, kv_model_shape(host_model), KV_F32, 16);
	cache_step(&caches, 1, host_model, &tokens, &n, logits);
	/* Sums in another order: six layers of rounding to 24 bits, sharpened by attention. */
	ck_assert_float_le(largest_error(logits, &largest), 1e-3 * largest);
	if (device_of_test == KV_DEVICE_HOST)
		assert_same(logits);
	cache_deinit(&cache);
	kv_model_free(host_model);
	kv_dense_close(host_dense);
}
END_TEST

START_TEST(every_kv_type_is_close_to_f32)
{
	static const struct {
		int dtype;
		float most; /* of the largest logit: rounding K and V to 11 or 8 bits, six layers */
	} types[] = {{KV_F16, 2e-2}, {KV_BF16, 1.5e-1}};
	float logits[N_VOCAB], largest, error;
	struct cache cache;

	cache_init(&cache, dense, kv_model_shape(model), types[_i].dtype, 16);
	step(&cache, prompt, N_PROMPT, logits);
	error = largest_error(logits, &largest);
	ck_assert_float_gt(error, 0);
	ck_assert_float_le(error, types[_i].most * largest);
	cache_deinit(&cache);
}
END_TEST

static int32_t best(const float *logits)
{
	int32_t ret = 0;

	for (int32_t i = 1; i < N_VOCAB; i++)
		ret = logits[i] > logits[ret] ? i : ret;
	return ret;
}

static void write_text(const char *start, int n, char *ret)
{
	int32_t tokens[64], next;
	float logits[N_VOCAB];
	struct cache cache;
	size_t len = strlen(start);

	for (size_t i = 0; i < len; i++)
		tokens[i] = start[i];
	cache_init(&cache, dense, kv_model_shape(model), KV_F32, 32);
	step(&cache, tokens, len, logits);
	for (int i = 0; i < n; i++) {
		next = best(logits);
		ret[i] = next;
		step(&cache, &next, 1, logits);
	}
	ret[n] = 0;
	cache_deinit(&cache);
}

/* How often the last 8 letters of some place stood earlier: 0 for a text without loops */
static int repeats(const char *text)
{
	int n = strlen(text), found = 0;

	for (int i = 8; i < n; i++)
		for (int j = 8; j < i; j++)
			if (!memcmp(text + i - 8, text + j - 8, 8)) {
				found++;
				break;
			}
	return found;
}

START_TEST(greedy_text_depends_on_the_prompt_and_does_not_loop)
{
	static const char *const starts[] = {"The harbour", "the harbour", "Once upon a time",
					     "Once upon a tide"};
	char texts[4][201];

	for (int i = 0; i < 4; i++) {
		write_text(starts[i], 200, texts[i]);
		ck_assert_int_le(repeats(texts[i]), 20);
		ck_assert_uint_eq(strspn(texts[i], "abcdefghijklmnopqrstuvwxyz "), 200);
		for (int j = 0; j < i; j++)
			ck_assert_str_ne(texts[i], texts[j]);
	}
}
END_TEST

START_TEST(a_step_that_is_too_large_is_refused)
{
	struct kv_batch_data batch = {.n_seqs = 1, .n_tokens = 513, .n_real_tokens = 513};

	ck_assert_int_eq(kv_model_step(model, &batch, NULL, NULL, 0, NULL), -E2BIG);
	batch.n_real_tokens = 1;
	batch.n_seqs = 9;
	ck_assert_int_eq(kv_model_step(model, &batch, NULL, NULL, 0, NULL), -E2BIG);
}
END_TEST

START_TEST(warming_up_changes_nothing)
{
	float logits[N_VOCAB];
	struct cache cache;

	cache_init(&cache, dense, kv_model_shape(model), KV_F32, 17);
	ck_assert_int_eq(kv_model_warm_up(model, cache.views, &cache.table[16]), 0);
	step(&cache, prompt, N_PROMPT, logits);
	assert_same(logits);
	cache_deinit(&cache);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("engine/model");
	TCase *tests = tcase_create("tests");
	SRunner *runner;
	int n_failed;

	if (device_open(1, &dense) == 77) {
		printf("no such device here\n");
		return 77;
	}
	dense = kv_dense_close(dense);
	tcase_set_timeout(tests, 120);
	tcase_add_checked_fixture(tests, setup, teardown);
	tcase_add_loop_test(tests, a_prompt_in_chunks_gives_the_same_bits, 0, 4);
	tcase_add_test(tests, a_sequence_in_a_batch_gives_the_same_bits);
	tcase_add_loop_test(tests, the_number_of_threads_leaves_no_trace, 1, 5);
	tcase_add_test(tests, the_host_gives_nearly_the_same);
	tcase_add_loop_test(tests, every_kv_type_is_close_to_f32, 0, 2);
	tcase_add_test(tests, greedy_text_depends_on_the_prompt_and_does_not_loop);
	tcase_add_test(tests, a_step_that_is_too_large_is_refused);
	tcase_add_test(tests, warming_up_changes_nothing);
	suite_add_tcase(suite, tests);
	runner = srunner_create(suite);
	if (device_of_test == KV_DEVICE_CUDA) /* a CUDA context doesn't cross fork() */
		srunner_set_fork_status(runner, CK_NOFORK);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
