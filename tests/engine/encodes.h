/* SPDX-License-Identifier: Apache-2.0 */
/* What a tokenizer makes of a text; each fails the test where it is something else. */
#ifndef KV_TESTS_ENCODES_H
#define KV_TESTS_ENCODES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tools/engine/tokenizer.h"

void assert_tokens(const struct kv_tokens *tokens, const int32_t *want, size_t n);

/* @special: control tokens are found in the text */
void assert_encodes(const struct kv_tokenizer *tokenizer, const char *text, bool special,
		    const int32_t *want, size_t n);

/* The test's own `tokenizer`; the tokens one by one. */
#define ASSERT_ENCODES(text, special, ...)                                       \
	assert_encodes(tokenizer, text, special, (const int32_t[]){__VA_ARGS__}, \
		       sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t))

/* 200 texts, drawn from the bytes of @some, or of any bytes if it is NULL, come back byte for byte. */
void assert_texts_come_back(const struct kv_tokenizer *tokenizer, unsigned seed, const char *some);

#endif
