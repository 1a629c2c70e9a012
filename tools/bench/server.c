/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A daemon for this run alone, in host memory, on a socket in a folder of its own. It ends with
 * kvbench: by kv_bench_end(), by the signal that ends kvbench, or because its parent is gone.
 */
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/bench/bench.h"

#define START_TIMEOUT (20 * KV_SEC)
#define STOP_TIMEOUT  (20 * KV_SEC)
#define LOOK_AGAIN_MS 2

/* Of the process, not of a struct kv_bench: a signal handler must find it. */
static struct {
	pid_t parent;
	pid_t pid; /* 0: none */
	char folder[PATH_MAX];
	char socket[PATH_MAX];
} server;

static const int ending_signals[] = {SIGINT, SIGTERM, SIGHUP};

static void on_signal(int number)
{
	if (server.pid && getpid() == server.parent) {
		kill(server.pid, SIGTERM);
		unlink(server.socket);
		rmdir(server.folder);
	}
	signal(number, SIG_DFL);
	raise(number);
}

/* In the build folder, or as installed; else the shell's way. */
static void find_program(char ret[PATH_MAX])
{
	static const char *const places[] = {"../../daemon/kvcached", "../sbin/kvcached"};
	char self[PATH_MAX];
	ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);

	self[n > 0 ? n : 0] = '\0';
	if (strrchr(self, '/'))
		strrchr(self, '/')[1] = '\0';
	for (size_t i = 0; n > 0 && i < sizeof(places) / sizeof(places[0]); i++) {
		if (snprintf(ret, PATH_MAX, "%s%s", self, places[i]) < PATH_MAX &&
		    !access(ret, X_OK))
			return;
	}
	strcpy(ret, "kvcached");
}

static void run_daemon(const char *program, uint64_t host_bytes)
{
	char bytes[32];

	prctl(PR_SET_PDEATHSIG, SIGTERM);
	if (getppid() != server.parent)
		_exit(KV_BENCH_FAILED);
	snprintf(bytes, sizeof(bytes), "%llu", (unsigned long long)host_bytes);
	execlp(program, program, "--host", bytes, "--socket", server.socket, "--log-level", "warn",
	       (char *)NULL);
	fprintf(stderr, "kvbench: %s: %s\n", program, strerror(errno));
	_exit(KV_BENCH_FAILED);
}

static int make_folder(const struct kv_bench *b)
{
	const char *root = getenv("TMPDIR");
	int n = snprintf(server.folder, sizeof(server.folder), "%s/kvbench.XXXXXX",
			 root && *root ? root : "/tmp");

	if (n > 0 && (size_t)n < sizeof(((struct sockaddr_un *)0)->sun_path) - sizeof("/socket") &&
	    mkdtemp(server.folder)) {
		snprintf(server.socket, sizeof(server.socket), "%.200s/socket", server.folder);
		return KV_BENCH_DONE;
	}
	return kv_bench_refuse(b, KV_BENCH_FAILED, "a folder for a socket, '%.200s': %s",
			       server.folder, errno ? strerror(errno) : "its name is too long");
}

/* Until it answers, has ended, or the time is over. */
static int await_daemon(const struct kv_bench *b, const char *program)
{
	KV_OPTIONS(kv_connect_options, how, .socket = server.socket, .name = "kvbench");
	int64_t deadline = kv_bench_now() + START_TIMEOUT;
	struct kv_client *client;

	while (kv_connect(&how, &client) < 0) {
		if (waitpid(server.pid, NULL, WNOHANG) == server.pid) {
			server.pid = 0;
			return kv_bench_refuse(b, KV_BENCH_FAILED, "%s ended at its start",
					       program);
		}
		if (kv_bench_now() > deadline)
			return kv_bench_refuse(b, KV_BENCH_FAILED, "%s doesn't answer: %s", program,
					       kv_error_text());
		poll(NULL, 0, LOOK_AGAIN_MS);
	}
	kv_disconnect(client);
	return KV_BENCH_DONE;
}

int kv_bench_serve(struct kv_bench *b, uint64_t host_bytes)
{
	struct sigaction action = {.sa_handler = on_signal};
	char program[PATH_MAX];
	int status;

	if (b->socket)
		return KV_BENCH_DONE;
	errno = 0;
	status = make_folder(b);
	if (status)
		return status;
	find_program(program);
	server.parent = getpid();
	fflush(NULL); /* a child must not write it a second time */
	server.pid = fork();
	if (!server.pid)
		run_daemon(program, host_bytes);
	if (server.pid < 0) {
		server.pid = 0;
		return kv_bench_refuse(b, KV_BENCH_FAILED, "fork: %s", strerror(errno));
	}
	for (size_t i = 0; i < sizeof(ending_signals) / sizeof(ending_signals[0]); i++)
		sigaction(ending_signals[i], &action, NULL);
	b->socket = server.socket;
	return await_daemon(b, program);
}

void kv_bench_end(struct kv_bench *b)
{
	int64_t deadline = kv_bench_now() + STOP_TIMEOUT;

	if (server.pid) {
		kill(server.pid, SIGTERM);
		while (waitpid(server.pid, NULL, WNOHANG) != server.pid) {
			if (kv_bench_now() > deadline)
				kill(server.pid, SIGKILL);
			poll(NULL, 0, LOOK_AGAIN_MS);
		}
		server.pid = 0;
	}
	if (*server.folder) {
		unlink(server.socket);
		rmdir(server.folder);
		*server.folder = '\0';
	}
	b->socket = NULL;
}
