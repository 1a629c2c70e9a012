/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What besides tokens decides whether a block may be shared, and its canonical form.
 *
 *   field   says something of a whole sequence: its adapter, its tenant's salt
 *   extra   stands for what the model saw at some positions in place of tokens: an image, sound
 *
 *   encoding of a block  = fields (first block only), then the extras that reach into it
 *   encoding of an item  = kind u32, tag u32, from u32, count u32, element u64, n u64, n bytes
 *			    (field: from, count and element are 0; extra: the positions of the block
 *			    that it covers, and which element of the item stands at the first of them)
 *
 * Items are in one order however they were said, and each says what it is and how long: different
 * sets of items have different encodings. Little-endian.
 *
 * A block's row in shared pages holds the encoding itself where it fits, else its digest and its
 * length; the form tells them apart. A hit needs an equal row. So what fits is compared byte by
 * byte, and what doesn't is taken for equal only if BLAKE2b-256 is.
 *
 * The prefix digest is for blocks that are found without the blocks before them (windows, states). Of
 * the first n tokens of a sequence it is
 *
 *   H(the n tokens, n, H(encoding of the fields and of all extras that reach into them))
 *
 */
#ifndef KV_ALLOC_IDENTITY_H
#define KV_ALLOC_IDENTITY_H

#include <stdbool.h>

#include "alloc/blake2b.h"
#include "include/internal/shm.h"

struct kv_item {
	uint32_t tag;	   /* not 0 */
	uint64_t n_tokens; /* 0: a field */
	uint64_t position; /* of an extra: the first token it covers */
	uint64_t first;	   /* which of its elements stands there */
	size_t n_bytes;
	uint8_t *bytes; /* owned by the identity */
};

struct kv_identity {
	struct kv_item *items; /* in the order of the encoding: fields first */
	size_t n, room;
};

/* kv_identity_add() - a copy of @item. 0; -EEXIST: a field of that tag is there; -ENOMEM */
int kv_identity_add(struct kv_identity *identity, const struct kv_item *item);

/* kv_identity_copy() - @to is empty. 0 or -ENOMEM */
int kv_identity_copy(struct kv_identity *to, const struct kv_identity *from);

/* kv_identity_cut() - forget extras at @n_tokens and behind; what reaches beyond ends there */
void kv_identity_cut(struct kv_identity *identity, uint64_t n_tokens);
void kv_identity_deinit(struct kv_identity *identity);

/* kv_identity_row() - of the block of tokens [begin, end). False: nothing is said of it */
bool kv_identity_row(const struct kv_identity *identity, uint64_t begin, uint64_t end,
		     struct kv_shm_row *ret);

/**
 * kv_identity_describe() - a row in words: "adapter 'x', salt of 9 bytes, image at 3 (16 tokens)"
 * @row: shared memory that others may be writing; nonsense in it gives other words
 *
 * Positions count from the block's first token. Of salts and digests only the size is said.
 */
void kv_identity_describe(const struct kv_shm_row *row, char *ret, size_t size);

struct kv_prefix_digest {
	uint8_t bytes[KV_DIGEST_BYTES];
};

/* kv_prefix_digest() - of the first @n tokens, which @tokens has taken in, and no more */
void kv_prefix_digest(const struct kv_blake2b *tokens, uint64_t n,
		      const struct kv_identity *identity, struct kv_prefix_digest *ret);

/**
 * kv_prefix_digest_row() - the row of a block [begin, end), or of a state (begin == end)
 * @digest: before @begin
 * @group:  groups of one pool are told apart
 */
void kv_prefix_digest_row(const struct kv_prefix_digest *digest,
			  const struct kv_identity *identity, uint32_t group, uint64_t begin,
			  uint64_t end, struct kv_shm_row *ret);

#endif
