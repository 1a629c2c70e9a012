/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ck_assert_msg() for inner loops and for processes that are killed: libcheck writes to a file, which all share, each
 * time one of its own passes, and half a line of who is killed meanwhile spoils the result.
 */
#ifndef KV_TESTS_SUPPORT_EXPECT_H
#define KV_TESTS_SUPPORT_EXPECT_H

#include <check.h>

#define expect(ok, ...)                            \
	do {                                       \
		if (!(ok))                         \
			ck_abort_msg(__VA_ARGS__); \
	} while (0)

#endif
