/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA device of a build without CUDA: says so. */
#include <errno.h>

#include "daemon/device.h"

static int absent(int ordinal)
{
	return kv_error(-ENOTSUP,
			"GPU %d: this build has no CUDA; build it with -Dcuda=enabled, or use host "
			"memory",
			ordinal);
}

static int info(int ordinal, struct kv_device_info *ret)
{
	return absent(ordinal);
}

static int arena_new(int ordinal, uint64_t bytes, uint32_t kind, uint64_t granule_bytes,
		     struct kv_arena **ret)
{
	return absent(ordinal);
}

static void arena_free(struct kv_arena *arena)
{
}

static void arena_let_go(struct kv_arena *arena)
{
}

const struct kv_device_ops kv_device_cuda = {
	.name = "cuda",
	.info = info,
	.arena_new = arena_new,
	.arena_free = arena_free,
	.arena_let_go = arena_let_go,
};
