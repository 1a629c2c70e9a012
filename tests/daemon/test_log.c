/* SPDX-License-Identifier: Apache-2.0 */
/* Lines of the log: whoever reads them, and doesn't, holds nobody up. */
#include <check.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/log.h"

#define N_LINES 90 /* fewer than there may be in a second */

static int before, reader;
static char text[1 << 17];

/* stderr is a pipe, which is full. */
static void setup(void)
{
	int ends[2];

	ck_assert_int_eq(pipe2(ends, O_NONBLOCK), 0);
	while (write(ends[1], "x", 1) == 1)
		;
	fcntl(ends[1], F_SETFL, 0);
	reader = ends[0];
	before = dup(STDERR_FILENO);
	dup2(ends[1], STDERR_FILENO);
	close(ends[1]);
	alarm(20); /* of a write that waits */
}

static void teardown(void)
{
	alarm(0);
	dup2(before, STDERR_FILENO);
	close(before);
	close(reader);
}

static size_t read_all(void)
{
	size_t n = 0;
	ssize_t got;

	while ((got = read(reader, text + n, sizeof(text) - 1 - n)) > 0)
		n += (size_t)got;
	text[n] = 0;
	return n;
}

START_TEST(a_reader_that_stands_still_costs_lines_and_stops_nobody)
{
	for (int i = 0; i < N_LINES; i++)
		kv_log(KV_LOG_ERROR, "line %d", i);
	read_all();
	ck_assert_ptr_null(strstr(text, "line"));
	kv_log(KV_LOG_ERROR, "it reads again");
	read_all();
	ck_assert_ptr_nonnull(strstr(text, "90 lines were left out"));
	ck_assert_ptr_nonnull(strstr(text, "it reads again"));
}
END_TEST

START_TEST(a_reader_that_is_gone_costs_lines_and_stops_nobody)
{
	read_all();
	close(reader);
	reader = -1;
	kv_log(KV_LOG_ERROR, "nobody hears this");
}
END_TEST

START_TEST(a_stderr_that_is_closed_stops_nobody)
{
	close(STDERR_FILENO);
	kv_log(KV_LOG_ERROR, "nobody hears this");
}
END_TEST

START_TEST(a_line_arrives_as_it_is)
{
	read_all();
	kv_log(KV_LOG_WARN, "pool '%s'", "p");
	kv_log(KV_LOG_INFO, "%s", "all is well");
	read_all();
	ck_assert_str_eq(text, "kvcached: warning: pool 'p'\nkvcached: all is well\n");
}
END_TEST

int main(void)
{
	Suite *s = suite_create("daemon/log");
	TCase *t = tcase_create("log");
	SRunner *runner = srunner_create(s);
	int n;

	tcase_set_timeout(t, 30);
	tcase_add_checked_fixture(t, setup, teardown);
	tcase_add_test(t, a_reader_that_stands_still_costs_lines_and_stops_nobody);
	tcase_add_test(t, a_reader_that_is_gone_costs_lines_and_stops_nobody);
	tcase_add_test(t, a_stderr_that_is_closed_stops_nobody);
	tcase_add_test(t, a_line_arrives_as_it_is);
	suite_add_tcase(s, t);
	signal(SIGPIPE, SIG_IGN);
	unsetenv("JOURNAL_STREAM");
	srunner_run_all(runner, CK_NORMAL);
	n = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n != 0;
}
