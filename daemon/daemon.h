/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the worker process owns, and who does what with it.
 *
 *   keeper.h: the process that starts this one, and holds what must outlive it
 *   journal.h: what is written down for the next worker; rebuild.c reads it
 *
 *   kv_daemon -- gpus[] -- arena, mover           device_*.c, mover.c
 *      |    `--- extents                          alloc/extent.h; capacity.c decides
 *      |-- peers  (connections)                   peer.c: messages in and out, life and death
 *      |      `-- session (one pool opened)       session.c: rings, leases
 *      `-- pools  (by name)                       registry.c: identity, memfds; alloc/pool.h: books
 *                                                 control.c: stats, check, drop
 *
 * One thread, one loop. Nothing here waits: what can't be answered now is kept as a waiter with a
 * deadline (capacity.c).
 */
#ifndef KV_DAEMON_DAEMON_H
#define KV_DAEMON_DAEMON_H

#include <stdbool.h>
#include <sys/types.h>

#include "alloc/extent.h"
#include "alloc/pool.h"
#include "daemon/device.h"
#include "daemon/journal.h"
#include "daemon/keeping.h"
#include "daemon/loop.h"
#include "daemon/user.h"
#include "include/internal/list.h"
#include "include/internal/shm.h"
#include "include/internal/wire.h"

struct kv_access;
struct kv_daemon;
struct kv_events;
struct kv_isolation;
struct kv_metrics;
struct kv_mover;
struct kv_peer;
struct kv_pool;
struct kv_restart;
struct kv_session;
struct kv_tracing;
struct kv_walk;

struct kv_config {
	int keeper_fd; /* the worker's end of its socket; -1 in the keeper */
	const char *socket;	/* path */
	uint32_t socket_mode;
	uint32_t max_clients;
	uint64_t user_limits[KV_USER_LIMITS]; /* 0: none */
	bool host;		/* host memory instead of GPUs */
	uint64_t host_bytes;
	uint32_t n_gpus;
	int gpus[KV_MAX_GPUS];
	double reserve_share;	/* of a GPU's free memory, or */
	uint64_t reserve_bytes; /* so many bytes of each */
	uint32_t export_kind;	/* 0: auto */
	uint64_t granule_bytes;
	const char *access; /* file of the access list; NULL: none */
	const char *socket_group; /* name or number; NULL: the process's own */
	bool isolate; /* clients map granules of their pool only */
	int loop_kind;
	const struct kv_policy *policy; /* which cached blocks go first */
	const char *events;	/* where to publish KV events; NULL: nowhere */
	const char *metrics;	/* address to serve metrics on; NULL: nowhere */
	struct kv_link *wishes; /* kv_wish::link: pools to make at the start */
};

struct kv_gpu_unit {
	const struct kv_device_ops *ops;
	struct kv_device_info info;
	struct kv_arena *arena;
	struct kv_mover *mover;
	struct kv_watch *owner_watch; /* ipc: of the arena's owner process */
	char export_why[96];
};

struct kv_daemon {
	struct kv_config config;
	struct kv_loop *loop;
	struct kv_keeping keeping;
	struct kv_watch *keeper_watch;
	struct kv_timer *alive_timer; /* NULL: no watchdog */
	int listen_fd;
	struct kv_watch *listen_watch;
	struct kv_signals *signals;
	struct kv_timer *accept_timer; /* accepting pauses when descriptors run out */
	struct kv_timer *check_timer;  /* rebuild.c: large pools are proven a moment later */
	struct kv_events *events;
	struct kv_metrics *metrics;
	struct kv_timer *waiter_timer; /* blocks may have become evictable without a message */
	uint32_t n_gpus;
	struct kv_gpu_unit gpus[KV_MAX_GPUS];
	struct kv_extents extents;
	struct kv_link peers; /* kv_peer::link */
	struct kv_link pools; /* kv_pool::link */
	struct kv_link users; /* kv_user::link */
	struct kv_link speaking; /* kv_user::turn, of those with something to be served: fair.h */
	struct kv_task *speaking_task;
	struct kv_timer *user_timer; /* some may speak again */
	struct kv_timer *promise_timer;
	struct kv_history *history;  /* history.c */
	struct kv_link queue; /* kv_session::waiter, by kv_session::want_tag_time: who is served next */
	uint32_t n_peers, n_pools, n_sessions;
	struct kv_journal *journal; /* NULL: nothing is kept, in a test */
	double queue_time;		  /* of the request that was served last */
	uint32_t n_spoken[KV_MAX_GPUS]; /* extents that those in the queue still wait for */
	int64_t look_after;		  /* ns: how long until the queue is looked at without a reason */
	struct kv_access *access; /* NULL: all may open all */
	struct kv_isolation *isolation; /* isolate.c; NULL: clients map whole arenas */
	int64_t recall_at; /* when idle leases that somebody waits for may be called back; past: none */
	struct kv_compaction *compaction; /* compact.c; NULL until the first */
	bool serving;
	uint64_t part_turn; /* of the loop: gradual.c */
	uint32_t part_left; /* blocks that may still be evicted in it for those who ask for many */
	bool goes_on;	    /* there were not enough for the one who asked last: it asks again in the next turn */
	bool part_waits;    /* likewise, for somebody in the queue */
	uint64_t giving_round;
	uint64_t moved_extents, moving_ns; /* given by pools to others; time of this thread for it */
	uint64_t next_peer_id, next_session_id, next_pool_id;
	uint64_t boot_nonce; /* of this start of the keeper: workers share it */
	int64_t started_ns;  /* likewise */
	uint32_t clock; /* CLOCK_MONOTONIC in tenths of a second, as of the last message: kv_book::since */
	struct kv_tracing *tracing; /* trace.c; NULL: nobody records */
	struct kv_restart *restart; /* that was asked for: restart.c; or NULL */
	bool stopping;	     /* a signal said so */
};

/* daemon.c: arenas, movers, clients. 0, or negative with a text that names the cause. */
int kv_daemon_start(struct kv_daemon *d, const struct kv_config *config);
void kv_daemon_stop(struct kv_daemon *d);

/* A pool and its shared pages. */
struct kv_pool {
	struct kv_link link; /* kv_daemon::pools */
	struct kv_daemon *daemon;
	uint64_t id;
	char name[KV_NAME_MAX], model[KV_NAME_MAX], revision[KV_NAME_MAX], name_space[KV_NAME_MAX];
	uint32_t tp_ranks, gpu_mask;
	uint64_t min_bytes, max_bytes; /* on each of its devices */
	uint32_t weight, share_extents; /* share.c: its due, on each of its devices */
	uint64_t limits_revision;
	uint64_t block_bytes, max_blocks;
	struct kv_layout layout;
	struct kv_component *components; /* owned; layout.components */
	uint64_t slab_offset, slab_blocks; /* paged */
	uint32_t first_extent, n_extents;  /* on each of its devices */
	int index_fd, index_read_fd; /* the second is for clients: it can't be mapped for writing */
	int blocks_fd, blocks_read_fd, books_fd;
	struct kv_shm_pool *head; /* index memfd, mapped for writing */
	void *blocks;		  /* blocks memfd */
	struct kv_pool_record *record; /* books memfd */
	struct kv_books books;
	struct kv_session *slots[KV_MAX_SESSIONS];
	uint32_t n_sessions;
	uint32_t n_waiting;   /* sessions of it in kv_daemon::queue */
	double last_tag_time; /* of the last of them */
	uint32_t compact_extents; /* an operator asked for so many to run empty; 0: it is over */
	uint64_t compact_rate;	  /* bytes a second, 0: as fast as it goes */
	uint64_t compacted_bytes;
	int64_t compact_since;	  /* kv_now() when the operator asked */
	uint64_t compact_ns;	  /* that what operators asked for took, when it was over */
	bool has_former_moves; /* MOVING blocks that a dead worker's mover may still write to */
	bool left_out; /* blocks in its extents that its maximum, when they came, didn't allow */
	uint64_t exhausted_in; /* the round in which it had nothing more to give */
	bool must_press;	/* the last request found no room, not even by calling leases back, */
	uint32_t wanted_blocks; /* and was for so many */
	int64_t pressed_ns;
	uint64_t n_recalled;
	struct kv_books_count *unheld; /* while many are to be evicted: gradual.c; NULL: it doesn't go on */
	int64_t count_held_ns; /* when it may be counted again who holds what: held.c */
	uint64_t blocked_in;  /* the pass over the queue in which one of its requests has to wait on */
	double use_rate;      /* uses of cached blocks a second, of late; share.c */
	uint64_t use_count;
	int64_t use_ns;
	uint64_t lookup_tokens, hit_tokens, n_no_room; /* of sessions that have ended; refusals */
	struct kv_user *user; /* who made it; NULL: nobody whose limits count */
};

/* One peer's attachment to a pool. */
struct kv_session {
	struct kv_peer *peer;
	struct kv_pool *pool;
	uint64_t id;
	uint32_t slot;
	int fd; /* session memfd */
	struct kv_shm_session *shm;
	int32_t *grants;	  /* ring in shm */
	const struct kv_op *ops; /* ring in shm */
	uint32_t grant_capacity, op_capacity;
	struct kv_session_record *record; /* of its slot; in it our ends of the rings: shm has copies */
	bool mapped; /* it has been given granules: isolate.c */
	bool read_only; /* it leases, publishes and holds nothing */
	bool op_in_doubt; /* its next op may have been done already: journal.h */
	uint64_t ops_before; /* somebody's message: number of the op after those that come before it */
	uint64_t bytes;
	int64_t since_ns;
	uint64_t n_published;
	uint64_t n_set_aside; /* blocks in quarantine */
	uint64_t n_held, n_published_then; /* cached blocks held, and n_published, when they were counted: held.c */
	int32_t *stack; /* in shm: idle leases */
	int64_t granted_ns; /* its last LEASE was answered */
	uint64_t answered; /* record->granted after that: whether it has looked at the answer */
	/* Pressure: it holds more than its share while others wait. */
	bool recalling; /* in kv_recall() */
	int64_t withheld_ns; /* since then its idle leases could not be called back; 0: they could */
	uint32_t pressure_target; /* what it may keep */
	uint32_t pressure_blocks; /* that it was asked to give back; 0: none */
	int64_t pressure_deadline;
	/* A lease that waits for room. */
	struct kv_link waiter; /* kv_daemon::queue */
	double want_tag_time, want_cost; /* of its pool's virtual time: queue.c */
	uint64_t looked_in;		 /* the pass over the queue in which it has had its turn */
	bool is_coming; /* extents for it are being zeroed */
	uint32_t want_n, want_extra, want_tag;
	int64_t want_since, want_deadline, want_scrub_deadline;
};

/* One connection. */
struct kv_peer {
	struct kv_link link; /* kv_daemon::peers */
	struct kv_daemon *daemon;
	uint64_t id;
	char name[KV_NAME_MAX];
	pid_t pid;
	uid_t uid;
	gid_t gid;
	struct kv_user *user;
	int fd; /* -1: hung up; its process may still live */
	int pidfd;
	struct kv_watch *watch, *pid_watch;
	struct kv_timer *open_timer;		/* a POOL_OPEN that waits for clean extents */
	struct kv_msg_pool_open *pending_open; /* that message, owned */
	int64_t open_deadline;
	struct kv_session *session;
	struct kv_link speaking; /* kv_user::speaking */
	uint32_t events;	 /* what its socket was last ready for */
	struct kv_walk *walk;	 /* a long answer under way, owned; NULL: none */
	struct kv_wire_head *message; /* owned: it was read, and ops that came before it are still to be done */
	bool greeted;
	bool counted;  /* among its user's connections */
	bool silenced; /* what it sends is read later: its user has sent too much */
	bool away; /* fd is -1 because a worker died: it may come back, kv_session_handle_resume() */
};

/* peer.c */
int kv_peer_accept(struct kv_daemon *d, int fd);
/* kv_peer_serve() - one message of it, or a slice of a long answer. False: that was all; it may be gone */
bool kv_peer_serve(struct kv_peer *peer);
void kv_peers_hear(void *d); /* those that were silenced; d: struct kv_daemon */
/* kv_peer_new_away() - who was connected to a worker before this one. Takes @pidfd over. 0; negative */
int kv_peer_new_away(struct kv_daemon *d, const struct kv_session_record *record, int pidfd,
		     struct kv_peer **ret);
void kv_peer_drop(struct kv_peer *peer, const char *why); /* hang up; reclaimed when its process ended */
struct kv_peer *kv_peer_free(struct kv_peer *peer);
void kv_peer_send(struct kv_peer *peer, const void *msg, uint32_t size, const int *fds,
		  uint32_t n_fds);
void kv_peer_error(struct kv_peer *peer, uint32_t tag, int error, const char *format, ...)
	__attribute__((format(printf, 4, 5)));

/* registry.c */
struct kv_pool *kv_pool_find(struct kv_daemon *d, const char *name);
/* 0; -EAGAIN: extents are being scrubbed, ask again; else negative with the text in kv_error_text() */
int kv_pool_create(struct kv_daemon *d, const struct kv_msg_pool_open *msg, struct kv_pool **ret);
/* kv_pool_differs() - 0, or -EEXIST with a text that lists what differs */
int kv_pool_differs(const struct kv_pool *pool, const struct kv_msg_pool_open *msg);
/* kv_pool_take_id() - when it is sure to get memory: an opening that is refused, or tried again, has none */
void kv_pool_take_id(struct kv_pool *pool);
struct kv_pool *kv_pool_free(struct kv_pool *pool); /* without sessions; its extents get dirty */
void kv_pool_unload(struct kv_pool *pool); /* this process forgets it; for others it goes on */
/* kv_pool_adopt() - of a worker before this one, by its deposit. 0; -ENOENT: it doesn't count */
int kv_pool_adopt(struct kv_daemon *d, struct kv_deposit *deposit, struct kv_pool **ret);

/* promise.c */
int kv_promises_start(struct kv_daemon *d); /* 0; -ENOMEM with text */
/* kv_promises_clear() - in the pages of @pool, those that are over and those of @slot; UINT32_MAX: of none */
void kv_promises_clear(struct kv_pool *pool, uint32_t slot);

/* session.c */
void kv_session_handle_open(struct kv_peer *peer, const struct kv_msg_pool_open *msg);
void kv_session_handle_lease(struct kv_peer *peer, const struct kv_msg_lease *msg);
void kv_session_drain(struct kv_session *session); /* works off its ring of ops */
void kv_session_drain_some(struct kv_session *session, uint32_t most);
/* kv_session_ops() - how many there are to be worked off; negative: they made no sense, it is hung up on */
int64_t kv_session_ops(struct kv_session *session);
struct kv_session *kv_session_free(struct kv_session *session); /* its client is quiet */
void kv_session_unload(struct kv_session *session); /* this process forgets it; for others it goes on */
/* kv_session_adopt() - of a worker before this one: the peer is away. Takes @fds over. 0; negative */
int kv_session_adopt(struct kv_pool *pool, uint32_t slot, const int fds[2]);
void kv_session_handle_resume(struct kv_peer *peer, const struct kv_msg_resume *msg);
void kv_session_confirm(struct kv_session *session); /* its client knows of it */
void kv_session_set_aside(struct kv_session *session); /* what it leases becomes QUARANTINED */
void kv_session_drop(struct kv_session *session); /* hung up on: what it leases is set aside */
/* Posts ids in the ring; the answer to a LEASE is sent by the caller. */
void kv_session_post(struct kv_session *session, uint32_t n);
void kv_session_answer(struct kv_session *session, uint32_t n); /* likewise, for a LEASE */
uint32_t kv_session_posted(const struct kv_session *session); /* ids that its client has yet to take */

/* wish.c: pools that are made before the first client comes */
/* NAME=CONFIG[,KEY=VALUE...]. 0; -EINVAL with a text that names key and value; -ENOMEM */
int kv_wish_add(struct kv_link *wishes, const char *text);
/* kv_wishes_read() - read and plan the configs. 0; negative with a text that names file and field */
int kv_wishes_read(struct kv_link *wishes);
/* kv_wishes_grant() - make the pools; waits for memory to be zeroed, at most a minute for each */
int kv_wishes_grant(struct kv_daemon *d);
void kv_wishes_free(struct kv_link *wishes);

/* main.c: "4G" to bytes; @what names it in the error */
int kv_size_parse(const char *what, const char *text, uint64_t *ret);

/* isolate.c: which granules a pool's clients can map. Without isolation these do nothing. */
int kv_isolate_start(struct kv_daemon *d, bool is_first); /* arenas and extents are there. 0; -ENOMEM */
void kv_isolate_end(struct kv_daemon *d);
uint64_t kv_isolate_granules(const struct kv_pool *pool); /* words in its pages */
void kv_isolate_came(struct kv_pool *pool, uint32_t first, uint32_t n); /* extents are its own */
void kv_isolate_left(struct kv_pool *pool, uint32_t i);		    /* before it is given */
void kv_isolate_adopt(struct kv_pool *pool); /* its words are made to agree with the map of extents */
void kv_isolate_handle(struct kv_peer *peer, const struct kv_msg_granules *msg);
/*
 * kv_isolate_lend() - what a session is sent of @fds: host memory that it may only read is opened anew,
 * and kv_isolate_lent() closes it. A GPU's descriptors give the right to write. 0; negative with text
 */
int kv_isolate_lend(const struct kv_session *s, const struct kv_arena_export *export, int *fds, uint32_t n);
void kv_isolate_lent(const struct kv_session *s, const struct kv_arena_export *export, const int *fds,
		     uint32_t n);
/* kv_isolate_next() - an extent becomes SCRUBBING; *renew: it is to get new memory. 1; 0: none is due */
uint32_t kv_isolate_next(struct kv_daemon *d, uint32_t gpu, uint32_t *ret, bool *renew);
/* kv_isolate_renewed() - takes @fd over. 0; negative: the keeper can't hold it */
int kv_isolate_renewed(struct kv_daemon *d, uint32_t gpu, uint32_t i, int fd);
void kv_isolate_withheld(struct kv_daemon *d, uint32_t gpu, uint32_t i); /* there is no memory for it */
uint64_t kv_isolate_n_renewed(const struct kv_daemon *d, uint32_t gpu);

/* compact.c */
struct kv_mover_copy;
/* kv_compact_ask() - for an operator, as far as it goes, at @rate bytes a second. 0; negative, text */
int kv_compact_ask(struct kv_pool *pool, uint64_t rate);
/* kv_compact_start() - a batch for whoever waits. Return: extents of @pool that run empty by it */
uint32_t kv_compact_start(struct kv_pool *pool, uint32_t n_extents);
bool kv_compact_runs(const struct kv_daemon *d);
/* What the mover of @gpu is to do, or NULL; it has done it, or died over it */
const struct kv_mover_copy *kv_compact_job(struct kv_daemon *d, uint32_t gpu);
void kv_compact_done(struct kv_daemon *d, uint32_t gpu, bool ok);
void kv_compact_forget(struct kv_pool *pool); /* it ends */
/* kv_compact_former_ended() - a dead worker's mover has: what it was copying to is free, if all have */
void kv_compact_former_ended(struct kv_daemon *d);
/* Does a dead worker's mover still run on a device of @gpu_mask? */
bool kv_compact_has_former(const struct kv_daemon *d, uint32_t gpu_mask);
void kv_compact_stop(struct kv_daemon *d); /* nothing more begins, what is under way is for nothing */
void kv_compact_end(struct kv_daemon *d);

/* limits.c */
struct kv_limits {
	uint64_t min_bytes, max_bytes;
	uint32_t weight;
};
/* kv_limits_check() - 0, max_bytes 0 became the arena; -EINVAL, -ENOMEM with a text */
int kv_limits_check(const struct kv_pool *pool, struct kv_limits *limits);
void kv_limits_adopt(struct kv_pool *pool, const struct kv_limits *limits); /* writes them down, and shows them */
/* kv_limits_load() - those that a worker before wrote down; kv_limits_show() - to clients, as they stand */
void kv_limits_load(struct kv_pool *pool);
void kv_limits_show(struct kv_pool *pool);
void kv_limits_set(struct kv_peer *peer, const struct kv_msg_pool_set *msg);
uint64_t kv_limits_arena(const struct kv_daemon *d, uint32_t gpu_mask); /* the smallest of them */
/* kv_limits_most() - bytes that a pool may have: up to its maximum, what others' minimums leave, its own in any case */
uint64_t kv_limits_most(const struct kv_pool *pool);
uint64_t kv_limits_most_blocks(const struct kv_pool *pool); /* likewise, the null block not counted */

/* share.c: who gives when memory is short */
void kv_shares_update(struct kv_daemon *d, uint32_t gpu_mask);
/* The pool above its minimum that is to give next; NULL: none. Not those exhausted in @round. */
struct kv_pool *kv_share_giver(struct kv_daemon *d, uint32_t gpu_mask, const struct kv_pool *except,
			       uint64_t round);
/* Should @pool rather give up what it has cached than have others give? */
bool kv_share_own_first(struct kv_pool *pool, struct kv_pool *other);

/* queue.c: requests that wait for room, of all pools */
void kv_queue_add(struct kv_session *session);
void kv_queue_remove(struct kv_session *session); /* unserved, if it is in it */
/* kv_queue_give_up() - likewise, with an answer: its client has stopped waiting */
void kv_queue_give_up(struct kv_session *session);
void kv_queue_forget(struct kv_session *session); /* likewise, without a trace in any page */
void kv_capacity_serve(struct kv_daemon *d);
/* Extents that the queue still waits for, on the devices of @pool */
uint32_t kv_queue_spoken(const struct kv_pool *pool);

/* held.c: kv_session::n_held of all sessions of @pool; of a moment ago, if it was asked for often */
void kv_held_update(struct kv_pool *pool);

/* recall.c: what sessions hold */
/* Idle leases of all sessions of @pool but @asking become free. Return: how many. */
uint32_t kv_recall(struct kv_pool *pool, const struct kv_session *asking);
/* kv_recall_finish() - what the worker before was about to take from a session that is taken over */
void kv_recall_finish(struct kv_session *s);
uint32_t kv_idle(const struct kv_session *session); /* in its magazine, as its pages say */
void kv_pressure_put(struct kv_pool *needy);	     /* notices to sessions above their share */
void kv_pressure_end(struct kv_daemon *d);	     /* nobody waits any more */
bool kv_pressure_refuses(struct kv_session *session); /* it let the deadline pass */

/* gradual.c: evictions that take long */
#define KV_EVICT_PART 1024u
/* kv_gradual_own() - evict @n of its blocks or none. 0; KV_NO_ROOM; -EAGAIN: ask again in the next turn */
int kv_gradual_own(struct kv_pool *pool, uint64_t n);
void kv_gradual_forget(struct kv_pool *pool); /* nobody asks any more */
/* kv_gradual_blocks() - so many of @n may be evicted now; of fewer, kv_daemon::goes_on says so */
uint32_t kv_gradual_blocks(struct kv_daemon *d, uint64_t n);

/* capacity.c */
/* kv_capacity_room() - make @n blocks free. 0; KV_NO_ROOM; KV_TOO_LARGE; -EAGAIN: when scrubbed */
int kv_capacity_room(struct kv_pool *pool, struct kv_session *asking, uint32_t n);
/* kv_capacity_never_fits() - more than the pool may ever have, by its limits or what others were promised? */
bool kv_capacity_never_fits(const struct kv_pool *pool, uint32_t n);
/* kv_capacity_at_hand() - up to @n free blocks, at no other pool's cache's cost. Return: how many. */
uint32_t kv_capacity_at_hand(struct kv_pool *pool, uint32_t n);
/* kv_capacity_own() - make @n blocks free by its own unheld cache alone. 0; KV_NO_ROOM; -EAGAIN: ask again */
int kv_capacity_own(struct kv_pool *pool, uint32_t n);
void kv_capacity_trim(struct kv_pool *pool); /* down to kv_limits_most(), as far as nobody holds it */
uint64_t kv_thread_ns(void); /* CPU time of this thread */
/* kv_capacity_is_coming() - not all that is being zeroed for a request has come: no use in looking */
bool kv_capacity_is_coming(const struct kv_session *session);
void kv_reserve_fill(struct kv_daemon *d); /* with empty extents, then those of pools above their share */
uint32_t kv_capacity_extents(const struct kv_pool *pool, uint64_t bytes);
uint32_t kv_capacity_lacking(const struct kv_pool *pool, uint32_t n); /* in extents */
/* A new pool's id and first extents. 0; -EAGAIN: being zeroed; -ENOMEM with text */
int kv_capacity_claim(struct kv_pool *pool);
int kv_capacity_begin(struct kv_pool *pool); /* its first blocks, once it has its pages */
/* kv_capacity_adopt() - the extents that the map says are its, and their blocks. 0; negative */
int kv_capacity_adopt(struct kv_pool *pool, struct kv_books_found *found);
void kv_capacity_release(struct kv_pool *pool);	/* all extents of a pool that ends */
void kv_capacity_magazines(struct kv_pool *pool);

/* mover.c */
/* kv_mover_start() - one for @gpu; where a former one has yet to end, then. 0; negative */
int kv_mover_start(struct kv_daemon *d, uint32_t gpu);
/* kv_mover_adopt() - a dead worker's, that was killed and may not have ended; @pidfd is taken over */
int kv_mover_adopt(struct kv_daemon *d, uint32_t gpu, pid_t pid, int pidfd);
void kv_mover_stop(struct kv_gpu_unit *gpu);
/* Was it killed, and may still be writing to what it was given? A dead worker's, or this one's own. */
bool kv_mover_is_ending(const struct kv_mover *mover);
bool kv_mover_is_former(const struct kv_mover *mover);
void kv_mover_scrub(struct kv_daemon *d); /* give idle movers dirty extents */
uint64_t kv_mover_pid(const struct kv_mover *mover);
/* kv_mover_error() - why the last one failed; "" since a job has succeeded */
const char *kv_mover_error(const struct kv_mover *mover);
uint64_t kv_mover_scrubbed(const struct kv_mover *mover);
int kv_mover_main(int fd); /* the mover process itself: mover_main.c */

/* restart.c: kvctl restart-worker */
void kv_restart_handle(struct kv_peer *peer, const struct kv_msg_restart *msg);
void kv_restart_free(struct kv_daemon *d);

/* check.c: the books against the pages */
void kv_control_check(struct kv_peer *peer, uint32_t tag);
/* STATS of what it finds, from number @first on. */
void kv_check_balance(struct kv_peer *peer, uint32_t tag, uint32_t first);
void kv_check_errors(struct kv_peer *peer, uint32_t tag, uint32_t first);

/* trace.c: requests, for kvctl trace record */
void kv_trace_handle(struct kv_peer *peer, const struct kv_msg_trace *msg);
void kv_traced_handle(struct kv_peer *peer, const struct kv_msg_traced *msg);
void kv_trace_next_handle(struct kv_peer *peer, uint32_t tag);
void kv_trace_pool(struct kv_pool *pool); /* one that is new: is it recorded? */
void kv_trace_end(struct kv_daemon *d, const struct kv_peer *recorder); /* NULL: whoever it is */

/* show.c: what one block is */
void kv_clock_update(struct kv_daemon *d);
void kv_show_block(struct kv_peer *peer, const struct kv_msg_block *msg);

/* control.c */
/* kv_control_items() - all structs of an enum kv_stat_kind, for free(). 0 or -ENOMEM */
int kv_control_items(struct kv_daemon *d, uint32_t kind, void **ret, size_t *ret_n, size_t *ret_size);
void kv_control_stats(struct kv_peer *peer, const struct kv_msg_stats *msg);
void kv_control_session(const struct kv_session *session, uint32_t leased, uint32_t held,
			struct kv_session_stats *ret);
void kv_control_compact(struct kv_peer *peer, const struct kv_msg_compact *msg);
void kv_control_drop(struct kv_peer *peer, const struct kv_msg_drop *msg);
void kv_control_epoch(struct kv_peer *peer, const struct kv_msg_drop *msg);

#endif
