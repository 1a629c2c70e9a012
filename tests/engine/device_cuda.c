/* SPDX-License-Identifier: Apache-2.0 */
#include <cuda_runtime_api.h>
#include <stdio.h>

#include <kvcached/types.h>

#include "tests/engine/device.h"

const int device_of_test = KV_DEVICE_CUDA;

int device_open(unsigned n_threads, struct kv_dense **ret)
{
	struct cudaDeviceProp properties;
	const unsigned char *b = (const unsigned char *)properties.uuid.bytes;
	char uuid[48];

	if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess)
		return 77;

	snprintf(uuid, sizeof(uuid),
		 "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
		 b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13],
		 b[14], b[15]);
	return kv_dense_cuda(uuid, ret);
}
