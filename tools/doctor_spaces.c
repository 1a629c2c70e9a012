/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvctl doctor: across PID namespaces, as between two containers. One is made, in it memory; in that
 * one another, in which the memory is used by a process of the same number as its maker's:
 *
 *	probe -- [1: helper of the device makes the arena, as 2] -- [1 -- 2: attaches]
 *
 * ipc compares nothing but the two numbers, takes maker and user for one process, and refuses.
 */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/helper.h"
#include "include/internal/socket.h"
#include "include/kvcached/types.h"
#include "tools/doctor.h"

struct job {
	kv_helper_job *inner; /* runs as process 1 of a new namespace */
	const void *arg;
	int64_t deadline;
};

struct kind {
	const struct kv_device_ops *ops;
	uint32_t kind;
	int64_t deadline;
};

static void refuse(const struct kv_helper_end *end, const char *call)
{
	struct kv_helper_reply reply = {0};

	kv_helper_reply(end, kv_error(-EPERM, "%s: %s", call, strerror(errno)), &reply);
}

/* A driver asks /proc about itself: it must be that of the namespace. */
static void be_first(const struct kv_helper_end *end, const struct job *job)
{
	if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
	    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0)
		refuse(end, "mounting the /proc of a PID namespace");
	else
		job->inner(end, job->arg);
	_exit(0);
}

static void namespace_job(const struct kv_helper_end *end, const void *arg)
{
	const struct job *job = arg;
	pid_t pid;

	/* Who may not, may perhaps as root of a user namespace. */
	if (unshare(CLONE_NEWPID | CLONE_NEWNS) < 0 &&
	    unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS) < 0) {
		refuse(end, "unshare(CLONE_NEWPID)");
		return;
	}
	pid = fork();
	if (!pid)
		be_first(end, job);
	if (pid < 0)
		refuse(end, "fork in a PID namespace");
	else
		waitpid(pid, NULL, 0);
}

static int run_in_namespace(kv_helper_job *inner, const void *arg, int64_t deadline)
{
	struct job job = {.inner = inner, .arg = arg, .deadline = deadline};
	struct kv_helper_reply reply;

	return kv_helper_run(namespace_job, &job, deadline - kv_now(), NULL, 0, &reply);
}

/* As process 1: the attaching one is its first child, number 2, as the maker was. */
static void use_job(const struct kv_helper_end *end, const void *arg)
{
	struct kv_helper_reply reply = {0};
	pid_t pid = fork();

	if (!pid) {
		kv_helper_reply(end, kv_doctor_attach(arg), &reply);
		_exit(0);
	}
	if (pid > 0)
		waitpid(pid, NULL, 0);
}

static void make_job(const struct kv_helper_end *end, const void *arg)
{
	const struct kind *kind = arg;
	struct kv_helper_reply reply = {0};
	struct kv_arena *arena;
	int r = kind->ops->arena_new(0, 4 * KV_ARENA_UNIT, kind->kind, 0, &arena);

	if (!r) {
		r = run_in_namespace(use_job, arena, kind->deadline);
		kind->ops->arena_free(arena);
	}
	kv_helper_reply(end, r, &reply);
}

void kv_probe_pid_namespaces(struct kv_probing *p)
{
	static const struct {
		const char *name, *change;
		const struct kv_device_ops *ops;
		uint32_t kind;
		enum kv_verdict without;
	} rows[] = {
		{"host", "see memfd", &kv_device_host, 0, KV_FAIL},
		{"vmm", "run kvcached and its clients in one PID namespace (hostPID: true)",
		 &kv_device_cuda, KV_EXPORT_VMM, KV_FAIL},
		{"ipc", "nothing where vmm works; else run kvcached and its clients in one PID namespace "
			"(hostPID: true)", &kv_device_cuda, KV_EXPORT_IPC, KV_FINE},
	};
	struct kv_device_info info;
	bool has_gpu = !kv_device_cuda.info(0, &info);

	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		struct kind kind = {rows[i].ops, rows[i].kind, p->deadline};
		int r;

		if (rows[i].kind && !has_gpu)
			continue;
		r = run_in_namespace(make_job, &kind, p->deadline);
		if (r == -EPERM) {
			kv_seen(p, KV_WARN, "not tried: %s", kv_error_text());
			kv_change(p, "run kvctl doctor as root outside of containers, or with CAP_SYS_ADMIN");
			return;
		}
		if (!r) {
			kv_seen(p, KV_FINE, "%s: made in one PID namespace, used in another%s", rows[i].name,
				rows[i].kind ? "" : " (all that a host device needs)");
			continue;
		}
		kv_seen(p, rows[i].without, "%s: %s", rows[i].name, kv_error_text());
		kv_change(p, "%s", rows[i].change);
	}
}
