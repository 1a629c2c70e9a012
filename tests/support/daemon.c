/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/support/daemon.h"

#define MAX_ARGS     40
#define MAX_CHILDREN 8

#define PF_FORKNOEXEC 0x40 /* the kernel's: forked, runs no program of its own yet */

static char folder[64], socket_path[96], log_path[96];
static pid_t pid;

int64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void sleep_ms(int ms)
{
	poll(NULL, 0, ms);
}

const char *daemon_socket(void)
{
	return socket_path;
}

const char *daemon_folder(void)
{
	return folder;
}

pid_t daemon_pid(void)
{
	return pid;
}

/* Starts the program with its words on descriptor @out. It dies with this process. */
static pid_t spawn(const char *const *options, int out)
{
	const char *loop = getenv("KV_TEST_EVENT_LOOP");
	const char *args[MAX_ARGS] = {getenv("KVCACHED_BIN"), "--log-level", "warn", "--socket",
				      socket_path};
	pid_t parent = getpid(), child;
	int n = 5;

	if (loop) {
		args[n++] = "--event-loop";
		args[n++] = loop;
	}
	if (getenv("KV_TEST_ISOLATE"))
		args[n++] = "--isolate";
	while (*options && n < MAX_ARGS - 1)
		args[n++] = *options++;
	expect(!*options, "option '%s' is one too many: MAX_ARGS", *options);
	child = fork();
	if (child)
		return child;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent || dup2(out, STDOUT_FILENO) < 0 || dup2(out, STDERR_FILENO) < 0)
		_exit(126);
	execv(args[0], (char **)args);
	_exit(127);
}

/* Is it @child that listens? One that was killed can seem to for a moment (daemon/daemon.c). */
static bool is_listening(pid_t child)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	struct ucred cred = {0};
	socklen_t size = sizeof(cred);

	strcpy(address.sun_path, socket_path);
	if (!connect(fd, (struct sockaddr *)&address, sizeof(address)))
		getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &size);
	close(fd);
	return cred.pid == child;
}

/* The exit status of a process, or -1 if it still runs at the deadline. */
static int exit_status(pid_t child, int ms)
{
	int64_t deadline = now_ns() + (int64_t)ms * 1000000;
	int status;

	while (waitpid(child, &status, WNOHANG) == 0) {
		if (now_ns() >= deadline)
			return -1;
		sleep_ms(1);
	}
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void daemon_start_with(const char *const *options)
{
	int out = open(log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	int64_t deadline = now_ns() + (int64_t)DEADLINE_MS * 1000000;

	ck_assert_int_ge(out, 0);
	ck_assert_int_eq(pid, 0);
	pid = spawn(options, out);
	close(out);
	ck_assert_int_gt(pid, 0);
	while (!is_listening(pid)) {
		int status = exit_status(pid, 0);

		expect(status < 0, "kvcached ended with %d at its start", status);
		expect(now_ns() < deadline, "kvcached doesn't listen after %d ms", DEADLINE_MS);
		sleep_ms(1);
	}
}

static uint32_t children_of(pid_t of, pid_t *ret)
{
	char path[64];
	uint32_t n = 0;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/task/%d/children", of, of);
	f = fopen(path, "r");
	while (f && n < MAX_CHILDREN && fscanf(f, "%d", &ret[n]) == 1)
		n++;
	if (f)
		fclose(f);
	return n;
}

/* Return: the letter of its state; 0: there is no such process. *ret_flags: PF_... of the kernel */
static char state_of(pid_t process, unsigned int *ret_flags)
{
	char path[64], line[512] = "", state;
	const char *behind_name;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/stat", process);
	f = fopen(path, "r");
	if (!f)
		return 0;
	if (!fgets(line, sizeof(line), f))
		line[0] = 0;
	fclose(f);
	behind_name = strrchr(line, ')');
	if (!behind_name ||
	    sscanf(behind_name + 1, " %c %*d %*d %*d %*d %*d %u", &state, ret_flags) != 2)
		return 0;
	return state;
}

/* A dead one counts as gone also while nobody has waited for it. */
static bool is_gone(pid_t process)
{
	unsigned int flags;
	char state = state_of(process, &flags);

	return !state || state == 'Z' || state == 'X';
}

/*
 * Its name is set when it runs; orphans of a worker before it have others, but for a mover on a
 * busy machine that was forked and has not come to run its program: it still has its parent's.
 */
static bool is_worker(pid_t process)
{
	char path[64], name[32] = "";
	unsigned int flags;
	char state = state_of(process, &flags);
	FILE *f;

	if (!state || state == 'Z' || state == 'X' || flags & PF_FORKNOEXEC)
		return false;
	snprintf(path, sizeof(path), "/proc/%d/comm", process);
	f = fopen(path, "r");
	if (!f)
		return false;
	if (!fgets(name, sizeof(name), f))
		name[0] = 0;
	fclose(f);
	return !strcmp(name, "kvcached-worker\n");
}

static pid_t find_worker(void)
{
	pid_t list[MAX_CHILDREN];
	uint32_t n = children_of(pid, list);

	for (uint32_t i = 0; i < n; i++) {
		if (is_worker(list[i]))
			return list[i];
	}
	return 0;
}

pid_t daemon_worker(void)
{
	pid_t worker;

	wait_until((worker = find_worker()));
	return worker;
}

uint32_t daemon_children(void)
{
	pid_t list[MAX_CHILDREN];

	return children_of(daemon_worker(), list);
}

void daemon_ended(void)
{
	int status = exit_status(pid, DEADLINE_MS);

	expect(status == 0, "kvcached ended with %d after a signal", status);
	pid = 0;
	expect(access(socket_path, F_OK) < 0, "kvcached left %s behind", socket_path);
}

/* Worker and movers; ret[2 * MAX_CHILDREN] */
static uint32_t all_processes(pid_t *ret)
{
	uint32_t n = children_of(pid, ret), direct = n;

	for (uint32_t i = 0; i < direct && n <= MAX_CHILDREN; i++)
		n += children_of(ret[i], ret + n);
	return n;
}

void daemon_stop(void)
{
	pid_t list[2 * MAX_CHILDREN];
	uint32_t n = all_processes(list);

	ck_assert_int_eq(kill(pid, SIGTERM), 0);
	daemon_ended();
	for (uint32_t i = 0; i < n; i++)
		expect(kill(list[i], 0) < 0 && errno == ESRCH, "process %d of kvcached is alive",
		       list[i]);
}

void daemon_kill(void)
{
	pid_t list[2 * MAX_CHILDREN];
	uint32_t n = all_processes(list);

	ck_assert_int_eq(kill(pid, SIGKILL), 0);
	ck_assert_int_eq(exit_status(pid, DEADLINE_MS), 128 + SIGKILL);
	for (uint32_t i = 0; i < n; i++)
		wait_until(is_gone(list[i]));
	pid = 0;
}

pid_t daemon_kill_worker(void)
{
	pid_t worker = daemon_worker();

	ck_assert_int_eq(kill(worker, SIGKILL), 0);
	wait_until(is_gone(worker));
	return worker;
}

int daemon_refused_with(char *ret_text, size_t size, const char *const *options)
{
	int pipes[2], status;
	size_t used = 0;
	ssize_t n;
	pid_t child;

	ck_assert_int_eq(pipe2(pipes, O_CLOEXEC), 0);
	child = spawn(options, pipes[1]);
	close(pipes[1]);
	ck_assert_int_gt(child, 0);
	status = exit_status(child, DEADLINE_MS);
	if (status < 0)
		kill(child, SIGKILL);
	while (used < size - 1 && (n = read(pipes[0], ret_text + used, size - 1 - used)) > 0)
		used += (size_t)n;
	ret_text[used] = 0;
	close(pipes[0]);
	expect(status >= 0, "kvcached runs, although it should refuse");
	return status;
}

static uint32_t fds_of(pid_t of)
{
	char path[64];
	uint32_t n = 0;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/fd", of);
	dir = opendir(path);
	ck_assert_ptr_nonnull(dir);
	while (readdir(dir))
		n++;
	closedir(dir);
	return n;
}

/* How often it has run; 0: it isn't in one of these states now. */
static uint64_t turns_in(pid_t process, const char *states)
{
	unsigned long long turns = 0;
	char path[64], line[256], state = 0;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/status", process);
	f = fopen(path, "r");
	while (f && fgets(line, sizeof(line), f)) {
		unsigned long long n;

		sscanf(line, "State: %c", &state);
		if (sscanf(line, "voluntary_ctxt_switches: %llu", &n) == 1 ||
		    sscanf(line, "nonvoluntary_ctxt_switches: %llu", &n) == 1)
			turns += n;
	}
	if (f)
		fclose(f);
	return state && strchr(states, state) ? 1 + turns : 0;
}

/*
 * Of keeper, worker and movers; 0: one of them runs, or has been woken. What one of them has been sent wakes it,
 * however long it takes until it runs: so when all sleep, and go on to sleep, nothing is under way between them.
 * A mover may also be stopped.
 */
static uint64_t all_turns_asleep(pid_t worker)
{
	pid_t list[2 * MAX_CHILDREN];
	uint32_t n = all_processes(list);
	uint64_t turns = turns_in(pid, "S"), sum = turns;

	for (uint32_t i = 0; turns && i < n; i++)
		sum += turns = turns_in(list[i], list[i] == worker ? "S" : "STtZ");
	return turns ? sum : 0;
}

/* The keeper gets what the worker sends it a moment later: counted when nothing is under way. */
uint32_t daemon_fds(void)
{
	int64_t deadline = now_ns() + (int64_t)DEADLINE_MS * 1000000;

	for (;; sleep_ms(1)) {
		pid_t worker = daemon_worker();
		uint64_t turns = all_turns_asleep(worker);
		uint32_t n = fds_of(pid) + fds_of(worker);

		if (turns && turns == all_turns_asleep(worker))
			return n;
		expect(now_ns() < deadline, "kvcached doesn't come to rest in %d s", DEADLINE_MS / 1000);
	}
}

static uint64_t rss_of(pid_t of)
{
	unsigned long long size, resident = 0;
	char path[64];
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/statm", of);
	f = fopen(path, "r");
	ck_assert_ptr_nonnull(f);
	ck_assert_int_eq(fscanf(f, "%llu %llu", &size, &resident), 2);
	fclose(f);
	return resident * 4096;
}

uint64_t daemon_rss(void)
{
	return rss_of(pid) + rss_of(daemon_worker());
}

static int remove_entry(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
	(void)st;
	(void)flag;
	(void)ftw;
	return remove(path);
}

static void show_log(void)
{
	FILE *f = fopen(log_path, "r");
	char line[512];

	if (!f)
		return;
	fseek(f, -6000, SEEK_END);
	fprintf(stderr, "--- what the daemons said last\n");
	while (fgets(line, sizeof(line), f))
		fputs(line, stderr);
	fclose(f);
}

/* Does this machine refuse the event loop that is asked for? */
static bool is_loop_refused(void)
{
	const char *const options[] = {"--host", "2M", NULL};
	char text[2000] = "";
	int pipes[2];
	pid_t child;

	if (pipe2(pipes, O_CLOEXEC) < 0)
		return false;
	child = spawn(options, pipes[1]);
	close(pipes[1]);
	if (child < 0)
		return false;
	while (!is_listening(child) && exit_status(child, 0) < 0)
		sleep_ms(1);
	kill(child, SIGTERM);
	exit_status(child, DEADLINE_MS);
	if (read(pipes[0], text, sizeof(text) - 1) < 0)
		text[0] = 0;
	close(pipes[0]);
	if (!strstr(text, "io_uring refused"))
		return false;
	fputs(text, stderr);
	return true;
}

int daemon_run_tests(Suite *suite)
{
	const char *tmp = getenv("TMPDIR");
	SRunner *runner;
	int n_failed;

	snprintf(folder, sizeof(folder), "%.30s/kvcached-test.XXXXXX", tmp && *tmp ? tmp : "/tmp");
	if (!mkdtemp(folder)) {
		perror(folder);
		return 1;
	}
	snprintf(socket_path, sizeof(socket_path), "%s/socket", folder);
	snprintf(log_path, sizeof(log_path), "%s/log", folder);
	/* Nothing of the caller's own daemon may be reached by a call that isn't told a socket. */
	setenv("KVCACHED_SOCKET", socket_path, 1);
	setenv("XDG_RUNTIME_DIR", folder, 1);
	if (!getenv("KVCACHED_BIN")) {
		fprintf(stderr, "KVCACHED_BIN doesn't say where kvcached is\n");
		return 1;
	}
	if (is_loop_refused())
		return 77;
	runner = srunner_create(suite);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	if (n_failed)
		show_log();
	nftw(folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
	return n_failed != 0;
}
