/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the daemon, opening pools, and every way in which that is refused. */
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
	if (*(int *)arg == CLOSES)
		close(peer);
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
	ck_assert_uint_eq(daemon_fds(), n_fds);
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

/* ---- opening pools ---- */

static struct kv_client *client;

static void setup(void)
{
	daemon_start("--host", "64M");
	client = client_new();
}

static void teardown(void)
{
	books_balance(client);
	kv_disconnect(client);
	daemon_stop();
}

START_TEST(the_devices_of_the_daemon_are_known_after_connecting)
{
	const struct kv_gpu *gpus;

	ck_assert_int_eq(kv_client_gpus(client, &gpus), 1);
	ck_assert_int_eq(gpus[0].index, 0);
	ck_assert_int_eq(gpus[0].device, KV_DEVICE_HOST);
	ck_assert_str_eq(gpus[0].export_kind, "host");
	ck_assert_str_eq(gpus[0].uuid, "");
	ck_assert_uint_eq(gpus[0].arena_bytes, 64 << 20);
}
END_TEST

START_TEST(a_pool_is_what_its_options_said)
{
	struct kv_pool *pool = pool_new_mapped(client, "one", 100);
	const struct kv_layout *layout = kv_pool_layout(pool);
	struct kv_pool_info info;
	struct kv_view view;

	kv_pool_info(pool, &info);
	ck_assert_uint_eq(info.block_tokens, BLOCK_TOKENS);
	ck_assert_uint_eq(info.block_bytes, BLOCK_BYTES);
	ck_assert_uint_eq(info.n_components, 2);
	ck_assert_uint_eq(info.max_blocks, 100);
	ck_assert_int_ge(info.null_block, 0);
	ck_assert_int_lt(info.null_block, info.id_limit);
	ck_assert_int_eq(info.device, KV_DEVICE_HOST);
	ck_assert_uint_eq(info.gpu_mask, 1);
	ck_assert_uint_eq(layout->n_components, 2);
	ck_assert_uint_eq(layout->components[1].role, KV_ROLE_V);
	must(kv_pool_view(pool, 0, 1, &view));
	ck_assert_int_eq(view.block_stride, BLOCK_BYTES);
	refused(kv_pool_view(pool, 0, 2, &view), -EINVAL, "component: 2");
	refused(kv_pool_view(pool, 1, 0, &view), -ENXIO, "device 1");
	refused(kv_pool_view(pool, 16, 0, &view), -EINVAL, "gpu: 16");
	kv_pool_close(pool);

	pool = pool_new(client, "one", 0);
	refused(kv_pool_view(pool, 0, 0, &view), -ENXIO, "not mapped");
	kv_pool_close(pool);
}
END_TEST

START_TEST(without_a_layout_a_pool_that_exists_is_taken_as_it_is)
{
	KV_OPTIONS(kv_pool_options, what, .name = "one", .model = "small");
	struct kv_pool *first, *second = NULL;
	struct kv_pool_info info;

	refused(kv_pool_open(client, &what, &second), -ENOENT, "'one'");
	ck_assert_ptr_null(second);
	first = pool_new(client, "one", 50);
	must(kv_pool_open(client, &what, &second));
	kv_pool_info(second, &info);
	ck_assert_uint_eq(info.block_bytes, BLOCK_BYTES);
	ck_assert_uint_eq(info.max_blocks, 50);
	ck_assert_uint_eq(kv_pool_layout(second)->components[0].head_dim, 16);
	kv_pool_close(first);
	kv_pool_close(second);
}
END_TEST

START_TEST(a_pool_of_another_identity_is_refused_with_each_field_and_both_values)
{
	struct kv_component components[2] = {small_layout()->components[0],
					     small_layout()->components[1]};
	struct kv_layout layout = {KV_LAYOUT_FLAT, 0, 32, 2, components};
	KV_OPTIONS(kv_pool_options, what, .name = "one", .model = "large", .revision = "main",
		   .name_space = "tenant-7", .tp_ranks = 2, .layout = &layout);
	struct kv_pool *pool = pool_new(client, "one", 0), *other = NULL;
	static const char *const words[] = {
		"model: 'small' here, 'large' asked", "revision: '' here, 'main' asked",
		"name_space: '' here, 'tenant-7' asked", "tp_ranks: 1 here, 2 asked",
		"block_tokens: 16 here, 32 asked"};

	for (int i = 0; i < 5; i++)
		refused(kv_pool_open(client, &what, &other), -EEXIST, words[i]);
	ck_assert_ptr_null(other);

	/* Each one alone is enough. */
	what = (struct kv_pool_options){.size = sizeof(what), .name = "one", .model = "small"};
	what.name_space = "x";
	refused(kv_pool_open(client, &what, &other), -EEXIST, "name_space: '' here, 'x' asked");
	what.name_space = NULL;
	layout.block_tokens = 16;
	components[1].scale = 1;
	components[1].head_dim = 32;
	what.layout = &layout;
	refused(kv_pool_open(client, &what, &other), -EEXIST, "components[1]");
	kv_pool_close(pool);
}
END_TEST

START_TEST(the_longest_names_that_differ_are_all_listed)
{
	char here[3][KV_NAME_MAX], asked[3][KV_NAME_MAX];
	KV_OPTIONS(kv_pool_options, what, .name = "long", .model = here[0], .revision = here[1],
		   .name_space = here[2], .layout = small_layout());
	struct kv_pool *pool, *other;

	for (int i = 0; i < 3; i++) {
		memset(here[i], 'a' + i, KV_NAME_MAX - 1);
		memset(asked[i], 'p' + i, KV_NAME_MAX - 1);
		here[i][KV_NAME_MAX - 1] = asked[i][KV_NAME_MAX - 1] = 0;
	}
	must(kv_pool_open(client, &what, &pool));
	what.model = asked[0];
	what.revision = asked[1];
	what.name_space = asked[2];
	what.tp_ranks = 8;
	for (int i = 0; i < 3; i++) {
		refused(kv_pool_open(client, &what, &other), -EEXIST, here[i]);
		refused(kv_pool_open(client, &what, &other), -EEXIST, asked[i]);
	}
	refused(kv_pool_open(client, &what, &other), -EEXIST, "tp_ranks: 1 here, 8 asked");
	kv_pool_close(pool);
}
END_TEST

#define LONG_NAME "0123456789012345678901234567890123456789012345678901234567890123" /* 64 */
#define MIB	  (1u << 20)

static const struct {
	int error;
	const char *words;
	struct kv_pool_options options;
} bad_options[] = {
	{-EINVAL, "name: empty", {.name = NULL}},
	{-EINVAL, "name: empty", {.name = ""}},
	{-EINVAL, "name: '" LONG_NAME "' has 64 bytes, at most 63", {.name = LONG_NAME}},
	{-EINVAL, "model: '" LONG_NAME, {.name = "x", .model = LONG_NAME}},
	{-EINVAL, "revision: '" LONG_NAME, {.name = "x", .revision = LONG_NAME}},
	{-EINVAL, "name_space: '" LONG_NAME, {.name = "x", .name_space = LONG_NAME}},
	{-EINVAL, "gpu_mask 0x2", {.name = "x", .gpu_mask = 2}},
	{-EINVAL, "gpu_mask 0x80000000", {.name = "x", .gpu_mask = 1u << 31}},
	{-EINVAL, "max_bytes: 4095", {.name = "x", .max_bytes = 2 * BLOCK_BYTES - 1}},
	{-EINVAL, "min_bytes: 2097152", {.name = "x", .min_bytes = 2 * MIB, .max_bytes = MIB}},
	{-EINVAL, "min_bytes: 68157440", {.name = "x", .min_bytes = 65 * MIB}},
	{-EINVAL, "map_mask: 0x2", {.name = "x", .mapped = 1, .map_mask = 2}},
};

START_TEST(an_option_that_cannot_be_is_named)
{
	struct kv_pool_options what = bad_options[_i].options;
	struct kv_pool *pool = NULL;

	what.size = sizeof(what);
	what.layout = small_layout();
	refused(kv_pool_open(client, &what, &pool), bad_options[_i].error, bad_options[_i].words);
	ck_assert_ptr_null(pool);
	wait_until(daemon_stats(client).n_sessions == 0);
	wait_until(daemon_stats(client).n_clients == 1);
}
END_TEST

START_TEST(a_layout_that_cannot_be_is_named)
{
	struct kv_component components[2] = {small_layout()->components[0],
					     small_layout()->components[1]};
	struct kv_layout layout = {KV_LAYOUT_FLAT, 0, 16, 2, components};
	KV_OPTIONS(kv_pool_options, what, .name = "x", .layout = &layout);
	struct kv_pool *pool = NULL;

	components[1].n_heads = 0;
	refused(kv_pool_open(client, &what, &pool), -EINVAL, "components[1].n_heads: 0");
	components[1] = components[0];
	layout.block_tokens = KV_MAX_BLOCK_TOKENS + 1;
	refused(kv_pool_open(client, &what, &pool), -EINVAL, "block_tokens");
	/* A block larger than half of the arena: the null block leaves no room for another. */
	layout.block_tokens = 2048;
	components[0].n_heads = 4096;
	refused(kv_pool_open(client, &what, &pool), -EINVAL, "max_bytes");
	ck_assert_ptr_null(pool);
}
END_TEST

START_TEST(options_without_a_size_are_refused)
{
	struct kv_connect_options how = {.socket = daemon_socket()};
	struct kv_pool_options what = {.name = "x", .layout = small_layout()};
	struct kv_client *another;
	struct kv_pool *pool;

	refused(kv_connect(&how, &another), -EINVAL, "options.size: 0");
	refused(kv_pool_open(client, &what, &pool), -EINVAL, "options.size: 0");
	/* A caller of a later version knows more fields than we do, an older one fewer. */
	how.size = offsetof(struct kv_connect_options, timeout);
	must(kv_connect(&how, &another));
	kv_disconnect(another);
}
END_TEST

START_TEST(minimums_that_cannot_all_be_kept_are_refused_with_the_numbers)
{
	KV_OPTIONS(kv_pool_options, what, .name = "first", .layout = small_layout(),
		   .min_bytes = 40 * MIB);
	struct kv_pool *first, *second;

	must(kv_pool_open(client, &what, &first));
	what.name = "second";
	what.min_bytes = 25 * MIB;
	refused(kv_pool_open(client, &what, &second), -ENOMEM, "26214400");
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "41943040"));
	what.min_bytes = 20 * MIB;
	must(kv_pool_open(client, &what, &second));
	kv_pool_close(first);
	kv_pool_close(second);
}
END_TEST

START_TEST(a_pool_has_room_for_128_sessions)
{
	struct kv_pool *pools[KV_MAX_SESSIONS], *one_more = NULL;
	KV_OPTIONS(kv_pool_options, what, .name = "busy", .model = "small",
		   .layout = small_layout());

	for (int i = 0; i < KV_MAX_SESSIONS; i++)
		pools[i] = pool_new(client, "busy", 0);
	refused(kv_pool_open(client, &what, &one_more), -EBUSY, "128 sessions");
	ck_assert_ptr_null(one_more);
	ck_assert_uint_eq(pool_stats(client, "busy").n_sessions, KV_MAX_SESSIONS);
	pools[77] = kv_pool_close(pools[77]);
	must(kv_pool_open(client, &what, &pools[77]));
	books_balance(client);
	for (int i = 0; i < KV_MAX_SESSIONS; i++)
		kv_pool_close(pools[i]);
}
END_TEST

START_TEST(nothing_is_done_with_nothing)
{
	ck_assert_ptr_null(kv_disconnect(NULL));
	ck_assert_ptr_null(kv_pool_close(NULL));
	ck_assert_ptr_null(kv_seq_free(NULL, NULL));
	ck_assert_ptr_null(kv_batch_free(NULL));
	refused(kv_pool_drop(client, "nobody", TIMEOUT), -ENOENT, "'nobody'");
	refused(kv_stats(client, (enum kv_stat_kind)9, &(void *){0}, &(size_t){0}, TIMEOUT),
		-EINVAL, "kind: 9");
}
END_TEST

START_TEST(a_daemon_that_has_gone_is_reported_by_every_call_that_needs_it)
{
	struct kv_pool *pool = pool_new(client, "one", 0), *another;
	KV_OPTIONS(kv_pool_options, what, .name = "two", .layout = small_layout());
	struct kv_pool_info info;
	kv_block_id *ids;
	int r;

	kv_pool_info(pool, &info);
	ids = calloc(info.max_blocks, sizeof(*ids));
	daemon_kill();
	refused(kv_ping(client, TIMEOUT), -ECONNRESET, "closed the connection");
	r = kv_pool_open(client, &what, &another);
	ck_assert_msg(r == -ECONNREFUSED || r == -ECONNRESET, "open gives %d", r);
	/* Not out of what was leased in advance. */
	refused(kv_blocks_take(pool, (uint32_t)info.max_blocks, ids, TIMEOUT), -ECONNRESET, "");
	kv_pool_close(pool);
	kv_disconnect(client);
	free(ids);
	unlink(daemon_socket());
	setup();
}
END_TEST

static Suite *suite(void)
{
	Suite *s = suite_create("client/connect");
	TCase *alone = tcase_create("daemon"), *pools = tcase_create("pool");

	tcase_set_timeout(alone, 60);
	tcase_add_test(alone, no_daemon_is_said_at_once_with_the_name_of_the_socket);
	tcase_add_test(alone, a_path_that_is_no_socket_of_ours_is_refused);
	tcase_add_loop_test(alone, what_answers_and_is_not_our_daemon_is_found_out, 0, 4);
	tcase_add_test(alone, a_client_of_another_version_is_told_both_and_disconnected);
	tcase_add_test(
		alone,
		messages_that_make_no_sense_cost_their_sender_its_connection_and_nobody_else);
	tcase_add_test(alone, a_daemon_with_as_many_clients_as_it_accepts_says_so);
	tcase_add_test(alone, a_second_daemon_on_the_same_socket_is_refused);
	tcase_add_test(alone, a_socket_file_left_by_a_killed_daemon_is_no_obstacle);
	tcase_add_test(alone, a_file_that_is_no_socket_is_not_deleted);
	tcase_add_loop_test(alone, a_command_line_that_cannot_be_is_refused_by_name, 0,
			    sizeof(command_lines) / sizeof(command_lines[0]));
	tcase_add_loop_test(alone, the_socket_has_its_mode_and_is_gone_after_a_signal, 0, 3);
	suite_add_tcase(s, alone);

	tcase_set_timeout(pools, 60);
	tcase_add_checked_fixture(pools, setup, teardown);
	tcase_add_test(pools, the_devices_of_the_daemon_are_known_after_connecting);
	tcase_add_test(pools, a_pool_is_what_its_options_said);
	tcase_add_test(pools, without_a_layout_a_pool_that_exists_is_taken_as_it_is);
	tcase_add_test(pools,
		       a_pool_of_another_identity_is_refused_with_each_field_and_both_values);
	tcase_add_test(pools, the_longest_names_that_differ_are_all_listed);
	tcase_add_loop_test(pools, an_option_that_cannot_be_is_named, 0,
			    sizeof(bad_options) / sizeof(bad_options[0]));
	tcase_add_test(pools, a_layout_that_cannot_be_is_named);
	tcase_add_test(pools, options_without_a_size_are_refused);
	tcase_add_test(pools, minimums_that_cannot_all_be_kept_are_refused_with_the_numbers);
	tcase_add_test(pools, a_pool_has_room_for_128_sessions);
	tcase_add_test(pools, nothing_is_done_with_nothing);
	tcase_add_test(pools, a_daemon_that_has_gone_is_reported_by_every_call_that_needs_it);
	suite_add_tcase(s, pools);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
