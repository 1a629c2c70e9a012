/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages on the socket: AF_UNIX SEQPACKET, one message a packet, little-endian as the machine is.
 *
 * Every message begins with struct kv_wire_head; `size` is the whole packet. A request is answered by
 * one message with its `tag`: of the reply's type, or KV_MSG_ERROR. Fds travel with it where noted.
 * KV_MSG_KICK and KV_MSG_WANT have no answer. What comes from a peer is checked field by field.
 *
 * A connection begins with HELLO. It can open one pool: that is a session; who wants several opens
 * several connections. One request is under way at a time on each, so an answer always finds room in
 * the socket, and a peer that doesn't read is dropped. A call that is given up (its deadline has passed)
 * may still be answered later: who reads passes over answers with other tags. A LEASE that still waits
 * in the daemon is ended by the next one on its connection.
 */
#ifndef KV_INTERNAL_WIRE_H
#define KV_INTERNAL_WIRE_H

#include <stdint.h>

#include "include/internal/arena_export.h"
#include "include/kvcached/layout.h"
#include "include/kvcached/stats.h"

#define KV_WIRE_MAGIC 0x4b56u
#define KV_WIRE_VERSION 1
#define KV_WIRE_MAX 65536 /* bytes of a packet */
#define KV_WIRE_MAX_FDS 250
#define KV_WIRE_TEXT 1024
#define KV_PATH_MAX 4096

enum kv_msg_type {
	KV_MSG_ERROR = 1,
	KV_MSG_OK = 2,
	KV_MSG_HELLO = 3,
	KV_MSG_WELCOME = 4,
	KV_MSG_PING = 5,
	KV_MSG_POOL_OPEN = 6,
	KV_MSG_POOL_OPENED = 7, /* fds: index, blocks, session */
	KV_MSG_POOL_CLOSE = 8,
	KV_MSG_POOL_LAYOUT = 9, /* answered by KV_MSG_LAYOUT */
	KV_MSG_LAYOUT = 10,
	KV_MSG_ARENA = 11,	   /* answered by KV_MSG_ARENA_PART, with up to 250 fds */
	KV_MSG_ARENA_PART = 12,
	KV_MSG_LEASE = 13,
	KV_MSG_LEASED = 14,
	KV_MSG_WANT = 15,
	KV_MSG_KICK = 16,
	KV_MSG_STATS = 17, /* answered by KV_MSG_STATS_PART until `left` is 0 */
	KV_MSG_STATS_PART = 18,
	KV_MSG_CHECK = 19,
	KV_MSG_CHECKED = 20,
	KV_MSG_POOL_DROP = 21,
	KV_MSG_RESUME = 22, /* instead of POOL_OPEN: a session that a worker before this one made */
	KV_MSG_RESTART = 23,
	KV_MSG_POOL_EPOCH = 40, /* answered by KV_MSG_EPOCH */
	KV_MSG_EPOCH = 41,
	KV_MSG_POOL_SET = 50, /* answered by KV_MSG_POOL_LIMITS */
	KV_MSG_POOL_LIMITS = 51,
	KV_MSG_POOL_COMPACT = 52,
	KV_MSG_GRANULES = 60, /* --isolate: answered by KV_MSG_GRANULES_PART, with a fd for each item */
	KV_MSG_GRANULES_PART = 61,
	KV_MSG_POOL_OPEN_READ = 62, /* as POOL_OPEN; blocks and arena come for reading */
	KV_MSG_BLOCK = 70, /* answered by KV_MSG_BLOCK_SHOWN */
	KV_MSG_BLOCK_SHOWN = 71,
	KV_MSG_TRACE = 72, /* requests are recorded for this connection from now on */
	KV_MSG_TRACE_NEXT = 73, /* answered by KV_MSG_TRACE_PART */
	KV_MSG_TRACE_PART = 74,
	KV_MSG_TRACED = 75, /* of a session, without an answer: a request has ended */
};

struct kv_wire_head {
	uint16_t magic;
	uint16_t version;
	uint16_t type;
	uint16_t reserved;
	uint32_t size;
	uint32_t tag; /* chosen by who asks, repeated in the answer; 0: no answer wanted */
};

struct kv_msg_error {
	struct kv_wire_head head;
	int32_t error; /* negative errno */
	char text[KV_WIRE_TEXT];
};

struct kv_msg_plain { /* OK, PING, POOL_CLOSE, POOL_LAYOUT, KICK, CHECK */
	struct kv_wire_head head;
};

struct kv_msg_hello {
	struct kv_wire_head head;
	char name[KV_NAME_MAX];
	char version[16];
};

struct kv_msg_welcome {
	struct kv_wire_head head;
	uint64_t client_id;
	uint64_t boot_nonce;
	char version[16];
	uint32_t n_gpus;
	uint32_t shm_abi; /* of the pages that it will share */
	struct kv_gpu gpus[KV_MAX_GPUS];
};

struct kv_msg_pool_open {
	struct kv_wire_head head;
	char name[KV_NAME_MAX];
	char model[KV_NAME_MAX];
	char revision[KV_NAME_MAX];
	char name_space[KV_NAME_MAX];
	uint32_t tp_ranks;
	uint32_t gpu_mask;
	uint64_t min_bytes;
	uint64_t max_bytes;
	uint32_t weight; /* 0: 1 */
	uint32_t reserved;
	uint32_t layout_kind; /* 0: no layout given */
	uint32_t layout_flags;
	uint32_t block_tokens;
	uint32_t n_components;
	struct kv_component components[]; /* [n_components] */
};

struct kv_msg_pool_opened {
	struct kv_wire_head head;
	uint64_t pool_id;
	uint64_t session_id;
	uint64_t block_bytes;
	uint64_t max_blocks;
	uint64_t slab_offset; /* paged: where in the arena; flat: 0 */
	uint64_t slab_blocks; /* paged: ids are 0..slab_blocks-1 */
	uint64_t index_bytes, blocks_bytes, session_bytes;
	uint32_t gpu_mask;
	uint32_t slot;
	uint64_t token; /* for RESUME */
};

struct kv_msg_resume { /* answered by OK; -ENOENT: there is no such session any more */
	struct kv_wire_head head;
	uint64_t boot_nonce;
	uint64_t pool_id;
	uint64_t session_id;
	uint64_t token;
	uint32_t slot;
	uint32_t reserved;
};

struct kv_msg_restart { /* answered by OK when the worker is about to end */
	struct kv_wire_head head;
	char binary[KV_PATH_MAX]; /* "": the same again */
};

struct kv_msg_layout {
	struct kv_wire_head head;
	uint32_t kind, flags, block_tokens, n_components;
	struct kv_component components[];
};

struct kv_msg_arena {
	struct kv_wire_head head;
	uint32_t gpu;
	uint32_t first_fd;
};

struct kv_msg_arena_part {
	struct kv_wire_head head;
	struct kv_arena_export export;
	uint32_t first_fd;
	uint32_t n_fds; /* in this message */
};

struct kv_msg_granules {
	struct kv_wire_head head;
	uint32_t gpu;
	uint32_t n;
	uint32_t index[KV_WIRE_MAX_FDS];
};

struct kv_granule_item {
	uint64_t word; /* what stands for it in the pool's pages: include/internal/shm.h */
	uint32_t index;
	uint32_t reserved;
};

struct kv_msg_granules_part { /* those that are the pool's */
	struct kv_wire_head head;
	uint32_t n;
	uint32_t reserved;
	struct kv_granule_item items[KV_WIRE_MAX_FDS];
};

struct kv_msg_lease { /* LEASE, WANT */
	struct kv_wire_head head;
	uint32_t n;	/* LEASE: all or nothing. WANT: as many as there are at hand */
	uint32_t extra; /* LEASE: and so many for the magazine, if they are at hand */
	int64_t timeout_ns;
};

struct kv_msg_leased {
	struct kv_wire_head head;
	int32_t answer; /* 0, KV_NO_ROOM, KV_TOO_LARGE */
	uint32_t n;	/* ids that were posted in the ring, those for the magazine included */
};

struct kv_msg_stats {
	struct kv_wire_head head;
	uint32_t kind; /* enum kv_stat_kind */
	uint32_t first;
};

struct kv_msg_stats_part {
	struct kv_wire_head head;
	uint32_t n;    /* items in this message */
	uint32_t left; /* items after it */
	uint32_t item_bytes;
	uint32_t reserved;
	uint64_t items[]; /* array of the struct of the kind */
};

#define KV_TRACE_TOKENS 512u /* that one key stands for: the form of public traces */

struct kv_trace_key {
	uint64_t lo, hi;
};

struct kv_msg_trace {
	struct kv_wire_head head;
	char pool[KV_NAME_MAX]; /* "": all */
	uint64_t salt;		/* not 0 */
};

struct kv_msg_traced {
	struct kv_wire_head head;
	int64_t start_ns; /* CLOCK_MONOTONIC: its lookup */
	uint64_t number;  /* of this session's requests, from 1 */
	uint64_t n_input, n_hit, n_output; /* tokens */
	uint32_t n_keys;
	uint32_t reserved;
	struct kv_trace_key keys[]; /* [n_keys] of each KV_TRACE_TOKENS of the input and all before, the last may be partial */
};

struct kv_trace_record {
	int64_t start_ns;
	uint64_t session, pool, number;
	uint64_t n_input, n_hit, n_output;
	uint64_t n_keys; /* struct kv_trace_key [n_keys] follow */
};

struct kv_msg_trace_part {
	struct kv_wire_head head;
	uint64_t n_lost; /* in the daemon, since the start */
	uint32_t n;
	uint32_t more; /* 1: some wait */
	uint64_t items[]; /* [n] records, each with its keys */
};

/* The most a request may have: one that finds no room in a part would be in the way of all after it. */
#define KV_TRACE_KEYS \
	((KV_WIRE_MAX - sizeof(struct kv_msg_trace_part) - sizeof(struct kv_trace_record)) / \
	 sizeof(struct kv_trace_key))

struct kv_msg_block {
	struct kv_wire_head head;
	char pool[KV_NAME_MAX];
	uint32_t id;
	uint32_t reserved;
};

struct kv_msg_block_shown {
	struct kv_wire_head head;
	struct kv_block_stats block;
	uint32_t n_sessions; /* [n_sessions] struct kv_session_stats, then */
	uint32_t n_tokens;   /* [n_tokens] int32_t */
	uint64_t items[];
};

struct kv_msg_checked {
	struct kv_wire_head head;
	struct kv_check_result result;
};

struct kv_msg_drop { /* POOL_DROP, POOL_EPOCH */
	struct kv_wire_head head;
	char name[KV_NAME_MAX];
};

struct kv_msg_epoch {
	struct kv_wire_head head;
	uint64_t epoch;
	uint64_t n_held; /* blocks of older ones that somebody holds */
};

struct kv_msg_compact {
	struct kv_wire_head head;
	char name[KV_NAME_MAX];
	uint64_t rate; /* bytes a second; 0: as fast as it goes */
};

struct kv_msg_pool_set {
	struct kv_wire_head head;
	char name[KV_NAME_MAX];
	uint32_t change; /* enum kv_limit bits */
	uint32_t weight;
	uint64_t min_bytes, max_bytes;
	uint64_t revision; /* that is replaced; 0: whichever it is */
};

struct kv_msg_pool_limits {
	struct kv_wire_head head;
	uint64_t revision, min_bytes, max_bytes;
	uint32_t weight;
	uint32_t reserved;
};

/* kv_wire_init() - fill a head */
static inline void kv_wire_init(struct kv_wire_head *head, uint16_t type, uint32_t size,
				uint32_t tag)
{
	*head = (struct kv_wire_head){ KV_WIRE_MAGIC, KV_WIRE_VERSION, type, 0, size, tag };
}

#endif
