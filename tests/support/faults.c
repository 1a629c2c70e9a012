/* SPDX-License-Identifier: Apache-2.0 */
/*
 * LD_PRELOAD of a daemon in a test. While the file $KV_FAULT_MOVER is there, every job that a mover
 * is given is one it doesn't know, so that it answers with an error. When the file $KV_FAULT_URING
 * appears, the worker's io_uring is refused; who is refused removes the file.
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/mover.h"

struct io_uring;
struct io_uring_cqe;
struct __kernel_timespec;

int io_uring_submit_and_wait_timeout(struct io_uring *ring, struct io_uring_cqe **cqe, unsigned n,
				     struct __kernel_timespec *ts, sigset_t *mask);

static bool is_in(const char *process)
{
	char name[17] = "";

	return !prctl(PR_GET_NAME, name) && !strcmp(name, process);
}

__attribute__((visibility("default"))) ssize_t recvmsg(int fd, struct msghdr *msg, int flags)
{
	static ssize_t (*real)(int, struct msghdr *, int);
	const char *path = getenv("KV_FAULT_MOVER");
	struct kv_mover_job *job = msg->msg_iov->iov_base;
	ssize_t n;

	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "recvmsg");
	n = real(fd, msg, flags);
	if (n == sizeof(*job) && path && is_in("kvcached-mover") && !access(path, F_OK))
		job->op = 77;
	return n;
}

__attribute__((visibility("default"))) int
io_uring_submit_and_wait_timeout(struct io_uring *ring, struct io_uring_cqe **cqe, unsigned n,
				 struct __kernel_timespec *ts, sigset_t *mask)
{
	static int (*real)(struct io_uring *, struct io_uring_cqe **, unsigned,
			   struct __kernel_timespec *, sigset_t *);
	const char *path = getenv("KV_FAULT_URING");

	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "io_uring_submit_and_wait_timeout");
	if (path && is_in("kvcached-worker") && !unlink(path))
		return -ENOSYS;
	return real(ring, cqe, n, ts, mask);
}
