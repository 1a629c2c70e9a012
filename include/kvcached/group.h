/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sequences of models whose layers keep different things: all tokens, a window of them, a state.
 *
 * Layers that keep the same are a group; each group has its blocks in a pool (plan.h says which;
 * several groups may share one). A group sequence is one request in all of them: it is found,
 * grown, forked, rolled back, published and freed in every group or in none.
 *
 *   kind       keeps                              a prefix of L tokens is there if
 *   FULL       all blocks                         its blocks from the first on are
 *   WINDOW     blocks that the next token sees    those of tokens L - window + 1 .. L - 1 are
 *   CHUNKED    blocks of the chunk it is in       those from the last multiple of window on are
 *   STATE      one row, and checkpoints           the row of L tokens is
 *
 *	KV_OPTIONS(kv_groups_options, what, .n_groups = 2, .groups = (struct kv_group[]){
 *		{ .kind = KV_GROUP_FULL, .pool = kv },
 *		{ .kind = KV_GROUP_STATE, .pool = rows, .interval = 1024 } });
 *	kv_groups_new(&what, &groups);
 *	kv_gseq_new(groups, &seq);
 *	kv_gseq_lookup(seq, prompt, n, &hit);		in tokens, the same in all groups
 *	kv_gseq_reserve(seq, n, KV_SEC);		in all groups, or in none
 *	kv_gseq_append(seq, prompt + hit, n - hit);
 *	kv_batch_build(batch, &(struct kv_batch_item){ kv_gseq_seq(seq, 0), n - hit }, 1, 0, 0);
 *	kv_state_lanes(&seq, 1, 1, 1, &lanes);		rows to read and to write (state.h)
 *	... the step ...
 *	kv_gseq_publish(seq, stream);
 *	kv_gseq_done(seq, n, stream);			its results are back: windows move on
 *
 * How it is found. A FULL block is what sequence.h says. Blocks of the other kinds are found without
 * those before them, which may be gone: their own tokens are compared one by one, and all tokens,
 * fields and extras before them by a BLAKE2b-256 of them all. Nothing is offered that not all groups
 * have.
 *
 * States. A sequence has 1 + n_drafts rows of its own. A step reads the row where the state is and
 * writes to its own: a checkpoint that is found is read from where it is, and nothing is copied. The
 * same after a fork. (A kernel that works in place has the row copied first: kv_copy_blocks(), from
 * read_rows to write_rows, where they differ.) Row 0 tokens long is no row: the first chunk starts
 * from zero, whatever its row held.
 *
 * Threads: as its pools: one at a time.
 */
#ifndef KVCACHED_GROUP_H
#define KVCACHED_GROUP_H

#include <kvcached/identity.h>
#include <kvcached/plan.h>
#include <kvcached/sequence.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KV_MAX_GROUPS 64

struct kv_group {
	uint32_t kind; /* enum kv_group_kind (plan.h), not KV_GROUP_CROSS */
	struct kv_pool *pool; /* of a STATE: rows are its blocks */
	uint32_t window;      /* WINDOW: tokens that a token sees, itself included. CHUNKED: of a chunk */
	/* STATE: */
	uint32_t interval;	/* tokens from checkpoint to checkpoint; a multiple of all block_tokens */
	uint32_t n_drafts;	/* tokens of a step that may be rolled back one by one */
	uint32_t n_checkpoints; /* how many of its own a sequence goes on holding; 0: one */
};

struct kv_groups_options {
	size_t size;
	const struct kv_group *groups;
	uint32_t n_groups;
};

struct kv_groups;
struct kv_gseq;

/**
 * kv_plan_to_groups() - a plan's groups as kv_groups_new() takes them
 * @pools:	[plan->n_pools] the plan's pools, opened in its order (kv_pool_options::plan, plan_pool); those
 *		of an encoder's output may be NULL
 * @options:	what was planned with: drafts and checkpoints of states; NULL: none
 * @interval:	tokens from checkpoint to checkpoint of states; 0: the plan's prefix_tokens, which it must be a
 *		multiple of
 * @ret_groups: room for plan->n_groups
 * @ret_which:	[plan->n_groups] which of @ret_groups a group of the plan has become; UINT32_MAX: none, it is
 *		an encoder's output, which one sequence has as a whole. NULL is allowed.
 *
 * Where a block has the components of several groups (layouts flat, split, paged) they are one: FULL if
 * any of them keeps all tokens, or has its state in the block; the widest of several windows.
 *
 * Return: how many groups; -EINVAL, a pool isn't the plan's; -ENOTSUP, the text says why: groups whose
 *	   blocks have different numbers of tokens in one pool (layout slab).
 */
int kv_plan_to_groups(const struct kv_plan *plan, struct kv_pool *const *pools,
		      const struct kv_plan_options *options, uint32_t interval,
		      struct kv_group *ret_groups, uint32_t *ret_which);

/**
 * kv_groups_new() - the groups of a model; pools stay the caller's and must outlive them
 *
 * All engines that share prefixes give the same groups in the same order.
 * Return: 0; -EINVAL, the text names group and field; -ENOMEM.
 */
int kv_groups_new(const struct kv_groups_options *options, struct kv_groups **ret);

/* kv_groups_free() - its sequences must have been freed. NULL is allowed. Return: NULL. */
struct kv_groups *kv_groups_free(struct kv_groups *groups);

/* kv_groups_unit() - hits are multiples of this many tokens */
size_t kv_groups_unit(const struct kv_groups *groups);

/* kv_gseq_new() - an empty sequence in each group. Return: 0 or -ENOMEM. */
int kv_gseq_new(struct kv_groups *groups, struct kv_gseq **ret);

/* kv_gseq_free() - after @stream's work so far. NULL is allowed. Return: NULL. */
struct kv_gseq *kv_gseq_free(struct kv_gseq *seq, void *stream);

/* kv_gseq_field(), kv_gseq_extra() - as kv_seq_field(), kv_seq_extra() (identity.h) */
int kv_gseq_field(struct kv_gseq *seq, uint32_t tag, const void *bytes, size_t n);
int kv_gseq_extra(struct kv_gseq *seq, const struct kv_extra *extra);

/**
 * kv_gseq_lookup() - the longest prefix that every group has, held in all of them
 * @seq:     empty, or with tokens up to a multiple of the unit, all of them published: goes on from there
 * @ret_hit: tokens, a multiple of the unit, at most n - 1; what no longer prefix needs isn't held
 *
 * Return: 0, also when nothing is found; -EINVAL; -ENOMEM.
 */
int kv_gseq_lookup(struct kv_gseq *seq, const int32_t *tokens, size_t n, size_t *ret_hit);

/**
 * kv_gseq_lookup_partial() - likewise, and on into the blocks behind, in all groups
 * @ret_hit: tokens, at most n - 1, less than a unit more than kv_gseq_lookup() finds
 *
 * As kv_seq_lookup_partial(): kv_gseq_reserve() notes a copy in each group whose last block goes on otherwise, and
 * falls back to whole units where there is no room: ask kv_gseq_len(). Beside a state it finds nothing more,
 * as a state is kept at multiples of the unit alone.
 * Return: as kv_gseq_lookup().
 */
int kv_gseq_lookup_partial(struct kv_gseq *seq, const int32_t *tokens, size_t n, size_t *ret_hit);

/**
 * kv_gseq_promise(), kv_gseq_follow() - as kv_seq_promise() and kv_seq_follow(), in all groups
 *
 * In steps of the unit. A promise is kept when a step that reached its length was published; where a group
 * has nothing to show for it (there was no row for a checkpoint), who waits goes on after a moment.
 */
int kv_gseq_promise(struct kv_gseq *seq, const int32_t *tokens, size_t n, int64_t timeout,
		    size_t *ret_promised);
int kv_gseq_follow(struct kv_gseq *seq, const int32_t *tokens, size_t n, int64_t timeout,
		   size_t *ret_hit);

/**
 * kv_gseq_reserve() - room for @n_tokens in total, in every group
 *
 * All or nothing. Rows for checkpoints come too as far as there are any: where there are none a
 * checkpoint is left out, and nothing else happens.
 * Return: as kv_seq_reserve().
 */
int kv_gseq_reserve(struct kv_gseq *seq, size_t n_tokens, int64_t timeout);

/**
 * kv_gseq_append() - the tokens that the next step computes
 *
 * With a state, one append is one step: what it reads and writes stands until the next.
 * Return: as kv_seq_append(); -ENOSPC also if a state has no row to write to (reserve first).
 */
int kv_gseq_append(struct kv_gseq *seq, const int32_t *tokens, size_t n);

/* kv_gseq_fork() - a second sequence with the same tokens, blocks and state. 0 or -ENOMEM. */
int kv_gseq_fork(struct kv_gseq *seq, struct kv_gseq **ret);

/**
 * kv_gseq_rollback() - forget the tokens from @n_tokens on, in all groups or in none
 *
 * A state is there for: no tokens; the tokens it has; checkpoints that the sequence holds; with
 * n_drafts, each token of a step of at most 1 + n_drafts; the beginning of a step that read another row.
 * Return: 0; -EINVAL if n_tokens > len; -ENODATA if a group can't: nothing has changed, the text
 *         says which and where it could.
 */
int kv_gseq_rollback(struct kv_gseq *seq, size_t n_tokens, void *stream);

/* kv_gseq_publish() - complete blocks and checkpoints, as kv_seq_publish() */
int kv_gseq_publish(struct kv_gseq *seq, void *stream);

/**
 * kv_gseq_done() - the results of the first @n_tokens are back and stay
 *
 * Blocks that no later token sees leave windows: their entries in tables become the null block. Not those
 * of tokens in flight, and not those that a rollback to @n_tokens needs.
 * Return: 0; -EINVAL if n_tokens > len; -EIO.
 */
int kv_gseq_done(struct kv_gseq *seq, size_t n_tokens, void *stream);

/**
 * kv_gseq_preempt(), kv_gseq_resume(), kv_gseq_preempted() - as kv_seq_preempt() and so on, in all groups
 *
 * Of a state what stays are its checkpoints; its rows go with the blocks.
 */
int kv_gseq_preempt(struct kv_gseq *seq, void *stream);
int kv_gseq_resume(struct kv_gseq *seq, size_t n_tokens, int64_t timeout, size_t *ret_len);
size_t kv_gseq_preempted(const struct kv_gseq *seq);

/* kv_gseq_tokens() - [len], or [kv_gseq_preempted()]; valid until the next append */
const int32_t *kv_gseq_tokens(const struct kv_gseq *seq);

/* kv_gseq_len() - tokens in the sequence: found in the cache, or appended */
size_t kv_gseq_len(const struct kv_gseq *seq);

/**
 * kv_gseq_stop() - tokens until a state can be kept as a checkpoint without writing it twice
 *
 * A step that ends there publishes the row it wrote. One that goes on beyond writes one more row.
 * Return: 1.. ; SIZE_MAX without states.
 */
size_t kv_gseq_stop(const struct kv_gseq *seq);

/* kv_gseq_seq() - a group's blocks, to read and for batches; NULL for a STATE */
struct kv_seq *kv_gseq_seq(const struct kv_gseq *seq, uint32_t group);

/* Arrays of the caller, for a kv_state_batch (state.h). */
struct kv_state_lanes {
	int32_t *read_rows;  /* [n_lanes] */
	int32_t *write_rows; /* [n_lanes] */
	int32_t *n_computed; /* [n_lanes]; or NULL */
	int32_t *step_rows;  /* [n_lanes, 1 + n_drafts] state after each token of a short step; or NULL */
	int32_t *table;	     /* [n_lanes, table_width] checkpoints that this step passes; or NULL */
	uint32_t table_width; /* at least tokens / interval; for a kv_state_batch that rounded up, at least 1 */
};

/**
 * kv_state_lanes() - which rows the last append of each sequence reads and writes
 * @seqs: [n_seqs]; lanes from n_seqs to @n_lanes are padding: the null row, which nothing reads or writes
 *
 * Where nothing is read (a first chunk) or written there, rows are -1. write_rows is -1 where step_rows
 * has the last state.
 * Return: 0; -EINVAL if @group is no STATE, a table is too narrow, or a step needs step_rows or a table
 *         that isn't given.
 */
int kv_state_lanes(struct kv_gseq *const *seqs, uint32_t n_seqs, uint32_t n_lanes, uint32_t group,
		   const struct kv_state_lanes *lanes);

#ifdef __cplusplus
}
#endif
#endif
