/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Helper processes: a forked child that does one job which this process must not do itself (load
 * the CUDA driver, hold a context), and answers over a socket pair with figures, a text and
 * descriptors. A job that hangs or crashes costs its helper and nothing else.
 *
 * Threads: the caller is expected to be the only thread, or to fork where that is safe.
 */
#ifndef KV_DAEMON_HELPER_H
#define KV_DAEMON_HELPER_H

#include <stdint.h>
#include <sys/types.h>

#include "daemon/device.h"

/* What a helper sends. Descriptors come ahead, in packets that are not the last. */
struct kv_helper_reply {
	int32_t r;
	uint32_t last;
	struct kv_device_info info;
	struct kv_arena_export export;
	char text[KV_ERROR_BYTES]; /* if r < 0 */
};

/* A helper as its parent sees it. */
struct kv_helper {
	pid_t pid;
	int socket;
};

/* The other end. */
struct kv_helper_end {
	int socket;
	int parent; /* pidfd of the parent, or -1 */
};

/* Runs in the helper, answers with kv_helper_reply() once; the process ends when it returns. */
typedef void kv_helper_job(const struct kv_helper_end *end, const void *arg);

/**
 * kv_helper_start() - fork a helper that runs @job
 * @timeout_ns: when it should have answered; long after that it ends by itself
 */
int kv_helper_start(kv_helper_job *job, const void *arg, int64_t timeout_ns, struct kv_helper *ret);

/**
 * kv_helper_receive() - its answer
 * @fds: [n_fds], filled in order, close-on-exec
 *
 * Return: what the job answered, with its text; -EIO if the helper died, or sent too few
 *         descriptors; -ETIMEDOUT; -EMFILE. On failure no descriptor is left open.
 */
int kv_helper_receive(const struct kv_helper *helper, int64_t timeout_ns, int *fds, uint32_t n_fds,
		      struct kv_helper_reply *ret);

/* Lets it go: it ends by itself, or is killed after 10 s. What it held is free again on return. */
void kv_helper_stop(struct kv_helper *helper);

/* Start, receive, stop. */
int kv_helper_run(kv_helper_job *job, const void *arg, int64_t timeout_ns, int *fds, uint32_t n_fds,
		  struct kv_helper_reply *ret);

/* For jobs. Descriptors stay the job's; @n_fds is at most KV_HELPER_MAX_FDS. */
#define KV_HELPER_MAX_FDS 250
int kv_helper_send_fds(const struct kv_helper_end *end, const int *fds, uint32_t n_fds);
/* Fills in r, last, and this thread's error text. */
void kv_helper_reply(const struct kv_helper_end *end, int r, struct kv_helper_reply *reply);
/* For a job that holds something: waits, however long, until the parent stops it or dies. */
void kv_helper_wait_for_stop(const struct kv_helper_end *end);
/* Likewise, but only until every other end of its socket is closed: its parent's death is no reason. */
void kv_helper_wait_for_close(const struct kv_helper_end *end);
/* Closes what came along by the fork, but 0..2 and @end. */
void kv_helper_close_others(const struct kv_helper_end *end);

#endif
