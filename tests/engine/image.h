/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF files made by hand, byte by byte: sound ones, and ones that are wrong at a chosen place. */
#ifndef KV_TESTS_ENGINE_IMAGE_H
#define KV_TESTS_ENGINE_IMAGE_H

#include <stddef.h>
#include <stdint.h>

#include "tools/engine/gguf.h"

struct image {
	char *bytes;
	size_t n;
};

void image_put(struct image *image, const void *p, size_t n);
void image_u32(struct image *image, uint32_t value);
void image_u64(struct image *image, uint64_t value);
void image_text(struct image *image, const char *s);

void image_header(struct image *image, uint32_t version, uint64_t n_tensors, uint64_t n_pairs);
void image_pair_u32(struct image *image, const char *key, uint32_t value);
void image_pair_text(struct image *image, const char *key, const char *value);
void image_pair_texts(struct image *image, const char *key, const char *const *values, size_t n);
void image_pair_i32s(struct image *image, const char *key, const int32_t *values, size_t n);
void image_pair_f32s(struct image *image, const char *key, const float *values, size_t n);
void image_tensor(struct image *image, const char *name, uint32_t n_dims, const uint64_t *dims,
		  uint32_t type, uint64_t offset);
void image_align(struct image *image, size_t alignment);

/* The image as a file; its bytes go to the file, or are freed where it isn't sound. */
int image_open(struct image *image, struct kv_gguf **ret);

#endif
