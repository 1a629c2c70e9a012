/* SPDX-License-Identifier: Apache-2.0 */
/* Symptoms that others have had, each under its name, with a real daemon; kvcached-faults(7) lists them. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tests/support/client.h"

#define N_BLOCKS 40

static struct kv_client *client;
static struct kv_pool *pool;

static void start(void)
{
	daemon_start("--host", "64M");
	client = client_new();
	pool = pool_new_mapped(client, "symptoms", N_BLOCKS);
}

static void stop(void)
{
	kv_pool_close(pool);
	kv_disconnect(client);
	daemon_stop();
}

/* All that this process has mapped of the daemon's, opened again as whoever means harm would. */
START_TEST(no_client_can_truncate_what_others_have_mapped)
{
	DIR *dir = opendir("/proc/self/map_files");
	struct dirent *e;
	char path[512], target[512];
	int n = 0;

	ck_assert_ptr_nonnull(dir);
	while ((e = readdir(dir))) {
		ssize_t length;
		int fd;

		snprintf(path, sizeof(path), "/proc/self/map_files/%s", e->d_name);
		length = readlink(path, target, sizeof(target) - 1);
		if (length < 0)
			continue;
		target[length] = 0;
		if (!strstr(target, "memfd:kvcached"))
			continue;
		fd = open(path, O_RDWR | O_CLOEXEC);
		if (fd < 0) /* where nobody may open it so: as good */
			continue;
		n++;
		expect(ftruncate(fd, 0) < 0 && errno == EPERM, "%s: truncated", target);
		expect(ftruncate(fd, (off_t)1 << 40) < 0 && errno == EPERM, "%s: grown", target);
		expect(fallocate(fd, FALLOC_FL_COLLAPSE_RANGE, 0, 4096) < 0, "%s: collapsed", target);
		expect(fcntl(fd, F_GET_SEALS) & F_SEAL_SEAL, "%s: seals can be added", target);
		close(fd);
	}
	closedir(dir);
	if (!geteuid())
		expect(n >= 3, "%d files of the daemon were tried", n);
	must(kv_ping(client, TIMEOUT));
	books_balance(client);
}
END_TEST

/* Each question for the wall clock has an answer an hour off the last one, here and in the daemon. */
START_TEST(a_wall_clock_that_jumps_changes_no_deadline)
{
	struct kv_pool *other = pool_new(client, "symptoms", N_BLOCKS);
	time_t first = time(NULL), second = time(NULL);
	kv_block_id ids[N_BLOCKS], one;
	struct timespec a, b;
	int64_t ns;

	if (getenv("KV_CLOCK_JUMPS"))
		expect(llabs((long long)(second - first)) >= 3000, "the clock does not jump");
	must(kv_blocks_take(pool, N_BLOCKS, ids, TIMEOUT));
	for (int i = 0; i < 3; i++) {
		clock_gettime(CLOCK_MONOTONIC, &a);
		ck_assert_int_eq(kv_blocks_take(other, 1, &one, 200 * KV_MSEC), KV_NO_ROOM);
		clock_gettime(CLOCK_MONOTONIC, &b);
		ns = (b.tv_sec - a.tv_sec) * KV_SEC + b.tv_nsec - a.tv_nsec;
		expect(ns >= 200 * KV_MSEC && ns < TIMEOUT, "a wait of 200 ms took %lld ns", (long long)ns);
	}
	must(kv_blocks_give(pool, N_BLOCKS, ids));
	must(kv_blocks_take(other, 1, &one, TIMEOUT));
	must(kv_blocks_give(other, 1, &one));
	kv_pool_close(other);
	daemon_kill_worker();
	must(kv_ping(client, TIMEOUT));
	books_balance(client);
}
END_TEST

#define BUDGET (8u << 20)

/* A pool that is guaranteed BUDGET and may have no more. 0; negative */
static int open_budget(const char *name, struct kv_pool **ret)
{
	KV_OPTIONS(kv_pool_options, what, .name = name, .model = "budget", .layout = small_layout(),
		   .min_bytes = BUDGET, .max_bytes = BUDGET, .timeout = TIMEOUT);

	return kv_pool_open(client, &what, ret);
}

/* Takes all that there is. Return: how many blocks. */
static uint32_t take_all(struct kv_pool *budget)
{
	kv_block_id id;
	uint32_t n = 0;
	int r;

	while (!(r = kv_blocks_take(budget, 1, &id, 0)))
		n++;
	ck_assert_int_ge(r, KV_NO_ROOM);
	return n;
}

/* D35. */
START_TEST(a_budget_does_not_depend_on_who_runs_beside_or_has_just_ended)
{
	struct kv_pool *first, *second, *third, *more[8] = {NULL};
	uint32_t n, n_opened = 0;
	int r;

	must(open_budget("first", &first));
	n = take_all(first);
	ck_assert_uint_ge(n, BUDGET / BLOCK_BYTES * 9 / 10);
	ck_assert_uint_le(n, BUDGET / BLOCK_BYTES);
	must(open_budget("second", &second)); /* beside one that has all it may have */
	ck_assert_uint_eq(take_all(second), n);
	kv_pool_close(first);
	must(open_budget("third", &third)); /* after one that has just ended */
	ck_assert_uint_eq(take_all(third), n);
	/* The sum cannot be served for ever: then the numbers are said, and nobody loses anything. */
	while (!(r = open_budget((const char *[]){"a", "b", "c", "d", "e", "f", "g", "h"}[n_opened],
				 &more[n_opened])))
		ck_assert_uint_lt(++n_opened, 8);
	ck_assert_int_eq(r, -ENOMEM);
	expect(strstr(kv_error_text(), "needs 4 extents") && strstr(kv_error_text(), "promised to other"), "%s",
	       kv_error_text());
	while (n_opened)
		kv_pool_close(more[--n_opened]);
	kv_pool_close(third);
	kv_pool_close(second);
	books_balance(client);
}
END_TEST

START_TEST(the_library_brings_no_allocator_and_no_ring_along)
{
	static const char *const strangers[] = {"libjemalloc", "liburing", "libcuda", "libzmq"};
	FILE *f = fopen("/proc/self/maps", "re");
	bool found = false;
	char line[512];

	ck_assert_ptr_nonnull(f);
	while (fgets(line, sizeof(line), f)) {
		found |= strstr(line, "libkvclient") != NULL;
		for (size_t i = 0; i < sizeof(strangers) / sizeof(strangers[0]); i++)
			expect(!strstr(line, strangers[i]), "%s", line);
	}
	fclose(f);
	ck_assert(found);
}
END_TEST

/* Nothing of it lies where others write: memory has no name, the rest is the socket and what it was started with. */
static void has_no_file_open(pid_t process)
{
	char path[300], target[512];
	struct dirent *e;
	DIR *dir;
	int n = 0;

	snprintf(path, sizeof(path), "/proc/%d/fd", process);
	dir = opendir(path);
	ck_assert_ptr_nonnull(dir);
	while ((e = readdir(dir))) {
		struct stat st, out;
		ssize_t length;

		snprintf(path, sizeof(path), "/proc/%d/fd/%s", process, e->d_name);
		length = readlink(path, target, sizeof(target) - 1);
		if (length <= 0)
			continue;
		target[length] = 0;
		n++;
		/* Without a name: memory, and what the test's framework leaves to its children. */
		if (stat(path, &st) < 0 || !S_ISREG(st.st_mode) || !st.st_nlink)
			continue;
		snprintf(path, sizeof(path), "/proc/%d/fd/2", process);
		if (!stat(path, &out) && out.st_dev == st.st_dev && out.st_ino == st.st_ino)
			continue; /* its own words: the test's */
		snprintf(path, sizeof(path), "/proc/%d/exe", process);
		expect(!stat(path, &out) && out.st_dev == st.st_dev && out.st_ino == st.st_ino,
		       "%s is open", target);
	}
	closedir(dir);
	ck_assert_int_gt(n, 3);
}

START_TEST(the_daemon_takes_no_rights_along_and_keeps_no_file_anywhere)
{
	struct stat st;

	must(stat(getenv("KVCACHED_BIN"), &st));
	ck_assert_uint_eq(st.st_mode & (S_ISUID | S_ISGID), 0);
	daemon_fds(); /* when it has come to rest: a mover that starts loads its libraries */
	has_no_file_open(daemon_pid());
	has_no_file_open(daemon_worker());
	has_no_file_open((pid_t)gpu_stats(client).mover_pid);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("client/symptoms");
	TCase *symptoms = tcase_create("symptoms");

	tcase_add_checked_fixture(symptoms, start, stop);
	tcase_set_timeout(symptoms, 60);
	tcase_add_test(symptoms, no_client_can_truncate_what_others_have_mapped);
	tcase_add_test(symptoms, a_wall_clock_that_jumps_changes_no_deadline);
	tcase_add_test(symptoms, a_budget_does_not_depend_on_who_runs_beside_or_has_just_ended);
	tcase_add_test(symptoms, the_library_brings_no_allocator_and_no_ring_along);
	tcase_add_test(symptoms, the_daemon_takes_no_rights_along_and_keeps_no_file_anywhere);
	suite_add_tcase(suite, symptoms);
	return daemon_run_tests(suite);
}
