/* SPDX-License-Identifier: Apache-2.0 */
/* Between gdn_chunk.cu, gdn_prep.cu and gdn_scan.cu. */
#ifndef KV_KERNELS_GDN_CHUNK_H
#define KV_KERNELS_GDN_CHUNK_H

#include "kernels/gdn.h"

struct chunk_params;

#ifdef __cplusplus
extern "C" {
#endif

int kv_recur_prep(const struct kv_recur *args, const struct chunk_params *params);
int kv_recur_scan(const struct kv_recur *args, const struct chunk_params *params);

#ifdef __cplusplus
}
#endif
#endif
