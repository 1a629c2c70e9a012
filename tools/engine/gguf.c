/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading a GGUF file: one pass with a cursor that never moves past the end.
 *
 * Values are not decoded but remembered by place; a getter decodes the few that are asked for.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "include/internal/cleanup.h"
#include "tools/engine/error.h"
#include "tools/engine/gguf.h"

/* The least bytes an entry can take: bounds the counts before anything is allocated for them. */
#define PAIR_MIN_BYTES	 13  /* empty key, type, one byte of value */
#define TENSOR_MIN_BYTES 32  /* empty name, one dimension */
#define NAME_MAX_BYTES	 256 /* of a tensor; the format says 64 */

struct pair {
	struct kv_text key;
	uint32_t type; /* of the value, or of the elements of an array */
	bool is_array;
	uint64_t n;	   /* elements; 1 unless it is an array */
	const uint8_t *at; /* first element */
};

struct kv_gguf {
	const uint8_t *bytes;
	size_t size;
	bool mapped; /* munmap(), else free() */
	uint64_t n_pairs;
	uint64_t n_tensors;
	struct pair *pairs;
	struct kv_tensor *tensors;
};

struct cursor {
	const uint8_t *start;
	const uint8_t *at;
	const uint8_t *end;
};

static int broken(const struct cursor *c, const char *what)
{
	return kv_engine_error(-EINVAL, "GGUF: %s at byte %zu of %zu: the file is cut or damaged",
			       what, (size_t)(c->at - c->start), (size_t)(c->end - c->start));
}

static int take(struct cursor *c, void *ret, size_t n, const char *what)
{
	if ((size_t)(c->end - c->at) < n)
		return broken(c, what);

	memcpy(ret, c->at, n);
	c->at += n;
	return 0;
}

static int take_text(struct cursor *c, struct kv_text *ret, const char *what)
{
	uint64_t len = 0;
	int r;

	r = take(c, &len, sizeof(len), what);
	if (r < 0)
		return r;
	if (len > (size_t)(c->end - c->at))
		return broken(c, what);

	*ret = (struct kv_text){(const char *)c->at, len};
	c->at += len;
	return 0;
}

/* Bytes of a value of fixed size; 0 for strings, arrays and unknown types. */
static size_t value_bytes(uint32_t type)
{
	switch (type) {
	case KV_GGUF_U8:
	case KV_GGUF_I8:
	case KV_GGUF_BOOL:
		return 1;
	case KV_GGUF_U16:
	case KV_GGUF_I16:
		return 2;
	case KV_GGUF_U32:
	case KV_GGUF_I32:
	case KV_GGUF_F32:
		return 4;
	case KV_GGUF_U64:
	case KV_GGUF_I64:
	case KV_GGUF_F64:
		return 8;
	default:
		return 0;
	}
}

static int skip_values(struct cursor *c, uint32_t type, uint64_t n)
{
	size_t bytes = value_bytes(type);
	struct kv_text text;
	int r;

	if (bytes) {
		if (n > (size_t)(c->end - c->at) / bytes)
			return broken(c, "metadata value");

		c->at += n * bytes;
		return 0;
	}
	if (type != KV_GGUF_STRING)
		return kv_engine_error(-EINVAL, "GGUF: metadata type %u at byte %zu is unknown",
				       type, (size_t)(c->at - c->start));

	/* Ends by itself on a false count: each string takes 8 bytes at least. */
	for (uint64_t i = 0; i < n; i++) {
		r = take_text(c, &text, "metadata string");
		if (r < 0)
			return r;
	}
	return 0;
}

static int read_pair(struct cursor *c, struct pair *ret)
{
	struct pair pair = {.n = 1};
	int r;

	r = take_text(c, &pair.key, "metadata key");
	if (r < 0)
		return r;
	r = take(c, &pair.type, sizeof(pair.type), "metadata type");
	if (r < 0)
		return r;

	if (pair.type == KV_GGUF_ARRAY) {
		pair.is_array = true;
		r = take(c, &pair.type, sizeof(pair.type), "array type");
		if (r < 0)
			return r;
		r = take(c, &pair.n, sizeof(pair.n), "array length");
		if (r < 0)
			return r;
	}
	pair.at = c->at;
	r = skip_values(c, pair.type, pair.n);
	if (r < 0)
		return r;

	*ret = pair;
	return 0;
}

/* Reads a tensor's entry; its data is found later, when it is known where the data starts. */
static int read_tensor(struct cursor *c, struct kv_tensor *ret, uint64_t *ret_offset)
{
	struct kv_tensor t = {.n_rows = 1};
	uint32_t n_dims;
	uint64_t dim;
	int r;

	r = take_text(c, &t.name, "tensor name");
	if (r < 0)
		return r;
	if (t.name.len > NAME_MAX_BYTES)
		return broken(c, "tensor name");
	r = take(c, &n_dims, sizeof(n_dims), "tensor dimensions");
	if (r < 0)
		return r;
	if (n_dims < 1 || n_dims > KV_GGUF_MAX_DIMS)
		return kv_engine_error(-EINVAL,
				       "GGUF: tensor %.*s has %u dimensions, 1..%d allowed",
				       (int)t.name.len, t.name.at, n_dims, KV_GGUF_MAX_DIMS);

	r = take(c, &t.n_cols, sizeof(t.n_cols), "tensor dimensions");
	if (r < 0)
		return r;
	for (uint32_t i = 1; i < n_dims; i++) {
		r = take(c, &dim, sizeof(dim), "tensor dimensions");
		if (r < 0)
			return r;
		if (__builtin_mul_overflow(t.n_rows, dim, &t.n_rows))
			return broken(c, "tensor size");
	}
	r = take(c, &t.type, sizeof(t.type), "tensor type");
	if (r < 0)
		return r;
	r = take(c, ret_offset, sizeof(*ret_offset), "tensor offset");
	if (r < 0)
		return r;

	*ret = t;
	return 0;
}

/* A type we don't know has no size for us: its tensor keeps data NULL and can't be asked for. */
static int place_tensor(struct kv_tensor *t, uint64_t offset, const struct cursor *data,
			uint64_t alignment)
{
	uint64_t room = data->end - data->at, bytes;

	if (!kv_weight_block(t->type))
		return 0;

	t->row_bytes = kv_weight_row_bytes(t->type, t->n_cols);
	if (!t->row_bytes || !t->n_rows)
		return kv_engine_error(-EINVAL,
				       "GGUF: tensor %.*s of type %u has rows of %llu elements, "
				       "a positive multiple of %u is needed",
				       (int)t->name.len, t->name.at, t->type,
				       (unsigned long long)t->n_cols,
				       kv_weight_block(t->type));
	if (offset % alignment)
		return kv_engine_error(
			-EINVAL,
			"GGUF: tensor %.*s lies at offset %llu, which is no multiple "
			"of %llu",
			(int)t->name.len, t->name.at, (unsigned long long)offset,
			(unsigned long long)alignment);
	if (__builtin_mul_overflow(t->row_bytes, t->n_rows, &bytes) || offset > room ||
	    bytes > room - offset)
		return kv_engine_error(
			-EINVAL,
			"GGUF: tensor %.*s ends past the end of the file: %llu bytes "
			"at offset %llu of %llu",
			(int)t->name.len, t->name.at, (unsigned long long)t->row_bytes * t->n_rows,
			(unsigned long long)offset, (unsigned long long)room);

	t->data = data->at + offset;
	return 0;
}

static int read_tensors(struct kv_gguf *file, struct cursor *c)
{
	kv_cleanup(kv_freep) uint64_t *offsets = calloc(file->n_tensors + 1, sizeof(*offsets));
	uint32_t alignment = 32;
	uint64_t skip;
	int r;

	if (!offsets)
		return -ENOMEM;

	for (uint64_t i = 0; i < file->n_tensors; i++) {
		r = read_tensor(c, &file->tensors[i], &offsets[i]);
		if (r < 0)
			return r;
	}

	r = kv_gguf_u32(file, "general.alignment", &alignment);
	if (r < 0 && r != -ENOENT)
		return r;
	if (!alignment || alignment & (alignment - 1))
		return kv_engine_error(-EINVAL,
				       "GGUF: general.alignment is %u, a power of two is needed",
				       alignment);

	skip = -(uint64_t)(c->at - c->start) & (alignment - 1);
	if (file->n_tensors && skip > (size_t)(c->end - c->at))
		return broken(c, "tensor data");
	c->at = file->n_tensors ? c->at + skip : c->end;

	for (uint64_t i = 0; i < file->n_tensors; i++) {
		r = place_tensor(&file->tensors[i], offsets[i], c, alignment);
		if (r < 0)
			return r;
	}
	return 0;
}

static int read_file(struct kv_gguf *file)
{
	struct cursor c = {file->bytes, file->bytes, file->bytes + file->size};
	char magic[4];
	uint32_t version;
	int r;

	r = take(&c, magic, sizeof(magic), "magic");
	if (r < 0)
		return r;
	if (memcmp(magic, "GGUF", sizeof(magic)))
		return kv_engine_error(-EINVAL, "GGUF: the file doesn't start with \"GGUF\"");

	r = take(&c, &version, sizeof(version), "version");
	if (r < 0)
		return r;
	if (version != 2 && version != 3)
		return kv_engine_error(-ENOTSUP, "GGUF: version %u, 2 and 3 are supported",
				       version);

	r = take(&c, &file->n_tensors, sizeof(file->n_tensors), "number of tensors");
	if (r < 0)
		return r;
	r = take(&c, &file->n_pairs, sizeof(file->n_pairs), "number of metadata pairs");
	if (r < 0)
		return r;
	if (file->n_pairs > file->size / PAIR_MIN_BYTES ||
	    file->n_tensors > file->size / TENSOR_MIN_BYTES)
		return kv_engine_error(-EINVAL,
				       "GGUF: %llu metadata pairs and %llu tensors don't fit in a "
				       "file of %zu bytes",
				       (unsigned long long)file->n_pairs,
				       (unsigned long long)file->n_tensors, file->size);

	file->pairs = calloc(file->n_pairs + 1, sizeof(*file->pairs));
	file->tensors = calloc(file->n_tensors + 1, sizeof(*file->tensors));
	if (!file->pairs || !file->tensors)
		return -ENOMEM;

	for (uint64_t i = 0; i < file->n_pairs; i++) {
		r = read_pair(&c, &file->pairs[i]);
		if (r < 0)
			return r;
	}
	return read_tensors(file, &c);
}

static struct kv_gguf *free_tables(struct kv_gguf *file)
{
	free(file->pairs);
	free(file->tensors);
	free(file);
	return NULL;
}

static int new_file(const void *bytes, size_t size, bool mapped, struct kv_gguf **ret)
{
	struct kv_gguf *file = calloc(1, sizeof(*file));
	int r;

	if (!file)
		return -ENOMEM;

	file->bytes = bytes;
	file->size = size;
	file->mapped = mapped;
	r = read_file(file);
	if (r < 0) {
		free_tables(file);
		return r;
	}
	*ret = file;
	return 0;
}

int kv_gguf_open(const char *path, struct kv_gguf **ret)
{
	kv_cleanup(kv_closep) int fd = open(path, O_RDONLY | O_CLOEXEC);
	struct stat st;
	void *bytes;
	int r;

	if (fd < 0 || fstat(fd, &st) < 0)
		return kv_engine_error(-errno, "%s: %m", path);
	if (!S_ISREG(st.st_mode) || !st.st_size)
		return kv_engine_error(-EINVAL, "%s: not a regular file with something in it",
				       path);

	bytes = mmap(NULL, st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
	if (bytes == MAP_FAILED)
		return kv_engine_error(-errno, "%s: mmap: %m", path);

	r = new_file(bytes, st.st_size, true, ret);
	if (r < 0)
		munmap(bytes, st.st_size);
	return r;
}

int kv_gguf_new(void *data, size_t size, struct kv_gguf **ret)
{
	return new_file(data, size, false, ret);
}

struct kv_gguf *kv_gguf_free(struct kv_gguf *file)
{
	if (!file)
		return NULL;

	if (file->mapped)
		munmap((void *)file->bytes, file->size);
	else
		free((void *)file->bytes);
	return free_tables(file);
}

static bool text_is(struct kv_text text, const char *s)
{
	return text.len == strlen(s) && !memcmp(text.at, s, text.len);
}

static int find_pair(const struct kv_gguf *file, const char *key, bool is_array,
		     const struct pair **ret)
{
	for (uint64_t i = 0; i < file->n_pairs; i++) {
		const struct pair *pair = &file->pairs[i];

		if (!text_is(pair->key, key))
			continue;
		if (pair->is_array != is_array)
			return kv_engine_error(-EINVAL, "GGUF: %s is %s array", key,
					       is_array ? "no" : "an");

		*ret = pair;
		return 0;
	}
	return kv_engine_error(-ENOENT, "GGUF: %s is missing", key);
}

/* Element @i of integers of any width; -EINVAL if it is none. Values are read unaligned. */
static int get_integer(const struct pair *pair, uint64_t i, int64_t *ret)
{
	size_t bytes = value_bytes(pair->type);
	const uint8_t *at = pair->at + i * bytes;
	uint64_t value = 0;

	switch (pair->type) {
	case KV_GGUF_BOOL:
	case KV_GGUF_U8:
	case KV_GGUF_U16:
	case KV_GGUF_U32:
	case KV_GGUF_U64:
		memcpy(&value, at, bytes); /* the file and our machines are little-endian */
		*ret = value > INT64_MAX ? INT64_MAX : (int64_t)value;
		return 0;
	case KV_GGUF_I8:
	case KV_GGUF_I16:
	case KV_GGUF_I32:
	case KV_GGUF_I64:
		memcpy(&value, at, bytes);
		*ret = (int64_t)(value << (64 - 8 * bytes)) >> (64 - 8 * bytes);
		return 0;
	default:
		return -EINVAL;
	}
}

int kv_gguf_u32(const struct kv_gguf *file, const char *key, uint32_t *ret)
{
	const struct pair *pair;
	int64_t value;
	int r;

	r = find_pair(file, key, false, &pair);
	if (r < 0)
		return r;
	if (get_integer(pair, 0, &value) < 0 || value < 0 || value > UINT32_MAX)
		return kv_engine_error(-EINVAL, "GGUF: %s must be an integer of 0..2^32-1", key);

	*ret = value;
	return 0;
}

int kv_gguf_f32(const struct kv_gguf *file, const char *key, float *ret)
{
	const struct pair *pair;
	double wide;
	int r;

	r = find_pair(file, key, false, &pair);
	if (r < 0)
		return r;

	if (pair->type == KV_GGUF_F32) {
		memcpy(ret, pair->at, sizeof(*ret));
		return 0;
	}
	if (pair->type == KV_GGUF_F64) {
		memcpy(&wide, pair->at, sizeof(wide));
		*ret = wide;
		return 0;
	}
	return kv_engine_error(-EINVAL, "GGUF: %s has type %u, a float is needed", key, pair->type);
}

static struct kv_text get_text(struct cursor *c)
{
	struct kv_text text = {"", 0};

	take_text(c, &text, "string"); /* can't fail: the same bytes were walked at opening */
	return text;
}

int kv_gguf_text(const struct kv_gguf *file, const char *key, struct kv_text *ret)
{
	const struct pair *pair;
	struct cursor c;
	int r;

	r = find_pair(file, key, false, &pair);
	if (r < 0)
		return r;
	if (pair->type != KV_GGUF_STRING)
		return kv_engine_error(-EINVAL, "GGUF: %s has type %u, a string is needed", key,
				       pair->type);

	c = (struct cursor){pair->at, pair->at, file->bytes + file->size};
	*ret = get_text(&c);
	return 0;
}

int kv_gguf_texts(const struct kv_gguf *file, const char *key, struct kv_text **ret, size_t *ret_n)
{
	const struct pair *pair;
	struct kv_text *texts;
	struct cursor c;
	int r;

	r = find_pair(file, key, true, &pair);
	if (r < 0)
		return r;
	if (pair->type != KV_GGUF_STRING)
		return kv_engine_error(-EINVAL, "GGUF: %s holds type %u, strings are needed", key,
				       pair->type);

	texts = calloc(pair->n + 1, sizeof(*texts));
	if (!texts)
		return -ENOMEM;

	c = (struct cursor){pair->at, pair->at, file->bytes + file->size};
	for (uint64_t i = 0; i < pair->n; i++)
		texts[i] = get_text(&c);
	*ret = texts;
	*ret_n = pair->n;
	return 0;
}

int kv_gguf_i32s(const struct kv_gguf *file, const char *key, int32_t **ret, size_t *ret_n)
{
	kv_cleanup(kv_freep) int32_t *values = NULL;
	const struct pair *pair;
	int64_t value;
	int r;

	r = find_pair(file, key, true, &pair);
	if (r < 0)
		return r;

	values = calloc(pair->n + 1, sizeof(*values));
	if (!values)
		return -ENOMEM;

	for (uint64_t i = 0; i < pair->n; i++) {
		if (get_integer(pair, i, &value) < 0 || value < INT32_MIN || value > INT32_MAX)
			return kv_engine_error(-EINVAL, "GGUF: %s must hold integers of 32 bits",
					       key);
		values[i] = value;
	}
	*ret = kv_steal(values);
	*ret_n = pair->n;
	return 0;
}

int kv_gguf_f32s(const struct kv_gguf *file, const char *key, float **ret, size_t *ret_n)
{
	const struct pair *pair;
	float *values;
	int r;

	r = find_pair(file, key, true, &pair);
	if (r < 0)
		return r;
	if (pair->type != KV_GGUF_F32)
		return kv_engine_error(-EINVAL, "GGUF: %s holds type %u, floats of 32 bits are needed",
				       key, pair->type);

	values = calloc(pair->n + 1, sizeof(*values));
	if (!values)
		return -ENOMEM;

	memcpy(values, pair->at, pair->n * sizeof(*values));
	*ret = values;
	*ret_n = pair->n;
	return 0;
}

int kv_gguf_tensor(const struct kv_gguf *file, const char *name, const struct kv_tensor **ret)
{
	for (uint64_t i = 0; i < file->n_tensors; i++) {
		const struct kv_tensor *t = &file->tensors[i];

		if (!text_is(t->name, name))
			continue;
		if (!t->data)
			return kv_engine_error(-ENOTSUP,
					       "GGUF: tensor %s has type %u; %s are supported",
					       name, t->type, kv_weight_names());

		*ret = t;
		return 0;
	}
	return kv_engine_error(-ENOENT, "GGUF: tensor %s is missing", name);
}

const void *kv_gguf_bytes(const struct kv_gguf *file, size_t *ret_size)
{
	*ret_size = file->size;
	return file->bytes;
}

void kv_gguf_digest(const struct kv_gguf *file, char ret[KV_GGUF_DIGEST_BYTES])
{
	XXH128_hash_t hash = XXH3_128bits(file->bytes, file->size);

	snprintf(ret, KV_GGUF_DIGEST_BYTES, "%016llx%016llx", (unsigned long long)hash.high64,
		 (unsigned long long)hash.low64);
}
