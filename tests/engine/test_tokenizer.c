/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A vocabulary made by hand shows the rules one by one; the ids of SmolLM2, where its file is
 * there, come from an independent implementation (the Python package tokenizers, on the same
 * vocabulary and merges).
 */
#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/engine/encodes.h"
#include "tests/engine/image.h"
#include "tools/engine/error.h"
#include "tools/engine/tiny.h"

#define FIRST_WORD 256 /* ids below are bytes */

static const char *const words[] = {
	"he",
	"ll",
	"hell",
	"hello",
	"\304\240w", /* " w" */
	"\304\240\304\240",
	"<|end|>",
	"<|end|>er",
	"1\304\2401",
};
static const char *const merges[] = {
	"l l", "h e", "he ll", "hell o", "\304\240 w", "\304\240 \304\240",
};
enum { HE = FIRST_WORD, LL, HELL, HELLO, SPACE_W, SPACES, END, ENDER };

static struct kv_gguf *file;
static struct kv_tokenizer *tokenizer;

/* The 256 bytes as vocabularies write them */
static void byte_word(int byte, char ret[3])
{
	static const char *const ranges = "!~\241\254\256\377";
	int next = 256, point = -1;

	for (int b = 0; b <= byte; b++) {
		bool plain = false;

		for (int i = 0; i < 6; i += 2)
			plain |= b >= (uint8_t)ranges[i] && b <= (uint8_t)ranges[i + 1];
		point = plain ? b : next++;
	}
	if (point < 0x80)
		snprintf(ret, 3, "%c", point);
	else
		snprintf(ret, 3, "%c%c", 0xc0 | point >> 6, 0x80 | (point & 0x3f));
}

static int make(const char *pre, const char *const *lines, size_t n_lines, const char *template)
{
	enum { N = FIRST_WORD + sizeof(words) / sizeof(words[0]) };
	static char bytes[256][3];
	const char *all[N];
	int32_t types[N];
	struct image image = {0};

	for (int i = 0; i < 256; i++) {
		byte_word(i, bytes[i]);
		all[i] = bytes[i];
	}
	for (int i = 0; i < N; i++) {
		if (i >= FIRST_WORD)
			all[i] = words[i - FIRST_WORD];
		types[i] = i == END || i == ENDER ? 3 : 1;
	}
	image_header(&image, 3, 0, 6);
	image_pair_text(&image, "tokenizer.ggml.model", "gpt2");
	image_pair_text(&image, "tokenizer.ggml.pre", pre);
	image_pair_texts(&image, "tokenizer.ggml.tokens", all, N);
	image_pair_i32s(&image, "tokenizer.ggml.token_type", types, N);
	image_pair_texts(&image, "tokenizer.ggml.merges", lines, n_lines);
	image_pair_text(&image, "tokenizer.chat_template", template);
	ck_assert_int_eq(image_open(&image, &file), 0);
	return kv_tokenizer_new(file, &tokenizer);
}

static void setup_pre(const char *pre, const char *template)
{
	ck_assert_msg(make(pre, merges, 6, template) == 0, "%s", kv_engine_error_text());
}

static void teardown(void)
{
	tokenizer = kv_tokenizer_free(tokenizer);
	file = kv_gguf_free(file);
}

START_TEST(merges_go_by_rank)
{
	setup_pre("gpt-2", "");
	ASSERT_ENCODES("hello", false, HELLO);
	ASSERT_ENCODES("hell", false, HELL);
	ASSERT_ENCODES("hel", false, HE, 'l');
	ASSERT_ENCODES("lll", false, LL, 'l'); /* the leftmost of equals */
	ASSERT_ENCODES("hlle", false, 'h', LL, 'e');
	ASSERT_ENCODES("x wx", false, 'x', SPACE_W, 'x');
	teardown();
}
END_TEST

START_TEST(pieces_are_merged_apart)
{
	setup_pre("gpt-2", "");
	/* The last space belongs to the word behind it. */
	ASSERT_ENCODES("   w", false, SPACES, SPACE_W);
	ASSERT_ENCODES("   1", false, SPACES, ' ', '1');
	ASSERT_ENCODES("a   ", false, 'a', SPACES, ' ');
	ASSERT_ENCODES("he'll", false, HE, '\'', LL);
	ASSERT_ENCODES("he-ll", false, HE, '-', LL);
	ASSERT_ENCODES("he1ll", false, HE, '1', LL);
	teardown();
}
END_TEST

START_TEST(a_digit_stands_alone_where_the_model_wants_it)
{
	/* After a cut the spaces stand at the end of their part: all of them are one piece. */
	setup_pre("smollm", "");
	ASSERT_ENCODES("  1", false, SPACES, '1');
	ASSERT_ENCODES("12", false, '1', '2');
	teardown();
	setup_pre("gpt-2", "");
	ASSERT_ENCODES("  1", false, ' ', ' ', '1');
	teardown();
}
END_TEST

START_TEST(special_tokens_are_found_only_where_they_are_wanted)
{
	setup_pre("smollm", "");
	ASSERT_ENCODES("he<|end|>ll", true, HE, END, LL);
	ASSERT_ENCODES("<|end|>er", true, ENDER); /* the longest */
	ASSERT_ENCODES("<|end|", true, '<', '|', 'e', 'n', 'd', '|');
	ASSERT_ENCODES("<|end|>", false, '<', '|', 'e', 'n', 'd', '|', '>');
	ck_assert_uint_eq(kv_tokenizer_piece(tokenizer, END).len, 0);
	ck_assert(!kv_tokenizer_is_end(tokenizer, END));
	teardown();
}
END_TEST

START_TEST(every_text_comes_back)
{
	/* Any bytes at all, and runs of what the merges are about */
	setup_pre(_i % 2 ? "smollm" : "gpt-2", "");
	assert_texts_come_back(tokenizer, (unsigned)_i,
			       _i < 2 ? NULL : "hello w 123 \n\t'llx\303\274\346\227\245");
	teardown();
}
END_TEST

START_TEST(a_piece_of_a_million_letters_takes_no_age)
{
	size_t n = 1000000;
	char *text = malloc(n);
	struct kv_tokens tokens = {0};

	setup_pre("smollm", "");
	memset(text, 'l', n);
	ck_assert_int_eq(kv_tokenizer_encode(tokenizer, text, n, true, &tokens), 0);
	ck_assert_uint_eq(tokens.n, n / 2);
	kv_tokens_deinit(&tokens);
	free(text);
	teardown();
}
END_TEST

START_TEST(a_model_without_a_chat_template_has_no_chat)
{
	struct kv_tokens tokens = {0};

	setup_pre("smollm", "{{ messages }}");
	ck_assert_int_eq(kv_tokenizer_prompt(tokenizer, "hello", 5, true, &tokens), -ENOTSUP);
	ck_assert_int_eq(kv_tokenizer_prompt(tokenizer, "hello", 5, false, &tokens), 0);
	assert_tokens(&tokens, (const int32_t[]){HELLO}, 1);
	kv_tokens_deinit(&tokens);
	teardown();
}
END_TEST

START_TEST(a_broken_tokenizer_is_refused)
{
	static const struct {
		const char *pre;
		const char *merge;
		int r;
		const char *text;
	} cases[] = {
		{"llama-bpe", "l l", -ENOTSUP, "pre-tokenizer llama-bpe"},
		{"smollm", "ll", -EINVAL, "merge 0"},
		{"smollm", "l x", -EINVAL, "isn't in the vocabulary"},
		{"smollm", "", -EINVAL, "merge 0"},
	};

	for (size_t i = 0; i < 4; i++) {
		ck_assert_int_eq(make(cases[i].pre, &cases[i].merge, 1, ""), cases[i].r);
		ck_assert_ptr_nonnull(strstr(kv_engine_error_text(), cases[i].text));
		teardown();
	}
}
END_TEST

START_TEST(the_tiny_model_takes_bytes)
{
	ck_assert_int_eq(kv_tiny_new("tiny", &file), 0);
	ck_assert_int_eq(kv_tokenizer_new(file, &tokenizer), 0);
	ASSERT_ENCODES("a 1\n\303", true, 'a', ' ', '1', '\n', 0xc3);
	ck_assert_mem_eq(kv_tokenizer_piece(tokenizer, 0xc3).at, "\303", 1);
	ck_assert_uint_eq(kv_tokenizer_piece(tokenizer, 256).len, 0);
	ck_assert_uint_eq(kv_tokenizer_piece(tokenizer, -1).len, 0);
	teardown();
}
END_TEST

static const struct {
	const char *text;
	int32_t ids[24];
	size_t n;
} known[] = {
	{"Hello world", {19556, 905}, 2},
	{"Hello, world! It's 2024, isn't it?",
	 {19556, 28, 905, 17, 657, 506, 216, 34, 32, 34, 36, 28, 3247, 982, 357, 47},
	 16},
	{"  two  spaces   three\n\n\tend  ",
	 {216, 827, 216, 5600, 256, 1296, 1116, 197, 486, 256},
	 10},
	{"\303\274ber na\303\257ve caf\303\251 \346\227\245\346\234\254\350\252\236 "
	 "\360\237\230\200",
	 {7170, 593, 15486, 46494, 37366, 17097, 241, 115, 40993, 179, 120, 248, 40303, 218},
	 14},
	{"x=3.14159; y[10]+=0x7f",
	 {104, 45, 35, 30, 33, 36, 33, 37, 41, 43, 329, 75, 33, 32, 18132, 45, 32, 104, 39, 86},
	 20},
	{"<|im_start|>user\nHi<|im_end|>\n", {1, 4093, 198, 26843, 2, 198}, 6},
	{"we'll they've I'm you'd DON'T",
	 {677, 3060, 502, 3543, 339, 5248, 346, 6737, 422, 2154, 23, 68},
	 12},
	{"a\302\240b\343\200\200c \331\243\302\275",
	 {81, 15442, 82, 12109, 218, 83, 216, 164, 113, 16738},
	 10},
};

static void setup_real(void)
{
	ck_assert_int_eq(kv_gguf_open(getenv("KV_TEST_MODEL"), &file), 0);
	ck_assert_int_eq(kv_tokenizer_new(file, &tokenizer), 0);
}

START_TEST(smollm2_has_the_known_ids)
{
	assert_encodes(tokenizer, known[_i].text, true, known[_i].ids, known[_i].n);
}
END_TEST

START_TEST(smollm2_chats_by_its_template)
{
	static const char whole[] =
		"<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
		"Hugging Face<|im_end|>\n<|im_start|>user\nWho are you?<|im_end|>\n"
		"<|im_start|>assistant\n";
	struct kv_tokens want = {0}, got = {0};

	ck_assert_int_eq(kv_tokenizer_encode(tokenizer, whole, strlen(whole), true, &want), 0);
	ck_assert_int_eq(kv_tokenizer_prompt(tokenizer, "Who are you?", 12, true, &got), 0);
	assert_tokens(&got, want.at, want.n);
	ck_assert_int_eq(got.at[0], 1);
	ck_assert(kv_tokenizer_is_end(tokenizer, 2));

	/* A user's text can't end the user's turn. */
	got.n = 0;
	ck_assert_int_eq(kv_tokenizer_prompt(tokenizer, "<|im_end|>", 10, true, &got), 0);
	for (size_t i = 26; i < got.n - 6; i++)
		ck_assert_int_gt(got.at[i], 16);
	kv_tokens_deinit(&want);
	kv_tokens_deinit(&got);
}
END_TEST

int main(void)
{
	const char *model = getenv("KV_TEST_MODEL");
	Suite *suite = suite_create("engine/tokenizer");
	TCase *tests = tcase_create("by hand"), *real;
	SRunner *runner;
	int n_failed;

	tcase_set_timeout(tests, 120);
	tcase_add_test(tests, merges_go_by_rank);
	tcase_add_test(tests, pieces_are_merged_apart);
	tcase_add_test(tests, a_digit_stands_alone_where_the_model_wants_it);
	tcase_add_test(tests, special_tokens_are_found_only_where_they_are_wanted);
	tcase_add_loop_test(tests, every_text_comes_back, 0, 4);
	tcase_add_test(tests, a_piece_of_a_million_letters_takes_no_age);
	tcase_add_test(tests, a_model_without_a_chat_template_has_no_chat);
	tcase_add_test(tests, a_broken_tokenizer_is_refused);
	tcase_add_test(tests, the_tiny_model_takes_bytes);
	suite_add_tcase(suite, tests);
	if (model && !access(model, R_OK)) {
		real = tcase_create("SmolLM2");
		tcase_set_timeout(real, 120);
		tcase_add_checked_fixture(real, setup_real, teardown);
		tcase_add_loop_test(real, smollm2_has_the_known_ids, 0,
				    sizeof(known) / sizeof(known[0]));
		tcase_add_test(real, smollm2_chats_by_its_template);
		suite_add_tcase(suite, real);
	} else {
		printf("SmolLM2's own ids aren't tested: no model file\n");
	}
	runner = srunner_create(suite);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
