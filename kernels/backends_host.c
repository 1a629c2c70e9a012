/* SPDX-License-Identifier: Apache-2.0 */
/* The backends of a build without CUDA; backends_cuda.c is the other one of the pair. */
#include "kernels/attention.h"

const struct kv_attn_backend *const kv_attn_backends[] = {&kv_attn_cpu, &kv_attn_ref, NULL};
