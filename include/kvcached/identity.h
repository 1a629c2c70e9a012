/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What besides its tokens decides whether a block may be shared.
 *
 *   pool      model, revision, name_space, ranks, layout: all who open it agree (client.h)
 *   epoch     of a pool's weights: after an update nothing older is found
 *   field     of one sequence: its adapter, its tenant's salt, whatever else
 *   extra     of some positions: the image, sound or embedding that the model saw there
 *
 *	kv_seq_new(pool, &seq);
 *	kv_seq_field(seq, KV_TAG_SALT, tenant, strlen(tenant));
 *	kv_seq_extra(seq, &(struct kv_extra){ .tag = KV_TAG_IMAGE, .position = 7, .n_tokens = 576,
 *					      .bytes = sha256_of_image, .n_bytes = 32 });
 *	kv_seq_lookup(seq, prompt, n, &hit);
 *
 * What is promised. Tags, lengths and positions are part of what is compared, so no two different
 * sets of fields and extras can be taken for one another, and a block without any is never found
 * for one that has some. A hit compares tokens one by one, the block before exactly, and fields and
 * extras byte by byte where those of a block take at most 112 bytes (40 and the value for each); beyond
 * that by their BLAKE2b-256. The digest of an image is the caller's: equal digests are one image.
 *
 * Threads: as the pool: one at a time.
 */
#ifndef KVCACHED_IDENTITY_H
#define KVCACHED_IDENTITY_H

#include <kvcached/sequence.h>

#ifdef __cplusplus
extern "C" {
#endif

enum kv_tag {
	KV_TAG_ADAPTER = 1,   /* field: name and version of a LoRA, say */
	KV_TAG_SALT = 2,      /* field: of a tenant whose prompts nobody else may find */
	KV_TAG_IMAGE = 3,     /* extra: a digest of the image, as preprocessed */
	KV_TAG_AUDIO = 4,     /* extra */
	KV_TAG_VIDEO = 5,     /* extra */
	KV_TAG_EMBEDDING = 6, /* extra: a digest of embeddings given in place of tokens */
	KV_TAG_OWN = 256,     /* from here on: whatever a model's engines agree on */
};

#define KV_IDENTITY_MAX (1u << 20) /* bytes of one field or extra */

/**
 * kv_seq_field() - say something of the whole sequence
 * @bytes: [n], copied; nothing is not the same as not saying it
 *
 * Return: 0; -EINVAL for tag 0, tag 255 (by it the groups of group.h are told apart) or more than KV_IDENTITY_MAX bytes; -EBUSY: the sequence has tokens;
 *         -EEXIST: that tag has been said; -ENOMEM.
 */
int kv_seq_field(struct kv_seq *seq, uint32_t tag, const void *bytes, size_t n);

struct kv_extra {
	uint32_t tag;
	uint64_t position;  /* the first token it stands for */
	uint64_t n_tokens;  /* how many, not 0 */
	uint64_t first;	    /* which element of the item stands there: 0 unless its beginning is cut off */
	const void *bytes;  /* a digest of the item: [n_bytes], copied */
	size_t n_bytes;
};

/**
 * kv_seq_extra() - say what stands at some positions
 *
 * Before the tokens of these positions are looked up or appended. The token ids there are compared
 * as well: engines agree on a placeholder. Several extras may overlap. A rollback forgets what was said
 * of positions from there on; a fork has the same.
 *
 * Return: 0; -EINVAL for tag 0 or 255, no tokens, too many bytes or positions past 2^48; -EBUSY: the sequence
 *         has tokens at @position or behind it; -ENOMEM.
 */
int kv_seq_extra(struct kv_seq *seq, const struct kv_extra *extra);

/**
 * kv_pool_new_epoch() - the weights have changed: nothing that was cached is found any more
 * @name:     of a pool; it need not be open here
 * @ret_held: NULL, or blocks of older epochs that sequences hold: they stay theirs, and go first once
 *	      they are let go
 *
 * A sequence belongs to the epoch in which its first token was looked up or appended. What those of
 * older epochs publish from now on isn't shown to anyone. kvctl pool epoch NAME does the same.
 *
 * Return: 0; -ENOENT; -ENOMEM; -ETIMEDOUT; -ECONNRESET.
 */
int kv_pool_new_epoch(struct kv_client *client, const char *name, uint64_t *ret_epoch,
		      uint64_t *ret_held, int64_t timeout);

/**
 * kv_pool_epoch() - the epoch that new sequences of this attachment belong to
 *
 * The pool's, unless it was opened with keep_epoch (client.h): then the one it had at that time,
 * until kv_pool_join_epoch(). An engine that loads its weights later than others needs that: what
 * it computes with the old ones must not be shown as new.
 */
uint64_t kv_pool_epoch(const struct kv_pool *pool);

/* kv_pool_join_epoch() - from now on new sequences belong to the pool's epoch of now */
void kv_pool_join_epoch(struct kv_pool *pool);

#ifdef __cplusplus
}
#endif
#endif
