/* SPDX-License-Identifier: Apache-2.0 */
/* daemon/loop.c: which kind is taken, and what is said where io_uring is refused. */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "tests/daemon/loop_case.h"

START_TEST(a_kind_asked_for_is_taken)
{
	ck_assert_str_eq(kv_loop_name(loop), kind == KV_LOOP_EPOLL ? "epoll" : "io_uring");
	ck_assert_str_eq(kv_loop_why(loop), "asked for");
	ck_assert_int_eq(kv_loop_kind_parse(kv_loop_name(loop)), (int)kind);
}
END_TEST

START_TEST(kinds_have_names)
{
	ck_assert_int_eq(kv_loop_kind_parse("auto"), KV_LOOP_AUTO);
	ck_assert_int_eq(kv_loop_kind_parse("select"), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "'select'"));
	teardown();
	ck_assert_int_eq(kv_loop_new(7, &loop), -EINVAL);
}
END_TEST

/* What container profiles do: the call fails with @error. For the rest of the process. */
static void refuse(int call, int error)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)call, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {.len = 4, .filter = code};

	ck_assert_int_eq(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
	ck_assert_int_eq(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

static const struct {
	int call;
	int error;
	const char *reason;
} refusals[] = {
	{SYS_io_uring_setup, EPERM, "io_uring_setup: Operation not permitted"},
	{SYS_io_uring_setup, ENOSYS, "io_uring_setup: Function not implemented"},
	{SYS_io_uring_setup, EINVAL, "io_uring_setup: Invalid argument"},
	{SYS_io_uring_enter, EPERM, "io_uring_enter: Operation not permitted"},
};

START_TEST(where_io_uring_is_refused_auto_takes_epoll_and_says_why)
{
	struct ear ear = {.fd = make_eventfd(1)};

	teardown();
	refuse(refusals[_i].call, refusals[_i].error);

	ck_assert_int_lt(kv_loop_new(KV_LOOP_IO_URING, &loop), 0);
	ck_assert_ptr_nonnull(strstr(kv_error_text(), "io_uring refused"));

	ck_assert_int_eq(kv_loop_new(KV_LOOP_AUTO, &loop), 0);
	ck_assert_str_eq(kv_loop_name(loop), "epoll");
	/* Without io_uring on this machine at all the first call fails, whatever is refused. */
	if (have_uring)
		ck_assert_msg(strstr(kv_loop_why(loop), refusals[_i].reason), "%s",
			      kv_loop_why(loop));
	ear_watch(&ear, KV_LOOP_IN);
	step();
	ck_assert_int_eq(ear.n_calls, 1);
	ear_close(&ear);
}
END_TEST

START_TEST(auto_takes_io_uring_where_it_works)
{
	teardown();
	ck_assert_int_eq(kv_loop_new(KV_LOOP_AUTO, &loop), 0);
	ck_assert_str_eq(kv_loop_name(loop), have_uring ? "io_uring" : "epoll");
}
END_TEST

int main(int argc, char **argv)
{
	TCase *tcase = tcase_create("choice");

	tcase_add_test(tcase, a_kind_asked_for_is_taken);
	tcase_add_test(tcase, kinds_have_names);
	tcase_add_loop_test(tcase, where_io_uring_is_refused_auto_takes_epoll_and_says_why, 0,
			    (int)(sizeof(refusals) / sizeof(refusals[0])));
	tcase_add_test(tcase, auto_takes_io_uring_where_it_works);
	return loop_main(argc, argv, tcase);
}
