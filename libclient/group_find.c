/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The longest prefix that all groups have.
 *
 * Groups that keep all tokens say how long it can be at most; the others shorten it, each to the
 * longest that it has, until all agree. A window or a state is looked at from the end: what it has
 * further back matters only if nothing longer will do.
 *
 * Epochs of pools change one after the other, and between two looks of a search. What was found is of one
 * state of the weights if all epochs are at its end what they were before it: whoever has new weights shows what it
 * computes with them when all epochs have changed.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "libclient/group.h"
#include "libclient/pin.h"

#define UNKNOWN ((kv_block_id)-2)
#define MISSING ((kv_block_id)-1)
#define EPOCH_TRIES 4 /* so often in one search weights don't change */

/* What a group has of the prompt: held until it is adopted or let go. */
struct candidates {
	kv_block_id *blocks; /* [n] of a WINDOW or CHUNKED, by block */
	size_t n;
	size_t state_at; /* STATE: tokens of the row below; 0: none */
	kv_block_id state;
};

struct search {
	struct kv_gseq *seq;
	const int32_t *tokens;
	size_t base, best; /* tokens: had before, and the longest that may be */
	bool again; /* an epoch has changed meanwhile: nothing was found */
	struct candidates *groups;
};

void kv_group_row(const struct kv_gseq *seq, uint32_t group, size_t begin, size_t end,
		  struct kv_shm_row *ret)
{
	kv_prefix_digest_row(&seq->digests[begin / seq->groups->digest_unit], &seq->identity,
			     seq->groups->ordinals[group], begin, end, ret);
}

void kv_group_key(const struct kv_gseq *seq, uint32_t group, size_t begin, size_t end,
		  const int32_t *tokens, struct kv_key *ret_key, struct kv_shm_row *ret_row)
{
	const struct kv_groups *groups = seq->groups;
	const struct kv_shm_pool *head = &groups->groups[group].pool->head;
	struct kv_key key = { 0, 0 };

	kv_group_row(seq, group, begin, end, ret_row);
	key = kv_key_fold(head->seed, key, ret_row, sizeof(*ret_row));
	key = kv_key_next(head->seed, key, tokens, head->block_tokens);
	ret_key->lo = key.lo & head->key_mask;
	ret_key->hi = key.hi & head->key_mask;
}

size_t kv_group_first(const struct kv_group *group, size_t len)
{
	if (group->kind == KV_GROUP_CHUNKED)
		return len / group->window * group->window;
	if (group->kind == KV_GROUP_WINDOW)
		return len >= group->window ? len - group->window + 1 : 0;
	return 0;
}

static bool is_windowed(const struct kv_group *group)
{
	return group->kind == KV_GROUP_WINDOW || group->kind == KV_GROUP_CHUNKED;
}

kv_block_id kv_group_hold(const struct kv_gseq *seq, uint32_t group, const int32_t *prompt, size_t i)
{
	const struct kv_seq *part = seq->seqs[group];
	struct kv_pool *pool = part->pool;
	uint32_t size = pool->head.block_tokens, cursor = 0;
	const int32_t *tokens = prompt + i * size;
	struct kv_shm_row row;
	struct kv_key key;
	kv_block_id id;

	kv_group_key(seq, group, i * size, (i + 1) * size, tokens, &key, &row);
	do {
		id = kv_prefix_find(&pool->prefix, key, &cursor);
	} while (id >= 0 && !kv_pin(pool, id, part->root | KV_SERIAL_ROW, tokens, size, &row));
	return id;
}

/* Is block @i there, found or had before? */
static bool has_block(struct search *s, uint32_t group, size_t i)
{
	const struct kv_seq *part = s->seq->seqs[group];
	struct candidates *c = &s->groups[group];

	if (i < s->base / part->pool->head.block_tokens)
		return part->table[i] != part->pool->head.null_block;
	if (c->blocks[i] == UNKNOWN)
		c->blocks[i] = kv_group_hold(s->seq, group, s->tokens, i);
	return c->blocks[i] != MISSING;
}

/* The longest prefix up to @len that a window has: @len, or less. */
static size_t shorten_window(struct search *s, uint32_t group, size_t len)
{
	const struct kv_group *g = &s->seq->groups->groups[group];
	size_t size = g->pool->head.block_tokens, unit = s->seq->groups->unit;

	while (len > s->base) {
		size_t first = kv_group_first(g, len) / size, i = len / size;

		while (i > first && has_block(s, group, i - 1))
			i--;
		if (i <= first)
			return len;
		/* Block i - 1 isn't there: no prefix that ends behind it will do. */
		len = (i - 1) * size / unit * unit;
	}
	return s->base;
}

static size_t shorten_state(struct search *s, uint32_t group, size_t len)
{
	struct candidates *c = &s->groups[group];

	for (; len > s->base; len -= s->seq->groups->unit) {
		if (c->state_at == len)
			return len;
		if (c->state_at) {
			kv_block_release(s->seq->groups->groups[group].pool, c->state);
			c->state_at = 0;
		}
		c->state = kv_gstate_find(s->seq, group, len);
		if (c->state != MISSING) {
			c->state_at = len;
			return len;
		}
	}
	return s->base;
}

static void agree(struct search *s)
{
	const struct kv_groups *groups = s->seq->groups;
	size_t before;

	do {
		before = s->best;
		for (uint32_t g = 0; g < groups->n; g++) {
			if (groups->groups[g].kind == KV_GROUP_STATE)
				s->best = shorten_state(s, g, s->best);
			else if (is_windowed(&groups->groups[g]))
				s->best = shorten_window(s, g, s->best);
		}
	} while (s->best != before);
}

/* Groups with all tokens: their own lookup, which also shortens. */
static int look_up_full(struct search *s, uint32_t group)
{
	size_t unit = s->seq->groups->unit, hit;
	int r = kv_seq_lookup(s->seq->seqs[group], s->tokens, s->best + 1, &hit);

	if (r < 0)
		return r;
	hit = hit / unit * unit;
	s->best = hit > s->base ? hit : s->base;
	return 0;
}

/* What is held beyond the length that was agreed on is let go. */
static void trim_full(struct search *s, uint32_t group)
{
	struct kv_seq *part = s->seq->seqs[group];
	struct kv_shm_session *session = part->pool->session;
	size_t more = part->len - s->best;

	if (!more)
		return;
	kv_store_relaxed(&session->hit_tokens, session->hit_tokens - more);
	kv_seq_let_go(part, s->best);
}

static void adopt_window(struct search *s, uint32_t group)
{
	const struct kv_group *g = &s->seq->groups->groups[group];
	struct kv_seq *part = s->seq->seqs[group];
	struct kv_pool *pool = g->pool;
	size_t size = pool->head.block_tokens, end = s->best / size;
	size_t first = kv_group_first(g, s->best) / size;
	struct candidates *c = &s->groups[group];

	for (size_t i = s->base / size; i < end; i++) {
		kv_block_id id = i >= first ? c->blocks[i] : pool->head.null_block;

		if (i >= first) {
			c->blocks[i] = UNKNOWN; /* it has moved */
			kv_ops_try(pool, &(struct kv_op){ .kind = KV_OP_TOUCH, .id = id, .parent = 1 });
		} else {
			part->n_holes++;
		}
		/* A block reserved for these tokens was never written. */
		if (i < part->n_blocks)
			kv_block_release(pool, part->table[i]);
		part->table[i] = id;
		part->keys[i] = (struct kv_key){ 0, 0 };
	}
	memcpy(part->tokens + s->base, s->tokens + s->base, (s->best - s->base) * sizeof(*s->tokens));
	part->n_blocks = end > part->n_blocks ? end : part->n_blocks;
	part->n_submitted = part->n_settled = end;
	part->len = s->best;
	kv_seq_stamp(part, first, end);
}

/* Lets go of what was held and isn't part of it. */
static void let_go(struct search *s)
{
	for (uint32_t g = 0; s->groups && g < s->seq->groups->n; g++) {
		struct candidates *c = &s->groups[g];
		struct kv_pool *pool = s->seq->groups->groups[g].pool;

		for (size_t i = 0; i < c->n; i++) {
			if (c->blocks[i] >= 0)
				kv_block_release(pool, c->blocks[i]);
		}
		if (c->state_at)
			kv_block_release(pool, c->state);
		free(c->blocks);
	}
	free(kv_steal(s->groups));
}

static int search_init(struct search *s)
{
	const struct kv_groups *groups = s->seq->groups;

	s->groups = calloc(groups->n, sizeof(*s->groups));
	if (!s->groups)
		return kv_no_memory();
	for (uint32_t g = 0; g < groups->n; g++) {
		struct candidates *c = &s->groups[g];
		size_t n = s->best / groups->groups[g].pool->head.block_tokens;

		if (!is_windowed(&groups->groups[g]))
			continue;
		c->blocks = malloc((n + 1) * sizeof(*c->blocks));
		if (!c->blocks)
			return kv_no_memory();
		for (; c->n < n; c->n++)
			c->blocks[c->n] = UNKNOWN;
		/* From here on, what is found can be adopted without asking for memory. */
		if (kv_seq_make_room(s->seq->seqs[g], s->best, n) < 0)
			return kv_no_memory();
	}
	return 0;
}

static void adopt(struct search *s)
{
	const struct kv_groups *groups = s->seq->groups;

	for (uint32_t g = 0; g < groups->n; g++) {
		if (groups->groups[g].kind == KV_GROUP_STATE) {
			kv_gstate_adopt(s->seq, g, s->best, s->groups[g].state);
			s->groups[g].state_at = 0;
		} else if (is_windowed(&groups->groups[g])) {
			adopt_window(s, g);
		}
	}
}

/* What goes on from tokens of its own stays in their epoch. */
static void look_at_epochs(struct search *s)
{
	s->again = !s->base && s->best && !kv_gseq_is_of_now(s->seq);
	if (s->again)
		s->best = 0;
}

static int find(struct search *s)
{
	const struct kv_groups *groups = s->seq->groups;
	int r = 0;

	for (uint32_t g = 0; g < groups->n && !r; g++) {
		if (groups->groups[g].kind == KV_GROUP_FULL)
			r = look_up_full(s, g);
	}
	if (!r && groups->needs_digests && s->best > s->base) {
		r = kv_gseq_digest(s->seq, s->tokens, s->best);
		if (!r)
			r = search_init(s);
		if (!r) {
			agree(s);
			look_at_epochs(s);
			if (s->best > s->base)
				adopt(s);
		}
		let_go(s);
	} else if (!r) {
		look_at_epochs(s);
	}
	if (r < 0)
		s->best = s->base;
	for (uint32_t g = 0; g < groups->n; g++) {
		if (groups->groups[g].kind == KV_GROUP_FULL)
			trim_full(s, g);
	}
	return r;
}

/* Everything that was computed so far must be shown already: what is found follows it. */
static bool may_go_on(const struct kv_gseq *seq)
{
	for (uint32_t g = 0; g < seq->groups->n; g++) {
		const struct kv_seq *part = seq->seqs[g];

		if (part && part->n_submitted < part->len / part->pool->head.block_tokens)
			return false;
	}
	return true;
}

static int lookup(struct kv_gseq *seq, const int32_t *tokens, size_t n, size_t *ret_hit)
{
	size_t unit = seq->groups->unit;
	struct search s = { .seq = seq,
			    .tokens = tokens,
			    .base = seq->len,
			    .best = n ? (n - 1) / unit * unit : 0 };
	int r = kv_forked(seq->groups->groups[0].pool->fork_generation);

	if (r < 0)
		return r;
	if (seq->len % unit)
		return kv_error(-EINVAL, "lookup: the sequence has %zu tokens, not a multiple of %zu",
				seq->len, unit);
	if (seq->len > n || (seq->len && memcmp(seq->tokens, tokens, seq->len * sizeof(*tokens))))
		return kv_error(-EINVAL, "lookup: the sequence's %zu tokens are not the beginning of "
				"those given", seq->len);
	*ret_hit = seq->len;
	if (s.best <= s.base || !may_go_on(seq))
		return 0;
	if (tokens != seq->tokens)
		seq->n_preempted = 0;
	r = kv_gseq_keep_tokens(seq, tokens, s.best);
	for (int tries = 0; !r && (!tries || (s.again && tries < EPOCH_TRIES)); tries++) {
		s.best = (n - 1) / unit * unit;
		kv_gseq_begin(seq);
		r = find(&s);
	}
	if (!r)
		seq->len = s.best;
	/* Of another prompt by the next time. */
	kv_gseq_cut_digests(seq);
	if (r < 0)
		return r;
	*ret_hit = seq->len;
	for (uint32_t g = 0; !r && g < seq->groups->n; g++)
		r = kv_granules_need(seq->groups->groups[g].pool, kv_deadline(0));
	return r;
}

/* One request, told of by the first of its sequences. */
void kv_gseq_note(const struct kv_gseq *seq, const int32_t *tokens, size_t n, size_t n_found)
{
	for (uint32_t g = 0; g < seq->groups->n; g++) {
		if (!seq->seqs[g])
			continue;
		if (kv_is_traced(seq->seqs[g]->pool))
			kv_trace_note(seq->seqs[g], tokens, n, n_found);
		return;
	}
}

KV_PUBLIC int kv_gseq_lookup(struct kv_gseq *seq, const int32_t *tokens, size_t n, size_t *ret_hit)
{
	size_t before = seq->len;
	int r = lookup(seq, tokens, n, ret_hit);

	if (!r)
		kv_gseq_note(seq, tokens, n, *ret_hit - before);
	return r;
}
