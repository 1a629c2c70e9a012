/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Host memory as a device: one, number 0. Its arena is a memfd of exactly the size asked for,
 * sparse (a page is taken when first touched), and sealed so that nobody, we included, can change
 * its size under those who mapped it.
 *
 * How much there is: the least of the machine's memory and of every memory limit above our cgroup
 * (v2 or v1), because an arena that outgrows any of them ends in the OOM killer.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/device.h"
#include "include/internal/cleanup.h"
#include "kernels/memory.h"

#define PATH_BYTES 4096

static void fclosep(FILE **f)
{
	if (*f)
		fclose(*f);
}

/* The number behind a line's "@key" in @path, or @otherwise; "" is the file's first number. */
static uint64_t number_in(const char *path, const char *key, uint64_t otherwise)
{
	kv_cleanup(fclosep) FILE *f = fopen(path, "re");
	char line[256];
	uint64_t n;

	while (f && fgets(line, sizeof(line), f))
		if (!strncmp(line, key, strlen(key)) &&
		    sscanf(line + strlen(key), "%" SCNu64, &n) == 1)
			return n;
	return otherwise;
}

static uint64_t min(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* Lowers total and free to the limits of the cgroup @path under @root and of those above it. */
static void apply_limits(const char *root, char *path, const char *limit_file,
			 const char *used_file, struct kv_device_info *info)
{
	char file[PATH_BYTES + 128];
	uint64_t limit, used, cache;
	char *slash;

	for (;;) {
		snprintf(file, sizeof(file), "%s%s/%s", root, path, limit_file);
		limit = number_in(file, "", UINT64_MAX); /* "max" is no number */
		if (limit != UINT64_MAX) {
			snprintf(file, sizeof(file), "%s%s/%s", root, path, used_file);
			used = number_in(file, "", 0);
			snprintf(file, sizeof(file), "%s%s/memory.stat", root, path);
			cache = number_in(file, "inactive_file ", 0);
			used -= min(used, cache);
			info->total_bytes = min(info->total_bytes, limit);
			info->free_bytes = min(info->free_bytes, limit - min(limit, used));
		}
		slash = strrchr(path, '/');
		if (!slash)
			return;
		*slash = '\0';
	}
}

static void apply_cgroups(struct kv_device_info *info)
{
	kv_cleanup(fclosep) FILE *f = fopen("/proc/self/cgroup", "re");
	char line[PATH_BYTES];
	char *controllers, *path;

	/* "0::/path" is version 2, "9:memory:/path" version 1. */
	while (f && fgets(line, sizeof(line), f)) {
		line[strcspn(line, "\n")] = '\0';
		controllers = strchr(line, ':');
		path = controllers ? strchr(++controllers, ':') : NULL;
		if (!path)
			continue;
		*path++ = '\0';
		if (!*controllers)
			apply_limits("/sys/fs/cgroup", path, "memory.max", "memory.current", info);
		else if (!strcmp(controllers, "memory"))
			apply_limits("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes",
				     "memory.usage_in_bytes", info);
	}
}

static int info(int ordinal, struct kv_device_info *ret)
{
	struct kv_device_info host = {.name = "host memory"};

	if (ordinal != 0)
		return kv_error(-ENODEV, "host device %d: there is only number 0", ordinal);

	host.total_bytes = number_in("/proc/meminfo", "MemTotal:", 0) * 1024;
	host.free_bytes = number_in("/proc/meminfo", "MemAvailable:", 0) * 1024;
	if (!host.total_bytes)
		return kv_error(-EIO, "/proc/meminfo does not say how much memory there is");
	apply_cgroups(&host);
	*ret = host;
	return 0;
}

static void arena_free(struct kv_arena *arena)
{
	if (!arena)
		return;
	if (arena->fds)
		for (uint32_t i = 0; i < arena->export.n_fds; i++)
			kv_close(arena->fds[i]);
	free(arena->fds);
	free(arena);
}

static void arena_freep(struct kv_arena **arena)
{
	arena_free(*arena);
}

/* One for each granule. */
static int make_memfds(struct kv_arena *arena)
{
	const struct kv_arena_export *e = &arena->export;
	const uint32_t n = (uint32_t)((e->bytes - 1) / e->granule_bytes + 1);
	int r = kv_device_fits_files(n, e->granule_bytes);

	if (r < 0)
		return r;
	arena->fds = calloc(n, sizeof(*arena->fds));
	if (!arena->fds)
		return kv_error(-ENOMEM, "no memory for the record of an arena");
	for (uint32_t i = 0; i < n; i++) {
		const uint64_t left = e->bytes - i * e->granule_bytes;

		r = kv_memory_host_new(min(left, e->granule_bytes), &arena->fds[i]);
		if (r < 0)
			return r;
		arena->export.n_fds++;
	}
	return 0;
}

static int arena_new(int ordinal, uint64_t bytes, uint32_t kind, uint64_t granule_bytes,
		     struct kv_arena **ret)
{
	kv_cleanup(arena_freep) struct kv_arena *arena = NULL;
	struct kv_device_info host;
	int r;

	r = info(ordinal, &host);
	if (r < 0)
		return r;
	if (kind && kind != KV_EXPORT_HOST)
		return kv_error(-ENOTSUP, "export: %s asked for, host memory has only %s",
				kv_export_name(kind), kv_export_name(KV_EXPORT_HOST));
	if (!bytes || bytes % KV_ARENA_UNIT || bytes > INT64_MAX)
		return kv_error(-EINVAL,
				"arena of %" PRIu64 " bytes: a multiple of %" PRIu64 " expected",
				bytes, KV_ARENA_UNIT);
	if (granule_bytes % KV_ARENA_UNIT || granule_bytes > bytes)
		return kv_error(-EINVAL,
				"granules of %" PRIu64 " bytes: a multiple of %" PRIu64
				", no larger than the arena of %" PRIu64 ", expected",
				granule_bytes, KV_ARENA_UNIT, bytes);
	if (bytes > host.free_bytes)
		return kv_error(-ENOMEM,
				"arena of %" PRIu64 " bytes asked for, %" PRIu64 " of %" PRIu64
				" bytes of host memory are free",
				bytes, host.free_bytes, host.total_bytes);

	arena = calloc(1, sizeof(*arena));
	if (!arena)
		return kv_error(-ENOMEM, "no memory for the record of an arena");
	arena->owner_pidfd = arena->owner_fd = -1;
	arena->export.kind = KV_EXPORT_HOST;
	arena->export.bytes = bytes;
	arena->export.granule_bytes = granule_bytes ? granule_bytes : bytes;
	arena->export.sparse = granule_bytes && granule_bytes != bytes;
	arena->export.owner_pid = getpid();
	r = kv_arena_epoch(&arena->export.epoch);
	if (r < 0)
		return r;
	r = make_memfds(arena);
	if (r < 0)
		return r;
	snprintf(arena->why, sizeof(arena->why), "host: a memfd");
	*ret = kv_steal(arena);
	return 0;
}

static void arena_let_go(struct kv_arena *arena)
{
	(void)arena; /* a memfd is nothing else anyway */
}

const struct kv_device_ops kv_device_host = {
	.name = "host",
	.info = info,
	.arena_new = arena_new,
	.arena_free = arena_free,
	.arena_let_go = arena_let_go,
};
