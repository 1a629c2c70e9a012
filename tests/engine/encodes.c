/* SPDX-License-Identifier: Apache-2.0 */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "tests/engine/encodes.h"

void assert_tokens(const struct kv_tokens *tokens, const int32_t *want, size_t n)
{
	for (size_t i = 0; i < n && i < tokens->n; i++)
		ck_assert_msg(tokens->at[i] == want[i], "token %zu is %d, not %d", i, tokens->at[i],
			      want[i]);
	ck_assert_uint_eq(tokens->n, n);
}

void assert_encodes(const struct kv_tokenizer *tokenizer, const char *text, bool special,
		    const int32_t *want, size_t n)
{
	struct kv_tokens tokens = {0};

	ck_assert_int_eq(kv_tokenizer_encode(tokenizer, text, strlen(text), special, &tokens), 0);
	assert_tokens(&tokens, want, n);
	kv_tokens_deinit(&tokens);
}

static void assert_comes_back(const struct kv_tokenizer *tokenizer, const char *text, size_t n)
{
	struct kv_tokens tokens = {0};
	char back[512];
	size_t at = 0;

	ck_assert_int_eq(kv_tokenizer_encode(tokenizer, text, n, false, &tokens), 0);
	for (size_t i = 0; i < tokens.n; i++) {
		struct kv_text piece = kv_tokenizer_piece(tokenizer, tokens.at[i]);

		ck_assert_uint_le(at + piece.len, n);
		memcpy(back + at, piece.at, piece.len);
		at += piece.len;
	}
	ck_assert_uint_eq(at, n);
	ck_assert_mem_eq(back, text, n);
	kv_tokens_deinit(&tokens);
}

void assert_texts_come_back(const struct kv_tokenizer *tokenizer, unsigned seed, const char *some)
{
	char text[500];

	srand(seed);
	for (int round = 0; round < 200; round++) {
		size_t n = (size_t)rand() % sizeof(text);

		for (size_t i = 0; i < n; i++)
			text[i] = (char)(some ? some[(size_t)rand() % strlen(some)] : rand());
		assert_comes_back(tokenizer, text, n);
	}
}
