/* SPDX-License-Identifier: Apache-2.0 */
/* kvctl doctor: what the kernel, or a sandbox in front of it, allows. */
#include <errno.h>
#include <fcntl.h>
#include <linux/membarrier.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>

#include "daemon/loop.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"
#include "include/kvcached/types.h"
#include "tools/doctor.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

static void seen_version(struct kv_probing *p)
{
	struct utsname u;
	unsigned int major = 0, minor = 0;

	uname(&u);
	sscanf(u.release, "%u.%u", &major, &minor);
	if (major > 5 || (major == 5 && minor >= 10)) {
		kv_seen(p, KV_FINE, "%s %s, %s", u.sysname, u.release, u.machine);
		return;
	}
	kv_seen(p, KV_FAIL, "%s %s: pidfds and sealed memfds are incomplete before 5.10", u.sysname,
		u.release);
	kv_change(p, "a kernel of 5.10 or newer");
}

/* execveat of a descriptor: how the keeper runs the same program again when its file was replaced. */
static bool can_execveat(void)
{
	char *const argv[] = {(char *)"true", NULL}, *const envp[] = {NULL};
	int fd = open("/bin/true", O_PATH | O_CLOEXEC), status = 0;
	pid_t pid;

	if (fd < 0)
		return true; /* nothing here to try it with */
	pid = fork();
	if (!pid) {
		syscall(SYS_execveat, fd, "", argv, envp, AT_EMPTY_PATH);
		_exit(126);
	}
	kv_close(fd);
	return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && !WEXITSTATUS(status);
}

void kv_probe_kernel(struct kv_probing *p)
{
	long barriers = syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0);

	seen_version(p);
	if (!can_execveat()) {
		kv_seen(p, KV_FAIL, "execveat() of a descriptor is refused: the keeper can't start a worker");
		kv_change(p, "allow execveat in the seccomp profile, and mount /proc");
	}
	if (barriers < 0 || !(barriers & MEMBARRIER_CMD_GLOBAL_EXPEDITED)) {
		kv_seen(p, KV_WARN, "membarrier() is refused: clients make a full barrier for each block "
			"they take, and idle leases are called back all the same");
		kv_change(p, "allow membarrier in the seccomp profile");
	}
}

static void seen_pidfd(struct kv_probing *p)
{
	struct pollfd death = {.fd = -1, .events = POLLIN};
	pid_t pid = fork();
	int r, errno_kept;

	if (!pid) {
		poll(NULL, 0, 20000);
		_exit(0);
	}
	death.fd = (int)syscall(SYS_pidfd_open, pid, 0);
	errno_kept = errno;
	r = death.fd < 0 ? -1 : (int)syscall(SYS_pidfd_send_signal, death.fd, SIGKILL, NULL, 0);
	if (r < 0)
		kill(pid, SIGKILL);
	if (death.fd < 0 || r < 0) {
		kv_seen(p, KV_FAIL, "%s: %s; a client's death can't be proven, so no client is accepted",
			death.fd < 0 ? "pidfd_open" : "pidfd_send_signal",
			strerror(death.fd < 0 ? errno_kept : errno));
		kv_change(p, "allow pidfd_open and pidfd_send_signal in the seccomp profile");
	} else if (poll(&death, 1, 3000) != 1) {
		kv_seen(p, KV_FAIL, "a killed process's pidfd says nothing for 3 s");
		kv_change(p, "a kernel whose pidfds can be polled (5.3), not an emulation of one");
	} else {
		kv_seen(p, KV_FINE, "a killed process is seen by its pidfd");
	}
	kv_close(death.fd);
	waitpid(pid, NULL, WNOHANG);
}

static void seen_peer(struct kv_probing *p)
{
	struct ucred who = {0};
	socklen_t size = sizeof(who);
	int pair[2], pidfd = -1, r;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return;
	r = getsockopt(pair[0], SOL_SOCKET, SO_PEERCRED, &who, &size);
	if (r < 0 || who.pid != getpid()) {
		kv_seen(p, KV_FAIL, "SO_PEERCRED names process %d for our own %d", who.pid, getpid());
		kv_change(p, "run where sockets carry credentials, not in an emulation");
	}
	size = sizeof(pidfd);
	if (!getsockopt(pair[0], SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size))
		kv_seen(p, KV_FINE, "SO_PEERPIDFD names a socket's process");
	else
		kv_seen(p, KV_FINE, "no SO_PEERPIDFD (%s): a client's process is found by its number "
			"while it is connected, which is as safe as long as daemon and clients see each "
			"other's numbers", strerror(errno));
	kv_close(pidfd);
	kv_close(pair[0]);
	kv_close(pair[1]);
}

void kv_probe_pidfd(struct kv_probing *p)
{
	seen_pidfd(p);
	seen_peer(p);
}

/* Pages as the daemon makes them: sealed, writable for us, and for others by a mapping of theirs. */
void kv_probe_memfd(struct kv_probing *p)
{
	const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
	kv_cleanup(kv_closep) int fd = memfd_create("kvctl-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	int64_t noexec = kv_number_in("/proc/sys/vm/memfd_noexec", "");
	void *pages = MAP_FAILED;

	if (fd < 0) {
		kv_seen(p, KV_FAIL, "memfd_create: %s%s", strerror(errno),
			noexec == 2 ? " (sysctl vm.memfd_noexec is 2)" : "");
		kv_change(p, noexec == 2 ? "sysctl -w vm.memfd_noexec=1" :
					   "allow memfd_create in the seccomp profile");
		return;
	}
	if (ftruncate(fd, 1 << 20) < 0 || fcntl(fd, F_ADD_SEALS, seals) < 0) {
		kv_seen(p, KV_FAIL, "a memfd of 1 MiB can't be made or sealed: %s", strerror(errno));
		kv_change(p, errno == EFBIG ? "raise RLIMIT_FSIZE (ulimit -f unlimited)" :
					      "a kernel whose memfds can be sealed");
		return;
	}
	pages = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (pages == MAP_FAILED) {
		kv_seen(p, KV_FAIL, "a memfd can't be mapped: %s", strerror(errno));
		kv_change(p, "raise RLIMIT_AS (ulimit -v unlimited)");
		return;
	}
	memset(pages, 1, 1 << 20);
	if (!ftruncate(fd, 0) || errno != EPERM) {
		kv_seen(p, KV_FAIL, "a sealed memfd could be truncated: a client could end the daemon");
		kv_change(p, "a kernel that keeps seals, not an emulation");
		return;
	}
	munmap(pages, 1 << 20);
	kv_seen(p, KV_FINE, "a memfd is made, sealed, mapped; truncating it is refused");
}

struct ring_test {
	struct kv_loop *loop;
	int fd;
	bool heard;
};

static void heard(uint32_t events, void *arg)
{
	struct ring_test *test = arg;
	uint64_t n;

	test->heard = (events & KV_LOOP_IN) && read(test->fd, &n, sizeof(n)) == sizeof(n);
}

/* The daemon's own loop, with a descriptor that becomes ready. 0; negative with text */
static int use_ring(struct kv_loop *loop)
{
	struct ring_test test = {.loop = loop, .fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK)};
	struct kv_watch *watch = NULL;
	int r;

	if (test.fd < 0)
		return kv_error(-errno, "eventfd: %s", strerror(errno));
	r = kv_loop_watch(loop, test.fd, KV_LOOP_IN, heard, &test, &watch);
	for (int i = 0; i < 20 && !r && !test.heard; i++)
		r = kv_loop_step(loop, 100 * KV_MSEC);
	kv_watch_free(watch);
	kv_close(test.fd);
	return r < 0 ? r : test.heard ? 0 : kv_error(-ETIME, "io_uring: a ready descriptor is not told");
}

void kv_probe_io_uring(struct kv_probing *p)
{
	kv_cleanup(kv_loop_freep) struct kv_loop *loop = NULL;
	int64_t disabled = kv_number_in("/proc/sys/kernel/io_uring_disabled", "");
	bool filtered = kv_number_in("/proc/self/status", "Seccomp:") == 2;
	int r = kv_loop_new(KV_LOOP_IO_URING, &loop);

	if (!r)
		r = use_ring(loop);
	if (!r) {
		kv_seen(p, KV_FINE, "a ring is made and tells that a descriptor is ready");
		return;
	}
	kv_seen(p, KV_WARN, "%s; kernel.io_uring_disabled is %s%s. kvcached takes epoll instead: the same "
		"service with more system calls", kv_error_text(),
		disabled < 0 ? "not there" : disabled == 0 ? "0" : disabled == 1 ? "1" : "2",
		filtered ? ", a seccomp filter is in force" : "");
	if (disabled > 0)
		kv_change(p, "sysctl -w kernel.io_uring_disabled=0%s",
			  disabled == 1 ? ", or make kvcached a member of kernel.io_uring_group" : "");
	else if (r == -ENOMEM)
		kv_change(p, "raise RLIMIT_MEMLOCK: LimitMEMLOCK=infinity in the unit, or ulimit -l");
	else if (filtered)
		kv_change(p, "allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp "
			  "profile (docker run --security-opt seccomp=PROFILE)");
	else
		kv_change(p, "nothing, or a kernel of 5.11 or newer with CONFIG_IO_URING");
}

void kv_probe_ptrace(struct kv_probing *p)
{
	int64_t scope = kv_number_in("/proc/sys/kernel/yama/ptrace_scope", "");

	kv_seen(p, KV_FINE, "kernel.yama.ptrace_scope is %s; descriptors go over the socket, so nothing here "
		"needs ptrace (engines that share tensors by pidfd_getfd on their own need 0, or to be "
		"each other's parents)", scope < 0 ? "not there" : scope == 0 ? "0" : scope == 1 ? "1" :
									     scope == 2 ? "2" : "3");
}
