/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvctl doctor: memory of each kind that kvcached can export, made by the daemon's own code
 * (daemon/device.h): one process makes it, a second one writes, reads, maps it read-only.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/helper.h"
#include "include/internal/socket.h"
#include "include/kvcached/types.h"
#include "kernels/memory.h"
#include "tools/doctor.h"

#define ARENA_BYTES (4 * KV_ARENA_UNIT)
#define MARK	    UINT64_C(0x6b76646f63746f72)

/* One process, two mappings: of another epoch, so that they count as two arenas. */
int kv_doctor_attach(const struct kv_arena *arena)
{
	struct kv_arena_export again = arena->export;
	struct kv_memory *a = NULL, *b = NULL;
	uint64_t offset = arena->export.bytes - sizeof(uint64_t);
	uint64_t mark = MARK ^ arena->export.epoch, seen = 0;
	int r = kv_memory_attach(&arena->export, arena->fds, false, &a);

	again.epoch = ~again.epoch;
	if (!r)
		r = kv_memory_attach(&again, arena->fds, false, &b);
	if (!r)
		r = kv_memory_write(a, offset, &mark, sizeof(mark));
	if (!r)
		r = kv_memory_read(b, offset, &seen, sizeof(seen));
	if (!r && seen != mark)
		r = kv_error(-EIO, "%016llx was read through one mapping where %016llx had been written "
			     "through another", (unsigned long long)seen, (unsigned long long)mark);
	kv_memory_detach(b);
	kv_memory_detach(a);
	return r;
}

static void attach_job(const struct kv_helper_end *end, const void *arg)
{
	struct kv_helper_reply reply = {0};

	kv_helper_reply(end, kv_doctor_attach(arg), &reply);
}

/* 0; negative with text. The text of success is in arena->why. */
static int try_kind(struct kv_probing *p, const struct kv_device_ops *ops, int ordinal, uint32_t kind)
{
	uint64_t granule = kind == KV_EXPORT_VMM ? KV_ARENA_UNIT : 0;
	struct kv_helper_reply reply;
	struct kv_arena *arena;
	int r = ops->arena_new(ordinal, ARENA_BYTES, kind, granule, &arena);

	if (r < 0)
		return r;
	r = kv_helper_run(attach_job, arena, p->deadline - kv_now(), NULL, 0, &reply);
	ops->arena_free(arena);
	return r;
}

static void seen_gpu(struct kv_probing *p, int ordinal)
{
	static const uint32_t kinds[] = {KV_EXPORT_VMM, KV_EXPORT_IPC};
	bool works[2];

	for (size_t i = 0; i < 2; i++) {
		int r = try_kind(p, &kv_device_cuda, ordinal, kinds[i]);

		works[i] = r >= 0;
		if (works[i]) {
			kv_seen(p, KV_FINE, "GPU %d: %s: made in one process, written and read in another%s; "
				"mapped twice in one", ordinal, kv_export_name(kinds[i]),
				kinds[i] == KV_EXPORT_VMM ? ", read-only too" : "");
		} else if (r == -ENOMEM) {
			kv_seen(p, KV_WARN, "%s", kv_error_text());
			kv_change(p, "ask again when there are 600 MiB free, for a context and 8 MiB");
		} else if (works[0]) {
			kv_seen(p, KV_FINE, "%s: not needed, vmm works", kv_error_text());
		} else {
			kv_seen(p, i ? KV_FAIL : KV_WARN, "%s", kv_error_text());
			kv_change(p, i ? "without a kind that works, kvcached --host is what remains here" :
					 "a driver and a GPU with virtual memory management, and no sandbox "
					 "that withholds descriptors; kvcached takes ipc until then, and "
					 "kvctl stats says what that costs");
		}
	}
}

void kv_probe_handles(struct kv_probing *p)
{
	struct kv_device_info info;
	int r = try_kind(p, &kv_device_host, 0, 0), n = 0;

	if (r < 0) {
		kv_seen(p, KV_FAIL, "host: %s", kv_error_text());
		kv_change(p, "see memfd, limits and memory");
	} else {
		kv_seen(p, KV_FINE, "host: a sealed memfd, mapped twice in another process");
	}
	while (n < KV_MAX_GPUS && !(r = kv_device_cuda.info(n, &info)))
		seen_gpu(p, n++);
	if (n)
		return;
	kv_seen(p, KV_WARN, "no GPU was tried: %s", kv_error_text());
	kv_change(p, "%s", r == -ENOTSUP ? "not needed by kvcached --host; else a build with CUDA" :
					   "not needed by kvcached --host; else see driver");
}
