/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The keeper: the process that people start. It holds what must outlive the worker, and starts the
 * worker, again when that dies. It has no CUDA, maps nothing, and reads nothing that a client sent:
 * its only peer is the worker, on a socket pair of their own.
 *
 *   keeper                                      worker
 *     | fork, exec kvcached --worker FD            |
 *     |-- LISTEN (fd) ---------------------------->|  the socket that clients connect to
 *     |-- DEPOSIT (fds) ... ---------------------->|  what a worker before it had put down
 *     |-- START ---------------------------------->|  that was all
 *     |<------------------------------ READY ------|  its books are complete, it serves
 *     |<------------------------------ DEPOSIT ----|  whenever something new has to be held,
 *     |-- KEPT, or REFUSED ----------------------->|  for which the worker waits
 *     |<------------------------------ DROP -------|
 *     |<------------------------------ BINARY (fd)-|  what to run from now on; without one the same.
 *     |                                            |  The worker ends
 *
 * A deposit is one packet: it is kept with all its descriptors, or it was not made; who has no descriptor left
 * for it says so, and what it was for is refused. What a dead worker had sent is read before another is started.
 * So, whatever instruction a worker dies at:
 *
 *   - things are deposited before anything in the journal (saved.h) or in a client's hands says that
 *     they exist. A deposit that the journal doesn't know is ignorable: the next worker drops it.
 *   - things are dropped after the journal has forgotten them. Again the deposit is unknown to it.
 *   - a deposit of many parts (an arena of many granules) counts when the journal has its arena.
 *
 * So a thing that the journal names is always there, complete.
 *
 * MOVER is a deposit of another sort: the pidfd of a process that writes to an arena for the worker.
 * It is made before that process is given an arena. When the worker ends they are killed, which
 * may take one in a call of the driver seconds: the next worker, which is not kept waiting for that,
 * finds those that have not ended, and hands out nothing that they may be writing to (mover.c).
 *
 * The end: SIGTERM, SIGINT, SIGHUP stop the worker, then the keeper ends; with it all memory that
 * no client maps. A keeper that is killed is seen by the worker as the end of their socket: it stops,
 * clients' connections close, and the memory is returned as they end.
 */
#ifndef KV_DAEMON_KEEPER_H
#define KV_DAEMON_KEEPER_H

#include <stdint.h>
#include <sys/types.h>

#include "include/internal/list.h"

#define KV_KEEPER_MAX_FDS 250

enum kv_keeper_type {
	KV_KEEPER_LISTEN = 1,
	KV_KEEPER_DEPOSIT = 2,
	KV_KEEPER_START = 3,
	KV_KEEPER_READY = 4,
	KV_KEEPER_DROP = 5,
	KV_KEEPER_BINARY = 6,
	KV_KEEPER_ALIVE = 7, /* worker: its loop turns; only if a service manager has a watchdog */
	KV_KEEPER_KEPT = 8,  /* keeper: the DEPOSIT of this kind, id and part */
	KV_KEEPER_REFUSED = 9, /* likewise, it could not; part: the errno */
};

enum kv_deposit_kind {
	KV_DEPOSIT_JOURNAL = 1, /* id 0; fd: the journal's memfd */
	KV_DEPOSIT_ARENA = 2,	/* id: number of the device; fds: granules, in parts of up to 250 */
	KV_DEPOSIT_OWNER = 3,	/* id: number of the device; fds: pidfd, socket of an ipc owner */
	KV_DEPOSIT_POOL = 4,	/* id: the pool's; fds: index, blocks, each again for reading, books */
	KV_DEPOSIT_SESSION = 5, /* id: the session's; fds: session pages, pidfd of its client */
	KV_DEPOSIT_MOVER = 6,	/* id: KV_DEPOSIT_MOVER_ID(); fd: pidfd */
	KV_DEPOSIT_GRANULE = 7, /* of a sparse arena; id: number of the device << 32 | granule; fd */
};

#define KV_DEPOSIT_MOVER_ID(gpu, pid) ((uint64_t)(gpu) << 32 | (uint32_t)(pid))

/* Every packet, both ways. */
struct kv_keeper_msg {
	uint32_t type; /* enum kv_keeper_type */
	uint32_t kind; /* DEPOSIT, DROP: enum kv_deposit_kind */
	uint64_t id;
	uint32_t part;	   /* DEPOSIT: of a thing with more than KV_KEEPER_MAX_FDS descriptors. START: 1, this
			    * keeper answers deposits: one that an older program began doesn't */
	uint32_t n_fds;
	uint32_t restarts; /* START: workers before this one that served */
	uint32_t n_given_up; /* START: programs that ended before they served */
};

/* What is held for one (kind, id, part). */
struct kv_deposit {
	struct kv_link link; /* of a list in order of arrival */
	uint32_t kind, part, n_fds;
	uint64_t id;
	int fds[]; /* owned */
};

/* keeper_fds.c: a list of deposits */

/* kv_deposits_put() - takes the descriptors over, also on failure; replaces what was there. -ENOMEM */
int kv_deposits_put(struct kv_link *list, const struct kv_keeper_msg *msg, const int *fds);
void kv_deposits_drop(struct kv_link *list, uint32_t kind, uint64_t id); /* all parts */
/* kv_deposits_find() - the next of @kind after @from, NULL: the first; NULL: there are no more */
struct kv_deposit *kv_deposits_find(const struct kv_link *list, const struct kv_deposit *from,
				    uint32_t kind);
struct kv_deposit *kv_deposits_get(const struct kv_link *list, uint32_t kind, uint64_t id);
struct kv_deposit *kv_deposit_free(struct kv_deposit *deposit); /* closes what is still in it */

/**
 * kv_keeper_run() - keeper.c: the process itself, with its command line for workers
 * @listen_fd: that listens at @socket already, and whose file is another's; -1: make one. Taken over.
 *
 * Return: its exit status.
 */
int kv_keeper_run(const char *socket, uint32_t socket_mode, const char *socket_group, int listen_fd,
		  int argc, char **argv);

/*
 * keeper_socket.c: where clients connect to; @group: NULL, or who it belongs to, a name or number.
 * 0; negative with a text that names the path or the group
 */
int kv_keeper_listen(const char *path, uint32_t mode, const char *group, int *ret);

#endif
