/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Waiting for what others compute. A session that is about to compute blocks leaves their keys in a small
 * table (include/internal/shm.h); who misses such a block may wait until it is published instead.
 *
 * Nobody relies on the table: blocks are found and compared as always, a promise only says that it may
 * be worth a wait. It is believed while its session lives and its time has not passed.
 */
#include <errno.h>
#include <poll.h>
#include <time.h>

#include "include/internal/killpoint.h"
#include "libclient/internal.h"

static uint64_t *bucket_of(const struct kv_pool *pool, struct kv_key key)
{
	return kv_shm_promises(pool->blocks, &pool->head) +
	       key.lo % (KV_PROMISES / KV_PROMISE_BUCKET) * KV_PROMISE_BUCKET;
}

static uint32_t tag_of(struct kv_key key)
{
	return (uint32_t)(key.hi >> 16);
}

static bool is_valid(const struct kv_pool *pool, uint64_t word)
{
	const struct kv_shm_pool *head = pool->index;
	uint32_t slot = kv_promise_slot(word);

	if (!word || slot >= KV_MAX_SESSIONS || kv_promise_is_over(word, kv_now()))
		return false;
	return kv_load_acquire(&head->live[slot / 64]) >> slot % 64 & 1;
}

bool kv_promise_make(struct kv_pool *pool, struct kv_key key, int64_t until)
{
	uint64_t *bucket = bucket_of(pool, key), *free_word = NULL, old = 0;
	uint64_t own = (uint64_t)tag_of(key) << 32 | (pool->slot + 1) << 24 | kv_promise_until(until);
	bool made;

	for (uint32_t i = 0; i < KV_PROMISE_BUCKET; i++) {
		uint64_t word = kv_load_relaxed(&bucket[i]);
		bool valid = is_valid(pool, word);

		if (valid && word >> 32 == tag_of(key) && kv_promise_slot(word) != pool->slot)
			return false;
		if (!free_word && (!valid || word >> 32 == tag_of(key))) {
			free_word = &bucket[i];
			old = word;
		}
	}
	/* No room: it is computed all the same, and nobody waits for it. */
	if (!free_word)
		return true;
	made = kv_compare_exchange(free_word, &old, own);
	KV_KILLPOINT(client_promised);
	/* Another may have been at it, too. Who sees that steps back: both at worst, and they ask again. */
	for (uint32_t i = 0; i < KV_PROMISE_BUCKET; i++) {
		uint64_t word = kv_load_acquire(&bucket[i]);

		if (word >> 32 != tag_of(key) || kv_promise_slot(word) == pool->slot || !is_valid(pool, word))
			continue;
		if (made)
			kv_compare_exchange(free_word, &own, 0);
		return false;
	}
	return true;
}

bool kv_promise_stands(struct kv_pool *pool, struct kv_key key)
{
	const uint64_t *bucket = bucket_of(pool, key);

	for (uint32_t i = 0; i < KV_PROMISE_BUCKET; i++) {
		uint64_t word = kv_load_relaxed(&bucket[i]);

		if (word >> 32 == tag_of(key) && kv_promise_slot(word) != pool->slot && is_valid(pool, word))
			return true;
	}
	return false;
}

void kv_promise_end(struct kv_pool *pool, struct kv_key key)
{
	uint64_t *bucket = bucket_of(pool, key);

	for (uint32_t i = 0; i < KV_PROMISE_BUCKET; i++) {
		uint64_t word = kv_load_relaxed(&bucket[i]);

		if (word && word >> 32 == tag_of(key) && kv_promise_slot(word) == pool->slot)
			kv_compare_exchange(&bucket[i], &word, 0);
	}
	KV_KILLPOINT(client_promise_ended);
}

/* It is published as soon as the daemon comes to it, and nobody will be there to end the promise. */
void kv_promise_shorten(struct kv_pool *pool, struct kv_key key)
{
	uint64_t *bucket = bucket_of(pool, key);

	for (uint32_t i = 0; i < KV_PROMISE_BUCKET; i++) {
		uint64_t word = kv_load_relaxed(&bucket[i]);

		if (word && word >> 32 == tag_of(key) && kv_promise_slot(word) == pool->slot)
			kv_compare_exchange(&bucket[i], &word,
					    (word & ~(uint64_t)KV_PROMISE_TIME) | kv_promise_until(kv_now() + 2 * KV_PROMISE_TICK));
	}
	KV_KILLPOINT(client_promise_shortened);
}

void kv_seq_withdraw(struct kv_seq *seq, size_t first)
{
	for (size_t i = first; i < seq->n_promised; i++) {
		if (i >= seq->n_submitted || kv_block_is_cached(seq->pool, seq->table[i]))
			kv_promise_end(seq->pool, seq->keys[i]);
		else
			kv_promise_shorten(seq->pool, seq->keys[i]);
	}
	if (seq->n_promised > first)
		seq->n_promised = first;
}

static int check_tokens(const struct kv_seq *seq, const int32_t *tokens, size_t n)
{
	int r = kv_forked(seq->pool->fork_generation);

	if (!r && (seq->len > n ||
		   (seq->len && memcmp(seq->tokens, tokens, seq->len * sizeof(*tokens)))))
		r = kv_error(-EINVAL, "promise: the sequence's %zu tokens are not the beginning of "
			     "those given", seq->len);
	return r;
}

KV_PUBLIC int kv_seq_promise(struct kv_seq *seq, const int32_t *tokens, size_t n, int64_t timeout,
			     size_t *ret_promised)
{
	struct kv_pool *pool = seq->pool;
	uint32_t size = pool->head.block_tokens;
	int64_t until = kv_now() + (timeout < KV_PROMISE_MOST ? timeout : KV_PROMISE_MOST);
	size_t end = n / size, i = seq->n_submitted;
	struct kv_shm_row row;
	int r = check_tokens(seq, tokens, n);

	if (!r)
		r = kv_seq_grow((void **)&seq->keys, &seq->keys_room, end + 1, sizeof(*seq->keys));
	if (r < 0)
		return r;
	if (!seq->len)
		kv_seq_begin(seq);
	for (; i < end; i++) {
		kv_seq_key(seq, i, tokens + i * size, &seq->keys[i], &row);
		if (!kv_promise_make(pool, seq->keys[i], until))
			break;
	}
	/* What was promised beyond, for other tokens perhaps, is not meant any more. */
	kv_seq_withdraw(seq, i);
	seq->n_promised = i;
	if (ret_promised)
		*ret_promised = i * size;
	return 0;
}

/* Does another session compute the block after those that were found? */
static int next_is_promised(struct kv_seq *seq, const int32_t *tokens, size_t n)
{
	uint32_t size = seq->pool->head.block_tokens;
	size_t i = seq->len / size;
	struct kv_shm_row row;
	struct kv_key key;

	if (seq->len % size || i >= (n ? (n - 1) / size : 0) || seq->n_submitted < i)
		return 0;
	kv_seq_key(seq, i, tokens + i * size, &key, &row);
	return kv_promise_stands(seq->pool, key);
}

struct kv_follow kv_follow_begin(int64_t timeout)
{
	return (struct kv_follow){ .deadline = kv_until(timeout), .pause = KV_MSEC / 5 };
}

bool kv_follow_again(struct kv_follow *f, bool promised, bool grew, int *ret)
{
	bool waited = f->waited;

	*ret = promised ? KV_PROMISED : 0;
	f->waited = promised;
	/* A promise ends after its block is there: one more look, if it was that. */
	if (!promised)
		return waited && !grew;
	if (kv_now() >= f->deadline)
		return false;
	KV_KILLPOINT(client_following);
	nanosleep(&(struct timespec){ .tv_nsec = f->pause }, NULL);
	f->pause = f->pause < 2 * KV_MSEC ? f->pause + f->pause / 4 : f->pause;
	return true;
}

KV_PUBLIC int kv_seq_follow(struct kv_seq *seq, const int32_t *tokens, size_t n, int64_t timeout,
			    size_t *ret_hit)
{
	struct kv_follow f = kv_follow_begin(timeout);
	size_t before;
	int r;

	do {
		before = seq->len;
		r = kv_seq_lookup(seq, tokens, n, ret_hit);
		if (r < 0)
			return r;
	} while (kv_follow_again(&f, next_is_promised(seq, tokens, n), seq->len > before, &r));
	return r;
}
