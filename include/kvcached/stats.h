/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the daemon can say of itself: devices, pools, sessions. kvctl, its JSON and other programs
 * read the same structs; kv_stat_fields() names each number, its unit and its meaning.
 *
 * The books: blocks_free + _leased + _cached + _quarantined + _moving == blocks_total for
 * every pool; extents: bytes_free + bytes_scrubbing + bytes_pools == bytes_arena for every device.
 */
#ifndef KVCACHED_STATS_H
#define KVCACHED_STATS_H

#include <kvcached/client.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kv_daemon_stats {
	char version[16];
	char event_loop[16];	  /* "io_uring" or "epoll" */
	char event_loop_why[96]; /* why not io_uring; "" otherwise */
	char heap[16];		  /* "jemalloc" or "libc" */
	uint64_t boot_nonce;
	uint64_t pid; /* of the process that was started, the keeper */
	uint64_t worker_pid;
	uint64_t worker_restarts; /* workers before this one that had served */
	uint64_t programs_given_up; /* of restart-worker --binary: they ended before they served */
	uint64_t uptime_ns;
	uint64_t n_gpus;
	uint64_t n_pools;
	uint64_t n_clients;
	uint64_t n_sessions;
	uint64_t heap_bytes;
	uint64_t heap_active_bytes;   /* in pages that hold something; 0: libc doesn't say */
	uint64_t heap_resident_bytes; /* in memory, those of the allocator's own included */
	uint64_t heap_mapped_bytes;
	uint64_t heap_retained_bytes; /* address space kept for later */
	uint64_t event_batches_total;  /* KV events handed to the sender */
	uint64_t event_restarts_total; /* streams that had to begin anew: the queue was full */
	uint64_t moved_bytes_total; /* that pools gave up for others, on one device each */
	uint64_t moving_ns_total;   /* CPU time of the worker for making room, where blocks weren't free */
};

struct kv_gpu_stats {
	uint64_t index;
	char name[64];
	char uuid[48];
	char export_kind[8];
	char export_why[96]; /* what the probe found, where vmm isn't used */
	char export_limits[192]; /* promises that don't hold with this kind; "": all hold */
	uint64_t bytes_arena;
	uint64_t bytes_pools;	  /* in extents of pools */
	uint64_t bytes_scrubbing; /* given back, not zeroed yet */
	uint64_t bytes_free;
	uint64_t bytes_extent; /* size of one extent */
	uint64_t mover_pid;
	uint64_t scrubbed_bytes_total;
	char mover_error[96]; /* why its mover failed last; "" since it has zeroed something */
	/* kvcached --isolate */
	uint64_t bytes_granule; /* what clients of one pool alone can map; 0: all can map all */
	uint64_t bytes_held; /* of bytes_scrubbing: missing, clients of an earlier pool keep it mapped */
	uint64_t renewed_bytes_total; /* given up after clients had it, and made anew */
};

struct kv_pool_stats {
	uint64_t id;
	char name[KV_NAME_MAX];
	char model[KV_NAME_MAX];
	char revision[KV_NAME_MAX];
	char name_space[KV_NAME_MAX];
	char layout[16]; /* "flat", "paged" */
	uint64_t gpu_mask;
	uint64_t tp_ranks;
	uint64_t block_tokens;
	uint64_t block_bytes;
	uint64_t n_sessions;
	uint64_t min_bytes;
	uint64_t max_bytes;
	uint64_t extent_bytes; /* on each of its devices */
	uint64_t blocks_total;
	uint64_t blocks_free;
	uint64_t blocks_leased;	     /* magazines included */
	uint64_t blocks_cached;	     /* in the prefix index, held or not */
	uint64_t blocks_cached_held; /* of these, held by a session */
	uint64_t blocks_quarantined; /* of a client that can't be proven quiet */
	uint64_t lookup_tokens_total;
	uint64_t hit_tokens_total;
	uint64_t published_total;
	uint64_t duplicates_total; /* published, but cached already */
	uint64_t evictions_total;
	uint64_t evictions_own_total;	 /* of these: for a request of its own sessions, */
	uint64_t evictions_others_total; /* because another pool needed the memory, */
	uint64_t evictions_drop_total;	 /* because an operator said so */
	uint64_t grants_total; /* blocks */
	uint64_t no_room_total;
	uint64_t waiting; /* requests that wait for room */
	uint64_t weight;  /* of its share of what is above all minimums */
	uint64_t share_bytes; /* minimum and share, on each of its devices */
	uint64_t blocks_moving; /* reserved for what is being copied from elsewhere in the pool */
	uint64_t spare_bytes; /* extents that no block in use touches: others can have them now */
	uint64_t fragmented_bytes; /* free, but beside blocks in use: for others after compaction */
	uint64_t compacting; /* 1 while an operator's compaction runs */
	uint64_t compacted_bytes_total;
	uint64_t recalled_total; /* idle leases called back from sessions, blocks */
	uint64_t limits_revision; /* one more with each change of min_bytes, max_bytes, weight */
	uint64_t compacting_ns_total; /* how long operators' compactions took that are over */
};

struct kv_session_stats {
	uint64_t id;
	uint64_t pool_id;
	char pool[KV_NAME_MAX];
	char client[KV_NAME_MAX];
	char state[16]; /* "live"; "away": not back since a worker died; "dying" */
	uint64_t pid;
	uint64_t uid;
	uint64_t slot;
	uint64_t since_ns; /* age of the attachment */
	uint64_t blocks_leased;
	uint64_t blocks_idle; /* of these, in its magazine (the client's own word) */
	uint64_t blocks_held; /* cached blocks it holds */
	uint64_t lookup_tokens_total;
	uint64_t hit_tokens_total;
	uint64_t published_total;
};

/* One answer of kv_check(). */
struct kv_check_result {
	uint64_t n_pools;
	uint64_t n_blocks;
	uint64_t n_errors;
	char first_error[192];
};

/*
 * The books of a pool twice: as the worker's own counters have them, and counted over the pages that it
 * shares with clients. All within one moment.
 */
struct kv_balance_stats {
	uint64_t id;
	char name[KV_NAME_MAX];
	uint64_t blocks_total;
	uint64_t blocks_free, blocks_leased, blocks_cached, blocks_quarantined, blocks_moving;
	uint64_t pages_free, pages_leased, pages_cached, pages_quarantined, pages_moving;
	uint64_t n_errors;
};

/* One thing that kv_check() found wrong, of the first KV_CHECK_ERRORS; a block with both opinions. */
#define KV_CHECK_ERRORS 1000
struct kv_error_stats {
	uint64_t pool_id;
	char pool[KV_NAME_MAX]; /* "": it is about a device */
	uint64_t is_block;	/* 1: the members from block on mean something */
	uint64_t block;
	char pages_state[16]; /* "free", "leased", "cached", ...; "none": no state is that number */
	uint64_t pages_slot, pages_generation;
	char books_state[16];
	uint64_t books_slot, books_generation;
	char text[192];
};

/* A pool at one moment of the last hours (KV_STAT_HISTORY), oldest first; totals count from the pool's start. */
struct kv_history_stats {
	uint64_t ago_ns;
	uint64_t pool_id;
	uint64_t blocks_leased, blocks_cached, blocks_free;
	uint64_t lookup_tokens_total;
	uint64_t hit_tokens_total;
	uint64_t published_total;
	uint64_t evictions_total;
	uint64_t no_room_total;
	uint64_t refills_total;
	uint64_t refill_ns_total;
};

/* One block, by the worker's books (kv_block_show()). */
struct kv_block_stats {
	uint64_t pool_id;
	char pool[KV_NAME_MAX];
	uint64_t id;
	char state[16]; /* "free", "leased", "twin", "cached", "evicting", "quarantined", "null", "moving", "absent" */
	uint64_t since_ns;   /* how long it has been that, to a tenth of a second; 0: not known */
	uint64_t n_sessions; /* that lease it, or hold it where it is cached */
	uint64_t generation; /* one more with each owner */
	uint64_t offset_bytes; /* where in the arena, in a flat layout */
	/* What is in it, of a block that is cached (or a twin: content that is cached elsewhere, too). */
	uint64_t n_tokens;
	uint64_t n_listed;   /* of these: the answer has room for that many */
	uint64_t epoch;	     /* of the weights that computed it */
	uint64_t is_stale;   /* 1: that epoch is over, nobody finds it */
	uint64_t is_loose;   /* 1: a window's or a state's: found without the blocks before it */
	uint64_t position;   /* tokens before it; of a loose one: not known, 0 */
	uint64_t parent;     /* the block before it, if position isn't 0; of a twin: what it is a twin of */
	uint64_t n_children; /* blocks cached behind it */
	uint64_t uses_total; /* lookups that found it */
	uint64_t idle_uses;  /* lookups of blocks in the pool since it was published or found last */
	char identity[192];  /* what it was computed from besides tokens: fields and extras; "": nothing */
};

enum kv_stat_kind {
	KV_STAT_DAEMON,
	KV_STAT_GPU,
	KV_STAT_POOL,
	KV_STAT_SESSION,
	KV_STAT_BALANCE,
	KV_STAT_ERROR,
	KV_STAT_HISTORY,
	KV_STAT_BLOCK, /* has fields, but isn't for kv_stats(): kv_block_show() */
};

enum kv_stat_type {
	KV_STAT_TEXT,
	KV_STAT_NUMBER,
};

struct kv_stat_field {
	const char *name; /* as in the struct */
	const char *unit; /* "bytes", "blocks", "tokens", "ns", "" */
	const char *help;
	uint16_t type; /* enum kv_stat_type */
	uint16_t offset;
};

/* kv_stat_fields() - the fields of a struct above, in order, ending with a NULL name */
const struct kv_stat_field *kv_stat_fields(enum kv_stat_kind kind);

/* kv_stat_bytes() - size of the struct of @kind; 0 for a number that names none */
size_t kv_stat_bytes(enum kv_stat_kind kind);

/**
 * kv_stats() - ask the daemon
 * @ret_items: array of the struct of @kind, from malloc(); the caller frees it
 * @ret_n:     how many (1 for KV_STAT_DAEMON)
 *
 * Return: 0; -ECONNRESET; -ETIMEDOUT; -ENOMEM.
 */
int kv_stats(struct kv_client *client, enum kv_stat_kind kind, void **ret_items, size_t *ret_n,
	     int64_t timeout);

/**
 * kv_block_show() - what a block is, who has it, and whose tokens are in it
 * @pool:	  name of its pool; it need not be open here
 * @ret_sessions: array of kv_block_stats::n_sessions from malloc(), or NULL: who asked for it or uses it now
 * @ret_tokens:	  array of kv_block_stats::n_listed from malloc(), or NULL; what stands in the shared pages
 *
 * All of one moment. Of a leased block nobody but its client knows what will stand in it.
 * Return: 0; -ENOENT: no such pool; -EINVAL: it has no such id, the text says which it has; -EACCES if the
 *	   access list (kvcached --access) doesn't let this user read the pool; as kv_stats().
 */
int kv_block_show(struct kv_client *client, const char *pool, kv_block_id id, struct kv_block_stats *ret,
		  struct kv_session_stats **ret_sessions, int32_t **ret_tokens, int64_t timeout);

/**
 * kv_check() - the daemon walks its books, the shared pages and the extents, and compares
 *
 * Return: 0 (see n_errors); negative as kv_stats().
 */
int kv_check(struct kv_client *client, struct kv_check_result *ret, int64_t timeout);

/**
 * kv_pool_drop() - evict what a pool has cached and nobody holds; a pool without sessions is removed
 *
 * Return: 0; -ENOENT if there is no pool of that name.
 */
int kv_pool_drop(struct kv_client *client, const char *name, int64_t timeout);

/**
 * kv_pool_compact() - move what a pool has cached together, so that extents of it run empty
 * @rate: bytes a second that may be copied; 0: as fast as it goes
 *
 * Goes on in the background, with pauses while anybody waits for room, until nothing is to be gained
 * (kv_pool_stats::compacting). Blocks that somebody holds or leases stay where they are.
 * Return: 0, it has begun; -ENOENT; -ENOTSUP for a paged pool; as kv_stats().
 */
int kv_pool_compact(struct kv_client *client, const char *name, uint64_t rate, int64_t timeout);

#define KV_WEIGHT_MAX 10000u

/* Which limits kv_pool_set() changes; the others stay. */
enum kv_limit {
	KV_LIMIT_MIN = 1,
	KV_LIMIT_MAX = 2,
	KV_LIMIT_WEIGHT = 4,
};

struct kv_pool_limits {
	size_t size;
	uint32_t change;    /* enum kv_limit bits */
	uint32_t weight;    /* 1 to KV_WEIGHT_MAX; pools begin with 1 */
	uint64_t min_bytes; /* on each of its devices */
	uint64_t max_bytes; /* likewise; 0: as much as there is */
	uint64_t revision;  /* that is replaced: -ESTALE if it is another by now; 0: whichever it is */
};

/**
 * kv_pool_set() - change a pool's limits while it runs
 * @ret_revision: of the new limits; or NULL
 *
 * In force when it returns, for clients that are busy and those that sleep. Above a lower maximum the
 * pool gives up at once what it has cached and nobody holds, and idle leases; what is in use leaves as
 * it is given back, and until then nothing more is leased. A higher minimum is kept for the pool from
 * then on: above what all others' minimums leave to it each of the others does likewise.
 *
 * Return: 0; -ENOENT; -EINVAL, the text names the field, the value and what is possible; -ENOMEM if
 *         the minimums exceed the memory, with the numbers; -ENOTSUP for a paged pool's maximum above
 *         its slab; -ESTALE; as kv_stats().
 */
int kv_pool_set(struct kv_client *client, const char *name, const struct kv_pool_limits *limits,
		uint64_t *ret_revision, int64_t timeout);

/**
 * kv_worker_restart() - another worker of the daemon takes over; pools, cache and leases stay
 * @binary: path of the kvcached to run from now on, seen from the daemon; NULL: the same again
 *
 * For root and the daemon's own user. Clients notice nothing but a late answer. The other program
 * must know the same shared memory: it is asked before the worker ends.
 * Return: 0, the other one serves; -EPERM; -EPROTO if it can't take over, the text says why; -ENOENT,
 *         -EACCES of the file; -EBUSY if a restart is under way; -EIO if it ended before it served
 *         and the one before was started again; as kv_stats().
 */
int kv_worker_restart(struct kv_client *client, const char *binary, int64_t timeout);

#ifdef __cplusplus
}
#endif
#endif
