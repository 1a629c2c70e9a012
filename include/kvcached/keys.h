/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keys of blocks as vLLM makes them, and of pages as TokenSpeed does (below): for routers and other caches,
 * which know blocks by these.
 *
 * kvcached itself finds blocks by keys of its own (kv_seq_lookup()), which nothing here changes.
 *
 *	key i = HASH(CBOR [ key i - 1, [tokens of block i], extras or null ]); key -1 = HASH(CBOR seed)
 *
 * Extras of a block, in this order: the adapter's name; [hash, offset] of each item that lies in it,
 * the offset counted from the block's first token; the salt, in a sequence's first block; of a prompt
 * given as embeddings the SHA-256 of the block's rows, whose tokens are 0 (of blocks behind the prompt,
 * too: of the rows there are, or of none). CBOR is RFC 8949's deterministic form. Left out are keys over
 * pickled objects, which no other program can repeat.
 *
 * Threads: every function may be called from any thread at any time.
 */
#ifndef KVCACHED_KEYS_H
#define KVCACHED_KEYS_H

#include <kvcached/types.h>

#ifdef __cplusplus
extern "C" {
#endif

enum kv_keys_hash {
	KV_KEYS_SHA256 = 1, /* "sha256_cbor": 32 bytes */
	KV_KEYS_XXH3 = 2,   /* "xxhash_cbor": XXH3, 16 bytes, big end first */
};

#define KV_KEYS_BYTES 32	/* of the longest key */
#define KV_KEYS_GROUP_BYTES 4 /* that kv_keys_pack() adds */

/* An image, say, in a prompt. */
struct kv_keys_item {
	const char *hash; /* UTF-8 text */
	int64_t offset;	  /* first token of the sequence */
	int64_t n_tokens;
};

struct kv_keys_options {
	size_t size;
	int32_t hash;	       /* enum kv_keys_hash */
	int32_t block_tokens;
	const char *seed;      /* UTF-8 text; NULL: "vllm-none-hash" */
	const char *lora_name; /* NULL or empty: none; so is salt */
	const char *salt;
	const struct kv_keys_item *items; /* [n_items] by offset */
	uint32_t n_items;
	uint32_t reserved;
	const void *embeds;  /* [n_embeds][embed_bytes] from the sequence's start, as they lie in memory; NULL */
	int64_t n_embeds;
	int64_t embed_bytes; /* of a token's row */
};

/* kv_keys_bytes() - bytes of a key; 0 for a number that names no hash */
size_t kv_keys_bytes(int hash);

/**
 * kv_keys_seed() - the key before a sequence's first
 * @ret_key: kv_keys_bytes()
 *
 * Return: 0; -EINVAL: the text names the field.
 */
int kv_keys_seed(const struct kv_keys_options *options, uint8_t *ret_key);

/**
 * kv_keys_of_blocks() - keys of the complete blocks of a sequence, from one of them on
 * @first:    number of the first block; its key follows
 * @parent:   the key of block first - 1; NULL if @first is 0
 * @tokens:   [n_tokens] from that block's first on; an incomplete block at the end has no key
 * @ret_keys: [room][kv_keys_bytes()]
 *
 * In one call or in several, the keys are the same.
 * Return: how many; -EINVAL: the text names the field; -E2BIG: more than @room; -ENOMEM.
 */
int64_t kv_keys_of_blocks(const struct kv_keys_options *options, int64_t first, const uint8_t *parent,
			  const uint32_t *tokens, size_t n_tokens, uint8_t *ret_keys, int64_t room);

/**
 * kv_keys_view() - keys of larger blocks among those of smaller ones
 * @n_keys:	  of blocks of @key_tokens
 * @block_tokens: of the larger blocks; a multiple of key_tokens
 * @align_tokens: of who looks for hits inside blocks, too: below block_tokens: all keys stay; else 0
 * @ret_index:	  which key each block has; room for @n_keys
 *
 * Return: how many; -EINVAL: block_tokens is no multiple.
 */
int64_t kv_keys_view(int64_t n_keys, int32_t key_tokens, int32_t block_tokens, int32_t align_tokens,
		     int64_t *ret_index);

/**
 * kv_keys_pack() - a key with the number of its group of layers, big end first
 * @ret: [n_bytes + KV_KEYS_GROUP_BYTES]
 *
 * Return: 0; -ERANGE: the number has more than 32 bits.
 */
int kv_keys_pack(const uint8_t *key, size_t n_bytes, uint64_t group, uint8_t *ret);

/* ---- keys of pages as TokenSpeed makes them ---- */

/* What besides tokens a page depends on: a salt, an adapter's name. */
struct kv_page_extra {
	const void *bytes;
	size_t n_bytes;
};

/**
 * kv_page_key() - the key of one page
 * @prior:   [KV_KEYS_BYTES] the key of the page before; NULL: it is the first
 * @extras:  [n_extras]; their order counts
 * @ret_key: [KV_KEYS_BYTES]; may be @prior
 *
 * SHA-256 of: bytes of the prior key, that key, tokens, [extras, each with its length before it]; all
 * lengths, counts and tokens in 32 bits, the small end first. A group's key is kv_keys_pack()'s.
 */
void kv_page_key(const uint8_t *prior, const int32_t *tokens, size_t n_tokens,
		 const struct kv_page_extra *extras, size_t n_extras, uint8_t *ret_key);

/**
 * kv_page_key_fold() - the key of a group's block that has several pages
 * @keys: [n][KV_KEYS_BYTES] of the pages, the first of which is a multiple of @n from the sequence's start
 *
 * Of one page its own; else kv_page_key() of no tokens, page by page, with the page's key in hexadecimal as
 * the one extra.
 */
void kv_page_key_fold(const uint8_t *keys, size_t n, uint8_t *ret_key);

#ifdef __cplusplus
}
#endif
#endif
