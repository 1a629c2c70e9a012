/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of the device under test. Kernel tests are written against this, and each is built twice:
 * with buffer_host.c, and with buffer_cuda.c where CUDA is. Failures abort.
 */
#ifndef KV_TESTS_KERNELS_BUFFER_H
#define KV_TESTS_KERNELS_BUFFER_H

#include <stdbool.h>
#include <stddef.h>

extern const int buffer_device; /* enum kv_device */

bool buffer_device_present(void);
size_t buffer_bytes_free(void); /* of the device, now */

/* A multiple of 256; host memory ends where the size says, so that ASan sees a step too far. */
void *buffer_new(size_t bytes);
/* As buffer_new(), of which only few pages will be touched; zero where they are not. */
void *buffer_new_sparse(size_t bytes);
void *buffer_free(void *p);
void buffer_free_sparse(void *p, size_t bytes);

void buffer_put(void *to, const void *from, size_t bytes);
void buffer_get(void *to, const void *from, size_t bytes); /* after all work queued so far */
void buffer_fill(void *to, int byte, size_t bytes);

#endif
