/* SPDX-License-Identifier: Apache-2.0 */
#include <kvcached/types.h>

#include "tests/engine/device.h"

const int device_of_test = KV_DEVICE_HOST;

int device_open(unsigned n_threads, struct kv_dense **ret)
{
	return kv_dense_cpu(n_threads, ret);
}
