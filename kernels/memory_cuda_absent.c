/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA device of a build without CUDA: says so. Nothing can be attached, so nothing else runs.
 */
#include <errno.h>

#include "include/internal/error.h"
#include "include/kvcached/types.h"
#include "kernels/memory_backend.h"

static int absent(void)
{
	return kv_error(-ENOTSUP,
			"GPU memory: this build has no CUDA; build it with -Dcuda=enabled");
}

/* Which GPU, as where there is CUDA and the GPU isn't seen. */
static int attach(struct kv_memory *memory, const int *fds)
{
	char text[KV_UUID_TEXT_BYTES];

	kv_uuid_format(memory->export.uuid, text);
	return kv_error(-ENOTSUP, "%s: GPU memory: this build has no CUDA; build it with -Dcuda=enabled", text);
}

static int reserve(struct kv_memory *memory)
{
	return absent();
}

static int event_new(struct kv_event **ret)
{
	return absent();
}

static int pinned_new(size_t bytes, void **ret)
{
	return absent();
}

static void forked(void)
{
}

const struct kv_memory_backend kv_memory_cuda = {
	.device = KV_DEVICE_CUDA,
	.attach = attach,
	.reserve = reserve,
	.event_new = event_new,
	.pinned_new = pinned_new,
	.forked = forked,
};
