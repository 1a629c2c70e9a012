/* SPDX-License-Identifier: Apache-2.0 */
/* What pool.c (states) and evict.c (which block goes) do for each other. */
#ifndef KV_ALLOC_POOL_PARTS_H
#define KV_ALLOC_POOL_PARTS_H

#include "alloc/pool.h"

/* pool.c: moves the books and their mirror to a state; counters are the caller's */
void kv_books_set_state(struct kv_books *b, int32_t id, uint8_t state, uint16_t owner);
void kv_books_push_free(struct kv_books *b, int32_t id); /* the generation moves on */

/* pool.c: its entry in the index is about to change (alloc/saved.h) */
void kv_books_doubt(struct kv_books *b, int32_t id);

/* pool.c: nobody is to find it by how it begins any more */
void kv_books_remove_stem(struct kv_books *b, int32_t id);

/* pool.c: a cached block stands in its parent's list of children, or leaves it. Return: the parent */
int32_t kv_books_link_child(struct kv_books *b, int32_t id);
int32_t kv_books_unlink_child(struct kv_books *b, int32_t id);

/* evict.c: does any session hold it? */
bool kv_books_is_held(const struct kv_books *b, int32_t id);
/* evict.c: a block is published anew, and may have been here before */
void kv_books_remember(struct kv_books *b, int32_t id);
/* evict.c: it may be evicted from now on; kv_heap_reserve() has made room for all that is cached */
void kv_books_enlist(struct kv_books *b, int32_t id);

/* evict.c: of alloc/worth.h */
uint8_t kv_books_class(const struct kv_books *b, int32_t id);
/* census.c: counts the blocks by class and age, if it is time again */
void kv_books_census(struct kv_books *b);
/* pool.c: the next block after @id that begins in an extent with a block in use; -1: none */
int32_t kv_books_next_used(const struct kv_books *b, int32_t id);

#endif
