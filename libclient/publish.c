/* SPDX-License-Identifier: Apache-2.0 */
/* The shared side of a sequence: showing its blocks to others. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/killpoint.h"
#include "libclient/internal.h"

static bool waits_for_an_answer(const struct kv_seq *seq)
{
	for (size_t i = seq->n_settled; i < seq->n_submitted; i++) {
		if (kv_again_is_pending(seq->pool, seq->table[i]))
			return true;
	}
	return false;
}

/*
 * The daemon's answers to what was published: cached, or there is a twin to change over to. Where that was
 * evicted meanwhile the own block takes its place: it, and what was refused for want of it, is
 * published once more. That may find another twin, which is evicted in its turn: then again, but never
 * before the daemon has answered.
 */
static int settle(struct kv_seq *seq, void *stream)
{
	struct kv_pool *pool = seq->pool;

	for (; seq->n_settled < seq->n_submitted; seq->n_settled++) {
		kv_block_id id = seq->table[seq->n_settled];
		struct kv_shm_block *d = &pool->descriptors[id];
		kv_block_id twin;
		int r;

		if (id == pool->head.null_block)
			continue;
		if (kv_block_is_cached(pool, id)) {
			if (seq->n_settled < seq->n_promised)
				kv_promise_end(pool, seq->keys[seq->n_settled]);
			continue;
		}
		if (kv_block_state(kv_load_acquire(&d->word)) != KV_BLOCK_TWIN)
			return 0;
		twin = (kv_block_id)kv_load_relaxed(&d->key_lo);
		if (twin == id || !kv_block_pin_twin(pool, twin, kv_load_relaxed(&d->serial)))
			break;
		KV_KILLPOINT(client_twin_pinned);
		/* Launches that are queued may still read the old one: it goes after them. */
		r = kv_later_release(pool, stream, &id, 1);
		if (r < 0) {
			kv_block_release(pool, twin);
			return r;
		}
		seq->table[seq->n_settled] = twin;
		KV_KILLPOINT(client_twin_exchanged);
	}
	if (!waits_for_an_answer(seq))
		seq->n_submitted = seq->n_settled;
	return 0;
}

/* Asks for block @i to be shown: its tokens stand in the shared table, its chain in the op. */
static void prepare(struct kv_seq *seq, size_t i, struct kv_op *op)
{
	struct kv_pool *pool = seq->pool;
	uint32_t size = pool->head.block_tokens;
	kv_block_id id = seq->table[i], parent = i && !seq->loose ? seq->table[i - 1] : -1;
	const int32_t *tokens = seq->tokens + i * size;
	struct kv_shm_row row;
	bool has_row = kv_seq_key(seq, i, tokens, &seq->keys[i], &row);

	*op = (struct kv_op){ .kind = KV_OP_PUBLISH,
			      .id = id,
			      .parent = parent,
			      .flags = has_row ? KV_OP_ROW : 0,
			      .parent_serial = seq->root,
			      .key_lo = seq->keys[i].lo,
			      .key_hi = seq->keys[i].hi };
	if (parent >= 0)
		op->parent_serial = pool->refs[parent] & KV_REF_CACHED ?
					    kv_load_relaxed(&pool->descriptors[parent].serial) : 0;
	if (has_row)
		*kv_shm_row(pool->blocks, &pool->head, id) = row;
	memcpy(kv_shm_tokens(pool->blocks, &pool->head, id), tokens, size * sizeof(*tokens));
	KV_KILLPOINT(client_tokens_written);
}

KV_PUBLIC int kv_seq_publish(struct kv_seq *seq, void *stream)
{
	struct kv_pool *pool = seq->pool;
	size_t end = seq->len / pool->head.block_tokens, n = 0, asked = seq->n_submitted;
	kv_cleanup(kv_freep) struct kv_op *ops = NULL;
	struct kv_shm_blocks *shared = pool->blocks;
	uint64_t now;
	int r = kv_forked(pool->fork_generation);

	if (r < 0)
		return r;
	kv_later_poll(pool);
	r = settle(seq, stream);
	if (r < 0 || end <= seq->n_submitted)
		return r;
	ops = malloc((end - seq->n_submitted) * sizeof(*ops));
	r = kv_seq_grow((void **)&seq->keys, &seq->keys_room, end, sizeof(*seq->keys));
	if (!ops || r < 0) {
		seq->n_submitted = asked;
		return kv_no_memory();
	}
	now = kv_add_relaxed(&shared->clock, end - seq->n_submitted);
	for (size_t i = seq->n_submitted; i < end; i++) {
		uint32_t *ref = &pool->refs[seq->table[i]];
		bool again = i < asked;

		if (seq->table[i] == pool->head.null_block || (again && *ref & KV_REF_CACHED))
			continue;
		prepare(seq, i, &ops[n]);
		ops[n].stamp = now + (end - i);
		/* A fork may have asked already: the daemon must not be asked twice. */
		if (!again && *ref & (KV_REF_SUBMITTED | KV_REF_CACHED))
			continue;
		ops[n].flags |= again ? KV_OP_AGAIN : 0;
		*ref |= KV_REF_SUBMITTED | (again ? KV_REF_AGAIN : 0);
		n++;
	}
	seq->n_submitted = end;
	KV_KILLPOINT(client_prepared);
	return kv_later_publish(pool, stream, ops, (uint32_t)n);
}
