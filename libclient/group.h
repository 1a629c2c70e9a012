/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Group sequences inside.
 *
 *   group.c        groups, and what a sequence does in all of them
 *   group_find.c   the longest prefix that all groups have
 *   group_partial.c  and into the blocks behind it
 *   group_promise.c  waiting for what others compute
 *   group_room.c   room in all groups, or in none
 *   group_state.c  rows of states: which is read, which is written, which are kept
 */
#ifndef KV_LIBCLIENT_GROUP_H
#define KV_LIBCLIENT_GROUP_H

#include "include/kvcached/group.h"
#include "libclient/internal.h"

struct kv_groups {
	struct kv_group *groups; /* [n] */
	uint32_t n;
	uint32_t *ordinals;  /* [n] which of the groups of its pool */
	size_t unit;	     /* of hits, tokens: a common multiple of what groups need */
	size_t digest_unit;  /* tokens from one digest to the next */
	bool needs_digests;  /* a group is found by them */
	uint32_t n_seqs;
};

struct kv_mark {
	size_t at;	 /* tokens */
	kv_block_id row; /* has the state after them; one reference */
	bool written; /* a step was told to write it */
	bool published;
};

/* A sequence in one STATE group. Every id in it is a reference, but `row` and `read`. */
struct kv_gstate {
	kv_block_id *own; /* [n_own] rows that steps write to */
	uint32_t n_own;	  /* 0 until the first reservation, else 1 + n_drafts */
	kv_block_id row;  /* has the state of `at` tokens; -1: none (at == 0) */
	size_t at;
	uint64_t root; /* as kv_seq::root */
	kv_block_id found; /* a checkpoint of others, or a row left to a fork; -1 */
	/* The last step. */
	kv_block_id read; /* -1: none */
	size_t from;
	bool wrote_elsewhere; /* than in the row it read */
	bool by_steps; /* own[i] has the state after its token i */
	kv_block_id *spare; /* [n_spare] for checkpoints */
	size_t n_spare, spare_room;
	struct kv_mark *marks; /* [n_marks] by `at` */
	size_t n_marks, marks_room;
	kv_block_id *drops; /* [n_drops] to be released when the work that reads them is over */
	size_t n_drops, drops_room;
};

struct kv_gseq {
	struct kv_groups *groups;
	size_t len;
	int32_t *tokens;
	size_t tokens_room;
	size_t n_preempted; /* tokens that it had, while len is 0 */
	size_t n_partial; /* the last tokens, found behind whole units; 0 once there is room to go on */
	struct kv_identity identity;
	struct kv_prefix_digest *digests; /* [n_digests] before token i * digest_unit */
	size_t n_digests, digests_room;
	struct kv_blake2b hash; /* has taken in so many: */
	size_t n_hashed;
	struct kv_key *promises; /* [n_promises] of the prefixes of 1, 2, ... units that it promised */
	size_t n_promises, promises_room;
	size_t n_kept; /* of these, published by now */
	struct kv_seq **seqs;	 /* [groups->n]; NULL for a STATE */
	struct kv_gstate *states; /* [groups->n] */
};

/* kv_gseq_begin() - if it is empty: its tokens belong to the epochs of now */
void kv_gseq_begin(struct kv_gseq *seq);
/* kv_gseq_is_of_now() - are these still the epochs of now, in every group? */
bool kv_gseq_is_of_now(const struct kv_gseq *seq);
/* kv_gseq_digest() - digests up to @n_tokens of @tokens. 0 or -ENOMEM */
int kv_gseq_digest(struct kv_gseq *seq, const int32_t *tokens, size_t n_tokens);
void kv_gseq_cut_digests(struct kv_gseq *seq); /* those beyond len */
/* kv_gseq_keep_tokens() - those from len on; len is as before. 0 or -ENOMEM */
int kv_gseq_keep_tokens(struct kv_gseq *seq, const int32_t *tokens, size_t n);

/* kv_group_first() - the first token that must be there for the token at @len to be computed */
size_t kv_group_first(const struct kv_group *group, size_t len);

/* ---- group_promise.c ---- */

/* kv_gseq_withdraw() - promises of prefixes longer than @n_tokens end */
void kv_gseq_withdraw(struct kv_gseq *seq, size_t n_tokens);
void kv_gseq_keep_promises(struct kv_gseq *seq); /* what was computed has been published */

/* ---- group_state.c ---- */

void kv_gstate_init(struct kv_gstate *state);
void kv_gstate_deinit(struct kv_gstate *state, struct kv_pool *pool, void *stream);
static inline bool kv_group_is_state(const struct kv_groups *groups, uint32_t group)
{
	return groups->groups[group].kind == KV_GROUP_STATE;
}

/* kv_gstate_need() - rows that must be had to go on to @n_tokens, and those for checkpoints */
void kv_gstate_need(const struct kv_gseq *seq, uint32_t group, size_t n_tokens, uint32_t *ret_must,
		   uint32_t *ret_may);
/* kv_gstate_reserve() - take over @ids: what must be had, then @n_may. 0; -ENOMEM: none was taken */
int kv_gstate_reserve(struct kv_gseq *seq, uint32_t group, const kv_block_id *ids, uint32_t n_may);
/* kv_gstate_may_step() - can the next step write? */
bool kv_gstate_may_step(const struct kv_gseq *seq, uint32_t group);
/* kv_gstate_step() - a step from seq->len to @to. 0 or -ENOMEM */
int kv_gstate_step(struct kv_gseq *seq, uint32_t group, size_t to);
int kv_gstate_fork(const struct kv_gseq *seq, struct kv_gseq *child, uint32_t group);
/* kv_gstate_row_at() - the row with the state of @n tokens, -1 for 0 tokens; false: there is none */
bool kv_gstate_row_at(const struct kv_gseq *seq, uint32_t group, size_t n, kv_block_id *ret);
int kv_gstate_rollback(struct kv_gseq *seq, uint32_t group, size_t n, void *stream);
int kv_gstate_publish(struct kv_gseq *seq, uint32_t group, void *stream);
/* kv_gstate_flush() - rows that launches so far may read go back after them */
int kv_gstate_flush(struct kv_gseq *seq, uint32_t group, void *stream);
/* kv_gstate_find() - hold the checkpoint of @n tokens; -1 if it isn't cached */
kv_block_id kv_gstate_find(const struct kv_gseq *seq, uint32_t group, size_t n);
/* kv_gstate_adopt() - go on from a checkpoint that kv_gstate_find() gave */
void kv_gstate_adopt(struct kv_gseq *seq, uint32_t group, size_t n, kv_block_id row);

/* ---- group_partial.c ---- */

/* kv_gseq_step_back() - what a lookup has found from @n_tokens on is let go */
void kv_gseq_step_back(struct kv_gseq *seq, size_t n_tokens);

/* ---- group_find.c ---- */

/* kv_group_row() - what is before a block, and its extras; its digest is there */
void kv_group_row(const struct kv_gseq *seq, uint32_t group, size_t begin, size_t end,
		  struct kv_shm_row *ret);
/* kv_group_hold() - hold block @i of a prompt; -1 if it isn't cached */
kv_block_id kv_group_hold(const struct kv_gseq *seq, uint32_t group, const int32_t *prompt, size_t i);
/* kv_gseq_note() - one request, told of by the first of its sequences */
void kv_gseq_note(const struct kv_gseq *seq, const int32_t *tokens, size_t n, size_t n_found);

/* kv_group_key() - of a block [begin, end) or a state (begin == end), found without its parents */
void kv_group_key(const struct kv_gseq *seq, uint32_t group, size_t begin, size_t end,
		  const int32_t *tokens, struct kv_key *ret_key, struct kv_shm_row *ret_row);

#endif
