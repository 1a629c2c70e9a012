/* SPDX-License-Identifier: Apache-2.0 */
/* What is said of a sequence besides its tokens, and the epoch it belongs to. */
#include <errno.h>
#include <string.h>

#include "libclient/internal.h"

#define MOST_POSITIONS ((uint64_t)1 << 48)

int kv_item_add(struct kv_identity *identity, const char *what, const struct kv_item *item)
{
	int r;

	if (!item->tag)
		return kv_error(-EINVAL, "%s: tag 0 given, 1 is the first", what);
	if (item->tag == KV_TAG_GROUP)
		return kv_error(-EINVAL, "%s: tag %u given, which is the library's own; tags of engines begin at %d",
				what, item->tag, KV_TAG_OWN);
	if (item->n_bytes > KV_IDENTITY_MAX)
		return kv_error(-EINVAL, "%s: %zu bytes given, at most %u are allowed: give a digest",
				what, item->n_bytes, KV_IDENTITY_MAX);
	r = kv_identity_add(identity, item);
	return r == -EEXIST ? kv_error(r, "%s: tag %u was given before", what, item->tag) : r;
}

int kv_extra_check(const struct kv_extra *extra, size_t len)
{
	if (!extra->n_tokens)
		return kv_error(-EINVAL, "extra: n_tokens: 0 given; it must stand for a token");
	if (extra->position > MOST_POSITIONS || extra->n_tokens > MOST_POSITIONS ||
	    extra->first > MOST_POSITIONS)
		return kv_error(-EINVAL, "extra: position %llu, n_tokens %llu, first %llu: at most 2^48",
				(unsigned long long)extra->position,
				(unsigned long long)extra->n_tokens,
				(unsigned long long)extra->first);
	if (extra->position < len)
		return kv_error(-EBUSY, "extra: position %llu is among the sequence's %zu tokens",
				(unsigned long long)extra->position, len);
	return 0;
}

KV_PUBLIC int kv_seq_field(struct kv_seq *seq, uint32_t tag, const void *bytes, size_t n)
{
	struct kv_item item = { .tag = tag, .bytes = (uint8_t *)bytes, .n_bytes = n };
	int r = kv_forked(seq->pool->fork_generation);

	if (!r && seq->len)
		r = kv_error(-EBUSY, "field: the sequence has %zu tokens; fields come first", seq->len);
	return r ? r : kv_item_add(&seq->identity, "field", &item);
}

KV_PUBLIC int kv_seq_extra(struct kv_seq *seq, const struct kv_extra *extra)
{
	struct kv_item item = { .tag = extra->tag,
				.position = extra->position,
				.n_tokens = extra->n_tokens,
				.first = extra->first,
				.bytes = (uint8_t *)extra->bytes,
				.n_bytes = extra->n_bytes };
	int r = kv_forked(seq->pool->fork_generation);

	if (!r)
		r = kv_extra_check(extra, seq->len);
	return r ? r : kv_item_add(&seq->identity, "extra", &item);
}

static uint64_t shared_epoch(const struct kv_pool *pool)
{
	const struct kv_shm_pool *head = pool->index;

	/* Pairs with the release in the daemon: what was cached before is out of reach by then. */
	return kv_load_acquire(&head->epoch);
}

KV_PUBLIC uint64_t kv_pool_epoch(const struct kv_pool *pool)
{
	if (pool->keep_epoch || kv_forked(pool->fork_generation))
		return pool->head.epoch;
	return shared_epoch(pool);
}

KV_PUBLIC void kv_pool_join_epoch(struct kv_pool *pool)
{
	if (!kv_forked(pool->fork_generation))
		pool->head.epoch = shared_epoch(pool);
}

void kv_seq_begin(struct kv_seq *seq)
{
	seq->root = kv_serial_root(kv_pool_epoch(seq->pool));
}
