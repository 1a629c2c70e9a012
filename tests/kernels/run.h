/* SPDX-License-Identifier: Apache-2.0 */
/* How a program of kernel tests ends: its suite is run on the device that it was built for. */
#ifndef KV_TESTS_KERNELS_RUN_H
#define KV_TESTS_KERNELS_RUN_H

#include <check.h>

#include <kvcached/types.h>

#include "tests/kernels/buffer.h"

/* Return: main()'s; 77: there is no such device. A CUDA context does not cross fork(). */
static inline int run_on_device(Suite *suite)
{
	SRunner *runner = srunner_create(suite);
	int n_failed;

	if (!buffer_device_present())
		return 77;
	if (buffer_device == KV_DEVICE_CUDA)
		srunner_set_fork_status(runner, CK_NOFORK);
	srunner_run_all(runner, CK_NORMAL);
	n_failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return n_failed ? 1 : 0;
}

#endif
