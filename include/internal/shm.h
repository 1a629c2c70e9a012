/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pages that daemon and clients share. Offsets and ids, never pointers.
 *
 *   index memfd    (a pool's)      clients map it read-only   kv_shm_pool, the prefix index, stems
 *   blocks memfd   (a pool's)      clients may write          kv_shm_blocks, descriptors, tokens
 *   session memfd  (a session's)   that client may write      kv_shm_session: two rings
 *
 * The pool is the trust domain. A client that scribbles hurts its own pool's hits and no other pool; the
 * daemon's own books (alloc/pool.h) are private, what stands here is their mirror, and every word
 * that comes from here is copied once and checked.
 *
 * A block's life, as its descriptor shows it (the daemon writes `word`):
 *
 *   ABSENT --extent--> FREE --grant--> LEASED --publish--> CACHED --evict--> EVICTING --> FREE
 *                        ^               |  \--publish, content is cached--> TWIN
 *                        +----- give ----+-----------------------------------+
 *
 * Pinning a cached block (any client) against evicting it (daemon):
 *
 *   client: or own bit into holders (seq)          daemon: word := EVICTING (seq)
 *           load word (seq)                                load holders (seq)
 *           not CACHED, or another generation:             not zero: word := CACHED, keep it
 *           clear own bit, it is a miss                    zero: unlink, generation + 1, FREE
 *
 * Moving a cached block: the mover copies `from` to `to` while clients go on finding and reading `from`.
 *
 *   daemon:  to FREE --> MOVING   (nobody can find it)
 *   mover:   bytes of from -> to
 *   daemon:  from := EVICTING (seq); holders of from? := CACHED, to FREE: it stays where it is
 *            to: key, serials, tokens, then CACHED; children name to; the index entry names to (one
 *            store); from := generation + 1, FREE
 *
 * A lookup in between misses; serials stay, so children and verified hits stay right. Whoever dies
 * leaves MOVING, which is free, or both blocks with the same content, which is nothing wrong.
 *
 * Both orders are safe: whoever comes second sees the other. A bit that is set for a moment on a block
 * that is not CACHED has no effect; when a session dies the daemon clears its bit everywhere.
 */
#ifndef KV_INTERNAL_SHM_H
#define KV_INTERNAL_SHM_H

#include <stdint.h>

#include "include/internal/latency.h"
#include "include/kvcached/types.h"

#define KV_SHM_MAGIC 0x31637663646b764bull
/* One more whenever a program of before would misunderstand the pages or their protocol: clients compare it. */
#define KV_SHM_ABI 8
#define KV_SHM_TEXT(n)	#n
#define KV_SHM_NAMED(n) "shm-" KV_SHM_TEXT(n)
/* What a program must say to be run on pages that another one made: kvcached --shm-version. */
#define KV_SHM_VERSION KV_SHM_NAMED(KV_SHM_ABI)
#define KV_HOLDER_WORDS (KV_MAX_SESSIONS / 64)

enum kv_block_state {
	KV_BLOCK_ABSENT = 0, /* not in an extent of this pool */
	KV_BLOCK_FREE = 1,
	KV_BLOCK_LEASED = 2,
	KV_BLOCK_TWIN = 3, /* leased; its content is cached in block key_lo, serial `serial` */
	KV_BLOCK_CACHED = 4,
	KV_BLOCK_EVICTING = 5,
	KV_BLOCK_QUARANTINED = 6, /* its last owner can't be proven quiet */
	KV_BLOCK_NULL = 7,
	KV_BLOCK_MOVING = 8, /* the mover fills it with what is cached elsewhere */
	KV_BLOCK_STATES = 9,
};

static inline const char *kv_block_state_name(uint32_t state)
{
	static const char *const names[KV_BLOCK_STATES] = {
		"absent", "free", "leased", "twin", "cached", "evicting", "quarantined", "null", "moving"};

	return state < KV_BLOCK_STATES ? names[state] : "none";
}

/* Generation in the upper half; owner's slot and state below. */
static inline uint64_t kv_block_word(uint32_t generation, uint32_t owner, uint32_t state)
{
	return (uint64_t)generation << 32 | (uint64_t)(owner & 0xffff) << 8 | (state & 0xff);
}

static inline uint32_t kv_block_generation(uint64_t word)
{
	return (uint32_t)(word >> 32);
}

static inline uint32_t kv_block_owner(uint64_t word)
{
	return (uint32_t)(word >> 8) & 0xffff;
}

static inline uint32_t kv_block_state(uint64_t word)
{
	return (uint32_t)word & 0xff;
}

/* One block, one cache line. */
struct kv_shm_block {
	uint64_t word;			   /* daemon writes */
	uint64_t holders[KV_HOLDER_WORDS]; /* each session its own bit; the daemon dead ones' */
	uint64_t serial;		   /* daemon writes: of this content, never repeated */
	uint64_t parent_serial;		   /* daemon writes: and KV_SERIAL_*, see below */
	uint64_t key_lo, key_hi;	   /* daemon writes */
	uint64_t stamp;			   /* pool clock at last use; whoever uses it writes */
} __attribute__((aligned(64)));

/*
 * What a block follows: the serial of its parent, or kv_serial_root() of its epoch for the first one
 * of a chain; and whether it has a row. One comparison tells all of it.
 */
#define KV_SERIAL_ROW ((uint64_t)1 << 63)
#define KV_SERIAL_ROOT ((uint64_t)1 << 62)

static inline uint64_t kv_serial_root(uint64_t epoch)
{
	return epoch ? KV_SERIAL_ROOT | epoch : 0;
}

/*
 * What else a block was computed from: adapter, salt, images (alloc/identity.h). Most have none. A
 * client writes the rows of blocks it leases before it publishes them.
 */
#define KV_ROW_BYTES 112

enum kv_row_form {
	KV_ROW_VERBATIM = 1, /* bytes[0..n_bytes) is the encoding */
	KV_ROW_DIGEST = 2,   /* of n_bytes of encoding */
	KV_ROW_PREFIX = 3,   /* digests of all tokens before the block, and of n_bytes of its own */
};

struct kv_shm_row {
	uint64_t form;
	uint64_t n_bytes;
	uint8_t bytes[KV_ROW_BYTES];
};

/* Head of the blocks memfd. */
struct kv_shm_blocks {
	uint64_t magic;
	uint64_t abi;
	uint64_t clock __attribute__((aligned(64))); /* clients add the blocks they touch */
};

/* What a pool may have: the daemon writes, and tells a change by the next revision. */
struct kv_shm_limits {
	uint64_t revision; /* from 1 */
	uint64_t min_bytes, max_bytes;
	uint64_t max_blocks; /* the null block not counted */
	uint64_t weight;
} __attribute__((aligned(64)));

/* Head of the index memfd: what a pool is. Written before anyone maps it, but for epoch and limits. */
struct kv_shm_pool {
	uint64_t magic;
	uint64_t abi;
	uint64_t boot_nonce;
	uint64_t pool_id;
	uint64_t seed; /* of the prefix hash */
	uint64_t key_mask; /* all ones; tests make keys collide */
	uint64_t block_bytes;
	uint32_t block_tokens;
	uint32_t id_limit;
	int32_t null_block;
	uint32_t n_buckets; /* of the index; a power of two */
	uint64_t buckets_offset; /* those of stems (alloc/stem.h) stand behind them */
	uint64_t index_bytes; /* of this memfd */
	uint64_t descriptors_offset; /* in the blocks memfd */
	uint64_t tokens_offset;	     /* in the blocks memfd: [id_limit][block_tokens] int32 */
	uint64_t blocks_bytes;	     /* of the blocks memfd */
	uint64_t rows_offset;	     /* in the blocks memfd: [id_limit] struct kv_shm_row */
	uint64_t epoch;		     /* of the weights: chains of others aren't found */
	uint64_t promises_offset;    /* in the blocks memfd: [KV_PROMISES] words */
	uint64_t live[KV_HOLDER_WORDS]; /* daemon writes: slots whose client may still publish */
	struct kv_shm_limits limits;
	/*
	 * kvcached --isolate: which granules of the arenas are the pool's. A word is 0, or the revision
	 * at which the granule came: who has mapped it under another maps it anew. The daemon writes the
	 * words, then the revision.
	 */
	uint64_t granules_offset; /* [n_granules] words in this memfd */
	uint64_t n_granules;	  /* 0: there are none, clients map whole arenas */
	uint64_t map_revision;
	uint64_t trace_salt; /* not 0: requests are told of (libclient/trace.c); the daemon writes */
	uint64_t n_stem_buckets; /* a power of two, or 0 */
};

/*
 * The prefix index: buckets of 8 words, a word is (tag << 32 | id + 1), 0 is empty. An entry is
 * in one of two buckets that follow from its key. Only the daemon writes; an entry is a hint that the
 * descriptor confirms, so readers need no lock and no retry.
 */
#define KV_BUCKET_WORDS 8

/*
 * Promises: keys of blocks that a session is about to compute, so that others may wait for them. A
 * word is tag << 32 | (slot + 1) << 24 | until, 0 is empty; it stands anywhere in the bucket of its key.
 * Until: sixteenths of a second of CLOCK_MONOTONIC, modulo 2^24, and never more than KV_PROMISE_MOST
 * ahead. Any client writes, by compare and swap. They are hints: who believes a wrong one waits for
 * nothing, until its deadline. The daemon clears what is over before the clock comes round (12 days),
 * and what a session left before another gets its slot.
 */
#define KV_PROMISES 16384u
#define KV_PROMISE_BUCKET 8u
#define KV_PROMISE_TICK (KV_SEC / 16)
#define KV_PROMISE_MOST (3600 * KV_SEC)
#define KV_PROMISE_TIME 0xffffffu /* the bits of `until` */

static inline uint32_t kv_promise_until(int64_t ns)
{
	return (uint32_t)(ns / KV_PROMISE_TICK) & KV_PROMISE_TIME;
}

static inline uint32_t kv_promise_slot(uint64_t word)
{
	return ((uint32_t)word >> 24) - 1;
}

/* More than any promise may have left is time that has passed. */
static inline int kv_promise_is_over(uint64_t word, int64_t now)
{
	uint32_t left = ((uint32_t)word - kv_promise_until(now)) & KV_PROMISE_TIME;

	return left > KV_PROMISE_MOST / KV_PROMISE_TICK;
}

/* What a client asks of the daemon without waiting. */
enum kv_op_kind {
	KV_OP_GIVE = 1,	   /* id: the block goes back */
	KV_OP_PUBLISH = 2, /* id is complete: its chain parent, its key; tokens stand in the table */
	KV_OP_TOUCH = 3,   /* a lookup found a chain: id is the last of `parent` blocks; may be lost */
};

#define KV_OP_ROW   1u /* PUBLISH: the block has a row */
#define KV_OP_AGAIN 2u /* PUBLISH: it was a twin, and its original is gone; cached by now: nothing happens */

struct kv_op {
	uint32_t kind;
	int32_t id;
	int32_t parent; /* block id, or -1 for the first of a chain */
	uint32_t flags; /* KV_OP_* */
	uint64_t parent_serial; /* of the parent as the client saw it cached; 0: not seen yet;
				 * of the first of a chain: kv_serial_root() of its epoch */
	uint64_t key_lo, key_hi;
	uint64_t stamp;
	uint64_t reserved2[2];
};

/* A ring with one producer and one consumer. Indexes run freely; slot = index & (capacity - 1). */
struct kv_ring {
	uint32_t head __attribute__((aligned(64))); /* producer writes: items posted */
	uint32_t tail __attribute__((aligned(64))); /* consumer writes: items taken */
};

/*
 * Head of the session memfd.
 *
 * The stack of idle leases lies here, so that the daemon can call them back from a client that sleeps:
 *
 *   client: busy := 1                              daemon: recall := 1
 *           (a barrier that costs it nothing)              membarrier(): orders the client's side
 *           load recall: not 0: busy := 0, wait            load busy: not 0: recall := 0, another time
 *           stack and ring of grants are its own           stack and ring of grants are its own
 *           busy := 0 (release)                            recall := 0 (release)
 *
 * Both orders are safe: whoever comes second sees the other. Where the kernel has no membarrier for
 * the client, it makes a full barrier itself (`fenced`).
 */
struct kv_shm_session {
	uint64_t magic;
	uint64_t abi;
	uint32_t slot;		  /* bit number in holders */
	uint32_t grant_capacity;  /* a power of two, >= id_limit: grants always fit */
	uint32_t op_capacity;	  /* a power of two */
	uint32_t n_magazine;	  /* daemon writes: how many idle blocks this session should keep */
	uint64_t grants_offset;	  /* int32 [grant_capacity] */
	uint64_t ops_offset;	  /* struct kv_op [op_capacity] */
	uint64_t stack_offset;	  /* int32 [grant_capacity]: idle leases, the hottest last */
	uint64_t bytes;		  /* of this memfd */
	/* Daemon writes, client reads. */
	uint32_t recall __attribute__((aligned(64)));
	uint32_t waiting;	  /* somebody waits for room: tell the daemon when a block is let go */
	uint32_t pressure;	  /* counts notices */
	uint32_t pressure_blocks; /* to give back; 0: no notice stands */
	int64_t pressure_deadline; /* CLOCK_MONOTONIC, ns */
	struct kv_ring grants;	  /* daemon posts ids, client takes; what it hasn't the daemon may take back */
	struct kv_ring ops;	  /* client posts, daemon takes */
	uint32_t kick __attribute__((aligned(64))); /* client: 1 = told; daemon: 0 = looking now */
	/* Client writes, daemon reads; the stack also the other way round, see above. */
	uint32_t busy __attribute__((aligned(64)));
	uint32_t fenced;
	union {
		struct {
			uint32_t n_stack;
			uint32_t n_called; /* daemon writes: idle leases it has called back from the stack */
		};
		uint64_t stack_word; /* both, for the daemon: which lease it took shows by this one store */
	};
	uint64_t let_go; /* it has unmapped what had left the pool by this map_revision */
	/* Client writes, daemon reads for stats. */
	uint64_t lookup_tokens;
	uint64_t hit_tokens;
	struct kv_latency lookups;
};

_Static_assert(sizeof(struct kv_shm_block) == 64, "a block descriptor is one cache line");
_Static_assert(sizeof(struct kv_op) == 64, "an op is one cache line");
_Static_assert(sizeof(struct kv_shm_row) == 128, "a row is two cache lines");

static inline struct kv_shm_block *kv_shm_descriptors(void *blocks, const struct kv_shm_pool *pool)
{
	return (struct kv_shm_block *)((char *)blocks + pool->descriptors_offset);
}

/* tokens[id][0..block_tokens) */
static inline int32_t *kv_shm_tokens(void *blocks, const struct kv_shm_pool *pool, int32_t id)
{
	return (int32_t *)((char *)blocks + pool->tokens_offset) +
	       (int64_t)id * pool->block_tokens;
}

static inline uint64_t *kv_shm_granules(struct kv_shm_pool *pool)
{
	return (uint64_t *)((char *)pool + pool->granules_offset);
}

static inline uint64_t *kv_shm_promises(void *blocks, const struct kv_shm_pool *pool)
{
	return (uint64_t *)((char *)blocks + pool->promises_offset);
}

static inline struct kv_shm_row *kv_shm_row(void *blocks, const struct kv_shm_pool *pool, int32_t id)
{
	return (struct kv_shm_row *)((char *)blocks + pool->rows_offset) + id;
}

#endif
