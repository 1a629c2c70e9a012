/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/gdn_step.cuh"

extern const struct step_table kv_step_bf16_io16 = {STEP_ALL(KV_BF16, KV_IO16)};
