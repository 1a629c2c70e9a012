/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GPUs, and arenas on them. This process decides and holds descriptors; all that needs the driver
 * is done by helper processes (device_cuda_job.c), so a vmm arena's owner has neither driver nor
 * context, can fork, and isn't slowed when the driver tears down somebody else.
 *
 *	arena_new:	make (helper, ends)  ->  fds here  ->  check (helper, ends)	vmm
 *			make (helper, stays: the owner)    ->  check (helper, ends)	ipc
 *
 * The kind is never changed silently: kv_arena.why says what was taken and why not the other.
 *
 * Measured (H200, driver 580.159; tests/gpu/test_device_cuda.c prints them): 125 GiB as one granule
 * are made and checked in 440 ms, in granules of 64 MiB in 840 ms, as ipc in 370 ms. The vmm owner
 * takes no other byte of the GPU, the ipc owner a context of 520 MiB.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>

#include "daemon/device_cuda_job.h"
#include "include/internal/cleanup.h"
#include "include/kvcached/types.h"

#define INFO_TIMEOUT  (60 * KV_SEC) /* a GPU without persistence mode takes seconds to wake up */
#define MAKE_TIMEOUT  (120 * KV_SEC)
#define CHECK_TIMEOUT (120 * KV_SEC)

/* The text so far, behind the GPU's number. */
static int gpu_error(int ordinal, int r)
{
	char text[KV_ERROR_BYTES];

	snprintf(text, sizeof(text), "%s", kv_error_text());
	return kv_error(r, "GPU %d: %s", ordinal, text);
}

static int info(int ordinal, struct kv_device_info *ret)
{
	struct kv_cuda_job job = {.ordinal = ordinal};
	struct kv_helper_reply reply;
	int r;

	r = kv_helper_run(kv_cuda_job_info, &job, INFO_TIMEOUT, NULL, 0, &reply);
	if (r < 0)
		return gpu_error(ordinal, r);
	*ret = reply.info;
	return 0;
}

static void arena_free(struct kv_arena *arena)
{
	struct kv_helper *owner;

	if (!arena)
		return;
	if (arena->fds)
		for (uint32_t i = 0; i < arena->export.n_fds; i++)
			kv_close(arena->fds[i]);
	free(arena->fds);
	kv_close(arena->owner_pidfd);
	kv_close(arena->owner_fd);
	owner = arena->owner;
	if (owner)
		kv_helper_stop(owner);
	free(owner);
	free(arena);
}

static void arena_freep(struct kv_arena **arena)
{
	arena_free(*arena);
}

static int make_vmm(struct kv_arena *arena, const struct kv_cuda_job *job)
{
	const uint64_t n = (job->bytes - 1) / job->granule_bytes + 1;
	kv_cleanup(kv_freep) int *fds = NULL;
	struct kv_helper_reply reply;
	int r = kv_device_fits_files(n, job->granule_bytes);

	if (r < 0)
		return r;
	fds = calloc(n, sizeof(*fds));
	if (!fds)
		return kv_error(-ENOMEM, "no memory for %" PRIu64 " file descriptors", n);

	r = kv_helper_run(kv_cuda_job_vmm, job, MAKE_TIMEOUT, fds, (uint32_t)n, &reply);
	if (r < 0)
		return r;
	arena->export = reply.export;
	arena->export.owner_pid = getpid();
	arena->fds = kv_steal(fds);
	return 0;
}

static int make_ipc(struct kv_arena *arena, const struct kv_cuda_job *job)
{
	kv_cleanup(kv_freep) struct kv_helper *owner = NULL;
	struct kv_helper_reply reply;
	int r;

	owner = calloc(1, sizeof(*owner));
	if (!owner)
		return kv_error(-ENOMEM, "no memory for the record of an owner process");
	r = kv_helper_start(kv_cuda_job_ipc, job, MAKE_TIMEOUT, owner);
	if (r < 0)
		return r;
	r = kv_helper_receive(owner, MAKE_TIMEOUT, NULL, 0, &reply);
	if (r < 0) {
		kv_helper_stop(owner);
		return r;
	}
	arena->export = reply.export;
	arena->owner_pidfd = (int)syscall(SYS_pidfd_open, owner->pid, 0);
	arena->owner = kv_steal(owner);
	return 0;
}

/* An arena of one kind that a second process has been able to use. */
static int arena_of_kind(const struct kv_cuda_job *job, uint32_t kind, struct kv_arena **ret)
{
	kv_cleanup(arena_freep) struct kv_arena *arena = NULL;
	struct kv_cuda_job check = *job;
	struct kv_helper_reply reply;
	char text[KV_ERROR_BYTES];
	int r;

	arena = calloc(1, sizeof(*arena));
	if (!arena)
		return kv_error(-ENOMEM, "no memory for the record of an arena");
	arena->owner_pidfd = arena->owner_fd = -1;
	r = kind == KV_EXPORT_VMM ? make_vmm(arena, job) : make_ipc(arena, job);
	if (r < 0)
		return r;
	r = kv_arena_epoch(&arena->export.epoch);
	if (r < 0)
		return r;

	check.arena = arena;
	r = kv_helper_run(kv_cuda_job_check, &check, CHECK_TIMEOUT, NULL, 0, &reply);
	if (r < 0) {
		snprintf(text, sizeof(text), "%s", kv_error_text());
		if (r == -ENOMEM)
			return kv_error(
				r, "an arena of %" PRIu64 " bytes leaves no room for a client: %s",
				job->bytes, text);
		return kv_error(r == -EIO ? -ENOTSUP : r, "%s: a second process can't use it: %s",
				kv_export_name(kind), text);
	}
	*ret = kv_steal(arena);
	return 0;
}

/* The best kind: vmm, and where that doesn't work ipc, unless granules are asked for. */
static int arena_of_best_kind(const struct kv_cuda_job *job, struct kv_arena **ret)
{
	char vmm[KV_ERROR_BYTES], ipc[KV_ERROR_BYTES];
	int r;

	r = arena_of_kind(job, KV_EXPORT_VMM, ret);
	if (r != -ENOTSUP && r != -EIO)
		return r;
	snprintf(vmm, sizeof(vmm), "%s", kv_error_text());
	if (job->granule_bytes != job->bytes)
		return kv_error(r, "%.180s (and ipc has no granules)", vmm);
	r = arena_of_kind(job, KV_EXPORT_IPC, ret);
	if (r < 0) {
		snprintf(ipc, sizeof(ipc), "%s", kv_error_text());
		return kv_error(r, "neither kind works: %.110s; %.110s", vmm, ipc);
	}
	snprintf((*ret)->why, sizeof((*ret)->why), "ipc, because vmm doesn't work: %.200s", vmm);
	return 0;
}

static int check_sizes(uint64_t bytes, uint32_t kind, uint64_t granule_bytes)
{
	if (kind && kind != KV_EXPORT_VMM && kind != KV_EXPORT_IPC)
		return kv_error(-ENOTSUP, "export: %s asked for, a GPU has vmm and ipc",
				kv_export_name(kind));
	if (!bytes || bytes % KV_ARENA_UNIT)
		return kv_error(-EINVAL,
				"arena of %" PRIu64 " bytes: a multiple of %" PRIu64 " expected",
				bytes, KV_ARENA_UNIT);
	if (granule_bytes % KV_ARENA_UNIT || granule_bytes > bytes)
		return kv_error(-EINVAL,
				"granules of %" PRIu64 " bytes: a multiple of %" PRIu64
				", no larger than the arena of %" PRIu64 ", expected",
				granule_bytes, KV_ARENA_UNIT, bytes);
	if (kind == KV_EXPORT_IPC && granule_bytes && granule_bytes != bytes)
		return kv_error(-ENOTSUP,
				"granules of %" PRIu64 " bytes: an ipc arena is one piece",
				granule_bytes);
	return 0;
}

static int arena_new(int ordinal, uint64_t bytes, uint32_t kind, uint64_t granule_bytes,
		     struct kv_arena **ret)
{
	struct kv_cuda_job job = {
		.ordinal = ordinal,
		.bytes = bytes,
		.granule_bytes = granule_bytes ? granule_bytes : bytes,
	};
	struct kv_arena *arena = NULL;
	int r;

	r = check_sizes(bytes, kind, granule_bytes);
	if (!r)
		r = kind ? arena_of_kind(&job, kind, &arena) : arena_of_best_kind(&job, &arena);
	if (r < 0)
		return gpu_error(ordinal, r);
	if (!arena->why[0])
		snprintf(arena->why, sizeof(arena->why), "%s: %s",
			 kv_export_name(arena->export.kind),
			 kind ? "asked for" : "works, a second process has used it");
	*ret = arena;
	return 0;
}

static void arena_let_go(struct kv_arena *arena)
{
	struct kv_helper *owner = kv_steal(arena->owner);

	if (owner)
		arena->owner_fd = owner->socket;
	free(owner);
}

const struct kv_device_ops kv_device_cuda = {
	.name = "cuda",
	.info = info,
	.arena_new = arena_new,
	.arena_free = arena_free,
	.arena_let_go = arena_let_go,
};
