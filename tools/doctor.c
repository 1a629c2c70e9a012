/* SPDX-License-Identifier: Apache-2.0 */
/* kvctl doctor [PROBE...]: the table of probes, and what is shown of their findings. */
#include <getopt.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "include/internal/cleanup.h"
#include "include/internal/nearest.h"
#include "include/internal/socket.h"
#include "tools/doctor.h"
#include "tools/kvctl.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
#define COLUMNS	      96
#define INDENT	      24

#define IF_DRIVER                                                                                  \
	"look for NVRM and Xid lines in dmesg; nvidia-smi hangs as well? then reset the GPU or reboot"

static const struct kv_probe probes[] = {
	{"kernel", "its version and the calls that have no substitute", 5 * KV_SEC, false,
	 "a sandbox traps these calls: run where it does not", kv_probe_kernel},
	{"pidfd", "the death of a client is seen, and whose socket it is", 5 * KV_SEC, false,
	 "a sandbox traps pidfd_open: allow it", kv_probe_pidfd},
	{"memfd", "shared pages that nobody can truncate", 5 * KV_SEC, false,
	 "a sandbox traps memfd_create: allow it", kv_probe_memfd},
	{"io_uring", "the ring of the daemon's event loop", 10 * KV_SEC, false,
	 "start kvcached with --event-loop epoll", kv_probe_io_uring},
	{"limits", "open files, locked memory, processes, sizes of files", 5 * KV_SEC, false,
	 "none is known", kv_probe_limits},
	{"memory", "of the machine and of the cgroup, /dev/shm, huge pages", 5 * KV_SEC, false,
	 "a file under /proc, /sys or /dev/shm does not answer: look for processes in state D",
	 kv_probe_memory},
	{"ptrace", "who may look into another process", 5 * KV_SEC, false, "none is known",
	 kv_probe_ptrace},
	{"driver", "NVIDIA's driver, its versions and its GPUs", 30 * KV_SEC, false, IF_DRIVER,
	 kv_probe_driver},
	{"sharing", "MIG, MPS, compute mode, who else runs there", 20 * KV_SEC, true, IF_DRIVER,
	 kv_probe_sharing},
	{"handles", "memory of each kind, handed to another process", 90 * KV_SEC, true, IF_DRIVER,
	 kv_probe_handles},
	{"pid-namespaces", "the same across PID namespaces, as between containers", 90 * KV_SEC, true,
	 IF_DRIVER, kv_probe_pid_namespaces},
	{"socket", "where the daemon listens: path, folders, permissions", 5 * KV_SEC, false,
	 "a file system does not answer: give a socket elsewhere with -s", kv_probe_socket},
	{"daemon", "is it there, does it answer, is it well", 10 * KV_SEC, false,
	 "it does not answer: see its log; kvctl restart-worker, or kill -9 its worker",
	 kv_probe_daemon},
	{"devices", "the GPUs of the daemon are seen by this process", 30 * KV_SEC, true, IF_DRIVER,
	 kv_probe_devices},
	{"versions", "library, daemon and shared pages fit together", 10 * KV_SEC, false,
	 "loading libkvclient.so.0 hangs: look at what LD_PRELOAD and LD_LIBRARY_PATH name",
	 kv_probe_versions},
};

const char *kv_doctor_probe(size_t i, const char **ret_about)
{
	if (i >= ARRAY_SIZE(probes))
		return NULL;
	*ret_about = probes[i].about;
	return probes[i].name;
}

static const char *const verdicts[] = {[KV_FINE] = "ok", [KV_WARN] = "warn", [KV_FAIL] = "fail"};

static void help(struct kv_ctl *ctl)
{
	fprintf(ctl->emit.out, "Usage: kvctl doctor [PROBE...]\n\nProbes:\n");
	for (size_t i = 0; i < ARRAY_SIZE(probes); i++)
		fprintf(ctl->emit.out, "  %-15s %s\n", probes[i].name, probes[i].about);
	fprintf(ctl->emit.out, "\nExit status: 0 all is well, 1 something fails, 4 warnings only.\n");
}

/* @text from column INDENT on, at most COLUMNS wide where it has blanks; @head is in its first line. */
static void show_text(struct kv_emit *e, const char *head, const char *text)
{
	do {
		size_t n = strlen(text), room = COLUMNS - INDENT;

		if (n > room) {
			n = room;
			while (n && text[n] != ' ')
				n--;
			if (!n)
				n = strcspn(text, " ");
		}
		kv_emit_line(e, "%-*s%.*s", INDENT, head, (int)n, text);
		head = "";
		text += n + (text[n] == ' ');
	} while (*text);
}

static void show(struct kv_emit *e, const struct kv_probe *probe, const struct kv_finding *f,
		 uint32_t n, int64_t ns)
{
	for (uint32_t i = 0; i < n; i++) {
		const char *verdict = verdicts[f[i].verdict <= KV_FAIL ? f[i].verdict : KV_FAIL];
		char head[INDENT + 1], change[sizeof(f[i].change) + 4];

		kv_emit_open(e, NULL, '{');
		kv_emit_text(e, "probe", probe->name);
		kv_emit_text(e, "verdict", verdict);
		kv_emit_text(e, "seen", f[i].seen);
		kv_emit_text(e, "change", f[i].change);
		kv_emit_number(e, "probe_ns", (uint64_t)ns);
		kv_emit_close(e);
		snprintf(head, sizeof(head), "%-5s %-16.16s ", verdict, i ? "" : probe->name);
		show_text(e, head, f[i].seen);
		if (f[i].change[0]) {
			snprintf(change, sizeof(change), "-> %s", f[i].change);
			show_text(e, "", change);
		}
	}
}

static const struct kv_probe *find(const char *name)
{
	for (size_t i = 0; i < ARRAY_SIZE(probes); i++)
		if (!strcmp(probes[i].name, name))
			return &probes[i];
	return NULL;
}

static bool is_wanted(const struct kv_probe *probe, int n_names, char **names)
{
	for (int i = 0; i < n_names; i++)
		if (!strcmp(names[i], probe->name))
			return true;
	return !n_names;
}


static int run_all(struct kv_ctl *ctl, int n_names, char **names)
{
	struct kv_emit *e = &ctl->emit;
	uint32_t count[KV_FAIL + 1] = {0}, worst;
	bool driver_is_stuck = false;

	kv_emit_open(e, NULL, '{');
	kv_emit_open(e, "findings", '[');
	for (const struct kv_probe *probe = probes; probe < probes + ARRAY_SIZE(probes); probe++) {
		static const struct kv_finding not_tried = {
			.verdict = KV_WARN,
			.seen = "not tried: the driver does not answer",
			.change = "see what driver says"};
		kv_cleanup(kv_freep) struct kv_finding *own = NULL;
		const struct kv_finding *f = &not_tried;
		int64_t start = kv_now();
		uint32_t n = 1;

		if (!is_wanted(probe, n_names, names))
			continue;
		if (!probe->needs_driver || !driver_is_stuck) {
			f = own = kv_probe_run(probe, ctl->socket,
					       ctl->limit_ns ? ctl->limit_ns : probe->limit_ns, &n);
			if (!own)
				return kv_ctl_refuse(ctl, KV_EXIT_FAILED, "no memory for findings");
		}
		if (probe->run == kv_probe_driver)
			driver_is_stuck = strstr(f[n - 1].seen, "no answer within");
		show(e, probe, f, n, kv_now() - start);
		for (uint32_t i = 0; i < n; i++)
			count[f[i].verdict <= KV_FAIL ? f[i].verdict : KV_FAIL]++;
		if (!e->json)
			fflush(e->out);
	}
	worst = count[KV_FAIL] ? KV_FAIL : count[KV_WARN] ? KV_WARN : KV_FINE;
	kv_emit_close(e);
	kv_emit_text(e, "worst", verdicts[worst]);
	kv_emit_number(e, "n_ok", count[KV_FINE]);
	kv_emit_number(e, "n_warn", count[KV_WARN]);
	kv_emit_number(e, "n_fail", count[KV_FAIL]);
	kv_emit_close(e);
	kv_emit_line(e, "%u ok, %u to look at, %u failed", count[KV_FINE], count[KV_WARN],
		     count[KV_FAIL]);
	return worst == KV_FAIL ? KV_EXIT_FAILED : worst == KV_WARN ? KV_EXIT_WARNED : KV_EXIT_DONE;
}

static const char *nearest(const char *word)
{
	const char *found = NULL;

	for (size_t i = 0; i < ARRAY_SIZE(probes); i++) {
		if (kv_word_is_near(word, probes[i].name) &&
		    (!found || kv_word_distance(word, probes[i].name) < kv_word_distance(word, found)))
			found = probes[i].name;
	}
	return found;
}

int kv_cmd_doctor(struct kv_ctl *ctl, int argc, char **argv)
{
	const char *near;

	for (int i = 1; i < argc; i++) {
		if (find(argv[i]))
			continue;
		if (!strcmp(argv[i], "help")) {
			help(ctl);
			return KV_EXIT_DONE;
		}
		near = nearest(argv[i]);
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "no probe is called '%.64s'%s%s (kvctl doctor help lists them)",
				     argv[i], near ? "; the nearest is " : "", near ? near : "");
	}
	if (!ctl->socket && kv_find_socket(ctl->default_socket) >= 0)
		ctl->socket = ctl->default_socket;
	return run_all(ctl, argc - 1, argv + 1);
}
