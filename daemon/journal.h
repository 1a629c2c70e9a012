/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the worker writes down so that another one can go on: memory that only workers map, held by the
 * keeper. alloc/saved.h says the same of a pool's blocks.
 *
 *   journal memfd   kv_journal, then the map of extents (alloc/extent.h: an entry is one store)
 *   books memfd     a pool's: kv_pool_record, then its books (alloc/saved.h)
 *
 * Every word is written by the worker alone. A record counts by its state, which is written last when it
 * begins to count, and first when it ends; all states change by one store:
 *
 *   pool      NONE -> MAKING -> LIVE -> ENDING     only LIVE ones are taken over; the extents of others
 *                                                  are dirty, their deposits are dropped
 *   session   NONE -> OPENING -> LIVE -> DROPPED -> ENDING -> NONE
 *
 * OPENING: its client may not know of it yet (it asks anew when its call is cut off); it is LIVE from
 * the first message after the answer on. DROPPED: it was hung up on for what it did, and what it leases
 * stays quarantined until its process ends. ENDING: its blocks are being freed; that is done to the end.
 *
 * A session's ops are done one by one, and counted after each (`ops_done`): the one that was under way
 * may have been done, or not. It is done again. To give what is given already, or to publish what
 * is published, is refused by the books, and for this one op that is no fault of the client.
 */
#ifndef KV_DAEMON_JOURNAL_H
#define KV_DAEMON_JOURNAL_H

#include <sys/types.h>

#include "daemon/device.h"
#include "include/internal/wire.h"

#define KV_JOURNAL_MAGIC 0x6c616e72756f6aull
#define KV_JOURNAL_BYTES 65536 /* of kv_journal, before the map of extents */
#define KV_RECORD_BYTES	 262144 /* of kv_pool_record, before the books */

struct kv_journal_gpu {
	struct kv_device_info info;
	struct kv_arena_export export;
	char why[128];
};

struct kv_journal {
	uint64_t magic; /* written last, when all arenas have been deposited */
	uint64_t bytes;
	uint64_t boot_nonce;
	int64_t started_ns; /* of the first worker */
	uint64_t next_session_id, next_pool_id;
	uint64_t extent_bytes;
	uint32_t n_gpus;
	uint32_t host;
	struct kv_journal_gpu gpus[KV_MAX_GPUS];
};

enum kv_record_state {
	KV_RECORD_NONE = 0,
	KV_RECORD_MAKING = 1,
	KV_RECORD_OPENING = 2,
	KV_RECORD_LIVE = 3,
	KV_RECORD_DROPPED = 4,
	KV_RECORD_ENDING = 5,
};

struct kv_session_record {
	uint64_t state; /* enum kv_record_state */
	uint64_t id;
	uint64_t token; /* random; who takes the session up again says it */
	uint64_t granted; /* blocks posted to it and not called back; the low half is the head of its ring of grants */
	uint64_t ops_done; /* the low half is the tail of its ring of ops */
	uint64_t calling; /* an idle lease that is being called back (recall.c): n_called after it << 32 | id + 1 */
	uint64_t n_published;
	uint64_t mapped; /* 1: it has been given granules */
	uint64_t read_only;
	int64_t since_ns;
	int32_t pid;
	uint32_t uid;
	char name[KV_NAME_MAX]; /* of its client */
};

struct kv_limits_record {
	uint64_t min_bytes, max_bytes, weight;
};

struct kv_pool_record {
	uint64_t state; /* enum kv_record_state */
	uint64_t id;
	uint64_t bytes; /* of this memfd */
	struct kv_limits_record limits[2]; /* limits[limits_revision % 2] counts: all of it changes by one store */
	uint64_t limits_revision;
	uint64_t slab_offset, slab_blocks;
	uint64_t first_extent;
	uint64_t made_by; /* uid + 1 of the user whose limits count it; 0: nobody's */
	uint64_t lookup_tokens, hit_tokens, n_no_room; /* of sessions that have ended */
	uint64_t n_evicted_others, n_evicted_drop; /* for another pool; as an operator said */
	struct kv_latency refills, lookups; /* from a LEASE to its answer; of sessions that have ended */
	struct kv_session_record sessions[KV_MAX_SESSIONS];
	struct kv_msg_pool_open opened; /* as its first client opened it, with its components */
};

_Static_assert(sizeof(struct kv_journal) <= KV_JOURNAL_BYTES, "the journal has its pages");
_Static_assert(sizeof(struct kv_pool_record) + KV_MAX_COMPONENTS * sizeof(struct kv_component) <=
		       KV_RECORD_BYTES,
	       "a pool's record has its pages");

struct kv_daemon;
struct kv_pool;
struct kv_session;

/* kv_shared_pages() - a memfd of @bytes that nobody can shrink or grow, mapped here. 0; -errno */
int kv_shared_pages(const char *name, uint64_t bytes, int *ret_fd, void **ret);
/* kv_shared_map() - one that another process made; its size is checked. 0; -errno */
int kv_shared_map(int fd, uint64_t bytes, void **ret);

/* kv_journal_new() - deposit arenas and journal; @map: where the map of extents is to be. 0; negative */
int kv_journal_new(struct kv_daemon *d, uint64_t extent_bytes, uint64_t map_bytes, void **ret_map);

/* kv_rebuild() - go on where a worker has died: arenas, pools, sessions. 0; negative with text */
int kv_rebuild(struct kv_daemon *d);

#endif
