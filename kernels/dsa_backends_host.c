/* SPDX-License-Identifier: Apache-2.0 */
/* The backends of sparse attention. */
#include "kernels/dsa.h"

const struct kv_dsa_backend *const kv_dsa_backends[] = {&kv_dsa_ref, NULL};
