/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The books of a pool as they outlive their owner: memory that no client has, which another process
 * maps when the one before has died, at whatever instruction.
 *
 *	kv_books_saved		one page
 *	kv_book [id_limit]	what each block is: the truth
 *
 * All else (free blocks, children, eviction order, counts) follows from the books, and is worked out
 * anew by kv_books_rebuild(). So only this has to hold after every single store:
 *
 *   - A block changes by one store, of kv_book::life. What the new state needs stands in the book
 *     before: key, serial, parent and depth before CACHED; the twin and its serial before TWIN;
 *     `posted` before LEASED.
 *   - `posted` numbers the grants of a session. The ids stand in its ring, then its count of grants
 *     (kept by the daemon beside the session) is moved on, then the ring's head. A leased block
 *     whose number the count hasn't reached never got to its client: it is free.
 *   - Before a block enters or leaves the index its id stands in `doubt`: of those two the entries
 *     are looked at again. (Two: a block that is moved leaves at one id and enters at another.) So is its
 *     stem, whose place stands in the book before the entry stands there.
 *   - Serials below `serial_limit` may have been given out. It is moved on before they are.
 *   - EVICTING is CACHED again: nothing had been told that it is gone.
 *
 * What is cached but whose parent isn't, which none of the above allows, is let go, or if somebody
 * holds it kept out of reach: its parent's serial leads nowhere.
 */
#ifndef KV_ALLOC_SAVED_H
#define KV_ALLOC_SAVED_H

#include <stdint.h>

#include "alloc/worth.h"

#define KV_SAVED_MAGIC 0x31646576617376ull
#define KV_SAVED_BYTES 65536 /* of the head, before the books */
#define KV_SERIALS_A_TIME ((uint64_t)1 << 16)

struct kv_books_saved {
	uint64_t magic;
	uint64_t serial_limit;
	int32_t doubt[2]; /* id + 1; 0: none */
	uint32_t n_doubt; /* which of them is overwritten next */
	uint32_t reserved;
	uint64_t n_published, n_duplicates, n_evicted, n_granted; /* now and then */
	struct kv_worth worth;					  /* what was learned; any mixture will do */
};

_Static_assert(sizeof(struct kv_books_saved) <= KV_SAVED_BYTES, "the head has its pages");

#endif
