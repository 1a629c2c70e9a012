/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests of GPU memory between real processes. The test itself is an owner: it never uses CUDA. What
 * does runs in forked children ("peers"), each with a socket to here: a peer gets an arena as a
 * client of the daemon does, and answers numbers.
 */
#ifndef KV_TESTS_GPU_PEER_H
#define KV_TESTS_GPU_PEER_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>
#include <unistd.h>

#include "daemon/device.h"
#include "include/kvcached/types.h"
#include "kernels/memory.h"

#define MIB	 ((uint64_t)1 << 20)
#define PATIENCE (30 * KV_SEC)
#define MAX_FDS	 1024

struct peer {
	pid_t pid;
	int socket;
};

/* A child that runs @role and ends; it is killed after 90 s. */
struct peer peer_new(void (*role)(int socket));
void peer_kill(struct peer *peer);

/* Numbers, both ways. hear(): INT64_MIN if the peer is gone, or says nothing. */
void say(int socket, int64_t number);
int64_t hear(int socket);

/* An arena with its descriptors, both ways. */
void give_arena(int socket, const struct kv_arena *arena);
void take_arena(int socket, struct kv_arena_export *export, int *fds);

/* Takes an arena, attaches it, and says 0 or what went wrong. */
struct kv_memory *take_and_attach(int socket, bool read_only);

/* In a peer: a failed demand ends it, which its socket shows. */
#define demand(what)                                                                  \
	do {                                                                          \
		if (!(what)) {                                                        \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #what, \
				kv_error_text());                                     \
			_exit(9);                                                     \
		}                                                                     \
	} while (0)

/* Of GPU @ordinal, as the daemon is told. */
uint64_t free_bytes(int ordinal);
/* Descriptors of this process whose file's name begins with @prefix. */
int count_fds(const char *prefix);
/* Is @word in the names of what this process has mapped? */
bool maps_name(const char *word);

/* An arena that must succeed. */
struct kv_arena *arena_of(int ordinal, uint64_t bytes, uint32_t kind, uint64_t granule_bytes);

/* The shapes of arena that tests loop over: 0..2 vmm, 3 ipc. */
#define N_ARENAS 4
extern const struct arena_shape {
	uint32_t kind;
	uint64_t bytes, granule_bytes;
} arena_shapes[N_ARENAS];
struct kv_arena *arena_no(int i);

/* Bytes that follow from @seed. */
void fill_bytes(unsigned char *bytes, size_t n, uint64_t seed);

/* Writes a piece of every MiB and of the end, or reads and compares them. */
#define PIECE 4096
bool use_pieces(struct kv_memory *memory, uint64_t arena_bytes, bool write);

/* Peers that take an arena, hear its size and write, or read, its pieces. 1: all is well. */
void role_writer(int socket);
void role_reader(int socket); /* again at each number it hears */

#endif
