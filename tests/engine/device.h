/* SPDX-License-Identifier: Apache-2.0 */
/* The device a model test is built for: device_host.c, or device_cuda.c where CUDA is. */
#ifndef KV_TESTS_ENGINE_DEVICE_H
#define KV_TESTS_ENGINE_DEVICE_H

#include "tools/engine/dense.h"

extern const int device_of_test; /* enum kv_device */

/* device_open() - Return: 0; 77 if the machine has no such device */
int device_open(unsigned n_threads, struct kv_dense **ret);

#endif
