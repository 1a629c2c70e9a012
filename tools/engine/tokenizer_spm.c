/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SentencePiece's BPE. A space is the character U+2581 in words. A text is its characters; of all
 * neighbours that together are a word those of the highest score are joined first. What is no word in the
 * end is written as its bytes.
 *
 * Byte tokens are no words: "<0x0A>" in a text is six characters.
 *
 * Source: SentencePiece, arXiv:1808.06226.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "tools/engine/error.h"
#include "tools/engine/tokenizer_parts.h"
#include "tools/engine/unicode.h"

#define SPACE	    "\342\226\201" /* U+2581 */
#define SPACE_BYTES 3

/* "<0x0A>": 10; else -1 */
static int byte_of_word(struct kv_text word)
{
	static const char digits[] = "0123456789ABCDEF";
	const char *high, *low;

	if (word.len != 6 || memcmp(word.at, "<0x", 3) || word.at[5] != '>')
		return -1;
	high = memchr(digits, word.at[3], 16);
	low = memchr(digits, word.at[4], 16);
	return high && low ? (int)(16 * (high - digits) + (low - digits)) : -1;
}

/* Spaces as words have them. Return: bytes written; at most SPACE_BYTES for each of @n. */
static size_t put_spaces(const char *s, size_t n, char *ret)
{
	char *at = ret;

	for (size_t i = 0; i < n; i++) {
		if (s[i] == ' ') {
			memcpy(at, SPACE, SPACE_BYTES);
			at += SPACE_BYTES;
		} else {
			*at++ = s[i];
		}
	}
	return at - ret;
}

/* The other way round */
static size_t take_spaces(struct kv_text word, char *ret)
{
	char *at = ret;

	for (size_t i = 0; i < word.len;) {
		if (word.len - i >= SPACE_BYTES && !memcmp(word.at + i, SPACE, SPACE_BYTES)) {
			*at++ = ' ';
			i += SPACE_BYTES;
		} else {
			*at++ = word.at[i++];
		}
	}
	return at - ret;
}

static int add_byte(struct kv_tokenizer *t, int32_t id, char *ret)
{
	int byte = byte_of_word(t->words[id]);

	if (byte < 0)
		return kv_engine_error(-EINVAL,
				       "tokenizer: token %d, %.*s, is said to be a byte, which are <0x00> "
				       "to <0xFF>",
				       id, (int)(t->words[id].len < 64 ? t->words[id].len : 64),
				       t->words[id].at);
	if (t->byte_ids[byte] < 0)
		t->byte_ids[byte] = id;
	*ret = byte;
	return 0;
}

static int read_words(struct kv_tokenizer *t, const struct kv_text *words)
{
	size_t n_bytes = 1;
	char *at;
	int r;

	for (size_t i = 0; i < t->n; i++)
		n_bytes += (1 + SPACE_BYTES) * words[i].len;
	at = t->bytes = malloc(n_bytes);
	if (!at)
		return -ENOMEM;

	memset(t->byte_ids, 0xff, sizeof(t->byte_ids));
	for (size_t i = 0; i < t->n; i++) {
		t->words[i] = (struct kv_text){at, put_spaces(words[i].at, words[i].len, at)};
		at += t->words[i].len;
		t->pieces[i].at = at;
		switch (t->types[i]) {
		case KV_TOKEN_CONTROL:
		case KV_TOKEN_UNKNOWN:
			continue;
		case KV_TOKEN_BYTE:
			r = add_byte(t, i, at);
			if (r < 0)
				return r;
			t->pieces[i].len = 1;
			break;
		default:
			t->pieces[i].len = take_spaces(t->words[i], at);
			if (t->types[i] != KV_TOKEN_USER)
				kv_tokenizer_add_word(t, i);
		}
		at += t->pieces[i].len;
	}

	for (int i = 0; i < 256; i++)
		if (t->byte_ids[i] < 0)
			return kv_engine_error(-ENOTSUP,
					       "tokenizer: the vocabulary has no <0x%02X>; those without "
					       "byte tokens aren't supported",
					       i);
	return 0;
}

static int read_flag(const struct kv_gguf *file, const char *key, uint32_t *ret)
{
	int r = kv_gguf_u32(file, key, ret);

	return r == -ENOENT ? 0 : r;
}

static int read_rules(struct kv_tokenizer *t, const struct kv_gguf *file)
{
	uint32_t prefix = 1, trimmed = 0;
	struct kv_text text;
	size_t n;
	int r;

	r = kv_gguf_f32s(file, "tokenizer.ggml.scores", &t->scores, &n);
	if (r < 0)
		return r;
	if (n != t->n)
		return kv_engine_error(-EINVAL, "tokenizer: %zu tokens but %zu scores", t->n, n);
	for (size_t i = 0; i < n; i++)
		if (isnan(t->scores[i]))
			return kv_engine_error(-EINVAL, "tokenizer: the score of token %zu is no number",
					       i);

	r = read_flag(file, "tokenizer.ggml.add_space_prefix", &prefix);
	if (r < 0)
		return r;
	t->space_prefix = prefix;
	r = read_flag(file, "tokenizer.ggml.remove_extra_whitespaces", &trimmed);
	if (r < 0)
		return r;
	if (trimmed || kv_gguf_text(file, "tokenizer.ggml.precompiled_charsmap", &text) != -ENOENT)
		return kv_engine_error(-ENOTSUP,
				       "tokenizer: models that change a text before they cut it "
				       "(remove_extra_whitespaces, precompiled_charsmap) aren't supported");
	return 0;
}

static int prepare(const struct kv_tokenizer *t, const char *s, size_t n, char **ret, size_t *ret_n)
{
	size_t room;
	char *at;

	if (__builtin_mul_overflow(n + 1, SPACE_BYTES, &room))
		return kv_engine_error(-EINVAL, "a text of %zu bytes", n);
	*ret = at = malloc(room);
	if (!at)
		return kv_engine_error(-ENOMEM, "no memory for a text of %zu bytes", n);
	if (t->space_prefix && n)
		at += put_spaces(" ", 1, at);
	*ret_n = at + put_spaces(s, n, at) - *ret;
	return 0;
}

static bool find_pair(const struct kv_tokenizer *t, const struct kv_symbol *left,
		      const struct kv_symbol *right, struct kv_joint *ret)
{
	int32_t id = kv_tokenizer_find(t, left->at, left->len + right->len);

	if (id < 0)
		return false;
	*ret = (struct kv_joint){-t->scores[id], id};
	return true;
}

static int push_bytes(const struct kv_tokenizer *t, const struct kv_symbol *symbol,
		      struct kv_tokens *tokens)
{
	int r;

	for (uint32_t i = 0; i < symbol->len; i++) {
		r = kv_tokens_push(tokens, t->byte_ids[(uint8_t)symbol->at[i]]);
		if (r < 0)
			return r;
	}
	return 0;
}

static int encode(const struct kv_tokenizer *t, struct kv_merging *m, const char *s, size_t n,
		  struct kv_tokens *tokens)
{
	size_t n_symbols = 0, used;
	uint32_t point;
	int r;

	if (!n)
		return 0;
	r = kv_merging_reserve(m, n);
	if (r < 0)
		return r;

	for (size_t i = 0; i < n; i += used) {
		used = kv_unicode_decode(s + i, n - i, &point);
		m->symbols[n_symbols++] = (struct kv_symbol){
			s + i, (uint32_t)used, kv_tokenizer_find(t, s + i, used), -1, -1};
	}
	kv_merging_run(t, m, n_symbols, find_pair);

	for (int32_t i = 0; i >= 0; i = m->symbols[i].next) {
		const struct kv_symbol *symbol = &m->symbols[i];

		r = symbol->id >= 0 ? kv_tokens_push(tokens, symbol->id)
				    : push_bytes(t, symbol, tokens);
		if (r < 0)
			return r;
	}
	return 0;
}

const struct kv_tokenizer_kind kv_tokenizer_spm = {
	.model = "llama",
	.add_bos = true,
	.user_always = true,
	.read_words = read_words,
	.read = read_rules,
	.prepare = prepare,
	.encode = encode,
};
