/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The worker's side of a mover: starting it, giving it dirty extents to zero, and starting another when
 * it dies. What a dead mover was zeroing is dirty again: nothing is handed out half done.
 *
 *	spawn -> starting -> ready <-> at work       failed or overdue: killed
 *	  ^                                                    |
 *	  +--- pause, longer while nothing succeeds <-- ended (its pidfd says so)
 *
 * A process in a call of the driver ends when that returns, which may take it seconds. Nobody waits for
 * that: until then only what it was writing to stays out of use, and no other is started. So it is
 * also with the mover of a worker that has died, which the keeper kills and the next worker finds.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
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
/* What was given piecemeal is zeroed by one job all the same: each costs the worker two system calls. */
#define MOST_RUNS 256u
#define RESTART_DELAY (200 * KV_MSEC)
#define MOST_DOUBLINGS 6u /* of the delay, while nothing succeeds */
/* One is copied, one waits in its socket. */
#define COPIES 2u
/* A mover that says nothing for so long is taken for dead. */
#define JOB_WAIT (30 * KV_SEC)
/* How often it is said that one that was killed has not ended. */
#define END_WARN (10 * KV_SEC)

struct kv_mover {
	struct kv_daemon *daemon;
	uint32_t gpu;
	pid_t pid; /* 0: none runs */
	int fd, pidfd;
	struct kv_watch *watch, *end_watch;
	struct kv_timer *timer; /* job overdue, time to start another, or to say that it doesn't end */
	bool ready;
	bool ending;	  /* it was killed, and has yet to end */
	bool is_former;	  /* it was another worker's, that has died */
	uint32_t n_sent;  /* descriptors of the arena that it has been sent */
	int64_t pause;	  /* before another is started */
	int64_t ended_ns; /* when it was killed */
	uint64_t number;	/* of the job that was given last */
	uint32_t n_runs;	/* of extents that are being zeroed */
	int32_t runs[MOST_RUNS][2]; /* first, and how many */
	uint32_t n_copies;	/* batches of compact.c that it has been given */
	bool renewing;		/* isolate.c: that extent gets new memory */
	uint64_t scrubbed;
	uint32_t n_failures; /* since a job succeeded, or nothing was wrong but its death */
	char error[96];	     /* the last one; "": none since */
};

static void failed(struct kv_mover *m, const char *why);

/* As much of the arena as its queue takes: it may take a while until it reads. 0; -EAGAIN; negative */
static int send_arena(struct kv_mover *m)
{
	const struct kv_arena *arena = m->daemon->gpus[m->gpu].arena;
	struct kv_mover_arena part = { .export = arena->export };
	const uint32_t n = arena->export.n_fds;
	uint32_t i = m->n_sent;

	do {
		int r;

		while (i < n && arena->fds[i] < 0)
			i++;
		part.first_fd = i;
		while (i < n && i - part.first_fd < KV_WIRE_MAX_FDS && arena->fds[i] >= 0)
			i++;
		part.n_fds = i - part.first_fd;
		r = kv_socket_send(m->fd, &part, sizeof(part), arena->fds + part.first_fd, part.n_fds, 1);
		if (r < 0)
			return r;
		m->n_sent = i;
	} while (i < n);
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
	return kv_keeping_put(&m->daemon->keeping, KV_DEPOSIT_MOVER,
			      KV_DEPOSIT_MOVER_ID(m->gpu, m->pid), &m->pidfd, 1);
}

static void on_message(uint32_t events, void *arg);
static void on_end(uint32_t events, void *arg);

static int watch_end(struct kv_mover *m)
{
	return kv_loop_watch(m->daemon->loop, m->pidfd, KV_LOOP_IN, on_end, m, &m->end_watch);
}

/* Watches the socket, for room in its queue as long as there is something to send. */
static int begin_sending(struct kv_mover *m)
{
	int r = send_arena(m);
	bool more = r == -EAGAIN || r == -ETOOMANYREFS;

	if (r < 0 && !more)
		return r;
	return kv_loop_watch(m->daemon->loop, m->fd, KV_LOOP_IN | (more ? KV_LOOP_OUT : 0),
			     on_message, m, &m->watch);
}

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
	m->n_sent = 0;
	m->ready = m->is_former = false;
	if (r < 0) {
		m->pid = 0;
		return r;
	}
	m->pidfd = (int)syscall(SYS_pidfd_open, m->pid, 0);
	r = m->pidfd < 0 ? -errno : watch_end(m);
	if (!r)
		r = deposit(m);
	if (!r)
		r = begin_sending(m);
	kv_timer_set(m->timer, JOB_WAIT);
	return r;
}

/* It is gone: what it was at is not done, and nobody writes there any more. */
static void ended(struct kv_mover *m)
{
	m->end_watch = kv_watch_free(m->end_watch);
	m->pidfd = kv_close(m->pidfd);
	if (m->pid > 0) {
		if (!m->is_former)
			waitpid(m->pid, NULL, 0);
		kv_keeping_drop(&m->daemon->keeping, KV_DEPOSIT_MOVER,
				KV_DEPOSIT_MOVER_ID(m->gpu, m->pid));
	}
	m->pid = 0;
	m->ending = false;
	for (uint32_t i = 0; i < m->n_runs; i++)
		kv_extents_scrub_failed(&m->daemon->extents, m->gpu, (uint32_t)m->runs[i][0],
					(uint32_t)m->runs[i][1]);
	m->n_runs = 0;
	m->renewing = false;
	for (; m->n_copies; m->n_copies--)
		kv_compact_done(m->daemon, m->gpu, false);
	if (m->is_former)
		kv_compact_former_ended(m->daemon);
	kv_timer_set(m->timer, m->pause);
}

/* Says no more to it, and hears no more of it. */
static void kill_it(struct kv_mover *m)
{
	m->watch = kv_watch_free(m->watch);
	m->fd = kv_close(m->fd);
	m->ready = false;
	if (m->pidfd >= 0)
		syscall(SYS_pidfd_send_signal, m->pidfd, SIGKILL, NULL, 0);
	else if (m->pid > 0)
		kill(m->pid, SIGKILL);
}

static void failed(struct kv_mover *m, const char *why)
{
	uint32_t doublings = m->n_failures < MOST_DOUBLINGS ? m->n_failures : MOST_DOUBLINGS;

	kv_log(KV_LOG_WARN, "mover of device %u (pid %d): %s; another is started", m->gpu, m->pid, why);
	/* One that was killed while it had nothing to do says nothing of the device. */
	m->n_failures += !m->ready || m->n_runs || m->n_copies;
	snprintf(m->error, sizeof(m->error), "%s", why);
	m->pause = RESTART_DELAY << doublings;
	kill_it(m);
	m->ending = true;
	m->ended_ns = kv_now();
	/* Without a watch nobody would hear of its end: there was no descriptor for one, or no memory. */
	if (!m->end_watch)
		ended(m);
	else
		kv_timer_set(m->timer, END_WARN);
}

static void on_end(uint32_t events, void *arg)
{
	struct kv_mover *m = arg;

	(void)events;
	if (!m->ending)
		failed(m, "it ended");
	if (m->ending)
		ended(m);
	kv_capacity_serve(m->daemon);
}

static void say_that_it_stays(struct kv_mover *m)
{
	snprintf(m->error, sizeof(m->error), "process %d was killed %lld s ago and has not ended",
		 m->pid, (long long)((kv_now() - m->ended_ns) / KV_SEC));
	kv_log(KV_LOG_WARN, "mover of device %u: %s; what it was zeroing or copying to stays out of "
	       "use, and no other is started", m->gpu, m->error);
	kv_timer_set(m->timer, END_WARN);
}

static void overdue(void *arg)
{
	struct kv_mover *m = arg;
	int r;

	if (m->ending) {
		say_that_it_stays(m);
		return;
	}
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
	m->n_copies++;
	r = kv_socket_send(m->fd, &message, size, NULL, 0, 1);
	if (r < 0)
		failed(m, strerror(-r));
	else
		kv_timer_set(m->timer, JOB_WAIT);
}

/* Dirty extents, up to @most of them, for one job. */
static void gather(struct kv_mover *m, uint32_t most)
{
	uint32_t at = 0;

	while (most && m->n_runs < MOST_RUNS) {
		uint32_t first, n = kv_extents_scrub_next(&m->daemon->extents, m->gpu, most, &at, &first);

		if (!n)
			return;
		m->runs[m->n_runs][0] = (int32_t)first;
		m->runs[m->n_runs++][1] = (int32_t)n;
		most -= n;
	}
}

static void gather_isolated(struct kv_mover *m)
{
	uint32_t first = 0, n = kv_isolate_next(m->daemon, m->gpu, &first, &m->renewing);

	m->runs[0][0] = (int32_t)first;
	m->runs[0][1] = (int32_t)n;
	m->n_runs = n > 0;
}

static void give_job(struct kv_mover *m)
{
	struct kv_extents *e = &m->daemon->extents;
	bool host = m->daemon->gpus[m->gpu].arena->export.kind == KV_EXPORT_HOST;
	uint64_t job_bytes = host ? JOB_BYTES : DEVICE_JOB_BYTES;
	const struct kv_mover_copy *copy;
	struct {
		struct kv_mover_job job;
		int32_t runs[MOST_RUNS][2];
	} message = { .job.op = KV_MOVER_ZERO };
	uint32_t more;
	int r;

	if (!m->ready || m->n_runs || m->n_copies == COPIES)
		return;
	copy = kv_compact_job(m->daemon, m->gpu);
	if (copy)
		give_copy(m, copy);
	if (m->n_copies)
		return;
	if (m->daemon->isolation)
		gather_isolated(m);
	else
		gather(m, job_bytes > e->bytes ? (uint32_t)(job_bytes / e->bytes) : 1);
	if (!m->n_runs)
		return;
	if (m->renewing)
		message.job.op = KV_MOVER_RENEW;
	more = m->n_runs - 1;
	message.job.number = ++m->number;
	message.job.offset = (uint64_t)m->runs[0][0] * e->bytes;
	message.job.bytes = (uint64_t)m->runs[0][1] * e->bytes;
	message.job.n_pairs = more;
	message.job.unit_log2 = (uint32_t)__builtin_ctzll(e->bytes);
	memcpy(message.runs, m->runs + 1, more * sizeof(m->runs[0]));
	r = kv_socket_send(m->fd, &message, sizeof(message.job) + more * sizeof(m->runs[0]), NULL,
			   0, 1);
	if (r < 0)
		failed(m, strerror(-r));
	else
		kv_timer_set(m->timer, JOB_WAIT);
}

static void cleaned(struct kv_mover *m)
{
	struct kv_extents *e = &m->daemon->extents;

	for (uint32_t i = 0; i < m->n_runs; i++) {
		uint32_t first = (uint32_t)m->runs[i][0], n = (uint32_t)m->runs[i][1];

		kv_extents_cleaned(e, m->gpu, first, n);
		m->scrubbed += (uint64_t)n * e->bytes;
	}
	m->n_runs = 0;
	m->n_failures = 0;
	m->error[0] = 0;
}

/* Jobs are done in the order in which they were given. */
static bool is_next(const struct kv_mover *m, uint64_t number)
{
	uint32_t under_way = m->n_copies + (m->n_runs > 0);

	return under_way && number == m->number + 1 - under_way;
}

static void on_answer(struct kv_mover *m)
{
	struct kv_daemon *d = m->daemon;
	kv_cleanup(kv_closep) int new_fd = -1;
	struct kv_mover_job job;
	int64_t n = kv_socket_receive(m->fd, &job, sizeof(job), &new_fd, 1, NULL, 1);

	if (n == -EAGAIN)
		return;
	if (n != sizeof(job) || (m->ready && !is_next(m, job.number))) {
		failed(m, n == 0 ? "it ended" : "an answer that makes no sense");
		return;
	}
	if (m->ready && m->renewing && job.result == -ENOMEM) {
		m->n_runs = 0;
		m->renewing = false;
		kv_isolate_withheld(d, m->gpu, (uint32_t)m->runs[0][0]);
		kv_timer_set(m->timer, -1);
		give_job(m);
		return;
	}
	if (job.result < 0 || (m->ready && m->renewing && new_fd < 0)) {
		job.text[sizeof(job.text) - 1] = 0;
		failed(m, job.text);
		return;
	}
	kv_timer_set(m->timer, -1);
	if (!m->ready) {
		m->ready = true;
	} else if (m->n_copies) {
		if (--m->n_copies)
			kv_timer_set(m->timer, JOB_WAIT);
		kv_compact_done(d, m->gpu, true);
	} else if (m->renewing && kv_isolate_renewed(d, m->gpu, (uint32_t)m->runs[0][0], kv_steal_fd(&new_fd)) < 0) {
		m->n_runs = 0;
		m->renewing = false;
		kv_isolate_withheld(d, m->gpu, (uint32_t)m->runs[0][0]);
	} else {
		m->renewing = false;
		cleaned(m);
	}
	give_job(m);
}

static void on_message(uint32_t events, void *arg)
{
	struct kv_mover *m = arg;
	uint64_t start = kv_thread_ns();
	int r;

	if (events & KV_LOOP_OUT) {
		r = send_arena(m);
		if (!r)
			r = kv_watch_events(m->watch, KV_LOOP_IN);
		if (r < 0 && r != -EAGAIN && r != -ETOOMANYREFS) {
			failed(m, strerror(-r));
			return;
		}
	}
	on_answer(m);
	m->daemon->moving_ns += kv_thread_ns() - start;
	kv_capacity_serve(m->daemon);
}

static int mover_new(struct kv_daemon *d, uint32_t gpu)
{
	struct kv_mover *m = calloc(1, sizeof(*m));

	if (!m)
		return kv_error(-ENOMEM, "no memory for the mover of device %u", gpu);
	m->daemon = d;
	m->gpu = gpu;
	m->fd = m->pidfd = -1;
	d->gpus[gpu].mover = m;
	return kv_timer_new(d->loop, overdue, m, &m->timer);
}

int kv_mover_start(struct kv_daemon *d, uint32_t gpu)
{
	int r;

	if (d->gpus[gpu].mover) /* the former one has yet to end */
		return 0;
	r = mover_new(d, gpu);
	return r < 0 ? r : spawn(d->gpus[gpu].mover);
}

int kv_mover_adopt(struct kv_daemon *d, uint32_t gpu, pid_t pid, int pidfd)
{
	kv_cleanup(kv_closep) int fd = pidfd;
	struct pollfd end = { .fd = fd, .events = POLLIN };
	struct kv_mover *m;
	int r;

	if (gpu >= d->n_gpus || d->gpus[gpu].mover || poll(&end, 1, 0) == 1) {
		kv_keeping_drop(&d->keeping, KV_DEPOSIT_MOVER, KV_DEPOSIT_MOVER_ID(gpu, pid));
		return 0;
	}
	r = mover_new(d, gpu);
	if (r < 0)
		return r;
	m = d->gpus[gpu].mover;
	m->pid = pid;
	m->pidfd = kv_steal_fd(&fd);
	m->ending = m->is_former = true;
	m->ended_ns = kv_now();
	kv_timer_set(m->timer, END_WARN);
	return watch_end(m);
}

bool kv_mover_is_ending(const struct kv_mover *m)
{
	return m && m->ending;
}

bool kv_mover_is_former(const struct kv_mover *m)
{
	return m && m->is_former;
}

/* The keeper, who has its pidfd, sees to it that it has ended before this one's memory is used. */
void kv_mover_stop(struct kv_gpu_unit *gpu)
{
	struct kv_mover *m = gpu->mover;

	if (!m)
		return;
	kill_it(m);
	kv_watch_free(m->end_watch);
	kv_close(m->pidfd);
	kv_timer_free(m->timer);
	free(m);
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
