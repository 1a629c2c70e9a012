/* SPDX-License-Identifier: Apache-2.0 */
/* kvctl bench: kvbench takes this process's place, with the daemon that kvctl would ask. */
#include <errno.h>
#include <libgen.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "include/internal/cleanup.h"
#include "tools/kvctl.h"

void kv_ctl_find_kvbench(char path[PATH_MAX])
{
	static const char *const places[] = {"kvbench", "bench/kvbench"};
	char own[PATH_MAX];
	ssize_t n = readlink("/proc/self/exe", own, sizeof(own) - 1);

	own[n > 0 ? n : 0] = 0;
	for (unsigned i = 0; n > 0 && i < sizeof(places) / sizeof(*places); i++) {
		char folder[PATH_MAX];

		strcpy(folder, own);
		if (snprintf(path, PATH_MAX, "%s/%s", dirname(folder), places[i]) < PATH_MAX &&
		    !access(path, X_OK))
			return;
	}
	strcpy(path, "kvbench");
}

/* @socket: NULL: kvbench starts a daemon */
static int become_kvbench(struct kv_ctl *ctl, const char *socket, int argc, char **argv)
{
	kv_cleanup(kv_freep) char **args = calloc((size_t)argc + 5, sizeof(*args));
	char path[PATH_MAX];
	int n = 0;

	if (!args)
		return kv_ctl_refuse(ctl, KV_EXIT_FAILED, "no memory");
	kv_ctl_find_kvbench(path);
	args[n++] = path;
	if (socket) {
		args[n++] = "--socket";
		args[n++] = (char *)socket;
	}
	if (ctl->emit.json)
		args[n++] = "--json";
	for (int i = 0; i < argc; i++)
		args[n++] = argv[i];
	ctl->client = kv_disconnect(ctl->client);
	execvp(path, args);
	return kv_ctl_refuse(ctl, KV_EXIT_FAILED, "%s: %s", path, strerror(errno));
}

int kv_ctl_kvbench(struct kv_ctl *ctl, int argc, char **argv)
{
	int status = kv_ctl_connect(ctl); /* so that it is kvctl that says where it looked */

	return status ? status : become_kvbench(ctl, ctl->socket, argc, argv);
}

int kv_ctl_kvbench_alone(struct kv_ctl *ctl, int argc, char **argv)
{
	return become_kvbench(ctl, NULL, argc, argv);
}

int kv_cmd_bench(struct kv_ctl *ctl, int argc, char **argv)
{
	if (argc < 2)
		return kv_ctl_refuse(ctl, KV_EXIT_USAGE,
				     "usage: kvctl bench BENCHMARK [OPTION...] (see kvbench --help)");
	return kv_ctl_kvbench(ctl, argc - 1, argv + 1);
}
