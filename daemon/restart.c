/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvctl restart-worker: another worker takes over, of the same program or of a newer one.
 *
 * The other program is asked first which shared memory it knows (kvcached --shm-version), in a child,
 * while this worker goes on. Only if it is ours the keeper gets the program's descriptor, and this
 * worker ends, leaving all as it is. A program that then doesn't come to serve is given up by the
 * keeper for the one before. The file is opened once: what was asked is what is run.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/daemon.h"
#include "daemon/log.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/socket.h"

#define PROBE_WAIT (10 * KV_SEC)

struct kv_restart {
	struct kv_daemon *daemon;
	uint64_t peer_id; /* who asked; it may go */
	uint32_t tag;
	int binary_fd, pipe_fd;
	pid_t pid;
	struct kv_watch *watch;
	struct kv_timer *timer;
	char binary[KV_PATH_MAX];
	char said[128];
	size_t n_said;
};

void kv_restart_free(struct kv_daemon *d)
{
	struct kv_restart *r = d->restart;

	if (!r)
		return;
	d->restart = NULL;
	kv_watch_free(r->watch);
	kv_timer_free(r->timer);
	if (r->pid > 0) {
		kill(r->pid, SIGKILL);
		waitpid(r->pid, NULL, 0);
	}
	kv_close(r->pipe_fd);
	kv_close(r->binary_fd);
	free(r);
}

static struct kv_peer *find_peer(struct kv_daemon *d, uint64_t id)
{
	for (struct kv_link *l = d->peers.next; l != &d->peers; l = l->next) {
		struct kv_peer *peer = kv_container_of(l, struct kv_peer, link);

		if (peer->id == id)
			return peer;
	}
	return NULL;
}

/* @binary_fd: -1: the same program again */
static void hand_over(struct kv_daemon *d, struct kv_peer *peer, uint32_t tag, int binary_fd)
{
	struct kv_msg_plain reply;
	int r = kv_keeping_binary(&d->keeping, binary_fd);

	if (r < 0) {
		if (peer)
			kv_peer_error(peer, tag, r, "%s", kv_error_text());
		return;
	}
	kv_log(KV_LOG_INFO, "worker: ends on request, another takes over");
	if (peer) {
		kv_wire_init(&reply.head, KV_MSG_OK, sizeof(reply), tag);
		kv_peer_send(peer, &reply, sizeof(reply), NULL, 0);
	}
	d->stopping = true;
	kv_loop_stop(d->loop);
}

static void answered(struct kv_restart *r)
{
	struct kv_daemon *d = r->daemon;
	struct kv_peer *peer = find_peer(d, r->peer_id);

	r->said[r->n_said] = 0;
	r->said[strcspn(r->said, "\n")] = 0;
	if (!strcmp(r->said, KV_SHM_VERSION))
		hand_over(d, peer, r->tag, r->binary_fd);
	else if (peer)
		kv_peer_error(peer, r->tag, -EPROTO,
			      "'%.200s' can't take over: it answers '%.100s' to --shm-version, the "
			      "memory in use is of version '%s'. Stop kvcached and start the new one",
			      r->binary, r->said, KV_SHM_VERSION);
	kv_restart_free(d);
}

static void on_words(uint32_t events, void *arg)
{
	struct kv_restart *r = arg;
	ssize_t n;

	(void)events;
	n = read(r->pipe_fd, r->said + r->n_said, sizeof(r->said) - 1 - r->n_said);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n > 0 && (r->n_said += (size_t)n) < sizeof(r->said) - 1)
		return;
	answered(r);
}

static void overdue(void *arg)
{
	struct kv_restart *r = arg;

	snprintf(r->said, sizeof(r->said), "nothing in 10 s");
	r->n_said = strlen(r->said);
	answered(r);
}

/* In the child: only what is safe between fork and exec. */
static void run_probe(int binary_fd, int out)
{
	char *argv[] = { (char *)"kvcached", (char *)"--shm-version", NULL };
	sigset_t none;

	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	if (dup2(out, STDOUT_FILENO) >= 0)
		syscall(SYS_execveat, binary_fd, "", argv, environ, AT_EMPTY_PATH);
	_exit(126);
}

static int probe(struct kv_restart *r)
{
	int pipes[2], e;

	if (pipe2(pipes, O_CLOEXEC | O_NONBLOCK) < 0)
		return kv_error(-errno, "pipe: %s", strerror(errno));
	r->pipe_fd = pipes[0];
	r->pid = fork();
	if (!r->pid)
		run_probe(r->binary_fd, pipes[1]);
	e = r->pid < 0 ? kv_error(-errno, "fork: %s", strerror(errno)) : 0;
	kv_close(pipes[1]);
	if (!e)
		e = kv_loop_watch(r->daemon->loop, r->pipe_fd, KV_LOOP_IN, on_words, r, &r->watch);
	if (!e)
		e = kv_timer_new(r->daemon->loop, overdue, r, &r->timer);
	if (!e)
		kv_timer_set(r->timer, PROBE_WAIT);
	return e;
}

static int begin(struct kv_peer *peer, const struct kv_msg_restart *msg)
{
	struct kv_restart *r = calloc(1, sizeof(*r));
	struct stat file;

	if (!r)
		return kv_error(-ENOMEM, "no memory");
	peer->daemon->restart = r;
	r->daemon = peer->daemon;
	r->peer_id = peer->id;
	r->tag = msg->head.tag;
	r->pipe_fd = -1;
	strcpy(r->binary, msg->binary);
	/* A pipe that nobody writes would be waited for. */
	r->binary_fd = open(r->binary, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (r->binary_fd < 0 || fstat(r->binary_fd, &file) < 0)
		return kv_error(-errno, "'%.200s': %s", r->binary, strerror(errno));
	if (!S_ISREG(file.st_mode))
		return kv_error(-EINVAL, "'%.200s' is no file: restart-worker needs a program", r->binary);
	return probe(r);
}

void kv_restart_handle(struct kv_peer *peer, const struct kv_msg_restart *msg)
{
	struct kv_daemon *d = peer->daemon;
	int r = 0;

	if (!kv_user_may_administer(peer))
		r = kv_error(-EPERM, "restart-worker: for root, the user that kvcached runs as and whom "
				     "'admin -' of its access list names, not for user %u", peer->uid);
	else if (!memchr(msg->binary, 0, sizeof(msg->binary)) ||
		 (msg->binary[0] && msg->binary[0] != '/'))
		r = kv_error(-EINVAL, "restart-worker: the program's path must begin with '/' and be shorter "
				      "than %d bytes", KV_PATH_MAX);
	else if (d->restart || d->stopping)
		r = kv_error(-EBUSY, "restart-worker: one is under way");
	if (!r && msg->binary[0]) {
		r = begin(peer, msg);
		if (r < 0)
			kv_restart_free(d);
	} else if (!r) {
		hand_over(d, peer, msg->head.tag, -1);
	}
	if (r < 0)
		kv_peer_error(peer, msg->head.tag, r, "%s", kv_error_text());
}
