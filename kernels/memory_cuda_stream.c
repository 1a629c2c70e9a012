/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events and pinned memory of CUDA. Neither names a GPU: an event takes the context of the stream
 * that it is recorded on, and pinned memory is portable, good in every context.
 *
 * An event of a primary context, and pinned memory, hold a reference to that context: freeing the
 * last attachment does not pull it away under them.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/error.h"
#include "kernels/memory_cuda.h"

struct cuda_event {
	struct kv_event event;
	const struct kv_cuda *cuda;
	CUevent handle;	   /* made when first recorded: it must belong to the stream's context */
	CUcontext context; /* NULL: never recorded */
	CUdevice device;
	bool retained; /* the context is primary, and held */
};

/* Stands in front of pinned memory, inside its allocation. */
struct pinned {
	const struct kv_cuda *cuda;
	CUdevice device;
	CUcontext context; /* primary, retained */
};
#define PINNED_HEADER 256
_Static_assert(sizeof(struct pinned) <= PINNED_HEADER, "header of pinned memory");

static int device_of_context(const struct kv_cuda *cuda, CUcontext context, CUdevice *ret)
{
	CUresult e;
	int r;

	r = kv_cuda_enter(cuda, context);
	if (r < 0)
		return r;
	e = cuda->cuCtxGetDevice(ret);
	kv_cuda_leave(cuda);
	return e ? kv_cuda_error(e, "GPU of a context") : 0;
}

/* The GPU of @context, or, if that is NULL, the one attached last. */
static int device_of(const struct kv_cuda *cuda, CUcontext context, CUdevice *ret)
{
	if (context)
		return device_of_context(cuda, context, ret);
	*ret = kv_memory_cuda_last;
	if (*ret < 0)
		return kv_error(-ENODEV,
				"no CUDA context is current in this thread and no arena of a "
				"GPU was attached: which GPU is meant?");
	return 0;
}

static void unbind(struct cuda_event *event)
{
	const struct kv_cuda *cuda = event->cuda;

	if (event->handle && kv_cuda_enter(cuda, event->context) == 0) {
		cuda->cuEventDestroy(event->handle);
		kv_cuda_leave(cuda);
	}
	if (event->retained)
		cuda->cuDevicePrimaryCtxRelease(event->device);
	event->handle = NULL;
	event->context = NULL;
	event->retained = false;
}

/* Gives the event the context of @stream. */
static int bind(struct cuda_event *event, CUstream stream)
{
	const struct kv_cuda *cuda = event->cuda;
	CUcontext context = NULL, primary;
	CUdevice device;
	CUresult e;
	int r;

	if (!stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD)
		e = cuda->cuCtxGetCurrent(&context);
	else
		e = cuda->cuStreamGetCtx(stream, &context);
	if (e)
		return kv_cuda_error(e, "context of stream %p", (void *)stream);
	if (context && context == event->context)
		return 0;

	r = device_of(cuda, context, &device);
	if (!r)
		r = kv_cuda_retain(cuda, device, &primary);
	if (r < 0)
		return r;
	unbind(event);
	event->device = device;
	event->context = context ? context : primary;
	event->retained = event->context == primary;
	if (!event->retained)
		cuda->cuDevicePrimaryCtxRelease(device);
	return 0;
}

int kv_memory_cuda_event_new(struct kv_event **ret)
{
	struct cuda_event *event;
	int r;

	event = calloc(1, sizeof(*event));
	if (!event)
		return kv_error(-ENOMEM, "no memory for an event");
	r = kv_cuda_get(&event->cuda);
	if (r < 0) {
		free(event);
		return r;
	}
	event->event.backend = &kv_memory_cuda;
	*ret = &event->event;
	return 0;
}

void kv_memory_cuda_event_free(struct kv_event *base)
{
	struct cuda_event *event = (struct cuda_event *)base;

	unbind(event);
	free(event);
}

/* With the stream's context current. */
static int record(struct cuda_event *event, CUstream stream)
{
	const struct kv_cuda *cuda = event->cuda;
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	CUresult e;

	e = cuda->cuStreamIsCapturing(stream, &status);
	if (e == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT ||
	    (!e && status != CU_STREAM_CAPTURE_STATUS_NONE))
		return kv_error(-EBUSY,
				"stream %p is being captured in a graph: record the event behind a "
				"launch of the graph instead",
				(void *)stream);
	if (!e && !event->handle)
		e = cuda->cuEventCreate(&event->handle, CU_EVENT_DISABLE_TIMING);
	if (!e)
		e = cuda->cuEventRecord(event->handle, stream);
	return e ? kv_cuda_error(e, "recording an event on stream %p", (void *)stream) : 0;
}

int kv_memory_cuda_event_record(struct kv_event *base, void *stream)
{
	struct cuda_event *event = (struct cuda_event *)base;
	int r;

	r = bind(event, stream);
	if (!r)
		r = kv_cuda_enter(event->cuda, event->context);
	if (r < 0)
		return r;
	r = record(event, stream);
	kv_cuda_leave(event->cuda);
	return r;
}

int kv_memory_cuda_event_query(struct kv_event *base)
{
	const struct cuda_event *event = (struct cuda_event *)base;
	CUresult e;

	if (!event->handle)
		return 1;
	if (kv_cuda_enter(event->cuda, event->context) < 0)
		return -EIO;
	e = event->cuda->cuEventQuery(event->handle);
	kv_cuda_leave(event->cuda);
	if (e == CUDA_ERROR_NOT_READY)
		return 0;
	if (e) {
		kv_cuda_error(e, "asking whether GPU work is done");
		return -EIO;
	}
	return 1;
}

int kv_memory_cuda_pinned_new(size_t bytes, void **ret)
{
	CUcontext current = NULL;
	struct pinned own = {0};
	void *p = NULL;
	CUresult e;
	int r;

	if (bytes > SIZE_MAX - PINNED_HEADER)
		return kv_error(-ENOMEM, "bytes: %zu of pinned memory can't be had", bytes);
	r = kv_cuda_get(&own.cuda);
	if (r < 0)
		return r;
	e = own.cuda->cuCtxGetCurrent(&current);
	r = e ? kv_cuda_error(e, "current context") : device_of(own.cuda, current, &own.device);
	if (!r)
		r = kv_cuda_retain(own.cuda, own.device, &own.context);
	if (r < 0)
		return r;

	r = kv_cuda_enter(own.cuda, own.context);
	if (!r) {
		e = own.cuda->cuMemHostAlloc(&p, bytes + PINNED_HEADER, CU_MEMHOSTALLOC_PORTABLE);
		kv_cuda_leave(own.cuda);
		if (e)
			r = kv_cuda_error(e, "%zu bytes of pinned memory", bytes);
	}
	if (r < 0) {
		own.cuda->cuDevicePrimaryCtxRelease(own.device);
		return r;
	}
	memcpy(p, &own, sizeof(own));
	memset((char *)p + PINNED_HEADER, 0, bytes);
	*ret = (char *)p + PINNED_HEADER;
	return 0;
}

void kv_memory_cuda_pinned_free(void *p)
{
	void *start = (char *)p - PINNED_HEADER;
	struct pinned own;

	memcpy(&own, start, sizeof(own));
	if (kv_cuda_enter(own.cuda, own.context) == 0) {
		own.cuda->cuMemFreeHost(start);
		kv_cuda_leave(own.cuda);
	}
	own.cuda->cuDevicePrimaryCtxRelease(own.device);
}
