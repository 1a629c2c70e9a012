/* SPDX-License-Identifier: Apache-2.0 */
/* Group sequences: one request in all groups of a model, or in none. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/killpoint.h"
#include "libclient/group.h"

static size_t gcd(size_t a, size_t b)
{
	while (b) {
		size_t rest = a % b;

		a = b;
		b = rest;
	}
	return a;
}

static int check_group(const struct kv_group *g, uint32_t i)
{
	uint32_t size = g->pool ? g->pool->head.block_tokens : 0;

	if (!g->pool)
		return kv_error(-EINVAL, "groups[%u].pool: none given", i);
	switch (g->kind) {
	case KV_GROUP_FULL:
		return 0;
	case KV_GROUP_WINDOW:
	case KV_GROUP_CHUNKED:
		if (!g->window)
			return kv_error(-EINVAL, "groups[%u].window: 0 given, a token sees itself", i);
		return 0;
	case KV_GROUP_STATE:
		if (!g->interval)
			return kv_error(-EINVAL, "groups[%u].interval: 0 given, tokens between "
					"checkpoints are needed", i);
		if (g->n_drafts > 255 || g->n_checkpoints > 65535)
			return kv_error(-EINVAL, "groups[%u]: n_drafts %u, n_checkpoints %u; at most 255 "
					"and 65535", i, g->n_drafts, g->n_checkpoints);
		if (size > 256)
			return kv_error(-EINVAL, "groups[%u].pool: its blocks have %u tokens; a row of "
					"state is a block of 1", i, size);
		return 0;
	default:
		return kv_error(-EINVAL, "groups[%u].kind: %u is none of FULL, WINDOW, CHUNKED, STATE", i,
				g->kind);
	}
}

static int check_options(const struct kv_groups_options *o)
{
	if (!o->n_groups || o->n_groups > KV_MAX_GROUPS || !o->groups)
		return kv_error(-EINVAL, "n_groups: %u given, 1..%d are allowed", o->n_groups,
				KV_MAX_GROUPS);
	for (uint32_t i = 0; i < o->n_groups; i++) {
		int r = check_group(&o->groups[i], i);

		if (r < 0)
			return r;
	}
	return 0;
}

/* Hits end where all groups' blocks and checkpoints do. */
static int work_out_units(struct kv_groups *groups)
{
	groups->unit = 1;
	for (uint32_t i = 0; i < groups->n; i++) {
		const struct kv_group *g = &groups->groups[i];
		size_t own = kv_group_is_state(groups, i) ? g->interval : g->pool->head.block_tokens;

		groups->unit = groups->unit / gcd(groups->unit, own) * own;
		if (groups->unit > (size_t)1 << 40)
			return kv_error(-EINVAL, "groups: their blocks and checkpoints meet only after "
					"2^40 tokens; choose sizes that divide each other");
		if (g->kind != KV_GROUP_FULL) {
			groups->needs_digests = true;
			groups->digest_unit = gcd(groups->digest_unit, own);
		}
		for (uint32_t k = 0; k < i; k++)
			groups->ordinals[i] += groups->groups[k].pool == g->pool;
	}
	if (!groups->digest_unit)
		groups->digest_unit = groups->unit;
	for (uint32_t i = 0; i < groups->n; i++) {
		if (kv_group_is_state(groups, i) && groups->unit != groups->groups[i].interval)
			return kv_error(-EINVAL, "groups[%u].interval: %u given; it must be a multiple of "
					"all groups' blocks and the same for all states: %zu",
					i, groups->groups[i].interval, groups->unit);
	}
	return 0;
}

KV_PUBLIC int kv_groups_new(const struct kv_groups_options *options, struct kv_groups **ret)
{
	struct kv_groups_options o;
	struct kv_groups *groups;
	int r = kv_options_copy(&o, sizeof(o), options);

	if (!r)
		r = check_options(&o);
	if (r < 0)
		return r;
	groups = calloc(1, sizeof(*groups));
	if (!groups)
		return kv_no_memory();
	groups->n = o.n_groups;
	groups->groups = malloc(o.n_groups * sizeof(*groups->groups));
	groups->ordinals = calloc(o.n_groups, sizeof(*groups->ordinals));
	r = groups->groups && groups->ordinals ? 0 : kv_no_memory();
	if (!r) {
		memcpy(groups->groups, o.groups, o.n_groups * sizeof(*o.groups));
		r = work_out_units(groups);
	}
	if (r < 0) {
		kv_groups_free(groups);
		return r;
	}
	*ret = groups;
	return 0;
}

KV_PUBLIC struct kv_groups *kv_groups_free(struct kv_groups *groups)
{
	if (!groups)
		return NULL;
	free(groups->groups);
	free(groups->ordinals);
	free(groups);
	return NULL;
}

KV_PUBLIC size_t kv_groups_unit(const struct kv_groups *groups)
{
	return groups->unit;
}

static struct kv_gseq *seq_alloc(struct kv_groups *groups)
{
	struct kv_gseq *seq = calloc(1, sizeof(*seq));

	if (!seq)
		return NULL;
	seq->groups = groups;
	seq->seqs = calloc(groups->n, sizeof(*seq->seqs));
	seq->states = calloc(groups->n, sizeof(*seq->states));
	if (!seq->seqs || !seq->states) {
		free(seq->seqs);
		free(seq->states);
		free(seq);
		return NULL;
	}
	for (uint32_t g = 0; g < groups->n; g++)
		kv_gstate_init(&seq->states[g]);
	groups->n_seqs++;
	return seq;
}

static void tie(struct kv_gseq *seq, uint32_t g)
{
	seq->seqs[g]->group = g;
	seq->seqs[g]->is_part = true;
	seq->seqs[g]->loose = seq->groups->groups[g].kind == KV_GROUP_FULL ? NULL : seq;
}

KV_PUBLIC int kv_gseq_new(struct kv_groups *groups, struct kv_gseq **ret)
{
	struct kv_gseq *seq = seq_alloc(groups);
	int r = seq ? 0 : kv_no_memory();

	for (uint32_t g = 0; g < groups->n && !r; g++) {
		uint32_t ordinal = groups->ordinals[g];
		struct kv_item which = { .tag = KV_TAG_GROUP, .bytes = (uint8_t *)&ordinal,
					 .n_bytes = sizeof(ordinal) };

		if (kv_group_is_state(groups, g))
			continue;
		r = kv_seq_new(groups->groups[g].pool, &seq->seqs[g]);
		if (r < 0)
			break;
		tie(seq, g);
		if (ordinal && !seq->seqs[g]->loose)
			r = kv_identity_add(&seq->seqs[g]->identity, &which);
	}
	if (r < 0) {
		kv_gseq_free(seq, NULL);
		return r;
	}
	*ret = seq;
	return 0;
}

KV_PUBLIC struct kv_gseq *kv_gseq_free(struct kv_gseq *seq, void *stream)
{
	if (!seq)
		return NULL;
	if (!kv_forked(seq->groups->groups[0].pool->fork_generation))
		kv_gseq_withdraw(seq, 0);
	for (uint32_t g = 0; g < seq->groups->n; g++) {
		kv_seq_free(seq->seqs[g], stream);
		kv_gstate_deinit(&seq->states[g], seq->groups->groups[g].pool, stream);
	}
	seq->groups->n_seqs--;
	kv_identity_deinit(&seq->identity);
	free(seq->tokens);
	free(seq->digests);
	free(seq->promises);
	free(seq->seqs);
	free(seq->states);
	free(seq);
	return NULL;
}

/* ---- identity ---- */

KV_PUBLIC int kv_gseq_field(struct kv_gseq *seq, uint32_t tag, const void *bytes, size_t n)
{
	struct kv_item item = { .tag = tag, .bytes = (uint8_t *)bytes, .n_bytes = n };

	if (seq->len)
		return kv_error(-EBUSY, "field: the sequence has %zu tokens; fields come first",
				seq->len);
	for (uint32_t g = 0; g < seq->groups->n; g++) {
		int r = seq->seqs[g] ? kv_seq_field(seq->seqs[g], tag, bytes, n) : 0;

		if (r < 0)
			return r;
	}
	/* Those that were made have no such field. */
	seq->n_digests = 0;
	return kv_item_add(&seq->identity, "field", &item);
}

KV_PUBLIC int kv_gseq_extra(struct kv_gseq *seq, const struct kv_extra *extra)
{
	struct kv_item item = { .tag = extra->tag,
				.position = extra->position,
				.n_tokens = extra->n_tokens,
				.first = extra->first,
				.bytes = (uint8_t *)extra->bytes,
				.n_bytes = extra->n_bytes };
	int r = kv_extra_check(extra, seq->len);

	for (uint32_t g = 0; g < seq->groups->n && !r; g++)
		r = seq->seqs[g] ? kv_seq_extra(seq->seqs[g], extra) : 0;
	return r ? r : kv_item_add(&seq->identity, "extra", &item);
}

/* ---- tokens ---- */

void kv_gseq_begin(struct kv_gseq *seq)
{
	for (uint32_t g = 0; g < seq->groups->n && !seq->len; g++) {
		if (seq->seqs[g])
			kv_seq_begin(seq->seqs[g]);
		seq->states[g].root = kv_serial_root(kv_pool_epoch(seq->groups->groups[g].pool));
	}
}

bool kv_gseq_is_of_now(const struct kv_gseq *seq)
{
	for (uint32_t g = 0; g < seq->groups->n; g++) {
		uint64_t root = seq->seqs[g] ? seq->seqs[g]->root : seq->states[g].root;

		if (root != kv_serial_root(kv_pool_epoch(seq->groups->groups[g].pool)))
			return false;
	}
	return true;
}

int kv_gseq_keep_tokens(struct kv_gseq *seq, const int32_t *tokens, size_t n)
{
	int r = kv_seq_grow((void **)&seq->tokens, &seq->tokens_room, n, sizeof(*tokens));

	/* They may be its own. */
	if (!r && n > seq->len)
		memmove(seq->tokens + seq->len, tokens + seq->len, (n - seq->len) * sizeof(*tokens));
	return r;
}

int kv_gseq_digest(struct kv_gseq *seq, const int32_t *tokens, size_t n_tokens)
{
	size_t unit = seq->groups->digest_unit, n = n_tokens / unit + 1;
	int r = kv_seq_grow((void **)&seq->digests, &seq->digests_room, n, sizeof(*seq->digests));

	if (r < 0)
		return r;
	for (; seq->n_digests < n; seq->n_digests++) {
		size_t end = seq->n_digests * unit;

		/* After a rollback, or at first, from the beginning. */
		if (!seq->n_hashed || seq->n_hashed > end) {
			kv_blake2b_init(&seq->hash);
			seq->n_hashed = 0;
		}
		kv_blake2b_add(&seq->hash, tokens + seq->n_hashed,
			       (end - seq->n_hashed) * sizeof(*tokens));
		seq->n_hashed = end;
		kv_prefix_digest(&seq->hash, end, &seq->identity, &seq->digests[seq->n_digests]);
	}
	return 0;
}

void kv_gseq_cut_digests(struct kv_gseq *seq)
{
	size_t most = seq->groups->needs_digests ? seq->len / seq->groups->digest_unit + 1 : 0;

	if (seq->n_digests > most)
		seq->n_digests = most;
	if (seq->n_hashed > seq->len)
		seq->n_hashed = 0;
}

/* ---- steps ---- */

static int check_append(const struct kv_gseq *seq, size_t n)
{
	for (uint32_t g = 0; g < seq->groups->n; g++) {
		const struct kv_seq *part = seq->seqs[g];

		if (kv_group_is_state(seq->groups, g)) {
			if (!kv_gstate_may_step(seq, g))
				return kv_error(-ENOSPC, "append: group %u has no row to write to; reserve "
						"first", g);
			continue;
		}
		if (n > kv_seq_capacity(part) - part->len)
			return kv_error(-ENOSPC, "append: %zu tokens to %zu, the capacity of group %u is "
					"%zu; reserve first", n, part->len, g, kv_seq_capacity(part));
		if (kv_seq_must_copy(part))
			return kv_error(-EPERM, "append: the block of group %u at %zu is shared; reserve "
					"first", g, part->len);
	}
	return 0;
}

KV_PUBLIC int kv_gseq_append(struct kv_gseq *seq, const int32_t *tokens, size_t n)
{
	size_t to = seq->len + n;
	int r = kv_forked(seq->groups->groups[0].pool->fork_generation);

	if (r < 0 || !n)
		return r;
	r = check_append(seq, n);
	if (!r)
		r = kv_seq_grow((void **)&seq->tokens, &seq->tokens_room, to, sizeof(*tokens));
	/* All memory first: then it goes on in every group. */
	for (uint32_t g = 0; g < seq->groups->n && !r; g++) {
		if (!kv_group_is_state(seq->groups, g))
			r = kv_seq_make_room(seq->seqs[g], to, seq->seqs[g]->n_blocks);
	}
	if (r < 0)
		return r;
	kv_gseq_begin(seq);
	for (uint32_t g = 0; g < seq->groups->n && !r; g++)
		r = kv_group_is_state(seq->groups, g) ? kv_gstate_step(seq, g, to) :
					       kv_seq_append(seq->seqs[g], tokens, n);
	if (r < 0)
		return r;
	memmove(seq->tokens + seq->len, tokens, n * sizeof(*tokens));
	seq->n_preempted = seq->n_partial = 0;
	seq->len = to;
	return 0;
}

KV_PUBLIC int kv_gseq_fork(struct kv_gseq *seq, struct kv_gseq **ret)
{
	const struct kv_groups *groups = seq->groups;
	struct kv_gseq *child = seq_alloc(seq->groups);
	int r = child ? kv_identity_copy(&child->identity, &seq->identity) : kv_no_memory();

	if (!r)
		r = kv_gseq_keep_tokens(child, seq->tokens, seq->len ? seq->len : seq->n_preempted);
	if (!r)
		r = kv_seq_grow((void **)&child->digests, &child->digests_room, seq->n_digests,
				sizeof(*seq->digests));
	for (uint32_t g = 0; g < groups->n && !r; g++) {
		if (kv_group_is_state(groups, g)) {
			r = kv_gstate_fork(seq, child, g);
			continue;
		}
		r = kv_seq_fork(seq->seqs[g], &child->seqs[g]);
		if (!r)
			tie(child, g);
	}
	if (r < 0) {
		kv_gseq_free(child, NULL);
		return r;
	}
	if (seq->n_digests)
		memcpy(child->digests, seq->digests, seq->n_digests * sizeof(*seq->digests));
	child->n_digests = seq->n_digests;
	child->len = seq->len;
	child->n_preempted = seq->n_preempted;
	child->n_partial = seq->n_partial;
	*ret = child;
	return 0;
}

/* Could group @g be at @n tokens? Where not, the text says why. */
static int check_rollback(const struct kv_gseq *seq, uint32_t g, size_t n)
{
	const struct kv_group *group = &seq->groups->groups[g];
	const struct kv_seq *part = seq->seqs[g];
	const struct kv_gstate *state = &seq->states[g];
	uint32_t size = group->pool->head.block_tokens;
	kv_block_id row;

	if (kv_group_is_state(seq->groups, g)) {
		if (kv_gstate_row_at(seq, g, n, &row))
			return 0;
		return kv_error(-ENODATA, "rollback: to %zu; group %u has a state at %zu%s", n, g,
				state->at, state->n_marks ? ", and checkpoints elsewhere" : "");
	}
	for (size_t i = kv_group_first(group, n) / size; i * size < n; i++) {
		if (part->table[i] == group->pool->head.null_block)
			return kv_error(-ENODATA, "rollback: to %zu; block %zu of group %u has left its "
					"window", n, i, g);
	}
	return 0;
}

KV_PUBLIC int kv_gseq_rollback(struct kv_gseq *seq, size_t n_tokens, void *stream)
{
	int r = kv_forked(seq->groups->groups[0].pool->fork_generation);
	size_t less = seq->len - n_tokens;

	if (!r && n_tokens > seq->len)
		r = kv_error(-EINVAL, "rollback: to %zu, the sequence has %zu tokens", n_tokens,
			     seq->len);
	for (uint32_t g = 0; g < seq->groups->n && !r; g++)
		r = check_rollback(seq, g, n_tokens);
	for (uint32_t g = 0; g < seq->groups->n && !r; g++)
		r = kv_group_is_state(seq->groups, g) ? kv_gstate_rollback(seq, g, n_tokens, stream) :
					       kv_seq_rollback(seq->seqs[g], n_tokens, stream);
	if (r < 0)
		return r;
	kv_gseq_withdraw(seq, n_tokens);
	seq->len = n_tokens;
	seq->n_preempted = 0;
	seq->n_partial -= less < seq->n_partial ? less : seq->n_partial;
	kv_identity_cut(&seq->identity, n_tokens);
	kv_gseq_cut_digests(seq);
	return 0;
}

KV_PUBLIC int kv_gseq_publish(struct kv_gseq *seq, void *stream)
{
	int r = kv_forked(seq->groups->groups[0].pool->fork_generation);

	if (!r && seq->groups->needs_digests)
		r = kv_gseq_digest(seq, seq->tokens, seq->len);
	for (uint32_t g = 0; g < seq->groups->n && !r; g++) {
		r = kv_group_is_state(seq->groups, g) ? kv_gstate_publish(seq, g, stream) :
					       kv_seq_publish(seq->seqs[g], stream);
		KV_KILLPOINT(client_group_published);
	}
	if (!r)
		kv_gseq_keep_promises(seq);
	return r;
}

/* Blocks before the one that is seen first leave. */
static int move_window(struct kv_gseq *seq, uint32_t g, size_t n_tokens, void *stream)
{
	const struct kv_group *group = &seq->groups->groups[g];
	struct kv_seq *part = seq->seqs[g];
	kv_block_id null_block = group->pool->head.null_block;
	size_t end = kv_group_first(group, n_tokens) / group->pool->head.block_tokens;
	int r;

	if (end <= part->n_left)
		return 0;
	/* Holes that a search has left among them are passed over. */
	r = kv_later_release(group->pool, stream, part->table + part->n_left, (uint32_t)(end - part->n_left));
	if (r < 0)
		return r;
	for (; part->n_left < end; part->n_left++) {
		part->n_holes += part->table[part->n_left] != null_block;
		part->table[part->n_left] = null_block;
	}
	return 0;
}

KV_PUBLIC int kv_gseq_done(struct kv_gseq *seq, size_t n_tokens, void *stream)
{
	int r = kv_forked(seq->groups->groups[0].pool->fork_generation);

	if (!r && n_tokens > seq->len)
		r = kv_error(-EINVAL, "done: %zu tokens, the sequence has %zu", n_tokens, seq->len);
	seq->n_partial = 0; /* windows move on: there is no way back */
	for (uint32_t g = 0; g < seq->groups->n && !r; g++) {
		if (kv_group_is_state(seq->groups, g))
			r = kv_gstate_flush(seq, g, stream);
		else if (seq->groups->groups[g].kind != KV_GROUP_FULL)
			r = move_window(seq, g, n_tokens, stream);
	}
	return r;
}

KV_PUBLIC size_t kv_gseq_len(const struct kv_gseq *seq)
{
	return seq->len;
}

KV_PUBLIC size_t kv_gseq_stop(const struct kv_gseq *seq)
{
	for (uint32_t g = 0; g < seq->groups->n; g++) {
		size_t interval = seq->groups->groups[g].interval;

		if (kv_group_is_state(seq->groups, g))
			return interval - seq->len % interval;
	}
	return SIZE_MAX;
}

KV_PUBLIC struct kv_seq *kv_gseq_seq(const struct kv_gseq *seq, uint32_t group)
{
	return group < seq->groups->n ? seq->seqs[group] : NULL;
}
