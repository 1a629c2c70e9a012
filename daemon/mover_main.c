/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The mover process: attaches to one arena as a client does, and does what needs the bytes. It has the
 * CUDA context that the worker must not have; a fault of the GPU ends it and nothing else. It
 * ends when the worker's end of the socket closes.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "daemon/daemon.h"
#include "daemon/mover.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"
#include "kernels/memory.h"

/* *ret_fds: [n_fds], -1 where a sparse arena has no granule. */
static int receive_arena(int fd, struct kv_arena_export *export, int **ret_fds)
{
	struct kv_mover_arena part;
	uint32_t have = 0;
	int *fds = NULL;

	do {
		int got[KV_WIRE_MAX_FDS];
		uint32_t n = 0;

		if (kv_socket_receive(fd, &part, sizeof(part), got, KV_WIRE_MAX_FDS, &n, 0) !=
			    sizeof(part) ||
		    n != part.n_fds || part.first_fd < have ||
		    part.first_fd + n > part.export.n_fds) {
			free(fds);
			return -EPROTO;
		}
		if (!fds) {
			fds = malloc((part.export.n_fds + 1) * sizeof(*fds));
			if (!fds)
				return -ENOMEM;
			memset(fds, -1, part.export.n_fds * sizeof(*fds));
		}
		memcpy(fds + part.first_fd, got, n * sizeof(*fds));
		have = part.first_fd + n;
	} while (have < part.export.n_fds);
	*export = part.export;
	*ret_fds = fds;
	return 0;
}

static int attach(const struct kv_arena_export *export, const int *fds, struct kv_memory **ret)
{
	int r;

	if (!export->sparse)
		return kv_memory_attach(export, fds, false, ret);
	r = kv_memory_attach_sparse(export, false, ret);
	for (uint32_t i = 0; !r && i < export->n_fds; i++)
		r = fds[i] < 0 ? 0 : kv_memory_map(*ret, i, fds[i]);
	return r;
}

static int zero(struct kv_memory *memory, const struct kv_mover_copy *message)
{
	const struct kv_mover_job *job = &message->job;
	int r = kv_memory_zero(memory, job->offset, job->bytes, NULL);

	for (uint32_t i = 0; i < job->n_pairs && r >= 0; i++)
		r = kv_memory_zero(memory, (uint64_t)message->pairs[i][0] << job->unit_log2,
				   (uint64_t)message->pairs[i][1] << job->unit_log2, NULL);
	return r;
}

/* *ret_fd: of a granule that was made. */
static int do_job(struct kv_memory *memory, const struct kv_mover_copy *message, uint64_t granule_bytes,
		  int *ret_fd)
{
	const struct kv_mover_job *job = &message->job;
	int r = 0;

	if (job->op == KV_MOVER_RENEW)
		r = kv_memory_renew(memory, (uint32_t)(job->offset / granule_bytes), ret_fd);
	if (r < 0)
		return r;
	if (job->op == KV_MOVER_COPY && job->n_pairs <= KV_MOVER_PAIRS)
		r = kv_memory_copy_blocks(memory, job->bytes, message->pairs, job->n_pairs);
	else if (job->op == KV_MOVER_RENEW)
		r = kv_memory_zero(memory, job->offset, job->bytes, NULL);
	else if (job->op == KV_MOVER_ZERO && job->n_pairs <= KV_MOVER_PAIRS)
		r = zero(memory, message);
	else
		r = kv_error(-EPROTO, "no such job: %u", job->op);
	return r < 0 ? r : kv_memory_sync(memory);
}

int kv_mover_main(int fd)
{
	struct kv_arena_export export;
	struct kv_memory *memory = NULL;
	static struct kv_mover_copy message;
	struct kv_mover_job *job = &message.job;
	int *fds = NULL, new_fd = -1, r;

	prctl(PR_SET_NAME, "kvcached-mover");
	r = receive_arena(fd, &export, &fds);
	if (!r)
		r = attach(&export, fds, &memory);
	for (uint32_t i = 0; fds && i < export.n_fds; i++)
		kv_close(fds[i]);
	free(fds);

	for (;;) {
		job->result = r;
		snprintf(job->text, sizeof(job->text), "%.127s", r < 0 ? kv_error_text() : "");
		if (kv_socket_send(fd, job, sizeof(*job), &new_fd, new_fd >= 0, 0) < 0 || !memory)
			break;
		new_fd = kv_close(new_fd);
		if (kv_socket_receive(fd, &message, sizeof(message), NULL, 0, NULL, 0) <
		    (int64_t)sizeof(*job))
			break;
		r = do_job(memory, &message, export.granule_bytes, &new_fd);
	}
	/* The arena is left to the end of the process: a broken context has nothing to say. */
	return r < 0;
}
