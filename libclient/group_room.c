/* SPDX-License-Identifier: Apache-2.0 */
/* Room for a sequence in all of its groups, or in none. */
#include <stdlib.h>
#include <string.h>

#include "libclient/group.h"

/* What a reservation takes: of a pool all at once, for all of its groups. */
struct taken {
	kv_block_id *ids; /* those of group g from at[g] on, then room for what a pool gives */
	uint32_t must[KV_MAX_GROUPS], may[KV_MAX_GROUPS];
	uint32_t at[KV_MAX_GROUPS], n[KV_MAX_GROUPS]; /* n: how many it has by now */
	uint32_t end;
};

/* Blocks and rows that group @g has when it has room, those of windows behind it not counted. */
static uint64_t had_by_then(const struct kv_gseq *seq, uint32_t g, size_t n_tokens)
{
	const struct kv_group *group = &seq->groups->groups[g];
	const struct kv_seq *part = seq->seqs[g];
	size_t size = group->pool->head.block_tokens, n;

	if (kv_group_is_state(seq->groups, g))
		return 1 + group->n_drafts;
	n = n_tokens / size + (n_tokens % size != 0);
	n = n > part->n_blocks ? n : part->n_blocks;
	return n > part->n_holes ? n - part->n_holes : 0;
}

/* Each group may fit its pool, and all groups of the pool together never. */
static bool never_fits(const struct kv_gseq *seq, size_t n_tokens, const struct taken *t)
{
	const struct kv_groups *groups = seq->groups;

	for (uint32_t g = 0; g < groups->n; g++) {
		const struct kv_pool *pool = groups->groups[g].pool;
		uint64_t n = 0;
		uint32_t must = 0;

		for (uint32_t i = 0; i < groups->n; i++) {
			if (groups->groups[i].pool != pool)
				continue;
			n += had_by_then(seq, i, n_tokens);
			must += t->must[i];
		}
		if (must && n > kv_pool_max_blocks(pool))
			return true;
	}
	return false;
}

static int count_need(const struct kv_gseq *seq, size_t n_tokens, struct taken *t)
{
	const struct kv_groups *groups = seq->groups;
	size_t n_must = 0;

	for (uint32_t g = 0; g < groups->n; g++) {
		int r = 0;

		t->may[g] = 0;
		if (kv_group_is_state(groups, g))
			kv_gstate_need(seq, g, n_tokens, &t->must[g], &t->may[g]);
		else
			r = kv_seq_need(seq->seqs[g], n_tokens, &t->must[g]);
		if (r)
			return r;
		t->at[g] = t->end;
		t->end += t->must[g] + t->may[g];
		n_must += t->must[g];
	}
	if (never_fits(seq, n_tokens, t))
		return KV_TOO_LARGE;
	t->ids = malloc((t->end + n_must + 1) * sizeof(*t->ids));
	return t->ids ? 0 : kv_no_memory();
}

/* What group @g and those behind it must have of its pool; 0 if one before it has asked for them. */
static uint32_t must_of_pool(const struct kv_groups *groups, const struct taken *t, uint32_t g)
{
	const struct kv_pool *pool = groups->groups[g].pool;
	uint32_t n = 0;

	for (uint32_t i = 0; i < g; i++) {
		if (groups->groups[i].pool == pool)
			return 0;
	}
	for (; g < groups->n; g++)
		n += groups->groups[g].pool == pool ? t->must[g] : 0;
	return n;
}

static void deal_out(const struct kv_groups *groups, struct taken *t, uint32_t g)
{
	const struct kv_pool *pool = groups->groups[g].pool;
	const kv_block_id *next = t->ids + t->end;

	for (; g < groups->n; g++) {
		if (groups->groups[g].pool != pool)
			continue;
		memcpy(t->ids + t->at[g], next, t->must[g] * sizeof(*next));
		next += t->must[g];
		t->n[g] = t->must[g];
	}
}

/*
 * Asked for group by group, the first one's blocks would cost a pool some of its cache also where the others
 * get none.
 */
static int take(const struct kv_gseq *seq, struct taken *t, int64_t timeout)
{
	int64_t deadline = kv_until(timeout);
	const struct kv_groups *groups = seq->groups;

	for (uint32_t g = 0; g < groups->n; g++) {
		int64_t left = timeout > 0 ? deadline - kv_now() : 0;
		uint32_t n = must_of_pool(groups, t, g);
		int r;

		kv_later_poll(groups->groups[g].pool);
		if (!n)
			continue;
		r = kv_magazine_take(groups->groups[g].pool, n, t->ids + t->end, left > 0 ? left : 0);
		if (r)
			return r;
		deal_out(groups, t, g);
	}
	/* Checkpoints are worth a try, not a wait: as many as there are. */
	for (uint32_t g = 0; g < groups->n; g++) {
		kv_block_id *ids = t->ids + t->at[g] + t->n[g];

		while (t->may[g] && kv_magazine_take(groups->groups[g].pool, t->may[g], ids, 0))
			t->may[g] /= 2;
		t->n[g] += t->may[g];
	}
	return 0;
}

static int reserve(struct kv_gseq *seq, size_t n_tokens, int64_t timeout)
{
	const struct kv_groups *groups = seq->groups;
	struct taken t = { 0 };
	uint32_t g = 0;
	int r = count_need(seq, n_tokens, &t);

	if (!r)
		r = take(seq, &t, timeout);
	for (; g < groups->n && !r; g++) {
		const kv_block_id *ids = t.ids + t.at[g];

		r = kv_group_is_state(groups, g) ? kv_gstate_reserve(seq, g, ids, t.may[g]) :
		    t.must[g]		? kv_seq_extend(seq->seqs[g], n_tokens, ids) :
					  0;
		if (r)
			break;
	}
	/* What was taken for groups that it didn't come to goes back. */
	for (; r && g < groups->n; g++) {
		for (uint32_t i = 0; i < t.n[g]; i++)
			kv_block_release(groups->groups[g].pool, t.ids[t.at[g] + i]);
	}
	free(t.ids);
	return r;
}

KV_PUBLIC int kv_gseq_reserve(struct kv_gseq *seq, size_t n_tokens, int64_t timeout)
{
	int64_t first = seq->n_partial && timeout > KV_PARTIAL_WAIT ? KV_PARTIAL_WAIT : timeout;
	int r = kv_forked(seq->groups->groups[0].pool->fork_generation);

	if (r < 0)
		return r;
	r = reserve(seq, n_tokens, first);
	if (r == KV_NO_ROOM && seq->n_partial) {
		kv_gseq_step_back(seq, seq->len - seq->n_partial);
		r = reserve(seq, n_tokens, timeout - first);
	}
	if (!r && n_tokens > seq->len)
		seq->n_partial = 0;
	return r;
}
