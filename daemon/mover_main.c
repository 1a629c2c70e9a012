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

static int receive_arena(int fd, struct kv_arena_export *export, int **ret_fds)
{
	struct kv_mover_arena part;
	uint32_t have = 0;
	int *fds = NULL;

	do {
		int got[KV_WIRE_MAX_FDS];
		uint32_t n = 0;
		void *more;

		if (kv_socket_receive(fd, &part, sizeof(part), got, KV_WIRE_MAX_FDS, &n, 0) !=
			    sizeof(part) ||
		    n != part.n_fds || part.first_fd != have) {
			free(fds);
			return -EPROTO;
		}
		more = realloc(fds, (have + n + 1) * sizeof(*fds));
		if (!more) {
			free(fds);
			return -ENOMEM;
		}
		fds = more;
		memcpy(fds + have, got, n * sizeof(*fds));
		have += n;
	} while (have < part.export.n_fds);
	*export = part.export;
	*ret_fds = fds;
	return 0;
}

static int do_job(struct kv_memory *memory, const struct kv_mover_copy *message)
{
	const struct kv_mover_job *job = &message->job;
	int r;

	if (job->op == KV_MOVER_COPY && job->n_pairs <= KV_MOVER_PAIRS)
		r = kv_memory_copy_blocks(memory, job->bytes, message->pairs, job->n_pairs);
	else if (job->op == KV_MOVER_ZERO)
		r = kv_memory_zero(memory, job->offset, job->bytes, NULL);
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
	int *fds = NULL, r;

	prctl(PR_SET_NAME, "kvcached-mover");
	r = receive_arena(fd, &export, &fds);
	if (!r)
		r = kv_memory_attach(&export, fds, false, &memory);
	for (uint32_t i = 0; fds && i < export.n_fds; i++)
		kv_close(fds[i]);
	free(fds);

	for (;;) {
		job->result = r;
		snprintf(job->text, sizeof(job->text), "%.127s", r < 0 ? kv_error_text() : "");
		if (kv_socket_send(fd, job, sizeof(*job), NULL, 0, 0) < 0 || !memory)
			break;
		if (kv_socket_receive(fd, &message, sizeof(message), NULL, 0, NULL, 0) <
		    (int64_t)sizeof(*job))
			break;
		r = do_job(memory, &message);
	}
	/* The arena is left to the end of the process: a broken context has nothing to say. */
	return r < 0;
}
