/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sequences whose bytes say what they are: the K and V of a token are a number that follows from all tokens up
 * to it, so a block of another prefix never looks right.
 */
#ifndef KV_TESTS_CLIENT_BYTES_H
#define KV_TESTS_CLIENT_BYTES_H

#include "tests/support/client.h"

#define BYTES_COMPONENTS  4
#define BYTES_TOKEN	  128 /* of a token, in all components */

#define BRANCH_MOST 4096 /* tokens */

/* branch_of() - tokens of the first prompt (tokens_of()), from @at on those of another one; valid until the next call */
const int32_t *branch_of(int32_t prompt, size_t at, size_t n);

/* bytes_pool() - another session of the pool called @name, mapped; the null block isn't counted in @n_blocks */
struct kv_pool *bytes_pool(struct kv_client *client, const char *name, uint32_t block_tokens,
			   uint32_t n_blocks);

/* bytes_step() - one step of an engine: tables, copies, then K and V of the tokens that are new */
void bytes_step(struct kv_pool *pool, struct kv_batch *batch, const struct kv_batch_item *items,
		uint32_t n);

/* bytes_right() - all tokens of @seq that have a block have theirs; @what, @round: for the text */
void bytes_right(struct kv_pool *pool, const struct kv_seq *seq, const char *what, int round);

#endif
