/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The books of one pool: what state each block is in, who leases it, what is cached.
 *
 *   n_free + n_leased + n_cached + n_quarantined + n_moving == n_total
 *   (n_leased counts LEASED and TWIN; the null block and absent ids are in none of them)
 *
 * The private array `books` is the truth. The descriptors in shared pages (include/internal/shm.h) are
 * its mirror, which clients read; of what clients write there only holder bits and stamps are used,
 * and a lie in them can cost that pool a cached block, or an eviction, never a wrong owner.
 *
 * A cached block has at most one parent and knows how many cached children it has. It is evicted
 * only when it has none, and nobody holds it: the ends of chains go first. Which of them, a policy
 * says: the least recently used (by stamps that clients write; looking a prefix up stamps its
 * beginning later than its end), or the one that is worth least (alloc/worth.h).
 *
 * Pure logic over memory it is given: no system call, no clock, no thread. One owner: the daemon.
 */
#ifndef KV_ALLOC_POOL_H
#define KV_ALLOC_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "alloc/ghost.h"
#include "alloc/heap.h"
#include "alloc/prefix.h"
#include "alloc/saved.h"
#include "alloc/space.h"
#include "alloc/stem.h"
#include "alloc/worth.h"
#include "include/internal/shm.h"

struct kv_book {
	uint64_t serial;
	uint64_t parent_serial; /* with KV_SERIAL_*, as in the descriptor */
	struct kv_key key;
	uint64_t posted; /* LEASED, TWIN: number of its grant in its session */
	union {
		uint64_t life; /* changed by one store: alloc/saved.h */
		struct {
			uint32_t generation;
			uint16_t owner; /* LEASED, TWIN, QUARANTINED: session slot */
			uint8_t state;	/* enum kv_block_state */
			uint8_t reserved;
		};
	};
	uint32_t n_children;
	int32_t parent; /* CACHED: id or -1. TWIN: the twin's id */
	bool in_lru;
	bool went_on;	 /* CACHED: a block was cached behind it at some time */
	bool stale;	 /* CACHED: of an epoch that is over */
	uint16_t n_uses; /* CACHED: after the first; 65535 and more are one */
	uint32_t depth;	 /* CACHED: blocks before it in its chain */
	uint32_t since;	 /* *kv_books::clock when it became what it is, wherever that was; 0: not known */
	uint64_t last;	 /* CACHED: kv_books::now when it was last published or found */
	/* CACHED: a list of the blocks cached behind it, and its place in its parent's; -1: none */
	int32_t first_child, next_sibling, prev_sibling;
	uint32_t stem; /* where its entry in kv_books::stems was put, from 1; 0: nowhere */
};

_Static_assert(sizeof(struct kv_book) == 96, "workers of other versions read it");

struct kv_books;

/*
 * What goes first when room is needed: of the blocks that end a chain and that nobody holds, the one
 * with the smallest score. A score may be out of date when it is too small, for others there is
 * kv_books::refresh_in: so many evictions later all are worked out anew.
 */
struct kv_policy {
	const char *name;
	uint64_t (*score)(const struct kv_books *b, int32_t id);
	double (*uses)(const struct kv_books *b, uint64_t score); /* expected, per use of the pool */
	bool fades; /* scores fall by themselves with time */
};

extern const struct kv_policy *const kv_policies[]; /* the default first; ends with NULL */

struct kv_books {
	const struct kv_shm_pool *head;
	void *shared; /* blocks memfd */
	struct kv_shm_block *descriptors;
	struct kv_prefix prefix;
	struct kv_stems stems;
	struct kv_books_saved *saved;
	struct kv_book *books; /* [id_limit], behind it */
	void *own_memory;      /* of these two, where the caller gave none */
	struct kv_space space; /* exactly the blocks that are FREE, and who is where in the extents */
	struct kv_heap lru; /* CACHED blocks: all without children, and parents not yet taken out */
	struct kv_heap_item *victims; /* scratch of kv_books_evict(), [n_victims_room] */
	uint32_t n_victims_room;
	uint64_t next_serial;
	uint64_t epoch;
	int32_t *stale_ids; /* [n_stale] that were held when their epoch ended, and are not gone */
	uint32_t n_stale;
	uint64_t *renamed; /* move.c: bits of ids in the eviction order that are books[id].parent now */
	const struct kv_policy *policy; /* "lru" until it is set */
	struct kv_ghosts ghosts;
	uint64_t now;	     /* counts uses of blocks */
	const uint32_t *clock; /* its owner's, in tenths of a second; NULL: it has none */
	uint64_t census_at, census_last; /* kv_books::now of the next and the last counting: census.c */
	uint64_t census_ghost;
	int32_t census_id; /* where the next one goes on */
	uint32_t refresh_in; /* evictions */
	uint64_t refreshed_at; /* kv_books::now */
	bool set_aside;	     /* since then, because they were held */
	bool unscored;	     /* after a rebuild: no score in the heap is worked out yet */
	uint32_t n_total, n_free, n_leased, n_cached, n_quarantined, n_moving;
	uint32_t n_leased_by[KV_MAX_SESSIONS]; /* LEASED and TWIN, by slot */
	uint64_t n_published, n_duplicates, n_evicted, n_granted;
	void (*left)(void *arg, int32_t id); /* told of each block that leaves the index; or NULL */
	void *left_arg;
};

/**
 * kv_books_init() - books of a pool without blocks
 * @head:   the index memfd, filled in
 * @index:  the bucket words in it, those of stems behind them, zero
 * @shared: the blocks memfd, zero
 *
 * Return: 0 or -ENOMEM.
 */
int kv_books_init(struct kv_books *b, const struct kv_shm_pool *head, uint64_t *index,
		  void *shared);

/*
 * kv_books_init_in() - likewise, with books that outlive this process (alloc/saved.h)
 * @memory: kv_books_saved_bytes(), the caller's; zero, or as another process left it
 */
int kv_books_init_in(struct kv_books *b, const struct kv_shm_pool *head, uint64_t *index,
		     void *shared, void *memory);
uint64_t kv_books_saved_bytes(uint32_t id_limit);

/* What kv_books_rebuild() is told, and what it tells. */
struct kv_books_found {
	bool live[KV_MAX_SESSIONS];	   /* slots with a session; what others lease is free */
	uint64_t granted[KV_MAX_SESSIONS]; /* of live slots: how many blocks were posted to it */
	bool moving;			   /* what was being copied to may still be written */
	uint32_t n_unposted;		   /* result: leased, but not posted: free again */
	uint32_t n_dropped;		   /* result: cached, and in doubt: free, or out of reach */
	uint32_t n_mirrored;		   /* result: descriptors that said something else */
	uint32_t n_index;		   /* result: entries of the index that were put right */
	uint32_t n_orphans;		   /* result: cached blocks that were found without a parent */
	uint32_t n_absent;		   /* result: of the pool's extents, and no block yet */
};

/**
 * kv_books_rebuild() - go on with books that another process left, at whatever instruction
 *
 * After kv_books_init_in(), kv_books_set_extents(), and kv_space_own() for each extent of the pool.
 * Blocks of those extents that are absent stay so, and with @found->moving those that are MOVING until
 * kv_books_move_forget(). Return: 0; -ENOMEM; -EPROTO if it isn't such memory.
 */
int kv_books_rebuild(struct kv_books *b, struct kv_books_found *found);

/* kv_books_save_counts() - what stats count goes on after a rebuild; exact when this was called last */
void kv_books_save_counts(struct kv_books *b);

void kv_books_deinit(struct kv_books *b);

/**
 * kv_books_set_extents() - blocks lie in extents of @extent_bytes, a power of two; none is the pool's yet
 *
 * Before the first block is added; otherwise all blocks lie in one. Return: 0 or -ENOMEM.
 */
int kv_books_set_extents(struct kv_books *b, uint64_t extent_bytes);

/* kv_books_add() - an absent id becomes a free block; the first one of all the null block. -ENOMEM */
int kv_books_add(struct kv_books *b, int32_t id);
bool kv_books_is_absent(const struct kv_books *b, int32_t id);
bool kv_books_is_free(const struct kv_books *b, int32_t id);

/* kv_books_remove() - all ids of a range that are FREE become absent */
void kv_books_remove(struct kv_books *b, int32_t first, int32_t n);

/* kv_books_grant() - lease @n <= n_free blocks to @slot */
void kv_books_grant(struct kv_books *b, uint32_t slot, uint32_t n, int32_t *ret_ids);
/* kv_books_grant_one() - likewise, the grant of number @posted of its session. Return: its id */
int32_t kv_books_grant_one(struct kv_books *b, uint32_t slot, uint64_t posted);

/* kv_books_give() - a session is done with a block. 0; -EINVAL if it neither leases nor holds it */
int kv_books_give(struct kv_books *b, uint32_t slot, int32_t id);

enum kv_publish_answer {
	KV_PUBLISHED = 0,
	KV_PUBLISH_TWIN = 1,	/* cached already: the lease goes on, the descriptor names the twin */
	KV_PUBLISH_REFUSED = 2, /* its parent isn't cached any more, its epoch is over, or the
				 * index is full */
};

/* kv_books_publish() - an enum kv_publish_answer; -EINVAL for an op that can't be; -ENOMEM */
int kv_books_publish(struct kv_books *b, uint32_t slot, const struct kv_op *op);

/**
 * kv_books_new_epoch() - what is cached is not found any more, and nothing is published behind it
 *
 * What nobody holds becomes free at once; the rest goes before anything else once it isn't held.
 * Return: how many are still held; -ENOMEM: nothing has changed.
 */
int64_t kv_books_new_epoch(struct kv_books *b);

/* kv_books_touch() - a lookup found @n blocks of a chain, the last of them @id. So many there are still; -EINVAL */
int kv_books_touch(struct kv_books *b, int32_t id, uint32_t n);

/**
 * kv_books_evict() - make cached blocks free that nobody holds
 * @all: exactly @n or none, in which case everything is as before
 *
 * Return: how many became free.
 */
uint32_t kv_books_evict(struct kv_books *b, uint32_t n, bool all);

/* move.c: a cached block to another place. Both ids are of this pool. */
struct kv_books_move {
	int32_t from, to;
};

/**
 * kv_books_move_plan() - empty the extents that are least in use into the others
 * @n_extents: as many, if it can be done; extents with blocks that can't move are passed over
 * @moves:     [most] filled; their `to` are MOVING now
 * @ret_extents: how many extents run empty by it
 *
 * Return: how many moves.
 */
uint32_t kv_books_move_plan(struct kv_books *b, uint32_t n_extents, struct kv_books_move *moves,
			    uint32_t most, uint32_t *ret_extents);

/**
 * kv_books_move_end() - the bytes have been copied, or not
 *
 * Return: how many blocks are at their new place; those that somebody holds or that have gone are not.
 */
uint32_t kv_books_move_end(struct kv_books *b, const struct kv_books_move *moves, uint32_t n,
			   bool copied);
/* kv_books_move_forget() - nobody copies any more: all that is MOVING is free */
void kv_books_move_forget(struct kv_books *b);

/* kv_books_least() - expected uses of the block that would go first. False: none can go. */
bool kv_books_least(struct kv_books *b, double *ret_uses);

/* kv_books_quarantine() - @slot's client is gone, its writes may go on: set its leases aside */
void kv_books_quarantine(struct kv_books *b, uint32_t slot);

/* kv_books_forget() - @slot's session is over and quiet: free its leases, clear its holder bits */
void kv_books_forget(struct kv_books *b, uint32_t slot);

/* kv_books_prefetch() - block @id, if there is one, is about to change */
void kv_books_prefetch(const struct kv_books *b, uint32_t id);

/* kv_books_give_extent() - extent @i, which no block in use touches, leaves: its blocks are absent */
void kv_books_give_extent(struct kv_books *b, uint32_t i);

/* Counts for stats, by a walk. @leased, @held: [KV_MAX_SESSIONS] or NULL; returns cached and held */
uint32_t kv_books_count(const struct kv_books *b, uint32_t *leased, uint32_t *held);

/* A count of cached blocks in slices. */
struct kv_books_count {
	int32_t at; /* -1 at first */
	uint32_t n_cached, n_held;
	uint32_t held[KV_MAX_SESSIONS];
};

/* kv_books_count_on() - the next slice; blocks may change between two. False: it was the last */
bool kv_books_count_on(const struct kv_books *b, struct kv_books_count *count);

/**
 * kv_books_check() - every invariant above, the index and the mirror
 * @live:   [KV_MAX_SESSIONS] which slots have a session, or NULL
 * @text:   the first thing that is wrong; [size]
 *
 * Return: how many things are wrong.
 */
uint64_t kv_books_check(const struct kv_books *b, const bool *live, char *text, size_t size);

/* kv_books_errors() - likewise, all of them; @id: of the block that one is about, or -1 */
typedef void kv_books_error_fn(void *arg, int32_t id, const char *text);
uint64_t kv_books_errors(const struct kv_books *b, const bool *live, kv_books_error_fn *each, void *arg);

/* A check in slices: zero at first. */
struct kv_books_proof {
	uint32_t stage;
	uint32_t part; /* how much a slice is; 0: 1,024 blocks, some 0.1 ms */
	uint64_t at;
	uint64_t n_wrong;
	int64_t shown[KV_BLOCK_STATES]; /* blocks that the pages show in a state beyond those the books say */
};

/* kv_books_prove() - the next slice of kv_books_errors(); blocks may change between two. False: it was the last */
bool kv_books_prove(const struct kv_books *b, struct kv_books_proof *proof, const bool *live,
		    kv_books_error_fn *each, void *arg);

#endif
