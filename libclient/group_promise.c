/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Waiting for what others compute, in all groups. What is promised is a prefix, up to a length at which hits
 * can end: its key is made of the digest of all its tokens, and stands in the table of the first group's
 * pool (promise.c). Who follows looks in all groups, and believes what it finds there alone.
 */
#include <errno.h>
#include <string.h>

#include "alloc/hash.h"
#include "libclient/group.h"

#define PREFIX_GROUP 0xffffu /* no block and no state has such a row */

static struct kv_pool *pool_of(const struct kv_gseq *seq)
{
	return seq->groups->groups[0].pool;
}

/* Of the first @n tokens, whose digests are there. */
static struct kv_key key_of(const struct kv_gseq *seq, size_t n)
{
	uint64_t root = seq->seqs[0] ? seq->seqs[0]->root : seq->states[0].root;
	struct kv_key key = { root, 0 };
	struct kv_shm_row row;

	kv_prefix_digest_row(&seq->digests[n / seq->groups->digest_unit], &seq->identity, PREFIX_GROUP, n,
			     n, &row);
	return kv_key_fold(pool_of(seq)->head.seed, key, &row, sizeof(row));
}

/* What was published already ends by itself. */
void kv_gseq_withdraw(struct kv_gseq *seq, size_t n_tokens)
{
	size_t unit = seq->groups->unit, first = n_tokens / unit;

	for (size_t i = first; i < seq->n_promises; i++) {
		if (i < seq->n_kept)
			kv_promise_shorten(pool_of(seq), seq->promises[i]);
		else
			kv_promise_end(pool_of(seq), seq->promises[i]);
	}
	seq->n_promises = seq->n_promises < first ? seq->n_promises : first;
	seq->n_kept = seq->n_kept < first ? seq->n_kept : first;
}

void kv_gseq_keep_promises(struct kv_gseq *seq)
{
	size_t n = seq->len / seq->groups->unit;

	for (; seq->n_kept < n && seq->n_kept < seq->n_promises; seq->n_kept++)
		kv_promise_shorten(pool_of(seq), seq->promises[seq->n_kept]);
}

static int check(const struct kv_gseq *seq, const int32_t *tokens, size_t n)
{
	int r = kv_forked(pool_of(seq)->fork_generation);

	if (!r && (seq->len > n ||
		   (seq->len && memcmp(seq->tokens, tokens, seq->len * sizeof(*tokens)))))
		r = kv_error(-EINVAL, "promise: the sequence's %zu tokens are not the beginning of "
			     "those given", seq->len);
	return r;
}

KV_PUBLIC int kv_gseq_promise(struct kv_gseq *seq, const int32_t *tokens, size_t n, int64_t timeout,
			      size_t *ret_promised)
{
	int64_t until = kv_now() + (timeout < KV_PROMISE_MOST ? timeout : KV_PROMISE_MOST);
	size_t unit = seq->groups->unit, end = n / unit, i = seq->len / unit;
	int r = check(seq, tokens, n);

	if (!r)
		r = kv_seq_grow((void **)&seq->promises, &seq->promises_room, end + 1,
				sizeof(*seq->promises));
	if (r < 0)
		return r;
	kv_gseq_withdraw(seq, i * unit);
	kv_gseq_begin(seq);
	r = kv_gseq_digest(seq, tokens, end * unit);
	/* Keys of what is there already are of no use, and never looked at. */
	memset(seq->promises + seq->n_promises, 0, (end + 1 - seq->n_promises) * sizeof(*seq->promises));
	for (; !r && i < end; i++) {
		struct kv_key key = key_of(seq, (i + 1) * unit);

		if (!kv_promise_make(pool_of(seq), key, until))
			break;
		seq->promises[i] = key;
	}
	kv_gseq_cut_digests(seq);
	if (r < 0)
		return r;
	seq->n_promises = i;
	seq->n_kept = seq->len / unit < i ? seq->len / unit : i;
	if (ret_promised)
		*ret_promised = i * unit;
	return 0;
}

/* 1: another session computes what comes next. */
static int next_is_promised(struct kv_gseq *seq, const int32_t *tokens, size_t n)
{
	size_t unit = seq->groups->unit, next = seq->len + unit;
	int r;

	if (seq->len % unit || next >= n)
		return 0;
	kv_gseq_begin(seq);
	r = kv_gseq_digest(seq, tokens, next);
	if (!r)
		r = kv_promise_stands(pool_of(seq), key_of(seq, next));
	kv_gseq_cut_digests(seq);
	return r;
}

KV_PUBLIC int kv_gseq_follow(struct kv_gseq *seq, const int32_t *tokens, size_t n, int64_t timeout,
			     size_t *ret_hit)
{
	struct kv_follow f = kv_follow_begin(timeout);
	size_t before;
	int r;

	do {
		before = seq->len;
		r = kv_gseq_lookup(seq, tokens, n, ret_hit);
		if (!r)
			r = next_is_promised(seq, tokens, n);
		if (r < 0)
			return r;
	} while (kv_follow_again(&f, r, seq->len > before, &r));
	return r;
}
