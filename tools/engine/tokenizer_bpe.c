/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Byte-level BPE. A hash table does the work: (left id, right id) -> (rank, id of the two joined).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "include/internal/cleanup.h"
#include "tools/engine/error.h"
#include "tools/engine/pattern.h"
#include "tools/engine/tokenizer_parts.h"
#include "tools/engine/unicode.h"

static size_t pair_place(const struct kv_tokenizer *t, int32_t left, int32_t right)
{
	uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
	size_t i = XXH3_64bits(&key, sizeof(key)) & t->merges_mask;

	while (t->merges[i].right >= 0 &&
	       (t->merges[i].left != left || t->merges[i].right != right))
		i = (i + 1) & t->merges_mask;
	return i;
}

static bool find_pair(const struct kv_tokenizer *t, const struct kv_symbol *left,
		      const struct kv_symbol *right, struct kv_joint *ret)
{
	const struct kv_merge *merge = &t->merges[pair_place(t, left->id, right->id)];

	if (merge->right < 0)
		return false;
	*ret = (struct kv_joint){merge->rank, merge->joined};
	return true;
}

/*
 * Vocabularies write bytes as printable characters: those of 33..126, 161..172 and 174..255 as
 * themselves, the others, in order, as 256, 257, ... Return: the byte, or -1.
 */
static int byte_of_point(uint32_t point)
{
	if ((point >= 33 && point <= 126) || (point >= 161 && point <= 172) ||
	    (point >= 174 && point <= 255))
		return point;
	if (point >= 256 && point < 256 + 33)
		return point - 256;
	if (point >= 289 && point < 289 + 34)
		return point - 289 + 127;
	return point == 323 ? 173 : -1;
}

/* The bytes a vocabulary's word stands for; a word that isn't written so stands for itself. */
static size_t decode_word(struct kv_text word, char *ret)
{
	size_t n = 0, used;
	uint32_t point;

	for (size_t i = 0; i < word.len; i += used) {
		int byte;

		used = kv_unicode_decode(word.at + i, word.len - i, &point);
		byte = byte_of_point(point);
		if (byte < 0) {
			memcpy(ret, word.at, word.len);
			return word.len;
		}
		ret[n++] = byte;
	}
	return n;
}

static int read_words(struct kv_tokenizer *t, const struct kv_text *words)
{
	size_t n_bytes = 0;
	char *at;

	for (size_t i = 0; i < t->n; i++)
		n_bytes += words[i].len;
	at = t->bytes = malloc(n_bytes + 1);
	if (!at)
		return -ENOMEM;

	for (size_t i = 0; i < t->n; i++) {
		struct kv_text *word = &t->words[i];

		word->at = at;
		if (t->types[i] == KV_TOKEN_CONTROL || t->types[i] == KV_TOKEN_USER) {
			memcpy(at, words[i].at, words[i].len);
			word->len = words[i].len;
		} else {
			word->len = decode_word(words[i], at);
		}
		at += word->len;
		t->pieces[i] = *word;
		kv_tokenizer_add_word(t, i);
	}

	for (int i = 0; i < 256; i++) {
		char byte = i;

		t->byte_ids[i] = kv_tokenizer_find(t, &byte, 1);
	}
	return 0;
}

/* "left right", both and the two joined in the vocabulary */
static int read_merge(struct kv_tokenizer *t, struct kv_text line, size_t rank, char *scratch)
{
	const char *space = line.len > 1 ? memchr(line.at + 1, ' ', line.len - 1) : NULL;
	int32_t left, right, joined;
	size_t n_left, n_right, place;

	if (!space)
		return kv_engine_error(-EINVAL, "tokenizer: merge %zu isn't \"left right\"", rank);

	n_left = decode_word((struct kv_text){line.at, space - line.at}, scratch);
	n_right = decode_word((struct kv_text){space + 1, line.at + line.len - space - 1},
			      scratch + n_left);
	left = kv_tokenizer_find(t, scratch, n_left);
	right = kv_tokenizer_find(t, scratch + n_left, n_right);
	joined = kv_tokenizer_find(t, scratch, n_left + n_right);
	if (left < 0 || right < 0 || joined < 0)
		return kv_engine_error(-EINVAL, "tokenizer: merge %zu isn't in the vocabulary",
				       rank);

	place = pair_place(t, left, right);
	if (t->merges[place].right < 0)
		t->merges[place] = (struct kv_merge){left, right, joined, rank};
	return 0;
}

static int read_merges(struct kv_tokenizer *t, const struct kv_gguf *file)
{
	kv_cleanup(kv_freep) struct kv_text *lines = NULL;
	kv_cleanup(kv_freep) char *scratch = NULL;
	size_t n, n_longest = 0;
	int r;

	r = kv_gguf_texts(file, "tokenizer.ggml.merges", &lines, &n);
	if (r < 0)
		return r;

	for (size_t i = 0; i < n; i++)
		n_longest = lines[i].len > n_longest ? lines[i].len : n_longest;
	t->merges_mask = kv_tokenizer_table_mask(n);
	t->merges = malloc((t->merges_mask + 1) * sizeof(*t->merges));
	scratch = malloc(n_longest + 1);
	if (!t->merges || !scratch)
		return -ENOMEM;

	memset(t->merges, 0xff, (t->merges_mask + 1) * sizeof(*t->merges));
	for (size_t i = 0; i < n; i++) {
		r = read_merge(t, lines[i], i, scratch);
		if (r < 0)
			return r;
	}
	return 0;
}

static bool text_is(struct kv_text text, const char *s)
{
	return text.len == strlen(s) && !memcmp(text.at, s, text.len);
}

static int read_rules(struct kv_tokenizer *t, const struct kv_gguf *file)
{
	struct kv_text text;
	int r;

	r = read_merges(t, file);
	if (r < 0)
		return r;
	r = kv_gguf_text(file, "tokenizer.ggml.pre", &text);
	if (r < 0)
		return r;
	t->digits_alone = text_is(text, "smollm");
	if (!t->digits_alone && !text_is(text, "gpt-2"))
		return kv_engine_error(-ENOTSUP,
				       "tokenizer: pre-tokenizer %.*s, smollm and gpt-2 are "
				       "supported",
				       (int)(text.len < 64 ? text.len : 64), text.at);
	return 0;
}

static int encode_piece(const struct kv_tokenizer *t, struct kv_merging *m, const char *s, size_t len,
			struct kv_tokens *tokens)
{
	size_t n = 0;
	int r;

	r = kv_merging_reserve(m, len);
	if (r < 0)
		return r;

	/* A byte that the vocabulary lacks is dropped, as the model never saw it. */
	for (size_t i = 0; i < len; i++) {
		int32_t id = t->byte_ids[(uint8_t)s[i]];

		if (id >= 0)
			m->symbols[n++] = (struct kv_symbol){s + i, 1, id, -1, -1};
	}
	if (!n)
		return 0;

	kv_merging_run(t, m, n, find_pair);
	for (int32_t i = 0; i >= 0; i = m->symbols[i].next) {
		r = kv_tokens_push(tokens, m->symbols[i].id);
		if (r < 0)
			return r;
	}
	return 0;
}

static int encode_text(const struct kv_tokenizer *t, struct kv_merging *m, const char *s, size_t n,
		       struct kv_tokens *tokens)
{
	size_t part, len;
	int r;

	while (n) {
		/* A digit is a piece of its own: the pattern sees what comes before it alone. */
		part = t->digits_alone ? kv_pattern_digit_part(s, n) : n;
		n -= part;
		for (size_t done = 0; done < part; done += len, s += len) {
			len = kv_pattern_gpt2_piece(s, part - done);
			r = encode_piece(t, m, s, len, tokens);
			if (r < 0)
				return r;
		}
	}
	return 0;
}

const struct kv_tokenizer_kind kv_tokenizer_bpe = {
	.model = "gpt2",
	.read_words = read_words,
	.read = read_rules,
	.encode = encode_text,
};
