/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How an arena is named when it is handed to another process: the message that travels with its
 * file descriptors (host: one memfd; vmm: one fd a granule, in order; ipc: none).
 */
#ifndef KV_INTERNAL_ARENA_EXPORT_H
#define KV_INTERNAL_ARENA_EXPORT_H

#include <stdint.h>
#include <stdio.h>

#define KV_UUID_BYTES 16
#define KV_IPC_HANDLE_BYTES 64

enum kv_export_kind {
	KV_EXPORT_HOST = 1, /* memfd */
	KV_EXPORT_VMM = 2,  /* cuMemCreate granules, one POSIX fd each */
	KV_EXPORT_IPC = 3,  /* cudaMalloc, one IPC handle for the whole */
};

struct kv_arena_export {
	uint32_t kind; /* enum kv_export_kind */
	uint32_t n_fds;
	uint64_t bytes; /* of the whole arena */
	uint64_t granule_bytes; /* of each fd's memory but perhaps the last; = bytes if one fd */
	uint64_t epoch; /* differs each time an arena is made, also when the handle repeats */
	uint8_t uuid[KV_UUID_BYTES]; /* of the GPU; zero for host memory */
	uint8_t ipc_handle[KV_IPC_HANDLE_BYTES];
	int32_t owner_pid; /* of the process that made it */
	uint32_t sparse; /* 1: its granules are handed out and mapped one by one (kvcached --isolate) */
};

/* "GPU-01234567-89ab-cdef-0123-456789abcdef": 40 characters and the NUL */
#define KV_UUID_TEXT_BYTES 41
static inline void kv_uuid_format(const uint8_t uuid[KV_UUID_BYTES], char text[KV_UUID_TEXT_BYTES])
{
	const uint8_t *u = uuid;

	snprintf(text, KV_UUID_TEXT_BYTES,
		 "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1],
		 u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14],
		 u[15]);
}

/*
 * Which promises don't hold with this kind that do with others; "": all hold. That a client can write only
 * what is its pool's holds with kvcached --isolate, which ipc can't have.
 */
static inline const char *kv_export_limits(uint32_t kind)
{
	return kind == KV_EXPORT_IPC ?
		       "memory ends with its owner process, not with the last descriptor: then nobody can "
		       "attach, and a restart of kvcached is needed; clients can write all of the arena, --isolate can't be had" :
		       "";
}

static inline const char *kv_export_name(uint32_t kind)
{
	return kind == KV_EXPORT_HOST ? "host" : kind == KV_EXPORT_VMM ? "vmm" :
					     kind == KV_EXPORT_IPC    ? "ipc" :
									"unknown";
}

#endif
