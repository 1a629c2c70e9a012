/* SPDX-License-Identifier: Apache-2.0 */
/* kvcached --access: mistakes in the list, and what it gives to real users of the machine. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/client.h"
#include "tests/support/process.h"
#include "tests/support/raw.h"

#define ALICE	   3001
#define BOB	   3002
#define CAROL	   3003
#define A_GROUP	   4001
#define OTHER_GROUP 4002

static char path[160];
static struct kv_client *client;

static void write_list(const char *text)
{
	FILE *f;

	snprintf(path, sizeof(path), "%s/access", daemon_folder());
	unlink(path);
	f = fopen(path, "w");
	ck_assert_ptr_nonnull(f);
	fputs(text, f);
	fclose(f);
	chmod(path, 0600);
}

static void start(const char *list)
{
	write_list(list);
	chmod(daemon_folder(), 0711);
	daemon_start("--host", "64M", "--access", path, "--socket-mode", "0666", "--log-level", "error");
	client = client_new();
}

static void stop(void)
{
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

static const struct {
	const char *list, *words[2];
} wrong[] = {
	{"open llama alice-whom-nobody-knows\n", {"access:1: user: 'alice-whom", "a name, a number"}},
	{"# fine\n\nopen * @group-that-is-none\n", {"access:3: group: '@group-that", "@NAME or @NUMBER"}},
	{"opens llama 1\n", {"access:1: right: 'opens'", "open, read or admin"}},
	{"open\n", {"access:1: pool: none", "pattern"}},
	{"open llama\n", {"access:1: user: none", "users, @groups or *"}},
	{"open - 1\n", {"access:1: pool: '-'", "only admin"}},
	{"open llama 4294967295\n", {"access:1: user: '4294967295'", "number"}},
	{"read aaaaaaaaaabbbbbbbbbbaaaaaaaaaabbbbbbbbbbaaaaaaaaaabbbbbbbbbbaaaa 1\n",
	 {"access:1: pool: 'aaaa", "at most 63"}},
};

START_TEST(a_mistake_in_the_list_is_named_by_file_line_field_value_and_what_would_be_right)
{
	char text[700];

	write_list(wrong[_i].list);
	ck_assert_int_eq(daemon_refused(text, sizeof(text), "--host", "8M", "--access", path), 1);
	for (int i = 0; i < 2; i++)
		expect(strstr(text, wrong[_i].words[i]), "'%s' says nothing of '%s'", text,
		       wrong[_i].words[i]);
}
END_TEST

START_TEST(a_list_that_everybody_may_write_or_that_is_not_there_is_refused)
{
	char text[700];

	write_list("open * *\n");
	chmod(path, 0666);
	ck_assert_int_eq(daemon_refused(text, sizeof(text), "--host", "8M", "--access", path), 1);
	expect(strstr(text, "chmod o-w"), "%s", text);
	unlink(path);
	ck_assert_int_eq(daemon_refused(text, sizeof(text), "--host", "8M", "--access", path), 1);
	expect(strstr(text, path) && strstr(text, "No such file"), "%s", text);
}
END_TEST

struct attempt {
	uid_t uid;
	gid_t gid;
	const char *pool;
	int open, read, set, restart; /* what the calls give */
};

static int try_open(struct kv_client *own, const char *name, int read_only)
{
	KV_OPTIONS(kv_pool_options, what, .name = name, .model = "small", .layout = small_layout(),
		   .read_only = read_only, .timeout = TIMEOUT);
	struct kv_pool *pool;
	int r = kv_pool_open(own, &what, &pool);

	if (!r)
		kv_pool_close(pool);
	return r;
}

static void tries(struct process *self, void *arg)
{
	const struct attempt *a = arg;
	KV_OPTIONS(kv_pool_limits, limits, .change = KV_LIMIT_WEIGHT, .weight = 2);
	struct kv_msg_trace trace = {.salt = 1};
	const struct kv_wire_head *answer;
	struct kv_session_stats *sessions;
	struct kv_block_stats block;
	struct kv_client *own;
	int32_t *tokens;
	int r, fd;

	process_become(a->uid, a->gid);
	own = client_new();
	r = try_open(own, a->pool, 0);
	expect(r == a->open, "user %u opens '%s': %d (%s)", a->uid, a->pool, r, kv_error_text());
	if (r < 0)
		expect(strstr(kv_error_text(), "/access)"), "%s", kv_error_text());
	r = try_open(own, a->pool, 1);
	expect(r == a->read, "user %u reads '%s': %d (%s)", a->uid, a->pool, r, kv_error_text());
	r = kv_pool_set(own, a->pool, &limits, NULL, TIMEOUT);
	expect(r == a->set, "user %u sets '%s': %d (%s)", a->uid, a->pool, r, kv_error_text());
	/* A program that isn't one: who may restart is told that. */
	r = kv_worker_restart(own, "/dev/null", TIMEOUT);
	expect((r == -EPERM) == (a->restart == -EPERM), "user %u restarts: %d (%s)", a->uid, r,
	       kv_error_text());
	r = kv_block_show(own, a->pool, 1, &block, &sessions, &tokens, TIMEOUT);
	expect(r == a->read, "user %u is shown a block of '%s': %d (%s)", a->uid, a->pool, r, kv_error_text());
	if (!r) {
		free(sessions);
		free(tokens);
	}
	fd = raw_hello();
	raw_send(fd, KV_MSG_TRACE, (char *)&trace + sizeof(trace.head), sizeof(trace) - sizeof(trace.head));
	answer = raw_receive(fd, NULL);
	expect(a->restart == -EPERM ? raw_is_error(answer, -EPERM, "may not record") : answer->type == KV_MSG_OK,
	       "user %u records what others ask for", a->uid);
	close(fd);
	kv_disconnect(own);
	process_say(self, 0);
}

static const char list[] = "# who may do what\n"
			   "open  llama-*  3001 @4001\n"
			   "read  *        3002   # looks at all\n"
			   "admin llama-7b @4002\n"
			   "admin -        @4002\n";

static struct attempt attempts[] = {
	{ALICE, 1, "llama-7b", 0, 0, -EPERM, -EPERM},
	{ALICE, 1, "qwen", -EACCES, -EACCES, -EPERM, -EPERM},
	{BOB, 1, "llama-7b", -EACCES, 0, -EPERM, -EPERM},
	{BOB, 1, "qwen", -EACCES, 0, -EPERM, -EPERM},
	{CAROL, 1, "llama-7b", -EACCES, -EACCES, -EPERM, -EPERM},
	{CAROL, A_GROUP, "llama-7b", 0, 0, -EPERM, -EPERM},
	{CAROL, OTHER_GROUP, "llama-7b", -EACCES, -EACCES, 0, 0},
	{0, 0, "qwen", 0, 0, 0, 0},
};

START_TEST(users_and_groups_may_what_the_list_says_and_nothing_else)
{
	struct kv_pool *pools[2];
	struct process *p;

	start(list);
	pools[0] = pool_new(client, "llama-7b", 0);
	pools[1] = pool_new(client, "qwen", 0);
	p = process_start(tries, &attempts[_i]);
	process_hear(p);
	process_end(p);
	kv_pool_close(pools[0]);
	kv_pool_close(pools[1]);
	stop();
}
END_TEST

START_TEST(a_list_that_changes_counts_from_the_next_request_on_and_one_with_a_mistake_does_not)
{
	static struct attempt in = {CAROL, 1, "qwen", 0, 0, -EPERM, -EPERM};
	static struct attempt out = {CAROL, 1, "qwen", -EACCES, -EACCES, -EPERM, -EPERM};
	static const struct {
		const char *list;
		struct attempt *then;
	} steps[] = {{"open * 3001\n", &out}, {"open * 3003\n", &in}, {"open * nobody-knows-this\n", &in},
		     {"", &out}};
	struct kv_pool *pool;

	start(steps[0].list);
	pool = pool_new(client, "qwen", 0);
	for (int i = 0; i < 4; i++) {
		struct process *p;

		write_list(steps[i].list);
		p = process_start(tries, steps[i].then);
		process_hear(p);
		process_end(p);
	}
	/* A worker that begins with a mistake lets nobody in, and serves. */
	write_list("open * nobody-knows-this\n");
	daemon_kill_worker();
	must(kv_ping(client, TIMEOUT));
	for (int i = 0; i < 2; i++) {
		struct process *p = process_start(tries, i ? &in : &out);

		process_hear(p);
		process_end(p);
		write_list("open * 3003\n");
	}
	kv_pool_close(pool);
	stop();
}
END_TEST

static void reads(struct process *self, void *arg)
{
	KV_OPTIONS(kv_pool_options, what, .name = "pool", .model = "small", .read_only = 1, .mapped = 1,
		   .timeout = TIMEOUT);
	kv_block_id ids[8];
	uint64_t words[8];
	struct kv_client *own;
	struct kv_pool *pool;
	struct kv_seq *seq;
	char maps[400];
	bool may_write = false;
	FILE *f;

	(void)arg;
	process_become(BOB, 1);
	own = client_new();
	must(kv_pool_open(own, &what, &pool));
	ck_assert_int_eq(kv_pool_peek(pool, tokens_of(1, 100), 100, ids, words, 8), 4);
	for (int i = 0; i < 4; i++)
		ck_assert(block_is(pool, ids[i], 0x51));
	ck_assert_uint_eq(kv_pool_peeked(pool, ids, words, 4), 4);
	refused(kv_blocks_take(pool, 1, ids + 4, TIMEOUT), -EACCES, "read_only");
	refused(kv_blocks_give(pool, 1, ids), -EACCES, "read_only");
	refused(kv_seq_new(pool, &seq), -EACCES, "read_only");
	/* Of what it has mapped of the pool it may write its own session's pages alone. */
	f = fopen("/proc/self/maps", "r");
	while (fgets(maps, sizeof(maps), f))
		may_write |= strstr(maps, " rw-s ") && strstr(maps, "kvcached-") &&
			     !strstr(maps, "kvcached-session");
	fclose(f);
	ck_assert(!may_write);
	process_say(self, 0);
	process_wait(self);
	/* They are gone meanwhile. */
	ck_assert_uint_eq(kv_pool_peeked(pool, ids, words, 4), 0);
	ck_assert_int_eq(kv_pool_peek(pool, tokens_of(1, 100), 100, ids, words, 8), 0);
	kv_pool_close(pool);
	kv_disconnect(own);
}

START_TEST(who_only_reads_sees_what_is_cached_and_can_change_nothing)
{
	struct kv_session_stats session;
	struct kv_pool *pool;
	struct process *p;
	struct kv_seq *seq;
	const kv_block_id *blocks;

	if (_i)
		setenv("KV_TEST_ISOLATE", "1", 1);
	start("read pool 3002\n");
	pool = pool_new_mapped(client, "pool", 0);
	seq = seq_published(client, pool, 1, 4 * BLOCK_TOKENS);
	kv_seq_blocks(seq, &blocks);
	for (int i = 0; i < 4; i++)
		block_fill(pool, blocks[i], 0x51);
	p = process_start(reads, NULL);
	process_hear(p);
	ck_assert(session_stats(client, p->pid, &session));
	ck_assert_str_eq(session.state, "reads");
	kv_seq_free(seq, NULL);
	must(kv_pool_drop(client, "pool", TIMEOUT));
	process_go(p);
	process_end(p);
	kv_pool_close(pool);
	stop();
}
END_TEST

/* What the library doesn't do: descriptors and messages by hand. */
static void breaks_out(struct process *self, void *arg)
{
	struct kv_msg_lease lease = {.n = 1};
	const struct kv_wire_head *answer;
	struct kv_msg_arena arena = {.gpu = 0};
	int fd, fds[3], r;

	(void)arg;
	process_become(BOB, 1);
	fd = raw_hello();
	raw_send(fd, KV_MSG_ARENA, (char *)&arena + sizeof(arena.head),
		 sizeof(arena) - sizeof(arena.head));
	ck_assert(raw_is_error(raw_receive(fd, fds), -EACCES, "opened a pool"));
	ck_assert(raw_is_error(raw_open(fd, "pool", 0, fds), -EACCES, "only read it"));
	ck_assert_uint_eq(raw_open_read(fd, "pool", fds)->type, KV_MSG_POOL_OPENED);
	for (int i = 0; i < 2; i++) {
		char own[40];

		expect(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fds[i], 0) == MAP_FAILED,
		       "descriptor %d can be mapped for writing", i);
		snprintf(own, sizeof(own), "/proc/self/fd/%d", fds[i]);
		r = open(own, O_RDWR);
		expect(r < 0 && errno == EACCES, "descriptor %d can be opened for writing", i);
		expect(fchmod(fds[i], 0666) < 0, "descriptor %d can be given another mode", i);
	}
	raw_send(fd, KV_MSG_ARENA, (char *)&arena + sizeof(arena.head),
		 sizeof(arena) - sizeof(arena.head));
	answer = raw_receive(fd, fds);
	ck_assert_uint_eq(answer->type, KV_MSG_ARENA_PART);
	expect(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0) == MAP_FAILED,
	       "the arena can be mapped for writing");
	expect(mmap(NULL, 4096, PROT_READ, MAP_SHARED, fds[0], 0) != MAP_FAILED,
	       "the arena can't be mapped");
	raw_send(fd, KV_MSG_LEASE, (char *)&lease + sizeof(lease.head),
		 sizeof(lease) - sizeof(lease.head));
	ck_assert(raw_is_error(raw_receive(fd, fds), -EACCES, "open for reading"));
	process_say(self, 0);
}

START_TEST(who_may_only_read_gets_no_descriptor_that_writes)
{
	struct kv_pool *pool;
	struct process *p;

	start("read pool 3002\n");
	pool = pool_new_mapped(client, "pool", 0);
	p = process_start(breaks_out, NULL);
	process_hear(p);
	process_end(p);
	kv_pool_close(pool);
	stop();
}
END_TEST

START_TEST(the_socket_belongs_to_the_group_that_is_said)
{
	char text[600];
	struct stat st;

	daemon_start("--host", "8M", "--socket-mode", "0620", "--socket-group", "4001");
	ck_assert_int_eq(stat(daemon_socket(), &st), 0);
	ck_assert_uint_eq(st.st_gid, A_GROUP);
	ck_assert_uint_eq(st.st_mode & 0777, 0620);
	daemon_stop();
	ck_assert_int_eq(daemon_refused(text, sizeof(text), "--host", "8M", "--socket-group", "no-such"), 1);
	expect(strstr(text, "--socket-group: 'no-such'"), "%s", text);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("client/access");
	TCase *tcase = tcase_create("access");

	if (geteuid()) {
		fprintf(stderr, "skipped: becoming other users takes root\n");
		return 77;
	}
	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(
		tcase, a_mistake_in_the_list_is_named_by_file_line_field_value_and_what_would_be_right, 0,
		sizeof(wrong) / sizeof(wrong[0]));
	tcase_add_test(tcase, a_list_that_everybody_may_write_or_that_is_not_there_is_refused);
	tcase_add_loop_test(tcase, users_and_groups_may_what_the_list_says_and_nothing_else, 0,
			    sizeof(attempts) / sizeof(attempts[0]));
	tcase_add_test(
		tcase, a_list_that_changes_counts_from_the_next_request_on_and_one_with_a_mistake_does_not);
	tcase_add_loop_test(tcase, who_only_reads_sees_what_is_cached_and_can_change_nothing, 0, 2);
	tcase_add_test(tcase, who_may_only_read_gets_no_descriptor_that_writes);
	tcase_add_test(tcase, the_socket_belongs_to_the_group_that_is_said);
	suite_add_tcase(s, tcase);
	return daemon_run_tests(s);
}
