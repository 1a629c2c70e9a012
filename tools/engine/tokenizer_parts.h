/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tokenizer inside: tokenizer.c has the vocabulary, special tokens and prompts; tokenizer_bpe.c and
 * tokenizer_spm.c what each kind makes of plain text; tokenizer_merge.c the merging that both do.
 */
#ifndef KV_ENGINE_TOKENIZER_PARTS_H
#define KV_ENGINE_TOKENIZER_PARTS_H

#include "tools/engine/tokenizer.h"

/* What the file says of a token. */
enum {
	KV_TOKEN_NORMAL = 1,
	KV_TOKEN_UNKNOWN = 2,
	KV_TOKEN_CONTROL = 3,
	KV_TOKEN_USER = 4,
	KV_TOKEN_BYTE = 6,
};

struct kv_merge {
	int32_t left;
	int32_t right; /* -1: an empty place */
	int32_t joined;
	uint32_t rank;
};

struct kv_tokenizer {
	const struct kv_tokenizer_kind *kind;
	size_t n;
	struct kv_text *words;	/* [n] what is looked for in a text */
	struct kv_text *pieces; /* [n] bytes a token stands for */
	char *bytes;		/* of both */
	int32_t *types;		/* [n] */
	int32_t *ids;		/* hash table of ids by word; -1: an empty place */
	size_t ids_mask;
	int32_t byte_ids[256]; /* -1: the vocabulary lacks this byte */
	int32_t *special;      /* [n_special] control and user tokens, in the order of their words */
	size_t n_special;
	size_t special_first[257]; /* of `special`: the first word that begins with this byte, or a higher one */
	bool add_bos;
	uint32_t bos;
	uint32_t eos;
	uint32_t eot;
	struct kv_text template; /* in the file; empty: none */

	/* Byte-level BPE: */
	struct kv_merge *merges; /* hash table by pair */
	size_t merges_mask;
	bool digits_alone;

	/* SentencePiece: */
	float *scores;	   /* [n] */
	bool space_prefix; /* a text begins with a space */
};

struct kv_merging;

struct kv_tokenizer_kind {
	const char *model; /* tokenizer.ggml.model */
	bool add_bos;	   /* where the file doesn't say */
	bool user_always;  /* user tokens are found in every text, not only where special ones are */
	/* Words and pieces, from the file's words. */
	int (*read_words)(struct kv_tokenizer *t, const struct kv_text *words);
	int (*read)(struct kv_tokenizer *t, const struct kv_gguf *file);
	/* What is looked at in place of a text, from malloc(); NULL: the text itself */
	int (*prepare)(const struct kv_tokenizer *t, const char *s, size_t n, char **ret, size_t *ret_n);
	int (*encode)(const struct kv_tokenizer *t, struct kv_merging *m, const char *s, size_t n,
		      struct kv_tokens *tokens);
};

extern const struct kv_tokenizer_kind kv_tokenizer_bpe;
extern const struct kv_tokenizer_kind kv_tokenizer_spm;

/* kv_tokenizer_add_word() - token @id is found by its word from now on, unless an earlier one has that word */
void kv_tokenizer_add_word(struct kv_tokenizer *t, int32_t id);

/* kv_tokenizer_find() - the token that was added with this word, or -1 */
int32_t kv_tokenizer_find(const struct kv_tokenizer *t, const char *s, size_t len);

/* kv_tokenizer_table_mask() - places, less one, of a hash table of @n that stays at most half full */
size_t kv_tokenizer_table_mask(size_t n);

/* Merging: symbols in a list, candidates to join in a heap. */
struct kv_symbol {
	const char *at;
	uint32_t len;
	int32_t id; /* -1: no token has this text */
	int32_t prev; /* index; -1: none */
	int32_t next;
};

struct kv_joint {
	double order; /* the least is joined first, the leftmost of equals */
	int32_t id;
};

struct kv_merging {
	struct kv_symbol *symbols;
	struct kv_candidate *heap;
	size_t n_heap;
	size_t n_max; /* symbols there is room for */
};

/* kv_merging_reserve() - room for @n symbols. Return: 0; -EINVAL, it is too long a text; -ENOMEM. */
int kv_merging_reserve(struct kv_merging *m, size_t n);
void kv_merging_deinit(struct kv_merging *m);

/*
 * kv_merging_run() - join the neighbours of symbols[0..n) as long as any can be
 * @find: whether two can, and what they become
 *
 * Their list is then walked from symbols[0] by `next`.
 */
void kv_merging_run(const struct kv_tokenizer *t, struct kv_merging *m, size_t n,
		    bool (*find)(const struct kv_tokenizer *t, const struct kv_symbol *left,
				 const struct kv_symbol *right, struct kv_joint *ret));

#endif
