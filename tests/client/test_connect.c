/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the daemon, starting it, and every way in which that is refused. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/support/client.h"
#include "tests/support/process.h"

static int connect_to(const char *socket, int64_t timeout, struct kv_client **ret)
{
	KV_OPTIONS(kv_connect_options, how, .socket = socket, .name = "test", .timeout = timeout);

	return kv_connect(&how, ret);
}

/* ---- where the daemon is ---- */

START_TEST(no_daemon_is_said_at_once_with_the_name_of_the_socket)
{
	int64_t start = now_ns();
	struct kv_client *client = NULL;

	refused(connect_to(daemon_socket(), TIMEOUT, &client), -ENOENT, daemon_socket());
	refused(kv_connect(NULL, &client), -ENOENT, daemon_socket()); /* $KVCACHED_SOCKET */

	/* One that was killed leaves its socket file. */
	daemon_start("--host", "8M");
	daemon_kill();
	wait_until(connect_to(daemon_socket(), TIMEOUT, &client) == -ECONNREFUSED);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), daemon_socket()));
	ck_assert_ptr_null(client);
	ck_assert_int_lt(now_ns() - start, 10 * KV_SEC);
	ck_assert_int_eq(unlink(daemon_socket()), 0);
}
END_TEST

START_TEST(a_path_that_is_no_socket_of_ours_is_refused)
{
	char longer[300];
	struct kv_client *client;

	memset(longer, 'x', sizeof(longer));
	longer[299] = 0;
	refused(connect_to(longer, TIMEOUT, &client), -ENAMETOOLONG, "xxx");
	refused(connect_to("/dev/null", TIMEOUT, &client), -ECONNREFUSED, "/dev/null");
	refused(connect_to("/dev/null/x", TIMEOUT, &client), -ENOTDIR, "/dev/null/x");
}
END_TEST

/* A server that accepts and does as told by @arg. */
enum { SILENT, CLOSES, GARBAGE, NEWER };

static void fake_daemon(struct process *self, void *arg)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0), peer;
	char message[8192];

	strcpy(address.sun_path, daemon_socket());
	if (bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(fd, 8) < 0)
		_exit(1);
	process_say(self, 0);
	peer = accept(fd, NULL, NULL);
	if (recv(peer, message, sizeof(message), 0) < 0)
		_exit(1);
	memset(message, 'z', sizeof(message));
	if (*(int *)arg == NEWER)
		/* magic, version 9, type WELCOME, 0; size 16; tag 1 */
		memcpy(message, "VK\x09\0\x04\0\0\0\x10\0\0\0\x01\0\0\0", 16);
	if (*(int *)arg >= GARBAGE)
		send(peer, message, *(int *)arg == NEWER ? 16 : 700, 0);
	/* Who is hung up on says hello three times in all: a worker may have died. */
	for (int i = 0; *(int *)arg == CLOSES && i < 3; i++) {
		close(peer);
		if (i < 2)
			peer = accept(fd, NULL, NULL);
	}
	process_wait(self);
	unlink(daemon_socket());
}

START_TEST(what_answers_and_is_not_our_daemon_is_found_out)
{
	static const struct {
		int kind, error;
		const char *words;
	} cases[] = {{SILENT, -ETIMEDOUT, "no answer"},
		     {CLOSES, -ECONNRESET, "closed"},
		     {GARBAGE, -EPROTO, "not kvcached"},
		     {NEWER, -EPROTO, "version 9"}};
	int kind = cases[_i].kind;
	struct process *server = process_start(fake_daemon, &kind);
	struct kv_client *client = NULL;
	int64_t start = now_ns();

	process_hear(server);
	refused(connect_to(daemon_socket(), 200 * KV_MSEC, &client), cases[_i].error,
		cases[_i].words);
	ck_assert_ptr_null(client);
	ck_assert_int_lt(now_ns() - start, 5 * KV_SEC);
	process_go(server);
	process_end(server);
}
END_TEST

/* ---- the daemon's side of it ---- */

static int raw_connect(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct timeval limit = {.tv_sec = DEADLINE_MS / 1000};
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	strcpy(address.sun_path, daemon_socket());
	ck_assert_int_eq(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	return fd;
}

/* magic, version, type, 0, size, tag */
static void put_head(unsigned char *message, uint16_t version, uint16_t type, uint32_t size)
{
	const uint16_t words[] = {0x4b56, version, type, 0};
	const uint32_t tag = 7;

	memcpy(message, words, 8);
	memcpy(message + 8, &size, 4);
	memcpy(message + 12, &tag, 4);
}

#define HELLO_BYTES (16 + 64 + 16)

START_TEST(a_client_of_another_version_is_told_both_and_disconnected)
{
	unsigned char message[4096] = {0};
	int32_t error;
	int fd;

	daemon_start("--host", "8M");
	fd = raw_connect();
	put_head(message, 9, 3, HELLO_BYTES);
	ck_assert_int_eq(send(fd, message, HELLO_BYTES, 0), HELLO_BYTES);
	ck_assert_int_gt(recv(fd, message, sizeof(message), 0), 20);
	memcpy(&error, message + 16, 4);
	ck_assert_int_eq(error, -EPROTO);
	ck_assert_ptr_nonnull(strstr((char *)message + 20, "version 1 "));
	ck_assert_ptr_nonnull(strstr((char *)message + 20, "version 9"));
	ck_assert_int_eq(recv(fd, message, sizeof(message), 0), 0);
	close(fd);
	daemon_stop();
}
END_TEST

START_TEST(messages_that_make_no_sense_cost_their_sender_its_connection_and_nobody_else)
{
	struct kv_client *client;
	struct kv_pool *pool;
	kv_block_id id;
	uint32_t n_fds;

	daemon_start("--host", "8M", "--log-level", "error");
	client = client_new();
	pool = pool_new(client, "neighbour", 0);
	must(kv_blocks_take(pool, 1, &id, TIMEOUT));
	n_fds = daemon_fds();
	for (unsigned seed = 0; seed < 600; seed++) {
		unsigned char message[4096] = {0};
		int fd = raw_connect();
		uint32_t size = (uint32_t)rand_r(&(unsigned){seed}) % 1500;
		unsigned state = seed * 31 + 1;

		/* Half of them greet first; a third have a right head; types 0..24. */
		if (seed % 2) {
			put_head(message, 1, 3, HELLO_BYTES);
			memset(message + 16, 0, HELLO_BYTES - 16);
			expect(send(fd, message, HELLO_BYTES, 0) == HELLO_BYTES, "hello");
		}
		for (uint32_t i = 0; i < sizeof(message); i++)
			message[i] = (unsigned char)rand_r(&state);
		if (seed % 3)
			put_head(message, 1, (uint16_t)(seed % 25), size < 16 ? 16 : size);
		send(fd, message, size, MSG_NOSIGNAL);
		if (seed % 5 == 0)
			recv(fd, message, sizeof(message), MSG_DONTWAIT);
		close(fd);
	}
	must(kv_ping(client, TIMEOUT));
	must(kv_blocks_give(pool, 1, &id));
	books_balance(client);
	wait_until(daemon_stats(client).n_clients == 2);
	wait_until(daemon_fds() == n_fds);
	kv_pool_close(pool);
	kv_disconnect(client);
	daemon_stop();
}
END_TEST

START_TEST(a_daemon_with_as_many_clients_as_it_accepts_says_so)
{
	struct kv_client *clients[3], *fourth = NULL;

	daemon_start("--host", "8M", "--max-clients", "3");
	/* The harness's look at the socket was a client, too, for a moment. */
	for (int i = 0; i < 3; i++)
		wait_until(connect_to(daemon_socket(), TIMEOUT, &clients[i]) == 0);
	refused(connect_to(daemon_socket(), TIMEOUT, &fourth), -EAGAIN, "3 clients");
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "--max-clients"));
	ck_assert_ptr_null(fourth);
	kv_disconnect(clients[1]);
	wait_until(connect_to(daemon_socket(), TIMEOUT, &fourth) == 0);
	must(kv_ping(clients[0], TIMEOUT));
	daemon_stop();
}
END_TEST

START_TEST(a_second_daemon_on_the_same_socket_is_refused)
{
	struct kv_client *client;
	char text[1000];

	daemon_start("--host", "8M");
	client = client_new();
	ck_assert_int_eq(daemon_refused(text, sizeof(text), "--host", "8M"), 1);
	ck_assert_msg(strstr(text, daemon_socket()) && strstr(text, "another daemon"), "%s", text);
	must(kv_ping(client, TIMEOUT));
	kv_disconnect(client);
	daemon_stop();
}
END_TEST

START_TEST(a_socket_file_left_by_a_killed_daemon_is_no_obstacle)
{
	daemon_start("--host", "8M");
	daemon_kill();
	ck_assert_int_eq(access(daemon_socket(), F_OK), 0);
	daemon_start("--host", "8M");
	daemon_stop();
}
END_TEST

START_TEST(a_file_that_is_no_socket_is_not_deleted)
{
	char text[1000];
	int fd = open(daemon_socket(), O_CREAT | O_WRONLY, 0600);

	ck_assert_int_ge(fd, 0);
	close(fd);
	ck_assert_int_eq(daemon_refused(text, sizeof(text), "--host", "8M"), 1);
	ck_assert_msg(strstr(text, daemon_socket()), "%s", text);
	ck_assert_int_eq(unlink(daemon_socket()), 0);
}
END_TEST

static const struct {
	const char *options[6];
	int status;
	const char *words;
} command_lines[] = {
	{{"--host", "0"}, 2, "--host: '0'"},
	{{"--host", "12Q"}, 2, "--host: '12Q'"},
	{{"--host", "-1"}, 2, "--host: '-1'"},
	{{"--host", "99999999999999999999G"}, 2, "--host"},
	{{"--host", "1K"}, 1, "--host: less than 2 MiB"},
	{{"--host", "900T"}, 1, "memory"},
	{{"--host", "8M", "--gpus", "0"}, 2, "exclude each other"},
	{{"--gpus", "0,0"}, 2, "--gpus: 0 is named twice"},
	{{"--gpus", "0,"}, 2, "comma"},
	{{"--gpus", "a"}, 2, "--gpus: 'a'"},
	{{"--host", "8M", "--event-loop", "select"}, 2, "select"},
	{{"--host", "8M", "--max-clients", "many"}, 2, "--max-clients: 'many'"},
	{{"--host", "8M", "--socket-mode", "9"}, 2, "--socket-mode: '9'"},
	{{"--host", "8M", "--log-level", "loud"}, 2, "--log-level: 'loud'"},
	{{"--host", "8M", "--granule", "3M"}, 2, "--granule: '3M'"},
	{{"--host", "8M", "--export", "fd"}, 2, "--export: 'fd'"},
	{{"--reserve", "1.5"}, 2, "--reserve: '1.5'"},
	{{"--host", "8M", "now"}, 2, "'now'"},
	{{"--host", "8M", "--socket", "/nowhere/at/all"}, 1, "/nowhere/at/all"},
};

START_TEST(a_command_line_that_cannot_be_is_refused_by_name)
{
	char text[2000];

	ck_assert_int_eq(daemon_refused_with(text, sizeof(text), command_lines[_i].options),
			 command_lines[_i].status);
	ck_assert_msg(strstr(text, command_lines[_i].words), "'%s' says nothing of '%s'", text,
		      command_lines[_i].words);
	ck_assert_int_lt(access(daemon_socket(), F_OK), 0);
}
END_TEST

START_TEST(the_socket_has_its_mode_and_is_gone_after_a_signal)
{
	static const int signals[] = {SIGTERM, SIGINT, SIGHUP};
	struct stat st;

	daemon_start("--host", "8M", "--socket-mode", "0600");
	ck_assert_int_eq(stat(daemon_socket(), &st), 0);
	ck_assert_int_eq(st.st_mode & 0777, 0600);
	ck_assert_int_eq(kill(daemon_pid(), signals[_i]), 0);
	wait_until(access(daemon_socket(), F_OK) < 0);
	daemon_ended();
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/connect");
	TCase *tcase = tcase_create("connect");

	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, no_daemon_is_said_at_once_with_the_name_of_the_socket);
	tcase_add_test(tcase, a_path_that_is_no_socket_of_ours_is_refused);
	tcase_add_loop_test(tcase, what_answers_and_is_not_our_daemon_is_found_out, 0, 4);
	tcase_add_test(tcase, a_client_of_another_version_is_told_both_and_disconnected);
	tcase_add_test(
		tcase,
		messages_that_make_no_sense_cost_their_sender_its_connection_and_nobody_else);
	tcase_add_test(tcase, a_daemon_with_as_many_clients_as_it_accepts_says_so);
	tcase_add_test(tcase, a_second_daemon_on_the_same_socket_is_refused);
	tcase_add_test(tcase, a_socket_file_left_by_a_killed_daemon_is_no_obstacle);
	tcase_add_test(tcase, a_file_that_is_no_socket_is_not_deleted);
	tcase_add_loop_test(tcase, a_command_line_that_cannot_be_is_refused_by_name, 0,
			    sizeof(command_lines) / sizeof(command_lines[0]));
	tcase_add_loop_test(tcase, the_socket_has_its_mode_and_is_gone_after_a_signal, 0, 3);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
