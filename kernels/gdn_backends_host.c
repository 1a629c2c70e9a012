/* SPDX-License-Identifier: Apache-2.0 */
/* The backends of a build without CUDA; gdn_backends_cuda.c is the other one of the pair. */
#include "kernels/gdn.h"

const struct kv_state_backend *const kv_state_backends[] = {&kv_state_ref, NULL};
