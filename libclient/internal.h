/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the library's files share.
 *
 *   connection.c  a socket and calls over it        fork.c    handles end in a forked child
 *   client.c      kv_client                         stats.c   stats, check, drop
 *   pool.c        opening, mapping, views           magazine.c  leases at hand, give
 *   ops.c         what the daemon is told
 *   later.c       what waits for GPU work           sequence.c, lookup.c, publish.c, batch.c
 *   pin.h         holding cached blocks             identity.c  fields, extras, epochs
 *   lookup_partial.c  blocks of which a prompt has the beginning
 *   granules.c    what is mapped (--isolate)        preempt.c   giving way and going on
 *   pressure.c    notices of the daemon
 *   promise.c     waiting for what others compute   group*.c    sequences of several groups
 *
 * A kv_pool has a connection of its own: it is one session of the daemon. Its hot path (take, give, pin,
 * unpin) touches only memory; nothing there is locked, because a pool belongs to one thread.
 */
#ifndef KV_LIBCLIENT_INTERNAL_H
#define KV_LIBCLIENT_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>
#include <sys/un.h>

#include "alloc/hash.h"
#include "alloc/identity.h"
#include "alloc/layout.h"
#include "alloc/prefix.h"
#include "alloc/stem.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/list.h"
#include "include/internal/public.h"
#include "include/internal/shm.h"
#include "include/internal/socket.h"
#include "include/internal/wire.h"
#include "include/kvcached/kvcached.h"
#include "kernels/memory.h"

#define KV_DEFAULT_TIMEOUT (5 * KV_SEC)

/* ---- connection.c ---- */

struct kv_connection {
	struct kv_link link; /* fork.c's list: a child closes them */
	int fd;
	uint32_t tag;
	uint64_t *buffer; /* [KV_WIRE_MAX] bytes: the last answer */
	/* To take it up again when a worker of the daemon has died. */
	const char *socket, *name; /* of the kv_client; socket NULL: it isn't */
	uint64_t boot_nonce;
	struct kv_msg_resume resume;	 /* of a pool's session; its type is 0 in other connections */
	int n_tries; /* of the last call: 2 if a worker died before it answered, who may have done it */
	uint32_t hello_tag, resume_tag; /* sent, and not answered yet; or 0 */
};

/* kv_connection_open() - connect and say hello. @ret_welcome may be NULL. */
int kv_connection_open(struct kv_connection *c, const char *socket, const char *name,
		       int64_t deadline, struct kv_msg_welcome *ret_welcome);
void kv_connection_close(struct kv_connection *c);

/**
 * kv_connection_call() - send a request, wait for its answer
 * @request: begins with a kv_wire_head; magic, version and tag are filled in here
 * @type:    of the answer that is expected; its least size is @size
 * @fds:     [max_fds] for descriptors that come along, @ret_n_fds how many; or NULL
 *
 * Sent again to the next worker when one dies, three times at most.
 * Return: 0, the answer is in c->buffer; what the daemon's error says, with its text; -ETIMEDOUT;
 *         -ECONNRESET: there is no daemon any more, or another, or it has no such session; -EPROTO.
 */
int kv_connection_call(struct kv_connection *c, void *request, uint16_t type, uint32_t size,
		       int *fds, uint32_t max_fds, uint32_t *ret_n_fds, int64_t deadline);

/* kv_connection_post() - send a message that has no answer; never waits. 0; 1: it could not be sent now; negative */
int kv_connection_post(struct kv_connection *c, void *request);

/* ---- fork.c ---- */

extern uint32_t kv_fork_generation; /* one more in each forked child */
void kv_fork_add(struct kv_connection *c);
void kv_fork_remove(struct kv_connection *c);
int kv_forked_error(void);

/* kv_forked() - 0; -ECHILD with a text if the handle is the parent's: nothing of it works here */
static inline int kv_forked(uint32_t generation)
{
	return __builtin_expect(generation == kv_fork_generation, 1) ? 0 : kv_forked_error();
}

/* ---- client.c ---- */

struct kv_client {
	pthread_mutex_t lock; /* of connection */
	struct kv_connection connection;
	uint32_t fork_generation;
	uint32_t n_late; /* ops of all its pools that are kv_pool::late; pools are other threads' */
	char socket[sizeof(((struct sockaddr_un *)0)->sun_path)];
	char name[KV_NAME_MAX];
	int32_t n_gpus;
	struct kv_gpu gpus[KV_MAX_GPUS];
};

int64_t kv_deadline(int64_t timeout); /* 0: the default */
int64_t kv_until(int64_t timeout);    /* 0: now */
/* kv_options_copy() - a caller's options, of its version's size, to ours; -EINVAL: no size given */
int kv_options_copy(void *to, size_t size, const void *options);

/* ---- pool.c ---- */

/* Private count of each block: how many tables of this process's session name it, and what it is. */
#define KV_REF_COUNT 0x00ffffffu
#define KV_REF_CACHED 0x01000000u    /* in the index, our holder bit is set */
#define KV_REF_SUBMITTED 0x02000000u /* publishing was asked for; the answer isn't known yet */
#define KV_REF_GIVEN 0x04000000u     /* a give of a submitted block is in the ring (count 0) */
#define KV_REF_POSTED 0x10000000u    /* with AGAIN: that stands in the ring, before gives[id] */
#define KV_REF_AGAIN 0x08000000u     /* published once more: what is said of it goes through the ring, behind that */

struct kv_pool {
	struct kv_client *client;
	struct kv_connection connection;
	uint32_t fork_generation;
	bool lost; /* the daemon is gone, or GPU work can't be known to end */
	bool read_only;	 /* index, blocks and arena are mapped for reading */
	bool keep_epoch; /* new sequences are of head.epoch */
	uint64_t max_seq_tokens; /* UINT64_MAX: no bound */

	struct kv_layout layout;
	struct kv_component *components; /* owned */
	uint64_t slab_offset, slab_blocks, max_blocks;
	uint32_t gpu_mask, mapped_mask;
	int32_t device; /* enum kv_device; HOST as well where the pool isn't mapped */
	struct kv_memory *memory[KV_MAX_GPUS];
	bool sparse; /* granules.c: what is mapped follows the pool's granules */
	uint64_t map_seen; /* what was the pool's by this map_revision is mapped */
	uint64_t *granules[KV_MAX_GPUS]; /* [head.n_granules] the words that are mapped; 0: nothing is */

	struct kv_shm_pool head; /* a copy: in a forked child the pages are not there */
	void *index;
	void *blocks;
	struct kv_shm_block *descriptors;
	struct kv_prefix prefix;
	struct kv_stems stems;
	uint64_t index_bytes, blocks_bytes, session_bytes;

	struct kv_shm_session *session;
	const int32_t *grants;
	struct kv_op *ops;
	uint32_t grant_capacity, grant_tail, op_capacity, op_head;
	uint32_t slot, session_number;
	bool ops_posted; /* since the last kick */
	struct kv_op *late; /* [late_at, n_late) that found the ring full, and the daemon not answering */
	size_t late_at, n_late, late_room;

	uint32_t *refs; /* [id_limit] */
	uint32_t *gives; /* [id_limit] op_head after the give that KV_REF_GIVEN is about */
	int32_t *stack; /* in the session's pages: idle leases, the hottest on top */
	uint32_t low; /* with fewer in the stack the daemon is asked for more; 0: it has been */

	struct kv_link later; /* kv_later::link, oldest first */
	kv_block_id *copies;  /* [n_copies][2] noted by reserve; each source is held */
	uint32_t n_copies, copies_room;
	uint32_t n_seqs, n_batches; /* that must be freed before the pool is closed */
	uint32_t n_lookups;
	uint64_t n_traced; /* requests told of, or too long for that */
	struct kv_seq *spare; /* one that was freed, or NULL: its arrays serve the next */
};

/* kv_read_only() - 0; -EACCES with a text: this opening of the pool only reads */
int kv_read_only_error(void);
static inline int kv_read_only(const struct kv_pool *pool)
{
	return __builtin_expect(pool->read_only, 0) ? kv_read_only_error() : 0;
}

/* ---- granules.c: kvcached --isolate ---- */

/* kv_granules_init() - nothing of @gpu is mapped yet. 0 or -ENOMEM */
int kv_granules_init(struct kv_pool *pool, uint32_t gpu);
int kv_granules_sync(struct kv_pool *pool, int64_t deadline);
void kv_granules_let_go(struct kv_pool *pool);

static inline bool kv_granules_stale(const struct kv_pool *pool)
{
	const struct kv_shm_pool *page = pool->index;

	/* Pairs with the release in the daemon's publish(). */
	return __builtin_expect(pool->sparse, 0) &&
	       kv_load_acquire(&page->map_revision) != pool->map_seen;
}

/* kv_granules_need() - all that is the pool's is mapped from here on. 0; negative with text */
static inline int kv_granules_need(struct kv_pool *pool, int64_t deadline)
{
	return kv_granules_stale(pool) ? kv_granules_sync(pool, deadline) : 0;
}

/* ---- magazine.c ---- */

int kv_magazine_take(struct kv_pool *pool, uint32_t n, kv_block_id *ret_ids, int64_t timeout);
/* kv_pool_max_blocks() - as the pool's limits stand now */
static inline uint64_t kv_pool_max_blocks(const struct kv_pool *pool)
{
	const struct kv_shm_pool *page = pool->index;

	/* Pairs with the release in the daemon's kv_limits_adopt(). */
	kv_load_acquire(&page->limits.revision);
	return kv_load_relaxed(&page->limits.max_blocks);
}
void kv_block_release(struct kv_pool *pool, kv_block_id id); /* one reference less */

/* kv_block_pin_twin() - hold a cached block known by its serial; true: one reference more */
bool kv_block_pin_twin(struct kv_pool *pool, kv_block_id id, uint64_t serial);
/* kv_again_posted(), kv_again_is_pending() - it was published once more; hasn't the daemon come to that? */
void kv_again_posted(struct kv_pool *pool, kv_block_id id);
bool kv_again_is_pending(struct kv_pool *pool, kv_block_id id);
/* kv_give_is_pending() - may our bit still be cleared by a give that is on its way? */
bool kv_give_is_pending(struct kv_pool *pool, kv_block_id id);
/* kv_block_is_cached() - has a block that is held been published by now? */
bool kv_block_is_cached(struct kv_pool *pool, kv_block_id id);
/* kv_block_is_shared() - may others see it, in this process or another? Then it isn't written. */
static inline bool kv_block_is_shared(const struct kv_pool *pool, kv_block_id id)
{
	uint32_t r = pool->refs[id];

	return (r & KV_REF_COUNT) > 1 || r & (KV_REF_CACHED | KV_REF_SUBMITTED);
}

/* ---- ops.c ---- */

int kv_ops_post(struct kv_pool *pool, const struct kv_op *op);
void kv_ops_try(struct kv_pool *pool, const struct kv_op *op); /* if the ring is half empty */
void kv_ops_give(struct kv_pool *pool, kv_block_id id);
void kv_ops_kick(struct kv_pool *pool);
/* kv_ops_end() - number of the op after the last one, as ops.tail will count it */
static inline uint32_t kv_ops_end(const struct kv_pool *pool)
{
	return pool->op_head + (uint32_t)(pool->n_late - pool->late_at);
}
void kv_ops_finish(struct kv_pool *pool); /* what is late is sent, if the daemon answers */
void kv_ops_deinit(struct kv_pool *pool);
/* kv_pool_lost() - @r of a call to the daemon: some mean that the session is over. Return: @r */
int kv_pool_lost(struct kv_pool *pool, int r);

/* ---- later.c ---- */

/**
 * kv_later_release(), kv_later_publish() - after the work queued on @stream so far
 *
 * At once where nothing has to be waited for. The lists are copied.
 * Return: 0; -ENOMEM; -EIO: the stream is broken, nothing of it will happen.
 */
int kv_later_release(struct kv_pool *pool, void *stream, const kv_block_id *ids, uint32_t n);
int kv_later_publish(struct kv_pool *pool, void *stream, const struct kv_op *ops, uint32_t n);

/* kv_later_drop() - release a block that no work uses, but not before its publishing */
void kv_later_drop(struct kv_pool *pool, kv_block_id id);

/* kv_later_poll() - do what has become due */
void kv_later_poll(struct kv_pool *pool);
/* kv_later_finish() - wait for all. 0, -ETIMEDOUT, -EIO */
int kv_later_finish(struct kv_pool *pool, int64_t deadline);

/* ---- sequence.c, lookup.c, publish.c ---- */

struct kv_seq {
	struct kv_pool *pool;
	int32_t *tokens;
	size_t len, tokens_room;
	size_t n_preempted; /* tokens that it had, while len is 0 */
	size_t n_partial; /* the last tokens, if the last block is another's and goes on otherwise */
	size_t n_asked; /* tokens of the prompt that the statistics of lookups have counted */
	kv_block_id *table;
	size_t n_blocks, table_room;
	struct kv_key *keys; /* [n_submitted] of the blocks that were published or found */
	struct kv_identity identity;
	uint64_t root; /* what its first block follows: the epoch of its first token */
	/* Of a group sequence, in a group whose blocks are found without their parents (group.h). */
	const struct kv_gseq *loose; /* NULL: it isn't */
	uint32_t group;
	size_t n_promised; /* blocks up to here were promised, from n_submitted on */
	size_t n_holes; /* blocks that were let go: the null block stands in the table */
	size_t n_left; /* of a window: the first so many have all been let go */
	size_t n_submitted;  /* leading blocks, <= len / block_tokens */
	size_t n_settled;    /* of these, how many have had the daemon's answer */
	size_t keys_room;
	struct kv_msg_traced *traced; /* while the daemon records: what it will be told; or NULL */
	bool is_part; /* of a group sequence, which is one request */
};

/* Field of the groups of one pool that keep all tokens, but for the first: which one it is. */
#define KV_TAG_GROUP 255u
/* identity.c: what a public function may be told. 0; -EINVAL, -EBUSY, -EEXIST with text; -ENOMEM */
int kv_item_add(struct kv_identity *identity, const char *what, const struct kv_item *item);
int kv_extra_check(const struct kv_extra *extra, size_t len);
int kv_seq_grow(void **array, size_t *room, size_t n, size_t item); /* 0 or -ENOMEM */
void kv_seq_discard(struct kv_seq *seq); /* its memory alone */
/*
 * kv_seq_let_go() - of what a lookup has found, from @n_tokens on. No work uses it, so it goes at once; what was
 * said of the prompt (extras) stays
 */
void kv_seq_let_go(struct kv_seq *seq, size_t n_tokens);
/* kv_seq_found() - its tokens may be those of another prompt by now: then nothing is kept for kv_seq_resume() */
static inline void kv_seq_found(struct kv_seq *seq, const int32_t *tokens)
{
	if (seq->len && tokens != seq->tokens)
		seq->n_preempted = 0;
}
/* kv_seq_adopt_partial() - the next @n tokens are the first ones of a block that is held. 0 or -ENOMEM */
int kv_seq_adopt_partial(struct kv_seq *seq, kv_block_id id, const int32_t *tokens, size_t n);
/* kv_seq_make_room() - in its arrays, for a prompt. 0 or -ENOMEM */
int kv_seq_make_room(struct kv_seq *seq, size_t n_tokens, size_t n_blocks);
/*
 * How long room is waited for with a block that is held for a part of it: idle leases of others come within this,
 * and it may be the very block that is missing.
 */
#define KV_PARTIAL_WAIT (10 * KV_MSEC)
/* kv_seq_empty() - its blocks go after @stream's work so far; fields, extras and tokens[] stay */
int kv_seq_empty(struct kv_seq *seq, void *stream);
/* kv_seq_begin() - the first token comes: it belongs to the epoch that is now */
void kv_seq_begin(struct kv_seq *seq);

/* kv_seq_row() - what is said of block @i, if anything is */
bool kv_seq_row(const struct kv_seq *seq, size_t i, struct kv_shm_row *ret);

/**
 * kv_partial_find() - hold the cached block that begins with most of @tokens
 * @follows, @row: as of kv_pin()
 * @n_tokens:	   how many there are; not all of a block is looked for
 *
 * Return: its id, one reference more, and of it the first *@ret_n; -1: there is none.
 */
kv_block_id kv_partial_find(struct kv_pool *pool, uint64_t follows, const struct kv_shm_row *row,
			    const int32_t *tokens, size_t n_tokens, uint32_t *ret_n);
void kv_partial_used(struct kv_pool *pool, kv_block_id id); /* for what is to be evicted */

/**
 * kv_seq_key() - of block @i, which holds @tokens; those before it have theirs in seq->keys
 * @ret_row: filled if the block has one
 *
 * Return: whether it has.
 */
bool kv_seq_key(const struct kv_seq *seq, size_t i, const int32_t *tokens, struct kv_key *ret_key,
		struct kv_shm_row *ret_row);

/* kv_seq_withdraw() - promises of blocks from @first on end; before these blocks are released */
void kv_seq_withdraw(struct kv_seq *seq, size_t first);
/* kv_promise_end() - a block of this key has been published: its promise, if it is ours, is kept */
void kv_promise_end(struct kv_pool *pool, struct kv_key key);
/* kv_promise_make() - false: another session has promised it */
bool kv_promise_make(struct kv_pool *pool, struct kv_key key, int64_t until);
/* kv_promise_stands() - has another session promised it? */
bool kv_promise_stands(struct kv_pool *pool, struct kv_key key);
/* How a lookup is repeated while another session computes what comes next. */
struct kv_follow {
	int64_t deadline, pause;
	bool waited;
};
struct kv_follow kv_follow_begin(int64_t timeout);
/* kv_follow_again() - after a lookup that @grew or not: true after a pause; false, and *ret is the answer */
bool kv_follow_again(struct kv_follow *f, bool promised, bool grew, int *ret);
/* kv_promise_shorten() - it was published: the promise ends soon, by itself */
void kv_promise_shorten(struct kv_pool *pool, struct kv_key key);
bool kv_seq_must_copy(const struct kv_seq *seq); /* its last block has room, and others may see it */
/* kv_seq_need() - blocks to be had for @n_tokens in total. 0; KV_TOO_LARGE */
int kv_seq_need(const struct kv_seq *seq, size_t n_tokens, uint32_t *ret);
/* kv_seq_extend() - take over the leased blocks it needs for them. 0; -ENOMEM: none was taken */
int kv_seq_extend(struct kv_seq *seq, size_t n_tokens, const kv_block_id *ids);
/* kv_seq_stamp() - used now: later stamps for the beginning of a chain than for its end */
void kv_seq_stamp(struct kv_seq *seq, size_t first, size_t end);

/* ---- trace.c ---- */

static inline bool kv_is_traced(const struct kv_pool *pool)
{
	return __builtin_expect(kv_load_relaxed(&((const struct kv_shm_pool *)pool->index)->trace_salt) != 0, 0);
}
/* kv_trace_note() - a lookup of @n tokens has found @n_found more */
void kv_trace_note(struct kv_seq *seq, const int32_t *tokens, size_t n, size_t n_found);
void kv_trace_send(struct kv_seq *seq); /* it ends */
/* kvctl: record requests of a pool, "" of all. 0; -EPERM, -EBUSY, -ENOENT with text */
int kv_trace_start(struct kv_client *client, const char *pool, uint64_t salt, int64_t timeout);
/* kv_trace_next() - those since the last call; @ret: [KV_WIRE_MAX]. 0; -ENOENT: start again, with the same salt */
int kv_trace_next(struct kv_client *client, struct kv_msg_trace_part *ret, int64_t timeout);

/* ---- hold.c ---- */

struct kv_hold;

/* kv_hold_pinned() - a hold that owns pinned memory from now on. 0 or -ENOMEM */
int kv_hold_pinned(int device, void *pinned, struct kv_hold **ret);
struct kv_hold *kv_hold_ref(struct kv_hold *hold); /* one more to free */

#endif
