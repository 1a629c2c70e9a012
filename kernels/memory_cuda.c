/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arenas of GPU memory, through the driver, in the primary context of the GPU (the one that the
 * CUDA runtime and frameworks use too), which is pushed and popped around each call.
 *
 *	vmm: granule 0 | granule 1 | ... | last		adjacent in one reserved address range
 *	sparse vmm: likewise, but there may be nothing in the place of a granule
 *	ipc: one allocation of the owner, opened by its handle
 *
 * Each attachment (and event, and pinned block: memory_cuda_stream.c) holds its own reference to
 * the primary context, so the order in which they go is free. A granule's imported handle is
 * released as soon as it is mapped: the mapping keeps the memory.
 *
 * A context that has faulted can't unmap anything; detaching ignores such errors, as the process
 * can only end.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "include/internal/error.h"
#include "include/internal/socket.h"
#include "include/kvcached/types.h"
#include "kernels/cuda_driver.h"
#include "kernels/attention.h"
#include "kernels/memory.h"
#include "kernels/memory_cuda.h"

_Atomic int kv_memory_cuda_last = -1;

/* What an attachment owns beside its mapping. */
struct attachment {
	const struct kv_cuda *cuda;
	CUdevice device;
	CUcontext context; /* primary, retained */
	CUstream stream;
};

static CUdeviceptr address(const struct kv_memory *memory, uint64_t offset)
{
	return (CUdeviceptr)(uintptr_t)memory->base + offset;
}

/*
 * Attaching
 */

static int map_granule(const struct kv_cuda *cuda, const struct kv_arena_export *export,
		       CUdeviceptr base, uint32_t i, int fd)
{
	uint64_t offset = i * export->granule_bytes;
	uint64_t bytes = export->bytes - offset;
	CUmemGenericAllocationHandle handle;
	CUresult e;

	if (bytes > export->granule_bytes)
		bytes = export->granule_bytes;
	e = cuda->cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
						 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
	if (e)
		return kv_cuda_error(e, "importing granule %u of %u (fd %d)", i, export->n_fds, fd);
	e = cuda->cuMemMap(base + offset, bytes, 0, handle, 0);
	cuda->cuMemRelease(handle);
	if (e)
		return kv_cuda_error(e, "mapping granule %u of %u as %" PRIu64 " bytes", i,
				     export->n_fds, bytes);
	return 0;
}

static CUmemAccessDesc access_of(const struct kv_memory *memory, const struct attachment *own)
{
	return (CUmemAccessDesc){
		.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = own->device},
		.flags = memory->read_only ? CU_MEM_ACCESS_FLAGS_PROT_READ
					   : CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};
}

static int attach_vmm(struct kv_memory *memory, const struct attachment *own, const int *fds)
{
	const struct kv_arena_export *export = &memory->export;
	const struct kv_cuda *cuda = own->cuda;
	CUmemAccessDesc access = access_of(memory, own);
	uint64_t mapped = 0;
	CUdeviceptr base;
	CUresult e;
	int r = 0;

	e = cuda->cuMemAddressReserve(&base, export->bytes, 0, 0, 0);
	if (e)
		return kv_cuda_error(e, "reserving %" PRIu64 " bytes of addresses", export->bytes);
	for (uint32_t i = 0; !r && i < export->n_fds; i++) {
		r = map_granule(cuda, export, base, i, fds[i]);
		if (!r)
			mapped = (i + 1) * export->granule_bytes;
	}
	if (mapped > export->bytes)
		mapped = export->bytes;
	if (!r) {
		e = cuda->cuMemSetAccess(base, export->bytes, &access, 1);
		if (e)
			r = kv_cuda_error(e, "giving the GPU %s access to %" PRIu64 " bytes",
					  memory->read_only ? "read" : "read and write",
					  export->bytes);
	}
	if (r < 0) {
		if (mapped)
			cuda->cuMemUnmap(base, mapped);
		cuda->cuMemAddressFree(base, export->bytes);
		return r;
	}
	memory->base = (void *)(uintptr_t)base;
	return 0;
}

static int reserve_vmm(struct kv_memory *memory, const struct attachment *own)
{
	CUdeviceptr base;
	CUresult e = own->cuda->cuMemAddressReserve(&base, memory->export.bytes, 0, 0, 0);

	if (e)
		return kv_cuda_error(e, "reserving %" PRIu64 " bytes of addresses",
				     memory->export.bytes);
	memory->base = (void *)(uintptr_t)base;
	return 0;
}

static int ipc_error(CUresult e, const struct kv_arena_export *export)
{
	/* The driver takes an equal PID number for the same process, also across PID namespaces. */
	if (e == CUDA_ERROR_INVALID_CONTEXT && export->owner_pid == (int32_t)getpid())
		return kv_error(
			-ENOTSUP,
			"ipc arena: CUDA error 201: an ipc handle can't be opened by a process "
			"with the PID number of its owner (both are %d; containers that are both "
			"PID 1 clash too): export as vmm, or start under another PID",
			export->owner_pid);
	if (e == CUDA_ERROR_ALREADY_MAPPED)
		return kv_error(
			-EBUSY,
			"ipc arena: CUDA error 208: other code in this process has the handle "
			"open, and this driver gives it out once: close it there");
	if (e == CUDA_ERROR_INVALID_HANDLE)
		return kv_error(
			-EIO,
			"ipc arena: CUDA error 400: the handle names nothing: its owner (PID %d) "
			"has ended or freed it",
			export->owner_pid);
	return kv_cuda_error(e, "opening the ipc handle of PID %d", export->owner_pid);
}

static int attach_ipc(struct kv_memory *memory, const struct attachment *own)
{
	const struct kv_arena_export *export = &memory->export;
	CUdeviceptr base, start;
	CUipcMemHandle handle;
	size_t bytes = 0;
	CUresult e;

	_Static_assert(sizeof(handle) == KV_IPC_HANDLE_BYTES, "size of an ipc handle");
	memcpy(&handle, export->ipc_handle, sizeof(handle));
	e = own->cuda->cuIpcOpenMemHandle(&base, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
	if (e)
		return ipc_error(e, export);
	e = own->cuda->cuMemGetAddressRange(&start, &bytes, base);
	if (e || start != base || bytes < export->bytes) {
		own->cuda->cuIpcCloseMemHandle(base);
		return e ? kv_cuda_error(e, "size of the ipc arena")
			 : kv_error(-EINVAL,
				    "ipc arena: bytes: %" PRIu64 " named, its allocation has %zu",
				    export->bytes, bytes);
	}
	memory->base = (void *)(uintptr_t)base;
	return 0;
}

static void unmap(const struct kv_memory *memory, const struct attachment *own)
{
	if (memory->export.kind == KV_EXPORT_IPC) {
		own->cuda->cuIpcCloseMemHandle(address(memory, 0));
		return;
	}
	if (!memory->mapped)
		own->cuda->cuMemUnmap(address(memory, 0), memory->export.bytes);
	for (uint32_t i = 0; memory->mapped && i < memory->export.n_fds; i++)
		if (memory->mapped[i])
			own->cuda->cuMemUnmap(address(memory, kv_granule_offset(&memory->export, i)),
					      kv_granule_length(&memory->export, i));
	own->cuda->cuMemAddressFree(address(memory, 0), memory->export.bytes);
}

/* With the context current. */
static int map(struct kv_memory *memory, struct attachment *own, const int *fds)
{
	CUresult e;
	int r;

	if (memory->mapped)
		r = reserve_vmm(memory, own);
	else
		r = memory->export.kind == KV_EXPORT_VMM ? attach_vmm(memory, own, fds)
							 : attach_ipc(memory, own);
	if (r < 0)
		return r;
	e = own->cuda->cuStreamCreate(&own->stream, CU_STREAM_NON_BLOCKING);
	if (e) {
		unmap(memory, own);
		return kv_cuda_error(e, "making a stream");
	}
	return 0;
}

static int attach(struct kv_memory *memory, const int *fds)
{
	struct attachment *own;
	int r;

	own = calloc(1, sizeof(*own));
	if (!own)
		return kv_error(-ENOMEM, "no memory for the record of an attached arena");
	r = kv_cuda_find(memory->export.uuid, &own->device);
	if (!r)
		r = kv_cuda_get(&own->cuda);
	if (!r)
		r = kv_cuda_retain(own->cuda, own->device, &own->context);
	if (r < 0)
		goto free_own;
	r = kv_cuda_enter(own->cuda, own->context);
	if (r < 0)
		goto release;
	r = map(memory, own, fds);
	kv_cuda_leave(own->cuda);
	if (r < 0)
		goto release;

	kv_memory_cuda_last = own->device;
	memory->ordinal = own->device;
	memory->own = own;
	return 0;

release:
	own->cuda->cuDevicePrimaryCtxRelease(own->device);
free_own:
	free(own);
	return r;
}

static int reserve(struct kv_memory *memory)
{
	return attach(memory, NULL);
}

static int map_one(struct kv_memory *memory, uint32_t i, int fd)
{
	const struct attachment *own = memory->own;
	const CUdeviceptr at = address(memory, kv_granule_offset(&memory->export, i));
	const uint64_t bytes = kv_granule_length(&memory->export, i);
	const CUmemAccessDesc access = access_of(memory, own);
	CUresult e;
	int r;

	r = kv_cuda_enter(own->cuda, own->context);
	if (r < 0)
		return r;
	r = map_granule(own->cuda, &memory->export, address(memory, 0), i, fd);
	if (!r) {
		e = own->cuda->cuMemSetAccess(at, bytes, &access, 1);
		if (e) {
			r = kv_cuda_error(e, "giving the GPU %s access to granule %u",
					  memory->read_only ? "read" : "read and write", i);
			own->cuda->cuMemUnmap(at, bytes);
		}
	}
	kv_cuda_leave(own->cuda);
	return r;
}

static int unmap_one(struct kv_memory *memory, uint32_t i)
{
	const struct attachment *own = memory->own;
	CUresult e;
	int r;

	r = kv_cuda_enter(own->cuda, own->context);
	if (r < 0)
		return r;
	e = own->cuda->cuMemUnmap(address(memory, kv_granule_offset(&memory->export, i)),
				  kv_granule_length(&memory->export, i));
	kv_cuda_leave(own->cuda);
	return e ? kv_cuda_error(e, "unmapping granule %u", i) : 0;
}

void kv_memory_cuda_prop(const struct kv_cuda *cuda, CUdevice device, CUmemAllocationProp *ret)
{
	int rdma = 0;

	cuda->cuDeviceGetAttribute(
		&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device);
	*ret = (CUmemAllocationProp){
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
		.allocFlags = {.gpuDirectRDMACapable = !!rdma},
	};
}

/* The descriptor alone keeps the memory. */
static int granule_new(struct kv_memory *memory, uint64_t bytes, int *ret_fd)
{
	const struct attachment *own = memory->own;
	CUmemGenericAllocationHandle handle;
	CUmemAllocationProp prop;
	CUresult e;
	int fd, r;

	r = kv_cuda_enter(own->cuda, own->context);
	if (r < 0)
		return r;
	kv_memory_cuda_prop(own->cuda, own->device, &prop);
	e = own->cuda->cuMemCreate(&handle, bytes, &prop, 0);
	if (e) {
		r = kv_cuda_error(e, "making a granule of %" PRIu64 " bytes", bytes);
	} else {
		e = own->cuda->cuMemExportToShareableHandle(
			&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
		r = e ? kv_cuda_error(e, "exporting a granule") : 0;
		own->cuda->cuMemRelease(handle);
	}
	kv_cuda_leave(own->cuda);
	if (!r)
		*ret_fd = fd;
	return r;
}

/* What a process has mapped nobody can take from it. */
static void empty(struct kv_memory *memory, uint32_t i)
{
}

static void detach(struct kv_memory *memory)
{
	struct attachment *own = memory->own;

	if (kv_cuda_enter(own->cuda, own->context) == 0) {
		own->cuda->cuStreamDestroy(own->stream);
		unmap(memory, own);
		kv_cuda_leave(own->cuda);
	}
	own->cuda->cuDevicePrimaryCtxRelease(own->device);
	free(own);
}

/*
 * Work on bytes
 */

/* The driver's own wait has no deadline. Polls: hard for a millisecond, then more and more rarely. */
static int wait_stream(const struct attachment *own)
{
	struct timespec pause = {.tv_nsec = 0};
	const int64_t start = kv_now();
	int64_t waited;
	CUresult e;

	while ((e = own->cuda->cuStreamQuery(own->stream)) == CUDA_ERROR_NOT_READY) {
		waited = kv_now() - start;
		if (waited > KV_MEMORY_WAIT)
			return kv_error(-ETIMEDOUT, "GPU work was not done after %d s",
					(int)(KV_MEMORY_WAIT / KV_SEC));
		if (waited < KV_MSEC)
			continue;
		pause.tv_nsec = waited / 8 < 200000 ? waited / 8 : 200000;
		nanosleep(&pause, NULL);
	}
	return e ? kv_cuda_error(e, "waiting for GPU work") : 0;
}

static int zero(struct kv_memory *memory, uint64_t offset, uint64_t bytes, void *stream)
{
	const struct attachment *own = memory->own;
	CUresult e;
	int r;

	r = kv_cuda_enter(own->cuda, own->context);
	if (r < 0)
		return r;
	e = own->cuda->cuMemsetD8Async(address(memory, offset), 0, bytes,
				       stream ? stream : own->stream);
	kv_cuda_leave(own->cuda);
	return e ? kv_cuda_error(e, "zeroing %" PRIu64 " bytes at %" PRIu64, bytes, offset) : 0;
}

static int copy(struct kv_memory *memory, uint64_t to, uint64_t from, uint64_t bytes, void *stream)
{
	const struct attachment *own = memory->own;
	CUresult e;
	int r;

	r = kv_cuda_enter(own->cuda, own->context);
	if (r < 0)
		return r;
	e = own->cuda->cuMemcpyDtoDAsync(address(memory, to), address(memory, from), bytes,
					 stream ? stream : own->stream);
	kv_cuda_leave(own->cuda);
	return e ? kv_cuda_error(e, "copying %" PRIu64 " bytes from %" PRIu64 " to %" PRIu64, bytes,
				 from, to)
		 : 0;
}

/* Blocks of a pool are runs of bytes: one view of them, whatever lies in a block. */
static int copy_blocks(struct kv_memory *memory, uint64_t block_bytes, const int32_t (*pairs)[2],
		       uint32_t n_pairs)
{
	const struct attachment *own = memory->own;
	struct kv_view view = {.base = memory->base,
			       .block_stride = (int64_t)block_bytes,
			       .token_stride = (int64_t)block_bytes,
			       .head_stride = (int64_t)block_bytes,
			       .block_tokens = 1,
			       .n_heads = 1,
			       .head_dim = (int32_t)(block_bytes / sizeof(float)),
			       .dtype = KV_F32};
	struct kv_copy_args args = {.size = sizeof(args),
				    .device = KV_DEVICE_CUDA,
				    .n_pairs = (int32_t)n_pairs,
				    .pairs = pairs[0],
				    .n_views = 1,
				    .views = &view,
				    .stream = own->stream};
	int r = kv_cuda_enter(own->cuda, own->context);

	if (r < 0)
		return r;
	r = kv_copy_cuda(&args);
	kv_cuda_leave(own->cuda);
	return r;
}

static int sync_bytes(struct kv_memory *memory)
{
	const struct attachment *own = memory->own;
	int r;

	r = kv_cuda_enter(own->cuda, own->context);
	if (r < 0)
		return r;
	r = wait_stream(own);
	kv_cuda_leave(own->cuda);
	return r;
}

/* Waits first: the copy itself would wait for earlier work without a deadline. */
static int transfer(const struct kv_memory *memory, uint64_t offset, void *to, const void *from,
		    uint64_t bytes)
{
	const struct attachment *own = memory->own;
	CUresult e;
	int r;

	r = kv_cuda_enter(own->cuda, own->context);
	if (r < 0)
		return r;
	r = wait_stream(own);
	if (r < 0)
		goto leave;
	e = to ? own->cuda->cuMemcpyDtoHAsync(to, address(memory, offset), bytes, own->stream)
	       : own->cuda->cuMemcpyHtoDAsync(address(memory, offset), from, bytes, own->stream);
	r = e ? kv_cuda_error(e, "%s %" PRIu64 " bytes at %" PRIu64, to ? "reading" : "writing",
			      bytes, offset)
	      : wait_stream(own);
leave:
	kv_cuda_leave(own->cuda);
	return r;
}

static int read_bytes(struct kv_memory *memory, uint64_t offset, void *to, uint64_t bytes)
{
	return transfer(memory, offset, to, NULL, bytes);
}

static int write_bytes(struct kv_memory *memory, uint64_t offset, const void *from, uint64_t bytes)
{
	return transfer(memory, offset, NULL, from, bytes);
}

/*
 * A GPU context lives as long as any process has its files open, and so do its running kernels: a
 * child that outlives its killed parent would keep them writing. CUDA needs /proc itself, so it is
 * there. No allocation: another thread of the parent may have held the heap's lock.
 */
static void forked(void)
{
	char buffer[4096] __attribute__((aligned(8)));
	const char *prefix = "/dev/nvidia";
	const struct dirent64 *entry;
	char target[16];
	long n;
	int dir, fd;

	if (!kv_cuda_was_used())
		return;
	dir = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (dir < 0)
		return;
	while ((n = syscall(SYS_getdents64, dir, buffer, sizeof(buffer))) > 0)
		for (long at = 0; at < n; at += entry->d_reclen) {
			entry = (const struct dirent64 *)(buffer + at);
			if (readlinkat(dir, entry->d_name, target, sizeof(target)) <
				    (ssize_t)strlen(prefix) ||
			    strncmp(target, prefix, strlen(prefix)) != 0)
				continue;
			fd = 0;
			for (const char *c = entry->d_name; *c; c++)
				fd = fd * 10 + (*c - '0');
			close(fd);
		}
	close(dir);
}

const struct kv_memory_backend kv_memory_cuda = {
	.device = KV_DEVICE_CUDA,
	.attach = attach,
	.detach = detach,
	.reserve = reserve,
	.map = map_one,
	.unmap = unmap_one,
	.granule_new = granule_new,
	.empty = empty,
	.zero = zero,
	.copy = copy,
	.copy_blocks = copy_blocks,
	.read = read_bytes,
	.write = write_bytes,
	.sync = sync_bytes,
	.event_new = kv_memory_cuda_event_new,
	.event_free = kv_memory_cuda_event_free,
	.event_record = kv_memory_cuda_event_record,
	.event_query = kv_memory_cuda_event_query,
	.pinned_new = kv_memory_cuda_pinned_new,
	.pinned_free = kv_memory_cuda_pinned_free,
	.forked = forked,
};
