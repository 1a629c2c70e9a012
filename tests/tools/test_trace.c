/* SPDX-License-Identifier: Apache-2.0 */
/* tools/bench/trace.h: requests from a file, and what is said of a file that has other things. */
#include <check.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/bench/trace.h"

static struct kv_trace trace;
static char path[64];
static char text[256];

/* @n: bytes of @content, which may hold a NUL */
static int read_bytes(const char *content, size_t n)
{
	FILE *f;
	int fd, r;

	strcpy(path, "/tmp/kvcached-test-trace.XXXXXX");
	fd = mkstemp(path);
	ck_assert_int_ge(fd, 0);
	f = fdopen(fd, "w");
	ck_assert_ptr_nonnull(f);
	ck_assert_uint_eq(fwrite(content, 1, n, f), n);
	ck_assert_int_eq(fclose(f), 0);
	memset(text, 0, sizeof(text));
	r = kv_trace_read(path, &trace, text, sizeof(text));
	unlink(path);
	return r;
}

static int read_text(const char *content)
{
	return read_bytes(content, strlen(content));
}

#define GOOD                                                                                  \
	"{\"timestamp\": 0, \"input_length\": 513, \"output_length\": 20, \"hash_ids\": [0, " \
	"17]}\n"

START_TEST(requests_come_in_order_with_their_ids)
{
	ck_assert_msg(!read_text(GOOD "{\"timestamp\": 27.5, \"input_length\": 1536, "
				      "\"output_length\": 0, \"hash_ids\": [0, 1, "
				      "9223372036854775807]}"),
		      "%s", text);
	ck_assert_uint_eq(trace.n_requests, 2);
	ck_assert_uint_eq(trace.n_ids, 5);
	ck_assert_uint_eq(trace.requests[0].first_id, 0);
	ck_assert_uint_eq(trace.requests[0].n_ids, 2);
	ck_assert_uint_eq(trace.requests[0].input_length, 513);
	ck_assert_uint_eq(trace.requests[0].output_length, 20);
	ck_assert_uint_eq(trace.requests[1].first_id, 2);
	ck_assert_uint_eq(trace.requests[1].n_ids, 3);
	ck_assert_double_eq(trace.requests[1].timestamp, 27.5);
	ck_assert_uint_eq(trace.ids[1], 17);
	ck_assert_uint_eq(trace.ids[4], INT64_MAX);
	ck_assert_uint_eq(trace.longest_input, 1536);
	ck_assert_uint_eq(trace.longest_output, 20);
	kv_trace_deinit(&trace);
}
END_TEST

START_TEST(names_stand_in_any_order_and_others_are_skipped)
{
	ck_assert_msg(!read_text("\n  \r\n"
				 "{\"a\":{\"b\":[1,{\"]\":\"}\\\"\"}],\"c\":null},\"hash_ids\":[5],"
				 "\"output_length\":1,\"x\":-1.5e3,\"timestamp\":3,\"y\":\"z\","
				 "\"input_length\":1}\r\n"
				 "\n"),
		      "%s", text);
	ck_assert_uint_eq(trace.n_requests, 1);
	ck_assert_uint_eq(trace.ids[0], 5);
	kv_trace_deinit(&trace);
}
END_TEST

START_TEST(a_request_may_have_no_input)
{
	ck_assert_msg(!read_text("{\"timestamp\":0,\"input_length\":0,\"output_length\":7,"
				 "\"hash_ids\":[]}\n"),
		      "%s", text);
	ck_assert_uint_eq(trace.requests[0].n_ids, 0);
	kv_trace_deinit(&trace);
}
END_TEST

#define REQUEST(t, i, o, h)                                                     \
	"{\"timestamp\": " t ", \"input_length\": " i ", \"output_length\": " o \
	", \"hash_ids\": " h "}"

static const struct {
	const char *line;
	const char *words;
} wrong[] = {
	{"hello", "'{' expected, 'hello"},
	{"[1, 2]", "'{' expected"},
	{"{}", "timestamp is missing"},
	{"{\"timestamp\": 1", "'}' expected"},
	{"{\"timestamp", "a string doesn't end"},
	{"{\"timestamp\" 1}", "':' expected"},
	{"{\"x\": }", "a value expected"},
	{"{\"x\": [1, 2}", "a value expected"},
	{"{\"x\": [[[1", "a value expected"},
	{REQUEST("0", "1", "1", "[1]") " {}", "nothing expected behind the object"},
	{REQUEST("soon", "1", "1", "[1]"), "timestamp: a number expected, 'soon"},
	{REQUEST("0", "-1", "1", "[1]"), "input_length: a whole number"},
	{REQUEST("0", "1.5", "1", "[1]"), "input_length: a whole number"},
	{REQUEST("0", "1", "1e3", "[1]"), "output_length: a whole number"},
	{REQUEST("0", "1", "\"1\"", "[1]"), "output_length: a whole number"},
	{REQUEST("0", "1", "300000000", "[1]"), "output_length: a whole number"},
	{REQUEST("0", "1", "1", "1"), "'[' expected"},
	{REQUEST("0", "1", "1", "[1,]"), "hash_ids: a whole number"},
	{REQUEST("0", "513", "1", "[1 2]"), "']' expected"},
	{REQUEST("0", "1", "1", "[-4]"), "hash_ids: a whole number"},
	{REQUEST("0", "1", "1", "[9223372036854775808]"), "hash_ids: a whole number"},
	{REQUEST("0", "1", "1", "[99999999999999999999]"), "hash_ids: a whole number"},
	{REQUEST("0", "512", "1", "[1, 2]"), "hash_ids: 1 expected for input_length 512"},
	{REQUEST("0", "513", "1", "[1]"), "hash_ids: 2 expected for input_length 513"},
	{"{\"timestamp\": 0, \"timestamp\": 0}", "timestamp is there twice"},
	{"{\"timestamp\": 0, \"input_length\": 1, \"hash_ids\": [1]}", "output_length is missing"},
};

START_TEST(an_error_names_file_line_and_field)
{
	char content[512], where[80];

	snprintf(content, sizeof(content), GOOD "\n%s\n" GOOD, wrong[_i].line);
	ck_assert_int_eq(read_text(content), -EINVAL);
	snprintf(where, sizeof(where), "%s:3: ", path);
	ck_assert_msg(!strncmp(text, where, strlen(where)), "'%s' has no '%s'", text, where);
	ck_assert_msg(strstr(text, wrong[_i].words), "'%s' has no '%s'", text, wrong[_i].words);
}
END_TEST

START_TEST(a_nul_byte_does_not_end_a_line)
{
	static const char content[] = GOOD GOOD "\0" GOOD;

	ck_assert_int_eq(read_bytes(content, sizeof(content) - 1), -EINVAL);
	ck_assert_msg(strstr(text, ":3: a NUL byte"), "%s", text);
}
END_TEST

START_TEST(brackets_without_end_are_refused)
{
	char content[300];

	memset(content, '[', sizeof(content));
	memcpy(content, "{\"x\":", 5);
	ck_assert_int_eq(read_bytes(content, sizeof(content)), -EINVAL);
	ck_assert_msg(strstr(text, ":1: brackets more than"), "%s", text);
}
END_TEST

START_TEST(a_file_without_requests_is_an_error)
{
	ck_assert_int_eq(read_text("\n \n"), -EINVAL);
	ck_assert_msg(strstr(text, "no request"), "%s", text);
}
END_TEST

START_TEST(a_file_that_cannot_be_read_is_named)
{
	ck_assert_int_eq(kv_trace_read("/nowhere/x", &trace, text, sizeof(text)), -ENOENT);
	ck_assert_str_eq(text, "/nowhere/x: No such file or directory");
	ck_assert_int_eq(kv_trace_read("/tmp", &trace, text, sizeof(text)), -EISDIR);
	ck_assert_str_eq(text, "/tmp: Is a directory");
}
END_TEST

START_TEST(equal_ids_have_equal_tokens_and_others_have_not)
{
	static const uint64_t ids[] = {
		0,	  1, 2, 511, 512, 0x7fffffff, 0x80000000, 0x100000000, (uint64_t)1 << 62,
		INT64_MAX};
	const size_t n = sizeof(ids) / sizeof(ids[0]);
	int32_t a[KV_TRACE_BLOCK], b[KV_TRACE_BLOCK];

	for (size_t i = 0; i < n; i++) {
		kv_trace_expand(ids[i], a);
		for (size_t k = 0; k < KV_TRACE_BLOCK; k++)
			ck_assert_int_ge(a[k], 0);
		for (size_t j = 0; j < n; j++) {
			memset(b, 0xff, sizeof(b));
			kv_trace_expand(ids[j], b);
			ck_assert_int_eq(!memcmp(a, b, sizeof(a)), i == j);
		}
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("tools/bench/trace");
	TCase *tcase = tcase_create("trace");
	SRunner *runner;
	int n_failed;

	tcase_add_test(tcase, requests_come_in_order_with_their_ids);
	tcase_add_test(tcase, names_stand_in_any_order_and_others_are_skipped);
	tcase_add_test(tcase, a_request_may_have_no_input);
	tcase_add_loop_test(tcase, an_error_names_file_line_and_field, 0,
			    (int)(sizeof(wrong) / sizeof(wrong[0])));
	tcase_add_test(tcase, a_nul_byte_does_not_end_a_line);
	tcase_add_test(tcase, brackets_without_end_are_refused);
	tcase_add_test(tcase, a_file_without_requests_is_an_error);
	tcase_add_test(tcase, a_file_that_cannot_be_read_is_named);
	tcase_add_test(tcase, equal_ids_have_equal_tokens_and_others_have_not);
	suite_add_tcase(suite, tcase);
	runner = srunner_create(suite);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
