/* SPDX-License-Identifier: Apache-2.0 */
/* ck_assert_msg() for inner loops: libcheck writes to a file each time one of its own passes. */
#ifndef KV_TESTS_SUPPORT_EXPECT_H
#define KV_TESTS_SUPPORT_EXPECT_H

#include <check.h>

#define expect(ok, ...)                            \
	do {                                       \
		if (!(ok))                         \
			ck_abort_msg(__VA_ARGS__); \
	} while (0)

#endif
