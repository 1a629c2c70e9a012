/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arenas of host memory: a memfd, mapped shared. Work on bytes is done when a call returns, so
 * there are no streams, and an event has always passed.
 *
 * The memfd must have the size it is said to have and be sealed against change of it: otherwise its
 * owner could shrink it under us, and a read would end in SIGBUS.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/kvcached/types.h"
#include "kernels/memory.h"
#include "kernels/memory_backend.h"

#define PINNED_ALIGN 256

static int check_memfd(int fd, uint64_t bytes)
{
	const int needed = F_SEAL_SHRINK | F_SEAL_GROW;
	struct stat st;
	int seals;

	if (fstat(fd, &st) < 0)
		return kv_error(-EINVAL, "fds[0]: %d: %s", fd, strerror(errno));
	if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size != bytes)
		return kv_error(-EINVAL,
				"fds[0]: a memfd of %" PRIu64 " bytes expected, this file has %lld",
				bytes, (long long)st.st_size);
	seals = fcntl(fd, F_GET_SEALS);
	if (seals < 0 || (seals & needed) != needed)
		return kv_error(
			-EINVAL,
			"fds[0]: a memfd sealed against shrinking and growing expected, its "
			"seals are 0x%x",
			seals < 0 ? 0 : seals);
	return 0;
}

/* @at: an address where it must be, or NULL. */
static int map_file(void *at, size_t bytes, int fd, bool read_only, void **ret)
{
	void *p;
	int r;

	p = mmap(at, bytes, PROT_READ | (read_only ? 0 : PROT_WRITE),
		 MAP_SHARED | MAP_NORESERVE | (at ? MAP_FIXED : 0), fd, 0);
	if (p == MAP_FAILED)
		return kv_error(-errno, "mapping %zu bytes of host memory: %s", bytes,
				strerror(errno));
	/* A forked child must not go on writing blocks after its parent's death. */
	if (madvise(p, bytes, MADV_DONTFORK) < 0) {
		r = kv_error(-errno, "MADV_DONTFORK: %s", strerror(errno));
		munmap(p, bytes);
		return r;
	}
	madvise(p, bytes, MADV_DONTDUMP); /* only a wish: keep prompts out of core files */
	*ret = p;
	return 0;
}

static int attach(struct kv_memory *memory, const int *fds)
{
	int r = check_memfd(fds[0], memory->export.bytes);

	return r < 0 ? r : map_file(NULL, memory->export.bytes, fds[0], memory->read_only,
				    &memory->base);
}

/* Addresses that nothing can be read from or written to. */
static int reserve_at(void *at, size_t bytes, void **ret)
{
	void *p = mmap(at, bytes, PROT_NONE,
		       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0), -1, 0);

	if (p == MAP_FAILED)
		return kv_error(-errno, "reserving %zu bytes of addresses: %s", bytes,
				strerror(errno));
	*ret = p;
	return 0;
}

static int reserve(struct kv_memory *memory)
{
	return reserve_at(NULL, memory->export.bytes, &memory->base);
}

static void *granule(const struct kv_memory *memory, uint32_t i)
{
	return (char *)memory->base + kv_granule_offset(&memory->export, i);
}

static int map_granule(struct kv_memory *memory, uint32_t i, int fd)
{
	const uint64_t bytes = kv_granule_length(&memory->export, i);
	void *p;
	int r = check_memfd(fd, bytes);

	return r < 0 ? r : map_file(granule(memory, i), bytes, fd, memory->read_only, &p);
}

static int unmap_granule(struct kv_memory *memory, uint32_t i)
{
	void *p;

	return reserve_at(granule(memory, i), kv_granule_length(&memory->export, i), &p);
}

/* Mode 0400: who has a descriptor for reading can't open it for writing by /proc. */
int kv_memory_host_new(uint64_t bytes, int *ret_fd)
{
	kv_cleanup(kv_closep) int fd = memfd_create("kvcached-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0)
		return kv_error(-errno, "memfd of the arena: %s", strerror(errno));
	if (ftruncate(fd, (off_t)bytes) < 0)
		return kv_error(-errno, "memfd of the arena, %" PRIu64 " bytes: %s", bytes,
				strerror(errno));
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0 ||
	    fchmod(fd, 0400) < 0)
		return kv_error(-errno, "sealing the arena's memfd: %s", strerror(errno));
	*ret_fd = kv_steal_fd(&fd);
	return 0;
}

static int granule_new(struct kv_memory *memory, uint64_t bytes, int *ret_fd)
{
	(void)memory;
	return kv_memory_host_new(bytes, ret_fd);
}

/* The pages go, whoever maps them: what is touched there later is memory of who touches it. */
static void empty(struct kv_memory *memory, uint32_t i)
{
	madvise(granule(memory, i), kv_granule_length(&memory->export, i), MADV_REMOVE);
}

static void detach(struct kv_memory *memory)
{
	munmap(memory->base, memory->export.bytes);
}

static int zero(struct kv_memory *memory, uint64_t offset, uint64_t bytes, void *stream)
{
	memset((char *)memory->base + offset, 0, bytes);
	return 0;
}

static int copy(struct kv_memory *memory, uint64_t to, uint64_t from, uint64_t bytes, void *stream)
{
	memcpy((char *)memory->base + to, (char *)memory->base + from, bytes);
	return 0;
}

static int read_bytes(struct kv_memory *memory, uint64_t offset, void *to, uint64_t bytes)
{
	memcpy(to, (char *)memory->base + offset, bytes);
	return 0;
}

static int write_bytes(struct kv_memory *memory, uint64_t offset, const void *from, uint64_t bytes)
{
	memcpy((char *)memory->base + offset, from, bytes);
	return 0;
}

static int sync_bytes(struct kv_memory *memory)
{
	return 0;
}

/* An event that has always passed needs no state: one serves all. */
static int event_new(struct kv_event **ret)
{
	static struct kv_event event = {.backend = &kv_memory_host};

	*ret = &event;
	return 0;
}

static void event_free(struct kv_event *event)
{
}

static int event_record(struct kv_event *event, void *stream)
{
	return 0;
}

static int event_query(struct kv_event *event)
{
	return 1;
}

static int pinned_new(size_t bytes, void **ret)
{
	void *p;

	if (bytes > SIZE_MAX - PINNED_ALIGN)
		return kv_error(-ENOMEM, "bytes: %zu of host memory can't be had", bytes);
	bytes = (bytes + PINNED_ALIGN - 1) / PINNED_ALIGN * PINNED_ALIGN;
	p = aligned_alloc(PINNED_ALIGN, bytes);
	if (!p)
		return kv_error(-ENOMEM, "no %zu bytes of host memory", bytes);
	memset(p, 0, bytes);
	*ret = p;
	return 0;
}

static void pinned_free(void *p)
{
	free(p);
}

/* The kernel has left the mappings out of the child. */
static void forked(void)
{
}

const struct kv_memory_backend kv_memory_host = {
	.device = KV_DEVICE_HOST,
	.attach = attach,
	.detach = detach,
	.reserve = reserve,
	.map = map_granule,
	.unmap = unmap_granule,
	.granule_new = granule_new,
	.empty = empty,
	.zero = zero,
	.copy = copy,
	.read = read_bytes,
	.write = write_bytes,
	.sync = sync_bytes,
	.event_new = event_new,
	.event_free = event_free,
	.event_record = event_record,
	.event_query = event_query,
	.pinned_new = pinned_new,
	.pinned_free = pinned_free,
	.forked = forked,
};
