/* SPDX-License-Identifier: Apache-2.0 */
/* Models: from files and texts of any form that is known. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/internal/public.h"
#include "libclient/arch.h"

#define MAX_CONFIG_BYTES ((size_t)16 << 20)
#define MAX_GGUF_BYTES	 ((size_t)256 << 20) /* metadata, vocabularies included */

int kv_arch_new(uint32_t n_layers, const char *what, struct kv_arch **ret_model)
{
	struct kv_arch *model;

	if (!n_layers || n_layers > KV_ARCH_MAX_LAYERS)
		return kv_error(-EINVAL, "%s: %u layers given, 1..%u allowed", what, n_layers,
				KV_ARCH_MAX_LAYERS);
	model = calloc(1, sizeof(*model));
	if (!model)
		return kv_no_memory();
	model->layers = calloc(n_layers, sizeof(*model->layers));
	if (!model->layers) {
		free(model);
		return kv_no_memory();
	}
	model->n_layers = n_layers;
	model->dtype = KV_BF16;
	model->state_dtype = KV_F32;
	for (uint32_t i = 0; i < n_layers; i++)
		model->layers[i].shares = -1;
	*ret_model = model;
	return 0;
}

KV_PUBLIC struct kv_arch *kv_arch_free(struct kv_arch *model)
{
	if (!model)
		return NULL;
	free(model->layers);
	free(model);
	return NULL;
}

bool kv_json_has(const json_t *object, const char *key)
{
	const json_t *v = json_object_get(object, key);

	return v && !json_is_null(v);
}

int kv_json_u32(const json_t *object, const char *key, int64_t otherwise, uint32_t *ret)
{
	const json_t *v = json_object_get(object, key);

	if (!v || json_is_null(v)) {
		if (otherwise < 0)
			return kv_error(-EINVAL, "%s: missing, a number is needed", key);
		*ret = (uint32_t)otherwise;
		return 0;
	}
	if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > 1 << 28)
		return kv_error(-EINVAL, "%s: a whole number in 0..2^28 is needed", key);
	*ret = (uint32_t)json_integer_value(v);
	return 0;
}

int kv_json_u32_of(const json_t *object, const char *key, const char *or_key, int64_t otherwise,
		   uint32_t *ret)
{
	if (kv_json_has(object, key) || !kv_json_has(object, or_key))
		return kv_json_u32(object, key, otherwise, ret);
	return kv_json_u32(object, or_key, otherwise, ret);
}

const char *kv_json_text(const json_t *object, const char *key, const char *otherwise)
{
	const json_t *v = json_object_get(object, key);

	return json_is_string(v) ? json_string_value(v) : otherwise;
}

uint8_t kv_json_dtype(const char *name)
{
	static const struct {
		const char *name;
		uint8_t dtype;
	} names[] = {
		{"bfloat16", KV_BF16}, {"bf16", KV_BF16},
		{"float16", KV_F16},   {"half", KV_F16},
		{"f16", KV_F16},       {"float32", KV_F32},
		{"float", KV_F32},     {"f32", KV_F32},
		{"fp8", KV_F8_E4M3},   {"float8_e4m3fn", KV_F8_E4M3},
	};

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (!strcmp(names[i].name, name))
			return names[i].dtype;
	return 0;
}

int kv_arch_named(int r, const char *what)
{
	char why[KV_ERROR_BYTES];

	if (r >= 0 || r == -ENOMEM || !strncmp(kv_error_text(), what, strlen(what)))
		return r;
	snprintf(why, sizeof(why), "%s", kv_error_text());
	return kv_error(r, "%s: %s", what, why);
}

KV_PUBLIC int kv_arch_parse(const char *text, size_t len, const char *what,
			    struct kv_arch **ret_model)
{
	json_error_t where;
	json_t *object = json_loadb(text, len, JSON_REJECT_DUPLICATES, &where);
	int r;

	if (!object)
		return kv_error(-EINVAL, "%s: line %d: %s", what, where.line, where.text);
	if (!json_is_object(object))
		r = kv_error(-EINVAL, "%s: holds no JSON object", what);
	else if (kv_json_has(object, "kvcached_model"))
		r = kv_arch_from_json(object, what, ret_model);
	else
		r = kv_arch_from_hf(object, what, ret_model);
	json_decref(object);
	return kv_arch_named(r, what);
}

static int read_file(int fd, size_t size, const char *path, char **ret_text)
{
	kv_cleanup(kv_freep) char *text = malloc(size + 1);
	size_t n = 0;

	if (!text)
		return kv_no_memory();
	while (n < size) {
		ssize_t got = read(fd, text + n, size - n);

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return kv_error(-errno, "%s: %s", path, strerror(errno));
		if (!got)
			return kv_error(-EIO, "%s: shrank while it was read", path);
		n += (size_t)got;
	}
	text[size] = 0;
	*ret_text = kv_steal(text);
	return 0;
}

KV_PUBLIC int kv_arch_read(const char *path, struct kv_arch **ret_model)
{
	kv_cleanup(kv_freep) char *text = NULL;
	kv_cleanup(kv_closep) int fd = -1;
	char inside[4096];
	struct stat st;
	size_t size, limit;
	char magic[4] = "";
	int r;

	if (!stat(path, &st) && S_ISDIR(st.st_mode)) {
		if ((size_t)snprintf(inside, sizeof(inside), "%s/config.json", path) >=
		    sizeof(inside))
			return kv_error(-ENAMETOOLONG, "%s: too long", path);
		path = inside;
	}
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st))
		return kv_error(-errno, "%s: %s", path, strerror(errno));
	if (!S_ISREG(st.st_mode))
		return kv_error(-EINVAL, "%s: is no file", path);
	if (pread(fd, magic, sizeof(magic), 0) < 0)
		return kv_error(-errno, "%s: %s", path, strerror(errno));
	size = (size_t)st.st_size;
	limit = memcmp(magic, "GGUF", 4) ? MAX_CONFIG_BYTES : MAX_GGUF_BYTES;
	if (size > limit && limit == MAX_CONFIG_BYTES)
		return kv_error(-EFBIG, "%s: %zu bytes, a config has at most %zu", path, size,
				limit);
	r = read_file(fd, size < limit ? size : limit, path, &text);
	if (r)
		return r;
	if (limit == MAX_GGUF_BYTES)
		return kv_arch_parse_gguf(text, size < limit ? size : limit, path, ret_model);
	return kv_arch_parse(text, size, path, ret_model);
}
