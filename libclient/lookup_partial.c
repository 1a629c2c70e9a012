/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Into the block behind a hit: of cached blocks that follow what was found, the one that goes on longest as the
 * prompt does. Candidates come from the stems (alloc/stem.h): one cache line tells of all that begin with the
 * prompt's next tokens. From then on it is as if the whole block had been found and rolled back to where the
 * prompt leaves it: it is held, and copied before the sequence goes on in it.
 */
#include <errno.h>
#include <string.h>

#include "libclient/internal.h"
#include "libclient/pin.h"

/* How many of the first @most are equal. Who leases the block by now may be writing. */
static uint32_t in_common(const int32_t *shared, const int32_t *tokens, uint32_t most)
{
	uint32_t n = 0;

	while (n < most && kv_load_relaxed(&shared[n]) == tokens[n])
		n++;
	return n;
}

kv_block_id kv_partial_find(struct kv_pool *pool, uint64_t follows, const struct kv_shm_row *row,
			    const int32_t *tokens, size_t n_tokens, uint32_t *ret_n)
{
	uint32_t size = pool->head.block_tokens, cursor = 0;
	uint32_t most = n_tokens < size ? (uint32_t)n_tokens : size - 1;
	kv_block_id best = -1, id;
	struct kv_key key;

	*ret_n = 0;
	if (!pool->stems.n_buckets || most < kv_stem_tokens(size))
		return -1;
	key = kv_stem_key(&pool->head, follows, row, tokens);
	while (*ret_n < most && (id = kv_stem_find(&pool->stems, key, &cursor)) >= 0) {
		uint32_t n = in_common(kv_shm_tokens(pool->blocks, &pool->head, id), tokens, most);

		/* Held, it is compared again: so far this was a guess. */
		if (n <= *ret_n || !kv_pin(pool, id, follows, tokens, n, row))
			continue;
		if (best >= 0)
			kv_block_release(pool, best);
		best = id;
		*ret_n = n;
	}
	return best;
}

void kv_partial_used(struct kv_pool *pool, kv_block_id id)
{
	struct kv_shm_blocks *shared = pool->blocks;

	kv_store_relaxed(&pool->descriptors[id].stamp, kv_add_relaxed(&shared->clock, 1) + 1);
	kv_ops_try(pool, &(struct kv_op){ .kind = KV_OP_TOUCH, .id = id, .parent = 1 });
}

static int go_on(struct kv_seq *seq, const int32_t *tokens, size_t n_tokens)
{
	struct kv_pool *pool = seq->pool;
	size_t i = seq->len / pool->head.block_tokens;
	uint64_t follows = seq->root;
	struct kv_shm_row row;
	uint32_t n = 0;
	kv_block_id id;
	bool has_row;
	int r;

	/* What comes before must be cached, and known to be. */
	if (n_tokens <= seq->len || seq->n_submitted < i ||
	    (i && !kv_block_is_cached(pool, seq->table[i - 1])))
		return 0;
	if (i)
		follows = kv_load_relaxed(&pool->descriptors[seq->table[i - 1]].serial);
	has_row = kv_seq_row(seq, i, &row);
	id = kv_partial_find(pool, follows | (has_row ? KV_SERIAL_ROW : 0), has_row ? &row : NULL,
			     tokens + seq->len, n_tokens - seq->len, &n);
	if (id < 0)
		return 0;
	r = kv_seq_adopt_partial(seq, id, tokens + seq->len, n);
	if (r < 0) {
		kv_block_release(pool, id);
		return r;
	}
	kv_partial_used(pool, id);
	kv_store_relaxed(&pool->session->hit_tokens, pool->session->hit_tokens + n);
	return 0;
}

KV_PUBLIC int kv_seq_lookup_partial(struct kv_seq *seq, const int32_t *tokens, size_t n, size_t *ret_hit)
{
	size_t whole;
	int r = kv_seq_lookup(seq, tokens, n, &whole);

	if (r < 0)
		return r;
	r = go_on(seq, tokens, n ? n - 1 : 0);
	kv_seq_found(seq, tokens);
	if (r < 0)
		return r;
	if (kv_is_traced(seq->pool) && !seq->is_part)
		kv_trace_note(seq, tokens, n, seq->len - whole);
	*ret_hit = seq->len;
	return kv_granules_need(seq->pool, kv_deadline(0));
}
