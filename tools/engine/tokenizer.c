/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two hash tables do the work: bytes of a token -> id, and (left id, right id) -> (rank, id of the
 * two joined). Merging takes the pair of lowest rank, the leftmost of equals, from a heap, so that
 * a long piece costs n log n.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "include/internal/cleanup.h"
#include "tools/engine/error.h"
#include "tools/engine/pattern.h"
#include "tools/engine/tokenizer.h"
#include "tools/engine/unicode.h"

/* What the file says of a token. */
enum {
	TYPE_NORMAL = 1,
	TYPE_CONTROL = 3,
	TYPE_USER = 4,
};

struct merge {
	int32_t left;
	int32_t right; /* -1: an empty place */
	int32_t joined;
	uint32_t rank;
};

struct kv_tokenizer {
	size_t n;
	struct kv_text *pieces; /* [n] bytes a token stands for */
	char *bytes;		/* of all pieces */
	int32_t *types;		/* [n] */
	int32_t *ids;		/* hash table of ids by piece; -1: an empty place */
	struct merge *merges;	/* hash table by pair */
	size_t ids_mask;
	size_t merges_mask;
	int32_t byte_ids[256]; /* -1: the vocabulary lacks this byte */
	int32_t *special;      /* [n_special] control and user tokens */
	size_t n_special;
	bool special_first[256]; /* does one begin with this byte? */
	bool digits_alone;
	bool add_bos;
	uint32_t bos;
	uint32_t eos;
	uint32_t eot;
	struct kv_text template; /* in the file; empty: none */
};

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

/* Places of a hash table that stays at most half full. */
static size_t table_mask(size_t n)
{
	size_t size = 16;

	while (size < 2 * n)
		size *= 2;
	return size - 1;
}

static int32_t find_piece(const struct kv_tokenizer *t, const char *s, size_t len)
{
	size_t i = XXH3_64bits(s, len) & t->ids_mask;

	for (; t->ids[i] >= 0; i = (i + 1) & t->ids_mask) {
		const struct kv_text *piece = &t->pieces[t->ids[i]];

		if (piece->len == len && !memcmp(piece->at, s, len))
			return t->ids[i];
	}
	return -1;
}

static size_t pair_place(const struct kv_tokenizer *t, int32_t left, int32_t right)
{
	uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
	size_t i = XXH3_64bits(&key, sizeof(key)) & t->merges_mask;

	while (t->merges[i].right >= 0 &&
	       (t->merges[i].left != left || t->merges[i].right != right))
		i = (i + 1) & t->merges_mask;
	return i;
}

static const struct merge *find_merge(const struct kv_tokenizer *t, int32_t left, int32_t right)
{
	const struct merge *merge = &t->merges[pair_place(t, left, right)];

	return merge->right >= 0 ? merge : NULL;
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

static int read_vocabulary(struct kv_tokenizer *t, const struct kv_gguf *file)
{
	kv_cleanup(kv_freep) struct kv_text *words = NULL;
	size_t n_types, n_bytes = 0;
	char *at;
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

	for (size_t i = 0; i < t->n; i++)
		n_bytes += words[i].len;
	t->ids_mask = table_mask(t->n);
	t->pieces = calloc(t->n, sizeof(*t->pieces));
	t->bytes = malloc(n_bytes + 1);
	t->ids = malloc((t->ids_mask + 1) * sizeof(*t->ids));
	t->special = calloc(t->n, sizeof(*t->special));
	if (!t->types)
		t->types = calloc(t->n, sizeof(*t->types));
	if (!t->pieces || !t->bytes || !t->ids || !t->special || !t->types)
		return -ENOMEM;

	memset(t->ids, 0xff, (t->ids_mask + 1) * sizeof(*t->ids));
	at = t->bytes;
	for (size_t i = 0; i < t->n; i++) {
		struct kv_text *piece = &t->pieces[i];
		size_t place;

		piece->at = at;
		if (t->types[i] == TYPE_CONTROL || t->types[i] == TYPE_USER) {
			memcpy(at, words[i].at, words[i].len);
			piece->len = words[i].len;
			if (piece->len) {
				t->special[t->n_special++] = i;
				t->special_first[(uint8_t)at[0]] = true;
			}
		} else {
			piece->len = decode_word(words[i], at);
		}
		at += piece->len;

		if (find_piece(t, piece->at, piece->len) >= 0)
			continue; /* the first of equal words is the one that is used */
		place = XXH3_64bits(piece->at, piece->len) & t->ids_mask;
		while (t->ids[place] >= 0)
			place = (place + 1) & t->ids_mask;
		t->ids[place] = i;
	}

	for (int i = 0; i < 256; i++) {
		char byte = i;

		t->byte_ids[i] = find_piece(t, &byte, 1);
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
	left = find_piece(t, scratch, n_left);
	right = find_piece(t, scratch + n_left, n_right);
	joined = find_piece(t, scratch, n_left + n_right);
	if (left < 0 || right < 0 || joined < 0)
		return kv_engine_error(-EINVAL, "tokenizer: merge %zu isn't in the vocabulary",
				       rank);

	place = pair_place(t, left, right);
	if (t->merges[place].right < 0)
		t->merges[place] = (struct merge){left, right, joined, rank};
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
	t->merges_mask = table_mask(n);
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

/* What a message shows of a text of unknown length */
static int text_width(struct kv_text text)
{
	return text.len < 64 ? text.len : 64;
}

/* A key that may be missing: *@ret then stays as it is. */
static int read_u32(const struct kv_gguf *file, const char *key, uint32_t *ret)
{
	int r = kv_gguf_u32(file, key, ret);

	return r == -ENOENT ? 0 : r;
}

static int read_options(struct kv_tokenizer *t, const struct kv_gguf *file)
{
	struct kv_text text;
	uint32_t add_bos = 0;
	int r;

	r = kv_gguf_text(file, "tokenizer.ggml.model", &text);
	if (r < 0)
		return r;
	if (!text_is(text, "gpt2"))
		return kv_engine_error(-ENOTSUP, "tokenizer: model %.*s, only gpt2 is supported",
				       text_width(text), text.at);

	r = kv_gguf_text(file, "tokenizer.ggml.pre", &text);
	if (r < 0)
		return r;
	t->digits_alone = text_is(text, "smollm");
	if (!t->digits_alone && !text_is(text, "gpt-2"))
		return kv_engine_error(-ENOTSUP,
				       "tokenizer: pre-tokenizer %.*s, smollm and gpt-2 are "
				       "supported",
				       text_width(text), text.at);

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

	r = read_vocabulary(t, file);
	if (!r)
		r = read_merges(t, file);
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

	free(t->pieces);
	free(t->bytes);
	free(t->types);
	free(t->ids);
	free(t->merges);
	free(t->special);
	free(t);
	return NULL;
}

/* Merging: symbols in a list, candidate pairs in a heap; an entry is stale if its ids are gone. */
struct symbol {
	int32_t id;
	int32_t prev; /* index; -1: none */
	int32_t next;
};

struct candidate {
	const struct merge *merge;
	int32_t at; /* index of the left symbol */
};

struct merging {
	struct symbol *symbols;
	struct candidate *heap;
	size_t n_heap;
	size_t n_max; /* bytes of the longest piece there is room for */
};

static bool before(const struct candidate *a, const struct candidate *b)
{
	if (a->merge->rank != b->merge->rank)
		return a->merge->rank < b->merge->rank;
	return a->at < b->at;
}

static void heap_push(struct merging *m, struct candidate c)
{
	size_t i = m->n_heap++;

	for (; i && before(&c, &m->heap[(i - 1) / 2]); i = (i - 1) / 2)
		m->heap[i] = m->heap[(i - 1) / 2];
	m->heap[i] = c;
}

static struct candidate heap_pop(struct merging *m)
{
	struct candidate top = m->heap[0], last = m->heap[--m->n_heap];
	size_t i = 0;

	for (;;) {
		size_t child = 2 * i + 1;

		if (child + 1 < m->n_heap && before(&m->heap[child + 1], &m->heap[child]))
			child++;
		if (child >= m->n_heap || !before(&m->heap[child], &last))
			break;
		m->heap[i] = m->heap[child];
		i = child;
	}
	m->heap[i] = last;
	return top;
}

static void consider(const struct kv_tokenizer *t, struct merging *m, int32_t left)
{
	const struct merge *merge;

	if (left < 0 || m->symbols[left].next < 0)
		return;

	merge = find_merge(t, m->symbols[left].id, m->symbols[m->symbols[left].next].id);
	if (merge)
		heap_push(m, (struct candidate){merge, left});
}

static void join(const struct kv_tokenizer *t, struct merging *m, struct candidate c)
{
	struct symbol *left = &m->symbols[c.at], *right;

	if (left->id != c.merge->left || left->next < 0)
		return;
	right = &m->symbols[left->next];
	if (right->id != c.merge->right)
		return;

	left->id = c.merge->joined;
	left->next = right->next;
	right->id = -1;
	if (left->next >= 0)
		m->symbols[left->next].prev = c.at;
	consider(t, m, left->prev);
	consider(t, m, c.at);
}

static int make_room(struct merging *m, size_t n)
{
	if (n <= m->n_max)
		return 0;

	free(m->symbols);
	free(m->heap);
	m->n_max = n;
	m->symbols = calloc(n, sizeof(*m->symbols));
	m->heap =
		calloc(3 * n, sizeof(*m->heap)); /* n - 1 pairs, two more by each of n - 1 joins */
	if (!m->symbols || !m->heap)
		return kv_engine_error(-ENOMEM, "no memory for a text of %zu bytes", n);
	return 0;
}

static void merging_deinit(struct merging *m)
{
	free(m->symbols);
	free(m->heap);
}

static int encode_piece(const struct kv_tokenizer *t, struct merging *m, const char *s, size_t len,
			struct kv_tokens *tokens)
{
	int32_t n = 0;
	int r;

	r = make_room(m, len);
	if (r < 0)
		return r;

	/* A byte that the vocabulary lacks is dropped, as the model never saw it. */
	for (size_t i = 0; i < len; i++) {
		int32_t id = t->byte_ids[(uint8_t)s[i]];

		if (id < 0)
			continue;
		m->symbols[n] = (struct symbol){id, n - 1, n + 1};
		n++;
	}
	if (!n)
		return 0;

	m->symbols[n - 1].next = -1;
	m->n_heap = 0;
	for (int32_t i = 0; i < n; i++)
		consider(t, m, i);
	while (m->n_heap)
		join(t, m, heap_pop(m));

	for (int32_t i = 0; i >= 0; i = m->symbols[i].next) {
		r = kv_tokens_push(tokens, m->symbols[i].id);
		if (r < 0)
			return r;
	}
	return 0;
}

static int encode_text(const struct kv_tokenizer *t, struct merging *m, const char *s, size_t n,
		       struct kv_tokens *tokens)
{
	size_t part, len, used;
	uint32_t point;
	int r;

	while (n) {
		/* Up to the next digit, which is a piece of its own: the pattern sees the part
		 * alone. */
		part = n;
		for (size_t i = 0; t->digits_alone && i < n; i += used) {
			used = kv_unicode_decode(s + i, n - i, &point);
			if (kv_unicode_class(point) != KV_CHAR_NUMBER)
				continue;
			part = i ? i : used;
			break;
		}
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

/* The longest special token at @s, or -1 */
static int32_t special_at(const struct kv_tokenizer *t, const char *s, size_t n)
{
	int32_t best = -1;

	if (!t->special_first[(uint8_t)s[0]])
		return -1;

	for (size_t i = 0; i < t->n_special; i++) {
		const struct kv_text *piece = &t->pieces[t->special[i]];

		if (piece->len <= n && !memcmp(piece->at, s, piece->len) &&
		    (best < 0 || piece->len > t->pieces[best].len))
			best = t->special[i];
	}
	return best;
}

int kv_tokenizer_encode(const struct kv_tokenizer *t, const char *text, size_t len, bool special,
			struct kv_tokens *tokens)
{
	kv_cleanup(merging_deinit) struct merging m = {0};
	size_t start = 0, i = 0;
	int32_t token;
	int r;

	while (special && i < len) {
		token = special_at(t, text + i, len - i);
		if (token < 0) {
			i++;
			continue;
		}
		r = encode_text(t, &m, text + start, i - start, tokens);
		if (r < 0)
			return r;
		r = kv_tokens_push(tokens, token);
		if (r < 0)
			return r;
		i += t->pieces[token].len;
		start = i;
	}
	return encode_text(t, &m, text + start, len - start, tokens);
}

static int encode_words(const struct kv_tokenizer *t, const char *words, struct kv_tokens *tokens)
{
	return kv_tokenizer_encode(t, words, strlen(words), true, tokens);
}

/* ChatML, as the template writes one user message and asks for the answer */
static int encode_chat(const struct kv_tokenizer *t, const char *text, size_t len,
		       struct kv_tokens *tokens)
{
	static const char system[] = "<|im_start|>system\n", end[] = "<|im_end|>";
	const char *at, *stop;
	int r;

	if (!t->template.len || !memmem(t->template.at, t->template.len, "<|im_start|>", 12))
		return kv_engine_error(-ENOTSUP,
				       "--chat: the model has no chat template with <|im_start|>");

	/* The template's literal that stands in where the first message isn't a system one */
	at = memmem(t->template.at, t->template.len, system, strlen(system));
	stop = at ? memmem(at, t->template.at + t->template.len - at, end, strlen(end)) : NULL;
	if (stop) {
		r = kv_tokenizer_encode(t, at, stop - at, true, tokens);
		if (r < 0)
			return r;
		r = encode_words(t, "<|im_end|>\n", tokens);
		if (r < 0)
			return r;
	}

	r = encode_words(t, "<|im_start|>user\n", tokens);
	if (r < 0)
		return r;
	r = kv_tokenizer_encode(t, text, len, false, tokens);
	if (r < 0)
		return r;
	return encode_words(t, "<|im_end|>\n<|im_start|>assistant\n", tokens);
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
	if (token < 0 || (size_t)token >= t->n || t->types[token] == TYPE_CONTROL)
		return (struct kv_text){"", 0};
	return t->pieces[token];
}

bool kv_tokenizer_is_end(const struct kv_tokenizer *t, int32_t token)
{
	if (token < 0 || (size_t)token >= t->n)
		return false;
	if ((uint32_t)token == t->eos || (uint32_t)token == t->eot)
		return true;
	return t->types[token] == TYPE_CONTROL && (text_is(t->pieces[token], "<|endoftext|>") ||
						   text_is(t->pieces[token], "<|im_end|>"));
}
