/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The worker's side of a mover: starting it, giving it dirty extents to zero, and starting another when
 * it dies. What a dead mover was zeroing is dirty again: nothing is handed out half done.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/daemon.h"
#include "daemon/log.h"
#include "daemon/mover.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"

/* One job's bytes: small enough for a short queue, large enough to run at full speed. */
#define JOB_BYTES ((uint64_t)256 << 20)
#define DEVICE_JOB_BYTES ((uint64_t)1 << 30)
#define RESTART_DELAY (200 * KV_MSEC)
#define MOST_DOUBLINGS 6u /* of the delay, while nothing succeeds */
/* A mover that says nothing for so long is taken for dead. */
#define JOB_WAIT (30 * KV_SEC)

struct kv_mover {
	struct kv_daemon *daemon;
	uint32_t gpu;
	pid_t pid;
	int fd;
	struct kv_watch *watch;
	struct kv_timer *timer; /* job overdue, or time to start another */
	bool ready;
	uint64_t number;	/* of the job under way */
	uint32_t first, n;	/* extents being zeroed; n = 0: none */
	bool copying;		/* a batch of compact.c */
	uint64_t scrubbed;
	uint32_t n_failures; /* since a job succeeded, or nothing was wrong but its death */
	char error[96];	     /* the last one; "": none since */
};

static int send_arena(int fd, const struct kv_arena *arena)
{
	struct kv_mover_arena part = { .export = arena->export };
	uint32_t done = 0;

	do {
		uint32_t left = arena->export.n_fds - done;
		int r;

		part.first_fd = done;
		part.n_fds = left < KV_WIRE_MAX_FDS ? left : KV_WIRE_MAX_FDS;
		r = kv_socket_send(fd, &part, sizeof(part), arena->fds + done, part.n_fds, 0);
		if (r < 0)
			return r;
		done += part.n_fds;
	} while (done < arena->export.n_fds);
	return 0;
}

/* In the child: only what is safe between fork and exec. */
static void run_child(int fd, pid_t parent)
{
	char number[16];
	char *argv[] = { "kvcached-mover", "--mover", number, NULL };
	sigset_t none;

	snprintf(number, sizeof(number), "%d", fd);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent || fcntl(fd, F_SETFD, 0) < 0)
		_exit(1);
	execv("/proc/self/exe", argv);
	_exit(1);
}

/* Before it is given an arena the keeper can tell when it has ended: keeper.h. */
static int deposit(struct kv_mover *m)
{
	kv_cleanup(kv_closep) int pidfd = (int)syscall(SYS_pidfd_open, m->pid, 0);

	if (pidfd < 0)
		return -errno;
	return kv_keeping_put(&m->daemon->keeping, KV_DEPOSIT_MOVER, (uint64_t)m->pid, &pidfd, 1);
}

static void on_message(uint32_t events, void *arg);

static int spawn(struct kv_mover *m)
{
	pid_t parent = getpid();
	int pair[2], r;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return -errno;
	m->pid = fork();
	if (m->pid == 0)
		run_child(pair[1], parent);
	r = m->pid < 0 ? -errno : 0;
	kv_close(pair[1]);
	m->fd = pair[0];
	if (!r)
		r = deposit(m);
	if (!r)
		r = send_arena(m->fd, m->daemon->gpus[m->gpu].arena);
	if (!r)
		r = kv_loop_watch(m->daemon->loop, m->fd, KV_LOOP_IN, on_message, m, &m->watch);
	m->ready = false;
	kv_timer_set(m->timer, JOB_WAIT);
	return r;
}

static void end(struct kv_mover *m)
{
	m->watch = kv_watch_free(m->watch);
	m->fd = kv_close(m->fd);
	if (m->pid > 0) {
		kill(m->pid, SIGKILL);
		waitpid(m->pid, NULL, 0);
		kv_keeping_drop(&m->daemon->keeping, KV_DEPOSIT_MOVER, (uint64_t)m->pid);
	}
	m->pid = 0;
	m->ready = false;
	if (m->n)
		kv_extents_scrub_failed(&m->daemon->extents, m->gpu, m->first, m->n);
	m->n = 0;
	if (m->copying) {
		m->copying = false;
		kv_compact_done(m->daemon, m->gpu, false);
	}
}

static void failed(struct kv_mover *m, const char *why)
{
	uint32_t doublings = m->n_failures < MOST_DOUBLINGS ? m->n_failures : MOST_DOUBLINGS;

	kv_log(KV_LOG_WARN, "mover of device %u (pid %d): %s; another is started", m->gpu, m->pid, why);
	/* One that was killed while it had nothing to do says nothing of the device. */
	m->n_failures += !m->ready || m->n;
	snprintf(m->error, sizeof(m->error), "%s", why);
	end(m);
	kv_timer_set(m->timer, RESTART_DELAY << doublings);
}

static void overdue(void *arg)
{
	struct kv_mover *m = arg;
	int r;

	if (m->pid) {
		failed(m, "no answer in 30 s");
		return;
	}
	r = spawn(m);
	if (r < 0)
		failed(m, strerror(-r));
}

static void give_copy(struct kv_mover *m, const struct kv_mover_copy *copy)
{
	struct kv_mover_copy message;
	uint32_t size = (uint32_t)(offsetof(struct kv_mover_copy, pairs) +
				   copy->job.n_pairs * sizeof(copy->pairs[0]));
	int r;

	memcpy(&message, copy, size);
	message.job.number = ++m->number;
	m->copying = true;
	r = kv_socket_send(m->fd, &message, size, NULL, 0, 1);
	if (r < 0)
		failed(m, strerror(-r));
	else
		kv_timer_set(m->timer, JOB_WAIT);
}

static void give_job(struct kv_mover *m)
{
	struct kv_extents *e = &m->daemon->extents;
	struct kv_mover_job job = { .op = KV_MOVER_ZERO };
	bool host = m->daemon->gpus[m->gpu].arena->export.kind == KV_EXPORT_HOST;
	uint64_t job_bytes = host ? JOB_BYTES : DEVICE_JOB_BYTES;
	uint32_t most = job_bytes > e->bytes ? (uint32_t)(job_bytes / e->bytes) : 1;
	const struct kv_mover_copy *copy;
	int r;

	if (!m->ready || m->n || m->copying)
		return;
	copy = kv_compact_job(m->daemon, m->gpu);
	if (copy) {
		give_copy(m, copy);
		return;
	}
	m->n = kv_extents_scrub(e, m->gpu, most, &m->first);
	if (!m->n)
		return;
	job.number = ++m->number;
	job.offset = (uint64_t)m->first * e->bytes;
	job.bytes = (uint64_t)m->n * e->bytes;
	r = kv_socket_send(m->fd, &job, sizeof(job), NULL, 0, 1);
	if (r < 0)
		failed(m, strerror(-r));
	else
		kv_timer_set(m->timer, JOB_WAIT);
}

static void on_answer(struct kv_mover *m)
{
	struct kv_daemon *d = m->daemon;
	struct kv_mover_job job;
	int64_t n = kv_socket_receive(m->fd, &job, sizeof(job), NULL, 0, NULL, 1);

	if (n == -EAGAIN)
		return;
	if (n != sizeof(job) || (m->ready && ((!m->n && !m->copying) || job.number != m->number))) {
		failed(m, n == 0 ? "it ended" : "an answer that makes no sense");
		return;
	}
	if (job.result < 0) {
		job.text[sizeof(job.text) - 1] = 0;
		failed(m, job.text);
		return;
	}
	kv_timer_set(m->timer, -1);
	if (!m->ready) {
		m->ready = true;
	} else if (m->copying) {
		m->copying = false;
		kv_compact_done(d, m->gpu, true);
	} else {
		kv_extents_cleaned(&d->extents, m->gpu, m->first, m->n);
		m->scrubbed += (uint64_t)m->n * d->extents.bytes;
		m->n_failures = 0;
		m->error[0] = 0;
		m->n = 0;
	}
	give_job(m);
}

static void on_message(uint32_t events, void *arg)
{
	struct kv_mover *m = arg;
	uint64_t start = kv_thread_ns();

	(void)events;
	on_answer(m);
	m->daemon->moving_ns += kv_thread_ns() - start;
	kv_capacity_serve(m->daemon);
}

int kv_mover_start(struct kv_daemon *d, uint32_t gpu)
{
	struct kv_mover *m = calloc(1, sizeof(*m));
	int r;

	if (!m)
		return -ENOMEM;
	m->daemon = d;
	m->gpu = gpu;
	m->fd = -1;
	d->gpus[gpu].mover = m;
	r = kv_timer_new(d->loop, overdue, m, &m->timer);
	return r < 0 ? r : spawn(m);
}

void kv_mover_stop(struct kv_gpu_unit *gpu)
{
	if (!gpu->mover)
		return;
	end(gpu->mover);
	kv_timer_free(gpu->mover->timer);
	free(gpu->mover);
	gpu->mover = NULL;
}

void kv_mover_scrub(struct kv_daemon *d)
{
	for (uint32_t i = 0; i < d->n_gpus; i++) {
		if (d->gpus[i].mover)
			give_job(d->gpus[i].mover);
	}
}

uint64_t kv_mover_pid(const struct kv_mover *m)
{
	return m ? (uint64_t)m->pid : 0;
}

uint64_t kv_mover_scrubbed(const struct kv_mover *m)
{
	return m ? m->scrubbed : 0;
}

const char *kv_mover_error(const struct kv_mover *m)
{
	return m ? m->error : "";
}
