/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvcached --isolate between two users of the machine, each of whom has a pool: neither can map, read,
 * guess or exhaust what is the other's. The second user's process speaks the protocol itself, and tries
 * what a library doesn't.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "include/internal/shm.h"
#include "tests/support/client.h"
#include "tests/support/process.h"
#include "tests/support/raw.h"

#define FIRST  3001
#define SECOND 3002
#define MIB    ((uint64_t)1 << 20)
#define N_GRANULES   32u
#define IN_A_GRANULE (2 * MIB / BLOCK_BYTES)
#define MOST	     ((N_GRANULES - 4) * IN_A_GRANULE)

static struct kv_client *client;
static kv_block_id ids[N_GRANULES * IN_A_GRANULE];

static void setup(void)
{
	chmod(daemon_folder(), 0711);
	daemon_start("--host", "64M", "--isolate", "--socket-mode", "0666", "--log-level", "error",
		     "--user-clients", "40", "--user-sessions", "30", "--user-pools", "3",
		     "--user-blocks", "20000", "--user-messages", "20000");
	client = client_new();
}

static void teardown(void)
{
	wait_until(daemon_stats(client).n_sessions == 0);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

/* ---- map ---- */

/* A client of the first user that works until it is told to go. */
static void owns(struct process *self, void *arg)
{
	struct kv_client *own;
	struct kv_pool *pool;

	(void)arg;
	process_become(FIRST, FIRST);
	own = client_new();
	pool = pool_new_mapped(own, "first", 0);
	must(kv_blocks_take(pool, 5000, ids, TIMEOUT));
	for (int i = 0; i < 5000; i++)
		block_fill(pool, ids[i], 0x61);
	process_say(self, ids[2500]);
	process_wait(self);
	for (int i = 0; i < 5000; i++)
		expect(block_is(pool, ids[i], 0x61), "block %d was changed", ids[i]);
	must(kv_blocks_give(pool, 5000, ids));
	kv_pool_close(pool);
	kv_disconnect(own);
}

struct others {
	pid_t pids[4]; /* keeper, worker, mover, the first user's client */
	kv_block_id id;
};

static int open_proc(pid_t pid, const char *what)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/%d/%s", pid, what);
	return open(path, O_RDONLY);
}

static void looks_into(pid_t pid)
{
	static const char *const files[] = {"mem", "maps", "fd/0", "fd/5", "fd/12", "map_files", "environ"};
	int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
	char byte;
	struct iovec to = {&byte, 1}, from = {(void *)0x1000, 1};
	char path[64];

	expect(pidfd >= 0, "process %d isn't there", pid);
	for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
		int fd = open_proc(pid, files[i]);

		/* The map_files folder opens; what is in it doesn't. */
		expect(fd < 0 || read(fd, &byte, 1) < 0, "/proc/%d/%s can be read", pid, files[i]);
		close(fd);
	}
	snprintf(path, sizeof(path), "/proc/%d/fd", pid);
	expect(!opendir(path), "%s can be listed", path);
	for (int i = 0; i < 64; i++)
		expect(syscall(SYS_pidfd_getfd, pidfd, i, 0) < 0 && (errno == EPERM || errno == EBADF),
		       "descriptor %d of %d can be had", i, pid);
	expect(process_vm_readv(pid, &to, 1, &from, 1, 0) < 0 && errno == EPERM,
	       "the memory of %d can be read", pid);
	close(pidfd);
}

static uint32_t ask(int fd, uint32_t first, int *ret_fds, uint32_t *ret_index)
{
	struct kv_msg_granules msg = {.n = 3, .index = {first, first + 1, first + 2}};
	const struct kv_msg_granules_part *part;

	raw_send(fd, KV_MSG_GRANULES, (char *)&msg + sizeof(msg.head), sizeof(msg) - sizeof(msg.head));
	part = (const void *)raw_receive(fd, ret_fds);
	expect(part && part->head.type == KV_MSG_GRANULES_PART, "no granules came");
	for (uint32_t i = 0; i < part->n; i++)
		ret_index[i] = part->items[i].index;
	return part->n;
}

static void tries_to_map(struct process *self, void *arg)
{
	const struct others *others = arg;
	uint32_t index[3], n = 0;
	int fd, fds[3];

	process_become(SECOND, SECOND);
	for (int i = 0; i < 4; i++)
		looks_into(others->pids[i]);
	fd = raw_hello();
	ck_assert_uint_eq(raw_open(fd, "second", 0, fds)->type, KV_MSG_POOL_OPENED);
	/* The index it may read, whatever it opens it as. */
	expect(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0) == MAP_FAILED,
	       "the index can be mapped for writing");
	for (uint32_t i = 0; i < N_GRANULES; i += 3) {
		uint32_t got = ask(fd, i, fds, index);

		for (uint32_t k = 0; k < got; k++) {
			struct stat st;

			expect(index[k] != (uint64_t)others->id * BLOCK_BYTES / (2 * MIB),
			       "a granule of the first user was handed out");
			expect(!fstat(fds[k], &st) && st.st_size == 2 * MIB, "a granule of %lld bytes",
			       (long long)st.st_size);
			close(fds[k]);
		}
		n += got;
	}
	ck_assert_uint_ge(n, 1);
	ck_assert_uint_le(n, 2);
	process_say(self, 0);
}

START_TEST(neither_can_map_what_is_the_others)
{
	struct process *first = process_start(owns, NULL), *second;
	struct others others;

	others.id = (kv_block_id)process_hear(first);
	others.pids[0] = daemon_pid();
	others.pids[1] = daemon_worker();
	others.pids[2] = (pid_t)gpu_stats(client).mover_pid;
	others.pids[3] = first->pid;
	second = process_start(tries_to_map, &others);
	process_hear(second);
	process_end(second);
	process_go(first);
	process_end(first);
}
END_TEST

/* ---- read ---- */

/* Keeps descriptors and mappings of all that it had, beside what the library unmaps. */
static void keeps_what_it_had(struct process *self, void *arg)
{
	struct kv_client *own;
	struct kv_pool *pool;
	unsigned char *kept[N_GRANULES] = {NULL};
	int fds[3], fd;
	uint32_t index[3], n = 0;

	(void)arg;
	process_become(FIRST, FIRST);
	own = client_new();
	pool = pool_new_mapped(own, "first", 0);
	fd = raw_hello();
	ck_assert_uint_eq(raw_open(fd, "first", 0, fds)->type, KV_MSG_POOL_OPENED);
	must(kv_blocks_take(pool, 18000, ids, TIMEOUT));
	for (int i = 0; i < 18000; i++)
		block_fill(pool, ids[i], 0x62);
	for (uint32_t i = 0; i < N_GRANULES; i += 3) {
		uint32_t got = ask(fd, i, fds, index);

		for (uint32_t k = 0; k < got; k++)
			kept[n++] = mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED, fds[k], 0);
	}
	must(kv_blocks_give(pool, 18000, ids));
	kv_pool_close(pool);
	close(fd);
	process_say(self, n);
	process_wait(self);
	/* What the other has written since is nowhere here; what is written here is nowhere there. */
	for (uint32_t i = 0; i < n; i++) {
		expect(!memchr(kept[i], 0x63, 2 * MIB), "the second user's bytes can be read");
		memset(kept[i], 0x64, 2 * MIB);
	}
	process_say(self, 0);
	process_wait(self);
	kv_disconnect(own);
}

static void finds_nothing_of_the_other(struct process *self, void *arg)
{
	struct kv_client *own;
	struct kv_pool *pool;
	kv_block_id *mine = ids;

	(void)arg;
	process_become(SECOND, SECOND);
	own = client_new();
	pool = pool_new_mapped(own, "second", 0);
	must(kv_blocks_take(pool, 19000, mine, TIMEOUT));
	for (int i = 0; i < 19000; i++)
		expect(block_is(pool, mine[i], 0), "block %d has bytes of another user", mine[i]);
	for (int i = 0; i < 19000; i++)
		block_fill(pool, mine[i], 0x63);
	process_say(self, 0);
	process_wait(self);
	for (int i = 0; i < 19000; i++)
		expect(block_is(pool, mine[i], 0x63), "block %d was written by another user", mine[i]);
	must(kv_blocks_give(pool, 19000, mine));
	kv_pool_close(pool);
	kv_disconnect(own);
}

START_TEST(what_one_had_and_keeps_mapped_the_other_never_gets)
{
	struct process *first = process_start(keeps_what_it_had, NULL), *second;

	ck_assert_int_ge(process_hear(first), 17);
	/* Its sessions have ended, or been hung up on, its processes live on. */
	must(kv_pool_drop(client, "first", TIMEOUT));
	second = process_start(finds_nothing_of_the_other, NULL);
	process_hear(second);
	process_go(first);
	process_hear(first);
	process_go(second);
	process_end(second);
	process_go(first);
	process_end(first);
	ck_assert_uint_ge(gpu_stats(client).renewed_bytes_total, 10 * MIB);
}
END_TEST

/* ---- guess ---- */

static void guesses(struct process *self, void *arg)
{
	const struct kv_session_stats *session = arg;
	struct kv_msg_hello hello = {.name = "raw", .version = "0"};
	struct kv_msg_resume resume = {.pool_id = session->pool_id,
				       .session_id = session->id,
				       .slot = (uint32_t)session->slot};
	int fd, fds[3];

	process_become(SECOND, SECOND);
	fd = raw_connect();
	raw_send(fd, KV_MSG_HELLO, (char *)&hello + sizeof(hello.head), sizeof(hello) - sizeof(hello.head));
	resume.boot_nonce = ((const struct kv_msg_welcome *)raw_receive(fd, NULL))->boot_nonce;
	/* All of it is right but the token; and it isn't that process. */
	for (uint64_t token = 0; token < 200; token++) {
		resume.token = token * 0x9e3779b97f4a7c15u;
		raw_send(fd, KV_MSG_RESUME, (char *)&resume + sizeof(resume.head),
			 sizeof(resume) - sizeof(resume.head));
		ck_assert(raw_is_error(raw_receive(fd, fds), -ENOENT, "isn't known"));
	}
	/* Handles and ids of others in a session of its own: it loses that, nobody else anything. */
	ck_assert_uint_eq(raw_open(fd, "second", 0, fds)->type, KV_MSG_POOL_OPENED);
	{
		struct kv_shm_session *s = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fds[2], 0);
		struct kv_op *ops = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fds[2],
					 (off_t)s->ops_offset);

		ops[0] = (struct kv_op){.kind = KV_OP_GIVE, .id = (int32_t)session->blocks_leased};
		__atomic_store_n(&s->ops.head, 1, __ATOMIC_RELEASE);
		raw_send(fd, KV_MSG_PING, NULL, 0);
		expect(!raw_receive(fd, NULL), "it could give back a block that isn't its own");
	}
	process_say(self, 0);
}

START_TEST(ids_and_numbers_of_the_other_open_nothing)
{
	struct process *first = process_start(owns, NULL), *second;
	struct kv_session_stats session;
	kv_block_id id = (kv_block_id)process_hear(first);

	ck_assert(session_stats(client, first->pid, &session));
	/* Away, so that it could be taken up again. */
	daemon_kill_worker();
	must(kv_ping(client, TIMEOUT));
	session.blocks_leased = (uint64_t)id;
	second = process_start(guesses, &session);
	process_hear(second);
	process_end(second);
	process_go(first);
	process_end(first);
}
END_TEST

/* ---- exhaust ---- */

static void takes_all_it_can_get(struct process *self, void *arg)
{
	static const struct kv_layout *layout;
	struct kv_client *own;
	struct kv_pool *pools[64], *big;
	uint32_t n = 0, n_sessions = 0;
	int r = 0, floods[32];

	(void)arg;
	process_become(SECOND, SECOND);
	layout = small_layout();
	own = client_new();
	for (; n < 64 && !r; n += !r) {
		char name[32];
		KV_OPTIONS(kv_pool_options, what, .name = name, .model = "small", .layout = layout,
			   .mapped = 1, .timeout = TIMEOUT);

		snprintf(name, sizeof(name), "second-%u", n);
		r = kv_pool_open(own, &what, &pools[n]);
	}
	ck_assert_int_eq(r, -EDQUOT);
	ck_assert_uint_eq(n, 3);
	for (r = 0; n_sessions < 64 && !r; n_sessions++) {
		KV_OPTIONS(kv_pool_options, what, .name = "second-0", .model = "small", .timeout = TIMEOUT);

		r = kv_pool_open(own, &what, &big);
	}
	ck_assert_int_eq(r, -EDQUOT);
	for (r = 0, n = 0; !r; n += 500) {
		r = n + 500 > sizeof(ids) / sizeof(ids[0]) ? -E2BIG :
			kv_blocks_take(pools[0], 500, ids + n, 100 * KV_MSEC);
		for (uint32_t i = 0; !r && i < 500; i++)
			block_fill(pools[0], ids[n + i], 0x65);
	}
	expect(r == -EDQUOT || r == KV_NO_ROOM, "taking all gave %d (%s)", r, kv_error_text());
	process_say(self, n);
	/* And on and on, with messages from all its connections. */
	for (int i = 0; i < 4; i++)
		floods[i] = raw_connect();
	for (int64_t end = now_ns() + 1500 * KV_MSEC; now_ns() < end;) {
		for (int i = 0; i < 4; i++)
			if (floods[i] >= 0)
				raw_send(floods[i], 9999, NULL, 0);
		kv_blocks_take(pools[0], 500, ids + n, 0);
		kv_ping(own, TIMEOUT);
	}
	process_say(self, 0);
	process_wait(self);
}

START_TEST(what_one_is_promised_the_other_can_not_use_up)
{
	KV_OPTIONS(kv_pool_options, what, .name = "first", .model = "small", .layout = small_layout(),
		   .min_bytes = 24 * MIB, .mapped = 1, .timeout = TIMEOUT);
	const uint32_t n = 20 * MIB / BLOCK_BYTES;
	struct process *second;
	struct kv_pool *pool;
	int64_t start, slowest = 0;

	must(kv_pool_open(client, &what, &pool));
	second = process_start(takes_all_it_can_get, NULL);
	ck_assert_int_ge(process_hear(second), 1000);
	start = now_ns();
	must(kv_blocks_take(pool, n, ids, TIMEOUT));
	expect(now_ns() - start < 10 * KV_SEC, "its minimum came after %lld ms",
	       (long long)((now_ns() - start) / KV_MSEC));
	for (uint32_t i = 0; i < n; i++)
		block_fill(pool, ids[i], 0x66);
	for (int i = 0; i < 100; i++) {
		int64_t before = now_ns();

		must(kv_ping(client, TIMEOUT));
		slowest = now_ns() - before > slowest ? now_ns() - before : slowest;
	}
	expect(slowest < 5 * KV_SEC, "a ping took %lld ms", (long long)(slowest / KV_MSEC));
	process_hear(second);
	process_kill(second);
	for (uint32_t i = 0; i < n; i++)
		expect(block_is(pool, ids[i], 0x66), "block %d was changed", ids[i]);
	must(kv_blocks_give(pool, n, ids));
	kv_pool_close(pool);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("client/users");
	TCase *tcase = tcase_create("users");

	if (geteuid()) {
		fprintf(stderr, "skipped: becoming other users takes root\n");
		return 77;
	}
	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, neither_can_map_what_is_the_others);
	tcase_add_test(tcase, what_one_had_and_keeps_mapped_the_other_never_gets);
	tcase_add_test(tcase, ids_and_numbers_of_the_other_open_nothing);
	tcase_add_test(tcase, what_one_is_promised_the_other_can_not_use_up);
	suite_add_tcase(s, tcase);
	return daemon_run_tests(s);
}
