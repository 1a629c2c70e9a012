/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A random walk of all operations, in parts, each with a model too plain to be wrong:
 *
 *   walk_groups.c    sequences of three groups: output is worked out anew from the tokens
 *   walk_plain.c     sequences of one pool, promises, waiting: each token's bytes say all that is before it
 *   walk_capacity.c  leases of another size, limits, compaction, epochs, dropping; audits
 *
 * All pools lie in one arena that is too small for them. Every word that is written carries the mark of its
 * pool: memory that comes from another one and was not zeroed is noticed where it is used.
 */
#ifndef KV_TESTS_CLIENT_WALK_H
#define KV_TESTS_CLIENT_WALK_H

#include "tests/client/hybrid.h"

#define MOST_LEN  90
#define N_PROMPTS 6
#define ARENA	  ((uint64_t)24 << 20)
#define EXTENT	  ((uint64_t)2 << 20)

enum walk_pool { WALK_FULL, WALK_WINDOW, WALK_STATE, WALK_PLAIN, WALK_RAW, WALK_POOLS };

struct walk_count {
	uint64_t hits, refused, too_large, rollbacks, impossible, forks, preempted, resumed_tokens, promised,
		followed, sure, settled, private, partial, fell_back, sets, sets_refused, compactions, claims, raw_blocks, epochs;
};

extern struct walk_count walked;
extern struct model walk_models[2]; /* two attachments to all groups' pools */
extern uint64_t walk_step;

uint32_t walk_pick(uint32_t n); /* below @n */
/* walk_tokens() - [MOST_LEN + 8] of a prompt; prompts share beginnings */
void walk_tokens(int32_t *tokens, uint32_t prompt);

void walk_groups(void);
void walk_groups_end_one(void);
void walk_groups_end(void);

void walk_plain_open(void);
void walk_plain(void);
void walk_plain_new_epoch(void);
void walk_plain_end_one(void);
void walk_plain_end(void);
void walk_plain_close(void);
struct kv_pool *walk_plain_pool(void); /* of one of the two attachments */

void walk_capacity_open(void);
void walk_capacity(void);
/* walk_too_large() - may a request of @n blocks in all be told that it never fits? */
bool walk_too_large(enum walk_pool pool, uint64_t n);
void walk_capacity_end(void);
void walk_capacity_close(void);

/* walk_pool_open() - the pool called @name, of rows of @row_bytes, as large as there is memory for */
struct kv_pool *walk_pool_open(struct kv_client *client, const char *name, uint32_t block_tokens,
			       uint32_t row_bytes);

#endif
