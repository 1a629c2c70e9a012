/* SPDX-License-Identifier: Apache-2.0 */
/* A sequence's tokens and blocks: growing, forking, rolling back, ending. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/killpoint.h"
#include "libclient/internal.h"

#define SPARE_TOKENS ((size_t)1 << 18) /* of longer sequences the arrays are not kept */

static size_t blocks_for(const struct kv_pool *pool, size_t n_tokens)
{
	uint32_t size = pool->head.block_tokens;

	return n_tokens / size + (n_tokens % size != 0);
}

int kv_seq_grow(void **array, size_t *room, size_t n, size_t item)
{
	size_t more = *room ? *room : 16;
	void *p;

	if (n <= *room)
		return 0;
	/* The last power of 2 of which twice as many bytes can be counted. */
	if (n > SIZE_MAX / 4 / item)
		return kv_error(-ENOMEM, "no memory for %zu tokens or blocks", n);
	while (more < n)
		more *= 2;
	p = realloc(*array, more * item);
	if (!p)
		return kv_no_memory();
	*array = p;
	*room = more;
	return 0;
}

KV_PUBLIC int kv_seq_new(struct kv_pool *pool, struct kv_seq **ret)
{
	int r = kv_forked(pool->fork_generation);
	struct kv_seq *seq;

	if (!r)
		r = kv_read_only(pool);
	if (r < 0)
		return r;
	seq = pool->spare ? pool->spare : calloc(1, sizeof(*seq));
	if (!seq)
		return kv_no_memory();
	pool->spare = NULL;
	seq->pool = pool;
	pool->n_seqs++;
	*ret = seq;
	return 0;
}

void kv_seq_stamp(struct kv_seq *seq, size_t first, size_t end)
{
	struct kv_shm_blocks *shared = seq->pool->blocks;
	uint64_t now;

	if (first >= end)
		return;
	now = kv_add_relaxed(&shared->clock, end - first);
	for (size_t i = first; i < end; i++) {
		if (seq->table[i] != seq->pool->head.null_block)
			kv_store_relaxed(&seq->pool->descriptors[seq->table[i]].stamp,
					 now + (end - i));
	}
}

/* Releases the blocks from @first on. */
static int release_from(struct kv_seq *seq, size_t first, void *stream)
{
	int r;

	if (first >= seq->n_blocks)
		return 0;
	r = kv_later_release(seq->pool, stream, seq->table + first,
			     (uint32_t)(seq->n_blocks - first));
	if (r < 0)
		return r;
	seq->n_blocks = first;
	if (seq->n_holes > first)
		seq->n_holes = first;
	if (seq->n_left > first)
		seq->n_left = first;
	KV_KILLPOINT(client_released);
	return 0;
}

void kv_seq_discard(struct kv_seq *seq)
{
	if (!seq)
		return;
	free(seq->tokens);
	free(seq->table);
	free(seq->keys);
	free(seq);
}

/* A heap that grows and shrinks with each request would cost more than the lookup. */
static void keep_spare(struct kv_seq *seq)
{
	struct kv_pool *pool = seq->pool;

	*seq = (struct kv_seq){ .tokens = seq->tokens,
				.tokens_room = seq->tokens_room,
				.table = seq->table,
				.table_room = seq->table_room,
				.keys = seq->keys,
				.keys_room = seq->keys_room };
	pool->spare = seq;
}

KV_PUBLIC struct kv_seq *kv_seq_free(struct kv_seq *seq, void *stream)
{
	if (!seq)
		return NULL;
	if (!kv_forked(seq->pool->fork_generation)) {
		kv_trace_send(seq);
		kv_seq_stamp(seq, 0, seq->n_submitted);
		kv_seq_withdraw(seq, 0);
		/* Where it fails the blocks stay leased until the pool is closed, or the process ends. */
		if (release_from(seq, 0, stream) < 0)
			seq->pool->lost = true;
		seq->pool->n_seqs--;
	}
	free(kv_steal(seq->traced));
	kv_identity_deinit(&seq->identity);
	if (seq->pool->spare || seq->tokens_room > SPARE_TOKENS)
		kv_seq_discard(seq);
	else
		keep_spare(seq);
	return NULL;
}

bool kv_seq_must_copy(const struct kv_seq *seq)
{
	uint32_t size = seq->pool->head.block_tokens;

	return seq->len % size && kv_block_is_shared(seq->pool, seq->table[seq->len / size]);
}

/* Where the bytes of a block lie until the noted copies are done: they are done in no order. */
static kv_block_id bytes_of(const struct kv_pool *pool, kv_block_id id)
{
	for (uint32_t i = 0; i < pool->n_copies; i++) {
		if (pool->copies[2 * i + 1] == id)
			return pool->copies[2 * i];
	}
	return id;
}

/* The caller's reference to @old goes to the copy that is noted. */
static int note_copy(struct kv_pool *pool, kv_block_id old, kv_block_id to)
{
	kv_block_id from = bytes_of(pool, old);
	size_t room = pool->copies_room;
	int r = kv_seq_grow((void **)&pool->copies, &room, pool->n_copies + 1u,
			    2 * sizeof(*pool->copies));

	if (r < 0)
		return r;
	pool->copies_room = (uint32_t)room;
	pool->copies[2 * pool->n_copies] = from;
	pool->copies[2 * pool->n_copies + 1] = to;
	pool->n_copies++;
	KV_KILLPOINT(client_copy_noted);
	if (from != old) {
		pool->refs[from]++;
		kv_block_release(pool, old);
	}
	return 0;
}

int kv_seq_need(const struct kv_seq *seq, size_t n_tokens, uint32_t *ret)
{
	size_t need = blocks_for(seq->pool, n_tokens);

	/* What it has it keeps, also where the pool may have less by now. */
	if (n_tokens > seq->pool->max_seq_tokens ||
	    (need > seq->n_blocks && need > kv_pool_max_blocks(seq->pool) + seq->n_holes))
		return KV_TOO_LARGE;
	*ret = need > seq->n_blocks ? (uint32_t)(need - seq->n_blocks) : 0;
	*ret += kv_seq_must_copy(seq) && n_tokens > seq->len;
	return 0;
}

/* Behind the table, where kv_seq_reserve() has had them put, or from elsewhere. */
int kv_seq_extend(struct kv_seq *seq, size_t n_tokens, const kv_block_id *ids)
{
	size_t need = blocks_for(seq->pool, n_tokens);
	size_t more = need > seq->n_blocks ? need - seq->n_blocks : 0;
	int r = kv_seq_grow((void **)&seq->table, &seq->table_room, seq->n_blocks + more + 1,
			    sizeof(*seq->table));

	if (r < 0)
		return r;
	memmove(seq->table + seq->n_blocks, ids, more * sizeof(*ids));
	if (kv_seq_must_copy(seq) && n_tokens > seq->len) {
		size_t at = seq->len / seq->pool->head.block_tokens;
		kv_block_id fresh = ids[more];

		r = note_copy(seq->pool, seq->table[at], fresh);
		if (r < 0)
			return r;
		seq->table[at] = fresh;
		seq->n_partial = 0;
		if (seq->n_submitted > at)
			seq->n_submitted = at;
		if (seq->n_settled > at)
			seq->n_settled = at;
	}
	seq->n_blocks += more;
	return 0;
}

int kv_seq_adopt_partial(struct kv_seq *seq, kv_block_id id, const int32_t *tokens, size_t n)
{
	size_t at = seq->len / seq->pool->head.block_tokens;
	int r = kv_seq_make_room(seq, seq->len + n, at + 1);

	if (r < 0)
		return r;
	if (at < seq->n_blocks) {
		/* It has a block of its own for these tokens: then they can be copied there. */
		r = note_copy(seq->pool, id, seq->table[at]);
		if (r < 0)
			return r;
	} else {
		seq->table[seq->n_blocks++] = id;
		seq->n_partial = n;
	}
	memcpy(seq->tokens + seq->len, tokens, n * sizeof(*tokens));
	seq->len += n;
	KV_KILLPOINT(client_partial_held);
	return 0;
}

static int reserve(struct kv_seq *seq, size_t n_tokens, int64_t timeout)
{
	struct kv_pool *pool = seq->pool;
	kv_block_id *fresh;
	uint32_t n;
	int r = kv_seq_need(seq, n_tokens, &n);

	if (r || !n)
		return r;
	/* New ids land behind the table: on failure nothing of it has changed. */
	r = kv_seq_grow((void **)&seq->table, &seq->table_room, seq->n_blocks + n + 1,
			sizeof(*seq->table));
	if (r < 0)
		return r;
	fresh = seq->table + seq->n_blocks;
	r = kv_magazine_take(pool, n, fresh, timeout);
	if (r)
		return r;
	r = kv_seq_extend(seq, n_tokens, fresh);
	for (uint32_t i = 0; r < 0 && i < n; i++)
		kv_block_release(pool, fresh[i]);
	return r;
}

static int reserve_without(struct kv_seq *seq, size_t n_tokens, int64_t timeout)
{
	struct kv_shm_session *session = seq->pool->session;

	kv_store_relaxed(&session->hit_tokens, session->hit_tokens - seq->n_partial);
	kv_seq_let_go(seq, seq->len - seq->n_partial);
	return reserve(seq, n_tokens, timeout);
}

KV_PUBLIC int kv_seq_reserve(struct kv_seq *seq, size_t n_tokens, int64_t timeout)
{
	int64_t first = seq->n_partial && timeout > KV_PARTIAL_WAIT ? KV_PARTIAL_WAIT : timeout;
	int r = kv_forked(seq->pool->fork_generation);

	if (r < 0)
		return r;
	kv_later_poll(seq->pool);
	r = reserve(seq, n_tokens, first);
	return r == KV_NO_ROOM && seq->n_partial ? reserve_without(seq, n_tokens, timeout - first) : r;
}

KV_PUBLIC int kv_seq_append(struct kv_seq *seq, const int32_t *tokens, size_t n)
{
	int r = kv_forked(seq->pool->fork_generation);

	if (r < 0 || !n)
		return r;
	if (n > kv_seq_capacity(seq) - seq->len)
		return kv_error(-ENOSPC, "append: %zu tokens to %zu, the capacity is %zu; reserve first",
				n, seq->len, kv_seq_capacity(seq));
	if (kv_seq_must_copy(seq))
		return kv_error(-EPERM, "append: the block at %zu is shared; reserve first", seq->len);
	r = kv_seq_grow((void **)&seq->tokens, &seq->tokens_room, seq->len + n, sizeof(*tokens));
	if (r < 0)
		return r;
	if (!seq->len && !seq->is_part)
		kv_seq_begin(seq);
	/* They may be its own, of before it was preempted. */
	memmove(seq->tokens + seq->len, tokens, n * sizeof(*tokens));
	seq->len += n;
	seq->n_preempted = 0;
	return 0;
}

KV_PUBLIC int kv_seq_fork(struct kv_seq *seq, struct kv_seq **ret)
{
	size_t n = blocks_for(seq->pool, seq->len);
	size_t n_kept = seq->len ? seq->len : seq->n_preempted;
	struct kv_seq *child;
	int r = kv_seq_new(seq->pool, &child);

	if (r < 0)
		return r;
	r = kv_seq_grow((void **)&child->tokens, &child->tokens_room, n_kept, sizeof(*seq->tokens));
	if (!r)
		r = kv_seq_grow((void **)&child->table, &child->table_room, n, sizeof(*seq->table));
	if (!r)
		r = kv_seq_grow((void **)&child->keys, &child->keys_room, seq->n_submitted,
				sizeof(*seq->keys));
	if (!r)
		r = kv_identity_copy(&child->identity, &seq->identity);
	if (r < 0) {
		kv_seq_free(child, NULL);
		return r;
	}
	if (n_kept)
		memcpy(child->tokens, seq->tokens, n_kept * sizeof(*seq->tokens));
	if (seq->n_submitted)
		memcpy(child->keys, seq->keys, seq->n_submitted * sizeof(*seq->keys));
	for (size_t i = 0; i < n; i++) {
		child->table[i] = seq->table[i];
		if (seq->table[i] != seq->pool->head.null_block)
			seq->pool->refs[seq->table[i]]++;
	}
	child->len = seq->len;
	child->n_preempted = seq->n_preempted;
	child->n_partial = seq->n_partial;
	child->root = seq->root;
	child->n_holes = seq->n_holes;
	child->n_left = seq->n_left;
	child->n_blocks = n;
	child->n_submitted = seq->n_submitted;
	child->n_settled = seq->n_settled;
	KV_KILLPOINT(client_forked);
	*ret = child;
	return 0;
}

int kv_seq_empty(struct kv_seq *seq, void *stream)
{
	int r;

	kv_seq_withdraw(seq, 0);
	r = release_from(seq, 0, stream);
	if (r < 0)
		return r;
	seq->len = 0;
	seq->n_partial = 0;
	seq->n_submitted = seq->n_settled = 0;
	return 0;
}

/* Its blocks from there on have been released. */
static void shorten(struct kv_seq *seq, size_t n_tokens)
{
	size_t whole = n_tokens / seq->pool->head.block_tokens, less = seq->len - n_tokens;

	seq->n_partial -= less < seq->n_partial ? less : seq->n_partial;
	seq->len = n_tokens;
	if (seq->n_submitted > whole)
		seq->n_submitted = whole;
	if (seq->n_settled > whole)
		seq->n_settled = whole;
}

void kv_seq_let_go(struct kv_seq *seq, size_t n_tokens)
{
	for (size_t i = blocks_for(seq->pool, n_tokens); i < seq->n_blocks; i++)
		kv_block_release(seq->pool, seq->table[i]);
	seq->n_blocks = blocks_for(seq->pool, n_tokens);
	if (seq->n_holes > seq->n_blocks)
		seq->n_holes = seq->n_blocks;
	if (seq->n_left > seq->n_blocks)
		seq->n_left = seq->n_blocks;
	shorten(seq, n_tokens);
}

KV_PUBLIC int kv_seq_rollback(struct kv_seq *seq, size_t n_tokens, void *stream)
{
	int r = kv_forked(seq->pool->fork_generation);

	if (r < 0)
		return r;
	if (n_tokens > seq->len)
		return kv_error(-EINVAL, "rollback: to %zu, the sequence has %zu tokens", n_tokens,
				seq->len);
	kv_seq_withdraw(seq, n_tokens / seq->pool->head.block_tokens);
	r = release_from(seq, blocks_for(seq->pool, n_tokens), stream);
	if (r < 0)
		return r;
	shorten(seq, n_tokens);
	seq->n_preempted = 0;
	kv_identity_cut(&seq->identity, n_tokens);
	if (seq->n_asked > n_tokens)
		seq->n_asked = n_tokens;
	KV_KILLPOINT(client_rolled_back);
	return 0;
}

KV_PUBLIC size_t kv_seq_len(const struct kv_seq *seq)
{
	return seq->len;
}

KV_PUBLIC size_t kv_seq_capacity(const struct kv_seq *seq)
{
	return seq->n_blocks * seq->pool->head.block_tokens;
}

KV_PUBLIC const int32_t *kv_seq_tokens(const struct kv_seq *seq)
{
	return seq->tokens;
}

KV_PUBLIC size_t kv_seq_blocks(const struct kv_seq *seq, const kv_block_id **ret)
{
	*ret = seq->table;
	return seq->n_blocks;
}
