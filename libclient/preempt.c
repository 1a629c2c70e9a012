/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preemption: a sequence gives up its blocks and keeps what it needs to go on, its tokens, fields and
 * extras. What it computed stays cached like anything else that was published, so taking it up again is
 * a lookup of its own tokens and a reservation, both or neither.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/killpoint.h"
#include "libclient/group.h"

static int check_resume(size_t n_preempted, size_t n_tokens)
{
	if (!n_preempted)
		return kv_error(-EINVAL, "resume: the sequence isn't preempted");
	if (n_tokens < n_preempted)
		return kv_error(-EINVAL, "resume: room for %zu tokens asked, it had %zu", n_tokens,
				n_preempted);
	return 0;
}

/* ---- one pool ---- */

KV_PUBLIC int kv_seq_preempt(struct kv_seq *seq, void *stream)
{
	size_t len = seq->len;
	int r = kv_seq_publish(seq, stream);

	if (r < 0)
		return r;
	kv_seq_stamp(seq, 0, seq->n_submitted);
	KV_KILLPOINT(client_preempted);
	/* Without tokens it may have blocks all the same, and promises. */
	r = kv_seq_empty(seq, stream);
	if (!r && len)
		seq->n_preempted = len;
	return r;
}

/* What was found for nothing is no hit. */
static void forget_hit(struct kv_seq *seq)
{
	struct kv_shm_session *session = seq->pool->session;

	kv_store_relaxed(&session->hit_tokens, session->hit_tokens - seq->len);
}

KV_PUBLIC int kv_seq_resume(struct kv_seq *seq, size_t n_tokens, int64_t timeout, size_t *ret_len)
{
	size_t len = kv_seq_preempted(seq), hit;
	int r = kv_forked(seq->pool->fork_generation);

	if (r < 0)
		return r;
	r = check_resume(len, n_tokens);
	if (!r)
		r = kv_seq_lookup(seq, seq->tokens, len, &hit);
	KV_KILLPOINT(client_resuming);
	if (!r)
		r = kv_seq_reserve(seq, n_tokens, timeout);
	if (!r) {
		*ret_len = hit;
		seq->n_preempted = 0;
	} else if (len) {
		forget_hit(seq);
		kv_seq_empty(seq, NULL);
		seq->n_preempted = len;
	}
	return r;
}

KV_PUBLIC size_t kv_seq_preempted(const struct kv_seq *seq)
{
	return seq->len ? 0 : seq->n_preempted;
}

/* ---- groups ---- */

/* All groups or none: where blocks can't be released they stay leased until the pool is closed. */
static int empty(struct kv_gseq *seq, void *stream)
{
	struct kv_groups *groups = seq->groups;
	int r = 0;

	kv_gseq_withdraw(seq, 0);
	for (uint32_t g = 0; g < groups->n; g++) {
		if (groups->groups[g].kind != KV_GROUP_STATE) {
			int failed = kv_seq_empty(seq->seqs[g], stream);

			if (failed < 0) {
				groups->groups[g].pool->lost = true;
				r = failed;
			}
			continue;
		}
		kv_gstate_deinit(&seq->states[g], groups->groups[g].pool, stream);
		seq->states[g] = (struct kv_gstate){ 0 };
		kv_gstate_init(&seq->states[g]);
	}
	seq->len = seq->n_partial = 0;
	kv_gseq_cut_digests(seq);
	return r;
}

KV_PUBLIC int kv_gseq_preempt(struct kv_gseq *seq, void *stream)
{
	size_t len = seq->len;
	int r = kv_gseq_publish(seq, stream);

	if (r < 0)
		return r;
	for (uint32_t g = 0; g < seq->groups->n; g++) {
		if (seq->groups->groups[g].kind != KV_GROUP_STATE)
			kv_seq_stamp(seq->seqs[g], 0, seq->seqs[g]->n_submitted);
	}
	r = empty(seq, stream);
	if (len)
		seq->n_preempted = len;
	return r;
}

KV_PUBLIC int kv_gseq_resume(struct kv_gseq *seq, size_t n_tokens, int64_t timeout, size_t *ret_len)
{
	size_t len = kv_gseq_preempted(seq), hit;
	int r = kv_forked(seq->groups->groups[0].pool->fork_generation);

	if (r < 0)
		return r;
	r = check_resume(len, n_tokens);
	if (!r)
		r = kv_gseq_lookup(seq, seq->tokens, len, &hit);
	if (!r)
		r = kv_gseq_reserve(seq, n_tokens, timeout);
	if (!r) {
		*ret_len = hit;
		seq->n_preempted = 0;
	} else if (len) {
		for (uint32_t g = 0; g < seq->groups->n; g++) {
			if (seq->groups->groups[g].kind == KV_GROUP_FULL)
				forget_hit(seq->seqs[g]);
		}
		empty(seq, NULL);
		seq->n_preempted = len;
	}
	return r;
}

KV_PUBLIC size_t kv_gseq_preempted(const struct kv_gseq *seq)
{
	return seq->len ? 0 : seq->n_preempted;
}

KV_PUBLIC const int32_t *kv_gseq_tokens(const struct kv_gseq *seq)
{
	return seq->tokens;
}
