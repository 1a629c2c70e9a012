/* SPDX-License-Identifier: Apache-2.0 */
/* kvctl doctor: what this process may have. kvcached started from here has the same. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include "include/internal/cleanup.h"
#include "tools/doctor.h"
#include "tools/emit.h"

/* Of a worker: a client's socket, pidfd and pages; its own, its arenas' and its pools' beside them. */
#define FILES_OF_CLIENT 3
#define FILES_OF_WORKER 512
#define MAX_CLIENTS	1024 /* --max-clients if not given */

#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)

static struct kv_words number(rlim_t n)
{
	struct kv_words w;

	if (n == RLIM_INFINITY)
		snprintf(w.text, sizeof(w.text), "unlimited");
	else
		snprintf(w.text, sizeof(w.text), "%" PRIu64, (uint64_t)n);
	return w;
}

static void seen_files(struct kv_probing *p)
{
	const rlim_t wanted = FILES_OF_CLIENT * MAX_CLIENTS + FILES_OF_WORKER;
	struct rlimit l;

	getrlimit(RLIMIT_NOFILE, &l);
	if (l.rlim_max >= wanted) {
		kv_seen(p, KV_FINE, "open files: %s, up to %s (kvcached takes all of them)",
			number(l.rlim_cur).text, number(l.rlim_max).text);
		return;
	}
	if (l.rlim_max < FILES_OF_WORKER)
		kv_seen(p, KV_FAIL, "open files: %s at most; a worker has up to %d of its own",
			number(l.rlim_max).text, FILES_OF_WORKER);
	else
		kv_seen(p, KV_WARN, "open files: %s at most; enough for %" PRIu64 " clients of %d",
			number(l.rlim_max).text, (uint64_t)(l.rlim_max - FILES_OF_WORKER) / FILES_OF_CLIENT,
			MAX_CLIENTS);
	kv_change(p, "LimitNOFILE=65536 in the unit, ulimit -Hn 65536, or docker run --ulimit nofile=65536");
}

/* Of io_uring before 5.12 alone: since then it is the cgroup that pays. */
static void seen_locked(struct kv_probing *p)
{
	struct rlimit l;

	getrlimit(RLIMIT_MEMLOCK, &l);
	kv_seen(p, KV_FINE, "locked memory: %s of %s bytes; only the ring of a kernel before 5.12 counts",
		number(l.rlim_cur).text, number(l.rlim_max).text);
}

static const struct {
	int resource;
	const char *name, *why, *change;
	uint64_t fail_below, warn_below;
} others[] = {
	{RLIMIT_FSIZE, "size of a file (RLIMIT_FSIZE)", "shared pages and host arenas are files",
	 "ulimit -f unlimited, or LimitFSIZE=infinity in the unit", GIB, RLIM_INFINITY},
	{RLIMIT_AS, "address space (RLIMIT_AS)", "a CUDA driver reserves more than the GPU has",
	 "ulimit -v unlimited, or LimitAS=infinity in the unit", 64 * GIB, RLIM_INFINITY},
	{RLIMIT_NPROC, "processes of this user (RLIMIT_NPROC)",
	 "keeper, worker, a mover for each GPU, and helpers at the start",
	 "ulimit -u 4096, or LimitNPROC=4096 in the unit", 32, 128},
};

void kv_probe_limits(struct kv_probing *p)
{
	seen_files(p);
	seen_locked(p);
	for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
		struct rlimit l;

		getrlimit((__rlimit_resource_t)others[i].resource, &l);
		if (l.rlim_cur >= others[i].warn_below)
			continue;
		kv_seen(p, l.rlim_cur < others[i].fail_below ? KV_FAIL : KV_WARN, "%s: %s; %s",
			others[i].name, number(l.rlim_cur).text, others[i].why);
		kv_change(p, "%s", others[i].change);
	}
}

static void seen_host(struct kv_probing *p)
{
	struct kv_device_info host;

	if (kv_device_host.info(0, &host) < 0) {
		kv_seen(p, KV_FAIL, "%s", kv_error_text());
		kv_change(p, "mount /proc");
		return;
	}
	if (host.free_bytes >= GIB) {
		kv_seen(p, KV_FINE, "memory: %s of %s free, cgroup's limits counted",
			kv_words_bytes(host.free_bytes).text, kv_words_bytes(host.total_bytes).text);
		return;
	}
	kv_seen(p, KV_WARN, "memory: %s of %s free, cgroup's limits counted; pages of pools take about "
		"300 bytes a block and count in this cgroup, and so does an arena of --host",
		kv_words_bytes(host.free_bytes).text, kv_words_bytes(host.total_bytes).text);
	kv_change(p, "MemoryMax= in the unit, docker run --memory, or memory.max of the cgroup: 1 GiB more");
}

static void seen_shm(struct kv_probing *p)
{
	struct statvfs fs;
	uint64_t bytes;

	if (statvfs("/dev/shm", &fs) < 0) {
		kv_seen(p, KV_FINE, "no /dev/shm (%s): nothing here needs it", strerror(errno));
		return;
	}
	bytes = (uint64_t)fs.f_blocks * fs.f_frsize;
	if (!bytes || bytes > 64 * MIB) {
		kv_seen(p, KV_FINE, "/dev/shm: %s; nothing here needs it", kv_words_bytes(bytes).text);
		return;
	}
	kv_seen(p, KV_WARN, "/dev/shm: %s; nothing here needs it, but engines beside us do (NCCL, torch)",
		kv_words_bytes(bytes).text);
	kv_change(p, "docker run --shm-size 8g, or an emptyDir of medium Memory at /dev/shm");
}

void kv_probe_memory(struct kv_probing *p)
{
	int64_t pages = kv_number_in("/proc/meminfo", "HugePages_Total:");

	seen_host(p);
	seen_shm(p);
	kv_seen(p, KV_FINE, "huge pages: %" PRId64 " reserved; none is needed", pages < 0 ? 0 : pages);
}
