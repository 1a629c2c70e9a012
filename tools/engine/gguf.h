/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GGUF files, versions 2 and 3: metadata and tensors of a model, read in place.
 *
 *	magic "GGUF" | version u32 | n_tensors u64 | n_pairs u64
 *	n_pairs   * { key string, type u32, value }		string: length u64, bytes
 *	n_tensors * { name string, n_dims u32, dims u64[n_dims], type u32, offset u64 }
 *	padding to `general.alignment` (32) | tensor data, each at its offset
 *
 * The file is mapped and stays so: processes that run the same model share its pages. Every length,
 * count and offset is checked when the file is opened; whatever the getters give out lies inside
 *it.
 *
 * Threads: read-only after opening, from any thread.
 */
#ifndef KV_ENGINE_GGUF_H
#define KV_ENGINE_GGUF_H

#include <stddef.h>
#include <stdint.h>

#include "tools/engine/weight.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KV_GGUF_MAX_DIMS     4
#define KV_GGUF_DIGEST_BYTES 33 /* 128 bits in hex, and NUL */

/* Types of metadata values, as the file numbers them. */
enum kv_gguf_type {
	KV_GGUF_U8 = 0,
	KV_GGUF_I8 = 1,
	KV_GGUF_U16 = 2,
	KV_GGUF_I16 = 3,
	KV_GGUF_U32 = 4,
	KV_GGUF_I32 = 5,
	KV_GGUF_F32 = 6,
	KV_GGUF_BOOL = 7,
	KV_GGUF_STRING = 8,
	KV_GGUF_ARRAY = 9,
	KV_GGUF_U64 = 10,
	KV_GGUF_I64 = 11,
	KV_GGUF_F64 = 12,
};

struct kv_gguf;

/* Bytes inside the file; no NUL at the end. */
struct kv_text {
	const char *at;
	size_t len;
};

struct kv_tensor {
	struct kv_text name;
	uint32_t type;	 /* enum kv_weight_type */
	uint64_t n_cols; /* elements of a row: the file's first dimension */
	uint64_t n_rows; /* product of the others */
	uint64_t row_bytes;
	const void *data; /* [n_rows][row_bytes] */
};

/**
 * kv_gguf_open() - map a file and check it
 *
 * Return: 0; -EINVAL if it is no sound GGUF file (the text says where it breaks); -ENOTSUP for
 * other versions; errno of open() and mmap().
 */
int kv_gguf_open(const char *path, struct kv_gguf **ret);

/* kv_gguf_new() - the same for bytes in memory; on success @data is freed with the file */
int kv_gguf_new(void *data, size_t size, struct kv_gguf **ret);

/* NULL is allowed; returns NULL. */
struct kv_gguf *kv_gguf_free(struct kv_gguf *file);

/*
 * Metadata. Return: 0; -ENOENT if there is no such key; -EINVAL if it has another type or does not
 * fit. Integers of every width, and booleans, are taken for u32.
 */
int kv_gguf_u32(const struct kv_gguf *file, const char *key, uint32_t *ret);
int kv_gguf_f32(const struct kv_gguf *file, const char *key, float *ret);
int kv_gguf_text(const struct kv_gguf *file, const char *key, struct kv_text *ret);

/* Arrays: *ret is from malloc(), [*ret_n]; the caller frees it. Return: also -ENOMEM. */
int kv_gguf_texts(const struct kv_gguf *file, const char *key, struct kv_text **ret, size_t *ret_n);
int kv_gguf_i32s(const struct kv_gguf *file, const char *key, int32_t **ret, size_t *ret_n);
int kv_gguf_f32s(const struct kv_gguf *file, const char *key, float **ret, size_t *ret_n);

/**
 * kv_gguf_tensor() - a tensor by name
 *
 * Return: 0; -ENOENT; -ENOTSUP if its type isn't one of enum kv_weight_type.
 */
int kv_gguf_tensor(const struct kv_gguf *file, const char *name, const struct kv_tensor **ret);

/* kv_gguf_bytes() - the whole file; as long as it is open */
const void *kv_gguf_bytes(const struct kv_gguf *file, size_t *ret_size);

/* kv_gguf_digest() - hash of the whole file: equal only for equal models */
void kv_gguf_digest(const struct kv_gguf *file, char ret[KV_GGUF_DIGEST_BYTES]);

#ifdef __cplusplus
}
#endif
#endif
