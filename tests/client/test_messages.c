/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages that the library never sends, answered as include/internal/wire.h has it: what can be said to be wrong
 * is said, and the connection goes on; who breaks the protocol is hung up on, and nobody else notices.
 */
#include <errno.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tests/support/client.h"
#include "tests/support/raw.h"

#define MIB ((uint64_t)1 << 20)

static struct kv_client *client;
static struct kv_pool *pool;

static void begin(const char *isolate)
{
	daemon_start("--host", "64M", "--log-level", "error", isolate);
	client = client_new();
	pool = pool_new_mapped(client, "honest", 0);
}

static void setup(void)
{
	begin(NULL);
}

static void setup_isolated(void)
{
	begin("--isolate");
}

/* Sessions that were hung up on stay as long as this process lives: the books say so, and balance. */
static void teardown(void)
{
	kv_pool_close(pool);
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

#define send_body(fd, type, msg) \
	raw_send(fd, type, (const char *)&(msg) + sizeof((msg).head), sizeof(msg) - sizeof((msg).head))

static void is_refused(int fd, int error, const char *words)
{
	const struct kv_wire_head *answer = raw_receive(fd, NULL);

	expect(raw_is_error(answer, error, words), "answer %d, '%s', for '%s' was expected",
	       answer ? answer->type : 0,
	       answer && answer->type == KV_MSG_ERROR ? ((const struct kv_msg_error *)answer)->text : "", words);
}

static void is_answered(int fd, uint16_t type)
{
	const struct kv_wire_head *answer = raw_receive(fd, NULL);

	expect(answer && answer->type == type, "answer %d, %d was expected: %s", answer ? answer->type : 0, type,
	       answer && answer->type == KV_MSG_ERROR ? ((const struct kv_msg_error *)answer)->text : "");
}

static void goes_on(int fd)
{
	raw_send(fd, KV_MSG_PING, NULL, 0);
	is_answered(fd, KV_MSG_OK);
}

static int open_session(const char *name)
{
	int fd = raw_hello();
	const struct kv_wire_head *answer = raw_open(fd, name, 4 * MIB, NULL);

	expect(answer && answer->type == KV_MSG_POOL_OPENED, "no session of '%s'", name);
	return fd;
}

/* ---- names ---- */

START_TEST(a_name_that_does_not_end_is_refused_whichever_message_it_comes_in)
{
	static const struct {
		uint16_t type;
		size_t size; /* behind the head */
		const char *words;
	} messages[] = {
		{KV_MSG_POOL_DROP, sizeof(struct kv_msg_drop), "pool name must be shorter than 64 bytes"},
		{KV_MSG_POOL_EPOCH, sizeof(struct kv_msg_drop), "pool name must be shorter than 64 bytes"},
		{KV_MSG_POOL_COMPACT, sizeof(struct kv_msg_compact), "pool name must be shorter than 64 bytes"},
		{KV_MSG_POOL_SET, sizeof(struct kv_msg_pool_set), "pool name must be shorter than 64 bytes"},
		{KV_MSG_BLOCK, sizeof(struct kv_msg_block), "pool name must be shorter than 64 bytes"},
		{KV_MSG_TRACE, sizeof(struct kv_msg_trace), "pool name must be shorter than 64 bytes"},
		{KV_MSG_HELLO, sizeof(struct kv_msg_hello), "name and version must end"},
		{KV_MSG_RESTART, sizeof(struct kv_msg_restart), "shorter than 4096 bytes"},
	};
	static char xs[KV_PATH_MAX];
	int fd = raw_hello();

	memset(xs, 'x', sizeof(xs));
	for (size_t i = 0; i < sizeof(messages) / sizeof(messages[0]); i++) {
		raw_send(fd, messages[i].type, xs, messages[i].size - sizeof(struct kv_wire_head));
		is_refused(fd, -EINVAL, messages[i].words);
		goes_on(fd);
	}
	close(fd);
}
END_TEST

START_TEST(a_pool_is_opened_by_names_that_end_and_by_one_at_least)
{
	struct kv_msg_pool_open msg = {.name = "n", .model = "m", .gpu_mask = 1};
	char *const names[] = {msg.name, msg.model, msg.revision, msg.name_space};
	int fd = raw_hello();

	for (int i = 0; i < 4; i++) {
		char before = names[i][0];

		memset(names[i], 'x', KV_NAME_MAX);
		send_body(fd, KV_MSG_POOL_OPEN, msg);
		is_refused(fd, -EINVAL, "name, model, revision and name_space must be shorter");
		memset(names[i], 0, KV_NAME_MAX);
		names[i][0] = before;
	}
	msg.name[0] = 0;
	send_body(fd, KV_MSG_POOL_OPEN, msg);
	is_refused(fd, -EINVAL, "name: empty");
	msg.name[0] = 'n';
	msg.gpu_mask = 2;
	send_body(fd, KV_MSG_POOL_OPEN, msg);
	is_refused(fd, -EINVAL, "gpu_mask 0x2 given; this daemon has devices of mask 0x1");
	msg.gpu_mask = 1;
	msg.n_components = 1;
	send_body(fd, KV_MSG_POOL_OPEN, msg);
	is_refused(fd, -EINVAL, "n_components and the size of the message disagree");
	close(fd);
}
END_TEST

/* ---- at the wrong moment ---- */

START_TEST(a_connection_has_one_pool_and_takes_up_no_other)
{
	const struct kv_msg_resume resume = {.pool_id = 1, .session_id = 1};
	int fd = open_session("first");

	ck_assert(raw_is_error(raw_open(fd, "second", 4 * MIB, NULL), -EINVAL, "has a pool open already"));
	ck_assert_uint_eq(pool_stats(client, "first").n_sessions, 1);
	send_body(fd, KV_MSG_RESUME, resume);
	is_refused(fd, -EINVAL, "has a pool open already");
	goes_on(fd);
	close(fd);
}
END_TEST

START_TEST(what_takes_a_session_is_refused_without_one)
{
	static const struct {
		uint16_t type;
		size_t size;
	} messages[] = {
		{KV_MSG_POOL_CLOSE, sizeof(struct kv_msg_plain)}, {KV_MSG_POOL_LAYOUT, sizeof(struct kv_msg_plain)},
		{KV_MSG_GRANULES, sizeof(struct kv_msg_granules)}, {KV_MSG_LEASE, sizeof(struct kv_msg_lease)},
		{KV_MSG_WANT, sizeof(struct kv_msg_lease)},	  {KV_MSG_KICK, sizeof(struct kv_msg_plain)},
		{KV_MSG_TRACED, sizeof(struct kv_msg_traced)},
	};
	static const char zeros[2000];
	int fd = raw_hello();

	for (size_t i = 0; i < sizeof(messages) / sizeof(messages[0]); i++) {
		raw_send(fd, messages[i].type, zeros, messages[i].size - sizeof(struct kv_wire_head));
		is_refused(fd, -EINVAL, "no pool is open on this connection");
		goes_on(fd);
	}
	close(fd);
}
END_TEST

/* As one whose deadline passed while the daemon stood still: nobody waits for the first any more. */
START_TEST(a_request_for_a_lease_takes_the_place_of_one_that_waits)
{
	const struct kv_msg_lease one = {.n = 1, .timeout_ns = TIMEOUT};
	struct kv_msg_lease all = {.timeout_ns = TIMEOUT};
	const struct kv_msg_leased *answer;
	int fd = raw_hello();

	all.n = (uint32_t)((const struct kv_msg_pool_opened *)raw_open(fd, "full", 4 * MIB, NULL))->max_blocks;
	send_body(fd, KV_MSG_LEASE, all);
	answer = (const void *)raw_receive(fd, NULL);
	ck_assert_uint_eq(answer->head.type, KV_MSG_LEASED);
	ck_assert_int_eq(answer->answer, 0);
	ck_assert_uint_eq(answer->n, all.n);
	send_body(fd, KV_MSG_LEASE, one);
	for (int i = 0; i < 3; i++) {
		goes_on(fd);
		send_body(fd, KV_MSG_LEASE, one);
		answer = (const void *)raw_receive(fd, NULL);
		ck_assert_uint_eq(answer->head.type, KV_MSG_LEASED);
		ck_assert_int_eq(answer->answer, KV_NO_ROOM);
		ck_assert_uint_eq(answer->n, 0);
	}
	close(fd);
}
END_TEST

START_TEST(granules_of_a_daemon_that_has_none_and_arenas_that_are_not_there_are_refused)
{
	static const struct kv_msg_granules granules = {.n = 1};
	static const struct kv_msg_arena arenas[] = {{.gpu = 1}, {.first_fd = 2}, {.first_fd = UINT32_MAX}};
	int fd = open_session("whole");

	send_body(fd, KV_MSG_GRANULES, granules);
	is_refused(fd, -ENOTSUP, "hands out whole arenas");
	for (int i = 0; i < 3; i++) {
		send_body(fd, KV_MSG_ARENA, arenas[i]);
		is_refused(fd, -EINVAL, "no device");
	}
	goes_on(fd);
	close(fd);
}
END_TEST

/* ---- descriptors that the daemon hasn't got ---- */

static rlim_t open_at_most(rlim_t n)
{
	struct rlimit old, limit;

	ck_assert_int_eq(prlimit(daemon_worker(), RLIMIT_NOFILE, NULL, &old), 0);
	limit = (struct rlimit){n, old.rlim_max};
	ck_assert_int_eq(prlimit(daemon_worker(), RLIMIT_NOFILE, &limit, NULL), 0);
	return old.rlim_cur;
}

/* Memory is opened anew for who only reads it, which may fail: with a word, and without a half of it. */
START_TEST(memory_for_reading_that_can_not_be_opened_is_refused_until_it_can)
{
	static const struct kv_msg_granules granules = {.n = 3, .index = {0, 1, 2}};
	static const struct kv_msg_arena arena = {.gpu = 0};
	uint16_t ask = _i ? KV_MSG_GRANULES : KV_MSG_ARENA;
	kv_block_id ids[2500];
	int fd = raw_hello(), fds[3];
	rlim_t before;

	must(kv_blocks_take(pool, 2500, ids, TIMEOUT));
	ck_assert_uint_eq(raw_open_read(fd, "honest", fds)->type, KV_MSG_POOL_OPENED);
	for (int i = 0; i < 3; i++)
		close(fds[i]);
	before = open_at_most(3);
	if (_i)
		send_body(fd, ask, granules);
	else
		send_body(fd, ask, arena);
	is_refused(fd, -EMFILE, "memory for reading: Too many open files");
	goes_on(fd);
	open_at_most(before);
	if (_i)
		send_body(fd, ask, granules);
	else
		send_body(fd, ask, arena);
	ck_assert_uint_eq(raw_receive(fd, fds)->type, _i ? KV_MSG_GRANULES_PART : KV_MSG_ARENA_PART);
	for (int i = 0; i < 1 + 2 * _i; i++) {
		expect(fds[i] >= 0 && write(fds[i], "x", 1) < 0, "memory %d can be written", i);
		close(fds[i]);
	}
	close(fd);
	must(kv_blocks_give(pool, 2500, ids));
}
END_TEST

/* ---- recording ---- */

static int start_trace(const char *name, uint64_t salt)
{
	struct kv_msg_trace msg = {.salt = salt};
	int fd = raw_hello();

	strncpy(msg.pool, name, sizeof(msg.pool) - 1);
	send_body(fd, KV_MSG_TRACE, msg);
	return fd;
}

static void tell(int fd, uint64_t number, uint64_t n_input, uint64_t n_hit, uint32_t n_keys, uint32_t n_sent)
{
	static uint64_t body[KV_WIRE_MAX / sizeof(uint64_t)];
	struct kv_msg_traced msg = {
		.start_ns = 5, .number = number, .n_input = n_input, .n_hit = n_hit, .n_keys = n_keys};
	const size_t size = sizeof(msg) - sizeof(msg.head);
	struct kv_trace_key *keys = (void *)((char *)body + size);

	memcpy(body, (char *)&msg + sizeof(msg.head), size);
	for (uint32_t i = 0; i < n_sent; i++)
		keys[i] = (struct kv_trace_key){i + 1, 0};
	raw_send(fd, KV_MSG_TRACED, body, size + n_sent * sizeof(keys[0]));
}

static const struct kv_msg_trace_part *next_part(int fd)
{
	const struct kv_wire_head *answer;

	raw_send(fd, KV_MSG_TRACE_NEXT, NULL, 0);
	answer = raw_receive(fd, NULL);
	expect(answer && answer->type == KV_MSG_TRACE_PART, "no part of the recording");
	return (const void *)answer;
}

START_TEST(one_records_at_a_time_and_only_who_records_is_told)
{
	int first = start_trace("honest", 7), other, session;
	const struct kv_msg_trace_part *part;
	const struct kv_trace_record *r;

	is_answered(first, KV_MSG_OK);
	other = start_trace("", 7);
	is_refused(other, -EBUSY, "records already");
	raw_send(other, KV_MSG_TRACE_NEXT, NULL, 0);
	is_refused(other, -ENOENT, "this connection doesn't record");
	close(other);
	other = start_trace("nobody's", 7);
	is_refused(other, -ENOENT, "there is no 'nobody's'");
	close(other);
	other = start_trace("", 0);
	is_refused(other, -EINVAL, "salt: 0 given");

	session = raw_hello();
	ck_assert_uint_eq(raw_open(session, "honest", 0, NULL)->type, KV_MSG_POOL_OPENED);
	tell(session, 1, 1500, 512, 3, 3);
	tell(session, 2, 0, 0, 0, 0);
	tell(session, 4, 512, 0, 1, 1);
	goes_on(session);
	part = next_part(first);
	ck_assert_uint_eq(part->n, 3);
	ck_assert_uint_eq(part->more, 0);
	ck_assert_uint_eq(part->n_lost, 0);
	r = (const void *)part->items;
	ck_assert_uint_eq(r->n_input, 1500);
	ck_assert_uint_eq(r->n_hit, 512);
	ck_assert_uint_eq(r->n_keys, 3);
	ck_assert_uint_eq(((const struct kv_trace_key *)(r + 1))[2].lo, 3);
	r = (const void *)((const struct kv_trace_key *)(r + 1) + 3);
	ck_assert_uint_eq(r->number, 2);
	ck_assert_uint_eq((r + 1)->number, 4);
	ck_assert_uint_eq(next_part(first)->n, 0);
	/* It ends with its connection: another may. */
	close(first);
	close(other);
	wait_until((other = start_trace("", 9), raw_receive(other, NULL)->type == KV_MSG_OK || close(other)));
	close(other);
	close(session);
}
END_TEST

/* The longest that fits a part comes; one token more would be in the way of all after it. */
START_TEST(a_request_too_long_for_one_part_does_not_stop_a_recording)
{
	int recorder = start_trace("", 7), session = open_session("long");
	const uint32_t most = KV_TRACE_KEYS;
	const struct kv_msg_trace_part *part;

	is_answered(recorder, KV_MSG_OK);
	tell(session, 1, (uint64_t)most * KV_TRACE_TOKENS, 0, most, most);
	tell(session, 2, 1, 0, 1, 1);
	goes_on(session);
	part = next_part(recorder);
	ck_assert_uint_eq(part->n, 1);
	ck_assert_uint_eq(part->more, 1);
	part = next_part(recorder);
	ck_assert_uint_eq(part->n, 1);
	ck_assert_uint_eq(part->more, 0);
	tell(session, 3, (uint64_t)most * KV_TRACE_TOKENS + 1, 0, most + 1, most + 1);
	ck_assert_ptr_null(raw_receive(session, NULL));
	part = next_part(recorder);
	ck_assert_uint_eq(part->n, 0);
	ck_assert_uint_eq(part->more, 0);
	close(session);
	close(recorder);
}
END_TEST

START_TEST(who_tells_of_a_request_that_can_not_be_is_hung_up_on)
{
	static const struct {
		uint64_t n_input, n_hit;
		uint32_t n_keys, n_sent;
	} wrong[] = {{1024, 0, 3, 3}, {1024, 0, 2, 1}, {1024, 0, 1, 2}, {1024, 1025, 2, 2}, {UINT64_MAX, 0, UINT32_MAX, 0}};
	int recorder = start_trace("", 7);

	is_answered(recorder, KV_MSG_OK);
	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
		int fd = open_session("lies");

		tell(fd, 1, wrong[i].n_input, wrong[i].n_hit, wrong[i].n_keys, wrong[i].n_sent);
		expect(!raw_receive(fd, NULL), "request %zu was taken", i);
		close(fd);
		ck_assert_uint_eq(next_part(recorder)->n, 0);
	}
	close(recorder);
}
END_TEST

/* More than the daemon keeps for a recorder that doesn't come: it counts what it loses. */
START_TEST(what_a_recorder_does_not_fetch_is_counted_as_lost)
{
	int recorder = start_trace("", 7), session = open_session("much");
	const struct kv_msg_trace_part *part;
	uint64_t n = 0, n_lost = 0;

	is_answered(recorder, KV_MSG_OK);
	for (uint32_t i = 0; i < 200; i++) {
		tell(session, i + 1, 4000u * KV_TRACE_TOKENS, 0, 4000, 4000);
		goes_on(session);
	}
	do {
		part = next_part(recorder);
		n += part->n;
		n_lost = part->n_lost;
	} while (part->more);
	ck_assert_uint_ge(n, 100);
	ck_assert_uint_eq(n + n_lost, 200);
	tell(session, 201, 1, 0, 1, 1);
	goes_on(session);
	ck_assert_uint_eq(next_part(recorder)->n, 1);
	close(session);
	close(recorder);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("client/messages");
	TCase *tcase = tcase_create("messages"), *isolated = tcase_create("isolated");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, a_name_that_does_not_end_is_refused_whichever_message_it_comes_in);
	tcase_add_test(tcase, a_pool_is_opened_by_names_that_end_and_by_one_at_least);
	tcase_add_test(tcase, a_connection_has_one_pool_and_takes_up_no_other);
	tcase_add_test(tcase, what_takes_a_session_is_refused_without_one);
	tcase_add_test(tcase, a_request_for_a_lease_takes_the_place_of_one_that_waits);
	tcase_add_test(tcase, granules_of_a_daemon_that_has_none_and_arenas_that_are_not_there_are_refused);
	tcase_add_loop_test(tcase, memory_for_reading_that_can_not_be_opened_is_refused_until_it_can, 0, 1);
	tcase_add_test(tcase, one_records_at_a_time_and_only_who_records_is_told);
	tcase_add_test(tcase, a_request_too_long_for_one_part_does_not_stop_a_recording);
	tcase_add_test(tcase, who_tells_of_a_request_that_can_not_be_is_hung_up_on);
	tcase_add_test(tcase, what_a_recorder_does_not_fetch_is_counted_as_lost);
	suite_add_tcase(s, tcase);
	tcase_set_timeout(isolated, 60);
	tcase_add_checked_fixture(isolated, setup_isolated, teardown);
	tcase_add_loop_test(isolated, memory_for_reading_that_can_not_be_opened_is_refused_until_it_can, 1, 2);
	suite_add_tcase(s, isolated);
	return daemon_run_tests(s);
}
