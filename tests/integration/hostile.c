/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Real processes that mean no good, beside one that works: whatever they do, it is answered in
 * time, its blocks stay its own, the books balance, and what they took comes back when they end.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/client.h"
#include "tests/support/process.h"
#include "tests/support/raw.h"

#define STRANGER 65534 /* another user */
#define N_BLOCKS 500
/* While others flood the daemon; without a sanitizer on an idle machine it is 1 ms. */
#define ANSWER_IN (5 * KV_SEC)

static struct kv_client *client;
static struct kv_pool *pool;
static kv_block_id ids[N_BLOCKS];
static uint32_t n_fds;

static bool can_be_others(void)
{
	return geteuid() == 0;
}

static void become_stranger(void)
{
	if (can_be_others() && (setgid(STRANGER) < 0 || setuid(STRANGER) < 0))
		_exit(3);
}

static uid_t stranger(void)
{
	return can_be_others() ? STRANGER : getuid();
}

/* The honest one has a pool of its own, with content. */
static void start(const char *const *options)
{
	const char *list[16] = {"--host", "64M", "--socket-mode", "0666", "--log-level", "error"};

	for (int n = 6; *options; n++)
		list[n] = *options++;
	daemon_start_with(list);
	ck_assert_int_eq(chmod(daemon_folder(), 0711), 0);
	client = client_new();
	pool = pool_new_mapped(client, "honest", N_BLOCKS);
	must(kv_blocks_take(pool, N_BLOCKS / 2, ids, TIMEOUT));
	for (int i = 0; i < N_BLOCKS / 2; i++)
		block_fill(pool, ids[i], i);
	wait_until(daemon_stats(client).n_clients == 2);
	n_fds = daemon_fds();
}
#define start_with(...) start((const char *const[]){__VA_ARGS__, NULL})

static void nothing_has_happened(void)
{
	for (int i = 0; i < N_BLOCKS / 2; i++)
		expect(block_is(pool, ids[i], i % 256), "block %d has other bytes", ids[i]);
	books_balance(client);
}

static void stop(void)
{
	static const char *const others[] = {"p0", "p1", "p2", "p3", "hoard", "absurd"};

	wait_until(daemon_stats(client).n_clients == 2);
	for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
		kv_pool_drop(client, others[i], TIMEOUT);
	nothing_has_happened();
	wait_until(daemon_fds() == n_fds);
	must(kv_blocks_give(pool, N_BLOCKS / 2, ids));
	kv_pool_close(pool);
	kv_disconnect(client);
	daemon_stop();
}

/* Works for so long, and never waits long. */
static void work(int64_t time)
{
	int64_t end = now_ns() + time, longest = 0;
	uint32_t rounds = 0;

	for (; now_ns() < end || rounds < 3; rounds++) {
		int64_t before = now_ns();
		kv_block_id more[N_BLOCKS / 4];

		must(kv_ping(client, TIMEOUT));
		must(kv_blocks_take(pool, N_BLOCKS / 4, more, TIMEOUT));
		must(kv_blocks_give(pool, N_BLOCKS / 4, more));
		longest = now_ns() - before > longest ? now_ns() - before : longest;
	}
	expect(longest < ANSWER_IN, "an answer took %lld ms", (long long)(longest / KV_MSEC));
	nothing_has_happened();
}

/* ---- limits of a user ---- */

static void opens_pools(struct process *self, void *arg)
{
	const struct kv_wire_head *answer;
	const char *option = arg;
	int fds[5];

	become_stranger();
	for (int i = 0; i < 4; i++) {
		char name[] = {'p', (char)('0' + i * (option[7] == 'p')), 0};
		char words[100];

		fds[i] = raw_hello();
		answer = raw_open(fds[i], name, 1 << 20, NULL);
		snprintf(words, sizeof(words), "user %u has 3", stranger());
		if (i < 3)
			expect(answer && answer->type == KV_MSG_POOL_OPENED, "%d was refused", i);
		else
			expect(raw_is_error(answer, -EDQUOT, words) &&
				       raw_is_error(answer, -EDQUOT, option),
			       "%s", answer ? ((const struct kv_msg_error *)answer)->text : "gone");
	}
	raw_send(fds[1], KV_MSG_POOL_CLOSE, NULL, 0);
	expect(raw_receive(fds[1], NULL), "no answer");
	process_say(self, 0);
	process_wait(self);
	answer = raw_open(fds[3], "p3", 1 << 20, NULL);
	expect(answer && answer->type == KV_MSG_POOL_OPENED, "still refused");
}

START_TEST(a_user_with_as_many_sessions_as_allowed_is_refused_one_more)
{
	struct process *other;

	start_with("--user-sessions", "3");
	other = process_start(opens_pools, (void *)"--user-sessions");
	process_hear(other);
	work(0);
	process_go(other);
	process_end(other);
	stop();
}
END_TEST

START_TEST(a_user_with_as_many_pools_as_allowed_makes_no_more_until_one_ends)
{
	struct process *other;

	if (!can_be_others())
		return; /* the test's own pool would count */
	start_with("--user-pools", "3");
	other = process_start(opens_pools, (void *)"--user-pools");
	process_hear(other);
	must(kv_pool_drop(client, "p1", TIMEOUT));
	process_go(other);
	process_end(other);
	stop();
}
END_TEST

static void connects_often(struct process *self, void *arg)
{
	int n = 0, fds[30];

	(void)arg;
	become_stranger();
	for (; n < 30; n++) {
		struct kv_msg_hello hello = {.name = "n"};
		const struct kv_wire_head *answer;

		fds[n] = raw_connect();
		raw_send(fds[n], KV_MSG_HELLO, (char *)&hello + 16, sizeof(hello) - 16);
		answer = raw_receive(fds[n], NULL);
		if (answer && answer->type == KV_MSG_WELCOME)
			continue;
		expect(raw_is_error(answer, -EDQUOT, "--user-clients"), "connection %d", n);
		break;
	}
	process_say(self, n);
	process_wait(self);
}

START_TEST(a_user_with_as_many_connections_as_allowed_leaves_room_for_others)
{
	struct process *other;

	start_with("--user-clients", "20");
	other = process_start(connects_often, NULL);
	ck_assert_int_eq(process_hear(other), can_be_others() ? 20 : 18);
	if (can_be_others()) {
		struct kv_client *another = client_new();

		must(kv_ping(another, TIMEOUT));
		kv_disconnect(another);
	}
	process_go(other);
	process_end(other);
	stop();
}
END_TEST

/* Leases, and publishes and holds, as much as it can get. */
static void hoards(struct process *self, void *arg)
{
	static const int32_t first[] = {1, 2, 3};
	struct kv_client *own;
	struct kv_pool *mine;
	struct kv_seq *seq;
	uint32_t n = 0;
	int r = 0;

	(void)arg;
	become_stranger();
	own = client_new();
	mine = pool_new(own, "hoard", 0);
	for (int32_t prompt = first[0]; !r; prompt++) {
		size_t hit;

		must(kv_seq_new(mine, &seq));
		must(kv_seq_lookup(seq, tokens_of(prompt, 10 * BLOCK_TOKENS), 10 * BLOCK_TOKENS,
				   &hit));
		r = kv_seq_reserve(seq, 10 * BLOCK_TOKENS, 0);
		if (r)
			break;
		must(kv_seq_append(seq, tokens_of(prompt, 10 * BLOCK_TOKENS), 10 * BLOCK_TOKENS));
		must(kv_seq_publish(seq, NULL));
		must(kv_ping(own, TIMEOUT));
		n += 10;
	}
	refused(r, -EDQUOT, "--user-blocks");
	process_say(self, n);
	process_wait(self);
	/* What it lets go is its to have again. */
	kv_seq_free(seq, NULL);
	kv_pool_close(mine);
	mine = pool_new(own, "hoard", 0);
	for (int i = 0; i < 20; i++) {
		kv_block_id some[200];

		sleep_ms(6);
		must(kv_blocks_take(mine, 200, some, 0));
		must(kv_blocks_give(mine, 200, some));
	}
	kv_pool_close(mine);
	kv_disconnect(own);
}

START_TEST(a_user_can_neither_lease_nor_hold_more_blocks_than_allowed)
{
	struct process *other;

	/* The test's own count, where it can't be another user. */
	start_with("--user-blocks", "600");
	other = process_start(hoards, NULL);
	if (can_be_others()) {
		int64_t n = process_hear(other);

		expect(n > 500 && n <= 600, "%lld blocks", (long long)n);
		expect(pool_stats(client, "hoard").blocks_cached_held <= 600, "more are held");
	}
	process_go(other);
	if (can_be_others())
		process_end(other);
	else
		process_kill(other);
	stop();
}
END_TEST

/* Pings as fast as they go, without reading the answers first; says how many were answered in 1 s.
 */
static void shouts(struct process *self, void *arg)
{
	int64_t end, n = 0;
	int fds[4];

	(void)arg;
	become_stranger();
	for (int i = 0; i < 4; i++)
		fds[i] = raw_hello();
	process_say(self, 0);
	for (end = now_ns() + KV_SEC; now_ns() < end; n++) {
		for (int i = 0; i < 4; i++)
			raw_send(fds[i], KV_MSG_PING, NULL, 0);
		for (int i = 0; i < 4; i++)
			expect(raw_receive(fds[i], NULL), "it was cut off");
	}
	process_say(self, 4 * n);
}

START_TEST(a_user_that_sends_too_much_is_heard_later_and_others_at_once)
{
	struct process *other;
	int64_t n;

	start_with("--user-messages", "1000");
	other = process_start(shouts, NULL);
	process_hear(other);
	if (can_be_others())
		work(KV_SEC / 2);
	n = process_hear(other);
	/* 1 s of it, a tenth at once, and what was under way. */
	expect(n > 200 && n < 2500, "%lld messages a second", (long long)n);
	process_end(other);
	stop();
}
END_TEST

/* ---- what belongs to another user ---- */

static void meddles(struct process *self, void *arg)
{
	struct kv_client *own;
	struct kv_pool *mine;

	(void)self;
	(void)arg;
	become_stranger();
	own = client_new();
	refused(kv_pool_drop(own, "honest", TIMEOUT), -EPERM, "was made by user");
	refused(kv_pool_drop(own, "nobody's", TIMEOUT), -ENOENT, "no pool");
	for (uint16_t type = KV_MSG_POOL_EPOCH; type <= KV_MSG_POOL_SET;
	     type += KV_MSG_POOL_SET - KV_MSG_POOL_EPOCH) {
		struct kv_msg_pool_set msg = {.name = "honest", .change = 1, .min_bytes = 4 << 20};
		size_t size = type == KV_MSG_POOL_SET ? sizeof(msg) : sizeof(struct kv_msg_drop);
		int fd = raw_hello();

		raw_send(fd, type, (char *)&msg + 16, size - 16);
		expect(raw_is_error(raw_receive(fd, NULL), -EPERM, "was made by user"), "type %u",
		       type);
		close(fd);
	}
	/* Its own is its own. */
	mine = pool_new(own, "p0", 0);
	must(kv_pool_drop(own, "p0", TIMEOUT));
	kv_pool_close(mine);
	kv_disconnect(own);
}

START_TEST(a_user_changes_no_pool_of_another)
{
	struct process *other;

	if (!can_be_others())
		return;
	start_with("--max-clients", "100");
	other = process_start(meddles, NULL);
	process_end(other);
	stop();
}
END_TEST

/* ---- floods ---- */

static void connects_and_goes(struct process *self, void *arg)
{
	become_stranger();
	process_say(self, 0);
	for (uint64_t i = 0; i < 3000; i++) {
		int fd = raw_connect();

		if (fd >= 0 && i % 3)
			raw_send(fd, (uint16_t)(i % 25), NULL, 0);
		if (fd >= 0 && (i % 7 || !arg))
			close(fd);
	}
}

START_TEST(a_flood_of_connections_delays_nobody_and_leaves_nothing)
{
	struct process *others[2];

	start_with("--max-clients", "200", "--user-clients", "100");
	for (int i = 0; i < 2; i++) {
		others[i] = process_start(connects_and_goes, i ? &others[0] : NULL);
		process_hear(others[i]);
	}
	if (can_be_others())
		work(KV_SEC / 2);
	for (int i = 0; i < 2; i++)
		process_end(others[i]);
	stop();
}
END_TEST

static void sends_descriptors(struct process *self, void *arg)
{
	int pair[2], fd = raw_hello();

	(void)arg;
	become_stranger();
	process_say(self, 0);
	for (int i = 0; i < 300; i++) {
		/* A file, a socket, and a socket that has itself in its queue. */
		int what = i % 3 ? open("/proc/self/stat", O_RDONLY) : fd;

		if (i % 3 == 2 && !socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) {
			close(what);
			what = pair[0];
			close(pair[1]);
		}
		expect(!raw_send_fds(fd, KV_MSG_PING, NULL, 0, what, 250), "send %d", i);
		expect(raw_receive(fd, NULL), "answer %d", i);
		if (what != fd)
			close(what);
	}
}

START_TEST(descriptors_that_a_client_sends_never_come_in)
{
	struct process *other;
	struct rlimit limit = {64, 64};

	/* So few that one message's would be too many. */
	ck_assert_int_eq(prlimit(getpid(), RLIMIT_NOFILE, NULL, NULL), 0);
	start_with("--max-clients", "100");
	ck_assert_int_eq(prlimit(daemon_worker(), RLIMIT_NOFILE, &limit, NULL), 0);
	other = process_start(sends_descriptors, NULL);
	process_hear(other);
	work(KV_SEC / 4);
	process_end(other);
	stop();
}
END_TEST

static void never_reads(struct process *self, void *arg)
{
	const uint32_t body[] = {KV_STAT_SESSION, 0};
	int fd = raw_hello(), n = 0;

	(void)arg;
	process_say(self, 0);
	while (n < 100000 && !raw_send(fd, KV_MSG_STATS, body, sizeof(body)))
		n++;
	process_say(self, n);
}

START_TEST(a_client_that_does_not_read_is_cut_off)
{
	struct process *other;

	start_with("--max-clients", "100");
	other = process_start(never_reads, NULL);
	process_hear(other);
	work(KV_SEC / 4);
	ck_assert_int_lt(process_hear(other), 100000);
	process_end(other);
	stop();
}
END_TEST

/* ---- sizes and numbers ---- */

static void asks_for_the_impossible(struct process *self, void *arg)
{
	static const struct {
		struct kv_msg_lease lease;
	} leases[] = {{{.n = UINT32_MAX, .extra = UINT32_MAX, .timeout_ns = INT64_MAX}},
		      {{.n = UINT32_MAX, .timeout_ns = INT64_MIN}},
		      {{.n = INT32_MAX, .extra = 1, .timeout_ns = -1}},
		      {{.n = 0, .extra = UINT32_MAX, .timeout_ns = INT64_MAX}}};
	static char large[KV_WIRE_MAX];
	const uint32_t gpus[][2] = {{1, 0}, {UINT32_MAX, 0}, {0, 2}, {0, UINT32_MAX}};
	int fd = raw_hello();

	(void)self;
	(void)arg;
	expect(raw_is_error(raw_open(fd, "x", 1, NULL), -EINVAL, "max_bytes: 1 given"), "1 byte");
	expect(raw_open(fd, "absurd", UINT64_MAX, NULL)->type == KV_MSG_POOL_OPENED, "open");
	for (size_t i = 0; i < sizeof(leases) / sizeof(leases[0]); i++) {
		raw_send(fd, KV_MSG_LEASE, (char *)&leases[i].lease + 16,
			 sizeof(leases[i].lease) - 16);
		expect(raw_receive(fd, NULL)->type == KV_MSG_LEASED, "lease %zu", i);
	}
	for (size_t i = 0; i < sizeof(gpus) / sizeof(gpus[0]); i++) {
		raw_send(fd, KV_MSG_ARENA, gpus[i], sizeof(gpus[i]));
		expect(raw_is_error(raw_receive(fd, NULL), -EINVAL, "no device"), "arena %zu", i);
	}
	for (uint16_t type = 0; type < 30; type++) {
		for (size_t size = 0; size < sizeof(large); size = size * 3 + 1) {
			int other = raw_hello();

			raw_send(other, type, large, size);
			close(other);
		}
	}
}

START_TEST(absurd_sizes_and_numbers_are_refused_or_bounded)
{
	struct process *other;

	start_with("--max-clients", "100");
	other = process_start(asks_for_the_impossible, NULL);
	work(KV_SEC / 4);
	process_end(other);
	stop();
}
END_TEST

/* ---- memory that is shared ---- */

static void *map_of(int fd, size_t *ret_size)
{
	struct stat st;
	void *p;

	expect(!fstat(fd, &st), "fstat");
	*ret_size = (size_t)st.st_size;
	p = mmap(NULL, *ret_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	return p == MAP_FAILED ? NULL : p;
}

static void expect_sealed(int fd)
{
	char path[64];
	int again;

	expect(ftruncate(fd, 0) < 0 && ftruncate(fd, (off_t)1 << 40) < 0, "its size can change");
	expect(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) < 0, "it can be sealed");
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	again = open(path, O_RDWR | O_TRUNC);
	expect(again < 0 || !close(again), "close");
}

/* Cuts, seals, punches and scribbles wherever the kernel lets it. */
static void spoils_its_pages(struct process *self, void *arg)
{
	const struct kv_wire_head *answer;
	unsigned seed = 1;
	uint8_t *at[3];
	size_t size[3];
	int fd = raw_hello(), fds[3];

	(void)arg;
	answer = raw_open(fd, "spoiled", 4 << 20, fds);
	expect(answer && answer->type == KV_MSG_POOL_OPENED && fds[2] >= 0, "open");
	raw_send(fd, KV_MSG_LEASE, (const uint64_t[]){100, 0}, 16);
	raw_receive(fd, NULL);
	for (int i = 0; i < 3; i++) {
		expect_sealed(fds[i]);
		at[i] = map_of(fds[i], &size[i]);
	}
	expect(!at[0], "the index can be written");
	expect(write(fds[0], "x", 1) < 0 &&
		       fallocate(fds[0], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) < 0,
	       "the index can be written, not mapped");
	process_say(self, 0);
	for (uint32_t n = 0; n < 200000; n++) {
		int i = 1 + n % 2;
		size_t where =
			(size_t)rand_r(&seed) * 4096u % size[i] + (size_t)rand_r(&seed) % 512;

		if (n % 5000 == 0)
			fallocate(fds[i], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
				  (off_t)size[i]);
		at[i][where % size[i]] = (uint8_t)rand_r(&seed);
		if (n % 100 == 0 && raw_send(fd, n % 200 ? KV_MSG_KICK : KV_MSG_CHECK, NULL, 0) < 0)
			break;
	}
	process_say(self, 0);
	process_wait(self);
}

START_TEST(pages_that_a_client_spoils_cost_its_pool_and_no_other)
{
	struct process *other;

	start_with("--max-clients", "100");
	other = process_start(spoils_its_pages, NULL);
	process_hear(other);
	for (int i = 0; i < 20; i++) {
		kv_block_id more[50];

		must(kv_blocks_take(pool, 50, more, TIMEOUT));
		must(kv_blocks_give(pool, 50, more));
		must(kv_ping(client, TIMEOUT));
		sleep_ms(5);
	}
	process_hear(other);
	process_kill(other);
	wait_until(pool_stats(client, "spoiled").n_sessions == 0);
	numbers_add_up(client);
	/* Its mirror is spoiled, which a check says. The pool goes, and with it that. */
	must(kv_pool_drop(client, "spoiled", TIMEOUT));
	stop();
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("integration/hostile");
	TCase *tcase = tcase_create("hostile");

	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, a_user_with_as_many_sessions_as_allowed_is_refused_one_more);
	tcase_add_test(tcase, a_user_with_as_many_pools_as_allowed_makes_no_more_until_one_ends);
	tcase_add_test(tcase, a_user_with_as_many_connections_as_allowed_leaves_room_for_others);
	tcase_add_test(tcase, a_user_can_neither_lease_nor_hold_more_blocks_than_allowed);
	tcase_add_test(tcase, a_user_that_sends_too_much_is_heard_later_and_others_at_once);
	tcase_add_test(tcase, a_user_changes_no_pool_of_another);
	tcase_add_test(tcase, a_flood_of_connections_delays_nobody_and_leaves_nothing);
	tcase_add_test(tcase, descriptors_that_a_client_sends_never_come_in);
	tcase_add_test(tcase, a_client_that_does_not_read_is_cut_off);
	tcase_add_test(tcase, absurd_sizes_and_numbers_are_refused_or_bounded);
	tcase_add_test(tcase, pages_that_a_client_spoils_cost_its_pool_and_no_other);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
