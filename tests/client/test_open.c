/* SPDX-License-Identifier: Apache-2.0 */
/* Opening pools: what one is, who may share it, and every way in which that is refused. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tests/support/client.h"

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
	ck_assert_str_eq(gpus[0].limits, ""); /* all promises hold */
	ck_assert_str_eq(gpu_stats(client).export_limits, "");
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

/* Descriptors that the kernel can't put anywhere are left out of a message: that was "Message too long". */
START_TEST(who_has_too_few_open_files_is_told_so_whichever_is_missing)
{
	KV_OPTIONS(kv_pool_options, what, .name = "files", .layout = small_layout(), .mapped = 1);
	struct rlimit files, before;
	struct kv_pool *pool = NULL;
	int next = dup(0), r = -1;

	close(next);
	ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &files), 0);
	before = files;
	for (rlim_t most = (rlim_t)next; r < 0; most++) {
		files.rlim_cur = most;
		ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &files), 0);
		r = kv_pool_open(client, &what, &pool);
		expect(!r || (r == -EMFILE && strstr(kv_error_text(), "open files")), "%d of %d: %d (%s)",
		       (int)most, next, r, kv_error_text());
		ck_assert_int_lt(most, (rlim_t)next + 16);
	}
	ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &before), 0);
	kv_pool_close(pool);
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
	Suite *s = suite_create("client/open");
	TCase *tcase = tcase_create("open");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, the_devices_of_the_daemon_are_known_after_connecting);
	tcase_add_test(tcase, a_pool_is_what_its_options_said);
	tcase_add_test(tcase, without_a_layout_a_pool_that_exists_is_taken_as_it_is);
	tcase_add_test(tcase,
		       a_pool_of_another_identity_is_refused_with_each_field_and_both_values);
	tcase_add_test(tcase, the_longest_names_that_differ_are_all_listed);
	tcase_add_loop_test(tcase, an_option_that_cannot_be_is_named, 0,
			    sizeof(bad_options) / sizeof(bad_options[0]));
	tcase_add_test(tcase, a_layout_that_cannot_be_is_named);
	tcase_add_test(tcase, options_without_a_size_are_refused);
	tcase_add_test(tcase, who_has_too_few_open_files_is_told_so_whichever_is_missing);
	tcase_add_test(tcase, minimums_that_cannot_all_be_kept_are_refused_with_the_numbers);
	tcase_add_test(tcase, a_pool_has_room_for_128_sessions);
	tcase_add_test(tcase, nothing_is_done_with_nothing);
	tcase_add_test(tcase, a_daemon_that_has_gone_is_reported_by_every_call_that_needs_it);
	suite_add_tcase(s, tcase);
	return s;
}

int main(void)
{
	return daemon_run_tests(suite());
}
