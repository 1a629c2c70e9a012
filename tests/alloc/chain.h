/* SPDX-License-Identifier: Apache-2.0 */
/* One small pool for the tests of a program, and sessions that compute, show and release prompts.
 */
#ifndef KV_TESTS_ALLOC_CHAIN_H
#define KV_TESTS_ALLOC_CHAIN_H

#include "tests/alloc/pages.h"

#define N_BLOCKS     16
#define BLOCK_TOKENS 16
#define A	     3 /* slots of three sessions; one in the second word of holders */
#define B	     40
#define C	     100

extern struct pages p;
extern struct kv_books *const b;

/* Fixtures: N_BLOCKS free blocks; at the end the books must be right. */
void setup(void);
void teardown(void);

/* resize() - another pool in place of this one */
void resize(uint32_t n_blocks);

void expect_counts(uint32_t n_free, uint32_t n_leased, uint32_t n_cached, uint32_t n_quarantined);

/* tokens_of() - block @i of prompt @prompt: other tokens for another prompt or block */
const int32_t *tokens_of(int32_t prompt, uint32_t i);

struct chain {
	int32_t prompt;
	uint32_t n;
	int32_t ids[N_BLOCKS];
	struct kv_key keys[N_BLOCKS];
};

/* parent_key() - the key that block @i of the chain follows */
struct kv_key parent_key(const struct chain *c, uint32_t i);

/* tick() - @n blocks are used: moves the pool's clock on. Return: what it shows then. */
uint64_t tick(uint64_t n);

/* computed() - @slot has computed a prompt of @n blocks and published it; it holds them all */
struct chain computed(uint32_t slot, int32_t prompt, uint32_t n);

/* use() - stamps as the library's: the beginning of a chain later than its end */
void use(const struct chain *c);
void release(const struct chain *c, uint32_t slot);

/* hit() - how many blocks of the prompt are found; nothing stays held */
uint32_t hit(uint32_t slot, int32_t prompt, uint32_t most);

#endif
