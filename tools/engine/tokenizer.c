/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vocabulary is a hash table from words to ids. Special tokens lie in the order of their words, so that those
 * that agree with a text are a range, which each further byte narrows.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "include/internal/cleanup.h"
#include "tools/engine/error.h"
#include "tools/engine/tokenizer_parts.h"

static const struct kv_tokenizer_kind *const kinds[] = {&kv_tokenizer_bpe, &kv_tokenizer_spm};

#define N_OF(table) (sizeof(table) / sizeof((table)[0]))

int kv_tokens_push(struct kv_tokens *tokens, int32_t token)
{
	if (tokens->n == tokens->n_max) {
		size_t n_max = tokens->n_max ? 2 * tokens->n_max : 64;
		int32_t *at = realloc(tokens->at, n_max * sizeof(*at));

		if (!at)
			return kv_engine_error(-ENOMEM, "no memory for %zu tokens", n_max);
		tokens->at = at;
		tokens->n_max = n_max;
	}
	tokens->at[tokens->n++] = token;
	return 0;
}

void kv_tokens_deinit(struct kv_tokens *tokens)
{
	free(tokens->at);
	*tokens = (struct kv_tokens){0};
}

size_t kv_tokenizer_table_mask(size_t n)
{
	size_t size = 16;

	while (size < 2 * n)
		size *= 2;
	return size - 1;
}

static size_t word_place(const struct kv_tokenizer *t, const char *s, size_t len)
{
	size_t i = XXH3_64bits(s, len) & t->ids_mask;

	for (; t->ids[i] >= 0; i = (i + 1) & t->ids_mask) {
		const struct kv_text *word = &t->words[t->ids[i]];

		if (word->len == len && !memcmp(word->at, s, len))
			break;
	}
	return i;
}

int32_t kv_tokenizer_find(const struct kv_tokenizer *t, const char *s, size_t len)
{
	return t->ids[word_place(t, s, len)];
}

void kv_tokenizer_add_word(struct kv_tokenizer *t, int32_t id)
{
	size_t place = word_place(t, t->words[id].at, t->words[id].len);

	if (t->ids[place] < 0)
		t->ids[place] = id;
}

static bool is_special(const struct kv_tokenizer *t, size_t id)
{
	return (t->types[id] == KV_TOKEN_CONTROL || t->types[id] == KV_TOKEN_USER) && t->words[id].len;
}

static int by_word(const void *a, const void *b, void *context)
{
	const struct kv_tokenizer *t = context;
	int32_t id_a = *(const int32_t *)a, id_b = *(const int32_t *)b;
	const struct kv_text *x = &t->words[id_a], *y = &t->words[id_b];
	int order = memcmp(x->at, y->at, x->len < y->len ? x->len : y->len);

	if (order)
		return order;
	if (x->len != y->len)
		return x->len < y->len ? -1 : 1;
	return id_a < id_b ? -1 : 1;
}

static int sort_special(struct kv_tokenizer *t)
{
	size_t at = 0;

	for (size_t i = 0; i < t->n; i++)
		t->n_special += is_special(t, i);
	t->special = calloc(t->n_special + 1, sizeof(*t->special));
	if (!t->special)
		return -ENOMEM;

	for (size_t i = 0; i < t->n; i++)
		if (is_special(t, i))
			t->special[at++] = i;
	qsort_r(t->special, t->n_special, sizeof(*t->special), by_word, t);
	at = 0;
	for (size_t byte = 0; byte < 257; byte++) {
		while (at < t->n_special && (uint8_t)t->words[t->special[at]].at[0] < byte)
			at++;
		t->special_first[byte] = at;
	}
	return 0;
}

static int read_vocabulary(struct kv_tokenizer *t, const struct kv_gguf *file)
{
	kv_cleanup(kv_freep) struct kv_text *words = NULL;
	size_t n_types;
	int r;

	r = kv_gguf_texts(file, "tokenizer.ggml.tokens", &words, &t->n);
	if (r < 0)
		return r;
	if (!t->n || t->n > INT32_MAX / 4)
		return kv_engine_error(-EINVAL, "tokenizer: %zu tokens, 1..%d allowed", t->n,
				       INT32_MAX / 4);

	r = kv_gguf_i32s(file, "tokenizer.ggml.token_type", &t->types, &n_types);
	if (r < 0 && r != -ENOENT)
		return r;
	if (!r && n_types != t->n)
		return kv_engine_error(-EINVAL, "tokenizer: %zu tokens but %zu token types", t->n,
				       n_types);

	t->ids_mask = kv_tokenizer_table_mask(t->n);
	t->words = calloc(t->n, sizeof(*t->words));
	t->pieces = calloc(t->n, sizeof(*t->pieces));
	t->ids = malloc((t->ids_mask + 1) * sizeof(*t->ids));
	if (!t->types)
		t->types = calloc(t->n, sizeof(*t->types));
	if (!t->words || !t->pieces || !t->ids || !t->types)
		return -ENOMEM;

	memset(t->ids, 0xff, (t->ids_mask + 1) * sizeof(*t->ids));
	r = t->kind->read_words(t, words);
	return r < 0 ? r : sort_special(t);
}

static bool text_is(struct kv_text text, const char *s)
{
	return text.len == strlen(s) && !memcmp(text.at, s, text.len);
}

static int find_kind(struct kv_tokenizer *t, const struct kv_gguf *file)
{
	struct kv_text text;
	int r;

	r = kv_gguf_text(file, "tokenizer.ggml.model", &text);
	if (r < 0)
		return r;
	for (size_t i = 0; i < N_OF(kinds); i++)
		if (text_is(text, kinds[i]->model))
			t->kind = kinds[i];
	if (!t->kind)
		return kv_engine_error(-ENOTSUP,
				       "tokenizer: model %.*s, gpt2 and llama are supported",
				       (int)(text.len < 64 ? text.len : 64), text.at);
	return 0;
}

/* A key that may be missing: *@ret then stays as it is. */
static int read_u32(const struct kv_gguf *file, const char *key, uint32_t *ret)
{
	int r = kv_gguf_u32(file, key, ret);

	return r == -ENOENT ? 0 : r;
}

static int read_options(struct kv_tokenizer *t, const struct kv_gguf *file)
{
	uint32_t add_bos = t->kind->add_bos;
	int r;

	t->bos = t->eos = t->eot = UINT32_MAX;
	r = read_u32(file, "tokenizer.ggml.bos_token_id", &t->bos);
	if (r < 0)
		return r;
	r = read_u32(file, "tokenizer.ggml.eos_token_id", &t->eos);
	if (r < 0)
		return r;
	r = read_u32(file, "tokenizer.ggml.eot_token_id", &t->eot);
	if (r < 0)
		return r;
	r = read_u32(file, "tokenizer.ggml.add_bos_token", &add_bos);
	if (r < 0)
		return r;
	if (add_bos && t->bos >= t->n)
		return kv_engine_error(-EINVAL, "tokenizer: bos_token_id %u of %zu tokens", t->bos,
				       t->n);

	t->add_bos = add_bos;
	r = kv_gguf_text(file, "tokenizer.chat_template", &t->template);
	return r == -ENOENT ? 0 : r;
}

int kv_tokenizer_new(const struct kv_gguf *file, struct kv_tokenizer **ret)
{
	struct kv_tokenizer *t = calloc(1, sizeof(*t));
	int r;

	if (!t)
		return -ENOMEM;

	r = find_kind(t, file);
	if (!r)
		r = read_vocabulary(t, file);
	if (!r)
		r = t->kind->read(t, file);
	if (!r)
		r = read_options(t, file);
	if (r < 0) {
		kv_tokenizer_free(t);
		return r == -ENOMEM ? kv_engine_error(r, "no memory for the tokenizer") : r;
	}
	*ret = t;
	return 0;
}

struct kv_tokenizer *kv_tokenizer_free(struct kv_tokenizer *t)
{
	if (!t)
		return NULL;

	free(t->words);
	free(t->pieces);
	free(t->bytes);
	free(t->types);
	free(t->ids);
	free(t->merges);
	free(t->scores);
	free(t->special);
	free(t);
	return NULL;
}

static uint8_t special_byte(const struct kv_tokenizer *t, size_t i, size_t at)
{
	return t->words[t->special[i]].at[at];
}

/* The first special word of [lo, hi) whose byte @at is @byte or higher; all are longer than that. */
static size_t narrow(const struct kv_tokenizer *t, size_t lo, size_t hi, size_t at, unsigned byte)
{
	while (lo < hi) {
		size_t middle = lo + (hi - lo) / 2;

		if (special_byte(t, middle, at) < byte)
			lo = middle + 1;
		else
			hi = middle;
	}
	return lo;
}

/* The longest special token at @s, or -1; without @control only user tokens count */
static int32_t special_at(const struct kv_tokenizer *t, const char *s, size_t n, bool control)
{
	size_t lo = t->special_first[(uint8_t)s[0]], hi = t->special_first[(uint8_t)s[0] + 1];
	int32_t best = -1;

	for (size_t k = 1; lo < hi; k++) {
		/* Words [lo, hi) begin with s[0..k). */
		for (; lo < hi && t->words[t->special[lo]].len == k; lo++) {
			int32_t id = t->special[lo];

			if ((control || t->types[id] == KV_TOKEN_USER) &&
			    (best < 0 || t->words[best].len < k))
				best = id;
		}
		if (k == n)
			break;
		lo = narrow(t, lo, hi, k, (uint8_t)s[k]);
		hi = narrow(t, lo, hi, k, (uint8_t)s[k] + 1u);
	}
	return best;
}

static int encode_prepared(const struct kv_tokenizer *t, const char *text, size_t len, bool special,
			   struct kv_tokens *tokens)
{
	kv_cleanup(kv_merging_deinit) struct kv_merging m = {0};
	size_t start = 0, i = 0;
	int32_t token;
	int r;

	while ((special || t->kind->user_always) && i < len) {
		token = special_at(t, text + i, len - i, special);
		if (token < 0) {
			i++;
			continue;
		}
		r = t->kind->encode(t, &m, text + start, i - start, tokens);
		if (r < 0)
			return r;
		r = kv_tokens_push(tokens, token);
		if (r < 0)
			return r;
		i += t->words[token].len;
		start = i;
	}
	return t->kind->encode(t, &m, text + start, len - start, tokens);
}

int kv_tokenizer_encode(const struct kv_tokenizer *t, const char *text, size_t len, bool special,
			struct kv_tokens *tokens)
{
	kv_cleanup(kv_freep) char *prepared = NULL;
	int r;

	if (t->kind->prepare) {
		r = t->kind->prepare(t, text, len, &prepared, &len);
		if (r < 0)
			return r;
	}
	return encode_prepared(t, prepared ? prepared : text, len, special, tokens);
}

static int encode_words(const struct kv_tokenizer *t, const char *words, struct kv_tokens *tokens)
{
	return kv_tokenizer_encode(t, words, strlen(words), true, tokens);
}

/* ChatML: the system turn that the template begins with, where it has one */
static int encode_chatml_system(const struct kv_tokenizer *t, struct kv_tokens *tokens)
{
	static const char system[] = "<|im_start|>system\n", end[] = "<|im_end|>";
	const char *at, *stop;
	int r;

	/* The template's literal that stands in where the first message isn't a system one */
	at = memmem(t->template.at, t->template.len, system, strlen(system));
	stop = at ? memmem(at, t->template.at + t->template.len - at, end, strlen(end)) : NULL;
	if (!stop)
		return 0;
	r = kv_tokenizer_encode(t, at, stop - at, true, tokens);
	return r < 0 ? r : encode_words(t, "<|im_end|>\n", tokens);
}

/* How templates write one user message and ask for the answer, by what they contain */
static const struct chat {
	const char *mark;
	const char *before;
	const char *after;
	int (*begin)(const struct kv_tokenizer *t, struct kv_tokens *tokens); /* or NULL */
} chats[] = {
	{"<|im_start|>", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n",
	 encode_chatml_system},
	{"<start_of_turn>", "<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n", NULL},
};

static int encode_chat(const struct kv_tokenizer *t, const char *text, size_t len,
		       struct kv_tokens *tokens)
{
	const struct chat *chat = NULL;
	int r = 0;

	for (size_t i = 0; i < N_OF(chats) && t->template.len; i++)
		if (memmem(t->template.at, t->template.len, chats[i].mark, strlen(chats[i].mark)))
			chat = &chats[i];
	if (!chat)
		return kv_engine_error(-ENOTSUP, "--chat: the model has no chat template with %s or %s",
				       chats[0].mark, chats[1].mark);

	if (chat->begin)
		r = chat->begin(t, tokens);
	if (!r)
		r = encode_words(t, chat->before, tokens);
	if (!r)
		r = kv_tokenizer_encode(t, text, len, false, tokens);
	return r < 0 ? r : encode_words(t, chat->after, tokens);
}

int kv_tokenizer_prompt(const struct kv_tokenizer *t, const char *text, size_t len, bool chat,
			struct kv_tokens *tokens)
{
	int r;

	if (t->add_bos) {
		r = kv_tokens_push(tokens, t->bos);
		if (r < 0)
			return r;
	}
	return chat ? encode_chat(t, text, len, tokens)
		    : kv_tokenizer_encode(t, text, len, true, tokens);
}

struct kv_text kv_tokenizer_piece(const struct kv_tokenizer *t, int32_t token)
{
	if (token < 0 || (size_t)token >= t->n || t->types[token] == KV_TOKEN_CONTROL)
		return (struct kv_text){"", 0};
	return t->pieces[token];
}

bool kv_tokenizer_is_end(const struct kv_tokenizer *t, int32_t token)
{
	static const char *const ends[] = {"<|endoftext|>", "<|im_end|>", "<end_of_turn>"};

	if (token < 0 || (size_t)token >= t->n)
		return false;
	if ((uint32_t)token == t->eos || (uint32_t)token == t->eot)
		return true;
	for (size_t i = 0; t->types[token] == KV_TOKEN_CONTROL && i < N_OF(ends); i++)
		if (text_is(t->words[token], ends[i]))
			return true;
	return false;
}
