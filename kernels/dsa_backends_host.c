/* SPDX-License-Identifier: Apache-2.0 */
/* The backends of a build without CUDA; dsa_backends_cuda.c is the other one of the pair. */
#include "kernels/dsa.h"

const struct kv_dsa_backend *const kv_dsa_backends[] = {&kv_dsa_ref, NULL};
