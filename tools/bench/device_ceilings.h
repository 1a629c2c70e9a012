/* SPDX-License-Identifier: Apache-2.0 */
/* device_ceilings.cu: what the GPU itself does a second. Failures end the program. */
#ifndef KV_TOOLS_BENCH_DEVICE_CEILINGS_H
#define KV_TOOLS_BENCH_DEVICE_CEILINGS_H

#include <stddef.h>

#include "tools/bench/device.h"

#ifdef __cplusplus
extern "C" {
#endif

double kv_bench_cuda_read(const void *from, size_t bytes);

/* All but the copy; @to and @from have @bytes each, 1 GiB or so. */
void kv_bench_cuda_ceilings(void *to, void *from, size_t bytes, struct kv_bench_ceilings *ret);

#ifdef __cplusplus
}
#endif
#endif
