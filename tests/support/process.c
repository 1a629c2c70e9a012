/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/daemon.h"
#include "tests/support/process.h"

struct process *process_start(void (*run)(struct process *self, void *arg), void *arg)
{
	struct process *p = calloc(1, sizeof(*p));
	pid_t parent = getpid();
	int pair[2];

	ck_assert_ptr_nonnull(p);
	ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	p->pid = fork();
	expect(p->pid >= 0, "fork");
	if (p->pid) {
		close(pair[1]);
		p->fd = pair[0];
		return p;
	}
	close(pair[0]);
	p->fd = pair[1];
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(1);
	run(p, arg);
	_exit(0);
}

static void send_number(struct process *p, int64_t number)
{
	expect(send(p->fd, &number, sizeof(number), MSG_NOSIGNAL) == sizeof(number),
	       "the other process has gone");
}

static int64_t receive_number(struct process *p)
{
	struct pollfd poll_fd = {.fd = p->fd, .events = POLLIN};
	int64_t number;
	int r;

	do
		r = poll(&poll_fd, 1, DEADLINE_MS);
	while (r < 0 && errno == EINTR);
	expect(r == 1, "process %d says nothing", p->pid);
	expect(recv(p->fd, &number, sizeof(number), 0) == sizeof(number),
	       "process %d has ended too early", p->pid);
	return number;
}

void process_say(struct process *self, int64_t number)
{
	send_number(self, number);
}

void process_wait(struct process *self)
{
	receive_number(self);
}

void process_become(uid_t uid, gid_t gid)
{
	expect(!setgroups(0, NULL) && !setresgid(gid, gid, gid) && !setresuid(uid, uid, uid),
	       "this process can't become user %u", uid);
	prctl(PR_SET_PDEATHSIG, SIGKILL); /* becoming another ends it */
}

int64_t process_hear(struct process *p)
{
	return receive_number(p);
}

void process_go(struct process *p)
{
	send_number(p, 0);
}

static int wait_for(struct process *p)
{
	int64_t deadline = now_ns() + (int64_t)DEADLINE_MS * 1000000;
	int status;

	while (waitpid(p->pid, &status, WNOHANG) == 0) {
		expect(now_ns() < deadline, "process %d doesn't end", p->pid);
		sleep_ms(1);
	}
	close(p->fd);
	free(p);
	return status;
}

void process_end(struct process *p)
{
	int status = wait_for(p);

	expect(WIFEXITED(status) && !WEXITSTATUS(status), "another process failed: status %#x",
	       status);
}

void process_kill(struct process *p)
{
	ck_assert_int_eq(kill(p->pid, SIGKILL), 0);
	wait_for(p);
}

void process_died(struct process *p)
{
	int status = wait_for(p);

	expect(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "status %#x, not SIGKILL",
	       status);
}
