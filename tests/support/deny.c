/* SPDX-License-Identifier: Apache-2.0 */
/*
 * deny CALL... -- COMMAND...: run a command under a seccomp filter that answers EPERM to these system
 * calls, as container profiles do. Exit status 77 where no filter can be set.
 */
#include <err.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static const struct {
	const char *name;
	unsigned int nr;
} calls[] = {
	{"execveat", SYS_execveat},
	{"io_uring_enter", SYS_io_uring_enter},
	{"io_uring_setup", SYS_io_uring_setup},
	{"membarrier", SYS_membarrier},
	{"memfd_create", SYS_memfd_create},
	{"pidfd_open", SYS_pidfd_open},
	{"unshare", SYS_unshare},
};

static unsigned int number_of(const char *name)
{
	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++)
		if (!strcmp(calls[i].name, name))
			return calls[i].nr;
	errx(2, "'%s' is not in the table of calls", name);
}

int main(int argc, char **argv)
{
	struct sock_filter filter[64] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
	struct sock_fprog program = {.filter = filter};
	unsigned short n = 1;
	int i;

	for (i = 1; i < argc && strcmp(argv[i], "--") && n < 60; i++) {
		filter[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number_of(argv[i]), 0, 1);
		filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
	}
	filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	program.len = n;
	if (i + 1 >= argc)
		errx(2, "deny CALL... -- COMMAND...");
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
	    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0)
		err(77, "seccomp");
	execvp(argv[i + 1], argv + i + 1);
	err(127, "%s", argv[i + 1]);
}
