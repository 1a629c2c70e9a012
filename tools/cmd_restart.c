/* SPDX-License-Identifier: Apache-2.0 */
/* kvctl restart-worker [--binary PATH] */
#include <getopt.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>

#include "include/internal/cleanup.h"
#include "tools/kvctl.h"
#include "tools/progress.h"

const struct option kv_restart_options[] = {
	{"binary", required_argument, NULL, 'b'},
	{"json", no_argument, NULL, 'j'},
	{NULL},
};

static int one_daemon(struct kv_ctl *ctl, struct kv_daemon_stats *ret)
{
	kv_cleanup(kv_freep) struct kv_daemon_stats *stats = NULL;
	size_t n;
	int status = kv_ctl_ask(ctl, KV_STAT_DAEMON, &stats, &n);

	if (!status)
		*ret = stats[0];
	return status;
}

static void show(struct kv_emit *e, const struct kv_daemon_stats *before,
		 const struct kv_daemon_stats *now)
{
	kv_emit_open(e, NULL, '{');
	kv_emit_text(e, "version", now->version);
	kv_emit_number(e, "worker_pid", now->worker_pid);
	kv_emit_number(e, "worker_restarts", now->worker_restarts);
	kv_emit_close(e);
	kv_emit_line(e, "worker %" PRIu64 " (%s) took over from %" PRIu64 " (%s)", now->worker_pid,
		     now->version, before->worker_pid, before->version);
}

int kv_cmd_restart(struct kv_ctl *ctl, int argc, char **argv)
{
	struct kv_daemon_stats before, now;
	struct kv_progress progress;
	char path[PATH_MAX];
	const char *binary = NULL;
	int c, r, status;

	optind = 0;
	opterr = 0;
	while ((c = getopt_long(argc, argv, ":j", kv_restart_options, NULL)) != -1) {
		if (c == 'b')
			binary = optarg;
		else if (c == 'j')
			ctl->emit.json = true;
		else
			return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
					     c == ':' ? "option '%s' needs a value" :
							"'%s': kvctl restart-worker [--binary PATH]",
					     argv[optind - 1]);
	}
	if (optind < argc)
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE, "'%s': kvctl restart-worker [--binary PATH]",
				     argv[optind]);
	if (binary && !realpath(binary, path))
		return kv_ctl_refuse(ctl, KV_EXIT_FAILED, "--binary: '%s': there is no such file",
				     binary);
	status = kv_ctl_connect(ctl);
	if (!status)
		status = one_daemon(ctl, &before);
	if (status)
		return status;
	kv_progress_init(&progress, ctl->emit.json);
	kv_progress_show(&progress, 0, 1, "workers replaced");
	r = kv_worker_restart(ctl->client, binary ? path : NULL, kv_ctl_left(ctl));
	kv_progress_end(&progress);
	if (r < 0)
		return kv_ctl_broken(ctl, r);
	status = one_daemon(ctl, &now);
	if (!status)
		show(&ctl->emit, &before, &now);
	return status;
}
