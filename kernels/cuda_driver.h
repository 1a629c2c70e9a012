/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA driver, looked up when first needed, so that programs start where there is none. The
 * types are cuda.h's; no function of it is linked. cuda.h renames calls to their versions by macro
 * (cuMemAlloc is cuMemAlloc_v2), and so are members and looked-up names here:
 *
 *	e = cuda->cuMemAlloc(&p, bytes);
 *	if (e)
 *		return kv_cuda_error(e, "allocating %zu bytes", bytes);
 *
 * Threads: any.
 */
#ifndef KV_KERNELS_CUDA_DRIVER_H
#define KV_KERNELS_CUDA_DRIVER_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

/* All are in every driver since 11.4 (R470). */
#define KV_CUDA_CALLS(X)                                                                           \
	X(cuInit)                                                                                  \
	X(cuGetErrorName)                                                                          \
	X(cuGetErrorString)                                                                        \
	X(cuDeviceGetCount)                                                                        \
	X(cuDeviceGet)                                                                             \
	X(cuDeviceGetName)                                                                         \
	X(cuDeviceGetUuid_v2)                                                                      \
	X(cuDeviceGetAttribute)                                                                    \
	X(cuDeviceTotalMem)                                                                        \
	X(cuDevicePrimaryCtxRetain)                                                                \
	X(cuDevicePrimaryCtxRelease)                                                               \
	X(cuCtxPushCurrent)                                                                        \
	X(cuCtxPopCurrent)                                                                         \
	X(cuCtxGetCurrent)                                                                         \
	X(cuCtxGetDevice)                                                                          \
	X(cuMemGetInfo)                                                                            \
	X(cuMemAlloc)                                                                              \
	X(cuMemGetAddressRange)                                                                    \
	X(cuMemFree)                                                                               \
	X(cuMemHostAlloc)                                                                          \
	X(cuMemFreeHost)                                                                           \
	X(cuIpcGetMemHandle)                                                                       \
	X(cuIpcOpenMemHandle)                                                                      \
	X(cuIpcCloseMemHandle)                                                                     \
	X(cuMemGetAllocationGranularity)                                                           \
	X(cuMemCreate)                                                                             \
	X(cuMemRelease)                                                                            \
	X(cuMemExportToShareableHandle)                                                            \
	X(cuMemImportFromShareableHandle)                                                          \
	X(cuMemAddressReserve)                                                                     \
	X(cuMemAddressFree)                                                                        \
	X(cuMemMap)                                                                                \
	X(cuMemUnmap)                                                                              \
	X(cuMemSetAccess)                                                                          \
	X(cuMemsetD8Async)                                                                         \
	X(cuMemcpyDtoDAsync)                                                                       \
	X(cuMemcpyDtoHAsync)                                                                       \
	X(cuMemcpyHtoDAsync)                                                                       \
	X(cuStreamCreate)                                                                          \
	X(cuStreamDestroy)                                                                         \
	X(cuStreamQuery)                                                                           \
	X(cuStreamGetCtx)                                                                          \
	X(cuStreamIsCapturing)                                                                     \
	X(cuEventCreate)                                                                           \
	X(cuEventDestroy)                                                                          \
	X(cuEventRecord)                                                                           \
	X(cuEventQuery)

struct kv_cuda {
#define KV_CUDA_MEMBER(call) __typeof__(call) *call;
	KV_CUDA_CALLS(KV_CUDA_MEMBER)
#undef KV_CUDA_MEMBER
};

/**
 * kv_cuda_get() - the driver, loaded and initialised, once
 *
 * Return: 0; -ENODEV if there is no driver or no GPU; -ENOTSUP if the driver is too old, or this is
 *         a forked child of a process that had CUDA initialised; -EIO.
 */
int kv_cuda_get(const struct kv_cuda **ret);

/* Has kv_cuda_get() tried to start the driver, here or in a process that this was forked of? */
bool kv_cuda_was_used(void);

/*
 * The text of a CUDA error with its name, behind what was being done.
 * Return: -ENOMEM, -ENODEV, -ENOTSUP or -EIO, by the kind of error.
 */
int kv_cuda_error(CUresult error, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The GPU's primary context, with a reference to it: cuDevicePrimaryCtxRelease() gives it back. */
int kv_cuda_retain(const struct kv_cuda *cuda, CUdevice device, CUcontext *ret);

/* Makes @context current, and restores what was current before. */
int kv_cuda_enter(const struct kv_cuda *cuda, CUcontext context);
void kv_cuda_leave(const struct kv_cuda *cuda);

/*
 * A GPU by its UUID (MIG instances have their own).
 * Return: 0; -ENODEV if this process does not see it, with the UUID in the text; -EIO.
 */
int kv_cuda_find(const uint8_t uuid[16], CUdevice *ret);

#endif
