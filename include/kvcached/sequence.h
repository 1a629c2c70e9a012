/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sequences: the tokens of one request and the blocks that hold their K and V.
 *
 *   len       tokens that are in the sequence: found in the cache, or appended
 *   capacity  tokens that its blocks have room for; len <= capacity
 *
 *	kv_seq_new(pool, &seq);
 *	kv_seq_lookup(seq, prompt, n, &hit);               len = hit, a multiple of block_tokens
 *	kv_seq_reserve(seq, n + 1, 0);                     room for the prompt and one token
 *	kv_seq_append(seq, prompt + hit, n - hit);         what the next step computes
 *	kv_batch_build(batch, &item, 1, 0, 0);             table, slots, positions
 *	... write K and V, attention ...
 *	kv_seq_publish(seq, stream);                       complete blocks become visible to all
 *	kv_seq_free(seq, stream);
 *
 * Order (why `stream` is asked for): a block is shown to other processes only after the work queued
 * on the stream so far has finished, and goes back only after it has. In a pool that is not mapped,
 * or lies in host memory, work is over when it is said to be: there the stream is ignored, and the
 * caller calls publish and free when the step's results are back.
 *
 * Blocks that others can see never change. Where a sequence is about to write into a block that
 * is shared (after a fork, a rollback into published tokens, or kv_seq_lookup_partial()),
 * kv_seq_reserve() puts a private block in its place and notes a copy, which the next batch carries
 * (batch.h).
 *
 * Threads: as the pool: one at a time.
 */
#ifndef KVCACHED_SEQUENCE_H
#define KVCACHED_SEQUENCE_H

#include <kvcached/client.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kv_seq;

/* kv_seq_new() - an empty sequence. Return: 0 or -ENOMEM. */
int kv_seq_new(struct kv_pool *pool, struct kv_seq **ret);

/**
 * kv_seq_free() - end a sequence and release its blocks after @stream's work so far
 *
 * What was published stays cached. NULL is allowed. Return: NULL.
 */
struct kv_seq *kv_seq_free(struct kv_seq *seq, void *stream);

/**
 * kv_seq_lookup() - find the longest cached prefix of @tokens and hold its blocks
 * @seq:     empty, or with a length that is a multiple of block_tokens and equal to the tokens given:
 *           then the search goes on from there (a prompt that another process is computing too)
 * @tokens:  the whole prompt, [n]
 * @ret_hit: tokens found, from the start; whole blocks, and at most n - 1: one is left to compute
 *
 * No message, no wait. Tokens are compared one by one: a hash collision is a miss.
 * Return: 0, also when nothing is found; -EINVAL; -ENOMEM.
 */
int kv_seq_lookup(struct kv_seq *seq, const int32_t *tokens, size_t n, size_t *ret_hit);

/**
 * kv_seq_lookup_partial() - likewise, and on into the block behind: its tokens are shared by a copy
 * @seq:     as for kv_seq_lookup(); what that finds is found first
 * @ret_hit: tokens found; any number, at most n - 1
 *
 * Of the cached blocks that follow the last whole one, that is held which begins with most of the tokens that
 * come next. So a prompt that is cached as a whole leaves one token to compute, and one that leaves others in
 * the midst of a block computes nothing before that. kv_seq_reserve() takes a block of the sequence's own in
 * its place, as many as without it, and notes a copy: who calls this does a batch's copies (batch.h), or
 * has its workers do them. Where the sequence has a block for these tokens already, the copy is noted here.
 *
 * The cached block is held until the copy is done. Where kv_seq_reserve() lacks room for 10 ms (its deadline, if
 * that is sooner) it lets go of it: it may be what is missing. Then len is that of whole blocks again, whether
 * there is room or not: ask kv_seq_len() what is left to compute. Extras that reach into the block must be the
 * same (identity.h), also where the tokens behind are not.
 *
 * No message, no wait; beyond kv_seq_lookup() one cache line is read, and those of at most 8 blocks. Not found is
 * what has less in common than an eighth of a block, or 8 tokens, and what more than 8 blocks have that
 * follow the same.
 * Return: as kv_seq_lookup().
 */
int kv_seq_lookup_partial(struct kv_seq *seq, const int32_t *tokens, size_t n, size_t *ret_hit);

/**
 * kv_seq_promise() - say that this sequence is about to compute the blocks of @tokens
 * @tokens:	 [n], beginning with the sequence's
 * @timeout:	 for so long others may wait for them; at most an hour
 * @ret_promised: tokens, from the start, that are this sequence's: what comes behind was promised by
 *		 another session before. NULL is allowed.
 *
 * For the engines that use kv_seq_follow(). Who must not compute what another has just published looks up once
 * more after its promise: who promises later sees this one, whoever was before has published. A promise ends when its block is published, with the sequence,
 * with this process, and after @timeout; to break it costs others their time and nothing more.
 * Return: 0; -EINVAL; -ENOMEM.
 */
int kv_seq_promise(struct kv_seq *seq, const int32_t *tokens, size_t n, int64_t timeout,
		   size_t *ret_promised);

/**
 * kv_seq_follow() - look up, and wait for what another live session has promised to compute
 * @timeout: nanoseconds; 0: don't wait, but say whether it would be worth it
 *
 * Returns as soon as the next block isn't cached and nobody computes it: all is found, or it is the
 * caller's turn, also because who promised it has ended, broken off, or let its time pass. What was
 * found is held, as by kv_seq_lookup(); the sequence must fit what that asks for.
 * Return: 0; KV_PROMISED: somebody still computes it; -EINVAL; -ENOMEM.
 */
int kv_seq_follow(struct kv_seq *seq, const int32_t *tokens, size_t n, int64_t timeout,
		  size_t *ret_hit);

/**
 * kv_seq_reserve() - room for @n_tokens in total, writable from len on
 * @timeout: how long to wait for room; 0: not at all
 *
 * All or nothing: on any other answer than 0 the sequence is as before (but for what
 * kv_seq_lookup_partial() says). Shrinks nothing.
 * Return: 0; KV_NO_ROOM; KV_TOO_LARGE if the pool never has that many blocks, or @n_tokens is
 *         more than its max_seq_tokens; -ECONNRESET.
 */
int kv_seq_reserve(struct kv_seq *seq, size_t n_tokens, int64_t timeout);

/**
 * kv_seq_append() - the next tokens, whose K and V are about to be computed
 *
 * Return: 0; -ENOSPC if capacity is too small (reserve first); -EPERM if the place is shared
 *         (reserve first).
 */
int kv_seq_append(struct kv_seq *seq, const int32_t *tokens, size_t n);

/**
 * kv_seq_fork() - a second sequence with the same tokens and blocks
 *
 * Nothing is copied until one of the two writes. Return: 0 or -ENOMEM.
 */
int kv_seq_fork(struct kv_seq *seq, struct kv_seq **ret);

/**
 * kv_seq_rollback() - forget the tokens from @n_tokens on (rejected drafts)
 * @stream: blocks that become unused are released after its work so far
 *
 * Capacity stays as far as blocks are still needed. Return: 0; -EINVAL if n_tokens > len.
 */
int kv_seq_rollback(struct kv_seq *seq, size_t n_tokens, void *stream);

/**
 * kv_seq_publish() - show complete blocks to everyone, after @stream's work so far
 *
 * Blocks whose content is already cached are exchanged for the cached ones later on, by a call of
 * this library, when no table that names them is in use any more; if those are evicted before that, the
 * sequence's own are shown by the next call. Never waits.
 * Return: 0; -EIO if the stream is broken: nothing is published.
 */
int kv_seq_publish(struct kv_seq *seq, void *stream);

/**
 * kv_seq_preempt() - give up the blocks, keep the tokens: for a sequence that makes room and goes on later
 * @stream: its blocks go after the work queued there so far
 *
 * Complete blocks are published first, so they stay cached while there is room for them. From then on len
 * and capacity are 0; tokens, fields and extras are kept for kv_seq_resume(). Promises end. The next
 * append makes it an ordinary sequence, and so does a rollback to 0, or a search for other tokens. A fork is
 * preempted as well.
 * Return: 0; of kv_seq_publish(), then nothing has changed; -EIO.
 */
int kv_seq_preempt(struct kv_seq *seq, void *stream);

/**
 * kv_seq_resume() - hold what is still cached of a preempted sequence, and have room for the rest
 * @n_tokens: room in total, at least for all that it had
 * @ret_len:  len now: tokens whose blocks were still there, at most one less than all
 *
 * All or nothing: on any other answer than 0 it stays preempted and holds nothing. The rest is computed
 * anew:
 *
 *	n = kv_seq_preempted(seq);
 *	if (!kv_seq_resume(seq, n + 1, 0, &len))
 *		kv_seq_append(seq, kv_seq_tokens(seq) + len, n - len);
 *
 * It belongs to the epoch of now (identity.h).
 * Return: as kv_seq_reserve(); -EINVAL if it isn't preempted or had more tokens; -ENOMEM.
 */
int kv_seq_resume(struct kv_seq *seq, size_t n_tokens, int64_t timeout, size_t *ret_len);

/* kv_seq_preempted() - tokens that a preempted sequence had, which kv_seq_tokens() has; 0: it isn't */
size_t kv_seq_preempted(const struct kv_seq *seq);

/* kv_seq_len(), kv_seq_capacity() - tokens in it, and tokens its blocks have room for */
size_t kv_seq_len(const struct kv_seq *seq);
size_t kv_seq_capacity(const struct kv_seq *seq);

/* kv_seq_tokens() - [len], found and appended; valid until the next append */
const int32_t *kv_seq_tokens(const struct kv_seq *seq);

/* kv_seq_blocks() - ids in order, valid until the next call for this sequence. Return: how many. */
size_t kv_seq_blocks(const struct kv_seq *seq, const kv_block_id **ret);

#ifdef __cplusplus
}
#endif
#endif
