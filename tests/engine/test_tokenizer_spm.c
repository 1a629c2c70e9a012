/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A vocabulary made by hand shows the rules one by one; the ids of Gemma 3, where its file is there,
 * come from the package sentencepiece (golden_tokens.py).
 */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/engine/encodes.h"
#include "tests/engine/golden_tokens.h"
#include "tests/engine/image.h"
#include "tools/engine/error.h"

#define SPACE "\342\226\201" /* U+2581 */

enum { PAD, BOS, EOS, UNK, TURN, SPACES_2, SPACES_3, LINE, TAG, BYTES };
enum { A = BYTES + 256, B, C, AB, BC, CC, SPACE_1, SPACE_A, E_ACUTE, ABC, N_WORDS };

static const struct {
	const char *word;
	float score;
	int32_t type;
} words[] = {
	[PAD] = {"<pad>", 0, 3},
	[BOS] = {"<bos>", 0, 3},
	[EOS] = {"<eos>", 0, 3},
	[UNK] = {"<unk>", 0, 2},
	[TURN] = {"<end_of_turn>", 0, 3},
	[SPACES_2] = {"  ", 0, 4},
	[SPACES_3] = {"   ", 0, 4},
	[LINE] = {"\n", 0, 4},
	[TAG] = {"<b>", 0, 4},
	[A] = {"a", -20, 1},
	[B] = {"b", -21, 1},
	[C] = {"c", -22, 1},
	[AB] = {"ab", -2, 1},
	[BC] = {"bc", -1, 1},
	[CC] = {"cc", -3, 1},
	[SPACE_1] = {SPACE, -23, 1},
	[SPACE_A] = {SPACE "a", -4, 1},
	[E_ACUTE] = {"\303\251", -24, 1},
	[ABC] = {"abc", -5, 1},
};

/* What a case changes of the sound file */
struct change {
	int word; /* whose text, type or score is another; 0: none */
	const char *text;
	int32_t type;
	float score;
	int prefix;	    /* add_space_prefix */
	int n_scores;	    /* 0: one for each token */
	const char *more;   /* a flag that is set, or a text */
	const char *template;
};

static struct kv_gguf *file;
static struct kv_tokenizer *tokenizer;

static int make(const struct change *change)
{
	static char bytes[256][8];
	const char *texts[N_WORDS];
	int32_t types[N_WORDS];
	float scores[N_WORDS];
	struct image image = {0};
	const char *more = change->more ? change->more : "none";

	for (int i = 0; i < N_WORDS; i++) {
		int byte = i - BYTES;

		if (byte >= 0 && byte < 256) {
			snprintf(bytes[byte], sizeof(bytes[byte]), "<0x%02X>", byte);
			texts[i] = bytes[byte];
			types[i] = 6;
			scores[i] = 0;
		} else {
			texts[i] = words[i].word;
			types[i] = words[i].type;
			scores[i] = words[i].score;
		}
	}
	if (change->word) {
		texts[change->word] = change->text ? change->text : texts[change->word];
		types[change->word] = change->type;
		scores[change->word] = change->score;
	}
	image_header(&image, 3, 0, 8);
	image_pair_text(&image, "tokenizer.ggml.model", "llama");
	image_pair_texts(&image, "tokenizer.ggml.tokens", texts, N_WORDS);
	image_pair_i32s(&image, "tokenizer.ggml.token_type", types, N_WORDS);
	image_pair_f32s(&image, "tokenizer.ggml.scores", scores,
			change->n_scores ? change->n_scores : N_WORDS);
	image_pair_u32(&image, "tokenizer.ggml.add_space_prefix", change->prefix);
	image_pair_u32(&image, "tokenizer.ggml.bos_token_id", BOS);
	image_pair_text(&image, "tokenizer.chat_template", change->template ? change->template : "");
	if (strstr(more, "charsmap"))
		image_pair_text(&image, more, "x");
	else
		image_pair_u32(&image, more, 1);
	ck_assert_int_eq(image_open(&image, &file), 0);
	return kv_tokenizer_new(file, &tokenizer);
}

static void setup_change(const struct change *change)
{
	ck_assert_msg(make(change) == 0, "%s", kv_engine_error_text());
}

static void setup(void)
{
	setup_change(&(struct change){0});
}

static void teardown(void)
{
	tokenizer = kv_tokenizer_free(tokenizer);
	file = kv_gguf_free(file);
}

#define BYTE(x) (BYTES + (x))

START_TEST(the_highest_score_is_joined_first)
{
	teardown();
	setup_change(&(struct change){.word = ABC, .text = "xx", .type = 1, .score = -1});
	ASSERT_ENCODES("abc", false, A, BC);
	ASSERT_ENCODES("ab", false, AB);
	ASSERT_ENCODES("ccc", false, CC, C); /* the leftmost of equals */
	ASSERT_ENCODES("abcc", false, A, BC, C);
	ASSERT_ENCODES("aab", false, A, AB);
}
END_TEST

START_TEST(a_join_makes_others_possible)
{
	ASSERT_ENCODES("abc", false, ABC); /* of a and bc */
	ASSERT_ENCODES("aabcc", false, A, ABC, C);
	teardown();
	setup_change(&(struct change){.word = BC, .text = "xx", .type = 1, .score = -1});
	ASSERT_ENCODES("abc", false, ABC); /* of ab and c */
	ASSERT_ENCODES("abcabc", false, ABC, ABC);
}
END_TEST

START_TEST(a_space_belongs_to_the_word_behind_it)
{
	ASSERT_ENCODES("b a", false, B, SPACE_A);
	ASSERT_ENCODES(" b", false, SPACE_1, B);
	ASSERT_ENCODES(SPACE "a", false, SPACE_A); /* the sign for it is taken for one */
	ck_assert_uint_eq(kv_tokenizer_piece(tokenizer, SPACE_A).len, 2);
	ck_assert_mem_eq(kv_tokenizer_piece(tokenizer, SPACE_A).at, " a", 2);
}
END_TEST

START_TEST(what_is_no_word_becomes_bytes)
{
	ASSERT_ENCODES("x", false, BYTE('x'));
	ASSERT_ENCODES("a\303\251", false, A, E_ACUTE);
	ASSERT_ENCODES("\303\250", false, BYTE(0xc3), BYTE(0xa8));
	ASSERT_ENCODES("\360\237\230\200", false, BYTE(0xf0), BYTE(0x9f), BYTE(0x98), BYTE(0x80));
	ASSERT_ENCODES("\303", false, BYTE(0xc3)); /* no UTF-8 */
	ck_assert_uint_eq(kv_tokenizer_piece(tokenizer, BYTE(0xc3)).len, 1);
	ck_assert_mem_eq(kv_tokenizer_piece(tokenizer, BYTE(0xc3)).at, "\303", 1);
}
END_TEST

START_TEST(a_byte_token_is_no_word)
{
	ASSERT_ENCODES("<0x0A>", true, BYTE('<'), BYTE('0'), BYTE('x'), BYTE('0'), BYTE('A'),
		       BYTE('>'));
}
END_TEST

START_TEST(tokens_of_the_user_are_always_found_control_tokens_where_they_are_wanted)
{
	ASSERT_ENCODES("a\nb", false, A, LINE, B);
	ASSERT_ENCODES("a   b", false, A, SPACES_3, B); /* the longest */
	ASSERT_ENCODES("     a", false, SPACES_3, SPACES_2, A);
	ASSERT_ENCODES("    a", false, SPACES_3, SPACE_A);
	ASSERT_ENCODES("<b>a", false, TAG, A);
	ASSERT_ENCODES("a<bos>", true, A, BOS);
	ASSERT_ENCODES("<bos>", false, BYTE('<'), B, BYTE('o'), BYTE('s'), BYTE('>'));
	ASSERT_ENCODES("<bos", true, BYTE('<'), B, BYTE('o'), BYTE('s'));
	ck_assert_uint_eq(kv_tokenizer_piece(tokenizer, BOS).len, 0);
	ck_assert_uint_eq(kv_tokenizer_piece(tokenizer, UNK).len, 0);
	ck_assert_mem_eq(kv_tokenizer_piece(tokenizer, SPACES_3).at, "   ", 3);
	ck_assert_uint_eq(kv_tokenizer_piece(tokenizer, SPACES_3).len, 3);
}
END_TEST

START_TEST(a_text_begins_with_a_space_where_the_model_wants_it)
{
	assert_encodes(tokenizer, "", false, NULL, 0);
	ASSERT_ENCODES("a", false, A);
	teardown();
	setup_change(&(struct change){.prefix = 1});
	ASSERT_ENCODES("a", false, SPACE_A);
	assert_encodes(tokenizer, "", false, NULL, 0);
}
END_TEST

START_TEST(a_prompt_begins_with_bos_and_turns_are_those_of_the_template)
{
	struct kv_tokens tokens = {0};

	ck_assert_int_eq(kv_tokenizer_prompt(tokenizer, "ab", 2, true, &tokens), -ENOTSUP);
	tokens.n = 0;
	ck_assert_int_eq(kv_tokenizer_prompt(tokenizer, "ab", 2, false, &tokens), 0);
	assert_tokens(&tokens, (const int32_t[]){BOS, AB}, 2);
	teardown();
	setup_change(&(struct change){.template = "{{ '<start_of_turn>' + role }}"});
	tokens.n = 0;
	ck_assert_int_eq(kv_tokenizer_prompt(tokenizer, "ab<end_of_turn>", 15, true, &tokens), 0);
	ck_assert_int_eq(tokens.at[0], BOS);
	/* <start_of_turn> is no token of this vocabulary; the one end is the template's. */
	for (size_t i = 0, n = 0; i < tokens.n; i++) {
		n += tokens.at[i] == TURN;
		ck_assert_uint_le(n, 1);
		ck_assert(n || i + 1 < tokens.n);
	}
	ck_assert(kv_tokenizer_is_end(tokenizer, TURN));
	ck_assert(!kv_tokenizer_is_end(tokenizer, A));
	kv_tokens_deinit(&tokens);
}
END_TEST

START_TEST(every_text_comes_back)
{
	/* Any bytes at all, and runs of what the words are about */
	assert_texts_come_back(tokenizer, (unsigned)_i,
			       _i < 2 ? NULL : "abc  \n<b>\303\251x\342\202\254\342");
}
END_TEST

START_TEST(a_text_of_a_million_letters_takes_no_age)
{
	size_t n = 1000000;
	char *text = malloc(n);
	struct kv_tokens tokens = {0};

	memset(text, 'c', n);
	ck_assert_int_eq(kv_tokenizer_encode(tokenizer, text, n, true, &tokens), 0);
	ck_assert_uint_eq(tokens.n, n / 2);
	tokens.n = 0;
	for (size_t i = 0; i < n; i++)
		text[i] = "a <b "[i % 5];
	ck_assert_int_eq(kv_tokenizer_encode(tokenizer, text, n, true, &tokens), 0);
	kv_tokens_deinit(&tokens);
	free(text);
}
END_TEST

START_TEST(a_broken_vocabulary_is_refused)
{
	static const struct {
		struct change change;
		int r;
		const char *text;
	} cases[] = {
		{{.word = BYTE(65), .text = "x", .type = 1}, -ENOTSUP, "no <0x41>"},
		{{.word = BYTE(65), .text = "<0x4g>", .type = 6}, -EINVAL, "<0x4g>, is said to be a byte"},
		{{.word = BYTE(65), .text = "<0x40>", .type = 6}, -ENOTSUP, "no <0x41>"},
		{{.word = A, .type = 1, .score = NAN}, -EINVAL, "no number"},
		{{.n_scores = 7}, -EINVAL, "7 scores"},
		{{.more = "tokenizer.ggml.remove_extra_whitespaces"}, -ENOTSUP, "remove_extra_whitespaces"},
		{{.more = "tokenizer.ggml.precompiled_charsmap"}, -ENOTSUP, "precompiled_charsmap"},
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		teardown();
		ck_assert_int_eq(make(&cases[i].change), cases[i].r);
		ck_assert_msg(strstr(kv_engine_error_text(), cases[i].text), "%s",
			      kv_engine_error_text());
	}
}
END_TEST

static void setup_real(void)
{
	ck_assert_int_eq(kv_gguf_open(getenv("KV_TEST_GEMMA"), &file), 0);
	ck_assert_msg(kv_tokenizer_new(file, &tokenizer) == 0, "%s", kv_engine_error_text());
}

START_TEST(gemma_3_has_the_ids_that_sentencepiece_gives)
{
	size_t n_texts = sizeof(golden_tokens) / sizeof(golden_tokens[0]);

	ck_assert_uint_ge(n_texts, 50);
	for (size_t t = 0; t < n_texts; t++) {
		const struct golden_tokens *want = &golden_tokens[t];
		struct kv_tokens got = {0};

		ck_assert_int_eq(kv_tokenizer_encode(tokenizer, want->text, strlen(want->text),
						     false, &got),
				 0);
		for (size_t i = 0; i < want->n && i < got.n; i++)
			ck_assert_msg(got.at[i] == want->ids[i], "%s: token %zu is %d, not %d",
				      want->text, i, got.at[i], want->ids[i]);
		ck_assert_msg(got.n == want->n, "%s: %zu tokens, not %zu", want->text, got.n, want->n);
		kv_tokens_deinit(&got);
	}
}
END_TEST

START_TEST(gemma_3_knows_its_control_tokens)
{
	struct kv_tokens tokens = {0};

	ASSERT_ENCODES("<start_of_turn>user\n", true, 105, 2364, 107);
	ck_assert_int_eq(kv_tokenizer_prompt(tokenizer, "Hello world", 11, false, &tokens), 0);
	assert_tokens(&tokens, (const int32_t[]){2, 9259, 1902}, 3);
	ck_assert(kv_tokenizer_is_end(tokenizer, 1));
	ck_assert(kv_tokenizer_is_end(tokenizer, 106));
	kv_tokens_deinit(&tokens);
}
END_TEST

int main(void)
{
	const char *model = getenv("KV_TEST_GEMMA");
	Suite *suite = suite_create("engine/tokenizer_spm");
	TCase *tests = tcase_create("by hand"), *real;
	SRunner *runner;
	int n_failed;

	tcase_set_timeout(tests, 120);
	tcase_add_checked_fixture(tests, setup, teardown);
	tcase_add_test(tests, the_highest_score_is_joined_first);
	tcase_add_test(tests, a_join_makes_others_possible);
	tcase_add_test(tests, a_space_belongs_to_the_word_behind_it);
	tcase_add_test(tests, what_is_no_word_becomes_bytes);
	tcase_add_test(tests, a_byte_token_is_no_word);
	tcase_add_test(tests, tokens_of_the_user_are_always_found_control_tokens_where_they_are_wanted);
	tcase_add_test(tests, a_text_begins_with_a_space_where_the_model_wants_it);
	tcase_add_test(tests, a_prompt_begins_with_bos_and_turns_are_those_of_the_template);
	tcase_add_loop_test(tests, every_text_comes_back, 0, 4);
	tcase_add_test(tests, a_text_of_a_million_letters_takes_no_age);
	tcase_add_test(tests, a_broken_vocabulary_is_refused);
	suite_add_tcase(suite, tests);
	if (model && !access(model, R_OK)) {
		real = tcase_create("Gemma 3");
		tcase_set_timeout(real, 120);
		tcase_add_checked_fixture(real, setup_real, teardown);
		tcase_add_test(real, gemma_3_has_the_ids_that_sentencepiece_gives);
		tcase_add_test(real, gemma_3_knows_its_control_tokens);
		suite_add_tcase(suite, real);
	} else {
		printf("Gemma 3's own ids aren't tested: no model file\n");
	}
	runner = srunner_create(suite);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}
