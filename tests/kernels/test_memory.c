/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/memory.c over host arenas: attaching, counting, refusing, forking. */
#include <check.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/device.h"
#include "include/internal/error.h"
#include "include/kvcached/types.h"
#include "kernels/memory.h"

#define MIB	    ((uint64_t)1 << 20)
#define ARENA_BYTES (8 * MIB)

static struct kv_arena *arena;

static void setup(void)
{
	ck_assert_msg(kv_device_host.arena_new(0, ARENA_BYTES, 0, 0, &arena) == 0, "%s",
		      kv_error_text());
}

static void teardown(void)
{
	kv_device_host.arena_free(arena);
}

static struct kv_memory *attach(bool read_only)
{
	struct kv_memory *memory = NULL;

	ck_assert_msg(kv_memory_attach(&arena->export, arena->fds, read_only, &memory) == 0, "%s",
		      kv_error_text());
	return memory;
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

/* Mappings of an arena in this process. */
static int count_maps(void)
{
	FILE *f = fopen("/proc/self/maps", "re");
	char line[512];
	int n = 0;

	ck_assert_ptr_nonnull(f);
	while (fgets(line, sizeof(line), f))
		n += strstr(line, "memfd:kvcached-arena") != NULL;
	fclose(f);
	return n;
}

/* Runs @f in a forked child. Return: its exit status, or minus the signal that ended it. */
static int in_child(int (*f)(void *), void *arg)
{
	pid_t pid = fork();
	int status;

	ck_assert_int_ge(pid, 0);
	if (!pid) {
		signal(SIGSEGV, SIG_DFL);
		signal(SIGBUS, SIG_DFL);
		_exit(f(arg));
	}
	ck_assert_int_eq(waitpid(pid, &status, 0), pid);
	return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

START_TEST(an_arena_attached_twice_is_mapped_once_and_counted)
{
	struct kv_memory *a = attach(false);
	struct kv_memory *b = attach(false);
	char *base = kv_memory_base(a);

	ck_assert_ptr_eq(kv_memory_base(b), base);
	ck_assert_int_eq(kv_memory_device(a), KV_DEVICE_HOST);
	ck_assert_int_eq(count_maps(), 1);

	kv_memory_detach(a);
	base[ARENA_BYTES - 1] = 7; /* still there for b */
	ck_assert_int_eq(count_maps(), 1);
	ck_assert_ptr_null(kv_memory_detach(b));
	ck_assert_int_eq(count_maps(), 0);
}
END_TEST

START_TEST(two_arenas_are_two_mappings)
{
	struct kv_arena *other = NULL;
	struct kv_memory *a = attach(false);
	struct kv_memory *b = NULL;

	ck_assert_int_eq(kv_device_host.arena_new(0, ARENA_BYTES, 0, 0, &other), 0);
	ck_assert_int_eq(kv_memory_attach(&other->export, other->fds, false, &b), 0);
	ck_assert_ptr_ne(kv_memory_base(a), kv_memory_base(b));
	*(char *)kv_memory_base(a) = 1;
	ck_assert_int_eq(*(char *)kv_memory_base(b), 0);

	kv_memory_detach(a);
	kv_memory_detach(b);
	kv_device_host.arena_free(other);
}
END_TEST

static int store(void *p)
{
	*(volatile char *)p = 1;
	return 0;
}

static int attach_and_store(void *read_only)
{
	struct kv_memory *memory = NULL;

	if (kv_memory_attach(&arena->export, arena->fds, read_only != NULL, &memory) < 0)
		return 100;
	return store(kv_memory_base(memory));
}

START_TEST(a_store_through_a_read_only_mapping_faults)
{
	struct kv_memory *rw = attach(false);
	struct kv_memory *ro = attach(true);
	char byte = 5;

	ck_assert_ptr_ne(kv_memory_base(rw), kv_memory_base(ro));
	ck_assert_int_eq(kv_memory_write(rw, 3, &byte, 1), 0);
	ck_assert_int_eq(((char *)kv_memory_base(ro))[3], 5);
	ck_assert_int_eq(kv_memory_write(ro, 3, &byte, 1), -EPERM);
	ck_assert_int_eq(kv_memory_zero(ro, 3, 1, NULL), -EPERM);
	ck_assert_int_eq(kv_memory_copy(ro, 3, 9, 1, NULL), -EPERM);
	kv_memory_detach(ro);
	kv_memory_detach(rw);

	ck_assert_int_eq(in_child(attach_and_store, NULL), 0);
	ck_assert_int_eq(in_child(attach_and_store, arena), -SIGSEGV);
}
END_TEST

/* Two pools in one arena, the second at 3 MiB; see the owner's bytes at their place, answer there.
 */
#define POOL_2 3145728

static int use_both_pools(void *arg)
{
	struct kv_memory *one = NULL, *two = NULL;
	unsigned char *pool;

	for (int i = 0; i < 2; i++)
		if (kv_memory_attach(&arena->export, arena->fds, false, &one) < 0 ||
		    kv_memory_attach(&arena->export, arena->fds, false, &two) < 0)
			return 100;
	if (kv_memory_base(one) != kv_memory_base(two))
		return 101;
	pool = (unsigned char *)kv_memory_base(two) + POOL_2;
	for (int i = 0; i < 4096; i++)
		if (pool[i] != (unsigned char)(i * 7 + 2))
			return 102;
	pool[4096] = 0xa5;
	kv_memory_detach(one);
	kv_memory_detach(one);
	kv_memory_detach(two);
	pool[4097] = 0x5a; /* one user is left */
	kv_memory_detach(two);
	return count_maps();
}

/* D37. */
START_TEST(a_pool_at_an_offset_is_at_that_place_in_another_process)
{
	struct kv_memory *memory;
	unsigned char *base;
	uint64_t n_set = 0;

	/* The child is forked before any attach of the parent: it shares nothing but the fd. */
	base = mmap(NULL, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, arena->fds[0], 0);
	ck_assert_ptr_ne(base, MAP_FAILED);
	for (int i = 0; i < 4096; i++)
		base[POOL_2 + i] = (unsigned char)(i * 7 + 2);
	munmap(base, ARENA_BYTES);
	ck_assert_int_eq(in_child(use_both_pools, NULL), 0);

	memory = attach(true);
	base = kv_memory_base(memory);
	ck_assert_int_eq(base[POOL_2 + 4096], 0xa5);
	ck_assert_int_eq(base[POOL_2 + 4097], 0x5a);
	for (uint64_t i = 0; i < POOL_2; i++)
		n_set += base[i] != 0;
	ck_assert_uint_eq(n_set, 0);
	kv_memory_detach(memory);
}
END_TEST

/* D37. */
START_TEST(a_thousand_attaches_leave_nothing_behind)
{
	int n_fds, n_maps;

	kv_memory_detach(attach(false)); /* what is made once is made now */
	n_fds = count_fds();
	n_maps = count_maps();
	for (int i = 0; i < 1000; i++) {
		struct kv_memory *memory = attach(i % 2);
		struct kv_memory *again = attach(i % 2);

		kv_memory_detach(memory);
		kv_memory_detach(again);
	}
	ck_assert_int_eq(count_fds(), n_fds);
	ck_assert_int_eq(count_maps(), n_maps);
}
END_TEST

/* A memfd of @bytes with @seals. */
static int memfd(uint64_t bytes, int seals)
{
	int fd = memfd_create("kvcached-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(ftruncate(fd, (off_t)bytes), 0);
	ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, seals), 0);
	return fd;
}

#define SEALED (F_SEAL_SHRINK | F_SEAL_GROW)

static const struct {
	uint64_t file_bytes;
	int seals;
	const char *text;
} bad_files[] = {
	{ARENA_BYTES - 4096, SEALED, "8384512"}, /* would fault past its end */
	{ARENA_BYTES + 4096, SEALED, "8392704"}, {0, SEALED, "8388608"}, {ARENA_BYTES, 0, "sealed"},
	{ARENA_BYTES, F_SEAL_GROW, "shrinking"},
};

START_TEST(a_memfd_that_could_end_in_a_bus_error_is_refused)
{
	int fd = memfd(bad_files[_i].file_bytes, bad_files[_i].seals);
	struct kv_memory *memory = NULL;

	ck_assert_int_eq(kv_memory_attach(&arena->export, &fd, false, &memory), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), bad_files[_i].text));
	ck_assert_ptr_null(memory);
	close(fd);
	kv_memory_detach(attach(false)); /* a refused attach leaves the arena free to attach */
}
END_TEST

START_TEST(a_file_that_is_no_memfd_is_refused)
{
	struct kv_memory *memory = NULL;
	int fds[2];
	int fd = open("/dev/null", O_RDWR | O_CLOEXEC);

	ck_assert_int_eq(kv_memory_attach(&arena->export, &fd, false, &memory), -EINVAL);
	close(fd);
	ck_assert_int_eq(kv_memory_attach(&arena->export, &fd, false, &memory), -EINVAL);
	ck_assert_int_eq(pipe(fds), 0);
	ck_assert_int_eq(kv_memory_attach(&arena->export, fds, false, &memory), -EINVAL);
	close(fds[0]);
	close(fds[1]);
}
END_TEST

static const struct {
	struct kv_arena_export export;
	bool read_only;
	int r;
	const char *field;
} bad_exports[] = {
	{{.kind = 0, .n_fds = 1, .bytes = 4096, .granule_bytes = 4096}, 0, -EINVAL, "kind"},
	{{.kind = 4, .n_fds = 1, .bytes = 4096, .granule_bytes = 4096}, 0, -EINVAL, "kind"},
	{{.kind = 1, .n_fds = 1, .bytes = 0, .granule_bytes = 0}, 0, -EINVAL, "bytes"},
	{{.kind = 2, .n_fds = 1, .bytes = 4096, .granule_bytes = 0}, 0, -EINVAL, "granule"},
	{{.kind = 2, .n_fds = 1, .bytes = 4096, .granule_bytes = 8192}, 0, -EINVAL, "granule"},
	{{.kind = 1, .n_fds = 0, .bytes = 4096, .granule_bytes = 4096}, 0, -EINVAL, "n_fds"},
	{{.kind = 1, .n_fds = 2, .bytes = 4096, .granule_bytes = 4096}, 0, -EINVAL, "n_fds"},
	{{.kind = 1, .n_fds = 1, .bytes = 8192, .granule_bytes = 4096}, 0, -EINVAL, "granule"},
	{{.kind = 2, .n_fds = 1, .bytes = 8192, .granule_bytes = 4096}, 0, -EINVAL, "n_fds"},
	{{.kind = 2, .n_fds = 2, .bytes = 8193, .granule_bytes = 4096}, 0, -EINVAL, "n_fds"},
	{{.kind = 2, .n_fds = 1, .bytes = UINT64_MAX, .granule_bytes = 1}, 0, -EINVAL, "n_fds"},
	{{.kind = 3, .n_fds = 1, .bytes = 4096, .granule_bytes = 4096}, 0, -EINVAL, "n_fds"},
	{{.kind = 3, .n_fds = 0, .bytes = 4096, .granule_bytes = 4096}, 1, -ENOTSUP, "read_only"},
};

START_TEST(a_message_that_does_not_fit_its_descriptors_is_refused)
{
	int fds[2] = {arena->fds[0], arena->fds[0]};
	struct kv_memory *memory = NULL;

	ck_assert_int_eq(
		kv_memory_attach(&bad_exports[_i].export, fds, bad_exports[_i].read_only, &memory),
		bad_exports[_i].r);
	ck_assert_msg(strstr(kv_error_text(), bad_exports[_i].field), "%s", kv_error_text());
}
END_TEST

START_TEST(descriptors_that_are_none_and_other_sizes_for_one_epoch_are_refused)
{
	struct kv_memory *memory = attach(false), *other = NULL;
	struct kv_arena_export export = arena->export;
	int fd = -1;

	ck_assert_int_eq(kv_memory_attach(&export, &fd, false, &other), -EINVAL);
	export.bytes = export.granule_bytes = ARENA_BYTES / 2;
	ck_assert_int_eq(kv_memory_attach(&export, arena->fds, false, &other), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "epoch"));
	kv_memory_detach(memory);
}
END_TEST

static int everything_is_refused(void *arg)
{
	struct kv_memory *memory = arg, *mine = NULL;
	char byte = 1;

	if (kv_memory_read(memory, 0, &byte, 1) != -ECHILD ||
	    kv_memory_write(memory, 0, &byte, 1) != -ECHILD || kv_memory_sync(memory) != -ECHILD)
		return 100;
	kv_memory_detach(memory); /* nothing, and not twice either */
	kv_memory_detach(memory);

	if (kv_memory_attach(&arena->export, arena->fds, false, &mine) < 0)
		return 101;
	if (mine == memory || kv_memory_read(mine, 9, &byte, 1) < 0 || byte != 42)
		return 102;
	byte = 43;
	kv_memory_write(mine, 10, &byte, 1);
	kv_memory_detach(mine);
	return count_maps();
}

START_TEST(a_forked_child_has_no_mapping_and_may_attach_anew)
{
	struct kv_memory *memory = attach(false);
	char *base = kv_memory_base(memory);

	base[9] = 42;
	ck_assert_int_eq(in_child(store, base), -SIGSEGV);
	ck_assert_int_eq(in_child(everything_is_refused, memory), 0);
	ck_assert_int_eq(base[10], 43);
	kv_memory_detach(memory);
	ck_assert_int_eq(count_maps(), 0);
}
END_TEST

START_TEST(bytes_are_zeroed_copied_read_and_written_where_asked)
{
	struct kv_memory *memory = attach(false);
	unsigned char in[300], out[300];

	for (unsigned int i = 0; i < sizeof(in); i++)
		in[i] = (unsigned char)(i + 1);
	ck_assert_int_eq(kv_memory_write(memory, ARENA_BYTES - sizeof(in), in, sizeof(in)), 0);
	ck_assert_int_eq(kv_memory_copy(memory, 100, ARENA_BYTES - sizeof(in), sizeof(in), NULL),
			 0);
	ck_assert_int_eq(kv_memory_zero(memory, 110, 1, NULL), 0);
	ck_assert_int_eq(kv_memory_sync(memory), 0);
	ck_assert_int_eq(kv_memory_read(memory, 100, out, sizeof(out)), 0);
	in[10] = 0;
	ck_assert_mem_eq(in, out, sizeof(in));
	ck_assert_int_eq(((char *)kv_memory_base(memory))[99], 0);
	ck_assert_int_eq(((char *)kv_memory_base(memory))[400], 0);
	kv_memory_detach(memory);
}
END_TEST

START_TEST(ranges_outside_the_arena_and_overlapping_copies_are_refused)
{
	struct kv_memory *memory = attach(false);
	char byte = 0;

	ck_assert_int_eq(kv_memory_read(memory, ARENA_BYTES, &byte, 0), 0);
	ck_assert_int_eq(kv_memory_read(memory, ARENA_BYTES, &byte, 1), -EINVAL);
	ck_assert_int_eq(kv_memory_write(memory, UINT64_MAX, &byte, 1), -EINVAL);
	ck_assert_int_eq(kv_memory_zero(memory, 1, ARENA_BYTES, NULL), -EINVAL);
	ck_assert_int_eq(kv_memory_zero(memory, 2, UINT64_MAX - 1, NULL), -EINVAL);
	ck_assert_int_eq(kv_memory_copy(memory, 0, ARENA_BYTES - 1, 2, NULL), -EINVAL);
	ck_assert_int_eq(kv_memory_copy(memory, ARENA_BYTES - 1, 0, 2, NULL), -EINVAL);
	ck_assert_int_eq(kv_memory_copy(memory, 0, 100, 101, NULL), -EINVAL);
	ck_assert_int_eq(kv_memory_copy(memory, 100, 0, 101, NULL), -EINVAL);
	ck_assert_int_eq(kv_memory_copy(memory, 0, 100, 100, NULL), 0);
	kv_memory_detach(memory);
}
END_TEST

static void *attach_often(void *arg)
{
	_Atomic unsigned int *n = arg;
	struct kv_memory *memory;

	for (int i = 0; i < 200; i++) {
		if (kv_memory_attach(&arena->export, arena->fds, i % 3 == 0, &memory) < 0)
			return "attach failed";
		*n += *(volatile char *)kv_memory_base(memory) == 9;
		kv_memory_detach(memory);
	}
	return NULL;
}

START_TEST(threads_attach_and_detach_at_will)
{
	struct kv_memory *memory = attach(false);
	_Atomic unsigned int n = 0;
	pthread_t threads[8];
	void *failed;

	*(char *)kv_memory_base(memory) = 9;
	kv_memory_detach(memory);
	for (int i = 0; i < 8; i++)
		ck_assert_int_eq(pthread_create(&threads[i], NULL, attach_often, &n), 0);
	for (int i = 0; i < 8; i++) {
		pthread_join(threads[i], &failed);
		ck_assert_ptr_null(failed);
	}
	ck_assert_uint_eq(n, 1600);
	ck_assert_int_eq(count_maps(), 0);
}
END_TEST

START_TEST(host_events_have_passed_and_pinned_memory_is_zero_and_aligned)
{
	struct kv_event *event = NULL;
	void *p = NULL;

	ck_assert_int_eq(kv_event_new(KV_DEVICE_HOST, &event), 0);
	ck_assert_int_eq(kv_event_query(event), 1);
	ck_assert_int_eq(kv_event_record(event, NULL), 0);
	ck_assert_int_eq(kv_event_query(event), 1);
	ck_assert_ptr_null(kv_event_free(event));
	ck_assert_ptr_null(kv_event_free(NULL));

	ck_assert_int_eq(kv_pinned_new(KV_DEVICE_HOST, 1000, &p), 0);
	ck_assert_uint_eq((uintptr_t)p % 256, 0);
	for (int i = 0; i < 1000; i++)
		ck_assert_int_eq(((char *)p)[i], 0);
	ck_assert_ptr_null(kv_pinned_free(KV_DEVICE_HOST, p));
	ck_assert_int_eq(kv_pinned_new(KV_DEVICE_HOST, 0, &p), -EINVAL);
	ck_assert_int_eq(kv_pinned_new(KV_DEVICE_HOST, SIZE_MAX, &p), -ENOMEM);
	ck_assert_int_eq(kv_pinned_new(0, 1, &p), -EINVAL);
	ck_assert_int_eq(kv_event_new(9, &event), -EINVAL);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("kernels/memory");
	TCase *tcase = tcase_create("host");
	SRunner *runner = srunner_create(suite);
	int n_failed;

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, an_arena_attached_twice_is_mapped_once_and_counted);
	tcase_add_test(tcase, two_arenas_are_two_mappings);
	tcase_add_test(tcase, a_store_through_a_read_only_mapping_faults);
	tcase_add_test(tcase, a_pool_at_an_offset_is_at_that_place_in_another_process);
	tcase_add_test(tcase, a_thousand_attaches_leave_nothing_behind);
	tcase_add_loop_test(tcase, a_memfd_that_could_end_in_a_bus_error_is_refused, 0,
			    sizeof(bad_files) / sizeof(bad_files[0]));
	tcase_add_test(tcase, a_file_that_is_no_memfd_is_refused);
	tcase_add_loop_test(tcase, a_message_that_does_not_fit_its_descriptors_is_refused, 0,
			    sizeof(bad_exports) / sizeof(bad_exports[0]));
	tcase_add_test(tcase, descriptors_that_are_none_and_other_sizes_for_one_epoch_are_refused);
	tcase_add_test(tcase, a_forked_child_has_no_mapping_and_may_attach_anew);
	tcase_add_test(tcase, bytes_are_zeroed_copied_read_and_written_where_asked);
	tcase_add_test(tcase, ranges_outside_the_arena_and_overlapping_copies_are_refused);
	tcase_add_test(tcase, threads_attach_and_detach_at_will);
	tcase_add_test(tcase, host_events_have_passed_and_pinned_memory_is_zero_and_aligned);
	suite_add_tcase(suite, tcase);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
