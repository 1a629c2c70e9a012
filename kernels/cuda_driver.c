/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcuda.so.1 comes with the kernel driver and not with the toolkit, so it is opened by name at
 * run time and never closed. In a forked child the driver of the parent is dead: that is said in
 * words, because the driver's own answer ("not initialized") misleads.
 */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "include/internal/arena_export.h"
#include "include/internal/error.h"
#include "kernels/cuda_driver.h"

#define LIBRARY "libcuda.so.1"

static struct kv_cuda cuda;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int load_result; /* of load(), with its text: asked for by any thread, at any time */
static char load_text[KV_ERROR_BYTES];
static _Atomic pid_t user; /* the process that called cuInit(), 0 if none */

#define STRING_OF(name) #name
#define STRING(name)	STRING_OF(name)

static const struct {
	const char *name;
	size_t offset;
} calls[] = {
#define CALL(call) {STRING(call), offsetof(struct kv_cuda, call)},
	KV_CUDA_CALLS(CALL)
#undef CALL
};

int kv_cuda_error(CUresult error, const char *format, ...)
{
	const char *name = NULL, *words = NULL;
	char what[KV_ERROR_BYTES];
	va_list args;
	int r;

	va_start(args, format);
	vsnprintf(what, sizeof(what), format, args);
	va_end(args);
	cuda.cuGetErrorName(error, &name);
	cuda.cuGetErrorString(error, &words);

	switch (error) {
	case CUDA_ERROR_OUT_OF_MEMORY:
		r = -ENOMEM;
		break;
	case CUDA_ERROR_NO_DEVICE:
	case CUDA_ERROR_INVALID_DEVICE:
	case CUDA_ERROR_DEVICE_UNAVAILABLE:
		r = -ENODEV;
		break;
	case CUDA_ERROR_NOT_SUPPORTED:
	case CUDA_ERROR_NOT_PERMITTED:
		r = -ENOTSUP;
		break;
	default:
		r = -EIO;
	}
	return kv_error(r, "%s: CUDA error %d, %s (%s)", what, error, name ? name : "unnamed",
			words ? words : "unknown to this driver");
}

static int look_up(void *library)
{
	void *address;

	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
		address = dlsym(library, calls[i].name);
		if (!address)
			return kv_error(
				-ENOTSUP,
				"the NVIDIA driver has no %s: version 470 (CUDA 11.4) or newer "
				"is needed",
				calls[i].name);
		memcpy((char *)&cuda + calls[i].offset, &address, sizeof(address));
	}
	return 0;
}

static int load_driver(void)
{
	void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
	CUresult e;
	int r;

	if (!library)
		return kv_error(-ENODEV, "no NVIDIA driver here: %s", dlerror());
	r = look_up(library);
	if (r < 0)
		return r;
	user = getpid();
	e = cuda.cuInit(0);
	return e ? kv_cuda_error(e, "starting the NVIDIA driver") : 0;
}

static void load(void)
{
	load_result = load_driver();
	if (load_result < 0)
		snprintf(load_text, sizeof(load_text), "%s", kv_error_text());
}

int kv_cuda_get(const struct kv_cuda **ret)
{
	pthread_once(&once, load);
	if (load_result < 0)
		return kv_error(load_result, "%s", load_text);
	if (user != getpid())
		return kv_error(
			-ENOTSUP,
			"CUDA was in use in process %d when it forked this one: it can be used "
			"again only after an exec",
			(int)user);
	*ret = &cuda;
	return 0;
}

bool kv_cuda_was_used(void)
{
	return user != 0;
}

int kv_cuda_retain(const struct kv_cuda *driver, CUdevice device, CUcontext *ret)
{
	CUresult e = driver->cuDevicePrimaryCtxRetain(ret, device);

	return e ? kv_cuda_error(e, "primary context of GPU %d", device) : 0;
}

int kv_cuda_enter(const struct kv_cuda *driver, CUcontext context)
{
	CUresult e = driver->cuCtxPushCurrent(context);

	return e ? kv_cuda_error(e, "making a GPU's context current") : 0;
}

void kv_cuda_leave(const struct kv_cuda *driver)
{
	CUcontext context;

	driver->cuCtxPopCurrent(&context);
}

int kv_cuda_find(const uint8_t uuid[16], CUdevice *ret)
{
	const struct kv_cuda *driver;
	char text[KV_UUID_TEXT_BYTES], why[KV_ERROR_BYTES];
	CUdevice device;
	CUuuid found;
	CUresult e;
	int r, n = 0;

	kv_uuid_format(uuid, text);
	r = kv_cuda_get(&driver);
	if (r < 0) {
		snprintf(why, sizeof(why), "%s", kv_error_text());
		return kv_error(r, "%s: %s", text, why);
	}
	e = driver->cuDeviceGetCount(&n);
	if (e)
		return kv_cuda_error(e, "counting GPUs");
	for (int i = 0; i < n; i++) {
		e = driver->cuDeviceGet(&device, i);
		if (!e)
			e = driver->cuDeviceGetUuid_v2(&found, device);
		if (e)
			return kv_cuda_error(e, "identifying GPU %d of %d", i, n);
		if (!memcmp(found.bytes, uuid, sizeof(found.bytes))) {
			*ret = device;
			return 0;
		}
	}
	return kv_error(
		-ENODEV,
		"%s: not among the %d GPUs that this process sees (CUDA_VISIBLE_DEVICES, or "
		"the container's devices)",
		text, n);
}
