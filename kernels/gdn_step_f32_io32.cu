/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/gdn_step.cuh"

extern const struct step_table kv_step_f32_io32 = {STEP_ALL(KV_F32, KV_IO32)};
