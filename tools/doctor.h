/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvctl doctor: probes of what kvcached and its clients need of a machine, each by doing it.
 *
 * A probe is a function and a row in the table of doctor.c. It runs in a process of its own, with a
 * deadline: what hangs (a driver, a daemon, a file system) costs its probe and nothing else. It
 * tells what it found, finding by finding:
 *
 *	kv_seen(p, KV_WARN, "no more than %llu open files", n);
 *	kv_change(p, "LimitNOFILE=65536 in the unit, or ulimit -n 65536");
 *
 * A change is an exact thing to do; there is one with every finding that is not KV_FINE.
 */
#ifndef KV_TOOLS_DOCTOR_H
#define KV_TOOLS_DOCTOR_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "daemon/device.h"

enum kv_verdict {
	KV_FINE = 0,
	KV_WARN = 1, /* it works, with less than it could, or can't be known */
	KV_FAIL = 2,
};

/* One packet from a probe's process. */
struct kv_finding {
	uint32_t verdict;
	uint32_t last; /* that was all: nothing else in the packet counts */
	char seen[768];
	char change[768]; /* "": nothing */
};

struct kv_probing {
	int out; /* findings go there */
	int64_t deadline; /* CLOCK_MONOTONIC, ns */
	const char *socket; /* of the daemon; NULL: nothing says where */
	bool pending;
	struct kv_finding finding; /* the one that kv_change() adds to */
};

struct kv_probe {
	const char *name;
	const char *about;   /* "kvctl doctor --help" */
	int64_t limit_ns;
	bool needs_driver; /* not tried when the driver doesn't answer */
	const char *if_stuck; /* what to change when it doesn't come back */
	void (*run)(struct kv_probing *p);
};

void kv_seen(struct kv_probing *p, enum kv_verdict verdict, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
void kv_change(struct kv_probing *p, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* kv_number_in() - the number behind a line's @key in the file @path ("": its first); -1: none */
int64_t kv_number_in(const char *path, const char *key);

/* doctor_run.c: runs @probe in a child. Return: findings, from malloc(); at least one; NULL: -ENOMEM */
struct kv_finding *kv_probe_run(const struct kv_probe *probe, const char *socket, int64_t limit_ns,
				uint32_t *ret_n);

/* doctor_kernel.c */
void kv_probe_kernel(struct kv_probing *p);
void kv_probe_pidfd(struct kv_probing *p);
void kv_probe_memfd(struct kv_probing *p);
void kv_probe_io_uring(struct kv_probing *p);
void kv_probe_ptrace(struct kv_probing *p);

/* doctor_limits.c */
void kv_probe_limits(struct kv_probing *p);
void kv_probe_memory(struct kv_probing *p);

/* doctor_driver.c */
void kv_probe_driver(struct kv_probing *p);
void kv_probe_sharing(struct kv_probing *p);
/*
 * kv_driver_uuids() - the GPUs that CUDA shows this process, by ordinal, in the form of kv_gpu::uuid
 *
 * Return: how many there are, @max of them stored; -ENODEV: no driver, or it does not start
 */
int kv_driver_uuids(char (*uuids)[KV_UUID_TEXT_BYTES], int max);

/* doctor_handles.c */
void kv_probe_handles(struct kv_probing *p);

/* doctor_spaces.c */
void kv_probe_pid_namespaces(struct kv_probing *p);
/* @arena in this process, attached twice: what is written through one is read through the other */
int kv_doctor_attach(const struct kv_arena *arena);

/* doctor_socket.c */
void kv_probe_socket(struct kv_probing *p);
void kv_probe_daemon(struct kv_probing *p);
void kv_probe_devices(struct kv_probing *p);
void kv_probe_versions(struct kv_probing *p);

#endif
