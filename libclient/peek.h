/* SPDX-License-Identifier: Apache-2.0 */
/* Looking for what is cached of some tokens, without holding any of it: kv_pool_peek() and kvctl prefix show. */
#ifndef KV_LIBCLIENT_PEEK_H
#define KV_LIBCLIENT_PEEK_H

#include "libclient/internal.h"

struct kv_peek {
	struct kv_pool *pool; /* read-only will do */
	const struct kv_identity *identity; /* what else is said of the tokens */
	const int32_t *tokens;
	size_t n;
};

/**
 * kv_peek_chain() - the leading blocks, each found behind the one before
 * @ret_ids, @ret_words: [max], as of kv_pool_peek()
 *
 * Return: how many.
 */
size_t kv_peek_chain(const struct kv_peek *p, kv_block_id *ret_ids, uint64_t *ret_words, size_t max);

/**
 * kv_peek_loose() - a block of a window [begin, end), or a state (begin == end), found by itself (group.h)
 * @before: of the tokens before @begin
 * @group:  which of the pool's groups
 *
 * Return: its id, or -1.
 */
kv_block_id kv_peek_loose(const struct kv_peek *p, const struct kv_prefix_digest *before, uint32_t group,
			  size_t begin, size_t end);

#endif
