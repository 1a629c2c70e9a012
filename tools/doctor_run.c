/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One probe in a child of its own:
 *
 *	kvctl --fork--> probe (leads a process group) --fork--> its helpers
 *	      <-- findings, one packet each, "last" --
 *
 * It is over with "last", with the end of the probe's process, or with its deadline; then the group is
 * killed. A process that a driver keeps in the kernel can't be: it is left behind, and said so.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

#include "include/internal/cleanup.h"
#include "include/internal/socket.h"
#include "include/kvcached/types.h"
#include "tools/doctor.h"

#define KILL_WAIT (2 * KV_SEC)

static void flush(struct kv_probing *p)
{
	if (p->pending)
		kv_socket_send(p->out, &p->finding, sizeof(p->finding), NULL, 0, 0);
	p->pending = false;
}

void kv_seen(struct kv_probing *p, enum kv_verdict verdict, const char *format, ...)
{
	va_list args;

	flush(p);
	memset(&p->finding, 0, sizeof(p->finding));
	p->finding.verdict = verdict;
	va_start(args, format);
	vsnprintf(p->finding.seen, sizeof(p->finding.seen), format, args);
	va_end(args);
	p->pending = true;
}

void kv_change(struct kv_probing *p, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(p->finding.change, sizeof(p->finding.change), format, args);
	va_end(args);
}

static void fclosep(FILE **f)
{
	if (*f)
		fclose(*f);
}

int64_t kv_number_in(const char *path, const char *key)
{
	kv_cleanup(fclosep) FILE *f = fopen(path, "re");
	char line[256];
	long long n;

	while (f && fgets(line, sizeof(line), f))
		if (!strncmp(line, key, strlen(key)) && sscanf(line + strlen(key), "%lld", &n) == 1)
			return n;
	return -1;
}

/* In the child. What a driver prints is not for whoever reads our answer. */
static void be_probe(const struct kv_probe *probe, struct kv_probing *p)
{
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);

	setpgid(0, 0);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	prctl(PR_SET_NAME, "kvctl-probe");
	signal(SIGXFSZ, SIG_IGN); /* a limit on files shall be an error, with words */
	for (int fd = 0; fd < 3 && null >= 0; fd++)
		dup2(null, fd);
	probe->run(p);
	flush(p);
	p->finding = (struct kv_finding){.last = 1};
	p->pending = true;
	flush(p);
	_exit(0);
}

/* Kills the group. Return: has the child ended? @ret_signal: by which signal before that, or 0. */
static bool end_probe(pid_t pid, bool is_over, int *ret_signal)
{
	const struct timespec pause = {.tv_nsec = 1000000};
	int64_t deadline = kv_now() + KILL_WAIT;
	int status = 0;
	pid_t r;

	*ret_signal = 0;
	/* An end that was seen is reported as it was, not as our SIGKILL. */
	if (is_over && waitpid(pid, &status, WNOHANG) == pid) {
		kill(-pid, SIGKILL);
		*ret_signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
		return true;
	}
	kill(-pid, SIGKILL);
	kill(pid, SIGKILL); /* it may not have made its group yet */
	while (!(r = waitpid(pid, &status, WNOHANG)) && kv_now() < deadline)
		nanosleep(&pause, NULL);
	return r != 0;
}

struct findings {
	struct kv_finding *items;
	uint32_t n, room;
};

static int add(struct findings *f, const struct kv_finding *finding)
{
	if (f->n == f->room) {
		struct kv_finding *more = realloc(f->items, (f->room + 16) * sizeof(*more));

		if (!more)
			return -ENOMEM;
		f->items = more;
		f->room += 16;
	}
	f->items[f->n++] = *finding;
	return 0;
}

static int add_text(struct findings *f, uint32_t verdict, const char *change, const char *format, ...)
	__attribute__((format(printf, 4, 5)));

static int add_text(struct findings *f, uint32_t verdict, const char *change, const char *format, ...)
{
	struct kv_finding finding = {.verdict = verdict};
	va_list args;

	va_start(args, format);
	vsnprintf(finding.seen, sizeof(finding.seen), format, args);
	va_end(args);
	snprintf(finding.change, sizeof(finding.change), "%s", change);
	return add(f, &finding);
}

/* Until its last finding. 0; -ETIMEDOUT; -EPIPE: it ended before; -ENOMEM */
static int collect(int in, int64_t deadline, struct findings *f)
{
	for (;;) {
		struct kv_finding finding;
		int64_t n;
		int r = kv_socket_wait(in, POLLIN, deadline);

		if (r < 0)
			return r;
		n = kv_socket_receive(in, &finding, sizeof(finding), NULL, 0, NULL, 1);
		if (n == -EAGAIN)
			continue;
		if (n != sizeof(finding))
			return -EPIPE;
		if (finding.last)
			return 0;
		if (add(f, &finding) < 0)
			return -ENOMEM;
	}
}

struct kv_finding *kv_probe_run(const struct kv_probe *probe, const char *socket, int64_t limit_ns,
				uint32_t *ret_n)
{
	struct kv_probing p = {.deadline = kv_now() + limit_ns, .socket = socket};
	struct findings f = {0};
	const struct timespec pause = {.tv_nsec = 20000000};
	int pair[2], signal_nr = 0, r;
	bool ended;
	pid_t pid;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0) {
		add_text(&f, KV_FAIL, "raise the limit that it names", "socket of a probe: %s",
			 strerror(errno));
		*ret_n = f.n;
		return f.items;
	}
	pid = fork();
	if (!pid) {
		kv_close(pair[0]);
		p.out = pair[1];
		be_probe(probe, &p);
	}
	kv_close(pair[1]);
	if (pid < 0) {
		add_text(&f, KV_FAIL, "raise RLIMIT_NPROC or the cgroup's pids.max",
			 "forking a probe: %s", strerror(errno));
	} else {
		r = collect(pair[0], p.deadline, &f);
		if (r == -EPIPE) /* its end comes a moment after that of its socket */
			nanosleep(&pause, NULL);
		ended = end_probe(pid, r == -EPIPE, &signal_nr);
		if (r == -ETIMEDOUT)
			add_text(&f, KV_FAIL, probe->if_stuck, "no answer within %.1f s%s",
				 (double)limit_ns / (double)KV_SEC,
				 ended ? "" : ", and it can't be killed: it waits in the kernel");
		else if (r == -EPIPE)
			add_text(&f, KV_FAIL, probe->if_stuck, "the probe was ended by signal %d (%s)",
				 signal_nr, signal_nr ? strsignal(signal_nr) : "none");
		else if (!f.n)
			add_text(&f, KV_FAIL, probe->if_stuck, "the probe said nothing");
	}
	kv_close(pair[0]);
	*ret_n = f.n;
	return f.items;
}
