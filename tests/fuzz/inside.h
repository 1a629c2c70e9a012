/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon inside the fuzz target's process: its real code from the accepted socket on, over host
 * memory, with the event loop of epoll. What the outside world would do is done here: time stands
 * still until it is told to go on, dirty extents are zeroed on demand, deposits are kept for the
 * next worker, a process ends when the test says so (in truth all clients are this process).
 */
#ifndef KV_TESTS_FUZZ_INSIDE_H
#define KV_TESTS_FUZZ_INSIDE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kv_daemon;

#define INSIDE_ARENA ((uint64_t)8 << 20)

/* Aborts, after saying what is wrong: a finding. */
#define inside_must(ok, ...)                                           \
	do {                                                           \
		if (!(ok))                                             \
			inside_abort(__func__, __LINE__, __VA_ARGS__); \
	} while (0)
void inside_abort(const char *function, int line, const char *format, ...)
	__attribute__((format(printf, 3, 4), noreturn));

/*
 * inside_start() - a new daemon; inside_stop() ends it and sees that no descriptor is left open
 * @isolate: as kvcached --isolate has it, in granules of INSIDE_GRANULE
 */
#define INSIDE_GRANULE ((uint64_t)2 << 20)
struct kv_daemon *inside_start(bool isolate);
void inside_stop(void);

/**
 * inside_connect() - a connection that the daemon has accepted
 * @ret_peer: the daemon's number of it; 0: it was refused
 *
 * Return: the client's end.
 */
int inside_connect(uint64_t *ret_peer);

/* inside_ended() - the process behind a connection, or all, ended; no such peer: nothing happens */
#define INSIDE_ALL UINT64_MAX
void inside_ended(uint64_t peer);

/* Whose code runs: for who makes calls of one side fail. */
enum inside_who { INSIDE_CLIENTS, INSIDE_DAEMON, INSIDE_KEEPER };
extern enum inside_who inside_runs;
/* inside_is_keeper() - is this the daemon's socket of its keeper? */
bool inside_is_keeper(int fd);

/* inside_next_pool() - the number of the next pool, to be looked at or changed */
uint64_t *inside_next_pool(void);

/* inside_step() - the daemon does what there is to do */
void inside_step(void);

/* inside_advance() - time goes on */
void inside_advance(int64_t ns);

/**
 * inside_restart() - the worker dies, and another takes over what the keeper holds
 * @peers: [n] numbers of peers, replaced by those of who has their sessions now; 0: nobody. n <= 16
 *
 * All connections are closed. A worker that can't take over is a finding.
 */
void inside_restart(uint64_t *peers, uint32_t n);

/* inside_peer_of() - the peer that has a session now; 0: there is none */
uint64_t inside_peer_of(uint64_t session);

/* What the linker puts in place of sched_yield() where the library is linked in: time goes on. */
int __wrap_sched_yield(void);

/*
 * inside_zero() - what movers would do: dirty extents are zeroed, blocks that move copied, granules
 * renewed
 * @poor: but there is no memory for new granules
 */
void inside_zero(bool poor);

/**
 * inside_check() - the books must balance
 * @scribbled: somebody wrote the shared pages of a pool of this name (NULL: of none, "*": of any):
 *that pool's mirror is written anew from the private books first, its clients' bits are cut to
 *those of sessions that live, and the rest must be right
 */
void inside_check(const char *scribbled);

/* inside_is_quiet() - all processes have ended: nobody is known, every block is free or cached */
void inside_is_quiet(void);

#endif
