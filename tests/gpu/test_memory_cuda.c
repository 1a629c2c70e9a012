/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/memory_cuda.c on a real GPU, between real processes. */
#include <check.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "include/internal/socket.h"
#include "kernels/cuda_driver.h"
#include "tests/gpu/peer.h"

#define POOL_2 ((uint64_t)3145728) /* where a second pool begins */

/*
 * Bytes between processes
 */

START_TEST(a_process_reads_what_another_wrote)
{
	/* Both are there before the arena is: they inherit nothing of it. */
	struct peer a = peer_new(role_writer), b = peer_new(role_reader);
	struct kv_arena *arena = arena_no(_i);

	ck_assert_uint_eq(arena->export.kind, arena_shapes[_i].kind);
	ck_assert_uint_eq(arena->export.bytes, arena_shapes[_i].bytes);
	for (uint32_t i = 0; i < arena->export.n_fds; i++)
		ck_assert_int_eq(fcntl(arena->fds[i], F_GETFD), FD_CLOEXEC);

	give_arena(a.socket, arena);
	ck_assert_int_eq(hear(a.socket), 0);
	say(a.socket, (int64_t)arena->export.bytes);
	ck_assert_int_eq(hear(a.socket), 1);

	give_arena(b.socket, arena);
	ck_assert_int_eq(hear(b.socket), 0);
	say(b.socket, (int64_t)arena->export.bytes);
	ck_assert_int_eq(hear(b.socket), 1);

	peer_kill(&a);
	say(b.socket, 0); /* a writer's death changes nothing */
	ck_assert_int_eq(hear(b.socket), 1);
	peer_kill(&b);
	kv_device_cuda.arena_free(arena);
}
END_TEST

/* Two pools in one arena, each attached twice; the second is written at its place. */
static void user_of_two_pools(int socket)
{
	struct kv_memory *one[2], *two[2];
	struct kv_arena_export export;
	unsigned char want[PIECE], got[PIECE];
	int fds[MAX_FDS];

	take_arena(socket, &export, fds);
	for (int i = 0; i < 2; i++) {
		demand(kv_memory_attach(&export, fds, false, &one[i]) == 0);
		demand(kv_memory_attach(&export, fds, false, &two[i]) == 0);
	}
	demand(kv_memory_base(one[0]) == kv_memory_base(two[1]));
	demand(kv_memory_device(one[0]) == KV_DEVICE_CUDA);
	fill_bytes(want, PIECE, 1);
	demand(kv_memory_read(two[0], POOL_2, got, PIECE) == 0 && !memcmp(got, want, PIECE));
	fill_bytes(want, PIECE, 2);
	demand(kv_memory_write(two[1], POOL_2 + PIECE, want, PIECE) == 0);
	kv_memory_detach(one[0]);
	kv_memory_detach(two[0]);
	kv_memory_detach(one[1]);
	demand(kv_memory_copy(two[1], POOL_2 + 2 * PIECE, POOL_2, PIECE, NULL) == 0);
	demand(kv_memory_sync(two[1]) == 0); /* one user is left */
	kv_memory_detach(two[1]);
	say(socket, 1);
}

static void owner_of_two_pools(int socket)
{
	struct kv_memory *memory = take_and_attach(socket, false);
	unsigned char want[PIECE], got[PIECE];
	unsigned char *pool_1 = malloc(POOL_2);

	fill_bytes(want, PIECE, 1);
	demand(kv_memory_write(memory, POOL_2, want, PIECE) == 0);
	say(socket, 1);
	hear(socket);
	demand(kv_memory_read(memory, POOL_2 + 2 * PIECE, got, PIECE) == 0);
	demand(!memcmp(got, want, PIECE));
	fill_bytes(want, PIECE, 2);
	demand(kv_memory_read(memory, POOL_2 + PIECE, got, PIECE) == 0 &&
	       !memcmp(got, want, PIECE));
	demand(kv_memory_read(memory, 0, pool_1, POOL_2) == 0);
	for (uint64_t i = 0; i < POOL_2; i++)
		demand(pool_1[i] == 0);
	say(socket, 2);
}

START_TEST(a_pool_at_an_offset_is_at_that_place_in_another_process)
{
	struct peer a = peer_new(owner_of_two_pools), b = peer_new(user_of_two_pools);
	struct kv_arena *arena = arena_no(_i);

	give_arena(a.socket, arena);
	ck_assert_int_eq(hear(a.socket), 0);
	ck_assert_int_eq(hear(a.socket), 1);
	give_arena(b.socket, arena);
	ck_assert_int_eq(hear(b.socket), 1);
	say(a.socket, 0);
	ck_assert_int_eq(hear(a.socket), 2);
	peer_kill(&a);
	peer_kill(&b);
	kv_device_cuda.arena_free(arena);
}
END_TEST

/*
 * The client
 */

static void attach_200_times(int socket)
{
	const struct kv_cuda *cuda = NULL;
	struct kv_memory *memory = NULL;
	struct kv_arena_export export;
	size_t before = 0, after = 0, total;
	CUcontext context = NULL;
	int fds[MAX_FDS];
	int n_fds = 0, n;

	take_arena(socket, &export, fds);
	n = export.n_fds > 100 ? 25 : 205;
	/* A context of the process's own stays, so that only what attaching leaves is seen. */
	demand(kv_cuda_get(&cuda) == 0);
	demand(kv_cuda_retain(cuda, 0, &context) == 0);
	for (int i = 0; i < n; i++) {
		if (i == 5) {
			n_fds = count_fds("");
			demand(kv_cuda_enter(cuda, context) == 0);
			demand(cuda->cuMemGetInfo(&before, &total) == 0);
			kv_cuda_leave(cuda);
		}
		demand(kv_memory_attach(&export, fds, false, &memory) == 0);
		demand(kv_memory_zero(memory, 0, 4096, NULL) == 0);
		demand(kv_memory_sync(memory) == 0);
		kv_memory_detach(memory);
	}
	demand(count_fds("") == n_fds);
	demand(kv_cuda_enter(cuda, context) == 0);
	demand(cuda->cuMemGetInfo(&after, &total) == 0);
	kv_cuda_leave(cuda);
	demand(before <= after + 4 * MIB);
	say(socket, 1);
}

START_TEST(two_hundred_attaches_leave_nothing_behind)
{
	struct peer client = peer_new(attach_200_times);
	struct kv_arena *arena = arena_no(_i);
	const int64_t start = kv_now();

	give_arena(client.socket, arena);
	ck_assert_int_eq(hear(client.socket), 1);
	fprintf(stderr, "%s, %u granules: attached again and again in %d ms with CUDA's start\n",
		kv_export_name(arena->export.kind), arena->export.n_fds,
		(int)((kv_now() - start) / KV_MSEC));
	peer_kill(&client);
	kv_device_cuda.arena_free(arena);
}
END_TEST

static void reads_only(int socket)
{
	struct kv_memory *memory = take_and_attach(socket, true);
	const struct kv_cuda *cuda = NULL;
	CUcontext context = NULL;
	CUdeviceptr base = (CUdeviceptr)(uintptr_t)kv_memory_base(memory);
	CUstream stream = NULL;
	uint64_t word = 5;
	CUresult e;

	demand(kv_memory_read(memory, 64, &word, sizeof(word)) == 0 && word == 0);
	demand(kv_memory_write(memory, 64, &word, sizeof(word)) == -EPERM);
	demand(kv_memory_zero(memory, 64, 8, NULL) == -EPERM);

	/* The driver refuses as well, or the GPU faults: no byte gets there. */
	demand(kv_cuda_get(&cuda) == 0);
	demand(kv_cuda_retain(cuda, 0, &context) == 0);
	demand(kv_cuda_enter(cuda, context) == 0);
	demand(cuda->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == 0);
	word = 0x1234;
	e = cuda->cuMemcpyHtoDAsync(base + 64, &word, sizeof(word), stream);
	while (!e) {
		e = cuda->cuStreamQuery(stream);
		if (!e)
			break; /* it went through */
		if (e == CUDA_ERROR_NOT_READY)
			e = CUDA_SUCCESS;
	}
	fprintf(stderr, "writing through a read-only mapping: CUDA error %d\n", e);
	demand(e != 0);
	say(socket, 1);
}

static void attach_and_read_word(int socket)
{
	struct kv_memory *memory = take_and_attach(socket, false);
	uint64_t word = 1;

	demand(kv_memory_read(memory, 64, &word, sizeof(word)) == 0);
	say(socket, (int64_t)word);
}

START_TEST(a_read_only_mapping_cannot_be_written)
{
	struct peer a = peer_new(reads_only), b = peer_new(attach_and_read_word);
	struct kv_arena *arena = arena_no(_i);

	give_arena(a.socket, arena);
	ck_assert_int_eq(hear(a.socket), 0);
	ck_assert_int_eq(hear(a.socket), 1);
	give_arena(b.socket, arena);
	ck_assert_int_eq(hear(b.socket), 0);
	ck_assert_int_eq(hear(b.socket), 0);
	peer_kill(&a);
	peer_kill(&b);
	kv_device_cuda.arena_free(arena);
}
END_TEST

static void attach_wrongly(int socket)
{
	struct kv_memory *memory = NULL;
	struct kv_arena_export export, wrong;
	int fds[MAX_FDS], bad[MAX_FDS];
	char text[KV_UUID_TEXT_BYTES];

	take_arena(socket, &export, fds);

	wrong = export; /* a GPU that nobody has */
	wrong.uuid[0] ^= 0xff;
	demand(kv_memory_attach(&wrong, fds, false, &memory) == -ENODEV);
	kv_uuid_format(wrong.uuid, text);
	demand(strstr(kv_error_text(), text));

	wrong = export; /* larger than what the descriptors hold */
	wrong.bytes = 2 * export.bytes;
	wrong.granule_bytes = 2 * export.granule_bytes;
	demand(kv_memory_attach(&wrong, fds, false, &memory) < 0);
	demand(strstr(kv_error_text(), "granule 0"));

	memcpy(bad, fds, sizeof(bad));
	bad[export.n_fds - 1] = open("/dev/null", O_RDWR | O_CLOEXEC);
	demand(kv_memory_attach(&export, bad, false, &memory) == -EIO);
	demand(strstr(kv_error_text(), "CUDA_ERROR"));

	/* None of that leaves the arena, or the context, unusable. */
	demand(kv_memory_attach(&export, fds, false, &memory) == 0);
	demand(use_pieces(memory, export.bytes, true) && use_pieces(memory, export.bytes, false));
	demand(kv_memory_read(memory, export.bytes, text, 1) == -EINVAL);
	say(socket, 1);
}

START_TEST(a_wrong_gpu_size_or_descriptor_is_refused_and_harmless)
{
	struct peer client = peer_new(attach_wrongly);
	struct kv_arena *arena = arena_of(0, 128 * MIB, KV_EXPORT_VMM, 64 * MIB);

	give_arena(client.socket, arena);
	ck_assert_int_eq(hear(client.socket), 1);
	peer_kill(&client);
	kv_device_cuda.arena_free(arena);
}
END_TEST

static void see_no_gpu(int socket)
{
	struct kv_arena_export export;
	struct kv_memory *memory = NULL;
	int fds[MAX_FDS];
	char text[KV_UUID_TEXT_BYTES];

	take_arena(socket, &export, fds);
	setenv("CUDA_VISIBLE_DEVICES", "", 1);
	demand(kv_memory_attach(&export, fds, false, &memory) == -ENODEV);
	kv_uuid_format(export.uuid, text);
	demand(strstr(kv_error_text(), text));
	say(socket, 1);
}

START_TEST(a_process_that_does_not_see_the_gpu_is_told_its_uuid)
{
	struct peer client = peer_new(see_no_gpu);
	struct kv_arena *arena = arena_of(0, 2 * MIB, KV_EXPORT_VMM, 0);

	give_arena(client.socket, arena);
	ck_assert_int_eq(hear(client.socket), 1);
	peer_kill(&client);
	kv_device_cuda.arena_free(arena);
}
END_TEST

/* Opens its own handle: the driver sees one PID number on both sides, as in two containers. */
static void same_pid(int socket)
{
	struct kv_arena_export export = {.kind = KV_EXPORT_IPC, .bytes = 4 * MIB, .epoch = 9};
	const struct kv_cuda *cuda = NULL;
	struct kv_memory *memory = NULL;
	CUcontext context = NULL;
	CUipcMemHandle handle;
	CUdeviceptr p = 0;
	CUuuid uuid;

	demand(kv_cuda_get(&cuda) == 0);
	demand(kv_cuda_retain(cuda, 0, &context) == 0);
	demand(kv_cuda_enter(cuda, context) == 0);
	demand(cuda->cuMemAlloc(&p, 4 * MIB) == 0);
	demand(cuda->cuIpcGetMemHandle(&handle, p) == 0);
	demand(cuda->cuDeviceGetUuid_v2(&uuid, 0) == 0);
	memcpy(export.ipc_handle, &handle, sizeof(handle));
	memcpy(export.uuid, uuid.bytes, sizeof(export.uuid));
	export.granule_bytes = export.bytes;
	export.owner_pid = getpid();
	say(socket, kv_memory_attach(&export, NULL, false, &memory));
	fprintf(stderr, "%s\n", kv_error_text());
	say(socket, strstr(kv_error_text(), "201") && strstr(kv_error_text(), "PID number"));
}

START_TEST(an_equal_pid_number_is_named_as_the_cause)
{
	struct peer client = peer_new(same_pid);

	ck_assert_int_eq(hear(client.socket), -ENOTSUP);
	ck_assert_int_eq(hear(client.socket), 1);
	peer_kill(&client);
}
END_TEST

static struct kv_arena_export thread_export;
static int thread_fds[MAX_FDS];

static void *attach_in_a_thread(void *arg)
{
	struct kv_memory *memory = NULL;
	uint64_t word;

	for (int i = 0; i < 25; i++) {
		demand(kv_memory_attach(&thread_export, thread_fds, i % 2, &memory) == 0);
		demand(kv_memory_read(memory, 8 * (uint64_t)i, &word, sizeof(word)) == 0);
		demand(word == 0);
		kv_memory_detach(memory);
	}
	return NULL;
}

static void attach_in_threads(int socket)
{
	pthread_t threads[8];

	take_arena(socket, &thread_export, thread_fds);
	for (int i = 0; i < 8; i++)
		demand(pthread_create(&threads[i], NULL, attach_in_a_thread, NULL) == 0);
	for (int i = 0; i < 8; i++)
		pthread_join(threads[i], NULL);
	say(socket, 1);
}

START_TEST(threads_attach_and_detach_at_will)
{
	struct peer client = peer_new(attach_in_threads);
	struct kv_arena *arena = arena_no(1);

	give_arena(client.socket, arena);
	ck_assert_int_eq(hear(client.socket), 1);
	peer_kill(&client);
	kv_device_cuda.arena_free(arena);
}
END_TEST

/*
 * Streams, events, pinned memory
 */

static void use_streams(int socket)
{
	struct kv_memory *memory = take_and_attach(socket, false);
	const struct kv_cuda *cuda = NULL;
	CUcontext context = NULL, current = (CUcontext)1;
	CUresult (*begin)(CUstream, CUstreamCaptureMode);
	CUresult (*end)(CUstream, CUgraph *);
	struct kv_event *event = NULL, *other = NULL;
	CUstream stream = NULL;
	CUgraph graph;
	uint64_t *pinned = NULL;
	bool was_pending = false;
	int r;

	demand(kv_cuda_get(&cuda) == 0);
	demand(cuda->cuCtxGetCurrent(&current) == 0 && !current); /* attaching left none behind */
	demand(kv_pinned_new(KV_DEVICE_CUDA, 16 * MIB, (void **)&pinned) == 0);
	demand((uintptr_t)pinned % 256 == 0 && pinned[0] == 0 && pinned[2 * MIB - 1] == 0);
	demand(kv_event_new(KV_DEVICE_CUDA, &event) == 0);
	demand(kv_event_new(KV_DEVICE_CUDA, &other) == 0);
	demand(kv_event_query(event) == 1);

	demand(kv_cuda_retain(cuda, 0, &context) == 0);
	demand(kv_cuda_enter(cuda, context) == 0);
	demand(cuda->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == 0);
	kv_cuda_leave(cuda);

	/* 200 times 512 MiB: some 50 ms of work. */
	fill_bytes((unsigned char *)pinned, 16 * MIB, 3);
	demand(kv_memory_write(memory, 0, pinned, 16 * MIB) == 0);
	for (int i = 0; i < 200; i++)
		demand(kv_memory_zero(memory, 512 * MIB, 512 * MIB, stream) == 0);
	demand(kv_memory_copy(memory, 512 * MIB, 0, 16 * MIB, stream) == 0);
	demand(kv_event_record(event, stream) == 0);
	demand(kv_event_record(other, NULL) == 0); /* no context is current: of the GPU attached */
	while ((r = kv_event_query(event)) == 0)
		was_pending = true;
	demand(r == 1 && was_pending);
	memset(pinned, 0, 16 * MIB);
	demand(kv_memory_read(memory, 512 * MIB, pinned, 16 * MIB) == 0);
	{
		unsigned char *want = malloc(16 * MIB);

		fill_bytes(want, 16 * MIB, 3);
		demand(!memcmp(pinned, want, 16 * MIB));
		free(want);
	}
	while ((r = kv_event_query(other)) == 0)
		;
	demand(r == 1);

	/* In a capture nothing runs, so nothing can be waited for. */
	*(void **)&begin = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuStreamBeginCapture_v2");
	*(void **)&end = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuStreamEndCapture");
	demand(begin(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) == 0);
	demand(kv_event_record(event, stream) == -EBUSY);
	demand(end(stream, &graph) == 0);
	demand(kv_event_record(event, stream) == 0);

	demand(cuda->cuCtxGetCurrent(&current) == 0 && !current);
	/* In an order that pulls the context away under nobody. */
	cuda->cuDevicePrimaryCtxRelease(0);
	kv_memory_detach(memory);
	while ((r = kv_event_query(event)) == 0)
		;
	demand(r == 1);
	pinned[5] = 5;
	kv_pinned_free(KV_DEVICE_CUDA, pinned);
	kv_event_free(event);
	kv_event_free(other);
	say(socket, 1);
}

START_TEST(events_pass_when_their_stream_has_come_so_far)
{
	struct peer client = peer_new(use_streams);
	struct kv_arena *arena = arena_no(0);

	give_arena(client.socket, arena);
	ck_assert_int_eq(hear(client.socket), 0);
	ck_assert_int_eq(hear(client.socket), 1);
	peer_kill(&client);
	kv_device_cuda.arena_free(arena);
}
END_TEST

/*
 * Forks
 */

/* Attaches, forks a child that lives on, and waits for death. @raw: no fork handler runs. */
static void parent_of_an_orphan(int socket, bool raw)
{
	pid_t child;

	take_and_attach(socket, false);
	child = raw ? (pid_t)syscall(SYS_fork) : fork();
	if (!child) {
		close(socket);
		for (int i = 0; i < 60; i++)
			usleep(500000);
		_exit(0);
	}
	say(socket, child);
	hear(socket);
	pause();
}

static void parent_of_a_handled_orphan(int socket)
{
	parent_of_an_orphan(socket, false);
}

static void parent_of_a_raw_orphan(int socket)
{
	parent_of_an_orphan(socket, true);
}

/* KiB of GPU memory that an orphan of a killed client keeps. */
static int64_t kept_by_orphan(void (*role)(int socket), const struct kv_arena *arena)
{
	const uint64_t before = free_bytes(0);
	struct peer client = peer_new(role);
	int64_t kept;
	pid_t child;

	give_arena(client.socket, arena);
	ck_assert_int_eq(hear(client.socket), 0);
	child = (pid_t)hear(client.socket);
	ck_assert_int_gt(child, 0);
	peer_kill(&client);
	ck_assert_int_eq(kill(child, 0), 0); /* the orphan lives */
	for (int i = 0; i < 2; i++) {
		kept = (int64_t)(before - free_bytes(0)) / 1024;
		if (kept < 64 * 1024)
			break;
	}
	ck_assert_int_eq(kill(child, 0), 0);
	kill(child, SIGKILL);
	return kept;
}

START_TEST(a_forked_child_does_not_keep_its_dead_parents_gpu_memory)
{
	struct kv_arena *arena = arena_no(0);
	int64_t kept;

	/* That there is something to prevent: without the handler the context stays. */
	fprintf(stderr, "kept by an orphan without the fork handler: %" PRId64 " KiB\n",
		kept_by_orphan(parent_of_a_raw_orphan, arena));
	kept = kept_by_orphan(parent_of_a_handled_orphan, arena);
	fprintf(stderr, "kept by an orphan with it: %" PRId64 " KiB\n", kept);
	ck_assert_int_lt(kept, 64 * 1024);
	kv_device_cuda.arena_free(arena);
}
END_TEST

static void fork_and_try(int socket)
{
	struct kv_memory *memory = NULL;
	struct kv_arena_export export;
	int fds[MAX_FDS];
	uint64_t word;
	int status;
	pid_t child;

	take_arena(socket, &export, fds);
	demand(kv_memory_attach(&export, fds, false, &memory) == 0);
	child = fork();
	if (!child) {
		struct kv_memory *mine = NULL;

		demand(count_fds("/dev/nvidia") == 0);
		demand(kv_memory_read(memory, 0, &word, sizeof(word)) == -ECHILD);
		kv_memory_detach(memory);
		demand(kv_memory_attach(&export, fds, false, &mine) == -ENOTSUP);
		demand(strstr(kv_error_text(), "exec"));
		_exit(0);
	}
	demand(waitpid(child, &status, 0) == child && status == 0);
	word = 1;
	demand(kv_memory_read(memory, 0, &word, sizeof(word)) == 0 && word == 0);
	kv_memory_detach(memory);
	say(socket, 1);
}

START_TEST(a_forked_child_is_told_that_it_cannot_use_cuda)
{
	struct peer client = peer_new(fork_and_try);
	struct kv_arena *arena = arena_no(1);

	give_arena(client.socket, arena);
	ck_assert_int_eq(hear(client.socket), 1);
	peer_kill(&client);
	kv_device_cuda.arena_free(arena);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("gpu/memory_cuda");
	TCase *tcase = tcase_create("cuda");
	SRunner *runner = srunner_create(suite);
	struct kv_device_info info;
	int n_failed, r;

	r = kv_device_cuda.info(0, &info);
	if (r < 0) {
		fprintf(stderr, "skipped: %s\n", kv_error_text());
		return r == -ENODEV ? 77 : 1;
	}
	tcase_add_loop_test(tcase, a_process_reads_what_another_wrote, 0, N_ARENAS);
	tcase_add_loop_test(tcase, a_pool_at_an_offset_is_at_that_place_in_another_process, 1,
			    N_ARENAS);
	tcase_add_loop_test(tcase, two_hundred_attaches_leave_nothing_behind, 0, N_ARENAS);
	tcase_add_loop_test(tcase, a_read_only_mapping_cannot_be_written, 0, 2);
	tcase_add_test(tcase, a_wrong_gpu_size_or_descriptor_is_refused_and_harmless);
	tcase_add_test(tcase, a_process_that_does_not_see_the_gpu_is_told_its_uuid);
	tcase_add_test(tcase, an_equal_pid_number_is_named_as_the_cause);
	tcase_add_test(tcase, threads_attach_and_detach_at_will);
	tcase_add_test(tcase, events_pass_when_their_stream_has_come_so_far);
	tcase_add_test(tcase, a_forked_child_does_not_keep_its_dead_parents_gpu_memory);
	tcase_add_test(tcase, a_forked_child_is_told_that_it_cannot_use_cuda);
	suite_add_tcase(suite, tcase);
	srunner_set_fork_status(runner, CK_NOFORK);
	srunner_run_all(runner, CK_VERBOSE);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
