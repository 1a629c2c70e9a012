/* SPDX-License-Identifier: Apache-2.0 */
#include <check.h>
#include <dirent.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "include/internal/socket.h"
#include "tests/gpu/peer.h"

/*
 * Peers
 */

struct peer peer_new(void (*role)(int socket))
{
	struct peer peer;
	int sockets[2];

	ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets), 0);
	peer.pid = fork();
	ck_assert_int_ge(peer.pid, 0);
	if (!peer.pid) {
		close(sockets[0]);
		alarm(90);
		role(sockets[1]);
		_exit(0);
	}
	close(sockets[1]);
	peer.socket = sockets[0];
	return peer;
}

void peer_kill(struct peer *peer)
{
	kill(peer->pid, SIGKILL);
	waitpid(peer->pid, NULL, 0);
	close(peer->socket);
}

void say(int socket, int64_t number)
{
	if (kv_socket_send(socket, &number, sizeof(number), NULL, 0, 0) < 0)
		_exit(3);
}

int64_t hear(int socket)
{
	int64_t number;

	if (kv_socket_wait(socket, POLLIN, kv_now() + PATIENCE) < 0 ||
	    kv_socket_receive(socket, &number, sizeof(number), NULL, 0, NULL, 0) != sizeof(number))
		return INT64_MIN;
	return number;
}

/* What fails here, the other side misses. */
void give_arena(int socket, const struct kv_arena *arena)
{
	uint32_t n;

	kv_socket_send(socket, &arena->export, sizeof(arena->export), NULL, 0, 0);
	for (uint32_t i = 0; i < arena->export.n_fds; i += n) {
		n = arena->export.n_fds - i < 250 ? arena->export.n_fds - i : 250;
		kv_socket_send(socket, &i, sizeof(i), arena->fds + i, n, 0);
	}
}

void take_arena(int socket, struct kv_arena_export *export, int *fds)
{
	uint32_t n, got = 0, i;

	if (kv_socket_receive(socket, export, sizeof(*export), NULL, 0, NULL, 0) != sizeof(*export))
		_exit(4);
	for (; got < export->n_fds; got += n)
		if (kv_socket_receive(socket, &i, sizeof(i), fds + got, MAX_FDS - got, &n, 0) <= 0)
			_exit(5);
}

struct kv_memory *take_and_attach(int socket, bool read_only)
{
	struct kv_arena_export export;
	struct kv_memory *memory = NULL;
	int fds[MAX_FDS];
	int r;

	take_arena(socket, &export, fds);
	r = kv_memory_attach(&export, fds, read_only, &memory);
	if (r < 0)
		fprintf(stderr, "attach: %s\n", kv_error_text());
	say(socket, r);
	for (uint32_t i = 0; i < export.n_fds; i++)
		close(fds[i]);
	if (r < 0)
		_exit(6);
	return memory;
}

/*
 * Figures
 */

uint64_t free_bytes(int ordinal)
{
	struct kv_device_info info;

	ck_assert_msg(kv_device_cuda.info(ordinal, &info) == 0, "%s", kv_error_text());
	return info.free_bytes;
}

int count_fds(const char *prefix)
{
	DIR *dir = opendir("/proc/self/fd");
	struct dirent *entry;
	char target[256];
	int n = 0;

	while (dir && (entry = readdir(dir))) {
		ssize_t size = readlinkat(dirfd(dir), entry->d_name, target, sizeof(target) - 1);

		target[size > 0 ? size : 0] = '\0';
		n += size > 0 && !strncmp(target, prefix, strlen(prefix));
	}
	if (dir)
		closedir(dir);
	return n;
}

bool maps_name(const char *word)
{
	FILE *f = fopen("/proc/self/maps", "re");
	char line[512];
	bool found = false;

	while (f && fgets(line, sizeof(line), f))
		found |= strstr(line, word) != NULL;
	if (f)
		fclose(f);
	return found;
}

struct kv_arena *arena_of(int ordinal, uint64_t bytes, uint32_t kind, uint64_t granule_bytes)
{
	struct kv_arena *arena = NULL;

	ck_assert_msg(kv_device_cuda.arena_new(ordinal, bytes, kind, granule_bytes, &arena) == 0,
		      "%s", kv_error_text());
	return arena;
}

const struct arena_shape arena_shapes[N_ARENAS] = {
	{KV_EXPORT_VMM, 1024 * MIB, 0},
	{KV_EXPORT_VMM, 480 * MIB, 64 * MIB}, /* the last granule is half of one */
	{KV_EXPORT_VMM, 1200 * MIB, 2 * MIB}, /* more descriptors than one packet holds */
	{KV_EXPORT_IPC, 1024 * MIB, 0},
};

struct kv_arena *arena_no(int i)
{
	return arena_of(0, arena_shapes[i].bytes, arena_shapes[i].kind,
			arena_shapes[i].granule_bytes);
}

void fill_bytes(unsigned char *bytes, size_t n, uint64_t seed)
{
	for (size_t i = 0; i < n; i++) {
		seed = seed * 6364136223846793005u + 1442695040888963407u;
		bytes[i] = (unsigned char)(seed >> 56);
	}
}

bool use_pieces(struct kv_memory *memory, uint64_t arena_bytes, bool write)
{
	unsigned char want[PIECE], got[PIECE];

	for (uint64_t at = 0; at < arena_bytes; at += MIB) {
		uint64_t offset = at + (at / MIB * 4096) % (MIB - PIECE);

		if (at + MIB == arena_bytes)
			offset = arena_bytes - PIECE;
		fill_bytes(want, PIECE, offset);
		if (write) {
			if (kv_memory_write(memory, offset, want, PIECE) < 0)
				return false;
			continue;
		}
		if (kv_memory_read(memory, offset, got, PIECE) < 0 || memcmp(got, want, PIECE) != 0)
			return false;
	}
	return true;
}

void role_writer(int socket)
{
	struct kv_memory *memory = take_and_attach(socket, false);
	uint64_t bytes = (uint64_t)hear(socket);

	demand(use_pieces(memory, bytes, true));
	say(socket, 1);
	hear(socket);
}

void role_reader(int socket)
{
	struct kv_memory *memory = take_and_attach(socket, false);
	uint64_t bytes = (uint64_t)hear(socket);

	say(socket, use_pieces(memory, bytes, false));
	while (hear(socket) != INT64_MIN)
		say(socket, use_pieces(memory, bytes, false));
}
