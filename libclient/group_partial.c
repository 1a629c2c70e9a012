/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Into the blocks behind a hit, in all groups (lookup_partial.c does it in one). Each group goes on from
 * the hit as far as it has the prompt's tokens, by less than a unit, and then all step back to where the
 * first of them ended.
 */
#include <errno.h>
#include <string.h>

#include "libclient/group.h"
#include "libclient/pin.h"

/* A whole block becomes the next of @part. */
static int adopt_whole(struct kv_seq *part, kv_block_id id, const int32_t *tokens)
{
	struct kv_pool *pool = part->pool;
	uint32_t size = pool->head.block_tokens;
	size_t i = part->len / size;
	int r = kv_seq_make_room(part, part->len + size, i + 1);

	if (r < 0)
		return r;
	/* A block reserved for these tokens was never written. */
	if (i < part->n_blocks)
		kv_block_release(pool, part->table[i]);
	else
		part->n_blocks = i + 1;
	part->table[i] = id;
	part->keys[i] = (struct kv_key){ 0, 0 };
	memcpy(part->tokens + part->len, tokens, size * sizeof(*tokens));
	part->len += size;
	part->n_submitted = part->n_settled = i + 1;
	return 0;
}

/* The next block of a window, all of it or its first tokens. Return: 1; 0: it has none; negative */
static int go_on_by_one(struct kv_gseq *seq, uint32_t g, const int32_t *tokens, size_t most)
{
	struct kv_seq *part = seq->seqs[g];
	struct kv_pool *pool = part->pool;
	size_t size = pool->head.block_tokens, begin = part->len;
	bool whole = begin + size <= most;
	kv_block_id id = whole ? kv_group_hold(seq, g, tokens, begin / size) : -1;
	struct kv_shm_row row;
	uint32_t n;
	int r;

	if (id >= 0) {
		r = adopt_whole(part, id, tokens + begin);
	} else {
		kv_group_row(seq, g, begin, begin + size, &row);
		id = kv_partial_find(pool, part->root | KV_SERIAL_ROW, &row, tokens + begin, most - begin, &n);
		if (id < 0)
			return 0;
		r = kv_seq_adopt_partial(part, id, tokens + begin, n);
	}
	if (r < 0) {
		kv_block_release(pool, id);
		return r;
	}
	kv_partial_used(pool, id);
	return part->len % size == 0;
}

static int go_on(struct kv_gseq *seq, uint32_t g, const int32_t *tokens, size_t most)
{
	struct kv_seq *part = seq->seqs[g];
	size_t hit;
	int r;

	if (seq->groups->groups[g].kind == KV_GROUP_FULL)
		return kv_seq_lookup_partial(part, tokens, most + 1, &hit);
	do {
		r = go_on_by_one(seq, g, tokens, most);
	} while (r > 0 && part->len < most);
	return r < 0 ? r : 0;
}

void kv_gseq_step_back(struct kv_gseq *seq, size_t n_tokens)
{
	for (uint32_t g = 0; g < seq->groups->n; g++) {
		struct kv_seq *part = seq->seqs[g];
		struct kv_shm_session *session = part->pool->session;
		size_t more = part->len - n_tokens;

		if (!more)
			continue;
		if (seq->groups->groups[g].kind == KV_GROUP_FULL)
			kv_store_relaxed(&session->hit_tokens, session->hit_tokens - more);
		kv_seq_let_go(part, n_tokens);
	}
	seq->len = n_tokens;
	seq->n_partial = 0;
	kv_gseq_cut_digests(seq);
}

/* A state can be found where it was kept, and nowhere else. */
static bool may_go_on(const struct kv_gseq *seq)
{
	for (uint32_t g = 0; g < seq->groups->n; g++) {
		const struct kv_seq *part = seq->seqs[g];

		if (!part || part->len != seq->len ||
		    part->n_submitted < part->len / part->pool->head.block_tokens)
			return false;
	}
	return true;
}

static int lookup_partial(struct kv_gseq *seq, const int32_t *tokens, size_t n)
{
	size_t unit = seq->groups->unit, from = seq->len, most = from + unit - 1, len;
	int r = 0;

	most = most < n - 1 ? most : n - 1;
	if (most <= from || !may_go_on(seq))
		return 0;
	kv_gseq_begin(seq);
	if (tokens != seq->tokens)
		seq->n_preempted = 0;
	r = kv_gseq_keep_tokens(seq, tokens, most);
	if (!r && seq->groups->needs_digests)
		r = kv_gseq_digest(seq, tokens, most);
	len = most;
	for (uint32_t g = 0; g < seq->groups->n && !r; g++) {
		r = go_on(seq, g, tokens, len);
		len = seq->seqs[g]->len < len ? seq->seqs[g]->len : len;
	}
	if (r < 0 || (!from && !kv_gseq_is_of_now(seq)))
		len = from;
	kv_gseq_step_back(seq, len);
	seq->n_partial = seq->len - from;
	for (uint32_t g = 0; g < seq->groups->n && !r; g++)
		r = kv_granules_need(seq->groups->groups[g].pool, kv_deadline(0));
	return r;
}

KV_PUBLIC int kv_gseq_lookup_partial(struct kv_gseq *seq, const int32_t *tokens, size_t n, size_t *ret_hit)
{
	int r = kv_gseq_lookup(seq, tokens, n, ret_hit);
	size_t whole = seq->len;

	if (!r && n)
		r = lookup_partial(seq, tokens, n);
	if (r < 0)
		return r;
	kv_gseq_note(seq, tokens, n, seq->len - whole);
	*ret_hit = seq->len;
	return 0;
}
