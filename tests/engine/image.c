/* SPDX-License-Identifier: Apache-2.0 */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "tests/engine/image.h"

void image_put(struct image *image, const void *p, size_t n)
{
	image->bytes = realloc(image->bytes, image->n + n + 1);
	ck_assert_ptr_nonnull(image->bytes);
	memcpy(image->bytes + image->n, p, n);
	image->n += n;
}

void image_u32(struct image *image, uint32_t value)
{
	image_put(image, &value, sizeof(value));
}

void image_u64(struct image *image, uint64_t value)
{
	image_put(image, &value, sizeof(value));
}

void image_text(struct image *image, const char *s)
{
	image_u64(image, strlen(s));
	image_put(image, s, strlen(s));
}

void image_header(struct image *image, uint32_t version, uint64_t n_tensors, uint64_t n_pairs)
{
	image_put(image, "GGUF", 4);
	image_u32(image, version);
	image_u64(image, n_tensors);
	image_u64(image, n_pairs);
}

void image_pair_u32(struct image *image, const char *key, uint32_t value)
{
	image_text(image, key);
	image_u32(image, KV_GGUF_U32);
	image_u32(image, value);
}

void image_pair_text(struct image *image, const char *key, const char *value)
{
	image_text(image, key);
	image_u32(image, KV_GGUF_STRING);
	image_text(image, value);
}

void image_pair_texts(struct image *image, const char *key, const char *const *values, size_t n)
{
	image_text(image, key);
	image_u32(image, KV_GGUF_ARRAY);
	image_u32(image, KV_GGUF_STRING);
	image_u64(image, n);
	for (size_t i = 0; i < n; i++)
		image_text(image, values[i]);
}

void image_pair_i32s(struct image *image, const char *key, const int32_t *values, size_t n)
{
	image_text(image, key);
	image_u32(image, KV_GGUF_ARRAY);
	image_u32(image, KV_GGUF_I32);
	image_u64(image, n);
	image_put(image, values, n * sizeof(*values));
}

void image_pair_f32s(struct image *image, const char *key, const float *values, size_t n)
{
	image_text(image, key);
	image_u32(image, KV_GGUF_ARRAY);
	image_u32(image, KV_GGUF_F32);
	image_u64(image, n);
	image_put(image, values, n * sizeof(*values));
}

void image_tensor(struct image *image, const char *name, uint32_t n_dims, const uint64_t *dims,
		  uint32_t type, uint64_t offset)
{
	image_text(image, name);
	image_u32(image, n_dims);
	for (uint32_t i = 0; i < n_dims; i++)
		image_u64(image, dims[i]);
	image_u32(image, type);
	image_u64(image, offset);
}

void image_align(struct image *image, size_t alignment)
{
	while (image->n % alignment)
		image_put(image, "", 1);
}

int image_open(struct image *image, struct kv_gguf **ret)
{
	int r;

	/* Bytes of exactly the file's size: a sanitizer sees the first one read behind it. */
	image->bytes = realloc(image->bytes, image->n ? image->n : 1);
	r = kv_gguf_new(image->bytes, image->n, ret);
	if (r < 0)
		free(image->bytes);
	*image = (struct image){0};
	return r;
}
