/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that outlives the worker: memfds, and the journal at its first start. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/daemon.h"
#include "daemon/journal.h"
#include "include/internal/atomic.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"

static int map(int fd, uint64_t bytes, void **ret)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);

	if (p == MAP_FAILED)
		return -errno;
	*ret = p;
	return 0;
}

int kv_shared_pages(const char *name, uint64_t bytes, int *ret_fd, void **ret)
{
	kv_cleanup(kv_closep) int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	int r;

	if (fd < 0)
		return -errno;
	if (ftruncate(fd, (off_t)bytes) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
		return -errno;
	r = map(fd, bytes, ret);
	if (r < 0)
		return r;
	*ret_fd = kv_steal_fd(&fd);
	return 0;
}

int kv_shared_map(int fd, uint64_t bytes, void **ret)
{
	struct stat st;

	if (fstat(fd, &st) < 0)
		return -errno;
	if (!bytes || (uint64_t)st.st_size != bytes)
		return -EPROTO;
	return map(fd, bytes, ret);
}

/* Each by itself: it may be exchanged for another. */
static int deposit_granules(struct kv_daemon *d, uint32_t gpu)
{
	const struct kv_arena *arena = d->gpus[gpu].arena;
	int r = 0;

	for (uint32_t i = 0; !r && i < arena->export.n_fds; i++)
		r = kv_keeping_put(&d->keeping, KV_DEPOSIT_GRANULE, (uint64_t)gpu << 32 | i,
				   &arena->fds[i], 1);
	return r;
}

static int deposit_arenas(struct kv_daemon *d)
{
	int r = 0;

	for (uint32_t i = 0; !r && i < d->n_gpus; i++) {
		struct kv_gpu_unit *gpu = &d->gpus[i];
		struct kv_journal_gpu *saved = &d->journal->gpus[i];

		saved->info = gpu->info;
		saved->export = gpu->arena->export;
		snprintf(saved->why, sizeof(saved->why), "%.127s", gpu->arena->why);
		if (gpu->arena->export.sparse)
			r = deposit_granules(d, i);
		else
			r = kv_keeping_put(&d->keeping, KV_DEPOSIT_ARENA, i, gpu->arena->fds,
					   gpu->arena->export.n_fds);
		gpu->ops->arena_let_go(gpu->arena);
		if (!r && gpu->arena->owner_fd >= 0) {
			int fds[] = { gpu->arena->owner_pidfd, gpu->arena->owner_fd };

			r = kv_keeping_put(&d->keeping, KV_DEPOSIT_OWNER, i, fds, 2);
		}
	}
	return r;
}

int kv_journal_new(struct kv_daemon *d, uint64_t extent_bytes, uint64_t map_bytes, void **ret_map)
{
	kv_cleanup(kv_closep) int fd = -1;
	uint64_t bytes = (KV_JOURNAL_BYTES + map_bytes + 4095) / 4096 * 4096;
	void *p;
	int r = kv_shared_pages("kvcached-journal", bytes, &fd, &p);

	if (r < 0)
		return kv_error(r, "pages of the journal: %s", strerror(-r));
	d->journal = p;
	d->journal->bytes = bytes;
	d->journal->boot_nonce = d->boot_nonce;
	d->journal->started_ns = d->started_ns;
	d->journal->next_session_id = d->journal->next_pool_id = 1;
	d->journal->extent_bytes = extent_bytes;
	d->journal->n_gpus = d->n_gpus;
	d->journal->host = d->config.host;
	r = kv_keeping_put(&d->keeping, KV_DEPOSIT_JOURNAL, 0, &fd, 1);
	if (!r)
		r = deposit_arenas(d);
	if (r < 0)
		return r;
	*ret_map = (char *)p + KV_JOURNAL_BYTES;
	kv_store_release(&d->journal->magic, KV_JOURNAL_MAGIC);
	return 0;
}
