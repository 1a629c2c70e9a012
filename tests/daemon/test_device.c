/* SPDX-License-Identifier: Apache-2.0 */
/* daemon/device_host.c, and how a missing GPU is reported. */
#include <check.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <kvcached/kvcached.h>

#include "daemon/device.h"

#define MIB ((uint64_t)1 << 20)

static struct kv_arena *arena_of(uint64_t bytes)
{
	struct kv_arena *arena = NULL;

	ck_assert_msg(kv_device_host.arena_new(0, bytes, 0, 0, &arena) == 0, "%s", kv_error_text());
	return arena;
}

static int count_fds(void)
{
	DIR *dir = opendir("/proc/self/fd");
	int n = 0;

	ck_assert_ptr_nonnull(dir);
	while (readdir(dir))
		n++;
	closedir(dir);
	return n;
}

START_TEST(host_memory_says_how_much_there_is)
{
	struct kv_device_info info;

	ck_assert_int_eq(kv_device_host.info(0, &info), 0);
	ck_assert_str_eq(info.name, "host memory");
	ck_assert_uint_gt(info.free_bytes, 0);
	ck_assert_uint_ge(info.total_bytes, info.free_bytes);
	ck_assert_uint_le(info.total_bytes,
			  (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE));
	for (int i = 0; i < KV_UUID_BYTES; i++)
		ck_assert_uint_eq(info.uuid[i], 0);

	ck_assert_int_eq(kv_device_host.info(1, &info), -ENODEV);
	ck_assert_int_eq(kv_device_host.info(-1, &info), -ENODEV);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "-1"));
}
END_TEST

/* Files that a container of 1 GiB would see, 600 MiB of it used, 200 MiB of that by idle files. */
static const char *const limit_files[][2] = {
	{"memory.max", "1073741824\n"},
	{"memory.current", "629145600\n"},
	{"memory/memory.limit_in_bytes", "1073741824\n"},
	{"memory/memory.usage_in_bytes", "629145600\n"},
	{"memory.stat", "anon 4096\ninactive_file 209715200\n"},
	{"memory/memory.stat", "cache 4096\ninactive_file 209715200\n"},
};

#define NO_NAMESPACE 77

static int info_under_a_limit(void)
{
	struct kv_device_info info;
	char path[128];

	if (unshare(CLONE_NEWNS | (geteuid() ? CLONE_NEWUSER : 0)) < 0 ||
	    mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
	    mount("none", "/sys/fs/cgroup", "tmpfs", 0, NULL) < 0)
		return NO_NAMESPACE;
	mkdir("/sys/fs/cgroup/memory", 0755);
	for (size_t i = 0; i < sizeof(limit_files) / sizeof(limit_files[0]); i++) {
		FILE *f;

		snprintf(path, sizeof(path), "/sys/fs/cgroup/%s", limit_files[i][0]);
		f = fopen(path, "we");
		if (!f || fputs(limit_files[i][1], f) < 0 || fclose(f))
			return 1;
	}
	if (kv_device_host.info(0, &info) < 0)
		return 2;
	if (info.total_bytes != 1024 * MIB)
		return 3;
	return info.free_bytes == (1024 - 400) * MIB ? 0 : 4;
}

START_TEST(a_memory_limit_of_the_container_is_obeyed)
{
	pid_t pid = fork();
	int status;

	ck_assert_int_ge(pid, 0);
	if (!pid)
		_exit(info_under_a_limit());
	ck_assert_int_eq(waitpid(pid, &status, 0), pid);
	ck_assert(WIFEXITED(status));
	if (WEXITSTATUS(status) == NO_NAMESPACE)
		fprintf(stderr, "not tried: no mount namespace may be made here\n");
	else
		ck_assert_int_eq(WEXITSTATUS(status), 0);
}
END_TEST

START_TEST(an_arena_has_exactly_the_size_asked_for_and_keeps_it)
{
	struct kv_arena *arena = arena_of(1024 * MIB);
	struct stat st;
	int fd = arena->fds[0];

	ck_assert_uint_eq(arena->export.kind, KV_EXPORT_HOST);
	ck_assert_uint_eq(arena->export.n_fds, 1);
	ck_assert_uint_eq(arena->export.bytes, 1024 * MIB);
	ck_assert_uint_eq(arena->export.granule_bytes, 1024 * MIB);
	ck_assert_int_eq(arena->export.owner_pid, getpid());
	ck_assert_int_eq(arena->owner_pidfd, -1);
	ck_assert_int_eq(fstat(fd, &st), 0);
	ck_assert_uint_eq((uint64_t)st.st_size, 1024 * MIB);
	ck_assert_int_eq(st.st_blocks, 0); /* sparse: nothing is taken before it is used */
	ck_assert_int_eq(fcntl(fd, F_GETFD), FD_CLOEXEC);
	ck_assert_int_eq(ftruncate(fd, 4096), -1);
	ck_assert_int_eq(ftruncate(fd, (off_t)(2048 * MIB)), -1);
	ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
	kv_device_host.arena_free(arena);
	ck_assert_int_eq(fcntl(fd, F_GETFD), -1);
}
END_TEST

START_TEST(no_two_arenas_have_one_epoch)
{
	struct kv_arena *a = arena_of(2 * MIB), *b = arena_of(2 * MIB);

	ck_assert_uint_ne(a->export.epoch, 0);
	ck_assert_uint_ne(a->export.epoch, b->export.epoch);
	kv_device_host.arena_free(a);
	kv_device_host.arena_free(b);
}
END_TEST

START_TEST(an_arena_that_does_not_fit_names_both_numbers)
{
	struct kv_arena *arena = NULL;
	struct kv_device_info info;
	const uint64_t asked = (uint64_t)1 << 50;
	char word[32];

	ck_assert_int_eq(kv_device_host.arena_new(0, asked, 0, 0, &arena), -ENOMEM);
	ck_assert_ptr_null(arena);
	snprintf(word, sizeof(word), "%" PRIu64, asked);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), word));
	ck_assert_int_eq(kv_device_host.info(0, &info), 0);
	snprintf(word, sizeof(word), "of %" PRIu64 " bytes", info.total_bytes);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), word));
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "free"));
}
END_TEST

static const struct {
	int ordinal;
	uint64_t bytes, granule_bytes;
	uint32_t kind;
	int r;
	const char *text;
} refused[] = {
	{1, 2 * MIB, 0, 0, -ENODEV, "device 1"},
	{0, 0, 0, 0, -EINVAL, "multiple of 2097152"},
	{0, 3 * MIB, 0, 0, -EINVAL, "3145728"},
	{0, UINT64_MAX - 2 * MIB + 1, 0, 0, -EINVAL, "multiple"},
	{0, 2 * MIB, 0, KV_EXPORT_VMM, -ENOTSUP, "vmm"},
	{0, 2 * MIB, 0, KV_EXPORT_IPC, -ENOTSUP, "ipc"},
	{0, 2 * MIB, 0, 77, -ENOTSUP, "unknown"},
	{0, 4 * MIB, 3 * MIB, 0, -EINVAL, "granules of 3145728"},
	{0, 4 * MIB, 6 * MIB, 0, -EINVAL, "no larger than the arena"},
};

START_TEST(an_arena_that_cannot_be_made_is_refused_with_its_reason)
{
	struct kv_arena *arena = NULL;
	int n_fds = count_fds();

	ck_assert_int_eq(kv_device_host.arena_new(refused[_i].ordinal, refused[_i].bytes,
						  refused[_i].kind, refused[_i].granule_bytes,
						  &arena),
			 refused[_i].r);
	ck_assert_msg(strstr(kv_error_text(), refused[_i].text), "%s", kv_error_text());
	ck_assert_ptr_null(arena);
	ck_assert_int_eq(count_fds(), n_fds);
}
END_TEST

START_TEST(a_thousand_arenas_leave_no_descriptor_behind)
{
	int n_fds = count_fds();

	for (int i = 0; i < 1000; i++)
		kv_device_host.arena_free(arena_of(2 * MIB));
	kv_device_host.arena_free(NULL);
	ck_assert_int_eq(count_fds(), n_fds);
}
END_TEST

/* The one table of what the handshake (kv_gpu::limits) and stats (export_limits) say. */
START_TEST(an_ipc_export_says_which_promises_do_not_hold_and_the_others_nothing)
{
	ck_assert_str_eq(kv_export_limits(KV_EXPORT_HOST), "");
	ck_assert_str_eq(kv_export_limits(KV_EXPORT_VMM), "");
	ck_assert_ptr_nonnull(strstr(kv_export_limits(KV_EXPORT_IPC), "ends with its owner process"));
	ck_assert_ptr_nonnull(strstr(kv_export_limits(KV_EXPORT_IPC), "clients can write all of the arena"));
	/* It is copied there, and must not be cut. */
	ck_assert_uint_lt(strlen(kv_export_limits(KV_EXPORT_IPC)), sizeof(((struct kv_gpu *)0)->limits));
	ck_assert_uint_lt(strlen(kv_export_limits(KV_EXPORT_IPC)), sizeof(((struct kv_gpu_stats *)0)->export_limits));
}
END_TEST

START_TEST(a_gpu_that_is_not_there_is_named)
{
	struct kv_device_info info;
	struct kv_arena *arena = NULL;
	int r = kv_device_cuda.info(77, &info);
	int n_fds = count_fds();

	ck_assert_msg(r == -ENODEV || r == -ENOTSUP, "%d: %s", r, kv_error_text());
	ck_assert_msg(strstr(kv_error_text(), "GPU 77"), "%s", kv_error_text());
	ck_assert_int_eq(kv_device_cuda.arena_new(77, 2 * MIB, 0, 0, &arena), r);
	ck_assert_msg(strstr(kv_error_text(), "GPU 77"), "%s", kv_error_text());
	kv_device_cuda.arena_free(NULL);
	ck_assert_int_eq(count_fds(), n_fds);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("daemon/device");
	TCase *tcase = tcase_create("host");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, host_memory_says_how_much_there_is);
	tcase_add_test(tcase, a_memory_limit_of_the_container_is_obeyed);
	tcase_add_test(tcase, an_arena_has_exactly_the_size_asked_for_and_keeps_it);
	tcase_add_test(tcase, no_two_arenas_have_one_epoch);
	tcase_add_test(tcase, an_arena_that_does_not_fit_names_both_numbers);
	tcase_add_loop_test(tcase, an_arena_that_cannot_be_made_is_refused_with_its_reason, 0,
			    sizeof(refused) / sizeof(refused[0]));
	tcase_add_test(tcase, a_thousand_arenas_leave_no_descriptor_behind);
	tcase_add_test(tcase, an_ipc_export_says_which_promises_do_not_hold_and_the_others_nothing);
	tcase_add_test(tcase, a_gpu_that_is_not_there_is_named);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
