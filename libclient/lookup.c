/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finding a sequence's beginning in the cache.
 *
 * Four things are to be done for a block: hash its tokens, find its id in the index, hold it, compare
 * it. Each needs a cache line that the one before tells of. So they run in turns, each a few blocks
 * behind the one before, and a line is asked for when its address is known:
 *
 *   block   i + 8            i + 4                         i
 *           hash, ask for    bucket: id, ask for           hold, compare
 *           the bucket       descriptor, tokens, count
 *
 * The chain of hashes is what takes longest; the rest runs beside it. What was hashed past the end
 * of the hit was for nothing: at most 8 blocks.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/hash_inline.h"
#include "libclient/group.h"
#include "libclient/pin.h"

#define FIND_BEHIND 4u /* blocks */
#define HOLD_BEHIND 8u
#define RING	    8u /* a power of two, more than lie between finding and holding */

struct walk {
	struct kv_seq *seq;
	const int32_t *tokens;
	size_t first, most; /* blocks */
	uint64_t follows;   /* what block @first must say that it follows */
	uint64_t stamp;	    /* of block @first; later blocks have earlier ones */
};

bool kv_seq_row(const struct kv_seq *seq, size_t i, struct kv_shm_row *ret)
{
	size_t size = seq->pool->head.block_tokens;

	return seq->identity.n && kv_identity_row(&seq->identity, i * size, (i + 1) * size, ret);
}

static inline struct kv_key key_before(const struct kv_seq *seq, size_t i)
{
	return i ? seq->keys[i - 1] : (struct kv_key){ seq->root, 0 };
}

bool kv_seq_key(const struct kv_seq *seq, size_t i, const int32_t *tokens, struct kv_key *ret_key,
		struct kv_shm_row *ret_row)
{
	const struct kv_shm_pool *head = &seq->pool->head;
	struct kv_key parent = key_before(seq, i);
	bool has_row;

	if (seq->loose) {
		kv_group_key(seq->loose, seq->group, i * head->block_tokens,
			     (i + 1) * head->block_tokens, tokens, ret_key, ret_row);
		return true;
	}
	has_row = kv_seq_row(seq, i, ret_row);
	if (has_row)
		parent = kv_key_fold(head->seed, parent, ret_row, sizeof(*ret_row));
	*ret_key = kv_key_next(head->seed, parent, tokens, head->block_tokens);
	ret_key->lo &= head->key_mask;
	ret_key->hi &= head->key_mask;
	return has_row;
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

/* Holds block @i, which may be any that the index has for its key. */
static __attribute__((noinline)) kv_block_id search(struct walk *w, size_t i, uint64_t follows,
						    const struct kv_shm_row *row)
{
	struct kv_pool *pool = w->seq->pool;
	uint32_t cursor = 0, size = pool->head.block_tokens;
	kv_block_id id;

	do {
		id = kv_prefix_find(&pool->prefix, w->seq->keys[i], &cursor);
	} while (id >= 0 && !kv_pin(pool, id, follows, w->tokens + i * size, size, row));
	return id;
}

static __attribute__((noinline)) kv_block_id find_elsewhere(const struct kv_prefix *prefix, struct kv_key key)
{
	uint32_t cursor = 0;

	return kv_prefix_find(prefix, key, &cursor);
}

/*
 * Inline is the place where an entry stands as a rule: what a walk takes is as much a matter of how many instructions a
 * block has as of what they wait for.
 */
static inline kv_block_id find_first(const struct kv_prefix *prefix, struct kv_key key)
{
	uint64_t word = kv_load_acquire(&prefix->words[(uint64_t)kv_prefix_bucket(prefix, key, 0) *
						       KV_BUCKET_WORDS + kv_prefix_place(key)]);
	uint32_t id = (uint32_t)word - 1;

	if (__builtin_expect(id < prefix->id_limit && word >> 32 == (uint32_t)key.hi, 1))
		return (kv_block_id)id;
	return find_elsewhere(prefix, key);
}

/*
 * Return: the first block that wasn't found.
 * @size: block_tokens; @rows: some may have a row; @mask: key_mask
 */
static inline __attribute__((always_inline)) size_t walk(struct walk *w, uint32_t size, bool rows, uint64_t mask)
{
	struct kv_seq *seq = w->seq;
	struct kv_pool *pool = seq->pool;
	/* Every atomic makes the compiler forget what it knows of memory: here it needn't. */
	const struct kv_prefix prefix = pool->prefix;
	const int32_t *shared_tokens = kv_shm_tokens(pool->blocks, &pool->head, 0);
	const int32_t *tokens = w->tokens;
	struct kv_shm_block *descriptors = pool->descriptors;
	struct kv_key *keys = seq->keys, key = key_before(seq, w->first);
	kv_block_id *table = seq->table;
	int32_t *own = seq->tokens;
	uint32_t *refs = pool->refs;
	const uint64_t seed = pool->head.seed, bit = kv_pin_bit(pool);
	const uint32_t holder = pool->slot / 64;
	const size_t first = w->first, most = w->most, n_before = seq->n_blocks;
	uint64_t follows = w->follows, stamp = w->stamp;
	kv_block_id ring[RING];
	struct kv_shm_row row;
	size_t i = first;

	for (size_t k = i; i < most; k++) {
		const int32_t *block = tokens + i * size;
		struct kv_shm_block *d;
		bool has_row = false;
		kv_block_id id;

		if (k < most) {
			if (rows && kv_seq_row(seq, k, &row))
				key = kv_key_fold(seed, key, &row, sizeof(row));
			key = kv_key_next_inline(seed, key, tokens + k * size, size);
			key.lo &= mask;
			key.hi &= mask;
			/* By words: a vector of both would be put together in memory first. */
			kv_store_relaxed(&keys[k].lo, key.lo);
			kv_store_relaxed(&keys[k].hi, key.hi);
			kv_prefix_prefetch(&prefix, key);
		}
		if (k - first >= FIND_BEHIND && k - FIND_BEHIND < most) {
			id = find_first(&prefix, keys[k - FIND_BEHIND]);
			ring[(k - FIND_BEHIND) % RING] = id;
			if (id >= 0) {
				__builtin_prefetch(&descriptors[id], 1);
				__builtin_prefetch(shared_tokens + (int64_t)id * size);
			}
		}
		if (k - first < HOLD_BEHIND)
			continue;

		if (rows)
			has_row = kv_seq_row(seq, i, &row);
		follows |= has_row ? KV_SERIAL_ROW : 0;
		id = ring[i % RING];
		if (id < 0)
			break;
		d = &descriptors[id];
		/* What kv_pin() does, for a block that isn't held yet and is the right one. */
		if (!has_row && !(refs[id] & ~KV_REF_CACHED)) {
			kv_or_seq(&d->holders[holder], bit);
			if (__builtin_expect(kv_block_state(kv_load_seq(&d->word)) ==
						     KV_BLOCK_CACHED &&
					     kv_load_relaxed(&d->parent_serial) == follows &&
					     kv_tokens_equal(shared_tokens + (int64_t)id * size,
							     block, size), 1)) {
				refs[id] = KV_REF_CACHED | 1;
				goto held;
			}
			kv_and_release(&d->holders[holder], ~bit);
		}
		id = search(w, i, follows, has_row ? &row : NULL);
		if (id < 0)
			break;
		d = &descriptors[id];
held:
		follows = kv_load_relaxed(&d->serial);
		kv_store_relaxed(&d->stamp, stamp--);
		memcpy(own + i * size, block, size * sizeof(*own));
		/* A block reserved for these tokens was never written: it goes back at once. */
		if (__builtin_expect(i < n_before, 0))
			kv_block_release(pool, table[i]);
		table[i++] = id;
	}
	seq->n_blocks = i > n_before ? i : n_before;
	return i;
}

static size_t find(struct walk *w)
{
	uint32_t size = w->seq->pool->head.block_tokens;
	uint64_t mask = w->seq->pool->head.key_mask;

	/* The usual case is one of which all is known when this is compiled. */
	if (size == 16 && !w->seq->identity.n && mask == UINT64_MAX)
		return walk(w, 16, false, UINT64_MAX);
	return walk(w, size, true, mask);
}

int kv_seq_make_room(struct kv_seq *seq, size_t n_tokens, size_t n_blocks)
{
	int r = kv_seq_grow((void **)&seq->tokens, &seq->tokens_room, n_tokens,
			    sizeof(*seq->tokens));

	if (!r)
		r = kv_seq_grow((void **)&seq->table, &seq->table_room, n_blocks + 1,
				sizeof(*seq->table));
	if (!r)
		r = kv_seq_grow((void **)&seq->keys, &seq->keys_room, n_blocks + 1,
				sizeof(*seq->keys));
	return r;
}

static int lookup(struct kv_seq *seq, const int32_t *tokens, size_t n, size_t *ret_hit)
{
	struct kv_pool *pool = seq->pool;
	uint32_t size = pool->head.block_tokens;
	size_t most = n ? (n - 1) / size : 0, first = seq->len / size, found;
	struct walk w;
	int r = kv_forked(pool->fork_generation);

	if (!r)
		r = check_lookup(seq, tokens, n);
	if (r < 0)
		return r;
	kv_later_poll(pool);
	r = kv_seq_make_room(seq, n, most);
	if (r < 0)
		return r;

	count_asked(seq, n);
	/* One of several groups began with the others. */
	if (!seq->len && !seq->is_part)
		kv_seq_begin(seq);
	w.follows = seq->root;
	/* To go on, the chain so far must be cached, and known to be. */
	if (first && (seq->n_submitted < first ||
		      !kv_block_is_cached(pool, seq->table[first - 1])))
		most = first;
	else if (first)
		w.follows = kv_load_relaxed(&pool->descriptors[seq->table[first - 1]].serial);
	if (most > first) {
		struct kv_shm_blocks *shared = pool->blocks;

		w.seq = seq;
		w.tokens = tokens;
		w.first = first;
		w.most = most;
		w.stamp = kv_add_relaxed(&shared->clock, most) + (most - first);
		found = find(&w);
	} else {
		found = first;
	}
	if (found > first) {
		seq->len = found * size;
		seq->n_submitted = seq->n_settled = found;
		if (first)
			kv_seq_stamp(seq, 0, first);
		kv_ops_try(pool, &(struct kv_op){ .kind = KV_OP_TOUCH,
						  .id = seq->table[found - 1],
						  .parent = (int32_t)(found - first) });
		kv_store_relaxed(&pool->session->hit_tokens,
				 pool->session->hit_tokens + (found - first) * size);
	}
	*ret_hit = seq->len;
	return kv_granules_need(pool, kv_deadline(0));
}

/* One in eight is timed: looking at the clock costs as much as finding a block. */
static int timed_lookup(struct kv_seq *seq, const int32_t *tokens, size_t n, size_t *ret_hit)
{
	struct kv_pool *pool = seq->pool;
	int64_t start;
	int r;

	if (pool->n_lookups++ % 8)
		return lookup(seq, tokens, n, ret_hit);
	start = kv_now();
	r = lookup(seq, tokens, n, ret_hit);
	if (!r)
		kv_latency_add(&pool->session->lookups, (uint64_t)(kv_now() - start));
	return r;
}

KV_PUBLIC int kv_seq_lookup(struct kv_seq *seq, const int32_t *tokens, size_t n, size_t *ret_hit)
{
	size_t before = seq->len;
	int r = timed_lookup(seq, tokens, n, ret_hit);

	kv_seq_found(seq, tokens);
	if (!r && kv_is_traced(seq->pool) && !seq->is_part)
		kv_trace_note(seq, tokens, n, *ret_hit - before);
	return r;
}
