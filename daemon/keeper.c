/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The keeper process; keeper.h says what it is for and how deposits are ordered.
 *
 *   worker ends --> its packets are read to the end --> its movers are killed
 *               --> (a delay, if workers die too often) --> another is started --> READY
 *
 * Delays: a worker that had served is replaced at once, RESTARTS_AT_ONCE times in a row and then
 * once in REFILL; one that died before it served, after 0.1 s, then 0.2, 0.4 ... 5 s.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/keeper.h"
#include "daemon/log.h"
#include "daemon/service.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"
#include "include/kvcached/types.h"

#define RESTARTS_AT_ONCE 20
#define REFILL		 (100 * KV_MSEC)
#define FIRST_DELAY	 (100 * KV_MSEC)
#define LONGEST_DELAY	 (5 * KV_SEC)
/* A worker that is started again has nothing to create: it is taken for stuck after so long. */
#define READY_WAIT (60 * KV_SEC)
#define STOP_WAIT  (30 * KV_SEC)
#define CHILD_WAIT (10 * KV_SEC)

struct keeper {
	char **argv; /* of workers: argv[2] is the number of their socket */
	char fd_text[16];
	int listen_fd, signal_fd;
	int binary_fd; /* what workers run */
	int former_fd; /* what they ran before, until the new one has served; or -1 */
	struct kv_link deposits;

	pid_t worker; /* 0: none runs */
	int worker_fd;
	struct kv_link *to_hand; /* the next deposit to hand over; NULL: it has had START */
	bool listen_sent, ready, ever_ready, is_planned;
	int64_t started_ns;
	uint32_t restarts, n_failures, n_given_up;
	uint32_t at_once; /* restarts left that need no delay */
	int64_t refilled_ns, start_ns;
	struct kv_service service;
	int64_t alive_ns;	  /* when the worker last said so */
	int64_t stuck_ns;	  /* when it was killed for not saying so; 0: it was not */
	int64_t watchdog_due_ns;
	bool stopping;
	int64_t stop_ns;
	int status; /* to exit with */
	bool done;
};

static char **worker_arguments(struct keeper *k, int argc, char **argv)
{
	char **list = calloc((size_t)argc + 3, sizeof(*list));

	if (!list)
		return NULL;
	list[0] = argv[0];
	list[1] = (char *)"--worker";
	list[2] = k->fd_text;
	memcpy(list + 3, argv + 1, ((size_t)argc - 1) * sizeof(*list));
	return list;
}

/* In the child: only what is safe between fork and exec. */
static void run_worker(const struct keeper *k, int fd)
{
	sigset_t none;

	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	if (fcntl(fd, F_SETFD, 0) == 0)
		syscall(SYS_execveat, k->binary_fd, "", k->argv, environ, AT_EMPTY_PATH);
	_exit(126);
}

static void start_worker(struct keeper *k)
{
	int pair[2];

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0) {
		kv_log(KV_LOG_ERROR, "socket of a worker: %s", strerror(errno));
		k->start_ns = kv_now() + LONGEST_DELAY;
		return;
	}
	snprintf(k->fd_text, sizeof(k->fd_text), "%d", pair[1]);
	k->worker = fork();
	if (!k->worker)
		run_worker(k, pair[1]);
	kv_close(pair[1]);
	if (k->worker < 0) {
		kv_log(KV_LOG_ERROR, "starting a worker: %s", strerror(errno));
		kv_close(pair[0]);
		k->worker = 0;
		k->start_ns = kv_now() + LONGEST_DELAY;
		return;
	}
	k->worker_fd = pair[0];
	k->to_hand = k->deposits.next;
	k->listen_sent = k->ready = k->is_planned = false;
	k->started_ns = kv_now();
}

/* 0; -EAGAIN: it has to read first */
static int tell(struct keeper *k, const struct kv_keeper_msg *msg, const int *fds)
{
	int r = kv_socket_send(k->worker_fd, msg, sizeof(*msg), fds, msg->n_fds, 1);

	/* Too many descriptors under way counts as a full queue. Its death is found out elsewhere. */
	return r == -EAGAIN || r == -ETOOMANYREFS ? -EAGAIN : 0;
}

/* As much as its queue takes of: LISTEN, all deposits, START. */
static void hand_over(struct keeper *k)
{
	struct kv_keeper_msg msg = {.type = KV_KEEPER_LISTEN, .n_fds = 1};

	if (!k->listen_sent) {
		if (tell(k, &msg, &k->listen_fd))
			return;
		k->listen_sent = true;
	}
	for (; k->to_hand != &k->deposits; k->to_hand = k->to_hand->next) {
		struct kv_deposit *d = kv_container_of(k->to_hand, struct kv_deposit, link);

		msg = (struct kv_keeper_msg){.type = KV_KEEPER_DEPOSIT,
					     .kind = d->kind,
					     .id = d->id,
					     .part = d->part,
					     .n_fds = d->n_fds};
		if (tell(k, &msg, d->fds))
			return;
	}
	msg = (struct kv_keeper_msg){.type = KV_KEEPER_START,
				     .part = 1,
				     .restarts = k->restarts,
				     .n_given_up = k->n_given_up};
	if (!tell(k, &msg, NULL))
		k->to_hand = NULL;
}

static void take_ready(struct keeper *k)
{
	int64_t now = kv_now();

	if (k->ready)
		return;
	if (k->ever_ready)
		kv_log(KV_LOG_WARN, "worker (pid %d) serves, %lld ms after its start; restart %u",
		       k->worker, (long long)((now - k->started_ns) / KV_MSEC), k->restarts);
	if (!k->ever_ready)
		kv_service_tell(&k->service, "READY=1\nSTATUS=worker %d serves\n", k->worker);
	else
		kv_service_tell(&k->service, "STATUS=worker %d serves, restart %u\n", k->worker, k->restarts);
	k->ready = k->ever_ready = true;
	k->n_failures = 0;
	k->alive_ns = now;
	k->former_fd = kv_close(k->former_fd);
}

/* From now on workers run what @fd is; the one before stays at hand until it has proven good. */
static void take_binary(struct keeper *k, int fd)
{
	if (k->former_fd < 0)
		k->former_fd = k->binary_fd;
	else
		kv_close(k->binary_fd);
	k->binary_fd = fd;
}

/* @r: 0, or why it can't be kept. The worker is waiting, so there is room. */
static void answer(struct keeper *k, const struct kv_keeper_msg *deposit, int r)
{
	struct kv_keeper_msg msg = {.type = r < 0 ? KV_KEEPER_REFUSED : KV_KEEPER_KEPT,
				    .kind = deposit->kind,
				    .id = deposit->id,
				    .part = r < 0 ? (uint32_t)-r : deposit->part};

	if (r < 0)
		kv_log(KV_LOG_ERROR, "%u descriptors for the worker can't be kept: %s", deposit->n_fds,
		       strerror(-r));
	tell(k, &msg, NULL);
}

static void take(struct keeper *k, const struct kv_keeper_msg *msg, int *fds, uint32_t n_fds)
{
	uint32_t used = 0;

	if (msg->type == KV_KEEPER_DEPOSIT && msg->n_fds == n_fds) {
		used = n_fds;
		answer(k, msg, kv_deposits_put(&k->deposits, msg, fds));
	} else if (msg->type == KV_KEEPER_DROP) {
		kv_deposits_drop(&k->deposits, msg->kind, msg->id);
	} else if (msg->type == KV_KEEPER_READY) {
		take_ready(k);
	} else if (msg->type == KV_KEEPER_ALIVE) {
		k->alive_ns = kv_now();
	} else if (msg->type == KV_KEEPER_BINARY && n_fds <= 1) {
		used = n_fds;
		k->is_planned = true;
		if (n_fds)
			take_binary(k, fds[0]);
	} else {
		kv_log(KV_LOG_ERROR, "worker (pid %d): a message of type %u with %u descriptors",
		       k->worker, msg->type, n_fds);
	}
	while (used < n_fds)
		kv_close(fds[used++]);
}

/* All that the worker has sent. */
static void read_worker(struct keeper *k)
{
	int fds[KV_KEEPER_MAX_FDS];

	while (k->worker_fd >= 0) {
		struct kv_keeper_msg msg = {0};
		uint32_t n_fds = 0;
		int64_t n = kv_socket_receive(k->worker_fd, &msg, sizeof(msg), fds,
					      KV_KEEPER_MAX_FDS, &n_fds, 1);

		if (n == -EAGAIN)
			return;
		/* What came of its descriptors is closed again. */
		if (n == -EMSGSIZE) {
			if (msg.type == KV_KEEPER_DEPOSIT)
				answer(k, &msg, -EMFILE);
			continue;
		}
		if (n == sizeof(msg)) {
			take(k, &msg, fds, n_fds);
			continue;
		}
		while (n_fds)
			kv_close(fds[--n_fds]);
		if (n <= 0) /* its end; who waits for it sees the rest */
			k->worker_fd = kv_close(k->worker_fd);
	}
}

static int64_t delay_of(struct keeper *k, int64_t now)
{
	if (k->is_planned)
		return 0;
	if (!k->ready) {
		int64_t delay = FIRST_DELAY << (k->n_failures < 6 ? k->n_failures : 6);

		k->n_failures++;
		return delay < LONGEST_DELAY ? delay : LONGEST_DELAY;
	}
	while (k->at_once < RESTARTS_AT_ONCE && now - k->refilled_ns >= REFILL) {
		k->at_once++;
		k->refilled_ns += REFILL;
	}
	if (k->at_once == RESTARTS_AT_ONCE)
		k->refilled_ns = now;
	if (!k->at_once)
		return REFILL;
	k->at_once--;
	return 0;
}

static void say_how_it_ended(const struct keeper *k, int status, int64_t delay)
{
	char how[64], then[64] = "another is started";

	if (WIFSIGNALED(status))
		snprintf(how, sizeof(how), "was ended by signal %d (%s)", WTERMSIG(status),
			 strsignal(WTERMSIG(status)));
	else
		snprintf(how, sizeof(how), "ended with %d", WEXITSTATUS(status));
	if (delay)
		snprintf(then, sizeof(then), "another is started in %lld ms",
			 (long long)(delay / KV_MSEC));
	kv_log(KV_LOG_WARN, "worker (pid %d) %s after %lld ms%s; %s", k->worker, how,
	       (long long)((kv_now() - k->started_ns) / KV_MSEC), k->ready ? "" : ", before it served",
	       then);
}

static void worker_ended(struct keeper *k, int status)
{
	int64_t now = kv_now(), delay;

	read_worker(k);
	k->worker_fd = kv_close(k->worker_fd);
	if (k->stopping || !k->ever_ready) {
		/* It may be told to stop before it has got so far as to do that by itself. */
		k->status = k->stopping && WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM ? 0 :
			    WIFSIGNALED(status) ? 128 + WTERMSIG(status) :
						  WEXITSTATUS(status);
		k->done = true;
		return;
	}
	delay = delay_of(k, now);
	if (!k->is_planned)
		say_how_it_ended(k, status, delay);
	if (!k->ready && k->former_fd >= 0) {
		kv_log(KV_LOG_ERROR, "the new program did not serve: back to the one before");
		kv_close(k->binary_fd);
		k->binary_fd = kv_steal_fd(&k->former_fd);
		k->n_given_up++;
		delay = 0;
	}
	k->restarts += k->ready;
	k->worker = 0;
	k->stuck_ns = 0;
	k->start_ns = now + delay;
	for (struct kv_deposit *d = NULL;
	     (d = kv_deposits_find(&k->deposits, d, KV_DEPOSIT_MOVER));)
		syscall(SYS_pidfd_send_signal, d->fds[0], SIGKILL, NULL, 0);
}

static void reap(struct keeper *k)
{
	int status;
	pid_t pid;

	/* Others than the worker are orphans of one that died. */
	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		if (pid == k->worker)
			worker_ended(k, status);
	}
}

static void stop(struct keeper *k, uint32_t signal)
{
	if (k->stopping)
		return;
	kv_log(KV_LOG_INFO, "signal %u: stopping", signal);
	kv_service_tell(&k->service, "STOPPING=1\nSTATUS=stopping\n");
	k->stopping = true;
	k->stop_ns = kv_now() + STOP_WAIT;
	if (k->worker)
		kill(k->worker, SIGTERM);
	else
		k->done = true;
}

static void read_signals(struct keeper *k)
{
	struct signalfd_siginfo info;

	while (read(k->signal_fd, &info, sizeof(info)) == sizeof(info)) {
		if (info.ssi_signo != SIGCHLD)
			stop(k, info.ssi_signo);
	}
	reap(k);
}

/* Between two workers. Return: ms until it should be called again. */
static int wait_to_start(struct keeper *k)
{
	int64_t now = kv_now();

	if (now < k->start_ns)
		return (int)((k->start_ns - now) / KV_MSEC) + 1;
	start_worker(k);
	return 0;
}

/* Kills a worker that is stuck at its start or its end. Return: ms until that is due. */
static int watch_over_worker(struct keeper *k)
{
	int64_t now = kv_now(), due;

	if (k->stopping)
		due = k->stop_ns;
	else if (k->ever_ready && !k->ready)
		due = k->started_ns + READY_WAIT;
	else
		return -1;
	if (now < due)
		return (int)((due - now) / KV_MSEC) + 1;
	kv_log(KV_LOG_ERROR, "worker (pid %d) is stuck: killed", k->worker);
	kill(k->worker, SIGKILL);
	k->started_ns = k->stop_ns = now;
	return 1000;
}

/*
 * A worker whose loop does not turn is killed, for another to take over; who kills us is fed as long as
 * that works. Return: ms until it should be called again; -1: never.
 */
static int feed_watchdog(struct keeper *k)
{
	const int64_t limit = k->service.watchdog_ns;
	int64_t now = kv_now();

	if (!limit || k->stopping)
		return -1;
	if (now >= k->watchdog_due_ns) {
		if (k->ready && k->worker && !k->stuck_ns && now - k->alive_ns > limit / 2) {
			kv_log(KV_LOG_ERROR, "worker (pid %d) has not turned its loop for %lld ms: killed",
			       k->worker, (long long)((now - k->alive_ns) / KV_MSEC));
			kill(k->worker, SIGKILL);
			k->stuck_ns = now;
		}
		if (!k->stuck_ns || now - k->stuck_ns < limit)
			kv_service_tell(&k->service, "WATCHDOG=1\n");
		k->watchdog_due_ns = now + limit / 4;
	}
	return (int)((k->watchdog_due_ns - now) / KV_MSEC) + 1;
}

static int sooner(int a, int b)
{
	return a < 0 ? b : b < 0 ? a : a < b ? a : b;
}

static void iterate(struct keeper *k)
{
	int timeout = sooner(k->worker ? watch_over_worker(k) : wait_to_start(k), feed_watchdog(k));
	struct pollfd fds[2] = {{.fd = k->signal_fd, .events = POLLIN},
				{.fd = k->worker_fd, .events = POLLIN}};

	if (k->to_hand && k->worker_fd >= 0)
		fds[1].events |= POLLOUT;
	if (poll(fds, 2, timeout) < 0)
		return;
	if (fds[1].revents & POLLOUT)
		hand_over(k);
	if (fds[1].revents & ~POLLOUT)
		read_worker(k);
	if (fds[0].revents)
		read_signals(k);
}

/* Closing what was kept ends the processes that belong to it; they are waited for. */
static void release_all(struct keeper *k)
{
	int64_t deadline = kv_now() + CHILD_WAIT;
	struct pollfd p = {.fd = k->signal_fd, .events = POLLIN};

	for (struct kv_deposit *d = NULL;
	     (d = kv_deposits_find(&k->deposits, d, KV_DEPOSIT_MOVER));)
		syscall(SYS_pidfd_send_signal, d->fds[0], SIGKILL, NULL, 0);
	while (!kv_link_is_alone(&k->deposits))
		kv_deposit_free(kv_container_of(k->deposits.next, struct kv_deposit, link));
	while (waitpid(-1, NULL, WNOHANG) >= 0 && kv_now() < deadline) {
		struct signalfd_siginfo info;

		poll(&p, 1, 10);
		if (read(k->signal_fd, &info, sizeof(info)) < 0)
			continue;
	}
}

static int prepare(struct keeper *k, const char *socket, uint32_t socket_mode,
		   const char *socket_group, int argc,
		   char **argv)
{
	struct rlimit limit;
	sigset_t set;

	k->argv = worker_arguments(k, argc, argv);
	if (!k->argv)
		return kv_error(-ENOMEM, "no memory");
	if (!getrlimit(RLIMIT_NOFILE, &limit)) {
		limit.rlim_cur = limit.rlim_max;
		setrlimit(RLIMIT_NOFILE, &limit);
	}
	signal(SIGPIPE, SIG_IGN);
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	sigaddset(&set, SIGCHLD);
	sigprocmask(SIG_BLOCK, &set, NULL);
	k->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	if (k->signal_fd < 0)
		return kv_error(-errno, "signalfd: %s", strerror(errno));
	k->binary_fd = open("/proc/self/exe", O_PATH | O_CLOEXEC);
	if (k->binary_fd < 0)
		return kv_error(-errno, "/proc/self/exe: %s", strerror(errno));
	/* The socket first: a second daemon must not take memory before it finds out. */
	return k->listen_fd < 0 ? kv_keeper_listen(socket, socket_mode, socket_group,
							&k->listen_fd) :
				       0;
}

int kv_keeper_run(const char *socket, uint32_t socket_mode, const char *socket_group, int listen_fd,
		  int argc, char **argv)
{
	struct keeper k = {.listen_fd = listen_fd,
			   .signal_fd = -1,
			   .binary_fd = -1,
			   .former_fd = -1,
			   .worker_fd = -1,
			   .at_once = RESTARTS_AT_ONCE,
			   .refilled_ns = kv_now()};
	int r;

	kv_link_init(&k.deposits);
	kv_service_init(&k.service);
	r = prepare(&k, socket, socket_mode, socket_group, argc, argv);
	if (r < 0) {
		fprintf(stderr, "kvcached: %s\n", kv_error_text());
		k.status = 1;
	} else {
		start_worker(&k);
		while (!k.done)
			iterate(&k);
	}
	release_all(&k);
	if (k.listen_fd >= 0 && listen_fd < 0)
		unlink(socket);
	kv_close(k.listen_fd);
	kv_close(k.signal_fd);
	kv_close(k.binary_fd);
	kv_close(k.former_fd);
	kv_service_deinit(&k.service);
	free(k.argv);
	return k.status;
}
