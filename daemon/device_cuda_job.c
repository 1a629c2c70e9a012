/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A granule's descriptor holds the memory by itself: when its maker has sent it and ended, the
 * memory lives on with whoever has the descriptor, and no process has a context on the GPU for it
 * (a primary context costs some 500 MiB).
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/device_cuda_job.h"
#include "include/internal/cleanup.h"
#include "kernels/cuda_driver.h"
#include "kernels/memory.h"
#include "kernels/memory_cuda.h"

static int find_device(int ordinal, const struct kv_cuda **ret_cuda, CUdevice *ret_device)
{
	const struct kv_cuda *cuda;
	CUresult e;
	int r, n = 0;

	r = kv_cuda_get(&cuda);
	if (r < 0)
		return r;
	e = cuda->cuDeviceGetCount(&n);
	if (e)
		return kv_cuda_error(e, "counting GPUs");
	if (ordinal < 0 || ordinal >= n)
		return kv_error(-ENODEV,
				"there is none of this number: %d GPUs are seen here, 0..%d", n,
				n - 1);
	e = cuda->cuDeviceGet(ret_device, ordinal);
	if (e)
		return kv_cuda_error(e, "finding it");
	*ret_cuda = cuda;
	return 0;
}

static int describe(const struct kv_cuda *cuda, CUdevice device, struct kv_device_info *ret)
{
	CUuuid uuid;
	size_t total = 0;
	CUresult e;

	e = cuda->cuDeviceGetName(ret->name, sizeof(ret->name), device);
	if (!e)
		e = cuda->cuDeviceGetUuid_v2(&uuid, device);
	if (!e)
		e = cuda->cuDeviceTotalMem(&total, device);
	if (e)
		return kv_cuda_error(e, "describing it");
	memcpy(ret->uuid, uuid.bytes, sizeof(ret->uuid));
	ret->total_bytes = total;
	return 0;
}

/* Needs a context. None fits: then nothing is free that could be used. */
static int count_free(const struct kv_cuda *cuda, CUdevice device, uint64_t *ret)
{
	size_t free_bytes = 0, total;
	CUcontext context;
	CUresult e;
	int r;

	*ret = 0;
	r = kv_cuda_retain(cuda, device, &context);
	if (r == -ENOMEM)
		return 0;
	if (r < 0)
		return r;
	r = kv_cuda_enter(cuda, context);
	if (!r) {
		e = cuda->cuMemGetInfo(&free_bytes, &total);
		if (e)
			r = kv_cuda_error(e, "asking for free memory");
		kv_cuda_leave(cuda);
	}
	cuda->cuDevicePrimaryCtxRelease(device);
	*ret = free_bytes;
	return r;
}

static int no_room(uint64_t asked, uint64_t free_bytes, uint64_t total)
{
	return kv_error(-ENOMEM,
			"arena of %" PRIu64 " bytes asked for, %" PRIu64 " of %" PRIu64
			" bytes are free",
			asked, free_bytes, total);
}

void kv_cuda_job_info(const struct kv_helper_end *end, const void *arg)
{
	const struct kv_cuda_job *job = arg;
	struct kv_helper_reply reply = {0};
	const struct kv_cuda *cuda = NULL;
	CUdevice device;
	int r;

	r = find_device(job->ordinal, &cuda, &device);
	if (!r)
		r = describe(cuda, device, &reply.info);
	if (!r)
		r = count_free(cuda, device, &reply.info.free_bytes);
	kv_helper_reply(end, r, &reply);
}

/*
 * Granules
 */

static int attribute(const struct kv_cuda *cuda, CUdevice device, CUdevice_attribute which)
{
	int value = 0;

	return cuda->cuDeviceGetAttribute(&value, which, device) ? 0 : value;
}

static int check_vmm(const struct kv_cuda *cuda, CUdevice device, const struct kv_cuda_job *job,
		     CUmemAllocationProp *prop)
{
	size_t unit = 0;
	CUresult e;

	if (!attribute(cuda, device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED))
		return kv_error(-ENOTSUP, "it has no virtual memory management");
	if (!attribute(cuda, device,
		       CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED))
		return kv_error(-ENOTSUP, "its memory can't be exported as file descriptors");

	kv_memory_cuda_prop(cuda, device, prop);
	e = cuda->cuMemGetAllocationGranularity(&unit, prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
	if (e)
		return kv_cuda_error(e, "smallest granule");
	if (job->granule_bytes % unit || job->bytes % unit)
		return kv_error(-EINVAL,
				"arena of %" PRIu64 " bytes in granules of %" PRIu64
				": multiples of %zu expected",
				job->bytes, job->granule_bytes, unit);
	return 0;
}

static uint64_t min(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* All are made before the first is sent: else what is free couldn't be counted on failure. */
static int make_granules(const struct kv_cuda *cuda, CUdevice device, const struct kv_cuda_job *job,
			 const struct kv_device_info *info, uint32_t n,
			 CUmemGenericAllocationHandle *handles)
{
	CUmemAllocationProp prop;
	uint64_t bytes, free_bytes;
	CUresult e = CUDA_SUCCESS;
	uint32_t i;
	int r;

	r = check_vmm(cuda, device, job, &prop);
	if (r < 0)
		return r;
	for (i = 0; i < n; i++) {
		bytes = min(job->granule_bytes, job->bytes - i * job->granule_bytes);
		e = cuda->cuMemCreate(&handles[i], bytes, &prop, 0);
		if (e)
			break;
	}
	if (!e)
		return 0;

	r = kv_cuda_error(e, "making granule %u of %u, %" PRIu64 " bytes", i, n, bytes);
	while (i)
		cuda->cuMemRelease(handles[--i]);
	if (r != -ENOMEM)
		return r;
	r = count_free(cuda, device, &free_bytes);
	return r < 0 ? r : no_room(job->bytes, free_bytes, info->total_bytes);
}

/* Releases the handles, too: the descriptors on their way hold the memory. */
static int send_granules(const struct kv_helper_end *end, const struct kv_cuda *cuda, uint32_t n,
			 const CUmemGenericAllocationHandle *handles)
{
	int fds[KV_HELPER_MAX_FDS];
	uint32_t n_fds = 0;
	CUresult e;
	int r = 0;

	for (uint32_t i = 0; i < n && !r; i++) {
		e = cuda->cuMemExportToShareableHandle(&fds[n_fds], handles[i],
						       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
		if (e)
			return kv_cuda_error(e, "exporting granule %u of %u", i, n);
		cuda->cuMemRelease(handles[i]);
		n_fds++;
		if (n_fds < KV_HELPER_MAX_FDS && i + 1 < n)
			continue;
		r = kv_helper_send_fds(end, fds, n_fds);
		while (n_fds)
			kv_close(fds[--n_fds]);
	}
	return r;
}

void kv_cuda_job_vmm(const struct kv_helper_end *end, const void *arg)
{
	const struct kv_cuda_job *job = arg;
	const uint32_t n = (uint32_t)((job->bytes - 1) / job->granule_bytes + 1);
	kv_cleanup(kv_freep) CUmemGenericAllocationHandle *handles = NULL;
	struct kv_helper_reply reply = {0};
	const struct kv_cuda *cuda;
	CUdevice device;
	int r;

	handles = calloc(n, sizeof(*handles));
	r = handles ? find_device(job->ordinal, &cuda, &device)
		    : kv_error(-ENOMEM, "no memory for the handles of %u granules", n);
	if (!r)
		r = describe(cuda, device, &reply.info);
	if (!r)
		r = make_granules(cuda, device, job, &reply.info, n, handles);
	if (!r)
		r = send_granules(end, cuda, n, handles);

	reply.export.kind = KV_EXPORT_VMM;
	reply.export.n_fds = n;
	reply.export.bytes = job->bytes;
	reply.export.granule_bytes = job->granule_bytes;
	memcpy(reply.export.uuid, reply.info.uuid, sizeof(reply.export.uuid));
	kv_helper_reply(end, r, &reply);
}

/*
 * One allocation with an ipc handle
 */

/* With a context current. */
static int make_ipc(const struct kv_cuda *cuda, const struct kv_cuda_job *job,
		    const struct kv_device_info *info, CUdeviceptr *ret,
		    struct kv_arena_export *export)
{
	size_t free_bytes = 0, total;
	CUipcMemHandle handle;
	CUresult e;

	e = cuda->cuMemAlloc(ret, job->bytes);
	if (e == CUDA_ERROR_OUT_OF_MEMORY &&
	    cuda->cuMemGetInfo(&free_bytes, &total) == CUDA_SUCCESS)
		return no_room(job->bytes, free_bytes, info->total_bytes);
	if (e)
		return kv_cuda_error(e, "allocating %" PRIu64 " bytes", job->bytes);
	e = cuda->cuIpcGetMemHandle(&handle, *ret);
	if (e) {
		cuda->cuMemFree(*ret);
		return kv_cuda_error(e, "ipc handle of %" PRIu64 " bytes", job->bytes);
	}
	memcpy(export->ipc_handle, &handle, sizeof(handle));
	return 0;
}

void kv_cuda_job_ipc(const struct kv_helper_end *end, const void *arg)
{
	const struct kv_cuda_job *job = arg;
	struct kv_helper_reply reply = {0};
	const struct kv_cuda *cuda;
	CUdeviceptr memory;
	CUcontext context;
	CUdevice device;
	int r;

	kv_helper_close_others(
		end); /* it may live as long as the service, and shall hold nothing */
	r = find_device(job->ordinal, &cuda, &device);
	if (!r)
		r = describe(cuda, device, &reply.info);
	if (!r)
		r = kv_cuda_retain(cuda, device, &context);
	if (!r)
		r = kv_cuda_enter(cuda, context);
	if (!r)
		r = make_ipc(cuda, job, &reply.info, &memory, &reply.export);

	reply.export.kind = KV_EXPORT_IPC;
	reply.export.bytes = job->bytes;
	reply.export.granule_bytes = job->bytes;
	reply.export.owner_pid = getpid();
	memcpy(reply.export.uuid, reply.info.uuid, sizeof(reply.export.uuid));
	kv_helper_reply(end, r, &reply);
	if (r < 0)
		return;
	kv_helper_wait_for_close(end); /* whoever holds the other end holds the memory */
	cuda->cuMemFree(memory);
}

/*
 * The check: a mark at the beginning of each granule, and one at the end of the arena, so that an
 * exchanged, missing or short granule shows. Written, read through the same mapping, read again
 * through a read-only one, zeroed.
 */

static uint64_t mark_offset(const struct kv_arena_export *export, uint32_t i)
{
	return i * export->granule_bytes < export->bytes ? i * export->granule_bytes
							 : export->bytes - sizeof(uint64_t);
}

static int read_marks(struct kv_memory *memory, const struct kv_arena_export *export, uint32_t n)
{
	uint64_t offset, mark;
	int r;

	for (uint32_t i = 0; i < n; i++) {
		offset = mark_offset(export, i);
		r = kv_memory_read(memory, offset, &mark, sizeof(mark));
		if (r < 0)
			return r;
		if (mark != (export->epoch ^ offset))
			return kv_error(-EIO,
					"at %" PRIu64 ", %016" PRIx64 " was read where %016" PRIx64
					" had been written",
					offset, mark, export->epoch ^ offset);
	}
	return 0;
}

static int write_marks(struct kv_memory *memory, const struct kv_arena_export *export, uint32_t n)
{
	uint64_t offset, mark;
	int r = 0;

	for (uint32_t i = 0; i < n && !r; i++) {
		offset = mark_offset(export, i);
		mark = export->epoch ^ offset;
		r = kv_memory_write(memory, offset, &mark, sizeof(mark));
	}
	return r;
}

static int clear_marks(struct kv_memory *memory, const struct kv_arena_export *export, uint32_t n)
{
	int r = 0;

	for (uint32_t i = 0; i < n && !r; i++)
		r = kv_memory_zero(memory, mark_offset(export, i), sizeof(uint64_t), NULL);
	return r < 0 ? r : kv_memory_sync(memory);
}

static int check(const struct kv_arena *arena)
{
	const struct kv_arena_export *export = &arena->export;
	const uint32_t n = (uint32_t)((export->bytes - 1) / export->granule_bytes + 1) + 1;
	struct kv_memory *memory = NULL, *read_only = NULL;
	int r;

	r = kv_memory_attach(export, arena->fds, false, &memory);
	if (!r && export->kind == KV_EXPORT_VMM)
		r = kv_memory_attach(export, arena->fds, true, &read_only);
	if (!r)
		r = write_marks(memory, export, n);
	if (!r)
		r = read_marks(memory, export, n);
	if (!r && read_only)
		r = read_marks(read_only, export, n);
	if (!r)
		r = clear_marks(memory, export, n);
	kv_memory_detach(read_only);
	kv_memory_detach(memory);
	return r;
}

void kv_cuda_job_check(const struct kv_helper_end *end, const void *arg)
{
	const struct kv_cuda_job *job = arg;
	struct kv_helper_reply reply = {0};

	kv_helper_reply(end, check(job->arena), &reply);
}
