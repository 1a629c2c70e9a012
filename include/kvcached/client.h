/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connecting to kvcached, and opening pools.
 *
 *	KV_OPTIONS(kv_connect_options, how, .name = "engine-a");
 *	struct kv_client *client;
 *	struct kv_pool *pool;
 *
 *	if (kv_connect(&how, &client) < 0)
 *		errx(1, "%s", kv_error_text());
 *	KV_OPTIONS(kv_pool_options, what, .name = "llama", .model = "llama-3-8b", .layout = &layout,
 *		   .mapped = 1);
 *	if (kv_pool_open(client, &what, &pool) < 0)
 *		errx(1, "%s", kv_error_text());
 *
 * Two roles. Host-only (mapped = 0): leases, lookup, block tables; no CUDA context is made, the
 * process needs no GPU. Mapped: the arena is mapped as well, so that kernels can run on it.
 *
 * Threads: a kv_client may be used from several threads. A kv_pool and the sequences and batches made
 * from it are for one thread at a time; a thread that wants to work beside others opens the pool
 * once more (each opening is a session of its own; they share prefixes like any two processes).
 *
 * Processes: handles are not inherited. In a forked child every call gives -ECHILD; connect anew.
 * The library installs nothing at exit: memory goes back to the daemon by kv_pool_close(), or when
 * the process ends, however it ends.
 *
 * Deadlines: `timeout` is nanoseconds from the call; 0 in an options struct means 5 s.
 *
 * Restarts: when the daemon's worker dies or is replaced, handles stay valid, and so does all they hold.
 * Taking what is at hand, lookups that hit, and everything on memory go on with no error. A call that
 * needs the daemon connects again by itself, waits for the next worker up to its deadline, and is
 * sent again: at most three times, so that no request can end one worker after the other. Then, and
 * when time is up, it gives -ETIMEDOUT and can be repeated. -ECONNRESET is final: the daemon has
 * ended (or another one was started, or this process was hung up on); a pool's memory is there until it is
 * closed, but what needs the daemon will not work again. A process that makes no call keeps all it
 * holds.
 *
 * A daemon that stands still (a debugger, a suspended machine) is waited for once, 5 s at most, by a call
 * that gives or publishes more than the 4,096 it takes without a look; from then on such calls go on at
 * once, and what they say is sent when it answers again.
 */
#ifndef KVCACHED_CLIENT_H
#define KVCACHED_CLIENT_H

#include <kvcached/layout.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kv_client;
struct kv_plan;
struct kv_plan_options;
struct kv_pool;

/* kv_error_text() - what went wrong in this thread's last call that returned a negative number */
const char *kv_error_text(void);

/* kv_version() - "0.1.0" */
const char *kv_version(void);

struct kv_connect_options {
	size_t size;
	const char *socket; /* NULL: $KVCACHED_SOCKET, else the daemon's default path */
	const char *name;   /* label for operators; NULL: the program's name */
	int64_t timeout;
};

/**
 * kv_connect() - connect to the daemon of this machine
 *
 * Return: 0; -ENOENT or -ECONNREFUSED if no daemon listens (the text names the socket); -EPROTO if
 *         daemon and library speak different versions (the text names both); -ETIMEDOUT; -EAGAIN if
 *         the daemon has as many clients as it accepts; -EDQUOT if it has as many of this user.
 */
int kv_connect(const struct kv_connect_options *options, struct kv_client **ret);

/**
 * kv_disconnect() - end the connection; its pools must have been closed
 *
 * NULL is allowed. Return: NULL.
 */
struct kv_client *kv_disconnect(struct kv_client *client);

/**
 * kv_ping() - a round trip; what this process gave and published before has been worked off by then
 *
 * Return: 0; -ETIMEDOUT, also if a daemon that is being restarted isn't back in time; -ECONNRESET if it
 *         is gone; -EAGAIN if it answers, but not all has been sent yet, because it didn't for a while:
 *         the next calls for the pools (kv_pool_map() will do) send the rest.
 */
int kv_ping(struct kv_client *client, int64_t timeout);

/* One device of the daemon. */
struct kv_gpu {
	int32_t index;	    /* what pool options call it */
	int32_t device;	    /* enum kv_device */
	char name[64];	    /* "NVIDIA H200", "host memory" */
	char uuid[48];	    /* "GPU-xxxxxxxx-...", "" for host memory */
	char export_kind[8]; /* "vmm", "ipc", "host" */
	uint64_t arena_bytes;
	char limits[192]; /* promises that don't hold with this kind of export; "": all hold */
};

/* kv_client_gpus() - the daemon's devices; the list lives as long as the client. Return: how many. */
int kv_client_gpus(const struct kv_client *client, const struct kv_gpu **ret);

struct kv_pool_options {
	size_t size;
	const char *name; /* which pool: those who give the same name share it */
	/* Identity: all who open the pool must say the same. NULL is "". */
	const char *model;
	const char *revision;
	const char *name_space;		/* whatever else decides if K and V can be shared */
	uint32_t tp_ranks;		/* 0 is 1 */
	const struct kv_layout *layout; /* NULL: the pool must exist; its layout is taken */
	uint32_t gpu_mask;		/* bit i: device i of kv_client_gpus(); 0 is device 0 */
	/* Capacity: said by whoever comes first, ignored later. */
	uint64_t min_bytes; /* guaranteed; 0: none */
	uint64_t max_bytes; /* 0: as much as there is. A paged pool takes it all at once. */
	/* This attachment. */
	int mapped;	  /* 1: map the arena */
	uint32_t map_mask; /* which of the pool's devices; 0: all */
	int64_t timeout;
	/*
	 * Instead of a layout: a plan (plan.h), or the path of a config to plan (a config.json, its
	 * folder, a .gguf file; arch.h). Where a plan has several pools (blocks and rows of state,
	 * say), each is opened by itself, and its name is "NAME.POOL": "qwen.state".
	 *
	 * plan:   max_bytes 0 is the size of the plan's pool.
	 * config: KV_PLAN_AUTO is KV_PLAN_SPLIT. max_bytes 0 is the size of the plan's pool if
	 *	   planning has a budget, else as much as there is. tp_ranks 0 is planning's tp.
	 *	   model NULL is the config's name or, lacking one, its architecture; revision NULL
	 *	   is kv_arch_digest(). That tells architectures apart, not weights: say which
	 *	   weights they are where a pool's name doesn't. kvcached --pool does the same.
	 */
	const struct kv_plan *plan;
	uint32_t plan_pool; /* which of the plan's pools */
	const char *config;
	const struct kv_plan_options *planning; /* of the config; NULL: defaults */
	int keep_epoch; /* 1: new weights are said by kv_pool_join_epoch() (identity.h) */
	/*
	 * 1: only look. The pool must exist; index, blocks and arena are mapped for reading, and
	 * whatever would lease, hold, publish or write gives -EACCES: kv_pool_peek() is what there is.
	 * Of a GPU the right to write is not asked for, but it can't be withheld: a vmm descriptor gives
	 * it to whoever has it. With ipc: -ENOTSUP if mapped.
	 */
	int read_only;
	uint32_t weight; /* capacity, as min_bytes: its part of what is left; 0: 1 (stats.h, kv_pool_set()) */
	/* This attachment: the longest a sequence of it may be, as an engine's maximum model length; 0: no bound. */
	uint64_t max_seq_tokens;
};

/**
 * kv_pool_open() - attach to a pool, creating it if it is new
 *
 * Return: 0; -EINVAL, the text names the field; -EACCES if the access list (kvcached --access) doesn't
 *         let this user do that; -EEXIST if a pool of that name has another identity
 *         (the text lists the fields that differ, with both values); -ENOENT if there is none and
 *         @options has no layout; -ENOMEM if the minimum can't be guaranteed; -EBUSY if the pool has
 *         KV_MAX_SESSIONS sessions; -EDQUOT if this user has as many pools or sessions as it may
 *         (the text says which, and kvcached's option); -EMFILE if this process has too few open files;
 *         -ENODEV if a device isn't visible here;
 *         -ETIMEDOUT; -ENOTSUP
 *         if a kv_layout can't express the plan's pool (kv_plan_pool_layout(); the text says why);
 *         of a config also what kv_arch_read() and kv_plan_arch() return, with its path.
 */
int kv_pool_open(struct kv_client *client, const struct kv_pool_options *options,
		 struct kv_pool **ret);

/**
 * kv_pool_close() - give everything back and detach; sequences and batches must be freed before
 *
 * Waits for GPU work that was named by a stream in an earlier release. NULL is allowed.
 * Return: NULL.
 */
struct kv_pool *kv_pool_close(struct kv_pool *pool);

struct kv_pool_info {
	uint32_t block_tokens;
	uint32_t n_components;
	uint64_t block_bytes;
	uint64_t max_blocks;	/* the most blocks this pool can ever have */
	kv_block_id null_block; /* never handed out; pads block tables */
	kv_block_id id_limit;	/* ids are below this */
	int32_t device;		/* enum kv_device */
	uint32_t gpu_mask;
	uint32_t session;
};

/* kv_pool_info() - what a pool is. It never changes while the pool is open. */
void kv_pool_info(const struct kv_pool *pool, struct kv_pool_info *ret);

/* The daemon asks for blocks back: others wait, and this session has more than its share. */
struct kv_pressure {
	uint32_t sequence;   /* one more with each notice; 0: there was none yet */
	uint32_t n_blocks;   /* to give back or let go of; 0: no notice stands */
	int64_t deadline_ns; /* CLOCK_MONOTONIC; after it this session gets no more blocks */
};

/**
 * kv_pool_pressure() - does the daemon ask this session to do with less?
 *
 * A look at shared memory, no message: cheap enough for every step. The answer is to end or preempt
 * sequences: freed blocks and blocks of the cache that nobody holds any more count alike. A session
 * that doesn't is refused more blocks (KV_NO_ROOM) once the deadline has passed, until it has
 * given back what was asked for or nobody waits any more. Nothing is taken from it.
 *
 * Return: 1 if a notice stands; 0; -ECHILD in a forked child.
 */
int kv_pool_pressure(struct kv_pool *pool, struct kv_pressure *ret);

/**
 * kv_pool_pressure_wait() - sleep until there is a notice that wasn't there before
 * @sequence: of the last notice that is known, 0 at first
 *
 * For a thread of its own that calls whoever preempts: beside kv_pool_pressure() it is the one call that may
 * be under way in another thread while a pool is in use. It must have returned before the pool is
 * closed.
 *
 *	while (!ending)
 *		if (kv_pool_pressure_wait(pool, p.sequence, KV_SEC / 10, &p) == 1 && p.n_blocks)
 *			on_pressure(engine, &p);
 *
 * Return: 1 if there is, *ret tells (n_blocks is 0 if it stands no more); 0 if time is over; -ECHILD in a
 *	   forked child.
 */
int kv_pool_pressure_wait(struct kv_pool *pool, uint32_t sequence, int64_t timeout,
			  struct kv_pressure *ret);

/**
 * kv_pool_map() - map the memory that the pool has got, let go of what it has lost or the GPU has done with
 *
 * Who is idle calls it now and then. Blocks that were given back with a stream go when the stream's work has
 * ended, which the library notices in its calls (taking blocks, lookups, publishing, this one): of who
 * makes none they stay with it until it closes the pool or ends.
 *
 * Mapping is of use with kvcached --isolate, where a process maps its pool's granules (64 to 256 MiB of a GPU)
 * and they come and go with what the pool needs. Taking blocks, lookups and kv_batch_build() do it by
 * themselves, so the blocks they bring can be used at once. Who is told of blocks by another process (a
 * worker by its scheduler) calls this before work that uses them is queued; what
 * who is idle keeps mapped others can't have for up to a second. kv_pool_pressure() lets go as
 * well. If nothing has changed this is a load; a new granule costs some milliseconds. The place of a
 * block in this process never changes, and running kernels are not waited for: a granule is mapped
 * before its first block comes, and unmapped when no block of it is held any more.
 *
 * Return: 0; -ETIMEDOUT; -ENOMEM; -ECONNRESET; -EIO with the driver's error.
 */
int kv_pool_map(struct kv_pool *pool, int64_t timeout);

/**
 * kv_pool_peek() - which blocks hold the beginning of a prompt now; none is held
 * @tokens:    [n]
 * @ret_ids:   [max] blocks in order, as many as are cached
 * @ret_words: [max] what kv_pool_peeked() compares
 *
 * For who only reads, and for who wants to know how much of a prompt is cached. Tokens are compared one
 * by one. Blocks with fields or extras (identity.h) are not found. Nothing keeps the blocks: what was read of
 * their bytes is what was cached if kv_pool_peeked() says so afterwards, when the reading has finished.
 *
 * Return: how many blocks; -EINVAL; -ENOMEM; of a mapped pool with isolation what kv_pool_map() gives.
 */
int64_t kv_pool_peek(struct kv_pool *pool, const int32_t *tokens, size_t n, kv_block_id *ret_ids,
		     uint64_t *ret_words, size_t max);

/* kv_pool_peeked() - how many of the first of @n blocks have been what they are since they were peeked */
size_t kv_pool_peeked(const struct kv_pool *pool, const kv_block_id *ids, const uint64_t *words,
		      size_t n);

/* kv_pool_layout() - the pool's layout; lives as long as the pool */
const struct kv_layout *kv_pool_layout(const struct kv_pool *pool);

/**
 * kv_pool_view() - one component as kernels take it, in this process's addresses
 * @gpu: index of a device this pool is mapped on
 *
 * Return: 0; -EINVAL for a number out of range; -ENXIO if the pool isn't mapped there.
 */
int kv_pool_view(const struct kv_pool *pool, uint32_t gpu, uint32_t component,
		 struct kv_view *ret);

/**
 * kv_blocks_take() - lease @n blocks that nobody else uses
 * @ret_ids: [n]
 * @timeout: how long to wait for room; 0: not at all
 *
 * All or nothing. Their content is undefined but finite as long as the pool's components are KV of
 * one use: a block that belonged to another pool was zeroed first.
 * Return: 0; KV_NO_ROOM; KV_TOO_LARGE if the pool never has that many; -EDQUOT if this user has
 *         as many blocks as it may (kvcached --user-blocks); -ETIMEDOUT if the daemon doesn't answer,
 *         15 s after @timeout; -ECONNRESET.
 */
int kv_blocks_take(struct kv_pool *pool, uint32_t n, kv_block_id *ret_ids, int64_t timeout);

/**
 * kv_blocks_give() - give blocks back; no work that uses them may be queued or running
 *
 * Return: 0; -EINVAL if an id isn't held (those that are, are given back); the null block is ignored.
 */
int kv_blocks_give(struct kv_pool *pool, uint32_t n, const kv_block_id *ids);

#ifdef __cplusplus
}
#endif
#endif
