/* SPDX-License-Identifier: Apache-2.0 */
/* The pair of dense_cuda.cu in a build without CUDA. */
#include <errno.h>

#include "tools/engine/dense.h"
#include "tools/engine/error.h"

int kv_dense_cuda(const char *uuid, struct kv_dense **ret)
{
	return kv_engine_error(-ENOTSUP, "GPU %s: this build has no CUDA", uuid);
}
