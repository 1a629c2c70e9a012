/* SPDX-License-Identifier: Apache-2.0 */
/* include/internal/paths.h: which socket is meant when nobody names one. */
#include <check.h>
#include <stdbool.h>
#include <string.h>

#include "include/internal/paths.h"

static char path[KV_SOCKET_PATH_MAX];

/* And root again, without whose rights the leak sanitizer can't look at this process. */
static int ask_as_user(void)
{
	bool is_root = geteuid() == 0;
	int r;

	if (is_root)
		ck_assert_int_eq(seteuid(65534), 0);
	r = kv_default_socket(path);
	if (is_root)
		ck_assert_int_eq(seteuid(0), 0);
	return r;
}

START_TEST(the_environment_names_it)
{
	setenv(KV_SOCKET_ENV, "/tmp/a.sock", 1);
	setenv("XDG_RUNTIME_DIR", "/run/user/7", 1);
	ck_assert_int_eq(kv_default_socket(path), 0);
	ck_assert_str_eq(path, "/tmp/a.sock");
}
END_TEST

START_TEST(an_empty_variable_is_as_none)
{
	setenv(KV_SOCKET_ENV, "", 1);
	setenv("XDG_RUNTIME_DIR", "/run/user/7", 1);
	ck_assert_int_eq(ask_as_user(), 0);
	ck_assert_str_eq(path, "/run/user/7/kvcached.sock");
}
END_TEST

START_TEST(root_has_a_place_of_its_own)
{
	if (geteuid() != 0)
		return;
	unsetenv(KV_SOCKET_ENV);
	setenv("XDG_RUNTIME_DIR", "/run/user/0", 1);
	ck_assert_int_eq(kv_default_socket(path), 0);
	ck_assert_str_eq(path, KV_SOCKET_ROOT);
}
END_TEST

START_TEST(a_user_without_a_runtime_folder_is_told_what_to_set)
{
	unsetenv(KV_SOCKET_ENV);
	unsetenv("XDG_RUNTIME_DIR");
	ck_assert_int_eq(ask_as_user(), -ENOENT);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), KV_SOCKET_ENV));
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "XDG_RUNTIME_DIR"));
}
END_TEST

START_TEST(the_longest_path_fits_and_one_more_byte_is_refused)
{
	char longest[KV_SOCKET_PATH_MAX + 1];

	memset(longest, 'a', sizeof(longest));
	longest[0] = '/';
	longest[KV_SOCKET_PATH_MAX - 1] = '\0';
	setenv(KV_SOCKET_ENV, longest, 1);
	ck_assert_int_eq(kv_default_socket(path), 0);
	ck_assert_str_eq(path, longest);

	longest[KV_SOCKET_PATH_MAX - 1] = 'a';
	longest[KV_SOCKET_PATH_MAX] = '\0';
	setenv(KV_SOCKET_ENV, longest, 1);
	ck_assert_int_eq(kv_default_socket(path), -ENAMETOOLONG);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("include/paths");
	TCase *cases = tcase_create("socket");
	SRunner *runner;
	int n_failed;

	tcase_add_test(cases, the_environment_names_it);
	tcase_add_test(cases, an_empty_variable_is_as_none);
	tcase_add_test(cases, root_has_a_place_of_its_own);
	tcase_add_test(cases, a_user_without_a_runtime_folder_is_told_what_to_set);
	tcase_add_test(cases, the_longest_path_fits_and_one_more_byte_is_refused);
	suite_add_tcase(suite, cases);
	runner = srunner_create(suite);
	srunner_run_all(runner, CK_ENV);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed != 0;
}
