/* SPDX-License-Identifier: Apache-2.0 */
/* kvctl doctor: where the daemon listens, the daemon behind it, and versions that must fit. */
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <kvcached/stats.h>

#include "include/internal/cleanup.h"
#include "include/internal/paths.h"
#include "include/internal/shm.h"
#include "include/internal/socket.h"
#include "include/internal/wire.h"
#include "tools/doctor.h"
#include "tools/trouble.h"

#define LIBRARY	 "libkvclient.so.0"
#define OURS_MAX 64
#define TROUBLES_MAX 16

/* Who can exchange what is in @folder, and can we look into it? False: no use in going on. */
static bool seen_folder(struct kv_probing *p, const char *folder)
{
	struct stat st;

	if (stat(folder, &st) < 0) {
		kv_seen(p, KV_WARN, "%s: %s", folder, strerror(errno));
		if (errno == EACCES)
			kv_change(p, "chmod a+x the folders above it, or give a socket elsewhere with -s");
		else
			kv_change(p, "start kvcached (it makes its default folder), or mkdir -m 0755 %s", folder);
		return false;
	}
	if ((st.st_mode & S_IWOTH) && !(st.st_mode & S_ISVTX)) {
		kv_seen(p, KV_FAIL, "%s (mode %04o): everybody may put another socket in its place", folder,
			st.st_mode & 07777);
		kv_change(p, "chmod o-w %s", folder);
	}
	if (st.st_uid && st.st_uid != geteuid()) {
		kv_seen(p, KV_WARN, "%s belongs to user %u, who may put another socket in its place", folder,
			st.st_uid);
		kv_change(p, "chown root %s, if that user does not run kvcached", folder);
	}
	if (access(folder, X_OK) < 0) {
		kv_seen(p, KV_FAIL, "%s (mode %04o, user %u, group %u) can't be entered by user %u", folder,
			st.st_mode & 07777, st.st_uid, st.st_gid, geteuid());
		kv_change(p, "chmod a+x %s, or become a member of its group", folder);
		return false;
	}
	return true;
}

/* Of all above the socket, from the root on. */
static bool seen_folders(struct kv_probing *p)
{
	char path[KV_SOCKET_PATH_MAX];

	for (const char *at = p->socket; (at = strchr(at + 1, '/'));) {
		snprintf(path, sizeof(path), "%.*s", (int)(at - p->socket), p->socket);
		if (!seen_folder(p, path))
			return false;
	}
	return p->socket[0] == '/' || strchr(p->socket, '/') || seen_folder(p, ".");
}

/* Return: a descriptor, or negative errno. */
static int connect_to(const char *path)
{
	kv_cleanup(kv_closep) int fd =
		socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct sockaddr_un address = {.sun_family = AF_UNIX};

	if (fd < 0)
		return -errno;
	snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
	if (connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
		return -errno;
	return kv_steal_fd(&fd);
}

static void seen_listener(struct kv_probing *p, const struct stat *st, int fd)
{
	struct ucred who = {0};
	socklen_t size = sizeof(who);

	getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size);
	if (who.uid != st->st_uid) {
		kv_seen(p, KV_FAIL, "%s belongs to user %u, and process %d of user %u listens", p->socket,
			st->st_uid, who.pid, who.uid);
		kv_change(p, "find out what that process is; then start kvcached anew");
	}
	if (st->st_mode & S_IWOTH) {
		kv_seen(p, KV_WARN, "%s (mode %04o): every user may connect", p->socket, st->st_mode & 0777);
		kv_change(p, "kvcached --socket-mode 0660, unless that is meant");
	}
	kv_seen(p, KV_FINE, "%s (mode %04o, user %u, group %u): process %d listens", p->socket,
		st->st_mode & 0777, st->st_uid, st->st_gid, who.pid);
}

static void seen_refusal(struct kv_probing *p, const struct stat *st, int r)
{
	if (r == -ECONNREFUSED) {
		kv_seen(p, KV_WARN, "%s: nobody listens; a daemon that was killed has left it", p->socket);
		kv_change(p, "start kvcached: it takes the file's place");
	} else if (r == -EACCES) {
		kv_seen(p, KV_FAIL, "%s (mode %04o, user %u, group %u) refuses user %u", p->socket,
			st->st_mode & 0777, st->st_uid, st->st_gid, geteuid());
		kv_change(p, "usermod -aG to group %u, or kvcached --socket-mode", st->st_gid);
	} else if (r == -EAGAIN) {
		kv_seen(p, KV_FAIL, "%s: the daemon's queue of connections is full", p->socket);
		kv_change(p, "see its log: its worker is stuck or dies; kvctl restart-worker");
	} else {
		kv_seen(p, KV_FAIL, "%s: %s", p->socket, strerror(-r));
		kv_change(p, "%s", r == -EPROTOTYPE ? "another program listens there: give kvcached's with -s" :
						      "give the daemon's socket with -s");
	}
}

void kv_probe_socket(struct kv_probing *p)
{
	struct stat st;
	int fd;

	if (!p->socket) {
		kv_seen(p, KV_WARN, "neither $" KV_SOCKET_ENV " nor $XDG_RUNTIME_DIR says where");
		kv_change(p, "export " KV_SOCKET_ENV "=PATH, or give -s PATH");
		return;
	}
	if (strlen(p->socket) >= KV_SOCKET_PATH_MAX) {
		kv_seen(p, KV_FAIL, "'%.40s...' has %zu bytes; a socket's path has at most %zu", p->socket,
			strlen(p->socket), KV_SOCKET_PATH_MAX - 1);
		kv_change(p, "a shorter path");
		return;
	}
	if (!seen_folders(p))
		return;
	if (lstat(p->socket, &st) < 0) {
		kv_seen(p, KV_WARN, "%s: %s", p->socket, strerror(errno));
		kv_change(p, "start kvcached, or give its socket with -s; in a container, mount its folder");
		return;
	}
	if (!S_ISSOCK(st.st_mode)) {
		kv_seen(p, KV_FAIL, "%s is no socket", p->socket);
		kv_change(p, "move it away: kvcached does not delete what is not its own");
		return;
	}
	fd = connect_to(p->socket);
	if (fd < 0)
		seen_refusal(p, &st, fd);
	else
		seen_listener(p, &st, fd);
	kv_close(fd);
}

/* HELLO by hand: a daemon of any version answers that. 0; negative with text */
static int greet(struct kv_probing *p, struct kv_msg_welcome *ret)
{
	struct kv_msg_hello hello = {.name = "kvctl doctor"};
	kv_cleanup(kv_closep) int fd = p->socket && strlen(p->socket) < KV_SOCKET_PATH_MAX ?
					       connect_to(p->socket) : -ENOENT;
	int64_t n;
	int r;

	if (fd < 0)
		return kv_error(fd, "nobody to ask");
	kv_wire_init(&hello.head, KV_MSG_HELLO, sizeof(hello), 1);
	snprintf(hello.version, sizeof(hello.version), "%s", kv_version());
	r = kv_socket_send(fd, &hello, sizeof(hello), NULL, 0, 1);
	if (!r)
		r = kv_socket_wait(fd, POLLIN, p->deadline);
	if (r < 0)
		return kv_error(r, "no answer: %s", strerror(-r));
	n = kv_socket_receive(fd, ret, sizeof(*ret), NULL, 0, NULL, 1);
	if (n < (int64_t)sizeof(ret->head) || ret->head.magic != KV_WIRE_MAGIC)
		return kv_error(-EPROTO, "what listens there is not kvcached");
	if (n < (int64_t)sizeof(*ret) || ret->head.type != KV_MSG_WELCOME)
		return kv_error(-EPROTO, "it does not welcome us (message of type %u)", ret->head.type);
	return 0;
}

static void seen_troubles(struct kv_probing *p, struct kv_client *client)
{
	kv_cleanup(kv_snapshot_deinit) struct kv_snapshot snapshot = {0};
	struct kv_trouble troubles[TROUBLES_MAX];
	size_t n = 0;

	if (!kv_snapshot_take(client, &snapshot, p->deadline - kv_now()))
		n = kv_trouble_find(&snapshot, troubles, TROUBLES_MAX);
	for (size_t i = 0; i < n; i++) {
		kv_seen(p, KV_WARN, "%s", troubles[i].seen);
		kv_change(p, "%s", troubles[i].change);
	}
}

static void seen_stats(struct kv_probing *p, struct kv_client *client)
{
	kv_cleanup(kv_freep) struct kv_daemon_stats *d = NULL;
	kv_cleanup(kv_freep) struct kv_gpu_stats *gpus = NULL;
	size_t n = 0, n_gpus = 0;

	if (kv_stats(client, KV_STAT_DAEMON, (void **)&d, &n, p->deadline - kv_now()) < 0 || !n ||
	    kv_stats(client, KV_STAT_GPU, (void **)&gpus, &n_gpus, p->deadline - kv_now()) < 0) {
		kv_seen(p, KV_FAIL, "it does not say how it is: %s", kv_error_text());
		kv_change(p, "see its log");
		return;
	}
	kv_seen(p, KV_FINE, "kvcached %s, keeper %" PRIu64 ", worker %" PRIu64 ", %s, %" PRIu64 " pools, %" PRIu64
		" sessions", d->version, d->pid, d->worker_pid, d->event_loop, d->n_pools, d->n_sessions);
	if (d->worker_restarts) {
		kv_seen(p, KV_WARN, "%" PRIu64 " workers before this one have ended", d->worker_restarts);
		kv_change(p, "see its log for 'was ended by' unless kvctl restart-worker was used");
	}
	if (d->programs_given_up) {
		kv_seen(p, KV_WARN, "a program given by restart-worker --binary did not serve");
		kv_change(p, "see its log; start that program with --host 64M and another --socket to see why");
	}
	seen_troubles(p, client);
	for (size_t i = 0; i < n_gpus; i++) {
		if (!gpus[i].export_limits[0])
			continue;
		kv_seen(p, KV_WARN, "GPU %" PRIu64 ": %s: %s", gpus[i].index, gpus[i].export_kind,
			gpus[i].export_limits);
		kv_change(p, "kvcached --export vmm where handles says that it works (%s)", gpus[i].export_why);
	}
}

void kv_probe_daemon(struct kv_probing *p)
{
	KV_OPTIONS(kv_connect_options, how, .socket = p->socket, .name = "kvctl doctor",
		   .timeout = p->deadline - kv_now());
	struct kv_msg_welcome welcome;
	struct kv_client *client = NULL;
	int r = greet(p, &welcome);

	if (r == -EPROTO || r == -ETIMEDOUT) {
		kv_seen(p, KV_FAIL, "%s", kv_error_text());
		kv_change(p, r == -EPROTO ? "give kvcached's socket with -s" :
					    "see its log; kvctl restart-worker, or kill -9 its worker");
		return;
	}
	if (r < 0) {
		kv_seen(p, KV_WARN, "nobody to ask");
		kv_change(p, "see socket");
		return;
	}
	if (kv_connect(&how, &client) < 0) {
		kv_seen(p, KV_FAIL, "it takes no client: %s", kv_error_text());
		kv_change(p, "see its log, and versions");
		return;
	}
	seen_stats(p, client);
	kv_disconnect(client);
}

/* One GPU of the daemon against the @n that this process sees. */
static void seen_device(struct kv_probing *p, const struct kv_gpu *gpu, char (*ours)[KV_UUID_TEXT_BYTES], int n)
{
	const char *visible = getenv("CUDA_VISIBLE_DEVICES");

	for (int i = 0; i < n; i++) {
		if (strcmp(ours[i], gpu->uuid))
			continue;
		kv_seen(p, KV_FINE, "GPU %d of the daemon, %s, is CUDA device %d here", gpu->index, gpu->uuid, i);
		return;
	}
	if (n < 0) {
		kv_seen(p, KV_WARN, "GPU %d of the daemon, %s: CUDA does not start here, its pools can't be mapped",
			gpu->index, gpu->uuid);
		kv_change(p, "docker run --gpus '\"device=%s\"', and see what driver says", gpu->uuid);
		return;
	}
	kv_seen(p, KV_WARN, "GPU %d of the daemon, %s, is none of the %d that CUDA shows here%s%s: its pools can't be "
		"mapped", gpu->index, gpu->uuid, n, visible ? ", CUDA_VISIBLE_DEVICES=" : "", visible ? visible : "");
	if (visible)
		kv_change(p, "export CUDA_VISIBLE_DEVICES=%s, or unset it", gpu->uuid);
	else
		kv_change(p, "docker run --gpus '\"device=%s\"', or DeviceAllow= of its node in the unit",
			  gpu->uuid);
}

/* Ordinals differ from process to process, UUIDs don't: a client finds the daemon's GPUs by these. */
void kv_probe_devices(struct kv_probing *p)
{
	char ours[OURS_MAX][KV_UUID_TEXT_BYTES];
	struct kv_msg_welcome welcome;
	int n = INT_MIN;

	if (greet(p, &welcome) < 0) {
		kv_seen(p, KV_FINE, "no daemon whose GPUs could be compared");
		return;
	}
	for (uint32_t i = 0; i < welcome.n_gpus && i < sizeof(welcome.gpus) / sizeof(welcome.gpus[0]); i++) {
		struct kv_gpu *gpu = &welcome.gpus[i];

		gpu->uuid[sizeof(gpu->uuid) - 1] = 0;
		if (!gpu->uuid[0]) /* host memory */
			continue;
		if (n == INT_MIN)
			n = kv_driver_uuids(ours, OURS_MAX);
		seen_device(p, gpu, ours, n < OURS_MAX ? n : OURS_MAX);
	}
	if (n == INT_MIN)
		kv_seen(p, KV_FINE, "the daemon's memory is the host's: no GPU to compare");
}

static void seen_library(struct kv_probing *p)
{
	void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
	const char *(*version)(void) = NULL;
	void *address = library ? dlsym(library, "kv_version") : NULL;

	memcpy(&version, &address, sizeof(address));
	if (!library) {
		kv_seen(p, KV_FINE, "no " LIBRARY " in the loader's path: only programs that bring their own are "
			"clients here");
		return;
	}
	if (version && !strcmp(version(), kv_version())) {
		kv_seen(p, KV_FINE, LIBRARY " is %s, as kvctl", kv_version());
		return;
	}
	kv_seen(p, KV_WARN, LIBRARY " is %s, kvctl %s", version ? version() : "of no version", kv_version());
	kv_change(p, "install both from one release; ldconfig -p shows which " LIBRARY " is found");
}

void kv_probe_versions(struct kv_probing *p)
{
	struct kv_msg_welcome welcome;

	seen_library(p);
	if (greet(p, &welcome) < 0) {
		kv_seen(p, KV_FINE, "kvctl is %s, shared pages %s; no daemon to compare with", kv_version(),
			KV_SHM_VERSION);
		return;
	}
	welcome.version[sizeof(welcome.version) - 1] = 0;
	if (welcome.head.version != KV_WIRE_VERSION || (welcome.shm_abi && welcome.shm_abi != KV_SHM_ABI)) {
		kv_seen(p, KV_FAIL, "the daemon is %s: protocol %u, shared pages %u; here are %s, %d and %d",
			welcome.version, welcome.head.version, welcome.shm_abi, kv_version(),
			KV_WIRE_VERSION, KV_SHM_ABI);
		kv_change(p, "the daemon and all clients from releases with the same two numbers");
	} else if (strcmp(welcome.version, kv_version())) {
		kv_seen(p, KV_FINE, "the daemon is %s, kvctl %s; protocol %d and shared pages %d are the same",
			welcome.version, kv_version(), KV_WIRE_VERSION, KV_SHM_ABI);
	} else {
		kv_seen(p, KV_FINE, "the daemon is %s as well; protocol %d, shared pages %d", kv_version(),
			KV_WIRE_VERSION, KV_SHM_ABI);
	}
}
