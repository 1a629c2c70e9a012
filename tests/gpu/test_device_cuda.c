/* SPDX-License-Identifier: Apache-2.0 */
/* daemon/device_cuda.c on real GPUs: what owning an arena takes, gives, and survives. */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "include/internal/socket.h"
#include "tests/gpu/peer.h"

#define POOL_2 ((uint64_t)3145728) /* where a second pool begins */

static int n_gpus;

/*
 * The owner
 */

START_TEST(a_vmm_owner_has_no_driver_no_context_and_takes_exactly_its_bytes)
{
	const uint64_t before = free_bytes(0);
	struct kv_arena *arena = arena_no(_i);
	const uint64_t after = free_bytes(0);

	ck_assert_int_eq(count_fds("/dev/nvidia"), (int)arena->export.n_fds);
	ck_assert(!maps_name("libcuda"));
	ck_assert(!maps_name("/dev/nvidia"));
	ck_assert_int_eq(arena->owner_pidfd, -1);
	fprintf(stderr, "owner of %" PRIu64 " MiB as %u granules: %" PRId64 " KiB more are taken\n",
		arena->export.bytes / MIB, arena->export.n_fds,
		(int64_t)(before - after - arena->export.bytes) / 1024);
	ck_assert_uint_ge(before - after, arena->export.bytes);
	ck_assert_uint_le(before - after, arena->export.bytes + 64 * MIB);
	kv_device_cuda.arena_free(arena);
	ck_assert_int_eq(count_fds("/dev/nvidia"), 0);
	ck_assert_uint_ge(free_bytes(0) + 32 * MIB, before);
}
END_TEST

START_TEST(an_ipc_owner_is_a_process_that_ends_with_its_arena)
{
	const uint64_t before = free_bytes(0);
	struct kv_arena *arena = arena_of(0, 512 * MIB, KV_EXPORT_IPC, 0);
	const pid_t owner = arena->export.owner_pid;

	ck_assert(!maps_name("libcuda"));
	ck_assert_int_eq(kill(owner, 0), 0);
	ck_assert_int_eq(kv_socket_wait(arena->owner_pidfd, POLLIN, kv_now()), -ETIMEDOUT);
	ck_assert_uint_ge(before - free_bytes(0), 512 * MIB);
	kv_device_cuda.arena_free(arena);
	ck_assert_int_eq(kill(owner, 0), -1);
	ck_assert_uint_ge(free_bytes(0) + 32 * MIB, before);

	/* Killed under us: shown, and no harm to arena_free(). */
	arena = arena_of(0, 2 * MIB, KV_EXPORT_IPC, 0);
	kill(arena->export.owner_pid, SIGKILL);
	ck_assert_int_eq(kv_socket_wait(arena->owner_pidfd, POLLIN, kv_now() + PATIENCE), 0);
	kv_device_cuda.arena_free(arena);
}
END_TEST

/* Makes an arena, gives it away, and waits for death. */
static int arena_index;

static void doomed_owner(int socket)
{
	struct kv_arena *arena = NULL;

	demand(kv_device_cuda.arena_new(0, arena_shapes[arena_index].bytes,
					arena_shapes[arena_index].kind,
					arena_shapes[arena_index].granule_bytes, &arena) == 0);
	give_arena(socket, arena);
	pause();
}

START_TEST(memory_outlives_its_owner)
{
	struct peer a = peer_new(role_writer), b = peer_new(role_reader), owner;
	struct kv_arena arena = {0};
	int fds[MAX_FDS];

	arena_index = _i;
	owner = peer_new(doomed_owner);
	ck_assert_int_eq(kv_socket_wait(owner.socket, POLLIN, kv_now() + PATIENCE), 0);
	take_arena(owner.socket, &arena.export, fds);
	arena.fds = fds;
	give_arena(a.socket, &arena);
	ck_assert_int_eq(hear(a.socket), 0);

	peer_kill(&owner);
	say(a.socket, (int64_t)arena.export.bytes);
	ck_assert_int_eq(hear(a.socket), 1);

	usleep(300000); /* an ipc owner process sees its parent's death and ends */
	give_arena(b.socket, &arena);
	if (arena.export.kind == KV_EXPORT_IPC) { /* whoever had it keeps it; nobody new gets in */
		ck_assert_int_eq(hear(b.socket), -EIO);
	} else {
		peer_kill(&a);
		ck_assert_int_eq(hear(b.socket), 0);
		say(b.socket, (int64_t)arena.export.bytes);
		ck_assert_int_eq(hear(b.socket), 1);
		peer_kill(&b);
		for (uint32_t i = 0; i < arena.export.n_fds; i++)
			close(fds[i]);
		return;
	}
	peer_kill(&a);
	peer_kill(&b);
}
END_TEST

START_TEST(an_arena_that_does_not_fit_names_both_numbers)
{
	static const uint32_t kinds[] = {0, KV_EXPORT_VMM, KV_EXPORT_IPC};
	struct kv_arena *arena = NULL;
	struct kv_device_info info;
	uint64_t asked, free_now;
	char word[32];
	const char *text;

	ck_assert_int_eq(kv_device_cuda.info(0, &info), 0);
	asked = (info.total_bytes / MIB / 2 * 2 + 1024) * MIB;
	ck_assert_int_eq(
		kv_device_cuda.arena_new(0, asked, kinds[_i], _i == 1 ? 1024 * MIB : 0, &arena),
		-ENOMEM);
	fprintf(stderr, "%s\n", kv_error_text());
	snprintf(word, sizeof(word), "%" PRIu64, asked);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), word));
	text = strstr(kv_error_text(), "asked for, ");
	ck_assert_ptr_nonnull(text);
	ck_assert_int_eq(sscanf(text, "asked for, %" SCNu64, &free_now), 1);
	/* What had been made of it is free again when it is counted. */
	ck_assert_uint_ge(free_now + 1024 * MIB, info.free_bytes);
	ck_assert_uint_le(free_now, info.total_bytes);
	ck_assert_int_eq(count_fds("/dev/nvidia"), 0);
}
END_TEST

static void owner_of_few_files(int socket)
{
	struct rlimit limit = {256, 256};
	struct kv_arena *arena = NULL;

	setrlimit(RLIMIT_NOFILE, &limit);
	say(socket, kv_device_cuda.arena_new(0, 1200 * MIB, KV_EXPORT_VMM, 2 * MIB, &arena));
	say(socket, strstr(kv_error_text(), "600 granules") && strstr(kv_error_text(), "256"));
	say(socket, kv_device_cuda.arena_new(0, 1200 * MIB, KV_EXPORT_VMM, 64 * MIB, &arena));
}

START_TEST(more_granules_than_files_is_said_so)
{
	struct peer owner = peer_new(owner_of_few_files);

	ck_assert_int_eq(hear(owner.socket), -EMFILE);
	ck_assert_int_eq(hear(owner.socket), 1);
	ck_assert_int_eq(hear(owner.socket), 0);
	peer_kill(&owner);
}
END_TEST

START_TEST(the_best_kind_is_vmm_and_says_why)
{
	struct kv_arena *arena = arena_of(0, 64 * MIB, 0, 0);

	fprintf(stderr, "why: %s\n", arena->why);
	ck_assert_uint_eq(arena->export.kind, KV_EXPORT_VMM);
	ck_assert_ptr_nonnull(strstr(arena->why, "vmm"));
	ck_assert_uint_eq(arena->export.n_fds, 1);
	kv_device_cuda.arena_free(arena);
}
END_TEST
/*
 * Large arenas
 */

START_TEST(nine_tenths_of_a_gpu_are_one_arena)
{
	static const uint64_t granules[] = {0, 64 * MIB, 0};
	static const uint32_t kinds[] = {KV_EXPORT_VMM, KV_EXPORT_VMM, KV_EXPORT_IPC};
	const uint64_t before = free_bytes(0);
	const uint64_t bytes = before / 10 * 9 / (2 * MIB) * (2 * MIB);
	struct kv_arena *arena;
	int64_t made, start = kv_now();

	arena = arena_of(0, bytes, kinds[_i], granules[_i]);
	made = kv_now() - start;
	start = kv_now();
	kv_device_cuda.arena_free(arena);
	fprintf(stderr,
		"%" PRIu64 " MiB as %s in granules of %" PRIu64
		" MiB: made and checked in %d ms, freed in %d ms\n",
		bytes / MIB, kv_export_name(kinds[_i]), granules[_i] / MIB, (int)(made / KV_MSEC),
		(int)((kv_now() - start) / KV_MSEC));
	ck_assert_uint_ge(free_bytes(0) + 64 * MIB, before);
}
END_TEST

START_TEST(an_arena_that_leaves_no_room_for_a_client_is_refused)
{
	static const uint32_t kinds[] = {0, KV_EXPORT_VMM};
	const uint64_t before = free_bytes(0); /* while a context was there */
	struct kv_arena *arena = NULL;

	/* It fits, as its owner needs no context; a client's does not fit beside it. */
	ck_assert_int_eq(kv_device_cuda.arena_new(0, (before / MIB / 2 * 2 + 300) * MIB, kinds[_i],
						  0, &arena),
			 -ENOMEM);
	fprintf(stderr, "%s\n", kv_error_text());
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "room for a client"));
	ck_assert_uint_ge(free_bytes(0) + 64 * MIB, before);
}
END_TEST

/*
 * Several GPUs
 */

static void use_all_gpus(int socket)
{
	int n = (int)hear(socket);
	struct kv_memory *memories[KV_MAX_GPUS];
	uint64_t word;

	for (int i = 0; i < n; i++)
		memories[i] = take_and_attach(socket, false);
	for (int i = 0; i < n; i++) {
		word = 0x1000 + (uint64_t)i;
		demand(kv_memory_write(memories[i], POOL_2, &word, sizeof(word)) == 0);
	}
	for (int i = 0; i < n; i++) {
		demand(kv_memory_read(memories[i], POOL_2, &word, sizeof(word)) == 0);
		demand(word == 0x1000 + (uint64_t)i);
	}
	say(socket, 1);
}

START_TEST(each_gpu_has_its_arena)
{
	struct peer client = peer_new(use_all_gpus);
	struct kv_arena *made[KV_MAX_GPUS];
	const int n = n_gpus < KV_MAX_GPUS ? n_gpus : KV_MAX_GPUS;

	fprintf(stderr, "%d GPUs\n", n);
	say(client.socket, n);
	for (int i = 0; i < n; i++) {
		made[i] = arena_of(i, 64 * MIB, KV_EXPORT_VMM, 0);
		if (i)
			ck_assert_mem_ne(made[i]->export.uuid, made[0]->export.uuid, KV_UUID_BYTES);
		give_arena(client.socket, made[i]);
		ck_assert_int_eq(hear(client.socket), 0);
	}
	ck_assert_int_eq(hear(client.socket), 1);
	peer_kill(&client);
	for (int i = 0; i < n; i++)
		kv_device_cuda.arena_free(made[i]);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("gpu/device_cuda");
	TCase *tcase = tcase_create("cuda"), *large = tcase_create("large");
	SRunner *runner = srunner_create(suite);
	struct kv_device_info info;
	struct rlimit limit;
	int n_failed, r;

	/* 9/10 of a large GPU are some 2,000 granules of 64 MiB. */
	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = limit.rlim_max;
	setrlimit(RLIMIT_NOFILE, &limit);
	for (; (r = kv_device_cuda.info(n_gpus, &info)) == 0; n_gpus++)
		;
	if (!n_gpus) {
		fprintf(stderr, "skipped: %s\n", kv_error_text());
		return r == -ENODEV ? 77 : 1;
	}
	tcase_add_loop_test(tcase, a_vmm_owner_has_no_driver_no_context_and_takes_exactly_its_bytes,
			    0, 2);
	tcase_add_test(tcase, an_ipc_owner_is_a_process_that_ends_with_its_arena);
	tcase_add_loop_test(tcase, memory_outlives_its_owner, 1, N_ARENAS);
	tcase_add_loop_test(tcase, an_arena_that_does_not_fit_names_both_numbers, 0, 3);
	tcase_add_test(tcase, more_granules_than_files_is_said_so);
	tcase_add_test(tcase, the_best_kind_is_vmm_and_says_why);
	tcase_add_test(tcase, each_gpu_has_its_arena);
	tcase_add_loop_test(large, nine_tenths_of_a_gpu_are_one_arena, 0, 3);
	tcase_add_loop_test(large, an_arena_that_leaves_no_room_for_a_client_is_refused, 0, 2);
	suite_add_tcase(suite, tcase);
	suite_add_tcase(suite, large);
	srunner_set_fork_status(runner, CK_NOFORK);
	srunner_run_all(runner, CK_VERBOSE);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
