/* SPDX-License-Identifier: Apache-2.0 */
/* The shared side of a sequence: finding its beginning in the cache, showing its blocks to others. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "libclient/internal.h"

static struct kv_key last_key(const struct kv_seq *seq, size_t n)
{
	return n ? seq->keys[n - 1] : (struct kv_key){ 0, 0 };
}

/* The block after @n blocks of the chain that holds @tokens; held when found, else -1. */
static kv_block_id find(struct kv_pool *pool, struct kv_key key, uint64_t parent_serial,
			const int32_t *tokens)
{
	uint32_t cursor = 0;
	kv_block_id id;

	while ((id = kv_prefix_find(&pool->prefix, key, &cursor)) >= 0) {
		if (kv_block_pin(pool, id, key, parent_serial, tokens))
			return id;
	}
	return -1;
}

static int check_lookup(const struct kv_seq *seq, const int32_t *tokens, size_t n)
{
	uint32_t size = seq->pool->head.block_tokens;

	if (seq->len % size)
		return kv_error(-EINVAL, "lookup: the sequence has %zu tokens, not a multiple of %u",
				seq->len, size);
	if (seq->len > n || (seq->len && memcmp(seq->tokens, tokens, seq->len * sizeof(*tokens))))
		return kv_error(-EINVAL, "lookup: the sequence's %zu tokens are not the beginning of "
				"those given", seq->len);
	return 0;
}

/* A prompt's token counts once, however often the search goes on: hits / lookups is a share. */
static void count_asked(struct kv_seq *seq, size_t n)
{
	struct kv_shm_session *session = seq->pool->session;
	size_t counted = seq->n_asked > seq->len ? seq->n_asked : seq->len;

	if (n <= counted)
		return;
	kv_store_relaxed(&session->lookup_tokens, session->lookup_tokens + n - counted);
	seq->n_asked = n;
}

KV_PUBLIC int kv_seq_lookup(struct kv_seq *seq, const int32_t *tokens, size_t n, size_t *ret_hit)
{
	struct kv_pool *pool = seq->pool;
	uint32_t size = pool->head.block_tokens;
	size_t most = n ? (n - 1) / size : 0, first = seq->len / size, i = first;
	uint64_t serial = 0;
	int r = kv_forked(pool->fork_generation);

	if (!r)
		r = check_lookup(seq, tokens, n);
	if (r < 0)
		return r;
	kv_later_poll(pool);
	r = kv_seq_grow((void **)&seq->tokens, &seq->tokens_room, n, sizeof(*tokens));
	if (!r)
		r = kv_seq_grow((void **)&seq->table, &seq->table_room, most + 1, sizeof(*seq->table));
	if (!r)
		r = kv_seq_grow((void **)&seq->keys, &seq->keys_room, most + 1, sizeof(*seq->keys));
	if (r < 0)
		return r;

	count_asked(seq, n);
	/* To go on, the chain so far must be cached, and known to be. */
	if (first && (seq->n_submitted < first ||
		      !kv_block_is_cached(pool, seq->table[first - 1])))
		most = first;
	else if (first)
		serial = kv_load_relaxed(&pool->descriptors[seq->table[first - 1]].serial);

	for (; i < most; i++) {
		struct kv_key key = kv_key_next(pool->head.seed, last_key(seq, i), tokens + i * size,
						size);
		kv_block_id id = find(pool, key, serial, tokens + i * size);

		if (id < 0)
			break;
		/* A block reserved for these tokens was never written: it goes back at once. */
		if (i < seq->n_blocks)
			kv_block_release(pool, seq->table[i]);
		else
			seq->n_blocks = i + 1;
		seq->table[i] = id;
		seq->keys[i] = key;
		serial = kv_load_relaxed(&pool->descriptors[id].serial);
	}
	if (i > first) {
		memcpy(seq->tokens + first * size, tokens + first * size,
		       (i - first) * size * sizeof(*tokens));
		seq->len = i * size;
		seq->n_submitted = seq->n_settled = i;
		kv_seq_stamp(seq, 0, i);
		kv_ops_try(pool, &(struct kv_op){ .kind = KV_OP_TOUCH,
						  .id = seq->table[i - 1],
						  .parent = (int32_t)(i - first) });
		kv_store_relaxed(&pool->session->hit_tokens,
				 pool->session->hit_tokens + (i - first) * size);
	}
	*ret_hit = seq->len;
	return 0;
}

/* The daemon's answers to what was published: cached, or there is a twin to change over to. */
static int settle(struct kv_seq *seq, void *stream)
{
	struct kv_pool *pool = seq->pool;

	for (; seq->n_settled < seq->n_submitted; seq->n_settled++) {
		kv_block_id id = seq->table[seq->n_settled];
		struct kv_shm_block *d = &pool->descriptors[id];
		kv_block_id twin;
		int r;

		if (kv_block_is_cached(pool, id))
			continue;
		if (kv_block_state(kv_load_acquire(&d->word)) != KV_BLOCK_TWIN)
			return 0;
		twin = (kv_block_id)kv_load_relaxed(&d->key_lo);
		if (!kv_block_pin_twin(pool, twin, kv_load_relaxed(&d->serial)))
			continue;
		/* Launches that are queued may still read the old one: it goes after them. */
		r = kv_later_release(pool, stream, &id, 1);
		if (r < 0) {
			kv_block_release(pool, twin);
			return r;
		}
		seq->table[seq->n_settled] = twin;
	}
	return 0;
}

/* Asks for block @i to be shown: its tokens stand in the shared table, its chain in the op. */
static void prepare(struct kv_seq *seq, size_t i, struct kv_op *op)
{
	struct kv_pool *pool = seq->pool;
	uint32_t size = pool->head.block_tokens;
	kv_block_id id = seq->table[i], parent = i ? seq->table[i - 1] : -1;
	const int32_t *tokens = seq->tokens + i * size;

	seq->keys[i] = kv_key_next(pool->head.seed, last_key(seq, i), tokens, size);
	*op = (struct kv_op){ .kind = KV_OP_PUBLISH,
			      .id = id,
			      .parent = parent,
			      .key_lo = seq->keys[i].lo,
			      .key_hi = seq->keys[i].hi };
	if (parent >= 0 && pool->refs[parent] & KV_REF_CACHED)
		op->parent_serial = kv_load_relaxed(&pool->descriptors[parent].serial);
	memcpy(kv_shm_tokens(pool->blocks, &pool->head, id), tokens, size * sizeof(*tokens));
}

KV_PUBLIC int kv_seq_publish(struct kv_seq *seq, void *stream)
{
	struct kv_pool *pool = seq->pool;
	size_t end = seq->len / pool->head.block_tokens, n = 0;
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
	if (!ops)
		return -ENOMEM;
	r = kv_seq_grow((void **)&seq->keys, &seq->keys_room, end, sizeof(*seq->keys));
	if (r < 0)
		return r;
	now = kv_add_relaxed(&shared->clock, end - seq->n_submitted);
	for (size_t i = seq->n_submitted; i < end; i++) {
		uint32_t *ref = &pool->refs[seq->table[i]];

		prepare(seq, i, &ops[n]);
		ops[n].stamp = now + (end - i);
		/* A fork may have asked already: the daemon must not be asked twice. */
		if (*ref & (KV_REF_SUBMITTED | KV_REF_CACHED))
			continue;
		*ref |= KV_REF_SUBMITTED;
		n++;
	}
	seq->n_submitted = end;
	return kv_later_publish(pool, stream, ops, (uint32_t)n);
}
