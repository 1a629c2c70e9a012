/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of attached arenas, and the checks before a device's functions.
 *
 *	attached -> memory -> memory -> NULL		one per (epoch, GPU, protection)
 *
 * An entry is CHANGING while one thread maps or unmaps it, without the lock; whoever wants the same
 * arena waits for that. So a driver call never runs with the lock held, and import and release of
 * one arena never race. In the child of a fork the table starts empty.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/kvcached/types.h"
#include "kernels/memory.h"
#include "kernels/memory_backend.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed; /* an entry left CHANGING; waits by the monotonic clock */
static struct kv_memory *attached;
static unsigned int process;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int install_error;

static const struct kv_memory_backend *const backends[] = {&kv_memory_host, &kv_memory_cuda};

static void before_fork(void)
{
	pthread_mutex_lock(&lock);
}

static void after_fork(void)
{
	pthread_mutex_unlock(&lock);
}

static void init_changed(void)
{
	pthread_condattr_t attr;

	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&changed, &attr);
	pthread_condattr_destroy(&attr);
}

/* The entries stay allocated: the child's copies of its parent's pointers name them. */
static void in_child(void)
{
	attached = NULL;
	process++;
	init_changed(); /* its waiters are not here */
	pthread_mutex_unlock(&lock);

	for (size_t i = 0; i < sizeof(backends) / sizeof(backends[0]); i++)
		backends[i]->forked();
}

static void install(void)
{
	init_changed();
	install_error = pthread_atfork(before_fork, after_fork, in_child);
}

static const struct kv_memory_backend *backend_of_device(int device)
{
	for (size_t i = 0; i < sizeof(backends) / sizeof(backends[0]); i++)
		if (backends[i]->device == device)
			return backends[i];
	return NULL;
}

static int check_export(const struct kv_arena_export *export, const int *fds, bool read_only)
{
	bool sparse = export->sparse;
	uint64_t n_fds;

	if (export->kind < KV_EXPORT_HOST || export->kind > KV_EXPORT_IPC)
		return kv_error(-EINVAL, "kind: %u given, 1 (host), 2 (vmm) or 3 (ipc) expected",
				export->kind);
	if (!export->bytes || !export->granule_bytes || export->granule_bytes > export->bytes)
		return kv_error(-EINVAL,
				"bytes: an arena of %" PRIu64 " in granules of %" PRIu64
				"; neither may be 0, and a granule no larger than the arena",
				export->bytes, export->granule_bytes);

	n_fds = (export->bytes - 1) / export->granule_bytes + 1;
	if (export->kind == KV_EXPORT_IPC || (export->kind == KV_EXPORT_HOST && !sparse))
		n_fds = export->kind == KV_EXPORT_HOST;
	if (sparse && (export->kind == KV_EXPORT_IPC || fds))
		return kv_error(-EINVAL, "sparse: %s",
				fds ? "such an arena is attached by kv_memory_attach_sparse()" :
				      "an ipc arena is one piece");
	if (export->n_fds != n_fds)
		return kv_error(-EINVAL,
				"n_fds: %u given, this %s arena of %" PRIu64 " bytes has %" PRIu64,
				export->n_fds, kv_export_name(export->kind), export->bytes, n_fds);
	if (export->kind == KV_EXPORT_HOST && !sparse && export->granule_bytes != export->bytes)
		return kv_error(-EINVAL,
				"granule_bytes: %" PRIu64 ", a host arena is one of %" PRIu64,
				export->granule_bytes, export->bytes);
	if (export->kind == KV_EXPORT_IPC && read_only)
		return kv_error(-ENOTSUP, "read_only: an ipc arena can only be mapped read-write");
	for (uint32_t i = 0; !sparse && i < export->n_fds; i++)
		if (fds[i] < 0)
			return kv_error(-EINVAL, "fds[%u] of %u: %d is no file descriptor", i,
					export->n_fds, fds[i]);
	return 0;
}

static struct kv_memory *find(const struct kv_arena_export *export, bool read_only)
{
	for (struct kv_memory *m = attached; m; m = m->next)
		if (m->export.epoch == export->epoch && m->read_only == read_only &&
		    !memcmp(m->export.uuid, export->uuid, KV_UUID_BYTES))
			return m;
	return NULL;
}

static void forget(struct kv_memory *memory)
{
	struct kv_memory **at = &attached;

	while (*at != memory)
		at = &(*at)->next;
	*at = memory->next;
}

/* Two messages about one arena must agree. */
static int check_same(const struct kv_arena_export *a, const struct kv_arena_export *b)
{
	if (a->kind == b->kind && a->bytes == b->bytes && a->granule_bytes == b->granule_bytes)
		return 0;
	return kv_error(-EINVAL,
			"epoch: %" PRIx64 " is attached as %s arena of %" PRIu64
			" bytes, now named as %s arena of %" PRIu64,
			a->epoch, kv_export_name(a->kind), a->bytes, kv_export_name(b->kind),
			b->bytes);
}

/* With the lock. Waits while another thread maps or unmaps the arena. *ret: its entry, or NULL. */
static int find_settled(const struct kv_arena_export *export, bool read_only,
			struct kv_memory **ret)
{
	struct kv_memory *memory;
	struct timespec until;

	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_sec += KV_MEMORY_WAIT / KV_SEC;
	while ((memory = find(export, read_only)) && memory->state == KV_MEMORY_CHANGING)
		if (pthread_cond_timedwait(&changed, &lock, &until) == ETIMEDOUT)
			return kv_error(-ETIMEDOUT,
					"arena of epoch %" PRIx64
					": another thread is still mapping or unmapping it",
					export->epoch);
	*ret = memory;
	return 0;
}

int kv_memory_attach(const struct kv_arena_export *export, const int *fds, bool read_only,
		     struct kv_memory **ret)
{
	struct kv_memory *memory = NULL, *fresh;
	int r;

	r = check_export(export, fds, read_only);
	if (r < 0)
		return r;
	pthread_once(&once, install);
	if (install_error)
		return kv_error(-install_error, "fork handler: %s", strerror(install_error));
	fresh = calloc(1, sizeof(*fresh));
	if (!fresh)
		return kv_error(-ENOMEM, "no memory for the record of an attached arena");

	pthread_mutex_lock(&lock);
	r = find_settled(export, read_only, &memory);
	if (!r && memory) {
		r = check_same(&memory->export, export);
		if (!r)
			memory->n_users++;
	}
	if (r < 0 || memory) {
		pthread_mutex_unlock(&lock);
		free(fresh);
		if (!r)
			*ret = memory;
		return r;
	}
	memory = fresh;
	memory->backend = export->kind == KV_EXPORT_HOST ? &kv_memory_host : &kv_memory_cuda;
	memory->export = *export;
	memory->read_only = read_only;
	memory->state = KV_MEMORY_CHANGING;
	memory->n_users = 1;
	memory->process = process;
	memory->next = attached;
	attached = memory;
	pthread_mutex_unlock(&lock);

	r = memory->backend->attach(memory, fds);

	pthread_mutex_lock(&lock);
	if (r < 0)
		forget(memory);
	memory->state = KV_MEMORY_READY;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
	if (r < 0) {
		free(memory);
		return r;
	}
	*ret = memory;
	return 0;
}

/* Not in the table: what one attachment has mapped is no other's business. */
int kv_memory_attach_sparse(const struct kv_arena_export *export, bool read_only,
			    struct kv_memory **ret)
{
	struct kv_memory *memory;
	int r;

	if (!export->sparse)
		return kv_error(-EINVAL, "sparse: this arena is attached by kv_memory_attach()");
	r = check_export(export, NULL, read_only);
	if (r < 0)
		return r;
	pthread_once(&once, install);
	if (install_error)
		return kv_error(-install_error, "fork handler: %s", strerror(install_error));
	memory = calloc(1, sizeof(*memory));
	if (memory)
		memory->mapped = calloc(export->n_fds, sizeof(*memory->mapped));
	if (!memory || !memory->mapped) {
		free(memory);
		return kv_error(-ENOMEM, "no memory for the record of an attached arena");
	}
	memory->backend = export->kind == KV_EXPORT_HOST ? &kv_memory_host : &kv_memory_cuda;
	memory->export = *export;
	memory->read_only = read_only;
	memory->state = KV_MEMORY_READY;
	memory->n_users = 1;
	memory->process = process;
	r = memory->backend->reserve(memory);
	if (r < 0) {
		free(memory->mapped);
		free(memory);
		return r;
	}
	*ret = memory;
	return 0;
}

struct kv_memory *kv_memory_ref(struct kv_memory *memory)
{
	pthread_mutex_lock(&lock);
	memory->n_users++;
	pthread_mutex_unlock(&lock);
	return memory;
}

struct kv_memory *kv_memory_detach(struct kv_memory *memory)
{
	bool last;

	if (!memory)
		return NULL;

	pthread_mutex_lock(&lock);
	if (memory->process != process) { /* the parent's; its mapping is not here */
		pthread_mutex_unlock(&lock);
		return NULL;
	}
	last = --memory->n_users == 0;
	if (last)
		memory->state = KV_MEMORY_CHANGING;
	pthread_mutex_unlock(&lock);
	if (!last)
		return NULL;

	memory->backend->detach(memory);

	if (!memory->mapped) {
		pthread_mutex_lock(&lock);
		forget(memory);
		pthread_cond_broadcast(&changed);
		pthread_mutex_unlock(&lock);
	}
	free(memory->mapped);
	free(memory);
	return NULL;
}

void *kv_memory_base(const struct kv_memory *memory)
{
	return memory->base;
}

int kv_memory_device(const struct kv_memory *memory)
{
	return memory->backend->device;
}

int kv_memory_ordinal(const struct kv_memory *memory)
{
	return memory->ordinal;
}

/* Is every granule of the range mapped? */
static bool is_there(const struct kv_memory *memory, uint64_t offset, uint64_t bytes)
{
	const uint64_t size = memory->export.granule_bytes;

	for (uint64_t i = offset / size; bytes && i <= (offset + bytes - 1) / size; i++)
		if (!memory->mapped[i])
			return false;
	return true;
}

static int check_range(const struct kv_memory *memory, const char *what, uint64_t offset,
		       uint64_t bytes)
{
	if (memory->process != process)
		return kv_error(-ECHILD,
				"arena of epoch %" PRIx64
				": attached before a fork, attach it again in the child",
				memory->export.epoch);
	if (offset > memory->export.bytes || bytes > memory->export.bytes - offset)
		return kv_error(-EINVAL,
				"%s: %" PRIu64 " bytes at %" PRIu64 ", the arena has %" PRIu64,
				what, bytes, offset, memory->export.bytes);
	if (memory->mapped && !is_there(memory, offset, bytes))
		return kv_error(-EINVAL, "%s: %" PRIu64 " bytes at %" PRIu64 ": not mapped here",
				what, bytes, offset);
	return 0;
}

static int check_write(const struct kv_memory *memory, const char *what, uint64_t offset,
		       uint64_t bytes)
{
	if (memory->read_only)
		return kv_error(-EPERM, "%s: the arena is attached read-only", what);
	return check_range(memory, what, offset, bytes);
}

static int check_granule(const struct kv_memory *memory, uint32_t i)
{
	if (!memory->mapped || i >= memory->export.n_fds)
		return kv_error(-EINVAL, "granule %u: %s", i,
				memory->mapped ? "the arena has fewer" : "the arena isn't sparse");
	return check_range(memory, "granule", 0, 0);
}

int kv_memory_unmap(struct kv_memory *memory, uint32_t i)
{
	int r = check_granule(memory, i);

	if (!r && memory->mapped[i])
		r = memory->backend->unmap(memory, i);
	if (!r)
		memory->mapped[i] = false;
	return r;
}

int kv_memory_map(struct kv_memory *memory, uint32_t i, int fd)
{
	int r = kv_memory_unmap(memory, i);

	if (!r && fd < 0)
		r = kv_error(-EINVAL, "granule %u: %d is no file descriptor", i, fd);
	if (!r)
		r = memory->backend->map(memory, i, fd);
	if (!r)
		memory->mapped[i] = true;
	return r;
}

int kv_memory_renew(struct kv_memory *memory, uint32_t i, int *ret_fd)
{
	kv_cleanup(kv_closep) int fd = -1;
	int r = check_granule(memory, i);

	if (!r && memory->mapped[i])
		memory->backend->empty(memory, i);
	if (!r)
		r = kv_memory_unmap(memory, i);
	if (!r)
		r = memory->backend->granule_new(memory, kv_granule_length(&memory->export, i), &fd);
	if (!r)
		r = kv_memory_map(memory, i, fd);
	if (!r)
		*ret_fd = kv_steal_fd(&fd);
	return r;
}

int kv_memory_zero(struct kv_memory *memory, uint64_t offset, uint64_t bytes, void *stream)
{
	int r = check_write(memory, "zero", offset, bytes);

	return r < 0 || !bytes ? r : memory->backend->zero(memory, offset, bytes, stream);
}

int kv_memory_copy(struct kv_memory *memory, uint64_t to, uint64_t from, uint64_t bytes,
		   void *stream)
{
	int r = check_write(memory, "copy to", to, bytes);

	if (r < 0)
		return r;
	r = check_range(memory, "copy from", from, bytes);
	if (r < 0)
		return r;
	if (from < to + bytes && to < from + bytes)
		return kv_error(-EINVAL,
				"copy: %" PRIu64 " bytes from %" PRIu64 " to %" PRIu64 " overlap",
				bytes, from, to);

	return bytes ? memory->backend->copy(memory, to, from, bytes, stream) : 0;
}

int kv_memory_copy_blocks(struct kv_memory *memory, uint64_t block_bytes, const int32_t (*pairs)[2],
			  uint32_t n_pairs)
{
	bool together = memory->backend->copy_blocks;
	int r = 0;

	for (uint32_t i = 0; !r && i < n_pairs; i++) {
		uint64_t from = (uint64_t)(uint32_t)pairs[i][0] * block_bytes;
		uint64_t to = (uint64_t)(uint32_t)pairs[i][1] * block_bytes;

		if (!together) {
			r = kv_memory_copy(memory, to, from, block_bytes, NULL);
			continue;
		}
		r = check_write(memory, "copy to", to, block_bytes);
		if (!r)
			r = check_range(memory, "copy from", from, block_bytes);
	}
	return r || !together || !n_pairs ?
		       r :
		       memory->backend->copy_blocks(memory, block_bytes, pairs, n_pairs);
}

int kv_memory_read(struct kv_memory *memory, uint64_t offset, void *to, uint64_t bytes)
{
	int r = check_range(memory, "read", offset, bytes);

	return r < 0 || !bytes ? r : memory->backend->read(memory, offset, to, bytes);
}

int kv_memory_write(struct kv_memory *memory, uint64_t offset, const void *from, uint64_t bytes)
{
	int r = check_write(memory, "write", offset, bytes);

	return r < 0 || !bytes ? r : memory->backend->write(memory, offset, from, bytes);
}

int kv_memory_sync(struct kv_memory *memory)
{
	int r = check_range(memory, "sync", 0, 0);

	return r < 0 ? r : memory->backend->sync(memory);
}

static int unknown_device(int device)
{
	return kv_error(-EINVAL, "device: %d given, %d (host) or %d (CUDA) expected", device,
			KV_DEVICE_HOST, KV_DEVICE_CUDA);
}

int kv_event_new(int device, struct kv_event **ret)
{
	const struct kv_memory_backend *backend = backend_of_device(device);

	return backend ? backend->event_new(ret) : unknown_device(device);
}

struct kv_event *kv_event_free(struct kv_event *event)
{
	if (event)
		event->backend->event_free(event);
	return NULL;
}

int kv_event_record(struct kv_event *event, void *stream)
{
	return event->backend->event_record(event, stream);
}

int kv_event_query(struct kv_event *event)
{
	return event->backend->event_query(event);
}

int kv_pinned_new(int device, size_t bytes, void **ret)
{
	const struct kv_memory_backend *backend = backend_of_device(device);

	if (!backend)
		return unknown_device(device);
	if (!bytes)
		return kv_error(-EINVAL, "bytes: 0 of pinned memory asked for");
	return backend->pinned_new(bytes, ret);
}

void *kv_pinned_free(int device, void *p)
{
	const struct kv_memory_backend *backend = backend_of_device(device);

	if (p && backend)
		backend->pinned_free(p);
	return NULL;
}
