/* SPDX-License-Identifier: Apache-2.0 */
/* What a daemon with a GPU tells of its kind of export: at the handshake, in stats, and by kvctl. */
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "include/internal/arena_export.h"
#include "tests/support/client.h"

static const struct {
	const char *kind;
	uint32_t number; /* enum kv_export_kind */
	bool limited;
} kinds[] = {{"vmm", KV_EXPORT_VMM, false}, {"ipc", KV_EXPORT_IPC, true}};

static bool has_gpu(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	int (*init)(unsigned int flags), (*count)(int *n);
	void *a = library ? dlsym(library, "cuInit") : NULL, *b = a ? dlsym(library, "cuDeviceGetCount") : NULL;
	int n = 0;

	if (!b)
		return false;
	memcpy(&init, &a, sizeof(a));
	memcpy(&count, &b, sizeof(b));
	return !init(0) && !count(&n) && n;
}

static void kvctl_says(const char *command, char *text, size_t size)
{
	char line[PATH_MAX + 200];
	FILE *f;

	snprintf(line, sizeof(line), "'%s' -s '%s' -t 60 %s", getenv("KVCTL_BIN"), daemon_socket(), command);
	f = popen(line, "r");
	ck_assert_ptr_nonnull(f);
	text[fread(text, 1, size - 1, f)] = 0;
	expect(!pclose(f), "kvctl %s fails: %s", command, text);
}

START_TEST(what_an_export_cannot_promise_is_said_at_the_handshake_and_in_stats)
{
	const char *limits = kv_export_limits(kinds[_i].number);
	struct kv_gpu_stats stats;
	const struct kv_gpu *gpus;
	struct kv_client *client;
	char text[8192];

	daemon_start("--gpus", "0", "--reserve", "1G", "--export", kinds[_i].kind, "--log-level", "error");
	client = client_new();
	ck_assert_int_eq(kv_client_gpus(client, &gpus), 1);
	ck_assert_str_eq(gpus[0].export_kind, kinds[_i].kind);
	ck_assert_str_eq(gpus[0].limits, limits);
	ck_assert_int_eq(!!limits[0], kinds[_i].limited);
	ck_assert_int_eq(strncmp(gpus[0].uuid, "GPU-", 4), 0);
	stats = gpu_stats(client);
	ck_assert_str_eq(stats.export_kind, kinds[_i].kind);
	ck_assert_str_eq(stats.export_limits, limits);
	ck_assert_str_eq(stats.uuid, gpus[0].uuid);
	kvctl_says("stats", text, sizeof(text));
	expect(!!strstr(text, "memory ends with its owner process") == kinds[_i].limited, "kvctl stats says '%s'", text);
	kvctl_says("--json doctor devices", text, sizeof(text));
	expect(strstr(text, stats.uuid) && strstr(text, "is CUDA device"), "kvctl doctor says '%s'", text);
	kv_disconnect(client);
	daemon_stop();
}
END_TEST

/* KVCACHED_BIN and KVCTL_BIN, where nobody has set them: in the build that this program is of. */
static void find_programs(void)
{
	static const char *const names[][2] = {{"KVCACHED_BIN", "daemon/kvcached"}, {"KVCTL_BIN", "tools/kvctl"}};
	char own[PATH_MAX] = "", path[PATH_MAX + 40];
	ssize_t n = readlink("/proc/self/exe", own, sizeof(own) - 1);
	char *slash = n > 0 ? strrchr(own, '/') : NULL;

	for (int i = 0; slash && i < 2; i++) {
		snprintf(path, sizeof(path), "%.*s/../../%s", (int)(slash - own), own, names[i][1]);
		setenv(names[i][0], path, 0);
	}
}

int main(void)
{
	Suite *s = suite_create("gpu/export");
	TCase *tcase = tcase_create("export");
	pid_t probe;
	int status = 1;

	/* A process that has asked the driver can't fork any more: another one asks. */
	if (!(probe = fork()))
		_exit(has_gpu() ? 0 : 77);
	if (probe < 0 || waitpid(probe, &status, 0) != probe || status) {
		fprintf(stderr, "skipped: no GPU\n");
		return 77;
	}
	find_programs();
	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, what_an_export_cannot_promise_is_said_at_the_handshake_and_in_stats, 0, 2);
	suite_add_tcase(s, tcase);
	return daemon_run_tests(s);
}
