/* SPDX-License-Identifier: Apache-2.0 */
/* A pool's shared pages and books in private memory, and clients that act on them as real ones do.
 */
#ifndef KV_TESTS_ALLOC_PAGES_H
#define KV_TESTS_ALLOC_PAGES_H

#include "alloc/pool.h"

struct pages {
	struct kv_shm_pool head;
	uint64_t *index; /* bucket words */
	void *shared;	 /* blocks memfd */
	struct kv_books books;
	uint64_t key_mask; /* of both halves of a key: few bits make keys collide */
};

/* pages_init() - a pool of the null block 0 and @n_blocks more, all of them free */
void pages_init(struct pages *p, uint32_t n_blocks, uint32_t block_tokens);
/* pages_init_extents() - likewise, in extents of as many blocks, a power of two */
void pages_init_extents(struct pages *p, uint32_t n_blocks, uint32_t block_tokens,
			uint32_t extent_blocks);
void pages_deinit(struct pages *p);

/* pages_check() - the books must be right; @what is in the message if they aren't */
void pages_check(const struct pages *p, const bool *live, const char *what);

struct kv_key pages_key(const struct pages *p, struct kv_key parent, const int32_t *tokens);
uint32_t pages_state(const struct pages *p, int32_t id);
bool pages_is_held(const struct pages *p, int32_t id, uint32_t slot);

/* client_pin() - as a library does it: set the own bit, look, take the bit back if it isn't cached
 */
bool client_pin(struct pages *p, int32_t id, uint32_t slot);
void client_unpin(struct pages *p, int32_t id, uint32_t slot);

/* client_find() - the cached block of @tokens after the parent of that serial, pinned; or -1 */
int32_t client_find(struct pages *p, uint32_t slot, struct kv_key key, uint64_t parent_serial,
		    const int32_t *tokens);

/**
 * client_publish() - write the tokens of leased block @id and publish it
 * @parent: block or -1; its serial goes along if it is cached
 *
 * Return: what kv_books_publish() says.
 */
int client_publish(struct pages *p, uint32_t slot, int32_t id, int32_t parent, struct kv_key key,
		   const int32_t *tokens, uint64_t stamp);

#endif
