/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counting system calls: the work runs in a child that is stopped at every one of them (ptrace),
 * and those between two marks are counted. A mark is a call that nothing else makes: getppid().
 * Tracing costs microseconds a stop, so what is counted here isn't timed.
 */
#include <errno.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/bench/bench.h"

#define CHILD_SECONDS 120 /* then SIGALRM ends it */

/* What PTRACE_GET_SYSCALL_INFO fills in, up to the number of the call (the kernel's layout). */
struct syscall_info {
	uint8_t op;
	uint8_t pad[3];
	uint32_t arch;
	uint64_t instruction, stack;
	uint64_t number; /* if op is OP_ENTRY */
};

#define OP_ENTRY 1

void kv_bench_mark(void)
{
	syscall(SYS_getppid);
}

static void run(int (*work)(void *arg), void *arg)
{
	alarm(CHILD_SECONDS);
	if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0)
		_exit(errno == EPERM || errno == ENOSYS ? EPERM : ECHILD);
	raise(SIGSTOP);
	fflush(NULL);
	_exit(work(arg) ? ECHILD : 0);
}

/* From stop to stop until the child has ended. @status: of its first stop */
static int64_t count(pid_t pid, int status)
{
	int64_t n = 0;
	int marks = 0, signal_number = 0;

	while (WIFSTOPPED(status)) {
		struct syscall_info info = {0};

		if (WSTOPSIG(status) != (SIGTRAP | 0x80)) {
			/* A signal of its own, except for the stop that started it all. */
			signal_number = WSTOPSIG(status) == SIGSTOP ? 0 : WSTOPSIG(status);
		} else {
			signal_number = 0;
			if (ptrace(PTRACE_GET_SYSCALL_INFO, pid, sizeof(info), &info) < 0)
				return -errno;
			if (info.op == OP_ENTRY && info.number == SYS_getppid)
				marks++;
			else if (info.op == OP_ENTRY && marks == 1)
				n++;
		}
		if (ptrace(PTRACE_SYSCALL, pid, NULL, (long)signal_number) < 0)
			return -errno;
		if (waitpid(pid, &status, 0) < 0)
			return -errno;
	}
	return WIFEXITED(status) && !WEXITSTATUS(status) && marks == 2 ? n : -ECHILD;
}

int64_t kv_bench_count_syscalls(int (*work)(void *arg), void *arg)
{
	pid_t pid;
	int64_t r;
	int status;

	fflush(NULL);
	pid = fork();
	if (!pid)
		run(work, arg);
	if (pid < 0 || waitpid(pid, &status, 0) < 0)
		return -errno;
	if (WIFEXITED(status))
		return WEXITSTATUS(status) == EPERM ? -EPERM : -ECHILD;
	if (ptrace(PTRACE_SETOPTIONS, pid, NULL, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL) < 0)
		r = -errno;
	else
		r = count(pid, status);
	if (r < 0) {
		kill(pid, SIGKILL);
		waitpid(pid, &status, 0);
	}
	return r;
}
