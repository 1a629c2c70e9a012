/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "daemon/helper.h"
#include "include/internal/cleanup.h"
#include "include/internal/socket.h"
#include "include/kvcached/types.h"

#define STOP_TIMEOUT (10 * KV_SEC)
#define KILL_TIMEOUT (5 * KV_SEC)

/*
 * The signals of a terminal or a service manager go to all processes of the group; the parent alone
 * decides when a helper ends. The alarm ends a job that hangs after its parent died.
 */
static void become_helper(int64_t timeout_ns)
{
	static const int ignored[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE};
	sigset_t none;

	for (int i = 1; i < NSIG; i++)
		signal(i, SIG_DFL);
	for (size_t i = 0; i < sizeof(ignored) / sizeof(ignored[0]); i++)
		signal(ignored[i], SIG_IGN);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	alarm((unsigned int)(timeout_ns / KV_SEC) + 10);
	prctl(PR_SET_NAME, "kvcached-helper");
}

int kv_helper_start(kv_helper_job *job, const void *arg, int64_t timeout_ns, struct kv_helper *ret)
{
	kv_cleanup(kv_closep) int parent = -1; /* without pidfds, the socket's end alone tells */
	int sockets[2];
	pid_t pid;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) < 0)
		return kv_error(-errno, "socket of a helper process: %s", strerror(errno));
	parent = (int)syscall(SYS_pidfd_open, getpid(), 0);
	pid = fork();
	if (pid < 0) {
		int r = kv_error(-errno, "forking a helper process: %s", strerror(errno));

		kv_close(sockets[0]);
		kv_close(sockets[1]);
		return r;
	}
	if (!pid) {
		struct kv_helper_end end = {.socket = sockets[1], .parent = parent};

		kv_close(sockets[0]);
		become_helper(timeout_ns);
		job(&end, arg);
		_exit(0);
	}
	kv_close(sockets[1]);
	ret->pid = pid;
	ret->socket = sockets[0];
	return 0;
}

/*
 * Waits until the child has ended, without reaping it if @leave. Return: has it (or was it reaped
 * by somebody else)?
 */
static bool has_ended(pid_t pid, bool leave, int64_t timeout_ns, siginfo_t *ret)
{
	const struct timespec pause = {.tv_nsec = 500000};
	const int64_t deadline_ns = kv_now() + timeout_ns;

	for (;;) {
		memset(ret, 0, sizeof(*ret));
		if (waitid(P_PID, (id_t)pid, ret, WEXITED | WNOHANG | (leave ? WNOWAIT : 0)) < 0 ||
		    ret->si_pid)
			return true;
		if (kv_now() > deadline_ns)
			return false;
		nanosleep(&pause, NULL);
	}
}

/* The socket has closed with no answer. Why? kv_helper_stop() reaps. */
static int died(pid_t pid)
{
	siginfo_t info;

	if (has_ended(pid, true, KILL_TIMEOUT, &info) && info.si_pid && info.si_code != CLD_EXITED)
		return kv_error(-EIO, "the helper process was ended by signal %d", info.si_status);
	return kv_error(-EIO, "the helper process ended without an answer");
}

static int receive(const struct kv_helper *helper, int64_t deadline_ns, int *fds, uint32_t n_fds,
		   uint32_t *n_got, struct kv_helper_reply *reply)
{
	uint32_t n;
	int64_t size;
	int r;

	do {
		r = kv_socket_wait(helper->socket, POLLIN, deadline_ns);
		if (r == -ETIMEDOUT)
			return kv_error(r, "the helper process did not answer in time");
		if (r < 0)
			return kv_error(r, "waiting for a helper process: %s", strerror(-r));
		size = kv_socket_receive(helper->socket, reply, sizeof(*reply),
					 fds ? fds + *n_got : NULL, n_fds - *n_got, &n, 1);
		if (size == -EMSGSIZE)
			return kv_error(-EMFILE,
					"file descriptor %u of %u did not arrive: this process may "
					"have no more open files (RLIMIT_NOFILE)",
					*n_got, n_fds);
		if (size < 0)
			return kv_error((int)size, "answer of a helper process: %s",
					strerror((int)-size));
		if (size == 0)
			return died(helper->pid);
		*n_got += n;
	} while (size != sizeof(*reply) || !reply->last);

	if (reply->r < 0)
		return kv_error(reply->r, "%s", reply->text);
	if (*n_got != n_fds)
		return kv_error(-EIO, "the helper process sent %u file descriptors, %u expected",
				*n_got, n_fds);
	return 0;
}

int kv_helper_receive(const struct kv_helper *helper, int64_t timeout_ns, int *fds, uint32_t n_fds,
		      struct kv_helper_reply *ret)
{
	uint32_t n_got = 0;
	int r;

	r = receive(helper, kv_now() + timeout_ns, fds, n_fds, &n_got, ret);
	while (r < 0 && n_got)
		kv_close(fds[--n_got]);
	return r;
}

void kv_helper_stop(struct kv_helper *helper)
{
	siginfo_t info;

	helper->socket = kv_close(helper->socket);
	if (!has_ended(helper->pid, false, STOP_TIMEOUT, &info)) {
		kill(helper->pid, SIGKILL);
		has_ended(helper->pid, false, KILL_TIMEOUT, &info); /* or hangs in the kernel */
	}
	helper->pid = 0;
}

int kv_helper_run(kv_helper_job *job, const void *arg, int64_t timeout_ns, int *fds, uint32_t n_fds,
		  struct kv_helper_reply *ret)
{
	struct kv_helper helper;
	int r;

	r = kv_helper_start(job, arg, timeout_ns, &helper);
	if (r < 0)
		return r;
	r = kv_helper_receive(&helper, timeout_ns, fds, n_fds, ret);
	if (r == -ETIMEDOUT)
		kill(helper.pid, SIGKILL);
	kv_helper_stop(&helper);
	return r;
}

int kv_helper_send_fds(const struct kv_helper_end *end, const int *fds, uint32_t n_fds)
{
	char more = 0;
	int r = kv_socket_send(end->socket, &more, 1, fds, n_fds, 0);

	return r < 0 ? kv_error(r, "sending %u file descriptors: %s", n_fds, strerror(-r)) : 0;
}

void kv_helper_reply(const struct kv_helper_end *end, int r, struct kv_helper_reply *reply)
{
	reply->r = r;
	reply->last = 1;
	if (r < 0)
		snprintf(reply->text, sizeof(reply->text), "%s", kv_error_text());
	kv_socket_send(end->socket, reply, sizeof(*reply), NULL, 0, 0);
}

void kv_helper_wait_for_stop(const struct kv_helper_end *end)
{
	struct pollfd fds[] = {{.fd = end->socket, .events = POLLIN},
			       {.fd = end->parent, .events = POLLIN}};

	alarm(0);
	while (poll(fds, 2, -1) < 0 && errno == EINTR)
		;
}

void kv_helper_wait_for_close(const struct kv_helper_end *end)
{
	struct pollfd fd = {.fd = end->socket, .events = POLLIN};

	alarm(0);
	while (poll(&fd, 1, -1) < 0 && errno == EINTR)
		;
}

/* From @first to before @end, but never 0..2. */
static void close_range_to(int first, int end)
{
	if (first < 3)
		first = 3;
	if (first < end)
		close_range((unsigned int)first, (unsigned int)end - 1, 0);
}

void kv_helper_close_others(const struct kv_helper_end *end)
{
	int low = end->socket < end->parent ? end->socket : end->parent;
	int high = end->socket < end->parent ? end->parent : end->socket;

	close_range_to(0, low);
	close_range_to(low + 1, high);
	close_range_to(high + 1, INT_MAX);
}
