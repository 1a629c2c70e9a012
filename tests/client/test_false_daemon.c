/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What stands between client and daemon, and lies: pages that are shorter than they are said to be, or can
 * be truncated later, or whose offsets lead out of them. A client refuses them with words and no signal.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "include/internal/arena_export.h"
#include "include/internal/shm.h"
#include "include/internal/socket.h"
#include "include/internal/wire.h"
#include "tests/support/client.h"
#include "tests/support/process.h"

#define N_BLOCKS 100
#define MAX_FDS	 KV_WIRE_MAX_FDS
#define SEALS	 (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

enum { INDEX, BLOCKS, SESSION, ARENA, GRANULE };

/* How the file number @file is exchanged for another, or what else is said. */
struct lie {
	int file;
	enum {
		HALF,	   /* of its bytes, and the message says all */
		HALF_SAID, /* of its bytes, and the message says so */
		TELLS,	   /* something else: @value at byte @at */
		BYTE_SAID, /* one */
		NOT_SEALED,
		A_SOCKET,
		OF_A_GPU, /* that no machine has: another UUID */
		OLDER,	  /* the welcome of a daemon of another release */
		ONE_MORE, /* granule is named than descriptors come */
		NO_SUCH,  /* granule */
	} how;
	const char *words;
	size_t at;
	uint32_t value;
};

static const struct lie lies[] = {
	{INDEX, HALF, "the index pages have"},
	{BLOCKS, HALF, "the block pages have"},
	{SESSION, HALF, "the session pages have"},
	{INDEX, BYTE_SAID, "the index pages have 1 bytes"},
	{BLOCKS, BYTE_SAID, "the block pages have 1 bytes"},
	{SESSION, BYTE_SAID, "the session pages have 1 bytes"},
	{INDEX, HALF_SAID, "buckets from byte"},
	{BLOCKS, HALF_SAID, "from byte"},
	{SESSION, HALF_SAID, "from byte"},
	{INDEX, TELLS, "0 buckets", offsetof(struct kv_shm_pool, n_buckets), 0},
	{INDEX, TELLS, "buckets from byte 2147483648 on", offsetof(struct kv_shm_pool, buckets_offset), 1u << 31},
	{INDEX, TELLS, "4294967295 stems from byte", offsetof(struct kv_shm_pool, n_stem_buckets), UINT32_MAX},
	{INDEX, TELLS, "stems from byte", offsetof(struct kv_shm_pool, n_stem_buckets) + 4, UINT32_MAX},
	{INDEX, TELLS, "3 of stems", offsetof(struct kv_shm_pool, n_stem_buckets), 3},
	{SESSION, TELLS, "rings of 0 and", offsetof(struct kv_shm_session, grant_capacity), 0},
	{SESSION, TELLS, "and 3 places", offsetof(struct kv_shm_session, op_capacity), 3},
	{INDEX, NOT_SEALED, "the index pages are not sealed"},
	{BLOCKS, NOT_SEALED, "the block pages are not sealed"},
	{SESSION, NOT_SEALED, "the session pages are not sealed"},
	{INDEX, A_SOCKET, "the index pages have 0 bytes"},
	{ARENA, HALF, "bytes expected, this file has"},
	{ARENA, NOT_SEALED, "sealed against shrinking"},
	{INDEX, OLDER, "shares pages of version 1, this libkvclient"},
	{ARENA, OF_A_GPU, "GPU-33333333-3333-3333-3333-333333333333"},
};

/* kvcached --isolate */
static const struct lie granule_lies[] = {
	{GRANULE, ONE_MORE, "descriptors for"},
	{GRANULE, NO_SUCH, "it named granule 4294967295, there are"},
	{GRANULE, HALF, "bytes expected, this file has"},
	{GRANULE, NOT_SEALED, "sealed against shrinking"},
};

static char false_socket[108];

/* A file with the first @bytes of @fd. */
static int copy_of(int fd, size_t bytes, bool sealed)
{
	int copy = memfd_create("kvcached-false", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	char page[4096];

	if (copy < 0 || ftruncate(copy, (off_t)bytes) < 0)
		_exit(3);
	for (size_t at = 0; at < bytes && at < 1 << 20; at += sizeof(page)) {
		size_t n = bytes - at < sizeof(page) ? bytes - at : sizeof(page);

		if (pread(fd, page, n, (off_t)at) != (ssize_t)n ||
		    pwrite(copy, page, n, (off_t)at) != (ssize_t)n)
			_exit(3);
	}
	if (sealed && fcntl(copy, F_ADD_SEALS, SEALS) < 0)
		_exit(3);
	return copy;
}

/* @said: what the message says of its size, or NULL */
static void exchange(const struct lie *lie, int *fd, uint64_t *said)
{
	struct stat st;
	size_t bytes;

	if (fstat(*fd, &st) < 0)
		_exit(3);
	bytes = lie->how == BYTE_SAID			     ? 1
		: lie->how == NOT_SEALED || lie->how == TELLS ? (size_t)st.st_size
							      : (size_t)st.st_size / 2;
	if (said && (lie->how == BYTE_SAID || lie->how == HALF_SAID))
		*said = bytes;
	*fd = lie->how == A_SOCKET ? socket(AF_UNIX, SOCK_STREAM, 0) : copy_of(*fd, bytes, lie->how != NOT_SEALED);
	if (lie->how == TELLS &&
	    pwrite(*fd, &lie->value, sizeof(lie->value), (off_t)lie->at) != (ssize_t)sizeof(lie->value))
		_exit(3);
}

static void spoil(const struct lie *lie, void *packet, int *fds, uint32_t n_fds)
{
	const struct kv_wire_head *head = packet;
	struct kv_msg_pool_opened *opened = packet;
	uint64_t *said[] = {&opened->index_bytes, &opened->blocks_bytes, &opened->session_bytes};

	if (lie->how == OLDER) {
		if (head->type == KV_MSG_WELCOME)
			((struct kv_msg_welcome *)packet)->shm_abi = 1;
		return;
	}
	if (head->type == KV_MSG_POOL_OPENED && lie->file < ARENA && n_fds == 3)
		exchange(lie, &fds[lie->file], said[lie->file]);
	if (head->type == KV_MSG_ARENA_PART && lie->how == OF_A_GPU) {
		struct kv_arena_export *export = &((struct kv_msg_arena_part *)packet)->export;

		export->kind = KV_EXPORT_VMM;
		memset(export->uuid, 0x33, sizeof(export->uuid));
		return;
	}
	if (head->type == KV_MSG_ARENA_PART && lie->file == ARENA && n_fds)
		exchange(lie, &fds[0], NULL);
	if (head->type == KV_MSG_GRANULES_PART && lie->file == GRANULE && n_fds) {
		struct kv_msg_granules_part *part = packet;

		if (lie->how == ONE_MORE)
			part->n++;
		else if (lie->how == NO_SUCH)
			part->items[0].index = UINT32_MAX;
		else
			exchange(lie, &fds[0], NULL);
	}
}

/* One packet; false: nothing more comes. */
static bool pass_on(int from, int to, const struct lie *lie)
{
	static _Alignas(64) char packet[1 << 17];
	int fds[MAX_FDS];
	uint32_t n_fds = 0;
	int64_t n = kv_socket_receive(from, packet, sizeof(packet), fds, MAX_FDS, &n_fds, 0);

	if (n <= 0)
		return false;
	if (lie)
		spoil(lie, packet, fds, n_fds);
	return !kv_socket_send(to, packet, (size_t)n, fds, n_fds, 0);
}

static int daemon_side(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	strcpy(address.sun_path, daemon_socket());
	if (connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
		_exit(2);
	return fd;
}

static void stands_between(struct process *self, void *arg)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct pollfd at[33] = {{.fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), .events = POLLIN}};
	unsigned n = 1;

	strcpy(address.sun_path, false_socket);
	unlink(false_socket); /* of one that was killed */
	if (bind(at[0].fd, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(at[0].fd, 8) < 0)
		_exit(1);
	process_say(self, 0);
	while (poll(at, n, DEADLINE_MS) > 0) {
		/* Pairs: 1 the client's, 2 the daemon's, and so on. */
		for (unsigned i = 1; i < n; i++) {
			unsigned other = i % 2 ? i + 1 : i - 1;

			if (!at[i].revents || pass_on(at[i].fd, at[other].fd, i % 2 ? NULL : arg))
				continue;
			close(at[i].fd);
			close(at[other].fd);
			at[i] = at[other] = (struct pollfd){.fd = -1};
			break;
		}
		if (at[0].revents && n + 2 <= 33) {
			at[n++] = (struct pollfd){.fd = accept(at[0].fd, NULL, NULL), .events = POLLIN};
			at[n++] = (struct pollfd){.fd = daemon_side(), .events = POLLIN};
		}
	}
	_exit(1);
}

static struct kv_client *client;

static void start_with(const char *option)
{
	daemon_start("--host", "64M", option);
	client = client_new();
	snprintf(false_socket, sizeof(false_socket), "%s/false.sock", daemon_folder());
}

static void start(void)
{
	start_with(NULL);
}

static void start_isolated(void)
{
	start_with("--isolate");
}

static void stop(void)
{
	kv_disconnect(client);
	daemon_stop();
}

static int open_through(struct kv_client **ret_other, struct kv_pool **ret)
{
	KV_OPTIONS(kv_connect_options, how, .socket = false_socket, .name = "test", .timeout = TIMEOUT);
	KV_OPTIONS(kv_pool_options, what, .name = "pool", .model = "small", .layout = small_layout(),
		   .max_bytes = (N_BLOCKS + 1) * BLOCK_BYTES, .mapped = true, .timeout = TIMEOUT);

	must(kv_connect(&how, ret_other));
	return kv_pool_open(*ret_other, &what, ret);
}

static void is_refused(const struct lie *lie)
{
	struct process *between = process_start(stands_between, (void *)(uintptr_t)lie);
	struct kv_client *other = NULL;
	struct kv_pool *pool = NULL;

	process_hear(between);
	if (lie->how == OF_A_GPU) { /* which error depends on driver and build */
		expect(open_through(&other, &pool) < 0, "a GPU that isn't there was mapped");
		expect(strstr(kv_error_text(), lie->words), "'%s' names no GPU", kv_error_text());
	} else {
		refused(open_through(&other, &pool), lie->file == ARENA ? -EINVAL : -EPROTO, lie->words);
	}
	ck_assert_ptr_null(pool);
	kv_disconnect(other);
	process_kill(between);
}

START_TEST(pages_that_are_not_what_they_are_said_to_be_are_refused_and_raise_no_signal)
{
	is_refused(&lies[_i]);
	wait_until(!daemon_stats(client).n_sessions);
	books_balance(client);
}
END_TEST

/* At the first call that maps them, be it the one that opens the pool. */
START_TEST(granules_that_are_not_what_they_are_said_to_be_are_not_mapped)
{
	const struct lie *lie = &granule_lies[_i];
	struct process *between = process_start(stands_between, (void *)(uintptr_t)lie);
	struct kv_client *other = NULL;
	struct kv_pool *pool = NULL;
	kv_block_id id;
	int r;

	process_hear(between);
	r = open_through(&other, &pool);
	if (!r)
		r = kv_blocks_take(pool, 1, &id, TIMEOUT);
	expect(r == (lie->how == HALF || lie->how == NOT_SEALED ? -EINVAL : -EPROTO), "%d (%s)", r, kv_error_text());
	expect(strstr(kv_error_text(), lie->words), "'%s' says nothing of '%s'", kv_error_text(), lie->words);
	kv_pool_close(pool);
	kv_disconnect(other);
	process_kill(between);
	books_balance(client);
}
END_TEST

START_TEST(who_passes_everything_on_is_not_noticed)
{
	struct process *between;
	struct kv_client *other;
	struct kv_pool *pool;
	kv_block_id id;

	between = process_start(stands_between, NULL);
	process_hear(between);
	must(open_through(&other, &pool));
	must(kv_blocks_take(pool, 1, &id, TIMEOUT));
	block_fill(pool, id, 7);
	must(kv_blocks_give(pool, 1, &id));
	kv_pool_close(pool);
	kv_disconnect(other);
	process_kill(between);
	books_balance(client);
}
END_TEST

static Suite *suite(void)
{
	TCase *cases = tcase_create("false daemon"), *isolated = tcase_create("granules");
	Suite *s = suite_create("client/false_daemon");

	tcase_set_timeout(cases, 60);
	tcase_add_checked_fixture(cases, start, stop);
	tcase_add_loop_test(cases, pages_that_are_not_what_they_are_said_to_be_are_refused_and_raise_no_signal, 0,
			    sizeof(lies) / sizeof(lies[0]));
	tcase_add_test(cases, who_passes_everything_on_is_not_noticed);
	suite_add_tcase(s, cases);
	tcase_set_timeout(isolated, 60);
	tcase_add_checked_fixture(isolated, start_isolated, stop);
	tcase_add_loop_test(isolated, granules_that_are_not_what_they_are_said_to_be_are_not_mapped, 0,
			    sizeof(granule_lies) / sizeof(granule_lies[0]));
	tcase_add_test(isolated, who_passes_everything_on_is_not_noticed);
	suite_add_tcase(s, isolated);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
